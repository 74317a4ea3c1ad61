// Memory and printing of distributed tensors on several ranks: what is whole is read and written by pointer, what is cut is refused or
// gathered.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include <sstream>

namespace dt = dtensor;
using namespace dtensor::test;

namespace {

void contains(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) dt::require(text.find(part) != std::string::npos, "test", "no '{}' in: {}", part, text);
}

std::string printed(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor;
  return out.str();
}

std::string plainly_printed(const at::Tensor& tensor) {
  dt::NoSpmd plain;
  return printed(tensor);
}

void every_transport(const std::function<void(dt::World&)>& body) {
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const int ranks : {2, 3}) REQUIRE_NOTHROW(on_ranks(ranks, body, transport));
  }
}

}  // namespace

TEST_CASE("memory: what every rank has whole is read and written by pointer", "[memory]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    auto x = torch::tensor(std::vector<float>{1, 2, 3, 4, 5, 6}).reshape({2, 3});
    x.data_ptr<float>()[1] = 8;
    x.accessor<float, 2>()[1][2] = -1;
    dt::NoSpmd plain;
    const auto expected = torch::tensor({1.F, 8.F, 3.F, 4.F, 5.F, -1.F}).reshape({2, 3});
    same(x, expected, "what was written by pointer");
    auto cut = dt::distribute_tensor(expected, mesh, {dt::shard(1)});
    const auto gathered = cut.redistribute({dt::replicate()});  // under way
    dt::require(torch::from_blob(gathered->data_ptr(), {2, 3}).equal(expected), "test", "read while it was under way");
    dt::require(gathered->is_alias_of(gathered->t()) && !gathered->is_alias_of(x), "test", "aliases");
    std::ostringstream here, there;
    torch::save(gathered.tensor(), here);
    torch::save(expected, there);
    dt::require(here.str() == there.str(), "test", "the file of a replicated tensor");
  });
}

TEST_CASE("memory: a tensor that is cut or pending says what to do instead", "[memory][errors]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    const auto rank = fmt::format("(rank {})", world.rank());
    auto cut = dt::distribute_tensor(torch::ones({4, 4}), mesh, {dt::shard(0)});
    auto pending = dt::from_local(torch::ones({2}), mesh, {dt::partial()});
    const auto layout = fmt::format("f32[4, 4] (S(0)) on (tp={})", world.size());
    contains(words_of([&] { cut->data_ptr<float>(); }), {"[data_ptr]", layout, "full_tensor()", "to_local()", "item()", "NoSpmd", rank});
    contains(words_of([&] { cut->data_ptr(); }), {"[data_ptr]", layout});
    contains(words_of([&] { cut->accessor<float, 2>(); }), {"[data_ptr]", layout});
    contains(words_of([&] { cut->storage(); }), {"[storage]", layout, rank});
    contains(words_of([&] { cut->is_alias_of(pending); }), {"[storage]", layout});
    contains(words_of([&] { pending->data_ptr<float>(); }), {"[data_ptr]", "P(sum)", "full_tensor()"});
    same(cut, torch::ones({4, 4}), "a refused tensor");
    same(pending, torch::full({2}, static_cast<float>(world.size())), "a refused pending tensor");
  });
}

TEST_CASE("memory: a copied view is not written by pointer since its base would not see it", "[memory]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    auto x = dt::distribute_tensor(torch::ones({6, 2}), mesh, {dt::shard(0)});
    auto row = x->select(0, 1);
    if (dt::DTensor(row).layout().is_replicated()) contains(words_of([&] { row.data_ptr<float>(); }), {"copy", "clone()"});
    const auto own = row.clone();
    if (dt::DTensor(own).layout().is_replicated()) dt::require(own.data_ptr<float>()[1] == 1, "test", "of a clone");
  });
}

