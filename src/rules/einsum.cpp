// Rules from an index structure: turns "mk,kn->mn" into every legal combination of placements.
#include <dtensor/base/error.hpp>
#include <dtensor/rules/rule.hpp>

#include "src/rules/pending.hpp"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

namespace dtensor::rules {

namespace {

constexpr int kNone = 0;          // a dim that no letter names: never sharded
constexpr int kEllipsis = 0x100;  // + position from the right of the dims that "..." stands for

using Labels = std::vector<int>;  // one per dim

struct Term {
  bool ellipsis = false;
  std::string letters;
  int summand = 0;  // terms of one summand multiply, summands add: "mn+mk,kn->mn"
};

struct Structure {
  std::vector<Term> in, out;
};

std::vector<Term> parse_terms(std::string_view text) {
  std::vector<Term> terms(1);
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ' ') continue;
    if (c == ',' || c == '+') {
      terms.push_back({false, "", terms.back().summand + (c == '+')});
    } else if (text.substr(i, 3) == "...") {
      require(!terms.back().ellipsis, "rule", "'...' occurs twice in one term of the notation '{}'", text);
      terms.back().ellipsis = true;
      i += 2;
    } else {
      terms.back().letters += c;
    }
  }
  return terms;
}

Structure parse(std::string_view notation) {
  const auto arrow = notation.find("->");
  require(arrow != std::string_view::npos, "rule", "no '->' in the notation '{}'", notation);
  return {parse_terms(notation.substr(0, arrow)), parse_terms(notation.substr(arrow + 2))};
}

int label_of(char letter) { return letter == '1' ? kNone : letter; }

// Labels of the dims of a tensor with `ndim` dims. A tensor with fewer dims than letters broadcasts: its dims are the last.
Labels labels_of(const Term& term, int64_t ndim) {
  const auto letters = static_cast<int64_t>(term.letters.size());
  Labels labels;
  for (int64_t leading = ndim - letters; leading > 0; --leading) {
    labels.push_back(term.ellipsis ? kEllipsis + static_cast<int>(leading) : kNone);
  }
  for (auto i = std::max<int64_t>(0, letters - ndim); i < letters; ++i) labels.push_back(label_of(term.letters[i]));
  return labels;
}

// What a term may not be, in an index structure.
std::string fault_of(const Term& term) {
  for (size_t i = 0; i < term.letters.size(); ++i) {
    const char c = term.letters[i];
    if (!std::isalpha(static_cast<unsigned char>(c)) && c != '1') return fmt::format("'{}' is no letter, '1' or '...'", c);
    if (c != '1' && term.letters.find(c, i + 1) != std::string::npos) return fmt::format("'{}' occurs twice in one term", c);
  }
  return {};
}

std::string fault_of(const Structure& structure, const Options& options) {
  std::string letters;  // of the operands; '.' stands for "..."
  for (const auto& term : structure.in) letters += term.letters + (term.ellipsis ? "." : "");
  const auto unknown = [&](const std::string& wanted) {
    const auto at = std::ranges::find_if(wanted, [&](char c) { return c != '1' && letters.find(c) == std::string::npos; });
    return at == wanted.end() ? std::string() : std::string(1, *at);
  };
  for (const auto* terms : {&structure.in, &structure.out}) {
    for (const auto& term : *terms) {
      if (const auto fault = fault_of(term); !fault.empty()) return fault;
    }
  }
  for (const auto& term : structure.out) {
    if (term.summand > 0) return "an output is no sum; '+' joins terms of operands";
    const auto letter = unknown(term.letters + (term.ellipsis ? "." : ""));
    if (!letter.empty()) return fmt::format("no operand has the output's '{}', so its length is unknown", letter == "." ? "..." : letter);
  }
  for (const auto& [name, listed] : {std::pair("whole", options.whole), std::pair("no_sum", options.no_sum)}) {
    if (const auto letter = unknown(listed); !letter.empty()) return fmt::format("option {} has '{}', which no operand has", name, letter);
  }
  for (const int i : options.linear) {
    if (i < 0 || i >= static_cast<int>(structure.in.size()))
      return fmt::format("option linear has {}; there are {} terms", i, structure.in.size());
  }
  return {};
}

enum class Holds { other, tensor, list };

Holds what_holds(const c10::Argument& argument) {
  bool list = false;
  const c10::Type* type = argument.type().get();
  while (type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType) {
    list |= type->kind() == c10::TypeKind::ListType;
    type = type->containedTypes()[0].get();
  }
  if (type->kind() != c10::TypeKind::TensorType) return Holds::other;
  return list ? Holds::list : Holds::tensor;
}

class Einsum final : public Rule {
 public:
  Einsum(std::string_view notation, Options options)
      : notation_(notation), structure_(parse(notation)), options_(std::move(options)) {
    const auto fault = fault_of(structure_, options_);
    require(fault.empty(), "rule", "the notation '{}' is no index structure: {}; hint: one term of letters per tensor, as in 'mk,kn->mn'",
            notation, fault);
  }

