// The nodes from which the inputs can be reached are the way back to the inputs. I runs them, and only them. Where such a node also leads
// to a parameter by another edge, the way forks: its incoming gradient is kept, and its edges on the way are cut, so that W, which begins
// at the forks, computes the rest and nothing twice.
#include <dtensor/parallel/pipeline/split_backward.hpp>

#include <dtensor/base/compat.hpp>
#include <dtensor/base/error.hpp>

#include <ATen/ops/ones_like.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace dtensor {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(Edge::function);

constexpr const char* kTag = "backward_inputs";

// What a backward pass begins with: gradients that flow into nodes.
struct Roots {
  edge_list edges;
  variable_list gradients;
  void add(Edge edge, at::Tensor gradient) {
    edges.push_back(std::move(edge));
    gradients.push_back(std::move(gradient));
  }
};

// A graph below its roots, seen from both ends.
struct Graph {
  explicit Graph(const edge_list& roots) {
    for (const auto& root : roots) add(root.function);
    for (size_t i = 0; i < nodes.size(); ++i) {  // which grows
      for (const auto& edge : nodes[i]->next_edges()) {
        if (!edge.function) continue;
        users[edge.function.get()].push_back(nodes[i].get());
        add(edge.function);
      }
    }
  }

  // The nodes that lead to one of these.
  std::unordered_set<Node*> leading_to(const edge_list& ends) const {
    std::unordered_set<Node*> found;
    std::vector<Node*> next;
    const auto take = [&](Node* node) {
      if (found.insert(node).second) next.push_back(node);
    };
    for (const auto& end : ends) {
      if (known.count(end.function.get()) > 0) take(end.function.get());
    }
    while (!next.empty()) {
      const auto node = users.find(next.back());
      next.pop_back();
      if (node == users.end()) continue;
      for (auto* user : node->second) take(user);
    }
    return found;
  }

  std::vector<NodePtr> nodes;
  std::unordered_set<Node*> known;
  std::unordered_map<Node*, std::vector<Node*>> users;

 private:
  void add(const NodePtr& node) {
    if (known.insert(node.get()).second) nodes.push_back(node);
  }
};

// Keeps the gradients that flow into a node. It is the last of the node's hooks, so they are as the others left them.
struct KeepGradients final : torch::autograd::FunctionPreHook {
  explicit KeepGradients(std::shared_ptr<variable_list> t) : to(std::move(t)) {}
  variable_list operator()(const variable_list& gradients) override {
    *to = gradients;
    return gradients;
  }
  const std::shared_ptr<variable_list> to;
};

// Frees what a node saved as soon as it has run, as a backward pass does that does not keep the graph. (Saved tensors also hold the nodes
// that made them: without this the whole graph would stay.)
struct FreeSaved final : torch::autograd::FunctionPostHook {
  explicit FreeSaved(Node& n) : node(n) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    node.release_variables();
    return outputs;
  }
  Node& node;  // which has this
};

// In W the gradients have been through them already.
void remove_hooks(Node& node) {
  node.pre_hooks().clear();
#if DTENSOR_TORCH_AT_LEAST(2, 0)
  node.tensor_pre_hooks().clear();
  node.retains_grad_hooks().clear();
#endif
}

variable_list execute(const Roots& roots, bool of_inputs, const edge_list& outputs = {}) {
  return torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, /*keep_graph=*/of_inputs,
                                                               /*create_graph=*/false, /*accumulate_grad=*/!of_inputs, outputs);
}

}  // namespace

struct WeightBackward::Rest {
  // A node on the way to the inputs that also leads to a parameter.
  struct Fork {
    NodePtr node;
    std::shared_ptr<variable_list> gradients = std::make_shared<variable_list>();
  };
  Roots roots;  // outputs that depend on no input
  std::vector<Fork> forks;
};

WeightBackward::WeightBackward() = default;
WeightBackward::WeightBackward(WeightBackward&&) noexcept = default;
WeightBackward& WeightBackward::operator=(WeightBackward&&) noexcept = default;
WeightBackward::~WeightBackward() = default;

bool WeightBackward::empty() const { return !rest_; }

void WeightBackward::run() {
  if (!rest_) return;
  const auto rest = std::exchange(rest_, nullptr);
  auto roots = std::move(rest->roots);
  for (auto& fork : rest->forks) {
    for (uint32_t i = 0; i < fork.gradients->size(); ++i) {
      if ((*fork.gradients)[i].defined()) roots.add({fork.node, i}, std::move((*fork.gradients)[i]));
    }
  }
  if (!roots.edges.empty()) execute(roots, false);
}

struct GraphOutputs::State {
  struct Output {
    Edge edge;
    std::vector<int64_t> sizes;
    at::Tensor one{};  // of an output with one element: its gradient, if none is given
  };
  std::vector<Output> outputs;

