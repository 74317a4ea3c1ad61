#include "src/comm/transports/nccl/pair.hpp"

#include "src/comm/reduce.hpp"

#include <dtensor/base/error_text.hpp>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cstring>
#include <utility>

namespace dtensor::comm::nccl {

namespace {

constexpr std::chrono::microseconds kPoll{200};

// Messages of the host between the two that no communicator numbers.
Communicator::Call introduction(Collective kind, int peer, int64_t bytes) { return {{.kind = kind, .root = peer, .numel = bytes}}; }

}  // namespace

// What the greeting's memory was before is done when the stream has come here.
Pair::Pair(Ends ends, Check check, std::function<void(const std::shared_ptr<Channel>&)> made,
           std::function<void(const std::string&)> failed)
    : ends_(std::move(ends)),
      check_(std::move(check)),
      made_(std::move(made)),
      failed_(std::move(failed)),
      greeting_(at::empty({1}, at::TensorOptions(at::kByte).device(at::kCUDA))) {
  ready_.record(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(greeting_.device()));
  thread_ = std::thread([this] { open(); });
}

void Pair::finish() {
  if (thread_.joinable()) thread_.join();
}

void Pair::run(bool sends, Task task) {
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::opening) {
      waiting_.emplace_back(sends, std::move(task));
      return;
    }
  }
  task(sends ? out_ : in_);
}

void Pair::open() {
  auto state = State::open;
  try {
    connect();
  } catch (const Channel::Broken& broken) {
    state = State::failed;
    failed_(broken.why);
  } catch (...) {
    state = State::failed;
    failed_(detail::text_of(std::current_exception()));
  }
  if (state == State::failed) out_ = in_ = nullptr;
  std::unique_lock lock(mutex_);
  while (!waiting_.empty()) {
    const auto [sends, task] = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    task(sends ? out_ : in_);
    lock.lock();
  }
  state_ = state;
}

// Both directions before the first message: connecting may wait for the device, which a message that waits for its other end would block.
void Pair::connect() {
  const c10::DeviceGuard on(greeting_.device());
  const bool lower = ends_.rank < ends_.peer;
  const auto up = Channel::make(agree_on_id(), 2, 1 - position_of_peer(), ends_.device, check_);
  made_(up);
  const auto down = up->split(check_);
  made_(down);
  greet(*up, lower);
  greet(*down, !lower);
  out_ = lower ? up : down;
  in_ = lower ? down : up;
}

ncclUniqueId Pair::agree_on_id() const {
  ncclUniqueId id{};
  constexpr auto size = static_cast<int64_t>(sizeof id);
  auto bytes = empty({size}, c10::ScalarType::Byte);
  if (ends_.rank < ends_.peer) {
    id = make_unique_id();
    std::memcpy(bytes.data_ptr(), &id, sizeof id);
    ends_.host->do_send(introduction(Collective::send, ends_.peer, size), bytes);
    return id;
  }
  auto received = ends_.host->do_recv(introduction(Collective::recv, ends_.peer, size), bytes);
  for (; !received.work->done(); std::this_thread::sleep_for(kPoll)) check_();
  bytes = std::move(received).get();
  std::memcpy(&id, bytes.data_ptr(), sizeof id);
  return id;
}

void Pair::greet(Channel& channel, bool sends) {
  ready_.block(channel.stream());
  const int peer = position_of_peer();
  channel.run(
      [&](ncclComm_t comm, cudaStream_t stream) {
        return sends ? ncclSend(greeting_.data_ptr(), 1, ncclUint8, peer, comm, stream)
                     : ncclRecv(greeting_.data_ptr(), 1, ncclUint8, peer, comm, stream);
      },
      check_);
  c10::Event done(c10::DeviceType::CUDA);
  done.record(channel.stream());
  for (; !done.query(); std::this_thread::sleep_for(kPoll)) check_();
}

}  // namespace dtensor::comm::nccl
