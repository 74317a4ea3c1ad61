// Where things lie in memory that ranks share: first what each rank tells the others, then the signals, then their parts.
#include <dtensor/comm/symmetric_memory.hpp>

#include <dtensor/base/error.hpp>

#include "src/comm/bell.hpp"
#include "src/comm/copy.hpp"
#include "src/comm/memory_sharing.hpp"
#include "src/comm/reduce.hpp"
#include "src/comm/spin.hpp"

#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <cstring>
#include <system_error>

namespace dtensor {

using comm::Collective;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int64_t kLine = 64;  // of a cache
constexpr int64_t kMostBytes = int64_t{1} << 46, kMostPads = 1 << 20;
// The longest sleep: failures of other ranks ring no bell here.
constexpr comm::Milliseconds kNap{20};
// A rank that fails destroys its part first, and tells a moment later that it has failed.
constexpr comm::Milliseconds kPatience{1000};

int64_t lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// One number of each rank, or several: [ranks][count].
std::vector<int64_t> gathered(comm::Communicator& group, const std::vector<int64_t>& mine) {
  const auto count = static_cast<int64_t>(mine.size());
  const auto input = comm::empty({count}, at::kLong);
  std::ranges::copy(mine, input.data_ptr<int64_t>());
  const auto all = group.all_gather(input, std::vector<int64_t>(group.size(), count)).get();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

void check_data(const char* op, const at::Tensor& x) {
  require(x.defined(), op, "the tensor is undefined");
  if (!x.has_storage() || !x.device().is_cpu()) {
    fail(op, "symmetric memory holds CPU tensors; got one {}; hint: pass to_local() of a DTensor",
         x.has_storage() ? "on " + x.device().str() : "without memory of its own");
  }
  if (x.is_contiguous() && !x.is_conj() && !x.is_neg()) return;
  fail(op, "the tensor is not contiguous, or a lazy conjugate or negative; got sizes [{}] and strides [{}]; hint: call contiguous(), "
       "resolve_conj() and resolve_neg()", fmt::join(x.sizes(), ", "), fmt::join(x.strides(), ", "));
}

}  // namespace

struct SymmetricMemory::Member {
  comm::Bell bell;
  alignas(kLine) std::atomic<uint32_t> gone;  // it has destroyed its part
};

bool SymmetricMemory::is_available(comm::Communicator& group) { return group.size() == 1 || group.memory_sharing() != nullptr; }

SymmetricMemory::SymmetricMemory(comm::Communicator& group, int64_t bytes, int pads)
    : group_(group), sharing_(group.memory_sharing()), rank_(group.rank()), size_(group.size()), bytes_(bytes), pads_(pads),
      row_bytes_(lines(pads * static_cast<int64_t>(sizeof(Counter)))),
      counters_at_(kLine + size_ * static_cast<int64_t>(sizeof(Member))),  // the first line is the transport's
      parts_at_(counters_at_ + row_bytes_ * size_ * size_) {
  constexpr auto kOp = "SymmetricMemory";
  require(is_available(group), kOp,
          "the ranks of group '{}' share no memory; got ranks [{}]; expected ranks that are threads, or processes of one host with shm; "
          "hint: ask SymmetricMemory::is_available(group), and send messages where it is false", group.name(),
          fmt::join(group.ranks(), ", "));
  const comm::Cause cause(kOp, /*implicit=*/false);
  make(kOp);
}

// The first rank makes it, the others take it, and all tell whether they have it. Every rank finds the same errors.
void SymmetricMemory::make(const char* op) {
  const bool valid = bytes_ >= 0 && bytes_ <= kMostBytes && pads_ >= 1 && pads_ <= kMostPads;
  const int64_t total = valid ? parts_at_ + size() * lines(bytes_) : 0;
  comm::MemorySharing::Offer offer;
  int64_t error = 0;  // errno
  const auto try_to = [&](const auto& act) {
    try {
      act();
    } catch (const std::system_error& caught) {
      error = caught.code().value();
    }
  };
  if (rank() == 0 && valid) {
    try_to([&] {
      if (sharing_) offer = sharing_->offer(total);
      else offer.memory = comm::zeroed_memory(total);
    });
    memory_ = offer.memory;
  }
  const auto all = gathered(group_, {bytes_, pads_, offer.ticket.place, offer.ticket.token, error});
  for (int r = 0; r < size(); ++r) {
    const auto* theirs = &all[5 * static_cast<size_t>(r)];
    require(theirs[0] == all[0] && theirs[1] == all[1], op,
            "ranks ask for different memory; rank {} asks for {} bytes and {} pads, rank {} for {} and {}; expected the same on all ranks "
            "of group '{}'", group_.ranks()[0], all[0], all[1], group_.ranks()[r], theirs[0], theirs[1], group_.name());
  }
  require(valid, op, "got {} bytes and {} pads; expected 0 to {} bytes, and 1 to {} pads", bytes_, pads_, kMostBytes, kMostPads);
  if (rank() > 0 && all[4] == 0) try_to([&] { memory_ = sharing_->take(0, {all[2], all[3]}, total); });
  const auto errors = gathered(group_, {error});
  for (int r = 0; r < size(); ++r) {
    require(errors[r] == 0, op, "there is no room for {} bytes, for {} ranks; rank {} got: {}; hint: less memory, or a higher `ulimit -f`",
            total, size(), group_.ranks()[r], std::strerror(static_cast<int>(errors[r])));
  }
}

SymmetricMemory::~SymmetricMemory() {
  member(rank()).gone.store(1);
  for (int r = 0; r < size(); ++r) member(r).bell.ring();
}

SymmetricMemory::Member& SymmetricMemory::member(int rank) const {
  return *reinterpret_cast<Member*>(memory_.get() + kLine + rank * static_cast<int64_t>(sizeof(Member)));
}

SymmetricMemory::Counter& SymmetricMemory::counter(int of, int from, int pad) const {
  char* row = memory_.get() + counters_at_ + (static_cast<int64_t>(of) * size() + from) * row_bytes_;
  return reinterpret_cast<Counter*>(row)[pad];
}

char* SymmetricMemory::part(int rank) const { return memory_.get() + parts_at_ + rank * lines(bytes_); }

at::Tensor SymmetricMemory::local() const { return view(rank(), {bytes_}, at::kByte); }

at::Tensor SymmetricMemory::view(int rank, c10::IntArrayRef sizes, c10::ScalarType dtype, int64_t offset) const {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  for (const auto size : sizes) require(size >= 0, "view", "got sizes [{}]; expected 0 or more", fmt::join(sizes, ", "));
  check_range("view", rank, offset, c10::multiply_integers(sizes) * element);
  require(offset % element == 0, "view", "the offset is no multiple of the size of {}; got {}; expected a multiple of {}",
          c10::toString(dtype), offset, element);
  return at::from_blob(part(rank) + offset, sizes, [keep = memory_](void*) {}, at::TensorOptions(dtype));
}

void SymmetricMemory::put(const at::Tensor& x, int to, int64_t offset) {
  check_data("put", x);
  check_range("put", to, offset, static_cast<int64_t>(x.nbytes()));
  const auto event = note(Collective::put, to, 0, ++copies_, x);
  comm::copy_bytes(part(to) + offset, x.data_ptr(), x.nbytes(), /*large=*/false);
  event.done();
}

void SymmetricMemory::put_rows(const at::Tensor& x, const at::Tensor& rows, int to, int64_t offset) {
  check_data("put_rows", x);
  check_data("put_rows", rows);
  if (x.dim() == 0 || rows.dim() != 1 || rows.scalar_type() != at::kLong) {
    fail("put_rows", "got x [{}] and rows [{}] of {}; expected [rows, ...] and a list of int64", fmt::join(x.sizes(), ", "),
         fmt::join(rows.sizes(), ", "), c10::toString(rows.scalar_type()));
  }
  auto sizes = x.sizes().vec();
  sizes[0] = rows.numel();
  const auto target = view(to, sizes, x.scalar_type(), offset);
  const auto* row = rows.data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    require(row[i] >= 0 && row[i] < x.size(0), "put_rows", "there is no row {}; expected 0..{}", row[i], x.size(0) - 1);
  }
  if (target.numel() == 0) return;
  const auto event = note(Collective::put, to, 0, ++copies_, target);
  const auto bytes = target.nbytes() / static_cast<size_t>(rows.numel());
  auto* out = static_cast<char*>(target.data_ptr());
  const auto* in = static_cast<const char*>(x.data_ptr());
  for (int64_t i = 0; i < rows.numel(); ++i) std::memcpy(out + i * bytes, in + row[i] * bytes, bytes);
  event.done();
}

