// Batch normalization. Statistics are per channel over the whole batch: ranks that hold shards of the batch combine theirs.
#include "ops/family.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <range/v3/view/zip.hpp>

namespace dtensor::rules {
namespace {

// Input is [samples, channels, positions...]; all other tensors are [channels], or empty where they are not used.
constexpr int kChannel = 1;  // letter and dim

const std::string& name_of(const Call& call, const Operand& operand) {
  return call.schema.arguments()[operand.argument].name();
}

bool is_running(const Call& call, const Operand& operand) { return name_of(call, operand).rfind("running_", 0) == 0; }

int input_of(const Call& call) { return call.operand_index(call.argument_index("input")); }

bool is_backward(const Call& call) { return call.has("output_mask"); }

// Whether statistics are those of the batch. Operators without the argument have it in their names.
bool trains(const Call& call) {
  for (const auto name : {"training", "train", "update"}) {
    if (call.has(name)) return call.bool_arg(name);
  }
  return call.schema.name().find("no_training") == std::string::npos && call.schema.name().find("no_update") == std::string::npos;
}

// Running statistics are written in training, whether or not the schema says so.
bool writes_running(const Call& call) {
  return !is_backward(call) && trains(call) && call.schema.name().find("functional") == std::string::npos;
}

// Whether a result is what cuDNN keeps for its gradient: nothing elsewhere.
bool reserves(const Call& call) { return !is_backward(call) && call.schema.name().rfind("aten::_batch_norm_", 0) == 0; }

// libtorch's kernels take one element for each channel, whatever there is. Those that are too many do no harm, but to new statistics.
void check_length(const Call& call, const Operand& operand, int64_t channels) {
  if (operand.ndim() != 1 || operand.sizes()[0] == 0) return;
  const auto length = operand.sizes()[0];
  const bool renewed = is_running(call, operand) && trains(call);
  require(length == channels || (length > channels && !renewed), call.schema.name(),
          "{} has {} elements, and the input {} channels; hint: give one for each; libtorch "
          "does not check this, and would reach outside of a shorter one",
          name_of(call, operand), length, channels);
}

Structure structure(const Call& call) {
  const auto input = call.operands[input_of(call)].sizes();
  const auto data = lettered(input);
  const Dims channels{{kChannel, input[kChannel]}}, none{{kWhole, 0}};
  Structure result;
  for (int i = 0; i < static_cast<int>(call.operands.size()); ++i) {
    const auto& operand = call.operands[i];
    const bool unused = operand.sizes() != c10::IntArrayRef({input[kChannel]});
    if (unused) check_length(call, operand, input[kChannel]);
    result.in.push_back(operand.sizes() == input ? data : unused ? without_letters(operand.sizes()) : channels);
    if (is_running(call, operand) && writes_running(call)) result.unread.push_back(i);
  }
  result.out.assign(call.schema.returns().size(), channels);
  result.out[0] = data;
  if (is_backward(call)) {
    // Sums over the batch are needed for the gradient of the input in training, and so are not pending.
    result.lacking.assign(result.out.size(), trains(call) ? replicate() : partial());
    result.keeps = {kSums, {{call.operand_index(0)}}};
    return result;
  }
  result.lacking.assign(result.out.size(), replicate());
  if (!trains(call)) result.out[1] = result.out[2] = none;
  if (reserves(call)) result.out[3] = none;
  return result;
}

// -- Local calls ------------------------------------------------------------------------------------------------------

// The mesh dimensions that part the batch: they cut samples or positions.
std::vector<int64_t> parting(const LayoutPtr& input) {
  std::vector<int64_t> dims;
  for (int64_t m = 0; m < input->mesh().ndim(); ++m) {
    const auto p = input->placements()[m];
    if (p.is_shard() && !p.is_shard(kChannel) && input->mesh().size(m) > 1) dims.push_back(m);
  }
  return dims;
}

std::vector<int64_t> all_but_channel(int64_t ndim) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != kChannel) dims.push_back(d);
  }
  return dims;
}

