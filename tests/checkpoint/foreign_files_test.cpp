// Files of other libraries: what is written is read back bit for bit. foreign.sh has the other libraries themselves.
#include "src/checkpoint/foreign/pickle_writer.hpp"
#include "src/checkpoint/foreign/zip.hpp"
#include "src/checkpoint/safetensors.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/base/compat.hpp>
#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <unistd.h>

namespace dt = dtensor;
namespace ck = dtensor::checkpoints;
using namespace dt::test;

namespace {

std::map<std::string, at::Tensor> foreign_tensors() {
  torch::manual_seed(1);
  std::map<std::string, at::Tensor> all;
  for (const auto dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kComplexFloat})
    all[std::string("all.") + c10::toString(dtype)] = torch::randn({7, 5, 3}).mul(50).abs().to(dtype);
  all["all.bool"] = torch::randn({9}) > 0;
  all["number"] = torch::full({}, 7.5);
  all["count"] = torch::full({}, (int64_t{1} << 40) + 1, at::kLong);
  all["empty"] = torch::empty({0, 3});
  all["turned"] = torch::randn({4, 6}).t();  // not row-major where it comes from
  all["a name/with \"all\" \\ of \xc3\xa4"] = torch::arange(6.0).reshape({2, 3});
  return all;
}

ck::Source foreign_source() {
  auto source = ck::source_of(foreign_tensors());
  source.same_as["tied"] = "all.Float";
  source.values = {{"step", int64_t{12}},
                   {"far", int64_t{-1} << 40},
                   {"rate", 0.1},
                   {"on", true},
                   {"text", std::string("two\nlines")},
                   {"betas", std::vector<double>{0.9, 0.99}},
                   {"ids", std::vector<int64_t>{1, 2}},
                   {"names", std::vector<std::string>{"a", ""}}};
  return source;
}

bool has_same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  return a.numel() == 0 || std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

void check_foreign(const ck::Index& index, bool has_values) {
  const auto expected = foreign_tensors();
  std::set<std::string> names;
  for (const auto& [name, tensor] : index.tensors) names.insert(name);
  for (const auto& [name, tensor] : index.same_as) names.insert(name);
  CHECK(names.size() == expected.size() + 1);
  for (const auto& [name, tensor] : expected) {
    INFO(name);
    CHECK(has_same_bits(ck::read_tensor(index, name), tensor));
  }
  CHECK(has_same_bits(ck::read_tensor(index, "tied"), expected.at("all.Float")));
  if (has_values) CHECK((index.values == foreign_source().values));
}

std::string foreign_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const dt::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// A folder as ByteCheckpoint writes it: the pickle of the tensor in the metadata, its storage in a file.
std::string bytecheckpoint_metadata() {
  ck::pickle::Writer out;
  const auto object = [&](const char* module, const char* name) {
    out.global(module, name);
    out.empty_tuple();
    out.make();
    out.empty_dict();
    out.mark();
  };
  const auto end = [&] {
    out.set_items();
    out.build();
  };
  const auto dcp = "torch.distributed.checkpoint.metadata", byte = "bytecheckpoint.checkpointer.meta_type";
  const auto place = [&](int64_t row) {
    object(dcp, "MetadataIndex");
    out.text("fqn"), out.text("weight"), out.text("offset"), out.torch_size({row, 0}), out.text("index"), out.none();
    end();
  };
  object(byte, "Metadata");
  out.text("state_dict_metadata"), out.empty_dict(), out.mark(), out.text("weight");
  object(dcp, "TensorStorageMetadata");
  out.text("properties");
  object(dcp, "TensorProperties");
  out.text("dtype"), out.dtype(at::kFloat);
  end();
  out.text("size"), out.torch_size({4, 3}), out.text("chunks"), out.empty_list(), out.mark();
  for (const int64_t row : {0, 2}) {
    object(dcp, "ChunkStorageMetadata");
    out.text("offsets"), out.torch_size({row, 0}), out.text("sizes"), out.torch_size({2, 3});
    end();
  }
  out.append_all();
  end();
  out.set_items();
  out.text("storage_data"), out.empty_dict(), out.mark();
  for (const int64_t row : {0, 2}) {
    place(row);
    object(byte, "_StorageInfo");
    out.text("relative_path"), out.text("__0_0.distcp"), out.text("offset"), out.integer(10 + row * 12), out.text("length"),
        out.integer(24);
    end();
  }
  out.set_items();
  out.text("all_tensor_metadata"), out.empty_dict(), out.mark();
  for (const int64_t row : {0, 2}) {
    ck::pickle::Writer header;
    header.tensor(at::kFloat, {2, 3}, "0");
    place(row);
    out.global("_codecs", "encode"), out.mark(), out.text(header.finish()), out.text("latin1"), out.tuple(), out.call();
  }
  out.set_items();
  end();
  return out.finish();
}

