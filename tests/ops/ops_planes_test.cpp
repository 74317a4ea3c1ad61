// Interpolation, padding and shuffling of planes, under every placement.
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

TEST_CASE("ops: interpolation", "[ops][interpolation]") {
  const auto x = fractions({3, 2, 4, 3});
  check({"upsample_nearest2d",
         {x},
         [=](const Tensors& in) {
           return Tensors{at::upsample_nearest2d(in[0], std::vector<int64_t>{7, 5})};
         },
         1e-5});
  check({"upsample_bilinear2d",
         {x},
         [=](const Tensors& in) {
           return Tensors{at::upsample_bilinear2d(in[0], std::vector<int64_t>{7, 5}, false)};
         },
         1e-5});
  check({"upsample_bicubic2d",
         {x},
         [=](const Tensors& in) {
           return Tensors{at::upsample_bicubic2d(in[0], std::vector<int64_t>{7, 5}, true)};
         },
         1e-5});
  check({"upsample_linear1d",
         {fractions({3, 2, 4})},
         [=](const Tensors& in) { return Tensors{at::upsample_linear1d(in[0], std::vector<int64_t>{7}, false)}; },
         1e-5});
  check({"upsample_trilinear3d",
         {fractions({2, 2, 2, 3, 2})},
         [=](const Tensors& in) {
           return Tensors{at::upsample_trilinear3d(in[0], std::vector<int64_t>{3, 5, 4}, false)};
         },
         1e-5});
  check({"upsample_nearest by a factor",
         {x},
         [](const Tensors& in) {
           return Tensors{torch::nn::functional::interpolate(
               in[0], torch::nn::functional::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest))};
         },
         1e-5});
}

TEST_CASE("ops: sampling on a grid", "[ops][interpolation]") {
  check({"grid_sampler_2d",
         {fractions({3, 2, 4, 3}), fractions({3, 2, 5, 2}, 1) / 2},
         [](const Tensors& in) { return Tensors{at::grid_sampler(in[0], in[1], 0, 0, false)}; },
         1e-4});
  check({"grid_sampler_3d",
         {fractions({2, 2, 3, 2, 3}), fractions({2, 2, 3, 2, 3}, 1) / 2},
         [](const Tensors& in) { return Tensors{at::grid_sampler(in[0], in[1], 0, 1, true)}; },
         1e-4});
}

TEST_CASE("ops: padding", "[ops][padding]") {
  const auto x = fractions({3, 2, 4, 5});
  for (const double value : {0.0, 1.5}) {
    check({fmt::format("constant_pad_nd {}", value),
           {x},
           [=](const Tensors& in) {
             return Tensors{at::constant_pad_nd(in[0], {1, 2, 0, 1}, value)};
           },
           1e-6});
  }
  check({"constant_pad_nd that cuts off",
         {x},
         [](const Tensors& in) {
           return Tensors{at::constant_pad_nd(in[0], {-1, 2, 0, 0, 0, 0, 1, -1}, 0)};
         },
         1e-6});
  check({"reflection_pad1d", {fractions({3, 2, 4})}, [](const Tensors& in) { return Tensors{at::reflection_pad1d(in[0], {2, 1})}; }, 1e-5});
  check({"reflection_pad2d", {x}, [](const Tensors& in) { return Tensors{at::reflection_pad2d(in[0], {2, 1, 0, 0})}; }, 1e-5});
  check({"reflection_pad3d",
         {fractions({2, 2, 2, 3, 2})},
         [](const Tensors& in) {
           return Tensors{at::reflection_pad3d(in[0], {1, 1, 0, 2, 1, 0})};
         },
         1e-5});
  check({"replication_pad1d",
         {fractions({3, 2, 4})},
         [](const Tensors& in) {
           return Tensors{at::replication_pad1d(in[0], {2, 1})};
         },
         1e-5});
  check({"replication_pad2d", {x}, [](const Tensors& in) { return Tensors{at::replication_pad2d(in[0], {2, 1, 3, 0})}; }, 1e-5});
  check({"replication_pad3d",
         {fractions({2, 2, 2, 3, 2})},
         [](const Tensors& in) {
           return Tensors{at::replication_pad3d(in[0], {1, 1, 0, 2, 1, 0})};
         },
         1e-5});
  check({"pad",
         {x},
         [](const Tensors& in) { return Tensors{at::pad(in[0], {1, 1, 1, 1}, "reflect"), at::pad(in[0], {1, 1, 1, 1}, "circular")}; },
         1e-5});
}

TEST_CASE("ops: shuffling of planes", "[ops][shuffle]") {
  check({"pixel_shuffle", {fractions({2, 12, 3, 2})}, [](const Tensors& in) { return Tensors{at::pixel_shuffle(in[0], 2)}; }, 1e-6});
  check({"pixel_unshuffle", {fractions({2, 3, 6, 4})}, [](const Tensors& in) { return Tensors{at::pixel_unshuffle(in[0], 2)}; }, 1e-6});
  check({"channel_shuffle",
         {fractions({2, 6, 3, 4})},
         [](const Tensors& in) { return Tensors{at::channel_shuffle(in[0], 3)}; },
         1e-6,
         false});
  check({"im2col",
         {fractions({3, 3, 4, 5})},
         [](const Tensors& in) {
           return Tensors{at::im2col(in[0], {2, 3}, {1, 1}, {1, 0}, {2, 1})};
         },
         1e-5});
  check({"col2im",
         {fractions({3, 18, 9})},
         [](const Tensors& in) { return Tensors{at::col2im(in[0], std::vector<int64_t>{4, 5}, {2, 3}, {1, 1}, {1, 0}, {2, 1})}; },
         1e-5});
  check_free({"pixel_shuffle of rows", {fractions({2, 12, 3, 2})}, [](const Tensors& in) { return Tensors{at::pixel_shuffle(in[0], 2)}; }},
             {3}, {{shard(2)}}, {"(S(2))"});
}

TEST_CASE("ops: planes in channels-last order", "[ops][pooling]") {
  const auto x = fractions({3, 4, 4, 6}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto same = [&](const std::string& name, const std::function<at::Tensor(const at::Tensor&)>& run) {
    check({name, {x}, [run](const Tensors& in) { return Tensors{run(in[0])}; }, 1e-5, true, false});
  };
  same("adaptive_avg_pool2d", [](const at::Tensor& t) { return at::adaptive_avg_pool2d(t, {2, 3}); });
  same("avg_pool2d", [](const at::Tensor& t) { return at::avg_pool2d(t, {3, 3}, {1, 1}, {1, 1}); });
  same("max_pool2d", [](const at::Tensor& t) { return at::max_pool2d(t, {3, 3}, {1, 1}, {1, 1}); });
  same("upsample_bilinear2d", [](const at::Tensor& t) { return at::upsample_bilinear2d(t, std::vector<int64_t>{8, 12}, false); });
  same("reflection_pad2d", [](const at::Tensor& t) { return at::reflection_pad2d(t, {1, 1, 1, 1}); });
  same("replication_pad2d", [](const at::Tensor& t) { return at::replication_pad2d(t, {1, 1, 1, 1}); });
  same("constant_pad_nd", [](const at::Tensor& t) { return at::constant_pad_nd(t, {1, 1, 1, 1}); });
  same("pixel_shuffle", [](const at::Tensor& t) { return at::pixel_shuffle(t, 2); });
  same("pixel_unshuffle", [](const at::Tensor& t) { return at::pixel_unshuffle(t, 2); });
  same("im2col", [](const at::Tensor& t) { return at::im2col(t, {2, 2}, {1, 1}, {0, 0}, {1, 1}); });
}
