// Sends and receives the envelopes and payloads between a rank and its peers.
#include "src/comm/transports/gloo/exchange.hpp"

#include <cstring>
#include <type_traits>

namespace dtensor::comm::gloo {

namespace {

// A payload up to this size travels in its envelope's message.
constexpr int64_t kInlineBytes = 8 << 10;

struct Envelope {
  CallInfo call;
  int64_t bytes;     // of the payload for the receiver
  int64_t expected;  // of the receiver's payload for the sender
};
static_assert(std::is_trivially_copyable_v<Envelope>);

bool fits(const Bytes& bytes) { return bytes.size <= kInlineBytes; }

}  // namespace

uint64_t mix(uint64_t seed, uint64_t value) {
  uint64_t x = seed ^ (value + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// gloo matches messages by slot, and a payload longer than its receiver's buffer would be fatal. With the size in the
// slot such a payload never finds a receiver.
uint64_t Exchange::slot(int stage, int64_t bytes) const {
  return mix(mix(mix(stream_, call_.sequence), static_cast<uint64_t>(part_ * 4 + stage)), static_cast<uint64_t>(bytes));
}

void Exchange::add(int peer, Bytes out, Bytes in, Direction direction) {
  Peer entry{};
  entry.rank = peer;
  entry.out = out;
  entry.in = in;
  entry.sends = direction != Direction::receive;
  entry.receives = direction != Direction::send;
  peers_.push_back(std::move(entry));
}

void Exchange::post_receives() {
  for (Peer& peer : peers_) {
    if (!peer.receives) continue;
    constexpr int64_t kLongest = sizeof(Envelope) + kInlineBytes;
    peer.inbox.reset(new char[kLongest]);
    peer.receive_envelope = link_.buffer(peer.inbox.get(), kLongest);
    peer.receive_envelope->recv(peer.rank, slot(0, 0));
    if (fits(peer.in)) continue;
    peer.receive_payload = link_.buffer(peer.in.data, peer.in.size);
    peer.receive_payload->recv(peer.rank, slot(1, peer.in.size));
  }
}

void Exchange::post_sends() {
  for (Peer& peer : peers_) {
    if (!peer.sends) continue;
    const Envelope envelope{call_, peer.out.size, peer.in.size};
    const int64_t inside = fits(peer.out) ? peer.out.size : 0;
    peer.outbox.reset(new char[sizeof envelope + inside]);
    std::memcpy(peer.outbox.get(), &envelope, sizeof envelope);
    if (inside > 0) std::memcpy(peer.outbox.get() + sizeof envelope, peer.out.data, inside);
    peer.send_envelope = link_.buffer(peer.outbox.get(), sizeof envelope + inside);
    peer.send_envelope->send(peer.rank, slot(0, 0));
    if (fits(peer.out)) continue;
    peer.send_payload = link_.buffer(peer.out.data, peer.out.size);
    peer.send_payload->send(peer.rank, slot(1, peer.out.size));
  }
}

// All envelopes are read before any payload is waited for: a rank that diverged may never send one.
void Exchange::finish(int self, const Deadline& end, const std::function<void()>& all_came) {
  for (Peer& peer : peers_) {
    if (!peer.receives) continue;
    link_.wait_received(*peer.receive_envelope, need(peer), end);
    peer.came = true;
    open(self, peer);
  }
  if (all_came) all_came();
  for (Peer& peer : peers_) {
    if (peer.receive_payload) link_.wait_received(*peer.receive_payload, need(peer), end);
  }
  for (Peer& peer : peers_) {
    if (peer.send_envelope) link_.wait_sent(*peer.send_envelope, need(peer), end);
    if (peer.send_payload) link_.wait_sent(*peer.send_payload, need(peer), end);
  }
}

void Exchange::open(int self, Peer& peer) {
  Envelope envelope;
  std::memcpy(&envelope, peer.inbox.get(), sizeof envelope);
  if (envelope.call.failures != call_.failures) throw Broken{link_.explain_out_of_step(peer.rank, call_.failures, envelope.call.failures)};
  const bool message = call_.kind == Collective::recv;
  bool agrees = envelope.bytes == peer.in.size && envelope.call.dtype == call_.dtype;
  if (!message) agrees = agrees && envelope.expected == peer.out.size && envelope.call.agrees_with(call_);
  if (!agrees) {
    const bool same_call = call_.kind == Collective::all_to_all && envelope.call.agrees_with(call_);
    const bool comes_other = envelope.bytes != peer.in.size;
    const auto why = !same_call      ? divergence(self, call_, peer.rank, envelope.call)
                     : comes_other ? unequal_pieces(call_, peer.rank, self, envelope.bytes, peer.in.size)
                                   : unequal_pieces(call_, self, peer.rank, peer.out.size, envelope.expected);
    if (!message) link_.leave(why);  // this rank is about to drop what it sends to the others, who would wait for it until the deadline
    throw Broken{why};
  }
  if (fits(peer.in) && peer.in.size > 0) std::memcpy(peer.in.data, peer.inbox.get() + sizeof envelope, peer.in.size);
}

std::vector<int> Exchange::absent() {
  std::vector<int> ranks;
  for (Peer& peer : peers_) {
    if (peer.receives && !peer.came && !Link::has_received(*peer.receive_envelope)) ranks.push_back(peer.rank);
  }
  return ranks;
}

}  // namespace dtensor::comm::gloo
