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

  // Of the gradients for a stage of another rank, which there were for an earlier microbatch like this one: its stage expects these, and no
  // others. Null: none went there yet, or the stage is this rank's.
  const Numbers* gradients_before(const Message& message) const;

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
  std::map<Key, std::vector<Sent>> known_;   // from a stage to another, for microbatches of these sizes
  std::map<Key, std::vector<Sent>> coming_;  // of gradients: tracked are those that there are
  std::map<Key, Numbers> gone_;              // which gradients there were
  PeerMessages::Knows gradients_;
  std::map<Message, Delivery> at_hand_;  // between two stages of this rank
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
  gradients_ = std::move(gradients);
  const auto knows = [this](const Message& message) -> const std::vector<Sent>* {
    if (message.kind == Kind::B) {
      const auto* went = gradients_(message);  // null before the forward
      if (went == nullptr || std::ranges::none_of(*went, &Sent::tracked)) return went;
    }
    const auto& known = message.kind == Kind::B ? coming_ : known_;
    const auto found = known.find(key(message));
    return found == known.end() ? nullptr : &found->second;
  };
  messages_.begin(schedule, knows, [this](const Message& message, const Numbers& there) {
    const auto* went = gradients_(message);
    require(went != nullptr && went->size() == there.size(), "pipeline", "gradients come for microbatch {} of stage {} before its forward",
            message.microbatch, message.from);
    auto& coming = coming_[key(message)] = *went;
    for (size_t i = 0; i < coming.size(); ++i) coming[i].tracked = there[i] != 0;
    return coming;
  });
}

inline const Numbers* Exchange::gradients_before(const Message& message) const {
  const auto found = gone_.find(key(message));
  return found == gone_.end() ? nullptr : &found->second;
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
  if (message.kind == Kind::B && std::ranges::any_of(delivery.sent, &Sent::tracked)) {
    const auto there = detail::which_are_there(delivery.tensors);
    const auto [before, is_new] = gone_.try_emplace(key(message), there);
    introduce = is_new;
    require(before->second == there, "pipeline",
            "stage {} has a gradient for stage {} where it had none with an earlier microbatch of equal inputs; hint: let it depend on the "
            "same inputs for each of them (times 0 where a value has no say)",
            message.to, message.from);
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
