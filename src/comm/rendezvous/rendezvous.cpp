// The rendezvous of processes at rank 0.
#include "src/comm/rendezvous/rendezvous.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/describe.hpp"

#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

namespace dtensor::comm {

namespace {

std::string pack(const std::vector<std::string>& strings) {
  std::string bytes;
  for (const auto& text : strings) {
    const uint64_t length = text.size();
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes += text;
  }
  return bytes;
}

// Empty unless the bytes are `count` strings.
std::vector<std::string> unpack(std::string_view bytes, int count) {
  std::vector<std::string> strings;
  while (static_cast<int>(strings.size()) < count) {
    uint64_t length = 0;
    if (bytes.size() < sizeof length) return {};
    std::memcpy(&length, bytes.data(), sizeof length);
    bytes.remove_prefix(sizeof length);
    if (length > bytes.size()) return {};
    strings.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
  }
  if (!bytes.empty()) return {};
  return strings;
}

// Empty: it is sent.
std::string problem_of_sending(Socket& socket, const Frame& frame) {
  try {
    socket.send(frame);
    return "";
  } catch (const Socket::TimedOut&) {
    return "takes no messages";
  } catch (const std::system_error& error) {
    return fmt::format("went away: {}", error.what());
  }
}

// Whether a connection could not be accepted for want of what waiting does not bring.
bool is_exhausted(const std::system_error& error) {
  const int code = error.code().value();
  return code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM;
}

}  // namespace

Rendezvous::Rendezvous(const GlooOptions& options, std::shared_ptr<Listener> listener)
    : options_(options), end_(Clock::now() + options.deadline), sockets_(options.size) {
  if (options_.rank == 0) {
    if (!listener) listener = std::make_shared<Listener>(options_.host, options_.port);
    gather(*listener);
    return;
  }
  try {
    sockets_[0] = Socket::dial(options_.host, options_.port, end_);
    sockets_[0].send({Frame::Kind::hello, options_.rank, std::to_string(options_.size)});
  } catch (const Socket::TimedOut&) {
    give_up("nobody answers there; missing: rank 0");
  } catch (const std::system_error& error) {
    give_up(error.what());
  }
  next(0, Frame::Kind::welcome);
}

std::string Rendezvous::address() const { return fmt::format("{}:{}", options_.host, options_.port); }

void Rendezvous::give_up(const std::string& text) {
  fail("rendezvous", "rank {} of {} found no complete job at {} within {} s: {}; hint: start all ranks with the same MASTER_ADDR and "
       "MASTER_PORT, reachable from every host", options_.rank, options_.size, address(),
       static_cast<double>(options_.deadline.count()) / 1000, text);
}

// Rank 0: waits for everyone; tells those who came when somebody did not.
void Rendezvous::gather(Listener& listener) {
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int rank = 1; rank < options_.size; ++rank) {
      if (!sockets_[rank].open()) ranks.push_back(rank);
    }
    return ranks;
  };
  const auto refuse = [&](const std::string& text) {
    for (auto& socket : sockets_) {
      if (socket.open()) socket.send({Frame::Kind::refused, 0, text});
    }
    give_up(text);
  };
  while (!missing().empty()) {
    try {
      admit(listener.accept(end_));
    } catch (const Socket::TimedOut&) {
      if (Clock::now() < end_) continue;  // a stranger that connected and said nothing
      refuse("missing: " + rank_list(missing()));
    } catch (const std::system_error& error) {
      if (is_exhausted(error)) refuse(fmt::format("{}; missing: {}", error.what(), rank_list(missing())));
      continue;  // a stranger that does not speak our protocol, or went away
    }
  }
  for (int rank = 1; rank < options_.size; ++rank) {
    const auto problem = problem_of_sending(sockets_[rank], {Frame::Kind::welcome, 0, ""});
    if (!problem.empty()) give_up(fmt::format("rank {} {}", rank, problem));
  }
}

void Rendezvous::admit(Socket socket) {
  const auto hello = socket.receive(std::min(end_, Clock::now() + std::chrono::seconds(5)));
  if (!hello || hello->kind != Frame::Kind::hello) return;
  std::string objection;
  if (hello->payload != std::to_string(options_.size)) {
    objection = fmt::format("rank {} says the job has {} ranks, rank 0 says {}", hello->rank, hello->payload, options_.size);
  } else if (hello->rank <= 0 || hello->rank >= options_.size) {
    objection = fmt::format("rank {} is not in a job of {}", hello->rank, options_.size);
  } else if (sockets_[hello->rank].open()) {
    objection = fmt::format("rank {} came twice; another job may use the same port", hello->rank);
  }
  if (objection.empty()) {
    sockets_[hello->rank] = std::move(socket);
  } else {
    socket.send({Frame::Kind::refused, 0, objection});
  }
}

Frame Rendezvous::next(int rank, Frame::Kind kind) {
  try {
    auto frame = sockets_[rank].receive(end_ + std::chrono::seconds(1));  // rank 0's own verdict comes first
    if (frame && frame->kind == Frame::Kind::refused) give_up(frame->payload);
    if (!frame || frame->kind != kind) give_up(fmt::format("rank {} went away", rank));
    return std::move(*frame);
  } catch (const Socket::TimedOut&) {
    give_up(fmt::format("rank {} does not answer", rank));
  } catch (const std::system_error& error) {
    give_up(fmt::format("rank {}: {}", rank, error.what()));
  }
}

std::string Rendezvous::local_address() const {
  for (const auto& socket : sockets_) {
    if (socket.open()) return socket.local_address();
  }
  return "127.0.0.1";
}

std::vector<std::string> Rendezvous::exchange(const std::vector<std::string>& mine) {
  const auto tell = [&](int rank, const Frame& frame) {
    const auto problem = problem_of_sending(sockets_[rank], frame);
    if (!problem.empty()) give_up(fmt::format("rank {} {}", rank, problem));
  };
  const auto next_strings = [&](int rank, Frame::Kind kind) {
    const auto payload = next(rank, kind).payload;
    auto strings = unpack(payload, options_.size);
    require(!strings.empty(), "rendezvous", "rank {} sent {} bytes that are not a text for each of the {} ranks; hint: all ranks must run "
            "the same version of the library, and nothing else may use the port of {}", rank, payload.size(), options_.size, address());
    return strings;
  };
  if (options_.rank != 0) {
    tell(0, {Frame::Kind::address, options_.rank, pack(mine)});
    return next_strings(0, Frame::Kind::table);
  }
  std::vector<std::vector<std::string>> given{mine};
  for (int rank = 1; rank < options_.size; ++rank) given.push_back(next_strings(rank, Frame::Kind::address));
  const auto column = [&](int rank) {
    std::vector<std::string> result;
    for (const auto& row : given) result.push_back(row.at(rank));
    return result;
  };
  for (int rank = 1; rank < options_.size; ++rank) tell(rank, {Frame::Kind::table, 0, pack(column(rank))});
  return column(0);
}

}  // namespace dtensor::comm
