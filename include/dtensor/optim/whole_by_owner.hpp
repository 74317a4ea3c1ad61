// Work that needs whole tensors, for tensors that are sharded: gathers each tensor on one rank of its mesh (its owner), works on it there,
// and sends the shards of the result back.
#pragma once

#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/spread.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::optim {

struct OwnedWork {
  at::Tensor tensor;    // a DTensor, not Partial
  double cost = 1;      // divides the work among the ranks
  at::Tensor result{};  // this rank's shard, plain, of the sizes of its shard of `tensor`
};

// Fills in the results of work on one mesh. function(i, whole) returns a plain tensor of the sizes of `whole`; it runs on one rank for each
// i. Tensors are sent in `dtype`, and results have it. Communicates two all_to_alls, however many tensors there are; none on a mesh of one
// rank.
void work_on_whole(std::vector<OwnedWork>& work, at::ScalarType dtype,
                   const std::function<at::Tensor(size_t i, const at::Tensor& whole)>& function);

// Which of `ranks` ranks does each piece of work. The most expensive piece is assigned first, each to the rank that has the least work so
// far. The same on all ranks.
std::vector<int64_t> share_out(const std::vector<double>& costs, int64_t ranks);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

using Coordinate = std::vector<int64_t>;

inline int64_t shard_numel(const Layout& layout, const Coordinate& at) {
  if (layout.is_flat()) return layout.flat_shard(at).length();
  int64_t count = 1;
  for (const auto size : layout.local_sizes_before(layout.mesh().ndim(), at)) count *= size;
  return count;
}

// The elements of a whole, contiguous tensor that the rank at a coordinate holds, as views, in the order of its part.
inline std::vector<at::Tensor> pieces(const at::Tensor& whole, const Layout& layout, const Coordinate& at) {
  const auto boxes = layout.boxes(at);
  if (boxes.empty()) return {};
  if (boxes.size() == 1) {
    auto box = whole;
    for (size_t d = 0; d < boxes[0].size(); ++d) box = box.narrow(static_cast<int64_t>(d), boxes[0][d].begin, boxes[0][d].length());
    return {box};
  }
  std::vector<at::Tensor> runs;
  const auto flat = whole.view(-1);
  for (const auto& run : layout.runs(at)) runs.push_back(flat.narrow(0, run.begin, run.length()));
  return runs;
}

class Exchange {
 public:
  Exchange(std::vector<OwnedWork>& work, at::ScalarType dtype) : work_(work), mesh_(DTensor(work[0].tensor).mesh()), dtype_(dtype) {
    std::vector<int64_t> dims(mesh_.ndim());
    std::iota(dims.begin(), dims.end(), 0);
    group_ = &mesh_.communicator(dims);
    for (int64_t r = 0; r < mesh_.size(); ++r) coordinates_.push_back(mesh_.coordinate_of(r));
    std::vector<double> costs;
    for (const auto& item : work) costs.push_back(item.cost);
    owners_ = share_out(costs, mesh_.size());
  }

  bool is_mine(size_t i) const { return owners_[i] == group_->rank(); }

  // Empty tensors for what others own.
  std::vector<at::Tensor> gather() const {
    std::vector<at::Tensor> to_send;
    std::vector<int64_t> send(mesh_.size(), 0), receive(mesh_.size(), 0);
    for (int64_t owner = 0; owner < mesh_.size(); ++owner) {
      for (size_t i = 0; i < work_.size(); ++i) {
        if (owners_[i] != owner || !sends(i, group_->rank())) continue;
        to_send.push_back(dtensor::detail::plain_local(work_[i].tensor).to(dtype_).reshape({-1}));
        send[owner] += to_send.back().numel();
      }
    }
    for (int64_t r = 0; r < mesh_.size(); ++r) {
      for (size_t i = 0; i < work_.size(); ++i) {
        if (is_mine(i) && sends(i, r)) receive[r] += shard_numel(layout(i), coordinates_[r]);
      }
    }
    const auto received = group_->all_to_all(joined(to_send), send, receive).get();
    return assemble(received);
  }

