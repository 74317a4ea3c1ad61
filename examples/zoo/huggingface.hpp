// The zoo's models in Hugging Face's form: names and orders of their weights, and config.json.
//
//   const auto config = ...;                              // the text of folder/config.json
//   auto model = zoo::model_from_config(config);
//   zoo::load(*model, config, dt::checkpoints::read_huggingface(folder));   // on any mesh; each rank reads its shards
#pragma once

#include "deepseek.hpp"
#include "gpt2.hpp"
#include "llama3.hpp"
#include "vit.hpp"

#include <dtensor/checkpoint/foreign.hpp>

#include <memory>
#include <string>

namespace zoo {

// The text of config.json, with what transformers' from_pretrained needs.
std::string config_of(const Llama3Options& options);
std::string config_of(const DeepSeekOptions& options);
std::string config_of(const Gpt2Options& options);
std::string config_of(const VitOptions& options);

// The model that a config.json describes: "llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2" or "vit". Its parameters are drawn; in
// dt::DeferredInit it takes no memory. These functions throw dtensor::Error for other models, and for what ours do not have (biases of
// attention, other activations, other scalings).
std::shared_ptr<Model> model_from_config(const std::string& config);

// Loads Hugging Face's tensors into a model, whatever the layouts of its parameters; also one whose stages are in a pipeline, after
// Pipeline::materialize(). Every rank calls it, and all have read the same index. Each byte is read by one rank, as by dt::load; of GPT-2's
// linear weights, which are transposed, each rank reads an equal share, which then moves to where it belongs. No rank holds more than its
// share of one such tensor twice. Checksums, which Hugging Face's files have not, are not compared for Llama's wq and wk.
//
// What else the index has is left out. Throws dtensor::Error on every rank where names and sizes do not fit, all listed together.
void load(Model& model, const std::string& config, const dtensor::checkpoints::Index& theirs);

// Hugging Face's tensors as ours: other names, GPT-2's linear weights transposed, the rows of Llama's wq and wk in Meta's order, ViT's
// query, key and value in one, experts one above the other. What else the source has is left out. And back. A source gives one whole tensor
// at a time.
dtensor::checkpoints::Source from_huggingface(const std::string& config, const dtensor::checkpoints::Source& theirs);
dtensor::checkpoints::Source to_huggingface(const std::string& config, const dtensor::checkpoints::Source& ours);

// The parameters and buffers of a model, by their names. Plain tensors; the source keeps them.
dtensor::checkpoints::Source source_of(const Model& model);

}  // namespace zoo
