// A Llama-shaped model of 7 billion parameters, constructed without memory: one rank of 64 fills its shard, with the values that
// construction on one device gives, and shows what that takes.
//
//   deferred_init --mesh dp=8,tp=8 --rank 5 --check 100
#include "mesh_option.hpp"

#include <CLI/CLI.hpp>
#include <dtensor/dtensor.hpp>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <torch/nn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>

namespace dt = dtensor;

namespace {

struct Options {
  MeshOption mesh = parse_mesh("dp=8,tp=8", {"dp", "tp"});
  int rank = 0;
  int64_t layers = 32, dim = 4096, hidden = 11008, vocab = 32000, check = 0;
  double limit = 0;
};

torch::nn::Linear linear(int64_t in, int64_t out) { return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)); }

// Its parameters; what is shown here is no forward pass.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t dim, int64_t hidden) {
    for (const char* name : {"q", "k", "v", "o"}) register_module(name, linear(dim, dim));
    for (const char* name : {"gate", "up"}) register_module(name, linear(dim, hidden));
    register_module("down", linear(hidden, dim));
    for (const char* name : {"attention_norm", "feed_forward_norm"}) register_parameter(name, torch::ones({dim}));
  }
};
TORCH_MODULE(Block);

torch::nn::Embedding make_tokens(const Options& o) { return torch::nn::Embedding(o.vocab, o.dim); }

// What the initialization of a published model does after construction: N(0, 0.02).
void initialize(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    if (item.value().dim() == 2) item.value().normal_(0, 0.02);
  }
}

struct LlamaImpl : torch::nn::Module {
  explicit LlamaImpl(const Options& o) {
    initialize(*register_module("tokens", make_tokens(o)));
    for (int64_t i = 0; i < o.layers; ++i) initialize(*register_module("layer" + std::to_string(i), Block(o.dim, o.hidden)));
    register_parameter("norm", torch::ones({o.dim}));
    initialize(*register_module("head", linear(o.dim, o.vocab)));
  }
};
TORCH_MODULE(Llama);

// The same on one device, a piece after the other, so that no more than a piece is in memory.
void for_each_piece(const Options& o, const std::function<void(const std::string& prefix, torch::nn::Module& piece)>& visit) {
  const auto make = [&](const std::string& prefix, auto module) {
    initialize(*module);
    visit(prefix, *module);
  };
  make("tokens.", make_tokens(o));
  for (int64_t i = 0; i < o.layers; ++i) make("layer" + std::to_string(i) + ".", Block(o.dim, o.hidden));
  make("head.", linear(o.dim, o.vocab));
}

// Tensor parallelism as in Megatron, and what is left cut by rows over dp.
dt::Plan plan_for(const dt::DeviceMesh& mesh) {
  const auto has = [&](const char* name) { return std::ranges::count(mesh.names(), name) > 0; };
  const auto over = [&](int64_t tp_dim) {
    std::vector<std::pair<std::string, dt::Placement>> placements;
    if (has("dp")) placements.emplace_back("dp", dt::shard(0));
    if (has("tp")) placements.emplace_back("tp", dt::shard(tp_dim));
    return placements;
  };
  return {{"*.o.*|*.down.*", over(1)}, {"*", over(0)}};
}

// Resident memory in bytes: now (VmRSS), or at most since the start (VmHWM).
int64_t memory(const std::string& which) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(which + ":", 0) == 0) return std::stoll(line.substr(which.size() + 1)) * 1024;
  }
  return 0;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Elements of this rank's shard, `count` of them over all parameters, against those of one
