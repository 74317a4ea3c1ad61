// Linear algebra on batches of matrices. The batch may be sharded; each matrix is whole.
#include "ops/family.hpp"

#include <algorithm>

namespace dtensor::rules {
namespace {

constexpr auto kWhy = "matrices of a batch are independent; each is needed whole";

// Letters are dims of one matrix; all of them are whole.
RulePtr batched(std::string_view notation) {
  std::string whole;
  for (const char c : notation.substr(0, notation.find("->"))) {
    if (std::isalpha(static_cast<unsigned char>(c)) && whole.find(c) == std::string::npos) whole += c;
  }
  return einsum(notation, {.whole = whole});
}

const Register one_to_one("aten::cholesky aten::cholesky_inverse aten::linalg_matrix_exp",
                          batched("...ij->...ij"), kWhy);
const Register with_info("aten::linalg_cholesky_ex aten::linalg_inv_ex", batched("...ij->...ij,..."), kWhy);
const Register pseudo_inverse("aten::linalg_pinv.atol_rtol_tensor", batched("...ij,...,...->...ji"), kWhy);
const Register substitution("aten::linalg_solve_triangular", batched("...ij,...kl->...kl"), kWhy);
const Register by_factor("aten::_cholesky_solve_helper", batched("...kl,...ij->...kl"), kWhy);
const Register two_matrices("aten::triangular_solve", batched("...ik,...ij->...ik,...ij"), kWhy);
const Register determinant("aten::_linalg_det", batched("...ij->...,...ij,...i"), kWhy);
const Register sign_and_log("aten::_linalg_slogdet", batched("...ij->...,...,...ij,...i"), kWhy);
const Register lu("aten::linalg_lu", batched("...ij->...ij,...ij,...ij"), kWhy);
const Register lu_factor("aten::linalg_lu_factor_ex aten::linalg_ldl_factor_ex aten::_lu_with_info", batched("...ij->...ij,...i,..."),
                         kWhy);
const Register lu_solve("aten::linalg_lu_solve aten::linalg_ldl_solve", batched("...ij,...i,...ik->...ik"), kWhy);
const Register lu_unpack("aten::lu_unpack", batched("...ij,...i->...ij,...ij,...ij"), kWhy);
const Register qr("aten::linalg_qr", batched("...ij->...ij,...ij"), kWhy);
const Register householder("aten::linalg_householder_product", batched("...ij,...k->...ij"), kWhy);
const Register times_q("aten::ormqr", batched("...ij,...k,...il->...il"), kWhy);
const Register svd("aten::_linalg_svd", batched("...ij->...ij,...j,...ij"), kWhy);
const Register eigen("aten::_linalg_eigh aten::linalg_eig", batched("...ij->...i,...ij"), kWhy);
const Register eigenvalues("aten::_linalg_eigvals", batched("...ij->...i"), kWhy);

// As many reflections as the shorter dim is long.
RulePtr reflections() {
  struct Reflections final : Rule {
    Candidates candidates(const Call& call, int64_t mesh_dim) const override { return matrices->candidates(call, mesh_dim); }
    std::vector<Sizes> output_sizes(const Call& call) const override {
      const auto matrix = call.operands[0].sizes();
      if (matrix.size() < 2) return {};
      auto sizes = matrices->output_sizes(call);
      sizes[1].back() = std::min(matrix[matrix.size() - 2], matrix.back());
      return sizes;
    }
    RulePtr matrices = batched("...ij->...ij,...j");
  };
  return std::make_shared<Reflections>();
}
const Register householder_form("aten::geqrf", reflections(), kWhy);

// A right-hand side is a matrix per matrix, or a vector per matrix where it has a dim less.
RulePtr solution() {
  const auto matrices = batched("...ij,...ik->...ik,...ij,...i,..."), vectors = batched("...ij,...i->...i,...ij,...i,...");
  struct Solve final : Rule {
    Solve(RulePtr m, RulePtr v) : matrices(std::move(m)), vectors(std::move(v)) {}
    Candidates candidates(const Call& call, int64_t mesh_dim) const override {
      const bool vector = call.operands[1].ndim() < call.operands[0].ndim();
      return (vector ? vectors : matrices)->candidates(call, mesh_dim);
    }
    RulePtr matrices, vectors;
  };
  return std::make_shared<Solve>(matrices, vectors);
}
const Register solve("aten::_linalg_solve_ex", solution(), kWhy);

}  // namespace
}  // namespace dtensor::rules
