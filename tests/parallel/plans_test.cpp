// Plans of tensor parallelism: from styles, from the module itself, and as a table.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/stderr_support.hpp"

#include <algorithm>

using namespace dtensor;
using namespace dtensor::test;

namespace {

using torch::nn::Embedding;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Module;

struct Holder : Module {
  Linear linear(const std::string& name, int64_t in, int64_t out, bool bias = true) {
    return register_module(name, Linear(LinearOptions(in, out).bias(bias)));
  }
};

// GPT-2: one layer for queries, keys and values.
struct Gpt2Block : Holder {
  explicit Gpt2Block(int64_t d)
      : qkv(linear("c_attn", d, 3 * d)), o(linear("c_proj", d, d)), up(linear("c_fc", d, 4 * d)), down(linear("mlp_proj", 4 * d, d)) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    const auto parts = qkv(x).view({b, t, 3, 2, d / 2}).permute({2, 0, 3, 1, 4});
    const auto weights = (parts[0].matmul(parts[1].transpose(-1, -2)) / 4).softmax(-1);
    const auto y = x + o(weights.matmul(parts[2]).transpose(1, 2).reshape({b, t, d}));
    return y + down(torch::gelu(up(y)));
  }
  Linear qkv, o, up, down;
};

struct Gpt2 : Holder {
  Gpt2() : tokens(register_module("wte", Embedding(23, 12))), head(linear("lm_head", 12, 23, false)) {
    for (int i = 0; i < 2; ++i) blocks.push_back(register_module("h" + std::to_string(i), std::make_shared<Gpt2Block>(12)));
  }
  at::Tensor forward(const at::Tensor& ids) {
    auto x = tokens(ids);
    for (const auto& block : blocks) x = block->forward(x);
    return head(x);
  }
  Embedding tokens;
  Linear head;
  std::vector<std::shared_ptr<Gpt2Block>> blocks;
};

// Llama: grouped keys and values, gated feed-forward in a module of its own.
struct Llama : Holder {
  Llama() {
    register_module("tok_embeddings", Embedding(23, 12));
    auto attention = register_module("attention", std::make_shared<Holder>());
    attention->linear("wq", 12, 12, false), attention->linear("wk", 12, 6, false);
    attention->linear("wv", 12, 6, false), attention->linear("wo", 12, 12, false);
    auto feed_forward = register_module("feed_forward", std::make_shared<Holder>());
    feed_forward->linear("w1", 12, 32, false), feed_forward->linear("w2", 32, 12, false), feed_forward->linear("w3", 12, 32, false);
    linear("output", 12, 23, false);
  }
};

// Mixtral: attention as wide as no other, a router, and experts.
struct Mixtral : Holder {
  Mixtral() {
    register_module("embed", Embedding(23, 12));
    auto attention = register_module("self_attn", std::make_shared<Holder>());
    attention->linear("q_proj", 12, 16), attention->linear("k_proj", 12, 8), attention->linear("v_proj", 12, 8),
        attention->linear("o_proj", 16, 12);
    auto moe = register_module("moe", std::make_shared<Holder>());
    moe->linear("gate", 12, 2, false);
    for (int i = 0; i < 2; ++i) {
      auto expert = moe->register_module("expert" + std::to_string(i), std::make_shared<Holder>());
      expert->linear("w1", 12, 20, false), expert->linear("w2", 20, 12, false), expert->linear("w3", 12, 20, false);
    }
  }
};

// Name and placement of every parameter that is cut.
std::vector<std::string> cuts_of(const std::function<std::shared_ptr<Module>()>& make, const std::function<Plan(const Module&)>& plan) {
  std::vector<std::string> cuts;
  on_mesh({1, 2}, [&](const DeviceMesh& unnamed) {
    const auto mesh = DeviceMesh(c10::kCPU, unnamed.ranks(), {1, 2}, {"dp", "tp"});
    const Spmd spmd(mesh);
    const auto module = make();
    parallelize_module(*module, mesh, plan(*module));
    if (mesh.world().rank() != 0) return;
    for (const auto& item : module->named_parameters()) {
      const auto placement = DTensor(item.value()).placements()[1];
      if (!placement.is_replicate()) cuts.push_back(item.key() + " " + placement.str());
    }
  });
  return cuts;
}

Plan automatic(const Module& module) { return automatic_plan(module); }

}  // namespace

