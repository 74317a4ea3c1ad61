// What the tests of files share: a path that is gone at the end, models of all kinds of tensors, and their bytes.
#pragma once

#include "tests/support/dispatch_support.hpp"

#include <dtensor/checkpoint/torch_files.hpp>

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace dtensor::test {

// A folder of its own in the folder of temporary files, gone at the end.
struct Folder {
  static inline std::atomic<int> count = 0;
  std::string path = std::filesystem::temp_directory_path() / ("dtensor_files_" + std::to_string(getpid()) + "_" + std::to_string(++count));
  Folder() { std::filesystem::create_directory(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  int64_t files() const { return std::distance(std::filesystem::directory_iterator(path), {}); }
};

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The bytes that torch::save writes.
template <class Value>
std::string plain_bytes(const Value& value) {
  std::ostringstream out;
  torch::save(value, out);
  return out.str();
}

struct TailImpl : torch::nn::Module {
  TailImpl() { register_module("dropout", dropout); }
  torch::Tensor forward(const torch::Tensor& x) { return dropout(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(8, 6));
  torch::nn::Dropout dropout{0.1};
};
TORCH_MODULE(Tail);

// Tied, frozen, transposed, empty, 0-dim and low-precision parameters, buffers of several dtypes, children within children, and one that is
// not saved.
struct ManyKindsImpl : torch::nn::Module {
  explicit ManyKindsImpl(int64_t seed) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    tokens = register_module("tokens", torch::nn::Embedding(11, 6));
    head = register_parameter("head", tokens->weight);
    transposed = register_parameter("transposed", torch::randn({6, 10}).t().detach());
    frozen = register_parameter("frozen", torch::randn({7}), /*requires_grad=*/false);
    empty = register_parameter("empty", torch::randn({0, 3}));
    number = register_parameter("number", torch::randn({}));
    half = register_parameter("half", torch::randn({5, 4}).to(torch::kBFloat16));
    double_buffer = register_buffer("double_buffer", torch::randn({9}, torch::kDouble));
    mask = register_buffer("mask", torch::randn({4, 5}) > 0);
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::Functional(torch::relu), torch::nn::BatchNorm1d(8), Tail()));
    register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 3, 2).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& ids) { return torch::linear(layers->forward(tokens(ids)) + 0.1 * number, head); }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Sequential layers{nullptr};
  torch::Tensor head, transposed, frozen, empty, number, half, double_buffer, mask;
};
TORCH_MODULE(ManyKinds);

inline std::vector<std::pair<std::string, at::Tensor>> tensors_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : module.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

inline void same_module(const torch::nn::Module& got, const torch::nn::Module& expected, const std::string& what) {
  const auto a = tensors_of(got), b = tensors_of(expected);
  require(a.size() == b.size(), "test", "{}: {} tensors", what, a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    const auto whole = full_tensor(a[i].second.detach());
    require(whole.scalar_type() == b[i].second.scalar_type() && whole.sizes() == b[i].second.sizes() && whole.equal(b[i].second), "test",
            "{}: {} differs", what, a[i].first);
  }
}

// How the models of this file lie: by a plan, fully sharded, or both.
struct Way {
  const char* name;
  std::vector<int64_t> sizes;
  Plan plan;
  bool sharded = false;
};
inline std::ostream& operator<<(std::ostream& out, const Way& way) { return out << way.name; }

inline int ranks_of(const Way& way) {
  int ranks = 1;
  for (const auto size : way.sizes) ranks *= static_cast<int>(size);
  return ranks;
}

inline std::vector<Way> ways() {
  const Plan tp{{"tokens.weight|transposed", {{"tp", shard(1)}}},
                {"layers.0.*|double_buffer|frozen", {{"tp", shard(0)}}},
                {"layers.3.linear.weight", {{"tp", shard(1)}}},
                {"half", {{"tp", ragged_shard(0, {1, 3})}}}};
  return {{"one", {1, 1}, {}},
          {"replicated", {3, 1}, {}},
          {"tp=2", {1, 2}, tp},
          {"dp=3 fully sharded", {3, 1}, {}, true},
          {"dp=2,tp=2 fully sharded", {2, 2}, tp, true}};
}

// Runs `body` on every rank, in the region, with a model that lies in the given way.
inline void on_way(const Way& way, int64_t seed, const std::function<void(World&, ManyKinds&)>& body,
                   const std::string& transport = "threads") {
  on_ranks(
      ranks_of(way),
      [&](World& world) {
        const auto mesh = init_device_mesh(torch::kCPU, way.sizes, {"dp", "tp"});
        Spmd spmd(mesh);
        ManyKinds model(seed);
        if (!way.plan.empty()) parallelize_module(*model, mesh, way.plan);
        if (way.sharded) fully_shard(*model, mesh["dp"]);
        body(world, model);
      },
      transport);
}

}  // namespace dtensor::test
