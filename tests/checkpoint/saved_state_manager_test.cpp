// Saving in the background, now and then, and keeping what is worth it.
#include "tests/support/sanitizers.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>

#include <csignal>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// A state of one sharded tensor and one number, which are both `value`.
struct Counter {
  explicit Counter(dt::World& world) : cut(dt::distribute_tensor(torch::zeros({64, 3}), line(world), {dt::shard(0)}).tensor().clone()) {}
  dt::State state() { return {{"cut", cut}, {"value", value}}; }
  void set(int64_t to) {
    cut.fill_(static_cast<double>(to));
    value = to;
  }
  void check(int64_t is) const {
    dt::require(value == is && dt::full_tensor(cut).eq(is).all().item<bool>(), "test", "the state is that of {}; expected {}", value, is);
  }
  at::Tensor cut;
  int64_t value = 0;
};

int64_t open_files() { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); }

int64_t resident_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::atoll(line.c_str() + 6);
  }
  return 0;
}

}  // namespace

TEST_CASE("checkpoint: a save in the background has the values of its time", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](dt::World& world) {
          Counter counter(world), other(world);
          for (int64_t step = 1; step <= 5; ++step) {
            counter.set(step);
            auto saving = dt::save(counter.state(), folder.path, step, {.async = true});
            counter.set(-step);
            if (step % 2 == 0) saving.wait();
          }
          counter.set(9);
          dt::save(counter.state(), folder.path, 9);  // waits for the one before
          for (const int64_t step : {1, 2, 3, 4, 5, 9}) {
            dt::load(other.state(), folder.path, step);
            other.check(step);
          }
        },
        transport));
  }
}

TEST_CASE("checkpoint: the next call says what went wrong in the background on every rank", "[checkpoint][errors]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    Counter counter(world);
    dt::save(counter.state(), "/proc/none", 1, {.async = true});
    for (int i = 0; i < 2; ++i) {
      std::string text;
      try {
        dt::save(counter.state(), folder.path, 2, {.async = true}).wait();
      } catch (const dt::Error& error) {
        text = error.what_without_backtrace();
      }
      dt::require((text.find("cannot be made") == std::string::npos) == (i == 1), "test", "save {}: '{}'", i, text);
    }
  }));
  CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{2});
}

TEST_CASE("checkpoint: a rank that changes its state alone makes all plan anew", "[checkpoint]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    Counter counter(world);
    auto extra = torch::full({2}, 5.0);
    for (int64_t step = 1; step <= 4; ++step) {
      auto state = counter.state();
      if (world.rank() == 1 && step >= 3) state.add({"extra", extra});
      dt::save(state, folder.path, step);
    }
    auto loaded = torch::zeros({2});
    auto state = counter.state();
    dt::load(state.add({"extra", loaded}), folder.path, 4);
    dt::require(loaded.eq(5).all().item<bool>(), "test", "what one rank has is not there");
  }));
}

TEST_CASE("checkpoint: a manager saves keeps removes and resumes", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    const auto run = folder / "run";
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World& world) {
          Counter counter(world);
          {
            dt::CheckpointManager manager(counter.state(), run,
                                          {.every_steps = 10, .keep_last = 2, .keep_every = 50, .save = {.async = true, .run = "a"}});
            dt::require(!manager.resume(), "test", "something was loaded from nothing");
            for (int64_t step = 1; step <= 123; ++step) {
              counter.set(step);
              dt::require(manager.step(step), "test", "asked to stop");
              if (step == 30) manager.save_if_best(step, 2.5);
              if (step == 60) dt::require(!manager.save_if_best(step, 2.75), "test", "a worse one was kept");
            }
            manager.finish();
          }
          world.barrier();
          dt::require(dt::complete_steps(run) == std::vector<int64_t>{30, 50, 100, 110, 120}, "test", "other steps are there");
          counter.set(0);
          dt::CheckpointManager manager(counter.state(), run);
          dt::require(manager.resume() == 120 && manager.best_step() == 30, "test", "resumed elsewhere");
          counter.check(120);
          std::string text;
          try {
            dt::CheckpointManager other(counter.state(), run, {.save = {.run = "b"}});
          } catch (const dt::Error& error) {
            text = error.what_without_backtrace();
          }
          dt::require(text.find("has the steps of another run, of 'a'; expected 'b'") != std::string::npos, "test", "'{}'", text);
          world.barrier();
          if (world.rank() == 0) std::ofstream(run + "/step-120/index.json", std::ios::app) << "x";
          world.barrier();
          dt::require(manager.resume() == 110, "test", "a damaged step was not passed over");
          counter.check(110);
        },
        transport));
  }
}

TEST_CASE("checkpoint: a stop signal makes a manager save and stop on all ranks", "[checkpoint]") {
  const auto every = GENERATE(0, 1, 2);
  CAPTURE(every);
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    Counter counter(world);
    dt::CheckpointManager manager(counter.state(), folder.path, {.every_steps = every});
    int64_t step = 0;
    do {
      counter.set(++step);
      if (step == 4 && world.rank() == 0) std::raise(SIGTERM);
      dt::require(step < 7, "test", "it goes on");
    } while (manager.step(step));
    dt::require(dt::last_step(folder.path) == step, "test", "step {} is not there", step);
    counter.set(0);
    manager.resume();
    counter.check(step);
  }));
}

TEST_CASE("checkpoint: many saves leave the kept ones and nothing else", "[checkpoint]") {
  const char* wanted = std::getenv("DTENSOR_TEST_CASES");
  const int64_t saves = wanted ? std::atoll(wanted) : 200;
  const Folder folder;
  int64_t files = 0, memory = 0;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    Counter counter(world);
    dt::CheckpointManager manager(counter.state(), folder.path, {.every_steps = 1, .keep_last = 3});
    for (int64_t step = 1; step <= saves; ++step) {
      counter.set(step);
      manager.step(step);
      if (step == saves / 4) manager.finish();
      if (step == saves / 4 && world.rank() == 0) files = open_files(), memory = resident_kib();
    }
    manager.finish();
    world.barrier();
    if (world.rank() != 0) return;
    dt::require(open_files() <= files, "test", "{} files are open, after {}", open_files(), files);
    dt::require(dt::test::kSanitized || resident_kib() < memory + 4096, "test", "{} KiB are in use, after {}", resident_kib(), memory);
  }));
  CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{saves - 2, saves - 1, saves});
  CHECK(folder.files() == 3);
}
