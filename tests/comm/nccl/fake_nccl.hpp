// What tests may see and do of the NCCL that stands in for the real one.
#pragma once

#include <string>

namespace dtensor_tests {

// How many times a function of NCCL was called by all ranks, by its name without "nccl".
int calls_of_nccl(const std::string& name);
void forget_calls_of_nccl();

// From now on, NCCL's next communicators report that they are broken when they are asked.
void break_nccl(bool broken);

}  // namespace dtensor_tests
