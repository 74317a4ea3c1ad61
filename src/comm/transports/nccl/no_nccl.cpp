// Replaces the nccl transport in a build without NCCL, or with a libtorch without CUDA.
#include <dtensor/base/error.hpp>
#include <dtensor/comm/transport.hpp>
#include <dtensor/comm/transport_kind.hpp>

namespace dtensor::comm {

bool has_nccl_transport() { return false; }
bool can_use_nccl_transport() { return false; }

namespace {

constexpr const char* kMissing =
    "configure with -Dtorch_root= a libtorch with CUDA, where nvcc is in the path and NCCL's nccl.h and libnccl lie next to it "
    "(-Dnccl=enabled says "
    "what is missing); or use the transport gloo with CPU tensors";

const RegisterTransport no_nccl({.name = "nccl", .missing = kMissing});

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(std::unique_ptr<Transport>, int) {
  fail("make_nccl_transport", "this build has no nccl transport; hint: {}", kMissing);
}

}  // namespace dtensor::comm
