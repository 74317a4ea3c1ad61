// Parameters of a unit: lays them out in the flat buffer, and gathers it.
#include "src/parallel/fully_shard/unit.hpp"

#include "src/parallel/fully_shard/buffer.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

namespace dtensor::fsdp {

namespace {

Placements with(const Layout& layout, int64_t mesh_dim, const Placement& placement) {
  Placements placements(layout.placements().begin(), layout.placements().end());
  placements[mesh_dim] = placement;
  return placements;
}

void lay_out_alone(const at::Tensor& parameter, int64_t mesh_dim, const Placement& placement) {
  redistribute_(parameter, with(DTensor(parameter).layout(), mesh_dim, placement));
}

}  // namespace

Unit::Unit(std::string name, DeviceMesh mesh, int64_t cut, const FullyShardOptions& options, std::shared_ptr<Schedule> schedule)
    : name_(std::move(name)), mesh_(std::move(mesh)), cut_(cut), options_(options), schedule_(std::move(schedule)) {
  schedule_->add(this);
}

void Unit::release_resources() {
  schedule_->remove(this);
  members_.clear();
  registered_buffer_.reset();
  registered_gradient_.reset();
  for (auto* tensor : {&buffer_, &whole_, &whole_gradient_, &gradient_}) tensor->reset();
  gathering_.reset();
  reducing_ = {};
}

c10::intrusive_ptr<Unit> Unit::make(std::string name, const Parameters& parameters, int64_t cut, const FullyShardOptions& options,
                                    std::shared_ptr<Schedule> schedule) {
  auto unit = c10::make_intrusive<Unit>(std::move(name), DTensor(parameters[0].second).mesh(), cut, options, std::move(schedule));
  unit->lay_out(parameters);
  return unit;
}

void Unit::set_schedule(const std::shared_ptr<Schedule>& schedule) {
  if (schedule_ == schedule) return;
  schedule_->remove(this);
  schedule_ = schedule;
  schedule_->add(this);
}

void Unit::lay_out(const Parameters& parameters) {
  dtype_ = parameters[0].second.scalar_type();
  if (options_.cpu_offload && mesh_.device_type() != c10::DeviceType::CPU) device_ = device_of_mesh();
  std::vector<int64_t> most;
  for (const auto& [name, parameter] : parameters) most.push_back(most_elements(DTensor(parameter).layout(), cut_));
  const auto plan = plan_buffer(most, mesh_.size(cut_), options_.block, static_cast<int64_t>(c10::elementSize(dtype_)));
  piece_ = plan.piece;
  elements_ = c10::sum_integers(most);
  members_.clear();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    lay_out_alone(parameter, cut_, flat(piece_, plan.offsets[i]));
    const auto layout = layout_of(parameter)->present();
    members_.push_back({name, c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.getIntrusivePtr()), layout});
    if (!mesh_.contains_this_rank()) continue;  // the parameter is absent: only its layout counts here
    const auto shard = layout->flat_shard(mesh_.coordinate());
    auto& member = members_.back();
    member.offset = plan.offsets[i];
    member.elements = c10::multiply_integers(layout->local_sizes_before(mesh_.ndim(), mesh_.coordinate()));
    member.shard_elements = shard.length();
    if (shard.length() > 0) member.shard = member.offset + shard.begin - mesh_.coordinate(cut_) * piece_;
    join_group(parameter, c10::intrusive_ptr<FlatGroup>::reclaim_copy(this), static_cast<int64_t>(i));
  }
  registered_buffer_.reset();
  registered_gradient_.reset();
  buffer_.reset();
  gradient_.reset();
  fits_ = false;
  if (mesh_.contains_this_rank() && !DTensor(parameters[0].second).layout().is_deferred()) fill_buffer();
}

// What was laid out before it had values, or was laid out anew, has other memory.
void Unit::fill_buffer() {
  if (fits_) return;
  LocalMode below;
  for (const auto& member : members_) {
    const auto impl = member.parameter.lock();
    if (!impl || (member.shard_elements == 0 && !device_)) continue;
    const at::Tensor parameter(impl);
    const auto part = local_shard(parameter);
    if (!buffer_.defined()) buffer_ = at::zeros({piece_}, options_of_shards());
    const auto place = detail::shard_in_buffer(buffer_, member.shard, member.layout->local_sizes());
    if (part.storage().data() == place.storage().data() && !part.is_meta()) continue;
    place.copy_(part);
    replace_local_shard(parameter, place);
  }
  if (!buffer_.defined()) buffer_ = at::zeros({piece_}, options_of_shards());
  if (!registered_buffer_) registered_buffer_ = registered(buffer_);
  fits_ = true;
}

