// All ranks of the world, as saving and loading talk among them: few and small messages, and bytes of tensors when loading reshards.
#pragma once

#include <dtensor/base/error_text.hpp>
#include <dtensor/mesh/device_mesh.hpp>

#include <array>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dtensor::checkpoints {

// What `work` throws, in words; empty: nothing.
template <class Work>
std::string problem_of(const Work& work) {
  try {
    work();
    return "";
  } catch (...) {
    return detail::text_of(std::current_exception());
  }
}

// The text of an error as another error is to have it: without the names of these functions before it and this rank's number after it,
// which the other one adds again.
std::string without_place(std::string_view text);

class Everyone {
 public:
  using Numbers = std::array<int64_t, 5>;
  explicit Everyone(std::string_view tag);

  int rank() const { return group_ ? group_->rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }
  bool is_first() const { return rank() == 0; }

  // What every rank gives, by rank. Every rank calls them alike.
  std::vector<std::string> gather(const std::string& text) const;
  std::vector<Numbers> gather_numbers(const Numbers& numbers) const;
  std::string from(int rank, const std::string& text) const;
  std::string from_first(const std::string& text) const { return from(0, text); }

  // bytes[r] go to rank r. Returns what came, rank after rank, `receive[r]` bytes of rank r.
  at::Tensor exchange(const at::Tensor& bytes, const std::vector<int64_t>& send, const std::vector<int64_t>& receive) const;

  // Throws on every rank if any has a problem, which is then named.
  void agree(const std::string& problem) const;

 private:
  std::string tag_;
  std::optional<DeviceMesh> line_;
  comm::Communicator* group_ = nullptr;  // null: one rank
};

}  // namespace dtensor::checkpoints
