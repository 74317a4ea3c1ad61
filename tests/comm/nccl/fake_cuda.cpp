// Devices, streams and events of threads, behind c10's interface for them.
#include "tests/comm/nccl/fake_cuda.hpp"

#include "rng/cuda/kernels.hpp"
#include "src/comm/transports/nccl/native_stream.hpp"

#include <dtensor/base/compat.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dtensor_tests {

struct FakeStream::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
};

FakeStream::State* FakeStream::make() {
  auto* state = new State;
  std::thread([state] {
    for (;;) {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return !state->tasks.empty(); });
      const auto task = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      task();
    }
  }).detach();
  return state;
}

void FakeStream::add(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
  }
  state_->changed.notify_one();
}

namespace {

// Becomes true once.
class Flag {
 public:
  void set() {
    {
      std::lock_guard lock(mutex_);
      set_ = true;
    }
    changed_.notify_all();
  }
  bool is_set() {
    std::lock_guard lock(mutex_);
    return set_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

using Event = std::shared_ptr<Flag>;

thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(current_device); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device, current_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int64_t> next{1};
    return stream(device, next++);
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    return stream(to.device(), std::exchange(current_streams[to.device_index()], to.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto& flag = *static_cast<Event*>(*event) = std::make_shared<Flag>();
    fake_stream(on.device_index(), on.id()).add([flag] { flag->set(); });
  }
  void block(void* event, const c10::Stream& on) const override {
    fake_stream(on.device_index(), on.id()).add([flag = *static_cast<Event*>(event)] { flag->wait(); });
  }
  bool queryEvent(void* event) const override { return (*static_cast<Event*>(event))->is_set(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static c10::Device cuda(int index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(c10::Device device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, cuda(index(device)), id); }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

// What libtorch asks its CUDA library.
class FakeHooks final : public at::CUDAHooksInterface {
 public:
  explicit FakeHooks(at::CUDAHooksArgs) {}
#if DTENSOR_TORCH_AT_LEAST(2, 3)
  using Index = c10::DeviceIndex;
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return generator_; }
#else
  using Index = int64_t;
  void initCUDA() const override {}
  const at::Generator& getDefaultCUDAGenerator(c10::DeviceIndex) const override { return generator_; }
#endif
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(Index) const override { return true; }
  int getNumGPUs() const override { return kFakeDevices; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }

 private:
  at::Generator generator_ = at::make_generator<at::CPUGeneratorImpl>();  // to be seeded, no more
};

at::RegistererCUDAHooksRegistry register_hooks("CUDAHooks", at::CUDAHooksRegistry(),
                                               at::RegistererCUDAHooksRegistry::DefaultCreator<FakeHooks>);

// Memory is free again for what comes later on the stream that it was made on, as libtorch's allocator has it.
struct Memory {
  void* address;
  size_t bytes;
  FakeStream& stream;
};

void free_in_order(void* context) {
  auto* memory = static_cast<Memory*>(context);
  memory->stream.add([memory] {
    std::memset(memory->address, 0x3c, memory->bytes);  // whoever still uses it has wrong values
    std::free(memory->address);
    delete memory;
  });
}

at::Tensor& copy_on_host(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  auto target = host_view(to);
  current_fake_stream().synchronize();
  target.copy_(host_view(from), non_blocking);
  return to;
}

at::Tensor make(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype, c10::Device device) {
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  const auto elements = c10::multiply_integers(sizes) == 0 ? 0 : last + 1;
  const auto bytes = static_cast<size_t>(elements) * c10::elementSize(dtype);
  const c10::Device on(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device.has_index() ? device.index() : current_device));
  void* memory = std::malloc(bytes + 1);
  std::memset(memory, 0x5a, bytes);  // what is not written is seen
  auto* held = new Memory{memory, bytes, fake_stream(on.index(), current_streams[on.index()])};
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(memory, held, free_in_order, on), nullptr, false);
  auto tensor = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                     c10::scalarTypeToTypeMeta(dtype));
  tensor->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(tensor));
}

std::vector<int64_t> row_major(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

// The parameters as this version of libtorch has them.
template <class Call>
struct Kernel;
template <class Size, class Dtype, class Layout, class Device, class Pin, class Format>
struct Kernel<at::Tensor(Size, Dtype, Layout, Device, Pin, Format)> {
  static at::Tensor empty(Size sizes, Dtype dtype, Layout, Device device, Pin, Format) {
    const auto plain = c10::asIntArrayRefUnchecked(sizes);
    return make(plain, row_major(plain), c10::dtype_or_default(dtype), *device);
  }
};
template <class Size, class Dtype, class Layout, class Device, class Pin>
struct Kernel<at::Tensor(Size, Size, Dtype, Layout, Device, Pin)> {
  static at::Tensor empty_strided(Size sizes, Size strides, Dtype dtype, Layout, Device device, Pin) {
    return make(c10::asIntArrayRefUnchecked(sizes), c10::asIntArrayRefUnchecked(strides), c10::dtype_or_default(dtype), *device);
  }
};

// Between devices and the host. A copy to the host waits for the stream, as CUDA's does, and so does one that is more than bytes.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!to.is_contiguous() || !from.is_contiguous() || to.dtype() != from.dtype() || to.sizes() != from.sizes()) {
    return copy_on_host(to, from, non_blocking);
  }
  current_fake_stream().add([to, from] {
    if (to.numel() > 0) std::memcpy(to.data_ptr(), from.data_ptr(), to.nbytes());
  });
  if (!to.is_cuda() || !from.is_cuda()) current_fake_stream().synchronize();
  return to;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &Kernel<decltype(at::_ops::empty_memory_format::call)>::empty);
  m.impl("empty_strided", &Kernel<decltype(at::_ops::empty_strided::call)>::empty_strided);
  m.impl("copy_", &copy);
}

}  // namespace

void FakeStream::synchronize() {
  const auto flag = std::make_shared<Flag>();  // it is told about its being set after this may have returned
  add([flag] { flag->set(); });
  flag->wait();
}

namespace {

struct Streams {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, FakeStream> all;  // by device and id
};

Streams& streams() {
  static auto& streams = *new Streams;
  return streams;
}

}  // namespace

FakeStream& fake_stream(int device, int64_t id) {
  std::lock_guard lock(streams().mutex);
  return streams().all[{device, id}];
}

void synchronize_fake_device(int device) {
  std::vector<FakeStream> busy;
  {
    std::lock_guard lock(streams().mutex);
    for (const auto& [key, stream] : streams().all) {
      if (key.first == device) busy.push_back(stream);
    }
  }
  for (auto& stream : busy) stream.synchronize();
}

int current_fake_device() { return current_device; }

FakeStream& current_fake_stream() { return fake_stream(current_device, current_streams[current_device]); }

}  // namespace dtensor_tests

namespace dtensor::comm::nccl {

cudaStream_t native_stream(const c10::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(&dtensor_tests::fake_stream(stream.device_index(), stream.id()));
}

}  // namespace dtensor::comm::nccl

namespace dtensor::rng::cuda {

bool have_kernels() { return false; }
Device current_device() { return {}; }
void* current_stream() { return nullptr; }
bool is_capturing() { return dtensor_tests::is_capturing; }
bool draw(const Elements&, const Words&, const Numbers&) { return false; }
bool draw_by_counter(const Elements&, const CounterDraw&, const CounterNumbers&) { return false; }

}  // namespace dtensor::rng::cuda
