// Checkpoints that are damaged, do not fit, or are asked for what cannot be.
#include "tests/support/refuses.hpp"
#include "tests/support/torch_files_support.hpp"

#include "src/checkpoint/safetensors.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/crc32c.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <cstdlib>
#include <random>

namespace dt = dtensor;
using namespace dt::test;

namespace {

// What a call throws, on any rank; empty: nothing.
template <class Call>
std::string thrown_by(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("not ours: ") + error.what();
  }
  return "";
}

void overwrite(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string data_file(const std::string& step) {
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    if (entry.path().extension() == ".safetensors") return entry.path().string();
  }
  return "";
}

// A step of one tensor of half a megabyte and some small ones.
struct OneStep {
  OneStep() { dt::save(state(), folder.path, 1); }
  dt::State state() { return {{"big", big}, {"flags", flags}, {"number", number}, {"epoch", epoch}}; }
  Folder folder;
  at::Tensor big = torch::arange(65536, torch::kDouble), flags = torch::tensor({true, false, true}), number = torch::tensor(7.5F);
  int64_t epoch = 3;
  std::string step = dt::step_folder(folder.path, 1), index = step + "/index.json";
};

// An index of some bytes of one file.
dt::checkpoints::Index index_of_bytes(const std::map<std::string, int64_t>& tensors) {
  dt::checkpoints::Index index;
  index.files = {{"data.safetensors", 1000, 200, 0}};
  for (const auto& [name, size] : tensors) index.tensors[name] = {at::kByte, {size}, {{{{0, size}}, 0, 200}}};
  return index;
}

}  // namespace

