// The zoo's models of experts in pieces: together they compute what the model does, and use all of its parameters.
#include "examples/zoo/deepseek.hpp"
#include "examples/zoo/llama3.hpp"
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/parallel/pipeline/pieces.hpp>

#include <set>

using namespace dtensor;
using namespace dtensor::test;

namespace {

void check_pieces_apart(zoo::Model& model, size_t layers_of_experts) {
  const auto pieces = model.pieces_apart();
  const auto is_experts = [](const Piece& piece) { return dtensor::detail::matches("*.experts", piece.modules); };
  CHECK(static_cast<size_t>(std::ranges::count_if(pieces, is_experts)) == layers_of_experts);
  std::set<size_t> used;
  for (const auto& piece : pieces) {
    for (const auto position : pipelining::parameters_of(piece, model)) CHECK(used.insert(position).second);
  }
  CHECK(used.size() == model.parameters().size());
  const auto ids = torch::arange(2 * 6).mul(5).remainder(16).view({2, 6});
  const auto whole = pipelining::stages_of(pieces, {static_cast<int>(pieces.size())});
  CHECK(whole.forwards[0]({ids})[0].equal(model.forward(ids)));
}

}  // namespace

TEST_CASE("zoo: models in pieces for experts on ranks of their own", "[experts][pipeline][zoo]") {
  torch::manual_seed(0);
  zoo::Llama3Options small{.vocabulary = 16, .layers = 2, .dim = 8, .heads = 2, .kv_heads = 1, .hidden = 6};
  CHECK_THROWS_WITH(zoo::Llama3(small)->pieces_apart(), says("this model has no experts to put on other ranks"));
  small.experts = 4;
  check_pieces_apart(*zoo::Llama3(small), 2);
  zoo::DeepSeekOptions options{.vocabulary = 16, .layers = 3, .dim = 8, .heads = 2, .q_rank = 4, .kv_rank = 4, .nope_dim = 4, .rope_dim = 2,
                               .value_dim = 4, .dense_layers = 1, .hidden = 12, .experts = 8, .expert_hidden = 4, .shared_hidden = 4};
  options.router.top_k = 2, options.router.groups = 2, options.router.top_groups = 1;
  check_pieces_apart(*zoo::DeepSeek(options), 2);
}
