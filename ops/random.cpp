// Random operators. A rank draws its own elements of what one device would draw, and its generator ends in the state of one device's.
#include "ops/family.hpp"

#include "rng/check.hpp"
#include "rng/counter_generator.hpp"
#include "rng/cuda/draw.hpp"
#include "rng/own_shard.hpp"

#include <dtensor/rng/device_generator.hpp>

#include <dtensor/base/error.hpp>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>

#include <optional>

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

// How an output lies.
LayoutPtr drawn_layout(const Call& call, const Resolution& resolution, size_t output = 0) {
  const auto& meta = call.outputs.at(output);
  return Layout::get(call.mesh, resolution.out[output], meta.sizes, meta.strides, meta.dtype);
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

bool is_row_major(const Layout& layout) { return layout.strides() == c10::IntArrayRef(dtensor::contiguous_strides(layout.sizes())); }

// Where an operand lies that broadcasts to the first one, which lies as `placement`; nothing where it cannot lie beside it.
std::optional<Placement> beside(const Operand& first, const Operand& operand, const Placement& placement) {
  if (operand.ndim() == 0) return replicate();
  if (placement.is_flat())
    return operand.sizes() == first.sizes() && is_row_major(*operand.layout) ? std::optional(placement) : std::nullopt;
  const auto dim = placement.dim - first.ndim() + operand.ndim();
  if (dim >= 0 && operand.sizes()[dim] == first.sizes()[placement.dim]) return shard(dim, placement.cut());  // also if it is one row
  return dim < 0 || operand.sizes()[dim] == 1 ? std::optional(replicate()) : std::nullopt;
}

// Operands are cut as the first one, which is not Partial.
Candidates cut_alike(const Call& call, int64_t mesh_dim, size_t outputs = 1) {
  const auto& now = call.operands[0].placements()[mesh_dim];
  if (!now.is_shard() && !(now.is_flat() && is_row_major(*call.operands[0].layout))) return {};
  Candidate candidate{{now}, Placements(outputs, now)};
  for (size_t i = 1; i < call.operands.size(); ++i) {
    const auto placement = beside(call.operands[0], call.operands[i], now);
    if (!placement) return {};
    candidate.in.push_back(*placement);
  }
  return {candidate};
}

// Whether a whole tensor lies in memory as one device's would, on which the order of draws hangs. A gathered one may be row-major.
bool lies_as_reported(const at::Tensor& whole, const Layout& layout) {
  for (int64_t d = 0; d < layout.ndim(); ++d) {
    if (layout.sizes()[d] > 1 && whole.strides()[d] != layout.strides()[d]) return false;
  }
  return true;
}

at::Tensor as_reported(const at::Tensor& whole, const Layout& layout) {
  if (lies_as_reported(whole, layout)) return whole;
  return at::empty_strided(layout.sizes(), at::infer_dense_strides(layout.sizes(), layout.strides()), whole.options()).copy_(whole);
}

// self.uniform_(...): all that is read is the shape.
struct InPlace final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return cut_alike(call, mesh_dim); }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    return [layout = resolution.in[0]](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      if (layout->is_replicated() && !layout->is_absent() && lies_as_reported(self, *layout)) return local.call();
      const c10::Stack arguments(local.stack.begin() + static_cast<int64_t>(local.begin), local.stack.end());
      self.copy_(rng::draw_own_shard(*layout, {local.op, arguments, self.options()}, generator_of(local, *layout)));
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

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    auto metas = Rule::output_metas(call);
    if (call.has("dtype") && !call.arg("dtype").isNone()) metas[0].dtype = call.arg("dtype").toScalarType();
    return metas;
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    return [this, layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto options = local.arg(0).toTensor().options().dtype(layout->dtype());
      local.replace({rng::draw_own_shard(*layout, draw_(local, options), generator_of(local, *layout))});
    };
  }

 private:
  Draw (*draw_)(LocalCall&, const at::TensorOptions&);
};

// A mask of probabilities, at::bernoulli_distribution: a uniform number (of float32, but for probabilities of float64) is below them.
at::Tensor mask_of(LocalCall& local, const Layout& layout, const at::Tensor& probabilities) {
  const auto dtype = probabilities.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto mask = [&] {
    return rng::draw_own_shard(layout, uniform(probabilities.options().dtype(dtype)), generator_of(local, layout)).lt(probabilities);
  };
  if (layout.is_absent()) return mask();
  const auto none = at::ones({0}, local.arg(0).toTensor().options());
  none.bernoulli_(at::ones({0}, probabilities.options()), generator_of(local, layout));  // refuses dtypes
  const bool valid = probabilities.ge(0).logical_and_(probabilities.le(1)).all().item<bool>();
  require(valid, local.op.schema().name(), "Expected p_in >= 0 && p_in <= 1 to be true; got other probabilities in this rank's shard");
  return mask();
}

// libtorch's CUDA kernel for a tensor of probabilities gives the words of its generator to elements in yet another way.
bool draws_whole(const Call& call) { return call.mesh.device_type() == c10::kCUDA; }

// self.bernoulli_(probabilities)
struct BernoulliInPlace final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    return draws_whole(call) ? Candidates() : cut_alike(call, mesh_dim);
  }

  Lowering lower(const Call&, const Resolution& resolution) const override {
    return [layout = resolution.in[0]](LocalCall& local) {
      const auto self = local.arg(0).toTensor();
      if (!layout->is_replicated() || layout->is_absent()) {
        self.copy_(mask_of(local, *layout, local.arg(1).toTensor()));
        return local.replace({self});
      }
      const auto drawn = as_reported(self, *layout);
      local.arg(0) = drawn;
      local.call();
      if (!drawn.is_same(self)) self.copy_(drawn);
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
    if (resolution.in[0]->is_replicated() && !resolution.in[0]->is_absent()) return {};
    return [layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto probabilities = local.arg(0).toTensor();
      local.replace({mask_of(local, *layout, probabilities).to(probabilities.dtype())});
    };
  }
};

