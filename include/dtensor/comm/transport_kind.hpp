// The transports that a program can choose by name. Each registers itself, in its own folder; there is no list of them.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::comm {

class Listener;

// Ranks that are threads of this process.
struct ThreadsJob {
  int ranks = 1;
  Milliseconds deadline = kDefaultDeadline;
};

// A rank that is a process of its own.
struct ProcessJob {
  GlooOptions meeting;                 // its rank, the number of ranks, and where they meet
  std::shared_ptr<Listener> listener;  // of rank 0, if it already listens
  std::optional<int> device;           // its CUDA device, if the launcher tells
};

struct TransportKind {
  using MakeRank = std::function<std::unique_ptr<Transport>(int rank)>;  // called once on each rank's thread

  std::string name = {};     // "shm": what --transport says
  std::string missing = {};  // empty: this build has it; else how to get a build that does
  std::function<MakeRank(const ThreadsJob&)> threads = {};                          // null: its ranks are processes
  std::function<std::unique_ptr<Transport>(const ProcessJob&)> process = {};        // null: its ranks are threads
  bool one_for_all = false;  // one rank runs and stands for all, however many
};

// Registers a transport by its name until the program ends. If two have the same name, the later one counts, unless it is missing.
//
//   const RegisterTransport mine({.name = "mine", .process = [](const ProcessJob& job) { return std::make_unique<Mine>(job); }});
struct RegisterTransport {
  explicit RegisterTransport(TransportKind kind);
};

// Throws for an unknown name, listing the known ones, and for a transport that this build does not have.
const TransportKind& transport_kind(std::string_view name);

// All transports, sorted by name.
std::vector<const TransportKind*> transport_kinds();

}  // namespace dtensor::comm

#pragma GCC visibility pop
