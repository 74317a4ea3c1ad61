// Answers to one prompt, packed so that the prompt goes through a model once, and not once for each of them.
//
//   const auto shared = rl::share_prompts(ids, {lengths, prompt_lengths, prompt_numbers});       // ids [batch, time]
//   const auto logits = shared.scores_of([&](auto& ids) { return model->forward(ids); });         // [1, answer tokens, vocabulary]
//   auto logp = shared.unpack(rl::token_statistics(logits, shared.targets).logp);                 // [batch, time - 1]
#pragma once

#include <dtensor/rl/pack.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// Of each row of a batch: its tokens, those of its prompt, with which it begins, and a number that rows with the same prompt share. Whole,
// and the same on all ranks.
struct RowPrompts {
  std::vector<int64_t> lengths, prompt_lengths, numbers;
};

// Each rank shares the prompts of its own rows. Tensors are plain, or lie as the batch did.
struct SharedPrompts {
  Packed packed;       // what the model gets: of each row the prompt, if it is the first with it, and the answer but for its last token
  at::Tensor targets;  // [1, answer tokens], in the dtype of the ids: those of the answers, row after row
  std::vector<int64_t> answers;         // tokens of each row's answer
  at::Tensor sources{}, destinations{}; // of this rank's answer tokens: the packed token before, and the place in its rows; plain, int64

  // What `forward` (ids [1, tokens] -> [1, tokens, ...], or of scored rows alone) says before each of the answers' tokens, for models as
  // PackedRows takes them: [1, answer tokens, ...].
  template <class Forward>
  at::Tensor scores_of(Forward forward) const;
  // Of the packed tokens those before the answers' tokens: [1, tokens, ...] -> [1, answer tokens, ...]. Differentiable; communicates
  // nothing.
  at::Tensor scored(const at::Tensor& x) const;
  // [1, answer tokens, ...] -> [batch, time - 1, ...], where the prompts and padding have `fill`. Differentiable; communicates nothing.
  at::Tensor unpack(const at::Tensor& x, double fill = 0) const;
};

// `ids` as pack() takes them, padded on the right. Communicates nothing. Throws where rows of a number have other prompts, for rows without
// a prompt, and for a batch without answers.
SharedPrompts share_prompts(const at::Tensor& ids, const RowPrompts& rows);

// PackedRows of them, in which the head of a model scores no more than what is wanted.
class SharedPromptRows final : public PackedRows {
 public:
  explicit SharedPromptRows(const SharedPrompts& shared) : PackedRows(shared.packed), shared_(shared) {}
  ~SharedPromptRows() override;

  at::Tensor scored_rows(const at::Tensor& x) override;
  // Those of a model's scores that are wanted, which are all if it has asked for them.
  at::Tensor scored(const at::Tensor& scores) const { return has_asked_ ? scores : shared_.scored(scores); }

