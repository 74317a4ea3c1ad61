// Damaged data files, loaded on several ranks that read for each other.
#include "tests/support/refuses.hpp"
#include "tests/support/torch_files_support.hpp"

#include <dtensor/checkpoint/manager.hpp>

#include <cstdlib>
#include <random>

namespace dt = dtensor;
using namespace dt::test;

namespace {

enum class Damage { flipped, header, cut, emptied, removed, folder };
constexpr Damage kAllDamage[] = {Damage::flipped, Damage::header, Damage::cut, Damage::emptied, Damage::removed, Damage::folder};

void write_bytes(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string with_flip(std::string bytes, size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  return bytes;
}

// A file with damage, as long as this lives.
class Damaged {
 public:
  Damaged(const std::string& path, Damage damage) : path_(path), bytes_(bytes_of(path)) {
    std::filesystem::remove(path);
    if (damage == Damage::flipped) write_bytes(path, with_flip(bytes_, 8 * (bytes_.size() - 3)));
    if (damage == Damage::header) write_bytes(path, with_flip(bytes_, 8 * 20));
    if (damage == Damage::cut) write_bytes(path, bytes_.substr(0, bytes_.size() / 2));
    if (damage == Damage::emptied) write_bytes(path, "");
    if (damage == Damage::folder) std::filesystem::create_directory(path);
  }
  Damaged(const std::string& path, size_t bit) : path_(path), bytes_(bytes_of(path)) { write_bytes(path, with_flip(bytes_, bit)); }
  ~Damaged() {
    std::filesystem::remove_all(path_);
    write_bytes(path_, bytes_);
  }
  Damaged(const Damaged&) = delete;
  Damaged& operator=(const Damaged&) = delete;

 private:
  const std::string path_, bytes_;
};

std::vector<std::string> data_files(const std::string& step) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(step)) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::ranges::sort(paths);
  return paths;
}

// A matrix that is saved in rows and loaded in columns, so that each rank reads for all, or, where it is wide, its own part of each row;
// and one that every rank has, beside it.
struct InTwoCuts {
  InTwoCuts(dt::World& world, bool is_wide) : mesh(line(world)), whole(numbers(is_wide ? 8192 : 64)) {
    rows = dt::distribute_tensor(whole, mesh, {dt::shard(0)}).tensor().clone();
    columns = dt::distribute_tensor(torch::zeros_like(whole), mesh, {dt::shard(1)}).tensor().clone();
  }
  dt::State saved() { return {{"matrix", rows}, {"plain", plain}, {"seen", seen}}; }
  dt::State loaded() { return {{"matrix", columns}, {"plain", plain}, {"seen", seen}}; }
  bool is_loaded() { return dt::full_tensor(columns).equal(whole); }
  static at::Tensor numbers(int64_t columns) { return torch::arange(96 * columns, torch::kDouble).reshape({96, columns}); }
  const dt::DeviceMesh mesh;
  const at::Tensor whole;
  at::Tensor rows, columns, plain = torch::arange(100);
  int64_t seen = 3;
};

// What a load on this rank throws; empty: nothing.
std::string said_by_load(InTwoCuts& tensors, const std::string& folder, int64_t step) {
  try {
    dt::load(tensors.loaded(), folder, step);
  } catch (const dt::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Does something on the first rank, while the others wait.
void on_first(dt::World& world, const std::function<void()>& work) {
  world.barrier();
  if (world.rank() == 0) work();
  world.barrier();
}

}  // namespace

TEST_CASE("checkpoint: damage of any kind is named on every rank", "[checkpoint][errors]") {
  const auto [ranks, transport] = GENERATE(std::pair(2, "threads"), std::pair(2, "gloo"), std::pair(4, "threads"), std::pair(4, "shm"));
  const auto is_wide = GENERATE(false, true);
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(
      ranks,
      [&](dt::World& world) {
        InTwoCuts tensors(world, is_wide);
        dt::save(tensors.saved(), folder.path, 1);
        const auto files = data_files(dt::step_folder(folder.path, 1));
        dt::require(static_cast<int>(files.size()) >= world.size(), "test", "{} files", files.size());
        for (const auto& file : {files.front(), files.back()}) {
          for (const auto damage : kAllDamage) {
            std::optional<Damaged> damaged;
            on_first(world, [&] { damaged.emplace(file, damage); });
            const auto text = said_by_load(tensors, folder.path, 1);
            dt::require(text.find(file + "' is damaged") != std::string::npos || text.find("in '" + file) != std::string::npos, "test",
                        "damage {}: '{}'", static_cast<int>(damage), text);
            dt::require(damage != Damage::flipped || text.find("'matrix' is damaged") != std::string::npos ||
                            text.find("'plain' is damaged") != std::string::npos,
                        "test", "no tensor in '{}'", text);
            on_first(world, [&] { damaged.reset(); });
          }
        }
        dt::load(tensors.loaded(), folder.path);
        dt::require(tensors.is_loaded(), "test", "another matrix");
      },
      transport));
}

TEST_CASE("checkpoint: a step with damage of any kind is passed over on every rank", "[checkpoint]") {
  const auto [ranks, transport] = GENERATE(std::pair(2, "threads"), std::pair(2, "shm"), std::pair(4, "threads"));
  const auto is_wide = GENERATE(false, true);
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(
      ranks,
      [&](dt::World& world) {
        InTwoCuts tensors(world, is_wide);
        for (const int64_t step : {1, 2}) dt::save(tensors.saved(), folder.path, step);
        const auto file = data_files(dt::step_folder(folder.path, 2)).back(), index = dt::step_folder(folder.path, 2) + "/index.json";
        for (const auto& path : {file, index}) {
          for (const auto damage : kAllDamage) {
            if (path == index && damage == Damage::removed) continue;  // then there is no such step
            std::optional<Damaged> damaged;
            on_first(world, [&] { damaged.emplace(path, damage); });
            tensors.columns.zero_();
            const auto step = dt::CheckpointManager(tensors.loaded(), folder.path).resume();
            dt::require(step == 1 && tensors.is_loaded(), "test", "damage {} of '{}'", static_cast<int>(damage), path);
            on_first(world, [&] { damaged.reset(); });
          }
        }
        dt::require(dt::CheckpointManager(tensors.loaded(), folder.path).resume() == 2, "test", "the last step is lost");
      },
      transport));
}

TEST_CASE("checkpoint: every flipped bit is found on several ranks", "[checkpoint]") {
  const char* wanted = std::getenv("DTENSOR_TEST_CASES");
  const auto is_wide = GENERATE(false, true);
  const Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](dt::World& world) {
    InTwoCuts tensors(world, is_wide);
    dt::save(tensors.saved(), folder.path, 1);
    const auto files = data_files(dt::step_folder(folder.path, 1));
    std::mt19937_64 random(3);
    for (int i = 0; i < (wanted ? std::atoi(wanted) : 100); ++i) {
      const auto& file = files[random() % files.size()];
      const auto bit = random() % (8 * std::filesystem::file_size(file));
      std::optional<Damaged> damaged;
      on_first(world, [&] { damaged.emplace(file, bit); });
      const auto text = said_by_load(tensors, folder.path, 1);
      dt::require(text.find("damaged") != std::string::npos && text.find(file) != std::string::npos, "test", "bit {} of '{}': '{}'", bit,
                  file, text);
      on_first(world, [&] { damaged.reset(); });
    }
  }));
}
