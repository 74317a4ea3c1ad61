// Writes through views of distributed tensors reach whatever shares their elements on one device.
#include "catch.hpp"

#include "tests/support/view_support.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/base/compat.hpp>

namespace dt = dtensor;
using dt::shard;
using namespace dt::test::views;

TEST_CASE("a write reaches a view that had to be copied and its base", "[ops][view]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(2, [] {
      const std::vector<std::function<at::Tensor(const at::Tensor&)>> chains{
          [](const at::Tensor& t) { return t.select(0, 2); },
          [](const at::Tensor& t) { return t.select(1, 0); },
          [](const at::Tensor& t) { return t.chunk(2, 1)[0]; },
          [](const at::Tensor& t) { return t.slice(0, 1, 5); },
          [](const at::Tensor& t) { return t.select(0, 2).slice(0, 1, 8, 3); },
          [](const at::Tensor& t) { return t.transpose(0, 1).select(0, 3); },
          [](const at::Tensor& t) { return t.view({-1}).slice(0, 3, 9); },
          [](const at::Tensor& t) { return t.diagonal(); },
          [](const at::Tensor& t) { return t.slice(1, 0, 4).t()[1]; }};
      for (const auto& chain : chains) {
        for (const auto& placement : {dt::replicate(), shard(0), shard(1), dt::partial()}) {
          auto plain = numbers({6, 9});
          auto x = dt::distribute_tensor(plain, mesh_of({2}), {placement}).tensor();
          auto view = chain(x), of_plain = chain(plain), second = x.select(0, 2), of_second = plain.select(0, 2);
          const auto check = [&](const char* what) {
            dt::require(dt::full_tensor(x).equal(plain), "test", "{}: the base of {} differs", what, str(placement));
            dt::require(dt::full_tensor(view).equal(of_plain), "test", "{}: the view of {} differs", what, str(placement));
            dt::require(dt::full_tensor(second).equal(of_second), "test", "{}: another view of {} differs", what, str(placement));
          };
          view.mul_(3), of_plain.mul_(3);
          check("written to the view");
          x.neg_(), plain.neg_();
          check("written to the base");
          at::_foreach_zero_({second}), of_second.zero_();
          check("written to another view");
        }
      }
    }, transport));
  }
}

TEST_CASE("a write to a piece of a cut dim communicates what was written or says so", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    const auto mesh = mesh_of({2});
    auto plain = numbers({4, 6});
    auto x = dt::distribute_tensor(plain, mesh, {shard(0)}).tensor();
    {
      const auto row = x.select(0, 1);
      dt::CommDebugMode comm;
      row.fill_(7);  // cut as well: half a row is sent to each rank
      dt::require(comm.count(dt::comm::Collective::all_gather) == 1 && comm.bytes() == 3 * 4, "test", "got {}", comm.str());
      comm.reset();
      x.add_(1);
      dt::require(comm.count(dt::comm::Collective::all_gather) == 1 && comm.count() == 1, "test", "got {}", comm.str());
      const auto refused = [](const auto& write, const char* words) {
        const auto error = dt::test::words_of<dt::Error>(write);
        dt::require(error.find(words) != std::string::npos, "test", "got {}; expected {}", error, words);
      };
      x.fill_(0), plain.fill_(0);
      at::_foreach_add_({row, x}, 1);
      plain.add_(1).select(0, 1).add_(1);
      dt::require(dt::full_tensor(x).equal(plain), "test", "foreach of a row and all differs");
      const auto guard = dt::explicit_communication();
      refused([&] { x.add_(1); }, "gathered for its views");
    }
    check_equal(dt::DTensor(x), plain, "after the refusals");
    dt::CommDebugMode comm;
    x.add_(1);
    dt::require(comm.count() == 0, "test", "no view is left; got {}", comm.str());
  }));
}

