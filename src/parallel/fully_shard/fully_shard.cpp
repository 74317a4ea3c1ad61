// Chooses the parameters of each unit, and checks that they can form one.
#include <dtensor/base/say.hpp>
#include <dtensor/parallel/fully_shard.hpp>

#include "src/parallel/fully_shard/unit.hpp"

#include <dtensor/mesh/two_meshes.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>

namespace dtensor {

using fsdp::Schedule;
using torch::nn::Module;

struct FullyShard::State {
  std::shared_ptr<Schedule> schedule;
  std::vector<c10::intrusive_ptr<fsdp::Unit>> units;
};

namespace {

constexpr auto kTag = "fully_shard";
constexpr int64_t kLargestBlock = int64_t{1} << 30;
using Parameters = fsdp::Unit::Parameters;

// What will be a unit, or several where dtypes differ.
struct Wish {
  std::string name;
  Parameters parameters;
};

// Hands out every parameter once.
class Taker {
 public:
  // Those of `module` that nobody has taken, with their full names.
  Parameters take(const Module& module, const std::string& prefix, bool recurse = true) {
    Parameters taken;
    for (const auto& item : module.named_parameters(recurse)) {
      const auto& parameter = item.value();
      if (!parameter.defined() || !seen_.insert(parameter.unsafeGetTensorImpl()).second) continue;
      const auto name = prefix.empty() ? item.key() : prefix + "." + item.key();
      require(is_dtensor(parameter), kTag,
              "'{}' is a plain tensor; hint: build the module inside dt::Spmd, so that its parameters are distributed "
              "from the start",
              name);
      if (auto* group = group_of(parameter)) {
        if (auto* unit = dynamic_cast<fsdp::Unit*>(group)) others_.insert(unit);
        continue;
      }
      if (parameter.dim() > 0 && (parameter.is_floating_point() || parameter.is_complex())) taken.emplace_back(name, parameter);
    }
    return taken;
  }

  const std::set<fsdp::Unit*>& others() const { return others_; }

 private:
  std::set<const c10::TensorImpl*> seen_;
  std::set<fsdp::Unit*> others_;
};

bool is_list(const Module& module) { return module.as<torch::nn::ModuleList>() || module.as<torch::nn::Sequential>(); }

// Calls visit(name, module) for every module below; where it returns true, not for what is in that.
void visit_modules(const Module& module, const std::string& prefix, const std::function<bool(const std::string&, const Module&)>& visit) {
  for (const auto& child : module.named_children()) {
    const auto name = prefix.empty() ? child.key() : prefix + "." + child.key();
    if (!visit(name, *child.value())) visit_modules(*child.value(), name, visit);
  }
}

// What is in a module that a pattern matches is of that unit, whether the pattern matches it too or not.
std::vector<Wish> by_pattern(const Module& module, const std::vector<std::string>& patterns, Taker& taker) {
  std::vector<Wish> wishes;
  std::vector<std::string> names;
  std::vector<bool> used(patterns.size());
  std::map<const Module*, std::string> wished;
  const std::function<void(const Module&, const std::string&, int)> visit = [&](const Module& holder, const std::string& prefix,
                                                                                int outer) {
    for (const auto& child : holder.named_children()) {
      const auto name = prefix.empty() ? child.key() : prefix + "." + child.key();
      names.push_back(name);
      int by = -1;
      for (int i = 0; i < static_cast<int>(patterns.size()); ++i) {
        if (!detail::matches(patterns[i], name)) continue;
        require(by < 0 && (outer < 0 || outer == i), kTag, "the module '{}' is listed twice, by '{}' and '{}'", name,
                patterns[outer < 0 ? by : outer], patterns[i]);
        used[by = i] = true;
      }
      if (by >= 0 && outer < 0) {
        const auto [earlier, is_new] = wished.emplace(child.value().get(), name);
        require(is_new, kTag, "one module is listed twice, as '{}' and '{}'", earlier->second, name);
        wishes.push_back({name, taker.take(*child.value(), name)});
      }
      visit(*child.value(), name, by >= 0 ? by : outer);
    }
  };
  visit(module, "", -1);
  for (size_t i = 0; i < patterns.size(); ++i) {
    if (used[i]) continue;
    fail(kTag, "no module is matched by '{}'; hint: names are fully qualified; the closest are {}", patterns[i],
         detail::closest(patterns[i], names));
  }
  return wishes;
}

std::vector<Wish> by_list(const Module& module, Taker& taker) {
  std::vector<Wish> wishes;
  const auto take_elements = [&](const std::string& name, const Module& list) {
    if (!is_list(list)) return false;
    for (const auto& element : list.named_children()) {
      const auto full = name.empty() ? element.key() : name + "." + element.key();
      wishes.push_back({full, taker.take(*element.value(), full)});
    }
    return true;
  };
  if (!take_elements("", module)) visit_modules(module, "", take_elements);
  return wishes;
}

int64_t bytes_of(const Parameters& parameters) {
  int64_t bytes = 0;
  for (const auto& [name, parameter] : parameters) bytes += parameter.numel() * static_cast<int64_t>(parameter.element_size());
  return bytes;
}

int64_t bytes_of(const Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters()) bytes += parameter.numel() * static_cast<int64_t>(parameter.element_size());
  return bytes;
}

// Modules in order, the largest that are no larger than `most`, and neighbours together as long as they are.
std::vector<Wish> by_bytes(const Module& module, int64_t most, Taker& taker) {
  std::vector<Wish> wishes;
  const auto add = [&](const std::string& name, Parameters parameters) {
    if (parameters.empty()) return;
    if (!wishes.empty() && bytes_of(wishes.back().parameters) + bytes_of(parameters) <= most) {
      wishes.back().name += "+" + name;
      auto& last = wishes.back().parameters;
      ranges::push_back(last, parameters);
    } else {
      wishes.push_back({name, std::move(parameters)});
    }
  };
  const std::function<bool(const std::string&, const Module&)> visit = [&](const std::string& name, const Module& child) {
    const bool small = bytes_of(child) <= most || child.children().empty();
    add(name, taker.take(child, name, /*recurse=*/small));
    return small;
  };
  add("parameters", taker.take(module, "", /*recurse=*/false));
  visit_modules(module, "", visit);
  return wishes;
}

// Where the mesh dimensions of `sub` are on the parameters' mesh: the one that replicates (or -1), and the one that cuts.
struct Dims {
  int64_t replicates = -1, cuts = 0;
};

Dims dims_on(const DeviceMesh& mesh, const DeviceMesh& sub, const std::string& name) {
  require(sub.ndim() == 1 || sub.ndim() == 2, kTag,
          "expected a mesh of one dimension, or of two, of which the first replicates; got {}; hint: "
          "mesh[\"dp\"], or mesh[{{\"replicate\", \"shard\"}}]",
          sub.str());
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < sub.ndim(); ++i) {
    dims.push_back(mesh.dim(sub.names()[i]));
    require(mesh.size(dims.back()) == sub.size(i), kTag, "'{}' lies on {}, of which {} is no part", name, mesh.str(), sub.str());
  }
  return {sub.ndim() == 2 ? dims[0] : -1, dims.back()};
}

