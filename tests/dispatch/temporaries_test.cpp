// What an in-place operator writes is cut, where it is whole and nobody laid it out, instead of its operand gathered.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"
#include "tests/support/stderr_support.hpp"

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

at::Tensor cut(const at::Tensor& plain, const DeviceMesh& mesh, int64_t dim = 0) {
  return distribute_tensor(plain, mesh, {shard(dim)}).tensor();
}

bool lies(const at::Tensor& tensor, const Placement& placement) { return DTensor(tensor).placements()[0] == placement; }

// On two and three ranks that are threads, and two that talk through shared memory.
void on_ranks_of(const std::function<void(const DeviceMesh&)>& body) {
  CHECK_NOTHROW(on_mesh({2}, body));
  CHECK_NOTHROW(on_mesh({3}, body));
  CHECK_NOTHROW(on_mesh({2}, body, "shm"));
}

void require_whole(bool condition, const char* what) { dtensor::require(condition, "test", "{}", what); }

}  // namespace

TEST_CASE("temporaries: an accumulator is cut once in place and out of place alike", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const auto plain = counting({6, 4});
    const Spmd spmd(mesh);
    const auto x = cut(plain, mesh);
    auto state = torch::zeros({6, 4}, torch::kDouble), sum = torch::zeros({6, 4}, torch::kDouble);
    const auto handle = state;
    {
      CommDebugMode comm;
      for (int i = 0; i < 3; ++i) state += x.sin(), state *= x, sum = sum + x.sin(), state.addcmul_(x, x, 0.5), state.sigmoid_();
      expect(comm, 0, "the loops");
    }
    auto expected = [&] {
      const NoSpmd outside;
      return torch::zeros({6, 4}, torch::kDouble);
    }();
    for (int i = 0; i < 3; ++i) expected += plain.sin(), expected *= plain, expected.addcmul_(plain, plain, 0.5), expected.sigmoid_();
    require_whole(lies(state, shard(0)) && lies(handle, shard(0)) && lies(sum, shard(0)), "cut as the operand");
    same(state, expected, "the state");
    same(handle, expected, "the other handle");
  });
}

TEST_CASE("temporaries: a state that is part of a graph", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const auto plain = counting({6, 4}), square = counting({4, 4});
    const Spmd spmd(mesh);
    const auto train = [](const at::Tensor& x, const at::Tensor& weight) {
      auto state = torch::zeros({6, 4}, torch::kDouble);
      for (int i = 0; i < 3; ++i) state = state.mm(weight).add_(x).tanh_();
      state.pow(2).sum().backward();
      return weight.grad();
    };
    at::Tensor expected;
    {
      const NoSpmd outside;
      expected = train(plain, square.clone().requires_grad_());
    }
    CommDebugMode comm;
    const auto got = train(cut(plain, mesh), distribute_tensor(square, mesh, {replicate()}).tensor().detach().requires_grad_());
    require_whole(comm.count(comm::Collective::all_gather) == 0, "nothing is gathered");
    require_whole(full_tensor(got).allclose(expected, 1e-12, 1e-12), "the gradient");
  });
}

TEST_CASE("temporaries: views parameters what a user laid out and destinations of copies stay whole", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const auto plain = counting({6, 4});
    const Spmd spmd(mesh);
    const auto x = cut(plain, mesh);
    auto base = torch::ones({6, 4}, torch::kDouble);
    auto view = base.narrow(1, 0, 4), other = base.detach();
    base += x;
    require_whole(lies(base, replicate()) && lies(view, replicate()), "a base and its views");
    same(base, plain + 1, "the base"), same(view, plain + 1, "its view"), same(other, plain + 1, "what shares its memory");
    view += x;
    same(base, plain + 1 + plain, "the base of a written view");

    auto chunks = torch::ones({6, 8}, torch::kDouble).unsafe_chunk(2, 1);
    chunks[0] += x;
    same(chunks[0], plain + 1, "a chunk"),
        same(chunks[1], torch::ones({6, 4}, torch::kDouble).to(torch::kDouble).mul(1), "the other chunk");

    auto wanted = zeros({6, 4}, mesh, {replicate()}, torch::kDouble).tensor();
    wanted += x;
    auto moved = cut(plain, mesh, 1);
    auto asked = redistribute(moved, Placements{replicate()});
    asked += x;
    require_whole(lies(wanted, replicate()) && lies(asked, replicate()), "what a user laid out");
    same(wanted, plain, "what a user laid out"), same(asked, plain + plain, "what a user moved");

    auto parameter = torch::ones({6, 4}, torch::kDouble).requires_grad_();
    {
      const torch::NoGradGuard guard;
      parameter += x;
    }
    require_whole(lies(parameter, replicate()), "a parameter");

    auto destination = torch::zeros({6, 4}, torch::kDouble);
    destination.copy_(x);
    require_whole(lies(destination, replicate()), "the destination of a copy");
    same(destination, plain, "the destination of a copy");
  });
}

