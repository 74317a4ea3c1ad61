// Log-probabilities, entropies and sums of squares of logits: values and gradients, pieces of rows, sharded rows and vocabularies, memory.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/rl/entropy.hpp>

using namespace dtensor;
using namespace dtensor::test;
using rl::StatisticsOptions;

namespace {

constexpr int64_t kClasses = 11;

at::Tensor some_logits() { return rl_numbers({6, kClasses}, 1, -3, 3); }
at::Tensor some_tokens() { return torch::tensor({0, 10, 3, 7, 7, 5}, torch::kLong); }
at::Tensor some_weights(int seed) { return rl_numbers({6}, seed, -1, 2); }

// sum over rows of a weighted sum of the three, by loops.
RlNumber weighted_sum(const RlComplexRows& logits, double temperature) {
  const RlRow a = rl_row(some_weights(2)), b = rl_row(some_weights(3)), c = rl_row(some_weights(4));
  RlNumber sum = 0;
  for (size_t row = 0; row < logits.size(); ++row) {
    RlNumber total = 0, entropy = 0, squares = 0;
    for (const auto& x : logits[row]) total += std::exp(x / temperature);
    for (const auto& x : logits[row]) {
      const auto p = std::exp(x / temperature) / total;
      entropy -= p * std::log(p);
      squares += p * p;
    }
    sum += a[row] * std::log(std::exp(logits[row][some_tokens()[row].item<int64_t>()] / temperature) / total) + b[row] * entropy +
           c[row] * squares;
  }
  return sum;
}

struct Loss {
  at::Tensor sum, gradient;
};

Loss weighted_loss(const at::Tensor& given, const at::Tensor& tokens, const RlShared& on, const StatisticsOptions& options) {
  const auto logits = given.detach().requires_grad_();
  const auto s = rl::token_statistics(logits, tokens, options);
  auto sum = (s.logp * on(some_weights(2))).sum();
  if (options.entropy) sum = sum + (s.entropy * on(some_weights(3))).sum();
  if (options.sum_squares) sum = sum + (s.sum_squares * on(some_weights(4))).sum();
  sum.backward();
  return {sum.detach(), logits.grad()};
}

const RlShared kHere = [](const at::Tensor& x) { return x; };

}  // namespace

TEST_CASE("rl entropy: values and gradients are those of loops", "[rl]") {
  for (const double temperature : {1.0, 0.6}) {
    const auto reference = [&](const RlComplexRows& x) { return weighted_sum(x, temperature); };
    const auto expected = reference(rl_complex(rl_rows(some_logits()))).real();
    const auto gradient = rl_gradient(rl_rows(some_logits()), reference);
    for (const int64_t rows : {0, 1, 2, 4, 100}) {
      const auto got = weighted_loss(some_logits(), some_tokens(), kHere, {temperature, true, true, rows});
      CHECK_NOTHROW(rl_near(rl_item(got.sum), expected, "the sum"));
      CHECK_NOTHROW(rl_near(got.gradient, gradient, "the gradient"));
    }
  }
}

TEST_CASE("rl entropy: known numbers and other shapes", "[rl]") {
  const auto logits = torch::tensor({1.0, 2.0, 3.0, -1.0}, torch::kDouble).reshape({1, 1, 4});
  const auto s = rl::token_statistics(logits, torch::zeros({1, 1}, torch::kLong), {.entropy = true, .sum_squares = true});
  CHECK(s.entropy.sizes() == at::IntArrayRef({1, 1}));
  CHECK_NOTHROW(rl_near(rl_item(s.entropy.sum()), 0.8875434, "the entropy", 1e-7));
  CHECK_NOTHROW(rl_near(rl_item(s.sum_squares.sum()), 0.4984705, "the sum of squares", 1e-7));
  const auto only = rl::token_statistics(logits, torch::zeros({1, 1}, torch::kLong));
  CHECK(!only.entropy.defined());
  CHECK(!only.sum_squares.defined());
  const auto squares = rl::token_statistics(logits, torch::zeros({1, 1}, torch::kLong), {.sum_squares = true});
  CHECK(squares.sum_squares.equal(s.sum_squares));
  CHECK(rl::token_statistics(torch::zeros({0, 4}), torch::zeros({0}, torch::kLong)).logp.sizes() == at::IntArrayRef({0}));
}

TEST_CASE("rl entropy: huge logits and tokens that are impossible", "[rl]") {
  auto logits = some_logits() * 1e4;
  logits.select(1, 2).fill_(-INFINITY);
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto got = weighted_loss(logits.to(dtype), some_tokens(), kHere, {1, true, true, 2});
    CHECK(got.sum.isfinite().item<bool>());
    CHECK(got.gradient.isfinite().all().item<bool>());
    CHECK(got.gradient.select(1, 2).eq(0).all().item<bool>());
  }
  const auto chosen = rl::token_statistics(logits, torch::full({6}, 2, torch::kLong)).logp;
  CHECK(chosen.isinf().all().item<bool>());
}

TEST_CASE("rl entropy: short dtypes are computed in float32", "[rl]") {
  const auto half = some_logits().to(torch::kBFloat16);
  const auto exact = rl::token_statistics(half.to(torch::kDouble), some_tokens(), {.entropy = true});
  const auto got = rl::token_statistics(half, some_tokens(), {.entropy = true});
  CHECK(got.logp.scalar_type() == torch::kFloat);
  CHECK_NOTHROW(rl_near(got.logp.unsqueeze(1), rl_rows(exact.logp.unsqueeze(1)), "logp", 2e-6));
  CHECK_NOTHROW(rl_near(got.entropy.unsqueeze(1), rl_rows(exact.entropy.unsqueeze(1)), "the entropy", 2e-6));
  CHECK(weighted_loss(half, some_tokens(), kHere, {1, true, true}).gradient.scalar_type() == torch::kBFloat16);
}

