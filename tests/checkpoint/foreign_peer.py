"""The Python side of foreign.sh: makes checkpoints with the libraries that they are of, and checks what dtensor made of them.

    foreign_peer.py make FOLDER     before foreign-files runs
    foreign_peer.py check FOLDER    after it
"""
import os
import pathlib
import sys
import warnings

os.environ.setdefault("USE_LIBUV", "0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

FOLDER = pathlib.Path(sys.argv[2])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool, torch.complex64]


def tensors():
    generator = torch.Generator().manual_seed(1)
    result = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        values = torch.randn(7, 5, 3, generator=generator) * 100
        result[f"all.{name}"] = values > 0 if dtype == torch.bool else values.to(dtype)
    result["scalar"] = torch.tensor(7.5)
    result["count"] = torch.tensor(2**40 + 1)
    result["empty"] = torch.empty(0, 3)
    result["with/strange \u00e4 names\"\\"] = torch.arange(6.0).reshape(2, 3)
    return result


def views(base):
    """What is not simply the storage, row by row."""
    return {"base": base, "again": base, "rows": base[2:5], "columns": base[:, 1:3], "turned": base.t(), "one": base[3, 4],
            "spread": base[0, 0].expand(3, 2), "every_other": base[::2, ::2]}


def same(name, got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape, (name, got.dtype, got.shape, expected.dtype, expected.shape)
    if got.numel() > 0:
        a, b = got.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(a, b), f"{name}: {(a != b).sum()} bytes differ"


def same_all(what, got, expected):
    assert set(got) == set(expected), (what, set(got) ^ set(expected))
    for name in expected:
        same(f"{what}: {name}", got[name], expected[name])
    print(f"{what}: {len(expected)} tensors are bit for bit equal")


def huggingface(path):
    result = {}
    for file in sorted(path.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            result |= {name: opened.get_tensor(name) for name in opened.keys()}
    return result


def sharded(whole, mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    return {"rows": distribute_tensor(whole, mesh, [Shard(0), Replicate()]), "grid": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
            "columns": distribute_tensor(whole, mesh, [Replicate(), Shard(1)]), "plain": whole, "scalar": torch.tensor(3.25),
            "half": distribute_tensor(whole, mesh, [Shard(1), Shard(0)]).bfloat16()}


def save_sharded(rank, folder, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(77, dtype=torch.float32).reshape(11, 7)
    dcp.save({"model": sharded(whole, mesh), "step": 12, "rate": 0.5, "name": "run", "betas": [0.9, 0.99], "odd": {1, 2}},
             checkpoint_id=folder)
    dist.destroy_process_group()


def models():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification
    torch.manual_seed(3)
    common = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
    yield "llama", LlamaForCausalLM(LlamaConfig(**common, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    yield "llama_scaled", LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True,
                                                       rope_parameters={"rope_theta": 1e4, **scaling}))
    yield "gpt2", GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=40, n_embd=64, n_layer=3, n_head=4))
    yield "vit", ViTForImageClassification(ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                                                     image_size=16, patch_size=4, num_labels=5, layer_norm_eps=1e-6))


def models_of_experts():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(4)
    common = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    plain = {"rope_theta": 1e4, "rope_type": "default"}
    mixtral = MixtralForCausalLM(MixtralConfig(**common, num_key_value_heads=2, intermediate_size=48, num_local_experts=4, rope_parameters=plain))
    yield "mixtral", mixtral
    yield "mixtral_stacked", mixtral
    yield "qwen3_moe", Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, num_key_value_heads=2, head_dim=24, moe_intermediate_size=40, num_experts=6,
                                                          num_experts_per_tok=3, norm_topk_prob=True, rope_parameters=plain))
    yarn = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    for name, q_rank in [("deepseek_v3", 24), ("deepseek_v3_queries", None)]:
        yield name, DeepseekV3ForCausalLM(DeepseekV3Config(
            **common, num_key_value_heads=4, intermediate_size=80, moe_intermediate_size=32, n_routed_experts=8, n_group=4, topk_group=2,
            num_experts_per_tok=3, first_k_dense_replace=1, q_lora_rank=q_rank, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=10, rope_parameters=yarn))


def give_inputs():
    generator = torch.Generator().manual_seed(9)
    text = torch.randint(0, 96, (2, 33), generator=generator)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    safetensors.torch.save_file({"input": text}, FOLDER / "text.safetensors")
    safetensors.torch.save_file({"input": images}, FOLDER / "images.safetensors")
    safetensors.torch.save_file({"input": images[:, :1, :8, :8].contiguous()}, FOLDER / "small_images.safetensors")


def output_of(model, file):
    with torch.no_grad():
        return model.eval()(safetensors.torch.load_file(FOLDER / file)["input"]).logits


