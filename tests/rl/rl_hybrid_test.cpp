// One actor in two layouts: which bytes its weights take between them, that they are the same to the bit, and that it says the same.
#include "tests/support/generate_support.hpp"

#include <dtensor/rl/hybrid.hpp>

using namespace dtensor;
using namespace dtensor::test;
using rl::WorkerGroup;

namespace {

// Two layers of which every rank along tp has a part: 64 * 32 * 2 numbers of 8 bytes.
struct HybridPair : torch::nn::Module {
  explicit HybridPair(bool first = true, bool second = true) {
    const auto layer = [](int64_t in, int64_t out) { return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)); };
    if (first) register_module("up", layer(32, 64));
    if (second) register_module("down", layer(64, 32));
    to(torch::kDouble);
  }
};
constexpr int64_t kHybridBytes = 64 * 32 * 2 * 8;
const Plan kHybridPlan{{"up.weight", {{"tp", shard(0)}}, true}, {"down.weight", {{"tp", shard(1)}}, true}};

std::shared_ptr<HybridPair> hybrid_pair(const DeviceMesh& mesh, uint64_t seed, bool first = true, bool second = true) {
  return on(mesh, [&] {
    torch::manual_seed(seed);
    auto pair = std::make_shared<HybridPair>(first, second);
    parallelize_module(*pair, mesh, kHybridPlan);
    return pair;
  });
}

// The actor as it trains on t ranks along tp and p along pp, in p stages.
std::vector<std::shared_ptr<HybridPair>> stages_on(const DeviceMesh& mesh) {
  if (mesh.size(mesh.dim("pp")) == 1) return {hybrid_pair(mesh.slice("pp", 0), 5)};
  return {hybrid_pair(mesh.slice("pp", 0), 5, true, false), hybrid_pair(mesh.slice("pp", 1), 6, false, true)};
}

generate::NamedWeights weights_of(const std::vector<std::shared_ptr<HybridPair>>& stages) {
  generate::NamedWeights all;
  for (const auto& stage : stages) all.merge(generate::named_weights(*stage));
  return all;
}

void require_equal_weights(const generate::NamedWeights& got, const generate::NamedWeights& expected, const DeviceMesh& everyone) {
  const NoSpmd plain;
  const auto whole = [&](const at::Tensor& x) { return full_tensor(redistribute(x.detach(), everyone, {replicate()})); };
  for (const auto& [name, x] : got) {
    const auto a = whole(x).contiguous(), b = whole(expected.at(name)).contiguous();
    const auto bytes = static_cast<size_t>(a.numel()) * a.element_size();
    require(std::memcmp(a.data_ptr(), b.data_ptr(), bytes) == 0, "test", "{} differs", name);
  }
}

// Bytes that this rank has sent since.
int64_t sent_by(const CommDebugMode& counted) { return counted.bytes(comm::Collective::all_to_all); }

// Numbers of one tensor in some places: `every` numbers one is changed.
void change_weights(const generate::NamedWeights& weights, int64_t every, double by) {
  const torch::NoGradGuard no_grad;
  const NoSpmd plain;
  for (const auto& [name, x] : weights) {
    if (DTensor(x).is_absent()) continue;
    auto local = DTensor(x.detach()).to_local();
    local.add_(torch::arange(local.numel()).reshape(local.sizes()).remainder(every).eq(0).to(local.scalar_type()), by);
  }
}

}  // namespace