TEST_CASE("temporaries: running statistics keep their layout", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    torch::nn::BatchNorm1d norm(4);
    norm->to(torch::kDouble);
    for (int i = 0; i < 2; ++i) norm(cut(counting({6, 4}), mesh, 0)), norm(cut(counting({6, 4}), mesh, 1));
    for (const auto& buffer : norm->buffers()) require_whole(lies(buffer, replicate()), "a running statistic");
    auto average = torch::zeros({4}, torch::kDouble);
    for (int i = 0; i < 2; ++i) average.mul_(0.9).add_(cut(counting({6, 4}), mesh).mean(0), 0.1);  // a sum that is pending
    require_whole(lies(average, replicate()), "an average over the batch");
  });
}

TEST_CASE("temporaries: explain says that the written tensor is cut", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    const auto x = cut(counting({6, 4}), mesh);
    auto state = torch::zeros({6, 4}, torch::kDouble);
    const auto plan = explain("aten::add_.Tensor", state, x);
    require_whole(plan.moves.size() == 1 && plan.moves[0].argument == "self" && plan.moves[0].bytes == 0, "the move of self");
    require_whole(plan.outputs.size() == 1 && plan.outputs[0]->placements()[0] == shard(0), "where self lies then");
    require_whole(lies(state, replicate()), "explaining changes nothing");
    const auto wanted = zeros({6, 4}, mesh, {replicate()}, torch::kDouble);
    require_whole(explain("aten::add_.Tensor", wanted.tensor(), x).moves[0].argument == "other", "of what a user laid out");
  });
}

TEST_CASE("temporaries: work that every rank does whole is counted with the bytes", "[temporaries]") {
  on_ranks_of([](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    const auto x = cut(counting({6, 4}), mesh);
    auto wanted = zeros({6, 4}, mesh, {replicate()}, torch::kDouble).tensor();
    ReplicationDebugMode whole;
    for (int i = 0; i < 2; ++i) wanted += x;
    wanted.addcmul_(x, x);  // cheaper on parts, with what is written brought back
    auto state = torch::zeros({6, 4}, torch::kDouble);
    state += x;
    (x + 1).sum().item<double>();
    require_whole(whole.count() == 2 && whole.bytes() == 2 * 192, "two calls");
    require_whole(whole.lines().begin()->first.op == "aten::add_.Tensor" && whole.lines().begin()->second.count == 2, "by operator");
    require_whole(whole.str().find("f64[6, 4] (S(0))") != std::string::npos, "with the operands");
    whole.reset();
    {
      ReplicationDebugMode inner;
      wanted += x;
      require_whole(inner.count() == 1 && whole.count() == 0, "the innermost counts");
    }
  });
}

TEST_CASE("temporaries: large work that every rank does whole is told once by one rank", "[temporaries]") {
  const auto add = [](int64_t rows) {
    CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
      auto wanted = zeros({rows, 64}, mesh, {replicate()}, torch::kDouble).tensor();
      const auto x = cut(torch::ones({rows, 64}, torch::kDouble), mesh);
      for (int i = 0; i < 3; ++i) wanted.hypot_(x);
    }));
  };
  const std::string text = "dtensor: aten::hypot_(f64[192, 64] (R)";
  set_replication_warnings(true);  // forgets what other tests were told
  const auto said = stderr_of([&] { add(192), add(192), add(9); });
  INFO(said);
  const auto first = said.find(text);
  CHECK((first != std::string::npos && said.find("gathers 98304 bytes") != std::string::npos &&
         said.find("aten::hypot_", first + 20) == std::string::npos));
  set_replication_warnings(false);
  CHECK(stderr_of([&] { add(256); }).empty());
  set_replication_warnings(true);
}
