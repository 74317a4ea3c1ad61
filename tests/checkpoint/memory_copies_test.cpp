// Copies of the state in memory: each rank has a folder of its own here, as if it were alone on a host.
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/checkpoint/memory_copies.hpp>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// A sharded tensor, a replicated one and a number, which all are `value`.
struct Trained {
  explicit Trained(dt::World& world)
      : cut(dt::distribute_tensor(torch::zeros({37, 3}), line(world), {dt::shard(0)}).tensor().clone()), same(torch::zeros({5})) {}
  dt::State state() { return {{"cut", cut}, {"same", same}, {"value", value}}; }
  void set(int64_t to) {
    cut.copy_(dt::distribute_tensor(torch::arange(111, torch::kFloat).view({37, 3}) + static_cast<float>(to), dt::DTensor(cut).mesh(),
                                    {dt::shard(0)}).tensor());
    same.fill_(static_cast<double>(to));
    value = to;
  }
  void check(int64_t is) const {
    const auto expected = torch::arange(111, torch::kFloat).view({37, 3}) + static_cast<float>(is);
    dt::require(value == is && dt::full_tensor(cut).equal(expected) && same.eq(is).all().item<bool>(), "test",
                "the state is that of {}; expected {}", value, is);
  }
  at::Tensor cut, same;
  int64_t value = 0;
};

std::string host(const Folder& folder, int rank) { return folder / fmt::format("host{}", rank); }

void lose(const Folder& folder, int rank) { std::filesystem::remove_all(host(folder, rank)); }

// What `ranks` ranks resume, each from its host's folder; -1: nothing.
int64_t resumed(const Folder& folder, int ranks, const char* transport) {
  std::atomic<int64_t> step = -1;
  on_ranks(
      ranks,
      [&](dt::World& world) {
        Trained other(world);
        dt::MemoryCopies copies(other.state(), {.folder = host(folder, world.rank())});
        const auto got = copies.resume();
        dt::require(got == copies.last_step(), "test", "last_step() is another");
        if (got) other.check(*got);
        else dt::require(other.value == 0, "test", "the state was changed");
        if (world.rank() == 0 && got) step = *got;
      },
      transport);
  return step;
}

}  // namespace

TEST_CASE("checkpoint: a lost host's part comes back from its partner", "[checkpoint]") {
  for (const auto* transport : {"threads", "gloo"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](dt::World& world) {
          Trained trained(world);
          dt::MemoryCopies copies(trained.state(), {.folder = host(folder, world.rank())});
          dt::require(!copies.resume(), "test", "something came from nothing");
          for (int64_t step = 1; step <= 3; ++step) trained.set(step), copies.save(step);
        },
        transport));
    CHECK(resumed(folder, 4, transport) == 3);
    lose(folder, 1);
    CHECK(resumed(folder, 4, transport) == 3);
    lose(folder, 3);  // whose part is on the host of rank 0
    CHECK(resumed(folder, 4, transport) == 3);
    CHECK(resumed(folder, 5, transport) == 3);  // another rank, without a copy
    lose(folder, 0);
    CHECK(resumed(folder, 4, transport) == -1);
  }
}

TEST_CASE("checkpoint: a copy that was not completed leaves the one before", "[checkpoint][errors]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    Trained trained(world);
    dt::MemoryCopies copies(trained.state(), {.folder = host(folder, world.rank())});
    trained.set(1);
    copies.save(1);
    trained.set(2);
    // A file where the folder of the step would be: rank 1 cannot write.
    if (world.rank() == 1) std::ofstream(dt::step_folder(host(folder, 1), 2)) << "in the way";
    std::string text;
    try {
      copies.save(2);
    } catch (const dt::Error& error) {
      text = error.what_without_backtrace();
    }
    dt::require(text.find("on rank 1") != std::string::npos, "test", "got '{}'", text);
    dt::require(copies.last_step() == 1, "test", "step 1 is gone");
  }));
  CHECK(resumed(folder, 3, "threads") == 1);
}

TEST_CASE("checkpoint: ranks of one host share a folder of copies", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](dt::World& world) {
          Trained trained(world), other(world);
          dt::MemoryCopies copies(trained.state(), {.folder = folder / "copies"});
          for (int64_t step = 5; step <= 15; step += 5) trained.set(step), copies.save(step);
          trained.set(-1);
          copies.save(15);  // the same step again
          dt::MemoryCopies again(other.state(), {.folder = folder / "copies"});
          dt::require(again.resume() == 15, "test", "another step");
          other.check(-1);
          copies.remove();
          dt::require(!again.last_step(), "test", "it is still there");
        },
        transport));
    CHECK(folder.files() == 0);
  }
}

TEST_CASE("checkpoint: a manager resumes from the newer of a copy and a step", "[checkpoint]") {
  const Folder folder;
  const dt::ManagerOptions options{.every_steps = 10, .copy_every = 3, .copy_folder = folder / "copies"};
  const auto train = [&](int64_t from, int64_t to, bool ends, int64_t resumes) {
    on_ranks(2, [&](dt::World& world) {
      Trained trained(world);
      dt::CheckpointManager manager(trained.state(), folder / "run", options);
      const auto step = manager.resume();
      dt::require(step.value_or(-1) == resumes, "test", "resumed {}", step.value_or(-1));
      if (step) trained.check(*step);
      for (int64_t at = from; at <= to; ++at) trained.set(at), manager.step(at);
      if (ends) manager.finish();
    });
  };
  REQUIRE_NOTHROW(train(1, 8, false, -1));
  REQUIRE_NOTHROW(train(7, 11, false, 6));
  REQUIRE_NOTHROW(train(11, 20, true, 10));
  CHECK(!std::filesystem::exists(folder / "copies"));
  REQUIRE_NOTHROW(train(21, 21, true, 20));
}
