#include <dtensor/optim/adam8bit.hpp>

#include "src/optim/blocks.hpp"

#include <dtensor/tensor/spread.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>

namespace dtensor::optim {

namespace {

constexpr const char* kTag = "Adam8bit";
constexpr int64_t kTogether = 1 << 24;  // elements whose averages are in float32 at a time

void check(const Adam8bitOptions& o) {
  const auto [b1, b2] = o.betas();
  require(o.lr() >= 0, kTag, "got lr {}; expected a number that is not negative", o.lr());
  require(b1 >= 0 && b1 < 1 && b2 >= 0 && b2 < 1, kTag, "got betas {} and {}; expected numbers from 0 to below 1", b1, b2);
  require(o.eps() >= 0, kTag, "got eps {}; expected a number that is not negative", o.eps());
  require(o.weight_decay() >= 0, kTag, "got weight_decay {}; expected a number that is not negative", o.weight_decay());
  require(o.block_size() > 0, kTag, "got block_size {}; expected a positive number", o.block_size());
  require(o.min_size() >= 0, kTag, "got min_size {}; expected a number that is not negative", o.min_size());
}

bool is_max(const std::string& name) { return name == "exp_avg_max" || name == "exp_avg_sq_max"; }

// New averages that wait to be coded until all ranks know the largest numbers of their blocks.
struct Pending {
  at::Tensor x;
  ParamState* state;
  Blocks blocks;
  at::Tensor m, v;                  // float32 lists
  at::Tensor m_largest, v_largest;  // of each block
};

at::Tensor& map_for(bool is_signed, c10::Device device) {
  thread_local std::map<std::pair<bool, std::string>, at::Tensor> maps;
  auto& map = maps[{is_signed, device.str()}];
  if (!map.defined()) map = dynamic_map(is_signed).to(device);
  return map;
}

// x - lr weight_decay x - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
void apply(const at::Tensor& x, const at::Tensor& m, const at::Tensor& v, const Adam8bitOptions& options, int64_t step) {
  const auto [b1, b2] = options.betas();
  const auto t = static_cast<double>(step);
  const auto root = v.div(1 - std::pow(b2, t)).sqrt_().add_(options.eps());
  auto direction = m.div(1 - std::pow(b1, t)).div_(root);
  if (is_dtensor(x) && !is_dtensor(direction)) {
    const auto part = direction.view(DTensor(x).layout().local_sizes()).to(x.scalar_type());
    direction = from_local(part, DTensor(x).mesh(), DTensor(x).placements(), x.sizes());
  } else {
    direction = direction.view(x.sizes()).to(x.scalar_type());
  }
  if (options.weight_decay() != 0) x.mul_(1 - options.lr() * options.weight_decay());
  x.add_(direction, -options.lr());
}

void step_small(const at::Tensor& x, ParamState& state, const Adam8bitOptions& options) {
  auto& m = state.tensors["exp_avg"];
  auto& v = state.tensors["exp_avg_sq"];
  if (!m.defined()) m = at::zeros_like(x, x.options().dtype(at::kFloat));
  if (!v.defined()) v = at::zeros_like(x, x.options().dtype(at::kFloat));
  const auto [b1, b2] = options.betas();
  const auto g = x.grad().to(at::kFloat);
  m.mul_(b1).add_(g, 1 - b1);
  v.mul_(b2).addcmul_(g, g, 1 - b2);
  apply(x, m, v, options, ++state.step);
}

// The codes of zeros.
at::Tensor zero_codes(const at::Tensor& x, bool is_signed) {
  return at::full_like(x, is_signed ? 127 : 0, x.options().dtype(at::kByte));
}

Pending step_in_float(const at::Tensor& x, ParamState& state, const Adam8bitOptions& options) {
  for (const auto& [name, is_signed] : {std::pair{"exp_avg", true}, {"exp_avg_sq", false}}) {
    auto& codes = state.tensors[name];
    if (!codes.defined()) codes = zero_codes(x, is_signed);
  }
  NoSpmd plain;
  Blocks blocks(x, options.block_size());
  const auto gradient = is_dtensor(x) ? redistribute(x.grad(), DTensor(x).placements()) : x.grad();
  const auto g = dtensor::detail::plain_local(gradient).to(at::kFloat).reshape({-1});
  const auto average = [&](const std::string& name, bool is_signed) {
    auto& largest = state.tensors[name + "_max"];
    if (!largest.defined()) largest = at::zeros({blocks.count()}, g.options());
    return blocks.decode(dtensor::detail::plain_local(state.tensors[name]).reshape({-1}), largest, map_for(is_signed, g.device()));
  };
  const auto [b1, b2] = options.betas();
  auto m = average("exp_avg", true).mul_(b1).add_(g, 1 - b1);
  auto v = average("exp_avg_sq", false).mul_(b2).addcmul_(g, g, 1 - b2);
  apply(x, m, v, options, ++state.step);
  auto m_largest = blocks.largest(m), v_largest = blocks.largest(v);
  return {x, &state, std::move(blocks), std::move(m), std::move(v), std::move(m_largest), std::move(v_largest)};
}

void encode(const Pending& item) {
  NoSpmd plain;
  const auto write = [&](const std::string& name, const at::Tensor& values, const at::Tensor& largest, bool is_signed) {
    const auto codes = dtensor::detail::plain_local(item.state->tensors[name]);
    codes.copy_(item.blocks.encode(values, largest, map_for(is_signed, values.device())).view(codes.sizes()));
    item.state->tensors[name + "_max"] = largest;
  };
  write("exp_avg", item.m, item.m_largest, true);
  write("exp_avg_sq", item.v, item.v_largest, false);
}

// Lets the ranks agree on the largest numbers of their blocks, then codes the averages.
void flush(std::vector<Pending>& pending) {
  NoSpmd plain;
  std::vector<at::Tensor> tensors;
  for (const auto& item : pending) tensors.push_back(item.x);
  for (const auto& spread : dtensor::detail::spread_of(tensors)) {
    std::vector<at::Tensor> largest;
    for (const auto i : spread.members) largest.insert(largest.end(), {pending[i].m_largest, pending[i].v_largest});
    const auto agreed = spread.group ? spread.group->all_reduce(at::cat(largest), ReduceOp::max).get() : at::cat(largest);
    int64_t begin = 0;
    for (const auto i : spread.members) {
      for (auto* each : {&pending[i].m_largest, &pending[i].v_largest}) {
        *each = agreed.narrow(0, begin, each->numel()).clone();
        begin += each->numel();
      }
    }
  }
  for (const auto& item : pending) encode(item);
  pending.clear();
}

}  // namespace

// bitsandbytes.functional.create_dynamic_map(signed, max_exponent_bits=7, total_bits=8)
at::Tensor dynamic_map(bool is_signed) {
  std::vector<float> numbers{0, 1};
  for (int exponent = 0; exponent < 7; ++exponent) {
    const int parts = 1 << (is_signed ? exponent : exponent + 1);
    for (int i = 0; i < parts; ++i) {
      const double middle = (0.1 + 0.9 * i / parts + 0.1 + 0.9 * (i + 1) / parts) / 2;
      const auto number = static_cast<float>(middle * std::pow(10.0, exponent - 6));
      numbers.push_back(number);
      if (is_signed) numbers.push_back(-number);
    }
  }
  std::ranges::sort(numbers);
  NoSpmd plain;
  const auto map = at::empty({static_cast<int64_t>(numbers.size())}, at::kFloat);
  std::ranges::copy(numbers, map.data_ptr<float>());
  return map;
}

Adam8bitOptions::Adam8bitOptions(double lr) : lr_(lr) {}

void Adam8bitOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(block_size);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(min_size);
}

