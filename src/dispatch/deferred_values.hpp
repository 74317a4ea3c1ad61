// The values of a tensor that is not materialized yet.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <utility>
#include <vector>

namespace dtensor {
class DTensorImpl;
}

namespace dtensor::dispatch {

class Deferred final : public c10::intrusive_ptr_target {
 public:
  // `meta` is the tensor on the meta device, where views share memory with their bases. `owner` is kept alive.
  Deferred(at::Tensor meta, std::shared_ptr<void> owner) : meta_(std::move(meta)), owner_(std::move(owner)) {}

  const at::Tensor& meta() const { return meta_; }
  const std::shared_ptr<void>& owner() const { return owner_; }

  // The tensors that have these values.
  void add_handle(DTensorImpl& impl);
  std::vector<at::Tensor> handles() const;

  // Throws: there are no values yet.
  [[noreturn]] void refuse() const;

  void release_resources() override;  // releases the owner, which may refer to this weakly

 private:
  at::Tensor meta_;
  std::shared_ptr<void> owner_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> handles_;
};

}  // namespace dtensor::dispatch
