#include "src/dispatch/decide.hpp"

#include "src/dispatch/compared.hpp"
#include "src/dispatch/copied_views.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/ran_whole.hpp"
#include "src/dispatch/region.hpp"
#include "src/dispatch/replicated.hpp"

#include <dtensor/base/say.hpp>
#include <dtensor/dispatch/backward.hpp>
#include <dtensor/mesh/two_meshes.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <c10/util/hash.h>
#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/mesh/alias.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>

namespace dtensor::dispatch {

DeviceMesh common_mesh(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const Layout* first = nullptr;
  for (const auto& in : tensors_in(arguments)) {
    const auto* impl = as_dtensor(in.tensor);
    if (!impl) continue;
    const auto& layout = impl->layout();
    if (!first) first = layout.get();
    if (layout->mesh() == first->mesh()) continue;
    fail(info.name, "operands lie on two meshes; got {} and {}; {}", first->str(), layout->str(), why_two(first->mesh(), layout->mesh()));
  }
  if (!first) return *current_mesh;
  check_maker(info.name, first->mesh());
  return first->mesh();
}

namespace {

// Derivatives make tensors from nothing: zeros for an output that was not used. Outside of Spmd these are plain.
bool in_backward() { return current_backward() != nullptr; }

// torch::nn::init writes what it makes of plain tensors to a parameter, and so do programs that load one. Outside of Spmd nothing says that
// these are the same on every rank, so they are compared at each call.
bool initializes(const OpInfo& info, const rules::Call& call) {
  return info.in_place && !c10::GradMode::is_enabled() && !call.operands.empty() && call.operands[0].argument == 0 &&
         !call.operands[0].plain;
}

// The first of its kind on the mesh, which it is on all of the mesh's ranks or on none.
void check_first(const OpInfo& info, const rules::Call& call, const rules::Operand& operand, const at::Tensor& tensor) {
  constexpr size_t kMost = 1 << 14;
  auto& seen = compared(call.mesh).operands;
  const auto hash = c10::get_hash(call.schema.name(), call.schema.overload_name(), operand.argument, operand.element, operand.sizes().vec(),
                                  static_cast<int>(operand.layout->dtype()));
  if (seen.size() == kMost || seen.count(hash)) return;
  check_replicated(info.name, tensor, call.mesh);
  seen.insert(hash);
}

void check_plain_operands(const OpInfo& info, const rules::Call& call, bool explaining) {
  for (const auto& operand : call.operands) {
    if (!operand.plain) continue;
    const auto& value = call.arguments[operand.argument];
    const auto tensor = tensor_at(value, operand.element);
    if (current_mesh && is_overwritten(info, operand.argument)) continue;
    const bool outside = !current_mesh && !in_backward() && tensor.dim() > 0 && call.mesh.size() > 1;
    if (outside && initializes(info, call)) {
      if (!explaining && checks_replicated) check_replicated(info.name, tensor, call.mesh);
      continue;
    }
    if (outside) {
      fail(info.name,
           "a plain tensor meets distributed ones; got a plain tensor of sizes [{}] as argument {} of {}; "
           "hint: run this code inside dt::Spmd, where plain tensors count as replicated, or distribute_tensor it; if the model was made "
           "outside of dt::Spmd, make it inside; a data loader's code makes all its tensors under dt::NoSpmd",
           fmt::join(tensor.sizes(), ", "), operand.argument, describe(call));
    }
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (!explaining && checks_replicated && !number && (current_mesh || tensor.dim() > 0)) check_first(info, call, operand, tensor);
  }
}

bool has_plain_operand(const rules::Call& call) {
  return std::ranges::any_of(call.operands, [](const auto& operand) { return operand.plain && operand.ndim() > 0; });
}

// Whether an operand is a plain tensor inside Spmd, whose values may differ between ranks in a later call if not in this.
bool may_differ(const rules::Call& call) { return current_mesh && call.mesh.size() > 1 && has_plain_operand(call); }

// One rank is as it is without a mesh, and has nothing to be told.
void warn_once(const OpInfo& info, const DeviceMesh& mesh, const char* what) {
  if (mesh.size() == 1) return;
  static std::mutex mutex;
  static std::set<std::string> warned;
  std::lock_guard<std::mutex> lock(mutex);
  if (!warned.insert(info.name).second) return;
  dtensor::detail::say("dtensor: {} {} (said once per operator)\n", info.name, what);
}

// Whether a move between two layouts takes a collective.
bool communicates(const LayoutPtr& from, const LayoutPtr& to) {
  const auto plan = plan_move(from, to);
  return std::ranges::any_of(plan.steps, [](const Step& step) {
    return !step.from.is_replicate() && !(step.mesh_dims.size() == 1 && step.before->mesh().size(step.mesh_dims[0]) == 1);
  });
}

std::vector<Move> moves_for(const OpInfo& info, const rules::Call& call, const rules::Resolution& resolution) {
  std::vector<Move> moves;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    if (operand.layout == resolution.in[i]) continue;
    const auto& to = resolution.in[i];
    // Autograd writes a gradient through as_strided: where the tensor itself becomes whole, that is no write to a copy.
    const bool keeps = (operand.layout->has_partial() && !to->has_partial()) || call.schema.name() == "aten::as_strided";
    moves.push_back({operand.argument, operand.element, operand.layout, to, communicates(operand.layout, to), keeps,
                     to->strides() == c10::IntArrayRef(contiguous_strides(to->sizes())), info.is_view});
  }
  return moves;
}

std::vector<WriteBack> write_backs_for(const OpInfo& info, const rules::Call& call, const rules::Resolution& resolution) {
  std::vector<WriteBack> backs;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    const bool written = std::ranges::find(info.written, operand.argument) != info.written.end();
    if (!written || (resolution.in[i] == operand.layout && resolution.written[i] == operand.layout)) continue;
    backs.push_back(
        {operand.argument, operand.element, resolution.written[i], operand.layout, communicates(resolution.written[i], operand.layout)});
  }
  return backs;
}

