// The connections of one rank over gloo. Waits on them notice when a peer is gone.
#pragma once

#include "src/comm/failed_operators.hpp"
#include "src/comm/rendezvous/membership.hpp"
#include "src/comm/rendezvous/rendezvous.hpp"

#include <gloo/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <optional>
#include <set>

namespace dtensor::comm::gloo {

using Buffer = std::unique_ptr<::gloo::transport::UnboundBuffer>;

// Why a wait ended without its result.
struct Broken {
  std::string why;
};
struct Late {};

// When a wait ends without a result. Another thread may bring it forward, and then calls Link::interrupt().
using Deadline = std::atomic<Clock::time_point>;

// gloo writes to sockets without asking for an error instead of SIGPIPE, which would end the process when a peer is gone.
// Blocks it for this thread (and those it starts) while it lives, and swallows one that came.
class NoBrokenPipeSignal {
 public:
  NoBrokenPipeSignal();
  ~NoBrokenPipeSignal();
  NoBrokenPipeSignal(const NoBrokenPipeSignal&) = delete;
  NoBrokenPipeSignal& operator=(const NoBrokenPipeSignal&) = delete;

 private:
  sigset_t before_;
  bool was_pending_;
};

// A full mesh of gloo's TCP connections, made without a gloo store: the rendezvous passes the addresses around.
class Mesh final : public ::gloo::Context {
 public:
  Mesh(int rank, int size, const std::string& interface, Milliseconds deadline, Rendezvous& rendezvous);
};

// Call `sequence` of `stream` (see Progress) by world rank `rank`: what a wait needs to happen.
struct Need {
  int rank;
  uint64_t stream;
  uint64_t sequence;
};

class Link {
 public:
  // Once all are connected, and before the rendezvous ends, ranks exchange there what else they have to: `also`.
  Link(const GlooOptions& options, std::shared_ptr<Listener> listener, std::shared_ptr<const FailedOperators> failed,
       const std::function<void(Rendezvous&)>& also);

  Buffer buffer(void* data, int64_t bytes) { return mesh_->createUnboundBuffer(data, static_cast<size_t>(bytes)); }

  // Blocks until the one operation posted on `buffer` has completed. Throws Broken when `need` cannot happen any more,
  // Late after `end`.
  void wait_sent(::gloo::transport::UnboundBuffer& buffer, const Need& need, const Deadline& end) { wait(buffer, need, end, true); }
  void wait_received(::gloo::transport::UnboundBuffer& buffer, const Need& need, const Deadline& end) { wait(buffer, need, end, false); }

  // Whether that operation has completed. Only once the transport is given up: waiting ones are ended by it.
  static bool has_received(::gloo::transport::UnboundBuffer& buffer);

  // Makes every wait look again at whether it can still succeed.
  void interrupt();
  // Calls `notice` at each interruption too.
  void watch(std::function<void()> notice);

  // Notes that this rank made a call.
  void made(uint64_t stream, uint64_t sequence);

  void leave(const std::string& why);

  // Leaves, serves the others until all have left, one has failed or that takes too long, then ends all waits and connections.
  void shut_down(Milliseconds patience);

  // Why the need cannot be met any more, if so. See Control.
  std::optional<std::string> obstacle(const Need& need);
  std::optional<std::string> first_failure(Milliseconds patience) { return membership_->failure(patience); }

  // What went wrong, for an operation that gloo reports as failed.
  std::string explain(int rank, const std::string& text);

  // The same, where the operators that failed on `rank` are not those of this rank, by their summaries. Who is out of step tells all.
  std::string explain_out_of_step(int rank, uint64_t mine, uint64_t theirs);

 private:
  struct Waiter {
    ::gloo::transport::UnboundBuffer& buffer;
    bool send;
  };

  void wait(::gloo::transport::UnboundBuffer& buffer, const Need& need, const Deadline& end, bool send);

  std::mutex mutex_;
  std::set<Waiter*> waiters_;
  std::function<void()> notice_;
  Progress progress_;
  const std::shared_ptr<const FailedOperators> failed_;  // of this rank
  std::atomic<bool> leaving_{false}, ended_{false};
  std::shared_ptr<Mesh> mesh_;
  std::unique_ptr<Membership> membership_;
};

}  // namespace dtensor::comm::gloo
