// Worker groups: the roles of reinforcement learning, each a module on a mesh of its own. Every rank runs the one program; a group's
// methods run where its mesh is, and their results are batches on every rank.
//
//   rl::WorkerGroup critic("critic", pool.mesh("critic"), [&] { return std::make_shared<Critic>(options); });
//   auto values = critic.run({.name = "values", .gives = {"values"}}, batch.select({"ids"}), [&](const rl::Batch& mine) {
//     return rl::Batch{{"values", model->forward(mine.get("ids"))}};
//   });
//   batch.merge(values);
#pragma once

#include <dtensor/observe/scope.hpp>
#include <dtensor/parallel/parallelize.hpp>
#include <dtensor/rl/modes.hpp>
#include <dtensor/rl/offload.hpp>
#include <dtensor/rl/resource_pool.hpp>
#include <dtensor/rl/results.hpp>
#include <dtensor/tensor/on.hpp>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct Method {
  std::string name;
  std::vector<std::string> gives{};  // the names of its results
  Mode mode = dp_compute();
  int64_t step = -1;  // for errors; -1: how often the group has run it
};

// All ranks make the same groups in the same order, and run their methods in one order. Groups may have the same ranks, others, or share
// some.
class WorkerGroup {
 public:
  // A role without a model: rules that score texts, say.
  WorkerGroup(std::string role, DeviceMesh mesh);
  // `make` gives the role's module (a shared_ptr). It is called inside of dt::on(mesh) on all ranks, and the module is absent on those that
  // are not in the mesh. Parameters are laid out by the plan.
  template <class Make>
  WorkerGroup(std::string role, DeviceMesh mesh, Make make, const Plan& plan = {});

  const std::string& role() const { return role_; }
  const DeviceMesh& mesh() const { return mesh_; }
  torch::nn::Module& module() const;  // throws where there is none
  const std::shared_ptr<torch::optim::Optimizer>& optimizer() const { return optimizer_; }
  void set_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer) { optimizer_ = std::move(optimizer); }

  // Runs `f(mine)` inside of dt::on(mesh) where method.mode.dispatch puts the batch, and gives the batch of results that f gives (or f
  // gives void, and there are none). `mine` is the batch in that layout. Every rank calls it. On other ranks it returns at once; there the
  // results are columns that say what they are when they are asked, and wait for the method then.
  //
  // Columns whose rows are with ranks outside of the group move at this call; so select() those that f reads. Others move when f reads
  // them. A result that is a plain tensor is the same on all ranks of the group, unless the mode says otherwise; a DTensor is moved to
  // mode.collect's layout. Sends a few bytes to each other rank, and among the ranks that run it 512 bytes.
  //
  // Throws on all ranks that run it where f throws on one, or gives other columns than method.gives, with the role, the method and the
  // step; other ranks throw it when they read a result. Restores what offload() put away.
  template <class F>
  Batch run(const Method& method, const Batch& batch, F&& f);

  // Puts parameters, buffers, gradients and the optimizer's state into the host's memory, until run() or restore(), and frees the device's.
  // They must not be used until then. On a mesh of the CPU both do nothing.
  void offload();
  void restore() { offloaded_.restore(); }

 private:
  detail::Call begin(const Method& method);
  template <class F>
  static std::string attempt(const detail::Call& call, const Batch& mine, F& f, Batch& results);

  std::string role_;
  DeviceMesh mesh_;
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::map<std::string, int64_t> calls_;
  OffloadedStorages offloaded_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

// The method that this rank is running.
struct Running {
  std::string call;

  struct Mark {
    explicit Mark(std::string name) { World::current().local<Running>().call = std::move(name); }
    ~Mark() { World::current().local<Running>().call.clear(); }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;
  };
};

// Starts to move what comes from outside of the group's ranks, where nobody runs the method. Gives what went wrong.
inline std::string dispatch(const Call& call, const Batch& mine) {
  const auto& ranks = call.input.mesh.ranks();
  const std::set<int> group(ranks.begin(), ranks.end());
  const int own = World::current().rank();
  try {
    for (const auto& name : mine.names()) {
      const auto& column = mine.column(name);
      const auto& readers = column.readers();
      if (readers.count(own) > 0 && !std::ranges::includes(group, readers)) column.read();
    }
  } catch (const std::exception& error) {
    return "its batch did not come: " + reason_of(error);
  }
  return {};
}

