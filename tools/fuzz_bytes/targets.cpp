// All readers. tools/fuzz_readers/ has a shorter list.
#include "tools/fuzz_bytes/target.hpp"

namespace dtensor::fuzz_bytes {

const std::vector<Target>& targets() {
  static const auto all = [] {
    std::vector<Target> list;
    for (const auto& part : {file_targets(), step_targets(), checkpoint_targets(), zoo_targets(), flight_targets(), message_targets(),
                             exchange_targets(), text_targets()})
      list.insert(list.end(), part.begin(), part.end());
    return list;
  }();
  return all;
}

}  // namespace dtensor::fuzz_bytes