TEST_CASE("plans: the automatic one of a transformer is the one by hand", "[parallel]") {
  const auto gpt2 = [] { return std::make_shared<Gpt2>(); };
  REQUIRE(cuts_of(gpt2, automatic) == cuts_of(gpt2, [](const Module&) {
            return tensor_parallel(
                {{"*.c_attn", ColwiseParallel(3)}, {"*.c_fc", ColwiseParallel()}, {"*.c_proj|*.mlp_proj", RowwiseParallel()}});
          }));
  REQUIRE(cuts_of(gpt2, automatic).size() == 2 * 6);
  REQUIRE(cuts_of(gpt2, automatic) == cuts_of(gpt2, [](const Module&) {
            return tensor_parallel({{R"(re:h\d+\.c_attn)", ColwiseParallel(3)},
                                    {"re:.*c_fc", ColwiseParallel()},
                                    {"re:h[01][.](c|mlp)_proj", RowwiseParallel()}});
          }));
  const auto llama = [] { return std::make_shared<Llama>(); };
  REQUIRE(cuts_of(llama, automatic) == std::vector<std::string>{"attention.wq.weight S(0)", "attention.wk.weight S(0)",
                                                                "attention.wv.weight S(0)", "attention.wo.weight S(1)",
                                                                "feed_forward.w1.weight S(0)", "feed_forward.w2.weight S(1)",
                                                                "feed_forward.w3.weight S(0)"});
  const auto mixtral = [] { return std::make_shared<Mixtral>(); };
  REQUIRE(cuts_of(mixtral, automatic) == cuts_of(mixtral, [](const Module&) {
            return tensor_parallel({{"*.q_proj|*.k_proj|*.v_proj|*.w1|*.w3", ColwiseParallel()}, {"*.o_proj|*.w2", RowwiseParallel()}});
          }));
  REQUIRE(cuts_of(mixtral, automatic).size() == 7 + 2 * 3);
  const auto along_vocabulary = [](const Module& module) { return automatic_plan(module, "tp", true); };
  const auto cuts = cuts_of(gpt2, along_vocabulary);
  REQUIRE(std::ranges::count(cuts, "wte.weight S(0)") == 1);
  REQUIRE(std::ranges::count(cuts, "lm_head.weight S(0)") == 1);
}

TEST_CASE("plans: what has no pair stays whole", "[parallel]") {
  const auto lone = [] {
    auto module = std::make_shared<Holder>();
    module->linear("a", 8, 8);
    return module;
  };
  REQUIRE(cuts_of(lone, automatic).empty());
  REQUIRE(cuts_of([] { return std::make_shared<Module>(); }, automatic).empty());
}

TEST_CASE("plans: an automatic plan that cuts nothing says so once and why", "[parallel]") {
  const auto said_of = [](const std::function<std::shared_ptr<Holder>()>& make) {
    return stderr_of([&] {
      on_mesh({2}, [&](const DeviceMesh& mesh) {
        const Spmd spmd(mesh);
        const auto module = make();
        dtensor::require(automatic_plan(*module).empty(), "test", "the plan has entries");
        parallelize_module(*module, mesh, automatic_plan(*module));
        const bool told = describe_plan(*module).find("nothing is cut: every rank has the whole module") != std::string::npos;
        dtensor::require(told == !module->parameters().empty(), "test", "{}", describe_plan(*module));
      });
    });
  };
  const auto perceptron = said_of([] {
    auto module = std::make_shared<Holder>();
    module->linear("fc1", 8, 6), module->linear("fc2", 6, 3);
    return module;
  });
  INFO(perceptron);
  const std::string text = "dtensor: automatic_plan cuts nothing";
  const auto first = perceptron.find(text), second = perceptron.find(text, first + 1);
  CHECK((second != std::string::npos && perceptron.find(text, second + 1) == std::string::npos));  // two calls, of one rank
  CHECK(perceptron.find("width of 8 and one back to it; alone are fc1 (8 to 6), fc2 (6 to 3); hint: name the layers") != std::string::npos);
  CHECK(said_of([] { return std::make_shared<Holder>(); }).find("the module has no linear layer") != std::string::npos);
}