at::Tensor along_channel(const at::Tensor& per_channel, int64_t ndim) {
  std::vector<int64_t> shape(ndim, 1);
  shape[kChannel] = -1;
  return per_channel.view(shape);
}

struct Statistics {
  at::Tensor mean, variance, unbiased;  // [channels], double
};

// The statistics of the parts, combined (Chan, Golub, LeVeque 1983, eq. 2.1): no cancellation, whatever the parts' means.
Statistics of_all(const at::Tensor& input, comm::Communicator& group) {
  const auto x = widened(input);
  const auto channels = x.size(kChannel), count = x.numel() / std::max<int64_t>(channels, 1);
  auto variance = at::zeros({channels}, x.options()), mean = variance;
  if (x.numel() > 0) std::tie(variance, mean) = at::var_mean(x, all_but_channel(x.dim()), /*unbiased=*/false);
  const auto own = at::cat({mean, variance, at::full({1}, count, x.options())});
  const std::vector<int64_t> counts(group.size(), own.numel());
  const auto parts = group.all_gather(own, counts).get().view({group.size(), own.numel()}).to(at::kDouble);
  const auto means = parts.narrow(1, 0, channels), variances = parts.narrow(1, channels, channels);
  const auto weights = parts.narrow(1, 2 * channels, 1), total = weights.sum();
  Statistics all;
  all.mean = means.mul(weights).sum(0).div(total);
  const auto squares = variances.add(means.sub(all.mean).square()).mul(weights).sum(0);
  all.variance = squares.div(total);
  all.unbiased = squares.div(total.sub(1));
  return all;
}

struct Positions {  // of arguments; -1: none
  explicit Positions(const Call& call) {
    for (const auto name : {"input", "weight", "bias", "running_mean", "running_var", "momentum", "eps"}) {
      at.push_back(call.argument_index(name));
    }
  }
  int input() const { return at[0]; }
  int weight() const { return at[1]; }
  int bias() const { return at[2]; }
  int mean() const { return at[3]; }
  int variance() const { return at[4]; }
  int momentum() const { return at[5]; }
  int eps() const { return at[6]; }
  std::vector<int> at;
};

c10::optional<at::Tensor> optional(LocalCall& local, int position) {
  if (position < 0 || !local.arg(position).isTensor() || !local.arg(position).toTensor().defined()) return {};
  return local.arg(position).toTensor();
}

at::Tensor blended(const at::Tensor& running, const at::Tensor& now, double momentum) {
  return running.mul(1 - momentum).add(now.to(running.scalar_type()), momentum);
}

// Training on parts of the batch: combine the statistics, and normalize as in evaluation.
void train_on_parts(LocalCall& local, const Positions& at, comm::Communicator& group, bool functional, bool reserve) {
  const auto x = local.arg(at.input()).toTensor();
  const auto momentum = local.arg(at.momentum()).toDouble(), eps = local.arg(at.eps()).toDouble();
  const auto weight = optional(local, at.weight()), bias = optional(local, at.bias());
  auto mean = optional(local, at.mean()), variance = optional(local, at.variance());
  const auto all = of_all(x, group);
  const auto dtype = weight ? weight->scalar_type() : mean ? mean->scalar_type() : x.scalar_type();
  const auto now = all.mean.to(dtype), spread = all.variance.to(dtype);
  const auto y = x.numel() == 0 ? at::empty_like(x)
                                : std::get<0>(at::native_batch_norm(x, weight, bias, now, spread, /*training=*/false, momentum, eps));
  std::vector<c10::IValue> results{y, now, all.variance.add(eps).rsqrt().to(dtype)};
  if (reserve) results.emplace_back(at::empty({0}, x.options().dtype(at::kByte)));
  const auto keep = [&](c10::optional<at::Tensor>& running, const at::Tensor& value) {
    if (running && functional) results.emplace_back(blended(*running, value, momentum));
    if (running && !functional) running->copy_(blended(*running, value, momentum));
  };
  keep(mean, all.mean);
  keep(variance, all.unbiased);
  local.replace(std::move(results));
}

// Running statistics that are whole while channels are cut: each rank writes its part, and gets the others'.
struct WholeRunning {
  int position;
  LayoutPtr whole, part;
};

