// dt::batches takes any data loader of libtorch, and batches of any parts.
#include "tests/support/batches_support.hpp"

#include <range/v3/view/zip.hpp>

using namespace dtensor;
using namespace dtensor::test;

namespace kinds {

enum class Side { left, right };

struct Sample {
  at::Tensor image;
  std::optional<at::Tensor> mask;
  std::string name;
  std::vector<int64_t> boxes;
  Side side = Side::left;
};

void visit_parts(data::PartVisitor& visit, Sample& sample) { visit(sample.image, sample.mask, sample.name, sample.boxes, sample.side); }

}  // namespace kinds

namespace {

using kinds::Sample;
using kinds::Side;

// A dataset of batches of one's own kind, made of their first index.
template <class Batch>
struct Custom : torch::data::datasets::BatchDataset<Custom<Batch>, Batch> {
  explicit Custom(std::function<Batch(int64_t, int64_t)> make) : make(std::move(make)) {}
  Batch get_batch(torch::ArrayRef<size_t> indices) override {
    return make(static_cast<int64_t>(indices[0]), static_cast<int64_t>(indices.size()));
  }
  c10::optional<size_t> size() const override { return 10; }
  std::function<Batch(int64_t, int64_t)> make;
};

at::Tensor rows(int64_t from, int64_t count) { return torch::arange(from * 3, (from + count) * 3, torch::kDouble).view({count, 3}); }

// Calls check(batch, first index, size) for each batch of 4, 4 and 2 examples, without and with workers, on three ranks over two
// transports.
template <class Batch, class Check>
void check_batches(std::function<Batch(int64_t, int64_t)> make, const Check& check) {
  for (const size_t workers : {0, 2}) {
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh(
          {3},
          [&](const DeviceMesh& mesh) {
            Spmd spmd(mesh);
            auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
                Custom<Batch>(make), torch::data::DataLoaderOptions().batch_size(4).workers(workers));
            int64_t from = 0;
            for (auto& batch : batches(*loader, mesh, {shard(0)})) {
              const int64_t count = std::min<int64_t>(4, 10 - from);
              check(batch, from, count);
              from += count;
            }
            require(from == 10, "test", "saw {} examples", from);
          },
          transport));
    }
  }
}

void cut(const at::Tensor& tensor, const at::Tensor& expected, const char* what) {
  const auto layout = DTensor(tensor).placements()[0];
  require(layout.is_shard(0), "test", "{} lies as {}", what, layout.str());
  same(tensor, expected, what);
}

}  // namespace

TEST_CASE("batches: tensors pairs tuples vectors", "[data]") {
  using torch::data::Example;
  using torch::data::TensorExample;
  check_batches<at::Tensor>(rows, [](auto& batch, auto from, auto count) { cut(batch, rows(from, count), "tensor"); });
  check_batches<TensorExample>([](auto from, auto count) { return TensorExample(rows(from, count)); },
                               [](auto& batch, auto from, auto count) { cut(batch.data, rows(from, count), "data"); });
  check_batches<std::pair<at::Tensor, int64_t>>([](auto from, auto count) { return std::pair(rows(from, count), from); },
                                                [](auto& batch, auto from, auto count) {
                                                  cut(batch.first, rows(from, count), "first");
                                                  require(batch.second == from, "test", "second is {}", batch.second);
                                                });
  using Three = std::tuple<at::Tensor, at::Tensor, double>;
  check_batches<Three>([](auto from, auto count) { return Three(rows(from, count).to(torch::kBool), rows(from, count).sum(), 0.5); },
                       [](auto& batch, auto from, auto count) {
                         cut(std::get<0>(batch), rows(from, count).to(torch::kBool), "mask");
                         same(std::get<1>(batch), rows(from, count).sum(), "number");
                         require(std::get<2>(batch) == 0.5, "test", "the third is {}", std::get<2>(batch));
                       });
  check_batches<std::vector<at::Tensor>>(
      [](auto from, auto count) {
        return Tensors{rows(from, count), torch::Tensor(), rows(0, count).narrow(1, 0, 0)};
      },
      [](auto& batch, auto from, auto count) {
        require(batch.size() == 3 && !batch[1].defined(), "test", "got {} tensors", batch.size());
        cut(batch[0], rows(from, count), "first");
        cut(batch[2], rows(0, count).narrow(1, 0, 0), "empty");
      });
}

