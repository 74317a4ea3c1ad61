#!/usr/bin/env bash
# Greedy tokens are those of transformers' generate, for a Llama and a GPT-2 of random weights: in any batch, in chunks, with preemption, on
# 1, 2 and 4 ranks. DTENSOR_PEER_PYTHON is a Python that has transformers, where python3 has not.
set -euo pipefail
python=${DTENSOR_PEER_PYTHON:-python3} program=$DTENSOR_BUILD/tests/huggingface-tokens folder=$TMPDIR/generate
[ -x "$program" ] || { echo "the examples are not built"; exit 77; }
why=$("$python" -c 'import safetensors.torch, transformers' 2>&1) || {
  echo "$python has no safetensors and transformers of its own: $(echo "$why" | tail -n 1)"
  exit 77
}
mkdir -p "$folder"
"$python" tests/generate/huggingface_peer.py "$folder"
"$program" "$folder/llama" "$folder/gpt2"