// How what an operator writes would lie if it were not whole: a move that communicates nothing, where operands that come in cut are
// gathered otherwise. (What copy_ writes to is where its source is asked to lie.)
std::optional<Move> cut_before(const OpInfo& info, const rules::Call& call, const rules::Rule* rule, const std::vector<Move>& moves) {
  const bool gathers = std::ranges::any_of(moves, [](const Move& move) { return move.communicates && move.argument > 0; });
  if (!rule || !info.in_place || !gathers || call.operands[0].argument != 0 || call.operands[0].element >= 0) return std::nullopt;
  const auto& written = call.operands[0];
  if (written.plain || written.pinned || written.layout->is_flat() || info.schema->name() == "aten::copy_") return std::nullopt;
  rules::Call again(call.schema, call.arguments, call.mesh);
  again.in_place = true;
  again.operands[0].yields = true;
  const auto resolution = resolve(again, info, rule, nullptr);
  const auto& to = resolution.in[0];
  if (to == written.layout || resolution.written[0] != to) return std::nullopt;
  for (size_t m = 0; m < to->placements().size(); ++m) {
    const auto &before = written.placements()[m], &after = to->placements()[m];
    const bool comes_cut =
        std::any_of(call.operands.begin() + 1, call.operands.end(), [m](const auto& other) { return other.placements()[m].is_shard(); });
    if (before != after && !(before.is_replicate() && after.is_shard() && comes_cut)) return std::nullopt;
  }
  return Move{0, -1, written.layout, to};
}

// Layouts of the outputs, when they are known before the local call.
bool set_outputs(Decision& decision, const rules::Call& call, const rules::Resolution& resolution) {
  if (call.outputs.empty() || call.outputs.size() != resolution.out.size()) return false;
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const auto& meta = call.outputs[i];
    decision.outputs.emplace_back();
    if (!meta.defined) continue;
    if (meta.open) decision.open.push_back(i);
    auto layout = Layout::get(call.mesh, resolution.out[i], meta.sizes, meta.strides, meta.dtype);
    decision.outputs.back() = c10::make_intrusive<DTensorImpl>(std::move(layout));
  }
  if (call.schema.name() == "aten::as_strided" && !call.ints_arg("storage_offset").empty()) {
    decision.from_memory = true;
    decision.offsets = call.ints_arg("storage_offset");
  } else if (decision.info->is_view && std::ranges::any_of(call.outputs, [](const auto& o) { return o.offset; })) {
    for (const auto& meta : call.outputs) decision.offsets.push_back(meta.offset);
  }
  return true;
}

// Whether some rank may have an empty shard of an operand, where kernels refuse less than with a full one. (Of a dim of at least p * p
// elements every one of p ranks has some.)
bool may_be_empty(const Layout& layout) {
  if (layout.is_flat()) return true;
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    int64_t parts = 1, blocks = 1;
    for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
      const auto& p = layout.placements()[m];
      if (!p.is_shard(d)) continue;
      if (p.shares) return true;
      parts *= layout.mesh().size(m);
      blocks = std::max<int64_t>(blocks, p.split * p.unit);
    }
    const auto length = layout.sizes()[d] / blocks;
    if (length % parts != 0 && length < parts * parts) return true;
  }
  return false;
}

