// Optimizers: against plain references, and on meshes as on one device.
#include "dispatch_support.hpp"

#include <dtensor/optim/adam8bit.hpp>
#include <dtensor/optim/lamb.hpp>
#include <dtensor/optim/muon.hpp>

#include "src/optim/whole_by_owner.hpp"

#include <optional>
#include <sstream>

namespace dt = dtensor;
namespace optim = dtensor::optim;
using namespace dt::test;

namespace {

using Tensors = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Tensors)>;
using Layouts = std::vector<dt::Placements>;

const Layouts kWhole = {};

at::Tensor wave(std::vector<int64_t> sizes, double pace, at::ScalarType dtype) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return (torch::arange(n, torch::kDouble) * pace).sin().mul(0.7).reshape(sizes).to(dtype);
}

struct Problem {
  std::vector<std::vector<int64_t>> sizes;
  at::ScalarType dtype;
  int steps = 4;

  at::Tensor start(size_t i) const { return wave(sizes[i], 0.37 + 0.1 * static_cast<double>(i), dtype); }
  // The gradient at a step: of one element it reads nothing of the others.
  at::Tensor gradient(size_t i, int step) const { return wave(sizes[i], 1.3 + 0.21 * step + 0.05 * static_cast<double>(i), dtype) * (step + 1); }
};

const Problem kMatrices = {{{6, 10}, {10, 6}, {8, 8}, {5, 3, 2, 2}}, torch::kDouble};
const Problem kMixed = {{{6, 10}, {9}, {3, 2, 4}, {1, 5}}, torch::kDouble};
const Problem kLarge = {{{64, 96}, {90, 70}, {6}, {4096}}, torch::kFloat};

at::Tensor laid_out(const at::Tensor& plain, const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts, size_t i) {
  if (!mesh) return plain.clone();
  const auto placements = i < layouts.size() ? layouts[i] : dt::Placements(mesh->ndim(), dt::replicate());
  return dt::distribute_tensor(plain, *mesh, placements).tensor().detach().clone();
}

Tensors parameters(const Problem& problem, const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts) {
  Tensors given;
  for (size_t i = 0; i < problem.sizes.size(); ++i) given.push_back(laid_out(problem.start(i), mesh, layouts, i).requires_grad_());
  return given;
}

void steps(const Problem& problem, torch::optim::Optimizer& optimizer, const Tensors& given, const std::optional<dt::DeviceMesh>& mesh,
           const Layouts& layouts, int first, int last) {
  for (int step = first; step < last; ++step) {
    for (size_t i = 0; i < given.size(); ++i) given[i].mutable_grad() = laid_out(problem.gradient(i, step), mesh, layouts, i);
    optimizer.step();
  }
}

Tensors wholes(const Tensors& given) {
  Tensors result;
  for (const auto& p : given) result.push_back(dt::full_tensor(p.detach()).clone());
  return result;
}

Tensors train(const Problem& problem, const Make& make, const std::optional<dt::DeviceMesh>& mesh = {}, const Layouts& layouts = kWhole) {
  const auto given = parameters(problem, mesh, layouts);
  const auto optimizer = make(given);
  steps(problem, *optimizer, given, mesh, layouts, 0, problem.steps);
  return wholes(given);
}

void same(const Tensors& got, const Tensors& expected, double tolerance, const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool close = tolerance == 0 ? got[i].equal(expected[i]) : torch::allclose(got[i], expected[i], tolerance, tolerance);
    dt::require(close, "test", "{}: parameter {} differs by {}", what, i, (got[i] - expected[i]).abs().max().item<double>());
  }
}

// Four parameters under each of: rows, columns, ragged rows, replicated, two dimensions, and mixed.
void check_on_meshes(const Problem& problem, const Make& make, double tolerance) {
  const auto expected = train(problem, make);
  const auto r = dt::replicate();
  const auto s0 = dt::shard(0), s1 = dt::shard(1);
  const auto cut = [&](size_t i, const dt::Placement& p) { return p.dim < static_cast<int64_t>(problem.sizes[i].size()) ? p : dt::shard(0); };
  const std::vector<std::vector<int64_t>> shares = {{1}, {1, 5}, {4, 1, 0}, {3, 0, 1, 2}};
  for (const int n : {1, 2, 3, 4}) {
    for (const auto* transport : {"threads", "gloo"}) {
      if (std::string(transport) == "gloo" && n != 3) continue;
      REQUIRE_NOTHROW(on_ranks(n, [&](dt::World& world) {
        const auto ragged = dt::ragged_shard(0, shares[n - 1]);
        for (const auto& p : {r, s0, s1, ragged}) {
          Layouts layouts;
          for (size_t i = 0; i < problem.sizes.size(); ++i) layouts.push_back({cut(i, p)});
          same(train(problem, make, line(world), layouts), expected, tolerance, p.str());
        }
        same(train(problem, make, line(world), {{s0}, {r}, {ragged}, {r}}), expected, tolerance, "mixed");
      }, transport));
    }
  }
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    same(train(problem, make, mesh, {{s0, cut(0, s1)}, {r, cut(1, s1)}, {s0, s0}, {r, r}}), expected, tolerance, "2x2");
    same(train(problem, make, mesh, {{r, s0}, {r, s0}, {r, s0}, {r, s0}}), expected, tolerance, "2x2, replicated over dp");
    same(train(problem, make, mesh["tp"], {{s0}, {cut(1, s1)}, {r}, {s0}}), expected, tolerance, "a submesh");
  }));
  REQUIRE_NOTHROW(on_ranks(6, [&](dt::World&) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {3, 2}, {"dp", "tp"});
    same(train(problem, make, mesh, {{dt::strided_shard(0, 2), cut(0, s1)}, {s0, r}, {r, s0}, {s0, s0}}), expected, tolerance, "3x2");
  }));
}