void Adam8bitOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Betas, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, block_size);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, min_size);
}

Adam8bit::Adam8bit(std::vector<torch::optim::OptimizerParamGroup> groups, const Adam8bitOptions& defaults)
    : Optimizer(std::move(groups), std::make_unique<Adam8bitOptions>(defaults)) {
  for (const auto& group : param_groups()) {
    check(static_cast<const Adam8bitOptions&>(group.options()));
    for (const auto& x : group.params()) {
      require(at::isFloatingType(x.scalar_type()), kTag, "got a parameter of {}; expected a floating-point one",
              c10::toString(x.scalar_type()));
    }
  }
}
Adam8bit::Adam8bit(std::vector<at::Tensor> parameters, const Adam8bitOptions& defaults)
    : Adam8bit(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(std::move(parameters))}, defaults) {}

void Adam8bit::update() {
  std::vector<Pending> pending;
  int64_t elements = 0;
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const Adam8bitOptions&>(group.options());
    for (const auto& x : with_gradients(group)) {
      auto& state = state_for(x);
      if (x.numel() < options.min_size()) {
        step_small(x, state, options);
        continue;
      }
      auto item = step_in_float(x, state, options);
      if (!item.blocks.are_shared()) {
        encode(item);
        continue;
      }
      pending.push_back(std::move(item));
      elements += x.numel();
      if (elements < kTogether) continue;
      flush(pending);
      elements = 0;
    }
  }
  flush(pending);
}

int64_t Adam8bit::block_size_of(const at::Tensor& parameter) const {
  for (const auto& group : param_groups()) {
    for (const auto& x : group.params()) {
      if (x.is_same(parameter)) return static_cast<const Adam8bitOptions&>(group.options()).block_size();
    }
  }
  fail(kTag, "the parameter is none of the optimizer's");
}

at::Tensor Adam8bit::whole(const std::string& name, const at::Tensor& parameter, const at::Tensor& tensor) const {
  if (!is_max(name)) return Optimizer::whole(name, parameter, tensor);
  const Blocks blocks(parameter, block_size_of(parameter));
  if (blocks.are_shared()) return tensor;
  auto all = at::zeros({blocks.total()}, tensor.options()).index_copy_(0, blocks.own().to(tensor.device()), tensor);
  for (const auto& spread : dtensor::detail::spread_of(parameter)) {
    if (spread.group) all = spread.group->all_reduce(all, ReduceOp::max).get();
  }
  return all;
}

at::Tensor Adam8bit::part(const std::string& name, const at::Tensor& parameter, const at::Tensor& whole) const {
  if (!is_max(name)) return Optimizer::part(name, parameter, whole);
  const Blocks blocks(parameter, block_size_of(parameter));
  return blocks.are_shared() ? whole : whole.index_select(0, blocks.own());
}

}  // namespace dtensor::optim
