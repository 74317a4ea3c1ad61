// Calls that one device refuses are refused on every rank, in the same words, before anything is communicated.
#include "tests/support/op_check.hpp"
#include "tests/support/words_of.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct BadCall {
  const char* name;
  Tensors inputs;
  std::function<void(const Tensors&)> run;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

void check_refused(const BadCall& bad, const DeviceMesh& mesh, const Placement& placement) {
  auto lies = [&](const at::Tensor& input) {
    const bool fits = placement.is_shard() ? placement.dim < input.dim() : placement.is_replicate() || input.is_floating_point();
    return Placements(mesh.ndim(), fits ? placement : replicate());
  };
  Tensors plain, distributed;
  for (const auto& input : bad.inputs) {
    plain.push_back(input.clone());
    distributed.push_back(placed(input, mesh, lies(input)));
  }
  const auto expected = first_line(words_of<std::exception>([&] { bad.run(plain); }));
  require(!expected.empty(), "test", "{}: one device takes it", bad.name);
  CommDebugMode comm;
  const auto got = words_of<std::exception>([&] { bad.run(distributed); });
  require(got.find(expected) != std::string::npos, "test", "{} with {}: got '{}'; expected '{}'", bad.name, placement.str(), got, expected);
  require(comm.count() == 0, "test", "{} with {} communicated before it was refused:\n{}", bad.name, placement.str(), comm.str());
  for (size_t i = 0; i < bad.inputs.size(); ++i) {
    require(full_tensor(distributed[i]).equal(bad.inputs[i]), "test", "{} with {} changed operand {}", bad.name, placement.str(), i);
  }
}

void check_all_refused(const std::vector<BadCall>& calls) {
  for (const auto& bad : calls) {
    INFO(bad.name);
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {2, 2}}) {
      for (const auto& placement : {replicate(), shard(0), shard(1), partial()}) {
        CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) { check_refused(bad, mesh, placement); }));
      }
    }
  }
}

at::Tensor f(at::IntArrayRef sizes) { return fractions(sizes); }
at::Tensor i(at::IntArrayRef sizes) { return indices(sizes, 2); }

std::vector<BadCall> bad_products() {
  return {
      {"mm of wrong sizes", {f({4, 3}), f({4, 3})}, [](const Tensors& t) { t[0].mm(t[1]); }},
      {"mm of a vector", {f({4, 3}), f({3})}, [](const Tensors& t) { t[0].mm(t[1]); }},
      {"mm of two dtypes", {f({4, 3}), f({3, 4}).to(torch::kDouble)}, [](const Tensors& t) { t[0].mm(t[1]); }},
      {"bmm of two batches", {f({2, 4, 3}), f({3, 3, 4})}, [](const Tensors& t) { t[0].bmm(t[1]); }},
      {"addmm of a wrong bias", {f({5}), f({4, 3}), f({3, 4})}, [](const Tensors& t) { at::addmm(t[0], t[1], t[2]); }},
      {"mv of wrong sizes", {f({4, 3}), f({4})}, [](const Tensors& t) { t[0].mv(t[1]); }},
      {"dot of two lengths", {f({4}), f({6})}, [](const Tensors& t) { t[0].dot(t[1]); }},
      {"matmul", {f({2, 4, 3}), f({2, 4, 3})}, [](const Tensors& t) { t[0].matmul(t[1]); }},
      {"linear", {f({4, 3}), f({6, 4})}, [](const Tensors& t) { at::linear(t[0], t[1]); }},
      {"mm of two dtypes, on more ranks than rows", {f({6, 6}), f({6, 6}).to(torch::kDouble)}, [](const Tensors& t) { t[0].mm(t[1]); }},
      {"cholesky of no square", {f({4, 3})}, [](const Tensors& t) { at::linalg_cholesky(t[0]); }},
      {"tril of a vector", {f({4})}, [](const Tensors& t) { t[0].tril(); }},
  };
}

std::vector<BadCall> bad_pointwise() {
  return {
      {"add", {f({4, 3}), f({4, 2})}, [](const Tensors& t) { t[0].add(t[1]); }},
      {"add_ to a smaller one", {f({4}), f({4, 4})}, [](const Tensors& t) { t[0].add_(t[1]); }},
      {"mul_ of unlike sizes", {f({4, 3}), f({4, 2})}, [](const Tensors& t) { t[0].mul_(t[1]); }},
      {"add_ of a float to an int", {i({4}), f({4})}, [](const Tensors& t) { t[0].add_(t[1]); }},
      {"where", {i({4}).to(torch::kBool), f({4}), f({3})}, [](const Tensors& t) { at::where(t[0], t[1], t[2]); }},
      {"bitwise_and of floats", {f({4}), f({4})}, [](const Tensors& t) { t[0].bitwise_and(t[1]); }},
      {"clamp without bounds", {f({4})}, [](const Tensors& t) { t[0].clamp(c10::optional<at::Scalar>()); }},
      {"addcmul_", {f({4}), f({4}), f({3})}, [](const Tensors& t) { t[0].addcmul_(t[1], t[2]); }},
      {"copy_", {f({4}), f({3})}, [](const Tensors& t) { t[0].copy_(t[1]); }},
      {"masked_fill_", {f({4}), i({3}).to(torch::kBool)}, [](const Tensors& t) { t[0].masked_fill_(t[1], 1); }},
      {"relu_ of a bool", {i({4}).to(torch::kBool)}, [](const Tensors& t) { t[0].relu_(); }},
  };
}

