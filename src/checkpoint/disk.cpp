#include "src/checkpoint/disk.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace dtensor::checkpoints {

std::optional<int64_t> step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return {};
  int64_t step = 0;
  const auto* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || rest != end || step < 0 || name != fmt::format("{}{}", kPrefix, step)) return {};
  return step;
}

namespace disk {

namespace {

const char* hint_for(int error) {
  switch (error) {
    case ENOSPC: return "; hint: the disk is full: make room (dtensor-checkpoint prune), or choose a folder on another disk";
    case EDQUOT: return "; hint: the user's quota is used up: make room (dtensor-checkpoint prune), or choose another folder";
    case EROFS: return "; hint: the file system can only be read: choose a folder on another one";
    case EACCES:
    case EPERM: return "; hint: who runs this needs permission there: change the folder's owner or mode, or choose another folder";
    case ENOTDIR: return "; hint: a part of the path is a file: name a folder";
    case ENAMETOOLONG: return "; hint: choose a shorter path";
    case EMFILE:
    case ENFILE: return "; hint: too many files are open: raise the limit (ulimit -n)";
    default: return "";
  }
}

[[noreturn]] void refuse(const std::string& path, const char* what, int error = errno) {
  throw std::runtime_error(fmt::format("'{}' cannot be {}: {}{}", path, what, std::generic_category().message(error), hint_for(error)));
}

}  // namespace

std::string folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

NewFile::NewFile(std::string path) : path_(std::move(path)) {
  file_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) refuse(path_, "made");
}

NewFile::~NewFile() {
  if (file_ >= 0) close(file_);
  if (!done_) unlink(path_.c_str());
}

// The disk begins at once, while what follows is being written; finish() waits for it.
void NewFile::write(const void* data, size_t size) {
  constexpr size_t kStep = size_t{8} << 20;
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(file_, next, std::min(size, kStep));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse(path_, "written");
    sync_file_range(file_, bytes_, written, SYNC_FILE_RANGE_WRITE);
    next += written;
    bytes_ += written;
    size -= static_cast<size_t>(written);
  }
}

void NewFile::finish(bool synced) {
  if (synced && fsync(file_) != 0) refuse(path_, "synced");
  if (close(std::exchange(file_, -1)) != 0) refuse(path_, "written");
  done_ = true;
}

// Opening a pipe waits for one who writes to it, unless told not to.
File::File(std::string path) : path_(std::move(path)) {
  file_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) refuse(path_, "opened");
  struct stat facts {};
  if (fstat(file_, &facts) == 0 && S_ISREG(facts.st_mode)) return;
  close(std::exchange(file_, -1));
  throw std::runtime_error(fmt::format("'{}{}: it is {}; expected a file; hint: copy it again, or load an earlier step", path_, kIsDamaged,
                                       S_ISDIR(facts.st_mode) ? "a folder" : "a device or a pipe"));
}

File::~File() {
  if (file_ >= 0) close(file_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

int64_t File::size() const {
  struct stat facts {};
  if (fstat(file_, &facts) != 0) refuse(path_, "read");
  return facts.st_size;
}

void File::read(void* data, size_t size, int64_t offset) const {
  auto* next = static_cast<char*>(data);
  while (size > 0) {
    const auto got = pread(file_, next, size, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path_, "read");
    if (got == 0)
      throw std::runtime_error(fmt::format("'{}{}: it ends before byte {}", path_, kIsDamaged, offset + static_cast<int64_t>(size)));
    next += got;
    size -= static_cast<size_t>(got);
    offset += got;
  }
}

void File::read(const std::vector<Piece>& pieces, int64_t offset) const {
  constexpr size_t kMost = 1024;  // IOV_MAX
  for (size_t first = 0; first < pieces.size(); first += kMost) {
    std::vector<iovec> all;
    for (size_t i = first; i < std::min(first + kMost, pieces.size()); ++i) all.push_back({pieces[i].data, pieces[i].size});
    auto left = std::max<int64_t>(preadv(file_, all.data(), static_cast<int>(all.size()), offset), 0);  // the rest, and errors: below
    for (const auto& [data, size] : all) {
      const auto done = std::min(left, static_cast<int64_t>(size));
      read(static_cast<char*>(data) + done, size - static_cast<size_t>(done), offset + done);
      left -= done;
      offset += static_cast<int64_t>(size);
    }
  }
}

static void put(const std::string& path, std::string_view text, bool synced) {
  const auto temporary = path + ".part";
  remove(temporary);  // of an attempt that ended
  NewFile file(temporary);
  file.write(text.data(), text.size());
  file.finish(synced);
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(temporary.c_str());
    refuse(path, "replaced", error);
  }
  if (synced) sync_folder(folder_of(path));
}
void put(const std::string& path, std::string_view text) { put(path, text, false); }
void replace(const std::string& path, std::string_view text) { put(path, text, true); }

std::string read_text(const std::string& path) {
  const File file(path);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(text.data(), text.size(), 0);
  return text;
}

bool exists(const std::string& path) {
  if (access(path.c_str(), F_OK) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) refuse(path, "looked at");
  return false;
}

std::vector<std::string> make_folder(const std::string& path) {
  if (exists(path)) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(path, ignored)) refuse(path, "made", ENOTDIR);
    return {};
  }
  const auto above = folder_of(path);
  auto changed = make_folder(above);
  if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) refuse(path, "made");
  changed.insert(changed.begin(), above);
  return changed;
}

void sync_folder(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) refuse(path, "opened");
  const bool well = fsync(folder) == 0 || errno == EINVAL;  // some file systems cannot, and need not
  const int error = errno;
  close(folder);
  if (!well) refuse(path, "synced", error);
}

void remove(const std::string& path) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) refuse(path, "removed");
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) names.push_back(entry.path().filename().string());
  if (error) refuse(folder, "listed", error.value());
  std::ranges::sort(names);
  return names;
}

}  // namespace disk

}  // namespace dtensor::checkpoints
