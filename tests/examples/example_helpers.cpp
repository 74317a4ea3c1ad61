// The parts of the training example that need no ranks: mesh option, batches, log, plot.
#include "catch.hpp"

#include <examples/log.hpp>
#include <examples/loss_plot.hpp>
#include <examples/mesh_option.hpp>
#include <examples/text_data.hpp>

#include <unistd.h>

#include <sstream>

namespace {

// A file that is gone when the test ends.
struct TempFile {
  std::string path = std::filesystem::temp_directory_path() / ("dtensor_example_" + std::to_string(getpid()));
  TempFile() = default;
  explicit TempFile(const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  ~TempFile() { std::filesystem::remove(path); }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
};

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (auto at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

// What the exception says that `body` throws; empty when it throws none.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

const std::vector<std::string> kNames = {"dp", "sp", "tp"};

}  // namespace

TEST_CASE("a mesh is read from the command line", "[example]") {
  const auto mesh = parse_mesh("dp=2,tp=16", kNames);
  REQUIRE(mesh.text == "dp=2,tp=16");
  REQUIRE(mesh.names == std::vector<std::string>{"dp", "tp"});
  REQUIRE(mesh.sizes == std::vector<int64_t>{2, 16});

  const auto meshes = parse_meshes("dp=4;sp=1,tp=4", kNames);
  REQUIRE(meshes.size() == 2);
  REQUIRE(meshes[1].sizes == std::vector<int64_t>{1, 4});
}

TEST_CASE("a mesh that cannot be read says why and what was expected", "[example]") {
  const std::pair<std::string, std::string> cases[] = {
      {"", "has no '='"},
      {"dp", "has no '='"},
      {"dp=2,", "has no '='"},
      {"dp=0", "less than 1"},
      {"dp=-2", "less than 1"},
      {"dp=", "not a whole number"},
      {"dp=2x", "not a whole number"},
      {"dp=2.5", "not a whole number"},
      {"dp=99999999999999999999", "not a whole number"},
      {"dp=2;tp=2", "not a whole number"},
      {"dp=2,dp=2", "repeated"},
      {"pp=2", "unknown dimension"},
      {"=2", "unknown dimension"}};
  for (const auto& [text, reason] : cases) {
    CAPTURE(text);
    const auto message = error_of([&] { parse_mesh(text, kNames); });
    REQUIRE(has(message, reason));
    REQUIRE(has(message, "like dp=2,tp=2, with the names dp sp tp"));
  }
}

TEST_CASE("a batch is a function of seed and step", "[example]") {
  std::string bytes;
  for (int i = 0; i < 5000; ++i) bytes += static_cast<char>(i * 7 % 251);
  const TempFile file(bytes);
  const TextData text(file.path);
  REQUIRE(text.size() == bytes.size());

  const auto [input, target] = text.batch(1, 3, 4, 16);
  REQUIRE(input.sizes() == c10::IntArrayRef{4, 16});
  REQUIRE(input.scalar_type() == torch::kInt64);
  REQUIRE(input.slice(1, 1).equal(target.slice(1, 0, 15)));
  REQUIRE((input.add(7).remainder(251)).equal(target));  // what follows each byte in this text
  REQUIRE(TextData(file.path).batch(1, 3, 4, 16).first.equal(input));
  REQUIRE_FALSE(text.batch(1, 4, 4, 16).first.equal(input));
  REQUIRE_FALSE(text.batch(2, 3, 4, 16).first.equal(input));
  REQUIRE_FALSE(input[0].equal(input[1]));
}

TEST_CASE("all of a short text is used and one too short is refused", "[example]") {
  const TempFile file("abcde");
  const TextData text(file.path);
  const auto [input, target] = text.batch(0, 0, 2, 4);
  REQUIRE(input[1].equal(torch::tensor({97, 98, 99, 100}, torch::kInt64)));
  REQUIRE(target[1][3].item<int64_t>() == 101);
  REQUIRE(has(error_of([&] { text.batch(0, 0, 2, 5); }), "has 5 bytes, but a sequence needs 6"));
  REQUIRE(has(error_of([&] { TextData(file.path + ".gone"); }), ".gone': it is missing"));
}

TEST_CASE("libtorch's headers are there to train on", "[example]") {
  REQUIRE(TextData("").size() > 5'000'000);
}

TEST_CASE("a log has one object a step to the last bit", "[example]") {
  const TempFile file;
  {
    StepLog log(file.path);
    log.begin("dp=2", 1);
    log.add({0, 0.1 + 0.2, 2.5, 1e-3, 12.5, 800});
  }
  const auto line = nlohmann::json::parse(file.read());
  REQUIRE(line["mesh"] == "dp=2");
  REQUIRE(line["step"] == 0);
  REQUIRE(line["loss"].get<double>() == 0.1 + 0.2);
  REQUIRE(line["tokens_per_s"] == 800);
  REQUIRE(has(error_of([&] { StepLog("/nonexistent/run.jsonl").add({}); }), "/nonexistent/run.jsonl"));
}

TEST_CASE("the difference of two curves never hides a bad loss", "[example]") {
  const Curve reference{"one device", {4, 2}};
  REQUIRE(relative_difference({"a", {4, 2}}, reference) == 0);
  REQUIRE(relative_difference({"a", {4, 2.5}}, reference) == 0.25);
  REQUIRE(std::isinf(relative_difference({"a", {NAN, 2}}, reference)));
  REQUIRE(std::isinf(relative_difference({"a", {4}}, reference)));
}

TEST_CASE("a picture has a line per run in each panel and gaps for losses that are not finite", "[example]") {
  const TempFile file;
  const std::vector<Curve> curves = {
      {"dp=2 <&>", {5, 4, NAN, 3}}, {"tp=2", {5, 4, 3.5, 3}}, {"one device", {5, 4.1, 3.5, 3}}};
  write_loss_plot(file.path, curves, &curves.back());
  const auto svg = file.read();
  REQUIRE(svg.find("<svg xmlns=") == 0);
  REQUIRE(has(svg, "dp=2 &lt;&amp;&gt;"));
  REQUIRE_FALSE(has(svg, "nan"));
  REQUIRE_FALSE(has(svg, "inf"));
  REQUIRE(count(svg, "<path") == 3 + 3 + 2);  // legend, losses, differences
  write_loss_plot(file.path, {curves[0]}, nullptr);
  REQUIRE(count(file.read(), "<path") == 1 + 1);
  REQUIRE(has(error_of([&] { write_loss_plot("/nonexistent/a.svg", curves, nullptr); }), "/nonexistent/a.svg"));
}
