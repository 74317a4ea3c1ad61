#include "src/dispatch/out_form.hpp"

#include "src/dispatch/decide.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randint_like.h>
#include <ATen/ops/randn_like.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace dtensor::dispatch {

namespace {

void copy_result(const OpInfo& info, const at::Tensor& out, const at::Tensor& result) {
  require(c10::canCast(result.scalar_type(), out.scalar_type()), info.name,
          "result type {} can't be cast to the desired output type {}", c10::toString(result.scalar_type()),
          c10::toString(out.scalar_type()));
  if (out.numel() == 0 && out.sizes() != result.sizes() && is_dtensor_impl(out.unsafeGetTensorImpl()) &&
      out.scalar_type() == result.scalar_type()) {
    out.unsafeGetTensorImpl()->shallow_copy_from(result.getIntrusivePtr());  // as libtorch makes room in an empty tensor
    return;
  }
  require(out.sizes() == result.sizes(), info.name,
          "out= has sizes [{}]; expected [{}]; hint: a distributed tensor cannot be resized; give one of the result's sizes, or use "
          "the form that returns a new tensor",
          fmt::join(out.sizes(), ", "), fmt::join(result.sizes(), ", "));
  out.copy_(result);
}

}  // namespace

namespace {

// Reductions compute in the dtype of `out`, unless they are told another.
const std::unordered_set<std::string> kInDtypeOfOut{"aten::sum",  "aten::nansum", "aten::mean",
                                                    "aten::prod", "aten::cumsum", "aten::cumprod"};

void tell_dtype(const OpInfo& info, const at::Tensor& out, Stack& functional) {
  const auto at = kInDtypeOfOut.count(info.schema->name()) ? info.functional->schema().argumentIndexWithName("dtype") : c10::nullopt;
  if (at && functional[*at].isNone()) functional[*at] = static_cast<int64_t>(out.scalar_type());
}

// Random out= forms whose result libtorch draws straight into `out`, in the order of its memory, if that has the right sizes. False: it
// has others. `inputs`: the arguments before `out`.
using DrawInto = bool (*)(const at::Tensor& out, const Stack& inputs);

bool has_sizes(const at::Tensor& out, const c10::IValue& sizes) { return out.sizes() == c10::IntArrayRef(sizes.toIntVector()); }

c10::optional<at::Generator> generator_in(const Stack& inputs) {
  const auto& last = inputs.back();
  return last.isGenerator() ? c10::optional<at::Generator>(last.toGenerator()) : c10::nullopt;
}

bool bernoulli_into(const at::Tensor& out, const Stack& inputs) {
  if (out.sizes() != inputs[0].toTensor().sizes()) return false;
  out.bernoulli_(inputs[0].toTensor(), generator_in(inputs));
  return true;
}

// Not Partial: parts of a mean would be added to what is drawn in another order than one device's.
at::Tensor reduced(const at::Tensor& tensor) {
  const auto* impl = as_dtensor(tensor);
  return impl ? move_tensor(tensor, impl->layout()->with(without_partial(impl->layout()->placements()))) : tensor;
}

bool normal_into(const at::Tensor& out, const Stack& inputs) {
  const auto &mean = inputs[0], &std = inputs[1];
  const auto sizes = !std.isTensor()    ? mean.toTensor().sizes().vec()
                     : !mean.isTensor() ? std.toTensor().sizes().vec()
                                        : at::infer_size(mean.toTensor().sizes(), std.toTensor().sizes());
  if (out.sizes() != c10::IntArrayRef(sizes)) return false;
  out.normal_(0, std.isTensor() ? 1 : std.toDouble(), generator_in(inputs));
  if (std.isTensor()) out.mul_(std.toTensor());
  mean.isTensor() ? out.add_(reduced(mean.toTensor())) : out.add_(mean.toDouble());
  return true;
}

bool rand_into(const at::Tensor& out, const Stack& inputs) {
  return has_sizes(out, inputs[0]) && (out.uniform_(0, 1, generator_in(inputs)), true);
}

bool randn_into(const at::Tensor& out, const Stack& inputs) {
  return has_sizes(out, inputs[0]) && (out.normal_(0, 1, generator_in(inputs)), true);
}

// [low,] high, sizes
bool randint_into(const at::Tensor& out, const Stack& inputs) {
  const size_t high = inputs[1].isInt() ? 1 : 0;
  return has_sizes(out, inputs[high + 1]) && (out.random_(high ? inputs[0].toInt() : 0, inputs[high].toInt(), generator_in(inputs)), true);
}

// What is drawn in the order of the first operand's memory, and copied. Of the dtype of `out`. The last input is a memory format, or none.
using DrawLike = at::Tensor (*)(const at::Tensor& self, const Stack& inputs, const at::TensorOptions& options,
                                c10::optional<at::MemoryFormat> format);

template <DrawLike draw>
bool like_into(const at::Tensor& out, const Stack& inputs) {
  const auto& self = inputs[0].toTensor();
  if (out.sizes() != self.sizes()) return false;
  const auto& last = inputs.back();
  const auto format = last.isInt() ? c10::optional<at::MemoryFormat>(static_cast<at::MemoryFormat>(last.toInt())) : c10::nullopt;
  out.copy_(draw(self, inputs, out.scalar_type(), format));
  return true;
}

at::Tensor draw_rand(const at::Tensor& self, const Stack&, const at::TensorOptions& options, c10::optional<at::MemoryFormat> format) {
  return at::rand_like(self, options, format);
}

at::Tensor draw_randn(const at::Tensor& self, const Stack&, const at::TensorOptions& options, c10::optional<at::MemoryFormat> format) {
  return at::randn_like(self, options, format);
}

// self, [low,] high
at::Tensor draw_randint(const at::Tensor& self, const Stack& inputs, const at::TensorOptions& options,
                        c10::optional<at::MemoryFormat> format) {
  const bool ranged = inputs.size() > 3;
  return at::randint_like(self, ranged ? inputs[1].toInt() : 0, inputs[ranged ? 2 : 1].toInt(), options, format);
}

// self, mean, std: of self only sizes, strides and dtype count
bool normal_like_into(const at::Tensor& out, const Stack& inputs) {
  const auto& self = inputs[0].toTensor();
  if (out.sizes() != self.sizes()) return false;
  out.copy_(self.clone().normal_(inputs[1].toDouble(), inputs[2].toDouble(), generator_in(inputs)));
  return true;
}

const std::unordered_map<std::string, DrawInto> kDrawInto{
    {"aten::rand_like.out", like_into<draw_rand>},
    {"aten::randn_like.out", like_into<draw_randn>},
    {"aten::randint_like.out", like_into<draw_randint>},
    {"aten::randint_like.low_dtype_out", like_into<draw_randint>},
    {"aten::normal.out", normal_like_into},
    {"aten::bernoulli.out", bernoulli_into},
    {"aten::normal.Tensor_float_out", normal_into},
    {"aten::normal.float_Tensor_out", normal_into},
    {"aten::normal.Tensor_Tensor_out", normal_into},
    {"aten::rand.out", rand_into},
    {"aten::rand.generator_out", rand_into},
    {"aten::randn.out", randn_into},
    {"aten::randn.generator_out", randn_into},
    {"aten::randint.out", randint_into},
    {"aten::randint.generator_out", randint_into},
    {"aten::randint.low_out", randint_into},
    {"aten::randint.low_generator_out", randint_into},
};

bool draw_into(const OpInfo& info, const std::vector<at::Tensor>& outs, const Stack& inputs) {
  const auto draw = kDrawInto.find(info.name);
  return draw != kDrawInto.end() && draw->second(outs[0], inputs);
}

}  // namespace

