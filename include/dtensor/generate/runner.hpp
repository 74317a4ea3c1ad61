// A model as a decoder runs it: rows of tokens in, scores out. It keeps the pages.
#pragma once

#include <dtensor/base/error_text.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/collectives.hpp>
#include <dtensor/generate/sampling.hpp>
#include <dtensor/generate/step.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>
#include <optional>
#include <span>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// Ids int64 [1, length] -> scores [1, length, vocabulary], or those of nn::scored_rows. Inside Spmd on a mesh, with replicated ids.
using Forward = std::function<at::Tensor(const at::Tensor& ids)>;

class Runner {
 public:
  // Finds out what the model's layers keep, by four small passes. Where their attention does not take part in a decoder's passes, or the
  // results are not those of the model's own, everything is computed anew for each token: slow, but right. Rank 0 says so, once. On a mesh
  // every rank calls it.
  Runner(Forward forward, std::optional<DeviceMesh> mesh);

  int64_t vocabulary() const { return vocabulary_; }
  const std::optional<DeviceMesh>& mesh() const { return mesh_; }
  int64_t positions() const { return positions_; }  // how many the model has; 0: any number
  // Whether keys and values are kept; if not, why.
  bool pages() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  // On this rank, and the most of any rank.
  int64_t bytes_of_block() const { return bytes_of_block_; }

  // Makes room for so many blocks.
  void allocate(int64_t blocks);
  void copy(const std::vector<std::pair<Block, Block>>& copies) const;
  void copy_place(const Block* table, int64_t from, int64_t to) const;

  // Scores [scored rows, vocabulary] of a pass, plain, on the CPU. `before`: of each span the tokens before its rows. Where spans are
  // computed one by one, `failed` is called in a catch block for one that cannot be, whose scores are then 0; without it that throws.
  using Failed = std::function<void(size_t span)>;
  at::Tensor run(const StepRows& rows, const std::vector<std::span<const int64_t>>& before, const Failed& failed = {}) const;
  // Says that the model has other weights. The first 16 times, and each 16th time after that, it tries again whether the model takes keys
  // and values from pages; where it does not, nothing is kept from now on. On a mesh every rank calls it.
  void weights_changed();
  int64_t passes() const { return passes_; }

 private:
  at::Tensor forward(const Tokens& ids) const;
  at::Tensor recompute(const StepRows& rows, const std::vector<std::span<const int64_t>>& before, const Failed& failed) const;
  at::Tensor run_padded(const StepRows& rows) const;
  std::string measure();
  std::string compare(const at::Tensor& expected);
  std::pair<at::Tensor, at::Tensor> over_pages();
  void say_why_not() const;

  const Forward forward_;
  const std::optional<DeviceMesh> mesh_;
  World& world_;
  int64_t vocabulary_ = 0, positions_ = 0, bytes_of_block_ = 0;
  std::vector<LayerShape> shapes_;
  mutable HeadPlacements heads_;
  std::vector<Pages> layers_;
  std::string why_not_;
  c10::ScalarType scores_dtype_ = c10::kFloat;
  mutable int64_t passes_ = 0;
  int64_t changes_of_weights_ = 0;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// What a model is tried with.
inline const Tokens kTried{0, 1, 1, 0, 1};

template <class T>
std::span<const T> row_of(const at::Tensor& rows, int64_t row) {
  return {rows.data_ptr<T>() + row * rows.size(1), static_cast<size_t>(rows.size(1))};
}

inline Distribution distribution_of(const at::Tensor& scores, int64_t row, std::span<const int64_t> tokens, int64_t prompt,
                                    const Settings& settings) {
  if (scores.scalar_type() == at::kDouble) return {row_of<double>(scores, row), settings, tokens, prompt};
  return {row_of<float>(scores, row), settings, tokens, prompt};
}

// The token that a draw from it gives.
inline int64_t token_of(const at::Tensor& scores, int64_t row, std::span<const int64_t> tokens, int64_t prompt, const Settings& settings,
                        double uniform) {
  if (scores.scalar_type() == at::kDouble) return draw_token(row_of<double>(scores, row), settings, tokens, prompt, uniform);
  return draw_token(row_of<float>(scores, row), settings, tokens, prompt, uniform);
}

inline double value_at(const at::Tensor& rows, int64_t row, int64_t column) {
  return rows.scalar_type() == at::kDouble ? row_of<double>(rows, row)[column] : row_of<float>(rows, row)[column];
}

}  // namespace detail

