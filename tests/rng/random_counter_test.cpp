// dt::Generator: known answers, distributions, and the same numbers on one device and on every mesh.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include "rng/elementary.hpp"

#include <torch/torch.h>

#include <dtensor/dtensor.hpp>
#include <fmt/ranges.h>

#include <cmath>
#include <future>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct Operator {
  std::string name;
  std::function<void(const at::Tensor&, const at::Generator&)> draw;
  bool integers = false;
  std::function<double(double)> cumulative = {};  // the distribution function
};

double phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

const std::vector<Operator> kOperators = {
    {"uniform_", [](const at::Tensor& t, const at::Generator& g) { t.uniform_(-1, 2, g); }, false, [](double x) { return (x + 1) / 3; }},
    {"normal_", [](const at::Tensor& t, const at::Generator& g) { t.normal_(1, 3, g); }, false, [](double x) { return phi((x - 1) / 3); }},
    {"log_normal_", [](const at::Tensor& t, const at::Generator& g) { t.log_normal_(0.5, 2, g); }, false,
     [](double x) { return phi((std::log(x) - 0.5) / 2); }},
    {"exponential_", [](const at::Tensor& t, const at::Generator& g) { t.exponential_(2, g); }, false,
     [](double x) { return 1 - std::exp(-2 * x); }},
    {"cauchy_", [](const at::Tensor& t, const at::Generator& g) { t.cauchy_(1, 2, g); }, false,
     [](double x) { return 0.5 + std::atan((x - 1) / 2) / M_PI; }},
    {"geometric_", [](const at::Tensor& t, const at::Generator& g) { t.geometric_(0.3, g); }, true,
     [](double x) { return 1 - std::pow(0.7, std::floor(x)); }},
    {"bernoulli_", [](const at::Tensor& t, const at::Generator& g) { t.bernoulli_(0.3, g); }, true,
     [](double x) { return x < 1 ? 0.7 : 1; }},
    {"bernoulli_ of probabilities",
     [](const at::Tensor& t, const at::Generator& g) { t.bernoulli_(torch::full_like(t, 0.3, at::kDouble), g); }, false,
     [](double x) { return x < 1 ? 0.7 : 1; }},
    {"random_", [](const at::Tensor& t, const at::Generator& g) { t.random_(g); }, true},
    {"random_ below", [](const at::Tensor& t, const at::Generator& g) { t.random_(100, g); }, true,
     [](double x) { return (std::floor(x) + 1) / 100; }},
    {"random_ between", [](const at::Tensor& t, const at::Generator& g) { t.random_(-50, 60, g); }, true,
     [](double x) { return (std::floor(x) + 51) / 110; }},
};

// The largest distance between the distribution function and that of n numbers, times sqrt(n): above 2 once in 1500 times
// (Kolmogorov's distribution), and for these seeds always the same.
double distance(const at::Tensor& numbers, const std::function<double(double)>& cumulative) {
  const auto sorted = std::get<0>(numbers.flatten().to(at::kDouble).sort());
  const auto* x = sorted.data_ptr<double>();
  const auto n = sorted.numel();
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + 1 < n && x[i + 1] == x[i]) continue;  // numbers that occur often: looked at once, where they end
    largest = std::max(largest, std::abs(static_cast<double>(i + 1) / static_cast<double>(n) - cumulative(x[i])));
  }
  return largest * std::sqrt(static_cast<double>(n));
}

Tensors draws(const Operator& op, const std::function<at::Tensor()>& make, const at::Generator& generator) {
  Tensors results{make(), make()};
  for (const auto& tensor : results) op.draw(tensor, generator);
  return results;
}

}  // namespace

