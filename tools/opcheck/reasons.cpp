// Legal placements that rules move on purpose, and some that only look legal.
#include "tools/opcheck/examine.hpp"

#include "src/dispatch/op_info.hpp"

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
    {".*conv.*|_?native_.*_norm.*|_batch_norm.*|prelu.*|_addmm_activation", ".*",
     "linear in a vector of parameters: reducing it first is cheap"},
    {"index_add|index_put|_index_put_impl|put", "sum",
     "contributions of parts add up to a pending sum; positions that are cut are gathered"},
    {"gather|embedding_dense_backward", ".*", "lines up for these lengths only"},
    {"ldexp", ".*", "linear in self: reducing it first is cheap"},
    {"copy|_foreach_copy", ".*", "the source is a pending sum of another kind than what it is copied into"},
    {"_to_copy", ".*", "rounds towards zero: no conversion of a sum is the sum of conversions"},
};

// Linear in one operand, by a factor that may be infinite. What stays pending of that: "(P(sum)), (R)" -> "P(sum)".
constexpr const char* kMultiplies =
    "mul|div|true_divide|addcmul|addcdiv|lerp|_foreach_(mul|div|addcmul|addcdiv|lerp)|mm|bmm|mv|dot|vdot|ger|outer|addmm|addmv|addr|"
    "baddbmm|addbmm|"
    "linalg_cross|.*conv.*|.*norm.*_backward|_?prelu.*_backward|glu_backward|logit_backward|rrelu_with_noise_backward|.*_loss(2d)?_"
    "backward|"
    "binary_cross_entropy_backward|_cdist_backward|grid_sampler_.*_backward|_scaled_dot_product_.*_backward";
constexpr const char* kFactor =
    "linear where the factor is finite: infinity times a part that is zero, or has another sign than the sum, is NaN";

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

std::string reason_for(const std::string& base, const std::string& placements, const std::string& legal) {
  const auto found = partials(placements);
  const bool scales = std::regex_match(found, std::regex("sum( sum)*")) && legal.find("P(sum)") != std::string::npos;
  if (scales && std::regex_match(base, std::regex(kMultiplies))) return kFactor;
  for (const auto& reason : kReasons) {
    if (std::regex_match(base, std::regex(reason.operators)) && std::regex_match(found, std::regex(reason.placements))) return reason.why;
  }
  return "";
}

namespace {

struct Unsampled {
  const char* bases;  // a regular expression
  const char* why;
};

constexpr Unsampled kUnsampled[] = {
    {"_test_.*|_foobar|_add_batch_dim|_remove_batch_dim|_make_dep_token|_functorch.*|_propagate_xla_data|_lazy_.*",
     "of libtorch's own tests and transforms, on tensors that nobody else has"},
    {".*sparse.*|_?coalesced?|is_coalesced|_nnz|_?(ccol_|crow_|col_|row_)?(indices|values)(_copy)?|_dim[IV]|dense_dim|hspmm|smm|sspaddmm|"
     "_spdiags|_?to_dense(_backward)?|_convert_indices_.*|native_norm|_spsolve",
     "of sparse tensors, which are not distributed"},
    {".*quant.*|fbgemm_.*|int_repr|q_.*|qscheme|_?choose_qparams.*|wrapped_linear_prepack|_wrapped_.*|.*_dq_mm|_weight_int.*|_dyn_quant.*|"
     "_convert_weight_to_int4pack.*|_scaled_.*mm.*|_int_mm|_mixed_dtypes_linear",
     "of quantized tensors and packed weights, which are not distributed"},
    {".*nested.*|to_padded_tensor|_jagged.*|_padded_dense.*|_nt_.*|_transformer_.*|_native_decoder.*",
     "of nested tensors, which are not distributed"},
    {"align_.*|refine_names|rename.*|_?names", "of named dims, which distributed tensors do not have"},
    {".*mkldnn.*|.*(cudnn|miopen|mps|triton|nnpack|xnnpack|vulkan|metal|xpu|hpu).*|_?pin_memory|is_pinned|record_stream|.*convolution_"
     "overrideable|"
     "convolution_backward_overrideable|_thnn_.*|.*_cell_backward.*|_copy_from.*|.*flash_attention.*|.*efficient_attention.*|.*cudnn_"
     "attention.*|"
     "_fused_sdp_choice|.*overrideable.*|_fused_dropout|linear_backward|_amp_.*|_fused_(adam.*|sgd)|.*_cuda_.*",
     "of an accelerator, or of a backend that this libtorch does not have"},
    {"set|set_data|resize.*|_resize_output.*|is_set_to|_has_same_storage_numel|_storage.*|.*storage.*|unsafe_.*_storage|_unsafe_set.*|set_"
     "source.*",
     "changes or compares storage, which distributed tensors do not have: refused, with a hint"},
    {"_?backward|data|_version|is_leaf|output_nr|retain_grad|retains_grad|requires_grad|_fw_primal.*|_make_dual.*|_unpack_dual|detach|get_"
     "gradients|"
     "_debug_has_internal_overlap|_reshape_copy|_lift.*|_is_zerotensor|_efficientzerotensor",
     "autograd's own state, which lies above the distributed tensor"},
    {"_reshape_from_tensor|_rowwise_prune",
     "reads the memory of its operands itself, above every dispatch key: refused, with a hint, unless they are whole"},
    {"_compute_linear_combination", "its out= form adds to what `out` holds, which must have the right sizes before"},
    {"from_file|_print|_sobol_engine_.*|chalf|_dimname.*|sym_.*|_assert_.*|_functional_(sym|assert).*|_linalg_check_errors",
     "no value of tensors to compare: files, printing, checks, tables of the Sobol engine, complex numbers of half precision"},
};

bool names_dims(const c10::FunctionSchema& schema) {
  const auto overload = schema.overload_name();
  return overload.find("imname") != std::string::npos || overload.find("names") != std::string::npos ||
         overload.find("named_") != std::string::npos;
}

bool is_of_cpu(const c10::OperatorHandle& op) {
  constexpr c10::DispatchKey kKeys[] = {c10::DispatchKey::CPU, c10::DispatchKey::CompositeExplicitAutograd,
                                        c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                                        c10::DispatchKey::CompositeImplicitAutograd};
  return std::any_of(std::begin(kKeys), std::end(kKeys), [&](const auto key) { return op.hasKernelForDispatchKey(key); });
}

}  // namespace

std::string why_unsampled(const Operator& op) {
  if (op.name.rfind("_test::", 0) == 0) return "of libtorch's own tests and transforms, on tensors that nobody else has";
  if (names_dims(op.schema())) return "of named dims, which distributed tensors do not have";
  for (const auto& [bases, why] : kUnsampled) {
    if (std::regex_match(op.base, std::regex(bases))) return why;
  }
  const auto& functional = dispatch::info_of(op.handle).functional;
  const bool on_cpu = is_of_cpu(op.handle) && (!functional || is_of_cpu(*functional));
  return on_cpu ? "" : "has no kernel on CPU";
}

}  // namespace dtensor::opcheck
