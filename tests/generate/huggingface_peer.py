"""Writes models with random weights in Hugging Face's form, 64 prompts and what transformers generates: huggingface_peer.py FOLDER"""
import json
import pathlib
import random
import sys

import torch
import transformers

TOKENS = 64


def models():
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=8,
                                     num_key_value_heads=4, max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    gpt2 = transformers.GPT2Config(vocab_size=96, n_positions=256, n_embd=64, n_layer=3, n_head=4, initializer_range=0.3, bos_token_id=None,
                                   eos_token_id=None)
    return {"llama": transformers.LlamaForCausalLM(llama), "gpt2": transformers.GPT2LMHeadModel(gpt2)}


def main(folder):
    random.seed(1)
    prompts = [[random.randrange(96) for _ in range(random.randrange(1, 60))] for _ in range(64)]
    for i in range(3, 64, 4):  # begin as the one before does
        prompts[i] = prompts[i - 1][: len(prompts[i - 1]) * 3 // 4] + prompts[i][:9]
    for name, model in models().items():
        model.save_pretrained(folder / name)
        model = model.eval().double()
        tokens = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
            tokens.append(out[0, len(prompt):].tolist())
            assert len(tokens[-1]) == TOKENS
        (folder / name / "prompts.json").write_text(json.dumps(prompts))
        (folder / name / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
