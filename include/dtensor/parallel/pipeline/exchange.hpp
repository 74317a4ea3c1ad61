// What the stages of a rank give to others and take from them, on this rank or another: the values, and how they travel.
#pragma once

#include <dtensor/parallel/pipeline/draws.hpp>
#include <dtensor/parallel/pipeline/peer_messages.hpp>

#include <map>
#include <tuple>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct Delivery {
  TensorVector tensors;
  std::vector<Sent> sent;  // how they travelled
};

class Exchange {
 public:
  // As PeerMessages.
  Exchange(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank)
      : rank_of_stage_(schedule.rank_of_stage), rank_(rank), messages_(schedule, std::move(ways), std::move(meshes), rank) {}

  // A new step. `signatures` are those of the microbatches; `gradients(message)` says how gradients for a stage of this rank travel, once
  // its forward was.
  void begin(const Schedule& schedule, std::vector<Signature> signatures, PeerMessages::Knows gradients);

  // Between two stages of this rank nothing is copied.
  void give(const Message& message, Delivery delivery);
  Delivery take(const Message& message);

  // Waits until all that was given has gone.
  void finish() { messages_.finish(); }

 private:
  using Key = std::tuple<int, int, Signature>;
  Key key(const Message& message) const {
    return {message.from, message.to, message.microbatch == kBeforeAll ? "" : signatures_[message.microbatch]};
  }

  std::vector<int> rank_of_stage_;
  int rank_;
  PeerMessages messages_;
  std::vector<Signature> signatures_;
  std::map<Key, std::vector<Sent>> known_;  // from a stage to another, for microbatches of these sizes
  std::map<Message, Delivery> at_hand_;     // between two stages of this rank
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline bool travel_alike(const std::vector<Sent>& a, const std::vector<Sent>& b) {
  return std::ranges::equal(a, b, [](const Sent& x, const Sent& y) {
    return x.before == y.before && x.after == y.after && x.order == y.order && x.tracked == y.tracked;
  });
}

}  // namespace detail

inline void Exchange::begin(const Schedule& schedule, std::vector<Signature> signatures, PeerMessages::Knows gradients) {
  at_hand_.clear();  // of a step that failed
  signatures_ = std::move(signatures);
  messages_.begin(schedule, [this, gradients = std::move(gradients)](const Message& message) -> const std::vector<Sent>* {
    if (message.kind == Kind::B) return gradients(message);
    const auto found = known_.find(key(message));
    return found == known_.end() ? nullptr : &found->second;
  });
}

inline void Exchange::give(const Message& message, Delivery delivery) {
  if (rank_of_stage_[message.receiver()] == rank_) {
    at_hand_[message] = std::move(delivery);
    return;
  }
  bool introduce = false;
  if (message.kind == Kind::F) {
    const auto [way, is_new] = known_.try_emplace(key(message), delivery.sent);
    introduce = is_new;
    require(is_new || detail::travel_alike(way->second, delivery.sent), "pipeline",
            "the outputs of stage {} have other sizes or layouts than those of a microbatch of equal inputs had", message.from);
  }
  messages_.send(message, delivery.tensors, delivery.sent, introduce);
}

inline Delivery Exchange::take(const Message& message) {
  if (const auto found = at_hand_.find(message); found != at_hand_.end()) {
    auto result = std::move(found->second);
    at_hand_.erase(found);
    return result;
  }
  auto [tensors, sent] = messages_.take(message);
  if (message.kind == Kind::F) known_.try_emplace(key(message), sent);
  return {std::move(tensors), std::move(sent)};
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