void write_bytecheckpoint(const std::string& folder, const at::Tensor& whole) {
  std::ofstream(folder + "/__0_0.distcp", std::ios::binary)
      << std::string(10, 'x') << std::string(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  std::ofstream(folder + "/.metadata", std::ios::binary) << bytecheckpoint_metadata();
}

}  // namespace

TEST_CASE("foreign files: what is written for Hugging Face is read back", "[checkpoint][foreign_files]") {
  const Folder folder;
  ck::write_huggingface(folder / "one", foreign_source(), {.config = "{\"model_type\": \"none\"}"});
  CHECK(bytes_of(folder / "one/config.json") == "{\"model_type\": \"none\"}");
  check_foreign(ck::read_any(folder / "one"), false);
  CHECK(ck::read_any(folder / "one").same_as.at("tied") == "all.Float");
  check_foreign(ck::read_any(folder / "one/model.safetensors"), false);
  ck::write_huggingface(folder / "many", foreign_source(), {.file_bytes = 900});
  const auto many = ck::read_any(folder / "many");
  CHECK(many.files.size() > 5);
  check_foreign(many, false);
  const auto& number = many.tensors.at("number").pieces.at(0);
  CHECK(number.offset % 4 == 0);
  CHECK(folder.files() == 2);  // nothing temporary is left
}

TEST_CASE("foreign files: what is written for PyTorch is read back", "[checkpoint][foreign_files]") {
  const Folder folder;
  ck::write_torch_file(folder / "all.pt", foreign_source());
  check_foreign(ck::read_any(folder / "all.pt"), true);
  ck::write_torch_file(folder / "all.pt", foreign_source());  // replaces it
  ck::write_dcp(folder / "dcp", foreign_source());
  check_foreign(ck::read_any(folder / "dcp"), true);
  ck::write_torch_file(folder / "again.pt", ck::source_of(ck::read_any(folder / "dcp")));
  check_foreign(ck::read_any(folder / "again.pt"), true);
  CHECK(folder.files() == 3);
}

TEST_CASE("foreign files: a failed write leaves what was there", "[checkpoint][foreign_files]") {
  const Folder folder;
  ck::write_torch_file(folder / "all.pt", foreign_source());
  const auto before = bytes_of(folder / "all.pt");
  auto source = foreign_source();
  source.get = [](const std::string& name) { return name == "number" ? at::ones({2}) : foreign_tensors().at(name); };
  const auto wrong = std::string("gave 'number' as Float[2]; expected Float[]");
  CHECK(foreign_error([&] { ck::write_torch_file(folder / "all.pt", source); }).find(wrong) != std::string::npos);
  CHECK(foreign_error([&] { ck::write_huggingface(folder / "hf", source); }).find(wrong) != std::string::npos);
  CHECK(foreign_error([&] { ck::write_dcp(folder / "dcp", source); }).find(wrong) != std::string::npos);
  CHECK(bytes_of(folder / "all.pt") == before);
  CHECK(folder.files() == 1);
  CHECK(foreign_error([&] { ck::write_dcp(folder.path, foreign_source()); }).find("has files; expected a new or empty folder") !=
        std::string::npos);
  source = foreign_source();
  source.same_as["more"] = "nothing";
  CHECK(foreign_error([&] { ck::write_dcp(folder / "dcp", source); }).find("'more' is said to be 'nothing'") != std::string::npos);
  CHECK(foreign_error([&] { ck::read_any(folder / "nowhere"); }).find("there is no") != std::string::npos);
  CHECK(foreign_error([&] { ck::read_any(folder.path); }).find("expected index.json") != std::string::npos);
}

