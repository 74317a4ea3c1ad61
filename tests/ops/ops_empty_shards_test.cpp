// Operands that broadcast, on ranks that have no part of the others; and calls that one device takes.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <fmt/ranges.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

at::Tensor f(at::IntArrayRef sizes, int64_t seed = 0) { return fractions(sizes, seed); }
at::Tensor mask(at::IntArrayRef sizes) { return indices(sizes, 3).eq(1); }
at::Tensor longs(std::vector<int64_t> values) { return torch::tensor(values); }

constexpr double kSums = 1e-5;

}  // namespace

// Of 5 rows, the last of 4 ranks has none.
TEST_CASE("ops: products of empty shards with a term that broadcasts", "[ops][empty]") {
  const auto matrix = f({5, 6}), vector = f({6}, 1);
  for (const auto& added : {f({1}), f({}), f({5}, 2)}) {
    check({"addmv", {added, matrix, vector}, [](const Tensors& t) { return Tensors{at::addmv(t[0], t[1], t[2], 2, 3)}; }, kSums});
  }
  check({"addmv along an empty shard",
         {f({1}), f({6, 5}), f({5})},
         [](const Tensors& t) { return Tensors{at::addmv(t[0], t[1], t[2])}; },
         kSums});
  for (const auto& added : {f({}), f({1, 1}), f({5, 1}), f({3}), f({1, 3})}) {
    check({"addmm", {added, matrix, f({6, 3}, 1)}, [](const Tensors& t) { return Tensors{at::addmm(t[0], t[1], t[2], 2, 3)}; }, kSums});
    check({"addr", {added, f({5}, 1), f({3}, 2)}, [](const Tensors& t) { return Tensors{at::addr(t[0], t[1], t[2], 2, 3)}; }, kSums});
    check(
        {"addbmm", {added, f({2, 5, 4}), f({2, 4, 3}, 1)}, [](const Tensors& t) { return Tensors{at::addbmm(t[0], t[1], t[2])}; }, kSums});
    check({"baddbmm",
           {added, f({2, 5, 4}), f({2, 4, 3}, 1)},
           [](const Tensors& t) { return Tensors{at::baddbmm(t[0], t[1], t[2])}; },
           kSums});
  }
  check_over("gloo", {"addmv", {f({1}), f({2, 6}), vector}, [](const Tensors& t) { return Tensors{at::addmv(t[0], t[1], t[2])}; }, kSums});
}

TEST_CASE("ops: pointwise operators of empty shards with operands that broadcast", "[ops][empty]") {
  const auto x = f({5, 3});
  for (const auto& y : {f({}, 1), f({1}, 1), f({3}, 1), f({5, 1}, 1)}) {
    check({"lerp", {x, y, f({1, 3}, 2)}, [](const Tensors& t) { return Tensors{at::lerp(t[0], t[1], t[2])}; }, kSums});
    check({"addcmul", {y, x, f({1, 3}, 2)}, [](const Tensors& t) { return Tensors{at::addcmul(t[0], t[1], t[2], 2)}; }, kSums});
    check({"where", {mask({5, 1}), y, x}, [](const Tensors& t) { return Tensors{at::where(t[0], t[1], t[2])}; }});
  }
  for (const auto& m : {mask({5, 3}), mask({3}), mask({5, 1}), mask({1})}) {
    check({"masked_fill", {x, m}, [](const Tensors& t) { return Tensors{t[0].masked_fill(t[1], 2)}; }});
  }
}

TEST_CASE("ops: in place on empty shards with operands that broadcast", "[ops][empty]") {
  const auto x = f({5, 3});
  const auto in_place = [](const char* name, Tensors inputs, auto&& write) {
    const auto run = [write](const Tensors& t) {
      auto written = t[0].clone();
      write(written, t);
      return Tensors{written};
    };
    check({name, std::move(inputs), run, kSums, false});
  };
  in_place("addmv_", {f({5}), f({5, 6}), f({6})}, [](at::Tensor& w, const Tensors& t) { w.addmv_(t[1], t[2]); });
  in_place("addmm_", {x, f({5, 6}), f({6, 3})}, [](at::Tensor& w, const Tensors& t) { w.addmm_(t[1], t[2]); });
  in_place("addr_", {x, f({5}), f({3})}, [](at::Tensor& w, const Tensors& t) { w.addr_(t[1], t[2]); });
  in_place("lerp_", {x, f({1, 3}), f({3}, 1)}, [](at::Tensor& w, const Tensors& t) { w.lerp_(t[1], t[2]); });
  in_place("addcmul_", {x, f({3}), f({1})}, [](at::Tensor& w, const Tensors& t) { w.addcmul_(t[1], t[2]); });
  in_place("masked_fill_", {x, mask({3})}, [](at::Tensor& w, const Tensors& t) { w.masked_fill_(t[1], 2); });
  in_place("copy_", {x, f({3}, 1)}, [](at::Tensor& w, const Tensors& t) { w.copy_(t[1]); });
}

