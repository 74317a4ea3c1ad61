// Whether a sample is a fair question: libtorch's own operator must have one answer to it, whatever lies around its operands.
#include "tools/opcheck/check.hpp"

#include "src/dispatch/op_info.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <future>
#include <limits>

namespace dtensor::opcheck {

namespace {

using Copy = std::function<at::Tensor(const at::Tensor&)>;

Stack copied(const Stack& values, const Copy& copy) {
  auto copies = deep_copy(values);
  const auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? copy(tensor) : tensor; };
  for (auto& value : copies) {
    if (value.isTensor()) value = one(value.toTensor());
    if (!value.isTensorList()) continue;
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) list.push_back(one(element.toTensor()));
    value = list;
  }
  return copies;
}

at::Tensor in_row_major_order(const at::Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

// What memory beside operands holds: positions that most lengths have, and numbers of which one shows in what is computed with it.
at::Scalar beside(at::ScalarType dtype, bool other) {
  if (dtype == at::kBool) return other;
  if (c10::isIntegralType(dtype, false)) return other ? 2 : 1;
  return other ? std::numeric_limits<double>::quiet_NaN() : 0.25;
}

// A larger memory that an operand is a piece of, and what it holds beside that.
struct Around {
  at::Tensor memory, held;
  int64_t begin, end;  // of the operand

  bool is_written() const {
    const auto same = [&](int64_t first, int64_t last) {
      return memory.slice(0, first, last).view(at::kByte).equal(held.slice(0, first, last).view(at::kByte));
    };
    return !same(0, begin) || !same(end, memory.numel());
  }
};

// The tensor as a piece of a larger memory.
Copy between(bool other, std::vector<Around>& memories) {
  return [other, &memories](const at::Tensor& tensor) {
    const auto kept = stored(tensor);
    const auto dense = kept.clone();
    const int64_t around = 2 * dense.numel() + 64;
    const auto memory = at::full({dense.numel() + 2 * around}, beside(dense.scalar_type(), other), dense.options());
    const auto piece = memory.as_strided(dense.sizes(), dense.strides(), around).copy_(dense);
    memories.push_back({memory, memory.clone(), around, around + dense.numel()});
    return kept.sizes() == tensor.sizes() ? piece : piece.expand(tensor.sizes());
  };
}

// What one device returns and writes.
struct Answer {
  std::vector<at::Tensor> results, after;
};

// In a thread of its own, for which no kernel has kept anything of earlier calls.
Answer answered(const Operator& op, const Stack& arguments) {
  const auto answer = [&] {
    c10::NoGradGuard no_grad;
    auto stack = arguments;
    op.handle.callBoxed(&stack);
    return Answer{tensors_in(stack, true), tensors_in(arguments, true)};
  };
  FilledMemory memory(0x35);
  torch::manual_seed(0);
  return std::async(std::launch::async, answer).get();
}

// Memory that nobody wrote holds the same in both.
bool alike(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others, double least) {
  return std::ranges::equal(some, others, [&](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() && (!a.defined() || close(b, a, least));
  });
}

bool answers_alike(const Operator& op, const Sample& sample, const Stack& arguments) {
  const auto answer = answered(op, arguments);
  const double least = rounding_of(sample);
  return alike(tensors_in(sample.results, true), answer.results, least) && alike(tensors_in(sample.after, true), answer.after, least);
}

// Strides and offsets among the arguments count in the memory of the operand.
bool has(const Operator& op, const char* argument) { return op.schema().argumentIndexWithName(argument).has_value(); }
bool counts_strides(const Operator& op) { return has(op, "size") && has(op, "stride"); }
bool counts_offsets(const Operator& op) { return has(op, "storage_offset") || dispatch::info_of(op.handle).changes_metadata; }

bool lie_in_row_major_order(const Stack& arguments) {
  const auto tensors = tensors_in(arguments);
  return std::ranges::all_of(tensors, [](const auto& tensor) { return tensor.is_contiguous(); });
}

// An out= form writes all of its result.
Stack with_other_out(const Operator& op, const Stack& arguments) {
  auto copies = deep_copy(arguments);
  for (const auto i : out_arguments(op.schema())) {
    for (auto& tensor : tensors_in({copies[i]})) tensor.fill_(tensor.scalar_type() == at::kBool ? 0 : 5);
  }
  return copies;
}

// Every second element of a row, which no kernel takes in vectors.
at::Tensor apart(const at::Tensor& tensor) {
  const auto row = at::zeros({2 * tensor.numel()}, tensor.options().requires_grad(false)).slice(0, 0, 2 * tensor.numel(), 2);
  return row.copy_(tensor.detach().reshape({-1})).view(tensor.sizes());
}

// Of a pointwise operator: the operands that have most dims are repeated along a new one, so that all of the first lies in whole vectors.
Stack repeated(const Operator& op, const Stack& arguments) {
  int64_t ndim = 0;
  for (const auto& tensor : tensors_in(arguments)) ndim = std::max(ndim, tensor.dim());
  auto copies = copied(arguments, [&](const at::Tensor& tensor) {
    std::vector<int64_t> counts(ndim + 1, 1);
    counts[0] = 16;
    return tensor.dim() < ndim ? tensor : tensor.repeat(counts);
  });
  for (const auto i : out_arguments(op.schema())) {
    if (copies[i].isTensor()) copies[i] = at::empty({0}, copies[i].toTensor().options());
  }
  return copies;
}

// Whether each of the repeated is what is expected.
bool repeats(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  return std::ranges::equal(got, expected, [](const at::Tensor& some, const at::Tensor& one) {
    if (!some.defined() || !one.defined()) return some.defined() == one.defined();
    return close(some, some.dim() == one.dim() + 1 ? one.unsqueeze(0).expand(some.sizes()) : one);
  });
}

bool has_limits(const Stack& arguments) {
  const auto operands = tensors_in(arguments);
  return std::ranges::any_of(operands, [](const at::Tensor& operand) {
    return (operand.is_floating_point() || operand.is_complex()) && !operand.isfinite().all().item<bool>();
  });
}

}  // namespace

