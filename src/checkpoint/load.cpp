// Loading: what there is, what is wanted, whether they fit, the plan, the reading, and the values.
#include "src/checkpoint/load.hpp"

#include "src/checkpoint/chosen.hpp"
#include "src/checkpoint/joined_parts.hpp"
#include "src/checkpoint/optimizer_names.hpp"
#include "src/checkpoint/reader.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/deferred/deferred_init.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>
#include <dtensor/tensor/writing.hpp>

#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

namespace dtensor::checkpoints {

namespace {

// That all ranks together read before they exchange: little, so that buffers stay in caches.
constexpr int64_t kRoundBytes = int64_t{4} << 20;

std::string renamed(const std::string& name, const LoadOptions& options) {
  for (const auto& [from, to] : options.rename) {
    if (name.rfind(from, 0) == 0) return to + name.substr(from.size());
  }
  return name;
}

// Whether a parameter's gradient has sums that are still to come. Zeros, as zero_grad() leaves them, need none.
bool is_pending(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (gradient.defined() && is_dtensor(parameter)) {
    if (const auto* group = group_of(parameter); group && group->has_deferred()) return true;
  }
  if (!gradient.defined() || !is_dtensor(gradient) || !DTensor(gradient).layout().has_partial()) return false;
  const auto local = DTensor(gradient).to_local();
  const NoSpmd plain;
  return local.count_nonzero().item<int64_t>() > 0;
}

// The index under the state's names, without what is not to be loaded.
Index chosen(const Index& index, const LoadOptions& options) {
  Index result = index;
  result.tensors.clear();
  result.same_as.clear();
  result.values.clear();
  std::map<std::string, std::string> saved_as;
  const auto chosen_name = [&](const std::string& saved) -> std::optional<std::string> {
    auto name = renamed(saved, options);
    if (!is_chosen(name, options)) return {};
    const auto [entry, is_new] = saved_as.try_emplace(name, saved);
    require(is_new, kLoad, "'{}' and '{}' are both named '{}' by .rename; hint: .without leaves one of them out, renamed to another name",
            entry->second, saved, name);
    return name;
  };
  for (const auto& [saved, tensor] : index.tensors) {
    if (const auto name = chosen_name(saved)) result.tensors[*name] = tensor;
  }
  for (const auto& [saved, other] : index.same_as) {
    const auto name = chosen_name(saved);
    const auto target = renamed(other, options);
    if (!name) continue;
    if (result.tensors.contains(target)) result.same_as[*name] = target;
    else result.tensors[*name] = index.tensors.at(other);
  }
  for (const auto& [saved, value] : index.values) {
    if (const auto name = chosen_name(saved)) result.values[*name] = value;
  }
  return result;
}

// What a state wants of an index, as one rank sees it.
class Wanted {
 public:
  Wanted(const State& state, Index index, const LoadOptions& options) : state_(state), index_(std::move(index)), options_(options) {
    TensorNames names;
    for (const auto& entry : state.entries()) entry.part->add_names(entry.name, names);
    contents_ = joined_parts(
        kLoad, state, [&](const State::Entry& entry, Contents& part) { entry.part->prepare(entry.name, names, index_, part); });
    all_names_ = names_in(contents_);
    std::erase_if(contents_.tensors, [&](const auto& entry) { return !is_chosen(entry.first, options_); });
    std::erase_if(contents_.values, [&](const auto& entry) { return !is_chosen(entry.first, options_); });
    problems_ = contents_.problems;
    others_ = other_optimizers(contents_.values, index_.values);
    for (const auto& [name, text] : others_) problems_.push_back(text);
    for (const auto& [name, tensor] : contents_.tensors) check(name, tensor);
    for (const auto& [name, value] : contents_.values) {
      if (index_.values.contains(name)) continue;
      if (index_.find(name)) is_of_another_kind(name, "tensor", "value");
      else lacks(name);
    }
    name_lacking();
    std::erase_if(contents_.tensors, [&](const auto& entry) { return !index_.find(entry.first); });
  }

  const Index& index() const { return index_; }
  const std::map<std::string, at::Tensor>& tensors() const { return contents_.tensors; }

  const std::vector<std::string>& all_names() const { return all_names_; }
  // Whether this rank has anything to load.
  bool is_any() const {
    return !contents_.tensors.empty() ||
           std::ranges::any_of(contents_.values, [&](const auto& entry) { return index_.values.contains(entry.first); });
  }

  // What does not fit, all of it.
  std::string problems() const { return fmt::format("{}", fmt::join(problems_, "; ")); }

  // Saved names that this rank does not want.
  std::set<std::string> unexpected() const {
    std::set<std::string> names;
    if (options_.partial) return names;
    const auto add = [&](const auto& saved) {
      for (const auto& [name, what] : saved) {
        if (!contents_.tensors.contains(name) && !contents_.values.contains(name) && !contents_.same_as.contains(name)) names.insert(name);
      }
    };
    add(index_.tensors);
    add(index_.values);
    return names;
  }