TEST_CASE("rl hybrid: changed bytes are written down and put in place", "[rl]") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 400; ++round) {
    std::vector<uint8_t> old(random() % 300), now;
    for (auto& byte : old) byte = static_cast<uint8_t>(random());
    now = old;
    const auto changes = now.empty() ? 0 : random() % (round % 3 == 0 ? 4 : now.size() + 1);
    for (uint64_t i = 0; i < changes; ++i) now[random() % now.size()] = static_cast<uint8_t>(random());
    std::vector<uint8_t> told{7};
    rl::append_changes(round % 7 == 0 ? nullptr : old.data(), now.data(), now.size(), told);
    REQUIRE(told.size() <= now.size() + 2);
    const auto* const end = rl::apply_changes(told.data() + 1, told.data() + told.size(), old.data(), old.size());
    REQUIRE(end == told.data() + told.size());
    REQUIRE(old == now);
  }
  const std::vector<uint8_t> zeros(100'000);
  auto one = zeros;
  one[77'000] = 1;
  std::vector<uint8_t> told;
  rl::append_changes(zeros.data(), one.data(), one.size(), told);
  CHECK(told.size() < 12);
  auto target = zeros;
  CHECK_NOTHROW(refuses("of 100", [&] { rl::apply_changes(told.data(), told.data() + told.size(), target.data(), 100); }));
  told.resize(5);
  CHECK_NOTHROW(refuses("rl::apply_changes", [&] { rl::apply_changes(told.data(), told.data() + 5, target.data(), target.size()); }));
}

TEST_CASE("rl hybrid: bytes between the layouts are those of the formula", "[rl]") {
  struct Case {
    int64_t t, p, tg;
  };
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto& [t, p, tg] : {Case{4, 1, 2}, {4, 1, 1}, {2, 2, 2}, {2, 2, 1}, {4, 1, 4}}) {
      if (transport != "threads" && tg == 1) continue;
      CAPTURE(transport, t, p, tg);
      const auto expected = kHybridBytes * (t * p - tg) / (tg * t * p);  // pg = 1
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&, t = t, p = p, tg = tg](World& world) {
            const auto training = init_device_mesh(c10::kCPU, {p, t}, {"pp", "tp"}), everyone = init_device_mesh(c10::kCPU, {4}, {"all"});
            const auto stages = stages_on(training);
            const auto generating = rl::generation_mesh(training, tg);
            require(generating.size(1) == tg && generating.size() == 4, "test", "got {}", generating.str());
            const auto copy = hybrid_pair(generating, 9);
            rl::WeightSync sync(weights_of(stages), *copy);
            const CommDebugMode counted;
            const auto counts = sync.run();
            require(counts.received == expected && counts.lacking == expected, "test", "{} bytes came; expected {}", counts.received,
                    expected);
            require(sent_by(counted) == expected && counts.sent == expected, "test", "{} bytes went", sent_by(counted));
            require_equal_weights(generate::named_weights(*copy), weights_of(stages), everyone);
            if (world.rank() == 0 && transport == "threads")
              std::printf("rl hybrid: t=%ld p=%ld tg=%ld: each rank received %ld of %ld bytes\n", static_cast<long>(t),
                          static_cast<long>(p), static_cast<long>(tg), static_cast<long>(counts.received), static_cast<long>(kHybridBytes));
          },
          transport));
    }
  }
}

TEST_CASE("rl hybrid: only changed bytes are sent and the weights are the same to the bit", "[rl]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
      CAPTURE(transport, c10::toString(dtype));
      REQUIRE_NOTHROW(on_ranks(
          5,
          [&](World& world) {
            const DeviceMesh everyone(c10::kCPU, {0, 1, 2, 3, 4}, {5}, {"all"}), training(c10::kCPU, {0, 1}, {2}, {"tp"}),
                generating(c10::kCPU, {1, 2, 3}, {3}, {"tp"});
            const auto from = hybrid_pair(training, 1), to = hybrid_pair(generating, 2);
            on(training, [&] { from->to(dtype); });
            on(generating, [&] { to->to(dtype); });
            const auto weights = generate::named_weights(*from);
            rl::WeightSync sync(weights, *to, {.changes_only = true, .bucket_bytes = 20'000});
            const auto whole = sync.run();
            require(whole.received <= whole.lacking + 100 && whole.received >= whole.lacking, "test", "{} bytes came", whole.received);
            require_equal_weights(generate::named_weights(*to), weights, everyone);
            change_weights(weights, 50, 0.5);
            const auto some = sync.run();
            require_equal_weights(generate::named_weights(*to), weights, everyone);
            const bool gets = world.rank() == 2 || world.rank() == 3;
            require(gets == (some.lacking > 0) || world.rank() == 1, "test", "{} bytes are lacking", some.lacking);
            require(some.received * 12 <= some.lacking, "test", "{} bytes came of {}", some.received, some.lacking);
            const auto none = sync.run();
            require(none.received <= 100 && none.lacking == some.lacking, "test", "{} bytes came for no change", none.received);
            if (world.rank() == 0) change_weights({{"up.weight", weights.at("up.weight")}}, 1, 0.25);  // all numbers of one part
            const auto part = sync.run();
            require_equal_weights(generate::named_weights(*to), weights, everyone);
            require(part.received <= part.lacking + 100, "test", "{} bytes came", part.received);
            require(world.rank() != 4 || (whole.received + whole.sent + part.sent) == 0, "test", "a rank without a part has communicated");
            if (world.rank() == 3 && transport == "threads")
              std::printf("rl hybrid: %s, 2 %% of numbers changed: %ld of %ld bytes\n", c10::toString(dtype),
                          static_cast<long>(some.received), static_cast<long>(some.lacking));
          },
          transport));
    }
  }
}

