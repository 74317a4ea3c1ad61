// Python's objects as the names, tensors and values of an index.
#pragma once

#include "src/checkpoint/foreign/common.hpp"
#include "src/checkpoint/foreign/torch_tensor.hpp"

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace dtensor::checkpoints::foreign {

// Goes through dicts and lists, which may hold each other, and gives what is in them a name: {"a": [1, "x"]} is a.0 and a.1.
class Flattening {
 public:
  using TakeTensor = std::function<void(const std::string& name, const pickle::Value& tensor)>;
  Flattening(Index& index, Skipped& skipped, Budget& budget, TakeTensor take_tensor)
      : index_(index), skipped_(skipped), budget_(budget), take_tensor_(std::move(take_tensor)) {}

  // Throws std::runtime_error where two things get one name, or where dicts and lists are nested more than 64 deep.
  void add(const std::string& name, const pickle::Value& value, int depth = 0);

 private:
  void add_dict(const std::string& name, const pickle::Value& dict, int depth);
  void add_list(const std::string& name, const pickle::Value& list, int depth);
  bool add_as_one(const std::string& name, const pickle::Value& list);
  void put(const std::string& name, Value value);

  Index& index_;
  Skipped& skipped_;
  Budget& budget_;
  TakeTensor take_tensor_;
};

}  // namespace dtensor::checkpoints::foreign