TEST_CASE("random counter: Philox gives the words that its authors published", "[random]") {
  const auto words = [](uint64_t key, uint64_t low, uint64_t high) {
    const auto block = rng::philox4x32_10(key, low, high);
    return std::vector<uint32_t>(block.word, block.word + 4);
  };
  const auto ones = ~uint64_t{0};
  REQUIRE(words(0, 0, 0) == std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  REQUIRE(words(ones, ones, ones) == std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  REQUIRE(words(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e) ==
          std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("random counter: elementary functions are right to the last bits", "[random]") {
  double log_error = 0, log_error32 = 0, circle_error = 0, circle_error32 = 0, exp_error = 0, exp_error32 = 0;
  const auto grow = [](double& largest, double got, double expected, double scale) {
    largest = std::max(largest, std::abs(got - expected) / scale);
  };
  for (int i = 1; i < 100000; ++i) {
    const double x = i / 100000.0, e = (x - 0.5) * 160;
    const auto f = static_cast<float>(x), ef = static_cast<float>(e);
    grow(log_error, rng::series_log(x), std::log(x), std::abs(std::log(x)));
    grow(log_error32, rng::series_log(f), std::log(static_cast<double>(f)), std::abs(std::log(static_cast<double>(f))));
    grow(exp_error, rng::series_exp(e), std::exp(e), std::exp(e));
    grow(exp_error32, rng::series_exp(ef), std::exp(static_cast<double>(ef)), std::exp(static_cast<double>(ef)));
    const auto word = static_cast<uint64_t>(x * 0x1p64);
    const auto circle = rng::series_sincos<double>(word);
    grow(circle_error, circle.sin, std::sin(2 * M_PI * x), 1);
    grow(circle_error, circle.cos, std::cos(2 * M_PI * x), 1);
    const double turns = static_cast<double>(word >> 32) * 0x1p-32;
    const auto circle32 = rng::series_sincos<float>(static_cast<uint32_t>(word >> 32));
    grow(circle_error32, circle32.sin, std::sin(2 * M_PI * turns), 1);
    grow(circle_error32, circle32.cos, std::cos(2 * M_PI * turns), 1);
  }
  REQUIRE(log_error < 1e-15);
  REQUIRE(circle_error < 2e-15);
  REQUIRE(exp_error < 2e-15);
  REQUIRE(log_error32 < 3e-7);
  REQUIRE(circle_error32 < 2e-7);
  REQUIRE(exp_error32 < 2e-7);
}

TEST_CASE("random counter: every operator has its distribution", "[random]") {
  for (const auto& op : kOperators) {
    if (!op.cumulative) continue;
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      Generator generator(3);
      auto numbers = torch::empty({200001}, dtype);
      op.draw(numbers, generator);
      INFO(op.name << " " << at::toString(dtype));
      REQUIRE(distance(numbers, op.cumulative) < 2);
      // Neighbours, and the same elements of the next draw, are not alike.
      auto next = torch::empty({200001}, dtype);
      op.draw(next, generator);
      REQUIRE(distance(numbers.slice(0, 0, 200001, 2), op.cumulative) < 2);
      CHECK_FALSE(numbers.equal(next));
      if (op.name == "normal_") {
        const auto z = (numbers - 1) / 3, y = (next - 1) / 3;
        REQUIRE((z.slice(0, 1) * z.slice(0, 0, -1)).mean().abs().item<double>() < 0.01);
        REQUIRE((z * y).mean().abs().item<double>() < 0.01);
      }
    }
  }
}

TEST_CASE("random counter: the same numbers on every mesh", "[random]") {
  const std::vector<std::vector<int64_t>> shapes = {{5001}, {7, 3, 5, 41}, {900, 4}, {}, {0, 4}};
  const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kByte};
  struct Mesh {
    std::vector<int64_t> sizes;
    const char* transport;
  };
  for (const auto& [sizes, transport] :
       std::vector<Mesh>{{{1}, "threads"}, {{2}, "threads"}, {{3}, "threads"}, {{8}, "threads"}, {{2, 2}, "threads"}, {{3}, "gloo"}}) {
    CHECK_NOTHROW(on_mesh(
        sizes,
        [&](const DeviceMesh& mesh) {
          set_generator_check(GeneratorCheck::off);
          for (const auto& op : kOperators) {
            for (const auto dtype : dtypes) {
              if (!at::isFloatingType(dtype) && (!op.integers || (dtype == at::kByte && op.name == "random_ between"))) continue;
              for (const auto& shape : shapes) {
                for (const bool transposed : {false, true}) {
                  if (transposed && shape.size() < 2) continue;
                  const auto make = [&] {
                    const auto t = torch::zeros(shape, dtype);
                    return transposed ? t.transpose(0, 1) : t;
                  };
                  const auto expected = draws(op, make, Generator(5));
                  for (int64_t d = -1; d < static_cast<int64_t>(shape.size()); ++d) {
                    const Placements placements(mesh.ndim(), d < 0 ? replicate() : shard(d));
                    const auto got = draws(
                        op, [&] { return distribute_tensor(make(), mesh, placements).tensor(); }, Generator(5));
                    for (size_t i = 0; i < got.size(); ++i) {
                      require(full_tensor(got[i]).equal(expected[i]), "test", "{} of {} {} under {}: draw {} differs", op.name,
                              at::toString(dtype), fmt::join(shape, "x"), str(placements), i);
                    }
                  }
                }
              }
            }
          }
        },
        transport));
  }
}

TEST_CASE("random counter: as the generator of a rank", "[random]") {
  // Parameters, dropout, factories and their *_like.
  const auto program = [](const std::function<at::Tensor(const at::Tensor&)>& place) {
    World::current().generator() = Generator(1);
    torch::manual_seed(9);
    Tensors results;
    auto weight = place(torch::zeros({40, 30}));
    torch::nn::init::kaiming_uniform_(weight);
    results.push_back(weight);
    results.push_back(torch::dropout(weight, 0.4, true));
    results.push_back(torch::randn_like(weight));
    results.push_back(torch::rand_like(weight, torch::kDouble));
    results.push_back(torch::randn_like(weight.sum().detach()));
    results.push_back(torch::randint_like(weight, 100, torch::kLong));
    results.push_back(torch::rand({7}));
    results.push_back(torch::randint(3, 50, {9}));
    results.push_back(place(torch::ones({11, 4})).bernoulli());
    auto grad = place(torch::zeros({8, 6})).requires_grad_();
    results.push_back((grad * 2).normal_());
    return results;
  };
  const auto before = World::current().generator();
  const auto expected = program([](const at::Tensor& t) { return t; });
  World::current().generator() = before;
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {3},
        [&](const DeviceMesh& mesh) {
          for (const auto& placement : {shard(0), replicate()}) {
            const auto got = program([&](const at::Tensor& t) { return distribute_tensor(t, mesh, {placement}).tensor(); });
            for (size_t i = 0; i < got.size(); ++i) {
              require(full_tensor(got[i].detach()).equal(expected[i].detach()), "test", "result {} under {} differs", i, placement.str());
            }
          }
          World::current().generator() = Generator(4);
          torch::nn::Linear plain(70, 50), born{nullptr};
          const auto next = torch::rand({3});
          torch::manual_seed(4);
          {
            DeferredInit deferred(mesh);
            born = torch::nn::Linear(70, 50);
          }
          require(torch::rand({3}).equal(next), "test", "the generator went on otherwise");
          redistribute_(born->weight, {shard(1)});
          materialize(*born);
          require(full_tensor(born->weight.detach()).equal(plain->weight.detach()), "test", "the deferred weight differs");
        },
        transport));
  }
}

