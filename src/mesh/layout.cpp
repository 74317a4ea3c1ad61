// Layouts: their normal form, their table, and which global elements each rank holds.
#include <dtensor/mesh/layout.hpp>

#include <dtensor/base/error.hpp>

#include "src/mesh/cut_check.hpp"
#include "src/mesh/world_state.hpp"

#include <c10/util/accumulate.h>
#include <fmt/ranges.h>
#include <range/v3/action/push_back.hpp>
#include <range/v3/numeric/iota.hpp>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/zip.hpp>

#include <algorithm>

namespace dtensor {

namespace {

size_t mix(size_t hash, uint64_t value) { return (hash ^ value) * 0x9E3779B97F4A7C15ull ^ (hash >> 29); }

size_t hash_of(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype,
               bool deferred) {
  size_t hash = mix(reinterpret_cast<size_t>(mesh.id()), static_cast<uint64_t>(dtype) << 1 | static_cast<uint64_t>(deferred));
  for (const auto& p : placements) {
    hash = mix(hash, static_cast<uint64_t>(p.kind) | static_cast<uint64_t>(p.op) << 8 | static_cast<uint64_t>(p.dim) << 16 |
                         static_cast<uint64_t>(p.split) << 32);
    if (p.unit != 1) hash = mix(hash, static_cast<uint64_t>(p.unit));
    if (p.shares) hash = mix(hash, reinterpret_cast<size_t>(p.shares));
    if (p.offset != 0) hash = mix(hash, static_cast<uint64_t>(p.offset));
  }
  hash = mix(hash, sizes.size());
  for (int64_t n : sizes) hash = mix(hash, static_cast<uint64_t>(n));
  for (int64_t n : strides) hash = mix(hash, static_cast<uint64_t>(n));
  return hash;
}

const char* short_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float: return "f32";
    case c10::ScalarType::Double: return "f64";
    case c10::ScalarType::Half: return "f16";
    case c10::ScalarType::BFloat16: return "bf16";
    case c10::ScalarType::Long: return "i64";
    case c10::ScalarType::Int: return "i32";
    case c10::ScalarType::Short: return "i16";
    case c10::ScalarType::Char: return "i8";
    case c10::ScalarType::Byte: return "u8";
    case c10::ScalarType::Bool: return "bool";
    default: return c10::toString(dtype);
  }
}

// `local` positions of the sequence that `held` lists, as global positions; adjacent results joined.
Intervals compose(const Intervals& held, const Intervals& local) {
  Intervals result;
  size_t k = 0;
  int64_t start = 0;  // local position of held[k].begin
  for (auto part : local) {
    while (part.length() > 0) {
      while (part.begin >= start + held[k].length()) start += held[k++].length();
      const int64_t end = std::min(part.end, start + held[k].length());
      const Interval global{held[k].begin + part.begin - start, held[k].begin + end - start};
      if (!result.empty() && result.back().end == global.begin) {
        result.back().end = global.end;
      } else {
        result.push_back(global);
      }
      part.begin = end;
    }
  }
  return result;
}

// Whether every element of the memory between the first and the last is one of the tensor's, and only once.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t expected = 1;
  const auto order = memory_order(strides);
  for (size_t i = order.size(); i-- > 0;) {
    if (sizes[order[i]] == 1) continue;
    if (strides[order[i]] != expected) return c10::multiply_integers(sizes) == 0;
    expected *= sizes[order[i]];
  }
  return true;
}

// Boxes that make up the elements [part.begin, part.end) of a row-major tensor of `sizes`, in order: the end of a first row, whole rows
// and the beginning of a last one, in each dim.
void add_boxes(c10::IntArrayRef sizes, Interval part, std::vector<Interval>& outer, std::vector<std::vector<Interval>>& boxes) {
  if (part.length() == 0) return;
  if (outer.size() == sizes.size()) return boxes.push_back(outer);
  const int64_t inner = c10::multiply_integers(sizes.slice(outer.size() + 1));
  const auto add = [&](Interval rows, Interval rest) {
    outer.push_back(rows);
    add_boxes(sizes, rest, outer, boxes);
    outer.pop_back();
  };
  const int64_t first = part.begin / inner, last = part.end / inner;
  if (first == last) return add({first, first + 1}, {part.begin - first * inner, part.end - first * inner});
  const int64_t begin = part.begin % inner == 0 ? first : first + 1;
  if (begin > first) add({first, first + 1}, {part.begin - first * inner, inner});
  if (begin < last) {
    auto rows = outer;
    rows.push_back({begin, last});
    for (size_t d = rows.size(); d < sizes.size(); ++d) rows.push_back({0, sizes[d]});
    boxes.push_back(std::move(rows));
  }
  if (part.end % inner != 0) add({last, last + 1}, {0, part.end - last * inner});
}

void append_run(std::vector<Interval>& runs, Interval run) {
  if (!runs.empty() && runs.back().end == run.begin) {
    runs.back().end = run.end;
  } else {
    runs.push_back(run);
  }
}

