#include "src/comm/flight/report.hpp"

#include "src/comm/flight/describe.hpp"
#include "src/comm/flight/errors.hpp"
#include "src/comm/flight/places.hpp"

#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

namespace dtensor::comm::flight {

namespace {

bool is_open(const Event& call) { return call.what == Event::What::collective && call.done == 0; }

// What all ranks of a collective must agree on.
auto agreed(const Event& call) {
  const bool barrier = call.kind == Collective::barrier, sized = reduces(call) || call.kind == Collective::broadcast;
  return std::tuple(call.kind, reduces(call) ? call.reduce : ReduceOp::sum, call.kind == Collective::broadcast ? call.root : 0,
                    barrier ? 0 : call.dtype, sized ? call.numel : 0, call.counts, std::string(barrier ? "" : std::string_view(call.op)));
}

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

// "rank 1 waits", "ranks 1 and 2 wait"
std::string list(const std::vector<int>& ranks, const char* one_does, const char* many_do) {
  return list(ranks) + " " + (ranks.size() == 1 ? one_does : many_do);
}

// The collectives of a group, by rank and number.
struct GroupCalls {
  RingGroup group;
  std::map<int, std::map<uint64_t, Event>> calls;

  // Those that are named, and those that have called.
  std::set<int> members() const {
    std::set<int> ranks(group.ranks, group.ranks + std::min(group.size, RingGroup::kNamed));
    for (const auto& [rank, of_rank] : calls) ranks.insert(rank);
    return ranks;
  }
};

// The first call of a group that is not done everywhere it should be.
struct Stuck {
  std::vector<int> there{}, absent{}, other{};  // made it; did not; made another one
  std::vector<int> unknown{};                   // left no events to read
  Event call{}, other_call{};                   // of those that are there; of those that made another one
  const RingGroup* group = nullptr;
  int position = 0;                             // of a message: of the rank that is there, in the group

  // Of a message: its other end.
  std::string missing() const {
    auto other = call;
    other.kind = other_end(call.kind);
    other.root = position;
    other.op = other.module = "";
    return describe(other, group);
  }
};

struct Message {
  int rank;
  const RingGroup* group;
  Event event;

  // Empty where the group's ranks are not all named, and its peer is none of those that are.
  std::optional<int> peer() const {
    const bool named = event.root >= 0 && event.root < std::min(group->size, RingGroup::kNamed);
    return named ? std::optional(group->ranks[event.root]) : std::nullopt;
  }

  // Of its rank in the group.
  int position() const {
    const auto* named = group->ranks + std::min(group->size, RingGroup::kNamed);
    return static_cast<int>(std::find(group->ranks, named, rank) - group->ranks);
  }
};

class Examination {
 public:
  explicit Examination(const std::vector<Witness>& witnesses) : witnesses_(witnesses), errors_(witnesses) {
    for (const auto& witness : witnesses) {
      by_rank_[witness.rank] = &witness;
      if (witness.recording) add_calls(witness.rank, *witness.recording);
    }
    for (const auto& [key, calls] : groups_) find_stuck(calls);
    find_stuck_messages();
    // A program's own calls say more of where it is than those by which the library compares ranks.
    std::ranges::stable_partition(stuck_, [](const Stuck& stuck) { return std::string_view(stuck.call.op) != kCheck; });
  }

  Report run() {
    const auto* worst = choose();
    if (worst) {
      tell(*worst);
    } else if (auto dead = dead_or_stopped(ranks_of_all()); !dead.empty()) {
      report_.behind = dead;
      line(fmt::format("{}; no rank waits for it in a collective", state_of(dead.front(), true)));
    } else {
      line("no rank waits for another one in a collective");
    }
    for (const auto& witness : witnesses_) line("  " + summary(witness));
    return std::move(report_);
  }

 private:
  void add_calls(int rank, const Recording& recording) {
    for (const auto& event : recording.events) {
      if (event.what != Event::What::collective || event.group_index < 0 || event.group_index >= static_cast<int>(recording.groups.size()))
        continue;
      const auto& group = recording.groups[event.group_index];
      if (is_message(event)) {
        messages_.push_back({rank, &group, event});
      } else if (!is_one_sided(event)) {
        auto& calls = groups_[group.key];
        calls.group = group;
        calls.calls[rank][event.sequence] = event;
      }
    }
  }

