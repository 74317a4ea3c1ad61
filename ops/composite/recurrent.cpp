// Recurrent networks, above autograd, before libtorch takes them apart into time steps. A state that is whole on every rank is sharded as
// the batch is, so that no step gathers. Packed sequences are handled here too, because libtorch reads their lengths from memory.
#include "ops/composite/composite.hpp"
#include "src/dispatch/dtensor_impl.hpp"
#include "src/dispatch/op_info.hpp"
#include "src/dispatch/replicated.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/tensors_in.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/_pad_packed_sequence.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_ops.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace dtensor::dispatch {

namespace {

// -- States ------------------------------------------------------------------------------------------------------------------

// The part of a whole tensor. Its gradient stays as it lies: there is no need to have that whole.
struct TakeShard : torch::autograd::Function<TakeShard> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& whole, const LayoutPtr& target) {
    return move_tensor(whole, target);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// A state [..., batch, features], cut along the batch where `input` is and the state is whole.
at::Tensor cut_as_batch(const at::Tensor& state, const at::Tensor& input, int64_t batch_dim) {
  const auto* impl = state.defined() ? as_dtensor(state) : nullptr;
  const auto* source = as_dtensor(input);
  const auto dim = state.dim() - 2;
  if (!impl || !source || dim < 0 || impl->layout()->mesh() != source->layout()->mesh() || impl->layout()->is_deferred()) return state;
  if (state.size(dim) != input.size(batch_dim)) return state;  // which libtorch refuses
  Placements placements(impl->layout()->placements().begin(), impl->layout()->placements().end());
  for (size_t m = 0; m < placements.size(); ++m) {
    const auto& cut = source->layout()->placements()[m];
    if (placements[m].is_replicate() && cut.is_shard(batch_dim)) placements[m] = shard(dim, cut.cut());
  }
  const auto target = impl->layout()->with(placements);
  return target == impl->layout() ? state : TakeShard::apply(state, target);
}

// gru and rnn of padded batches, and the cells: (input, hx, ...), where hx is a tensor or two.
void cut_states(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const auto input = (*stack)[begin].toTensor();
  const auto batch_first = op.schema().argumentIndexWithName("batch_first");
  const auto batch_dim = batch_first && !(*stack)[begin + *batch_first].toBool() ? 1 : 0;
  if (is_dtensor(input) && input.dim() > batch_dim + 1) {
    auto& states = (*stack)[begin + 1];
    states = with_tensors(states, [&](const at::Tensor& state) { return cut_as_batch(state, input, batch_dim); });
  }
  op.redispatchBoxed(below(keys), stack);
}

// -- LSTM by steps -------------------------------------------------------------------------------------------------------------

struct LstmWeights {
  at::Tensor of_input, of_state;
  c10::optional<at::Tensor> input_bias, state_bias, projection;
};

std::vector<LstmWeights> lstm_weights(at::TensorList params, bool has_biases, bool projects) {
  const size_t each = 2 + (has_biases ? 2 : 0) + (projects ? 1 : 0);
  std::vector<LstmWeights> all;
  for (size_t i = 0; i + each <= params.size(); i += each) {
    all.push_back({params[i], params[i + 1], {}, {}, {}});
    if (has_biases) all.back().input_bias = params[i + 2], all.back().state_bias = params[i + 3];
    if (projects) all.back().projection = params[i + each - 1];
  }
  return all;
}

// One direction of a layer: [steps, batch, features] -> [steps, batch, outputs], and the last state in the place of the first.
at::Tensor lstm_direction(const at::Tensor& input, at::Tensor& hidden, at::Tensor& cell, const LstmWeights& weights, bool reverse) {
  const auto inputs = at::linear(input, weights.of_input, weights.input_bias).unbind(0);
  std::vector<at::Tensor> outputs(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const size_t t = reverse ? inputs.size() - 1 - i : i;
    const auto gates = at::linear(hidden, weights.of_state, weights.state_bias).add_(inputs[t]).unsafe_chunk(4, 1);
    const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), update = gates[2].tanh(), out = gates[3].sigmoid();
    cell = forget.mul(cell).add_(in.mul(update));
    hidden = out.mul(cell.tanh());
    if (weights.projection) hidden = at::linear(hidden, *weights.projection);
    outputs[t] = hidden;
  }
  return at::stack(outputs);
}

