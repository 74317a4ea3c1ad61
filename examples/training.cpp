#include "training.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dtensor/checkpoint/torch_files.hpp>
#include <dtensor/dtensor.hpp>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <dlfcn.h>

#include <algorithm>
#include <limits>

namespace dt = dtensor;

namespace {

// OpenBLAS may have threads of its own, which libtorch does not control.
void compute_with_one_thread() {
  at::set_num_threads(1);
  if (void* set = dlsym(RTLD_DEFAULT, "openblas_set_num_threads")) reinterpret_cast<void (*)(int)>(set)(1);
}

}  // namespace

dt::lr::Schedule learning_rate(int64_t steps) {
  const auto warmup = std::max<int64_t>(1, steps / 10);
  return dt::lr::sequence({{dt::lr::warmup(warmup), warmup}, {dt::lr::cosine(std::max<int64_t>(1, steps - warmup), 0.1), steps}});
}

int64_t elements(const std::vector<at::Tensor>& parameters) {
  int64_t count = 0;
  for (const auto& p : parameters) count += p.numel();
  return count;
}

int64_t elements_here(const std::vector<at::Tensor>& parameters) {
  int64_t count = 0;
  for (const auto& p : parameters) count += dt::is_dtensor(p) ? dt::DTensor(p).to_local().numel() : p.numel();
  return count;
}

std::vector<at::Tensor> whole_parameters(const torch::nn::Module& model) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  for (const auto& p : model.parameters()) whole.push_back(dt::full_tensor(p).clone());
  return whole;
}

std::vector<at::Tensor> whole_gradients(const torch::nn::Module& model) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> whole;
  for (const auto& p : model.parameters()) whole.push_back(p.grad().defined() ? dt::full_tensor(p.grad()).clone() : at::Tensor());
  return whole;
}

Saved::Saved(dt::State state, const RunOptions& o, bool is_on_mesh) : state_(std::move(state)), o_(o) {
  const dt::ManagerOptions options{.every_steps = o.every, .copy_every = o.copy_every};
  if (is_on_mesh && !o.save.empty()) manager_.emplace(state_, o.save, options);
}

int64_t Saved::resume() {
  if (o_.resume.empty()) return 0;
  const auto wanted = o_.from_step < 0 ? std::nullopt : std::optional(o_.from_step);
  const bool is_own = manager_ && o_.resume == o_.save;
  const auto step = is_own && !wanted ? manager_->resume().value_or(0) : dt::load(state_, o_.resume, wanted);
  dt::require(step < o_.steps, "--resume",
              "the newest checkpoint in '{}' is of step {}; expected fewer than --steps, {}; hint: --from-step chooses an earlier one",
              o_.resume, step, o_.steps);
  return step;
}

bool Saved::step(int64_t steps) {
  if (!manager_) return true;
  const bool goes_on = manager_->step(steps);
  if (goes_on && steps == o_.steps) manager_->save(steps);
  if (!goes_on || steps == o_.steps) manager_->finish();
  return goes_on;
}

// What the gradients of the first step are beside one device's: "bit-equal", or the largest difference of an element beside the largest
// element of all. (Not of its parameter: a bias of keys has a gradient of zero, of which both runs have the rounding only.)
static std::string compare_gradients(const std::vector<Curve>& curves) {
  double largest = 0, most = 0;
  bool equal = true;
  for (const auto& theirs : curves.back().gradients) {
    if (theirs.defined()) most = std::max(most, theirs.abs().max().item<double>());
  }
  for (size_t i = 0; i + 1 < curves.size(); ++i) {
    for (size_t p = 0; p < curves.back().gradients.size(); ++p) {
      const auto &mine = curves[i].gradients.at(p), &theirs = curves.back().gradients[p];
      if (!mine.defined() && !theirs.defined()) continue;
      const bool both = mine.defined() && theirs.defined();
      equal &= both && mine.equal(theirs);
      const double difference = both ? (mine - theirs).abs().max().item<double>() : std::numeric_limits<double>::infinity();
      largest = std::max(largest, difference);
    }
  }
  return equal ? "bit-equal" : fmt::format("largest difference {:.2e} of the largest gradient", most > 0 ? largest / most : largest);
}

