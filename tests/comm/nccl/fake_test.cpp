// The nccl transport on devices of host memory and an NCCL of threads (fake_cuda.hpp, fake_nccl.cpp): which calls it makes, in which order
// of streams and events, and what it says when something goes wrong. Not what NCCL and a GPU make of them.
#include "tests/comm/comm_bodies.hpp"
#include "tests/comm/nccl/fake_cuda.hpp"
#include "tests/comm/nccl/fake_nccl.hpp"
#include "tests/comm/nccl/fake_ranks.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ATen.h>

#include <atomic>
#include <thread>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::ReduceOp;
using dtensor::World;
using dtensor::require;
using namespace dtensor::comm;

namespace {

at::Tensor on_gpu(const at::Tensor& tensor) { return tensor.to(at::kCUDA); }

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  UNSCOPED_INFO("expected '" << part << "' in: " << text);
  return false;
}

}  // namespace

TEST_CASE("nccl stand-in: all collectives at 1 to 8 ranks", "[comm][nccl]") {
  for (int ranks : {1, 2, 3, 4, 8}) {
    for (const auto& body : {check_reductions, check_data_movement, check_asynchrony, check_messages, check_subgroups}) {
      INFO(ranks << " ranks");
      CHECK(first_error(run_gpus(ranks, body)) == "");
    }
  }
}

TEST_CASE("nccl stand-in: equal counts are one call and ragged ones a list", "[comm][nccl]") {
  const auto counted = [](const std::string& name, const std::function<void(Communicator&)>& call) {
    forget_calls_of_nccl();
    CHECK(first_error(run_gpus(2, [&](World& world) { call(*connect_all(world)); })) == "");
    return calls_of_nccl(name);
  };
  const auto input = [](int64_t count) { return on_gpu(at::ones({count})); };
  CHECK(counted("AllGather", [&](Communicator& all) { all.all_gather(input(4), {4, 4}).get(); }) == 2);
  CHECK(counted("Broadcast", [&](Communicator& all) { all.all_gather(input(4 + all.rank()), {4, 5}).get(); }) == 4);
  CHECK(counted("Broadcast", [&](Communicator& all) { all.all_gather(input(4 * all.rank()), {0, 4}).get(); }) == 2);
  CHECK(counted("ReduceScatter", [&](Communicator& all) { all.reduce_scatter(input(8), {4, 4}, ReduceOp::sum).get(); }) == 2);
  CHECK(counted("Reduce", [&](Communicator& all) { all.reduce_scatter(input(9), {4, 5}, ReduceOp::sum).get(); }) == 4);
  CHECK(counted("AllReduce", [&](Communicator& all) { all.all_reduce(input(0), ReduceOp::sum).get(); }) == 0);
  // One of the world, of which one is split for the group: it is the whole world. Two ranks that have messages have two of their own.
  CHECK(counted("CommSplit", [&](Communicator& all) { all.all_reduce(input(1), ReduceOp::sum).get(); }) == 2);
  CHECK(counted("CommInitRankConfig", [&](Communicator& all) { all.all_reduce(input(1), ReduceOp::sum).get(); }) == 2);
  const auto exchange = [&](Communicator& all) {
    for (int i = 0; i < 3; ++i) {
      auto came = all.recv(input(4), 1 - all.rank());
      all.send(input(4), 1 - all.rank());
      std::move(came).get();
    }
  };
  CHECK(counted("CommSplit", exchange) == 2);
  CHECK(counted("CommInitRankConfig", exchange) == 4);
}

TEST_CASE("nccl stand-in: the host does not wait and the current stream does", "[comm][nccl]") {
  std::atomic<bool> may_go{false}, reached{false};
  CHECK(first_error(run_gpus(2, [&](World& world) {
    auto all = connect_all(world);
    const auto x = on_gpu(at::full({8}, world.rank() + 1, at::kFloat));
    all->all_reduce(x, ReduceOp::sum).get();
    current_fake_stream().synchronize();
    if (world.rank() == 1) {
      current_fake_stream().add([&] {
        while (!may_go) std::this_thread::yield();
        reached = true;
        reached.notify_all();
      });
    }
    auto sum = all->all_reduce(x, ReduceOp::sum);
    require(world.rank() == 1 || !sum.work->done(), "test", "done before rank 1's stream came to it");  // rank 0 lets it go, below
    sum.work->wait();  // returns
    const auto copied = at::empty_like(sum.tensor).copy_(sum.tensor);
    if (world.rank() == 0) {
      require(!reached, "test", "wait() waited");
      may_go = true;
    }
    reached.wait(false);
    require(copied.cpu().equal(at::full({8}, 3, at::kFloat)), "test", "the current stream did not wait");
    require(sum.work->done(), "test", "done after wait");
    all->barrier();
  })) == "");
}

