// Reads which rank of which job this process is, from the environment that its launcher sets.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace dtensor::detail {

struct LauncherRank {
  std::string launcher;  // "torchrun", "Slurm" or "Open MPI", for messages
  int rank = 0;
  int size = 1;
  std::string host;
  int port = 29500;
  bool agent_store = false;  // torchrun's agent listens on host:port with a c10d store, so rank 0 cannot
  std::optional<int> local_rank{};  // among the ranks of this host
};

// Reads one environment variable; empty optional when it is unset or empty.
using ReadVariable = std::function<std::optional<std::string>(const char*)>;
std::optional<std::string> read_environment(const char* name);

// Empty when no launcher started this process. Throws when one did but a variable is missing or malformed, naming it.
std::optional<LauncherRank> find_launcher(const ReadVariable& read = read_environment);

// The first host of a Slurm node list: "node[03-05,9],x" gives "node03".
std::string first_slurm_host(const std::string& list);

}  // namespace dtensor::detail
