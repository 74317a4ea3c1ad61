// A small convolutional network and a data set of handwritten digits with random shifts and noise, in plain libtorch.
#pragma once

#include "zoo/digits.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/data.h>
#include <torch/nn.h>

#include <atomic>
#include <memory>

// The images of zoo/data/digits.csv: the first 1500 to train with, augmented, the rest to test with. Examples: float32 [1, 8, 8], int64 [].
class DigitsDataset : public torch::data::datasets::Dataset<DigitsDataset> {
 public:
  DigitsDataset(bool train, uint64_t seed) : train_(train), seed_(seed) {}

  c10::optional<size_t> size() const override { return train_ ? kTrain : digits_->size() - kTrain; }

  // What the workers' copies share: which pass over the data it is.
  void set_epoch(uint64_t epoch) { *epoch_ = epoch; }

  torch::data::Example<> get(size_t index) override {
    // A generator of the example's own. Workers share libtorch's, and which of them draws first is up to the threads.
    auto generator = at::make_generator<at::CPUGeneratorImpl>((seed_ * 1000 + *epoch_) * 10000 + index);
    const auto shift = torch::randint(-1, 2, {2}, generator);
    auto image = torch::empty({1, kSize, kSize});
    auto target = torch::empty({}, torch::kLong);
    const auto by = shift.accessor<int64_t, 1>();
    const auto& from = (*digits_)[train_ ? index : kTrain + index];
    for (int64_t y = 0; y < kSize; ++y) {
      for (int64_t x = 0; x < kSize; ++x) {
        const int64_t row = y + (train_ ? by[0] : 0), column = x + (train_ ? by[1] : 0);
        const bool inside = row >= 0 && row < kSize && column >= 0 && column < kSize;
        image.data_ptr<float>()[y * kSize + x] = inside ? from.pixels[static_cast<size_t>(row * kSize + column)] : -1;
      }
    }
    *target.data_ptr<int64_t>() = from.digit;
    if (train_) image.add_(torch::randn({1, kSize, kSize}, generator), 0.1);
    return {image, target};
  }

 private:
  static constexpr int64_t kSize = zoo::Digits::kSize;
  static constexpr size_t kTrain = 1500;

  bool train_;
  uint64_t seed_;
  std::shared_ptr<const zoo::Digits> digits_ = std::make_shared<zoo::Digits>();
  std::shared_ptr<std::atomic<uint64_t>> epoch_ = std::make_shared<std::atomic<uint64_t>>(0);
};

struct DigitsCnnImpl : torch::nn::Module {
  DigitsCnnImpl() {
    namespace nn = torch::nn;
    layers = register_module("layers", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)), nn::ReLU(), nn::MaxPool2d(2),
                                                      nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)), nn::ReLU(), nn::MaxPool2d(2),
                                                      nn::Flatten(), nn::Dropout(0.25), nn::Linear(128, 64), nn::ReLU(), nn::Dropout(0.5),
                                                      nn::Linear(64, 10)));
  }
  // [batch, 1, 8, 8] -> logits [batch, 10]
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(DigitsCnn);
