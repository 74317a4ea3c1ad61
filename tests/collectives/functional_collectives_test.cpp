// Collectives on plain tensors: values, gradients as adjoints, lists, uneven pieces, given memory, on every transport.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/collectives.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// What rank r of the group brings: whole numbers, so that sums are exact in any order.
at::Tensor of_rank(int r, std::vector<int64_t> sizes) {
  return (torch::arange(torch::tensor(sizes).prod().item<int64_t>(), torch::kDouble).reshape(sizes) + 100 * r);
}

void equal(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  require(!is_dtensor(got) && got.sizes() == expected.sizes() && got.equal(expected), "test", "{} differs", what);
}

// A linear map and its gradient are adjoint: the sum over ranks of <A x, y> is that of <x, A* y>.
template <class Map>
void adjoint(const DeviceMesh& mesh, const at::Tensor& input, const char* what, const Map& map) {
  const int rank = dtensor::detail::group_of(mesh).rank();
  const auto x = input.clone().requires_grad_();
  const at::Tensor result = map(x);
  require(result.requires_grad(), "test", "{} has no gradient", what);
  const auto y = (torch::arange(result.numel(), torch::kDouble) * (rank + 2) + rank).reshape(result.sizes());
  const at::Tensor gradient = torch::autograd::grad({result}, {x}, {y}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  const at::Tensor sums = all_reduce(torch::stack({(result * y).sum(), (x * gradient).sum()}).detach(), mesh);
  require(sums[0].item<double>() == sums[1].item<double>(), "test", "{}: <Ax, y> = {}, <x, A*y> = {}", what, sums[0].item<double>(),
          sums[1].item<double>());
}

void on_every_transport(const std::function<void(World&, const DeviceMesh&)>& body) {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      INFO(transport << ", " << ranks << " ranks");
      CHECK_NOTHROW(on_ranks(
          ranks, [&](World& world) { body(world, line(world)); }, transport));
    }
  }
}

}  // namespace

TEST_CASE("functional collectives: reductions", "[collectives]") {
  on_every_transport([](World& world, const DeviceMesh& mesh) {
    const int n = world.size(), r = world.rank();
    auto sum = of_rank(0, {3, 2}) * n + 100 * n * (n - 1) / 2;
    equal(all_reduce(of_rank(r, {3, 2}), mesh), sum, "sum");
    equal(all_reduce(of_rank(r, {3, 2}).t(), mesh), sum.t(), "the sum of transposed ones");
    equal(all_reduce(of_rank(r, {3, 2}), mesh, ReduceOp::max), of_rank(n - 1, {3, 2}), "max");
    CommDebugMode comm;
    const auto list = all_reduce(TensorVector{of_rank(r, {3, 2}), of_rank(r, {}), of_rank(r, {0, 4})}, mesh);
    expect(comm, n > 1 ? 1 : 0, "a list");
    equal(list[0], sum, "the first of a list");
    equal(list[1], of_rank(0, {}) * n + 100 * n * (n - 1) / 2, "a number of a list");
    equal(list[2], torch::empty({0, 4}, torch::kDouble), "nothing in a list");
    adjoint(mesh, of_rank(r, {3, 2}), "sum", [&](const at::Tensor& x) { return all_reduce(x, mesh); });
    adjoint(mesh, of_rank(r, {4}) * n, "avg", [&](const at::Tensor& x) { return all_reduce(x, mesh, ReduceOp::avg) * 24 * n; });
  });
}

