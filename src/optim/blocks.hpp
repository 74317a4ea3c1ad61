// Codes of 8 bits in blocks of consecutive elements of a whole tensor, for a rank that holds a shard of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dtensor::optim {

class Blocks {
 public:
  // Blocks of `size` elements each; the last may be shorter. `tensor` gives the layout.
  Blocks(const at::Tensor& tensor, int64_t size);

  // Whether some block lies on several ranks. If so, largest() holds all blocks, and has to be reduced over the ranks by max before it is
  // used. If not, it holds the blocks of this rank.
  bool are_shared() const { return shared_; }

  // The largest |x| of each block, from this rank's elements as a list [n]: float [blocks].
  at::Tensor largest(const at::Tensor& part) const;

  // Codes x / largest as uint8 [n], and decodes it to float.
  at::Tensor encode(const at::Tensor& part, const at::Tensor& largest, const at::Tensor& map) const;
  at::Tensor decode(const at::Tensor& codes, const at::Tensor& largest, const at::Tensor& map) const;

  int64_t count() const { return shared_ ? total_ : static_cast<int64_t>(own_.size()); }

  // The number of blocks of the tensor, and the indices of those that this rank has elements of.
  int64_t total() const { return total_; }
  at::Tensor own() const;

 private:
  at::Tensor per_element(const at::Tensor& per_block, int64_t count) const;

  int64_t size_, total_;
  bool shared_ = false;
  std::vector<int64_t> own_, lengths_;  // the blocks of this rank's elements, and how many it has of each
};

}  // namespace dtensor::optim
