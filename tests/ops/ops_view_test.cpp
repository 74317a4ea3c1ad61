// Views of distributed tensors against one device: every operator under every placement, forward and backward, bitwise; and
// that what stays on its rank is never communicated.
#include "catch.hpp"

#include "tests/support/view_support.hpp"

namespace dt = dtensor;
using dt::shard;
using dt::strided_shard;
using namespace dt::test::views;

namespace {

using View = std::function<Tensors(const at::Tensor&)>;

// The gradients of `view` at `x`, for output gradients made of consecutive numbers, laid out by `like`.
template <class Like>
at::Tensor gradient(const at::Tensor& x, const Tensors& outputs, Like&& like) {
  Tensors weights;
  for (const auto& output : outputs) {
    weights.push_back(like(numbers(output.sizes().vec(), 7 + static_cast<int64_t>(weights.size())), output));
  }
  return torch::autograd::grad(outputs, {x}, weights)[0];
}

// The view under `placements`, forward and backward, against one device.
void check(const std::string& name, const Shape& sizes, const View& view, const dt::DeviceMesh& mesh,
           const dt::Placements& placements) {
  const auto what = fmt::format("{} of [{}] {}", name, fmt::join(sizes, ", "), dt::str(placements));
  const auto plain = numbers(sizes).requires_grad_();
  const auto x = dt::distribute_tensor(plain.detach(), mesh, placements).tensor().detach().requires_grad_();
  const auto expected = view(plain), got = view(x);
  dt::require(got.size() == expected.size(), "test", "{}: {} outputs", what, got.size());
  for (size_t i = 0; i < got.size(); ++i) check_equal(got[i].detach(), expected[i].detach(), what);
  if (!expected[0].requires_grad()) return;
  const auto plain_gradient = gradient(plain, expected, [](const at::Tensor& g, const at::Tensor&) { return g; });
  const auto spread = gradient(x, got, [&](const at::Tensor& g, const at::Tensor& output) {
    return dt::distribute_tensor(g, mesh, dt::DTensor(output).placements()).tensor();
  });
  check_equal(spread, plain_gradient, what + ", gradient");
}

View viewed(std::function<at::Tensor(const at::Tensor&)> view) {
  return [view](const at::Tensor& x) { return Tensors{view(x)}; };
}

struct Case {
  const char* name;
  Shape sizes;
  View view;
};

using T = const at::Tensor&;

std::vector<Case> reshaping_views() {
  return {
      {"view flatten", {4, 6, 2}, viewed([](T x) {
         return x.view({24, 2});
       })},
      {"view -1", {4, 6, 2}, viewed([](T x) {
         return x.view({-1, 2});
       })},
      {"view flatten uneven", {3, 5, 2}, viewed([](T x) {
         return x.view({15, 2});
       })},
      {"view unflatten", {12, 6}, viewed([](T x) {
         return x.view({3, 4, 2, 3});
       })},
      {"view regroup", {6, 4}, viewed([](T x) {
         return x.view({4, 6});
       })},
      {"view same", {5, 3}, viewed([](T x) {
         return x.view({5, 3});
       })},
      {"view to scalar", {1, 1}, viewed([](T x) { return x.view(Shape{}); })},
      {"reshape of transposed", {4, 6}, viewed([](T x) { return x.t().reshape({24}); })},
      {"reshape", {2, 3, 4}, viewed([](T x) {
         return x.reshape({6, 4});
       })},
      {"flatten", {2, 3, 4}, viewed([](T x) { return x.flatten(); })},
      {"_unsafe_view", {4, 6}, viewed([](T x) {
         return at::_unsafe_view(x, {2, 12});
       })},
      {"squeeze", {1, 4, 1, 2}, viewed([](T x) { return x.squeeze(); })},
      {"squeeze keeps a dim of 2", {2, 3}, viewed([](T x) { return x.squeeze(); })},
      {"squeeze dim", {4, 1, 3}, viewed([](T x) { return x.squeeze(1); })},
      {"squeeze long dim", {4, 2}, viewed([](T x) { return x.squeeze(-1); })},
      {"unsqueeze", {4, 3}, viewed([](T x) { return x.unsqueeze(1); })},
      {"unsqueeze end", {4, 3}, viewed([](T x) { return x.unsqueeze(-1); })},
      {"squeeze and unsqueeze in place", {4, 1, 3}, viewed([](T x) {
         auto y = x.clone();
         return y.squeeze_(1).unsqueeze_(0).mul_(2);
       })},
      {"expand", {4, 1, 3}, viewed([](T x) {
         return x.expand({2, 4, 5, 3});
       })},
      {"expand -1", {4, 1, 3}, viewed([](T x) {
         return x.expand({-1, 5, -1});
       })},
  };
}

std::vector<Case> reordering_views() {
  return {
      {"permute", {2, 4, 6}, viewed([](T x) {
         return x.permute({2, 0, -2});
       })},
      {"transpose", {2, 4, 6}, viewed([](T x) { return x.transpose(-1, 1); })},
      {"t", {4, 6}, viewed([](T x) { return x.t(); })},
      {"transpose in place", {4, 6}, viewed([](T x) {
         auto y = x.clone();
         return y.transpose_(0, 1).swapaxes_(0, 1).swapdims_(0, 1) * 2;
       })},
      {"t in place", {4, 6}, viewed([](T x) {
         auto y = x.clone();
         y.t_();
         return y * 2;
       })},
      {"t of a vector", {4}, viewed([](T x) { return x.t(); })},
      {"movedim", {2, 4, 6}, viewed([](T x) { return x.movedim(0, 2); })},
      {"flip", {4, 6}, viewed([](T x) { return x.flip({1}); })},
  };
}

std::vector<Case> views_of_parts() {
  return {
      {"fill the diagonal", {5, 4}, viewed([](T x) {
         auto y = x.clone();
         return y.fill_diagonal_(3) * 2;
       })},
      {"select", {4, 3, 6}, viewed([](T x) { return x.select(1, -1); })},
      {"select first", {4, 3, 6}, viewed([](T x) { return x[1]; })},
      {"slice", {6, 4}, viewed([](T x) { return x.slice(0, 2, 4); })},
      {"slice head", {6, 4}, viewed([](T x) { return x.slice(1, 0, 3); })},
      {"slice negative", {6, 4}, viewed([](T x) { return x.slice(0, -4, -1); })},
      {"slice whole", {5, 4}, viewed([](T x) { return x.slice(0); })},
      {"slice step", {6, 4}, viewed([](T x) { return x.slice(0, 1, 6, 2); })},
      {"slice to nothing", {6, 4}, viewed([](T x) { return x.slice(0, 3, 3); })},
      {"narrow", {6, 4}, viewed([](T x) { return x.narrow(0, 3, 3); })},
      {"chunk", {2, 12}, [](T x) { return x.chunk(3, -1); }},
      {"chunk uneven", {2, 7}, [](T x) { return x.chunk(3, 1); }},
      {"split", {2, 12}, [](T x) { return x.split(4, 1); }},
      {"split other dim", {4, 12}, [](T x) { return x.split(2, 0); }},
      {"split_with_sizes",
       {12, 3},
       [](T x) {
         return x.split_with_sizes({8, 2, 2}, 0);
       }},
      {"unbind", {3, 4, 2}, [](T x) { return x.unbind(0); }},
      {"diagonal", {4, 3, 4}, viewed([](T x) { return x.diagonal(1, 0, 2); })},
      {"unfold", {6, 4}, viewed([](T x) { return x.unfold(0, 3, 1); })},
      {"fused qkv",
       {2, 3, 24},
       [](T x) {
         Tensors heads;
         for (const auto& part : x.chunk(3, -1)) heads.push_back(part.reshape({2, 3, 4, 2}).transpose(1, 2));
         return heads;
       }},
  };
}

std::vector<Case> copies_and_other_readings() {
  return {
      {"alias", {4, 3}, viewed([](T x) { return at::alias(x); })},
      {"view_as_complex and back", {4, 3, 2}, viewed([](T x) { return at::view_as_real(at::view_as_complex(x)); })},
      {"conj", {4, 3, 2}, viewed([](T x) { return at::view_as_real(at::view_as_complex(x).conj().resolve_conj()); })},
      {"as_strided to nothing", {1, 2}, viewed([](T x) { return x.detach().as_strided({0}, {1}, 5); })},
      {"as_strided", {4, 6}, viewed([](T x) {
         return x.detach().as_strided({4, 3}, {6, 2});
       })},
      {"view_copy", {4, 6}, viewed([](T x) {
         return at::view_copy(x, {2, 12});
       })},
      {"squeeze_copy", {4, 1, 2}, viewed([](T x) { return at::squeeze_copy(x); })},
      {"split_copy", {2, 12}, [](T x) { return at::split_copy(x, 4, 1); }},
      {"as_strided_copy", {6, 4}, viewed([](T x) {
         return at::as_strided_copy(x.detach().t(), {4, 3}, {1, 4});
       })},
      {"view as integers", {4, 6}, viewed([](T x) { return x.detach().view(at::kInt); })},
      {"view as bytes", {4, 6}, viewed([](T x) { return x.detach().view(at::kByte); })},
      {"cat", {4, 6}, viewed([](T x) {
         return at::cat({x, x.slice(1, 0, 3)}, 1);
       })},
  };
}

const std::vector<Case>& cases() {
  static const auto all = [] {
    std::vector<Case> result;
    for (auto&& some : {reshaping_views(), reordering_views(), views_of_parts(), copies_and_other_readings()}) {
      result.insert(result.end(), some.begin(), some.end());
    }
    return result;
  }();
  return all;
}

bool fits(const Shape& sizes, const dt::Placements& placements, const dt::DeviceMesh& mesh) {
  try {
    dt::Layout::get(mesh, placements, sizes, at::kFloat);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

std::vector<dt::Placement> placements_of(const Shape& sizes, bool all) {
  std::vector<dt::Placement> result{dt::replicate(), dt::partial()};
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    result.insert(result.end(), {shard(d), strided_shard(d, 2)});
    if (all) result.insert(result.end(), {strided_shard(d, 3), strided_shard(d, 1, 2)});
  }
  return result;
}

// One line of the zero-communication table.
struct Local {
  const char* name;
  Shape sizes;
  dt::Placement in, out;
  View view;
};

void check_local(const Local& local, const dt::DeviceMesh& mesh) {
  const auto x = dt::distribute_tensor(numbers(local.sizes), mesh, {local.in}).tensor().detach().requires_grad_();
  dt::CommDebugMode comm;
  const auto outputs = local.view(x);
  for (const auto& output : outputs) {
    dt::require(dt::DTensor(output).placements()[0] == local.out, "test", "{}: got {}; expected {}", local.name,
                dt::DTensor(output).layout().str(), local.out.str());
  }
  const auto g = gradient(x, outputs, [&](T weight, T output) {
    return dt::distribute_tensor(weight, mesh, dt::DTensor(output).placements()).tensor();
  });
  dt::require(dt::DTensor(g).placements()[0] == local.in, "test", "{}: the gradient is {}", local.name, dt::DTensor(g).layout().str());
  dt::require(comm.count() == 0, "test", "{} communicated:\n{}", local.name, comm.str());
}

}  // namespace

TEST_CASE("views on one mesh dimension match one device under every placement", "[ops][view]") {
  for (const int ranks : {1, 2, 3, 4}) {
    REQUIRE_NOTHROW(on_each_rank(ranks, [&] {
      const auto mesh = mesh_of({ranks});
      for (const auto& c : cases()) {
        for (const auto& p : placements_of(c.sizes, true)) {
          if (fits(c.sizes, {p}, mesh)) check(c.name, c.sizes, c.view, mesh, {p});
        }
      }
    }));
  }
}

TEST_CASE("views on a 2x2 mesh match one device under every pair of placements", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(4, [] {
    const auto mesh = mesh_of({2, 2});
    for (const auto& c : cases()) {
      for (const auto& p : placements_of(c.sizes, false)) {
        for (const auto& q : placements_of(c.sizes, false)) {
          if (fits(c.sizes, {p, q}, mesh)) check(c.name, c.sizes, c.view, mesh, {p, q});
        }
      }
    }
  }));
}

