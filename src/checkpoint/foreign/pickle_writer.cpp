#include "src/checkpoint/foreign/pickle_writer.hpp"

#include "src/checkpoint/foreign/torch_tensor.hpp"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <variant>

namespace dtensor::checkpoints::pickle {

void Writer::global(std::string_view module, std::string_view name) {
  bytes_ += 'c';
  bytes_.append(module).append("\n").append(name).append("\n");
}

void Writer::integer(int64_t number) {
  if (number >= std::numeric_limits<int32_t>::min() && number <= std::numeric_limits<int32_t>::max()) {
    bytes_ += 'J';
    return raw(static_cast<int32_t>(number));
  }
  bytes_ += "\x8a\x08";
  raw(number);
}

void Writer::real(double number) {
  uint64_t digits = 0;
  std::memcpy(&digits, &number, sizeof digits);
  bytes_ += 'G';
  raw(__builtin_bswap64(digits));
}

void Writer::text(std::string_view text) {
  if (text.size() > std::numeric_limits<uint32_t>::max()) throw std::runtime_error("a text has more than 4 GiB");
  bytes_ += 'X';
  raw(static_cast<uint32_t>(text.size()));
  bytes_.append(text);
}

void Writer::value(const checkpoints::Value& value) {
  const auto one = [this](const auto& held) {
    using T = std::decay_t<decltype(held)>;
    if constexpr (std::is_same_v<T, bool>) boolean(held);
    else if constexpr (std::is_same_v<T, int64_t>) integer(held);
    else if constexpr (std::is_same_v<T, double>) real(held);
    else text(held);
  };
  std::visit(
      [&](const auto& held) {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
          one(held);
        } else {
          empty_list();
          mark();
          for (const auto& item : held) one(item);
          append_all();
        }
      },
      value);
}

void Writer::sizes(const std::vector<int64_t>& sizes) {
  mark();
  for (const auto size : sizes) integer(size);
  tuple();
}

void Writer::torch_size(const std::vector<int64_t>& sizes) {
  global("torch", "Size");
  mark();
  this->sizes(sizes);
  tuple();
  call();
}

void Writer::ordered_dict() {
  global("collections", "OrderedDict");
  empty_tuple();
  call();
}

void Writer::dtype(c10::ScalarType dtype) { global("torch", foreign::name_of_dtype(dtype)); }

void Writer::tensor(c10::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& key) {
  const auto kind = foreign::name_of_storage(dtype);  // dtypes that are newer than these classes have untyped storages
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);

  global("torch._utils", kind.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  mark();
  mark();
  text("storage");
  if (kind.empty()) global("torch.storage", "UntypedStorage");
  else global("torch", kind);
  text(key);
  text("cpu");
  integer(kind.empty() ? numel * static_cast<int64_t>(c10::elementSize(dtype)) : numel);
  tuple();
  bytes_ += 'Q';
  integer(0);
  this->sizes(sizes);
  this->sizes(strides);
  boolean(false);
  ordered_dict();
  if (kind.empty()) this->dtype(dtype);
  tuple();
  call();
}

}  // namespace dtensor::checkpoints::pickle
