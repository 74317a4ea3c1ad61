// dtensor-checkpoint diff. It holds one tensor of each checkpoint in memory, and a slice of both as numbers that can be compared.
#include "dtensor-checkpoint.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/read.hpp>
#include <dtensor/parallel/patterns.hpp>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

namespace dtensor_checkpoint {

namespace {

using dt::checkpoints::SavedTensor;
using dt::checkpoints::Value;

// How far two tensors are apart, where they are not equal.
struct Distance {
  bool any = false;
  double largest = 0;  // never NaN, so distances have an order
  void add(double distance) {
    any = true;
    largest = std::max(largest, distance);
  }
};

// What is not a number is infinitely far from every number, and equal to what is none either.
void compare(const double* a, const double* b, int64_t count, Distance& distance) {
  for (int64_t i = 0; i < count; ++i) {
    if (a[i] == b[i]) continue;
    const bool is_none = std::isnan(a[i]), other_is_none = std::isnan(b[i]);
    if (is_none && other_is_none) continue;
    distance.add(is_none || other_is_none ? std::numeric_limits<double>::infinity() : std::abs(a[i] - b[i]));
  }
}

// Exact also beyond 2^53, which doubles are not.
void compare(const int64_t* a, const int64_t* b, int64_t count, Distance& distance) {
  for (int64_t i = 0; i < count; ++i) {
    const auto x = static_cast<uint64_t>(a[i]), y = static_cast<uint64_t>(b[i]);
    if (x != y) distance.add(static_cast<double>(a[i] > b[i] ? x - y : y - x));
  }
}

// A slice as numbers of one dtype; complex ones as two numbers each.
at::Tensor numbers_of(at::Tensor slice, bool as_complex, c10::ScalarType dtype) {
  if (as_complex) slice = at::view_as_real(slice.is_complex() ? slice : slice.to(at::kComplexDouble)).reshape({-1});
  return slice.to(dtype).contiguous();
}

// Of two tensors of one size. Integers are compared exactly, all else as doubles.
Distance distance_of(const at::Tensor& a, const at::Tensor& b) {
  constexpr int64_t kSlice = int64_t{1} << 18;
  Distance distance;
  if (a.numel() == 0) return distance;
  if (a.scalar_type() == b.scalar_type() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0) return distance;
  const bool as_complex = a.is_complex() || b.is_complex();
  const bool as_integers = c10::isIntegralType(a.scalar_type(), true) && c10::isIntegralType(b.scalar_type(), true);
  const auto all_a = a.reshape({-1}), all_b = b.reshape({-1});
  for (int64_t at = 0; at < a.numel(); at += kSlice) {
    const auto count = std::min(kSlice, a.numel() - at);
    const auto dtype = as_integers ? at::kLong : at::kDouble;
    const auto x = numbers_of(all_a.narrow(0, at, count), as_complex, dtype), y = numbers_of(all_b.narrow(0, at, count), as_complex, dtype);
    if (as_integers) compare(x.data_ptr<int64_t>(), y.data_ptr<int64_t>(), x.numel(), distance);
    else compare(x.data_ptr<double>(), y.data_ptr<double>(), x.numel(), distance);
  }
  return distance;
}

bool is_same(const Value& a, const Value& b) {
  const auto is_same_number = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  const auto *x = std::get_if<double>(&a), *y = std::get_if<double>(&b);
  if (x && y) return is_same_number(*x, *y);
  const auto *xs = std::get_if<std::vector<double>>(&a), *ys = std::get_if<std::vector<double>>(&b);
  if (xs && ys) return std::ranges::equal(*xs, *ys, is_same_number);
  return a == b;
}

std::string in_short(const Value& value) {
  constexpr size_t kMost = 100;
  const auto text = dt::checkpoints::text_of(value);
  return text.size() <= kMost ? text : fmt::format("{}... ({} letters)", text.substr(0, kMost), text.size());
}

std::string in_short_with_kind(const Value& value) {
  constexpr std::array kKinds{"a bool", "an integer", "a number", "a text", "a list of integers", "a list of numbers", "a list of texts"};
  static_assert(kKinds.size() == std::variant_size_v<Value>);
  return fmt::format("{} ({})", in_short(value), kKinds[value.index()]);
}

struct Side {
  std::string path;
  Index index;

