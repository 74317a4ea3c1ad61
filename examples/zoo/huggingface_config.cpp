// Hugging Face's config.json.
#include "huggingface_config.hpp"

#include "huggingface.hpp"

#include <dtensor/base/error.hpp>

#include <nlohmann/json.hpp>

#include <type_traits>
#include <utility>

namespace zoo {

namespace {

using nlohmann::json;

constexpr int64_t kMostLayers = 4096, kMost = int64_t{1} << 20;  // products of three such sizes fit in 64 bits

// The fields of a config. What is missing has transformers' default.
class Fields {
 public:
  explicit Fields(json all) : all_(std::move(all)) {}

  template <class T>
  T get(const char* name, T otherwise) const {
    const auto found = all_.find(name);
    if (found == all_.end() || found->is_null()) return otherwise;
    try {
      if (!std::is_same_v<T, int64_t> || found->is_number_integer()) return found->template get<T>();
    } catch (const json::exception&) {
    }
    dtensor::fail("zoo", "config.json has {} {}; expected one like {}; hint: compare it with one that transformers wrote", name,
                  found->dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 60), json(otherwise).dump());
  }

  // A number of things, or a size.
  int64_t count(const char* name, int64_t otherwise, int64_t most = kMost) const {
    const auto value = get(name, otherwise);
    dtensor::require(value >= 1 && value <= most, "zoo",
                     "config.json has {} {}; expected 1 to {}; hint: compare it with one that transformers wrote", name, value, most);
    return value;
  }

  // Throws unless a field has the one value that our model has.
  template <class T>
  void expect(const char* name, const T& only) const {
    const auto value = get(name, only);
    if (value != only)
      dtensor::fail("zoo", "config.json has {} {}; expected {}, which the model of the zoo has; hint: write a model that has the other",
                    name, json(value).dump(), json(only).dump());
  }

  // null: what is missing has its default.
  bool is_none(const char* name) const { return all_.contains(name) && all_[name].is_null(); }

  // Throws where a field has a value.
  void expect_none(const char* name) const {
    if (!all_.contains(name) || is_none(name)) return;
    dtensor::fail("zoo", "config.json has {} {}; expected none, as the model of the zoo has none; hint: write a model that has it", name,
                  all_[name].dump(-1, ' ', /*ensure_ascii=*/true).substr(0, 60));
  }

  const json* find(const char* name) const {
    const auto found = all_.find(name);
    return found == all_.end() || !found->is_object() ? nullptr : &*found;
  }

 private:
  json all_;
};

dtensor::nn::YarnScaling yarn_from(const Fields& scaling) {
  const auto sharpness = scaling.get("mscale_all_dim", 0.0);
  dtensor::require(sharpness > 0 && scaling.get("mscale", 0.0) == sharpness, "zoo",
                   "config.json has mscale {} and mscale_all_dim {}; expected the same, above 0; hint: write a model that has others",
                   scaling.get("mscale", 0.0), sharpness);
  return {.factor = scaling.get("factor", 40.0),
          .fast = scaling.get("beta_fast", 32.0),
          .slow = scaling.get("beta_slow", 1.0),
          .original_length = scaling.count("original_max_position_embeddings", 4096),
          .sharpness = sharpness};
}

dtensor::nn::RotaryOptions rotary_from(const Fields& fields, bool has_latent_attention = false) {
  dtensor::nn::RotaryOptions rotary{fields.get("rope_theta", 10000.0), {}};
  const auto* given = fields.find("rope_parameters");  // of transformers 5, which has theta in it
  if (!given) given = fields.find("rope_scaling");
  if (!given) return rotary;
  const Fields scaling(*given);
  rotary.theta = scaling.get("rope_theta", rotary.theta);
  const auto type = scaling.get("rope_type", scaling.get<std::string>("type", "default"));
  if (type == "default") return rotary;
  if (type == "yarn" && has_latent_attention) {
    rotary.yarn = yarn_from(scaling);
    return rotary;
  }
  dtensor::require(type == "llama3", "zoo",
                   "config.json scales rotary positions by '{}'; expected 'default', 'llama3' or, of deepseek_v3, 'yarn'; hint: "
                   "dtensor/nn/rotary_embedding.hpp has what there is",
                   type);
  rotary.scaling =
      dtensor::nn::RotaryScaling{scaling.get("factor", 8.0), scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0),
                                 scaling.count("original_max_position_embeddings", 8192)};
  return rotary;
}

