#include "src/parallel/fully_shard/buffer.hpp"

#include <dtensor/mesh/alias.hpp>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <numeric>

namespace dtensor::fsdp {

namespace {

int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

BufferPlan plan_with(const std::vector<int64_t>& elements, int64_t ranks, int64_t unit) {
  BufferPlan plan;
  int64_t end = 0;
  for (const auto count : elements) {
    plan.offsets.push_back(end);
    end = round_up(end + count, unit);
  }
  plan.piece = std::max(unit, round_up((end + ranks - 1) / ranks, unit));
  return plan;
}

// Keeps memory, and counts its bytes.
struct Counted {
  Counted(at::Tensor m, std::shared_ptr<Counter> c) : memory(std::move(m)), counter(std::move(c)) { counter->add(bytes()); }
  Counted(Counted&& other) noexcept = default;
  ~Counted() {
    if (counter) counter->add(-bytes());
  }
  int64_t bytes() const { return memory.numel() * static_cast<int64_t>(memory.element_size()); }
  at::Tensor memory;
  std::shared_ptr<Counter> counter;
};

}  // namespace

BufferPlan plan_buffer(const std::vector<int64_t>& elements, int64_t ranks, int64_t block, int64_t element_size) {
  constexpr int64_t kLine = 64;  // bytes
  const auto exact = plan_with(elements, ranks, block);
  const auto aligned = plan_with(elements, ranks, std::lcm(block, kLine / std::gcd(kLine, element_size)));
  return (aligned.piece - exact.piece) * 100 <= exact.piece ? aligned : exact;
}

int64_t most_elements(const Layout& layout, int64_t cut) {
  const auto& mesh = layout.mesh();
  Sizes most(layout.sizes().begin(), layout.sizes().end());
  for (int64_t m = 0; m < mesh.ndim(); ++m) {
    const auto& p = layout.placements()[m];
    if (m != cut && p.is_shard()) most[p.dim] = longest_cut(most[p.dim], p, mesh.size(m));
  }
  return c10::multiply_integers(most);
}

at::Tensor counted_empty(int64_t elements, const at::TensorOptions& options, const std::shared_ptr<Counter>& counter) {
  const auto memory = at::empty({elements}, options);
  const auto bytes = static_cast<int64_t>(memory.nbytes());
  return detail::over(memory, detail::storage_over(memory.data_ptr(), bytes, memory.device(), Counted(memory, counter)), {elements});
}

}  // namespace dtensor::fsdp
