// A transport between threads over a link of little bandwidth: what an all_to_all sends takes so long, one message after the other, while
// ranks compute. It tells how long a rank had to wait.
#pragma once

#include <dtensor/comm/transport.hpp>
#include <dtensor/mesh/world.hpp>

#include <algorithm>
#include <functional>
#include <thread>

namespace dtensor::test {

using LinkClock = std::chrono::steady_clock;

// Of one rank.
struct Link {
  double seconds_per_byte = 0;
  LinkClock::time_point busy_until{};
  std::vector<double> waits = {};  // seconds that the rank slept for each message on the link

  LinkClock::time_point send(double bytes) {
    const std::chrono::duration<double> takes(bytes * seconds_per_byte);
    busy_until = std::max(busy_until, LinkClock::now()) + std::chrono::duration_cast<LinkClock::duration>(takes);
    return busy_until;
  }
};

class LinkWork final : public comm::Work {
 public:
  LinkWork(comm::WorkPtr inner, Link& link, LinkClock::time_point arrives) : inner_(std::move(inner)), link_(link), arrives_(arrives) {}
  void wait() override {
    if (inner_) inner_->wait();
    const std::chrono::duration<double> left = arrives_ - LinkClock::now();
    std::this_thread::sleep_until(arrives_);
    if (!std::exchange(waited_, true)) link_.waits.push_back(std::max(0.0, left.count()));
  }
  bool done() override { return (!inner_ || inner_->done()) && LinkClock::now() >= arrives_; }

 private:
  comm::WorkPtr inner_;
  Link& link_;
  LinkClock::time_point arrives_;
  bool waited_ = false;
};

class LinkCommunicator final : public comm::Communicator {
 public:
  LinkCommunicator(const std::string& name, std::shared_ptr<comm::Communicator> inner, Link& link)
      : Communicator(name, inner->ranks(), inner->rank()), inner_(std::move(inner)), link_(link) {}

  comm::Async do_all_reduce(const Call& c, const at::Tensor& x, at::Tensor y) override { return inner_->do_all_reduce(c, x, std::move(y)); }
  comm::Async do_all_gather(const Call& c, const at::Tensor& x, comm::Counts counts, at::Tensor y) override {
    return inner_->do_all_gather(c, x, counts, std::move(y));
  }
  comm::Async do_reduce_scatter(const Call& c, const at::Tensor& x, comm::Counts counts, at::Tensor y) override {
    return inner_->do_reduce_scatter(c, x, counts, std::move(y));
  }
  comm::Async do_all_to_all(const Call& c, const at::Tensor& x, comm::Counts send, comm::Counts recv) override {
    const auto arrives = link_.send(static_cast<double>(x.numel() * x.element_size()));
    auto result = inner_->do_all_to_all(c, x, send, recv);
    result.work = c10::make_intrusive<LinkWork>(std::move(result.work), link_, arrives);
    return result;
  }
  comm::Async do_broadcast(const Call& c, const at::Tensor& x) override { return inner_->do_broadcast(c, x); }
  comm::Async do_send(const Call& c, const at::Tensor& x) override { return inner_->do_send(c, x); }
  comm::Async do_recv(const Call& c, const at::Tensor& like) override { return inner_->do_recv(c, like); }
  void do_barrier(const Call& c) override { inner_->do_barrier(c); }

 private:
  std::shared_ptr<comm::Communicator> inner_;
  Link& link_;
};

class LinkTransport final : public comm::Transport {
 public:
  LinkTransport(std::unique_ptr<comm::Transport> inner, Link& link) : Transport(*inner), inner_(std::move(inner)), link_(link) {}
  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void leave(const std::string& why) override { inner_->leave(why); }
  std::shared_ptr<comm::Communicator> do_connect(const std::string& name, const std::vector<int>& ranks, int nth) override {
    return std::make_shared<LinkCommunicator>(name, inner_->do_connect(name, ranks, nth), link_);
  }

 private:
  std::unique_ptr<comm::Transport> inner_;
  Link& link_;
};

// Runs `body(world, link)` on each of `ranks` threads, and throws what one of them threw.
inline void on_slow_links(int ranks, double seconds_per_byte, const std::function<void(World&, Link&)>& body) {
  auto transports = comm::make_threads_transports(ranks);
  std::vector<Link> links(ranks, Link{.seconds_per_byte = seconds_per_byte});
  std::vector<std::exception_ptr> failures(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      World world(std::make_unique<LinkTransport>(std::move(transports[r]), links[r]));
      const World::Use use(world);
      try {
        body(world, links[r]);
        world.barrier();
      } catch (const std::exception& error) {
        failures[r] = std::current_exception();
        world.transport().leave(error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

// The waits of passes on two ranks, on each the same messages: of each message that of the rank that waits longer, in the median of the
// passes. A rank that is late makes the other one sleep less for the link, and a busy machine wakes it late: neither the shortest nor the
// longest tells.
struct Waits {
  static constexpr int kPasses = 3;
  std::vector<double> of[kPasses][2] = {};  // by rank

  // On both ranks.
  void take(World& world, Link& link, const std::function<void()>& pass) {
    for (auto& ranks : of) {
      link.waits.clear();
      pass();
      ranks[world.rank()] = link.waits;
      world.barrier();
    }
  }
  std::vector<double> median() const {
    std::vector<double> result;
    for (size_t m = 0; m < of[0][0].size(); ++m) {
      std::vector<double> passes;
      for (const auto& [a, b] : of) passes.push_back(std::max(a.at(m), b.at(m)));
      std::ranges::sort(passes);
      result.push_back(passes[kPasses / 2]);
    }
    return result;
  }
};

}  // namespace dtensor::test
