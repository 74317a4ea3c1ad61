// A way of computing attention over a sequence that is cut over ranks. Each has a file of its own.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/context/block_attention.hpp>
#include <dtensor/parallel/context/cost.hpp>

#include <optional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::context {

// What all calls of a method have.
struct Context {
  ContextPlan plan;
  DeviceMesh mesh;  // whose ranks the plan speaks of
  double scale = 1;
  std::optional<AttentionDropout> dropout{};
  bool in_checkpoint = false;  // inputs of backward that messages can bring are not to be saved

  comm::Communicator& group() const { return dtensor::detail::group_of(mesh); }
};

// Which ranks of a plan a member of a group stands for: first + member * step, and the each - 1 after it.
struct Members {
  int first = 0, step = 1, each = 1;
};

// A group of ranks between which keys go: those of one member to the queries of another.
struct Ranks {
  const Context& context;
  const ContextPlan& plan;    // the context's, or one of groups of its ranks
  comm::Communicator* group;  // null: this rank alone
  Members queries{}, keys{};  // keys of one rank each
  int64_t first_head = 0;     // of the queries, among all of this rank

  explicit Ranks(const Context& c) : Ranks(c, c.plan, &c.group()) {}
  Ranks(const Context& c, const ContextPlan& p, comm::Communicator* g, Members q = {}, Members k = {})
      : context(c), plan(p), group(g), queries(q), keys(k) {}

  // The same ranks, for the heads from this one on.
  Ranks from_head(int64_t head) const {
    auto same = *this;
    same.first_head = head;
    return same;
  }

  int rank() const { return group ? group->rank() : 0; }
  int size() const { return group ? group->size() : 1; }
  int before(int steps) const { return (rank() - steps + size()) % size(); }
  int after(int steps) const { return (rank() + steps) % size(); }

  int rank_of_keys(int member) const { return keys.first + member * keys.step; }
  int64_t length_of_keys(int member) const { return plan.length(rank_of_keys(member)); }
  // Whether any query of one member sees any key of the other.
  bool meet(int query_member, int key_member) const {
    for (int i = 0; i < queries.each; ++i) {
      if (plan.meet(queries.first + query_member * queries.step + i, rank_of_keys(key_member))) return true;
    }
    return false;
  }

  // The call between the queries of one member, which are of one rank, and the keys of another.
  AttentionCall call(int query_member, int key_member) const {
    const int q = queries.first + query_member * queries.step, k = rank_of_keys(key_member);
    const auto* dropout = context.dropout ? &*context.dropout : nullptr;
    return {plan.masks(q, k), context.scale, dropout, plan.rows(q), plan.rows(k), first_head};
  }
};

// This rank's rows: q [batch, heads, rows, dim], k and v [batch, key heads, rows, dim], plain, of one dtype.
struct Inputs {
  at::Tensor q, k, v;
};

class Method {
 public:
  virtual ~Method() = default;
  virtual const char* name() const = 0;

  // Seconds of a forward and a backward pass, roughly.
  virtual double seconds(const AttentionCost& cost) const = 0;

  // Throws what the method cannot do with these; on every rank alike, before it communicates.
  virtual void check(const Context&, const Inputs&) const {}

  // What this rank's queries see, in float32 or float64. `saved` is what backward needs besides, in any form. An activation checkpoint
  // keeps all this, and does not call it again.
  virtual Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const = 0;

  // Gradients of the inputs, in the dtype of Attended. `grad` and `out` are like q, `lse` as forward gave it.
  virtual BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                                  const std::vector<at::Tensor>& saved) const = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline BlockGradients zeros_like(const Inputs& in) {
  const auto options = in.q.options().dtype(sums_of(in.q));
  return {at::zeros(in.q.sizes(), options), at::zeros(in.k.sizes(), options), at::zeros(in.v.sizes(), options)};
}

inline OutputGradient output_gradient(const Inputs& in, const Attended& attended, const at::Tensor& grad) {
  const auto dtype = sums_of(in.q);
  OutputGradient result{grad, attended.lse, {}, attended.out.to(in.q.scalar_type())};
  if (dtype != in.q.scalar_type()) result.delta = attended.out.to(dtype).mul(grad.to(dtype)).sum(-1);
  return result;
}

inline at::Tensor packed(const at::Tensor& k, const at::Tensor& v) { return at::cat({k.reshape({-1}), v.reshape({-1})}); }

// Keys and values of `rows` rows, from what packed() gave.
inline std::pair<at::Tensor, at::Tensor> unpacked(const at::Tensor& flat, const at::Tensor& like, int64_t rows) {
  auto sizes = like.sizes().vec();
  sizes[2] = rows;
  const auto half = flat.numel() / 2;
  return {flat.narrow(0, 0, half).view(sizes), flat.narrow(0, half, half).view(sizes)};
}

inline int64_t elements_of(const at::Tensor& like, int64_t rows) { return like.size(0) * like.size(1) * rows * like.size(3); }

}  // namespace detail

}  // namespace dtensor::context

#pragma GCC visibility pop
