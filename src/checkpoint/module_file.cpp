// Files of modules. The archive is that of torch::nn::Module::save.
#include "src/checkpoint/archives.hpp"
#include "src/parallel/tensors_of.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <stdexcept>

namespace dtensor::files {

namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<at::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : detail::tensors_of(module)) tensors.push_back(tensor);
  return tensors;
}

// Only the first rank has an archive.
void write(torch::serialize::OutputArchive* archive, const torch::nn::Module& module, Wholes& wholes) {
  const auto each = [&](const auto& tensors, bool is_buffer) {
    for (const auto& item : tensors) {
      const auto whole = wholes.of(item.value());
      if (archive) archive->write(item.key(), whole, is_buffer);
    }
  };
  each(module.named_parameters(/*recurse=*/false), false);
  each(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    if (!archive) {
      write(nullptr, *child.value(), wholes);
    } else {
      torch::serialize::OutputArchive inner(archive->compilation_unit());
      write(&inner, *child.value(), wholes);
      archive->write(child.key(), inner);
    }
  }
}

// A module's tensors, those that torch::nn::Module::load reads and in its order, each with the tensor of the same name in the file
// (undefined if the file has none).
struct Pair {
  std::string name;
  at::Tensor own, saved;
};

void pair_up(torch::serialize::InputArchive* archive, const torch::nn::Module& module, const std::string& prefix,
             std::vector<Pair>& pairs) {
  const auto each = [&](const auto& tensors, bool is_buffer) {
    for (const auto& item : tensors) {
      pairs.push_back({prefix + item.key(), item.value(), {}});
      if (archive) archive->try_read(item.key(), pairs.back().saved, is_buffer);
    }
  };
  each(module.named_parameters(/*recurse=*/false), false);
  each(module.named_buffers(/*recurse=*/false), true);
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive inner;
    const bool there = archive && archive->try_read(child.key(), inner);
    pair_up(there ? &inner : nullptr, *child.value(), prefix + child.key() + ".", pairs);
  }
}

void names_in(torch::serialize::InputArchive& archive, const std::string& prefix, std::vector<std::string>& names) {
  for (const auto& key : archive.keys()) {
    torch::serialize::InputArchive inner;
    if (archive.try_read(key, inner)) names_in(inner, prefix + key + ".", names);
    else names.push_back(prefix + key);
  }
}

// Throws std::runtime_error that lists everything that does not fit.
void check(const std::vector<Pair>& pairs, torch::serialize::InputArchive& archive, const std::string& path) {
  std::vector<std::string> problems;
  std::vector<std::string> names;
  for (const auto& [name, own, saved] : pairs) {
    if (!saved.defined()) {
      if (names.empty()) names_in(archive, "", names);
      problems.push_back(
          fmt::format("it has no '{}' (closest: {})", name, names.empty() ? "it has nothing" : detail::closest(name, names)));
    } else if (saved.sizes() != own.sizes()) {
      problems.push_back(
          fmt::format("'{}' has sizes [{}], expected [{}]", name, fmt::join(saved.sizes(), ", "), fmt::join(own.sizes(), ", ")));
    } else if (saved.scalar_type() != own.scalar_type()) {
      problems.push_back(
          fmt::format("'{}' is {}, expected {}", name, c10::toString(saved.scalar_type()), c10::toString(own.scalar_type())));
    }
  }
  if (problems.empty()) return;
  constexpr size_t kShown = 20;
  const auto count = problems.size();
  if (count > kShown) problems.resize(kShown);
  throw std::runtime_error(fmt::format("'{}' does not fit the module: {}{}", path, fmt::join(problems, "; "),
                                       count > kShown ? fmt::format("; and {} more", count - kShown) : ""));
}

}  // namespace

}  // namespace dtensor::files

namespace dtensor::detail {

using namespace dtensor::files;

void save_module(const torch::nn::Module& module, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Ranks ranks("save", values_of(module));
  Wholes wholes(ranks);
  torch::serialize::OutputArchive archive;
  write(ranks.is_first() ? &archive : nullptr, module, wholes);
  ranks.first_does([&] { write_file(archive, path); });
}

void load_module(torch::nn::Module& module, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const auto all = values_of(module);
  for (const auto& tensor : all) {
    require(!is_deferred(tensor), "load", "the module's tensors have no memory yet; hint: dt::materialize comes first");
  }
  const Ranks ranks("load", all);
  std::vector<Pair> pairs;
  if (!ranks.is_first()) pair_up(nullptr, module, "", pairs);
  ranks.first_does([&] {
    auto archive = read_file(path);
    pair_up(&archive, module, "", pairs);
    check(pairs, archive, path);
  });
  for (auto& [name, own, saved] : pairs) {
    const auto whole = ranks.from_first(ranks.is_first() ? saved.contiguous() : at::empty(own.sizes(), own.scalar_type()));
    own.copy_(laid_out_like(own, whole));
    saved.reset();
  }
}

}  // namespace dtensor::detail
