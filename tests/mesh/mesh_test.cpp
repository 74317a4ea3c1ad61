// Device meshes: building, slicing, groups, and what bad input says.
#include "catch.hpp"
#include "tests/support/core_support.hpp"

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/base/error.hpp>

#include <ATen/ops/full.h>

#include <sstream>
#include <thread>

using namespace dtensor;
using test::Alone;
using test::on_ranks;
using test::says;

namespace {

std::vector<int64_t> list(c10::ArrayRef<int64_t> values) { return values.vec(); }

}  // namespace

TEST_CASE("a mesh over the world has coordinates and prints itself", "[mesh]") {
  Alone alone(6, 4);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 3}, {"dp", "tp"});
  REQUIRE(mesh.ndim() == 2);
  REQUIRE(mesh.size() == 6);
  REQUIRE(mesh.size(1) == 3);
  REQUIRE(mesh.dim("tp") == 1);
  REQUIRE(mesh.contains_this_rank());
  REQUIRE(list(mesh.coordinate()) == std::vector<int64_t>{1, 1});
  REQUIRE(mesh.coordinate_of(5) == std::vector<int64_t>{1, 2});
  REQUIRE(mesh.str() == "DeviceMesh(cpu, dp=2, tp=3, ranks=[[0, 1, 2], [3, 4, 5]])");
  std::ostringstream out;
  out << mesh;
  REQUIRE(out.str() == mesh.str());
  REQUIRE(init_device_mesh(c10::kCPU, {6}).names() == std::vector<std::string>{"dim0"});
}

TEST_CASE("equal meshes are one object per world", "[mesh]") {
  Alone alone(4);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
  REQUIRE(mesh == init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"}));
  REQUIRE(mesh.id() == DeviceMesh(c10::kCPU, {0, 1, 2, 3}, {2, 2}, {"dp", "tp"}).id());
  REQUIRE_FALSE(mesh == init_device_mesh(c10::kCPU, {2, 2}, {"a", "b"}));
  REQUIRE_FALSE(mesh == DeviceMesh(c10::kCPU, {0, 2, 1, 3}, {2, 2}, {"dp", "tp"}));
}

TEST_CASE("a mesh is sliced by name and flattened", "[mesh]") {
  Alone alone(12, 7);  // coordinate (1, 0, 1) of (2, 3, 2)
  const auto mesh = init_device_mesh(c10::kCPU, {2, 3, 2}, {"pp", "dp", "tp"});
  REQUIRE(mesh["dp"].ranks() == std::vector<int>{7, 9, 11});
  REQUIRE(list(mesh["dp"].coordinate()) == std::vector<int64_t>{0});
  REQUIRE(mesh["tp"].ranks() == std::vector<int>{6, 7});
  REQUIRE(mesh[{"dp", "tp"}].ranks() == std::vector<int>{6, 7, 8, 9, 10, 11});
  REQUIRE(mesh[{"tp", "pp"}].str() == "DeviceMesh(cpu, tp=2, pp=2, ranks=[[0, 6], [1, 7]])");
  REQUIRE(list(mesh[{"tp", "pp"}].coordinate()) == std::vector<int64_t>{1, 1});
  REQUIRE(mesh[{"pp", "dp", "tp"}] == mesh);

  const auto flat = mesh.flatten({"dp", "tp"}, "data");
  REQUIRE(flat.names() == std::vector<std::string>{"pp", "data"});
  REQUIRE(list(flat.sizes()) == std::vector<int64_t>{2, 6});
  REQUIRE(list(flat.coordinate()) == std::vector<int64_t>{1, 1});
  REQUIRE(mesh.flatten({"pp", "dp", "tp"}, "all").ranks() == mesh.ranks());
  REQUIRE_THROWS_WITH(mesh.flatten({"pp", "tp"}, "x"), says("adjacent"));
}

TEST_CASE("a slice by its index is one of any ranks", "[mesh]") {
  Alone alone(8, 1);
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2, 2}, {"pp", "dp", "tp"});
  const auto second = mesh.slice("pp", 1);
  REQUIRE(second.str() == "DeviceMesh(cpu, dp=2, tp=2, ranks=[[4, 5], [6, 7]])");
  REQUIRE_FALSE(second.contains_this_rank());
  REQUIRE(mesh.slice("pp", 0).contains_this_rank());
  REQUIRE(mesh.slice("dp", 1).ranks() == std::vector<int>{2, 3, 6, 7});
  REQUIRE(second.slice("dp", 0).slice("tp", 1).str() == "DeviceMesh(cpu, tp=1, ranks=[5])");
  REQUIRE_THROWS_WITH(mesh.slice("pp", 2), says("there is no slice 2 of dimension \"pp\"") && says("expected 0 to 1"));
  REQUIRE_THROWS_WITH(mesh.slice("pp", -1), says("expected 0 to 1"));
  REQUIRE_THROWS_WITH(mesh.slice("sp", 0), says("there is no dimension \"sp\""));
}

