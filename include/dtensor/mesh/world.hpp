// The world: all ranks of a job, as one rank sees them. And launch(), which turns a process into ranks.
#pragma once

#include <dtensor/base/slots.hpp>
#include <dtensor/comm/transport.hpp>

#include <ATen/core/Generator.h>

#include <functional>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor {

namespace detail {
class Region;
struct WorldState;
}  // namespace detail

// One rank's view of the job. Ranks may be threads of one process, so nothing here is global: World::current() is the
// calling thread's.
class World {
 public:
  explicit World(std::unique_ptr<comm::Transport> transport);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  comm::Transport& transport() const { return *transport_; }

  // This rank's random stream: what torch::manual_seed seeds and random operators on DTensors draw from.
  at::Generator& generator() { return generator_; }

  // Waits for all ranks.
  void barrier();

  // This rank's T, default-constructed on first use. For what a layer or a module keeps for each rank. Lives as long as the world.
  template <class T>
  T& local() {
    return slots_.get<T>();
  }

  // Interned meshes and layouts, and communicators.
  detail::WorldState& state() { return *state_; }

  // The calling thread's world. A thread in no world gets a world of one rank.
  static World& current();

  // Makes `world` the calling thread's for the lifetime of the guard.
  class Use {
   public:
    explicit Use(World& world);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    std::shared_ptr<detail::Region> region_;
  };

 private:
  std::unique_ptr<comm::Transport> transport_;
  at::Generator generator_;
  std::shared_ptr<detail::WorldState> state_;
  Slots slots_;
  std::shared_ptr<comm::Communicator> everyone_;
};

struct LaunchOptions {
  int ranks = 1;          // threads to start when no launcher set the environment
  // "threads", "shm", "gloo", "nccl" or "fake"; empty: under a launcher nccl where every rank has a CUDA device, else shm; threads
  // otherwise
  std::string transport;
  comm::Milliseconds deadline = comm::kDefaultDeadline;
};

// Runs `body` on every rank and returns the process's exit status: 0, or 1 after printing the first error with the rank that threw it.
// To end early return from `body`, or throw: std::exit() in a rank that is a thread ends the process without destroying anything.
//
// Under torchrun, Slurm, Open MPI or dtensor-run this process is one rank (environment: RANK, WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT; SLURM_PROCID, SLURM_NTASKS; OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE). Otherwise the ranks are threads
// of this process: `--ranks N` on the command line, default 1. It also reads `--transport NAME` and `--deadline SECONDS`,
// and leaves them in argv for the program's own parser.
int launch(int argc, char** argv, const std::function<void(World&)>& body);

// The same with explicit options. Throws instead of printing: the error of the first rank that failed, as it was thrown. An exception of
// the program's own does not say which rank that was.
void launch(const LaunchOptions& options, const std::function<void(World&)>& body);

}  // namespace dtensor

#pragma GCC visibility pop