  bool has_part(const std::string& part) const {
    return std::ranges::any_of(all_names_, [&](const auto& name) { return name == part || name.starts_with(part + "."); });
  }

  std::string closest(const std::string& name) const {
    std::vector<std::string> names;
    for (const auto& [own, tensor] : contents_.tensors) names.push_back(own);
    for (const auto& [own, value] : contents_.values) names.push_back(own);
    return names.empty() ? "it has nothing" : detail::closest(name, names);
  }

  void finish() {
    for (const auto& entry : state_.entries()) entry.part->finish(index_);
  }

 private:
  void is_of_another_kind(const std::string& name, const char* saved, const char* expected) {
    problems_.push_back(fmt::format("'{}' is a {} there, expected a {}", name, saved, expected));
  }

  void lacks(const std::string& name) {
    const bool is_of_other = std::ranges::any_of(others_, [&](const auto& other) { return name.starts_with(other.first + "."); });
    if (!options_.partial && !is_of_other) lacking_.push_back(name);
  }

  // Finding the closest name takes a comparison with all of them: only the first of those that lack have it.
  void name_lacking() {
    constexpr size_t kWithClosest = 20;
    std::vector<std::string> names;
    for (const auto& [saved, tensor] : index_.tensors) names.push_back(saved);
    for (const auto& [saved, value] : index_.values) names.push_back(saved);
    for (size_t i = 0; i < lacking_.size(); ++i) {
      if (i >= kWithClosest) problems_.push_back(fmt::format("nor '{}'", lacking_[i]));
      else if (names.empty()) problems_.push_back(fmt::format("it has no '{}' (it has nothing)", lacking_[i]));
      else problems_.push_back(fmt::format("it has no '{}' (closest: {})", lacking_[i], detail::closest(lacking_[i], names)));
    }
  }

  void check(const std::string& name, const at::Tensor& tensor) {
    const auto* saved = index_.find(name);
    if (!saved) {
      for (const auto& [alias, own] : contents_.same_as) {
        if (own != name || !index_.find(alias)) continue;
        index_.same_as[name] = index_.same_as.contains(alias) ? index_.same_as[alias] : alias;
        saved = index_.find(name);
        break;
      }
    }
    if (!saved && index_.values.contains(name)) return is_of_another_kind(name, "value", "tensor");
    if (!saved) return lacks(name);
    if (c10::IntArrayRef(saved->sizes) != tensor.sizes()) {
      problems_.push_back(
          fmt::format("'{}' has sizes [{}], expected [{}]", name, fmt::join(saved->sizes, ", "), fmt::join(tensor.sizes(), ", ")));
    } else if (saved->dtype != tensor.scalar_type() && !options_.convert) {
      problems_.push_back(fmt::format("'{}' is {}, expected {} (LoadOptions.convert would convert it)", name, c10::toString(saved->dtype),
                                      c10::toString(tensor.scalar_type())));
    }
    if (tensor.requires_grad() && tensor.is_leaf() && is_pending(tensor))
      problems_.push_back(fmt::format("'{}' has a gradient that is not reduced yet; hint: step and zero_grad() first", name));
  }

