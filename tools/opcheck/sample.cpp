// Samples: texts that the operator takes on one device, and what it gives for them.
#include "tools/opcheck/check.hpp"

#include "src/dispatch/op_info.hpp"
#include "tools/opcheck/text.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <malloc.h>

#include <algorithm>
#include <regex>

namespace dtensor::opcheck {

namespace {

// What the form without out= gives; nothing where there is none.
std::vector<at::Tensor> functional_results(const Operator& op, const Stack& arguments) {
  const auto& functional = dispatch::info_of(op.handle).functional;
  if (!functional) return {};
  auto stack = deep_copy(Stack(arguments.begin(), arguments.begin() + out_arguments(op.schema()).front()));
  functional->callBoxed(&stack);
  return tensors_in(stack);
}

// Some of libtorch's out= forms do not do what the operator does otherwise.
bool agrees(const Operator& op, const std::vector<at::Tensor>& expected, const Stack& with_out) {
  if (is_random(op) || is_uninitialized(op)) return true;
  const auto written = out_arguments(op.schema());
  for (size_t k = 0; k < written.size() && k < expected.size(); ++k) {
    const auto got = with_out[written[k]].toTensor();
    if (got.scalar_type() != expected[k].scalar_type() || got.sizes() != expected[k].sizes()) return false;
    if (got.numel() > 0 && !got.equal(expected[k]) &&
        !at::allclose(got.to(at::kComplexDouble), expected[k].to(at::kComplexDouble), 1e-3, 1e-3, true))
      return false;
  }
  return true;
}

// out= tensors of the right shape and dtype, found by trying. A list is as long as what the functional form gives.
void complete_out(const Operator& op, Stack& arguments) {
  if (!is_out_form(op.schema())) return;
  const auto written = out_arguments(op.schema());
  const auto functional = functional_results(op, arguments);
  if (arguments[written[0]].isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& result : functional) list.push_back(at::full_like(result, 3));
    arguments[written[0]] = list;
    return;
  }
  for (const auto dtype :
       {arguments[0].isTensor() && arguments[0].toTensor().defined() ? arguments[0].toTensor().scalar_type() : at::kDouble, at::kDouble,
        at::kBool, at::kLong, at::kFloat, at::kComplexDouble, at::kInt}) {
    for (const bool index : {false, true}) {  // the second result may be indices
      auto trial = deep_copy(arguments);
      for (size_t k = 0; k < written.size(); ++k) {
        trial[written[k]] = at::empty({0}, k < functional.size() ? functional[k].scalar_type() : index && k > 0 ? at::kLong : dtype);
      }
      auto stack = trial;
      try {
        op.handle.callBoxed(&stack);
      } catch (const std::exception&) {
        continue;
      }
      if (!agrees(op, functional, trial)) throw Misfit();
      for (const auto i : written) arguments[i] = at::full_like(trial[i].toTensor(), 3);
      return;
    }
  }
  if (functional.size() != written.size()) throw Misfit();
  for (size_t k = 0; k < written.size(); ++k) arguments[written[k]] = at::full_like(functional[k], 3);  // some make no room
}

bool agrees_by_chance(const Stack& arguments) {
  for (const auto& tensor : tensors_in(arguments)) {
    if (tensor.numel() < 3) return true;
    for (const auto size : tensor.sizes()) {
      if (size == 1) return true;
    }
  }
  return false;
}

bool all_equal(const Stack& results) {
  for (const auto& tensor : tensors_in(results)) {
    if (tensor.numel() > 0 && !tensor.is_complex() && tensor.eq(tensor.reshape({-1})[0]).all().item<bool>()) return true;
  }
  return false;
}

// What the operator returns, with random numbers of one seed. `after`: the arguments then.
Stack called(const Operator& op, const Stack& arguments, Stack& after, int byte) {
  FilledMemory memory(byte);
  after = deep_copy(arguments);
  auto stack = after;
  torch::manual_seed(0);
  op.handle.callBoxed(&stack);
  return stack;
}

// Where two runs differ; undefined where they do not.
std::vector<at::Tensor> differences(const std::vector<at::Tensor>& first, const std::vector<at::Tensor>& second) {
  std::vector<at::Tensor> found(first.size());
  for (size_t i = 0; i < first.size() && i < second.size(); ++i) {
    if (!first[i].defined() || !second[i].defined() || first[i].sizes() != second[i].sizes()) continue;
    const auto both_nan = first[i].ne(first[i]).logical_and(second[i].ne(second[i]));
    const auto differs = first[i].ne(second[i]).logical_and(both_nan.logical_not());
    if (differs.any().item<bool>()) found[i] = differs;
  }
  return found;
}

bool is_expanded(const at::Tensor& tensor) { return stored(tensor).sizes() != tensor.sizes(); }

// Whether the operator wrote an expanded operand, or would have if there had been something to write: libtorch refuses that where it looks.
bool writes_expanded(const Operator& op, const Stack& before, const Stack& after) {
  const auto was = tensors_in(before), is = tensors_in(after);
  for (size_t i = 0; i < was.size(); ++i) {
    if (is_expanded(was[i]) && !was[i].equal(is[i])) return true;
  }
  const auto written = written_arguments(op.schema());
  return std::ranges::any_of(written, [&](int i) {
    const auto tensors = tensors_in({before[i]});
    return std::ranges::any_of(tensors, is_expanded);
  });
}

// Some in-place forms resize what they write where it should broadcast. Distributed tensors refuse that, but not operators that do
// nothing else.
bool resizes_in_place(const Operator& op, const Sample& sample) {
  const auto& info = dispatch::info_of(op.handle);
  return !is_out_form(op.schema()) && !info.changes_metadata && !info.becomes && resized(op.schema(), sample.after, sample.arguments);
}

// libtorch's fused optimizers go through the tensors of a parameter as through one, and do not look whether these are alike.
bool are_alike(const Operator& op, const Stack& arguments) {
  if (!std::regex_match(op.base, std::regex("_fused_(adam|adamw|sgd|adagrad)"))) return true;
  const auto parameters = arguments[0].toTensorVector();
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (!arguments[i].isTensorList() || op.schema().arguments()[i].name() == "state_steps") continue;
    const auto others = arguments[i].toTensorVector();
    for (size_t k = 0; k < std::min(parameters.size(), others.size()); ++k) {
      if (others[k].sizes() != parameters[k].sizes() || others[k].strides() != parameters[k].strides()) return false;
    }
  }
  return true;
}

