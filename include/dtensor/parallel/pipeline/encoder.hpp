// Optimus (Feng et al., 2024): an encoder, whose outputs a language model reads, runs where the ranks of that model's pipeline would wait.
//
//   dt::PipelineOptions options{.microbatches = 16};                     // the pieces: the encoder's, then the language model's
//   options.make_schedule = [](const auto& size) {
//     return dt::pipelining::with_encoder(dt::pipelining::one_f_one_b(size), {2, 3}, costs).schedule;   // two stages, on ranks 2 and 3
//   };
#pragma once

#include <dtensor/parallel/pipeline/gaps.hpp>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct WithEncoder {
  Schedule schedule;      // of all stages: the encoder's come first
  double moved = 0;       // how much later all of the model's actions begin than without an encoder
  double makespan = 0;    // of all
  double one_by_one = 0;  // if the encoder ran before and after the model
};

// Adds the stages of an encoder, the first on rank encoder_ranks[0]. Its forward of a microbatch ends before the model's begins, and its
// backward begins after the model's ended. No action of `model` moves against another one: all of them begin later by one time, as much
// as the encoder's forwards need to come early enough. `costs.stages` are those of all stages, the encoder's first.
//
// A stage of the encoder does its microbatches in order, so gradients are summed as on one device. Throws what check() throws.
WithEncoder with_encoder(const Schedule& model, const std::vector<int>& encoder_ranks, const Costs& costs = {});

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// The model's stages and actions, with numbers after those of `count` stages of an encoder.
inline Schedule renumbered(const Schedule& model, const std::vector<int>& encoder_ranks) {
  const int count = static_cast<int>(encoder_ranks.size());
  Schedule result{model.name + " with encoder", model.microbatches, encoder_ranks, {}};
  result.rank_of_stage.insert(result.rank_of_stage.end(), model.rank_of_stage.begin(), model.rank_of_stage.end());
  for (auto list : model.ranks) {
    for (auto& action : list) {
      action.stage += count;
      if (action.other_stage >= 0) action.other_stage += count;
    }
    result.ranks.push_back(std::move(list));
  }
  return result;
}

// All forwards, then all backwards.
inline Schedule encoder_alone(const Schedule& model, const std::vector<int>& encoder_ranks) {
  const int count = static_cast<int>(encoder_ranks.size());
  Schedule encoder{"encoder", model.microbatches, encoder_ranks, std::vector<std::vector<Action>>(model.ranks.size())};
  for (const auto kind : {Kind::F, Kind::B}) {
    for (int microbatch = 0; microbatch < model.microbatches; ++microbatch) {
      for (int i = 0; i < count; ++i) {
        const int stage = kind == Kind::F ? i : count - 1 - i;
        encoder.ranks[encoder_ranks[stage]].push_back({stage, kind, microbatch});
      }
    }
  }
  return encoder;
}

class EncoderPlanner {
 public:
  // `timeline`: of the model alone, whose actions `all` has under their new numbers.
  EncoderPlanner(const Schedule& all, const Timeline& timeline, int encoder_stages, const Costs& costs)
      : all_(all), timeline_(timeline), count_(encoder_stages), costs_(costs) {}

  // The model's actions begin `later`; none if the encoder's forwards do not come early enough.
  std::optional<WithEncoder> plan(double later) {
    ranks_.assign(all_.ranks.size(), {});
    forward_.assign(all_.microbatches, 0);
    backward_.assign(all_.microbatches, 0);
    for (size_t rank = 0; rank < all_.ranks.size(); ++rank) take_model(rank, later);
    std::vector<double> ends(count_, 0.0);  // of what each stage did last
    for (int microbatch = 0; microbatch < all_.microbatches; ++microbatch) {
      double ready = 0;
      for (int stage = 0; stage < count_; ++stage) ready = add({stage, Kind::F, microbatch}, ready, ends[stage]) + message(stage);
      if (ready > forward_[microbatch] + kRounding) return std::nullopt;
    }
    ends.assign(count_, 0.0);
    for (int microbatch = 0; microbatch < all_.microbatches; ++microbatch) {
      double ready = backward_[microbatch];
      for (int stage = count_; stage-- > 0;) ready = add({stage, Kind::B, microbatch}, ready + message(stage), ends[stage]);
    }
    WithEncoder result{all_, later};
    result.schedule.ranks = lists_of(ranks_);
    for (const auto& rank : ranks_) result.makespan = std::max(result.makespan, rank.all().empty() ? 0 : rank.all().back().span.end);
    return result;
  }

