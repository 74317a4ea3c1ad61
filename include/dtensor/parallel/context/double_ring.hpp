// A ring of rings (LoongTrain, Gu et al., 2024): keys and values go round among the ranks of a host, while those of the same rank of
// another host are on their way. Slow links between hosts carry each block once, and a whole inner ring hides it.
#pragma once

#include <dtensor/parallel/context/ring.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Takes a mesh of two dimensions: ranks along the last one are close to each other. Each rank sends, of its n rows, h key heads and dim d,
// where all see all, with O hosts of I ranks: forward 2 n h d (O - 1) elements to other hosts, and 2 n h d (I - 1) O within its own;
// backward the same again and as many gradients, which are float32 or float64.
class DoubleRing final : public Method {
 public:
  ~DoubleRing() override;  // compiled with the library, as all methods are
  const char* name() const override { return "doublering"; }
  double seconds(const AttentionCost& cost) const override;
  void check(const Context& context, const Inputs& in) const override;
  Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const override;
  BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                          const std::vector<at::Tensor>& saved) const override;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// The outer ring takes the keys of this rank to hosts of which any rank sees some. At its step s, the inner ring is one between the queries
// of this host and the keys of the host s before it, of which each rank holds a part.
struct Rings {
  const Context& context;
  comm::Communicator &outer, &inner;
  Ranks between;

  explicit Rings(const Context& c)
      : context(c),
        outer(c.mesh.communicator(0)),
        inner(c.mesh.communicator(1)),
        between(c, c.plan, &outer, {0, inner.size(), inner.size()}, {inner.rank(), inner.size(), 1}) {}

  Ranks within(int step) const {
    return {context, context.plan, &inner, {outer.rank() * inner.size(), 1, 1}, {between.before(step) * inner.size(), 1, 1}};
  }
};

// What of another host's came, or no rows where no rank here sees any of it.
inline Inputs held(const Inputs& in, const std::optional<std::pair<at::Tensor, at::Tensor>>& came) {
  if (!came) return {in.q, in.k.narrow(2, 0, 0), in.v.narrow(2, 0, 0)};
  return {in.q, came->first, came->second};
}

}  // namespace detail

// As a ring, whose messages between hosts go on beside those within.
inline double DoubleRing::seconds(const AttentionCost& cost) const {
  if (cost.links.size() != 2) return std::numeric_limits<double>::infinity();
  const auto hosts = static_cast<double>(cost.outer()), own = static_cast<double>(cost.ranks()) / hosts;
  const auto block = static_cast<double>(cost.elements(cost.shape.key_heads, 2 * cost.shape.dim));
  const auto keys = block * static_cast<double>(cost.shape.element_size), gradients = block * static_cast<double>(cost.shape.sum_size);
  const double within = (own - 1) * hosts, between = hosts - 1;
  const double coming = std::max(cost.messages_along(1, within, within * keys), cost.messages_along(0, between, between * keys));
  const double returning = cost.messages_along(1, within, within * gradients) + cost.messages_along(0, between, between * gradients);
  return std::max(cost.forward(), coming) + std::max(kBackward * cost.forward(), coming) + returning;
}

inline void DoubleRing::check(const Context& context, const Inputs&) const {
  require(context.mesh.ndim() == 2, "context_attention",
          "doublering takes a mesh of two dimensions, of which the last is within a host; got {}", context.mesh.str());
}

inline Attended DoubleRing::forward(const Context& context, const Inputs& in, std::vector<at::Tensor>&) const {
  const detail::Rings rings(context);
  detail::Rotation rotation(rings.between, in);
  auto all = detail::ring_forward(rings.within(0), in);
  for (int step = 1; step < rings.between.size(); ++step) {
    merge(all, detail::ring_forward(rings.within(step), detail::held(in, rotation.next(step))));
  }
  return all;
}

inline BlockGradients DoubleRing::backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                                           const std::vector<at::Tensor>&) const {
  const detail::Rings rings(context);
  detail::Rotation rotation(rings.between, in);
  auto own = detail::ring_backward(rings.within(0), in, attended, grad);
  for (int step = 1; step < rings.between.size(); ++step) {
    const auto came = rotation.next(step);
    auto theirs = std::optional(detail::ring_backward(rings.within(step), detail::held(in, came), attended, grad));
    own.dq.add_(theirs->dq);
    if (!came) theirs.reset();
    detail::return_gradients(rings.between, rings.between.before(step), theirs, rings.between.after(step), own);
  }
  return own;
}

}  // namespace dtensor::context

#pragma GCC visibility pop