// device. Returns how many differ.
int64_t compare(const Options& o, const std::map<std::string, torch::Tensor>& parameters) {
  int64_t compared = 0, different = 0, held = 0;  // held: parameters still to come
  for (const auto& [name, tensor] : parameters) held += tensor.dim() == 2;
  torch::manual_seed(0);
  for_each_piece(o, [&](const std::string& prefix, torch::nn::Module& piece) {
    for (const auto& item : piece.named_parameters()) {
      if (item.value().dim() != 2) continue;
      const dt::DTensor part(parameters.at(prefix + item.key()).detach());
      const auto local = part.to_local();
      const auto boxes = part.layout().boxes(part.mesh().coordinate());
      const int64_t samples = std::max<int64_t>(1, (o.check - compared + held - 1) / held);
      --held;
      if (boxes.empty() || local.numel() == 0 || compared >= o.check) continue;
      const auto& box = boxes[0];  // the first rows and columns of the part are those of the first box
      for (int64_t k = 0; k < samples; ++k, ++compared) {
        const int64_t row = box[0].length() * k / samples, column = box[1].length() - 1 - box[1].length() * k / samples;
        const auto one = item.value()[box[0].begin + row][box[1].begin + column];
        different += !local[row][column].equal(one.detach());
      }
    }
  });
  fmt::print("{} of {} elements are those of one device\n", compared - different, compared);
  return different;
}

int run(const Options& o) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const auto size = static_cast<int>(c10::multiply_integers(o.mesh.sizes));
  if (o.rank >= size)
    throw std::invalid_argument(fmt::format("--rank {} is not among the {} ranks of --mesh {}", o.rank, size, o.mesh.text));
  dt::World world(dt::comm::make_fake_transport(o.rank, size));  // ranks that are never heard of
  const dt::World::Use use(world);
  const auto mesh = dt::init_device_mesh(torch::kCPU, o.mesh.sizes, o.mesh.names);
  const auto before = memory("VmRSS");

  auto start = Clock::now();
  torch::manual_seed(0);
  auto model = [&] {
    dt::DeferredInit deferred(mesh);
    return Llama(o);
  }();
  dt::parallelize_module(*model, mesh, plan_for(mesh));
  const auto constructed = memory("VmRSS");
  fmt::print("constructed without memory in {:.1f} s: {:.1f} MiB\n", seconds_since(start), mib(constructed - before));

  start = Clock::now();
  dt::materialize(*model);
  const auto took = memory("VmHWM") - before;
  int64_t elements = 0, own = 0;
  std::map<std::string, torch::Tensor> parameters;
  for (const auto& item : model->named_parameters()) {
    parameters.emplace(item.key(), item.value());
    elements += item.value().numel();
    own += dt::DTensor(item.value().detach()).to_local().nbytes();
  }
  fmt::print("rank {} of {} filled its shard of {:.2f} billion parameters in {:.1f} s\n", o.rank, o.mesh.text,
             static_cast<double>(elements) / 1e9, seconds_since(start));
  fmt::print("its shard: {:.1f} MiB; peak memory beyond what the program took before: {:.1f} MiB, {:.1f} more than the shard\n", mib(own),
             mib(took), mib(took - own));
  bool good = o.limit <= 0 || mib(took - own) <= o.limit;
  if (!good) fmt::print("that is more than --limit {:g}\n", o.limit);
  if (o.check > 0) good &= compare(o, parameters) == 0;
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Constructs a Llama-shaped model without memory and fills one rank's shard of it.");
  Options o;
  app.add_option_function<std::string>(
      "--mesh",
      [&](const std::string& text) {
        o.mesh = parse_mesh(text, {"dp", "tp"});
      },
      "the mesh, of ranks that need not exist (default: dp=8,tp=8)");
  app.add_option("--rank", o.rank, "the rank whose part is filled")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--layers", o.layers, "blocks")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--dim", o.dim, "width")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--hidden", o.hidden, "width of the feed-forward layers")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--vocab", o.vocab, "tokens")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--check", o.check, "compare so many elements with construction on one device, which takes its time")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--limit", o.limit, "exit with 1 when more memory is taken than the part and so many MiB")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  return run(o);
} catch (const std::exception& error) {
  std::fprintf(stderr, "deferred_init: %s\n", error.what());
  return 1;
}
