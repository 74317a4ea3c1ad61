// What goes from one stage to the next, and the gradients that come back: how tensors lie on the way.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/channel.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

using TensorVector = std::vector<at::Tensor>;
using Numbers = std::vector<int64_t>;

// A tensor as a stage sends it: where it lies here and there, in the order of its dims in memory.
struct Sent {
  LayoutPtr before, after;  // on the sender's mesh, and on the receiver's
  Numbers order;            // after.sizes[i] are the tensor's sizes[order[i]]
  bool tracked = false;     // whether its gradient comes back
  bool values = true;       // false: a dry run's
};

namespace detail {

inline Numbers to_numbers(const Sent& sent) {
  const auto& layout = *sent.before;
  Numbers numbers{static_cast<int64_t>(layout.dtype()), sent.tracked, sent.values, layout.ndim()};
  numbers.insert(numbers.end(), layout.sizes().begin(), layout.sizes().end());
  numbers.insert(numbers.end(), sent.order.begin(), sent.order.end());
  for (const auto& p : layout.placements()) {
    numbers.insert(numbers.end(), {static_cast<int64_t>(p.kind), static_cast<int64_t>(p.op), p.dim, p.split, p.unit, p.offset});
    const auto shares = p.shares ? p.shares->parts() : c10::ArrayRef<int64_t>();
    numbers.push_back(static_cast<int64_t>(shares.size()));
    numbers.insert(numbers.end(), shares.begin(), shares.end());
  }
  return numbers;
}

// Placements of a tensor on another mesh: those of the dimensions of the same names. A ragged one has a share for each rank, and stays only
// where there are as many.
inline Placements placements_on(const DeviceMesh& to, const Layout& layout) {
  Placements placements(to.ndim(), replicate());
  const auto& from = layout.mesh();
  for (int64_t m = 0; m < to.ndim(); ++m) {
    for (int64_t f = 0; f < from.ndim(); ++f) {
      if (from.names()[f] == to.names()[m] && (from.size(f) == to.size(m) || layout.placements()[f].shares == nullptr))
        placements[m] = layout.placements()[f];
    }
  }
  return placements;
}

inline Sent from_numbers(const int64_t*& next, const DeviceMesh& from, const DeviceMesh& to) {
  const auto take = [&] { return *next++; };
  const auto list = [&](int64_t count) {
    Numbers numbers(next, next + count);
    next += count;
    return numbers;
  };
  Sent sent;
  const auto dtype = static_cast<c10::ScalarType>(take());
  sent.tracked = take() != 0;
  sent.values = take() != 0;
  const auto dims = take();
  const auto sizes = list(dims);
  sent.order = list(dims);
  Placements placements;
  for (int64_t m = 0; m < from.ndim(); ++m) {
    Placement p;
    p.kind = static_cast<PlacementKind>(take()), p.op = static_cast<ReduceOp>(take()), p.dim = static_cast<int16_t>(take());
    p.split = static_cast<int32_t>(take()), p.unit = take(), p.offset = take();
    if (const auto shares = list(take()); !shares.empty()) p.shares = Shares::of(shares);
    placements.push_back(p);
  }
  sent.before = Layout::get(from, placements, sizes, dtype);
  sent.after = Layout::get(to, placements_on(to, *sent.before), sizes, dtype);
  return sent;
}

inline Numbers to_numbers(const std::vector<Sent>& list) {
  Numbers numbers{static_cast<int64_t>(list.size())};
  for (const auto& sent : list) {
    const auto more = to_numbers(sent);
    numbers.insert(numbers.end(), more.begin(), more.end());
  }
  return numbers;
}

inline std::vector<Sent> read_sent(const Numbers& numbers, const DeviceMesh& from, const DeviceMesh& to) {
  const int64_t* next = numbers.data();
  std::vector<Sent> list(*next++, Sent{});
  for (auto& sent : list) sent = from_numbers(next, from, to);
  return list;
}

// 1 for each tensor that is there, 0 for others.
inline Numbers which_are_there(const TensorVector& tensors) {
  Numbers flags;
  for (const auto& tensor : tensors) flags.push_back(tensor.defined());
  return flags;
}

inline Numbers inverse(const Numbers& order) {
  Numbers result(order.size());
  for (size_t i = 0; i < order.size(); ++i) result[order[i]] = static_cast<int64_t>(i);
  return result;
}

// How a stage's output travels: with its dims in the order of memory, nothing pending.
inline Sent way_of(const at::Tensor& output, const DeviceMesh& to) {
  Sent sent;
  sent.tracked = output.requires_grad();
  sent.values = !DTensor(output.detach()).to_local().is_meta();
  const auto row_major = dtensor::contiguous_strides(output.sizes());
  const auto order = memory_order(output.is_non_overlapping_and_dense() ? output.strides() : c10::IntArrayRef(row_major));
  sent.order.assign(order.begin(), order.end());
  const auto& layout = *find_layout(output.detach().permute(sent.order));
  sent.before = Layout::get(layout.mesh(), without_partial(layout.placements()), layout.sizes(), layout.dtype());
  sent.after = Layout::get(to, placements_on(to, *sent.before), layout.sizes(), layout.dtype());
  return sent;
}

inline std::vector<Sent> sent_to(const DeviceMesh& to, const TensorVector& tensors) {
  std::vector<Sent> result;
  for (const auto& tensor : tensors) result.push_back(way_of(tensor, to));
  return result;
}

// As the other end sees it, of a tensor that lies alike on both meshes.
inline Sent reversed(Sent sent) {
  std::swap(sent.before, sent.after);
  return sent;
}

// This rank's shard of a tensor that is to lie so.
inline at::Tensor local_of(const at::Tensor& tensor, const Sent& sent, const Layout& layout) {
  const auto moved = redistribute(tensor.detach().permute(sent.order), layout.placements());
  return DTensor(moved).to_local().contiguous();
}

}  // namespace detail

// Values that a stage waits for: the gradients of its outputs, or its inputs.
struct Arriving {
  std::vector<Sent> sent;
  std::vector<comm::Async> locals;
  bool backward = false;

  // Waits. Tensors on this rank's mesh.
  TensorVector take() {
    TensorVector tensors;
    for (size_t i = 0; i < sent.size(); ++i) {
      const auto& layout = *(backward ? sent[i].before : sent[i].after);
      if (!locals[i].tensor.defined()) {
        tensors.emplace_back();
        continue;
      }
      const auto local = std::move(locals[i]).get();
      const auto tensor = from_local(local, layout.mesh(), layout.placements(), layout.sizes());
      tensors.push_back(tensor.tensor().permute(detail::inverse(sent[i].order)));
    }
    return tensors;
  }
};

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