TEST_CASE("plans: a model laid out automatically trains as on one device", "[parallel]") {
  const auto ids = torch::arange(20).mul(7).remainder(23).view({2, 10}), targets = ids.roll(1, 1);
  const auto train = [&](const std::function<void(Module&)>& lay_out) {
    torch::manual_seed(4);
    Gpt2 model;
    lay_out(model);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
    std::vector<double> losses;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(model.forward(ids).view({-1, 23}), targets.view({-1}));
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  const auto expected = train([](Module&) {});
  for (const auto* transport : {"threads", "gloo"}) {
    for (const bool along_vocabulary : {false, true}) {
      REQUIRE_NOTHROW(on_mesh(
          {2},
          [&](const DeviceMesh& mesh) {
            const Spmd spmd(mesh);
            const auto losses =
                train([&](Module& model) { parallelize_module(model, mesh, automatic_plan(model, "dim0", along_vocabulary)); });
            for (size_t i = 0; i < losses.size(); ++i) {
              require(std::abs(losses[i] - expected[i]) < 2e-5, "test", "step {}: loss {} is not {}", i, losses[i], expected[i]);
            }
          },
          transport));
    }
  }
}

TEST_CASE("plans: mistakes name the closest parameters", "[parallel]") {
  REQUIRE_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    Gpt2 model;
    const auto refuse = [&](const Plan& plan, const std::string& words) {
      try {
        parallelize_module(model, mesh, plan);
      } catch (const Error& error) {
        const std::string said = error.what_without_backtrace();
        return require(said.find(words) != said.npos, "test", "it says {}", said);
      }
      fail("test", "not refused: {}", words);
    };
    refuse({{"h1.c_atn.weight", {{"dim0", shard(0)}}}}, "the closest are 'h1.c_attn.weight', 'h0.c_attn.weight'");
    refuse({{"re:(", {{"dim0", shard(0)}}}}, "'re:(' is no regular expression");
    refuse({{"*.c_atn.weight", {{"dim0", shard(0)}}}}, "the closest are 'h0.c_attn.weight', 'h1.c_attn.weight'");
    refuse({{"wte.weight", {{"dim0", shard(0)}, {"dim0", shard(1)}}}}, "two placements along \"dim0\"");
    refuse(tensor_parallel({{"*.qkv", ColwiseParallel(3)}}, "dim0"), "no parameter or buffer is decided by entry '*.qkv.weight'");
    refuse(tensor_parallel({{"lm_head", ColwiseParallel()}}, "tp"), "tp");
    refuse(tensor_parallel({{"lm_head", ColwiseParallel(4)}}, "dim0"), "does not divide");
    parallelize_module(model, mesh, tensor_parallel({{"lm_head", ColwiseParallel()}}, "dim0"));  // which has no bias
  }));
}

TEST_CASE("plans: a table of what lies where", "[parallel]") {
  const auto text = [](Module& module) { return describe_plan(module); };
  Alone alone(4, 1);
  const auto mesh = init_device_mesh(c10::kCPU, {4}, {"tp"});
  std::shared_ptr<Holder> module;
  {
    const Spmd spmd(mesh);
    set_generator_check(GeneratorCheck::off);  // nobody would answer
    module = std::make_shared<Holder>();
    const auto first = module->linear("up", 256, 1024);
    module->register_parameter("tied", first->weight);
    set_generator_check(GeneratorCheck::first);
  }
  parallelize_module(*module, mesh, tensor_parallel({{"up", ColwiseParallel()}}));
  INFO(text(*module));
  REQUIRE(text(*module) ==
          "name       tensor            placements  this rank    whole\n"
          "tied       Float[1024, 256]  (S(0))      256.0 KiB  1.0 MiB\n"
          "up.weight  Float[1024, 256]  (tied)                        \n"
          "up.bias    Float[1024]       (S(0))        1.0 KiB  4.0 KiB\n"
          "total                                    257.0 KiB  1.0 MiB\n");
  torch::nn::Linear plain(2, 3);
  REQUIRE(text(*plain).find("plain") != std::string::npos);
  std::ostringstream out;
  print_plan(*plain, out);
  REQUIRE(out.str() == text(*plain));
}

TEST_CASE("plans: a pattern takes no longer for its stars", "[plans]") {
  const std::string name(60, 'a');
  std::string stars, groups = "re:";
  for (int i = 0; i < 30; ++i) stars += "*a", groups += "(.*)*";
  CHECK(dtensor::detail::matches(stars, name));
  CHECK_FALSE(dtensor::detail::matches(stars + "b", name));
  CHECK(dtensor::detail::matches("*.w?ight", "layers.0.weight"));
  CHECK_FALSE(dtensor::detail::matches("*.w?ight", "layers.0.weight_g"));
  CHECK_FALSE(dtensor::detail::matches(groups + "b", name));
  CHECK(dtensor::detail::matches("re:(a|b)\\1*", "aaa"));
  CHECK_THROWS_AS(dtensor::detail::matches("re:" + std::string(5000, '('), name), Error);
}
