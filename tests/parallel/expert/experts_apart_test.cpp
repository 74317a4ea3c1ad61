// Experts on ranks of their own, against one device.
#include "tests/support/apart_training.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace dtensor::test::apart {

namespace {

struct TwoLists {
  std::vector<int> attention, experts;
  double tolerance;  // 0 where nothing is added in another order, the norm of gradients included
  int ranks() const { return static_cast<int>(attention.size() + experts.size()); }
};
const std::vector<TwoLists> kTwoLists{{{0}, {1}, 0}, {{0, 1}, {2}, 1e-12}, {{0, 1}, {2, 3}, 1e-12}, {{0}, {1, 2, 3}, 1e-12},
                                         {{3, 1}, {0, 2}, 1e-12}};

void check_on(const Case& c, const TwoLists& lists, const Result& expected, const std::string& transport = "threads",
              const std::string& dispatch = "alltoall") {
  const auto what = fmt::format("{} + {} over {}, {}", fmt::join(lists.attention, ","), fmt::join(lists.experts, ","), transport, dispatch);
  CAPTURE(what, c.microbatches);
  const double tolerance = dispatch == "alltoall" ? lists.tolerance : 1e-12;
  REQUIRE_NOTHROW(on_ranks(
      lists.ranks(),
      [&](World&) { check(on_two_meshes(c, meshes_of(lists.attention, lists.experts), dispatch), expected, tolerance); }, transport));
}

// All that a layer can have besides.
Case rich_case() {
  Case c;
  auto& o = c.options;
  o.latent = 4, o.shared_hidden = 5, o.capacity_factor = 1.1, o.z_loss = 0.01, o.bias_rate = 0.01;
  c.dropout = 0.25;
  return c;
}

}  // namespace

TEST_CASE("experts apart: training is that of one device", "[experts][pipeline]") {
  const Case c;
  const auto expected = on_one_device(c);
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto& lists : kTwoLists) check_on(c, lists, expected, transport);
  }
}

TEST_CASE("experts apart: shared and latent ones and capacities and losses and biases and dropout", "[experts][pipeline]") {
  const auto c = rich_case();
  const auto expected = on_one_device(c);
  for (const auto& lists : kTwoLists) check_on(c, lists, expected);
}

TEST_CASE("experts apart: one device bit for bit where attention has one rank", "[experts][pipeline]") {
  for (const int microbatches : {1, 2, 4, 6}) {  // of one length, and of two
    auto c = microbatches == 4 ? rich_case() : Case();
    c.microbatches = microbatches;
    c.dtype = at::kFloat;
    c.dropout = 0.25;
    c.clips = false;
    const auto expected = on_one_device(c);
    for (const std::string transport : {"threads", "shm"}) check_on(c, {{0}, {1, 2, 3}, 0}, expected, transport);
  }
}

TEST_CASE("experts apart: every way to dispatch among the ranks of experts", "[experts][pipeline]") {
  const Case c;
  const auto expected = on_one_device(c);
  for (const char* dispatch : {"deduplicated", "allgather"}) {
    check_on(c, kTwoLists[2], expected, "threads", dispatch);
    check_on(c, kTwoLists[3], expected, "threads", dispatch);
  }
}

TEST_CASE("experts apart: what is refused", "[experts][pipeline][errors]") {
  const auto refused = [](const std::vector<int>& attention, const std::vector<int>& experts, const DisaggregateOptions& options,
                          const std::string& message) {
    CAPTURE(message);
    CHECK_THROWS_WITH(on_ranks(3,
                               [&](World&) {
                                 const auto meshes = meshes_of(attention, experts);
                                 const Spmd spmd(stage_mesh({meshes.attention, meshes.experts}));
                                 Model model(Case().options, 0);
                                 auto pipe = disaggregate(model, meshes, model.pieces_apart(), options);
                                 const auto [ids, targets] = batch_of(0);
                                 pipe.step(ids, targets, loss_of);
                               }),
                      says(message));
  };
  refused({0, 1}, {1, 2}, {}, "rank 1 is in two meshes");
  refused({0}, {1}, {}, "is in no mesh");
  refused({0, 1}, {2}, {.experts = "*.expert"}, "'*.expert' matches none of 8 pieces; hint: the closest are 'blocks.0.moe.experts'");
  refused({0, 1}, {2}, {.experts = "words|*.experts"}, "matches the first piece, 'words'; expected attention's");
  refused({0, 1}, {2}, {.experts = "head|*.experts"}, "matches the last piece, 'head'; expected attention's");
  refused({0, 1}, {2}, {.microbatches = 0}, "got 0 microbatches; expected one or more");
  refused({0, 1}, {2}, {.microbatches = 7}, "the input has 6 rows; expected at least one for each of 7 microbatches");
  auto hashed = Case().options;
  hashed.router.choose_by = "hash";
  const nn::MoE layer(hashed);
  CHECK_THROWS_WITH(nn::expert_pieces("moe", layer, {}), says("moe: experts that are chosen by hash need the tokens' numbers"));
}

TEST_CASE("experts apart: a fault on a rank of experts ends the step on all", "[experts][pipeline][errors]") {
  CHECK_THROWS_WITH(on_ranks(3,
                             [](World& world) {
                               const auto meshes = meshes_of({0}, {1, 2});
                               const Spmd spmd(stage_mesh({meshes.attention, meshes.experts}));
                               Model model(Case().options, 0);
                               auto pieces = model.pieces_apart();
                               const auto compute = pieces[2].forward;
                               pieces[2].forward = [&, compute](const std::vector<at::Tensor>& x) {
                                 require(world.rank() != 2, "test", "out of order");
                                 return compute(x);
                               };
                               auto pipe = disaggregate(model, meshes, pieces, {.microbatches = 2});
                               const auto [ids, targets] = batch_of(0);
                               pipe.step(ids, targets, loss_of);
                             }),
                    says("out of order"));
}

}  // namespace dtensor::test::apart