TEST_CASE("functional collectives: gather and scatter along any dim with any lengths", "[collectives]") {
  on_every_transport([](World& world, const DeviceMesh& mesh) {
    const int n = world.size(), r = world.rank();
    for (const int64_t dim : {0, 1, -1}) {
      const auto sizes_with = [dim](int64_t length) {
        std::vector<int64_t> sizes{2, 3, 2};
        sizes[dim < 0 ? 2 : dim] = length;
        return sizes;
      };
      Lengths uneven;
      for (int k = 0; k < n; ++k) uneven.push_back(k % 3);
      std::vector<at::Tensor> even_parts, uneven_parts;
      for (int k = 0; k < n; ++k) even_parts.push_back(of_rank(k, sizes_with(2)));
      for (int k = 0; k < n; ++k) uneven_parts.push_back(of_rank(k, sizes_with(uneven[k])));
      const auto even_whole = torch::cat(even_parts, dim), uneven_whole = torch::cat(uneven_parts, dim);
      equal(all_gather(even_parts[r], mesh, {dim}), even_whole, "all_gather");
      equal(all_gather(uneven_parts[r], mesh, {dim, uneven}), uneven_whole, "all_gather of uneven pieces");
      equal(reduce_scatter(uneven_whole, mesh, ReduceOp::sum, {dim, uneven}), uneven_parts[r] * n, "reduce_scatter in uneven pieces");
      const auto chunk = even_whole.narrow(dim, 0, even_whole.size(dim) - 1);  // uneven as torch.chunk
      const auto begin = std::min<int64_t>(2 * r, chunk.size(dim));
      equal(reduce_scatter(chunk, mesh, ReduceOp::sum, {dim}), chunk.narrow(dim, begin, std::min<int64_t>(2, chunk.size(dim) - begin)) * n,
            "reduce_scatter");
      const auto both = all_gather(TensorVector{even_parts[r], even_parts[r] + 1}, mesh, {dim});
      equal(both[1], even_whole + 1, "all_gather of a list");
      const auto scattered = reduce_scatter(TensorVector{even_whole, chunk}, mesh, ReduceOp::sum, {dim});
      equal(scattered[0], even_parts[r] * n, "reduce_scatter of a list");
      adjoint(mesh, even_parts[r], "all_gather", [&](const at::Tensor& x) { return all_gather(x, mesh, {dim}); });
      adjoint(mesh, uneven_parts[r], "uneven all_gather", [&](const at::Tensor& x) { return all_gather(x, mesh, {dim, uneven}); });
      adjoint(mesh, chunk + r, "reduce_scatter", [&](const at::Tensor& x) { return reduce_scatter(x, mesh, ReduceOp::sum, {dim}); });
      adjoint(mesh, even_parts[r], "a list", [&](const at::Tensor& x) {
        const auto parts = all_gather(TensorVector{x, x * 3}, mesh, {dim});
        return parts[0] + 2 * parts[1];
      });
    }
    auto memory = torch::zeros({2 * n, 3}, torch::kDouble);
    const auto whole = all_gather(of_rank(r, {2, 3}), mesh, {.into = memory});
    require(whole.data_ptr() == memory.data_ptr(), "test", "given memory was not used");
    equal(memory.narrow(0, 2 * (n - 1), 2), of_rank(n - 1, {2, 3}), "given memory");
  });
}

