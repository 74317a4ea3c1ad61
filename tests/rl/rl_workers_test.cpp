// Worker groups: where methods run, what they get and give under each mode, how groups overlap in time, and what their failures say.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/groups.hpp>

#include <chrono>
#include <thread>

using namespace dtensor;
using namespace dtensor::test;
using rl::Batch;
using rl::WorkerGroup;

namespace {

using WorkerClock = std::chrono::steady_clock;

double seconds_since(WorkerClock::time_point begin) { return std::chrono::duration<double>(WorkerClock::now() - begin).count(); }
void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

at::Tensor worker_rows(int64_t count = 8) { return torch::arange(count * 2, torch::kDouble).reshape({count, 2}); }

// On all transports, with a program of five ranks.
void on_worker_ranks(const std::function<void(World&)>& body) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(5, body, transport));
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return rl::detail::reason_of(error);
  }
  return "nothing was thrown";
}

void require_says(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "test", "expected '{}' in: {}", part, text);
}

}  // namespace

TEST_CASE("rl workers: a pool shares ranks out by name", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(6, [](World&) {
    const rl::ResourcePool pool{{"actor", 2}, {"critic", -1}, {"judge", 1}};
    require(pool.ranks("critic") == std::vector<int>{2, 3, 4} && pool.ranks("judge") == std::vector<int>{5}, "test", "other ranks");
    const auto mesh = pool.mesh("actor", {1, 2}, {"dp", "tp"});
    require(mesh.ranks() == std::vector<int>{0, 1} && mesh.size(1) == 2, "test", "got {}", mesh.str());
    require(pool.mesh("critic").names() == std::vector<std::string>{"dp"}, "test", "other names");
    refuses("ask for 9 ranks, and there are 6; got actor=4, critic=5; hint: start 9 ranks", [] {
      rl::ResourcePool{{"actor", 4}, {"critic", 5}};
    });
    refuses("ask for 7 ranks, and there are 6", [] { rl::ResourcePool{{"actor", 6}, {"critic", -1}}; });
    refuses("'actor' asks for 0 ranks", [] { rl::ResourcePool{{"actor", 0}}; });
    refuses("'actor' comes twice", [] { rl::ResourcePool{{"actor", 1}, {"actor", 1}}; });
    refuses("no share 'reward'; got [\"actor\", \"critic\", \"judge\"]", [&] { pool.ranks("reward"); });
    refuses("has 4 ranks; expected the 2 of 'actor'", [&] { pool.mesh("actor", {2, 2}, {"dp", "tp"}); });
  }));
}

TEST_CASE("rl workers: modes say which rows a rank gets and keeps", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(5, [](World& world) {
    WorkerGroup group("role", DeviceMesh(c10::kCPU, {0, 1, 2, 3}, {2, 2}, {"dp", "tp"}));
    const Batch batch{{"x", worker_rows()}};
    const auto rows_in = [&](const rl::Mode& mode, const std::vector<Interval>& expected) {
      bool ran = false;
      const auto results = group.run({.name = "rows", .gives = {"y"}, .mode = mode}, batch, [&](const Batch& mine) {
        ran = true;
        const auto own = expected[world.rank()];
        require(mine.own_rows() == own, "test", "{}: rows {} to {}", mode.name, mine.own_rows().begin, mine.own_rows().end);
        const NoSpmd plain;  // ranks have other rows
        require(DTensor(mine.get("x")).to_local().equal(worker_rows().slice(0, own.begin, own.end)), "test", "other rows");
        return Batch{{"y", mine.get("x") * 2}};
      });
      require(ran == (world.rank() < static_cast<int>(expected.size())), "test", "{}: on other ranks", mode.name);
      const DTensor y(results.get("y"));
      require(y.is_absent() == !ran && y->size(0) == 8, "test", "{}: got {}", mode.name, y.layout().str());
      if (ran) require(full_tensor(y).equal(worker_rows() * 2), "test", "other results");
    };
    rows_in(rl::one_to_all(), {{0, 8}, {0, 8}, {0, 8}, {0, 8}});
    rows_in(rl::all_to_all(), {{0, 2}, {2, 4}, {4, 6}, {6, 8}});
    rows_in(rl::rank_zero(), {{0, 8}});
    rows_in(rl::dp_compute(), {{0, 4}, {0, 4}, {4, 8}, {4, 8}});
    rows_in(rl::over({"tp"}), {{0, 4}, {4, 8}, {0, 4}, {4, 8}});
    const rl::Mode last{"last",
                        [](const rl::RowLayout& all) {
                          return rl::whole_rows(DeviceMesh(all.mesh.device_type(), {0, 1}, {2}, {"some"}));
                        },
                        [](const rl::RowLayout& some) { return rl::rows_over(some.mesh, {"some"}); }};
    rows_in(last, {{0, 8}, {0, 8}});
    const auto metrics = group.run({.name = "loss", .gives = {"loss"}, .mode = rl::dp_compute_metric()}, batch, [&](const Batch& mine) {
      return Batch{{"loss", DTensor(mine.get("x")).to_local().sum().reshape({1})}};
    });
    if (world.rank() < 4) require(full_tensor(metrics.get("loss")).equal(torch::tensor({28.0, 92.0}, torch::kDouble)), "test", "metrics");
  }));
}

