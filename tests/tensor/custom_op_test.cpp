// Operators of others with rules, functions over local shards, and that rules fit the operators that they are for.
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

#include <dtensor/base/compat.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <set>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// x w^2, with a kernel for autograd.
at::Tensor scaled_mm(const at::Tensor& x, const at::Tensor& w, const c10::optional<at::Tensor>& bias, double scale) {
  auto y = x.mm(w).mul(scale);
  return bias.has_value() && bias->defined() ? y.add(*bias) : y;
}

struct ScaledMm : torch::autograd::Function<ScaledMm> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w, double scale) {
    context->save_for_backward({x, w});
    context->saved_data["scale"] = scale;
    at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("dtensor_test::scaled_mm", "").typed<decltype(scaled_mm)>();
    return op.call(x, w, {}, scale);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto scale = context->saved_data["scale"].toDouble();
    return {gradients[0].mm(saved[1].t()).mul(scale), saved[0].t().mm(gradients[0]).mul(scale), {}};
  }
};

at::Tensor scaled_mm_autograd(const at::Tensor& x, const at::Tensor& w, const c10::optional<at::Tensor>&, double scale) {
  return ScaledMm::apply(x, w, scale);
}

// Test cases may run in one process or in several.
void give_scaled_mm_its_rule() {
  [[maybe_unused]] static const bool once = (register_rule("dtensor_test::scaled_mm", "mk,kn,mn->mn"), true);
}

at::Tensor call_scaled_mm(const at::Tensor& x, const at::Tensor& w) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("dtensor_test::scaled_mm", "").typed<decltype(scaled_mm)>();
  return op.call(x, w, {}, 0.5);
}

TORCH_LIBRARY(dtensor_test, library) {
  library.def("scaled_mm(Tensor x, Tensor w, Tensor? bias, float scale) -> Tensor");
  library.def("two(Tensor x) -> (Tensor, Tensor)");
  library.def("join(Tensor[] parts) -> Tensor");
  library.def("used(Tensor x) -> Tensor");
  library.def("composed(Tensor x) -> Tensor", [](const at::Tensor& x) { return x.neg().exp(); });
  library.def("forms(Tensor x) -> Tensor");
  library.def("forms.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(dtensor_test, CPU, library) {
  library.impl("scaled_mm", TORCH_FN(scaled_mm));
  library.impl("used", [](const at::Tensor& x) { return x.neg(); });
}
TORCH_LIBRARY_IMPL(dtensor_test, AutogradCPU, library) { library.impl("scaled_mm", TORCH_FN(scaled_mm_autograd)); }

void refuses(std::vector<std::string> parts, const std::function<void()>& call) {
  const auto text = words_of<Error>(call);
  INFO(text);
  CHECK(!text.empty());
  for (const auto& part : parts) CHECK(text.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("custom operators: a rule by notation and gradients", "[custom]") {
  give_scaled_mm_its_rule();
  check({"scaled_mm", {whole_numbers({5, 4}), whole_numbers({4, 6}, 1)}, [](const Tensors& in) {
           return Tensors{call_scaled_mm(in[0], in[1])};
         }});
  check_free({"scaled_mm",
              {whole_numbers({6, 4}), whole_numbers({4, 6})},
              [](const Tensors& in) { return Tensors{call_scaled_mm(in[0], in[1])}; }},
             {2, 2}, {{shard(0), shard(1)}, {replicate(), shard(0)}}, {"(S(0), P(sum))"});
}

TEST_CASE("custom operators: dims of one letter have one length", "[custom]") {
  give_scaled_mm_its_rule();
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const auto x = placed(fractions({5, 6}), mesh, {shard(1)}), w = placed(fractions({5, 6}), mesh, {shard(1)});
    CommDebugMode comm;
    const auto text = words_of<Error>([&] { call_scaled_mm(x, w); });
    for (const auto* part : {"dtensor_test::scaled_mm", "dim 0 of argument 1 has length 5", "'mk,kn,mn->mn'", "length 6"}) {
      require(text.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, text);
    }
    require(comm.count() == 0, "test", "it communicated");
  });
}

TEST_CASE("custom operators: refused rules", "[custom]") {
  refuses({"my::missing", "TORCH_LIBRARY"}, [] { register_rule("my::missing", "m->m"); });
  refuses({"dtensor_test::scaled_mm", "Tensor? bias", "2 terms for 3", "one term"},
          [] { register_rule("dtensor_test::scaled_mm", "mk,kn->mn"); });
  refuses({"dtensor_test::two", "1 for 2 returned"}, [] { register_rule("dtensor_test::two", "m->m"); });
  refuses({"dtensor_test::two", "'z'", "(Tensor x)"}, [] { register_rule("dtensor_test::two", "m->m,z"); });
  refuses({"dtensor_test::two", "'m' occurs twice"}, [] { register_rule("dtensor_test::two", "mm->m,m"); });
  refuses({"dtensor_test::two", "'#'"}, [] { register_rule("dtensor_test::two", "m#->m,m"); });
  refuses({"dtensor_test::two", "'...'"}, [] { register_rule("dtensor_test::two", "m->...m,m"); });
  refuses({"dtensor_test::two", "->"}, [] { register_rule("dtensor_test::two", "m"); });
  refuses({"dtensor_test::two", "whole", "'k'"}, [] { register_rule("dtensor_test::two", "m->m,m", {.whole = "k"}); });
  refuses({"dtensor_test::two", "linear"}, [] { register_rule("dtensor_test::two", "m->m,m", {.linear = {1}}); });
  refuses({"dtensor_test::join", "lists of tensors", "rules::Rule"}, [] { register_rule("dtensor_test::join", "m->m"); });
  refuses({"dtensor_test::composed", "taken apart", "library.impl"}, [] { register_rule("dtensor_test::composed", "m->m"); });
  CHECK_NOTHROW(register_rule("dtensor_test::forms", "m->m"));
  CHECK_NOTHROW(register_rule("dtensor_test::two", "...d->...d,...1", {.whole = "d"}));
}

TEST_CASE("custom operators: a rule comes before the first call", "[custom]") {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("dtensor_test::used", "").typed<at::Tensor(const at::Tensor&)>();
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = placed(whole_numbers({4}), mesh, {shard(0)});
    require(DTensor(op.call(x)).layout().is_replicated(), "test", "without a rule operands are replicated");
  }));
  refuses({"dtensor_test::used", "first"}, [] { register_rule("dtensor_test::used", "m->m"); });
}

