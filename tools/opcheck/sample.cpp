#include "tools/opcheck/sample.hpp"

#include "src/dispatch/op_info.hpp"

#include <dtensor/error.hpp>
#include <fmt/format.h>
#include <torch/torch.h>

#include <map>
#include <sstream>

namespace dtensor::opcheck {

namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

// What a text that does not fit a schema's types throws: the sample is for other overloads.
struct Misfit {};

std::vector<int64_t> integers(const std::string& text) {
  if (text.size() < 2 || text.front() != '[' || text.back() != ']') throw Misfit();
  std::vector<int64_t> numbers;
  for (const auto& part : split(text.substr(1, text.size() - 2), ',')) {
    try {
      numbers.push_back(std::stoll(part));
    } catch (const std::exception&) {
      throw Misfit();
    }
  }
  return numbers;
}

double number(const std::string& text) {
  size_t used = 0;
  double value = 0;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    throw Misfit();
  }
  if (used != text.size()) throw Misfit();
  return value;
}

at::Tensor drawn(c10::IntArrayRef sizes, at::ScalarType dtype) {
  if (dtype == at::kBool) return torch::rand(sizes) < 0.5;
  if (c10::isIntegralType(dtype, false)) return torch::randint(-9, 10, sizes, at::kLong).to(dtype);
  return torch::randn(sizes, at::kDouble).to(dtype);
}

at::Tensor definite(c10::IntArrayRef sizes, at::ScalarType dtype) {
  const auto factor = torch::randn(sizes, at::kDouble);
  return (factor.matmul(factor.transpose(-1, -2)) + 3 * torch::eye(sizes.back(), at::kDouble)).to(dtype);
}

// Positions in planes of twice the sizes, one in each window of 2.
at::Tensor window_positions(c10::IntArrayRef sizes) {
  auto positions = torch::zeros(sizes, at::kLong);
  for (int64_t d = 2; d < static_cast<int64_t>(sizes.size()); ++d) {
    std::vector<int64_t> shape(sizes.size(), 1);
    shape[d] = sizes[d];
    const auto row = torch::arange(sizes[d], at::kLong).mul(2).reshape(shape);
    positions = positions * (2 * sizes[d]) + row + torch::randint(0, 2, sizes, at::kLong);
  }
  return positions;
}

at::Tensor tensor(const std::string& text, at::ScalarType base) {
  if (text == "-") return {};
  const auto end = text.find(']');
  if (text.empty() || text[0] != '[' || end == std::string::npos) throw Misfit();
  const auto sizes = integers(text.substr(0, end + 1));
  auto marks = text.substr(end + 1);
  const auto floating = c10::isFloatingType(base) ? base : at::kFloat;
  if (!marks.empty() && marks[0] == '<') {
    return torch::randint(0, std::stoll(marks.substr(1)), sizes, at::kLong);
  }
  auto dtype = base;
  const auto has = [&](char mark) { return marks.find(mark) != std::string::npos; };
  if (has('f')) dtype = floating;
  if (has('i')) dtype = at::kLong;
  if (has('?')) dtype = at::kBool;
  if (has('c')) dtype = base == at::kFloat ? at::kComplexFloat : at::kComplexDouble;
  auto result = drawn(sizes, dtype);
  if (has('+')) result = (c10::isIntegralType(dtype, false) ? result.abs() + 1 : result.abs() + 0.25).to(dtype);
  if (has('u')) result = torch::rand(sizes, at::kDouble).mul(0.9).add(0.05).to(floating);
  if (has('o')) result = torch::ones(sizes, dtype);
  if (has('m')) result = window_positions(sizes);
  if (has('p')) result = torch::randperm(sizes.at(0), at::kLong);
  if (has('d')) result = definite(sizes, floating);
  if (has('l')) result = definite(sizes, floating).tril();
  if (has('s')) result = std::get<0>(result.sort(-1));
  if (has('t')) result = result.transpose(-1, -2).contiguous().transpose(-1, -2);
  return result;
}

