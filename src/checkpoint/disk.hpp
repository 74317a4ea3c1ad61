// Files as a checkpoint needs them: written once, synced, renamed into place. Every function throws std::runtime_error that names the file
// and what the system says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints {

inline constexpr const char* kIndexName = "index.json";

// In every error about a file that is not what was written: other steps may be whole.
inline constexpr const char* kIsDamaged = "' is damaged";

// Of a folder without a name, whose steps would be in the root of the file system.
inline constexpr const char* kNoFolder =
    "the name of the folder is empty; expected the folder of a run; hint: '.' is the working directory";

// "step-100" gives 100; a name that step_folder() does not make, none.
std::optional<int64_t> step_of(const std::string& name);

namespace disk {

// A file that did not exist before, and is written from begin to end. Closed without finish(), it is removed.
class NewFile {
 public:
  explicit NewFile(std::string path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t size);
  void finish(bool synced = true);

 private:
  std::string path_;
  int file_ = -1;
  int64_t bytes_ = 0;
  bool done_ = false;
};

// Memory for some bytes of a file.
struct Piece {
  void* data;
  size_t size;
};

// A file that is read at any place.
class File {
 public:
  explicit File(std::string path);
  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int64_t size() const;
  void read(void* data, size_t size, int64_t offset) const;  // throws where the file ends before
  // Bytes that follow each other, into pieces: in one call to the system, which costs as much as copying a few pages.
  void read(const std::vector<Piece>& pieces, int64_t offset) const;

 private:
  std::string path_;
  int file_ = -1;
};

// Puts a whole text where `path` is, or leaves what was there. Synced, with its folder, when it returns.
void replace(const std::string& path, std::string_view text);

// The same, not synced.
void put(const std::string& path, std::string_view text);

std::string read_text(const std::string& path);
std::string folder_of(const std::string& path);  // "." for a name alone
bool exists(const std::string& path);            // throws where the system cannot tell
// Makes a folder, and those above it. Returns the folders that have to be synced for it to last, the innermost first.
std::vector<std::string> make_folder(const std::string& path);
void sync_folder(const std::string& path);
void remove(const std::string& path);                          // a file; one that is not there is well
std::vector<std::string> names_in(const std::string& folder);  // sorted

}  // namespace disk

}  // namespace dtensor::checkpoints
