// What the flight recorder left: files of events, and /proc/PID/maps.
#include "tools/fuzz_bytes/target.hpp"

#include "src/comm/flight/places.hpp"
#include "src/comm/flight/ring.hpp"
#include "tools/dtensor-run-flight.hpp"

#include <cstdlib>
#include <filesystem>

#include <unistd.h>

namespace dtensor::fuzz_bytes {

namespace {

namespace flight = comm::flight;

std::string folder() {
  const auto path = scratch() + "/flight";
  std::filesystem::create_directories(path);
  return path;
}

// So that no input has addr2line started, or anything else.
void hide_programs() { setenv("PATH", "/nonexistent", 1); }

std::string events_of(int rank, int calls) {
  const auto file = folder() + "/made";
  comm::Events events;
  events.keep_in_file(file, rank, 3);
  comm::Event call;
  call.group_index = events.add_group("dp", {0, 1, 2});
  call.group = "dp";
  call.op = "aten::mm";
  call.module = "layers.3";
  call.group_size = 3;
  for (int i = 1; i <= calls; ++i) {
    call.sequence = static_cast<uint64_t>(i);
    call.kind = i % 3 == 0 ? comm::Collective::send : comm::Collective::all_reduce;
    call.root = i % 3 == 0 ? 1 : 0;
    const auto ref = events.issue(call);
    if (i < calls) ref.done();
  }
  const auto bytes = read_bytes(file);
  std::filesystem::remove(file);
  return bytes;
}

// With an error and a stack.
std::string events_of_failed(int rank) {
  flight::Ring ring(folder() + "/made");
  auto& header = ring.header();
  header.rank = rank, header.ranks = 3, header.process = getpid();
  header.error = "[matmul] it does not fit";
  header.state = flight::State::failed;
  header.depth = 3;
  for (int i = 0; i < 3; ++i) header.stack[i] = 0x555555554100 + 0x100 * static_cast<uint64_t>(i);
  return read_bytes(folder() + "/made");
}

void report(const std::string& bytes) {
  hide_programs();
  static const auto other = events_of(1, 2);
  write_bytes(flight::file_of_rank(folder(), 0), bytes);
  write_bytes(flight::file_of_rank(folder(), 1), other);
  dtensor_run::report_of_folder(folder());
  dtensor_run::FlightFolder recorder;
  recorder.open(folder());
  recorder.ask_for_stacks({});
  recorder.report({{0, 0, "was killed by signal 9"}, {1, 0, ""}, {2, 0, ""}});
}

void find_places(const std::string& maps) {
  hide_programs();
  for (const auto& place : flight::places_of({0x555555554100, 0x555555555200, 0x7ffff7c29d90, 1, 0, ~0ull}, maps)) place.str();
}

std::vector<std::string> maps() {
  return {flight::read_text("/proc/self/maps"),
          "555555554000-555555556000 r-xp 00000000 08:01 131 /home/me/train\n"
          "7ffff7c00000-7ffff7d00000 r-xp 00000000 08:01 77 /opt/a b.so\n"};
}

}  // namespace

std::vector<Target> flight_targets() {
  return {{"events", "a rank's file of events, and the report that is made of it",
           [] { return std::vector{events_of(0, 3), events_of(0, 2), events_of(2, 40), events_of_failed(0)}; }, report},
          {"maps", "/proc/PID/maps of a process that has ended", maps, find_places,
           {"'", "0-ffffffffffffffff r-xp 0 0 0 /tmp/x", "\n", " (deleted)", "[stack]", "$(false)"}}};
}

}  // namespace dtensor::fuzz_bytes