TEST_CASE("ops: masked_scatter where self or the mask broadcasts", "[ops][indexing]") {
  const auto scatter = [](const Tensors& t) { return Tensors{t[0].masked_scatter(t[1], t[2])}; };
  const auto in_place = [](const Tensors& t) {
    auto written = t[0].clone();
    written.masked_scatter_(t[1], t[2]);
    return Tensors{written};
  };
  check({"self is a row", {f({3}), mask({5, 3}), f({15}, 1)}, scatter, 0, false});
  check({"self is a column", {f({5, 1}), mask({5, 3}), f({5, 3}, 1)}, scatter, 0, false});
  check({"self is one number", {f({}), mask({5, 3}), f({20}, 1)}, scatter, 0, false});
  check({"the mask is a row", {f({5, 3}), mask({3}), f({5, 3}, 1)}, scatter, 0, false});
  check({"the mask is a column", {f({5, 3}), mask({5, 1}), f({5, 3}, 1)}, scatter, 0, false});
  check({"both broadcast", {f({5, 1}), mask({3}), f({5, 3}, 1)}, scatter, 0, false});
  check({"the mask is a row, in place", {f({5, 3}), mask({3}), f({5, 3}, 1)}, in_place, 0, false});
  check({"the source is a column", {f({5, 3}), mask({5, 3}), f({5, 1}, 1).expand({5, 3})}, scatter, 0, false});
  check_over("gloo", {"self is a row", {f({3}), mask({5, 3}), f({15}, 1)}, scatter, 0, false});
}

TEST_CASE("ops: what one device takes", "[ops]") {
  const auto reflections = [](const Tensors& t) {
    const auto [a, tau] = at::geqrf(t[0]);
    return Tensors{a, tau};
  };
  for (const auto& matrices : {f({3, 5}), f({5, 3}), f({2, 3, 5}), f({5, 2, 1}), f({3, 0})}) {
    check({"geqrf", {matrices}, reflections, 1e-4, false, true, false});
  }
  check({"repeat_interleave by a tensor",
         {f({5, 3}), indices({5}, 3)},
         [](const Tensors& t) { return Tensors{at::repeat_interleave(t[0], t[1], 0)}; }});
  check({"repeat_interleave to a known length",
         {f({4, 3}), longs({2, 0, 3, 1})},
         [](const Tensors& t) { return Tensors{at::repeat_interleave(t[0], t[1], 0, 6)}; }});
  check({"repeat_interleave by one number", {f({5, 3}), longs({2})}, [](const Tensors& t) {
           return Tensors{at::repeat_interleave(t[0], t[1], 1)};
         }});
  for (const auto* reduce : {"sum", "mean", "max", "min"}) {
    check({"segment_reduce", {f({6, 3}), longs({2, 1, 3})},
           [reduce](const Tensors& t) { return Tensors{at::segment_reduce(t[0], reduce, t[1])}; }, kSums});
  }
}

// Pivots count from one, and LAPACK reads where they point.
TEST_CASE("ops: matrices that were factored with pivots", "[ops][linalg]") {
  const auto positive = f({4, 4}).mm(f({4, 4}).t()).add(at::eye(4).mul(8)).expand({3, 4, 4}).contiguous();
  const auto [ldl, ldl_pivots] = at::linalg_ldl_factor(positive);
  check({"linalg_ldl_solve",
         {ldl, ldl_pivots, f({3, 4, 2})},
         [](const Tensors& t) { return Tensors{at::linalg_ldl_solve(t[0], t[1], t[2])}; },
         1e-4,
         false,
         true,
         false});
  const auto [lu, pivots] = at::linalg_lu_factor(positive);
  check({"linalg_lu_solve",
         {lu, pivots, f({3, 4, 2})},
         [](const Tensors& t) { return Tensors{at::linalg_lu_solve(t[0], t[1], t[2])}; },
         1e-4,
         false,
         true,
         false});
  check({"lu_unpack", {lu, pivots},
         [](const Tensors& t) {
           const auto [p, l, u] = at::lu_unpack(t[0], t[1]);
           return Tensors{p, l, u};
         },
         1e-4, false, true, false});
}

