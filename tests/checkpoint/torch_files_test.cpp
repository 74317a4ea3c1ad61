// Modules and tensors in files of torch::save, in and out, on any mesh.
#include "tests/support/sanitizers.hpp"
#include "tests/support/torch_files_support.hpp"

#include <csignal>
#include <thread>
#include <sys/resource.h>
#include <sys/stat.h>

namespace dt = dtensor;
using namespace dt::test;

TEST_CASE("files: a module's file is torch::save's byte for byte", "[files]") {
  ManyKinds plain(3);
  const auto expected = plain_bytes(plain);
  for (const auto& way : ways()) {
    for (const auto* transport : {"threads", "shm", "gloo"}) {
      if (ranks_of(way) == 1 && std::string(transport) != "threads") continue;
      CAPTURE(way, transport);
      const Folder folder;
      REQUIRE_NOTHROW(on_way(
          way, 3,
          [&](dt::World&, ManyKinds& model) {
            dt::save(model, folder / "model.pt");
            dt::require(bytes_of(folder / "model.pt").size() == expected.size(), "test", "the file is not there when save returns");
          },
          transport));
      CHECK(bytes_of(folder / "model.pt") == expected);
      CHECK(folder.files() == 1);
      ManyKinds read(4);
      torch::load(read, folder / "model.pt");
      CHECK_NOTHROW(same_module(*read, *plain, "read by torch::load"));
    }
  }
}

TEST_CASE("files: a module takes the values of torch::save's file and stays as it lies", "[files]") {
  ManyKinds plain(3);
  const Folder folder;
  torch::save(plain, folder / "model.pt");
  for (const auto& way : ways()) {
    for (const auto* transport : {"threads", "shm", "gloo"}) {
      if (ranks_of(way) == 1 && std::string(transport) != "threads") continue;
      CAPTURE(way, transport);
      REQUIRE_NOTHROW(on_way(
          way, 4,
          [&](dt::World&, ManyKinds& model) {
            std::vector<std::string> before;
            for (const auto& [name, tensor] : tensors_of(*model)) before.push_back(dt::DTensor(tensor).layout().str());
            dt::load(model, folder / "model.pt");
            same_module(*model, *plain, "read by dt::load");
            const auto after = tensors_of(*model);
            for (size_t i = 0; i < after.size(); ++i) {
              dt::require(dt::DTensor(after[i].second).layout().str() == before[i], "test", "{} lies otherwise", after[i].first);
              dt::require(after[i].second.is_leaf(), "test", "{} is no leaf", after[i].first);
            }
            dt::require(model->frozen.requires_grad() == false && model->number.requires_grad(), "test", "what needs gradients changed");
            dt::require(model->head.is_same(model->tokens->weight), "test", "what was tied is not");
          },
          transport));
    }
  }
}

TEST_CASE("files: training goes on with the values of a file", "[files]") {
  const auto loss_of = [](ManyKinds& model, const torch::Tensor& ids) {
    torch::manual_seed(9);  // of dropout
    return model->forward(ids).square().mean();
  };
  const auto ids = torch::arange(24).mul(7).remainder(11);
  ManyKinds plain(3);
  const Folder folder;
  torch::save(plain, folder / "model.pt");
  const auto expected = loss_of(plain, ids);
  expected.backward();
  for (const auto& way : ways()) {
    CAPTURE(way);
    REQUIRE_NOTHROW(on_way(way, 4, [&](dt::World&, ManyKinds& model) {
      const auto before = loss_of(model, ids);  // fully sharded units have gathered the old values
      dt::load(model, folder / "model.pt");
      model->zero_grad();
      const auto loss = loss_of(model, ids);
      loss.backward();
      const auto off = std::abs(loss.item<float>() - expected.item<float>());
      dt::require(off < 1e-6 * std::abs(expected.item<float>()), "test", "the loss is off by {}", off);
      const auto gradient = dt::full_tensor(model->head.grad());
      dt::require(gradient.allclose(plain->head.grad(), 1e-5, 1e-6), "test", "the gradient differs");
    }));
  }
}

