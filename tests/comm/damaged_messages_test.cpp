// What comes through sockets and files, and is not what a rank sends or leaves: it is refused in words, without a crash or a wait.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/describe.hpp"
#include "src/comm/flight/places.hpp"
#include "src/comm/flight/report.hpp"
#include "src/comm/rendezvous/membership.hpp"
#include "src/comm/rendezvous/rendezvous.hpp"
#include "src/comm/transports/shared_memory/card.hpp"

#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <sys/socket.h>
#include <unistd.h>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

using namespace dtensor_tests;
using dtensor::comm::Clock;
using dtensor::comm::Frame;
using dtensor::comm::Milliseconds;
using dtensor::comm::Socket;
namespace flight = dtensor::comm::flight;

namespace {

std::pair<Socket, Socket> both_ends() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  return {Socket(ends[0]), Socket(ends[1])};
}

std::string text_with_length(uint64_t length, const std::string& text) {
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
}

// What rank 0 of two says of the addresses that rank 1 sends.
bool rank_0_refuses(const std::string& addresses) {
  dtensor::comm::GlooOptions options;
  options.size = 2;
  options.deadline = Milliseconds(5000);
  const auto listener = std::make_shared<dtensor::comm::Listener>("127.0.0.1", 0);
  options.port = listener->port();
  auto rank_1 = Socket::dial("127.0.0.1", options.port, Clock::now() + options.deadline);
  rank_1.send({Frame::Kind::hello, 1, "2"});
  rank_1.send({Frame::Kind::address, 1, addresses});
  dtensor::comm::Rendezvous rendezvous(options, listener);
  return fails_with([&] { rendezvous.exchange({"a", "b"}); }, "that are not a text for each of the 2 ranks");
}

}  // namespace

TEST_CASE("a frame of another protocol is refused and one that does not come takes no memory", "[comm]") {
  for (const auto& [kind, length] : {std::pair(99u, uint64_t{0}), std::pair(1u, uint64_t{1} << 40)}) {
    auto [from, to] = both_ends();
    from.send({static_cast<Frame::Kind>(kind), 0, ""});
    if (length > 0) {
      auto bytes = std::string(24, '\0');
      REQUIRE(recv(to.fd(), bytes.data(), bytes.size(), 0) == 24);
      bytes.replace(16, 8, reinterpret_cast<const char*>(&length), 8);
      REQUIRE(::send(from.fd(), bytes.data(), bytes.size(), 0) == 24);
    }
    CHECK_THROWS_AS(to.receive(Clock::now() + Milliseconds(100)), std::system_error);
  }
}

TEST_CASE("addresses that are none are refused by rank 0", "[comm]") {
  CHECK(rank_0_refuses(""));
  CHECK(rank_0_refuses(text_with_length(1, "a")));
  CHECK(rank_0_refuses(text_with_length(1, "a") + text_with_length(2, "b")));
  CHECK(rank_0_refuses(text_with_length(1, "a") + text_with_length(1, "b") + "c"));
  CHECK(rank_0_refuses(text_with_length(~uint64_t{0} - 7, "a")));  // the next text would be this one, for ever
}

TEST_CASE("a rank that sends foreign news has failed and cannot speak for others", "[comm]") {
  const Frame foreign[] = {{Frame::Kind::hello, 1, "2"}, {Frame::Kind::left, 1, "12345"}, {Frame::Kind::failed, 2, "not me"}};
  for (const auto& frame : foreign) {
    auto [from, to] = both_ends();
    std::vector<Socket> sockets(3);
    sockets[1] = std::move(to);
    dtensor::comm::Membership membership(0, 3, std::move(sockets), [] {});
    from.send(frame);
    const auto why = membership.failure(Milliseconds(5000));
    REQUIRE(why.has_value());
    CHECK(why->find("rank 1 failed: it sent what no rank of this job sends") == 0);
    from.close();
  }
}

