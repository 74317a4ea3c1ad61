// The norm of all gradients in one collective, and clipping by it.
#include "tests/support/dispatch_support.hpp"

#include <dtensor/training/clip.hpp>

#include <range/v3/view/zip.hpp>
#include <torch/nn/utils/clip_grad.h>

namespace dt = dtensor;
using namespace dt::test;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A parameter with a gradient, both double.
at::Tensor parameter(std::vector<int64_t> sizes, int64_t seed) {
  auto p = torch::zeros(sizes, torch::kDouble).requires_grad_();
  p.mutable_grad() = (torch::arange(p.numel(), torch::kDouble) * (0.7 + 0.1 * static_cast<double>(seed))).sin().mul(3).reshape(sizes);
  return p;
}

std::vector<at::Tensor> parameters() {
  return {parameter({5, 7}, 0), parameter({6, 4}, 1), parameter({9}, 2), parameter({3, 2, 4}, 3), parameter({}, 4)};
}

at::Tensor laid_out(const at::Tensor& plain, const dt::DeviceMesh& mesh, const dt::Placements& placements) {
  auto p = dt::distribute_tensor(plain.detach(), mesh, placements).tensor().detach().requires_grad_();
  p.mutable_grad() = dt::distribute_tensor(plain.grad(), mesh, placements).tensor().detach();
  return p;
}

struct Expected {
  double norm;
  std::vector<at::Tensor> gradients;
};

Expected on_one_device(double max_norm, double p) {
  auto plain = parameters();
  Expected expected{torch::nn::utils::clip_grad_norm_(plain, max_norm, p), {}};
  for (const auto& each : plain) expected.gradients.push_back(each.grad());
  return expected;
}

void close(double got, double expected, const std::string& what) {
  dt::require(std::abs(got - expected) <= 1e-13 * std::abs(expected), "test", "{}: got {:.17g}; expected {:.17g}", what, got, expected);
}

void close(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  const auto full = dt::full_tensor(got);
  dt::require(full.sizes() == expected.sizes() && torch::allclose(full, expected, 1e-12, 1e-13), "test", "{} differs", what);
}

// Every rank of the mesh has this number, to the last bit.
void agreed(double value, dt::World& world) {
  const auto mesh = line(world);
  const auto all = mesh.communicator(0).all_gather(torch::tensor({value}, torch::kDouble), std::vector<int64_t>(world.size(), 1)).get();
  dt::require(all.eq(value).all().item<bool>(), "test", "the ranks have different norms");
}

using Layouts = std::vector<dt::Placements>;

void clip_on(int ranks, std::vector<int64_t> sizes, std::vector<std::string> names, const Layouts& layouts, int64_t collectives,
             const std::string& transport = "threads") {
  for (const double p : {2.0, 1.0, 3.0, kInfinity}) {
    for (const double max_norm : {0.5, 1e6, kInfinity}) {
      const auto expected = on_one_device(max_norm, p);
      REQUIRE_NOTHROW(on_ranks(ranks, [&](dt::World& world) {
        const auto mesh = dt::init_device_mesh(torch::kCPU, sizes, names);
        std::vector<at::Tensor> given;
        for (const auto& plain : parameters()) {
          const auto i = given.size();
          given.push_back(i < layouts.size() ? laid_out(plain, mesh, layouts[i]) : plain);
        }
        dt::CommDebugMode comm;
        const double norm = dt::clip_grad_norm_(given, max_norm, p);
        expect(comm, collectives, "clipping");
        dt::require(comm.bytes() == 8 * collectives, "test", "clipping sent {} bytes", comm.bytes());
        close(norm, expected.norm, "the norm");
        agreed(norm, world);
        for (size_t i = 0; i < given.size(); ++i) close(given[i].grad(), expected.gradients[i], "gradient " + std::to_string(i));
      }, transport));
    }
  }
}

}  // namespace

TEST_CASE("clip: the norm of gradients under mixed layouts is that of one device", "[clip]") {
  const auto r = dt::replicate();
  const auto s = [](int64_t d) { return dt::shard(d); };
  const std::vector<std::vector<int64_t>> shares = {{1}, {1, 5}, {4, 1, 0}, {3, 0, 1, 2}};
  for (const int n : {1, 2, 3, 4}) {
    const auto ragged = dt::ragged_shard(0, shares[n - 1]);
    clip_on(n, {n}, {"dp"}, {{s(0)}, {s(1)}, {ragged}, {r}}, n > 1);
    clip_on(n, {n}, {"dp"}, {{r}, {r}, {r}, {r}}, 0);
  }
  clip_on(4, {2, 2}, {"dp", "tp"}, {{s(0), s(1)}, {r, s(0)}, {s(0), r}, {s(1), s(1)}, {r, r}}, 1);
  clip_on(4, {2, 2}, {"dp", "tp"}, {{r, s(1)}, {r, s(0)}, {r, r}}, 1);
  clip_on(6, {2, 3}, {"dp", "tp"}, {{r, s(1)}, {s(0), s(0)}, {dt::ragged_shard(0, {1, 3}), r}, {s(2), dt::strided_shard(0, 3)}}, 1);
}

TEST_CASE("clip: the same over gloo", "[clip]") {
  clip_on(3, {3}, {"dp"}, {{dt::shard(0)}, {dt::shard(1)}, {dt::ragged_shard(0, {1, 0, 2})}, {dt::replicate()}}, 1, "gloo");
}

