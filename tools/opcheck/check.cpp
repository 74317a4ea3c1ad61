#include "tools/opcheck/check.hpp"

#include "src/dispatch/op_info.hpp"

#include <dtensor/dtensor.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <sstream>

namespace dtensor::opcheck {

namespace {

// A failure of a rank that lost another one says nothing; the first failure counts.
struct Failures {
  std::mutex mutex;
  int64_t failed = -1;
};

double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble: case at::kComplexDouble: return 1e-9;
    case at::kFloat: case at::kComplexFloat: return 2e-4;
    default: return 3e-2;
  }
}

constexpr int64_t kMostShown = 48;

std::string text(const at::Tensor& tensor) {
  std::ostringstream stream;
  stream << tensor;
  auto result = stream.str();
  std::ranges::replace(result, '\n', ' ');
  return result;
}

// Small tensors in whole; of larger ones how many elements differ, and the pair that differs most.
std::string difference(const at::Tensor& got, const at::Tensor& expected) {
  if (got.numel() <= kMostShown) return fmt::format("{} expected {}", text(got), text(expected));
  if (got.sizes() != expected.sizes() || got.is_complex() || expected.is_complex()) return "not what was expected";
  const auto wanted = expected.to(at::kDouble).flatten(), is = got.to(at::kDouble).flatten();
  const auto apart = at::where(is.eq(wanted) | (is.isnan() & wanted.isnan()), at::zeros_like(is), (is - wanted).abs().nan_to_num(INFINITY));
  const auto worst = apart.argmax().item<int64_t>();
  return fmt::format("not what was expected: {} of {} elements differ, most of all element {}, which is {} instead of {}",
                     apart.count_nonzero().item<int64_t>(), got.numel(), worst, is[worst].item<double>(), wanted[worst].item<double>());
}

at::Tensor expanded(const at::Tensor& tensor, const at::Tensor& whole) {
  return tensor.sizes() == whole.sizes() ? tensor : tensor.expand(whole.sizes());
}

// One operand on the mesh. What lies in another order, or is expanded, is made so there too, so that both have the same strides.
at::Tensor placed(const at::Tensor& part, const at::Tensor& whole, const DeviceMesh& mesh, PlacementsRef placements) {
  const auto kept = stored(whole);
  const auto order = memory_order(kept);
  if (is_in_order(order)) return expanded(from_local(part.clone(), mesh, placements, kept.sizes()).tensor(), whole);
  std::vector<int64_t> inverse(order.size());
  for (size_t d = 0; d < order.size(); ++d) inverse[order[d]] = static_cast<int64_t>(d);
  const auto local = placements.back().is_flat() ? part.clone() : part.permute(order).clone(at::MemoryFormat::Contiguous);
  const auto ordered = from_local(local, mesh, permuted(placements, order), kept.permute(order).sizes()).tensor();
  return expanded(ordered.permute(inverse).detach(), whole);  // no view, as the whole is none
}

Stack place_all(const Stack& arguments, const std::vector<std::vector<at::Tensor>>& parts, const DeviceMesh& mesh,
                const Case& placements, int rank) {
  size_t next = 0;
  const auto place = [&](const at::Tensor& whole) -> at::Tensor {
    if (!whole.defined()) return whole;
    const auto i = next++;
    return placed(parts[i][rank], whole, mesh, placements[i]);
  };
  Stack result;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      result.push_back(place(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& element : value.toListRef()) list.push_back(place(element.toTensor()));
      result.push_back(list);
    } else if (value.isList() && !value.toListRef().empty() && (value.toListRef()[0].isTensor() || value.toListRef()[0].isNone())) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) {
        list.push_back(element.isTensor() ? c10::optional<at::Tensor>(place(element.toTensor())) : c10::optional<at::Tensor>());
      }
      result.push_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

// `undetermined`: where one device gives what memory held.
std::string compare(const at::Tensor& got, const at::Tensor& expected, bool values, double least_tolerance,
                    const at::Tensor& undetermined = {}) {
  if (got.defined() != expected.defined()) return fmt::format("is {}defined", got.defined() ? "" : "un");
  if (!got.defined()) return "";
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type()) {
    return fmt::format("is {} [{}], expected {} [{}]", c10::toString(got.scalar_type()), fmt::join(got.sizes(), ","),
                       c10::toString(expected.scalar_type()), fmt::join(expected.sizes(), ","));
  }
  if (!values) return "";
  const auto full = full_tensor(got.detach());
  const auto settled = [&](const at::Tensor& tensor) {
    return undetermined.defined() && undetermined.sizes() == tensor.sizes() ? tensor.masked_fill(undetermined, 0) : tensor;
  };
  if (close(settled(full), settled(expected), least_tolerance)) return "";
  return fmt::format("{} is {}", is_dtensor(got) ? dtensor::str(DTensor(got).placements()) : "plain", difference(full, expected));
}

