// Keeps the moves under way that read a local tensor. The tensor must not be written until they are done.
#pragma once

#include "src/base/fast_thread_local.hpp"

#include <dtensor/comm/work.hpp>

namespace dtensor::dispatch {

// Notes that `work` reads the memory of `local`.
void reading(const at::Tensor& local, comm::WorkPtr work);

// Forgets `work`: it is done, or is about to be.
void no_longer_reading(const comm::WorkPtr& work);

// Waits for the works that read the memory of `local`, or any memory.
void wait_for_readers(const at::Tensor& local);
void wait_for_all_readers();

namespace detail {
extern DTENSOR_FAST_THREAD_LOCAL bool anything_read;
}

inline void before_write(const at::Tensor& local) {
  if (detail::anything_read) [[unlikely]] wait_for_readers(local);
}

}  // namespace dtensor::dispatch
