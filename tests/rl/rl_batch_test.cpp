// Batches: what their operations give, on one device and on ranks, and which bytes move when columns are read.
#include "tests/support/refuses.hpp"
#include "tests/support/rl_support.hpp"

#include <dtensor/rl/batch.hpp>

using namespace dtensor;
using namespace dtensor::test;
using rl::Batch;
using rl::Column;
using rl::Rows;

namespace {

at::Tensor batch_ids() { return torch::arange(21, torch::kLong).reshape({7, 3}); }
std::vector<std::string> batch_texts() { return {"a", "b", "c", "d", "e", "f", "g"}; }

Batch small_batch() {
  Batch batch{{"ids", batch_ids()}, {"score", torch::arange(7, torch::kDouble)}, {"text", batch_texts()}};
  batch.meta()["step"] = 4;
  return batch;
}

// Of every column, the rows that should be there.
void require_rows(const Batch& batch, const Rows& rows) {
  const auto index = torch::tensor(rows, torch::kLong);
  require(batch.size() == static_cast<int64_t>(rows.size()), "test", "{} rows; expected {}", batch.size(), rows.size());
  const NoSpmd plain;
  require(full_tensor(batch.get("ids")).equal(batch_ids().index_select(0, index)), "test", "other ids");
  require(full_tensor(batch.get("score")).equal(torch::arange(7, torch::kDouble).index_select(0, index)), "test", "other scores");
  std::vector<std::string> texts;
  for (const auto row : rows) texts.push_back(batch_texts()[row]);
  require(batch.texts("text") == texts, "test", "other texts");
  require(batch.meta()["step"] == 4, "test", "other meta");
}

// All operations on rows.
void check_row_operations(const Batch& batch) {
  require_rows(batch, {0, 1, 2, 3, 4, 5, 6});
  require_rows(batch.rows(Rows{6, 0, 0, 3}), {6, 0, 0, 3});
  require_rows(batch.rows(Rows{6, 0, 0, 3}).rows(Rows{3, 3, 0}), {3, 3, 6});
  require_rows(batch.rows(batch_ids().select(1, 0) % 2 == 0), {0, 2, 4, 6});
  require_rows(batch.rows(Rows{}), {});
  require_rows(batch.slice(2, 5), {2, 3, 4});
  require_rows(batch.reorder({6, 5, 4, 3, 2, 1, 0}), {6, 5, 4, 3, 2, 1, 0});
  require_rows(batch.slice(0, 2).repeat(3), {0, 0, 0, 1, 1, 1});
  require_rows(batch.slice(0, 2).repeat(3, false), {0, 1, 0, 1, 0, 1});
  const auto chunks = batch.chunk(3);
  require_rows(chunks[0], {0, 1, 2});
  require_rows(chunks[1], {3, 4});
  require_rows(chunks[2], {5, 6});
  require_rows(rl::concat(chunks), {0, 1, 2, 3, 4, 5, 6});
  const auto [padded, added] = batch.pad_to_multiple(4);
  require(added == 1, "test", "{} rows were added", added);
  require_rows(padded, {0, 1, 2, 3, 4, 5, 6, 0});
  require_rows(padded.unpad(added), {0, 1, 2, 3, 4, 5, 6});
  require(batch.pad_to_multiple(7).added == 0, "test", "rows were added");
  require_rows(batch.slice(0, 2).pad_to_multiple(7).batch, {0, 1, 0, 1, 0, 1, 0});
  const auto parts = batch.split_by_tokens({5, 1, 2, 6, 3, 3, 4}, 8);
  require(parts.size() == 4, "test", "{} parts", parts.size());
  require_rows(parts[0], {0, 1, 2});
  require_rows(parts[1], {3});
  require_rows(parts[2], {4, 5});
  require_rows(parts[3], {6});
}

}  // namespace

TEST_CASE("rl batch: rows of plain columns", "[rl]") { REQUIRE_NOTHROW(check_row_operations(small_batch())); }