bool draw_out_form(const OpInfo& info, Stack& stack, size_t begin) {
  if (info.in_place || info.written.size() != 1) return false;
  const auto draw = kDrawInto.find(info.name);
  if (draw == kDrawInto.end()) return false;
  const auto out = stack.back();
  if (!draw->second(out.toTensor(), Stack(stack.begin() + static_cast<int64_t>(begin), stack.end() - 1))) return false;
  stack.resize(begin);
  stack.push_back(out);
  return true;
}

void run_out_form(const OpInfo& info, Stack& stack, size_t begin) {
  const auto& arguments = info.schema->arguments();
  const auto first = std::ranges::find_if(arguments, [](const c10::Argument& argument) { return argument.is_out(); });
  const auto inputs = begin + static_cast<size_t>(first - arguments.begin());
  check_out_form(info, c10::ArrayRef<c10::IValue>(stack).slice(begin));
  std::vector<at::Tensor> outs;
  for (const auto& in : tensors_in(dispatch::arguments(stack, inputs))) outs.push_back(in.tensor);
  Stack functional(stack.begin() + static_cast<int64_t>(begin), stack.begin() + static_cast<int64_t>(inputs));
  std::vector<c10::IValue> returned(stack.begin() + static_cast<int64_t>(inputs), stack.end());
  if (!draw_into(info, outs, functional)) {
    if (!outs.empty()) tell_dtype(info, outs[0], functional);
    info.functional->callBoxed(&functional);
    auto out = outs.begin();
    for (const auto& in : tensors_in(functional)) {
      if (out != outs.end()) copy_result(info, *out++, in.tensor);
    }
  }
  stack.resize(begin);
  if (!info.schema->returns().empty()) stack.insert(stack.end(), returned.begin(), returned.end());
}

}  // namespace dtensor::dispatch
