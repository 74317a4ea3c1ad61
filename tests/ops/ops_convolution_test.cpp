// Convolutions and their gradients, under every placement.
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr double kTolerance = 1e-4;
using Ints = std::vector<int64_t>;

// The kernel's arguments; a list has a number for each position.
struct Arguments {
  Ints stride, padding, dilation;
  bool transposed = false;
  Ints output_padding = {};
  int64_t groups = 1;
};

Function convolution(Arguments a) {
  if (a.output_padding.empty()) a.output_padding = Ints(a.stride.size(), 0);
  return [a](const Tensors& in) {
    const auto bias = in.size() > 2 ? in[2] : at::Tensor();
    return Tensors{at::convolution(in[0], in[1], bias, a.stride, a.padding, a.dilation, a.transposed, a.output_padding, a.groups)};
  };
}

Function transposed(Ints stride, Ints padding, Ints dilation, Ints output_padding, int64_t groups = 1) {
  return convolution({stride, padding, dilation, true, output_padding, groups});
}

// What runs forward and backward communicate, on a mesh of three.
std::string traffic(const OpCase& op, const std::vector<Placement>& inputs) {
  std::string text;
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    Tensors tensors;
    for (size_t i = 0; i < inputs.size(); ++i) tensors.push_back(placed(op.inputs[i], mesh, {inputs[i]}).detach().requires_grad_());
    CommDebugMode comm;
    auto y = op.run(tensors)[0];
    const auto forward = comm.str();
    const auto first = comm.count(), moved = comm.count(comm::Collective::all_to_all);
    y.backward(torch::ones_like(y));
    for (const auto& tensor : tensors) DTensor(tensor.grad()).to_local();
    if (mesh.coordinate(0) == 0) {
      text = fmt::format("{} of {} forward, {} of {} backward, {}", moved, first, comm.count(comm::Collective::all_to_all) - moved,
                         comm.count() - first, str(DTensor(y).placements()));
    }
  });
  return text;
}

}  // namespace

TEST_CASE("ops: convolution", "[ops][convolution]") {
  const auto x = fractions({3, 4, 7, 5}), weight = fractions({5, 4, 3, 3}, 1), bias = fractions({5}, 2);
  check({"conv2d", {x, weight, bias}, convolution({{1, 1}, {1, 1}, {1, 1}}), kTolerance});
  check({"conv2d without padding", {x, weight}, convolution({{1, 1}, {0, 0}, {1, 1}}), kTolerance});
  check({"conv2d with strides", {x, weight, bias}, convolution({{2, 3}, {1, 2}, {1, 1}}), kTolerance});
  check({"conv2d with dilation", {x, weight, bias}, convolution({{1, 2}, {2, 1}, {2, 2}}), kTolerance});
  check({"conv2d in double", {x.to(torch::kDouble), weight.to(torch::kDouble), bias.to(torch::kDouble)},
         convolution({{1, 1}, {1, 1}, {1, 1}}), 1e-12});
  check({"conv2d of same size",
         {x, weight},
         [](const Tensors& in) { return Tensors{torch::conv2d(in[0], in[1], {}, 1, "same")}; },
         kTolerance});
  check({"conv2d of a column", {fractions({1, 2, 3, 1}), fractions({2, 2, 3, 3}, 1)}, convolution({{1, 1}, {1, 1}, {1, 1}}), kTolerance});
  check({"conv2d of one sample", {x[0], weight, bias}, [](const Tensors& in) { return Tensors{torch::conv2d(in[0], in[1], in[2])}; },
         kTolerance});
  check({"conv3d",
         {fractions({2, 2, 3, 4, 3}), fractions({3, 2, 2, 3, 1}, 1), fractions({3}, 2)},
         convolution({{1, 2, 1}, {1, 1, 0}, {1, 1, 1}}), kTolerance});
}

TEST_CASE("ops: convolution along one position", "[ops][convolution]") {
  const auto x = fractions({2, 3, 11}), weight = fractions({4, 3, 3}, 1), bias = fractions({4}, 2);
  for (const int64_t stride : {1, 2, 4}) {
    for (const int64_t padding : {0, 1, 6}) {
      for (const int64_t dilation : {1, 3}) {
        check({fmt::format("conv1d {} {} {}", stride, padding, dilation), {x, weight, bias},
               convolution({{stride}, {padding}, {dilation}}), kTolerance});
      }
    }
  }
  check({"conv1d with a long kernel", {fractions({2, 1, 5}), fractions({2, 1, 9}, 1)}, convolution({{1}, {4}, {1}}), kTolerance});
  check({"conv1d of points", {x, fractions({4, 3, 1}, 1)}, convolution({{1}, {0}, {1}}), kTolerance});
  check({"conv1d with steps over inputs", {x, fractions({4, 3, 1}, 1)}, convolution({{3}, {0}, {1}}), kTolerance});
  check({"conv1d to one output", {x, fractions({4, 3, 11}, 1)}, convolution({{1}, {0}, {1}}), kTolerance});
  check_over("gloo", {"conv1d over gloo", {x, weight, bias}, convolution({{2}, {1}, {1}}), kTolerance});
}

