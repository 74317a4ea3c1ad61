// How ranks learn what became of a method that others ran: its first rank sends them a few bytes, which they take when they ask.
#pragma once

#include <dtensor/rl/batch.hpp>

#include <ATen/ops/zeros.h>

#include <chrono>
#include <deque>
#include <thread>

#pragma GCC visibility push(default)

namespace dtensor::rl::detail {

inline constexpr const char* kGroup = "rl::WorkerGroup";

// One call of a method of a role.
struct Call {
  std::string role, method;
  int64_t step = 0;
  RowLayout input, output;           // how the batch comes, and how results lie
  std::vector<std::string> gives{};  // names of results
  bool own_results = false;

  std::string name() const { return role + "." + method; }
  [[noreturn]] void failed(const std::string& why) const { fail(kGroup, "{} failed at step {}: {}", name(), step, why); }
};

// The text of an error without its stack.
inline std::string reason_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

// What a rank waits for from others, in the order in which they send it.
class Inbox {
 public:
  struct Letter {
    int from = 0;
    std::optional<nlohmann::json> text{};
  };
  using LetterPtr = std::shared_ptr<Letter>;

  static Inbox& own() { return World::current().local<Inbox>(); }

  LetterPtr expect(int from) {
    auto& queue = awaited_[from];
    if (queue.size() >= kMost) take(from);  // a rank runs ahead of another by so many methods at most
    return queue.emplace_back(std::make_shared<Letter>(Letter{from}));
  }
  const nlohmann::json& read(const LetterPtr& letter) {
    while (!letter->text) take(letter->from);
    return *letter->text;
  }

 private:
  static constexpr size_t kMost = 256;
  void take(int from) {
    auto& queue = awaited_[from];
    queue.front()->text = nlohmann::json::from_cbor(receive_bytes(from, kResultsTag));
    queue.pop_front();
  }
  std::map<int, std::deque<LetterPtr>> awaited_;
};

// On the first rank of the call: text() to all ranks that do not run it.
template <class Text>
void tell(const Call& call, const Text& text) {
  const auto& ranks = call.input.mesh.ranks();
  const auto& world = World::current();
  if (world.rank() != ranks.front() || static_cast<int>(ranks.size()) == world.size()) return;
  const auto bytes = nlohmann::json::to_cbor(text());
  for (int rank = 0; rank < world.size(); ++rank) {
    if (std::ranges::find(ranks, rank) == ranks.end()) send_bytes(bytes, rank, kResultsTag);
  }
}

inline nlohmann::json describe(const Batch& results) {
  nlohmann::json columns = nlohmann::json::object();
  for (const auto& name : results.names()) {
    const auto& column = results.column(name);
    columns[name] = {{"rows", column.size()}};
    if (!column.is_tensor()) continue;
    columns[name]["sizes"] = column.tensor().sizes().vec();
    columns[name]["dtype"] = static_cast<int>(column.tensor().scalar_type());
  }
  return {{"columns", columns}, {"meta", results.meta()}};
}

// A result on ranks that did not run the method: absent there.
inline Column::Values absent(const nlohmann::json& column, const RowLayout& layout) {
  const auto rows = column.at("rows").get<int64_t>();
  if (!column.contains("sizes")) return {.size = rows};
  const NoSpmd plain;
  const auto dtype = static_cast<at::ScalarType>(column.at("dtype").get<int>());
  const auto like = at::empty({0}, at::TensorOptions(dtype).device(layout.mesh.device_type()));
  const auto sizes = column.at("sizes").get<std::vector<int64_t>>();
  return {.tensor = from_local(like, layout.mesh, layout.placements, sizes).tensor(), .size = rows};
}

inline Batch results_elsewhere(const Call& call) {
  const auto letter = Inbox::own().expect(call.input.mesh.ranks().front());
  const auto read = [call, letter]() -> const nlohmann::json& {
    try {
      Inbox::own().read(letter);
    } catch (const std::exception& error) {
      call.failed("its first rank said nothing: " + reason_of(error));
    }
    if (letter->text->contains("error")) call.failed(letter->text->at("error").get<std::string>());
    return *letter->text;
  };
  Batch results;
  const auto& ranks = call.output.mesh.ranks();
  for (const auto& name : call.gives) {
    const auto make = [read, name, layout = call.output] { return absent(read().at("columns").at(name), layout); };
    results.set(name, Column(make, {}, call.output.mesh, {ranks.begin(), ranks.end()}));
  }
  results.add_meta([read] { return read().at("meta"); });
  return results;
}

// The reasons of all ranks of a mesh, by place: an all_gather of 512 bytes each. A rank that has a reason while others work on waits for
// them a little, since its end is what they notice; then it has its own reason only.
inline std::vector<std::string> reasons_on(const DeviceMesh& mesh, const std::string& own) {
  constexpr int64_t kBytes = 512;
  constexpr int kMilliseconds = 3000;
  const NoSpmd plain;
  auto text = at::zeros({kBytes}, at::kByte);
  std::copy_n(own.begin(), std::min<size_t>(own.size(), kBytes - 1), text.data_ptr<uint8_t>());
  const DeviceMesh host(c10::kCPU, mesh.ranks(), {mesh.size()}, {"workers"});
  auto told = host.communicator(0).all_gather(text, std::vector<int64_t>(mesh.size(), kBytes));
  for (int i = 0; !own.empty() && told.work && !told.work->done(); ++i) {
    if (i == kMilliseconds) return {own};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const auto all = std::move(told).get();
  std::vector<std::string> reasons;
  for (int64_t r = 0; r < mesh.size(); ++r) reasons.emplace_back(reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + r * kBytes);
  return reasons;
}

// Why the call failed on the first of its ranks on which it did; empty: on none. Every rank of it calls this, with its own reason.
inline std::string first_failure(const Call& call, const std::string& own) {
  const auto named = own.empty() ? own : fmt::format("on rank {}: {}", World::current().rank(), own);
  if (call.input.mesh.size() == 1) return named;
  try {
    for (const auto& reason : reasons_on(call.input.mesh, named)) {
      if (!reason.empty()) return reason;
    }
    return {};
  } catch (const std::exception& error) {
    return named.empty() ? "on another rank: " + reason_of(error) : named;
  }
}

}  // namespace dtensor::rl::detail

#pragma GCC visibility pop
