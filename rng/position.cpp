#include <dtensor/rng/position.hpp>

#include "rng/counter_generator.hpp"
#include "rng/mt19937.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

namespace dtensor::rng {

namespace {

constexpr const char* kTag = "draws_between";

// The state of libtorch's CUDA generator, whose class is not there in every build: a seed, and at the end the offset.
struct CudaPlace {
  explicit CudaPlace(const at::Generator& generator) : state(at::Tensor(generator.get_state()).clone()) {}
  int64_t seed() const { return read(0); }
  int64_t offset() const { return read(state.numel() - 8); }
  void move(int64_t by) const {
    const auto value = offset() + by;
    std::memcpy(state.data_ptr<uint8_t>() + state.numel() - 8, &value, sizeof value);
  }
  int64_t read(int64_t at) const {
    int64_t value = 0;
    std::memcpy(&value, state.data_ptr<uint8_t>() + at, sizeof value);
    return value;
  }
  at::Tensor state;
};

at::CPUGeneratorImpl& of_cpu(const at::Generator& generator) { return *at::check_generator<at::CPUGeneratorImpl>(generator); }

[[noreturn]] void refuse_other_stream() {
  fail(kTag, "the generator was seeded anew, or drew more than can be counted; hint: call torch::manual_seed outside of what is counted");
}

int64_t words_between_far(at::mt19937 before, const at::mt19937& after) {
  constexpr int64_t kMost = 1 << 24;  // blocks
  if (before.data().seed_ != after.data().seed_) refuse_other_stream();
  int64_t words = 0;
  const auto end = after.data();
  for (int64_t block = 0; block < kMost; ++block) {
    const auto now = before.data();
    if (now.state_ == end.state_ && end.left_ <= now.left_) return words + now.left_ - end.left_;
    skip(before, static_cast<uint64_t>(now.left_));  // over the first word of the next block
    words += now.left_;
  }
  refuse_other_stream();
}

}  // namespace

at::Generator copy_of(const at::Generator& generator) {
  if (generator.device().is_cuda()) return generator.clone();  // libtorch's class of it is not there in every build
  // In some versions of libtorch, at::Generator::clone() never frees its copy.
  auto copy = as_counter(generator) ? at::make_generator<CounterGenerator>(0) : at::make_generator<at::CPUGeneratorImpl>();
  copy.set_state(generator.get_state());
  return copy;
}

int64_t draws_between(const at::Generator& before, const at::Generator& after) {
  if (const auto *from = as_counter(before), *to = as_counter(after); from || to) {
    if (!from || !to || from->current_seed() != to->current_seed() || to->get_offset() < from->get_offset()) refuse_other_stream();
    return static_cast<int64_t>(to->get_offset() - from->get_offset());
  }
  if (after.device().is_cuda()) {
    const CudaPlace from(before), to(after);
    if (from.seed() != to.seed() || to.offset() < from.offset()) refuse_other_stream();
    return to.offset() - from.offset();
  }
  auto &from = of_cpu(before), &to = of_cpu(after);
  const bool same_halves = from.next_float_normal_sample() == to.next_float_normal_sample() &&
                           from.next_double_normal_sample() == to.next_double_normal_sample();
  require(same_halves, kTag,
          "half of a pair of normal numbers was left or used up: fewer than 16 were drawn at once, an odd number of times; hint: draw an "
          "even number of them, or use dt::Generator");
  return words_between_far(from.engine(), to.engine());
}

void skip_draws(at::Generator& generator, int64_t draws) {
  require(draws >= 0, "skip_draws", "got {} draws; expected none or more", draws);
  if (auto* counter = as_counter(generator)) return counter->set_offset(counter->get_offset() + static_cast<uint64_t>(draws));
  if (generator.device().is_cuda()) {
    const CudaPlace place(generator);
    place.move(draws);
    return generator.set_state(place.state);
  }
  if (draws == 0) return;
  auto& cpu = of_cpu(generator);
  auto engine = cpu.engine();
  skip(engine, static_cast<uint64_t>(draws));
  cpu.set_engine(engine);
}

void go_on_from(at::Generator& generator, const at::Generator& other) { generator.set_state(other.get_state()); }

}  // namespace dtensor::rng
