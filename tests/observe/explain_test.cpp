// Explanations and pictures, without running or communicating.
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

using namespace dtensor;
using namespace dtensor::test;

namespace {

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A mesh that this thread is rank 0 of, with nobody else.
struct Fake {
  explicit Fake(std::vector<int64_t> sizes)
      : world(comm::make_fake_transport(0, static_cast<int>(c10::multiply_integers(sizes)))), use(world),
        mesh(init_device_mesh(torch::kCPU, sizes)) {}
  World world;
  World::Use use;
  DeviceMesh mesh;
};

}  // namespace

TEST_CASE("explain: choices and moves are those of the call", "[explain]") {
  CHECK_NOTHROW(on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto a = placed(fractions({8, 6}), mesh, {shard(0), shard(1)}), b = placed(fractions({6, 4}), mesh, {replicate(), replicate()});
    const auto pending = placed(fractions({8, 6}), mesh, {shard(0), partial()});
    {
      CommDebugMode comm;
      const auto plan = explain("aten::mm", a, b);
      require(comm.count() == 0, "test", "explaining communicated");
      require(plan.outputs.size() == 1 && plan.outputs[0] == DTensor(at::mm(a, b)).layout().with(plan.outputs[0]->placements()) &&
                  str(DTensor(at::mm(a, b)).placements()) == str(plan.outputs[0]->placements()), "test", "another output:\n{}", plan.str());
      require(says(plan.str(), "products over k") && says(plan.str(), "* S(1), S(0) -> P(sum)") && says(plan.str(), "mat2"), "test", "{}",
              plan.str());
    }
    const auto plan = explain("aten::relu", {pending});
    CommDebugMode comm;
    torch::relu(pending);
    int64_t bytes = 0;
    for (const auto& move : plan.moves) bytes += move.bytes;
    require(plan.moves.size() == 1 && plan.moves[0].argument == "self" && bytes == comm.bytes() && comm.count() == 1, "test", "{}\n{}",
            plan.str(), comm.str());
    for (const auto& options : plan.options) {
      require(std::ranges::count_if(options, [](const auto& o) { return o.chosen; }) == 1, "test", "one is chosen");
    }
    const auto brought_back = explain("aten::relu_", {placed(fractions({8, 6}), mesh, {shard(0), partial()})});
    require(brought_back.moves.size() == 1 && brought_back.outputs[0] == brought_back.operands[0], "test", "{}", brought_back.str());
    const auto in_place = explain("aten::relu_", {a});
    require(in_place.outputs.size() == 1 && in_place.outputs[0] == in_place.operands[0], "test", "{}", in_place.str());
    const auto lists = explain("aten::cat", {std::vector<at::Tensor>{a, a}, 1});
    require(says(lists.str(), "tensors[1]"), "test", "{}", lists.str());
    const auto logits = placed(fractions({8, 4000}), mesh, {shard(0), shard(1)});
    const auto lowered = explain("aten::_log_softmax", {logits, 1, false});
    require(lowered.lowered && says(lowered.str(), "communicated within"), "test", "{}", lowered.str());
    const auto unruled = explain("aten::_pdist_forward", a, 2.0);
    require(unruled.reason.empty() && says(unruled.str(), "no rule"), "test", "{}", unruled.str());
  }));
}

TEST_CASE("explain: what it refuses", "[explain]") {
  Fake fake({4});
  const auto a = zeros({8, 6}, fake.mesh, {shard(0)}).tensor();
  CHECK(says(words_of([&] { explain("aten::nothing", a); }), "no operator"));
  CHECK(says(words_of([&] { explain("aten::matmul", a, a); }), "composes"));
  CHECK(says(words_of([&] { explain("aten::mm", a, a); }), "mat1 and mat2 shapes cannot be multiplied"));
  CHECK(says(words_of([&] { explain("aten::relu", at::ones({2})); }), "no argument is distributed"));
  CHECK(!words_of([&] { explain("aten::mm", a); }).empty());
}

