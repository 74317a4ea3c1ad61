// What dt::save wrote.
#include "tools/fuzz_bytes/target.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>

#include <filesystem>

namespace dtensor::fuzz_bytes {

namespace {

// A state of which some is not there before it is loaded.
struct Training {
  at::Tensor matrix = at::ones({3, 4}).set_requires_grad(true), other;
  torch::optim::Adam optimizer{std::vector<at::Tensor>{matrix}, torch::optim::AdamOptions(0.1)};
  int64_t epoch = 3;
  std::string note = "a text that is not UTF-8: \xff";
  State state() { return {{"matrix", matrix}, {"other", other}, {"optimizer", optimizer}, {"epoch", epoch}, {"note", note}}; }
};

std::string index_of_step(bool is_new) {
  const auto run = scratch() + "/run";
  if (is_new) std::filesystem::remove_all(run);
  if (!std::filesystem::exists(run)) {
    Training training;
    training.matrix.mutable_grad() = at::ones({3, 4});
    training.other = at::arange(5);
    training.optimizer.step();
    save(training.state(), run, 1);
  }
  return step_folder(run, 1) + "/index.json";
}

// The checksum is made right, or nothing behind it would be read.
void read_step(const std::string& bytes) {
  const auto path = index_of_step(false);
  const auto rest = bytes.substr(bytes.find('\n') + 1);
  write_bytes(path, fmt::format("{{\"crc32c\": \"{:08x}\",\n", checkpoints::crc32c(rest.data(), rest.size())) + rest);
  const auto index = checkpoints::read_index(std::filesystem::path(path).parent_path().string());
  expect(checkpoints::index_from(to_text(index), path).tensors.size() == index.tensors.size(), "an index that reads as another");
  checkpoints::faults_of(index);
  for (const auto& [name, tensor] : index.tensors) checkpoints::read_tensor(index, name);
  Training training;
  load(training.state(), scratch() + "/run");
}

}  // namespace

std::vector<Target> step_targets() {
  return {{"index", "index.json of a step, its tensors, and dt::load", [] { return std::vector{read_bytes(index_of_step(true))}; },
           read_step, {"-1", "9223372036854775807", "4611686018427387904", "1e300", "null", "[", "]", "{", "}", ",", "{\"bytes\":\"f"}}};
}

}  // namespace dtensor::fuzz_bytes
