// Runs the tests. For tools/test, which must know what was running when a test crashes or hangs, it
// appends a line to the file $DTENSOR_TEST_EVENTS as each test case starts and ends:
//   start<TAB>NAME<TAB>TAGS    pass<TAB>NAME    fail<TAB>NAME    skip<TAB>NAME<TAB>REASON
// and `dtensor-tests --names` lists the test cases, a line each: NAME<TAB>TAGS. Run by hand it says what was skipped, and why.
#define CATCH_CONFIG_RUNNER
#include "catch.hpp"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string_view>

namespace {

#ifdef TWOBLUECUBES_SINGLE_INCLUDE_CATCH_HPP_INCLUDED
using Listener = Catch::TestEventListenerBase;
const Catch::TestCaseInfo& info(const Catch::TestCase& test) { return test; }
const Catch::TestCaseInfo& info(const Catch::TestCaseStats& stats) { return stats.testInfo; }
#else
using Listener = Catch::EventListenerBase;
const Catch::TestCaseInfo& info(const Catch::TestCaseHandle& test) { return test.getTestCaseInfo(); }
const Catch::TestCaseInfo& info(const Catch::TestCaseStats& stats) { return *stats.testInfo; }
#endif

class Events : public Listener {
 public:
  using Listener::Listener;

  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    dtensor_tests::skip_reason.clear();
    write("start", test.name, test.tagsAsString());
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const auto& name = info(stats).name;
    if (!stats.totals.assertions.allOk()) {
      write("fail", name, "");
    } else if (!dtensor_tests::skip_reason.empty()) {
      write("skip", name, dtensor_tests::skip_reason);
      if (!path()) std::cout << "skipped: " << name << ": " << dtensor_tests::skip_reason << std::endl;
    } else {
      write("pass", name, "");
    }
  }

 private:
  static const char* path() {
    static const char* value = std::getenv("DTENSOR_TEST_EVENTS");
    return value;
  }

  static void write(std::string_view what, std::string_view name, std::string_view more) {
    if (path()) std::ofstream(path(), std::ios::app) << what << '\t' << name << '\t' << more << std::endl;
  }
};

int list_names(Catch::Session& session) {
  for (const auto& test : Catch::getAllTestCasesSorted(session.config())) {
    std::cout << info(test).name << '\t' << info(test).tagsAsString() << '\n';
  }
  return 0;
}

}  // namespace

CATCH_REGISTER_LISTENER(Events)

int main(int argc, char** argv) {
  Catch::Session session;
  if (argc == 2 && std::string_view(argv[1]) == "--names") return list_names(session);
  return session.run(argc, argv) == 0 ? 0 : 1;  // the versions of Catch2 have different numbers for failures
}
