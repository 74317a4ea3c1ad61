// The stack machine of pickles. Its memory is linear in the pickle's bytes: each instruction makes at most one value, texts stay where they
// are, and what a memo repeats is one value.
#include "src/checkpoint/foreign/pickle.hpp"

#include "src/checkpoint/foreign/pickle_names.hpp"
#include "src/checkpoint/foreign/pickle_stack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace dtensor::checkpoints::pickle {

namespace {

constexpr size_t kMostPrinted = 120;

// A name from a file, for an error.
std::string printed(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, kMostPrinted)) result += c >= ' ' && c <= '~' ? c : '?';
  return text.size() > kMostPrinted ? result + "..." : result;
}

}  // namespace

const Value* Value::find(std::string_view key) const {
  if (kind == Kind::object) return items.empty() || items[0]->kind != Kind::dict ? nullptr : items[0]->find(key);
  if (kind != Kind::dict) return nullptr;
  for (size_t i = items.size() / 2; i-- > 0;) {  // the last of two that are alike
    if (items[2 * i]->kind == Kind::text && items[2 * i]->text == key) return items[2 * i + 1];
  }
  return nullptr;
}

std::string Value::name() const { return fmt::format("{}.{}", kNames[code].module, kNames[code].name); }

class Machine : Stack {
 public:
  explicit Machine(Document& document) : Stack(document.bytes_, document.values_), document_(document) {}

  void run() {
    for (;;) {
      const auto at = next_;
      const auto op = static_cast<unsigned char>(take(1)[0]);
      if (op == '.') break;
      if (!number(op) && !text(op) && !container(op) && !memo(op) && !call(op)) {
        refuse(fmt::format("byte {} of the pickle is the instruction 0x{:02x}, which no file of this kind has", at, op));
      }
    }
    document_.root_ = pop();
  }

 private:
  // -- Instructions, by families; false: it is none of the family
  bool push_integer(int64_t number) {
    auto& value = make(Kind::integer);
    value.integer = number;
    return push(value);
  }

  bool push_boolean(bool is) {
    auto& value = make(Kind::boolean);
    value.boolean = is;
    return push(value);
  }

  bool push_long(uint64_t size) {
    const auto digits = take(size);
    if (size > 8) {
      auto& value = make(Kind::other);
      value.text = "an integer of more than 64 bits";
      return push(value);
    }
    int64_t number = size > 0 && (digits.back() & 0x80) ? -1 : 0;
    std::memcpy(&number, digits.data(), size);
    return push_integer(number);
  }

  bool push_real() {
    auto digits = raw<uint64_t>();
    digits = __builtin_bswap64(digits);
    auto& value = make(Kind::real);
    std::memcpy(&value.real, &digits, sizeof value.real);
    return push(value);
  }

  bool number(int op) {
    switch (op) {
      case 'N': return push(Kind::none);
      case 0x88: return push_boolean(true);
      case 0x89: return push_boolean(false);
      case 'J': return push_integer(raw<int32_t>());
      case 'K': return push_integer(raw<uint8_t>());
      case 'M': return push_integer(raw<uint16_t>());
      case 0x8a: return push_long(raw<uint8_t>());
      case 0x8b: return push_long(raw<uint32_t>());
      case 'G': return push_real();
      default: return false;
    }
  }

  bool push_text(Kind kind, uint64_t size) {
    const auto text = take(size);
    auto& value = make(kind);
    value.text = text;
    return push(value);
  }

  bool text(int op) {
    switch (op) {
      case 'X': return push_text(Kind::text, raw<uint32_t>());
      case 0x8c: return push_text(Kind::text, raw<uint8_t>());
      case 0x8d: return push_text(Kind::text, raw<uint64_t>());
      case 'U': return push_text(Kind::text, raw<uint8_t>());  // of Python 2
      case 'T': return push_text(Kind::text, raw<uint32_t>());
      case 'C': return push_text(Kind::bytes, raw<uint8_t>());
      case 'B': return push_text(Kind::bytes, raw<uint32_t>());
      case 0x8e: return push_text(Kind::bytes, raw<uint64_t>());
      case 0x96: return push_text(Kind::bytes, raw<uint64_t>());
      default: return false;
    }
  }

  bool push_list(const std::vector<Value*>& items, bool is_tuple) {
    auto& value = make(Kind::list);
    value.is_tuple = is_tuple;
    value.items.assign(items.begin(), items.end());
    return push(value);
  }