TEST_CASE("batches: examples that nobody stacked", "[data]") {
  using List = std::vector<torch::data::Example<>>;
  const auto make = [](int64_t from, int64_t count) {
    List list;
    for (int64_t i = from; i < from + count; ++i) list.push_back({rows(i, 1)[0], torch::full({}, i)});
    return list;
  };
  check_batches<List>(make, [](auto& batch, auto from, auto count) {
    require(static_cast<int64_t>(batch.size()) == count, "test", "got {} examples", batch.size());
    for (int64_t i = 0; i < count; ++i) {
      require(DTensor(batch[i].data).layout().is_replicated(), "test", "an example is cut");
      same(batch[i].data, rows(from + i, 1)[0], "data");
      same(batch[i].target, torch::full({}, from + i), "target");
    }
  });
  CHECK_NOTHROW(on_mesh({2}, [&](const DeviceMesh& mesh) {  // dim 1 of what stacking gives is an example's first
    auto loader = torch::data::make_data_loader(Custom<List>(make), torch::data::DataLoaderOptions(4));
    for (auto& batch : batches(*loader, mesh, {shard(1)})) require(DTensor(batch[0].data).placements()[0] == shard(0), "test", "not cut");
  }));
}

TEST_CASE("batches: a struct of one's own", "[data]") {
  const auto make = [](int64_t from, int64_t count) {
    Sample sample{rows(from, count), {}, fmt::format("from {}", from), {from, count, 7}, Side::right};
    if (from > 0) sample.mask = rows(from, count) > 5;
    return sample;
  };
  check_batches<Sample>(make, [&](auto& batch, auto from, auto count) {
    const NoSpmd plain;
    const auto expected = make(from, count);
    cut(batch.image, expected.image, "image");
    require(batch.mask.has_value() == expected.mask.has_value(), "test", "the mask is there or not");
    if (batch.mask) cut(*batch.mask, *expected.mask, "mask");
    require(batch.name == expected.name && batch.boxes == expected.boxes && batch.side == Side::right, "test", "got {}", batch.name);
  });
}

TEST_CASE("batches: stateful datasets", "[data]") {
  struct Stream : torch::data::datasets::StatefulDataset<Stream, torch::data::Example<>> {
    c10::optional<torch::data::Example<>> get_batch(size_t size) override {
      std::lock_guard<std::mutex> lock(*mutex);
      if (at == 10) return c10::nullopt;
      const auto from = at;
      at = std::min<int64_t>(at + static_cast<int64_t>(size), 10);
      return torch::data::Example<>(rows(from, at - from), torch::rand({at - from}));
    }
    void reset() override { at = 0; }
    c10::optional<size_t> size() const override { return 10; }
    void save(torch::serialize::OutputArchive&) const override {}
    void load(torch::serialize::InputArchive&) override {}

    std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>();
    int64_t at = 0;
  };
  const auto run = [](auto&& batches_of) {
    Tensors results;
    torch::manual_seed(2);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : batches_of()) results.push_back(batch.data), results.push_back(batch.target), results.push_back(torch::rand({2}));
    }
    return results;
  };
  auto alone = torch::data::make_data_loader(Stream(), torch::data::DataLoaderOptions(4));
  const auto expected = run([&]() -> auto& { return *alone; });
  REQUIRE(expected.size() == 18);
  for (const auto* transport : {"threads", "gloo"}) {
    CHECK_NOTHROW(on_mesh(
        {3},
        [&](const DeviceMesh& mesh) {
          Spmd spmd(mesh);
          auto loader = torch::data::make_data_loader(Stream(), torch::data::DataLoaderOptions(4));
          const auto got = run([&] { return batches(*loader, mesh, {shard(0)}); });
          require(got.size() == expected.size(), "test", "got {} results", got.size());
          for (const auto& [mine, theirs] : ranges::views::zip(got, expected)) same(mine, theirs, "a result");
        },
        transport));
  }
}

