// Where a rank's last events lie: memory that may be a file, which another process reads when this one has been killed. Knows nothing of
// libtorch: dtensor-run reads it too.
#pragma once

#include <dtensor/comm/event.hpp>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dtensor::comm::flight {

constexpr char kMagic[8] = {'d', 't', 'f', 'l', 'i', 'g', 'h', '2'};
constexpr int kMostGroups = 256, kMostFrames = 64, kMostRanks = 1 << 16;

// Ranks beyond those that fit are counted, not named.
struct RingGroup {
  static constexpr int kNamed = 100;
  uint64_t key = 0;  // of name and ranks: the same on every rank
  int32_t size = 0;
  ShortText<100> name;
  int32_t ranks[kNamed] = {};
};
static_assert(sizeof(RingGroup) == 512);

enum class State : int32_t { running, left, failed };

struct RingHeader {
  char magic[8] = {};
  int32_t rank = 0, ranks = 1, process = 0, thread = 0;  // `thread`: which runs the rank's program
  std::atomic<uint64_t> issued{0};
  std::atomic<int32_t> groups{0};
  std::atomic<State> state{State::running};
  std::atomic<int32_t> answers{0};      // 1: SIGUSR1 has the rank write its stack
  std::atomic<int32_t> stacks{0};       // how often it has
  std::atomic<int32_t> signal{0};       // which ended it
  std::atomic<int32_t> unwound{0};      // 1: it failed, and its thread has left the place where it did
  std::atomic<int32_t> depth{0};
  uint64_t stack[kMostFrames] = {};     // return addresses, the innermost first
  ShortText<64> host;
  ShortText<2048> error;                // why it failed
  RingGroup group[kMostGroups];
};

// Slots are written and read as whole words, since a reader may copy one while its rank writes over it. The number, which comes first, says
// whether a copy is of one event: it is 0 while the rest is written (a sequence lock: Boehm, "Can Seqlocks Get Along with Programming
// Language Memory Models?", 2012).
void write_slot(Event& slot, const Event& event);
Event read_slot(const Event& slot);  // of number 0 where the slot was written meanwhile

// The header and Events::kKept events. Zeroes are an empty one.
class Ring {
 public:
  // In memory; in `file`, which is made anew. Throws std::system_error.
  explicit Ring(const std::string& file = "");
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  RingHeader& header() const { return *static_cast<RingHeader*>(memory_); }
  Event& slot(uint64_t number) const { return events()[(number - 1) % Events::kKept]; }
  static size_t bytes() { return sizeof(RingHeader) + Events::kKept * sizeof(Event); }

 private:
  Event* events() const { return reinterpret_cast<Event*>(static_cast<char*>(memory_) + sizeof(RingHeader)); }
  void* memory_;
};

// What a rank left: a copy.
struct Recording {
  int rank = 0, ranks = 1, process = 0, thread = 0;
  State state{};
  int signal = 0;
  bool answers = false;
  std::vector<uint64_t> stack;
  std::string host, error, maps;       // `maps`: /proc/PID/maps, where the stack's addresses are to be looked up
  std::vector<RingGroup> groups;
  std::vector<Event> events;           // in their order
};

Recording copy_of(const Ring& ring);
// Empty where there is no such file, or it is none of these, or damaged.
std::optional<Recording> read_file(const std::string& file);

// "FOLDER/rank-3.events", and where a process says what is loaded where.
std::string file_of_rank(const std::string& folder, int rank);
std::string maps_of_process(const std::string& folder, int process);

std::string read_text(const std::string& file);

}  // namespace dtensor::comm::flight