TEST_CASE("rl entropy: sharded rows say nothing and sharded vocabularies five numbers a row", "[rl]") {
  const StatisticsOptions options{0.8, true, true, 2};
  const auto expected = weighted_loss(some_logits(), some_tokens(), kHere, options);
  const auto gradient = rl_rows(expected.gradient);
  for (const auto& [ranks, transport] :
       std::vector<std::pair<int, std::string>>{{1, "threads"}, {2, "threads"}, {3, "threads"}, {4, "threads"}, {3, "gloo"}}) {
    for (const int64_t dim : {0, 1}) {
      CHECK_NOTHROW(on_ranks(
          ranks,
          [&, dim = dim](World& world) {
            const auto mesh = line(world);
            const Spmd spmd(mesh);
            const auto logits = distribute_tensor(some_logits(), mesh, {shard(dim)}).tensor();
            const auto tokens = distribute_tensor(some_tokens(), mesh, {dim == 0 ? shard(0) : replicate()}).tensor();
            const RlShared on = [&](const at::Tensor& x) {
              return distribute_tensor(x, mesh, {dim == 0 ? shard(0) : replicate()}).tensor();
            };
            const auto got = weighted_loss(logits, tokens, on, options);
            rl_near(rl_item(got.sum), rl_item(expected.sum), "the sum");
            rl_near(got.gradient, gradient, "the gradient");
            require(DTensor(got.gradient).placements() == DTensor(logits).placements(), "test", "the gradient lies elsewhere");
            const CommDebugMode comm;
            rl::token_statistics(logits, tokens, {.entropy = true});
            // Two numbers for the check of tokens; and, of the vocabulary's parts, five for each row.
            const int64_t most = dim == 0 ? 4 * 8 : 4 * 8 + 5 * 6 * 8;
            require(ranks == 1 || comm.bytes() <= most, "test", "{} bytes for 6 rows", comm.bytes());
          },
          transport));
    }
  }
  CHECK_NOTHROW(on_ranks(4, [&](World&) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto logits = distribute_tensor(some_logits(), mesh, {shard(0), shard(1)}).tensor();
    const RlShared on = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0), replicate()}).tensor(); };
    const auto got = weighted_loss(logits, on(some_tokens()), on, options);
    rl_near(rl_item(got.sum), rl_item(expected.sum), "the sum on two dims");
    rl_near(got.gradient, gradient, "the gradient on two dims");
  }));
}

namespace {

#if DTENSOR_TORCH_AT_LEAST(2, 0)
using TotalBytes = size_t;
#else
using TotalBytes = int64_t;
#endif

// The most bytes that this thread had allocated at a time.
struct PeakMemory : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, TotalBytes, TotalBytes, c10::Device) override {
    now += size;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, most = 0;
};

}  // namespace

TEST_CASE("rl entropy: no second copy of the logits is held", "[rl]") {
  const auto logits = torch::rand({512, 1000}, torch::kFloat).requires_grad_();
  const auto tokens = torch::randint(1000, {512}, torch::kLong);
  const int64_t copy = 512 * 1000 * 4;
  const auto peak_of = [](const std::function<void()>& f) {
    auto peak = std::make_shared<PeakMemory>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
    f();
    return peak->most;
  };
  rl::TokenStatistics s;
  const auto forward = peak_of([&] { s = rl::token_statistics(logits, tokens, {.entropy = true, .rows = 16}); });
  CHECK(forward < copy / 4);
  CHECK(forward > 0);
  const auto loss = (s.logp + s.entropy).sum();
  const auto backward = peak_of([&] { loss.backward(); });
  CHECK(backward < copy + copy / 4);
  CHECK(backward >= copy);  // the gradient
  // A slice that does not lie together, as of the scores of the next tokens.
  const auto longer = torch::rand({4, 129, 1000}, torch::kFloat), cut = longer.narrow(1, 0, 128);
  const auto by_slices = peak_of([&] { s = rl::token_statistics(cut, tokens.reshape({4, 128}), {.entropy = true, .rows = 16}); });
  CHECK(by_slices < copy / 4);
  const auto flat = rl::token_statistics(cut.reshape({512, 1000}), tokens, {.entropy = true});
  CHECK(s.logp.reshape({-1}).equal(flat.logp));
  CHECK(s.entropy.reshape({-1}).equal(flat.entropy));
}

TEST_CASE("rl entropy: what cannot work says so with its shapes", "[rl]") {
  const auto logits = some_logits(), tokens = some_tokens();
  CHECK_NOTHROW(refuses("token 11", [&] { rl::token_statistics(logits, tokens + 1); }));
  CHECK_NOTHROW(refuses("token -1", [&] { rl::token_statistics(logits, tokens - 1); }));
  CHECK_NOTHROW(refuses("[5]", [&] { rl::token_statistics(logits, tokens.narrow(0, 0, 5)); }));
  CHECK_NOTHROW(refuses("expected int64", [&] { rl::token_statistics(logits, tokens.to(torch::kInt)); }));
  CHECK_NOTHROW(refuses("temperature of 0", [&] { rl::token_statistics(logits, tokens, {.temperature = 0}); }));
  CHECK_NOTHROW(refuses("floating-point", [&] { rl::token_statistics(tokens, tokens); }));
}
