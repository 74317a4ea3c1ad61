#include "tests/support/op_check.hpp"

#include <fmt/ranges.h>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>

namespace dtensor::test {

namespace {

Placements on_all(const DeviceMesh& mesh, const Placement& placement) { return Placements(mesh.ndim(), placement); }

bool gets_gradient(const OpCase& op, const at::Tensor& input) { return op.backward && input.is_floating_point(); }

at::Tensor seed_like(const at::Tensor& output) {
  return torch::arange(output.numel(), torch::kLong)
      .remainder(5)
      .sub(2)
      .to(output.scalar_type())
      .reshape(output.sizes());
}

struct Outcome {
  Tensors outputs, gradients;
};

// Where a gradient for `output` is given: as the output lies, whole where it is Partial.
at::Tensor placed_seed(const at::Tensor& output) {
  const auto seed = seed_like(output);
  if (!is_dtensor(output)) return seed;
  const DTensor tensor(output);
  Placements placements(tensor.placements().begin(), tensor.placements().end());
  for (auto& placement : placements) placement = placement.is_partial() ? replicate() : placement;
  return distribute_tensor(seed, tensor.mesh(), placements).tensor();
}

Outcome run(const OpCase& op, Tensors inputs) {
  for (auto& input : inputs) input = input.detach().requires_grad_(gets_gradient(op, input));
  Outcome outcome;
  outcome.outputs = op.run(inputs);
  Tensors roots, seeds;
  for (const auto& output : outcome.outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    roots.push_back(output);
    seeds.push_back(placed_seed(output));
  }
  if (!roots.empty()) torch::autograd::backward(roots, seeds);
  for (const auto& input : inputs) outcome.gradients.push_back(input.requires_grad() ? input.grad() : at::Tensor());
  return outcome;
}

std::string text(const at::Tensor& tensor) {
  std::ostringstream stream;
  if (tensor.numel() <= 64) stream << tensor;
  return stream.str();
}

void compare(const OpCase& op, const at::Tensor& got, const at::Tensor& expected, const std::string& what,
             bool strides) {
  require(got.defined() == expected.defined(), "test", "{}: {} defined", what, got.defined() ? "is" : "is not");
  if (!got.defined()) return;
  require(is_dtensor(got), "test", "{} is not distributed", what);
  require(got.sizes() == expected.sizes() && got.scalar_type() == expected.scalar_type(), "test",
          "{} is {}, expected {}", what, DTensor(got).layout().str(), text(expected));
  require(!strides || expected.numel() == 0 || got.strides() == expected.strides(), "test",
          "{} has strides [{}], expected [{}]", what, fmt::join(got.strides(), ", "),
          fmt::join(expected.strides(), ", "));
  const auto full = full_tensor(got.detach());
  const auto plain = expected.detach();
  const bool same = op.tolerance == 0 ? full.equal(plain) : at::allclose(full, plain, op.tolerance, op.tolerance, true);
  require(same, "test", "{} ({}) differs:\n{}\nexpected\n{}", what, DTensor(got).layout().str(), text(full),
          text(plain));
}

// Pieces that begin and end within rows, in a buffer with room around the elements.
Placement flat_across(int64_t elements, int64_t ranks) { return flat((elements + 4) / ranks + 1, 3); }

// The placements that every mesh dimension may have for this input.
std::vector<Placement> choices(const OpCase& op, const at::Tensor& input, const DeviceMesh& mesh) {
  std::vector<Placement> all{replicate()};
  for (int64_t d = 0; d < input.dim(); ++d) {
    all.push_back(shard(d));
    if (mesh.ndim() == 1) all.push_back(ragged_shard(d, c10::IntArrayRef({2, 0, 1, 3}).slice(0, mesh.size())));
  }
  if (op.partial && input.is_floating_point()) all.push_back(partial());
  int64_t most = 0;  // other inputs are given these choices too
  for (const auto& other : op.inputs) most = std::max(most, other.numel());
  if (mesh.ndim() == 1 && input.dim() > 0) all.push_back(flat_across(most, mesh.size()));
  return all;
}

std::vector<Placements> combinations(const std::vector<Placement>& choices, int64_t ndim) {
  std::vector<Placements> all(1);
  for (int64_t m = 0; m < ndim; ++m) {
    std::vector<Placements> longer;
    for (const auto& [before, choice] : ranges::views::cartesian_product(all, choices)) {
      longer.push_back(before);
      longer.back().push_back(choice);
    }
    all = std::move(longer);
  }
  return all;
}

bool fits(const at::Tensor& input, PlacementsRef placements) {
  return std::ranges::all_of(placements, [&](const Placement& p) {
    return (!p.is_shard() || p.dim < input.dim()) && (!p.is_flat() || input.dim() > 0) && (!p.is_partial() || input.is_floating_point());
  });
}

Tensors clones(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

void check_placed(const OpCase& op, const DeviceMesh& mesh, const std::vector<Placements>& placements,
                  const Outcome& expected) {
  std::string what = op.name;
  Tensors inputs;
  for (const auto& [input, its] : ranges::views::zip(op.inputs, placements)) {
    what += " " + str(its);
    inputs.push_back(placed(input, mesh, its));
  }
  what += " on " + mesh.str();
  Outcome got;
  try {
    Spmd spmd(mesh);
    got = run(op, std::move(inputs));
  } catch (const std::exception& error) {
    fail("test", "{} threw {}", what, error.what());
  }
  require(got.outputs.size() == expected.outputs.size(), "test", "{}: {} results", what, got.outputs.size());
  for (size_t i = 0; i < got.outputs.size(); ++i) {
    compare(op, got.outputs[i], expected.outputs[i], fmt::format("{}: result {}", what, i), op.strides);
  }
  for (size_t i = 0; i < got.gradients.size(); ++i) {
    compare(op, got.gradients[i], expected.gradients[i], fmt::format("{}: gradient {}", what, i), false);
  }
}

void check_on(const OpCase& op, const DeviceMesh& mesh) {
  const auto expected = run(op, clones(op.inputs));
  const std::vector<Placements> whole(op.inputs.size(), on_all(mesh, replicate()));
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    for (const auto& placements : combinations(choices(op, op.inputs[i], mesh), mesh.ndim())) {
      auto alone = whole;
      alone[i] = placements;
      check_placed(op, mesh, alone, expected);
      auto alike = whole;
      for (size_t j = 0; j < alike.size(); ++j) {
        if (fits(op.inputs[j], placements)) alike[j] = placements;
      }
      if (op.inputs.size() > 1) check_placed(op, mesh, alike, expected);
    }
  }
}

}  // namespace

void on_mesh(std::vector<int64_t> sizes, const std::function<void(const DeviceMesh&)>& body,
             const std::string& transport) {
  LaunchOptions options;
  options.transport = transport;
  options.ranks = static_cast<int>(c10::multiply_integers(sizes));
  options.deadline = std::chrono::seconds(60);
  launch(options, [&](World&) { body(init_device_mesh(torch::kCPU, sizes)); });
}

at::Tensor placed(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements) {
  // Along a Partial dimension rank r holds r everywhere, and the last rank the values less all of that.
  auto part = full.clone();
  Placements cut(placements.begin(), placements.end());
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    if (!placements[m].is_partial()) continue;
    const auto last = mesh.size(m) - 1, r = mesh.coordinate(m);
    part =
        r == last ? part - static_cast<double>(last * (last - 1) / 2) : at::zeros_like(part) + static_cast<double>(r);
    cut[m] = replicate();
  }
  // Parts differ between ranks, as data to distribute must not.
  const bool checks = replication_check();
  set_replication_check(false);
  const auto cut_part = distribute_tensor(part, mesh, cut);
  set_replication_check(checks);
  if (PlacementsRef(cut) == placements) return cut_part.tensor();
  return from_local(cut_part.to_local().detach().clone(), mesh, placements, full.sizes()).tensor();
}

