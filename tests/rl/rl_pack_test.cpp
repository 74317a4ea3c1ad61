// Sequences packed without padding: a model gives each the scores and gradients that it gives it alone in a padded batch.
#include "tests/support/generate_support.hpp"
#include "tests/support/rl_scored_rows.hpp"

#include <dtensor/rl/balance.hpp>
#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/pack.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const std::vector<int64_t> kPackLengths{5, 12, 0, 1, 9, 12, 3};

at::Tensor pack_ids() { return torch::arange(84, torch::kLong).reshape({7, 12}).mul(7).add(3) % kVocabulary; }

// Of each token before another one of its sequence, weights.
at::Tensor pack_weights() {
  const NoSpmd plain;
  auto mask = torch::zeros({7, 12}, torch::kDouble);
  for (int64_t b = 0; b < 7; ++b) mask.narrow(0, b, 1).narrow(1, 0, std::max<int64_t>(kPackLengths[b] - 1, 0)).fill_(1);
  return rl_numbers({7, 12}, 5) * mask;
}

ScoredRows padded_logp(SmallText& model) {
  const auto ids = pack_ids();
  const auto logp = rl::token_statistics(model.forward(ids), at::cat({ids.slice(1, 1), ids.slice(1, 0, 1)}, 1)).logp;
  return scored_rows(model, logp, pack_weights());
}

ScoredRows packed_logp(SmallText& model, const at::Tensor& ids) {
  const auto packed = rl::pack(ids, kPackLengths);
  const rl::PackedRows region(packed);
  return scored_rows(model, packed.unpack(rl::token_statistics(model.forward(packed.ids), packed.targets).logp), pack_weights());
}

}  // namespace

TEST_CASE("rl pack: tokens are packed one sequence after the other and back", "[rl]") {
  const auto ids = pack_ids();
  const auto packed = rl::pack(ids, kPackLengths);
  REQUIRE(packed.tokens() == 42);
  CHECK(packed.ids.sizes() == at::IntArrayRef({1, 42}));
  CHECK(packed.positions.slice(0, 0, 7).equal(torch::tensor({0, 1, 2, 3, 4, 0, 1}, torch::kLong)));
  CHECK(packed.documents.slice(0, 16, 19).equal(torch::tensor({1, 3, 4}, torch::kLong)));
  CHECK(packed.targets[0][0].item<int64_t>() == ids[0][1].item<int64_t>());
  CHECK(packed.targets[0][4].item<int64_t>() == 0);
  const auto back = packed.unpack(packed.ids, -1);
  for (int64_t b = 0; b < 7; ++b) {
    CHECK(back[b].slice(0, 0, kPackLengths[b]).equal(ids[b].slice(0, 0, kPackLengths[b])));
    CHECK(back[b].slice(0, kPackLengths[b]).eq(-1).all().item<bool>());
  }
  const auto vectors = rl_numbers({7, 12, 2}, 3);
  CHECK(packed.pack(packed.unpack(packed.pack(vectors))).equal(packed.pack(vectors)));
  const auto late = rl::pack(ids, {2, 0, 0, 0, 0, 0, 3}, {10, 0, 0, 0, 0, 0, 4});  // padding on the left, or on both sides
  CHECK(late.ids.equal(at::cat({ids[0].slice(0, 10), ids[6].slice(0, 4, 7)}).unsqueeze(0)));
  CHECK(late.unpack(late.ids)[6].slice(0, 4, 7).equal(ids[6].slice(0, 4, 7)));
}

TEST_CASE("rl pack: a model gives packed sequences what it gives padded ones", "[rl]") {
  SmallText model(3, at::kDouble, 12);  // fewer positions than tokens
  REQUIRE_NOTHROW(require_near(packed_logp(model, pack_ids()), padded_logp(model)));
}

TEST_CASE("rl pack: the same on ranks that have some of the sequences and of the heads", "[rl]") {
  SmallText alone;
  const auto expected = padded_logp(alone);
  for (const std::string transport : {"threads", "gloo"}) {
    for (const auto& [dp, tp] : {std::pair{2, 2}, {4, 1}, {1, 2}}) {
      if (transport != "threads" && tp != 2) continue;
      CAPTURE(transport, dp, tp);
      REQUIRE_NOTHROW(on_ranks(
          dp * tp,
          [&, dp = dp, tp = tp](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
            const auto ids = pack_ids();
            const Spmd spmd(mesh);
            SmallText model;
            parallelize_module(model, mesh, automatic_plan(model));
            require_near(packed_logp(model, distribute_tensor(ids, mesh, {shard(0), replicate()})), expected);
            require_near(packed_logp(model, distribute_tensor(ids, mesh, {replicate(), replicate()})), expected);
          },
          transport));
    }
  }
}

TEST_CASE("rl pack: what does not fit is refused", "[rl]") {
  const auto ids = pack_ids();
  CHECK_NOTHROW(refuses("got 2 lengths and 2 begins of 7 rows", [&] { rl::pack(ids, {1, 2}); }));
  CHECK_NOTHROW(refuses("sequence 1 has 13 tokens from 0 on; expected them within 12", [&] { rl::pack(ids, {1, 13, 0, 0, 0, 0, 0}); }));
  CHECK_NOTHROW(refuses("the batch has no tokens", [&] { rl::pack(ids, std::vector<int64_t>(7)); }));
  CHECK_NOTHROW(refuses("expected [batch, time]", [&] { rl::pack(ids[0], {1}); }));
  SmallText model(3, at::kDouble, 11);
  const auto packed = rl::pack(ids, kPackLengths);
  const rl::PackedRows region(packed);
  CHECK_NOTHROW(refuses("a sequence of 12 is longer than the model's 11 positions", [&] { model.forward(packed.ids); }));
  CHECK_NOTHROW(refuses("the model runs on 12 rows; expected the 42 packed tokens", [&] { model.forward(ids); }));
  CHECK_NOTHROW(refuses("to unpack; expected [1, 42, ...]", [&] { packed.unpack(ids); }));
}
