// An operator that fails on one rank only leaves the ranks out of step: their next calls throw and say so, whatever those calls are. One
// that fails on all ranks alike is over when it is caught.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include "src/comm/describe.hpp"

#include <atomic>
#include <chrono>
#include <thread>

using namespace dtensor;
using namespace dtensor::test;

namespace {

void says_all(const std::string& text, const std::vector<std::string>& parts, const char* what) {
  for (const auto& part : parts) require(text.find(part) != std::string::npos, "test", "{}: no '{}' in '{}'", what, part, text);
}

// Where the ranks of a test, which are threads, wait for each other without a collective. A failure is told to every rank, also to one
// that has not read the result of an earlier call yet: what comes before the failure has to be over on all of them.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}
  void wait() {
    const int end = (came_++ / ranks_ + 1) * ranks_;
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (came_ < end) {
      require(std::chrono::steady_clock::now() < patience, "test", "a rank did not come to the meeting");
      std::this_thread::yield();
    }
  }

 private:
  const int ranks_;
  std::atomic<int> came_{0};
};

void on_all(const std::function<void(World&, Meeting&)>& body, const std::vector<int>& sizes = {2, 3, 4}) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : sizes) {
      INFO(transport << ", " << ranks << " ranks");
      Meeting meeting(ranks);
      CHECK_NOTHROW(on_ranks(ranks, [&](World& world) { body(world, meeting); }, transport));
    }
  }
}

// Rows of a table by indices that are cut over the ranks, of which those in `wrong` have one that is out of range.
std::function<void()> rows_of(const DeviceMesh& mesh, const std::vector<int64_t>& wrong) {
  auto indices = torch::arange(2 * mesh.size(), torch::kLong).remainder(4);
  for (const auto part : wrong) indices[2 * part + 1] = 99;
  const auto table = distribute_tensor(counting({4, 3}), mesh, {replicate()});
  const auto cut = distribute_tensor(indices, mesh, {shard(0)});
  return [=] { torch::index_select(table, 0, cut); };
}

DTensor sum_of(const DeviceMesh& mesh, double value) { return from_local(torch::full({4}, value), mesh, {partial()}); }

}  // namespace

TEST_CASE("an operator that fails on one rank ends the calls of all who are told", "[errors][comm]") {
  on_all([](World& world, Meeting& meeting) {
    const auto mesh = line(world);
    const int odd = world.size() - 1;
    const auto bad = rows_of(mesh, {odd});
    const auto first = sum_of(mesh, 1), second = sum_of(mesh, 2);
    meeting.wait();
    // The rank makes a call less: what comes next has equal kinds and sizes, and would be mixed.
    const auto failed = words_of<std::exception>([&] {
      bad();
      const auto sum = first.full_tensor();
      require(!sum.eq(1 * world.size()).all().item<bool>(), "test", "a rank that did not fail got a sum without the one that did");
    });
    require(failed.find("out of range") != std::string::npos, "test", "rank {}: {}", world.rank(), failed);
    if (world.rank() != odd)
      says_all(failed, {"all_reduce(sum)", "rank " + std::to_string(odd) + " failed: aten::index_select"}, "the first call");
    for (int i = 0; i < 3; ++i) {
      const auto text = words_of<std::exception>([&] { second.full_tensor(); });
      says_all(text, {"all_reduce(sum)", "rank " + std::to_string(odd), "aten::index_select failed", "out of range"}, "later calls");
    }
  });
}

TEST_CASE("an operator that fails on one rank before a call of another kind", "[errors][comm]") {
  on_all([](World& world, Meeting& meeting) {
    const auto mesh = line(world);
    const auto bad = rows_of(mesh, {0});
    const auto sum = sum_of(mesh, 1);
    meeting.wait();
    words_of<std::exception>(bad);
    const auto text = words_of<std::exception>([&] {
      if (world.rank() == 0) torch::relu(sum);
      else sum_of(mesh, 2);  // an all_gather
    });
    says_all(text, {"rank 0 failed: aten::index_select failed on this rank"}, "calls of two kinds");
  });
}

