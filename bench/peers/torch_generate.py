"""Generation by transformers and llama.cpp, beside bench/generate.cpp: one thread, a Llama of 4.4 million parameters, float32, greedy.

  torch_generate.py make FOLDER            writes the model in Hugging Face's form (and as model.gguf, where python3 has gguf) and its prompts
  torch_generate.py generate FOLDER BATCH  prints tokens a second of transformers' generate: 64 new tokens for each of BATCH prompts
  torch_generate.py continuous FOLDER      the same of its continuous batching: 64 outputs of the lengths of lengths.json, 16 at a time
"""
import argparse
import json
import pathlib
import random
import time

import torch
import transformers

VOCABULARY, PROMPT, TOKENS = 64, 16, 64


def make(folder):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
                                      num_key_value_heads=4, max_position_embeddings=1024, rms_norm_eps=1e-5, bos_token_id=None,
                                      eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    random.seed(1)
    (folder / "prompts.json").write_text(json.dumps([[random.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(64)]))
    lengths = [min(256, max(1, int(random.lognormvariate(3, 1)))) for _ in range(64)]
    (folder / "lengths.json").write_text(json.dumps(lengths))
    try:
        import gguf
    except ImportError:
        return
    write_gguf(gguf, folder / "model.gguf", config, model.state_dict())


def interleaved(rows, heads):
    """Hugging Face turns the first half of a head's dims with the second, llama.cpp each even one with the next."""
    return rows.reshape(heads, 2, -1, rows.size(-1)).transpose(1, 2).reshape(rows.shape)


def write_gguf(gguf, path, config, state):
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("no_vocab")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}
    tensors = {"token_embd": state["model.embed_tokens.weight"], "output_norm": state["model.norm.weight"], "output": state["lm_head.weight"]}
    for layer in range(config.num_hidden_layers):
        for theirs, name in names.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
            tensors[f"blk.{layer}.{name}"] = interleaved(tensor, heads) if heads else tensor
    for name, tensor in tensors.items():
        out.add_tensor(name + ".weight", tensor.float().contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def generate(model, prompts):
    ids = torch.tensor(prompts)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    model.generate(ids, max_new_tokens=4, **options)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        out = model.generate(ids, max_new_tokens=TOKENS, **options)
        best = max(best, (out.numel() - ids.numel()) / (time.perf_counter() - start))
    return best


def continuous(model, prompts, lengths):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=256)
    options = ContinuousBatchingConfig(max_requests_per_batch=16)
    best = 0.0
    for _ in range(3):
        with model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=options, timeout=60) as manager:
            start = time.perf_counter()
            for prompt, length in zip(prompts, lengths):
                manager.add_request(prompt, max_new_tokens=length)
            tokens, left = 0, len(prompts)
            while left:
                result = manager.get_result(timeout=1)
                if result and result.is_finished():
                    tokens += len(result.generated_tokens)
                    left -= 1
            best = max(best, tokens / (time.perf_counter() - start))
        assert tokens == sum(lengths), (tokens, sum(lengths))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "generate", "continuous"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("batch", type=int, nargs="?", default=1)
    o = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    if o.what == "make":
        return make(o.folder)
    model = transformers.LlamaForCausalLM.from_pretrained(o.folder, dtype=torch.float32).eval()
    prompts, lengths = (json.loads((o.folder / name).read_text()) for name in ("prompts.json", "lengths.json"))
    speed = generate(model, prompts[:o.batch]) if o.what == "generate" else continuous(model, prompts, lengths)
    print(f"{o.what}: {speed:.1f} tok/s")


main()