// The runs of the row-major index where each dim is in its intervals.
std::vector<Interval> runs_of(c10::IntArrayRef sizes, const std::vector<Intervals>& held) {
  // From the innermost dim out: the runs of one index of dim d, repeated at every index that this rank holds.
  std::vector<Interval> runs{{0, 1}};
  int64_t inner = 1;  // elements per index of the dim
  for (size_t d = sizes.size(); d-- > 0;) {
    const bool whole = runs.size() == 1 && runs[0] == Interval{0, inner};
    std::vector<Interval> longer;
    for (const auto& part : held[d]) {
      if (whole) {
        append_run(longer, {part.begin * inner, part.end * inner});
        continue;
      }
      for (int64_t index = part.begin; index < part.end; ++index) {
        for (const auto& run : runs) append_run(longer, {index * inner + run.begin, index * inner + run.end});
      }
    }
    runs = std::move(longer);
    inner *= sizes[d];
    if (runs.empty()) break;
  }
  return runs;
}

}  // namespace

LayoutPtr LayoutTable::find(size_t hash, const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                            c10::ScalarType dtype, bool deferred) const {
  const auto [first, last] = layouts.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    const auto* layout = it->second._unsafe_get_target();
    if (layout->mesh_ == mesh && layout->dtype_ == dtype && layout->deferred_ == deferred && layout->placements() == placements &&
        layout->sizes() == sizes && layout->strides() == strides) {
      if (auto strong = it->second.lock()) return strong;
    }
  }
  return {};
}

void LayoutTable::add(const LayoutPtr& layout, size_t hash, const std::shared_ptr<LayoutTable>& self) {
  layout->hash_ = hash;
  layout->table_ = self;
  layouts.emplace(hash, layout);
}

void LayoutTable::remove(const Layout& layout) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto [first, last] = layouts.equal_range(layout.hash_);
  for (auto it = first; it != last; ++it) {
    if (it->second._unsafe_get_target() == &layout) {
      layouts.erase(it);
      return;
    }
  }
}

Layout::Layout(DeviceMesh mesh, Placements placements, Sizes sizes, Sizes strides, c10::ScalarType dtype, bool deferred)
    : mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      sizes_(std::move(sizes)),
      strides_(std::move(strides)),
      dtype_(dtype),
      replicated_(std::ranges::all_of(placements_, [](const auto& p) { return p.is_replicate(); })),
      partial_(std::ranges::any_of(placements_, [](const auto& p) { return p.is_partial(); })),
      deferred_(deferred),
      absent_(!mesh_.contains_this_rank()) {
  const auto& here = mesh_.state_->coordinate;
  local_sizes_ = local_sizes_before(mesh_.ndim(), here);
  for (int64_t m = 0; m < mesh_.ndim(); ++m) flat_dim_ = placements_[m].is_flat() ? m : flat_dim_;
  if (!is_flat()) return;
  const auto part = flat_shard(here);
  std::ranges::fill(local_sizes_, 1);
  local_sizes_.back() = part.length();
}

void Layout::release_resources() {
  if (const auto table = std::move(table_)) table->remove(*this);
}

LayoutPtr Layout::get(const DeviceMesh& mesh, PlacementsRef requested, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      c10::ScalarType dtype, bool deferred) {
  if (strides.size() != sizes.size()) {
    fail("Layout", "got {} strides for {} dimensions of shape {}", strides.size(), sizes.size(), sizes.vec());
  }
  Placements placements(requested.begin(), requested.end());
  detail::check_and_normalize(mesh, placements, sizes);
  if (std::ranges::any_of(placements, [](const auto& p) { return p.is_flat(); }) && !is_dense(sizes, strides)) {
    fail("Layout", "{} needs a tensor without gaps or repetitions; got sizes [{}] and strides [{}]", dtensor::str(placements),
         fmt::join(sizes, ", "), fmt::join(strides, ", "));
  }
  const auto hash = hash_of(mesh, placements, sizes, strides, dtype, deferred);
  const auto& table = mesh.state_->layouts;
  std::lock_guard<std::mutex> lock(table->mutex);
  if (auto known = table->find(hash, mesh, placements, sizes, strides, dtype, deferred)) return known;
  auto layout = c10::make_intrusive<Layout>(mesh, std::move(placements), Sizes(sizes.begin(), sizes.end()),
                                            Sizes(strides.begin(), strides.end()), dtype, deferred);
  table->add(layout, hash, table);
  return layout;
}

LayoutPtr Layout::get(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      c10::ScalarType dtype) {
  return get(mesh, placements, sizes, strides, dtype, false);
}

LayoutPtr Layout::get(const DeviceMesh& mesh, PlacementsRef placements, c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return get(mesh, placements, sizes, contiguous_strides(sizes), dtype);
}

