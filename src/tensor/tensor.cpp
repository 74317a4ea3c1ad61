// The DTensor handle, and the functions that make one or read its local tensor, with their gradients.
#include <dtensor/tensor/tensor.hpp>

#include <dtensor/dispatch/flat_group.hpp>

#include "src/dispatch/absent.hpp"
#include "src/dispatch/compared.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/reading.hpp"
#include "src/dispatch/replicated.hpp"
#include "src/dispatch/write_through.hpp"
#include "src/mesh/stand_in.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/two_meshes.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/writing.hpp>

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace dtensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Placements to_vector(PlacementsRef placements) { return {placements.begin(), placements.end()}; }

const LayoutPtr& layout_of(std::string_view tag, const at::Tensor& tensor) {
  auto* impl = tensor.defined() ? as_dtensor(tensor) : nullptr;
  require(impl, tag, "expected a distributed tensor; got {}; hint: make one with distribute_tensor or from_local",
          tensor.defined() ? "a plain tensor" : "an undefined tensor");
  return impl->layout();
}

at::Tensor local_of(const at::Tensor& tensor) { return as_dtensor(tensor)->local(); }

// The placements of a tensor's gradient: those of the tensor, but Replicate where it is Partial (each summand gets the whole gradient).
Placements gradient_placements(const Layout& layout) { return without_partial(layout.placements()); }

// A function of one tensor with layout `layout`, saved for backward by an opaque holder.
struct SavedLayout : torch::CustomClassHolder {
  explicit SavedLayout(LayoutPtr l) : layout(std::move(l)) {}
  LayoutPtr layout;
};

void save(AutogradContext* context, const LayoutPtr& layout) {
  context->saved_data["layout"] = c10::IValue::make_capsule(c10::make_intrusive<SavedLayout>(layout));
}

LayoutPtr saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<SavedLayout>(context->saved_data["layout"].toCapsule())->layout;
}

// The gradient of a move is the move back.
struct Redistribute : Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const LayoutPtr& target) {
    save(context, as_dtensor(tensor)->layout());
    return move_tensor(tensor, target);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor(), at::Tensor()};
    const auto from = saved(context);
    return {dtensor::redistribute(gradient, from->mesh(), gradient_placements(*from)), at::Tensor()};
  }
};

at::Tensor local_gradient(const at::Tensor& gradient, const LayoutPtr& layout);
at::Tensor from_local_gradient(const at::Tensor& gradient, const LayoutPtr& layout);

struct ToLocal : Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor, const LayoutPtr& gradient) {
    save(context, gradient);
    as_dtensor(tensor)->note_written();  // it may be
    LocalMode local_mode;
    return local_of(tensor).alias();
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    return {from_local_gradient(gradients[0], saved(context)), at::Tensor()};
  }
};

struct FromLocal : Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const LayoutPtr& layout) {
    save(context, layout);
    LocalMode local_mode;
    return wrap(local.tensor_data(), layout);  // counts writes together with `local`, as an alias made here would not
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto layout = saved(context);
    const auto gradient = local_gradient(dtensor::redistribute(gradients[0], gradient_placements(*layout)), layout);
    const auto share = averaged_over(*layout);
    return {share == 1 ? gradient : gradient.div(share), at::Tensor()};
  }

 private:
  // Of how many ranks' values an element is the average. For reductions other than sums and averages, the gradient depends on the values.
  static int64_t averaged_over(const Layout& layout) {
    int64_t ranks = 1;
    for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
      const auto& placement = layout.placements()[m];
      if (!placement.is_partial() || placement.is_partial(ReduceOp::sum)) continue;
      require(placement.is_partial(ReduceOp::avg), "from_local",
              "the gradient of a part is known for sums and averages only; got {}; hint: "
              "reduce the parts before, or detach them",
              layout.str());
      ranks *= layout.mesh().size(m);
    }
    return ranks;
  }
};

// ToLocal and FromLocal are each other's gradient. These two apply them, so that a gradient has a gradient where one is asked for.
at::Tensor from_local_gradient(const at::Tensor& gradient, const LayoutPtr& layout) {
  return gradient.requires_grad() ? FromLocal::apply(gradient, layout) : wrap(gradient, layout);
}