TEST_CASE("random counter: normal of tensors is the same plain and whole and cut", "[random]") {
  const auto mean = torch::arange(60, torch::kDouble).reshape({12, 5}), std = (mean + 1) / 7, row = torch::arange(5, torch::kDouble);
  using Place = std::function<at::Tensor(const at::Tensor&)>;
  const auto draws = [&](const Place& place) {
    Generator g(6);
    const auto m = place(mean), s = place(std);
    auto out = place(torch::zeros({12, 5}));
    return Tensors{at::normal(m, 0.5, g), at::normal(2.0, s, g),  at::normal(m, s, g), at::normal(row, s, g),
                   at::normal(m, row, g), at::normal_out(out, m.to(at::kFloat), s.to(at::kFloat), g)};
  };
  const auto expected = draws([](const at::Tensor& t) { return t; });
  REQUIRE(expected[3].sizes() == mean.sizes());
  {
    Generator g(6);
    const auto first = torch::empty_like(mean).normal_(0, 0.5, g).add_(mean);
    const auto second = torch::empty_like(mean).normal_(0, 1, g).mul_(std).add_(2);
    REQUIRE(expected[0].equal(first));
    REQUIRE(expected[1].equal(second));
  }
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const auto& placement : {shard(0), shard(1), replicate()}) {
      Spmd spmd(mesh);
      const auto got = draws([&](const at::Tensor& t) { return distribute_tensor(t, mesh, {placement}).tensor(); });
      for (size_t i = 0; i < got.size(); ++i) {
        require(full_tensor(got[i]).equal(expected[i]), "test", "draw {} of tensors that are {} differs", i, placement.str());
      }
      const auto plain = draws([](const at::Tensor& t) { return t.clone(); });
      for (size_t i = 0; i < plain.size(); ++i) require(full_tensor(plain[i]).equal(expected[i]), "test", "plain draw {} differs", i);
      require(!is_dtensor(plain[0]), "test", "a draw of plain tensors is distributed");
      const auto columns = mean.clone().t(), coins = mean.clone().bernoulli_(torch::full_like(mean, 0.5), Generator(3));
      columns.normal_(0, 1, Generator(3));
      require(!is_dtensor(columns) && !is_dtensor(coins), "test", "a plain tensor became a distributed one");
    }
  }));
  auto leaf = torch::ones({3}, torch::requires_grad()), other = torch::ones({2, 3}, torch::requires_grad());
  at::normal(leaf, other, Generator(2)).sum().backward();
  REQUIRE(leaf.grad().equal(torch::zeros({3})));
  REQUIRE(other.grad().equal(torch::zeros({2, 3})));
  CHECK_THROWS_WITH(at::normal(leaf, -other, Generator(2)), says("std >= 0"));
}