std::string compare_values(const c10::IValue& got, const c10::IValue& expected) {
  if (got.isTensor() || got.isTensorList()) return "";
  if (got.isBool() && got.toBool() != expected.toBool()) return "another truth value";
  if (got.isDouble() && std::abs(got.toDouble() - expected.toDouble()) > 1e-3 * (1 + std::abs(expected.toDouble())))
    return "another number";
  if (got.isInt() && got.toInt() != expected.toInt()) return "another number";
  return "";
}

// Gradients of random cotangents with respect to the floating operands; empty when the operator has no derivative. `repeated`: cotangents
// are equal along the first dim.
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& operands, bool repeated = false) {
  std::vector<at::Tensor> roots, seeds, leaves;
  for (const auto& operand : operands) {
    if (operand.requires_grad()) leaves.push_back(operand);
  }
  torch::manual_seed(3);
  for (const auto& result : results) {
    if (!result.requires_grad()) continue;
    roots.push_back(result);
    at::Tensor seed;
    {
      auto options = at::TensorOptions(result.scalar_type());
      seed = torch::randn(repeated ? result.sizes().slice(1) : result.sizes(), options);
      if (repeated) seed = seed.expand(result.sizes()).contiguous();
    }
    seeds.push_back(seed);
  }
  if (roots.empty() || leaves.empty()) return {};
  return torch::autograd::grad(roots, leaves, seeds, false, false, true);
}

bool differentiable(const Operator& op, const Sample& sample) {
  // The derivative of as_strided_scatter reads memory that nobody wrote.
  return sample.dtype == at::kDouble && written_arguments(op.schema()).empty() && op.base != "as_strided_scatter";
}

void require_gradients(const Stack& arguments) {
  for (auto& tensor : tensors_in(arguments)) {
    if (tensor.is_floating_point() || tensor.is_complex()) tensor.requires_grad_();
  }
}

// One device's gradients; empty where there are none.
std::vector<at::Tensor> expected_gradients(const Operator& op, const Sample& sample) {
  if (!differentiable(op, sample)) return {};
  const auto once = [&](int byte, const Stack& arguments, bool repeated = false) {
    require_gradients(arguments);
    auto stack = arguments;
    torch::manual_seed(0);
    FilledMemory memory(byte);
    op.handle.callBoxed(&stack);
    const auto operands = tensors_in(arguments);  // some kernels return an empty operand itself, which is then its own gradient's root
    const bool own = std::ranges::any_of(operands, [](const auto& operand) { return !operand.is_leaf(); });
    return own ? std::vector<at::Tensor>() : gradients(tensors_in(stack), operands, repeated);
  };
  try {
    const auto first = once(0x35, deep_copy(sample.arguments)), second = once(0x4a, deep_copy(sample.arguments));
    for (size_t i = 0; i < first.size(); ++i) {  // some of libtorch's derivatives read memory that nobody wrote
      if (first[i].defined() && !close(first[i], second[i])) return {};
    }
    const auto again = [&](const Stack& arguments, bool repeated) { return once(0x35, arguments, repeated); };
    return alike_on_vectors(op, sample, again, first) ? first : std::vector<at::Tensor>();
  } catch (const std::exception&) {
    return {};
  }
}

bool is_refusal(const std::string& message) {
  return message.find("would change the shape of a distributed tensor in place") != std::string::npos ||
         message.find("libtorch does not check this") != std::string::npos;
}

// Some operators write what their schema does not say.
bool is_changed(const Sample& sample, size_t argument) {
  const auto before = tensors_in({sample.arguments[argument]}), after = tensors_in({sample.after[argument]});
  return !std::ranges::equal(before, after, [](const auto& a, const auto& b) { return a.equal(b); });
}

