// Collectives on plain tensors, over the ranks of a mesh. They are differentiable and may be waited for later.
//
//   auto dp = mesh["dp"];                          // the ranks that differ from this one along "dp" (of a larger mesh: all its ranks)
//
//   auto sum = dt::all_reduce(x, dp);
//
//   auto rows = dt::all_gather(x, dp);             // x of rank 0, then x of rank 1, ... along dim 0
//
//   auto under_way = dt::start_all_gather(x, dp);  // the same, while other work goes on
//   auto later = std::move(under_way).wait();
//
// DTensors need none of these: their layouts decide what is communicated. They are for code on local tensors: in local_map, in attention
// over cut sequences, in routers of experts.
//
// Gradients are those of the sum of all ranks' losses, so the collectives are each other's adjoints: all_gather and reduce_scatter,
// all_reduce (sum, avg) and itself, all_to_all and itself backwards, broadcast and a sum at the root, shift(n) and shift(-n), send and
// recv. A backward pass communicates as the forward pass did, in reverse: every rank of the group has to run it.
//
// An input must not be written between start_...() and wait(), which throws where it was (of a part of a larger tensor that is not known).
//
// Tensors are on the mesh's device and of one dtype on all ranks. Every rank of the group calls alike. What a call refuses is a
// dtensor::Error on every rank; ranks that call differently get the communicator's errors (docs/communication.md). Inside Spmd results are
// plain tensors too.
#pragma once

#include <dtensor/collectives/messages.hpp>
#include <dtensor/collectives/pieces.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#pragma GCC visibility push(default)

