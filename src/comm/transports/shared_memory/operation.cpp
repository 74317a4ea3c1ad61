// Implements the collectives as rounds of copies and reductions. A chunk is as long as a slot, or a piece of one, so it is read while it is
// still in a cache.
#include "src/comm/transports/shared_memory/operation.hpp"

#include "src/comm/copy.hpp"
#include "src/comm/reduce.hpp"

#include <algorithm>
#include <cstdint>

namespace dtensor::comm::shared_memory {

namespace {

// Up to this size every rank reduces everything by itself: one round instead of two.
constexpr int64_t kDirectBytes = 32 << 10;
// How much of another's memory is read in one go: other collectives of this rank wait for so long.
constexpr int64_t kReadBytes = 1 << 20;

int64_t chunks(int64_t bytes, int64_t chunk) { return (bytes + chunk - 1) / chunk; }

Bytes chunk_of(const Bytes& bytes, int64_t index, int64_t chunk) {
  const int64_t begin = std::min(index * chunk, bytes.size);
  return {bytes.data + begin, std::min(chunk, bytes.size - begin)};
}

// `large`: into a large result.
void copy(char* to, const Bytes& from, bool large = false) { copy_bytes(to, from.data, static_cast<size_t>(from.size), large); }

int64_t total(const std::vector<Bytes>& pieces) {
  int64_t size = 0;
  for (const Bytes& piece : pieces) size += piece.size;
  return size;
}

int64_t element_size(const CallInfo& call) { return static_cast<int64_t>(c10::elementSize(static_cast<c10::ScalarType>(call.dtype))); }

void reduce_to(const Bytes& target, const CallInfo& call, c10::ArrayRef<const void*> inputs) {
  if (target.size > 0) reduce(static_cast<c10::ScalarType>(call.dtype), call.op, target.data, inputs, target.size / element_size(call));
}

int64_t longest(const std::vector<Bytes>& pieces) {
  int64_t size = 0;
  for (const Bytes& piece : pieces) size = std::max(size, piece.size);
  return size;
}

// The others, beginning with the next one, so that not all read from the same.
template <class F>
void for_others(const Channel& channel, F visit) {
  for (int step = 1; step < channel.size(); ++step) visit((channel.self() + step) % channel.size());
}

// Where the slot of `from` has the piece for `to`, of those for all others.
int64_t place(const Channel& channel, int from, int to) { return (to - from - 1 + channel.size()) % channel.size(); }

class Gather final : public Operation {
 public:
  Gather(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes mine, std::vector<Bytes> pieces)
      : Operation(call, std::move(keep)), mine_(mine), pieces_(std::move(pieces)),
        rounds_(std::max<int64_t>(1, chunks(longest(pieces_), kChunk))) {}

  int64_t rounds() const override { return rounds_; }

  void write(const Channel&, int64_t round, const Slot& slot) override {
    copy(slot.data, chunk_of(mine_, round, kChunk));
  }

  void read(const Channel& channel, int64_t round, uint64_t base) override {
    copy(chunk_of(pieces_[channel.self()], round, kChunk).data, chunk_of(mine_, round, kChunk), large_);
    for_others(channel, [&](int who) {
      const Bytes target = chunk_of(pieces_[who], round, kChunk);
      copy(target.data, {channel.slot(who, base + round).data, target.size}, large_);
    });
  }

 private:
  static constexpr int64_t kChunk = Channel::kSlotBytes;
  const Bytes mine_;
  const std::vector<Bytes> pieces_;
  const int64_t rounds_;
  const bool large_ = total(pieces_) >= kLargeBytes;
};

// How many rounds it takes is known when the counts of all have been read. Where members read each other's memory, only the first chunk of
// a piece goes through a slot; the rest is read from where it lies, and a last round tells that all have done so.
class AllToAll final : public Operation {
 public:
  AllToAll(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> out, std::vector<Bytes> in, bool direct)
      : Operation(call, std::move(keep)),
        out_(std::move(out)),
        in_(std::move(in)),
        direct_(direct),
        chunk_(Channel::piece_bytes(static_cast<int64_t>(out_.size()))),
        longest_(std::max(longest(out_), longest(in_))),
        sources_(in_.size()) {}

