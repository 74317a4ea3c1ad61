// Batches of messages between ranks, which cannot deadlock in whatever order ranks list them.
//
//   auto got = dt::exchange_messages({dt::outgoing(x, next), dt::incoming(like, previous)}, mesh);   // got[1] is what `previous` sent
#pragma once

#include <dtensor/collectives/pieces.hpp>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <tuple>

#pragma GCC visibility push(default)

namespace dtensor {

// A message of a batch, made by outgoing() or incoming().
struct Message {
  at::Tensor tensor;  // what goes, or what the message that comes is like
  int peer = 0;       // rank of the group
  int tag = 0;
  bool goes = false;
};

inline Message outgoing(at::Tensor x, int to, int tag = 0) { return {std::move(x), to, tag, true}; }
inline Message incoming(at::Tensor like, int from, int tag = 0) { return {std::move(like), from, tag, false}; }

namespace detail {

// The order in which this rank posts its messages: one order of all messages of the group, which every rank keeps to. Then also transports
// where a message waits for its other end cannot lock: of the messages that are left, the first has both its ends ready.
inline std::vector<size_t> order_of(const std::vector<Message>& messages, int rank) {
  std::vector<size_t> order(messages.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto key = [&](size_t i) {
    const auto& m = messages[i];
    return std::make_tuple(std::min(rank, m.peer), std::max(rank, m.peer), m.goes == (rank < m.peer) ? 0 : 1, m.tag);
  };
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return key(a) < key(b); });
  return order;
}

inline TensorVector tensors_of(const std::vector<Message>& messages) {
  TensorVector tensors;
  for (const auto& message : messages) tensors.push_back(message.tensor);
  return tensors;
}

inline TensorVector outgoing_of(const std::vector<Message>& messages) {
  TensorVector tensors;
  for (const auto& message : messages) {
    if (message.goes) tensors.push_back(message.tensor);
  }
  return tensors;
}

}  // namespace detail

// Sends and receives all of `messages`, between ranks of the mesh (of one dimension: a group; of several: all its ranks are one). All are
// posted before any is waited for. Only ranks that have a message need to call it, each with its own list in any order; messages between
// two ranks in one direction with one tag come in the order in which they are listed. Results, as `messages`: what came in, and for what
// went out a receipt of no elements.
//
// Differentiable: the gradient of an incoming message, whose `like` requires one, goes back, and that of an outgoing one, which requires
// one, comes back, as one batch; backward on a rank which only sends goes by adding the receipts' sums, which are 0, to its loss. Both ends
// of a message must ask for its gradient, and a batch that has any on one rank must run backward there. Throws for a peer that is not
// another rank of the group, for a tensor that is not plain or not on the mesh's device; ranks whose messages do not match get the
// communicator's errors.
inline PendingTensors start_exchange_messages(const std::vector<Message>& messages, const DeviceMesh& mesh) {
  auto& group = detail::group_of(mesh);
  for (const auto& message : messages) {
    detail::check_alike("exchange_messages", {message.tensor});
    require(
        message.peer >= 0 && message.peer < group.size() && message.peer != group.rank(), "exchange_messages",
        "the peer of a message is not another rank of the group; got {} on rank {} of {}; hint: a rank keeps what it would send to itself",
        message.peer, group.rank(), group.size());
  }
  auto received = std::make_shared<TensorVector>(messages.size());
  const auto post = [&] {
    std::vector<comm::WorkPtr> works;
    for (const auto i : detail::order_of(messages, group.rank())) {
      const auto& message = messages[i];
      const auto tensor = message.tensor.contiguous();
      auto async = message.goes ? group.send(tensor, message.peer, message.tag) : group.recv(tensor, message.peer, message.tag);
      (*received)[i] = async.tensor;
      if (async.work) works.push_back(std::move(async.work));
    }
    return comm::Async{at::Tensor(), c10::make_intrusive<comm::AllOf>(std::move(works))};
  };
  return detail::start(
      detail::tensors_of(messages), post,
      [messages, received](const at::Tensor&) {
        TensorVector results;
        for (size_t i = 0; i < messages.size(); ++i) {
          const auto& like = messages[i].tensor;
          results.push_back(messages[i].goes ? at::empty({0}, like.options()) : (*received)[i].view(like.sizes()));
        }
        return results;
      },
      [messages, mesh](const TensorVector& gradients) {
        std::vector<Message> back;
        for (size_t i = 0; i < messages.size(); ++i) {
          const auto& [tensor, peer, tag, goes] = messages[i];
          if (tensor.requires_grad()) back.push_back({goes ? tensor.detach() : gradients[i], peer, tag, !goes});
        }
        const auto came = start_exchange_messages(back, mesh).wait();
        TensorVector results(messages.size());
        for (size_t i = 0, b = 0; i < messages.size(); ++i) {
          if (!messages[i].tensor.requires_grad()) continue;
          if (messages[i].goes) results[i] = came[b];
          ++b;
        }
        return results;
      },
      detail::outgoing_of(messages));
}
inline TensorVector exchange_messages(const std::vector<Message>& messages, const DeviceMesh& mesh) {
  return start_exchange_messages(messages, mesh).wait();
}

}  // namespace dtensor

#pragma GCC visibility pop
