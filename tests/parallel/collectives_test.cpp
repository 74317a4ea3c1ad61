// What everyday calls communicate: exactly so many collectives of exactly these kinds, and the values of one device.
#include "tests/support/op_check.hpp"

#include <map>

using namespace dtensor;
using namespace dtensor::test;

namespace {

using comm::Collective;
using Kinds = std::map<Collective, int64_t>;

// Runs `body` and requires these collectives, and no others.
template <class Body>
auto expecting(const Kinds& kinds, std::string_view what, const Body& body) {
  CommDebugMode comm;
  auto result = body();
  int64_t all = 0;
  for (const auto& [kind, count] : kinds) {
    all += count;
    require(comm.count(kind) == count, "test", "{}: other collectives:\n{}", what, comm.str());
  }
  require(comm.count() == all, "test", "{}: other collectives:\n{}", what, comm.str());
  return result;
}

void require_equal(const at::Tensor& got, const at::Tensor& expected, std::string_view what, double tolerance = 0) {
  const auto full = full_tensor(got.detach());
  require(full.sizes() == expected.sizes() && (tolerance == 0 ? full.equal(expected) : at::allclose(full, expected, tolerance, tolerance)),
          "test", "{}: other values", what);
}

at::Tensor leaf(const at::Tensor& full, const DeviceMesh& mesh, PlacementsRef placements) {
  return placed(full, mesh, placements).detach().requires_grad_();
}

std::string lies(const at::Tensor& tensor) { return str(DTensor(tensor).placements()); }

// On threads, and between processes' transport.
void on_four(const std::function<void(const DeviceMesh&)>& body) {
  CHECK_NOTHROW(on_mesh({4}, body));
  CHECK_NOTHROW(on_mesh({4}, body, "gloo"));
}

}  // namespace

TEST_CASE("collectives: shard to replicate and back", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    for (const int64_t rows : {12, 13, 14}) {
      for (const int64_t dim : {0, 1}) {
        const auto full = dim == 0 ? whole_numbers({rows, 3}) : whole_numbers({3, rows});
        const auto x = leaf(full, mesh, {shard(dim)});
        const auto whole =
            expecting({{Collective::all_gather, 1}}, "S -> R", [&] { return redistribute(x, Placements{replicate()}).clone(); });
        require_equal(whole, full, "S -> R");
        const auto ones = distribute_tensor(torch::ones_like(full), mesh, {replicate()}).tensor();
        const auto gradient = expecting({}, "the gradient of S -> R", [&] { return torch::autograd::grad({whole}, {x}, {ones})[0]; });
        require(lies(gradient) == lies(x), "test", "the gradient lies {}", lies(gradient));

        const auto r = leaf(full, mesh, {replicate()});
        const auto part = expecting({}, "R -> S", [&] { return redistribute(r, Placements{shard(dim)}); });
        const auto back = expecting({{Collective::all_gather, 1}}, "the gradient of R -> S", [&] {
          auto g = torch::autograd::grad({part}, {r}, {distribute_tensor(full, mesh, {shard(dim)}).tensor()})[0];
          DTensor(g).to_local();
          return g;
        });
        require_equal(back, full, "the gradient of R -> S");
      }
    }
  });
}

TEST_CASE("collectives: a pending sum is scattered and reduced", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    const auto pending = from_local(torch::ones({13, 3}), mesh, {partial()});
    const auto part = expecting({{Collective::reduce_scatter, 1}}, "P -> S", [&] { return pending.redistribute({shard(0)}).to_local(); });
    require(part.size(0) == (mesh.coordinate(0) < 3 ? 4 : 1) && part.eq(4).all().item<bool>(), "test", "P -> S");
    const auto p = from_local(torch::ones({13, 3}), mesh, {partial()}).tensor().detach().requires_grad_();
    const auto whole = expecting({{Collective::all_reduce, 1}}, "P -> R", [&] { return redistribute(p, Placements{replicate()}).clone(); });
    const auto gradient = expecting({}, "the gradient of P -> R", [&] {
      return torch::autograd::grad({whole}, {p}, {distribute_tensor(torch::ones({13, 3}), mesh, {replicate()}).tensor()})[0];
    });
    require(DTensor(gradient).to_local().eq(1).all().item<bool>(), "test", "the gradient of P -> R");
  });
}

TEST_CASE("collectives: a mesh dimension of one communicates nothing", "[collectives]") {
  CHECK_NOTHROW(on_mesh({4, 1}, [](const DeviceMesh& mesh) {
    const auto full = whole_numbers({8, 6});
    for (const auto& p : {shard(0), shard(1), partial()}) {
      const auto x = placed(full, mesh, {replicate(), p});
      require_equal(expecting({}, "one rank",
                              [&] {
                                return redistribute(x, Placements{replicate(), replicate()}).clone();
                              }),
                    full, "one rank");
      require_equal(expecting({}, "one rank", [&] { return x.relu().sum(); }), full.relu().sum(), "one rank");
    }
  }));
}