namespace {

// Runs `call` on each rank of a mesh; all throw, and their texts are returned.
std::vector<std::string> errors_of(const Way& way, const std::function<void(ManyKinds&)>& call, const std::string& transport = "threads") {
  std::vector<std::string> texts(ranks_of(way));
  on_way(
      way, 4,
      [&](dt::World& world, ManyKinds& model) {
        try {
          call(model);
        } catch (const dt::Error& error) {
          texts[world.rank()] = error.what_without_backtrace();
        }
        world.barrier();
        dt::NoSpmd no_region;
        same_module(*model, *ManyKinds(4), "after the error");
      },
      transport);
  return texts;
}

void check_all_say(const std::vector<std::string>& texts, const std::vector<std::string>& parts) {
  for (const auto& text : texts) {
    for (const auto& part : parts) CHECK_THAT(text, says(part));
  }
}

struct Other : torch::nn::Module {
  Other() {
    register_parameter("head", torch::zeros({11, 7}));
    register_parameter("frozn", torch::zeros({7}));
    register_parameter("number", torch::zeros({}, torch::kDouble));
    register_module("layers", torch::nn::Sequential(torch::nn::Linear(6, 8)));
  }
};

}  // namespace

TEST_CASE("files: what does not fit is listed on every rank and nothing changes", "[files]") {
  const Folder folder;
  torch::save(std::make_shared<Other>(), folder / "other.pt");
  std::ofstream(folder / "text.pt") << "no archive";
  torch::save(torch::ones({3}), folder / "tensor.pt");
  for (const auto* transport : {"threads", "gloo"}) {
    const auto way = ways()[4];
    const auto load = [&](const std::string& name) { return [&, name](ManyKinds& model) { dt::load(model, folder / name); }; };
    check_all_say(
        errors_of(way, load("other.pt"), transport),
        {"[load]", "other.pt' does not fit the module", "'head' has sizes [11, 7], expected [11, 6]", "no 'frozen' (closest: 'frozn'",
         "'number' is Double, expected Float", "no 'layers.2.weight'", "no 'tokens.weight'", "no 'conv.weight'"});
    check_all_say(errors_of(way, load("text.pt"), transport), {"text.pt' is no file of torch::save"});
    check_all_say(errors_of(way, load("tensor.pt"), transport), {"no 'tokens.weight'"});
    check_all_say(errors_of(way, load("none.pt"), transport), {"none.pt' cannot be opened: No such file"});
    check_all_say(errors_of(way, load(""), transport), {"cannot be opened: it is a folder"});
    check_all_say(errors_of(
                      way, [&](ManyKinds& model) { dt::save(model, folder / "nowhere/model.pt"); }, transport),
                  {"[save]", "nowhere/model.pt' cannot be written: No such file"});
  }
}

TEST_CASE("files: a damaged file is found out and changes nothing", "[files]") {
  const dt::test::IgnoredLeaks of_archives;  // of which the constructor of libtorch's reader throws
  const Folder folder;
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  dt::save(model, folder / "model.pt");
  const auto bytes = bytes_of(folder / "model.pt");
  const auto values = [&] {
    std::vector<torch::Tensor> all;
    for (const auto& tensor : model->parameters()) all.push_back(tensor.detach().clone());
    for (const auto& tensor : model->buffers()) all.push_back(tensor.clone());
    return all;
  };
  const auto before = values();
  int refused = 0, tried = 0;
  for (size_t place = 0; place < bytes.size(); place += 7, ++tried) {
    auto changed = bytes;
    changed[place] = static_cast<char>(~changed[place]);
    std::ofstream(folder / "model.pt", std::ios::binary) << changed;
    try {
      dt::load(model, folder / "model.pt");
    } catch (const dt::Error&) {
      ++refused;
    }
    INFO("byte " << place << " of " << bytes.size());
    const auto now = values();  // what is between the records does not count
    REQUIRE(std::ranges::equal(now, before, [](const auto& a, const auto& b) { return a.equal(b); }));
  }
  CHECK(refused > tried / 4);
  std::ofstream(folder / "model.pt", std::ios::binary) << bytes.substr(0, bytes.size() / 2);
  CHECK_THROWS_AS(dt::load(model, folder / "model.pt"), dt::Error);
  auto changed = bytes;
  changed[bytes.find("archive/data.pkl") + 200] ^= 1;
  std::ofstream(folder / "model.pt", std::ios::binary) << changed;
  CHECK_THROWS_WITH(dt::load(model, folder / "model.pt"), says("is damaged: the checksum of its record"));
}

TEST_CASE("files: a file that cannot be completed leaves the old one and nothing else", "[files]") {
  const Folder folder;
  const auto path = folder / "model.pt";
  std::ofstream(path) << "the old one";
  const auto on_signal = std::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t limit : {0, 1, 100, 1000, 3000, 6000}) {  // of bytes in a file
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{limit, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    const auto texts = errors_of(ways()[2], [&](ManyKinds& model) { dt::save(model, path); });
    setrlimit(RLIMIT_FSIZE, &before);
    CAPTURE(limit);
    check_all_say(texts, {"model.pt' cannot be written: File too large"});
    CHECK(bytes_of(path) == "the old one");
    CHECK(folder.files() == 1);
  }
  std::signal(SIGXFSZ, on_signal);
}

