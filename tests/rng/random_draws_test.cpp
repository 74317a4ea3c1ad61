// Every random operator that writes a tensor, under every layout: the bits of one device, and what is drawn after it too.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include "rng/mt19937.hpp"
#include "rng/own_shard.hpp"

#include <dtensor/rng/position.hpp>

#include <ATen/CPUGeneratorImpl.h>

#include <fmt/ranges.h>
#include <torch/library.h>
#include <torch/version.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct Fill {
  std::string name;
  std::function<void(const at::Tensor&)> draw;  // in place
  bool integers = false;                        // draws integers too
  bool floats = true;
};

const std::vector<Fill> kFills = {
    {"uniform_", [](const at::Tensor& t) { t.uniform_(-1, 2); }},
    {"normal_", [](const at::Tensor& t) { t.normal_(1, 3); }},
    {"bernoulli_", [](const at::Tensor& t) { t.bernoulli_(0.3); }, true},
    {"random_", [](const at::Tensor& t) { t.random_(); }, true},
    {"random_ below", [](const at::Tensor& t) { t.random_(100); }, true},
    {"random_ between", [](const at::Tensor& t) { t.random_(-50, 60); }, true},
    {"random_ of 64 bits", [](const at::Tensor& t) { t.random_(-(int64_t{1} << 40), int64_t{1} << 40); }, true, false},
    {"random_ of all 64 bits", [](const at::Tensor& t) { t.random_(std::numeric_limits<int64_t>::min(), c10::optional<int64_t>()); }, true,
     false},
    {"exponential_", [](const at::Tensor& t) { t.exponential_(2); }},
    {"geometric_", [](const at::Tensor& t) { t.geometric_(0.3); }, true},
    {"cauchy_", [](const at::Tensor& t) { t.cauchy_(1, 2); }},
    {"log_normal_", [](const at::Tensor& t) { t.log_normal_(0.5, 2); }},
};

// What comes after a draw: uniform numbers, and normal ones, which a generator makes by pairs.
Tensors after() { return {torch::rand({3}), torch::randn({5}, torch::kDouble)}; }

// An odd number of single normal numbers first: a generator keeps the second of a pair.
void before() {
  torch::manual_seed(7);
  torch::randn({5});
}

struct Memory {
  std::string name;
  std::function<at::Tensor(at::IntArrayRef, at::ScalarType)> make;
};

const std::vector<Memory> kMemory = {
    {"row-major", [](at::IntArrayRef sizes, at::ScalarType dtype) { return torch::zeros(sizes, dtype); }},
    {"transposed", [](at::IntArrayRef sizes, at::ScalarType dtype) { return torch::zeros(sizes, dtype).transpose(0, -1); }},
};

// A draw twice, so that a generator that has gone on differently shows.
Tensors draws(const Fill& op, const std::function<at::Tensor()>& make) {
  before();
  Tensors results{make(), make()};
  for (const auto& tensor : results) op.draw(tensor);
  for (const auto& tensor : after()) results.push_back(tensor);
  return results;
}

void check_draws(const Fill& op, const at::Tensor& like, const Tensors& expected, const DeviceMesh& mesh, PlacementsRef placements) {
  const auto got = draws(op, [&] { return distribute_tensor(like, mesh, placements).tensor(); });
  for (size_t i = 0; i < got.size(); ++i) {
    const auto whole = is_dtensor(got[i]) ? full_tensor(got[i]) : got[i];
    require(whole.equal(expected[i]), "test", "{}: {} of {} under {}: draw {} differs", op.name, at::toString(like.scalar_type()),
            fmt::join(like.sizes(), "x"), str(placements), i);
  }
}

std::vector<Placements> all_placements(at::IntArrayRef sizes, int64_t mesh_dims) {
  std::vector<Placement> choices{replicate()};
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    choices.push_back(shard(d));
    if (mesh_dims == 1 && sizes[d] > 0 && sizes[d] % 2 == 0) choices.push_back(strided_shard(d, 2));
  }
  std::vector<Placements> result;
  for (const auto& first : choices) {
    if (mesh_dims == 1) result.push_back({first});
    for (const auto& second : choices) {
      if (mesh_dims == 2) result.push_back({first, second});
    }
  }
  return result;
}

void check_operator(const Fill& op, at::ScalarType dtype, const std::vector<std::vector<int64_t>>& shapes,
                    const std::vector<std::vector<int64_t>>& meshes, const std::string& transport = "threads") {
  for (const auto& memory : kMemory) {
    std::vector<at::Tensor> likes;
    std::vector<Tensors> expected;
    for (const auto& shape : shapes) {
      likes.push_back(memory.make(shape, dtype));
      expected.push_back(draws(op, [&] { return memory.make(shape, dtype); }));
    }
    for (const auto& sizes : meshes) {
      CHECK_NOTHROW(on_mesh(
          sizes,
          [&](const DeviceMesh& mesh) {
            for (size_t i = 0; i < likes.size(); ++i) {
              for (const auto& placements : all_placements(likes[i].sizes(), mesh.ndim()))
                check_draws(op, likes[i], expected[i], mesh, placements);
            }
          },
          transport));
    }
  }
}

// bernoulli_ and random_ take no float16 on libtorch 1.13.
bool takes(const Fill& op, at::ScalarType dtype) {
  if (!at::isFloatingType(dtype)) return op.integers && (dtype == at::kLong || op.name == "random_" || op.name == "bernoulli_");
  if (!op.floats) return false;
  return dtype != at::kHalf || TORCH_VERSION_MAJOR >= 2 || op.name != "bernoulli_";
}

}  // namespace

