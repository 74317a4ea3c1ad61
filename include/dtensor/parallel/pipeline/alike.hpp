// Whether the ranks of a pipeline were told the same of it: a rank that cuts elsewhere would train another model.
#pragma once

#include <dtensor/parallel/pipeline/csv.hpp>
#include <dtensor/parallel/pipeline/ranks.hpp>
#include <dtensor/tensor/replicated.hpp>

#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::pipelining {

// Something that all ranks have alike: what it is, and as this rank has it; and what errors show of that.
struct Fact {
  std::string what, text, shown;
};

// What makes a pipeline the one that it is: `cut` has the pieces of each stage, which have these patterns.
std::vector<Fact> facts_of(const Schedule& schedule, const std::vector<int>& cut, const std::vector<std::string>& patterns);

// Every rank of the pipeline calls it, with facts of the same kinds. Throws on every rank if some differ, and says on which ranks.
// Communicates a hash, and one for each fact if some differ.
void require_alike(const PipelineRanks& ranks, const std::vector<Fact>& facts);

// -- How -----------------------------------------------------------------------------------------------------------------

inline std::vector<Fact> facts_of(const Schedule& schedule, const std::vector<int>& cut, const std::vector<std::string>& patterns) {
  std::vector<Fact> facts;
  const auto add = [&](const char* what, const std::string& text) { facts.push_back({what, text, text}); };
  add("the number of microbatches", fmt::format("{}", schedule.microbatches));
  add("the cut", fmt::format("[{}]", fmt::join(cut, ", ")));
  add("the list of pieces", fmt::format("['{}']", fmt::join(patterns, "', '")));
  facts.push_back({"the schedule", to_csv(schedule), schedule.name});
  return facts;
}

inline void require_alike(const PipelineRanks& ranks, const std::vector<Fact>& facts) {
  const auto differing = [&](std::string_view text) {
    return ranks_that_differ(at::tensor(std::vector<int64_t>(text.begin(), text.end()), at::kLong), ranks.all());
  };
  std::string all, what;
  for (const auto& fact : facts) all += fact.text + "\n";
  if (differing(all).empty()) return;
  for (const auto& fact : facts) {
    const auto others = differing(fact.text);
    if (others.empty()) continue;
    const bool many = others.find(',') != std::string::npos;
    what += fmt::format("; {} of rank{} {} is not that of rank {}, here it is {}", fact.what, many ? "s" : "", others,
                        ranks.all().ranks()[0], fact.shown);
  }
  fail("pipeline", "the ranks do not have the same pipeline{}; hint: every rank gives dt::pipeline equal pieces and options", what);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