TEST_CASE("ops: transposed convolution", "[ops][convolution]") {
  const auto x = fractions({2, 3, 5}), weight = fractions({3, 4, 3}, 1), bias = fractions({4}, 2);
  check({"conv_transpose1d", {x, weight, bias}, transposed({1}, {0}, {1}, {0}), kTolerance});
  check({"conv_transpose1d with strides", {x, weight, bias}, transposed({2}, {1}, {1}, {1}), kTolerance});
  check({"conv_transpose1d with gaps", {x, weight}, transposed({4}, {0}, {1}, {2}), kTolerance});
  check({"conv_transpose1d with dilation", {x, weight, bias}, transposed({2}, {3}, {3}, {0}), kTolerance});
  check({"conv_transpose1d with groups", {fractions({2, 6, 5}), fractions({6, 2, 3}, 1), fractions({6}, 2)},
         transposed({2}, {1}, {1}, {1}, 3), kTolerance});
  check({"conv_transpose2d",
         {fractions({2, 2, 4, 3}), fractions({2, 3, 3, 2}, 1), fractions({3}, 2)},
         transposed({2, 1}, {1, 0}, {1, 2}, {1, 0}), kTolerance});
  check({"conv_transpose2d of a column",
         {fractions({1, 2, 3, 1}), fractions({2, 1, 3, 2}, 1)},
         transposed({2, 1}, {1, 0}, {1, 1}, {0, 0}), kTolerance});
  check_over("gloo", {"conv_transpose1d over gloo", {x, weight, bias}, transposed({2}, {1}, {1}, {1}), kTolerance});
}

TEST_CASE("ops: convolution in groups", "[ops][convolution]") {
  const auto x = fractions({2, 6, 5});
  check({"three groups", {x, fractions({9, 2, 3}, 1), fractions({9}, 2)}, convolution({{1}, {1}, {1}, false, {}, 3}), kTolerance});
  check({"depthwise", {x, fractions({6, 1, 3}, 1), fractions({6}, 2)}, convolution({{1}, {1}, {1}, false, {}, 6}), kTolerance});
  check({"depthwise with two filters each", {x, fractions({12, 1, 3}, 1)}, convolution({{2}, {1}, {1}, false, {}, 6}), kTolerance});
  check_free({"depthwise over channels", {x, fractions({6, 1, 3}, 1), fractions({6}, 2)},
              convolution({{1}, {1}, {1}, false, {}, 6}), kTolerance},
             {3}, {{shard(1)}, {shard(0)}, {shard(0)}}, {"(S(1))"});
  check_free({"whole groups", {x, fractions({9, 2, 3}, 1), fractions({9}, 2)}, convolution({{1}, {1}, {1}, false, {}, 3}), kTolerance},
             {2}, {{strided_shard(1, 1, 2)}, {strided_shard(0, 1, 3)}, {strided_shard(0, 1, 3)}}, {"(S(1, unit=3))"});
}

