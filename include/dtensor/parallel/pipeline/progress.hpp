// Runs a schedule's lists without computing anything: each action when what it needs is there. The checker asks whether all of them run,
// the simulator when.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining::detail {

// The edges of a schedule by number, and those that lead to and from a stage.
class Edges {
 public:
  explicit Edges(const Schedule& schedule);
  int find(int from, int to) const;  // -1: no such edge
  bool crosses(int edge) const { return rank_of[list[edge].from] != rank_of[list[edge].to]; }

  // Those that a microbatch comes along to the stage, and goes along from it.
  const std::vector<int>& into(int stage, int microbatch) const { return into_[key(stage, microbatch)]; }
  const std::vector<int>& out_of(int stage, int microbatch) const { return out_of_[key(stage, microbatch)]; }

  std::vector<StageEdge> list;
  const std::vector<int>& rank_of;

 private:
  size_t key(int stage, int microbatch) const { return static_cast<size_t>(paths_ ? microbatch : 0) * rank_of.size() + stage; }
  void add(int edge, int microbatch);

  bool paths_;
  std::vector<std::vector<int>> into_, out_of_;  // by stage, with paths also by microbatch
};

// The edge that a message goes along.
int edge_of(const Edges& edges, const Action& message);

class Progress {
 public:
  // Unbuffered messages wait for the other end. Others are on their way when they are sent, and arrive after `message`.
  struct Rules {
    bool unbuffered = false;
    double message = 0;
  };

  // Expects what check() has found to be complete, or lists whose stages and microbatches exist.
  Progress(const Schedule& schedule, const Rules& rules);

  // Runs what can run. Calls duration(action), then done(rank, position, start, end). Returns whether all has run.
  template <class Duration, class Done>
  bool run(Duration duration, Done done);

  // The action at which a rank stands, and what that waits for: an action, and the rank that has it.
  int position(int rank) const { return position_[rank]; }
  struct Wait {
    Action action;
    int rank = -1;
  };
  Wait waits_for(int rank) const;

 private:
  template <class Duration, class Done>
  void advance(int rank, Duration& duration, Done& done);
  template <class Duration, class Done>
  bool compute(int rank, const Action& action, Duration& duration, Done& done);
  template <class Done>
  bool communicate(int rank, const Action& action, Done& done);

  size_t key(int edge, bool forward, int microbatch) const {
    return (static_cast<size_t>(edge) * 2 + forward) * schedule_.microbatches + microbatch;
  }
  const std::vector<int>& needed(const Action& part) const {
    return part.kind == Kind::F ? edges_.into(part.stage, part.microbatch) : edges_.out_of(part.stage, part.microbatch);
  }
  void provide(int edge, bool forward, int microbatch, double when);
  void wake(int rank);

  const Schedule& schedule_;
  const Rules rules_;
  const Edges edges_;
  bool messages_ = false;
  std::vector<double> ready_;  // when what goes along an edge is there; below 0: it is not
  std::vector<int> position_, queue_;
  std::vector<double> clock_;
  std::vector<char> queued_;
};

bool has_messages(const Schedule& schedule);

// -- How -----------------------------------------------------------------------------------------------------------------

inline Edges::Edges(const Schedule& schedule)
    : list(edges_of(schedule)),
      rank_of(schedule.rank_of_stage),
      paths_(!schedule.paths.empty()),
      into_(rank_of.size() * (paths_ ? schedule.microbatches : 1)),
      out_of_(into_.size()) {
  for (int edge = 0; !paths_ && edge < static_cast<int>(list.size()); ++edge) add(edge, 0);
  for (int microbatch = 0; paths_ && microbatch < schedule.microbatches; ++microbatch) {
    const auto& path = schedule.paths[microbatch];
    for (size_t i = 0; i + 1 < path.size(); ++i) add(find(path[i], path[i + 1]), microbatch);
  }
}

inline void Edges::add(int edge, int microbatch) {
  out_of_[key(list[edge].from, microbatch)].push_back(edge);
  into_[key(list[edge].to, microbatch)].push_back(edge);
}

inline int Edges::find(int from, int to) const {
  const auto is_it = [&](int edge) { return list[edge] == StageEdge{from, to}; };
  if (paths_) {
    const auto found = std::ranges::find(list, StageEdge{from, to});
    return found == list.end() ? -1 : static_cast<int>(found - list.begin());
  }
  if (from < 0 || from >= static_cast<int>(out_of_.size())) return -1;
  const auto found = std::ranges::find_if(out_of_[from], is_it);
  return found == out_of_[from].end() ? -1 : *found;
}

inline int edge_of(const Edges& edges, const Action& message) {
  const bool outward = message.kind == Kind::SEND_F || message.kind == Kind::RECV_B;
  const int other = other_end(message);
  return outward ? edges.find(message.stage, other) : edges.find(other, message.stage);
}

