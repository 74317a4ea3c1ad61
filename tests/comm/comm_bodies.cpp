// The bodies that run on every rank of the conformance test. Catch2's assertions are not for threads, so they throw.
#include "tests/comm/comm_bodies.hpp"

#include <dtensor/base/error.hpp>

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <range/v3/numeric/iota.hpp>

#include <chrono>
#include <iostream>
#include <numeric>
#include <thread>

namespace dtensor_tests {

using dtensor::ReduceOp;
using dtensor::World;
using dtensor::require;
using namespace dtensor::comm;

namespace {

const std::vector<at::ScalarType> kNumbers{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt,
                                           at::kShort, at::kChar, at::kByte, at::kComplexFloat, at::kComplexDouble};

// What rank `rank` contributes: small numbers that differ between ranks and elements and are exact in every dtype.
at::Tensor values(int rank, int64_t count, at::ScalarType dtype) {
  auto index = at::arange(count, at::kLong);
  if (dtype == at::kBool) return (index + rank).remainder(3).eq(0);
  return ((index * 3 + rank * 5).remainder(7) + 1).to(dtype);
}

// Where the tensors of this thread's rank are: its GPU under the transport nccl.
thread_local at::Device home{at::kCPU};

void find_home(World& world) { home = world.transport().name() == "nccl" ? at::Device(at::kCUDA) : at::Device(at::kCPU); }
at::Tensor here(const at::Tensor& tensor) { return tensor.to(home); }

// What NCCL does not do as the transports on CPUs do; it says so.
bool is_refused(at::ScalarType dtype, ReduceOp op) {
  if (home.is_cpu()) return false;
  return dtype == at::kShort || (op == ReduceOp::avg && at::isIntegralType(dtype, true)) ||
         (op == ReduceOp::product && at::isComplexType(dtype));
}

void check_equal(const at::Tensor& result, const at::Tensor& expected, const std::string& what) {
  require(result.device().type() == home.type() || home.is_cpu(), "test", "{}: on {}", what, result.device().str());
  const auto got = result.cpu();
  require(got.scalar_type() == expected.scalar_type(), "test", "{}: dtype", what);
  require(got.sizes() == expected.sizes(), "test", "{}: {} elements, expected {}", what, got.numel(), expected.numel());
  require(at::equal(got, expected), "test", "{}: wrong values", what);
}

// The reduction computed the plain way, in rank order.
at::Tensor reduced(int ranks, int64_t count, at::ScalarType dtype, ReduceOp op) {
  const bool low = dtype == at::kHalf || dtype == at::kBFloat16, whole = op == ReduceOp::avg && at::isIntegralType(dtype, false);
  auto total = values(0, count, dtype).to(low ? at::kFloat : whole ? at::kLong : dtype);
  for (int rank = 1; rank < ranks; ++rank) {
    const auto next = values(rank, count, dtype).to(total.scalar_type());
    if (op == ReduceOp::sum || op == ReduceOp::avg) total = dtype == at::kBool ? total.logical_or(next) : total + next;
    if (op == ReduceOp::product) total = dtype == at::kBool ? total.logical_and(next) : total * next;
    if (op == ReduceOp::min) total = at::minimum(total, next);
    if (op == ReduceOp::max) total = at::maximum(total, next);
  }
  if (op == ReduceOp::avg && at::isComplexType(dtype)) {  // ATen's own division of complex numbers is not always exact
    total = at::view_as_complex(at::view_as_real(total) / ranks);
  } else if (op == ReduceOp::avg) {
    total = whole ? at::div(total, ranks, "trunc") : total / ranks;
  }
  return total.to(dtype);
}

// Ragged, with zeros: rank r has base * (r % 3) elements.
std::vector<int64_t> ragged(int ranks, int64_t base) {
  std::vector<int64_t> counts(ranks);
  for (int rank = 0; rank < ranks; ++rank) counts[rank] = base * ((rank + 1) % 3);
  return counts;
}

int64_t sum(const std::vector<int64_t>& counts, size_t end) {
  return std::accumulate(counts.begin(), counts.begin() + static_cast<int64_t>(end), int64_t{0});
}

void check_reduction(Communicator& all, at::ScalarType dtype, ReduceOp op, int64_t count) {
  const auto before = values(all.rank(), count, dtype), input = here(before.clone());
  const auto what = std::string(name(op)) + " of " + c10::toString(dtype) + "[" + std::to_string(count) + "]";
  const auto expected = reduced(all.size(), count, dtype, op);
  check_equal(all.all_reduce(input, op).get(), expected, "all_reduce " + what);
  check_equal(input, before, "all_reduce's input, " + what);
  const auto own = here(before.clone());
  require(all.all_reduce(own, op, true).get().is_same(own), "test", "the result in place is the input");
  check_equal(own, expected, "all_reduce in place, " + what);
  auto counts = ragged(all.size(), count / (3 * all.size()));
  counts.back() += count - sum(counts, counts.size());
  const auto piece = expected.slice(0, sum(counts, all.rank()), sum(counts, all.rank() + 1));
  check_equal(all.reduce_scatter(input, counts, op).get(), piece, "reduce_scatter " + what);
}

}  // namespace

void run_ranks(const std::string& transport, int ranks, const std::function<void(World&)>& body, int deadline_ms) {
  dtensor::LaunchOptions options;
  options.ranks = ranks;
  options.transport = transport;
  options.deadline = Milliseconds(deadline_ms);
  dtensor::launch(options, body);
}

bool fails_with(const std::function<void()>& call, const std::string& text) {
  std::string got = "nothing was thrown";
  try {
    call();
  } catch (const dtensor::Error& error) {
    got = error.what_without_backtrace();
    if (got.find(text) != std::string::npos) return true;
  }
  std::cerr << "expected an error with '" << text << "', got: " << got << '\n';
  return false;
}

std::shared_ptr<Communicator> connect_all(World& world, const std::string& name) {
  std::vector<int> ranks(world.size());
  ranges::iota(ranks, 0);
  return world.transport().connect(name, ranks);
}

void check_reductions(World& world) {
  find_home(world);
  auto all = connect_all(world);
  for (auto dtype : kNumbers) {
    const bool complex = at::isComplexType(dtype);
    for (auto op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      const bool ordered = op == ReduceOp::min || op == ReduceOp::max;
      if (!(complex && ordered) && !is_refused(dtype, op)) check_reduction(*all, dtype, op, 37);
    }
    if (!is_refused(dtype, ReduceOp::sum)) check_reduction(*all, dtype, ReduceOp::sum, 5000);
  }
  // Averages of integers whose sum their dtype does not hold.
  for (auto [dtype, value] : {std::pair{at::kByte, 200}, {at::kChar, -100}, {at::kShort, 30'000}, {at::kInt, 2'000'000'000}}) {
    if (is_refused(dtype, ReduceOp::avg)) continue;
    for (int64_t count : {5, 70'000}) {
      const auto same = at::full({count}, value, dtype);
      check_equal(all->all_reduce(here(same), ReduceOp::avg).get(), same, "the average of equal integers");
      std::vector<int64_t> counts(world.size(), 0);
      counts.back() = count;
      const auto piece = all->reduce_scatter(here(same), counts, ReduceOp::avg).get();
      check_equal(piece, same.slice(0, 0, counts[world.rank()]), "the average of equal integers, scattered");
    }
  }
  for (auto op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    const auto expected = reduced(world.size(), 100, at::kBool,
                                  op == ReduceOp::max   ? ReduceOp::sum
                                  : op == ReduceOp::min ? ReduceOp::product
                                                        : op);
    check_equal(all->all_reduce(here(values(world.rank(), 100, at::kBool)), op).get(), expected, "all_reduce of bool");
  }
  for (int64_t count : {0, 1, 300'001, 1'000'003}) check_reduction(*all, at::kFloat, ReduceOp::sum, count);
  const auto matrix = here(values(world.rank(), 12, at::kFloat).view({3, 4}));
  require(all->all_reduce(matrix, ReduceOp::sum).get().sizes() == matrix.sizes(), "test", "all_reduce keeps the shape");
  const auto scalar = here(at::full({}, world.rank() + 1, at::kDouble));
  check_equal(all->all_reduce(scalar, ReduceOp::max).get(), at::full({}, world.size(), at::kDouble), "all_reduce of a scalar");
}

void check_data_movement(World& world) {
  find_home(world);
  auto all = connect_all(world);
  const int ranks = world.size(), me = world.rank();
  for (auto dtype : {at::kFloat, at::kBool, at::kLong, at::kBFloat16, at::kComplexDouble}) {
    for (int64_t base : {0, 1, 5, 3000, 200'000}) {
      if (base == 200'000 && dtype != at::kFloat) continue;
      const auto counts = ragged(ranks, base);
      std::vector<at::Tensor> pieces;
      for (int rank = 0; rank < ranks; ++rank) pieces.push_back(values(rank, counts[rank], dtype));
      check_equal(all->all_gather(here(pieces[me]), counts).get(), at::cat(pieces), "all_gather");

      // Rank s gives rank r base * ((r + 2 s) % 3) elements.
      const auto count = [&](int from, int to) { return base * ((to + 2 * from) % 3); };
      std::vector<int64_t> send, recv;
      std::vector<at::Tensor> out, in;
      for (int rank = 0; rank < ranks; ++rank) {
        send.push_back(count(me, rank));
        recv.push_back(count(rank, me));
        out.push_back(values(me * 8 + rank, send.back(), dtype));
        in.push_back(values(rank * 8 + me, recv.back(), dtype));
      }
      check_equal(all->all_to_all(here(at::cat(out)), send, recv).get(), at::cat(in), "all_to_all");

      for (int root = 0; root < ranks; ++root) {
        check_equal(all->broadcast(here(values(me, base, dtype)), root).get(), values(root, base, dtype), "broadcast");
      }
    }
  }
  all->barrier();
}

void check_asynchrony(World& world) {
  find_home(world);
  auto all = connect_all(world, "async"), other = connect_all(world, "other");
  const int ranks = world.size(), me = world.rank();
  for (int64_t count : {10, 50'000}) {
    std::vector<Async> works;
    for (int i = 0; i < 6; ++i) {
      auto& communicator = i % 2 ? *all : *other;
      works.push_back(communicator.all_reduce(here(values(me + i, count, at::kFloat)), ReduceOp::sum));
    }
    // Half of the ranks wait backwards.
    for (int i = 0; i < 6; ++i) {
      const int which = me % 2 ? 5 - i : i;
      auto expected = values(which, count, at::kFloat);
      for (int rank = 1; rank < ranks; ++rank) expected += values(rank + which, count, at::kFloat);
      if (works[which].work) works[which].work->wait();
      if (works[which].work) works[which].work->wait();
      require(!works[which].work || works[which].work->done(), "test", "done after wait");
      check_equal(works[which].tensor, expected, "asynchronous all_reduce");
    }
    // Rank 0 drops its works; the others still get their results. After wait() an input may be overwritten.
    for (int i = 0; i < 4; ++i) {
      auto input = here(values(me, count, at::kFloat));
      auto pending = all->all_reduce(input, ReduceOp::sum);
      if (me == 0) continue;
      const auto result = std::move(pending).get();
      input.copy_(here(at::zeros({count})));
      check_equal(result, reduced(ranks, count, at::kFloat, ReduceOp::sum), "all_reduce with a dropped work");
    }
    // done() alone makes progress.
    auto polled = all->all_gather(here(values(me, count, at::kFloat)), std::vector<int64_t>(ranks, count));
    while (polled.work && !polled.work->done()) std::this_thread::yield();
    require(polled.tensor.cpu().slice(0, 0, count).equal(values(0, count, at::kFloat)), "test", "polled all_gather");
  }
  all->barrier();
}

void check_messages(World& world) {
  find_home(world);
  auto all = connect_all(world);
  const int ranks = world.size(), me = world.rank();
  if (ranks == 1) return;
  const int next = (me + 1) % ranks, previous = (me + ranks - 1) % ranks;
  for (int64_t count : {0, 3, 4000, 300'000}) {
    // Small sends complete without the receiver; of large ones the receive is posted first.
    auto incoming = all->recv(here(values(0, count, at::kInt)), previous);
    auto outgoing = all->send(here(values(me, count, at::kInt)), next);
    check_equal(std::move(incoming).get(), values(previous, count, at::kInt), "ring");
    if (outgoing.work) outgoing.work->wait();
  }
  const int tags = home.is_cpu() ? 2 : 1;  // NCCL has none
  for (int i = 0; i < 5; ++i) all->send(here(values(me + i, 7, at::kFloat)), next, i % tags);
  for (int tag = tags; tag-- > 0;) {
    for (int i = tag; i < 5; i += tags) {
      check_equal(all->recv(here(at::zeros({7})), previous, tag).get(), values(previous + i, 7, at::kFloat), "tags keep their order");
    }
  }
  // Messages are numbered apart from collectives, which still match afterwards.
  if (me == 0) all->send(here(values(3, 5, at::kFloat)), 1);
  if (me == 1) check_equal(all->recv(here(at::zeros({5})), 0).get(), values(3, 5, at::kFloat), "a message between two");
  check_equal(all->all_reduce(here(values(me, 5, at::kFloat)), ReduceOp::sum).get(), reduced(ranks, 5, at::kFloat, ReduceOp::sum),
              "a collective after messages");
}

// A message waits for its other end, not for other messages.
void check_messages_out_of_order(World& world) {
  auto all = connect_all(world);
  if (world.rank() > 1 || world.size() == 1) return all->barrier();
  constexpr int kSends = 20, kNow = 100, kLater = 101, kDropped = 102;
  const int me = world.rank(), peer = 1 - me;
  const auto receive = [&](int tag) { return all->recv(at::zeros({5}), peer, tag); };
  const auto send = [&](int tag) { all->send(values(me + tag, 5, at::kFloat), peer, tag); };
  const auto expect = [&](const at::Tensor& result, int tag) { check_equal(result, values(peer + tag, 5, at::kFloat), "a message"); };
  // Both send what nobody receives yet and drop a receive of what comes later, then look for whichever of two messages comes first.
  for (int tag = 0; tag < kSends; ++tag) send(tag);
  receive(kDropped);
  auto later = receive(kLater), now = receive(kNow);
  send(kNow);
  const auto end = std::chrono::steady_clock::now() + Milliseconds(10'000);
  while (!later.work->done() && !now.work->done()) {
    require(std::chrono::steady_clock::now() < end, "test", "the message that has come waits for others");
    std::this_thread::yield();
  }
  require(!later.work->done(), "test", "a message came before it was sent");
  expect(std::move(now).get(), kNow);
  all->barrier();
  send(kLater);
  send(kDropped);
  expect(std::move(later).get(), kLater);
  for (int tag = kSends; tag-- > 0;) expect(receive(tag).get(), tag);
}

void check_subgroups(World& world) {
  find_home(world);
  const int ranks = world.size(), me = world.rank();
  std::vector<int> same_parity, half;
  for (int rank = ranks - 1; rank >= 0; --rank) {
    if (rank % 2 == me % 2) same_parity.push_back(rank);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if ((rank < ranks / 2) == (me < ranks / 2)) half.push_back(rank);
  }
  auto parity = world.transport().connect("parity", same_parity), halves = world.transport().connect("half", half);
  auto again = world.transport().connect("again", half);
  for (int i = 0; i < 3; ++i) {
    auto first = parity->all_gather(here(at::full({2}, me, at::kLong)), std::vector<int64_t>(same_parity.size(), 2));
    auto second = halves->all_reduce(here(at::full({1}, me, at::kLong)), ReduceOp::sum);
    auto third = again->all_reduce(here(at::full({1}, me, at::kLong)), ReduceOp::max);
    require(std::move(third).get().cpu().item<int64_t>() == half.back(), "test", "a second group of the same ranks");
    require(std::move(second).get().cpu().item<int64_t>() == c10::sum_integers(half), "test", "halves");
    const auto order = std::move(first).get().cpu();
    for (size_t k = 0; k < same_parity.size(); ++k) require(order[2 * k].item<int64_t>() == same_parity[k], "test", "group order");
  }
}

void check_chunks(World& world) {
  auto all = connect_all(world);
  const int ranks = world.size(), me = world.rank();
  // Around what shared memory takes at a time: a slot of 256 KiB, of which each rank has a part, and 1 MiB of another rank's memory.
  const std::vector<int64_t> lengths{32 << 10, 256 << 10, (256 << 10) / ranks / 64 * 64, 5 << 18, (18 << 20) / ranks};
  for (const int64_t bytes : lengths) {
    for (const int64_t count : {bytes / 4 - 1, bytes / 4, bytes / 4 + 1}) {
      for (const bool in_place : {false, true}) {
        check_equal(all->all_reduce(values(me, count, at::kFloat), ReduceOp::sum, in_place).get(),
                    reduced(ranks, count, at::kFloat, ReduceOp::sum), "all_reduce");
      }
      std::vector<at::Tensor> pieces, out, in;
      for (int rank = 0; rank < ranks; ++rank) {
        pieces.push_back(values(rank, count, at::kFloat));
        out.push_back(values(me * 8 + rank, count, at::kFloat));
        in.push_back(values(rank * 8 + me, count, at::kFloat));
      }
      const std::vector<int64_t> counts(ranks, count);
      check_equal(all->all_gather(pieces[me], counts).get(), at::cat(pieces), "all_gather");
      check_equal(all->all_to_all(at::cat(out), counts, counts).get(), at::cat(in), "all_to_all");
      check_equal(all->broadcast(pieces[me], ranks - 1).get(), pieces.back(), "broadcast");
      const auto expected = reduced(ranks, count * ranks, at::kFloat, ReduceOp::sum).slice(0, me * count, (me + 1) * count);
      check_equal(all->reduce_scatter(values(me, count * ranks, at::kFloat), counts, ReduceOp::sum).get(), expected, "reduce_scatter");
    }
  }
  // Nothing for most, and much between two.
  std::vector<int64_t> send(ranks, 0), recv(ranks, 0);
  if (me == 0) send.back() = 200'001;
  if (me == ranks - 1) recv.front() = 200'001;  // with one rank, to itself
  const auto moved = all->all_to_all(values(0, me == 0 ? 200'001 : 0, at::kFloat), send, recv).get();
  check_equal(moved, values(0, me == ranks - 1 ? 200'001 : 0, at::kFloat), "all_to_all between two");
}

void check_many_in_flight(World& world) {
  auto all = connect_all(world, "all"), other = connect_all(world, "other");
  const int ranks = world.size(), me = world.rank();
  for (int64_t count : {3, 100'000}) {
    std::vector<Async> works;
    for (int i = 0; i < 40; ++i) works.push_back((i % 2 ? *all : *other).all_reduce(values(me, count + i, at::kFloat), ReduceOp::sum));
    // Some are dropped; what is left is waited for in another order on every rank.
    for (int i = 0; i < 40; ++i) {
      const int which = (i * 7 + me * 11) % 40;
      if (which % 5 == me % 5) {
        works[which] = {};
        continue;
      }
      check_equal(std::move(works[which]).get(), reduced(ranks, count + which, at::kFloat, ReduceOp::sum), "one of many");
    }
  }
  // A rank that is busy elsewhere holds up nobody: here with a message that comes after the others' collectives.
  std::vector<Async> works;
  for (int i = 0; i < 20; ++i) works.push_back(all->all_reduce(values(me, 50'000, at::kFloat), ReduceOp::sum));
  if (me == 0 && ranks > 1) all->recv(at::ones({1}), 1).get();
  for (auto& work : works) check_equal(std::move(work).get(), reduced(ranks, 50'000, at::kFloat, ReduceOp::sum), "while a rank is busy");
  if (me == 1) all->send(at::ones({1}), 0);
  // What is done has let go of its tensors.
  auto input = values(me, 100'000, at::kFloat);
  auto last = all->all_reduce(input, ReduceOp::sum);
  while (last.work && !last.work->done()) std::this_thread::yield();
  require(input.use_count() == 1 && last.tensor.use_count() == 1, "test", "a work that is done holds no tensors");
}

void check_groups_come_and_go(World& world) {
  const int ranks = world.size(), me = world.rank();
  for (int i = 0; i < 60; ++i) {
    auto group = connect_all(world, "passing");
    check_equal(group->all_reduce(values(me, 10 + i, at::kFloat), ReduceOp::sum).get(), reduced(ranks, 10 + i, at::kFloat, ReduceOp::sum),
                "a group that comes and goes");
    if (i % 3 == me % 3) group->all_reduce(values(me, 100'000, at::kFloat), ReduceOp::sum);  // goes with work under way
    if (i % 3 != me % 3) group->all_reduce(values(me, 100'000, at::kFloat), ReduceOp::sum).get();
  }
}

}  // namespace dtensor_tests