// The local tensor of the gradient of a tensor that from_local made under `layout`. Its own gradient is made up of local tensors in the
// same way.
at::Tensor local_gradient(const at::Tensor& gradient, const LayoutPtr& layout) {
  if (!gradient.requires_grad()) return local_of(gradient);
  auto placements = to_vector(layout->placements());
  for (auto& placement : placements) {
    if (placement.is_partial()) placement = partial();
  }
  return ToLocal::apply(gradient, as_dtensor(gradient)->layout()->with(placements));
}

// A tensor that every rank holds whole, as a replicated DTensor. Its gradient is the gathered gradient.
at::Tensor replicated(const at::Tensor& full, const DeviceMesh& mesh) {
  const Placements whole(mesh.ndim(), replicate());
  return FromLocal::apply(full, Layout::get(mesh, whole, full.sizes(), full.strides(), full.scalar_type()));
}

// What distribute_tensor was given as whole: inside Spmd its values are compared in some calls.
void compare_now_and_then(const at::Tensor& whole, const DeviceMesh& mesh) {
  if (whole.is_meta() || !Spmd::current() || !replication_check() || !dispatch::Compared::is_due(dispatch::compared(mesh).distributed++))
    return;
  dispatch::check_replicated("distribute_tensor", whole, mesh);
}

// A layout that the user asked for: operators do not change it.
DTensor asked_for(at::Tensor tensor) {
  as_dtensor(tensor)->laid_out = true;
  return DTensor(std::move(tensor));
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) { return tensor.defined() && as_dtensor(tensor); }

void detail::check_plain(std::string_view tag, const at::Tensor& tensor, std::string_view what) {
  require(tensor.defined(), tag, "{} is an undefined tensor; expected a plain one; hint: grad() is undefined before the first "
          "backward pass; where a rank has nothing to give, pass zeros, or a piece of length 0 where lengths may differ", what);
  require(!is_dtensor(tensor), tag, "{} is not plain; got a distributed tensor; expected a plain one; hint: pass to_local(), or make it "
          "under dt::NoSpmd", what);
  require(tensor.layout() == at::kStrided, tag, "{} is not dense; got a sparse tensor; expected a dense one; hint: pass to_dense()", what);
  require(!tensor.is_quantized(), tag, "{} is quantized; expected one of plain numbers; hint: pass int_repr() or dequantize()", what);
}

DTensor::DTensor(at::Tensor tensor) : tensor_(std::move(tensor)) { layout_of("DTensor", tensor_); }

const Layout& DTensor::layout() const { return *as_dtensor(tensor_)->layout(); }

at::Tensor DTensor::to_local() const { return to_local(gradient_placements(layout())); }

at::Tensor DTensor::to_local(PlacementsRef gradient) const {
  if (is_absent() && !detail::StandIn::active()) dispatch::refuse_absent("to_local", layout());
  const auto target = layout().with(gradient);
  dispatch::before_write(as_dtensor(tensor_)->local());  // which whoever gets it may do
  require(target->local_sizes() == layout().local_sizes(), "to_local",
          "a part of the gradient has the sizes of a part of the tensor; got a gradient placed {} of {}", dtensor::str(gradient),
          layout().str());
  return ToLocal::apply(tensor_, target);
}

at::Tensor DTensor::full_tensor() const { return redistribute(Placements(mesh().ndim(), replicate())).to_local(); }

DTensor DTensor::redistribute(PlacementsRef placements) const {
  const auto& from = as_dtensor(tensor_)->layout();
  check_maker("redistribute", from->mesh());
  const auto target = from->with(placements);
  return target == from ? *this : asked_for(Redistribute::apply(tensor_, target));
}

DTensor DTensor::redistribute(std::initializer_list<Placement> placements) const { return redistribute(PlacementsRef(placements)); }