  void scatter(const std::vector<at::Tensor>& results) {
    std::vector<at::Tensor> to_send;
    std::vector<int64_t> send(mesh_.size(), 0), receive(mesh_.size(), 0);
    for (int64_t r = 0; r < mesh_.size(); ++r) {
      for (size_t i = 0; i < work_.size(); ++i) {
        if (!is_mine(i)) continue;
        for (const auto& piece : pieces(results[i], layout(i), coordinates_[r])) to_send.push_back(piece.reshape({-1}));
        send[r] += shard_numel(layout(i), coordinates_[r]);
      }
    }
    for (size_t i = 0; i < work_.size(); ++i) receive[owners_[i]] += shard_numel(layout(i), coordinates_[group_->rank()]);
    const auto received = group_->all_to_all(joined(to_send), send, receive).get();
    int64_t begin = 0;
    for (int64_t owner = 0; owner < mesh_.size(); ++owner) {
      for (size_t i = 0; i < work_.size(); ++i) {
        if (owners_[i] != owner) continue;
        const auto count = shard_numel(layout(i), coordinates_[group_->rank()]);
        work_[i].result = received.narrow(0, begin, count).view(layout(i).local_sizes());
        begin += count;
      }
    }
  }

 private:
  const Layout& layout(size_t i) const { return DTensor(work_[i].tensor).layout(); }

  // Of ranks that have the same part, the one that is where the owner is.
  bool sends(size_t i, int64_t rank) const {
    const auto placements = layout(i).placements();
    for (int64_t m = 0; m < mesh_.ndim(); ++m) {
      if (placements[m].is_replicate() && coordinates_[rank][m] != coordinates_[owners_[i]][m]) return false;
    }
    return true;
  }

  at::Tensor joined(const std::vector<at::Tensor>& flat) const {
    return flat.empty() ? at::empty({0}, at::TensorOptions(dtype_).device(dtensor::detail::plain_local(work_[0].tensor).device()))
                        : at::cat(flat);
  }

  std::vector<at::Tensor> assemble(const at::Tensor& received) const {
    std::vector<at::Tensor> whole(work_.size());
    for (size_t i = 0; i < work_.size(); ++i) {
      if (is_mine(i)) whole[i] = at::empty(layout(i).sizes(), received.options());
    }
    int64_t begin = 0;
    for (int64_t r = 0; r < mesh_.size(); ++r) {
      for (size_t i = 0; i < work_.size(); ++i) {
        if (!is_mine(i) || !sends(i, r)) continue;
        for (auto& piece : pieces(whole[i], layout(i), coordinates_[r])) {
          piece.copy_(received.narrow(0, begin, piece.numel()).view(piece.sizes()));
          begin += piece.numel();
        }
      }
    }
    return whole;
  }

  std::vector<OwnedWork>& work_;
  DeviceMesh mesh_;
  at::ScalarType dtype_;
  comm::Communicator* group_;
  std::vector<Coordinate> coordinates_;  // of each rank of the mesh
  std::vector<int64_t> owners_;          // of each tensor
};

}  // namespace detail

inline std::vector<int64_t> share_out(const std::vector<double>& costs, int64_t ranks) {
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<double> load(ranks, 0);
  std::vector<int64_t> owners(costs.size());
  for (const auto i : order) {
    const auto least = std::ranges::min_element(load);
    *least += costs[i];
    owners[i] = least - load.begin();
  }
  return owners;
}

inline void work_on_whole(std::vector<OwnedWork>& work, at::ScalarType dtype,
                          const std::function<at::Tensor(size_t, const at::Tensor&)>& function) {
  if (work.empty()) return;
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const bool shards_are_whole =
      std::ranges::none_of(work, [](const OwnedWork& item) { return DTensor(item.tensor).layout().is_flat(); });
  if (DTensor(work[0].tensor).mesh().size() == 1 && shards_are_whole) {
    for (size_t i = 0; i < work.size(); ++i) work[i].result = function(i, dtensor::detail::plain_local(work[i].tensor).to(dtype));
    return;
  }
  detail::Exchange exchange(work, dtype);
  auto whole = exchange.gather();
  for (size_t i = 0; i < work.size(); ++i) {
    if (exchange.is_mine(i)) whole[i] = function(i, whole[i]).contiguous();
  }
  exchange.scatter(whole);
}

}  // namespace dtensor::optim

#pragma GCC visibility pop
