// Typed kernels for the operators that training calls most. Arguments stay on the machine's stack and the local call is direct, while the
// boxed fallback builds a list of IValues and takes it apart again. Calls that are not simple go to the fallback.
#include "src/dispatch/execute.hpp"
#include "src/dispatch/explicit.hpp"
#include "src/dispatch/failure.hpp"
#include "src/dispatch/operator_event.hpp"
#include "src/dispatch/fallback.hpp"
#include "src/dispatch/ran_whole.hpp"
#include "src/dispatch/reading.hpp"
#include "src/dispatch/write_through.hpp"
#include "src/rules/reshaped.hpp"

#include <dtensor/dispatch/backward.hpp>
#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/comm/event.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/ones_like_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/zero_ops.h>
#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

// -- One argument ------------------------------------------------------------------------------------------------------------

// The words that the argument would give as an IValue, so that boxed and typed calls share decisions.
template <class T>
void push(Key& key, const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    key.push_bool(value);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    key.push_number(value);
  } else if constexpr (std::is_same_v<T, at::OptionalIntArrayRef>) {
    value ? key.push(*value) : key.push_none();
  } else if constexpr (std::is_same_v<T, c10::optional<at::ScalarType>>) {
    value ? key.push_number(static_cast<int64_t>(*value)) : key.push_none();
  } else if constexpr (std::is_same_v<T, c10::SymIntArrayRef>) {
    const auto numbers = c10::asIntArrayRefSlowOpt(value);
    numbers ? key.push(*numbers) : key.push(c10::IValue(value));
  } else if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, c10::IntArrayRef>) {
    key.push(value);
  } else {
    key.push(c10::IValue(value));
  }
}

// The argument of the local call: tensors by their part, others as they are.
template <class T>
T&& local(T&& value) {
  return std::forward<T>(value);
}
const at::Tensor& local(const at::Tensor& tensor) {
  auto* impl = as_dtensor(tensor);
  return impl ? impl->local() : tensor;
}
at::Tensor& local(at::Tensor& tensor) { return const_cast<at::Tensor&>(local(std::as_const(tensor))); }

// The same, where a decision may move it. A tensor that is written stays.
template <class T>
T& moved_argument(const Decision&, int, T& value, bool) {
  return local(value);
}
at::Tensor moved_argument(const Decision& decision, int argument, const at::Tensor& tensor, bool may_keep) {
  for (const auto& move : decision.moves) {
    if (move.argument == argument) return moved(*decision.info, tensor, move, may_keep);
  }
  return local(tensor);
}

template <class T>
void add_operand(Operands& operands, const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (auto* impl = as_dtensor(value)) operands.push_back(impl);
  }
}

// Whether an argument lies over what is written, but otherwise.
template <class T>
bool overlaps(DTensorImpl* written, const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    auto* impl = as_dtensor(value);
    return impl && impl != written && overlap(written->local(), impl->local());
  }
  return false;
}

template <class First, class... Rest>
First& first(First& value, Rest&...) {
  return value;
}

// -- One operator ------------------------------------------------------------------------------------------------------------

template <class Op, class Schema = typename Op::schema>
struct Typed;

template <class Op, class Result, class... Args>
struct Typed<Op, Result(Args...)> {
  static constexpr bool in_place = std::is_same_v<Result, at::Tensor&>;

  static const c10::OperatorHandle& op() {
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    return handle;
  }

  // The decision on such a call that is remembered, if it is a simple one.
  static const Decision* find(Args... args) {
    Key key;
    begin_key(key, op());
    (push(key, args), ...);
    const auto* found = find_decision(key);
    return found && (*found)->simple ? found->get() : nullptr;
  }

  static Result run(Args... args) {
    const auto* found = find(args...);
    if (!found || found->lowering) [[unlikely]] return boxed(args...);
    const auto& decision = *found;
    auto& self = first(args...);
    auto* impl = as_dtensor(self);
    if (!impl || impl->is_meta() || (in_place && has_copied_views(impl->local())) || (decision.info->is_view && !decision.moves.empty()))
        [[unlikely]] {
      return boxed(args...);
    }
    if (in_place && (overlaps(impl, args) || ...)) [[unlikely]] return boxed(args...);
    OperatorSpan span;
    if (operators_are_observed()) [[unlikely]] span.begin(decision.mesh, decision.info->name, module_of_operands(args...));
    if constexpr (in_place) {
      begin_write(*impl);
      call_local(decision, args...);
      if (!decision.moves.empty()) [[unlikely]] impl->note_written();  // gathered before the write, with others of its group
      return self;
    } else {
      auto result = wrap(call_local(decision, args...), *decision.outputs[0]);
      finish_result(decision, 0, impl, decision.gives_pending ? module_of_operands(args...) : nullptr, result);
      return result;
    }
  }

  static Result boxed(Args... args) {
    Stack stack;
    stack.reserve(sizeof...(args));
    (stack.emplace_back(args), ...);
    fallback(op(), &stack);
    if constexpr (in_place) {
      return first(args...);
    } else {
      return std::move(stack.back()).toTensor();
    }
  }

 private:
  static Result call_local(const Decision& decision, Args... args) try {
    LocalMode local_mode;
    if (decision.moves.empty()) [[likely]] return Op::call(local(args)...);
    check_explicit(decision);
    if (decision.ran_whole) note_ran_whole(decision);
    comm::Cause cause(decision.info->name, true, text_of(module_of_typed_moves(decision, args...)));
    return call_moved(decision, std::index_sequence_for<Args...>(), args...);
  } catch (...) {
    rethrow_failure(decision);
  }

