// Chunks of which each rank reads what it has to itself.
#include "src/checkpoint/reader.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace dtensor::checkpoints {

namespace {

// Where each run of a box goes that has the sizes of `to`; empty where `to` has not its elements as they are, or not side by side in a run.
std::vector<char*> places_of(const at::Tensor& to, c10::ScalarType dtype, const std::vector<Run>& runs) {
  if (!to.is_cpu() || to.is_conj() || to.is_neg() || to.scalar_type() != dtype) return {};
  const auto item = static_cast<int64_t>(to.element_size());
  auto dim = to.dim();
  for (auto elements = int64_t{1}; elements * item < runs[0].bytes; elements *= to.size(dim)) {
    --dim;
    if (to.size(dim) > 1 && to.stride(dim) != elements) return {};
  }
  std::vector<char*> places{static_cast<char*>(to.data_ptr())};
  for (int64_t d = 0; d < dim; ++d) {
    std::vector<char*> all;
    for (auto* place : places) {
      for (int64_t i = 0; i < to.size(d); ++i) all.push_back(place + i * to.stride(d) * item);
    }
    places = std::move(all);
  }
  return places;
}

}  // namespace

uint32_t Reader::read_own(const Chunk& chunk) {
  struct Own {
    Run run;
    char* to;
  };
  const auto dtype = chunk.tensor->dtype;
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  std::vector<Own> all;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& part : parts_of(chunk)) {
    for (const auto& target : targets(*chunk.name)) {
      const auto both = common(target.box, part.box);
      if (!both) continue;
      const auto runs = runs_of(part, *both, item);
      auto to = part_of_view(target.view, target.box, *both);
      auto places = places_of(to, dtype, runs);
      if (places.empty()) {
        copies.emplace_back(to, at::empty(to.sizes(), dtype));
        places = places_of(copies.back().second, dtype, runs);
      }
      for (size_t i = 0; i < runs.size(); ++i) all.push_back({runs[i], places[i]});
    }
  }
  std::ranges::sort(all, {}, [](const Own& own) { return own.run.begin; });
  Crc32cPart sum;
  std::vector<disk::Piece> pieces;
  int64_t begin = 0, end = 0;
  const auto read = [&] {
    if (!pieces.empty()) file(chunk.piece->file).read(pieces, chunk.offset() + begin);
    counts_.bytes_read += end - begin;
    pieces.clear();
  };
  for (const auto& [run, to] : all) {
    const auto gap = run.begin - end;
    if (pieces.empty() || gap < 0 || gap > std::min(run.bytes, kLongestGap)) {
      read();
      begin = run.begin;
    } else if (gap > 0) {
      pieces.push_back({gap_memory_.data(), static_cast<size_t>(gap)});
    }
    pieces.push_back({to, static_cast<size_t>(run.bytes)});
    end = run.begin + run.bytes;
  }
  read();
  for (const auto& [run, to] : all) sum.add(run.begin, to, run.bytes);
  for (const auto& [to, from] : copies) copy_elements(to, from);
  return sum.value(chunk.bytes());
}

void Reader::read_apart(const std::vector<Chunk>& chunks) {
  struct Told {
    uint32_t sum = 0, is_read = 0;
  };
  std::vector<Told> own(chunks.size());
  std::vector<std::vector<Told>> tell(static_cast<size_t>(everyone_.size()));
  std::vector<int64_t> receive(static_cast<size_t>(everyone_.size()), 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto& chunk = chunks[i];
    const bool is_compared_here = chunk.reader == everyone_.rank();
    for (const auto rank : chunk.wanted_by) {
      if (is_compared_here && rank != everyone_.rank()) receive[static_cast<size_t>(rank)] += sizeof(Told);
    }
    if (!chunk.is_wanted_by(everyone_.rank())) continue;
    if (problem_.empty()) problem_ = problem_of([&] { own[i] = {read_own(chunk), 1}; });
    if (!is_compared_here) tell[static_cast<size_t>(chunk.reader)].push_back(own[i]);
  }
  std::vector<int64_t> send;
  std::vector<Told> told;
  for (const auto& of_rank : tell) {
    send.push_back(static_cast<int64_t>(of_rank.size() * sizeof(Told)));
    told.insert(told.end(), of_rank.begin(), of_rank.end());
  }
  const auto bytes = at::empty({static_cast<int64_t>(told.size() * sizeof(Told))}, at::kByte);
  if (!told.empty()) std::memcpy(bytes.data_ptr(), told.data(), static_cast<size_t>(bytes.numel()));
  counts_.bytes_sent += bytes.numel();
  const auto received = everyone_.exchange(bytes, send, receive);
  std::vector<const Told*> next;  // by rank
  for (int64_t begin = 0; const auto count : receive) {
    next.push_back(reinterpret_cast<const Told*>(static_cast<const char*>(received.data_ptr()) + begin));
    begin += count;
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].reader != everyone_.rank()) continue;
    auto all = own[i];
    for (const auto rank : chunks[i].wanted_by) {
      if (rank == everyone_.rank()) continue;
      const auto& other = *next[static_cast<size_t>(rank)]++;
      all = {all.sum ^ other.sum, all.is_read & other.is_read};
    }
    // A rank that could not read has said why.
    if (all.is_read && problem_.empty())
      problem_ = problem_of([&] { compare_sums(chunks[i], crc32c_of_parts(all.sum, chunks[i].bytes())); });
  }
}

}  // namespace dtensor::checkpoints
