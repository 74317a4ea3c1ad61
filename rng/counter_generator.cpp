#include "rng/counter_generator.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>
#include <dtensor/rng/random.hpp>

#include "rng/cuda/kernels.hpp"
#include "rng/rank_generator.hpp"
#include "src/dispatch/dtensor_impl.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/lt.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <limits>
#include <random>
#include <string_view>

namespace dtensor {

namespace rng {

// -- The generator -----------------------------------------------------------------------------------------------------------

CounterGenerator::CounterGenerator(uint64_t seed)
    : c10::GeneratorImpl(c10::Device(c10::DeviceType::Meta), c10::DispatchKeySet()), seed_(seed) {}

uint64_t CounterGenerator::seed() {
  std::random_device device;
  set_current_seed(static_cast<uint64_t>(device()) << 32 | device());
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> CounterGenerator::get_state() const {
  c10::impl::ExcludeDispatchKeyGuard past{c10::DispatchKeySet(kDTensorKey)};
  auto state = at::empty({16}, at::TensorOptions(at::kByte).device(at::kCPU));
  std::memcpy(state.data_ptr(), &seed_, 8);
  std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &drawn_, 8);
  return state.getIntrusivePtr();
}

void CounterGenerator::set_state(const c10::TensorImpl& state) {
  const auto given = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(const_cast<c10::TensorImpl*>(&state)));
  require(given.scalar_type() == at::kByte && given.numel() == 16 && given.is_cpu() && !as_dtensor(given), "Generator",
          "a state of a dt::Generator is a plain tensor of 16 bytes on the CPU; got {} elements of {} on {}{}; hint: take get_state()",
          given.numel(), c10::toString(given.scalar_type()), given.device().str(), as_dtensor(given) ? " in a distributed tensor" : "");
  c10::impl::ExcludeDispatchKeyGuard past{c10::DispatchKeySet(kDTensorKey)};
  const auto bytes = given.contiguous();
  std::memcpy(&seed_, bytes.data_ptr(), 8);
  std::memcpy(&drawn_, static_cast<const char*>(bytes.data_ptr()) + 8, 8);
}

void CounterGenerator::set_offset(uint64_t offset) { drawn_ = offset; }
uint64_t CounterGenerator::get_offset() const { return drawn_; }

c10::GeneratorImpl* CounterGenerator::clone_impl() const {
  auto* copy = new CounterGenerator(seed_);
  copy->drawn_ = drawn_;
  return copy;
}

CounterGenerator* as_counter(const at::Generator& generator) {
  return generator.defined() ? dynamic_cast<CounterGenerator*>(generator.unsafeGetGeneratorImpl()) : nullptr;
}

// -- Drawing -----------------------------------------------------------------------------------------------------------------

namespace {

double number(const c10::Stack& arguments, size_t index) { return arguments[index].toScalar().toDouble(); }

// From how many whole numbers, from 0 on, random_ draws when it is given no range: those that the dtype holds exactly.
uint64_t numbers_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool: return 2;
    case at::kByte: return 256;
    case at::kChar: return 128;
    case at::kShort: return 1 << 15;
    case at::kInt: return uint64_t{1} << 31;
    case at::kHalf: return (1 << 11) + 1;
    case at::kBFloat16: return (1 << 8) + 1;
    case at::kFloat: return (1 << 24) + 1;
    case at::kDouble: return (uint64_t{1} << 53) + 1;
    default: return uint64_t{1} << 63;
  }
}

CounterNumbers whole_numbers(const c10::Stack& arguments, at::ScalarType dtype) {
  int64_t from = 0;
  uint64_t range = numbers_of(dtype);
  if (arguments.size() == 3) range = static_cast<uint64_t>(arguments[1].toInt());
  if (arguments.size() == 4) {
    from = arguments[1].toInt();
    range = (arguments[2].isNone() ? numbers_of(dtype) : static_cast<uint64_t>(arguments[2].toInt())) - static_cast<uint64_t>(from);
  }
  const bool ends = arguments.size() == 3 || (arguments.size() == 4 && !arguments[2].isNone());
  const int64_t to = ends ? arguments[arguments.size() - 2].toInt() : std::numeric_limits<int64_t>::max();
  require(from < to || (from == to && !ends), "aten::random_", "expects 'from' to be less than 'to'; got from {} to {}", from, to);
  if (at::isIntegralType(dtype, true)) {
    const auto most = static_cast<int64_t>(numbers_of(dtype) - 1), least = dtype == at::kByte || dtype == at::kBool ? 0 : -most - 1;
    require(from >= least && (!ends || to - 1 <= most), "aten::random_", "from {} to {} is out of bounds for {}", from, to,
            c10::toString(dtype));
  }
  return {"random_", 0, 0, from, range};
}