TEST_CASE("rl hybrid: weights that somebody else has written to are noticed", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World& world) {
    const DeviceMesh first(c10::kCPU, {0}, {1}, {"tp"}), second(c10::kCPU, {1}, {1}, {"tp"});
    const auto from = hybrid_pair(first, 1), to = hybrid_pair(second, 2);
    rl::WeightSync sync(*from, *to, {.changes_only = true});
    sync.run();
    change_weights(generate::named_weights(*to), 60, 1);
    change_weights(generate::named_weights(*from), 50, 1);
    if (world.rank() == 1) refuses("the weights with the changes of rank 0 are not that rank's", [&] { sync.run(); });
    else sync.run();
    sync.forget();
    sync.run();
    require_equal_weights(generate::named_weights(*to), generate::named_weights(*from), init_device_mesh(c10::kCPU, {2}, {"all"}));
    HybridPair half(true, false);
    refuses("there are no weights for down.weight", [&] { rl::WeightSync(half, *to); });
  }));
}

TEST_CASE("rl hybrid: an actor that trains in one layout generates in another what one device does", "[rl]") {
  const auto prompts = some_prompts(4);
  const generate::Settings settings{.temperature = 0.8, .max_tokens = 8, .seed = 3, .n = 2};
  const auto train = [](SmallText& model) {
    torch::optim::SGD sgd(model.parameters(), 0.01);
    model.forward(torch::arange(24, torch::kLong).remainder(kVocabulary).reshape({4, 6})).square().mean().backward();
    sgd.step();
  };
  SmallText alone;
  train(alone);
  generate::Engine expected_engine(alone);
  const auto expected = expected_engine.generate(prompts, settings);
  const auto check = [&](const DeviceMesh& training, const DeviceMesh& generating, bool sharded, bool changes_only) {
    std::shared_ptr<SmallText> model, copy;
    WorkerGroup actor("actor", training, [&] { return model = std::make_shared<SmallText>(); });
    if (sharded) fully_shard(*model, training);
    else on(training, [&] { parallelize_module(*model, training, automatic_plan(*model)); });
    WorkerGroup rollout("rollout", generating, [&] { return copy = std::make_shared<SmallText>(99); });
    on(generating, [&] { parallelize_module(*copy, generating, automatic_plan(*copy)); });
    rl::HybridEngine hybrid(*model, rollout, *copy, {.sync = {.changes_only = changes_only}});
    actor.run({.name = "update"}, {}, [&](const rl::Batch&) { train(*model); });
    hybrid.release();
    if (generating.contains_this_rank())
      require(DTensor(copy->parameters()[0].detach()).to_local().storage().nbytes() == 0, "test", "memory is held");
    hybrid.update(1);
    rollout.run({.name = "generate"}, {}, [&](const rl::Batch&) {
      const auto got = hybrid.engine().generate(prompts, settings);
      for (size_t i = 0; i < got.size(); ++i) {
        for (size_t k = 0; k < 2; ++k) {
          require_same(got[i].outputs[k], expected[i].outputs[k], fmt::format("prompt {}, output {}", i, k));
          require(got[i].outputs[k].versions.back() == 1, "test", "other weights");
        }
      }
    });
    if (!generating.contains_this_rank()) refuses("this rank does not generate", [&] { hybrid.engine(); });
  };
  for (const bool changes_only : {false, true}) {
    CAPTURE(changes_only);
    REQUIRE_NOTHROW(on_ranks(4, [&](World&) {
      const auto training = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"}), all = init_device_mesh(c10::kCPU, {4}, {"dp"});
      check(training, rl::generation_mesh(training, 1), false, changes_only);
      check(training, rl::generation_mesh(training, 2), false, changes_only);
      check(all, training, true, changes_only);
      check(DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"}), DeviceMesh(c10::kCPU, {2, 3}, {1, 2}, {"dp", "tp"}), true, changes_only);
    }));
  }
}
