// A step that fails on one rank, where the program catches the error: all ranks hear of it at once, and none goes on with half a step.
#include "tests/support/pipelined_model.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::pipelined;

namespace {

struct Fault {
  std::string where;  // "forward", "backward", "number" (which is thrown), "loss", and on which piece
  size_t piece;
  std::string says;
};

std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

// The pieces of a model, of which one falls over with the third microbatch of the step with `armed`.
std::vector<Piece> faulty(Model& model, const Fault& fault, const bool& armed) {
  auto pieces = model.pieces();
  auto& faulty = pieces[fault.piece];
  faulty.forward = [forward = faulty.forward, fault, &armed, calls = 0](const std::vector<at::Tensor>& x) mutable {
    auto y = forward(x);
    if (!armed || ++calls != 3) return y;
    if (fault.where == "forward") throw std::runtime_error("out of cheese");
    if (fault.where == "number") throw 42;
    if (fault.where == "backward") {
      y[0].register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of cheese"); });
    }
    return y;
  };
  return pieces;
}

// Waits until all ranks, which are threads, came here, outside of their transport: a failure reaches a rank that has not yet left a
// collective, also one that the failed rank has left.
void wait_for_all(std::atomic<int>& here, int64_t ranks) {
  const auto start = std::chrono::steady_clock::now();
  for (++here; here < ranks && std::chrono::steady_clock::now() - start < std::chrono::seconds(20);) std::this_thread::yield();
}

void check_told(const DeviceMesh& mesh, const std::string& schedule, const Fault& fault, std::atomic<int>& here) {
  const Spmd spmd(stage_mesh(mesh));
  torch::manual_seed(1);
  Model model(6);
  bool armed = false;
  const PipelineOptions options{.schedule = schedule, .microbatches = 4};
  auto pipe = pipeline(model, mesh, faulty(model, fault, armed), options);
  const auto [x, y] = batch_of(0);
  const auto loss = [&](const at::Tensor& scores, const at::Tensor& target) {
    if (armed && fault.where == "loss") throw std::runtime_error("out of cheese");
    return loss_of(scores, target);
  };
  const auto step = [&, x = x, y = y] { pipe.step(x, y, loss); };
  step();
  wait_for_all(here, mesh.size());
  armed = true;
  const auto start = std::chrono::steady_clock::now();
  const auto first = thrown_by(step);
  const bool named = first.find("failed at") != first.npos && first.find("in step 1: " + fault.says) != first.npos;
  require(named, "test", "the step threw {}", first);
  const bool waits = fault.where == "forward" && mesh.coordinate(0) == 0 && schedule == "1f1b";
  require(!waits || first.find("[pipeline] step 1 ends at 0") == 0, "test", "a rank that waited threw {}", first);
  armed = false;
  const auto later = thrown_by(step);
  require(later.find("a step failed before") != later.npos && later.find(fault.says) != later.npos, "test", "the next threw {}", later);
  auto again = pipeline(model, mesh, model.pieces(), options);
  const auto other = thrown_by([&, x = x, y = y] { again.step(x, y, loss_of); });
  require(other.find("a step failed before") != other.npos, "test", "another pipeline's threw {}", other);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  require(took.count() < 10, "test", "that took {} s", took.count());
}

}  // namespace

TEST_CASE("pipeline failures: a step that fails on one rank is caught on all", "[pipeline][errors]") {
  const std::vector<Fault> faults{{"forward", 7, "out of cheese"},
                                  {"backward", 0, "out of cheese"},
                                  {"number", 3, "an exception that is not a std::exception"},
                                  {"loss", 7, "out of cheese"}};
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string schedule : {"gpipe", "1f1b", "interleaved", "zb1p", "zbv"}) {
      for (const auto& fault : faults) {
        CAPTURE(transport, schedule, fault.where);
        std::atomic<int> here = 0;
        const auto run = [&](World&) { check_told(init_device_mesh(c10::kCPU, {2}, {"pp"}), schedule, fault, here); };
        CHECK_NOTHROW(on_ranks(2, run, transport));
      }
    }
  }
}

TEST_CASE("pipeline failures: the rank that failed is named on all of three and beside another dimension", "[pipeline][errors]") {
  const Fault fault{"forward", 7, "out of cheese"};
  std::atomic<int> three = 0, four = 0;
  CHECK_NOTHROW(on_ranks(3, [&](World&) { check_told(init_device_mesh(c10::kCPU, {3}, {"pp"}), "1f1b", fault, three); }));
  const auto beside = [&](World&) { check_told(init_device_mesh(c10::kCPU, {2, 2}, {"pp", "dp"}), "1f1b", fault, four); };
  CHECK_NOTHROW(on_ranks(4, beside, "gloo"));
}

