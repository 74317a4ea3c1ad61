// Connections and interruptible waits over gloo.
#include "src/comm/transports/gloo/link.hpp"

#include <dtensor/base/error.hpp>

#include <gloo/common/error.h>
#include <gloo/transport/address.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>

namespace dtensor::comm::gloo {

namespace {

// gloo reports a broken connection at once, the control channel tells the reason a moment later.
constexpr Milliseconds kExplanationPatience{3000};

std::string bytes_of(const ::gloo::transport::Pair& pair) {
  const auto bytes = pair.address().bytes();
  return {bytes.begin(), bytes.end()};
}

}  // namespace

NoBrokenPipeSignal::NoBrokenPipeSignal() {
  sigset_t pipe, pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  was_pending_ = sigismember(&pending, SIGPIPE) == 1;
  pthread_sigmask(SIG_BLOCK, &pipe, &before_);
}

NoBrokenPipeSignal::~NoBrokenPipeSignal() {
  if (!was_pending_) {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const timespec now{0, 0};
    sigtimedwait(&pipe, nullptr, &now);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Mesh::Mesh(int rank, int size, const std::string& interface, Milliseconds deadline, Rendezvous& rendezvous)
    : ::gloo::Context(rank, size) {
  ::gloo::transport::tcp::attr where;
  if (interface.empty()) {
    where.hostname = rendezvous.local_address();
  } else {
    where.iface = interface;
  }
  device_ = ::gloo::transport::tcp::CreateDevice(where);
  transportContext_ = device_->createContext(rank, size);
  transportContext_->setTimeout(deadline);
  std::vector<std::string> mine(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) mine[peer] = bytes_of(*transportContext_->createPair(peer));
  }
  const auto theirs = rendezvous.exchange(mine);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) transportContext_->getPair(peer)->connect({theirs[peer].begin(), theirs[peer].end()});
  }
}

Link::Link(const GlooOptions& options, std::shared_ptr<Listener> listener, std::shared_ptr<const FailedOperators> failed,
           const std::function<void(Rendezvous&)>& also)
    : failed_(std::move(failed)) {
  Rendezvous rendezvous(options, std::move(listener));
  NoBrokenPipeSignal guard;  // gloo's own threads start here
  try {
    mesh_ = std::make_shared<Mesh>(options.rank, options.size, options.interface, options.deadline, rendezvous);
  } catch (const ::gloo::Exception& error) {
    fail("rendezvous", "rank {} of {} cannot connect to the others: {}; hint: set GLOO_SOCKET_IFNAME to the network interface that "
         "reaches them", options.rank, options.size, error.what());
  }
  also(rendezvous);
  membership_ = std::make_unique<Membership>(options.rank, options.size, rendezvous.take_sockets(), [this] { interrupt(); });
}

void Link::interrupt() {
  std::lock_guard lock(mutex_);
  for (Waiter* waiter : waiters_) {
    if (waiter->send) {
      waiter->buffer.abortWaitSend();
    } else {
      waiter->buffer.abortWaitRecv();
    }
  }
  if (notice_) notice_();
}

void Link::watch(std::function<void()> notice) {
  std::lock_guard lock(mutex_);
  notice_ = std::move(notice);
}

std::optional<std::string> Link::obstacle(const Need& need) {
  if (ended_) return "this rank has left";
  return membership_->obstacle(need.rank, need.stream, need.sequence);
}

// Registers first and looks for obstacles then, so that a departure in between interrupts the wait.
void Link::wait(::gloo::transport::UnboundBuffer& buffer, const Need& need, const Deadline& end, bool send) {
  Waiter waiter{buffer, send};
  struct Registration {
    Link& link;
    Waiter& waiter;
    Registration(Link& l, Waiter& w) : link(l), waiter(w) {
      std::lock_guard lock(link.mutex_);
      link.waiters_.insert(&waiter);
    }
    ~Registration() {
      std::lock_guard lock(link.mutex_);
      link.waiters_.erase(&waiter);
    }
  } registration(*this, waiter);
  for (;;) {
    if (auto why = obstacle(need)) throw Broken{std::move(*why)};
    const auto left = std::max(std::chrono::ceil<Milliseconds>(end.load() - Clock::now()), Milliseconds(1));
    try {
      if (send ? buffer.waitSend(left) : buffer.waitRecv(left)) return;
    } catch (const ::gloo::Exception& error) {
      if (Clock::now() >= end.load()) throw Late{};
      throw Broken{explain(need.rank, error.what())};
    }
  }
}

bool Link::has_received(::gloo::transport::UnboundBuffer& buffer) {
  try {
    return buffer.waitRecv(Milliseconds(1));
  } catch (const ::gloo::Exception&) {
    return false;
  }
}

std::string Link::explain(int rank, const std::string& text) {
  if (leaving_) return "this rank has left";
  if (auto why = membership_->failure(kExplanationPatience)) return *why;
  return fmt::format("the connection to rank {} broke: {}", rank, text);
}

std::string Link::explain_out_of_step(int rank, uint64_t mine, uint64_t theirs) {
  if (is_out_of_step(mine, theirs)) leave(failed_->reason());
  if (auto why = membership_->failure(kExplanationPatience)) return *why;
  return fmt::format("this rank and rank {} are out of step: an operator failed on one of them only", rank);
}

void Link::made(uint64_t stream, uint64_t sequence) {
  std::lock_guard lock(mutex_);
  progress_[stream] = sequence;
}

void Link::leave(const std::string& why) {
  Progress progress;
  {
    std::lock_guard lock(mutex_);
    progress = progress_;
  }
  membership_->leave(why, progress);
}

void Link::shut_down(Milliseconds patience) {
  leaving_ = true;  // the others end as soon as they know, also where this rank still reads what nobody will look at
  leave("");
  membership_->wait_until_empty(patience);
  ended_ = true;
  interrupt();
  membership_->close();
}

}  // namespace dtensor::comm::gloo
