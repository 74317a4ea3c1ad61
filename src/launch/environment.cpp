// Reads the environments of torchrun (and dtensor-run), Slurm and Open MPI.
#include "src/launch/environment.hpp"

#include <dtensor/base/error.hpp>

#include <charconv>
#include <cstdint>
#include <cstdlib>

namespace dtensor::detail {

namespace {

constexpr int kDefaultPort = 29500;

class Reader {
 public:
  Reader(const ReadVariable& read, const char* launcher) : read_(read), launcher_(launcher) {}

  std::string text(const char* name, const char* hint = "set it, or start the program with dtensor-run or torchrun") const {
    auto value = read_(name);
    require(value.has_value(), "launch", "the environment of {} is incomplete: {} is not set; hint: {}", launcher_, name, hint);
    return *value;
  }

  int number(const char* name) const { return parse(name, text(name)); }
  int number(const char* name, int otherwise) const {
    auto value = read_(name);
    return value ? parse(name, *value) : otherwise;
  }
  int port(const char* name) const { return check_port(name, number(name)); }
  int port(const char* name, int otherwise) const { return check_port(name, number(name, otherwise)); }
  std::optional<int> number_if_set(const char* name) const {
    auto value = read_(name);
    return value ? std::optional<int>(parse(name, *value)) : std::nullopt;
  }

 private:
  int check_port(const char* name, int port) const {
    require(port > 0 && port <= 65535, "launch", "the environment of {} is malformed: {} is {}; expected a port, 1 to 65535", launcher_,
            name, port);
    return port;
  }

  int parse(const char* name, const std::string& value) const {
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    require(error == std::errc() && end == value.data() + value.size() && result >= 0, "launch",
            "the environment of {} is malformed: {} is '{}'; expected a number", launcher_, name, value);
    return result;
  }

  const ReadVariable& read_;
  const char* launcher_;
};

LauncherRank from_torchrun(const ReadVariable& read) {
  const char* launcher = read("DTENSOR_REPORT_FD") ? "dtensor-run" : "torchrun";
  const Reader reader(read, launcher);
  LauncherRank result{launcher, reader.number("RANK"), reader.number("WORLD_SIZE"), "", kDefaultPort, false};
  result.host = reader.text("MASTER_ADDR", "set it to the host of rank 0");
  result.port = reader.port("MASTER_PORT");
  result.agent_store = read("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.local_rank = reader.number_if_set("LOCAL_RANK");
  return result;
}

LauncherRank from_slurm(const ReadVariable& read) {
  const Reader reader(read, "Slurm");
  LauncherRank result{"Slurm", reader.number("SLURM_PROCID"), reader.number("SLURM_NTASKS"), "", kDefaultPort, false};
  if (auto host = read("MASTER_ADDR")) {
    result.host = *host;
  } else if (auto nodes = read("SLURM_STEP_NODELIST")) {
    result.host = first_slurm_host(*nodes);
  } else if (auto job_nodes = read("SLURM_NODELIST")) {
    result.host = first_slurm_host(*job_nodes);
  } else {
    result.host = reader.text("SLURM_LAUNCH_NODE_IPADDR", "set MASTER_ADDR to the host of rank 0");
  }
  result.local_rank = reader.number_if_set("SLURM_LOCALID");
  // Jobs that share a node must not share a port; all tasks of one job agree on its number.
  result.port = reader.port("MASTER_PORT", 20000 + reader.number("SLURM_JOB_ID", kDefaultPort) % 40000);
  return result;
}

LauncherRank from_open_mpi(const ReadVariable& read) {
  const Reader reader(read, "Open MPI");
  LauncherRank result{"Open MPI", reader.number("OMPI_COMM_WORLD_RANK"), reader.number("OMPI_COMM_WORLD_SIZE"), "", kDefaultPort, false};
  result.host = reader.text("MASTER_ADDR", "pass it with mpirun -x MASTER_ADDR=HOST_OF_RANK_0");
  result.port = reader.port("MASTER_PORT", kDefaultPort);
  result.local_rank = reader.number_if_set("OMPI_COMM_WORLD_LOCAL_RANK");
  return result;
}

// Whether a Slurm step has tasks of srun. Others (the shell of salloc, a batch script, what Slurm runs for itself) have a word, or a number
// that no step of tasks gets.
bool has_tasks(const std::string& step) {
  constexpr uint32_t kFirstReserved = 0xfffffffa;
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(step.data(), step.data() + step.size(), number);
  return error == std::errc() && end == step.data() + step.size() && number < kFirstReserved;
}

}  // namespace

std::optional<std::string> read_environment(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

// A single variable that only a rank of a job has decides the launcher, so that a missing one is noticed. A shell inside
// a Slurm allocation has SLURM_NTASKS but no SLURM_STEP_ID or SLURM_PROCID, or is a step of its own: it is no rank.
// sbatch's own script has SLURM_PROCID=0 and no step.
std::optional<LauncherRank> find_launcher(const ReadVariable& read) {
  std::optional<LauncherRank> result;
  if (read("RANK") || read("WORLD_SIZE")) {
    result = from_torchrun(read);
  } else if (read("OMPI_COMM_WORLD_RANK") || read("OMPI_COMM_WORLD_SIZE")) {
    result = from_open_mpi(read);
  } else if (read("SLURM_PROCID") && has_tasks(read("SLURM_STEP_ID").value_or("0"))) {
    if (read("SLURM_JOB_ID") && !read("SLURM_STEP_ID")) return std::nullopt;
    result = from_slurm(read);
  }
  require(!result || (result->size > 0 && result->rank < result->size), "launch",
          "the environment of {} is malformed; got rank {} of {}; expected 0 <= rank < size", result ? result->launcher : "",
          result ? result->rank : 0, result ? result->size : 0);
  return result;
}

std::string first_slurm_host(const std::string& list) {
  const auto check = [&](bool ok) {
    require(ok, "launch", "the node list of Slurm is malformed; got '{}'; expected such as 'node[03-05,9],x'; hint: set MASTER_ADDR to the "
            "host of rank 0", list);
  };
  const auto bracket = list.find('['), comma = list.find(',');
  check(!list.empty() && comma != 0);
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const auto end = list.find_first_of(",-]", bracket), close = list.find(']', bracket);
  check(close != std::string::npos && end > bracket + 1);
  const auto next = list.find(',', close);
  const auto suffix = list.substr(close + 1, next == std::string::npos ? next : next - close - 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) + suffix;
}

}  // namespace dtensor::detail
