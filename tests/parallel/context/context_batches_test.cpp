// Batches under context parallelism: documents of each row in microbatches and pipelines, position numbers, and attention that the region
// cannot see.
#include "tests/support/core_support.hpp"
#include "tests/support/op_check.hpp"

#include <dtensor/nn/grouped_query_attention.hpp>
#include <dtensor/parallel/context/context_parallel.hpp>
#include <dtensor/pipeline.hpp>
#include <dtensor/training/checkpoint.hpp>

#include <torch/torch.h>

using namespace dtensor;
using namespace dtensor::test;

namespace {

constexpr int64_t kVocabulary = 11, kFeatures = 8, kPacked = 12;

const std::vector<PackedSequence> kDocumentsOfRows{PackedSequence({3, 9}), PackedSequence({5, 1, 6}), PackedSequence(12),
                                                   PackedSequence({6, 6})};

struct PackedModel : torch::nn::Module {
  PackedModel() {
    register_module("words", words);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
    to(at::kDouble);
  }
  static at::Tensor attend(nn::GroupedQueryAttention& block, const at::Tensor& x) {
    const auto table = nn::rotary_table(x.size(1), kFeatures / 2, {}, x);
    return checkpoint([block = block.ptr(), table](const at::Tensor& y) { return y + block->forward(y, table); }, x);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(attend(second, attend(first, words(ids)))); }
  std::vector<Piece> pieces() {
    return {piece("words", [this](const at::Tensor& ids) { return words(ids); }),
            piece("first", [this](const at::Tensor& x) { return attend(first, x); }),
            piece("second", [this](const at::Tensor& x) { return attend(second, x); }),
            piece("head", [this](const at::Tensor& x) { return head(x); })};
  }
  torch::nn::Embedding words{kVocabulary, kFeatures};
  nn::GroupedQueryAttention first{nn::GroupedQueryAttentionOptions{kFeatures, /*heads=*/2, /*kv_heads=*/1}};
  nn::GroupedQueryAttention second{nn::GroupedQueryAttentionOptions{kFeatures, /*heads=*/2, /*kv_heads=*/1}};
  torch::nn::Linear head{kFeatures, kVocabulary};
};

at::Tensor packed_loss(const at::Tensor& scores, const at::Tensor& targets) {
  return at::cross_entropy_loss(scores.reshape({-1, kVocabulary}), targets.reshape({-1}), {}, at::Reduction::Sum);
}

std::pair<at::Tensor, at::Tensor> packed_batch() {
  const NoSpmd plain;
  const auto words = torch::arange(4 * (kPacked + 1), at::kLong).mul(7).add(3).remainder(kVocabulary).view({4, kPacked + 1});
  return {words.narrow(1, 0, kPacked), words.narrow(1, 1, kPacked)};
}

// Gradients of one device, which takes each document by itself.
std::map<std::string, at::Tensor> document_by_document() {
  torch::manual_seed(3);
  PackedModel model;
  const auto [ids, targets] = packed_batch();
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t d = 0; d < kDocumentsOfRows[row].documents(); ++d) {
      const auto [begin, end] = kDocumentsOfRows[row].document(d);
      const auto own = [&, row = row, begin = begin, end = end](const at::Tensor& x) {
        return x.narrow(0, row, 1).narrow(1, begin, end - begin);
      };
      packed_loss(model.forward(own(ids)), own(targets)).backward();
    }
  }
  std::map<std::string, at::Tensor> gradients;
  for (const auto& p : model.named_parameters()) gradients[p.key()] = p.value().grad();
  return gradients;
}

void check_gradients(const std::vector<std::pair<std::string, at::Tensor>>& got, const std::map<std::string, at::Tensor>& expected) {
  const NoSpmd plain;
  for (const auto& [name, parameter] : got) {
    require(full_tensor(parameter.grad()).allclose(expected.at(name), 1e-10, 1e-12), "test", "the gradient of {} differs", name);
  }
}

void refused_with(const std::string& text, const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return require(says(text).match(error.what()), "test", "it says: {}", error.what());
  }
  fail("test", "it was taken: {}", text);
}

}  // namespace

