// How many ranks attention and experts get, and how many microbatches go back and forth between them: by a roofline, from the sizes of the
// model and the figures of the devices (Zhu et al., "MegaScale-Infer", 2025, section 4; "DisagMoE", 2026).
//
//   auto plan = dt::plan_disaggregated({.layers = 32, .dim = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .hidden = 14336,
//                                       .experts = 8, .top_k = 2},
//                                      {.sequences = 64, .length = 2048}, 16, {.flops = 4e14, .memory_bandwidth = 3e12, .network = 5e10});
//   plan.attention_ranks, plan.expert_ranks, plan.microbatches, plan.seconds;
#pragma once

#include <dtensor/parallel/expert/dispatch.hpp>
#include <dtensor/parallel/pipeline/ping_pong.hpp>

#include <cmath>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor {

// Layers of attention and experts, all alike.
struct DisaggregatedModel {
  int64_t layers = 1, dim = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t hidden = 0, experts = 0, top_k = 2;  // hidden: of an expert
  bool gated = true;                           // an expert has three matrices, else two
  int64_t element_size = 2;                    // bytes of a number that is read, computed and sent
  int64_t parameter_bytes = 16;                // that a parameter takes on its rank: bfloat16 with gradient, AdamW and float32 values
};

// What a step computes.
struct DisaggregatedStep {
  int64_t sequences = 0, length = 1;  // length 1: a token of each is generated
  double context = 0;                 // positions that a token looks at, on average; 0: half of the length
  bool cached = false;                // the keys and values of the context are read from memory, in which they stay
  bool backward = true;               // takes twice the forward's arithmetic, and as many messages
};

// Of one rank: what it reaches, which is less than what its maker says.
struct DeviceRates {
  double flops = 0, memory_bandwidth = 0, network = 0;  // a second: operations, bytes read and written, bytes sent
  double latency = 0;                                   // seconds of a message
  double memory = 0;                                    // bytes for parameters and what is cached; 0: enough
};

struct DisaggregatedPlan {
  int attention_ranks = 0, expert_ranks = 0, microbatches = 0;
  pipelining::PingPongTimes forward{}, backward{};  // seconds of a microbatch in a layer: first attention, second experts
  double seconds = 0;                               // of a step: ping_pong_makespan
  bool hidden = false;                              // pipelining::is_hidden, both ways
};

struct DisaggregatedSearch {
  int most_microbatches = 8;
  std::optional<DeviceRates> experts = {};  // of the experts' ranks, where they are other devices
};

// The least time of a step on `ranks` ranks in all, over all splits of them (those of experts divide the experts) and numbers of
// microbatches up to the number of sequences. Of equal times the one with fewer microbatches, then with fewer ranks of experts.
//
// Attention is data parallel: each rank has all its weights, and its share of the sequences. Experts are equally busy, and rows come to
// them in two ways of which both are counted: each row once from mesh to mesh, and then, among the ranks of experts, to the rank of each
// of its experts. Each of both sides takes the longer of its arithmetic and its memory traffic. Embeddings, the head, the optimizer and
// activations' memory are not counted. Communicates nothing. Throws for sizes and rates that are not positive, fewer than two ranks, and
// where nothing fits into memory.
DisaggregatedPlan plan_disaggregated(const DisaggregatedModel& model, const DisaggregatedStep& step, int ranks, const DeviceRates& rates,
                                     const DisaggregatedSearch& search = {});

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

class Roofline {
 public:
  Roofline(const DisaggregatedModel& model, const DisaggregatedStep& step, const DeviceRates& attention, const DeviceRates& experts)
      : m_(model), s_(step), attention_(attention), experts_(experts) {
    context_ = s_.context > 0 ? s_.context : static_cast<double>(s_.length) / 2;
    const double head = real(m_.head_dim), all_heads = real(m_.heads) * head;
    attention_weights_ = real(m_.dim) * (2 * all_heads + 2 * real(m_.kv_heads) * head + real(m_.experts));  // with the router
    expert_weights_ = (m_.gated ? 3 : 2) * real(m_.dim) * real(m_.hidden);
    cached_ = s_.cached ? context_ * 2 * real(m_.kv_heads) * head * real(m_.element_size) : 0;
  }

  bool fits(int attention_ranks, int expert_ranks) const {
    const double weights = real(m_.layers * m_.parameter_bytes), sequences = std::ceil(real(s_.sequences) / attention_ranks);
    const bool first = attention_.memory <= 0 || weights * attention_weights_ + real(m_.layers) * sequences * cached_ <= attention_.memory;
    return first && (experts_.memory <= 0 || weights * expert_weights_ * real(m_.experts) / expert_ranks <= experts_.memory);
  }

  // Of a microbatch in a layer. `passes`: 1 forward, 2 backward.
  pipelining::PingPongTimes times(int attention_ranks, int expert_ranks, int microbatches, double passes) const {
    const double sequences = std::ceil(real(s_.sequences) / microbatches), of_rank = std::ceil(sequences / attention_ranks);
    const double tokens = sequences * real(s_.length), row = real(m_.dim * m_.element_size);
    const double sent = std::max(of_rank * real(s_.length), tokens / expert_ranks) * row;
    return {passes * attention(of_rank), passes * experts(tokens, expert_ranks) + dispatch(tokens, expert_ranks),
            std::max(attention_.latency + sent / attention_.network, experts_.latency + sent / experts_.network)};
  }