inline Runner::Runner(Forward forward, std::optional<DeviceMesh> mesh)
    : forward_(std::move(forward)), mesh_(std::move(mesh)), world_(mesh_ ? mesh_->world() : World::current()) {
  const auto expected = this->forward(detail::kTried);
  vocabulary_ = expected.size(1);
  scores_dtype_ = expected.scalar_type();
  why_not_ = measure();
  if (why_not_.empty()) why_not_ = compare(expected);
  passes_ = 0;
  say_why_not();
}

inline void Runner::say_why_not() const {
  if (pages() || world_.rank() != 0) return;
  dtensor::detail::say("generate: keys and values are not kept, so everything is computed anew for each token: {}\n", why_not_);
}

inline void Runner::weights_changed() {
  constexpr int64_t kEvery = 16;  // a try costs as much as a few tokens
  const auto changes = ++changes_of_weights_;
  if (!pages() || (changes > kEvery && changes % kEvery != 0)) return;
  const auto passes = passes_;
  why_not_ = compare(forward(detail::kTried));
  passes_ = passes;
  if (pages()) return;
  layers_.clear();
  say_why_not();
}

inline at::Tensor Runner::forward(const Tokens& ids) const {
  ++passes_;
  const at::NoGradGuard no_grad;
  auto input = detail::plain_tensor(ids).unsqueeze(0);
  at::Tensor scores;
  if (mesh_) {
    const Spmd spmd(*mesh_);
    const Placements whole(mesh_->ndim(), replicate());
    const auto sizes = input.sizes().vec();
    input = from_local(input, *mesh_, whole, sizes);
    scores = forward_(input);
  } else {
    scores = forward_(input);
  }
  const NoSpmd plain;
  if (is_dtensor(scores)) scores = DTensor(scores).full_tensor();
  const bool fits = scores.dim() == 3 && scores.size(0) == 1;
  require(fits, "generate", "the model gave scores of {}; expected [1, rows, vocabulary]", dtensor::detail::str_of(scores.sizes()));
  const auto dtype = scores.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return scores.squeeze(0).to(at::kCPU, dtype).contiguous();
}

