// Lets a module say, for a region of the program, which positions rows have and how attention over them is computed, as dt::ContextParallel
// does for positions that ranks share. The layers of dtensor/nn and libtorch's own attention ask it; models do not change.
#pragma once

#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/attention_hook.hpp>
#include <dtensor/tensor/decoding.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/arange.h>

#pragma GCC visibility push(default)

namespace dtensor {

class AttentionRegion {
 public:
  // While it lives, on the rank of this world. Regions nest, and end in the reverse order.
  explicit AttentionRegion(World& world) : world_(world), outer_(innermost(world)) { make_innermost(this); }
  virtual ~AttentionRegion() { make_innermost(outer_); }
  AttentionRegion(const AttentionRegion&) = delete;
  AttentionRegion& operator=(const AttentionRegion&) = delete;

  // The innermost region of this rank that takes such queries, [batch, heads, length, dim], or null. Throws for queries that it should take
  // and that lie in another way.
  static AttentionRegion* of(const at::Tensor& q);
  // The innermost region of this rank inside Spmd, or null.
  static AttentionRegion* current() { return Spmd::current() ? innermost(Spmd::current()->world()) : nullptr; }
  // Throws for a distributed table of positions that is used outside of Spmd, where the region has these in another order.
  static void check_table(const at::Tensor& table);

  // Which position each row has: plain, int64 [length].
  virtual at::Tensor positions(int64_t length) const = 0;
  // Whether keys and values may have fewer heads than queries, which groups share.
  virtual bool may_share_heads(const at::Tensor& q, int64_t key_heads) const = 0;
  // See nn::attention; q [batch, heads, length, dim], k and v [batch, key heads, length, dim].
  virtual at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double dropout,
                               double scale = 0) = 0;

 protected:
  // Queries of this layout, plain ones for null.
  virtual bool takes(const Layout* layout) const = 0;
  // Throws for queries that no region takes and that this one, the innermost, should.
  virtual void check_apart(const at::Tensor& q) const = 0;
  virtual void check_table(const Layout& table) const = 0;
  // A call of scaled_dot_product_attention; nothing where libtorch's own gives the same.
  virtual c10::optional<at::Tensor> of_libtorchs(const AttentionArguments& arguments) = 0;
  // Throws for two factors of a batched product that are queries and keys, of which it must not go by row.
  virtual void check_product(const Layout& left, const Layout& right) const = 0;

 private:
  struct Innermost {
    AttentionRegion* region = nullptr;
  };
  static AttentionRegion*& innermost(World& world) { return world.local<Innermost>().region; }
  void make_innermost(AttentionRegion* region);

  World& world_;
  AttentionRegion* outer_;
};

// The positions of a sequence's rows, int64 [length], plain: 0, 1, ..., or the order of the region that this rank is in, or the places of a
// decoder's rows. Rotary tables and position embeddings go by these.
at::Tensor sequence_positions(int64_t length, const at::TensorOptions& device = {});

// -- How ------------------------------------------------------------------------------------------------------------------

inline AttentionRegion* AttentionRegion::of(const at::Tensor& q) {
  if (q.dim() != 4) return nullptr;
  const auto* layout = find_layout(q);
  auto* const first = innermost(layout ? layout->mesh().world() : World::current());
  auto* region = first;
  while (region && !region->takes(layout)) region = region->outer_;
  if (!region && first) first->check_apart(q);
  return region;
}

inline void AttentionRegion::check_table(const at::Tensor& table) {
  const auto* layout = find_layout(table);
  const auto* region = layout ? innermost(layout->mesh().world()) : nullptr;
  if (region) region->check_table(*layout);
}

inline void AttentionRegion::make_innermost(AttentionRegion* region) {
  innermost(world_) = region;
  auto& hook = world_.local<AttentionHook>();
  hook = {};
  if (!region) return;
  hook.compute = [](const AttentionArguments& arguments) -> c10::optional<at::Tensor> {
    auto* taking = of(arguments.q);
    if (!taking) return {};
    return taking->of_libtorchs(arguments);
  };
  hook.check_product = [](const at::Tensor& a, const at::Tensor& b) {
    const auto *left = find_layout(a), *right = find_layout(b);
    if (!left || !right || !(left->mesh() == right->mesh())) return;
    if (const auto* inner = innermost(left->mesh().world())) inner->check_product(*left, *right);
  };
}

inline at::Tensor sequence_positions(int64_t length, const at::TensorOptions& device) {
  if (auto* decoding = Decoding::current()) return decoding->positions(length, 0).to(device.device());
  if (const auto* region = AttentionRegion::current()) return region->positions(length).to(device.device());
  return at::arange(length, device.dtype(at::kLong));
}

}  // namespace dtensor

#pragma GCC visibility pop
