// The published configurations, and small ones for tests.
#include "zoo.hpp"

#include "deepseek.hpp"
#include "gpt2.hpp"
#include "huggingface.hpp"
#include "llama3.hpp"
#include "resnest.hpp"
#include "vit.hpp"

#include <stdexcept>

namespace zoo {

namespace {

Entry gpt2(const std::string& name, int64_t parameters, const Gpt2Options& options) {
  return {name, parameters, 0, 0, [options] { return std::make_shared<Gpt2Impl>(options); }, [options] { return config_of(options); }};
}

Entry llama3(const std::string& name, int64_t parameters, const Llama3Options& options) {
  return {name, parameters, 0, 0, [options] { return std::make_shared<Llama3Impl>(options); }, [options] { return config_of(options); }};
}

Entry mixtral(const std::string& name, int64_t parameters, Llama3Options options, int64_t experts) {
  options.experts = experts;
  return llama3(name, parameters, options);
}

Entry qwen3_moe(const std::string& name, int64_t parameters, Llama3Options options, int64_t head_dim, int64_t experts, int64_t top_k) {
  options.head_dim = head_dim, options.head_norms = true;
  options.experts = experts, options.router.top_k = top_k, options.balance_loss = 0.001;
  return llama3(name, parameters, options);
}

Entry deepseek(const std::string& name, int64_t parameters, const DeepSeekOptions& options) {
  return {name, parameters, 0, 0, [options] { return std::make_shared<DeepSeekImpl>(options); }, [options] { return config_of(options); }};
}

DeepSeekOptions small_deepseek() {
  DeepSeekOptions o;
  o.vocabulary = 256, o.layers = 3, o.dim = 64, o.heads = 4;
  o.q_rank = 32, o.kv_rank = 16, o.nope_dim = 16, o.rope_dim = 8, o.value_dim = 12;
  o.dense_layers = 1, o.hidden = 160, o.experts = 8, o.expert_hidden = 32, o.shared_hidden = 32;
  o.rotary.yarn = dtensor::nn::YarnScaling{4, 32, 1, 64};
  o.router.top_k = 3, o.router.groups = 4, o.router.top_groups = 2;
  return o;
}

Entry vit(const std::string& name, int64_t parameters, const VitOptions& options) {
  return {name,
          parameters,
          options.image,
          options.channels,
          [options] { return std::make_shared<VitImpl>(options); },
          [options] { return config_of(options); }};
}

Entry resnest(const std::string& name, int64_t parameters, const ResNeStOptions& options, int64_t image = 224) {
  return {name, parameters, image, options.channels, [options] { return std::make_shared<ResNeStImpl>(options); }};
}

// The options in the order of their declaration.
std::vector<Entry> all() {
  const dtensor::nn::RotaryOptions llama32{500000, dtensor::nn::RotaryScaling{32}};
  const dtensor::nn::RotaryOptions short_text{10000, dtensor::nn::RotaryScaling{8, 1, 4, 32}};
  return {
      gpt2("gpt2", 124439808, {50257, 1024, 12, 768, 12}),
      gpt2("gpt2-medium", 354823168, {50257, 1024, 24, 1024, 16}),
      gpt2("gpt2-large", 774030080, {50257, 1024, 36, 1280, 20}),
      gpt2("gpt2-xl", 1557611200, {50257, 1024, 48, 1600, 25}),
      gpt2("gpt2-debug", 120576, {256, 64, 2, 64, 4}),
      llama3("llama3-8b", 8030261248, {128256, 32, 4096, 32, 8, 14336}),
      llama3("llama3-70b", 70553706496, {128256, 80, 8192, 64, 8, 28672}),
      llama3("llama3-405b", 405853388800, {128256, 126, 16384, 128, 8, 53248}),
      llama3("llama3.2-1b", 1235814400, {128256, 16, 2048, 32, 8, 8192, 1e-5, true, llama32}),
      llama3("llama3.2-3b", 3212749824, {128256, 28, 3072, 24, 8, 8192, 1e-5, true, llama32}),
      llama3("llama3-debug", 125248, {256, 2, 64, 4, 2, 176, 1e-5, false, short_text}),
      mixtral("mixtral-8x7b", 46702792704, {32000, 32, 4096, 32, 8, 14336, 1e-5, false, {1000000, {}}}, 8),
      mixtral("mixtral-8x22b", 140620634112, {32000, 56, 6144, 48, 8, 16384, 1e-5, false, {1000000, {}}}, 8),
      mixtral("mixtral-debug", 205632, {256, 2, 64, 4, 2, 96, 1e-5, false, {10000, {}}}, 4),
      qwen3_moe("qwen3-30b-a3b", 30532122624, {151936, 48, 2048, 32, 4, 768, 1e-6, false, {1000000, {}}}, 128, 128, 8),
      qwen3_moe("qwen3-235b-a22b", 235093634560, {151936, 94, 4096, 64, 4, 1536, 1e-6, false, {1000000, {}}}, 128, 128, 8),
      qwen3_moe("qwen3-moe-debug", 169376, {256, 2, 64, 4, 2, 32, 1e-6, false, {10000, {}}}, 24, 8, 4),
      deepseek("deepseek-v3", 671026419200, {}),
      deepseek("deepseek-debug", 210272, small_deepseek()),
      vit("vit-b/16", 86567656, {224, 3, 16, 1000, 12, 768, 12, 3072}),
      vit("vit-l/16", 304326632, {224, 3, 16, 1000, 24, 1024, 16, 4096}),
      vit("vit-h/14", 632045800, {224, 3, 14, 1000, 32, 1280, 16, 5120}),
      vit("vit-debug", 102218, {8, 1, 2, 10, 2, 64, 4, 256}),
      resnest("resnest-50", 27483240, {3, 1000, {3, 4, 6, 3}, 64, 32}),
      resnest("resnest-101", 48275016, {3, 1000, {3, 4, 23, 3}, 64, 64}),
      resnest("resnest-debug", 144338, {1, 10, {1, 1, 1, 1}, 8, 8, true}, 8),
  };
}

}  // namespace

const std::vector<Entry>& models() {
  static const auto entries = all();
  return entries;
}

const Entry& find(const std::string& name) {
  std::string names;
  for (const auto& entry : models()) {
    if (entry.name == name) return entry;
    names += " " + entry.name;
  }
  throw std::invalid_argument("there is no model '" + name + "'; the models are" + names);
}

}  // namespace zoo