Llama3Options llama_from(const Fields& fields) {
  Llama3Options options;
  options.vocabulary = fields.count("vocab_size", 32000);
  options.layers = fields.count("num_hidden_layers", 32, kMostLayers);
  options.dim = fields.count("hidden_size", 4096);
  options.heads = fields.count("num_attention_heads", 32);
  options.kv_heads = fields.count("num_key_value_heads", options.heads);
  options.hidden = fields.count("intermediate_size", 11008);
  options.eps = fields.get("rms_norm_eps", 1e-6);
  options.tied = fields.get("tie_word_embeddings", false);
  options.rotary = rotary_from(fields);
  options.head_dim = fields.count("head_dim", options.dim / options.heads);
  fields.expect("attention_bias", false);
  fields.expect("mlp_bias", false);
  fields.expect<std::string>("hidden_act", "silu");
  return options;
}

Llama3Options mixtral_from(const Fields& fields) {
  auto options = llama_from(fields);
  options.kv_heads = fields.count("num_key_value_heads", 8);
  options.hidden = fields.count("intermediate_size", 14336);
  options.eps = fields.get("rms_norm_eps", 1e-5);
  options.experts = fields.count("num_local_experts", 8);
  options.router.top_k = fields.count("num_experts_per_tok", 2, options.experts);
  options.router.jitter = fields.get("router_jitter_noise", 0.0);
  options.balance_loss = fields.get("router_aux_loss_coef", 0.001);
  if (!fields.find("rope_parameters")) options.rotary.theta = fields.get("rope_theta", 1e6);
  fields.expect_none("sliding_window");
  return options;
}

Llama3Options qwen3_moe_from(const Fields& fields) {
  auto options = llama_from(fields);
  options.vocabulary = fields.count("vocab_size", 151936);
  options.hidden = fields.count("moe_intermediate_size", 768);
  options.experts = fields.count("num_experts", fields.count("num_local_experts", 128));  // the second is transformers 5's
  options.router.top_k = fields.count("num_experts_per_tok", 8, options.experts);
  options.router.normalize = fields.get("norm_topk_prob", false);
  options.balance_loss = fields.get("router_aux_loss_coef", 0.001);
  options.head_norms = true;
  fields.expect("use_sliding_window", false);
  fields.expect("decoder_sparse_step", int64_t{1});
  fields.expect("mlp_only_layers", std::vector<int64_t>{});
  return options;
}

dtensor::nn::RouterOptions deepseek_router_from(const Fields& fields, int64_t experts) {
  return {.top_k = fields.count("num_experts_per_tok", 8, experts),
          .scores = "sigmoid",
          .normalize = fields.get("norm_topk_prob", true),
          .scale = fields.get("routed_scaling_factor", 2.5),
          .groups = fields.count("n_group", 8, experts),
          .top_groups = fields.count("topk_group", 4, experts)};
}

DeepSeekOptions deepseek_from(const Fields& fields) {
  DeepSeekOptions options;
  options.vocabulary = fields.count("vocab_size", 129280);
  options.layers = fields.count("num_hidden_layers", 61, kMostLayers);
  options.dim = fields.count("hidden_size", 7168);
  options.heads = fields.count("num_attention_heads", 128);
  options.q_rank = fields.is_none("q_lora_rank") ? 0 : fields.count("q_lora_rank", 1536);
  options.kv_rank = fields.count("kv_lora_rank", 512);
  options.nope_dim = fields.count("qk_nope_head_dim", 128, kMost / 2);
  options.rope_dim = fields.count("qk_rope_head_dim", 64, kMost / 2);
  options.value_dim = fields.count("v_head_dim", 128, kMost / 2);
  options.dense_layers = fields.get("first_k_dense_replace", int64_t{3});
  options.hidden = fields.count("intermediate_size", 18432);
  options.experts = fields.count("n_routed_experts", 256);
  options.expert_hidden = fields.count("moe_intermediate_size", 2048);
  options.shared_hidden = options.expert_hidden * fields.count("n_shared_experts", 1, kMostLayers);
  options.eps = fields.get("rms_norm_eps", 1e-6);
  options.rotary = rotary_from(fields, true);
  options.router = deepseek_router_from(fields, options.experts);
  fields.expect_none("quantization_config");
  fields.expect("rope_interleave", true);
  fields.expect("tie_word_embeddings", false);
  fields.expect("attention_bias", false);
  fields.expect<std::string>("hidden_act", "silu");
  return options;
}

