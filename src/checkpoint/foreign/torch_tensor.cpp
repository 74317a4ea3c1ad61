#include "src/checkpoint/foreign/torch_tensor.hpp"

#include <dtensor/base/compat.hpp>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace dtensor::checkpoints::foreign {

namespace {

using pickle::Kind;
using pickle::Value;

constexpr int64_t kMostRuns = 65536;  // of a tensor
constexpr int64_t kMostPickle = int64_t{1} << 30;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

struct Dtype {
  std::string_view name, storage;
  c10::ScalarType type;
};
constexpr std::array kDtypes {
  Dtype{"bool", "BoolStorage", c10::kBool}, Dtype{"uint8", "ByteStorage", c10::kByte}, Dtype{"int8", "CharStorage", c10::kChar},
      Dtype{"int16", "ShortStorage", c10::kShort}, Dtype{"int32", "IntStorage", c10::kInt}, Dtype{"int64", "LongStorage", c10::kLong},
      Dtype{"float16", "HalfStorage", c10::kHalf}, Dtype{"bfloat16", "BFloat16Storage", c10::kBFloat16},
      Dtype{"float32", "FloatStorage", c10::kFloat}, Dtype{"float64", "DoubleStorage", c10::kDouble},
      Dtype{"complex64", "ComplexFloatStorage", c10::kComplexFloat}, Dtype{"complex128", "ComplexDoubleStorage", c10::kComplexDouble},
      Dtype{"complex32", "", c10::kComplexHalf},
#if DTENSOR_TORCH_AT_LEAST(2, 1)
      Dtype{"float8_e5m2", "", c10::ScalarType::Float8_e5m2}, Dtype{"float8_e4m3fn", "", c10::ScalarType::Float8_e4m3fn},
#endif
#if DTENSOR_TORCH_AT_LEAST(2, 3)
      Dtype{"uint16", "", c10::ScalarType::UInt16}, Dtype{"uint32", "", c10::ScalarType::UInt32},
      Dtype{"uint64", "", c10::ScalarType::UInt64},
#endif
};

int64_t size_from(const Value& value) {
  if (value.kind != Kind::integer || value.integer < 0) refuse("a size, stride or offset is no such number");
  return value.integer;
}

// The first element behind the tensor, in elements from the begin of the storage.
int64_t end_of(const TorchTensor& tensor) {
  int64_t last = tensor.offset;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(tensor.sizes[d] - 1, tensor.strides[d], &step) || __builtin_add_overflow(last, step, &last))
      refuse("its sizes and strides overflow");
  }
  if (last == INT64_MAX) refuse("its sizes and strides overflow");
  return last + 1;
}

// The number of first dims that have to be taken apart, so that the rest is row-major.
size_t dims_apart(const TorchTensor& tensor) {
  int64_t expected = 1;
  for (size_t d = tensor.sizes.size(); d-- > 0;) {
    if (tensor.sizes[d] == 1) continue;
    if (tensor.strides[d] != expected) return d + 1;
    expected *= tensor.sizes[d];
  }
  return 0;
}

}  // namespace

void Budget::spend(size_t bytes, const std::string& why) {
  if (bytes > left_) refuse(why);
  left_ -= bytes;
}

std::optional<c10::ScalarType> dtype_called(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &Dtype::name);
  return found == kDtypes.end() ? std::nullopt : std::optional(found->type);
}

std::string_view name_of_dtype(c10::ScalarType dtype) {
  const auto* found = std::ranges::find(kDtypes, dtype, &Dtype::type);
  if (found == kDtypes.end()) refuse(fmt::format("the dtype {} cannot be written", c10::toString(dtype)));
  return found->name;
}

std::optional<c10::ScalarType> dtype_of_storage(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &Dtype::storage);
  return found == kDtypes.end() || name.empty() ? std::nullopt : std::optional(found->type);
}

std::string_view name_of_storage(c10::ScalarType dtype) {
  const auto* found = std::ranges::find(kDtypes, dtype, &Dtype::type);
  return found == kDtypes.end() ? "" : found->storage;
}

std::vector<int64_t> sizes_from(const Value& value) {
  if (value.kind != Kind::list || value.items.size() > 64) refuse("sizes or strides are no list of at most 64");
  std::vector<int64_t> sizes;
  for (const auto* size : value.items) sizes.push_back(size_from(*size));
  return sizes;
}

