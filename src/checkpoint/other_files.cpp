// Files of tensors, and of objects that write an archive of their own.
#include "src/checkpoint/archives.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <c10/core/GradMode.h>

#include <utility>

namespace dtensor::detail {

using namespace dtensor::files;

void save_tensors(const std::vector<at::Tensor>& tensors, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Ranks ranks("save", tensors);
  Wholes wholes(ranks);
  torch::serialize::OutputArchive archive;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto whole = wholes.of(tensors[i]);
    if (ranks.is_first()) archive.write(std::to_string(i), whole);
  }
  ranks.first_does([&] { write_file(archive, path); });
}

void load_tensors(std::vector<at::Tensor>& tensors, const std::string& path) {
  load_archive(
      [&](auto& archive) {
        at::Tensor tensor;
        while (archive.try_read(std::to_string(tensors.size()), tensor)) tensors.push_back(std::exchange(tensor, {}));
        require(!tensors.empty(), "load", "'{}' has no tensor '0'; hint: a file of a module is loaded to a module", path);
      },
      path);
}

void save_archive(const std::function<void(torch::serialize::OutputArchive&)>& save, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Ranks ranks("save", {});
  torch::serialize::OutputArchive archive;
  save(archive);
  ranks.first_does([&] { write_file(archive, path); });
}

void load_archive(const std::function<void(torch::serialize::InputArchive&)>& load, const std::string& path) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  auto archive = read_file_on_all(Ranks("load", {}), path);
  load(archive);
}

}  // namespace dtensor::detail