namespace dtensor {

// The reduction of every rank's tensors, which have the same sizes on all ranks. Results: as the inputs. One all_reduce for a list, however
// long. min, max and product have no gradient.
inline PendingTensors start_all_reduce(const TensorVector& list, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum) {
  detail::check_alike("all_reduce", list);
  detail::check_linear("all_reduce", op, list);
  return detail::start(
      list,
      [&] {
        const detail::SameSizes alike(list);
        return detail::group_of(mesh).all_reduce(detail::packed(list), op);
      },
      [list](const at::Tensor& sums) {
        TensorVector results;
        int64_t begin = 0;
        for (const auto& x : list) {
          results.push_back(sums.view({-1}).narrow(0, begin, x.numel()).view(x.sizes()));
          begin += x.numel();
        }
        return results;
      },
      [mesh, op](const TensorVector& gradients) { return start_all_reduce(gradients, mesh, op).wait(); });
}
inline PendingTensor start_all_reduce(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum) {
  return detail::only(start_all_reduce(TensorVector{x}, mesh, op));
}
inline at::Tensor all_reduce(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum) {
  return start_all_reduce(x, mesh, op).wait();
}
inline TensorVector all_reduce(const TensorVector& list, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum) {
  return start_all_reduce(list, mesh, op).wait();
}

inline PendingTensors start_reduce_scatter(const TensorVector& list, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum,
                                           const AlongDim& along = {});

// The ranks' tensors joined along `along.dim`, in the order of ranks; other dims have the same lengths on all ranks. One all_gather for a
// list.
inline PendingTensors start_all_gather(const TensorVector& list, const DeviceMesh& mesh, const AlongDim& along = {}) {
  auto& group = detail::group_of(mesh);
  detail::check_along("all_gather", list, along, group);
  NoSpmd plain;
  const auto inputs = [&] {
    c10::NoGradGuard no_grad;
    return detail::in_front(list, along.dim);
  }();
  const auto lengths = along.lengths.empty() ? Lengths(group.size(), inputs[0].size(0)) : along.lengths;
  require(lengths[group.rank()] == inputs[0].size(0), "all_gather",
          "this rank's length is not its tensor's; got lengths of which this rank's is {}, and a dim of {}", lengths[group.rank()],
          inputs[0].size(0));
  Lengths counts;
  for (const auto length : lengths) {
    counts.push_back(0);
    for (const auto& x : inputs) counts.back() += detail::slice_of(x) * (list.size() == 1 ? length : x.size(0));
  }
  return detail::start(
      list,
      [&] {
        const detail::SameSizes alike(list, along.dim);
        return group.all_gather(detail::packed(inputs), counts, detail::flat(along.into));
      },
      [inputs, lengths, along](const at::Tensor& all) {
        if (inputs.size() == 1) return TensorVector{detail::as_slices(all, inputs[0], detail::sum_of(lengths), along.dim)};
        TensorVector results;
        const auto ranks = all.view({static_cast<int64_t>(lengths.size()), -1});
        int64_t begin = 0;
        for (const auto& x : inputs) {
          results.push_back(detail::as_slices(ranks.narrow(1, begin, x.numel()).reshape({-1}), x, x.size(0) * ranks.size(0), along.dim));
          begin += x.numel();
        }
        return results;
      },
      [mesh, along, lengths](const TensorVector& gradients) {
        return start_reduce_scatter(gradients, mesh, ReduceOp::sum, {along.dim, gradients.size() == 1 ? lengths : Lengths()}).wait();
      });
}
inline PendingTensor start_all_gather(const at::Tensor& x, const DeviceMesh& mesh, const AlongDim& along = {}) {
  return detail::only(start_all_gather(TensorVector{x}, mesh, along));
}
inline at::Tensor all_gather(const at::Tensor& x, const DeviceMesh& mesh, const AlongDim& along = {}) {
  return start_all_gather(x, mesh, along).wait();
}
inline TensorVector all_gather(const TensorVector& list, const DeviceMesh& mesh, const AlongDim& along = {}) {
  return start_all_gather(list, mesh, along).wait();
}

// This rank's piece, along `along.dim`, of the reduction of every rank's tensors, which have the same sizes on all ranks. One
// reduce_scatter for a list. min, max and product have no gradient.
inline PendingTensors start_reduce_scatter(const TensorVector& list, const DeviceMesh& mesh, ReduceOp op, const AlongDim& along) {
  auto& group = detail::group_of(mesh);
  detail::check_along("reduce_scatter", list, along, group);
  detail::check_linear("reduce_scatter", op, list);
  NoSpmd plain;
  const auto inputs = [&] {
    c10::NoGradGuard no_grad;
    return detail::in_front(list, along.dim);
  }();
  std::vector<Lengths> lengths;
  for (const auto& x : inputs) lengths.push_back(along.lengths.empty() ? detail::chunks(x.size(0), group.size()) : along.lengths);
  require(detail::sum_of(lengths[0]) == inputs[0].size(0), "reduce_scatter",
          "the lengths do not add up to the dim; got a sum of {}; expected {}", detail::sum_of(lengths[0]), inputs[0].size(0));
  Lengths counts(group.size());
  TensorVector pieces;  // rank by rank
  for (int r = 0; r < group.size(); ++r) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      pieces.push_back(inputs[i].narrow(0, detail::begins(lengths[i])[r], lengths[i][r]));
      counts[r] += pieces.back().numel();
    }
  }
  return detail::start(
      list,
      [&] {
        const detail::SameSizes alike(list, along.dim);
        const auto input = inputs.size() == 1 ? inputs[0].view({-1}) : detail::packed(pieces);
        return group.reduce_scatter(input, counts, op, detail::flat(along.into));
      },
      [inputs, lengths, along, rank = group.rank()](const at::Tensor& own) {
        TensorVector results;
        int64_t begin = 0;
        for (size_t i = 0; i < inputs.size(); ++i) {
          const auto length = lengths[i][rank], count = length * detail::slice_of(inputs[i]);
          results.push_back(detail::as_slices(own.narrow(0, begin, count), inputs[i], length, along.dim));
          begin += count;
        }
        return results;
      },
      [mesh, along, lengths, op, ranks = group.size()](const TensorVector& gradients) {
        TensorVector results;
        for (size_t i = 0; i < gradients.size(); ++i) {
          const auto whole = start_all_gather(TensorVector{gradients[i]}, mesh, {along.dim, lengths[i]}).wait()[0];
          results.push_back(op == ReduceOp::avg ? whole.div(ranks) : whole);
        }
        return results;
      });
}
inline PendingTensor start_reduce_scatter(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum,
                                          const AlongDim& along = {}) {
  return detail::only(start_reduce_scatter(TensorVector{x}, mesh, op, along));
}
inline at::Tensor reduce_scatter(const at::Tensor& x, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum, const AlongDim& along = {}) {
  return start_reduce_scatter(x, mesh, op, along).wait();
}
inline TensorVector reduce_scatter(const TensorVector& list, const DeviceMesh& mesh, ReduceOp op = ReduceOp::sum,
                                   const AlongDim& along = {}) {
  return start_reduce_scatter(list, mesh, op, along).wait();
}

