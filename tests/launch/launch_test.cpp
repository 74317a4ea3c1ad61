// What launch does for its ranks: large blocks of memory are kept for the tensors to come; ranks that are threads compute with one each.
#include "catch.hpp"

#include <dtensor/dtensor.hpp>

#include "src/launch/single_threaded.hpp"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

TEST_CASE("large blocks: what is freed is taken again", "[launch]") {
  CHECK_NOTHROW(dtensor::launch(dtensor::LaunchOptions{}, [](dtensor::World&) {
    constexpr int64_t kElements = 12 << 20;  // 48 MB
    void* first = nullptr;
    {
      const auto x = at::ones({kElements});
      first = x.data_ptr();
      // The first of the process; later ones some KB after one.
      dtensor::require(reinterpret_cast<uintptr_t>(first) % (2 << 20) < (64 << 10), "test", "the block does not begin at a huge page");
    }
    const auto again = at::empty({kElements}), other = at::ones({kElements}), small = at::ones({5});
    dtensor::require(again.data_ptr() == first && other.data_ptr() != first, "test", "the block was not kept, or given twice");
    again.fill_(2);
    dtensor::require(again.eq(2).all().item<bool>() && other.eq(1).all().item<bool>() && small.sum().item<double>() == 5, "test", "values");
    auto grown = at::ones({kElements / 2});
    grown.resize_({kElements});
    dtensor::require(grown.narrow(0, 0, kElements / 2).eq(1).all().item<bool>(), "test", "a tensor that grew into a large block lost its values");
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
      const auto command = fmt::format("env -u DTENSOR_TEST_EVENTS RANK={} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={} TORCHELASTIC_USE_AGENT_STORE=True '{}' "
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
