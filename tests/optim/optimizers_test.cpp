// Optimizers: against plain references, and on meshes as on one device.
#include "tests/support/optimizer_support.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/fused_adamw.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>

#include <dtensor/optim/whole_by_owner.hpp>

namespace dt = dtensor;
namespace optim = dtensor::optim;
using namespace dt::test;
using namespace dt::test::optimizers;

TEST_CASE("optim: LAMB and LANS follow their formulas", "[optim]") {
  const double lr = 0.1, b1 = 0.8, b2 = 0.95, eps = 1e-6, decay = 0.05, most = 2;
  const auto options = optim::LambOptions(lr).betas({b1, b2}).eps(eps).weight_decay(decay).max_norm(most);
  const auto lamb = reference(kMixed, [&](at::Tensor& x, const at::Tensor& g, Tensors& state, int t) {
    state[0] = b1 * state[0] + (1 - b1) * g;
    const auto root = adam_root(state[1], g, b2, eps, t);
    const auto u = state[0] / (1 - std::pow(b1, t)) / root + decay * x;
    x = x - lr * ratio(length(x), length(u), most) * u;
  });
  REQUIRE_NOTHROW(same(train(kMixed, maker<optim::Lamb>(options)), lamb, 1e-12, "LAMB"));
  const auto lans = reference(kMixed, [&](at::Tensor& x, const at::Tensor& gradient, Tensors& state, int t) {
    const auto g = gradient / length(gradient);
    state[0] = b1 * state[0] + (1 - b1) * g;
    const auto root = adam_root(state[1], g, b2, eps, t);
    const auto r = state[0] / (1 - std::pow(b1, t)) / root + decay * x, c = g / root + decay * x;
    x = x - lr * (b1 * ratio(length(x), length(r), most) * r + (1 - b1) * ratio(length(x), length(c), most) * c);
  });
  REQUIRE_NOTHROW(same(train(kMixed, maker<optim::Lans>(options)), lans, 1e-12, "LANS"));
}

TEST_CASE("optim: LAMB and LANS on meshes", "[optim]") {
  const auto options = optim::LambOptions(0.1).weight_decay(0.05);
  check_on_meshes(kMixed, maker<optim::Lamb>(options), 1e-12);
  check_on_meshes(kMixed, maker<optim::Lans>(options), 1e-12);
  check_saved(kMixed, maker<optim::Lamb>(options), 1e-12);
  check_saved(kMixed, maker<optim::Lans>(options), 1e-12);
}

TEST_CASE("optim: FusedAdamW is AdamW and the same on meshes", "[optim]") {
  using torch::optim::AdamW;
  const auto options = torch::optim::AdamWOptions(0.1).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.05);
  REQUIRE_NOTHROW(same(train(kMixed, maker<optim::FusedAdamW>(options)), train(kMixed, maker<AdamW>(options)), 1e-13, "AdamW"));
  REQUIRE_NOTHROW(same(train(kLarge, maker<optim::FusedAdamW>(options)), train(kLarge, maker<AdamW>(options)), 1e-5, "AdamW, float32"));
  check_on_meshes(kMixed, maker<optim::FusedAdamW>(options), 0);
  check_on_meshes(kLarge, maker<optim::FusedAdamW>(options), 0);
}

TEST_CASE("optim: FusedAdamW takes AdamW's steps where it cannot fuse", "[optim]") {
  const auto options = torch::optim::AdamWOptions(0.1).weight_decay(0.05);
  const auto stepped = [&](auto& optimizer, at::Tensor& x, at::Tensor& y) {
    for (int step = 0; step < 3; ++step) {
      x.mutable_grad() = at::ones_like(x) * (step + 1);
      y.mutable_grad() = step == 0 ? at::Tensor() : at::ones_like(y);  // so y is a step behind
      optimizer.step();
    }
  };
  for (const bool amsgrad : {false, true}) {
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      auto x = torch::ones({3}, at::kDouble).requires_grad_(), y = torch::ones({2}, dtype).requires_grad_();
      auto a = torch::ones({3}, at::kDouble).requires_grad_(), b = torch::ones({2}, dtype).requires_grad_();
      auto with = options;
      with.amsgrad(amsgrad);
      optim::FusedAdamW fused(std::vector<at::Tensor>{x, y}, with);
      torch::optim::AdamW plain(std::vector<at::Tensor>{a, b}, with);
      stepped(fused, x, y), stepped(plain, a, b);
      CHECK(at::allclose(x, a, 0, 1e-14));
      CHECK(at::allclose(y, b, 0, dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 0));
    }
  }
  auto x = torch::ones({1}, at::kDouble).requires_grad_();
  optim::FusedAdamW fused(std::vector<at::Tensor>{x}, options);
  const auto loss = fused.step([&] {
    auto y = x.square().sum();
    y.backward();
    return y;
  });
  CHECK(loss.item<double>() == 1);
  CHECK(x.item<double>() < 1);
}

