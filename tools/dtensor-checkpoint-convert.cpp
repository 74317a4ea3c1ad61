// dtensor-checkpoint convert.
#include "dtensor-checkpoint.hpp"

#include <dtensor/base/error.hpp>
#include <dtensor/checkpoint/foreign.hpp>
#include <dtensor/checkpoint/read.hpp>

#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

namespace dtensor_checkpoint {

namespace {

using dt::checkpoints::Source;

constexpr const char* kModel = "model.";
constexpr const char* kForeign = "format";         // in Index::writer, see is_foreign()
constexpr const char* kOrigin = "converted_from";  // of a step that was made of one

// What is written, and what of the checkpoint is not.
struct Selection {
  Source source;
  int64_t bytes = 0;
  std::vector<std::string> other_tensors, other_values;  // whose names begin otherwise
  std::vector<std::string> values_without_place;
};

// A tensor whose own name begins otherwise is kept where a further name of it does not.
class Selecting {
 public:
  Selecting(const Index& index, std::string part, bool has_values) : index_(index), part_(std::move(part)) {
    for (const auto& [name, tensor] : index_.tensors) {
      if (is_in_part(name)) add(name);
      else result_.other_tensors.push_back(name);
    }
    for (const auto& [name, other] : index_.same_as) {
      if (is_in_part(name)) add(name, other);
      else result_.other_tensors.push_back(name);
    }
    for (const auto& [name, value] : index_.values) {
      if (!has_values) result_.values_without_place.push_back(name);
      else if (is_in_part(name)) result_.source.values.emplace(inner(name), value);
      else result_.other_values.push_back(name);
    }
  }

  Selection take() { return std::move(result_); }

 private:
  bool is_in_part(const std::string& name) const { return name.size() > part_.size() && name.starts_with(part_); }
  std::string inner(const std::string& name) const { return name.substr(part_.size()); }

  void add(const std::string& name) {
    const auto& tensor = *index_.find(name);
    result_.source.tensors.push_back({inner(name), tensor.dtype, tensor.sizes});
    result_.bytes += tensor.bytes();
  }

  void add(const std::string& name, const std::string& other) {
    const auto [known, is_first] = is_in_part(other) ? std::pair(other, false) : first_name_of(name, other);
    if (is_first) add(name);
    else result_.source.same_as.emplace(inner(name), inner(known));
  }

  std::pair<std::string, bool> first_name_of(const std::string& name, const std::string& other) {
    const auto [entry, is_new] = first_names_.emplace(other, name);
    return {entry->second, is_new};
  }

