#include "src/dispatch/write_through.hpp"

#include "src/core/alias.hpp"
#include "src/dispatch/explicit.hpp"
#include "src/dispatch/guard.hpp"
#include "src/dispatch/reading.hpp"

#include <dtensor/error.hpp>
#include <dtensor/redistribute.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

namespace dtensor::dispatch {

namespace {

Placements replicated(const Layout& layout) { return Placements(layout.mesh().ndim(), replicate()); }

void add(const OpInfo& info, int argument, int element, DTensorImpl& impl, std::vector<Written>& all) {
  before_write(impl.local());
  if (!is_parted(impl.local())) [[likely]]
    return;
  wait_for_all_readers();  // a move under way has memory too, on one rank longer than on another
  auto others = parted_from(impl.local());
  if (others.empty()) return;
  const auto& layout = impl.layout();
  for (const auto& other : others) {
    require(other.place_known && other.layout->dtype() == layout->dtype(), info.name,
            "writes to {}, of which a view of another dtype, or of an operator without a rule, had to be copied, {}; hint: let go of the "
            "view, or redistribute the tensor first so that it need not be moved",
            layout->str(), other.layout->str());
  }
  for (const auto& earlier : all) {
    const bool twice =
        std::any_of(earlier.others.begin(), earlier.others.end(), [&](const Held& other) { return other.local.is_alias_of(impl.local()); });
    require(!twice, info.name, "writes to a tensor and to a view of it that had to be copied, {}; hint: write to one after the other",
            layout->str());
  }
  const auto whole = layout->with(replicated(*layout));
  if (layout != whole) check_explicit(info, argument, element, "gathered for its views", *layout, *whole);
  all.push_back({at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(&impl)), std::move(others)});
}

// Where on one device each element of this rank's part of a tensor would lie.
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
  return places;
}

// A tensor that was written, whole on every rank, and which of its elements lies where.
class Source {
 public:
  explicit Source(DTensorImpl& tensor) : layout_(tensor.layout()->with(replicated(*tensor.layout()))), begin_(tensor.storage_offset()) {
    values_ = move_local(dtensor::detail::memory_of(tensor.local()), tensor.layout(), layout_).get();
    int64_t end = 1;
    for (int64_t d = 0; d < layout_->ndim(); ++d) end += (layout_->sizes()[d] - 1) * layout_->strides()[d];
    const auto longs = values_.options().dtype(at::kLong);
    element_at_ = at::full({std::max<int64_t>(end, 0)}, -1, longs);
    element_at_.as_strided(layout_->sizes(), layout_->strides()).copy_(at::arange(values_.numel(), longs).view(layout_->sizes()));
  }

  void copy_to(const Held& other) const {
    auto local = other.local;
    auto at = places(*other.layout, other.offset - begin_, local.device());
    for (int64_t d = 0; d < local.dim(); ++d) {  // an expanded tensor: one memory for all
      if (local.strides()[d] == 0 && local.sizes()[d] > 1) local = local.narrow(d, 0, 1), at = at.narrow(d, 0, 1);
    }
    const auto inside = at.ge(0).logical_and(at.lt(element_at_.numel()));
    const auto element = element_at_.take(at.clamp(0, element_at_.numel() - 1)).masked_fill(inside.logical_not(), -1);
    const auto values = values_for(*other.layout).reshape({-1}).take(element.clamp_min(0));
    local.copy_(at::where(element.ge(0), values, local));
  }

  bool is_empty() const { return values_.numel() == 0; }

 private:
  // Where the other is Partial, this rank's part of a sum.
  at::Tensor values_for(const Layout& other) const {
    auto placements = replicated(other);
    for (size_t m = 0; m < placements.size(); ++m) {
      if (other.placements()[m].is_partial()) placements[m] = other.placements()[m];
    }
    return move_local(values_, layout_, layout_->with(placements)).get();
  }

  LayoutPtr layout_;
  int64_t begin_;
  at::Tensor values_;
  at::Tensor element_at_;  // -1 between elements
};

}  // namespace

std::vector<Written> written_beside(const OpInfo& info, const Stack& stack, size_t begin) {
  std::vector<Written> all;
  const auto visit = [&](const c10::IValue& value, int argument, int element) {
    if (!value.isTensor()) return;
    auto* impl = const_cast<c10::TensorImpl*>(value.unsafeToTensorImpl());
    if (is_dtensor_impl(impl)) add(info, argument, element, *static_cast<DTensorImpl*>(impl), all);
  };
  for (const int argument : info.written) {
    const auto& value = stack[begin + argument];
    visit(value, argument, -1);
    int element = 0;
    if (value.isTensorList()) {
      for (const auto& tensor : value.toListRef()) visit(tensor, argument, element++);
    }
  }
  return all;
}

void write_through(const std::vector<Written>& all) {
  for (const auto& [tensor, others] : all) {
    LocalMode below;
    const Source source(*as_dtensor(tensor));
    if (source.is_empty()) continue;
    for (const auto& other : others) source.copy_to(other);
  }
}

}  // namespace dtensor::dispatch