TEST_CASE("nccl stand-in: works let go of their tensors", "[comm][nccl]") {
  CHECK(first_error(run_gpus(2, [&](World& world) {
    auto all = connect_all(world);
    const auto x = on_gpu(at::ones({8}));
    std::atomic<bool> may_go = false;
    current_fake_stream().add([&] {
      while (!may_go) std::this_thread::yield();
    });
    auto waited = all->all_reduce(x, ReduceOp::sum);
    const auto kept = x.use_count();  // the watchdog lets go of what is done, so that nothing may be yet
    may_go = true;
    require(kept == 2, "test", "the input is kept alive");
    waited.work->wait();
    require(x.use_count() == 1, "test", "a wait lets go");
    all->all_reduce(x, ReduceOp::sum);  // dropped
    while (x.use_count() > 1) std::this_thread::yield();
    all->barrier();
  })) == "");
}

TEST_CASE("nccl stand-in: CPU tensors go over the host", "[comm][nccl]") {
  forget_calls_of_nccl();
  CHECK(first_error(run_gpus(3, [](World& world) {
    auto all = connect_all(world);
    const auto x = at::full({5}, world.rank(), at::kShort);
    for (int i = 0; i < 2; ++i) {
      require(all->all_reduce(x, ReduceOp::sum).get().equal(at::full({5}, 3, at::kShort)), "test", "sum");
      require(all->all_reduce(on_gpu(x.to(at::kInt)), ReduceOp::max).get().cpu().equal(at::full({5}, 2, at::kInt)), "test", "max");
    }
    if (world.rank() == 0) all->send(x, 1, 7);
    if (world.rank() == 1) all->recv(x, 0, 7).get();
    all->barrier();
  })) == "");
  CHECK(calls_of_nccl("AllReduce") == 6);
}

TEST_CASE("nccl stand-in: what NCCL cannot do is refused", "[comm][nccl]") {
  CHECK(first_error(run_gpus(2, [](World& world) {
    auto all = connect_all(world);
    const auto x = on_gpu(at::ones({4}, at::kShort));
    require(fails_with([&] { all->all_reduce(x, ReduceOp::sum); }, "hint: convert to int32"), "test", "int16");
    require(fails_with([&] { all->all_reduce(on_gpu(at::ones({4}, at::kLong)), ReduceOp::avg); }, "take the sum"), "test",
            "average of integers");
    require(fails_with([&] { all->all_reduce(on_gpu(at::ones({4}, at::kComplexFloat)), ReduceOp::product); }, "complex"), "test",
            "product");
    require(fails_with([&] { all->send(x, 1 - world.rank(), 3); }, "no tags"), "test", "tags");
    const auto elsewhere = at::empty({4}, at::TensorOptions(at::Device(at::kCUDA, 5)));
    require(fails_with([&] { all->all_reduce(elsewhere, ReduceOp::sum); }, "got one on cuda:5"), "test", "another device");
    all->barrier();
  })) == "");
}

TEST_CASE("nccl stand-in: threads of one process are refused", "[comm][nccl]") {
  run_ranks("threads", 2, [](World& world) {
    require(fails_with([&] { connect_all(world)->all_reduce(on_gpu(at::ones({4})), ReduceOp::sum); }, "one process per GPU"), "test",
            "threads");
  });
  CHECK(fails_with([] { run_ranks("nccl", 2, [](World&) {}); }, "dtensor-run -n 2"));
  auto transports = make_threads_transports(2);
  CHECK(fails_with([&] { make_nccl_transport(std::move(transports[0]), 0); }, "over the transport 'threads'"));
  CHECK(fails_with([] { make_nccl_transport(std::move(make_threads_transports(1).front()), kFakeDevices); }, "one process per GPU"));
  CHECK_NOTHROW(run_ranks("nccl", 1, [](World& world) {
    require(connect_all(world)->all_reduce(on_gpu(at::ones({4})), ReduceOp::sum).get().cpu().equal(at::ones({4})), "test", "alone");
  }));
}

TEST_CASE("nccl stand-in: a rank that fails ends the others", "[comm][nccl]") {
  const auto errors = run_gpus(3, [](World& world) {
    auto all = connect_all(world, "tp");
    const auto x = on_gpu(at::ones({16}));
    all->all_reduce(x, ReduceOp::sum).get();
    current_fake_stream().synchronize();  // for which the host does not wait
    require(world.rank() != 2, "test", "out of cheese");
    auto sum = all->all_reduce(x, ReduceOp::sum);
    sum.work->wait();
    current_fake_stream().synchronize();  // until it is aborted
    sum.work->wait();
  });
  for (int rank : {0, 1}) {
    CHECK(contains(errors[rank], "all_reduce(sum) #2 of Float[16] in group 'tp' cannot complete: rank 2 failed: "));
    CHECK(contains(errors[rank], "out of cheese"));
  }
}

TEST_CASE("nccl stand-in: a rank that leaves early is named", "[comm][nccl]") {
  const auto errors = run_gpus(2, [](World& world) {
    auto all = connect_all(world);
    if (world.rank() == 1) return;
    auto sum = all->all_reduce(on_gpu(at::ones({16})), ReduceOp::sum);
    while (!sum.work->done()) std::this_thread::yield();
    sum.work->wait();
  });
  CHECK(contains(errors[0], "rank 1 has left without calling it"));
  CHECK(errors[1] == "");
}

