// A batch on its way from the rank that loads to the others.
#pragma once

#include <dtensor/comm/communicator.hpp>
#include <dtensor/data/parts.hpp>

#include <string>
#include <vector>

namespace dtensor::data {

// Packs and unpacks a batch. A parcel to be sent collects the values that it visits. A received one writes its values to what it visits.
class Parcel final : public PartVisitor {
 public:
  enum class Kind : int64_t { batch, end, error };

  Kind kind = Kind::end;
  at::Tensor generator;  // the new state of the rank's generator, for the other ranks to take over; else undefined

  static Parcel of_error(const std::string& text);
  std::string error() const { return {notes_.begin(), notes_.end()}; }

  void tensor(at::Tensor& tensor) override;
  void bytes(void* data, size_t size) override;
  size_t length(size_t size) override;

  // Sends from the group's first rank to the others: 32 bytes, then everything that the parcel holds in one message.
  void send(comm::Communicator& group) const;
  static Parcel receive(comm::Communicator& group);

 private:
  int64_t number(int64_t value);
  void pack(at::Tensor& tensor);
  at::Tensor unpack();

  bool received_ = false;
  std::vector<char> notes_;          // numbers, and the dtypes and sizes of tensors
  std::vector<at::Tensor> tensors_;  // packed ones
  size_t read_ = 0;                  // bytes of notes_ that were read
  at::Tensor data_;                  // what was received: the elements of all tensors
  int64_t taken_ = 0;                // bytes of data_ that were taken
};

}  // namespace dtensor::data
