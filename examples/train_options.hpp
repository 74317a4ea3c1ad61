// The part of the command line that all training programs have.
#pragma once

#include "mesh_option.hpp"

#include <CLI/CLI.hpp>
#include <torch/cuda.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

struct RunOptions {
  std::vector<MeshOption> meshes;  // empty: data parallel over all ranks
  std::string device = "cpu", dtype = "float32", data, log, svg;
  std::string save, resume;  // folders of checkpoints
  int64_t every = 0;         // steps between saves; 0: only after the last
  int64_t copy_every = 0;    // steps between copies in memory; 0: none
  int64_t from_step = -1;    // -1: the newest that there is
  int64_t seq = 64, batch = 16, steps = 100;
  double lr = 3e-3, clip = 1;
  double tolerance = std::numeric_limits<double>::infinity();
  uint64_t seed = 0;
  bool compare = false;
};

// What dp, sp and tp mean is written where the batch and the parameters are laid out.
inline const std::vector<std::string> kMeshNames = {"replicas", "dp", "sp", "tp"};

// Checks of option values: what is wrong, or nothing. What is no number at all is left to the conversion.
inline std::string positive(const std::string& text) {
  return std::strtod(text.c_str(), nullptr) > 0 ? "" : "got '" + text + "', expected a number above 0";
}
inline std::string not_negative(const std::string& text) {
  return std::strtod(text.c_str(), nullptr) >= 0 ? "" : "got '" + text + "', expected 0 or a number above it";
}
inline std::string can_be_written(const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder)) return "there is no folder " + folder.string() + " to write it in";
  if (std::filesystem::is_directory(path)) return "got the folder " + path + ", expected a file to write";
  const bool exists = std::filesystem::exists(path);
  return access(exists ? path.c_str() : folder.c_str(), W_OK) == 0 ? "" : path + " cannot be written";
}

inline std::string is_there(const std::string& device) {
  if (device == "cpu" || (device == "cuda" && torch::cuda::is_available())) return "";
  return device == "cuda" ? "there is no GPU, or this libtorch has no CUDA" : "got '" + device + "', expected cpu or cuda";
}

inline void add_mesh_options(CLI::App& app, RunOptions& o, const std::vector<std::string>& names) {
  auto meshes = [&o, names](const std::string& text) {
    try {
      o.meshes = parse_meshes(text, names);
    } catch (const std::invalid_argument& error) {
      throw CLI::ValidationError(error.what(), CLI::ExitCodes::ValidationError);
    }
  };
  auto* mesh = app.add_option_function<std::string>("--mesh", meshes, "the mesh, e.g. dp=2,tp=2 (default: dp=RANKS)");
  app.add_option_function<std::string>("--meshes", meshes, "several, one run each: \"dp=4;dp=2,tp=2\"")->excludes(mesh);
}

// dtensor::launch reads these; here they are declared and checked.
inline void add_launch_options(CLI::App& app) {
  static int ranks = 1;
  static double deadline = 300;
  static std::string transport;
  app.add_option("--ranks", ranks, "ranks, as threads of this process, without a launcher (with --mesh: as many as it has)")
      ->check(positive);
  app.add_option("--deadline", deadline, "seconds that a rank waits for the others")->check(positive);
  app.add_option("--transport", transport, "threads, shm or gloo (default: shm under a launcher)");
}

// Declares the options. CLI::App::parse fills `o`. `names`: the mesh dimensions that the program knows.
inline void add_run_options(CLI::App& app, RunOptions& o, const std::vector<std::string>& names = kMeshNames) {
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // so that a script's can be overridden
  add_mesh_options(app, o, names);
  app.add_flag("--compare", o.compare,
               "run one device too, and print the largest relative loss difference; the exit status is 1 where that is above "
               "--tolerance, or the parameters do not begin with one device's bits");
  app.add_option("--tolerance", o.tolerance, "with --compare: exit with 1 when it is larger (default: any difference is fine)")
      ->check(not_negative);
  app.add_option("--data", o.data, "a text file or a folder of them (default: the C++ headers of libtorch)");
  app.add_option("--device", o.device, "where the ranks compute; cuda: a GPU each, under dtensor-run")->check(is_there);
  app.add_option("--dtype", o.dtype, "of the parameters")->check(CLI::IsMember({"float32", "float64"}));
  app.add_option("--log", o.log, "write a JSON object per step to this file")->check(can_be_written);
  app.add_option("--svg", o.svg, "write a picture of the loss curves to this file")->check(can_be_written);
  auto* save = app.add_option("--save", o.save, "a folder for checkpoints: one after the last step, and one when the program gets SIGTERM");
  app.add_option("--copy-every", o.copy_every, "with --save: every so many steps a copy in memory, which --resume takes where it is newer")
      ->check(positive)
      ->needs(save);
  app.add_option("--every", o.every, "with --save: also every so many steps, in the background; the last three stay")
      ->check(positive)
      ->needs(save);
  auto* resume = app.add_option("--resume", o.resume,
                                "go on from the newest checkpoint in this folder, of any mesh; no folder: from that of --save")
                     ->expected(0, 1);
  app.add_option("--from-step", o.from_step, "with --resume: from this step instead")->check(positive)->needs(resume);
  app.callback([&o, save, resume] {
    if (resume->count() == 0 || !o.resume.empty()) return;
    if (save->count() == 0) throw CLI::ValidationError("--resume", "names no folder; give it one, or --save a folder");
    o.resume = o.save;
  });
  app.add_option("--seq", o.seq, "bytes in a sequence")->check(positive);
  app.add_option("--batch", o.batch, "sequences or images in a step, over all ranks")->check(positive);
  app.add_option("--steps", o.steps, "optimizer steps")->check(positive);
  app.add_option("--lr", o.lr, "largest learning rate")->check(positive);
  app.add_option("--clip", o.clip, "largest gradient norm; 0: do not clip")->check(not_negative);
  app.add_option("--seed", o.seed, "of the parameters, the batches and dropout");
  add_launch_options(app);
}