std::vector<WholeRunning> whole_running(const Call& call, const Resolution& resolution) {
  std::vector<WholeRunning> all;
  const auto& input = resolution.in[input_of(call)];
  if (!writes_running(call)) return all;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (!is_running(call, call.operands[i])) continue;
    Placements placements;
    for (const auto& p : input->placements()) placements.push_back(p.is_shard(kChannel) ? shard(0, p.cut()) : replicate());
    const auto part = resolution.in[i]->with(placements);
    if (part != resolution.in[i]) all.push_back({call.operands[i].argument, resolution.in[i], part});
  }
  return all;
}

Lowering forward(const Call& call, const Resolution& resolution) {
  const auto& input = resolution.in[input_of(call)];
  const auto parted = trains(call) ? parting(input) : std::vector<int64_t>();
  const auto running = whole_running(call, resolution);
  Lowering compute = [](LocalCall& local) { local.call(); };
  if (!parted.empty()) {
    compute = [at = Positions(call), mesh = call.mesh, parted, functional = !writes_running(call),
               reserve = reserves(call)](LocalCall& local) {
      train_on_parts(local, at, mesh.communicator(parted), functional, reserve);
    };
  } else if (is_empty(input->local_sizes())) {
    compute = zeros_of_nothing(call, resolution);
  } else if (running.empty()) {
    return {};
  }
  return [compute, running](LocalCall& local) {
    std::vector<at::Tensor> wholes, parts;
    for (const auto& r : running) {
      wholes.push_back(local.arg(r.position).toTensor());
      parts.push_back(move_local(wholes.back(), r.whole, r.part).get().clone());
      local.arg(r.position) = parts.back();
    }
    compute(local);
    for (const auto& [whole, part, r] : ranges::views::zip(wholes, parts, running)) whole.copy_(move_local(part, r.part, r.whole).get());
  };
}

// With dy the incoming gradient, x^ the normalized input and n the size of the batch, the input's gradient is
// weight / deviation * (dy - sum(dy) / n - x^ sum(dy x^) / n), and those of bias and weight are the sums.
void gradient_on_shards(LocalCall& local, const Positions& at, int saved, int mask_at, comm::Communicator& group, double n) {
  const auto mask = local.arg(mask_at).toBoolList();
  const auto dy = widened(local.arg(0).toTensor());
  const auto input = local.arg(at.input()).toTensor();
  const auto mean = local.arg(saved).toTensor(), inverse = local.arg(saved + 1).toTensor();
  const auto weight = optional(local, at.weight());
  const auto ndim = input.dim();
  const auto normalized = widened(input).sub(along_channel(mean, ndim)).mul(along_channel(inverse, ndim));
  const auto own = at::stack({dy.sum(all_but_channel(ndim)), dy.mul(normalized).sum(all_but_channel(ndim))});
  const auto sums = group.all_reduce(own, ReduceOp::sum).get();
  const auto sum = sums.select(0, 0), sum_normalized = sums.select(0, 1);
  std::vector<c10::IValue> results(3, at::Tensor());
  const auto dtype = weight ? weight->scalar_type() : input.scalar_type();
  if (mask[0]) {
    const auto scale = weight ? inverse.mul(*weight) : inverse;
    const auto off = along_channel(sum.div(n), ndim).add(normalized.mul(along_channel(sum_normalized.div(n), ndim)));
    results[0] = dy.sub(off).mul(along_channel(scale, ndim)).to(input.scalar_type());
  }
  if (mask[1]) results[1] = sum_normalized.to(dtype).clone();
  if (mask[2]) results[2] = sum.to(dtype).clone();
  local.replace(std::move(results));
}

// libtorch's kernel for planes of one position, which parts may be where the whole is not, takes what belongs to channels to lie in a row.
Lowering with_channels_in_a_row(const Call& call) {
  std::vector<int> apart;
  for (const auto& operand : call.operands) {
    if (operand.ndim() == 1 && operand.layout->strides()[0] != 1) apart.push_back(operand.argument);
  }
  if (apart.empty()) return {};
  return [apart](LocalCall& local) {
    for (const int i : apart) local.arg(i) = local.arg(i).toTensor().contiguous();
    local.call();
  };
}

