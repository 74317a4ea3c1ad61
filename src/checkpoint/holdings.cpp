#include "src/checkpoint/holdings.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/redistribute/boxes_of_shard.hpp>
#include <dtensor/tensor/spread.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/MemoryOverlap.h>
#include <fmt/ranges.h>
#include <range/v3/view/zip.hpp>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

// Numbers and texts, one after the other.
class Out {
 public:
  void number(int64_t value) { text_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    text_ += value;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

class In {
 public:
  explicit In(const std::string& text) : text_(text) {}
  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string text() {
    const auto size = static_cast<size_t>(number());
    at_ += size;
    return text_.substr(at_ - size, size);
  }
  bool done() const { return at_ == text_.size(); }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

Box whole_box(c10::IntArrayRef sizes) {
  Box box;
  for (const auto size : sizes) box.push_back({0, size});
  return box;
}

// Nothing can be loaded into elements that share their memory.
void check_memory(const std::string& name, const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor.unsafeGetTensorImpl()) != at::MemOverlap::Yes) return;
  fail("checkpoint",
       "'{}' has sizes [{}] and strides [{}]: several of its elements are one number in memory, as expand() makes them; expected memory "
       "for each; hint: give it that by .contiguous() where it is made, or save the tensor before expand()",
       name, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", "));
}

void check(const std::string& name, const at::Tensor& tensor) {
  require(tensor.defined(), "checkpoint", "'{}' is undefined", name);
  require(tensor.layout() == at::kStrided && !tensor.is_quantized(), "checkpoint", "'{}' is sparse or quantized; expected a dense tensor",
          name);
  if (!is_dtensor(tensor)) return check_memory(name, tensor);
  const DTensor known(tensor);
  require(!known.layout().has_partial(), "checkpoint", "'{}' is pending: {}; expected values; hint: redistribute it first", name,
          known.layout().str());
  if (!known.is_absent()) check_memory(name, detail::plain_local(tensor));
}

}  // namespace

Holdings holdings_of(const std::map<std::string, at::Tensor>& tensors) {
  Holdings all;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined() && is_deferred(tensor)) continue;
    check(name, tensor);
    Holding holding{tensor.scalar_type(), tensor.sizes().vec(), {}};
    if (!is_dtensor(tensor)) {
      holding.boxes = {whole_box(tensor.sizes())};
    } else {
      const DTensor known(tensor);
      if (known.is_absent()) continue;
      holding.boxes = known.layout().boxes(known.mesh().coordinate());
      std::erase_if(holding.boxes, [](const Box& box) { return numel_of(box) == 0; });
    }
    all.emplace(name, std::move(holding));
  }
  return all;
}

at::Tensor view_of(const at::Tensor& tensor, const Box& box) {
  if (is_dtensor(tensor)) {
    const DTensor known(tensor);
    const BoxesOfShard shard(known.layout(), known.mesh().coordinate());
    return shard.view(detail::plain_local(tensor), shard.find(box));
  }
  auto view = tensor.detach();
  for (size_t d = 0; d < box.size(); ++d) {
    if (box[d] != Interval{0, view.size(static_cast<int64_t>(d))})
      view = view.narrow(static_cast<int64_t>(d), box[d].begin, box[d].length());
  }
  return view;
}

std::optional<Box> common(const Box& a, const Box& b) {
  Box both(a.size());
  for (size_t d = 0; d < a.size(); ++d) {
    both[d] = {std::max(a[d].begin, b[d].begin), std::min(a[d].end, b[d].end)};
    if (both[d].length() <= 0) return {};
  }
  return both;
}

std::string to_text(const Holdings& holdings) {
  Out out;
  for (const auto& [name, holding] : holdings) {
    out.text(name);
    out.number(static_cast<int64_t>(holding.dtype));
    out.number(static_cast<int64_t>(holding.sizes.size()));
    for (const auto size : holding.sizes) out.number(size);
    out.number(static_cast<int64_t>(holding.boxes.size()));
    for (const auto& box : holding.boxes) {
      for (const auto& side : box) {
        out.number(side.begin);
        out.number(side.end);
      }
    }
  }
  return out.take();
}

Holdings holdings_from(const std::string& text) {
  Holdings all;
  for (In in(text); !in.done();) {
    auto& holding = all[in.text()];
    holding.dtype = static_cast<c10::ScalarType>(in.number());
    holding.sizes.resize(static_cast<size_t>(in.number()));
    for (auto& size : holding.sizes) size = in.number();
    holding.boxes.assign(static_cast<size_t>(in.number()), Box(holding.sizes.size()));
    for (auto& box : holding.boxes) {
      for (auto& side : box) {
        side.begin = in.number();
        side.end = in.number();
      }
    }
  }
  return all;
}

AllHoldings joined(const std::vector<Holdings>& of_ranks) {
  AllHoldings all;
  std::vector<std::string> problems;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    for (const auto& [name, holding] : of_ranks[rank]) {
      const auto [entry, is_new] = all.try_emplace(name, Held{holding.dtype, holding.sizes, {}});
      auto& held = entry->second;
      if (held.dtype != holding.dtype || held.sizes != holding.sizes) {
        problems.push_back(fmt::format("'{}' is {}[{}] on rank {} and {}[{}] on rank {}", name, c10::toString(held.dtype),
                                       fmt::join(held.sizes, ", "), held.regions.front().ranks.front(), c10::toString(holding.dtype),
                                       fmt::join(holding.sizes, ", "), rank));
        continue;
      }
      const auto same = std::ranges::find(held.regions, holding.boxes, &Region::boxes);
      if (same != held.regions.end()) same->ranks.push_back(static_cast<int>(rank));
      else held.regions.push_back({holding.boxes, {static_cast<int>(rank)}});
    }
  }
  if (problems.empty()) return all;
  throw std::runtime_error(
      fmt::format("ranks disagree: {}; hint: a tensor that each rank has for itself goes by dt::of_each_rank", fmt::join(problems, "; ")));
}

std::array<int64_t, 2> fingerprint(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, of 64 bits
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
  return {static_cast<int64_t>(hash), static_cast<int64_t>(crc32c(text.data(), text.size()) | uint64_t{text.size()} << 32)};
}

}  // namespace dtensor::checkpoints
