// Losses, under every placement.
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/base/compat.hpp>

#include <limits>

using namespace dtensor;
using namespace dtensor::test;
namespace F = torch::nn::functional;

TEST_CASE("ops: cross entropy", "[ops][loss]") {
  const auto x = fractions({7, 5}), weight = fractions({5}, 3).abs();
  auto target = indices({7}, 5);
  target[2] = -100;
  const auto loss = [](at::Reduction::Reduction reduction) {
    return [reduction](const Tensors& in) {
      return Tensors{at::cross_entropy_loss(in[0], in[1], in.size() > 2 ? in[2] : at::Tensor(), reduction)};
    };
  };
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    check({fmt::format("cross_entropy {}", static_cast<int>(reduction)), {x, target}, loss(reduction), 1e-5});
    check({fmt::format("weighted {}", static_cast<int>(reduction)),
           {x, target, weight},
           [&](const Tensors& in) {
             return Tensors{at::nll_loss(in[0].log_softmax(1), in[1], in[2].detach(), reduction)};
           },
           1e-5});
  }
  check({"margins of fewer rows than ranks",
         {fractions({2, 5}), indices({2}, 5)},
         [](const Tensors& in) {
           return Tensors{at::multi_margin_loss(in[0], in[1]), at::multi_margin_loss(in[0], in[1], 1, 1, {}, at::Reduction::Sum)};
         },
         1e-6});
  check({"smoothed labels",
         {x, target},
         [](const Tensors& in) {
           return Tensors{F::cross_entropy(in[0], in[1], F::CrossEntropyFuncOptions().label_smoothing(0.1))};
         },
         1e-5});
  check({"flattened",
         {fractions({3, 4, 5}), indices({3, 4}, 5)},
         [](const Tensors& in) {
           return Tensors{F::cross_entropy(in[0].view({-1, 5}), in[1].view({-1}))};
         },
         1e-5});
  check({"classes in the middle",
         {fractions({3, 5, 2, 2}), indices({3, 2, 2}, 5)},
         [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
         1e-5});
}

TEST_CASE("ops: pointwise losses", "[ops][loss]") {
  const auto x = fractions({5, 3}), y = fractions({5, 3}, 1);
  const auto probability = x.sigmoid(), label = (y > 0).to(torch::kFloat);
  for (const int64_t r : {0, 1, 2}) {
    check({fmt::format("mse {}", r),
           {x, y},
           [r](const Tensors& in) { return Tensors{at::mse_loss(in[0], in[1], r)}; },
           1e-5});
    check({fmt::format("l1 {}", r),
           {x, y},
           [r](const Tensors& in) { return Tensors{at::l1_loss(in[0], in[1], r)}; },
           1e-5});
    check({fmt::format("smooth_l1 {}", r),
           {x, y},
           [r](const Tensors& in) { return Tensors{at::smooth_l1_loss(in[0], in[1], r)}; },
           1e-5});
    check({fmt::format("huber {}", r),
           {x, y},
           [r](const Tensors& in) { return Tensors{at::huber_loss(in[0], in[1], r, 0.5)}; },
           1e-5});
    check({fmt::format("bce {}", r),
           {probability, label},
           [r](const Tensors& in) { return Tensors{at::binary_cross_entropy(in[0], in[1].detach(), {}, r)}; },
           1e-4});
    check({fmt::format("bce with logits {}", r),
           {x, label},
           [r](const Tensors& in) {
             return Tensors{at::binary_cross_entropy_with_logits(in[0], in[1].detach(), {}, {}, r)};
           },
           1e-4});
    check({fmt::format("operands of two dtypes {}", r),
           {x, label.to(torch::kDouble)},
           [r](const Tensors& in) {
             return Tensors{at::binary_cross_entropy_with_logits(in[0], in[1].detach(), {}, {}, r)};
           },
           1e-4});
  }
}