TEST_CASE("views over gloo match one device", "[ops][view][gloo]") {
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    const auto mesh = mesh_of({2});
    for (const auto& c : cases()) {
      for (int64_t d = 0; d < static_cast<int64_t>(c.sizes.size()); ++d) check(c.name, c.sizes, c.view, mesh, {shard(d)});
    }
  }, "gloo"));
}

TEST_CASE("views that keep elements on their rank communicate nothing either way", "[ops][view]") {
  const std::vector<Local> table{
      {"flatten outer", {4, 6, 2}, shard(0), shard(0), viewed([](T x) { return x.view({24, 2}); })},
      {"flatten inner", {4, 6, 2}, shard(1), strided_shard(0, 4), viewed([](T x) { return x.view({24, 2}); })},
      {"flatten beside", {4, 6, 2}, shard(2), shard(1), viewed([](T x) { return x.view({24, 2}); })},
      {"flatten uneven", {3, 5}, shard(0), strided_shard(0, 1, 5), viewed([](T x) { return x.view({15}); })},
      {"unflatten", {24, 2}, strided_shard(0, 4), shard(1), viewed([](T x) { return x.view({4, 6, 2}); })},
      {"into heads", {2, 3, 8}, shard(2), shard(2), viewed([](T x) { return x.view({2, 3, 4, 2}); })},
      {"_unsafe_view", {4, 6}, shard(0), shard(0), viewed([](T x) { return at::_unsafe_view(x, {4, 2, 3}); })},
      {"squeeze", {2, 1, 3}, shard(0), shard(0), viewed([](T x) { return x.squeeze(); })},
      {"unsqueeze", {2, 3}, shard(1), shard(2), viewed([](T x) { return x.unsqueeze(1); })},
      {"permute", {2, 4, 6}, shard(1), shard(2), viewed([](T x) { return x.permute({2, 0, 1}); })},
      {"transpose", {2, 4, 6}, shard(2), shard(1), viewed([](T x) { return x.transpose(1, 2); })},
      {"t", {4, 6}, strided_shard(1, 3), strided_shard(0, 3), viewed([](T x) { return x.t(); })},
      {"select", {4, 3, 6}, shard(2), shard(1), viewed([](T x) { return x.select(1, 2); })},
      {"slice beside", {4, 6}, shard(0), shard(0), viewed([](T x) { return x.slice(1, 1, 4); })},
      {"slice of blocks", {4, 12}, strided_shard(1, 3), strided_shard(1, 2), viewed([](T x) { return x.slice(1, 4, 12); })},
      {"slice whole", {5, 6}, shard(0), shard(0), viewed([](T x) { return x.slice(0, 0, 5); })},
      {"fused qkv", {2, 12}, strided_shard(1, 3), shard(1), [](T x) { return x.chunk(3, -1); }},
      {"fused qkv by split", {2, 12}, strided_shard(1, 3), shard(1), [](T x) { return x.split(4, 1); }},
      {"unbind", {3, 4, 2}, shard(1), shard(0), [](T x) { return x.unbind(0); }},
      {"alias", {4, 3}, dt::partial(), dt::partial(), viewed([](T x) { return at::alias(x); })},
      {"view of a sum", {4, 3}, dt::partial(), dt::partial(), viewed([](T x) { return x.view({12}); })},
      {"diagonal", {4, 3, 4}, shard(1), shard(0), viewed([](T x) { return x.diagonal(0, 0, 2); })},
  };
  for (const auto& local : table) {
    CAPTURE(local.name);
    REQUIRE_NOTHROW(on_each_rank(2, [&] { check_local(local, mesh_of({2})); }));
  }
}

