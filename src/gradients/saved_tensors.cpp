#include <dtensor/gradients/saved_tensors.hpp>

#include <dtensor/base/error.hpp>

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

namespace dtensor {

namespace {

using torch::autograd::Engine;

thread_local SavedTensors* current = nullptr;

class EngineWithHooks final : public Engine {
 public:
  // Never destroyed, as backward may run on threads that outlive main().
  static Engine& get() {
    static auto* engine = new EngineWithHooks;
    return *engine;
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current ? current->hooks() : nullptr;
  }
};

void install() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& engine = Engine::get_default_engine();
  if (dynamic_cast<EngineWithHooks*>(&engine)) return;
  require(
      &engine == &Engine::get_base_engine(), "SaveWith",
      "another autograd engine than libtorch's own is in use; hint: in a Python process use torch.utils.checkpoint, or torch's own hooks");
  torch::autograd::set_default_engine_stub(&EngineWithHooks::get);
}

}  // namespace

SaveWith::SaveWith(SavedTensors* saved) : outer_(current) {
  if (saved) install();
  current = saved;
}
SaveWith::~SaveWith() { current = outer_; }

}  // namespace dtensor
