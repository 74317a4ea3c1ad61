// Saves that are ended, or fail, at each call that they make to the system: what is loaded afterwards is a whole step, and the next save
// works.
//
//   crash-points [--every N] [--ranks N]      prints the number of points tried; exit status 1 at the first wrong one
//   crash-points --job FOLDER STEP            saves as one rank of dtensor-run's; for one rank that is killed
//
// The calls are counted by functions of libc's names in this program, which the linker takes instead of libc's.
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/dtensor.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace dt = dtensor;

namespace {

enum class Fault { none, kill, torn_write, no_space, no_sync };
constexpr const char* kNames[] = {"none", "killed before the call", "killed in the middle of a write", "no space from then on",
                                  "a sync fails"};

std::string watched;  // calls on what is in this folder count
std::atomic<int> calls = 0, hits = 0;
int chosen = -1;
Fault fault = Fault::none;

template <class Function>
Function* libc(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool is_watched(const char* path) { return !watched.empty() && std::strncmp(path, watched.c_str(), watched.size()) == 0; }
bool is_watched(int file) {
  if (watched.empty()) return false;
  char path[4096];
  const auto link = fmt::format("/proc/self/fd/{}", file);
  const auto size = readlink(link.c_str(), path, sizeof path - 1);
  if (size < 0) return false;
  path[size] = 0;
  return is_watched(path);
}

// Counts a call. Returns whether it is to fail; does not return where the process is to die before it.
enum class Kind { write, sync, other };
bool fails(Kind kind) {
  const int number = calls++;
  if (chosen < 0) return false;
  if (fault == Fault::kill && number == chosen) raise(SIGKILL);
  if (fault == Fault::no_space && number >= chosen && kind != Kind::sync) return ++hits;
  if (fault == Fault::no_sync && number == chosen && kind == Kind::sync) return ++hits;
  return false;
}

}  // namespace

extern "C" {
ssize_t write(int file, const void* data, size_t size) {
  static auto* const real = libc<ssize_t(int, const void*, size_t)>("write");
  if (!is_watched(file)) return real(file, data, size);
  if (fault == Fault::torn_write && calls == chosen) {
    if (real(file, data, size / 2) >= 0) raise(SIGKILL);
  }
  if (!fails(Kind::write)) return real(file, data, size);
  errno = ENOSPC;
  return -1;
}
int fsync(int file) {
  static auto* const real = libc<int(int)>("fsync");
  if (!is_watched(file) || !fails(Kind::sync)) return real(file);
  errno = EIO;
  return -1;
}
int rename(const char* from, const char* to) noexcept {
  static auto* const real = libc<int(const char*, const char*)>("rename");
  if (!is_watched(to) || !fails(Kind::other)) return real(from, to);
  errno = ENOSPC;
  return -1;
}
int unlink(const char* path) noexcept {
  static auto* const real = libc<int(const char*)>("unlink");
  if (is_watched(path) && fault != Fault::no_space) fails(Kind::other);
  return real(path);
}
int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = libc<int(const char*, mode_t)>("mkdir");
  if (!is_watched(path) || !fails(Kind::other)) return real(path, mode);
  errno = ENOSPC;
  return -1;
}
int open(const char* path, int flags, ...) {
  static auto* const real = libc<int(const char*, int, ...)>("open");
  va_list rest;
  va_start(rest, flags);
  const auto mode = va_arg(rest, mode_t);
  va_end(rest);
  if (is_watched(path) && (flags & O_CREAT) != 0 && fails(Kind::other)) {
    errno = ENOSPC;
    return -1;
  }
  return real(path, flags, mode);
}
}

