// What the orders and names of weights need of a config.json.
#pragma once

#include <cstdint>
#include <string>

namespace zoo {

struct Counts {
  std::string type;  // "llama", "gpt2" or "vit"
  int64_t layers = 0, heads = 0, kv_heads = 0;
};

// Throws dtensor::Error for what model_from_config() would refuse.
Counts counts_of(const std::string& config);

}  // namespace zoo
