// The zoo's models from files of Hugging Face and back.
#include "tests/support/torch_files_support.hpp"

#include "examples/zoo/huggingface.hpp"
#include "examples/zoo/zoo.hpp"

#include <dtensor/checkpoint/checkpoint.hpp>
#include <dtensor/parallel/expert/expert_parallel.hpp>
#include <dtensor/parallel/fully_shard.hpp>
#include <dtensor/pipeline.hpp>

#include <atomic>
#include <map>

namespace dt = dtensor;
namespace ck = dtensor::checkpoints;
using namespace dt::test;

namespace {

std::string zoo_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const dt::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// A model with no two weights alike, in a folder of Hugging Face's.
std::shared_ptr<zoo::Model> exported(const zoo::Entry& entry, const std::string& folder) {
  torch::manual_seed(5);
  const auto model = entry.make();
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.add_(torch::randn_like(parameter), 0.05);
  const auto config = entry.config();
  ck::write_huggingface(folder, zoo::to_huggingface(config, zoo::source_of(*model)), {.file_bytes = 100'000, .config = config});
  return model;
}

}  // namespace

TEST_CASE("zoo files: each rank reads its shards of a model of Hugging Face", "[checkpoint][zoo]") {
  for (const std::string name : {"gpt2-debug", "llama3-debug", "vit-debug", "mixtral-debug", "qwen3-moe-debug",
                                 "deepseek-debug"}) {
    const auto& entry = zoo::find(name);
    const Folder folder;
    const auto expected = exported(entry, folder / "hf");
    const auto index = ck::read_huggingface(folder / "hf");
    const bool has_experts = name == "mixtral-debug" || name == "qwen3-moe-debug" || name == "deepseek-debug";
    {
      const auto alone = entry.make();
      zoo::load(*alone, entry.config(), index);
      REQUIRE_NOTHROW(same_module(*alone, *expected, name));
    }
    for (const auto* transport : {"threads", "shm"}) {
      for (const bool sharded : {false, true}) {
        CAPTURE(name, transport, sharded);
        std::atomic<int64_t> read = 0;
        REQUIRE_NOTHROW(on_ranks(
            4,
            [&](dt::World&) {
              const auto mesh = dt::init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
              const dt::Spmd spmd(mesh);
              const auto model = [&] {
                const dt::DeferredInit deferred(mesh);
                return entry.make();
              }();
              dt::parallelize_module(*model, mesh, dt::automatic_plan(*model));
              const auto over = sharded ? std::vector<std::string>{} : std::vector<std::string>{"dp"};
              if (has_experts) dt::expert_parallel(*model, mesh, {.dims = over, .hidden = "tp"});
              if (sharded) dt::fully_shard(*model, mesh["dp"]);
              dt::materialize(*model);
              zoo::load(*model, entry.config(), index);
              read += ck::last_load().bytes_read;
              same_module(*model, *expected, name);
            },
            transport));
        if (name == "llama3-debug" || has_experts) CHECK(read == index.bytes());  // one load, each byte once
      }
      if (name == "vit-debug") continue;  // which is not cut into stages
      REQUIRE_NOTHROW(on_ranks(
          2,
          [&](dt::World&) {
            const auto mesh = dt::init_device_mesh(at::kCPU, {2}, {"pp"});
            const auto own = dt::stage_mesh(mesh);
            const auto model = [&] {
              const dt::DeferredInit deferred(own);
              return entry.make();
            }();
            auto pipe = dt::pipeline(*model, mesh, model->pieces(), {.microbatches = 2});
            pipe.materialize();
            zoo::load(*model, entry.config(), index);
            const auto whole = expected->named_parameters();
            for (const auto& [parameter, value] : pipe.named_parameters())
              dt::require(dt::full_tensor(value.detach()).equal(whole[parameter]), "test", "{}: {} differs", name, parameter);
          },
          transport));
    }
  }
}

namespace {

// The weights of experts as transformers 5 has them in memory: one above the other, gates above the rest.
ck::Source with_experts_stacked(const ck::Source& published, const std::string& layer, int64_t experts) {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::vector<at::Tensor>> of_layers;
  for (const auto& tensor : published.tensors) {
    const auto at = tensor.name.find(layer);
    if (at == tensor.name.npos) tensors[tensor.name] = published.get(tensor.name);
    else if (tensor.name.ends_with(".gate.weight")) tensors[tensor.name.substr(0, at) + "mlp.gate.weight"] = published.get(tensor.name);
    else of_layers[tensor.name.substr(0, at)];
  }
  for (const auto& [prefix, none] : of_layers) {
    std::vector<at::Tensor> up, down;
    for (int64_t i = 0; i < experts; ++i) {
      const auto expert = prefix + layer + ".experts." + std::to_string(i) + ".";
      up.push_back(at::cat({published.get(expert + "w1.weight"), published.get(expert + "w3.weight")}));
      down.push_back(published.get(expert + "w2.weight"));
    }
    tensors[prefix + "mlp.experts.gate_up_proj"] = at::stack(up);
    tensors[prefix + "mlp.experts.down_proj"] = at::stack(down);
  }
  return ck::source_of(tensors);
}

}  // namespace

TEST_CASE("zoo files: experts are read as published and as one tensor", "[checkpoint][zoo]") {
  const auto& entry = zoo::find("mixtral-debug");
  const Folder folder;
  const auto expected = exported(entry, folder / "hf");
  const auto published = ck::source_of(ck::read_huggingface(folder / "hf"));
  const auto weight = expected->named_parameters()["layers.1.feed_forward.experts.w3"];
  REQUIRE(published.get("model.layers.1.block_sparse_moe.experts.2.w3.weight").equal(weight[2]));
  const auto stacked = with_experts_stacked(published, "block_sparse_moe", 4);
  ck::write_huggingface(folder / "stacked", stacked, {.config = entry.config()});
  for (const auto& source : {published, stacked}) {
    const auto ours = zoo::from_huggingface(entry.config(), source);
    for (const auto& parameter : expected->named_parameters()) REQUIRE(ours.get(parameter.key()).equal(parameter.value()));
  }
  const auto index = ck::read_huggingface(folder / "stacked");
  for (const auto* transport : {"threads", "shm"}) {
    std::atomic<int64_t> read = 0;
    REQUIRE_NOTHROW(on_ranks(
        2,
        [&](dt::World&) {
          const auto mesh = dt::init_device_mesh(at::kCPU, {2}, {"ep"});
          const dt::Spmd spmd(mesh);
          const auto model = zoo::model_from_config(entry.config());
          dt::expert_parallel(*model, mesh);
          zoo::load(*model, entry.config(), index);
          read += ck::last_load().bytes_read;
          same_module(*model, *expected, "stacked");
        },
        transport));
    CHECK(read == index.bytes());
  }
  const auto lacks = zoo_error([&] {
    auto less = published;
    std::erase_if(less.tensors, [](const auto& tensor) { return tensor.name.find("experts.3.w2") != tensor.name.npos; });
    zoo::from_huggingface(entry.config(), less);
  });
  CHECK(lacks.find("has no 'model.layers.0.block_sparse_moe.experts.3.w2.weight'") != std::string::npos);
}

TEST_CASE("zoo files: a model that does not fit is refused before it changes", "[checkpoint][zoo]") {
  const Folder folder;
  exported(zoo::find("gpt2-debug"), folder / "hf");
  const zoo::Gpt2Options wider{256, 64, 2, 96, 4};
  const auto model = std::make_shared<zoo::Gpt2Impl>(wider);
  const auto before = model->parameters()[0].detach().clone();
  const auto said = zoo_error([&] { zoo::load(*model, zoo::config_of(wider), ck::read_huggingface(folder / "hf")); });
  INFO(said);
  const std::string expected = "'model.h.0.attn.c_attn.weight' is [64, 192], transposed, in the checkpoint and [288, 96] in the model";
  CHECK(said.find(expected) != std::string::npos);
  CHECK(model->parameters()[0].equal(before));
}

TEST_CASE("zoo files: numbers of a config that are no sizes are refused by name", "[checkpoint][zoo]") {
  const auto refused = [](const std::string& fields, const std::string& text) {
    const auto config = "{\"model_type\": " + fields + "}";
    for (const auto& said :
         {zoo_error([&] { zoo::model_from_config(config); }), zoo_error([&] { zoo::from_huggingface(config, {}); }),
          zoo_error([&] { zoo::to_huggingface(config, {}); })}) {
      INFO(config << ": " << said);
      CHECK(said.find(text) != std::string::npos);
    }
  };
  refused(R"("llama", "num_attention_heads": 0)", "num_attention_heads 0; expected 1 to");
  refused(R"("llama", "num_key_value_heads": 0)", "num_key_value_heads 0; expected 1 to");
  refused(R"("llama", "num_hidden_layers": 1000000000000)", "num_hidden_layers 1000000000000; expected 1 to 4096");
  refused(R"("llama", "hidden_size": 18446744073709551615)", "hidden_size -1; expected 1 to");
  refused(R"("gpt2", "n_head": -1)", "n_head -1; expected 1 to");
  refused(R"("gpt2", "n_embd": 1e300)", "n_embd 1e+300; expected one like 768");
  refused(R"("vit", "patch_size": 0)", "patch_size 0; expected 1 to");
  refused(R"("vit", "num_channels": "three")", "num_channels \"three\"; expected one like 3");
  refused(R"("mixtral", "num_experts_per_tok": 9)", "num_experts_per_tok 9; expected 1 to 8");
  refused(R"("mixtral", "sliding_window": 4096)", "sliding_window 4096; expected none");
  refused(R"("qwen3_moe", "mlp_only_layers": [0])", "mlp_only_layers [0]; expected []");
  refused(R"("deepseek_v3", "rope_interleave": false)", "rope_interleave false; expected true");
  refused(R"("deepseek_v3", "quantization_config": {"fmt": "e4m3"})", "quantization_config {");
  refused(R"("llama", "rope_scaling": {"type": "yarn"})", "by 'yarn'; expected 'default', 'llama3' or, of deepseek_v3");
  refused("7", "model_type 7; expected one like");
  refused("\"bert\"", "is of a 'bert'");
}

TEST_CASE("zoo files: tensors that cannot be converted are refused by name", "[checkpoint][zoo]") {
  const auto refused = [](const std::string& type, bool is_ours, const std::string& name, std::vector<int64_t> sizes) {
    const auto source = ck::source_of({{name, at::ones(sizes)}});
    const auto config = "{\"model_type\": \"" + type + "\"}";
    const auto said = zoo_error([&] { is_ours ? zoo::to_huggingface(config, source) : zoo::from_huggingface(config, source); });
    INFO(said);
    CHECK(said.find("'" + name + "' is [") != std::string::npos);
  };
  refused("vit", false, "vit.encoder.layer.0.attention.attention.query.weight", {});
  refused("vit", true, "blocks.0.attn.qkv.weight", {});
  refused("vit", true, "blocks.0.attn.qkv.bias", {4});
  refused("gpt2", false, "transformer.h.0.attn.c_attn.weight", {3});
  refused("gpt2", true, "h.0.attn.c_attn.weight", {});
  refused("llama", false, "model.layers.0.self_attn.q_proj.weight", {});
  refused("llama", true, "layers.0.attention.wk.weight", {63, 2});
  refused("mixtral", true, "layers.0.feed_forward.experts.w1", {7, 2, 2});
  refused("mixtral", false, "model.layers.0.mlp.experts.gate_up_proj", {8, 3, 2});
}
