#include "src/checkpoint/everyone.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/pipeline/under_way.hpp>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

namespace dtensor::checkpoints {

namespace {

at::Tensor bytes_of(const void* data, size_t size) {
  auto bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
  if (size > 0) std::memcpy(bytes.data_ptr(), data, size);
  return bytes;
}

}  // namespace

std::string without_place(std::string_view text) {
  if (const auto own = fmt::format(" (rank {})", World::current().rank()); text.ends_with(own)) text.remove_suffix(own.size());
  for (const std::string_view tag : {"[CheckpointManager] ", "[save] ", "[load] ", "[checkpoint] "}) {
    if (text.starts_with(tag)) text.remove_prefix(tag.size());
  }
  return std::string(text);
}

// Other ranks of a pipeline are at other actions, and would not come: the pipeline's step tells them of this error.
Everyone::Everyone(std::string_view tag) : tag_(tag) {
  require(!pipelining::StepUnderWay::any(), tag,
          "it was called inside a step of a pipeline; expected every rank, between two steps; hint: a loss, a hook or a module must not "
          "save or load");
  auto& world = World::current();
  if (world.size() == 1) return;
  line_.emplace(init_device_mesh(c10::kCPU, {world.size()}, {"checkpoint"}));
  group_ = &line_->communicator(0);
}

std::vector<Everyone::Numbers> Everyone::gather_numbers(const Numbers& numbers) const {
  if (!group_) return {numbers};
  const comm::Subject subject(tag_);
  const std::vector<int64_t> counts(static_cast<size_t>(size()), sizeof numbers);
  const auto all = group_->all_gather(bytes_of(numbers.data(), sizeof numbers), counts).get();
  std::vector<Numbers> result(static_cast<size_t>(size()));
  std::memcpy(result.data(), all.data_ptr(), static_cast<size_t>(all.numel()));
  return result;
}

std::vector<std::string> Everyone::gather(const std::string& text) const {
  if (!group_) return {text};
  std::vector<int64_t> counts;
  for (const auto& numbers : gather_numbers({static_cast<int64_t>(text.size())})) counts.push_back(numbers[0]);
  const comm::Subject subject(tag_);
  const auto all = group_->all_gather(bytes_of(text.data(), text.size()), counts).get();
  const auto* next = static_cast<const char*>(all.data_ptr());
  std::vector<std::string> texts;
  for (const auto count : counts) {
    texts.emplace_back(next, static_cast<size_t>(count));
    next += count;
  }
  return texts;
}

std::string Everyone::from(int source, const std::string& text) const {
  if (!group_) return text;
  const bool is_source = rank() == source;
  const auto size = gather_numbers({is_source ? static_cast<int64_t>(text.size()) : 0})[static_cast<size_t>(source)][0];
  const comm::Subject subject(tag_);
  if (size == 0) return "";
  const auto bytes = group_->broadcast(is_source ? bytes_of(text.data(), text.size()) : at::empty({size}, at::kByte), source).get();
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(size)};
}

at::Tensor Everyone::exchange(const at::Tensor& bytes, const std::vector<int64_t>& send, const std::vector<int64_t>& receive) const {
  if (!group_) return bytes;
  const comm::Subject subject(tag_);
  return group_->all_to_all(bytes, send, receive).get();
}

void Everyone::agree(const std::string& problem) const {
  const auto sizes = gather_numbers({static_cast<int64_t>(problem.size())});
  bool any = false;
  for (const auto& numbers : sizes) any |= numbers[0] > 0;
  if (!any) return;
  const auto texts = gather(without_place(problem));
  std::string all;
  for (size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty() || all.find(texts[r]) != std::string::npos) continue;
    const bool everywhere = std::ranges::count(texts, texts[r]) == size();
    all += (all.empty() ? "" : "; ") + (everywhere ? "" : fmt::format("on rank {}: ", r)) + texts[r];
  }
  throw_error(tag_, all);
}

}  // namespace dtensor::checkpoints
