// Small programs of the recurrent kind, trained on meshes as on one device: a language model that carries its state, a bidirectional
// classifier, captions of packed sequences.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/op_check.hpp"

using namespace dtensor;
using namespace dtensor::test;

namespace nn = torch::nn;

namespace {

using Place = std::function<at::Tensor(const at::Tensor&)>;  // lays out a batch

struct Result {
  std::vector<double> losses;
  Tensors parameters;
};

template <class Net, class Loss>
Result train(Net& net, int steps, Loss&& loss_of) {
  net.to(torch::kDouble);
  torch::optim::Adam optimizer(net.parameters(), torch::optim::AdamOptions(0.02));
  Result result;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(step);
    loss.backward();
    nn::utils::clip_grad_norm_(net.parameters(), 0.5);
    optimizer.step();
    result.losses.push_back(loss.template item<double>());
  }
  for (const auto& p : net.parameters()) result.parameters.push_back(full_tensor(p.detach()));
  return result;
}

struct LanguageModel : nn::Module {
  LanguageModel()
      : embed(register_module("embed", nn::Embedding(11, 6))),
        lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 7).num_layers(2).batch_first(true)))),
        head(register_module("head", nn::Linear(7, 11))) {}
  nn::Embedding embed;
  nn::LSTM lstm;
  nn::Linear head;
};

// Truncated back-propagation: the state goes on from one piece of the text to the next, detached.
Result language_model(const Place& place) {
  torch::manual_seed(1);
  LanguageModel net;
  std::tuple<at::Tensor, at::Tensor> state{torch::zeros({2, 8, 7}, torch::kDouble), torch::zeros({2, 8, 7}, torch::kDouble)};
  return train(net, 4, [&](int step) {
    const auto text = place(indices({8, 6}, 11, step)), next = place(indices({8, 6}, 11, step + 1));
    state = {std::get<0>(state).detach(), std::get<1>(state).detach()};
    const auto [output, carried] = net.lstm(net.embed(text), state);
    state = carried;
    return torch::cross_entropy_loss(net.head(output.reshape({-1, 7})), next.reshape({-1}));
  });
}

struct Classifier : nn::Module {
  Classifier()
      : lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(5, 6).num_layers(2).batch_first(true).bidirectional(true)))),
        head(register_module("head", nn::Linear(12, 4))) {}
  nn::LSTM lstm;
  nn::Linear head;
};

// With states that forward() makes itself, and the last step of the output.
Result classifier(const Place& place) {
  torch::manual_seed(2);
  Classifier net;
  return train(net, 4, [&](int step) {
    const auto images = place(fractions({8, 7, 5}, step).to(torch::kDouble)), labels = place(indices({8}, 4, step));
    const auto h0 = torch::zeros({4, images.size(0), 6}, torch::kDouble), c0 = torch::zeros({4, images.size(0), 6}, torch::kDouble);
    const auto output = std::get<0>(net.lstm(images, std::make_tuple(h0, c0)));
    return torch::cross_entropy_loss(net.head(output.select(1, -1)), labels);
  });
}

struct Captions : nn::Module {
  Captions()
      : encoder(register_module("encoder", nn::Linear(10, 6))),
        norm(register_module("norm", nn::BatchNorm1d(6))),
        embed(register_module("embed", nn::Embedding(9, 6))),
        gru(register_module("gru", nn::GRU(nn::GRUOptions(6, 7).batch_first(true)))),
        head(register_module("head", nn::Linear(7, 9))) {}
  nn::Linear encoder;
  nn::BatchNorm1d norm;
  nn::Embedding embed;
  nn::GRU gru;
  nn::Linear head;
};

// The image's features are the first word; targets are packed as the captions are.
Result captions(const Place& place) {
  torch::manual_seed(3);
  Captions net;
  const auto lengths = [] {
    const NoSpmd outside;
    return torch::tensor(std::vector<int64_t>{6, 5, 5, 3, 3, 2, 1, 1});
  }();
  return train(net, 4, [&](int step) {
    const auto images = place(fractions({8, 10}, step).to(torch::kDouble)), words = place(indices({8, 6}, 9, step));
    const auto features = net.norm(net.encoder(images)).unsqueeze(1);
    const auto input = torch::cat({features, net.embed(words)}, 1);
    const auto packed = nn::utils::rnn::pack_padded_sequence(input, lengths, true);
    const auto targets = nn::utils::rnn::pack_padded_sequence(words, lengths, true).data();
    const auto output = std::get<0>(net.gru->forward_with_packed_input(packed));
    return torch::cross_entropy_loss(net.head(output.data()), targets);
  });
}

void same_on_meshes(const std::function<Result(const Place&)>& program) {
  const auto expected = program([](const at::Tensor& batch) { return batch; });
  const auto body = [&](const DeviceMesh& mesh) {
    const Spmd spmd(mesh);
    const auto got = program([&](const at::Tensor& batch) { return distribute_tensor(batch, mesh, {shard(0)}).tensor(); });
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      dtensor::require(std::abs(got.losses[i] - expected.losses[i]) < 1e-10, "test", "loss {}: {} beside {}", i, got.losses[i],
                       expected.losses[i]);
    }
    for (size_t i = 0; i < expected.parameters.size(); ++i) {
      dtensor::require(got.parameters[i].allclose(expected.parameters[i], 1e-7, 1e-9), "test", "parameter {} differs", i);
    }
  };
  for (const int64_t ranks : {2, 3, 4}) CHECK_NOTHROW(on_mesh({ranks}, body));
  CHECK_NOTHROW(on_mesh({2}, body, "shm"));
}

}  // namespace

TEST_CASE("recurrent models: a language model with a carried state", "[recurrent][model]") { same_on_meshes(language_model); }
TEST_CASE("recurrent models: a bidirectional classifier", "[recurrent][model]") { same_on_meshes(classifier); }
TEST_CASE("recurrent models: captions of packed sequences", "[recurrent][model]") { same_on_meshes(captions); }
