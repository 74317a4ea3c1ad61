#include "src/checkpoint/saver.hpp"

#include "src/checkpoint/chosen.hpp"
#include "src/checkpoint/disk.hpp"
#include "src/checkpoint/host_memory.hpp"
#include "src/checkpoint/joined_parts.hpp"
#include "src/checkpoint/step_files.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/base/say.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/mesh/at_end.hpp>
#include <dtensor/mesh/world.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <exception>
#include <random>
#include <utility>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dtensor::checkpoints {

namespace {

constexpr const char* kTag = "save";

// Every rank calls it, whatever it throws: the ranks agree on it. `asked`: what the options ask for.
Contents contents_of(const State& state, const SaveOptions& options, std::vector<Asked>& asked) {
  TensorNames names;
  for (const auto& entry : state.entries()) entry.part->add_names(entry.name, names);
  auto contents = joined_parts(
      kTag, state, [&](const State::Entry& entry, Contents& part) { entry.part->save(entry.name, names, part); });
  asked = asked_by(options.only, options.without, names_in(contents), "the state");
  const auto wanted = [&](const std::string& name) { return is_chosen(name, options); };
  std::erase_if(contents.tensors, [&](const auto& entry) { return !wanted(entry.first); });
  std::erase_if(contents.values, [&](const auto& entry) { return !wanted(entry.first); });
  std::erase_if(contents.same_as, [&](const auto& entry) { return !wanted(entry.first) || !contents.tensors.contains(entry.second); });
  return contents;
}

// Copies a view to bytes, row-major.
void copy_to(char* bytes, const at::Tensor& view) {
  const auto size = static_cast<size_t>(view.numel()) * view.element_size();
  if (size == 0) return;
  if (view.is_cpu() && view.is_contiguous() && !view.is_conj() && !view.is_neg()) std::memcpy(bytes, view.data_ptr(), size);
  else at::from_blob(bytes, view.sizes(), at::TensorOptions(view.scalar_type())).copy_(view, /*non_blocking=*/true);
}

SavedTensor sums_of(const at::Tensor& tensor) {
  const auto row_major = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg();
  SavedTensor saved{tensor.scalar_type(), tensor.sizes().vec(), {Piece{{}, -1, 0, {}}}};
  auto& piece = saved.pieces.front();
  for (const auto size : tensor.sizes()) piece.box.push_back({0, size});
  piece.sums = crc32c_of_chunks(row_major.data_ptr(), saved.bytes(), Index().chunk_bytes);
  return saved;
}

}  // namespace

