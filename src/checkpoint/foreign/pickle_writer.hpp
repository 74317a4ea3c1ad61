// Writes pickles of protocol 2, which all versions of Python 3 read.
#pragma once

#include <dtensor/checkpoint/index.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints::pickle {

class Writer {
 public:
  Writer() : bytes_("\x80\x02") {}

  void global(std::string_view module, std::string_view name);
  void none() { bytes_ += 'N'; }
  void boolean(bool is) { bytes_ += is ? '\x88' : '\x89'; }
  void integer(int64_t number);
  void real(double number);
  void text(std::string_view text);
  void value(const checkpoints::Value& value);
  void sizes(const std::vector<int64_t>& sizes);       // a tuple
  void torch_size(const std::vector<int64_t>& sizes);  // a torch.Size

  void mark() { bytes_ += '('; }
  void tuple() { bytes_ += 't'; }  // of what came since the mark
  void empty_tuple() { bytes_ += ')'; }
  void append_all() { bytes_ += 'e'; }  // appends what came since the mark to the list before it
  void empty_list() { bytes_ += ']'; }
  void empty_dict() { bytes_ += '}'; }
  void ordered_dict();                 // empty
  void set_items() { bytes_ += 'u'; }  // what came since the mark are keys and values of the dict before it
  void call() { bytes_ += 'R'; }       // a function and a tuple
  void make() { bytes_ += "\x81"; }    // a class and a tuple
  void build() { bytes_ += 'b'; }      // an object and its state

  // A tensor that is row-major in the storage `key`, which has its elements alone.
  void tensor(c10::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& key);
  void dtype(c10::ScalarType dtype);

  std::string finish() { return bytes_ + '.'; }

 private:
  template <class T>
  void raw(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  std::string bytes_;
};

}  // namespace dtensor::checkpoints::pickle