  std::string misfit(const c10::FunctionSchema& schema) const override {
    size_t in = 0, out = 0;
    for (const auto* list : {&schema.arguments(), &schema.returns()}) {
      for (const auto& argument : *list) {
        if (what_holds(argument) == Holds::list)
          return "a notation cannot speak of lists of tensors; hint: register a rules::Rule of your own";
      }
    }
    for (const auto& argument : schema.arguments()) in += !argument.is_out() && what_holds(argument) == Holds::tensor;
    for (const auto& result : schema.returns()) out += what_holds(result) == Holds::tensor;
    if (in == structure_.in.size() && out == structure_.out.size()) return {};
    return fmt::format("the notation '{}' has {} terms for {} tensor arguments and {} for {} returned tensors; hint: one term for each, "
                       "optional tensors included", notation_, structure_.in.size(), in, structure_.out.size(), out);
  }

  Candidates candidates(const Call& call, int64_t mesh_dim) const override {
    const auto view = look(call);
    Candidates result;
    if (!fits(call, view)) return result;
    for (const auto& [label, size] : view.sizes) add_sharded(call, mesh_dim, view, label, result);
    add_partial(call, mesh_dim, result);
    if (options_.multilinear && !in_backward()) reduce_whole(call, mesh_dim, result);
    for (auto& candidate : result) {  // out= operands are laid out as what is written to them
      for (size_t i = view.operands; i < call.operands.size(); ++i) candidate.in[i] = candidate.out[i - view.operands];
    }
    return result;
  }

  std::vector<Sizes> output_sizes(const Call& call) const override {
    const auto view = look(call);
    std::vector<Sizes> all;
    for (const auto& labels : view.out) {
      Sizes sizes;
      for (const int label : labels) sizes.push_back(label == kNone ? 1 : view.sizes.at(label));
      all.push_back(std::move(sizes));
    }
    return all;
  }

 private:
  struct View {
    std::vector<Labels> in, out;
    std::vector<int> summand;      // per operand
    size_t operands = 0;           // without those of out= arguments, which come last
    std::map<int, int64_t> sizes;  // of each label
  };

  // The term of each operand: terms stand for the tensor arguments of the schema, absent ones included.
  const Term& term_of(const Call& call, const Operand& operand) const {
    size_t position = 0;
    for (int i = 0; i < operand.argument; ++i) position += what_holds(call.schema.arguments()[i]) != Holds::other;
    require(position < structure_.in.size(), "rule", "{} has more tensor arguments than its notation '{}' has terms", call.schema.name(),
            notation_);
    return structure_.in[position];
  }

  View look(const Call& call) const {
    View view;
    int64_t ellipsis = 0;
    const bool known = call.schema.name().rfind("aten::", 0) == 0;  // libtorch says what it refuses in its own words
    for (const auto& operand : call.operands) {
      if (call.schema.arguments()[operand.argument].is_out()) break;
      ++view.operands;
      const auto& term = term_of(call, operand);
      const auto letters = static_cast<int64_t>(term.letters.size());
      require(known || (term.ellipsis ? operand.ndim() >= letters : operand.ndim() == letters), call.schema.name(),
              "argument {} has {} dims, but its notation '{}' gives it {}{}; hint: '...' stands for any number of dims", operand.argument,
              operand.ndim(), notation_, term.ellipsis ? "at least " : "", letters);
      view.in.push_back(labels_of(term, operand.ndim()));
      view.summand.push_back(term.summand);
      if (term.ellipsis) ellipsis = std::max<int64_t>(ellipsis, operand.ndim() - static_cast<int64_t>(term.letters.size()));
      for (int64_t d = 0; d < operand.ndim(); ++d) {
        const int label = view.in.back()[d];
        auto& size = view.sizes.emplace(label, 1).first->second;
        require(known || label == kNone || size == 1 || operand.sizes()[d] == 1 || size == operand.sizes()[d], call.schema.name(),
                "dim {} of argument {} has length {}, but the notation '{}' gives it the letter of a dim of length {}", d, operand.argument,
                operand.sizes()[d], notation_, size);
        size = size == 1 ? operand.sizes()[d] : size;
      }
    }
    view.sizes.erase(kNone);
    for (size_t i = 0; i < view.in.size(); ++i) {  // a dim of size 1 under a longer one broadcasts
      for (size_t d = 0; d < view.in[i].size(); ++d) {
        auto& label = view.in[i][d];
        if (label != kNone && call.operands[i].sizes()[d] != view.sizes[label]) label = kNone;
      }
    }
    for (const auto& term : structure_.out) {
      view.out.push_back(labels_of(term, static_cast<int64_t>(term.letters.size()) + (term.ellipsis ? ellipsis : 0)));
    }
    return view;
  }

