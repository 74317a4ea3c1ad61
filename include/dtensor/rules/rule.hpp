// What an operator's sharding rule is: the legal combinations of operand and output placements on ONE mesh dimension.
// The resolver (src/dispatch/resolver.cpp) picks the cheapest combination for each mesh dimension; rules know nothing of
// costs, of moving data, or of other operators.
#pragma once

#include <dtensor/mesh/layout.hpp>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace c10 { class OperatorHandle; }

namespace dtensor::rules {

// One defined tensor among the arguments; elements of a tensor list are operands of their own, in order.
struct Operand {
  LayoutPtr layout;   // a plain tensor counts as replicated
  int argument = 0;   // position in the operator's schema
  int element = -1;   // position in a tensor list, or -1
  bool plain = false; // not a DTensor
  bool pinned = false; // see dtensor::pin
  bool yields = false; // written; if it is whole, the call may shard it for good

  c10::IntArrayRef sizes() const { return layout->sizes(); }
  int64_t ndim() const { return layout->ndim(); }
  PlacementsRef placements() const { return layout->placements(); }
};

// The metadata of a tensor that the operator returns, as on one device. Known before the local call if libtorch or the rule can tell.
struct OutputMeta {
  Sizes sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool defined = true;
  int64_t offset = 0;  // of a view: from its base's first element, in the memory of one device
  bool open = false;   // only the local call tells how many dims there are, and the sizes of those that are not sharded
};

// An operator call as rules see it: global metadata, the same on every rank.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, DeviceMesh mesh);

  const c10::FunctionSchema& schema;
  c10::ArrayRef<c10::IValue> arguments;  // tensors among them are the global (distributed) ones
  DeviceMesh mesh;
  std::vector<Operand> operands;
  std::vector<OutputMeta> outputs;       // flattened; empty when only the local call tells
  bool in_place = false;                 // writes its first argument
  // The operands' placements on the mesh dimensions that are decided already.
  std::vector<Placements> chosen;

  // The operand that is argument `argument` (element `element` of it); null if that argument holds no tensor.
  const Operand* operand(int argument, int element = -1) const;
  int operand_index(int argument, int element = -1) const;

  // Non-tensor arguments by schema name. Throw if there is no such argument.
  const c10::IValue& arg(std::string_view name) const;
  int argument_index(std::string_view name) const;  // -1 if absent
  bool has(std::string_view name) const { return argument_index(name) >= 0; }
  int64_t int_arg(std::string_view name) const;
  bool bool_arg(std::string_view name, bool if_none = false) const;
  // An int, int list or None; None gives an empty vector.
  std::vector<int64_t> ints_arg(std::string_view name) const;
};

// One legal combination on one mesh dimension: a placement per operand and per output.
struct Candidate {
  Placements in;
  Placements out;
  int64_t lowering_bytes = 0;  // bytes per rank that the lowering itself communicates; priced as one all_reduce
};
using Candidates = std::vector<Candidate>;

// The decision over all mesh dimensions: the layouts that the operands are moved to and the outputs' placements.
struct Resolution {
  std::vector<LayoutPtr> in;
  std::vector<LayoutPtr> written;  // layouts of the operands that the operator writes, after it has run
  std::vector<Placements> out;
};

// A local call under way: the operator, and the stack whose last entries are its arguments, with local tensors in place of
// distributed ones. A lowering must replace them by the operator's local results.
struct LocalCall {
  const c10::OperatorHandle& op;
  std::vector<c10::IValue>& stack;
  size_t begin;  // index of the first argument in the stack
  c10::ArrayRef<c10::IValue> originals;  // the arguments as they were, distributed

  c10::IValue& arg(size_t i) { return stack[begin + i]; }
  void call();                              // runs the operator itself
  void replace(std::vector<c10::IValue> results);  // drops the arguments, pushes results
};
using Lowering = std::function<void(LocalCall&)>;

class Rule {
 public:
  virtual ~Rule() = default;

  // The legal combinations on mesh dimension `mesh_dim`. All-replicated is always added by the resolver.
  virtual Candidates candidates(const Call& call, int64_t mesh_dim) const = 0;

  // The outputs' global sizes where libtorch has no meta kernel. Strides are then row-major, and the dtype is that of the first
  // operand. Empty: unknown, and the operator runs replicated.
  virtual std::vector<Sizes> output_sizes(const Call&) const { return {}; }
  // The same with strides and dtypes, for rules whose outputs have others.
  virtual std::vector<OutputMeta> output_metas(const Call& call) const;
  // True: output_metas is complete, so no meta kernel is tried. (Trying one that is missing costs milliseconds.)
  virtual bool describes_outputs() const { return false; }

  // What to do in place of calling the operator on the local tensors. Empty: just call it.
  virtual Lowering lower(const Call&, const Resolution&) const { return {}; }

  // True: the outputs' sizes cannot be known from metadata, and operands stay replicated.
  virtual bool data_dependent() const { return false; }

  // Whether a decision may depend on the values of floating-point arguments (a norm's order, a dropout's probability). False: one
  // decision serves all values, so that a factor which changes every step needs no new decision.
  virtual bool reads_numbers() const { return true; }

  // Why the rule does not fit an operator with this schema, and what to do about it. Empty: it fits.
  virtual std::string misfit(const c10::FunctionSchema&) const { return {}; }
};
using RulePtr = std::shared_ptr<const Rule>;

// Registers a rule under a full operator name with overload ("aten::add.Tensor") or for all overloads ("aten::add"); the
// in-place form (add_) and the out= form use the same rule. The overload's own entry wins. `why` is the one-line reason.
struct Register {
  Register(std::string_view names, RulePtr rule, std::string_view why,  // names separated by spaces
           std::source_location table = std::source_location::current());
};

// A line of a table.
struct Entry {
  std::string name;    // as it was registered
  RulePtr rule;
  std::string why;
  std::string family;  // the file with the line: "pointwise"
};

// The line for an operator, or null. It lives as long as the program.
const Entry* find_entry(const c10::FunctionSchema& schema);

// The rule for an operator, or null.
const Rule* find(const c10::FunctionSchema& schema);

// Every line, sorted by name: for listings.
std::vector<Entry> all();

// -- Rules from notation -------------------------------------------------------------------------------------------------

// Options of einsum(). Letters and operand numbers refer to its notation.
struct Options {
  std::string whole = {};            // letters that must not be sharded, e.g. the normalized dims of a layer norm
  bool multilinear = false;     // linear in each operand alone: one of them may be Partial(sum), the others replicated
  std::string no_sum = {};           // letters that only operands have, but over which outputs do not sum; these are not sharded
  std::vector<int> linear = {};      // operands in which the operator is jointly linear: all of these may be Partial(sum) together
};

// A rule from an index structure, as in einsum: "mk,kn->mn". One term per tensor argument of the schema (an absent optional
// tensor is skipped) and per output. Sharding a letter shards every dim with that letter and replicates operands without it; an
// output without it becomes Partial(sum). "..." stands for any leading dims, aligned from the right; "1" for a dim of size 1.
// Terms joined by "+" are summands. Throws when the notation is malformed.
RulePtr einsum(std::string_view notation, Options options = {});

}  // namespace dtensor::rules

#pragma GCC visibility pop
