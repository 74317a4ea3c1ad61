#include "huggingface_rows.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <limits>
#include <map>

namespace zoo {

namespace {

const std::vector<Row>& llama_rows() {
  static const std::vector<Row> rows{
      {"tok_embeddings.weight", "model.embed_tokens.weight"},
      {"layers.#.attention.wq.weight", "model.layers.#.self_attn.q_proj.weight", How::rotary},
      {"layers.#.attention.wk.weight", "model.layers.#.self_attn.k_proj.weight", How::kv_rotary},
      {"layers.#.attention.wv.weight", "model.layers.#.self_attn.v_proj.weight"},
      {"layers.#.attention.wo.weight", "model.layers.#.self_attn.o_proj.weight"},
      {"layers.#.feed_forward.w1.weight", "model.layers.#.mlp.gate_proj.weight"},
      {"layers.#.feed_forward.w3.weight", "model.layers.#.mlp.up_proj.weight"},
      {"layers.#.feed_forward.w2.weight", "model.layers.#.mlp.down_proj.weight"},
      {"layers.#.attention_norm.weight", "model.layers.#.input_layernorm.weight"},
      {"layers.#.ffn_norm.weight", "model.layers.#.post_attention_layernorm.weight"},
      {"norm.weight", "model.norm.weight"},
      {"output.weight", "lm_head.weight"},
  };
  return rows;
}

std::vector<Row> with_experts(std::vector<Row> rows, const std::string& published, const std::vector<std::string>& names) {
  std::erase_if(rows, [](const Row& row) { return row.ours.find("feed_forward") != row.ours.npos; });
  const std::string ours = "layers.#.feed_forward.", layer = "model.layers.#.", stacked = layer + "mlp.";
  rows.push_back({ours + "gate.weight", layer + published + ".gate.weight"});
  if (published != "mlp") rows.push_back({ours + "gate.weight", stacked + "gate.weight", How::same, true});
  for (size_t i = 0; i < names.size(); ++i)
    rows.push_back({ours + "experts.w" + std::to_string(i + 1), layer + published + ".experts.@." + names[i] + ".weight", How::stacked});
  rows.push_back({ours + "experts.w1", stacked + "experts.gate_up_proj", How::gates, true});
  rows.push_back({ours + "experts.w2", stacked + "experts.down_proj", How::same, true});
  rows.push_back({ours + "experts.w3", stacked + "experts.gate_up_proj", How::ups, true});
  return rows;
}

// As published, and as they are in transformers 5.
const std::vector<Row>& mixtral_rows() {
  static const auto rows = with_experts(llama_rows(), "block_sparse_moe", {"w1", "w2", "w3"});
  return rows;
}

const std::vector<Row>& qwen3_moe_rows() {
  static const auto rows = [] {
    auto rows = with_experts(llama_rows(), "mlp", {"gate_proj", "down_proj", "up_proj"});
    rows.push_back({"layers.#.attention.q_norm.weight", "model.layers.#.self_attn.q_norm.weight", How::head_rotary});
    rows.push_back({"layers.#.attention.k_norm.weight", "model.layers.#.self_attn.k_norm.weight", How::head_rotary});
    return rows;
  }();
  return rows;
}

// Pairs of positions are neighbours there too.
const std::vector<Row>& deepseek_rows() {
  static const auto rows = [] {
    auto rows = with_experts(llama_rows(), "mlp", {"gate_proj", "down_proj", "up_proj"});
    std::erase_if(rows, [](const Row& row) { return row.ours.find("attention.") != row.ours.npos; });
    const std::string ours = "layers.#.", theirs = "model.layers.#.";
    const std::vector<std::pair<std::string, std::string>> names{{"wq", "q_proj"},
                                                                 {"wq_a", "q_a_proj"},
                                                                 {"q_norm", "q_a_layernorm"},
                                                                 {"wq_b", "q_b_proj"},
                                                                 {"wkv_a", "kv_a_proj_with_mqa"},
                                                                 {"kv_norm", "kv_a_layernorm"},
                                                                 {"wkv_b", "kv_b_proj"},
                                                                 {"wo", "o_proj"}};
    for (const auto& [own, other] : names)
      rows.push_back({ours + "attention." + own + ".weight", theirs + "self_attn." + other + ".weight"});
    for (const auto& [own, other] : std::map<std::string, std::string>{{"w1", "gate_proj"}, {"w2", "down_proj"}, {"w3", "up_proj"}}) {
      for (const std::string shared : {"", "shared_experts."})  // the first layers have one feed-forward layer
        rows.push_back({ours + "feed_forward." + shared + own + ".weight", theirs + "mlp." + shared + other + ".weight"});
    }
    rows.push_back({ours + "feed_forward.bias", theirs + "mlp.gate.e_score_correction_bias"});
    return rows;
  }();
  return rows;
}

const std::vector<Row>& gpt2_rows() {
  static const auto rows = [] {
    std::vector<Row> rows{{"wte.weight", "transformer.wte.weight"}, {"wpe.weight", "transformer.wpe.weight"}};
    for (const std::string name : {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2"}) {
      const auto how = name.starts_with("ln") ? How::same : How::transposed;
      rows.push_back({"h.#." + name + ".weight", "transformer.h.#." + name + ".weight", how});
      rows.push_back({"h.#." + name + ".bias", "transformer.h.#." + name + ".bias"});
    }
    for (const std::string name : {"ln_f.weight", "ln_f.bias"}) rows.push_back({name, "transformer." + name});
    return rows;
  }();
  return rows;
}

const std::vector<Row>& vit_rows() {
  static const auto rows = [] {
    std::vector<Row> rows{{"cls_token", "vit.embeddings.cls_token"}, {"pos_embed", "vit.embeddings.position_embeddings"}};
    const auto add = [&](const std::string& ours, const std::string& theirs, How how = How::same) {
      for (const std::string end : {".weight", ".bias"}) rows.push_back({ours + end, theirs + end, how});
    };
    add("patch_embed.proj", "vit.embeddings.patch_embeddings.projection");
    add("blocks.#.attn.qkv", "vit.encoder.layer.#.attention.attention.@", How::three_in_one);
    add("blocks.#.attn.proj", "vit.encoder.layer.#.attention.output.dense");
    add("blocks.#.mlp.fc1", "vit.encoder.layer.#.intermediate.dense");
    add("blocks.#.mlp.fc2", "vit.encoder.layer.#.output.dense");
    add("blocks.#.norm1", "vit.encoder.layer.#.layernorm_before");
    add("blocks.#.norm2", "vit.encoder.layer.#.layernorm_after");
    add("norm", "vit.layernorm");
    add("head", "classifier");
    return rows;
  }();
  return rows;
}

const std::vector<Row>& rows_of(const std::string& type) {
  if (type == "mixtral") return mixtral_rows();
  if (type == "qwen3_moe") return qwen3_moe_rows();
  if (type == "deepseek_v3") return deepseek_rows();
  return type == "gpt2" ? gpt2_rows() : type == "vit" ? vit_rows() : llama_rows();
}

std::string with(std::string name, char mark, const std::string& text) {
  const auto at = name.find(mark);
  return at == name.npos ? name : name.replace(at, 1, text);
}

}  // namespace

std::vector<Row> rows_of(const Counts& counts) {
  std::vector<Row> rows;
  for (const auto& row : rows_of(counts.type)) {
    if (row.ours.find('#') == row.ours.npos) rows.push_back(row);
    else {
      for (int64_t i = 0; i < counts.layers; ++i)
        rows.push_back({with(row.ours, '#', std::to_string(i)), with(row.theirs, '#', std::to_string(i)), row.how, row.is_only_read});
    }
  }
  return rows;
}

int64_t parts_of(const Row& row, const Counts& counts) {
  return row.how == How::three_in_one ? 3 : row.how == How::stacked ? counts.experts : 1;
}

std::string name_of_part(const Row& row, int64_t part) {
  static const std::vector<std::string> three{"query", "key", "value"};
  return with(row.theirs, '@', row.how == How::three_in_one ? three[static_cast<size_t>(part)] : std::to_string(part));
}

void check_sizes(const std::string& name, const std::vector<int64_t>& sizes, How how, const Counts& counts, bool is_ours) {
  const auto refuse = [&](const std::string& expected) {
    dtensor::fail("zoo", "'{}' is [{}]; expected {}; hint: is config.json of this model?", name, fmt::join(sizes, ", "), expected);
  };
  if (how == How::same) return;
  if (how == How::transposed && sizes.size() != 2) refuse("a matrix");
  if (how == How::gates || how == How::ups) {
    if (sizes.size() != 3 || sizes[0] != counts.experts || sizes[1] % 2 != 0)
      refuse(fmt::format("[{}, twice the width, dim]", counts.experts));
    return;
  }
  if (how == How::stacked) {
    if (is_ours && (sizes.empty() || sizes[0] != counts.experts)) refuse(fmt::format("[{}, ...]", counts.experts));
    return;
  }
  if (sizes.empty()) refuse("rows");
  const auto heads = how == How::rotary ? counts.heads : how == How::kv_rotary ? counts.kv_heads : 1;
  const bool has_heads = how == How::rotary || how == How::kv_rotary || how == How::head_rotary;
  if (has_heads && sizes[0] % (2 * heads) != 0) refuse(fmt::format("rows of {} heads, an even number each", heads));
  if (how != How::three_in_one) return;
  if (is_ours ? sizes[0] % 3 != 0 : sizes[0] > std::numeric_limits<int64_t>::max() / 3) refuse("rows of query, key and value");
}

}  // namespace zoo