TEST_CASE("functional collectives: rows to ranks a root's tensor rings messages", "[collectives]") {
  on_every_transport([](World& world, const DeviceMesh& mesh) {
    const int n = world.size(), r = world.rank();
    Lengths send, recv;
    for (int k = 0; k < n; ++k) send.push_back((r + 2 * k) % 3);
    for (int k = 0; k < n; ++k) recv.push_back((k + 2 * r) % 3);
    require(exchange_lengths(send, mesh) == recv, "test", "other lengths were exchanged");
    const auto rows = of_rank(r, {dtensor::detail::sum_of(send), 2});
    std::vector<at::Tensor> expected;
    for (int k = 0; k < n; ++k) {
      int64_t all = 0, before = 0;
      for (int to = 0; to < n; ++to) all += (k + 2 * to) % 3;
      for (int to = 0; to < r; ++to) before += (k + 2 * to) % 3;
      expected.push_back(of_rank(k, {all, 2}).narrow(0, before, recv[k]));
    }
    equal(all_to_all(rows, mesh, send), torch::cat(expected), "all_to_all");
    adjoint(mesh, rows, "all_to_all", [&](const at::Tensor& x) { return all_to_all(x, mesh, send, recv); });

    const int root = n - 1;
    equal(broadcast(of_rank(r, {2, 2}), mesh, root), of_rank(root, {2, 2}), "broadcast");
    adjoint(mesh, of_rank(r, {2, 2}), "broadcast", [&](const at::Tensor& x) { return broadcast(x, mesh, root); });

    for (const int64_t by : {1, -1, 2}) {
      const int from = static_cast<int>(((r - by) % n + n) % n);
      const auto like = torch::empty({from + 1, 2}, torch::kDouble);
      equal(shift(of_rank(r, {r + 1, 2}), mesh, by, like), of_rank(from, {from + 1, 2}), "shift");
      adjoint(mesh, of_rank(r, {r + 1, 2}), "shift", [&](const at::Tensor& x) { return shift(x, mesh, by, like); });
    }

    if (r % 2 == 0 && r + 1 < n) {
      const auto x = of_rank(r, {3}).requires_grad_();
      dtensor::send(x, mesh, r + 1).sum().backward();
      equal(x.grad(), torch::full({3}, 5.0 * r, torch::kDouble), "the gradient of a message");
    } else if (r % 2 == 1) {
      const auto x = receive(torch::empty({3}, torch::kDouble).requires_grad_(), mesh, r - 1);
      equal(x.detach(), of_rank(r - 1, {3}), "a message");
      (x * 5 * (r - 1)).sum().backward();
    }
  });
}

TEST_CASE("functional collectives: a mesh of two dims under way inside Spmd", "[collectives]") {
  for (const std::string transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_ranks(
        4,
        [](World& world) {
          const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
          const int r = world.rank();
          Spmd spmd(mesh);
          at::Tensor mine;
          {
            NoSpmd plain;
            mine = of_rank(r, {2});
          }
          auto first = start_all_reduce(mine, mesh["tp"]);
          auto second = start_all_gather(mine, mesh);
          const auto all = std::move(second).wait(), pair = std::move(first).wait();
          NoSpmd plain;
          equal(pair, of_rank(r - r % 2, {2}) + of_rank(r - r % 2 + 1, {2}), "all_reduce over tp");
          equal(all, torch::cat({of_rank(0, {2}), of_rank(1, {2}), of_rank(2, {2}), of_rank(3, {2})}), "all_gather over both");
        },
        transport));
  }
}

TEST_CASE("functional collectives: bad calls are errors on every rank", "[collectives]") {
  on_ranks(3, [](World& world) {
    const auto mesh = line(world);
    const auto x = torch::ones({3, 2});
    refuses("only sum and avg have a gradient", [&] { all_reduce(torch::ones({2}).requires_grad_(), mesh, ReduceOp::max); });
    refuses("got dim 2 of 2 dims", [&] { all_gather(x, mesh, {2}); });
    refuses("got 2 lengths; expected one for each of the group's 3 ranks", [&] { all_gather(x, mesh, {0, {3, 3}}); });
    refuses("do not add up to the dim; got a sum of 2; expected 3", [&] { reduce_scatter(x, mesh, ReduceOp::sum, {0, {1, 1, 0}}); });
    refuses("do not add up to the rows; got a sum of 4; expected 3", [&] { all_to_all(x, mesh, {1, 1, 2}); });
    refuses("have one dtype and device", [&] { all_reduce(TensorVector{x, x.to(torch::kDouble)}, mesh); });
    refuses("the list of tensors is empty", [&] { all_reduce(TensorVector{}, mesh); });
    refuses("without a gradient", [&] { all_gather(torch::ones({1, 2}).requires_grad_(), mesh, {.into = torch::empty({3, 2})}); });
    refuses("the root is not in group", [&] { broadcast(x, mesh, 3); });
    refuses("hint: pass to_local()", [&] { all_reduce(distribute_tensor(x, mesh, {shard(0)}).tensor(), mesh); });
    refuses("was written while it was under way", [&] {
      auto y = x.clone();
      auto under_way = start_all_gather(y, mesh);
      y.add_(1);
      std::move(under_way).wait();
    });
    const auto both = torch::ones({2, 3, 2});  // one half travels while the other one is written
    auto half = start_all_reduce(both[0], mesh);
    both[1].add_(1);
    equal(std::move(half).wait(), x * 3, "a half");
    equal(all_reduce(x, mesh), x * 3, "the call after them");
  });
}

