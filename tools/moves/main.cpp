// moves: random moves of tensors between random meshes, against their definition.
#include "tools/moves/check.hpp"

#include <dtensor/base/say.hpp>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <chrono>

int main(int argc, char** argv) {
  int64_t pairs = 1000;
  uint64_t seed = 0;
  dtensor::LaunchOptions options;
  options.ranks = 4;
  options.transport = "threads";
  CLI::App app(
      "moves: moves tensors between random meshes of some ranks, and compares values, gradients and bytes with what every rank holds and "
      "lacks");
  app.add_option("--pairs", pairs, "of layouts")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ranks", options.ranks, "threads")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--transport", options.transport, "threads, shm or gloo")->capture_default_str();
  app.add_option("--seed", seed, "of the first pair")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto start = std::chrono::steady_clock::now();
  try {
    dtensor::launch(options, [&](dtensor::World&) {
      for (int64_t i = 0; i < pairs; ++i) {
        std::mt19937_64 random(seed + static_cast<uint64_t>(i));
        try {
          dtensor::moves::check(dtensor::moves::random_pair(random));
        } catch (const dtensor::Error& error) {
          dtensor::fail("moves", "with --seed {} --pairs 1: {}", seed + static_cast<uint64_t>(i), error.what_without_backtrace());
        }
      }
    });
  } catch (const std::exception& error) {
    const auto* said = dynamic_cast<const dtensor::Error*>(&error);
    dtensor::detail::say("{}\n", said ? said->what_without_backtrace() : error.what());
    return 1;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{} pairs of layouts on {} ranks ({}), {:.1f} s: values, gradients and bytes as they should be\n", pairs, options.ranks,
             options.transport, seconds);
}
