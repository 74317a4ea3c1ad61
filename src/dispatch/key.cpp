#include "src/dispatch/key.hpp"

#include "src/dispatch/cache.hpp"

#include <functional>
#include <string>

namespace dtensor::dispatch {

void (*check_leaf)(DTensorImpl* impl) = nullptr;

void Key::push_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    push(kUndefined);
    return;
  }
  push(kPlain);
  push(static_cast<uint64_t>(tensor.scalar_type()) | static_cast<uint64_t>(tensor.dim()) << 8 |
       static_cast<uint64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()) << 16 |
       static_cast<uint64_t>(tensor.device().type()) << 24);
  for (const auto size : tensor.sizes()) push(static_cast<uint64_t>(size));
  for (const auto stride : tensor.strides()) push(static_cast<uint64_t>(stride));
}

void Key::push_list(const c10::IValue& value) {
  if (value.isList()) {
    const auto list = value.toListRef();
    push(kList | static_cast<uint64_t>(list.size()) << 8);
    for (const auto& element : list) push(element);
  } else if (value.isString()) {
    const auto text = value.toStringView();
    push(kText | static_cast<uint64_t>(text.size()) << 8);
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
      push(word);
    }
  } else if (value.isDevice()) {
    push(kNumber + 128);
    push(static_cast<uint64_t>(value.toDevice().type()) << 32 | static_cast<uint8_t>(value.toDevice().index()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    push(c10::IValue(number.real()));
    push(c10::IValue(number.imag()));
  } else {
    push(kOpaque);  // generators, streams: nothing that a layout depends on
  }
}

DTENSOR_FAST_THREAD_LOCAL DecisionCache* DecisionCache::current_ = nullptr;

DecisionCache& DecisionCache::make() {
  static thread_local DecisionCache cache;
  current_ = &cache;
  return cache;
}

}  // namespace dtensor::dispatch
