// Verifiers that run on, throw, or give no number; and options that are refused.
#include "tests/support/refuses.hpp"

#include <dtensor/rl/options.hpp>
#include <dtensor/rl/rewards/verify.hpp>

#include <atomic>

using namespace dtensor;
using namespace dtensor::test;

namespace {

// Texts say what becomes of them. Threads that are lost end when the test does.
struct SlowVerifier {
  std::shared_ptr<std::atomic<bool>> stop = std::make_shared<std::atomic<bool>>(false);
  ~SlowVerifier() { *stop = true; }

  rl::Verifier function() const {
    return [stop = stop](const std::string& text, const nlohmann::json& truth) {
      while (text == "loops" && !*stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (text == "throws") throw std::runtime_error("what it threw");
      if (text == "throws a number") throw 7;
      if (text == "no number") return rl::Verdict{.score = std::nan("")};
      return rl::Verdict{.score = text == truth.get<std::string>() ? 1.0 : 0.25, .right = text == truth.get<std::string>()};
    };
  }
};

}  // namespace

TEST_CASE("rl verify: what loops or throws scores 0 and is counted", "[rl]") {
  const SlowVerifier slow;
  for (const int64_t threads : {1, 3}) {
    rl::Verifiers verify(slow.function(), {.seconds = 0.05, .threads = threads});
    for (int round = 0; round < 3; ++round) {
      const std::vector<std::string> texts{"a", "loops", "b", "throws", "no number", "loops", "throws a number", "a"};
      const auto found = verify(texts, std::vector<nlohmann::json>(texts.size(), "a"));
      const std::vector<double> expected{1, 0, 0.25, 0, 0, 0, 0, 1};
      for (size_t i = 0; i < texts.size(); ++i) CHECK(found.verdicts[i].score == expected[i]);
      CHECK(found.late == 2);
      CHECK(found.failed == 3);
      CHECK(found.verdicts[0].right);
      CHECK_FALSE(found.verdicts[2].right);
      CHECK(found.why == "it took more than 0.05 s");
    }
  }
}

TEST_CASE("rl verify: they run beside each other and threads that are lost are bounded", "[rl]") {
  rl::Verifiers sleep(
      [](const std::string&, const nlohmann::json&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return rl::Verdict{.score = 1};
      },
      {.threads = 8});
  const auto begun = std::chrono::steady_clock::now();
  CHECK(sleep(std::vector<std::string>(16, ""), std::vector<nlohmann::json>(16)).verdicts.size() == 16);
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::milliseconds(500));  // one after the other: 800
  CHECK(sleep({}, {}).verdicts.empty());

  const SlowVerifier slow;
  rl::Verifiers verify(slow.function(), {.seconds = 0.02, .threads = 2, .most_lost = 3});
  const auto loop = [&] { verify(std::vector<std::string>(20, "loops"), std::vector<nlohmann::json>(20, "a")); };
  CHECK_NOTHROW(refuses("verifications took more than 0.02 s each and still run; expected at most 3", loop));
  CHECK_NOTHROW(refuses("2 texts and 1 truths", [&] { verify({"a", "b"}, {"a"}); }));
  CHECK_NOTHROW(refuses("got no verifier", [] { rl::Verifiers none(nullptr); }));
  CHECK_NOTHROW(refuses("0 threads", [&] { rl::Verifiers none(slow.function(), {.threads = 0}); }));
}

TEST_CASE("rl options: algorithms stand for values and what is given stays", "[rl]") {
  CHECK(rl::read_options(nlohmann::json::object()).advantage == "grpo");
  const auto dapo = rl::read_options({{"algorithm", "dapo"}, {"clip_low", 0.1}, {"prompts", 7}});
  CHECK(dapo.dynamic_sampling);
  CHECK(dapo.clip_high == 0.28);
  CHECK(dapo.clip_low == 0.1);
  CHECK(dapo.prompts == 7);
  const auto again = rl::read_options(rl::to_json(dapo));
  CHECK(rl::to_json(again) == rl::to_json(dapo));
  for (const auto& [name, values] : rl::algorithms()) CHECK_NOTHROW(rl::read_options({{"algorithm", name}}));
  CHECK(rl::read_options({{"algorithm", "vapo"}}).has_critic());
}

