// Does something once, at the end of each backward pass in which it is asked to.
#pragma once

#include <dtensor/dispatch/backward.hpp>

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

#pragma GCC visibility push(default)

namespace dtensor {

class EndOfBackward {
 public:
  // Has `f` called when the backward pass ends that runs on this thread, if this is the first time in it. A pass that throws does not
  // call it. Outside of a pass, does nothing.
  template <class F>
  void call(F f) {
    const auto* pass = current_backward();
    if (!pass || (pass == pass_ && !lives_.expired())) return;
    pass_ = pass;
    const auto life = std::make_shared<char>();  // the pass has it: one that threw may have had the same address
    lives_ = life;
    torch::autograd::Engine::get_default_engine().queue_callback([f = std::move(f), life] { f(); });
  }

  // The next call() is the first one again.
  void forget() { pass_ = nullptr; }

 private:
  const void* pass_ = nullptr;
  std::weak_ptr<char> lives_;
};

}  // namespace dtensor

#pragma GCC visibility pop