TorchTensor tensor_from(const Value& value) {
  if (value.kind != Kind::tensor) refuse("it is no tensor");
  const auto& storage = *value.items[0];
  if (storage.kind != Kind::storage || storage.items[0]->kind != Kind::global || storage.items[1]->kind != Kind::text)
    refuse("it has no storage");
  TorchTensor tensor;
  const auto given = dtype_of_storage(storage.items[0]->text);
  if (value.items.size() > 4) {
    const auto& dtype = *value.items[4];
    if (dtype.kind != Kind::dtype) refuse("its dtype is none");
    const auto known = dtype_called(dtype.text);
    if (!known) refuse(fmt::format("it is of torch.{}, a dtype that this libtorch lacks", dtype.text));
    tensor.dtype = *known;
  } else if (given) {
    tensor.dtype = *given;
  } else {
    refuse(fmt::format("its storage is a {}, without a dtype", storage.items[0]->text));
  }
  tensor.storage = storage.items[1]->text;
  tensor.offset = size_from(*value.items[1]);
  tensor.sizes = sizes_from(*value.items[2]);
  tensor.strides = sizes_from(*value.items[3]);
  if (tensor.sizes.size() != tensor.strides.size()) refuse("it has more sizes than strides, or fewer");
  int64_t bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const auto size : tensor.sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) refuse(fmt::format("its sizes [{}] overflow", fmt::join(tensor.sizes, ", ")));
  }
  return tensor;
}

std::vector<Piece> pieces_of(const TorchTensor& tensor, int32_t file, int64_t begin, int64_t bytes, Budget& budget) {
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (end_of(tensor) > bytes / item) {
    refuse(fmt::format("it is {}[{}], strides [{}], from element {} on, beyond the {} bytes of its storage", name_of_dtype(tensor.dtype),
                       fmt::join(tensor.sizes, ", "), fmt::join(tensor.strides, ", "), tensor.offset, bytes));
  }
  Box box;
  for (const auto size : tensor.sizes) box.push_back({0, size});
  const auto needed = numel_of(box) * item;
  const auto apart = needed > 0 ? dims_apart(tensor) : 0;
  int64_t runs = 1;
  for (size_t d = 0; d < apart; ++d) runs = runs > kMostRuns ? runs : runs * std::min(tensor.sizes[d], kMostRuns + 1);
  if (runs > kMostRuns) {
    refuse(fmt::format(
        "it is [{}] with strides [{}], not row-major in the file, and more than {} runs of elements; save it after .contiguous()",
        fmt::join(tensor.sizes, ", "), fmt::join(tensor.strides, ", "), kMostRuns));
  }
  budget.spend(static_cast<size_t>(runs) * (sizeof(Piece) + tensor.sizes.size() * sizeof(Interval) + 32) +
               3 * tensor.sizes.size() * sizeof(int64_t));
  if (needed == 0) return {Piece{box, file, begin}};
  if (needed > bytes) {
    budget.spend(static_cast<size_t>(needed - bytes),
                 fmt::format("it is [{}] with strides [{}], which repeats the {} bytes of its storage to {}; save it after .contiguous()",
                             fmt::join(tensor.sizes, ", "), fmt::join(tensor.strides, ", "), bytes, needed));
  }
  std::vector<int64_t> at(apart, 0);
  std::vector<Piece> pieces;
  for (int64_t run = 0; run < runs; ++run) {
    int64_t element = tensor.offset;
    for (size_t d = 0; d < apart; ++d) {
      box[d] = {at[d], at[d] + 1};
      element += at[d] * tensor.strides[d];
    }
    pieces.push_back({box, file, begin + element * item});
    for (size_t d = apart; d-- > 0 && ++at[d] == tensor.sizes[d];) at[d] = 0;
  }
  return pieces;
}

TorchArchive::TorchArchive(const disk::File& file, int64_t begin, int64_t bytes) : zip_(file, begin, bytes) {
  constexpr std::string_view kPickle = "/data.pkl";
  int found = 0;
  for (const auto& [name, record] : zip_.records()) {
    if (!name.ends_with(kPickle) || name.find('/') != name.size() - kPickle.size()) continue;
    prefix_ = name.substr(0, name.size() - kPickle.size());
    ++found;
  }
  if (found != 1) refuse(fmt::format("the archive has {} records data.pkl; expected one", found));
  if (zip_.find(prefix_ + "/constants.pkl") || zip_.find(prefix_ + "/code/__torch__.py"))
    refuse("it is an archive of TorchScript or of C++'s torch::save, which dt::load(module, file) reads");
  if (zip_.find(prefix_ + "/byteorder") && zip_.read(prefix_ + "/byteorder", 64) != "little") refuse("its numbers are big-endian");
  pickle_ = std::make_unique<pickle::Document>(zip_.read(prefix_ + "/data.pkl", kMostPickle));
}

SavedTensor TorchArchive::saved(const TorchTensor& tensor, int32_t file, Budget& budget) const {
  const auto name = fmt::format("{}/data/{}", prefix_, tensor.storage);
  const auto begin = zip_.offset_of(name);
  return {tensor.dtype, tensor.sizes, pieces_of(tensor, file, begin, zip_.find(name)->bytes, budget)};
}

}  // namespace dtensor::checkpoints::foreign