TEST_CASE("rl workers: a batch goes through groups on other ranks and on some of the same", "[rl]") {
  on_worker_ranks([](World& world) {
    WorkerGroup first("first", DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"})), second("second", DeviceMesh(c10::kCPU, {1, 2, 3}, {3}, {"dp"}));
    Batch batch{{"x", worker_rows()}};
    {
      const CommDebugMode counted;
      for (int round = 0; round < 3; ++round) {
        const auto name = fmt::format("y{}", round), text = fmt::format("t{}", round), sum = fmt::format("z{}", round);
        batch.merge(first.run({.name = "double", .gives = {name, text}}, batch.select({"x"}), [&](const Batch& mine) {
          std::vector<std::string> texts;
          for (int64_t row = 0; row < mine.size(); ++row) texts.push_back(fmt::format("row {} of {}", row, round));
          Batch results{{name, mine.get("x") * 2}, {text, texts}};
          results.meta()[name] = round;
          return results;
        }));
        batch.merge(second.run({.name = "add", .gives = {sum}}, batch.select({"x", name, text}), [&](const Batch& mine) {
          require(mine.texts(text)[7] == fmt::format("row 7 of {}", round), "test", "other texts");
          return Batch{{sum, mine.get("x") + mine.get(name) + round}};
        }));
      }
      require(world.rank() != 4 || counted.count() == 0, "test", "a rank without a part has communicated: {}", counted.str());
    }
    const DeviceMesh all(c10::kCPU, {0, 1, 2, 3, 4}, {5}, {"dp"});
    for (int round = 0; round < 3; ++round) {
      const auto z = batch.get(fmt::format("z{}", round), all);
      require(full_tensor(z).equal(worker_rows() * 3 + round), "test", "other sums");
      require(batch.on(all).texts(fmt::format("t{}", round))[0] == fmt::format("row 0 of {}", round), "test", "other texts");
    }
    require(batch.meta()["y2"] == 2, "test", "other meta");
    require(batch.rows(rl::Rows{7, 0}).get("z1", all).size(0) == 2, "test", "other rows");
  });
}

TEST_CASE("rl workers: a module with its plan and optimizer trains where its mesh is", "[rl]") {
  const auto trained = [](const DeviceMesh& mesh, const Plan& plan) {
    std::shared_ptr<torch::nn::LinearImpl> model;
    WorkerGroup actor(
        "actor", mesh,
        [&] {
          torch::manual_seed(3);
          model = std::make_shared<torch::nn::LinearImpl>(2, 4);
          model->to(torch::kDouble);
          return model;
        },
        plan);
    actor.set_optimizer(std::make_shared<torch::optim::AdamW>(actor.module().parameters(), torch::optim::AdamWOptions(0.1)));
    double loss = 0;
    for (int step = 0; step < 4; ++step) {
      const auto results = actor.run({.name = "update"}, Batch{{"x", worker_rows()}}, [&](const Batch& mine) {
        auto value = model->forward(mine.get("x") / 10).square().mean();
        actor.optimizer()->zero_grad();
        value.backward();
        actor.optimizer()->step();
        Batch metrics;
        metrics.meta()["loss"] = full_tensor(value.detach()).item<double>();
        return metrics;
      });
      loss = results.meta()["loss"].get<double>();  // on every rank
    }
    return loss;
  };
  double expected = 0;
  on_ranks(1, [&](World&) { expected = trained(DeviceMesh(c10::kCPU, {0}, {1}, {"dp"}), {}); });
  CHECK(expected > 0);
  on_worker_ranks([&](World&) {
    rl_near(trained(DeviceMesh(c10::kCPU, {1, 2, 3, 4}, {2, 2}, {"dp", "tp"}), {{"weight|bias", {{"tp", shard(0)}}}}), expected, "loss");
  });
}

TEST_CASE("rl workers: groups on other ranks work at the same time", "[rl]") {
  double apart = 0, chained = 0;
  REQUIRE_NOTHROW(on_ranks(4, [&](World& world) {
    WorkerGroup first("first", DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"})), second("second", DeviceMesh(c10::kCPU, {2, 3}, {2}, {"dp"}));
    const Batch batch{{"x", worker_rows()}};
    const auto sleeps = [&](WorkerGroup& group, const Batch& given, const std::string& from, const std::string& name, int64_t ms) {
      return group.run({.name = "sleep", .gives = {name}}, given.select({from}), [&, ms](const Batch& mine) {
        sleep_ms(ms);
        return Batch{{name, mine.get(from) + 1}};
      });
    };
    const auto timed = [&](const std::function<void()>& rounds) {
      world.barrier();
      const auto begin = WorkerClock::now();
      rounds();
      world.barrier();
      return seconds_since(begin);
    };
    sleeps(second, sleeps(first, batch, "x", "y", 1), "y", "z", 1);  // groups of ranks connect at their first use
    double best_apart = 1e9, best_chained = 1e9;
    for (int trial = 0; trial < 3; ++trial) {
      best_apart = std::min(best_apart, timed([&] {
                              auto all = batch;
                              for (int round = 0; round < 4; ++round) {
                                all.merge(sleeps(first, batch, "x", fmt::format("a{}", round), 100));
                                all.merge(sleeps(second, batch, "x", fmt::format("b{}", round), 100));
                              }
                            }));
      best_chained = std::min(best_chained, timed([&] {
                                for (int round = 0; round < 5; ++round) sleeps(second, sleeps(first, batch, "x", "y", 80), "y", "z", 80);
                              }));
    }
    if (world.rank() == 0) apart = best_apart, chained = best_chained;
  }));
  // Of 0.8 s in turns, 0.4 could be saved; of 10 times 80 ms, all but 6.
  const auto share_apart = (0.8 - apart) / 0.4, share_chained = (0.8 - chained) / 0.32;
  std::printf("rl workers: overlap %.3f of what phases allow apart, %.3f in a chain\n", share_apart, share_chained);
  CHECK(share_apart > 0.9);
  CHECK(share_chained > 0.9);
}

TEST_CASE("rl workers: a failure names role method and step on every rank", "[rl]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int bad : {0, 1}) {
      CAPTURE(transport, bad);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World& world) {
            WorkerGroup critic("critic", DeviceMesh(c10::kCPU, {1, 2}, {2}, {"dp"}));
            const Batch batch{{"x", worker_rows()}};
            const auto values = [&](bool fails) {
              return critic.run({.name = "values", .gives = {"v"}, .step = 17}, batch, [&](const Batch& mine) {
                if (fails && world.rank() == 1 + bad) throw std::runtime_error("no value for this");
                return Batch{{"v", mine.get("x").sum(1)}};
              });
            };
            const auto text = error_of([&] { values(true).column("v").read(); });
            require_says(text, fmt::format("critic.values failed at step 17: on rank {}: no value for this", 1 + bad));
            const DeviceMesh all(c10::kCPU, {0, 1, 2, 3}, {4}, {"dp"});  // and all may go on
            require(full_tensor(values(false).get("v", all)).equal(worker_rows().sum(1)), "test", "other values");
          },
          transport));
    }
  }
}

