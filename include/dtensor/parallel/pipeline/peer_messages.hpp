// The messages of a rank of a pipeline: what it sends to each other rank, and what it is sent, which it asks for ahead of time.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>
#include <dtensor/parallel/pipeline/stage.hpp>

#include <functional>
#include <list>
#include <map>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// What goes from stage `from` to stage `to` of a microbatch (F), or the gradients that come back (B).
struct Message {
  Kind kind = Kind::F;
  int from = 0, to = 0, microbatch = 0;
  int receiver() const { return kind == Kind::F ? to : from; }
  auto operator<=>(const Message&) const = default;
};
constexpr int kBeforeAll = -1;  // in place of a microbatch: tied parameters, at the begin of a step

// What rank `sender` of the schedule sends to rank `receiver`, in this order.
std::vector<Message> messages(const Schedule& schedule, const std::vector<Way>& ways, int sender, int receiver);

// Both ways between this rank and the others of the pipeline.
class PeerMessages {
 public:
  // Every rank makes it. `meshes` are those of the schedule's ranks, of which this one is `rank`.
  PeerMessages(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank);

  // How the values of a message travel, if that is known: nothing needs to be asked for then.
  using Knows = std::function<const std::vector<Sent>*(const Message&)>;
  // How gradients come, of which the numbers say for each whether it does.
  using Told = std::function<std::vector<Sent>(const Message&, const Numbers&)>;

  // A new step.
  void begin(const Schedule& schedule, Knows knows, Told told);

  // Sends; the tensors lie as `sent` says, before (F) or after (B). With `introduce` the receiver is told that first, of gradients only
  // which there are.
  void send(const Message& message, const TensorVector& tensors, const std::vector<Sent>& sent, bool introduce);

  // Waits for a message, and asks for the next ones. The tensors, and how they came.
  std::pair<TensorVector, std::vector<Sent>> take(const Message& message);

  // Waits until all that was sent has gone.
  void finish();

 private:
  struct Peer {
    std::shared_ptr<MeshChannel> out, in;
    std::vector<Message> expected;
    size_t asked = 0;
    std::map<Message, Arriving> arrived;
  };
  static constexpr size_t kAhead = 2;  // messages that are asked for before they are needed

  void ask(Peer& peer, const Message& message, const std::vector<Sent>& sent);
  void ask_ahead(Peer& peer);
  void forget_gone();

  std::vector<Way> ways_;
  std::vector<DeviceMesh> meshes_;
  std::vector<int> rank_of_stage_;
  int rank_;
  Knows knows_;
  Told told_;
  std::map<int, Peer> peers_;           // by the other rank
  std::list<comm::WorkPtr> under_way_;  // of sends
};

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<Message> messages(const Schedule& schedule, const std::vector<Way>& ways, int sender, int receiver) {
  const auto& rank_of = schedule.rank_of_stage;
  std::vector<Message> result;
  for (const auto& way : ways) {
    if (!way.tied.empty() && rank_of[way.from] == sender && rank_of[way.to] == receiver)
      result.push_back({Kind::F, way.from, way.to, kBeforeAll});
  }
  for (const auto& action : schedule.ranks[sender]) {
    for (const auto& part : Parts(action)) {
      if (part.kind == Kind::W || !is_compute(part.kind)) continue;
      const bool forward = part.kind == Kind::F;
      for (const auto& way : ways) {
        const int here = forward ? way.from : way.to, there = forward ? way.to : way.from;
        if (here != part.stage || rank_of[there] != receiver || !goes_along(way, schedule, part.microbatch)) continue;
        if (forward && way.carries_nothing()) continue;
        result.push_back({forward ? Kind::F : Kind::B, way.from, way.to, part.microbatch});
      }
    }
  }
  return result;
}

