// Reads Python's pickles (https://docs.python.org/3/library/pickletools.html) into values, and executes nothing: the few names that
// torch.save's and DCP's pickles need stand in a table, and stand for kinds of values here. Every other name is an error, also where it is
// only mentioned.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints::pickle {

enum class Kind : uint8_t {
  none,
  boolean,
  integer,
  real,
  text,
  bytes,
  list,     // also tuples and sets
  dict,     // items: key, value, key, value, ...
  global,   // a name of the table; `code` is its line
  dtype,    // `text` is its name, "float32"
  storage,  // items: kind of storage, key, device, elements
  tensor,   // items: storage, offset, sizes, strides, and its dtype where the storage has none
  object,   // `code` is the line of its class; items: its state, most often a dict of its fields
  other,    // what is known and of no account, such as devices; `text` says what it is
};

struct Value {
  Kind kind = Kind::none;
  bool is_tuple = false;
  uint16_t code = 0;
  union {
    bool boolean;
    int64_t integer = 0;
    double real;
  };
  std::string_view text{};  // of text, bytes, dtypes, others
  std::vector<Value*> items{};

  // Of a dict or an object: the value of a key; null: there is none.
  const Value* find(std::string_view key) const;
  // The name of a global, of the class of an object.
  std::string name() const;
};

// Owns the values of a pickle.
class Document {
 public:
  // Throws std::runtime_error for what is no pickle, has too many values, or uses a name that is not in the table.
  explicit Document(std::string bytes);
  Document(const Document&) = delete;
  Document& operator=(const Document&) = delete;

  const Value& root() const { return *root_; }

 private:
  friend class Machine;
  std::string bytes_;
  std::deque<Value> values_;
  const Value* root_ = nullptr;
};

}  // namespace dtensor::checkpoints::pickle
