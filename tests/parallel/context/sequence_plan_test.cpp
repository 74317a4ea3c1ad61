// Plans for sequences of very different lengths: how good they are, that they hold, and that a model trains by them with one device's
// numbers.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/observe/comm_debug.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/parallel/context/sequence_plan.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <torch/torch.h>

#include <random>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// The least makespan of all widths and places, each sequence in a microbatch of its own that takes nothing.
double least_makespan(const std::vector<int64_t>& lengths, int ranks, const SequenceCost& cost, size_t i, std::vector<double> seconds) {
  if (i == lengths.size()) return *std::ranges::max_element(seconds);
  double best = std::numeric_limits<double>::infinity();
  for (int degree = 1; degree <= ranks; degree = degree * 2 > ranks && degree < ranks ? ranks : degree * 2) {
    for (int first = 0; first + degree <= ranks; first += degree) {
      auto after = seconds;
      for (int r = first; r < first + degree; ++r) after[r] += cost.seconds(lengths[i], degree);
      best = std::min(best, least_makespan(lengths, ranks, cost, i + 1, std::move(after)));
    }
  }
  return best;
}

// As files are: many short ones, and a few of up to 64 times the mean.
std::vector<int64_t> lognormal(int count, int seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> lengths;
  for (int i = 0; i < count; ++i) {
    double sum = 0;  // of twelve: near enough to a normal number, and the same with any library
    for (int k = 0; k < 12; ++k) sum += static_cast<double>(random() >> 11) * 0x1p-53;
    lengths.push_back(std::clamp<int64_t>(static_cast<int64_t>(std::exp(7 + 1.3 * (sum - 6))), 16, 64 * 2600));
  }
  lengths[0] = 64 * 2600;
  return lengths;
}

constexpr int64_t kWords = 13, kWidth = 16;

struct Small : torch::nn::Module {
  Small() {
    register_module("words", words);
    register_module("block", block);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) {
    const auto x = words(ids);
    return head(x + block(x, nn::rotary_table(ids.size(1), kWidth / 4, {}, x)));
  }
  torch::nn::Embedding words{kWords, kWidth};
  nn::GroupedQueryAttention block{nn::GroupedQueryAttentionOptions{kWidth, /*heads=*/4, /*kv_heads=*/2}};
  torch::nn::Linear head{kWidth, kWords};
};

at::Tensor sum_of_losses(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kWords}), targets.reshape({-1}), {}, at::Reduction::Sum);
}

// The documents of a round, one after the other: ids and targets [1, length].
std::pair<at::Tensor, at::Tensor> batch(const SequenceRound& round, const std::vector<int64_t>& lengths) {
  std::vector<at::Tensor> ids, targets;
  for (const int s : round.sequences) {
    const auto words = torch::arange(lengths[s] + 1, at::kLong).mul(7).add(s).remainder(kWords);
    ids.push_back(words.narrow(0, 0, lengths[s]));
    targets.push_back(words.narrow(0, 1, lengths[s]));
  }
  return {at::cat(ids).view({1, -1}), at::cat(targets).view({1, -1})};
}

}  // namespace

TEST_CASE("sequence plan: a search over few sequences finds the best plan", "[context]") {
  for (int seed = 0; seed < 30; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const int ranks = seed % 3 == 0 ? 2 : seed % 3 == 1 ? 4 : 3;
    std::vector<int64_t> lengths;
    for (int i = 0; i < 4 + seed % 2; ++i) lengths.push_back(1 + static_cast<int64_t>(random() % 2000));
    const SequenceCost cost{1e-3, 0.5, 0.4, 0};
    const auto plan = plan_sequences(lengths, ranks, {.cost = cost});
    REQUIRE(plan.makespan() == Approx(least_makespan(lengths, ranks, cost, 0, std::vector<double>(ranks, 0))).epsilon(1e-12));
  }
}

TEST_CASE("sequence plan: a search is never worse than other plans", "[context]") {
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 2 + seed % 7;
    const int64_t tokens = 10 + static_cast<int64_t>(random() % 200);
    std::vector<int64_t> lengths;
    for (int i = 0; i < 5 + seed % 9; ++i) lengths.push_back(1 + static_cast<int64_t>(random() % (tokens * ranks / 2)));
    CAPTURE(ranks, tokens, lengths);
    const auto makespan_by = [&](const std::string& by) {
      return plan_sequences(lengths, ranks, {.tokens_per_rank = tokens, .by = by}).makespan();
    };
    const auto found = makespan_by("search");
    CHECK(found <= makespan_by("static"));
    CHECK(found <= makespan_by("greedy"));
  }
}