class Runner {
 public:
  Runner(const Operator& op, const Sample& sample) : op_(op), sample_(sample), gradients_(expected_gradients(op, sample)) {
    const auto declared = written_arguments(op.schema());
    for (size_t i = 0; i < sample.arguments.size(); ++i) {
      if (is_changed(sample, i) || std::ranges::find(declared, i) != declared.end()) changed_.push_back(i);
    }
  }

  Outcome run(const DeviceMesh& mesh, const Case& placements, const std::vector<std::vector<at::Tensor>>& parts) const {
    Outcome outcome{Verdict::right, 0, {}, {}};
    Spmd spmd(mesh);
    const auto arguments = place_all(sample_.arguments, parts, mesh, placements, World::current().rank());
    if (!gradients_.empty()) require_gradients(arguments);
    auto stack = arguments;
    torch::manual_seed(0);
    {
      CommDebugMode comm;
      try {
        c10::AutoGradMode mode(!gradients_.empty());
        op_.handle.callBoxed(&stack);
      } catch (const c10::Error& error) {
        const bool too_late = comm.count() > 0 && !op_.composite;  // a composite is many operators
        if (!is_refusal(error.what_without_backtrace()) || too_late) throw;
        outcome.verdict = Verdict::refused;
        return outcome;
      }
      outcome.collectives = comm.count();
    }
    note(outcome, check_forward(stack, arguments, outcome.results));
    try {
      if (!gradients_.empty()) note(outcome, check_backward(stack, arguments));
    } catch (const c10::Error& error) {  // some derivatives are made of operators that change a shape in place
      if (!is_refusal(error.what_without_backtrace())) throw;
      outcome.verdict = Verdict::refused;
    }
    return outcome;
  }

 private:
  static void note(Outcome& outcome, const std::string& message) {
    if (message.empty() || outcome.verdict == Verdict::wrong) return;
    outcome.verdict = Verdict::wrong;
    outcome.message = message;
  }

  // What the operator's definition settles of result `i`: the phase of an eigenvector is free, and rounding decides; what embedding_bag
  // gives besides its first result is for libtorch's own derivative.
  at::Tensor determined(const at::Tensor& result, size_t i) const {
    if (i == 1 && op_.base == "linalg_eig") return result.abs();
    return i > 0 && op_.base == "embedding_bag" ? torch::empty({0}) : result;
  }

  std::string check_forward(const Stack& results, const Stack& arguments, std::string& lie) const {
    const bool values = !is_uninitialized(op_);
    if (results.size() != sample_.results.size()) return "another number of results";
    for (size_t i = 0; i < results.size(); ++i) {
      if (const auto m = compare_values(results[i], sample_.results[i]); !m.empty()) return fmt::format("result {}: {}", i, m);
    }
    const auto got = tensors_in(results, true), expected = tensors_in(sample_.results, true);
    if (got.size() != expected.size()) return fmt::format("{} results, expected {}", got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i].defined()) lie += (lie.empty() ? "" : ", ") + (is_dtensor(got[i]) ? dtensor::str(DTensor(got[i]).placements()) : "plain");
      const auto& free = sample_.undetermined[i];
      if (const auto m = compare(determined(got[i], i), determined(expected[i], i), values, rounding_, free); !m.empty())
        return fmt::format("result {} {}", i, m);
    }
    return check_written(arguments, values);
  }

  std::string check_written(const Stack& arguments, bool values) const {
    size_t number = 0, first = 0;  // of the argument's first tensor
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto now = tensors_in({arguments[i]}, true), then = tensors_in({sample_.after[i]}, true);
      const bool changed = std::ranges::find(changed_, i) != changed_.end();
      for (size_t k = 0; changed && k < now.size(); ++k, ++number) {
        const auto& free = sample_.undetermined_after[first + k];
        if (const auto m = compare(determined(now[k], number), determined(then[k], number), values, rounding_, free); !m.empty())
          return fmt::format("written argument {} {}", i, m);
      }
      first += then.size();
    }
    return "";
  }

  std::string check_backward(const Stack& results, const Stack& arguments) const {
    const auto got = gradients(tensors_in(results), tensors_in(arguments));
    if (got.size() != gradients_.size()) return fmt::format("{} gradients, expected {}", got.size(), gradients_.size());
    for (size_t i = 0; i < got.size(); ++i) {
      if (const auto m = compare(got[i], gradients_[i], true, rounding_); !m.empty()) return fmt::format("gradient {} {}", i, m);
    }
    return "";
  }

  const Operator& op_;
  const Sample& sample_;
  std::vector<at::Tensor> gradients_;
  std::vector<size_t> changed_;  // the arguments that one device writes
  double rounding_ = rounding_of(sample_);
};

}  // namespace