// A tensor with gaps, or expanded, has new memory where it becomes flat.
LayoutPtr Layout::with(PlacementsRef placements) const { return with(mesh_, placements); }
LayoutPtr Layout::with(const DeviceMesh& mesh, PlacementsRef placements) const {
  const bool flat = std::ranges::any_of(placements, [](const auto& p) { return p.is_flat(); });
  if (flat && !is_dense(sizes_, strides_)) return get(mesh, placements, sizes_, contiguous_strides(sizes_), dtype_, deferred_);
  return get(mesh, placements, sizes_, strides_, dtype_, deferred_);
}
LayoutPtr Layout::deferred() const { return get(mesh_, placements_, sizes_, strides_, dtype_, true); }
LayoutPtr Layout::present() const { return get(mesh_, placements_, sizes_, strides_, dtype_, false); }

Intervals Layout::intervals(int64_t dim, c10::IntArrayRef coordinate) const {
  Intervals held;
  int64_t length = sizes_[dim];
  if (length > 0) held.push_back({0, length});
  for (int64_t i = 0; i < mesh_.ndim() && length > 0; ++i) {
    if (!placements_[i].is_shard(dim)) continue;
    held = compose(held, cut(length, placements_[i], mesh_.sizes()[i], coordinate[i]));
    length = 0;
    for (const auto& part : held) length += part.length();
  }
  return held;
}

Interval Layout::flat_shard(c10::IntArrayRef coordinate) const {
  const auto elements = c10::multiply_integers(local_sizes_before(mesh_.ndim(), coordinate));
  return dtensor::flat_shard(elements, placements_[flat_dim_], coordinate[flat_dim_]);
}

std::vector<std::vector<Interval>> Layout::boxes(c10::IntArrayRef coordinate) const {
  std::vector<std::vector<Interval>> local;  // in positions of the dims' intervals
  if (is_flat()) {
    const auto order = memory_order(strides_);
    const auto sizes = local_sizes_before(mesh_.ndim(), coordinate);
    Sizes in_order;
    for (const auto d : order) in_order.push_back(sizes[d]);
    local = boxes_of(in_order, flat_shard(coordinate));
    for (auto& box : local) {
      const auto ordered = box;
      for (const auto& [d, part] : ranges::views::zip(order, ordered)) box[d] = part;
    }
  } else {
    local.emplace_back();
    for (const auto size : local_sizes_before(mesh_.ndim(), coordinate)) local[0].push_back({0, size});
  }
  std::vector<std::vector<Interval>> boxes;
  for (const auto& positions : local) add_products(positions, coordinate, boxes);
  return boxes;
}

// The global boxes of a local one.
void Layout::add_products(const std::vector<Interval>& positions, c10::IntArrayRef coordinate,
                          std::vector<std::vector<Interval>>& boxes) const {
  std::vector<std::vector<Interval>> products(1);
  for (int64_t d = 0; d < ndim(); ++d) {
    const auto parts = compose(intervals(d, coordinate), {positions[d]});
    std::vector<std::vector<Interval>> longer;
    longer.reserve(products.size() * parts.size());
    for (const auto& [box, part] : ranges::views::cartesian_product(products, parts)) {
      longer.push_back(box);
      longer.back().push_back(part);
    }
    products = std::move(longer);
  }
  ranges::push_back(boxes, products);
}

std::vector<Interval> Layout::runs(c10::IntArrayRef coordinate) const {
  if (is_flat()) {
    std::vector<Interval> all;
    for (const auto& box : boxes(coordinate)) {
      std::vector<Intervals> held;
      for (const auto& part : box) held.push_back({part});
      for (const auto& run : runs_of(sizes_, held)) all.push_back(run);
    }
    std::ranges::sort(all, [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::vector<Interval> joined;
    for (const auto& run : all) append_run(joined, run);
    return joined;
  }
  std::vector<Intervals> held;
  for (int64_t d = 0; d < ndim(); ++d) held.push_back(intervals(d, coordinate));
  return runs_of(sizes_, held);
}

Sizes Layout::local_sizes_before(int64_t mesh_dim, c10::IntArrayRef coordinate) const {
  Sizes local = sizes_;
  for (int64_t i = 0; i < mesh_dim; ++i) {
    const auto& p = placements_[i];
    if (p.is_shard()) local[p.dim] = cut_length(local[p.dim], p, mesh_.sizes()[i], coordinate[i]);
  }
  return local;
}

std::string Layout::str() const {
  std::string dims;
  for (int64_t i = 0; i < mesh_.ndim(); ++i) {
    dims += fmt::format("{}{}={}", i ? ", " : "", mesh_.names()[i], mesh_.sizes()[i]);
  }
  return fmt::format("{}[{}] {} on ({}){}", short_name(dtype_), fmt::join(sizes_, ", "), dtensor::str(placements_), dims,
                     deferred_ ? ", deferred" : absent_ ? ", absent" : "");
}

std::vector<std::vector<Interval>> boxes_of(c10::IntArrayRef sizes, Interval elements) {
  std::vector<Interval> outer;
  std::vector<std::vector<Interval>> boxes;
  add_boxes(sizes, elements, outer, boxes);
  return boxes;
}

Sizes memory_order(c10::IntArrayRef strides) {
  Sizes order(strides.size());
  ranges::iota(order, 0);
  std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  return order;
}

Sizes contiguous_strides(c10::IntArrayRef sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace dtensor
