// Random operators: a rank draws its part of what one device draws, and its generator goes on as that of one device does.
#include "ops/family.hpp"

#include "rng/check.hpp"
#include "rng/counter_generator.hpp"
#include "rng/cuda/draw.hpp"
#include "rng/device_generator.hpp"
#include "rng/own_part.hpp"

#include <dtensor/error.hpp>

#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

namespace dtensor::rules {
namespace {

using rng::Draw;
using rng::draw_of;

// What the call draws from. Operators that take a generator have been given it, and it has been compared, where they were called.
at::Generator generator_of(LocalCall& local, const Layout& layout) {
  const auto at = local.op.schema().argumentIndexWithName("generator");
  if (at && !local.arg(*at).isNone()) return local.arg(*at).toGenerator();
  const auto generator = rng::generator_for(layout.mesh().world(), local.arg(0).toTensor().device());
  if (!at) rng::check_draw(local.op.schema().name(), layout.mesh(), layout.placements(), generator);
  return generator;
}

int64_t number(LocalCall& local, const char* name) {
  const auto& value = local.arg(*local.op.schema().argumentIndexWithName(name));
  return value.isTensor() ? value.toTensor().item<int64_t>() : value.toInt();
}

// How the first output lies.
LayoutPtr drawn_layout(const Call& call, const Resolution& resolution) {
  const auto& meta = call.outputs.at(0);
  return Layout::get(call.mesh, resolution.out[0], meta.sizes, meta.strides, meta.dtype);
}

c10::OperatorHandle find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// uniform_(0, 1)
Draw uniform(const at::TensorOptions& options) {
  static const auto op = find("aten::uniform_", "");
  return draw_of(op, {0.0, 1.0}, options);
}

Draw normal_of(double std, const at::TensorOptions& options) {
  static const auto op = find("aten::normal_", "");
  return draw_of(op, {0.0, std}, options);
}

Draw coins(double p, const at::TensorOptions& options) {
  static const auto op = find("aten::bernoulli_", "float");
  return draw_of(op, {p}, options);
}

Draw integers(int64_t low, int64_t high, const at::TensorOptions& options) {
  static const auto op = find("aten::random_", "from");
  return draw_of(op, {low, high}, options);
}

// Operands of one shape are cut alike, of which the first is not Partial. Those of other shapes are whole.
Candidates cut_alike(const Call& call, int64_t mesh_dim, size_t outputs = 1) {
  const auto& now = call.operands[0].placements()[mesh_dim];
  const auto& layout = *call.operands[0].layout;
  const bool row_major = layout.strides() == c10::IntArrayRef(contiguous_strides(layout.sizes()));
  if (!now.is_shard() && !(now.is_flat() && row_major)) return {};
  Candidate candidate{{}, Placements(outputs, now)};
  for (const auto& operand : call.operands) {
    candidate.in.push_back(operand.sizes() == call.operands[0].sizes() ? now : replicate());
  }
  return {candidate};
}

// self.uniform_(...): all that is read is the shape.
struct InPlace final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return cut_alike(call, mesh_dim); }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    const auto layout = resolution.in[0];
    if (layout->is_replicated()) return {};
    return [layout](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      const c10::Stack arguments(local.stack.begin() + static_cast<int64_t>(local.begin), local.stack.end());
      self.copy_(rng::draw_own_part(*layout, {local.op, arguments, self.options()}, generator_of(local, *layout)));
      local.replace({self});
    };
  }
};

// Those that draw in place into an empty tensor like the first operand, as ATen does.
class Like final : public Rule {
 public:
  explicit Like(Draw (*draw)(LocalCall&, const at::TensorOptions&)) : draw_(draw) {}

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    auto candidates = cut_alike(call, mesh_dim);
    const auto& now = call.operands[0].placements()[mesh_dim];
    if (!now.is_partial()) return candidates;
    candidates.push_back({Placements(call.operands.size(), replicate()), {replicate()}});
    candidates.back().in[0] = now;  // its values are not read
    return candidates;
  }

  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    return [this, layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto options = local.arg(0).toTensor().options().dtype(layout->dtype());
      local.replace({rng::draw_own_part(*layout, draw_(local, options), generator_of(local, *layout))});
    };
  }

 private:
  Draw (*draw_)(LocalCall&, const at::TensorOptions&);
};

// A mask of probabilities, at::bernoulli_distribution: a uniform number (of float32, but for probabilities of float64) is below them.
at::Tensor mask_of(LocalCall& local, const Layout& layout, const at::Tensor& probabilities) {
  const auto none = at::ones({0}, local.arg(0).toTensor().options());
  none.bernoulli_(at::ones({0}, probabilities.options()), generator_of(local, layout));  // refuses dtypes
  const bool valid = probabilities.ge(0).logical_and_(probabilities.le(1)).all().item<bool>();
  require(valid, local.op.schema().name(), "Expected p_in >= 0 && p_in <= 1 to be true; got other probabilities in this rank's part");
  const auto dtype = probabilities.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return rng::draw_own_part(layout, uniform(probabilities.options().dtype(dtype)), generator_of(local, layout)).lt(probabilities);
}