std::optional<Sample> make(const Operator& op, const std::string& text, at::ScalarType dtype, uint64_t seed = 0) {
  Sample sample;
  sample.text = text;
  sample.dtype = dtype;
  try {
    torch::manual_seed(static_cast<uint64_t>(std::hash<std::string>()(text) % 1000 + seed));
    c10::NoGradGuard no_grad;
    sample.arguments = arguments_from(op.schema(), text, dtype);
    if (!are_alike(op, sample.arguments)) return {};
    complete_out(op, sample.arguments);
    sample.results = called(op, sample.arguments, sample.after, 0x35);
    for (const auto& result : tensors_in(sample.results)) {
      if (result.layout() != at::kStrided || result.is_nested()) return {};
      result.resolve_neg();   // some dtypes have no negative
      result.equal(result);  // some tensors are of libtorch's own transforms, and are not to be looked at
    }
    if (writes_expanded(op, sample.arguments, sample.after) || resizes_in_place(op, sample)) return {};
    Stack after;
    const auto again = called(op, sample.arguments, after, 0x4a);
    sample.undetermined = differences(tensors_in(sample.results, true), tensors_in(again, true));
    sample.undetermined_after = differences(tensors_in(sample.after, true), tensors_in(after, true));
  } catch (const Misfit&) {
    return {};
  } catch (const std::exception&) {
    return {};
  }
  sample.by_chance = agrees_by_chance(sample.arguments) || all_equal(sample.results);
  return sample;
}

