// A program that is being drawn, with its values on one device at hand.
#pragma once

#include "ops.hpp"
#include "plain.hpp"
#include "random.hpp"

namespace dtensor::fuzz {

struct DrawOptions {
  int most_operators = 40;
  Ints mesh;              // empty: random
  const Op* only = nullptr;  // draw it often: for the fuzzer's own test
};

class Sketch {
 public:
  Random& random() { return random_; }
  const at::Tensor& at(int value) const { return plain_->value(value); }

  // A value that is accepted, the latest preferred; -1: there is none.
  int find(const Accepts& accepts);
  // The same, or else a new leaf of random shape and a dtype that is accepted; -1 where that is in vain.
  int find_or_make(const Accepts& accepts);
  // A new leaf.
  int make(Ints sizes, at::ScalarType dtype, Data data, int64_t bound = 1, int64_t dim = 0);
  // A leaf of numbers like those of `like`.
  int make_like(Ints sizes, T like) { return make(std::move(sizes), like.scalar_type(), numbers(like.scalar_type())); }
  // A value of these sizes and dtype, found or made.
  int of_sizes(const Ints& sizes, T like);

  Ints shape();
  Data numbers(at::ScalarType dtype);
  bool infinities() const { return program_.infinities; }
  // A dim of x, from the front or from the back; x has one.
  int64_t dim(T x);
  Placements placements(c10::IntArrayRef sizes, at::ScalarType dtype);

  friend Program draw(uint64_t seed, const DrawOptions& options);

 private:
  Sketch(uint64_t seed, const DrawOptions& options);
  bool add(Step step);
  bool add_call();
  void add_redistribute();
  void add_roots();
  Placement placement(c10::IntArrayRef sizes, at::ScalarType dtype);
  const Shares* shares(int64_t parts);

  Random random_;
  DrawOptions options_;
  Program program_;
  std::unique_ptr<PlainRun> plain_;
  bool in_place_ = false, gradients_ = false;
  bool few_ = false;   // few elements, so that many ranks have none
  bool flat_ = false;  // many flat cuts, beside others
  std::vector<Step> pending_;  // leaves that the step under way has made
};

// The program of a seed. The same everywhere.
Program draw(uint64_t seed, const DrawOptions& options);

}  // namespace dtensor::fuzz
