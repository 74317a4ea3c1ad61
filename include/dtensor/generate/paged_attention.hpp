// Keys and values in pages, and attention over them: one kernel for prompts, chunks of prompts, single tokens and trees of drafts. Plain
// tensors of one rank, on the CPU.
//
// The result of a row depends on its query and on what it may see, to the bit: not on the other rows of the call, and not on how a prompt
// is cut into calls. Keys are taken a page at a time, as in "FlashAttention" (Dao et al., 2022); pages begin at multiples of kBlockRows
// positions.
#pragma once

#include <dtensor/generate/blocks.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <numeric>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// What a rank keeps of one layer. float32, bfloat16 or float64.
struct LayerShape {
  int64_t key_heads = 0, dim = 0, value_dim = 0;
  c10::ScalarType dtype = c10::kFloat;
  bool operator==(const LayerShape&) const = default;

  // Of a block of kBlockRows positions. Values are padded to 16 elements a head.
  int64_t bytes_of_block() const;
};

// Consecutive rows of a call that belong to one sequence, at consecutive places in its pages.
struct RowSpan {
  int64_t begin = 0, end = 0;    // rows of the call
  int64_t place = 0;             // of row `begin` in the sequence
  const Block* table = nullptr;  // the sequence's blocks
  // Of a tree of drafts, at most 64 rows: row i sees the places before `place`, and of the rows of the span those of its bits. Null: a row
  // sees itself and all places before it.
  const uint64_t* sees = nullptr;
};

// The pages of one layer.
class Pages {
 public:
  Pages(const LayerShape& shape, int64_t blocks);

  const LayerShape& shape() const { return shape_; }
  const at::Tensor& keys() const { return keys_; }      // [blocks, key heads, dim, kBlockRows]
  const at::Tensor& values() const { return values_; }  // [blocks, key heads, kBlockRows, value dim, padded]

  // k [rows, key heads, dim] and v [rows, key heads, value dim], of any strides, to their places. Throws for other sizes or dtypes.
  void write(const at::Tensor& k, const at::Tensor& v, const std::vector<RowSpan>& spans) const;
  // q [rows, heads, dim] -> [rows, heads, value dim] in the dtype of q. A group of heads shares a key head. Rows in no span give 0. Sums
  // are float32, or float64 of float64.
  at::Tensor attend(const at::Tensor& q, const std::vector<RowSpan>& spans, double scale) const;
  // Of a block: all of it. Of a place: one row of a sequence, which an accepted draft is moved to.
  void copy_block(Block from, Block to) const;
  void copy_place(const Block* table, int64_t from, int64_t to) const;

 private:
  LayerShape shape_;
  at::Tensor keys_, values_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// Causal attention of whole sequences, in pages of its own: plain q [batch, heads, length, dim], k and v with key heads.
inline at::Tensor attend_by_pages(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const NoSpmd plain;
  const auto length = q.size(2), blocks = (length + kBlockRows - 1) / kBlockRows;
  if (k.size(1) == 0 || q.size(0) == 0 || length == 0) return at::empty({q.size(0), q.size(1), length, v.size(3)}, q.options());
  const Pages pages({k.size(1), k.size(3), v.size(3), k.scalar_type()}, blocks);
  std::vector<Block> table(blocks);
  std::iota(table.begin(), table.end(), 0);
  const std::vector<RowSpan> spans{{0, length, 0, table.data(), nullptr}};
  std::vector<at::Tensor> rows;
  for (int64_t b = 0; b < q.size(0); ++b) {
    pages.write(k[b].transpose(0, 1), v[b].transpose(0, 1), spans);
    rows.push_back(pages.attend(q[b].transpose(0, 1), spans, scale));
  }
  return at::stack(rows).transpose(1, 2);
}

}  // namespace detail

}  // namespace dtensor::generate

#pragma GCC visibility pop
