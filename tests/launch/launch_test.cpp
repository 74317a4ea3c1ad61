// What launch does for its ranks: large blocks of memory are kept for the tensors to come; ranks that are threads compute with one each.
#include "catch.hpp"

#include <dtensor/base/say.hpp>
#include <dtensor/dtensor.hpp>

#include "tests/support/core_support.hpp"
#include "tests/support/sanitizers.hpp"
#include "tests/support/stderr_support.hpp"

#include "src/launch/single_threaded.hpp"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

using dtensor::test::says;

TEST_CASE("large blocks: what is freed is taken again", "[launch]") {
  CHECK_NOTHROW(dtensor::launch(dtensor::LaunchOptions{}, [](dtensor::World&) {
    constexpr int64_t kElements = 12 << 20;  // 48 MB
    void* first = nullptr;
    {
      const auto x = at::ones({kElements});
      first = x.data_ptr();
    }
    const auto page = reinterpret_cast<uintptr_t>(first) & ~uintptr_t{4095};
    dtensor::require(msync(reinterpret_cast<void*>(page), 4096, MS_ASYNC) == 0, "test", "the block went back to the system");
    // The first of the process; later ones some KB after one.
    dtensor::require(reinterpret_cast<uintptr_t>(first) % (2 << 20) < (64 << 10), "test", "the block does not begin at a huge page");
    const auto again = at::empty({kElements}), other = at::ones({kElements}), small = at::ones({5});
    dtensor::require(again.data_ptr() == first && other.data_ptr() != first, "test", "the block was not kept, or given twice");
    again.fill_(2);
    dtensor::require(again.eq(2).all().item<bool>() && other.eq(1).all().item<bool>() && small.sum().item<double>() == 5, "test", "values");
    auto grown = at::ones({kElements / 2});
    grown.resize_({kElements});
    dtensor::require(grown.narrow(0, 0, kElements / 2).eq(1).all().item<bool>(), "test",
                     "a tensor that grew into a large block lost its values");
  }));
}

TEST_CASE("launch: ranks that are threads compute with one thread each and a lone one with all", "[launch]") {
  const dtensor::detail::OpenBlas blas;
  const int before = at::get_num_threads(), blas_before = blas.found() ? blas.get() : 1;
  at::set_num_threads(2);
  if (blas.found()) blas.set(2);
  for (const int ranks : {1, 2}) {
    dtensor::LaunchOptions options;
    options.ranks = ranks;
    CHECK_NOTHROW(dtensor::launch(options, [&](dtensor::World&) {
      const int expected = ranks == 1 ? 2 : 1;
      dtensor::require(at::get_num_threads() == expected, "test", "{} threads on one of {} ranks", at::get_num_threads(), ranks);
      if (blas.found()) dtensor::require(blas.get() == expected, "test", "{} threads of OpenBLAS on one of {} ranks", blas.get(), ranks);
    }));
    CHECK(at::get_num_threads() == 2);
    CHECK((!blas.found() || blas.get() == 2));
  }
  at::set_num_threads(before);
  if (blas.found()) blas.set(blas_before);
}

