// The messages of two ranks. Each direction has a communicator and a stream of its own, so that a message waits for its other end and for
// nothing else.
#pragma once

#include "src/comm/transports/nccl/channel.hpp"

#include <dtensor/comm/communicator.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace dtensor::comm::nccl {

// NCCL connects two ranks when both come to their first message. Nobody waits for that: a thread does, and issues the messages that were
// made until then.
class Pair {
 public:
  struct Ends {
    std::shared_ptr<Communicator> host;  // of all ranks, in their order
    int rank, peer, device;
  };

  // `check` is called again and again until both have come; it throws to give up. `made`: called with each communicator. `failed`: called
  // with the reason if there will be none.
  Pair(Ends ends, Check check, std::function<void(const std::shared_ptr<Channel>&)> made, std::function<void(const std::string&)> failed);
  ~Pair() { finish(); }
  Pair(const Pair&) = delete;

  // Returns when what was made so far is enqueued, or never will be.
  void finish();

  // Calls `task` with the communicator of messages to the peer, or from it: now, or later in another thread. In the order of the calls.
  // With null if there is none.
  using Task = std::function<void(const std::shared_ptr<Channel>&)>;
  void run(bool sends, Task task);

  // The peer's rank in those communicators.
  int position_of_peer() const { return ends_.rank < ends_.peer ? 1 : 0; }

 private:
  enum class State { opening, open, failed };

  void open();
  void connect();
  ncclUniqueId agree_on_id() const;
  void greet(Channel& channel, bool sends);

  const Ends ends_;
  const Check check_;
  const std::function<void(const std::shared_ptr<Channel>&)> made_;
  const std::function<void(const std::string&)> failed_;
  const at::Tensor greeting_;  // a byte on the device
  c10::Event ready_{c10::DeviceType::CUDA};
  std::shared_ptr<Channel> out_, in_;

  std::mutex mutex_;
  State state_ = State::opening;
  std::deque<std::pair<bool, Task>> waiting_;
  std::thread thread_;
};

}  // namespace dtensor::comm::nccl