TEST_CASE("rl options: what makes no sense is refused in words", "[rl]") {
  using nlohmann::json;
  const std::vector<std::pair<json, const char*>> cases{
      {json::array(), "expected an object"},
      {{{"algorithm", "nosuch"}}, "expected one of [\"cispo\""},
      {{{"algorithm", 3}}, "expected a text"},
      {{{"lrr", 3}}, "there is no option 'lrr'"},
      {{{"steps", 1.5}}, "'steps' is 1.5; expected a whole number"},
      {{{"steps", 0}}, "'steps' is 0; expected 1 or more"},
      {{{"shuffle", 1}}, "expected true or false"},
      {{{"loss", "ppp"}}, "'loss' is 'ppp'; expected one of"},
      {{{"samples", 1}}, "compares the answers to a prompt, and 'samples' is 1"},
      {{{"algorithm", "ppo"}, {"dynamic_sampling", true}}, "'dynamic_sampling' keeps groups"},
      {{{"kl", "k1"}}, "has no gradient"},
      {{{"kl", "k3"}, {"kl_in", "reward"}}, "makes rewards of tokens"},
      {{{"loss", "gspo"}}, "is a mean over sequences"},
      {{{"critic_warmup", 5}}, "has no critic"},
      {{{"temperature", 0}}, "'temperature' is 0"},
      {{{"minibatches", 257}}, "at most the 256 answers"},
      {{{"save_every", 3}}, "'save' names no folder"},
      {{{"resume", true}}, "'save' names no folder"},
      {{{"loss", "kl_cov"}, {"microbatch_tokens", 100}}, "chooses tokens of a whole minibatch"},
      {{{"overlong_buffer", 300}}, "at most max_tokens"},
      {{{"advantage", "optimal_token_baseline"}, {"samples", 1}}, "compares the answers to a prompt"},
      {{{"kl_target", 0.1}}, "'kl_target' is 0.1, and 'kl' is none"},
      {{{"critic_lambda", 1}}, "has no critic"},
      {{{"length_least_lambda", 0.5}}, "and 'length_alpha' is 0"},
      {{{"gdpo_weights", {1, 2}}}, "'gdpo_weights' are given, and the advantage is 'grpo'"},
      {{{"gdpo_weights", "1"}}, "expected a list of numbers"},
      {{{"algorithm", "gdpo"}, {"flawed_penalty", 1}}, "compares kinds of scores"},
      {{{"algorithm", "gdpo"}, {"overlong_buffer", 2}}, "compares kinds of scores"},
      {{{"algorithm", "dro"}, {"dro_beta", 0}}, "'dro_beta' is 0"},
      {{{"cov_share", 2}}, "'cov_share' is 2"},
      {{{"clip_cov_least", 7}}, "'clip_cov_least' is 7"},
      {{{"dppo_divergence", "kl"}}, "'dppo_divergence' is 'kl'; expected one of"},
      {{{"seed", -1}}, "whole number, 0 or more"},
      {{{"lr", std::numeric_limits<double>::infinity()}}, "'lr' is inf; expected a finite number"},
      {{{"clip_high", std::nan("")}}, "'clip_high' is nan; expected a finite number"},
      {{{"clip_low", -1}}, "'clip_low' is -1; expected 0 or more"},
      {{{"sft_lr", -0.01}}, "'sft_lr' is -0.01"},
      {{{"sft_batch", 0}}, "'sft_batch' is 0; expected 1 or more"},
      {{{"dual_clip", 0.5}}, "'dual_clip' is 0.5; expected a number above 1, or 0"},
      {{{"gamma", 2}}, "'gamma' is 2; expected 0 to 1"},
      {{{"algorithm", "vapo"}, {"critic_lambda", 3}}, "'critic_lambda' is 3"},
      {{{"sapo_tau", 0}}, "'sapo_tau' is 0; expected a positive number"},
      {{{"correction_upper", 0}}, "'correction_upper' is 0; expected a positive number"},
      {{{"kl", "k3"}, {"kl_horizon", 0}}, "'kl_horizon' is 0; expected a positive number"},
      {{{"cp_order", "spiral"}}, "'cp_order' is 'spiral'; expected one of"},
  };
  for (const auto& [given, words] : cases) {
    CAPTURE(given.dump());
    CHECK_NOTHROW(refuses(words, [&, &given = given] { rl::read_options(given); }));
  }
}
