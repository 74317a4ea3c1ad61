// Optimizers in a state. "optimizer.groups.0.lr" are a group's options; "optimizer.state.model.layer.weight.exp_avg" is what is remembered
// of a parameter, and ".group" there says which group it is in.
#include "src/checkpoint/archive_tree.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/checkpoint/optimizer_fields.hpp"
#include "src/checkpoint/optimizer_names.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/state.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <type_traits>

namespace dtensor::checkpoints {

namespace {

template <class T>
constexpr bool is_list = !std::is_same_v<std::decay_t<T>, at::Tensor> && requires(T & list) {
  list.push_back(at::Tensor());
};

// A tensor like one that was saved: laid out as the parameter where it has the parameter's sizes, else the same on all ranks.
at::Tensor like_saved(const SavedTensor& saved, const at::Tensor& parameter) {
  const auto options = at::TensorOptions(saved.dtype).device(parameter.device());
  if (!is_dtensor(parameter)) return at::zeros(saved.sizes, options);
  const DTensor known(parameter);
  if (parameter.sizes() == c10::IntArrayRef(saved.sizes)) return zeros(saved.sizes, known.mesh(), known.placements(), options);
  return zeros(saved.sizes, known.mesh(), Placements(static_cast<size_t>(known.mesh().ndim()), replicate()), options);
}

class OptimizerPart final : public Part {
 public:
  explicit OptimizerPart(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  void add_names(const std::string& name, TensorNames& names) const override { names.optimizers.emplace(&optimizer_, name); }

  void save(const std::string& name, const TensorNames& names, Contents& contents) override {
    at::NoGradGuard no_grad;
    int64_t place = 0;
    for_each_parameter(name, names, [&](size_t group, const at::Tensor& parameter, const std::string& prefix) {
      contents.values[prefix + "group"] = static_cast<int64_t>(group);
      if (is_flat()) contents.values[prefix + kPlace] = place++;
      const auto found = optim::detail::find(optimizer_.state(), parameter);
      if (found == optimizer_.state().end()) return;
      const bool known = with_type(*found->second, [&](auto& state) {
        fields_of(state, [&](const std::string& field, auto& value) { add(prefix + field, field, parameter, value, contents); });
      });
      if (!known) refuse_type();
    });
    for (size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
      for (const auto& [key, value] : options_of(g).values) contents.values[name_of_group(name, g) + key] = value;
    }
  }

  void prepare(const std::string& name, const TensorNames& names, const Index& saved, Contents& contents) override {
    at::NoGradGuard no_grad;
    name_ = name;
    read_.clear();
    groups_.assign(optimizer_.param_groups().size(), {});
    int64_t place = 0;
    for_each_parameter(name, names, [&](size_t group, const at::Tensor& parameter, const std::string& prefix) {
      if (is_flat()) check_place(prefix, place++, saved, contents);
      const auto found = saved.values.find(prefix + "group");
      contents.values[prefix + "group"] = static_cast<int64_t>(group);
      if (found == saved.values.end()) return;
      const auto* number = std::get_if<int64_t>(&found->second);
      require(number, "load", "'{}group' was saved as {}; expected the number of a group", prefix, text_of(found->second));
      if (groups_[group].empty()) groups_[group] = name_of_group(name, static_cast<size_t>(*number));
      prepare_state(parameter, prefix, saved, contents);
    });
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].empty()) continue;
      for (const auto& [key, value] : options_of(g).values) contents.values[groups_[g] + key] = value;
    }
  }