c10::IValue tensor_list(const std::string& text, at::ScalarType base, bool optional) {
  if (text.size() < 2 || text.front() != '{' || text.back() != '}') throw Misfit();
  c10::List<at::Tensor> list;
  c10::List<c10::optional<at::Tensor>> optionals;
  for (const auto& part : split(text.substr(1, text.size() - 2), ';')) {
    const auto element = tensor(part, base);
    optional ? optionals.push_back(element.defined() ? c10::optional<at::Tensor>(element) : c10::optional<at::Tensor>())
             : list.push_back(element);
  }
  return optional ? c10::IValue(optionals) : c10::IValue(list);
}

at::ScalarType dtype_named(const std::string& text) {
  static const std::map<std::string, at::ScalarType> names{{"double", at::kDouble}, {"float", at::kFloat},
      {"bfloat16", at::kBFloat16}, {"long", at::kLong}, {"int", at::kInt}, {"bool", at::kBool}, {"half", at::kHalf}};
  const auto it = names.find(text);
  if (it == names.end()) throw Misfit();
  return it->second;
}

bool truth(const std::string& text) {
  if (text != "true" && text != "false") throw Misfit();
  return text == "true";
}

at::Scalar scalar(const std::string& text) {
  if (text == "true" || text == "false") return at::Scalar(text == "true");
  const double value = number(text);
  return text.find_first_of(".einf") == std::string::npos ? at::Scalar(static_cast<int64_t>(value)) : at::Scalar(value);
}

c10::IValue list_of(const c10::TypePtr& element, const std::string& text) {
  switch (element->kind()) {
    case c10::TypeKind::IntType: return integers(text);
    case c10::TypeKind::FloatType: {
      if (text.size() < 2 || text.front() != '[') throw Misfit();
      std::vector<double> values;
      for (const auto& part : split(text.substr(1, text.size() - 2), ',')) values.push_back(number(part));
      return values;
    }
    case c10::TypeKind::BoolType: {
      if (text.size() < 2 || text.front() != '[') throw Misfit();
      c10::List<bool> values;
      for (const auto& part : split(text.substr(1, text.size() - 2), ',')) values.push_back(truth(part));
      return values;
    }
    case c10::TypeKind::NumberType: {
      if (text.size() < 2 || text.front() != '[') throw Misfit();
      c10::impl::GenericList values(c10::NumberType::get());
      for (const auto& part : split(text.substr(1, text.size() - 2), ',')) values.push_back(scalar(part));
      return values;
    }
    default: throw Misfit();
  }
}

c10::IValue parse(const c10::TypePtr& type, const std::string& text, at::ScalarType base) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      if (text == "none") return {};
      return parse(type->castRaw<c10::OptionalType>()->getElementType(), text, base);
    case c10::TypeKind::TensorType: return tensor(text, base);
    case c10::TypeKind::ListType: {
      const auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return tensor_list(text, base, false);
      if (element->kind() == c10::TypeKind::OptionalType && element->str().find("Tensor") != std::string::npos) {
        return tensor_list(text, base, true);
      }
      return list_of(element, text);
    }
    case c10::TypeKind::IntType:
      if (!text.empty() && std::isalpha(static_cast<unsigned char>(text[0]))) return static_cast<int64_t>(dtype_named(text));
      return static_cast<int64_t>(number(text));
    case c10::TypeKind::FloatType: return number(text);
    case c10::TypeKind::BoolType: return truth(text);
    case c10::TypeKind::NumberType: return scalar(text);
    case c10::TypeKind::StringType: return text;
    default: throw Misfit();
  }
}