  // Where ranks made different calls; or else the first call that is not done. A rank may have been told of the former while it waits in
  // the latter.
  void find_stuck(const GroupCalls& calls) {
    std::optional<uint64_t> first;
    std::set<uint64_t> all;
    for (const auto& [rank, of_rank] : calls.calls) {
      for (const auto& [sequence, event] : of_rank) {
        all.insert(sequence);
        if (is_open(event)) first = std::min(first.value_or(sequence), sequence);
      }
    }
    if (!first) return;
    for (auto sequence = all.find(*first); sequence != all.end(); ++sequence) {
      auto stuck = stuck_in(calls, *sequence);
      if (!stuck.other.empty()) return stuck_.push_back(std::move(stuck));
    }
    stuck_.push_back(stuck_in(calls, *first));
  }

  Stuck stuck_in(const GroupCalls& calls, uint64_t sequence) const {
    Stuck stuck{.group = &calls.group};
    std::map<decltype(agreed(Event())), std::vector<int>> sides;
    for (const int rank : calls.members()) {
      const auto of_rank = calls.calls.find(rank);
      const bool made_any = of_rank != calls.calls.end() && !of_rank->second.empty();
      if (made_any && of_rank->second.contains(sequence)) sides[agreed(of_rank->second.at(sequence))].push_back(rank);
      else if (!is_known(rank)) stuck.unknown.push_back(rank);
      else if (!made_any || of_rank->second.rbegin()->first < sequence) stuck.absent.push_back(rank);
    }
    const auto most = std::ranges::max_element(sides, {}, [](const auto& side) { return side.second.size(); });
    stuck.there = most->second;
    for (const auto& [what, ranks] : sides) {
      if (what != most->first) ranges::push_back(stuck.other, ranks);
    }
    stuck.call = calls.calls.at(stuck.there.front()).at(sequence);
    if (!stuck.other.empty()) stuck.other_call = calls.calls.at(stuck.other.front()).at(sequence);
    return stuck;
  }

  // A message is stuck where its receiver waits and nothing was sent, or the other way round, or another size or dtype was.
  void find_stuck_messages() {
    for (const auto& mine : messages_) {
      if (!is_open(mine.event) || !mine.peer()) continue;
      const int peer = *mine.peer();
      Stuck stuck{.there = {mine.rank}, .call = mine.event, .group = mine.group, .position = mine.position()};
      if (const auto* theirs = answer_to(mine); !theirs) {
        (is_known(peer) ? stuck.absent : stuck.unknown).push_back(peer);
      } else if (theirs->event.numel != mine.event.numel || theirs->event.dtype != mine.event.dtype) {
        stuck.other = {peer};
        stuck.other_call = theirs->event;
      }
      stuck_.push_back(std::move(stuck));
    }
  }

  // What the peer made at the other end, or nothing.
  const Message* answer_to(const Message& mine) const {
    const auto found = std::ranges::find_if(messages_, [&](const Message& theirs) {
      return theirs.rank == mine.peer() && theirs.group->key == mine.group->key && theirs.event.kind == other_end(mine.event.kind) &&
             theirs.event.tag == mine.event.tag && theirs.event.sequence == mine.event.sequence && theirs.peer() == mine.rank;
    });
    return found == messages_.end() ? nullptr : &*found;
  }

  // Where a message waits for `rank`: one of its last ones that went the other way and that nobody answered. Perhaps that was meant.
  const Message* stray_message(const Stuck& stuck, int rank) const {
    int left = 8;
    for (auto it = messages_.rbegin(); is_message(stuck.call) && it != messages_.rend() && left > 0; ++it) {
      if (it->rank != rank || it->group->key != stuck.group->key || it->event.kind != other_end(stuck.call.kind)) continue;
      if (it->peer() && !answer_to(*it)) return &*it;
      --left;
    }
    return nullptr;
  }

