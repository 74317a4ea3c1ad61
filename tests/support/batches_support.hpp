// Data sets for the tests of dt::batches, and what a program makes of them.
#pragma once

#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/data/batches.hpp>

namespace dtensor::test {

// Examples [2, 3] and their index, filled by pointer. What `change` makes of the data comes last.
struct Ramp : torch::data::datasets::Dataset<Ramp> {
  using Change = std::function<at::Tensor(at::Tensor data, size_t index)>;
  explicit Ramp(size_t count, Change change = {}) : count(count), change(std::move(change)) {}

  torch::data::Example<> get(size_t index) override {
    auto data = torch::empty({2, 3}), target = torch::empty({}, torch::kLong);
    for (size_t i = 0; i < 6; ++i) data.data_ptr<float>()[i] = static_cast<float>(10 * index + i);
    *target.data_ptr<int64_t>() = static_cast<int64_t>(index);
    return {change ? change(data, index) : data, target};
  }
  c10::optional<size_t> size() const override { return count; }

  size_t count;
  Change change;
};

// Random numbers of the default generator.
inline at::Tensor augmented(at::Tensor data, size_t) { return data + torch::rand({2, 3}) + torch::randint(100, {1}); }

inline auto ramp_loader(size_t workers, Ramp::Change change, size_t count = 23) {
  return torch::data::make_data_loader(Ramp(count, std::move(change)).map(torch::data::transforms::Stack<>()),
                                       torch::data::DataLoaderOptions().batch_size(5).workers(workers));
}

// Two epochs; where `draws`, the program draws in its loop, as dropout does. All that came of them.
template <class BatchesOf>
Tensors two_epochs(const BatchesOf& batches_of, bool draws) {
  Tensors results;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : batches_of()) {
      results.push_back(batch.data), results.push_back(batch.target);
      if (draws) results.push_back(torch::rand({3}));
    }
    results.push_back(torch::rand({2}));
  }
  return results;
}

inline Tensors plain_epochs(size_t workers, bool data_draws, bool rank_draws) {
  torch::manual_seed(5);
  auto loader = ramp_loader(workers, data_draws ? augmented : nullptr);
  return two_epochs([&]() -> auto& { return *loader; }, rank_draws);
}

inline Tensors mesh_epochs(const DeviceMesh& mesh, PlacementsRef placements, size_t workers, bool data_draws, bool rank_draws,
                           LoadOn where = LoadOn::automatic) {
  Spmd spmd(mesh);
  torch::manual_seed(5);
  auto loader = ramp_loader(workers, data_draws ? augmented : nullptr);
  return two_epochs([&] { return batches(*loader, mesh, placements, where); }, rank_draws);
}

}  // namespace dtensor::test