TEST_CASE("a write reaches views that read the bits anew", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    for (const auto& placement : {dt::replicate(), shard(0), shard(1), dt::partial()}) {
      auto plain = numbers({4, 2}).to(torch::kDouble);
      auto x = dt::distribute_tensor(plain, mesh_of({2}), {placement}).tensor();
      const auto complex = torch::view_as_complex(x), plain_complex = torch::view_as_complex(plain);
      const auto check = [&](const char* what) {
        dt::require(dt::full_tensor(x).equal(plain), "test", "{}: {} differs", what, str(placement));
        dt::require(dt::full_tensor(complex).equal(plain_complex), "test", "{}: the complex view of {} differs", what, str(placement));
      };
      x.add_(1), plain.add_(1);
      check("written to the numbers");
      complex.mul_(c10::complex<double>(0, 2)), plain_complex.mul_(c10::complex<double>(0, 2));
      check("written to the complex view");
      x.slice(0, 1, 3).zero_(), plain.slice(0, 1, 3).zero_();
      check("written to a piece");
      if (placement.is_partial()) continue;
      x.view(torch::kLong).bitwise_or_(1), plain.view(torch::kLong).bitwise_or_(1);
      check("written to the bits");
    }
    const auto gradient = [](const at::Tensor& leaf) {
      auto x = leaf * 1;
      torch::imag(torch::view_as_complex(x.slice(0, 2, 4).view({1, 2}))).sin_();
      return torch::autograd::grad({x.sum()}, {leaf})[0];
    };
    const auto leaf = numbers({4}).to(torch::kDouble);
    const auto got = gradient(dt::distribute_tensor(leaf, mesh_of({2}), {shard(0)}).tensor().requires_grad_());
    dt::require(dt::full_tensor(got).equal(gradient(leaf.clone().requires_grad_())), "test", "the gradient differs");
  }));
}

TEST_CASE("a write reaches conjugated and negated views", "[ops][view]") {
  using Complex = c10::complex<double>;
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    const auto start = torch::complex(numbers({4, 2}).to(torch::kDouble), numbers({4, 2}).to(torch::kDouble) + 3);
    for (const auto& placement : {dt::replicate(), shard(0), shard(1), dt::partial()}) {
      auto plain = start.clone(), x = dt::distribute_tensor(start, mesh_of({2}), {placement}).tensor();
      const auto conj = x.conj(), plain_conj = plain.conj(), back = conj.conj(), plain_back = plain_conj.conj();
      const auto imag = torch::imag(conj), plain_imag = torch::imag(plain_conj);
      const auto check = [&](const char* what) {
        const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
          dt::require(dt::full_tensor(a).equal(b.resolve_conj().resolve_neg()), "test", "{} of {} differs", what, str(placement));
        };
        same(x, plain), same(conj, plain_conj), same(back, plain_back), same(imag, plain_imag);
      };
      conj.mul_(2), plain_conj.mul_(2);
      check("written to the conjugate");
      x.mul_(Complex(1, 2)), plain.mul_(Complex(1, 2));
      check("written to the base");
      conj.select(0, 1).fill_(Complex(3, 4)), plain_conj.select(0, 1).fill_(Complex(3, 4));
      check("written to a piece");
      imag.mul_(3), plain_imag.mul_(3);
      check("written to the imaginary part");
      back.mul_(Complex(0, 1)), plain_back.mul_(Complex(0, 1));
      check("written to the conjugate's conjugate");
    }
    const auto gradient = [](const at::Tensor& leaf) {
      auto x = leaf * 1;
      x.conj().mul_(leaf);
      return torch::autograd::grad({torch::real(x * x).sum()}, {leaf})[0];
    };
    const auto got = gradient(dt::distribute_tensor(start, mesh_of({2}), {shard(0)}).tensor().requires_grad_());
    const auto expected = gradient(start.clone().requires_grad_()).resolve_conj();
    dt::require(dt::full_tensor(got).equal(expected), "test", "the gradient differs");
  }));
}

TEST_CASE("a written tensor is read where it overlaps as it was before", "[ops][view]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(2, [] {
      for (const auto& placement : {dt::replicate(), shard(0), shard(1)}) {
        for (const int64_t rows : {3, 6}) {
          auto plain = numbers({rows, rows});
          auto x = dt::distribute_tensor(plain, mesh_of({2}), {placement}).tensor();
          x.slice(1, 0, 2).add_(x.slice(1, 1, 3)), plain.slice(1, 0, 2).add_(plain.slice(1, 1, 3).clone());
          x.slice(0, 1, 3).copy_(x.slice(0, 0, 2)), plain.slice(0, 1, 3).copy_(plain.slice(0, 0, 2).clone());
          x.mul_(x.t()), plain.mul_(plain.t().clone());
          dt::require(dt::full_tensor(x).equal(plain), "test", "{} rows of {} differ", rows, str(placement));
        }
      }
    }, transport));
  }
}