TEST_CASE("a rank outside a mesh may hold it", "[mesh]") {
  Alone alone(4, 3);
  const DeviceMesh mesh(c10::kCPU, {0, 2}, {2}, {"x"});
  REQUIRE_FALSE(mesh.contains_this_rank());
  REQUIRE_THROWS_WITH(mesh.coordinate(),
                      says("this rank is not in DeviceMesh(cpu, x=2, ranks=[0, 2])") && says("(rank 3)"));
  REQUIRE_THROWS_AS(mesh.communicator(0), Error);
}

TEST_CASE("bad meshes say what is wrong", "[mesh]") {
  Alone alone(4);
  REQUIRE_THROWS_WITH(init_device_mesh(c10::kCPU, {2, 3}), says("mesh (2, 3) has 6 ranks but the world has 4; hint: "));
  REQUIRE_THROWS_WITH(init_device_mesh(c10::kCPU, {2, 2}, {"dp", "dp"}), says("\"dp\" is repeated"));
  REQUIRE_THROWS_WITH(init_device_mesh(c10::kCPU, {2, 2}, {"dp", ""}), says("empty name"));
  REQUIRE_THROWS_WITH(init_device_mesh(c10::kCPU, {2, 2}, {"dp"}), says("2 sizes (2, 2) but 1 names"));
  REQUIRE_THROWS_WITH(init_device_mesh(c10::kCPU, {-2, -2}, {"a", "b"}), says("at least 1"));
  REQUIRE_THROWS_WITH(DeviceMesh(c10::kCPU, {0, 1, 1, 2}, {4}, {"x"}), says("rank 1 is repeated"));
  REQUIRE_THROWS_WITH(DeviceMesh(c10::kCPU, {0, 4}, {2}, {"x"}), says("rank 4 is out of range; expected 0 to 3"));
  REQUIRE_THROWS_WITH(DeviceMesh(c10::kCPU, {0, 1, 2}, {2}, {"x"}), says("sizes (2) need 2 ranks; got 3"));
  REQUIRE_THROWS_WITH(DeviceMesh(c10::kCPU, {}, {}, {}), says("at least one dimension"));
  const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
  REQUIRE_THROWS_WITH(mesh["pp"], says("there is no dimension \"pp\"; the mesh has [\"dp\", \"tp\"]"));
  REQUIRE_THROWS_WITH((mesh[{"tp", "tp"}]), says("\"tp\" is repeated"));
  REQUIRE_THROWS_WITH(mesh.size(2), says("out of range"));
  REQUIRE_THROWS_AS(mesh.communicator({1, 0}), Error);
}

TEST_CASE("groups along mesh dimensions connect the right ranks", "[mesh]") {
  REQUIRE_NOTHROW(on_ranks(6, [](World& world) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 3, 1}, {"dp", "tp", "one"});
    const auto sum = [&](comm::Communicator& group) {
      return group.all_reduce(at::full({1}, 1 << world.rank(), at::kLong), ReduceOp::sum).get().item<int64_t>();
    };
    const int row = world.rank() / 3, column = world.rank() % 3;
    require(sum(mesh.communicator(0)) == (1 << column | 1 << (column + 3)), "test", "wrong group along dp");
    require(sum(mesh.communicator(1)) == 7 << 3 * row, "test", "wrong group along tp");
    require(sum(mesh.communicator({0, 1})) == 63, "test", "wrong group along both");
    require(sum(mesh.communicator(2)) == 1 << world.rank(), "test", "wrong group of one");
    require(mesh.communicator(0).name() == "dp" && mesh.communicator({0, 1}).name() == "dp+tp", "test", "wrong names");
    require(&mesh["tp"].communicator(0) == &mesh.communicator(1), "test", "a slice shares its mesh's group");
    world.barrier();
  }));
}

TEST_CASE("a thread in no world is a world of one", "[mesh]") {
  std::thread([] {
    if (World::current().size() != 1 || init_device_mesh(c10::kCPU, {1}).coordinate(0) != 0) std::terminate();
  }).join();
  Alone alone(3, 2);
  REQUIRE(World::current().rank() == 2);
  {
    Alone inner(2, 1);
    REQUIRE(World::current().size() == 2);
  }
  REQUIRE(World::current().size() == 3);
}

TEST_CASE("a mesh that outlives its world says so", "[mesh]") {
  const auto mesh = [] {
    Alone alone(2);
    return init_device_mesh(c10::kCPU, {2}, {"dp"});
  }();
  REQUIRE(mesh.size() == 2);
  REQUIRE_THROWS_WITH(mesh.communicator(0), says("has ended"));
}
