// What the checker of schedules takes and what it refuses, in which words.
#include "tests/catch.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/refuses.hpp"

namespace dtensor::pipelining::test {

namespace {

using dtensor::test::refuses;

// The texts of what a changed place had and has: an error about it names one of them.
using Names = std::vector<std::string>;

// Gives a changed schedule to the checker, as text, and to the oracle. Returns whether it was legal.
bool try_changed(const Schedule& changed, const Names& names) {
  const auto read = from_csv(to_csv(changed));
  const bool legal = Oracle(read).legal();
  std::string error;
  try {
    check(read);
  } catch (const Error& refused) {
    error = refused.what_without_backtrace();
  }
  const bool named = std::ranges::any_of(names, [&](const std::string& name) { return error.find(name) != error.npos; });
  if (legal != error.empty() || !(legal || (named && error.find("rank") != error.npos))) {
    INFO(to_csv(changed) << error);
    CHECK(legal == error.empty());
    CHECK((legal || named));
  }
  return legal;
}

struct Tried {
  int legal = 0, all = 0;
  void add(bool was_legal) { legal += was_legal, ++all; }
};

Tried try_all_faults(const Schedule& schedule) {
  Tried tried;
  for_each_fault(schedule, [&](const Schedule& changed, const Names& names) { tried.add(try_changed(changed, names)); });
  return tried;
}

}  // namespace

TEST_CASE("pipeline check: every action that is removed or doubled or swapped is refused by name or legal", "[pipeline]") {
  Tried sum;
  for (const auto& [ranks, microbatches] : {std::pair{1, 1}, {1, 2}, {2, 1}, {2, 3}, {3, 2}}) {
    for (const auto& schedule : every_schedule(ranks, microbatches, 2)) {
      for (const auto& form : {schedule, with_messages(schedule)}) {
        CHECK(Oracle(form).legal());
        const auto tried = try_all_faults(form);
        CHECK(tried.legal < tried.all);
        sum.legal += tried.legal, sum.all += tried.all;
      }
    }
  }
  CHECK(sum.legal > 100);
  CHECK(sum.all > 50000);
}

TEST_CASE("pipeline check: errors name rank and action and reason; they show the grid", "[pipeline]") {
  const auto refused = [](const std::string& csv, const std::string& why) { refuses(why, [&] { check(from_csv(csv)); }); };
  refused("0F0,0B0\n1B0,1F0", "rank 1, action 0, 1B0: it comes before 1F0, action 1");
  refused("0F0,0B0\n1B0,1F0", "  rank 0   from action 0    0F0   0B0\n  rank 1   from action 0   >1B0<  1F0");
  refused("0F0,0W0,0I0", "rank 0, action 1, 0W0: it comes before 0I0, action 2");
  refused("0F0,0I0", "rank 0, 0W0 is missing");
  refused("0F0,0W0", "rank 0, 0I0 is missing");
  refused("0F0,0F1,0B0", "rank 0, 0B1 is missing");
  refused("0F0,0B0,0I0,0W0", "action 2, 0I0: the backward began in action 1");
  refused("0F0,0B0,0W0", "action 2, 0W0: the backward is whole in B, action 1");
  refused("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", "rank 1, 1F1 is missing: stage 1 never runs microbatch 1");
  refused("0F0,1F0,0B0\n1B0", "rank 1, action 0, 1B0: stage 1 is on rank 0");
  refused("0F0,2F0,2B0,0B0", "stage 1 of 3 is on no rank");
  refused("0F0,0F77777,0B0", "0F1 is missing");
  refused("", "has 0 ranks");
  refused("(0F0;0B0)", "it comes before 0F0");
  refused("(0F0;1B0),0B0\n1F0,1I0", "rank 0, action 0, (0F0;1B0): stage 1 is on rank 1, which has 1F0");
  check(from_csv("0F0,1F0,(0F1;1B0),1F1,0B0,(0F2;1B1),0B1,1F2,1B2,0B2"));
}

TEST_CASE("pipeline check: ranks that would wait for each other are named in a circle", "[pipeline]") {
  // Rank 0 wants the gradient before it sends what that is made of.
  refuses("ranks wait for each other: rank 0, action 1, 0B0 waits for 1B0 of rank 1; rank 1, action 1, 1F1 waits for 0F1 of rank 0",
          [] { check(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")); });
  refuses("a rank waits for itself: rank 0, action 0, 1F0 waits for 0F0, which comes later", [] { check(from_csv("1F0,0F0,1B0,0B0")); });
  // pytorch/pytorch 172668: nobody buffers, and both send first.
  const auto first_sends = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1";
  refuses("rank 0, action 3, 0SEND_F1 waits for 1RECV_F1 of rank 1; rank 1, action 3, 1SEND_B0 waits for 0RECV_B0 of rank 0",
          [&] { check(from_csv(first_sends)); });
  check(with_messages(compute_only(from_csv(first_sends))));
}

TEST_CASE("pipeline check: messages and gathering and reducing", "[pipeline]") {
  const auto refused = [](const std::string& csv, const std::string& why) { refuses(why, [&] { check(from_csv(csv)); }); };
  const std::string second = "\n1RECV_F0,1F0,1B0,1SEND_B0";
  check(from_csv("0F0,0SEND_F0,0RECV_B0,0B0" + second));
  refused("0F0,0RECV_B0,0B0" + second, "rank 0, 0SEND_F0 is missing: rank 1 needs this output");
  refused("0F0,0SEND_F0,0B0" + second, "rank 0, 0RECV_B0 is missing: rank 1 sends this gradient");
  refused("0SEND_F0,0F0,0RECV_B0,0B0" + second, "action 0, 0SEND_F0: the output is made later, by 0F0, action 1");
  refused("0F0,0SEND_F0,0B0,0RECV_B0" + second, "action 3, 0RECV_B0: the gradient is needed earlier, by 0B0, action 2");
  refused("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0", "stages 0 and 1 are both on rank 0");
  refused("0F0,0SEND_F0,0RECV_B0,0B0,0SEND_B0" + second, "no edge joins stages 0 and -1");
  check(from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD"));
  refused("0F0,0UNSHARD,0B0,0RESHARD", "action 0, 0F0: stage 0's parameters are not gathered");
  refused("0UNSHARD,0F0,0B0", "action 0, 0UNSHARD: nothing frees it");
  refused("0UNSHARD,0UNSHARD,0F0,0B0,0RESHARD", "it is gathered since action 0");
  refused("0F0,0F1,0B0,0REDUCE_GRAD,0B1", "the stage's last backward is 0B1, action 4");
  refused("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "it comes twice");
  refused("0F0,0B0,0REDUCE_GRAD\n1F0,1B0", "rank 1, 1REDUCE_GRAD is missing");
}

TEST_CASE("pipeline check: evaluation", "[pipeline]") {
  for (const auto& schedule : every_schedule(3, 4)) {
    const auto evaluation = forward_only(schedule);
    check(evaluation, Pass::forward);
    check(with_messages(evaluation), Pass::forward);
    check(forward_only(with_messages(schedule)), Pass::forward);
    for (const auto& rank : simulate(evaluation).ranks) CHECK(rank.peak == 1);
    refuses("has no backward", [&] { check(evaluation); });
    refuses("a forward pass has none of these", [&] { check(schedule, Pass::forward); });
  }
}

TEST_CASE("pipeline check: a stage may feed any later one", "[pipeline]") {
  auto schedule = gpipe({3, 2});
  schedule.edges = {{0, 1}, {1, 2}, {0, 2}};
  check(schedule);
  const auto messages = with_messages(schedule);
  check(messages);
  CHECK(to_csv(messages).find("0SEND_F0@2") != std::string::npos);
  CHECK(to_csv(messages).find("2RECV_F0@0") != std::string::npos);
  auto again = from_csv(to_csv(messages));  // in which messages say what feeds what
  check(again);
  CHECK(std::ranges::is_permutation(again.edges, schedule.edges));
  CHECK(from_csv(to_csv(with_messages(gpipe({3, 2})))).edges.empty());
  CHECK(again.ranks == messages.ranks);
  CHECK(simulate(messages).forward_messages == 6);
  again.edges = {{0, 1}, {1, 2}};
  refuses("no edge joins stages 0 and 2", [&] { check(again); });
  schedule.edges.push_back({2, 1});
  refuses("stage 2 feeds stage 1", [&] { check(schedule); });

  // Rank 2 needs what rank 0 sends it past rank 1.
  auto waits = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F1,2B1,2F0,2B0");
  waits.edges = {{0, 2}, {1, 2}};
  refuses("rank 2, action 0, 2F1 waits for 0F1 of rank 0", [&] { check(waits); });
}

TEST_CASE("pipeline check: a schedule of one's own is a function that returns it", "[pipeline]") {
  // Two microbatches at a time.
  const auto in_twos = [](int ranks, int microbatches) {
    Schedule schedule{"twos", microbatches, loop_placement(ranks, 1), std::vector<std::vector<Action>>(ranks)};
    for (int rank = 0; rank < ranks; ++rank) {
      for (int begin = 0; begin < microbatches; begin += 2) {
        for (int i = begin; i < std::min(begin + 2, microbatches); ++i) schedule.ranks[rank].push_back({rank, Kind::F, i});
        for (int i = begin; i < std::min(begin + 2, microbatches); ++i) schedule.ranks[rank].push_back({rank, Kind::B, i});
      }
    }
    return schedule;
  };
  const auto timeline = simulate(in_twos(4, 8));
  CHECK(timeline.ranks[0].peak == 2);
  CHECK(timeline.makespan == 4 * (2 + 3) * 3);
}

}  // namespace dtensor::pipelining::test
