// What a checkpoint consists of: modules, optimizers, random streams and whatever else a program goes on with, each under a name.
//
//   int64_t epoch = 0;
//   dt::State state{{"model", *model}, {"optimizer", optimizer}, {"scheduler", scheduler}, {"random", dt::random_streams()}, {"epoch",
//   epoch}};
//
//   dt::save(state, "run", step);   // <dtensor/checkpoint/checkpoint.hpp>
//   dt::load(state, "run");         // writes into the model, the optimizer, ..., epoch
#pragma once

#include <dtensor/checkpoint/index.hpp>
#include <dtensor/checkpoint/torch_files.hpp>

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor {

namespace lr {
class Scheduler;
}

namespace checkpoints {

// Named tensors, values, and further names of tensors.
struct Contents {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, Value> values;
  std::map<std::string, std::string> same_as;
  std::vector<std::string> problems;  // why this does not fit what is to be read
};

// The names of parameters and buffers, of all modules of a state, by tensor; and what its optimizers are called.
struct TensorNames : std::unordered_map<const c10::TensorImpl*, std::string> {
  std::map<const torch::optim::Optimizer*, std::string> optimizers;
};

// A part of a state. `name` is what it is called there; the names of its tensors and values are `name`, or begin with `name` and a dot.
class Part {
 public:
  virtual ~Part() = default;

  // The parameters and buffers that other parts may call by name.
  virtual void add_names(const std::string& name, TensorNames& names) const;

  // Adds what is to be saved. Tensors are not copied. May communicate.
  virtual void save(const std::string& name, const TensorNames& names, Contents& contents) = 0;

  // Adds the tensors that are to be read, makes those that are missing, and gives the values that are to be read. `saved` is what there is
  // to read; what it lacks is reported by the caller. Changes nothing that a failure would have to undo.
  virtual void prepare(const std::string& name, const TensorNames& names, const Index& saved, Contents& contents) = 0;

  // The tensors have been read. Takes the values, and puts in use what prepare() made.
  virtual void finish(const Index& saved) = 0;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

std::shared_ptr<Part> part_of(torch::nn::Module& module);
std::shared_ptr<Part> part_of_names(std::function<NamedTensors()> tensors);
std::shared_ptr<Part> part_of(torch::optim::Optimizer& optimizer);
std::shared_ptr<Part> part_of(lr::Scheduler& scheduler);
std::shared_ptr<Part> part_of(at::Tensor& tensor);
std::shared_ptr<Part> part_of(bool& value);
std::shared_ptr<Part> part_of(int& value);
std::shared_ptr<Part> part_of(int64_t& value);
std::shared_ptr<Part> part_of(float& value);
std::shared_ptr<Part> part_of(double& value);
std::shared_ptr<Part> part_of(std::string& value);
std::shared_ptr<Part> part_of(std::function<void(torch::serialize::OutputArchive&)> save,
                              std::function<void(torch::serialize::InputArchive&)> load);

// A pipeline: what this rank has of a module.
template <class T>
concept names_tensors = requires(T& value) {
  { value.named_parameters() } -> std::convertible_to<NamedTensors>;
  { value.named_buffers() } -> std::convertible_to<NamedTensors>;
};

template <class T>
concept saves_archives = requires(T& value, torch::serialize::OutputArchive& out, torch::serialize::InputArchive& in) {
  value.save(out);
  value.load(in);
};

template <class T>
std::shared_ptr<Part> make_part(T& value) {
  if constexpr (std::is_convertible_v<T*, std::shared_ptr<Part>*>) return value;
  else if constexpr (requires { part_of(value); }) return part_of(value);
  else if constexpr (detail::holds_module<T>) return part_of(const_cast<torch::nn::Module&>(static_cast<const torch::nn::Module&>(*value)));
  else if constexpr (names_tensors<T>) {
    return part_of_names([&value] {
      NamedTensors all = value.named_parameters();
      for (auto& buffer : NamedTensors(value.named_buffers())) all.push_back(std::move(buffer));
      return all;
    });
  } else {
    static_assert(saves_archives<T>,
                  "a part of a dt::State is a module, an optimizer, a tensor, a number, a bool, a std::string, a dt::checkpoints::Part, or "
                  "has save(torch::serialize::OutputArchive&) const and load(torch::serialize::InputArchive&)");
    return part_of([&value](torch::serialize::OutputArchive& archive) { value.save(archive); },
                   [&value](torch::serialize::InputArchive& archive) { value.load(archive); });
  }
}

}  // namespace checkpoints

// Parts, each under a name. It refers to them: they outlive it. A part is
// - a module, or what holds one (torch::nn::Linear, std::shared_ptr): its parameters and buffers, whatever their layouts. Tensors that are
//   deferred on a rank are another rank's. Tied parameters are saved once, under all their names;
// - a dt::Pipeline: the parameters and buffers of this rank's stages, under the whole model's names, so that a checkpoint does not tell
//   whether there was a pipeline;
// - an optimizer, of libtorch or of dtensor/optim: its options, and its states by the names that their parameters have in the modules of
//   this State, so they survive another order or grouping of the parameters. Parameters of no module go by group and position;
// - random_streams(): what is drawn next;
// - a dt::lr::Scheduler: its step and its base rates, which go with the groups of its optimizer where that is a part, too;
// - a tensor, a bool, an int, int64_t, float, double or std::string of the program;
// - anything with save(torch::serialize::OutputArchive&) const and load(torch::serialize::InputArchive&): dt::GradScaler, libtorch's
//   samplers (the position in the data);
// - of_each_rank(x), where x, one of these, has other values on each rank.
//
// Names have no '/', and no two parts have one. Throws for those. Saving and loading throw where a name in one part is also in another.
class State {
 public:
  class Entry {
   public:
    template <class T>
    Entry(std::string name, T&& value) : name(std::move(name)), part(checkpoints::make_part(value)) {}
    std::string name;
    std::shared_ptr<checkpoints::Part> part;
  };

  State() = default;
  State(std::initializer_list<Entry> entries);
  State& add(Entry entry);

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

// The calling rank's random streams: the common one of the CPU and of its GPU, which is equal on all ranks and saved once, and that of
// rank_local_random(), which is each rank's own. On more ranks than it was saved from, the further ranks keep their own ones.
std::shared_ptr<checkpoints::Part> random_streams();

// A part that has other values on each rank: it is saved for each, and rank r loads what rank r saved. A rank beyond those that saved keeps
// what it has.
std::shared_ptr<checkpoints::Part> of_each_rank(std::shared_ptr<checkpoints::Part> part);
template <class T>
std::shared_ptr<checkpoints::Part> of_each_rank(T& value) {
  return of_each_rank(checkpoints::make_part(value));
}

}  // namespace dtensor

#pragma GCC visibility pop