TEST_CASE("functional collectives: as many elements in other shapes are another call", "[collectives]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    const auto differ = [&](const std::function<void(const at::Tensor&, const DeviceMesh&, bool)>& call) {
      CHECK_THROWS_WITH(on_ranks(
                            2,
                            [&](World& world) {
                              const bool other = world.rank() == 1;
                              call(of_rank(0, other ? std::vector<int64_t>{2, 3} : std::vector<int64_t>{3, 2}), line(world), other);
                            },
                            transport),
                        says("the ranks diverged"));
    };
    differ([](const at::Tensor& x, const DeviceMesh& mesh, bool) { all_reduce(x, mesh); });
    differ([](const at::Tensor& x, const DeviceMesh& mesh, bool) { all_gather(x, mesh); });
    differ([](const at::Tensor& x, const DeviceMesh& mesh, bool) { broadcast(x, mesh); });
    differ([](const at::Tensor& x, const DeviceMesh& mesh, bool) { reduce_scatter(x, mesh); });
    differ([](const at::Tensor&, const DeviceMesh& mesh, bool other) { all_gather(torch::ones({2, 2}), mesh, {other ? 1 : 0}); });
    differ([](const at::Tensor&, const DeviceMesh& mesh, bool other) {
      reduce_scatter(torch::ones({2, 2}), mesh, ReduceOp::sum, {other ? 1 : 0});
    });
  }
}

TEST_CASE("functional collectives: tensors that are not plain and lengths that are none are refused in words", "[collectives]") {
  on_ranks(3, [](World& world) {
    const auto mesh = line(world);
    const auto x = torch::ones({3, 2}), sparse = x.to_sparse();
    const int next = (world.rank() + 1) % 3;
    for (const auto& [bad, text] : std::vector<std::pair<at::Tensor, std::string>>{
             {at::Tensor(), "an input is an undefined tensor"},
             {sparse, "an input is not dense; got a sparse tensor"},
             {torch::quantize_per_tensor(x, 0.1, 0, torch::kQInt8), "an input is quantized"}}) {
      refuses("[all_reduce] " + text, [&] { all_reduce(bad, mesh); });
      refuses("[all_reduce] " + text, [&] { all_reduce(TensorVector{x, bad}, mesh); });
      refuses("[all_gather] " + text, [&] { all_gather(bad, mesh); });
      refuses("[reduce_scatter] " + text, [&] { reduce_scatter(bad, mesh, ReduceOp::sum, {1}); });
      refuses("[all_to_all] " + text, [&] { all_to_all(bad, mesh, {1, 1, 1}); });
      refuses("[broadcast] " + text, [&] { broadcast(bad, mesh); });
      refuses("[shift] " + text, [&] { shift(bad, mesh); });
      refuses("[send] " + text, [&] { send(bad, mesh, next); });
      refuses("[receive] " + text, [&] { receive(bad, mesh, next); });
      refuses("[exchange_messages] " + text, [&] { exchange_messages({outgoing(bad, next)}, mesh); });
    }
    refuses("[shift] `like` is not dense", [&] { shift(x, mesh, 1, sparse); });
    refuses("[shift] a rank that shifts to itself gets its own tensor; got `like` of sizes [2, 2]; expected [3, 2]",
            [&] { shift(x, mesh, 3, torch::ones({2, 2})); });
    const std::string negative = "the length of a piece is negative; got -1 for rank 1 of the group";
    refuses("[reduce_scatter] " + negative, [&] { reduce_scatter(x, mesh, ReduceOp::sum, {0, {2, -1, 2}}); });
    refuses("[all_gather] " + negative, [&] { all_gather(x, mesh, {1, {2, -1, 2}}); });
    refuses("[all_to_all] " + negative, [&] { all_to_all(x, mesh, {2, -1, 2}); });
    refuses("[all_to_all] " + negative, [&] { all_to_all(x, mesh, {1, 1, 1}, {2, -1, 2}); });
    refuses("[exchange_lengths] " + negative, [&] { exchange_lengths({2, -1, 2}, mesh); });
    refuses("[all_to_all] got no lengths to send", [&] { all_to_all(torch::ones({0, 2}), mesh, {}); });
    refuses("[all_gather] the memory given for the result is not contiguous; got sizes [9, 2] and strides [1, 9]",
            [&] { all_gather(x, mesh, {.into = torch::empty({2, 9}).t()}); });
    refuses("[all_gather] `into` is not dense", [&] { all_gather(x, mesh, {.into = torch::ones({9, 2}).to_sparse()}); });
    refuses("[distribute_tensor] the tensor is not dense", [&] { distribute_tensor(sparse, mesh, {shard(0)}); });
    refuses("[from_local] the local shard is not dense", [&] { from_local(sparse, mesh, {shard(0)}); });
    equal(all_reduce(x, mesh), x * 3, "the call after them");
  });
}

