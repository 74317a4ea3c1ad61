// Optimizers in files of torch::save: training that goes on, on the same mesh, on another, on one device, and the other way round.
#include "tests/support/saved_training_support.hpp"

namespace dt = dtensor;
using namespace dt::test;

TEST_CASE("files: training goes on from an optimizer's file on any mesh", "[files][optim]") {
  for (const auto& kind : kinds()) {
    for (const auto* transport : {"threads", "shm"}) {
      CAPTURE(kind.name, transport);
      const Folder folder;
      Training whole(kind);
      whole.go(0, kHalf);
      whole.save_plainly(folder / "plain");
      whole.go(kHalf, kSteps);
      const auto expected = whole.wholes();

      Tensors on_grid;
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](dt::World& world) {
            dt::Spmd spmd(grid());
            Training t(kind, grid(), kGrid), again(kind, grid(), kGrid), from_plain(kind, grid(), kGrid);
            t.go(0, kHalf);
            t.save(folder / "grid");
            t.go(kHalf, kSteps);
            const auto whole_on_grid = t.wholes();  // which all ranks gather
            same(whole_on_grid, expected, kind.tolerance, "after saving");
            again.load(folder / "grid");
            again.go(kHalf, kSteps);
            same(again.wholes(), whole_on_grid, 0, "resumed on the same mesh");
            from_plain.load(folder / "plain");
            from_plain.go(kHalf, kSteps);
            same(from_plain.wholes(), expected, kind.tolerance, "resumed on a mesh from one device");
            if (world.rank() == 0) on_grid = whole_on_grid;
          },
          transport));
      REQUIRE_NOTHROW(on_ranks(
          3,
          [&](dt::World& world) {
            dt::Spmd spmd(line(world));
            Training t(kind, line(world), kLine);
            t.load(folder / "grid");
            t.go(kHalf, kSteps);
            same(t.wholes(), on_grid, kind.tolerance, "resumed on another mesh");
          },
          transport));
      Training alone(kind);
      alone.load_plainly(folder / "grid");
      alone.go(kHalf, kSteps);
      CHECK_NOTHROW(same(alone.wholes(), on_grid, kind.tolerance, "resumed on one device"));
    }
  }
}

// torch::save throws for it: "Cannot access storage of UndefinedTensorImpl".
TEST_CASE("files: LBFGS is saved before its history is full", "[files][optim]") {
  const auto kind = lone<torch::optim::LBFGS>("LBFGS", torch::optim::LBFGSOptions(0.1).max_iter(3), 1e-9, 0, 5);  // a history of 100
  const Folder folder;
  Training whole(kind), again(kind);
  whole.go(0, kHalf);
  CHECK_THROWS(whole.save_plainly(folder / "plain"));
  whole.save(folder / "plain");
  whole.go(kHalf, kSteps);
  again.load(folder / "plain");
  again.go(kHalf, kSteps);
  CHECK_NOTHROW(same(again.wholes(), whole.wholes(), 0, "one device"));
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    dt::Spmd spmd(line(world));
    Training t(kind, line(world), {{s1}, {s0}, {s0}, {r}, {s0}}), resumed(kind, line(world), {});
    t.load(folder / "plain");
    t.go(kHalf, kHalf + 1);
    t.save(folder / "mesh");
    t.go(kHalf + 1, kSteps);
    same(t.wholes(), whole.wholes(), kind.tolerance, "from one device");
    resumed.load(folder / "mesh");
    resumed.go(kHalf + 1, kSteps);
    same(resumed.wholes(), t.wholes(), kind.tolerance, "from a mesh");
  }));
}

// libtorch 1.13 restores none, libtorch 2.14 restores them all.
TEST_CASE("files: an optimizer gets the options that libtorch restores", "[files][optim]") {
  namespace o = torch::optim;
  const Folder folder;
  const auto adam = kind<o::Adam>("Adam", o::AdamOptions(0.03)), slower = kind<o::Adam>("slower", o::AdamOptions(0.01));
  const auto rate = [](const Training& t) { return t.optimizer->param_groups()[0].options().get_lr(); };
  Training first(adam), plain(slower);
  first.go(0, 1);
  first.save_plainly(folder / "adam");
  plain.load_plainly(folder / "adam");
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    dt::Spmd spmd(line(world));
    Training t(slower, line(world), {{s1}, {s0}, {s0}, {r}, {s0}});
    t.load(folder / "adam");
    dt::require(rate(t) == rate(plain), "test", "the rate is {}, expected {}", rate(t), rate(plain));
  }));
}

TEST_CASE("files: an optimizer says that a file is of something else", "[files][optim][errors]") {
  namespace o = torch::optim;
  const Folder folder;
  const auto adam = kind<o::Adam>("Adam", o::AdamOptions(0.03));
  Training first(adam);
  first.go(0, 1);
  first.save(folder / "adam");
  const std::vector<Kind> others{kind<o::SGD>("SGD", o::SGDOptions(0.02).momentum(0.9)),
                                 kind<o::RMSprop>("RMSprop", o::RMSpropOptions(0.01)),
                                 lone<o::Adam>("Adam of fewer", o::AdamOptions(0.03), 0, 0, 2)};
  for (const auto& other : others) {
    REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
      dt::Spmd spmd(line(world));
      Training t(other, line(world), {{s1}, {s0}, {s0}, {r}, {s0}});
      try {
        dt::load(*t.optimizer, folder / "adam.optimizer");
      } catch (const dt::Error& error) {
        const std::string text = error.what_without_backtrace();
        for (const auto* part : {"[load] '", "adam.optimizer' is not the state of such an optimizer", "hint: save and load"}) {
          dt::require(text.find(part) != std::string::npos, "test", "{}: no '{}' in '{}'", other.name, part, text);
        }
        return;
      }
      dt::fail("test", "{} took the state of another", other.name);
    }));
  }
}