// From version 2.1 on, libtorch has one operator for all steps of a layer (oneDNN's), and nobody can say how that may be cut.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(c10::DispatchKeySet keys, const at::Tensor& input, at::TensorList hx,
                                                    at::TensorList params, bool has_biases, int64_t layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  if (!is_dtensor(input) || hx.size() != 2 || input.dim() != 3 || !input.device().is_cpu()) {
    return at::_ops::lstm_input::redispatch(below(keys), input, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first);
  }
  const int64_t batch_dim = batch_first ? 0 : 1;
  auto hidden = cut_as_batch(hx[0], input, batch_dim).unbind(0), cell = cut_as_batch(hx[1], input, batch_dim).unbind(0);
  const auto weights = lstm_weights(params, has_biases, hx[0].size(2) != hx[1].size(2));
  const size_t directions = bidirectional ? 2 : 1, count = directions * static_cast<size_t>(layers);
  require(weights.size() == count && hidden.size() == weights.size() && cell.size() == weights.size(), "aten::lstm",
          "got states of {} and {} layers and weights of {}; expected {} of each, {} layers of {} directions", hidden.size(), cell.size(),
          weights.size(), count, layers, directions);
  auto x = batch_first ? input.transpose(0, 1) : input;
  for (size_t l = 0; l < weights.size(); l += directions) {
    auto output = lstm_direction(x, hidden[l], cell[l], weights[l], false);
    if (bidirectional) output = at::cat({output, lstm_direction(x, hidden[l + 1], cell[l + 1], weights[l + 1], true)}, 2);
    const bool last = l + directions == weights.size();
    x = train && dropout > 0 && !last ? at::dropout(output, dropout, true) : output;
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(hidden), at::stack(cell)};
}

// -- Packed sequences --------------------------------------------------------------------------------------------------------

// What libtorch reads from memory: plain and whole.
void with_plain_numbers(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  auto& lengths = *(stack->end() - static_cast<int64_t>(op.schema().arguments().size()) + 1);
  lengths = full_tensor(lengths.toTensor());
  op.redispatchBoxed(below(keys), stack);
}

at::Tensor whole_lengths(std::string_view op, const at::Tensor& lengths, const at::Tensor& distributed) {
  if (!is_dtensor(lengths) && replication_check()) check_replicated(op, lengths, DTensor(distributed).mesh());
  return full_tensor(lengths);
}

// [steps, batch, ...] or, batch first, [batch, steps, ...] -> the rows that are no padding, [rows, ...], and how many each step has.
// libtorch packs the rows' numbers, and refuses what it refuses.
std::tuple<at::Tensor, at::Tensor> pack_padded(const at::Tensor& input, const at::Tensor& lengths, bool batch_first) {
  const auto steps = batch_first ? input.transpose(0, 1) : input;
  const auto whole = whole_lengths("aten::_pack_padded_sequence", lengths, input);
  at::Tensor rows, batch_sizes;
  {
    LocalMode local;
    const auto numbers = at::arange(steps.size(0) * steps.size(1), at::kLong).view({steps.size(0), steps.size(1)});
    std::tie(rows, batch_sizes) = at::_pack_padded_sequence(input.numel() == 0 ? numbers.slice(0, 0, 0) : numbers, whole, false);
    rows = rows.to(input.device());
  }
  const auto data = steps.flatten(0, 1).index_select(0, beside(input, rows));
  return {data, is_dtensor(lengths) ? beside(input, batch_sizes) : batch_sizes};
}

