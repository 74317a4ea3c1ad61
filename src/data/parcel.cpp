#include "src/data/parcel.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>

namespace dtensor::data {

namespace {

constexpr int64_t kHeader = 4;      // numbers: the kind, and the bytes of notes, tensors and the generator
constexpr int64_t kAlignment = 64;  // of each tensor's elements
constexpr int64_t kMostDims = 64, kMostBytes = int64_t{1} << 48;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
int64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; }

at::Tensor buffer(int64_t size, at::ScalarType dtype) { return at::empty({size}, at::TensorOptions(dtype).device(at::kCPU)); }

[[noreturn]] void fail_to_read() {
  fail("batches", "the batch that another rank loaded does not have the parts of this rank's batches; hint: all ranks must run the same "
       "program, with the same dataset and the same type of batch");
}

// Writes values one after the other.
class Writer {
 public:
  explicit Writer(const at::Tensor& to) : to_(static_cast<char*>(to.data_ptr())) {}
  void write(const void* data, int64_t size) {
    if (size > 0) std::memcpy(to_, data, static_cast<size_t>(size));
    to_ += aligned(size);
  }

 private:
  char* to_;
};

}  // namespace

Parcel Parcel::of_error(const std::string& text) {
  Parcel parcel;
  parcel.kind = Kind::error;
  parcel.notes_.assign(text.begin(), text.end());
  return parcel;
}

void Parcel::bytes(void* data, size_t size) {
  if (!received_) {
    notes_.insert(notes_.end(), static_cast<const char*>(data), static_cast<const char*>(data) + size);
  } else if (size > 0) {
    if (size > notes_.size() - read_) fail_to_read();
    std::memcpy(data, notes_.data() + read_, size);
    read_ += size;
  }
}

// Parts take a byte at least, but for those without members.
size_t Parcel::length(size_t size) {
  constexpr size_t kMostEmpty = 1 << 16;
  bytes(&size, sizeof size);
  if (received_ && size > notes_.size() - read_ && size > kMostEmpty) fail_to_read();
  return size;
}

int64_t Parcel::number(int64_t value) {
  bytes(&value, sizeof value);
  return value;
}

void Parcel::tensor(at::Tensor& tensor) {
  if (received_) {
    tensor = unpack();
  } else {
    pack(tensor);
  }
}

// Leaves a plain tensor, as the other ranks get one, so that all ranks distribute the same.
void Parcel::pack(at::Tensor& tensor) {
  number(static_cast<int64_t>(tensor.defined() ? tensor.scalar_type() : at::ScalarType::Undefined));
  if (!tensor.defined()) return;
  const bool whole = !is_dtensor(tensor) || DTensor(tensor).layout().is_replicated();
  require(whole && tensor.layout() == at::kStrided && !tensor.is_quantized(), "batches",
          "a tensor of the batch can not be sent to other ranks; expected a dense tensor that its rank holds whole; got {}; hint: "
          "dt::LoadOn::every_rank sends nothing",
          is_dtensor(tensor) ? DTensor(tensor).layout().str() : "a sparse or quantized one");
  number(tensor.dim());
  for (const int64_t size : tensor.sizes()) number(size);
  if (is_dtensor(tensor)) tensor = DTensor(tensor).to_local();
  tensors_.push_back(tensor.detach().cpu().contiguous());
}

at::Tensor Parcel::unpack() {
  const int64_t dtype = number(0);
  if (dtype < 0 || dtype > static_cast<int64_t>(at::ScalarType::Undefined)) fail_to_read();
  const auto type = static_cast<at::ScalarType>(dtype);
  if (type == at::ScalarType::Undefined) return {};
  const int64_t dims = number(0);
  if (dims < 0 || dims > kMostDims || c10::isQIntType(type)) fail_to_read();
  std::vector<int64_t> sizes(static_cast<size_t>(dims));
  auto size = static_cast<int64_t>(c10::elementSize(type));
  bool fits = true;
  for (auto& length : sizes) {
    length = number(0);
    fits = fits && length >= 0 && !__builtin_mul_overflow(size, length, &size);
  }
  if (!fits || aligned(size) > data_.numel() - taken_) fail_to_read();
  const auto options = at::TensorOptions(type).device(at::kCPU);
  if (size == 0) return at::empty(sizes, options);
  auto* begin = static_cast<char*>(data_.data_ptr()) + taken_;
  taken_ += aligned(size);
  return at::from_blob(begin, sizes, [keep = data_](void*) {}, options);
}

void Parcel::send(comm::Communicator& group) const {
  int64_t tensors = 0;
  for (const auto& tensor : tensors_) tensors += aligned(bytes_of(tensor));
  const int64_t parts[kHeader] = {static_cast<int64_t>(kind), static_cast<int64_t>(notes_.size()), tensors, bytes_of(generator)};
  const auto header = buffer(kHeader, at::kLong);
  Writer(header).write(parts, sizeof parts);
  group.broadcast(header, 0).get();
  const auto body = buffer(aligned(parts[1]) + tensors + aligned(parts[3]), at::kByte);
  if (body.numel() == 0) return;
  Writer writer(body);
  writer.write(notes_.data(), parts[1]);
  for (const auto& tensor : tensors_) writer.write(tensor.data_ptr(), bytes_of(tensor));
  if (generator.defined()) writer.write(generator.data_ptr(), parts[3]);
  group.broadcast(body, 0).get();
}

Parcel Parcel::receive(comm::Communicator& group) {
  Parcel parcel;
  parcel.received_ = true;
  const auto header = group.broadcast(buffer(kHeader, at::kLong), 0).get();
  const auto* parts = static_cast<const int64_t*>(header.data_ptr());
  const bool is_header = parts[0] >= 0 && parts[0] <= static_cast<int64_t>(Kind::error) && parts[2] % kAlignment == 0 &&
                         std::ranges::all_of(parts + 1, parts + kHeader, [](int64_t size) { return size >= 0 && size <= kMostBytes; });
  if (!is_header) fail_to_read();
  parcel.kind = static_cast<Kind>(parts[0]);
  const int64_t notes = aligned(parts[1]), size = notes + parts[2] + aligned(parts[3]);
  if (size == 0) return parcel;
  const auto body = group.broadcast(buffer(size, at::kByte), 0).get();
  const auto* begin = static_cast<const char*>(body.data_ptr());
  parcel.notes_.assign(begin, begin + parts[1]);
  parcel.data_ = body.narrow(0, notes, parts[2]);
  if (parts[3] > 0) parcel.generator = body.narrow(0, notes + parts[2], parts[3]).clone();
  return parcel;
}

}  // namespace dtensor::data