TEST_CASE("a gradient passes through a write to a piece of a cut dim", "[ops][view]") {
  const auto gradients = [](const at::Tensor& leaf, const at::Tensor& row) {
    auto x = leaf.mul(2);
    x[1] = row.mul(3);
    x.slice(0, 2, 4).mul_(leaf.slice(0, 0, 2));
    return torch::autograd::grad({x.pow(2).sum()}, {leaf, row});
  };
  const auto expected = gradients(numbers({5, 3}).requires_grad_(), numbers({3}).requires_grad_());
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(2, [&] {
      const auto mesh = mesh_of({2});
      for (const auto& placement : {dt::replicate(), shard(0), shard(1)}) {
        const auto leaf = dt::distribute_tensor(numbers({5, 3}), mesh, {placement}).tensor().requires_grad_();
        const auto row = dt::distribute_tensor(numbers({3}), mesh, {dt::replicate()}).tensor().requires_grad_();
        const auto got = gradients(leaf, row);
        for (int i = 0; i < 2; ++i) dt::require(dt::full_tensor(got[i]).equal(expected[i]), "test", "gradient {} of {}", i, str(placement));
      }
    }, transport));
  }
}

TEST_CASE("ops: a row that was written to where a dim is cut lies as a row of its own", "[ops][view]") {
  for (const int64_t ranks : {1, 2}) {
    REQUIRE_NOTHROW(on_each_rank(static_cast<int>(ranks), [ranks] {
      const auto mesh = dt::init_device_mesh(c10::kCPU, {ranks, 1}, {"dp", "tp"});
      const auto x = torch::arange(2.0 * static_cast<double>(ranks), torch::kDouble).view({ranks, 2});
      const auto index = torch::tensor({1, 0}).expand({ranks, 2});
      const auto on_mesh = dt::distribute_tensor(x, mesh, {dt::shard(0), dt::shard(1)}).tensor();
      const auto written = on_mesh.scatter(1, dt::distribute_tensor(index, mesh, {dt::shard(0), dt::replicate()}), on_mesh);
      const auto pairs = torch::view_as_complex(written);
      dt::require(dt::full_tensor(pairs).equal(torch::view_as_complex(x.scatter(1, index, x))), "test", "other numbers");
    }));
  }
}

TEST_CASE("ops: ranks agree on whether a view of a split cut is a copy", "[ops][view]") {
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(4, [] {
      const auto mesh = mesh_of({4});
      const dt::Cut ragged{2, 1, dt::Shares::of({1, 1, 1, 1})};  // of two blocks of five the last rank has two rows each, the others one
      for (const auto& cut : {ragged, dt::Cut{2}, dt::Cut{5}}) {
        auto plain = numbers({2, 10}).t();
        auto x = dt::distribute_tensor(plain, mesh, {shard(0, cut)}).tensor();
        const auto view = x.t().view({20}), of_plain = plain.t().view({20});
        const auto index = torch::tensor({1}), column = torch::full({10, 1}, 7, plain.options());
        plain.index_copy_(1, index, column);
        dt::Spmd region(mesh);
        x.index_copy_(1, index, column);
        dt::require(dt::full_tensor(x).equal(plain), "test", "the base of {} differs", str(shard(0, cut)));
        dt::require(dt::full_tensor(view).equal(of_plain), "test", "the view of {} differs", str(shard(0, cut)));
      }
    }, transport));
  }
}

TEST_CASE("views: a write to one place of an overlapping view that was copied shows at all", "[ops]") {
  const auto write = [](const at::Tensor& x) {
    const auto windows = x.unfold(1, 3, 1);  // elements share places
    windows.select(1, 2).mul_(10);           // columns 2, 3 and 4 of x
    const auto seen = windows.clone();
    x.add_(1);
    return std::vector<at::Tensor>{seen, windows.clone(), x.clone()};
  };
  const auto x = torch::arange(12, torch::kDouble).view({2, 6});
  const auto expected = write(x.clone());
  for (const int ranks : {1, 2, 3}) {
    REQUIRE_NOTHROW(on_each_rank(ranks, [&] {
      for (const auto& placement : {dt::flat(13), shard(0), shard(1), dt::replicate()}) {
        const auto got = write(dt::distribute_tensor(x, mesh_of({ranks}), {placement}).tensor());
        for (size_t i = 0; i < got.size(); ++i) {
          dt::require(dt::full_tensor(got[i]).equal(expected[i]), "test", "tensor {} of {} differs", i, str(placement));
        }
      }
    }));
  }
}

