// Context parallelism in a model: inside the region, attention of dtensor/nn over positions that a mesh dimension cuts is computed by a
// method for cut sequences. The model does not change.
//
//   auto mesh = dt::init_device_mesh(torch::kCPU, {2, 4}, {"dp", "cp"});
//   dt::ContextParallel context(mesh, "cp", {.method = "ring", .order = "zigzag"});
//   ids = dt::distribute_tensor(context.order(ids), mesh, {dt::shard(0), dt::shard(1)});          // [batch, length]
//   targets = dt::distribute_tensor(context.order(targets), mesh, {dt::shard(0), dt::shard(1)});
//   auto loss = cross_entropy(model->forward(ids), targets);
#pragma once

#include <dtensor/base/say.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/batch_rows.hpp>
#include <dtensor/parallel/context/attention.hpp>
#include <dtensor/parallel/context/batch_order.hpp>
#include <dtensor/tensor/attention_region.hpp>
#include <dtensor/tensor/custom_op.hpp>

#include <ATen/ops/repeat_interleave.h>

#include <mutex>

#pragma GCC visibility push(default)

namespace dtensor {

struct ContextParallelOptions {
  std::string method = "ring";                       // of context_attention
  std::string order = "zigzag";                      // contiguous, zigzag, stripes, or balanced: by the mask's work
  std::optional<AttentionMask> mask = std::nullopt;  // unset: what the model asks for, causal or full
  // Of usp, how many ranks trade heads; of doublering, how many are close to each other. Messages among them have the price of the mesh
  // dimension "cp.neighbours", for a region along "cp".
  int neighbours = 2;
};

// While it lives, on this rank. It takes attention over queries that are cut along the length by its dimension of the mesh; where that has
// one rank, those that are whole along the length, plain ones too.
class ContextParallel final : public AttentionRegion {
 public:
  // `dim`: the dimension of `mesh` that cuts positions. Throws for a method or order that there is not, a dimension that the mesh does not
  // have, and neighbours that do not divide its ranks.
  ContextParallel(const DeviceMesh& mesh, const std::string& dim, ContextParallelOptions options = {});
  ~ContextParallel() override;  // compiled with the library, as all that is virtual

  // The documents of the next batches, before these are ordered: one list for all rows of the batch, or one for each. Without a call, one
  // document. Of a batch in microbatches, those of all its rows: a pipeline says which rows it is at, and so does a loop by dt::BatchRows.
  // Throws for several documents under a mask that does not go by documents: they would see each other.
  void pack(std::vector<PackedSequence> sequences);
  // One list for all rows of the batch, and which positions each rank has, instead of the region's order: any number of them, none too. For
  // the rounds of a SequencePlan.
  void pack(PackedSequence sequence, std::vector<context::Positions> rows);
  // How a tensor that order() gave lies along the region's dimension: cut along `dim`, as many positions to each rank as its rows say.
  Placement placement(int64_t dim, int64_t length) const;

  // A tensor with its positions, along `dim`, in the order in which ranks have them: plain, to be sharded along `dim` afterwards. For ids,
  // targets and all else that goes by position. Throws for a tensor that order() gave.
  at::Tensor order(const at::Tensor& x, int64_t dim = 1) { return order_.order(x, dim); }
  // Back again: of a whole plain tensor.
  at::Tensor restore(const at::Tensor& x, int64_t dim = 1) const { return order_.restore(x, dim); }
  at::Tensor positions(int64_t length) const override { return order_.of(length).order; }
  // That a batch was ordered, once, by the position numbers (int64) that went with it: torch::arange(length), put in order and distributed
  // like ids. Throws on every rank for a batch that was ordered twice, never, or otherwise. Gathers them.
  void check_positions(const at::Tensor& positions, int64_t dim = -1) const { order_.check(positions, dim); }

  // Whether the group of heads that shares a key head lies on one rank, so that keys and values need not be repeated.
  bool may_share_heads(const at::Tensor& q, int64_t key_heads) const override;
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double dropout,
                       double scale = 0) override;

 protected:
  bool takes(const Layout* layout) const override;
  void check_apart(const at::Tensor& q) const override;
  void check_table(const Layout& table) const override;
  c10::optional<at::Tensor> of_libtorchs(const AttentionArguments& arguments) override;
  void check_product(const Layout& left, const Layout& right) const override;

 private:
  void check_cuts(const Layout& layout) const;
  bool moves() const { return !order_.is_by_position() && mesh_.size() > 1; }
  bool cuts_positions(const Placement& placement, c10::IntArrayRef sizes) const;