// Throws where the result has other sizes than what it is written to in place. Kernels refuse that of whole tensors, and may not see it in
// a part; addbmm_ resizes.
void check_in_place_sizes(const c10::OperatorHandle& op, const OpInfo& info, const rules::Call& call, const rules::Rule& rule) {
  if (!info.in_place || info.makes_results || call.operands.empty() || call.operands[0].argument != 0) return;
  const auto sizes = rule.output_sizes(call);
  if (sizes.empty() || c10::IntArrayRef(sizes[0]) == call.operands[0].sizes()) return;
  rehearse(op, call);
  fail(info.name, "would resize a distributed tensor in place to [{}]; got {}; hint: use the out-of-place form and assign the result",
       fmt::join(sizes[0], ", "), describe(call));
}

// Whether the call writes to a tensor whose elements share places. A part of it, moved back, would undo what was written at places that
// elements share which the operator did not write.
bool writes_overlapping(const OpInfo& info, const rules::Call& call) {
  return info.in_place && !call.operands.empty() && call.operands[0].argument == 0 && overlaps(*call.operands[0].layout);
}

struct Ahead {
  bool rehearsed = false;
  bool sure = false;  // call.outputs have the dtypes of one device, too
};

// Refuses what one device refuses. Fills call.outputs where they are known; without a rule, which this takes away where it is of no use,
// operands are replicated.
Ahead look_ahead(const c10::OperatorHandle& op, const OpInfo& info, rules::Call& call, const rules::Rule*& rule) {
  const bool described = rule && rule->describes_outputs();
  auto outputs = call.operands.empty() || described ? c10::nullopt : meta_outputs(op, call);
  Ahead ahead{!outputs && !call.operands.empty(), described || outputs};
  if (ahead.rehearsed) rehearse(op, call);
  const bool out_form = !info.in_place && !info.written.empty();  // of which no functional form is known
  if (rule && (rule->data_dependent() || out_form)) rule = nullptr;
  if (!rule || !info.makes_results) return ahead;
  call.outputs = outputs && !outputs->empty() ? std::move(*outputs) : rule->output_metas(call);
  if (call.outputs.empty() && info.returns_tensors_only && !info.schema->returns().empty()) rule = nullptr;
  return ahead;
}

// Whether this rank has no part of a tensor that others have parts of.
bool has_empty_shard(const Layout& layout) {
  return c10::multiply_integers(layout.local_sizes()) == 0 && c10::multiply_integers(layout.sizes()) > 0;
}

// Whether ranks may have parts of other lengths than each other.
bool is_uneven(const Layout& layout) {
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    int64_t parts = 1;
    for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
      const auto& p = layout.placements()[m];
      if (!p.is_shard(d)) continue;
      if (p.shares) return true;
      parts *= layout.mesh().size(m) * p.split * p.unit;
    }
    if (layout.sizes()[d] % parts != 0) return true;
  }
  return false;
}

// A dim of length one has any place in the order of memory. Where that is the length of some ranks' shards only, a pointwise operator would
// leave them in another order than others: so all lie in the order that is reported.
bool may_change_order(const Decision& decision, const rules::Rule* rule) {
  const auto* entry = rule ? rules::find_entry(*decision.info->schema) : nullptr;
  if (!entry || std::string_view(entry->family) != "pointwise" || decision.info->is_view || !decision.info->makes_results) return false;
  return std::ranges::any_of(decision.outputs, [](const auto& like) { return like && is_uneven(*like->layout()); });
}

// A rank that has no part of any result has nothing to compute, and need not ask whether the kernel takes empty operands beside others
// that broadcast. Empty: this rank, or this operator, is not of that kind.
rules::Lowering nothing_to_compute(const Decision& decision, const rules::Call& call, const rules::Resolution& resolution, bool sure) {
  const auto& info = *decision.info;
  if (info.is_view || info.has_tensor_list || info.schema->argumentIndexWithName("generator")) return {};
  if (info.in_place && !info.makes_results) {
    const auto& written = info.written;
    const int i = written.size() == 1 ? call.operand_index(written[0]) : -1;
    if (i < 0 || info.returns_argument != written || !has_empty_shard(*resolution.in[i])) return {};
    return [argument = written[0]](rules::LocalCall& local) { local.replace({local.arg(argument)}); };
  }
  const auto& outputs = decision.outputs;
  const bool empty = std::ranges::all_of(outputs, [](const auto& like) { return like && has_empty_shard(*like->layout()); });
  if (!sure || !decision.outputs_known || !decision.open.empty() || !info.written.empty() || outputs.empty() || !empty) return {};
  const auto beside = std::ranges::find_if(call.operands, [](const auto& operand) { return operand.element < 0; });
  if (beside == call.operands.end()) return {};
  return [outputs, argument = beside->argument](rules::LocalCall& local) {
    const auto device = local.arg(argument).toTensor().device();  // a shard may lie on the host
    std::vector<c10::IValue> results;
    for (const auto& like : outputs) {
      results.emplace_back(at::empty(like->layout()->local_sizes(), at::TensorOptions(like->layout()->dtype()).device(device)));
    }
    local.replace(std::move(results));
  };
}

}  // namespace

