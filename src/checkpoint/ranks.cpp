#include "src/checkpoint/ranks.hpp"

#include <dtensor/tensor/spread.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/base/error_text.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cstring>

namespace dtensor::files {

Ranks::Ranks(std::string_view tag, c10::ArrayRef<at::Tensor> tensors) : tag_(tag) {
  if (std::ranges::none_of(tensors, is_dtensor)) {
    auto& world = World::current();
    if (world.size() == 1) return;
    line_.emplace(init_device_mesh(c10::kCPU, {world.size()}, {"world"}));
    group_ = &line_->communicator(0);
    return;
  }
  const auto all = detail::spread_of(tensors, detail::Among::all_ranks);
  const auto meshes = std::ranges::count_if(all, [&](const auto& spread) { return is_dtensor(tensors[spread.members[0]]); });
  require(meshes == 1, tag, "the tensors lie on {} meshes of which none holds the others; hint: use a file for each of them", meshes);
  group_ = all[0].group;
}

void Ranks::first_does(const std::function<void()>& work) const {
  std::string problem;
  if (is_first()) {
    try {
      work();
    } catch (...) {
      problem = detail::text_of(std::current_exception());
    }
  }
  problem = from_first(problem);
  if (!problem.empty()) throw_error(tag_, problem);
}

std::string Ranks::from_first(const std::string& text) const {
  if (!group_) return text;
  const auto size = from_first(at::scalar_tensor(static_cast<int64_t>(text.size()), at::kLong)).item<int64_t>();
  auto bytes = at::empty({size}, at::kByte);
  if (size == 0) return {};
  if (is_first()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  bytes = from_first(bytes);
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(size)};
}

at::Tensor Ranks::from_first(const at::Tensor& tensor) const {
  comm::Subject subject(tag_);
  return group_ && tensor.numel() > 0 ? group_->broadcast(tensor, 0).get() : tensor;
}

}  // namespace dtensor::files
