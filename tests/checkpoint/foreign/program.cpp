// What tests/checkpoint/foreign.sh runs: foreign-files COMMAND ARGUMENT...
//
//   convert huggingface|torch|dcp FROM TO   reads any checkpoint and writes it in another form
//   values PATH                             prints the values of a checkpoint, one a line, and what was skipped
//   logits FOLDER INPUT TO                  a model of Hugging Face's folder: its output for the tensor "input" of a file
//   zoo MODEL INPUT TO                      a model of the zoo, drawn: exported to TO/model, its output for "input" to TO/output
#include "examples/zoo/huggingface.hpp"
#include "examples/zoo/zoo.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <ATen/Context.h>
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

namespace ck = dtensor::checkpoints;

std::string text_in(const std::string& path) {
  std::ifstream file(path);
  dtensor::require(static_cast<bool>(file), "foreign-files", "'{}' cannot be opened", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_output(zoo::Model& model, const std::string& input, const std::string& to) {
  torch::NoGradGuard no_grad;
  model.eval();
  ck::write_huggingface(to, ck::source_of({{"output", model.forward(ck::read_tensor(ck::read_any(input), "input"))}}));
}

void convert(const std::string& form, const std::string& from, const std::string& to) {
  const auto source = ck::source_of(ck::read_any(from));
  if (form == "huggingface") ck::write_huggingface(to, source, {.file_bytes = 2000});
  else if (form == "torch") ck::write_torch_file(to, source);
  else ck::write_dcp(to, source);
}

void values(const std::string& path) {
  const auto index = ck::read_any(path);
  for (const auto& [name, value] : index.values) fmt::print("{} = {}\n", name, ck::text_of(value));
  for (const auto& [name, other] : index.same_as) fmt::print("{} is {}\n", name, other);
  const auto skipped = index.writer.find("skipped");
  if (skipped != index.writer.end()) fmt::print("skipped {}\n", skipped->second);
}

void logits(const std::string& folder, const std::string& input, const std::string& to) {
  const auto config = text_in(folder + "/config.json");
  const auto model = zoo::model_from_config(config);
  zoo::load(*model, config, ck::read_huggingface(folder));
  write_output(*model, input, to);
}

void draw(const std::string& name, const std::string& input, const std::string& to) {
  torch::manual_seed(5);
  const auto& entry = zoo::find(name);
  const auto model = entry.make();
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.add_(torch::randn_like(parameter), 0.05);  // none is zero
  const auto config = entry.config();
  std::filesystem::create_directories(to);
  ck::write_huggingface(to + "/model", zoo::to_huggingface(config, zoo::source_of(*model)), {.config = config});
  write_output(*model, input, to + "/output");
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto is = [&](const char* command, size_t count) { return arguments.size() == count + 1 && arguments[0] == command; };
  if (is("convert", 3)) convert(arguments[1], arguments[2], arguments[3]);
  else if (is("values", 1)) values(arguments[1]);
  else if (is("logits", 3)) logits(arguments[1], arguments[2], arguments[3]);
  else if (is("zoo", 3)) draw(arguments[1], arguments[2], arguments[3]);
  else return 2;
} catch (const c10::Error& error) {
  fmt::print("{}\n", error.what_without_backtrace());
  return 1;
}