void check_supported(const OpInfo& info) {
  require(
      info.schema->name() != "aten::set_", info.name,
      "a distributed tensor has no storage to set; hint: dt::load(module, path) of <dtensor/checkpoint/torch_files.hpp> reads the files "
      "that torch::load reads, of modules, optimizers and tensors; under dt::NoSpmd torch::load reads plain ones");
  require(!info.changes_metadata, info.name,
          "would change the shape of a distributed tensor in place, which would separate its layout from its local shard; "
          "hint: use the out-of-place form and assign the result");
}

std::shared_ptr<Decision> decide(const c10::OperatorHandle& op, const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, Trace* trace) {
  check_supported(info);
  rules::Call call(*info.schema, arguments, common_mesh(info, arguments));
  call.in_place = info.in_place;
  check_plain_operands(info, call, trace != nullptr);

  const auto* rule = info.rule;
  const auto ahead = look_ahead(op, info, call, rule);
  if (rule) check_in_place_sizes(op, info, call, *rule);
  if (writes_overlapping(info, call)) {  // it stays where it is
    call.operands[0].pinned = true;
    if (call.operands[0].layout->is_replicated()) rule = nullptr;
  }
  if (!trace && !info.rule && !call.operands.empty() && info.name != "aten::_local_scalar_dense") {
    warn_once(info, call.mesh, "has no sharding rule and runs on replicated operands");
  }

  auto decision = std::make_shared<Decision>(Decision{&info, call.mesh});
  const auto resolution = resolve(call, info, rule, trace);
  decision->moves = moves_for(info, call, resolution);
  decision->cut_first = cut_before(info, call, rule, decision->moves);
  decision->ran_whole = find_ran_whole(info, call, resolution);
  decision->write_backs = write_backs_for(info, call, resolution);
  decision->outputs_known = rule && info.makes_results && set_outputs(*decision, call, resolution);
  if (rule) decision->lowering = rule->lower(call, resolution);
  const bool moves = std::ranges::any_of(decision->moves, [](const Move& move) { return move.communicates; });
  const bool empty = std::ranges::any_of(resolution.in, [](const LayoutPtr& layout) { return may_be_empty(*layout); });
  const bool whole = std::ranges::all_of(resolution.in, [](const LayoutPtr& layout) { return layout->is_replicated(); });
  if (!trace && moves && whole && info.schema->argumentIndexWithName("generator")) {
    warn_once(info, call.mesh,
              "is drawn whole on every rank from gathered operands: how much it takes of the one stream depends on their values");
  }
  // What kernels refuse, as dtypes, is refused on every rank, and before anything is moved.
  if (!ahead.rehearsed && (moves || empty || decision->lowering || !decision->write_backs.empty())) rehearse(op, call);
  if (rule && !decision->lowering) decision->lowering = nothing_to_compute(*decision, call, resolution, ahead.sure);
  if (!decision->lowering && may_change_order(*decision, rule)) decision->lowering = [](rules::LocalCall& local) { local.call(); };
  decision->casts = call.schema.name() == "aten::_to_copy" && decision->outputs.size() == 1;
  decision->gives_pending = std::ranges::any_of(decision->outputs,
                                        [](const auto& output) { return output && output->layout()->has_partial(); });
  // The strides of a view say where its elements are, if it has any, and where it was expanded.
  decision->gives_thin = std::ranges::any_of(decision->outputs, [&](const auto& output) {
    if (!output || !is_thin(*output->layout())) return false;
    return !info.is_view || (has_empty_shard(*output->layout()) && !dtensor::detail::is_expanded(*output->layout()));
  });
  for (const auto& operand : call.operands) decision->pinned.push_back(operand.layout);
  decision->once = !current_mesh && (in_backward() || initializes(info, call)) && has_plain_operand(call);
  decision->compares = may_differ(call);
  decision->simple = !decision->compares && !info.has_tensor_list && info.returns_tensors_only &&
                     (decision->outputs_known || !info.makes_results) && decision->open.empty() && !call.operands.empty() &&
                     decision->write_backs.empty() && !decision->cut_first;
  return decision;
}

static std::string describe(const rules::Operand& operand) {
  const auto text = operand.layout->str();
  return operand.plain ? text.substr(0, text.find(" (")) + " (plain)" : text;
}

std::string describe(const rules::Call& call) {
  std::string text = call.schema.name() + "(";
  for (size_t i = 0; i < call.operands.size(); ++i) text += (i ? ", " : "") + describe(call.operands[i]);
  return text + ") on " + call.mesh.str();
}

}  // namespace dtensor::dispatch
