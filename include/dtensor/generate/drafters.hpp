// Where guesses of the next tokens come from.
//
//   dtensor::generate::EngineOptions options;
//   options.drafter = std::make_shared<dtensor::generate::RolloutTrees>();   // what earlier outputs of the same prompt said
//   dtensor::generate::Engine engine(*model, options);
#pragma once

#include <dtensor/generate/drafts.hpp>
#include <dtensor/generate/runner.hpp>

#include <list>
#include <memory>
#include <queue>
#include <unordered_map>

#pragma GCC visibility push(default)

namespace dtensor::generate {

// What came after the last tokens where they stood before, in prompt or output (Saxena, "Prompt Lookup Decoding", 2023). For texts that
// repeat themselves.
class NgramDrafter final : public Drafter {
 public:
  // Looks for the last `longest` tokens, then for fewer, down to `shortest`.
  explicit NgramDrafter(int64_t longest = 4, int64_t shortest = 1) : longest_(longest), shortest_(shortest) {
    require(shortest >= 1 && shortest <= longest, "generate", "got n-grams of {} to {} tokens", shortest, longest);
  }
  std::vector<std::vector<Draft>> propose(const std::vector<DraftContext>& outputs) override;

 private:
  int64_t longest_, shortest_;
};

struct RolloutTreeOptions {
  int64_t context = 8;             // tokens before a guess that are looked at
  double least = 0.05;             // a guess whose path has a smaller share of what was seen is left out
  int64_t most_nodes = 4'000'000;  // of all trees together; the least recently used prompts are forgotten first
};

// A tree for each prompt, of what its earlier outputs said after which tokens, and how often. In reinforcement learning prompts come again
// in every epoch, and a policy changes slowly. The trees grow while outputs do, so that the outputs of one request help each other; to fill
// them in idle time, submit requests of low priority. A guess is a tree of the likeliest continuations.
class RolloutTrees final : public Drafter {
 public:
  explicit RolloutTrees(const RolloutTreeOptions& options = {}) : options_(options) {}
  std::vector<std::vector<Draft>> propose(const std::vector<DraftContext>& outputs) override;
  void observe(std::span<const int64_t> tokens, int64_t prompt, int64_t from) override;

  int64_t nodes() const { return nodes_; }
  int64_t prompts() const { return static_cast<int64_t>(trees_.size()); }

 private:
  struct Node {
    int64_t count = 0;
    std::map<int64_t, std::unique_ptr<Node>> next;
  };
  struct Tree {
    Node root;
    int64_t nodes = 0;
    std::list<Tokens>::iterator used;
  };
  Tree& tree_of(std::span<const int64_t> prompt);
  static const Node* after(const Node& root, std::span<const int64_t> context);
  std::vector<Draft> grow(const Node& root, const DraftContext& output) const;

  const RolloutTreeOptions options_;
  std::map<Tokens, Tree> trees_;
  std::list<Tokens> used_;  // prompts, the most recently used first
  int64_t nodes_ = 0;
};

// A smaller model of the same vocabulary. It draws by the same random numbers as the decoder, so that the two agree as often as their
// distributions let them. It keeps keys and values in pages of its own.
class DraftModel final : public Drafter {
 public:
  // See Engine: a model with forward(ids). It must outlive this. Throws when its attention cannot take keys and values from pages.
  template <class Model>
  explicit DraftModel(Model& model, int64_t cache_bytes = int64_t{64} << 20, std::optional<DeviceMesh> mesh = {})
      : DraftModel(Forward([&model](const at::Tensor& ids) { return at::Tensor(model.forward(ids)); }), cache_bytes, std::move(mesh)) {}
  DraftModel(Forward forward, int64_t cache_bytes, std::optional<DeviceMesh> mesh);

  std::vector<std::vector<Draft>> propose(const std::vector<DraftContext>& outputs) override;
  // The smaller model has other weights: what its pages hold is forgotten.
  void load_weights() { blocks_->forget(); }
  int64_t passes() const { return runner_.passes(); }

 private:
  struct Guessing;
  at::Tensor pass(std::vector<Guessing>& all, std::vector<size_t>& rows);

