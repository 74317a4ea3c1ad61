// Batch and instance normalization, under every placement: statistics are those of one device.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

// What training leaves in the running statistics is a result too.
Function batch_norm(bool training) {
  return [=](const Tensors& in) {
    const auto weight = in.size() > 1 ? in[1] : at::Tensor(), bias = in.size() > 2 ? in[2] : at::Tensor();
    const auto mean = torch::full({in[0].size(1)}, 0.25), variance = torch::full({in[0].size(1)}, 1.5);
    const auto y = torch::batch_norm(in[0], weight, bias, mean, variance, training, 0.3, 1e-5, false);
    return training ? Tensors{y, mean, variance} : Tensors{y};
  };
}

}  // namespace

TEST_CASE("ops: batch norm", "[ops][normalization]") {
  const auto x = fractions({5, 4, 3}), weight = fractions({4}, 1), bias = fractions({4}, 2);
  check({"batch_norm in training", {x, weight, bias}, batch_norm(true), 1e-4});
  check({"batch_norm in evaluation", {x, weight, bias}, batch_norm(false), 1e-4});
  check({"batch_norm of planes", {fractions({3, 2, 3, 5})}, batch_norm(true), 1e-4});
  check({"batch_norm of rows", {fractions({6, 3}), fractions({3}, 1)}, batch_norm(true), 1e-4});
  check({"batch_norm without running statistics",
         {x, weight, bias},
         [](const Tensors& in) {
           return Tensors{torch::batch_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false)};
         },
         1e-4});
  check({"instance_norm",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{torch::instance_norm(in[0], in[1], in[2], {}, {}, true, 0.1, 1e-5, false)}; },
         1e-4});
  check_over("gloo", {"batch_norm in training", {x, weight, bias}, batch_norm(true), 1e-4});
}

namespace {

// Input, weight, bias, running mean and running variance, as `placements` say; with what it communicates.
void check_running(const std::vector<Placement>& placements, const std::string& result, int64_t collectives) {
  const auto x = fractions({5, 6, 3});
  const Tensors plain{x, fractions({6}, 1), fractions({6}, 2), fractions({6}, 3), fractions({6}, 4).abs()};
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    Tensors inputs, expected;
    for (size_t i = 0; i < plain.size(); ++i)
      inputs.push_back(placed(plain[i], mesh, {placements[i]})), expected.push_back(plain[i].clone());
    const auto run = [](const Tensors& in) { return torch::batch_norm(in[0], in[1], in[2], in[3], in[4], true, 0.3, 1e-5, false); };
    const auto y = run(expected);
    CommDebugMode comm;
    const auto got = run(inputs);
    require(comm.count() == collectives, "test", "expected {} collectives; got\n{}", collectives, comm.str());
    require(str(DTensor(got).placements()) == result, "test", "the result is {}", DTensor(got).layout().str());
    require(full_tensor(got).allclose(y, 1e-4, 1e-4), "test", "results differ");
    for (const int i : {3, 4}) {
      require(DTensor(inputs[i]).placements()[0] == placements[i], "test", "running statistics moved");
      require(full_tensor(inputs[i]).allclose(expected[i], 1e-4, 1e-4), "test", "running statistics differ:\n{}", i);
    }
  }));
}

}  // namespace

TEST_CASE("ops: running statistics of a batch norm stay where they are", "[ops][normalization]") {
  const auto r = replicate(), channels = shard(0);
  check_running({shard(0), r, r, r, r}, "(S(0))", 1);
  check_running({shard(2), r, r, r, r}, "(S(2))", 1);
  check_running({shard(1), channels, channels, channels, channels}, "(S(1))", 0);
  check_running({r, channels, channels, channels, channels}, "(S(1))", 0);
  check_running({shard(1), channels, channels, r, r}, "(S(1))", 2);
  check_running({shard(0), r, r, r, channels}, "(S(1))", 2);
  check_running({shard(0), r, r, channels, strided_shard(0, 2)}, "(R)", 3);
}

TEST_CASE("ops: instance norm with running statistics", "[ops][normalization]") {
  const auto x = fractions({3, 4, 5});
  check({"instance_norm with running statistics",
         {x},
         [](const Tensors& in) {
           const auto mean = torch::full({4}, 0.25), variance = torch::full({4}, 1.5);
           const auto y = torch::instance_norm(in[0], {}, {}, mean, variance, true, 0.3, 1e-5, false);
           return Tensors{y, mean, variance};
         },
         1e-4});
  check_free({"instance norm over samples",
              {x},
              [](const Tensors& in) { return Tensors{torch::instance_norm(in[0], {}, {}, {}, {}, true, 0.1, 1e-5, false)}; },
              1e-4},
             {2}, {{shard(0)}}, {"(S(0))"});
}

TEST_CASE("ops: batch norm in channels-last order", "[ops][normalization]") {
  check({"batch_norm in channels-last order",
         {fractions({3, 2, 4, 3}).contiguous(at::MemoryFormat::ChannelsLast)},
         batch_norm(true),
         1e-4,
         true,
         false});
}

TEST_CASE("ops: batch norms that say what they write", "[ops][normalization]") {
#if __has_include(<ATen/ops/_batch_norm_with_update.h>)
  const auto x = fractions({5, 4, 3}), weight = fractions({4}, 1), bias = fractions({4}, 2);
  const auto statistics = [] { return std::pair(torch::full({4}, 0.25), torch::full({4}, 1.5)); };
  check({"_native_batch_norm_legit",
         {x, weight, bias},
         [=](const Tensors& in) {
           auto [mean, variance] = statistics();
           auto [y, m, r] = at::_native_batch_norm_legit(in[0], in[1], in[2], mean, variance, true, 0.3, 1e-5);
           return Tensors{y, m.detach(), r.detach(), mean, variance};
         },
         1e-4});
  check({"_native_batch_norm_legit without running statistics",
         {x, weight, bias},
         [=](const Tensors& in) {
           auto [y, m, r] = at::_native_batch_norm_legit(in[0], in[1], in[2], true, 0.3, 1e-5);
           return Tensors{y, m.detach(), r.detach()};
         },
         1e-4});
  check({"_batch_norm_with_update",
         {x, weight, bias},
         [=](const Tensors& in) {
           auto [mean, variance] = statistics();
           auto [y, m, r, reserve] = at::_batch_norm_with_update(in[0], in[1], in[2], mean, variance, 0.3, 1e-5);
           return Tensors{y, m.detach(), r.detach(), mean, variance};
         },
         1e-4});
  check({"_batch_norm_with_update_functional",
         {x, weight, bias},
         [=](const Tensors& in) {
           auto [mean, variance] = statistics();
           auto [y, m, r, reserve, new_mean, new_variance] =
               at::_batch_norm_with_update_functional(in[0], in[1], in[2], mean, variance, 0.3, 1e-5);
           return Tensors{y, m, r, new_mean, new_variance};
         },
         1e-4, false});
  check({"_batch_norm_no_update",
         {x, weight, bias},
         [=](const Tensors& in) {
           auto [mean, variance] = statistics();
           return Tensors{std::get<0>(at::_batch_norm_no_update(in[0], in[1], in[2], mean, variance, 0.3, 1e-5))};
         },
         1e-4, false});
#endif
}
