// Reads the folders of PyTorch's distributed checkpoints, and those of ByteCheckpoint, which keep the pickles of tensors apart from their
// storages, in the metadata.
#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/foreign/torch_values.hpp"
#include "src/checkpoint/index_text.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace dtensor::checkpoints {

namespace {

using pickle::Kind;

constexpr const char* kMetadata = ".metadata";
constexpr const char* kHint = "a folder of torch.distributed.checkpoint has .metadata and *.distcp; one that was cut must be copied again";
constexpr int64_t kMostMetadata = int64_t{4} << 30;
constexpr size_t kMostFiles = 64;  // that are open

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

const pickle::Value& field(const pickle::Value& object, std::string_view name, Kind kind) {
  const auto* value = object.find(name);
  if (!value || value->kind != kind) refuse(fmt::format("its metadata have no {} of the kind that it should have", name));
  return *value;
}

// The bytes of a piece of a tensor, or of another object.
struct Slice {
  int32_t file = 0;
  int64_t offset = 0, bytes = 0;
  const pickle::Value* header = nullptr;  // ByteCheckpoint: the pickle of the tensor
};

using Offsets = std::vector<int64_t>;

class Reading {
 public:
  Reading(Index& index, const std::string& prefix, const std::string& subfolder, foreign::Skipped& skipped)
      : index_(index), prefix_(prefix), subfolder_(subfolder), skipped_(skipped) {}

  void run() {
    const disk::File file(index_.folder + "/" + subfolder_ + kMetadata);
    const auto bytes = file.size();
    if (bytes > kMostMetadata) refuse(fmt::format("its metadata have {} bytes; expected at most {}", bytes, kMostMetadata));
    budget_ = foreign::Budget(bytes);
    std::string text(static_cast<size_t>(bytes), '\0');
    file.read(text.data(), text.size(), 0);
    const pickle::Document document(std::move(text));
    const auto& metadata = document.root();
    if (metadata.kind != Kind::object || !metadata.name().ends_with(".Metadata")) refuse("its .metadata are of another kind");
    take_slices(metadata);
    const auto& items = field(metadata, "state_dict_metadata", Kind::dict).items;
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (items[i]->kind != Kind::text) refuse("its metadata have a name that is no text");
      add(std::string(items[i]->text), *items[i + 1]);
    }
  }

 private:
  std::pair<std::string, Offsets> place_from(const pickle::Value& key) {
    if (key.kind != Kind::object) refuse("its metadata have an index that is none");
    const auto* offset = key.find("offset");
    const auto name = field(key, "fqn", Kind::text).text;
    auto offsets = offset && offset->kind != Kind::none ? foreign::sizes_from(*offset) : Offsets{};
    budget_.spend(name.size() + offsets.size() * sizeof(int64_t) + 256);
    return {std::string(name), std::move(offsets)};
  }

  void take_slices(const pickle::Value& metadata) {
    const auto& slices = field(metadata, "storage_data", Kind::dict).items;
    for (size_t i = 0; i + 1 < slices.size(); i += 2) {
      const auto& info = *slices[i + 1];
      if (info.kind != Kind::object) refuse("its metadata have a place that is none");
      const auto* transforms = info.find("transform_descriptors");
      auto place = place_from(*slices[i]);
      if (transforms && !transforms->items.empty())
        refuse(
            fmt::format("'{}' is stored by an extension ({}), which is not known", place.first, transforms->items[0]->text.substr(0, 60)));
      const Slice slice{file_called(field(info, "relative_path", Kind::text).text), field(info, "offset", Kind::integer).integer,
                        field(info, "length", Kind::integer).integer};
      slices_[std::move(place)] = slice;
    }
    const auto* headers = metadata.find("all_tensor_metadata");
    if (!headers || headers->kind != Kind::dict) return;
    for (size_t i = 0; i + 1 < headers->items.size(); i += 2) {
      const auto found = slices_.find(place_from(*headers->items[i]));
      if (found != slices_.end() && headers->items[i + 1]->kind == Kind::bytes) found->second.header = headers->items[i + 1];
    }
    index_.writer["format"] = "bytecheckpoint";
  }

