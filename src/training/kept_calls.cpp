#include "src/training/kept_calls.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/tensors_in.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/tensor/tensor.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <dtensor/tensor/spread.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <mutex>

namespace dtensor {

namespace {

bool is_operator(const std::string& name) {
  for (const auto& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name == name || c10::toString(known) == name) return true;
  }
  return false;
}

bool only_writes(const std::string& name) {
  for (const auto& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name != name && c10::toString(known) != name) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(known);
    if (op && !op->schema().is_mutable()) return false;
  }
  return true;
}

// Once per name and process: there are thousands of operators.
void check_name(const std::string& name) {
  static std::mutex mutex;
  static std::unordered_set<std::string> good;
  const std::lock_guard<std::mutex> lock(mutex);
  if (good.count(name)) return;
  require(is_operator(name), "checkpoint", "there is no operator '{}' to save the results of; hint: names are like aten::mm", name);
  require(!only_writes(name), "checkpoint",
          "'{}' writes to its operands, so its results cannot be kept; hint: name the form that returns a new tensor", name);
  good.insert(name);
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.storage_offset() == b.storage_offset();
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  if (!b.defined() || is_dtensor(a) != is_dtensor(b) || a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.strides() != b.strides()) return false;
  if (!is_dtensor(a)) return a.has_storage() && b.has_storage() && same_memory(a, b);
  return &DTensor(a).layout() == &DTensor(b).layout() && same_memory(dtensor::local_shard(a), dtensor::local_shard(b));
}

detail::SavedFrom origin(const at::Tensor& saved, const std::vector<at::Tensor>& arguments, const std::vector<at::Tensor>& results) {
  using detail::SavedFrom;
  const auto is_saved = [&](const at::Tensor& tensor) { return same(saved, tensor); };
  const auto argument = std::ranges::find_if(arguments, is_saved);
  if (argument != arguments.end()) return {SavedFrom::argument, static_cast<size_t>(argument - arguments.begin())};
  const auto result = std::ranges::find_if(results, is_saved);
  if (result != results.end()) return {SavedFrom::result, static_cast<size_t>(result - results.begin())};
  return {};
}

}  // namespace

std::vector<std::string> matrix_products() {
  std::vector<std::string> names;
  for (const char* name :
       {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::convolution",
        "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_cudnn_attention"}) {
    if (is_operator(name)) names.emplace_back(name);
  }
  return names;
}

namespace detail {

KeptOperators::KeptOperators(const std::vector<std::string>& names) : names_(names.begin(), names.end()) {
  for (const auto& name : names) check_name(name);
}

bool KeptOperators::has(const c10::OperatorHandle& op) const {
  if (names_.count(op.operator_name().name) == 0 && names_.count(c10::toString(op.operator_name())) == 0) return false;
  return !op.schema().is_mutable();
}

std::vector<at::Tensor> tensors_on_top(const c10::Stack& stack, size_t count) {
  std::vector<at::Tensor> tensors;
  for (const auto& in : tensors_in(c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count))) tensors.push_back(in.tensor);
  return tensors;
}

KeptCall::KeptCall(const c10::OperatorHandle& op, const std::vector<at::Tensor>& arguments, const c10::Stack& stack,
                   const std::vector<at::Tensor>& saved, const std::vector<c10::Device>& devices)
    : name_(op.operator_name()) {
  const auto count = op.schema().returns().size();
  for (auto it = stack.end() - static_cast<std::ptrdiff_t>(count); it != stack.end(); ++it) {
    values_.push_back(with_tensors(*it, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      results_.push_back({static_cast<uint32_t>(tensor._version()), tensor.requires_grad()});
      return tensor.tensor_data();
    }));
  }
  const auto results = tensors_on_top(stack, count);
  for (const auto& tensor : saved) saved_.push_back(origin(tensor, arguments, results));
  const bool is_libtorchs = name_.name.compare(0, 6, "aten::") == 0;  // others' operators have tags if their authors thought of it
  if (op.hasTag(at::Tag::nondeterministic_seeded) || !is_libtorchs) random_ = RandomState::now(devices);
}

std::vector<at::Tensor> KeptCall::replay(const c10::OperatorHandle& op, c10::Stack* stack) const {
  require(op.operator_name() == name_, "checkpoint", "the function did not do the same again: it called {} where it had called {}",
          c10::toString(op.operator_name()), c10::toString(name_));
  stack->resize(stack->size() - op.schema().arguments().size());
  size_t next = 0;
  for (const auto& value : values_) {
    stack->push_back(with_tensors(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      const auto& result = results_[next++];
      require(static_cast<uint32_t>(tensor._version()) == result.version, "checkpoint",
              "a result of {}, which is kept, was written to in place; hint: do not save the results of this operator, or write to a copy",
              c10::toString(name_));
      auto again = tensor.tensor_data();
      again.set_requires_grad(result.requires_grad);
      return again;
    }));
  }
  if (random_) random_->apply();
  return tensors_on_top(*stack, values_.size());
}

}  // namespace detail
}  // namespace dtensor
