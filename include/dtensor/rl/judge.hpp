// The role that scores answers by rules: each rank its share of the rows.
#pragma once

#include <dtensor/rl/groups.hpp>
#include <dtensor/rl/rewards/verify.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

class Judge {
 public:
  // Verifies on all ranks of `mesh`.
  Judge(const DeviceMesh& mesh, Verifier verifier, const VerifyOptions& options = {})
      : group_("judge", mesh), verify_(std::move(verifier), options) {}

  // Adds the columns "scores" (float64), "right", "flawed", "failed" and "late" (bool), [batch] each, to a batch with "texts" and "truths".
  void score(Batch& batch, int64_t step = -1);
  WorkerGroup& group() { return group_; }

 private:
  WorkerGroup group_;
  Verifiers verify_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

inline void Judge::score(Batch& batch, int64_t step) {
  auto mode = all_to_all();
  mode.own_results = true;
  const Method method{"score", {"scores", "right", "flawed", "failed", "late"}, mode, step};
  batch.merge(group_.run(method, batch.select({"texts", "truths"}), [&](const Batch& mine) {
    const NoSpmd plain;
    const auto [begin, end] = mine.own_rows();
    const auto texts = mine.texts("texts");
    const auto& truths = mine.objects("truths");
    const auto found = verify_({texts.begin() + begin, texts.begin() + end}, {truths.begin() + begin, truths.begin() + end});
    const auto column = [&](auto value, at::ScalarType dtype) {
      std::vector<double> values;
      for (const auto& verdict : found.verdicts) values.push_back(static_cast<double>(value(verdict)));
      return at::tensor(values, at::kDouble).to(dtype);
    };
    using How = Verdict::How;
    return Batch{{"scores", column([](const Verdict& v) { return v.score; }, at::kDouble)},
                 {"right", column([](const Verdict& v) { return v.right; }, at::kBool)},
                 {"flawed", column([](const Verdict& v) { return v.flawed; }, at::kBool)},
                 {"failed", column([](const Verdict& v) { return v.how == How::failed; }, at::kBool)},
                 {"late", column([](const Verdict& v) { return v.how == How::late; }, at::kBool)}};
  }));
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
