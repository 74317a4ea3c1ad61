// Attention and experts on ranks of their own (Zhu et al., "MegaScale-Infer", 2025; "DisagMoE", 2026): microbatches go back and forth
// between two meshes, so that both compute at the same time.
//
//   dt::DeviceMesh attention(torch::kCPU, {0, 1}, {2}, {"dp"}), experts(torch::kCPU, {2, 3}, {2}, {"dp"});
//   auto own = dt::stage_mesh({attention, experts});                        // the one that this rank is in
//   dt::Spmd spmd(own);
//   auto model = [&] { dt::DeferredInit deferred(own); return std::make_shared<Model>(options); }();
//   if (experts.contains_this_rank()) dt::expert_parallel(*model, experts, {.dims = {"dp"}});
//   auto pipe = dt::disaggregate(*model, {attention, experts}, model->pieces_apart(), {.microbatches = 3});
//   pipe.materialize();
//
// The rest is as for any pipeline. Losses, gradients and parameters are those of one device.
#pragma once

#include <dtensor/parallel/pipeline/ping_pong.hpp>
#include <dtensor/pipeline.hpp>

#pragma GCC visibility push(default)

namespace dtensor {

// Two meshes without a rank in common. The first and the last piece are on that of attention, which has all that the experts' does not.
// Tensors come as they lay, along dimensions of equal names: where one of that name cuts the batch on the first mesh, each rank of the
// second gets its part of the rows, and whole rows of the microbatch otherwise.
struct DisaggregatedMeshes {
  DeviceMesh attention, experts;
};

struct DisaggregateOptions {
  std::string experts = "*.experts|experts";  // the pieces on the experts' mesh: a pattern of what Piece::modules says
  int microbatches = 3;                       // see dt::plan_disaggregated
  int whole_stages = 3;                       // as PipelineOptions::whole_stages
};

// A pipeline under pipelining::ping_pong: a stage of the experts' mesh is a run of pieces that `options.experts` matches, and a stage of
// attention's one of others. dtensor::nn::expert_pieces cuts a block so. Communicates nothing. Throws for meshes that share a rank, a rank
// that is in none, a pattern that matches no piece or the first or last one, and as dt::pipeline().
Pipeline disaggregate(torch::nn::Module& module, const DisaggregatedMeshes& meshes, const std::vector<Piece>& pieces,
                      const DisaggregateOptions& options = {});

// -- How -----------------------------------------------------------------------------------------------------------------

namespace pipelining::detail {

// How many pieces each stage has: runs of pieces that are the experts', or that are not.
inline std::vector<int> cut_apart(const std::vector<Piece>& pieces, const std::string& experts) {
  const auto is_experts = [&](const Piece& piece) { return dtensor::detail::matches(experts, piece.modules); };
  std::vector<std::string> names;
  for (const auto& piece : pieces) names.push_back(piece.modules);
  require(std::ranges::any_of(pieces, is_experts), "disaggregate", "'{}' matches none of {} pieces; hint: the closest are {}", experts,
          pieces.size(), dtensor::detail::closest(experts, names));
  require(!is_experts(pieces.front()) && !is_experts(pieces.back()), "disaggregate",
          "'{}' matches the {} piece, '{}'; expected attention's; hint: embeddings and head are on its mesh", experts,
          is_experts(pieces.front()) ? "first" : "last", is_experts(pieces.front()) ? names.front() : names.back());
  std::vector<int> cut{0};
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i > 0 && is_experts(pieces[i]) != is_experts(pieces[i - 1])) cut.push_back(0);
    ++cut.back();
  }
  return cut;
}

}  // namespace pipelining::detail

inline Pipeline disaggregate(torch::nn::Module& module, const DisaggregatedMeshes& meshes, const std::vector<Piece>& pieces,
                             const DisaggregateOptions& options) {
  require(options.microbatches >= 1, "disaggregate", "got {} microbatches; expected one or more", options.microbatches);
  PipelineOptions all{.microbatches = options.microbatches, .cut = pipelining::detail::cut_apart(pieces, options.experts),
                      .whole_stages = options.whole_stages};
  all.make_schedule = [layers = static_cast<int>(all.cut.size() / 2)](const pipelining::PipelineSize& sizes) {
    return pipelining::ping_pong(layers, sizes.microbatches);
  };
  return pipeline(module, {meshes.attention, meshes.experts}, pieces, all);
}

}  // namespace dtensor

#pragma GCC visibility pop