void check_numbers(const std::string& name, double a, double b, at::ScalarType dtype) {
  const auto expect = [&](bool valid, const char* what) { require(valid, "aten::" + name, "expects {}; got {} and {}", what, a, b); };
  const double widest = dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (name == "uniform_") expect(a <= b && b - a <= widest, "from <= to, and a range that the dtype holds");
  if (name == "normal_" || name == "log_normal_") expect(b >= 0, "std >= 0");
  if (name == "exponential_") expect(a > 0, "lambda > 0");
  if (name == "cauchy_") expect(b > 0, "sigma > 0");
  if (name == "bernoulli_") expect(a >= 0 && a <= 1, "0 <= p <= 1");
  if (name == "geometric_") expect(a > 0 && a < 1, "0 < p < 1");
}

// The numbers that an operator draws, from its name and arguments. Throws for arguments that libtorch refuses.
CounterNumbers numbers_of(const std::string& name, const c10::Stack& arguments, at::ScalarType dtype) {
  if (name == "random_") return whole_numbers(arguments, dtype);
  const double a = number(arguments, 1), b = arguments.size() > 3 ? number(arguments, 2) : 0;
  check_numbers(name, a, b, dtype);
  return {name, a, b};
}

// Draws to a contiguous tensor. On a device without a kernel the numbers are drawn on the CPU, with the same bits.
void write(const at::Tensor& to, const LocalShard& part, const CounterDraw& draw, const CounterNumbers& numbers) {
  bool drawn = false;
  if (to.is_cpu()) {
    drawn = fill(to, part.runs, draw, numbers);
  } else {
    const c10::DeviceGuard on(to.device());
    require(
        !to.is_cuda() || !cuda::is_capturing(), "aten::" + numbers.name,
        "dt::Generator cannot draw while a CUDA graph is captured, since each replay would give the same numbers; hint: draw before the "
        "capture, or give it a generator of libtorch");
    const auto index = to.is_cuda() && cuda::have_kernels() ? part.index() : std::nullopt;
    if (index) {
      const cuda::Elements elements{to.data_ptr(), to.scalar_type(), to.numel(), *index, cuda::current_stream()};
      drawn = to.numel() == 0 || cuda::draw_by_counter(elements, draw, numbers);
    } else {
      const auto on_cpu = at::empty_like(to, to.options().device(at::kCPU));
      drawn = fill(on_cpu, part.runs, draw, numbers);
      to.copy_(on_cpu);
    }
  }
  require(drawn, "aten::" + numbers.name, "dt::Generator does not draw {}; hint: {}", c10::toString(to.scalar_type()),
          at::isComplexType(to.scalar_type())
              ? "draw real numbers and make them complex (torch::view_as_complex), or give it a generator of libtorch"
              : "draw floating-point numbers");
}

// The elements of a whole contiguous tensor.
void write(const at::Tensor& to, const CounterDraw& draw, const CounterNumbers& numbers) {
  const int64_t numel = to.numel();
  write(to,
        {[=](const std::function<void(const Interval&)>& visit) {
           visit({0, numel});
         },
         [=] { return cuda::all_of(numel); }},
        draw, numbers);
}

std::string name_of(const c10::OperatorHandle& op) { return op.schema().name().substr(6); }  // without "aten::"

}  // namespace

bool draws_by_counter(const c10::OperatorHandle& op) {
  for (const char* name : {"aten::uniform_", "aten::normal_", "aten::log_normal_", "aten::exponential_", "aten::geometric_",
                           "aten::cauchy_", "aten::bernoulli_", "aten::random_"}) {
    if (op.schema().name() == name) return true;
  }
  return false;
}

