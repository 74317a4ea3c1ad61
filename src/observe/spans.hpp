// What a trace has of one rank, and its form as bytes and as JSON.
#pragma once

#include <dtensor/comm/event.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::trace {

// An event, with its texts by their numbers. Copied between ranks as it is.
struct Span {
  int64_t issued = 0, started = 0, done = 0;  // done 0: it had not ended
  int64_t bytes = 0;
  uint64_t sequence = 0;
  uint32_t op = 0, module = 0, group = 0, thread = 0;
  comm::Event::What what{};
  comm::Collective kind{};
  bool implicit = false, failed = false;
};

// Each text once.
class Texts {
 public:
  uint32_t number_of(std::string_view text);
  const std::string& operator[](uint32_t number) const { return texts_[number]; }
  const std::vector<std::string>& all() const { return texts_; }

 private:
  std::vector<std::string> texts_;
  std::map<std::string, uint32_t, std::less<>> numbers_;
};

struct Spans {
  Texts texts;
  std::vector<Span> spans;
  int64_t left_out = 0;

  void add(const comm::Event& event);
  // Moves all times by so many nanoseconds.
  void shift(int64_t by);
  int64_t earliest() const;  // the largest number where there is none

  std::string pack() const;
  // Throws Error for bytes that pack() did not make.
  static Spans unpack(std::string_view bytes);
};

// The rank's events in Chrome's format, separated by commas and newlines; times count from `zero`. The first text of a file is kHead, the
// last kTail.
std::string json_of(Spans spans, int rank, int64_t zero);
inline constexpr std::string_view kHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", kTail = "\n]}\n";

}  // namespace dtensor::trace
