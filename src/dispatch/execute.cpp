#include "src/dispatch/execute.hpp"

#include "src/dispatch/absent.hpp"
#include "src/dispatch/compared.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/explicit.hpp"
#include "src/dispatch/failure.hpp"
#include "src/dispatch/fallback.hpp"
#include "src/dispatch/operator_event.hpp"
#include "src/dispatch/ran_whole.hpp"
#include "src/dispatch/reading.hpp"
#include "src/dispatch/replicated.hpp"
#include "src/dispatch/write_through.hpp"
#include "src/mesh/stand_in.hpp"

#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

// -- Arguments: distributed tensors -> local shards ---------------------------------------------------------------------------

at::Tensor local_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto* impl = as_dtensor(tensor);
  return impl ? impl->local() : tensor;
}

const Move* move_of(const Decision& decision, int argument, int element) {
  for (const auto& move : decision.moves) {
    if (move.argument == argument && move.element == element) return &move;
  }
  return nullptr;
}

bool is_brought_back(const Decision& decision, int argument, int element) {
  return std::ranges::any_of(decision.write_backs,
                     [&](const WriteBack& back) { return back.argument == argument && back.element == element; });
}

// A whole tensor in the memory order of one device, which the results' order may follow from, and with which some kernels refuse others.
at::Tensor in_order(const at::Tensor& whole, const Layout& layout) {
  if (whole.strides() == layout.strides()) return whole;
  const auto strides = at::infer_dense_strides(layout.sizes(), layout.strides());
  return whole.strides() == c10::IntArrayRef(strides) ? whole : at::empty_strided(layout.sizes(), strides, whole.options()).copy_(whole);
}

// Whether an operand is whole, as all are of an operator that runs without a rule, and may be another tensor than the operand's own shard.
bool is_whole_copy(const Decision& decision, int argument, int element) {
  const auto& info = *decision.info;
  if (decision.outputs_known || info.in_place) return false;
  const bool written = std::ranges::find(info.written, argument) != info.written.end();
  return !written || is_brought_back(decision, argument, element);
}

void replace_by_locals(Stack& stack, size_t begin, const Decision& decision) {
  Operands operands;
  if (!decision.moves.empty()) {
    for (const auto& in : tensors_in(arguments(stack, begin))) {
      if (const auto* impl = as_dtensor(in.tensor)) operands.push_back(impl);
    }
  }
  const bool may_keep = all_distinct(operands);
  for (size_t i = begin; i < stack.size(); ++i) {
    auto& value = stack[i];
    const int argument = static_cast<int>(i - begin);
    auto local = [&](const at::Tensor& tensor, int element) {
      const auto* move = tensor.defined() ? move_of(decision, argument, element) : nullptr;
      const auto part =
          move ? moved(*decision.info, tensor, *move, may_keep && !is_brought_back(decision, argument, element)) : local_of(tensor);
      auto* impl = tensor.defined() && is_whole_copy(decision, argument, element) ? as_dtensor(tensor) : nullptr;
      return impl ? in_order(part, *impl->layout()) : part;
    };
    value = with_tensors(value, local);
  }
}

// -- Written operands that do not stay as they lie ---------------------------------------------------------------------------

// What the operator writes to instead of the operands themselves. A moved part may be a view of the operand's own.
std::vector<at::Tensor> separate_written(Stack& stack, size_t begin, const Decision& decision) {
  std::vector<at::Tensor> separate;
  for (const auto& back : decision.write_backs) {
    auto& value = stack[begin + back.argument];
    separate.push_back(tensor_at(value, back.element).clone());
    value = with_tensors(value, [&](const at::Tensor& tensor, int element) { return element == back.element ? separate.back() : tensor; });
  }
  return separate;
}

bool is_alone(DTensorImpl& impl);

bool has_norm(const Layout& layout) {
  const auto placements = layout.placements();
  return std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(ReduceOp::norm2); });
}