template <class Optimizer, class Options>
Make maker(const Options& options) {
  return [options](Tensors given) { return std::make_unique<Optimizer>(std::move(given), options); };
}

// What was saved on 2 ranks goes on like nothing on one device, on 3 ranks and on 2x2.
void check_saved(const Problem& problem, const Make& make, double tolerance) {
  const auto expected = train(problem, make);
  const int half = problem.steps / 2;
  std::string file;
  Tensors middle;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    const Layouts layouts = {{dt::shard(0)}, {dt::shard(0)}, {dt::replicate()}, {dt::shard(0)}};
    const auto given = parameters(problem, line(world), layouts);
    const auto optimizer = make(given);
    steps(problem, *optimizer, given, line(world), layouts, 0, half);
    torch::serialize::OutputArchive archive;
    optimizer->save(archive);
    const auto whole = wholes(given);
    if (world.rank() != 0) return;
    std::ostringstream out;
    archive.save_to(out);
    file = out.str();
    middle = whole;
  }));
  const auto go_on = [&](const std::optional<dt::DeviceMesh>& mesh, const Layouts& layouts) {
    Tensors given;
    for (size_t i = 0; i < middle.size(); ++i) given.push_back(laid_out(middle[i], mesh, layouts, i).requires_grad_());
    const auto optimizer = make(given);
    std::istringstream in(file);
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    optimizer->load(archive);
    steps(problem, *optimizer, given, mesh, layouts, half, problem.steps);
    same(wholes(given), expected, tolerance, "training that went on");
  };
  REQUIRE_NOTHROW(go_on(std::nullopt, kWhole));
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) { go_on(line(world), {{dt::shard(1)}, {dt::shard(0)}, {dt::shard(0)}, {dt::replicate()}}); }));
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World&) {
    go_on(dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"}), {{dt::shard(0), dt::shard(1)}, {dt::replicate(), dt::shard(0)}});
  }));
}

// -- References: whole tensors, formulas as they are printed ---------------------------------------------------------------------

Tensors reference(const Problem& problem, const std::function<void(at::Tensor& x, const at::Tensor& g, Tensors& state, int t)>& step) {
  Tensors result;
  for (size_t i = 0; i < problem.sizes.size(); ++i) {
    auto x = problem.start(i);
    Tensors state = {torch::zeros_like(x), torch::zeros_like(x)};
    for (int t = 1; t <= problem.steps; ++t) step(x, problem.gradient(i, t - 1), state, t);
    result.push_back(x);
  }
  return result;
}

double length(const at::Tensor& t) { return std::sqrt((t * t).sum().item<double>()); }

at::Tensor adam_root(at::Tensor& v, const at::Tensor& g, double b2, double eps, int t) {
  v = b2 * v + (1 - b2) * g * g;
  return (v / (1 - std::pow(b2, t))).sqrt() + eps;
}

double ratio(double x, double u, double most) { return x == 0 || u == 0 ? 1 : std::min(x, most) / u; }

}  // namespace

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

TEST_CASE("optim: the dynamic map is that of its authors", "[optim]") {
  // bitsandbytes.functional.create_dynamic_map(True) and (False): ends, and sums in double.
  for (const bool is_signed : {true, false}) {
    const auto map = optim::dynamic_map(is_signed);
    REQUIRE(map.numel() == 256);
    REQUIRE(std::get<0>(map.sort()).equal(map));
    REQUIRE(map.eq(0).sum().item<int64_t>() == 1);
    REQUIRE(map[255].item<float>() == 1);
  }
  const auto map = optim::dynamic_map(true);
  REQUIRE(map[127].item<float>() == 0);
  REQUIRE(map.narrow(0, 0, 127).neg().flip(0).equal(map.narrow(0, 128, 127)));
  REQUIRE(std::abs(map[254].item<double>() - 0.99296875) < 1e-7);    // the last of 64 parts of 0.1 to 1
  REQUIRE(std::abs(map[128].item<double>() - 0.55e-6) < 1e-12);      // the one part of the smallest exponent
  REQUIRE(std::abs(optim::dynamic_map(false)[1].item<double>() - 0.325e-6) < 1e-12);  // the first of two
}

