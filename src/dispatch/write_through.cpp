#include "src/dispatch/write_through.hpp"

#include "src/dispatch/explicit.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include <algorithm>

namespace dtensor::dispatch {

namespace {

Placements replicated(const Layout& layout) { return Placements(layout.mesh().ndim(), replicate()); }

size_t bytes_of_number(const Layout& layout) {
  return c10::elementSize(layout.dtype()) / (at::isComplexType(layout.dtype()) ? 2 : 1);
}

void add(const OpInfo& info, int argument, int element, DTensorImpl& impl, std::vector<Written>& all) {
  before_write(impl.local());
  count_write(impl.local());
  if (!has_copied_views(impl.local())) [[likely]]
    return;
  wait_for_all_readers();  // a move under way has memory too, on one rank longer than on another
  auto others = copies_of(impl.local());
  if (others.empty()) return;
  const auto& layout = impl.layout();
  for (const auto& other : others) {
    require(other.place_known && bytes_of_number(*other.layout) == bytes_of_number(*layout), info.name,
            "writes to {}, of which a view with numbers of other bytes, or of an operator without a rule, had to be copied, {}; hint: let "
            "go of the view, or redistribute the tensor first so that it need not be moved",
            layout->str(), other.layout->str());
  }
  for (const auto& earlier : all) {
    const bool twice =
        std::ranges::any_of(earlier.others, [&](const Held& other) { return other.local.is_alias_of(impl.local()); });
    require(!twice, info.name, "writes to a tensor and to a view of it that had to be copied, {}; hint: write to one after the other",
            layout->str());
  }
  const auto whole = layout->with(replicated(*layout));
  if (layout != whole) check_explicit(info, argument, element, "gathered for its views", *layout, *whole);
  all.push_back({at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&impl)), std::move(others)});
}

// Numbers as they lie in memory, a complex one as two.
at::Tensor as_real(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

// The numbers of one device, or of a memory of that sign, from the other: `places` tells the imaginary ones, which are the odd.
at::Tensor signed_by(Sign sign, const at::Tensor& numbers, const at::Tensor& places) {
  auto result = sign.negated ? numbers.neg() : numbers;
  return sign.conjugated ? at::where(places.remainder(2).eq(1), result.neg(), result) : result;
}

// Where on one device each number of this rank's shard of a tensor would lie.
at::Tensor places(const Layout& layout, int64_t offset, at::Device device) {
  const auto longs = at::device(device).dtype(at::kLong);
  auto places = at::full({}, offset, longs);
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    auto along = at::empty({0}, longs);
    for (const auto& piece : layout.intervals(d, layout.mesh().coordinate())) {
      along = at::cat({along, at::arange(piece.begin, piece.end, longs)});
    }
    places = places.unsqueeze(-1).add(along, layout.strides()[d]);
  }
  if (layout.is_flat()) {
    const auto part = layout.flat_shard(layout.mesh().coordinate());
    places = places.permute(memory_order(layout.strides())).reshape({-1}).narrow(0, part.begin, part.length()).view(layout.local_sizes());
  }
  return at::isComplexType(layout.dtype()) ? places.mul(2).unsqueeze(-1).add(at::arange(2, longs)) : places;
}

// A tensor that was written, whole on every rank, and which of its numbers lies where.
class Source {
 public:
  explicit Source(DTensorImpl& tensor) : mesh_(tensor.layout()->mesh()) {
    const auto whole = tensor.layout()->with(replicated(*tensor.layout()));
    const auto values = move_local(dtensor::detail::memory_of(tensor.local()), tensor.layout(), whole).get();
    values_ = as_real(values.contiguous()).reshape({-1});
    if (is_empty()) return;
    const auto at = places(*whole, tensor.storage_offset(), values.device()).reshape({-1});
    values_ = signed_by(sign_of(tensor.local()), values_, at);
    begin_ = at.min().item<int64_t>();
    number_at_ = at::full({at.max().item<int64_t>() - begin_ + 1}, -1, at.options());
    number_at_.index_copy_(0, at.sub(begin_), at::arange(at.numel(), at.options()));
  }

  bool is_empty() const { return values_.numel() == 0; }

  void copy_to(const Held& other) const {
    auto local = as_real(other.local);
    auto at = places(*other.layout, other.offset, local.device()).sub(begin_);
    for (int64_t d = 0; d < local.dim(); ++d) {  // an expanded tensor: one memory for all
      if (local.strides()[d] == 0 && local.sizes()[d] > 1) local = local.narrow(d, 0, 1), at = at.narrow(d, 0, 1);
    }
    const auto inside = at.ge(0).logical_and(at.lt(number_at_.numel()));
    const auto number = number_at_.take(at.clamp(0, number_at_.numel() - 1)).masked_fill(inside.logical_not(), -1);
    const auto values = signed_by(other.sign, values_for(*other.layout, local.scalar_type()).take(number.clamp_min(0)), at.add(begin_));
    local.copy_(at::where(number.ge(0), values, local));
  }

 private:
  // As the other reads the bits, and where it is Partial, this rank's shard.
  at::Tensor values_for(const Layout& other, at::ScalarType dtype) const {
    const auto whole = Layout::get(mesh_, replicated(other), values_.sizes(), dtype);
    auto placements = replicated(other);
    for (size_t m = 0; m < placements.size(); ++m) {
      if (other.placements()[m].is_partial()) placements[m] = other.placements()[m];
    }
    return move_local(values_.view(dtype), whole, whole->with(placements)).get();
  }

  DeviceMesh mesh_;
  at::Tensor values_;     // in a row
  int64_t begin_ = 0;     // the first's place
  at::Tensor number_at_;  // by place from there; -1 between numbers
};

}  // namespace

std::vector<Written> begin_writes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  std::vector<Written> all;
  for (const int argument : info.written) {
    for (const auto& in : tensors_in(arguments[argument])) {
      auto* impl = as_dtensor(in.tensor);
      if (!impl) continue;
      add(info, argument, in.element, *impl, all);
      impl->note_written();
    }
  }
  return all;
}

void note_written(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  for (const int argument : info.written) {
    for (const auto& in : tensors_in(arguments[argument])) {
      if (auto* impl = as_dtensor(in.tensor)) impl->note_written();
    }
  }
}

void carry_over(const std::vector<Written>& all) {
  for (const auto& [tensor, others] : all) {
    LocalMode below;
    const Source source(*as_dtensor(tensor));
    if (source.is_empty()) continue;
    for (const auto& other : others) source.copy_to(other);
  }
}

}  // namespace dtensor::dispatch
