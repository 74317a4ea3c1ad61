// Optimizers in files of torch::save: training that goes on, on the same mesh, on another, on one device, and the other way round.
#include "tests/support/torch_files_support.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>

#include <range/v3/view/zip.hpp>

#include <optional>

namespace dt = dtensor;
using namespace dt::test;

namespace {

using Tensors = std::vector<at::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Layouts = std::vector<dt::Placements>;

const std::vector<std::vector<int64_t>> kSizes{{6, 10}, {9}, {3, 2, 4}, {5}, {7, 2}};
constexpr size_t kUnused = 4;  // gets no gradient, so that optimizers remember nothing of it
constexpr int kHalf = 3, kSteps = 6;

// An optimizer of two groups, the second with another rate.
struct Kind {
  std::string name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)> make;
  double tolerance = 0;  // on another mesh than one device's
};

template <class Optimizer, class Options>
Kind kind(const std::string& name, const Options& options, double tolerance = 0) {
  return {name,
          [options](const Tensors& all) {
            Groups groups;
            groups.emplace_back(Tensors(all.begin(), all.begin() + 2));
            auto other = std::make_unique<Options>(options);
            other->set_lr(0.5 * other->get_lr());
            groups.emplace_back(Tensors(all.begin() + 2, all.end()), std::move(other));
            return std::make_unique<Optimizer>(std::move(groups), options);
          },
          tolerance};
}

// One group.
template <class Optimizer, class Options>
Kind lone(const std::string& name, const Options& options, double tolerance, size_t first, size_t count) {
  return {
      name,
      [=](const Tensors& all) { return std::make_unique<Optimizer>(Tensors(all.begin() + first, all.begin() + first + count), options); },
      tolerance};
}

std::vector<Kind> kinds() {
  namespace o = torch::optim;
  return {kind<o::SGD>("SGD", o::SGDOptions(0.02)),
          kind<o::SGD>("SGD with momentum", o::SGDOptions(0.02).momentum(0.9).nesterov(true)),
          kind<o::Adam>("Adam", o::AdamOptions(0.03).weight_decay(0.1)),
          kind<o::AdamW>("AdamW with amsgrad", o::AdamWOptions(0.03).amsgrad(true)),
          kind<o::Adagrad>("Adagrad", o::AdagradOptions(0.1).lr_decay(0.1)),
          kind<o::RMSprop>("RMSprop", o::RMSpropOptions(0.01).momentum(0.9).centered(true)),
          lone<o::LBFGS>("LBFGS", o::LBFGSOptions(0.1).max_iter(3).history_size(4), 1e-9, 0, 5),
          lone<o::LBFGS>("LBFGS with a line search", o::LBFGSOptions(0.5).max_iter(3).history_size(2).line_search_fn("strong_wolfe"), 1e-9,
                         0, 5),
          kind<dt::optim::Lamb>("Lamb", dt::optim::LambOptions(0.05), 1e-12),
          kind<dt::optim::Adam8bit>("Adam8bit", dt::optim::Adam8bitOptions(0.01).min_size(8).block_size(4)),
          lone<dt::optim::Muon>("Muon", dt::optim::MuonOptions(0.1), 0, 0, 1)};
}

at::Tensor wave(size_t i, double pace) {
  return torch::arange(c10::multiply_integers(kSizes[i]), torch::kDouble).mul(pace + 0.1 * static_cast<double>(i)).sin().reshape(kSizes[i]);
}

at::Tensor laid_out(const at::Tensor& plain, const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts, size_t i) {
  if (!mesh) return plain.clone();
  const auto placements = i < layouts.size() ? layouts[i] : dt::Placements(mesh->ndim(), dt::replicate());
  return dt::distribute_tensor(plain, *mesh, placements).tensor().detach().clone();
}

// Parameters and what they shall be near to, on a mesh or plain; the gradient of an element hangs on nothing else.
struct Training {
  Training(const Kind& kind, std::optional<dt::DeviceMesh> on = {}, const Layouts& layouts = {}) : mesh(std::move(on)) {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      parameters.push_back(laid_out(wave(i, 0.37), mesh, layouts, i).requires_grad_());
      targets.push_back(laid_out(wave(i, 0.91), mesh, layouts, i));
    }
    optimizer = kind.make(parameters);
  }
  at::Tensor loss(int step) const {
    at::Tensor sum;
    for (size_t i = 0; i < kUnused; ++i) {
      const auto part = (parameters[i] - targets[i]).square().mul(1.0 + 0.3 * (step % 2)).sum() + parameters[i].sin().sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  void go(int from, int to) const {
    for (int step = from; step < to; ++step) {
      optimizer->step([&] {
        optimizer->zero_grad();
        const auto value = loss(step);
        value.backward();
        return value;
      });
    }
  }
  Tensors wholes() const {
    Tensors result;
    for (const auto& p : parameters) result.push_back(dt::full_tensor(p.detach()).clone());
    return result;
  }
  void save(const std::string& prefix) const {
    dt::save(parameters, prefix + ".parameters");
    dt::save(*optimizer, prefix + ".optimizer");
  }
  void load(const std::string& prefix) const {
    Tensors values;
    dt::load(values, prefix + ".parameters");
    torch::NoGradGuard no_grad;
    for (const auto& [parameter, value] : ranges::views::zip(parameters, values)) parameter.copy_(value);
    dt::load(*optimizer, prefix + ".optimizer");
  }
  // As a program of one device does it.
  void save_plainly(const std::string& prefix) const {
    torch::save(parameters, prefix + ".parameters");
    torch::save(*optimizer, prefix + ".optimizer");
  }
  void load_plainly(const std::string& prefix) const {
    Tensors values;
    torch::load(values, prefix + ".parameters");
    torch::NoGradGuard no_grad;
    for (const auto& [parameter, value] : ranges::views::zip(parameters, values)) parameter.copy_(value);
    torch::load(*optimizer, prefix + ".optimizer");
  }
  std::optional<dt::DeviceMesh> mesh;
  Tensors parameters, targets;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void same(const Tensors& got, const Tensors& expected, double tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool close = tolerance == 0 ? got[i].equal(expected[i]) : torch::allclose(got[i], expected[i], tolerance, tolerance);
    dt::require(close, "test", "{}: parameter {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

const dt::Placement r = dt::replicate(), s0 = dt::shard(0), s1 = dt::shard(1);
const Layouts kGrid{{s0, s1}, {r, s0}, {s1, dt::strided_shard(2, 2)}, {s0, s0}, {r, s1}};
const Layouts kLine{{s1}, {dt::ragged_shard(0, {1, 0, 2})}, {s0}, {r}, {dt::flat(5)}};

dt::DeviceMesh grid() { return dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}); }

}  // namespace

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
