// Sequences of different lengths as one row without padding, and back.
//
//   const auto packed = rl::pack(ids, lengths);                  // ids [batch, time] -> packed.ids [1, tokens]
//   const rl::PackedRows region(packed);                         // the model attends within sequences, and knows their positions
//   auto logits = model->forward(packed.ids);                    // [1, tokens, vocabulary]
//   auto logp = packed.unpack(rl::token_statistics(logits, packed.targets).logp);   // [batch, time]: of the token after each
#pragma once

#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/rl/rows.hpp>
#include <dtensor/tensor/decoding.hpp>

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <map>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Tensors are plain, or lie as the batch did: where a mesh dimension cut its rows, it cuts tokens between the same sequences.
struct Packed {
  at::Tensor ids;      // [1, tokens], in the dtype that they had
  at::Tensor targets;  // the token after each in its sequence; 0 for the last one, which has none
  // Plain and whole, int64 [tokens]: places in the own sequence, and numbers of sequences.
  at::Tensor positions, documents;
  std::vector<int64_t> lengths, begins;  // of each sequence, and where it begins in its row
  std::vector<Interval> shared{};        // of each, packed tokens before it that it sees too, as an answer sees its prompt; empty: none
  std::vector<int64_t> sizes;            // of the batch: batch, time
  at::Tensor like;                       // how the batch lies: the ids that were packed

  int64_t tokens() const { return positions.size(0); }
  // [batch, time, ...] -> [1, tokens, ...], and back with `fill` where the batch has padding. Differentiable; communicate nothing. x lies
  // as the batch does, or as a model's results for packed ids do. Throw for other sizes.
  at::Tensor pack(const at::Tensor& x) const;
  at::Tensor unpack(const at::Tensor& x, double fill = 0) const;
};

// `ids`, integers [batch, time], plain or a DTensor whose rows one mesh dimension cuts. The tokens of row b are those from begins[b]
// (0 unless given: padding on the right) on, lengths[b] of them; a sequence may be empty. Both lists are whole, the same on all ranks.
// Communicates nothing. Throws for lists that do not fit, a batch without tokens, and ids whose time is cut.
Packed pack(const at::Tensor& ids, const std::vector<int64_t>& lengths, const std::vector<int64_t>& begins = {});

// While it lives, models on this rank that are built of dtensor/nn, or call libtorch's scaled_dot_product_attention, take rows as packed
// sequences: attention stays within one, and positions begin anew in each. Batch rows may be cut over ranks, and heads. Backward passes may
// come after it has ended, but those of dt::checkpoint, which run the model again.
class PackedRows : public Decoding {
 public:
  explicit PackedRows(const Packed& packed)
      : Decoding(World::current()), packed_(packed), alone_(c10::kCPU, {World::current().rank()}, {1}, {"packed"}) {}
  ~PackedRows() override;  // compiled with the library, as all that is virtual

  at::Tensor positions(int64_t rows, int64_t limit) override;
  bool shares_heads(const at::Tensor&, int64_t) override { return false; }
  at::Tensor attention(const AttentionArguments& arguments) override;
  at::Tensor scored_rows(const at::Tensor& x) override { return x; }

 protected:
  const Packed packed_;

 private:
  const ContextPlan& plan_of(Interval tokens, bool causal);

