#include "src/checkpoint/read_plan.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <set>

namespace dtensor::checkpoints {

namespace {

constexpr int64_t kLongRun = 4096;  // bytes, a page: worth a call of its own

class Planner {
 public:
  Planner(const Index& index, int ranks, int64_t round_bytes, const SeenBy& seen_by)
      : index_(index), round_bytes_(round_bytes), seen_by_(seen_by), load_(static_cast<size_t>(ranks), 0) {}

  void add(const std::string& name, const SavedTensor& tensor, const Held& wanted) {
    for (const auto& piece : tensor.pieces) {
      std::vector<const Region*> near;
      for (const auto& region : wanted.regions) {
        if (std::ranges::any_of(region.boxes, [&](const Box& box) { return common(box, piece.box).has_value(); })) near.push_back(&region);
      }
      if (near.empty()) continue;
      const int64_t numel = numel_of(piece.box), step = index_.chunk_bytes / static_cast<int64_t>(c10::elementSize(tensor.dtype));
      for (int64_t begin = 0; begin < numel; begin += step) add(name, tensor, piece, {begin, std::min(numel, begin + step)}, near);
    }
  }

  ReadPlan take() {
    plan_.sends.assign(static_cast<size_t>(plan_.rounds), false);
    for (const auto& chunk : plan_.chunks) {
      if (chunk.wanted_by != std::vector<int>{chunk.reader}) plan_.sends[static_cast<size_t>(chunk.round)] = true;
    }
    for (size_t f = 0; f < index_.files.size(); ++f)
      plan_.header_readers.push_back(seen_by_.empty() ? static_cast<int>(f % load_.size()) : seen_by_[f][f % seen_by_[f].size()]);
    return std::move(plan_);
  }

 private:
  void add(const std::string& name, const SavedTensor& tensor, const Piece& piece, Interval elements,
           const std::vector<const Region*>& near) {
    Chunk chunk{&name, &tensor, &piece, elements, 0, 0, {}};
    const auto parts = parts_of(chunk);
    const auto wants = [&](const Region& region) {
      return std::ranges::any_of(region.boxes, [&](const Box& box) {
        return std::ranges::any_of(parts, [&](const ChunkPart& part) { return common(box, part.box).has_value(); });
      });
    };
    for (const auto* region : near) {
      if (!wants(*region)) continue;
      chunk.wanted_by.insert(chunk.wanted_by.end(), region->ranks.begin(), region->ranks.end());
    }
    if (chunk.wanted_by.empty()) return;
    std::ranges::sort(chunk.wanted_by);
    chunk.wanted_by.erase(std::unique(chunk.wanted_by.begin(), chunk.wanted_by.end()), chunk.wanted_by.end());
    const auto readers = readers_of(chunk);
    const auto apart = readers == chunk.wanted_by ? bytes_apart(chunk, parts, near) : std::map<int, int64_t>();
    if (!apart.empty()) {
      for (const auto& [rank, bytes] : apart) load_[static_cast<size_t>(rank)] += bytes;
      chunk.reader = readers[plan_.apart.size() % readers.size()];
      plan_.apart.push_back(std::move(chunk));
      return;
    }
    chunk.reader = *std::ranges::min_element(readers, {}, [&](int rank) { return load_[static_cast<size_t>(rank)]; });
    auto& load = load_[static_cast<size_t>(chunk.reader)];
    chunk.round = load / round_bytes_;
    load += chunk.bytes();
    plan_.rounds = std::max(plan_.rounds, chunk.round + 1);
    plan_.chunks.push_back(std::move(chunk));
  }

