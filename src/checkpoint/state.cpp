// The simple parts of a state: modules, tensors, values, objects with archives, random streams, and parts of each rank.
#include "src/checkpoint/archive_tree.hpp"
#include "src/checkpoint/index_text.hpp"
#include "src/parallel/tensors_of.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/state.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/rng/device_generator.hpp>
#include <dtensor/rng/random.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

namespace dtensor {

namespace checkpoints {

namespace {

class ModulePart final : public Part {
 public:
  explicit ModulePart(torch::nn::Module& module) : module_(module) {}

  void add_names(const std::string& name, TensorNames& names) const override {
    for (const auto& [inner, tensor] : detail::tensors_of(module_)) names.try_emplace(tensor.unsafeGetTensorImpl(), name + "." + inner);
  }

  void save(const std::string& name, const TensorNames&, Contents& contents) override { add(name, contents); }
  void prepare(const std::string& name, const TensorNames&, const Index&, Contents& contents) override { add(name, contents); }
  void finish(const Index&) override {}

 private:
  // named_parameters() has each tensor once, under its first name.
  void add(const std::string& name, Contents& contents) const {
    TensorNames first;
    const auto each = [&](const std::string& inner, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const auto full = name + "." + inner;
      const auto [entry, is_new] = first.try_emplace(tensor.unsafeGetTensorImpl(), full);
      if (!is_new) contents.same_as[full] = entry->second;
      else contents.tensors[full] = tensor;
    };
    each_of(module_, "", each);
  }

  template <class Each>
  static void each_of(const torch::nn::Module& module, const std::string& prefix, const Each& each) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) each(prefix + item.key(), item.value());
    for (const auto& item : module.named_buffers(/*recurse=*/false)) each(prefix + item.key(), item.value());
    for (const auto& child : module.named_children()) {
      if (child.value()) each_of(*child.value(), prefix + child.key() + ".", each);
    }
  }

  torch::nn::Module& module_;
};

class NamedPart final : public Part {
 public:
  explicit NamedPart(std::function<NamedTensors()> tensors) : tensors_(std::move(tensors)) {}
  void add_names(const std::string& name, TensorNames& names) const override {
    for (const auto& [inner, tensor] : tensors_()) names.try_emplace(tensor.unsafeGetTensorImpl(), name + "." + inner);
  }
  void save(const std::string& name, const TensorNames&, Contents& contents) override { add(name, contents); }
  void prepare(const std::string& name, const TensorNames&, const Index&, Contents& contents) override { add(name, contents); }
  void finish(const Index&) override {}

 private:
  void add(const std::string& name, Contents& contents) const {
    for (const auto& [inner, tensor] : tensors_()) contents.tensors[name + "." + inner] = tensor;
  }
  const std::function<NamedTensors()> tensors_;
};

class TensorPart final : public Part {
 public:
  explicit TensorPart(at::Tensor& tensor) : tensor_(tensor) {}
  void save(const std::string& name, const TensorNames&, Contents& contents) override { contents.tensors[name] = tensor_; }
  void prepare(const std::string& name, const TensorNames&, const Index& saved, Contents& contents) override {
    loaded_ = tensor_;
    if (const auto* found = saved.find(name); found && !tensor_.defined()) loaded_ = at::empty(found->sizes, found->dtype);
    contents.tensors[name] = loaded_;
  }
  void finish(const Index&) override { tensor_ = std::move(loaded_); }

 private:
  at::Tensor& tensor_;
  at::Tensor loaded_;
};

template <class Held, class Number>
class ValuePart final : public Part {
 public:
  explicit ValuePart(Number& value) : value_(value) {}
  void save(const std::string& name, const TensorNames&, Contents& contents) override { contents.values[name] = static_cast<Held>(value_); }
  void prepare(const std::string& name, const TensorNames&, const Index& saved, Contents& contents) override {
    name_ = name;
    contents.values[name] = static_cast<Held>(value_);
    const auto found = saved.values.find(name);
    if (found != saved.values.end() && !std::holds_alternative<Held>(found->second))
      fail("load", "'{}' was saved as {}, which is {}; expected {}; hint: give it the type that it had, or .rename it", name,
           text_of(found->second), kind_of(found->second), kind_of(Held()));
    if constexpr (std::is_arithmetic_v<Number>) {
      if (found == saved.values.end()) return;
      const auto value = std::get<Held>(found->second);
      bool fits = true;
      if constexpr (std::is_integral_v<Number>) fits = static_cast<Held>(static_cast<Number>(value)) == value;
      else fits = !std::isfinite(value) || std::abs(value) <= std::numeric_limits<Number>::max();
      require(fits, "load", "'{}' was saved as {}, which its variable cannot hold; hint: make it {}", name, text_of(found->second),
              std::is_integral_v<Number> ? "an int64_t" : "a double");
    }
  }
  void finish(const Index& saved) override {
    const auto found = saved.values.find(name_);
    if (found != saved.values.end()) value_ = static_cast<Number>(std::get<Held>(found->second));
  }