// at::normal of tensors: normal numbers, then scaled, then moved, as ATen does.
struct Normal final : Rule {
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const bool alike = call.operands.size() == 1 || call.operands[0].sizes() == call.operands[1].sizes();  // else the first may broadcast
    return alike ? cut_alike(call, mesh_dim) : Candidates();
  }
  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (resolution.in[0]->is_replicated() && !resolution.in[0]->is_absent()) return {};
    return [layout = drawn_layout(call, resolution)](LocalCall& local) {
      const auto mean = local.arg(0), std = local.arg(1);
      if (std.isTensor() && !layout->is_absent()) {
        const bool valid = std.toTensor().ge(0).all().item<bool>();
        require(valid, "aten::normal", "normal expects all elements of std >= 0.0; got others in this rank's shard");
      }
      const auto options = (mean.isTensor() ? mean : std).toTensor().options().dtype(layout->dtype());
      auto drawn = rng::draw_own_shard(*layout, normal_of(std.isTensor() ? 1 : std.toDouble(), options), generator_of(local, *layout));
      if (std.isTensor()) drawn.mul_(std.toTensor());
      mean.isTensor() ? drawn.add_(mean.toTensor()) : drawn.add_(mean.toDouble());
      local.replace({drawn});
    };
  }
};

// native_dropout(input, p, train) -> (output, mask), as ATen does: a mask of bools, then mask and scale. Of no elements ATen makes a mask
// that is as the input.
struct Dropout final : Rule {
  static bool draws_nothing(const Call& call) { return c10::multiply_integers(call.operands[0].sizes()) == 0; }

  Candidates candidates(const Call& call, int64_t mesh_dim) const override { return cut_alike(call, mesh_dim, 2); }

  // The mask is dense in the input's order, and the output lies as a product with it.
  std::vector<OutputMeta> output_metas(const Call& call) const override {
    const auto& input = *call.operands[0].layout;
    const Sizes sizes(input.sizes());
    const auto dense = at::infer_dense_strides(input.sizes(), input.strides());
    const OutputMeta mask{sizes, Sizes(dense.begin(), dense.end()), draws_nothing(call) ? input.dtype() : at::kBool};
    if (draws_whole(call) || !call.bool_arg("train", true)) return {{sizes, mask.strides, input.dtype()}, mask};
    at::TensorIteratorConfig config;
    config.check_all_same_dtype(false).add_owned_output(at::Tensor());
    for (const auto& strides : {Sizes(input.strides()), mask.strides}) {
      config.add_owned_input(at::empty_strided(sizes, strides, at::TensorOptions(at::kMeta).dtype(input.dtype())));
    }
    const auto product = config.declare_static_dtype_and_device(input.dtype(), at::kMeta).build().output();
    return {{sizes, Sizes(product.strides()), input.dtype()}, mask};
  }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (!call.bool_arg("train", true) || draws_nothing(call)) return {};
    const double keep = 1 - call.arg("p").toDouble();
    return [layout = drawn_layout(call, resolution, draws_whole(call) ? 0 : 1), keep](LocalCall& local) {
      const auto input = local.arg(0).toTensor();
      const auto generator = generator_of(local, *layout);
      if (input.is_cuda() && !rng::as_counter(generator)) return local.replace(rng::cuda::dropout(input, *layout, keep, generator));
      const auto mask = rng::draw_own_shard(*layout, coins(keep, input.options().dtype(at::kBool)), generator);
      local.replace({at::mul(input, mask).mul_(keep == 0 ? 0 : 1 / keep), mask});
    };
  }
};

// Whole operands in the order of one device's memory, also those that are written.
struct Whole : Rule {
  Candidates candidates(const Call&, int64_t) const override { return {}; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (call.operands.empty()) return {};
    std::vector<std::pair<int, LayoutPtr>> operands;
    for (size_t i = 0; i < call.operands.size(); ++i) operands.emplace_back(call.operands[i].argument, resolution.in[i]);
    return [operands](LocalCall& local) {
      std::vector<std::pair<at::Tensor, at::Tensor>> moved;
      for (const auto& [argument, layout] : operands) {
        const auto& schema = local.op.schema().arguments()[argument];
        const auto own = local.arg(argument).toTensor();
        const auto part = as_reported(own, *layout);
        if (!part.is_same(own) && (schema.name() == "noise" || (schema.alias_info() && schema.alias_info()->isWrite())))
          moved.emplace_back(own, part);
        local.arg(argument) = part;
      }
      local.call();
      for (const auto& [own, part] : moved) own.copy_(part);
    };
  }
};

// rrelu_with_noise(self, noise, ...), which writes the noise.
struct Rrelu final : Whole {
  std::vector<Sizes> output_sizes(const Call& call) const override { return {Sizes(call.operands[0].sizes())}; }
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
const Register whole("aten::bernoulli aten::normal aten::multinomial aten::poisson aten::binomial", std::make_shared<Whole>(),
                     "each draw depends on the draws before it and on tensors of parameters");
const Register noisy("aten::rrelu_with_noise", std::make_shared<Rrelu>(), "how much is drawn depends on signs");

}  // namespace
}  // namespace dtensor::rules
