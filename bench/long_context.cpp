// Attention over a sequence that is cut over ranks: forward and backward, by every method under several masks. Names are
// METHOD/MASK/LENGTH/RANKS; `one` is our kernel on one device, and `libtorch` its own attention there (the products, where it has no
// kernel). A batch of one sequence, 8 heads, dim 64, float32. Counters:
//   sent_mib   what a rank sent to others, of the one that sent most
//   peak_mib   of the memory of tensors, beside the inputs, by rank
//   balance    the busiest rank's work over the mean
//   error      of the output, against float64, over its largest element; at 2048 positions
//
//   build/bench/long_context --benchmark_filter='/causal/2048/2'
//   build/bench/long_context --table 2048 4       # length and ranks: the same numbers as tables of docs/long_context.md, method x mask
#include "ranks.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/nn/attention.hpp>
#include <dtensor/observe/comm_debug.hpp>
#include <dtensor/parallel/context/attention.hpp>

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>

namespace dt = dtensor;

namespace {

constexpr int64_t kHeads = 8, kDim = 64;

// Counts the bytes of tensors that live, on top of the allocator that there is.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& installed() {
    static auto* const counting = [] {
      auto* made = new CountingAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(made, std::numeric_limits<uint8_t>::max());
      return made;
    }();
    return *counting;
  }

  void begin() { peak_ = live_.load(); }
  double peak_mib(int64_t before) const { return static_cast<double>(peak_ - before) / (1 << 20); }
  int64_t live() const { return live_; }

