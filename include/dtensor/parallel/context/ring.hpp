// Ring attention (Liu et al., "Ring Attention with Blockwise Transformers", 2023): keys and values go round while each rank works on those
// that have come. A rank that sees nothing of another's keys does not get them.
#pragma once

#include <dtensor/parallel/context/method.hpp>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::context {

// At step t a rank works on the keys of the rank t before it, which sent them straight to it, and those of the next step are on their way:
// two blocks of keys and values exist at once. Each rank sends, where all see all, forward 2 n h d (ranks - 1) elements of its n rows, h
// key heads and dim d, and backward the same again and as many gradients, which are float32 or float64.
class Ring final : public Method {
 public:
  ~Ring() override;  // compiled with the library, as all methods are
  const char* name() const override { return "ring"; }
  double seconds(const AttentionCost& cost) const override;
  Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const override;
  BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                          const std::vector<at::Tensor>& saved) const override;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Keys and values of the other ranks, one rank after the other.
class Rotation {
 public:
  Rotation(const Ranks& ranks, const Inputs& in) : ranks_(ranks), in_(in), own_(packed(in.k, in.v)) { begin(1); }

  // Those of the rank `step` before this one, or nothing where this rank sees none of them. To be called for steps 1, 2, ... in order.
  std::optional<std::pair<at::Tensor, at::Tensor>> next(int step) {
    if (sending_) std::exchange(sending_, {})->wait();
    auto coming = std::exchange(coming_, {});
    begin(step + 1);
    if (!coming) return {};
    if (coming->work) coming->work->wait();
    return unpacked(coming->tensor, in_.k, ranks_.length_of_keys(ranks_.before(step)));
  }

 private:
  void begin(int step) {
    if (step >= ranks_.size()) return;
    const int to = ranks_.after(step), from = ranks_.before(step);
    if (ranks_.meet(to, ranks_.rank())) sending_ = ranks_.group->send(own_, to).work;
    if (!ranks_.meet(ranks_.rank(), from)) return;
    coming_ = ranks_.group->recv(at::empty({2 * elements_of(in_.k, ranks_.length_of_keys(from))}, in_.k.options()), from);
  }

  const Ranks& ranks_;
  const Inputs& in_;
  const at::Tensor own_;
  comm::WorkPtr sending_;
  std::optional<comm::Async> coming_;
};

// Sends gradients of keys and values to the rank that has these, and adds what comes from the rank that worked on this rank's.
inline void return_gradients(const Ranks& ranks, int to, const std::optional<BlockGradients>& gradients, int from, BlockGradients& into) {
  comm::WorkPtr sending;
  if (gradients) sending = ranks.group->send(packed(gradients->dk, gradients->dv), to).work;
  if (ranks.meet(from, ranks.rank())) {
    auto coming = ranks.group->recv(at::empty({into.dk.numel() + into.dv.numel()}, into.dk.options()), from);
    if (coming.work) coming.work->wait();
    const auto [dk, dv] = unpacked(coming.tensor, into.dk, into.dk.size(2));
    into.dk.add_(dk);
    into.dv.add_(dv);
  }
  if (sending) sending->wait();
}

inline Attended ring_forward(const Ranks& ranks, const Inputs& in) {
  Rotation rotation(ranks, in);
  auto all = block_attention(in.q, in.k, in.v, ranks.call(ranks.rank(), ranks.rank()));
  for (int step = 1; step < ranks.size(); ++step) {
    if (const auto came = rotation.next(step)) {
      merge(all, block_attention(in.q, came->first, came->second, ranks.call(ranks.rank(), ranks.before(step))));
    }
  }
  return all;
}

inline BlockGradients ring_backward(const Ranks& ranks, const Inputs& in, const Attended& attended, const at::Tensor& grad) {
  Rotation rotation(ranks, in);
  const auto of = output_gradient(in, attended, grad);
  BlockGradients own;
  add_block_gradients(own, in.q, in.k, in.v, of, ranks.call(ranks.rank(), ranks.rank()));
  for (int step = 1; step < ranks.size(); ++step) {
    std::optional<BlockGradients> theirs;
    if (const auto came = rotation.next(step)) {
      theirs = {own.dq, {}, {}};
      const auto call = ranks.call(ranks.rank(), ranks.before(step));
      add_block_gradients(*theirs, in.q, came->first, came->second, of, call);
    }
    return_gradients(ranks, ranks.before(step), theirs, ranks.after(step), own);
  }
  return own;
}

}  // namespace detail

// Keys come while others are worked on; the gradients of a step are waited for.
inline double Ring::seconds(const AttentionCost& cost) const {
  const auto met = static_cast<double>(cost.met());
  const double elements = met * static_cast<double>(cost.elements(cost.shape.key_heads, 2 * cost.shape.dim));
  const double keys = cost.messages(met, elements * static_cast<double>(cost.shape.element_size));
  const double gradients = cost.messages(met, elements * static_cast<double>(cost.shape.sum_size));
  return std::max(cost.forward(), keys) + std::max(kBackward * cost.forward(), keys) + gradients;
}

inline Attended Ring::forward(const Context& context, const Inputs& in, std::vector<at::Tensor>&) const {
  return detail::ring_forward(Ranks(context), in);
}

inline BlockGradients Ring::backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                                     const std::vector<at::Tensor>&) const {
  return detail::ring_backward(Ranks(context), in, attended, grad);
}

}  // namespace dtensor::context

#pragma GCC visibility pop
