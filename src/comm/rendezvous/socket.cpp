// TCP sockets with deadlines.
#include "src/comm/rendezvous/socket.hpp"

#include <dtensor/base/error.hpp>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace dtensor::comm {

namespace {

constexpr uint32_t kMagic = 0x64740001;         // "dt", version 1
constexpr uint64_t kLongestFrame = 1ull << 28;  // anything longer is not ours

struct Header {
  uint32_t magic;
  Frame::Kind kind;
  int32_t rank;
  uint32_t reserved;
  uint64_t length;
};

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// Waits until `fd` is ready; false after `end`.
bool wait_ready(int fd, short events, Clock::time_point end) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{fd, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw_errno("poll");
  }
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, int flags, int family = AF_UNSPEC) {
  addrinfo hints{};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return {nullptr, freeaddrinfo};
  return {found, freeaddrinfo};
}

// A peer whose host vanishes sends no end of stream; probes notice it within half a minute.
void configure(int fd) {
  const int on = 1, idle = 10, interval = 5, count = 4;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

// One attempt at one address; -1 when nobody answers.
int try_connect(const addrinfo& address, Clock::time_point end) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  int error = connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS && wait_ready(fd, POLLOUT, end)) {
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  }
  if (error == 0) return fd;
  ::close(fd);
  return -1;
}

// -1 and errno where that address cannot be listened on.
int try_listen(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, 1024) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Socket::~Socket() { close(); }

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void Socket::end_sending() {
  if (fd_ >= 0) shutdown(fd_, SHUT_WR);
}

Socket Socket::dial(const std::string& host, int port, Clock::time_point end) {
  for (;;) {
    const auto addresses = resolve(host, port, 0);
    for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
      const int fd = try_connect(*address, std::min(end, Clock::now() + std::chrono::seconds(5)));
      if (fd < 0) continue;
      configure(fd);
      return Socket(fd);
    }
    if (Clock::now() + std::chrono::milliseconds(50) >= end) throw TimedOut{};
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

void Socket::send(const Frame& frame) {
  const Header header{kMagic, frame.kind, frame.rank, 0, frame.payload.size()};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += frame.payload;
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(fd_, POLLOUT, Clock::now() + std::chrono::seconds(10))) throw TimedOut{};
    } else if (errno != EINTR) {
      throw_errno("send");
    }
  }
}

bool Socket::read_all(void* data, size_t size, Clock::time_point end) {
  for (size_t done = 0; done < size;) {
    const ssize_t n = ::recv(fd_, static_cast<char*>(data) + done, size - done, 0);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n == 0 || errno == ECONNRESET) {
      return false;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(fd_, POLLIN, end)) throw TimedOut{};
    } else if (errno != EINTR) {
      throw_errno("recv");
    }
  }
  return true;
}

std::optional<Frame> Socket::receive(Clock::time_point end) {
  Header header{};
  if (!read_all(&header, sizeof header, end)) return std::nullopt;
  if (header.magic != kMagic || header.kind > Frame::Kind::alive || header.length > kLongestFrame)
    throw std::system_error(EPROTO, std::generic_category(), "not a dtensor peer");
  Frame frame{header.kind, header.rank, ""};
  // Memory for what has come, not for what was announced: anybody may have connected.
  constexpr uint64_t kPiece = 1 << 20;
  for (uint64_t done = 0; done < header.length; done = frame.payload.size()) {
    frame.payload.resize(std::min(header.length, done + kPiece));
    if (!read_all(frame.payload.data() + done, frame.payload.size() - done, end)) return std::nullopt;
  }
  return frame;
}

std::string Socket::local_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char text[NI_MAXHOST] = "";
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0) throw_errno("getsockname");
  getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  const std::string result = text;
  return result.starts_with("::ffff:") ? result.substr(7) : result;
}

Listener::Listener(const std::string& host, int port) {
  const bool loopback = host == "localhost" || host == "::1" || host.starts_with("127.");
  int error = EADDRNOTAVAIL;
  // All interfaces, seen from IPv6, are those of IPv4 too.
  for (const int family : loopback ? std::vector{AF_UNSPEC} : std::vector{AF_INET6, AF_INET}) {
    const auto addresses = resolve(loopback ? host : "", port, AI_PASSIVE, family);
    for (const addrinfo* address = addresses.get(); address && fd_ < 0; address = address->ai_next) {
      const int fd = try_listen(*address);
      if (fd >= 0) fd_ = fd;
      else error = errno;
    }
  }
  require(fd_ >= 0, "rendezvous", "rank 0 cannot listen on {}:{}: {}; hint: another job may use the port; choose another MASTER_PORT",
          host, port, std::strerror(error));
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&bound), &length) != 0) throw_errno("getsockname");
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                            : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

Listener::~Listener() {
  if (fd_ >= 0) ::close(fd_);
}

Socket Listener::accept(Clock::time_point end) {
  for (;;) {
    const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      configure(fd);
      return Socket(fd);
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED) throw_errno("accept");
    if (!wait_ready(fd_, POLLIN, end)) throw Socket::TimedOut{};
  }
}

}  // namespace dtensor::comm