TEST_CASE("flattening batch x sequence cut over both communicates nothing", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(4, [] {
    const auto mesh = mesh_of({2, 2});
    const auto x = dt::distribute_tensor(numbers({4, 6, 2}), mesh, {shard(0), shard(1)});
    dt::CommDebugMode comm;
    const auto flat = dt::DTensor(x->view({24, 2}));
    dt::require(flat.placements() == dt::PlacementsRef({shard(0), strided_shard(0, 2)}), "test", "got {}", flat.layout().str());
    const auto back = dt::DTensor(flat->view({4, 6, 2}));
    dt::require(back.placements() == x.placements(), "test", "got {}", back.layout().str());
    dt::require(comm.count() == 0, "test", "{}", comm.str());
  }));
}

TEST_CASE("a view shares memory so that a write through it reaches the base", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    const auto mesh = mesh_of({2});
    const auto x = dt::distribute_tensor(numbers({4, 6}), mesh, {shard(0)});
    const auto expected = numbers({4, 6});
    x->view({24}).add_(1), expected.add_(1);
    x->select(1, 2).mul_(2), expected.select(1, 2).mul_(2);
    x->slice(1, 3, 5).mul_(3), expected.slice(1, 3, 5).mul_(3);
    x->chunk(2, 1)[1].add_(5), expected.chunk(2, 1)[1].add_(5);
    check_equal(x, expected, "written through views");
  }));
}

