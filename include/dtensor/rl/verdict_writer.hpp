// A generative reward model: a model that reads an answer and writes a verdict, which a verifier reads.
//
//   rl::VerdictWriter<Llama> writer(mesh, make, plan, engine, {.ask = ask, .settings = {.temperature = 0, .max_tokens = 64}});
//   writer.write(batch);                             // the column "verdicts"
//   judge.score(batch, step, "verdicts");            // by rl::WordVerifier({{"right", 1}, {"wrong", 0}}), say
#pragma once

#include <dtensor/generate/engine.hpp>
#include <dtensor/rl/batch.hpp>
#include <dtensor/rl/groups.hpp>
#include <dtensor/rl/rewards/verify.hpp>

#pragma GCC visibility push(default)

namespace dtensor::rl {

struct VerdictOptions {
  // What the model is asked about an answer, given the tokens of its prompt and its own. The same on every rank; calls come on all ranks of
  // the writer.
  std::function<generate::Tokens(const generate::Tokens& prompt, const generate::Tokens& answer, const nlohmann::json& truth)> ask{};
  generate::Settings settings{.temperature = 0};
};

template <class Model>
class VerdictWriter {
 public:
  // `make` gives the module with the weights that it keeps, the same on all ranks; it is laid out by the plan.
  VerdictWriter(const DeviceMesh& mesh, const std::function<std::shared_ptr<Model>()>& make, const Plan& plan,
                const generate::EngineOptions& engine, VerdictOptions options);

  // Adds the column "verdicts", texts, to a batch of rollout(). Every rank calls it; the writer's ranks have the whole batch then.
  void write(Batch& batch, int64_t step = -1);
  WorkerGroup& group() { return group_; }

 private:
  std::shared_ptr<Model> model_;
  WorkerGroup group_;
  std::unique_ptr<generate::Engine> engine_;
  const VerdictOptions options_;
};

// Reads the word of a verdict that stands last in it, and gives that word's score; 0 where there is none. Right: a score above 0.
class WordVerifier {
 public:
  explicit WordVerifier(std::map<std::string, double> words) : words_(std::move(words)) {}
  Verdict operator()(const std::string& text, const nlohmann::json& truth) const;

 private:
  std::map<std::string, double> words_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

template <class Model>
VerdictWriter<Model>::VerdictWriter(const DeviceMesh& mesh, const std::function<std::shared_ptr<Model>()>& make, const Plan& plan,
                                    const generate::EngineOptions& engine, VerdictOptions options)
    : group_(
          "verdicts", mesh, [&] { return model_ = make(); }, plan),
      options_(std::move(options)) {
  require(options_.ask != nullptr, "rl::VerdictWriter", "got no `ask`; expected a function that makes a prompt of an answer");
  if (mesh.contains_this_rank()) engine_ = on(mesh, [&] { return std::make_unique<generate::Engine>(*model_, engine); });
}

template <class Model>
void VerdictWriter<Model>::write(Batch& batch, int64_t step) {
  const auto lengths = batch.meta().at("lengths").template get<std::vector<int64_t>>();
  const auto prompts = batch.meta().at("prompt_lengths").template get<std::vector<int64_t>>();
  batch.merge(group_.run({"write", {"verdicts"}, one_to_all(), step}, batch.select({"ids", "truths"}), [&](const Batch& mine) {
    const auto ids = full_tensor(mine.get("ids"));
    const auto& truths = mine.objects("truths");
    const NoSpmd plain;
    std::vector<generate::Request> requests;
    for (int64_t row = 0; row < mine.size(); ++row) {
      const auto own = ids[row].contiguous();
      const auto* tokens = own.template data_ptr<int64_t>();
      requests.push_back(
          {options_.ask({tokens, tokens + prompts[row]}, {tokens + prompts[row], tokens + lengths[row]}, truths[row]), options_.settings});
    }
    std::vector<std::string> verdicts;
    for (const auto& completion : engine_->generate(requests)) verdicts.push_back(completion.outputs[0].text);
    return Batch{{"verdicts", verdicts}};
  }));
}

inline Verdict WordVerifier::operator()(const std::string& text, const nlohmann::json&) const {
  Verdict verdict;
  size_t last = 0, longest = 0;
  for (const auto& [word, score] : words_) {
    const auto found = text.rfind(word);
    if (word.empty() || found == std::string::npos) continue;
    const auto end = found + word.size();
    if (end < last || (end == last && word.size() < longest)) continue;  // "right" ends "not right" too: the longer one is meant
    last = end, longest = word.size();
    verdict.score = score;
  }
  verdict.right = verdict.score > 0;
  return verdict;
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