bool alike_on_vectors(const Operator& op, const Sample& sample,
                      const std::function<std::vector<at::Tensor>(const Stack&, bool)>& call, const std::vector<at::Tensor>& expected) {
  if (op.family != "pointwise" || is_random(op) || !has_limits(sample.arguments)) return true;
  const auto agrees = [&](const Stack& arguments, bool more) {
    try {
      return repeats(call(arguments, more), expected);
    } catch (const std::exception&) {  // it asks for another order of memory, or for as many dims
      return true;
    }
  };
  return agrees(copied(sample.arguments, apart), false) && agrees(repeated(op, sample.arguments), true);
}

// Of numbers of 16 bits: how the sum is parted decides whether it is too large.
bool overflows(const Sample& sample) {
  if (sample.dtype != at::kHalf || has_limits(sample.arguments)) return false;
  const auto results = tensors_in(sample.results, true);
  return std::ranges::any_of(results, [](const at::Tensor& result) {
    return result.defined() && result.is_floating_point() && !result.isfinite().all().item<bool>();
  });
}

// Convolutions in 16 bits: on CPUs that multiply such numbers in pairs, oneDNN adds a zero channel to a single one, and zero times infinity
// is NaN.
bool adds_zeros(const Operator& op, const Sample& sample) {
  return op.base.find("conv") != std::string::npos && c10::elementSize(sample.dtype) == 2 && has_limits(sample.arguments);
}

// Operators that give an operand another shape without saying so.
bool reshapes_unsaid(const Operator& op, const Sample& sample) {
  if (dispatch::info_of(op.handle).changes_metadata || dispatch::info_of(op.handle).becomes) return false;
  const auto written = written_arguments(op.schema());
  for (size_t i = 0; i < sample.arguments.size(); ++i) {
    if (std::ranges::find(written, static_cast<int>(i)) != written.end()) continue;
    const auto before = tensors_in({sample.arguments[i]}, true), after = tensors_in({sample.after[i]}, true);
    for (size_t k = 0; k < before.size(); ++k) {
      if (before[k].defined() && before[k].sizes() != after[k].sizes()) return true;
    }
  }
  return false;
}

// Eigenvalues come in an order that rounding decides on.
bool orders_by_rounding(const Operator& op, const Sample& sample) {
  return op.base.find("eigvals") != std::string::npos && c10::isIntegralType(sample.dtype, true);
}

std::string unsound(const Operator& op, const Sample& sample) {
  if (overflows(sample)) return "overflows where others may not";
  if (adds_zeros(op, sample)) return "multiplies infinities by zeros that it adds";
  if (reshapes_unsaid(op, sample)) return "reshapes an operand without saying so";
  if (orders_by_rounding(op, sample)) return "orders its results by their rounding";
  if (is_uninitialized(op) || counts_offsets(op)) return "";
  try {
    for (const bool other : {false, true}) {
      std::vector<Around> memories;
      if (!answers_alike(op, sample, copied(sample.arguments, between(other, memories)))) return "reads what lies beside its operands";
      const bool may_grow = is_out_form(op.schema());  // into the memory around
      if (!may_grow && std::ranges::any_of(memories, [](const Around& memory) { return memory.is_written(); }))
        return "writes beside its operands";
    }
    if (is_out_form(op.schema()) && !answers_alike(op, sample, with_other_out(op, sample.arguments))) return "leaves of out= what it held";
    const auto again = [&](const Stack& arguments, bool) { return answered(op, arguments).results; };
    if (!alike_on_vectors(op, sample, again, tensors_in(sample.results, true))) return "treats NaN in another way on vectors";
    const bool by_memory = is_random(op) || counts_strides(op);  // random numbers are drawn in the order of memory
    if (by_memory || lie_in_row_major_order(sample.arguments)) return "";
    if (!answers_alike(op, sample, copied(sample.arguments, in_row_major_order))) return "depends on the order of memory";
  } catch (const std::exception&) {
    return "refuses the same operands as they lie elsewhere";
  }
  return "";
}

}  // namespace dtensor::opcheck
