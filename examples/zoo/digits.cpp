#include "digits.hpp"

#include <torch/types.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace zoo {

namespace {

// splitmix64: the same numbers on every machine.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Takes the vector's memory: no factory is called, so this is a plain tensor wherever it is made.
template <class T>
at::Tensor to_tensor(std::vector<T> values, const std::vector<int64_t>& sizes) {
  auto* kept = new std::vector<T>(std::move(values));
  return torch::from_blob(kept->data(), sizes, [kept](void*) { delete kept; }, c10::CppTypeToScalarType<T>::value);
}

}  // namespace

Digits::Digits(const std::string& path) {
  const std::string file = path.empty() ? DTENSOR_DIGITS : path;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) images_.push_back(parse(line, file));
  if (images_.empty()) throw std::runtime_error("cannot read images from '" + file + "'; hint: the sources have them in examples/zoo/data");
}

Digits::Image Digits::parse(const std::string& line, const std::string& path) {
  Image image{};
  std::istringstream in(line);
  char comma = 0;
  for (auto& pixel : image.pixels) {
    in >> pixel >> comma;
    pixel = pixel / 8 - 1;
  }
  in >> image.digit;
  if (!in) throw std::runtime_error("'" + line + "' in '" + path + "' is not 64 numbers and a digit");
  return image;
}

std::pair<at::Tensor, at::Tensor> Digits::batch(uint64_t seed, uint64_t step, int64_t batch, int64_t channels, int64_t size) const {
  std::vector<float> pixels;
  std::vector<int64_t> digits;
  for (uint64_t i = 0; i < static_cast<uint64_t>(batch); ++i) {
    const auto& image = images_[mix(mix(mix(seed) ^ step) ^ i) % images_.size()];
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t y = 0; y < size; ++y)
        for (int64_t x = 0; x < size; ++x) pixels.push_back(image.pixels[y * kSize / size * kSize + x * kSize / size]);
    digits.push_back(image.digit);
  }
  return {to_tensor(std::move(pixels), {batch, channels, size, size}), to_tensor(std::move(digits), {batch})};
}

}  // namespace zoo