 private:
  Number& value_;
  std::string name_;
};

class ArchivePart final : public Part {
 public:
  using Save = std::function<void(torch::serialize::OutputArchive&)>;
  using Load = std::function<void(torch::serialize::InputArchive&)>;
  ArchivePart(Save save, Load load) : save_(std::move(save)), load_(std::move(load)) {}

  void save(const std::string& name, const TensorNames&, Contents& contents) override {
    const auto own = contents_of(save_);
    for (const auto& [inner, tensor] : own.tensors) contents.tensors[name + "." + inner] = tensor;
    for (const auto& [inner, value] : own.values) contents.values[name + "." + inner] = value;
  }

  void prepare(const std::string& name, const TensorNames&, const Index& saved, Contents& contents) override {
    name_ = name;
    const auto own = contents_of(save_);
    for (const auto& [inner, value] : own.values) contents.values[name + "." + inner] = value;
    for (const auto& [inner, tensor] : own.tensors) {
      const auto* found = saved.find(name + "." + inner);  // its sizes may be others by now
      contents.tensors[name + "." + inner] = read_[inner] = found ? at::empty(found->sizes, found->dtype) : at::empty_like(tensor);
    }
  }

  void finish(const Index& saved) override {
    Leaves leaves;
    leaves.value = [&](const std::string& inner) {
      const auto found = saved.values.find(name_ + "." + inner);
      return found == saved.values.end() ? nullptr : &found->second;
    };
    leaves.tensor = [&](const std::string& inner) -> const at::Tensor* {
      const auto found = read_.find(inner);
      return found == read_.end() || !saved.find(name_ + "." + inner) ? nullptr : &found->second;
    };
    load_from(leaves, save_, load_);
    read_.clear();
  }

 private:
  const Save save_;
  const Load load_;
  std::string name_;
  std::map<std::string, at::Tensor> read_;
};

std::string at_rank(const std::string& name, int rank) { return fmt::format("{}@{}", name, rank); }

// What `part` has, under names that end with this rank's number.
class RankPart final : public Part {
 public:
  explicit RankPart(std::shared_ptr<Part> part) : part_(std::move(part)) {}
  void add_names(const std::string& name, TensorNames& names) const override {
    TensorNames own;
    part_->add_names(at_rank(name, World::current().rank()), own);
    names.optimizers.merge(own.optimizers);
  }
  void save(const std::string& name, const TensorNames& names, Contents& contents) override {
    part_->save(at_rank(name, World::current().rank()), names, contents);
  }
  void prepare(const std::string& name, const TensorNames& names, const Index& saved, Contents& contents) override {
    const auto own = at_rank(name, World::current().rank());
    is_there_ = has(saved, own);
    if (is_there_) part_->prepare(own, names, saved, contents);
  }
  void finish(const Index& saved) override {
    if (is_there_) part_->finish(saved);
  }

 private:
  static bool has(const Index& saved, const std::string& name) {
    const auto begins = [&](const auto& named) {
      const auto found = named.lower_bound(name);
      return found != named.end() && (found->first == name || found->first.rfind(name + ".", 0) == 0);
    };
    return begins(saved.tensors) || begins(saved.values);
  }

  const std::shared_ptr<Part> part_;
  bool is_there_ = false;
};

// The state of a generator. `own`: that of rank_local_random().
class StreamPart final : public Part {
 public:
  StreamPart(c10::DeviceType device, bool own) : device_(device), own_(own) {}
  void save(const std::string& name, const TensorNames&, Contents& contents) override {
    with_generator([&](at::Generator& generator) { contents.tensors[name] = generator.get_state(); });
  }
  void prepare(const std::string& name, const TensorNames&, const Index& saved, Contents& contents) override {
    with_generator([&](at::Generator& generator) { read_ = generator.get_state(); });
    contents.tensors[name] = read_;
    name_ = name;
    const auto* found = saved.find(name);
    require(!found || found->sizes == read_.sizes().vec(), "load",
            "'{}' is the state of a generator of another kind: it has {} bytes, and this rank's {}; hint: world.generator() is to be of "
            "the kind "
            "that it was when it was saved (dt::Generator or libtorch's)",
            name, found ? found->numel() : 0, read_.numel());
  }
  void finish(const Index& saved) override {
    if (!saved.find(name_)) return;
    with_generator([&](at::Generator& generator) { generator.set_state(read_); });
  }