  Roots roots(const std::vector<at::Tensor>& gradients) && {
    require(outputs.size() == gradients.size(), kTag, "got {} gradients of {} outputs; expected one each", gradients.size(),
            outputs.size());
    Roots result;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& gradient = gradients[i].defined() ? gradients[i] : outputs[i].one;
      if (!gradient.defined()) {
        fail(kTag, "output {} has sizes [{}] and no gradient was given; expected one of its sizes", i, fmt::join(outputs[i].sizes, ", "));
      }
      if (gradient.sizes() != outputs[i].sizes) {
        fail(kTag, "the gradient of output {} has sizes [{}]; expected [{}]", i, fmt::join(gradient.sizes(), ", "),
             fmt::join(outputs[i].sizes, ", "));
      }
      result.add(std::move(outputs[i].edge), gradient);
    }
    return result;
  }
};

GraphOutputs::GraphOutputs(const std::vector<at::Tensor>& outputs) : state_(std::make_unique<State>()) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = outputs[i];
    require(output.defined() && output.requires_grad(), kTag,
            "output {} needs no gradient; hint: give only outputs that were computed from something that needs one, with gradients on", i);
    auto& kept = state_->outputs.emplace_back();
    kept.edge = torch::autograd::impl::gradient_edge(output);
    kept.sizes = output.sizes().vec();
    if (output.numel() == 1) kept.one = at::ones_like(output);
  }
}

GraphOutputs::~GraphOutputs() = default;
GraphOutputs::GraphOutputs(GraphOutputs&&) noexcept = default;
GraphOutputs& GraphOutputs::operator=(GraphOutputs&&) noexcept = default;

size_t GraphOutputs::leave_out_missing(std::vector<at::Tensor>& gradients) {
  auto& outputs = state_->outputs;
  require(outputs.size() == gradients.size(), kTag, "got {} gradients of {} outputs; expected one each", gradients.size(), outputs.size());
  size_t left = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    if (left < i) outputs[left] = std::move(outputs[i]), gradients[left] = std::move(gradients[i]);
    ++left;
  }
  outputs.resize(left);
  gradients.resize(left);
  return left;
}

void GraphOutputs::backward(const std::vector<at::Tensor>& gradients) && {
  execute(std::move(*std::exchange(state_, nullptr)).roots(gradients), false);
}

InputBackward backward_inputs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                              const std::vector<at::Tensor>& inputs) {
  return GraphOutputs(outputs).backward_inputs(gradients, inputs);
}

InputBackward GraphOutputs::backward_inputs(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& inputs) && {
  auto all = std::move(*std::exchange(state_, nullptr)).roots(gradients);
  const Graph graph(all.edges);
  edge_list ends;
  std::vector<size_t> wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    require(inputs[i].is_leaf(), kTag, "input {} is the result of an operator; expected a leaf; hint: detach().requires_grad_() it first",
            i);
    auto end = torch::autograd::impl::gradient_edge(inputs[i]);
    if (graph.known.count(end.function.get()) == 0) continue;
    ends.push_back(std::move(end));
    wanted.push_back(i);
  }
  const auto way = graph.leading_to(ends);
  const auto on_way = [&](const Edge& edge) { return way.count(edge.function.get()) > 0; };

  InputBackward result;
  result.gradients.resize(inputs.size());
  auto rest = std::make_unique<WeightBackward::Rest>();
  Roots roots;
  for (size_t i = 0; i < all.edges.size(); ++i) {
    (on_way(all.edges[i]) ? roots : rest->roots).add(std::move(all.edges[i]), std::move(all.gradients[i]));
  }
  for (const auto& node : graph.nodes) {
    if (way.count(node.get()) == 0) continue;
    bool forks = false;
    for (const auto& edge : node->next_edges()) forks |= edge.function && !on_way(edge);
    if (!forks) {
      const bool of_input = node->next_edges().empty();
      if (!of_input) node->add_post_hook(std::make_unique<FreeSaved>(*node));
      continue;
    }
    auto& fork = rest->forks.emplace_back();
    fork.node = node;
    node->add_pre_hook(std::make_unique<KeepGradients>(fork.gradients));
  }
  if (!roots.edges.empty()) {
    auto found = execute(roots, true, ends);
    for (size_t i = 0; i < wanted.size(); ++i) result.gradients[wanted[i]] = std::move(found[i]);
  }
  for (auto& fork : rest->forks) {
    remove_hooks(*fork.node);
    for (auto& edge : fork.node->next_edges()) {
      if (edge.function && on_way(edge)) edge = Edge();
    }
  }
  result.weights.rest_ = std::move(rest);
  return result;
}

}  // namespace dtensor