Gpt2Options gpt2_from(const Fields& fields) {
  Gpt2Options options;
  options.vocabulary = fields.count("vocab_size", 50257);
  options.positions = fields.count("n_positions", 1024);
  options.layers = fields.count("n_layer", 12, kMostLayers);
  options.dim = fields.count("n_embd", 768);
  options.heads = fields.count("n_head", 12);
  fields.expect("n_inner", 4 * options.dim);
  fields.expect<std::string>("activation_function", "gelu_new");
  fields.expect("layer_norm_epsilon", 1e-5);
  fields.expect("tie_word_embeddings", true);
  fields.expect("scale_attn_by_inverse_layer_idx", false);
  return options;
}

VitOptions vit_from(const Fields& fields) {
  VitOptions options;
  options.image = fields.count("image_size", 224);
  options.channels = fields.count("num_channels", 3);
  options.patch = fields.count("patch_size", 16);
  options.layers = fields.count("num_hidden_layers", 12, kMostLayers);
  options.dim = fields.count("hidden_size", 768);
  options.heads = fields.count("num_attention_heads", 12);
  options.hidden = fields.count("intermediate_size", 3072);
  const auto* labels = fields.find("id2label");
  options.classes = labels ? static_cast<int64_t>(labels->size()) : 2;
  fields.expect("qkv_bias", true);
  fields.expect<std::string>("hidden_act", "gelu");
  return options;
}

bool is_llama(const std::string& type) { return type == "llama" || type == "mixtral" || type == "qwen3_moe"; }

Llama3Options llama3_from(const std::string& type, const Fields& fields) {
  return type == "mixtral" ? mixtral_from(fields) : type == "qwen3_moe" ? qwen3_moe_from(fields) : llama_from(fields);
}

Fields fields_of(const std::string& config) {
  auto parsed = json::parse(config, nullptr, /*allow_exceptions=*/false);
  dtensor::require(parsed.is_object(), "zoo",
                   "config.json is no JSON object; got {} bytes; expected one; hint: give its text, not its path", config.size());
  return Fields(std::move(parsed));
}

[[noreturn]] void refuse_type(const std::string& type) {
  dtensor::fail("zoo", "config.json is of a '{}'; expected llama, mixtral, qwen3_moe, deepseek_v3, gpt2 or vit; hint: the zoo has no other",
                type);
}

std::string text_of(const json& config) { return config.dump(2) + "\n"; }

}  // namespace

std::string config_of(const Llama3Options& options) {
  const bool is_qwen3 = options.head_norms, is_mixtral = options.experts > 0 && !is_qwen3;
  dtensor::require(!is_qwen3 || options.experts > 0, "zoo", "a model that normalizes heads and has no experts has no config.json here");
  json config{{"architectures",
               {is_qwen3     ? "Qwen3MoeForCausalLM"
                : is_mixtral ? "MixtralForCausalLM"
                             : "LlamaForCausalLM"}},
              {"model_type", is_qwen3     ? "qwen3_moe"
                             : is_mixtral ? "mixtral"
                                          : "llama"},
              {"vocab_size", options.vocabulary},
              {"num_hidden_layers", options.layers},
              {"hidden_size", options.dim},
              {"num_attention_heads", options.heads},
              {"num_key_value_heads", options.kv_heads},
              {"head_dim", options.dim_of_head()},
              {"intermediate_size", options.hidden},
              {"rms_norm_eps", options.eps},
              {"tie_word_embeddings", options.tied},
              {"rope_theta", options.rotary.theta},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"mlp_bias", false},
              {"max_position_embeddings", 131072}};
  if (options.experts > 0) {
    config[is_qwen3 ? "num_experts" : "num_local_experts"] = options.experts;
    config["num_experts_per_tok"] = options.router.top_k;
    config["router_aux_loss_coef"] = options.balance_loss;
    config["sliding_window"] = nullptr;
  }
  if (is_mixtral) config["router_jitter_noise"] = options.router.jitter;
  if (is_qwen3) {
    config["moe_intermediate_size"] = options.hidden;
    config["norm_topk_prob"] = options.router.normalize;
  }
  if (const auto& scaling = options.rotary.scaling) {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling->factor},
                              {"low_freq_factor", scaling->low_frequency_factor},
                              {"high_freq_factor", scaling->high_frequency_factor},
                              {"original_max_position_embeddings", scaling->original_length}};
  }
  return text_of(config);
}