at::Tensor SymmetricMemory::get(const at::Tensor& like, int from, int64_t offset) {
  require(like.defined(), "get", "`like` is undefined; expected a tensor with the sizes and dtype of what is got");
  const auto result = comm::empty(like.sizes(), like.scalar_type());
  check_range("get", from, offset, static_cast<int64_t>(result.nbytes()));
  const auto event = note(Collective::get, from, 0, ++copies_, result);
  comm::copy_bytes(result.data_ptr(), part(from) + offset, result.nbytes(), /*large=*/false);
  event.done();
  return result;
}

// Sequentially consistent, as the bell asks: who goes to sleep counts itself first and looks at the counter then.
void SymmetricMemory::signal(int to, int pad) {
  check_pad("signal", to, pad);
  const auto before = counter(to, rank(), pad).fetch_add(1);
  note(Collective::signal, to, pad, before + 1).done();
  member(to).bell.ring();
}

int64_t SymmetricMemory::signals(int from, int pad) const {
  check_pad("signals", from, pad);
  return counter(rank(), from, pad).load();
}

void SymmetricMemory::wait(int from, int64_t count, int pad) {
  check_pad("wait", from, pad);
  require(count >= 0, "wait", "got {} signals to wait for; expected 0 or more", count);
  const auto event = note(Collective::wait, from, pad, count);
  const auto& signals = counter(rank(), from, pad);
  if (!comm::stay_awake([&] { return signals.load() >= count; })) sleep_until_signalled(from, count, pad, event);
  event.done();
}