  const State& state_;
  Index index_;
  const LoadOptions& options_;
  Contents contents_;
  std::vector<std::string> all_names_;  // also those that are not chosen
  std::vector<std::string> problems_, lacking_;
  std::map<std::string, std::string> others_;  // optimizers that were saved from others: what is said of them
};

// What the options ask for, of what this rank's state and the whole index have.
std::vector<Asked> asked_by(const LoadOptions& options, const Wanted& wanted, const Index& index) {
  auto names = wanted.all_names();
  std::vector<std::string> saved;
  const auto add = [&](const auto& named) {
    for (const auto& [name, what] : named) saved.push_back(name);
  };
  add(index.tensors);
  add(index.same_as);
  add(index.values);
  std::vector<Asked> asked;
  for (const auto& [from, to] : options.rename) {
    const bool any = from.empty() || std::ranges::any_of(saved, [&](const auto& name) { return name.starts_with(from); });
    if (any) asked.push_back({"", true});
    else
      asked.push_back({fmt::format("'{}' of .rename is the beginning of no name in '{}'; closest: {}", from, index.folder,
                                   saved.empty() ? "it has none" : detail::closest(from + "*", saved))});
  }
  const bool any = names.empty() || wanted.is_any();
  std::string closest;
  if (!any && !saved.empty()) closest = fmt::format(" (closest to '{}': {})", names.front(), detail::closest(names.front(), saved));
  asked.push_back(
      {fmt::format("nothing would be loaded: '{}' has no name that is chosen of the state{}; hint: .rename", index.folder, closest), any});
  for (const auto& name : saved) names.push_back(renamed(name, options));
  const auto of_only = checkpoints::asked_by(options.only, options.without, names, fmt::format("the state or of '{}'", index.folder));
  asked.insert(asked.begin(), of_only.begin(), of_only.end());
  return asked;
}

// Whether a name is of a rank, "random.rank_local@3", that there is not now.
bool is_of_further_rank(const std::string& name, int ranks) {
  const auto at = name.rfind('@');
  if (at == std::string::npos) return false;
  int rank = 0;
  const auto* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + at + 1, end, rank);
  return error == std::errc() && (rest == end || *rest == '.') && rank >= ranks;
}

// Throws, on every rank, for saved names that no rank wants.
void check_unexpected(const Wanted& wanted, const Everyone& everyone, const std::string& where) {
  auto names = wanted.unexpected();
  std::erase_if(names, [&](const std::string& name) { return is_of_further_rank(name, everyone.size()); });
  int64_t fewest = static_cast<int64_t>(names.size());
  for (const auto& numbers : everyone.gather_numbers({fewest})) fewest = std::min(fewest, numbers[0]);
  if (fewest == 0) return;
  for (const auto& text : everyone.gather(fmt::format("{}\n", fmt::join(names, "\n")))) {
    std::set<std::string> theirs;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
      theirs.insert(text.substr(begin, end - begin));
    std::erase_if(names, [&](const std::string& name) { return !theirs.contains(name); });
  }
  if (names.empty()) return;
  constexpr size_t kShown = 20;
  std::vector<std::string> lines;
  std::map<std::string, size_t> of_parts;  // names of parts that the state has not, which are close to none of it
  for (const auto& name : names) {
    const auto part = name.substr(0, name.find('.'));
    if (part != name && !wanted.has_part(part)) ++of_parts[part];
  }
  for (const auto& [part, count] : of_parts) lines.push_back(fmt::format("{} of '{}.*'", count, part));
  const auto begin = lines.size();
  for (const auto& name : names) {
    if (of_parts.contains(name.substr(0, name.find('.')))) continue;
    if (lines.size() == begin + kShown) {
      lines.push_back("...");
      break;
    }
    lines.push_back(fmt::format("'{}' (closest in the state: {})", name, wanted.closest(name)));
  }
  throw_error(kLoad,
              everyone.from_first(fmt::format(
                  "{} has {} that the state has not: {}; hint: LoadOptions.partial leaves them out, .only and .without choose, .rename "
                  "renames",
                  where, names.size() == 1 ? "one name" : fmt::format("{} names", names.size()), fmt::join(lines, ", "))));
}

// What all ranks want. A tensor that no rank has memory for is a problem of all of them.
AllHoldings join_wanted(const Wanted& wanted, const Everyone& everyone) {
  std::vector<Holdings> of_ranks;
  std::string text;
  auto problem = problem_of([&] { text = to_text(holdings_of(wanted.tensors())); });
  everyone.agree(problem);
  for (const auto& each : everyone.gather(text)) of_ranks.push_back(holdings_from(each));
  AllHoldings all;
  problem = problem_of([&] {
    all = joined(of_ranks);
    for (const auto& [name, tensor] : wanted.tensors())
      require(all.contains(name), kLoad, "'{}' has no memory on any rank; hint: dt::materialize comes first", name);
  });
  everyone.agree(problem);
  return all;
}

}  // namespace

void load(const State& state, const Index& index, const LoadOptions& options, const Everyone& everyone, const SeenBy& seen_by) {
  const auto where = fmt::format("'{}'", index.folder);
  std::optional<Wanted> wanted;
  auto problem = problem_of([&] { wanted.emplace(state, chosen(index, options), options); });
  if (problem.empty() && !wanted->problems().empty()) problem = fmt::format("{} does not fit the state: {}", where, wanted->problems());
  everyone.agree(problem);
  check_unexpected(*wanted, everyone, where);
  check_asked(kLoad, asked_by(options, *wanted, index), everyone);
  const auto all = join_wanted(*wanted, everyone);
  const auto round_bytes = std::max<int64_t>(index.chunk_bytes, kRoundBytes / everyone.size());
  const auto plan = plan_reads(wanted->index(), all, everyone.size(), round_bytes, seen_by);
  auto& counts = World::current().local<LoadCounts>();
  counts = {};
  int64_t bytes_loaded = 0;
  problem = problem_of([&] {
    for (const auto& [name, tensor] : wanted->tensors()) {
      if (is_deferred(tensor) || (is_dtensor(tensor) && DTensor(tensor).is_absent())) continue;
      const auto local = local_to_write(tensor);
      bytes_loaded += local.numel() * static_cast<int64_t>(local.element_size());
    }
  });
  everyone.agree(problem);
  Reader reader(wanted->index(), wanted->tensors(), all, everyone);
  problem = reader.run(plan);
  counts = reader.counts();
  counts.bytes_loaded = bytes_loaded;
  everyone.agree(problem);
  everyone.agree(problem_of([&] { wanted->finish(); }));
}

LoadCounts last_load() { return World::current().local<LoadCounts>(); }

}  // namespace dtensor::checkpoints
