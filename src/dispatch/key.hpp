// The exact key of an operator call: everything that a decision may depend on, as a list of words.
#pragma once

#include "src/dispatch/dtensor_impl.hpp"

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstring>

namespace dtensor::dispatch {

class Key {
 public:
  void push(uint64_t word) { words_.push_back(word); }
  void push(const void* pointer) { words_.push_back(reinterpret_cast<uint64_t>(pointer)); }
  void push(const c10::IValue& value);
  void push(const at::Tensor& tensor);
  void push(c10::IntArrayRef numbers);
  void push_number(int64_t number) { push(kNumber), push(static_cast<uint64_t>(number)); }
  void push_bool(bool truth) { push(truth ? kTrue : kFalse); }  // not a number: a mask times 1 is whole numbers, times true a mask
  void push_none() { push(kNone); }

  // Floating-point arguments are kept apart. Most decisions depend only on whether they are zero or not finite. For other decisions the
  // values are added to the key, which is then looked up again.
  bool has_numbers() const { return !numbers_.empty(); }
  void add_numbers() {
    words_.append(numbers_.begin(), numbers_.end());
    numbers_.clear();
  }

  // A sum of products, mixed once at the end; the products are independent, so the processor computes them in parallel.
  uint64_t hash() const {
    uint64_t sum = 0, factor = 0x9e3779b97f4a7c15ull;
    for (const auto word : words_) sum += (word ^ word >> 32) * factor, factor += 0xff51afd7ed558ccaull;
    sum = (sum ^ sum >> 29) * 0xff51afd7ed558ccdull;
    return sum ^ sum >> 32;
  }
  c10::ArrayRef<uint64_t> words() const { return words_; }

 private:
  // A tag says what follows it, so that no two different argument lists give the same words. Tags are odd, unlike the address of a layout,
  // which stands for a distributed tensor.
  static constexpr uint64_t kPinned = 2;
  enum Tag : uint64_t { kPlain = 1, kUndefined = 3, kNone = 5, kNumber = 7, kList = 9, kText = 11, kOpaque = 13, kFalse = 15, kTrue = 17 };

  void push_plain(const at::Tensor& tensor);
  void push_list(const c10::IValue& value);

  c10::SmallVector<uint64_t, 32> words_;
  c10::SmallVector<uint64_t, 4> numbers_;
};

// Called when an operator first sees a leaf. The layer above (src/gradients/leaf_gradients.cpp) sets it while the library is loaded; it
// adds the hook that keeps a leaf's gradient in the leaf's layout.
extern void (*check_leaf)(DTensorImpl* impl);

inline void Key::push(const at::Tensor& tensor) {
  auto* distributed = as_dtensor(tensor);
  if (!distributed) return push_plain(tensor);
  if (!distributed->leaf_checked && distributed->autograd_meta()) check_leaf(distributed);
  push(reinterpret_cast<uint64_t>(distributed->layout().get()) | (distributed->pinned ? kPinned : 0));
}

inline void Key::push(c10::IntArrayRef numbers) {
  push(kList | static_cast<uint64_t>(numbers.size()) << 8);
  for (const auto number : numbers) push_number(number);
}

inline void Key::push(const c10::IValue& value) {
  if (value.isTensor()) {
    push(value.toTensor());
  } else if (value.isInt()) {
    push_number(value.toInt());
  } else if (value.isNone()) {
    push_none();
  } else if (value.isBool()) {
    push_bool(value.toBool());
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    uint64_t word;
    std::memcpy(&word, &number, sizeof(word));
    const uint64_t exponent = word >> 52 & 0x7ff;
    push(kNumber + 64 + (uint64_t{exponent == 0} << 8) + (uint64_t{exponent == 0x7ff} << 9));
    numbers_.push_back(word);
  } else {
    push_list(value);
  }
}

}  // namespace dtensor::dispatch