void SymmetricMemory::sleep_until_signalled(int from, int64_t count, int pad, const comm::EventRef& event) const {
  const auto& signals = counter(rank(), from, pad);
  auto& bell = member(rank()).bell;
  const auto deadline = sharing_ ? sharing_->deadline() : comm::kDefaultDeadline;
  const auto end = Clock::now() + deadline;
  auto gone_since = Clock::time_point::max();
  const auto give_up = [&](const std::string& why) {
    event.failed();
    fail("wait", "signal #{} of rank {} on pad {} in group '{}' {}; got {} so far", count, group_.ranks()[from], pad, group_.name(), why,
         signals.load());
  };
  while (signals.load() < count) {
    const bool gone = member(from).gone.load();
    if (gone) gone_since = std::min(gone_since, Clock::now());
    const auto why = why_never(from, gone && Clock::now() - gone_since > kPatience);
    if (signals.load() >= count) return;
    if (!why.empty()) give_up("cannot come: " + why);
    const auto left = end - Clock::now();
    if (left.count() <= 0) {
      give_up(fmt::format("did not come within {} s; hint: that rank is stuck or far behind (raise --deadline if that is expected), or "
                          "waits for this one", static_cast<double>(deadline.count()) / 1000));
    }
    const auto seen = bell.rings.load();
    bell.sleepers.fetch_add(1);
    if (signals.load() < count && (gone || !member(from).gone.load())) bell.sleep(seen, std::min<std::chrono::nanoseconds>(left, kNap));
    bell.sleepers.fetch_sub(1);
  }
}

std::string SymmetricMemory::why_never(int from, bool is_gone) const {
  if (sharing_) {
    if (auto why = sharing_->obstacle(from)) return *why;
  }
  if (!is_gone) return "";
  return fmt::format("rank {} has destroyed its part of the memory; hint: every rank keeps it until all have what they wait for",
                     group_.ranks()[from]);
}

void SymmetricMemory::check_rank(const char* op, int rank) const {
  require(rank >= 0 && rank < size(), op, "rank {} is not in group '{}'; expected 0..{}", rank, group_.name(), size() - 1);
}

void SymmetricMemory::check_pad(const char* op, int rank, int pad) const {
  check_rank(op, rank);
  require(pad >= 0 && pad < pads_, op, "there is no pad {}; expected 0..{}; hint: SymmetricMemory(group, bytes, pads)", pad, pads_ - 1);
}

void SymmetricMemory::check_range(const char* op, int rank, int64_t offset, int64_t bytes) const {
  check_rank(op, rank);
  require(offset >= 0 && bytes <= bytes_ && offset <= bytes_ - bytes, op,
          "it does not fit into the part of a rank; got {} bytes at offset {}; expected to end at {} at most", bytes, offset, bytes_);
}

comm::EventRef SymmetricMemory::note(Collective kind, int peer, int pad, int64_t sequence, const at::Tensor& data) const {
  comm::CallInfo call{.kind = kind, .root = peer, .tag = pad, .sequence = static_cast<uint64_t>(sequence)};
  if (data.defined()) call.dtype = static_cast<int8_t>(data.scalar_type()), call.numel = data.numel();
  return group_.issue(call, data);
}

}  // namespace dtensor