TEST_CASE("foreign files: a list of weights that names what is not there is refused", "[checkpoint][foreign_files]") {
  const Folder folder;
  ck::write_huggingface(folder / "many", foreign_source(), {.file_bytes = 900});
  const auto path = folder / "many/model.safetensors.index.json";
  const auto text = bytes_of(path);
  const auto refused = [&](const std::string& from, const std::string& to) {
    auto changed = text;
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(path) << changed;
    return foreign_error([&] { ck::read_any(folder / "many"); });
  };
  CHECK(refused("\"number\"", "\"numbre\"").find("has no 'numbre', which the index says") != std::string::npos);
  CHECK(refused("\"model-00001", "\"../model-00001").find("no file of the folder") != std::string::npos);
  CHECK(refused("\"model-00001", "\"model-00009").find("no safetensors file") != std::string::npos);
  CHECK(refused("\"weight_map\"", "\"weights_map\"").find("has no object weight_map") != std::string::npos);
}

TEST_CASE("foreign files: each rank reads its shards of any format", "[checkpoint][foreign_files]") {
  const Folder folder;
  const ManyKinds expected(1);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : tensors_of(*expected)) tensors[name] = tensor.detach();
  ck::write_huggingface(folder / "hf", ck::source_of(tensors), {.file_bytes = 500});
  ck::write_torch_file(folder / "all.pt", ck::source_of(tensors));
  ck::write_dcp(folder / "dcp", ck::source_of(tensors));
  for (const std::string name : {"hf", "all.pt", "dcp"}) {
    for (const auto& way : ways()) {
      for (const auto* transport : {"threads", "shm"}) {
        CAPTURE(name, way, transport);
        REQUIRE_NOTHROW(on_way(
            way, 2,
            [&](dt::World&, ManyKinds& model) {
              dt::load({{"model", model}}, ck::read_any(folder / name), {.rename = {{"", "model."}}});
              same_module(*model, *expected, "loaded");
            },
            transport));
      }
    }
  }
}

TEST_CASE("foreign files: a folder of ByteCheckpoint is read", "[checkpoint][foreign_files]") {
  const Folder folder;
  std::filesystem::create_directory(folder / "model");
  const auto whole = torch::arange(12.0).to(at::kFloat).reshape({4, 3});
  write_bytecheckpoint(folder / "model", whole);
  const auto index = ck::read_any(folder.path);
  CHECK(index.writer.at("format") == "bytecheckpoint");
  CHECK(ck::read_tensor(index, "model.weight").equal(whole));
  CHECK(ck::read_tensor(ck::read_any(folder / "model"), "weight").equal(whole));
}

TEST_CASE("foreign files: what a killed process of the same number left is no part of what is written", "[checkpoint][foreign_files]") {
  const Folder folder;
  int64_t left = 0;
  const auto leave = [&](const std::string& name, int most, const auto& make) {
    const auto begin = name + ".part-" + std::to_string(getpid()) + "-";
    for (int number = 0; number < most; ++number, ++left) make(folder / (begin + std::to_string(number)));
  };
  leave("all.pt", 500, [](const std::string& path) { std::ofstream(path) << "left"; });
  leave("hf", 1500, [](const std::string& path) {
    std::filesystem::create_directory(path);
    std::ofstream(path + "/left.safetensors") << "left";
  });
  ck::write_torch_file(folder / "all.pt", foreign_source());
  check_foreign(ck::read_any(folder / "all.pt"), true);
  ck::write_huggingface(folder / "hf", foreign_source());
  check_foreign(ck::read_any(folder / "hf"), false);
  CHECK(!std::filesystem::exists(folder / "hf/left.safetensors"));
  CHECK(folder.files() == left + 2);
}

