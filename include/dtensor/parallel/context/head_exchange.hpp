// Rows of all heads for all rows of some heads, and back, among the ranks of a group.
#pragma once

#include <dtensor/parallel/context/method.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context::detail {

// The heads that each rank works on.
class HeadShares {
 public:
  HeadShares(int64_t heads, int64_t key_heads, int ranks) : heads_(heads), group_(heads / std::max<int64_t>(key_heads, 1)), ranks_(ranks) {}

  Interval heads(int rank) const { return {heads_ * rank / ranks_, heads_ * (rank + 1) / ranks_}; }
  Interval key_heads(int rank) const {
    const auto own = heads(rank);
    return own.length() == 0 ? Interval{0, 0} : Interval{own.begin / group_, (own.end + group_ - 1) / group_};
  }

  // Calls f(query heads, key heads), counted from the first of this rank's, for what one call of the kernel can do: a whole number of heads
  // for each key head.
  template <class F>
  void for_each_group(int rank, const F& f) const {
    const auto own = heads(rank), keys = key_heads(rank);
    if (own.length() == 0) return;
    if (own.begin % group_ == 0 && own.end % group_ == 0) return f(Interval{0, own.length()}, Interval{0, keys.length()});
    for (auto h = keys.begin; h < keys.end; ++h) {
      const Interval shared{std::max(own.begin, h * group_) - own.begin, std::min(own.end, (h + 1) * group_) - own.begin};
      f(shared, Interval{h - keys.begin, h - keys.begin + 1});
    }
  }

 private:
  const int64_t heads_, group_, ranks_;
};

inline at::Tensor heads_in(const at::Tensor& x, const Interval& heads) { return x.narrow(1, heads.begin, heads.length()); }

// Which heads of a tensor each rank has.
using Share = std::function<Interval(int rank)>;

// Tensors [batch, heads, rows, ...] between this rank's rows of all heads and all rows of this rank's heads.
class HeadExchange {
 public:
  // `rows`, int64: where each rank's rows are among those of all ranks of the group, `all_rows`.
  HeadExchange(comm::Communicator& group, std::vector<at::Tensor> rows, int64_t all_rows)
      : group_(group), rows_(std::move(rows)), all_rows_(all_rows) {}

  // From [.., all heads, this rank's rows, ..] to [.., this rank's heads, all rows, ..], all tensors in one call.
  std::vector<at::Tensor> to_heads(const std::vector<at::Tensor>& tensors, const std::vector<Share>& shares) const {
    std::vector<at::Tensor> pieces;
    Lengths send(group_.size(), 0), recv(group_.size(), 0);
    for (int r = 0; r < group_.size(); ++r) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        pieces.push_back(heads_in(tensors[i], shares[i](r)).reshape({-1}));
        send[r] += pieces.back().numel();
        recv[r] += elements_of(tensors[i], shares[i](group_.rank()).length(), rows_of(r));
      }
    }
    const auto flat = exchange(at::cat(pieces), send, recv);
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < tensors.size(); ++i) {
      results.push_back(at::empty(sizes_of(tensors[i], shares[i](group_.rank()).length(), all_rows_), tensors[i].options()));
    }
    int64_t begin = 0;
    for (int r = 0; r < group_.size(); ++r) {
      for (auto& result : results) {
        const auto sizes = sizes_of(result, result.size(1), rows_of(r));
        const auto elements = c10::multiply_integers(sizes);
        result.index_copy_(2, rows(r, flat.device()), flat.narrow(0, begin, elements).view(sizes));
        begin += elements;
      }
    }
    return results;
  }

  // And back. Heads that several ranks have are added up, in the order of ranks, into `into` [.., all heads, this rank's rows, ..].
  void to_rows(const std::vector<at::Tensor>& tensors, const std::vector<Share>& shares, const std::vector<at::Tensor>& into) const {
    std::vector<at::Tensor> pieces;
    Lengths send(group_.size(), 0), recv(group_.size(), 0);
    for (int r = 0; r < group_.size(); ++r) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        pieces.push_back(tensors[i].index_select(2, rows(r, tensors[i].device())).reshape({-1}));
        send[r] += pieces.back().numel();
        recv[r] += elements_of(into[i], shares[i](r).length(), into[i].size(2));
      }
    }
    const auto flat = exchange(at::cat(pieces), send, recv);
    int64_t begin = 0;
    for (int r = 0; r < group_.size(); ++r) {
      for (size_t i = 0; i < into.size(); ++i) {
        const auto place = heads_in(into[i], shares[i](r));
        place.add_(flat.narrow(0, begin, place.numel()).view(place.sizes()));
        begin += place.numel();
      }
    }
  }

 private:
  static std::vector<int64_t> sizes_of(const at::Tensor& like, int64_t heads, int64_t rows) {
    auto sizes = like.sizes().vec();
    sizes[1] = heads;
    sizes[2] = rows;
    return sizes;
  }
  static int64_t elements_of(const at::Tensor& like, int64_t heads, int64_t rows) {
    return c10::multiply_integers(sizes_of(like, heads, rows));
  }
  at::Tensor rows(int rank, c10::Device device) const { return rows_[rank].to(device); }
  at::Tensor exchange(const at::Tensor& flat, const Lengths& send, const Lengths& recv) const {
    auto async = group_.all_to_all(flat, send, recv);
    if (async.work) async.work->wait();
    return async.tensor;
  }

  int64_t rows_of(int rank) const { return rows_[rank].numel(); }

  comm::Communicator& group_;
  const std::vector<at::Tensor> rows_;
  const int64_t all_rows_;
};

}  // namespace dtensor::context::detail

#pragma GCC visibility pop