  const DeviceMesh alone_;
  std::map<std::tuple<int64_t, int64_t, bool>, std::shared_ptr<const ContextPlan>> plans_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kPack = "rl::pack";

// The rows of a batch that this rank has.
inline Interval own_rows(const at::Tensor& like) {
  const auto* layout = find_layout(like);
  if (!layout) return {0, like.size(0)};
  const auto runs = layout->intervals(0, layout->mesh().coordinate());
  require(runs.size() <= 1, kPack, "the rows of a rank do not follow each other; got {}", layout->str());
  return runs.empty() ? Interval{0, 0} : runs[0];
}

inline int64_t sum_of(const std::vector<int64_t>& lengths, Interval rows) {
  return std::accumulate(lengths.begin() + rows.begin, lengths.begin() + rows.end, int64_t{0});
}

inline Interval moved(const Interval& run, int64_t by) {
  return run.length() == 0 ? Interval{0, 0} : Interval{run.begin + by, run.end + by};
}

// Where this rank's tokens lie in its rows, flat: int64 [own tokens].
inline at::Tensor places_of(const Packed& packed) {
  const auto rows = own_rows(packed.like);
  Rows places;
  for (auto row = rows.begin; row < rows.end; ++row) {
    for (int64_t t = 0; t < packed.lengths[row]; ++t) places.push_back((row - rows.begin) * packed.sizes[1] + packed.begins[row] + t);
  }
  return index_of(places);
}

// The rows that each place along a mesh dimension has.
inline std::vector<Interval> rows_of_places(const Layout& layout, int64_t dim) {
  auto coordinate = layout.mesh().coordinate().vec();
  std::vector<Interval> rows;
  for (int64_t p = 0; p < layout.mesh().size(dim); ++p) {
    coordinate[dim] = p;
    const auto runs = layout.intervals(0, coordinate);
    rows.push_back(runs.empty() ? Interval{0, 0} : runs[0]);
  }
  return rows;
}

// How tokens lie of which each row has some: cut between sequences where rows are.
inline Placements packed_placements(const std::vector<int64_t>& lengths, const Layout& layout) {
  Placements placements(layout.mesh().ndim(), replicate());
  for (const auto dim : dims_that_cut_rows(layout)) {
    std::vector<int64_t> counts;
    for (const auto& rows : rows_of_places(layout, dim)) counts.push_back(sum_of(lengths, rows));
    placements[dim] = ragged_shard(1, counts);
  }
  return placements;
}

inline Placements row_placements(const Layout& layout) {
  Placements placements(layout.mesh().ndim(), replicate());
  for (const auto dim : dims_that_cut_rows(layout)) placements[dim] = layout.placements()[dim];
  return placements;
}

// A local function of x, whose result has other placements and sizes.
template <class F>
at::Tensor on_own(const at::Tensor& x, const Layout& layout, const Placements& from, const Placements& to, std::vector<int64_t> sizes,
                  F f) {
  LocalMapOptions options;
  options.out_sizes = {std::move(sizes)};
  return local_map(f, layout.mesh(), {from}, {to}, options)(is_dtensor(x) ? x : distribute_tensor(x, layout.mesh(), from).tensor());
}

inline at::Tensor pack_own(const at::Tensor& x, const at::Tensor& places) {
  const NoSpmd plain;
  return x.flatten(0, 1).index_select(0, places.to(x.device())).unsqueeze(0);
}

inline at::Tensor unpack_own(const at::Tensor& x, const at::Tensor& places, int64_t rows, int64_t time, double fill) {
  const NoSpmd plain;
  auto sizes = x.sizes().vec();
  sizes.erase(sizes.begin());
  sizes[0] = rows * time;
  const auto flat = at::full(sizes, fill, x.options()).index_copy(0, places.to(x.device()), x.squeeze(0));
  sizes[0] = time;
  sizes.insert(sizes.begin(), rows);
  return flat.view(sizes);
}

// Of one row of packed tokens, the next ones in the own sequences.
inline at::Tensor next_tokens(const at::Tensor& ids, const Packed& packed) {
  const NoSpmd plain;
  const auto rows = own_rows(packed.like);
  Rows last;
  int64_t end = 0;
  for (auto row = rows.begin; row < rows.end; ++row) {
    end += packed.lengths[row];
    if (packed.lengths[row] > 0) last.push_back(end - 1);
  }
  return at::cat({ids.slice(1, 1), ids.slice(1, 0, 1)}, 1).index_fill_(1, index_of(last).to(ids.device()), 0);
}

inline void check_sequences(const at::Tensor& ids, const std::vector<int64_t>& lengths, const std::vector<int64_t>& begins) {
  require(ids.defined() && ids.dim() == 2, kPack, "got {} for ids; expected [batch, time]", shape_of(ids));
  const auto batch = static_cast<size_t>(ids.size(0));
  require(lengths.size() == batch && begins.size() == batch, kPack, "got {} lengths and {} begins of {} rows", lengths.size(),
          begins.size(), batch);
  for (size_t b = 0; b < batch; ++b) {
    require(lengths[b] >= 0 && begins[b] >= 0 && begins[b] + lengths[b] <= ids.size(1), kPack,
            "sequence {} has {} tokens from {} on; expected them within {}", b, lengths[b], begins[b], ids.size(1));
  }
  require(std::ranges::any_of(lengths, [](int64_t length) { return length > 0; }), kPack, "the batch has no tokens");
  const auto* layout = find_layout(ids);
  if (!layout) return;
  const bool fits = dims_that_cut_rows(*layout).size() <= 1 &&
                    std::ranges::all_of(layout->placements(), [](const Placement& p) { return p.is_replicate() || p.is_shard(0); });
  require(fits, kPack, "ids are {}; expected rows that one mesh dimension cuts, and whole time; hint: redistribute them", layout->str());
}

}  // namespace detail

inline Packed pack(const at::Tensor& ids, const std::vector<int64_t>& lengths, const std::vector<int64_t>& begins) {
  Packed packed;
  packed.lengths = lengths;
  packed.begins = begins.empty() ? std::vector<int64_t>(lengths.size()) : begins;
  detail::check_sequences(ids, packed.lengths, packed.begins);
  packed.sizes = ids.sizes().vec();
  packed.like = ids.detach();
  Rows places, numbers;
  for (size_t b = 0; b < lengths.size(); ++b) {
    for (int64_t t = 0; t < lengths[b]; ++t) places.push_back(t), numbers.push_back(static_cast<int64_t>(b));
  }
  packed.positions = detail::index_of(places);
  packed.documents = detail::index_of(numbers);
  packed.ids = packed.pack(packed.like);
  const auto next = [&](const at::Tensor& own) { return detail::next_tokens(own, packed); };
  if (const auto* layout = find_layout(packed.ids)) {
    const Placements as(layout->placements().begin(), layout->placements().end());
    packed.targets = detail::on_own(packed.ids, *layout, as, as, packed.ids.sizes().vec(), next);
  } else {
    packed.targets = next(packed.ids);
  }
  return packed;
}

