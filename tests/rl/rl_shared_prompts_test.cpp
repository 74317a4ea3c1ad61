// Prompts that go through a model once for all their answers: each answer gets the scores and gradients that it gets in a padded batch.
#include "tests/support/generate_support.hpp"
#include "tests/support/rl_scored_rows.hpp"

#include <dtensor/rl/entropy.hpp>
#include <dtensor/rl/shared_prompts.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Prompts of 4, 1 and 7 tokens; one answer is empty, one stands apart from its group.
const rl::RowPrompts kShared{{9, 4, 12, 6, 1, 5, 11, 12}, {4, 4, 4, 1, 1, 1, 7, 4}, {0, 0, 0, 5, 5, 5, 2, 0}};
constexpr int64_t kSharedRows = 8, kSharedTime = 12;

at::Tensor shared_ids() {
  auto ids = torch::arange(kSharedRows * kSharedTime, torch::kLong).reshape({kSharedRows, kSharedTime}).mul(11).add(3) % kVocabulary;
  for (int64_t b = 0; b < kSharedRows; ++b) {
    ids[b].slice(0, 0, kShared.prompt_lengths[b]).copy_(torch::arange(kShared.prompt_lengths[b], torch::kLong) + kShared.numbers[b] + 1);
  }
  return ids;
}

// Of each token before one of an answer, weights.
at::Tensor shared_weights() {
  const NoSpmd plain;
  auto mask = torch::zeros({kSharedRows, kSharedTime - 1}, torch::kDouble);
  for (int64_t b = 0; b < kSharedRows; ++b) mask[b].slice(0, kShared.prompt_lengths[b] - 1, kShared.lengths[b] - 1).fill_(1);
  return mask * rl_numbers({kSharedRows, kSharedTime - 1}, 5);
}

ScoredRows padded_results(SmallText& model) {
  const auto ids = shared_ids();
  return scored_rows(model, rl::token_statistics(model.forward(ids.slice(1, 0, -1)), ids.slice(1, 1)).logp, shared_weights());
}

template <class Model>
ScoredRows shared_results(Model& model, const at::Tensor& ids) {
  const auto shared = rl::share_prompts(ids, kShared);
  const auto logits = shared.scores_of([&](const at::Tensor& x) { return model.forward(x); });
  return scored_rows(model, shared.unpack(rl::token_statistics(logits, shared.targets).logp), shared_weights());
}

// A model whose head scores all rows that it gets.
struct ScoresAll : SmallText {
  at::Tensor forward(const at::Tensor& ids) { return head(norm(body(ids))); }
};

}  // namespace

TEST_CASE("rl shared prompts: a prompt stands once and answers without their last tokens", "[rl]") {
  const auto ids = shared_ids();
  const auto shared = rl::share_prompts(ids, kShared);
  CHECK(shared.packed.lengths == std::vector<int64_t>{8, 0, 7, 5, 0, 3, 10, 7});
  CHECK(shared.packed.tokens() == 40);
  CHECK(shared.packed.positions.slice(0, 6, 11).equal(torch::tensor({6, 7, 4, 5, 6}, torch::kLong)));
  CHECK(shared.targets.size(1) == 5 + 0 + 8 + 5 + 0 + 4 + 4 + 8);
  CHECK(shared.targets[0].slice(0, 0, 6).equal(at::cat({ids[0].slice(0, 4, 9), ids[2].slice(0, 4, 5)})));
  // The token before each: of row 2's first, the last of the prompt, which row 0 has.
  const auto before = shared.scored(shared.packed.ids)[0];
  CHECK(before.slice(0, 4, 7).equal(at::cat({ids[0].slice(0, 7, 8), ids[0].slice(0, 3, 4), ids[2].slice(0, 4, 5)})));
  const auto back = shared.unpack(shared.targets, -1);
  for (int64_t b = 0; b < kSharedRows; ++b) {
    const auto from = kShared.prompt_lengths[b] - 1, to = kShared.lengths[b] - 1;
    CHECK(back[b].slice(0, from, to).equal(ids[b].slice(0, from + 1, to + 1)));
    CHECK(back[b].eq(-1).sum().item<int64_t>() == kSharedTime - 1 - (to - from));
  }
}

