// A batch on its way from the rank that loads to the others.
#pragma once

#include <dtensor/comm/communicator.hpp>
#include <dtensor/data/parts.hpp>

#include <string>
#include <vector>

namespace dtensor::data {

// Visits the parts of a batch: one that was made is filled, one that was received fills the parts it is shown.
class Parcel final : public PartVisitor {
 public:
  enum class Kind : int64_t { batch, end, error };

  Kind kind = Kind::end;
  at::Tensor generator;  // the state of the rank's generator, where it is to be taken over; else undefined

  static Parcel of_error(const std::string& text);
  std::string error() const { return {notes_.begin(), notes_.end()}; }

  void tensor(at::Tensor& tensor) override;
  void bytes(void* data, size_t size) override;
  size_t length(size_t size) override;

  // From the group's first rank to the others: 32 bytes, and all that the parcel holds in one.
  void send(comm::Communicator& group) const;
  static Parcel receive(comm::Communicator& group);

 private:
  void pack(at::Tensor& tensor);
  at::Tensor unpack();

  bool received_ = false;
  std::vector<char> notes_;          // numbers, and what tensors look like
  std::vector<at::Tensor> tensors_;  // packed ones
  size_t read_ = 0;                  // of notes_
  at::Tensor data_;                  // what was received: the elements of all tensors
  int64_t taken_ = 0;                // of data_
};

}  // namespace dtensor::data
