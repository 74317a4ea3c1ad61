// Running samples on ranks that are threads, and comparing with one device.
#pragma once

#include "tools/opcheck/shards.hpp"

#include <string>
#include <vector>

namespace dtensor::opcheck {

enum class Verdict { skipped, right, refused, wrong };  // skipped: the mesh allows no such parts

struct Outcome {
  Verdict verdict = Verdict::skipped;
  int64_t collectives = 0;    // of the forward call
  std::string results;        // how the results lie
  std::string message;        // of what is wrong
};

// Runs every case of a sample on a mesh, forward and (where libtorch differentiates the operator) backward.
std::vector<Outcome> check(const Operator& op, const Sample& sample, const std::vector<Case>& cases, std::vector<int64_t> mesh);

// The arguments that one device writes although neither the operator's schema nor dispatch says so; empty: none.
std::string written_unsaid(const Operator& op, const Sample& sample);

// Whether two tensors hold the same values up to the rounding of another order of summation.
bool close(const at::Tensor& got, const at::Tensor& expected, double least_tolerance = 0);

// What two answers to a sample may differ by, for the dtypes of its operands.
double rounding_of(const Sample& sample);

// Whether a pointwise operator gives `expected` for infinities and NaN one element at a time and on whole vectors of the processor, too
// (sound.cpp): some kernels treat NaN in one way on vectors and in another in what is left over. `repeated`: arguments have one dim more.
bool alike_on_vectors(const Operator& op, const Sample& sample,
                      const std::function<std::vector<at::Tensor>(const Stack& arguments, bool repeated)>& call,
                      const std::vector<at::Tensor>& expected);

// Why libtorch's own operator has more than one answer to a sample (sound.cpp); empty: it has one.
std::string unsound(const Operator& op, const Sample& sample);

// Which placements of the results (one per result; an index into `names`) the raw operator on the parts gives: the truth about
// what is legal. An empty list: none.
std::string legal_results(const Operator& op, const Sample& sample, const Case& placements, c10::ArrayRef<int64_t> ranks);

}  // namespace dtensor::opcheck
