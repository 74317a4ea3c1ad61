#include "src/checkpoint/reader.hpp"

#include "src/checkpoint/host_memory.hpp"
#include "src/checkpoint/index_text.hpp"

#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace dtensor::checkpoints {

namespace {

constexpr int64_t kAlignment = 16;  // of what travels: an element of any dtype may begin there
constexpr size_t kMostFiles = 64;   // open at once

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t bytes_of(const Box& box, const Chunk& chunk) {
  return numel_of(box) * static_cast<int64_t>(c10::elementSize(chunk.tensor->dtype));
}

// The first `bytes` of memory that is made larger where it has fewer. New memory is zero: what cannot be read is sent all the same, and the
// ranks are told at the end.
at::Tensor at_least(at::Tensor& memory, int64_t bytes) {
  if (!memory.defined() || memory.numel() < bytes) memory = host_memory(bytes).zero_();
  return memory.narrow(0, 0, bytes);
}

// The elements of `box` in memory that has those of `all`, row-major.
at::Tensor part_of_memory(void* memory, const Box& all, const Box& box, c10::ScalarType dtype) {
  std::vector<int64_t> sizes;
  for (const auto& side : all) sizes.push_back(side.length());
  return part_of_view(at::from_blob(memory, sizes, at::TensorOptions(dtype)), all, box);
}

}  // namespace

at::Tensor part_of_view(const at::Tensor& all_view, const Box& all, const Box& box) {
  auto view = all_view;
  for (size_t d = 0; d < box.size(); ++d) {
    if (box[d] != all[d]) view = view.narrow(static_cast<int64_t>(d), box[d].begin - all[d].begin, box[d].length());
  }
  return view;
}

bool has_own_bits(const at::Tensor& x) { return x.is_cpu() && x.is_contiguous() && !x.is_conj() && !x.is_neg(); }

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  const bool plain = has_own_bits(to) && to.scalar_type() == from.scalar_type() && from.is_contiguous();
  if (plain) std::memcpy(to.data_ptr(), from.data_ptr(), static_cast<size_t>(to.numel()) * to.element_size());
  else to.copy_(from);
}

Reader::Reader(const Index& index, const std::map<std::string, at::Tensor>& tensors, const AllHoldings& wanted, const Everyone& everyone)
    : index_(index), tensors_(tensors), wanted_(wanted), everyone_(everyone) {}

std::string Reader::run(const ReadPlan& plan) {
  const auto attempt = [&](const auto& work) {
    if (problem_.empty()) problem_ = problem_of(work);
  };
  for (size_t f = 0; f < index_.files.size(); ++f) {
    if (plan.header_readers[f] != everyone_.rank() || index_.files[f].header_bytes == 0) continue;
    const auto number = static_cast<int32_t>(f);  // its header is not needed, but a bit that changed there is a sign
    attempt([&] { check_header(index_, number, file(number)); });
  }
  if (!plan.apart.empty()) read_apart(plan.apart);
  std::vector<std::vector<const Chunk*>> rounds(static_cast<size_t>(plan.rounds));
  for (const auto& chunk : plan.chunks) rounds[static_cast<size_t>(chunk.round)].push_back(&chunk);
  for (size_t r = 0; r < rounds.size(); ++r) {
    auto& chunks = rounds[r];
    std::ranges::stable_sort(chunks, {}, &Chunk::reader);
    std::vector<int64_t> send;  // also with a problem: the others wait for as many bytes as were planned
    auto parcels = parcels_of(chunks, send);
    const auto bytes = at_least(sent_, std::accumulate(send.begin(), send.end(), int64_t{0}));
    for (const auto* chunk : chunks) {
      if (chunk->reader == everyone_.rank()) attempt([&] { read(*chunk, parcels[chunk], static_cast<char*>(bytes.data_ptr())); });
    }
    if (!plan.sends[r]) continue;
    counts_.bytes_sent += bytes.numel();
    const auto received = everyone_.exchange(bytes, send, to_receive(chunks));
    attempt([&] { unpack(chunks, received); });
  }
  return problem_;
}

const disk::File& Reader::file(int32_t number) {
  const auto known = files_.find(number);
  if (known != files_.end()) return known->second;
  if (files_.size() >= kMostFiles) files_.clear();
  return files_.emplace(number, open_file(index_, number)).first->second;
}

const std::vector<Reader::Target>& Reader::targets(const std::string& name) {
  const auto [entry, is_new] = targets_.try_emplace(name);
  if (!is_new) return entry->second;
  const auto& tensor = tensors_.at(name);
  for (const auto& region : wanted_.at(name).regions) {
    if (std::ranges::find(region.ranks, everyone_.rank()) == region.ranks.end()) continue;
    for (const auto& box : region.boxes) entry->second.push_back({box, view_of(tensor, box)});
  }
  return entry->second;
}

void* Reader::place_of(const Chunk& chunk) {
  const auto parts = parts_of(chunk);
  if (parts.size() != 1) return nullptr;
  for (const auto& target : targets(*chunk.name)) {
    const auto both = common(target.box, parts[0].box);
    if (!both) continue;
    if (*both != parts[0].box || target.view.scalar_type() != chunk.tensor->dtype) return nullptr;
    const auto view = part_of_view(target.view, target.box, *both);
    return has_own_bits(view) ? view.data_ptr() : nullptr;
  }
  return nullptr;
}