TEST_CASE("collectives: reductions of uneven parts", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    const auto full = whole_numbers({9, 8});
    for (const int64_t dim : {0, 1}) {
      const auto x = placed(full, mesh, {shard(dim)});
      const auto mean = expecting({}, "mean", [&] { return x.mean(dim); });
      require_equal(expecting({{Collective::all_reduce, 1}}, "reading a mean", [&] { return full_tensor(mean); }), full.mean(dim), "mean",
                    1e-6);
      const auto mask = placed(full, mesh, {shard(dim)}) > 7;
      require_equal(mask.any(dim), (full > 7).any(dim), "any");
      require_equal(mask.logical_not().all(dim), (full > 7).logical_not().all(dim), "all");
      for (const int64_t along : {0, 1}) {
        const auto y = leaf(full, mesh, {shard(dim)});
        auto plain = full.detach().clone().requires_grad_();
        const auto got = y.softmax(along), expected = plain.softmax(along);
        require_equal(got, expected.detach(), "softmax", 1e-6);
        const auto seed = fractions({9, 8}, 2);
        const auto g = torch::autograd::grad({got}, {y}, {distribute_tensor(seed, mesh, {replicate()}).tensor()})[0];
        require_equal(g, torch::autograd::grad({expected}, {plain}, {seed})[0], "the gradient of softmax", 1e-5);
      }
    }
  });
}

TEST_CASE("collectives: cross entropy and a vocabulary that is cut", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    const auto logits = fractions({8, 13}), table = fractions({13, 4}, 3);
    const auto target = indices({8}, 13);
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum}) {
      const auto expected = at::cross_entropy_loss(logits, target, {}, reduction);
      const auto whole_classes = placed(logits, mesh, {shard(0)});
      require_equal(at::cross_entropy_loss(whole_classes, placed(target, mesh, {shard(0)}), {}, reduction), expected, "cut batch", 1e-5);
      CommDebugMode comm;
      const auto loss = at::cross_entropy_loss(placed(logits, mesh, {shard(1)}), target, {}, reduction);
      require(comm.count(Collective::all_gather) == 0 && comm.count(Collective::all_to_all) == 0, "test", "logits moved:\n{}", comm.str());
      require_equal(loss, expected, "cut classes", 1e-5);
    }
    const auto found = expecting({}, "a lookup", [&] { return torch::embedding(placed(table, mesh, {shard(0)}), target); });
    require_equal(expecting({{Collective::all_reduce, 1}}, "reading a lookup", [&] { return full_tensor(found); }),
                  torch::embedding(table, target), "embedding");
  });
}

TEST_CASE("collectives: a two-layer MLP in tensor and sequence parallel", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    const auto x = whole_numbers({8, 10}), w1 = whole_numbers({16, 10}, 1), w2 = whole_numbers({10, 16}, 2);
    auto p1 = w1.clone().requires_grad_(), p2 = w2.clone().requires_grad_();
    const auto expected = torch::relu(x.mm(p1.t())).mm(p2.t());
    expected.sum().backward();
    const auto up = leaf(w1, mesh, {shard(0)}), down = leaf(w2, mesh, {shard(1)});
    const auto input = distribute_tensor(x, mesh, {replicate()}).tensor();
    const auto forward = [&](const at::Tensor& in) { return torch::relu(in.mm(up.t())).mm(down.t()); };

    const auto out =
        expecting({{Collective::all_reduce, 1}}, "forward", [&] { return redistribute(forward(input), Placements{replicate()}).clone(); });
    require_equal(out, expected.detach(), "MLP");
    expecting({}, "backward", [&] {
      out.sum().backward();
      return 0;
    });
    require_equal(up.grad(), p1.grad(), "the first weight's gradient");
    require_equal(down.grad(), p2.grad(), "the second weight's gradient");

    const auto rows = distribute_tensor(x, mesh, {shard(0)}).tensor();
    const auto cut = expecting({{Collective::all_gather, 1}, {Collective::reduce_scatter, 1}}, "sequence parallel", [&] {
      const auto whole = redistribute(rows, Placements{replicate()});
      const auto result = redistribute(forward(whole), Placements{shard(0)});
      DTensor(result).to_local();
      return result;
    });
    require_equal(cut, expected.detach(), "MLP in sequence parallel");
  });
}

TEST_CASE("collectives: uniform numbers are the same under every layout", "[collectives]") {
  torch::manual_seed(7);
  const auto expected = torch::rand({1024, 2048});
  on_four([&](const DeviceMesh& mesh) {
    for (const auto& p : {shard(0), shard(1), replicate()}) {
      torch::manual_seed(7);
      const auto x = zeros({1024, 2048}, mesh, {p});
      {
        torch::NoGradGuard no_grad;
        x->uniform_();
      }
      require_equal(x, expected, "uniform");
    }
  });
}

TEST_CASE("collectives: every rank sees the same view", "[collectives]") {
  on_four([](const DeviceMesh& mesh) {
    const auto full = whole_numbers({6, 256});
    const auto flat = expecting({}, "view(-1)", [&] { return placed(full, mesh, {shard(0)}).view({-1}); });
    require(flat.sizes() == at::IntArrayRef({1536}) && lies(flat) == "(S(0, unit=256))", "test", "view(-1) lies {}", lies(flat));
    require_equal(flat, full.view({-1}), "view(-1)");
  });
}