// A pending norm, which cannot hold numbers below zero, is pending no longer.
void write_back(const Decision& decision, const std::vector<c10::IValue>& originals, const std::vector<at::Tensor>& separate) {
  for (size_t i = 0; i < separate.size(); ++i) {
    const auto& back = decision.write_backs[i];
    const auto tensor = tensor_at(originals[back.argument], back.element);
    auto* impl = as_dtensor(tensor);
    if (impl && has_norm(*back.home) && !has_norm(*back.written) && is_alone(*impl)) {
      impl->set_local(separate[i], back.written);
    } else {
      local_of(tensor).copy_(move_local(separate[i], back.written, back.home).get());
    }
  }
}

// Where libtorch's own kernel for lists would write one tensor after the other, and autograd would see it: what it saved of them is old.
void bump_versions(const c10::OperatorHandle& op, const OpInfo& info, const std::vector<c10::IValue>& arguments) {
  if (!info.has_tensor_list || op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) return;
  for (const int argument : info.written) {
    if (!arguments[argument].isTensorList()) continue;
    for (const auto& [tensor, a, element] : tensors_in(arguments[argument])) {
      if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// Whether the local memory can be replaced: nobody else has it, and no view or base of it would be forgotten.
bool is_alone(DTensorImpl& impl) {
  before_write(impl.local());
  if (!impl.owns_local_alone()) return false;
  if (!has_copied_views(impl.local())) [[likely]] return true;
  wait_for_all_readers();  // a move under way has memory too, on one rank longer than on another
  return !has_copied_views(impl.local());
}

}  // namespace

bool may_cut(const at::Tensor& written) {
  auto& impl = *as_dtensor(written);
  const bool is_parameter = written.requires_grad() && written.is_leaf();
  return !is_parameter && !impl.laid_out && !impl.member() && !impl.layout()->is_deferred() && is_alone(impl);
}

// A whole tensor that nobody laid out becomes its part. The same value, so that who else has the tensor may not mind.
static bool cut_written(const Decision& decision, const c10::IValue& written) {
  if (!may_cut(written.toTensor())) return false;
  auto& impl = *as_dtensor(written.toTensor());
  const auto& to = decision.cut_first->to;
  LocalMode local;
  impl.set_local(in_reported_order(in_own_memory(move_local(impl.local(), impl.layout(), to).get()), *to), to);
  return true;
}

void separate_overlapping(const OpInfo& info, Stack& stack, size_t begin) {
  for (const int w : info.written) {
    if (!stack[begin + w].isTensor()) continue;
    const auto& written = stack[begin + w].toTensor();
    for (size_t i = begin; i < stack.size(); ++i) {
      if (i == begin + w || !stack[i].isTensor()) continue;
      const auto& other = stack[i].toTensor();
      if (overlap(written, other)) stack[i] = other.clone();
    }
  }
}

// The value that a member's group has at hand; undefined where it has none.
static at::Tensor gathered_by_group(DTensorImpl& impl, const Move& move) {
  const auto& layout = impl.layout();
  const auto m = layout->flat_dim();
  const auto& member = *impl.member();
  if (m < 0 || move.to->placements()[m].is_flat()) return {};
  const bool changed = member.generation >= 0 && impl.version_counter().current_version() > 0;
  const auto elements = changed ? at::Tensor() : member.group->gather(member.index, layout->dtype(), member.generation);
  if (!elements.defined()) return {};
  Placements whole(layout->placements().begin(), layout->placements().end());
  whole[m] = replicate();
  auto part = from_elements(elements, *layout);
  if (move.to->placements() != PlacementsRef(whole)) part = move_local(part, layout->with(whole), move.to).get();
  return move.for_view ? part.clone() : part;
}

at::Tensor moved(const OpInfo& info, const at::Tensor& tensor, const Move& move, bool may_keep) {
  auto* impl = as_dtensor(tensor);
  if (impl && impl->member()) [[unlikely]] {
    if (auto part = gathered_by_group(*impl, move); part.defined()) return part;
  }
  if (move.from->is_flat()) [[unlikely]]
    check_explicit(info, move);
  const bool keep = may_keep && impl && move.keeps && is_alone(*impl);
  auto local = impl ? impl->local() : tensor;
  if (impl && impl->member() && local.device().type() != impl->device().type()) [[unlikely]] local = local.to(impl->device());
  auto part = move_local(local, move.from, move.to).get();
  // Kernels read saved state (the statistics of a norm) as contiguous where one device would have it so; a chunk may be a view.
  if (move.row_major && !part.is_contiguous()) part = part.contiguous();
  if (!keep) return part;
  impl->set_local(in_reported_order(in_own_memory(std::move(part)), *move.to), move.to);
  return impl->local();
}

namespace {

// Whether lists that the operator writes hold a tensor, or views of one, twice, so that one write would miss the other: their memories
// are two, or will be when they have moved.
bool writes_twice(const Decision& decision, const Stack& stack, size_t begin) {
  const bool moves = !decision.moves.empty() || !decision.write_backs.empty();
  if (!moves && !any_copied_views()) return false;
  std::unordered_set<const c10::StorageImpl*> seen, missing;  // memories, and those that a write to an earlier one would miss
  for (const int argument : decision.info->written) {
    if (!stack[begin + argument].isTensorList()) continue;
    for (const auto& in : tensors_in(stack[begin + argument])) {
      const auto part = local_of(in.tensor);
      if (!part.defined() || !part.has_storage() || !(moves || has_copied_views(part))) continue;
      const auto* memory = part.storage().unsafeGetStorageImpl();
      if ((!seen.insert(memory).second && moves) || missing.count(memory)) return true;
      for (const auto& held : copies_of(part)) missing.insert(held.local.storage().unsafeGetStorageImpl());
    }
  }
  return false;
}

// An operator on lists as one call for each of their elements.
void run_one_by_one(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin) {
  const std::vector<c10::IValue> arguments(stack.begin() + static_cast<int64_t>(begin), stack.end());
  const auto count = arguments[info.written[0]].toListRef().size();
  stack.resize(begin);
  for (size_t i = 0; i < count; ++i) {
    Stack one;
    for (const auto& value : arguments) {
      if (!value.isList() || value.toListRef().size() != count) {
        one.push_back(value);
        continue;
      }
      const auto all = value.toList();
      c10::impl::GenericList element(all.elementType());
      element.push_back(all.get(i));
      one.push_back(element);
    }
    op.callBoxed(one);
  }
}

}  // namespace

bool lacks_values(const Stack& stack, size_t begin) {
  return any_tensor(arguments(stack, begin), [](const at::Tensor& tensor) { return tensor.is_meta(); });
}

void run_without_values(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin, const Decision& decision) {
  if (info.makes_results && !decision.outputs_known) return op.callBoxed(&stack);
  const auto base = info.is_view && stack[begin].isTensor() ? stack[begin].toTensor() : at::Tensor();
  size_t index = 0;
  const auto next = [&] {
    const auto& like = decision.outputs.at(index++);
    if (!like) return at::Tensor();
    const auto sizes = like->layout()->local_sizes();
    if (base.defined() && base.is_meta()) return dtensor::detail::alias(base, sizes, contiguous_strides(sizes), 0);
    return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(like->layout()->dtype()));
  };
  std::vector<c10::IValue> results;
  for (size_t r = 0; r < info.schema->returns().size(); ++r) {
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    if (source >= 0) {
      results.push_back(stack[begin + source]);
    } else if (info.schema->returns()[r].type()->kind() == c10::TypeKind::TensorType) {
      results.emplace_back(next());
    } else {
      std::vector<at::Tensor> list;
      while (index < decision.outputs.size()) list.push_back(next());
      results.emplace_back(list);
    }
  }
  stack.erase(stack.begin() + static_cast<int64_t>(begin), stack.end());
  for (auto& result : results) stack.push_back(std::move(result));
}

// The "device" of a call, if it may have one.
static c10::IValue* device_argument(const OpInfo& info, Stack& stack, size_t begin) {
  const auto at = info.schema->argumentIndexWithName("device");
  return at ? &stack[begin + *at] : nullptr;
}

void make_on_mesh(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh) {
  auto* device = device_argument(info, stack, begin);
  if (!device) return;
  if (!mesh.contains_this_rank()) *device = c10::Device(at::kMeta);
  if (device->isNone()) *device = c10::Device(mesh.device_type());
}

// Compares the plain operands between the mesh's ranks, in some calls.
static void compare_plain(const Decision& decision, const Stack& stack, size_t begin) {
  if (!checks_replicated || !Compared::is_due(compared(decision.mesh).calls++)) return;
  for (const auto& [tensor, argument, element] : tensors_in(arguments(stack, begin))) {
    if (!tensor.defined() || tensor.dim() == 0 || as_dtensor(tensor) || is_overwritten(*decision.info, argument)) continue;
    check_replicated(decision.info->name, tensor, decision.mesh);
  }
}

void run_general(const c10::OperatorHandle& op, Stack& stack, size_t begin, const Decision& decision) try {
  const auto& info = *decision.info;
  const bool worked_out = !decision.mesh.contains_this_rank();
  std::optional<dtensor::detail::StandIn> stand_in;
  if (worked_out) [[unlikely]] stand_in.emplace();
  if (decision.compares) [[unlikely]] compare_plain(decision, stack, begin);
  if (decision.cut_first && cut_written(decision, stack[begin])) [[unlikely]] return fallback(op, &stack);
  const bool lists = info.has_tensor_list && !info.written.empty() && info.schema->returns().empty();
  if (lists && writes_twice(decision, stack, begin)) return run_one_by_one(op, info, stack, begin);
  std::vector<c10::IValue> originals(stack.begin() + begin, stack.end());
  const auto written = begin_writes(info, originals);
  if (!decision.moves.empty() || !decision.write_backs.empty()) check_explicit(decision);
  if (decision.ran_whole) [[unlikely]] note_ran_whole(decision);
  {
    comm::Cause cause(info.name, true, text_of(module_of_moves(decision, originals)));
    LocalMode local;
    replace_by_locals(stack, begin, decision);
    if (!info.has_tensor_argument) make_on_mesh(info, stack, begin, decision.mesh);
    const auto separate = separate_written(stack, begin, decision);
    if (!info.written.empty()) separate_overlapping(info, stack, begin);
    rules::LocalCall call{op, stack, begin, originals};
    if (worked_out && skip_draws(decision, call)) {
    } else if (worked_out || lacks_values(stack, begin)) {
      run_without_values(op, info, stack, begin, decision);
    } else if (decision.lowering) {
      decision.lowering(call);
    } else {
      call.call();
    }
    write_back(decision, originals, separate);
    carry_over(written);
  }
  if (!decision.moves.empty() || !decision.write_backs.empty()) note_written(info, originals);
  bump_versions(op, info, originals);
  wrap_results(stack, begin, decision, originals);
} catch (...) {
  rethrow_failure(decision);
}

bool is_made_elsewhere(const OpInfo& info, Stack& stack, size_t begin, const DeviceMesh& mesh) {
  const auto* value = device_argument(info, stack, begin);
  return value && value->isDevice() && value->toDevice().type() != mesh.device_type() && !value->toDevice().is_meta();
}

bool is_factory(const OpInfo& info) {
  return std::ranges::any_of(info.schema->returns(), [](const c10::Argument& a) { return a.type()->str() == "Tensor"; });
}

void run_plain(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard past{c10::DispatchKeySet(kDTensorKey)};
  op.callBoxed(&stack);
}

}  // namespace dtensor::dispatch
