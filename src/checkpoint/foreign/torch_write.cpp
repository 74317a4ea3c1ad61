// Writes the files of torch.save, and DCP's folders, whose data files have such files one behind the other.
#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/foreign/pickle_names.hpp"
#include "src/checkpoint/foreign/pickle_writer.hpp"
#include "src/checkpoint/foreign/zip.hpp"

#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace dtensor::checkpoints {

namespace {

using foreign::ZipWriter;
using Described = Source::Described;

void add(ZipWriter& zip, const std::string& name, const std::string& text) {
  zip.add(name, text.data(), static_cast<int64_t>(text.size()));
}

void begin(ZipWriter& zip, const std::string& pickle) {
  add(zip, "archive/data.pkl", pickle);
  add(zip, "archive/byteorder", "little");
}

void add_storage(ZipWriter& zip, const Source& source, const Described& tensor, size_t number) {
  const auto data = foreign::whole(source, tensor);
  zip.add(fmt::format("archive/data/{}", number), data.data_ptr(), static_cast<int64_t>(data.nbytes()));
}

int64_t finish(ZipWriter& zip) {
  add(zip, "archive/version", "3\n");
  return zip.finish();
}

std::string pickle_of(const Source& source) {
  pickle::Writer out;
  std::map<std::string, size_t> numbers;
  out.ordered_dict();
  out.mark();
  for (size_t i = 0; i < source.tensors.size(); ++i) {
    const auto& tensor = source.tensors[i];
    out.text(tensor.name);
    out.tensor(tensor.dtype, tensor.sizes, std::to_string(i));
    numbers[tensor.name] = i;
  }
  for (const auto& [name, other] : source.same_as) {
    const auto number = numbers.at(other);
    out.text(name);
    out.tensor(source.tensors[number].dtype, source.tensors[number].sizes, std::to_string(number));
  }
  for (const auto& [name, value] : source.values) {
    out.text(name);
    out.value(value);
  }
  out.set_items();
  return out.finish();
}

// Makes a file beside `path`, and gives its name.
std::string make_hidden(const std::string& path, std::optional<disk::NewFile>& file) {
  for (;;) {
    const auto hidden = foreign::hidden_name(path);
    try {
      file.emplace(hidden);
      return hidden;
    } catch (const std::runtime_error&) {
      if (!disk::exists(hidden)) throw;
    }
  }
}

void write_file(const std::string& path, const Source& source) {
  foreign::check_source(source);
  std::optional<disk::NewFile> made;
  const auto hidden = make_hidden(path, made);
  auto& file = *made;
  ZipWriter zip(file);
  begin(zip, pickle_of(source));
  for (size_t i = 0; i < source.tensors.size(); ++i) add_storage(zip, source, source.tensors[i], i);
  finish(zip);
  file.finish();
  std::error_code error;
  std::filesystem::rename(hidden, path, error);
  if (error) {
    disk::remove(hidden);
    throw std::runtime_error(error.message());
  }
  const auto above = std::filesystem::path(path).parent_path().string();
  disk::sync_folder(above.empty() ? "." : above);
}

// -- DCP --------------------------------------------------------------------------------------------------------------------

constexpr const char* kDataFile = "__0_0.distcp";

struct Slice {
  std::string name;
  const Described* tensor;  // null: another object
  int64_t offset, bytes;
};

void begin_object(pickle::Writer& out, std::string_view module, std::string_view name) {
  out.global(module, name);
  out.empty_tuple();
  out.make();
}

void put_tensor(pickle::Writer& out, const Described& tensor) {
  begin_object(out, pickle::kDcp, "TensorStorageMetadata");
  out.empty_dict();
  out.mark();
  out.text("properties");
  begin_object(out, pickle::kDcp, "TensorProperties");
  out.mark();
  out.dtype(tensor.dtype);
  out.global("torch.serialization", "_get_layout");
  out.mark(), out.text("torch.strided"), out.tuple(), out.call();
  out.boolean(false);
  out.global(pickle::kDcp, "_MEM_FORMAT_ENCODING");
  out.mark(), out.integer(0), out.tuple(), out.call();
  out.boolean(false);
  out.tuple(), out.build();
  out.text("size");
  out.torch_size(tensor.sizes);
  out.text("chunks");
  out.empty_list();
  out.mark();
  begin_object(out, pickle::kDcp, "ChunkStorageMetadata");
  out.empty_dict();
  out.mark();
  out.text("offsets");
  out.torch_size(std::vector<int64_t>(tensor.sizes.size(), 0));
  out.text("sizes");
  out.torch_size(tensor.sizes);
  out.set_items(), out.build();
  out.append_all();
  out.set_items(), out.build();
}

void put_slice(pickle::Writer& out, const Slice& slice) {
  begin_object(out, pickle::kDcp, "MetadataIndex");
  out.empty_dict();
  out.mark();
  out.text("fqn"), out.text(slice.name);
  out.text("index");
  if (slice.tensor) out.integer(0);
  else out.none();
  out.text("offset");
  if (slice.tensor) out.torch_size(std::vector<int64_t>(slice.tensor->sizes.size(), 0));
  else out.none();
  out.set_items(), out.build();
  begin_object(out, pickle::kDcpFiles, "_StorageInfo");
  out.empty_dict();
  out.mark();
  out.text("relative_path"), out.text(kDataFile);
  out.text("offset"), out.integer(slice.offset);
  out.text("length"), out.integer(slice.bytes);
  out.set_items(), out.build();
}

std::string metadata_of(const std::vector<Slice>& slices) {
  pickle::Writer out;
  begin_object(out, pickle::kDcp, "Metadata");
  out.empty_dict();
  out.mark();
  out.text("state_dict_metadata");
  out.empty_dict();
  out.mark();
  for (const auto& slice : slices) {
    out.text(slice.name);
    if (slice.tensor) put_tensor(out, *slice.tensor);
    else begin_object(out, pickle::kDcp, "BytesStorageMetadata");
  }
  out.set_items();
  out.text("planner_data");  // where each is in the dict that was saved
  out.empty_dict();
  out.mark();
  for (const auto& slice : slices) out.text(slice.name), out.mark(), out.text(slice.name), out.tuple();
  out.set_items();
  out.text("storage_data");
  out.empty_dict();
  out.mark();
  for (const auto& slice : slices) put_slice(out, slice);
  out.set_items();
  out.text("storage_meta"), out.none();
  out.text("version"), out.text("1.0.0");
  out.set_items(), out.build();
  return out.finish();
}

void write_folder(const std::string& path, const Source& source) {
  foreign::check_source(source);
  foreign::NewFolder folder(path);
  std::vector<Slice> slices;
  std::map<std::string, size_t> numbers;
  disk::NewFile file(folder.file(kDataFile));
  int64_t at = 0;
  const auto add_slice = [&](const std::string& name, const Described* tensor, const std::string& pickle) {
    ZipWriter zip(file);
    begin(zip, pickle);
    if (tensor) add_storage(zip, source, *tensor, 0);
    const auto bytes = finish(zip);
    numbers[name] = slices.size();
    slices.push_back({name, tensor, at, bytes});
    at += bytes;
  };
  for (const auto& tensor : source.tensors) {
    pickle::Writer out;
    out.tensor(tensor.dtype, tensor.sizes, "0");
    add_slice(tensor.name, &tensor, out.finish());
  }
  for (const auto& [name, other] : source.same_as) {
    auto slice = slices[numbers.at(other)];
    slice.name = name;
    slices.push_back(std::move(slice));
  }
  for (const auto& [name, value] : source.values) {
    pickle::Writer out;
    out.value(value);
    add_slice(name, nullptr, out.finish());
  }
  file.finish();
  const auto metadata = metadata_of(slices);
  disk::NewFile index(folder.file(".metadata"));
  index.write(metadata.data(), metadata.size());
  index.finish();
  folder.finish();
}

}  // namespace

void write_torch_file(const std::string& path, const Source& source) {
  foreign::guarded("write_torch_file", path, "what was there before is still there", [&] {
    write_file(path, source);
    return 0;
  });
}

void write_dcp(const std::string& folder, const Source& source) {
  foreign::guarded("write_dcp", folder, "nothing was written; give the name of a folder that is not there", [&] {
    write_folder(folder, source);
    return 0;
  });
}

}  // namespace dtensor::checkpoints
