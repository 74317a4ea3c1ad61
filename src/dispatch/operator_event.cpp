#include "src/dispatch/operator_event.hpp"

#include "src/dispatch/region.hpp"

#include <dtensor/base/tensors_in.hpp>
#include <dtensor/mesh/world.hpp>

namespace dtensor::dispatch {

void OperatorSpan::begin(const DeviceMesh& mesh, std::string_view op, ModuleName module) {
  open_ = std::make_unique<Open>(Open{{}, mesh});
  auto& event = open_->event;
  event.what = comm::Event::What::operation;
  event.op = op;
  const auto name = text_of(module);
  event.module = name.empty() ? comm::Cause::module() : name;
  event.thread = comm::this_thread();
  event.issued = comm::now_ns();
}

void OperatorSpan::begin(const c10::OperatorHandle& op, const Stack& stack, size_t begin) {
  const auto arguments = c10::ArrayRef<c10::IValue>(stack).slice(begin);
  const DeviceMesh* mesh = current_mesh;
  for (const auto& [tensor, argument, element] : tensors_in(arguments)) {
    if (const auto* impl = tensor.defined() ? as_dtensor(tensor) : nullptr) mesh = &impl->layout()->mesh();
  }
  if (mesh) this->begin(*mesh, info_of(op).name, module_of_arguments(arguments));
}

void OperatorSpan::end() {
  auto& event = open_->event;
  event.started = event.issued;
  event.done = comm::now_ns();
  open_->mesh.world().local<comm::Events>().tell_end(event);
}

ModuleName module_of_arguments(c10::ArrayRef<c10::IValue> arguments) {
  ModuleName found = nullptr;
  for (const auto& [tensor, argument, element] : tensors_in(arguments)) {
    if (const auto* impl = tensor.defined() ? as_dtensor(tensor) : nullptr; impl && impl->module) found = impl->module;
  }
  return found;
}

ModuleName module_of_moves(const Decision& decision, c10::ArrayRef<c10::IValue> arguments) {
  ModuleName found = nullptr;
  for (const auto& move : decision.moves) {
    if (move.communicates && !found) found = module_of(tensor_at(arguments[move.argument], move.element));
  }
  return found ? found : module_of_arguments(arguments);
}

}  // namespace dtensor::dispatch
