// The transports between processes, gloo and shm, on one host or several. With shm, a group whose ranks share a host uses shared memory if
// it can; all other groups use TCP.
#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport_kind.hpp>

#include "src/comm/control.hpp"
#include "src/comm/rendezvous/rendezvous.hpp"
#include "src/comm/transports/shared_memory/communicator.hpp"

namespace dtensor::comm {

namespace gloo {

namespace {

class GlooTransport final : public Transport, public Control {
 public:
  GlooTransport(const GlooOptions& options, std::shared_ptr<Listener> listener)
      : rank_(options.rank), size_(options.size), messages_(std::make_shared<MessageWorkers>()) {
    link_ = std::make_shared<Link>(options, std::move(listener), failed_operators(), [&](Rendezvous& rendezvous) {
      arena_ = shared_memory::Arena::meet(rendezvous, rank_, size_, options.shared_memory);
    });
    set_deadline(options.deadline);
    if (arena_->size() < 2) return;
    engine_ = std::make_shared<shared_memory::Engine>(link_, arena_, rank_);
    link_->watch([engine = std::weak_ptr(engine_)] {
      if (auto living = engine.lock()) living->interrupt();
    });
  }

  ~GlooTransport() override {
    link_->shut_down(deadline());
    if (engine_) engine_->stop();
    for (auto& worker : workers_) worker->stop();
    messages_->stop();
  }

  std::string_view name() const override { return !engine_ ? "gloo" : arena_->size() < size_ ? "shm+gloo" : "shm"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  std::shared_ptr<Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) override {
    const int position = position_in(name, ranks, rank_, size_);
    uint64_t id = mix(0, static_cast<uint64_t>(nth));
    for (const char letter : name) id = mix(id, static_cast<uint64_t>(letter));
    for (int rank : ranks) id = mix(id, static_cast<uint64_t>(rank));
    if (engine_ && ranks.size() > 1 && arena_->holds(ranks)) {
      if (auto channel = shared_memory::Channel::open(arena_, id, ranks, position)) {
        return std::make_shared<shared_memory::SharedMemoryCommunicator>(
            name, ranks, position, id, link_, messages_, *this, std::move(channel), engine_,
            std::make_shared<shared_memory::FileSharing>(link_, arena_, ranks, *this));
      }
    }
    workers_.push_back(std::make_shared<Worker>(Worker::Order::one_by_one));
    return std::make_shared<GlooCommunicator>(name, ranks, position, id, link_, workers_.back(), messages_, *this);
  }

  void leave(const std::string& why) override { link_->leave(why); }

  void made(uint64_t stream, uint64_t sequence) override { link_->made(stream, sequence); }
  std::optional<std::string> obstacle(int rank, uint64_t stream, uint64_t sequence) override {
    return link_->obstacle({rank, stream, sequence});
  }
  std::optional<std::string> first_failure(Milliseconds patience) override { return link_->first_failure(patience); }

 private:
  const int rank_, size_;
  std::shared_ptr<Link> link_;
  std::shared_ptr<shared_memory::Arena> arena_;    // the memory shared with other ranks of this host
  std::shared_ptr<shared_memory::Engine> engine_;  // where other ranks share this one's memory
  std::vector<std::shared_ptr<Worker>> workers_;   // one per communicator
  std::shared_ptr<MessageWorkers> messages_;
};

}  // namespace

}  // namespace gloo

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) { return make_gloo_transport(options, nullptr); }

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options, std::shared_ptr<Listener> listener) {
  require(options.size > 0 && options.rank >= 0 && options.rank < options.size, "make_gloo_transport",
          "got rank {} of {}; expected 0 <= rank < size", options.rank, options.size);
  return std::make_unique<gloo::GlooTransport>(options, std::move(listener));
}

namespace {

// Threads that meet as processes would.
TransportKind::MakeRank connected(const ThreadsJob& job, bool shared_memory) {
  if (job.ranks == 1) return transport_kind("threads").threads(job);
  auto listener = std::make_shared<Listener>("127.0.0.1", 0);
  GlooOptions options{.size = job.ranks, .port = listener->port(), .shared_memory = shared_memory, .deadline = job.deadline};
  return [options, listener](int rank) {
    auto mine = options;
    mine.rank = rank;
    return make_gloo_transport(mine, rank == 0 ? listener : nullptr);
  };
}

TransportKind kind_of(const char* name, bool shared_memory) {
  return {.name = name,
          .threads = [=](const ThreadsJob& job) { return connected(job, shared_memory); },
          .process = [=](const ProcessJob& job) {
            auto options = job.meeting;
            options.shared_memory = shared_memory;
            return make_gloo_transport(options, job.listener);
          }};
}

const RegisterTransport over_tcp(kind_of("gloo", false));
const RegisterTransport over_memory(kind_of("shm", true));  // where ranks share a host, gloo elsewhere

}  // namespace

}  // namespace dtensor::comm
