// What collectives on plain tensors are made of: one that is under way, and a linear function with its adjoint.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/comm/work.hpp>
#include <dtensor/tensor/spmd.hpp>

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

using TensorVector = std::vector<at::Tensor>;

// A collective that may still be under way. One that is dropped is finished all the same, by the transport.
template <class Result>
class Pending {
 public:
  Pending(comm::WorkPtr work, std::function<Result()> finish) : work_(std::move(work)), finish_(std::move(finish)) {}

  // Whether wait() returns at once.
  bool done() const { return !work_ || work_->done(); }

  // The result, once. Throws dtensor::Error when a peer failed, called something else, or the deadline passed.
  Result wait() && {
    require(finish_ != nullptr, "wait", "the result of this collective was taken already; hint: keep what the first wait() returned");
    if (work_) work_->wait();
    return std::exchange(finish_, {})();
  }

  // The same collective with `f` of its result.
  template <class F>
  auto then(F f) && {
    return Pending<std::invoke_result_t<F, Result>>(work_, [finish = std::move(finish_), f] { return f(finish()); });
  }

 private:
  comm::WorkPtr work_;
  std::function<Result()> finish_;
};
using PendingTensor = Pending<at::Tensor>;
using PendingTensors = Pending<TensorVector>;

namespace detail {

using Adjoint = std::function<TensorVector(const TensorVector&)>;

inline bool tracks(at::TensorList inputs) {
  return c10::GradMode::is_enabled() && std::ranges::any_of(inputs, [](const at::Tensor& t) { return t.requires_grad(); });
}

// Makes results a linear function of inputs, with this adjoint: from the results' gradients, all defined, to the inputs'.
struct LinearMap : torch::autograd::Function<LinearMap> {
  struct Given : torch::CustomClassHolder {
    Given(TensorVector r, Adjoint a) : results(std::move(r)), adjoint(std::move(a)) {}
    TensorVector results;
    Adjoint adjoint;
  };
  static TensorVector forward(torch::autograd::AutogradContext* context, const c10::intrusive_ptr<Given>& given, at::TensorList) {
    context->saved_data["given"] = c10::IValue::make_capsule(given);
    return std::exchange(given->results, {});
  }
  static TensorVector backward(torch::autograd::AutogradContext* context, const TensorVector& gradients) {
    const auto given = context->saved_data["given"].toCapsule();
    auto result = static_cast<Given&>(*given).adjoint(gradients);
    result.insert(result.begin(), at::Tensor());  // of `given`
    return result;
  }
};

inline TensorVector linear_map(TensorVector results, const TensorVector& inputs, Adjoint adjoint) {
  if (!tracks(inputs)) return results;
  return LinearMap::apply(c10::make_intrusive<LinearMap::Given>(std::move(results), std::move(adjoint)), at::TensorList(inputs));
}

// Runs `start`, which issues a collective on plain memory; the result is what `finish` makes of the received elements, with that adjoint.
inline PendingTensors start(const TensorVector& inputs, const std::function<comm::Async()>& issue,
                            std::function<TensorVector(const at::Tensor& received)> finish, Adjoint adjoint) {
  NoSpmd plain;
  c10::NoGradGuard no_grad;
  auto async = issue();
  return {async.work, [inputs, received = async.tensor, finish = std::move(finish), adjoint = std::move(adjoint)] {
            NoSpmd plain;
            TensorVector results;
            {
              c10::NoGradGuard no_grad;
              results = finish(received);
            }
            return linear_map(std::move(results), inputs, adjoint);
          }};
}

}  // namespace detail

}  // namespace dtensor

#pragma GCC visibility pop
