// Which units are whole, and which will be next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace dtensor::fsdp {

class Unit;

// Of bytes that are alive.
struct Counter {
  int64_t now = 0, peak = 0;
  void add(int64_t bytes) { peak = std::max(peak, now += bytes); }
};

class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(int64_t max_whole) : max_whole_(max_whole) {}

  void add(Unit* unit) { units_.push_back(unit); }
  void remove(Unit* unit);

  // A parameter of the unit is needed whole: gathers it, and what is to be expected next; frees what was used longest ago.
  void use(Unit& unit);

  // A gradient arrives: at the end of this backward what is left is reduced.
  void begin_backward();

  // The unit's gradients are being reduced: those before it are waited for, so that few are whole at once.
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
  const void* backward_ = nullptr;
};

}  // namespace dtensor::fsdp