TEST_CASE("optim: parameters of zeros and gradients of zeros", "[optim]") {
  for (const bool lans : {false, true}) {
    auto x = torch::zeros({3}, torch::kDouble).requires_grad_(), y = torch::ones({3}, torch::kDouble).requires_grad_();
    const auto optimizer = lans ? maker<optim::Lans>(optim::LambOptions(0.1).weight_decay(0))({x, y})
                                : maker<optim::Lamb>(optim::LambOptions(0.1).weight_decay(0))({x, y});
    x.mutable_grad() = torch::ones({3}, torch::kDouble);
    y.mutable_grad() = torch::zeros({3}, torch::kDouble);
    optimizer->step();
    REQUIRE(x.lt(0).all().item<bool>());
    REQUIRE(y.eq(1).all().item<bool>());
  }
}

TEST_CASE("optim: all norms of a step in one collective", "[optim]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const Layouts layouts = {{dt::shard(0)}, {dt::shard(0)}, {dt::replicate()}, {dt::shard(1)}};
    const auto count = [&](const Make& make, int64_t collectives, int64_t bytes) {
      const auto given = parameters(kMixed, line(world), layouts);
      const auto optimizer = make(given);
      steps(kMixed, *optimizer, given, line(world), layouts, 0, 1);
      dt::CommDebugMode comm;
      steps(kMixed, *optimizer, given, line(world), layouts, 1, 2);
      expect(comm, collectives, "a step");
      dt::require(comm.bytes() == bytes, "test", "a step sends {} bytes", comm.bytes());
    };
    count(maker<optim::Lamb>(optim::LambOptions(0.1)), 1, 4 * 16);
    count(maker<optim::Lans>(optim::LambOptions(0.1)), 2, 4 * 8 + 4 * 24);
    count(maker<optim::Adam8bit>(optim::Adam8bitOptions(0.1)), 0, 0);
  }));
}

TEST_CASE("optim: Muon follows its formulas", "[optim]") {
  const double lr = 0.1, mu = 0.9, decay = 0.2;
  const auto orthogonal = [](const at::Tensor& g) {
    auto x = g.reshape({g.size(0), -1});
    const bool tall = x.size(0) > x.size(1);
    if (tall) x = x.t();
    x = x / length(x);
    for (int i = 0; i < 5; ++i) {
      const auto a = x.mm(x.t());
      x = 3.4445 * x + (-4.7750 * a + 2.0315 * a.mm(a)).mm(x);
    }
    return (tall ? x.t() : x).reshape(g.sizes());
  };
  for (const bool nesterov : {true, false}) {
    for (const auto scale : {optim::MuonScale::original, optim::MuonScale::match_adamw}) {
      const auto expected = reference(kMatrices, [&](at::Tensor& x, const at::Tensor& g, Tensors& state, int) {
        state[0] = mu * state[0] + (1 - mu) * g;
        const double r = static_cast<double>(x.size(0)), c = static_cast<double>(x.numel()) / r;
        const double factor = scale == optim::MuonScale::original ? std::sqrt(std::max(1.0, r / c)) : 0.2 * std::sqrt(std::max(r, c));
        x = x * (1 - lr * decay) - lr * factor * orthogonal(nesterov ? mu * state[0] + (1 - mu) * g : state[0]);
      });
      const auto options = optim::MuonOptions(lr).momentum(mu).weight_decay(decay).nesterov(nesterov).scale(scale).dtype(torch::kDouble);
      REQUIRE_NOTHROW(same(train(kMatrices, maker<optim::Muon>(options)), expected, 1e-11, "Muon"));
    }
  }
  // Nearly orthogonal: singular values of 0.5 to 1.3, whatever those of the matrix.
  const auto o = optim::newton_schulz(wave({20, 30}, 0.77, torch::kDouble), 10, {3.4445, -4.7750, 2.0315}, 1e-7);
  const auto values = std::get<1>(torch::linalg_svd(o));
  REQUIRE(values.max().item<double>() < 1.3);
}

TEST_CASE("optim: Muon on meshes has the bits of one device", "[optim]") {
  check_on_meshes(kMatrices, maker<optim::Muon>(optim::MuonOptions(0.1)), 0);
  check_on_meshes(kMatrices, maker<optim::Muon>(optim::MuonOptions(0.1).nesterov(false).dtype(torch::kDouble)), 0);
  check_saved(kMatrices, maker<optim::Muon>(optim::MuonOptions(0.1)), 0);
}

