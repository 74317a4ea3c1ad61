#include "tools/opcheck/examine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

namespace dtensor::opcheck {

namespace {

using Json = nlohmann::json;

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kLong, at::kBool};

bool is_replicated(const Case& placements) {
  return std::ranges::all_of(placements, [](const auto& ps) {
    return std::ranges::all_of(ps, [](const auto& p) { return p.is_replicate(); });
  });
}

std::string place_of(const Sample& sample, c10::IntArrayRef mesh, const Case& placements) {
  std::string ranks;
  for (const auto size : mesh) ranks += (ranks.empty() ? "" : "x") + std::to_string(size);
  return fmt::format("{} ({}), {} on {} ranks", sample.text, c10::toString(sample.dtype), str(placements), ranks);
}

class Examination {
 public:
  Examination(const Operator& op, const Effort& effort) : op_(op), effort_(effort) {}

  Json run(const std::function<void(const Json&)>& tell) {
    tell_ = tell;
    tell(found("sampling"));
    auto plan = all_samples();
    tell(found("checking"));
    for (auto& [sample, how] : plan) {
      (this->*how)(std::move(sample));
      tell(found("checking"));
    }
    tell(found("missed"));
    for (const auto& [sample, cases, outcomes] : thorough_) {
      tell({{"trying", sample.text}});
      if (effort_.missed) find_missed(sample, cases, outcomes);
    }
    return found("done");
  }

 private:
  using Planned = std::pair<Sample, void (Examination::*)(Sample)>;

  struct Thorough {
    Sample sample;
    std::vector<Case> cases;
    std::vector<Outcome> outcomes;  // on 3 ranks
  };

  Json found(const char* stage) const {
    return {{"name", op_.name}, {"family", op_.family}, {"why", op_.why}, {"samples", samples_}, {"cases", cases_},
            {"refused", refused_}, {"wrong", wrong_}, {"missed", missed_}, {"rows", rows_}, {"left_out", left_out_}, {"stage", stage}};
  }

  // An out= form is the functional form and a copy.
  size_t most_cases() const { return is_out_form(op_.schema()) ? effort_.cases / 5 : effort_.cases; }

  // The samples, each with how it is checked: all cases for the first dtype that the operator takes.
  std::vector<Planned> all_samples() {
    Attempt attempt;
    attempt.begin = [&](const std::string& what) {
      if (effort_.crashing.count(what)) return false;
      tell_({{"trying", what}});
      return true;
    };
    attempt.leave_out = [&](const std::string& what) { left_out_.push_back(what); };
    std::vector<Planned> plan;
    std::vector<std::string> texts;
    for (const auto dtype : kDtypes) {
      const bool first = plan.empty();
      for (auto& sample : samples_of(op_, dtype, attempt)) {
        if (std::ranges::find(texts, sample.text) == texts.end()) texts.push_back(sample.text);
        plan.emplace_back(std::move(sample), first ? &Examination::thoroughly : &Examination::briefly);
      }
      if (!plan.empty() && effort_.quick) break;
    }
    for (auto& sample : widened_samples(op_, texts, effort_.widened, attempt)) plan.emplace_back(std::move(sample), &Examination::widely);
    samples_ = static_cast<int64_t>(plan.size());
    return plan;
  }

  void thoroughly(Sample sample) {
    if (const auto names = written_unsaid(op_, sample); !names.empty()) {
      wrong_.push_back({{"case", sample.text}, {"message", "writes " + names + ", which src/dispatch/op_info.cpp does not say"}});
    }
    const bool partials = has_partials(sample);
    auto cases = cases_1d(sample, most_cases(), partials);
    std::vector<Outcome> on_three;
    for (const int64_t ranks : {2, 3, 4}) {
      if (effort_.quick && ranks != 3) continue;
      auto outcomes = checked(sample, cases, {ranks});
      if (ranks == 3) on_three = std::move(outcomes);
    }
    if (!effort_.quick) checked(sample, cases_drawn(sample, effort_.drawn, partials, 2), {2, 2});
    thorough_.push_back({std::move(sample), std::move(cases), std::move(on_three)});
  }

  void briefly(Sample sample) { checked(sample, cases_1d(sample, effort_.quick ? 24 : most_cases(), has_partials(sample)), {3}); }

  // On 4 ranks most lengths leave some rank nothing.
  void widely(Sample sample) {
    checked(sample, cases_drawn(sample, most_cases() / 5 + 1, has_partials(sample), 1), {4});
    if (!effort_.quick) checked(sample, cases_drawn(sample, effort_.drawn / 4, has_partials(sample), 2), {2, 2});
  }

