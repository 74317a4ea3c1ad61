// Verifiers of answers, on right, wrong and random texts; shaping of rewards and the choice of groups.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/rewards/verifiers.hpp>
#include <dtensor/rl/shaping.hpp>

#include <chrono>
#include <random>

using namespace dtensor;
using namespace dtensor::test;
using rl::Fraction;
using rl::Scores;

namespace {

constexpr Scores kTinyZero{1, 0.1, 0};

std::string as_text(const std::optional<Fraction>& x) { return x ? fmt::format("{}/{}", x->above, x->below) : "nothing"; }

// A random expression and its value in floating point, by building it.
std::pair<std::string, double> random_expression(std::mt19937& random, int depth) {
  if (depth == 0 || random() % 4 == 0) {
    const auto n = random() % 9 + 1;
    return {std::to_string(n), static_cast<double>(n)};
  }
  const auto [a, x] = random_expression(random, depth - 1);
  const auto [b, y] = random_expression(random, depth - 1);
  switch (random() % 4) {
    case 0: return {"(" + a + " + " + b + ")", x + y};
    case 1: return {"(" + a + "-" + b + ")", x - y};
    case 2: return {"(" + a + "*" + b + ")", x * y};
    default: return {"(" + a + "/ " + b + ")", x / y};
  }
}

}  // namespace

