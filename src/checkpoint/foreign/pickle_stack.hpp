// The bytes of a pickle, and the stack that its instructions work on.
#pragma once

#include "src/checkpoint/foreign/pickle.hpp"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

namespace dtensor::checkpoints::pickle {

inline constexpr size_t kMostValues = size_t{1} << 26;  // the metadata of a million pieces have as many

[[noreturn]] inline void refuse(const std::string& why) { throw std::runtime_error(why); }

class Stack {
 protected:
  Stack(std::string_view bytes, std::deque<Value>& values) : bytes_(bytes), values_(values) {}

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - next_) refuse("the pickle is cut off");
    const auto part = bytes_.substr(next_, count);
    next_ += count;
    return part;
  }

  template <class T>
  T raw() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  std::string_view line() {
    const auto end = bytes_.find('\n', next_);
    if (end == bytes_.npos) refuse("the pickle is cut off");
    const auto part = bytes_.substr(next_, end - next_);
    next_ = end + 1;
    return part;
  }

  Value& make(Kind kind) {
    if (values_.size() >= kMostValues) refuse(fmt::format("the pickle has more than {} values", kMostValues));
    auto& value = values_.emplace_back();
    value.kind = kind;
    return value;
  }

  bool push(Value& value) {
    stack_.push_back(&value);
    return true;
  }

  bool push(Kind kind) { return push(make(kind)); }

  Value* pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) refuse("the pickle takes a value where there is none");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }

  Value& top() {
    auto* value = pop();
    stack_.push_back(value);
    return *value;
  }

  // What was pushed since the last mark, which is taken away.
  std::vector<Value*> pop_to_mark() {
    if (marks_.empty()) refuse("the pickle goes back to a mark that it has not set");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value*> values(from, stack_.end());
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return values;
  }

  bool mark() {
    marks_.push_back(stack_.size());
    return true;
  }

  const std::string_view bytes_;
  size_t next_ = 0;

 private:
  std::deque<Value>& values_;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;
};

}  // namespace dtensor::checkpoints::pickle
