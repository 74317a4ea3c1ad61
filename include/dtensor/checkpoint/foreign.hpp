// Checkpoint files of other libraries, in and out: Hugging Face's safetensors, torch.save's files, PyTorch's distributed checkpoints (DCP).
//
//   auto index = dt::checkpoints::read_any("Llama-3.2-1B");          // looks at headers only
//   dt::load(state, index);                                          // each rank reads the bytes of its shards
//   dt::checkpoints::write_huggingface("out", dt::checkpoints::source_of(index));
//
// A reader makes an index out of the metadata; the data stay in the files. Nothing in a file is ever executed: pickles are read by an
// interpreter that knows the few names which those formats need, and refuses all others by name. The functions here need no ranks and
// communicate nothing. All throw dtensor::Error, which names the file, and the tensor where there is one.
#pragma once

#include <dtensor/checkpoint/index.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#pragma GCC visibility push(default)

namespace dtensor::checkpoints {

// A folder with model.safetensors, or model.safetensors.index.json and the files that it names, or one .safetensors file. Names that the
// file's metadata say are other names of a tensor ("lm_head.weight" -> "model.embed_tokens.weight") are in Index::same_as. What the index
// names and no file has is an error; what files have beyond it is left out, and listed in Index::writer["skipped"].
Index read_huggingface(const std::string& path);

// A file of torch.save (PyTorch 1.6 or later): a dict of tensors, numbers and texts, also nested. "a": {"b": [tensor]} is "a.b.0". A list
// of numbers or of texts is one value, and an empty list one of no integers. Two names of one tensor are in Index::same_as. What is neither
// (None, bytes, dtypes) is left out and listed in Index::writer["skipped"]. A tensor that is not row-major in the file is read in runs of
// rows; where that would be more than 65536 runs it is refused, as are all names that a pickle may not use ("builtins.eval"), sparse and
// quantised tensors.
Index read_torch_file(const std::string& path);

// A folder of torch.distributed.checkpoint (`.metadata` and *.distcp), or of ByteCheckpoint: one of its model/ and optimizer/ folders, or
// the folder above, whose names then begin with "model." and "optimizer.". Names that share their bytes, as write_dcp() writes tied
// tensors, are in Index::same_as. Objects that are not tensors are values where they are numbers or texts; others are left out and listed
// in Index::writer["skipped"].
Index read_dcp(const std::string& folder);

// Any of these, or the folder of a step of dt::save, whichever is at `path`. The error says what it looked for.
Index read_any(const std::string& path);

// What is written: names, and a function that gives one whole tensor, in host memory. It is asked for one tensor at a time.
struct Source {
  struct Described {
    std::string name;
    c10::ScalarType dtype = c10::kFloat;
    std::vector<int64_t> sizes;
  };
  std::vector<Described> tensors;
  std::function<at::Tensor(const std::string& name)> get;
  std::map<std::string, std::string> same_as;  // further names of tensors: {"lm_head.weight", "embedding.weight"}
  std::map<std::string, Value> values;         // Hugging Face's format has none
};

// The tensors that an index names, read as they are asked for. The source keeps a copy of the index.
Source source_of(const Index& index);

// These tensors, which it keeps.
Source source_of(const std::map<std::string, at::Tensor>& tensors);

struct HuggingFaceOptions {
  int64_t file_bytes = int64_t{5'000'000'000};  // of the tensors of a file; a larger tensor has a file to itself
  std::string config{};                         // the text of config.json; empty: none is written
};

// Writes model.safetensors, or model-00001-of-0000N.safetensors and model.safetensors.index.json. Further names are kept in the metadata of
// the file with the tensor, as safetensors' save_model does. The folder must be new or empty; it appears when it is complete. Throws for
// complex numbers of two doubles, which the format lacks, and where the source gives a tensor of another dtype or other sizes than it said.
void write_huggingface(const std::string& folder, const Source& source, const HuggingFaceOptions& options = {});

// Writes a file that torch.load(weights_only=True) reads as an OrderedDict of tensors and values. Further names share the tensor's memory.
// Replaces a file that was there when the new one is complete.
void write_torch_file(const std::string& path, const Source& source);

// Writes a folder that torch.distributed.checkpoint.load reads, as one process would have saved it. The folder must be new or empty; it
// appears when it is complete.
void write_dcp(const std::string& folder, const Source& source);

struct StepOptions {
  int64_t step = 0;                             // of a folder whose name does not say it, as "step-100" does
  int64_t file_bytes = int64_t{4} << 30;        // of the tensors of a file; a larger tensor has a file to itself
  std::map<std::string, std::string> writer{};  // further entries of Index::writer, such as {"run", "a"}
};

// Writes the folder of a step, with checksums, as dt::save would have written it on one rank: dt::load(state, "run", 100) reads
// "run/step-100", and dt::load(state, read_index(folder)) any folder. The folder must be new or empty; it appears, synced, when it is
// complete. Throws where the source gives a tensor of another dtype or other sizes than it said, and for dtypes that dt::save refuses.
void write_step(const std::string& folder, const Source& source, const StepOptions& options = {});

}  // namespace dtensor::checkpoints

#pragma GCC visibility pop