  int64_t rounds() const override {
    if (!direct_ || longest_ <= chunk_) return std::max<int64_t>(1, chunks(longest_, chunk_));
    return 1 + chunks(longest_ - chunk_, kReadBytes) + 1;
  }
  bool knows_rounds() const override { return read_rounds > 0; }
  bool can_write() const override {
    return through_slot(written) || (knows_rounds() && (written + 1 < rounds() || read_rounds == written));
  }

  void write(const Channel& channel, int64_t round, const Slot& slot) override {
    const int size = channel.size();
    for (int who = 0; round == 0 && who < size; ++who) {
      slot.counts[who] = out_[who].size;
      slot.counts[size + who] = in_[who].size;
      slot.counts[2 * size + who] = reinterpret_cast<int64_t>(out_[who].data);
    }
    if (!through_slot(round)) return;
    for_others(channel, [&](int who) { copy(slot.data + place(channel, channel.self(), who) * chunk_, part(out_[who], round)); });
  }

  std::optional<Unequal> disagreement(const Channel& channel, int who, const Slot& theirs) override {
    const int size = channel.size(), self = channel.self();
    for (int i = 0; i < 2 * size; ++i) longest_ = std::max(longest_, theirs.counts[i]);
    sources_[who] = theirs.counts[2 * size + self];
    if (theirs.counts[self] != in_[who].size) return Unequal{who, self, theirs.counts[self], in_[who].size};
    if (theirs.counts[size + self] != out_[who].size) return Unequal{self, who, out_[who].size, theirs.counts[size + self]};
    return std::nullopt;
  }

  void read(const Channel& channel, int64_t round, uint64_t base) override {
    const int self = channel.self();
    copy(part(in_[self], round).data, part(out_[self], round), large_);
    for_others(channel, [&](int who) {
      const Bytes target = part(in_[who], round);
      char* slot = channel.slot(who, base + round).data + place(channel, who, self) * chunk_;
      if (through_slot(round)) copy(target.data, {slot, target.size}, large_);
      else if (target.size > 0) channel.read_memory(who, sources_[who] + (target.data - in_[who].data), target.data, target.size);
    });
  }

 private:
  bool through_slot(int64_t round) const { return !direct_ || round == 0; }
  // Of a piece, what moves in the round.
  Bytes part(const Bytes& piece, int64_t round) const {
    if (through_slot(round)) return chunk_of(piece, round, chunk_);
    const int64_t first = std::min(chunk_, piece.size);
    return chunk_of({piece.data + first, piece.size - first}, round - 1, kReadBytes);
  }

  const std::vector<Bytes> out_, in_;
  const bool direct_;
  const int64_t chunk_;
  int64_t longest_;
  std::vector<int64_t> sources_;  // where the others' pieces lie in their memory
  const bool large_ = total(in_) >= kLargeBytes;
};

// Piece p of every member's input is reduced by member p.
class ReduceScatter : public Operation {
 public:
  ReduceScatter(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> pieces, Bytes target)
      : Operation(call, std::move(keep)),
        pieces_(std::move(pieces)),
        target_(target),
        chunk_(Channel::piece_bytes(static_cast<int64_t>(pieces_.size()))),
        rounds_(std::max<int64_t>(1, chunks(longest(pieces_), chunk_))) {}

  int64_t rounds() const override { return rounds_; }
  void write(const Channel& channel, int64_t round, const Slot& slot) override { write_chunk(channel, round, slot); }
  void read(const Channel& channel, int64_t round, uint64_t base) override { reduce_chunk(channel, round, base + round); }

 protected:
  void write_chunk(const Channel& channel, int64_t index, const Slot& slot) const {
    for_others(channel,
               [&](int who) { copy(slot.data + place(channel, channel.self(), who) * chunk_, chunk_of(pieces_[who], index, chunk_)); });
  }

  void reduce_chunk(const Channel& channel, int64_t index, uint64_t round) const {
    const Bytes target = chunk_of(target_, index, chunk_);
    c10::SmallVector<const void*, 16> inputs;
    for (int who = 0; who < channel.size(); ++who) {
      inputs.push_back(who == channel.self() ? chunk_of(pieces_[who], index, chunk_).data
                                             : channel.slot(who, round).data + place(channel, who, channel.self()) * chunk_);
    }
    reduce_to(target, call(), inputs);
  }