TEST_CASE("rl batch: columns are chosen taken out renamed and joined", "[rl]") {
  auto batch = small_batch();
  CHECK(batch.names() == std::vector<std::string>{"ids", "score", "text"});
  CHECK(batch.select({"text"}).names() == std::vector<std::string>{"text"});
  CHECK(batch.rename({{"ids", "tokens"}}).names() == std::vector<std::string>{"score", "text", "tokens"});
  const auto taken = batch.pop({"score"});
  CHECK(taken.names() == std::vector<std::string>{"score"});
  CHECK_FALSE(batch.has("score"));
  batch.merge(taken).merge(small_batch());  // equal columns of one name
  CHECK(batch.names().size() == 3);
  Batch other{{"ids", batch_ids() + 1}};
  CHECK_NOTHROW(refuses("both batches have a column 'ids', and they differ", [&] { batch.merge(other); }));
  Batch texts{{"text", Column(std::vector<std::string>(7, "x"))}};
  CHECK_NOTHROW(refuses("both batches have a column 'text'", [&] { batch.merge(texts); }));
  Batch meta;
  meta.meta()["step"] = 5;
  CHECK_NOTHROW(refuses("a meta value 'step': 4 and 5", [&] { batch.merge(meta); }));
  CHECK_NOTHROW(refuses("column 'short' has 2 rows; expected 7", [&] { batch.set("short", torch::zeros({2})); }));
  CHECK_NOTHROW(refuses("no column 'id'; got [\"ids\"", [&] { batch.get("id"); }));
  CHECK_NOTHROW(refuses("would be called 'text'", [&] { batch.rename({{"ids", "text"}}); }));
  CHECK_NOTHROW(refuses("the column holds objects", [&] { batch.get("text"); }));
  CHECK_NOTHROW(refuses("holds a tensor of [7, 3]", [&] { batch.texts("ids"); }));
  CHECK(batch.names().size() == 3);
}

TEST_CASE("rl batch: rows that there are not are refused", "[rl]") {
  const auto batch = small_batch();
  CHECK_NOTHROW(refuses("row 7 of a batch of 7 rows", [&] { batch.rows(Rows{0, 7}); }));
  CHECK_NOTHROW(refuses("expected each of 7 once", [&] { batch.reorder({0, 1, 2, 3, 4, 5, 5}); }));
  CHECK_NOTHROW(refuses("got 8 parts of 7 rows", [&] { batch.chunk(8); }));
  CHECK_NOTHROW(refuses("got 0 to pad to a multiple of", [&] { batch.pad_to_multiple(0); }));
  CHECK(batch.slice(0, 0).pad_to_multiple(4).batch.size() == 0);
  CHECK_NOTHROW(refuses("row 3 has 9 tokens; expected at most 8", [&] { batch.split_by_tokens({1, 1, 1, 9, 1, 1, 1}, 8); }));
  CHECK_NOTHROW(refuses("[batch, ...]", [&] { Batch{{"x", torch::tensor(1.0)}}; }));
  CHECK_NOTHROW(refuses("expected a plain bool [7]", [&] { batch.rows(torch::ones({7})); }));
  CHECK_NOTHROW(refuses("is in no layout", [&] { batch.microbatches(2); }));
  CHECK_NOTHROW(refuses("have columns", [&] { rl::concat({batch, batch.select({"ids"})}); }));
}

TEST_CASE("rl batch: rows of columns on meshes are those of one device", "[rl]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        4,
        [](World&) {
          const auto mesh = init_device_mesh(c10::kCPU, {2, 2}, {"dp", "tp"});
          const auto batch = small_batch();
          check_row_operations(batch.on(mesh));
          check_row_operations(batch.on(rl::rows_over(mesh, {"dp", "tp"})));
          check_row_operations(batch.on(rl::whole_rows(mesh)));
          check_row_operations(batch.on(mesh).on(rl::rows_over(mesh, {"tp"})));
          Batch cut = batch;
          cut.set("ids", distribute_tensor(batch_ids(), mesh, {ragged_shard(0, {1, 3}), shard(1)}));
          check_row_operations(cut);
          check_row_operations(cut.on(mesh));
        },
        transport));
  }
}

