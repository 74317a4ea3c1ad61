// Passes of a role's model over a part of a batch, on meshes that cut rows over "dp" and, where they have it, positions over "cp".
#pragma once

#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/rl/passes.hpp>

#include <ATen/ops/argsort.h>

#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// What a role's method passes its model through; made inside of the method, and there until the backward pass is over. Where "cp" has
// ranks, the model gets ids whose positions are cut, inside of a ContextParallel, and computes attention by o.cp_method; what it says of
// tokens is cut over rows alone again, so nothing else knows of it: of the logits, each rank has its own positions. Throws for packed rows
// and shared prompts there.
class Passes {
 public:
  Passes(const DeviceMesh& mesh, const Options& o);

  // As score_tokens() and value_tokens().
  template <class Forward>
  TokenStatistics score(Forward forward, const Part& part, const StatisticsOptions& options) const;
  template <class Forward>
  at::Tensor values(Forward forward, const Part& part) const;

 private:
  at::Tensor cut(const at::Tensor& x) const;
  at::Tensor restored(const at::Tensor& x) const;

  const RowForm form_;
  const DeviceMesh mesh_;
  std::unique_ptr<ContextParallel> context_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline Passes::Passes(const DeviceMesh& mesh, const Options& o)
    : form_(o.share_prompts ? RowForm::shared_prompts : o.pack ? RowForm::packed : RowForm::padded), mesh_(mesh) {
  const auto& names = mesh.names();
  if (!std::ranges::count(names, "cp") || mesh.size(mesh.dim("cp")) == 1) return;
  require(form_ == RowForm::padded, "rl::Passes", "'{}' is true, and {} cuts positions over 'cp'; expected one of the two",
          o.share_prompts ? "share_prompts" : "pack", mesh.str());
  context_ = std::make_unique<ContextParallel>(mesh, "cp", ContextParallelOptions{.method = o.cp_method, .order = o.cp_order});
}

// Ids [rows, time], whole along the positions, in the order of the ranks and cut.
inline at::Tensor Passes::cut(const at::Tensor& x) const {
  auto placements = rows_over(mesh_).placements;
  at::Tensor ordered;
  {
    const NoSpmd plain;
    const auto own = is_dtensor(x) ? DTensor(redistribute(x, placements)).to_local() : x;
    const std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    ordered = from_local(context_->order(own.contiguous()), mesh_, placements, sizes).tensor();
  }
  placements[mesh_.dim("cp")] = context_->placement(1, x.size(1));
  return redistribute(ordered, placements);
}

// [rows, time] of cut ids, whole along the positions.
inline at::Tensor Passes::restored(const at::Tensor& x) const {
  if (!x.defined()) return x;
  at::Tensor places;
  {
    const NoSpmd plain;
    places = at::argsort(context_->positions(x.size(1)));
  }
  return redistribute(x, rows_over(mesh_).placements).index_select(1, places);
}

template <class Forward>
TokenStatistics Passes::score(Forward forward, const Part& part, const StatisticsOptions& options) const {
  if (!context_) return score_tokens(forward, part, form_, options);
  const auto time = part.time();
  const auto ids = part.batch.get("ids").narrow(1, 0, time);
  const auto inputs = cut(ids.narrow(1, 0, time - 1)), targets = cut(ids.narrow(1, 1, time - 1));
  const auto found = token_statistics(forward(inputs), targets, options);
  return {restored(found.logp), restored(found.entropy), restored(found.sum_squares)};
}

template <class Forward>
at::Tensor Passes::values(Forward forward, const Part& part) const {
  if (!context_) return value_tokens(forward, part, form_);
  const auto time = part.time();
  const auto values = forward(cut(part.batch.get("ids").narrow(1, 0, time - 1)));
  return restored(values.dim() == 3 ? values.squeeze(2) : values);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