// Compares the runs with one device's, the last of `curves`. Returns the exit status.
static int report_parity(const RunOptions& o, const std::vector<Curve>& curves) {
  double largest = 0;
  bool same_start = true;
  std::string names;
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) { return a.equal(b); };
  for (size_t i = 0; i + 1 < curves.size(); ++i) {
    same_start &= std::ranges::equal(curves[i].initial, curves.back().initial, equal);
    largest = std::max(largest, relative_difference(curves[i], curves.back()));
    names += (i ? " | " : "") + curves[i].name;
  }
  fmt::print("initial parameters: {} bit for bit those of one device\n", same_start ? "are" : "are NOT");
  fmt::print("gradients: {}\n", compare_gradients(curves));
  fmt::print("parity: max relative loss difference {:.2e} over {} steps (meshes: {})\n", largest, curves.back().loss.size(), names);
  return same_start && largest <= o.tolerance ? 0 : 1;
}

int launch_on(int argc, char** argv, const std::vector<MeshOption>& meshes, const std::function<void(dt::World&)>& body) {
  std::vector<std::string> arguments(argv, argv + argc);
  const auto gives_ranks = [](const std::string& argument) { return argument.rfind("--ranks", 0) == 0; };
  if (!meshes.empty() && std::ranges::none_of(arguments, gives_ranks))
    arguments.insert(arguments.begin() + 1, fmt::format("--ranks={}", c10::multiply_integers(meshes[0].sizes)));
  std::vector<char*> pointers;
  for (auto& argument : arguments) pointers.push_back(argument.data());
  return dt::launch(static_cast<int>(pointers.size()), pointers.data(), body);
}

// Those of the options, all before anything is trained: one that does not fit the ranks is refused.
static std::vector<std::pair<std::string, dt::DeviceMesh>> make_meshes(const RunOptions& o, const dt::World& world) {
  auto options = o.meshes;
  if (options.empty()) options.push_back(parse_mesh(fmt::format("dp={}", world.size()), kMeshNames));
  std::vector<std::pair<std::string, dt::DeviceMesh>> meshes;
  for (const auto& option : options)
    meshes.emplace_back(option.text, dt::init_device_mesh(c10::Device(o.device).type(), option.sizes, option.names));
  return meshes;
}

int train_on_meshes(int argc, char** argv, const RunOptions& o, const std::function<Train()>& load, const Units& units) {
  std::vector<Curve> curves;  // rank 0's
  std::optional<StepLog> log;
  int ranks = 1;
  const int status = launch_on(argc, argv, o.meshes, [&](dt::World& world) {
    const auto meshes = make_meshes(o, world);
    const auto train = load();
    const bool first = world.rank() == 0;
    if (first) log.emplace(o.log, units.item), ranks = world.size();
    for (const auto& [name, mesh] : meshes) {
      auto curve = train(mesh, name, first ? &*log : nullptr);
      if (first) curves.push_back(std::move(curve));
    }
    // One GPU is a mesh of one, on which parameters are drawn as on the GPUs of a larger one.
    const bool compares = o.compare && o.device != "cpu" && first;
    if (compares) curves.push_back(train(dt::DeviceMesh(c10::Device(o.device).type(), {0}, {1}, {"dp"}), "one device", &*log));
  });
  if (status != 0 || curves.empty()) return status;

  // One device, last: the other ranks have nothing left to wait for. It computes with one thread, as each of several ranks does: two would
  // add up in another order.
  if (o.compare && ranks > 1) compute_with_one_thread();
  if (o.compare && o.device == "cpu") curves.push_back(load()(std::nullopt, "one device", &*log));
  const int parity = o.compare ? report_parity(o, curves) : 0;
  if (!o.svg.empty()) write_loss_plot(o.svg, curves, o.compare ? &curves.back() : nullptr, units.loss);
  return parity;
}