namespace {

// Four chunks of 5 examples.
struct Reader : torch::data::datasets::ChunkDataReader<torch::data::Example<>> {
  using BatchType = ChunkType;
  ChunkType read_chunk(size_t index) override {
    ChunkType chunk;
    for (int64_t i = 0; i < 5; ++i) chunk.push_back({rows(5 * static_cast<int64_t>(index) + i, 1)[0], torch::full({}, i)});
    return chunk;
  }
  size_t chunk_count() override { return 4; }
  void reset() override {}
};

}  // namespace

TEST_CASE("batches: chunks in an order that threads make", "[data]") {
  using torch::data::samplers::RandomSampler;
  CHECK_NOTHROW(on_mesh({3}, [](const DeviceMesh& mesh) {
    Spmd spmd(mesh);
    torch::manual_seed(2);
    auto chunks = torch::data::datasets::make_shared_dataset<torch::data::datasets::ChunkDataset<Reader, RandomSampler, RandomSampler>>(
        Reader(), RandomSampler(4), RandomSampler(5), torch::data::datasets::ChunkDatasetOptions(2, 3));
    auto loader =
        torch::data::make_data_loader(chunks.map(torch::data::transforms::BatchLambda<std::vector<torch::data::Example<>>, at::Tensor>(
                                          [](std::vector<torch::data::Example<>> examples) {
                                            Tensors data;
                                            for (auto& example : examples) data.push_back(example.data);
                                            return torch::stack(data);
                                          })),
                                      torch::data::DataLoaderOptions(3).workers(0));
    for (int epoch = 0; epoch < 2; ++epoch) {
      Tensors all;
      for (auto& batch : batches(*loader, mesh, {shard(0)})) all.push_back(full_tensor(batch));
      const NoSpmd plain;
      const auto whole = std::get<0>(torch::cat(all).select(1, 0).sort());
      require(whole.equal(torch::arange(20, torch::kDouble) * 3), "test", "an epoch is not every example once");
      check_generators(mesh);
    }
  }));
}

// A dataset that was made inside Spmd holds distributed tensors, and gives them.
TEST_CASE("batches: of a dataset that holds distributed tensors", "[data]") {
  struct Held : torch::data::datasets::Dataset<Held> {
    at::Tensor images = torch::arange(60).view({10, 2, 3}).to(torch::kFloat), targets = torch::arange(10);
    torch::data::Example<> get(size_t index) override {
      return {images[static_cast<int64_t>(index)] * 2, targets[static_cast<int64_t>(index)]};
    }
    c10::optional<size_t> size() const override { return 10; }
  };
  for (const size_t workers : {0, 2}) {
    for (const auto* transport : {"threads", "gloo"}) {
      CHECK_NOTHROW(on_mesh(
          {3},
          [&](const DeviceMesh& mesh) {
            Spmd spmd(mesh);
            auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
                Held().map(torch::data::transforms::Stack<>()), torch::data::DataLoaderOptions().batch_size(4).workers(workers));
            int64_t from = 0;
            for (auto& batch : batches(*loader, mesh, {shard(0)})) {
              const NoSpmd plain;
              const int64_t count = std::min<int64_t>(4, 10 - from);
              cut(batch.data, torch::arange(from * 6, (from + count) * 6).view({count, 2, 3}).to(torch::kFloat) * 2, "data");
              cut(batch.target, torch::arange(from, from + count), "target");
              from += count;
            }
            require(from == 10, "test", "saw {} examples", from);
          },
          transport));
    }
  }
}
