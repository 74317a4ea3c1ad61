// The report of the flight recorder, from events that are made by hand: who is behind is known.
#include "tests/comm/comm_bodies.hpp"

#include "src/comm/flight/places.hpp"
#include "src/comm/flight/report.hpp"

#include <algorithm>
#include <filesystem>

#include <unistd.h>

#include "tests/catch.hpp"

using dtensor::comm::Collective;
using dtensor::comm::Event;
using dtensor::comm::flight::describe;
using dtensor::comm::flight::examine;
using dtensor::comm::flight::Recording;
using dtensor::comm::flight::Witness;

namespace {

dtensor::comm::flight::RingGroup group_of_all(const std::string& name, const std::vector<int>& ranks, uint64_t key) {
  dtensor::comm::flight::RingGroup group;
  group.key = key;
  group.size = static_cast<int32_t>(ranks.size());
  group.name = name;
  std::ranges::copy(ranks, group.ranks);
  return group;
}

Event a_call(uint64_t sequence, bool done, int group = 0, Collective kind = Collective::all_reduce, int64_t numel = 8) {
  Event event;
  event.number = sequence + 100 * static_cast<uint64_t>(group);
  event.kind = kind;
  event.sequence = sequence;
  event.numel = numel;
  event.dtype = 6;
  event.group_index = group;
  event.group = group == 0 ? "dp" : "tp";
  event.op = "aten::mm";
  event.module = "layers." + std::to_string(sequence);
  event.issued = static_cast<int64_t>(sequence);
  event.done = done ? event.issued + 1 : 0;
  return event;
}

Witness a_witness(int rank, std::vector<Event> events, std::vector<int> tp = {}) {
  Recording recording;
  recording.rank = rank;
  recording.ranks = 4;
  recording.groups = {group_of_all("dp", {0, 1, 2, 3}, 7)};
  if (!tp.empty()) recording.groups.push_back(group_of_all("tp", tp, 1000 + static_cast<uint64_t>(tp[0])));
  recording.events = std::move(events);
  return {rank, recording, "", false};
}

bool mentions(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("flight report: a rank that has not called", "[comm][flight]") {
  std::vector<Witness> witnesses;
  for (int rank = 0; rank < 4; ++rank) witnesses.push_back(a_witness(rank, {a_call(1, true), a_call(2, false)}));
  witnesses[2] = a_witness(2, {a_call(1, true)});
  const auto report = examine(witnesses);
  INFO(report.text);
  CHECK(report.behind == std::vector{2});
  CHECK(mentions(report.text,
                 "rank 2 is behind: it has not made all_reduce(sum) #2 of float32[8] in group 'dp' by aten::mm for layers.2, in which "
                 "ranks 0, 1 and 3 wait"));
  CHECK(mentions(report.text, "rank 2 runs; its last call was all_reduce(sum) #1"));
}

TEST_CASE("flight report: a rank that made another call", "[comm][flight]") {
  for (int guilty : {0, 1, 3}) {
    for (const auto& other : {a_call(2, false, 0, Collective::all_reduce, 9), a_call(2, false, 0, Collective::barrier),
                              a_call(2, false, 0, Collective::all_gather)}) {
      std::vector<Witness> witnesses;
      for (int rank = 0; rank < 4; ++rank)
        witnesses.push_back(a_witness(rank, {a_call(1, true), rank == guilty ? other : a_call(2, false)}));
      const auto report = examine(witnesses);
      INFO(report.text);
      CHECK(report.behind == std::vector{guilty});
      CHECK(mentions(report.text, "rank " + std::to_string(guilty) + " made " + describe(other) + " where ranks"));
    }
  }
  auto other_dtype = a_call(1, false);
  other_dtype.dtype = 7;
  const auto even = examine({a_witness(0, {a_call(1, false)}), a_witness(1, {other_dtype})});
  CHECK(even.behind == std::vector{0, 1});
  CHECK(mentions(even.text, "as many made the one as the other"));
}

// Over TCP a rank may still wait in the call before when it is told.
TEST_CASE("flight report: ranks diverged while another was in the call before", "[comm][flight]") {
  std::vector<Witness> all;
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<Event> events{a_call(3, rank != 1)};
    if (rank != 1) events.push_back(a_call(4, false, 0, Collective::all_reduce, rank == 0 ? 6 : 8));
    all.push_back(a_witness(rank, events));
  }
  const auto report = examine(all);
  CHECK(report.behind == std::vector<int>{0});
  CHECK(mentions(report.text,
                 "rank 0 made all_reduce(sum) #4 of float32[6] in group 'dp' by aten::mm for layers.4 where ranks 2 and 3 made"));
}

TEST_CASE("flight report: who waits for a rank that waits is not behind", "[comm][flight]") {
  // Ranks 0 and 2 wait in dp for 1 and 3; 1 waits in tp for 3, which is nowhere.
  const auto report = examine({a_witness(0, {a_call(1, false)}), a_witness(1, {a_call(5, false, 1)}, {1, 3}),
                               a_witness(2, {a_call(1, false)}), a_witness(3, {a_call(4, true, 1)}, {1, 3})});
  INFO(report.text);
  CHECK(report.behind == std::vector{3});
  // Two ranks that call in different orders wait for each other.
  const auto crossed = examine({a_witness(0, {a_call(1, false, 1)}, {0, 1}), a_witness(1, {a_call(1, false)}, {0, 1}),
                                a_witness(2, {a_call(1, false)}), a_witness(3, {a_call(1, false)})});
  INFO(crossed.text);
  CHECK(mentions(crossed.text, "the ranks call in different orders"));
}

TEST_CASE("flight report: a program's own calls come before the checks of the library", "[comm][flight]") {
  auto check = a_call(1, false);
  check.op = dtensor::comm::kCheck;
  const auto report = examine({a_witness(0, {check}), a_witness(1, {check}), a_witness(2, {a_call(5, false, 1)}, {2, 3}),
                               a_witness(3, {a_call(4, true, 1)}, {2, 3})});
  INFO(report.text);
  CHECK(report.behind == std::vector{3});
  CHECK(mentions(report.text, "rank 3 is behind: it has not made all_reduce(sum) #5 of float32[8] in group 'tp' by aten::mm"));
}

TEST_CASE("flight report: ranks that are killed or stopped or left nothing", "[comm][flight]") {
  const auto waiting = [](int rank) { return a_witness(rank, {a_call(1, true), a_call(2, false)}); };
  auto stopped = waiting(1);
  stopped.stopped = true;
  const auto incomplete = examine({waiting(0), stopped, waiting(2), waiting(3)});
  INFO(incomplete.text);
  CHECK(incomplete.behind == std::vector{1});
  CHECK(mentions(incomplete.text, "every rank has made all_reduce(sum) #2"));

  auto killed = a_witness(3, {a_call(1, true)});
  killed.ending = "was killed by signal 9";
  const auto dead = examine({waiting(0), waiting(1), {2, std::nullopt, "", false}, killed});
  INFO(dead.text);
  CHECK(dead.behind == std::vector{3});
  CHECK(mentions(dead.text, "rank 2 has left no events to read"));
  const auto exited = examine({waiting(0), waiting(1), {2, std::nullopt, "exited with status 1", false}, a_witness(3, {a_call(1, true)})});
  CHECK(exited.behind == std::vector{3});
  const auto unread = examine({waiting(0), waiting(1), {2, std::nullopt, "", false}, waiting(3)});
  CHECK(unread.behind == std::vector{2});

  CHECK(examine({a_witness(0, {a_call(1, true)}), a_witness(1, {a_call(1, true)})}).behind.empty());
}

TEST_CASE("flight report: a message that nobody sends", "[comm][flight]") {
  auto receive = a_call(1, false, 0, Collective::recv);
  receive.root = 2;
  auto send = a_call(1, true, 0, Collective::send);
  send.root = 0;
  const auto report = examine({a_witness(0, {receive}), a_witness(1, {}), a_witness(2, {}), a_witness(3, {send})});
  INFO(report.text);
  CHECK(report.behind == std::vector{2});
  CHECK(mentions(report.text, "rank 2 is behind: it has not made send(to 0, tag 0) #1 of float32[8] in group 'dp', for which rank 0 waits "
                              "in recv(from 2, tag 0) #1 of float32[8] in group 'dp' by aten::mm for layers.1"));
  CHECK_FALSE(mentions(report.text, "has not answered"));  // a message of another rank than 2
}

TEST_CASE("flight report: a signal that does not come", "[comm][flight]") {
  const auto call = [](uint64_t sequence, bool done, Collective kind, int peer) {
    auto event = a_call(sequence, done, 0, kind);
    event.root = peer, event.tag = 1;
    event.op = event.module = "";
    return event;
  };
  const auto report = examine({a_witness(0, {call(1, true, Collective::wait, 2), call(2, false, Collective::wait, 2)}),
                               a_witness(1, {call(2, true, Collective::signal, 0)}),
                               a_witness(2, {call(1, true, Collective::signal, 0), call(7, true, Collective::put, 0)}), a_witness(3, {})});
  INFO(report.text);
  CHECK(report.behind == std::vector{2});
  CHECK(mentions(report.text, "rank 2 is behind: it has not made signal(to 0, pad 1) #2 in group 'dp', for which rank 0 waits in "
                              "wait(from 2, pad 1) #2 in group 'dp'"));
  CHECK(mentions(report.text, "its last call was put(to 0) #7 of float32[8] in group 'dp'"));
}

TEST_CASE("flight report: a message to another peer than was meant", "[comm][flight]") {
  const auto message = [](Collective kind, int peer, int group = 0) {
    auto event = a_call(1, kind == Collective::send, group, kind);
    event.root = peer;
    return event;
  };
  // In dp, 2 sends to 1 what 0 waits for.
  const auto wrong = examine({a_witness(0, {message(Collective::recv, 2)}), a_witness(1, {}),
                              a_witness(2, {message(Collective::send, 1)}), a_witness(3, {})});
  INFO(wrong.text);
  CHECK(wrong.behind == std::vector{2});
  CHECK(mentions(wrong.text, "rank 2 is behind: it has not made send(to 0, tag 0) #1"));
  CHECK(mentions(wrong.text, "it has made send(to 1, tag 0) #1 of float32[8] in group 'dp' by aten::mm for layers.1, which rank 1 has not "
                             "answered: is the peer or the tag another one than was meant?"));
  // In tp, of ranks 1 and 3, peers are counted in the group: 0 is rank 1, and 1 is rank 3.
  const auto smaller = examine({a_witness(0, {}), a_witness(1, {message(Collective::recv, 1, 1)}, {1, 3}), a_witness(2, {}),
                                a_witness(3, {}, {1, 3})});
  INFO(smaller.text);
  CHECK(smaller.behind == std::vector{3});
  CHECK(mentions(smaller.text, "rank 3 is behind: it has not made send(to 0 (rank 1), tag 0) #1 of float32[8] in group 'tp', for which "
                               "rank 1 waits in recv(from 1 (rank 3), tag 0) #1"));
}

TEST_CASE("flight report: a message of another size", "[comm][flight]") {
  auto receive = a_call(1, false, 0, Collective::recv);
  receive.root = 2;
  auto send = a_call(1, true, 0, Collective::send, 9);
  send.root = 0;
  // Rank 3 waits for 0, which is not why.
  const auto report =
      examine({a_witness(0, {receive}), a_witness(1, {}), a_witness(2, {send}), a_witness(3, {a_call(1, false, 1)}, {0, 3})});
  INFO(report.text);
  CHECK(report.behind == std::vector{0, 2});
  CHECK(mentions(report.text, "rank 2 made send(to 0, tag 0) #1 of float32[9] in group 'dp' by aten::mm for layers.1 where rank 0 made "
                              "recv(from 2, tag 0) #1 of float32[8]"));
  send.numel = 8, send.dtype = 7;
  CHECK(mentions(examine({a_witness(0, {receive}), a_witness(2, {send})}).text, "rank 2 made send(to 0, tag 0) #1 of float64[8]"));
  send.dtype = 6;
  CHECK_FALSE(mentions(examine({a_witness(0, {receive}), a_witness(2, {send})}).text, "where rank 0 made"));
}

TEST_CASE("flight report: a group with a long name", "[comm][flight]") {
  const std::string name = "a move between meshes of four ranks and of six";
  auto call = a_call(1, false);
  call.group = name;
  auto witness = a_witness(0, {call});
  witness.recording->groups[0] = group_of_all(name, {0, 1, 2, 3}, 7);
  CHECK(mentions(examine({witness, a_witness(1, {})}).text, "in group '" + name + "'"));
}

TEST_CASE("flight report: an error that several ranks had is said once", "[comm][flight]") {
  const auto failed = [](int rank, const std::string& error) {
    auto witness = a_witness(rank, {a_call(1, false)});
    witness.recording->state = dtensor::comm::flight::State::failed;
    witness.recording->error = error + " (rank " + std::to_string(rank) + ")";
    return witness;
  };
  const std::string late = "[all_reduce] it did not complete within 2 s";
  auto witnesses = std::vector{failed(0, late), failed(1, "out of cheese"), failed(2, late),
                               failed(3, "[barrier] cannot complete: rank 1 failed: out of cheese (rank 1)")};
  // How often the report says a text.
  const auto times = [&](const std::string& part) {
    const auto text = examine(witnesses).text;
    int count = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  };
  INFO(examine(witnesses).text);
  CHECK(times(late) == 1);
  CHECK(times("rank 0 failed: " + late) == 1);
  CHECK(times("rank 2 failed as rank 0 did") == 1);
  CHECK(times("rank 1 failed: out of cheese") == 1);
  CHECK(times("rank 3 failed: [barrier] cannot complete: rank 1 failed") == 1);
  witnesses[2].told = true;  // by who prints the report
  CHECK(times(late) == 0);
  CHECK(times("rank 2 failed first") == 1);
  CHECK(times("rank 0 failed as rank 2 did") == 1);
}

TEST_CASE("flight report: places name functions and what lambdas stand in", "[comm][flight]") {
  const auto place = [](const std::string& function) { return dtensor::comm::flight::Place{"train.cpp", "42", function}.str(); };
  CHECK(place("step(Run const&, int)") == "train.cpp:42 (in step)");
  CHECK(place("(anonymous namespace)::step()") == "train.cpp:42 (in step)");
  CHECK(place("app::Layer::operator()(int) const") == "train.cpp:42 (in app::Layer::operator())");
  for (const std::string lambda : {"main::{lambda(int)#1}::operator()(int) const", "main::$_0::operator()(int) const",
                                   "main::{lambda(int)#1}::operator()(int) const::{lambda()#1}::operator()() const",
                                   "std::_Function_handler<void (int), main::{lambda(int)#1}>::_M_invoke(std::_Any_data const&, int&&)",
                                   "__invoke_impl<void, main(int, char**)::<lambda(int)>&, int>"})
    CHECK(place(lambda) == "train.cpp:42 (in main::{lambda})");
  CHECK(place("operator()") == "train.cpp:42 (in a lambda)");
  CHECK(place("") == "train.cpp:42");
}

TEST_CASE("flight recorder: events in a file are read by others", "[comm][flight]") {
  const auto folder = std::filesystem::temp_directory_path() / ("events-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const auto file = dtensor::comm::flight::file_of_rank(folder, 3);
  {
    dtensor::comm::Events events;
    events.keep_in_file(file, 3, 4);
    events.add_group("dp", {0, 1, 2, 3});
    for (uint64_t i = 1; i <= dtensor::comm::Events::kKept + 5; ++i) events.issue(a_call(i, false)).done();
    const auto recording = dtensor::comm::flight::read_file(file);
    REQUIRE(recording);
    CHECK(recording->rank == 3);
    CHECK(recording->ranks == 4);
    CHECK(recording->process == getpid());
    REQUIRE(recording->groups.size() == 1);
    CHECK(recording->groups[0].ranks[3] == 3);
    REQUIRE(recording->events.size() == dtensor::comm::Events::kKept);
    CHECK(recording->events.front().sequence == 6);
    CHECK(recording->events.back().done > 0);
    CHECK(recording->events.back().thread != 0);
    CHECK(dtensor_tests::fails_with([&] { events.keep_in_file(folder / "none" / "x", 0, 1); }, "DTENSOR_FLIGHT_RECORDER"));
  }
  CHECK_FALSE(dtensor::comm::flight::read_file(folder / "none"));
  std::filesystem::remove_all(folder);
}
