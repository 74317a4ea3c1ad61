// The messages of a rank of a pipeline: what it sends to each other rank, and what it is sent, which it asks for ahead of time.
#pragma once

#include <dtensor/parallel/pipeline/schedule.hpp>
#include <dtensor/parallel/pipeline/stage_values.hpp>

#include <functional>
#include <list>
#include <map>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Inputs (F) or gradients of outputs (B) for a stage, of a microbatch.
struct Letter {
  Kind kind = Kind::F;
  int stage = 0, microbatch = 0;
  auto operator<=>(const Letter&) const = default;
};

// The letters that rank `from` of the schedule writes to rank `to`, in this order.
std::vector<Letter> letters(const Schedule& schedule, int from, int to);

// Both ways between this rank and the others of the pipeline.
class Mail {
 public:
  // Every rank makes it. `meshes` are those of the schedule's ranks, of which this one is `rank`.
  Mail(const Schedule& schedule, std::vector<DeviceMesh> meshes, int rank);

  // How the values of a letter travel, if that is known: nothing needs to be asked for then.
  using Knows = std::function<const std::vector<Sent>*(const Letter&)>;

  // A new step.
  void begin(const Schedule& schedule, Knows knows);

  // Sends; the tensors lie as `sent` says, before (F) or after (B). With `introduce` the receiver is told that first.
  void send(const Letter& letter, const TensorVector& tensors, const std::vector<Sent>& sent, bool introduce);

  // Waits for a letter, and asks for the next ones. The tensors, and how they came.
  std::pair<TensorVector, std::vector<Sent>> take(const Letter& letter);

  // Waits until all that was sent has gone.
  void finish();

 private:
  struct Post {
    std::shared_ptr<MeshChannel> out, in;
    std::vector<Letter> expected;
    size_t asked = 0;
    std::map<Letter, Arriving> arrived;
  };
  static constexpr size_t kAhead = 2;  // letters that are asked for before they are needed

  void ask(Post& post, const Letter& letter, const std::vector<Sent>& sent);
  void ask_ahead(Post& post);
  void forget_gone();

  std::vector<DeviceMesh> meshes_;
  std::vector<int> rank_of_stage_;
  int rank_;
  Knows knows_;
  std::map<int, Post> posts_;           // by the other rank
  std::list<comm::WorkPtr> under_way_;  // of sends
};

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<Letter> letters(const Schedule& schedule, int from, int to) {
  std::vector<Letter> result;
  const auto add = [&](Kind kind, int stage, int microbatch) {
    if (stage >= 0 && stage < schedule.stages() && schedule.rank_of_stage[stage] == to) result.push_back({kind, stage, microbatch});
  };
  for (const auto& action : schedule.ranks[from]) {
    for (const auto& part : Parts(action)) {
      if (part.kind == Kind::F) add(Kind::F, part.stage + 1, part.microbatch);
      if (part.kind == Kind::B || part.kind == Kind::I) add(Kind::B, part.stage - 1, part.microbatch);
    }
  }
  return result;
}

inline Mail::Mail(const Schedule& schedule, std::vector<DeviceMesh> meshes, int rank)
    : meshes_(std::move(meshes)), rank_of_stage_(schedule.rank_of_stage), rank_(rank) {
  const int ranks = static_cast<int>(meshes_.size());
  for (int a = 0; a < ranks; ++a) {  // all ranks in one order: those that wait for each other to connect have it in common
    for (int b = 0; b < ranks; ++b) {
      if (a == b || (a != rank_ && b != rank_)) continue;
      bool neighbours = false;
      for (int s = 0; s + 1 < schedule.stages(); ++s) {
        const std::pair ends(rank_of_stage_[s], rank_of_stage_[s + 1]);
        neighbours |= ends == std::pair(a, b) || ends == std::pair(b, a);
      }
      if (!neighbours) continue;
      auto& post = posts_[a == rank_ ? b : a];
      (a == rank_ ? post.out : post.in) = std::make_shared<MeshChannel>(meshes_[a], meshes_[b]);
    }
  }
}

inline void Mail::begin(const Schedule& schedule, Knows knows) {
  knows_ = std::move(knows);
  for (auto& [other, post] : posts_) {
    post.expected = letters(schedule, other, rank_);
    post.asked = 0;
    post.arrived.clear();
    ask_ahead(post);
  }
}

inline void Mail::send(const Letter& letter, const TensorVector& tensors, const std::vector<Sent>& sent, bool introduce) {
  forget_gone();
  auto& post = posts_.at(rank_of_stage_[letter.stage]);
  const auto add = [&](std::vector<comm::WorkPtr> works) { under_way_.insert(under_way_.end(), works.begin(), works.end()); };
  if (introduce) add(post.out->send_numbers(detail::to_numbers(sent)));
  for (size_t i = 0; i < sent.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const bool back = letter.kind == Kind::B;
    const auto &here = back ? sent[i].after : sent[i].before, &there = back ? sent[i].before : sent[i].after;
    add(post.out->send(detail::local_of(tensors[i], sent[i], *here), here, there));
  }
}

inline void Mail::ask(Post& post, const Letter& letter, const std::vector<Sent>& sent) {
  Arriving arriving{sent, {}, letter.kind == Kind::B};
  for (const auto& one : sent) {
    if (arriving.backward && !one.tracked) {
      arriving.locals.emplace_back();
    } else {
      arriving.locals.push_back(arriving.backward ? post.in->receive(one.after, one.before) : post.in->receive(one.before, one.after));
    }
  }
  post.arrived.emplace(letter, std::move(arriving));
  ++post.asked;
}

inline void Mail::ask_ahead(Post& post) {
  while (post.asked < post.expected.size() && post.arrived.size() < kAhead) {
    const auto& letter = post.expected[post.asked];
    const auto* sent = knows_(letter);
    if (sent == nullptr) return;
    ask(post, letter, *sent);
  }
}

inline std::pair<TensorVector, std::vector<Sent>> Mail::take(const Letter& letter) {
  const int from = rank_of_stage_[letter.kind == Kind::F ? letter.stage - 1 : letter.stage + 1];
  auto& post = posts_.at(from);
  while (post.arrived.count(letter) == 0) {
    require(post.asked < post.expected.size(), "pipeline", "stage {} waits for microbatch {}, which nobody sends", letter.stage,
            letter.microbatch);
    const auto& next = post.expected[post.asked];
    const auto* sent = knows_(next);
    if (sent != nullptr) {
      ask(post, next, *sent);
    } else {
      require(next.kind == Kind::F, "pipeline", "gradients come for microbatch {} of stage {} before its forward", next.microbatch,
              next.stage);
      ask(post, next, detail::read_sent(post.in->receive_numbers(), meshes_[from], meshes_[rank_]));
    }
  }
  auto found = post.arrived.extract(letter);
  ask_ahead(post);
  auto tensors = found.mapped().take();
  return {std::move(tensors), std::move(found.mapped().sent)};
}

inline void Mail::forget_gone() {
  under_way_.remove_if([](const comm::WorkPtr& work) { return work->done(); });
}

inline void Mail::finish() {
  for (const auto& work : under_way_) work->wait();
  under_way_.clear();
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
