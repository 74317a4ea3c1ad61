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

  uint64_t hash() const {
    uint64_t h = 0x9e3779b97f4a7c15ull;
    for (const auto word : words_) h = (h ^ word) * 0xff51afd7ed558ccdull, h ^= h >> 32;
    return h;
  }
  c10::ArrayRef<uint64_t> words() const { return words_; }

 private:
  void push_plain(const at::Tensor& tensor);
  void push_list(const c10::IValue& value);

  c10::SmallVector<uint64_t, 48> words_;
};

// Marks what follows, so that no two different argument lists give the same words.
enum Tag : uint64_t { kDistributed = 1, kPlain, kUndefined, kNone, kNumber, kList, kText, kOpaque };

// Gives leaves the hook that keeps their gradient in their layout; see leaf_gradients.cpp.
void check_leaf(DTensorImpl* impl);

inline void Key::push(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto* impl = value.unsafeToTensorImpl();
    if (is_dtensor_impl(impl)) [[likely]] {
      auto* distributed = static_cast<DTensorImpl*>(const_cast<c10::TensorImpl*>(impl));
      if (!distributed->leaf_checked && distributed->autograd_meta()) check_leaf(distributed);
      push(kDistributed);
      push(distributed->layout().get());
    } else {
      push_plain(value.toTensor());
    }
  } else if (value.isInt()) {
    push(kNumber);
    push(static_cast<uint64_t>(value.toInt()));
  } else if (value.isNone()) {
    push(kNone);
  } else if (value.isBool()) {
    push(kNumber);
    push(static_cast<uint64_t>(value.toBool()));
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    uint64_t word;
    std::memcpy(&word, &number, sizeof(word));
    push(kNumber + 64);
    push(word);
  } else {
    push_list(value);
  }
}

}  // namespace dtensor::dispatch