void draw_by_counter(const c10::OperatorHandle& op, CounterGenerator& generator, c10::Stack& stack) {
  const auto count = op.schema().arguments().size();
  const c10::Stack arguments(stack.end() - static_cast<int64_t>(count), stack.end());
  stack.resize(stack.size() - count);
  const auto self = arguments[0].toTensor();
  stack.push_back(self);
  if (self.is_meta()) return;  // asked for its sizes only
  const bool by_tensor = arguments[1].isTensor();  // bernoulli_ of probabilities
  const auto p = by_tensor ? arguments[1].toTensor() : at::Tensor();
  require(!by_tensor || p.ge(0).logical_and_(p.le(1)).all().item<bool>(), op.schema().name(), "Expected p_in >= 0 && p_in <= 1 to be true");
  const auto dtype = !by_tensor ? self.scalar_type() : p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto numbers = by_tensor ? CounterNumbers{"uniform_", 0, 1} : numbers_of(name_of(op), arguments, dtype);
  if (self.numel() == 0) return;
  const auto draw = generator.draw();
  if (!by_tensor && self.is_contiguous() && !(c10::GradMode::is_enabled() && self.requires_grad())) {
    write(self, draw, numbers);
    if (!self.is_inference()) self.unsafeGetTensorImpl()->bump_version();
  } else {
    const auto drawn = at::empty_like(self, self.options().dtype(dtype).requires_grad(false), at::MemoryFormat::Contiguous);
    write(drawn, draw, numbers);
    self.copy_(by_tensor ? drawn.lt(p) : drawn);
  }
}

void draw_by_counter(const Draw& draw, CounterGenerator& generator, const at::Tensor& to, const LocalShard& part) {
  write(to, part, generator.draw(), numbers_of(name_of(draw.op), draw.arguments, to.scalar_type()));
}

bool is_normal_of_tensors(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::normal" && op.schema().overload_name().find("Tensor") != std::string::npos;
}

void normal_by_counter(const c10::OperatorHandle& op, const at::Generator& generator, c10::Stack& stack) {
  const auto count = op.schema().arguments().size();
  const c10::Stack arguments(stack.end() - static_cast<int64_t>(count), stack.end());
  stack.resize(stack.size() - count);
  const auto &mean = arguments[0], &std = arguments[1];
  const auto like = (mean.isTensor() ? mean : std).toTensor(), out = count > 3 ? arguments[3].toTensor() : at::Tensor();
  const bool both = mean.isTensor() && std.isTensor();
  const auto sizes = both ? at::infer_size(like.sizes(), std.toTensor().sizes()) : like.sizes().vec();
  const auto drawn = [&] {
    const c10::NoGradGuard no_grad;
    const bool valid = !std.isTensor() || like.is_meta() || std.toTensor().ge(0).all().item<bool>();
    require(valid, op.schema().name(), "normal expects all elements of std >= 0.0");
    const auto to = like.new_empty(sizes, at::TensorOptions((out.defined() ? out : like).scalar_type()));
    to.normal_(0, std.isTensor() ? 1 : std.toDouble(), generator);
    if (std.isTensor()) to.mul_(std.toTensor());
    return mean.isTensor() ? to.add_(mean.toTensor()) : to.add_(mean.toDouble());
  }();
  if (out.defined()) {
    if (out.sizes() != sizes) out.resize_(sizes);
    return stack.push_back(out.copy_(drawn));
  }
  const bool differentiable = c10::GradMode::is_enabled() && (like.requires_grad() || (both && std.toTensor().requires_grad()));
  if (!differentiable) return stack.push_back(drawn);
  const auto through = both ? like.add(std.toTensor()) : like.clone();  // whose gradients are zeros, as ATen has it
  stack.push_back(through.to(drawn.scalar_type()).copy_(drawn));
}

}  // namespace rng

Generator::Generator(uint64_t seed) : at::Generator(c10::make_intrusive<rng::CounterGenerator>(seed)) { detail::use_given_generators(); }

}  // namespace dtensor
