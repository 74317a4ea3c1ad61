// What rows look like while they travel: as they are, or in fewer bits.
#pragma once

#include <dtensor/base/error.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <array>
#include <string_view>

#pragma GCC visibility push(default)

namespace dtensor::expert {

// Formats, by name:
//   exact     the bits that there are
//   bfloat16  rounded to 8 significant bits: a number is off by 2^-8 of itself at most; beyond float32's range (3.4e38) it is infinity
//   blocks8   a signed byte a number, and a float32 scale for each kBlock numbers of a row: off by 1/254 of the largest of its block. A
//             block with NaN or infinity arrives as NaN
struct Wire {
  std::string_view name;
  at::Tensor (*pack)(const at::Tensor& rows);                              // [rows, dim] -> [rows, any]
  at::Tensor (*unpack)(const at::Tensor& packed, const at::Tensor& like);  // back, in the dtype of `like` [any, dim]
  int64_t (*bytes)(int64_t dim, int64_t element_size);                     // of a row
};

inline constexpr int64_t kBlock = 128;

// Throws for a name that there is not.
const Wire& wire(std::string_view name);

// -- How ------------------------------------------------------------------------------------------------------------------

namespace formats {

inline int64_t blocks_of(int64_t dim) { return (dim + kBlock - 1) / kBlock; }

inline at::Tensor as_it_is(const at::Tensor& rows) { return rows; }
inline at::Tensor as_it_came(const at::Tensor& packed, const at::Tensor&) { return packed; }

// Of each row the scales' bytes, then its numbers.
inline at::Tensor to_blocks8(const at::Tensor& rows) {
  const auto n = rows.size(0), dim = rows.size(1), blocks = blocks_of(dim);
  const auto padded = at::constant_pad_nd(rows.to(at::kFloat), {0, blocks * kBlock - dim}).view({n, blocks, kBlock});
  const auto scales = padded.abs().amax(-1, /*keepdim=*/true).div(127);
  const auto numbers = padded.div(scales.masked_fill(scales.eq(0), 1)).round().nan_to_num(0, 0, 0).clamp(-127, 127).to(at::kChar);
  const auto of_row = numbers.view({n, blocks * kBlock}).narrow(1, 0, dim).contiguous();
  return at::cat({scales.view({n, blocks}).contiguous().view(at::kByte), of_row.view(at::kByte)}, 1);
}

inline at::Tensor from_blocks8(const at::Tensor& packed, const at::Tensor& like) {
  const auto n = packed.size(0), dim = like.size(1), blocks = blocks_of(dim), head = 4 * blocks;
  const auto scales = packed.narrow(1, 0, head).clone(at::MemoryFormat::Contiguous).view(at::kFloat).view({n, blocks, 1});
  const auto numbers = packed.narrow(1, head, dim).contiguous().view(at::kChar).to(at::kFloat);
  const auto padded = at::constant_pad_nd(numbers, {0, blocks * kBlock - dim}).view({n, blocks, kBlock});
  return padded.mul(scales).view({n, blocks * kBlock}).narrow(1, 0, dim).to(like.scalar_type()).contiguous();
}

}  // namespace formats

inline constexpr std::array<Wire, 3> kWires{{
    {"exact", formats::as_it_is, formats::as_it_came, [](int64_t dim, int64_t size) { return dim * size; }},
    {"bfloat16", [](const at::Tensor& rows) { return rows.to(at::kBFloat16); },
     [](const at::Tensor& packed, const at::Tensor& like) { return packed.to(like.scalar_type()); },
     [](int64_t dim, int64_t) { return dim * 2; }},
    {"blocks8", formats::to_blocks8, formats::from_blocks8, [](int64_t dim, int64_t) { return dim + 4 * formats::blocks_of(dim); }},
}};

inline const Wire& wire(std::string_view name) {
  const auto* found = std::ranges::find(kWires, name, &Wire::name);
  require(found != kWires.end(), "mix_experts", "rows cannot travel as '{}'; expected exact, bfloat16 or blocks8", name);
  return *found;
}

}  // namespace dtensor::expert

#pragma GCC visibility pop