// Whoever ends a world waits for what is being written, though not for ranks that are gone.
std::string Saver::end(int most_seconds) {
  for (int i = 0; running_ && i < 100 * most_seconds; ++i) usleep(10'000);
  others_ = Others::have_failed;
  join();
  if (problem_.empty()) return "";
  return fmt::format("'{}' was not saved: {}; hint: Saving::wait() or CheckpointManager::finish() at the end of a program throws this on "
                     "every rank",
                     last_folder_, std::exchange(problem_, {}));
}

// Without dt::launch nobody else tells what went wrong.
Saver::~Saver() {
  const auto problem = end(std::uncaught_exceptions() > 0 ? 20 : 600);
  if (!problem.empty()) detail::say("dtensor: {}\n", problem);
}

void Saver::join() {
  if (thread_.joinable()) thread_.join();
}

// The first rank's thread waits for the others' reports, so it is waited for when these are written, or will not be.
void Saver::wait(int64_t number) {
  if (number <= waited_for_) return;
  const Everyone everyone(kTag);
  waited_for_ = number_;
  if (!everyone.is_first()) join();
  std::string problem = problem_of([&] { everyone.agree(everyone.is_first() ? "" : problem_); });
  others_ = problem.empty() ? Others::have_written : Others::have_failed;
  join();
  const auto of_first = everyone.from_first(problem_);
  problem = without_place(problem.empty() ? of_first : problem);
  problem_.clear();
  if (problem.empty()) return;
  remove_attempt(last_folder_, last_attempt_, everyone.rank());
  throw_error(kTag, problem);
}

void Saver::make_plan(const Everyone& everyone, const std::string& text, const SaveOptions& options) {
  std::vector<Holdings> of_ranks;
  for (const auto& each : everyone.gather(text)) of_ranks.push_back(holdings_from(each));
  const auto all = joined(of_ranks);
  auto of_rank = share_out(all, everyone.size());
  plan_.files = files_of(std::move(of_rank[static_cast<size_t>(everyone.rank())]), options.file_bytes);
  plan_.file_bytes = options.file_bytes;
  plan_.all.clear();
  for (const auto& [name, held] : all) {
    if (everyone.is_first()) plan_.all[name] = {held.dtype, held.sizes, {}};
  }
  std::map<std::string, bool> written;
  int64_t bytes = 0;
  for (const auto& file : plan_.files) {
    bytes += file.data_bytes;
    for (const auto& item : file.items) written[item.name] = true;
  }
  plan_.replicas.clear();
  for (const auto& [name, holding] : of_ranks[static_cast<size_t>(everyone.rank())]) {
    if (!written.contains(name)) plan_.replicas.push_back(name);
  }
  if (!plan_.data.defined() || plan_.data.numel() < bytes) plan_.data = host_memory(bytes);
}

void Saver::copy(const std::map<std::string, at::Tensor>& tensors, Job& job) {
  auto* bytes = plan_.data.numel() > 0 ? static_cast<char*>(plan_.data.data_ptr()) : nullptr;
  std::optional<c10::Device> device;
  for (const auto& file : plan_.files) {
    for (const auto& item : file.items) {
      const auto& tensor = tensors.at(item.name);
      if (!tensor.is_cpu()) device = tensor.device();
      copy_to(bytes + item.offset, view_of(tensor, item.box));
    }
    bytes += file.data_bytes;
  }
  for (const auto& name : plan_.replicas) {
    const auto& tensor = tensors.at(name);
    if (!is_dtensor(tensor)) job.replicas[name] = sums_of(tensor);
  }
  if (device) at::empty({1}, at::TensorOptions(at::kByte).device(*device)).cpu();  // all copies before it are done
}

Job Saver::prepare(const State& state, const std::string& folder, int64_t step, const SaveOptions& options, const Everyone& everyone) {
  NoSpmd plain;
  at::NoGradGuard no_grad;
  Job job;
  std::string text;
  std::vector<Asked> asked;
  auto problem = problem_of([&] {
    require(step >= 0, kTag, "got step {}; expected a number that is not negative", step);
    require(options.file_bytes > 0, kTag, "got files of {} bytes; expected a positive number", options.file_bytes);
    require(!folder.empty(), kTag, "{}", kNoFolder);
    job.contents = contents_of(state, options, asked);
    text = to_text(holdings_of(job.contents.tensors));
  });
  const auto own = fingerprint(text);
  const auto where = fingerprint(fmt::format("{}/{}", folder, step))[0];
  std::random_device random;
  const bool lacks = std::ranges::any_of(asked, [](const Asked& each) { return !each.is_there; });
  const auto told = everyone.gather_numbers({own[0], own[1], where, problem.empty() ? static_cast<int64_t>(random()) : -1, lacks});
  std::vector<std::array<int64_t, 2>> fingerprints;
  for (const auto& numbers : told) {
    fingerprints.push_back({numbers[0], numbers[1]});
    if (numbers[2] != told[0][2] && problem.empty())
      problem = fmt::format("ranks name different folders or steps; this one: '{}', step {}", folder, step);
    if (numbers[3] < 0 && problem.empty()) problem = "another rank failed";
  }
  if (!problem.empty()) everyone.agree(problem);
  if (std::ranges::any_of(told, [](const auto& numbers) { return numbers[4] != 0; })) check_asked(kTag, asked, everyone);
  if (fingerprints != plan_.fingerprints || options.file_bytes != plan_.file_bytes) {
    plan_.fingerprints.clear();
    const auto failure = problem_of([&] { make_plan(everyone, text, options); });
    everyone.agree(failure);
    plan_.fingerprints = fingerprints;
  }
  job.problem = problem_of([&] { copy(job.contents.tensors, job); });
  job.contents.tensors.clear();
  job.folder = step_folder(folder, step);
  job.step = step;
  job.attempt = fmt::format("{:08x}", static_cast<uint32_t>(told[0][3]));
  job.writer = written_by(everyone.size());
  if (!options.run.empty()) job.writer["run"] = options.run;
  job.rank = everyone.rank();
  job.ranks = everyone.size();
  job.files = plan_.files;
  job.data = plan_.data;
  job.all = plan_.all;
  return job;
}

Saving Saver::save(const State& state, const std::string& folder, int64_t step, const SaveOptions& options) {
  const Everyone everyone(kTag);
  if (number_ > 0) {
    if (!options.wait)
      everyone.agree(running_ ? fmt::format("step {} is still being written; hint: save less often, or wait", last_folder_) : "");
    wait(number_);
  }
  run(prepare(state, folder, step, options, everyone), options.async);
  Saving saving(*this, number_);
  if (!options.async) saving.wait();
  return saving;
}

void Saver::run(Job job, bool in_background) {
  ++number_;
  last_folder_ = job.folder;
  last_attempt_ = job.attempt;
  others_ = Others::may_be_writing;
  running_ = true;
  const auto started = problem_of([&] {
    thread_ = std::thread([this, job = std::move(job), in_background] {
      if (in_background) setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 10);  // the training goes first
      problem_ = problem_of([&] { write(job, others_); });
      running_ = false;
    });
  });
  if (number_ == 1) {
    World::current().local<detail::AtEnd>().calls.push_back([this] {
      if (const auto failure = end(600); !failure.empty()) throw_error(kTag, failure);
    });
  }
  if (started.empty()) return;
  problem_ = "its thread cannot be started: " + started;
  running_ = false;
}

}  // namespace dtensor::checkpoints

namespace dtensor {

void Saving::wait() { saver_->wait(number_); }
bool Saving::done() const { return saver_->done(number_); }

Saving save(const State& state, const std::string& folder, int64_t step, const SaveOptions& options) {
  return World::current().local<checkpoints::Saver>().save(state, folder, step, options);
}

}  // namespace dtensor
