// Advances the operations of one rank. A thread that waits for any of them advances all; if none waits, the engine's own thread does.
#pragma once

#include "src/comm/transports/gloo/link.hpp"
#include "src/comm/transports/shared_memory/operation.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

namespace dtensor::comm::shared_memory {

// What one group has under way, in the order of the calls.
struct Queue {
  std::unique_ptr<Channel> channel;
  std::string name;
  std::vector<int> ranks;
  uint64_t stream;  // names the group to Link

  std::deque<std::shared_ptr<Operation>> operations;
  size_t writing = 0;                // which of them writes next
  uint64_t written = 0, read = 0;    // rounds of the channel
  std::optional<std::string> broken;  // why no call can complete any more
};

class Engine {
 public:
  Engine(std::shared_ptr<gloo::Link> link, std::shared_ptr<Arena> arena, int rank);
  ~Engine() { stop(); }

  // Begins the operation, and does what can be done without waiting.
  void issue(const std::shared_ptr<Queue>& queue, const std::shared_ptr<Operation>& operation);
  // Blocks until it has ended. Throws Error.
  void wait(Queue& queue, Operation& operation, Milliseconds deadline);
  // Makes progress; whether it has ended.
  bool poll(const Operation& operation);
  // Nobody will wait for it.
  void carry_on();

  // Some rank has left.
  void interrupt();
  // Ends all operations.
  void stop();

 private:
  // Says that a thread needs the lock, so that the own thread gives way.
  class Access;

  bool can_move();
  // Writes and reads all that can be; with `give_way` until another thread wants the lock. Whether anything could.
  bool progress(bool give_way = false);
  static Operation* next_to_write(Queue& queue);
  static bool can_read(const Queue& queue);
  bool write(Queue& queue);
  bool read(Queue& queue);
  void check_agreement(Queue& queue, Operation& operation);
  bool find_failures();
  std::optional<std::string> obstacle(Queue& queue);
  void give_up(Queue& queue, Operation& operation, Milliseconds deadline);
  void fail_all(Queue& queue, const std::string& why);
  void take_note();
  // Sleeps until something may have happened.
  void sleep(std::unique_lock<std::mutex>& lock, Clock::time_point end);

  void serve();
  void serve_pending();
  void wake(bool urgent);

  const std::shared_ptr<gloo::Link> link_;
  const std::shared_ptr<Arena> arena_;
  Bell& bell_;
  const int rank_;

  std::mutex mutex_;
  std::vector<std::shared_ptr<Queue>> active_;  // those that have operations
  bool news_ = false;                           // some operation has ended
  bool stopped_ = false;

  std::atomic<int> pending_{0};    // active_.size()
  std::atomic<int> attending_{0};  // threads in wait()
  std::atomic<int> wanted_{0};     // threads that want the lock
  std::mutex wake_mutex_;
  std::condition_variable wake_;
  std::atomic<bool> dormant_{true};  // the thread sleeps until it is woken, or has not begun
  bool urgent_ = false, ending_ = false;
  std::thread thread_;
};

}  // namespace dtensor::comm::shared_memory
