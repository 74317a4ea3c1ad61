#include "src/optim/blocks.hpp"

#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace dtensor::optim {

namespace {

std::vector<Interval> own_runs(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  if (!is_dtensor(tensor)) return {{0, tensor.numel()}};
  const DTensor distributed(tensor);
  const auto& layout = distributed.layout();
  return layout.runs(layout.mesh().coordinate());
}

bool cuts_blocks(c10::ArrayRef<Interval> runs, int64_t size, int64_t numel) {
  return std::ranges::any_of(runs,
                     [&](const Interval& run) { return run.begin % size != 0 || (run.end % size != 0 && run.end != numel); });
}

// Asks for any rank, so that all ranks get the same answer.
bool some_rank_cuts_blocks(const at::Tensor& tensor, int64_t size) {
  if (!is_dtensor(tensor)) return false;
  const DTensor distributed(tensor);
  const auto& layout = distributed.layout();
  if (layout.is_replicated()) return false;
  for (int64_t r = 0; r < layout.mesh().size(); ++r) {
    if (cuts_blocks(layout.runs(layout.mesh().coordinate_of(r)), size, tensor.numel())) return true;
  }
  return false;
}

at::Tensor index_of(const std::vector<int64_t>& numbers, c10::Device device) {
  const auto index = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::ranges::copy(numbers, index.data_ptr<int64_t>());
  return index.to(device);
}

}  // namespace

Blocks::Blocks(const at::Tensor& tensor, int64_t size) : size_(size), total_((tensor.numel() + size - 1) / size) {
  shared_ = some_rank_cuts_blocks(tensor, size);
  const auto runs = own_runs(tensor);
  for (const auto& run : runs) {
    for (int64_t block = run.begin / size; block <= (run.end - 1) / size; ++block) {
      if (own_.empty() || own_.back() != block) {
        own_.push_back(block);
        lengths_.push_back(0);
      }
      lengths_.back() += std::min(run.end, (block + 1) * size) - std::max(run.begin, block * size);
    }
  }
}

at::Tensor Blocks::own() const { return index_of(own_, at::kCPU); }

at::Tensor Blocks::largest(const at::Tensor& part) const {
  const auto magnitude = part.abs();
  const auto lengths = index_of(lengths_, part.device());
  if (!shared_ && count() > 0) return at::constant_pad_nd(magnitude, {0, count() * size_ - part.numel()}).view({count(), size_}).amax(1);
  const auto all = at::zeros({count()}, part.options());
  if (own_.empty()) return all;
  // A shard is in the order of the whole tensor, so its elements of one block are adjacent.
  return at::index_copy(all, 0, own().to(part.device()), at::segment_reduce(magnitude, "max", lengths));
}

at::Tensor Blocks::per_element(const at::Tensor& per_block, int64_t elements) const {
  if (!shared_) return per_block.unsqueeze(1).expand({count(), size_}).reshape({-1}).narrow(0, 0, elements);
  return per_block.index_select(0, own().to(per_block.device())).repeat_interleave(index_of(lengths_, per_block.device()));
}

at::Tensor Blocks::encode(const at::Tensor& part, const at::Tensor& largest, const at::Tensor& map) const {
  const auto middles = map.narrow(0, 0, 255).add(map.narrow(0, 1, 255)).div_(2);
  const auto scale = per_element(largest, part.numel());
  return at::bucketize(part.div(scale.masked_fill(scale.eq(0), 1)), middles, /*out_int32=*/true).to(at::kByte);
}

at::Tensor Blocks::decode(const at::Tensor& codes, const at::Tensor& largest, const at::Tensor& map) const {
  return map.index_select(0, codes.to(at::kInt)).mul_(per_element(largest, codes.numel()));
}

}  // namespace dtensor::optim