std::vector<BadCall> bad_views_and_joins() {
  return {
      {"cat of unlike sizes",
       {f({4, 3}), f({4, 2})},
       [](const Tensors& t) {
         at::cat({t[0], t[1]}, 0);
       }},
      {"cat of unlike dims",
       {f({4, 3}), f({4})},
       [](const Tensors& t) {
         at::cat({t[0], t[1]}, 0);
       }},
      {"stack of unlike sizes",
       {f({4, 3}), f({4, 2})},
       [](const Tensors& t) {
         at::stack({t[0], t[1]});
       }},
      {"view of another count",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].view({5, 2});
       }},
      {"reshape of another count",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].reshape({-1, 5});
       }},
      {"expand",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].expand({4, 5});
       }},
      {"permute",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].permute({0, 0});
       }},
      {"roll of a large one", {f({100, 100})}, [](const Tensors& t) { t[0].roll({1}, {7}); }},
      {"flip of a large one", {f({100, 100})}, [](const Tensors& t) { t[0].flip({-3}); }},
      {"transpose", {f({4, 3})}, [](const Tensors& t) { t[0].transpose(0, 2); }},
      {"t of three dims", {f({4, 3, 2})}, [](const Tensors& t) { t[0].t(); }},
      {"select out of range", {f({4, 3})}, [](const Tensors& t) { t[0].select(0, 4); }},
      {"narrow out of range", {f({4, 3})}, [](const Tensors& t) { t[0].narrow(0, 2, 3); }},
      {"split of other sizes",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].split_with_sizes({1, 2});
       }},
  };
}

std::vector<BadCall> bad_reductions() {
  return {
      {"softmax of ints, on more ranks than rows", {i({3, 4})}, [](const Tensors& t) { at::_softmax(t[0], 1, false); }},
      {"sum over no dim", {f({4, 3})}, [](const Tensors& t) { t[0].sum(2); }},
      {"sum over a dim twice",
       {f({4, 3})},
       [](const Tensors& t) {
         t[0].sum(at::IntArrayRef({0, 0}));
       }},
      {"mean of ints", {i({4, 3})}, [](const Tensors& t) { t[0].mean(); }},
      {"argmax over no dim", {f({4, 3})}, [](const Tensors& t) { t[0].argmax(2); }},
      {"softmax over no dim", {f({4, 3})}, [](const Tensors& t) { t[0].softmax(2); }},
      {"softmax of ints", {i({4, 3})}, [](const Tensors& t) { at::_softmax(t[0], 1, false); }},
      {"cumsum over no dim", {f({4, 3})}, [](const Tensors& t) { t[0].cumsum(5); }},
      {"topk of too many", {f({4, 3})}, [](const Tensors& t) { t[0].topk(4, 1); }},
      {"sort over no dim", {f({4, 3})}, [](const Tensors& t) { t[0].sort(3); }},
  };
}

std::vector<BadCall> bad_indexing() {
  return {
      {"index_select of two dims", {f({4, 3}), i({2, 2})}, [](const Tensors& t) { t[0].index_select(0, t[1]); }},
      {"index_select by floats", {f({4, 3}), f({2})}, [](const Tensors& t) { t[0].index_select(0, t[1]); }},
      {"gather by another ndim", {f({4, 3}), i({4})}, [](const Tensors& t) { t[0].gather(1, t[1]); }},
      {"gather by floats", {f({4, 3}), f({4, 3})}, [](const Tensors& t) { t[0].gather(1, t[1]); }},
      {"scatter_ by another ndim", {f({4, 3}), i({4}), f({4})}, [](const Tensors& t) { t[0].scatter_(1, t[1], t[2]); }},
      {"index_add_ of another length", {f({4, 3}), i({2}), f({3, 3})}, [](const Tensors& t) { t[0].index_add_(0, t[1], t[2]); }},
      {"index by unlike lengths",
       {f({4, 3}), i({2}), i({3})},
       [](const Tensors& t) {
         t[0].index({t[1], t[2]});
       }},
      {"masked_select of another length", {f({4, 3}), i({5}).to(torch::kBool)}, [](const Tensors& t) { t[0].masked_select(t[1]); }},
      {"index by a mask of another length", {f({4, 3}), i({5}).to(torch::kBool)}, [](const Tensors& t) { t[0].index({t[1]}); }},
      {"embedding by floats", {f({4, 3}), f({2})}, [](const Tensors& t) { at::embedding(t[0], t[1]); }},
  };
}