void Reader::read(const Chunk& chunk, const std::vector<Parcel>& parcels, char* sent) {
  const bool is_mine = chunk.is_wanted_by(everyone_.rank());
  auto* place = is_mine ? place_of(chunk) : nullptr;
  auto* memory = place ? place : at_least(chunk_memory_, chunk.bytes()).data_ptr();
  file(chunk.piece->file).read(memory, static_cast<size_t>(chunk.bytes()), chunk.offset());
  check_sum(chunk, memory);
  counts_.bytes_read += chunk.bytes();
  if (is_mine && !place) put(chunk, memory);
  pack(chunk, parcels, memory, sent);
}

void Reader::compare_sums(const Chunk& chunk, uint32_t sum) const {
  if (chunk.piece->sums.empty()) return;
  const auto item = static_cast<int64_t>(c10::elementSize(chunk.tensor->dtype));
  if (sum == chunk.piece->sums[static_cast<size_t>(chunk.elements.begin * item / index_.chunk_bytes)]) return;
  throw std::runtime_error(fmt::format("'{}{} in '{}': the checksum of its bytes {} to {} is another; hint: load an earlier step",
                                       *chunk.name, kIsDamaged, index_.path_of(*chunk.piece), chunk.offset(),
                                       chunk.offset() + chunk.bytes()));
}

void Reader::put(const Chunk& chunk, void* data) {
  const auto item = static_cast<int64_t>(c10::elementSize(chunk.tensor->dtype));
  auto* bytes = static_cast<char*>(data);
  for (const auto& part : parts_of(chunk)) {
    for (const auto& target : targets(*chunk.name)) {
      const auto both = common(target.box, part.box);
      if (both)
        copy_elements(part_of_view(target.view, target.box, *both),
                      part_of_memory(bytes + part.begin * item, part.box, *both, chunk.tensor->dtype));
    }
  }
}

std::vector<Reader::Share> Reader::shares(const Chunk& chunk, int rank) const {
  std::vector<Share> all;
  const auto& regions = wanted_.at(*chunk.name).regions;
  const auto region =
      std::ranges::find_if(regions, [&](const Region& each) { return std::ranges::find(each.ranks, rank) != each.ranks.end(); });
  for (const auto& part : parts_of(chunk)) {
    for (const auto& box : region->boxes) {
      if (auto both = common(box, part.box)) all.push_back({std::move(*both), part});
    }
  }
  return all;
}

Reader::Parcels Reader::parcels_of(const std::vector<const Chunk*>& chunks, std::vector<int64_t>& counts) const {
  Parcels all;
  counts.assign(static_cast<size_t>(everyone_.size()), 0);
  int64_t end = 0;
  for (int rank = 0; rank < everyone_.size(); ++rank) {
    const auto begin = end;
    for (const auto* chunk : chunks) {
      if (rank == everyone_.rank() || chunk->reader != everyone_.rank() || !chunk->is_wanted_by(rank)) continue;
      for (auto& share : shares(*chunk, rank)) {
        const auto bytes = bytes_of(share.box, *chunk);
        all[chunk].push_back({std::move(share), end});
        end += aligned(bytes);
      }
    }
    counts[static_cast<size_t>(rank)] = end - begin;
  }
  return all;
}

void Reader::pack(const Chunk& chunk, const std::vector<Parcel>& parcels, void* data, char* sent) {
  const auto dtype = chunk.tensor->dtype;
  for (const auto& [share, begin] : parcels) {
    auto* from = static_cast<char*>(data) + share.part.begin * static_cast<int64_t>(c10::elementSize(dtype));
    copy_elements(part_of_memory(sent + begin, share.box, share.box, dtype), part_of_memory(from, share.part.box, share.box, dtype));
  }
}

std::vector<int64_t> Reader::to_receive(const std::vector<const Chunk*>& chunks) const {
  std::vector<int64_t> counts(static_cast<size_t>(everyone_.size()), 0);
  for (const auto* chunk : chunks) {
    if (chunk->reader == everyone_.rank() || !chunk->is_wanted_by(everyone_.rank())) continue;
    for (const auto& share : shares(*chunk, everyone_.rank()))
      counts[static_cast<size_t>(chunk->reader)] += aligned(bytes_of(share.box, *chunk));
  }
  return counts;
}

void Reader::unpack(const std::vector<const Chunk*>& chunks, const at::Tensor& received) {
  auto* next = static_cast<char*>(received.data_ptr());
  for (const auto* chunk : chunks) {
    if (chunk->reader == everyone_.rank() || !chunk->is_wanted_by(everyone_.rank())) continue;
    const auto dtype = chunk->tensor->dtype;
    for (const auto& share : shares(*chunk, everyone_.rank())) {
      for (const auto& target : targets(*chunk->name)) {
        const auto both = common(target.box, share.box);
        if (both) copy_elements(part_of_view(target.view, target.box, *both), part_of_memory(next, share.box, *both, dtype));
      }
      next += aligned(bytes_of(share.box, *chunk));
    }
  }
}

}  // namespace dtensor::checkpoints
