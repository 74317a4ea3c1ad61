#include "src/dispatch/absent.hpp"

#include "src/dispatch/region.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/dispatch/backward.hpp>
#include <dtensor/dispatch/local_mode.hpp>

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

namespace dtensor::dispatch {

namespace {

// Operators that ask for values: nobody here could say.
bool asks_for_values(const OpInfo& info) {
  return info.schema->name() == "aten::_local_scalar_dense" || info.schema->name() == "aten::equal";
}

// A random factory, which every rank of a mesh draws whole, too.
bool draw_and_forget(const Decision& decision, rules::LocalCall& call) {
  const auto device = call.op.schema().argumentIndexWithName("device");
  if (!call.op.hasTag(at::Tag::nondeterministic_seeded) || !device) return false;
  call.arg(*device) = c10::Device(decision.mesh.device_type());
  call.call();
  const auto drawn = call.stack.back().toTensor();
  call.stack.back() = at::empty(drawn.sizes(), drawn.options().device(at::kMeta));
  return true;
}

// Those that backward() calls before it begins.
bool makes_alike(const OpInfo& info) { return info.schema->name() == "aten::ones_like" || info.schema->name() == "aten::detach"; }

}  // namespace

at::Tensor absent(const LayoutPtr& layout) {
  LocalMode local_mode;
  return wrap(at::empty(layout->local_sizes(), at::TensorOptions(at::kMeta).dtype(layout->dtype())), layout);
}

void refuse_absent(std::string_view what, const Layout& layout) {
  fail(what,
       "the tensor is elsewhere: this rank knows its layout, and the values are on ranks [{}]; got {}; hint: bring it here with "
       "dt::redistribute(tensor, mesh, placements) on all ranks of both meshes, or work on it where it is with dt::on(mesh, f)",
       fmt::join(layout.mesh().ranks(), ", "), layout.str());
}

bool is_worked_out(const OpInfo& info, const Stack& stack, size_t begin) {
  const bool on_absent = current_mesh && !current_mesh->contains_this_rank();
  const bool may = on_absent || current_backward() || makes_alike(info);
  bool worked_out = on_absent;
  for (const auto& in : tensors_in(arguments(stack, begin))) {
    const auto* impl = as_dtensor(in.tensor);
    if (!impl || !impl->layout()) continue;
    const auto& layout = *impl->layout();
    if (layout.is_absent() && !may) refuse_absent(info.name, layout);
    if (layout.is_absent() && asks_for_values(info)) {
      fail(
          info.name,
          "only ranks [{}] have the values; got {}, on a rank that works out sizes and layouts for dt::on; hint: ask for values outside of "
          "dt::on, after dt::redistribute to a mesh of all ranks that need them",
          fmt::join(layout.mesh().ranks(), ", "), layout.str());
    }
    if (!layout.is_absent() && on_absent && !current_backward()) {
      fail(info.name,
           "a tensor of another mesh is used inside of dt::on; got {} on {}; expected one on {}; hint: dt::redistribute it to that mesh",
           layout.str(), layout.mesh().str(), current_mesh->str());
    }
    worked_out |= layout.is_absent();
  }
  return worked_out;
}

bool skip_draws(const Decision& decision, rules::LocalCall& call) {
  if (!decision.info->has_tensor_argument) return draw_and_forget(decision, call);
  const auto* rule = rules::find_entry(*decision.info->schema);
  if (!rule || rule->family != "random") return false;
  const auto& name = decision.info->schema->name();
  for (const auto* by_values : {"aten::multinomial", "aten::poisson", "aten::binomial", "aten::rrelu_with_noise"}) {
    if (name == by_values) {
      fail(decision.info->name,
           "how much of the random stream it takes hangs on values, which ranks that are not in {} do not have; hint: call it on a mesh "
           "of all ranks",
           decision.mesh.str());
    }
  }
  if (!decision.lowering) return false;
  decision.lowering(call);
  return true;
}

}  // namespace dtensor::dispatch