  Runner runner_;
  std::unique_ptr<Blocks> blocks_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline std::vector<std::vector<Draft>> NgramDrafter::propose(const std::vector<DraftContext>& outputs) {
  std::vector<std::vector<Draft>> all;
  for (const auto& output : outputs) {
    auto& drafts = all.emplace_back();
    const auto tokens = output.tokens;
    for (auto length = std::min<int64_t>(longest_, static_cast<int64_t>(tokens.size()) - 1); length >= shortest_ && drafts.empty();
         --length) {
      const auto last = tokens.last(length);
      const auto earlier = std::ranges::find_end(tokens.first(tokens.size() - 1), last);
      if (earlier.empty()) continue;
      const auto begin = static_cast<int64_t>(earlier.end() - tokens.begin());
      for (int64_t i = 0; i < output.most; ++i) {  // goes on into the guesses themselves, as a text with a period does
        const auto at = begin + i, count = static_cast<int64_t>(tokens.size());
        drafts.push_back({at < count ? tokens[at] : drafts[at - count].token, i - 1});
      }
    }
  }
  return all;
}

inline RolloutTrees::Tree& RolloutTrees::tree_of(std::span<const int64_t> prompt) {
  const Tokens key(prompt.begin(), prompt.end());
  const auto [place, is_new] = trees_.try_emplace(key);
  auto& tree = place->second;
  if (is_new) {
    used_.push_front(key);
    tree.used = used_.begin();
  } else {
    used_.splice(used_.begin(), used_, tree.used);
  }
  while (nodes_ > options_.most_nodes && used_.size() > 1) {
    const auto oldest = trees_.find(used_.back());
    nodes_ -= oldest->second.nodes;
    trees_.erase(oldest);
    used_.pop_back();
  }
  return tree;
}

// Each new token, after each of the contexts that end there.
inline void RolloutTrees::observe(std::span<const int64_t> tokens, int64_t prompt, int64_t from) {
  auto& tree = tree_of(tokens.first(prompt));
  for (auto i = from; i < static_cast<int64_t>(tokens.size()); ++i) {
    for (auto begin = std::max<int64_t>(0, i - options_.context); begin <= i; ++begin) {
      auto* node = &tree.root;
      for (auto j = begin; j <= i; ++j) {
        auto& next = node->next[tokens[j]];
        if (!next) next = std::make_unique<Node>(), ++tree.nodes, ++nodes_;
        node = next.get();
      }
      ++node->count;
    }
  }
}

inline const RolloutTrees::Node* RolloutTrees::after(const Node& root, std::span<const int64_t> context) {
  const auto* node = &root;
  for (const auto token : context) {
    const auto next = node->next.find(token);
    if (next == node->next.end()) return nullptr;
    node = next->second.get();
  }
  return node->next.empty() ? nullptr : node;
}

// The likeliest paths first. What comes after a path is what came after the longest context that was seen.
inline std::vector<Draft> RolloutTrees::grow(const Node& root, const DraftContext& output) const {
  struct Candidate {
    double share;
    int64_t order, token, parent;
    bool operator<(const Candidate& other) const { return share != other.share ? share < other.share : order > other.order; }
  };
  std::priority_queue<Candidate> candidates;
  std::vector<Draft> drafts;
  int64_t order = 0;
  const auto add_children = [&](int64_t parent, double share) {
    Tokens context;  // backwards
    for (auto i = parent; i >= 0 && static_cast<int64_t>(context.size()) < options_.context; i = drafts[i].parent)
      context.push_back(drafts[i].token);
    for (auto i = output.tokens.size(); i > 0 && static_cast<int64_t>(context.size()) < options_.context; --i)
      context.push_back(output.tokens[i - 1]);
    std::ranges::reverse(context);
    for (std::span<const int64_t> rest(context); !rest.empty(); rest = rest.subspan(1)) {
      const auto* node = after(root, rest);
      if (!node) continue;
      int64_t sum = 0;
      for (const auto& [token, next] : node->next) sum += next->count;
      for (const auto& [token, next] : node->next) {
        const auto part = share * static_cast<double>(next->count) / static_cast<double>(std::max<int64_t>(sum, 1));
        if (part >= options_.least) candidates.push({part, order++, token, parent});
      }
      return;
    }
  };
  add_children(-1, 1);
  while (!candidates.empty() && static_cast<int64_t>(drafts.size()) < output.most) {
    const auto best = candidates.top();
    candidates.pop();
    drafts.push_back({best.token, best.parent});
    add_children(static_cast<int64_t>(drafts.size()) - 1, best.share);
  }
  return drafts;
}

inline std::vector<std::vector<Draft>> RolloutTrees::propose(const std::vector<DraftContext>& outputs) {
  std::vector<std::vector<Draft>> all;
  for (const auto& output : outputs) {
    const auto tree = trees_.find(Tokens(output.tokens.begin(), output.tokens.begin() + output.prompt));
    all.push_back(tree == trees_.end() ? std::vector<Draft>() : grow(tree->second.root, output));
  }
  return all;
}

inline DraftModel::DraftModel(Forward forward, int64_t cache_bytes, std::optional<DeviceMesh> mesh)
    : runner_(std::move(forward), std::move(mesh)) {
  require(runner_.pages(), "generate", "a model for drafts must take keys and values from pages, and this one does not: {}",
          runner_.why_not());
  const auto count = cache_bytes / runner_.bytes_of_block();
  runner_.allocate(count);
  blocks_ = std::make_unique<Blocks>(count);
}

// An output and its guesses so far.
struct DraftModel::Guessing {
  Guessing(Blocks& blocks, const DraftContext& of) : context(of), table(blocks), tokens(of.tokens.begin(), of.tokens.end()) {
    computed = table.match(tokens, static_cast<int64_t>(tokens.size()) - 1);
  }
  bool done() const { return static_cast<int64_t>(drafts.size()) >= context.most; }

