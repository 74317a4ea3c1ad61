// How a step comes into being. Each rank writes its files and syncs them; then it writes its report, an index of them alone, which needs no
// sync. The first rank waits for all reports, joins them and renames the index into place. So ranks need not talk, and the thread that
// writes is free of the training.
#include "src/checkpoint/crc32c.hpp"
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/saver.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>

namespace dtensor::checkpoints {

namespace {

std::string data_name(const Job& job, size_t file) { return fmt::format("data-{}-{:05}-{:03}.safetensors", job.attempt, job.rank, file); }
std::string report_name(const std::string& attempt, int rank) { return fmt::format("report-{}-{:05}.json", attempt, rank); }
std::string failure_name(const std::string& attempt, int rank) { return fmt::format("failure-{}-{:05}.txt", attempt, rank); }

std::vector<uint32_t> sums_of(const char* data, int64_t bytes, int64_t chunk) {
  std::vector<uint32_t> sums;
  for (int64_t at = 0; at < bytes; at += chunk) sums.push_back(crc32c(data + at, static_cast<size_t>(std::min(chunk, bytes - at))));
  return sums;
}

// Writes the rank's files. Returns the index of them alone.
Index write_files(const Job& job) {
  Index report;
  report.step = job.step;
  report.attempt = job.attempt;
  report.values = job.contents.values;
  report.same_as = job.contents.same_as;
  report.tensors = job.replicas;
  const auto* data = job.files.empty() ? nullptr : static_cast<const char*>(job.data.data_ptr());
  for (size_t f = 0; f < job.files.size(); ++f) {
    const auto& file = job.files[f];
    SavedFile saved{data_name(job, f), static_cast<int64_t>(file.header.size()) + file.data_bytes, static_cast<int64_t>(file.header.size()),
                    crc32c(file.header.data(), file.header.size())};
    disk::NewFile out(job.folder + "/" + saved.name);
    out.write(file.header.data(), file.header.size());
    out.write(data, static_cast<size_t>(file.data_bytes));
    for (const auto& item : file.items) {  // while the disk is busy
      auto& tensor = report.tensors.try_emplace(item.name, SavedTensor{item.dtype, item.sizes, {}}).first->second;
      tensor.pieces.push_back({item.box, static_cast<int32_t>(f), saved.header_bytes + item.offset,
                               sums_of(data + item.offset, item.bytes, report.chunk_bytes)});
    }
    out.finish();
    data += file.data_bytes;
    report.files.push_back(std::move(saved));
  }
  return report;
}

// Waits for a rank's report. Throws what the rank failed with.
Index report_of(const Job& job, int rank, const std::atomic<bool>& ended) {
  const auto path = job.folder + "/" + report_name(job.attempt, rank), failure = job.folder + "/" + failure_name(job.attempt, rank);
  for (auto pause = std::chrono::microseconds(100); !disk::exists(path); pause = std::min(pause * 2, std::chrono::microseconds(20'000))) {
    if (disk::exists(failure)) throw std::runtime_error(fmt::format("rank {} failed: {}", rank, disk::read_text(failure)));
    if (ended) throw std::runtime_error(fmt::format("rank {} had not written its part when the save was given up", rank));
    std::this_thread::sleep_for(pause);
  }
  return part_of_index_from(disk::read_text(path), path);
}

// Joins reports. A piece in no file is the checksum of a replica: it is compared with what was written.
class Joined {
 public:
  explicit Joined(const Job& job) {
    index_.step = job.step;
    index_.attempt = job.attempt;
    index_.writer = job.writer;
    index_.tensors = job.all;
  }

  void add(const Index& report, int rank) {
    const auto first_file = static_cast<int32_t>(index_.files.size());
    index_.files.insert(index_.files.end(), report.files.begin(), report.files.end());
    for (const auto& [name, tensor] : report.tensors) {
      for (auto piece : tensor.pieces) {
        if (piece.file < 0) {
          replicas_.push_back({name, piece.sums, rank});
          continue;
        }
        piece.file += first_file;
        index_.tensors.at(name).pieces.push_back(std::move(piece));
        writers_[name] = rank;
      }
    }
    for (const auto& [name, other] : report.same_as) index_.same_as.emplace(name, other);
    for (const auto& [name, value] : report.values) {
      const auto [entry, is_new] = index_.values.try_emplace(name, value);
      if (is_new || entry->second == value || text_of(entry->second) == text_of(value)) continue;  // NaN is not equal to itself
      throw std::runtime_error(
          fmt::format("'{}' is {} on one rank and {} on rank {}; hint: what each rank has for itself goes by "
                      "dt::of_each_rank",
                      name, text_of(entry->second), text_of(value), rank));
    }
  }

  Index take() {
    for (const auto& [name, sums, rank] : replicas_) {
      const auto& pieces = index_.tensors.at(name).pieces;
      if (pieces.size() == 1 && pieces.front().sums == sums) continue;
      throw std::runtime_error(
          fmt::format("the plain tensor '{}' has other values on rank {} than on rank {}; hint: what each rank has for "
                      "itself goes by dt::of_each_rank",
                      name, rank, writers_[name]));
    }
    for (auto& [name, tensor] : index_.tensors) std::ranges::sort(tensor.pieces, {}, [](const Piece& piece) { return key(piece.box); });
    return std::move(index_);
  }

 private:
  struct Replica {
    std::string name;
    std::vector<uint32_t> sums;
    int rank;
  };
  static std::vector<int64_t> key(const Box& box) {
    std::vector<int64_t> begins;
    for (const auto& side : box) begins.push_back(side.begin);
    return begins;
  }

  Index index_;
  std::vector<Replica> replicas_;
  std::map<std::string, int> writers_;
};

// What other attempts left: files of ours that the index does not name. The step is complete: that this fails is no failure of the save.
void remove_leftovers(const std::string& folder, const Index& index) {
  std::set<std::string> kept;
  for (const auto& file : index.files) kept.insert(file.name);
  try {
    for (const auto& name : disk::names_in(folder)) {
      const auto begins = [&](const char* text) { return name.rfind(text, 0) == 0; };
      if ((begins("data-") || begins("report-") || begins("failure-")) && !kept.contains(name)) disk::remove(folder + "/" + name);
    }
  } catch (const std::exception&) {
  }
}

}  // namespace

void write(const Job& job, const std::atomic<bool>& ended) {
  try {
    if (!job.problem.empty()) throw std::runtime_error(job.problem);
    const auto made = disk::make_folder(job.folder);
    const auto own = write_files(job);
    if (job.rank != 0) {
      const auto name = job.folder + "/" + report_name(job.attempt, job.rank);
      disk::put(name, to_text(own));
      return;
    }
    Joined joined(job);
    joined.add(own, 0);
    for (int rank = 1; rank < job.ranks; ++rank) joined.add(report_of(job, rank, ended), rank);
    disk::sync_folder(job.folder);
    const auto index = joined.take();
    const auto text = to_text(index);
    index_from(text, job.folder);  // what would not be read is not written
    disk::replace(job.folder + "/" + kIndexName, text);
    for (const auto& folder : made) disk::sync_folder(folder);
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
