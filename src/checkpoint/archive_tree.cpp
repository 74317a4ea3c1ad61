#include "src/checkpoint/archive_tree.hpp"

#include <ATen/core/ivalue.h>
#include <fmt/format.h>

#include <sstream>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

InputArchive reread(const OutputArchive& written) {
  std::ostringstream out;
  const_cast<OutputArchive&>(written).save_to(out);
  const auto bytes = out.str();
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  return archive;
}

template <class T, class Get>
Value list_of(const c10::IValue& list, const Get& get) {
  std::vector<T> items;
  const auto add = [&](const auto& elements) {
    for (const c10::IValue& item : elements) items.push_back(get(item));
  };
  if (list.isTuple()) add(list.toTupleRef().elements());
  else add(list.toListRef());
  return items;
}

Value value_of(const c10::IValue& leaf, const std::string& name) {
  if (leaf.isBool()) return leaf.toBool();
  if (leaf.isInt()) return leaf.toInt();
  if (leaf.isDouble()) return leaf.toDouble();
  if (leaf.isString()) return leaf.toStringRef();
  if (leaf.isIntList()) return leaf.toIntVector();
  if (leaf.isDoubleList()) return leaf.toDoubleVector();
  if (leaf.isTuple() || leaf.isList()) {
    const auto all = [&](const auto& is) {
      if (leaf.isTuple()) {
        for (const auto& item : leaf.toTupleRef().elements()) {
          if (!is(item)) return false;
        }
        return true;
      }
      for (const c10::IValue& item : leaf.toListRef()) {
        if (!is(item)) return false;
      }
      return true;
    };
    if (all([](const auto& item) { return item.isInt(); })) return list_of<int64_t>(leaf, [](const auto& item) { return item.toInt(); });
    if (all([](const auto& item) { return item.isDouble(); }))
      return list_of<double>(leaf, [](const auto& item) { return item.toDouble(); });
    if (all([](const auto& item) { return item.isString(); }))
      return list_of<std::string>(leaf, [](const auto& item) { return item.toStringRef(); });
  }
  throw std::runtime_error(
      fmt::format("'{}' is a {}, which cannot be saved; expected numbers, texts, lists of one of them, tensors", name, leaf.tagKind()));
}

// The value as a leaf of the kind that `like` is of: libtorch's readers insist on it.
c10::IValue leaf_of(const Value& value, const c10::IValue& like) {
  return std::visit(
      [&](const auto& held) -> c10::IValue {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, int64_t> || std::is_same_v<T, double> ||
                      std::is_same_v<T, std::string>) {
          return c10::IValue(held);
        } else if (like.isTuple()) {
          std::vector<c10::IValue> elements(held.begin(), held.end());
          return c10::ivalue::Tuple::create(std::move(elements));
        } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
          c10::List<std::string> list;
          for (const auto& text : held) list.push_back(text);
          return c10::IValue(list);
        } else {
          return c10::IValue(held);
        }
      },
      value);
}

// Calls each(name, key, leaf) for leaves, and for nested archives nested(prefix, key, archive).
template <class Each, class Nested>
void walk(InputArchive& archive, const std::string& prefix, const Each& each, const Nested& nested) {
  for (const auto& key : archive.keys()) {
    InputArchive inner;
    c10::IValue leaf;
    if (archive.try_read(key, inner)) nested(prefix + key + ".", key, inner);
    else if (archive.try_read(key, leaf)) each(prefix + key, key, leaf);
  }
}

void collect(InputArchive& archive, const std::string& prefix, Contents& contents) {
  walk(
      archive, prefix,
      [&](const std::string& name, const std::string&, const c10::IValue& leaf) {
        if (leaf.isTensor()) contents.tensors[name] = leaf.toTensor();
        else if (!leaf.isNone()) contents.values[name] = value_of(leaf, name);
      },
      [&](const std::string& inside, const std::string&, InputArchive& inner) { collect(inner, inside, contents); });
}

void copy(InputArchive& from, const std::string& prefix, const Leaves& leaves, OutputArchive& to) {
  walk(
      from, prefix,
      [&](const std::string& name, const std::string& key, const c10::IValue& leaf) {
        if (leaf.isTensor()) {
          const auto* tensor = leaves.tensor(name);
          return to.write(key, tensor ? *tensor : leaf.toTensor());
        }
        const auto* value = leaves.value(name);
        to.write(key, value ? leaf_of(*value, leaf) : leaf);
      },
      [&](const std::string& inside, const std::string& key, InputArchive& inner) {
        OutputArchive nested(to.compilation_unit());
        copy(inner, inside, leaves, nested);
        to.write(key, nested);
      });
}

}  // namespace

Contents contents_of(const std::function<void(OutputArchive&)>& save) {
  OutputArchive written;
  save(written);
  auto archive = reread(written);
  Contents contents;
  collect(archive, "", contents);
  return contents;
}

void load_from(const Leaves& leaves, const std::function<void(OutputArchive&)>& save, const std::function<void(InputArchive&)>& load) {
  OutputArchive written;
  save(written);
  auto like = reread(written);
  OutputArchive changed;
  copy(like, "", leaves, changed);
  auto archive = reread(changed);
  load(archive);
}

}  // namespace dtensor::checkpoints
