// Hugging Face's config.json, as the zoo reads it: no target where the examples are not built.
#include "tools/fuzz_bytes/target.hpp"

#ifdef DTENSOR_FUZZ_ZOO
#include "examples/zoo/huggingface.hpp"
#include "examples/zoo/huggingface_config.hpp"

#include <dtensor/deferred/deferred_init.hpp>

#include <ATen/ops/ones.h>

#include <map>
#endif

namespace dtensor::fuzz_bytes {

#ifdef DTENSOR_FUZZ_ZOO
namespace {

std::vector<std::string> configs() {
  zoo::Llama3Options llama;
  llama.vocabulary = 16, llama.layers = 2, llama.dim = 8, llama.heads = 2, llama.kv_heads = 1, llama.hidden = 16;
  zoo::Gpt2Options gpt2;
  gpt2.vocabulary = 16, gpt2.positions = 8, gpt2.layers = 2, gpt2.dim = 8, gpt2.heads = 2;
  zoo::VitOptions vit;
  vit.image = 8, vit.patch = 4, vit.classes = 3, vit.layers = 2, vit.dim = 8, vit.heads = 2, vit.hidden = 16;
  auto mixtral = llama;
  mixtral.experts = 4;
  auto qwen3 = mixtral;
  qwen3.head_norms = true, qwen3.head_dim = 6;
  zoo::DeepSeekOptions deepseek;
  deepseek.vocabulary = 16, deepseek.layers = 2, deepseek.dim = 8, deepseek.heads = 2, deepseek.dense_layers = 1, deepseek.hidden = 16;
  deepseek.q_rank = 4, deepseek.kv_rank = 4, deepseek.nope_dim = 4, deepseek.rope_dim = 2, deepseek.value_dim = 4;
  deepseek.experts = 16, deepseek.expert_hidden = 8, deepseek.shared_hidden = 8;
  return {zoo::config_of(llama),   zoo::config_of(gpt2),  zoo::config_of(vit),
          zoo::config_of(mixtral), zoo::config_of(qwen3), zoo::config_of(deepseek)};
}

void read_config(const std::string& bytes) {
  std::map<std::string, at::Tensor> tensors{{"model.layers.1.self_attn.q_proj.weight", at::ones({8, 8})},
                                            {"model.layers.1.self_attn.k_proj.weight", at::ones({4, 8})},
                                            {"model.layers.1.mlp.experts.gate_up_proj", at::ones({4, 32, 8})},
                                            {"transformer.h.1.attn.c_attn.weight", at::ones({8, 24})}};
  for (const std::string part : {"query", "key", "value"})
    tensors["vit.encoder.layer.1.attention.attention." + part + ".weight"] = at::ones({8, 8});
  for (const auto& [name, shape] : std::map<std::string, std::vector<int64_t>>{{"w1", {16, 8}}, {"w2", {8, 16}}, {"w3", {16, 8}}}) {
    for (const std::string expert : {"0", "1", "2", "3"})
      tensors["model.layers.1.block_sparse_moe.experts." + expert + "." + name + ".weight"] = at::ones(shape);
  }
  if (zoo::counts_of(bytes).layers <= 16) {
    const DeferredInit deferred(init_device_mesh(c10::kCPU, {1}, {"one"}));
    zoo::model_from_config(bytes);
  }
  const auto ours = zoo::from_huggingface(bytes, checkpoints::source_of(tensors));
  for (const auto& tensor : ours.tensors) ours.get(tensor.name);
  const auto theirs = zoo::to_huggingface(bytes, ours);
  for (const auto& tensor : theirs.tensors) theirs.get(tensor.name);
}

}  // namespace
#endif

std::vector<Target> zoo_targets() {
#ifdef DTENSOR_FUZZ_ZOO
  return {{"config",
           "Hugging Face's config.json: the model and its weights",
           configs,
           read_config,
           {"\"num_attention_heads\": 0,", "\"model_type\": ", "\"gpt2\"", "\"vit\"", "\"mixtral\"", "\"qwen3_moe\"", "\"deepseek_v3\"",
            "-1", "0", "1e300", "null", "true", "{", "[", ","}}};
#else
  return {};
#endif
}

}  // namespace dtensor::fuzz_bytes