// libtorch's CUDA kernel for a tensor of probabilities gives the words of its generator to elements in yet another way.
bool draws_whole(const Call& call) { return call.mesh.device_type() == c10::kCUDA; }

// self.bernoulli_(probabilities)
struct BernoulliInPlace final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const bool alike = call.operands.at(1).sizes() == call.operands[0].sizes() || call.operands[1].ndim() == 0;
    return alike && !draws_whole(call) ? cut_alike(call, mesh_dim) : Candidates();
  }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    const auto layout = resolution.in[0];
    if (layout->is_replicated()) return {};
    return [layout](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      self.copy_(mask_of(local, *layout, local.arg(1).toTensor()));
      local.replace({self});
    };
  }
};

// self.bernoulli(), of which self is the probabilities
struct Bernoulli final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    return draws_whole(call) ? Candidates() : cut_alike(call, mesh_dim);
  }
  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (resolution.in[0]->is_replicated()) return {};
    return [layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto probabilities = local.arg(0).toTensor();
      local.replace({mask_of(local, *layout, probabilities).to(probabilities.dtype())});
    };
  }
};

// at::normal of tensors: normal numbers, then scaled, then moved, as ATen does.
struct Normal final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const bool alike = call.operands.size() == 1 || call.operands[0].sizes() == call.operands[1].sizes();
    return alike ? cut_alike(call, mesh_dim) : Candidates();
  }
  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (resolution.in[0]->is_replicated()) return {};
    return [layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto mean = local.arg(0), std = local.arg(1);
      if (std.isTensor()) {
        const bool valid = std.toTensor().ge(0).all().item<bool>();
        require(valid, "aten::normal", "normal expects all elements of std >= 0.0; got others in this rank's part");
      }
      const auto options = (mean.isTensor() ? mean : std).toTensor().options().dtype(layout->dtype());
      auto drawn = rng::draw_own_part(*layout, normal_of(std.isTensor() ? 1 : std.toDouble(), options), generator_of(local, *layout));
      if (std.isTensor()) drawn.mul_(std.toTensor());
      mean.isTensor() ? drawn.add_(mean.toTensor()) : drawn.add_(mean.toDouble());
      local.replace({drawn});
    };
  }
};

// native_dropout(input, p, train) -> (output, mask), as ATen does: a mask of bools, then mask and scale.
struct Dropout final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return cut_alike(call, mesh_dim, 2); }
  std::vector<Sizes> output_sizes(const Call& call) const override { return {2, Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (!call.bool_arg("train", true)) return {};
    const double keep = 1 - call.arg("p").toDouble();
    return [layout = drawn_layout(call, resolution), keep](LocalCall& local) {  // not the input's, which may be expanded
      const auto input = local.arg(0).toTensor();
      const auto generator = generator_of(local, *layout);
      if (input.is_cuda() && !rng::as_counter(generator)) return local.replace(rng::cuda::dropout(input, *layout, keep, generator));
      const auto mask = rng::draw_own_part(*layout, coins(keep, input.options().dtype(at::kBool)), generator);
      local.replace({at::mul(input, mask).mul_(keep == 0 ? 0 : 1 / keep), mask});
    };
  }
};

Draw uniform_like(LocalCall&, const at::TensorOptions& options) { return uniform(options); }
Draw normal_like(LocalCall&, const at::TensorOptions& options) { return normal_of(1, options); }
Draw coins_like(LocalCall& local, const at::TensorOptions& options) { return coins(local.arg(1).toDouble(), options); }
Draw integers_like(LocalCall& local, const at::TensorOptions& options) {
  const int64_t low = local.op.schema().argumentIndexWithName("low") ? number(local, "low") : 0;
  return integers(low, number(local, "high"), options);
}

constexpr const char* kOneStream = "each rank draws its part of one stream";

const Register in_place(
    "aten::uniform_ aten::normal_ aten::random_ aten::bernoulli_ aten::exponential_ aten::log_normal_ aten::geometric_ aten::cauchy_",
    std::make_shared<InPlace>(), kOneStream);
const Register bernoulli_in_place("aten::bernoulli_.Tensor", std::make_shared<BernoulliInPlace>(), kOneStream);
const Register bernoulli("aten::bernoulli. aten::bernoulli.out", std::make_shared<Bernoulli>(), kOneStream);  // the overload without a name
const Register bernoulli_of_number("aten::bernoulli.p", std::make_shared<Like>(coins_like), kOneStream);
const Register rand_like("aten::rand_like", std::make_shared<Like>(uniform_like), kOneStream);
const Register randn_like("aten::randn_like", std::make_shared<Like>(normal_like), kOneStream);
const Register randint_like("aten::randint_like", std::make_shared<Like>(integers_like), kOneStream);
const Register normal("aten::normal.Tensor_float aten::normal.float_Tensor aten::normal.Tensor_Tensor", std::make_shared<Normal>(),
                      kOneStream);
const Register dropout("aten::native_dropout", std::make_shared<Dropout>(), "each rank draws its part of the mask, of one stream");
const Register whole("aten::bernoulli aten::normal aten::multinomial aten::poisson aten::binomial", replicated(),
                     "each draw depends on the draws before it and on tensors of parameters");

}  // namespace
}  // namespace dtensor::rules
