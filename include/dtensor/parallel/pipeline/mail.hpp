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
struct Letter {
  Kind kind = Kind::F;
  int from = 0, to = 0, microbatch = 0;
  int receiver() const { return kind == Kind::F ? to : from; }
  auto operator<=>(const Letter&) const = default;
};
constexpr int kBeforeAll = -1;  // in place of a microbatch: tied parameters, at the begin of a step

// The letters that rank `sender` of the schedule writes to rank `receiver`, in this order.
std::vector<Letter> letters(const Schedule& schedule, const std::vector<Way>& ways, int sender, int receiver);

// Both ways between this rank and the others of the pipeline.
class Mail {
 public:
  // Every rank makes it. `meshes` are those of the schedule's ranks, of which this one is `rank`.
  Mail(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank);

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

  std::vector<Way> ways_;
  std::vector<DeviceMesh> meshes_;
  std::vector<int> rank_of_stage_;
  int rank_;
  Knows knows_;
  std::map<int, Post> posts_;           // by the other rank
  std::list<comm::WorkPtr> under_way_;  // of sends
};

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<Letter> letters(const Schedule& schedule, const std::vector<Way>& ways, int sender, int receiver) {
  const auto& rank_of = schedule.rank_of_stage;
  std::vector<Letter> result;
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

inline Mail::Mail(const Schedule& schedule, std::vector<Way> ways, std::vector<DeviceMesh> meshes, int rank)
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
      auto& post = posts_[a == rank_ ? b : a];
      (a == rank_ ? post.out : post.in) = std::make_shared<MeshChannel>(meshes_[a], meshes_[b]);
    }
  }
}

inline void Mail::begin(const Schedule& schedule, Knows knows) {
  knows_ = std::move(knows);
  for (auto& [other, post] : posts_) {
    post.expected = letters(schedule, ways_, other, rank_);
    post.asked = 0;
    post.arrived.clear();
    ask_ahead(post);
  }
}

inline void Mail::send(const Letter& letter, const TensorVector& tensors, const std::vector<Sent>& sent, bool introduce) {
  forget_gone();
  auto& post = posts_.at(rank_of_stage_[letter.receiver()]);
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
      arriving.locals.push_back(arriving.backward ? post.in->receive(one.after, one.before, one.values)
                                                  : post.in->receive(one.before, one.after, one.values));
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
  const int from = rank_of_stage_[letter.kind == Kind::F ? letter.from : letter.to];
  auto& post = posts_.at(from);
  while (post.arrived.count(letter) == 0) {
    require(post.asked < post.expected.size(), "pipeline", "stage {} waits for microbatch {}, which nobody sends", letter.receiver(),
            letter.microbatch);
    const auto& next = post.expected[post.asked];
    const auto* sent = knows_(next);
    if (sent != nullptr) {
      ask(post, next, *sent);
    } else {
      require(next.kind == Kind::F, "pipeline", "gradients come for microbatch {} of stage {} before its forward", next.microbatch,
              next.from);
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
