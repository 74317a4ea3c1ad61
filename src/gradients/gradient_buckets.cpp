#include "src/gradients/gradient_buckets.hpp"

#include "src/comm/reduce.hpp"
#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/dispatch/end_of_backward.hpp>
#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/mesh/alias.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/mesh/world.hpp>

#include <algorithm>
#include <exception>
#include <string>
#include <tuple>
#include <vector>

namespace dtensor {

namespace {

constexpr int64_t kSmallBytes = 256 << 10;  // of a gradient
constexpr int64_t kBucketBytes = 1 << 20;   // which all transports move at nearly their full speed

// A buffer that gradients are copied to one after the other. Each is the work that brings their sums.
class Bucket final : public comm::Work {
 public:
  Bucket(at::Tensor buffer, comm::Communicator& group, ReduceOp op)
      : buffer_(std::move(buffer)), group_(&group), op_(op), module_(comm::Cause::module()) {}

  bool has_room(int64_t elements) const { return group_ && used_ + elements <= buffer_.numel(); }

  // Where the gradient's sum will be.
  at::Tensor add(const at::Tensor& part) {
    auto place = detail::shard_in_buffer(buffer_, used_, part.sizes());
    if (!part.is_meta()) comm::copy(place, in_place_order(part));
    used_ += part.numel();
    return place;
  }

  // Begins the reduction.
  void close() {
    if (!group_) return;
    LocalMode local;
    comm::Cause cause("gradient", true, module_);
    attempt([&] { reducing_ = std::exchange(group_, nullptr)->all_reduce(filled(), op_, true); });
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
    attempt([&] { std::exchange(reducing_, {}).get(); });
    buffer_.reset();
  }

  // Never begins a reduction: ranks ask at different times.
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
  // A sum with an expanded gradient lies in memory as one of the two did, whatever its layout says.
  static at::Tensor in_place_order(const at::Tensor& part) {
    if (part.is_contiguous()) [[likely]] return part;
    LocalMode local;
    return part.contiguous();
  }

  at::Tensor filled() const { return used_ == buffer_.numel() ? buffer_ : detail::narrow(buffer_, 0, 0, used_); }

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
  const std::string module_;   // of the first gradient
  int64_t used_ = 0;
  bool abandoned_ = false;
  std::exception_ptr error_;
  comm::Async reducing_;
};

}  // namespace

// A rank's buckets, one that is filled for each kind of sum. Kinds are in the order in which they first came, which all ranks agree on.
class GradientBuckets {
 public:
  ~GradientBuckets() {
    for (auto& kind : kinds_) {
      if (kind.open) kind.open->abandon();
    }
  }

  Bucket& with_room(const at::Tensor& part, comm::Communicator& group, ReduceOp op) {
    auto& kind = kind_of({&group, op, part.scalar_type(), part.device().type()});
    const auto earlier = std::exchange(kind.in_this_pass, kind.in_this_pass + part.numel());
    if (kind.open && kind.open->has_room(part.numel())) return *kind.open;
    if (const auto full = std::exchange(kind.open, {})) full->close();
    // No larger than what the pass before had left to come.
    const auto most = kBucketBytes / static_cast<int64_t>(part.element_size());
    const auto elements = kind.in_last_pass < 0 ? most : std::clamp(kind.in_last_pass - earlier, part.numel(), most);
    if (!is_free(kind.memory) || kind.memory.numel() != elements) kind.memory = comm::empty_for(part, {elements});
    kind.open = c10::make_intrusive<Bucket>(kind.memory, group, op);
    return *kind.open;
  }

  void close() {
    end_.forget();
    for (auto& kind : kinds_) {
      // Only of kinds that this pass had: a rank that had nothing but empty parts, as of another group, does not come here.
      if (kind.in_this_pass > 0) kind.in_last_pass = std::exchange(kind.in_this_pass, 0);
      if (const auto last = std::exchange(kind.open, {})) last->close();
    }
  }

  // When the backward pass ends.
  void close_at_end(const std::shared_ptr<GradientBuckets>& self) {
    end_.call([self] { self->close(); });
  }

 private:
  using Key = std::tuple<comm::Communicator*, ReduceOp, c10::ScalarType, c10::DeviceType>;
  struct Kind {
    Key key;
    c10::intrusive_ptr<Bucket> open = {};
    int64_t in_this_pass = 0, in_last_pass = -1;  // elements
    at::Tensor memory = {};                       // of the latest bucket
  };

  // Whether nobody else has it.
  static bool is_free(const at::Tensor& memory) { return memory.defined() && memory.use_count() == 1 && memory.storage().use_count() == 1; }

  Kind& kind_of(const Key& key) {
    for (auto& kind : kinds_) {
      if (kind.key == key) return kind;
    }
    return kinds_.emplace_back(Kind{key});
  }

  std::vector<Kind> kinds_;
  EndOfBackward end_;
};

namespace {

struct OpenBuckets {
  std::shared_ptr<GradientBuckets> buckets = std::make_shared<GradientBuckets>();
};

}  // namespace

bool fits_bucket(const at::Tensor& part, const Layout& target) {
  const auto bytes = part.numel() * static_cast<int64_t>(part.element_size());
  return bytes > 0 && bytes <= kSmallBytes && detail::in_row_major_order(target);
}

at::Tensor reduce_in_bucket(const at::Tensor& part, const LayoutPtr& target, comm::Communicator& group, ReduceOp op) {
  auto& buckets = target->mesh().world().local<OpenBuckets>().buckets;
  buckets->close_at_end(buckets);
  auto& bucket = buckets->with_room(part, group, op);
  return wrap_local(bucket.add(part), target, c10::intrusive_ptr<Bucket>::reclaim_copy(&bucket));
}

void close_buckets(World& world) {
  world.local<OpenBuckets>().buckets->close();
}

}  // namespace dtensor
