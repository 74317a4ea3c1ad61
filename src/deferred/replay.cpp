#include "src/deferred/replay.hpp"

#include "rng/counter_generator.hpp"
#include "src/deferred/exact.hpp"

#include <dtensor/rng/position.hpp>
#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <functional>

namespace dtensor::deferred {

using dispatch::Stack;

namespace {

// Runs an entry: from its arguments to its results.
using Run = std::function<void(const Entry& entry, Stack& stack)>;

// The new tensors among results, flattened as in Entry::outputs.
std::vector<at::Tensor> new_tensors(const Entry& entry, const Stack& results) {
  std::vector<at::Tensor> tensors;
  const auto* info = entry.op ? &dispatch::info_of(*entry.op) : nullptr;
  for (size_t r = 0; r < results.size(); ++r) {
    if (info && r < info->returns_argument.size() && info->returns_argument[r] >= 0) continue;
    for (const auto& in : tensors_in(results[r])) {
      if (in.tensor.defined()) tensors.push_back(in.tensor);
    }
  }
  return tensors;
}

// After which entry each tensor is no longer needed; `metas` are needed to the end.
std::vector<std::vector<const c10::TensorImpl*>> last_uses(const Entries& entries, c10::ArrayRef<at::Tensor> metas) {
  std::unordered_map<const c10::TensorImpl*, size_t> last;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto used = [&](const at::Tensor& meta) { last[meta.unsafeGetTensorImpl()] = i; };
    for_each_meta(entries[i]->arguments, used);
    for (const auto& output : entries[i]->outputs) used(output);
  }
  for (const auto& meta : metas) last.erase(meta.unsafeGetTensorImpl());
  std::vector<std::vector<const c10::TensorImpl*>> done(entries.size());
  for (const auto& [tensor, entry] : last) done[entry].push_back(tensor);
  return done;
}

// One generator for all entries: small objects that stay, between large ones that are freed, would fragment memory.
class Generators {
 public:
  const at::Generator& as(const at::Generator& recorded) {
    auto& own = rng::as_counter(recorded) ? by_counter_ : recorded.device().is_cuda() ? of_device_ : by_stream_;
    if (own.defined()) {
      own.set_state(recorded.get_state());
    } else {
      own = rng::copy_of(recorded);
    }
    return own;
  }

 private:
  at::Generator by_counter_, by_stream_, of_device_;
};

Values replay(const Entries& entries, c10::ArrayRef<at::Tensor> metas, const Run& run) {
  const auto done = last_uses(entries, metas);
  Generators generators;
  Values values;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto& entry = *entries[i];
    Stack stack;
    for (const auto& argument : entry.arguments) {
      stack.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
        return tensor.defined() && tensor.is_meta() ? values.at(tensor.unsafeGetTensorImpl()) : tensor;
      }));
    }
    if (entry.generator_at >= 0) {
      stack[entry.generator_at] = generators.as(entry.generator);
    }
    run(entry, stack);
    const auto made = new_tensors(entry, stack);
    for (size_t k = 0; k < made.size(); ++k) values[entry.outputs.at(k).unsafeGetTensorImpl()] = made[k];
    for (const auto* tensor : done[i]) values.erase(tensor);
  }
  return values;
}

// -- On the mesh -------------------------------------------------------------------------------------------------------------

// Passes a wished layout on, from a result to operands of the same sizes.
void spread(Wishes& wishes, const Entries& entries) {
  for (auto it = entries.rbegin(); it != entries.rend(); ++it) {
    if (!exact_in_shards(**it)) continue;
    const auto pass_on = [&](const at::Tensor& meta) {
      const auto wish = wishes.find(meta.unsafeGetTensorImpl());
      if (wish == wishes.end()) return;
      const auto placements = wish->second;
      for_each_meta((*it)->arguments, [&](const at::Tensor& argument) {
        if (argument.sizes() == meta.sizes()) wishes.try_emplace(argument.unsafeGetTensorImpl(), placements);
      });
    };
    for (const auto& output : (*it)->outputs) pass_on(output);
    for (const auto& written : (*it)->written) pass_on(written);
  }
}

bool has_partial(const Placements& placements) {
  return std::ranges::any_of(placements, [](const Placement& p) { return p.is_partial(); });
}

// Operators whose results have the same value everywhere: a rank makes only its shard.
bool makes_alike(const Entry& entry) {
  for (const char* name : {"aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::empty_strided"}) {
    if (entry.op && entry.op->schema().name() == name) return true;
  }
  return false;
}

// This rank's shard of the result of such an operator.
at::Tensor made_as_shard(const Entry& entry, Stack stack, const LayoutPtr& layout) {
  const auto& schema = entry.op->schema();
  const auto sizes = layout->local_sizes();
  stack[*schema.argumentIndexWithName("size")] = sizes;
  if (const auto at = schema.argumentIndexWithName("stride")) stack[*at] = at::infer_dense_strides(sizes, layout->strides());
  LocalMode local;
  entry.op->callBoxed(&stack);
  return wrap(stack[0].toTensor(), layout);
}

