// Stands in for the kernels in builds without nvcc, or with a libtorch without CUDA.
#include "rng/cuda/kernels.hpp"

namespace dtensor::rng::cuda {

bool have_kernels() { return false; }
Device current_device() { return {}; }
void* current_stream() { return nullptr; }
bool is_capturing() { return false; }
bool draw(const Elements&, const Words&, const Numbers&) { return false; }
bool draw_by_counter(const Elements&, const CounterDraw&, const CounterNumbers&) { return false; }

}  // namespace dtensor::rng::cuda
