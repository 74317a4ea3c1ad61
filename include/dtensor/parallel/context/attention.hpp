// Attention over a sequence that is cut over the ranks of a mesh, on plain tensors: each rank has some rows of queries, keys and values.
//
//   dt::ContextPlan plan(dt::AttentionMask::causal(), {dt::PackedSequence(4096)}, dt::context::zigzag_order(4096, mesh.size(0)));
//   auto y = dt::context_attention(q, k, v, plan, mesh, {.method = "ring"});   // of the rows plan.rows(rank)
#pragma once

#include <dtensor/gradients/kept_results.hpp>
#include <dtensor/parallel/context/agreement.hpp>
#include <dtensor/parallel/context/all_gather.hpp>
#include <dtensor/parallel/context/double_ring.hpp>
#include <dtensor/parallel/context/orders.hpp>
#include <dtensor/parallel/context/ring.hpp>
#include <dtensor/parallel/context/token_ring.hpp>
#include <dtensor/parallel/context/ulysses.hpp>

#include <fmt/ranges.h>

#include <bit>
#include <cmath>

#pragma GCC visibility push(default)

namespace dtensor {

struct ContextAttentionOptions {
  std::string method = "ring";  // ring, doublering, allgather, ulysses, usp, tokenring or automatic
  double scale = 0;             // of the scores; 0: 1 / sqrt(dim)
  // Of the weights: .probability, and a seed for each call (draw_dropout_seed). Every rank gives the same.
  AttentionDropout dropout{};
};

// softmax(scale q k^T) v under the plan's mask, for each head by itself, of one sequence (or batch of them) whose rows lie on the ranks of
// `mesh` as the plan says. This rank's rows, in the plan's order: q [batch, heads, rows, dim], k and v [batch, key heads, rows, dim];
// heads are a multiple of key heads, which groups of them share. Result: like q. Sums are float32, or float64 of float64. A query that
// sees no key has zeros, and gives none a gradient.
//
// Dropout drops the same weights whatever the method and the number of ranks. It takes our own kernel.
//
// "automatic" takes the method of which AttentionCost says that it is the fastest, the same on every rank, of those that the mesh allows:
// usp and doublering need two dimensions.
//
// Inside dt::checkpoint, output and log-sum-exp are kept, so that the second run of the function computes no attention. For "ulysses" and
// "usp", the backward pass brings queries, keys and values again.
//
// Differentiable, once. Every rank of the mesh calls it; what it communicates stands at each method. Throws for tensors that do not fit
// the plan or each other, for a method that there is not, for a probability that is none or a scale that is not finite. On all ranks,
// before anything else is sent, where the mask's predicate throws on one, and where ranks have different plans, methods, scales or dropout
// when a plan is first used on a mesh (masks by a predicate are taken to be alike).
at::Tensor context_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextPlan& plan, const DeviceMesh& mesh,
                             const ContextAttentionOptions& options = {});

// -- How ------------------------------------------------------------------------------------------------------------------

