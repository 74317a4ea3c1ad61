// Scalars for TensorBoard: event files of our own, which need no other library.
//
//   rl::EventFile events("runs/sort4", 0);
//   events.add(metrics);                       // tensorboard --logdir runs
#pragma once

#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/rl/metrics.hpp>

#include <unistd.h>

#include <bit>
#include <filesystem>

#pragma GCC visibility push(default)

namespace dtensor::rl {

// A file of records, events.out.tfevents.TIME.PROCESS, in a folder. Files that the folder has stay; TensorBoard shows all of them as one
// run, and hides what they say of steps from `step` on, where this one begins.
class EventFile {
 public:
  // An empty folder: nothing is written. Throws where the file cannot be written.
  EventFile(const std::string& folder, int64_t step);
  // Each number of `metrics` as a scalar of its name, at "training/global_step".
  void add(const Metrics& metrics);

 private:
  void write(const std::string& event);

  std::ofstream file_;
  std::string path_;
};

// -- How ------------------------------------------------------------------------------------------------------------------

// An event is a message of protocol buffers (tensorflow/core/util/event.proto): a field is its number and kind, then its value. A record
// (TFRecord) is the length of the event, its checksum, the event, its checksum.
namespace detail {

template <class T>
std::string little_endian(T x) {
  static_assert(std::endian::native == std::endian::little);
  return {reinterpret_cast<const char*>(&x), sizeof(x)};
}

inline std::string varint(uint64_t x) {
  std::string bytes;
  for (; x >= 128; x >>= 7) bytes += static_cast<char>(x | 128);
  return bytes + static_cast<char>(x);
}

inline std::string field(uint64_t number, double x) { return varint(number << 3 | 1) + little_endian(x); }
inline std::string field(uint64_t number, float x) { return varint(number << 3 | 5) + little_endian(x); }
inline std::string field(uint64_t number, int64_t x) { return varint(number << 3) + varint(static_cast<uint64_t>(x)); }
inline std::string field(uint64_t number, const std::string& x) { return varint(number << 3 | 2) + varint(x.size()) + x; }

inline std::string event_at(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return field(1, now.count()) + field(2, step);
}

inline std::string masked_sum(const std::string& bytes) {
  const auto sum = checkpoints::crc32c(bytes.data(), bytes.size());
  return little_endian(std::rotr(sum, 15) + 0xa282ead8U);
}

inline std::string record_of(const std::string& event) {
  const auto length = little_endian(static_cast<uint64_t>(event.size()));
  return length + masked_sum(length) + event + masked_sum(event);
}

}  // namespace detail

inline EventFile::EventFile(const std::string& folder, int64_t step) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto time = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  path_ = fmt::format("{}/events.out.tfevents.{}.{:09}.{}", folder, time / 1'000'000'000, time % 1'000'000'000, getpid());
  file_.open(path_, std::ios::binary);
  write(detail::event_at(0) + detail::field(3, std::string("brain.Event:2")));
  if (step > 0) write(detail::event_at(step) + detail::field(7, detail::field(1, int64_t{1})));  // a session that starts
}

inline void EventFile::add(const Metrics& metrics) {
  if (path_.empty()) return;
  std::string summary;
  for (const auto& [name, value] : metrics.items()) {
    if (!value.is_number()) continue;
    summary += detail::field(1, detail::field(1, std::string(name)) + detail::field(2, value.get<float>()));
  }
  write(detail::event_at(metrics.at("training/global_step").get<int64_t>()) + detail::field(5, summary));
}

inline void EventFile::write(const std::string& event) {
  file_ << detail::record_of(event) << std::flush;
  require(static_cast<bool>(file_), "rl::EventFile", "cannot write '{}'; hint: is there a folder for it, and room on the disk?", path_);
}

}  // namespace dtensor::rl

#pragma GCC visibility pop