TEST_CASE("rl rewards: arithmetic is exact and bounded", "[rl]") {
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, std::string>>{{"1+2*3", "7/1"},
                                                        {"(1+2)*3", "9/1"},
                                                        {" 7 / 2 - 1/2 ", "3/1"},
                                                        {"8/3*3", "8/1"},
                                                        {"1-2-3", "-4/1"},
                                                        {"16/4/2", "2/1"},
                                                        {"-3+4", "1/1"},
                                                        {"2*-3", "-6/1"},
                                                        {"-(1+2)", "-3/1"},
                                                        {"1/3+1/6", "1/2"},
                                                        {"", "nothing"},
                                                        {"1+", "nothing"},
                                                        {"()", "nothing"},
                                                        {"(1", "nothing"},
                                                        {"1)", "nothing"},
                                                        {"1 2", "nothing"},
                                                        {"1/0", "nothing"},
                                                        {"1/(2-2)", "nothing"},
                                                        {"2**3", "nothing"},
                                                        {"1.5", "nothing"},
                                                        {"x", "nothing"},
                                                        {"1;2", "nothing"},
                                                        {"9223372036854775807", "9223372036854775807/1"},
                                                        {"9223372036854775808", "nothing"},
                                                        {"9223372036854775807+1", "nothing"},
                                                        {"9223372036854775807*9223372036854775807", "nothing"},
                                                        {"__import__('os')", "nothing"},
                                                        {std::string(31, '(') + "1" + std::string(31, ')'), "1/1"},
                                                        {std::string(32, '(') + "1" + std::string(32, ')'), "nothing"},
                                                        {std::string(40, '-') + "1", "nothing"},
                                                        {std::string(100'000, '('), "nothing"},
                                                        {std::string(100'000, '1'), "nothing"}}) {
    CHECK(as_text(rl::evaluate(text)) == expected);
  }
  std::mt19937 random(5);
  int evaluated = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto [text, value] = random_expression(random, 4);
    const auto got = rl::evaluate(text);
    if (!got) continue;  // a division by 0, or more than 256 bytes
    ++evaluated;
    CHECK(std::abs(static_cast<double>(got->above) / static_cast<double>(got->below) - value) <= 1e-9 * std::max(1.0, std::abs(value)));
  }
  CHECK(evaluated > 1500);
}

TEST_CASE("rl rewards: numbers as people write them", "[rl]") {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{{"18", "18/1"},
                                                                                       {" -1,234.50 ", "-2469/2"},
                                                                                       {"$7", "7/1"},
                                                                                       {"-$7", "-7/1"},
                                                                                       {"$-7", "-7/1"},
                                                                                       {"+3.", "3/1"},
                                                                                       {".5", "1/2"},
                                                                                       {"0.000", "0/1"},
                                                                                       {"007", "7/1"},
                                                                                       {"", "nothing"},
                                                                                       {"-", "nothing"},
                                                                                       {".", "nothing"},
                                                                                       {"1.2.3", "nothing"},
                                                                                       {"1e5", "nothing"},
                                                                                       {"--5", "nothing"},
                                                                                       {"1,", "nothing"},
                                                                                       {"5 6", "nothing"},
                                                                                       {"inf", "nothing"},
                                                                                       {"99999999999999999999", "nothing"},
                                                                                       {"1." + std::string(1000, '0'), "1/1"}}) {
    CHECK(as_text(rl::read_number(text)) == expected);
  }
}

TEST_CASE("rl rewards: the number after the marker", "[rl]") {
  const auto score = [](std::string_view text, std::string_view truth = "18") { return rl::number_score(text, truth, kTinyZero); };
  CHECK(score("She has 9 * 2 = 18.\n#### 18") == 1);
  CHECK(score("#### 18.00 dollars") == 1);
  CHECK(score("#### $18.\nmore") == 1);
  CHECK(score("#### 17\n#### 18") == 1);
  CHECK(score("#### 18\n#### 17") == 0.1);
  CHECK(score("#### 1,800", "1800") == 1);
  CHECK(score("#### -18") == 0.1);
  CHECK(score("18") == 0);
  CHECK(score("####") == 0);
  CHECK(score("#### eighteen") == 0);
  CHECK(score("") == 0);
  CHECK(score("#### 18", "many") == 0.1);
}

TEST_CASE("rl rewards: mathematics in a box", "[rl]") {
  const auto score = [](std::string_view text, std::string_view truth) { return rl::boxed_score(text, truth, kTinyZero); };
  CHECK(score("so $\\boxed{\\frac{1}{2}}$.", "\\frac12") == 1);
  CHECK(score("\\boxed{0.5}", "\\dfrac{1}{2}") == 1);
  CHECK(score("\\boxed{1/2}", "0.50") == 1);
  CHECK(score("\\boxed{-\\frac{3}{4}}", "-0.75") == 1);
  CHECK(score("\\boxed{1} and \\boxed{2}", "2") == 1);
  CHECK(score("\\boxed {5} is \\boxedup", "5") == 1);
  CHECK(score("\\boxed{12{,}345}", "12345") == 1);
  CHECK(score("\\boxed{x = 5}", "5") == 1);
  CHECK(score("\\fbox{ 10\\% }", "10") == 1);
  CHECK(score("\\boxed{5\\text{ cm}}", "5") == 1);
  CHECK(score("\\boxed{\\text{yes}}", "yes") == 1);
  CHECK(score("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})") == 1);
  CHECK(score("\\boxed{\\sqrt3}", "\\sqrt{3}") == 1);
  CHECK(score("\\boxed{\\leftarrow}", "arrow") == 0.1);
  CHECK(score("\\boxed{2}", "3") == 0.1);
  CHECK(score("\\boxed{1/0}", "1") == 0.1);
  CHECK(score("\\boxed{}", "") == 0);
  CHECK(score("\\boxed{2", "2") == 0);
  CHECK(score("\\boxed 2", "2") == 0);
  CHECK(score("2", "2") == 0);
  CHECK(!rl::same_math("", ""));
  CHECK(!rl::same_math(std::string(5000, '1'), std::string(5000, '1')));
}

TEST_CASE("rl rewards: countdown", "[rl]") {
  const auto score = [](std::string_view answer) {
    return rl::countdown_score("<think>hm</think><answer>" + std::string(answer) + "</answer>", {2, 4, 5}, 12, kTinyZero);
  };
  CHECK(score("(5 - 2) * 4") == 1);
  CHECK(score("4*(5-2)") == 1);
  CHECK(score("12") == 0.1);
  CHECK(score("2*4+5-1") == 0.1);
  CHECK(score("2+4+5") == 0.1);
  CHECK(score("(5-2)*4*2/2") == 0.1);
  CHECK(score("(5-2)*4 = 12") == 0.1);
  CHECK(score("") == 0.1);
  CHECK(rl::countdown_score("(5 - 2) * 4", {2, 4, 5}, 12, kTinyZero) == 0);
  CHECK(rl::countdown_score("<answer>1</answer> <answer>(5-2)*4</answer>", {2, 4, 5}, 12) == 1);
  CHECK(rl::countdown_score("</answer><answer>", {2, 4, 5}, 12, kTinyZero) == 0);
  CHECK(rl::countdown_score("<answer>8/3*3-0</answer>", {8, 3, 3, 0}, 8) == 1);
}

TEST_CASE("rl rewards: exact texts and forms", "[rl]") {
  CHECK(rl::exact_score(" 1234\n", "1234", kTinyZero) == 1);
  CHECK(rl::exact_score("1235", "1234", kTinyZero) == 0.1);
  CHECK(rl::exact_score(" ", "1234", kTinyZero) == 0);
  CHECK(rl::has_form("<think> a </think>\n<answer>b</answer> ", {"think", "answer"}));
  CHECK(!rl::has_form("<think>a</think> and <answer>b</answer>", {"think", "answer"}));
  CHECK(!rl::has_form("<answer>b</answer><think>a</think>", {"think", "answer"}));
  CHECK(!rl::has_form("<think><think>a</think><answer>b</answer>", {"think", "answer"}));
  CHECK(!rl::has_form("<think>a<answer>x</answer></think><answer>b</answer>", {"think", "answer"}));
  CHECK(!rl::has_form("<think>a</think><answer>b", {"think", "answer"}));
  CHECK(rl::has_form("", {}));
}

TEST_CASE("rl rewards: random texts neither throw nor take long", "[rl]") {
  std::mt19937 random(7);
  const std::vector<std::string> pieces{"\\boxed{",
                                        "\\fbox{",
                                        "{",
                                        "}",
                                        "####",
                                        " ",
                                        "-",
                                        "+",
                                        "*",
                                        "/",
                                        "(",
                                        ")",
                                        "<answer>",
                                        "</answer>",
                                        "<think>",
                                        "</think>",
                                        "\\frac",
                                        "\\sqrt",
                                        "\\left",
                                        "\\right",
                                        "\\text{",
                                        "=",
                                        "$",
                                        "%",
                                        "1",
                                        "9",
                                        "12345678901234567890",
                                        ".",
                                        ",",
                                        "x",
                                        std::string(1, '\0'),
                                        "\xff",
                                        "\xc3\xa9",
                                        "\n",
                                        "\\"};
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (auto count = random() % 40; count > 0; --count) text += pieces[random() % pieces.size()];
    std::string truth = text.substr(0, random() % (text.size() + 1));
    const auto in_range = [](double score) { return score == 0 || score == 0.1 || score == 1; };
    const bool fine = in_range(rl::number_score(text, truth, kTinyZero)) && in_range(rl::boxed_score(text, truth, kTinyZero)) &&
                      in_range(rl::countdown_score(text, {1, 9}, 10, kTinyZero)) && in_range(rl::exact_score(text, truth, kTinyZero));
    if (!fine) FAIL("a score of '" << text << "'");
    rl::has_form(text, {"think", "answer"});
    rl::evaluate(text);
    rl::math_number(text);
  }
  for (const auto& piece : pieces) {  // a megabyte of anything
    std::string text;
    while (text.size() < 1'000'000) text += piece;
    rl::number_score(text, text);
    rl::boxed_score(text, text);
    rl::countdown_score(text, {1}, 1);
    rl::exact_score(text, text);
    rl::has_form(text, {"think", "answer"});
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
}

TEST_CASE("rl rewards: answers that are too long", "[rl]") {
  const rl::OverlongOptions options{.longest = 20, .buffer = 4, .penalty = 0.5};
  const auto got = rl_row(rl::overlong_penalty(torch::tensor({0, 15, 16, 17, 18, 20, 25}), options, torch::kDouble));
  const RlRow expected{0, 0, 0, -0.125, -0.25, -0.5, -0.5};
  for (size_t i = 0; i < expected.size(); ++i) CHECK(got[i] == expected[i]);
  CHECK_NOTHROW(refuses("buffer of 21", [] { rl::overlong_penalty(torch::zeros({1}), {20, 21, 1}); }));
}

TEST_CASE("rl rewards: groups with something to learn from", "[rl]") {
  const auto groups = torch::tensor({5, 5, 8, 8, 8, 2, 9, 9}, torch::kLong);
  const auto scores = torch::tensor({1.0, 1.0, 0.0, 0.0, 1e-12, 1.0, 0.3, 0.3}, torch::kFloat);
  CHECK(rl::groups_with_signal(scores, groups).equal(torch::tensor({0, 0, 1, 1, 1, 0, 0, 0}).to(torch::kBool)));
  CHECK(rl::groups_with_signal(scores, groups, true).equal(torch::tensor({0, 0, 1, 1, 1, 1, 0, 0}).to(torch::kBool)));
  CHECK(rl::zero_variance_fraction(scores, groups) == Approx(2.0 / 3));
  CHECK(rl::zero_variance_fraction(scores.narrow(0, 5, 1), groups.narrow(0, 5, 1)) == 0);
  const auto none = torch::full({8}, std::nan(""));
  CHECK_NOTHROW(refuses("at index 0", [&] { rl::groups_with_signal(none, groups); }));
}

TEST_CASE("rl rewards: flawed answers that are right", "[rl]") {
  const auto right = torch::tensor({1, 1, 0, 0}), flawed = torch::tensor({0, 1, 1, 0});
  CHECK(rl::fapo_scores(right, flawed).equal(torch::tensor({1.0F, 0.0F, -1.0F, -1.0F})));
  CHECK(rl::fapo_scores(right, flawed, 0.5).equal(torch::tensor({1.0F, 0.5F, -1.0F, -1.0F})));
  CHECK(rl::fapo_verdict_score(-1, -1, 10) == 1);
  CHECK(rl::fapo_verdict_score(3, 5, 10) == 0.8);
  CHECK(rl::fapo_verdict_score(3, -1, 10) == -1);
  CHECK(rl::fapo_verdict_score(-1, 3, 10) == -1);
  CHECK(rl::fapo_verdict_score(10, 3, 10) == -1);
  CHECK(rl::fapo_verdict_score(-7, -1, 10) == -1);
  CHECK_NOTHROW(refuses("truth of 10 of 10", [] { rl::fapo_verdict_score(1, 10, 10); }));
  CHECK_NOTHROW(refuses("[3]", [&] { rl::fapo_scores(right, flawed.narrow(0, 0, 3)); }));
}
