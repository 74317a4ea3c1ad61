// Cutting a model: an ordered list of its pieces, and which stage each is in.
#pragma once

#include <dtensor/parallel/patterns.hpp>
#include <dtensor/parallel/pipeline/stage.hpp>

#include <dtensor/base/error.hpp>

#include <torch/nn/module.h>

#include <concepts>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

namespace detail {

inline TensorVector as_list(at::Tensor tensor) { return {std::move(tensor)}; }
inline TensorVector as_list(TensorVector tensors) { return tensors; }

}  // namespace detail

// Values that go past pieces, by names: the last of a piece's outputs are what it `gives`, and the last of its inputs what it `takes` of
// pieces before it.
struct Skips {
  std::vector<std::string> gives{}, takes{};
};

// A part of a model between two of which it may be cut.
struct Piece {
  std::string modules;  // the modules whose parameters it uses, by a pattern as in a Plan: "layers.3", "norm|output"; empty: none
  StageForward forward;
  Skips skips{};
};

template <class Function>
concept PieceFunction = std::invocable<Function&, const at::Tensor&> || std::invocable<Function&, const TensorVector&>;

// A piece of a function of one tensor, or of a list of tensors. It gives a tensor or a list.
//
//   dt::piece("layers.3", [layer](const torch::Tensor& x) { return layer->forward(x); })
//   dt::piece("down", [&](const torch::Tensor& x) { auto y = down(x); return std::vector{pool(y), y}; }, {.gives = {"y"}})
//   dt::piece("up", [&](const std::vector<torch::Tensor>& x) { return up(x[0], x[1]); }, {.takes = {"y"}})
template <PieceFunction Function>
Piece piece(std::string modules, Function function, Skips skips = {}) {
  const auto forward = [function = std::move(function)](const TensorVector& x) mutable -> TensorVector {
    if constexpr (std::invocable<Function&, const at::Tensor&>) {
      require(x.size() == 1, "pipeline", "a piece takes one tensor; got {}; hint: give it a function of a list of tensors", x.size());
      return detail::as_list(function(x[0]));
    } else {
      return detail::as_list(function(x));
    }
  };
  return {std::move(modules), forward, std::move(skips)};
}

// How many pieces each of `stages` stages has, so that the most expensive stage costs as little as can be (and, of such cuts, the earlier
// stages as little as can be). Costs are per piece, not negative. Each stage gets at least one. Throws for fewer pieces than stages.
std::vector<int> balanced_cut(const std::vector<double>& costs, int stages);

// Which parameters of `module` a piece uses: their positions in module.named_parameters(). Throws for a pattern of which a side, as "b" of
// "a|b", matches nothing.
std::vector<size_t> parameters_of(const Piece& piece, const torch::nn::Module& module);

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<int> balanced_cut(const std::vector<double>& costs, int stages) {
  const int pieces = static_cast<int>(costs.size());
  require(stages >= 1 && pieces >= stages, "pipeline",
          "got {} pieces for {} stages; expected one piece per stage or more; hint: cut the model finer, or "
          "take a schedule with fewer stages",
          pieces, stages);
  for (const double cost : costs) require(cost >= 0, "pipeline", "got the cost {}; expected a number that is not negative", cost);
  // least[s][i]: the cost of the most expensive of s stages that hold the last pieces, from i on.
  std::vector least(stages + 1, std::vector<double>(pieces + 1, std::numeric_limits<double>::infinity()));
  std::vector length(stages + 1, std::vector<int>(pieces + 1, 0));
  least[0][pieces] = 0;
  for (int s = 1; s <= stages; ++s) {
    for (int i = pieces - s; i >= 0; --i) {
      double own = 0;
      for (int n = 1; i + n <= pieces - (s - 1); ++n) {
        own += costs[i + n - 1];
        const double most = std::max(own, least[s - 1][i + n]);
        if (most < least[s][i]) least[s][i] = most, length[s][i] = n;
      }
    }
  }
  std::vector<int> result;
  for (int s = stages, i = 0; s > 0; i += result.back(), --s) result.push_back(length[s][i]);
  return result;
}

namespace detail {

// Whether a pattern names a parameter or buffer: itself, or a module around it.
inline bool names(const std::string& pattern, std::string_view tensor) {
  if (pattern.empty()) return false;
  for (auto end = tensor.size(); end != tensor.npos; end = end == 0 ? tensor.npos : tensor.rfind('.', end - 1)) {
    if (dtensor::detail::matches(pattern, tensor.substr(0, end))) return true;
  }
  return false;
}

inline void check_names(const Piece& piece, const torch::nn::Module& module) {
  std::vector<std::string> modules, tensors;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) modules.push_back(item.key());
  for (const auto& item : module.named_parameters()) tensors.push_back(item.key());
  for (const auto& item : module.named_buffers()) tensors.push_back(item.key());
  for (const auto each : dtensor::detail::sides(piece.modules)) {
    const std::string side(each);
    const bool found = std::ranges::any_of(modules, [&](const auto& name) { return dtensor::detail::matches(side, name); }) ||
                       std::ranges::any_of(tensors, [&](const auto& name) { return names(side, name); });
    require(found, "pipeline", "the piece '{}' matches no module{}; hint: names are fully qualified; the closest are {}", piece.modules,
            side == piece.modules ? "" : fmt::format(" by '{}'", side), dtensor::detail::closest(side, modules));
  }
}

}  // namespace detail

inline std::vector<size_t> parameters_of(const Piece& piece, const torch::nn::Module& module) {
  if (piece.modules.empty()) return {};
  detail::check_names(piece, module);
  std::vector<size_t> positions;
  size_t position = 0;
  for (const auto& item : module.named_parameters()) {
    if (detail::names(piece.modules, item.key())) positions.push_back(position);
    ++position;
  }
  return positions;
}

}  // namespace dtensor::pipelining

namespace dtensor {
using pipelining::Piece;
using pipelining::piece;
}  // namespace dtensor

#pragma GCC visibility pop