  bool push_tuple(size_t size) {
    std::vector<Value*> items(size);
    for (size_t i = size; i-- > 0;) items[i] = pop();
    return push_list(items, true);
  }

  bool append(const std::vector<Value*>& items) {
    auto& list = top();
    if (list.kind != Kind::list || list.is_tuple) refuse("the pickle appends to what is no list");
    list.items.insert(list.items.end(), items.begin(), items.end());
    return true;
  }

  bool set_items(const std::vector<Value*>& items) {
    auto& dict = top();
    if (dict.kind != Kind::dict || items.size() % 2 != 0) refuse("the pickle sets items of what is no dict");
    dict.items.insert(dict.items.end(), items.begin(), items.end());
    return true;
  }

  bool append_one() {
    auto* item = pop();
    return append({item});
  }

  bool set_one() {
    auto* item = pop();
    auto* key = pop();
    return set_items({key, item});
  }

  bool container(int op) {
    switch (op) {
      case '(': return mark();
      case '0': return pop(), true;
      case '1': return pop_to_mark(), true;
      case '2': return push(top());
      case ')': return push_list({}, true);
      case 0x85: return push_tuple(1);
      case 0x86: return push_tuple(2);
      case 0x87: return push_tuple(3);
      case 't': return push_list(pop_to_mark(), true);
      case ']': return push_list({}, false);
      case 0x8f: return push_list({}, false);
      case 0x91: return push_list(pop_to_mark(), true);
      case '}': return push(Kind::dict);
      case 'a': return append_one();
      case 'e': return append(pop_to_mark());
      case 0x90: return append(pop_to_mark());
      case 's': return set_one();
      case 'u': return set_items(pop_to_mark());
      default: return false;
    }
  }

  bool remember(size_t at) {
    if (at > bytes_.size()) refuse("the pickle remembers a value under a number that it has no use for");
    if (at >= memo_.size()) memo_.resize(at + 1, nullptr);
    memo_[at] = &top();
    memoized_ = std::max(memoized_, at + 1);
    return true;
  }

  bool recall(size_t at) {
    if (at >= memo_.size() || !memo_[at]) refuse("the pickle recalls what it has not remembered");
    return push(*memo_[at]);
  }

  bool memo(int op) {
    switch (op) {
      case 0x80:
        if (const int version = raw<uint8_t>(); version < 2 || version > 5)
          refuse(fmt::format("the pickle is of protocol {}; expected 2 to 5", version));
        return true;
      case 0x95: return raw<uint64_t>(), true;
      case 'q': return remember(raw<uint8_t>());
      case 'r': return remember(raw<uint32_t>());
      case 0x94: return remember(memoized_);
      case 'h': return recall(raw<uint8_t>());
      case 'j': return recall(raw<uint32_t>());
      default: return false;
    }
  }

  // -- Names and calls
  bool push_global(std::string_view module, std::string_view name) {
    const auto known = std::ranges::find_if(kNames, [&](const Name& each) { return each.module == module && each.name == name; });
    if (known == kNames.end()) {
      refuse(fmt::format("its pickle uses {}.{}, which a file of tensors has no need of and which could do anything", printed(module),
                         printed(name)));
    }
    auto& value = make(known->meaning == Meaning::dtype ? Kind::dtype : Kind::global);
    value.code = static_cast<uint16_t>(known - kNames.begin());
    value.text = known->name;
    return push(value);
  }

  bool push_global() {
    const auto module = line();
    return push_global(module, line());
  }

  bool push_stack_global() {
    const auto *name = pop(), *module = pop();
    if (module->kind != Kind::text || name->kind != Kind::text) refuse("the pickle names something with what is no text");
    return push_global(module->text, name->text);
  }

  bool push_storage() {
    auto* id = pop();
    if (id->kind != Kind::list || id->items.size() != 5 || id->items[0]->kind != Kind::text || id->items[0]->text != "storage")
      refuse("the pickle refers to what is no storage of a tensor");
    auto& value = make(Kind::storage);
    value.items.assign(id->items.begin() + 1, id->items.end());
    return push(value);
  }

  bool push_tensor(const std::vector<Value*>& given, bool is_typed) {
    if (given.size() < (is_typed ? 7 : 4)) refuse("the pickle makes a tensor of too few things");
    auto& value = make(Kind::tensor);
    value.items.assign(given.begin(), given.begin() + 4);
    if (is_typed) value.items.push_back(given[6]);
    return push(value);
  }

