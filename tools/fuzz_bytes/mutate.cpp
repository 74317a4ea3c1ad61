#include "tools/fuzz_bytes/mutate.hpp"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <limits>

namespace dtensor::fuzz_bytes {

namespace {

constexpr size_t kLongest = 4 << 20;

class Mutator {
 public:
  Mutator(const std::vector<std::string>& valid, const std::vector<std::string>& words, std::mt19937_64& random)
      : valid_(valid), words_(words), random_(random), bytes_(one_of(valid)) {}

  std::string run() {
    for (auto changes = 1 + below(4); changes > 0; --changes) change();
    if (bytes_.size() > kLongest) bytes_.resize(kLongest);
    return std::move(bytes_);
  }

 private:
  void change() {
    switch (below(10)) {
      case 0: return flip();
      case 1: return set_byte();
      case 2:
      case 3: return set_number();
      case 4: return cut();
      case 5: return repeat();
      case 6: return splice();
      case 7: return insert(garbage());
      case 8: return change_digits();
      default: return insert(words_.empty() ? garbage() : one_of(words_));
    }
  }

  size_t below(size_t end) { return end == 0 ? 0 : random_() % end; }
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

  // Rather where there is something: files are mostly zeroes.
  size_t place() {
    size_t at = below(bytes_.size());
    for (int tries = 0; tries < 8 && at < bytes_.size() && bytes_[at] == 0; ++tries) at = below(bytes_.size());
    return random_() % 3 == 0 ? below(std::min<size_t>(bytes_.size(), 256)) : at;
  }

  void flip() {
    if (!bytes_.empty()) bytes_[place()] ^= static_cast<char>(1 << below(8));
  }

  void set_byte() {
    if (!bytes_.empty()) bytes_[place()] = static_cast<char>(random_());
  }

  uint64_t number() {
    constexpr uint64_t kNumbers[] = {0, 1, 2, 127, 128, 255, 256, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32,
                                     1ull << 40, (1ull << 63) - 1, 1ull << 63, ~0ull, ~0ull - 7, ~1ull};
    return below(4) == 0 ? below(2 * bytes_.size() + 2) : kNumbers[below(std::size(kNumbers))];
  }

  // Of 1, 2, 4 or 8 bytes, where a struct would have it.
  void set_number() {
    const size_t width = size_t{1} << below(4);
    if (bytes_.size() < width) return;
    const size_t at = std::min(place() / width * width, bytes_.size() - width);
    uint64_t value = 0;
    std::memcpy(&value, bytes_.data() + at, width);
    value = below(3) == 0 ? value + below(17) - 8 : number();
    std::memcpy(bytes_.data() + at, &value, width);
  }

  size_t short_length() { return 1 + below(below(2) ? 8 : 256); }

  void cut() {
    if (bytes_.empty()) return;
    const auto at = place();
    bytes_.erase(at, below(2) ? bytes_.size() : short_length());
  }

  void repeat() {
    if (bytes_.empty()) return;
    const auto at = place();
    const auto piece = bytes_.substr(at, short_length());
    for (auto times = 1 + below(below(8) ? 4 : 200); times > 0; --times) bytes_.insert(at, piece);
  }

  void splice() {
    const auto& other = one_of(valid_);
    const auto from = below(other.size() + 1), to = below(bytes_.size() + 1);
    if (below(2)) bytes_ = bytes_.substr(0, to) + other.substr(from);
    else bytes_.insert(to, other.substr(from, short_length()));
  }

  void insert(const std::string& text) { bytes_.insert(std::min(place(), bytes_.size()), text); }

  std::string garbage() {
    std::string text(short_length(), '\0');
    for (auto& byte : text) byte = static_cast<char>(random_());
    return text;
  }

  // Another number in place of one that is written in digits.
  void change_digits() {
    const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
    const auto begin = std::find_if(bytes_.begin() + static_cast<int64_t>(place()), bytes_.end(), is_digit);
    if (begin == bytes_.end()) return insert("0");
    const auto end = std::find_if_not(begin, bytes_.end(), is_digit);
    static const std::vector<std::string> kTexts = {"-1", "0", "1e308", "nan", "inf", "-inf", "", "99999999999999999999", "2147483648",
                                                    "18446744073709551615", "9223372036854775807", "65536", "1.5", "0x10", "1e-320"};
    bytes_.replace(begin, end, below(4) == 0 ? std::to_string(below(100)) : one_of(kTexts));
  }

  const std::vector<std::string>& valid_;
  const std::vector<std::string>& words_;
  std::mt19937_64& random_;
  std::string bytes_;
};

}  // namespace

std::string mutated(const std::vector<std::string>& valid, const std::vector<std::string>& words, std::mt19937_64& random) {
  return Mutator(valid, words, random).run();
}

}  // namespace dtensor::fuzz_bytes
