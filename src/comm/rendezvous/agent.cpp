// Meeting through the store of torchrun's agent.
#include <dtensor/base/error.hpp>

#include "src/comm/rendezvous/rendezvous.hpp"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <charconv>
#include <cstdlib>

#include <unistd.h>

namespace dtensor::comm {

namespace {

constexpr int kLastPort = 65535;

// The agent's store still has the keys of earlier jobs of this program, and after a restart those of the attempt before.
std::string next_key() {
  static std::atomic<int> jobs{0};
  const char* attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return fmt::format("dtensor/rank0/{}/{}", attempt ? attempt : "0", jobs++);
}

// Newer libtorch refuses even a client of a libuv server when it is built without libuv; set and get need none.
template <class Options>
void avoid_libuv(Options& options) {
  if constexpr (requires { options.useLibUV; }) options.useLibUV = false;
}

// Rank 0 runs on any host of the job; its own name is what the others can resolve, loopback what a single host needs.
std::string own_name(const GlooOptions& options) {
  if (options.host == "localhost" || options.host.starts_with("127.") || options.host == "::1") return options.host;
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

void read_address(const std::string& text, GlooOptions& options) {
  int port = 0;
  const auto* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, port);
  require(error == std::errc() && port > 0 && port <= kLastPort && end - rest > 1 && *rest == ' ', "rendezvous",
          "the store has '{}' where rank 0 leaves its port and host; expected such as '29501 node7'; hint: all ranks must run the same "
          "version of the library", text.substr(0, 200));
  options.port = port;
  options.host = std::string(rest + 1, end);
}

std::shared_ptr<Listener> meet_through_agent(GlooOptions& options) {
  const auto key = next_key();
  try {
    c10d::TCPStoreOptions store_options;
    store_options.port = static_cast<uint16_t>(options.port);
    store_options.timeout = options.deadline;
    avoid_libuv(store_options);
    c10d::TCPStore store(options.host, store_options);
    if (options.rank == 0) {
      options.host = own_name(options);
      auto listener = std::make_shared<Listener>(options.host, 0);
      options.port = listener->port();
      const std::string address = fmt::format("{} {}", options.port, options.host);
      store.set(key, std::vector<uint8_t>(address.begin(), address.end()));
      return listener;
    }
    const auto bytes = store.get(key);
    const std::string address(bytes.begin(), bytes.end());
    read_address(address, options);
    return nullptr;
  } catch (const c10::Error& error) {
    fail("rendezvous", "rank {} cannot meet the others through torchrun's store at {}:{}: {}", options.rank, options.host, options.port,
         error.what_without_backtrace());
  }
}

}  // namespace dtensor::comm
