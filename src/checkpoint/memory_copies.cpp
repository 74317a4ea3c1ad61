// A copy is a folder like that of a step. The index is named after the rank that wrote it, since ranks of one host share the folder; all
// ranks' indexes are the same. It is put there when every rank has written its files and its partner's.
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/load.hpp"
#include "src/checkpoint/step_files.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/memory_copies.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>

namespace dtensor {

using namespace checkpoints;

namespace {

constexpr const char* kTag = "MemoryCopies";

int distance_of(const MemoryCopiesOptions& options, int ranks) {
  if (options.distance != 0) return options.distance % ranks;
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  const int of_host = text ? std::atoi(text) : 1;
  return of_host > 0 && of_host < ranks ? of_host : 1 % ranks;
}

std::string index_name(int rank) { return fmt::format("index-{:05}.json", rank); }

int64_t bytes_of(const Index& report) {
  int64_t bytes = 0;
  for (const auto& file : report.files) bytes += file.bytes;
  return bytes;
}

// All files of a job, one after the other.
at::Tensor bytes_of(const Job& job) {
  int64_t size = 0;
  for (const auto& file : job.files) size += static_cast<int64_t>(file.header.size()) + file.data_bytes;
  auto bytes = at::empty({size}, at::kByte);
  auto* next = static_cast<char*>(bytes.data_ptr());
  const auto* data = job.files.empty() ? nullptr : static_cast<const char*>(job.data.data_ptr());
  for (const auto& file : job.files) {
    next = std::copy_n(file.header.data(), file.header.size(), next);
    next = std::copy_n(data, file.data_bytes, next);
    data += file.data_bytes;
  }
  return bytes;
}

bool has_file(const std::string& folder, const SavedFile& file) {
  std::error_code none;
  const auto size = std::filesystem::file_size(folder + "/" + file.name, none);
  return !none && size == static_cast<uintmax_t>(file.bytes);
}

// The folders of steps in a folder.
std::map<int64_t, std::string> steps_in(const std::string& folder) {
  std::map<int64_t, std::string> paths;
  if (!disk::exists(folder)) return paths;
  for (const auto& name : disk::names_in(folder)) {
    const auto step = step_of(name);
    std::error_code ignored;
    if (step && std::filesystem::is_directory(folder + "/" + name, ignored)) paths[*step] = folder + "/" + name;
  }
  return paths;
}

// Ranks of a host do it at the same time.
void remove_on_host(const std::string& step_folder) {
  try {
    remove_step_files(step_folder);
  } catch (const std::exception&) {
    if (disk::exists(step_folder)) throw;
  }
}

// The steps of which there is an index in a folder, and the first text of each that can be read.
std::map<int64_t, std::string> indexes_in(const std::string& folder) {
  std::map<int64_t, std::string> texts;
  for (const auto& [step, path] : steps_in(folder)) {
    for (const auto& file : disk::names_in(path)) {
      if (!file.starts_with("index-") || texts.contains(step)) continue;
      try {
        auto text = disk::read_text(path + "/" + file);
        index_from(text, path + "/" + file);
        texts[step] = std::move(text);
      } catch (const std::exception&) {  // another rank's may be whole
      }
    }
  }
  return texts;
}

}  // namespace

struct MemoryCopies::Found {
  Index index;
  SeenBy seen_by;
};

MemoryCopies::MemoryCopies(State state, MemoryCopiesOptions options)
    : state_(std::move(state)), options_(std::move(options)), saver_(std::make_unique<Saver>()) {
  require(!options_.folder.empty(), kTag, "no folder is named; hint: MemoryCopiesOptions.folder, as '/dev/shm/my_run'");
  require(options_.distance >= 0, kTag, "got a distance of {}; expected a positive number of ranks, or 0", options_.distance);
}

MemoryCopies::~MemoryCopies() = default;

std::string MemoryCopies::folder_of(int64_t step) const { return step_folder(options_.folder, step); }

void MemoryCopies::save(int64_t step) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Everyone everyone(kTag);
  auto job = saver_->prepare(state_, kTag, step, options_.save, everyone);
  job.folder = folder_of(step);
  try {
    write(job, everyone);
  } catch (...) {
    const int partner = (job.rank - distance_of(options_, job.ranks) + job.ranks) % job.ranks;
    for (const int rank : {job.rank, partner}) remove_attempt(job.folder, job.attempt, rank);
    throw;
  }
  everyone.agree(problem_of([&] {
    for (const auto& [other, path] : steps_in(options_.folder)) {
      if (other != step) remove_on_host(path);
    }
  }));
}

