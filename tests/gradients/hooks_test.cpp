// Public hooks: of the tensors that autograd saves, and of leaves, plain and distributed.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/refuses.hpp"

#include <dtensor/gradients/leaf_hooks.hpp>
#include <dtensor/gradients/saved_on_host.hpp>
#include <dtensor/gradients/saved_tensors.hpp>

#include <fmt/ranges.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Keeps what is saved in float.
class Rounded final : public SavedTensors {
 public:
  int packed = 0, unpacked = 0;

 private:
  struct Hooks final : torch::autograd::SavedVariableHooks {
    explicit Hooks(Rounded& rounded) : rounded(rounded) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      ++rounded.packed;
      at::NoGradGuard no_grad;
      kept = tensor.to(torch::kFloat);
    }
    at::Tensor call_unpack_hook() override {
      ++rounded.unpacked;
      at::NoGradGuard no_grad;
      return kept.to(torch::kDouble);
    }
    Rounded& rounded;
    at::Tensor kept;
  };
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(*this); }
};

}  // namespace

TEST_CASE("saved tensors go through hooks", "[gradients]") {
  CHECK_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = line(world);
    const auto values = counting({4, 3});
    for (const bool distributed : {false, true}) {
      const auto x = (distributed ? distribute_tensor(values, mesh, {shard(0)}).tensor().detach() : values.clone()).requires_grad_();
      Rounded rounded;
      at::Tensor y, z;
      {
        SaveWith save(&rounded);
        y = (x * x).sum();
        SaveWith none(nullptr);
        z = (x * x).sum();
      }
      require(rounded.packed == 2 && rounded.unpacked == 0, "test", "{} were saved", rounded.packed);
      y.backward();
      require(rounded.unpacked == 2, "test", "{} were asked for", rounded.unpacked);
      const auto expected = values.to(torch::kFloat).to(torch::kDouble) * 2;
      require(full_tensor(x.grad()).equal(expected), "test", "the gradient is of what was kept");
      z.backward();
      require(rounded.packed == 2 && full_tensor(x.grad()).equal(expected + values * 2), "test", "what was saved as ever");
    }
  }));
}

TEST_CASE("saved tensors on the host give the same gradients and their memory back", "[gradients]") {
  for (const std::string transport : {"threads", "shm"}) {
    CAPTURE(transport);
    CHECK_NOTHROW(on_ranks(
        2,
        [](World& world) {
          const auto mesh = line(world);
          const auto values = counting({8, 6}), weights = counting({6, 6});
          // Gradients of two leaves; `during` sees what is kept between forward and backward.
          const auto gradients = [&](bool distributed, SavedOnHost* on_host, const auto& during) {
            const auto leaf = [&](const at::Tensor& t, const Placement& p) {
              return (distributed ? distribute_tensor(t, mesh, {p}).tensor().detach() : t.clone()).requires_grad_();
            };
            const auto x = leaf(values, shard(0)), w = leaf(weights, shard(1));
            at::Tensor loss;
            {
              const SaveWith save(on_host);
              const auto h = x.sin().matmul(w);
              loss = (h * h.exp() + h.t().matmul(h).sum()).sum();
            }
            during(w);
            loss.backward();
            return std::vector{full_tensor(x.grad()), full_tensor(w.grad())};
          };
          for (const bool distributed : {false, true}) {
            const auto expected = gradients(distributed, nullptr, [](const at::Tensor&) {});
            double whole = 0;
            for (const double share : {1.0, 0.5, 0.0}) {
              SavedOnHost on_host({.share = share, .at_least_bytes = 1, .of_cpu = true});
              const auto got = gradients(distributed, &on_host, [&](const at::Tensor&) {
                const auto bytes = static_cast<double>(on_host.bytes());
                if (share == 1) whole = bytes;
                require(share == 0 ? bytes == 0 : bytes > 0 && bytes <= share * whole, "test", "{} of {} bytes", bytes, whole);
              });
              require(on_host.bytes() == 0, "test", "{} bytes are left", on_host.bytes());
              for (size_t i = 0; i < got.size(); ++i) require(got[i].equal(expected[i]), "test", "gradient {} of {}", i, share);
            }
          }
        },
        transport));
  }
  refuses("[SavedOnHost] got a share of 1.5; expected 0 to 1", [] { SavedOnHost({.share = 1.5}); });
}

