// Tells what kind of checkpoint is somewhere.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/foreign/common.hpp"

#include <filesystem>
#include <system_error>

namespace dtensor::checkpoints {

Index read_any(const std::string& path) {
  std::error_code ignored;
  const auto has = [&](const char* name) { return disk::exists(path + "/" + name); };
  if (std::filesystem::is_directory(path, ignored)) {
    if (has(kIndexName)) return read_index(path);
    if (has("model.safetensors.index.json") || has("model.safetensors")) return read_huggingface(path);
    if (has(".metadata") || has("model/.metadata") || has("optimizer/.metadata")) return read_dcp(path);
    fail("read_any",
         "the folder '{}' has no checkpoint; expected index.json (a step of dt::save), model.safetensors or "
         "model.safetensors.index.json (Hugging Face), or .metadata (torch.distributed.checkpoint, ByteCheckpoint); hint: give the folder "
         "of "
         "one step, not that of a run",
         path);
  }
  if (!disk::exists(path))
    fail("read_any", "there is no '{}'; expected a folder or a file; hint: paths are relative to the working directory", path);
  if (path.ends_with(".safetensors")) return read_huggingface(path);
  return read_torch_file(path);
}

}  // namespace dtensor::checkpoints