TEST_CASE("as_strided reads what one device would and refuses what lies outside of the tensor", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(2, [] {
    const auto full = numbers({4, 6});
    const auto x = dt::distribute_tensor(full, mesh_of({2}), {shard(0)});
    dt::require(dt::full_tensor(x->as_strided({2}, {1}, 3)).equal(full.as_strided({2}, {1}, 3)), "test", "wrong values");
    for (const int64_t offset : {0, 20}) {
      bool threw = false;
      try {
        offset ? x->as_strided({6}, {1}, offset) : x->as_strided({4, 7}, {6, 1});
      } catch (const c10::Error&) {
        threw = true;
      }
      dt::require(threw, "test", "as_strided with offset {} went through", offset);
    }
  }));
}

TEST_CASE("view: overlapping windows of a pending maximum", "[view]") {
  const auto gradient = [](const at::Tensor& x, const at::Tensor& weight) {
    return torch::autograd::grad({x.unfold(0, 4, 2)}, {x}, {weight})[0];
  };
  const auto expected = gradient(numbers({6}).requires_grad_(), numbers({2, 4}));
  REQUIRE_NOTHROW(on_each_rank(2, [&] {
    const auto mesh = mesh_of({2});
    const auto x = dt::distribute_tensor(numbers({6}), mesh, {dt::replicate()}).tensor().requires_grad_();
    const auto mine = torch::arange(2).view({2, 1}).expand({2, 4}).eq(mesh.coordinate(0));  // a window's values are with one rank
    const auto part = torch::where(mine, numbers({2, 4}), torch::full({2, 4}, -50.0f));
    const auto got = gradient(x, dt::from_local(part, mesh, {dt::partial(dt::ReduceOp::max)}));
    dt::require(dt::full_tensor(got).equal(expected), "test", "the gradient differs");
  }));
}

