// Draws what one device draws for a whole tensor, window by window, in bounded memory.
#pragma once

#include "rng/draw.hpp"

namespace dtensor::rng {

// The elements of a tensor in the order in which ATen draws them, which is that of memory. How many random words an element takes differs
// between dtypes and versions of libtorch. So it is not assumed, but measured on a copy of the generator.
class Stream {
 public:
  // For a tensor of `numel` elements, dense row-major if `contiguous`. Below kSmall elements, use Draw::fill. ATen's normal_ has one
  // algorithm for memory without gaps and another for memory with gaps.
  Stream(at::Generator generator, const Draw& draw, int64_t numel, bool contiguous);

  static constexpr int64_t kSmall = 1024;
  static constexpr int64_t kWindow = 65536;

  // False if a draw in pieces does not give the numbers of one draw: a vendor's library seeds a stream of its own for every call.
  bool divisible() const { return divisible_; }

  // Elements [begin, end), at most kWindow, valid until the next call. Windows come in ascending order and do not overlap; elements
  // between them are skipped without being drawn.
  at::Tensor window(int64_t begin, int64_t end);

  // Leaves the generator as a draw of the whole tensor does.
  void finish();

 private:
  at::Tensor scratch(int64_t length) const;
  void probe();
  void skip_to(int64_t position);
  void draw_to(int64_t position);
  void draw_tail();
  void skip_words(int64_t words);

  at::Generator generator_;
  const Draw& draw_;
  int64_t numel_;
  bool spread_;       // normal_ in memory with gaps: windows have gaps too, for the same algorithm
  int64_t tail_ = 0;  // elements beyond the last whole block, which are drawn anew with those before them, as ATen does
  bool divisible_ = true;
  int64_t words_ = 0;  // that kBlock elements take
  at::Tensor buffer_;
  int64_t first_ = 0, last_ = 0;  // the elements in buffer_
};

}  // namespace dtensor::rng
