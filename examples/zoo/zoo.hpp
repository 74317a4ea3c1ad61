// The models by name.
#pragma once

#include "model.hpp"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zoo {

struct Entry {
  std::string name;                              // "llama3-8b"
  int64_t parameters;                            // as published; elements of the learned tensors, and biases of experts
  int64_t image, channels;                       // height and width of the images that it takes; 0 for models of text
  std::function<std::shared_ptr<Model>()> make;  // its parameters are drawn from the generator; inside dt::DeferredInit it takes no memory
  std::function<std::string()> config{};         // the text of Hugging Face's config.json; empty for models that are not there
  bool is_text() const { return image == 0; }
};

const std::vector<Entry>& models();

// Throws std::invalid_argument, which lists the names, when there is no such model.
const Entry& find(const std::string& name);

}  // namespace zoo
