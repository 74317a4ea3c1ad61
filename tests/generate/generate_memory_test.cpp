// Many requests: the bound on pages is kept, none is left behind, and memory does not grow.
#include "tests/support/generate_support.hpp"
#include "tests/support/sanitizers.hpp"

#include <unistd.h>

#include <deque>
#include <fstream>

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Finish;

namespace {

constexpr int64_t kBlocksOfFew = 20;

// Bytes that the process has in memory.
int64_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Requests one after another, as many under way as 60; some are cancelled.
struct Traffic {
  explicit Traffic(Engine& to) : engine(to) {}

  void run(int64_t requests) {
    for (int64_t i = 0; i < requests; ++i) {
      const auto length = [&](int64_t most) {
        return std::clamp<int64_t>(static_cast<int64_t>(std::lognormal_distribution<double>(1.2, 1)(random)), 1, most);
      };
      generate::Request request{.prompt = prompts[random() % prompts.size()]};
      request.prompt.resize(std::min<size_t>(request.prompt.size(), length(40) * 4));
      request.settings = {.max_tokens = length(40), .seed = random(), .n = random() % 8 == 0 ? 3 : 1};
      request.priority = static_cast<int64_t>(random() % 3);
      under_way.push_back(engine.submit(std::move(request)));
      if (random() % 10 == 0) under_way[random() % under_way.size()].cancel();
      while (under_way.size() > 60) end_first();
    }
    while (!under_way.empty()) end_first();
  }

  void end_first() {
    for (const auto& output : under_way.front().get().outputs) {
      tokens += static_cast<int64_t>(output.tokens.size());
      cancelled += output.finish == Finish::cancelled ? 1 : 0;
    }
    under_way.pop_front();
  }

  Engine& engine;
  std::mt19937_64 random{12};
  std::vector<generate::Tokens> prompts = some_prompts(200, 4);
  std::deque<generate::Future> under_way;
  int64_t tokens = 0, cancelled = 0;
};

}  // namespace

TEST_CASE("generate memory: ten thousand requests of mixed lengths leave nothing behind", "[generate]") {
  SmallText model;
  const auto bytes = kBlocksOfFew * Engine(model).runner().bytes_of_block();
  Engine engine(model, {.cache_bytes = bytes, .max_requests = 24, .tokens_per_step = 64});
  REQUIRE(engine.cache_bytes() <= bytes);
  Traffic traffic(engine);
  traffic.run(4000);
  const auto before = resident_bytes();
  traffic.run(6000);
  const auto grown = resident_bytes() - before;
  const auto counts = engine.counts();
  CAPTURE(traffic.tokens, traffic.cancelled, grown, counts.preemptions, counts.most_blocks, counts.blocks_found, counts.passes);
  CHECK(engine.idle());
  CHECK(engine.blocks() == kBlocksOfFew);
  CHECK(engine.blocks_unused() == engine.blocks());
  CHECK(counts.most_blocks > kBlocksOfFew / 2);
  CHECK(counts.most_blocks <= kBlocksOfFew);
  CHECK(counts.preemptions > 100);
  CHECK(counts.blocks_found > 100);
  CHECK(traffic.cancelled > 100);
  CHECK((kSanitized || grown < 3 << 20));  // a sanitizer keeps what is freed
}