  AttentionMask mask_of(bool causal) const {
    return options_.mask ? *options_.mask : causal ? AttentionMask::causal() : AttentionMask::full();
  }
  void check_documents(const std::vector<PackedSequence>& sequences) const;
  void say_without_documents(int64_t length) const;
  std::vector<PackedSequence> sequences_of(const at::Tensor& q) const;
  const ContextPlan& plan_of(const at::Tensor& q, bool causal);
  AttentionDropout dropout_of(const at::Tensor& q, double probability) const;

  const std::string dim_;
  const DeviceMesh mesh_;  // its ranks
  const ContextParallelOptions options_;
  mutable context::BatchOrder order_;  // remembers what it found
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace context::detail {

// The ranks of a mesh of one dimension, for a method that takes two, as `neighbours` in a row.
inline DeviceMesh mesh_for(const DeviceMesh& mesh, const ContextParallelOptions& options) {
  check_method(options.method);
  rows_by_name(options.order, AttentionMask::full(), PackedSequence(1), 1);
  const bool needs_two = options.method == "usp" || options.method == "doublering";
  const bool divides = options.neighbours >= 1 && mesh.size() % options.neighbours == 0;
  require(divides || !needs_two, "ContextParallel",
          "{} got {} neighbours of {} ranks; expected a divisor; hint: set .neighbours to one (--neighbours of examples/train), or take "
          "{}, which needs none",
          options.method, options.neighbours, mesh.size(), options.method == "usp" ? "ulysses" : "ring");
  const bool takes_two = needs_two || (options.method == "automatic" && divides && mesh.size() > options.neighbours);
  if (!takes_two) return mesh;
  return {mesh.device_type(),
          mesh.ranks(),
          {mesh.size() / options.neighbours, options.neighbours},
          {mesh.names()[0], mesh.names()[0] + ".neighbours"}};
}

// Of a dim, the indices that this rank has.
inline std::vector<int64_t> held(const at::Tensor& x, int64_t dim) {
  std::vector<int64_t> indices;
  const auto* layout = find_layout(x);
  if (layout && layout->is_absent()) return indices;
  const auto runs = layout ? layout->intervals(dim, layout->mesh().coordinate()) : Intervals{{0, x.size(dim)}};
  for (const auto& run : runs) append(indices, run);
  return indices;
}

}  // namespace context::detail

inline ContextParallel::ContextParallel(const DeviceMesh& mesh, const std::string& dim, ContextParallelOptions options)
    : AttentionRegion(mesh.world()),
      dim_(dim),
      mesh_(context::detail::mesh_for(mesh[dim], options)),
      options_(std::move(options)),
      order_(options_.order, mask_of(true), mesh_) {}

// A call of scaled_dot_product_attention. What the region cannot do, libtorch's own does on gathered keys, where that goes by the same
// positions and mask.
inline c10::optional<at::Tensor> ContextParallel::of_libtorchs(const AttentionArguments& arguments) {
  const bool plain = !arguments.mask.defined() && !arguments.asks_for_weights && arguments.k.size(2) == arguments.q.size(2);
  if (!moves() && !options_.mask && !plain) return {};
  require(
      plain, "ContextParallel",
      "scaled_dot_product_attention got a mask, or keys of another length, or is to give weights, where positions are cut; hint: give the "
      "region a .mask, or the contiguous order");
  return attention(arguments.q, arguments.k, arguments.v, arguments.causal, arguments.dropout, arguments.scale);
}

// Of scores that are written out: queries and keys are both cut along their positions. What follows goes by row, and knows no mask of the
// region.
inline void ContextParallel::check_product(const Layout& left, const Layout& right) const {
  if (!moves() && !options_.mask) return;
  const auto& names = left.mesh().names();
  const auto at = std::ranges::find(names, dim_) - names.begin();
  if (at == static_cast<int64_t>(names.size()) || left.mesh().size(at) == 1) return;
  const bool are_scores = left.placements()[at].is_shard(left.ndim() - 2) && right.placements()[at].is_shard(right.ndim() - 1);
  require(
      !are_scores, "ContextParallel",
      "attention is written out as products, as in torch::nn::MultiheadAttention: queries {} times keys {}. These go by row, and not by "
      "the region's {}; hint: call dtensor::nn::attention or torch::scaled_dot_product_attention, or take the contiguous order and no "
      ".mask",
      left.str(), right.str(), moves() ? "order" : "mask");
}

inline void ContextParallel::check_table(const Layout& table) const {
  require(!moves(), "ContextParallel", "positions of {} are to be in {} order; hint: work inside a dt::Spmd", table.str(), options_.order);
}

inline Placement ContextParallel::placement(int64_t dim, int64_t length) const {
  if (order_.given_rows().empty()) return shard(dim);
  std::vector<int64_t> counts;
  for (const auto& own : order_.of(length).rows) counts.push_back(static_cast<int64_t>(own.size()));
  return ragged_shard(dim, counts);
}

// Views may write the same cut with other shares, and that of one position as one of another dim of one element.
inline bool ContextParallel::cuts_positions(const Placement& placement, c10::IntArrayRef sizes) const {
  const auto length = sizes[2];
  if (!placement.is_shard() || placement.is_flat()) return false;
  if (placement.dim != 2 && (length != 1 || sizes[placement.dim] != 1)) return false;
  if (order_.given_rows().empty()) return placement == shard(placement.dim);
  const auto& rows = order_.of(length).rows;
  for (int64_t r = 0; r < mesh_.size(); ++r) {
    if (cut_length(length, placement, mesh_.size(), r) != static_cast<int64_t>(rows[r].size())) return false;
  }
  return true;
}

inline bool ContextParallel::takes(const Layout* layout) const {
  if (mesh_.size() == 1) {
    for (int64_t d = 0; layout && d < layout->mesh().ndim(); ++d) {
      const auto& placement = layout->placements()[d];
      if (layout->mesh().size(d) > 1 && (placement.is_flat() || placement.is_shard(2) || placement.is_shard(3))) return false;
    }
    return true;
  }
  if (!layout) return false;
  const auto& names = layout->mesh().names();
  const auto at = std::ranges::find(names, dim_) - names.begin();
  if (at == static_cast<int64_t>(names.size()) || layout->mesh().size(at) != mesh_.size()) return false;
  return cuts_positions(layout->placements()[at], layout->sizes());
}

// That each rank has whole heads of the positions that the region gives it.
inline void ContextParallel::check_cuts(const Layout& layout) const {
  for (int64_t d = 0; d < layout.mesh().ndim(); ++d) {
    const auto& placement = layout.placements()[d];
    const bool fits = placement.is_replicate() || placement.is_partial() || placement.is_shard(0) || placement.is_shard(1) ||
                      cuts_positions(placement, layout.sizes());
    require(fits || layout.mesh().size(d) == 1, "ContextParallel",
            "attention got {}; expected it cut along batch, heads and positions; hint: redistribute it", layout.str());
  }
}

// Rows in another order than positions have no place in attention that goes by rows, nor has a mask by positions.
inline void ContextParallel::check_apart(const at::Tensor& q) const {
  if (!moves() && !options_.mask) return;
  const auto* layout = find_layout(q);
  const bool meant = layout ? std::ranges::count(layout->mesh().names(), dim_) > 0 : order_.was_used(q.size(2)) && mesh_.size() > 1;
  if (!meant) return;
  const auto hint = order_.given_rows().empty() ? "shard ids along the positions" : "distribute ids by context.placement(dim, length)";
  fail("ContextParallel", "attention got {}, whose positions '{}' does not cut as the region does ({} order); hint: {}",
       layout ? layout->str() : "plain queries", dim_, order_.name(), hint);
}

inline bool ContextParallel::may_share_heads(const at::Tensor& q, int64_t key_heads) const {
  if (!is_dtensor(q)) return true;
  const auto& layout = *find_layout(q);
  for (int64_t d = 0, ranks = 1; d < layout.mesh().ndim(); ++d) {
    const auto& placement = layout.placements()[d];
    if (placement.is_replicate() || placement.is_shard(0) || cuts_positions(placement, layout.sizes())) continue;
    ranks *= layout.mesh().size(d);
    if (placement != shard(1) || key_heads % ranks != 0) return false;
  }
  return true;
}

inline void ContextParallel::pack(std::vector<PackedSequence> sequences) {
  check_documents(sequences);
  order_.pack(std::move(sequences), {});
}

inline void ContextParallel::pack(PackedSequence sequence, std::vector<context::Positions> rows) {
  check_documents({sequence});
  order_.pack({std::move(sequence)}, std::move(rows));
}

// A model asks for causal or full attention, which do not go by documents either.
inline void ContextParallel::check_documents(const std::vector<PackedSequence>& sequences) const {
  if (options_.mask && options_.mask->reads_documents()) return;
  const auto several = std::ranges::find_if(sequences, [](const PackedSequence& sequence) { return sequence.documents() > 1; });
  if (several == sequences.end()) return;
  fail("ContextParallel",
       "got {} documents, and {} does not go by documents: they would see each other; hint: give the region a mask that does, as "
       ".mask = dt::AttentionMask::causal_documents(), or pack dt::PackedSequence({})",
       several->documents(), options_.mask ? fmt::format("the mask {}", options_.mask->name()) : "attention without .mask",
       several->length());
}

inline void ContextParallel::say_without_documents(int64_t length) const {
  const bool misses = options_.mask && options_.mask->reads_documents() && !options_.mask->predicate() && order_.sequences().empty();
  if (!misses || mesh_.world().rank() != mesh_.ranks()[0]) return;
  static std::once_flag said;
  std::call_once(said, [&] {
    detail::say(
        "dtensor: the mask {} of a ContextParallel goes by documents, and pack() gave it none: all {} positions count as one (said once); "
        "hint: context.pack() before order(), or pack dt::PackedSequence({}) where there is one\n",
        options_.mask->name(), length, length);
  });
}

// Those of the rows of the batch, or of the microbatch, that this rank has.
inline std::vector<PackedSequence> ContextParallel::sequences_of(const at::Tensor& q) const {
  const auto& all = order_.sequences();
  if (all.empty()) return {PackedSequence(q.size(2))};
  if (all.size() == 1) return all;
  const auto batch = static_cast<int64_t>(all.size());
  const auto rows = q.size(0) == batch ? Interval{0, batch} : BatchRows::current().value_or(Interval{});
  require(rows.length() == q.size(0) && 0 <= rows.begin && rows.end <= batch, "ContextParallel",
          "got documents of {} rows and a batch of {}; hint: of a microbatch, say which rows it has by dt::BatchRows", batch, q.size(0));
  std::vector<PackedSequence> own;
  for (const auto row : context::detail::held(q, 0)) own.push_back(all[rows.begin + row]);
  return own.empty() ? std::vector{all[0]} : own;
}

inline const ContextPlan& ContextParallel::plan_of(const at::Tensor& q, bool causal) {
  auto& known = order_.of(q.size(2));
  const auto mask = mask_of(causal);
  const auto* layout = find_layout(q);
  const auto rows = BatchRows::current().value_or(Interval{});
  auto& plan = known.plans[fmt::format("{} {} {} {}", mask.name(), q.size(0), rows.begin, layout ? str(layout->placements()) : "")];
  if (!plan) {
    say_without_documents(q.size(2));
    plan = std::make_shared<const ContextPlan>(mask, sequences_of(q), known.rows);
  }
  return *plan;
}

inline AttentionDropout ContextParallel::dropout_of(const at::Tensor& q, double probability) const {
  if (probability == 0) return {};
  const auto seed = draw_dropout_seed(is_dtensor(q) ? find_layout(q)->mesh() : mesh_);
  return {probability, seed, context::detail::held(q, 0), context::detail::held(q, 1)};
}

inline at::Tensor ContextParallel::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double dropout,
                                             double scale) {
  require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(2) == q.size(2) && v.size(2) == q.size(2), "ContextParallel",
          "attention got q {}, k {} and v {}; expected [batch, heads, length, dim] of one length: those of one sequence",
          detail::str_of(q.sizes()), detail::str_of(k.sizes()), detail::str_of(v.sizes()));
  require(!moves() || order_.was_used(q.size(2)), "ContextParallel",
          "positions are to be in {} order, and no batch of {} positions was ordered; hint: give ids and targets to order() before they "
          "are distributed",
          order_.name(), q.size(2));
  const auto heads = q.size(1), key_heads = k.size(1);
  require(key_heads > 0 && heads % key_heads == 0, "ContextParallel", "got {} heads and {} key heads; expected a multiple of these", heads,
          key_heads);
  if (key_heads < heads && !may_share_heads(q, key_heads)) {
    const auto repeated = [&](const at::Tensor& x) { return x.repeat_interleave(heads / key_heads, 1); };
    return attention(q, repeated(k), repeated(v), causal, dropout, scale);
  }
  const auto& plan = plan_of(q, causal);
  const auto dropped = dropout_of(q, dropout);
  const auto run = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return context_attention(a, b, c, plan, mesh_, {.method = options_.method, .scale = scale, .dropout = dropped});
  };
  if (!is_dtensor(q)) return run(q, k, v);
  const auto& layout = *find_layout(q);
  check_cuts(layout);
  auto placements = without_partial(layout.placements());
  for (size_t d = 0; d < placements.size(); ++d) {
    if (!cuts_positions(placements[d], layout.sizes())) continue;
    if (layout.mesh().names()[d] == dim_) placements[d].dim = 2;
    else placements[d] = replicate();  // each rank of the region has its rows whole
  }
  LocalMapOptions options;
  options.out_sizes = {layout.sizes().vec()};
  const Placements all(placements.begin(), placements.end());
  return local_map(run, layout.mesh(), {all, all, all}, {all}, options)(q, k, v);
}

}  // namespace dtensor

#pragma GCC visibility pop
