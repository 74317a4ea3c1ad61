// Rows on their way to other ranks, while this one computes.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/parallel/expert/mailbox.hpp>
#include <dtensor/parallel/expert/rows.hpp>
#include <dtensor/parallel/expert/wire.hpp>

#include <functional>
#include <memory>
#include <optional>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// What a rank does while its rows are on their way: called once.
using Beside = std::function<void()>;

// How many rows go where. All that the last two say is for ranks that put rows into each other's memory; without a mailbox they send them.
struct Route {
  DeviceMesh mesh;
  Lengths send, recv;
  Mailbox* mailbox = nullptr;
  Lengths before_sent = {}, before_returned = {};  // of each rank: where this one's rows lie among those that it gets, there and back
  int64_t most = 0;                                // rows that any rank gets, there or back

  Route back() const { return {mesh, recv, send, mailbox, before_returned, before_sent, most}; }
};

// Which rows set out, and in which order they are wanted where they arrive: index_select along dim 0. Undefined: all, as they are.
struct Order {
  at::Tensor index, back;  // back[index] is the order as it was
};

// Starts as it is made: rows [rows, dim], plain, the first send[0] of them to rank 0 of the mesh, and so on. Differentiable: backward, a
// gradient sets out where arrive() was called and is waited for where the rows set out. libtorch's engine runs what was made last first, so
// what was made between the two computes while gradients travel. Rounding by the wire has the gradient of the identity.
class RowsUnderWay {
 public:
  // `fetch`: rows[fetch] set out in place of rows, where it is defined; `adjoint` is that of it.
  using Adjoint = std::function<at::Tensor(const at::Tensor& gradient)>;
  RowsUnderWay(const at::Tensor& rows, Route route, const Wire& wire, const at::Tensor& fetch = {}, Adjoint adjoint = {});

  // Once: waits -> recv[0] rows of rank 0, then those of rank 1, ...; in this order where there is one.
  at::Tensor arrive(const Order& order = {}) const;

 private:
  struct Journey {
    std::optional<Mailbox::Trip> put;
    comm::Async sent;
  };
  struct Trip {
    Route there;
    const Wire& wire;
    at::Tensor like;    // [0, dim]
    at::Tensor packed;  // [1, any]: a row as it travels, of no particular numbers
    Journey out, home;

    Journey issue(const at::Tensor& rows, const Route& route, const at::Tensor& fetch) const;
    at::Tensor finish(Journey journey, const Route& route, const at::Tensor& order) const;
    Journey put(const at::Tensor& rows, const Route& route, const at::Tensor& fetch) const;
    at::Tensor take(Mailbox::Trip trip, const Route& route, const at::Tensor& order) const;
  };
  std::shared_ptr<Trip> trip_;
  at::Tensor ticket_;  // no numbers: what ties the two ends together in autograd's graph
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline at::Tensor fetched(const at::Tensor& rows, const at::Tensor& index) { return index.defined() ? selected(rows, index) : rows; }

inline RowsUnderWay::Journey RowsUnderWay::Trip::put(const at::Tensor& rows, const Route& route, const at::Tensor& fetch) const {
  const bool in_place = wire.name == "exact" && fetch.defined();
  const auto source = (in_place ? rows : wire.pack(fetched(rows, fetch))).contiguous();
  const auto row = static_cast<int64_t>(packed.nbytes());
  Journey journey{route.mailbox->begin(route.most * row), {}};
  auto& memory = *journey.put->memory;
  int64_t at = 0;
  for (int r = 0; r < memory.size(); at += route.send[r++]) {
    if (route.send[r] == 0) continue;
    Mailbox::wait_for_room(*journey.put, r);
    const auto there = journey.put->at + route.before_sent[r] * row;
    if (in_place) memory.put_rows(source, fetch.narrow(0, at, route.send[r]), r, there);
    else memory.put(source.narrow(0, at, route.send[r]), r, there);
  }
  Mailbox::tell_put(*journey.put);
  return journey;
}

// Copies, because others will put there again.
inline at::Tensor RowsUnderWay::Trip::take(Mailbox::Trip trip, const Route& route, const at::Tensor& order) const {
  auto& memory = *trip.memory;
  for (int r = 0; r < memory.size(); ++r) Mailbox::wait_for(trip, r);
  const auto there = memory.view(memory.rank(), {dtensor::detail::sum_of(route.recv), packed.size(1)}, packed.scalar_type(), trip.at);
  const auto result = wire.unpack(order.defined() ? selected(there, order) : there.clone(), like);
  route.mailbox->end(std::move(trip));
  return result;
}

inline RowsUnderWay::Journey RowsUnderWay::Trip::issue(const at::Tensor& rows, const Route& route, const at::Tensor& fetch) const {
  if (route.mailbox) return put(rows, route, fetch);
  const auto source = wire.pack(fetched(rows, fetch)).contiguous();
  const auto width = packed.size(1);
  return {{}, dtensor::detail::group_of(route.mesh).all_to_all(source.view({-1}), dtensor::detail::times(route.send, width),
                                                               dtensor::detail::times(route.recv, width))};
}

inline at::Tensor RowsUnderWay::Trip::finish(Journey journey, const Route& route, const at::Tensor& order) const {
  if (journey.put) return take(std::move(*journey.put), route, order);
  const auto received = std::move(journey.sent).get();
  return fetched(wire.unpack(received.view({dtensor::detail::sum_of(route.recv), packed.size(1)}), like), order);
}

inline RowsUnderWay::RowsUnderWay(const at::Tensor& rows, Route route, const Wire& wire, const at::Tensor& fetch, Adjoint adjoint) {
  const NoSpmd plain;
  const auto none = at::empty({0}, rows.options().requires_grad(false));
  const auto row = at::empty({1, rows.size(1)}, none.options());
  {
    const c10::NoGradGuard no_grad;
    trip_ = std::make_shared<Trip>(Trip{std::move(route), wire, row.narrow(0, 0, 0), wire.pack(row), {}, {}});
    trip_->out = trip_->issue(rows, trip_->there, fetch);
  }
  ticket_ = dtensor::detail::linear_map({none}, {rows}, [trip = trip_, adjoint = std::move(adjoint)](const TensorVector&) {
    const NoSpmd plain;
    const auto gradient = trip->finish(std::move(trip->home), trip->there.back(), {});
    return TensorVector{adjoint ? adjoint(gradient) : gradient};
  })[0];
}

inline at::Tensor RowsUnderWay::arrive(const Order& order) const {
  const NoSpmd plain;
  at::Tensor rows;
  {
    const c10::NoGradGuard no_grad;
    rows = trip_->finish(std::move(trip_->out), trip_->there, order.index);
  }
  return dtensor::detail::linear_map({rows}, {ticket_}, [trip = trip_, back = order.back](const TensorVector& gradients) {
    const NoSpmd plain;
    trip->home = trip->issue(gradients[0], trip->there.back(), back);
    return TensorVector{at::empty({0}, trip->like.options())};
  })[0];
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
