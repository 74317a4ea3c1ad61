// Lets a module run a model on rows that are no whole sequence, as a decoder does that has the keys and values of earlier rows: some tokens
// of each of several sequences, in one row of a batch. The layers of dtensor/nn and libtorch's own attention ask it; models do not change.
#pragma once

#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/attention_hook.hpp>

#pragma GCC visibility push(default)

namespace dtensor {

class Decoding {
 public:
  // While it lives, it is what the layers on this rank ask. Regions nest.
  explicit Decoding(World& world) : world_(world), outer_(world.local<Current>().decoding), hook_(world.local<AttentionHook>()) {
    world.local<Current>().decoding = this;
    world.local<AttentionHook>().compute = [this](const AttentionArguments& a) { return c10::optional<at::Tensor>(attention(a)); };
  }
  virtual ~Decoding() {
    world_.local<Current>().decoding = outer_;
    world_.local<AttentionHook>() = hook_;
  }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  // This rank's, or null.
  static Decoding* current() { return World::current().local<Current>().decoding; }

  // The place of each row in its sequence: plain, int64 [rows]. Throws for another number of rows, and where one is not below `limit`, the
  // number of places that a model has (0: any number).
  virtual at::Tensor positions(int64_t rows, int64_t limit) = 0;
  // Whether keys and values are to come with fewer heads than queries, so that groups share them.
  virtual bool shares_heads(const at::Tensor& q, int64_t key_heads) = 0;
  // Of q [1, heads, rows, dim], and k and v with as many rows, whose places come before those of later calls.
  virtual at::Tensor attention(const AttentionArguments& arguments) = 0;
  // Those of x [1, rows, ...] whose scores are wanted: a head need not compute the others.
  virtual at::Tensor scored_rows(const at::Tensor& x) = 0;

 private:
  struct Current {
    Decoding* decoding = nullptr;
  };
  World& world_;
  const World::Use use_{world_};  // outside of a launch, no rank's hook is asked
  Decoding* outer_;
  AttentionHook hook_;
};

}  // namespace dtensor

#pragma GCC visibility pop
