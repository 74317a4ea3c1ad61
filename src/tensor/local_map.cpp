// local_map: functions of local tensors as functions of distributed tensors.
#include <dtensor/tensor/custom_op.hpp>

#include "src/dispatch/failure.hpp"

#include <dtensor/mesh/two_meshes.hpp>

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace dtensor::detail {

namespace {

// The placements of an input's gradient. Ranks that did different work on the same values contribute to one sum: Partial. Each summand
// of a Partial input gets the whole gradient: Replicate.
Placements gradient_of(const Placements& input, const std::vector<Placements>& in, const std::vector<Placements>& out) {
  auto gradient = input;
  for (size_t m = 0; m < gradient.size(); ++m) {
    const auto replicated = [m](const Placements& placements) { return m >= placements.size() || placements[m].is_replicate(); };
    const bool same_work = std::ranges::all_of(in, replicated) && std::ranges::all_of(out, replicated);
    if (input[m].is_replicate() && !same_work) gradient[m] = partial();
    if (input[m].is_partial()) gradient[m] = replicate();
  }
  return gradient;
}

// The input as a distributed tensor with the declared placements.
DTensor laid_out(const at::Tensor& input, size_t index, const DeviceMesh& mesh, const Placements& wanted, bool may_move) {
  require(input.defined(), "local_map", "input {} is undefined", index);
  if (!is_dtensor(input)) {
    require(Spmd::current(), "local_map",
            "input {} is a plain tensor; hint: distribute_tensor it, or call this inside dt::Spmd, where plain tensors count as "
            "replicated", index);
    return distribute_tensor(input, mesh, wanted);
  }
  const DTensor tensor(input);
  require(tensor.mesh() == mesh, "local_map", "input {} lies on another mesh; got {}; expected {}; {}", index, tensor.mesh().str(),
          mesh.str(), why_two(tensor.mesh(), mesh));
  const bool lies_so = tensor.placements() == tensor.layout().with(wanted)->placements();
  require(lies_so || may_move, "local_map",
          "input {} does not lie as declared; got {}; expected {}; hint: redistribute it before, or allow it with redistribute_inputs",
          index, tensor.layout().str(), str(wanted));
  return lies_so ? tensor : tensor.redistribute(wanted);
}

}  // namespace

std::vector<at::Tensor> run_local_map(const LocalFunction& function, const DeviceMesh& mesh, const std::vector<Placements>& in,
                                      const std::vector<Placements>& out, const LocalMapOptions& options,
                                      const std::vector<at::Tensor>& inputs) {
  require(inputs.size() == in.size(), "local_map", "got {} inputs; expected {}, one per list of placements", inputs.size(), in.size());
  require(options.in_gradients.empty() || options.in_gradients.size() == in.size(), "local_map",
          "got in_gradients for {} inputs; expected {}", options.in_gradients.size(), in.size());
  require(options.out_sizes.empty() || options.out_sizes.size() == out.size(), "local_map",
          "got out_sizes for {} outputs; expected {}", options.out_sizes.size(), out.size());
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto tensor = laid_out(inputs[i], i, mesh, in[i], options.redistribute_inputs);
    parts.push_back(tensor.to_local(options.in_gradients.empty() ? gradient_of(in[i], in, out) : options.in_gradients[i]));
  }
  std::vector<at::Tensor> results;
  try {
    c10::impl::ExcludeDispatchKeyGuard past{c10::DispatchKeySet(kDTensorKey)};
    results = function(parts);
  } catch (...) {
    dispatch::note_failure(mesh, "local_map", "local_map");
    throw;
  }
  require(results.size() == out.size(), "local_map", "the function returned {} tensors; expected {}, one per list of placements",
          results.size(), out.size());
  for (size_t i = 0; i < results.size(); ++i) {
    check_plain("local_map", results[i], fmt::format("output {} of the function", i));
    results[i] = options.out_sizes.empty() ? from_local(results[i], mesh, out[i]).tensor()
                                           : from_local(results[i], mesh, out[i], options.out_sizes[i]).tensor();
  }
  return results;
}

}  // namespace dtensor::detail