// What an argument gets that neither the text nor the schema gives a value. `tensors` stands for every tensor.
c10::IValue unnamed(const c10::Argument& argument, const std::string& tensors, at::ScalarType base) {
  const auto type = argument.type();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      if (tensors.empty()) throw Misfit();
      return tensor(tensors, base);
    case c10::TypeKind::OptionalType: return {};
    case c10::TypeKind::ListType: {
      const auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType && !tensors.empty()) return tensor_list("{" + tensors + ";[4]}", base, false);
      if (element->kind() == c10::TypeKind::NumberType) return list_of(element, "[1.5,0.5]");
      if (element->kind() == c10::TypeKind::IntType) return std::vector<int64_t>{1};
      throw Misfit();
    }
    case c10::TypeKind::IntType: return int64_t{1};
    case c10::TypeKind::FloatType: return 0.5;
    case c10::TypeKind::BoolType: return false;
    case c10::TypeKind::NumberType: return c10::isFloatingType(base) ? at::Scalar(1.5) : at::Scalar(2);
    default: throw Misfit();
  }
}

Stack arguments_from(const c10::FunctionSchema& schema, const std::string& text, at::ScalarType base) {
  std::map<std::string, std::string> named;
  for (const auto& word : split(text, ' ')) {
    const auto equals = word.find('=');
    named[word.substr(0, equals)] = word.substr(equals + 1);
  }
  const auto all = named.count("*") ? named["*"] : std::string();
  named.erase("*");
  Stack arguments;
  for (const auto& argument : schema.arguments()) {
    const auto it = named.find(argument.name());
    if (argument.is_out()) {
      if (argument.type()->kind() != c10::TypeKind::TensorType) throw Misfit();
      arguments.push_back(at::Tensor());
    } else if (it != named.end()) {
      arguments.push_back(parse(argument.type(), it->second, base));
      named.erase(it);
    } else if (argument.default_value()) {
      arguments.push_back(*argument.default_value());
    } else {
      arguments.push_back(unnamed(argument, all, base));
    }
  }
  if (!named.empty()) throw Misfit();
  return arguments;
}

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

// out= tensors of the right shape and dtype, found by trying.
void complete_out(const Operator& op, Stack& arguments) {
  if (!is_out_form(op.schema())) return;
  const auto written = out_arguments(op.schema());
  const auto functional = functional_results(op, arguments);
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
  throw Misfit();
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

std::optional<Sample> make(const Operator& op, const std::string& text, at::ScalarType dtype, uint64_t seed = 0) {
  Sample sample;
  sample.text = text;
  sample.dtype = dtype;
  try {
    torch::manual_seed(static_cast<uint64_t>(std::hash<std::string>()(text) % 1000 + seed));
    c10::NoGradGuard no_grad;
    sample.arguments = arguments_from(op.schema(), text, dtype);
    complete_out(op, sample.arguments);
    sample.after = deep_copy(sample.arguments);
    sample.results = sample.after;
    torch::manual_seed(0);
    op.handle.callBoxed(&sample.results);
    for (const auto& result : tensors_in(sample.results)) {
      if (result.layout() != at::kStrided || result.is_nested()) return {};
      result.resolve_neg();   // some dtypes have no negative
      result.equal(result);  // some tensors are of libtorch's own transforms, and are not to be looked at
    }
  } catch (const Misfit&) {
    return {};
  } catch (const std::exception&) {
    return {};
  }
  sample.by_chance = agrees_by_chance(sample.arguments) || all_equal(sample.results);
  return sample;
}

}  // namespace

Stack deep_copy(const Stack& values) {
  Stack copies;
  const auto copy = [](const at::Tensor& t) { return t.defined() ? t.detach().clone() : t; };
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

std::optional<Sample> drawn_again(const Operator& op, const Sample& sample) { return make(op, sample.text, sample.dtype, 1000); }

std::vector<Sample> samples_of(const Operator& op, at::ScalarType dtype) {
  auto texts = texts_of(op.base);
  const bool own = !texts.empty();
  if (!own) texts = general_texts();
  std::vector<Sample> samples;
  for (const auto& text : texts) {
    if (auto sample = make(op, text, dtype)) samples.push_back(std::move(*sample));
    if (!own && samples.size() == 6) break;
  }
  return samples;
}

}  // namespace dtensor::opcheck
