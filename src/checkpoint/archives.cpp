#include "src/checkpoint/archives.hpp"
#include "src/checkpoint/damage.hpp"
#include "src/checkpoint/disk.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace dtensor::files {

namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

// Where a link leads to, so that the file it names is replaced or made, and not the link replaced.
std::string behind_links(std::filesystem::path path) {
  std::error_code error;
  constexpr int kMost = 40;  // as the system
  for (int i = 0; i < kMost && std::filesystem::is_symlink(path, error); ++i)
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  return path.string();
}

// A file that is written under another name, and takes the old one's place with its permissions when it is whole. Devices and pipes are
// written to directly. Errors are kept until the end: libtorch's writer ends the process where a write throws.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(behind_links(path)), name_(path_) {
    struct stat old {};
    const bool exists = stat(path_.c_str(), &old) == 0;
    replaces_ = !exists || S_ISREG(old.st_mode) || S_ISDIR(old.st_mode);
    do {  // a process that ended may have had this one's number, and have left a file
      if (replaces_) name_ = fmt::format("{}.{}.{}.part", path_, getpid(), ++count_);
      file_ = open(name_.c_str(), O_WRONLY | O_CLOEXEC | (replaces_ ? O_CREAT | O_EXCL : 0), 0666);
    } while (file_ < 0 && errno == EEXIST);
    if (file_ < 0) error_ = errno;
    made_ = file_ >= 0;
    if (file_ >= 0 && exists && S_ISREG(old.st_mode) && fchmod(file_, old.st_mode & 07777) != 0) error_ = errno;
  }
  ~NewFile() {
    if (file_ >= 0) close(file_);
    if (!done_ && replaces_ && made_) unlink(name_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  size_t write(const void* data, size_t size) {
    const auto* next = static_cast<const char*>(data);
    for (size_t left = size; left > 0 && error_ == 0;) {
      const auto written = ::write(file_, next, left);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) error_ = errno;
      else next += written, left -= static_cast<size_t>(written);
    }
    return size;
  }

  void finish() {
    if (error_ == 0 && replaces_ && fsync(file_) != 0) error_ = errno;
    if (file_ >= 0 && close(std::exchange(file_, -1)) != 0 && error_ == 0) error_ = errno;
    if (error_ == 0 && replaces_ && std::rename(name_.c_str(), path_.c_str()) != 0) error_ = errno;
    if (error_ != 0) throw std::runtime_error(fmt::format("'{}' cannot be written: {}", path_, text_of(error_)));
    done_ = true;
    if (replaces_) checkpoints::disk::sync_folder(checkpoints::disk::folder_of(path_));
  }
  bool failed() const { return error_ != 0; }

 private:
  static inline std::atomic<int> count_ = 0;
  std::string path_, name_;
  int file_ = -1, error_ = 0;
  bool replaces_ = true, made_ = false, done_ = false;
};

}  // namespace

at::Tensor Wholes::of(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor;
  const auto [it, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl());
  if (!is_new) return it->second;
  require(!is_deferred(tensor), "save", "a tensor of sizes {} has no values yet; hint: dt::materialize comes first",
          fmt::join(tensor.sizes(), "x"));
  const auto whole = full_tensor(tensor);
  if (!ranks_.is_first()) return {};
  const auto options = whole.options().device(at::kCPU);
  it->second = tensor.is_non_overlapping_and_dense() ? at::empty_strided(tensor.sizes(), tensor.strides(), options)
                                                     : at::empty_like(whole, options, at::MemoryFormat::Contiguous);
  it->second.copy_(whole);
  it->second.set_requires_grad(tensor.requires_grad());
  return it->second;
}

at::Tensor laid_out_like(const at::Tensor& like, const at::Tensor& whole) {
  const auto moved = whole.to(like.device());
  if (!is_dtensor(like)) return moved;
  const DTensor known(like);
  return distribute_tensor(moved, known.mesh(), without_partial(known.placements()));
}

void write_file(torch::serialize::OutputArchive& archive, const std::string& path) {
  NewFile file(path);
  if (!file.failed()) archive.save_to([&](const void* data, size_t size) { return file.write(data, size); });
  file.finish();
}

torch::serialize::InputArchive read_file(const std::string& path) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  errno = 0;
  if (is_folder || !std::ifstream(path)) {
    throw std::runtime_error(fmt::format("'{}' cannot be opened: {}", path, is_folder ? "it is a folder" : text_of(errno)));
  }
  if (const auto damage = damage_of(path); !damage.empty())
    throw std::runtime_error(fmt::format("'{}' is damaged: {}; hint: it was cut, or changed on its way here; copy it again", path, damage));
  if (const auto program = program_in(path); !program.empty())
    throw std::runtime_error(fmt::format("'{}' has a program that would run when it is read, '{}'; hint: in Python, torch.jit.load it and "
                                         "save its state_dict(), which dt::checkpoints::read_torch_file reads",
                                         path, program));
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(path, at::Device(at::kCPU));
  } catch (const std::exception& problem) {
    std::string text = problem.what();
    throw std::runtime_error(fmt::format("'{}' is no file of torch::save: {}; hint: a state_dict that Python's torch.save wrote is none",
                                         path, text.substr(0, text.find('\n'))));
  }
  return archive;
}

torch::serialize::InputArchive read_file_on_all(const Ranks& ranks, const std::string& path) {
  std::string bytes;
  ranks.first_does([&] {
    read_file(path);
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  });
  bytes = ranks.from_first(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), at::Device(at::kCPU));
  return archive;
}

}  // namespace dtensor::files