TEST_CASE("checkpoint: crc32c is that of RFC 3720", "[checkpoint]") {
  using namespace dt::checkpoints;
  CHECK(crc32c(std::string(32, '\0').data(), 32) == 0x8a9136aa);
  CHECK(crc32c(std::string(32, '\xff').data(), 32) == 0x62a8ab43);
  CHECK(crc32c("123456789", 9) == 0xe3069283);
  std::string bytes(100'000, '\0');
  std::mt19937 random(1);
  for (auto& byte : bytes) byte = static_cast<char>(random());
  for (const size_t size : {0UL, 1UL, 7UL, 8UL, 12287UL, 12288UL, 12289UL, 40'000UL, 100'000UL}) {
    CHECK(crc32c(bytes.data(), size) == crc32c_by_table(bytes.data(), size));
    CHECK(crc32c(bytes.data() + size / 3, size - size / 3, crc32c(bytes.data(), size / 3)) == crc32c(bytes.data(), size));
  }
}

TEST_CASE("checkpoint: crc32c is that of its parts joined", "[checkpoint]") {
  using namespace dt::checkpoints;
  std::mt19937 random(2);
  for (const int64_t size : {1, 5, 4096, 70'001}) {
    std::string bytes(static_cast<size_t>(size), '\0');
    for (auto& byte : bytes) byte = static_cast<char>(random());
    std::array<Crc32cPart, 3> parts;  // each run is one's
    for (int64_t begin = 0, run; begin < size; begin += run) {
      run = std::min<int64_t>(size - begin, 1 + static_cast<int64_t>(random()) % 9000);
      parts[random() % parts.size()].add(begin, bytes.data() + begin, run);
    }
    uint32_t sum = 0;
    for (const auto& part : parts) sum ^= part.value(size);
    CHECK(crc32c_of_parts(sum, size) == crc32c_by_table(bytes.data(), bytes.size()));
  }
}

TEST_CASE("checkpoint: every flipped bit is found", "[checkpoint]") {
  OneStep saved;
  const auto index = bytes_of(saved.index), path = data_file(saved.step), data = bytes_of(path);
  for (size_t bit = 0; bit < 8 * index.size(); ++bit) {
    auto damaged = index;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    overwrite(saved.index, damaged);
    const auto text = thrown_by([&] { dt::load(saved.state(), saved.folder.path); });
    if (text.find("index.json' is damaged") == std::string::npos) FAIL("bit " << bit << ": " << text);
  }
  overwrite(saved.index, index);
  const char* wanted = std::getenv("DTENSOR_TEST_CASES");
  std::mt19937_64 random(2);
  for (int i = 0; i < (wanted ? std::atoi(wanted) : 500); ++i) {
    const auto bit = i < 64 ? static_cast<size_t>(i) : random() % (8 * data.size());  // those of the header's length among them
    auto damaged = data;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    overwrite(path, damaged);
    const auto text = thrown_by([&] { dt::load(saved.state(), saved.folder.path); });
    if (text.find("damaged") == std::string::npos || text.find(path) == std::string::npos) FAIL("bit " << bit << ": " << text);
  }
  overwrite(path, data);
  CHECK(dt::load(saved.state(), saved.folder.path) == 1);
}

TEST_CASE("checkpoint: files that are cut empty or gone are named", "[checkpoint][errors]") {
  OneStep saved;
  const auto index = bytes_of(saved.index), path = data_file(saved.step), data = bytes_of(path);
  const auto load = [&] { return thrown_by([&] { dt::load(saved.state(), saved.folder.path); }); };
  overwrite(path, data.substr(0, data.size() - 1));
  CHECK_THAT(load(), says("expected " + std::to_string(data.size()) + "; hint: it was cut"));
  overwrite(path, data + "x");
  CHECK_THAT(load(), says("has " + std::to_string(data.size() + 1) + " bytes"));
  overwrite(path, "");
  CHECK_THAT(load(), says("has 0 bytes"));
  std::filesystem::remove(path);
  CHECK_THAT(load(), says("' is damaged: there is no such file"));
  overwrite(path, data);
  overwrite(saved.index, "");
  CHECK_THAT(load(), says("no index of a checkpoint"));
  std::filesystem::remove(saved.index);
  CHECK_THAT(load(), says("has no complete step of a checkpoint"));
  overwrite(saved.index, index);
  CHECK_THAT(thrown_by([&] { dt::load(saved.state(), saved.folder.path, 4); }), says("has no complete step 4; closest: 1"));
  CHECK_THAT(thrown_by([&] { dt::load(saved.state(), saved.folder / "none"); }), says("there is no such folder"));
  CHECK_THAT(thrown_by([&] { dt::load(saved.state(), saved.step); }), says("it is a step itself"));
  std::filesystem::rename(saved.step, dt::step_folder(saved.folder.path, 2));
  CHECK_THAT(load(), says("says that it is step 1; expected 2"));
}

TEST_CASE("checkpoint: what does not fit is listed together and changes nothing", "[checkpoint][errors]") {
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    static const Folder folder;
    const auto mesh = line(world);
    const auto laid = [&](at::Tensor whole) { return dt::distribute_tensor(whole, mesh, {dt::shard(0)}).tensor().clone(); };
    auto weight = laid(torch::ones({4, 2})), bias = laid(torch::ones({4})), scale = laid(torch::ones({3}));
    int64_t epoch = 1;
    dt::save({{"layer.weight", weight}, {"layer.bias", bias}, {"layer.scale", scale}, {"epoch", epoch}}, folder.path, 1);
    auto other_weight = laid(torch::zeros({5, 2})), other_bias = laid(torch::zeros({4}, torch::kDouble)),
         other_scale = laid(torch::zeros({3}));
    std::string text_epoch = "none";
    const auto text = thrown_by([&] {
      dt::load({{"layer.weight", other_weight}, {"layer.bias", other_bias}, {"layer.scales", other_scale}}, folder.path);
    });
    for (const auto* part : {"'layer.weight' has sizes [4, 2], expected [5, 2]", "'layer.bias' is Float, expected Double",
                             "it has no 'layer.scales' (closest: "
                             "'layer.scale'"})
      dt::require(text.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, text);
    dt::require(dt::full_tensor(other_weight).eq(0).all().item<bool>(), "test", "the tensors were changed");
    const auto more = thrown_by([&] { dt::load({{"layer.weight", weight}, {"layer.bias", bias}}, folder.path); });
    for (const auto* part :
         {"has 2 names that the state has not", "'layer.scale' (closest in the state: ", "'epoch'", "LoadOptions.partial"})
      dt::require(more.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, more);
    weight.zero_();
    dt::load({{"layer.weight", weight}, {"layer.bias", bias}}, folder.path, {}, {.partial = true});
    dt::require(dt::full_tensor(weight).eq(1).all().item<bool>(), "test", "nothing was loaded");
    dt::load({{"layer.bias", other_bias}}, folder.path, {}, {.only = {"layer.bias"}, .convert = true});
    dt::require(dt::full_tensor(other_bias).eq(1).all().item<bool>(), "test", "nothing was converted");
    auto renamed = laid(torch::zeros({3}));
    dt::load({{"block.scale", renamed}}, folder.path, {}, {.only = {"block.scale"}, .rename = {{"layer.", "block."}}});
    dt::require(dt::full_tensor(renamed).eq(1).all().item<bool>(), "test", "nothing was renamed");
    const auto kind = thrown_by([&] { dt::load({{"epoch", text_epoch}}, folder.path, {}, {.only = {"epoch"}}); });
    dt::require(kind.find("'epoch' was saved as 1, which is an integer; expected a text") != std::string::npos, "test", "{}", kind);
    const auto swapped = thrown_by([&] { dt::load({{"epoch", bias}, {"layer.bias", epoch}}, folder.path, {}, {.partial = true}); });
    for (const auto* part : {"'epoch' is a value there, expected a tensor", "'layer.bias' is a tensor there, expected a value"})
      dt::require(swapped.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, swapped);
  }));
}