TEST_CASE("ops: gradients of a convolution that are not asked for", "[ops][convolution]") {
  const auto x = fractions({3, 4, 6}), weight = fractions({5, 4, 3}, 1);
  for (int bits = 1; bits < 8; ++bits) {
    const std::array<bool, 3> mask{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
    check({fmt::format("convolution_backward {}", bits),
           {fractions({3, 5, 6}, 2), x, weight},
           [=](const Tensors& in) {
             const at::OptionalIntArrayRef none;
             auto [dx, dw, db] = at::convolution_backward(in[0], in[1], in[2], none, {1}, {1}, {1}, false, {0}, 1, mask);
             Tensors gradients{dx, dw, db};
             for (int i = 0; i < 3; ++i) {
               if (mask[i]) continue;
               require(!is_dtensor(in[0]) || !gradients[i].defined(), "test", "gradient {} is there unasked", i);
               gradients[i] = at::Tensor();
             }
             return gradients;
           },
           kTolerance, false});
  }
}

TEST_CASE("ops: what a convolution communicates", "[ops][convolution]") {
  const auto x = fractions({6, 3, 9, 8}), weight = fractions({6, 3, 3, 3}, 1), bias = fractions({6}, 2);
  const OpCase conv{"conv", {x, weight, bias}, convolution({{1, 1}, {1, 1}, {1, 1}}), kTolerance};
  const auto r = Placements{replicate()};
  check_free(conv, {3}, {{shard(0)}, r, r}, {"(S(0))"});
  check_free(conv, {3}, {r, {shard(0)}, {shard(0)}}, {"(S(1))"});
  check_free(conv, {3}, {{shard(1)}, {shard(1)}, r}, {"(P(sum))"});
  check_free({"points", {x, fractions({6, 3, 1, 1}, 1)}, convolution({{1, 1}, {0, 0}, {1, 1}}), kTolerance}, {3}, {{shard(2)}, r},
             {"(S(2))"});
  // Rows: a halo forward; backward the same halo, and one of gradients. The weight's and the bias's gradients are summed, in one.
  CHECK(traffic(conv, {shard(2), replicate(), replicate()}) == "1 of 1 forward, 2 of 3 backward, (S(2))");
  CHECK(traffic(conv, {shard(0), replicate(), replicate()}) == "0 of 0 forward, 0 of 1 backward, (S(0))");
}

TEST_CASE("ops: other names of convolutions", "[ops][convolution]") {
  const auto x = fractions({2, 3, 5, 4}), weight = fractions({4, 3, 3, 2}, 1), bias = fractions({4}, 2);
  check({"_convolution",
         {x, weight, bias},
         [](const Tensors& in) {
           return Tensors{at::_convolution(in[0], in[1], in[2], {1, 2}, {1, 0}, {1, 1}, false, {0, 0}, 1, false, false, false, false)};
         },
         kTolerance, false});
  check({"slow_conv_dilated2d",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{at::slow_conv_dilated2d(in[0], in[1], {3, 2}, in[2], {1, 2}, {1, 0}, {1, 2})}; },
         kTolerance});
  check({"slow_conv_transpose2d",
         {x, fractions({3, 4, 3, 2}, 1), bias},
         [](const Tensors& in) {
           return Tensors{at::slow_conv_transpose2d(in[0], in[1], {3, 2}, in[2], {2, 2}, {1, 0}, {1, 0}, {1, 2})};
         },
         kTolerance});
  check({"thnn_conv2d",
         {x, weight, bias},
         [](const Tensors& in) { return Tensors{at::thnn_conv2d(in[0], in[1], {3, 2}, in[2], {1, 2}, {1, 0})}; },
         kTolerance});
  check({"slow_conv3d",
         {fractions({2, 2, 3, 4, 3}), fractions({3, 2, 2, 3, 1}, 1), fractions({3}, 2)},
         [](const Tensors& in) { return Tensors{at::slow_conv3d(in[0], in[1], {2, 3, 1}, in[2], {1, 2, 1}, {1, 1, 0})}; },
         kTolerance});
}

TEST_CASE("ops: convolution in channels-last order", "[ops][convolution]") {
  const auto last = [](const at::Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); };
  const auto x = last(fractions({2, 3, 5, 4})), weight = fractions({4, 3, 3, 2}, 1), bias = fractions({4}, 2);
  check({"both", {x, last(weight), bias}, convolution({{1, 2}, {1, 0}, {1, 1}}), kTolerance, true, false});
  check({"the input", {x, weight, bias}, convolution({{1, 2}, {1, 0}, {1, 1}}), kTolerance, true, false});
}

TEST_CASE("ops: second derivatives", "[ops][convolution]") {
  check({"mm twice",
         {fractions({4, 3}), fractions({3, 2}, 1)},
         [](const Tensors& in) {
           if (!in[0].requires_grad()) return Tensors{};
           return torch::autograd::grad({in[0].mm(in[1]).square().sum()}, {in[0], in[1]}, {}, true, true);
         },
         1e-3});
  check({"conv1d twice",
         {fractions({2, 3, 5}), fractions({4, 3, 3}, 1), fractions({4}, 2)},
         [](const Tensors& in) {
           if (!in[0].requires_grad()) return Tensors{};
           const auto y = torch::conv1d(in[0], in[1], in[2], 2, 1).square().sum();
           return torch::autograd::grad({y}, {in[0], in[1]}, {}, true, true);
         },
         1e-3});
}

TEST_CASE("ops: convolutions that make no sense", "[ops][convolution]") {
  const auto refused = [](const at::Tensor& x, const at::Tensor& weight, Ints stride, Ints padding) {
    CHECK_THROWS(torch::conv1d(x, weight, {}, stride, padding));
    CHECK_THROWS(on_mesh({2}, [&](const DeviceMesh& mesh) {
      const auto placed_x = placed(x, mesh, {shard(x.dim() - 1)}), placed_weight = placed(weight, mesh, {replicate()});
      torch::conv1d(placed_x, placed_weight, {}, stride, padding);
    }));
  };
  const auto x = fractions({2, 3, 5}), weight = fractions({4, 3, 3}, 1);
  refused(x, weight, {0}, {0});
  refused(x, weight, {1}, {-1});
  refused(x, fractions({4, 3, 6}), {1}, {0});
  refused(x, fractions({4, 2, 3}), {1}, {0});
  refused(fractions({5}), weight, {1}, {0});
}
