// Weights of one module to another of the same names, again and again: whole, or only the bytes that have changed since the last time.
//
//   rl::WeightSync sync(*training, *generating);      // on all ranks of both
//   optimizer.step();
//   const auto counts = sync.run();                   // counts.received: bytes that came to this rank
#pragma once

#include <dtensor/generate/weights.hpp>
#include <dtensor/redistribute/between_meshes.hpp>
#include <dtensor/redistribute/boxes_of_shard.hpp>
#include <dtensor/rl/byte_changes.hpp>

#include <ATen/ops/tensor.h>

#include <optional>
#include <set>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct WeightSyncOptions {
  // Sends the bytes that have changed, where that is less. Each rank then keeps a second copy of its part of the weights, and the other
  // module's may not be changed in between. For tensors on meshes on both sides, in one dtype; others are sent whole.
  bool changes_only = false;
  int64_t bucket_bytes = int64_t{256} << 20;  // of weights that are under way together, when changes are sent
};

// Of this rank, in bytes.
struct SyncCounts {
  int64_t lacking = 0;             // of the weights that it gets, what it does not have in the other layout
  int64_t sent = 0, received = 0;  // of weights, or of changes with what says where they are
};

// Every rank of both modules' meshes makes it alike and calls run(), which waits. A rank receives what it lacks, once (docs/moves.md). Both
// modules outlive it.
class WeightSync {
 public:
  WeightSync(const torch::nn::Module& from, torch::nn::Module& to, const WeightSyncOptions& options = {})
      : WeightSync(generate::named_weights(from), to, options) {}
  // Of several modules, such as the stages of a pipeline, which may be absent on some ranks. Throws for names that `from` lacks and for
  // other sizes.
  WeightSync(generate::NamedWeights from, torch::nn::Module& to, const WeightSyncOptions& options = {});

  // Copies. Throws on a rank whose weights are not those of the last time with the changes (somebody else has written to them).
  SyncCounts run();
  // The next run() sends everything.
  void forget() { last_.clear(); }

 private:
  struct Tensor;
  struct Mail;
  std::optional<Tensor> changing(const std::string& name) const;
  void exchange(std::vector<Tensor>& bucket, SyncCounts& counts);
  void write(const Tensor& tensor, Mail& mail) const;
  at::Tensor read(const Tensor& tensor, Mail& mail) const;
  void copy(const std::string& name) const;

  generate::NamedWeights from_, to_;
  WeightSyncOptions options_;
  std::optional<DeviceMesh> all_;           // all ranks of both
  std::map<std::string, at::Tensor> last_;  // this rank's part, as it was sent
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kSync = "rl::WeightSync";

inline LayoutPtr layout_of(const at::Tensor& x) {
  const auto& layout = *find_layout(x);
  return Layout::get(layout.mesh(), layout.placements(), layout.sizes(), layout.strides(), layout.dtype());
}

inline int64_t bytes_of_all(const std::vector<Transfer>& transfers, const Layout& layout) {
  int64_t sum = 0;
  for (const auto& transfer : transfers) sum += transfer.numel();
  return sum * static_cast<int64_t>(c10::elementSize(layout.dtype()));
}

// Of all bytes and their order.
inline uint64_t checksum(const uint8_t* bytes, size_t size, uint64_t sum) {
  uint64_t word = 0;
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    std::memcpy(&word, bytes + i, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15u;
    sum ^= sum >> 29;
  }
  for (; i < size; ++i) sum = (sum ^ bytes[i]) * 0x9E3779B97F4A7C15u;
  return sum;
}

}  // namespace detail

// A tensor that both sides have on a mesh: this rank's parts, and what moves.
struct WeightSync::Tensor {
  std::string name;
  LayoutPtr before, after;
  MeshMovePlan plan;
  at::Tensor source, target, last;  // local; undefined where this rank has none
  std::optional<BoxesOfShard> had, has;
};

inline WeightSync::WeightSync(generate::NamedWeights from, torch::nn::Module& to, const WeightSyncOptions& options)
    : from_(std::move(from)), to_(generate::named_weights(to)), options_(options) {
  generate::detail::check_weights(to_, from_, detail::kSync);
  std::set<int> ranks;
  const auto add = [&](const at::Tensor& x) {
    if (const auto* layout = find_layout(x)) ranks.insert(layout->mesh().ranks().begin(), layout->mesh().ranks().end());
  };
  for (const auto& [name, target] : to_) {
    add(target);
    add(from_.at(name));
  }
  const auto count = static_cast<int64_t>(ranks.size());
  if (count > 0)
    all_.emplace(c10::kCPU, std::vector<int>(ranks.begin(), ranks.end()), std::vector<int64_t>{count}, std::vector<std::string>{"weights"});
}

inline std::optional<WeightSync::Tensor> WeightSync::changing(const std::string& name) const {
  const auto &from = from_.at(name), &to = to_.at(name);
  if (!is_dtensor(from) || !is_dtensor(to) || from.scalar_type() != to.scalar_type() || from.is_same(to)) return {};
  Tensor tensor{name, detail::layout_of(from), detail::layout_of(to), {}, {}, {}, {}, {}, {}};
  if (tensor.before->has_partial() || tensor.before->mesh().device_type() != tensor.after->mesh().device_type()) return {};
  tensor.plan = plan_move_between(tensor.before, tensor.after);
  if (!tensor.before->is_absent()) {
    tensor.source = DTensor(from.detach()).to_local();
    tensor.had.emplace(*tensor.before, tensor.before->mesh().coordinate());
    const auto last = last_.find(name);
    if (last != last_.end()) tensor.last = last->second;
  }
  if (!tensor.after->is_absent()) {
    tensor.target = DTensor(to.detach()).to_local();
    tensor.has.emplace(*tensor.after, tensor.after->mesh().coordinate());
  }
  return tensor;
}

inline void WeightSync::copy(const std::string& name) const {
  const auto &from = from_.at(name), &to = to_.at(name);
  if (from.is_same(to)) return;
  const auto moved = generate::detail::laid_out_like(from, to);
  if (!is_dtensor(to) || !DTensor(to).is_absent()) at::Tensor(to).copy_(moved);
}

inline SyncCounts WeightSync::run() {
  const NoSpmd plain;
  const at::NoGradGuard no_grad;
  SyncCounts counts;
  std::vector<Tensor> bucket;
  int64_t bytes = 0;
  for (const auto& [name, to] : to_) {
    auto tensor = changing(name);
    if (!tensor) {
      copy(name);
      continue;
    }
    const auto lacking = detail::bytes_of_all(tensor->plan.received, *tensor->after);
    counts.lacking += lacking;
    if (!options_.changes_only) {
      copy(name);
      counts.received += lacking;
      counts.sent += detail::bytes_of_all(tensor->plan.sent, *tensor->before);
      continue;
    }
    bucket.push_back(std::move(*tensor));
    bytes += to.numel() * static_cast<int64_t>(to.element_size());
    if (bytes >= options_.bucket_bytes) exchange(bucket, counts), bytes = 0;
  }
  exchange(bucket, counts);
  return counts;
}

}  // namespace dtensor::rl

#include <dtensor/rl/weight_exchange.hpp>

#pragma GCC visibility pop
