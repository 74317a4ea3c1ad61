// The operators of random programs: tables, one file a family. An entry says how operands and arguments are drawn, what is run
// (the same on one device and on a mesh), and when rounding noise cannot change its result by more than rounding noise.
#pragma once

#include "program.hpp"

#include <functional>

namespace dtensor::fuzz {

class Sketch;
using T = const at::Tensor&;

// What an operator makes of whole numbers: it keeps them whole (bit by bit the same in any order of summation), or rounds.
enum class Effect { keeps, rounds };
constexpr auto keeps = Effect::keeps, rounds = Effect::rounds;

// Chooses operands and arguments; false: nothing there fits.
using Draw = std::function<bool(Sketch&, Step&)>;
using Run = std::function<Tensors(const Tensors&, const Ints&)>;
// Whether the operator is continuous around these operands, of which those that are not `exact` have rounding noise.
using Tame = std::function<bool(const Tensors&, const std::vector<bool>& exact, const Ints&)>;

struct Op {
  std::string name;
  Effect effect = Effect::rounds;
  Draw draw;
  Run run;
  Tame tame = {};
  bool in_place = false;  // writes its first operand
  int weight = 10;
  bool by_index = false;  // writes where an index says
};

// All operators.
const std::vector<Op>& operators();

// The families.
void add_pointwise(std::vector<Op>& ops);
void add_views(std::vector<Op>& ops);
void add_in_place(std::vector<Op>& ops);
void add_reductions(std::vector<Op>& ops);
void add_matmul(std::vector<Op>& ops);
void add_normalization(std::vector<Op>& ops);
void add_indexing(std::vector<Op>& ops);
void add_joins(std::vector<Op>& ops);
void add_sorts(std::vector<Op>& ops);
void add_infinities(std::vector<Op>& ops);
void add_random(std::vector<Op>& ops);
// fuzz::wrong, whose sharding rule is wrong: what the fuzzer must find.
Op wrong_operator();

// -- Parts of entries: operands ----------------------------------------------------------------------------------------------

using Accepts = std::function<bool(T)>;
bool any_tensor(T x);
bool floating(T x);  // and not empty
bool number(T x);    // not bool
bool integral(T x);  // not bool
bool boolean(T x);
Accepts with_dims(int64_t least, int64_t most = 9, Accepts also = any_tensor);

using DrawArgs = std::function<bool(Sketch&, T, Ints&)>;
Draw one(Accepts accepts, DrawArgs args = {});
// A second operand that broadcasts with the first; with `within`, to it.
Draw two(Accepts accepts, bool within = false);
Draw three(Accepts accepts);

// -- Parts of entries: when noise does no harm -------------------------------------------------------------------------------

inline constexpr double kMargin = 1e-3;
bool away_from(T x, double point);
Tame apart_from(std::vector<double> points);  // no element of the first operand is close to one of the points
bool operands_apart(const Tensors& in, const std::vector<bool>& exact, const Ints&);
// No two entries along dim args[0] are close, whole numbers included: which of equals comes first is nobody's promise.
bool distinct_along(const Tensors& in, const std::vector<bool>& exact, const Ints& args);
bool all_exact(const Tensors& in, const std::vector<bool>& exact, const Ints&);

// -- Whole entries -----------------------------------------------------------------------------------------------------------

Op unary(std::string name, Effect effect, std::function<at::Tensor(T)> run, Tame tame = {}, Accepts accepts = floating);
Op binary(std::string name, Effect effect, std::function<at::Tensor(T, T)> run, Tame tame = {}, Accepts accepts = number);
Op with_args(std::string name, Effect effect, Accepts accepts, DrawArgs args, std::function<at::Tensor(T, const Ints&)> run,
             Tame tame = {});

}  // namespace dtensor::fuzz