std::vector<BadCall> bad_losses_and_layers() {
  return {
      {"layer_norm", {f({4, 3}), f({4})}, [](const Tensors& t) { at::layer_norm(t[0], {4}, t[1]); }},
      {"nll_loss of unlike batches", {f({4, 3}), i({5})}, [](const Tensors& t) { at::nll_loss(t[0], t[1]); }},
      {"nll_loss of unlike weights", {f({4, 3}), i({4}), f({4})}, [](const Tensors& t) { at::nll_loss(t[0], t[1], t[2]); }},
      {"nll_loss of float targets", {f({4, 3}), f({4})}, [](const Tensors& t) { at::nll_loss(t[0], t[1]); }},
      {"mse_loss", {f({4, 3}), f({4, 2})}, [](const Tensors& t) { at::mse_loss(t[0], t[1]); }},
      {"conv2d of other channels", {f({2, 3, 6, 6}), f({4, 2, 3, 3})}, [](const Tensors& t) { at::conv2d(t[0], t[1]); }},
  };
}

}  // namespace

TEST_CASE("bad calls: products in the words of one device", "[errors]") { check_all_refused(bad_products()); }

TEST_CASE("bad calls: pointwise in the words of one device", "[errors]") { check_all_refused(bad_pointwise()); }

TEST_CASE("bad calls: views and joins in the words of one device", "[errors]") { check_all_refused(bad_views_and_joins()); }

TEST_CASE("bad calls: reductions in the words of one device", "[errors]") { check_all_refused(bad_reductions()); }

TEST_CASE("bad calls: indexing in the words of one device", "[errors]") { check_all_refused(bad_indexing()); }

TEST_CASE("bad calls: losses and layers in the words of one device", "[errors]") { check_all_refused(bad_losses_and_layers()); }

TEST_CASE("bad calls: values that are out of range", "[errors]") {
  const std::vector<BadCall> calls{
      {"embedding", {f({4, 3}), i({2}).add(9)}, [](const Tensors& t) { at::embedding(t[0], t[1]); }},
      {"index_select", {f({4, 3}), i({2}).add(9)}, [](const Tensors& t) { t[0].index_select(0, t[1]); }},
      {"gather", {f({4, 3}), i({2, 3}).add(9)}, [](const Tensors& t) { t[0].gather(0, t[1]); }},
      {"nll_loss", {f({4, 3}), i({4}).add(9)}, [](const Tensors& t) { at::nll_loss(t[0], t[1]); }},
  };
  for (const auto& bad : calls) {
    CHECK_NOTHROW(on_mesh({2, 2}, [&](const DeviceMesh& mesh) { check_refused(bad, mesh, replicate()); }));
  }
}

TEST_CASE("bad calls: what depends on values is no fault of shapes", "[errors]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = fractions({4, 4});
    const auto positive = x.mm(x.t()).add_(at::eye(4).mul(8));
    const auto placed_positive = placed(positive, mesh, {shard(0)});
    require(full_tensor(at::linalg_cholesky(placed_positive)).allclose(at::linalg_cholesky(positive), 1e-4, 1e-5), "test",
            "cholesky differs");
    require(full_tensor(at::linalg_inv(placed_positive)).allclose(at::linalg_inv(positive), 1e-4, 1e-5), "test", "inverse differs");
    require(full_tensor(at::histc(placed(x, mesh, {shard(0)}), 4)).equal(at::histc(x, 4)), "test", "histogram differs");
  }));
}

TEST_CASE("bad calls: what would resize a tensor in place is refused", "[errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh({4}, [](const DeviceMesh& mesh) {
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 3}, {6, 1}, {3}, {}}) {
        for (const auto& placement : {replicate(), partial()}) {
          for (const auto& cut : {replicate(), shard(1)}) {
            const auto self = placed(f(sizes), mesh, {placement}), left = placed(f({5, 6, 4}), mesh, {cut});
            const auto words = words_of<std::exception>([&] { self.clone().addbmm_(left, placed(f({5, 4, 3}), mesh, {replicate()})); });
            require(words.find("would resize a distributed tensor in place to [6, 3]") != std::string::npos, "test", "got '{}'", words);
          }
        }
      }
    }, transport));
  }
}
