// What a training run says: a line a step, a progress bar on a terminal, a JSON object a step in a file.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

struct StepRecord {
  int64_t step = 0;
  double loss = 0, grad_norm = 0, lr = 0;
  double ms = 0;  // wall time of the step
  double per_s = 0;  // tokens or images
};

class StepLog {
 public:
  // `path`: the file for JSON lines, or empty; what it held stays until there is a step to write. `item`: what a step has so many of.
  explicit StepLog(const std::string& path, const std::string& item = "tokens") : path_(path), item_(item) {}

  // The records that follow are of the run `mesh`, which has `steps` steps.
  void begin(const std::string& mesh, int64_t steps) {
    mesh_ = mesh;
    steps_ = steps;
    elapsed_ms_ = 0;
    added_ = 0;
    fmt::print("{}\n", mesh);
  }

  // Closes the run with a line: the parameters of the model, those that a rank holds, and what it communicated.
  void end(int64_t parameters, int64_t parameters_here, int64_t collectives, int64_t bytes) const {
    const double steps = static_cast<double>(std::max<int64_t>(added_, 1));
    fmt::print("{}: {} parameters, {} on a rank; {:.1f} collectives and {:.3f} MB a rank and step\n", mesh_, parameters,
               parameters_here, static_cast<double>(collectives) / steps, static_cast<double>(bytes) / 1e6 / steps);
  }

  // Throws std::runtime_error when the file cannot be written.
  void add(const StepRecord& r) {
    elapsed_ms_ += r.ms;
    ++added_;
    fmt::print("{}step {:5} | loss {:9.6f} | grad norm {:7.4f} | lr {:.2e} | {:7.1f} ms | {:8.{}f} {}/s\n",
               terminal_ ? "\r\033[K" : "", r.step, r.loss, r.grad_norm, r.lr, r.ms, r.per_s, r.per_s < 10 ? 2 : 0, item_);
    if (terminal_) draw_bar(r.step + 1);
    std::fflush(stdout);
    if (path_.empty()) return;
    if (!file_.is_open()) file_.open(path_);
    nlohmann::ordered_json line = {{"mesh", mesh_}, {"step", r.step}, {"loss", r.loss}, {"grad_norm", r.grad_norm},
                                   {"lr", r.lr},    {"ms", r.ms},     {item_ + "_per_s", r.per_s}};
    file_ << line.dump() << std::endl;  // flushed, so that the file can be followed
    if (!file_) throw std::runtime_error("cannot write the --log file '" + path_ + "'; hint: is the disk full?");
  }

 private:
  void draw_bar(int64_t done) {
    constexpr int64_t kWidth = 40;
    if (done == steps_) return;
    const auto left = kWidth * done / steps_;
    fmt::print("{} [{:=<{}}>{: <{}}] {}/{}, {:.0f} s left", mesh_, "", left, "", kWidth - left, done, steps_,
               elapsed_ms_ / 1e3 / static_cast<double>(added_) * static_cast<double>(steps_ - done));
  }

  std::ofstream file_;
  std::string path_, item_, mesh_;
  int64_t steps_ = 0, added_ = 0;
  double elapsed_ms_ = 0;
  const bool terminal_ = isatty(STDOUT_FILENO) != 0;
};