void check(const std::vector<Wish>& wishes, const DeviceMesh& sub) {
  const at::Tensor* first = nullptr;
  std::string first_name;
  for (const auto& wish : wishes) {
    for (const auto& [name, parameter] : wish.parameters) {
      if (!first) first = &parameter, first_name = name;
      const auto& layout = DTensor(parameter).layout();
      const auto& mesh = layout.mesh();
      require(mesh == DTensor(*first).mesh(), kTag, "parameters lie on two meshes; got '{}' on {} and '{}' on {}; {}", first_name,
              DTensor(*first).mesh().str(), name, mesh.str(), why_two(DTensor(*first).mesh(), mesh));
      const auto dims = dims_on(mesh, sub, name);
      for (const auto m : {dims.cuts, dims.replicates}) {
        require(m < 0 || layout.placements()[m].is_replicate(), kTag,
                "'{}' is not whole along \"{}\"; got {}; hint: shard over the mesh dimensions along which it is, as in fully_shard(module, "
                "mesh[\"dp\"]), or leave this one out of its plan",
                name, mesh.names()[m], layout.str());
      }
      for (const auto& p : layout.placements()) {
        require(!p.is_partial() && !p.is_flat(), kTag, "'{}' is {}; expected parameters that are whole or cut along other mesh dimensions",
                name, layout.str());
      }
    }
  }
  require(first, kTag, "there is nothing to shard: every parameter is in a unit already, or is a single number");
}

