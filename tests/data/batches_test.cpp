// dt::batches gives every rank what a DataLoader gives one device, with its random numbers.
#include "tests/support/batches_support.hpp"

#include "src/dispatch/replicated.hpp"

#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Compares on 1 to 4 ranks and 2x2, over three transports, bit for bit.
void check_epochs(size_t workers, bool data_draws, bool rank_draws, LoadOn where = LoadOn::automatic) {
  const auto expected = plain_epochs(workers, data_draws, rank_draws);
  REQUIRE(expected.size() == (rank_draws ? 32u : 22u));
  const auto body = [&](const DeviceMesh& mesh) {
    Placements placements(mesh.ndim(), shard(0));
    if (mesh.ndim() == 2) placements[1] = shard(2);
    const auto got = mesh_epochs(mesh, placements, workers, data_draws, rank_draws, where);
    require(got.size() == expected.size(), "test", "got {} results; expected {}", got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) same(got[i], expected[i], fmt::format("result {}", i).c_str());
    require(DTensor(got[0]).placements() == PlacementsRef(placements), "test", "data lies as {}", str(DTensor(got[0]).placements()));
    if (mesh.ndim() == 2) require(DTensor(got[1]).placements()[1].is_replicate(), "test", "the target has no dim 2");
    check_generators(mesh);
  };
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}) {
      INFO(transport << " " << sizes.size() << " " << sizes[0]);
      CHECK_NOTHROW(on_mesh(sizes, body, transport));
    }
  }
}

}  // namespace

TEST_CASE("batches: the plain program's without workers", "[data]") {
  check_epochs(0, false, true);
  check_epochs(0, true, true);
}

TEST_CASE("batches: the plain program's with workers", "[data]") {
  check_epochs(1, false, true);
  check_epochs(3, false, true);
  check_epochs(1, true, false);
}

TEST_CASE("batches: the plain program's whoever loads", "[data]") {
  check_epochs(0, true, true, LoadOn::first_rank);
  check_epochs(2, false, true, LoadOn::every_rank);
  check_epochs(1, true, false, LoadOn::every_rank);
}

// In the plain program workers and the loop draw from one generator at the same time: which number is whose is up to the threads.
TEST_CASE("batches: ranks agree where workers and the program both draw", "[data]") {
  const auto body = [](const DeviceMesh& mesh, size_t workers) {
    Spmd spmd(mesh);
    torch::manual_seed(5);
    auto loader = ramp_loader(workers, [](auto, auto) { return torch::rand({4}, torch::kDouble); });
    Tensors drawn;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : batches(*loader, mesh, {shard(0)})) {
        drawn.push_back(full_tensor(batch.data).flatten());
        drawn.push_back(full_tensor(torch::rand({30}, torch::kDouble)));
      }
    }
    check_generators(mesh);
    const NoSpmd plain;
    const auto all = torch::cat(drawn);
    require(dispatch::ranks_that_differ(all, mesh).empty(), "test", "ranks hold different values");
    require(std::get<0>(at::_unique(all)).numel() == 2 * (23 * 4 + 5 * 30), "test", "workers and ranks draw the same numbers");
  };
  for (const size_t workers : {1, 3}) {
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) { body(mesh, workers); }, transport));
    }
  }
}

TEST_CASE("batches: a loop that is left goes on drawing alike", "[data]") {
  CHECK_NOTHROW(on_mesh({3}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    torch::manual_seed(1);
    for (int epoch = 0; epoch < 2; ++epoch) {
      auto loader = ramp_loader(2, augmented);
      for (auto& batch : batches(*loader, mesh, {shard(0)})) {
        if (batch.data.size(0) == 5) break;
      }
      check_generators(mesh);
    }
  }));
}

TEST_CASE("batches: what the loader throws is thrown on all ranks", "[data]") {
  const auto fails = [](at::Tensor data, size_t index) {
    TORCH_CHECK(index != 7, "example 7 is lost");
    return data;
  };
  for (const size_t workers : {0, 2}) {
    std::atomic<int> threw{0};
    CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
          Ramp(23, fails).map(torch::data::transforms::Stack<>()), torch::data::DataLoaderOptions().batch_size(4).workers(workers));
      int seen = 0;
      try {
        for (auto& batch : batches(*loader, mesh, {shard(0)})) seen += static_cast<int>(batch.data.size(0));
      } catch (const std::exception& error) {
        require(std::string(error.what()).find("example 7 is lost") != std::string::npos, "test", "got {}", error.what());
        const bool names = std::string(error.what()).find("rank 0, which loads for all") != std::string::npos;
        require(names == (workers > 0 && mesh.world().rank() > 0), "test", "got {}", error.what());
        ++threw;
      }
      require(seen == 4, "test", "saw {} examples", seen);
    }));
    CHECK(threw == 3);
  }
}

TEST_CASE("batches: a dim that no tensor has is refused", "[data]") {
  CHECK_THROWS_WITH(on_mesh({2},
                            [](const DeviceMesh& mesh) {
                              auto loader = ramp_loader(0, {});
                              for (auto& batch : batches(*loader, mesh, {shard(3)})) static_cast<void>(batch);
                            }),
                    says("no tensor of the batch has the dim that mesh dimension 'dim0' is to cut"));
}

TEST_CASE("random generators: threads beside a rank", "[random][data]") {
  const auto in_a_thread = [](auto draw) {
    at::Tensor drawn;
    std::thread([&] { drawn = draw(); }).join();
    return drawn;
  };
  const auto draw = [] { return torch::rand({4}); };
  torch::manual_seed(3);
  const auto first = torch::rand({4}), second = in_a_thread(draw), third = torch::rand({4});
  CHECK_NOTHROW(on_mesh({1}, [&](const DeviceMesh& mesh) {  // as without ranks: one stream
    Spmd spmd(mesh);
    torch::manual_seed(3);
    same(torch::rand({4}), first, "before");
    same(in_a_thread(draw), second, "in a thread");
    same(torch::rand({4}), third, "afterwards");
  }));
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::manual_seed(3);
    mesh.world().barrier();
    const auto other = in_a_thread(draw);
    for (const auto& own : {first, second, third}) require(!other.equal(own), "test", "a thread repeats the rank's numbers");
    require(torch::rand({4}).equal(first), "test", "a thread moved the rank's stream");
  }));
}
