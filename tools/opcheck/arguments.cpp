// From the text of a sample to the arguments of an operator.
#include "tools/opcheck/text.hpp"

#include <map>
#include <sstream>

namespace dtensor::opcheck {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

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

namespace {

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

c10::IValue tensor_list(const std::string& text, at::ScalarType base, bool optional) {
  if (text.size() < 2 || text.front() != '{' || text.back() != '}') throw Misfit();
  c10::List<at::Tensor> list;
  c10::List<c10::optional<at::Tensor>> optionals;
  for (const auto& part : split(text.substr(1, text.size() - 2), ';')) {
    const auto element = tensor_from(part, base);
    optional ? optionals.push_back(element.defined() ? c10::optional<at::Tensor>(element) : c10::optional<at::Tensor>())
             : list.push_back(element);
  }
  return optional ? c10::IValue(optionals) : c10::IValue(list);
}

at::ScalarType dtype_named(const std::string& text) {
  static const std::map<std::string, at::ScalarType> names{{"double", at::kDouble}, {"float", at::kFloat},
      {"bfloat16", at::kBFloat16}, {"long", at::kLong}, {"int", at::kInt}, {"bool", at::kBool}, {"half", at::kHalf}, {"byte", at::kByte}};
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
    case c10::TypeKind::TensorType: return tensor_from(text, base);
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
    case c10::TypeKind::DeviceObjType: return c10::Device(text);
    default: throw Misfit();
  }
}

// What an argument gets that neither the text nor the schema gives a value. `tensors` stands for every tensor.
c10::IValue unnamed(const c10::Argument& argument, const std::string& tensors, at::ScalarType base) {
  const auto type = argument.type();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      if (tensors.empty()) throw Misfit();
      return tensor_from(with_meaning(argument.name(), tensors), base);
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

}  // namespace

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
      const bool list = argument.type()->kind() == c10::TypeKind::ListType;
      arguments.push_back(list ? c10::IValue(c10::List<at::Tensor>()) : c10::IValue(at::Tensor()));
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

}  // namespace dtensor::opcheck