  // Names of tensors, further ones too.
  std::set<std::string> names(const std::string& pattern) const {
    std::set<std::string> names;
    for (const auto& [name, tensor] : index.tensors) names.insert(name);
    for (const auto& [name, other] : index.same_as) names.insert(name);
    std::erase_if(names, [&](const std::string& name) { return !dt::detail::matches(pattern, name); });
    return names;
  }
};

class Comparison {
 public:
  Comparison(const std::string& first, const std::string& second, const std::string& pattern)
      : a_{first, open_index(first)}, b_{second, open_index(second)}, pattern_(pattern) {}

  // Whether anything differs.
  bool run(size_t most) {
    pair_tensors();
    pair_values();
    dt::require(seen_ > 0 || pattern_ == "*", kTag, "neither '{}' nor '{}' has a name that matches '{}'; hint: show lists the names",
                a_.path, b_.path, pattern_);
    compare_tensors(most);
    if (!any_) fmt::print("no difference\n");
    return any_;
  }

 private:
  template <class... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) {
    any_ = true;
    fmt::print("{}\n", fmt::format(text, std::forward<Args>(args)...));
  }

  // What can be told without reading. Two names of one tensor are one pair, where they are that on both sides.
  void pair_tensors() {
    std::set<std::pair<const SavedTensor*, const SavedTensor*>> known;
    for (const auto& name : a_.names(pattern_)) {
      ++seen_;
      const auto *a = a_.index.find(name), *b = b_.index.find(name);
      if (!b) say_one_sided(a_, name);
      if (!a || !b || !known.emplace(a, b).second) continue;
      if (a->dtype != b->dtype) say("{}: {} and {}", name, c10::toString(a->dtype), c10::toString(b->dtype));
      if (a->sizes != b->sizes) say("{}: sizes [{}] and [{}]", name, fmt::join(a->sizes, ", "), fmt::join(b->sizes, ", "));
      else pairs_.emplace_back(name, a->bytes());
    }
    for (const auto& name : b_.names(pattern_)) {
      ++seen_;
      if (!a_.index.find(name)) say_one_sided(b_, name);
    }
  }

  void say_one_sided(const Side& side, const std::string& name) {
    const auto other = side.index.same_as.find(name);
    say("only in {}: {}{}", side.path, name, other == side.index.same_as.end() ? "" : fmt::format(", which is {}", other->second));
  }

  void pair_values() {
    for (const auto& [name, value] : a_.index.values) {
      if (!dt::detail::matches(pattern_, name)) continue;
      ++seen_;
      const auto found = b_.index.values.find(name);
      if (found == b_.index.values.end()) say("only in {}: {} = {}", a_.path, name, in_short(value));
      else if (value.index() != found->second.index())
        say("{}: {} and {}", name, in_short_with_kind(value), in_short_with_kind(found->second));
      else if (!is_same(value, found->second)) say("{}: {} and {}", name, in_short(value), in_short(found->second));
    }
    for (const auto& [name, value] : b_.index.values) {
      if (!dt::detail::matches(pattern_, name)) continue;
      ++seen_;
      if (!a_.index.values.contains(name)) say("only in {}: {} = {}", b_.path, name, in_short(value));
    }
  }

  void compare_tensors(size_t most) {
    std::vector<std::pair<double, std::string>> apart;
    int64_t all = 0, done = 0;
    for (const auto& [name, bytes] : pairs_) all += bytes;
    {
      Progress progress(all);
      for (const auto& [name, bytes] : pairs_) {
        const auto distance = distance_of(dt::checkpoints::read_tensor(a_.index, name), dt::checkpoints::read_tensor(b_.index, name));
        if (distance.any) apart.emplace_back(distance.largest, name);
        progress(done += bytes);
      }
    }
    std::ranges::sort(apart, [](const auto& x, const auto& y) { return x.first != y.first ? x.first > y.first : x.second < y.second; });
    for (size_t i = 0; i < std::min(most, apart.size()); ++i) say("{:.3e}  {}", apart[i].first, apart[i].second);
    if (apart.size() > most) say("and {} tensors more that differ{}", apart.size() - most, most > 0 ? " less" : "");
  }

  const Side a_, b_;
  const std::string pattern_;
  std::vector<std::pair<std::string, int64_t>> pairs_;  // to be read, and the bytes of one side
  int64_t seen_ = 0;                                    // names that match
  bool any_ = false;
};

}  // namespace

int diff(const std::string& first, const std::string& second, const std::string& pattern, size_t most) {
  return Comparison(first, second, pattern).run(most) ? kWrong : 0;
}

}  // namespace dtensor_checkpoint
