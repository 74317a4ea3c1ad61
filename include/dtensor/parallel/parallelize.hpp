// Laying out the parameters of a module by a plan.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/mesh/placement.hpp>

#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace dtensor {

// Which parameters and buffers lie how. `pattern` is matched against fully qualified names ("blocks.0.attn.q.weight"): `*` matches
// any run of characters, `?` one character, and `a|b` either side; "re:blocks\\.[0-7]\\..*" is a regular expression (ECMAScript's) of whole
// names. Placements are given by mesh-dimension name; dimensions that are not named are Replicate. The first entry that matches decides.
struct PlanEntry {
  std::string pattern;
  std::vector<std::pair<std::string, Placement>> placements;
  bool may_match_nothing = false;  // else such an entry is a mistake
};
using Plan = std::vector<PlanEntry>;

// Re-lays the parameters and buffers of `module` in place, so that every handle the module holds sees it, and pins them (dtensor::pin).
// The module must have been built inside Spmd on `mesh`. What no entry matches stays as it is. From Replicate nothing is communicated.
// Throws, before anything is changed, for an unknown mesh dimension, an entry that matches nothing (naming the closest names), a placement
// that does not fit a matching tensor, or a plain parameter.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan);

// Names the module of every distributed parameter and buffer (see name_module): "layers.3.mlp" for "layers.3.mlp.weight". What is above does it too.
void name_modules(torch::nn::Module& module);

}  // namespace dtensor
