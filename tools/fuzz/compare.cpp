#include "check.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <sstream>

namespace dtensor::fuzz {

namespace {

std::string text(const at::Tensor& tensor) {
  std::ostringstream stream;
  if (tensor.numel() <= 48) stream << '\n' << tensor << '\n';
  else stream << " [" << tensor.numel() << " elements] ";
  return stream.str();
}

// Where one device has NaN, anything will do. Gradients stay pending through products in a backward pass: where one device has an infinity,
// shards may have added up to NaN, and what is finite is the same.
bool close(at::Tensor got, at::Tensor expected, Quality quality, bool gradient) {
  auto free = expected.ne(expected);
  if (gradient && expected.is_floating_point()) free = free.logical_or(expected.isinf().logical_and(got.isfinite().logical_not()));
  if (free.any().item<bool>()) got = got.masked_fill(free, 0), expected = expected.masked_fill(free, 0);
  if (quality == Quality::exact || !expected.is_floating_point()) return got.equal(expected);
  const double tolerance = quality == Quality::fine ? 1e-9 : 2e-3;
  const auto sizes = expected.to(at::kDouble).abs();
  const double size = expected.numel() == 0 ? 0 : sizes.masked_fill(sizes.isinf(), 0).max().item<double>();
  return at::allclose(got.to(at::kDouble), expected.to(at::kDouble), 0, tolerance * (1 + size));
}

// Strides mean nothing where a tensor is empty, nor along a dim of one element.
bool same_strides(const Seen& got, const Seen& expected) {
  for (size_t d = 0; d < got.sizes.size() && expected.whole.numel() > 0; ++d) {
    if (got.sizes[d] > 1 && got.strides[d] != expected.strides[d]) return false;
  }
  return true;
}

std::string difference(const Seen& got, const Seen& expected, Quality quality, bool gradient) {
  if (got.whole.defined() != expected.whole.defined()) return got.whole.defined() ? "is defined" : "is undefined";
  if (!got.whole.defined()) return "";
  if (got.sizes != expected.sizes)
    return fmt::format("has sizes [{}], expected [{}]", fmt::join(got.sizes, ", "), fmt::join(expected.sizes, ", "));
  if (got.dtype != expected.dtype)
    return fmt::format("is {}, expected {}", c10::toString(got.dtype), c10::toString(expected.dtype));
  if (!gradient && !same_strides(got, expected)) {
    return fmt::format("has strides [{}], expected [{}], of sizes [{}]", fmt::join(got.strides, ", "),
                       fmt::join(expected.strides, ", "), fmt::join(got.sizes, ", "));
  }
  if (got.requires_grad != expected.requires_grad) return fmt::format("requires_grad is {}", got.requires_grad);
  if (got.whole.sizes() != expected.whole.sizes() || got.whole.scalar_type() != expected.whole.scalar_type()) {
    return fmt::format("is whole of sizes [{}], {}", fmt::join(got.whole.sizes(), ", "), c10::toString(got.whole.scalar_type()));
  }
  if (close(got.whole, expected.whole, quality, gradient)) return "";
  return fmt::format("is{}expected{}", text(got.whole), text(expected.whole));
}

}  // namespace

std::string difference(const Outcome& plain, const Outcome& mesh) {
  for (const auto& [number, expected] : plain.values) {
    const auto got = mesh.values.find(number);
    if (got == mesh.values.end()) return fmt::format("v{} is missing", number);
    const auto what = difference(got->second, expected, plain.quality.at(number), false);
    if (!what.empty()) return fmt::format("v{} {}", number, what);
  }
  if (mesh.backward_refused) return "";
  if (plain.backward_error.empty() != mesh.backward_error.empty()) {
    return plain.backward_error.empty() ? "backward threw: " + mesh.backward_error
                                        : "backward did not throw: " + plain.backward_error;
  }
  if (mesh.backward_error.find("in group") != std::string::npos) return "backward threw: " + mesh.backward_error;  // a collective
  if (plain.gradients.size() != mesh.gradients.size()) return "the number of gradients";
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    const auto what = difference(mesh.gradients[i], plain.gradients[i], plain.gradient_quality, true);
    if (!what.empty()) return fmt::format("gradient {} {}", i, what);
  }
  return "";
}

namespace {

Verdict judge(const Program& program, const std::vector<Outcome>& outcomes, int first_to_fail) {
  Verdict verdict;
  verdict.mesh = outcomes[0];
  const auto plain = run_plain(program, verdict.mesh.refused);
  verdict.valid = plain.has_value();
  if (!plain) return verdict;
  if (first_to_fail >= 0) {
    verdict.failure = fmt::format("rank {}: {}", first_to_fail, outcomes[first_to_fail].error);
    return verdict;
  }
  for (size_t rank = 0; rank < outcomes.size() && verdict.failure.empty(); ++rank) {
    const auto& outcome = outcomes[rank];
    const auto what = outcome.refused.size() == plain->refused.size()
                          ? difference(*plain, outcome)
                          : fmt::format("refused {} operators, rank 0 {}", outcome.refused.size(), plain->refused.size());
    if (!what.empty()) verdict.failure = fmt::format("rank {}: {}", rank, what);
  }
  return verdict;
}

}  // namespace

Verdict check(const Program& program, Ranks& ranks) {
  const auto count = static_cast<int>(c10::multiply_integers(program.mesh));
  std::vector<Outcome> outcomes(count);
  std::atomic<int> first = -1;  // the rank that failed before the others
  ranks.run(count, [&](World& world) {
    bool broke = false;
    auto& mine = outcomes[world.rank()];
    mine = run_on_mesh(program, broke);
    int none = -1;
    if (broke) first.compare_exchange_strong(none, world.rank());
    if (broke) fail("fuzz", "{}", mine.error);
  });
  auto verdict = judge(program, outcomes, first);
  if (!verdict.failure.empty() || !verdict.mesh.backward_error.empty()) ranks.stop();  // they may have parted
  return verdict;
}

}  // namespace dtensor::fuzz
