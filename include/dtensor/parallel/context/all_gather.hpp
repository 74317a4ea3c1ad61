// Attention with gathered keys and values, as Llama 3's: every rank gets all of them, a key head at a time, while it works on the head
// before.
#pragma once

#include <dtensor/parallel/context/method.hpp>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Each rank sends forward 2 n h d (ranks - 1) elements of its n rows, h key heads and dim d; backward the same again, and as many
// gradients. The keys and values of two heads exist at once.
class AllGather final : public Method {
 public:
  ~AllGather() override;  // compiled with the library, as all methods are
  const char* name() const override { return "allgather"; }
  double seconds(const AttentionCost& cost) const override;
  Attended forward(const Context& context, const Inputs& in, std::vector<at::Tensor>& saved) const override;
  BlockGradients backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                          const std::vector<at::Tensor>& saved) const override;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// The heads of queries that share key head `h`.
inline at::Tensor heads_of(const at::Tensor& x, int64_t h, int64_t key_heads) {
  const auto group = x.size(1) / key_heads;
  return x.narrow(1, h * group, group);
}

// Keys and values of all ranks, a head after the other. A rank's follow one another in the flat memory.
class GatheredHeads {
 public:
  GatheredHeads(const Ranks& ranks, const Inputs& in) : group_(*ranks.group), in_(in) {
    for (int r = 0; r < ranks.size(); ++r) counts_.push_back(2 * in.k.size(0) * ranks.length_of_keys(r) * in.k.size(3));
    begin(0);
  }

  const Lengths& counts() const { return counts_; }

  // To be called for heads 0, 1, ... in order.
  at::Tensor next(int64_t head) {
    auto coming = std::move(*coming_);
    if (coming.work) coming.work->wait();
    begin(head + 1);
    return coming.tensor;
  }

 private:
  void begin(int64_t head) {
    if (head < in_.k.size(1)) coming_ = group_.all_gather(packed(in_.k.narrow(1, head, 1), in_.v.narrow(1, head, 1)), counts_);
  }

  comm::Communicator& group_;
  const Inputs& in_;
  Lengths counts_;
  std::optional<comm::Async> coming_;
};

// Calls f(rank, its keys, its values) for the ranks whose keys this rank's queries see.
template <class F>
void for_each_met(const Ranks& ranks, const at::Tensor& flat, const at::Tensor& like, const F& f) {
  int64_t begin = 0;
  for (int r = 0; r < ranks.size(); ++r) {
    const auto elements = 2 * elements_of(like, ranks.length_of_keys(r));
    const auto [k, v] = unpacked(flat.narrow(0, begin, elements), like, ranks.length_of_keys(r));
    begin += elements;
    if (ranks.meet(ranks.rank(), r)) f(r, k, v);
  }
}

}  // namespace detail

// The first head's keys, and the last head's gradients, are waited for.
inline double AllGather::seconds(const AttentionCost& cost) const {
  const auto heads = static_cast<double>(cost.shape.key_heads), others = static_cast<double>(cost.ranks() - 1);
  const double elements = others * static_cast<double>(cost.elements(1, 2 * cost.shape.dim));
  const double keys = cost.messages(others, elements * static_cast<double>(cost.shape.element_size));
  const double gradients = cost.messages(others, elements * static_cast<double>(cost.shape.sum_size));
  const double rest = (heads - 1) / heads;
  return keys + std::max(rest * cost.forward(), (heads - 1) * keys) + cost.forward() / heads + keys +
         std::max(kBackward * rest * cost.forward(), (heads - 1) * (keys + gradients)) + kBackward * cost.forward() / heads + gradients;
}

inline Attended AllGather::forward(const Context& context, const Inputs& in, std::vector<at::Tensor>&) const {
  const Ranks ranks(context);
  detail::GatheredHeads gathered(ranks, in);
  std::vector<at::Tensor> out, lse;
  for (int64_t h = 0; h < in.k.size(1); ++h) {
    const auto flat = gathered.next(h);
    const auto q = detail::heads_of(in.q, h, in.k.size(1));
    std::optional<Attended> all;
    detail::for_each_met(ranks, flat, in.k.narrow(1, h, 1), [&](int r, const at::Tensor& k, const at::Tensor& v) {
      const auto some = block_attention(q, k, v, ranks.from_head(h * q.size(1)).call(ranks.rank(), r));
      all ? merge(*all, some) : (void)(all = some);
    });
    if (!all) all = detail::nothing_seen(q);
    out.push_back(all->out);
    lse.push_back(all->lse);
  }
  return {at::cat(out, 1), at::cat(lse, 1)};
}

inline BlockGradients AllGather::backward(const Context& context, const Inputs& in, const Attended& attended, const at::Tensor& grad,
                                          const std::vector<at::Tensor>&) const {
  const Ranks ranks(context);
  detail::GatheredHeads gathered(ranks, in);
  auto of = detail::output_gradient(in, attended, grad);
  of.delta = of.deltas();
  const auto own = detail::zeros_like(in);
  std::optional<comm::Async> reduction;  // of the head before
  const auto finish = [&](int64_t h) {
    if (h < 0) return;
    if (reduction->work) reduction->work->wait();
    const auto [dk, dv] = detail::unpacked(reduction->tensor, in.k.narrow(1, h, 1), in.k.size(2));
    own.dk.narrow(1, h, 1).copy_(dk);
    own.dv.narrow(1, h, 1).copy_(dv);
  };
  for (int64_t h = 0; h < in.k.size(1); ++h) {
    const auto flat = gathered.next(h);
    const auto like = in.k.narrow(1, h, 1);
    const auto of_head = [&](const at::Tensor& x) { return detail::heads_of(x, h, in.k.size(1)); };
    const auto gradients = at::zeros(flat.sizes(), own.dk.options());
    detail::for_each_met(ranks, flat, like, [&](int r, const at::Tensor& k, const at::Tensor& v) {
      const auto begin = k.storage_offset() - flat.storage_offset(), elements = k.numel();
      BlockGradients into{of_head(own.dq), gradients.narrow(0, begin, elements).view(k.sizes()),
                          gradients.narrow(0, begin + elements, elements).view(v.sizes())};
      const OutputGradient of_queries{of_head(of.grad), of_head(of.lse), of_head(of.delta), of_head(of.out)};
      const auto q = of_head(in.q);
      add_block_gradients(into, q, k, v, of_queries, ranks.from_head(h * q.size(1)).call(ranks.rank(), r));
    });
    finish(h - 1);
    reduction = ranks.group->reduce_scatter(gradients, gathered.counts(), ReduceOp::sum);
  }
  finish(in.k.size(1) - 1);
  return own;
}

}  // namespace dtensor::context

#pragma GCC visibility pop
