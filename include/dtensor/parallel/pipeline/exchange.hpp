// What the stages of a rank give to others and take from them, on this rank or another: the values, and how they travel.
#pragma once

#include <dtensor/parallel/pipeline/draws.hpp>
#include <dtensor/parallel/pipeline/mail.hpp>

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
  // As Mail.
  Exchange(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank)
      : rank_of_stage_(schedule.rank_of_stage), rank_(rank), mail_(schedule, std::move(ways), std::move(meshes), rank) {}

  // A new step. `signatures` are those of the microbatches; `gradients(letter)` says how gradients for a stage of this rank travel, once
  // its forward was.
  void begin(const Schedule& schedule, std::vector<Signature> signatures, Mail::Knows gradients);

  // Between two stages of this rank nothing is copied.
  void give(const Letter& letter, Delivery delivery);
  Delivery take(const Letter& letter);

  // Waits until all that was given has gone.
  void finish() { mail_.finish(); }

 private:
  using Key = std::tuple<int, int, Signature>;
  Key key(const Letter& letter) const {
    return {letter.from, letter.to, letter.microbatch == kBeforeAll ? "" : signatures_[letter.microbatch]};
  }

  std::vector<int> rank_of_stage_;
  int rank_;
  Mail mail_;
  std::vector<Signature> signatures_;
  std::map<Key, std::vector<Sent>> known_;  // from a stage to another, for microbatches of these sizes
  std::map<Letter, Delivery> at_hand_;      // between two stages of this rank
};

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

inline bool travel_alike(const std::vector<Sent>& a, const std::vector<Sent>& b) {
  return std::ranges::equal(a, b, [](const Sent& x, const Sent& y) {
    return x.before == y.before && x.after == y.after && x.order == y.order && x.tracked == y.tracked;
  });
}

}  // namespace detail

inline void Exchange::begin(const Schedule& schedule, std::vector<Signature> signatures, Mail::Knows gradients) {
  at_hand_.clear();  // of a step that failed
  signatures_ = std::move(signatures);
  mail_.begin(schedule, [this, gradients = std::move(gradients)](const Letter& letter) -> const std::vector<Sent>* {
    if (letter.kind == Kind::B) return gradients(letter);
    const auto found = known_.find(key(letter));
    return found == known_.end() ? nullptr : &found->second;
  });
}

inline void Exchange::give(const Letter& letter, Delivery delivery) {
  if (rank_of_stage_[letter.receiver()] == rank_) {
    at_hand_[letter] = std::move(delivery);
    return;
  }
  bool introduce = false;
  if (letter.kind == Kind::F) {
    const auto [way, is_new] = known_.try_emplace(key(letter), delivery.sent);
    introduce = is_new;
    require(is_new || detail::travel_alike(way->second, delivery.sent), "pipeline",
            "the outputs of stage {} have other sizes or layouts than those of a microbatch of equal inputs had", letter.from);
  }
  mail_.send(letter, delivery.tensors, delivery.sent, introduce);
}

inline Delivery Exchange::take(const Letter& letter) {
  if (const auto found = at_hand_.find(letter); found != at_hand_.end()) {
    auto result = std::move(found->second);
    at_hand_.erase(found);
    return result;
  }
  auto [tensors, sent] = mail_.take(letter);
  if (letter.kind == Kind::F) known_.try_emplace(key(letter), sent);
  return {std::move(tensors), std::move(sent)};
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
