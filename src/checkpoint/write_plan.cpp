#include "src/checkpoint/write_plan.hpp"

#include "src/checkpoint/safetensors.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace dtensor::checkpoints {

namespace {

int64_t numel_of(const std::vector<Box>& boxes) {
  int64_t numel = 0;
  for (const auto& box : boxes) numel += checkpoints::numel_of(box);
  return numel;
}

// A region of a tensor that several ranks could write.
struct Choice {
  const std::string* name;
  const Held* held;
  const Region* region;
  int64_t bytes;
};

bool overlap(const Region& a, const Region& b) {
  return std::ranges::any_of(a.boxes, [&](const Box& box) {
    return std::ranges::any_of(b.boxes, [&](const Box& other) { return common(box, other).has_value(); });
  });
}

// Regions that are the tensor, each element once. Where several meshes hold it, those of the lowest ranks.
std::vector<const Region*> regions_that_cover(const std::string& name, const Held& held) {
  const auto numel = std::accumulate(held.sizes.begin(), held.sizes.end(), int64_t{1}, std::multiplies<>());
  std::vector<const Region*> chosen;
  int64_t covered = 0, all = 0;
  for (const auto& region : held.regions) all += numel_of(region.boxes);
  for (const auto& region : held.regions) {
    if (all > numel && std::ranges::any_of(chosen, [&](const Region* other) { return overlap(region, *other); })) continue;
    chosen.push_back(&region);
    covered += numel_of(region.boxes);
  }
  if (covered == numel) return chosen;
  throw std::runtime_error(
      fmt::format("ranks hold {} of the {} elements of '{}'; hint: all ranks of its mesh save, and a tensor that each "
                  "rank has for itself goes by dt::of_each_rank",
                  covered, numel, name));
}

bool is_whole(const WrittenItem& item) {
  for (size_t d = 0; d < item.box.size(); ++d) {
    if (item.box[d] != Interval{0, item.sizes[d]}) return false;
  }
  return true;
}

// Complex numbers of two doubles (or halves) are to safetensors a further dim of two.
safetensors::Entry entry_of(const WrittenItem& item) {
  safetensors::Entry entry{name_in_file(item), "", {}, item.offset, item.offset + item.bytes};
  for (const auto& side : item.box) entry.shape.push_back(side.length());
  if (const auto name = safetensors::dtype_name(item.dtype)) {
    entry.dtype = *name;
    return entry;
  }
  if (!c10::isComplexType(item.dtype))
    throw std::runtime_error(fmt::format("'{}' is {}, which cannot be saved", item.name, c10::toString(item.dtype)));
  entry.dtype = *safetensors::dtype_name(c10::toRealValueType(item.dtype));
  entry.shape.push_back(2);
  return entry;
}

}  // namespace

std::vector<std::vector<WrittenItem>> share_out(const AllHoldings& all, int ranks) {
  std::vector<std::vector<WrittenItem>> of_rank(static_cast<size_t>(ranks));
  std::vector<int64_t> load(static_cast<size_t>(ranks), 0);
  std::vector<Choice> choices;
  const auto give = [&](int rank, const std::string& name, const Held& held, const Region& region) {
    for (const auto& box : region.boxes) {
      const auto bytes = checkpoints::numel_of(box) * static_cast<int64_t>(c10::elementSize(held.dtype));
      of_rank[static_cast<size_t>(rank)].push_back({name, held.dtype, held.sizes, box, 0, bytes});
      load[static_cast<size_t>(rank)] += bytes;
    }
  };
  for (const auto& [name, held] : all) {
    for (const auto* region : regions_that_cover(name, held)) {
      if (region->ranks.size() == 1) give(region->ranks.front(), name, held, *region);
      else choices.push_back({&name, &held, region, numel_of(region->boxes) * static_cast<int64_t>(c10::elementSize(held.dtype))});
    }
  }
  std::ranges::stable_sort(choices, std::ranges::greater(), &Choice::bytes);
  for (const auto& choice : choices) {
    const auto least = std::ranges::min_element(choice.region->ranks, {}, [&](int rank) { return load[static_cast<size_t>(rank)]; });
    give(*least, *choice.name, *choice.held, *choice.region);
  }
  for (auto& items : of_rank) {
    std::ranges::stable_sort(items, {}, [](const WrittenItem& item) {
      return std::pair<int64_t, const std::string&>(-static_cast<int64_t>(c10::elementSize(item.dtype)), item.name);
    });
  }
  return of_rank;
}

std::vector<WrittenFile> files_of(std::vector<WrittenItem> items, int64_t most_bytes) {
  std::vector<WrittenFile> files;
  for (auto& item : items) {
    if (files.empty() || (!files.back().items.empty() && files.back().data_bytes + item.bytes > most_bytes)) files.emplace_back();
    auto& file = files.back();
    item.offset = file.data_bytes;
    file.data_bytes += item.bytes;
    file.items.push_back(std::move(item));
  }
  for (auto& file : files) {
    std::vector<safetensors::Entry> entries;
    for (const auto& item : file.items) entries.push_back(entry_of(item));
    file.header = safetensors::header_text(entries, {{"format", "pt"}});
  }
  return files;
}

std::string name_in_file(const WrittenItem& item) {
  if (is_whole(item)) return item.name;
  std::vector<std::string> sides;
  for (const auto& side : item.box) sides.push_back(fmt::format("{}:{}", side.begin, side.end));
  return fmt::format("{}[{}]", item.name, fmt::join(sides, ","));
}

}  // namespace dtensor::checkpoints