TEST_CASE("sequence plan: lengths as of files on 256 ranks", "[context]") {
  for (const int seed : {1, 2, 3}) {
    const auto lengths = lognormal(1024, seed);
    const auto makespan = [&](const char* by) { return plan_sequences(lengths, 256, {.tokens_per_rank = 8192, .by = by}).makespan(); };
    const double fixed = makespan("static"), greedy = makespan("greedy"), search = makespan("search");
    CAPTURE(seed, fixed, greedy, search);
    CHECK(greedy <= 0.75 * fixed);
    CHECK(search <= 0.7 * fixed);
    CHECK(search < greedy);
  }
}

TEST_CASE("sequence plan: rounds hold each position once and no rank holds more than it may", "[context]") {
  const auto lengths = lognormal(300, 7);
  for (const char* by : {"greedy", "static", "search"}) {
    for (const int ranks : {32, 48}) {
      CAPTURE(by, ranks);
      const auto plan = plan_sequences(lengths, ranks, {.tokens_per_rank = 8192, .by = by});
      std::vector<int> seen(lengths.size(), 0);
      for (const auto& round : plan.rounds()) {
        REQUIRE_NOTHROW(ContextPlan(AttentionMask::causal_documents(), {round.packed}, round.rows));
        for (const int sequence : round.sequences) ++seen[sequence];
        for (const auto& rows : round.rows) REQUIRE(rows.size() <= 8192 + lengths.size());  // zigzag pieces differ by one
      }
      REQUIRE(std::ranges::all_of(seen, [](int count) { return count == 1; }));
    }
  }
}

TEST_CASE("sequence plan: sequences whose activations go to the host take fewer ranks", "[context]") {
  const auto lengths = lognormal(300, 7);
  const SequenceCost cost{.host = 0.5};
  CHECK(cost.share_on_host(1000) == Approx(1000 * cost.quadratic / cost.host));
  CHECK(cost.share_on_host(1'000'000) == SequenceCost::kMostOnHost);
  CHECK(SequenceCost{}.share_on_host(1000) == 0);
  const auto widest = [](const SequencePlan& plan) {
    return std::ranges::max(plan.groups, {}, &SequenceGroup::ranks).ranks;
  };
  const auto without = plan_sequences(lengths, 64, {.tokens_per_rank = 8192, .by = "greedy"});
  const auto with = plan_sequences(lengths, 64, {.tokens_per_rank = 8192, .cost = cost, .by = "greedy"});
  CHECK(widest(without) == 32);
  CHECK(widest(with) == 4);
  for (const auto& round : with.rounds()) {
    for (size_t r = 0; r < round.rows.size(); ++r) {
      const auto rows = static_cast<double>(round.rows[r].size());
      CHECK(rows * (1 - round.on_host[r]) <= 8192 + static_cast<double>(lengths.size()));
      CHECK((round.on_host[r] > 0) == (rows > 0));
    }
  }
  for (const auto& round : without.rounds()) CHECK(std::ranges::all_of(round.on_host, [](double share) { return share == 0; }));
}

TEST_CASE("sequence plan: a model trains by it with one device's gradients and short sequences send nothing", "[context]") {
  const std::vector<int64_t> lengths{60, 9, 4, 7, 12, 1, 15, 3, 8};
  const double tokens = std::accumulate(lengths.begin(), lengths.end(), 0.0);
  torch::manual_seed(3);
  Small alone;
  alone.to(at::kDouble);
  std::vector<at::Tensor> weights;
  for (const auto& p : alone.parameters()) weights.push_back(p.detach().clone());
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [ids, targets] = batch({{static_cast<int>(i)}, PackedSequence(lengths[i]), {}}, lengths);
    (sum_of_losses(alone.forward(ids), targets) / tokens).backward();
  }
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const char* by : {"greedy", "search", "static"}) {
      CAPTURE(transport, by);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
            const Spmd spmd(mesh);
            Small model;
            model.to(at::kDouble);
            {
              const at::NoGradGuard no_grad;
              auto own = model.parameters();
              for (size_t i = 0; i < own.size(); ++i) own[i].copy_(weights[i]);
            }
            const auto rounds = plan_sequences(lengths, 4, {.tokens_per_rank = 20, .by = by}).rounds();
            require(rounds.size() > 1, "test", "one round");
            int64_t sent = 0;
            for (size_t r = 0; r < rounds.size(); ++r) {
              ContextParallel context(mesh, "cp", {.mask = AttentionMask::causal_documents()});
              std::optional<NoSync> no_sync;
              if (r + 1 < rounds.size()) no_sync.emplace();
              const auto [ids, targets] = batch(rounds[r], lengths);
              context.pack(rounds[r].packed, rounds[r].rows);
              const auto on_mesh = [&](const at::Tensor& x) {
                return distribute_tensor(context.order(x), mesh, {context.placement(1, x.size(1))}).tensor();
              };
              const CommDebugMode counted;
              const auto scores = model.forward(on_mesh(ids));
              (sum_of_losses(scores, on_mesh(targets)) / tokens).backward();
              sent += counted.bytes(comm::Collective::send);
              if (by != std::string("static") && r > 0) require(counted.bytes(comm::Collective::send) == 0, "test", "short ones sent");
            }
            require(sent > 0, "test", "the long one sent nothing");
            const NoSpmd plain;
            const auto expected = alone.parameters(), got = model.parameters();
            for (size_t i = 0; i < got.size(); ++i) {
              require(full_tensor(got[i].grad()).allclose(expected[i].grad(), 1e-10, 1e-12), "test", "gradient {} differs", i);
            }
          },
          transport));
    }
  }
}