TEST_CASE("an operator that fails on all ranks alike is over when it is caught", "[errors][comm]") {
  on_all([](World& world, Meeting&) {
    const auto mesh = line(world);
    std::vector<int64_t> everyone;
    for (int64_t rank = 0; rank < world.size(); ++rank) everyone.push_back(rank);
    const auto singular = distribute_tensor(torch::zeros({3, 3}), mesh, {replicate()});
    const auto table = distribute_tensor(counting({4, 3}), mesh, {replicate()});
    const auto outside = distribute_tensor(torch::full({2}, 99, torch::kLong), mesh, {replicate()});
    const auto pending = sum_of(mesh, 1);
    const std::vector<std::function<void()>> calls{
        [&] { torch::linalg_inv(singular); },
        [&] { torch::index_select(table, 0, outside); },
        rows_of(mesh, everyone),
        [&] {
          const auto kernel = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of cheese"); };
          local_map(kernel, mesh, {{replicate()}}, {{replicate()}})(table);
        },
        [&] {
          auto only = explicit_communication();
          torch::relu(pending);
        },
    };
    for (int again = 0; again < 2; ++again) {
      for (const auto& call : calls) {
        require(!words_of<std::exception>(call).empty(), "test", "nothing was thrown");
        same(sum_of(mesh, 1.5), torch::full({4}, 1.5 * world.size()), "a sum after an operator that failed on all");
      }
    }
  });
}

TEST_CASE("an operator that fails on all ranks of a smaller mesh does not concern a larger one", "[errors][comm]") {
  on_all([](World& world, Meeting&) {
    const auto all = line(world);
    const auto some = DeviceMesh(torch::kCPU, {0, 1}, {2}, {"pair"});
    if (world.rank() < 2) {
      const auto singular = distribute_tensor(torch::zeros({3, 3}), some, {replicate()});
      require(!words_of<std::exception>([&] { torch::linalg_inv(singular); }).empty(), "test", "nothing was thrown");
      same(sum_of(some, 1.5), torch::full({4}, 3.0), "a sum on the smaller mesh");
    }
    same(sum_of(all, 1.5), torch::full({4}, 1.5 * world.size()), "a sum on the larger mesh");
  }, {3, 4});
}

TEST_CASE("an operator that fails in one row of a mesh ends what goes over the rows", "[errors][comm]") {
  on_all([](World&, Meeting& meeting) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
    auto indices = torch::zeros({4}, torch::kLong);
    indices[3] = 99;  // in the second row's part
    const auto table = distribute_tensor(counting({4, 3}), mesh, {replicate(), replicate()});
    const auto cut = distribute_tensor(indices, mesh, {shard(0), replicate()});
    const bool failed = !words_of<std::exception>([&] { torch::index_select(table, 0, cut); }).empty();
    require(failed == (mesh.coordinate(0) == 1), "test", "which row failed");
    const auto along = [&](const Placements& placements) {
      return words_of<std::exception>([&] {
        const auto sum = from_local(torch::ones({4}), mesh, placements, {4}).full_tensor();
        require(sum.eq(2).all().item<bool>(), "test", "the sum in a row");
      });
    };
    require(along({replicate(), partial()}).empty(), "test", "a row, of which no rank failed alone, goes on");
    meeting.wait();
    const auto text = along({partial(), replicate()});
    says_all(text, {"failed: aten::index_select failed on this rank", "out of range"}, "over the rows");
    require(text.find("rank 2") != std::string::npos || text.find("rank 3") != std::string::npos, "test",
            "no rank of the second row in '{}'", text);
  }, {4});
}

TEST_CASE("ranks that call for different operators have diverged", "[errors][comm]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {2, 3, 4}) {
      INFO(transport << ", " << ranks << " ranks");
      CHECK_THROWS_WITH(on_ranks(ranks, [](World& world) {
        const auto sum = sum_of(line(world), 1);
        world.rank() == 0 ? torch::relu(sum.tensor()) : torch::sigmoid(sum.tensor());
      }, transport), says("the ranks diverged") && says("by aten::relu") && says("by aten::sigmoid"));
    }
  }
}

TEST_CASE("what a call is for is compared whole and printed cut", "[comm]") {
  const std::string long_name(100, 'x');
  const auto call_for = [&](const std::string& op, const std::string& unit) {
    comm::Cause cause(op, true);
    comm::Subject subject(unit);
    comm::CallInfo call;
    comm::describe_purpose(call);
    return call;
  };
  const auto call = call_for("aten::mm", "blocks.0");
  CHECK(call.agrees_with(call_for("aten::mm", "blocks.0")));
  CHECK_FALSE(call.agrees_with(call_for("aten::bmm", "blocks.0")));
  CHECK_FALSE(call.agrees_with(call_for("aten::mm", "blocks.1")));
  CHECK_FALSE(call_for(long_name + "a", "").agrees_with(call_for(long_name + "b", "")));
  CHECK_FALSE(call_for("", long_name + "a").agrees_with(call_for("", long_name + "b")));
  CHECK_THAT(call.str(), says("by aten::mm for 'blocks.0'"));
  CHECK_THAT(call_for(long_name, long_name).str(), says("xxx"));
}