  void finish(const Index& saved) override {
    at::NoGradGuard no_grad;
    auto& states = optimizer_.state();
    for (auto& [parameter, state, from_whole] : read_) {
      if (state && !from_whole.empty()) {
        auto& own = static_cast<optim::ParamState&>(*state);
        for (const auto& field : from_whole) own.tensors[field] = ours().part(field, parameter, own.tensors[field]);
      }
      const auto key = optim::detail::key_of<optim::detail::States::key_type>(parameter);
      if (state) states[key] = std::move(state);
      else states.erase(key);
    }
    read_.clear();
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].empty()) continue;
      Leaves leaves;
      leaves.value = [&](const std::string& key) {
        const auto found = saved.values.find(groups_[g] + key);
        return found == saved.values.end() ? nullptr : &found->second;
      };
      leaves.tensor = [](const std::string&) { return nullptr; };
      auto& options = optimizer_.param_groups()[g].options();
      load_from(
          leaves, [&](auto& archive) { std::as_const(options).serialize(archive); }, [&](auto& archive) { options.serialize(archive); });
    }
  }

 private:
  struct Read {
    at::Tensor parameter;
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    std::vector<std::string> from_whole;  // tensors of our optimizers that are not laid out as any tensor is
  };

  // Whether it keeps vectors over all parameters, one after the other.
  bool is_flat() const { return dynamic_cast<const torch::optim::LBFGS*>(&optimizer_); }
  static constexpr const char* kPlace = "place";  // of a parameter, there

  static void check_place(const std::string& prefix, int64_t place, const Index& saved, Contents& contents) {
    const auto found = saved.values.find(prefix + kPlace);
    if (found == saved.values.end()) return;
    contents.values[prefix + kPlace] = place;
    if (found->second == Value(place)) return;
    contents.problems.push_back(fmt::format("'{}{}' was saved as {}, and is {}: LBFGS keeps vectors over all parameters in their order; "
                                            "hint: give it the parameters in the order that was saved",
                                            prefix, kPlace, text_of(found->second), place));
  }

  static std::string name_of_group(const std::string& name, size_t group) { return fmt::format("{}.groups.{}.", name, group); }

  template <class Fn>
  void for_each_parameter(const std::string& name, const TensorNames& names, const Fn& fn) const {
    for (size_t g = 0; g < optimizer_.param_groups().size(); ++g) {
      const auto& parameters = optimizer_.param_groups()[g].params();
      for (size_t p = 0; p < parameters.size(); ++p) fn(g, parameters[p], state_prefix(name, names, parameters[p], g, p));
    }
  }

  Contents options_of(size_t group) const {
    return contents_of([&](auto& archive) { std::as_const(optimizer_.param_groups()[group].options()).serialize(archive); });
  }

  const optim::Optimizer& ours() const { return static_cast<const optim::Optimizer&>(optimizer_); }

  [[noreturn]] void refuse_type() const {
    const auto& optimizer = optimizer_;
    fail("save",
         "what a {} remembers is not known; expected an optimizer of libtorch or of dtensor/optim; hint: derive it from "
         "dtensor::optim::Optimizer",
         c10::demangle(typeid(optimizer).name()));
  }

  template <class Value>
  void add(const std::string& full, const std::string& field, const at::Tensor& parameter, Value& value, Contents& contents) const {
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      if (!value.defined()) return;
      const bool is_special = is_dtensor(parameter) && !is_dtensor(value) && dynamic_cast<const optim::Optimizer*>(&optimizer_);
      contents.tensors[full] = is_special ? ours().whole(field, parameter, value) : value;
    } else if constexpr (is_list<Value>) {
      for (size_t i = 0; i < value.size(); ++i) contents.tensors[fmt::format("{}.{:04}", full, i)] = value[i];
    } else {
      contents.values[full] = value;
    }
  }

  // Makes a state like the one that was saved; none if there was none.
  void prepare_state(const at::Tensor& parameter, const std::string& prefix, const Index& saved, Contents& contents) {
    Read read{parameter, new_state_of(optimizer_), {}};
    if (!read.state) refuse_type();
    bool any = false;
    if (auto* own = dynamic_cast<optim::ParamState*>(read.state.get())) {
      for (auto at = saved.tensors.lower_bound(prefix); at != saved.tensors.end() && at->first.rfind(prefix, 0) == 0; ++at) {
        const auto field = at->first.substr(prefix.size());
        const bool is_special = is_dtensor(parameter) && parameter.sizes() != c10::IntArrayRef(at->second.sizes);
        if (is_special) read.from_whole.push_back(field);
        own->tensors[field] = is_special ? at::zeros(at->second.sizes, at->second.dtype) : at::Tensor();
        if (is_special) contents.tensors[at->first] = own->tensors[field];
      }
    }
    with_type(*read.state, [&](auto& state) {
      fields_of(state, [&](const std::string& field, auto& value) { any |= take(prefix + field, parameter, value, saved, contents); });
    });
    if (any) check_is_whole(*read.state, prefix, contents);
    else read.state.reset();
    read_.push_back(std::move(read));
  }

  // A step cannot be made with a part of what the optimizer remembers.
  static void check_is_whole(torch::optim::OptimizerParamState& state, const std::string& prefix, Contents& contents) {
    with_type(state, [&](auto& typed) {
      fields_of(typed, [&](const std::string& field, const auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
          if (!value.defined() && !is_optional(field))
            contents.problems.push_back(fmt::format("it has no '{}{}', though other state of that parameter", prefix, field));
        }
      });
    });
  }

  // Whether it was saved.
  template <class Value>
  static bool take(const std::string& full, const at::Tensor& parameter, Value& value, const Index& saved, Contents& contents) {
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      const auto* found = saved.find(full);
      if (!found) return false;
      if (!value.defined()) value = like_saved(*found, parameter);
      contents.tensors[full] = value;
      return true;
    } else if constexpr (is_list<Value>) {
      for (size_t i = 0;; ++i) {
        const auto name = fmt::format("{}.{:04}", full, i);
        const auto* found = saved.find(name);
        if (!found) return i > 0;
        value.push_back(like_saved(*found, parameter));
        contents.tensors[name] = value.back();
      }
    } else {
      const auto found = saved.values.find(full);
      if (found == saved.values.end()) return false;
      contents.values[full] = value;
      if (const auto* held = std::get_if<Value>(&found->second)) value = *held;
      else
        contents.problems.push_back(
            fmt::format("'{}' was saved as {}, which is {}; expected {}", full, text_of(found->second), kind_of(found->second),
                        kind_of(value)));
      return true;
    }
  }

  torch::optim::Optimizer& optimizer_;
  std::string name_;
  std::vector<Read> read_;
  std::vector<std::string> groups_;  // by group of the optimizer: the saved group's name, or nothing
};

}  // namespace

std::shared_ptr<Part> part_of(torch::optim::Optimizer& optimizer) { return std::make_shared<OptimizerPart>(optimizer); }

}  // namespace dtensor::checkpoints