// A gradient that two uses bring is added up by autograd, which asks for its memory; a replicated one may be lent before it is reduced
// anew.
TEST_CASE("memory: lending changes neither gradients nor what is communicated", "[memory][gradients]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    const auto full = counting({6, 4});
    const auto run = [&](bool lend) {
      auto x = dt::distribute_tensor(full, mesh, {dt::shard(0)}).tensor().detach().requires_grad_();
      auto w = counting({4, 4}).requires_grad_();
      if (lend) w.data_ptr<double>()[0] += 0;
      dt::CommDebugMode comm;
      auto y = torch::mm(x, w);
      auto z = (y * y).sum() + y.sum() + torch::mm(y, w).sum();
      if (lend) z.detach().is_same(z);
      z.backward();
      if (lend) w.grad().data_ptr<double>()[0] += 0;
      w.grad().mul_(2);
      return std::tuple(dt::full_tensor(w.grad()), dt::full_tensor(x.grad()), comm.count());
    };
    const auto [w, x, count] = run(false);
    const auto [lent_w, lent_x, lent_count] = run(true);
    dt::require(w.equal(lent_w) && x.equal(lent_x) && count == lent_count, "test", "lending changed gradients or communication");
  });
}

TEST_CASE("memory: what was lent is not what a tensor has after it was replaced", "[memory]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    auto x = dt::distribute_tensor(torch::arange(6), mesh, {dt::replicate()}).tensor();
    x.data_ptr<int64_t>()[0] = 3;
    dt::redistribute_(x, {dt::shard(0)});
    contains(words_of([&] { x.data_ptr<int64_t>(); }), {"[data_ptr]"});
    dt::redistribute_(x, {dt::replicate()});
    dt::require(x.data_ptr<int64_t>()[0] == 3 && x.data_ptr<int64_t>()[5] == 5, "test", "after it was gathered again");
    x.set_data(x + 1);
    dt::require(x.data_ptr<int64_t>()[0] == 4, "test", "after set_data");
  });
}

TEST_CASE("printing: the values of the whole tensor with its layout on every rank", "[memory][printing]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    const auto full = [] {
      dt::NoSpmd plain;
      return torch::arange(12, torch::kFloat).reshape({4, 3}) / 7;
    }();
    const auto ranks = world.size();
    const auto cut = dt::distribute_tensor(full, mesh, {dt::shard(0)});
    const auto text = plainly_printed(full);
    dt::require(printed(cut) == fmt::format("f32[4, 3] (S(0)) on (tp={})\n{}", ranks, text), "test", "got {}", printed(cut));
    std::ostringstream handle;
    handle << cut;
    dt::require(handle.str() == printed(cut), "test", "a handle prints otherwise");
    const auto pending = dt::from_local(full / ranks, mesh, {dt::partial()}).tensor();
    contains(printed(pending), {fmt::format("f32[4, 3] (P(sum)) on (tp={})\n", ranks), "[ CPUFloatType{4,3} ]"});
    contains(printed(cut->sum().requires_grad_()), {"P(sum)", "[ CPUFloatType{} ]"});
    contains(printed(cut->slice(0, 0, 1)), {"[ CPUFloatType{1,3} ]"});
    dt::require(printed(full) == text, "test", "a plain tensor inside the region");
  });
}

TEST_CASE("printing: a replicated tensor is printed by one rank alone", "[memory][printing]") {
  every_transport([](dt::World& world) {
    const auto mesh = line(world);
    dt::Spmd spmd(mesh);
    const auto loss = torch::ones({3}).mean();
    if (world.rank() == 0) contains(printed(loss), {"f32[] (R) on", "1\n[ CPUFloatType{} ]"});
    dt::CommDebugMode comm;
    printed(torch::ones({2, 2}));
    expect(comm, 0, "printing a replicated tensor");
  });
}

TEST_CASE("printing: a cut tensor that one rank alone prints is an error that says so", "[memory][printing][errors]") {
  for (const auto* transport : {"threads", "shm", "gloo"}) {
    for (const bool others_go_on : {false, true}) {
      std::string error = "nothing was thrown";
      try {
        on_ranks(2, [&](dt::World& world) {
          const auto mesh = line(world);
          const auto cut = dt::distribute_tensor(torch::ones({4}), mesh, {dt::shard(0)});
          if (world.rank() == 0) printed(cut);
          if (others_go_on) cut->sum().item<float>();
        }, transport);
      } catch (const c10::Error& caught) {
        error = caught.what_without_backtrace();
      }
      INFO(transport << ": " << error);
      CHECK(error.find("printing") != std::string::npos);
      CHECK((others_go_on || error.find("every rank has to print it") != std::string::npos));
      CHECK((others_go_on || error.find("f32[4] (S(0)) on (tp=2)") != std::string::npos));
    }
  }
}
