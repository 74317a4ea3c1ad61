// How changes of weights are sent, and put in place.
#pragma once

#include <dtensor/rl/column.hpp>
#include <dtensor/rl/weight_sync.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

namespace detail {

// Position of a world rank in a mesh of one dimension.
inline int64_t place_of(const DeviceMesh& mesh, int rank) { return std::ranges::find(mesh.ranks(), rank) - mesh.ranks().begin(); }

// What each rank of `mesh` has for each: two all_to_alls, of the numbers of bytes and of the bytes.
inline std::vector<std::vector<uint8_t>> exchange_bytes(const std::vector<std::vector<uint8_t>>& leaving, const DeviceMesh& mesh) {
  auto& group = mesh.communicator(0);
  std::vector<int64_t> send, ones(leaving.size(), 1);
  std::vector<uint8_t> all;
  for (const auto& bytes : leaving) {
    send.push_back(static_cast<int64_t>(bytes.size()));
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  const auto numbers = group.all_to_all(at::tensor(send, at::kLong), ones, ones).get();
  const std::vector<int64_t> receive(numbers.data_ptr<int64_t>(), numbers.data_ptr<int64_t>() + numbers.numel());
  const auto came = group.all_to_all(at::tensor(all, at::kByte), send, receive).get();
  std::vector<std::vector<uint8_t>> arrived;
  const auto* next = came.data_ptr<uint8_t>();
  for (const auto count : receive) {
    arrived.emplace_back(next, next + count);
    next += count;
  }
  return arrived;
}

inline at::Tensor on_host(const at::Tensor& x) { return x.to(at::kCPU).contiguous(); }
inline uint8_t* bytes_at(const at::Tensor& x) { return static_cast<uint8_t*>(x.data_ptr()); }
inline size_t bytes_in(const at::Tensor& x) { return static_cast<size_t>(x.numel()) * x.element_size(); }

// A list of bytes that is read from its begin to its end, the last eight of which are a checksum.
struct Reading {
  const std::vector<uint8_t>* bytes;
  const uint8_t* at;
  uint64_t sum = 1;

  explicit Reading(const std::vector<uint8_t>& from) : bytes(&from), at(from.data()) {}
  const uint8_t* end() const { return bytes->data() + bytes->size() - sizeof(uint64_t); }
  bool is_right() const {
    uint64_t expected = 0;
    if (bytes->empty()) return true;
    std::memcpy(&expected, end(), sizeof(expected));
    return at == end() && expected == sum;
  }
};

}  // namespace detail

// What goes to and comes from each rank of all_, of the tensors of a bucket.
struct WeightSync::Mail {
  std::vector<std::vector<uint8_t>> leaving, arrived{};
  std::vector<uint64_t> sums;
  std::vector<detail::Reading> readings{};

  explicit Mail(int64_t ranks) : leaving(ranks), sums(ranks, 1) {}

  void write(int64_t to, const at::Tensor& old, const at::Tensor& now) {
    append_changes(old.defined() ? detail::bytes_at(old) : nullptr, detail::bytes_at(now), detail::bytes_in(now), leaving[to]);
    sums[to] = detail::checksum(detail::bytes_at(now), detail::bytes_in(now), sums[to]);
  }
  void read(int64_t from, const at::Tensor& bytes) {
    auto& reading = readings[from];
    reading.at = apply_changes(reading.at, reading.end(), detail::bytes_at(bytes), detail::bytes_in(bytes));
    reading.sum = detail::checksum(detail::bytes_at(bytes), detail::bytes_in(bytes), reading.sum);
  }
  void exchange(const DeviceMesh& mesh, SyncCounts& counts) {
    for (size_t r = 0; r < leaving.size(); ++r) {
      if (leaving[r].empty()) continue;
      const auto* sum = reinterpret_cast<const uint8_t*>(&sums[r]);
      leaving[r].insert(leaving[r].end(), sum, sum + sizeof(uint64_t));
      counts.sent += static_cast<int64_t>(leaving[r].size());
    }
    arrived = detail::exchange_bytes(leaving, mesh);
    for (const auto& bytes : arrived) {
      counts.received += static_cast<int64_t>(bytes.size());
      readings.emplace_back(bytes);
    }
  }
};

inline void WeightSync::write(const Tensor& tensor, Mail& mail) const {
  for (const auto& sent : tensor.plan.sent) {
    const auto piece = tensor.had->find(sent.box);
    const auto old = tensor.last.defined() ? detail::on_host(tensor.had->view(tensor.last, piece)) : at::Tensor();
    mail.write(detail::place_of(*all_, sent.to), old, detail::on_host(tensor.had->view(tensor.source, piece)));
  }
}

// This rank's part of the weights with the changes.
inline at::Tensor WeightSync::read(const Tensor& tensor, Mail& mail) const {
  if (!tensor.target.defined()) return {};
  auto result = tensor.target.clone();
  for (const auto& kept : tensor.plan.kept) {
    tensor.has->view(result, tensor.has->find(kept.box)).copy_(tensor.had->view(tensor.source, tensor.had->find(kept.box)));
  }
  for (const auto& received : tensor.plan.received) {
    const auto place = tensor.has->view(result, tensor.has->find(received.box));
    const auto bytes = detail::on_host(place).clone();
    mail.read(detail::place_of(*all_, received.from), bytes);
    place.copy_(bytes);
  }
  return result;
}

inline void WeightSync::exchange(std::vector<Tensor>& bucket, SyncCounts& counts) {
  if (bucket.empty() || !detail::has_rank(all_, World::current().rank())) return bucket.clear();
  Mail mail(all_->size());
  for (const auto& tensor : bucket) write(tensor, mail);
  mail.exchange(*all_, counts);
  std::vector<at::Tensor> results;  // put in place once all are known to be right
  for (const auto& tensor : bucket) results.push_back(read(tensor, mail));
  for (size_t r = 0; r < mail.readings.size(); ++r) {
    require(mail.readings[r].is_right(), detail::kSync,
            "the weights with the changes of rank {} are not that rank's; hint: after writing to them call forget() on all ranks",
            all_->ranks()[r]);
  }
  for (size_t i = 0; i < bucket.size(); ++i) {
    const auto& tensor = bucket[i];
    if (!tensor.plan.sent.empty()) last_[tensor.name] = tensor.source.clone();
    if (!results[i].defined()) continue;
    const auto& after = *tensor.after;
    at::Tensor(to_.at(tensor.name)).copy_(from_local(results[i], after.mesh(), after.placements(), after.sizes()).tensor());
  }
  bucket.clear();
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
