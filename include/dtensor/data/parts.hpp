// Visits what a batch of a data loader is made of: tensors, numbers and texts, in examples, lists and tuples.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::data {

// Visits the tensors, numbers and texts of a batch one after the other, always in the same order, and may change them. For a struct of your
// own, write this function beside it, in its namespace:
//
//   void visit_parts(dtensor::data::PartVisitor& visit, MyBatch& batch) { visit(batch.images, batch.boxes, batch.names); }
class PartVisitor {
 public:
  virtual ~PartVisitor() = default;

  virtual void tensor(at::Tensor& tensor) = 0;
  virtual void bytes(void* data, size_t size) = 0;                // of a number or a text
  virtual size_t length(size_t size) { return size; }             // of a list; returns the length that it shall have
  virtual void examples(bool begin) { static_cast<void>(begin); }  // a list of examples begins or ends: their tensors have no batch dim

  template <class... Parts>
  void operator()(Parts&... parts);
};

namespace detail {

// One of the functions below, or one that is written beside T.
template <class T>
concept HasParts = requires(PartVisitor& visit, T& value) { visit_parts(visit, value); };

template <class T>
inline constexpr bool kCanBeMade = std::is_default_constructible_v<T>;

template <class T>
void visit_part(PartVisitor& visit, T& value) {
  static_assert(!std::is_const_v<T>,
                "dt::batches writes to what it visits: let visit_parts take the batch by a reference that is not const");
  static_assert(HasParts<T> || std::is_const_v<T>,
                "dt::batches does not know what this type is made of; beside it, in its namespace, write: "
                "void visit_parts(dtensor::data::PartVisitor& visit, MyType& value) { visit(value.image, value.label); }");
  if constexpr (HasParts<T> && !std::is_const_v<T>) visit_parts(visit, value);
}

template <class T>
void visit_list(PartVisitor& visit, std::vector<T>& list) {
  static_assert(!std::is_same_v<T, bool>, "dt::batches cannot visit a std::vector<bool>; use a std::vector<char>, or a tensor");
  static_assert(kCanBeMade<T>, "dt::batches makes this list on ranks that receive it: give its elements a default constructor");
  if constexpr (kCanBeMade<T> && !std::is_same_v<T, bool>) {
    list.resize(visit.length(list.size()));
    for (auto& element : list) visit(element);
  }
}

}  // namespace detail

template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
void visit_parts(PartVisitor& visit, T& value) {
  visit.bytes(&value, sizeof value);
}

inline void visit_parts(PartVisitor& visit, at::Tensor& tensor) { visit.tensor(tensor); }

inline void visit_parts(PartVisitor& visit, std::string& text) {
  text.resize(visit.length(text.size()));
  visit.bytes(text.data(), text.size());
}

template <class T>
void visit_parts(PartVisitor& visit, std::vector<T>& list) {
  detail::visit_list(visit, list);
}

template <class T, size_t n>
void visit_parts(PartVisitor& visit, std::array<T, n>& list) {
  for (auto& element : list) visit(element);
}

template <class T>
void visit_parts(PartVisitor& visit, std::optional<T>& value) {
  static_assert(detail::kCanBeMade<T>, "dt::batches makes this value on ranks that receive it: give it a default constructor");
  if constexpr (detail::kCanBeMade<T>) {
    if (visit.length(value.has_value()) == 0) return value.reset();
    if (!value) value.emplace();
    visit(*value);
  }
}

template <class A, class B>
void visit_parts(PartVisitor& visit, std::pair<A, B>& pair) {
  visit(pair.first, pair.second);
}

template <class... T>
void visit_parts(PartVisitor& visit, std::tuple<T...>& tuple) {
  std::apply([&](auto&... parts) { visit(parts...); }, tuple);
}

template <class... Parts>
void PartVisitor::operator()(Parts&... parts) {
  (detail::visit_part(*this, parts), ...);
}

}  // namespace dtensor::data

#pragma GCC visibility pop
