// Packs tensors into the flat lists that collectives carry, and unpacks them.
#include "src/redistribute/transition.hpp"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

namespace dtensor::redistribute {

namespace {

// Consecutive pieces of one length, as one block of `count` pieces starting at index `begin` of the cut dim.
struct Block {
  int64_t begin, count, length;
};

std::vector<Block> blocks_of(c10::IntArrayRef lengths, int64_t split) {
  std::vector<Block> blocks;
  int64_t begin = 0;
  for (int64_t whole : lengths) {
    const int64_t length = whole / split;
    if (length == 0) continue;
    if (blocks.empty() || blocks.back().length != length) blocks.push_back({begin, 0, length});
    ++blocks.back().count;
    begin += length;
  }
  return blocks;
}

int64_t product(c10::IntArrayRef sizes) {
  return c10::multiply_integers(sizes);
}

// Whether the flat list is the row-major tensor itself.
bool in_order(c10::IntArrayRef sizes, int64_t dim, int64_t split) { return product(sizes.slice(0, dim)) * split == 1; }

// `tensor` with dim `dim` seen as (first, second).
at::Tensor split_dim(const at::Tensor& tensor, int64_t dim, int64_t first, int64_t second) {
  auto sizes = tensor.sizes().vec();
  sizes[dim] = second;
  sizes.insert(sizes.begin() + dim, first);
  return tensor.view(sizes);
}

// Calls visit(list part, tensor part) for every block, both shaped [count, ..., split, length, ...].
template <class Visit>
void for_each_block(const at::Tensor& list, const at::Tensor& tensor, int64_t dim, int64_t split,
                    c10::IntArrayRef lengths, Visit visit) {
  if (tensor.numel() == 0) return;
  const int64_t per_index = tensor.numel() / (tensor.size(dim) / split);
  const auto inner = split_dim(tensor, dim, split, tensor.size(dim) / split);
  for (const auto& block : blocks_of(lengths, split)) {
    const auto cut = inner.narrow(dim + 1, block.begin, block.count * block.length);
    const auto pieces = split_dim(cut, dim + 1, block.count, block.length).movedim(dim + 1, 0);
    visit(list.narrow(0, block.begin * per_index, block.count * block.length * per_index).view(pieces.sizes()), pieces);
  }
}

}  // namespace

at::Tensor dense(const at::Tensor& tensor) {
  auto plain = tensor.is_contiguous() ? tensor : tensor.contiguous();
  if (plain.is_conj() || plain.is_neg()) plain = plain.resolve_conj().resolve_neg();
  return plain;
}

at::Tensor flat(const at::Tensor& tensor) { return dense(tensor).view(-1); }

std::vector<int64_t> piece_lengths(const Layout& layout, c10::IntArrayRef mesh_dims, int64_t dim) {
  const auto& mesh = layout.mesh();
  int64_t members = 1;
  for (int64_t i : mesh_dims) members *= mesh.sizes()[i];
  auto coordinate = mesh.coordinate().vec();
  std::vector<int64_t> lengths;
  lengths.reserve(members);
  for (int64_t member = 0; member < members; ++member) {
    int64_t rest = member;
    for (size_t k = mesh_dims.size(); k-- > 0;) {
      coordinate[mesh_dims[k]] = rest % mesh.sizes()[mesh_dims[k]];
      rest /= mesh.sizes()[mesh_dims[k]];
    }
    lengths.push_back(layout.local_sizes_before(mesh.ndim(), coordinate)[dim]);
  }
  return lengths;
}

std::vector<int64_t> piece_counts(c10::IntArrayRef sizes, int64_t dim, c10::IntArrayRef lengths) {
  const int64_t others = product(sizes.slice(0, dim)) * product(sizes.slice(dim + 1));
  auto counts = lengths.vec();
  for (auto& count : counts) count *= others;
  return counts;
}

at::Tensor pack(const at::Tensor& tensor, int64_t dim, int64_t split, c10::IntArrayRef lengths) {
  if (in_order(tensor.sizes(), dim, split)) return flat(tensor);
  auto list = at::empty({tensor.numel()}, tensor.options());
  for_each_block(list, tensor, dim, split, lengths,
                 [](const at::Tensor& part, const at::Tensor& piece) { part.copy_(piece); });
  return list;
}

comm::Async unpack(comm::Async list, c10::IntArrayRef sizes, int64_t dim, int64_t split, c10::IntArrayRef lengths) {
  if (in_order(sizes, dim, split)) return {list.tensor.view(sizes), std::move(list.work)};
  auto result = at::empty(sizes, list.tensor.options());
  const auto place = [=, from = list.tensor, lengths = lengths.vec()] {
    for_each_block(from, result, dim, split, lengths,
                   [](const at::Tensor& part, const at::Tensor& piece) { piece.copy_(part); });
  };
  return then(list, result, place);
}

}  // namespace dtensor::redistribute
