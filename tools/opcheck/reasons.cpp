// Legal placements that rules move on purpose, and some that only look legal.
#include "tools/opcheck/examine.hpp"

#include <regex>

namespace dtensor::opcheck {

namespace {

struct Reason {
  const char* operators;   // regular expressions; of the whole name, and
  const char* placements;  // of what is Partial in the operands: "sum max"
  const char* why;
};

constexpr Reason kReasons[] = {
    {".*", "(max|min| )+",
     "increasing or decreasing in this operand, perhaps for some signs only. Partial(max) and Partial(min) come from reductions; "
     "their results are small, and reducing them first is cheap"},
    {".*", "avg( avg)*", "affine in this operand; averages over ranks are of losses and gradients, which do not come here"},
    {"_foreach_(mul|div)", ".*", "increasing for positive numbers only, which the decision does not read"},
    {"special_.*_polynomial_.*", ".*", "the degree hardly matters to the values, and agrees by chance"},
    {"bucketize|searchsorted", ".*", "counts of smaller boundaries add up, but boundaries are few"},
    {"triangular_solve|linalg_solve_triangular|ormqr", ".*", "columns of the right-hand side are independent, but they are few"},
    {".*_backward", "sum", "the operand gives its shape only; the out= form makes it whole"},
    {"rot90", ".*", "one of the two dims turns without being reversed"},
    {"_cdist_(for|back)ward", ".*", "for p = 1 distances add up over features"},
    {"nextafter|heaviside|copysign|hardsigmoid_backward|special_zeta|rrelu_with_noise_backward|sgn|angle", ".*",
     "the operand hardly matters to the values, and agrees within rounding"},
    {"nan_to_num|nansum|xlogy|special_xlog1py", ".*",
     "linear except at NaN, infinities and zeros, which parts of a sum may have where the sum has none"},
    {"unique.*|masked_select|bincount|index|nonzero.*", ".*", "the shape of the result depends on values: whole operands"},
    {"div|floor_divide", ".*", "linear without a rounding mode, which the decision does not read"},
    {"index_reduce|scatter_reduce|scatter", ".*", "a product is linear in self alone; nobody scatters products into a pending sum"},
    {"binary_cross_entropy.*|.*_loss_backward", ".*", "affine in targets and weights, which are data and not Partial"},
    {".*conv.*|_?native_.*_norm.*|_batch_norm.*|prelu.*|_addmm_activation", ".*", "linear in a vector of parameters: reducing it first is cheap"},
    {"index_add|index_put|_index_put_impl|put", "sum",
     "contributions of parts add up to a pending sum; positions that are cut are gathered"},
    {"gather|embedding_dense_backward", ".*", "lines up for these lengths only"},
    {"ldexp", ".*", "linear in self: reducing it first is cheap"},
    {"copy|_foreach_copy", ".*", "the source is a pending sum of another kind than what it is copied into"},
    {"_to_copy", ".*", "rounds towards zero: no conversion of a sum is the sum of conversions"},
};

// "(P(sum)), (S(0))" -> "sum"
std::string partials(const std::string& placements) {
  std::string found;
  const std::regex partial(R"(P\((\w+)\))");
  for (std::sregex_iterator it(placements.begin(), placements.end(), partial), end; it != end; ++it) {
    found += (found.empty() ? "" : " ") + (*it)[1].str();
  }
  return found;
}

}  // namespace

std::string reason_for(const std::string& base, const std::string& placements, const std::string&) {
  const auto found = partials(placements);
  for (const auto& reason : kReasons) {
    if (std::regex_match(base, std::regex(reason.operators)) && std::regex_match(found, std::regex(reason.placements))) return reason.why;
  }
  return "";
}

}  // namespace dtensor::opcheck