#if DTENSOR_TORCH_AT_LEAST(2, 2)
  c10::DataPtr allocate(size_t bytes) override { return counted(bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
#else
  c10::DataPtr allocate(size_t bytes) const override { return const_cast<CountingAllocator*>(this)->counted(bytes); }
#endif

 private:
  struct Block {
    c10::DataPtr memory;
    CountingAllocator* allocator;
    int64_t bytes;
  };

  explicit CountingAllocator(c10::Allocator* below) : below_(below) {}

  c10::DataPtr counted(size_t bytes) {
    auto* block = new Block{below_->allocate(bytes), this, static_cast<int64_t>(bytes)};
    const auto now = live_ += block->bytes;
    for (auto peak = peak_.load(); now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    return {block->memory.get(), block, &free, c10::kCPU};
  }
  static void free(void* pointer) {
    auto* block = static_cast<Block*>(pointer);
    block->allocator->live_ -= block->bytes;
    delete block;
  }

  c10::Allocator* const below_;
  std::atomic<int64_t> live_ = 0, peak_ = 0;
};

struct Case {
  std::string method, mask;
  int64_t length;
  int ranks;

  std::string name() const { return method + "/" + mask + "/" + std::to_string(length) + "/" + std::to_string(ranks); }
  bool takes_two() const { return method == "usp" || method == "doublering"; }
};

// Documents each half as long as the one before.
dt::PackedSequence packed(int64_t length) {
  std::vector<int64_t> documents;
  for (auto left = length; left > 0; left -= documents.back()) documents.push_back(left > length / 64 ? (left + 1) / 2 : left);
  return dt::PackedSequence(documents);
}

dt::AttentionMask mask_of(const Case& c) {
  using Mask = dt::AttentionMask;
  if (c.mask == "full") return Mask::full();
  if (c.mask == "causal") return Mask::causal();
  if (c.mask == "window") return Mask::causal_sliding_window(c.length / 8);
  if (c.mask == "global_window") return Mask::global_sliding_window(64, c.length / 8, c.length / 8);
  if (c.mask == "documents") return Mask::causal_documents();
  if (c.mask == "prefix") return Mask::prefix_lm(c.length / 4);
  if (c.mask == "shared_question") return Mask::shared_question();
  return Mask::block_causal_documents(c.length / 16);
}

dt::ContextPlan plan_of(const Case& c, int ranks) {
  const auto mask = mask_of(c);
  const auto sequence = packed(c.length);
  auto rows = c.mask == "full"     ? dt::context::contiguous_order(c.length, ranks)
              : c.mask == "causal" ? dt::context::zigzag_order(c.length, ranks)
                                   : dt::context::balanced_order(mask, sequence, ranks);
  return {mask, {sequence}, std::move(rows)};
}

struct Result {
  double seconds = std::numeric_limits<double>::infinity(), sent_mib = 0, peak_mib = 0, error = 0;
};

// Bytes that went to other ranks; of what all give to all, a share stays.
double sent_mib(const dt::CommDebugMode& counted, double ranks) {
  using dt::comm::Collective;
  const auto of = [&](Collective kind) { return static_cast<double>(counted.bytes(kind)) / (1 << 20); };
  return of(Collective::send) +
         (of(Collective::all_gather) + (of(Collective::reduce_scatter) + of(Collective::all_to_all)) / ranks) * (ranks - 1);
}

// What a rank does in a pass, and its part of what one device computes in float64.
class Pass {
 public:
  Pass(const Case& c, dt::World& world)
      : case_(c),
        mesh_(c.takes_two() ? dt::init_device_mesh(c10::kCPU, {c.ranks / 2, 2}, {"far", "near"})
                            : dt::init_device_mesh(c10::kCPU, {c.ranks}, {"cp"})),
        plan_(plan_of(c, c.ranks)),
        rows_(at::tensor(plan_.rows(world.rank()), at::kLong)) {
    world.generator().set_current_seed(1);
    for (auto* x : {&q_, &k_, &v_, &grad_}) {
      whole_.push_back(at::randn({1, kHeads, c.length, kDim}, world.generator()));
      *x = whole_.back().index_select(2, rows_);
    }
    for (auto* x : {&q_, &k_, &v_}) x->requires_grad_();
  }

  at::Tensor forward() const {
    if (case_.method == "libtorch") return dt::nn::attention(q_, k_, v_, {.causal = case_.mask == "causal"});
    return dt::context_attention(q_, k_, v_, plan_, mesh_, {.method = case_.method == "one" ? "ring" : case_.method});
  }
  void run() const {
    for (const auto* x : {&q_, &k_, &v_}) x->mutable_grad() = at::Tensor();
    forward().backward(grad_);
  }
  double error(const dt::World& world) const {
    const at::NoGradGuard no_grad;
    const dt::DeviceMesh self(c10::kCPU, {world.rank()}, {1}, {"self"});
    const auto all = [&](int i) { return whole_[i].to(at::kDouble); };
    const auto expected = dt::context_attention(all(0), all(1), all(2), plan_of(case_, 1), self);
    return forward().sub(expected.index_select(2, rows_)).abs().max().item<double>() / expected.abs().max().item<double>();
  }

 private:
  const Case case_;
  const dt::DeviceMesh mesh_;
  const dt::ContextPlan plan_;
  const at::Tensor rows_;
  std::vector<at::Tensor> whole_;
  at::Tensor q_, k_, v_, grad_;
};

Result measure(const Case& c, int passes) {
  Result result;
  std::mutex mutex;
  std::atomic<int64_t> before = 0;
  dt::LaunchOptions options;
  options.ranks = c.ranks;
  dt::launch(options, [&](dt::World& world) {
    auto& memory = CountingAllocator::installed();
    const Pass pass(c, world);
    pass.run();  // makes the plan's masks
    double seconds = std::numeric_limits<double>::infinity();
    for (int i = 0; i < passes; ++i) {
      world.barrier();
      if (world.rank() == 0) before = memory.live(), memory.begin();
      world.barrier();
      const auto start = std::chrono::steady_clock::now();
      pass.run();
      world.barrier();
      seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    const double peak = memory.peak_mib(before) / c.ranks;
    dt::CommDebugMode counted;
    pass.run();
    const double sent = sent_mib(counted, c.ranks), error = c.length <= 2048 ? pass.error(world) : 0;
    std::lock_guard lock(mutex);
    result = {std::min(result.seconds, seconds), std::max(result.sent_mib, sent), peak, std::max(result.error, error)};
  });
  return result;
}

double balance(const Case& c) {
  const auto plan = plan_of(c, c.ranks);
  double most = 0, all = 0;
  for (int r = 0; r < c.ranks; ++r) most = std::max(most, static_cast<double>(plan.cells(r))), all += static_cast<double>(plan.cells(r));
  return most * c.ranks / all;
}

void attention(benchmark::State& state, const Case& c) {
  Result result;
  for (auto _ : state) state.SetIterationTime((result = measure(c, 3)).seconds);
  state.counters["sent_mib"] = result.sent_mib;
  state.counters["peak_mib"] = result.peak_mib;
  state.counters["balance"] = balance(c);
  if (result.error > 0) state.counters["error"] = result.error;
}

void add(const Case& c) {
  benchmark::RegisterBenchmark(c.name().c_str(), attention, c)->UseManualTime()->Iterations(1)->Unit(benchmark::kMillisecond);
}

const std::vector<std::string> kMasks{"full",      "causal", "window",          "global_window",
                                      "documents", "prefix", "shared_question", "block_documents"};

void register_all() {
  for (const int64_t length : {2048, 4096, 8192}) {
    for (const auto& mask : kMasks) {
      if (length > 2048 && mask != "causal") continue;
      add({"one", mask, length, 1});
      if (mask == "full" || mask == "causal") add({"libtorch", mask, length, 1});
      for (const int ranks : {2, 4}) {
        for (const auto* method : dt::context::all_methods()) add({method->name(), mask, length, ranks});
      }
    }
  }
}

// One measure of every method under every mask.
void print_table(const char* title, const std::vector<std::pair<std::string, std::vector<Result>>>& rows, double Result::*measure,
                 double factor) {
  fmt::print("\n{}\n\n| |", title);
  for (const auto& mask : kMasks) fmt::print(" {} |", mask);
  fmt::print("\n|---|");
  for (size_t i = 0; i < kMasks.size(); ++i) fmt::print("---|");
  for (const auto& [method, results] : rows) {
    fmt::print("\n| `{}` |", method);
    for (const auto& result : results) fmt::print(" {:.3g} |", result.*measure * factor);
  }
  fmt::print("\n");
}

void print_tables(int64_t length, int ranks) {
  std::vector<std::string> methods{"one"};
  for (const auto* method : dt::context::all_methods()) methods.emplace_back(method->name());
  std::vector<std::pair<std::string, std::vector<Result>>> rows;
  double error = 0;
  for (const auto& method : methods) {
    auto& [name, results] = rows.emplace_back(method == "one" ? "one device" : method, std::vector<Result>());
    for (const auto& mask : kMasks) {
      std::fprintf(stderr, "%s, %s\n", method.c_str(), mask.c_str());
      results.push_back(measure({method, mask, length, method == "one" ? 1 : ranks}, 3));
      error = std::max(error, results.back().error);
    }
  }
  fmt::print("{} positions on {} ranks; one sequence of {} heads of {}, float32; forward and backward\n", length, ranks, kHeads, kDim);
  print_table("Milliseconds, the fastest of three", rows, &Result::seconds, 1e3);
  print_table("MiB that a rank sends, of the one that sends most", rows, &Result::sent_mib, 1);
  print_table("Peak MiB of tensors beside the inputs, by rank", rows, &Result::peak_mib, 1);
  fmt::print("\nThe busiest rank's work over the mean:");
  for (const auto& mask : kMasks)
    fmt::print(" {} {:.2f}{}", mask, balance({"ring", mask, length, ranks}), mask == kMasks.back() ? ".\n" : ",");
  if (error > 0) fmt::print("The largest error of an output, against float64 and over its largest element: {:.1e}.\n", error);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc > 1 && std::string(argv[1]) == "--table") {
    print_tables(argc > 2 ? std::atoll(argv[2]) : 2048, argc > 3 ? std::atoi(argv[3]) : 4);
    return 0;
  }
  register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