// A dim of one position is like any other dim of one element, to a view.
TEST_CASE("sequence plan: a round of one position has one device's gradients", "[context]") {
  const std::vector<int64_t> lengths{1};
  for (const std::string transport : {"threads", "shm"}) {
    for (const int ranks : {1, 3, 4}) {
      CAPTURE(transport, ranks);
      REQUIRE_NOTHROW(on_ranks(
          ranks,
          [&](World&) {
            const auto round = plan_sequences(lengths, ranks).rounds().at(0);
            const auto [ids, targets] = batch(round, lengths);
            torch::manual_seed(3);
            Small alone;
            alone.to(at::kDouble);
            sum_of_losses(alone.forward(ids), targets).backward();
            const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"cp"});
            const Spmd spmd(mesh);
            torch::manual_seed(3);
            Small model;
            model.to(at::kDouble);
            ContextParallel context(mesh, "cp", {.mask = AttentionMask::causal_documents()});
            context.pack(round.packed, round.rows);
            const auto on_mesh = [&](const at::Tensor& x) {
              return distribute_tensor(context.order(x), mesh, {context.placement(1, x.size(1))}).tensor();
            };
            sum_of_losses(model.forward(on_mesh(ids)), on_mesh(targets)).backward();
            const NoSpmd plain;
            const auto expected = alone.parameters(), got = model.parameters();
            for (size_t i = 0; i < got.size(); ++i) {
              require(full_tensor(got[i].grad()).allclose(expected[i].grad(), 1e-10, 1e-12), "test", "gradient {} differs", i);
            }
          },
          transport));
    }
  }
}

TEST_CASE("sequence plan: costs that cannot be compared are refused and extreme ones end", "[context][errors]") {
  const std::vector<int64_t> lengths{500, 5, 5, 5, 5, 5, 9, 90};
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  for (const char* by : {"search", "greedy", "static"}) {
    const auto plan = [&](const SequenceCost& cost) { return plan_sequences(lengths, 4, {.cost = cost, .by = by}); };
    for (const double bad : {kNan, kInfinity, -kInfinity, -1.0, -1e-300}) {
      CHECK_THROWS_WITH(plan({.quadratic = bad}), says("got a quadratic cost of"));
      CHECK_THROWS_WITH(plan({.linear = bad}), says("got a linear cost of"));
      CHECK_THROWS_WITH(plan({.message = bad}), says("got a message cost of"));
      CHECK_THROWS_WITH(plan({.fixed = bad}), says("got a fixed cost of"));
      CHECK_THROWS_WITH(plan({.host = bad}), says("got a host cost of"));
    }
    for (const double extreme : {0.0, std::numeric_limits<double>::max(), std::numeric_limits<double>::denorm_min()}) {
      CHECK_NOTHROW(plan({extreme, extreme, extreme, extreme, extreme}).rounds());
    }
    const int64_t most = std::numeric_limits<int64_t>::max();  // no limit
    const auto any = plan_sequences(lengths, 4, {.by = by}), with_most = plan_sequences(lengths, 4, {.tokens_per_rank = most, .by = by});
    CHECK(any.groups.size() == with_most.groups.size());
  }
}

TEST_CASE("sequence plan: what says nothing is refused", "[context][errors]") {
  CHECK_THROWS_WITH(plan_sequences({5000, 3}, 4, {.tokens_per_rank = 1000}), says("a sequence of 5000 positions does not fit on 4 ranks"));
  CHECK_THROWS_WITH(plan_sequences({5000, 3}, 3, {.tokens_per_rank = 1000}), says("a sequence of 5000 positions does not fit on 3 ranks"));
  CHECK(plan_sequences({3000, 3}, 3, {.tokens_per_rank = 1000}).groups[0].ranks == 3);  // all ranks, where these are no power of two
  CHECK_THROWS_WITH(plan_sequences({5, 0}, 4), says("sequence 1 has 0 positions"));
  CHECK_THROWS_WITH(plan_sequences({}, 4), says("got 0 sequences"));
  CHECK_THROWS_WITH(plan_sequences({5}, 0), says("0 ranks"));
  CHECK_THROWS_WITH(plan_sequences({5}, 1, {.by = "luck"}), says("there is no plan by 'luck'"));
}
