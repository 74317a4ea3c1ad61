#!/usr/bin/env bash
# Checkpoints of PyTorch, safetensors and transformers are read bit for bit, those that dtensor writes are read by them, and models give the
# logits that transformers gives. DTENSOR_PEER_PYTHON is a Python that has the three, where python3 does not.
set -euo pipefail
python=${DTENSOR_PEER_PYTHON:-python3} program=$DTENSOR_BUILD/tests/foreign-files folder=$TMPDIR/foreign
peer=tests/checkpoint/foreign_peer.py
[ -x "$program" ] || { echo "the examples are not built"; exit 77; }
why=$("$python" -c 'import torch.distributed.checkpoint, safetensors.torch, transformers; torch.distributed.tensor' 2>&1) || {
  echo "$python has no PyTorch, safetensors and transformers of its own: $(echo "$why" | tail -n 1)"
  exit 77
}

"$python" "$peer" make "$folder"

# convert FORM FROM TO, within the folder
convert() { "$program" convert "$1" "$folder/$2" "$folder/$3"; }
convert huggingface all.safetensors from_safetensors
for name in all views protocol_3 protocol_4 protocol_5; do convert huggingface $name.pt from_$name; done
for name in dcp_one dcp_four; do convert huggingface $name from_$name; done
convert torch all.safetensors to.pt
convert torch views.pt to_views.pt
convert dcp all.safetensors to_dcp
convert dcp dcp_four to_dcp_four
convert huggingface to.pt from_to
convert huggingface to_dcp from_to_dcp

# says FILE TEXT...: the values of a checkpoint have these lines
says() {
  "$program" values "$folder/$1" >"$TMPDIR/out"
  for text in "${@:2}"; do grep -Fxq -- "$text" "$TMPDIR/out" || { echo "$1 lacks '$text':"; cat "$TMPDIR/out"; exit 1; }; done
}
says views.pt 'deep.0.a = [1, 2]' 'deep.0.b = [0.5, 1]' 'deep.1 = text' 'deep.3 = true' 'deep.4 = -1099511627776' 'skipped 1: deep.2 (None)'
grep -Eq '^views.(again is views.base|base is views.again)$' "$TMPDIR/out"
says optimizer.pt 'param_groups.0.lr = 0.001' 'param_groups.0.betas = [0.9, 0.999]' 'param_groups.0.params = [0, 1]'
says dcp_four 'step = 12' 'rate = 0.5' 'name = run' 'betas = [0.9, 0.99]'

# The tool takes them all.
tool=$DTENSOR_BUILD/tools/dtensor-checkpoint
if [ -x "$tool" ]; then
  for other in dcp_one all.safetensors to_dcp from_to; do
    "$tool" diff "$folder/all.pt" "$folder/$other" >"$TMPDIR/out" || { echo "all.pt and $other:"; cat "$TMPDIR/out"; exit 1; }
    grep -q '^no difference$' "$TMPDIR/out"
  done
fi

for name in llama llama_scaled gpt2 vit mixtral mixtral_stacked qwen3_moe deepseek_v3 deepseek_v3_queries; do
  input=text; [ $name = vit ] && input=images
  "$program" logits "$folder/hf_$name" "$folder/$input.safetensors" "$folder/output_$name"
done
"$program" zoo gpt2-debug "$folder/text.safetensors" "$folder/zoo_gpt2-debug"
for name in llama3-debug mixtral-debug qwen3-moe-debug deepseek-debug; do
  "$program" zoo $name "$folder/text.safetensors" "$folder/zoo_$name"
done
"$program" zoo vit-debug "$folder/small_images.safetensors" "$folder/zoo_vit-debug"

"$python" "$peer" check "$folder"
