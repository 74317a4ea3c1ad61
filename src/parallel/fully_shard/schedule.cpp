#include "src/parallel/fully_shard/schedule.hpp"

#include "src/parallel/fully_shard/unit.hpp"

#include <c10/core/GradMode.h>

#include <algorithm>

namespace dtensor::fsdp {

void Schedule::remove(Unit* unit) {
  std::erase(units_, unit);
  std::erase_if(next_, [&](const auto& entry) {
    return entry.second == unit || std::get<1>(entry.first) == unit || std::get<2>(entry.first) == unit;
  });
  for (auto** known : {&before_, &current_, &reducing_}) *known = *known == unit ? nullptr : *known;
}

void Schedule::use(Unit& unit) {
  if (current_ == &unit && unit.is_whole()) [[likely]]
    return;
  const bool in_backward = current_backward() != nullptr;
  if (current_ != &unit) {
    if (current_) next_[{current_in_backward_, before_, current_}] = &unit;
    before_ = current_;
    current_ = &unit;
    current_in_backward_ = in_backward;
  }
  const auto found = max_whole_ > 1 && !unit.is_kept() ? next_.find({in_backward, before_, current_}) : next_.end();
  auto* next = found == next_.end() ? nullptr : found->second;
  make_room(unit, next);
  if (!unit.is_whole()) unit.start_gather();
  if (next && !next->is_whole()) next->start_gather();
  unit.last_use = ++uses_;
}

// What is used now and what is next may be whole, and of the others as many as there is room for.
void Schedule::make_room(const Unit& used, const Unit* next) {
  std::vector<Unit*> others;
  for (auto* unit : units_) {
    const bool stays = unit->stays_whole() && (c10::GradMode::is_enabled() || current_backward());
    if (unit->is_whole() && unit != &used && unit != next && !stays && !unit->is_kept()) others.push_back(unit);
  }
  std::ranges::sort(others, [](const Unit* a, const Unit* b) { return a->last_use > b->last_use; });
  const auto room = static_cast<size_t>(std::max<int64_t>(0, max_whole_ - 1 - (next && next != &used)));
  for (; others.size() > room; others.pop_back()) others.back()->free_whole();
}

void Schedule::free_others() {
  for (auto* unit : units_) unit->free_unless_kept();
}

void Schedule::begin_backward() {
  end_.call([self = weak_from_this()] {
    if (const auto schedule = self.lock()) schedule->end_backward();
  });
}

void Schedule::end_backward() {
  end_.forget();
  before_ = current_ = nullptr;
  for (auto* unit : units_) unit->end_backward();
  free_others();
}

void Schedule::reducing(Unit& unit) {
  ++reductions;
  if (auto* earlier = std::exchange(reducing_, &unit); earlier && earlier != &unit && earlier->is_reducing()) earlier->finish_reduction();
}

}  // namespace dtensor::fsdp
