// What would lose or mix a state without an error: names that meet, parts that lack, steps that are damaged, values that do not fit.
#include "tests/support/refuses.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/optim/adam8bit.hpp>

#include <cmath>
#include <limits>

namespace dt = dtensor;
using namespace dt::test;

namespace {

std::string text_thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const dt::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("expected '" << part << "' in: " << text);
  return text.find(part) != std::string::npos;
}

// A part of a user's, which one rank cannot save.
struct FailsOnOne {
  int rank = 0;
  void save(torch::serialize::OutputArchive& archive) const {
    dt::require(rank != 1, "test", "out of cheese");
    archive.write("x", torch::ones({2}));
  }
  void load(torch::serialize::InputArchive&) {}
};

}  // namespace

TEST_CASE("checkpoint: names that meet by a rename are refused", "[checkpoint][errors]") {
  const Folder folder;
  auto model = torch::ones({2}), ema = torch::zeros({2}), loaded = torch::full({2}, 5.0);
  dt::save({{"model.w", model}, {"ema.w", ema}}, folder.path, 1);
  const dt::State state{{"model.w", loaded}};
  CHECK(has(text_thrown_by([&] { dt::load(state, folder.path, 1, {.rename = {{"ema.", "model."}}}); }),
            "'ema.w' and 'model.w' are both named 'model.w' by .rename"));
  CHECK(loaded.eq(5).all().item<bool>());
  dt::load(state, folder.path, 1, {.without = {"old.*"}, .rename = {{"model.", "old."}, {"ema.", "model."}}});
  CHECK(loaded.eq(0).all().item<bool>());
}

TEST_CASE("checkpoint: thousands of names that lack are said at once", "[checkpoint][errors]") {
  const Folder folder;
  dt::State saved, wanted;
  std::vector<at::Tensor> tensors(6000, torch::zeros({1}));
  for (size_t i = 0; i < tensors.size(); ++i) {
    saved.add({fmt::format("model.layers.{}.attention.weight", i), tensors[i]});
    wanted.add({fmt::format("layers.{}.attention.weight", i), tensors[i]});
  }
  dt::save(saved, folder.path, 1);
  const auto begin = std::chrono::steady_clock::now();
  const auto text = text_thrown_by([&] { dt::load(wanted, folder.path, 1, {.partial = false}); });
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
  CHECK(has(text, "it has no 'layers.0.attention.weight' (closest: 'model.layers.0.attention.weight"));
  CHECK(has(text, "nor 'layers.5999.attention.weight'"));
}

TEST_CASE("checkpoint: a number that its variable cannot hold is refused", "[checkpoint][errors]") {
  const Folder folder;
  int64_t large = 9'000'000'000;
  dt::save({{"count", large}}, folder.path, 1);
  int small = 3;
  CHECK(has(text_thrown_by([&] { dt::load({{"count", small}}, folder.path, 1); }), "'count' was saved as 9000000000"));
  CHECK(small == 3);
  double huge = 1e300;
  dt::save({{"scale", huge}}, folder.path, 2);
  float narrow = 3;
  CHECK(has(text_thrown_by([&] { dt::load({{"scale", narrow}}, folder.path, 2); }), "hint: make it a double"));
  CHECK(narrow == 3);
}

TEST_CASE("checkpoint: views that are conjugated or negated are loaded by value", "[checkpoint]") {
  const Folder folder;
  const auto values = torch::randn({3, 4}, torch::kComplexDouble);
  auto saved = values.clone();
  dt::save({{"c", saved}}, folder.path, 1);
  auto conjugated = torch::zeros({3, 4}, torch::kComplexDouble).conj();
  dt::load({{"c", conjugated}}, folder.path, 1);
  CHECK(conjugated.equal(values));
  auto imaginary = torch::imag(values).clone();
  dt::save({{"c", imaginary}}, folder.path, 2);
  auto negated = torch::imag(torch::zeros({3, 4}, torch::kComplexDouble).conj());
  REQUIRE(negated.is_neg());
  dt::load({{"c", negated}}, folder.path, 2);
  CHECK(negated.equal(imaginary));
}

