// The control channel of a job of processes.
#include "src/comm/rendezvous/membership.hpp"

#include <dtensor/base/error.hpp>

#include "src/comm/describe.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace dtensor::comm {

namespace {

constexpr const char* kSilentEnd = "its process ended without a word (killed, crashed, or cut off from the network)";
constexpr const char* kForeignEnd =
    "it sent what no rank of this job sends (its memory is damaged, or it runs another version of the library)";
// How long a rank that is done waits for the others to take note.
constexpr std::chrono::seconds kFarewell{2};
// How often the others tell rank 0 that they are there, once it waits for them, and the shortest silence that it takes for an end.
constexpr Milliseconds kPulse{500}, kSilence{2000};

std::string pack(const Progress& progress) {
  std::string bytes;
  for (const auto& entry : progress) bytes.append(reinterpret_cast<const char*>(&entry), sizeof entry);
  return bytes;
}

Progress unpack(const std::string& bytes) {
  Progress progress;
  uint64_t entry[2];
  for (size_t at = 0; at + sizeof entry <= bytes.size(); at += sizeof entry) {
    std::memcpy(entry, bytes.data() + at, sizeof entry);
    progress[entry[0]] = entry[1];
  }
  return progress;
}

// Whether a frame is one that the peer at the other end sends: rank 0 passes on those of all ranks.
bool is_news(const Frame& frame, int peer, int size) {
  const bool known = frame.kind == Frame::Kind::left ? frame.payload.size() % (2 * sizeof(uint64_t)) == 0
                                                     : frame.kind == Frame::Kind::failed || frame.kind == Frame::Kind::alive;
  return known && frame.rank >= 0 && frame.rank < size && (peer == 0 || frame.rank == peer);
}

}  // namespace

Membership::Membership(int rank, int size, std::vector<Socket> sockets, std::function<void()> on_change)
    : rank_(rank), on_change_(std::move(on_change)), sockets_(std::move(sockets)), members_(size) {
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0) fail("rendezvous", "cannot make a pipe: {}", std::strerror(errno));
  thread_ = std::thread([this] { serve(); });
}

Membership::~Membership() {
  close();
  ::close(wake_[0]);
  ::close(wake_[1]);
}

void Membership::close() {
  if (!thread_.joinable()) return;
  leave("", {});
  {
    std::lock_guard lock(sending_);
    for (auto& socket : sockets_) socket.end_sending();
  }
  {
    std::lock_guard lock(mutex_);
    stop_at_ = Clock::now() + kFarewell;
  }
  [[maybe_unused]] const auto written = write(wake_[1], "", 1);
  thread_.join();
  for (auto& socket : sockets_) socket.close();
}

void Membership::leave(const std::string& why, const Progress& progress) {
  const auto kind = why.empty() ? Frame::Kind::left : Frame::Kind::failed;
  const Frame frame{kind, rank_, why.empty() ? pack(progress) : why};
  {
    std::lock_guard lock(mutex_);
    if (members_[rank_].left) return;
  }
  tell(frame, rank_);
  apply(frame);
}

// Rank 0 tells all others but `except`, another rank tells rank 0. A peer that cannot be told has ended; its own
// connection says so.
void Membership::tell(const Frame& frame, int except) {
  std::lock_guard lock(sending_);
  for (size_t peer = 0; peer < sockets_.size(); ++peer) {
    if (!sockets_[peer].open() || static_cast<int>(peer) == except) continue;
    try {
      sockets_[peer].send(frame);
    } catch (const std::system_error&) {
    } catch (const Socket::TimedOut&) {
    }
  }
}

void Membership::apply(const Frame& frame) {
  {
    std::lock_guard lock(mutex_);
    Member& member = members_.at(frame.rank);
    if (member.left) return;
    member.left = true;
    if (frame.kind == Frame::Kind::left) {
      member.progress = unpack(frame.payload);
    } else if (!failure_) {
      failure_ = departure(frame.rank, frame.payload);
    }
  }
  changed_.notify_all();
  on_change_();
}

void Membership::serve() {
  for (;;) {
    std::vector<pollfd> entries{{wake_[0], POLLIN, 0}};
    std::vector<int> ranks{-1};
    for (size_t rank = 0; rank < sockets_.size(); ++rank) {
      if (!sockets_[rank].open()) continue;
      entries.push_back({sockets_[rank].fd(), POLLIN, 0});
      ranks.push_back(static_cast<int>(rank));
    }
    int timeout = -1;
    bool awaited = false;
    {
      std::lock_guard lock(mutex_);
      awaited = rank_ != 0 && members_[0].left && !cut_off_ && !stop_at_;
      if (awaited) timeout = static_cast<int>(kPulse.count());
      if (stop_at_) timeout = static_cast<int>(std::chrono::ceil<Milliseconds>(*stop_at_ - Clock::now()).count());
      if (stop_at_ && (timeout <= 0 || entries.size() == 1)) return;
    }
    if (poll(entries.data(), entries.size(), timeout) == 0 && awaited) tell({Frame::Kind::alive, rank_, ""}, rank_);
    char drained[16];
    if (entries[0].revents != 0 && read(wake_[0], drained, sizeof drained) < 0) return;
    for (size_t i = 1; i < entries.size(); ++i) {
      if (entries[i].revents != 0) handle(ranks[i]);
    }
  }
}

void Membership::handle(int rank) {
  std::optional<Frame> frame;
  const char* end = kSilentEnd;
  try {
    frame = sockets_[rank].receive(Clock::now() + std::chrono::seconds(10));
    if (frame && !is_news(*frame, rank, static_cast<int>(members_.size()))) {
      frame.reset();
      end = kForeignEnd;
    }
  } catch (const std::system_error&) {
  } catch (const Socket::TimedOut&) {
  }
  if (!frame) {
    {
      std::lock_guard lock(sending_);
      sockets_[rank].close();
    }
    std::lock_guard lock(mutex_);
    cut_off_ = rank == 0;
    changed_.notify_all();
    if (members_[rank].left) return;
    frame = Frame{Frame::Kind::failed, rank, end};
  }
  if (frame->kind == Frame::Kind::alive) {
    std::lock_guard lock(mutex_);
    members_[frame->rank].heard = Clock::now();
    return;
  }
  if (rank_ == 0) tell(*frame, frame->rank);
  apply(*frame);
}

std::optional<std::string> Membership::obstacle(int rank, uint64_t stream, uint64_t sequence) {
  std::lock_guard lock(mutex_);
  if (failure_) return failure_;
  const Member& member = members_[rank];
  if (!member.left) return std::nullopt;
  const auto reached = member.progress.find(stream);
  if (reached != member.progress.end() && reached->second >= sequence) return std::nullopt;
  return departure(rank, "");
}

std::optional<std::string> Membership::failure(Milliseconds patience) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return failure_.has_value(); });
  return failure_;
}

void Membership::wait_until_empty(Milliseconds patience) {
  if (rank_ == 0) patience = std::max(patience, kSilence);
  std::unique_lock lock(mutex_);
  const auto over = [&] {
    return failure_ || cut_off_ || std::ranges::all_of(members_, [](const Member& member) { return member.left; });
  };
  const auto silent_since = [&] {
    auto since = Clock::now();
    for (const Member& member : members_) {
      if (!member.left) since = std::min(since, member.heard);
    }
    return since;
  };
  for (auto end = Clock::now() + patience; end > Clock::now(); end = silent_since() + patience) {
    if (changed_.wait_until(lock, end, over)) return;
  }
}

}  // namespace dtensor::comm
