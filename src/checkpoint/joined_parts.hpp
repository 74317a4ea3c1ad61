// What the parts of a state have, together.
#pragma once

#include <dtensor/checkpoint/state.hpp>

#include <exception>
#include <string>
#include <unordered_map>
#include <vector>

namespace dtensor::checkpoints {

class JoinedParts {
 public:
  void add(const std::string& part, Contents contents);

  // Throws for names that are in two parts, or twice in one: one of them would be lost.
  Contents take(const char* tag);

 private:
  Contents all_;
  std::unordered_map<std::string, std::string> parts_;  // by name
  std::vector<std::string> met_;                        // what is to be said of names that meet
};

// What work(entry, contents) adds for each part of the state. It is called for all of them, whatever one throws: parts may communicate, and
// other ranks wait for them. Then this throws what the first one threw.
template <class Work>
Contents joined_parts(const char* tag, const State& state, const Work& work) {
  JoinedParts joined;
  std::exception_ptr problem;
  for (const auto& entry : state.entries()) {
    try {
      Contents contents;
      work(entry, contents);
      joined.add(entry.name, std::move(contents));
    } catch (...) {
      if (!problem) problem = std::current_exception();
    }
  }
  if (problem) std::rethrow_exception(problem);
  return joined.take(tag);
}

// All names of tensors and values, and further names.
std::vector<std::string> names_in(const Contents& contents);

}  // namespace dtensor::checkpoints
