// What runs on one mesh of several, in a program that all ranks run.
#pragma once

#include <dtensor/mesh/device_mesh.hpp>

#include <memory>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

namespace detail {

// As Spmd(mesh) on the mesh's ranks. On others a region in which the mesh's tensors, absent there, may be computed with, of sizes alone.
class OnMesh {
 public:
  explicit OnMesh(const DeviceMesh& mesh);
  ~OnMesh();
  OnMesh(const OnMesh&) = delete;
  OnMesh& operator=(const OnMesh&) = delete;

 private:
  struct Regions;
  std::unique_ptr<Regions> regions_;
};

}  // namespace detail

// Runs `f` on `mesh`, and gives what it gives: every rank calls it alike, members or not.
//
//   auto hidden = dt::on(first, [&] { return encoder->forward(x); });        // absent on ranks that are not in `first`
//   auto input = dt::redistribute(hidden, second, {dt::shard(0)});           // comes to the ranks of `second`
//   auto loss = dt::on(second, [&] { return decoder->forward(input).sum(); });
//   loss.backward();                                                         // on every rank
//
// The mesh's ranks compute, as inside of dt::Spmd(mesh). The others run `f` too, but on tensors without values: they decide on layouts as
// the mesh's ranks do, keep the graph for the backward pass, keep no memory and communicate nothing. So `f` may not ask for values there
// (item(), control flow that hangs on them), and operators work on the mesh's tensors only. Throws what `f` throws.
template <class F>
decltype(auto) on(const DeviceMesh& mesh, F&& f) {
  detail::OnMesh region(mesh);
  return std::forward<F>(f)();
}

}  // namespace dtensor

#pragma GCC visibility pop
