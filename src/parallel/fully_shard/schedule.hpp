// Keeps which units are whole, and predicts which will be needed next.
#pragma once

#include <dtensor/dispatch/end_of_backward.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace dtensor::fsdp {

class Unit;

// Counts bytes that are alive. A rank that takes part in a collective may be the last to let go of another's buffer: any thread.
struct Counter {
  std::atomic<int64_t> now = 0, peak = 0;
  void add(int64_t bytes) {
    const auto sum = now += bytes;
    for (auto most = peak.load(); most < sum && !peak.compare_exchange_weak(most, sum);) {
    }
  }
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(int64_t max_whole) : max_whole_(max_whole) {}

  void add(Unit* unit) { units_.push_back(unit); }
  void remove(Unit* unit);

  // Called when a parameter of the unit is needed whole. Gathers the unit and the one expected next; frees those used longest ago.
  void use(Unit& unit);

  // Called when a unit is to be kept whole. Frees those that are not.
  void free_others();

  // Called when a gradient arrives. At the end of this backward pass, the gradients that are left are reduced.
  void begin_backward();

  // Called when the reduction of the unit's gradients has begun. Waits for the reduction before it, so that few gradients are whole at
  // once.
  void reducing(Unit& unit);

  std::shared_ptr<Counter> whole_bytes = std::make_shared<Counter>();
  int64_t gathers = 0, reductions = 0;

 private:
  using Place = std::tuple<bool, Unit*, Unit*>;  // in backward, the unit before, the unit

  void make_room(const Unit& used, const Unit* next);
  void end_backward();

  int64_t max_whole_;
  std::vector<Unit*> units_;
  int64_t uses_ = 0;
  Unit* before_ = nullptr;
  Unit* current_ = nullptr;
  bool current_in_backward_ = false;
  std::map<Place, Unit*> next_;  // as it was the last time
  Unit* reducing_ = nullptr;
  EndOfBackward end_;
};

}  // namespace dtensor::fsdp