namespace {

// A state whose every element says which save it is of.
struct Training {
  explicit Training(const dt::DeviceMesh& mesh, double seed)
      : cut(dt::distribute_tensor(at::arange(24, at::kDouble).view({6, 4}).add(seed), mesh, {dt::shard(0)}).tensor().clone()),
        same(at::full({5}, seed, at::kFloat)),
        epoch(static_cast<int64_t>(seed)) {}
  dt::State state() { return {{"cut", cut}, {"same", same}, {"epoch", epoch}}; }
  // Of which save it is; throws for a mix.
  double seed() const {
    const auto whole = dt::full_tensor(cut);
    const double own = whole[0][0].item<double>();
    const bool well = whole.equal(at::arange(24, at::kDouble).view({6, 4}).add(own)) && same.eq(own).all().item<bool>() &&
                      epoch == static_cast<int64_t>(own);
    dt::require(well, "test", "a mix of saves: {} and {}", own, epoch);
    return own;
  }
  at::Tensor cut, same;
  int64_t epoch;
};

int ranks = 2;

void on_ranks(const std::function<void(const dt::DeviceMesh&)>& body) {
  dt::LaunchOptions options;
  options.ranks = ranks;
  options.deadline = dt::comm::Milliseconds(20'000);
  dt::launch(options, [&](dt::World&) { body(dt::init_device_mesh(c10::kCPU, {ranks})); });
}

void save(const std::string& folder, int64_t step, double seed) {
  on_ranks([&](const auto& mesh) { dt::save(Training(mesh, seed).state(), folder, step); });
}

std::pair<int64_t, double> loaded(const std::string& folder) {
  std::pair<int64_t, double> found;
  on_ranks([&](const auto& mesh) {
    Training training(mesh, -1);
    const auto step = dt::load(training.state(), folder);
    const double seed = training.seed();
    if (dt::World::current().rank() == 0) found = {step, seed};
  });
  return found;
}

// Runs it in a process of its own. Returns its status, as waitpid does.
int in_child(const std::function<int()>& work) {
  const auto pid = fork();
  if (pid == 0) _exit(work());
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

// What a scenario saves with seed 2 where it is ended: a new step, or the one that is there.
struct Scenario {
  const char* name;
  int64_t step;
};

// One point. Returns false where the call was never reached, so all points have been tried.
bool try_point(const std::string& root, const Scenario& scenario, Fault kind, int point) {
  const auto folder = root + "/run";
  std::filesystem::remove_all(folder);
  const auto what = fmt::format("{}, {}, call {}", scenario.name, kNames[static_cast<int>(kind)], point);
  const int status = in_child([&] {
    save(folder, 1, 1);
    watched = folder;
    calls = 0, chosen = point, fault = kind;
    int result = 0;
    try {
      save(folder, scenario.step, 2);
    } catch (const std::exception&) {
      result = 10;
    }
    if (calls <= point) result = 11;
    else if (hits == 0 && result == 0) result = 12;  // this call was of another kind
    watched.clear();
    return result;
  });
  if (WIFEXITED(status) && WEXITSTATUS(status) == 11) return false;
  const bool ended = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  const bool failed = WIFEXITED(status) && WEXITSTATUS(status) == 10;
  const bool passed = WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 12);
  dt::require(ended || failed || passed, "test", "{}: the save ended with status {:#x}", what, status);
  const int check = in_child([&] {
    try {
      const auto [step, seed] = loaded(folder);
      const bool is_old = step == 1 && seed == 1, is_new = step == scenario.step && seed == 2;
      dt::require(is_old || is_new, "test", "step {} of save {}", step, seed);
      dt::require(is_new || !passed, "test", "a save that went well is not there");
      save(folder, scenario.step, 3);
      const auto again = loaded(folder);
      dt::require(again.first == scenario.step && again.second == 3, "test", "the next save is not there: {} {}", again.first,
                  again.second);
      int files = 0;
      for (const auto& entry : std::filesystem::recursive_directory_iterator(dt::step_folder(folder, scenario.step)))
        files += entry.is_regular_file();
      dt::require(files == 1 + ranks, "test", "{} files are in the step; expected {}", files, 1 + ranks);
      return 0;
    } catch (const std::exception& error) {
      dt::detail::say("{}: {}\n", what, error.what());
      return 1;
    }
  });
  dt::require(WIFEXITED(check) && WEXITSTATUS(check) == 0, "test", "{}: see above", what);
  return true;
}

int job(const std::string& folder, int64_t step) {
  watched = folder;
  const char* at = std::getenv("DTENSOR_CRASH_AT");
  const char* rank = std::getenv("DTENSOR_CRASH_RANK");
  const char* own = std::getenv("RANK");
  if (at && rank && own && std::strcmp(rank, own) == 0) chosen = std::atoi(at), fault = Fault::kill;
  char program[] = "crash-points";
  char* arguments[] = {program, nullptr};
  return dt::launch(1, arguments, [&](dt::World& world) {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {world.size()});
    if (step > 0) return void(dt::save(Training(mesh, static_cast<double>(step)).state(), folder, step));
    Training training(mesh, -1);
    const auto loaded_step = dt::load(training.state(), folder);
    const double seed = training.seed();
    if (world.rank() == 0) fmt::print("step {} of save {}\n", loaded_step, seed);
  });
}

}  // namespace

int main(int argc, char** argv) try {
  int every = 1;
  for (int i = 1; i + 1 < argc; ++i) {
    if (argv[i] == std::string("--job")) return job(argv[i + 1], i + 2 < argc ? std::atoi(argv[i + 2]) : 0);
    if (argv[i] == std::string("--every")) every = std::max(1, std::atoi(argv[i + 1]));
    if (argv[i] == std::string("--ranks")) ranks = std::max(1, std::atoi(argv[i + 1]));
  }
  char root[] = "/tmp/dtensor-crash-XXXXXX";
  if (!mkdtemp(root)) return 1;
  int tried = 0;
  for (const auto& scenario : {Scenario{"a new step", 2}, Scenario{"over a step that is there", 1}}) {
    for (const auto kind : {Fault::kill, Fault::torn_write, Fault::no_space, Fault::no_sync}) {
      for (int point = 0; try_point(root, scenario, kind, point); point += every) ++tried;
    }
  }
  std::filesystem::remove_all(root);
  fmt::print("{} points tried on {} ranks: the newest complete step was whole after each, and the next save worked\n", tried, ranks);
} catch (const std::exception& error) {
  dt::detail::say("{}\n", error.what());
  return 1;
}