def make():
    FOLDER.mkdir(exist_ok=True)
    everything = tensors()
    safetensors.torch.save_file(everything, FOLDER / "all.safetensors")
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    torch.save(everything, FOLDER / "all.pt")
    torch.save({"views": views(base), "deep": [{"a": [1, 2], "b": (0.5, 1)}, "text", None, True, -(2**40)], "parameter":
                torch.nn.Parameter(base.clone()), "module": torch.nn.Linear(2, 3).state_dict(), 5: torch.ones(2)}, FOLDER / "views.pt")
    for protocol in (3, 4, 5):
        torch.save(everything, FOLDER / f"protocol_{protocol}.pt", pickle_protocol=protocol)
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), FOLDER / "optimizer.pt")
    dcp.save(everything, checkpoint_id=FOLDER / "dcp_one", no_dist=True)
    mp.spawn(save_sharded, (str(FOLDER / "dcp_four"), 29000 + os.getpid() % 1000), nprocs=4)
    give_inputs()
    for name, model in models():
        for parameter in model.parameters():  # larger than usual, so that attention depends on positions
            torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(FOLDER / f"hf_{name}", max_shard_size="100KB" if name == "llama" else "5GB")
        images = name == "vit"
        torch.save(output_of(model, "images.safetensors" if images else "text.safetensors"), FOLDER / f"hf_{name}.output")
    for name, model in models_of_experts():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.15)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
        model.save_pretrained(FOLDER / f"hf_{name}", max_shard_size="100KB", save_original_format=name != "mixtral_stacked")
        torch.save(output_of(model, "text.safetensors"), FOLDER / f"hf_{name}.output")


def check_files():
    everything = tensors()
    same_all("safetensors.torch.save_file", huggingface(FOLDER / "from_safetensors"), everything)
    for name in ["all", "protocol_3", "protocol_4", "protocol_5"]:
        same_all(f"torch.save, {name}", huggingface(FOLDER / f"from_{name}"), everything)
    saved = torch.load(FOLDER / "views.pt")
    expected = {f"views.{name}": tensor for name, tensor in saved["views"].items() if name != "again"}
    expected |= {"parameter": saved["parameter"].detach(), "5": saved[5]} | {f"module.{k}": v for k, v in saved["module"].items()}
    got = huggingface(FOLDER / "from_views")
    assert "views.again" not in got or "views.base" not in got
    if "views.again" in got:
        got["views.base"] = got.pop("views.again")
    same_all("torch.save, views", got, expected)
    same_all("dcp.save", huggingface(FOLDER / "from_dcp_one"), everything)
    whole = torch.arange(77, dtype=torch.float32).reshape(11, 7)
    sharded_names = {name: whole for name in ["rows", "grid", "columns", "plain"]} | {"scalar": torch.tensor(3.25), "half": whole.bfloat16()}
    same_all("dcp.save on four ranks", huggingface(FOLDER / "from_dcp_four"), {f"model.{k}": v for k, v in sharded_names.items()})


def check_exports():
    everything = tensors()
    loaded = torch.load(FOLDER / "to.pt", weights_only=True)
    same_all("torch.load(weights_only=True)", loaded, everything)
    mapped = torch.load(FOLDER / "to.pt", weights_only=True, mmap=True)
    same_all("torch.load(mmap=True)", mapped, everything)
    tied = torch.load(FOLDER / "to_views.pt", weights_only=True)
    assert tied["views.again"].data_ptr() == tied["views.base"].data_ptr()
    assert tied["deep.0.a"] == [1, 2] and tied["deep.0.b"] == [0.5, 1.0] and tied["deep.1"] == "text" and tied["deep.3"] is True
    assert tied["deep.4"] == -(2**40)
    target = {name: torch.zeros_like(tensor) for name, tensor in everything.items()}
    dcp.load(target, checkpoint_id=FOLDER / "to_dcp", no_dist=True)
    same_all("dcp.load", target, everything)
    target = {"model.grid": torch.zeros(11, 7), "step": 0, "name": "", "betas": []}
    dcp.load(target, checkpoint_id=FOLDER / "to_dcp_four", no_dist=True)
    assert target["step"] == 12 and target["name"] == "run" and target["betas"] == [0.9, 0.99], target
    same("model.grid", target["model.grid"], torch.arange(77, dtype=torch.float32).reshape(11, 7))
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(FOLDER / "to_dcp", FOLDER / "from_to_dcp.pt")
    same_all("dcp_to_torch_save", torch.load(FOLDER / "from_to_dcp.pt"), everything)


def check_models():
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification
    for name in ["llama", "llama_scaled", "gpt2", "vit"] + [name for name, _ in models_of_experts()]:
        expected = torch.load(FOLDER / f"hf_{name}.output")
        got = huggingface(FOLDER / f"output_{name}")["output"]
        difference = (got - expected).abs().max().item()
        print(f"{name}: logits up to {expected.abs().max():.3f}, ours differ by at most {difference:.2e}")
        assert difference < 1e-5 * expected.abs().max().item()
    for name, file in [("gpt2-debug", "text"), ("llama3-debug", "text"), ("vit-debug", "small_images"), ("mixtral-debug", "text"),
                       ("qwen3-moe-debug", "text"), ("deepseek-debug", "text")]:
        folder = FOLDER / f"zoo_{name}"
        kind = AutoModelForImageClassification if name == "vit-debug" else AutoModelForCausalLM
        model, report = kind.from_pretrained(folder / "model", output_loading_info=True)
        problems = {key: value for key, value in report.items() if value}
        assert not problems, (name, problems)
        got, expected = output_of(model, f"{file}.safetensors"), huggingface(folder / "output")["output"]
        difference = (got - expected).abs().max().item()
        print(f"from_pretrained of {name}: logits up to {expected.abs().max():.3f}, differ by at most {difference:.2e}")
        assert difference < 1e-5 * expected.abs().max().item()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make()
    else:
        check_files()
        check_exports()
        check_models()