  // Where several ranks want the chunk, and each of its bytes one of them, in long runs: how many bytes each rank wants. Else nothing.
  static std::map<int, int64_t> bytes_apart(const Chunk& chunk, const std::vector<ChunkPart>& parts,
                                            const std::vector<const Region*>& near) {
    std::map<int, int64_t> by_rank;
    if (chunk.wanted_by.size() < 2) return {};
    std::vector<Run> runs;
    for (const auto* region : near) {
      for (const auto& box : region->boxes) {
        for (const auto& part : parts) {
          const auto both = common(box, part.box);
          if (!both) continue;
          const auto item = static_cast<int64_t>(c10::elementSize(chunk.tensor->dtype));
          if (region->ranks.size() > 1 || bytes_of_run(part, *both, item) < kLongRun) return {};
          const auto own = runs_of(part, *both, item);
          runs.insert(runs.end(), own.begin(), own.end());
          by_rank[region->ranks[0]] += numel_of(*both) * item;
        }
      }
    }
    std::ranges::sort(runs, {}, &Run::begin);
    int64_t end = 0;
    for (const auto& run : runs) {
      if (run.begin != end) return {};
      end += run.bytes;
    }
    return end == chunk.bytes() ? by_rank : std::map<int, int64_t>();
  }

  std::vector<int> readers_of(const Chunk& chunk) const {
    if (seen_by_.empty()) return chunk.wanted_by;
    const auto& see = seen_by_[static_cast<size_t>(chunk.piece->file)];
    std::vector<int> both;
    std::ranges::set_intersection(chunk.wanted_by, see, std::back_inserter(both));
    return both.empty() ? see : both;
  }

  const Index& index_;
  const int64_t round_bytes_;
  const SeenBy& seen_by_;
  std::vector<int64_t> load_;
  ReadPlan plan_;
};

}  // namespace

std::vector<ChunkPart> parts_of(const Chunk& chunk) {
  std::vector<int64_t> sizes;
  for (const auto& side : chunk.piece->box) sizes.push_back(side.length());
  std::vector<ChunkPart> parts;
  int64_t begin = 0;
  if (chunk.elements.length() == numel_of(chunk.piece->box)) {
    parts.push_back({chunk.piece->box, 0});
    return parts;
  }
  for (auto& box : boxes_of(sizes, chunk.elements)) {
    for (size_t d = 0; d < box.size(); ++d) {
      box[d].begin += chunk.piece->box[d].begin;
      box[d].end += chunk.piece->box[d].begin;
    }
    const auto numel = numel_of(box);
    parts.push_back({std::move(box), begin});
    begin += numel;
  }
  return parts;
}

int64_t bytes_of_run(const ChunkPart& part, const Box& box, int64_t bytes_of_element) {
  int64_t bytes = bytes_of_element, whole = bytes;  // of the box and of the part, in the dims so far
  for (size_t d = box.size(); d-- > 0 && bytes == whole;) bytes *= box[d].length(), whole *= part.box[d].length();
  return bytes;
}

std::vector<Run> runs_of(const ChunkPart& part, const Box& box, int64_t bytes_of_element) {
  const auto dims = box.size();
  const auto bytes = bytes_of_run(part, box, bytes_of_element);
  std::vector<int64_t> strides(dims, bytes_of_element);  // in the part
  for (size_t d = dims; d-- > 1;) strides[d - 1] = strides[d] * part.box[d].length();
  std::vector<Run> runs{{part.begin * bytes_of_element, bytes}};
  for (size_t d = 0; d < dims; ++d) {
    const auto from = (box[d].begin - part.box[d].begin) * strides[d];
    const auto count = strides[d] < bytes ? 1 : box[d].length();  // 1: a run goes over this dim
    std::vector<Run> all;
    for (const auto& run : runs) {
      for (int64_t i = 0; i < count; ++i) all.push_back({run.begin + from + i * strides[d], bytes});
    }
    runs = std::move(all);
  }
  return runs;
}

ReadPlan plan_reads(const Index& index, const AllHoldings& wanted, int ranks, int64_t round_bytes, const SeenBy& seen_by) {
  Planner planner(index, ranks, round_bytes, seen_by);
  for (const auto& [name, held] : wanted) {
    if (const auto* tensor = index.find(name)) planner.add(name, *tensor, held);
  }
  return planner.take();
}

}  // namespace dtensor::checkpoints
