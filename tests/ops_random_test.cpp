// Random operators draw the bits of one device, whatever the placement, and leave generators as one device would.
#include "op_check.hpp"
#include "stderr_support.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Two draws, so that a generator that has advanced differently shows.
Function twice(std::function<at::Tensor(const at::Tensor&)> draw) {
  return [draw = std::move(draw)](const Tensors& in) {
    const auto first = draw(in[0]);
    return Tensors{first, draw(in[0])};
  };
}

// Draws on one device from a given seed.
Tensors expected(const at::Tensor& x, const Function& draw) {
  torch::manual_seed(11);
  return draw({x.clone()});
}

void check_draws(const std::string& name, const at::Tensor& x, const Function& draw, bool partial_too = false) {
  INFO(name);
  const auto plain = expected(x, draw);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
      std::vector<Placement> choices{replicate()};
      for (int64_t d = 0; d < x.dim(); ++d) choices.push_back(shard(d));
      if (partial_too) choices.push_back(partial());
      for (const auto& first : choices) {
        for (const auto& second : choices) {
          Placements placements{first};
          if (mesh.ndim() > 1) placements.push_back(second);
          Spmd spmd(mesh);
          torch::manual_seed(11);
          const auto got = draw({placed(x, mesh, placements)});
          for (size_t i = 0; i < got.size(); ++i) {
            require(full_tensor(got[i]).equal(plain[i]), "test", "{} {}: draw {} differs", name, str(placements), i);
          }
        }
      }
    }));
  }
}

}  // namespace

TEST_CASE("ops: random draws in place", "[ops][random]") {
  const auto x = whole_numbers({5, 4});
  check_draws("uniform_", x, twice([](auto& t) { return t.clone().uniform_(); }));
  check_draws("normal_", whole_numbers({5, 7}), twice([](auto& t) { return t.clone().normal_(1, 2); }));
  check_draws("bernoulli_", x, twice([](auto& t) { return t.clone().bernoulli_(0.3); }));
  check_draws("random_", x, twice([](auto& t) { return t.clone().random_(100); }));
  check_draws("exponential_", x, twice([](auto& t) { return t.clone().exponential_(); }));
  check_draws("log_normal_", x, twice([](auto& t) { return t.clone().log_normal_(); }));
  check_draws("geometric_", x, twice([](auto& t) { return t.clone().geometric_(0.4); }));
  check_draws("bernoulli_ of probabilities", (x + 8) / 16, twice([](auto& t) { return t.clone().bernoulli_(t); }));
  check_draws("bernoulli of probabilities", (x + 8) / 16, twice([](auto& t) { return t.bernoulli(); }));
}

TEST_CASE("ops: random tensors like another", "[ops][random]") {
  const auto x = whole_numbers({5, 4});
  check_draws("rand_like", x, twice([](auto& t) { return torch::rand_like(t); }), true);
  check_draws("randn_like", whole_numbers({5, 7}), twice([](auto& t) { return torch::randn_like(t, torch::kDouble); }),
              true);
  check_draws("randint_like", x, twice([](auto& t) { return torch::randint_like(t, 3, 9); }), true);
  check_draws("randint_like below", x, twice([](auto& t) { return torch::randint_like(t, 5); }), true);
  check_draws("rand_like of a transpose", x, twice([](auto& t) { return torch::rand_like(t.t()); }));
}

TEST_CASE("ops: dropout", "[ops][random]") {
  const auto x = fractions({5, 4});
  check_draws("dropout", x, twice([](auto& t) { return torch::dropout(t, 0.4, true); }));
  check_draws("native_dropout", x, twice([](auto& t) { return std::get<0>(torch::native_dropout(t, 0.4, true)); }));
  check_draws("native_dropout's mask", x,
              twice([](auto& t) { return std::get<1>(torch::native_dropout(t, 0.4, true)); }));
}

TEST_CASE("ops: rrelu", "[ops][random]") {
  const auto x = fractions({5, 4});
  check_draws("rrelu", x, twice([](auto& t) { return torch::rrelu(t, 0.1, 0.3, true); }));
  const auto gradient = [](const at::Tensor& leaf) {
    torch::manual_seed(3);
    torch::rrelu(leaf, 0.1, 0.3, true).sum().backward();
    return leaf.grad();
  };
  const auto expected = gradient(x.clone().requires_grad_());
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const auto& placement : {replicate(), shard(0), shard(1)}) {
      Spmd spmd(mesh);
      const auto got = gradient(placed(x, mesh, {placement}).requires_grad_());
      require(full_tensor(got).equal(expected), "test", "the gradient under {} differs", placement.str());
    }
  }));
}

TEST_CASE("ops: random operators of tensors of parameters", "[ops][random]") {
  const auto p = torch::linspace(0, 1, 3000).reshape({60, 50});
  check_draws("bernoulli_ of probabilities", p, twice([](auto& t) { return t.clone().bernoulli_(t); }));
  check_draws("bernoulli", p.to(torch::kDouble), twice([](auto& t) { return t.bernoulli(); }));
  check_draws("normal of means", p, twice([](auto& t) { return at::normal(t, 2.0); }));
  check_draws("normal of deviations", p, twice([](auto& t) { return at::normal(3.0, t); }));
  check_draws("normal of both", p, twice([](auto& t) { return at::normal(t, t); }));
  check_draws("randn_like", p, twice([](auto& t) { return torch::randn_like(t.t()); }));
  check_draws("native_dropout", p, twice([](auto& t) { return std::get<0>(torch::native_dropout(t, 0.4, true)); }));
  check_draws("feature_dropout", p.reshape({6, 10, 50}), twice([](auto& t) { return torch::feature_dropout(t, 0.4, true); }));
}

TEST_CASE("plain random draws on ranks are those of one device", "[ops][random]") {
  const auto draw = [] {
    torch::manual_seed(5);
    return Tensors{torch::randn({4, 5}), torch::rand({3}),      torch::randperm(7),
                   torch::randint(10, {6}), torch::dropout(torch::ones({9}), 0.5, true), torch::multinomial(torch::ones({8}), 3),
                   torch::nn::Linear(3, 3)->weight.detach()};
  };
  const auto plain = draw();
  for (const auto* transport : {"threads", "gloo"}) {
    LaunchOptions options;
    options.ranks = 4;
    options.transport = transport;
    CHECK_NOTHROW(launch(options, [&](World&) {
      for (int round = 0; round < 20; ++round) {
        const auto drawn = draw();
        for (size_t i = 0; i < plain.size(); ++i) {
          if (!drawn[i].equal(plain[i])) fail("test", "draw {} differs", i);
        }
      }
    }));
  }
}

TEST_CASE("random: an operator that cannot be drawn in parts says that it is drawn whole", "[ops][random]") {
  const auto counts = torch::full({12}, 10.0);
  const auto said = stderr_of([&] {
    CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
      for (int i = 0; i < 2; ++i) torch::binomial(distribute_tensor(counts, mesh, {shard(0)}), distribute_tensor(counts / 20, mesh, {shard(0)}));
    }));
  });
  INFO(said);
  const auto first = said.find("dtensor: aten::binomial is drawn whole on every rank");
  CHECK(first != std::string::npos);
  CHECK(said.find("aten::binomial", first + 10) == std::string::npos);
}
