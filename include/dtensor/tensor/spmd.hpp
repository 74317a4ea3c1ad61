// The region in which a single-device program runs on a mesh.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <memory>

namespace dtensor {

namespace detail {
class Region;
}

// While it lives, in this thread: factories (torch::zeros, torch::randn, a module's parameters, ...) make replicated DTensors on
// `mesh`, and plain tensors in operators with DTensors count as replicated. Random factories and initializers draw from this
// rank's generator, so equal seeds give equal values on every rank. Nests; not copyable.
//
// Regions of all kinds end in any order: what begins inside of one and outlives it goes on. A thread whose region is destroyed by another
// thread is in it until it next begins or ends a region itself.
class Spmd {
 public:
  explicit Spmd(const DeviceMesh& mesh);
  ~Spmd();
  Spmd(const Spmd&) = delete;
  Spmd& operator=(const Spmd&) = delete;

  // The innermost region's mesh, or null outside of any.
  static const DeviceMesh* current();

 private:
  std::shared_ptr<detail::Region> region_;
};

// While it lives, in this thread, it is as outside of every Spmd: factories make plain tensors.
class NoSpmd {
 public:
  NoSpmd();
  ~NoSpmd();
  NoSpmd(const NoSpmd&) = delete;
  NoSpmd& operator=(const NoSpmd&) = delete;

 private:
  std::shared_ptr<detail::Region> region_;
};

// Whether plain tensors used as replicated inside Spmd are compared between ranks (a hash, on the first use in each kind of
// call). On by default; DTENSOR_CHECK_REPLICATED=0 turns it off. Thread-local.
void set_replication_check(bool on);
bool replication_check();

}  // namespace dtensor