// Under torchrun, this process is a rank of two jobs, one after the other.
TEST_CASE("launch: one program has several jobs", "[launch][rank-program]") {
  dtensor::LaunchOptions options;
  options.ranks = 2;
  options.deadline = dtensor::comm::Milliseconds(20'000);
  for (const float job : {1.F, 2.F}) {
    CHECK_NOTHROW(dtensor::launch(options, [&](dtensor::World& world) {
      const auto all = world.transport().connect("all", {0, 1});
      dtensor::require(all->all_reduce(at::full({3}, job), dtensor::ReduceOp::sum).get().eq(2 * job).all().item<bool>(), "test", "the sum");
    }));
  }
}

TEST_CASE("launch: several jobs meet through one store of torchrun", "[launch][gloo]") {
  c10d::TCPStoreOptions server;
  server.port = 0;
  server.isServer = true;
  [](auto& store_options) {
    if constexpr (requires { store_options.useLibUV; }) store_options.useLibUV = false;
  }(server);
  c10d::TCPStore store("127.0.0.1", server);
  std::vector<int> statuses(2, -1);
  std::vector<std::thread> ranks;
  for (int rank : {0, 1}) {
    ranks.emplace_back([&, rank] {
      const auto command = fmt::format(
          "env -u DTENSOR_TEST_EVENTS RANK={} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} TORCHELASTIC_USE_AGENT_STORE=True '{}' "
          "'launch: one program has several jobs' >/dev/null",
          rank, store.getPort(), std::filesystem::read_symlink("/proc/self/exe").string());
      statuses[rank] = std::system(command.c_str());
    });
  }
  for (auto& rank : ranks) rank.join();
  CHECK(statuses == std::vector<int>{0, 0});
}

namespace {

// Leaves the process some megabytes of address space; a thread's stack takes eight.
class ScarceMemory {
 public:
  explicit ScarceMemory(rlim_t bytes) {
    getrlimit(RLIMIT_AS, &before_);
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit scarce{pages * sysconf(_SC_PAGESIZE) + bytes, before_.rlim_max};
    setrlimit(RLIMIT_AS, &scarce);
  }
  ~ScarceMemory() { setrlimit(RLIMIT_AS, &before_); }

 private:
  rlimit before_;
};

}  // namespace

TEST_CASE("launch: where not all ranks can be started none begins", "[launch]") {
  if (dtensor::test::kSanitized) DTENSOR_SKIP("a sanitizer needs more memory than the test leaves");
  dtensor::LaunchOptions options;
  options.ranks = 200;
  std::atomic<int> begun = 0;
  std::string message;
  try {
    ScarceMemory scarce(400 << 20);
    dtensor::launch(options, [&](dtensor::World&) { ++begun; });
  } catch (const dtensor::Error& error) {
    message = error.what_without_backtrace();
  }
  CHECK(message.find("of 200 ranks, as threads of this process, could be started") != std::string::npos);
  CHECK(begun == 0);
  options.ranks = 3;
  dtensor::launch(options, [&](dtensor::World&) { ++begun; });
  CHECK(begun == 3);
}

// This process is the program too, when the test starts it again.
TEST_CASE("launch: a rank that does not return is named and the process ends", "[launch][errors]") {
  if (std::getenv("DTENSOR_TEST_STUCK")) {
    const char* arguments[] = {"program", "--ranks", "2", "--deadline", "1"};
    std::_Exit(dtensor::launch(5, const_cast<char**>(arguments), [](dtensor::World& world) {
      if (world.rank() == 1) throw std::runtime_error("out of cheese");
      std::this_thread::sleep_for(std::chrono::seconds(1000));
    }));
  }
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto begin = std::chrono::steady_clock::now();
  auto* pipe = popen(("DTENSOR_TEST_STUCK=1 timeout 100 '" + self + "' 'launch: a rank that does not return*' 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::string text;
  for (char line[4096]; fgets(line, sizeof line, pipe);) text += line;
  const int status = pclose(pipe);
  CAPTURE(text);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 1);
  CHECK_THAT(text, says("error: out of cheese (rank 1); waiting for rank 0, which has not returned yet"));
  CHECK_THAT(text, says("error: rank 0 has not returned for 1 s after rank 1 failed; the process ends"));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
}

namespace {

// What the program says where `body` fails on three ranks.
std::string said_by_launch(const std::function<void(dtensor::World&)>& body) {
  const char* arguments[] = {"program", "--ranks", "3", "--deadline", "20"};
  return dtensor::test::stderr_of([&] { CHECK(dtensor::launch(5, const_cast<char**>(arguments), body) == 1); });
}

size_t count_in(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Runs this program's own test case once more, with DTENSOR_TEST_MODE, and gives what it says and its status.
std::pair<std::string, int> run_self(const std::string& mode, const std::string& test_case) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  const auto command = fmt::format("env -u DTENSOR_TEST_EVENTS DTENSOR_TEST_MODE={} timeout 100 '{}' '{}' 2>&1", mode, self, test_case);
  auto* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe);
  std::string text;
  for (char line[4096]; fgets(line, sizeof line, pipe);) text += line;
  return {text, pclose(pipe)};
}

bool has_mode(const std::string& mode) {
  const char* set = std::getenv("DTENSOR_TEST_MODE");
  return set && set == mode;
}

}  // namespace

TEST_CASE("launch: an exception of the program is told once with its rank", "[launch][errors]") {
  CHECK(said_by_launch([](dtensor::World& world) {
    if (world.rank() == 1) throw std::runtime_error("out of cheese");
  }) == "error: out of cheese (rank 1)\n");
  CHECK(said_by_launch([](dtensor::World& world) {
    if (world.rank() == 1) dtensor::fail("cheese", "there is none");
  }) == "error: [cheese] there is none (rank 1)\n");
  const auto late = said_by_launch([](dtensor::World& world) {
    if (world.rank() == 1) throw std::runtime_error("out of cheese");
    if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(4));
  });
  CHECK(late == "error: out of cheese (rank 1); waiting for rank 2, which has not returned yet\n");
}

