#include "src/checkpoint/step_files.hpp"

#include "src/checkpoint/disk.hpp"

#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/version.hpp>

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <set>
#include <stdexcept>
#include <system_error>

namespace dtensor::checkpoints {

namespace {

std::string data_name(const Job& job, size_t file) { return fmt::format("data-{}-{:05}-{:03}.safetensors", job.attempt, job.rank, file); }

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

}  // namespace

std::map<std::string, std::string> written_by(int ranks) {
  const auto now = std::time(nullptr);
  std::tm parts{};
  char time[32];
  const auto length = std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &parts));
  return {{"dtensor", DTENSOR_VERSION_TEXT}, {"libtorch", TORCH_VERSION}, {"ranks", std::to_string(ranks)}, {"time", {time, length}}};
}

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
                               crc32c_of_chunks(data + item.offset, item.bytes, report.chunk_bytes)});
    }
    out.finish();
    data += file.data_bytes;
    report.files.push_back(std::move(saved));
  }
  return report;
}

Index join_reports(const Job& job, const std::vector<Index>& reports) {
  Joined joined(job);
  for (size_t rank = 0; rank < reports.size(); ++rank) joined.add(reports[rank], static_cast<int>(rank));
  return joined.take();
}

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

void remove_step_files(const std::string& step_folder) {
  disk::remove(step_folder + "/" + kIndexName);
  disk::sync_folder(step_folder);
  for (const auto& name : disk::names_in(step_folder)) {
    const auto begins = [&](const char* text) { return name.starts_with(text); };
    if (begins("data-") || begins("report-") || begins("failure-") || begins("index.json.") || begins("index-"))
      disk::remove(step_folder + "/" + name);
  }
  std::error_code not_empty;
  std::filesystem::remove(step_folder, not_empty);
}

}  // namespace dtensor::checkpoints
