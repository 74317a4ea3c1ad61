// What errors say beside what happened: the rank, once; ranges that are empty; on request the place.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/words_of.hpp"

#include "ops/family.hpp"

#include <cstdlib>

namespace dt = dtensor;
using namespace dtensor::test;

namespace {

int occurrences(const std::string& text, const std::string& part) {
  int n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

struct Variable {  // of the environment
  Variable(const char* name, const char* value) : name(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name); }
  const char* name;
};

// Not inlined, so that it has a frame.
[[gnu::noinline]] void refused_by_libtorch() { torch::ones({2, 3}).mm(torch::ones({2, 3})); }
[[gnu::noinline]] void refused_by_us() { dt::fail("test", "refused"); }

}  // namespace

TEST_CASE("error texts: a rank is named once also where an error quotes another", "[errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    for (const int ranks : {2, 3}) {
      REQUIRE_NOTHROW(on_ranks(ranks, [](dt::World& world) {
        const auto mesh = line(world);
        const auto name = fmt::format("(rank {})", world.rank());
        const auto once = [&](const std::string& text) {
          dt::require(occurrences(text, name) == 1 && text.ends_with(name), "test", "not once, at the end: {}!", text);
        };
        const auto inner = words_of([] { dt::fail("inner", "no"); });
        once(inner);
        once(words_of([&] { dt::fail("outer", "{}; got {}", inner, 3); }));
        once(words_of([&] { dt::fail("outermost", "'{}'", words_of([&] { dt::fail("outer", "{}", inner); })); }));
        dt::Spmd spmd(mesh);
        torch::nn::Linear linear(4, 4);
        once(words_of([&] { dt::parallelize_module(*linear, mesh, {{"*", {{"tp", dt::shard(1)}}}}); }));
        const auto other = world.rank() == 0 ? "rank 1 failed: no (rank 1)" : "rank 0 failed: no (rank 0)";
        dt::require(words_of([&] { dt::fail("outer", "{}", other); }).find(other) != std::string::npos, "test",
                    "another rank was taken out");
      }, transport));
    }
  }
}

TEST_CASE("error texts: an empty range is said to be empty", "[errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [](dt::World& world) {
    const auto mesh = line(world);
    const auto says_so = [](const std::string& text, const std::string& words) {
      dt::require(text.find("-1") == std::string::npos && text.find(words) != std::string::npos, "test", "no '{}' in: {}", words, text);
    };
    says_so(words_of([&] { dt::distribute_tensor(torch::ones({}), mesh, {dt::shard(0)}); }), "no dims to cut");
    says_so(words_of([&] { dt::rules::check_positions("aten::gather", torch::zeros({2}, torch::kLong), 0); }), "is empty");
  }));
  on_ranks(1, [](dt::World& world) {
    const auto alone = world.transport().connect("alone", {0});
    const auto text = words_of([&] { alone->send(torch::ones({1}), 0); });
    CHECK(text.find("has one rank, and so no peers") != std::string::npos);
  });
}

TEST_CASE("error texts: on request an error says where in the program it was thrown", "[errors]") {
  for (const auto* transport : {"threads", "gloo"}) {
    for (const int ranks : {1, 2}) {
      const auto text_of = [&](void (*call)()) {
        return words_of([&] {
          on_ranks(ranks, [&](dt::World& world) {
            if (world.rank() + 1 == world.size()) call();
          }, transport);
        });
      };
      CHECK(text_of(refused_by_us).find("thrown at") == std::string::npos);
      Variable variable("DTENSOR_BACKTRACE", "1");
      for (auto* call : {refused_by_libtorch, refused_by_us}) {
        const auto text = text_of(call);
        INFO(text);
        CHECK(occurrences(text, "thrown at ") == 1);
        CHECK(text.find("addr2line -Cfpe ") != std::string::npos);
        CHECK(text.find("libtorch_cpu") == std::string::npos);
        CHECK(text.find("libdtensor") == std::string::npos);
      }
    }
  }
}
