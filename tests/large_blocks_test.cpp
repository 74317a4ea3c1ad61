// Large blocks of memory are kept for the tensors to come.
#include "catch.hpp"

#include <dtensor/dtensor.hpp>

#include <torch/torch.h>

#include <cstdint>

TEST_CASE("large blocks: what is freed is taken again", "[launch]") {
  CHECK_NOTHROW(dtensor::launch(dtensor::LaunchOptions{}, [](dtensor::World&) {
    constexpr int64_t kElements = 12 << 20;  // 48 MB
    void* first = nullptr;
    {
      const auto x = at::ones({kElements});
      first = x.data_ptr();
      dtensor::require(reinterpret_cast<uintptr_t>(first) % (2 << 20) == 0, "test", "the block does not begin at a huge page");
    }
    const auto again = at::empty({kElements}), other = at::ones({kElements}), small = at::ones({5});
    dtensor::require(again.data_ptr() == first && other.data_ptr() != first, "test", "the block was not kept, or given twice");
    again.fill_(2);
    dtensor::require(again.eq(2).all().item<bool>() && other.eq(1).all().item<bool>() && small.sum().item<double>() == 5, "test", "values");
    auto grown = at::ones({kElements / 2});
    grown.resize_({kElements});
    dtensor::require(grown.narrow(0, 0, kElements / 2).eq(1).all().item<bool>(), "test", "a tensor that grew into a large block lost its values");
  }));
}
