// How one rank reaches the others. One object per rank.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::comm {

using Milliseconds = std::chrono::milliseconds;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;  // "threads", "shm", "shm+gloo", "gloo", "fake", "nccl"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // A communicator among `ranks` (world ranks in group order; this rank is one of them). Every member calls this with
  // the same arguments, in the same order among calls with the same ranks. `name` is for people.
  std::shared_ptr<Communicator> connect(const std::string& name, const std::vector<int>& ranks);

  // Whose events the calls of its communicators are from now on: those of its World. Without it calls leave none.
  void record_in(Events events) { events_ = std::move(events); }

  // This rank leaves: with an error (`why` is its text) or, when `why` is empty, normally. Peers that still wait for it
  // throw an error that names this rank and `why`.
  virtual void leave(const std::string& why) = 0;

  // The longest that any wait may take.
  Milliseconds deadline() const { return deadline_; }
  void set_deadline(Milliseconds value) { deadline_ = value; }

  // -- For transports: what they implement.
  virtual std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks) = 0;

 private:
  std::optional<Events> events_;
  Milliseconds deadline_{300'000};
};

// `size` ranks in this process; element r is rank r's.
std::vector<std::unique_ptr<Transport>> make_threads_transports(int size);

// One rank per process. Rank 0 listens on host:port, the others dial it. Throws when the rendezvous is not complete
// within `deadline`, naming the address and the ranks that are missing.
struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::string host = "127.0.0.1";
  int port = 29500;
  std::string interface;  // network interface to listen on; empty: the one that routes to host
  bool shared_memory = true;  // collectives of ranks that share a host go through its memory
  Milliseconds deadline{300'000};
};
std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options);

// NCCL for CUDA tensors, one rank per process and GPU. CPU tensors, unique ids and the news that a rank has failed go through `host`, a
// transport between processes, whose rank and size it has. Every rank makes it at once. `device`: this rank's, which becomes the current one.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> host, int device);

// Whether this build has the nccl transport, and whether this process sees a CUDA device as well.
bool has_nccl_transport();
bool can_use_nccl_transport();

// Rank `rank` of `size` without peers: collectives return at once as if every peer had this rank's data. For dry runs of
// any world size.
std::unique_ptr<Transport> make_fake_transport(int rank, int size);

}  // namespace dtensor::comm
