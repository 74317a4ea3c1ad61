// Reads --ranks, --transport, --deadline and DTENSOR_DEADLINE.
#include "src/launch/options.hpp"

#include <dtensor/base/error.hpp>

#include "src/launch/environment.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

namespace dtensor::detail {

namespace {

double parse_number(const std::string& name, const std::string& text, double least) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size() && value >= least, "launch",
          "{} does not parse; got '{}'; expected a number of at least {}", name, text, least);
  return value;
}

comm::Milliseconds parse_deadline(const std::string& name, const std::string& text) {
  const double seconds = std::min(parse_number(name, text, 0.001), static_cast<double>(kLongestDeadline.count()));
  return comm::Milliseconds(static_cast<int64_t>(1000 * seconds));
}

// The value of `--name VALUE` or `--name=VALUE`; the last one counts. Everything after "--" is the program's.
std::optional<std::string> find_argument(int argc, char** argv, std::string_view name) {
  std::optional<std::string> result;
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string_view argument = argv[i];
    if (argument == name) {
      require(i + 1 < argc, "launch", "{} has no value; expected {} VALUE", name, name);
      result = argv[++i];
    } else if (argument.substr(0, name.size()) == name && argument.substr(name.size(), 1) == "=") {
      result = std::string(argument.substr(name.size() + 1));
    }
  }
  return result;
}

}  // namespace

LaunchOptions parse_options(int argc, char** argv) {
  LaunchOptions options;
  auto seconds = read_environment("DTENSOR_DEADLINE");
  if (seconds) options.deadline = parse_deadline("DTENSOR_DEADLINE", *seconds);
  seconds = find_argument(argc, argv, "--deadline");
  if (seconds) options.deadline = parse_deadline("--deadline", *seconds);
  if (auto ranks = find_argument(argc, argv, "--ranks")) {
    const double count = parse_number("--ranks", *ranks, 1);
    constexpr double kMost = std::numeric_limits<int>::max();
    require(count <= kMost && count == std::floor(count), "launch",
            "--ranks does not parse; got '{}'; expected a whole number of at most {}", *ranks, static_cast<int>(kMost));
    options.ranks = static_cast<int>(count);
  }
  options.transport = find_argument(argc, argv, "--transport").value_or("");
  return options;
}

}  // namespace dtensor::detail
