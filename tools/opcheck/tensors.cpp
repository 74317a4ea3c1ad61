// The tensors of a sample's text.
#include "tools/opcheck/text.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <limits>
#include <map>

namespace dtensor::opcheck {

namespace {

at::Tensor drawn(c10::IntArrayRef sizes, at::ScalarType dtype) {
  if (dtype == at::kBool) return torch::rand(sizes) < 0.5;
  if (c10::isIntegralType(dtype, false)) return torch::randint(dtype == at::kByte ? 0 : -9, 10, sizes, at::kLong).to(dtype);
  return torch::randn(sizes, at::kDouble).to(dtype);
}

at::Tensor definite(c10::IntArrayRef sizes, at::ScalarType dtype) {
  const auto factor = torch::randn(sizes, at::kDouble);
  return (factor.matmul(factor.transpose(-1, -2)) + 3 * torch::eye(sizes.back(), at::kDouble)).to(dtype);
}

// Positions in planes of twice the sizes, one in each window of 2.
at::Tensor window_positions(c10::IntArrayRef sizes) {
  auto positions = torch::zeros(sizes, at::kLong);
  for (int64_t d = 2; d < static_cast<int64_t>(sizes.size()); ++d) {
    std::vector<int64_t> shape(sizes.size(), 1);
    shape[d] = sizes[d];
    const auto row = torch::arange(sizes[d], at::kLong).mul(2).reshape(shape);
    positions = positions * (2 * sizes[d]) + row + torch::randint(0, 2, sizes, at::kLong);
  }
  return positions;
}

// As LAPACK counts them: row i was exchanged with one of the rows i to the last.
at::Tensor pivots(c10::IntArrayRef sizes) {
  const auto last = sizes.empty() ? 1 : sizes.back();
  const auto row = torch::arange(1, last + 1, at::kDouble);
  return (row + (torch::rand(sizes, at::kDouble) * (last + 1 - row)).floor()).to(at::kInt);
}

// Where bags of `bound` elements begin.
at::Tensor offsets(c10::IntArrayRef sizes, int64_t bound) {
  auto result = std::get<0>(torch::randint(0, bound + 1, sizes, at::kLong).sort(-1));
  if (result.numel() > 0) result.select(-1, 0).zero_();
  return result;
}

// Whole numbers that add up to `bound` along the last dim.
at::Tensor lengths(c10::IntArrayRef sizes, int64_t bound) {
  auto ends = offsets(sizes, bound);
  if (ends.numel() == 0) return ends;
  const auto last = torch::full({1}, bound, at::kLong).expand(ends.select(-1, 0).unsqueeze(-1).sizes());
  return torch::cat({ends.slice(-1, 1), last}, -1) - ends;
}

// Lengths of sequences, the longest first.
at::Tensor falling(c10::IntArrayRef sizes, int64_t bound) {
  auto result = std::get<0>(torch::randint(1, bound + 1, sizes, at::kLong).sort(-1, true));
  if (result.numel() > 0) result.select(-1, 0).fill_(bound);
  return result;
}

// About one number in five becomes an infinity, or NaN.
at::Tensor with_limits(const at::Tensor& tensor, bool nan) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto chance = torch::rand(tensor.sizes(), at::kDouble);
  auto result = tensor.masked_fill(chance < 0.1, kInfinity).masked_fill(chance > 0.9, -kInfinity);
  return nan ? result.masked_fill((chance - 0.5).abs() < 0.05, std::numeric_limits<double>::quiet_NaN()) : result;
}

at::ScalarType dtype_of(const TensorText& text, at::ScalarType base) {
  static const std::map<char, at::ScalarType> kLetters{{'i', at::kLong},  {'?', at::kBool}, {'h', at::kHalf}, {'g', at::kFloat},
                                                       {'w', at::kBFloat16}, {'y', at::kByte}, {'j', at::kInt}};
  auto dtype = base;
  if (text.has('f')) dtype = c10::isFloatingType(base) ? base : at::kFloat;
  if (text.has('c')) dtype = base == at::kFloat ? at::kComplexFloat : at::kComplexDouble;
  for (const auto& [letter, named] : kLetters) {
    if (text.has(letter)) dtype = named;
  }
  return dtype;
}

at::Tensor values_of(const TensorText& text, at::ScalarType base) {
  const auto& sizes = text.sizes;
  const auto dtype = dtype_of(text, base);
  const auto floating = c10::isFloatingType(base) ? base : at::kFloat;
  const auto whole = text.has('j') ? at::kInt : at::kLong;
  if (text.kind == '<' && text.has('r')) return falling(sizes, text.bound).to(whole);
  if (text.kind == '<') return torch::randint(0, text.bound, sizes, whole);
  if (text.kind == '^') return offsets(sizes, text.bound).to(whole);
  if (text.kind == '/') return lengths(sizes, text.bound).to(whole);
  if (text.has('v')) return pivots(sizes);
  if (text.has('q')) return torch::randint(0, 10, sizes, at::kLong).to(dtype);
  if (text.has('m')) return window_positions(sizes);
  if (text.has('p')) return torch::randperm(sizes.at(0), whole);
  if (text.has('o')) return torch::ones(sizes, dtype);
  if (text.has('u')) return torch::rand(sizes, at::kDouble).mul(0.9).add(0.05).to(floating);
  if (text.has('d')) return definite(sizes, floating);
  if (text.has('l')) return definite(sizes, floating).tril();
  auto result = drawn(sizes, dtype);
  if (text.has('+')) result = (c10::isIntegralType(dtype, false) ? result.abs() + 1 : result.abs() + 0.25).to(dtype);
  if (c10::isFloatingType(dtype) && (text.has('n') || text.has('e'))) result = with_limits(result, text.has('n'));
  return text.has('s') ? std::get<0>(result.sort(-1)) : result;
}

// As the values, in the memory order that the letters ask for.
at::Tensor laid_out(const at::Tensor& values, const TensorText& text) {
  auto result = values;
  if (text.has('t') && result.dim() >= 2) result = result.transpose(-1, -2).contiguous().transpose(-1, -2);
  if (text.has('k') && result.dim() >= 3) result = result.movedim(1, -1).contiguous().movedim(-1, 1);
  const bool free =
      (text.kind == 0 || text.kind == '<') && text.letters.find_first_of("vpmr") == std::string::npos;  // of its other elements
  if (text.has('x') && free && result.dim() >= 1 && result.size(0) > 1) result = result.narrow(0, 0, 1).clone().expand(result.sizes());
  return result;
}

}  // namespace

