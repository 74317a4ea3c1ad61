// The region in which a single-device program runs on a mesh.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

namespace detail {
class Region;
}

// While it lives, in this thread: factories (torch::zeros, torch::randn, a module's parameters, ...) make replicated DTensors on
// `mesh`, and plain tensors in operators with DTensors count as replicated. Random factories and initializers draw from this
// rank's generator, so equal seeds give equal values on every rank. Nests; not copyable.
//
// Regions of all kinds may end in any order: one that began inside another may outlive it. If another thread destroys a thread's
// region, that thread stays in it until it next begins or ends a region itself.
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

// While it lives, this thread is outside of every Spmd: factories make plain tensors.
class NoSpmd {
 public:
  NoSpmd();
  ~NoSpmd();
  NoSpmd(const NoSpmd&) = delete;
  NoSpmd& operator=(const NoSpmd&) = delete;

 private:
  std::shared_ptr<detail::Region> region_;
};

// Whether ranks compare plain tensors that are used as replicated, by a hash: the first of each kind of call on a mesh, and some
// later ones. On by default; DTENSOR_CHECK_REPLICATED=0 turns it off. Thread-local.
void set_replication_check(bool on);
bool replication_check();

// The ranks whose plain tensor differs from that of the mesh's first rank, as "1, 3"; empty where all are equal. Every rank of the mesh
// calls it, and gets the same text. Communicates a hash.
std::string ranks_that_differ(const at::Tensor& tensor, const DeviceMesh& mesh);

}  // namespace dtensor

#pragma GCC visibility pop
