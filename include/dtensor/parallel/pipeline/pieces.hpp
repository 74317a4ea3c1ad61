// From pieces to stages: the functions of the stages, and what goes past stages.
#pragma once

#include <dtensor/parallel/pipeline/cut.hpp>

#include <dtensor/base/error.hpp>

#include <chrono>
#include <limits>
#include <map>
#include <memory>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

struct StagesOfPieces {
  std::vector<StageForward> forwards;
  std::vector<Skip> skips;
  std::shared_ptr<std::vector<double>> milliseconds;  // of the fastest forward of each piece so far; infinite before the first
};

// `cut`: how many pieces each stage has. Throws for a name that two pieces give, or that no piece before gives.
StagesOfPieces stages_of(const std::vector<Piece>& pieces, const std::vector<int>& cut);

// The buffers of a rank whose stages have the patterns `own`, by their names in the whole module: those that these name, and those that no
// pattern of `all` names, which any stage may use.
std::vector<std::pair<std::string, at::Tensor>> buffers_of(const torch::nn::Module& module, const std::vector<std::string>& own,
                                                           const std::vector<std::string>& all);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// What a piece gives.
inline TensorVector run_named(const Piece& piece, const TensorVector& values) try {
  auto results = piece.forward(values);
  for (const auto& result : results) require(result.defined(), "pipeline", "the piece '{}' gives an undefined tensor", piece.modules);
  return results;
} catch (const Error& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("are not there yet") == text.npos) throw;
  fail("pipeline",
       "the piece '{}' uses a tensor without values: {}; hint: call pipe.materialize() before the first step, and name the modules of all "
       "parameters that a piece uses: a rank has those that the pieces of its stages name",
       piece.modules, text);
}

// The same. Its time goes into `fastest`.
inline TensorVector run_timed(const Piece& piece, const TensorVector& values, double& fastest) {
  const auto start = std::chrono::steady_clock::now();
  auto results = run_named(piece, values);
  fastest = std::min(fastest, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  return results;
}

// The pieces of one stage, of which the first is number `first` of the model, as one function. `taken` come from other stages and `given`
// go to others, in the order of the stage's ways.
inline StageForward together(std::vector<Piece> pieces, size_t first, std::vector<std::string> taken, std::vector<std::string> given,
                             std::shared_ptr<std::vector<double>> milliseconds) {
  return [pieces = std::move(pieces), first, taken = std::move(taken), given = std::move(given),
          milliseconds = std::move(milliseconds)](const TensorVector& inputs) {
    auto* fastest = &milliseconds->at(first);
    std::map<std::string, at::Tensor> named;
    auto values = inputs;
    for (size_t i = taken.size(); i-- > 0; values.pop_back()) named[taken[i]] = values.back();
    for (const auto& piece : pieces) {
      for (const auto& name : piece.skips.takes) values.push_back(named.at(name));
      values = run_timed(piece, values, *fastest++);
      require(values.size() >= piece.skips.gives.size(), "pipeline", "the piece '{}' gives {} tensors; expected the {} that it names last",
              piece.modules, values.size(), piece.skips.gives.size());
      for (size_t i = piece.skips.gives.size(); i-- > 0; values.pop_back()) named[piece.skips.gives[i]] = values.back();
    }
    for (const auto& name : given) values.push_back(named.at(name));
    return values;
  };
}

}  // namespace detail

inline StagesOfPieces stages_of(const std::vector<Piece>& pieces, const std::vector<int>& cut) {
  const int stages = static_cast<int>(cut.size());
  // By stage and distance to the other one: names, as the stage's function takes and gives them.
  std::vector<std::map<int, std::vector<std::string>>> taken(stages), given(stages);
  std::vector<std::vector<Piece>> of_stage(stages);
  std::map<std::string, int> giver;
  StagesOfPieces result;
  for (int s = 0, p = 0; s < stages; ++s) {
    for (int i = 0; i < cut[s]; ++i, ++p) {
      const auto& piece = pieces[p];
      for (const auto& name : piece.skips.takes) {
        const auto found = giver.find(name);
        require(found != giver.end(), "pipeline",
                "the piece '{}' takes '{}', which no piece before it gives; hint: 'gives' of an earlier piece names it", piece.modules,
                name);
        const int from = found->second;
        auto& names = taken[s][s - from];
        if (from == s || std::ranges::find(names, name) != names.end()) continue;
        names.push_back(name);
        given[from][s - from].push_back(name);
        result.skips.push_back({from, s});
      }
      for (const auto& name : piece.skips.gives) {
        require(giver.emplace(name, s).second, "pipeline", "two pieces give '{}'; expected one; hint: give the second another name", name);
      }
      of_stage[s].push_back(piece);
    }
  }
  const auto flat = [](const std::map<int, std::vector<std::string>>& by_distance) {
    std::vector<std::string> all;
    for (const auto& [distance, names] : by_distance) all.insert(all.end(), names.begin(), names.end());
    return all;
  };
  result.milliseconds = std::make_shared<std::vector<double>>(pieces.size(), std::numeric_limits<double>::infinity());
  for (size_t s = 0, first = 0; s < of_stage.size(); first += cut[s], ++s) {
    result.forwards.push_back(detail::together(std::move(of_stage[s]), first, flat(taken[s]), flat(given[s]), result.milliseconds));
  }
  return result;
}

inline std::vector<std::pair<std::string, at::Tensor>> buffers_of(const torch::nn::Module& module, const std::vector<std::string>& own,
                                                                  const std::vector<std::string>& all) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& item : module.named_buffers()) {
    const auto names_it = [&](const std::string& pattern) { return detail::names(pattern, item.key()); };
    if (std::ranges::any_of(own, names_it) || std::ranges::none_of(all, names_it)) result.emplace_back(item.key(), item.value());
  }
  return result;
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
