// Bytes of real text, cut into training batches. The batch of a step is a function of (seed, step) alone, so every rank
// of a job, and a run on one device, makes the same one.
#pragma once

#include <torch/types.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifndef DTENSOR_TEXT_DIR
#define DTENSOR_TEXT_DIR "/usr/include"
#endif

class TextData {
 public:
  static constexpr size_t kMaxBytes = 20'000'000;

  // Reads the first kMaxBytes of a file, of a folder (all files under it, in the order of their paths) or, when `path`
  // is empty, of the C++ headers of libtorch. Throws std::runtime_error when that yields nothing.
  explicit TextData(const std::string& path) {
    const std::filesystem::path include = DTENSOR_TEXT_DIR;
    const auto sources = path.empty() ? std::vector{include / "torch", include / "c10", include / "ATen"}
                                      : std::vector<std::filesystem::path>{path};
    for (const auto& source : sources) read(source);
    if (!bytes_.empty()) return;
    if (path.empty())
      throw std::runtime_error("no text to train on: found no libtorch headers under " + include.string() +
                               "; hint: name a text file with --data FILE");
    throw std::runtime_error("cannot read text from '" + path + "': it is missing, empty or not readable (looked " +
                             "from " + std::filesystem::current_path().string() + "); hint: check --data, on every " +
                             "host of the job, or leave it out to train on libtorch's headers");
  }

  size_t size() const { return bytes_.size(); }

  // Inputs and targets of a step, int64 [batch, seq] each; the target is the input's next byte. Plain tensors.
  std::pair<torch::Tensor, torch::Tensor> batch(uint64_t seed, uint64_t step, int64_t batch, int64_t seq) const {
    const auto row = static_cast<size_t>(seq) + 1;
    if (bytes_.size() < row)
      throw std::runtime_error("the text has " + std::to_string(bytes_.size()) + " bytes, but a sequence needs " +
                               std::to_string(row) + "; hint: a longer --data file or a smaller --seq");
    std::vector<int64_t> input, target;
    for (uint64_t i = 0; i < static_cast<uint64_t>(batch); ++i) {
      const auto begin = bytes_.begin() + mix(mix(mix(seed) ^ step) ^ i) % (bytes_.size() - row + 1);
      input.insert(input.end(), begin, begin + seq);
      target.insert(target.end(), begin + 1, begin + 1 + seq);
    }
    return {to_tensor(std::move(input), batch, seq), to_tensor(std::move(target), batch, seq)};
  }

 private:
  // splitmix64: the same numbers on every machine, which std:: distributions do not promise.
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  // Takes the vector's memory: no factory is called, so this is a plain tensor wherever it is made.
  static torch::Tensor to_tensor(std::vector<int64_t> values, int64_t batch, int64_t seq) {
    auto* kept = new std::vector<int64_t>(std::move(values));
    return torch::from_blob(kept->data(), {batch, seq}, [kept](void*) { delete kept; }, torch::kInt64);
  }

  void read(const std::filesystem::path& source) {
    std::error_code ignored;  // what cannot be read adds nothing
    std::vector<std::string> files;
    if (std::filesystem::is_regular_file(source, ignored)) files.push_back(source.string());
    for (std::filesystem::recursive_directory_iterator it(source, ignored), end; it != end; it.increment(ignored))
      if (it->is_regular_file(ignored)) files.push_back(it->path().string());
    std::ranges::sort(files);
    for (const auto& file : files) append(file);
  }

  void append(const std::string& file) {
    std::error_code unknown;
    const auto bytes = std::filesystem::file_size(file, unknown);
    const auto begin = bytes_.size();
    bytes_.resize(begin + std::min<size_t>(unknown ? 0 : bytes, kMaxBytes - begin));
    std::ifstream in(file, std::ios::binary);
    in.read(reinterpret_cast<char*>(bytes_.data() + begin), static_cast<std::streamsize>(bytes_.size() - begin));
    bytes_.resize(begin + static_cast<size_t>(in.gcount()));
  }

  std::vector<uint8_t> bytes_;
};
