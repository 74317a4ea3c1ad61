// Parts of what one GPU draws, bit for bit. Ranks are threads on one GPU; nothing is communicated on it.
#include "tests/support/op_check.hpp"

#include <torch/cuda.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

bool has_gpu() { return torch::cuda::is_available(); }

struct CudaFill {
  std::string name;
  std::function<void(const at::Tensor&)> draw;
  bool integers = false;
};

const std::vector<CudaFill> kCudaFills = {
    {"uniform_", [](const at::Tensor& t) { t.uniform_(-1, 2); }},
    {"normal_", [](const at::Tensor& t) { t.normal_(1, 3); }},
    {"log_normal_", [](const at::Tensor& t) { t.log_normal_(0.5, 2); }},
    {"exponential_", [](const at::Tensor& t) { t.exponential_(2); }},
    {"cauchy_", [](const at::Tensor& t) { t.cauchy_(1, 2); }},
    {"geometric_", [](const at::Tensor& t) { t.geometric_(0.3); }, true},
    {"bernoulli_", [](const at::Tensor& t) { t.bernoulli_(0.3); }, true},
    {"random_", [](const at::Tensor& t) { t.random_(); }, true},
    {"random_ between", [](const at::Tensor& t) { t.random_(-50, 60); }, true},
};

void on_gpu(std::vector<int64_t> sizes, const std::function<void(const DeviceMesh&)>& body) {
  LaunchOptions options;
  options.transport = "threads";
  options.ranks = static_cast<int>(c10::multiply_integers(sizes));
  launch(options, [&](World&) { body(init_device_mesh(torch::kCUDA, sizes)); });
}

// A draw twice, and a plain one, so that a generator that went on differently shows.
Tensors draws(const CudaFill& op, const std::function<at::Tensor()>& make) {
  torch::manual_seed(7);
  Tensors results{make(), make()};
  for (const auto& tensor : results) op.draw(tensor);
  results.push_back(torch::rand({3}, torch::kCUDA));
  return results;
}

void check_draws(const CudaFill& op, at::ScalarType dtype, const Sizes& sizes, std::vector<int64_t> mesh_sizes) {
  const auto options = at::TensorOptions(dtype).device(at::kCUDA);
  const auto expected = draws(op, [&] { return torch::empty(sizes, options); });
  REQUIRE_NOTHROW(on_gpu(mesh_sizes, [&](const DeviceMesh& mesh) {
    for (const auto& first : {shard(0), shard(static_cast<int64_t>(sizes.size()) - 1), replicate()}) {
      Placements placements(mesh.ndim(), shard(0));
      placements[0] = first;
      const auto got = draws(op, [&] { return empty(sizes, mesh, placements, options).tensor(); });
      for (size_t i = 0; i < got.size(); ++i) {
        const bool same = is_dtensor(got[i]) ? DTensor(got[i]).to_local().equal(own_shard(expected[i], DTensor(got[i]).layout()))
                                             : got[i].equal(expected[i]);
        require(same, "test", "{} of {} under {}: draw {} differs", op.name, c10::toString(dtype), str(placements), i);
      }
    }
  }));
}

}  // namespace

TEST_CASE("random gpu: every operator and dtype", "[random][gpu]") {
  if (!has_gpu()) DTENSOR_SKIP("no GPU");
  const std::vector<Sizes> shapes = {{1000}, {1024, 1024}, {999, 1001}, {7, 300, 501}};
  for (const auto& op : kCudaFills) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte}) {
      if (!at::isFloatingType(dtype) && !op.integers) continue;
      if (dtype == at::kByte && op.name == "random_ between") continue;
      INFO(op.name << " of " << c10::toString(dtype));
      for (const auto& sizes : shapes) check_draws(op, dtype, sizes, {3});
      check_draws(op, dtype, {600, 1700}, {2, 2});
    }
  }
}

TEST_CASE("random gpu: complex numbers are drawn whole", "[random][gpu]") {
  if (!has_gpu()) DTENSOR_SKIP("no GPU");
  for (const auto& op : {kCudaFills[0], kCudaFills[1]}) {
    for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) check_draws(op, dtype, {999, 1001}, {3});
  }
}

TEST_CASE("random gpu: 64 million elements", "[random][gpu][slow]") {
  if (!has_gpu()) DTENSOR_SKIP("no GPU");
  for (const auto& op : {kCudaFills[0], kCudaFills[1], kCudaFills[6], kCudaFills[8]}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf}) check_draws(op, dtype, {8192, 8192}, {4});
  }
}

TEST_CASE("random gpu: dropout", "[random][gpu]") {
  if (!has_gpu()) DTENSOR_SKIP("no GPU");
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const Sizes& sizes : {Sizes{1000}, Sizes{1024, 1024}, Sizes{999, 1001}, Sizes{8192, 8192}, Sizes{1022, 1025}}) {
      const auto input = torch::arange(c10::multiply_integers(sizes), torch::kCUDA).remainder(97).to(dtype).view(sizes);
      torch::manual_seed(3);
      const auto expected = torch::native_dropout(input, 0.1, true);
      const auto after = torch::rand({3}, torch::kCUDA);
      REQUIRE_NOTHROW(on_gpu({4}, [&](const DeviceMesh& mesh) {
        for (const int64_t dim : {int64_t{0}, static_cast<int64_t>(sizes.size()) - 1}) {
          const auto layout = Layout::get(mesh, Placements{shard(dim)}, sizes, dtype);
          const auto part = from_local(own_shard(input, *layout), mesh, {shard(dim)});
          torch::manual_seed(3);
          const auto got = torch::native_dropout(part.tensor(), 0.1, true);
          require(DTensor(std::get<0>(got)).to_local().equal(own_shard(std::get<0>(expected), *layout)), "test", "other values");
          require(DTensor(std::get<1>(got)).to_local().equal(own_shard(std::get<1>(expected), *layout)), "test", "another mask");
          require(torch::rand({3}, torch::kCUDA).equal(after), "test", "the generator went on differently");
        }
      }));
    }
  }
}

TEST_CASE("random gpu: a dt Generator draws what it draws on the CPU", "[random][gpu]") {
  if (!has_gpu()) DTENSOR_SKIP("no GPU");
  for (const auto& op : kCudaFills) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
      if (!at::isFloatingType(dtype) && !op.integers) continue;
      INFO(op.name << " of " << c10::toString(dtype));
      REQUIRE_NOTHROW(on_gpu({3}, [&](const DeviceMesh& mesh) {
        const auto draw = [&](const at::Tensor& tensor) {
          World::current().generator() = Generator(5);
          op.draw(tensor);
          return tensor;
        };
        const auto whole = draw(torch::empty({999, 1001}, dtype));
        require(draw(torch::empty({999, 1001}, at::TensorOptions(dtype).device(at::kCUDA))).cpu().equal(whole), "test",
                "the whole differs");
        const DTensor part(draw(empty({999, 1001}, mesh, {shard(1)}, at::TensorOptions(dtype).device(at::kCUDA)).tensor()));
        require(part.to_local().cpu().equal(own_shard(whole, part.layout())), "test", "a part differs");
      }));
    }
  }
}
