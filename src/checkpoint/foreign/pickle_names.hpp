// The names that pickles may use, and what each stands for.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace dtensor::checkpoints::pickle {

enum class Meaning : uint8_t {
  dict,           // called with nothing or with pairs
  tensor,         // called with (storage, offset, sizes, strides, ...)
  typed_tensor,   // the same, with the dtype seventh
  parameter,      // called with (tensor, ...)
  subclass,       // called with (function, class, its arguments, state)
  tensor_class,   // named, not called
  storage,        // named in a storage's id
  dtype,          // named
  tuple,          // called with one list, or with nothing
  bytes_of_text,  // called with (text, "latin1")
  object,         // made with nothing, then given its fields
  of_no_account,  // called with anything
};

struct Name {
  std::string_view module, name;
  Meaning meaning;
};

#define DTENSOR_DTYPE(NAME) \
  { "torch", #NAME, Meaning::dtype }
#define DTENSOR_STORAGE(NAME) \
  { "torch", #NAME, Meaning::storage }
inline constexpr std::string_view kDcp = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kDcpFiles = "torch.distributed.checkpoint.filesystem";
inline constexpr std::string_view kOldShards = "torch.distributed._shard.sharded_tensor.metadata";  // before PyTorch 2.3
inline constexpr std::string_view kByteCheckpoint = "bytecheckpoint.checkpointer.meta_type";

inline constexpr auto kNames = std::to_array<Name>({
    {"collections", "OrderedDict", Meaning::dict},
    {"torch._utils", "_rebuild_tensor", Meaning::tensor},
    {"torch._utils", "_rebuild_tensor_v2", Meaning::tensor},
    {"torch._utils", "_rebuild_tensor_v3", Meaning::typed_tensor},
    {"torch._utils", "_rebuild_parameter", Meaning::parameter},
    {"torch._utils", "_rebuild_parameter_with_state", Meaning::parameter},
    {"torch._tensor", "_rebuild_from_type_v2", Meaning::subclass},
    {"torch", "Tensor", Meaning::tensor_class},
    {"torch.nn.parameter", "Parameter", Meaning::tensor_class},
    {"torch.nn.parameter", "Buffer", Meaning::tensor_class},
    DTENSOR_STORAGE(BoolStorage),
    DTENSOR_STORAGE(ByteStorage),
    DTENSOR_STORAGE(CharStorage),
    DTENSOR_STORAGE(ShortStorage),
    DTENSOR_STORAGE(IntStorage),
    DTENSOR_STORAGE(LongStorage),
    DTENSOR_STORAGE(HalfStorage),
    DTENSOR_STORAGE(BFloat16Storage),
    DTENSOR_STORAGE(FloatStorage),
    DTENSOR_STORAGE(DoubleStorage),
    DTENSOR_STORAGE(ComplexFloatStorage),
    DTENSOR_STORAGE(ComplexDoubleStorage),
    {"torch.storage", "UntypedStorage", Meaning::storage},
    {"torch", "UntypedStorage", Meaning::storage},
    DTENSOR_DTYPE(bool),
    DTENSOR_DTYPE(uint8),
    DTENSOR_DTYPE(int8),
    DTENSOR_DTYPE(int16),
    DTENSOR_DTYPE(int32),
    DTENSOR_DTYPE(int64),
    DTENSOR_DTYPE(uint16),
    DTENSOR_DTYPE(uint32),
    DTENSOR_DTYPE(uint64),
    DTENSOR_DTYPE(float16),
    DTENSOR_DTYPE(bfloat16),
    DTENSOR_DTYPE(float32),
    DTENSOR_DTYPE(float64),
    DTENSOR_DTYPE(complex32),
    DTENSOR_DTYPE(complex64),
    DTENSOR_DTYPE(complex128),
    DTENSOR_DTYPE(float8_e5m2),
    DTENSOR_DTYPE(float8_e4m3fn),
    DTENSOR_DTYPE(float8_e5m2fnuz),
    DTENSOR_DTYPE(float8_e4m3fnuz),
    DTENSOR_DTYPE(float8_e8m0fnu),
    {"torch", "Size", Meaning::tuple},
    {"torch", "device", Meaning::of_no_account},
    {"torch.serialization", "_get_layout", Meaning::of_no_account},
    {"_codecs", "encode", Meaning::bytes_of_text},
    {"__builtin__", "bytes", Meaning::of_no_account},
    {"builtins", "bytes", Meaning::of_no_account},
    {"__builtin__", "complex", Meaning::of_no_account},
    {"builtins", "complex", Meaning::of_no_account},
    {"__builtin__", "set", Meaning::tuple},
    {"builtins", "set", Meaning::tuple},
    {"pathlib", "PosixPath", Meaning::of_no_account},
    {"pathlib._local", "PosixPath", Meaning::of_no_account},
    {kDcp, "Metadata", Meaning::object},
    {kDcp, "TensorStorageMetadata", Meaning::object},
    {kDcp, "TensorProperties", Meaning::object},
    {kDcp, "ChunkStorageMetadata", Meaning::object},
    {kDcp, "BytesStorageMetadata", Meaning::object},
    {kDcp, "MetadataIndex", Meaning::object},
    {kDcp, "StorageMeta", Meaning::object},
    {kDcp, "_MEM_FORMAT_ENCODING", Meaning::of_no_account},
    {kDcpFiles, "_StorageInfo", Meaning::object},
    {kOldShards, "TensorProperties", Meaning::object},
    {kOldShards, "MEM_FORMAT_ENCODING", Meaning::of_no_account},
    {kByteCheckpoint, "Metadata", Meaning::object},
    {kByteCheckpoint, "_StorageInfo", Meaning::object},
});
#undef DTENSOR_DTYPE
#undef DTENSOR_STORAGE

}  // namespace dtensor::checkpoints::pickle
