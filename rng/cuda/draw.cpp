#include "rng/cuda/draw.hpp"

#include "rng/cuda/kernels.hpp"
#include "rng/memory_order.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/redistribute/redistribute.hpp>

#include <ATen/ops/_fused_dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

namespace dtensor::rng::cuda {

namespace {

// -- libtorch's generator: the last 16 bytes of its state are a seed and an offset -------------------------------------------

Words words_of(const at::Generator& generator, const Launch& launch) {
  const auto state = generator.get_state();
  Words words{0, 0, launch};
  const auto* end = static_cast<const char*>(state.data_ptr()) + state.numel();
  std::memcpy(&words.seed, end - 16, 8);
  std::memcpy(&words.offset, end - 8, 8);
  return words;
}

void go_on(at::Generator generator, const Words& words) {
  const auto state = generator.get_state();
  const uint64_t offset = words.offset + words.launch.advance;
  std::memcpy(static_cast<char*>(state.data_ptr()) + state.numel() - 8, &offset, 8);
  generator.set_state(state);
}

// -- What libtorch makes of an operator's arguments --------------------------------------------------------------------------

at::ScalarType dtype_of(const Draw& draw) { return c10::typeMetaToScalarType(draw.options.dtype()); }

std::optional<Numbers> whole_numbers(const Draw& draw) {
  const auto dtype = dtype_of(draw);
  const auto& arguments = draw.arguments;
  if (arguments.size() == 2) return Numbers{Kind::whole, 0, 0, dtype == at::kDouble || dtype == at::kLong};
  if (arguments[arguments.size() - 2].isNone()) return std::nullopt;
  const int64_t from = arguments.size() == 4 ? arguments[1].toInt() : 0, to = arguments[arguments.size() - 2].toInt();
  constexpr int64_t kExact = 256;  // what every floating-point dtype holds: libtorch moves ends that it does not
  if (from >= to || (at::isFloatingType(dtype) && (from < -kExact || to > kExact))) return std::nullopt;
  const auto range = static_cast<uint64_t>(to) - static_cast<uint64_t>(from);
  const bool has_wide = dtype == at::kLong || dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16;
  const bool wide = DTENSOR_TORCH_AT_LEAST(2, 7) ? range >= uint64_t{1} << 28 : has_wide && range >= uint64_t{1} << 32;
  return Numbers{Kind::whole_from, 0, 0, wide, from, range};
}

// What there are kernels for (numbers.cuh). Of others, complex ones among them, the whole is drawn.
constexpr std::array kDrawn{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kBool,
                            at::kByte,  at::kChar,   at::kShort, at::kInt,     at::kLong};

std::optional<Numbers> numbers_of(const Draw& draw) {
  if (std::ranges::find(kDrawn, dtype_of(draw)) == kDrawn.end()) return std::nullopt;
  if (draw.is("aten::random_")) return whole_numbers(draw);
  const bool wide = dtype_of(draw) == at::kDouble;
  const auto numbers = [&](Kind kind, size_t count) {
    const auto number = [&](size_t i) { return i <= count ? draw.arguments[i].toScalar().toDouble() : 0; };
    return Numbers{kind, number(1), number(2), wide};
  };
  if (draw.is("aten::uniform_")) return numbers(Kind::uniform, 2);
  if (draw.is("aten::normal_")) return numbers(Kind::normal, 2);
  if (draw.is("aten::log_normal_")) return numbers(Kind::log_normal, 2);
  if (draw.is("aten::cauchy_")) return numbers(Kind::cauchy, 2);
  if (draw.is("aten::exponential_")) return numbers(Kind::exponential, 1);
  if (draw.is("aten::geometric_")) return numbers(Kind::geometric, 1);
  if (draw.is("aten::bernoulli_") && !draw.arguments[1].isTensor()) return numbers(Kind::bernoulli, 1);
  return std::nullopt;
}

Launch launch_of(int64_t numel, const Numbers& numbers) {
  return distribution(numel, numbers.wide, current_device(), DTENSOR_TORCH_AT_LEAST(2, 3));
}

// -- Kernels -----------------------------------------------------------------------------------------------------------------

// Writes a tensor without gaps. False when there is no such kernel.
bool write(const at::Tensor& to, const ShardIndex& part, const Words& words, const Numbers& numbers) {
  return to.numel() == 0 || draw({to.data_ptr(), to.scalar_type(), to.numel(), part, current_stream()}, words, numbers);
}

// So many elements that each thread goes round more than twice, with a rest.
int64_t enough(int64_t neighbours) { return (2 * threads_for(int64_t{1} << 40, current_device()) + 5) * neighbours; }

using Key = std::tuple<Kind, at::ScalarType, bool, int>;

// What compare() finds the first time that it is asked for; a warning when that is nothing.
template <class Compare>
int64_t once(const Key& key, const char* op, const Compare& compare) {
  static std::mutex mutex;
  static std::map<Key, int64_t> found;
  std::lock_guard<std::mutex> lock(mutex);
  const auto it = found.find(key);
  if (it != found.end()) return it->second;
  const int64_t result = compare();
  if (result == 0) {
    TORCH_WARN("dtensor: ", op, " of ", c10::toString(std::get<1>(key)), " on GPUs has no kernel that draws as this libtorch does: ",
               "every rank draws the whole tensor and keeps its shard");
  }
  return found[key] = result;
}

bool draws_as_libtorch(const Draw& draw, const Numbers& numbers, at::Generator generator) {
  const Key key{numbers.kind, dtype_of(draw), numbers.wide, draw.options.device().index()};
  return once(key, draw.op.schema().name().c_str(), [&]() -> int64_t {
    const int64_t numel = enough(4);
    const auto expected = at::empty({numel}, draw.options), ours = at::empty({numel}, draw.options);
    const auto state = generator.get_state();
    const auto words = words_of(generator, launch_of(numel, numbers));
    draw.fill(expected, generator);
    const auto after = words_of(generator, {});
    generator.set_state(state);
    return write(ours, all_of(numel), words, numbers) && ours.equal(expected) && after.offset == words.offset + words.launch.advance;
  });
}

// Whether kernels of ours may draw a part of so many elements.
bool may_draw(int64_t numel, const at::TensorOptions& options) {
  return have_kernels() && numel > 0 && fits(numel, static_cast<int64_t>(options.dtype().itemsize())) && !is_capturing();
}

// What to draw by a kernel, if anything.
std::optional<Numbers> proven_numbers(int64_t numel, const Draw& draw, const at::Generator& generator) {
  if (!may_draw(numel, draw.options)) return std::nullopt;
  const auto numbers = numbers_of(draw);
  if (!numbers) return std::nullopt;
  draw.fill(at::empty({0}, draw.options), generator);  // refuses what it refuses, and draws nothing
  return draws_as_libtorch(draw, *numbers, generator) ? numbers : std::nullopt;
}

// -- Dropout -----------------------------------------------------------------------------------------------------------------

// Up to how many neighbours a thread of libtorch's kernel takes at once, found by trying; 0 when none of these.
int64_t dropout_neighbours(const at::TensorOptions& options, const Numbers& numbers, at::Generator generator) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  return once({Kind::dropout, dtype, numbers.wide, options.device().index()}, "aten::native_dropout", [&]() -> int64_t {
    const int64_t numel = enough(16);
    const auto state = generator.get_state();
    const auto expected = std::get<1>(at::_fused_dropout(at::ones({numel}, options), 0.5, generator)).to(at::kBool);
    const auto after = words_of(generator, {});
    generator.set_state(state);
    for (const int64_t most : {4, 8, 2, 16, 1}) {
      const auto words = words_of(generator, rng::cuda::dropout(numel, current_device(), most));
      const auto ours = at::empty({numel}, options.dtype(at::kBool));
      const bool same = write(ours, all_of(numel), words, {Kind::dropout, 0.5, 0, numbers.wide}) && ours.equal(expected);
      if (same && after.offset == words.offset + words.launch.advance) return most;
    }
    return 0;
  });
}

at::Tensor dropout_mask(const Layout& layout, const at::TensorOptions& options, double keep, const at::Generator& generator) {
  const int64_t numel = c10::multiply_integers(layout.sizes());
  const Numbers numbers{Kind::dropout, keep, 0, layout.dtype() == at::kDouble};
  const auto order = memory_order(layout.strides());
  const auto part = shard_index(layout, order.data());
  if (part && may_draw(numel, options)) {
    const int64_t most = dropout_neighbours(options, numbers, generator);
    const auto launch = rng::cuda::dropout(numel, current_device(), std::max<int64_t>(most, 1));
    const bool in_memory_order = launch.vector > 1 || std::ranges::is_sorted(order);
    if (most > 0 && in_memory_order) {
      const auto words = words_of(generator, launch);
      const auto own = at::empty({c10::multiply_integers(layout.local_sizes())}, options.dtype(at::kBool));
      write(own, *part, words, numbers);
      go_on(generator, words);
      return in_place(own, layout, order);
    }
  }
  const auto whole = at::empty_strided(layout.sizes(), layout.strides(), options).fill_(1);
  return own_shard(std::get<1>(at::_fused_dropout(whole, keep, generator)).to(at::kBool), layout);
}

}  // namespace

