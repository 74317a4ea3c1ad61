// A unit: parameters in one flat buffer, which are gathered together and whose gradients are reduced together.
#pragma once

#include "src/parallel/fully_shard/schedule.hpp"

#include <dtensor/comm/work.hpp>
#include <dtensor/dispatch/flat_group.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/parallel/fully_shard.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace dtensor::fsdp {

// A parameter of the unit, and its place in the buffer.
struct Member {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  LayoutPtr layout;    // flat
  int64_t offset = 0;  // in the buffer of all ranks
  int64_t elements = 0;  // as the other placements of this rank cut it
  int64_t shard = 0, shard_elements = 0;  // this rank's: where they are in its piece

  // Its gradient:
  bool landed = false;        // is in the whole buffer
  bool arrived = false;       // in this backward
  bool accumulates = false;   // on what grad() has
  uint64_t pending = 0;       // other mesh dimensions along which it is still to be reduced, as bits
};

class Unit final : public FlatGroup {
 public:
  using Parameters = std::vector<std::pair<std::string, at::Tensor>>;

  // Use make(): parameters of one dtype on one mesh, of which dimension `cut` cuts them.
  Unit(std::string name, DeviceMesh mesh, int64_t cut, const FullyShardOptions& options, std::shared_ptr<Schedule> schedule);
  static c10::intrusive_ptr<Unit> make(std::string name, const Parameters& parameters, int64_t cut, const FullyShardOptions& options,
                                       std::shared_ptr<Schedule> schedule);
  void release_resources() override;

  at::Tensor gather(int64_t index, at::ScalarType dtype, int64_t generation) override;
  at::Tensor reduce(int64_t index, const at::Tensor& leaf, const at::Tensor& gradient, bool defer) override;
  void written(int64_t index) override;
  int64_t generation() const override { return generation_; }
  c10::optional<c10::Device> device() const override { return device_; }
  void dissolve() override;
  void restore() override;
  bool has_deferred() const override { return state_ == Round::open && is_deferred_; }

  // -- For the schedule.
  int64_t last_use = 0;
  bool is_whole() const { return whole_.defined(); }
  void start_gather();
  void free_whole();
  void free_unless_kept() {
    if (!is_kept()) free_whole();
  }
  void keep() { ++keeps_; }  // whole, once more
  void gather_kept();        // frees what is not kept
  void let_go();             // of one keep()
  bool is_kept() const { return keeps_ > 0; }
  bool stays_whole() const { return !options_.reshard_after_forward; }
  void end_backward();      // reduces what landed
  void finish_reduction();  // waits for it
  bool is_reducing() const { return state_ == Round::reducing; }

  // The gradients of a round are where the parameters are.
  void finish(int64_t round) {
    if (!is_finished(round)) finish_reduction();
  }
  bool is_finished(int64_t round) const { return round < round_; }

  FullyShard::Unit describe() const;
  void set_schedule(const std::shared_ptr<Schedule>& schedule);

 private:
  void lay_out(const Parameters& parameters);
  void fill_buffer();
  at::TensorOptions options_of_parameters() const;  // on the device
  at::TensorOptions options_of_shards() const;
  c10::Device device_of_mesh() const;
  std::shared_ptr<void> registered(const at::Tensor& memory) const;

  void land(Member& member, const at::Tensor& gradient);
  at::Tensor with_graph(const Member& member, const at::Tensor& gradient, bool defer) const;
  bool all_arrived() const;
  bool is_own(const at::Tensor& gradient, const Member& member) const;
  at::Tensor gradient_of(Member& member, const at::Tensor& leaf);
  void begin_round();
  void start_reduction();
  void reduce_pending(at::Tensor& reduced);
  std::vector<int64_t> counts() const;
  comm::Communicator& group() const;

  const std::string name_;
  const DeviceMesh mesh_;
  const int64_t cut_;
  const FullyShardOptions options_;
  std::shared_ptr<Schedule> schedule_;
  std::vector<Member> members_;
  Parameters dissolved_;
  c10::optional<c10::Device> device_;  // where parts are on another
  at::ScalarType dtype_{};
  int64_t piece_ = 0, elements_ = 0;
  int64_t generation_ = 0;

  at::Tensor buffer_;  // [piece]: this rank's parameters
  std::shared_ptr<void> registered_buffer_, registered_gradient_;  // with the transport; gone before the memory
  bool fits_ = false;  // all parameters lie in it
  at::Tensor whole_;   // [ranks * piece]: everyone's, or undefined
  comm::WorkPtr gathering_;
  int keeps_ = 0;

  // A round of gradients: from the first that lands until all that landed are reduced.
  enum class Round { none, open, reducing };
  int64_t round_ = 0;
  Round state_ = Round::none;
  bool defers_ = false;        // until it is read
  bool is_deferred_ = false;   // it came inside NoSync
  bool overwrites_ = false;    // nothing of what gradient_ holds is still somebody's
  at::Tensor whole_gradient_;  // [ranks * piece]
  at::Tensor gradient_;        // [piece]: reduced
  comm::Async reducing_;
};

}  // namespace dtensor::fsdp