  int32_t file_called(std::string_view name) {
    const auto [known, is_new] = numbers_.try_emplace(std::string(name), static_cast<int32_t>(index_.files.size()));
    if (!is_new) return known->second;
    const bool inside = !name.empty() && name.front() != '/' && name.find('\0') == name.npos &&
                        ("/" + known->first + "/").find("/../") == std::string::npos;
    if (!inside) refuse(fmt::format("its metadata name '{}', a file outside of the folder", name));
    index_.files.push_back({subfolder_ + known->first, -1, 0, 0});
    return known->second;
  }

  const disk::File& file(int32_t number) {
    const auto known = files_.find(number);
    if (known != files_.end()) return *known->second;
    if (files_.size() >= kMostFiles) files_.clear();
    auto& saved = index_.files[static_cast<size_t>(number)];
    auto opened = std::make_unique<disk::File>(index_.folder + "/" + saved.name);
    saved.bytes = opened->size();
    return *files_.emplace(number, std::move(opened)).first->second;
  }

  void add(const std::string& name, const pickle::Value& described) {
    if (described.kind != Kind::object) refuse(fmt::format("its metadata describe '{}' as nothing known", name));
    budget_.spend(name.size() + 256);
    if (described.name().ends_with(".BytesStorageMetadata")) return add_object(name);
    try {
      add_tensor(name, described);
    } catch (const std::exception& problem) {
      refuse(fmt::format("tensor '{}': {}", name, problem.what()));
    }
  }

  void add_tensor(const std::string& name, const pickle::Value& described) {
    const auto* properties = described.find("properties");
    if (!properties || properties->kind != Kind::object || properties->items.empty()) refuse("its metadata have no properties");
    const auto* state = properties->items[0];
    const auto* dtype = state->kind == Kind::dict ? state->find("dtype") : state->items.empty() ? nullptr : state->items[0];
    const auto known = dtype && dtype->kind == Kind::dtype ? foreign::dtype_called(dtype->text) : std::nullopt;
    if (!known) refuse(fmt::format("it is of a dtype that this libtorch lacks ({})", dtype ? dtype->text : "none"));
    SavedTensor tensor{*known, {}, {}};
    const auto* size = described.find("size");
    if (!size) refuse("its metadata have no size");
    tensor.sizes = foreign::sizes_from(*size);
    for (const auto* chunk : field(described, "chunks", Kind::list).items) add_chunk(name, tensor, *chunk);
    const auto [first, is_new] = known_.try_emplace(key_of(tensor), prefix_ + name);
    if (!is_new && tensor.numel() > 0) {
      budget_.spend(first->second.size());
      if (index_.tensors.contains(prefix_ + name) || !index_.same_as.emplace(prefix_ + name, first->second).second)
        refuse("there is another of that name");
    } else if (index_.same_as.contains(prefix_ + name) || !index_.tensors.emplace(prefix_ + name, std::move(tensor)).second) {
      refuse("there is another of that name");
    }
  }

  // What two names of one tensor have alike: dtype, sizes, and where each piece is.
  std::vector<int64_t> key_of(const SavedTensor& tensor) {
    std::vector<int64_t> key{static_cast<int64_t>(tensor.dtype), static_cast<int64_t>(tensor.sizes.size())};
    key.insert(key.end(), tensor.sizes.begin(), tensor.sizes.end());
    for (const auto& piece : tensor.pieces) {
      key.insert(key.end(), {piece.file, piece.offset});
      for (const auto& side : piece.box) key.insert(key.end(), {side.begin, side.end});
    }
    budget_.spend(key.size() * sizeof(int64_t));
    return key;
  }