inline at::Tensor Packed::pack(const at::Tensor& x) const {
  require(x.defined() && x.dim() >= 2 && x.size(0) == sizes[0] && x.size(1) == sizes[1], detail::kPack,
          "got {} to pack; expected [{}, {}, ...]", detail::shape_of(x), sizes[0], sizes[1]);
  const auto* layout = find_layout(like);
  if (!layout) return detail::pack_own(x, detail::places_of(*this));
  auto packed_sizes = x.sizes().vec();
  packed_sizes[0] = 1;
  packed_sizes[1] = tokens();
  const auto f = [&](const at::Tensor& own) { return detail::pack_own(own, detail::places_of(*this)); };
  return detail::on_own(x, *layout, detail::row_placements(*layout), detail::packed_placements(lengths, *layout), packed_sizes, f);
}

inline at::Tensor Packed::unpack(const at::Tensor& x, double fill) const {
  require(x.defined() && x.dim() >= 2 && x.size(0) == 1 && x.size(1) == tokens(), detail::kPack, "got {} to unpack; expected [1, {}, ...]",
          detail::shape_of(x), tokens());
  const auto rows = detail::own_rows(like);
  const auto f = [&](const at::Tensor& own) { return detail::unpack_own(own, detail::places_of(*this), rows.length(), sizes[1], fill); };
  const auto* layout = find_layout(like);
  if (!layout) return f(x);
  auto unpacked_sizes = x.sizes().vec();
  std::copy(sizes.begin(), sizes.end(), unpacked_sizes.begin());
  return detail::on_own(x, *layout, detail::packed_placements(lengths, *layout), detail::row_placements(*layout), unpacked_sizes, f);
}

inline at::Tensor PackedRows::positions(int64_t rows, int64_t limit) {
  require(rows == packed_.tokens(), detail::kPack, "the model runs on {} rows; expected the {} packed tokens", rows, packed_.tokens());
  if (limit > 0) {
    const NoSpmd plain;
    const auto longest = packed_.positions.max().item<int64_t>() + 1;
    require(longest <= limit, detail::kPack, "a sequence of {} is longer than the model's {} positions", longest, limit);
  }
  return packed_.positions;
}

inline const ContextPlan& PackedRows::plan_of(Interval tokens, bool causal) {
  auto& plan = plans_[{tokens.begin, tokens.end, causal}];
  if (plan) return *plan;
  std::vector<int64_t> lengths;
  std::vector<Interval> shared;
  int64_t at = 0;
  for (size_t b = 0; b < packed_.lengths.size(); ++b) {
    const auto length = packed_.lengths[b];
    if (length > 0 && at >= tokens.begin && at + length <= tokens.end) {
      lengths.push_back(length);
      if (!packed_.shared.empty()) shared.push_back(detail::moved(packed_.shared[b], -tokens.begin));
    }
    at += length;
  }
  const auto sum = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  require(sum == tokens.length(), detail::kPack, "tokens {} to {} are cut within a sequence; hint: lay x out as packed.ids", tokens.begin,
          tokens.end);
  require(causal || shared.empty(), detail::kPack, "attention is not causal, and answers share their prompts; expected causal attention");
  const auto mask = !shared.empty() ? AttentionMask::shared_runs(shared)
                    : causal        ? AttentionMask::causal_documents()
                                    : AttentionMask::documents();
  return *(plan = std::make_shared<const ContextPlan>(mask, std::vector{PackedSequence(lengths)}, context::contiguous_order(sum, 1)));
}

inline at::Tensor PackedRows::attention(const AttentionArguments& arguments) {
  const auto& [q, k, v, mask, dropout, causal, scale, asks] = arguments;
  require(!mask.defined() && !asks && dropout == 0, detail::kPack,
          "attention got a mask or dropout, or is to give weights, on packed rows; expected none of these");
  require(q.dim() == 4 && q.size(0) == 1 && q.size(2) == packed_.tokens() && k.size(2) == q.size(2), detail::kPack,
          "attention got q {} and k {}; expected [1, heads, {}, dim]", detail::shape_of(q), detail::shape_of(k), packed_.tokens());
  auto tokens = Interval{0, q.size(2)};
  const auto* layout = find_layout(q);
  if (layout) {
    const auto runs = layout->intervals(2, layout->mesh().coordinate());
    tokens = runs.empty() ? Interval{0, 0} : runs[0];
  }
  const auto run = [&, causal = causal, scale = scale](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    if (a.numel() == 0) return a.mul(1);  // a rank without sequences
    return context_attention(a, b, c, plan_of(tokens, causal), alone_, {.scale = scale});
  };
  if (!layout) return run(q, k, v);
  Placements as(layout->placements().begin(), layout->placements().end());
  for (auto& placement : as) {
    if (placement.is_partial() || placement.is_shard(3)) placement = replicate();
  }
  LocalMapOptions options;
  options.out_sizes = {q.sizes().vec()};
  return local_map(run, layout->mesh(), {as, as, as}, {as}, options)(q, k, v);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