// The wished layout of the entry's result; null for views, whose layout follows from their base.
LayoutPtr wished(const Entry& entry, const Wishes& wishes) {
  if (entry.outputs.size() != 1 || (entry.op && dispatch::info_of(*entry.op).is_view)) return {};
  const auto& meta = entry.outputs[0];
  const auto wish = wishes.find(meta.unsafeGetTensorImpl());
  if (wish == wishes.end() || has_partial(wish->second)) return {};
  return Layout::get(entry.mesh, wish->second, meta.sizes(), meta.strides(), meta.scalar_type());
}

// The whole tensor with the strides that one device has, because sums add up in the order of memory.
at::Tensor as_on_one_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_dtensor(tensor)) return tensor;
  const auto layout = as_dtensor(tensor)->layout();
  const auto whole = move_tensor(tensor, layout->with(Placements(layout->mesh().ndim(), replicate())));
  LocalMode local;
  auto copy = at::empty_strided(layout->sizes(), layout->strides(), as_dtensor(whole)->local().options());
  auto to = copy, from = as_dtensor(whole)->local();
  for (int64_t d = 0; d < layout->ndim(); ++d) {  // of an expanded dim there is one element
    if (layout->strides()[d] == 0 && layout->sizes()[d] > 1) to = to.narrow(d, 0, 1), from = from.narrow(d, 0, 1);
  }
  to.copy_(from);
  return copy;
}

// Runs an operator on whole plain tensors. What it wrote is copied back to the distributed tensors. Its results are replicated.
void run_whole(const Entry& entry, Stack& stack) {
  const auto& info = dispatch::info_of(*entry.op);
  const auto distributed = stack;
  for (auto& value : stack) value = with_tensors(value, as_on_one_device);
  const auto whole = stack;
  {
    NoSpmd plain;
    LocalMode local;
    entry.op->callBoxed(&stack);
  }
  for (const int w : info.written) {
    for (const auto& [tensor, argument, element] : tensors_in(distributed[w])) tensor.copy_(tensor_at(whole[w], element));
  }
  const Placements replicated(entry.mesh.ndim(), replicate());
  for (size_t r = 0; r < stack.size(); ++r) {
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    stack[r] = source >= 0 ? distributed[source] : with_tensors(stack[r], [&](const at::Tensor& tensor) {
      return tensor.defined() ? distribute_tensor(tensor, entry.mesh, replicated).tensor() : tensor;
    });
  }
}

void run_on_mesh(const Entry& entry, Stack& stack, const LayoutPtr& wish) {
  Spmd spmd(entry.mesh);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const Placements replicated(entry.mesh.ndim(), replicate());
  if (!entry.op) {
    const auto placements = wish ? wish->placements() : PlacementsRef(replicated);
    stack[0] = distribute_tensor(stack[0].toTensor(), entry.mesh, placements).tensor();
  } else if (wish && makes_alike(entry)) {
    stack = {made_as_shard(entry, std::move(stack), wish)};
  } else {
    exact_in_shards(entry) ? entry.op->callBoxed(&stack) : run_whole(entry, stack);
    if (wish && as_dtensor(stack[0].toTensor())->layout() != wish) stack[0] = move_tensor(stack[0].toTensor(), wish);
  }
}

// Nothing that is replayed is news to the ranks.
class NoChecks {
 public:
  NoChecks() { set_replication_check(false), set_generator_check(GeneratorCheck::off); }
  ~NoChecks() { set_replication_check(replication_), set_generator_check(generators_); }
  NoChecks(const NoChecks&) = delete;
  NoChecks& operator=(const NoChecks&) = delete;

 private:
  const bool replication_ = replication_check();
  const GeneratorCheck generators_ = generator_check();
};

}  // namespace

Values replay_on_one_device(const Entries& entries, c10::ArrayRef<at::Tensor> metas) {
  NoSpmd plain;
  const auto run = [](const Entry& entry, Stack& stack) {
    for (auto& value : stack) {
      value = with_tensors(value, [](const at::Tensor& tensor) { return tensor.defined() ? full_tensor(tensor) : tensor; });
    }
    LocalMode local;
    if (entry.op) return entry.op->callBoxed(&stack);
    stack[0] = stack[0].toTensor().clone();
  };
  return replay(entries, metas, run);
}

Values replay_on_mesh(const Entries& entries, c10::ArrayRef<at::Tensor> metas, Wishes wishes) {
  spread(wishes, entries);
  NoChecks no_checks;
  return replay(entries, metas, [&](const Entry& entry, Stack& stack) { run_on_mesh(entry, stack, wished(entry, wishes)); });
}

}  // namespace dtensor::deferred
