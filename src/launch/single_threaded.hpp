// Gives each rank that is a thread one thread to compute with.
#pragma once

#include <ATen/Parallel.h>

#include <dlfcn.h>

namespace dtensor::detail {

// OpenBLAS may have threads of its own, which libtorch does not control.
struct OpenBlas {
  using Get = int();
  using Set = void(int);
  Get* get = reinterpret_cast<Get*>(dlsym(RTLD_DEFAULT, "openblas_get_num_threads"));
  Set* set = reinterpret_cast<Set*>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"));
  bool found() const { return get && set; }
};

// While it lives, each rank that is a thread computes with one thread, since the ranks share the cores. Restores the caller's setting.
class SingleThreaded {
 public:
  SingleThreaded() {
    if (blas_.found()) blas_.set(1);
  }
  ~SingleThreaded() {
    at::set_num_threads(before_);
    if (blas_.found()) blas_.set(blas_before_);
  }
  SingleThreaded(const SingleThreaded&) = delete;

  // Called by each rank in its thread.
  static void begin_rank() { at::set_num_threads(1); }

 private:
  const int before_ = at::get_num_threads();
  const OpenBlas blas_;
  const int blas_before_ = blas_.found() ? blas_.get() : 1;
};

}  // namespace dtensor::detail
