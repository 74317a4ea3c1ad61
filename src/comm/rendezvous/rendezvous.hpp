// How processes find each other: every rank connects to rank 0, which waits for all of them and then passes on their addresses. The
// connections stay open as the control channel (membership.hpp).
#pragma once

#include <dtensor/comm/transport.hpp>

#include "src/comm/rendezvous/socket.hpp"

namespace dtensor::comm {

// The star of connections around rank 0: rank 0 has one to each other rank, the others one to rank 0.
class Rendezvous {
 public:
  // Returns when all ranks are here. Throws after the deadline, naming the address and the missing ranks. `listener` is
  // rank 0's, if it listens already.
  Rendezvous(const GlooOptions& options, std::shared_ptr<Listener> listener);

  // The address at which the other ranks can reach this host.
  std::string local_address() const;

  // Sends one string to each rank; returns the strings that the ranks sent to this one.
  std::vector<std::string> exchange(const std::vector<std::string>& mine);

  // By rank; open where there is a connection. Ends the rendezvous.
  std::vector<Socket> take_sockets() { return std::move(sockets_); }

 private:
  void gather(Listener& listener);
  void admit(Socket socket);
  [[noreturn]] void give_up(const std::string& text);
  Frame next(int rank, Frame::Kind kind);
  std::string address() const;

  const GlooOptions options_;
  const Clock::time_point end_;
  std::vector<Socket> sockets_;
};

// Under torchrun an agent already listens on options.host:port, with a c10d store: rank 0 listens on a free port instead
// and leaves its address in that store. Sets host and port; returns rank 0's listener.
std::shared_ptr<Listener> meet_through_agent(GlooOptions& options);
// Sets host and port from what rank 0 leaves there: "29501 node7". Throws for anything else.
void read_address(const std::string& text, GlooOptions& options);

// make_gloo_transport for a rank 0 that listens already.
std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options, std::shared_ptr<Listener> listener);

}  // namespace dtensor::comm