// In order of name.
constexpr auto kOnlyBefore214 = "aten::cholesky aten::prelu_backward ";

TEST_CASE("rules: each is for an operator and fits it", "[custom]") {
  std::set<std::string> named;
  std::string faults;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    named.insert(name.name);
    named.insert(name.name + "." + name.overload_name);
    const auto* rule = rules::find(op->schema());
    const auto fault = rule ? rule->misfit(op->schema()) : "";
    if (!fault.empty()) faults += fmt::format("{}.{}: {}\n", name.name, name.overload_name, fault);
  }
  CHECK(faults == "");
  std::string missing;
  for (const auto& entry : rules::all()) {
    if (!named.count(entry.name)) missing += entry.name + " ";
    CHECK(!entry.why.empty());
  }
#if DTENSOR_TORCH_AT_LEAST(2, 14)
  CHECK(missing == kOnlyBefore214);  // the newest version has all others
#elif !DTENSOR_TORCH_AT_LEAST(2, 0)
  CHECK(missing.find("aten::cholesky ") == std::string::npos);
  CHECK(missing.find("aten::prelu_backward ") == std::string::npos);
#endif
}

TEST_CASE("rules: out= forms of rules by notation", "[custom]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto a = whole_numbers({5, 4}), b = whole_numbers({4, 3}, 1);
    for (const auto& placement : {shard(0), shard(1), replicate()}) {
      auto out = placed(at::zeros({5, 3}), mesh, {placement});
      at::mm_out(out, placed(a, mesh, {shard(0)}), placed(b, mesh, {replicate()}));
      require(full_tensor(out).equal(a.mm(b)) && DTensor(out).placements()[0] == placement, "test", "out is {}",
              DTensor(out).layout().str());
    }
    auto sum = placed(at::zeros({5, 3}), mesh, {partial()});
    at::mm_out(sum, placed(a, mesh, {shard(1)}), placed(b, mesh, {shard(0)}));
    require(full_tensor(sum).equal(a.mm(b)), "test", "a pending out= differs");
  }));
}