// Returns why there can be no pages.
inline std::string Runner::measure() {
  const auto& ids = detail::kTried;
  StepRows rows{ids, {}, {{0, static_cast<int64_t>(ids.size()), 0, nullptr, nullptr}}, {}};
  for (size_t i = 0; i < ids.size(); ++i) rows.positions.push_back(static_cast<int64_t>(i)), rows.scored.push_back(static_cast<int64_t>(i));
  try {
    heads_.clear();
    MeasuringStep step(world_, rows, heads_);
    forward(ids);
    shapes_ = step.shapes;
    positions_ = step.limit();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  if (shapes_.empty()) return "the model calls neither dtensor::nn::attention nor scaled_dot_product_attention";
  bytes_of_block_ = 0;
  for (const auto& shape : shapes_) bytes_of_block_ += shape.bytes_of_block();
  if (mesh_ && mesh_->size() > 1) {  // a rank may have fewer heads than others
    const auto most = all_reduce(detail::plain_tensor({bytes_of_block_}), *mesh_, ReduceOp::max);
    bytes_of_block_ = most.item<int64_t>();
  }
  return {};
}

// The model's scores of the tried tokens by attention over pages: in one piece, and in two. The one piece comes first, where a model that
// counts rows itself is right. In the passes there is another sequence, too.
inline std::pair<at::Tensor, at::Tensor> Runner::over_pages() {
  const auto& ids = detail::kTried;
  std::vector<Pages> pages;
  for (const auto& shape : shapes_) pages.emplace_back(shape, 3);
  std::swap(layers_, pages);
  try {
    const Block whole = 0, pieces = 1, other = 2;
    StepRows one{ids, {0, 1, 2, 3, 4}, {{0, 5, 0, &whole, nullptr}}, {0, 1, 2, 3, 4, 5, 6, 7}};
    one.ids.insert(one.ids.end(), {ids[0], ids[1], ids[2], 1, 1});
    one.positions.insert(one.positions.end(), {0, 1, 2, 0, 1});
    one.spans.insert(one.spans.end(), {{5, 8, 0, &pieces, nullptr}, {8, 10, 0, &other, nullptr}});
    StepRows two{{0, ids[3], ids[4]}, {2, 3, 4}, {{0, 1, 2, &other, nullptr}, {1, 3, 3, &pieces, nullptr}}, {1, 2}};
    const auto begin = run(one, {}), end = run(two, {});
    std::swap(layers_, pages);
    const NoSpmd plain;
    return {begin.narrow(0, 0, 5), at::cat({begin.narrow(0, 5, 3), end})};
  } catch (...) {
    std::swap(layers_, pages);
    throw;
  }
}

// Whether pages give the model's own scores. In one piece attention over pages may differ from the model's own by rounding; that is how
// much the dtype allows, and the pieces may not differ by much more.
inline std::string Runner::compare(const at::Tensor& expected) {
  const auto difference = [](const at::Tensor& a, const at::Tensor& b) {
    const NoSpmd plain;
    return a.sub(b).abs().max().item<double>();
  };
  const auto largest = difference(expected, at::zeros_like(expected));
  if (!std::isfinite(largest)) return {};  // weights that say nothing
  const bool is_short = shapes_[0].dtype == at::kBFloat16;
  at::Tensor one, two;
  try {
    std::tie(one, two) = over_pages();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  const auto rounding = difference(one, expected), bound = (is_short ? 0.1 : 1e-3) * (largest + 1e-6);
  if (!(rounding <= bound)) {
    return fmt::format("its scores by attention over pages differ by {} from its own", rounding);
  }
  const auto of_pieces = difference(two, one);
  const auto unit = is_short ? 0x1p-8 : shapes_[0].dtype == at::kDouble && scores_dtype_ == at::kDouble ? 0x1p-52 : 0x1p-23;
  const auto most = std::min(bound, std::max(16 * rounding, (is_short ? 8 : 64) * unit * (largest + 1e-6)));
  if (of_pieces <= most) return {};
  return fmt::format("its scores of a sequence in two pieces differ by {} from those in one; rounding explains {}", of_pieces, most);
}

inline void Runner::allocate(int64_t blocks) {
  layers_.clear();
  if (!pages()) return;
  for (const auto& shape : shapes_) layers_.emplace_back(shape, blocks);
}

inline void Runner::copy(const std::vector<std::pair<Block, Block>>& copies) const {
  const NoSpmd plain;
  for (const auto& [from, to] : copies) {
    for (const auto& layer : layers_) layer.copy_block(from, to);
  }
}

inline void Runner::copy_place(const Block* table, int64_t from, int64_t to) const {
  const NoSpmd plain;
  for (const auto& layer : layers_) layer.copy_place(table, from, to);
}

inline at::Tensor Runner::run(const StepRows& rows, const std::vector<std::span<const int64_t>>& before, const Failed& failed) const {
  if (!pages()) return recompute(rows, before, failed);
  if (mesh_ && mesh_->size() > 1) return run_padded(rows);
  const PagedStep step(world_, rows, heads_, layers_);
  const auto scores = forward(rows.ids);
  if (step.picked()) return scores;
  const NoSpmd plain;
  return scores.index_select(0, detail::plain_tensor(rows.scored));
}

inline at::Tensor Runner::run_padded(const StepRows& rows) const {
  const auto round = padded(rows);
  const auto wanted = static_cast<int64_t>(rows.scored.size());
  const PagedStep step(world_, round, heads_, layers_);
  const auto scores = forward(round.ids);
  const NoSpmd plain;
  if (step.picked()) return scores.narrow(0, 0, wanted);
  return scores.index_select(0, detail::plain_tensor(rows.scored));
}

inline at::Tensor Runner::recompute(const StepRows& rows, const std::vector<std::span<const int64_t>>& before, const Failed& failed) const {
  const NoSpmd plain;
  std::vector<at::Tensor> scores;
  size_t next = 0;
  for (size_t i = 0; i < rows.spans.size(); ++i) {
    const auto& span = rows.spans[i];
    Tokens wanted;
    for (; next < rows.scored.size() && rows.scored[next] < span.end; ++next) wanted.push_back(rows.scored[next] - span.begin + span.place);
    if (wanted.empty()) continue;
    Tokens ids(before[i].begin(), before[i].end());
    ids.insert(ids.end(), rows.ids.begin() + span.begin, rows.ids.begin() + span.end);
    try {
      scores.push_back(forward(ids).index_select(0, detail::plain_tensor(wanted)));
    } catch (...) {
      if (!failed) throw;
      failed(i);
      scores.push_back(at::zeros({static_cast<int64_t>(wanted.size()), vocabulary_}, scores_dtype_));
    }
  }
  return at::cat(scores);
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
