// Recurrent layers with default states on a cut batch, and packed sequences: against one device.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace nn = torch::nn;

namespace {

struct Kind {
  const char* name;
  bool bidirectional = false, batch_first = false;
  int64_t layers = 1;
};

// Outputs of a recurrent layer whose weights are those of one device, and the last states.
template <class Layer, class Options>
std::function<Tensors(const at::Tensor&)> layer(const Kind& kind, Tensors& weights) {
  torch::manual_seed(3);
  Layer module(Options(6, 5).num_layers(kind.layers).bidirectional(kind.bidirectional).batch_first(kind.batch_first));
  module->to(torch::kDouble);
  weights = module->parameters();
  return [module](const at::Tensor& x) mutable {
    auto [output, state] = module(x);
    if constexpr (std::is_same_v<Layer, nn::LSTM>) {
      return Tensors{output, std::get<0>(state), std::get<1>(state)};
    } else {
      return Tensors{output, state};
    }
  };
}

using Make = std::function<std::function<Tensors(const at::Tensor&)>(const Kind&, Tensors&)>;

struct Layer {
  const char* name;
  Make make;
};
const std::vector<Layer> kLayers{
    {"LSTM", layer<nn::LSTM, nn::LSTMOptions>}, {"GRU", layer<nn::GRU, nn::GRUOptions>}, {"RNN", layer<nn::RNN, nn::RNNOptions>}};
const std::vector<Kind> kKinds{{"plain"}, {"two layers", false, false, 2}, {"bidirectional, batch first", true, true, 2}};

void near(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  const auto whole = full_tensor(got);
  dtensor::require(whole.sizes() == expected.sizes() && whole.allclose(expected, 1e-12, 1e-13), "test", "{} differs by {}", what,
                   whole.sub(expected).abs().max().item<double>());
}

// Results, then the gradients of the weights.
Tensors run(const Layer& layer, const Kind& kind, const std::function<at::Tensor(const at::Tensor&)>& place) {
  Tensors weights;
  const auto forward = layer.make(kind, weights);
  auto results = forward(place(counting(kind.batch_first ? std::vector<int64_t>{8, 4, 6} : std::vector<int64_t>{4, 8, 6})));
  at::Tensor loss;
  for (const auto& result : results) loss = loss.defined() ? loss + result.sin().sum() : result.sin().sum();
  loss.backward();
  for (const auto& weight : weights) results.push_back(weight.grad());
  return results;
}

}  // namespace

TEST_CASE("recurrent: default states on a cut batch gather nothing forward and backward", "[recurrent]") {
  for (const auto& layer : kLayers) {
    for (const auto& kind : kKinds) {
      INFO(layer.name << ", " << kind.name);
      const auto expected = run(layer, kind, [](const at::Tensor& x) { return x; });
      const auto body = [&](const DeviceMesh& mesh) {
        const Spmd spmd(mesh);
        Placements cut(mesh.ndim(), shard(kind.batch_first ? 0 : 1));
        CommDebugMode comm;
        const auto got = run(layer, kind, [&](const at::Tensor& x) { return distribute_tensor(x, mesh, cut).tensor(); });
        for (const auto& [line, totals] : comm.lines()) {
          const bool of_weights = line.kind == comm::Collective::all_reduce || line.kind == comm::Collective::reduce_scatter;
          dtensor::require(of_weights && totals.count <= 2 * static_cast<int64_t>(expected.size()), "test",
                           "more than sums of gradients:\n{}", comm.str());
        }
        for (size_t i = 0; i < got.size(); ++i) near(got[i], expected[i], fmt::format("result {}", i));
        dtensor::require(DTensor(got[0]).placements() == PlacementsRef(cut), "test", "the output lies as {}",
                         DTensor(got[0]).layout().str());
      };
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}}) CHECK_NOTHROW(on_mesh(sizes, body));
      if (kind.layers == 1) CHECK_NOTHROW(on_mesh({2}, body, "shm"));
    }
  }
}

TEST_CASE("recurrent: a cell's default state and a state that is learnt", "[recurrent]") {
  const auto train = [](const std::function<at::Tensor(const at::Tensor&)>& place) {
    torch::manual_seed(3);
    nn::GRUCell cell(6, 5);
    nn::LSTMCell second(5, 5);
    cell->to(torch::kDouble), second->to(torch::kDouble);
    auto first = torch::zeros({1, 5}, torch::kDouble).add(0.1).requires_grad_();
    const auto x = place(counting({8, 6}));
    auto h = cell(x, cell(x, first.expand({8, 5})));
    const auto [hidden, memory] = second(h);
    auto loss = (hidden * memory).sum() + cell(x).sum();
    loss.backward();
    return Tensors{hidden, first.grad(), cell->weight_hh.grad(), second->weight_ih.grad(), loss.detach()};
  };
  const auto expected = train([](const at::Tensor& x) { return x; });
  const auto body = [&](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    CommDebugMode comm;
    const auto got = train([&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(0)}).tensor(); });
    dtensor::require(comm.count(comm::Collective::all_gather) == 0, "test", "gathered:\n{}", comm.str());
    for (size_t i = 0; i < got.size(); ++i) near(got[i], expected[i], fmt::format("result {}", i));
  };
  for (const int64_t ranks : {2, 3, 4}) CHECK_NOTHROW(on_mesh({ranks}, body));
}