namespace context {

inline const std::vector<const Method*>& all_methods() {
  static const Ring ring;
  static const DoubleRing double_ring;
  static const AllGather all_gather;
  static const Ulysses ulysses, usp(/*with_ring=*/true);
  static const TokenRing token_ring;
  static const std::vector<const Method*> all{&ring, &double_ring, &all_gather, &ulysses, &usp, &token_ring};
  return all;
}

// Throws for a name that none has.
inline void check_method(const std::string& name) {
  std::vector<std::string> names;
  for (const auto* method : all_methods()) names.emplace_back(method->name());
  names.emplace_back("automatic");
  require(std::ranges::find(names, name) != names.end(), "context_attention", "there is no method '{}'; expected one of {}", name,
          fmt::join(names, ", "));
}

// What a rank computes in a second, for AttentionCost: products of float32 by one core, and of half types by a GPU, roughly.
inline double flops_of(c10::DeviceType device) { return device == c10::kCPU ? 3e10 : 2e14; }

inline AttentionCost cost_of(const Context& context, const Inputs& in) {
  const AttentionShape shape{in.q.size(0),
                             in.q.size(1),
                             in.k.size(1),
                             in.q.size(3),
                             static_cast<int64_t>(in.q.element_size()),
                             static_cast<int64_t>(c10::elementSize(sums_of(in.q)))};
  std::vector<int64_t> sizes;
  std::vector<CommCost> links;
  for (int64_t d = 0; d < context.mesh.ndim(); ++d) {
    sizes.push_back(context.mesh.size(d));
    links.push_back(comm_cost(context.mesh, d));
  }
  return {context.plan, shape, std::move(sizes), std::move(links), flops_of(context.mesh.device_type())};
}

// The method of that name, which check_method knows, or the one that takes the least time.
inline const Method& method_of(const std::string& name, const Context& context, const Inputs& in) {
  const auto& all = all_methods();
  if (name != "automatic") return **std::ranges::find(all, name, [](const Method* method) { return std::string(method->name()); });
  const auto cost = cost_of(context, in);
  return **std::ranges::min_element(all, {}, [&](const Method* method) { return method->seconds(cost); });
}

namespace detail {

inline void check(const Inputs& in, const ContextPlan& plan, const comm::Communicator& group) {
  constexpr auto kTag = "context_attention";
  require(plan.ranks() == group.size(), kTag, "the plan is of {} ranks, and the mesh has {}", plan.ranks(), group.size());
  for (const auto* x : {&in.q, &in.k, &in.v}) {
    dtensor::detail::check_plain(kTag, *x, "an input");
    require(x->dim() == 4 && x->size(2) == plan.length(group.rank()), kTag,
            "got sizes {}; expected [batch, heads, rows, dim] with the {} rows that the plan gives this rank",
            dtensor::detail::str_of(x->sizes()), plan.length(group.rank()));
    require(x->scalar_type() == in.q.scalar_type() && x->is_floating_point(), kTag, "got {} and {}; expected one floating-point dtype",
            c10::toString(in.q.scalar_type()), c10::toString(x->scalar_type()));
  }
  require(in.k.sizes() == in.v.sizes() && in.q.size(0) == in.k.size(0) && in.q.size(3) == in.k.size(3), kTag,
          "got q {}, k {} and v {}; expected one batch and dim, and k like v", dtensor::detail::str_of(in.q.sizes()),
          dtensor::detail::str_of(in.k.sizes()), dtensor::detail::str_of(in.v.sizes()));
  require(in.k.size(1) > 0 && in.q.size(1) % in.k.size(1) == 0, kTag, "got {} heads and {} key heads; expected a multiple of these",
          in.q.size(1), in.k.size(1));
  require(plan.batch() == 1 || plan.batch() == in.q.size(0), kTag, "the plan has {} sequences, and the batch {} rows", plan.batch(),
          in.q.size(0));
}

inline void check(const AttentionDropout& dropout, const at::Tensor& q) {
  constexpr auto kTag = "context_attention";
  require(0 <= dropout.probability && dropout.probability <= 1, kTag, "got a dropout of {}; expected a probability, from 0 to 1",
          dropout.probability);
  const auto fits = [](const std::vector<int64_t>& numbers, int64_t count) {
    return numbers.empty() || static_cast<int64_t>(numbers.size()) == count;
  };
  require(fits(dropout.batch, q.size(0)) && fits(dropout.heads, q.size(1)), kTag,
          "got a dropout of {} rows of the batch and {} heads, for queries {}; expected a number for each, or none", dropout.batch.size(),
          dropout.heads.size(), dtensor::detail::str_of(q.sizes()));
}

inline std::vector<int64_t> numbers_of(std::string_view text) { return {text.begin(), text.end()}; }

// What a call goes by that is to be the same on every rank. Of a predicate, only that it is one.
inline std::vector<SameOnAll> same_on_all(const ContextPlan& plan, const ContextAttentionOptions& options) {
  const auto& mask = plan.mask();
  std::vector<int64_t> of_mask = mask.predicate() ? std::vector<int64_t>{} : numbers_of(mask.name()), documents, rows;
  of_mask.insert(of_mask.end(), mask.numbers().begin(), mask.numbers().end());
  for (const auto& sequence : plan.sequences()) {
    documents.push_back(sequence.documents());
    for (int64_t d = 0; d < sequence.documents(); ++d) documents.push_back(sequence.document(d).end);
  }
  for (int r = 0; r < plan.ranks(); ++r) {
    rows.push_back(plan.length(r));
    rows.insert(rows.end(), plan.rows(r).begin(), plan.rows(r).end());
  }
  const auto bits = [](double number) { return std::bit_cast<int64_t>(number); };
  const auto& dropout = options.dropout;
  return {{"another method", numbers_of(options.method)},
          {fmt::format("another mask (here: {})", mask.name()), std::move(of_mask)},
          {"other documents", std::move(documents)},
          {"other rows in their plan", std::move(rows)},
          {"another scale", {bits(options.scale)}},
          {"another dropout or seed of it", {bits(dropout.probability), dropout.probability > 0 ? static_cast<int64_t>(dropout.seed) : 0}}};
}

// The method of a call, before anything of it is sent. When a plan is first used on a mesh, ranks compare what they were given. Each asks
// the mask's predicate for other pairs, and it may throw for some of them, or on some ranks: so all are asked here, and where one rank
// fails, all do.
inline const Method& settled_method(const Context& context, const Inputs& in, const ContextAttentionOptions& options) {
  using Settled = ContextPlan::Settled;
  const auto& plan = context.plan;
  auto& world = context.mesh.world();
  auto& group = context.group();
  if (!plan.is_settled(Settled::alike, world, group) && !in.q.is_meta()) {
    check_same_on_all(context.mesh, same_on_all(plan, options));
    plan.settle(Settled::alike, world, group);
  }
  const auto pairs = options.method == "automatic" ? Settled::all_pairs : Settled::own_pairs;
  if (!plan.mask().predicate() || plan.is_settled(pairs, world, group)) return method_of(options.method, context, in);
  const Method* method = nullptr;
  on_all_or_none(context.mesh, fmt::format("the predicate of the mask '{}'", plan.mask().name()), [&] {
    plan.cells(group.rank());
    for (int r = 0; r < plan.ranks(); ++r) plan.meet(r, group.rank());  // who needs this rank's keys
    method = &method_of(options.method, context, in);
  });
  plan.settle(pairs, world, group);
  return *method;
}

struct Attention : torch::autograd::Function<Attention> {
  struct Given : torch::CustomClassHolder {
    Given(Context c, const Method& m) : context(std::move(c)), method(m) {}
    Context context;
    const Method& method;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* saves, const c10::intrusive_ptr<Given>& given, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v) {
    auto saved = kept_in_checkpoints([&] {
      std::vector<at::Tensor> results;
      const auto attended = given->method.forward(given->context, {q, k, v}, results);
      results.insert(results.begin(), {attended.out.to(q.scalar_type()), attended.lse});
      return results;
    });
    const auto out = saved[0];
    saved.insert(saved.begin(), {q, k, v});
    saves->save_for_backward(saved);
    saves->saved_data["given"] = c10::IValue::make_capsule(given);
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* saves, const torch::autograd::variable_list& grads) {
    require(!c10::GradMode::is_enabled(), "context_attention", "its gradient has none; hint: leave create_graph out");
    const NoSpmd plain;
    const auto capsule = saves->saved_data["given"].toCapsule();
    const auto& given = static_cast<const Given&>(*capsule);
    const auto all = saves->get_saved_variables();
    const Inputs in{all[0], all[1], all[2]};
    const auto own = given.method.backward(given.context, in, {all[3], all[4]}, grads[0].contiguous(), {all.begin() + 5, all.end()});
    const auto dtype = in.q.scalar_type();
    return {at::Tensor(), own.dq.to(dtype), own.dk.to(dtype), own.dv.to(dtype)};
  }
};

}  // namespace detail

}  // namespace context

inline at::Tensor context_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const ContextPlan& plan,
                                    const DeviceMesh& mesh, const ContextAttentionOptions& options) {
  const NoSpmd plain;
  context::Context context{plan, mesh, options.scale};
  context::detail::check({q, k, v}, plan, context.group());
  context::detail::check(options.dropout, q);
  require(std::isfinite(options.scale), "context_attention", "got a scale of {}; expected a finite number; hint: 0 is 1 / sqrt(dim)",
          options.scale);
  context::check_method(options.method);
  if (options.dropout.probability > 0) context.dropout = options.dropout;
  context.in_checkpoint = KeepWith::current() != nullptr;
  const auto& method = context::detail::settled_method(context, {q, k, v}, options);
  if (context.scale == 0) context.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  method.check(context, {q, k, v});
  using context::detail::Attention;
  return Attention::apply(c10::make_intrusive<Attention::Given>(std::move(context), method), q, k, v);
}

}  // namespace dtensor

#pragma GCC visibility pop