std::string written_unsaid(const Operator& op, const Sample& sample) {
  std::string names;
  if (is_out_form(op.schema())) return names;  // which is the functional form and a copy
  const auto& known = dispatch::info_of(op.handle).written;
  for (size_t i = 0; i < sample.arguments.size(); ++i) {
    const bool said = op.composite || std::ranges::find(known, static_cast<int>(i)) != known.end();
    if (!said && is_changed(sample, i)) names += (names.empty() ? "" : " ") + op.schema().arguments()[i].name();
  }
  return names;
}

// Parts of a pending sum are rounded as the operands are, also where the results are of a wider type.
double rounding_of(const Sample& sample) {
  double most = 0;
  for (const auto& operand : tensors_in(sample.arguments)) {
    if (operand.is_floating_point() || operand.is_complex()) most = std::max(most, tolerance(operand.scalar_type()));
  }
  return most;
}

bool close(const at::Tensor& given, const at::Tensor& wanted, double least_tolerance) {
  auto got = given, expected = wanted;
  if (given.is_complex() && wanted.scalar_type() == given.scalar_type()) {  // by parts: the difference of two infinities is none
    const auto in_parts = [](const at::Tensor& t) { return at::view_as_real(t.resolve_conj().masked_fill(t.isnan(), NAN)); };
    got = in_parts(given), expected = in_parts(wanted);
  }
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type()) return false;
  if (!got.is_floating_point()) return got.equal(expected);
  if (got.numel() == 0) return true;
  const auto finite = at::abs(expected.to(at::kDouble));
  const double scale = finite.nan_to_num(0, 0, 0).max().item<double>();
  const double relative = std::max(least_tolerance, tolerance(got.scalar_type()));
  return at::allclose(got, expected, relative, relative * (1 + scale), true);
}

std::vector<Outcome> check(const Operator& op, const Sample& sample, const std::vector<Case>& cases, std::vector<int64_t> sizes) {
  std::vector<Outcome> outcomes(cases.size());
  std::vector<bool> done(cases.size());
  auto operands = tensors_in(sample.arguments);
  for (auto& operand : operands) operand = stored(operand);
  std::vector<std::vector<std::vector<at::Tensor>>> parts(cases.size());
  torch::manual_seed(1);
  for (size_t i = 0; i < cases.size(); ++i) {
    for (size_t k = 0; k < operands.size(); ++k) {
      if (!fits(operands[k], cases[i][k], sizes)) done[i] = true;
    }
    for (size_t k = 0; !done[i] && k < operands.size(); ++k) parts[i].push_back(parts_of(operands[k], cases[i][k], sizes));
  }
  const Runner runner(op, sample);
  LaunchOptions options;
  options.transport = "threads";
  options.ranks = static_cast<int>(c10::multiply_integers(sizes));
  options.deadline = std::chrono::seconds(20);
  while (std::ranges::find(done, false) != done.end()) {
    Failures failures;
    const auto todo = done;
    try {
      launch(options, [&](World& world) {
        const auto mesh = init_device_mesh(torch::kCPU, sizes);
        set_replication_check(false);
        for (size_t i = 0; i < cases.size(); ++i) {
          if (todo[i]) continue;
          try {
            auto outcome = runner.run(mesh, cases[i], parts[i]);
            std::lock_guard<std::mutex> lock(failures.mutex);
            if (world.rank() == 0) done[i] = true;
            if (outcome.verdict == Verdict::wrong) outcomes[i] = std::move(outcome);
            else if (world.rank() == 0 && outcomes[i].verdict != Verdict::wrong) outcomes[i] = std::move(outcome);
          } catch (const std::exception& error) {
            std::lock_guard<std::mutex> lock(failures.mutex);
            if (failures.failed < 0) {
              failures.failed = static_cast<int64_t>(i);
              const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
              outcomes[i] = {Verdict::wrong, 0, "", torch_error ? torch_error->what_without_backtrace() : error.what()};
              done[i] = true;
            }
            throw;
          }
        }
        world.barrier();
      });
    } catch (const std::exception&) {
      if (failures.failed < 0) throw;
    }
  }
  return outcomes;
}

}  // namespace dtensor::opcheck