  bool push_other(const Value& function) {
    auto& value = make(Kind::other);
    value.text = kNames[function.code].name;
    return push(value);
  }

  // The argument itself: were it copied, a short pickle could make many copies of a long list.
  bool push_first(const std::vector<Value*>& given, Kind kind) {
    if (given.empty() || given[0]->kind != kind) refuse("the pickle calls something with what it cannot take");
    return push(*given[0]);
  }

  bool push_bytes(const std::vector<Value*>& given) {
    if (given.empty() || given[0]->kind != Kind::text) refuse("the pickle makes bytes of what is no text");
    auto& value = make(Kind::bytes);
    value.text = given[0]->text;
    return push(value);
  }

  bool push_result(const Value& function, const Value& arguments) {
    if (function.kind != Kind::global || arguments.kind != Kind::list) refuse("the pickle calls what is no function");
    const auto& given = arguments.items;
    switch (kNames[function.code].meaning) {
      case Meaning::dict:
        if (!given.empty()) refuse("the pickle makes a dict of what is given at once; expected one that is filled later");
        return push(Kind::dict);
      case Meaning::tensor: return push_tensor(given, false);
      case Meaning::typed_tensor: return push_tensor(given, true);
      case Meaning::parameter: return push_first(given, Kind::tensor);
      case Meaning::subclass: return rebuild(given);
      case Meaning::tuple: return given.empty() ? push_list({}, true) : push_first(given, Kind::list);
      case Meaning::bytes_of_text: return push_bytes(given);
      case Meaning::object: return push_object(function, arguments);
      case Meaning::of_no_account: return push_other(function);
      default: refuse(fmt::format("its pickle calls {}, which is no function", function.name()));
    }
  }

  bool rebuild(const std::vector<Value*>& given) {
    const auto is = [&](size_t i, Kind kind) { return given.size() > i && given[i]->kind == kind; };
    if (!is(0, Kind::global) || !is(1, Kind::global) || !is(2, Kind::list)) refuse("the pickle makes a tensor of too few things");
    if (kNames[given[1]->code].meaning != Meaning::tensor_class) refuse(fmt::format("its pickle makes a tensor of {}", given[1]->name()));
    if (kNames[given[0]->code].meaning == Meaning::subclass) refuse("the pickle makes tensors of each other");
    return push_result(*given[0], *given[2]);
  }

  bool push_object(const Value& type, const Value& arguments) {
    const auto meaning = type.kind == Kind::global ? kNames[type.code].meaning : Meaning::of_no_account;
    if (meaning == Meaning::dict || meaning == Meaning::tuple) return push_result(type, arguments);
    if (meaning != Meaning::object || arguments.kind != Kind::list || !arguments.items.empty())
      refuse("the pickle makes an object of no known class");
    auto& value = make(Kind::object);
    value.code = type.code;
    return push(value);
  }

  // The state of an object. Ordered dicts and parameters may have one, which says nothing of their values.
  bool build() {
    auto* state = pop();
    auto& object = top();
    if (object.kind == Kind::object) {
      if (!object.items.empty()) refuse("the pickle gives an object its fields twice");
      object.items = {state};
      return true;
    }
    if (object.kind != Kind::dict && object.kind != Kind::tensor) refuse("the pickle gives fields to what has none");
    return true;
  }

  bool instance() {
    push_global();
    refuse(fmt::format("its pickle makes an instance of {} in a way that no file of this kind has", pop()->name()));
  }

  bool reduce() {
    const auto *arguments = pop(), *function = pop();
    return push_result(*function, *arguments);
  }

  bool new_object() {
    const auto *arguments = pop(), *type = pop();
    return push_object(*type, *arguments);
  }

  [[noreturn]] static void extension(uint32_t number) {
    refuse(fmt::format("its pickle uses number {} of Python's extension registry, which could be anything", number));
  }

  bool call(int op) {
    switch (op) {
      case 'c': return push_global();
      case 0x93: return push_stack_global();
      case 'i': return instance();
      case 'Q': return push_storage();
      case 'R': return reduce();
      case 'b': return build();
      case 0x81: return new_object();
      case 0x82: extension(raw<uint8_t>());
      case 0x83: extension(raw<uint16_t>());
      case 0x84: extension(raw<uint32_t>());
      default: return false;
    }
  }

  Document& document_;
  size_t memoized_ = 0;
  std::vector<Value*> memo_;
};

Document::Document(std::string bytes) : bytes_(std::move(bytes)) { Machine(*this).run(); }

}  // namespace dtensor::checkpoints::pickle
