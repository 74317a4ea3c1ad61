#include "ops/halo.hpp"

#include "ops/family.hpp"

#include <ATen/ops/cat.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace dtensor::rules {

namespace {

Interval overlap(const Interval& a, const Interval& b) {
  const auto begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

at::Tensor part(const at::Tensor& tensor, int64_t dim, const Interval& interval, int64_t origin) {
  return tensor.narrow(dim, interval.length() == 0 ? 0 : interval.begin - origin, interval.length());
}

// Whether any rank needs what another one holds: the same answer on all of them.
bool communicates(const Shares& held, const Shares& needed) {
  for (size_t r = 0; r < held.size(); ++r) {
    if (overlap(held[r], needed[r]).length() < needed[r].length()) return true;
  }
  return false;
}

// Piece r goes to rank r, and a piece like it with lengths[r] rows along `dim` comes from there. The own piece stays.
std::vector<at::Tensor> exchange(std::vector<at::Tensor> pieces, int64_t dim, const std::vector<int64_t>& lengths,
                                 comm::Communicator& group) {
  std::vector<at::Tensor> flat;
  std::vector<int64_t> send, receive;
  const auto rows = [&](int64_t length) {
    auto sizes = pieces[0].sizes().vec();
    sizes[dim] = length;
    return sizes;
  };
  for (int r = 0; r < group.size(); ++r) {
    const bool own = r == group.rank();
    send.push_back(own ? 0 : pieces[r].numel());
    receive.push_back(own ? 0 : c10::multiply_integers(rows(lengths[r])));
    if (!own) flat.push_back(pieces[r].reshape({-1}));
  }
  const auto received = group.all_to_all(at::cat(flat), send, receive).get();
  int64_t offset = 0;
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank()) continue;
    pieces[r] = received.narrow(0, offset, receive[r]).view(rows(lengths[r]));
    offset += receive[r];
  }
  return pieces;
}

// The mesh dimensions that cut `dim`.
std::vector<int64_t> cutting(const Layout& layout, int64_t dim) {
  std::vector<int64_t> mesh_dims;
  for (int64_t m = 0; m < layout.mesh().ndim(); ++m) {
    if (layout.placements()[m].is_shard(dim)) mesh_dims.push_back(m);
  }
  return mesh_dims;
}

Interval share(const Layout& layout, int64_t dim, c10::IntArrayRef coordinate) {
  const auto parts = layout.intervals(dim, coordinate);
  return parts.empty() ? Interval() : parts[0];
}

Interval inside(const Interval& interval, int64_t length) {
  return {std::clamp<int64_t>(interval.begin, 0, length), std::clamp<int64_t>(interval.end, 0, length)};
}

}  // namespace

at::Tensor fetch_interval(const at::Tensor& local, int64_t dim, const Shares& held, const Shares& needed,
                          comm::Communicator& group) {
  const auto rank = group.rank();
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> lengths;
  for (int r = 0; r < group.size(); ++r) {
    pieces.push_back(part(local, dim, overlap(held[rank], needed[r]), held[rank].begin));
    lengths.push_back(overlap(held[r], needed[rank]).length());
  }
  if (!communicates(held, needed)) return pieces[rank];
  return at::cat(exchange(std::move(pieces), dim, lengths, group), dim);
}

at::Tensor return_interval(const at::Tensor& local, int64_t dim, const Shares& held, const Shares& needed,
                           comm::Communicator& group) {
  const auto rank = group.rank();
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> lengths;
  for (int r = 0; r < group.size(); ++r) {
    pieces.push_back(part(local, dim, overlap(held[r], needed[rank]), needed[rank].begin));
    lengths.push_back(overlap(held[rank], needed[r]).length());
  }
  if (communicates(held, needed)) pieces = exchange(std::move(pieces), dim, lengths, group);
  auto sizes = local.sizes().vec();
  sizes[dim] = held[rank].length();
  const auto sum = local.new_zeros(sizes);
  for (int r = 0; r < group.size(); ++r) {
    if (lengths[r] > 0) part(sum, dim, overlap(held[rank], needed[r]), held[rank].begin).add_(pieces[r]);
  }
  return sum;
}