DTensor DTensor::redistribute(const DeviceMesh& mesh, PlacementsRef placements) const {
  const auto& from = as_dtensor(tensor_)->layout();
  if (mesh == from->mesh()) return redistribute(placements);
  check_maker("redistribute", from->mesh());
  check_maker("redistribute", mesh);
  return asked_for(Redistribute::apply(tensor_, from->with(mesh, placements)));
}

DTensor DTensor::redistribute(const DeviceMesh& mesh, std::initializer_list<Placement> placements) const {
  return redistribute(mesh, PlacementsRef(placements));
}

at::Tensor redistribute(const at::Tensor& tensor, PlacementsRef placements) {
  return is_dtensor(tensor) ? DTensor(tensor).redistribute(placements).tensor() : tensor;
}

at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, PlacementsRef placements) {
  return is_dtensor(tensor) ? DTensor(tensor).redistribute(mesh, placements).tensor() : tensor;
}

at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh, std::initializer_list<Placement> placements) {
  return redistribute(tensor, mesh, PlacementsRef(placements));
}

at::Tensor full_tensor(const at::Tensor& tensor) { return is_dtensor(tensor) ? DTensor(tensor).full_tensor() : tensor; }

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements) {
  if (full.defined() && is_dtensor(full)) {
    require(DTensor(full).mesh() == mesh, "distribute_tensor",
            "the tensor is already distributed, on another mesh; got {}; expected {}; {}", DTensor(full).mesh().str(), mesh.str(),
            why_two(DTensor(full).mesh(), mesh));
    const auto& as_it_is = DTensor(full).placements();
    if (std::ranges::all_of(as_it_is, &Placement::is_replicate)) compare_now_and_then(as_dtensor(full)->local(), mesh);
    return DTensor(full).redistribute(placements);
  }
  detail::check_plain("distribute_tensor", full, "the tensor");
  require(full.is_meta() || full.device().type() == mesh.device_type(), "distribute_tensor",
          "the tensor is on {}, and the mesh on {}; hint: tensor.to(...) first", full.device().str(),
          c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true));
  if (!mesh.contains_this_rank()) {
    const auto layout = Layout::get(mesh, placements, full.sizes(), full.strides(), full.scalar_type());
    return asked_for(dispatch::absent(layout).set_requires_grad(full.requires_grad() && c10::GradMode::is_enabled()));
  }
  compare_now_and_then(full, mesh);
  const DTensor whole(replicated(full, mesh));
  const auto result = whole.redistribute(placements);
  return asked_for(local_of(result).is_alias_of(full) ? result->clone() : result.tensor());
}

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, std::initializer_list<Placement> placements) {
  return distribute_tensor(full, mesh, PlacementsRef(placements));
}

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes) {
  detail::check_plain("from_local", local, "the local shard");
  const auto layout = Layout::get(mesh, placements, sizes, local.scalar_type());
  if (layout->is_absent())
    return asked_for(dispatch::absent(layout).set_requires_grad(local.requires_grad() && c10::GradMode::is_enabled()));
  require(layout->local_sizes() == local.sizes(), "from_local",
          "the local shard does not have the sizes that the layout gives this rank; got [{}]; expected [{}] of {}",
          fmt::join(local.sizes(), ", "), fmt::join(layout->local_sizes(), ", "), layout->str());
  return asked_for(FromLocal::apply(local, layout));
}

DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, std::initializer_list<Placement> placements) {
  return from_local(local, mesh, PlacementsRef(placements));
}

void join_group(const at::Tensor& tensor, c10::intrusive_ptr<FlatGroup> group, int64_t index) {
  layout_of("join_group", tensor);
  as_dtensor(tensor)->set_member(group ? c10::make_intrusive<FlatMember>(std::move(group), index, -1) : FlatMemberPtr());
}

FlatGroup* group_of(const at::Tensor& tensor) {
  auto* impl = tensor.defined() ? as_dtensor(tensor) : nullptr;
  return impl && impl->member() ? impl->member()->group.get() : nullptr;
}

void pin(const at::Tensor& tensor, bool pinned) {
  layout_of("pin", tensor);
  as_dtensor(tensor)->pinned = pinned;
}