TEST_CASE("nccl stand-in: a late rank", "[comm][nccl]") {
  std::atomic<bool> may_go{false};
  const auto errors = run_gpus(2, [&](World& world) {
    auto all = connect_all(world);
    const auto x = on_gpu(at::ones({16}));
    all->all_reduce(x, ReduceOp::sum).get();
    for (int i = 0; world.rank() == 1 && !may_go && i < 1000; ++i) std::this_thread::sleep_for(Milliseconds(10));
    if (world.rank() == 1) std::this_thread::sleep_for(Milliseconds(500));  // until rank 0 has said that it failed
    auto sum = all->all_reduce(x, ReduceOp::sum);
    while (!sum.work->done()) std::this_thread::yield();
    may_go = true;
    sum.work->wait();
  }, 1500);
  CHECK(contains(errors[0], "all_reduce(sum) #2 of Float[16] in group 'all' did not complete within 1.5 s"));
  CHECK(contains(errors[1], "rank 0 failed: "));
}

TEST_CASE("nccl stand-in: what NCCL reports by itself", "[comm][nccl]") {
  break_nccl(true);
  const auto errors = run_gpus(2, [](World&) {});
  break_nccl(false);
  CHECK(contains(first_error(errors), "NCCL failed: remote process exited"));
}

TEST_CASE("nccl stand-in: why NCCL's connection broke is told by its other end", "[comm][nccl]") {
  for (const bool leaves : {true, false}) {
    std::atomic<bool> broken{false};
    const auto errors = run_gpus(2, [&](World& world) {
      auto all = connect_all(world);
      const auto x = on_gpu(at::ones({16}));
      all->all_reduce(x, ReduceOp::sum).get();
      current_fake_stream().synchronize();
      if (world.rank() == 1) {
        break_nccl(true);
        broken = true;
        broken.notify_all();
        std::this_thread::sleep_for(Milliseconds(100));  // NCCL knows first
        require(leaves, "test", "out of cheese");
        return;
      }
      broken.wait(false);
      all->all_reduce(x, ReduceOp::sum).get();
      all->all_reduce(x, ReduceOp::sum).get();
    });
    break_nccl(false);
    CHECK(contains(errors[0], leaves ? "rank 1 has left without calling it" : "rank 1 failed: "));
  }
}

TEST_CASE("nccl stand-in: memory is registered once and let go", "[comm][nccl]") {
  forget_calls_of_nccl();
  std::shared_ptr<void> outlives;
  CHECK(first_error(run_gpus(2, [&](World& world) {
    auto all = connect_all(world);
    const auto memory = on_gpu(at::ones({64}));
    require(!all->register_memory(at::ones({3})), "test", "on the CPU there is nothing to register");
    auto handle = all->register_memory(memory);
    require(handle != nullptr, "test", "registered");
    if (world.rank() == 0) outlives = handle;
  })) == "");
  CHECK(calls_of_nccl("CommRegister") == 2);
  outlives.reset();
  CHECK(calls_of_nccl("CommDeregister") == 1);  // the other one's communicator is gone
}

// Ranks compare their calls when a variable says so, which is read once: nccl.sh runs this by itself.
TEST_CASE("nccl stand-in: ranks that diverge with DTENSOR_CHECK_CALLS", "[.check]") {
  const auto errors = run_gpus(2, [](World& world) {
    auto all = connect_all(world);
    all->all_reduce(on_gpu(at::ones({16})), ReduceOp::sum).get();
    all->all_reduce(on_gpu(at::ones({16 + world.rank()})), ReduceOp::sum);
  });
  for (const auto& error : errors) {
    CHECK(contains(
        error, "the ranks diverged: rank 0 called all_reduce(sum) #2 of Float[16] while rank 1 called all_reduce(sum) #2 of Float[17]"));
  }
}

// The same of waits that block.
TEST_CASE("nccl stand-in: DTENSOR_BLOCKING_WAIT makes the host wait", "[.blocking]") {
  std::atomic<bool> came{false};
  CHECK(first_error(run_gpus(2, [&](World& world) {
    auto all = connect_all(world);
    if (world.rank() == 1) {
      std::this_thread::sleep_for(Milliseconds(200));
      came = true;
    }
    all->all_reduce(on_gpu(at::ones({16})), ReduceOp::sum).get();
    require(came, "test", "wait() returned before rank 1 called");
    all->barrier();
  })) == "");
  const auto errors = run_gpus(2, [](World& world) {
    auto all = connect_all(world);
    require(world.rank() == 0, "test", "out of cheese");
    all->all_reduce(on_gpu(at::ones({16})), ReduceOp::sum).get();
  });
  CHECK(contains(errors[0], "rank 1 failed: "));
}
