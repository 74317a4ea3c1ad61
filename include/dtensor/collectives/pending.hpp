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

// How often each tensor was written so far, which tells whether somebody wrote between two calls. A part of a larger tensor shares the
// count of the whole, whose other parts may well be written, so it is left out.
inline std::vector<int64_t> versions_of(const TensorVector& tensors) {
  std::vector<int64_t> versions;
  for (const auto& x : tensors) {
    const bool is_whole = !x.is_inference() && x.storage().nbytes() == x.nbytes();
    versions.push_back(is_whole ? static_cast<int64_t>(x._version()) : 0);
  }
  return versions;
}

// Runs `issue`, which begins a collective on plain memory; the result is what `finish` makes of the received elements, with that adjoint.
// Waiting for it throws where one of `sent` was written meanwhile: nobody knows what the other ranks got.
inline PendingTensors start(const TensorVector& inputs, const std::function<comm::Async()>& issue,
                            std::function<TensorVector(const at::Tensor& received)> finish, Adjoint adjoint, const TensorVector& sent) {
  NoSpmd plain;
  c10::NoGradGuard no_grad;
  auto async = issue();
  return {async.work, [inputs, sent, versions = versions_of(sent), received = async.tensor, finish = std::move(finish),
                       adjoint = std::move(adjoint)] {
            require(versions == versions_of(sent), "wait",
                    "an input of this collective was written while it was under way, and other ranks may have got either value; hint: "
                    "write after wait(), or give the collective a clone()");
            NoSpmd plain;
            TensorVector results;
            {
              c10::NoGradGuard no_grad;
              results = finish(received);
            }
            return linear_map(std::move(results), inputs, adjoint);
          }};
}
inline PendingTensors start(const TensorVector& inputs, const std::function<comm::Async()>& issue,
                            std::function<TensorVector(const at::Tensor& received)> finish, Adjoint adjoint) {
  return start(inputs, issue, std::move(finish), std::move(adjoint), inputs);
}

}  // namespace detail

}  // namespace dtensor

#pragma GCC visibility pop
