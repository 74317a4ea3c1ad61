// The time of a rank that is taken, and the gaps in it.
#pragma once

#include <dtensor/parallel/pipeline/simulate.hpp>

#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

// An action with its time.
struct Taken {
  TimeSpan span;
  Action action;
};

// What one rank does and when, in order of time.
class RankTime {
 public:
  // The first time from `begin` on at which there is room for `duration`.
  double first_room(double begin, double duration) const {
    for (const auto& [span, action] : taken_) {
      if (span.start >= begin + duration) break;
      begin = std::max(begin, span.end);
    }
    return begin;
  }

  void take(const Action& action, double start, double duration) {
    const auto after = std::ranges::find_if(taken_, [&](const Taken& other) { return other.span.start > start; });
    taken_.insert(after, {{start, start + duration}, action});
  }

  const std::vector<Taken>& all() const { return taken_; }

 private:
  std::vector<Taken> taken_;
};

inline std::vector<std::vector<Action>> lists_of(const std::vector<RankTime>& ranks) {
  std::vector<std::vector<Action>> lists;
  for (const auto& rank : ranks) {
    auto& list = lists.emplace_back();
    for (const auto& taken : rank.all()) list.push_back(taken.action);
  }
  return lists;
}

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
