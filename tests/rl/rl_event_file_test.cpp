// Event files of TensorBoard, read back by the definition of records and messages; and statistics of metrics.
#include "tests/support/refuses.hpp"

#include <dtensor/rl/event_file.hpp>

#include <cstring>
#include <filesystem>
#include <map>

using namespace dtensor;
using namespace dtensor::test;

namespace {

struct EventReader {
  std::string bytes;
  size_t at = 0;

  bool has_more() const { return at < bytes.size(); }
  template <class T>
  T fixed() {
    T x{};
    require(at + sizeof(T) <= bytes.size(), "test", "it ends within a number");
    std::memcpy(&x, bytes.data() + at, sizeof(T));
    at += sizeof(T);
    return x;
  }
  uint64_t varint() {
    uint64_t x = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = fixed<uint8_t>();
      x |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return x;
    }
  }
  std::string text(uint64_t size) {
    require(at + size <= bytes.size(), "test", "it ends within a text");
    at += size;
    return bytes.substr(at - size, size);
  }
};

// Fields by number; kinds 0, 1 and 5 as numbers.
struct EventFields {
  std::multimap<uint64_t, std::string> texts{};
  std::map<uint64_t, double> numbers{};
};

EventFields event_fields(const std::string& message) {
  EventReader reader{message};
  EventFields fields;
  while (reader.has_more()) {
    const auto tag = reader.varint(), number = tag >> 3;
    if ((tag & 7) == 0) fields.numbers[number] = static_cast<double>(reader.varint());
    else if ((tag & 7) == 1) fields.numbers[number] = reader.fixed<double>();
    else if ((tag & 7) == 5) fields.numbers[number] = reader.fixed<float>();
    else fields.texts.emplace(number, reader.text(reader.varint()));
  }
  return fields;
}

uint32_t unmasked(uint32_t sum) {
  const auto rotated = sum - 0xa282ead8U;
  return rotated << 15 | rotated >> 17;
}

std::vector<EventFields> events_in(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EventReader reader{{std::istreambuf_iterator<char>(file), {}}};
  std::vector<EventFields> events;
  while (reader.has_more()) {
    const auto head = reader.text(8);
    uint64_t length = 0;
    std::memcpy(&length, head.data(), 8);
    require(unmasked(reader.fixed<uint32_t>()) == checkpoints::crc32c_by_table(head.data(), 8), "test", "another sum of a length");
    const auto event = reader.text(length);
    require(unmasked(reader.fixed<uint32_t>()) == checkpoints::crc32c_by_table(event.data(), length), "test", "another sum of an event");
    events.push_back(event_fields(event));
  }
  return events;
}

std::map<std::string, double> scalars_of(const EventFields& event) {
  std::map<std::string, double> scalars;
  const auto summary = event_fields(event.texts.find(5)->second);
  for (const auto& [number, value] : summary.texts) {
    const auto fields = event_fields(value);
    require(number == 1 && fields.texts.size() == 1, "test", "a value has another form");
    scalars[fields.texts.find(1)->second] = fields.numbers.at(2);
  }
  return scalars;
}

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

}  // namespace

TEST_CASE("rl event file: metrics are scalars of their step", "[rl]") {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("dtensor_rl_events_{}", getpid()) / "run";
  std::filesystem::remove_all(folder.parent_path());
  {
    rl::EventFile events(folder, 0);
    events.add({{"training/global_step", 0}, {"critic/score/mean", 0.25}, {"note", "no number"}});
    events.add({{"training/global_step", 300}, {"critic/score/mean", -1e30}, {std::string(200, 'n'), 7}});
  }
  rl::EventFile later(folder, 5);
  later.add({{"training/global_step", 5}, {"critic/score/mean", 0.5}});
  const auto files = files_in(folder);
  REQUIRE(files.size() == 2);
  for (const auto& file : files) CHECK(file.filename().string().rfind("events.out.tfevents.", 0) == 0);
  const auto first = events_in(files[0]), second = events_in(files[1]);
  REQUIRE(first.size() == 3);
  CHECK(first[0].texts.find(3)->second == "brain.Event:2");
  CHECK(first[1].numbers.at(1) > 1.7e9);
  CHECK(first[1].numbers.at(2) == 0);
  CHECK(scalars_of(first[1]) == std::map<std::string, double>{{"training/global_step", 0}, {"critic/score/mean", 0.25}});
  CHECK(first[2].numbers.at(2) == 300);
  CHECK(scalars_of(first[2]).at(std::string(200, 'n')) == 7);
  REQUIRE(second.size() == 3);
  CHECK(second[1].numbers.at(2) == 5);
  CHECK(event_fields(second[1].texts.find(7)->second).numbers.at(1) == 1);
  CHECK(scalars_of(second[2]).at("critic/score/mean") == 0.5);
  std::filesystem::remove_all(folder.parent_path());
}

TEST_CASE("rl event file: what cannot be written is refused", "[rl]") {
  rl::EventFile none("", 3);
  none.add({{"training/global_step", 3}});
  CHECK_NOTHROW(refuses("cannot write '/proc/dtensor/events.out.tfevents.", [] { rl::EventFile events("/proc/dtensor", 0); }));
}

TEST_CASE("rl metrics: mean and largest and smallest of a tensor", "[rl]") {
  rl::Metrics metrics;
  const auto x = torch::tensor({{3, -1}, {4, 0}}, torch::kLong);
  rl::add_statistics(metrics, "x", x.t());
  CHECK(metrics == rl::Metrics{{"x/mean", 1.5}, {"x/max", 4.0}, {"x/min", -1.0}});
  CHECK_NOTHROW(refuses("'y' has no values", [&] { rl::add_statistics(metrics, "y", x.narrow(0, 0, 0)); }));
}