TEST_CASE("ops: views of empty shards follow the order of the others", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(3, [] {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {3}, {"dp"});
    const auto x = torch::arange(4.0, torch::kDouble).view({2, 2});
    auto base = dt::distribute_tensor(x.t(), mesh, {dt::shard(1)}).tensor().exp();  // rank 2 has nothing of it
    const auto weight =
        dt::distribute_tensor(torch::ones({1, 2}, torch::kDouble), mesh, {dt::replicate()}).tensor().detach().requires_grad_();
    const auto product = torch::einsum("...i,oi->o...", {base.t(), weight});  // which keeps a view for its gradient
    const at::NoGradGuard no_grad;
    base.add_(1);
    dt::require(dt::full_tensor(base).equal((x.exp() + 1).t()), "test", "other values");
    dt::require(dt::full_tensor(product.detach()).allclose(x.exp().sum(1).view({1, 2})), "test", "another product");
  }));
}

TEST_CASE("ops: views of empty shards that a pointwise operator ordered", "[ops][view]") {
  REQUIRE_NOTHROW(on_each_rank(3, [] {
    const auto mesh = dt::init_device_mesh(c10::kCPU, {3}, {"dp"});
    const auto a = torch::arange(2.0, torch::kDouble).view({1, 2, 1}), b = a + 1;
    const auto whole = dt::distribute_tensor(a, mesh, {dt::replicate()}).tensor();
    const auto least = dt::distribute_tensor(b, mesh, {dt::replicate()}).redistribute({dt::partial(dt::ReduceOp::min)}).tensor();
    auto product = torch::einsum("bij,bkj->bik", {whole, least});  // cut along k: rank 2 has nothing of it
    product.mul_(0.5);
    dt::require(dt::full_tensor(product).equal(torch::einsum("bij,bkj->bik", {a, b}) * 0.5), "test", "the product differs");
  }));
}
