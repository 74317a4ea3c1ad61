// TokenRing (Wang et al., 2024), with a backward pass: queries go round, while keys and values stay; what they saw comes straight back.
// Both ways together carry more than a ring does. The busier one carries less where there are more key heads than half of the heads.
#pragma once

#include <dtensor/parallel/context/method.hpp>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::context {

// At step t a rank works on the queries of the rank t before it. A rank whose keys no query sees gets none. Each rank sends, where all see
// all, of its n rows of h heads and dim d: forward n h d (ranks - 1) elements of queries one way, and n h (d + 1) (ranks - 1) back, which
// are float32 or float64; backward n h (2 d + 2) (ranks - 1) one way and n h d (ranks - 1) back.
class TokenRing final : public Method {
 public:
  ~TokenRing() override;  // compiled with the library, as all methods are
  const char* name() const override { return "tokenring"; }
  double seconds(const AttentionCost& cost) const override;
  Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const override;
  BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                          const std::vector<at::Tensor>& saved) const override;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Tensors [batch, heads, rows, ...] of queries, which visit other ranks, and what is sent back for them.
class Visits {
 public:
  Visits(const Ranks& ranks, std::vector<at::Tensor> own) : ranks_(ranks), own_(std::move(own)) { begin(1); }

  // Those of the rank `step` before this one, whose queries see some of this rank's keys; else nothing. To be called for 1, 2, ... in
  // order.
  std::optional<std::vector<at::Tensor>> next(int step) {
    for (auto& work : std::exchange(sending_, {})) work->wait();
    auto coming = std::exchange(coming_, {});
    begin(step + 1);
    if (coming.empty()) return {};
    return waited(coming);
  }

  // Gives `results` of the queries that came at `step`, and takes those of this rank's queries, which are like `like`; nothing where they
  // saw none of the other's keys.
  std::optional<std::vector<at::Tensor>> return_results(int step, const std::vector<at::Tensor>& results,
                                                        const std::vector<at::Tensor>& like) const {
    std::vector<comm::WorkPtr> sending;
    for (const auto& x : results) add(sending, ranks_.group->send(x.contiguous(), ranks_.before(step)));
    std::vector<comm::Async> coming;
    if (ranks_.meet(ranks_.rank(), ranks_.after(step))) {
      for (const auto& x : like) coming.push_back(ranks_.group->recv(at::empty(x.sizes(), x.options()), ranks_.after(step)));
    }
    const auto received = waited(coming);
    for (auto& work : sending) work->wait();
    if (coming.empty()) return {};
    return received;
  }

 private:
  static void add(std::vector<comm::WorkPtr>& works, comm::Async async) {
    if (async.work) works.push_back(std::move(async.work));
  }
  static std::vector<at::Tensor> waited(std::vector<comm::Async>& coming) {
    std::vector<at::Tensor> tensors;
    for (auto& async : coming) {
      if (async.work) async.work->wait();
      tensors.push_back(async.tensor);
    }
    return tensors;
  }

  void begin(int step) {
    if (step >= ranks_.size()) return;
    const int to = ranks_.after(step), from = ranks_.before(step);
    if (ranks_.meet(ranks_.rank(), to)) {
      for (const auto& x : own_) add(sending_, ranks_.group->send(x, to));
    }
    if (!ranks_.meet(from, ranks_.rank())) return;
    for (const auto& x : own_) {
      auto sizes = x.sizes().vec();
      sizes[2] = ranks_.length_of_keys(from);
      coming_.push_back(ranks_.group->recv(at::empty(sizes, x.options()), from));
    }
  }

  const Ranks& ranks_;
  const std::vector<at::Tensor> own_;
  std::vector<comm::WorkPtr> sending_;
  std::vector<comm::Async> coming_;
};

}  // namespace detail

// Queries come while others are worked on; results are waited for.
inline double TokenRing::seconds(const AttentionCost& cost) const {
  const auto met = static_cast<double>(cost.met());
  const auto bytes = [&](int64_t inputs, int64_t sums) {
    return met * static_cast<double>(cost.elements(cost.shape.heads, inputs) * cost.shape.element_size +
                                     cost.elements(cost.shape.heads, sums) * cost.shape.sum_size);
  };
  const auto dim = cost.shape.dim;
  return std::max(cost.forward(), cost.messages(met, bytes(dim, 0))) + cost.messages(2 * met, bytes(0, dim + 1)) +
         std::max(kBackward * cost.forward(), cost.messages(4 * met, bytes(2 * dim, 2))) + cost.messages(met, bytes(0, dim));
}

inline Attended TokenRing::forward(const Context& context, const Inputs& in, std::vector<at::Tensor>&) const {
  const Ranks ranks(context);
  detail::Visits visits(ranks, {in.q.contiguous()});
  auto all = block_attention(in.q, in.k, in.v, ranks.call(ranks.rank(), ranks.rank()));
  for (int step = 1; step < ranks.size(); ++step) {
    std::vector<at::Tensor> results;
    if (const auto came = visits.next(step)) {
      const auto saw = block_attention((*came)[0], in.k, in.v, ranks.call(ranks.before(step), ranks.rank()));
      results = {saw.out, saw.lse};
    }
    if (const auto own = visits.return_results(step, results, {all.out, all.lse})) merge(all, {(*own)[0], (*own)[1]});
  }
  return all;
}

inline BlockGradients TokenRing::backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                                          const std::vector<at::Tensor>&) const {
  const Ranks ranks(context);
  auto of = detail::output_gradient(in, attended, grad);
  of.delta = of.deltas();
  detail::Visits visits(ranks, {in.q.contiguous(), of.grad, of.lse, of.delta});
  BlockGradients own;
  add_block_gradients(own, in.q, in.k, in.v, of, ranks.call(ranks.rank(), ranks.rank()));
  for (int step = 1; step < ranks.size(); ++step) {
    std::vector<at::Tensor> results;
    if (const auto came = visits.next(step)) {
      const auto& theirs = *came;
      BlockGradients into{{}, own.dk, own.dv};
      const OutputGradient theirs_of{theirs[1], theirs[2], theirs[3], {}};
      add_block_gradients(into, theirs[0], in.k, in.v, theirs_of, ranks.call(ranks.before(step), ranks.rank()));
      results = {into.dq};
    }
    if (const auto dq = visits.return_results(step, results, {own.dq})) own.dq.add_((*dq)[0]);
  }
  return own;
}

}  // namespace dtensor::context

#pragma GCC visibility pop
