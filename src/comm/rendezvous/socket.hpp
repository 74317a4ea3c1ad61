// Blocking TCP with deadlines, and the frames that ranks exchange outside of the data path.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace dtensor::comm {

using Clock = std::chrono::steady_clock;

// One control message: what it is, whom it concerns, and its contents.
struct Frame {
  enum class Kind : uint32_t { hello, refused, welcome, address, table, left, failed, alive };
  Kind kind{};
  int32_t rank = 0;
  std::string payload;
};

// A connected socket; closed on destruction. Failures of the network are std::system_error or, for a deadline, TimedOut;
// they are turned into Error where it is known what was being attempted.
class Socket {
 public:
  struct TimedOut {};

  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  // Dials host:port again and again until it answers. Throws TimedOut.
  static Socket dial(const std::string& host, int port, Clock::time_point end);

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void send(const Frame& frame);
  // Empty when the peer has closed the connection.
  std::optional<Frame> receive(Clock::time_point end);
  // Tells the peer that nothing more will be sent.
  void end_sending();
  void close();

  // The numeric address of this end.
  std::string local_address() const;

 private:
  bool read_all(void* data, size_t size, Clock::time_point end);
  int fd_ = -1;
};

// A listening socket. A loopback host listens there only, any other one on all interfaces, of IPv6 and IPv4; port 0 picks a free one.
class Listener {
 public:
  Listener(const std::string& host, int port);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int port() const { return port_; }
  Socket accept(Clock::time_point end);

 private:
  int fd_ = -1;
  int port_ = 0;
};

}  // namespace dtensor::comm
