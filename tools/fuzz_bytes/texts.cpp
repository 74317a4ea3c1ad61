// Environments, command lines, tables of costs, patterns and notations.
#include "tools/fuzz_bytes/target.hpp"

#include "src/launch/environment.hpp"
#include "src/launch/options.hpp"
#include "src/redistribute/plan_cache.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/parallel/patterns.hpp>
#include <dtensor/parallel/pipeline/schedules.hpp>
#include <dtensor/redistribute/redistribute.hpp>
#include <dtensor/rules/rule.hpp>

#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>

namespace dtensor::fuzz_bytes {

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Lines NAME=VALUE.
void read_launcher(const std::string& text) {
  std::map<std::string, std::string> variables;
  for (const auto& line : lines_of(text)) {
    const auto equals = line.find('=');
    if (equals < line.size() - 1) variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const auto found = dtensor::detail::find_launcher([&](const char* name) -> std::optional<std::string> {
    const auto variable = variables.find(name);
    return variable == variables.end() ? std::nullopt : std::optional(variable->second);
  });
  if (!found) return;
  expect(found->rank >= 0 && found->rank < found->size, "rank {} of {}", found->rank, found->size);
  expect(found->port > 0 && found->port < 65536, "port {}", found->port);
}

std::vector<std::string> launchers() {
  return {"RANK=2\nWORLD_SIZE=4\nMASTER_ADDR=node0\nMASTER_PORT=1234\nLOCAL_RANK=1\nTORCHELASTIC_USE_AGENT_STORE=True\n",
          "SLURM_PROCID=3\nSLURM_NTASKS=8\nSLURM_STEP_ID=0\nSLURM_JOB_ID=77\nSLURM_STEP_NODELIST=node[03-05,9],x\nSLURM_LOCALID=1\n",
          "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nMASTER_ADDR=::1\nOMPI_COMM_WORLD_LOCAL_RANK=0\n"};
}

void read_hosts(const std::string& list) { dtensor::detail::first_slurm_host(list); }

// A line for each argument; the first one is DTENSOR_DEADLINE.
void read_arguments(const std::string& text) {
  auto lines = lines_of(text);
  if (lines.empty()) lines.push_back("");
  setenv("DTENSOR_DEADLINE", lines[0].c_str(), 1);
  std::vector<char*> words;
  for (auto& line : lines) words.push_back(line.data());
  words.push_back(nullptr);
  const auto options = dtensor::detail::parse_options(static_cast<int>(lines.size()), words.data());
  expect(options.ranks >= 1, "{} ranks", options.ranks);
  expect(options.deadline.count() >= 1 && options.deadline <= dtensor::detail::kLongestDeadline, "a deadline of {} ms",
         options.deadline.count());
}

std::vector<std::string> arguments() {
  return {"30\n--ranks\n4\n--transport=gloo\n--deadline\n2.5\n", "\n--ranks=2\n--deadline=1e3\n--\n--ranks\nx\n"};
}

void read_costs(const std::string& text) {
  const auto file = scratch() + "/costs.json";
  write_bytes(file, text);
  setenv("DTENSOR_COST_FILE", file.c_str(), 1);
  auto& cache = World::current().local<dtensor::detail::PlanCache>();
  cache.costs.clear();
  cache.costs_loaded = false;
  const auto cost = comm_cost(init_device_mesh(c10::kCPU, {1}, {"tp"}), 0);
  expect(cost.latency >= 0 && cost.bandwidth > 0 && cost.copy_bandwidth > 0, "latency {}, bandwidths {} and {}", cost.latency,
         cost.bandwidth, cost.copy_bandwidth);
}

std::vector<std::string> costs() {
  return {R"({"default": {"latency": 2e-6, "bandwidth": 2e10}, "tp": {"latency": 0, "bandwidth": 3e11, "copy_bandwidth": 1e12}})", "{}"};
}

void read_pattern(const std::string& pattern) {
  const std::vector<std::string> names = {"layers.0.attention.query.weight", "", "a", "layers.10.mlp.up_projection.linear_layer.weight"};
  for (const auto& name : names) {
    dtensor::detail::matches(pattern, name);
    dtensor::detail::matches(dtensor::detail::inside(pattern, "weight"), name);
  }
  if (pattern.size() < 5000) dtensor::detail::closest(pattern, names);
}

std::vector<std::string> patterns() {
  return {"layers.*.attention.query|head", "re:layers\\.(\\d+|a{2,3})\\.[^.]*(query|key).*", "*.?lp.*.weight"};
}

void read_schedule(const std::string& text) {
  const auto schedule = pipelining::from_csv(text);
  const auto again = pipelining::from_csv(pipelining::to_csv(schedule));
  expect(again.microbatches == schedule.microbatches && again.rank_of_stage == schedule.rank_of_stage, "a schedule that reads as another");
  const auto timeline = pipelining::simulate(schedule);  // which checks it
  expect(timeline.makespan >= timeline.ideal && timeline.ideal > 0, "a makespan of {}, {} at least", timeline.makespan, timeline.ideal);
}

std::vector<std::string> schedules() {
  const auto pairs = pipelining::dualpipev({2, 4});
  return {pipelining::to_csv(pipelining::one_f_one_b({2, 3})), pipelining::to_csv(pairs),
          pipelining::to_csv(pipelining::with_messages(pipelining::with_reductions(pipelining::with_gathering(pairs))))};
}

void read_notation(const std::string& text) { rules::einsum(text); }

}  // namespace

std::vector<Target> text_targets() {
  const std::vector<std::string> names = {"RANK=", "WORLD_SIZE=", "SLURM_PROCID=", "\nMASTER_PORT=", "\nSLURM_JOB_ID=", "=", "-"};
  const std::vector<std::string> signs = {"*", "**a*", "?", "|", "(", ")", "[", "]", "{", "}",
                                          "\\", "+", "re:", "{1,}", "(.*)*", "[[:", ".*"};
  return {{"launchers", "environments of torchrun, Slurm and Open MPI", launchers, read_launcher, names},
          {"slurm-hosts", "node lists of Slurm", [] { return std::vector<std::string>{"node[03-05,9],x", "a,b", "rack[1-2]n[3,4]"}; },
           read_hosts, {"[", "]", ",", "-"}},
          {"arguments", "DTENSOR_DEADLINE and the command line", arguments, read_arguments, {"--ranks\n", "--deadline=", "--", "\n", "="}},
          {"costs", "DTENSOR_COST_FILE", costs, read_costs, {"{", "[", "\"", ":", "null", "1e999", "\"default\": ", "-"}},
          {"patterns", "patterns of names", patterns, read_pattern, signs},
          {"schedules", "CSV files of pipelines' schedules", schedules, read_schedule,
           {",", "\n", "F", "B", "I", "W", "0", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "(", ")", ";", "@"}},
          {"notations", "index notations of sharding rules",
           [] { return std::vector<std::string>{"mk,kn->mn", "...ij,jk->...ik", "mn+mk,kn->mn"}; },
           read_notation, {"...", "->", "+", ",", "1"}}};
}

}  // namespace dtensor::fuzz_bytes
