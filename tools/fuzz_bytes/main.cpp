// fuzz-bytes: gives the readers of files, messages and texts what nobody would write.
#include "tools/fuzz_bytes/runner.hpp"

#include <dtensor/base/error_text.hpp>
#include <dtensor/base/say.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include <unistd.h>

namespace dtensor::fuzz_bytes {

const std::string& scratch() {
  static const std::string folder = [] {
    auto name = (std::filesystem::temp_directory_path() / "fuzz-bytes-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::system_error(errno, std::generic_category(), name);
    return name;
  }();
  return folder;
}

void write_bytes(const std::string& file, std::string_view bytes) {
  std::ofstream out(file, std::ios::binary);
  if (!out.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush())
    throw std::system_error(errno, std::generic_category(), file);
}

std::string read_bytes(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw std::system_error(errno, std::generic_category(), file);
  return {std::istreambuf_iterator<char>(in), {}};
}

namespace {

// Removes the folder when the run ends, and not when a child does.
struct Scratch {
  Scratch() { scratch(); }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(scratch(), ignored);
  }
};

// Whether what a wrong reader does is found, each kind of it.
bool finds_faults(RunOptions options) {
  options.runs = 200;
  options.folder = scratch();
  const auto wrong = wrong_target();
  return run(wrong, options).kinds == 4;
}

int run_all(const std::vector<const Target*>& chosen, RunOptions options) {
  options.seconds /= static_cast<double>(chosen.size());
  Tally sum;
  for (const auto* target : chosen) {
    const auto tally = run(*target, options);
    fmt::print("{:16} {:7} inputs: {} read, {} refused, {} faults\n", target->name, tally.read + tally.refused + tally.faults, tally.read,
               tally.refused, tally.faults);
    std::fflush(stdout);
    sum.read += tally.read, sum.refused += tally.refused, sum.faults += tally.faults;
  }
  fmt::print("{} targets, {} inputs: {} read, {} refused, {} faults\n", chosen.size(), sum.read + sum.refused + sum.faults, sum.read,
             sum.refused, sum.faults);
  return sum.faults > 0 ? 1 : 0;
}

int main(int argc, char** argv) {
  CLI::App app(
      "Feeds the readers of files, messages and texts that others wrote with valid inputs that were changed at random. A reader may read\n"
      "them or refuse them with an error. A crash, a hang, an allocation of gigabytes or an exception of another type is a fault: it is\n"
      "printed, and its input is saved. The exit status is 1 if there was one.");
  std::vector<std::string> names;
  std::string file;
  RunOptions options;
  bool list = false, self_test = false;
  app.add_option("target", names, "which readers (default: all)");
  app.add_option("--seed", options.seed, "of the changes")->capture_default_str();
  auto* runs = app.add_option("--runs", options.runs, "inputs for each target")->check(CLI::PositiveNumber)->capture_default_str();
  auto* seconds = app.add_option("--seconds", options.seconds, "for all targets together")->check(CLI::PositiveNumber);
  app.add_option("--file", file, "give the target this input alone")->check(CLI::ExistingFile);
  app.add_option("--save", options.folder, "folder for the inputs of faults")->check(CLI::ExistingDirectory)->capture_default_str();
  app.add_flag("--self-test", self_test, "give them to a reader that is wrong: all that it does must be found");
  app.add_flag("--list", list, "print the targets");
  std::vector<const Target*> chosen;
  try {
    app.parse(argc, argv);
    for (const auto& target : targets()) {
      if (names.empty() || std::ranges::count(names, target.name)) chosen.push_back(&target);
    }
    for (const auto& name : names) {
      if (std::ranges::none_of(targets(), [&](const auto& target) { return target.name == name; }))
        throw CLI::ValidationError("target", fmt::format("there is no '{}'; --list prints them", name));
    }
    if (!file.empty() && chosen.size() != 1) throw CLI::ValidationError("--file", "needs the name of one target");
  } catch (const CLI::ParseError& error) { return app.exit(error); }
  if (list) {
    for (const auto& target : targets()) fmt::print("{:16} {}\n", target.name, target.what);
    return 0;
  }
  if (*seconds && !*runs) options.runs = std::numeric_limits<int64_t>::max();
  const Scratch folder;
  try {
    if (self_test) return finds_faults(options) ? 0 : 1;
    return file.empty() ? run_all(chosen, options) : run_file(*chosen.front(), file) ? 0 : 1;
  } catch (...) {
    dtensor::detail::say("error: {}\n", dtensor::detail::text_of(std::current_exception()));
    return 2;
  }
}

}  // namespace

}  // namespace dtensor::fuzz_bytes

int main(int argc, char** argv) { return dtensor::fuzz_bytes::main(argc, argv); }