namespace {

// Plain, also where factories make distributed tensors.
at::Tensor numbers(const std::vector<int64_t>& values) {
  const NoSpmd outside;
  return torch::tensor(values);
}

// Packs, runs, unpacks: the padded output, the lengths, the states, the gradients of input and weights.
Tensors packed(const std::function<at::Tensor(const at::Tensor&)>& place, bool sorted, bool batch_first, bool lstm) {
  Tensors weights;
  // Unsorted ones are distributed where factories make distributed tensors; sorted ones stay plain.
  const auto lengths = sorted ? numbers({5, 3, 3, 1}) : numbers({3, 5, 1, 3}).add(torch::zeros({4}, torch::kLong));
  torch::manual_seed(3);
  nn::LSTM one(nn::LSTMOptions(6, 5).bidirectional(true).batch_first(batch_first));
  nn::GRU other(nn::GRUOptions(6, 5).num_layers(2).batch_first(batch_first));
  one->to(torch::kDouble), other->to(torch::kDouble);
  const auto plain = batch_first ? counting({4, 5, 6}) : counting({5, 4, 6});
  const auto x = place(plain).detach().requires_grad_();
  const auto pack = nn::utils::rnn::pack_padded_sequence(x, lengths, batch_first, sorted);
  nn::utils::rnn::PackedSequence out(pack);
  at::Tensor state;
  if (lstm) {
    auto [result, states] = one->forward_with_packed_input(pack);
    out = result, state = std::get<1>(states);
  } else {
    std::tie(out, state) = other->forward_with_packed_input(pack);
  }
  const auto [padded, out_lengths] = nn::utils::rnn::pad_packed_sequence(out, batch_first, 0.5, 6);
  (padded.sin().sum() + state.sum() + pack.data().pow(2).sum()).backward();
  Tensors results{pack.data(), pack.batch_sizes(), padded, out_lengths, state, x.grad()};
  for (const auto& weight : lstm ? one->parameters() : other->parameters()) results.push_back(weight.grad());
  return results;
}

}  // namespace

TEST_CASE("recurrent: packed sequences of cut batches forward and backward", "[recurrent]") {
  for (const bool sorted : {true, false}) {
    for (const bool batch_first : {true, false}) {
      for (const bool lstm : {true, false}) {
        INFO("sorted " << sorted << ", batch first " << batch_first << ", lstm " << lstm);
        const auto expected = packed([](const at::Tensor& x) { return x; }, sorted, batch_first, lstm);
        for (const int64_t dim : {0, 1, 2}) {
          const auto body = [&](const DeviceMesh& mesh) {
            const Spmd spmd(mesh);
            const auto got =
                packed([&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(dim)}).tensor(); }, sorted, batch_first, lstm);
            for (size_t i = 0; i < got.size(); ++i) {
              dtensor::require(got[i].scalar_type() == expected[i].scalar_type() && got[i].strides() == expected[i].strides(), "test",
                               "result {}", i);
              near(got[i].to(torch::kDouble), expected[i].to(torch::kDouble), fmt::format("result {}", i));
            }
          };
          for (const int64_t ranks : {2, 3}) CHECK_NOTHROW(on_mesh({ranks}, body, ranks == 2 && dim == 0 ? "shm" : "threads"));
        }
      }
    }
  }
}

TEST_CASE("recurrent: packing refuses what it refuses on one device", "[recurrent]") {
  CHECK_NOTHROW(on_mesh({2}, [](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    const auto x = distribute_tensor(counting({5, 2, 3}), mesh, {shard(1)}).tensor();
    const auto refused = [&](std::vector<int64_t> lengths, const char* text) {
      try {
        at::_pack_padded_sequence(x, numbers(lengths), false);
      } catch (const c10::Error& error) {
        dtensor::require(std::string(error.what()).find(text) != std::string::npos, "test", "{}", error.what());
        return;
      }
      fail("test", "was not refused");
    };
    refused({3, 4}, "decreasing order");
    refused({3}, "lengths");
    refused({3, 0}, "greater than 0");
    const auto parts = at::tensor_split(x, numbers({1, 3}).add(torch::zeros({2}, torch::kLong)), 0);
    dtensor::require(parts.size() == 3 && parts[1].size(0) == 2, "test", "tensor_split by a tensor of positions");
  }));
}
