// A transport connects one rank to the others. There is one object per rank.
#pragma once

#include <dtensor/comm/communicator.hpp>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::comm {

using Milliseconds = std::chrono::milliseconds;

// How long a rank waits for the others unless it is told otherwise.
inline constexpr Milliseconds kDefaultDeadline{300'000};

class Transport {
 public:
  Transport();
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;  // "threads", "shm", "shm+gloo", "gloo", "fake", "nccl"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Makes a communicator among `ranks` (world ranks in group order, including this one). Every member calls this with the same arguments;
  // the nth call with this name and these ranks meets the nth of the others. Members need not come at the same time.
  std::shared_ptr<Communicator> connect(const std::string& name, const std::vector<int>& ranks);

  // Whose events the calls of its communicators are from now on: those of its World. Without it calls leave none.
  void record_in(Events events) { events_ = std::move(events); }

  // This rank leaves the job: with an error (`why` is its text), or normally if `why` is empty. Peers that still wait for it throw an error
  // that names this rank and `why`.
  virtual void leave(const std::string& why) = 0;

  // The operators that failed on this rank. Its calls tell the other ranks.
  const std::shared_ptr<FailedOperators>& failed_operators() const { return failed_; }

  // The longest that any wait may take.
  Milliseconds deadline() const { return deadline_; }
  void set_deadline(Milliseconds value) { deadline_ = value; }

  // -- For transports: what they implement.
  // `nth` counts from 0 the groups of this name and these ranks: with them it identifies the group among all of the job.
  virtual std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) = 0;

 protected:
  // A transport over another one of the same rank.
  explicit Transport(const Transport& host) : failed_(host.failed_) {}

 private:
  const std::shared_ptr<FailedOperators> failed_;
  std::optional<Events> events_;
  std::map<std::pair<std::string, std::vector<int>>, int> connected_;  // how many groups of a name and ranks were made
  Milliseconds deadline_ = kDefaultDeadline;
};

// Transports for `size` ranks in this process; element r is for rank r.
std::vector<std::unique_ptr<Transport>> make_threads_transports(int size);

// One rank per process. Rank 0 listens on host:port, and the others connect to it. If some ranks have not come within `deadline`, throws an
// error that names the address and the missing ranks.
struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::string host = "127.0.0.1";
  int port = 29500;
  std::string interface{};    // network interface to listen on; empty: the one that routes to host
  bool shared_memory = true;  // collectives of ranks that share a host go through its memory
  Milliseconds deadline = kDefaultDeadline;
};
std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options);

// NCCL for CUDA tensors, with one rank per process and GPU. CPU tensors, NCCL's unique ids and the news of failed ranks go over `host`, a
// transport between processes with the same rank and size. All ranks call this together. `device` is this rank's; it becomes current.
std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport> host, int device);

// Whether this build has the nccl transport; and whether, in addition, this process sees a CUDA device.
bool has_nccl_transport();
bool can_use_nccl_transport();

// For dry runs of any world size: rank `rank` of `size`, without peers. Collectives return at once, as if every peer had this rank's data.
std::unique_ptr<Transport> make_fake_transport(int rank, int size);

}  // namespace dtensor::comm

#pragma GCC visibility pop