// Its two names have one place in a file.
TEST_CASE("foreign files: tied tensors of a distributed checkpoint are one", "[checkpoint][foreign_files]") {
  const Folder folder;
  auto source = foreign_source();
  source.same_as["none"] = "empty";
  ck::write_dcp(folder / "dcp", source);
  const auto index = ck::read_any(folder / "dcp");
  CHECK((index.same_as == std::map<std::string, std::string>{{"tied", "all.Float"}}));
  ck::write_torch_file(folder / "all.pt", ck::source_of(index));
  CHECK((ck::read_any(folder / "all.pt").same_as.at("tied") == "all.Float"));
}

TEST_CASE("foreign files: empty lists and views that are conjugate or negative keep their values", "[checkpoint][foreign_files]") {
  const auto x = torch::randn({3, 2}, at::kComplexFloat);
  auto source = ck::source_of({{"conjugate", x.conj()}, {"negative", at::imag(x.conj())}, {"turned", x.conj().t()}});
  source.values = {{"none", std::vector<int64_t>{}}};
  const std::map<std::string, at::Tensor> expected{
      {"conjugate", x.conj().resolve_conj()}, {"negative", -at::imag(x)}, {"turned", x.conj().t().resolve_conj()}};
  const Folder folder;
  ck::write_huggingface(folder / "hf", source);
  ck::write_torch_file(folder / "all.pt", source);
  ck::write_dcp(folder / "dcp", source);
  ck::write_step(folder / "step-1", source);
  for (const std::string name : {"hf", "all.pt", "dcp", "step-1"}) {
    INFO(name);
    const auto index = ck::read_any(folder / name);
    for (const auto& [tensor, values] : expected) CHECK(has_same_bits(ck::read_tensor(index, tensor), values));
    CHECK((name == "hf" || index.values == source.values));
  }
}

#if DTENSOR_TORCH_AT_LEAST(2, 3)
TEST_CASE("foreign files: unsigned integers of two to eight bytes come back", "[checkpoint][foreign_files]") {
  std::map<std::string, at::Tensor> all;
  for (const auto dtype : {at::ScalarType::UInt16, at::ScalarType::UInt32, at::ScalarType::UInt64})
    all[c10::toString(dtype)] = torch::arange(60'000, 60'006).to(dtype);
  const Folder folder;
  ck::write_huggingface(folder / "hf", ck::source_of(all));
  ck::write_torch_file(folder / "all.pt", ck::source_of(all));
  ck::write_dcp(folder / "dcp", ck::source_of(all));
  ck::write_step(folder / "step-1", ck::source_of(all));
  for (const std::string name : {"hf", "all.pt", "dcp", "step-1"}) {
    for (const auto& [tensor, values] : all) CHECK(has_same_bits(ck::read_tensor(ck::read_any(folder / name), tensor), values));
  }
}
#else
TEST_CASE("foreign files: unsigned integers that this libtorch lacks are refused by name", "[checkpoint][foreign_files]") {
  const Folder folder;
  const auto header = ck::safetensors::header_text({{"ids", "U16", {2}, 0, 4}}, {});
  std::ofstream(folder / "file.safetensors", std::ios::binary) << header << std::string(4, '\0');
  const auto said = foreign_error([&] { ck::read_any(folder / "file.safetensors"); });
  CHECK(said.find("'ids' is of U16, a dtype that this libtorch lacks") != std::string::npos);
}
#endif

TEST_CASE("foreign files: a further name is that of a tensor", "[checkpoint][foreign_files]") {
  const Folder folder;
  const auto header = ck::safetensors::header_text({{"t", "F32", {1}, 0, 4}}, {{"a", "t"}, {"b", "a"}, {"c", "c"}});
  std::ofstream(folder / "file.safetensors", std::ios::binary) << header << std::string(4, '\0');
  const auto index = ck::read_any(folder / "file.safetensors");
  CHECK((index.same_as == std::map<std::string, std::string>{{"a", "t"}}));
  auto tensor = at::ones({1});
  dt::load({{"a", tensor}}, index, {.only = {"a"}, .partial = true});
  CHECK(tensor.item<float>() == 0);
  CHECK_NOTHROW(ck::write_dcp(folder / "dcp", ck::source_of(index)));
}
