// A decision: how one kind of operator call runs on the shards. It is made on the miss path, and replayed on the hit path.
#pragma once

#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/op_info.hpp"

#include <dtensor/base/tensors_in.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace dtensor::dispatch {

using Stack = std::vector<c10::IValue>;

// The arguments of the call that a stack ends with.
inline c10::ArrayRef<c10::IValue> arguments(const Stack& stack, size_t begin) { return c10::ArrayRef<c10::IValue>(stack).slice(begin); }

// Operand `operand` (in the order of rules::Call::operands) is moved before the local call.
struct Move {
  int argument = 0;
  int element = -1;
  LayoutPtr from, to;
  bool communicates = false;
  bool keeps = false;      // the operand keeps the moved value where it can: the move does a pending reduction
  bool row_major = false;  // the whole operand is row-major
  bool for_view = false;   // the result is a view of the operand, and outlives the call
};

// An operand that the operator writes in another layout (`written`); the result is then moved back to its own layout (`home`).
struct WriteBack {
  int argument = 0;
  int element = -1;
  LayoutPtr written, home;
  bool communicates = false;
};

// The operator runs whole on every rank although operands are sharded.
struct RanWhole {
  std::string operands;  // "f32[64, 256] (S(0)), f32[64, 256] (R)"
  int64_t bytes = 0;     // of the gathered operands
  mutable bool told = false;
};

// Whether this rank has no element, or one, along a dim that is cut.
bool is_thin(const Layout& layout);

struct Decision {
  const OpInfo* info = nullptr;
  DeviceMesh mesh;
  std::vector<Move> moves = {};
  std::vector<WriteBack> write_backs = {};
  std::optional<Move> cut_first = {};    // what the operator writes is whole: where it can be cut instead, it is, and decided on anew
  std::shared_ptr<const RanWhole> ran_whole = {};  // null for nearly all
  rules::Lowering lowering = {};         // empty: call the operator on the locals
  std::vector<c10::intrusive_ptr<DTensorImpl>> outputs = {};  // what each is like; flattened; null for no defined tensor
  std::vector<size_t> open = {};    // outputs of which the local call tells the sizes of dims that are not cut
  std::vector<int64_t> offsets = {}; // of views, see DTensorImpl; empty when all are 0
  bool from_memory = false;         // offsets count from where the memory begins, not from the base (as_strided)
  bool outputs_known = false;       // false: replicated outputs whose sizes only the local call tells
  bool simple = false;              // tensors in, tensors out, no lists: the short ways apply
  bool casts = false;
  bool gives_pending = false;       // some result is a pending sum: of the module of the operands
  bool gives_thin = false;          // this rank's shard of some result is thin: see order_if_thin()
  bool compares = false;            // some operands are plain: now and then their values are compared between ranks
  bool once = false;                // holds where it was made only: in a backward, where plain tensors count as replicated
  bool reads_numbers = false;       // no decision: it differs with the call's floating-point arguments, see Key::add_numbers
  std::vector<LayoutPtr> pinned = {};    // layouts that the key names by address

  // Whether results may lie in another order than their layouts report: a lowered call is no call of libtorch's.
  bool reorders() const { return lowering && !info->is_view; }
};

}  // namespace dtensor::dispatch
