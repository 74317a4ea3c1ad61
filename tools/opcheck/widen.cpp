// Operands that programs give and that the table of samples leaves out, made from its texts: by class, for every operator alike.
#include "tools/opcheck/text.hpp"

#include <algorithm>
#include <random>
#include <set>

namespace dtensor::opcheck {

namespace {

using Texts = std::vector<std::string>;

// A tensor within a text.
struct Span {
  size_t begin = 0, length = 0;
  TensorText tensor;
};

bool takes_tensors(const c10::Argument& argument) { return argument.type()->str().find("Tensor") != std::string::npos; }

// "*=[5,3] dim=1" -> "self=[5,3] other=[5,3] dim=1"
std::string with_names(const c10::FunctionSchema& schema, const std::string& text) {
  std::string all, result;
  std::set<std::string> named;
  for (const auto& word : split(text, ' ')) {
    named.insert(word.substr(0, word.find('=')));
    if (word[0] == '*') all = word.substr(2);
    else result += word + " ";
  }
  for (const auto& argument : schema.arguments()) {
    const bool given = named.count(argument.name()) > 0 || argument.default_value() || argument.is_out();
    if (given || all.empty() || argument.type()->kind() != c10::TypeKind::TensorType) continue;
    result += argument.name() + "=" + with_meaning(argument.name(), all) + " ";
  }
  return result;
}

void find_in_word(const std::string& word, size_t begin, std::vector<Span>& spans) {
  for (size_t at = word.find('['); at != std::string::npos; at = word.find('[', at + 1)) {
    const auto end = std::min(word.find_first_of(";}", at), word.size());
    spans.push_back({begin + at, end - at, read_tensor(word.substr(at, end - at))});
  }
}

std::vector<Span> tensors_within(const c10::FunctionSchema& schema, const std::string& text) {
  std::vector<Span> spans;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find(' ', begin), text.size());
    const auto word = text.substr(begin, end - begin);
    const auto index = schema.argumentIndexWithName(word.substr(0, word.find('=')));
    if (index && takes_tensors(schema.arguments()[*index])) find_in_word(word, begin, spans);
    begin = end + 1;
  }
  return spans;
}

// The text with other tensors, one for each of the spans.
std::string with(const std::string& text, const std::vector<Span>& spans, const std::vector<TensorText>& tensors) {
  auto result = text;
  for (size_t i = spans.size(); i-- > 0;) result.replace(spans[i].begin, spans[i].length, tensors[i].str());
  return result;
}

std::vector<TensorText> tensors_of(const std::vector<Span>& spans) {
  std::vector<TensorText> tensors;
  for (const auto& span : spans) tensors.push_back(span.tensor);
  return tensors;
}

// The text with one tensor changed, for each of the tensors that the change concerns; and with all of them changed.
template <typename Change>
void each_and_all(const std::string& text, const std::vector<Span>& spans, const Change& change, Texts& into) {
  auto all = tensors_of(spans);
  size_t changed = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    auto one = tensors_of(spans);
    if (!change(one[i])) continue;
    change(all[i]);
    ++changed;
    into.push_back(with(text, spans, one));
  }
  if (changed > 1) into.push_back(with(text, spans, all));
}

// One operand has fewer dims, or dims of length one.
void broadcast(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  const auto counts_another = [](const Span& span) { return span.tensor.kind == '^' || span.tensor.kind == '/'; };
  if (spans.size() < 2 || std::ranges::any_of(spans, counts_another)) return;
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto& sizes = spans[i].tensor.sizes;
    if (sizes.empty() || spans[i].tensor.has('v')) continue;  // pivots are one matrix's, and kernels trust that there are as many
    auto first = sizes, last = sizes;
    first.front() = last.back() = 1;
    std::set<std::vector<int64_t>> shapes{{sizes.begin() + 1, sizes.end()}, first, last, {}, {1}, std::vector<int64_t>(sizes.size(), 1)};
    shapes.erase(sizes);
    const bool square = spans[i].tensor.has('d') || spans[i].tensor.has('l');  // LAPACK does not look
    for (const auto& shape : shapes) {
      if (square && shape.size() > 1 && shape.back() != shape[shape.size() - 2]) continue;
      auto tensors = tensors_of(spans);
      tensors[i].sizes = shape;
      into.push_back(with(text, spans, tensors));
    }
  }
}

// Every whole number `from` of the text becomes `to`.
std::string with_number(const std::string& text, int64_t from, int64_t to) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const bool begins =
        std::isdigit(static_cast<unsigned char>(text[i])) && (i == 0 || std::string("[,<^/=").find(text[i - 1]) != std::string::npos);
    size_t used = 0;
    if (begins && std::stoll(text.substr(i), &used) == from && (i + used == text.size() || text[i + used] != '.')) {
      result += std::to_string(to);
      i += used;
    } else {
      result += text[i++];
    }
  }
  return result;
}