 private:
  const SharedPrompts& shared_;
  bool has_asked_ = false;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline constexpr const char* kShare = "rl::share_prompts";

inline void check_prompts(const at::Tensor& ids, const RowPrompts& rows) {
  require(ids.defined() && ids.dim() == 2, kShare, "got {} for ids; expected [batch, time]", shape_of(ids));
  const auto batch = static_cast<size_t>(ids.size(0));
  require(rows.lengths.size() == batch && rows.prompt_lengths.size() == batch && rows.numbers.size() == batch, kShare,
          "got {} lengths, {} of prompts and {} numbers of {} rows", rows.lengths.size(), rows.prompt_lengths.size(), rows.numbers.size(),
          batch);
  bool any = false;
  for (size_t b = 0; b < batch; ++b) {
    require(0 < rows.prompt_lengths[b] && rows.prompt_lengths[b] <= rows.lengths[b] && rows.lengths[b] <= ids.size(1), kShare,
            "row {} has {} tokens, of which {} are its prompt's; expected 1 or more, of at most {}", b, rows.lengths[b],
            rows.prompt_lengths[b], ids.size(1));
    any |= rows.prompt_lengths[b] < rows.lengths[b];
  }
  require(any, kShare, "the batch has no answers");
}

// Of each row, the first one on its rank that has the same prompt.
inline Rows first_rows(const at::Tensor& ids, const RowPrompts& rows) {
  Rows first(rows.numbers.size());
  const auto* layout = find_layout(ids);
  const auto dims = layout ? dims_that_cut_rows(*layout) : std::vector<int64_t>();
  for (const auto& run : dims.empty() ? std::vector{Interval{0, ids.size(0)}} : rows_of_places(*layout, dims[0])) {
    std::map<int64_t, int64_t> of;
    for (auto row = run.begin; row < run.end; ++row) {
      first[row] = of.emplace(rows.numbers[row], row).first->second;
      require(rows.prompt_lengths[first[row]] == rows.prompt_lengths[row], kShare,
              "rows {} and {} have prompt {}, with {} and {} tokens; expected the same", first[row], row, rows.numbers[row],
              rows.prompt_lengths[first[row]], rows.prompt_lengths[row]);
    }
  }
  return first;
}

// That the own rows with one number have one prompt, where the device need not be waited for.
inline void check_same_prompts(const at::Tensor& ids, const RowPrompts& rows, const Rows& first) {
  const NoSpmd plain;
  const auto local = (is_dtensor(ids) ? DTensor(ids).to_local() : ids).contiguous();
  if (!local.is_cpu() || local.scalar_type() != at::kLong) return;
  const auto own = own_rows(ids);
  const auto tokens_of = [&](int64_t row) { return local.data_ptr<int64_t>() + (row - own.begin) * local.size(1); };
  for (auto row = own.begin; row < own.end; ++row) {
    require(std::equal(tokens_of(row), tokens_of(row) + rows.prompt_lengths[row], tokens_of(first[row])), kShare,
            "rows {} and {} have prompt {}, with other tokens; expected the same; hint: other numbers for other prompts", first[row], row,
            rows.numbers[row]);
  }
}

// Packed, with prompts that are seen by later rows.
inline Packed packed_prompts(const at::Tensor& ids, const RowPrompts& rows, const Rows& first) {
  const auto batch = static_cast<int64_t>(first.size());
  std::vector<int64_t> lengths(batch), begins(batch);
  Rows places, token(batch);
  std::vector<Interval> shared(batch);
  int64_t next = 0;
  for (int64_t b = 0; b < batch; ++b) {
    begins[b] = first[b] == b ? 0 : rows.prompt_lengths[b];
    lengths[b] = std::max(rows.prompt_lengths[b], rows.lengths[b] - 1) - begins[b];
    token[b] = next;
    if (first[b] != b) shared[b] = {token[first[b]], token[first[b]] + rows.prompt_lengths[b]};
    for (int64_t t = 0; t < lengths[b]; ++t) places.push_back(begins[b] + t);
    next += lengths[b];
  }
  auto packed = pack(ids, lengths, begins);
  packed.positions = index_of(places);
  packed.shared = std::move(shared);
  return packed;
}

// Calls f(row, t, packed token) for the own tokens that come before those of answers: token t of a row, counted on this rank.
template <class F>
void for_each_scored(const Packed& packed, const RowPrompts& rows, const F& f) {
  const auto own = own_rows(packed.like);
  int64_t next = 0;
  const auto before = sum_of(packed.lengths, {0, own.begin});
  for (auto row = own.begin; row < own.end; ++row) {
    const auto& shared = packed.shared[row];
    for (auto t = rows.prompt_lengths[row] - 1; t + 1 < rows.lengths[row]; ++t) {
      f(row - own.begin, t, t < packed.begins[row] ? shared.begin + t - before : next + t - packed.begins[row]);
    }
    next += packed.lengths[row];
  }
}

// The placements of x [1, tokens, ...], with its tokens as `tokens` says.
inline Placements with_tokens(const at::Tensor& x, const Placements& tokens) {
  auto placements = tokens;
  const auto* layout = find_layout(x);
  for (size_t d = 0; layout && d < placements.size(); ++d) {
    const auto& own = layout->placements()[static_cast<int64_t>(d)];
    if (placements[d].is_replicate() && own.is_shard() && own.dim > 1) placements[d] = own;
  }
  return placements;
}

}  // namespace detail