TEST_CASE("checkpoint: what ranks do not agree on is refused on every rank", "[checkpoint][errors]") {
  for (const auto* transport : {"threads", "shm"}) {
    const Folder folder;
    REQUIRE_NOTHROW(on_ranks(
        3,
        [&](dt::World& world) {
          const int rank = world.rank();
          auto plain = torch::full({4}, 1.0), other = torch::full({4}, rank == 1 ? 2.0 : 1.0), longer = torch::ones({rank == 2 ? 5 : 4});
          int64_t epoch = rank == 0 ? 3 : 4;
          const auto refused = [&](const std::string& part, const auto& call) {
            const auto text = thrown_by(call);
            dt::require(text.find(part) != std::string::npos, "test", "no '{}' in '{}'", part, text);
          };
          dt::save({{"plain", plain}}, folder.path, 1);
          refused("ranks name different folders or steps", [&] { dt::save({{"plain", plain}}, folder.path, rank == 1 ? 3 : 2); });
          refused("ranks name different folders or steps", [&] { dt::load({{"plain", plain}}, folder.path, rank == 1 ? 2 : 1); });
          refused("'longer' is Float[4] on rank 0 and Float[5] on rank 2", [&] { dt::save({{"longer", longer}}, folder.path, 2); });
          refused("the plain tensor 'other' has other values on rank 1", [&] { dt::save({{"other", other}}, folder.path, 2); });
          refused("'epoch' is 3 on one rank and 4 on rank 1", [&] { dt::save({{"epoch", epoch}}, folder.path, 2); });
          refused("got step -1", [&] { dt::save({{"plain", plain}}, folder.path, -1); });
          refused("'none' is undefined", [&] {
            at::Tensor none;
            dt::save({{"none", none}}, folder.path, 2);
          });
          refused("is pending", [&] {
            auto pending = dt::from_local(plain, line(world), {dt::partial()}).tensor();
            dt::save({{"pending", pending}}, folder.path, 2);
          });
          refused("cannot be made", [&] { dt::save({{"plain", plain}}, "/proc/none", 2); });
          dt::require(dt::complete_steps(folder.path) == std::vector<int64_t>{1}, "test", "another step is there");
          dt::save({{"other", dt::of_each_rank(other)}, {"epoch", dt::of_each_rank(epoch)}}, folder.path, 2);
          other.zero_();
          epoch = 0;
          dt::load({{"other", dt::of_each_rank(other)}, {"epoch", dt::of_each_rank(epoch)}}, folder.path);
          dt::require(other.eq(rank == 1 ? 2.0 : 1.0).all().item<bool>() && epoch == (rank == 0 ? 3 : 4), "test", "another rank's values");
        },
        transport));
  }
}

