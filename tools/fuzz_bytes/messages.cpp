// What comes through sockets and shared memory before and beside tensors.
#include "tools/fuzz_bytes/target.hpp"

#include "src/comm/describe.hpp"
#include "src/comm/rendezvous/membership.hpp"
#include "src/comm/rendezvous/rendezvous.hpp"
#include "src/comm/transports/shared_memory/card.hpp"

#include <algorithm>
#include <memory>
#include <thread>

#include <sys/socket.h>
#include <unistd.h>

namespace dtensor::fuzz_bytes {

namespace {

using comm::Clock;
using comm::Frame;
using comm::Milliseconds;
using comm::Socket;

// Two ends of a connection.
std::pair<Socket, Socket> connection() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
    throw std::system_error(errno, std::generic_category(), "socketpair");
  return {Socket(ends[0]), Socket(ends[1])};
}

std::string frame(Frame::Kind kind, int rank, const std::string& payload) {
  auto [from, to] = connection();
  from.send({kind, rank, payload});
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(recv(to.fd(), bytes.data(), bytes.size(), 0)));
  return bytes;
}

std::string packed(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += bytes_of(text.size()) + text;
  return all;
}

// As much as the other end takes, and nothing more.
void send_all(const Socket& socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) break;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  shutdown(socket.fd(), SHUT_WR);
}

void read_frames(const std::string& bytes) {
  auto [from, to] = connection();
  send_all(from, bytes);
  while (to.receive(Clock::now() + Milliseconds(100))) {}
}

comm::GlooOptions job(int rank, int port) {
  comm::GlooOptions options;
  options.rank = rank;
  options.size = 2;
  options.port = port;
  options.deadline = Milliseconds(40);
  return options;
}

const std::shared_ptr<comm::Listener>& listener() {
  static const auto one = std::make_shared<comm::Listener>("127.0.0.1", 0);
  return one;
}

std::vector<std::string> exchanged(comm::Rendezvous& rendezvous) {
  auto theirs = rendezvous.exchange({"for rank 0", "for rank 1"});
  expect(theirs.size() == 2, "an exchange of 2 ranks gave {} texts", theirs.size());
  return theirs;
}

// To rank 0, from rank 1: hello, and its addresses.
void be_rank_0(const std::string& bytes) {
  const auto end = Clock::now() + Milliseconds(500);
  const auto peer = Socket::dial("127.0.0.1", listener()->port(), end);
  send_all(peer, bytes);
  comm::Rendezvous rendezvous(job(0, listener()->port()), listener());
  exchanged(rendezvous);
}

std::vector<std::string> to_rank_0() {
  return {frame(Frame::Kind::hello, 1, "2") + frame(Frame::Kind::address, 1, packed({"an address", "another"}))};
}

// To rank 1, from rank 0: welcome, and a table.
void be_rank_1(const std::string& bytes) {
  Socket peer;
  std::thread rank_0([&] {
    try {
      peer = listener()->accept(Clock::now() + Milliseconds(1000));
      send_all(peer, bytes);
    } catch (const Socket::TimedOut&) {
    }
  });
  struct Join {
    std::thread& thread;
    ~Join() { thread.join(); }
  } join{rank_0};
  comm::Rendezvous rendezvous(job(1, listener()->port()), nullptr);
  exchanged(rendezvous);
}

std::vector<std::string> to_rank_1() {
  return {frame(Frame::Kind::welcome, 0, "") + frame(Frame::Kind::table, 0, packed({"an address", "another"}))};
}

// The same bytes to rank 0, from rank 1, and to rank 1, from rank 0.
void follow(const std::string& bytes) {
  for (const int rank : {0, 1}) {
    auto [from, to] = connection();
    std::vector<Socket> sockets(2);
    sockets[static_cast<size_t>(1 - rank)] = std::move(to);
    send_all(from, bytes);
    comm::Membership membership(rank, 2, std::move(sockets), [] {});
    membership.leave("", {{7, 3}});
    membership.wait_until_empty(Milliseconds(1000));
    from.close();
    membership.obstacle(1 - rank, 7, 3);
    if (const auto why = membership.failure(Milliseconds(0))) expect(!why->empty(), "a failure without a text");
  }
}

std::vector<std::string> news() {
  const auto progress = bytes_of(uint64_t{7}) + bytes_of(uint64_t{2});
  return {frame(Frame::Kind::alive, 1, "") + frame(Frame::Kind::left, 1, progress),
          frame(Frame::Kind::failed, 0, "out of memory"), frame(Frame::Kind::left, 0, progress)};
}

comm::CallInfo call(comm::Collective kind) {
  comm::CallInfo info;
  info.kind = kind;
  info.sequence = 7;
  info.numel = 12;
  info.dtype = 6;
  const comm::Cause cause("aten::mm", true);
  comm::describe_purpose(info);
  return info;
}

void compare_calls(const std::string& bytes) {
  const auto mine = call(comm::Collective::all_reduce), theirs = object_of<comm::CallInfo>(bytes);
  if (!mine.agrees_with(theirs)) comm::divergence(0, mine, 1, theirs);
  const auto text = theirs.str();
  expect(text.size() < 400, "a call of {} bytes is told in {}", sizeof theirs, text.size());
}

std::vector<std::string> calls() {
  std::vector<std::string> all;
  for (const auto kind : {comm::Collective::all_reduce, comm::Collective::broadcast, comm::Collective::send, comm::Collective::barrier})
    all.push_back(bytes_of(call(kind)));
  return all;
}

using comm::shared_memory::Card;

void read_card(const std::string& text) {
  const auto card = Card::parse(text);
  if (card.host.empty()) return;
  expect(card.process > 0 && card.fd >= 0, "a card of process {}, file {}", card.process, card.fd);
  expect(card.token.size() < 48, "a token of {} characters", card.token.size());
}

void read_store(const std::string& text) {
  comm::GlooOptions options;
  options.host = "";
  comm::read_address(text, options);
  expect(options.port > 0 && options.port < 65536, "port {}", options.port);
  expect(!options.host.empty(), "no host");
}

}  // namespace

std::vector<Target> message_targets() {
  return {{"frames", "frames of control connections", news, read_frames},
          {"rank-0", "what rank 0 gets in a rendezvous", to_rank_0, be_rank_0},
          {"rank-1", "what another rank gets in a rendezvous", to_rank_1, be_rank_1},
          {"membership", "news of ranks that leave", news, follow},
          {"calls", "the header of a collective, of gloo and shared memory", calls, compare_calls},
          {"cards", "what ranks that share memory tell of it",
           [] { return std::vector{Card{"f00d[4026531836]", 4711, 5, 0x7f0000001000, "0123456789abcdef"}.str()}; }, read_card},
          {"store", "the address of rank 0 in torchrun's store",
           [] { return std::vector<std::string>{"29501 node7", "1 ::1"}; }, read_store,
           {" ", "\n"}}};
}

}  // namespace dtensor::fuzz_bytes
