// The zoo's models in Hugging Face's form: names and orders of their weights, and config.json.
//
//   const auto config = ...;                              // the text of folder/config.json
//   auto model = zoo::model_from_config(config);
//   zoo::fill(*model, zoo::from_huggingface(config, dt::checkpoints::source_of(dt::checkpoints::read_huggingface(folder))));
//
// A source (dtensor/checkpoint/foreign.hpp) gives one tensor at a time, so no more than one tensor is held twice.
#pragma once

#include "gpt2.hpp"
#include "llama3.hpp"
#include "vit.hpp"

#include <dtensor/checkpoint/foreign.hpp>

#include <memory>
#include <string>

namespace zoo {

// The text of config.json, with what transformers' from_pretrained needs.
std::string config_of(const Llama3Options& options);
std::string config_of(const Gpt2Options& options);
std::string config_of(const VitOptions& options);

// The model that a config.json describes: "llama", "gpt2" or "vit". Its parameters are drawn; in dt::DeferredInit it takes no memory. These
// functions throw dtensor::Error for other models, and for what ours do not have (biases of attention, other activations, other scalings).
std::shared_ptr<Model> model_from_config(const std::string& config);

// Hugging Face's tensors as ours: other names, GPT-2's linear weights transposed, the rows of Llama's wq and wk in Meta's order, ViT's
// query, key and value in one. What else the source has is left out. And back.
dtensor::checkpoints::Source from_huggingface(const std::string& config, const dtensor::checkpoints::Source& theirs);
dtensor::checkpoints::Source to_huggingface(const std::string& config, const dtensor::checkpoints::Source& ours);

// The parameters of a model, by their names. Plain tensors; the source keeps them.
dtensor::checkpoints::Source source_of(const Model& model);

// Copies tensors into the parameters of a model. Throws dtensor::Error where one is missing, or of other sizes.
void fill(Model& model, const dtensor::checkpoints::Source& source);

}  // namespace zoo
