// How collectives on plain tensors cut, join and check them.
#pragma once

#include <dtensor/base/error.hpp>
#include <dtensor/collectives/pending.hpp>
#include <dtensor/mesh/device_mesh.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/cat.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#pragma GCC visibility push(default)

namespace dtensor {

using Lengths = std::vector<int64_t>;  // one per rank of the group

// Along which dim ranks' tensors are joined or cut, how long each rank's piece is, and memory for the result.
struct AlongDim {
  int64_t dim = 0;
  // Of every rank's piece along `dim`, the same list on all ranks. Empty: all_gather takes this rank's length for everybody's;
  // reduce_scatter cuts as torch.chunk and Shard(dim) do.
  Lengths lengths = {};
  // Of one tensor: the result is written here, contiguous and of the result's sizes. Then `dim` must be 0, and there is no gradient.
  at::Tensor into = {};
};

namespace detail {

inline comm::Communicator& group_of(const DeviceMesh& mesh) {
  Lengths dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  return mesh.communicator(dims);
}

inline std::string str_of(c10::IntArrayRef sizes) {
  std::string text;
  for (const auto size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

inline int64_t sum_of(const Lengths& lengths) { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }

inline Lengths times(Lengths lengths, int64_t factor) {
  for (auto& length : lengths) length *= factor;
  return lengths;
}

// Where rank r's piece begins, and after the last one the end.
inline Lengths begins(const Lengths& lengths) {
  Lengths result{0};
  for (const auto length : lengths) result.push_back(result.back() + length);
  return result;
}

inline Lengths chunks(int64_t length, int64_t ranks) {
  Lengths result;
  const auto most = (length + ranks - 1) / ranks;
  for (int64_t begin = 0; begin < most * ranks; begin += most) result.push_back(std::clamp<int64_t>(length - begin, 0, most));
  result.resize(ranks);
  return result;
}

inline void check_alike(const char* op, const TensorVector& list) {
  require(!list.empty(), op, "the list of tensors is empty; expected one tensor or more");
  for (const auto& tensor : list) {
    check_plain(op, tensor, "an input");
    if (tensor.scalar_type() == list[0].scalar_type() && tensor.device() == list[0].device()) continue;
    fail(op, "the tensors of a list have one dtype and device; got {} on {} and {} on {}; hint: one call for each dtype",
         c10::toString(list[0].scalar_type()), list[0].device().str(), c10::toString(tensor.scalar_type()), tensor.device().str());
  }
}

// Lengths of pieces: `ranks` of them, or none.
inline void check_lengths(const char* op, const Lengths& lengths, int ranks) {
  require(lengths.empty() || static_cast<int>(lengths.size()) == ranks, op, "got {} lengths; expected one for each of the group's {} ranks",
          lengths.size(), ranks);
  for (size_t r = 0; r < lengths.size(); ++r) {
    require(lengths[r] >= 0, op, "the length of a piece is negative; got {} for rank {} of the group; expected 0 or more", lengths[r], r);
  }
}

inline void check_along(const char* op, const TensorVector& list, const AlongDim& along, const comm::Communicator& group) {
  check_alike(op, list);
  for (const auto& x : list) {
    require(along.dim >= -x.dim() && along.dim < x.dim(), op, "a tensor has no such dim; got dim {} of {} dims", along.dim, x.dim());
  }
  check_lengths(op, along.lengths, group.size());
  require(along.lengths.empty() || list.size() == 1, op, "lengths are of one tensor; got a list of {}", list.size());
  require(
      !along.into.defined() || (list.size() == 1 && along.dim == 0 && !tracks(list)), op,
      "a result in given memory is of one tensor, joined along dim 0, without a gradient; got {} tensors, dim {}{}; hint: leave `into` out",
      list.size(), along.dim, tracks(list) ? ", and an input that requires a gradient" : "");
  if (!along.into.defined()) return;
  check_plain(op, along.into, "`into`");
  if (along.into.is_contiguous()) return;
  fail(op, "the memory given for the result is not contiguous; got sizes {} and strides {}; hint: pass a contiguous tensor and copy it",
       str_of(along.into.sizes()), str_of(along.into.strides()));
}

// Only sums and averages are linear.
inline void check_linear(const char* op, ReduceOp reduction, const TensorVector& inputs) {
  require(reduction == ReduceOp::sum || reduction == ReduceOp::avg || !tracks(inputs), op,
          "only sum and avg have a gradient; got another reduction of a tensor that requires one; hint: detach() it");
}

// While it lives, ranks that call with tensors of other sizes have diverged, also where the numbers of elements are the same. `dim` is that
// along which ranks have pieces: it is compared, and lengths along it are not. Of a list, the first eight tensors are compared.
class SameSizes {
 public:
  explicit SameSizes(const TensorVector& list, std::optional<int64_t> dim = {}) : text_(text_of(list, dim)), subject_(text_) {}

 private:
  static std::string text_of(const TensorVector& list, std::optional<int64_t> dim) {
    std::string text(comm::Subject::current());
    for (size_t i = 0; i < std::min<size_t>(list.size(), 8); ++i) {
      text += text.empty() ? "[" : " [";
      for (int64_t d = 0; d < list[i].dim(); ++d) {
        const bool in_pieces = dim && (d == *dim || d == *dim + list[i].dim());
        text += (d > 0 ? ", " : "") + (in_pieces ? "*" : std::to_string(list[i].size(d)));
      }
      text += "]";
    }
    return text;
  }
  const std::string text_;
  const comm::Subject subject_;
};

// The tensors' elements, one tensor after the other, in memory of their own or the one tensor's.
inline at::Tensor packed(const TensorVector& list) {
  TensorVector flat;
  for (const auto& tensor : list) flat.push_back(tensor.reshape({-1}));
  return flat.size() == 1 ? flat[0].contiguous() : at::cat(flat);
}

inline at::Tensor flat(const at::Tensor& into) { return into.defined() ? into.view({-1}) : into; }

// The i-th dim in front, where pieces of ranks are contiguous.
inline TensorVector in_front(const TensorVector& list, int64_t dim) {
  TensorVector result;
  for (const auto& x : list) result.push_back(x.movedim(dim, 0).contiguous());
  return result;
}

// Elements of a slice of length 1 along dim 0.
inline int64_t slice_of(const at::Tensor& x) { return c10::multiply_integers(x.sizes().slice(1)); }

// `flat` as pieces like `x`, but of `length` along dim 0, which is then moved to `dim`.
inline at::Tensor as_slices(const at::Tensor& flat, const at::Tensor& x, int64_t length, int64_t dim) {
  auto sizes = x.sizes().vec();
  sizes[0] = length;
  return flat.view(sizes).movedim(0, dim);
}

inline PendingTensor only(PendingTensors list) {
  return std::move(list).then([](const TensorVector& results) { return results[0]; });
}

}  // namespace detail

}  // namespace dtensor

#pragma GCC visibility pop