TEST_CASE("ops: what a loss on a cut batch communicates", "[ops][loss]") {
  const auto x = fractions({7, 5});
  const auto target = indices({7}, 5);
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    auto logits = placed(x, mesh, {shard(0)}).detach().requires_grad_();
    const auto labels = placed(target, mesh, {shard(0)});
    CommDebugMode comm;
    auto loss = F::cross_entropy(logits, labels);
    loss.backward();
    require(comm.count() == 1 && comm.count(comm::Collective::all_reduce) == 1 && comm.bytes() == 4, "test",
            "expected one reduction of the total weight; got\n{}", comm.str());
    require(str(DTensor(loss).placements()) == "(P(sum))", "test", "the loss is {}", DTensor(loss).layout().str());
  }));
}

TEST_CASE("ops: softmax along a cut dim", "[ops][loss]") {
  const auto masked = [](at::Tensor x) {
    x[0].fill_(-std::numeric_limits<float>::infinity());
    x[1].slice(0, 0, 30).fill_(-std::numeric_limits<float>::infinity());
    return x;
  };
  for (const int64_t width : {41, 6, 2}) {
    check({fmt::format("softmax {}", width), {fractions({3, width})}, [](const Tensors& in) { return Tensors{in[0].softmax(1)}; }, 1e-5});
    check({fmt::format("log_softmax {}", width),
           {fractions({3, width})},
           [](const Tensors& in) { return Tensors{in[0].log_softmax(-1)}; },
           1e-5});
  }
  check({"rows that are all masked",
         {masked(fractions({4, 41}))},
         [](const Tensors& in) { return Tensors{in[0].softmax(1), in[0].log_softmax(1)}; },
         1e-5, false, false});
#if DTENSOR_TORCH_AT_LEAST(2, 6)
  check({"safe softmax", {masked(fractions({4, 41}))}, [](const Tensors& in) { return Tensors{at::_safe_softmax(in[0], 1)}; }, 1e-5,
         true, false});
#endif
  check({"half precision",
         {fractions({3, 41})},
         [](const Tensors& in) { return Tensors{in[0].to(torch::kBFloat16).softmax(1).to(torch::kFloat)}; },
         1e-2});
  check({"a vector", {fractions({61})}, [](const Tensors& in) { return Tensors{in[0].log_softmax(0)}; }, 1e-5});
  check({"in the middle", {fractions({2, 61, 3})}, [](const Tensors& in) { return Tensors{in[0].log_softmax(1)}; }, 1e-5});
}