// The rows [rows, ...] at their places in a batch of at least `length` steps, with the sequences' lengths.
std::tuple<at::Tensor, at::Tensor> pad_packed(const at::Tensor& data, const at::Tensor& batch_sizes, bool batch_first,
                                              const at::Scalar& padding, int64_t length) {
  const auto count = data.size(0);
  const auto whole = whole_lengths("aten::_pad_packed_sequence", batch_sizes, data);
  require(whole.numel() > 0, "aten::_pad_packed_sequence", "got no batch sizes; expected one for each step, of at least one step");
  at::Tensor rows, lengths, is_padding;
  {
    LocalMode local;
    std::tie(rows, lengths) = at::_pad_packed_sequence(at::arange(count, at::kLong), whole, false, count, length);
    std::vector<int64_t> sizes(data.dim() + 1, 1);
    std::copy_n(rows.sizes().begin(), 2, sizes.begin());
    is_padding = rows.eq(count).reshape(sizes).to(data.device());
    rows = rows.reshape({-1}).clamp_max(count - 1).to(data.device());
  }
  std::vector<int64_t> sizes(data.sizes().begin() + 1, data.sizes().end());
  sizes.insert(sizes.begin(), {is_padding.size(0), is_padding.size(1)});
  const auto padded = data.index_select(0, beside(data, rows)).view(sizes).masked_fill(beside(data, is_padding), padding);
  return {batch_first ? padded.transpose(0, 1) : padded, is_dtensor(batch_sizes) ? beside(data, lengths) : lengths};
}

template <class Kernel>
void on_sequences(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack, size_t lengths, Kernel&& kernel) {
  const auto begin = stack->size() - op.schema().arguments().size();
  const auto at = [&](size_t i) -> c10::IValue& { return (*stack)[begin + i]; };
  if (!is_dtensor(at(0).toTensor())) {
    at(lengths) = full_tensor(at(lengths).toTensor());
    return op.redispatchBoxed(below(keys), stack);
  }
  std::vector<c10::IValue> results = kernel(at);
  stack->resize(begin);
  for (auto& result : results) stack->push_back(std::move(result));
}

std::vector<c10::IValue> values(std::tuple<at::Tensor, at::Tensor> results) { return {std::get<0>(results), std::get<1>(results)}; }

void pack_padded_sequence(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  on_sequences(op, keys, stack, 1, [](auto&& at) { return values(pack_padded(at(0).toTensor(), at(1).toTensor(), at(2).toBool())); });
}

void pad_packed_sequence(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  on_sequences(op, keys, stack, 1, [](auto&& at) {
    return values(pad_packed(at(0).toTensor(), at(1).toTensor(), at(2).toBool(), at(3).toScalar(), at(4).toInt()));
  });
}

// (gradient, input_size, batch_sizes, batch_first): padded with zeros.
void pack_padded_sequence_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
  on_sequences(op, keys, stack, 2, [](auto&& at) {
    const bool batch_first = at(3).toBool();
    const auto sizes = at(1).toIntVector();
    const auto steps = sizes[batch_first ? 1 : 0];
    if (at(2).toTensor().numel() == 0) return std::vector<c10::IValue>{at(0).toTensor().new_zeros(sizes)};
    return std::vector<c10::IValue>{std::get<0>(pad_packed(at(0).toTensor(), at(2).toTensor(), batch_first, 0, steps))};
  });
}

constexpr const char* kWithStates[] = {"gru.input", "rnn_tanh.input", "rnn_relu.input", "lstm_cell",
                                       "gru_cell",  "rnn_tanh_cell",  "rnn_relu_cell"};
constexpr const char* kWithNumbers[] = {"lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data",
                                        "tensor_split.tensor_indices_or_sections"};

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericMode, library) {
  library.impl("lstm.input", TORCH_FN(lstm));
  for (const auto* name : kWithStates) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cut_states>());
  for (const auto* name : kWithNumbers) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&with_plain_numbers>());
  library.impl("_pack_padded_sequence", torch::CppFunction::makeFromBoxedFunction<&pack_padded_sequence>());
  library.impl("_pad_packed_sequence", torch::CppFunction::makeFromBoxedFunction<&pad_packed_sequence>());
  library.impl("_pack_padded_sequence_backward", torch::CppFunction::makeFromBoxedFunction<&pack_padded_sequence_backward>());
}

}  // namespace

}  // namespace dtensor::dispatch
