// The order in which ranks have the positions of a batch: puts tensors in it, and tells whether they are.
#pragma once

#include <dtensor/collectives/pieces.hpp>
#include <dtensor/parallel/context/agreement.hpp>
#include <dtensor/parallel/context/orders.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <list>
#include <set>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Of one length.
struct LengthOrder {
  int64_t length = 0;
  std::vector<Positions> rows;  // of each rank
  at::Tensor order, restored;   // plain, int64 [length]
  std::map<std::string, std::shared_ptr<const ContextPlan>> plans{};
};

class BatchOrder {
 public:
  // `order`: see rows_by_name(); `mask`: whose work `balanced` evens out.
  BatchOrder(std::string order, AttentionMask mask, DeviceMesh mesh)
      : order_(std::move(order)), mask_(std::move(mask)), mesh_(std::move(mesh)), ranks_(static_cast<int>(mesh_.size())) {}

  // Documents of the next batches, and rows of ranks that are given rather than found. Forgets what was ordered.
  void pack(std::vector<PackedSequence> sequences, std::vector<Positions> rows);

  const std::vector<PackedSequence>& sequences() const { return sequences_; }
  const std::vector<Positions>& given_rows() const { return rows_; }
  bool is_by_position() const { return order_ == "contiguous" && rows_.empty(); }
  std::string name() const { return rows_.empty() ? order_ : "the given"; }

  // Found at the first call. Only the last few lengths are remembered: a reference holds until the next length. The first call of a length
  // is one of all ranks where a predicate is asked for its work: where it throws on one, all throw.
  LengthOrder& of(int64_t length);
  // Whether something of this length was put in order.
  bool was_used(int64_t length) const { return used_.contains(length); }

  // See ContextParallel.
  at::Tensor order(const at::Tensor& x, int64_t dim);
  at::Tensor restore(const at::Tensor& x, int64_t dim);
  void check(const at::Tensor& positions, int64_t dim);

 private:
  static constexpr size_t kLengths = 16;

  std::vector<Positions> rows_of(int64_t length) const;