TEST_CASE("ops: cross entropy over cut classes", "[ops][loss]") {
  const auto x = fractions({6, 61}), weight = fractions({61}, 3).abs();
  auto target = indices({6}, 61);
  target[2] = 7;  // a class that is ignored
  const auto probabilities = fractions({6, 61}, 2).softmax(1);
  for (const auto reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const auto name = [&](const char* what) { return fmt::format("{} {}", what, static_cast<int>(reduction)); };
    for (const int64_t ignored : {-100, 7}) {
      check({name("cross entropy"),
             {x, target},
             [=](const Tensors& in) { return Tensors{at::cross_entropy_loss(in[0], in[1], {}, reduction, ignored)}; },
             1e-5});
      check({name("weighted"),
             {x, target, weight},
             [=](const Tensors& in) { return Tensors{at::cross_entropy_loss(in[0], in[1], in[2].detach(), reduction, ignored)}; },
             1e-5});
    }
    check({name("smoothed"),
           {x, target},
           [=](const Tensors& in) { return Tensors{at::cross_entropy_loss(in[0], in[1], {}, reduction, 7, 0.1)}; },
           1e-5});
    check({name("probabilities"),
           {x, probabilities},
           [=](const Tensors& in) { return Tensors{at::cross_entropy_loss(in[0], in[1].detach(), {}, reduction, -100, 0.1)}; },
           1e-5});
  }
  check({"images",
         {fractions({2, 61, 2, 2}), indices({2, 2, 2}, 61)},
         [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
         1e-5});
  check({"one sample",
         {fractions({61}), indices({1}, 61).select(0, 0)},
         [](const Tensors& in) { return Tensors{F::cross_entropy(in[0], in[1])}; },
         1e-5});
}

TEST_CASE("ops: strided and repeated cuts of classes", "[ops][loss]") {
  const auto x = fractions({6, 60});
  const auto target = indices({6}, 60);
  const auto run = [&](at::Tensor logits, const at::Tensor& labels) {
    logits = logits.detach().requires_grad_();
    auto loss = F::cross_entropy(logits, labels);
    loss.backward();
    return Tensors{loss.detach(), logits.grad()};
  };
  const auto expected = run(x.clone(), target);
  const std::vector<Placements> placements{{shard(1), shard(1)}, {strided_shard(1, 3), shard(1)}, {shard(0), strided_shard(1, 4)},
                                           {strided_shard(1, 1, 5), replicate()}, {shard(1), shard(0)}};
  CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    for (const auto& placement : placements) {
      CommDebugMode comm;
      const auto logits = placed(x, mesh, placement);
      const auto got = run(logits, target);
      require(comm.count(comm::Collective::all_gather) + comm.count(comm::Collective::all_to_all) == 0, "test", "gathered:\n{}",
              comm.str());
      for (size_t i = 0; i < got.size(); ++i) {
        require(full_tensor(got[i]).allclose(expected[i], 1e-5, 1e-6), "test", "{} differs under {}", i, str(placement));
      }
      require(DTensor(got[1]).placements() == DTensor(logits).placements(), "test", "the gradient lies as {}",
              DTensor(got[1]).layout().str());
    }
  }));
}

TEST_CASE("ops: what a loss over cut classes communicates", "[ops][loss]") {
  const auto x = torch::randn({1024, 50000}).mul_(0.1);
  const auto target = indices({1024}, 50000);
  CHECK_NOTHROW(on_mesh({4}, [&](const DeviceMesh& mesh) {
    const auto labels = placed(target, mesh, {replicate()});
    for (const bool mean : {true, false}) {
      auto logits = placed(x, mesh, {shard(1)}).detach().requires_grad_();
      CommDebugMode comm;
      const auto loss = at::cross_entropy_loss(logits, labels, {}, mean ? at::Reduction::Mean : at::Reduction::Sum);
      const int64_t numbers = mean ? 1 : 0;  // the maximum and the sum of each row; the total weight
      require(comm.count() == 2 + numbers && comm.count(comm::Collective::all_reduce) == comm.count() &&
                  comm.bytes() == 4 * (2 * 1024 + numbers), "test", "forward:\n{}", comm.str());
      require(str(DTensor(loss).placements()) == "(P(sum))", "test", "the loss is {}", DTensor(loss).layout().str());
      comm.reset();
      loss.backward();
      require(comm.count() == 1 && comm.count(comm::Collective::all_reduce) == 1 && comm.bytes() == 4 * 1024, "test", "backward:\n{}",
              comm.str());
      require(str(DTensor(logits.grad()).placements()) == "(S(1))", "test", "the gradient is {}", DTensor(logits.grad()).layout().str());
    }
  }));
}

TEST_CASE("ops: targets out of range over cut classes", "[ops][loss]") {
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    const auto logits = placed(fractions({4, 61}), mesh, {shard(1)});
    for (const int64_t wrong : {61, -1}) {
      auto target = indices({4}, 61);
      target[1] = wrong;
      const auto text = words_of([&] { F::cross_entropy(logits, placed(target, mesh, {replicate()})); });
      require(text.find(fmt::format("Target {} is out of bounds.", wrong)) != std::string::npos, "test", "got '{}'", text);
    }
  }));
}