std::optional<Sample> tried(const Operator& op, const std::string& text, at::ScalarType dtype, const Attempt& attempt) {
  const auto call = fmt::format("{} ({})", text, c10::toString(dtype));
  if (attempt.begin && !attempt.begin(call)) return {};
  auto sample = make(op, text, dtype);
  const auto why = sample ? unsound(op, *sample) : std::string();
  if (why.empty()) return sample;
  if (attempt.leave_out) attempt.leave_out(call + ": " + why);
  return {};
}

}  // namespace

FilledMemory::FilledMemory(int byte) { mallopt(M_PERTURB, byte); }
FilledMemory::~FilledMemory() { mallopt(M_PERTURB, 0); }

at::Tensor stored(const at::Tensor& tensor) {
  auto result = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) result = result.narrow(d, 0, 1);
  }
  return result;
}

Stack deep_copy(const Stack& values) {
  Stack copies;
  const auto copy = [](const at::Tensor& t) {
    if (!t.defined()) return t;
    const auto kept = stored(t.detach());
    return kept.sizes() == t.sizes() ? kept.clone() : kept.clone().expand(t.sizes());
  };
  for (const auto& value : values) {
    if (value.isTensor()) {
      copies.push_back(copy(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : value.toListRef()) list.push_back(copy(element.toTensor()));
      copies.push_back(list);
    } else {
      copies.push_back(value);  // lists of optional tensors hold indices, which nobody writes
    }
  }
  return copies;
}

std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values, bool undefined) {
  std::vector<at::Tensor> found;
  for (const auto& value : values) {
    if (value.isTensor()) {
      if (undefined || value.toTensor().defined()) found.push_back(value.toTensor());
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isTensor() && (undefined || element.toTensor().defined())) found.push_back(element.toTensor());
      }
    }
  }
  return found;
}

bool resized(const c10::FunctionSchema& schema, const Stack& now, const Stack& before) {
  for (const auto i : written_arguments(schema)) {
    const auto after = tensors_in({now[i]}), was = tensors_in({before[i]});
    for (size_t k = 0; k < after.size(); ++k) {
      if (after[k].sizes() != was[k].sizes()) return true;
    }
  }
  return false;
}

std::optional<Sample> drawn_again(const Operator& op, const Sample& sample) { return make(op, sample.text, sample.dtype, 1000); }

std::vector<Sample> samples_of(const Operator& op, at::ScalarType dtype, const Attempt& attempt) {
  auto texts = texts_of(op.base);
  const bool own = !texts.empty();
  if (!own) texts = general_texts();
  std::vector<Sample> samples;
  for (const auto& text : texts) {
    if (auto sample = tried(op, text, dtype, attempt)) samples.push_back(std::move(*sample));
    if (!own && samples.size() == 6) break;
  }
  return samples;
}

std::vector<Sample> widened_samples(const Operator& op, const std::vector<std::string>& texts, size_t count, const Attempt& attempt) {
  static constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kDouble, at::kFloat, at::kDouble, at::kHalf, at::kDouble,
                                               at::kLong,   at::kDouble, at::kByte,  at::kDouble, at::kBFloat16, at::kDouble, at::kInt};
  auto classes = widened(op.schema(), texts);
  std::vector<Sample> samples;
  size_t number = 0;
  const auto take_one = [&](std::vector<std::string>& some) {  // the first that the operator takes
    for (bool taken = false; !taken && !some.empty(); some.pop_back()) {
      for (const auto dtype : {kDtypes[number++ % std::size(kDtypes)], at::kDouble}) {
        auto sample = tried(op, some.back(), dtype, attempt);
        taken = sample.has_value();
        if (taken) samples.push_back(std::move(*sample));
        if (taken || dtype == at::kDouble) break;
      }
    }
  };
  const auto left = [](const auto& some) { return !some.empty(); };
  while (samples.size() < count && std::ranges::any_of(classes, left)) {
    for (size_t c = 0; c < classes.size() && samples.size() < count; ++c) take_one(classes[c]);
  }
  return samples;
}

}  // namespace dtensor::opcheck
