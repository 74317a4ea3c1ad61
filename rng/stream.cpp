#include "rng/stream.hpp"

#include <dtensor/rng/position.hpp>
#include "rng/mt19937.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

namespace dtensor::rng {

namespace {

// normal_ makes 16 normal numbers of 16 uniform ones (at::native::templates::cpu::normal_fill). The other operators go element by element,
// or by pairs whose second number is kept for later; any even number will do for them.
constexpr int64_t kBlock = 16;

int64_t round_up(int64_t value) { return (value + kBlock - 1) / kBlock * kBlock; }

at::mt19937 engine(const at::Generator& generator) { return generator.get<at::CPUGeneratorImpl>()->engine(); }

}  // namespace

Stream::Stream(at::Generator generator, const Draw& draw, int64_t numel, bool contiguous)
    : generator_(std::move(generator)), draw_(draw), numel_(numel), spread_(draw.is("aten::normal_") && !contiguous) {
  if (draw.is("aten::normal_") && contiguous) tail_ = numel % kBlock;
  probe();
  if (divisible_) buffer_ = scratch(kWindow + 2 * kBlock);
}

at::Tensor Stream::scratch(int64_t length) const {
  return spread_ ? at::empty({length, 2}, draw_.options).select(1, 0) : at::empty({length}, draw_.options);
}

// Draws two blocks at once, and then one by one, from copies of the generator, and compares them.
void Stream::probe() {
  const auto together = scratch(2 * kBlock), apart = scratch(2 * kBlock);
  auto one = copy_of(generator_), other = copy_of(generator_);
  draw_.fill(together, one);
  draw_.fill(apart.narrow(0, 0, kBlock), other);
  words_ = words_between(engine(generator_), engine(other));
  draw_.fill(apart.narrow(0, kBlock, kBlock), other);
  divisible_ = together.equal(apart) && words_between(engine(generator_), engine(one)) == 2 * words_ &&
               words_between(engine(generator_), engine(other)) == 2 * words_;
}

at::Tensor Stream::window(int64_t begin, int64_t end) {
  if (begin >= last_) {
    skip_to(begin / kBlock * kBlock);
  } else if (end > last_) {
    const auto kept = buffer_.narrow(0, begin - first_, last_ - begin).clone();
    buffer_.narrow(0, 0, kept.numel()).copy_(kept);
    first_ = begin;
  }
  const bool to_the_end = tail_ > 0 && end > numel_ - kBlock;
  draw_to(to_the_end ? numel_ - tail_ : std::min(round_up(end), numel_));
  if (to_the_end) draw_tail();
  return buffer_.narrow(0, begin - first_, end - begin);
}

void Stream::finish() {
  skip_to(numel_ - tail_);
  if (tail_ > 0) draw_tail();
}

void Stream::skip_words(int64_t words) {
  if (words == 0) return;
  auto* generator = generator_.get<at::CPUGeneratorImpl>();
  auto state = generator->engine();
  skip(state, static_cast<uint64_t>(words));
  generator->set_engine(state);
}

// The last block before `position` is drawn, so that a number that the generator keeps for its next call is the right one.
void Stream::skip_to(int64_t position) {
  const int64_t blocks = (position - last_) / kBlock, rest = (position - last_) % kBlock;
  if (blocks > 1) skip_words((blocks - 1) * words_);
  if (blocks > 0) draw_.fill(scratch(kBlock), generator_);
  if (rest > 0) draw_.fill(scratch(rest), generator_);
  first_ = last_ = std::max(position, last_);
}

void Stream::draw_to(int64_t position) {
  if (position <= last_) return;
  draw_.fill(buffer_.narrow(0, last_ - first_, position - last_), generator_);
  last_ = position;
}

void Stream::draw_tail() {
  if (last_ == numel_) return;
  // Words that are read for the tail before it is drawn anew: all of them or, in newer versions for short floats, none.
  auto copy = copy_of(generator_);
  draw_.fill(scratch(kBlock + kBlock / 2), copy);
  skip_words((words_between(engine(generator_), engine(copy)) - 2 * words_) * tail_ / (kBlock / 2));
  const auto block = scratch(kBlock);
  draw_.fill(block, generator_);
  const int64_t begin = std::max(first_, numel_ - kBlock);
  buffer_.narrow(0, begin - first_, numel_ - begin).copy_(block.narrow(0, begin - (numel_ - kBlock), numel_ - begin));
  last_ = numel_;
}

}  // namespace dtensor::rng