// How many rows each rank sends to this one, when this one sends `send`: an all_to_all of one number per pair of ranks.
inline Lengths exchange_lengths(const Lengths& send, const DeviceMesh& mesh) {
  NoSpmd plain;
  auto& group = detail::group_of(mesh);
  require(!send.empty(), "exchange_lengths", "got no lengths; expected one for each of the group's {} ranks", group.size());
  detail::check_lengths("exchange_lengths", send, group.size());
  const Lengths one(group.size(), 1);
  const auto input = at::tensor(send, at::kLong).to(c10::Device(mesh.device_type()));
  const auto received = group.all_to_all(input, one, one).get().to(at::kCPU);
  return {received.data_ptr<int64_t>(), received.data_ptr<int64_t>() + group.size()};
}

// Rows of `x` [rows, ...] go to the ranks: the first send[0] of them to rank 0, and so on. Result: recv[0] rows of rank 0, then those of
// rank 1, ... `recv` may be left out: it is exchanged first, and waited for.
inline PendingTensor start_all_to_all(const at::Tensor& x, const DeviceMesh& mesh, const Lengths& send, Lengths recv = {}) {
  auto& group = detail::group_of(mesh);
  detail::check_along("all_to_all", {x}, {0, send}, group);
  require(!send.empty(), "all_to_all", "got no lengths to send; expected one for each of the group's {} ranks", group.size());
  detail::check_lengths("all_to_all", recv, group.size());
  require(detail::sum_of(send) == x.size(0), "all_to_all", "the lengths to send do not add up to the rows; got a sum of {}; expected {}",
          detail::sum_of(send), x.size(0));
  if (recv.empty()) recv = exchange_lengths(send, mesh);
  const auto slice = detail::slice_of(x);
  return detail::only(detail::start(
      {x}, [&] { return group.all_to_all(detail::packed({x}), detail::times(send, slice), detail::times(recv, slice)); },
      [x, recv](const at::Tensor& rows) { return TensorVector{detail::as_slices(rows, x, detail::sum_of(recv), 0)}; },
      [mesh, send, recv](const TensorVector& gradients) { return TensorVector{start_all_to_all(gradients[0], mesh, recv, send).wait()}; }));
}
inline at::Tensor all_to_all(const at::Tensor& x, const DeviceMesh& mesh, const Lengths& send, Lengths recv = {}) {
  return start_all_to_all(x, mesh, send, std::move(recv)).wait();
}

// The tensor of rank `root` of the group; the others' give sizes and dtype.
inline PendingTensor start_broadcast(const at::Tensor& x, const DeviceMesh& mesh, int root = 0) {
  auto& group = detail::group_of(mesh);
  detail::check_alike("broadcast", {x});
  return detail::only(detail::start(
      {x},
      [&] {
        const detail::SameSizes alike({x});
        return group.broadcast(x.contiguous(), root);
      },
      [x](const at::Tensor& received) { return TensorVector{received.view(x.sizes())}; },
      [mesh, root](const TensorVector& gradients) {
        Lengths to_root(detail::group_of(mesh).size());
        to_root[root] = gradients[0].numel();
        const auto sum = reduce_scatter(gradients[0].reshape({-1}), mesh, ReduceOp::sum, {0, to_root});
        return TensorVector{sum.numel() > 0 ? sum.view(gradients[0].sizes()) : at::zeros_like(gradients[0])};
      }));
}
inline at::Tensor broadcast(const at::Tensor& x, const DeviceMesh& mesh, int root = 0) { return start_broadcast(x, mesh, root).wait(); }

