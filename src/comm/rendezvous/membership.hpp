// Keeps track of who is still in the job. When a rank leaves, it tells the others, through rank 0, and says why. A connection that ends
// without such a message means that the process died.
#pragma once

#include <dtensor/comm/transport.hpp>

#include "src/comm/rendezvous/socket.hpp"

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace dtensor::comm {

// Calls are numbered within streams (a communicator's collectives, or the messages between two ranks with one tag). Progress is the number
// of the last call in each stream, by a hash that all ranks compute alike.
using Progress = std::map<uint64_t, uint64_t>;

class Membership {
 public:
  // `sockets` as Rendezvous leaves them. `on_change` runs on the membership's thread after somebody has left.
  Membership(int rank, int size, std::vector<Socket> sockets, std::function<void()> on_change);
  ~Membership();

  // Tells everyone. Later calls do nothing.
  void leave(const std::string& why, const Progress& progress);

  // The reason if `rank` will never make call `sequence` of `stream`; any failure in the job is a reason.
  std::optional<std::string> obstacle(int rank, uint64_t stream, uint64_t sequence);

  // The job's first failure, if one is known or becomes known within `patience`.
  std::optional<std::string> failure(Milliseconds patience);

  // Waits, at most `patience`, until all ranks have left, one has failed, or rank 0 is gone. Rank 0 waits longer as long as it hears from
  // the ranks that have not left; these send signs of life once rank 0 has left.
  void wait_until_empty(Milliseconds patience);

  // Leaves, and ends the connections once the others have read everything. Called once at least, by one thread.
  void close();

 private:
  struct Member {
    bool left = false;
    Clock::time_point heard = Clock::time_point::min();  // by rank 0, once it waits for this one
    Progress progress;  // when left normally
  };

  void serve();
  void handle(int rank);
  void apply(const Frame& frame);
  void tell(const Frame& frame, int except);

  const int rank_;
  std::function<void()> on_change_;
  std::mutex sending_;
  std::vector<Socket> sockets_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  std::optional<std::string> failure_;
  bool cut_off_ = false;  // rank 0 is gone
  std::optional<Clock::time_point> stop_at_;
  int wake_[2] = {-1, -1};
  std::thread thread_;
};

}  // namespace dtensor::comm
