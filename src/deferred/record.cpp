#include "src/deferred/record.hpp"

#include "rng/own_shard.hpp"
#include "src/deferred/replay.hpp"
#include "src/dispatch/decide.hpp"
#include "src/dispatch/execute.hpp"

#include <dtensor/rng/position.hpp>
#include <dtensor/dispatch/local_mode.hpp>
#include <dtensor/rng/device_generator.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <range/v3/action/push_back.hpp>

#include <algorithm>

namespace dtensor::deferred {

using dispatch::OpInfo;
using dispatch::Stack;

namespace {

at::Tensor meta_of(const at::Tensor& tensor) {
  return tensor.defined() && dispatch::is_deferred(tensor) ? as_dtensor(tensor)->deferred().meta() : dispatch::on_meta(tensor);
}

// The argument with this name, if the operator has it and it was given.
template <class T>
c10::optional<T> given(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, const char* name) {
  const auto at = schema.argumentIndexWithName(name);
  return at ? arguments[*at].toOptional<T>() : c10::nullopt;
}

// rand, randn, randint and their *_like, as ATen has them: an empty tensor, and a draw in place.
at::Tensor drawn(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const auto has = [&](const char* part) { return schema.name().find(part) != std::string::npos; };
  const bool like = has("_like");
  auto dtype = given<c10::ScalarType>(schema, arguments, "dtype");
  if (!dtype && has("randint") && !like) dtype = at::kLong;
  const auto layout = given<c10::Layout>(schema, arguments, "layout");
  const auto device = given<c10::Device>(schema, arguments, "device");
  const auto pin_memory = given<bool>(schema, arguments, "pin_memory");
  const auto format = given<c10::MemoryFormat>(schema, arguments, "memory_format");
  const auto generator = given<at::Generator>(schema, arguments, "generator");
  auto tensor = like ? at::empty_like(arguments[0].toTensor(), dtype, layout, device, pin_memory, format)
                     : at::empty(*given<std::vector<int64_t>>(schema, arguments, "size"), dtype, layout, device, pin_memory, format);
  if (has("randn")) return tensor.normal_(0, 1, generator);
  if (!has("randint")) return tensor.uniform_(0, 1, generator);
  const auto low = given<int64_t>(schema, arguments, "low");
  return tensor.random_(low ? *low : 0, *given<int64_t>(schema, arguments, "high"), generator);
}

bool is_made_and_drawn(const c10::FunctionSchema& schema) {
  for (const char* name : {"aten::rand", "aten::randn", "aten::randint", "aten::rand_like", "aten::randn_like", "aten::randint_like"}) {
    if (schema.name() == name) return true;
  }
  return false;
}

// Whether the operator only draws into its first argument and reads nothing of it but its shape.
bool draws_in_place(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  const auto is_tensor = [](const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); };
  return info.in_place && info.written == std::vector<int>{0} && info.schema->argumentIndexWithName("generator") &&
         std::ranges::count_if(arguments, is_tensor) == 1;
}

// Whether it writes a tensor that has values, which those who hold it will look at.
bool writes_values(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  return std::ranges::any_of(info.written, [&](int w) {
    return any_tensor(arguments[w], [](const at::Tensor& tensor) { return !dispatch::is_deferred(tensor); });
  });
}

// An operator that draws, on plain tensors, from the rank's generator where it was given none.
void give_generator(const c10::OperatorHandle& op, c10::Device device, std::vector<c10::IValue>& arguments) {
  const auto at = op.schema().argumentIndexWithName("generator");
  if (at && arguments[*at].isNone()) arguments[*at] = rng::generator_for(World::current(), device);
}

}  // namespace

void TapeRecorder::record(const c10::OperatorHandle& op, const OpInfo& info, Stack& stack, size_t begin) {
  dispatch::check_supported(info);
  Arguments arguments(stack.begin() + static_cast<int64_t>(begin), stack.end());
  stack.resize(begin);
  if (is_made_and_drawn(*info.schema)) return stack.push_back(drawn(*info.schema, arguments));
  const auto mesh = dispatch::common_mesh(info, arguments);
  if (!info.has_tensor_argument) dispatch::make_on_mesh(info, arguments, 0, mesh);
  rules::Call call(*info.schema, arguments, mesh);
  call.in_place = info.in_place;
  if (draws_in_place(info, arguments)) {
    record_draw(op, call.mesh, arguments);
    return stack.push_back(arguments[0]);
  }
  const bool random = info.schema->argumentIndexWithName("generator").has_value();
  const bool computed = random || writes_values(info, arguments);
  const auto metas = computed ? c10::nullopt : dispatch::meta_results(op, call, meta_of);
  Stack results;
  if (metas) {
    Entry entry{op, call.mesh, {}, {}, {}};
    for (const auto& argument : arguments) entry.arguments.push_back(on_tape(argument));
    for (const int w : info.written) {
      for_each_meta(entry.arguments[w], [&](const at::Tensor& meta) { entry.written.push_back(meta); });
    }
    results = results_of(info, entry, arguments, *metas);
    tape_->add(std::move(entry));
  } else {
    results = record_values(op, info, call.mesh, arguments);
  }
  ranges::push_back(stack, results);
}