TEST_CASE("ops: gradients of embedding_bag's own", "[ops][embedding]") {
  const auto weight = f({7, 4}), gradient = f({3, 4}, 1);
  const auto positions = indices({6}, 7), offsets = longs({0, 2, 5});
  for (const int64_t mode : {0, 1}) {
    const auto bag = at::_embedding_bag(weight, positions, offsets, false, mode);
    const auto bags = std::get<1>(bag), sizes = std::get<2>(bag), most = std::get<3>(bag);
    check({"_embedding_bag_backward",
           {gradient, positions, offsets, bags, sizes, most},
           [mode](const Tensors& t) {
             return Tensors{at::_embedding_bag_backward(t[0], t[1], t[2], t[3], t[4], t[5], 7, false, mode, false, {})};
           },
           kSums,
           false});
  }
}

TEST_CASE("ops: running statistics that batch_norm_update_stats writes", "[ops][normalization]") {
  const auto x = f({5, 6, 3}), mean = f({6}, 1), variance = f({6}, 2).abs();
  const auto update = [](const Tensors& t) {
    const auto [batch_mean, batch_variance] = at::batch_norm_update_stats(t[0], t[1], t[2], 0.3);
    return Tensors{batch_mean, batch_variance, t[1], t[2]};
  };
  check({"batch_norm_update_stats", {x, mean, variance}, update, 1e-4, false, false});
}

// einsum keeps views of its operands for the gradients: ranks must find alike whether these share memory with what is written.
TEST_CASE("ops: a write to what einsum has seen where parts are of length zero or one", "[ops][view]") {
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
      Spmd spmd(mesh);
      const auto column = distribute_tensor(f({2, 1}), mesh, {shard(1)}).tensor().detach().requires_grad_();
      auto row = column.movedim(0, 1);
      const auto product = torch::einsum("...i,oi->o...", {row, row});
      const at::NoGradGuard no_grad;
      row.zero_();
      require(full_tensor(row).eq(0).all().item<bool>(), "test", "no zeros");

      const auto weight = distribute_tensor(f({3, 1}, 1), mesh, {shard(0)}).tensor();
      auto table = torch::einsum("...i,oi->o...", {f({3, 1, 1}), weight});
      table.masked_fill_(torch::ones({3, 3, 1}, torch::kBool), 2);
      require(full_tensor(table).eq(2).all().item<bool>(), "test", "not filled");
    }, transport));
  }
}

// Along a dim of length 2, the last of 3 ranks has nothing. A pending operand is replaced by its value, of which a view is written.
TEST_CASE("ops: a write to a view of what was pending where shards are of length zero", "[ops][view]") {
  for (int ranks : {2, 3, 5}) {
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh({ranks}, [](const DeviceMesh& mesh) {
        const auto values = torch::arange(8.0).reshape({2, 2, 2});
        const auto sharded = distribute_tensor(values, mesh, {shard(1)}).tensor();
        const auto pending = from_local(values.clone(), mesh, {partial(ReduceOp::avg)}).tensor();
        const auto weight = distribute_tensor(torch::ones({2, 2, 1}), mesh, {replicate()}).tensor().requires_grad_(true);
        torch::smooth_l1_loss(sharded, pending, 1);
        const auto product = torch::matmul(pending, weight);  // which saves it
        pending.split(3, 1)[0].add_(distribute_tensor(torch::ones({2, 2, 2}), mesh, {replicate()}).tensor());
        require(full_tensor(pending).equal(values + 1), "test", "the write was lost");
        require(full_tensor(product.detach()).equal(torch::matmul(values, torch::ones({2, 2, 1}))), "test", "the product changed");
      }, transport));
    }
  }
}

// On the CPU, libtorch converts such an operand before it looks at strides, which are then those of the copy.
TEST_CASE("ops: strides where an operand of another dtype is expanded", "[ops][view]") {
  const auto rows = torch::arange(4).view({4, 1}).expand({4, 3}), columns = torch::arange(3).expand({4, 3});
  const auto transposed = torch::arange(12).view({3, 4}).t();
  const auto results = [](const Tensors& t) {
    return Tensors{t[0] / (t[2] + 1), t[2] / (t[1] + 1), t[0] + t[2] * 0.5, t[0].eq(t[2] * 0.5), t[0] - t[2], t[1].sin(), t[0].pow(0.5),
                   at::where(t[0].gt(1), t[2], 0), at::where(t[0].gt(1), t[2] * 0.5, t[1])};
  };
  const auto plain = results({rows, columns, transposed});
  for (int ranks : {1, 2, 3}) {
    CHECK_NOTHROW(on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const auto& placement : {replicate(), shard(0), shard(1)}) {
        const auto on_mesh = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {placement}).tensor(); };
        const auto wide = [&](int64_t n, c10::IntArrayRef as) {
          return distribute_tensor(torch::arange(n), mesh, {replicate()}).tensor().view(as).expand({4, 3});
        };
        const auto got = results({wide(4, {4, 1}), wide(3, {1, 3}), on_mesh(torch::arange(12).view({3, 4})).t()});
        for (size_t i = 0; i < plain.size(); ++i) {
          require(got[i].strides() == plain[i].strides() && full_tensor(got[i]).equal(plain[i]), "test",
                  "result {} has strides {}, expected {}", i, fmt::join(got[i].strides(), " "), fmt::join(plain[i].strides(), " "));
        }
      }
    }));
  }
}