TEST_CASE("pipeline failures: ranks that were told different things refuse to train", "[pipeline][errors]") {
  struct Told {
    PipelineOptions first, other;
    std::string says;
  };
  const std::vector<Told> all{
      {{.microbatches = 4}, {.microbatches = 4, .costs = {1, 1, 1, 1, 1, 1, 1, 9}}, "the cut of rank 1 is not that of rank 0"},
      {{.microbatches = 4}, {.schedule = "gpipe", .microbatches = 4}, "the schedule of rank 1 is not that of rank 0"},
      {{.microbatches = 4}, {.microbatches = 2}, "the number of microbatches of rank 1 is not that of rank 0"}};
  for (const std::string transport : {"threads", "gloo"}) {
    for (const auto& told : all) {
      CAPTURE(transport, told.says);
      const auto run = [&](World& world) {
        const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
        const Spmd spmd(stage_mesh(mesh));
        Model model(6);
        const auto [x, y] = batch_of(0);
        auto pipe = pipeline(model, mesh, model.pieces(), world.rank() == 0 ? told.first : told.other);
        const auto text = thrown_by([&, x = x, y = y] { pipe.step(x, y, loss_of); });
        require(text.find(told.says) != text.npos, "test", "it threw {}", text);
      };
      CHECK_NOTHROW(on_ranks(2, run, transport));
    }
  }
  const auto renamed = [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {3}, {"pp"});
    const Spmd spmd(stage_mesh(mesh));
    Model model(6);
    auto pieces = model.pieces();
    if (world.rank() > 0) std::swap(pieces[2], pieces[3]);
    const auto [x, y] = batch_of(0);
    pipeline(model, mesh, pieces, {.microbatches = 4}).step(x, y, loss_of);
  };
  CHECK_THROWS_WITH(on_ranks(3, renamed), says("the list of pieces of ranks 1, 2 is not that of rank 0"));
}

TEST_CASE("pipeline failures: cuts and sizes that cannot be", "[pipeline][errors]") {
  const Alone alone(2);
  const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
  const Spmd spmd(stage_mesh(mesh));
  Model model(6);
  const auto make = [&](const PipelineOptions& options) { return pipeline(model, mesh, model.pieces(), options); };
  CHECK_THROWS_WITH(make({.cut = {8, 0}}), says("the cut [8, 0] has a stage of 0 pieces; expected one piece or more in each"));
  CHECK_THROWS_WITH(make({.cut = {-1, 9}}), says("the cut [-1, 9] has a stage of -1 pieces"));
  CHECK_THROWS_WITH(make({.microbatches = -1}), says("got -1 microbatches; expected a positive number, or 0"));
  auto pipe = make({.microbatches = 2});
  const auto [x, y] = batch_of(0);
  CHECK_THROWS_WITH(pipe.step(x, y.narrow(0, 0, 6), loss_of), says("the input has 10 rows and the target 6; expected as many"));
  CHECK_THROWS_WITH(pipe.evaluate(x.narrow(0, 0, 6), y, loss_of), says("the input has 6 rows and the target 10"));
}

TEST_CASE("pipeline failures: a piece that uses a module which it does not name", "[pipeline][errors]") {
  for (const bool swapped : {true, false}) {
    const auto run = [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {2}, {"pp"});
      const auto own = stage_mesh(mesh);
      const Spmd spmd(own);
      const auto model = [&] {
        const DeferredInit deferred(own);
        return std::make_shared<Model>(6);
      }();
      auto pieces = model->pieces();
      if (swapped) std::swap(pieces[1].modules, pieces[6].modules);
      auto pipe = pipeline(*model, mesh, pieces, {.microbatches = 2});
      if (swapped) pipe.materialize();
      const auto [x, y] = batch_of(0);
      const auto text = thrown_by([&, x = x, y = y] { pipe.step(x, y, loss_of); });
      const std::string says = swapped ? "the piece 'blocks.5' uses a tensor without values" : "the piece 'words' uses a tensor without";
      require(text.find(says) != text.npos && text.find("hint: call pipe.materialize()") != text.npos, "test", "it threw {}", text);
    };
    CHECK_NOTHROW(on_ranks(2, run));
  }
}
