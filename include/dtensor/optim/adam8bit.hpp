// Adam with averages of 8 bits.
#pragma once

#include <dtensor/optim/optimizer.hpp>

#include <torch/arg.h>

#include <tuple>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::optim {

struct Adam8bitOptions : torch::optim::OptimizerCloneableOptions<Adam8bitOptions> {
  using Betas = std::tuple<double, double>;
  Adam8bitOptions(double lr = 1e-3);
  TORCH_ARG(double, lr);
  TORCH_ARG(Betas, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;  // decoupled, as in AdamW
  TORCH_ARG(int64_t, block_size) = 256;
  TORCH_ARG(int64_t, min_size) = 4096;  // smaller parameters have averages of 32 bits

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { this->lr(lr); }
};

// The 256 numbers that the codes stand for, ascending, float: the dynamic tree map, as bitsandbytes.functional.create_dynamic_map makes it.
// Signed numbers are -1 < x <= 1. Unsigned ones are 0 to 1, with one more bit of fraction.
//
// A code has a sign bit, then as many zeros as the decimal exponent says (down to 1e-6), then a one. The remaining bits give the middle of
// one of equal parts of [0.1, 1]. (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016; Dettmers et al., "8-bit
// Optimizers via Block-wise Quantization", 2022, section 1.3 and appendix.)
at::Tensor dynamic_map(bool is_signed);

// AdamW whose averages of gradients and of their squares take 8 bits (Dettmers et al., 2022). They are stored in blocks, as numbers
// relative to the largest of their block. A step decodes them, makes a step of AdamW in float32, and codes the new averages:
//
//   m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,  x = x - lr weight_decay x - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
//
// Takes 2 bytes per element and 8 bytes per block, instead of 8 bytes per element.
//
// A block is block_size consecutive elements of the whole parameter in row-major order, whatever the layout. So a mesh has the numbers of
// one device. Communicates nothing where the ranks' shards end where blocks end (as a rule: rows sharded in multiples of a block). Where a
// block lies on several ranks (sharded columns, uneven ends), they agree on its largest number: 8 bytes per block of these parameters, in
// one all_reduce for every 16 million of their elements.
//
// State: "exp_avg" and "exp_avg_sq", uint8 codes (float32 for small parameters), laid out as the parameter; "exp_avg_max" and
// "exp_avg_sq_max", plain float32, of this rank's blocks in order, or of all blocks where blocks lie on several ranks.
//
// Throws for options out of range, parameters that are not floating-point, and sparse gradients.
class Adam8bit : public Optimizer {
 public:
  explicit Adam8bit(std::vector<torch::optim::OptimizerParamGroup> groups, const Adam8bitOptions& defaults = {});
  explicit Adam8bit(std::vector<at::Tensor> parameters, const Adam8bitOptions& defaults = {});

 private:
  void update() override;
  at::Tensor whole(const std::string& name, const at::Tensor& parameter, const at::Tensor& tensor) const override;
  at::Tensor part(const std::string& name, const at::Tensor& parameter, const at::Tensor& whole) const override;
  int64_t block_size_of(const at::Tensor& parameter) const;
};

}  // namespace dtensor::optim

#pragma GCC visibility pop