void MemoryCopies::write(const Job& job, const Everyone& everyone) const {
  Index own;
  everyone.agree(problem_of([&] {
    require(job.problem.empty(), kTag, "{}", job.problem);
    disk::make_folder(job.folder);
    own = write_files(job);
  }));
  std::vector<Index> reports;
  for (const auto& text : everyone.gather(to_text(own))) reports.push_back(part_of_index_from(text, job.folder));
  std::string text;
  everyone.agree(problem_of([&] {
    if (everyone.is_first()) text = to_text(join_reports(job, reports));
  }));
  text = everyone.from_first(text);
  keep_partners(job, reports, everyone);
  everyone.agree(problem_of([&] { disk::put(job.folder + "/" + index_name(job.rank), text); }));
  remove_leftovers(job.folder, index_from(text, job.folder));
}

// Gives this rank's files to its partner, and writes those of the rank whose partner it is, unless they are on this host already.
void MemoryCopies::keep_partners(const Job& job, const std::vector<Index>& reports, const Everyone& everyone) const {
  const int ranks = everyone.size(), distance = distance_of(options_, ranks);
  if (distance == 0) return;
  const auto to = static_cast<size_t>((everyone.rank() + distance) % ranks);
  const auto from = static_cast<size_t>((everyone.rank() - distance + ranks) % ranks);
  const auto& partners = reports[from];
  std::vector<int64_t> send(reports.size(), 0), receive(reports.size(), 0);
  at::Tensor bytes;
  everyone.agree(problem_of([&] { bytes = bytes_of(job); }));
  send[to] = bytes.numel();
  receive[from] = bytes_of(partners);
  const auto received = everyone.exchange(bytes, send, receive);
  everyone.agree(problem_of([&] {
    const auto* next = static_cast<const char*>(received.data_ptr());
    for (const auto& saved : partners.files) {
      if (!has_file(job.folder, saved)) {
        disk::NewFile file(job.folder + "/" + saved.name);
        file.write(next, static_cast<size_t>(saved.bytes));
        file.finish();
      }
      next += saved.bytes;
    }
  }));
}

// The newest step all of whose files are seen by some rank.
std::optional<MemoryCopies::Found> MemoryCopies::find(const Everyone& everyone) const {
  std::map<int64_t, std::string> texts;
  everyone.agree(problem_of([&] { texts = indexes_in(options_.folder); }));
  std::string own;
  for (const auto& [step, text] : texts) own += fmt::format("{} ", step);
  std::map<int64_t, int, std::greater<>> sources;  // the first rank that has a step's index
  const auto all = everyone.gather(own);
  for (size_t rank = all.size(); rank-- > 0;) {
    for (size_t begin = 0, end; (end = all[rank].find(' ', begin)) != std::string::npos; begin = end + 1)
      sources[std::stoll(all[rank].substr(begin, end - begin))] = static_cast<int>(rank);
  }
  for (const auto& [step, source] : sources) {
    Found found;
    const auto text = everyone.from(source, texts[step]);
    std::string seen;
    everyone.agree(problem_of([&] {
      found.index = index_from(text, folder_of(step));
      found.index.folder = folder_of(step);
      for (const auto& file : found.index.files) seen += has_file(found.index.folder, file) ? '1' : '0';
    }));
    found.seen_by.resize(seen.size());
    const auto of_ranks = everyone.gather(seen);
    for (size_t f = 0; f < seen.size(); ++f) {
      for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
        if (of_ranks[rank][f] == '1') found.seen_by[f].push_back(static_cast<int>(rank));
      }
    }
    if (std::ranges::none_of(found.seen_by, [](const auto& ranks) { return ranks.empty(); })) return found;
    if (everyone.is_first()) detail::say("dtensor: the copy of step {} in memory is passed over: parts of it are on no host\n", step);
  }
  return {};
}

std::optional<int64_t> MemoryCopies::last_step() const {
  const auto found = find(Everyone(kTag));
  return found ? std::optional(found->index.step) : std::nullopt;
}

std::optional<int64_t> MemoryCopies::resume(const LoadOptions& options) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  const Everyone everyone(kTag);
  const auto found = find(everyone);
  if (!found) return {};
  load(state_, found->index, options, everyone, found->seen_by);
  return found->index.step;
}

void MemoryCopies::remove() {
  const Everyone everyone(kTag);
  everyone.agree(problem_of([&] {
    if (!disk::exists(options_.folder)) return;
    for (const auto& [step, path] : steps_in(options_.folder)) remove_on_host(path);
    std::error_code not_empty;
    std::filesystem::remove(options_.folder, not_empty);
  }));
}

}  // namespace dtensor
