#include <dtensor/observe/trace.hpp>

#include <dtensor/base/error.hpp>
#include <dtensor/mesh/world.hpp>

#include "src/comm/reduce.hpp"
#include "src/mesh/world_state.hpp"
#include "src/observe/clocks.hpp"
#include "src/observe/spans.hpp"

#include <range/v3/numeric/iota.hpp>

#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <system_error>
#include <utility>

namespace dtensor {

using trace::Spans;

// Collectives are noted when they are issued; their ends are looked up later, while the rank still keeps them.
class Trace::Recorder final : public comm::Observer {
 public:
  Recorder(std::string path, const TraceOptions& options, World& of)
      : Observer(of.local<comm::Events>(), options.operators), file(std::move(path)), world(of), most_(options.most_events) {}
  ~Recorder() override { stop_observing(); }

  // What was seen; nothing more will be.
  Spans take() {
    stop_observing();
    look_up_ends();
    return std::move(spans_);
  }

  const std::string file;
  World& world;
  const int exceptions = std::uncaught_exceptions();

 private:
  void on_issue(const comm::Event& event) override {
    if (!has_room()) return;
    under_way_.emplace_back(event.number, spans_.spans.size());
    spans_.add(event);
    if (event.number >= looked_up_ + comm::Events::kKept / 4) look_up_ends();
  }

  void on_end(const comm::Event& event) override {
    if (has_room()) spans_.add(event);
    if (event.what == comm::Event::What::scope && events().count() >= looked_up_ + comm::Events::kKept / 4) look_up_ends();
  }

  bool has_room() {
    if (static_cast<int64_t>(spans_.spans.size()) < most_) return true;
    ++spans_.left_out;
    return false;
  }

  void look_up_ends() {
    looked_up_ = events().count();
    std::erase_if(under_way_, [&](const auto& one) {
      const auto event = events().get(one.first);
      auto& span = spans_.spans[one.second];
      span.started = event.started, span.done = event.done, span.failed = event.failed;
      return event.number == 0 || event.done != 0 || event.failed;
    });
  }

  Spans spans_;
  std::vector<std::pair<uint64_t, size_t>> under_way_;  // numbers of events, and where they are in spans_
  uint64_t looked_up_ = 0;
  const int64_t most_;
};

namespace {

at::Tensor bytes_of(const std::string& text) {
  auto tensor = comm::empty({static_cast<int64_t>(text.size())}, c10::ScalarType::Byte);
  std::memcpy(tensor.data_ptr(), text.data(), text.size());
  return tensor;
}

at::Tensor number(int64_t value) {
  auto tensor = comm::empty({1}, c10::ScalarType::Long);
  *tensor.data_ptr<int64_t>() = value;
  return tensor;
}

int64_t smallest(comm::Communicator& group, int64_t value) {
  return *group.all_reduce(number(value), ReduceOp::min).get().data_ptr<int64_t>();
}

Spans receive_spans(comm::Communicator& group, int member) {
  const auto size = *group.recv(number(0), member).get().data_ptr<int64_t>();
  const auto bytes = group.recv(comm::empty({size}, c10::ScalarType::Byte), member).get();
  return Spans::unpack({static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(size)});
}

void send_spans(comm::Communicator& group, const Spans& spans) {
  const auto bytes = spans.pack();
  group.send(number(static_cast<int64_t>(bytes.size())), 0).get();
  group.send(bytes_of(bytes), 0).get();
}

std::shared_ptr<comm::Communicator> all_ranks(World& world) {
  std::vector<int> ranks(world.size());
  ranges::iota(ranks, 0);
  return world.state().connect("world", ranks);
}

// Throws on every rank where rank 0 has an error of the system's.
void throw_together(comm::Communicator& group, int error, const std::string& file) {
  error = static_cast<int>(-smallest(group, -error));
  require(error == 0, "Trace", "rank 0 cannot write '{}': {}; hint: the folder must exist, be writable and have room", file,
          std::strerror(error));
}

// Why the file cannot be written, if so: it is when the run is over that it is. Changes nothing.
int error_of_opening(const std::string& file) {
  std::error_code ignored;
  const bool is_new = !std::filesystem::exists(file, ignored);
  errno = 0;
  if (!std::ofstream(file, std::ios::app)) return errno ? errno : EIO;
  if (is_new) std::filesystem::remove(file, ignored);
  return 0;
}

// Of all ranks to `file`, in their order. Returns errno, if any.
int write_all(comm::Communicator& group, Spans own, int64_t zero, const std::string& file) {
  errno = 0;
  std::ofstream out(file);
  const int error = out ? 0 : errno;
  out << trace::kHead << trace::json_of(std::move(own), 0, zero);
  for (int member = 1; member < group.size(); ++member) out << ",\n" << trace::json_of(receive_spans(group, member), member, zero);
  out << trace::kTail;
  errno = 0;
  return out.flush() ? 0 : error ? error : errno ? errno : EIO;
}

void write_together(World& world, const std::string& file, const std::function<Spans()>& take) {
  const comm::Cause cause(comm::kCheck, true);
  const auto group = all_ranks(world);
  group->barrier();  // what is under way ends
  auto spans = take();
  spans.shift(trace::offset_to_first(*group, trace::clock_id(), comm::now_ns));
  const auto zero = smallest(*group, spans.earliest());
  int error = 0;
  if (world.rank() == 0) {
    error = write_all(*group, std::move(spans), zero, file);
  } else {
    send_spans(*group, spans);
  }
  throw_together(*group, error, file);
}

}  // namespace

Trace::Trace(std::string file, const TraceOptions& options) {
  auto& world = World::current();
  {
    const comm::Cause cause(comm::kCheck, true);
    throw_together(*all_ranks(world), world.rank() == 0 ? error_of_opening(file) : 0, file);
  }
  recorder_ = std::make_unique<Recorder>(std::move(file), options, world);
}

Trace::~Trace() noexcept(false) {
  if (!recorder_) return;
  if (std::uncaught_exceptions() == recorder_->exceptions) {
    stop();
    return;
  }
  const int rank = recorder_->world.rank();  // the others may never come
  auto spans = recorder_->take();
  const auto zero = spans.earliest();
  std::ofstream(fmt::format("{}.rank-{}", recorder_->file, rank))
      << trace::kHead << trace::json_of(std::move(spans), rank, zero) << trace::kTail;
}

void Trace::stop() {
  if (!recorder_) return;
  const auto recorder = std::move(recorder_);
  write_together(recorder->world, recorder->file, [&] { return recorder->take(); });
}

}  // namespace dtensor