// A ring: `x` goes to the rank `by` further on in the group, and the result comes from the rank `by` before. `like` has the sizes that come
// in; without it they are those of x. Cannot deadlock.
inline PendingTensor start_shift(const at::Tensor& x, const DeviceMesh& mesh, int64_t by = 1, const at::Tensor& like = {}) {
  auto& group = detail::group_of(mesh);
  detail::check_alike("shift", {x});
  if (like.defined()) detail::check_plain("shift", like, "`like`");
  const auto incoming = like.defined() ? like.sizes().vec() : x.sizes().vec();
  const int64_t n = group.size(), step = (by % n + n) % n;
  Lengths send(n), recv(n);
  send[(group.rank() + step) % n] = x.numel();
  recv[(group.rank() - step + n) % n] = c10::multiply_integers(incoming);
  if (step == 0 && send != recv) {
    fail("shift", "a rank that shifts to itself gets its own tensor; got `like` of sizes {}; expected {}", detail::str_of(incoming),
         detail::str_of(x.sizes()));
  }
  return detail::only(detail::start(
      {x}, [&] { return group.all_to_all(detail::packed({x}), send, recv); },
      [incoming](const at::Tensor& received) { return TensorVector{received.view(incoming)}; },
      [mesh, by, outgoing = x.sizes().vec()](const TensorVector& gradients) {
        const auto sizes_only = at::empty({1}, gradients[0].options()).expand(outgoing);
        return TensorVector{start_shift(gradients[0], mesh, -by, sizes_only).wait()};
      }));
}
inline at::Tensor shift(const at::Tensor& x, const DeviceMesh& mesh, int64_t by = 1, const at::Tensor& like = {}) {
  return start_shift(x, mesh, by, like).wait();
}

inline PendingTensor start_receive(const at::Tensor& like, const DeviceMesh& mesh, int from, int tag = 0);

// A message to rank `to` of the group, which calls receive(). The result is a receipt, a tensor of no elements: backward through it brings
// the gradient that the receiver sends home, so add `receipt.sum()`, which is 0, to the loss. Messages between two ranks with one tag keep
// their order. A message over 64 KiB completes when it is received: two ranks that send to each other start both before they wait.
inline PendingTensor start_send(const at::Tensor& x, const DeviceMesh& mesh, int to, int tag = 0) {
  detail::check_alike("send", {x});
  return detail::only(detail::start(
      {x}, [&] { return detail::group_of(mesh).send(x.contiguous(), to, tag); },
      [x](const at::Tensor&) { return TensorVector{at::empty({0}, x.options())}; },
      [mesh, to, tag, x = x.detach()](const TensorVector&) { return TensorVector{start_receive(x, mesh, to, tag).wait()}; }));
}
inline at::Tensor send(const at::Tensor& x, const DeviceMesh& mesh, int to, int tag = 0) { return start_send(x, mesh, to, tag).wait(); }

// The message of rank `from`; `like` has its sizes and dtype. Where `like` requires a gradient the result does, and backward sends it home.
inline PendingTensor start_receive(const at::Tensor& like, const DeviceMesh& mesh, int from, int tag) {
  detail::check_alike("receive", {like});
  return detail::only(detail::start(
      {like}, [&] { return detail::group_of(mesh).recv(like.contiguous(), from, tag); },
      [like](const at::Tensor& received) { return TensorVector{received.view(like.sizes())}; },
      [mesh, from, tag](const TensorVector& gradients) {
        send(gradients[0], mesh, from, tag);
        return TensorVector{at::Tensor()};
      },
      {}));
}
inline at::Tensor receive(const at::Tensor& like, const DeviceMesh& mesh, int from, int tag = 0) {
  return start_receive(like, mesh, from, tag).wait();
}

}  // namespace dtensor

#pragma GCC visibility pop
