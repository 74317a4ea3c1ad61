// How a step comes into being. Each rank writes its files and syncs them; then it writes its report, an index of them alone, which needs no
// sync. The first rank waits for all reports, joins them and renames the index into place. So ranks need not talk, and the thread that
// writes is free of the training.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/saver.hpp"
#include "src/checkpoint/step_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <thread>

namespace dtensor::checkpoints {

namespace {

std::string report_name(const std::string& attempt, int rank) { return fmt::format("report-{}-{:05}.json", attempt, rank); }
std::string failure_name(const std::string& attempt, int rank) { return fmt::format("failure-{}-{:05}.txt", attempt, rank); }

// Waits for a rank's report. Throws what the rank failed with. A shared file system may show a file some seconds after it was written.
Index report_of(const Job& job, int rank, const std::atomic<Others>& others) {
  constexpr std::chrono::seconds kMostUnseen{60};
  const auto path = job.folder + "/" + report_name(job.attempt, rank), failure = job.folder + "/" + failure_name(job.attempt, rank);
  std::optional<std::chrono::steady_clock::time_point> written_at;
  for (auto pause = std::chrono::microseconds(100); !disk::exists(path); pause = std::min(pause * 2, std::chrono::microseconds(20'000))) {
    if (disk::exists(failure)) throw std::runtime_error(fmt::format("rank {} failed: {}", rank, disk::read_text(failure)));
    if (others == Others::have_failed)
      throw std::runtime_error(fmt::format("rank {} had not written its part when the save was given up", rank));
    const auto now = std::chrono::steady_clock::now();
    if (others == Others::have_written && !written_at) written_at = now;
    if (written_at && now - *written_at > kMostUnseen)
      throw std::runtime_error(fmt::format("rank {} has written its part, and rank 0 does not see it in '{}'; hint: the folder must be one "
                                           "that all hosts share, and of one job alone",
                                           rank, job.folder));
    std::this_thread::sleep_for(pause);
  }
  return part_of_index_from(disk::read_text(path), path);
}

// Another job that saves to the same folder would take this one's files for leftovers.
void check_files(const Job& job, const Index& index) {
  for (const auto& file : index.files) {
    const auto path = job.folder + "/" + file.name;
    const auto bytes = disk::exists(path) ? disk::File(path).size() : -1;
    if (bytes == file.bytes) continue;
    throw std::runtime_error(fmt::format("'{}' {} after it was written; hint: does another job save to this folder?", path,
                                         bytes < 0 ? std::string("was removed") : fmt::format("has {} of {} bytes", bytes, file.bytes)));
  }
}

}  // namespace

void write(const Job& job, const std::atomic<Others>& others) {
  try {
    if (!job.problem.empty()) throw std::runtime_error(job.problem);
    for (const auto& folder : disk::make_folder(job.folder)) disk::sync_folder(folder);
    const auto own = write_files(job);
    if (job.rank != 0) {
      const auto name = job.folder + "/" + report_name(job.attempt, job.rank);
      disk::put(name, to_text(own));
      return;
    }
    std::vector<Index> reports{own};
    for (int rank = 1; rank < job.ranks; ++rank) reports.push_back(report_of(job, rank, others));
    disk::sync_folder(job.folder);
    const auto index = join_reports(job, reports);
    const auto text = to_text(index);
    index_from(text, job.folder);  // what would not be read is not written
    check_files(job, index);
    disk::sync_folder(disk::folder_of(job.folder));  // which another rank, or an earlier attempt, may have made
    disk::replace(job.folder + "/" + kIndexName, text);
    remove_leftovers(job.folder, index);
  } catch (const std::exception& problem) {
    if (job.rank != 0) {
      try {
        disk::put(job.folder + "/" + failure_name(job.attempt, job.rank), problem.what());
      } catch (const std::exception&) {
      }
    }
    throw;
  }
}

void remove_attempt(const std::string& folder, const std::string& attempt, int rank) {
  try {
    // The index is in place, and syncing it failed: the step is there.
    if (disk::exists(folder + "/" + kIndexName) && read_index(folder).attempt == attempt) return;
    const auto mine = fmt::format("-{}-{:05}", attempt, rank);
    for (const auto& name : disk::names_in(folder)) {
      if (name.find(mine) != std::string::npos) disk::remove(folder + "/" + name);
    }
  } catch (const std::exception&) {  // it is removed with the next save of the step
  }
}

}  // namespace dtensor::checkpoints