TEST_CASE("checkpoint: an optimizer takes nothing from one of another kind or order", "[checkpoint][errors]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  const auto learn = [&](torch::optim::Optimizer& optimizer) {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = model->forward(torch::ones({1, 3})).pow(2).sum();
      loss.backward();
      return loss;
    });
  };
  torch::optim::LBFGS lbfgs(std::vector{model->weight, model->bias}, 0.1), turned(std::vector{model->bias, model->weight}, 0.1);
  learn(lbfgs);
  dt::save({{"model", *model}, {"optimizer", lbfgs}}, folder.path, 1);
  dt::load({{"model", *model}, {"optimizer", lbfgs}}, folder.path, 1);
  CHECK(has(text_thrown_by([&] { dt::load({{"model", *model}, {"optimizer", turned}}, folder.path, 1); }),
            "hint: give it the parameters in the order that was saved"));
  torch::optim::AdamW adam(model->parameters(), 0.01);
  learn(adam);
  dt::save({{"model", *model}, {"optimizer", adam}}, folder.path, 2);
  torch::optim::SGD sgd(model->parameters(), 0.05);
  CHECK(has(text_thrown_by([&] { dt::load({{"model", *model}, {"optimizer", sgd}}, folder.path, 2, {.partial = true}); }),
            "is SGD of libtorch"));
  CHECK(static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr() == 0.05);
}

TEST_CASE("checkpoint: a refused load leaves a tensor without values as it was", "[checkpoint][errors]") {
  const Folder folder;
  auto saved = torch::ones({3});
  dt::save({{"a", saved}}, folder.path, 1);
  at::Tensor empty, other = torch::zeros({1});
  CHECK(has(text_thrown_by([&] { dt::load({{"a", empty}, {"b", other}}, folder.path, 1); }), "it has no 'b'"));
  CHECK(!empty.defined());
  dt::load({{"a", empty}}, folder.path, 1);
  CHECK(empty.equal(saved));
}

TEST_CASE("checkpoint: an optimizer's state that lacks a part is refused", "[checkpoint][errors]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  const auto step = [&] {
    optimizer.zero_grad();
    model->forward(torch::ones({1, 3})).sum().backward();
    optimizer.step();
  };
  step();
  dt::State state{{"model", *model}, {"optimizer", optimizer}};
  dt::save(state, folder.path, 1, {.without = {"*exp_avg_sq"}});
  CHECK(has(text_thrown_by([&] { dt::load(state, folder.path, 1); }),
            "it has no 'optimizer.state.model.weight.exp_avg_sq', though other state of that parameter"));
  step();
}

TEST_CASE("checkpoint: a part that fails on one rank is named on all", "[checkpoint][errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](dt::World& world) {
          auto weight = dt::distribute_tensor(torch::ones({8, 4}), line(world), {dt::shard(0)}).tensor().requires_grad_();
          dt::optim::Adam8bit optimizer({weight}, {});
          weight.sum().backward();
          optimizer.step();
          FailsOnOne part{world.rank()};
          const auto text = text_thrown_by([&] { dt::save({{"part", part}, {"optimizer", optimizer}}, folder.path, 1); });
          dt::require(text.find("out of cheese") != std::string::npos, "test", "got '{}'", text);
          dt::save({{"optimizer", optimizer}}, folder.path, 2);
        },
        transport));
    CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{2});
  }
}

TEST_CASE("checkpoint: a step whose data are cut or gone is passed over", "[checkpoint]") {
  for (const bool removes : {false, true}) {
    const Folder folder;
    auto x = torch::arange(1000, torch::kDouble);
    const dt::State state{{"x", x}};
    const dt::ManagerOptions options{.every_steps = 1, .save = {.run = "a"}};
    {
      dt::CheckpointManager manager(state, folder.path, options);
      for (int64_t step = 1; step <= 3; ++step) x.fill_(static_cast<double>(step)), manager.step(step);
      manager.finish();
    }
    for (const auto& entry : std::filesystem::directory_iterator(dt::step_folder(folder.path, 3))) {
      if (entry.path().extension() != ".safetensors") continue;
      if (removes) std::filesystem::remove(entry.path());
      else std::filesystem::resize_file(entry.path(), 200);
    }
    dt::CheckpointManager manager(state, folder.path, options);
    CHECK(manager.resume() == 2);
    CHECK(x.eq(2).all().item<bool>());
    std::filesystem::resize_file(dt::step_folder(folder.path, 3) + "/index.json", 100);
    CHECK(dt::CheckpointManager(state, folder.path, options).resume() == 2);  // the damaged one does not tell whose run it is
  }
}

TEST_CASE("checkpoint: what is no number is never the best", "[checkpoint]") {
  const Folder folder;
  auto x = torch::zeros({2});
  dt::CheckpointManager manager({{"x", x}}, folder.path, {.keep_last = 1});
  CHECK(manager.save_if_best(1, 3.0));
  CHECK(!manager.save_if_best(2, std::nan("")));
  CHECK(!manager.save_if_best(3, -std::numeric_limits<double>::infinity()));
  CHECK(manager.save_if_best(4, 2.0));
}