  // Ranks that wait in some call.
  bool waits(int rank) const {
    return std::ranges::any_of(stuck_, [&](const Stuck& stuck) {
      return std::ranges::count(stuck.there, rank) + std::ranges::count(stuck.other, rank) > 0;
    });
  }

  std::vector<int> roots(const Stuck& stuck) const {
    std::vector<int> result;
    for (const int rank : stuck.absent) {
      if (!waits(rank) || is_gone(rank)) result.push_back(rank);
    }
    return stuck.absent.empty() ? stuck.unknown : result;
  }

  // Whether its process stands still, or ended without failing.
  bool is_gone(int rank) const {
    const auto* witness = find(rank);
    if (!witness) return false;
    // Of one that left no events an exit may come of having failed as the others did.
    const bool died = witness->recording ? !witness->ending.empty() && witness->recording->state == State::running
                                         : witness->ending.starts_with("was killed");
    return witness->stopped || died;
  }

  // Whether it can be told what a rank did, or that it does nothing.
  bool is_known(int rank) const {
    const auto* witness = find(rank);
    return witness && (witness->recording || is_gone(rank));
  }

  const Witness* find(int rank) const {
    const auto found = by_rank_.find(rank);
    return found == by_rank_.end() ? nullptr : found->second;
  }

  const Stuck* choose() const {
    const auto first = [&](auto wanted) -> const Stuck* {
      const auto found = std::ranges::find_if(stuck_, wanted);
      return found == stuck_.end() ? nullptr : &*found;
    };
    if (const auto* one = first([](const Stuck& stuck) { return !stuck.other.empty(); })) return one;
    if (const auto* one = first([&](const Stuck& stuck) { return !roots(stuck).empty(); })) return one;
    if (const auto* one = first([&](const Stuck& stuck) { return !dead_or_stopped(stuck.there).empty(); })) return one;
    if (const auto* one = first([&](const Stuck& stuck) { return !stuck.absent.empty(); })) return one;
    return stuck_.empty() ? nullptr : &stuck_.front();
  }

  std::vector<int> dead_or_stopped(const std::vector<int>& ranks) const {
    std::vector<int> result;
    for (const int rank : ranks) {
      if (is_gone(rank)) result.push_back(rank);
    }
    return result;
  }

  std::vector<int> ranks_of_all() const {
    std::vector<int> ranks;
    for (const auto& witness : witnesses_) ranks.push_back(witness.rank);
    return ranks;
  }

  void tell(const Stuck& stuck) {
    const auto call = describe(stuck.call, stuck.group);
    auto at = place_of(stuck.there);
    if (!at.empty()) at = " at " + at;
    if (!stuck.other.empty()) {
      tell_other(stuck, call, at);
    } else if (auto root = roots(stuck); !root.empty()) {
      report_.behind = root;
      tell_behind(stuck, call, at);
    } else if (auto dead = dead_or_stopped(stuck.there); !dead.empty()) {
      report_.behind = dead;
      line(fmt::format("{} behind: every rank has made {}{}, which is not complete", list(dead, "is", "are"), call, at));
      for (const int rank : dead) line("  " + state_of(rank, false));
    } else if (!stuck.absent.empty()) {
      report_.behind = stuck.absent;
      line(fmt::format("{} not made {}, in which {}, and {} elsewhere: the ranks call in different orders",
                       list(stuck.absent, "has", "have"), is_message(stuck.call) ? "the other end of " + call : call,
                       list(stuck.there, "waits", "wait"), stuck.absent.size() == 1 ? "waits" : "wait"));
    } else {
      line(fmt::format("every rank has made {}{}, which is not complete", call, at));
    }
  }

  void tell_behind(const Stuck& stuck, const std::string& call, const std::string& at) {
    const auto there = list(stuck.there, "waits", "wait");
    const auto what = is_message(stuck.call) ? fmt::format("{}, for which {} in {}{}", stuck.missing(), there, call, at)
                                             : fmt::format("{}{}, in which {}", call, at, there);
    const auto& behind = report_.behind;
    line(fmt::format("{} behind: {} not made {}", list(behind, "is", "are"), behind.size() == 1 ? "it has" : "they have", what));
    for (const int rank : behind) {
      line("  " + state_of(rank, false));
      if (const auto* stray = stray_message(stuck, rank)) {
        line(fmt::format("  it has made {}, which rank {} has not answered: is the peer or the tag another one than was meant?",
                         describe(stray->event, stray->group), *stray->peer()));
      }
    }
  }

