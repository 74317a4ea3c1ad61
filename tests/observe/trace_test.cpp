// Traces of ranks that are threads: complete, in order, and what CommDebugMode counts.
#include <dtensor/dtensor.hpp>

#include "src/observe/clocks.hpp"
#include "src/observe/spans.hpp"

#include <nlohmann/json.hpp>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include <unistd.h>

#include "tests/catch.hpp"  // last: libtorch's logging has a CHECK of its own

namespace {

dtensor::LaunchOptions traced_ranks(int ranks) {
  dtensor::LaunchOptions options;
  options.ranks = ranks;
  return options;
}

std::string file_for(const std::string& name) {
  return (std::filesystem::temp_directory_path() / (name + "-" + std::to_string(getpid()) + ".json")).string();
}

nlohmann::json read_trace(const std::string& file) {
  std::ifstream in(file);
  auto trace = nlohmann::json::parse(in);
  std::filesystem::remove(file);
  return trace.at("traceEvents");
}

// Two linear layers cut in a pair, and the batch too.
void train_traced(dtensor::World& world, const std::string& file, std::map<int, std::pair<int64_t, int64_t>>& counted, std::mutex& mutex,
                  const dtensor::TraceOptions& options) {
  auto mesh = dtensor::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
  dtensor::Spmd spmd(mesh);
  torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 8));
  dtensor::parallelize_module(*model, mesh, {{"0.*", {{"tp", dtensor::shard(0)}}}, {"2.weight", {{"tp", dtensor::shard(1)}}}});
  torch::optim::SGD optimizer(model->parameters(), 1e-2);
  dtensor::Trace trace(file, options);
  dtensor::CommDebugMode counts;
  for (int step = 0; step < 3; ++step) {
    const dtensor::Scope scope("step");
    auto x = dtensor::distribute_tensor(torch::ones({8, 8}), mesh, {dtensor::shard(0), dtensor::replicate()});
    optimizer.zero_grad();
    torch::mse_loss(model->forward(x.tensor()), x).backward();
    optimizer.step();
  }
  trace.stop();
  trace.stop();
  std::lock_guard lock(mutex);
  counted[world.rank()] = {counts.count(), counts.bytes()};
}

}  // namespace

TEST_CASE("a trace has all ranks and what they communicated", "[observe][trace]") {
  const auto file = file_for("trace");
  std::map<int, std::pair<int64_t, int64_t>> counted, traced;
  std::mutex mutex;
  dtensor::launch(traced_ranks(4), [&](dtensor::World& world) { train_traced(world, file, counted, mutex, {}); });
  std::map<int, std::set<std::string>> categories;
  std::set<std::string> modules, operators;
  for (const auto& event : read_trace(file)) {
    const int rank = event.at("pid");
    if (event.at("ph") != "X") continue;
    CHECK(event.at("dur").get<double>() >= 0);
    CHECK(event.at("ts").get<double>() >= 0);
    const std::string category = event.at("cat");
    categories[rank].insert(category);
    if (category == "operator") operators.insert(event.at("name"));
    if (category != "collective") continue;
    CHECK_FALSE(event.at("args").contains("unfinished"));
    CHECK(event.at("args").at("waited_us").get<double>() <= event.at("dur").get<double>() + 0.001);
    modules.insert(event.at("args").at("module").get<std::string>());
    ++traced[rank].first;
    traced[rank].second += event.at("args").at("bytes").get<int64_t>();
  }
  CHECK(counted.size() == 4);
  CHECK(counted[0].first > 0);
  CHECK(traced == counted);
  for (int rank = 0; rank < 4; ++rank)
    CHECK(categories[rank].count("operator") + categories[rank].count("collective") + categories[rank].count("scope") == 3);
  CHECK(modules.count("2") == 1);  // the sum after the second layer, and its gradients
  CHECK(operators.count("aten::relu") == 1);
}