TEST_CASE("functional collectives: ranks that expect what nobody sends are told both numbers", "[collectives]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    on_ranks(3, [](World& world) {
      const auto mesh = line(world);
      refuses("which expects 6", [&] { shift(torch::ones({2, 2}), mesh, 1, torch::ones({3, 2})); });
    }, transport);
    on_ranks(3, [](World& world) {
      const auto mesh = line(world);
      const auto lengths = world.rank() == 1 ? Lengths{2, 1, 0} : Lengths{1, 1, 1};
      refuses("with other lengths of the ranks' pieces", [&] { reduce_scatter(torch::ones({3, 2}), mesh, ReduceOp::sum, {0, lengths}); });
    }, transport);
  }
}

TEST_CASE("functional collectives: a local tensor that is no part of its layout is refused", "[collectives]") {
  on_ranks(2, [](World& world) {
    const auto mesh = line(world);
    const auto x = distribute_tensor(torch::ones({4, 2}), mesh, {shard(0)});
    const auto layout = layout_of(x.tensor());
    const std::string expected = "expected Float [2, 2] of f32[4, 2]";
    refuses("[wrap_local] the local tensor is not this rank's part of the layout; got Float [4, 2]; " + expected,
            [&] { wrap_local(torch::ones({4, 2}), layout); });
    refuses("got Double [2, 2]; " + expected, [&] { wrap_local(torch::ones({2, 2}, torch::kDouble), layout); });
    refuses("[wrap_local] the local tensor is an undefined tensor", [&] { wrap_local({}, layout); });
    refuses("[wrap_local] got no layout", [&] { wrap_local(torch::ones({2, 2}), {}); });
    refuses("[replace_local_shard] the local tensor is not this rank's part of the layout; got Float [3, 2]; " + expected,
            [&] { replace_local_shard(x, torch::ones({3, 2})); });
    refuses("[replace_local_shard] expected a distributed tensor; got a plain tensor",
            [&] { replace_local_shard(torch::ones({2, 2}), torch::ones({2, 2})); });
    replace_local_shard(x, torch::full({2, 2}, 3.0));
    equal(x.full_tensor(), torch::full({4, 2}, 3.0), "what replaced the shard");
  });
}