at::Tensor draw_own_shard(const Layout& layout, const Draw& draw, const at::Generator& generator) {
  const c10::DeviceGuard on(draw.options.device());
  const int64_t numel = c10::multiply_integers(layout.sizes());
  const auto order = memory_order(layout.strides());
  const auto part = shard_index(layout, order.data());
  const auto numbers = part ? proven_numbers(numel, draw, generator) : std::nullopt;
  if (!numbers) return {};
  const auto words = words_of(generator, launch_of(numel, *numbers));
  const auto own = at::empty({c10::multiply_integers(layout.local_sizes())}, draw.options);
  write(own, *part, words, *numbers);
  go_on(generator, words);
  return in_place(own, layout, order);
}

bool skip_draw(int64_t numel, const Draw& draw, const at::Generator& generator) {
  const c10::DeviceGuard on(draw.options.device());
  const auto numbers = proven_numbers(numel, draw, generator);
  if (numbers) go_on(generator, words_of(generator, launch_of(numel, *numbers)));
  return numbers.has_value();
}

std::vector<c10::IValue> dropout(const at::Tensor& input, const Layout& layout, double keep, const at::Generator& generator) {
  const c10::DeviceGuard on(input.device());
  if (keep == 0) return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
  if (layout.local_sizes() == layout.sizes()) {
    const auto [output, mask] = at::_fused_dropout(input, keep, generator);
    return {output, mask.to(at::kBool)};
  }
  const auto mask = dropout_mask(layout, input.options(), keep, generator);
  const bool is_double = input.scalar_type() == at::kDouble, is_short = input.dtype().itemsize() == 2;
  const double scale = 1 / (is_double ? keep : static_cast<float>(keep));  // as the kernel computes it
  const auto output = (is_short ? input.to(at::kFloat) : input).mul(mask).mul_(scale);
  return {is_short ? output.to(input.scalar_type()) : output, mask};
}

}  // namespace dtensor::rng::cuda