 private:
  static constexpr double kRounding = 1e-9;

  void take_model(size_t rank, double later) {
    for (size_t i = 0; i < all_.ranks[rank].size(); ++i) {
      const auto& action = all_.ranks[rank][i];
      const auto [start, end] = timeline_.actions[rank][i];
      ranks_[rank].take(action, start + later, end - start);
      for (const auto& part : Parts(action)) {
        if (part.stage != count_) continue;
        if (part.kind == Kind::F) forward_[part.microbatch] = start + later;
        if (part.kind == Kind::B || part.kind == Kind::I) backward_[part.microbatch] = end + later;
      }
    }
  }

  // From a stage of the encoder to the next one.
  double message(int stage) const { return all_.rank_of_stage[stage] == all_.rank_of_stage[stage + 1] ? 0 : costs_.message; }

  double add(const Action& action, double ready, double& last) {
    auto& rank = ranks_[all_.rank_of_stage[action.stage]];
    const double takes = duration(action, costs_), start = rank.first_room(std::max(ready, last), takes);
    rank.take(action, start, takes);
    return last = start + takes;
  }

  const Schedule& all_;
  const Timeline& timeline_;
  int count_;
  const Costs& costs_;
  std::vector<RankTime> ranks_;
  std::vector<double> forward_, backward_;  // when the model's first stage begins and ends them
};

}  // namespace detail

inline WithEncoder with_encoder(const Schedule& model, const std::vector<int>& encoder_ranks, const Costs& costs) {
  const int ranks = static_cast<int>(model.ranks.size()), count = static_cast<int>(encoder_ranks.size());
  for (const int rank : encoder_ranks) {
    if (rank < 0 || rank >= ranks)
      detail::refuse({"with_encoder got a stage of the encoder on rank ", rank, "; expected one of ", ranks, " ranks"});
  }
  if (!model.paths.empty() || !model.edges.empty() || detail::has_messages(model))
    detail::refuse(
        {"with_encoder got a schedule with messages, edges or paths; expected compute actions of stages that feed the next one"});
  const auto all = detail::renumbered(model, encoder_ranks);
  detail::check_costs(all, costs);
  auto own = costs;
  if (!own.stages.empty()) own.stages.erase(own.stages.begin(), own.stages.begin() + count);
  const auto timeline = simulate(model, own);
  // Beside it: all forwards of the encoder, then the model, then the encoder's backwards.
  auto of_encoder = costs;
  if (!of_encoder.stages.empty()) of_encoder.stages.resize(count);
  const auto encoder = detail::encoder_alone(model, encoder_ranks);
  const double before = count > 0 ? simulate(forward_only(encoder), of_encoder).makespan : 0;
  const double one_by_one = timeline.makespan + (count > 0 ? simulate(encoder, of_encoder).makespan : 0);

  detail::EncoderPlanner planner(all, timeline, count, costs);
  double too_little = 0, enough = before;
  auto result = planner.plan(0);
  if (!result) result = planner.plan(enough);
  else enough = 0;
  while (enough - too_little > 1e-3 * before) {
    const double middle = (too_little + enough) / 2;
    auto earlier = planner.plan(middle);
    (earlier ? enough : too_little) = middle;
    if (earlier) result = std::move(earlier);
  }
  check(result->schedule);
  result->one_by_one = one_by_one;
  return *std::move(result);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