TEST_CASE("launch: an error that many ranks have is told once", "[launch][errors][flight]") {
  const auto text = said_by_launch([](dtensor::World& world) {
    const auto all = world.transport().connect("all", {0, 1, 2});
    all->all_reduce(at::ones({world.rank() == 1 ? 4 : 3}), dtensor::ReduceOp::sum).get();
  });
  CAPTURE(text);
  CHECK_THAT(text, says("flight recorder: rank 1 made all_reduce(sum) #1 of float32[4] in group 'all'"));
  CHECK(count_in(text, "hint: every rank of a group must make the same calls") <= 2);  // of ranks 0 and 2 the same, of rank 1 another
  CHECK(count_in(text, " failed first") == 1);
}

// Others still use what exit() destroys.
TEST_CASE("launch: a rank that calls exit ends the process with its status and says so", "[launch][errors]") {
  if (has_mode("exit")) {
    const char* arguments[] = {"program", "--ranks", "3"};
    dtensor::launch(3, const_cast<char**>(arguments), [](dtensor::World& world) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
      while (world.rank() != 1 || std::chrono::steady_clock::now() < end) at::ones({8, 8}).mm(at::ones({8, 8}));
      std::exit(7);
    });
  }
  for (int run = 0; run < 3; ++run) {
    const auto [text, status] = run_self("exit", "launch: a rank that calls exit*");
    CAPTURE(text);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 7);
    CHECK_THAT(text, says("dtensor: rank 1 called exit(7) while other ranks are threads of this process"));
  }
}

TEST_CASE("launch: a program ends in order where nobody reads its errors", "[launch][errors]") {
  if (has_mode("unread")) {
    std::signal(SIGPIPE, SIG_IGN);
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    close(ends[0]);
    dup2(ends[1], 2);
    const char* arguments[] = {"program", "--ranks", "3"};
    std::_Exit(dtensor::launch(3, const_cast<char**>(arguments), [](dtensor::World& world) {
      if (world.rank() == 1) throw std::runtime_error("out of cheese");
      if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(3));
    }) == 1 ? 5 : 6);
  }
  const auto [text, status] = run_self("unread", "launch: a program ends in order*");
  CAPTURE(text);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 5);
}

TEST_CASE("launch: the error of a rank is told while another goes on", "[launch][errors]") {
  dtensor::LaunchOptions options;
  options.ranks = 3;
  const auto text = dtensor::test::stderr_of([&] {
    CHECK_THROWS_WITH(dtensor::launch(options, [](dtensor::World& world) {
      if (world.rank() == 1) dtensor::fail("cheese", "there is none");
      if (world.rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(4));
    }), says("there is none"));
  });
  CHECK_THAT(text, says("error: [cheese] there is none (rank 1); waiting for rank 2, which has not returned yet"));
}

// Under dtensor-run, a process a rank: what a program draws that seeds nothing.
TEST_CASE("launch: ranks that seed nothing have one seed", "[launch][rank-program]") {
  dtensor::LaunchOptions options;
  options.deadline = dtensor::comm::Milliseconds(20'000);
  options.transport = std::getenv("DTENSOR_TEST_TRANSPORT") ? std::getenv("DTENSOR_TEST_TRANSPORT") : "";
  CHECK_NOTHROW(dtensor::launch(options, [](dtensor::World& world) {
    const auto mesh = dtensor::init_device_mesh(torch::kCPU, {world.size()}, {"dp"});
    dtensor::set_generator_check(dtensor::GeneratorCheck::off);
    const auto drawn = dtensor::full_tensor(dtensor::from_local(torch::rand({1, 5}), mesh, {dtensor::shard(0)}).tensor());
    for (int64_t r = 1; r < world.size(); ++r) dtensor::require(drawn[r].equal(drawn[0]), "test", "rank {} drew other numbers", r);
    if (world.rank() == 0) dtensor::detail::say("{} ranks drew {}\n", world.size(), drawn[0][0].item<float>());
  }));
}