void TapeRecorder::record_draw(const c10::OperatorHandle& op, const DeviceMesh& mesh, Arguments arguments) {
  require(!RankLocalRandom::active(), op.schema().name(),
          "a tensor that is not there yet cannot be drawn by each rank for itself; hint: do that after dt::materialize");
  const c10::Device device(mesh.device_type());
  give_generator(op, device, arguments);
  const auto generator_at = static_cast<int>(*op.schema().argumentIndexWithName("generator"));
  const auto generator = arguments[generator_at].toGenerator();
  const auto meta = meta_of(arguments[0].toTensor());
  Entry entry{op, mesh, arguments, {}, {meta}, generator_at, rng::copy_of(generator)};
  entry.arguments[0] = meta;
  entry.arguments[generator_at] = c10::IValue();
  {
    LocalMode local;
    rng::skip_draw(meta.sizes(), meta.strides(), {op, arguments, at::TensorOptions(meta.scalar_type()).device(device)}, generator);
  }
  tape_->add(std::move(entry));
}

Stack TapeRecorder::record_values(const c10::OperatorHandle& op, const OpInfo& info, const DeviceMesh& mesh, const Arguments& arguments) {
  std::vector<at::Tensor> metas;
  const Arguments on_the_tape = [&] {
    Arguments all;
    for (const auto& argument : arguments) all.push_back(on_tape(argument));
    return all;
  }();
  for_each_meta(on_the_tape, [&](const at::Tensor& meta) { metas.push_back(meta); });
  auto values = replay_on_one_device(tape_->needed_for(metas), metas);
  Stack stack;
  for (const auto& argument : on_the_tape) {
    stack.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return tensor.is_meta() ? values.at(tensor.unsafeGetTensorImpl()) : full_tensor(tensor);
    }));
  }
  give_generator(op, c10::Device(mesh.device_type()), stack);
  const auto plain_arguments = stack;
  {
    NoSpmd plain;
    LocalMode local;
    op.callBoxed(&stack);
  }
  for (const int w : info.written) {
    for (const auto& [tensor, argument, element] : tensors_in(arguments[w])) {
      if (!tensor.defined()) continue;
      const auto& value = tensor_at(plain_arguments[w], element);
      dispatch::is_deferred(tensor) ? write(tensor, value, mesh) : static_cast<void>(tensor.copy_(value));
    }
  }
  for (size_t r = 0; r < stack.size(); ++r) {
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    stack[r] = source >= 0 ? arguments[source] : with_tensors(stack[r], [&](const at::Tensor& value) {
      return value.defined() ? constant(value, mesh) : value;
    });
  }
  return stack;
}

// A tensor that is not of the tape is copied, because it may change before the tape is replayed.
c10::IValue TapeRecorder::on_tape(const c10::IValue& argument) const {
  return with_tensors(argument, [](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    return dispatch::is_deferred(tensor) ? meta_of(tensor) : tensor.clone();
  });
}

Stack TapeRecorder::results_of(const OpInfo& info, Entry& entry, const Arguments& arguments, const Stack& metas) {
  Stack results;
  for (size_t r = 0; r < metas.size(); ++r) {
    const int source = r < info.returns_argument.size() ? info.returns_argument[r] : -1;
    results.push_back(source >= 0 ? arguments[source] : with_tensors(metas[r], [&](const at::Tensor& meta) {
      if (!meta.defined()) return meta;
      bool known = false;
      for_each_meta(entry.arguments, [&](const at::Tensor& argument) { known |= argument.is_same(meta); });
      entry.outputs.push_back(known ? at::alias(meta) : meta);
      return Tape::make_deferred(tape_, entry.outputs.back(), entry.mesh);
    }));
  }
  return results;
}

at::Tensor TapeRecorder::constant(const at::Tensor& value, const DeviceMesh& mesh) {
  const auto meta = dispatch::on_meta(value);
  tape_->add({std::nullopt, mesh, {value}, {meta}, {}});
  return Tape::make_deferred(tape_, meta, mesh);
}

void TapeRecorder::write(const at::Tensor& tensor, const at::Tensor& value, const DeviceMesh& mesh) {
  static const auto copy = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  const auto meta = meta_of(tensor);
  tape_->add({copy, mesh, {meta, value, false}, {}, {meta}});
}

}  // namespace dtensor::deferred
