// Random operators: every rank draws the whole tensor from its own generator, which is in the same state on all ranks,
// and keeps its part. So values are those of one device, and generators stay aligned.
#include "ops/family.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>

namespace dtensor::rules {
namespace {

// A fresh tensor of the global shape.
at::Tensor whole_like(const Layout& layout, const at::TensorOptions& options) {
  return at::empty_strided(layout.sizes(), layout.strides(), options);
}

// The operand keeps its placement; it must not be Partial, and other operands are whole.
Candidates keep_first(const Call& call, int64_t mesh_dim, size_t outputs) {
  const auto& now = call.operands[0].placements()[mesh_dim];
  if (!now.is_shard()) return {};
  Candidate candidate{Placements(call.operands.size(), replicate()), Placements(outputs, now)};
  candidate.in[0] = now;
  return {candidate};
}

// self.uniform_(...): all that is read is the shape.
class InPlace final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return keep_first(call, mesh_dim, 1); }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    const auto layout = resolution.in[0];
    if (layout->is_replicated()) return {};
    return [layout](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      const auto whole = whole_like(*layout, self.options());
      local.arg(0) = whole;
      local.call();
      self.copy_(own_part(whole, *layout));
      local.replace({self});
    };
  }
};

// rand_like and its kin draw in place into an empty tensor, as ATen does.
class Like final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto candidates = keep_first(call, mesh_dim, 1);
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (!now.is_partial()) return candidates;
    candidates.push_back({Placements(call.operands.size(), replicate()), {replicate()}});
    candidates.back().in[0] = now;  // its values are not read
    return candidates;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    const auto layout = resolution.in[0]->with(resolution.out[0]);
    const bool normal = call.schema.name() == "aten::randn_like";
    return
        [layout, normal, low_at = call.argument_index("low"), high_at = call.argument_index("high"),
         dtype_at = call.argument_index("dtype"), generator_at = call.argument_index("generator")](LocalCall& local) {
          const auto dtype = local.arg(dtype_at).isNone() ? layout->dtype() : local.arg(dtype_at).toScalarType();
          const auto whole = whole_like(*layout, local.arg(0).toTensor().options().dtype(dtype));
          c10::optional<at::Generator> generator;
          if (generator_at >= 0) generator = local.arg(generator_at).toOptional<at::Generator>();
          if (high_at >= 0) {
            const auto& high = local.arg(high_at);
            whole.random_(low_at < 0 ? 0 : local.arg(low_at).toInt(),
                          high.isTensor() ? high.toTensor().item<int64_t>() : high.toInt(), generator);
          } else if (normal) {
            whole.normal_(0, 1, generator);
          } else {
            whole.uniform_(0, 1, generator);
          }
          local.replace({own_part(whole, *layout)});
        };
  }
};

// native_dropout(input, p, train) -> (output, mask), as ATen's CPU kernel: a mask of bools, then mask and scale.
class Dropout final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return keep_first(call, mesh_dim, 2); }

  std::vector<Sizes> output_sizes(const Call& call) const override {
    const auto sizes = call.operands[0].sizes();
    return {Sizes(sizes.begin(), sizes.end()), Sizes(sizes.begin(), sizes.end())};
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (!call.bool_arg("train", true)) return {};
    const double keep = 1 - call.arg("p").toDouble();
    return [layout = resolution.in[0], keep](LocalCall& local) {
      const auto input = local.arg(0).toTensor();
      const auto whole = whole_like(*layout, input.options().dtype(at::kBool));
      whole.bernoulli_(keep);
      const auto mask = own_part(whole, *layout);
      local.replace({at::mul(input, mask).mul_(keep == 0 ? 0 : 1 / keep), mask});
    };
  }
};

const Register in_place(
    "aten::uniform_ aten::normal_ aten::random_ aten::bernoulli_ aten::exponential_ aten::log_normal_ "
    "aten::geometric_ aten::cauchy_",
    std::make_shared<InPlace>(), "drawn whole on every rank, from equal generators");
const Register like("aten::rand_like aten::randn_like aten::randint_like", std::make_shared<Like>(),
                    "drawn whole on every rank, from equal generators");
const Register dropout("aten::native_dropout", std::make_shared<Dropout>(),
                       "the mask is drawn whole on every rank, from equal generators");
const Register whole("aten::bernoulli aten::normal aten::multinomial aten::poisson aten::binomial", replicated(),
                     "each draw depends on the draws before it and on a tensor of parameters");

}  // namespace
}  // namespace dtensor::rules
