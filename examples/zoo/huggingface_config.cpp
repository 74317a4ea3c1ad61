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

  const json* find(const char* name) const {
    const auto found = all_.find(name);
    return found == all_.end() || !found->is_object() ? nullptr : &*found;
  }

 private:
  json all_;
};

dtensor::nn::RotaryOptions rotary_from(const Fields& fields) {
  dtensor::nn::RotaryOptions rotary{fields.get("rope_theta", 10000.0), {}};
  const auto* given = fields.find("rope_parameters");  // of transformers 5, which has theta in it
  if (!given) given = fields.find("rope_scaling");
  if (!given) return rotary;
  const Fields scaling(*given);
  rotary.theta = scaling.get("rope_theta", rotary.theta);
  const auto type = scaling.get("rope_type", scaling.get<std::string>("type", "default"));
  if (type == "default") return rotary;
  dtensor::require(type == "llama3", "zoo",
                   "config.json scales rotary positions by '{}'; expected 'default' or 'llama3'; hint: "
                   "dtensor/nn/rotary_embedding.hpp has what there is",
                   type);
  rotary.scaling =
      dtensor::nn::RotaryScaling{scaling.get("factor", 8.0), scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0),
                                 scaling.count("original_max_position_embeddings", 8192)};
  return rotary;
}

Llama3Options llama3_from(const Fields& fields) {
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
  fields.expect("head_dim", options.dim / options.heads);
  fields.expect("attention_bias", false);
  fields.expect("mlp_bias", false);
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

Fields fields_of(const std::string& config) {
  auto parsed = json::parse(config, nullptr, /*allow_exceptions=*/false);
  dtensor::require(parsed.is_object(), "zoo",
                   "config.json is no JSON object; got {} bytes; expected one; hint: give its text, not its path", config.size());
  return Fields(std::move(parsed));
}

[[noreturn]] void refuse_type(const std::string& type) {
  dtensor::fail("zoo", "config.json is of a '{}'; expected llama, gpt2 or vit; hint: the zoo has no such model", type);
}

std::string text_of(const json& config) { return config.dump(2) + "\n"; }

}  // namespace

std::string config_of(const Llama3Options& options) {
  json config{{"architectures", {"LlamaForCausalLM"}},
              {"model_type", "llama"},
              {"vocab_size", options.vocabulary},
              {"num_hidden_layers", options.layers},
              {"hidden_size", options.dim},
              {"num_attention_heads", options.heads},
              {"num_key_value_heads", options.kv_heads},
              {"head_dim", options.dim / options.heads},
              {"intermediate_size", options.hidden},
              {"rms_norm_eps", options.eps},
              {"tie_word_embeddings", options.tied},
              {"rope_theta", options.rotary.theta},
              {"hidden_act", "silu"},
              {"attention_bias", false},
              {"mlp_bias", false},
              {"max_position_embeddings", 131072}};
  if (const auto& scaling = options.rotary.scaling) {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling->factor},
                              {"low_freq_factor", scaling->low_frequency_factor},
                              {"high_freq_factor", scaling->high_frequency_factor},
                              {"original_max_position_embeddings", scaling->original_length}};
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
  const auto counts = [&](const auto& options) { return Counts{type, options.layers, options.heads, options.heads}; };
  if (type == "gpt2") return counts(gpt2_from(fields));
  if (type == "vit") return counts(vit_from(fields));
  if (type != "llama") refuse_type(type);
  const auto options = llama3_from(fields);
  return {type, options.layers, options.heads, options.kv_heads};
}

std::shared_ptr<Model> model_from_config(const std::string& config) {
  const auto fields = fields_of(config);
  const auto type = fields.get<std::string>("model_type", "");
  if (type == "llama") return std::make_shared<Llama3Impl>(llama3_from(fields));
  if (type == "gpt2") return std::make_shared<Gpt2Impl>(gpt2_from(fields));
  if (type == "vit") return std::make_shared<VitImpl>(vit_from(fields));
  refuse_type(type);
}

}  // namespace zoo
