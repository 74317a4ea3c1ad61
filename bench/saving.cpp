// How long saving and loading take: 256 MiB and 10,000 tensors of 1 KiB on the ranks of the job.
//
//   build/tools/dtensor-run -n 2 build/bench/saving FOLDER [ROUNDS] [--copies FOLDER]
//
// A line a figure, seconds of the slowest rank: "save 0.21", "stall first 0.05", ... bench/peers/torch_saving.py prints the same lines.
// "stall over memcpy" is how long the training waits for a save in the background, in copies of the part. With --copies, which names a
// folder in memory (/dev/shm/bench), "copy" and "copy over memcpy" are the same of copies in memory (ManagerOptions::copy_every), and "load
// copy" is what resuming from one takes.
#include <dtensor/checkpoint/memory_copies.hpp>
#include <dtensor/dtensor.hpp>

#include <CLI/CLI.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace dt = dtensor;

namespace {

// Seconds that the slowest rank takes, all beginning together.
template <class Work>
double seconds(dt::World& world, const Work& work) {
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const auto mesh = dt::init_device_mesh(c10::kCPU, {world.size()});
  return mesh.communicator(0).all_reduce(at::tensor({took.count()}, at::kDouble), dt::ReduceOp::max).get().item<double>();
}

struct Tensors {
  Tensors(const dt::DeviceMesh& mesh, const dt::Placement& placement, int count, std::vector<int64_t> sizes, bool filled) {
    for (int i = 0; i < count; ++i) {
      all.push_back(dt::full(sizes, filled ? i : -1, mesh, {placement}).tensor());
      names.push_back(fmt::format("layers.{}.w", i));
    }
    for (int i = 0; i < count; ++i) state.add({names[i], all[i]});
  }
  void check() const {
    for (size_t i = 0; i < all.size(); ++i) {
      const auto local = dt::DTensor(all[i]).to_local();
      dt::require(local.eq(static_cast<double>(i)).all().item<bool>(), "bench", "{} has other values", names[i]);
    }
  }
  std::vector<at::Tensor> all;
  std::vector<std::string> names;
  dt::State state;
};

struct Options {
  std::string folder, copies;
  int rounds = 1;
};

void run(dt::World& world, const Options& options) {
  const auto& folder = options.folder;
  const auto mesh = dt::init_device_mesh(c10::kCPU, {world.size()});
  const auto print = [&](const std::string& what, double time) {
    if (world.rank() == 0) fmt::print("{} {:.4f}\n", what, time), std::fflush(stdout);
  };
  const Tensors large(mesh, dt::shard(0), 16, {1024, 4096}, true), rows(mesh, dt::shard(0), 16, {1024, 4096}, false),
      columns(mesh, dt::shard(1), 16, {1024, 4096}, false), small(mesh, dt::shard(0), 10'000, {256}, true),
      again(mesh, dt::shard(0), 10'000, {256}, false);
  int64_t step = 0;
  for (int round = 0; round < options.rounds; ++round) {
    // Copies of the part, as a program without the library would make them: into new memory, and into memory that has been used.
    std::vector<at::Tensor> copies;
    std::map<std::string, double> memcpy_seconds;
    for (const std::string first : {" first", ""}) {
      memcpy_seconds[first] = seconds(world, [&] {
        for (size_t i = 0; i < large.all.size(); ++i) {
          const auto local = dt::DTensor(large.all[i]).to_local();
          if (copies.size() <= i) copies.push_back(at::empty(local.sizes(), local.options()));
          std::memcpy(copies[i].data_ptr(), local.data_ptr(), local.nbytes());
        }
      });
      print("memcpy" + first, memcpy_seconds[first]);
    }
    copies.clear();
    const auto print_beside = [&](const std::string& what, const std::string& first, double time) {
      print(what + first, time);
      print(what + first + " over memcpy", time / memcpy_seconds[first]);
    };
    for (const std::string first : {" first", ""}) {
      std::optional<dt::Saving> saving;
      print_beside("stall", first, seconds(world, [&] { saving = dt::save(large.state, folder + "/async", ++step, {.async = true}); }));
      print("background" + first, seconds(world, [&] { saving->wait(); }));
    }
    if (!options.copies.empty()) {
      dt::MemoryCopies in_memory(large.state, {.folder = options.copies}), resumed(rows.state, {.folder = options.copies});
      for (const std::string first : {" first", ""}) print_beside("copy", first, seconds(world, [&] { in_memory.save(++step); }));
      print("load copy", seconds(world, [&] { resumed.resume(); }));
      rows.check();
      in_memory.remove();
    }
    print("save", seconds(world, [&] { dt::save(large.state, folder + "/large", round); }));
    print("load", seconds(world, [&] { dt::load(rows.state, folder + "/large", round); }));
    print("load resharded", seconds(world, [&] { dt::load(columns.state, folder + "/large", round); }));
    rows.check();
    columns.check();
    print("save small", seconds(world, [&] { dt::save(small.state, folder + "/small", round); }));
    print("load small", seconds(world, [&] { dt::load(again.state, folder + "/small", round); }));
    again.check();
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures saving and loading of 256 MiB and of 10,000 tensors of 1 KiB. dtensor-run -n 2 starts it on two ranks.");
  Options options;
  app.add_option("folder", options.folder, "where to save")->required();
  app.add_option("rounds", options.rounds, "how often")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--copies", options.copies, "measure copies in memory too, in this folder, as /dev/shm/bench");
  CLI11_PARSE(app, argc, argv);
  return dt::launch(argc, argv, [&](dt::World& world) { run(world, options); });
}
