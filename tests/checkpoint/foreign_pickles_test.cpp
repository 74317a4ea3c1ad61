// Pickles that want to run something, to take all memory, or to read what is not theirs, and files that were changed at random.
#include "src/checkpoint/foreign/pickle.hpp"
#include "src/checkpoint/foreign/zip.hpp"
#include "tests/support/sanitizers.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <cstring>
#include <random>

#include <sys/resource.h>

namespace dt = dtensor;
namespace ck = dtensor::checkpoints;
using namespace dt::test;
using namespace std::string_literals;

namespace {

void write_archive(const std::string& path, const std::string& pickle, int64_t storage_bytes = 24, const std::string& key = "0") {
  std::filesystem::remove(path);
  ck::disk::NewFile file(path);
  ck::foreign::ZipWriter zip(file);
  const std::string storage(static_cast<size_t>(storage_bytes), '\1');
  zip.add("archive/data.pkl", pickle.data(), static_cast<int64_t>(pickle.size()));
  zip.add("archive/data/" + key, storage.data(), storage_bytes);
  zip.finish();
  file.finish(false);
}

// What is said of a file of torch.save, and of a .metadata of DCP, with a pickle.
std::vector<std::string> said_of(const std::string& pickle) {
  const Folder folder;
  write_archive(folder / "file.pt", pickle);
  std::filesystem::create_directory(folder / "dcp");
  std::ofstream(folder / "dcp/.metadata", std::ios::binary) << pickle;
  std::vector<std::string> said;
  for (const auto* name : {"file.pt", "dcp"}) {
    try {
      ck::read_any(folder / name);
      said.push_back("no error");
    } catch (const dt::Error& error) {
      said.push_back(error.what_without_backtrace());
    }
  }
  return said;
}

void check_refused(const std::string& pickle, const std::string& text) {
  for (const auto& said : said_of(pickle)) {
    INFO(said);
    CHECK(said.find(text) != std::string::npos);
  }
}

std::string text_in_pickle(const std::string& text) { return "\x8c"s + static_cast<char>(text.size()) + text; }

// (storage of `elements` floats, offset, sizes, strides) as arguments; numbers below 256.
std::string tensor_in_pickle(const std::string& key, int elements, int offset, const std::string& sizes, const std::string& strides) {
  const auto numbers = [](const std::string& list) {
    std::string all = "(";
    for (const char number : list) all += "K"s + number;
    return all + "t";
  };
  return "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"s + text_in_pickle(key) + text_in_pickle("cpu") +
         "K" + static_cast<char>(elements) + "tQK" + static_cast<char>(offset) + numbers(sizes) + numbers(strides) + "\x89}tR";
}

template <class Number>
std::string raw_in_pickle(char op, Number number) {
  return op + std::string(reinterpret_cast<const char*>(&number), sizeof number);
}

std::string numbers_in_pickle(const std::vector<int32_t>& list) {
  std::string all = "(";
  for (const auto number : list) all += raw_in_pickle('J', number);
  return all + "t";
}

std::string long_text_in_pickle(const std::string& text) { return raw_in_pickle('X', static_cast<uint32_t>(text.size())) + text; }

// A dict of tensors of one storage of floats: entries are a name in the pickle, and the tensor's offset.
std::string pickle_of_tensors(const std::string& key, const std::vector<int32_t>& sizes, const std::vector<int32_t>& strides,
                              const std::vector<std::pair<std::string, uint16_t>>& tensors) {
  auto pickle = "\x80\x04" "ctorch._utils\n_rebuild_tensor_v2\nq\x01" "0"  // what repeats is remembered
                "(X\x07\0\0\0storagectorch\nFloatStorage\n"s +
                long_text_in_pickle(key) + text_in_pickle("cpu") + "K\x01tQq\x02" "0" + numbers_in_pickle(sizes) + "q\x03" "0" +
                numbers_in_pickle(strides) + "q\x04" "0}(";
  for (const auto& [name, offset] : tensors) pickle += name + "h\x01(h\x02" + raw_in_pickle('M', offset) + "h\x03h\x04\x89}tR";
  return pickle + "u.";
}

std::vector<std::pair<std::string, uint16_t>> numbered_tensors(int count, bool are_distinct = true) {
  std::vector<std::pair<std::string, uint16_t>> all;
  for (int i = 0; i < count; ++i) all.emplace_back(text_in_pickle("t" + std::to_string(i)), static_cast<uint16_t>(are_distinct ? i : 0));
  return all;
}

std::string object_in_pickle(const std::string& module, const std::string& name, const std::string& fields) {
  return "c" + module + "\n" + name + "\n)\x81}(" + fields + "ub";
}

std::string said_of_file(const std::string& path) {
  try {
    ck::read_any(path);
  } catch (const dt::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// The most memory that the process has had, in MiB.
int64_t most_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss >> 10;
}

}  // namespace

TEST_CASE("foreign pickles: what would run something is refused by its name", "[checkpoint][foreign_files]") {
  const Folder folder;
  const auto marker = folder / "marker";
  const auto command = text_in_pickle("touch " + marker) + "\x85";
  const std::vector<std::pair<std::string, std::string>> refused{
      {"cos\nsystem\n" + command + "R", "os.system"},  // REDUCE
      {"cposix\nsystem\n" + command + "R", "posix.system"},
      {text_in_pickle("builtins") + text_in_pickle("eval") + "\x93" + command + "R", "builtins.eval"},  // STACK_GLOBAL
      {"(" + command + "ios\nsystem\n", "os.system"},                                                   // INST
      {"(icollections\nOrderedDict\n", "collections.OrderedDict"},
      {"(cos\nsystem\n" + command + "o", "os.system"},                   // OBJ
      {"csubprocess\nPopen\n" + command + "\x81", "subprocess.Popen"},   // NEWOBJ
      {"csubprocess\nPopen\n" + command + "}\x92", "subprocess.Popen"},  // NEWOBJ_EX
      {"cos\nenviron\n}b", "os.environ"},                                // BUILD
      {"cbuiltins\nexec\n0N", "builtins.exec"},                          // named, and thrown away
      {"ctorch\nhub.load\n" + command + "R", "torch.hub.load"},
      {"ctorch.storage\n_load_from_bytes\n" + command + "R", "torch.storage._load_from_bytes"},
      {"ccopyreg\n_reconstructor\n", "copyreg._reconstructor"},
      {"c__builtin__\ngetattr\n", "__builtin__.getattr"},
      {"cbuiltins\neval\x07\n", "builtins.eval?"},
      {"\x82\x07", "number 7 of Python's extension registry"},  // EXT1, EXT2, EXT4
      {"\x83\x07\x01", "number 263 of Python's extension registry"},
      {"\x84\x07\x00\x00\x01"s, "extension registry"},
      {"ccollections\nOrderedDict\n]\x85R", "makes a dict of what is given at once"},
      {"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n)}tR",
       "makes tensors of each other"},
      {"ctorch\nTensor\n)R", "torch.Tensor, which is no function"},
  };
  for (const auto& [pickle, text] : refused) check_refused("\x80\x04" + pickle + ".", text);
  CHECK(!std::filesystem::exists(marker));
}

TEST_CASE("foreign pickles: an object of a distributed checkpoint runs nothing and is left out", "[checkpoint][foreign_files]") {
  const Folder folder;
  auto source = ck::source_of({{"weight", at::ones({3})}});
  source.values["note"] = std::string("cos\nsystem\n)R.");
  ck::write_dcp(folder / "dcp", source);
  auto bytes = bytes_of(folder / "dcp/__0_0.distcp");
  // The pickle of the text becomes one that calls; its checksum becomes "none".
  const auto text = "\x80\x02X\x0e\0\0\0cos"s;
  const auto at = bytes.find(text);
  REQUIRE(at != std::string::npos);
  bytes.replace(at, 7, "\x80\x02NNNNN");
  const auto header = bytes.rfind("PK\3\4", at), entry = bytes.find("PK\1\2", at);
  bytes.replace(header + 14, 4, "\0\0\0\0"s);
  bytes.replace(entry + 16, 4, "\0\0\0\0"s);
  std::ofstream(folder / "dcp/__0_0.distcp", std::ios::binary) << bytes;
  const auto index = ck::read_any(folder / "dcp");
  CHECK(index.values.empty());
  CHECK(index.writer.at("skipped").find("os.system") != std::string::npos);
  CHECK(ck::read_tensor(index, "weight").equal(at::ones({3})));
}

TEST_CASE("foreign pickles: nothing of their making takes the memory or the stack", "[checkpoint][foreign_files]") {
  std::string bomb = "\x80\x04]";  // ten lists, each ten times the one before
  bomb += "q\x01";
  for (char level = 1; level < 11; ++level) {
    bomb += "](";
    for (int i = 0; i < 10; ++i) bomb += "h"s + level;
    bomb += "eq"s + static_cast<char>(level + 1);
  }
  CHECK(said_of(bomb + ".")[0].find("far more memory") != std::string::npos);
  std::string texts = "\x80\x04X\x00\x00\x10\x00"s + std::string(size_t{1} << 20, 'x') + "q\x01](";
  for (int i = 0; i < 2000; ++i) texts += "h\x01";
  CHECK(said_of(texts + "e.")[0].find("far more memory") != std::string::npos);
  std::string sizes = "\x80\x04](";  // a list of ten thousand, which as many calls would copy
  for (int i = 0; i < 10000; ++i) sizes += "K\x01";
  sizes += "eq\x01](";
  for (int i = 0; i < 10000; ++i) sizes += "ctorch\nSize\nh\x01\x85R";
  CHECK(said_of(sizes + "e.").size() == 2);
  check_refused(
      "\x80\x04]q\x01h\x01"
      "a.",
      "");
  CHECK(said_of("\x80\x04]q\x01h\x01"
                "a.")[0]
            .find("nested more than 64 deep") != std::string::npos);
  CHECK(said_of("\x80\x04" + std::string(100000, ']') + std::string(99999, 'a') + ".")[0].find("nested more than 64 deep") !=
        std::string::npos);
  check_refused("\x80\x04Nr\xff\xff\xff\xff.", "remembers a value under a number");
  check_refused("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "cut off");
  check_refused("\x80\x04X\xff\xff\xff\xff.", "cut off");
  check_refused("\x80\x04.", "where there is none");
  check_refused("\x80\x04(N1.", "where there is none");
  check_refused("\x80\x04t.", "a mark that it has not set");
  check_refused("\x80\x04h\x01.", "has not remembered");
  check_refused("\x80\x09N.", "protocol 9");
  check_refused("\x80\x04\xff.", "0xff");
  check_refused("\x80\x04N", "cut off");
  check_refused("", "cut off");
}

TEST_CASE("foreign pickles: a tensor lies in its own storage", "[checkpoint][foreign_files]") {
  const auto said = [](const std::string& tensor) { return said_of("\x80\x04}" + text_in_pickle("w") + tensor + "s.")[0]; };
  CHECK(said(tensor_in_pickle("0", 6, 0, "\2\3", "\3\1")) == "no error");
  CHECK(said(tensor_in_pickle("0", 6, 0, "\3\2", "\1\3")) == "no error");
  CHECK(said(tensor_in_pickle("0", 6, 1, "\2\3", "\3\1")).find("beyond the 24 bytes") != std::string::npos);
  CHECK(said(tensor_in_pickle("0", 6, 0, "\2\3", "\4\1")).find("beyond the 24 bytes") != std::string::npos);
  CHECK(said(tensor_in_pickle("1", 6, 0, "\2\3", "\3\1")).find("no record 'archive/data/1'") != std::string::npos);
  CHECK(said(tensor_in_pickle("../data.pkl", 6, 0, "\2\3", "\3\1")).find("no record") != std::string::npos);
  CHECK(said(tensor_in_pickle("0", 6, 0, "\2", "\3\1")).find("more sizes than strides") != std::string::npos);
  const auto spread = tensor_in_pickle("0", 6, 0, "\xff\xff\xff\xff\xff\xff\xff\xff\xff", "\0\0\0\0\0\0\0\0\0"s);
  CHECK(said(spread).find("overflow") != std::string::npos);
  CHECK(said(tensor_in_pickle("0", 6, 0, "\xff\xff\xff", "\0\0\0"s)).find("more than 65536 runs") != std::string::npos);
  const Folder folder;
  write_archive(folder / "turned.pt", "\x80\x04}" + text_in_pickle("w") + tensor_in_pickle("0", 6, 0, "\3\2", "\1\3") + "s.");
  CHECK(ck::read_any(folder / "turned.pt").tensors.at("w").pieces.size() == 6);
}

TEST_CASE("foreign pickles: what a file repeats takes memory by its size", "[checkpoint][foreign_files]") {
  const Folder folder;
  const auto path = folder / "file.pt", key = std::string(60000, 'k');
  const auto memory = most_memory();
  write_archive(path, pickle_of_tensors(key, {1}, {1}, numbered_tensors(4000)), 16000, key);
  CHECK(ck::read_any(path).tensors.size() == 4000);
  CHECK((kSanitized || most_memory() - memory < 100));  // a sanitizer keeps what is freed
  std::vector<int32_t> no_elements(64, 1);
  no_elements[0] = 0;
  write_archive(path, pickle_of_tensors("0", no_elements, std::vector<int32_t>(64, 1), numbered_tensors(40000)));
  CHECK(said_of_file(path).find("far more memory") != std::string::npos);
  auto same = numbered_tensors(30000, /*are_distinct=*/false);
  same.front().first = long_text_in_pickle(std::string(4000, 'n'));
  write_archive(path, pickle_of_tensors("0", {1}, {1}, same));
  CHECK(said_of_file(path).find("far more memory") != std::string::npos);
  const std::string dcp = "torch.distributed.checkpoint.metadata";
  std::string places;
  for (uint16_t i = 0; i < 3000; ++i) {
    const auto offset = "(" + raw_in_pickle('M', i) + "t";
    places += object_in_pickle(dcp, "MetadataIndex", text_in_pickle("fqn") + "h\x01" + text_in_pickle("offset") + offset) + "h\x02";
  }
  const auto info = object_in_pickle("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                                     text_in_pickle("relative_path") + text_in_pickle("file") + text_in_pickle("offset") + "K\0"s +
                                         text_in_pickle("length") + "K\0"s);
  const auto fields = text_in_pickle("storage_data") + "}(" + places + "u" + text_in_pickle("state_dict_metadata") + "}";
  const auto metadata = "\x80\x04" + long_text_in_pickle(std::string(100'000, 'n')) + "q\x01" "0" + info + "q\x02" "0" +
                        object_in_pickle(dcp, "Metadata", fields) + ".";
  CHECK(said_of(metadata)[1].find("far more memory") != std::string::npos);
}

TEST_CASE("foreign pickles: a tensor repeats elements within bounds", "[checkpoint][foreign_files]") {
  const Folder folder;
  const auto path = folder / "file.pt";
  const auto write = [&](const std::vector<int32_t>& sizes, const std::vector<int32_t>& strides, int64_t storage_bytes) {
    write_archive(path, pickle_of_tensors("0", sizes, strides, {{text_in_pickle("w"), uint16_t{0}}}), storage_bytes);
  };
  write({65536, 1 << 20}, {0, 1}, 4 << 20);
  CHECK(said_of_file(path).find("'w': it is [65536, 1048576] with strides [0, 1], which repeats the 4194304 bytes") != std::string::npos);
  write({65536, 1 << 20}, {1, 1}, 5 << 20);
  CHECK(said_of_file(path).find("which repeats the 5242880 bytes") != std::string::npos);
  write({10, 6}, {0, 1}, 24);
  const auto expanded = ck::read_tensor(ck::read_any(path), "w");
  CHECK(expanded.sizes() == at::IntArrayRef({10, 6}));
  CHECK(expanded[9].equal(expanded[0]));
  CHECK(expanded.count_nonzero().item<int64_t>() == 60);
}

TEST_CASE("foreign pickles: files that were changed at random are read or refused", "[checkpoint][foreign_files]") {
  const Folder folder;
  auto source = ck::source_of({{"a", at::arange(12).reshape({3, 4})}, {"b.c", torch::randn({5})}, {"d", at::ones({2}, at::kBFloat16)}});
  source.values = {{"step", int64_t{3}}, {"name", std::string("run")}};
  ck::write_huggingface(folder / "hf", source, {.file_bytes = 60});
  ck::write_torch_file(folder / "all.pt", source);
  ck::write_dcp(folder / "dcp", source);
  const std::vector<std::pair<std::string, std::string>> cases{{"all.pt", "all.pt"},
                                                               {"dcp", "dcp/.metadata"},
                                                               {"dcp", "dcp/__0_0.distcp"},
                                                               {"hf", "hf/model-00001-of-00002.safetensors"},
                                                               {"hf", "hf/model.safetensors.index.json"}};
  std::mt19937_64 random(7);
  const auto below = [&](size_t most) { return static_cast<size_t>(random() % most); };
  for (const auto& [path, file] : cases) {
    const auto valid = bytes_of(folder / file);
    int64_t read = 0, refused = 0;
    for (int run = 0; run < 1000; ++run) {
      auto bytes = valid;
      for (size_t change = 0; change <= below(3); ++change) {
        if (bytes.empty()) bytes = "x";
        const auto at = below(bytes.size());
        if (const auto kind = below(8); kind < 5)
          bytes[at] = static_cast<char>(kind < 2 ? bytes[at] ^ (1 << below(8)) : static_cast<int>(below(256)));
        else if (kind == 5) bytes.resize(at + 1);
        else if (kind == 6) bytes.erase(at, below(9));
        else bytes.insert(at, bytes.substr(below(bytes.size()), below(20)));
      }
      std::ofstream(folder / file, std::ios::binary) << bytes;
      try {
        const auto index = ck::read_any(folder / path);
        for (const auto& [name, tensor] : index.tensors) {
          if (tensor.bytes() < (1 << 24)) ck::read_tensor(index, name);
        }
        ++read;
      } catch (const dt::Error&) {
        ++refused;
      }
    }
    std::ofstream(folder / file, std::ios::binary) << valid;
    INFO(file << ": " << read << " read, " << refused << " refused");
    CHECK(refused > 100);
    CHECK_NOTHROW(ck::read_any(folder / path));
  }
}