TEST_CASE("explain: a write to a piece of a cut dim", "[explain]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = distribute_tensor(torch::ones({4, 6}), mesh, {shard(0)}).tensor();
    require(explain("aten::zero_", x).carried.empty(), "test", "there is no view yet");
    const auto row = x.select(0, 1);
    const auto explanation = explain("aten::zero_", row);
    require(explanation.carried.size() == 1 && explanation.carried[0].bytes == 3 * 4, "test", "got {}", explanation.str());
    CommDebugMode comm;
    row.zero_();
    require(comm.bytes() == explanation.carried[0].bytes, "test", "explained {}; got {}", explanation.str(), comm.str());
    const auto error = words_of<Error>([&] { explain("aten::add.Tensor", x); });
    require(error.find("aten::add.Tensor") != std::string::npos && error.find("hint:") != std::string::npos, "test", "got {}", error);
  }));
}

TEST_CASE("explain: any number of ranks", "[explain]") {
  Fake fake({64, 64});
  const auto x = zeros({8192, 4096}, fake.mesh, {shard(0), replicate()}), w = zeros({4096, 4096}, fake.mesh, {replicate(), shard(1)});
  const auto plan = explain("aten::mm", x.tensor(), w.tensor());
  CHECK(str(plan.outputs.at(0)->placements()) == "(S(0), S(1))");
  CHECK(plan.moves.empty());
}

TEST_CASE("visualize: grids and lists", "[explain]") {
  Fake fake({2, 2});
  const auto picture = [&](std::vector<int64_t> sizes, Placements placements) {
    const auto text = visualize(*Layout::get(fake.mesh, placements, sizes, torch::kFloat));
    return text.substr(text.find('\n') + 1);
  };
  CHECK(picture({4, 6}, {shard(0), shard(1)}) == "    | 0:3 | 3:6\n0:2 | 0   | 1\n2:4 | 2   | 3\n");
  CHECK(picture({5}, {shard(0), replicate()}) == " | 0:3 | 3:5\n | 0 1 | 2 3\n");
  CHECK(picture({4}, {partial(), shard(0)}) == " | 0:2 | 2:4\n | 0+2 | 1+3\n+ along dim0: the value is the sum of what the ranks hold\n");
  CHECK(picture({4}, {partial(ReduceOp::max), replicate()}) ==
        " | 0:4\n | 0+2 1+3\n+ along dim0: the value is the max of what the ranks hold\n");
  CHECK(picture({3}, {shard(0), shard(0)}) == " | 0:1 | 1:2 | 2:3\n | 0   | 1   | 2\nranks 3 hold nothing\n");
  CHECK(picture({8}, {strided_shard(0, 2), replicate()}) == " | 0:2 | 2:4 | 4:6 | 6:8\n | 0 1 | 2 3 | 0 1 | 2 3\n");
  CHECK(picture({}, {replicate(), replicate()}) == " | 0:1\n | 0-3\n");
  CHECK(says(picture({0, 3}, {shard(0), replicate()}), "no elements"));
  CHECK(picture({2, 3, 4}, {shard(0), shard(2)}) ==
        "dim 0 | dim 1 | dim 2 | ranks\n0:1   | 0:3   | 0:2   | 0\n0:1   | 0:3   | 2:4   | 1\n1:2   | 0:3   | 0:2   | 2\n"
        "1:2   | 0:3   | 2:4   | 3\n");
  CHECK_THROWS_AS(visualize(at::ones({2})), Error);
}

TEST_CASE("visualize: many ranks and files", "[explain]") {
  Fake fake({4096});
  const auto text = visualize(zeros({1 << 20, 8}, fake.mesh, {shard(0)}).tensor());
  CHECK(says(text, "... 4032 more regions"));
  CHECK(std::ranges::count(text, '\n') < 80);
  const auto path = (std::filesystem::temp_directory_path() / fmt::format("dtensor-{}.svg", ::getpid())).string();
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {64}, {64, 3}, {2, 64, 3}}) {
    visualize_svg(*Layout::get(fake.mesh, {replicate()}, sizes, torch::kFloat), path);
    std::ifstream file(path);
    std::stringstream content;
    content << file.rdbuf();
    CHECK((says(content.str(), "<svg") && says(content.str(), "</svg>") &&
           says(content.str(), "0-4095") == (sizes != std::vector<int64_t>{0})));
  }
  std::filesystem::remove(path);
  CHECK_THROWS_AS(visualize_svg(zeros({4}, fake.mesh, {shard(0)}).tensor(), "/nowhere/x.svg"), Error);
}