 private:
  static double real(int64_t number) { return static_cast<double>(number); }
  static double longer(double flops, double bytes, const DeviceRates& rates) {
    return std::max(flops / rates.flops, bytes / rates.memory_bandwidth);
  }

  double attention(double sequences) const {
    const double tokens = sequences * real(s_.length), heads = real(m_.heads * m_.head_dim);
    const double numbers = attention_weights_ + tokens * (2 * real(m_.dim) + 2 * heads + 2 * real(m_.kv_heads * m_.head_dim));
    const double bytes = numbers * real(m_.element_size) + sequences * cached_;
    return longer(tokens * (2 * attention_weights_ + 4 * context_ * heads), bytes, attention_);
  }

  double experts(double tokens, int ranks) const {
    const double rows = tokens * real(m_.top_k) / ranks, here = real(m_.experts) / ranks;
    const double chosen = 1 - std::pow(1 - real(m_.top_k) / real(m_.experts), tokens);  // the share of experts that have a row
    const double numbers = here * chosen * expert_weights_ + 2 * rows * real(m_.dim);
    return longer(2 * rows * expert_weights_, numbers * real(m_.element_size), experts_);
  }

  // Among the ranks of experts, there and back.
  double dispatch(double tokens, int ranks) const {
    if (ranks == 1) return 0;
    const expert::DispatchShape shape{.ranks = ranks, .tokens = static_cast<int64_t>(std::ceil(tokens / ranks)), .dim = m_.dim,
                                      .k = m_.top_k, .experts = m_.experts, .element_size = m_.element_size};
    return 3 * experts_.latency + expert::bytes_sent("alltoall", shape) / experts_.network;
  }

  const DisaggregatedModel& m_;
  const DisaggregatedStep& s_;
  const DeviceRates &attention_, &experts_;
  double context_ = 0, attention_weights_ = 0, expert_weights_ = 0, cached_ = 0;
};

inline void check_plan(const DisaggregatedModel& m, const DisaggregatedStep& s, int ranks, const DeviceRates& rates,
                       const DeviceRates& of_experts, int most_microbatches) {
  constexpr const char* kName = "plan_disaggregated";
  const auto least = std::min({m.layers, m.dim, m.heads, m.kv_heads, m.head_dim, m.hidden, m.experts, m.top_k, m.element_size, s.sequences,
                               s.length});
  require(least > 0 && m.top_k <= m.experts, kName,
          "got {} layers, dim {}, {} heads and {} of keys of {}, hidden {}, {} experts, {} of a token, {} bytes, {} sequences of {}; "
          "expected positive numbers, and no more experts of a token than there are",
          m.layers, m.dim, m.heads, m.kv_heads, m.head_dim, m.hidden, m.experts, m.top_k, m.element_size, s.sequences, s.length);
  require(std::isfinite(s.context) && s.context >= 0 && m.parameter_bytes >= 0, kName,
          "got a context of {} positions and {} bytes of a parameter; expected 0 or more", s.context, m.parameter_bytes);
  require(ranks >= 2 && most_microbatches >= 1, kName,
          "got {} ranks and {} microbatches at most; expected two ranks and a microbatch, or more", ranks, most_microbatches);
  for (const auto& r : {rates, of_experts}) {
    const auto rates_of = {r.flops, r.memory_bandwidth, r.network};
    const bool positive = std::ranges::all_of(rates_of, [](double rate) { return rate > 0 && std::isfinite(rate); });
    require(positive && r.latency >= 0 && std::isfinite(r.latency) && r.memory >= 0, kName,
            "got {} operations, {} bytes of memory and {} bytes sent a second, {} s of a message and {} bytes of memory; expected finite "
            "positive numbers, and 0 or more of the last two", r.flops, r.memory_bandwidth, r.network, r.latency, r.memory);
  }
}

}  // namespace detail

inline DisaggregatedPlan plan_disaggregated(const DisaggregatedModel& model, const DisaggregatedStep& step, int ranks,
                                            const DeviceRates& rates, const DisaggregatedSearch& search) {
  const auto of_experts = search.experts.value_or(rates);
  detail::check_plan(model, step, ranks, rates, of_experts, search.most_microbatches);
  const detail::Roofline roofline(model, step, rates, of_experts);
  std::optional<DisaggregatedPlan> best;
  const auto layers = static_cast<int>(model.layers);
  for (int m = 1; m <= std::min<int64_t>(search.most_microbatches, step.sequences); ++m) {
    for (int n = 1; n < ranks && n <= model.experts; ++n) {
      if (model.experts % n != 0 || !roofline.fits(ranks - n, n)) continue;
      DisaggregatedPlan plan{ranks - n, n, m, roofline.times(ranks - n, n, m, 1), {0, 0, 0}};
      plan.seconds = pipelining::ping_pong_makespan(layers, m, plan.forward);
      plan.hidden = pipelining::is_hidden(m, plan.forward);
      if (step.backward) {
        plan.backward = roofline.times(ranks - n, n, m, 2);
        plan.seconds += pipelining::ping_pong_makespan(layers, m, plan.backward);
        plan.hidden &= pipelining::is_hidden(m, plan.backward);
      }
      if (!best || plan.seconds < best->seconds) best = plan;
    }
  }
  require(best.has_value(), "plan_disaggregated",
          "no split of {} ranks into those of attention and those of {} experts fits into {} and {} bytes; hint: take more ranks, or fewer "
          "parameter_bytes", ranks, model.experts, rates.memory, of_experts.memory);
  return *best;
}

}  // namespace dtensor

#pragma GCC visibility pop
