// What the ranks of a mesh find out together before any of them sends: that none failed, and that all are of one mind.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/tensor/replicated.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::context {

// Runs `f` on every rank of the mesh. Where it throws on one, all throw: that rank what `f` threw, the others that `subject` threw there.
// Communicates a number, where there are several ranks.
void on_all_or_none(const DeviceMesh& mesh, const std::string& subject, const std::function<void()>& f);

// Something of which every rank is to have the same, as numbers.
struct SameOnAll {
  std::string what;
  std::vector<int64_t> numbers;
};

// Throws on every rank of the mesh where ranks have different ones, naming which and the ranks. Communicates a hash. Does nothing where
// set_replication_check(false) or DTENSOR_CHECK_REPLICATED=0 turned it off.
void check_same_on_all(const DeviceMesh& mesh, const std::vector<SameOnAll>& parts);

// -- How ------------------------------------------------------------------------------------------------------------------

inline void on_all_or_none(const DeviceMesh& mesh, const std::string& subject, const std::function<void()>& f) {
  if (mesh.size() == 1) return f();
  const NoSpmd plain;
  std::exception_ptr problem;
  try {
    f();
  } catch (...) {
    problem = std::current_exception();
  }
  auto& group = dtensor::detail::group_of(mesh);
  const auto own = at::full({1}, problem ? group.rank() + 1 : 0, at::TensorOptions(mesh.device_type()).dtype(at::kLong));
  const auto failed = group.all_reduce(own, ReduceOp::max).get().item<int64_t>();
  if (problem) std::rethrow_exception(problem);
  require(failed == 0, "context_attention", "{} threw on rank {} of the mesh, whose error says for which pair", subject, failed - 1);
}

inline void check_same_on_all(const DeviceMesh& mesh, const std::vector<SameOnAll>& parts) {
  if (mesh.size() == 1 || !replication_check()) return;
  const NoSpmd plain;
  std::vector<at::Tensor> all;
  for (const auto& part : parts) all.push_back(at::tensor(part.numbers, at::kLong));
  if (ranks_that_differ(at::cat(all), mesh).empty()) return;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto differing = ranks_that_differ(all[i], mesh);
    require(differing.empty(), "context_attention",
            "ranks {} have {} than rank {}; hint: every rank makes the plan alike, from the same documents; "
            "set_replication_check(false) or DTENSOR_CHECK_REPLICATED=0 turns this check off",
            differing, parts[i].what, mesh.ranks()[0]);
  }
}

}  // namespace dtensor::context

#pragma GCC visibility pop