  // Of random operators parts are not summed: rounding changes how many numbers are drawn.
  // Gradients stay pending through what the forward call saved, also where that is infinite: a known limit (docs/placements.md).
  bool has_partials(const Sample& sample) const {
    const bool derivative = op_.base.find("backward") != std::string::npos;
    return !asks_exact_bits(op_) && sample.dtype != at::kBFloat16 && !(derivative && has_infinities(sample));
  }

  static bool has_infinities(const Sample& sample) {
    const auto operands = tensors_in(sample.arguments);
    return std::ranges::any_of(operands, [](const at::Tensor& operand) {
      return operand.is_floating_point() && !operand.isfinite().all().item<bool>();
    });
  }

  std::vector<Outcome> checked(const Sample& sample, const std::vector<Case>& cases, const std::vector<int64_t>& mesh) {
    tell_({{"trying", place_of(sample, mesh, {})}});
    auto outcomes = check(op_, sample, cases, mesh);
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const auto verdict = outcomes[i].verdict;
      cases_ += verdict != Verdict::skipped;
      refused_ += verdict == Verdict::refused;
      if (verdict == Verdict::wrong && wrong_.size() < 40) {
        wrong_.push_back({{"case", place_of(sample, mesh, cases[i])}, {"message", outcomes[i].message.substr(0, 600)}});
      }
    }
    return outcomes;
  }

  // The truth is asked on 2, 3 and 4 ranks: what is legal on all is legal.
  void find_missed(const Sample& sample, const std::vector<Case>& cases, const std::vector<Outcome>& outcomes) {
    const bool out_form = is_out_form(op_.schema());  // misses what its functional form does
    const bool fair = !sample.by_chance && !is_random(op_) && !is_uninitialized(op_) && op_.has_rule() && !out_form;
    const auto operands = tensors_in(sample.arguments);
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto& outcome = outcomes[i];
      if (outcome.verdict == Verdict::skipped) continue;
      bool possible = !is_replicated(cases[i]);
      for (size_t k = 0; k < operands.size(); ++k) {
        for (const int64_t ranks : {2, 3, 4}) possible = possible && fits(operands[k], cases[i][k], {ranks});
        // The raw operator may read anything where parts of an index point.
        const bool index = operands[k].scalar_type() == at::kLong && sample.dtype != at::kLong;
        if (index && cases[i][k][0].is_partial()) possible = false;
      }
      const bool moved = outcome.collectives > 0 || outcome.verdict == Verdict::refused;
      const auto legal = fair && possible && (moved || effort_.table) ? legal_on_all(sample, cases[i]) : std::string();
      if (!legal.empty() && moved && seen_.insert(str(cases[i]) + legal).second) {
        missed_.push_back({{"sample", sample.text}, {"placements", str(cases[i])}, {"legal", legal},
                           {"reason", reason_for(op_.base, str(cases[i]), legal)}});
      }
      if (effort_.table) {
        rows_.push_back({{"sample", sample.text},
                         {"placements", str(cases[i])},
                         {"results", outcome.results},
                         {"collectives", outcome.collectives},
                         {"legal", legal},
                         {"verdict", outcome.verdict == Verdict::wrong     ? "WRONG"
                                     : outcome.verdict == Verdict::refused ? "refused"
                                                                           : "right"}});
      }
    }
  }

  // Legal for these values, for others, and for every sample of the same shapes.
  std::string legal_on_all(const Sample& sample, const Case& placements) {
    const auto legal = legal_results(op_, sample, placements, {2, 3, 4});
    if (legal.empty()) return legal;
    for (const auto& other : alike(sample)) {
      if (legal_results(op_, other, placements, {2, 3, 4}) != legal) return "";
    }
    return legal;
  }

  // "self=[5,3]u dim=1" -> "self=[5,3] dim=1"
  static std::string without_marks(const std::string& text) { return std::regex_replace(text, std::regex(R"(\][+?a-z]+)"), "]"); }

  const std::vector<Sample>& alike(const Sample& sample) {
    auto& found = alike_[sample.text];
    if (!found.empty()) return found;
    for (auto& other : samples_of(op_, sample.dtype)) {
      if (auto again = drawn_again(op_, other); again && other.text == sample.text) found.push_back(std::move(*again));
      if (other.text != sample.text && without_marks(other.text) == without_marks(sample.text)) found.push_back(std::move(other));
    }
    return found;
  }

  const Operator& op_;
  const Effort& effort_;
  std::function<void(const Json&)> tell_;
  std::vector<Thorough> thorough_;
  std::map<std::string, std::vector<Sample>> alike_;
  int64_t samples_ = 0, cases_ = 0, refused_ = 0;
  Json wrong_ = Json::array(), missed_ = Json::array(), rows_ = Json::array(), left_out_ = Json::array();
  std::set<std::string> seen_;
};

}  // namespace

Json examine(const Operator& op, const Effort& effort, const std::function<void(const Json&)>& tell) {
  return Examination(op, effort).run(tell);
}

}  // namespace dtensor::opcheck
