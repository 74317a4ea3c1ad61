// Schedules as text, as published, and as pictures.
#include "tests/catch.hpp"
#include "tests/support/pipeline_support.hpp"
#include "tests/support/refuses.hpp"

#include <nlohmann/json.hpp>

#include <unistd.h>

#include <cstdio>
#include <filesystem>

namespace dtensor::pipelining::test {

namespace {

using dtensor::test::refuses;

size_t occurrences(const std::string& in, const std::string& of) {
  size_t count = 0;
  for (auto at = in.find(of); at != in.npos; at = in.find(of, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("pipeline text: actions", "[pipeline]") {
  for (const std::string word : {"0F0", "12I345", "3W1", "7B0", "0SEND_F1", "1RECV_F2", "3SEND_B4", "2RECV_B4", "1UNSHARD", "2RESHARD",
                                 "3REDUCE_GRAD", "(0F7;7B3)", "0SEND_F3@2", "2RECV_F3@0", "2SEND_B1@0", "0RECV_B1@2"}) {
    CHECK(text(parse_action(word)) == word);
    CHECK(parse_action(csv_text(parse_action("  " + word + "\r"))) == parse_action(word));
  }
  CHECK(csv_text(parse_action("(0F7;7B3)")) == "(0F7;7B3)OVERLAP_F_B");
  CHECK(parse_action("( 0F7 ; 7B3 )OVERLAP_F_B") == overlapped(0, 7, 7, 3));
  CHECK(parse_action("0SEND_F3@1") == parse_action("0SEND_F3"));
  for (const auto* word :
       {"",      "F0",        "0F",        "0F-1",  "-1F0",      "0X0",        "0F0F0",    "0F0 1F0",       "0UNSHARD3", "99999999999F0",
        "0F0@1", "0SEND_F0@", "(0F7;7I3)", "(0F7)", "(7B3;0F7)", "(0F7;7B3)X", "(0F7;7B3", "0OVERLAP_F_B0", "0f0",       "0F1.5",
        ");(",   "(;)"}) {
    INFO(word);
    refuses("is no action; expected [stage][F|I|W|B|", [&] { parse_action(word); });
  }
  for (const auto* word : {"0SEND_F3", "2RECV_F3@0", "5SEND_B1", "0RECV_B1@2"}) {
    const auto action = parse_action(word);
    CHECK(counterpart(counterpart(action)) == action);
    CHECK(is_send(counterpart(action).kind) != is_send(action.kind));
  }
}

TEST_CASE("pipeline text: a CSV comes back as it was", "[pipeline]") {
  for (const auto& schedule : every_schedule(4, 9)) {
    INFO(what_of(schedule));
    for (const auto& form : {schedule, with_messages(schedule), with_messages(with_reductions(with_gathering(schedule)))}) {
      const auto again = from_csv(to_csv(form));
      CHECK(again.ranks == form.ranks);
      CHECK(again.rank_of_stage == form.rank_of_stage);
      CHECK(again.microbatches == form.microbatches);
    }
  }
  // What others write: quoted cells, other line ends, waiting, a mark of the encoding, an empty line at the end.
  const auto schedule = from_csv("\xEF\xBB\xBF\"0F0\", 0F1,,,0B0,,0B1\r\n,1F0,1F1,1B0,1B1,\r\n\r\n");
  CHECK(schedule.ranks == from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1").ranks);
  refuses("csv: row 2, cell 3: '1G1' is no action", [] { from_csv("0F0,0F1\n1F0,,1G1"); });
}

TEST_CASE("pipeline text: files", "[pipeline]") {
  const auto file = (std::filesystem::temp_directory_path() / fmt::format("dtensor-{}.csv", ::getpid())).string();
  save_csv(zbv({3, 6}), file);
  CHECK(load_csv(file).ranks == zbv({3, 6}).ranks);
  CHECK(load_csv(file).name == file);
  std::remove(file.c_str());
  refuses("cannot read '" + file + "': No such file or directory", [&] { load_csv(file); });
  refuses("cannot read '/': Is a directory", [] { load_csv("/"); });
  refuses("cannot write '/nowhere/at/all.csv'", [] { save_csv(zbv({3, 6}), "/nowhere/at/all.csv"); });
}

TEST_CASE("pipeline text: published listings", "[pipeline]") {
  const auto list_of = [](const Schedule& schedule, int rank) {
    std::string list;
    for (const auto& action : schedule.ranks[rank]) list += (list.empty() ? "" : " ") + text(action);
    return list;
  };
  // What DualPipeV.step of github.com/deepseek-ai/DualPipe (3da1bbe) does on 4 ranks with 10 microbatches, the example of its README.
  const std::vector<std::string> published{
      "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 (0F7;7B3) (7F4;0B0) (0F8;7B4) (7F5;0B1) (0F9;7B5) "
      "(7F6;0B2) 7B6 (7F7;0B3) 7B7 (7F8;0B4) 7B8 (7F9;0B5) 7B9 0I6 0W6 0I7 0W7 0I8 0W8 0I9 0W9",
      "1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 (1F6;6B2) (6F4;1B0) (1F7;6B3) (6F5;1B1) (1F8;6B4) (6F6;1B2) "
      "(1F9;6B5) (6F7;1B3) 6B6 (6F8;1B4) 6B7 (6F9;1B5) 6B8 1B6 6I9 1I7 6W9 1I8 1W7 1I9 1W8 1W9",
      "2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 (2F5;5B1) (5F4;2B0) (2F6;5B2) (5F5;2B1) (2F7;5B3) (5F6;2B2) (2F8;5B4) "
      "(5F7;2B3) (2F9;5B5) (5F8;2B4) 5B6 (5F9;2B5) 5B7 2B6 5B8 2I7 5I9 2I8 2W7 2I9 5W9 2W8 2W9",
      "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 (4F4;3B0) (3F5;4B1) (4F5;3B1) (3F6;4B2) (4F6;3B2) (3F7;4B3) (4F7;3B3) (3F8;4B4) "
      "(4F8;3B4) (3F9;4B5) (4F9;3B5) 4B6 3B6 4B7 3B7 4I8 3I8 4I9 3I9 4W8 3W8 4W9 3W9"};
  for (int rank = 0; rank < 4; ++rank) CHECK(list_of(dualpipev({4, 10}), rank) == published[rank]);

  CHECK(describe(one_f_one_b({2, 3})) == "rank0: 0F0 0F1 0B0 0F2 0B1 0B2\nrank1: 1F0 1B0 1F1 1B1 1F2 1B2\n");
  CHECK(list_of(gpipe({2, 2}), 1) == "1F0 1F1 1B0 1B1");
  CHECK(list_of(looped_bfs({2, 2, 2}), 0) == "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0");
  CHECK(list_of(interleaved({2, 2, 2}), 0) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  CHECK(list_of(zb1p({2, 3}), 1) == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
  CHECK(list_of(zb2p({2, 4}), 0) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3");
  CHECK(list_of(zbv({2, 3}), 0) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2");
  // A microbatch does not divide by the ranks: rounds of 3 and 2.
  CHECK(list_of(interleaved({2, 5, 2}), 1) == "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4");
}

TEST_CASE("pipeline text: pictures", "[pipeline]") {
  for (const auto& schedule : every_schedule(3, 7)) {
    const auto timeline = simulate(schedule);
    size_t actions = 0, parts = 0;
    for (const auto& list : schedule.ranks) {
      for (const auto& action : list) {
        ++actions;
        for (const auto& part : Parts(action)) parts += is_compute(part.kind);
      }
    }
    const auto svg = to_svg(schedule, timeline);
    CHECK(occurrences(svg, "<title>") == parts);
    CHECK(occurrences(svg, "<rect ") == occurrences(svg, "/>") + occurrences(svg, "</rect>"));
    CHECK(svg.starts_with("<svg "));
    CHECK(svg.ends_with("</svg>\n"));

    const auto trace = nlohmann::json::parse(to_chrome_trace(schedule, timeline));
    size_t boxes = 0;
    double end = 0;
    for (const auto& event : trace["traceEvents"]) {
      if (event["ph"] != "X") continue;
      ++boxes;
      end = std::max(end, event["ts"].get<double>() + event["dur"].get<double>());
    }
    CHECK(boxes == actions);
    CHECK(end == Approx(timeline.makespan * 1000));
  }
  auto named = gpipe({1, 1});
  named.name = "<a> & \"b\"";
  CHECK(to_svg(named, simulate(named)).find("&lt;a&gt; &amp;") != std::string::npos);
  CHECK(nlohmann::json::parse(to_chrome_trace(named, simulate(named)))["traceEvents"][0]["args"]["name"] == named.name);
  CHECK(to_svg(named, simulate(named, {{0, 0, 0}})).find("nan") == std::string::npos);
}

}  // namespace dtensor::pipelining::test
