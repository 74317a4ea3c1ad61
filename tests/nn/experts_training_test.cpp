// Models of experts train on meshes with the numbers of one device: every router, drop, loss and balance, cut in every way.
#include "tests/support/experts_training.hpp"
#include "tests/support/refuses.hpp"

namespace dtensor::test::experts {

namespace {

const std::vector<std::pair<std::string, nn::MoEOptions>>& kinds() {
  static const std::vector<std::pair<std::string, nn::MoEOptions>> all{
      {"dropless", options_of()},
      {"gelu and sigmoid", options_of([](auto& o) { o.gated = false, o.router.scores = "sigmoid", o.router.scale = 2.5; })},
      {"groups", options_of([](auto& o) { o.router.groups = 4, o.router.top_groups = 2, o.router.top_k = 3; })},
      {"sinkhorn and jitter", options_of([](auto& o) { o.router.choose_by = "sinkhorn", o.router.jitter = 0.1; })},
      {"turns", options_of([](auto& o) { o.router.choose_by = "turns"; })},
      {"shared expert", options_of([](auto& o) { o.shared_hidden = 6; })},
      {"capacity by position", options_of([](auto& o) { o.capacity_factor = 0.8; })},
      {"capacity by probability", options_of([](auto& o) { o.capacity_factor = 0.8, o.drop = "probability"; })},
      {"balance of the batch", options_of([](auto& o) { o.balance_loss = 0.5, o.z_loss = 0.1; })},
      {"balance of sequences", options_of([](auto& o) { o.balance_loss = 0.5, o.balance_over = "sequence"; })},
      {"global balance", options_of([](auto& o) { o.balance_loss = 0.5, o.balance_over = "global"; })},
      {"bias", options_of([](auto& o) { o.bias_rate = 0.05, o.router.scores = "sigmoid"; })},
      {"centered bias", options_of([](auto& o) { o.bias_rate = 0.05, o.center_bias = true; })},
      {"all at once", options_of([](auto& o) {
         o.capacity_factor = 1, o.balance_loss = 0.3, o.z_loss = 0.1, o.bias_rate = 0.05, o.shared_hidden = 6, o.drop = "probability";
       })},
  };
  return all;
}

}  // namespace

TEST_CASE("experts train on any mesh with the numbers of one device", "[experts]") {
  for (const auto& [name, options] : kinds()) {
    const auto expected = on_one_device(options);
    CAPTURE(name);
    for (const std::string transport : {"threads", "shm"}) {
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&, kind = name, o = options](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "ep"});
            check_on(mesh, o, {{shard(0), shard(0)}, {}}, expected, kind);
            check_on(mesh, o, {{shard(0), shard(1)}, {.dispatch = "allgather"}, "dp"}, expected, kind + ", gathered and fully sharded");
          },
          transport));
    }
  }
}

TEST_CASE("experts train with each way of cutting the mesh", "[experts]") {
  const auto options = kinds().back().second;
  const auto expected = on_one_device(options);
  const auto check_all = [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2, 2}, {"dp", "cp", "tp"});
    const Placement b = shard(0), l = shard(1), r = replicate();
    check_on(mesh, options, {{b, l, r}, {.dims = {"cp"}, .hidden = "tp"}}, expected, "experts over cp and their width over tp");
    check_on(mesh, options, {{b, l, l}, {.dims = {"cp", "tp"}}, "dp"}, expected, "experts over cp x tp");
    check_on(mesh, options, {{b, l, r}, {.dims = {"dp", "cp", "tp"}}}, expected, "experts over all ranks");
    check_on(mesh, options, {{b, b, r}, {.dims = {"dp"}, .hidden = "tp"}, "cp"}, expected, "fully sharded over what is left");
  };
  for (const std::string transport : {"threads", "gloo"}) REQUIRE_NOTHROW(on_ranks(8, check_all, transport));
}

TEST_CASE("experts of 1 to 8 ranks train alike", "[experts]") {
  const auto options = options_of([](auto& o) { o.balance_loss = 0.3; });
  const auto expected = on_one_device(options), of_six = on_one_device(options_of([](auto& o) { o.experts = 6; }));
  for (const int ranks : {1, 2, 4, 8}) {
    CAPTURE(ranks);
    REQUIRE_NOTHROW(on_ranks(ranks, [&](World&) {
      const auto mesh = init_device_mesh(c10::kCPU, {ranks}, {"ep"});
      check_on(mesh, options, {{shard(0)}, {}}, expected, "cut along the batch");  // of 8 ranks four have no tokens
    }));
  }
  REQUIRE_NOTHROW(on_ranks(3, [&](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {3}, {"ep"});
    check_on(mesh, options_of([](auto& o) { o.experts = 6; }), {{shard(1)}, {}}, of_six, "three ranks");
  }));
}

TEST_CASE("experts that are computed again route alike and count once", "[experts]") {
  for (const auto& [name, options] : kinds()) {
    CAPTURE(name);
    const auto expected = on_one_device(options), again = on_one_device(options, true);
    REQUIRE_NOTHROW(check(again, expected, "one device", 0));
    if (name != "all at once") continue;
    for (const std::string transport : {"threads", "shm"}) {
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&, o = options](World&) {
            check_on(init_device_mesh(c10::kCPU, {2}, {"ep"}), o, {{shard(0)}, {}}, expected, "two ranks", true);
          },
          transport));
    }
  }
}

TEST_CASE("experts that cannot be cut are refused on every rank", "[experts]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "ep"});
    const Spmd spmd(mesh);
    Net net(options_of());
    refuses("there is no dimension \"pe\"", [&] { expert_parallel(*net, mesh, {.dims = {"pe"}}); });
    refuses("ep cannot cut both", [&] { expert_parallel(*net, mesh, {.hidden = "ep"}); });
    refuses("there is no way to dispatch", [&] { expert_parallel(*net, mesh, {.dispatch = "pigeon"}); });
    Net odd(options_of([](auto& o) { o.experts = 6; }));
    refuses("moe.experts: experts = ranks x experts of a rank: 6 experts cannot be shared alike by 4 ranks",
            [&] { expert_parallel(*odd, mesh, {.dims = {"dp", "ep"}}); });
    expert_parallel(*net, mesh);
    refuses("are cut already", [&] { expert_parallel(*net, mesh); });
    refuses("no layer of experts", [&] { expert_parallel(*net->in, mesh); });
    // A token of one rank that is not a number.
    auto x = torch::zeros({kBatch, kLength, kDim});
    const auto cut = distribute_tensor(x, mesh, {shard(0), shard(0)});
    if (world.rank() == 3) {
      const NoSpmd plain;
      cut.to_local().fill_(std::nan(""));
    }
    if (world.rank() >= 2) refuses("moe.experts: the routing is not finite on rank 3", [&] { net->moe(cut); });
  }));
}

}  // namespace dtensor::test::experts
