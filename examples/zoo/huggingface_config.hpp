// What the orders and names of weights need of a config.json.
#pragma once

#include <cstdint>
#include <string>

namespace zoo {

struct Counts {
  std::string type;  // "llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2" or "vit"
  int64_t layers = 0, heads = 0, kv_heads = 0;
  int64_t experts = 0;  // 0: none
};

// Throws dtensor::Error for what model_from_config() would refuse.
Counts counts_of(const std::string& config);

}  // namespace zoo
