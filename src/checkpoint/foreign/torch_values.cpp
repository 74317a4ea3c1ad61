#include "src/checkpoint/foreign/torch_values.hpp"

#include <algorithm>
#include <stdexcept>

namespace dtensor::checkpoints::foreign {

namespace {

using pickle::Kind;

constexpr int kMostDepth = 64;
constexpr size_t kMostName = 4096;
constexpr size_t kVisit = 256;  // bytes that an entry costs beside its name

std::string joined(const std::string& name, std::string_view key) {
  if (name.size() + key.size() >= kMostName) throw std::runtime_error("a name has more than 4096 bytes");
  return name.empty() ? std::string(key) : fmt::format("{}.{}", name, key);
}

std::string what_is(const pickle::Value& value) {
  switch (value.kind) {
    case Kind::none: return "None";
    case Kind::bytes: return "bytes";
    case Kind::dtype: return "a dtype";
    case Kind::storage: return "a storage";
    case Kind::dict: return "an empty dict";
    case Kind::object: return value.name();
    default: return std::string(value.text.substr(0, 60));
  }
}

}  // namespace

void Flattening::put(const std::string& name, Value value) {
  if (index_.tensors.contains(name) || index_.same_as.contains(name) || !index_.values.emplace(name, std::move(value)).second)
    throw std::runtime_error(fmt::format("two things in it are called '{}'", name));
}

void Flattening::add(const std::string& name, const pickle::Value& value, int depth) {
  if (depth > kMostDepth) throw std::runtime_error(fmt::format("it has dicts or lists that are nested more than {} deep", kMostDepth));
  budget_.spend(name.size() + kVisit);
  switch (value.kind) {
    case Kind::boolean: return put(name, value.boolean);
    case Kind::integer: return put(name, value.integer);
    case Kind::real: return put(name, value.real);
    case Kind::text: budget_.spend(value.text.size()); return put(name, std::string(value.text));
    case Kind::tensor: return take_tensor_(name.empty() ? "tensor" : name, value);
    case Kind::dict: return value.items.empty() ? skipped_.add(name, what_is(value)) : add_dict(name, value, depth);
    case Kind::list: return add_list(name, value, depth);
    default: skipped_.add(name, what_is(value));
  }
}

void Flattening::add_dict(const std::string& name, const pickle::Value& dict, int depth) {
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const auto& key = *dict.items[i];
    if (key.kind == Kind::text) add(joined(name, key.text), *dict.items[i + 1], depth + 1);
    else if (key.kind == Kind::integer) add(joined(name, fmt::format("{}", key.integer)), *dict.items[i + 1], depth + 1);
    else skipped_.add(name, "a key that is neither a text nor a number");
  }
}

// What an empty list would have is not known: it is one of no integers.
void Flattening::add_list(const std::string& name, const pickle::Value& list, int depth) {
  if (add_as_one(name, list)) return;
  for (size_t i = 0; i < list.items.size(); ++i) add(joined(name, fmt::format("{}", i)), *list.items[i], depth + 1);
}

bool Flattening::add_as_one(const std::string& name, const pickle::Value& list) {
  const auto all = [&](auto is) { return std::ranges::all_of(list.items, [&](const pickle::Value* item) { return is(item->kind); }); };
  budget_.spend(list.items.size() * sizeof(int64_t));
  if (all([](Kind kind) { return kind == Kind::integer; })) {
    std::vector<int64_t> numbers;
    for (const auto* item : list.items) numbers.push_back(item->integer);
    put(name, std::move(numbers));
  } else if (all([](Kind kind) { return kind == Kind::integer || kind == Kind::real; })) {
    std::vector<double> numbers;
    for (const auto* item : list.items) numbers.push_back(item->kind == Kind::real ? item->real : static_cast<double>(item->integer));
    put(name, std::move(numbers));
  } else if (all([](Kind kind) { return kind == Kind::text; })) {
    std::vector<std::string> texts;
    for (const auto* item : list.items) {
      budget_.spend(item->text.size() + sizeof(std::string));
      texts.emplace_back(item->text);
    }
    put(name, std::move(texts));
  } else {
    return false;
  }
  return true;
}

}  // namespace dtensor::checkpoints::foreign
