// Batches of messages: in any order, of any size, with gradients, on every transport.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/collectives.hpp>

#include <algorithm>
#include <random>

using namespace dtensor;
using namespace dtensor::test;

namespace {

at::Tensor message_of(int from, int to, int tag, int64_t numel) {
  return torch::arange(numel, torch::kDouble) + 1000 * from + 100 * to + 10 * tag;
}

// Every rank to every other, with two tags and twice each, in an order of the rank's own.
void all_to_all_others(World& world, const DeviceMesh& mesh, int64_t numel, uint64_t seed) {
  const int rank = world.rank();
  struct Expected {
    Message message;
    int turn;
  };
  std::vector<Expected> wanted;
  for (int peer = 0; peer < world.size(); ++peer) {
    for (int tag = 0; peer != rank && tag < 2; ++tag) {
      wanted.push_back({outgoing(message_of(rank, peer, tag, numel + peer).requires_grad_(), peer, tag), 0});
      wanted.push_back({incoming(torch::empty({numel + rank}, torch::kDouble).requires_grad_(), peer, tag), 0});
    }
  }
  std::mt19937_64 random(seed + static_cast<uint64_t>(rank));
  std::shuffle(wanted.begin(), wanted.end(), random);
  std::vector<Message> messages;
  for (const auto& each : wanted) messages.push_back(each.message);
  const auto results = exchange_messages(messages, mesh);
  at::Tensor loss = torch::zeros({}, torch::kDouble);
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& [tensor, peer, tag, goes] = messages[i];
    if (!goes)
      require(results[i].detach().equal(message_of(peer, rank, tag, numel + rank)), "test", "rank {} got another message from {}", rank,
              peer);
    loss = loss + results[i].sum() * (goes ? 1 : 3 * rank + peer + tag);
  }
  if (world.size() == 1) return;
  loss.backward();
  for (const auto& [tensor, peer, tag, goes] : messages) {
    if (goes)
      require(tensor.grad().equal(torch::full_like(tensor, 3 * peer + rank + tag)), "test", "rank {}: another gradient from {}", rank,
              peer);
  }
}

}  // namespace

TEST_CASE("batches of messages: every rank to every other in any order", "[collectives]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      INFO(transport << ", " << ranks << " ranks");
      CHECK_NOTHROW(on_ranks(
          ranks,
          [&](World& world) {
            const auto mesh = line(world);
            for (const int64_t numel : {0, 3, 20'000}) {  // the last are longer than what transports buffer
              for (uint64_t seed = 0; seed < 3; ++seed) all_to_all_others(world, mesh, numel, 100 * seed);
            }
          },
          transport));
    }
  }
}

TEST_CASE("batches of messages: of some ranks and several dtypes while others compute", "[collectives]") {
  for (const std::string transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        4,
        [](World& world) {
          const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"a", "b"});
          const int rank = world.rank();
          if (rank == 3) return;  // has no messages, and need not call
          if (rank == 2) require(exchange_messages({}, mesh).empty(), "test", "no messages");
          if (rank >= 2) return;
          const auto other = 1 - rank;
          const auto one = torch::full({2, 3}, rank, torch::kLong), two = torch::full({4}, rank, torch::kFloat);
          // One lists first what the other lists last; both begin with what is received.
          std::vector<Message> messages{incoming(torch::empty({2, 3}, torch::kLong), other), incoming(torch::empty({4}), other, 7),
                                        outgoing(two, other, 7), outgoing(one.t().contiguous().t(), other)};
          if (rank == 1) std::ranges::reverse(messages);
          auto under_way = start_exchange_messages(messages, mesh);
          const auto got = std::move(under_way).wait();
          require(got[rank == 0 ? 0 : 3].equal(torch::full({2, 3}, other, torch::kLong)), "test", "the matrix");
          require(got[rank == 0 ? 1 : 2].equal(torch::full({4}, other, torch::kFloat)), "test", "the vector");
        },
        transport));
  }
}

TEST_CASE("batches of messages: messages of one direction and tag keep their order", "[collectives]") {
  CHECK_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = line(world);
    std::vector<Message> messages;
    for (int i = 0; i < 20; ++i) {
      const auto number = torch::full({i}, i, torch::kDouble);
      messages.push_back(world.rank() == 0 ? outgoing(number, 1) : incoming(torch::empty_like(number), 0));
    }
    const auto got = exchange_messages(messages, mesh);
    for (int i = 0; world.rank() == 1 && i < 20; ++i) require(got[i].equal(torch::full({i}, i, torch::kDouble)), "test", "message {}", i);
  }));
}

// The group of a mesh is made when it is first used: here by two of its ranks only, which must not get other groups of the same ranks mixed
// up.
TEST_CASE("batches of messages: the first use of a mesh may be that of two ranks", "[collectives]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    INFO(transport);
    CHECK_NOTHROW(on_ranks(
        4,
        [](World& world) {
          const auto mesh = init_device_mesh(torch::kCPU, {4}, {"first"}), other = init_device_mesh(torch::kCPU, {4}, {"second"});
          const auto sent = torch::arange(3, torch::kDouble);
          if (world.rank() == 0) exchange_messages({outgoing(sent, 1)}, mesh);
          if (world.rank() == 1)
            require(exchange_messages({incoming(torch::empty_like(sent), 0)}, mesh)[0].equal(sent), "test", "the message");
          world.barrier();
          require(all_reduce(sent, other).equal(4 * sent), "test", "on another mesh");
          require(all_reduce(sent, mesh).equal(4 * sent), "test", "on the same mesh");
        },
        transport));
  }
}

TEST_CASE("batches of messages: refusals", "[collectives]") {
  CHECK_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = line(world);
    refuses("a rank keeps what it would send to itself", [&] { exchange_messages({outgoing(torch::ones({2}), world.rank())}, mesh); });
    refuses("got 2 on rank", [&] { exchange_messages({incoming(torch::ones({2}), 2)}, mesh); });
    refuses("hint: pass to_local()", [&] {
      exchange_messages({outgoing(distribute_tensor(torch::ones({2}), mesh, {replicate()}).tensor(), 1 - world.rank())}, mesh);
    });
  }));
}