TEST_CASE("context batches: documents of each row in a loop over microbatches", "[context]") {
  const auto expected = document_by_document();
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        4,
        [&](World&) {
          for (const int64_t parts : {1, 2, 3, 4}) {  // of three, one has two rows
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "cp"});
            const Spmd spmd(mesh);
            torch::manual_seed(3);
            PackedModel model;
            ContextParallel context(mesh, "cp", {.mask = AttentionMask::causal_documents()});
            context.pack(kDocumentsOfRows);
            const auto [ids, targets] = packed_batch();
            const auto inputs = ids.tensor_split(parts), labels = targets.tensor_split(parts);
            for (int64_t i = 0, begin = 0; i < parts; begin += inputs[i++].size(0)) {
              const BatchRows rows(Interval{begin, begin + inputs[i].size(0)});
              const auto on_mesh = [&](const at::Tensor& x) {
                return distribute_tensor(context.order(x), mesh, {shard(0), shard(1)}).tensor();
              };
              packed_loss(model.forward(on_mesh(inputs[i])), on_mesh(labels[i])).backward();
            }
            std::vector<std::pair<std::string, at::Tensor>> parameters;
            for (const auto& p : model.named_parameters()) parameters.emplace_back(p.key(), p.value());
            check_gradients(parameters, expected);
          }
        },
        transport));
  }
}

TEST_CASE("context batches: documents of each row in a pipeline", "[context]") {
  const auto expected = document_by_document();
  for (const std::string transport : {"threads", "shm"}) {
    for (const std::string schedule : {"1f1b", "gpipe", "zb1p"}) {
      CAPTURE(transport, schedule);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World&) {
            const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"pp", "cp"});
            const auto own = stage_mesh(mesh);
            torch::manual_seed(3);
            const auto model = [&] {
              const Spmd spmd(own);
              return std::make_shared<PackedModel>();
            }();
            auto pipe = pipeline(*model, mesh, model->pieces(), {.schedule = schedule, .microbatches = 4});
            ContextParallel context(own, "cp", {.mask = AttentionMask::causal_documents()});
            context.pack(kDocumentsOfRows);
            const auto [ids, targets] = packed_batch();
            const auto on_mesh = [&](const at::Tensor& x) { return distribute_tensor(context.order(x), own, {shard(1)}).tensor(); };
            pipe.step(on_mesh(ids), on_mesh(targets), packed_loss);
            check_gradients(pipe.named_parameters(), expected);
          },
          transport));
    }
  }
}

TEST_CASE("context batches: position numbers tell a batch that was ordered twice or never", "[context][errors]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        3,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {3}, {"cp"});
          for (const std::string order : {"zigzag", "stripes"}) {
            ContextParallel context(mesh, "cp", {.order = order});
            const auto positions = torch::arange(13).expand({2, 13});
            const auto placed = [&](const at::Tensor& x) { return distribute_tensor(x, mesh, {shard(1)}); };
            const auto once = context.order(positions);
            context.check_positions(once);
            context.check_positions(placed(once));
            refused_with("it was ordered twice: order() each batch once", [&] { context.check_positions(context.order(once.clone())); });
            refused_with("it was ordered twice", [&] { context.check_positions(placed(context.order(once.clone()))); });
            refused_with("it was never ordered: give all that goes by position to order()",
                         [&] { context.check_positions(placed(positions)); });
            refused_with("order() it in this region, after pack()", [&] { context.check_positions(once.flip(1)); });
            refused_with("expected int64 with such a dim", [&] { context.check_positions(once.to(at::kFloat)); });
            context.check_positions(once.t().contiguous(), 0);
            refused_with("lies on a mesh already", [&] { context.order(placed(once)); });
          }
          const ContextParallel plain(mesh, "cp", {.order = "contiguous"});
          plain.check_positions(torch::arange(13));
        },
        transport));
  }
}