TEST_CASE("rl shared prompts: answers get what they get in a padded batch", "[rl]") {
  SmallText model(3, at::kDouble, 12);  // fewer positions than tokens
  const auto expected = padded_results(model);
  CHECK_NOTHROW(require_near(shared_results(model, shared_ids()), expected));
  ScoresAll all;
  SmallText same;
  CHECK_NOTHROW(require_near(shared_results(all, shared_ids()), padded_results(same)));
}

TEST_CASE("rl shared prompts: the same on ranks that have some of the rows and of the heads", "[rl]") {
  SmallText alone;
  const auto expected = padded_results(alone);
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto& [dp, tp] : {std::pair{2, 2}, {3, 1}, {1, 2}}) {
      if (transport != "threads" && tp != 2) continue;
      CAPTURE(transport, dp, tp);
      REQUIRE_NOTHROW(on_ranks(
          dp * tp,
          [&, dp = dp, tp = tp](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
            const auto ids = shared_ids();
            const Spmd spmd(mesh);
            SmallText model;
            ScoresAll all;
            parallelize_module(model, mesh, automatic_plan(model));
            parallelize_module(all, mesh, automatic_plan(all));
            require_near(shared_results(model, distribute_tensor(ids, mesh, {shard(0), replicate()})), expected);
            require_near(shared_results(model, distribute_tensor(ids, mesh, {replicate(), replicate()})), expected);
            require_near(shared_results(all, distribute_tensor(ids, mesh, {shard(0), replicate()})), expected);
          },
          transport));
    }
  }
}

TEST_CASE("rl shared prompts: what does not fit is refused", "[rl]") {
  const auto ids = shared_ids();
  const auto with = [](auto change) {
    auto rows = kShared;
    change(rows);
    return rows;
  };
  const auto refused = [&](const std::string& reason, const rl::RowPrompts& rows) {
    CHECK_NOTHROW(refuses(reason, [&] { rl::share_prompts(ids, rows); }));
  };
  refused("got 8 lengths, 0 of prompts and 0 numbers of 8 rows", {kShared.lengths, {}, {}});
  refused("row 3 has 6 tokens, of which 0 are its prompt's", with([](auto& rows) { rows.prompt_lengths[3] = 0; }));
  refused("row 1 has 4 tokens, of which 5 are its prompt's", with([](auto& rows) { rows.prompt_lengths[1] = 5; }));
  refused("row 6 has 13 tokens", with([](auto& rows) { rows.lengths[6] = 13; }));
  refused("rows 0 and 7 have prompt 0, with 4 and 3 tokens", with([](auto& rows) { rows.prompt_lengths[7] = 3; }));
  refused("rows 0 and 3 have prompt 0, with other tokens", with([](auto& rows) {
            rows.numbers[3] = 0;
            rows.prompt_lengths[3] = 4;
          }));
  refused("the batch has no answers", with([](auto& rows) { rows.lengths = rows.prompt_lengths; }));
  CHECK_NOTHROW(refuses("expected [batch, time]", [&] { rl::share_prompts(ids[0], kShared); }));
  const auto shared = rl::share_prompts(ids, kShared);
  CHECK_NOTHROW(refuses("of the packed tokens", [&] { shared.scored(ids); }));
  CHECK_NOTHROW(refuses("of the answers' tokens", [&] { shared.unpack(ids); }));
  const rl::SharedPromptRows region(shared);
  const auto q = rl_numbers({1, 2, 40, 4}, 1);
  CHECK_NOTHROW(refuses("attention is not causal, and answers share their prompts", [&] { nn::attention(q, q, q); }));
}