TEST_CASE("a trace that is full says how much it left out", "[observe][trace]") {
  const auto file = file_for("full");
  dtensor::TraceOptions options;
  options.operators = false;
  options.most_events = 5;
  std::map<int, std::pair<int64_t, int64_t>> counted;
  std::mutex mutex;
  dtensor::launch(traced_ranks(4), [&](dtensor::World& world) { train_traced(world, file, counted, mutex, options); });
  int spans = 0, told = 0;
  for (const auto& event : read_trace(file)) {
    spans += event.at("ph") == "X";
    told += event.at("name") == "process_name" && event.at("args").at("name").get<std::string>().find("left out") != std::string::npos;
    CHECK(event.value("cat", "") != "operator");
  }
  CHECK(spans == 20);
  CHECK(told == 4);
}

TEST_CASE("a trace that an exception ends is written by each rank alone", "[observe][trace]") {
  const auto file = file_for("thrown");
  CHECK_THROWS_AS(dtensor::launch(traced_ranks(2), [&](dtensor::World& world) {
    dtensor::Trace trace(file);
    world.barrier();
    throw std::runtime_error("out of cheese");
  }), std::runtime_error);
  for (const auto* rank : {"0", "1"}) CHECK(read_trace(file + ".rank-" + rank).size() > 1);
  CHECK_FALSE(std::filesystem::exists(file));
}

TEST_CASE("every rank throws where a trace cannot be written", "[observe][trace]") {
  std::atomic<int> threw = 0;
  dtensor::launch(traced_ranks(2), [&](dtensor::World&) {
    try {
      dtensor::Trace trace("/nonexistent/folder/trace.json");  // not only at the end of the run
    } catch (const dtensor::Error& error) {
      threw += std::string(error.what_without_backtrace()).find("'/nonexistent/folder/trace.json': No such file") != std::string::npos;
    }
  });
  CHECK(threw == 2);
  threw = 0;
  const auto folder = file_for("removed");
  std::filesystem::create_directory(folder);
  dtensor::launch(traced_ranks(2), [&](dtensor::World& world) {
    dtensor::Trace trace(folder + "/trace.json");
    world.barrier();
    if (world.rank() == 0) std::filesystem::remove_all(folder);
    try {
      trace.stop();
    } catch (const dtensor::Error& error) {
      threw += std::string(error.what_without_backtrace()).find("No such file") != std::string::npos;
    }
  });
  CHECK(threw == 2);
}

TEST_CASE("the clocks of other hosts are compared with the first rank's", "[observe][trace]") {
  constexpr int64_t kAhead = 3'600'000'000'000;  // an hour
  dtensor::launch(traced_ranks(3), [&](dtensor::World& world) {
    const auto group = world.transport().connect("clocks", {0, 1, 2});
    const bool other = world.rank() == 2;
    const auto now = [&] { return dtensor::comm::now_ns() + (other ? kAhead : 0); };
    const auto offset = dtensor::trace::offset_to_first(*group, other ? "another host" : "this host", now);
    const auto error = std::abs(offset + (other ? kAhead : 0));
    dtensor::require(other ? error < 20'000'000 : offset == 0, "test", "an offset of {} ns", offset);
  });
}

TEST_CASE("spans are the same after they were sent", "[observe][trace]") {
  dtensor::trace::Spans spans;
  dtensor::comm::Event event;
  event.issued = 10, event.started = 20, event.done = 30, event.bytes = 7;
  event.op = "aten::mm", event.module = "a \"quoted\" name", event.group = "dp";
  spans.add(event);
  event.done = 0;
  spans.add(event);
  spans.left_out = 4;
  auto same = dtensor::trace::Spans::unpack(spans.pack());
  same.shift(5);
  CHECK(same.left_out == 4);
  CHECK(same.earliest() == 15);
  CHECK(same.spans[0].done == 35);
  CHECK(same.spans[1].done == 0);
  const auto json =
      nlohmann::json::parse(std::string(dtensor::trace::kHead) + dtensor::trace::json_of(same, 1, 15) + std::string(dtensor::trace::kTail));
  CHECK(json.at("traceEvents")[0].at("args").at("module") == "a \"quoted\" name");
  CHECK(json.at("traceEvents")[1].at("args").at("unfinished") == true);
}

