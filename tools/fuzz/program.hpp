// A program is data: what is drawn, run on one device and on a mesh, printed and shrunk.
#pragma once

#include <dtensor/mesh/placement.hpp>

#include <ATen/ATen.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace dtensor::fuzz {

using Ints = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;
struct Op;

// What the values of a leaf are.
enum class Data {
  whole,     // whole numbers from -8 to 8: sums of them are exact in any order
  distinct,  // whole numbers, each once, shuffled
  fraction,  // in (-2, 2), with rounding from the first operation on
  infinite,  // whole numbers, some of which are infinities
  mask,      // bool
  index,     // whole numbers in [0, bound)
  cyclic,    // the same, no two of them equal along `dim` if that has at most `bound` entries
};

struct Leaf {
  Ints sizes;
  at::ScalarType dtype = at::kDouble;
  Data data = Data::fraction;
  int64_t bound = 1, dim = 0;
  int64_t seed = 0;
  bool requires_grad = false;
  bool reversed = false;  // lies in memory with its dims in reverse order
  Placements placements;
};

// One line of a program: a leaf, a move to other placements, or an operator. Values are numbered; a step that writes in place
// gives none.
struct Step {
  enum class Kind { leaf, redistribute, call } kind = Kind::leaf;
  const Op* op = nullptr;
  std::vector<int> in, out;
  Ints args;
  Leaf leaf;
  Placements placements;  // of a redistribute
  bool no_grad = false;
};

struct Root {
  int value = 0;
  Leaf cotangent;
};

struct Program {
  uint64_t seed = 0;
  Ints mesh{2};
  bool spmd = false;
  bool infinities = false;  // values may be infinite (not NaN, but gradients)
  std::vector<Step> steps;
  std::vector<Root> roots;  // what backward starts from; none: no backward
  int values = 0;           // numbers given so far

  int operators() const;
};

// What a value was on a run: metadata as reported, and the whole of it.
struct Seen {
  at::Tensor whole;  // undefined: the value was undefined (a gradient)
  Ints sizes, strides;
  at::ScalarType dtype = at::kDouble;
  bool requires_grad = false;
  Placements placements;  // empty on one device
};
Seen seen(const at::Tensor& value);

// How far a value may be from one device's: rounding depends on the order of a sum, and the rest not.
enum class Quality { coarse, fine, exact };

struct Outcome {
  std::map<int, Seen> values;
  std::vector<Seen> gradients;     // of autograd::grad, then the leaves' .grad
  std::map<int, std::string> refused;  // steps, and what was said
  std::string error;               // of what ended the run, with the step
  std::string backward_error;
  bool backward_refused = false;  // by design, on the mesh
  // One device only.
  std::map<int, Quality> quality;
  Quality gradient_quality = Quality::exact;
};

// The program, a line a step, with the placements that `outcome` saw if there is one.
std::string print(const Program& program, const Outcome* outcome = nullptr);

}  // namespace dtensor::fuzz