// A length that operands share becomes zero, one, two or seven: in the tensors alone, and in all arguments.
void lengths(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  if (text.find("last_dim_size=") != std::string::npos) return;  // _fft_c2r reads past the end of inputs that are too short for it
  std::set<int64_t> found;
  for (const auto& span : spans) found.insert(span.tensor.sizes.begin(), span.tensor.sizes.end());
  for (const auto from : found) {
    for (const int64_t to : {0, 1, 2, 7}) {
      if (from == to || from < 2) continue;
      auto tensors = tensors_of(spans);
      for (auto& tensor : tensors) {
        std::ranges::replace(tensor.sizes, from, to);
        if (tensor.kind != 0 && tensor.bound == from) tensor.bound = to;
      }
      into.push_back(with(text, spans, tensors));
      into.push_back(with_number(text, from, to));
      if (into.back() == into[into.size() - 2]) into.pop_back();
    }
  }
}

void add_letter(const std::string& text, const std::vector<Span>& spans, char letter, bool numbers_only, Texts& into) {
  const auto change = [&](TensorText& tensor) {
    if ((numbers_only && !tensor.is_number()) || tensor.has(letter)) return false;
    tensor.letters += letter;
    return true;
  };
  each_and_all(text, spans, change, into);
}

// Whether operands are multiplied with the zeros of a padding, and what is.
bool multiplies_padding(const std::string& text, const std::vector<Span>& spans, const Span& span) {
  const auto words = split(text, ' ');
  const auto is_padding = [](const std::string& word) {
    return word.rfind("padding=", 0) == 0 && word.find_first_not_of("[0,]", 8) != std::string::npos;
  };
  const auto name_ends_with = [&](const Span& other, const std::string& name) {
    return other.begin > name.size() && text.compare(other.begin - name.size() - 1, name.size() + 1, name + "=") == 0;
  };
  const bool weighs = std::ranges::any_of(spans, [&](const Span& other) { return name_ends_with(other, "weight"); });
  const bool pads = std::ranges::any_of(words, is_padding);
  return weighs && pads && (name_ends_with(span, "weight") || name_ends_with(span, "grad_output"));
}

// Infinities, and NaN. But not times the zeros of a padding: which of libtorch's kernels run hangs on all sizes, and some skip those.
void limits(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  auto free = spans;
  std::erase_if(free, [&](const Span& span) { return multiplies_padding(text, spans, span); });
  for (const char letter : {'n', 'e'}) add_letter(text, free, letter, true, into);
}

// Transposed, with another dim innermost, and expanded memory.
void memory(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  for (const char letter : {'t', 'k', 'x'}) add_letter(text, spans, letter, false, into);
}

// Operands of several dtypes: integers of 32 bits as indices, bytes as masks, and one number of another dtype.
void dtypes(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  for (const char letter : {'i', 'g', 'y', 'h', 'w', '?'}) add_letter(text, spans, letter, true, into);
  const auto other_integers = [](TensorText& tensor) {
    if (tensor.kind == 0 && !tensor.has('p')) return false;
    tensor.letters += 'j';
    return true;
  };
  each_and_all(text, spans, other_integers, into);
  const auto bytes = [](TensorText& tensor) {
    const bool mask = tensor.has('?');
    std::ranges::replace(tensor.letters, '?', 'y');
    return mask;
  };
  each_and_all(text, spans, bytes, into);
}

// Derivatives and helpers get what libtorch itself made, and many do not look at its sizes: only the length of all first dims changes.
void first_lengths(const std::string& text, const std::vector<Span>& spans, Texts& into) {
  for (const int64_t to : {0, 1, 2, 7}) {
    auto tensors = tensors_of(spans);
    const auto first = tensors.empty() || tensors[0].sizes.empty() ? 0 : tensors[0].sizes[0];
    bool same = first > 0;
    for (auto& tensor : tensors) {
      same = same && !tensor.sizes.empty() && tensor.sizes[0] == first;
      if (same) tensor.sizes[0] = to;
    }
    if (same) into.push_back(with(text, spans, tensors));
  }
}

bool trusts_sizes(const c10::FunctionSchema& schema) {
  const auto within = [&](const char* word) { return schema.name().find(word) != std::string::npos; };
  return within("backward") || within("_jvp") || within("_helper") || within("_weight_norm");
}

constexpr void (*kClasses[])(const std::string&, const std::vector<Span>&, Texts&) = {broadcast, lengths, limits, memory, dtypes};
constexpr void (*kClassesWithSizes[])(const std::string&, const std::vector<Span>&, Texts&) = {first_lengths, limits, memory};

}  // namespace

std::vector<std::vector<std::string>> widened(const c10::FunctionSchema& schema, const std::vector<std::string>& texts) {
  const bool trusting = trusts_sizes(schema);
  std::vector<Texts> classes(trusting ? std::size(kClassesWithSizes) : std::size(kClasses));
  for (const auto& given : texts) {
    const auto text = with_names(schema, given);
    const auto spans = tensors_within(schema, text);
    for (size_t c = 0; c < classes.size(); ++c) (trusting ? kClassesWithSizes[c] : kClasses[c])(text, spans, classes[c]);
  }
  std::mt19937_64 random(std::hash<std::string>()(schema.name() + schema.overload_name()));
  for (auto& some : classes) std::shuffle(some.begin(), some.end(), random);
  return classes;
}

}  // namespace dtensor::opcheck