inline bool has_messages(const Schedule& schedule) { return any_action(schedule, is_message); }

inline Progress::Progress(const Schedule& schedule, const Rules& rules)
    : schedule_(schedule),
      rules_(rules),
      edges_(schedule),
      messages_(has_messages(schedule)),
      ready_(edges_.list.size() * 2 * schedule.microbatches, -1.0),
      position_(schedule.ranks.size(), 0),
      clock_(schedule.ranks.size(), 0.0),
      queued_(schedule.ranks.size(), 0) {}

template <class Duration, class Done>
bool Progress::run(Duration duration, Done done) {
  for (int rank = static_cast<int>(schedule_.ranks.size()); rank-- > 0;) wake(rank);
  while (!queue_.empty()) {
    const int rank = queue_.back();
    queue_.pop_back();
    queued_[rank] = 0;
    advance(rank, duration, done);
  }
  for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
    if (position_[rank] < static_cast<int>(schedule_.ranks[rank].size())) return false;
  }
  return true;
}

template <class Duration, class Done>
void Progress::advance(int rank, Duration& duration, Done& done) {
  const auto& list = schedule_.ranks[rank];
  while (position_[rank] < static_cast<int>(list.size())) {
    const auto& action = list[position_[rank]];
    if (is_compute(action.kind)) {
      if (!compute(rank, action, duration, done)) return;
    } else if (is_message(action.kind)) {
      if (!communicate(rank, action, done)) return;
    } else {
      done(rank, position_[rank], clock_[rank], clock_[rank]);
    }
    ++position_[rank];
  }
}

template <class Duration, class Done>
bool Progress::compute(int rank, const Action& action, Duration& duration, Done& done) {
  double start = clock_[rank];
  const Parts parts(action);
  for (const auto& part : parts) {
    if (part.kind == Kind::W) continue;
    for (const int edge : needed(part)) {
      const double when = ready_[key(edge, part.kind == Kind::F, part.microbatch)];
      if (when < 0) return false;
      start = std::max(start, when);
    }
  }
  const double end = start + duration(action);
  clock_[rank] = end;
  done(rank, position_[rank], start, end);
  for (const auto& part : parts) {
    if (part.kind == Kind::W) continue;
    const bool forward = part.kind == Kind::F;
    for (const int edge : forward ? edges_.out_of(part.stage, part.microbatch) : edges_.into(part.stage, part.microbatch)) {
      const bool crosses = edges_.crosses(edge);
      if (!crosses || !messages_) provide(edge, forward, part.microbatch, end + (crosses ? rules_.message : 0));
    }
  }
  return true;
}

template <class Done>
bool Progress::communicate(int rank, const Action& action, Done& done) {
  const int edge = edge_of(edges_, action), peer = schedule_.rank_of_stage[other_end(action)];
  const bool forward = action.kind == Kind::SEND_F || action.kind == Kind::RECV_F;
  if (rules_.unbuffered) {
    const auto& list = schedule_.ranks[peer];
    if (position_[peer] >= static_cast<int>(list.size()) || list[position_[peer]] != counterpart(action)) return false;
    provide(edge, forward, action.microbatch, 0);
    ++position_[peer];
    wake(peer);
  } else if (is_send(action.kind)) {
    provide(edge, forward, action.microbatch, clock_[rank] + rules_.message);
  }
  done(rank, position_[rank], clock_[rank], clock_[rank]);
  return true;
}

inline void Progress::provide(int edge, bool forward, int microbatch, double when) {
  ready_[key(edge, forward, microbatch)] = when;
  if (edges_.crosses(edge)) wake(edges_.rank_of[forward ? edges_.list[edge].to : edges_.list[edge].from]);
}

inline void Progress::wake(int rank) {
  if (queued_[rank]) return;
  queued_[rank] = 1;
  queue_.push_back(rank);
}

inline Progress::Wait Progress::waits_for(int rank) const {
  const auto& action = schedule_.ranks[rank][position_[rank]];
  if (is_message(action.kind)) return {counterpart(action), schedule_.rank_of_stage[other_end(action)]};
  for (const auto& part : Parts(action)) {
    for (const int edge : needed(part)) {
      const bool forward = part.kind == Kind::F;
      if (part.kind == Kind::W || ready_[key(edge, forward, part.microbatch)] >= 0) continue;
      const int other = forward ? edges_.list[edge].from : edges_.list[edge].to;
      return {{other, forward ? Kind::F : Kind::B, part.microbatch}, schedule_.rank_of_stage[other]};
    }
  }
  return {};
}

}  // namespace dtensor::pipelining::detail

#pragma GCC visibility pop