TEST_CASE("ops: strides where an operand of another dtype leaves gaps", "[ops][view]") {
  const auto whole = torch::arange(16, torch::kFloat).view({2, 4, 2});
  const auto one = torch::ones({1, 1}, torch::kDouble);
  const auto results = [&](const at::Tensor& x, const at::Tensor& wide) {
    const auto windows = x.unfold(1, 3, 3);  // strides 8 6 1 2
    return Tensors{wide + windows, windows * wide, windows.gt(wide), windows.to(torch::kInt) / 2};
  };
  const auto plain = results(whole, one);
  for (int ranks : {1, 2, 3}) {
    CHECK_NOTHROW(on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      for (const auto& placement : {replicate(), shard(0), shard(2)}) {
        const auto got =
            results(distribute_tensor(whole, mesh, {placement}).tensor(), distribute_tensor(one, mesh, {replicate()}).tensor());
        for (size_t i = 0; i < plain.size(); ++i) {
          require(got[i].strides() == plain[i].strides() && full_tensor(got[i]).equal(plain[i]), "test",
                  "result {} has strides {}, expected {}", i, fmt::join(got[i].strides(), " "), fmt::join(plain[i].strides(), " "));
        }
      }
    }));
  }
}

// Kernels that make their result before they run copy the strides of such dims; others do not.
TEST_CASE("ops: strides where a dim of length one lies anywhere in memory", "[ops][view]") {
  const auto results = [](const at::Tensor& x) {
    Tensors all;
    for (const auto& y : {x.unfold(0, 1, 4), x.t(), x.t().unsqueeze(0)}) {  // strides 24 1 6; 1 6; 6 1 6
      const auto [log_sigmoid, buffer] = at::log_sigmoid_forward(y);
      const auto [mantissa, exponent] = at::frexp(y);
      for (const auto& result :
           {at::hardtanh(y), at::relu6(y), at::nan_to_num(y), at::_conj_physical(y.to(torch::kComplexDouble)), mantissa, exponent,
            log_sigmoid, at::log_sigmoid_backward(y, y, buffer), at::prelu(y, torch::ones({1})), at::floor_divide(y, 2),
            at::remainder(2, y + 3)})
        all.push_back(result);
    }
    all.push_back(at::einsum("bij,bkj->bik", {at::hardtanh(x.unfold(0, 1, 4)), torch::ones({1, 3, 1})}));
    return all;
  };
  const auto x = fractions({4, 6});
  const auto plain = results(x);
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {2},
        [&](const DeviceMesh& mesh) {
          Spmd region(mesh);
          for (const auto& placement : {replicate(), shard(0), shard(1)}) {
            const auto got = results(distribute_tensor(x, mesh, {placement}));
            for (size_t i = 0; i < plain.size(); ++i) {
              require(got[i].strides() == plain[i].strides() && full_tensor(got[i]).equal(plain[i]), "test",
                      "result {} has strides {}, expected {}", i, fmt::join(got[i].strides(), " "), fmt::join(plain[i].strides(), " "));
            }
          }
        },
        transport));
  }
}

// Of 6 rows, the last of 4 ranks has none. What is written reaches the copy's base through a view, alike on all ranks.
TEST_CASE("ops: views of copies whose shards are empty are written alike", "[ops][empty]") {
  const char* transport = GENERATE("threads", "gloo");
  const auto reversed = f({4, 6}).t();
  const auto write = [](const at::Tensor& matrix, const at::Tensor& place, const at::Tensor& value) {
    matrix.movedim(-1, 0).flatten().index_add_(0, place, value);
  };
  REQUIRE_NOTHROW(on_ranks(4, [&](World& world) {
    const DeviceMesh mesh = init_device_mesh(at::kCPU, {world.size()}, {"dim"});
    const auto given = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {replicate()}).tensor(); };
    const at::Tensor whole = reversed.clone(), cut = distribute_tensor(reversed, mesh, {shard(0)});
    const auto copy = cut.clone();
    for (const auto& matrix : {cut, copy}) write(matrix, given(longs({5})), given(f({1}, 3)));
    write(whole, longs({5}), f({1}, 3));
    require(full_tensor(cut).equal(whole) && full_tensor(copy).equal(whole), "test", "the base has other numbers");
  }, transport));
}