bool TensorText::is_number() const { return kind == 0 && letters.find_first_of("+ui?pmdlovqsjyc") == std::string::npos; }

std::string TensorText::str() const {
  return fmt::format("[{}]{}{}", fmt::join(sizes, ","), kind ? fmt::format("{}{}", kind, bound) : "", letters);
}

TensorText read_tensor(const std::string& text) {
  const auto end = text.find(']');
  if (text.empty() || text[0] != '[' || end == std::string::npos) throw Misfit();
  TensorText result;
  result.sizes = integers(text.substr(0, end + 1));
  for (size_t i = end + 1; i < text.size();) {
    if (std::string("<^/").find(text[i]) == std::string::npos) {
      result.letters += text[i++];
      continue;
    }
    result.kind = text[i];
    size_t used = 0;
    result.bound = std::stoll(text.substr(i + 1), &used);
    i += 1 + used;
  }
  return result;
}

at::Tensor tensor_from(const std::string& text, at::ScalarType base) {
  if (text == "-") return {};
  const auto read = read_tensor(text);
  return laid_out(values_of(read, base), read);
}

std::string with_meaning(const std::string& argument, const std::string& text) {
  static const std::map<std::string, std::string> kMeanings{{"index", "<2"},   {"indices", "<2"}, {"offsets", "^2"},  {"lengths", "/3"},
                                                            {"pivots", "v"},   {"LU_pivots", "v"}, {"repeats", "<3"}, {"mask", "?"},
                                                            {"condition", "?"}, {"batch_sizes", "io"}};
  const auto it = kMeanings.find(argument);
  return it == kMeanings.end() ? text : text.substr(0, text.find(']') + 1) + it->second;
}

}  // namespace dtensor::opcheck
