// Random operators draw the bits of one device, whatever the placement, and leave generators as one device would.
#include "tests/support/op_check.hpp"
#include "tests/support/stderr_support.hpp"

#include <dtensor/base/compat.hpp>

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
#if DTENSOR_TORCH_AT_LEAST(2, 14)
  check_draws("randint_like below a tensor", x, twice([](auto& t) { return torch::randint_like(t, at::scalar_tensor(5, at::kLong)); }),
              true);
#endif
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
      for (int i = 0; i < 2; ++i)
        torch::binomial(distribute_tensor(counts, mesh, {shard(0)}), distribute_tensor(counts / 20, mesh, {shard(0)}));
    }));
  });
  INFO(said);
  const auto first = said.find("dtensor: aten::binomial is drawn whole on every rank");
  CHECK(first != std::string::npos);
  CHECK(said.find("aten::binomial", first + 10) == std::string::npos);
}

namespace {

// How a tensor lies in memory: a view of a row-major one, plain or distributed.
using Order = std::function<at::Tensor(const at::Tensor&)>;
const std::vector<std::pair<std::string, Order>> kOrders{
    {"row-major", [](auto& t) { return t; }},
    {"transposed", [](auto& t) { return t.transpose(0, 2); }},
    {"permuted", [](auto& t) { return t.permute({1, 2, 0}); }},
    {"a slice", [](auto& t) { return t.slice(2, 0, t.size(2), 2); }},
    {"a transposed slice", [](auto& t) { return t.slice(1, 0, t.size(1) - 1).transpose(1, 2); }},
    {"expanded", [](auto& t) { return t.slice(1, 0, 1).expand({t.size(0), 7, t.size(2)}); }},
    {"expanded in front", [](auto& t) { return t.select(0, 1).expand({6, t.size(1), t.size(2)}); }}};

// What is drawn of probabilities: into the tensor itself, or anew.
struct Drawing {
  std::string name;
  std::function<Tensors(const at::Tensor&)> draw;
  bool in_place = false;
};

Drawing into(std::string name, std::function<void(const at::Tensor&)> draw) {
  return {std::move(name), [draw = std::move(draw)](auto& t) { return draw(t), Tensors{t}; }, true};
}

Drawing anew(std::string name, std::function<at::Tensor(const at::Tensor&)> draw) {
  return {std::move(name), [draw = std::move(draw)](auto& t) { return Tensors{draw(t)}; }};
}

const c10::optional<at::Generator> kRanks;  // none is given: the rank's own

const std::vector<Drawing> kDrawings{
    into("uniform_", [](auto& t) { t.uniform_(-1, 2); }),
    into("normal_", [](auto& t) { t.normal_(1, 2); }),
    into("random_", [](auto& t) { t.random_(100); }),
    into("random_ between", [](auto& t) { t.random_(-5, 60); }),
    into("exponential_", [](auto& t) { t.exponential_(); }),
    into("geometric_", [](auto& t) { t.geometric_(0.4); }),
    into("cauchy_", [](auto& t) { t.cauchy_(); }),
    into("log_normal_", [](auto& t) { t.log_normal_(); }),
    into("bernoulli_", [](auto& t) { t.bernoulli_(0.3); }),
    into("bernoulli_ of itself", [](auto& t) { t.bernoulli_(t.clone()); }),
    into("bernoulli_ of the last dim", [](auto& t) { t.bernoulli_(t.select(0, 0).select(0, 0).clone()); }),
    into("bernoulli_ of a matrix", [](auto& t) { t.bernoulli_(t.select(0, 1).clone()); }),
    into("bernoulli_ of a middle dim", [](auto& t) { t.bernoulli_(t.slice(0, 0, 1).slice(2, 1, 2).clone()); }),
    into("bernoulli_ of an expanded number",
         [](auto& t) { t.bernoulli_(t.select(0, 0).select(0, 0).select(0, 0).clone().expand(t.sizes())); }),
    into("bernoulli_ of a transpose", [](auto& t) { t.bernoulli_(t.transpose(0, 1).contiguous().transpose(0, 1)); }),
    into("bernoulli out",
         [](auto& t) {
           at::Tensor out = t;
           at::bernoulli_out(out, t.clone(), kRanks);
         }),
    into("normal out",
         [](auto& t) {
           at::Tensor out = t;
           at::normal_out(out, t.clone(), 2.0, kRanks);
         }),
    into("normal of deviations out",
         [](auto& t) {
           at::Tensor out = t;
           at::normal_out(out, 0.5, t.clone());
         }),
    into("normal of both out",
         [](auto& t) {
           at::Tensor out = t;
           at::normal_out(out, t.clone(), t.select(0, 0).clone());
         }),
    into("rand out",
         [](auto& t) {
           at::Tensor out = t;
           at::rand_out(out, t.sizes());
         }),
    into("randn out",
         [](auto& t) {
           at::Tensor out = t;
           at::randn_out(out, t.sizes());
         }),
    into("randint out",
         [](auto& t) {
           at::Tensor out = t;
           at::randint_out(out, 3, 90, t.sizes());
         }),
    anew("bernoulli", [](auto& t) { return t.bernoulli(); }),
    anew("bernoulli of a number", [](auto& t) { return t.bernoulli(0.4); }),
    anew("rand_like", [](auto& t) { return torch::rand_like(t); }),
    anew("randn_like", [](auto& t) { return torch::randn_like(t); }),
    anew("randint_like", [](auto& t) { return torch::randint_like(t, 3, 50); }),
    anew("normal of means", [](auto& t) { return at::normal(t, 2.0); }),
    anew("normal of deviations", [](auto& t) { return at::normal(3.0, t); }),
    anew("normal of both", [](auto& t) { return at::normal(t, t * 2); }),
    anew("normal of both, broadcast", [](auto& t) { return at::normal(t, t.select(0, 0)); }),
    anew("poisson", [](auto& t) { return torch::poisson(t * 4); }),
    anew("binomial", [](auto& t) { return torch::binomial(torch::ones_like(t) * 9, t); }),
    anew("_standard_gamma", [](auto& t) { return at::_standard_gamma(t + 0.5); }),
    anew("_sample_dirichlet", [](auto& t) { return at::_sample_dirichlet(t + 0.5); }),
    anew("multinomial", [](auto& t) { return torch::multinomial(t.select(1, 1) + 0.25, 2); }),
    anew("multinomial with replacement", [](auto& t) { return torch::multinomial(t.select(0, 1) + 0.25, 5, true); }),
    anew("dropout", [](auto& t) { return torch::dropout(t, 0.4, true); }),
    {"native_dropout",
     [](auto& t) {
       auto [output, mask] = torch::native_dropout(t, 0.4, true);
       return Tensors{output, mask};
     }},
    anew("alpha_dropout", [](auto& t) { return torch::alpha_dropout(t, 0.4, true); }),
    anew("feature_dropout", [](auto& t) { return torch::feature_dropout(t, 0.4, true); }),
    anew("feature_alpha_dropout", [](auto& t) { return torch::feature_alpha_dropout(t, 0.4, true); }),
    anew("rrelu", [](auto& t) { return torch::rrelu(t - 0.5, 0.1, 0.3, true); }),
    {"rrelu_with_noise", [](auto& t) {
       auto noise = torch::zeros_like(t, at::MemoryFormat::Contiguous);
       const auto output = at::rrelu_with_noise(t - 0.5, noise, 0.1, 0.3, true);
       return Tensors{output, noise};
     }}};

// And numbers that are drawn next.
Tensors drawn(const Drawing& drawing, const at::Tensor& t) {
  torch::manual_seed(13);
  auto results = drawing.draw(t);
  for (const auto& next : {torch::rand({2}), torch::randn({3})}) results.push_back(next);
  return results;
}

void check_memory(const Drawing& drawing, const Order& view, const at::Tensor& x, const DeviceMesh& mesh, const Placements& placements,
                  const std::string& what) {
  const auto plain = drawn(drawing, view(x.clone()));
  Spmd spmd(mesh);
  const auto got = drawn(drawing, view(placed(x, mesh, placements)));
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto whole = full_tensor(got[i]);
    require(whole.equal(plain[i]), "test", "{} under {}: result {} differs", what, str(placements), i);
    const bool strides = plain[i].numel() == 0 || got[i].strides() == plain[i].strides();
    require(strides, "test", "{} under {}: result {} reports other strides", what, str(placements), i);
  }
}

}  // namespace

