// Laying out the parameters of a module by a plan.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace torch::nn {
class Module;
}

namespace dtensor {

// The placements of the parameters and buffers whose names match `pattern`. Names are fully qualified ("blocks.0.attn.q.weight"). `*`
// matches any run of characters, `?` one character, and `a|b` either side; "re:blocks\\.[0-7]\\..*" is a regular expression (ECMAScript's)
// of whole names. Placements are given by mesh-dimension name; dimensions that are not named are Replicate. The first matching entry
// counts.
struct PlanEntry {
  std::string pattern;
  std::vector<std::pair<std::string, Placement>> placements;
  bool may_match_nothing = false;  // false: an entry that matches nothing is an error
};
using Plan = std::vector<PlanEntry>;

// Lays out the parameters and buffers of `module` by the plan, in place, and pins them (dtensor::pin). Every handle that the module holds
// sees the change. The module must have been built inside Spmd on `mesh`. Tensors that no entry matches stay as they are. Communicates
// nothing for tensors that were Replicate. Throws, before it changes anything, for an unknown mesh dimension, an entry that matches nothing
// (naming the closest names), a placement that does not fit a matching tensor, and a plain parameter.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan);

// Names the module of every distributed parameter and buffer (see name_module): "layers.3.mlp" for "layers.3.mlp.weight". What is above
// does it too.
void name_modules(torch::nn::Module& module);

}  // namespace dtensor

#pragma GCC visibility pop