  // False: operands broadcast in a way that the notation does not say, and some output has other dims than its letters, or one of length
  // one in place of a letter's.
  static bool fits(const Call& call, const View& view) {
    for (size_t i = 0; i < call.outputs.size() && i < view.out.size(); ++i) {
      const auto& sizes = call.outputs[i].sizes;
      const auto& labels = view.out[i];
      if (sizes.size() != labels.size()) return false;
      for (size_t d = 0; d < sizes.size(); ++d) {
        if (labels[d] != kNone && sizes[d] == 1 && view.sizes.at(labels[d]) != 1) return false;
      }
    }
    return true;
  }

  // Ways to cut the label that operands have now, and the plain one.
  static std::set<Cut> cuts(const Call& call, int64_t mesh_dim, const View& view, int label) {
    std::set<Cut> found{Cut()};
    for (size_t i = 0; i < view.operands; ++i) {
      const auto& p = call.operands[i].placements()[mesh_dim];
      if (p.is_shard() && view.in[i][p.dim] == label) found.insert(p.cut());
    }
    return found;
  }

  static int dim_of(const Labels& labels, int label) {
    const auto it = std::ranges::find(labels, label);
    return it == labels.end() ? -1 : static_cast<int>(it - labels.begin());
  }

  void add_sharded(const Call& call, int64_t mesh_dim, const View& view, int label, Candidates& result) const {
    const auto letter = static_cast<char>(label < kEllipsis ? label : '.');
    if (options_.whole.find(letter) != std::string::npos || options_.no_sum.find(letter) != std::string::npos) return;
    std::set<int> has;  // summands that the label occurs in
    for (size_t i = 0; i < view.in.size(); ++i) {
      if (std::ranges::count(view.in[i], label) > 1) return;
      if (dim_of(view.in[i], label) >= 0) has.insert(view.summand[i]);
    }
    for (const auto& cut : cuts(call, mesh_dim, view, label)) {
      Candidate candidate;
      bool summed = false;
      for (const auto& labels : view.out) {
        const int dim = dim_of(labels, label);
        summed |= dim < 0;
        candidate.out.push_back(dim < 0 ? partial() : shard(dim, cut));
      }
      for (size_t i = 0; i < view.in.size(); ++i) {
        const int dim = dim_of(view.in[i], label);
        // A sum over the label would add a summand without it once per rank.
        const bool counted_twice = summed && !has.count(view.summand[i]) && is_first_of_summand(view, i);
        candidate.in.push_back(dim >= 0 ? shard(dim, cut) : counted_twice ? partial() : replicate());
      }
      candidate.in.resize(call.operands.size());
      result.push_back(std::move(candidate));
    }
  }

  static bool is_first_of_summand(const View& view, size_t i) {
    return std::ranges::find(view.summand, view.summand[i]) - view.summand.begin() ==
           static_cast<std::ptrdiff_t>(i);
  }

  // Partial in, Partial out: one factor of every summand, for each choice of factors. Except in a backward pass, the other factors must
  // hold whole numbers: a float may be infinite, and infinity times a summand that is zero, or has another sign than the sum, is NaN.
  void add_partial(const Call& call, int64_t mesh_dim, Candidates& result) const {
    if (!options_.multilinear && options_.linear.empty()) return;
    std::set<ReduceOp> ops;
    for (const auto& operand : call.operands) {
      const auto& p = operand.placements()[mesh_dim];
      if (p.is_partial(ReduceOp::sum) || p.is_partial(ReduceOp::avg)) ops.insert(p.op);
    }
    for (const auto op : ops) {
      std::vector<Placements> choices{Placements(call.operands.size(), replicate())};
      if (options_.multilinear) {
        choices = factor_choices(call, op);
      } else {
        for (const int i : options_.linear) choices[0][i] = partial(op);
      }
      for (auto& in : choices) result.push_back({std::move(in), Placements(structure_.out.size(), partial(op))});
    }
  }

  static bool holds_whole(const Call& call, size_t operand) {
    return at::isIntegralType(call.operands[operand].layout->dtype(), /*includeBool=*/true);
  }

  std::vector<Placements> factor_choices(const Call& call, ReduceOp op) const {
    std::vector<Placements> choices{Placements(call.operands.size(), replicate())};
    std::map<int, std::vector<size_t>> factors;
    for (size_t i = 0; i < call.operands.size(); ++i) {
      if (!call.schema.arguments()[call.operands[i].argument].is_out()) factors[term_of(call, call.operands[i]).summand].push_back(i);
    }
    for (const auto& [summand, members] : factors) {
      std::vector<Placements> next;
      for (const auto& choice : choices) {
        for (const auto i : members) {
          const bool whole =
              in_backward() || std::ranges::all_of(members, [&](size_t other) { return other == i || holds_whole(call, other); });
          if (!whole) continue;
          next.push_back(choice);
          next.back()[i] = partial(op);
        }
      }
      choices = std::move(next);
    }
    return choices;
  }

  std::string notation_;
  Structure structure_;
  Options options_;
};

}  // namespace

RulePtr einsum(std::string_view notation, Options options) { return std::make_shared<Einsum>(notation, std::move(options)); }

}  // namespace dtensor::rules