TEST_CASE("checkpoint: a best step that was removed by hand is the best no more", "[checkpoint]") {
  const Folder folder;
  auto x = torch::zeros({2});
  const dt::State state{{"x", x}};
  {
    dt::CheckpointManager manager(state, folder.path, {.keep_last = 1});
    CHECK(manager.save_if_best(1, 3.0));
    manager.save(2);
    manager.finish();
  }
  CHECK(dt::CheckpointManager(state, folder.path).best_step() == 1);
  dt::remove_step(folder.path, 1);
  dt::CheckpointManager manager(state, folder.path, {.keep_last = 1});
  CHECK(!manager.best_step());
  CHECK(manager.save_if_best(3, 5.0));
  CHECK(manager.best_step() == 3);
}

TEST_CASE("checkpoint: a folder that only begins like a step is left alone", "[checkpoint]") {
  const Folder folder;
  auto x = torch::zeros({2});
  for (const auto* name : {"step-backup", "step-007"}) {
    std::filesystem::create_directories(folder / name);
    std::ofstream(folder / name + "/data-mine.safetensors") << "precious";
  }
  dt::CheckpointManager manager({{"x", x}}, folder.path, {.every_steps = 1, .keep_last = 1});
  for (int64_t step = 10; step < 13; ++step) manager.step(step);
  manager.finish();
  CHECK(std::filesystem::exists(folder / "step-backup/data-mine.safetensors"));
  CHECK(std::filesystem::exists(folder / "step-007/data-mine.safetensors"));
  CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{12});
}

TEST_CASE("checkpoint: elements that share their memory are refused by name", "[checkpoint][errors]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    auto expanded = torch::ones({1, 3}).expand({4, 3});
    auto local = dt::from_local(expanded, line(world), {dt::shard(0)}).tensor();
    refuses("'mask' has sizes [4, 3] and strides [0, 1]: several of its elements", [&] { dt::save({{"mask", expanded}}, folder.path, 1); });
    refuses("'mask' has sizes [4, 3]", [&] { dt::save({{"mask", local}}, folder.path, 1); });
    auto whole = expanded.contiguous(), once = torch::ones({3}).expand({1, 3});
    dt::save({{"mask", whole}, {"once", once}}, folder.path, 1);
    refuses("'mask' has sizes [4, 3] and strides [0, 1]", [&] { dt::load({{"mask", expanded}, {"once", once}}, folder.path); });
    dt::load({{"mask", whole}, {"once", once}}, folder.path);
  }));
}

TEST_CASE("checkpoint: a folder without a name is refused", "[checkpoint][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
    auto x = torch::ones({2});
    const dt::State state{{"x", x}};
    const std::string says = "the name of the folder is empty";
    refuses(says, [&] { dt::save(state, "", 1); });
    refuses(says, [&] { dt::load(state, ""); });
    refuses(says, [&] { dt::CheckpointManager manager(state, ""); });
    refuses(says, [&] { dt::remove_step("", 123456789); });
  }));
}

TEST_CASE("checkpoint: errors of the disk have hints and one rank", "[checkpoint][errors]") {
  const Folder folder;
  std::ofstream(folder / "file") << "x";
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    auto x = torch::ones({2});
    const dt::State state{{"x", x}};
    const auto text = text_thrown_by([&] { dt::save(state, folder / "file/run", 1); });
    dt::require(has(text, "hint: a part of the path is a file"), "test", "got '{}'", text);
    dt::require(text.starts_with("[save] '") || text.starts_with("[save] on rank "), "test", "got '{}'", text);
    dt::require(text.find("[save]", 1) == std::string::npos && text.find(" (rank ") == text.rfind(" (rank "), "test", "got '{}'", text);
    refuses("is a file", [&] { dt::save(state, folder / "file", 1); });
    auto saving = dt::save(state, folder / "file/run", 1, {.async = true});
    const auto later = text_thrown_by([&] { saving.wait(); });
    dt::require(world.rank() < 2 && later.find("[save]", 1) == std::string::npos, "test", "got '{}'", later);
  }));
}

TEST_CASE("checkpoint: a program whose last save failed does not end well", "[checkpoint][errors]") {
  const Folder folder;
  std::ofstream(folder / "file") << "x";
  for (const auto* transport : {"threads", "shm"}) {
    for (const bool waits : {false, true}) {
      std::string text;
      try {
        on_ranks(
            2,
            [&](dt::World&) {
              auto x = torch::ones({2});
              dt::save({{"x", x}}, folder / "good", 1, {.async = true});
              auto saving = dt::save({{"x", x}}, folder / "file/run", 2, {.async = true});
              if (waits) text_thrown_by([&] { saving.wait(); });  // then it is known, and not said again
            },
            transport);
      } catch (const dt::Error& error) {
        text = error.what_without_backtrace();
      }
      CHECK(waits == text.empty());
      CHECK((waits || has(text, "file/run/step-2' was not saved: ")));
    }
  }
}
