// What an error says that a call throws.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace dtensor::test {

// The text of the `Thrown` that `call` throws, without a backtrace; empty where nothing is thrown. What is no `Thrown` goes on its way.
template <class Thrown = c10::Error, class Call>
std::string words_of(Call&& call) {
  try {
    call();
  } catch (const Thrown& error) {
    const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
    return of_torch ? of_torch->what_without_backtrace() : error.what();
  }
  return {};
}

}  // namespace dtensor::test
