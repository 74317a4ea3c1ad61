// Printing distributed tensors: std::cout << tensor.
//
//   f32[2, 3] (S(0)) on (dp=2)
//    0  1  2
//    3  4  5
//   [ CPUFloatType{2,3} ]
#include "src/comm/describe.hpp"
#include "src/dispatch/dtensor_impl.hpp"

#include <dtensor/dispatch/local_mode.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/comm/event.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/Formatting.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <ostream>
#include <sstream>

#include <dlfcn.h>

namespace dtensor {

namespace {

constexpr const char* kTag = "print";

using Print = std::ostream& (*)(std::ostream&, const at::Tensor&, int64_t);

// libtorch's own function; the one at the end of this file replaces it.
Print libtorch_print() {
  static const auto print = [] {
    Dl_info library{};
    dladdr(&c10::Dispatcher::singleton(), &library);
    void* handle = dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    auto* found = handle ? dlsym(handle, "_ZN2at5printERSoRKNS_6TensorEl") : nullptr;
    require(found, kTag, "libtorch's own was not found in {}", library.dli_fname ? library.dli_fname : "any library");
    return reinterpret_cast<Print>(found);
  }();
  return print;
}

// Communicates if the tensor is sharded or partial.
at::Tensor whole_of(const DTensor& tensor) {
  as_dtensor(tensor)->local();
  comm::Cause cause(kTag, false);
  const std::string subject = "printing";
  comm::Subject called_for(subject);
  at::NoGradGuard no_grad;
  try {
    return tensor.full_tensor();
  } catch (const Error& error) {
    fail(kTag,
         "{}; got {}, which is gathered, so that every rank has to print it; hint: print it on all ranks, or call full_tensor() on all "
         "and print what that gives on one",
         error.what_without_backtrace(), tensor.layout().str());
  }
}

// Prints a plain tensor, or one on a mesh of one rank, as libtorch does. Others get a line with the layout, then the values of the whole.
std::ostream& print(std::ostream& out, const at::Tensor& tensor, int64_t line_size) {
  if (!is_dtensor(tensor) || (DTensor(tensor).mesh().size() == 1 && !DTensor(tensor).is_absent()))
    return libtorch_print()(out, tensor, line_size);
  if (DTensor(tensor).is_absent()) {
    return out << fmt::format("{}, whose values are on ranks [{}]", DTensor(tensor).layout().str(),
                              fmt::join(DTensor(tensor).mesh().ranks(), ", "));
  }
  const auto whole = whole_of(DTensor(tensor));
  LocalMode local_mode;
  std::ostringstream text;  // written at once, since ranks may be threads that print to one stream
  text.copyfmt(out);
  text << DTensor(tensor).layout().str() << '\n';
  libtorch_print()(text, whole, line_size);
  return out << text.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) { return print(out, tensor, 80); }

}  // namespace dtensor

// libtorch's operator<< of tensors calls this function. A program uses the one in the library that it was linked with first.
namespace at {

std::ostream& print(std::ostream& out, const Tensor& tensor, int64_t line_size) { return dtensor::print(out, tensor, line_size); }

}  // namespace at