TEST_CASE("an address in torchrun's store and a card of shared memory are read whole", "[comm]") {
  dtensor::comm::GlooOptions options;
  dtensor::comm::read_address("29501 node7", options);
  CHECK((options.port == 29501 && options.host == "node7"));
  for (const char* text : {"", "node7", "29501", "29501 ", "0 node7", "70000 node7", "99999999999 node7", "-1 node7"}) {
    INFO(text);
    CHECK(fails_with([&] { dtensor::comm::read_address(text, options); }, "expected such as '29501 node7'"));
  }
  using dtensor::comm::shared_memory::Card;
  const Card card{"f00d[7]", 12, 3, 0x7f00, "token"};
  CHECK(Card::parse(card.str()).token == "token");
  for (const char* text : {"", "f00d", "f00d 12 3", "f00d -1 3 7 token", "f00d 12 -3 7 token", "f00d 12 3 7 token more",
                           "f00d 12 x 7 token"}) {
    INFO(text);
    CHECK(Card::parse(text).host.empty());
  }
}

TEST_CASE("another rank's call is told though its texts have no end", "[comm]") {
  dtensor::comm::CallInfo call;
  std::fill(std::begin(call.subject.text), std::end(call.subject.text), 's');
  std::fill(std::begin(call.cause.text), std::end(call.cause.text), 'c');
  const auto text = call.str();
  CHECK(text.find(" by " + std::string(sizeof call.cause, 'c') + " for '" + std::string(sizeof call.subject, 's') + "'") != text.npos);
}

TEST_CASE("a damaged file of events is none and one without ends is read", "[comm][flight]") {
  const auto file = (std::filesystem::temp_directory_path() / fmt::format("damaged-{}.events", getpid())).string();
  const auto read_with = [&](const std::function<void(flight::RingHeader&)>& damage) {
    {
      const flight::Ring ring(file);
      ring.header().ranks = 4;
      damage(ring.header());
    }
    return flight::read_file(file);
  };
  CHECK(read_with([](auto&) {}).has_value());
  CHECK_FALSE(read_with([](auto& header) { header.rank = -1; }).has_value());
  CHECK_FALSE(read_with([](auto& header) { header.rank = 4; }).has_value());
  CHECK_FALSE(read_with([](auto& header) { header.ranks = 2'000'000'000; }).has_value());
  CHECK_FALSE(read_with([](auto& header) { header.state = static_cast<flight::State>(77); }).has_value());
  const auto endless = read_with([](auto& header) {
    header.issued = ~uint64_t{0};
    header.groups = 1;
    header.group[0].size = -5;
    std::fill(std::begin(header.error.text), std::end(header.error.text), 'e');
  });
  REQUIRE(endless.has_value());
  CHECK((endless->events.empty() && endless->groups[0].size == 0 && endless->error.size() == sizeof flight::RingHeader().error.text));
  std::filesystem::remove(file);
}

// Of larger groups the ring names the first 54 ranks only.
TEST_CASE("the report knows ranks that their group does not name and messages to them", "[comm][flight]") {
  flight::RingGroup group;
  group.key = 7;
  group.size = 100;
  for (int i = 0; i < flight::RingGroup::kNamed; ++i) group.ranks[i] = i;
  dtensor::comm::Event call;
  call.number = call.sequence = 1;
  call.group_index = 0;
  auto message = call;
  message.kind = dtensor::comm::Collective::send;
  std::vector<flight::Witness> witnesses;
  for (const int rank : {60, 70}) {
    flight::Recording recording;
    recording.rank = rank, recording.ranks = 100;
    recording.groups = {group};
    recording.events = {call};
    for (const int root : {-1, 55, 99, 1 << 30}) {
      message.root = root;
      message.kind = root == 99 ? dtensor::comm::Collective::recv : message.kind;
      recording.events.push_back(message);
    }
    witnesses.push_back({rank, recording, "", false});
  }
  CHECK(flight::examine(witnesses).text.find("ranks 60 and 70 wait") != std::string::npos);
}

TEST_CASE("the name of a program is no command", "[comm][flight]") {
  const auto mark = (std::filesystem::temp_directory_path() / fmt::format("mark-{}", getpid())).string();
  const auto program = mark + "'; touch " + mark + "; '";
  const auto places = flight::places_of({0x1500}, "1000-2000 r-xp 00000000 08:01 131 " + program + "\n");
  CHECK(places.size() == 1);
  CHECK_FALSE(std::filesystem::exists(mark));
}
