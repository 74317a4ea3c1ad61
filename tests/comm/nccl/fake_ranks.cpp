#include "tests/comm/nccl/fake_ranks.hpp"

#include "src/comm/rendezvous/rendezvous.hpp"

#include <ATen/Parallel.h>

#include <thread>

namespace dtensor_tests {

using namespace dtensor::comm;
using dtensor::World;

std::vector<std::string> run_gpus(int ranks, const std::function<void(World&)>& body, int deadline_ms) {
  auto listener = std::make_shared<Listener>("127.0.0.1", 0);
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      GlooOptions options;
      options.rank = rank, options.size = ranks, options.port = listener->port(), options.deadline = Milliseconds(deadline_ms);
      try {
        auto host =
            ranks == 1 ? std::move(make_threads_transports(1).front()) : make_gloo_transport(options, rank == 0 ? listener : nullptr);
        host->set_deadline(options.deadline);
        auto transport = make_nccl_transport(std::move(host), rank);
        auto& reach = *transport;
        World world(std::move(transport));
        World::Use use(world);
        try {
          body(world);
        } catch (const c10::Error& error) {
          errors[rank] = error.what_without_backtrace();
          reach.leave(errors[rank]);
        }
      } catch (const c10::Error& error) {
        errors[rank] = error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::string first_error(const std::vector<std::string>& errors) {
  for (const auto& error : errors) {
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace dtensor_tests