TEST_CASE("ops: a target out of range on one rank is an error on all", "[ops][loss]") {
  for (const auto& placements : std::vector<Placements>{{shard(0), replicate()}, {shard(0), shard(1)}, {shard(0), shard(0)}}) {
    CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
      const auto logits = placed(fractions({8, 61}), mesh, placements);
      auto target = indices({8}, 61);
      target[7] = 61;  // the last rank's
      const auto targets = placed(target, mesh, {shard(0), placements[1].is_shard(0) ? shard(0) : replicate()});
      const auto text = words_of([&] { F::cross_entropy(logits, targets); });
      require(text.find("out of bounds") != std::string::npos, "test", "got '{}'", text);
    }));
  }
}

TEST_CASE("ops: ranks without classes", "[ops][loss]") {
  auto x = fractions({3, 2}).mul(3);
  x[2].fill_(-std::numeric_limits<float>::infinity());
  const auto target = indices({3}, 2);
  const auto run = [](at::Tensor logits, const at::Tensor& labels) {
    logits = logits.detach().requires_grad_();
    Tensors results{logits.softmax(1), logits.log_softmax(1), at::nll_loss(logits.log_softmax(1).slice(0, 0, 2), labels.slice(0, 0, 2))};
    (results[0].slice(0, 0, 2).square().sum() + results[2]).backward();
    results.push_back(logits.grad().slice(0, 0, 2));
    return results;
  };
  const auto expected = run(x.clone(), target);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
      set_comm_cost("", {.latency = 20e-6, .bandwidth = 1e18, .copy_bandwidth = 1e18});  // so that no small tensor is worth a move
      Spmd spmd(mesh);
      const auto logits = placed(x, mesh, Placements(mesh.ndim(), shard(1)));
      CommDebugMode comm;
      const auto got = run(logits, target);
      require(comm.count(comm::Collective::all_gather) + comm.count(comm::Collective::all_to_all) == 0, "test", "gathered:\n{}",
              comm.str());
      for (size_t i = 0; i < got.size(); ++i) {
        require(full_tensor(got[i]).allclose(expected[i], 1e-5, 1e-6, true), "test", "result {} differs", i);
      }
    }));
  }
}

TEST_CASE("ops: ctc loss", "[ops][loss]") {
  const auto scores = fractions({7, 3, 5}), targets = indices({3, 2}, 4) + 1;
  const auto lengths = torch::tensor({7, 6, 7}, torch::kLong), target_lengths = torch::tensor({2, 1, 2}, torch::kLong);
  for (const int64_t reduction : {0, 1, 2}) {
    check({fmt::format("ctc_loss {}", reduction),
           {scores, targets},
           [=](const Tensors& in) {
             return Tensors{at::ctc_loss(in[0].log_softmax(2), in[1], {7, 6, 7}, {2, 1, 2}, 0, reduction, true)};
           },
           1e-5});
    check({fmt::format("ctc_loss of one sequence {}", reduction),
           {fractions({7, 5}), targets[0]},
           [=](const Tensors& in) { return Tensors{at::ctc_loss(in[0].log_softmax(1), in[1].to(torch::kInt), {7}, {2}, 0, reduction)}; },
           1e-5});
    check({fmt::format("ctc_loss of lengths {}", reduction),
           {scores, targets, lengths, target_lengths},
           [=](const Tensors& in) {
             return Tensors{at::ctc_loss(in[0].log_softmax(2), in[1], in[2], in[3], 0, reduction)};
           },
           1e-5});
  }
}

TEST_CASE("ops: targets of bytes over cut classes", "[ops][loss]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto plain = fractions({4, 600}).log_softmax(1);
    const auto labels = torch::tensor({0, 255, 2, 4}, torch::kByte);
    const auto x = distribute_tensor(plain, mesh, {shard(1)}).tensor();
    pin(x);
    const auto loss = torch::nll_loss(x, distribute_tensor(labels, mesh, {replicate()}).tensor());
    require(full_tensor(loss).allclose(torch::nll_loss(plain, labels)), "test", "{}", full_tensor(loss).item<double>());
  }));
}