namespace {

// Two pre-norm blocks of causal attention and an MLP; the output projection is the embedding.
struct TiedTransformerImpl : torch::nn::Module {
  static constexpr int64_t kLayers = 2, kDim = 16, kHeads = 4, kVocab = 24, kSeq = 6;

  struct Block {
    torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
    torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  };

  TiedTransformerImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(kVocab, kDim));
    for (int64_t l = 0; l < kLayers; ++l) {
      const auto name = [l](const char* part) { return fmt::format("block{}_{}", l, part); };
      const auto linear = [&](const char* part, int64_t in, int64_t out) {
        return register_module(name(part), torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
      };
      Block b;
      b.norm1 = register_module(name("norm1"), torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
      b.norm2 = register_module(name("norm2"), torch::nn::LayerNorm(torch::nn::LayerNormOptions({kDim})));
      b.q = linear("q", kDim, kDim), b.k = linear("k", kDim, kDim), b.v = linear("v", kDim, kDim), b.out = linear("out", kDim, kDim);
      b.up = linear("up", kDim, 4 * kDim), b.down = linear("down", 4 * kDim, kDim);
      blocks.push_back(b);
    }
  }

  at::Tensor attention(Block& b, const at::Tensor& x) {
    const auto heads = [&](torch::nn::Linear f) { return f(x).view({x.size(0), kSeq, kHeads, kDim / kHeads}).transpose(1, 2); };
    auto scores = heads(b.q).matmul(heads(b.k).transpose(-2, -1)) / 2.0;
    const auto future = torch::ones({kSeq, kSeq}, torch::kBool).triu(1);
    const auto weights = scores.masked_fill(future, -1e9).softmax(-1);
    return b.out(weights.matmul(heads(b.v)).transpose(1, 2).reshape({x.size(0), kSeq, kDim}));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    const auto whole = [](const at::Tensor& t) {
      return redistribute(t, Placements(is_dtensor(t) ? DTensor(t).mesh().ndim() : 0, replicate()));
    };
    x = whole(x);
    for (auto& b : blocks) {
      x = x + whole(attention(b, b.norm1(x)));
      x = x + whole(b.down(torch::gelu(b.up(b.norm2(x)))));
    }
    return torch::nn::functional::linear(x, embedding->weight);
  }

  torch::nn::Embedding embedding{nullptr};
  std::vector<Block> blocks;
};
TORCH_MODULE(TiedTransformer);

struct Step {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;
};

Step step_of(TiedTransformer& model) {
  const auto tokens = indices({4, TiedTransformerImpl::kSeq + 1}, TiedTransformerImpl::kVocab, 1);
  const auto x = tokens.slice(1, 0, -1).contiguous(), y = tokens.slice(1, 1).contiguous();
  const auto logits = model->forward(x).reshape({-1, TiedTransformerImpl::kVocab});
  Step step{torch::nn::functional::cross_entropy(logits, y.reshape({-1})), {}};
  step.loss.backward();
  for (auto& parameter : model->parameters()) step.gradients.push_back(parameter.grad());
  return step;
}

}  // namespace

TEST_CASE("collectives: a transformer with a tied embedding in tensor parallel", "[collectives]") {
  torch::manual_seed(0);
  TiedTransformer plain;
  plain->to(torch::kDouble);
  const auto expected = step_of(plain);
  on_four([&](const DeviceMesh& line) {
    const auto mesh = init_device_mesh(torch::kCPU, {line.size()}, {"tp"});
    Spmd spmd(mesh);
    torch::manual_seed(0);
    TiedTransformer model;
    model->to(torch::kDouble);
    parallelize_module(*model, mesh, {{"embedding.weight", {{"tp", shard(0)}}},
                                      {"*_q.weight", {{"tp", shard(0)}}}, {"*_k.weight", {{"tp", shard(0)}}},
                                      {"*_v.weight", {{"tp", shard(0)}}}, {"*_out.weight", {{"tp", shard(1)}}},
                                      {"*_up.weight", {{"tp", shard(0)}}}, {"*_down.weight", {{"tp", shard(1)}}}});
    CommDebugMode comm;
    const auto step = step_of(model);
    for (const auto& gradient : step.gradients) DTensor(gradient).to_local();
    const auto counted = comm.str();
    const auto reductions = comm.count(Collective::all_reduce), all = comm.count();
    require_equal(step.loss, expected.loss.detach(), "the loss", 1e-12);
    for (size_t i = 0; i < expected.gradients.size(); ++i)
      require_equal(step.gradients[i], expected.gradients[i], fmt::format("gradient {}", i), 1e-12);
    // Forward and backward: the lookup (or the tied output), and two per layer. The loss over cut classes: three small ones, and one
    // backward. The weights and biases of the norms reduce their gradients together.
    require(reductions == 2 * (1 + 2 * TiedTransformerImpl::kLayers) + 3 + 1 + 1 && all == reductions, "test", "other collectives:\n{}",
            counted);
  });
}