TEST_CASE("rl workers: a rank that fails while others wait for it ends the method on all", "[rl]") {
  for (const std::string transport : {"threads", "gloo"}) {
    std::vector<std::string> texts(3);
    CHECK_THROWS(on_ranks(
        3,
        [&](World& world) {
          WorkerGroup actor("actor", DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"}));
          const Batch batch{{"x", worker_rows()}};
          texts[world.rank()] = error_of([&] {
            const auto results = actor.run({.name = "update", .gives = {"y"}}, batch, [&](const Batch& mine) {
              if (world.rank() == 1) throw std::runtime_error("out of luck");
              return Batch{{"y", full_tensor(mine.get("x"))}};  // waits for rank 1
            });
            results.column("y").read();
          });
          fail("test", "{}", texts[world.rank()]);
        },
        transport));
    for (const auto& text : texts) CHECK_THAT(text, says("actor.update failed at step 0"));
    CHECK_THAT(texts[1], says("out of luck"));
  }
}

TEST_CASE("rl workers: results and modes that do not fit are refused", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(3, [](World&) {
    WorkerGroup group("judge", DeviceMesh(c10::kCPU, {0, 1}, {2}, {"dp"}));
    const Batch batch{{"x", worker_rows()}};
    const auto other = error_of([&] {
      group.run({.name = "score", .gives = {"s"}}, batch, [](const Batch& mine) { return Batch{{"t", mine.get("x")}}; }).column("s").read();
    });
    require_says(other, "judge.score failed at step 0");
    require_says(other, "the method gave [\"t\"]; expected [\"s\"]");
    auto mode = rl::one_to_all();
    mode.dispatch = [](const rl::RowLayout&) { return rl::whole_rows(DeviceMesh(c10::kCPU, {2}, {1}, {"other"})); };
    require_says(error_of([&] { group.run({.name = "score", .mode = mode}, batch, [](const Batch&) {}); }),
                 "dispatches to rank 2, which is not in");
    require_says(error_of([&] { group.module(); }), "'judge' has no module");
    const auto missing = error_of([&] { group.run({.name = "look"}, batch, [](const Batch& mine) { mine.get("y"); }).meta(); });
    require_says(missing, "judge.look failed at step 0");
    require_says(missing, "there is no column 'y'");
    const auto within = error_of([&] {
      group.run({.name = "outer"}, batch, [&](const Batch&) { group.run({.name = "inner"}, batch, [](const Batch&) {}); }).meta();
    });
    require_says(within, "judge.inner is run within judge.outer");
    const auto own = error_of([&] {
      group.run({.name = "own", .gives = {"y"}}, batch,
                [](const Batch& mine) {
                  return Batch{{"y", DTensor(mine.get("x")).to_local()}};
                })
          .column("y")
          .read();
    });
    require_says(own, "judge.own failed at step 0");
    require_says(own, "counts as replicated inside Spmd, but its values on ranks 1 differ from rank 0's");
  }));
}

TEST_CASE("rl workers: memory is put away and comes back in place", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    const Spmd spmd(mesh);
    const auto train = [&](bool offloads) {
      torch::manual_seed(1);
      torch::nn::Sequential model(torch::nn::Linear(3, 5), torch::nn::Linear(5, 2));
      fully_shard(*model, mesh);
      torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.1));
      rl::OffloadedStorages away;
      for (int step = 0; step < 3; ++step) {
        model->forward(torch::ones({4, 3}) * (step + 1)).sum().backward();
        adam.step();
        if (!offloads) continue;
        away.put_away(rl::detail::tensors_of(&*model, &adam));
        require(away.bytes() > 0, "test", "nothing was put away");
        for (const auto& parameter : model->parameters()) {
          require(DTensor(parameter.detach()).to_local().storage().nbytes() == 0, "test", "memory is held");
        }
        away.restore();
        require(away.empty(), "test", "something is away");
      }
      const NoSpmd plain;
      return full_tensor(model->parameters()[0].detach());
    };
    require(train(true).equal(train(false)), "test", "other parameters");
    WorkerGroup group("actor", mesh);
    group.offload();  // of a mesh of the CPU: nothing happens
    group.restore();
  }));
}
