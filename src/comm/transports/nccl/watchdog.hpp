// Keeps the works that are under way on the device. A thread notices when one of them will never complete.
#pragma once

#include "src/comm/control.hpp"
#include "src/comm/describe.hpp"
#include "src/comm/transports/nccl/channel.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <thread>
#include <vector>

namespace dtensor::comm::nccl {

using Clock = std::chrono::steady_clock;

struct Pending {
  Communicator::Call call;
  std::string group;
  std::vector<int> peers;  // world ranks without which it cannot be done
  uint64_t stream = 0;     // what they note their progress in
  std::shared_ptr<Channel> channel;
  c10::Event ready{c10::DeviceType::CUDA};  // what was issued before it on the caller's stream
  c10::Event done{c10::DeviceType::CUDA};
  std::optional<c10::Stream> issued_on{};
  std::atomic<bool> begun{false};  // enqueued on the channel's stream, or it never will be

  // -- The watchdog's.
  std::vector<at::Tensor> keep{};  // the memory that it reads and writes
  std::optional<Clock::time_point> since{};  // it could begin
  std::string error{};
};

// One per transport. When a peer fails, a call is late or NCCL reports an error, every channel is aborted, and from then on all calls and
// waits throw: what a rank has issued on the device cannot be taken back, so that there is no way to go on.
class Watchdog {
 public:
  // `control` may be null where there are no peers.
  Watchdog(Control* control, const Transport& transport);
  ~Watchdog() { stop(); }

  void add(const std::shared_ptr<Channel>& channel);
  void watch(std::shared_ptr<Pending> work);

  // Throw when the job is broken, as the error of this call.
  void check(const CallInfo& call, const std::string& group) const;
  void check(const Pending& work) const;
  bool is_broken() const { return broken_; }

  // Why one of these peers will never make the call, if so.
  std::optional<std::string> obstacle(const std::vector<int>& peers, uint64_t stream, uint64_t sequence);

  // Why the work cannot be done, of which NCCL says `error`: what a peer did, if that becomes known in a moment.
  std::string explain(const Pending& work, const std::string& error);

  // Ends everything, as `why` says. `told`: whoever has to know does.
  void break_off(const std::string& why, bool told = false);

  // Why the job broke, when nothing has been thrown for it.
  std::optional<std::string> untold() const;

  // Lets go of what the work keeps.
  void release(Pending& work);

  // Waits until no work is under way, or the job is broken.
  void drain();

  // Looks after nothing any more: what it asks may go.
  void stop();

  const Transport& transport() const { return transport_; }

 private:
  using Works = std::list<std::shared_ptr<Pending>>;
  void serve();
  bool is_done(const c10::Event& event);
  void examine(Pending& work);

  Control* const control_;
  const Transport& transport_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Works works_;
  std::vector<std::weak_ptr<Channel>> channels_;
  std::string why_;
  std::atomic<bool> broken_{false};
  mutable std::atomic<bool> told_{false};
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace dtensor::comm::nccl
