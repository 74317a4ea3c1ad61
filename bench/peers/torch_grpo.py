"""Steps a second of GRPO by TRL's GRPOTrainer, beside build/examples/rl: torch_grpo.py TRL [--steps 60] [--threads 2]

TRL is a folder with its source (the root of a checkout of huggingface/trl). The model is a Llama of 0.1 million parameters, width 64 and two
layers; a step is 16 prompts ("3142=") of 8 answers of 5 tokens, learned from once. Debian: python3-torch, python3-transformers,
python3-accelerate, python3-pandas. Where there is no `datasets` or `pyarrow`, a list stands for the first and nothing for the second: that is
all of them that TRL uses here.
"""
import argparse
import importlib.machinery
import importlib.util
import json
import pathlib
import random
import sys
import tempfile
import time
import types


class Dataset(list):
    """Rows of one column, as the trainer reads them."""

    column_names = ["prompt"]


def stand_in(name, **has):
    """A module of this name where there is none: it has anything that it is asked for, and nothing of it works."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__spec__, module.__path__, module.__version__ = importlib.machinery.ModuleSpec(name, None), [], "0"
        module.__getattr__ = lambda attribute: type(attribute, (), {})
        vars(module).update(has)
        sys.modules[name] = module


def tokenizer(transformers):
    import tokenizers
    characters = "0123456789+-*=:, "
    words = {c: i for i, c in enumerate(characters)} | {f"<{i}>": i for i in range(len(characters), 32)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<31>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<30>", eos_token="<29>", padding_side="left")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trl", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.trl))

    import torch
    import transformers
    transformers.AutoModelForSequenceClassification, transformers.Trainer  # which are loaded when they are named, and look for pyarrow
    torch.set_num_threads(arguments.threads)
    stand_in("datasets", Dataset=Dataset)
    for name in ("pyarrow", "pyarrow.compute", "pyarrow.types"):
        stand_in(name)
    from trl import GRPOConfig, GRPOTrainer

    config = transformers.LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=4, max_position_embeddings=64, pad_token_id=30, eos_token_id=29, bos_token_id=None)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    random.seed(0)
    prompts = ["".join(random.choice("0123456789") for _ in range(4)) + "=" for _ in range(4096)]

    def reward(prompts, completions, **_):
        return [sum(a == b for a, b in zip(answer, sorted(prompt[:4]))) / 4 for prompt, answer in zip(prompts, completions)]

    times = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(output_dir=folder, per_device_train_batch_size=128, num_generations=8, max_completion_length=5, num_iterations=1,
                             beta=0.0, learning_rate=1e-3, max_steps=arguments.steps, report_to="none", use_cpu=True, logging_steps=10**6,
                             save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False, dataloader_num_workers=0)
        trainer = GRPOTrainer(model=model, args=options, reward_funcs=reward, train_dataset=Dataset({"prompt": p} for p in prompts),
                              processing_class=tokenizer(transformers), callbacks=[Clock()])
        trainer.train()
    first = len(times) // 4  # the others warm up
    print(json.dumps({"steps_per_second": (len(times) - 1 - first) / (times[-1] - times[first]),
                      "parameters": sum(p.numel() for p in model.parameters())}))


main()