  const Index& index_;
  const std::string part_;
  std::map<std::string, std::string> first_names_;  // of tensors whose own names begin otherwise
  Selection result_;
};

// Hugging Face's programs want a model's names. A step of dt::save has them below "model.", where it has more than a model.
std::string part_by_itself(const Index& index, const std::string& form) {
  if (form != "hf" || is_foreign(index) || index.writer.contains(kOrigin)) return "";
  const auto of_model = std::ranges::count_if(index.tensors, [](const auto& entry) { return entry.first.starts_with(kModel); });
  return of_model > 0 && of_model < std::ssize(index.tensors) ? kModel : "";
}

// "model. (148), optimizer. (296)"
std::string beginnings_of(const Index& index, bool has_values) {
  std::map<std::string, int64_t> counts;
  const auto add = [&](const std::string& name) { ++counts[name.substr(0, name.find('.')) + (name.find('.') == name.npos ? "" : ".")]; };
  for (const auto& [name, tensor] : index.tensors) add(name);
  for (const auto& [name, other] : index.same_as) add(name);
  for (const auto& [name, value] : index.values) {
    if (has_values) add(name);
  }
  std::vector<std::string> texts;
  for (const auto& [beginning, count] : counts) texts.push_back(fmt::format("'{}' ({})", beginning, count));
  constexpr size_t kMost = 20;
  return some_of(texts, kMost);
}

void check_is_something(const Conversion& wanted, const Index& index, const std::string& part, const Selection& selection) {
  if (!selection.source.tensors.empty() || !selection.source.values.empty()) return;
  const bool has_values = wanted.form != "hf";
  const auto beginnings = beginnings_of(index, has_values);
  const auto* what = has_values ? "name" : "tensor";
  if (beginnings.empty()) dt::fail(kTag, "'{}' has no {}, so there is nothing to write; hint: show lists what it has", wanted.from, what);
  dt::fail(kTag, "'{}' has no {} that begins with '{}'; its names begin with {}; hint: --part takes what they begin with", wanted.from,
           what, part, beginnings);
}

std::map<std::string, std::string> writer_of(const Index& index) {
  std::map<std::string, std::string> writer;
  const auto copy = [&](const char* from, const char* to) {
    if (const auto found = index.writer.find(from); found != index.writer.end()) writer[to] = found->second;
  };
  copy("run", "run");
  copy(kOrigin, kOrigin);
  copy(kForeign, kOrigin);
  return writer;
}

void write(const Conversion& wanted, const Index& index, const Source& source) {
  namespace ck = dt::checkpoints;
  if (wanted.form == "hf") {
    ck::HuggingFaceOptions options;
    options.file_bytes = wanted.file_bytes.value_or(options.file_bytes);
    ck::write_huggingface(wanted.to, source, options);
  } else if (wanted.form == "dtensor") {
    ck::StepOptions options{.step = index.step, .writer = writer_of(index)};
    options.file_bytes = wanted.file_bytes.value_or(options.file_bytes);
    ck::write_step(wanted.to, source, options);
  } else if (wanted.form == "dcp") {
    ck::write_dcp(wanted.to, source);
  } else {
    ck::write_torch_file(wanted.to, source);
  }
}

void say_what_was_done(const Conversion& wanted, const Index& index, const std::string& part, const Selection& selection) {
  const auto& source = selection.source;
  fmt::print("{}: {} tensors", wanted.to, source.tensors.size());
  if (!source.same_as.empty()) fmt::print(", {} further names of them", source.same_as.size());
  if (!source.values.empty()) fmt::print(", {} values", source.values.size());
  fmt::print(", {}{}\n", in_units(selection.bytes), is_foreign(index) ? "" : fmt::format(", of step {}", index.step));
  const auto say_left_out = [](const std::vector<std::string>& names, const std::string& what) {
    if (!names.empty()) fmt::print("left out: {} {}: {}\n", names.size(), what, some_of(names));
  };
  say_left_out(selection.other_tensors, fmt::format("names of tensors that do not begin with '{}'", part));
  say_left_out(selection.other_values, fmt::format("values whose names do not begin with '{}'", part));
  say_left_out(selection.values_without_place, "values, for which Hugging Face's format has no place");
  const auto skipped = index.writer.find("skipped");
  if (skipped != index.writer.end()) fmt::print("left out, since it has no place in an index: {}\n", skipped->second);
}

}  // namespace

void merge(const std::string& from, const std::string& to, int64_t file_bytes) {
  const auto index = open_index(from);
  const std::map<std::string, std::string> forms{
      {"huggingface", "hf"}, {"torch.save", "pt"}, {"torch.distributed.checkpoint", "dcp"}, {"bytecheckpoint", "dcp"}};
  convert({from, to, is_foreign(index) ? forms.at(index.writer.at(kForeign)) : "dtensor", "", file_bytes});
}

void convert(const Conversion& wanted) {
  std::error_code ignored;
  dt::require(wanted.form != "pt" || !std::filesystem::exists(wanted.to, ignored), kTag,
              "'{}' exists; hint: convert replaces nothing: give another name, or remove it first", wanted.to);
  const auto index = open_index(wanted.from);
  const auto part = wanted.part.value_or(part_by_itself(index, wanted.form));
  auto selection = Selecting(index, part, wanted.form != "hf").take();
  check_is_something(wanted, index, part, selection);
  {
    Progress progress(selection.bytes);
    int64_t done = 0;
    selection.source.get = [&](const std::string& name) {
      auto tensor = dt::checkpoints::read_tensor(index, part + name);
      progress(done += static_cast<int64_t>(tensor.nbytes()));
      return tensor;
    };
    write(wanted, index, selection.source);
  }
  say_what_was_done(wanted, index, part, selection);
}

}  // namespace dtensor_checkpoint
