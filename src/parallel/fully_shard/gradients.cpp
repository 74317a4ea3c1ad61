// Gradients of a unit: they are written to a whole flat buffer, and one reduce_scatter brings them to the parameters' ranks.
#include "src/parallel/fully_shard/buffer.hpp"
#include "src/parallel/fully_shard/unit.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/comm/event.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>

namespace dtensor::fsdp {

namespace {

// What is still to be done until the gradients of a round can be read.
class Reduction final : public comm::Work {
 public:
  Reduction(c10::intrusive_ptr<Unit> unit, int64_t round) : unit_(std::move(unit)), round_(round) {}
  void wait() override {
    if (const auto unit = std::exchange(unit_, {})) unit->finish(round_);
  }
  bool done() override { return !unit_ || (unit_->is_finished(round_) && (unit_.reset(), true)); }
  void release_resources() override { unit_.reset(); }

 private:
  c10::intrusive_ptr<Unit> unit_;
  const int64_t round_;
};

std::vector<int64_t> dims_of(uint64_t bits) {
  std::vector<int64_t> dims;
  for (int64_t m = 0; bits >> m; ++m) {
    if (bits >> m & 1) dims.push_back(m);
  }
  return dims;
}

}  // namespace

at::Tensor Unit::reduce(int64_t index, const at::Tensor& leaf, const at::Tensor& gradient, bool defer) {
  comm::Cause cause("dtensor::fully_shard", false, name_);
  comm::Subject subject(name_);
  auto& member = members_[index];
  if (gradient.requires_grad() && c10::GradMode::is_enabled()) return with_graph(member, gradient, defer);
  LocalMode below;
  schedule_->begin_backward();
  is_deferred_ = defer;
  defers_ = defer || options_.reduce_at_read;
  const bool was_taken = state_ == Round::open && member.landed && !leaf.grad().defined();  // and may be kept by somebody
  if (state_ == Round::reducing || was_taken) finish_reduction();
  if (state_ == Round::none) begin_round();
  auto result = gradient_of(member, leaf);
  land(member, gradient);
  member.arrived = true;
  if (!all_arrived()) return result;
  if (!defers_) start_reduction();
  free_unless_kept();
  return result;
}

// A gradient that can be differentiated again is reduced by itself.
at::Tensor Unit::with_graph(const Member& member, const at::Tensor& gradient, bool defer) const {
  const auto reduced = defer ? gradient : redistribute(gradient, member.layout->placements());
  return options_.gradient_divide_factor == 1 ? reduced : reduced.div(options_.gradient_divide_factor);
}

bool Unit::all_arrived() const {
  return std::ranges::all_of(members_, [](const Member& member) {
    const auto parameter = member.arrived ? c10::intrusive_ptr<c10::TensorImpl>() : member.parameter.lock();
    return !parameter || !parameter->requires_grad();
  });
}

// Whether a gradient is the one that was reduced into the buffer.
bool Unit::is_own(const at::Tensor& gradient, const Member& member) const {
  if (!gradient.defined() || !is_dtensor(gradient) || !gradient_.defined()) return false;
  if (DTensor(gradient).layout().placements() != member.layout->placements()) return false;
  const auto* memory = static_cast<const char*>(gradient_.data_ptr()) + member.shard * static_cast<int64_t>(gradient_.element_size());
  return member.shard_elements == 0 || gradient.is_meta() || local_shard_under_way(gradient).data_ptr() == memory;
}

void Unit::begin_round() {
  state_ = Round::open;
  size_t own = 0;
  for (auto& member : members_) {
    member.landed = member.arrived = member.accumulates = false;
    const auto impl = member.parameter.lock();
    own += impl && is_own(at::Tensor(impl).grad(), member);
  }
  const auto options = options_of_parameters();
  const bool kept = gradient_.defined() && gradient_.use_count() > 1 + own;  // a part, by somebody who took it out of grad()
  overwrites_ = own == 0 || kept;
  if (!gradient_.defined() || kept) {
    registered_gradient_.reset();
    gradient_ = at::empty({piece_}, options_of_shards());
    registered_gradient_ = registered(gradient_);
  }
  whole_gradient_ = at::empty({piece_ * mesh_.size(cut_)}, options.dtype(options_.reduce_dtype.value_or(dtype_)));
}

// What will be accumulated in the leaf's grad(), in place of what is there.
at::Tensor Unit::gradient_of(Member& member, const at::Tensor& leaf) {
  const auto earlier = std::exchange(leaf.mutable_grad(), at::Tensor());
  auto place = detail::shard_in_buffer(gradient_, member.shard, member.layout->local_sizes());
  if (earlier.defined() && !member.landed) {
    member.accumulates = true;
    if (!is_own(earlier, member)) {
      place.copy_(move_local(local_shard(earlier), layout_of(earlier), member.layout).get());
      overwrites_ = false;
    }
  }
  return wrap_local(std::move(place), member.layout, c10::make_intrusive<Reduction>(c10::intrusive_ptr<Unit>::reclaim_copy(this), round_));
}

void Unit::land(Member& member, const at::Tensor& gradient) {
  const auto& from = layout_of(gradient);
  const auto wanted = member.layout->placements();
  Placements placements(wanted.begin(), wanted.end());
  placements[cut_] = replicate();
  uint64_t pending = 0;
  bool counts = true;  // what is the same on several ranks is one rank's part of the sum
  for (int64_t m = 0; m < mesh_.ndim(); ++m) {
    if (!placements[m].is_replicate()) continue;
    const bool sums = from->placements()[m].is_partial(ReduceOp::sum) && (m == cut_ || !member.landed || member.pending >> m & 1);
    if (sums) placements[m] = partial();
    const bool adds_up = m == cut_ || (sums || (member.landed && member.pending >> m & 1));
    if (adds_up && !sums && mesh_.coordinate(m) != 0) counts = false;
    if (adds_up && m != cut_ && mesh_.size(m) > 1) pending |= uint64_t{1} << m;
  }
  const auto source = move_local(local_shard(gradient), from, from->with(placements)).get();
  const auto place = from_elements(whole_gradient_.narrow(0, member.offset, member.elements), *member.layout);
  if (member.landed) {
    if (counts) place.add_(source);
  } else {
    counts ? place.copy_(source) : place.zero_();
  }
  member.landed = true;
  member.pending = pending;
}

void Unit::start_reduction() {
  state_ = Round::reducing;
  int64_t end = 0;  // of what has values
  for (const auto& member : members_) {
    if (!member.landed) continue;
    whole_gradient_.narrow(0, end, member.offset - end).zero_();
    end = member.offset + member.elements;
  }
  whole_gradient_.narrow(0, end, whole_gradient_.numel() - end).zero_();
  if (options_.gradient_divide_factor != 1) whole_gradient_.div_(options_.gradient_divide_factor);
  const bool in_place = overwrites_ && whole_gradient_.scalar_type() == dtype_ && !device_;
  reducing_ = group().reduce_scatter(whole_gradient_, counts(), ReduceOp::sum, in_place ? gradient_ : at::Tensor());
  schedule_->reducing(*this);
}

void Unit::finish_reduction() {
  if (state_ == Round::none) return;
  LocalMode below;
  comm::Cause cause("dtensor::fully_shard", false, name_);
  comm::Subject subject(name_);
  if (state_ == Round::open) start_reduction();
  if (state_ == Round::none) return;
  state_ = Round::none;
  ++round_;
  if (reducing_.work) reducing_.work->wait();
  auto reduced = std::exchange(reducing_, {}).tensor;
  reduce_pending(reduced);
  whole_gradient_.reset();
  if (reduced.unsafeGetTensorImpl() == gradient_.unsafeGetTensorImpl()) return;
  reduced = reduced.to(gradient_.device());
  for (const auto& member : members_) {
    if (!member.landed || member.shard_elements == 0) continue;
    auto place = gradient_.narrow(0, member.shard, member.shard_elements);
    const auto values = reduced.narrow(0, member.shard, member.shard_elements);
    member.accumulates ? place.add_(values) : place.copy_(values);
  }
}

// Other mesh dimensions that replicate, along which gradients are still sums (HSDP, or a sequence that is cut): one all_reduce for all that
// are pending along the same.
void Unit::reduce_pending(at::Tensor& reduced) {
  std::set<uint64_t> kinds;
  for (const auto& member : members_) {
    if (member.landed) kinds.insert(member.pending);
  }
  for (const auto pending : kinds) {
    if (pending == 0) continue;
    auto& group = mesh_.communicator(dims_of(pending));
    if (kinds.size() == 1) {
      reduced.copy_(group.all_reduce(reduced, ReduceOp::sum).get());
      return;
    }
    std::vector<at::Tensor> parts;
    for (const auto& member : members_) {
      if (member.landed && member.pending == pending) parts.push_back(reduced.narrow(0, member.shard, member.shard_elements));
    }
    const auto together = group.all_reduce(at::cat(parts), ReduceOp::sum).get();
    int64_t begin = 0;
    for (const auto& part : parts) {
      part.copy_(together.narrow(0, begin, part.numel()));
      begin += part.numel();
    }
  }
}

void Unit::end_backward() {
  for (auto& member : members_) member.arrived = false;
  if (state_ != Round::open || defers_) return;
  LocalMode below;
  comm::Cause cause("dtensor::fully_shard", false, name_);
  comm::Subject subject(name_);
  start_reduction();
}

}  // namespace dtensor::fsdp
