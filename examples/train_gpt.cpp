// Trains a byte-level GPT on real text over a mesh of ranks, and shows that the losses are those of one device.
//
//   train_gpt --ranks 4 --mesh dp=2,tp=2 --compare
//   dtensor-run -n 4 train_gpt --mesh dp=4 --log run.jsonl
#include "gpt.hpp"
#include "log.hpp"
#include "loss_plot.hpp"
#include "text_data.hpp"
#include "train_options.hpp"

#include <dtensor/dtensor.hpp>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <numbers>
#include <optional>

namespace dt = dtensor;

// Tensor parallelism as in Megatron: the first linear of a pair is cut along its outputs (heads, hidden units), the
// second along its inputs. All other parameters stay replicated.
static dt::Plan parameter_plan(const dt::DeviceMesh& mesh) {
  const auto& names = mesh.names();
  if (std::find(names.begin(), names.end(), "tp") == names.end()) return {};
  return dt::tensor_parallel({{"*.q|*.k|*.v|*.up", dt::ColwiseParallel()}, {"*.o|*.down", dt::RowwiseParallel()}});
}

// A batch [batch, seq] is cut into sequences over dp and along them over sp.
static dt::Placements batch_placements(const dt::DeviceMesh& mesh) {
  dt::Placements placements;
  for (const auto& name : mesh.names()) placements.push_back(name == "dp" ? dt::shard(0) : name == "sp" ? dt::shard(1) : dt::replicate());
  return placements;
}

// Linear warm-up over the first tenth, then a cosine down to a tenth of the largest rate.
static double learning_rate(const TrainOptions& o, int64_t step) {
  const double warmup = std::max<int64_t>(1, o.steps / 10), s = static_cast<double>(step);
  if (s < warmup) return o.lr * (s + 1) / warmup;
  const double progress = (s - warmup) / std::max(1.0, static_cast<double>(o.steps) - warmup);
  return o.lr * (0.55 + 0.45 * std::cos(std::numbers::pi * progress));
}

// Elements of the parameters: all, and those that this rank holds.
static std::pair<int64_t, int64_t> count_parameters(const torch::nn::Module& model) {
  int64_t all = 0, here = 0;
  for (const auto& p : model.parameters()) {
    all += p.numel();
    here += dt::is_dtensor(p) ? dt::DTensor(p).to_local().numel() : p.numel();
  }
  return {all, here};
}

static std::vector<torch::Tensor> whole_parameters(const torch::nn::Module& model) {
  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> whole;
  for (const auto& p : model.parameters()) whole.push_back(dt::full_tensor(p).clone());
  return whole;
}

// Trains from the seed and returns the losses. Without a mesh this is plain libtorch on one device; a mesh adds the
// lines that begin with "if (mesh)", and nothing else.
static Curve train(const TrainOptions& o, const TextData& text, const std::optional<dt::DeviceMesh>& mesh, const std::string& name,
                   StepLog* log) {
  Curve curve{name, {}};
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);

  torch::manual_seed(o.seed);
  std::optional<dt::DeferredInit> deferred;
  if (mesh) deferred.emplace(*mesh);
  Gpt model(GptOptions{256, o.layers, o.dim, o.heads, o.seq, o.dropout});
  model->to(o.dtype == "float64" ? torch::kFloat64 : torch::kFloat32);
  if (mesh) deferred.reset();
  if (mesh) dt::parallelize_module(*model, *mesh, parameter_plan(*mesh));
  if (mesh) dt::materialize(*model);
  if (o.compare) curve.initial = whole_parameters(*model);

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(o.lr).betas({0.9, 0.95}));
  const auto [parameters, parameters_here] = count_parameters(*model);
  if (log) log->begin(name, o.steps);
  dt::CommDebugMode traffic;
  for (int64_t step = 0; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    auto [input, target] = text.batch(o.seed, static_cast<uint64_t>(step), o.batch, o.seq);
    if (mesh) input = dt::distribute_tensor(input, *mesh, batch_placements(*mesh));
    if (mesh) target = dt::distribute_tensor(target, *mesh, batch_placements(*mesh));

    auto loss = gpt_loss(model->forward(input), target);
    optimizer.zero_grad();
    loss.backward();
    const double limit = o.clip > 0 ? o.clip : std::numeric_limits<double>::infinity();
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), limit);
    for (auto& group : optimizer.param_groups()) static_cast<torch::optim::AdamWOptions&>(group.options()).lr(learning_rate(o, step));
    optimizer.step();

    curve.loss.push_back(loss.item<double>());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double tokens_per_s = static_cast<double>(o.batch * o.seq) / took.count();
    if (log) log->add({step, curve.loss.back(), norm, learning_rate(o, step), took.count() * 1e3, tokens_per_s});
  }
  if (log) log->end(parameters, parameters_here, traffic.count(), traffic.bytes());
  return curve;
}

// Compares the runs with one device's, the last of `curves`. Returns the exit status.
static int report_parity(const TrainOptions& o, const std::vector<Curve>& curves) {
  double largest = 0;
  bool same_start = true;
  std::string names;
  const auto equal = [](const torch::Tensor& a, const torch::Tensor& b) { return a.equal(b); };
  for (size_t i = 0; i + 1 < curves.size(); ++i) {
    same_start &=
        std::equal(curves[i].initial.begin(), curves[i].initial.end(), curves.back().initial.begin(), curves.back().initial.end(), equal);
    largest = std::max(largest, relative_difference(curves[i], curves.back()));
    names += (i ? " | " : "") + curves[i].name;
  }
  fmt::print("initial parameters: {} bit for bit those of one device\n", same_start ? "are" : "are NOT");
  fmt::print("parity: max relative loss difference {:.2e} over {} steps (meshes: {})\n", largest, o.steps, names);
  return same_start && largest <= o.tolerance ? 0 : 1;
}

int main(int argc, char** argv) try {
  CLI::App app("Trains a byte-level GPT on real text over a mesh of ranks.");
  TrainOptions o;
  try {
    o = parse_options(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }

  std::vector<Curve> curves;  // rank 0's
  std::optional<StepLog> log;
  const int status = dt::launch(argc, argv, [&](dt::World& world) {
    const TextData text(o.data);
    const bool first = world.rank() == 0;
    if (first) log.emplace(o.log);
    auto meshes = o.meshes;
    if (meshes.empty()) meshes.push_back(parse_mesh(fmt::format("dp={}", world.size()), kMeshNames));
    for (const auto& option : meshes) {
      const auto mesh = dt::init_device_mesh(torch::kCPU, option.sizes, option.names);
      auto curve = train(o, text, mesh, option.text, first ? &*log : nullptr);
      if (first) curves.push_back(std::move(curve));
    }
  });
  if (status != 0 || curves.empty()) return status;

  // One device, last: the other ranks have nothing left to wait for.
  if (o.compare) curves.push_back(train(o, TextData(o.data), std::nullopt, "one device", &*log));
  if (!o.svg.empty()) write_loss_plot(o.svg, curves, o.compare ? &curves.back() : nullptr);
  return o.compare ? report_parity(o, curves) : 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "train_gpt: {}\n", error.what());
  return 1;
}