std::string config_of(const DeepSeekOptions& o) {
  json config{{"architectures", {"DeepseekV3ForCausalLM"}},
              {"model_type", "deepseek_v3"},
              {"vocab_size", o.vocabulary},
              {"num_hidden_layers", o.layers},
              {"hidden_size", o.dim},
              {"num_attention_heads", o.heads},
              {"num_key_value_heads", o.heads},
              {"q_lora_rank", nullptr},
              {"kv_lora_rank", o.kv_rank},
              {"qk_nope_head_dim", o.nope_dim},
              {"qk_rope_head_dim", o.rope_dim},
              {"v_head_dim", o.value_dim},
              {"first_k_dense_replace", o.dense_layers},
              {"intermediate_size", o.hidden},
              {"n_routed_experts", o.experts},
              {"moe_intermediate_size", o.expert_hidden},
              {"n_shared_experts", o.shared_hidden / o.expert_hidden},
              {"num_experts_per_tok", o.router.top_k},
              {"norm_topk_prob", o.router.normalize},
              {"routed_scaling_factor", o.router.scale},
              {"n_group", o.router.groups},
              {"topk_group", o.router.top_groups},
              {"rms_norm_eps", o.eps},
              {"tie_word_embeddings", false},
              {"rope_theta", o.rotary.theta},
              {"rope_interleave", true},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"max_position_embeddings", 163840}};
  if (o.q_rank > 0) config["q_lora_rank"] = o.q_rank;
  if (const auto& yarn = o.rotary.yarn) {
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", yarn->factor},
                              {"beta_fast", yarn->fast},
                              {"beta_slow", yarn->slow},
                              {"mscale", yarn->sharpness},
                              {"mscale_all_dim", yarn->sharpness},
                              {"original_max_position_embeddings", yarn->original_length}};
  }
  return text_of(config);
}

std::string config_of(const Gpt2Options& options) {
  return text_of({{"architectures", {"GPT2LMHeadModel"}},
                  {"model_type", "gpt2"},
                  {"vocab_size", options.vocabulary},
                  {"n_positions", options.positions},
                  {"n_layer", options.layers},
                  {"n_embd", options.dim},
                  {"n_head", options.heads},
                  {"activation_function", "gelu_new"},
                  {"layer_norm_epsilon", 1e-5},
                  {"tie_word_embeddings", true},
                  {"attn_pdrop", options.dropout},
                  {"embd_pdrop", options.dropout},
                  {"resid_pdrop", options.dropout}});
}

std::string config_of(const VitOptions& options) {
  json labels = json::object(), numbers = json::object();
  for (int64_t i = 0; i < options.classes; ++i) {
    labels[std::to_string(i)] = "LABEL_" + std::to_string(i);
    numbers["LABEL_" + std::to_string(i)] = i;
  }
  return text_of({{"architectures", {"ViTForImageClassification"}},
                  {"model_type", "vit"},
                  {"image_size", options.image},
                  {"num_channels", options.channels},
                  {"patch_size", options.patch},
                  {"num_hidden_layers", options.layers},
                  {"hidden_size", options.dim},
                  {"num_attention_heads", options.heads},
                  {"intermediate_size", options.hidden},
                  {"hidden_act", "gelu"},
                  {"qkv_bias", true},
                  {"layer_norm_eps", 1e-6},
                  {"id2label", labels},
                  {"label2id", numbers}});
}

Counts counts_of(const std::string& config) {
  const auto fields = fields_of(config);
  const auto type = fields.get<std::string>("model_type", "");
  const auto counts = [&](const auto& options) { return Counts{type, options.layers, options.heads, options.heads, 0}; };
  if (type == "gpt2") return counts(gpt2_from(fields));
  if (type == "vit") return counts(vit_from(fields));
  if (type == "deepseek_v3") {
    const auto options = deepseek_from(fields);
    return {type, options.layers, options.heads, options.heads, options.experts};
  }
  if (!is_llama(type)) refuse_type(type);
  const auto options = llama3_from(type, fields);
  return {type, options.layers, options.heads, options.kv_heads, options.experts};
}

std::shared_ptr<Model> model_from_config(const std::string& config) {
  const auto fields = fields_of(config);
  const auto type = fields.get<std::string>("model_type", "");
  if (is_llama(type)) return std::make_shared<Llama3Impl>(llama3_from(type, fields));
  if (type == "deepseek_v3") return std::make_shared<DeepSeekImpl>(deepseek_from(fields));
  if (type == "gpt2") return std::make_shared<Gpt2Impl>(gpt2_from(fields));
  if (type == "vit") return std::make_shared<VitImpl>(vit_from(fields));
  refuse_type(type);
}

}  // namespace zoo
