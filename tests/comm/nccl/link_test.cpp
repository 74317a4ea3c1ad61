// The nccl transport linked with the real NCCL, on a machine without a GPU: what is missing is an error, not the end of the program.
#include "src/comm/transports/nccl/channel.hpp"
#include "src/comm/transports/nccl/native_stream.hpp"

#include <dtensor/comm/transport.hpp>
#include <dtensor/base/error.hpp>

#include <cstdio>
#include <string>

namespace dtensor::comm::nccl {

// libtorch has no CUDA here.
cudaStream_t native_stream(const c10::Stream&) { return nullptr; }

}  // namespace dtensor::comm::nccl

using namespace dtensor::comm;

int main() {
  int version = 0, devices = 0;
  ncclGetVersion(&version);
  const auto counted = cudaGetDeviceCount(&devices);
  std::printf("NCCL %d at run time, %d when compiled; CUDA: %s, %d devices\n", version, NCCL_VERSION_CODE, cudaGetErrorString(counted),
              devices);
  if (version < NCCL_VERSION(2, 18, 0) || !has_nccl_transport() || can_use_nccl_transport()) return 1;
  try {
    make_nccl_transport(std::move(make_threads_transports(1).front()), 0);
    return 1;
  } catch (const dtensor::Error& error) {
    const std::string text = error.what_without_backtrace();
    std::printf("%s\n", text.c_str());
    if (text.find("no CUDA device was found") == std::string::npos) return 1;
  }
  try {  // whether NCCL makes an id without a device is its own affair
    nccl::make_unique_id();
    std::printf("NCCL made an id\n");
  } catch (const dtensor::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
  }
  return 0;
}