TEST_CASE("files: tensors and lists of them", "[files]") {
  const Folder folder;
  const auto plain = torch::randn({5, 4});
  const std::vector<torch::Tensor> list{plain, torch::arange(7), torch::randn({0}), torch::ones({}, torch::kBool)};
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    const auto mesh = line(world);
    const auto place = [&](const torch::Tensor& t) {
      return dt::distribute_tensor(t, mesh, {t.dim() ? dt::shard(0) : dt::replicate()}).tensor();
    };
    std::vector<torch::Tensor> placed;
    for (const auto& t : list) placed.push_back(place(t));
    dt::Spmd spmd(mesh);
    dt::save(placed[0] * 2, folder / "tensor.pt");
    dt::save(placed, folder / "list.pt");
    torch::Tensor tensor;
    std::vector<torch::Tensor> read;
    dt::load(tensor, folder / "tensor.pt");
    dt::load(read, folder / "list.pt");
    dt::NoSpmd no_region;
    dt::require(tensor.equal(plain * 2), "test", "the tensor differs");
    dt::require(read.size() == list.size(), "test", "{} tensors", read.size());
    for (size_t i = 0; i < read.size(); ++i) dt::require(read[i].equal(list[i]), "test", "tensor {} differs", i);
  }));
  CHECK(bytes_of(folder / "list.pt") == plain_bytes(list));
  CHECK(bytes_of(folder / "tensor.pt") == plain_bytes(torch::Tensor(plain * 2)));
}

TEST_CASE("files: what saves itself is written once", "[files]") {
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(3, [&](dt::World& world) {
    dt::Spmd spmd(line(world));
    torch::nn::Linear net(2, 2);
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    dt::lr::Scheduler schedule(optimizer, dt::lr::cosine(8)), other(optimizer, dt::lr::cosine(8));
    schedule.set_step(5);
    dt::save(schedule, folder / "schedule.pt");
    dt::GradScaler scaler, other_scaler({.init_scale = 3});
    dt::save(scaler, folder / "scaler.pt");
    dt::load(other, folder / "schedule.pt");
    dt::load(other_scaler, folder / "scaler.pt");
    dt::require(other.current_step() == 5 && other_scaler.get_scale() == scaler.get_scale(), "test", "they differ");
  }));
  CHECK(folder.files() == 2);
}

TEST_CASE("files: a link stays one and a file keeps its permissions", "[files]") {
  const Folder folder;
  const auto target = folder / "model-1.pt", link = folder / "latest.pt", dangling = folder / "next.pt", plain = folder / "plain.pt",
             fifo = folder / "fifo";
  std::ofstream(target) << "the old one";
  std::filesystem::permissions(target, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  std::filesystem::create_symlink("model-1.pt", link);
  std::filesystem::create_symlink("later.pt", dangling);
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  std::string through;
  std::thread reader([&] { through = bytes_of(fifo); });
  on_way(ways()[2], 4, [&](dt::World&, ManyKinds& model) {
    dt::save(model, plain);
    dt::save(model, link);
    dt::save(model, dangling);
    dt::save(model, fifo);
  });
  reader.join();
  CHECK(std::filesystem::is_symlink(link));
  CHECK(std::filesystem::is_symlink(dangling));
  CHECK(bytes_of(folder / "later.pt") == bytes_of(plain));
  CHECK(bytes_of(target) == bytes_of(plain));
  CHECK(std::filesystem::status(target).permissions() == (std::filesystem::perms::owner_read | std::filesystem::perms::owner_write));
  CHECK(std::filesystem::is_fifo(fifo));
  CHECK(through == bytes_of(plain));
  CHECK(folder.files() == 6);
}

TEST_CASE("files: a program in a file is refused", "[files][errors]") {
  const Folder folder;
  const auto path = folder / "model.pt";
  torch::jit::Module program("Program");
  program.register_parameter("weight", torch::ones({2, 2}), false);
  program.register_attribute("count", c10::IntType::get(), int64_t{0});
  program.save(path);
  torch::nn::Linear model(torch::nn::LinearOptions(2, 2).bias(false));
  dt::load(model, path);
  CHECK(model->weight.equal(torch::ones({2, 2})));
  program.define("def __getstate__(self) -> int:\n  return 1\ndef __setstate__(self, state: int):\n  self.count = state\n");
  program.save(path);
  CHECK_THROWS_WITH(dt::load(model, path), says("has a program that would run when it is read"));
}