TEST_CASE("random: every operator under every layout", "[random]") {
  const std::vector<std::vector<int64_t>> shapes = {{5000}, {50, 37}, {7, 3, 5, 41}, {3, 20000}, {9000, 4}, {6}, {3, 5}, {0, 4}};
  for (const auto& op : kFills) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte, at::kBool}) {
      if (!takes(op, dtype)) continue;
      INFO(op.name << " of " << at::toString(dtype));
      check_operator(op, dtype, shapes, {{1}, {2}, {3}, {4}, {8}, {2, 2}, {2, 3}});
    }
  }
}

TEST_CASE("random: complex numbers", "[random]") {
  const Fill normal{"normal_", [](const at::Tensor& t) { t.normal_(); }};
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) check_operator(normal, dtype, {{2003}, {50, 37}, {2, 5}}, {{3}, {2, 2}});
}

// As vendors' libraries do behind bernoulli_ and exponential_: what is drawn in pieces is not what is drawn at once.
static at::Tensor vendor_(const at::Tensor& self, c10::optional<at::Generator> generator) {
  at::mt19937 own(generator->get<at::CPUGeneratorImpl>()->random());
  for (int64_t i = 0; i < self.numel(); ++i) self.data_ptr<float>()[i] = own() * 0x1p-32f;
  return self;
}

TORCH_LIBRARY_FRAGMENT(dtensor_test, library) {
  library.def("vendor_(Tensor(a!) self, *, Generator? generator) -> Tensor(a!)");
  library.impl("vendor_", c10::DispatchKey::CPU, TORCH_FN(vendor_));
}

TEST_CASE("random: a library that seeds a stream of its own for every call", "[random]") {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("dtensor_test::vendor_", "");
  const auto draw = rng::draw_of(op, {}, torch::TensorOptions(torch::kFloat));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(6);
  const auto expected = torch::empty({50, 70});
  draw.fill(expected, generator);
  const auto after = generator.get_state();
  CHECK_NOTHROW(on_mesh({3}, [&](const DeviceMesh& mesh) {
    for (const auto& placement : {shard(0), shard(1), replicate()}) {
      auto own = at::make_generator<at::CPUGeneratorImpl>(6);
      const auto layout = Layout::get(mesh, Placements{placement}, expected.sizes(), at::kFloat);
      const auto part = rng::draw_own_shard(*layout, draw, own);
      require(from_local(part.contiguous(), mesh, {placement}).full_tensor().equal(expected), "test", "{} differs", placement.str());
      require(own.get_state().equal(after), "test", "the generator went on otherwise under {}", placement.str());
    }
  }));
}

TEST_CASE("random: going ahead without drawing", "[random]") {
  for (const uint64_t words : {0, 1, 622, 623, 624, 625, 1248, 5000, 12'480'000, 12'480'001, 15'000'000}) {  // the last three by a jump
    for (const int before : {0, 5, 623, 624, 1000}) {
      INFO(words << " words after " << before);
      at::mt19937 drawn(9);
      for (int i = 0; i < before; ++i) drawn();
      auto skipped = drawn;
      for (uint64_t i = 0; i < words; ++i) drawn();
      rng::skip(skipped, words);
      bool same = true;
      for (int i = 0; i < 2000; ++i) same &= drawn() == skipped();
      CHECK(same);
    }
  }
}

TEST_CASE("random: millions of elements", "[random]") {
  for (const auto& op : kFills) {
    if (!op.floats) continue;
    INFO(op.name);
    for (const auto dtype : {at::kFloat, at::kDouble}) check_operator(op, dtype, {{2'000'003}, {999, 2003}}, {{3}});
  }
}

TEST_CASE("random: over gloo", "[random]") {
  for (const auto& op : kFills) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
      if (!takes(op, dtype)) continue;
      INFO(op.name << " of " << at::toString(dtype));
      check_operator(op, dtype, {{5000}, {50, 37}}, {{3}}, "gloo");
    }
  }
}

TEST_CASE("random draws: how much was drawn is counted and skipped", "[random]") {
  for (const int64_t count : {0, 1, 3, 623, 624, 625, 5000, 3'000'000}) {
    CAPTURE(count);
    auto one = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5}), other = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5});
    auto counted = Generator(5), skipped = Generator(5);
    for (int round = 0; round < 2; ++round) {
      const auto before = rng::copy_of(one);
      at::rand({count}, one);
      const auto draws = rng::draws_between(before, one);
      CHECK(draws == count);
      rng::skip_draws(other, draws);
      CHECK(at::rand({4}, one).equal(at::rand({4}, other)));
      const auto marked = rng::copy_of(counted);
      at::empty({count}).uniform_(0, 1, counted);
      rng::skip_draws(skipped, rng::draws_between(marked, counted));
      CHECK(at::empty({4}).uniform_(0, 1, counted).equal(at::empty({4}).uniform_(0, 1, skipped)));
    }
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{5});
  const auto before = rng::copy_of(generator);
  at::randn({3}, generator);
  CHECK_THROWS_WITH(rng::draws_between(before, generator), says("half of a pair"));
  auto with_half = rng::copy_of(generator);  // what draws no normal numbers leaves the half alone
  const auto marked = rng::copy_of(generator);
  at::rand({1000}, generator);
  rng::skip_draws(with_half, rng::draws_between(marked, generator));
  CHECK(at::randn({3}, with_half).equal(at::randn({3}, generator)));
  generator.set_current_seed(5);
  const auto marked_again = rng::copy_of(generator);
  generator.set_current_seed(6);
  CHECK_THROWS_WITH(rng::draws_between(marked_again, generator), says("seeded anew"));
  CHECK_THROWS_WITH(rng::draws_between(Generator(1), Generator(2)), says("seeded anew"));
  CHECK_THROWS_WITH(rng::draws_between(Generator(1), generator), says("seeded anew"));
}