TEST_CASE("spans that were cut or changed on the way are refused", "[observe][trace]") {
  dtensor::trace::Spans spans;
  dtensor::comm::Event event;
  event.op = "aten::mm";
  spans.add(event);
  const auto bytes = spans.pack();
  for (size_t size = 0; size < bytes.size(); ++size) CHECK_THROWS_AS(dtensor::trace::Spans::unpack(bytes.substr(0, size)), dtensor::Error);
  for (const size_t place : {0, 8, 24}) {  // the numbers of texts and spans, and the length of a text
    auto changed = bytes;
    changed.replace(place, 8, 8, '\xff');
    CHECK_THROWS_AS(dtensor::trace::Spans::unpack(changed), dtensor::Error);
  }
}

// A rank's first call of a kind is decided, and later ones are looked up: both are of the module whose parameter they read.
TEST_CASE("the first call of an operator is of the same module as later ones", "[observe][comm_debug]") {
  dtensor::launch(traced_ranks(2), [](dtensor::World&) {
    const auto mesh = dtensor::init_device_mesh(torch::kCPU, {2}, {"tp"});
    const auto one_module = [](const char* what, const std::string& module, const std::function<void()>& call) {
      for (int run = 0; run < 3; ++run) {
        const dtensor::Scope scope("step");
        const dtensor::CommDebugMode counts;
        call();
        dtensor::require(counts.count() > 0, "test", "{}: nothing was communicated", what);
        for (const auto& [key, totals] : counts.modules()) {
          dtensor::require(key.first == module, "test", "{}: call {} is of '{}':\n{}", what, run, key.first, counts.module_str());
        }
      }
    };
    const auto weight = dtensor::distribute_tensor(torch::ones({6, 4}), mesh, {dtensor::shard(1)}).tensor();
    const auto bias = dtensor::distribute_tensor(torch::ones({6}), mesh, {dtensor::replicate()}).tensor();
    const auto x = dtensor::distribute_tensor(torch::ones({3, 4}), mesh, {dtensor::shard(1)}).tensor();
    dtensor::name_module(weight, "layers.3");
    dtensor::name_module(bias, "layers.4");
    dtensor::pin(weight);
    const torch::NoGradGuard no_grad;
    one_module("a sum that is pending", "layers.3", [&] { torch::relu(torch::mm(x, weight.t())); });
    one_module("an operand that moves beside one that stays", "layers.3", [&] { torch::mul(torch::mm(x, weight.t()), bias); });
    one_module("a local call that communicates", "layers.3", [&] { torch::softmax(weight, 1); });
  });
}

TEST_CASE("CommDebugMode counts by module and what other threads of the rank issue", "[observe][comm_debug]") {
  dtensor::launch(traced_ranks(2), [](dtensor::World& world) {
    const auto group = world.transport().connect("pair", {0, 1});
    dtensor::CommDebugMode counts;
    {
      const dtensor::Scope scope("norm");
      group->all_reduce(at::ones({4}), dtensor::ReduceOp::sum).get();
    }
    std::thread([&] { group->all_reduce(at::ones({2}), dtensor::ReduceOp::sum).get(); }).join();
    dtensor::require(counts.count() == 2 && counts.bytes() == 24, "test", "{} calls of {} bytes", counts.count(), counts.bytes());
    const auto& modules = counts.modules();
    dtensor::require(modules.size() == 2 && modules.at({"norm", dtensor::comm::Collective::all_reduce}).bytes == 16, "test", "{}",
                     counts.module_str());
    dtensor::require(counts.module_str().find("norm") != std::string::npos, "test", "no module in the table");
    counts.reset();
    dtensor::require(counts.modules().empty(), "test", "modules after reset()");
  });
}