bool is_pinned(const at::Tensor& tensor) {
  const auto* impl = as_dtensor(tensor);
  return impl && impl->pinned;
}

// Names are few, the same on all ranks, and wanted as long as a tensor may live: the process keeps each once.
static ModuleName kept_name(std::string_view name) {
  static std::mutex mutex;
  static auto& names = *new std::unordered_set<std::string>();
  std::lock_guard lock(mutex);
  return &*names.emplace(name).first;
}

void name_module(const at::Tensor& parameter, std::string_view module) {
  layout_of("name_module", parameter);
  as_dtensor(parameter)->module = module.empty() ? nullptr : kept_name(module);
}

std::string_view module_name(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? as_dtensor(tensor) : nullptr;
  return impl && impl->module ? std::string_view(*impl->module) : std::string_view();
}

const Layout* find_layout(const at::Tensor& tensor) {
  const auto* impl = as_dtensor(tensor);
  return impl ? impl->layout().get() : nullptr;
}

// What is to be the local tensor of a layout has its local sizes and dtype.
static void check_fits(std::string_view tag, const at::Tensor& local, const Layout& layout) {
  detail::check_plain(tag, local, "the local tensor");
  if (local.sizes() == layout.local_sizes() && local.scalar_type() == layout.dtype()) return;
  fail(tag, "the local tensor is not this rank's part of the layout; got {} [{}]; expected {} [{}] of {}",
       c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "), c10::toString(layout.dtype()),
       fmt::join(layout.local_sizes(), ", "), layout.str());
}

at::Tensor wrap_local(at::Tensor local, LayoutPtr layout, comm::WorkPtr work) {
  require(layout, "wrap_local", "got no layout; hint: Layout::get() makes one");
  check_fits("wrap_local", local, *layout);
  auto result = wrap(std::move(local), std::move(layout));
  as_dtensor(result)->set_pending(std::move(work));
  return result;
}

const at::Tensor& local_shard(const at::Tensor& tensor) {
  layout_of("local_shard", tensor);
  return as_dtensor(tensor)->local();
}

const at::Tensor& local_shard_under_way(const at::Tensor& tensor) {
  layout_of("local_shard_under_way", tensor);
  return as_dtensor(tensor)->local_under_way();
}

const LayoutPtr& layout_of(const at::Tensor& tensor) { return layout_of("layout_of", tensor); }

void replace_local_shard(const at::Tensor& tensor, at::Tensor local) {
  const auto& layout = layout_of("replace_local_shard", tensor);
  check_fits("replace_local_shard", local, *layout);
  auto& impl = *as_dtensor(tensor);
  const auto member = impl.member();
  impl.set_member({});
  impl.set_local(std::move(local), layout);
  impl.set_member(member);
}

at::Tensor local_to_write(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
  auto* impl = as_dtensor(tensor);
  if (!impl) return tensor.detach();
  const auto& layout = *impl->layout();
  require(!layout.is_deferred() && !layout.is_absent(), "local_to_write", "the tensor has no memory on this rank; got {}", layout.str());
  dispatch::begin_write(*impl);
  return impl->local();
}

void redistribute_(const at::Tensor& tensor, PlacementsRef placements) {
  const auto from = layout_of("redistribute_", tensor);
  require(tensor.is_leaf(), "redistribute_", "only a leaf can be laid out in place; got {}, the result of an operator", from->str());
  const auto target = from->with(placements);
  if (target == from) return;
  auto* impl = as_dtensor(tensor);
  impl->laid_out = true;
  require(!impl->member(), "redistribute_", "the tensor lies in the flat buffer of a unit; got {}; hint: parallelize_module lays out such "
          "parameters, and keeps them in their unit", from->str());
  if (from->is_deferred()) return impl->lay_out_deferred(target);
  if (from->is_absent()) return impl->set_local(local_of(dispatch::absent(target)), target);
  LocalMode local_mode;
  impl->set_local(in_own_memory(move_local(impl->local(), from, target).get()), target);
}

}  // namespace dtensor