TEST_CASE("saved tensors on the host are copied once and freed but for those that stay", "[gradients]") {
  const auto w = torch::rand({64, 64}).requires_grad_();
  SavedOnHost on_host({.at_least_bytes = 1, .except = {w}, .of_cpu = true});
  at::Tensor y;
  c10::weak_intrusive_ptr<c10::TensorImpl> saved(at::Tensor().getIntrusivePtr());
  {
    const SaveWith save(&on_host);
    const auto h = w.matmul(w);  // saves w, which stays
    CHECK(on_host.bytes() == 0);
    saved = c10::weak_intrusive_ptr<c10::TensorImpl>(h.getIntrusivePtr());
    y = h.sin() + h.cos() + h.t().matmul(h);  // all of these save h or a view of it
  }
  CHECK(on_host.bytes() == 2 * 64 * 64 * 4);  // h and the view
  CHECK(saved.expired());
  y.sum().backward();
  CHECK(on_host.bytes() == 0);
  // The CPU's tensors stay unless asked for.
  SavedOnHost as_ever({.at_least_bytes = 1});
  const SaveWith save(&as_ever);
  const auto z = w.sin();
  CHECK(as_ever.bytes() == 0);
}

TEST_CASE("hooks of leaves see the gradient in its layout and when it has been added", "[gradients]") {
  CHECK_NOTHROW(on_ranks(2, [](World& world) {
    const auto mesh = line(world);
    const auto values = torch::arange(12, torch::kDouble).view({4, 3});
    for (const bool distributed : {false, true}) {
      const auto w = (distributed ? distribute_tensor(values, mesh, {replicate()}).tensor().detach() : values.clone()).requires_grad_();
      const at::Tensor x = distributed ? distribute_tensor(values, mesh, {shard(0)}).tensor() : values;
      std::vector<std::string> order;
      w.register_hook([&](const at::Tensor&) { order.push_back("user"); });
      add_gradient_hook(w, [&](const at::Tensor& gradient) {
        order.push_back("first");
        if (distributed) require(DTensor(gradient).placements()[0].is_replicate(), "test", "got {}", DTensor(gradient).layout().str());
        return gradient * 2;
      });
      add_gradient_hook(w, [&](const at::Tensor&) {
        order.push_back("second");
        return at::Tensor();
      });
      w.register_hook([&](const at::Tensor&) { order.push_back("late user"); });
      at::Tensor added;
      auto handle = after_gradient(w, [&](const at::Tensor& leaf) {
        order.push_back("after");
        added = full_tensor(leaf.grad()).clone();
      });
      // Used twice: what both give is added before the hooks run. The gradient of a product over cut rows is a sum that is pending.
      ((x.matmul(w.t())).sum() + (w * 3).sum()).backward();
      const auto expected = (values.sum(0).expand({4, 3}) + 3) * 2;
      require(order == std::vector<std::string>{"user", "late user", "first", "second", "after"}, "test", "got {}", fmt::join(order, " "));
      require(full_tensor(w.grad()).equal(expected) && added.equal(expected), "test", "another gradient");
      handle.reset();
      order.clear();
      (w * 1).sum().backward();
      require(order.size() == 4 && full_tensor(w.grad()).equal(expected + 2), "test", "the handle has gone");
    }
    refuses("[add_gradient_hook] the hook is empty", [&] { add_gradient_hook(values.clone().requires_grad_(), {}); });
    for (const bool plain : {false, true}) {
      const auto w = distribute_tensor(values, mesh, {shard(0)}).tensor().detach().requires_grad_();
      add_gradient_hook(w, [&](const at::Tensor& gradient) { return plain ? torch::ones({4, 3}, torch::kDouble) : gradient.sum(0); });
      refuses(plain ? "the hook returned a plain tensor of sizes [4, 3]; expected f64[4, 3] (S(0))" : "the hook returned f64[3]",
              [&] { (w * 2).sum().backward(); });
    }
    refuses("got a tensor without a gradient", [&] { add_gradient_hook(values, [](const at::Tensor&) { return at::Tensor(); }); });
    refuses("got the result of an operator", [&] { (void)after_gradient(values.clone().requires_grad_() * 1, [](const at::Tensor&) {}); });
  }));
}
