// The files of checkpoints, ours and other libraries', as they are read without ranks.
#include "tools/fuzz_bytes/target.hpp"

#include "src/checkpoint/foreign/zip.hpp"

#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include <filesystem>

namespace dtensor::fuzz_bytes {

namespace {

checkpoints::Source source() {
  auto all = checkpoints::source_of({{"a", at::arange(12).reshape({3, 4})}, {"b.c", at::ones({5})}, {"d", at::ones({2}, at::kBFloat16)}});
  all.same_as = {{"e", "d"}};
  all.values = {{"step", int64_t{3}}, {"name", std::string("run")}, {"betas", std::vector<double>{0.9, 0.99}}};
  return all;
}

std::string path(const std::string& name) { return scratch() + "/" + name; }

// A folder that the library writes: with `is_new` written again, also where inputs have changed its files.
std::string folder_of(const std::string& name, bool is_new) {
  if (is_new) std::filesystem::remove_all(path(name));
  if (std::filesystem::exists(path(name))) return path(name);
  if (name == "dcp") checkpoints::write_dcp(path(name), source());
  else if (name == "step-7") checkpoints::write_step(path(name), source(), {.file_bytes = 60});
  else checkpoints::write_huggingface(path(name), source(), {.file_bytes = 60});
  return path(name);
}

std::string torch_file() {
  checkpoints::write_torch_file(path("all.pt"), source());
  return path("all.pt");
}

// Reads all that a checkpoint says it has.
void read_all(const std::string& checkpoint) {
  const auto index = checkpoints::read_any(checkpoint);
  for (const auto& [name, tensor] : index.tensors) {
    if (tensor.bytes() < (1 << 24)) checkpoints::read_tensor(index, name);
  }
}

// With other bytes in one file of it.
void read_all(const std::string& checkpoint, const std::string& file, const std::string& bytes) {
  write_bytes(file, bytes);
  read_all(checkpoint);
}

std::string pickle_of_file() {
  const checkpoints::disk::File file(torch_file());
  return checkpoints::foreign::ZipReader(file, 0, file.size()).read("archive/data.pkl", 1 << 20);
}

// In an archive whose checksum is right, or nothing of it would be read.
void read_pickle(const std::string& bytes) {
  std::filesystem::remove(path("pickle.pt"));
  checkpoints::disk::NewFile file(path("pickle.pt"));
  checkpoints::foreign::ZipWriter zip(file);
  zip.add("archive/data.pkl", bytes.data(), static_cast<int64_t>(bytes.size()));
  const std::string storage(96, '\1');
  for (const std::string key : {"0", "1", "2"}) zip.add("archive/data/" + key, storage.data(), static_cast<int64_t>(storage.size()));
  zip.finish();
  file.finish(false);
  read_all(path("pickle.pt"));
}

// The checksum is made right, or nothing behind it would be read.
void read_step_index(const std::string& bytes) {
  const auto rest = bytes.substr(bytes.find('\n') + 1);
  const auto text = fmt::format("{{\"crc32c\": \"{:08x}\",\n", checkpoints::crc32c(rest.data(), rest.size())) + rest;
  const auto folder = folder_of("step-7", false);
  write_bytes(folder + "/index.json", text);
  const auto index = checkpoints::read_index(folder);
  expect(checkpoints::index_from(to_text(index), folder).tensors.size() == index.tensors.size(), "an index that reads as another");
  checkpoints::faults_of(index);
  read_all(folder);
}

const std::vector<std::string> kIndexWords{"-1", "9223372036854775807", "4611686018427387904", "1e300", "null", "[", "]", "{", "}", ","};
const std::vector<std::string> kPickleWords{"cos\nsystem\n", "cbuiltins\neval\n", "R", "b", "\x93", "\x81", "Q", "(", "t", "u", "e", "."};

}  // namespace

std::vector<Target> checkpoint_targets() {
  return {
      {"torch-file", "read_torch_file, and its tensors", [] { return std::vector{read_bytes(torch_file())}; },
       [](const std::string& bytes) { read_all(path("all.pt"), path("all.pt"), bytes); }, kPickleWords},
      {"torch-pickle", "the pickle in such a file, and tensors", [] { return std::vector{pickle_of_file()}; }, read_pickle, kPickleWords},
      {"dcp-metadata", "read_dcp, and its tensors", [] { return std::vector{read_bytes(folder_of("dcp", true) + "/.metadata")}; },
       [](const std::string& bytes) { read_all(path("dcp"), folder_of("dcp", false) + "/.metadata", bytes); }, kPickleWords},
      {"dcp-data", "a data file of such a folder, and its tensors",
       [] { return std::vector{read_bytes(folder_of("dcp", true) + "/__0_0.distcp")}; },
       [](const std::string& bytes) { read_all(path("dcp"), folder_of("dcp", false) + "/__0_0.distcp", bytes); }, kPickleWords},
      {"step-index", "read_index of a step, its checksums and tensors",
       [] { return std::vector{read_bytes(folder_of("step-7", true) + "/index.json")}; }, read_step_index, kIndexWords},
      {"safetensors", "read_huggingface of a file, and its tensors",
       [] { return std::vector{read_bytes(folder_of("hf", true) + "/model-00001-of-00002.safetensors")}; },
       [](const std::string& bytes) { read_all(path("one.safetensors"), path("one.safetensors"), bytes); }},
      {"safetensors-list", "read_huggingface of a folder, and its tensors",
       [] { return std::vector{read_bytes(folder_of("hf", true) + "/model.safetensors.index.json")}; },
       [](const std::string& bytes) { read_all(path("hf"), folder_of("hf", false) + "/model.safetensors.index.json", bytes); }},
  };
}

}  // namespace dtensor::fuzz_bytes