TEST_CASE("optim: Adam8bit is Adam with averages that are coded", "[optim]") {
  const double lr = 0.01, b1 = 0.9, b2 = 0.99, eps = 1e-8, decay = 0.1;
  const int64_t block = 100;
  // Of every block, the nearest of 256 numbers, by looking at all.
  const auto coded = [&](const at::Tensor& whole, bool is_signed) {
    auto result = whole.clone().contiguous();
    const auto map = optim::dynamic_map(is_signed);
    auto* x = result.data_ptr<float>();
    const auto* numbers = map.data_ptr<float>();
    for (int64_t begin = 0; begin < result.numel(); begin += block) {
      const auto end = std::min(begin + block, result.numel());
      float most = 0;
      for (auto i = begin; i < end; ++i) most = std::max(most, std::abs(x[i]));
      for (auto i = begin; i < end && most > 0; ++i) {
        const auto nearest = std::min_element(numbers, numbers + 256, [&](float a, float b) { return std::abs(a - x[i] / most) < std::abs(b - x[i] / most); });
        x[i] = *nearest * most;
      }
    }
    return result;
  };
  const auto expected = reference(kLarge, [&](at::Tensor& x, const at::Tensor& g, Tensors& state, int t) {
    state[0] = b1 * state[0] + (1 - b1) * g;
    const auto root = adam_root(state[1], g, b2, eps, t);
    x = x * (1 - lr * decay) - lr * (state[0] / (1 - std::pow(b1, t)) / root);
    if (x.numel() < 50) return;
    state[0] = coded(state[0], true);
    state[1] = coded(state[1], false);
  });
  const auto options = optim::Adam8bitOptions(lr).betas({b1, b2}).eps(eps).weight_decay(decay).block_size(block).min_size(50);
  // A number halfway between two codes may go either way, and moves a step by a part of lr.
  const auto got = train(kLarge, maker<optim::Adam8bit>(options));
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto apart = (got[i] - expected[i]).abs();
    REQUIRE(apart.max().item<double>() < lr);
    REQUIRE(apart.gt(1e-5).sum().item<int64_t>() <= got[i].numel() / 500);
  }
  // And near Adam of 32 bits.
  const auto adam = train(kLarge, [&](Tensors given) {
    return std::make_unique<torch::optim::AdamW>(std::move(given), torch::optim::AdamWOptions(lr).betas({b1, b2}).eps(eps).weight_decay(decay));
  });
  for (size_t i = 0; i < adam.size(); ++i) REQUIRE((got[i] - adam[i]).abs().mean().item<double>() < 0.1 * lr);
  REQUIRE_NOTHROW(same({got[2]}, {adam[2]}, 1e-6, "a small parameter"));
}

TEST_CASE("optim: Adam8bit on meshes has the bits of one device", "[optim]") {
  check_on_meshes(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01)), 0);
  check_on_meshes(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01).block_size(7).min_size(0).weight_decay(0.1)), 0);
  check_saved(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01)), 0);
  check_saved(kLarge, maker<optim::Adam8bit>(optim::Adam8bitOptions(0.01).block_size(100)), 0);
}

TEST_CASE("optim: Adam8bit keeps 8 bits and communicates only where ranks share blocks", "[optim]") {
  REQUIRE_NOTHROW(on_ranks(4, [](dt::World& world) {
    const auto mesh = line(world);
    const auto look = [&](const dt::Placement& placement, int64_t collectives, int64_t blocks) {
      const Problem problem = {{{64, 96}}, torch::kFloat};
      const Layouts layouts = {{placement}};
      const auto given = parameters(problem, mesh, layouts);
      optim::Adam8bit optimizer(given, optim::Adam8bitOptions(0.01));
      dt::CommDebugMode comm;
      steps(problem, optimizer, given, mesh, layouts, 0, 1);
      expect(comm, collectives, placement.str().c_str());
      const auto* state = optimizer.state_of(given[0]);
      const auto& codes = state->tensors.at("exp_avg");
      dt::require(codes.scalar_type() == torch::kByte && dt::DTensor(codes).placements()[0] == placement, "test", "the state lies as {}",
                  dt::DTensor(codes).layout().str());
      const auto here = state->tensors.at("exp_avg_max").numel();
      dt::require(here == blocks, "test", "{} blocks are here; expected {}", here, blocks);
    };
    look(dt::shard(0), 0, 6);         // 16 rows of 96: 6 blocks of 256
    look(dt::replicate(), 0, 24);
    look(dt::shard(1), 1, 24);
    look(dt::ragged_shard(0, {1, 2, 3, 4}), 1, 24);
  }));
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
