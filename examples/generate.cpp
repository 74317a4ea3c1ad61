// Writes text with a model of the zoo, or with one in Hugging Face's form, on one device or cut over ranks.
//
//   generate --model llama3-debug --checkpoint run --prompt "namespace " --tokens 200 --temperature 0.8
//   generate --model Llama-3.2-1B --ranks 2 --mesh tp=2 --prompt "Once upon a time" --n 4 --stream
//
// Only the text goes to standard output. Tokens are bytes. Without --prompt it goes on with what you type, on a terminal, and else with
// what standard input of the first rank has.
#include "expert_choices.hpp"
#include "training.hpp"
#include "zoo/huggingface.hpp"
#include "zoo/zoo.hpp"

#include <ATen/Parallel.h>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/dtensor.hpp>
#include <dtensor/generate/drafters.hpp>
#include <dtensor/generate/engine.hpp>

#include <fstream>
#include <iostream>
#include <iterator>

namespace dt = dtensor;
namespace gen = dtensor::generate;

namespace {

struct TextOptions : RunOptions {
  std::string model = "llama3-debug", checkpoint, drafts = "none";
  std::vector<std::string> prompts;
  gen::Settings settings{};
  double cache_mib = 256;
  bool stream = false;
};

gen::Tokens tokens_of(const std::string& text) {
  gen::Tokens tokens;
  for (const auto c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A model, its description in Hugging Face's form if it has one, and where its weights are: nowhere, then they are drawn.
struct Chosen {
  std::function<std::shared_ptr<zoo::Model>()> make;
  std::string config, weights;
};

Chosen choose(const TextOptions& o) {
  const std::filesystem::path folder(o.model);
  if (std::filesystem::is_regular_file(folder / "config.json")) {
    const auto config = read_file(folder / "config.json");
    return {[config] { return zoo::model_from_config(config); }, config, o.checkpoint.empty() ? o.model : o.checkpoint};
  }
  const auto& entry = zoo::find(o.model);
  dt::require(entry.is_text(), "generate", "{} takes images; expected a model of text", o.model);
  return {entry.make, entry.config ? entry.config() : "", o.checkpoint};
}

// Weights of a run of examples/train, of one of its steps, or of another library's files.
void load_weights(zoo::Model& model, const Chosen& chosen, const std::string& name) {
  if (chosen.weights.empty()) return;
  const auto last = dt::last_step(chosen.weights);
  const auto index = dt::checkpoints::read_any(last ? dt::step_folder(chosen.weights, *last) : chosen.weights);
  const auto names = model.named_parameters().keys();
  const bool is_of_train = std::ranges::all_of(names, [&](const auto& each) { return index.find("model." + each); });
  try {
    if (is_of_train) {
      dt::load({{"model", model}}, index, {.partial = true, .convert = true});
    } else {
      zoo::load(model, chosen.config, index);
    }
  } catch (const dt::Error& error) {
    std::string why = error.what_without_backtrace();
    if (why.size() > 400) why = why.substr(0, 400) + " ...";
    dt::fail("generate", "the weights in {} are not those of {}; hint: --model names the model that was trained; {}", chosen.weights, name,
             why);
  }
}

bool has_dim(const std::optional<dt::DeviceMesh>& mesh, const std::string& name) {
  return mesh && std::ranges::find(mesh->names(), name) != mesh->names().end();
}

std::shared_ptr<zoo::Model> make_model(const TextOptions& o, const Chosen& chosen, const std::optional<dt::DeviceMesh>& mesh) {
  torch::manual_seed(o.seed);
  std::optional<dt::DeferredInit> deferred;
  if (mesh) deferred.emplace(*mesh);
  auto model = chosen.make();
  model->to(o.dtype == "float64" ? torch::kFloat64 : o.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat32);
  deferred.reset();
  if (mesh) {
    dt::require(!has_dim(mesh, "ep") || has_experts(*model), "generate", "ep cuts experts, and {} has none; hint: --mesh tp={}", o.model,
                mesh->size());
    dt::parallelize_module(*model, *mesh, has_dim(mesh, "tp") ? dt::automatic_plan(*model) : dt::Plan{});
    if (has_dim(mesh, "ep")) cut_experts(*model, *mesh, {});
    dt::materialize(*model);
  }
  load_weights(*model, chosen, o.model);
  return model;
}

// Writes outputs one after the other, each as it comes.
class Printer {
 public:
  Printer(int64_t outputs, bool prints) : waiting_(outputs), ended_(outputs), prints_(prints) {}

  void add(const gen::Piece& piece) {
    waiting_[piece.index] += piece.text;
    ended_[piece.index] = piece.finish != gen::Finish::unfinished;
    while (next_ < waiting_.size()) {
      if (prints_) std::cout << std::exchange(waiting_[next_], "") << std::flush;
      if (!ended_[next_]) return;
      if (prints_) std::cout << '\n' << std::flush;
      ++next_;
    }
  }

 private:
  std::vector<std::string> waiting_;
  std::vector<bool> ended_;
  const bool prints_;
  size_t next_ = 0;
};

// Says so where there was no room for all the tokens that were asked for.
void tell_if_cut(const gen::Engine& engine, const gen::Settings& settings, const gen::Output& output) {
  const auto tokens = static_cast<int64_t>(output.tokens.size()), positions = engine.runner().positions();
  if (output.finish != gen::Finish::length || tokens >= settings.max_tokens) return;
  const auto why = positions > 0 ? fmt::format("prompt and text have the {} positions of the model", positions)
                                 : "prompt and text fill the cache; hint: --cache";
  dt::detail::say("generate: a text ends after {} of {} tokens: {}\n", tokens, settings.max_tokens, why);
}

// The outputs of all prompts, which groups of ranks along dp share out.
void write_texts(gen::Engine& engine, const TextOptions& o, bool prints) {
  std::vector<gen::Tokens> prompts;
  for (const auto& prompt : o.prompts) prompts.push_back(tokens_of(prompt));
  for (const auto& completion : engine.generate(prompts, o.settings)) {
    for (const auto& output : completion.outputs) {
      if (prints) std::cout << output.text << '\n' << std::flush;
      if (prints) tell_if_cut(engine, o.settings, output);
    }
  }
}

// One prompt's outputs, on standard output of the first rank. Returns the first one's tokens.
gen::Tokens write_text(gen::Engine& engine, const TextOptions& o, const gen::Tokens& prompt, bool prints) {
  Printer printer(o.settings.n, prints);
  gen::Request request{prompt, o.settings};
  if (o.stream) request.on_piece = [&](const gen::Piece& piece) { printer.add(piece); };
  const auto completion = engine.submit(request).get();
  for (int64_t i = 0; !o.stream && i < o.settings.n; ++i) {
    const auto& output = completion.outputs[i];
    printer.add({i, -1, output.text, 0, output.finish});
  }
  for (const auto& output : completion.outputs) {
    if (prints) tell_if_cut(engine, o.settings, output);
  }
  return completion.outputs[0].tokens;
}

// What the first rank has, on every rank.
std::optional<std::string> told_to_all(const std::optional<dt::DeviceMesh>& mesh, bool is_first, const std::optional<std::string>& own) {
  auto line = own.value_or("");
  int64_t length = own ? static_cast<int64_t>(line.size()) : -1;
  if (mesh && mesh->size() > 1) {
    const dt::NoSpmd plain;
    length = dt::broadcast(torch::tensor({length}), *mesh).item<int64_t>();
    auto bytes = torch::zeros({std::max<int64_t>(length, 1)}, torch::kUInt8);
    if (is_first && length > 0) std::memcpy(bytes.data_ptr(), line.data(), line.size());
    bytes = dt::broadcast(bytes, *mesh);
    line.assign(static_cast<const char*>(bytes.data_ptr()), std::max<int64_t>(length, 0));
  }
  return length < 0 ? std::nullopt : std::optional(line);
}

// A line that the first rank reads, on every rank; nothing at the end of the input.
std::optional<std::string> read_line(const std::optional<dt::DeviceMesh>& mesh, bool is_first) {
  std::string line;
  if (is_first) dt::detail::say("> ");
  const bool has_line = is_first && std::getline(std::cin, line);
  return told_to_all(mesh, is_first, has_line ? std::optional(line) : std::nullopt);
}

// All that the first rank's standard input has, on every rank; nothing where that is a terminal.
std::optional<std::string> read_input(const std::optional<dt::DeviceMesh>& mesh, bool is_first) {
  std::optional<std::string> text;
  if (is_first && isatty(STDIN_FILENO) == 0) text.emplace(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  text = told_to_all(mesh, is_first, text);
  dt::require(!text || !text->empty(), "generate", "there is no --prompt, and nothing on standard input of the first rank");
  return text;
}

// What is typed is added to the text, and the model goes on.
void chat(gen::Engine& engine, TextOptions o, const std::optional<dt::DeviceMesh>& mesh, bool is_first) {
  o.stream = true;
  o.settings.n = 1;
  if (o.settings.stop.empty()) o.settings.stop = {"\n"};
  gen::Tokens text;
  while (const auto line = read_line(mesh, is_first)) {
    const auto typed = tokens_of(*line + "\n");
    text.insert(text.end(), typed.begin(), typed.end());
    try {
      const auto answer = write_text(engine, o, text, is_first);
      text.insert(text.end(), answer.begin(), answer.end());
    } catch (const dt::Error& error) {
      if (is_first) dt::detail::say("{}\n", error.what_without_backtrace());
      text.clear();
    }
  }
}

gen::EngineOptions engine_options(const TextOptions& o) {
  gen::EngineOptions options;
  options.cache_bytes = static_cast<int64_t>(o.cache_mib * 1048576);
  if (o.drafts == "ngram") options.drafter = std::make_shared<gen::NgramDrafter>();
  if (o.drafts == "trees") options.drafter = std::make_shared<gen::RolloutTrees>();
  return options;
}

void run(const TextOptions& o, dt::World& world) {
  std::optional<dt::DeviceMesh> mesh;
  if (!o.meshes.empty() || world.size() > 1) {
    const auto sizes = o.meshes.empty() ? std::vector<int64_t>{world.size()} : o.meshes[0].sizes;
    mesh = dt::init_device_mesh(torch::kCPU, sizes, o.meshes.empty() ? std::vector<std::string>{"tp"} : o.meshes[0].names);
  }
  std::optional<dt::Spmd> spmd;
  if (mesh) spmd.emplace(*mesh);
  const auto model = make_model(o, choose(o), mesh);
  gen::Engine engine(*model, engine_options(o));
  auto options = o;
  if (engine.runner().vocabulary() > 256) {  // tokens that are no bytes
    options.settings.allowed = [](std::span<const int64_t>, std::vector<bool>& allowed) {
      std::fill(allowed.begin() + 256, allowed.end(), false);
    };
  }
  const bool is_first = world.rank() == 0;
  if (options.prompts.empty()) {
    const auto input = read_input(mesh, is_first);
    if (!input) return chat(engine, options, mesh, is_first);
    options.prompts.push_back(*input);
  }
  if (has_dim(mesh, "dp") && !o.stream) return write_texts(engine, options, is_first);
  for (const auto& prompt : options.prompts) write_text(engine, options, tokens_of(prompt), is_first);
}

TextOptions parse_options(CLI::App& app, int argc, char** argv) {
  TextOptions o;
  auto& s = o.settings;
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_mesh_options(app, o, {"dp", "tp", "ep"});
  app.remove_option(app.get_option("--meshes"));
  app.get_option("--mesh")->description("the mesh: tp cuts the model, ep its experts, dp shares prompts out (default: tp=RANKS)");
  app.add_option("--model", o.model, "a name of the zoo, or a folder with config.json and safetensors");
  app.add_option("--checkpoint", o.checkpoint,
                 "weights: a folder of train --save, one of its steps, or another library's files (default: drawn)");
  app.add_option("--prompt", o.prompts, "what the text begins with; several: one after the other")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--tokens", s.max_tokens, "new tokens, at most")->check(positive);
  app.add_option("--n", s.n, "texts for each prompt")->check(positive);
  app.add_option("--seed", o.seed, "of the draws, which every prompt starts anew, and of the parameters where there is no checkpoint");
  app.add_option("--temperature", s.temperature, "0: always the most probable token")->check(not_negative);
  app.add_option("--top-k", s.top_k, "only so many of the most probable tokens; 0: all")->check(not_negative);
  app.add_option("--top-p", s.top_p, "only the most probable tokens, up to this probability together")->check(CLI::Range(0.0, 1.0));
  app.add_option("--min-p", s.min_p, "only tokens with this share of the largest probability")->check(CLI::Range(0.0, 1.0));
  app.add_option("--repetition-penalty", s.repetition_penalty, "above 1: tokens that were there are less probable")->check(positive);
  app.add_option("--stop", s.stop, "a text that ends the output")->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--drafts", o.drafts, "guess tokens: from the text so far, or from earlier outputs of the prompt")
      ->check(CLI::IsMember({"none", "ngram", "trees"}));
  app.add_option("--dtype", o.dtype, "of the parameters")->check(CLI::IsMember({"float32", "float64", "bfloat16"}));
  app.add_option("--cache", o.cache_mib, "MiB of keys and values, on each rank")->check(positive);
  app.add_flag("--stream", o.stream, "write tokens as they come");
  add_launch_options(app);
  for (auto* option : app.get_options()) option->capture_default_str();
  app.parse(argc, argv);
  s.seed = o.seed;
  return o;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Writes text with a model of the zoo, or with one in Hugging Face's form.");
  TextOptions o;
  try {
    o = parse_options(app, argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  at::set_num_threads(o.meshes.empty() ? at::get_num_threads() : 1);
  return launch_on(argc, argv, o.meshes, [&](dt::World& world) { run(o, world); });
} catch (const std::exception& error) {
  std::fprintf(stderr, "generate: %s\n", error.what());
  return 1;
}