TEST_CASE("optim: Muon gathers and scatters with one collective each and shares out the work", "[optim]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const Layouts layouts = {{dt::replicate(), dt::shard(0)}, {dt::replicate(), dt::shard(1)}, {dt::shard(0), dt::replicate()}};
    const auto given = parameters(kMatrices, mesh, layouts);
    const auto optimizer = maker<optim::Muon>(optim::MuonOptions(0.1))(given);
    dt::CommDebugMode comm;
    steps(kMatrices, *optimizer, given, mesh, layouts, 0, 1);
    dt::require(comm.count(dt::comm::Collective::all_to_all) == 2 && comm.count() == 2, "test", "a step communicates\n{}", comm.str());
  }));
  REQUIRE(optim::share_out({1, 5, 3, 3, 4}, 2) == std::vector<int64_t>{1, 0, 1, 0, 1});
  REQUIRE(optim::share_out({1, 1, 1, 1}, 4) == std::vector<int64_t>{0, 1, 2, 3});
  REQUIRE(optim::share_out({2}, 3) == std::vector<int64_t>{0});
}

TEST_CASE("optim: gradients are reduced and closures run and parameters without gradients stay", "[optim]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::manual_seed(2);
    torch::nn::Linear linear(4, 4);
    const auto before = dt::full_tensor(linear->bias.detach()).clone();
    const auto x = dt::distribute_tensor(torch::ones({6, 4}), mesh, {dt::shard(0)});
    optim::Muon optimizer({linear->weight}, optim::MuonOptions(0.1));
    const auto deferred = dt::no_sync();
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto value = linear(x).sum();
      value.backward();
      return value;
    });
    dt::require(loss.defined() && !dt::DTensor(linear->weight.grad()).layout().has_partial(), "test", "the gradient is left Partial");
    optim::Lamb other({linear->weight, torch::ones({2}).requires_grad_()}, optim::LambOptions(0.1));
    other.step();
    dt::require(dt::full_tensor(linear->bias.detach()).equal(before), "test", "a parameter of no optimizer has moved");
  }));
}

TEST_CASE("optim: bad options and parameters", "[optim]") {
  const Tensors matrix = {torch::ones({2, 2}).requires_grad_()}, list = {torch::ones({2}).requires_grad_()};
  REQUIRE_THROWS_WITH(optim::Lamb(list, optim::LambOptions(-1)), says("[Lamb] got lr -1"));
  REQUIRE_THROWS_WITH(optim::Lamb(list, optim::LambOptions(1).betas({1, 0})), says("got betas 1 and 0"));
  REQUIRE_THROWS_WITH(optim::Lans(list, optim::LambOptions(1).eps(-1)), says("[Lans] got eps -1"));
  REQUIRE_THROWS_WITH(optim::Lans(list, optim::LambOptions(1).weight_decay(-1)), says("got weight_decay -1"));
  REQUIRE_THROWS_WITH(optim::Lamb(list, optim::LambOptions(1).max_norm(0)), says("got max_norm 0"));
  REQUIRE_THROWS_WITH(optim::Muon(list), says("[Muon] is for matrices; got a parameter of 1 dims"));
  REQUIRE_THROWS_WITH(optim::Muon(matrix, optim::MuonOptions(1).momentum(1)), says("got momentum 1"));
  REQUIRE_THROWS_WITH(optim::Muon(matrix, optim::MuonOptions(1).ns_steps(0)), says("got ns_steps 0"));
  REQUIRE_THROWS_WITH(optim::Muon(matrix, optim::MuonOptions(1).dtype(torch::kLong)), says("got dtype Long"));
  REQUIRE_THROWS_WITH(optim::Adam8bit(list, optim::Adam8bitOptions(1).block_size(0)), says("[Adam8bit] got block_size 0"));
  REQUIRE_THROWS_WITH(optim::Adam8bit(list, optim::Adam8bitOptions(1).min_size(-1)), says("got min_size -1"));
  REQUIRE_THROWS_WITH(optim::Adam8bit({torch::ones({2}, torch::kLong)}), says("got a parameter of Long"));
  auto sparse = torch::zeros({2, 2}).requires_grad_();
  optim::Muon optimizer({sparse});
  sparse.mutable_grad() = torch::ones({2, 2}).to_sparse();
  REQUIRE_THROWS_WITH(optimizer.step(), says("a gradient is sparse"));

  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream file;
  out.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  optim::Muon other({torch::ones({2, 2}), torch::ones({2, 2})});
  REQUIRE_THROWS_WITH(other.load(in), says("has 1 parameters; expected 2"));
}

TEST_CASE("optim: what is loaded has no state of later steps", "[optim]") {
  const auto parameter = torch::ones({2, 2}).requires_grad_();
  optim::Muon optimizer({parameter}, optim::MuonOptions(0.1));
  const auto step = [&] {
    parameter.mutable_grad() = torch::full({2, 2}, 0.5);
    optimizer.step();
  };
  torch::serialize::OutputArchive out;
  optimizer.save(out);
  std::stringstream file;
  out.save_to(file);
  step();
  REQUIRE(!optimizer.state().empty());
  torch::serialize::InputArchive in;
  in.load_from(file);
  optimizer.load(in);
  REQUIRE(optimizer.state().empty());
}