TEST_CASE("context batches: documents that do not fit the batch are refused", "[context][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
    ContextParallel context(mesh, "cp", {.mask = AttentionMask::causal_documents()});
    refused_with("got documents of 12 and 11 positions together", [&] { context.pack({PackedSequence(12), PackedSequence({6, 5})}); });
    refused_with("no rank has position 2; expected a permutation of 3", [&] { context.pack(PackedSequence(3), {{0}, {1}}); });
    refused_with("both have position 1", [&] { context.pack(PackedSequence(3), {{0, 1}, {1, 2}}); });
    refused_with("got rows of 1 ranks; expected those of 2", [&] { context.pack(PackedSequence(2), {{0, 1}}); });
    context.pack({PackedSequence(12), PackedSequence({6, 6})});
    const auto x = distribute_tensor(context.order(torch::ones({1, 1, 12, 2}), 2), mesh, {shard(2)});
    refused_with("got documents of 2 rows and a batch of 1; hint: of a microbatch", [&] { nn::attention(x, x, x); });
    const BatchRows beyond(Interval{2, 3});
    refused_with("got documents of 2 rows and a batch of 1", [&] { nn::attention(x, x, x); });
  }));
}

TEST_CASE("context batches: a predicate that throws for one pair is an error on every rank", "[context][errors]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    for (const std::string method : {"ring", "allgather", "ulysses", "tokenring", "automatic", "usp", "doublering"}) {
      CAPTURE(transport, method);
      REQUIRE_NOTHROW(on_ranks(
          4,
          [&](World& world) {
            const auto mesh = init_device_mesh(c10::kCPU, {4}, {"cp"});
            const auto x = distribute_tensor(torch::ones({1, 4, 16, 2}), mesh, {shard(2)});
            const auto picky = [](int64_t q, int64_t k, int64_t, int64_t) {
              if (q == 9 && k == 2) throw std::runtime_error("no such pair");
              return k <= q;
            };
            const ContextParallel context(mesh, "cp", {method, "contiguous", AttentionMask::from(picky)});
            const bool finds_it = world.rank() == 2 || method == "automatic";
            refused_with(finds_it ? "threw for query 9 and key 2: no such pair" : "threw on rank 2 of the mesh",
                         [&] { nn::attention(x, x, x); });
          },
          transport));
    }
  }
}

TEST_CASE("context batches: attention written out as products is refused where it would be wrong", "[context][errors]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    REQUIRE_NOTHROW(on_ranks(
        2,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2}, {"cp"});
          const Spmd spmd(mesh);
          torch::manual_seed(5);
          torch::nn::MultiheadAttention module(torch::nn::MultiheadAttentionOptions(8, 2));
          const at::NoGradGuard no_grad;
          const auto ids = [] {
            const NoSpmd plain;
            return torch::arange(6 * 3 * 8).view({6, 3, 8}).to(at::kFloat).sin();
          }();
          const auto run = [&](const at::Tensor& x) { return std::get<0>(module->forward(x, x, x)); };
          const auto expected = full_tensor(run(distribute_tensor(ids, mesh, {replicate()})));
          {
            ContextParallel context(mesh, "cp");
            const auto x = distribute_tensor(context.order(ids, 0), mesh, {shard(0)});
            refused_with("attention is written out as products, as in torch::nn::MultiheadAttention", [&] { run(x); });
            refused_with("attention is written out as products", [&] {
              const auto q = distribute_tensor(context.order(ids.unsqueeze(0), 1), mesh, {shard(1)}).tensor();  // [1, length, heads, dim]
              at::matmul(q.transpose(1, 2), q.transpose(1, 2).transpose(2, 3));
            });
          }
          {
            const ContextParallel context(mesh, "cp", {.order = "contiguous", .mask = AttentionMask::causal()});
            refused_with("the region's mask", [&] { run(distribute_tensor(ids, mesh, {shard(0)})); });
          }
          const ContextParallel context(mesh, "cp", {.order = "contiguous"});
          const auto y = full_tensor(run(distribute_tensor(ids, mesh, {shard(0)})));
          require(y.allclose(expected, 1e-5, 1e-6), "test", "another output");
        },
        transport));
  }
}