  static ModuleName module_of_typed_moves(const Decision& decision, const Args&... args) {
    const ModuleName modules[] = {module_of(args)...};
    for (const auto& move : decision.moves) {
      if (move.communicates && modules[move.argument]) return modules[move.argument];
    }
    return module_of_operands(args...);
  }

  template <size_t... I>
  static Result call_moved(const Decision& decision, std::index_sequence<I...>, Args... args) {
    Operands operands;
    (add_operand(operands, args), ...);
    const bool may_keep = all_distinct(operands);
    return InOrder{moved_argument(decision, I, args, may_keep)...}.result;
  }

  // Moves communicate, and the fallback makes them in the order of the arguments; so do braces, but not a call.
  struct InOrder {
    template <class... Locals>
    explicit InOrder(Locals&&... locals) : result(Op::call(std::forward<Locals>(locals)...)) {}
    Result result;
  };
};

template <class... Ops>
void add_kernels(torch::Library& library) {
  const auto add = [&]<class Op>(Op*) {
    const std::string name = std::string(Op::name) + (*Op::overload_name ? "." : "") + Op::overload_name;
    library.impl(name.c_str(), TORCH_FN((&Typed<Op>::run)));
  };
  (add(static_cast<Ops*>(nullptr)), ...);
}

// A view of which the part is a view as well.
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  using View = Typed<at::_ops::view>;
  auto* impl = as_dtensor(self);
  const auto* decision = impl ? View::find(self, sizes) : nullptr;
  const auto* reshaped = decision && decision->moves.empty() ? decision->lowering.target<rules::Reshaped>() : nullptr;
  if (!reshaped || impl->is_meta() || !reshaped->is_alias(impl->local())) return View::boxed(self, sizes);
  auto result = wrap(reshaped->alias(impl->local()), *decision->outputs[0]);
  finish_result(*decision, 0, impl, nullptr, result);
  return result;
}

// What is under way stays so: a gradient that nobody has read yet is accumulated without waiting for it.
at::Tensor detach(const at::Tensor& self) {
  auto* impl = as_dtensor(self);
  if (impl && impl->values() != Values::deferred) [[likely]] return impl->detached();
  return Typed<at::_ops::detach>::run(self);
}

// An addition to be done when what is added is there.
class Addition final : public comm::Work {
 public:
  Addition(at::Tensor to, at::Tensor from, comm::WorkPtr arrival, const at::Scalar& alpha)
      : to_(std::move(to)), from_(std::move(from)), arrival_(std::move(arrival)), alpha_(alpha) {}

  void wait() override {
    if (!to_.defined()) return;
    arrival_->wait();
    const auto kernels = to_.key_set() & c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA});  // whatever mode is on
    at::_ops::add__Tensor::redispatch(kernels, to_, from_, alpha_);
    release_resources();
  }
  bool done() override {
    if (to_.defined() && !arrival_->done()) return false;
    try {
      wait();
    } catch (const std::exception&) {  // the next wait() says it again
    }
    return true;
  }
  void release_resources() override {
    to_.reset();
    from_.reset();
    arrival_.reset();
  }

 private:
  at::Tensor to_, from_;
  comm::WorkPtr arrival_;
  const at::Scalar alpha_;
};

// Gradients are accumulated when they are there, while others are computed. Not where somebody else may see the memory: a storage without a
// context is of memory that is not its own.
bool adds_later(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  auto *sum = as_dtensor(self), *added = as_dtensor(other);
  if (!added || added->values() != Values::pending || !sum || sum == added || sum->layout() != added->layout() || !current_backward())
      [[likely]]
    return false;
  if (sum->layout()->is_deferred() || sum->layout()->has_partial()) return false;
  const auto& to = sum->local();
  if (sum->member() || sum->is_meta() || !sum->owns_local_alone() || has_copied_views(to) || !to.storage().data_ptr().get_context())
    return false;
  before_write(to);
  auto addition = c10::make_intrusive<Addition>(to, added->local_under_way(), added->work(), alpha);
  if (other.use_count() > 1) reading(added->local_under_way(), addition);
  sum->set_pending(std::move(addition));
  return true;
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return adds_later(self, other, alpha) ? self : Typed<at::_ops::add__Tensor>::run(self, other, alpha);
}

TORCH_LIBRARY_IMPL(aten, Fake, library) {
  namespace o = at::_ops;
  library.impl("detach", TORCH_FN(detach));
  library.impl("view", TORCH_FN(view));
  library.impl("add_.Tensor", TORCH_FN(add_));
  add_kernels<o::add_Tensor, o::sub_Tensor, o::mul_Tensor, o::mul__Tensor, o::mul_Scalar, o::mul__Scalar, o::div_Tensor,
              o::div__Tensor, o::div_Scalar, o::addcmul_, o::addcdiv_, o::sqrt, o::zero_,
              o::mm, o::bmm, o::addmm, o::t, o::transpose_int, o::expand, o::ones_like,
              o::relu, o::threshold_backward, o::gelu, o::gelu_backward, o::silu, o::_softmax,
              o::sum, o::sum_dim_IntList>(library);
}

}  // namespace
}  // namespace dtensor::dispatch
