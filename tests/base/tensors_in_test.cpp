// The range over the tensors of a call's arguments, and arguments with other tensors in place of theirs.
#include "tests/catch.hpp"

#include <dtensor/base/tensors_in.hpp>

#include <torch/types.h>

#include <tuple>
#include <vector>

using namespace dtensor;

namespace {

using Where = std::tuple<int, int>;

struct Arguments {
  at::Tensor a = torch::full({1}, 1), b = torch::full({1}, 2), c = torch::full({1}, 3);
  std::vector<c10::IValue> values;
  Arguments() {
    c10::List<c10::optional<at::Tensor>> optional;
    optional.push_back(c10::nullopt);
    optional.push_back(c);
    values = {
        c10::IValue(), 7,           a, std::vector<int64_t>{1, 2}, std::vector<at::Tensor>{}, std::vector<at::Tensor>{b, at::Tensor()},
        optional,      at::Tensor()};
  }
};

}  // namespace

TEST_CASE("tensors among arguments are found with their places", "[base]") {
  const Arguments arguments;
  std::vector<Where> places;
  std::vector<bool> defined;
  for (const auto& [tensor, argument, element] : tensors_in(arguments.values)) {
    places.emplace_back(argument, element);
    defined.push_back(tensor.defined());
    CHECK(tensor.is_same(tensor_at(arguments.values[argument], element)));
  }
  CHECK((places == std::vector<Where>{{2, -1}, {5, 0}, {5, 1}, {6, 1}, {7, -1}}));
  CHECK((defined == std::vector<bool>{true, true, false, true, false}));

  const c10::IValue one = arguments.a, none, empty = std::vector<at::Tensor>{};
  int count = 0;
  for (const auto& in : tensors_in(one)) count += in.tensor.is_same(arguments.a);
  for ([[maybe_unused]] const auto& in : tensors_in(none)) ++count;
  for ([[maybe_unused]] const auto& in : tensors_in(empty)) ++count;
  for ([[maybe_unused]] const auto& in : tensors_in(c10::ArrayRef<c10::IValue>())) ++count;
  CHECK(count == 1);
}

TEST_CASE("any tensor asks the defined ones only", "[base]") {
  const Arguments arguments;
  int asked = 0;
  CHECK_FALSE(any_tensor(arguments.values, [&](const at::Tensor& tensor) { return ++asked, !tensor.defined(); }));
  CHECK(asked == 3);
  CHECK(any_tensor(arguments.values, [&](const at::Tensor& tensor) { return tensor.is_same(arguments.c); }));
}

TEST_CASE("with other tensors a value keeps its kind", "[base]") {
  const Arguments arguments;
  const auto& values = arguments.values;
  const auto twice = [](const at::Tensor& tensor) { return tensor.defined() ? tensor * 2 : tensor; };
  CHECK(with_tensors(values[0], twice).isNone());
  CHECK(with_tensors(values[1], twice).toInt() == 7);
  CHECK(with_tensors(values[2], twice).toTensor().item<int>() == 2);
  CHECK(with_tensors(values[3], twice).toIntVector() == std::vector<int64_t>{1, 2});
  CHECK(with_tensors(values[4], twice).isTensorList());
  const auto list = with_tensors(values[5], twice).toTensorVector();
  CHECK(list.size() == 2);
  CHECK(list[0].item<int>() == 4);
  CHECK_FALSE(list[1].defined());
  const auto optional = with_tensors(values[6], twice);
  CHECK(optional.toListRef()[0].isNone());
  CHECK(optional.toListRef()[1].toTensor().item<int>() == 6);
  // A change may look at the element, and what it leaves undefined becomes none in a list of optional tensors.
  const auto second = [](const at::Tensor& tensor, int element) { return element == 1 ? at::Tensor() : tensor; };
  CHECK(with_tensors(values[6], second).toListRef()[1].isNone());
  CHECK(with_tensors(values[2], second).toTensor().is_same(arguments.a));
}
