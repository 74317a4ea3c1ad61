// Ranks in groups that decode apart, each its share of the prompts, see EngineOptions::split_over.
#pragma once

#include <dtensor/collectives.hpp>
#include <dtensor/generate/request.hpp>
#include <dtensor/mesh/layout.hpp>
#include <dtensor/tensor/spmd.hpp>
#include <dtensor/tensor/tensor.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/hash.h>
#include <torch/nn/module.h>

#include <cstring>
#include <exception>
#include <optional>
#include <type_traits>

#pragma GCC visibility push(default)

namespace dtensor::generate::detail {

// The ranks that differ from this one along the mesh dimension called `name`, if groups along it can decode apart: all of the module's
// parameters and buffers that lie on the mesh are whole along it, so that no pass communicates over it. Nothing otherwise.
inline std::optional<DeviceMesh> others_over(const torch::nn::Module* module, const std::optional<DeviceMesh>& mesh,
                                             const std::string& name) {
  if (!module || !mesh || std::ranges::find(mesh->names(), name) == mesh->names().end()) return {};
  const auto dim = mesh->dim(name);
  const auto is_whole = [&](const at::Tensor& tensor) {
    const auto* layout = find_layout(tensor);
    return !layout || (layout->mesh() == *mesh && layout->placements()[dim] == replicate());
  };
  if (mesh->size(dim) == 1) return {};
  if (!std::ranges::all_of(module->parameters(), is_whole) || !std::ranges::all_of(module->buffers(), is_whole)) return {};
  return (*mesh)[name];
}

// While it lives, ranks do not compare plain tensors: groups have other ones.
class Apart {
 public:
  Apart() { set_replication_check(false); }
  ~Apart() { set_replication_check(before_); }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

 private:
  const bool before_ = replication_check();
};

// What became of a prompt.
struct Answer {
  Completion completion;
  int64_t failed = 0;  // 0, or 1 + the group; then `error` says why, and the prompts after it have no answers
  std::string error;
};

// Bytes of answers, written or read by the same list of fields.
class Packed {
 public:
  Packed() = default;
  explicit Packed(const at::Tensor& bytes) : bytes_(bytes.data_ptr<uint8_t>(), bytes.data_ptr<uint8_t>() + bytes.numel()), reads_(true) {}

  template <class T>
  requires std::is_trivially_copyable_v<T>
  void add(T& value) { move(&value, sizeof(T)); }
  void add(std::string& text) {
    size(text);
    move(text.data(), text.size());
  }
  template <class T>
  void add(std::vector<T>& list) {
    size(list);
    if constexpr (std::is_trivially_copyable_v<T>) {
      move(list.data(), list.size() * sizeof(T));
    } else {
      for (auto& item : list) add(item);
    }
  }
  void add(Output& output) {
    add(output.tokens);
    add(output.text);
    add(output.finish);
    add(output.logprobs);
    add(output.top);
    add(output.versions);
  }
  void add(Answer& answer) {
    add(answer.completion.outputs);
    add(answer.completion.prompt_logprobs);
    add(answer.completion.cached);
    add(answer.failed);
    add(answer.error);
  }

  at::Tensor tensor() const {
    auto all = at::empty({static_cast<int64_t>(bytes_.size())}, at::kByte);
    std::ranges::copy(bytes_, all.data_ptr<uint8_t>());
    return all;
  }

 private:
  template <class List>
  void size(List& list) {
    auto count = static_cast<int64_t>(list.size());
    add(count);
    list.resize(count);
  }
  void move(void* data, size_t size) {
    auto* const at = static_cast<uint8_t*>(data);
    if (!reads_) {
      bytes_.insert(bytes_.end(), at, at + size);
    } else if (size > 0) {
      std::memcpy(data, bytes_.data() + next_, size);
      next_ += size;
    }
  }

  std::vector<uint8_t> bytes_;
  size_t next_ = 0;
  bool reads_ = false;
};

inline int64_t hash_of(const std::vector<Request>& requests) {
  size_t hash = requests.size();
  for (const auto& [prompt, settings, priority, on_piece] : requests)
    hash = c10::get_hash(hash, prompt, settings.seed, settings.n, settings.max_tokens, settings.temperature);
  return static_cast<int64_t>(hash);
}

// The answers of all groups, in the order of ranks. Every rank gives those of its share. Two all_gathers among `others`: of the numbers of
// bytes, 16 bytes, and of the bytes: for each token its number, log-probability and version, 24 bytes, its text, and top log-probabilities,
// 16 bytes each. Throws where the hash of what was asked for is another one.
inline std::vector<Answer> exchange_answers(std::vector<Answer> own, int64_t hash, const DeviceMesh& others) {
  const NoSpmd plain;
  Packed packed;
  packed.add(own);
  const auto bytes = packed.tensor();
  const auto told = all_gather(at::tensor({bytes.numel(), hash}, at::kLong), others);
  AlongDim along;
  for (int64_t i = 0; i < told.numel(); i += 2) {
    along.lengths.push_back(told.data_ptr<int64_t>()[i]);
    require(told.data_ptr<int64_t>()[i + 1] == told.data_ptr<int64_t>()[1], "generate",
            "rank {} of {} asked for other prompts or settings; expected all prompts on every rank", i / 2, others.str());
  }
  const auto all = all_gather(bytes, others, along);
  std::vector<Answer> answers;
  int64_t begin = 0;
  for (const auto length : along.lengths) {
    Packed share(all.narrow(0, begin, length));
    std::vector<Answer> of_rank;
    share.add(of_rank);
    std::ranges::move(of_rank, std::back_inserter(answers));
    begin += length;
  }
  return answers;
}

// That of the first prompt that failed; nothing where none did.
inline const Answer* first_failure(const std::vector<Answer>& answers) {
  const auto first = std::ranges::find_if(answers, [](const Answer& answer) { return answer.failed != 0; });
  return first == answers.end() ? nullptr : &*first;
}

}  // namespace dtensor::generate::detail

#pragma GCC visibility pop