 private:
  template <class Fn>
  void with_generator(const Fn& fn) const {
    std::optional<RankLocalRandom> region;
    if (own_ && !RankLocalRandom::active()) region.emplace();
    auto generator = rng::generator_for(World::current(), c10::Device(device_, device_ == c10::kCPU ? -1 : 0));
    fn(generator);
  }

  const c10::DeviceType device_;
  const bool own_;
  std::string name_;
  at::Tensor read_;
};

class Together final : public Part {
 public:
  explicit Together(std::vector<std::pair<std::string, std::shared_ptr<Part>>> parts) : parts_(std::move(parts)) {}
  void save(const std::string& name, const TensorNames& names, Contents& contents) override {
    for (const auto& [inner, part] : parts_) part->save(name + "." + inner, names, contents);
  }
  void prepare(const std::string& name, const TensorNames& names, const Index& saved, Contents& contents) override {
    for (const auto& [inner, part] : parts_) part->prepare(name + "." + inner, names, saved, contents);
  }
  void finish(const Index& saved) override {
    for (const auto& [inner, part] : parts_) part->finish(saved);
  }

 private:
  const std::vector<std::pair<std::string, std::shared_ptr<Part>>> parts_;
};

}  // namespace

void Part::add_names(const std::string&, TensorNames&) const {}

std::shared_ptr<Part> part_of(torch::nn::Module& module) { return std::make_shared<ModulePart>(module); }
std::shared_ptr<Part> part_of_names(std::function<NamedTensors()> tensors) { return std::make_shared<NamedPart>(std::move(tensors)); }
std::shared_ptr<Part> part_of(at::Tensor& tensor) { return std::make_shared<TensorPart>(tensor); }
std::shared_ptr<Part> part_of(bool& value) { return std::make_shared<ValuePart<bool, bool>>(value); }
std::shared_ptr<Part> part_of(int& value) { return std::make_shared<ValuePart<int64_t, int>>(value); }
std::shared_ptr<Part> part_of(int64_t& value) { return std::make_shared<ValuePart<int64_t, int64_t>>(value); }
std::shared_ptr<Part> part_of(float& value) { return std::make_shared<ValuePart<double, float>>(value); }
std::shared_ptr<Part> part_of(double& value) { return std::make_shared<ValuePart<double, double>>(value); }
std::shared_ptr<Part> part_of(std::string& value) { return std::make_shared<ValuePart<std::string, std::string>>(value); }
std::shared_ptr<Part> part_of(ArchivePart::Save save, ArchivePart::Load load) {
  return std::make_shared<ArchivePart>(std::move(save), std::move(load));
}

}  // namespace checkpoints

State::State(std::initializer_list<Entry> entries) {
  for (const auto& entry : entries) add(entry);
}

State& State::add(Entry entry) {
  require(!entry.name.empty() && entry.name.find('/') == std::string::npos, "State",
          "'{}' is no name of a part; expected a text without '/'", entry.name);
  const bool known = std::ranges::any_of(entries_, [&](const auto& other) { return other.name == entry.name; });
  require(!known, "State", "two parts are called '{}'", entry.name);
  entries_.push_back(std::move(entry));
  return *this;
}

std::shared_ptr<checkpoints::Part> random_streams() {
  using namespace checkpoints;
  std::vector<std::pair<std::string, std::shared_ptr<Part>>> parts{
      {"cpu", std::make_shared<StreamPart>(c10::kCPU, false)}, {"rank_local", of_each_rank(std::make_shared<StreamPart>(c10::kCPU, true))}};
  if (at::globalContext().hasCUDA()) parts.emplace_back("cuda", std::make_shared<StreamPart>(c10::kCUDA, false));
  return std::make_shared<Together>(std::move(parts));
}

std::shared_ptr<checkpoints::Part> of_each_rank(std::shared_ptr<checkpoints::Part> part) {
  return std::make_shared<checkpoints::RankPart>(std::move(part));
}

}  // namespace dtensor
