// Losses, under every placement.
#include "op_check.hpp"

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