  const std::vector<Bytes> pieces_;
  const Bytes target_;
  const int64_t chunk_, rounds_;
};

// Every member reduces a part, as in reduce_scatter, and shares it. A chunk is shared a few rounds after it was reduced, so that nobody
// waits: with a lag of 1, reduce 0, reduce 1, share 0, reduce 2, share 1, ..., share n-1.
class AllReduce final : public ReduceScatter {
 public:
  AllReduce(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> pieces, std::vector<Bytes> targets, int self)
      : ReduceScatter(call, std::move(keep), std::move(pieces), targets[self]), targets_(std::move(targets)) {}

  int64_t rounds() const override { return 2 * rounds_; }

  bool can_write() const override { return !shares(written) || read_rounds > reduce_round(index(written)); }

  void write(const Channel& channel, int64_t round, const Slot& slot) override {
    if (!shares(round)) return write_chunk(channel, index(round), slot);
    copy(slot.data, chunk_of(target_, index(round), chunk_));
  }

  void read(const Channel& channel, int64_t round, uint64_t base) override {
    if (!shares(round)) return reduce_chunk(channel, index(round), base + round);
    for_others(channel, [&](int who) {
      const Bytes target = chunk_of(targets_[who], index(round), chunk_);
      copy(target.data, {channel.slot(who, base + round).data, target.size}, large_);
    });
  }

 private:
  bool shares(int64_t round) const { return round > lag_ && (round - lag_ > 2 * (rounds_ - 1 - lag_) || (round - lag_) % 2 == 1); }
  // Which chunk the round is about.
  int64_t index(int64_t round) const {
    if (!shares(round)) return round <= lag_ ? round : (round + lag_) / 2;
    return std::max((round - lag_ - 1) / 2, round - rounds_);
  }
  int64_t reduce_round(int64_t chunk) const { return std::max(chunk, 2 * chunk - lag_); }

  const std::vector<Bytes> targets_;
  const bool large_ = total(targets_) >= kLargeBytes;
  const int64_t lag_ = std::min<int64_t>(Channel::kSlots / 2 - 1, rounds_ - 1);
};

// Every member shows its whole input.
class DirectAllReduce final : public Operation {
 public:
  DirectAllReduce(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes input, Bytes target)
      : Operation(call, std::move(keep)), input_(input), target_(target) {}

  void write(const Channel&, int64_t, const Slot& slot) override { copy(slot.data, input_); }

  void read(const Channel& channel, int64_t, uint64_t base) override {
    c10::SmallVector<const void*, 16> inputs;
    for (int who = 0; who < channel.size(); ++who) {
      inputs.push_back(who == channel.self() ? input_.data : channel.slot(who, base).data);
    }
    reduce_to(target_, call(), inputs);
  }

 private:
  const Bytes input_, target_;
};

// Parts of equal size, in whole elements.
std::vector<Bytes> parts(const Bytes& bytes, int64_t element, int64_t members) {
  const int64_t count = bytes.size / element;
  std::vector<Bytes> result;
  for (int64_t i = 0; i < members; ++i) {
    const int64_t begin = count * i / members * element, end = count * (i + 1) / members * element;
    result.push_back({bytes.data + begin, end - begin});
  }
  return result;
}

}  // namespace

std::shared_ptr<Operation> make_gather(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes mine,
                                       std::vector<Bytes> pieces) {
  return std::make_shared<Gather>(call, std::move(keep), mine, std::move(pieces));
}

std::shared_ptr<Operation> make_all_to_all(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> out,
                                           std::vector<Bytes> in, bool direct) {
  return std::make_shared<AllToAll>(call, std::move(keep), std::move(out), std::move(in), direct);
}

std::shared_ptr<Operation> make_reduce_scatter(const Communicator::Call& call, std::vector<at::Tensor> keep, std::vector<Bytes> pieces,
                                               Bytes target) {
  return std::make_shared<ReduceScatter>(call, std::move(keep), std::move(pieces), target);
}

std::shared_ptr<Operation> make_all_reduce(const Communicator::Call& call, std::vector<at::Tensor> keep, Bytes input, Bytes target,
                                           int members, int self) {
  if (input.size <= kDirectBytes) return std::make_shared<DirectAllReduce>(call, std::move(keep), input, target);
  const int64_t element = element_size(call);
  return std::make_shared<AllReduce>(call, std::move(keep), parts(input, element, members), parts(target, element, members), self);
}

}  // namespace dtensor::comm::shared_memory
