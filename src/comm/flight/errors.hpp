// Why ranks failed, without saying the same again and again.
#pragma once

#include "src/comm/flight/report.hpp"

#include <map>
#include <string>
#include <vector>

namespace dtensor::comm::flight {

// Says each error once: others had the same, or quote the one that theirs comes of.
class Errors {
 public:
  explicit Errors(const std::vector<Witness>& witnesses);

  // What comes after "rank 2 failed": ": out of cheese", " as rank 1 did" or, where its error is told elsewhere, " first".
  std::string why(const Witness& witness);

 private:
  std::map<int, const Witness*> failed_;
  std::map<std::string, int> said_;  // errors, and which rank's line says them
};

}  // namespace dtensor::comm::flight
