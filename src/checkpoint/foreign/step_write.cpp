// Writes a step of dt::save without ranks: one process, of which the memory holds one tensor at a time.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/step_files.hpp"

#include <dtensor/checkpoint/crc32c.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <utility>

namespace dtensor::checkpoints {

namespace {

// N of a folder called step-N; of another, what the options say.
int64_t number_of_step(std::string folder, const StepOptions& options) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return step_of(folder.substr(folder.rfind('/') + 1)).value_or(options.step);
}

// Whole tensors, those of wide dtypes first, so that each lies at a multiple of its element's size.
std::vector<WrittenItem> items_of(const Source& source) {
  std::vector<WrittenItem> items;
  for (const auto& tensor : source.tensors) {
    if (tensor.name == "__metadata__") throw std::runtime_error("no tensor may be called __metadata__");
    WrittenItem item{tensor.name, tensor.dtype, tensor.sizes, {}, 0, 0};
    for (const auto size : tensor.sizes) item.box.push_back({0, size});
    item.bytes = numel_of(item.box) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    items.push_back(std::move(item));
  }
  std::ranges::stable_sort(items, {}, [](const WrittenItem& item) {
    return std::pair<int64_t, const std::string&>(-static_cast<int64_t>(c10::elementSize(item.dtype)), item.name);
  });
  return items;
}

void write_data(const foreign::NewFolder& folder, const WrittenFile& file, const Source& source, Index& index) {
  const auto number = static_cast<int32_t>(index.files.size());
  const auto header_bytes = static_cast<int64_t>(file.header.size());
  SavedFile saved{fmt::format("data-{}-00000-{:03}.safetensors", index.attempt, number), header_bytes + file.data_bytes, header_bytes,
                  crc32c(file.header.data(), file.header.size())};
  disk::NewFile out(folder.file(saved.name));
  out.write(file.header.data(), file.header.size());
  for (const auto& item : file.items) {
    const auto tensor = foreign::whole(source, {item.name, item.dtype, item.sizes});
    const auto* data = static_cast<const char*>(tensor.data_ptr());
    out.write(data, static_cast<size_t>(item.bytes));
    Piece piece{item.box, number, header_bytes + item.offset, crc32c_of_chunks(data, item.bytes, index.chunk_bytes)};
    index.tensors.emplace(item.name, SavedTensor{item.dtype, item.sizes, {std::move(piece)}});
  }
  out.finish();
  index.files.push_back(std::move(saved));
}

void write(const std::string& path, const Source& source, const StepOptions& options) {
  Index index;
  index.step = number_of_step(path, options);
  if (index.step < 0) throw std::runtime_error(fmt::format("the step is {}; expected a number that is not negative", index.step));
  if (options.file_bytes < 1) throw std::runtime_error(fmt::format("file_bytes is {}; expected at least 1", options.file_bytes));
  foreign::check_source(source);
  foreign::NewFolder folder(path);
  index.attempt = fmt::format("{:08x}", std::random_device()());
  index.writer = written_by(1);
  index.writer.insert(options.writer.begin(), options.writer.end());
  index.same_as = source.same_as;
  index.values = source.values;
  for (const auto& file : files_of(items_of(source), options.file_bytes)) write_data(folder, file, source, index);
  const auto text = to_text(index);
  index_from(text, path);  // what would not be read is not written
  disk::NewFile out(folder.file(kIndexName));
  out.write(text.data(), text.size());
  out.finish();
  folder.finish();
}

}  // namespace

void write_step(const std::string& folder, const Source& source, const StepOptions& options) {
  foreign::guarded("write_step", folder, "nothing was written; give the name of a folder that is not there", [&] {
    write(folder, source, options);
    return 0;
  });
}

}  // namespace dtensor::checkpoints
