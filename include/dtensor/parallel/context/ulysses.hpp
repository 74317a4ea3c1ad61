// Ulysses (Jacobs et al., "DeepSpeed Ulysses", 2023): ranks trade their rows of all heads for all rows of some heads, and back. And USP
// (Fang and Zhao, 2024): neighbours do that, and their rows go round a ring.
#pragma once

#include <dtensor/parallel/context/head_exchange.hpp>
#include <dtensor/parallel/context/ring.hpp>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Any number of heads over any number of ranks: shares differ by one head at most, and a key head goes to all ranks that have a query head
// of its group. Each rank sends of its n rows of dim d, where the ranks divide heads h and key heads g, forward and backward
// (ranks - 1) / ranks n d (2 h + 2 g) elements.
//
// "usp" takes a mesh of two dimensions: ranks along the last one trade heads, and keys and values go round along the first one.
class Ulysses final : public Method {
 public:
  explicit Ulysses(bool with_ring = false) : with_ring_(with_ring) {}
  ~Ulysses() override;  // compiled with the library, as all methods are
  const char* name() const override { return with_ring_ ? "usp" : "ulysses"; }
  double seconds(const AttentionCost& cost) const override;
  void check(const Context& context, const Inputs& in) const override;
  Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const override;
  BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                          const std::vector<at::Tensor>& saved) const override;

 private:
  bool with_ring_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Who trades heads with this rank, and who has the same heads of other rows.
struct HeadsAndRing {
  comm::Communicator& heads;
  Ranks ring;
  HeadShares shares;
  HeadExchange exchange;

  HeadsAndRing(const Context& context, const Inputs& in, bool with_ring)
      : heads(with_ring ? context.mesh.communicator(1) : context.group()),
        ring(context, context.plan.of_groups(heads.size()), with_ring ? &context.mesh.communicator(0) : nullptr),
        shares(in.q.size(1), in.k.size(1), heads.size()),
        exchange(heads, places(context.plan), ring.plan.length(ring.rank())) {}

  // Of some of the query heads that this rank works on.
  Ranks ring_of(const Interval& q) const { return ring.from_head(shares.heads(heads.rank()).begin + q.begin); }

  Share query_heads() const {
    return [this](int rank) { return shares.heads(rank); };
  }
  Share key_heads() const {
    return [this](int rank) { return shares.key_heads(rank); };
  }

 private:
  std::vector<at::Tensor> places(const ContextPlan& plan) const {
    std::vector<at::Tensor> all;
    for (int r = 0; r < heads.size(); ++r) all.push_back(plan.places_in_group(ring.rank() * heads.size() + r, heads.size()));
    return all;
  }
};

}  // namespace detail

// Trading is waited for. A rank has the rows of all that it trades with, and of their work the share of its heads.
inline double Ulysses::seconds(const AttentionCost& cost) const {
  if (with_ring_ && cost.links.size() != 2) return std::numeric_limits<double>::infinity();
  const auto& shape = cost.shape;
  const auto traders = with_ring_ ? cost.inner() : cost.ranks(), others = cost.ranks() / traders - 1;
  const auto heads = (shape.heads + traders - 1) / traders, key_heads = (shape.key_heads + traders - 1) / traders;
  const double forward = cost.forward_of_heads(heads) / static_cast<double>(cost.ranks() / traders);
  const auto sent_keys = std::max(shape.key_heads, std::min(shape.heads, traders));  // a key head goes to all that need it
  const auto traded = static_cast<double>(cost.elements(2 * shape.heads + 2 * sent_keys, shape.dim) * (traders - 1) / traders);
  const auto trade = [&](int64_t size) {
    const double bytes = traded * static_cast<double>(size), calls = 2 * static_cast<double>(traders - 1);
    return with_ring_ ? cost.messages_along(1, calls, bytes) : cost.messages(calls, bytes);
  };
  const auto block = static_cast<double>(others * traders * cost.elements(key_heads, 2 * shape.dim));
  const auto ring = [&](int64_t size) {
    return others == 0 ? 0 : cost.messages_along(0, static_cast<double>(others), block * static_cast<double>(size));
  };
  return trade(shape.element_size) + std::max(forward, ring(shape.element_size)) + trade(shape.sum_size) +
         std::max(kBackward * forward, ring(shape.element_size)) + ring(shape.sum_size);
}

inline void Ulysses::check(const Context& context, const Inputs&) const {
  require(!with_ring_ || context.mesh.ndim() == 2, "context_attention",
          "usp takes a mesh of two dimensions, of which the last trades heads; got {}", context.mesh.str());
}

inline Attended Ulysses::forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const {
  using detail::heads_in;
  const detail::HeadsAndRing both(context, in, with_ring_);
  const auto whole = both.exchange.to_heads({in.q, in.k, in.v}, {both.query_heads(), both.key_heads(), both.key_heads()});
  auto all = detail::nothing_seen(whole[0]);
  both.shares.for_each_group(both.heads.rank(), [&](const Interval& q, const Interval& k) {
    const auto some = detail::ring_forward(both.ring_of(q), {heads_in(whole[0], q), heads_in(whole[1], k), heads_in(whole[2], k)});
    heads_in(all.out, q).copy_(some.out);
    heads_in(all.lse, q).copy_(some.lse);
  });
  const auto out = all.out.to(in.q.scalar_type());
  saved = {out, all.lse};
  if (!context.in_checkpoint) saved.insert(saved.end(), whole.begin(), whole.end());
  const auto own = at::zeros(in.q.sizes(), in.q.options());
  both.exchange.to_rows({out}, {both.query_heads()}, {own});
  return {own, at::Tensor()};
}

inline BlockGradients Ulysses::backward(const Context& context, const Inputs& in, const Attended&, const at::Tensor& grad,
                                        const std::vector<at::Tensor>& saved) const {
  using detail::heads_in;
  const detail::HeadsAndRing both(context, in, with_ring_);
  std::vector<at::Tensor> own_rows{grad};
  std::vector<detail::Share> shares{both.query_heads()};
  if (saved.size() == 2) {
    own_rows.insert(own_rows.end(), {in.q, in.k, in.v});
    shares.insert(shares.end(), {both.query_heads(), both.key_heads(), both.key_heads()});
  }
  auto came = both.exchange.to_heads(own_rows, shares);
  const auto grads = came[0];
  const auto all = saved.size() == 2 ? Inputs{came[1], came[2], came[3]} : Inputs{saved[2], saved[3], saved[4]};
  const auto whole = detail::zeros_like(all);
  both.shares.for_each_group(both.heads.rank(), [&](const Interval& q, const Interval& k) {
    const Inputs some{heads_in(all.q, q), heads_in(all.k, k), heads_in(all.v, k)};
    const auto gradients = detail::ring_backward(both.ring_of(q), some, {heads_in(saved[0], q), heads_in(saved[1], q)}, heads_in(grads, q));
    heads_in(whole.dq, q).copy_(gradients.dq);
    heads_in(whole.dk, k).add_(gradients.dk);
    heads_in(whole.dv, k).add_(gradients.dv);
  });
  auto own = detail::zeros_like(in);
  both.exchange.to_rows({whole.dq, whole.dk, whole.dv}, {both.query_heads(), both.key_heads(), both.key_heads()}, {own.dq, own.dk, own.dv});
  return own;
}

}  // namespace dtensor::context

#pragma GCC visibility pop