TEST_CASE("rl batch: a microbatch has rows that each rank has already", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(2, [](World&) {
    const auto mesh = init_device_mesh(c10::kCPU, {2}, {"dp"});
    const Batch batch{{"x", torch::arange(8, torch::kDouble)}};
    const auto parts = batch.on(mesh).microbatches(2);
    const CommDebugMode counted;
    const auto first = DTensor(parts[0].get("x")), second = DTensor(parts[1].get("x"));
    require(counted.count() == 0, "test", "{} collectives", counted.count());
    const auto begin = 4.0 * mesh.coordinate(0);
    require(first.to_local().equal(torch::tensor({begin, begin + 1}, torch::kDouble)), "test", "other rows");
    require(second.to_local().equal(torch::tensor({begin + 2, begin + 3}, torch::kDouble)), "test", "other rows");
    const auto uneven = Batch{{"x", torch::arange(7, torch::kDouble)}}.on(mesh).microbatches(3);
    double sum = 0;
    for (const auto& part : uneven) sum += rl_item(part.get("x").sum());
    require(sum == 21, "test", "the rows add up to {}", sum);
  }));
}

TEST_CASE("rl batch: a column moves between ranks that have and need it when it is read", "[rl]") {
  for (const std::string transport : {"threads", "shm", "gloo"}) {
    CAPTURE(transport);
    REQUIRE_NOTHROW(on_ranks(
        5,
        [](World& world) {
          const DeviceMesh givers(c10::kCPU, {0, 1}, {2}, {"dp"}), takers(c10::kCPU, {1, 2, 3}, {3}, {"dp"});
          const auto whole = torch::arange(24, torch::kDouble).reshape({12, 2});
          Batch batch{{"x", distribute_tensor(whole, givers, {shard(0)})}, {"y", distribute_tensor(whole, givers, {shard(0)})}};
          const CommDebugMode counted;
          const auto view = batch.on(takers);
          require(counted.count() == 0, "test", "something has moved before it was read");
          const DTensor x(view.get("x"));
          // Rank 1 has rows 6 to 11 and needs 0 to 3, ranks 2 and 3 need 4 to 7 and 8 to 11: rows of 16 bytes.
          const int64_t sent[] = {(4 + 2) * 16, (2 + 4) * 16, 0, 0, 0};
          require(counted.bytes() == sent[world.rank()], "test", "{} bytes were sent", counted.bytes());
          require(world.rank() != 4 || counted.count() == 0, "test", "a rank without a part has communicated");
          require(takers.contains_this_rank() != x.is_absent(), "test", "absent");
          if (takers.contains_this_rank())
            require(x.to_local().equal(whole.narrow(0, 4 * takers.coordinate(0), 4)), "test", "other rows came");
          const auto bytes = counted.bytes(), count = counted.count();
          batch.get("x", takers);
          batch.on(takers).get("x");
          require(counted.bytes() == bytes && counted.count() == count, "test", "a second reader has moved something");
        },
        transport));
  }
}

TEST_CASE("rl batch: chosen rows move in the order asked for", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(5, [](World& world) {
    const DeviceMesh givers(c10::kCPU, {0, 1}, {2}, {"dp"}), takers(c10::kCPU, {2, 3}, {2}, {"dp"});
    const auto whole = torch::arange(24, torch::kDouble).reshape({12, 2});
    const Batch batch{{"x", distribute_tensor(whole, givers, {shard(0)})}};
    const Rows order{11, 0, 5, 5, 7};
    const CommDebugMode counted;
    const DTensor x(batch.rows(order).on(takers).get("x"));
    require(world.rank() != 4 || counted.count() == 0, "test", "a rank without a part has communicated");
    if (!takers.contains_this_rank()) return;
    const auto expected = whole.index_select(0, torch::tensor(order, torch::kLong));
    require(x.to_local().equal(takers.coordinate(0) == 0 ? expected.slice(0, 0, 3) : expected.slice(0, 3)), "test", "other rows came");
  }));
}

TEST_CASE("rl batch: batches from several meshes are joined", "[rl]") {
  REQUIRE_NOTHROW(on_ranks(4, [](World& world) {
    const DeviceMesh first(c10::kCPU, {0, 1}, {2}, {"dp"}), second(c10::kCPU, {2, 3}, {2}, {"dp"});
    const auto whole = torch::arange(14, torch::kDouble);
    const Batch a{{"x", distribute_tensor(whole.slice(0, 0, 5), first, {shard(0)})}},
        b{{"x", distribute_tensor(whole.slice(0, 5, 12), second, {shard(0)})}}, c{{"x", whole.slice(0, 12)}};
    const auto joined = rl::concat({a, b, c});
    require(joined.size() == 14, "test", "{} rows", joined.size());
    if (world.rank() < 2) require(full_tensor(joined.get("x")).equal(whole), "test", "other rows");
  }));
}
