// What would be lost or mixed up by names without an error: names in two parts, patterns that match nothing, groups in another order.
#include "tests/support/refuses.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>
#include <dtensor/training/lr.hpp>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// Threads that are ranks would draw other numbers.
void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.fill_(1);
}

// Two layers, each in a group of its own, whose rates are halved once.
struct TwoGroups {
  explicit TwoGroups(bool swapped) {
    fill(*model);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (const size_t layer : {swapped ? 1 : 0, swapped ? 0 : 1}) groups.push_back(group(model->ptr(layer), layer == 0 ? 1.0 : 0.25));
    optimizer.emplace(std::move(groups), torch::optim::AdamWOptions(1e-3));
    scheduler.emplace(*optimizer, dt::lr::linear(1, 0, 2));
  }
  dt::State state() { return {{"schedule", *scheduler}, {"model", *model}, {"optimizer", *optimizer}}; }
  std::vector<double> rates() const { return scheduler->rates(); }
  static torch::optim::OptimizerParamGroup group(const std::shared_ptr<torch::nn::Module>& layer, double rate) {
    return {layer->parameters(), std::make_unique<torch::optim::AdamWOptions>(rate)};
  }
  torch::nn::Sequential model{torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)};
  std::optional<torch::optim::AdamW> optimizer;
  std::optional<dt::lr::Scheduler> scheduler;
};

}  // namespace

TEST_CASE("checkpoint: base rates go with the groups of the optimizer", "[checkpoint]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World&) {
          TwoGroups saved(false), same(false), swapped(true);
          saved.scheduler->step();
          dt::require(saved.rates() == std::vector{0.5, 0.125}, "test", "other rates are saved");
          dt::save(saved.state(), folder.path, 1);
          dt::load(same.state(), folder.path);
          dt::require(same.rates() == std::vector{0.5, 0.125}, "test", "the same groups have other rates");
          dt::load(swapped.state(), folder.path);
          dt::require(swapped.rates() == std::vector{0.125, 0.5}, "test", "groups have each other's rates");
          swapped.scheduler->set_step(0);
          dt::require(swapped.rates() == std::vector{0.25, 1.0}, "test", "groups have each other's base rates");
        },
        transport));
  }
}

TEST_CASE("checkpoint: groups that were joined or are new have a base rate", "[checkpoint]") {
  const Folder folder;
  TwoGroups saved(false);
  saved.scheduler->step();
  dt::save(saved.state(), folder.path, 1);
  torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
  std::vector<at::Tensor> old = model->ptr(1)->parameters();
  for (const auto& parameter : model->ptr(0)->parameters()) old.push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(TwoGroups::group(model->ptr(2), 7.0));
  groups.emplace_back(old, std::make_unique<torch::optim::AdamWOptions>(9.0));
  torch::optim::AdamW optimizer(std::move(groups), torch::optim::AdamWOptions(1e-3));
  dt::lr::Scheduler scheduler(optimizer, dt::lr::linear(1, 0, 2));
  dt::load({{"model", *model}, {"optimizer", optimizer}, {"schedule", scheduler}}, folder.path, 1, {.partial = true});
  CHECK(scheduler.rates() == std::vector{3.5, 0.125});
  CHECK(scheduler.current_step() == 1);
}

TEST_CASE("checkpoint: a name in two parts is refused on every rank", "[checkpoint][errors]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World&) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2));
    fill(*model);
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    auto weight = torch::zeros({2, 2});
    double rate = 3;
    const dt::State tensors{{"model", *model}, {"model.0.weight", weight}};
    const dt::State values{{"model", *model}, {"optimizer", optimizer}, {"optimizer.groups.0.lr", rate}};
    const dt::State both{{"model", *model}, {"model.0.bias", rate}};
    const auto in_two = [](const std::string& name, const std::string& first) {
      return "'" + name + "' is in the part '" + first + "' and in the part '" + name + "'";
    };
    refuses(in_two("model.0.weight", "model"), [&] { dt::save(tensors, folder.path, 1); });
    refuses(in_two("optimizer.groups.0.lr", "optimizer"), [&] { dt::save(values, folder.path, 1); });
    refuses(in_two("model.0.bias", "model"), [&] { dt::save(both, folder.path, 1); });
    dt::save({{"model", *model}}, folder.path, 1);
    refuses(in_two("model.0.weight", "model"), [&] { dt::load(tensors, folder.path, 1); });
  }));
  CHECK(dt::complete_steps(folder.path) == std::vector<int64_t>{1});
}

TEST_CASE("checkpoint: patterns that match nothing are refused on every rank", "[checkpoint][errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World&) {
          auto weight = torch::ones({2}), bias = torch::ones({2});
          int64_t epoch = 1;
          const dt::State state{{"model.weight", weight}, {"model.bias", bias}, {"epoch", epoch}};
          refuses("'modle.*' of .only matches no name of the state; closest: 'model.bias', ", [&] {
            dt::save(state, folder.path, 1, {.only = {"epoch", "modle.*"}});
          });
          dt::save(state, folder.path, 1, {.only = {"epoch", "model.*|other"}});
          refuses("'modle.*' of .only matches no name of the state or of ",
                  [&] { dt::load(state, folder.path, 1, {.only = {"modle.*"}}); });
          refuses("'modle.*' of .only", [&] { dt::load(state, folder.path, 1, {.only = {"modle.*"}, .partial = true}); });
          refuses("'modle.*' of .without matches no name of the state; closest: ",
                  [&] { dt::save(state, folder.path, 2, {.without = {"modle.*"}}); });
          refuses("'modle.*' of .without matches no name of the state or of ",
                  [&] { dt::load(state, folder.path, 1, {.without = {"modle.*"}}); });
          refuses("'modle.' of .rename is the beginning of no name in ",
                  [&] { dt::load(state, folder.path, 1, {.rename = {{"modle.", "net."}}}); });
          const dt::State other{{"net.weight", weight}};
          refuses("nothing would be loaded: ", [&] { dt::load(other, folder.path, 1, {.partial = true}); });
          dt::load(other, folder.path, 1, {.rename = {{"model.", "net."}}, .partial = true});
          dt::load(state, folder.path, 1, {.only = {"model.*"}});
          dt::load(state, folder.path, 1, {.without = {"epoch"}});
        },
        transport));
  }
}

// A pattern of what one rank alone has is right.
TEST_CASE("checkpoint: a pattern that matches on one rank is taken", "[checkpoint]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    auto own = torch::full({2}, world.rank() + 1.0);
    dt::State state{{"own", dt::of_each_rank(own)}};
    dt::save(state, folder.path, 1, {.only = {"own@1"}});
    own.zero_();
    dt::load(state, folder.path, 1, {.only = {"own@1"}, .partial = true});
    dt::require(own.eq(world.rank() == 1 ? 2.0 : 0.0).all().item<bool>(), "test", "another value");
  }));
}

TEST_CASE("checkpoint: another optimizer's state is refused by its name", "[checkpoint][errors]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  torch::optim::AdamW saved(model->parameters(), 1e-2);
  model->forward(torch::ones({1, 3})).sum().backward();
  saved.step();
  dt::save({{"model", *model}, {"optimizer", saved}}, folder.path, 1);
  torch::optim::SGD other(model->parameters(), 1e-2);
  const dt::State state{{"model", *model}, {"optimizer", other}};
  refuses("does not fit the state: 'optimizer' was saved from Adam or AdamW of libtorch, and is SGD of libtorch; hint: ",
          [&] { dt::load(state, folder.path, 1); });
  refuses(" of 'optimizer.*'; hint: ", [&] { dt::load({{"model", *model}}, folder.path, 1); });
}
