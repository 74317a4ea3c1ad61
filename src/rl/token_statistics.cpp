// Statistics of rows of logits, and their gradients, in one pass on the CPU, for entropy.hpp.
#include <dtensor/rl/entropy.hpp>

#include <dtensor/base/vectors/exp_series.hpp>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>

namespace dtensor::rl::detail {

namespace {

// Logits [outer, inner, size], whose rows of `size` lie in one piece, and the tokens chosen of them.
template <class T>
struct LogitRows {
  const T* data;
  int64_t outer_stride, inner_stride, inner, size;
  const int64_t* tokens;
  int64_t count, first_token;  // the rows, and the token of the first logit
  T temperature;

  LogitRows(const LogitsPart& part, double t)
      : data(part.logits.data_ptr<T>()),
        outer_stride(part.logits.stride(0)),
        inner_stride(part.logits.stride(1)),
        inner(part.inner()),
        size(part.vocabulary()),
        tokens(part.tokens.data_ptr<int64_t>()),
        count(part.tokens.size(0)),
        first_token(part.begin),
        temperature(static_cast<T>(t)) {}

  int64_t rows() const { return count; }
  const T* row(int64_t i) const { return data + i / inner * outer_stride + i % inner * inner_stride; }
  // The place of the row's token among its logits; -1 if another rank has it.
  int64_t chosen(int64_t i) const {
    const auto place = tokens[i] - first_token;
    return place >= 0 && place < size ? place : -1;
  }
};

// Of each row: gradients of its statistics, and those.
template <class T>
struct RowFactors {
  const T *logp, *entropy, *squares, *lse, *entropies, *sums_of_squares;
};

#define DTENSOR_KERNEL "src/rl/token_statistics_kernel.inl"
#include <dtensor/base/vectors/instruction_sets.inl>

int64_t grain_of(int64_t vocabulary) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, vocabulary)); }

}  // namespace

bool has_rows_kernel(const LogitsPart& part) {
  const auto& x = part.logits;
  const bool takes = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  return takes && x.is_cpu() && x.size(2) > 0 && (x.stride(2) == 1 || x.size(2) == 1) && part.tokens.is_contiguous();
}

at::Tensor sums_of_rows(const LogitsPart& part, double temperature) {
  const auto rows = part.tokens.size(0);
  const auto sums = at::empty({5, rows}, part.logits.options());
  AT_DISPATCH_FLOATING_TYPES(part.logits.scalar_type(), "token_statistics", [&] {
    const LogitRows<scalar_t> in(part, temperature);
    auto* const to = sums.data_ptr<scalar_t>();
    at::parallel_for(0, rows, grain_of(in.size), [&](int64_t begin, int64_t end) { DTENSOR_BEST(sum_rows, in, begin, end, to); });
  });
  return sums;
}

at::Tensor gradient_of_rows(const LogitsPart& part, const RowStatistics& stats, const RowGradients& g, double temperature) {
  const auto rows = part.tokens.size(0);
  const auto gradient = at::empty({rows, part.vocabulary()}, part.logits.options());
  const auto zeros = at::zeros({rows}, part.logits.options());
  const auto dense = [&](const at::Tensor& x) { return x.defined() ? x.contiguous() : zeros; };
  const std::array terms{dense(g.logp),    dense(g.entropy),     dense(g.sum_squares),
                         dense(stats.lse), dense(stats.entropy), dense(stats.sum_squares)};
  AT_DISPATCH_FLOATING_TYPES(part.logits.scalar_type(), "token_statistics", [&] {
    const auto data = [&](size_t i) { return static_cast<const scalar_t*>(terms[i].template data_ptr<scalar_t>()); };
    const RowFactors<scalar_t> of{data(0), data(1), data(2), data(3), data(4), data(5)};
    const LogitRows<scalar_t> in(part, temperature);
    auto* const to = gradient.data_ptr<scalar_t>();
    at::parallel_for(0, rows, grain_of(in.size), [&](int64_t i, int64_t end) { DTENSOR_BEST(write_gradients, in, of, i, end, to); });
  });
  return gradient;
}

}  // namespace dtensor::rl::detail
