#include "huggingface_rows.hpp"

#include <dtensor/base/error.hpp>

#include <fmt/ranges.h>

#include <limits>

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
        rows.push_back({with(row.ours, '#', std::to_string(i)), with(row.theirs, '#', std::to_string(i)), row.how});
    }
  }
  return rows;
}

std::string name_of_part(const Row& row, const std::string& part) { return with(row.theirs, '@', part); }

void check_sizes(const std::string& name, const std::vector<int64_t>& sizes, How how, const Counts& counts, bool is_ours) {
  const auto refuse = [&](const std::string& expected) {
    dtensor::fail("zoo", "'{}' is [{}]; expected {}; hint: is config.json of this model?", name, fmt::join(sizes, ", "), expected);
  };
  if (how == How::same) return;
  if (how == How::transposed && sizes.size() != 2) refuse("a matrix");
  if (sizes.empty()) refuse("rows");
  const auto heads = how == How::rotary ? counts.heads : counts.kv_heads;
  const bool has_heads = how == How::rotary || how == How::kv_rotary;
  if (has_heads && sizes[0] % (2 * heads) != 0) refuse(fmt::format("rows of {} heads, an even number each", heads));
  if (how != How::three_in_one) return;
  if (is_ours ? sizes[0] % 3 != 0 : sizes[0] > std::numeric_limits<int64_t>::max() / 3) refuse("rows of query, key and value");
}

}  // namespace zoo
