// A job that goes wrong in step 3 on one rank, in a way that is known: flight-ranks MODE RANK [--ranks N] [--transport NAME] [--deadline
// SECONDS].
#include <dtensor/comm/communicator.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/observe/scope.hpp>

#include <ATen/ATen.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <unistd.h>

namespace dt = dtensor;

namespace {

constexpr int kSteps = 6, kBad = 3;
constexpr int64_t kLarge = 8 << 20;  // elements: more than a transport buffers

struct Run {
  std::string mode;
  int chosen;
  int ranks;
};

__attribute__((noinline)) void stall() {
  std::this_thread::sleep_for(std::chrono::seconds(6));  // of a deadline of 2
}

void remove_events(int rank) {
  const char* folder = std::getenv("DTENSOR_FLIGHT_RECORDER");
  if (folder) unlink((std::string(folder) + "/rank-" + std::to_string(rank) + ".events").c_str());
}

// What the chosen rank does before its call, or instead of it. True: it makes the call nevertheless.
bool misbehave(const Run& run, dt::comm::Communicator& all, int rank) {
  if (run.mode == "no-events") remove_events(rank);
  if (run.mode == "missing" || run.mode == "no-events" || run.mode == "no-events-of-another") return stall(), false;
  std::this_thread::sleep_for(std::chrono::milliseconds(400));  // all others are in the call by then
  if (run.mode == "type") return all.all_reduce(at::ones({64}), dt::ReduceOp::sum).get(), false;
  if (run.mode == "size") return all.all_gather(at::ones({60}), std::vector<int64_t>(run.ranks, 60)).get(), false;
  if (run.mode == "dtype") return all.all_gather(at::ones({64}, at::kDouble), std::vector<int64_t>(run.ranks, 64)).get(), false;
  if (run.mode == "kill") raise(SIGKILL);
  if (run.mode == "segv") raise(SIGSEGV);
  if (run.mode == "term") raise(SIGTERM);
  if (run.mode == "stop") raise(SIGSTOP);
  return run.mode != "skip";
}

__attribute__((noinline)) void step(const Run& run, dt::comm::Communicator& all, int number, bool good) {
  const dt::Scope scope("layers." + std::to_string(number));
  const dt::comm::Cause cause("aten::mm", true);
  if (run.mode == "no-events-of-another" && number == kBad && all.rank() == (run.chosen + 2) % run.ranks) remove_events(all.rank());
  if (!good) std::fputs("goes wrong\n", stderr);
  if (!good && !misbehave(run, all, all.rank())) return;
  if (run.mode == "incomplete" && number == kBad) {
    if (!good) {
      const auto issued = all.all_reduce(at::ones({kLarge}), dt::ReduceOp::sum);
      raise(SIGSTOP);
      return;
    }
    all.all_reduce(at::ones({kLarge}), dt::ReduceOp::sum).get();  // LINE: incomplete
    return;
  }
  const std::vector<int64_t> counts(run.ranks, 64);
  if (number % 2 == 0) all.all_reduce(at::ones({64}), dt::ReduceOp::sum).get();
  else all.all_gather(at::ones({64}), counts).get();  // LINE: call
}

}  // namespace

int main(int argc, char** argv) {
  Run run{argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 0, 1};
  return dt::launch(argc, argv, [&](dt::World& world) {
    Run own = run;
    own.ranks = world.size();
    const auto mesh = dt::init_device_mesh(c10::DeviceType::CPU, {world.size()}, {"dp"});
    auto& all = mesh.communicator(0);
    for (int number = 0; number < kSteps; ++number) {
      const bool good = number != kBad || world.rank() != own.chosen;
      if (!good && own.mode == "lambda") {
        std::fputs("goes wrong\n", stderr);
        std::this_thread::sleep_for(std::chrono::seconds(6));  // LINE: lambda
      }
      step(own, all, number, good);
    }
  });
}
