// What the readers and writers of other libraries' files share.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace dtensor::checkpoints::foreign {

// Notes what a reader leaves out, in Index::writer["skipped"]: a few by name, and how many.
class Skipped {
 public:
  void add(const std::string& name, const std::string& why);
  void note_in(Index& index) const;

 private:
  std::string text_;
  int64_t count_ = 0;
};

// The tensor of a name as the source gives it, its elements one after the other in memory. Throws std::runtime_error where it is not what
// was described.
at::Tensor whole(const Source& source, const Source::Described& tensor);

// Throws std::runtime_error where names repeat or are empty, or where a further name is of no tensor.
void check_source(const Source& source);

// A name beside `path` that was not given before in this process. One that ended may have had this one's number, and have left something.
std::string hidden_name(const std::string& path);

// A folder that appears under its name when it is complete. Until then it has another name; not completed, it is removed.
class NewFolder {
 public:
  explicit NewFolder(std::string path);  // throws std::runtime_error where there is something, but for an empty folder
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  std::string file(const std::string& name) const { return hidden_ + "/" + name; }
  void finish();

 private:
  void check_is_free() const;
  std::string path_, hidden_;
  std::vector<std::string> changed_;  // the folders above that have to be synced
};

// Runs `work`, whose exceptions become a dtensor::Error of this tag and path.
template <class Work>
auto guarded(const char* tag, const std::string& path, const char* hint, Work&& work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& problem) {
    fail(tag, "'{}': {}; hint: {}", path, problem.what_without_backtrace(), hint);
  } catch (const std::exception& problem) {
    fail(tag, "'{}': {}; hint: {}", path, problem.what(), hint);
  }
}

}  // namespace dtensor::checkpoints::foreign