std::shared_ptr<FullyShard::State> shard_units(std::vector<Wish> wishes, const Taker& taker, const DeviceMesh& sub,
                                               const FullyShardOptions& options) {
  std::erase_if(wishes, [](const Wish& wish) { return wish.parameters.empty(); });
  require(options.max_whole_units >= 1 && options.unit_bytes >= 0, kTag,
          "got max_whole_units {}, unit_bytes {}; expected at least 1, and 0 or more", options.max_whole_units, options.unit_bytes);
  require(options.block >= 1 && options.block <= kLargestBlock, kTag, "got a block of {} elements; expected 1 to {}", options.block,
          kLargestBlock);
  require(std::isfinite(options.gradient_divide_factor) && options.gradient_divide_factor > 0, kTag,
          "got gradient_divide_factor {}; expected a number above 0", options.gradient_divide_factor);
  for (const auto dtype : {options.param_dtype, options.reduce_dtype}) {
    require(!dtype || at::isFloatingType(*dtype), kTag, "got {} to gather or reduce in; expected a dtype of floating-point numbers",
            dtype ? c10::toString(*dtype) : "");
  }
  check(wishes, sub);
  auto schedule = std::make_shared<Schedule>(options.max_whole_units);
  for (auto* unit : taker.others()) unit->set_schedule(schedule);
  std::vector<c10::intrusive_ptr<fsdp::Unit>> units;
  for (auto& wish : wishes) {
    std::map<c10::ScalarType, Parameters> by_dtype;
    for (auto& entry : wish.parameters) by_dtype[entry.second.scalar_type()].push_back(entry);
    if (by_dtype.size() > 1 && sub.world().rank() == 0) {
      detail::say("dtensor: fully_shard: the unit '{}' has parameters of {} dtypes, and becomes as many units\n", wish.name,
                  by_dtype.size());
    }
    const auto cut = dims_on(DTensor(wish.parameters[0].second).mesh(), sub, wish.name).cuts;
    for (const auto& [dtype, parameters] : by_dtype) {
      const auto name = by_dtype.size() == 1 ? wish.name : fmt::format("{} ({})", wish.name, c10::toString(dtype));
      for (const auto& [full, parameter] : parameters) {
        const auto dot = full.rfind('.');
        if (module_name(parameter).empty() && dot != std::string::npos) name_module(parameter, full.substr(0, dot));
      }
      units.push_back(fsdp::Unit::make(name, parameters, cut, options, schedule));
      const auto padding = units.back()->describe().padding;
      if (options.block > 1 && padding > 0.1 && sub.world().rank() == 0) {
        detail::say("dtensor: fully_shard: of the unit '{}' {:.0f} % is padding, since its parameters are cut in blocks of {} elements\n",
                    name, 100 * padding, options.block);
      }
    }
  }
  return std::make_shared<FullyShard::State>(FullyShard::State{std::move(schedule), std::move(units)});
}

// In the order of the parameters, which is the same on every rank.
std::vector<fsdp::Unit*> units_of(const std::vector<at::Tensor>& parameters) {
  std::vector<fsdp::Unit*> units;
  for (const auto& parameter : parameters) {
    auto* unit = is_dtensor(parameter) ? dynamic_cast<fsdp::Unit*>(group_of(parameter)) : nullptr;
    if (unit && std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }
  return units;
}

}  // namespace

FullyShard fully_shard(Module& module, const DeviceMesh& mesh, const FullyShardOptions& options) {
  require(options.units.empty() || options.unit_bytes == 0, kTag, "got units and unit_bytes; expected one of them");
  Taker taker;
  auto wishes = !options.units.empty()   ? by_pattern(module, options.units, taker)
                : options.unit_bytes > 0 ? by_bytes(module, options.unit_bytes, taker)
                                         : by_list(module, taker);
  wishes.push_back({"(rest)", taker.take(module, "")});
  return FullyShard(shard_units(std::move(wishes), taker, mesh, options));
}

FullyShard fully_shard(const std::vector<Module*>& unit, const DeviceMesh& mesh, const FullyShardOptions& options) {
  require(options.units.empty() && options.unit_bytes == 0, kTag, "a list of modules is one unit; got units or unit_bytes");
  std::set<const Module*> seen;
  Taker taker;
  Wish wish{"(list)", {}};
  for (const auto* module : unit) {
    require(module && seen.insert(module).second, kTag, "the list has {}", module ? "one module twice" : "a null pointer");
    for (auto& entry : taker.take(*module, "")) wish.parameters.push_back(std::move(entry));
  }
  return FullyShard(shard_units({std::move(wish)}, taker, mesh, options));
}

void unshard(const std::vector<at::Tensor>& parameters) {
  const auto units = units_of(parameters);
  for (auto* unit : units) unit->keep();
  for (auto* unit : units) unit->gather_kept();
}

void reshard(const std::vector<at::Tensor>& parameters) {
  for (auto* unit : units_of(parameters)) unit->let_go();
}

std::vector<FullyShard::Unit> FullyShard::units() const {
  std::vector<Unit> all;
  for (const auto& unit : state_->units) all.push_back(unit->describe());
  return all;
}

int64_t FullyShard::whole_bytes() const { return state_->schedule->whole_bytes->now; }
int64_t FullyShard::peak_whole_bytes() const { return state_->schedule->whole_bytes->peak; }
int64_t FullyShard::gathers() const { return state_->schedule->gathers; }
int64_t FullyShard::reductions() const { return state_->schedule->reductions; }

}  // namespace dtensor
