// Puts off local work after a collective until somebody waits for the result, so that communication and computation overlap.
#include "src/redistribute/transition.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/square.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

namespace dtensor::redistribute {

namespace {

class WorkThen final : public comm::Work {
 public:
  WorkThen(comm::WorkPtr first, std::function<void()> finish) : first_(std::move(first)), finish_(std::move(finish)) {}

  void wait() override {
    first_->wait();
    std::call_once(once_, [this] {
      // The waiting thread may intercept operators (Spmd does); these are as plain as the move that they end.
      c10::impl::ForceDispatchKeyGuard guard(keys_);
      finish_();
      finish_ = nullptr;  // lets go of the list
    });
  }

  // What is done holds no memory any more: ranks ask who else has a tensor's, and all must find the same.
  bool done() override {
    if (!first_->done()) return false;
    try {
      wait();
    } catch (const std::exception&) {  // wait() will say it
    }
    return true;
  }

 private:
  comm::WorkPtr first_;
  std::function<void()> finish_;
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
  std::once_flag once_;
};

}  // namespace

comm::Async then(const comm::Async& pending, at::Tensor result, std::function<void()> finish) {
  if (pending.work) return {std::move(result), c10::make_intrusive<WorkThen>(pending.work, std::move(finish))};
  finish();
  return {std::move(result), {}};
}

ReduceOp wire_op(ReduceOp op) { return op == ReduceOp::norm2 ? ReduceOp::sum : op; }

at::Tensor before_reduction(const at::Tensor& local, ReduceOp op) {
  if (op != ReduceOp::norm2) return local;
  require(local.is_floating_point(), "redistribute", "P(norm2) needs floating point values; got {}",
          c10::toString(local.scalar_type()));
  return at::square(local.to(at::toOpMathType(local.scalar_type())));
}

comm::Async after_reduction(comm::Async reduced, ReduceOp op, at::ScalarType dtype) {
  if (op != ReduceOp::norm2) return reduced;
  const auto sum = reduced.tensor;
  if (sum.scalar_type() == dtype) return then(reduced, sum, [sum] { sum.sqrt_(); });
  const auto norm = at::empty(sum.sizes(), sum.options().dtype(dtype));
  return then(reduced, norm, [sum, norm] { norm.copy_(sum.sqrt_()); });
}

}  // namespace dtensor::redistribute