  const DraftContext& context;
  PageTable table;
  Tokens tokens;
  int64_t computed = 0;
  std::vector<Draft> drafts{};
};

// Scores after the last token of each output that goes on; of which they are: `rows`.
inline at::Tensor DraftModel::pass(std::vector<Guessing>& all, std::vector<size_t>& rows) {
  StepRows step;
  PageTable::Copies copies;
  rows.clear();
  for (size_t i = 0; i < all.size(); ++i) {
    auto& output = all[i];
    const auto count = static_cast<int64_t>(output.tokens.size());
    if (output.done() || !output.table.reserve(output.computed, count, copies)) continue;
    RowSpan span{step.rows(), 0, output.computed, output.table.blocks().data(), nullptr};
    for (auto position = output.computed; position < count; ++position) {
      step.ids.push_back(output.tokens[position]);
      step.positions.push_back(position);
    }
    span.end = step.rows();
    step.scored.push_back(span.end - 1);
    step.spans.push_back(span);
    output.computed = count;
    rows.push_back(i);
  }
  if (rows.empty()) return {};
  runner_.copy(copies);
  return runner_.run(step, {});
}

inline std::vector<std::vector<Draft>> DraftModel::propose(const std::vector<DraftContext>& outputs) {
  const NoSpmd plain;
  std::vector<Guessing> all;
  all.reserve(outputs.size());
  for (const auto& output : outputs) all.emplace_back(*blocks_, output);
  std::vector<size_t> rows;
  while (true) {
    const auto scores = pass(all, rows);
    if (rows.empty()) break;
    for (size_t r = 0; r < rows.size(); ++r) {
      auto& output = all[rows[r]];
      const auto& of = output.context;
      const auto uniform = uniform_of(of.settings.seed, of.index, static_cast<int64_t>(output.tokens.size()));
      const auto token = detail::token_of(scores, static_cast<int64_t>(r), output.tokens, of.prompt, of.settings, uniform);
      output.table.filled(output.tokens, output.computed);
      output.tokens.push_back(token);
      output.drafts.push_back({token, static_cast<int64_t>(output.drafts.size()) - 1});
    }
  }
  std::vector<std::vector<Draft>> drafts;
  for (auto& output : all) drafts.push_back(std::move(output.drafts));
  return drafts;
}

}  // namespace dtensor::generate

#pragma GCC visibility pop