Interval Window::reads(const Interval& outputs) const {
  if (outputs.length() == 0) return {};
  return {outputs.begin * stride - padding, (outputs.end - 1) * stride - padding + dilation * (kernel - 1) + 1};
}

Halo::Halo(const LayoutPtr& input, const LayoutPtr& output, int64_t dim, const Window& window)
    : mesh_(input->mesh()), dim_(dim), mesh_dims_(cutting(*input, dim)) {
  const auto length = input->sizes()[dim];
  const auto& all = mesh_.ranks();
  for (const int rank : mesh_.communicator(mesh_dims_).ranks()) {
    const auto coordinate = mesh_.coordinate_of(std::ranges::find(all, rank) - all.begin());
    held_.push_back(share(*input, dim, coordinate));
    needed_.push_back(inside(window.reads(share(*output, dim, coordinate)), length));
  }
  read_ = window.reads(share(*output, dim, mesh_.coordinate()));
  own_ = inside(read_, length);
}

at::Tensor Halo::fetch(const at::Tensor& input, const at::Scalar& beyond) const {
  const auto fetched = fetch_interval(input, dim_, held_, needed_, mesh_.communicator(mesh_dims_));
  const auto missing = read_.length() - own_.length();
  if (missing == 0) return fetched;
  auto sizes = fetched.sizes().vec();
  sizes[dim_] = read_.length();
  const auto padded = fetched.new_full(sizes, beyond);
  padded.narrow(dim_, std::clamp<int64_t>(-read_.begin, 0, missing), own_.length()).copy_(fetched);
  return padded;
}

at::Tensor Halo::give_back(const at::Tensor& read) const {
  const auto valid = part(read, dim_, own_, read_.begin);
  return return_interval(valid, dim_, held_, needed_, mesh_.communicator(mesh_dims_));
}

Halos::Halos(const LayoutPtr& input, const LayoutPtr& output, int64_t first, const std::vector<Window>& windows) {
  for (size_t i = 0; i < windows.size(); ++i) {
    const auto dim = first + static_cast<int64_t>(i);
    if (is_cut(input, dim)) halos_.emplace_back(input, output, dim, windows[i]);
  }
}

at::Tensor Halos::fetch(at::Tensor input, const at::Scalar& beyond) const {
  for (const auto& halo : halos_) input = halo.fetch(input, beyond);
  return input;
}

at::Tensor Halos::give_back(at::Tensor read) const {
  for (auto halo = halos_.rbegin(); halo != halos_.rend(); ++halo) read = halo->give_back(read);
  return read;
}

std::vector<int64_t> Halos::read_sizes(c10::IntArrayRef sizes) const {
  auto read = sizes.vec();
  for (const auto& halo : halos_) read[halo.dim()] = halo.read().length();
  return read;
}

// The same on every rank, as a price must be: the share of a rank in the other dims is taken to be even.
int64_t halo_bytes(const Call& call, int64_t mesh_dim, const Operand& like, c10::IntArrayRef sizes, int64_t outputs, int64_t dim,
                   const Window& window) {
  const auto parts = call.mesh.size(mesh_dim);
  const auto chunk = [&](int64_t length, int64_t index) {
    const auto held = cut(length, shard(dim), parts, index);
    return held.empty() ? Interval() : held[0];
  };
  int64_t rows = 0;
  for (int64_t i = 0; i < parts; ++i) {
    const auto needed = inside(window.reads(chunk(outputs, i)), sizes[dim]);
    rows = std::max(rows, needed.length() - overlap(needed, chunk(sizes[dim], i)).length());
  }
  auto bytes = rows * static_cast<int64_t>(c10::elementSize(like.layout->dtype()));
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) bytes *= d == dim ? 1 : sizes[d];
  const auto& chosen = call.chosen[&like - call.operands.data()];
  for (int64_t m = 0; m < call.mesh.ndim(); ++m) {
    if (m != mesh_dim && chosen[m].is_shard()) bytes /= call.mesh.size(m);
  }
  return bytes;
}

}  // namespace dtensor::rules