TEST_CASE("local_map: parts in and parts out with gradients", "[custom]") {
  const auto x = fractions({5, 4}), w = fractions({4, 3}, 1);
  const auto run = [](const at::Tensor& a, const at::Tensor& b, const auto& f) {
    auto p = a.detach().requires_grad_(), q = b.detach().requires_grad_();
    auto y = f(p, q);
    y.mul(y).sum().backward();
    return Tensors{y.detach(), p.grad(), q.grad()};
  };
  const auto product = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b).tanh(); };
  const auto sum_of_products = [](const at::Tensor& a, const at::Tensor& b) { return a.mm(b); };
  struct Case {
    std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> function;
    std::vector<Placements> in, out;
    const char* gradients[2];
  };
  const std::vector<Case> cases{
      {product, {{shard(0), replicate()}, {replicate(), shard(1)}}, {{shard(0), shard(1)}}, {"(S(0), P(sum))", "(P(sum), S(1))"}},
      {product, {{replicate(), replicate()}, {replicate(), replicate()}}, {{replicate(), replicate()}}, {"(R, R)", "(R, R)"}},
      {sum_of_products, {{shard(1), shard(0)}, {shard(0), replicate()}}, {{partial(), shard(0)}}, {"(S(1), S(0))", "(S(0), P(sum))"}},
  };
  CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    for (const bool inside : {false, true}) {
      std::unique_ptr<Spmd> spmd(inside ? new Spmd(mesh) : nullptr);
      for (const auto& c : cases) {
        const auto expected = run(x, w, c.function);
        const auto f = local_map(c.function, mesh, c.in, c.out);
        auto a = distribute_tensor(x, mesh, {replicate(), shard(1)}).tensor(), b = distribute_tensor(w, mesh, c.in[1]).tensor();
        const auto got = run(a, b, f);
        for (size_t i = 0; i < got.size(); ++i) {
          require(full_tensor(got[i]).allclose(expected[i], 1e-5, 1e-6), "test", "result {} differs", i);
        }
        require(DTensor(got[0]).placements() == PlacementsRef(c.out[0]), "test", "the output is {}", DTensor(got[0]).layout().str());
        // As they come out of the function, before a leaf has them in its own layout.
        at::Tensor seen[2];
        auto p = distribute_tensor(x, mesh, c.in[0])->detach().requires_grad_(), q = b.detach().requires_grad_();
        auto p2 = p.mul(1), q2 = q.mul(1);
        p2.register_hook([&](const at::Tensor& g) { seen[0] = g; });
        q2.register_hook([&](const at::Tensor& g) { seen[1] = g; });
        f(p2, q2).sum().backward();
        for (int i = 0; i < 2; ++i) {
          require(str(DTensor(seen[i]).placements()) == c.gradients[i], "test", "gradient {} is {}, expected {}", i,
                  DTensor(seen[i]).layout().str(), c.gradients[i]);
        }
      }
    }
  }));
}

TEST_CASE("local_map: sizes given and several outputs and refusals", "[custom]") {
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    const auto x = fractions({7, 4});
    const auto X = distribute_tensor(x, mesh, {shard(0)});
    LocalMapOptions options;
    options.redistribute_inputs = false;
    options.out_sizes = {{7, 2}, {3}};
    const auto both = [&mesh](const at::Tensor& part) {
      require(!is_dtensor(at::zeros({1})), "test", "factories are plain inside");
      return std::vector<at::Tensor>{part.slice(1, 0, 2), at::full({1}, static_cast<double>(mesh.coordinate(0)))};
    };
    Spmd spmd(mesh);
    CommDebugMode comm;
    const auto results = local_map(both, mesh, {{shard(0)}}, {{shard(0)}, {shard(0)}}, options)(X);
    require(comm.count() == 0, "test", "communicated:\n{}", comm.str());
    require(full_tensor(results[0]).equal(x.slice(1, 0, 2)) && full_tensor(results[1]).sum().item<double>() == 3, "test", "values differ");
    const auto throws = [](const char* part, const std::function<void()>& call) {
      try {
        call();
      } catch (const c10::Error& error) {
        const std::string text = error.what_without_backtrace();
        require(text.find("local_map") != std::string::npos && text.find(part) != std::string::npos, "test", "got '{}'", text);
        return;
      }
      fail("test", "nothing was thrown for '{}'", part);
    };
    throws("redistribute", [&] { local_map(both, mesh, {{replicate()}}, {{shard(0)}, {shard(0)}}, options)(X); });
    throws("1 inputs", [&] { local_map(both, mesh, {}, {{shard(0)}, {shard(0)}})(X); });
    throws("returned 2", [&] { local_map(both, mesh, {{shard(0)}}, {{shard(0)}})(X); });
  }));
  CHECK_THROWS_AS(on_mesh({2}, [](const DeviceMesh& mesh) {
    local_map([](const at::Tensor& x) { return x; }, mesh, {{shard(0)}}, {{shard(0)}})(at::ones({4}));
  }), c10::Error);
}

TEST_CASE("gradients of parts that are averaged", "[custom]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    auto part = at::full({3}, 1.0 + mesh.coordinate(0)).requires_grad_();
    from_local(part, mesh, {partial(ReduceOp::avg)}, {3}).redistribute({replicate()})->sum().backward();
    require(part.grad().equal(at::full({3}, 0.5)), "test", "the gradient of an averaged part is its share");
    auto largest = at::ones({3}).requires_grad_();
    const auto whole = from_local(largest, mesh, {partial(ReduceOp::max)}, {3}).redistribute({replicate()});
    bool thrown = false;
    try {
      whole->sum().backward();
    } catch (const c10::Error&) {
      thrown = true;
    }
    require(thrown, "test", "the gradient of a part of a maximum is not known");
  }));
}
