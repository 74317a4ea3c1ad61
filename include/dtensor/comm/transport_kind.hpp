// The transports that a program may choose from by name. Each registers itself, in its folder, so nothing lists them.
#pragma once

#include <dtensor/comm/transport.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::comm {

class Listener;

// Ranks that are threads of this process.
struct ThreadsJob {
  int ranks = 1;
  Milliseconds deadline{300'000};
};

// A rank that is a process of its own.
struct ProcessJob {
  GlooOptions meeting;                 // its rank, how many there are, and where they meet
  std::shared_ptr<Listener> listener;  // of rank 0, if it listens there already
  std::optional<int> device;           // its CUDA device, where the launcher says so
};

struct TransportKind {
  using MakeRank = std::function<std::unique_ptr<Transport>(int rank)>;  // called once on each rank's thread

  std::string name = {};     // "shm": what --transport says
  std::string missing = {};  // why this build does not have it, and what to do about it; empty: it does
  std::function<MakeRank(const ThreadsJob&)> threads = {};                          // null: its ranks are processes
  std::function<std::unique_ptr<Transport>(const ProcessJob&)> process = {};        // null: its ranks are threads
  bool one_for_all = false;  // one rank stands for all, of which there may be any number
};

// Makes a transport known by its name, for as long as the program runs. Of two of one name the later one stays, unless it is missing.
//
//   const RegisterTransport mine({.name = "mine", .process = [](const ProcessJob& job) { return std::make_unique<Mine>(job); }});
struct RegisterTransport {
  explicit RegisterTransport(TransportKind kind);
};

// Throws for a name that nobody registered, with those that are known, and for one that this build does not have.
const TransportKind& transport_kind(std::string_view name);

// All of them, by name.
std::vector<const TransportKind*> transport_kinds();

}  // namespace dtensor::comm
