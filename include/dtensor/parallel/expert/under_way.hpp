// Rows on their way to other ranks, while this one computes.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/expert/wire.hpp>

#include <memory>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// Starts as it is made: rows [rows, dim], plain, the first send[0] of them to rank 0 of the mesh, and so on. Differentiable: backward, a
// gradient sets out where arrive() was called and is waited for where the rows set out. libtorch's engine runs what was made last first, so
// what was made between the two computes while gradients travel. Rounding by the wire has the gradient of the identity.
class RowsUnderWay {
 public:
  RowsUnderWay(const at::Tensor& rows, const DeviceMesh& mesh, Lengths send, Lengths recv, const Wire& wire);

  // Once: waits -> recv[0] rows of rank 0, then those of rank 1, ...
  at::Tensor arrive() const;

 private:
  struct Trip {
    DeviceMesh mesh;
    Lengths send, recv;
    const Wire& wire;
    at::Tensor like;  // [0, dim]
    comm::Async there, back;

    comm::Async issue(const at::Tensor& rows, const Lengths& from, const Lengths& to) const;
    at::Tensor finish(comm::Async async, const Lengths& lengths) const;
  };
  std::shared_ptr<Trip> trip_;
  at::Tensor ticket_;  // no numbers: what ties the two ends together in autograd's graph
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline comm::Async RowsUnderWay::Trip::issue(const at::Tensor& rows, const Lengths& from, const Lengths& to) const {
  const auto packed = wire.pack(rows).contiguous();
  const auto width = packed.size(1);
  return dtensor::detail::group_of(mesh).all_to_all(packed.view({-1}), dtensor::detail::times(from, width),
                                                    dtensor::detail::times(to, width));
}

inline at::Tensor RowsUnderWay::Trip::finish(comm::Async async, const Lengths& lengths) const {
  const auto rows = dtensor::detail::sum_of(lengths);
  const auto received = std::move(async).get();
  return wire.unpack(received.view({rows, rows > 0 ? received.numel() / rows : like.size(1)}), like);
}

inline RowsUnderWay::RowsUnderWay(const at::Tensor& rows, const DeviceMesh& mesh, Lengths send, Lengths recv, const Wire& wire) {
  const NoSpmd plain;
  const auto none = at::empty({0}, rows.options().requires_grad(false));
  trip_ = std::make_shared<Trip>(
      Trip{mesh, std::move(send), std::move(recv), wire, at::empty({0, rows.size(1)}, none.options()), {}, {}});
  {
    const c10::NoGradGuard no_grad;
    trip_->there = trip_->issue(rows, trip_->send, trip_->recv);
  }
  ticket_ = dtensor::detail::linear_map({none}, {rows}, [trip = trip_](const TensorVector&) {
    const NoSpmd plain;
    return TensorVector{trip->finish(std::move(trip->back), trip->send)};
  })[0];
}

inline at::Tensor RowsUnderWay::arrive() const {
  const NoSpmd plain;
  at::Tensor rows;
  {
    const c10::NoGradGuard no_grad;
    rows = trip_->finish(std::move(trip_->there), trip_->recv);
  }
  return dtensor::detail::linear_map({rows}, {ticket_}, [trip = trip_](const TensorVector& gradients) {
    const NoSpmd plain;
    trip->back = trip->issue(gradients[0], trip->recv, trip->send);
    return TensorVector{at::empty({0}, trip->like.options())};
  })[0];
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