  const std::string order_;
  const AttentionMask mask_;
  const DeviceMesh mesh_;
  const int ranks_;
  std::vector<PackedSequence> sequences_;
  std::vector<Positions> rows_;
  std::list<LengthOrder> known_;                                   // the last one used first
  std::set<int64_t> used_, asked_;                                 // lengths: put in order; for which a predicate has said the work
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> results_;  // of order()
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline void BatchOrder::pack(std::vector<PackedSequence> sequences, std::vector<Positions> rows) {
  for (const auto& sequence : sequences) {
    require(sequence.length() == sequences[0].length(), "ContextParallel",
            "got documents of {} and {} positions together; expected one length", sequences[0].length(), sequence.length());
  }
  if (!rows.empty()) {
    require(static_cast<int>(rows.size()) == ranks_, "ContextParallel", "got rows of {} ranks; expected those of {}", rows.size(), ranks_);
    ContextPlan(AttentionMask::full(), sequences, rows);  // that they are a permutation
  }
  sequences_ = std::move(sequences);
  rows_ = std::move(rows);
  known_.clear();
  used_.clear();
  asked_.clear();
}

// Each rank's share is as long as Shard makes it.
inline std::vector<Positions> BatchOrder::rows_of(int64_t length) const {
  const auto sequence = sequences_.empty() ? PackedSequence(length) : sequences_[0];
  require(sequence.length() == length, "ContextParallel", "got a sequence of {} positions, and documents of {} together", length,
          sequence.length());
  if (!rows_.empty()) return rows_;
  Positions all;
  for (const auto& own : rows_by_name(order_, mask_, sequence, ranks_)) all.insert(all.end(), own.begin(), own.end());
  std::vector<Positions> rows;
  for (int64_t begin = 0, r = 0; r < ranks_; ++r) {
    const auto share = cut_length(length, shard(0), ranks_, r);
    rows.emplace_back(all.begin() + begin, all.begin() + begin + share);
    std::ranges::sort(rows.back());
    begin += share;
  }
  return rows;
}

inline LengthOrder& BatchOrder::of(int64_t length) {
  const auto found = std::ranges::find(known_, length, &LengthOrder::length);
  if (found != known_.end()) {
    known_.splice(known_.begin(), known_, found);
    return known_.front();
  }
  const NoSpmd plain;
  LengthOrder made{length, {}, {}, {}};
  const auto find_rows = [&] { made.rows = rows_of(length); };
  if (order_ == "balanced" && mask_.predicate() && rows_.empty() && !asked_.contains(length)) {
    on_all_or_none(mesh_, fmt::format("the predicate of the mask '{}'", mask_.name()), find_rows);
    asked_.insert(length);
  } else {
    find_rows();
  }
  Positions all;
  for (const auto& own : made.rows) all.insert(all.end(), own.begin(), own.end());
  made.order = at::tensor(all, at::kLong);
  made.restored = made.order.argsort();
  if (known_.size() == kLengths) known_.pop_back();
  known_.push_front(std::move(made));
  return known_.front();
}

inline at::Tensor BatchOrder::order(const at::Tensor& x, int64_t dim) {
  require(-x.dim() <= dim && dim < x.dim(), "ContextParallel", "got dim {} of a tensor of {} dims", dim, x.dim());
  std::erase_if(results_, [](const auto& weak) { return weak.expired(); });
  const bool is_result = std::ranges::any_of(results_, [&](const auto& weak) { return weak.lock().get() == x.unsafeGetTensorImpl(); });
  require(!is_result, "ContextParallel", "the tensor is in this region's order already; hint: order() each batch once");
  const auto* layout = find_layout(x);
  const auto along = dim < 0 ? dim + x.dim() : dim;
  const bool is_cut = layout && std::ranges::any_of(layout->placements(), [&](const Placement& p) { return p.is_shard(along); });
  require(!is_cut, "ContextParallel", "the tensor lies on a mesh already, {}, cut along dim {}; hint: order() before it is distributed",
          layout ? layout->str() : "", along);
  const NoSpmd plain;
  const auto& known = of(x.size(dim));
  used_.insert(known.length);
  auto result = (is_dtensor(x) ? full_tensor(x) : x).index_select(dim, known.order.to(x.device()));
  results_.emplace_back(result.getIntrusivePtr());
  return result;
}

inline at::Tensor BatchOrder::restore(const at::Tensor& x, int64_t dim) {
  dtensor::detail::check_plain("ContextParallel", x, "what is to be restored");
  require(-x.dim() <= dim && dim < x.dim(), "ContextParallel", "got dim {} of a tensor of {} dims", dim, x.dim());
  const NoSpmd plain;
  return x.index_select(dim, of(x.size(dim)).restored.to(x.device()));
}

inline void BatchOrder::check(const at::Tensor& positions, int64_t dim) {
  require(-positions.dim() <= dim && dim < positions.dim() && positions.scalar_type() == at::kLong, "ContextParallel",
          "got positions {} of {}, along dim {}; expected int64 with such a dim", dtensor::detail::str_of(positions.sizes()),
          c10::toString(positions.scalar_type()), dim);
  const NoSpmd plain;
  const auto& known = of(positions.size(dim));
  const auto whole = full_tensor(positions).to(at::kCPU).movedim(dim, -1);
  const auto are = [&](const at::Tensor& expected) { return whole.eq(expected).all().item<bool>(); };
  if (are(known.order)) return;
  const char* hint = are(at::arange(known.length))                   ? "it was never ordered: give all that goes by position to order()"
                     : are(known.order.index_select(0, known.order)) ? "it was ordered twice: order() each batch once"
                                                                     : "order() it in this region, after pack()";
  const auto other = whole.ne(known.order).reshape({-1, known.length}).any(0).nonzero()[0].item<int64_t>();
  fail("ContextParallel", "row {} of the batch's {} has position {}; expected {}, by {} order; hint: {}", other, known.length,
       whole.reshape({-1, known.length}).select(1, other)[0].item<int64_t>(), known.order[other].item<int64_t>(), name(), hint);
}

}  // namespace dtensor::context

#pragma GCC visibility pop
