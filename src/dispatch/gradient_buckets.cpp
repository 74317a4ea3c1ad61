#include "src/dispatch/gradient_buckets.hpp"

#include "src/core/alias.hpp"
#include "src/core/world_state.hpp"
#include "src/dispatch/backward.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/guard.hpp"

#include <dtensor/comm/record.hpp>
#include <dtensor/error.hpp>
#include <dtensor/world.hpp>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <vector>

namespace dtensor {

namespace {

constexpr int64_t kSmallBytes = 256 << 10;  // of a gradient
constexpr int64_t kBucketBytes = 1 << 20;   // which all transports move at nearly their full speed

// A buffer that gradients are copied to one after the other. Each is the work that brings their sums.
class Bucket final : public comm::Work {
 public:
  Bucket(at::Tensor buffer, comm::Communicator& group, ReduceOp op) : buffer_(std::move(buffer)), group_(&group), op_(op) {}

  bool has_room(int64_t elements) const { return group_ && used_ + elements <= buffer_.numel(); }

  // Where the gradient's sum will be.
  at::Tensor add(const at::Tensor& part) {
    auto place = detail::part_of_buffer(buffer_, used_, part.sizes());
    place.copy_(part);
    used_ += part.numel();
    return place;
  }

  // Begins the reduction.
  void close() {
    if (!group_) return;
    dispatch::LocalMode local;
    comm::Cause cause("gradient", true);
    attempt([&] { reducing_ = std::exchange(group_, nullptr)->all_reduce(buffer_.narrow(0, 0, used_), op_); });
  }

  // What was not begun when its world ended never will be there.
  void abandon() {
    if (std::exchange(group_, nullptr)) abandoned_ = true;
  }

  void wait() override {
    if (!buffer_.defined()) return;
    require(!abandoned_, "gradient", "its reduction was not begun when its World ended: the backward pass that it came from failed");
    if (error_) std::rethrow_exception(error_);
    close();
    dispatch::LocalMode local;
    attempt([&] { buffer_.narrow(0, 0, used_).copy_(std::exchange(reducing_, {}).get()); });
    buffer_.reset();
  }

  // Never begins a reduction: when somebody asks is no point of the program.
  bool done() override {
    if (!buffer_.defined()) return true;
    if (group_ || abandoned_ || error_ || (reducing_.work && !reducing_.work->done())) return false;
    try {
      wait();
    } catch (const std::exception&) {  // the next wait() says it again
    }
    return true;
  }

  void release_resources() override {
    buffer_.reset();
    reducing_ = {};
  }

 private:
  template <class Step>
  void attempt(Step step) {
    try {
      step();
    } catch (...) {
      error_ = std::current_exception();
      throw;
    }
  }

  at::Tensor buffer_;  // undefined once the sums are in it
  comm::Communicator* group_;  // null once it is closed
  const ReduceOp op_;
  int64_t used_ = 0;
  bool abandoned_ = false;
  std::exception_ptr error_;
  comm::Async reducing_;
};

}  // namespace

// A rank's buckets that are filled at present, in the order in which they were begun: that of the program, so all ranks agree on it.
class GradientBuckets {
 public:
  ~GradientBuckets() {
    for (auto& [key, bucket] : open_) bucket->abandon();
  }

  Bucket& with_room(const at::Tensor& part, comm::Communicator& group, ReduceOp op) {
    const Key key{&group, op, part.scalar_type(), part.device().type()};
    const auto found = std::find_if(open_.begin(), open_.end(), [&](const auto& entry) { return entry.first == key; });
    if (found != open_.end()) {
      if (found->second->has_room(part.numel())) return *found->second;
      const auto full = found->second;
      open_.erase(found);
      full->close();
    }
    const auto elements = kBucketBytes / static_cast<int64_t>(part.element_size());
    open_.emplace_back(key, c10::make_intrusive<Bucket>(at::empty({elements}, part.options()), group, op));
    return *open_.back().second;
  }

  void close() {
    for (auto& [key, bucket] : std::exchange(open_, {})) bucket->close();
    backward_ = nullptr;
  }

  // Whether this is the first time in the backward pass.
  bool begins(const void* backward) { return backward && std::exchange(backward_, backward) != backward; }

 private:
  using Key = std::tuple<comm::Communicator*, ReduceOp, c10::ScalarType, c10::DeviceType>;
  std::vector<std::pair<Key, c10::intrusive_ptr<Bucket>>> open_;
  const void* backward_ = nullptr;
};

bool fits_bucket(const at::Tensor& part) {
  const auto bytes = part.numel() * static_cast<int64_t>(part.element_size());
  return bytes > 0 && bytes <= kSmallBytes && detail::in_row_major_order(part);
}

at::Tensor reduce_in_bucket(const at::Tensor& part, const LayoutPtr& target, comm::Communicator& group, ReduceOp op) {
  auto& buckets = target->mesh().world().state().gradient_buckets;
  if (!buckets) buckets = std::make_shared<GradientBuckets>();
  if (buckets->begins(dispatch::current_backward())) {
    torch::autograd::Engine::get_default_engine().queue_callback([weak = std::weak_ptr<GradientBuckets>(buckets)] {
      if (const auto open = weak.lock()) open->close();
    });
  }
  dispatch::LocalMode local;
  auto& bucket = buckets->with_room(part, group, op);
  return make_part(bucket.add(part), target, c10::intrusive_ptr<Bucket>::reclaim_copy(&bucket));
}

void close_buckets(World& world) {
  if (const auto buckets = world.state().gradient_buckets) buckets->close();
}

}  // namespace dtensor
