// Ranks that do not do the same: every rank throws, and says which rank and why.
#include "tests/support/generate_support.hpp"

using namespace dtensor;
using namespace dtensor::test;
using generate::Engine;
using generate::Request;
using generate::Settings;

namespace {

const Settings kAlike{.temperature = 0.9, .max_tokens = 8, .seed = 5};

// Runs `body` on dp x tp ranks, over each transport.
void on_each(int64_t dp, int64_t tp, const std::function<void(SmallText&, World&)>& body) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport, dp, tp);
    REQUIRE_NOTHROW(on_ranks(
        static_cast<int>(dp * tp),
        [&](World& world) {
          const auto mesh = init_device_mesh(c10::kCPU, {dp, tp}, {"dp", "tp"});
          const Spmd spmd(mesh);
          SmallText model;
          parallelize_module(model, mesh, automatic_plan(model));
          body(model, world);
        },
        transport));
  }
}

// What `call` throws.
std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (...) {
    return dtensor::detail::text_of(std::current_exception());
  }
  return "nothing";
}

void require_in(const std::string& part, const std::string& text) {
  require(text.find(part) != std::string::npos && text.find("frame #") == std::string::npos, "test", "expected '{}' in '{}'", part, text);
}

}  // namespace

TEST_CASE("generate alike: ranks that ask for other things all throw and name the field", "[generate]") {
  const std::vector<std::pair<std::string, Request>> others{
      {"another prompt", {.prompt = {1, 3}, .settings = kAlike}},
      {"another seed", {.prompt = {1, 2}, .settings = {.max_tokens = 8, .seed = 6}}},
      {"another top_k", {.prompt = {1, 2}, .settings = {.top_k = 4, .max_tokens = 8}}},
      {"another stop", {.prompt = {1, 2}, .settings = {.max_tokens = 8, .stop = {"a"}}}},
      {"another priority", {.prompt = {1, 2}, .settings = kAlike, .priority = 1}}};
  for (const auto& [dp, tp] : {std::pair{1, 2}, {2, 1}}) {
    on_each(dp, tp, [&](SmallText& model, World& world) {
      Engine engine(model);
      for (const auto& [name, other] : others) {
        auto request = other;
        if (world.rank() == 0 && name == "another prompt") request.prompt = {1, 2};
        if (world.rank() == 0 && name == "another seed") request.settings.seed = 5;
        if (world.rank() == 0 && name == "another top_k") request.settings.top_k = 0;
        if (world.rank() == 0 && name == "another stop") request.settings.stop = {"b"};
        if (world.rank() == 0) request.priority = 0;
        auto future = engine.submit(request);
        const auto text = thrown_by([&] { future.get(); });
        require_in("rank 1 of", text);
        require_in(name, text);
      }
      // All failed alike, so they go on.
      require(engine.submit({.prompt = {1, 2}, .settings = kAlike}).get().outputs[0].tokens.size() == 8, "test", "other tokens");
    });
  }
}

TEST_CASE("generate alike: groups that were given other settings all throw", "[generate]") {
  on_each(2, 2, [&](SmallText& model, World& world) {
    Engine engine(model);
    for (const int64_t differs : {2, 3}) {  // a whole group has other settings where both differ
      auto settings = kAlike;
      if (world.rank() >= differs) settings.top_k = 3;
      const auto text = thrown_by([&] { engine.generate({{1, 2}, {3}, {4, 5, 6}}, settings); });
      require_in("another top_k", text);
    }
    require(engine.generate({{1, 2}, {3}}, kAlike)[1].outputs[0].tokens.size() == 8, "test", "other tokens");
  });
}

TEST_CASE("generate alike: a callback that throws in one group ends its request on every rank", "[generate]") {
  on_each(2, 1, [&](SmallText& model, World& world) {
    Engine engine(model);
    int64_t pieces = 0;
    auto bad = engine.submit({.prompt = {1, 2}, .settings = kAlike, .on_piece = [&](const generate::Piece&) {
                                if (world.rank() == 1 && ++pieces == 8) fail("test", "the disk is full");  // at the last token
                              }});
    auto good = engine.submit({.prompt = {3}, .settings = kAlike});
    require(good.get().outputs[0].tokens.size() == 8, "test", "other tokens");
    const auto text = thrown_by([&] { bad.get(); });
    require_in("the disk is full", text);
    if (world.rank() == 0) require_in("failed on rank 1 of", text);
  });
}

TEST_CASE("generate alike: a rank that fails in between ends all futures of all ranks with its error", "[generate]") {
  for (const bool pages : {true, false}) {
    for (const auto& [dp, tp] : {std::pair{1, 2}, {2, 1}, {2, 2}}) {
      CAPTURE(pages);
      on_each(dp, tp, [&](SmallText& model, World& world) {
        int64_t passes = 0;
        const auto forward = [&](const at::Tensor& ids) {
          if (world.rank() == 1 && ++passes == 9) throw std::runtime_error("the memory is lost");
          return pages ? model.forward(ids) : model.forward(torch::cat({ids, ids}, 1)).narrow(1, 0, ids.size(1));
        };
        Engine engine(forward, &model, {});
        require(engine.runner().pages() == pages, "test", "other pages");
        auto first = engine.submit({.prompt = {1, 2, 3}, .settings = kAlike});
        auto second = engine.submit({.prompt = {4}, .settings = kAlike});
        for (auto* future : {&first, &second}) require_in("the memory is lost", thrown_by([&] { future->get(); }));
        require(engine.idle(), "test", "requests are left");
      });
    }
  }
}

TEST_CASE("generate alike: a rank that fails alone in one group ends the call on every rank", "[generate]") {
  on_each(2, 2, [&](SmallText& model, World& world) {
    int64_t passes = 0;
    Engine engine(
        [&](const at::Tensor& ids) {
          if (world.rank() == 3 && ++passes == 9) throw std::runtime_error("the memory is lost");
          return model.forward(ids);
        },
        &model, {});
    require_in("the memory is lost", thrown_by([&] { engine.generate({{1, 2}, {3}, {4, 5, 6}}, kAlike); }));
  });
}

TEST_CASE("generate alike: a request that is cancelled on one rank only is noticed", "[generate]") {
  on_each(1, 2, [&](SmallText& model, World& world) {
    Engine engine(model);
    std::optional<generate::Future> own;
    int64_t pieces = 0;
    own = engine.submit({.prompt = {1, 2}, .settings = kAlike, .on_piece = [&](const generate::Piece&) {
                           if (++pieces == 3 && world.rank() == 1) own->cancel();
                         }});
    const auto text = thrown_by([&] { own->get(); });
    require_in("ended other requests", text);
  });
}
