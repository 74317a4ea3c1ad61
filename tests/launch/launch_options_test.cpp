// What a launcher's environment and the command line say of a rank.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include "src/launch/environment.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <map>
#include <optional>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::ReduceOp;
using dtensor::World;
using dtensor::comm::Milliseconds;

TEST_CASE("the launcher's environment is read and what is missing is named", "[launch]") {
  using Variables = std::map<std::string, std::string>;
  const auto find = [](const Variables& variables) {
    return dtensor::detail::find_launcher([&](const char* name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  CHECK_FALSE(find({}).has_value());
  const Variables torchrun{{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "1234"}};
  const auto rank = find(torchrun);
  REQUIRE(rank.has_value());
  CHECK((rank->rank == 2 && rank->size == 4 && rank->host == "node0" && rank->port == 1234 && !rank->agent_store && !rank->local_rank));
  auto second = torchrun;
  second["LOCAL_RANK"] = "1";
  CHECK(find(second)->local_rank == 1);
  second["LOCAL_RANK"] = "x";
  CHECK(fails_with([&] { find(second); }, "LOCAL_RANK is 'x'"));
  for (const auto& [name, value] : torchrun) {
    auto incomplete = torchrun;
    incomplete.erase(name);
    CHECK(fails_with([&] { find(incomplete); }, name + " is not set"));
    incomplete[name] = "x";
    if (name != "MASTER_ADDR") CHECK(fails_with([&] { find(incomplete); }, name + " is 'x'"));
  }
  CHECK(fails_with([&] { find({{"RANK", "4"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}); }, "rank 4 of 4"));

  const auto slurm = find({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "77"},
                           {"SLURM_NODELIST", "gpu[07-09,12]"}, {"SLURM_LOCALID", "2"}});
  REQUIRE(slurm.has_value());
  CHECK((slurm->rank == 3 && slurm->size == 8 && slurm->host == "gpu07" && slurm->port == 20077 && slurm->local_rank == 2));
  CHECK(fails_with([&] { find({{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}); }, "SLURM_NTASKS is not set"));
  CHECK_FALSE(find({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "77"}}).has_value());  // the batch script
  for (const char* step :
       {"4294967290", "4294967291", "4294967293", "interactive", "batch"}) {  // the shell of salloc, and others that are no tasks
    INFO(step);
    CHECK_FALSE(find(
        {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", step}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  }

  const auto mpi =
      find({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  REQUIRE(mpi.has_value());
  CHECK((mpi->rank == 1 && mpi->size == 2 && mpi->port == 29500 && mpi->local_rank == 1));
  CHECK(fails_with([&] { find({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}); }, "MASTER_ADDR is not set"));

  CHECK(dtensor::detail::first_slurm_host("a,b") == "a");
  CHECK(dtensor::detail::first_slurm_host("n[1-2]-ib,m") == "n1-ib");
  CHECK(dtensor::detail::first_slurm_host("login,n[1-2]") == "login");
  for (const char* list : {"", ",x", "n[1", "n[1,2", "n[]", "n[-2]"}) {
    INFO(list);
    CHECK(fails_with([&] { dtensor::detail::first_slurm_host(list); }, "the node list of Slurm is malformed"));
  }
  for (const char* port : {"0", "65536", "99999"}) {
    auto wrong = torchrun;
    wrong["MASTER_PORT"] = port;
    CHECK(fails_with([&] { find(wrong); }, "expected a port, 1 to 65535"));
  }
}

TEST_CASE("launch reads --ranks and --transport and --deadline and returns 1 after an error", "[launch]") {
  const auto run = [](std::vector<std::string> arguments, const std::function<void(World&)>& body) {
    arguments.insert(arguments.begin(), "program");
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    return dtensor::launch(static_cast<int>(argv.size()), argv.data(), body);
  };
  std::atomic<int> seen{0};
  const auto count = [&](World& world) {
    seen += world.size();
    dtensor::require(&World::current() == &world, "test", "the thread's world");
    dtensor::require(world.transport().deadline() == Milliseconds(2500), "test", "the deadline");
  };
  CHECK(run({"--ranks", "3", "--deadline", "2.5"}, count) == 0);
  CHECK(seen == 9);
  CHECK(run({"--deadline=2.5", "--ranks=2", "--transport=gloo"}, count) == 0);
  CHECK(seen == 13);
  CHECK(run({"--deadline=2.5", "--ranks=512", "--transport", "fake"}, count) == 0);
  CHECK(seen == 13 + 512);
  CHECK(run({"--ranks=2", "--transport=pigeon"}, count) == 1);
  CHECK(run({"--ranks=100000000"}, count) == 1);
  for (const char* ranks : {"two", "2.5", "inf", "1e300", "nan", "-1"}) CHECK(run({std::string("--ranks=") + ranks}, count) == 1);
  CHECK(run({"--ranks=0"}, count) == 1);
  CHECK(run({"--ranks"}, count) == 1);
  CHECK(seen == 13 + 512);
}

TEST_CASE("a deadline may be longer than clocks can count and must be a number", "[launch][gloo]") {
  const auto reduce = [](World& world) { connect_all(world)->all_reduce(at::ones({100'000}), ReduceOp::sum).get(); };
  const auto run = [&](std::string transport, std::string deadline) {
    char program[] = "program", ranks[] = "--ranks=2";
    transport = "--transport=" + transport;
    deadline = "--deadline=" + deadline;
    char* argv[] = {program, ranks, transport.data(), deadline.data(), nullptr};
    return dtensor::launch(4, argv, reduce);
  };
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    INFO(transport);
    for (const char* deadline : {"inf", "9.3e9", "1e300"}) {
      INFO(deadline);
      CHECK(run(transport, deadline) == 0);
    }
    CHECK(run(transport, "nan") == 1);
    dtensor::LaunchOptions options;
    options.ranks = 2;
    options.transport = transport;
    options.deadline = Milliseconds::max();
    CHECK_NOTHROW(dtensor::launch(options, reduce));
  }
}