TEST_CASE("checkpoint: safetensors files are read as strictly as their own reader does", "[checkpoint]") {
  using namespace dt::checkpoints;
  const Folder folder;
  const auto path = folder / "file.safetensors";
  const auto file = [&](const std::string& header, size_t data, uint64_t size) {
    overwrite(path, std::string(reinterpret_cast<const char*>(&size), 8) + header + std::string(data, '\0'));
    return thrown_by([&] { safetensors::read_header(path); });
  };
  const auto whole = [&](const std::string& header, size_t data) { return file(header, data, header.size()); };
  CHECK(whole("{}      ", 0).empty());
  CHECK(whole("\t\n{}  ", 0).empty());
  CHECK(
      whole(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2,0],"data_offsets":[4,4]}})", 4).empty());
  for (const auto& [header, data] : std::vector<std::pair<std::string, size_t>>{
           {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 3},
           {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 5},
           {"", 0},
           {"{", 0},
           {R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,4]}})", 4},
           {R"({"a":{"dtype":"F32","shape":[2,18446744073709551614],"data_offsets":[0,4]}})", 4},
           {R"({"a":{"dtype":"F32","shape":[2,9223372036854775807],"data_offsets":[0,4]}})", 4},
           {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4},
           {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})", 12},
           {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8},
           {R"({"a":{"dtype":"X1","shape":[1],"data_offsets":[0,4]}})", 4},
           {"{\"\xff\":{}}", 0}}) {
    INFO(header);
    CHECK_THAT(whole(header, data), says("is no safetensors file"));
  }
  CHECK_THAT(file("{}", 0, 1000), says("its header has 1000 bytes"));
  CHECK_THAT(file("{}", 0, UINT64_MAX), says("expected at most 100000000"));
  overwrite(path, "");
  CHECK_THAT(thrown_by([&] { safetensors::read_header(path); }), says("fewer than 8 bytes"));
}

TEST_CASE("checkpoint: an index that claims more than there can be is refused", "[checkpoint][errors]") {
  using dt::checkpoints::Index;
  const auto said = [](const auto& change) {
    auto index = index_of_bytes({{"a", 500}, {"b", 300}});
    change(index);
    return thrown_by([&] { dt::checkpoints::index_from(to_text(index), "claims"); });
  };
  CHECK(said([](Index&) {}).empty());
  CHECK(said([](Index& index) { index.chunk_bytes = 4096; }).empty());
  for (const int64_t chunk : {int64_t{16}, int64_t{4080}, int64_t{1} << 31, int64_t{1} << 62, int64_t{4104}})
    CHECK_THAT(said([&](Index& index) { index.chunk_bytes = chunk; }), says("chunk_bytes is " + std::to_string(chunk)));
  CHECK_THAT(said([](Index& index) { index.files[0].bytes = -1; }), says("'data.safetensors' is said to have -1 bytes"));
  for (const int64_t bytes : {int64_t{-1}, int64_t{1001}, int64_t{1} << 62})
    CHECK_THAT(said([&](Index& index) { index.files[0].header_bytes = bytes; }), says(std::to_string(bytes) + " of them of its header"));
  CHECK_THAT(said([](Index& index) { index.files[0] = {"data.safetensors", int64_t{1} << 40, int64_t{1} << 39, 0}; }),
             says("expected at most 100000008"));
  CHECK_THAT(said([](Index& index) { index.tensors["b"] = index.tensors["a"]; }), says("has fewer bytes than its pieces"));
  CHECK_THAT(said([](Index& index) { index.files.assign(3, {"large", INT64_MAX / 2, 0, 0}); }), says("its files are too large together"));
  CHECK_THAT(said([](Index& index) {
               index.files.assign(2, {"large", INT64_MAX, 0, 0});
               index.tensors["a"] = {at::kByte, {INT64_MAX}, {{{{0, INT64_MAX}}, 0, 0}, {{{0, INT64_MAX}}, 1, 0}}};
             }),
             says("'a' has pieces that are too large together"));
}

