// Whether the ranks of a pipeline were told the same of it: a rank that cuts elsewhere would train another model.
#pragma once

#include <dtensor/parallel/pipeline/csv.hpp>
#include <dtensor/parallel/pipeline/ranks.hpp>

#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
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
// Communicates 16 bytes for each fact, and 8 for each and every rank if some differ.
void require_alike(const PipelineRanks& ranks, const std::vector<Fact>& facts);

// -- How -----------------------------------------------------------------------------------------------------------------

namespace detail {

// The same on every machine, and not negative.
inline int64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  return static_cast<int64_t>(hash >> 1);
}

}  // namespace detail

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
  const auto count = static_cast<int64_t>(facts.size()), size = static_cast<int64_t>(ranks.all().size());
  auto own = at::zeros({2 * count}, at::kLong);
  auto* hashes = own.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) hashes[i] = detail::hash_of(facts[i].text), hashes[count + i] = -hashes[i];
  const auto most = ranks.largest(own);
  const auto* bounds = most.data_ptr<int64_t>();
  const auto differs = [&](int64_t i) { return bounds[i] != -bounds[count + i]; };
  bool alike = true;
  for (int64_t i = 0; i < count; ++i) alike = alike && !differs(i);
  if (alike) return;
  const auto& all = ranks.all().ranks();
  const auto position = std::ranges::find(all, ranks.all().world().rank()) - all.begin();
  auto table = at::zeros({size * count}, at::kLong);
  std::copy_n(hashes, count, table.data_ptr<int64_t>() + position * count);
  table = ranks.largest(table);
  const auto* of = table.data_ptr<int64_t>();
  std::string what;
  for (int64_t i = 0; i < count; ++i) {
    if (!differs(i)) continue;
    std::vector<int> others;
    for (int64_t r = 0; r < size; ++r) {
      if (of[r * count + i] != of[i]) others.push_back(all[r]);
    }
    const bool many = others.size() > 1;
    what += fmt::format("; {} of rank{} {} {} not that of rank {}, here it is {}", facts[i].what, many ? "s" : "", fmt::join(others, ", "),
                        "is", all[0], facts[i].shown);
  }
  fail("pipeline", "the ranks do not have the same pipeline{}; hint: every rank gives dt::pipeline equal pieces and options", what);
}

}  // namespace dtensor::pipelining

#pragma GCC visibility pop
