// Schedulers in a state: their step and base rates. The rates go with the groups of the optimizer, which may come in another order than
// they were saved in.
#include "src/checkpoint/archive_tree.hpp"
#include "src/checkpoint/optimizer_names.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/state.hpp>
#include <dtensor/training/lr.hpp>

#include <torch/serialize/archive.h>

#include <algorithm>
#include <optional>

namespace dtensor::checkpoints {

namespace {

constexpr const char* kBaseRates = "base_rates";

class SchedulerPart final : public Part {
 public:
  explicit SchedulerPart(lr::Scheduler& scheduler) : scheduler_(scheduler) {}

  void save(const std::string& name, const TensorNames&, Contents& contents) override { add(name, contents); }

  void prepare(const std::string& name, const TensorNames& names, const Index& saved, Contents& contents) override {
    name_ = name;
    add(name, contents);
    rates_.reset();
    const auto found = saved.values.find(full(kBaseRates));
    if (found == saved.values.end()) return;
    const auto* rates = std::get_if<std::vector<double>>(&found->second);
    require(rates, "load", "'{}' was saved as {}; expected the rates of groups", found->first, text_of(found->second));
    rates_ = rates_of_groups(*rates, names, saved);
    const auto groups = scheduler_.rates().size(), found_rates = std::get<std::vector<double>>(*rates_).size();
    if (found_rates != groups)
      contents.problems.push_back(fmt::format("'{}' has {} rates, expected one for each of {} groups; hint: make the optimizer a part, too",
                                              full(kBaseRates), found_rates, groups));
  }

  void finish(const Index& saved) override {
    if (!rates_ && !saved.values.contains(full("step"))) return;
    Leaves leaves;
    leaves.value = [&](const std::string& inner) -> const Value* {
      if (inner == kBaseRates) return rates_ ? &*rates_ : nullptr;
      const auto found = saved.values.find(full(inner));
      return found == saved.values.end() ? nullptr : &found->second;
    };
    leaves.tensor = [](const std::string&) { return nullptr; };
    load_from(leaves, [&](auto& archive) { scheduler_.save(archive); }, [&](auto& archive) { scheduler_.load(archive); });
  }

 private:
  std::string full(const std::string& inner) const { return name_ + "." + inner; }

  Contents own() const {
    return contents_of([&](auto& archive) { scheduler_.save(archive); });
  }

  void add(const std::string& name, Contents& contents) const {
    for (const auto& [inner, value] : own().values) contents.values[name + "." + inner] = value;
  }

  // A group has the rate of the saved group that its first known parameter was in; a group of new parameters keeps its own. Where the
  // optimizer was not saved, groups go by their numbers.
  Value rates_of_groups(const std::vector<double>& saved_rates, const TensorNames& names, const Index& saved) const {
    const auto& optimizer = scheduler_.optimizer();
    const auto part = names.optimizers.find(&optimizer);
    auto rates = std::get<std::vector<double>>(own().values.at(kBaseRates));
    bool any = false;
    for (size_t g = 0; part != names.optimizers.end() && g < std::min(rates.size(), optimizer.param_groups().size()); ++g) {
      const auto number = saved_group(part->second, optimizer, g, names, saved);
      if (!number) continue;
      require(*number < saved_rates.size(), "load", "'{}' has {} rates; expected one for each group, as for that of number {}",
              full(kBaseRates), saved_rates.size(), *number);
      rates[g] = saved_rates[*number];
      any = true;
    }
    return any ? rates : saved_rates;
  }

  static std::optional<size_t> saved_group(const std::string& part, const torch::optim::Optimizer& optimizer, size_t group,
                                           const TensorNames& names, const Index& saved) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto found = saved.values.find(state_prefix(part, names, parameters[p], group, p) + "group");
      const auto* number = found == saved.values.end() ? nullptr : std::get_if<int64_t>(&found->second);
      if (number && *number >= 0) return static_cast<size_t>(*number);
    }
    return {};
  }

  lr::Scheduler& scheduler_;
  std::string name_;
  std::optional<Value> rates_;  // that are to be loaded
};

}  // namespace

std::shared_ptr<Part> part_of(lr::Scheduler& scheduler) { return std::make_shared<SchedulerPart>(scheduler); }

}  // namespace dtensor::checkpoints
