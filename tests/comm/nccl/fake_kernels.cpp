// Every operator on the fake devices: it runs on the host, on the same memory, when the stream has come to it.
#include "tests/comm/nccl/fake_cuda.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <vector>

namespace dtensor_tests {

namespace {

// What keeps memory. That of a device goes when its stream comes to it: whoever is still to read it comes before.
struct Keeper {
  at::Tensor tensor;
  FakeStream* stream;
};

c10::DataPtr memory_of(const at::Tensor& tensor, c10::Device device) {
  const auto let_go = [](void* context) {
    auto* keeper = static_cast<Keeper*>(context);
    if (!keeper->stream) return delete keeper;
    keeper->stream->add([keeper] { delete keeper; });
  };
  return {tensor.storage().data_ptr().get(), new Keeper{tensor, device.is_cuda() ? &current_fake_stream() : nullptr}, let_go, device};
}

c10::Storage storage_over(const at::Tensor& tensor, c10::Device device) {
  return {c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), memory_of(tensor, device), c10::GetCPUAllocator(), true};
}

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

// One call: its tensors as the host sees them, and back.
class OnHost {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const auto& schema = op.schema();
    const size_t begin = stack.size() - schema.arguments().size();
    for (size_t i = begin; i < stack.size(); ++i) stack[i] = change(stack[i], [this](const at::Tensor& tensor) { return to_host(tensor); });
    current_fake_stream().synchronize();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t i = begin; i < stack.size(); ++i)
      stack[i] = change(stack[i], [this](const at::Tensor& tensor) { return to_device(tensor); });
  }

 private:
  struct Pair {
    at::Tensor device, host;
  };

  template <class Change>
  static c10::IValue change(const c10::IValue& value, Change each) {
    if (value.isTensor()) return each(value.toTensor());
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::DeviceType::CPU);
    if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const auto& tensor : value.toTensorVector()) tensors.push_back(each(tensor));
      return tensors;
    }
    if (!value.isList()) return value;
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue element = list.get(i);
      if (element.isTensor()) list.set(i, each(element.toTensor()));
    }
    return list;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device_ = tensor.device();
    pairs_.push_back({tensor, host_view(tensor)});
    return pairs_.back().host;
  }

  // An argument is itself, a view of one is one of its memory, and all else is new.
  at::Tensor to_device(const at::Tensor& tensor) const {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (const auto& pair : pairs_) {
      if (tensor.is_same(pair.host)) return resized(pair);
    }
    for (const auto& pair : pairs_) {
      if (tensor.is_alias_of(pair.host)) return tensor_over(pair.device.storage(), c10::DispatchKey::CUDA, tensor);
    }
    return tensor_over(storage_over(tensor, device_), c10::DispatchKey::CUDA, tensor);
  }

  // out= forms make room for their result.
  static at::Tensor resized(const Pair& pair) {
    const auto& [device, host] = pair;
    if (device.sizes() == host.sizes() && device.strides() == host.strides()) return device;
    if (device.storage().data_ptr().get() != host.storage().data_ptr().get()) {
      device.storage().set_data_ptr(memory_of(host, device.device()));
      device.storage().set_nbytes(host.storage().nbytes());
    }
    device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    return device;
  }

  std::vector<Pair> pairs_;
  c10::Device device_{c10::DeviceType::CUDA, 0};
};

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { OnHost().run(op, *stack); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return tensor_over(storage_over(tensor, c10::Device(c10::DeviceType::CPU)), c10::DispatchKey::CPU, tensor);
}

}  // namespace dtensor_tests
