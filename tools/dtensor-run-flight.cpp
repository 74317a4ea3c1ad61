#include "dtensor-run-flight.hpp"

#include "src/comm/flight/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include <sys/stat.h>
#include <unistd.h>

namespace dtensor_run {

namespace {

namespace flight = dtensor::comm::flight;

// The letter after the name, which may have blanks and parentheses itself.
bool is_stopped(pid_t pid) {
  const auto stat = flight::read_text(fmt::format("/proc/{}/stat", pid));
  const auto name_end = stat.rfind(')');
  return name_end != stat.npos && name_end + 2 < stat.size() && (stat[name_end + 2] == 'T' || stat[name_end + 2] == 't');
}

// `unreadable`: gets a line for each other file that has such a name.
std::vector<flight::Recording> recordings_in(const std::string& folder, std::string* unreadable = nullptr) {
  std::vector<flight::Recording> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().extension() != ".events" || !entry.is_regular_file(ignored)) continue;
    if (auto recording = flight::read_file(entry.path().string())) found.push_back(std::move(*recording));
    else if (unreadable)
      *unreadable += fmt::format("'{}' is no file of events ({} bytes, expected {}): it is cut or damaged, or another version wrote it; "
                                 "hint: take the dtensor-run of the version that the job ran with\n",
                                 entry.path().string(), entry.file_size(ignored), flight::Ring::bytes());
  }
  std::ranges::sort(found, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return found;
}

std::string text_of(std::vector<flight::Witness> witnesses, const std::string& folder, const std::string& prefix) {
  for (auto& witness : witnesses) {
    if (!witness.recording) continue;
    witness.recording->maps = flight::read_text(flight::maps_of_process(folder, witness.recording->process));
  }
  std::string text;
  std::istringstream lines(flight::examine(witnesses).text);
  for (std::string line; std::getline(lines, line);)
    text += fmt::format("{}{}\n", text.empty() ? prefix + "flight recorder: " : prefix + "  ", line);
  return text;
}

}  // namespace

FlightFolder::~FlightFolder() {
  std::error_code ignored;
  if (is_own_) std::filesystem::remove_all(path_, ignored);
}

void FlightFolder::open(const std::string& wanted) {
  const char* named = std::getenv("DTENSOR_FLIGHT_RECORDER");
  path_ = !wanted.empty() ? wanted : named ? named : "";
  if (!path_.empty()) {
    mkdir(path_.c_str(), 0777);
    return;
  }
  const char* temporary = std::getenv("TMPDIR");
  for (const std::string place : {"/dev/shm", temporary ? temporary : "/tmp"}) {
    auto name = place + "/dtensor-run-XXXXXX";
    if (!mkdtemp(name.data())) continue;
    path_ = name;
    is_own_ = true;
    return;
  }
}

void FlightFolder::ask_for_stacks(const std::vector<pid_t>& processes) const {
  if (path_.empty()) return;
  for (const auto& recording : recordings_in(path_)) {
    const bool runs = std::ranges::find(processes, recording.process) != processes.end();
    if (runs && recording.process > 0 && recording.answers && recording.state == flight::State::running) kill(recording.process, SIGUSR1);
  }
}

std::string FlightFolder::report(const std::vector<Participant>& ranks) const {
  if (path_.empty()) return "";
  auto recordings = recordings_in(path_);
  std::vector<flight::Witness> witnesses;
  bool any = false;
  for (const auto& rank : ranks) {
    flight::Witness witness{rank.rank, std::nullopt, rank.ending, rank.pid > 0 && is_stopped(rank.pid)};
    const auto own = std::ranges::find_if(recordings, [&](const auto& one) { return one.rank == rank.rank; });
    if (own != recordings.end()) witness.recording = std::move(*own), any = true;
    witnesses.push_back(std::move(witness));
  }
  return any ? text_of(std::move(witnesses), path_, "dtensor-run: ") : "";
}

std::string report_of_folder(const std::string& folder) {
  std::vector<flight::Witness> witnesses;
  int ranks = 0;
  char here[64] = {};
  gethostname(here, sizeof here - 1);
  std::string unreadable;
  for (auto& recording : recordings_in(folder, &unreadable)) {
    const bool local = recording.host == here, runs = recording.state == flight::State::running;
    const bool gone = local && runs && kill(recording.process, 0) != 0;
    ranks = std::max(ranks, recording.ranks);
    witnesses.push_back({recording.rank, recording, gone ? "has ended without a word (killed, or crashed)" : "",
                         local && runs && !gone && is_stopped(recording.process)});
  }
  if (witnesses.empty()) return fmt::format("{}there are no events of ranks in '{}'\n", unreadable, folder);
  std::set<int> known;
  for (const auto& witness : witnesses) known.insert(witness.rank);
  for (int rank = 0; rank < ranks; ++rank) {
    if (!known.count(rank)) witnesses.push_back({rank, std::nullopt, "", false});
  }
  return unreadable + text_of(std::move(witnesses), folder, "");
}

}  // namespace dtensor_run
