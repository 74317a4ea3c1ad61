#include "src/observe/spans.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

namespace dtensor::trace {

namespace {

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Rows of a rank's picture. In one row spans are inside each other or apart.
class Rows {
 public:
  // The row of a thread's operators or scopes.
  int of_thread(const std::string& what, uint32_t thread) {
    const auto [place, is_new] = threads_.try_emplace({what, thread}, 0);
    if (!is_new) return place->second;
    const auto same = std::ranges::count_if(threads_, [&](const auto& row) { return row.first.first == what; });
    return place->second = add(same == 1 ? what : fmt::format("{}, thread {}", what, same));
  }

  // A row of a group's collectives that is free since `issued`. They come in the order of their begins.
  int of_group(const std::string& group, int64_t issued, int64_t done) {
    auto& rows = groups_[group];
    auto free = std::ranges::find_if(rows, [&](const auto& row) { return row.second <= issued; });
    if (free == rows.end()) {
      rows.emplace_back(
          add(rows.empty() ? "collectives: " + group : fmt::format("collectives: {}, at the same time {}", group, rows.size() + 1)), 0);
      free = std::prev(rows.end());
    }
    free->second = done;
    return free->first;
  }

  const std::vector<std::string>& names() const { return names_; }

 private:
  int add(std::string name) {
    names_.push_back(std::move(name));
    return static_cast<int>(names_.size());
  }

  std::map<std::pair<std::string, uint32_t>, int> threads_;
  std::map<std::string, std::vector<std::pair<int, int64_t>>> groups_;  // rows, and until when each is taken
  std::vector<std::string> names_;
};

double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

void write(std::string& out, const Spans& all, const Span& span, int rank, int64_t zero, Rows& rows) {
  const auto done = std::max(span.done, span.issued);
  const auto text = [&](uint32_t number) { return quoted(all.texts[number]); };
  const auto begin = [&](const char* kind, const std::string& name, int row) {
    fmt::format_to(std::back_inserter(out),
                   "{{\"ph\":\"X\",\"cat\":\"{}\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f},\"args\":{{\"module\":{}",
                   kind, name, rank, row, microseconds(span.issued - zero), microseconds(done - span.issued), text(span.module));
  };
  if (span.what == comm::Event::What::scope) {
    begin("scope", text(span.module), rows.of_thread("scopes", span.thread));
  } else if (span.what == comm::Event::What::operation) {
    begin("operator", text(span.op), rows.of_thread("operators", span.thread));
  } else {
    const bool check = all.texts[span.op] == comm::kCheck;
    begin(check ? "check" : "collective", quoted(comm::name(span.kind)), rows.of_group(all.texts[span.group], span.issued, done));
    fmt::format_to(std::back_inserter(out),
                   ",\"group\":{},\"operator\":{},\"sequence\":{},\"bytes\":{},\"implicit\":{},\"waited_us\":{:.3f}", text(span.group),
                   text(span.op), span.sequence, span.bytes, span.implicit,
                   microseconds(span.started ? std::max<int64_t>(0, span.started - span.issued) : done - span.issued));
  }
  out += span.failed ? ",\"failed\":true" : span.done == 0 ? ",\"unfinished\":true" : "";
  out += "}},\n";
}

}  // namespace

uint32_t Texts::number_of(std::string_view text) {
  const auto found = numbers_.find(text);
  if (found != numbers_.end()) return found->second;
  const auto number = static_cast<uint32_t>(texts_.size());
  texts_.emplace_back(text);
  numbers_.emplace(text, number);
  return number;
}

void Spans::add(const comm::Event& event) {
  spans.push_back({event.issued, event.started, event.done, event.bytes, event.sequence, texts.number_of(event.op),
                   texts.number_of(event.module), texts.number_of(event.group), event.thread, event.what, event.kind, event.implicit,
                   event.failed});
}

void Spans::shift(int64_t by) {
  for (auto& span : spans) {
    for (auto* time : {&span.issued, &span.started, &span.done}) *time += *time ? by : 0;
  }
}

int64_t Spans::earliest() const {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const auto& span : spans) first = std::min(first, span.issued);
  return first;
}

std::string Spans::pack() const {
  std::string bytes;
  const auto add = [&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); };
  const uint64_t counts[] = {texts.all().size(), spans.size(), static_cast<uint64_t>(left_out)};
  add(counts, sizeof counts);
  for (const auto& text : texts.all()) {
    const uint64_t size = text.size();
    add(&size, sizeof size);
    add(text.data(), size);
  }
  add(spans.data(), spans.size() * sizeof(Span));
  return bytes;
}

Spans Spans::unpack(std::string_view bytes) {
  Spans all;
  const auto expect = [](bool ok) {
    require(ok, "trace", "another rank sent what is no list of its events; hint: all ranks must run the same version of the library");
  };
  const auto next = [&](uint64_t size) {
    expect(size <= bytes.size());
    const auto piece = bytes.substr(0, size);
    bytes.remove_prefix(size);
    return piece;
  };
  const auto number = [&] {
    uint64_t value = 0;
    next(sizeof value).copy(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  };
  const auto texts = number(), spans = number();
  all.left_out = static_cast<int64_t>(number());
  for (uint64_t i = 0; i < texts; ++i) expect(all.texts.number_of(next(number())) == i);
  expect(bytes.size() % sizeof(Span) == 0 && bytes.size() / sizeof(Span) == spans);
  all.spans.resize(spans);
  if (spans > 0) std::memcpy(all.spans.data(), bytes.data(), bytes.size());
  for (const auto& span : all.spans) expect(std::max({span.op, span.module, span.group}) < texts);
  return all;
}

std::string json_of(Spans all, int rank, int64_t zero) {
  std::ranges::stable_sort(all.spans, [](const Span& a, const Span& b) { return a.issued < b.issued; });
  std::string out;
  Rows rows;
  for (const auto& span : all.spans) write(out, all, span, rank, zero, rows);
  const auto left_out = all.left_out > 0 ? fmt::format(" ({} later events are left out)", all.left_out) : std::string();
  const auto name = [&](const char* what, int row, const std::string& text) {
    fmt::format_to(std::back_inserter(out), "{{\"ph\":\"M\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}},\n", what,
                   rank, row, quoted(text));
  };
  name("process_name", 0, fmt::format("rank {}{}", rank, left_out));
  for (size_t row = 0; row < rows.names().size(); ++row) name("thread_name", static_cast<int>(row + 1), rows.names()[row]);
  fmt::format_to(std::back_inserter(out),
                 "{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{},\"tid\":0,\"args\":{{\"sort_index\":{}}}}}", rank, rank);
  return out;
}

}  // namespace dtensor::trace