TEST_CASE("clip: meshes that hold one another reduce at once", "[clip]") {
  const auto expected = on_one_device(0.5, 2);
  REQUIRE_NOTHROW(on_ranks(4, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    const auto plain = parameters();
    const std::vector<at::Tensor> given = {laid_out(plain[0], mesh["tp"], {dt::shard(0)}), laid_out(plain[1], mesh["dp"], {dt::shard(1)}),
                                           laid_out(plain[2], mesh, {dt::shard(0), dt::shard(0)}),
                                           laid_out(plain[3], mesh.flatten({"dp", "tp"}, "all"), {dt::shard(2)}), plain[4]};
    dt::CommDebugMode comm;
    const double norm = dt::clip_grad_norm_(given, 0.5);
    expect(comm, 1, "clipping on four meshes");
    close(norm, expected.norm, "the norm");
    agreed(norm, world);
    for (const auto& [parameter, gradient] : ranges::views::zip(given, expected.gradients)) close(parameter.grad(), gradient, "gradient");

    const std::vector<at::Tensor> apart = {laid_out(plain[0], mesh["tp"], {dt::shard(0)}), laid_out(plain[1], mesh["dp"], {dt::shard(1)}),
                                           plain[2], laid_out(plain[3], mesh["tp"], {dt::replicate()}), plain[4]};
    comm.reset();
    close(dt::grad_norm(apart), expected.norm, "the norm over meshes of which none holds the other");
    expect(comm, 2, "a norm over two meshes");
  }));
}

TEST_CASE("clip: Partial gradients are reduced first and a parameter counts once", "[clip]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    torch::nn::Linear linear(3, 4);
    linear->to(torch::kDouble);
    const auto x = dt::distribute_tensor(torch::ones({6, 3}, torch::kDouble), mesh, {dt::shard(0)});
    {
      const auto deferred = dt::no_sync();
      linear(x).sum().backward();
    }
    dt::require(dt::DTensor(linear->bias.grad()).layout().has_partial(), "test", "nothing is Partial");
    // 12 entries of 6 in the weight's gradient, 4 in the bias's.
    const double norm = std::sqrt(16 * 36.0);
    close(dt::clip_grad_norm_({linear->weight, linear->bias, linear->weight}, 1), norm, "the norm");
    dt::require(!dt::DTensor(linear->bias.grad()).layout().has_partial(), "test", "a gradient is left Partial");
    close(linear->bias.grad(), torch::full({4}, 6 / (norm + 1e-6), torch::kDouble), "a clipped gradient");
  }));
}

TEST_CASE("clip: low precision is added up in float32", "[clip]") {
  auto p = torch::zeros({70000}, torch::kBFloat16).requires_grad_();
  p.mutable_grad() = torch::ones({70000}, torch::kBFloat16);
  REQUIRE(std::abs(dt::grad_norm({p}) - std::sqrt(70000.0)) < 1e-3);
  REQUIRE(dt::grad_norm({p}, 1) == 70000);
}

TEST_CASE("clip: what is not finite and bad arguments", "[clip]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  REQUIRE(dt::clip_grad_norm_({}, 1) == 0);
  REQUIRE(dt::clip_grad_norm_({torch::ones({2}).requires_grad_()}, 1) == 0);
  REQUIRE_THROWS_WITH(dt::clip_grad_norm_(parameters(), -1), says("[clip_grad_norm_] got max_norm -1"));
  REQUIRE_THROWS_WITH(dt::clip_grad_norm_(parameters(), nan), says("got max_norm nan"));
  for (const double type : {0.0, -2.0, nan})
    REQUIRE_THROWS_WITH(dt::clip_grad_norm_(parameters(), 1, type), says("expected a positive number"));
  REQUIRE_THROWS_WITH(dt::clip_grad_norm_({at::Tensor()}, 1), says("undefined"));
  auto elsewhere = torch::zeros({2}, torch::kMeta).requires_grad_();
  elsewhere.mutable_grad() = torch::ones({2}, torch::kMeta);
  REQUIRE_THROWS_WITH(dt::clip_grad_norm_({parameter({2}, 0), elsewhere}, 1), says("several devices; got cpu and meta"));
  auto sparse = torch::zeros({2}).requires_grad_();
  sparse.mutable_grad() = torch::ones({2}).to_sparse();
  REQUIRE_THROWS_WITH(dt::clip_grad_norm_({sparse}, 1), says("sparse"));
  for (const double bad : {nan, kInfinity}) {
    for (const double type : {1.0, 2.0, kInfinity}) {
      REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
        const auto mesh = line(world);
        auto plain = parameters();
        plain[2].mutable_grad()[8] = bad;  // of the last rank
        const std::vector<at::Tensor> given = {laid_out(plain[0], mesh, {dt::shard(1)}), laid_out(plain[2], mesh, {dt::shard(0)})};
        bool thrown = false;
        try {
          dt::clip_grad_norm_(given, 1, type, /*error_if_nonfinite=*/true);
        } catch (const dt::Error& error) {
          thrown = std::string(error.what()).find("expected a finite one") != std::string::npos;
        }
        dt::require(thrown, "test", "a norm of {} is no error", bad);
        close(given[0].grad(), plain[0].grad(), "a gradient after the error");
        const double norm = dt::clip_grad_norm_(given, 1, type);
        dt::require(std::isnan(bad) ? std::isnan(norm) : norm == kInfinity, "test", "got {}", norm);
        const auto expected = std::isnan(bad) ? torch::full({5, 7}, nan, torch::kDouble) : torch::zeros({5, 7}, torch::kDouble);
        dt::require(dt::full_tensor(given[0].grad()).allclose(expected, 0, 0, true), "test", "got other gradients than torch's");
      }));
    }
  }
}