void check(const OpCase& op) {
  INFO(op.name);
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {4}, {2, 2}}) {
    CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) { check_on(op, mesh); }));
  }
}

void check_over(const std::string& transport, const OpCase& op) {
  INFO(op.name << " over " << transport);
  CHECK_NOTHROW(on_mesh(
      {3}, [&](const DeviceMesh& mesh) { check_on(op, mesh); }, transport));
}

void check_free(const OpCase& op, std::vector<int64_t> sizes, const std::vector<Placements>& inputs,
                const std::vector<std::string>& results) {
  INFO(op.name);
  CHECK_NOTHROW(on_mesh(sizes, [&](const DeviceMesh& mesh) {
    Tensors tensors;
    for (const auto& [input, its] : ranges::views::zip(op.inputs, inputs)) tensors.push_back(placed(input, mesh, its));
    const auto expected = op.run(clones(op.inputs));
    Tensors got;
    {
      Spmd spmd(mesh);
      CommDebugMode comm;
      got = op.run(tensors);
      require(comm.count() == 0, "test", "{} communicated:\n{}", op.name, comm.str());
    }
    for (size_t i = 0; i < got.size(); ++i) {
      const auto lies = str(DTensor(got[i]).placements());
      require(results[i].empty() || lies == results[i], "test", "{}: result {} is {}, expected {}", op.name, i, lies,
              results[i]);
      compare(op, got[i], expected[i], fmt::format("{}: result {}", op.name, i), false);
    }
  }));
}

}  // namespace dtensor::test
