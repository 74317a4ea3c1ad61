// Operators on lists of tensors and fused optimizer steps: each index has its own placement.
#include "tests/support/op_check.hpp"

#include <range/v3/action/push_back.hpp>
#include <torch/version.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

const std::vector<Placement> kPlaces{shard(0), replicate(), shard(1)};

Tensors list(int64_t seed) {
  return {whole_numbers({5, 3}, seed), whole_numbers({4}, seed + 1), whole_numbers({2, 6}, seed + 2)};
}

Tensors distributed(const Tensors& tensors, const DeviceMesh& mesh, const std::vector<Placement>& places) {
  Tensors result;
  for (size_t i = 0; i < tensors.size(); ++i)
    result.push_back(placed(tensors[i], mesh, Placements(mesh.ndim(), places[i])));
  return result;
}

Tensors clones(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

using ListFunction = std::function<Tensors(const std::vector<Tensors>&)>;

// The first list lies as kPlaces say; the others alike, whole, or as pending sums.
void check_lists(const std::string& name, size_t lists, const ListFunction& f, double tolerance = 0) {
  INFO(name);
  std::vector<Tensors> plain;
  for (size_t i = 0; i < lists; ++i) plain.push_back(list(static_cast<int64_t>(3 * i)));
  std::vector<Tensors> copies;
  for (const auto& tensors : plain) copies.push_back(clones(tensors));
  const auto expected = f(copies);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
      for (const auto& places :
           {kPlaces, std::vector<Placement>(3, replicate()), std::vector<Placement>(3, partial())}) {
        std::vector<Tensors> inputs{distributed(plain[0], mesh, kPlaces)};
        for (size_t i = 1; i < lists; ++i) inputs.push_back(distributed(plain[i], mesh, places));
        Spmd spmd(mesh);
        const auto got = f(inputs);
        for (size_t i = 0; i < got.size(); ++i) {
          const auto full = full_tensor(got[i]);
          const bool same =
              tolerance == 0 ? full.equal(expected[i]) : at::allclose(full, expected[i], tolerance, tolerance, true);
          require(same, "test", "{} with {}: element {} differs", name, places[0].str(), i);
        }
      }
    }));
  }
}

}  // namespace

TEST_CASE("ops: foreach", "[ops][foreach]") {
  check_lists("add", 2, [](auto& in) { return at::_foreach_add(in[0], in[1], 2); });
  check_lists("add scalar", 1, [](auto& in) { return at::_foreach_add(in[0], 2); });
  check_lists("mul scalars", 1, [](auto& in) {
    return at::_foreach_mul(in[0], std::vector<at::Scalar>{1, 2, 3});
  });
  check_lists("sqrt", 1, [](auto& in) { return at::_foreach_sqrt(in[0]); }, 1e-6);
  check_lists(
      "addcdiv", 3, [](auto& in) { return at::_foreach_addcdiv(in[0], in[1], at::_foreach_add(in[2], 20), 0.5); },
      1e-6);
  check_lists("maximum", 2, [](auto& in) { return at::_foreach_maximum(in[0], in[1]); });
  check_lists(
      "norm", 1, [](auto& in) { return at::_foreach_norm(in[0], 2); }, 1e-6);
  check_lists("norm of absolutes", 1, [](auto& in) { return at::_foreach_norm(in[0], 1); });
}

TEST_CASE("ops: foreach in place", "[ops][foreach]") {
  const auto first = [](auto&& change) {
    return [change](const std::vector<Tensors>& in) {
      change(in);
      return in[0];
    };
  };
  check_lists("add_", 2, first([](auto& in) { at::_foreach_add_(in[0], in[1], 2); }));
  check_lists("mul_", 2, first([](auto& in) { at::_foreach_mul_(in[0], in[1]); }));
  check_lists("mul_ scalar", 1, first([](auto& in) { at::_foreach_mul_(in[0], 3); }));
  check_lists("div_ scalars", 1, first([](auto& in) { at::_foreach_div_(in[0], std::vector<at::Scalar>{1, 2, 4}); }));
  check_lists("addcmul_", 3, first([](auto& in) { at::_foreach_addcmul_(in[0], in[1], in[2], 2); }));
  check_lists("zero_", 1, first([](auto& in) { at::_foreach_zero_(in[0]); }));
  check_lists("neg_", 1, first([](auto& in) { at::_foreach_neg_(in[0]); }));
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
TEST_CASE("ops: fused AdamW", "[ops][foreach]") {
  // It may write all of its lists, so all lie as the parameters.
  check_lists(
      "_fused_adamw_", 1,
      [](auto& in) {
        const auto gradients = at::_foreach_sin(in[0]), averages = at::_foreach_cos(in[0]), squares = at::_foreach_abs(in[0]);
        Tensors steps;
        for (size_t i = 0; i < in[0].size(); ++i) steps.push_back(torch::ones({}));
        at::_fused_adamw_(in[0], gradients, averages, squares, {}, steps, 0.1, 0.9, 0.99, 0.01, 1e-8, false, false);
        auto results = in[0];
        ranges::push_back(results, averages);
        ranges::push_back(results, squares);
        return results;
      },
      1e-5);
}
#endif

TEST_CASE("ops: foreach of one tensor twice", "[ops][foreach]") {
  const auto x = whole_numbers({6});
  const auto twice = [&](const at::Tensor& tensor, bool view, auto f) {
    f(Tensors{tensor, view ? tensor.view({2, 3}) : tensor});
    return tensor;
  };
  const auto add = [](const Tensors& list) { at::_foreach_add_(list, 1.0); };
  const auto mul = [](const Tensors& list) { at::_foreach_mul_(list, std::vector<at::Scalar>{2.0, 3.0}); };
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const auto& placement : {replicate(), shard(0), partial(), partial(ReduceOp::max)}) {
      const bool maximum = placement.is_partial(ReduceOp::max);
      const auto make = [&] { return maximum ? from_local(x.clone(), mesh, {placement}, {6}).tensor() : placed(x, mesh, {placement}); };
      for (const bool view : {false, true}) {
        require(full_tensor(twice(make(), view, add)).equal(x + 2), "test", "add of {}", placement.str());
        require(full_tensor(twice(make(), view, mul)).equal(x * 6), "test", "mul of {}", placement.str());
      }
    }
  }));
}

TEST_CASE("ops: a foreach step communicates nothing", "[ops][foreach]") {
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    const auto parameters = distributed(list(0), mesh, kPlaces), gradients = distributed(list(3), mesh, kPlaces);
    Spmd spmd(mesh);
    CommDebugMode comm;
    at::_foreach_add_(parameters, gradients, -0.1);
    const auto norms = at::_foreach_norm(gradients, 2);
    const auto total = torch::stack(norms).norm();
    require(comm.count() == 0, "test", "communicated:\n{}", comm.str());
    at::_foreach_mul_(gradients, std::vector<at::Scalar>(3, total.item()));
    require(comm.count() == 1, "test", "expected one reduction of the total norm; got\n{}", comm.str());
  }));
}
