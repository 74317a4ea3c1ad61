// Hugging Face's names and orders of weights.
#include "huggingface.hpp"

#include "huggingface_config.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>

#include <ATen/ops/cat.h>
#include <fmt/ranges.h>

#include <limits>
#include <map>
#include <set>

namespace zoo {

namespace {

using dtensor::checkpoints::Source;
using Described = Source::Described;

enum class How {
  same,
  transposed,   // [in, out] there
  rotary,       // rows of a head: first halves of pairs, then second halves; pairs are neighbours in ours
  kv_rotary,    // the same, for the heads of keys
  three_in_one  // query, key and value, one behind the other in ours
};

// `#` stands for the number of a layer.
struct Row {
  std::string ours, theirs;
  How how = How::same;
};

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

const std::vector<std::string>& parts() {
  static const std::vector<std::string> names{"query", "key", "value"};
  return names;
}

// [heads, first, second, ...] with the two swapped: from pairs to halves of a head where `first` is dim / 2, and back where it is 2.
torch::Tensor reordered(const torch::Tensor& weight, int64_t heads, bool to_halves) {
  const auto rows = weight.size(0), pairs = rows / heads / 2;
  std::vector<int64_t> sizes{heads, to_halves ? pairs : 2, to_halves ? 2 : pairs};
  for (int64_t d = 1; d < weight.dim(); ++d) sizes.push_back(weight.size(d));
  return weight.reshape(sizes).transpose(1, 2).reshape(weight.sizes());
}

torch::Tensor converted(const torch::Tensor& weight, How how, const Counts& counts, bool to_theirs) {
  switch (how) {
    case How::transposed: return weight.t().contiguous();
    case How::rotary: return reordered(weight, counts.heads, to_theirs);
    case How::kv_rotary: return reordered(weight, counts.kv_heads, to_theirs);
    default: return weight;
  }
}

// Throws unless a tensor can be converted. Theirs is the first of three where ours is three in one.
void check_sizes(const Described& tensor, How how, const Counts& counts, bool is_ours) {
  const auto& sizes = tensor.sizes;
  const auto refuse = [&](const std::string& expected) {
    dtensor::fail("zoo", "'{}' is [{}]; expected {}; hint: is config.json of this model?", tensor.name, fmt::join(sizes, ", "), expected);
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

std::map<std::string, Described> by_name(const Source& source) {
  std::map<std::string, Described> all;
  for (const auto& tensor : source.tensors) all.emplace(tensor.name, tensor);
  return all;
}

// The names that the checkpoints on the hub have: GPT-2's lack the "transformer." that transformers saves.
std::string known_name(const std::map<std::string, Described>& all, const std::string& name) {
  const std::string prefix = "transformer.";
  return !all.contains(name) && name.starts_with(prefix) && all.contains(name.substr(prefix.size())) ? name.substr(prefix.size()) : name;
}

}  // namespace

Source from_huggingface(const std::string& config, const Source& theirs) {
  const auto counts = counts_of(config);
  const auto known = by_name(theirs);
  Source ours;
  std::map<std::string, Row> by_ours;
  for (auto row : rows_of(counts)) {
    const bool is_three = row.how == How::three_in_one;
    row.theirs = known_name(known, row.theirs);
    const auto found = known.find(is_three ? with(row.theirs, '@', parts()[0]) : row.theirs);
    if (found == known.end()) continue;  // tied weights; what else is missing is found missing where it is wanted
    check_sizes(found->second, row.how, counts, false);
    auto sizes = found->second.sizes;
    if (row.how == How::transposed) std::swap(sizes[0], sizes[1]);
    if (is_three) sizes[0] *= 3;
    ours.tensors.push_back({row.ours, found->second.dtype, sizes});
    by_ours[row.ours] = row;
  }
  ours.get = [=](const std::string& name) {
    const auto& row = by_ours.at(name);
    if (row.how != How::three_in_one) return converted(theirs.get(row.theirs), row.how, counts, false);
    std::vector<torch::Tensor> tensors;
    for (const auto& part : parts()) tensors.push_back(theirs.get(with(row.theirs, '@', part)));
    return at::cat(tensors);
  };
  return ours;
}

Source to_huggingface(const std::string& config, const Source& ours) {
  const auto counts = counts_of(config);
  const auto known = by_name(ours);
  Source theirs;
  std::map<std::string, std::pair<Row, int64_t>> by_theirs;  // and which part of three
  const auto add = [&](const Row& row, const std::string& name, Described tensor, int64_t part) {
    tensor.name = name;
    theirs.tensors.push_back(tensor);
    by_theirs[name] = {row, part};
  };
  for (const auto& row : rows_of(counts)) {
    const auto found = known.find(row.ours);
    if (found == known.end()) continue;
    check_sizes(found->second, row.how, counts, true);
    auto tensor = found->second;
    if (row.how == How::transposed) std::swap(tensor.sizes[0], tensor.sizes[1]);
    if (row.how != How::three_in_one) {
      add(row, row.theirs, tensor, 0);
      continue;
    }
    tensor.sizes[0] /= 3;
    for (int64_t part = 0; part < 3; ++part) add(row, with(row.theirs, '@', parts()[static_cast<size_t>(part)]), tensor, part);
  }
  theirs.get = [=](const std::string& name) {
    const auto& [row, part] = by_theirs.at(name);
    const auto whole = ours.get(row.ours);
    return row.how == How::three_in_one ? whole.chunk(3)[static_cast<size_t>(part)] : converted(whole, row.how, counts, true);
  };
  return theirs;
}

Source source_of(const Model& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : model.named_parameters()) tensors[parameter.key()] = parameter.value().detach();
  return dtensor::checkpoints::source_of(tensors);
}

void fill(Model& model, const Source& source) {
  const auto known = by_name(source);
  torch::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    const auto found = known.find(parameter.key());
    const auto sizes = parameter.value().sizes().vec();
    if (found == known.end()) {
      dtensor::fail("zoo",
                    "'{}' of the model is not in the checkpoint, which has {} tensors that the model knows; expected all; hint: is it of "
                    "this model?",
                    parameter.key(), known.size());
    }
    dtensor::require(found->second.sizes == sizes, "zoo",
                     "'{}' is [{}] in the checkpoint; expected [{}]; hint: compare config.json with the "
                     "model's options",
                     parameter.key(), fmt::join(found->second.sizes, ", "), fmt::join(sizes, ", "));
    parameter.value().copy_(source.get(parameter.key()));
  }
}

}  // namespace zoo