inline PeerMessages::PeerMessages(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank)
    : ways_(std::move(ways)), meshes_(std::move(meshes)), rank_of_stage_(schedule.rank_of_stage), rank_(rank) {
  const int ranks = static_cast<int>(meshes_.size());
  for (int a = 0; a < ranks; ++a) {  // all ranks in one order: those that wait for each other to connect have it in common
    for (int b = 0; b < ranks; ++b) {
      if (a == b || (a != rank_ && b != rank_)) continue;
      const bool neighbours = std::ranges::any_of(ways_, [&](const Way& way) {
        const std::pair ends(rank_of_stage_[way.from], rank_of_stage_[way.to]);
        return ends == std::pair(a, b) || ends == std::pair(b, a);
      });
      if (!neighbours) continue;
      auto& peer = peers_[a == rank_ ? b : a];
      (a == rank_ ? peer.out : peer.in) = std::make_shared<MeshChannel>(meshes_[a], meshes_[b]);
    }
  }
}

inline void PeerMessages::begin(const Schedule& schedule, Knows knows, Told told) {
  knows_ = std::move(knows);
  told_ = std::move(told);
  for (auto& [other, peer] : peers_) {
    peer.expected = messages(schedule, ways_, other, rank_);
    peer.asked = 0;
    peer.arrived.clear();
    ask_ahead(peer);
  }
}

inline void PeerMessages::send(const Message& message, const TensorVector& tensors, const std::vector<Sent>& sent, bool introduce) {
  forget_gone();
  auto& peer = peers_.at(rank_of_stage_[message.receiver()]);
  const auto add = [&](std::vector<comm::WorkPtr> works) { under_way_.insert(under_way_.end(), works.begin(), works.end()); };
  const bool back = message.kind == Kind::B;
  if (introduce) add(peer.out->send_numbers(back ? detail::which_are_there(tensors) : detail::to_numbers(sent)));
  for (size_t i = 0; i < sent.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const auto &here = back ? sent[i].after : sent[i].before, &there = back ? sent[i].before : sent[i].after;
    add(peer.out->send(detail::local_of(tensors[i], sent[i], *here), here, there));
  }
}

inline void PeerMessages::ask(Peer& peer, const Message& message, const std::vector<Sent>& sent) {
  Arriving arriving{sent, {}, message.kind == Kind::B};
  for (const auto& one : sent) {
    if (arriving.backward && !one.tracked) {
      arriving.locals.emplace_back();
    } else {
      arriving.locals.push_back(arriving.backward ? peer.in->receive(one.after, one.before, one.values)
                                                  : peer.in->receive(one.before, one.after, one.values));
    }
  }
  peer.arrived.emplace(message, std::move(arriving));
  ++peer.asked;
}

inline void PeerMessages::ask_ahead(Peer& peer) {
  while (peer.asked < peer.expected.size() && peer.arrived.size() < kAhead) {
    const auto& message = peer.expected[peer.asked];
    const auto* sent = knows_(message);
    if (sent == nullptr) return;
    ask(peer, message, *sent);
  }
}

inline std::pair<TensorVector, std::vector<Sent>> PeerMessages::take(const Message& message) {
  const int from = rank_of_stage_[message.kind == Kind::F ? message.from : message.to];
  auto& peer = peers_.at(from);
  while (peer.arrived.count(message) == 0) {
    require(peer.asked < peer.expected.size(), "pipeline", "stage {} waits for microbatch {}, which nobody sends", message.receiver(),
            message.microbatch);
    const auto& next = peer.expected[peer.asked];
    const auto* sent = knows_(next);
    if (sent != nullptr) {
      ask(peer, next, *sent);
    } else if (next.kind == Kind::B) {
      ask(peer, next, told_(next, peer.in->receive_numbers()));
    } else {
      ask(peer, next, detail::read_sent(peer.in->receive_numbers(), meshes_[from], meshes_[rank_]));
    }
  }
  auto found = peer.arrived.extract(message);
  ask_ahead(peer);
  auto tensors = found.mapped().take();
  return {std::move(tensors), std::move(found.mapped().sent)};
}

inline void PeerMessages::forget_gone() {
  under_way_.remove_if([](const comm::WorkPtr& work) { return work->done(); });
}

inline void PeerMessages::finish() {
  for (const auto& work : under_way_) work->wait();
  under_way_.clear();
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
