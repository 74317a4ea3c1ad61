// Stages on meshes of different sizes: some are tensor parallel over more ranks than others.
#include "tests/support/pipelined_model.hpp"

using namespace dtensor;
using namespace dtensor::test;
using namespace dtensor::test::pipelined;

namespace {

// A mesh of one dimension for each list of ranks.
std::vector<DeviceMesh> meshes_of(const std::vector<std::vector<int>>& lists, const std::string& name) {
  std::vector<DeviceMesh> meshes;
  for (const auto& ranks : lists) meshes.emplace_back(c10::kCPU, ranks, std::vector{static_cast<int64_t>(ranks.size())}, std::vector{name});
  return meshes;
}

const std::vector<std::vector<std::vector<int>>> kLists = {{{0}, {1, 2, 3}}, {{2, 3}, {0}, {1}}, {{0, 1}, {3, 2}}};

}  // namespace

TEST_CASE("pipeline meshes: one device bit for bit where nothing is added in another order", "[pipeline]") {
  for (const auto reach : {Reach::none, Reach::tied, Reach::skips}) {
    const auto expected = on_one_device(6, 4, at::kFloat, reach);
    for (const auto& lists : kLists) {
      for (const std::string schedule : {"1f1b", "interleaved", "zb1p"}) {
        CAPTURE(static_cast<int>(reach), lists, schedule);
        REQUIRE_NOTHROW(on_ranks(4, [&](World&) {  // the batch is whole on every rank of a stage
          check_equal(on_a_pipeline(meshes_of(lists, "dp"), 6, at::kFloat, {.schedule = schedule, .microbatches = 4}, reach), expected);
        }));
      }
    }
  }
}

TEST_CASE("pipeline meshes: stages of different tensor parallel widths", "[pipeline]") {
  const auto expected = on_one_device(4, 4, at::kDouble);
  const auto plan = tensor_parallel({{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down", RowwiseParallel()}});
  for (const char* transport : {"threads", "shm", "gloo"}) {
    for (const auto& lists : kLists) {
      CAPTURE(transport, lists);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto cut = [&](Model& model, const DeviceMesh& own) { parallelize_module(model, own, plan); };
            check_close(on_a_pipeline(meshes_of(lists, "tp"), 4, at::kDouble, {.schedule = "1f1b", .microbatches = 4}, Reach::none, cut),
                        expected);
          },
          transport));
    }
  }
}

TEST_CASE("pipeline meshes: all ranks have the whole model's parameters", "[pipeline]") {
  REQUIRE_NOTHROW(on_ranks(3, [](World&) {
    const auto meshes = meshes_of({{0}, {1, 2}}, "tp");
    const Spmd spmd(stage_mesh(meshes));
    torch::manual_seed(1);
    Model model(2);
    const auto pipe = pipeline(model, meshes, model.pieces(), {.microbatches = 2});
    const auto whole = pipe.gather([](const at::Tensor& p) { return p; });
    const auto all = model.parameters();
    require(whole.size() == all.size(), "test", "{} parameters", whole.size());
    for (size_t i = 0; i < all.size(); ++i) require(whole[i].equal(full_tensor(all[i])), "test", "parameter {} differs", i);
  }));
}

TEST_CASE("pipeline meshes: what is refused", "[pipeline][errors]") {
  const auto refused = [](const std::vector<std::vector<int>>& lists, const std::string& message) {
    CHECK_THROWS_WITH(on_ranks(3, [&](World&) { stage_mesh(meshes_of(lists, "tp")); }), says(message));
  };
  refused({}, "got no mesh");
  refused({{0, 1}, {1, 2}}, "rank 1 is in two meshes");
  refused({{0}, {1}}, "this rank is in no mesh");
  CHECK_THROWS_WITH(on_ranks(3,
                             [](World&) {
                               const auto meshes = meshes_of({{0}, {1, 2}}, "tp");
                               const Spmd spmd(stage_mesh(meshes));
                               Model model(2);
                               pipeline(model, meshes, model.pieces(), {.schedule = "no such", .microbatches = 2});
                             }),
                    says("there is no schedule"));
}
