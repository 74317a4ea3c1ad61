// One collective on one rank: what it writes and reads in each of its rounds.
#pragma once

#include "src/comm/transports/shared_memory/channel.hpp"

#include <optional>
#include <string>
#include <vector>

namespace dtensor::comm::shared_memory {

struct Bytes {
  char* data = nullptr;
  int64_t size = 0;
};

class Operation {
 public:
  Operation(const Communicator::Call& call, std::vector<at::Tensor> keep) : call_(call), keep_(std::move(keep)) {}
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  const Communicator::Call& call() const { return call_; }

  // How many rounds it takes, one at least. It may grow until they are known.
  virtual int64_t rounds() const { return 1; }
  virtual bool knows_rounds() const { return true; }
  // Whether the next round can be written with what has been read.
  virtual bool can_write() const { return true; }
  virtual void write([[maybe_unused]] const Channel& channel, [[maybe_unused]] int64_t round, [[maybe_unused]] const Slot& slot) {}
  // What one member sends and another does not expect, in bytes.
  struct Unequal {
    int from, to;
    int64_t sent, expected;
  };
  // Whether `theirs`, of member `who`, goes with this call, beyond what CallInfo says: nothing where it does.
  virtual std::optional<Unequal> disagreement([[maybe_unused]] const Channel& channel, [[maybe_unused]] int who,
                                              [[maybe_unused]] const Slot& theirs) {
    return std::nullopt;
  }
  // `base` is the channel's number of the operation's first round.
  virtual void read([[maybe_unused]] const Channel& channel, [[maybe_unused]] int64_t round, [[maybe_unused]] uint64_t base) {}

  // Kept by the engine.
  uint64_t base = 0;
  int64_t written = 0, read_rounds = 0;

  // An operation that has ended holds no tensors.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  const std::string& error() const { return error_; }
  void end(std::string error = "") {
    error_ = std::move(error);
    keep_.clear();
    error_.empty() ? call_.event.done() : call_.event.failed();
    ended_.store(true, std::memory_order_release);
  }

 private:
  const Communicator::Call call_;
  std::vector<at::Tensor> keep_;
  std::string error_;
  std::atomic<bool> ended_{false};
};

// all_gather, and broadcast, where only the root has a piece: `mine` goes to all, the piece of member p to pieces[p].
std::shared_ptr<Operation> make_gather(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes mine, std::vector<Bytes> pieces);

// Piece p of `out` goes to member p, whose piece comes to in[p]. `direct`: long pieces are read from the members' memory.
std::shared_ptr<Operation> make_all_to_all(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> out,
                                           std::vector<Bytes> in, bool direct);

// The members' pieces for this one are reduced into `target`.
std::shared_ptr<Operation> make_reduce_scatter(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> pieces,
                                               Bytes target);

std::shared_ptr<Operation> make_all_reduce(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes input, Bytes target,
                                           int members, int self);

}  // namespace dtensor::comm::shared_memory