  void tell_other(const Stuck& stuck, const std::string& call, const std::string& at) {
    const auto where = place_of(stuck.other);
    const bool even = stuck.other.size() >= stuck.there.size();
    report_.behind = stuck.other;
    if (even) ranges::push_back(report_.behind, stuck.there);
    std::ranges::sort(report_.behind);
    line(fmt::format("{} made {}{} where {} made {}{}{}", list(stuck.other), describe(stuck.other_call, stuck.group),
                     where.empty() ? "" : " at " + where,
                     list(stuck.there), call, at,
                     even ? "; as many made the one as the other, so either may be wrong" : ""));
    line("  a rank skipped a call, made one more, or made it with other sizes, dtype or operation");
  }

  // Where the first of these ranks whose stack is known stands in the program.
  std::string place_of(const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      if (const auto& place = place_of(rank); !place.empty()) return place;
    }
    return "";
  }

  const std::string& place_of(int rank) {
    const auto known = places_.find(rank);
    if (known != places_.end()) return known->second;
    const auto* witness = find(rank);
    auto& place = places_[rank];
    if (!witness || !witness->recording || witness->recording->stack.empty()) return place;
    const auto places = places_of(witness->recording->stack, witness->recording->maps);
    if (!places.empty()) place = places.front().str();
    return place;
  }

  // What a rank did last, and what its process does.
  std::string state_of(int rank, bool and_nothing_else) {
    const auto* witness = find(rank);
    if (!witness) return fmt::format("rank {} runs on another host", rank);
    std::string text = fmt::format("rank {}", rank);
    const auto state = witness->recording ? witness->recording->state : State::running;
    if (state == State::failed) text += " failed" + errors_.why(*witness);
    else if (state == State::left) text += " has left: its program ended";
    else if (!witness->ending.empty()) text += " " + witness->ending;
    else if (witness->stopped) text += " is stopped (by SIGSTOP or a debugger)";
    else if (witness->recording) text += " runs";
    if (!witness->recording)
      text += text.ends_with(std::to_string(rank)) ? " has left no events to read" : " and has left no events to read";
    if (and_nothing_else || !witness->recording) return text;
    if (const auto& place = place_of(rank); !place.empty()) text += ", at " + place;
    if (const auto* last = last_call(*witness->recording)) text += "; its last call was " + describe(*last, group_of(*witness, *last));
    return text;
  }

  static const RingGroup* group_of(const Witness& witness, const Event& event) {
    const auto& groups = witness.recording->groups;
    return event.group_index >= 0 && event.group_index < static_cast<int>(groups.size()) ? &groups[event.group_index] : nullptr;
  }

  static const Event* last_call(const Recording& recording) {
    for (auto event = recording.events.rbegin(); event != recording.events.rend(); ++event) {
      if (event->what == Event::What::collective) return &*event;
    }
    return nullptr;
  }

  std::string summary(const Witness& witness) {
    auto text = state_of(witness.rank, true);
    if (!witness.recording) return text;
    const auto* last = last_call(*witness.recording);
    if (!last) return text + ", made no call";
    text += fmt::format("; last: {}, {}", describe(*last, group_of(witness, *last)), last->done ? "done" : "not complete");
    if (const auto& place = place_of(witness.rank); !place.empty()) text += "; at " + place;
    return text;
  }

  void line(const std::string& text) { report_.text += text + "\n"; }

  const std::vector<Witness>& witnesses_;
  std::map<int, const Witness*> by_rank_;
  std::map<uint64_t, GroupCalls> groups_;
  std::vector<Message> messages_;
  std::vector<Stuck> stuck_;
  std::map<int, std::string> places_;
  Errors errors_;
  Report report_;
};

}  // namespace

Report examine(const std::vector<Witness>& witnesses) { return Examination(witnesses).run(); }

}  // namespace dtensor::comm::flight