  void add_chunk(const std::string& name, SavedTensor& tensor, const pickle::Value& chunk) {
    const auto offsets = foreign::sizes_from(field(chunk, "offsets", Kind::list)),
               sizes = foreign::sizes_from(field(chunk, "sizes", Kind::list));
    if (offsets.size() != tensor.sizes.size() || sizes.size() != tensor.sizes.size()) refuse("a piece has another number of dims");
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (offsets[d] > tensor.sizes[d] || sizes[d] > tensor.sizes[d] - offsets[d])
        refuse(fmt::format("a piece [{}] at [{}] is outside of its sizes [{}]", fmt::join(sizes, ", "), fmt::join(offsets, ", "),
                           fmt::join(tensor.sizes, ", ")));
    }
    const auto slice = slices_.find({name, offsets});
    if (slice == slices_.end()) refuse(fmt::format("its piece at [{}] is in no file", fmt::join(offsets, ", ")));
    for (auto& piece : pieces(slice->second, tensor.dtype, sizes)) {
      for (size_t d = 0; d < offsets.size(); ++d) piece.box[d] = {piece.box[d].begin + offsets[d], piece.box[d].end + offsets[d]};
      tensor.pieces.push_back(std::move(piece));
    }
  }

  std::vector<Piece> pieces(const Slice& slice, c10::ScalarType dtype, const std::vector<int64_t>& sizes) {
    const auto& data = file(slice.file);
    std::unique_ptr<foreign::TorchArchive> archive;
    std::unique_ptr<pickle::Document> header;
    if (slice.header) header = std::make_unique<pickle::Document>(std::string(slice.header->text));
    else archive = std::make_unique<foreign::TorchArchive>(data, slice.offset, slice.bytes);
    const auto tensor = foreign::tensor_from(header ? header->root() : archive->root());
    if (tensor.sizes != sizes || tensor.dtype != dtype) {
      refuse(fmt::format("a piece is {}[{}]; expected {}[{}]", foreign::name_of_dtype(tensor.dtype), fmt::join(tensor.sizes, ", "),
                         foreign::name_of_dtype(dtype), fmt::join(sizes, ", ")));
    }
    if (archive) return archive->saved(tensor, slice.file, budget_).pieces;
    if (slice.offset < 0 || slice.bytes < 0 || slice.offset > data.size() || slice.bytes > data.size() - slice.offset)
      refuse("a piece ends behind its file");
    return foreign::pieces_of(tensor, slice.file, slice.offset, slice.bytes, budget_);
  }

  // An object that is no tensor. One that is not understood is left out: others can be loaded without it.
  void add_object(const std::string& name) {
    const auto slice = slices_.find({name, Offsets{}});
    if (slice == slices_.end()) return skipped_.add(prefix_ + name, "it is in no file");
    foreign::Flattening all(index_, skipped_, budget_,
                            [&](const std::string& inner, const pickle::Value&) { skipped_.add(inner, "a tensor in an object"); });
    try {
      const foreign::TorchArchive archive(file(slice->second.file), slice->second.offset, slice->second.bytes);
      all.add(prefix_ + name, archive.root());
    } catch (const std::exception& problem) {
      skipped_.add(prefix_ + name, problem.what());
    }
  }

  Index& index_;
  const std::string prefix_, subfolder_;
  foreign::Skipped& skipped_;
  foreign::Budget budget_{0};
  std::map<std::pair<std::string, Offsets>, Slice> slices_;
  std::unordered_map<std::string, int32_t> numbers_;
  std::map<int32_t, std::unique_ptr<disk::File>> files_;
  std::map<std::vector<int64_t>, std::string> known_;  // the first name of each tensor
};

Index read(const std::string& folder) {
  Index index;
  index.folder = folder;
  index.writer["format"] = "torch.distributed.checkpoint";
  foreign::Skipped skipped;
  const auto has = [&](const std::string& name) { return disk::exists(folder + "/" + name + kMetadata); };
  if (has("")) {
    Reading(index, "", "", skipped).run();
  } else if (has("model/") || has("optimizer/")) {
    for (const std::string part : {"model", "optimizer"}) {
      if (has(part + "/")) Reading(index, part + ".", part + "/", skipped).run();
    }
  } else {
    refuse("it has no .metadata, nor have model/ and optimizer/ in it");
  }
  skipped.note_in(index);
  check_tensors(index);
  return index;
}

}  // namespace

Index read_dcp(const std::string& folder) {
  return foreign::guarded("read_dcp", folder, kHint, [&] { return read(folder); });
}

}  // namespace dtensor::checkpoints
