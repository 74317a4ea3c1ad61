#include "src/dispatch/gradient_buckets.hpp"

#include "src/core/alias.hpp"
#include "src/core/world_state.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/guard.hpp"

#include <dtensor/comm/record.hpp>
#include <dtensor/error.hpp>
#include <dtensor/world.hpp>

#include <ATen/ops/empty.h>

#include <tuple>

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
    reducing_ = std::exchange(group_, nullptr)->all_reduce(buffer_.narrow(0, 0, used_), op_);
  }

  // What nobody has waited for when its world ends never will be there.
  void abandon() {
    if (std::exchange(group_, nullptr)) abandoned_ = true;
  }

  void wait() override {
    require(!abandoned_, "gradient", "its reduction was not begun when its World ended; hint: read gradients before");
    if (!buffer_.defined()) return;
    close();
    dispatch::LocalMode local;
    const auto sums = std::exchange(reducing_, {}).get();
    const auto buffer = std::exchange(buffer_, {});
    buffer.narrow(0, 0, used_).copy_(sums);
  }

  bool done() override {
    if (!buffer_.defined()) return true;
    if (group_ || abandoned_ || (reducing_.work && !reducing_.work->done())) return false;
    wait();
    return true;
  }

  void release_resources() override {
    buffer_.reset();
    reducing_ = {};
  }

 private:
  at::Tensor buffer_;  // undefined once the sums are in it
  comm::Communicator* group_;  // null once it is closed
  const ReduceOp op_;
  int64_t used_ = 0;
  bool abandoned_ = false;
  comm::Async reducing_;
};

}  // namespace

// A rank's buckets that are filled at present.
class GradientBuckets {
 public:
  ~GradientBuckets() {
    for (auto& [key, bucket] : open_) bucket->abandon();
  }

  Bucket& with_room(const at::Tensor& part, comm::Communicator& group, ReduceOp op) {
    auto& bucket = open_[{&group, op, part.scalar_type(), part.device().type()}];
    if (bucket && !bucket->has_room(part.numel())) {
      bucket->close();
      bucket.reset();
    }
    if (!bucket) {
      const auto elements = kBucketBytes / static_cast<int64_t>(part.element_size());
      bucket = c10::make_intrusive<Bucket>(at::empty({elements}, part.options()), group, op);
    }
    return *bucket;
  }

 private:
  std::map<std::tuple<comm::Communicator*, ReduceOp, c10::ScalarType, c10::DeviceType>, c10::intrusive_ptr<Bucket>> open_;
};

bool fits_bucket(const at::Tensor& part) {
  const auto bytes = part.numel() * static_cast<int64_t>(part.element_size());
  return bytes > 0 && bytes <= kSmallBytes && detail::in_row_major_order(part);
}

at::Tensor reduce_in_bucket(const at::Tensor& part, const LayoutPtr& target, comm::Communicator& group, ReduceOp op) {
  auto& buckets = target->mesh().world().state().gradient_buckets;
  if (!buckets) buckets = std::make_shared<GradientBuckets>();
  dispatch::LocalMode local;
  auto& bucket = buckets->with_room(part, group, op);
  return make_part(bucket.add(part), target, c10::intrusive_ptr<Bucket>::reclaim_copy(&bucket));
}

}  // namespace dtensor