TEST_CASE("random counter: asked before and after a launch", "[random]") {
  const auto program = [] {
    World::current().generator() = Generator(1);
    const auto first = torch::rand({3}), second = torch::rand({3});
    World::current().generator() = Generator(1);
    require(torch::rand({3}).equal(first), "test", "is not asked before");
    at::Generator made;
    on_ranks(1, [&](World&) { made = Generator(1); });
    require(torch::rand({3}).equal(second), "test", "is not asked after");
    require(torch::empty({3}).uniform_(0, 1, made).equal(first), "test", "one that was made in the launch is not asked after it");
  };
  std::async(std::launch::async, program).get();  // in a thread of its own, since the default is the thread's
}

TEST_CASE("random counter: numbers stay in their range", "[random]") {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto x = torch::empty({300000}, dtype).uniform_(0, 1, Generator(3));
    REQUIRE(x.max().item<double>() < 1);
    REQUIRE(x.min().item<double>() >= 0);
    const auto whole = torch::empty({100000}, dtype).random_(-5, c10::optional<int64_t>(), Generator(4));
    REQUIRE(whole.min().item<double>() >= -5);
    REQUIRE(whole.max().item<double>() <= 9007199254740992.0);
  }
  const auto bytes = torch::empty({100000}, torch::kChar).random_(5, c10::optional<int64_t>(), Generator(4));
  REQUIRE(bytes.min().item<int>() == 5);
  REQUIRE(bytes.max().item<int>() == 127);
  CHECK_THROWS_WITH(torch::empty({3}, torch::kChar).random_(1000, Generator(4)), says("out of bounds"));
  CHECK_THROWS_WITH(torch::empty({3}).uniform_(-3e38, 3e38, Generator(4)), says("range"));
  CHECK_THROWS_WITH(torch::empty({3}).bernoulli_(torch::full({3}, 2.0), Generator(4)), says("p_in"));
}

TEST_CASE("random counter: states and copies and bad calls", "[random]") {
  Generator generator(8);
  const auto draw = [](at::Generator g) { return torch::empty({5}).uniform_(0, 1, g); };
  const auto first = draw(generator);
  const auto state = generator.get_state();
  auto copy = generator.clone();
  const auto second = draw(generator);
  REQUIRE_FALSE(first.equal(second));
  REQUIRE(draw(copy).equal(second));
  generator.set_state(state);
  REQUIRE(draw(generator).equal(second));
  REQUIRE(generator.current_seed() == 8);
  generator.set_current_seed(8);
  REQUIRE(draw(generator).equal(first));
  REQUIRE_FALSE(draw(Generator(9)).equal(first));
  generator.set_state(torch::stack({state, state}, 1).select(1, 0));  // in memory with gaps
  REQUIRE(draw(generator).equal(second));

  const auto numbers = torch::empty({4});
  CHECK_THROWS_WITH(numbers.normal_(0, -1, generator), says("std"));
  CHECK_THROWS_WITH(numbers.uniform_(1, 0, generator), says("from <= to"));
  CHECK_THROWS_WITH(numbers.random_(3, 3, generator), says("from"));
  CHECK_THROWS_WITH(torch::empty({4}, torch::kLong).normal_(0, 1, generator), says("dt::Generator does not draw"));
  CHECK_THROWS_WITH(torch::randperm(5, generator), says("hint"));
  CHECK_THROWS_WITH(at::randn({4}, generator, torch::kComplexFloat), says("hint"));
  CHECK_THROWS_WITH(generator.set_state(torch::zeros({3}, torch::kByte)), says("16 bytes"));
  CHECK_THROWS_WITH(generator.set_state(torch::zeros({16})), says("Float") && says("hint"));

  auto leaf = torch::ones({3}, torch::requires_grad());
  auto result = leaf * 1;
  const auto version = result._version();
  result.uniform_(0, 1, generator);
  REQUIRE(result._version() > version);
  result.sum().backward();
  REQUIRE(leaf.grad().equal(torch::zeros({3})));
}