TEST_CASE("views: a write to some elements of an overlapping view stays", "[ops]") {
  const auto index = torch::tensor({2, 0, 1, 0}).view({4, 1}), source = torch::tensor({70, 80, 90, 60}, torch::kDouble).view({4, 1});
  const auto write = [](const at::Tensor& x, const at::Tensor& where, const at::Tensor& from) {
    x.select(1, 1).unfold(0, 3, 1).scatter_(1, where, from);
    return x;
  };
  const auto x = torch::arange(18, torch::kDouble).view({6, 3});
  const auto expected = write(x.clone(), index, source);
  for (const std::string transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(2, [&] {
      const auto mesh = mesh_of({2});
      const auto laid_out = [&](const at::Tensor& t, dt::Placement p) { return dt::distribute_tensor(t, mesh, {p}).tensor(); };
      for (const auto& placement : {shard(0), dt::replicate()}) {
        const auto got = write(laid_out(x, dt::replicate()), laid_out(index, placement), laid_out(source, placement));
        dt::require(dt::full_tensor(got).equal(expected), "test", "an index under {}", str(placement));
      }
    }, transport));
  }
}

TEST_CASE("views: a rank without elements copies no view that the others do not", "[ops]") {
  const auto write = [](const at::Tensor& x) {
    const auto view = x.permute({1, 2, 3, 0}).view({4, 2, 4}), again = view.view({4, 2, 4});
    view.add_(1);
    return std::vector<at::Tensor>{x, view, again};
  };
  const auto x = torch::arange(32, torch::kDouble).view({1, 4, 2, 4});
  const auto expected = write(x.clone());
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(3, [&] {
      for (const auto& placement : {shard(3), shard(1), dt::replicate()}) {
        const auto got = write(dt::distribute_tensor(x, mesh_of({3}), {placement}));
        for (size_t i = 0; i < got.size(); ++i) {
          dt::require(dt::full_tensor(got[i]).equal(expected[i]), "test", "tensor {} of {} differs", i, str(placement));
        }
      }
    }, transport));
  }
}

// Outside of Spmd, a gradient of what libtorch makes in the backward pass is plain, and goes through the same views.
TEST_CASE("views: a plain gradient goes through a part of a conjugated tensor", "[ops]") {
  const auto gradient = [](const at::Tensor& leaf) {
    const auto x = leaf.mul(2);
    at::imag(at::view_as_complex(x).conj()).add_(3);
    at::real(at::view_as_complex(x).conj()).mul_(5);
    std::get<0>(x.topk(2, 0)).sum().backward();
    return leaf.grad();
  };
  const auto x = torch::tensor({{0.5, -1.0}, {2.0, 3.0}, {-4.0, 6.0}}, torch::kDouble);
  const auto expected = gradient(x.clone().requires_grad_());
  REQUIRE_NOTHROW(on_each_rank(2, [&] {
    for (const auto& placement : {dt::replicate(), shard(0)}) {
      const auto got = gradient(dt::distribute_tensor(x, mesh_of({2}), {placement}).tensor().detach().requires_grad_());
      dt::require(dt::full_tensor(got).equal(expected), "test", "the gradient of {} differs", str(placement));
    }
  }));
}

// libtorch 2.14 takes an odd stride of a dim of length one; 1.13 refuses it on one device, too.
TEST_CASE("views: numbers are read in pairs where a rank has none and strides are odd", "[ops]") {
  const auto read = [](const at::Tensor& x) { return at::imag(at::view_as_complex(x.unfold(1, 2, 2))); };
  const auto x = torch::rand({1, 3});
  at::Tensor expected;
  try {
    expected = read(x);
  } catch (const c10::Error&) {
    REQUIRE_FALSE(DTENSOR_TORCH_AT_LEAST(2, 14));
    return;
  }
  for (const auto* transport : {"threads", "gloo"}) {
    REQUIRE_NOTHROW(on_each_rank(2, [&] {
      for (const int64_t dim : {0, 1}) {
        const auto got = read(dt::distribute_tensor(x, mesh_of({2}), {shard(dim)}));
        dt::require(dt::full_tensor(got).equal(expected), "test", "other numbers where dim {} is cut", dim);
      }
    }, transport));
  }
}