// What stays, and is sent or received at every step. Meshes on the CPU need no group yet.
std::shared_ptr<void> Unit::registered(const at::Tensor& memory) const {
  return memory.is_cuda() && mesh_.size(cut_) > 1 ? group().register_memory(memory) : nullptr;
}

// A rank may have a part of none of them.
at::TensorOptions Unit::options_of_parameters() const {
  for (const auto& member : members_) {
    if (const auto impl = member.parameter.lock()) return at::TensorOptions(impl->device()).dtype(dtype_);
  }
  return at::TensorOptions(mesh_.device_type()).dtype(dtype_);
}

// In memory that the device reads by itself, where libtorch has such.
at::TensorOptions Unit::options_of_shards() const {
  const auto options = options_of_parameters();
  return device_ == options.device() ? options.device(c10::kCPU).pinned_memory(at::hasCUDA()) : options;
}

// With the index that this rank's tensors have.
c10::Device Unit::device_of_mesh() const {
  return c10::impl::VirtualGuardImpl(mesh_.device_type()).getDevice();
}

comm::Communicator& Unit::group() const { return mesh_.communicator(cut_); }

std::vector<int64_t> Unit::counts() const { return std::vector<int64_t>(mesh_.size(cut_), piece_); }

at::Tensor Unit::gather(int64_t index, at::ScalarType dtype, int64_t generation) {
  if (dtype != options_.param_dtype.value_or(dtype_) || (generation >= 0 && generation != generation_)) return {};
  schedule_->use(*this);
  if (const auto gathering = std::exchange(gathering_, {})) gathering->wait();
  LocalMode below;
  const auto& member = members_[index];
  return whole_.narrow(0, member.offset, member.elements);
}

void Unit::start_gather() {
  fill_buffer();
  LocalMode below;
  comm::Cause cause("dtensor::fully_shard", false, name_);
  comm::Subject subject(name_);
  ++schedule_->gathers;
  const auto own = buffer_.to(options_.param_dtype.value_or(dtype_)).to(options_of_parameters().device());
  if (mesh_.size(cut_) == 1) {
    whole_ = own;
    return;
  }
  auto gathered = group().all_gather(own, counts(), counted_empty(piece_ * mesh_.size(cut_), own.options(), schedule_->whole_bytes));
  whole_ = std::move(gathered.tensor);
  gathering_ = std::move(gathered.work);
}

void Unit::free_whole() {
  if (const auto gathering = std::exchange(gathering_, {})) gathering->wait();  // the others read this rank's shard
  whole_.reset();
}

void Unit::gather_kept() {
  schedule_->free_others();
  if (!is_whole() && mesh_.contains_this_rank()) start_gather();
}

void Unit::let_go() {
  if (keeps_ > 0 && --keeps_ == 0) free_whole();
}

void Unit::written(int64_t) {
  ++generation_;
  fits_ = false;
  free_whole();
}

void Unit::dissolve() {
  for (const auto& member : members_) {
    const auto impl = member.parameter.lock();
    require(!impl || !at::Tensor(impl).grad().defined(), "parallelize_module",
            "'{}' has a gradient, which would be left as it was laid out; hint: zero_grad() first", member.name);
  }
  finish_reduction();
  free_whole();
  dissolved_.clear();
  for (const auto& member : members_) {
    const auto impl = member.parameter.lock();
    if (!impl) continue;
    const at::Tensor parameter(impl);
    join_group(parameter, {}, 0);
    lay_out_alone(parameter, cut_, replicate());
    dissolved_.emplace_back(member.name, parameter);
  }
}

void Unit::restore() {
  ++generation_;
  if (!dissolved_.empty()) lay_out(std::exchange(dissolved_, {}));
}

FullyShard::Unit Unit::describe() const {
  FullyShard::Unit unit{name_, {}, dtype_, elements_, piece_, 0};
  for (const auto& member : members_) unit.parameters.push_back(member.name);
  const auto all = static_cast<double>(piece_ * mesh_.size(cut_));
  unit.padding = (all - static_cast<double>(elements_)) / all;
  return unit;
}

}  // namespace dtensor::fsdp
