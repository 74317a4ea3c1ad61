// Smaller programs that still fail: steps left out or replaced by leaves, smaller meshes and sizes, simpler leaves.
#include "check.hpp"

#include <algorithm>
#include <chrono>
#include <optional>

namespace dtensor::fuzz {

namespace {

using Clock = std::chrono::steady_clock;

// Without step `i` and everything that needs its values.
Program without(const Program& program, size_t i) {
  auto result = program;
  result.steps.clear();
  std::set<int> gone(program.steps[i].out.begin(), program.steps[i].out.end());
  for (size_t j = 0; j < program.steps.size(); ++j) {
    const auto& step = program.steps[j];
    const bool needs = std::ranges::any_of(step.in, [&](int value) { return gone.count(value) != 0; });
    if (j != i && !needs) result.steps.push_back(step);
    else gone.insert(step.out.begin(), step.out.end());
  }
  std::erase_if(result.roots, [&](const Root& root) { return gone.count(root.value) != 0; });
  return result;
}

// With leaves in place of what step `i` computes, laid out as it was.
std::optional<Program> with_leaves(const Program& program, size_t i, const Outcome& outcome, Data data) {
  auto result = program;
  const auto step = program.steps[i];
  result.steps.erase(result.steps.begin() + static_cast<int64_t>(i));
  for (const int value : step.out) {
    const auto found = outcome.values.find(value);
    if (found == outcome.values.end()) return std::nullopt;
    const auto& was = found->second;
    const auto is_norm = [](const Placement& p) { return p.is_partial(ReduceOp::norm2); };
    if (std::ranges::any_of(was.placements, is_norm)) return std::nullopt;  // has no signs to hold the data
    Step leaf;
    leaf.out = {value};
    leaf.leaf = {was.sizes, was.dtype,     was.dtype == at::kBool ? Data::mask : data, 1, 0, value, was.requires_grad,
                 false,     was.placements};
    result.steps.insert(result.steps.begin() + static_cast<int64_t>(i), std::move(leaf));
  }
  return result;
}

void for_each_leaf(Program& program, const std::function<void(Leaf&)>& change) {
  for (auto& step : program.steps) {
    if (step.kind == Step::Kind::leaf) change(step.leaf);
  }
  for (auto& root : program.roots) change(root.cotangent);
}

void for_each_placements(Program& program, const std::function<void(Placements&)>& change) {
  for_each_leaf(program, [&](Leaf& leaf) { change(leaf.placements); });
  for (auto& step : program.steps) {
    if (step.kind == Step::Kind::redistribute) change(step.placements);
  }
}

Program without_mesh_dim(Program program, size_t m) {
  program.mesh.erase(program.mesh.begin() + static_cast<int64_t>(m));
  for_each_placements(program, [&](Placements& p) { p.erase(p.begin() + m); });
  return program;
}

class Shrinker {
 public:
  Shrinker(Program& program, Verdict& verdict, Ranks& ranks, double seconds)
      : program_(program),
        verdict_(verdict),
        ranks_(ranks),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))) {}

  void run() {
    for (bool better = true; better && Clock::now() < end_;) {
      better = fewer_roots();
      better |= fewer_steps();
      better |= smaller_mesh();
      better |= simpler_leaves();
      better |= smaller_sizes();
    }
  }

 private:
  bool attempt(Program program) {
    if (Clock::now() > end_) return false;
    Verdict verdict;
    try {
      verdict = check(program, ranks_);
    } catch (const std::exception&) {
      return false;  // it cannot even be made
    }
    const bool impossible = verdict.failure.find(": leaf threw: ") != std::string::npos;  // placements that do not fit it
    if (!verdict.valid || verdict.failure.empty() || impossible) return false;
    program_ = std::move(program);
    verdict_ = std::move(verdict);
    return true;
  }

  template <class Change>
  bool attempt_with(Change&& change) {
    auto program = program_;
    change(program);
    return attempt(std::move(program));
  }

  bool fewer_roots() {
    if (program_.roots.empty()) return false;
    if (attempt_with([](Program& p) { p.roots.clear(); })) return true;
    bool better = false;
    for (size_t i = program_.roots.size(); program_.roots.size() > 1 && i-- > 0;) {
      better |= attempt_with([&](Program& p) { p.roots.erase(p.roots.begin() + static_cast<int64_t>(i)); });
    }
    return better;
  }

  bool fewer_steps() {
    bool better = false;
    for (size_t i = program_.steps.size(); i-- > 0;) {
      if (i < program_.steps.size()) better |= attempt(without(program_, i));
    }
    for (size_t i = program_.steps.size(); i-- > 0;) {
      if (i >= program_.steps.size() || program_.steps[i].kind == Step::Kind::leaf || program_.steps[i].out.empty()) continue;
      for (const auto data : {Data::distinct, Data::fraction}) {
        const auto program = with_leaves(program_, i, verdict_.mesh, data);
        if (program && attempt(*program)) {
          better = true;
          break;
        }
      }
    }
    return better;
  }

  bool smaller_mesh() {
    bool better = false;
    for (size_t m = program_.mesh.size(); program_.mesh.size() > 1 && m-- > 0;) better |= attempt(without_mesh_dim(program_, m));
    for (size_t m = 0; m < program_.mesh.size(); ++m) {
      for (int64_t size = 2; size < program_.mesh[m]; ++size) {
        if (attempt_with([&](Program& p) { p.mesh[m] = size; })) {
          better = true;
          break;
        }
      }
    }
    return better || (program_.spmd && attempt_with([](Program& p) { p.spmd = false; }));
  }

  // Applies `change` to each leaf alone where it `applies`.
  bool each_leaf(const std::function<bool(const Leaf&)>& applies, const std::function<void(Leaf&)>& change) {
    bool better = false;
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      const auto& step = program_.steps[i];
      if (step.kind == Step::Kind::leaf && applies(step.leaf)) better |= attempt_with([&](Program& p) { change(p.steps[i].leaf); });
    }
    for (size_t i = 0; i < program_.roots.size(); ++i) {
      if (applies(program_.roots[i].cotangent)) better |= attempt_with([&](Program& p) { change(p.roots[i].cotangent); });
    }
    return better;
  }

  bool simpler_leaves() {
    bool better = each_leaf([](const Leaf& l) { return l.reversed; }, [](Leaf& l) { l.reversed = false; });
    better |= each_leaf([](const Leaf& l) { return l.requires_grad; }, [](Leaf& l) { l.requires_grad = false; });
    better |= each_leaf([](const Leaf& l) { return l.data == Data::fraction; }, [](Leaf& l) { l.data = Data::whole; });
    for (size_t m = 0; m < program_.mesh.size(); ++m) {
      better |= each_leaf([&](const Leaf& l) { return !l.placements[m].is_replicate(); },
                          [&](Leaf& l) { l.placements[m] = replicate(); });
      better |= each_leaf(
          [&](const Leaf& l) {
            const auto& p = l.placements[m];
            return p.is_shard() && p != shard(p.dim);
          },
          [&](Leaf& l) { l.placements[m] = shard(l.placements[m].dim); });
    }
    return better;
  }

  // Lengths change together, where they are equal: operands must go on fitting together.
  bool smaller_sizes() {
    std::set<int64_t> lengths;
    for_each_leaf(program_, [&](Leaf& leaf) { lengths.insert(leaf.sizes.begin(), leaf.sizes.end()); });
    bool better = false;
    for (auto length = lengths.rbegin(); length != lengths.rend(); ++length) {
      for (int64_t shorter = 1; shorter < *length; ++shorter) {
        const auto change = [&](Program& p) {
          for_each_leaf(p, [&](Leaf& leaf) {
            std::ranges::replace(leaf.sizes, *length, shorter);
            if (leaf.bound == *length) leaf.bound = shorter;
          });
        };
        if (attempt_with(change)) {
          better = true;
          break;
        }
      }
    }
    return better;
  }

  Program& program_;
  Verdict& verdict_;
  Ranks& ranks_;
  Clock::time_point end_;
};

}  // namespace

Program shrink(Program program, Verdict& verdict, Ranks& ranks, double seconds) {
  Shrinker(program, verdict, ranks, seconds).run();
  return program;
}

}  // namespace dtensor::fuzz