// A result in the layout in which it is kept.
inline Column collected(const Call& call, const Column& column) {
  if (!column.is_tensor()) return column.on(call.output);
  const auto& x = column.tensor();
  if (is_dtensor(x)) return tensor_on(x, call.output);
  if (!call.own_results) return distribute_tensor(x, call.output.mesh, call.output.placements);  // ranks may compare it, inside of Spmd
  const NoSpmd plain;
  return from_local(x, call.output.mesh, call.output.placements);
}

inline Batch collected(const Call& call, Batch given) {
  auto names = call.gives;
  std::ranges::sort(names);
  if (given.names() != names) fail(kGroup, "the method gave {}; expected {}, as its .gives says", given.names(), names);
  Batch results;
  for (const auto& name : names) results.set(name, collected(call, given.column(name)));
  results.meta() = std::move(given.meta());
  return results;
}

}  // namespace detail

inline WorkerGroup::WorkerGroup(std::string role, DeviceMesh mesh) : role_(std::move(role)), mesh_(std::move(mesh)) { detail::everyone(); }

template <class Make>
WorkerGroup::WorkerGroup(std::string role, DeviceMesh mesh, Make make, const Plan& plan) : WorkerGroup(std::move(role), std::move(mesh)) {
  module_ = on(mesh_, [&]() -> std::shared_ptr<torch::nn::Module> { return make(); });
  if (!plan.empty()) on(mesh_, [&] { parallelize_module(*module_, mesh_, plan); });
}

inline torch::nn::Module& WorkerGroup::module() const {
  require(module_ != nullptr, detail::kGroup, "'{}' has no module", role_);
  return *module_;
}

inline detail::Call WorkerGroup::begin(const Method& method) {
  const auto& outer = World::current().local<detail::Running>().call;
  require(outer.empty(), detail::kGroup, "{}.{} is run within {}, where only that method's ranks are; hint: run it afterwards", role_,
          method.name, outer);
  const auto calls = calls_[method.name]++;
  const auto input = method.mode.dispatch(whole_rows(mesh_)), output = method.mode.collect(input);
  detail::Call call{role_, method.name, method.step < 0 ? calls : method.step, input, output, method.gives, method.mode.own_results};
  for (const int rank : input.mesh.ranks()) {
    if (!std::ranges::count(mesh_.ranks(), rank))
      call.failed(fmt::format("mode '{}' dispatches to rank {}, which is not in {}", method.mode.name, rank, mesh_.str()));
  }
  if (!(output.mesh == input.mesh)) {
    call.failed(fmt::format("mode '{}' collects on {}; expected the mesh that it dispatches to, {}", method.mode.name, output.mesh.str(),
                            input.mesh.str()));
  }
  return call;
}

// Runs f; gives why it failed.
template <class F>
std::string WorkerGroup::attempt(const detail::Call& call, const Batch& mine, F& f, Batch& results) {
  try {
    const Scope scope(call.name());
    const detail::Running::Mark mark(call.name());
    results = on(call.input.mesh, [&] {
      if constexpr (std::is_void_v<std::invoke_result_t<F&, const Batch&>>) {
        f(mine);
        return detail::collected(call, Batch());
      } else {
        return detail::collected(call, f(mine));
      }
    });
    return {};
  } catch (const std::exception& error) {
    return detail::reason_of(error);
  }
}

template <class F>
Batch WorkerGroup::run(const Method& method, const Batch& batch, F&& f) {
  const auto call = begin(method);
  const auto mine = batch.on(call.input);
  auto reason = detail::dispatch(call, mine);
  if (!call.input.mesh.contains_this_rank()) {
    auto results = detail::results_elsewhere(call);
    if (!reason.empty()) call.failed(reason);
    return results;
  }
  restore();
  Batch results;
  if (reason.empty()) reason = attempt(call, mine, f, results);
  reason = detail::first_failure(call, reason);
  detail::tell(call, [&] { return reason.empty() ? detail::describe(results) : nlohmann::json{{"error", reason}}; });
  if (!reason.empty()) call.failed(reason);
  return results;
}

inline void WorkerGroup::offload() {
  if (mesh_.device_type() == c10::kCPU || !mesh_.contains_this_rank()) return;
  offloaded_.put_away(detail::tensors_of(module_.get(), optimizer_.get()));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
