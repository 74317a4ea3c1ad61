// The building block of the gloo collectives: every rank sends some bytes to each peer and receives some from it. An envelope that
// describes the call goes first, so ranks that diverged notice before they misread data.
#pragma once

#include "src/comm/describe.hpp"
#include "src/comm/transports/gloo/link.hpp"

namespace dtensor::comm::gloo {

struct Bytes {
  void* data = nullptr;
  int64_t size = 0;
};

class Exchange {
 public:
  enum class Direction { both, send, receive };

  // `stream` names the communicator (or the messages of two ranks); `part` tells the exchanges of one call apart.
  Exchange(Link& link, const CallInfo& call, uint64_t stream, int part) : link_(link), call_(call), stream_(stream), part_(part) {}

  // Adds world rank `peer`: `out` goes there, `in` comes from there. The memory must stay until finish() or destruction.
  void add(int peer, Bytes out, Bytes in, Direction direction = Direction::both);

  // Posts what can be posted without blocking: first the receives, then the sends, whose bytes must be ready by then.
  void post_receives();
  void post_sends();

  // Blocks until everything has come and gone. Throws Broken or Late.
  void finish(int self, const Deadline& end, const std::function<void()>& all_came = {});

  // After Late: the peers whose envelope has not come.
  std::vector<int> absent();

 private:
  struct Peer {
    int rank;
    Bytes out, in;
    bool sends, receives;
    bool came = false;
    std::unique_ptr<char[]> outbox, inbox;  // envelopes, with small payloads inside
    Buffer send_envelope, receive_envelope, send_payload, receive_payload;
  };

  uint64_t slot(int stage, int64_t bytes) const;
  void open(int self, Peer& peer);
  Need need(const Peer& peer) const { return {peer.rank, stream_, call_.sequence}; }

  Link& link_;
  const CallInfo call_;
  const uint64_t stream_;
  const int part_;
  std::vector<Peer> peers_;
};

// A hash that all ranks compute alike.
uint64_t mix(uint64_t seed, uint64_t value);

}  // namespace dtensor::comm::gloo