TEST_CASE("checkpoint: an index of a later version or of files elsewhere is refused", "[checkpoint][errors]") {
  for (const auto* name : {"../data", "/etc/passwd", "a/../../b", ""}) {
    auto index = index_of_bytes({{"a", 10}});
    index.files[0].name = name;
    CHECK_THAT(thrown_by([&] { dt::checkpoints::index_from(to_text(index), "elsewhere"); }), says("is of a file outside of the folder"));
  }
  for (const std::string other : {"2", "99999999999999999999", "\"1\""}) {
    auto text = to_text(index_of_bytes({{"a", 10}}));
    const std::string version = "\"version\":1";
    text.replace(text.find(version), version.size(), "\"version\":" + other);
    const auto rest = text.substr(text.find('\n') + 1);
    text = fmt::format("{{\"crc32c\": \"{:08x}\",\n", dt::checkpoints::crc32c(rest.data(), rest.size())) + rest;
    const auto shown = other.size() > 5 ? "1e+20" : other;
    CHECK_THAT(thrown_by([&] { dt::checkpoints::index_from(text, "later"); }), says("is of version " + shown + " of the format; expect"));
  }
}

TEST_CASE("checkpoint: files are as long as the index says before memory is taken", "[checkpoint][errors]") {
  const Folder folder;
  overwrite(folder / "data.safetensors", std::string(1000, 'x'));
  auto index = index_of_bytes({{"a", 500}, {"b", 300}});
  index.folder = folder.path;
  index.files[0].header_sum = dt::checkpoints::crc32c(std::string(200, 'x').data(), 200);
  CHECK(dt::checkpoints::faults_of(index).empty());
  CHECK(dt::checkpoints::read_tensor(index, "a").eq(int64_t{'x'}).all().item<bool>());
  index = index_of_bytes({{"a", int64_t{1} << 48}, {"b", 300}});  // more than a process can address
  index.folder = folder.path;
  index.files[0].bytes = int64_t{1} << 49;
  CHECK_THAT(thrown_by([&] { dt::checkpoints::read_tensor(index, "a"); }), says("it has 1000 bytes; expected 562949953421312"));
  CHECK(dt::checkpoints::faults_of(index).size() == 1);
  index.files[0].bytes = -1;  // not known
  CHECK_THAT(thrown_by([&] { dt::checkpoints::read_tensor(index, "a"); }), says("has 1000 bytes; expected 281474976710656 from byte 200"));
  CHECK(dt::checkpoints::faults_of(index).size() == 2);  // its header is another, too
}

TEST_CASE("checkpoint: texts that are not UTF-8 come back as they were", "[checkpoint]") {
  const Folder folder;
  std::string text, own, empty = "none";
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  own = text;
  dt::save({{"text", text}, {"empty", empty}}, folder.path, 1, {.run = "\xfe run"});
  text.clear();
  dt::load({{"text", text}, {"empty", empty}}, folder.path);
  CHECK(text == own);
  auto index = index_of_bytes({});
  index.values = {{"list", std::vector<std::string>{"\xff", "plain", "", own}}, {"cut", std::string("\xc3")},
                  {"plain", std::string("\xc3\xa4")}, {"empty", std::string()}};
  index.writer = {{"run", "\x80"}};
  const auto read = dt::checkpoints::index_from(to_text(index), "texts");
  CHECK((read.values == index.values));
  CHECK((read.writer == index.writer));
  index.values["\xff name"] = int64_t{1};
  CHECK_THROWS_WITH(to_text(index), says("the name \"\\ufffd name\" is not UTF-8"));
}