Lowering backward(const Call& call, const Resolution& resolution) {
  const auto& input = resolution.in[input_of(call)];
  const auto parted = trains(call) ? parting(input) : std::vector<int64_t>();
  if (parted.empty()) {
    return is_empty(input->local_sizes()) ? zeros_of_nothing(call, resolution) : with_channels_in_a_row(call);
  }
  double n = 1;
  for (int64_t d = 0; d < input->ndim(); ++d) n *= d == kChannel ? 1 : static_cast<double>(input->sizes()[d]);
  return [at = Positions(call), saved = call.argument_index("save_mean"), mask = call.argument_index("output_mask"), mesh = call.mesh,
          parted, n](LocalCall& local) { gradient_on_shards(local, at, saved, mask, mesh.communicator(parted), n); };
}

// -- The rule ---------------------------------------------------------------------------------------------------------

class BatchNorm final : public Rule {
 public:
  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    Candidates all;
    if (!is_regular(call)) return all;
    const auto& input = call.operands[input_of(call)];
    const auto channel_bytes = input.sizes()[kChannel] * static_cast<int64_t>(c10::elementSize(input.layout->dtype()));
    for (auto& candidate : family_->candidates(call, mesh_dim)) {
      const auto& cut = candidate.in[input_of(call)];
      if (!suits_running(call, candidate)) continue;
      if (cut.is_shard() && !cut.is_shard(kChannel) && trains(call)) candidate.lowering_bytes = 2 * channel_bytes;
      all.push_back(std::move(candidate));
    }
    return all;
  }

  std::vector<OutputMeta> output_metas(const Call& call) const override {
    if (!is_regular(call)) return {};
    auto metas = family_->output_metas(call);
    const auto& input = *call.operands[input_of(call)].layout;
    auto dtype = input.dtype();
    for (const auto& operand : call.operands) {
      if (name_of(call, operand) == "weight" || is_running(call, operand)) dtype = operand.layout->dtype();
    }
    metas[0].strides = strides_like(input.sizes(), input);
    metas[0].dtype = input.dtype();
    for (size_t i = 1; i < metas.size(); ++i) metas[i].dtype = dtype;
    if (reserves(call)) metas[3].dtype = at::kByte;
    if (!is_backward(call)) return metas;
    const auto mask = call.arg("output_mask").toBoolList();
    for (size_t i = 0; i < metas.size(); ++i) metas[i].defined = mask[i];
    return metas;
  }

  bool describes_outputs() const override { return true; }

  Lowering lower(const Call& call, const Resolution& resolution) const override {
    if (!is_regular(call)) return {};
    return is_backward(call) ? backward(call, resolution) : forward(call, resolution);
  }

 private:
  static bool is_regular(const Call& call) { return call.operands[input_of(call)].ndim() >= 2; }

  // Running statistics stay where they are: whole, or cut as the channels are.
  static bool suits_running(const Call& call, const Candidate& candidate) {
    if (!writes_running(call)) return true;
    const auto& input = candidate.in[input_of(call)];
    for (size_t i = 0; i < call.operands.size(); ++i) {
      const auto& p = candidate.in[i];
      const bool alike = input.is_shard(kChannel) && p == shard(0, input.cut());
      if (is_running(call, call.operands[i]) && !p.is_replicate() && !alike) return false;
    }
    return true;
  }

  RulePtr family_ = family(structure);
};

const Register forward_rule(
    "aten::native_batch_norm aten::_native_batch_norm_legit "
    "aten::_native_batch_norm_legit_no_training aten::_batch_norm_with_update aten::_batch_norm_with_update_functional "
    "aten::_batch_norm_no_update",
    std::make_shared<BatchNorm>(), "channels are independent; statistics of parts of a batch combine");
const Register backward_rule("aten::native_batch_norm_backward aten::batch_norm_backward", std::make_shared<BatchNorm>(),
                             "linear in the incoming gradient; channels are independent, and sums over parts of a batch add up");

}  // namespace
}  // namespace dtensor::rules
