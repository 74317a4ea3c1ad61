// The role that scores answers by rules: each rank its share of the rows.
#pragma once

#include <dtensor/base/say.hpp>
#include <dtensor/rl/groups.hpp>
#include <dtensor/rl/rewards/verify.hpp>

#include <ATen/ops/zeros.h>

#include <utility>

#pragma GCC visibility push(default)

namespace dtensor::rl {

class Judge {
 public:
  // Verifies on all ranks of `mesh`. `kinds`: of how many parts a verdict's score consists; 0: they are not asked for.
  Judge(const DeviceMesh& mesh, Verifier verifier, const VerifyOptions& options = {}, int64_t kinds = 0)
      : group_("judge", mesh), verify_(std::move(verifier), options), kinds_(kinds) {}

  // Adds the columns "scores" (float64), "right", "flawed", "failed" and "late" (bool), [batch] each, to a batch with "texts" and "truths",
  // and with kinds "parts" (float64) [batch, kinds]. Throws for a verdict of another number of parts; those of a verifier that fails are 0.
  // `of`: the column of texts that are verified. The first failure of a rank's verifier is a line on standard error.
  void score(Batch& batch, int64_t step = -1, const std::string& of = "texts");
  WorkerGroup& group() { return group_; }

 private:
  WorkerGroup group_;
  Verifiers verify_;
  int64_t kinds_;
  bool has_said_why_ = false;
};

// -- How ------------------------------------------------------------------------------------------------------------------

namespace detail {

inline at::Tensor parts_column(const std::vector<Verdict>& verdicts, int64_t kinds) {
  auto parts = at::zeros({static_cast<int64_t>(verdicts.size()), kinds}, at::kDouble);
  auto* row = parts.data_ptr<double>();
  for (size_t i = 0; i < verdicts.size(); ++i, row += kinds) {
    if (verdicts[i].how != Verdict::How::ended) continue;
    const auto& own = verdicts[i].parts;
    require(static_cast<int64_t>(own.size()) == kinds, "rl::Judge", "a verdict has {} parts; expected {}, one for each kind of score",
            own.size(), kinds);
    std::ranges::copy(own, row);
  }
  return parts;
}

}  // namespace detail

inline void Judge::score(Batch& batch, int64_t step, const std::string& of) {
  auto mode = all_to_all();
  mode.own_results = true;
  std::vector<std::string> gives{"scores", "right", "flawed", "failed", "late"};
  if (kinds_ > 0) gives.emplace_back("parts");
  const Method method{"score", gives, mode, step};
  batch.merge(group_.run(method, batch.select({of, "truths"}), [&](const Batch& mine) {
    const NoSpmd plain;
    const auto [begin, end] = mine.own_rows();
    auto texts = mine.texts(of);
    const auto& truths = mine.objects("truths");
    const auto found = verify_({std::make_move_iterator(texts.begin() + begin), std::make_move_iterator(texts.begin() + end)},
                               {truths.begin() + begin, truths.begin() + end});
    if (found.failed > 0 && !std::exchange(has_said_why_, true)) {
      dtensor::detail::say("rl: the verifier failed for {} of {} answers on rank {}, which score 0: {}\n", found.failed,
                           found.verdicts.size(), World::current().rank(), found.why);
    }
    const auto column = [&](auto value, at::ScalarType dtype) {
      std::vector<double> values;
      for (const auto& verdict : found.verdicts) values.push_back(static_cast<double>(value(verdict)));
      return at::tensor(values, at::kDouble).to(dtype);
    };
    using How = Verdict::How;
    Batch judged{{"scores", column([](const Verdict& v) { return v.score; }, at::kDouble)},
                 {"right", column([](const Verdict& v) { return v.right; }, at::kBool)},
                 {"flawed", column([](const Verdict& v) { return v.flawed; }, at::kBool)},
                 {"failed", column([](const Verdict& v) { return v.how == How::failed; }, at::kBool)},
                 {"late", column([](const Verdict& v) { return v.how == How::late; }, at::kBool)}};
    if (kinds_ > 0) judged.set("parts", detail::parts_column(found.verdicts, kinds_));
    return judged;
  }));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