TEST_CASE("random: probabilities of a dim of one row that one rank has", "[ops][random]") {
  const auto x = whole_numbers({6, 5, 1}), p = (whole_numbers({6, 5, 1}) + 8) / 16;
  const auto draw = [](const at::Tensor& into, const at::Tensor& probabilities) {
    torch::manual_seed(7);
    into.bernoulli_(probabilities);
    return std::pair{full_tensor(into), torch::rand({2})};
  };
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {2, 2},
        [&](const DeviceMesh& mesh) {
          const auto [expected, next] = draw(x.clone(), p);
          const Spmd spmd(mesh);
          for (const auto& second : {flat(17, 3), shard(0), shard(2)}) {
            const Placements placements{shard(2), second};
            const auto [got, after] = draw(placed(x, mesh, placements), placed(p, mesh, {replicate(), replicate()}));
            require(got.equal(expected) && full_tensor(after).equal(next), "test", "under {}", str(placements));
          }
        },
        transport));
  }
}

TEST_CASE("random: in the order of one device's memory however a tensor lies", "[ops][random]") {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 4, 6}, {14, 9, 16}}) {
    const auto x = (whole_numbers(sizes) + 8) / 16;
    for (const auto& meshes : std::vector<std::vector<int64_t>>{{2}, {3}, {4}, {2, 2}}) {
      for (const auto* transport : {"threads", "gloo"}) {
        if (transport[0] == 'g' && (meshes[0] != 3 || sizes[0] == 14)) continue;
        CHECK_NOTHROW(on_mesh(
            meshes,
            [&](const DeviceMesh& mesh) {
              std::vector<Placements> layouts{{replicate()},
                                              {shard(0)},
                                              {shard(1)},
                                              {shard(2)},
                                              {partial()},
                                              {strided_shard(2, 2)},
                                              {flat(x.numel() / mesh.size() + 3, 2)}};
              if (mesh.ndim() > 1)
                layouts = {{shard(0), shard(1)}, {shard(2), shard(2)}, {shard(1), partial()}, {flat(x.numel() / 2 + 3, 2), shard(0)}};
              for (const auto& drawing : kDrawings) {
                for (const auto& [name, view] : kOrders) {
                  if (drawing.in_place && name.find("expanded") == 0) continue;  // which libtorch refuses
                  for (const auto& placements : layouts)
                    check_memory(drawing, view, x, mesh, placements, drawing.name + " of what is " + name);
                }
              }
            },
            transport));
      }
    }
  }
}