inline SharedPrompts share_prompts(const at::Tensor& ids, const RowPrompts& rows) {
  detail::check_prompts(ids, rows);
  const auto first = detail::first_rows(ids, rows);
  detail::check_same_prompts(ids, rows, first);
  SharedPrompts made;
  made.packed = detail::packed_prompts(ids, rows, first);
  for (size_t b = 0; b < first.size(); ++b) made.answers.push_back(rows.lengths[b] - rows.prompt_lengths[b]);
  Rows sources, destinations, targets;
  const auto time = ids.size(1);
  detail::for_each_scored(made.packed, rows, [&](int64_t row, int64_t t, int64_t token) {
    sources.push_back(token);
    destinations.push_back(row * (time - 1) + t);
    targets.push_back(row * time + t + 1);
  });
  made.sources = detail::index_of(sources);
  made.destinations = detail::index_of(destinations);
  const auto take = [&, places = detail::index_of(targets)](const at::Tensor& own) { return detail::pack_own(own, places); };
  const auto* layout = find_layout(ids);
  if (!layout) {
    made.targets = take(ids);
    return made;
  }
  const auto count = std::accumulate(made.answers.begin(), made.answers.end(), int64_t{0});
  made.targets = detail::on_own(ids, *layout, detail::row_placements(*layout), detail::packed_placements(made.answers, *layout), {1, count},
                                take);
  return made;
}

inline at::Tensor SharedPrompts::scored(const at::Tensor& x) const {
  require(x.defined() && x.dim() >= 2 && x.size(0) == 1 && x.size(1) == packed.tokens(), detail::kShare,
          "got {} of a model; expected [1, {}, ...], of the packed tokens", detail::shape_of(x), packed.tokens());
  const auto take = [&](const at::Tensor& own) { return own.index_select(1, sources.to(own.device())); };
  const auto* layout = find_layout(packed.like);
  if (!layout) return take(x);
  auto sizes = x.sizes().vec();
  sizes[1] = targets.size(1);
  const auto from = detail::with_tokens(x, detail::packed_placements(packed.lengths, *layout));
  const auto to = detail::with_tokens(x, detail::packed_placements(answers, *layout));
  return detail::on_own(x, *layout, from, to, std::move(sizes), take);
}

inline at::Tensor SharedPrompts::unpack(const at::Tensor& x, double fill) const {
  require(x.defined() && x.dim() >= 2 && x.size(0) == 1 && x.size(1) == targets.size(1), detail::kShare,
          "got {} to unpack; expected [1, {}, ...], of the answers' tokens", detail::shape_of(x), targets.size(1));
  const auto rows = detail::own_rows(packed.like).length(), time = packed.sizes[1] - 1;
  const auto put = [&](const at::Tensor& own) { return detail::unpack_own(own, destinations, rows, time, fill); };
  const auto* layout = find_layout(packed.like);
  if (!layout) return put(x);
  auto sizes = x.sizes().vec();
  sizes[0] = packed.sizes[0];
  sizes[1] = time;
  return detail::on_own(x, *layout, detail::packed_placements(answers, *layout), detail::row_placements(*layout), std::move(sizes), put);
}

template <class Forward>
at::Tensor SharedPrompts::scores_of(Forward forward) const {
  const SharedPromptRows region(*this);
  return region.scored(forward(packed.ids));
}

inline at::Tensor SharedPromptRows::scored_rows(const at::Tensor& x) {
  has_asked_ = true;
  return shared_.scored(x);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
