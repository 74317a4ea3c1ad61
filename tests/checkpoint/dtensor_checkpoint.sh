#!/usr/bin/env bash
# dtensor-checkpoint: what it says of checkpoints, and of what is none.
set -euo pipefail
export OMP_NUM_THREADS=1
tool=$DTENSOR_BUILD/tools/dtensor-checkpoint run=$TMPDIR/run
train() { timeout 300 "$DTENSOR_BUILD/examples/train" --model gpt2-debug --seq 16 --batch 4 --mesh dp=2 --fsdp --every 2 "$@" >/dev/null; }
train --steps 6 --save "$run"

# says TEXT COMMAND...: it succeeds and prints TEXT. fails STATUS TEXT COMMAND...: it ends with STATUS and prints TEXT.
says() {
  local text=$1
  shift
  "$@" >"$TMPDIR/out" 2>&1 || { echo "failed: $*"; cat "$TMPDIR/out"; exit 1; }
  grep -Eq -- "$text" "$TMPDIR/out" || { echo "no '$text' from $*:"; cat "$TMPDIR/out"; exit 1; }
}
fails() {
  local wanted=$1 text=$2 status=0
  shift 2
  "$@" >"$TMPDIR/out" 2>&1 || status=$?
  [ $status = "$wanted" ] && grep -Eq -- "$text" "$TMPDIR/out" || { echo "status $status, expected $wanted with '$text', from $*:"; cat "$TMPDIR/out"; exit 1; }
}
# also TEXT: the last command printed that, too.
also() { grep -Eq -- "$1" "$TMPDIR/out" || { echo "no '$1' in:"; cat "$TMPDIR/out"; exit 1; }; }

says ' 4 .* 2 ' "$tool" list "$run"
says 'step 6, ' "$tool" show "$run"
says 'optimizer.state.model.*exp_avg' "$tool" show "$run/step-4" --only 'optimizer.*'
says '= 4' "$tool" show "$run/step-4" --only schedule.step
says 'every checksum is right' "$tool" verify "$run"
says 'no difference' "$tool" diff "$run/step-4" "$run/step-4"
fails 1 'e-[0-9]+  model\.' "$tool" diff "$run/step-4" "$run/step-6" --only 'model.*'
fails 1 '^and [0-9]+ tensors more that differ$' "$tool" diff "$run/step-4" "$run/step-6" --only 'model.*' --most 0
fails 1 "has a name that matches 'modle" "$tool" diff "$run/step-4" "$run/step-6" --only 'modle.*'

# From each form to the next, and back.
cd "$TMPDIR"
says '^hf: [0-9]+ tensors, .*, of step 6' "$tool" convert run hf --to hf
also "^left out: [0-9]+ names of tensors that do not begin with 'model.': optimizer\..* and [0-9]+ more"
also '^left out: [0-9]+ values, for which .* no place: '
says '^hf.pt: [0-9]+ tensors' "$tool" convert hf hf.pt --to pt
if grep -q 'left out' out; then cat out; exit 1; fi
says '^hf_dcp: ' "$tool" convert hf.pt hf_dcp --to dcp
says '^hf_run/step-7: ' "$tool" convert hf_dcp hf_run/step-7 --to dtensor
says 'every checksum is right' "$tool" verify hf_run
says 'converted_from: torch.distributed' "$tool" show hf_run
says '^hf_again: ' "$tool" convert hf_run hf_again --to hf
for other in hf.pt hf_dcp hf_run hf_again; do says '^no difference$' "$tool" diff hf $other; done
# All of it, with values, as far as the training that goes on with it.
says ' values, ' "$tool" convert run all.pt --to pt
if grep -q 'left out' out; then cat out; exit 1; fi
says ' values, ' "$tool" convert all.pt all_dcp --to dcp
says '^again/step-6: .* values, ' "$tool" convert all_dcp again/step-6 --to dtensor --file-bytes 100KB
says '([2-9]|[0-9]{2,}) files' "$tool" show again
says '^no difference$' "$tool" diff run again
says '^no difference$' "$tool" diff again/step-6 all.pt
train --steps 8 --save on --resume run
train --steps 8 --save on_again --resume again
says '^no difference$' "$tool" diff on on_again
fails 1 '^only in run: schedule.step = 6' "$tool" diff run hf
also '^only in run: model\.'
also '^only in hf: '
fails 1 '^only in run: schedule.step = 6' "$tool" diff hf run
# A part, files of a size.
says '^few: [0-9]+ tensors' "$tool" convert run few --to hf --part optimizer.state.model.
says '^values.pt: 0 tensors, [0-9]+ values' "$tool" convert run values.pt --to pt --part schedule.
also "^left out: [0-9]+ values whose names do not begin with 'schedule.'"
says '^whole: ' "$tool" convert run whole --to hf --part ''
says '^optimizer\.state\.' "$tool" show whole
says '^many: ' "$tool" convert run many --to hf --file-bytes 100000
says '([2-9]|[0-9]{2,}) files' "$tool" show many
# Many files as one, in the form that they have.
says ' and 1 files' "$tool" show few
says '^merged/step-6: .* values, ' "$tool" merge run merged/step-6
says ', .* in [0-9]+ tensors and 1 files' "$tool" show merged
says '^no difference$' "$tool" diff run merged
says '^one: ' "$tool" merge many one
says '^one: [0-9.]+ .* and 1 files' "$tool" show one
says '^no difference$' "$tool" diff many one
says '^one_dcp: ' "$tool" merge all_dcp one_dcp
says '^no difference$' "$tool" diff all_dcp one_dcp
says '([2-9]|[0-9]{2,}) files' "$tool" show again
says '^two/step-6: ' "$tool" merge again two/step-6 --file-bytes 1GiB
fails 1 'has files; expected a new or empty folder' "$tool" merge many one
fails 2 'expected at least one byte' "$tool" merge many none --file-bytes 0
# What is refused leaves nothing.
fails 1 'has files; expected a new or empty folder' "$tool" convert run hf --to hf
fails 1 'has files; expected a new or empty folder' "$tool" convert hf.pt run/step-6 --to dtensor
fails 1 "'hf.pt' exists; hint: convert replaces nothing" "$tool" convert run hf.pt --to pt
fails 1 'it is a file' "$tool" convert run hf.pt --to dcp
fails 1 'there is no ' "$tool" convert none none_hf --to hf
fails 1 "no tensor that begins with 'modle.'; its names begin with .*'model.' \([0-9]+\), .*'optimizer.' \([0-9]+\)" "$tool" convert run none_hf --to hf --part modle.
fails 1 "no name that begins with 'modle.'; .*'schedule.' \([0-9]+\)" "$tool" convert run none.pt --to pt --part modle.
fails 2 'not in \{' "$tool" convert run none_hf --to onnx
fails 2 'to is required' "$tool" convert run none_hf
fails 2 'pt is one file' "$tool" convert run none.pt --to pt --file-bytes 5
fails 2 'file-bytes' "$tool" convert run none_hf --to hf --file-bytes -5
fails 2 'file-bytes: got 0; expected at least one byte' "$tool" convert run none_hf --to hf --file-bytes 0
fails 1 'name of the folder is empty' "$tool" convert run '' --to hf
fails 1 "'run' has no name that matches 'modle" "$tool" show run --only 'modle.*'
fails 1 "there is no 'run/step-777'; the steps of 'run': [0-9]" "$tool" show run/step-777
fails 1 'has no complete step, so there is nothing to remove' "$tool" prune hf
fails 1 'has no complete step, so there is nothing to remove' "$tool" prune none
says '^hf.pt: [0-9.]+ .iB in ' "$tool" show hf.pt
(cd hf && says '^model.safetensors: .* have no checksums' "$tool" verify model.safetensors)
if [ "$(id -u)" != 0 ]; then
  mkdir locked && chmod a-w locked
  fails 1 'Permission denied' "$tool" convert run locked/hf --to hf
  fails 1 'Permission denied' "$tool" convert run locked/hf.pt --to pt
fi
if compgen -G 'none*' || compgen -G '*.part-*'; then exit 1; fi

# Numbers that doubles cannot tell apart, NaN, and further names.
python3 - <<'END'
import json, struct
def save(name, tensors, metadata={}):
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for key, dtype, code, numbers in tensors:
        header[key] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": [len(data), len(data) + struct.calcsize(f"<{len(numbers)}{code}")]}
        data += struct.pack(f"<{len(numbers)}{code}", *numbers)
    text = json.dumps(header).encode()
    open(name, "wb").write(struct.pack("<Q", len(text)) + text + data)
nan = float("nan")
save("1.safetensors", [("large", "I64", "q", [2**53, -2**63]), ("none", "F32", "f", [nan, 1, nan]), ("small", "F32", "f", [1, 2])], {"also": "small"})
save("2.safetensors", [("large", "I64", "q", [2**53 + 1, 2**63 - 1]), ("none", "F32", "f", [nan, nan, 2]), ("small", "F32", "f", [1, 2.5])])
save("3.safetensors", [("large", "I64", "q", [2**53 + 1, -2**63]), ("none", "F32", "f", [nan, 1, nan]), ("small", "F32", "f", [1, 2]), ("also", "F32", "f", [1, 2])])
END
says '^no difference$' "$tool" diff 1.safetensors 1.safetensors
fails 1 '^only in 1.safetensors: also, which is small$' "$tool" diff 1.safetensors 2.safetensors
[ "$(tail -n 3 out | tr -s ' \n' ' ')" = 'inf none 1.845e+19 large 5.000e-01 small ' ] || { cat out; exit 1; }
fails 1 '^only in 1.safetensors: also, which is small$' "$tool" diff 2.safetensors 1.safetensors
fails 1 '^1.000e\+00  large$' "$tool" diff 1.safetensors 3.safetensors
[ "$(wc -l <out)" = 1 ] || { cat out; exit 1; }
# A further name in the part, of a tensor that is not, is kept.
says '^also.pt: 1 tensors' "$tool" convert 1.safetensors also.pt --to pt --part al
says '^so .* \[2\]' "$tool" show also.pt

says 'would remove step 2' "$tool" prune "$run" --keep-last 2 --dry-run
echo '{"step": 2, "value": null}' >"$run/best.json"
says '^kept step 2, the best by best.json' "$tool" prune "$run" --keep-last 2
echo '{"step": ' >"$run/best.json"
fails 1 'is not known which step is the best, and none is removed' "$tool" prune "$run" --keep-last 2
[ "$(ls "$run" | tr '\n' ' ')" = 'best.json step-2 step-4 step-6 ' ] || { ls "$run"; exit 1; }
echo '{"step":2,"value":0.5}' >"$run/best.json"
says 'removed step 2' "$tool" prune "$run" --step 2
[ "$(ls "$run" | tr '\n' ' ')" = 'best.json step-4 step-6 ' ] || { ls "$run"; exit 1; }
says 'removed step 4' "$tool" prune "$run" --keep-last 1

data=$(ls "$run"/step-6/*.safetensors | head -1)
size=$(stat -c %s "$data")
printf 'x' | dd of="$data" bs=1 seek=$((size - 9)) conv=notrunc status=none
fails 1 "tensor '.*': bytes .* are damaged" "$tool" verify "$run"
fails 1 'are damaged' "$tool" convert "$run" none_run --to dtensor
truncate -s $((size - 1)) "$data"
fails 1 "has $((size - 1)) bytes; expected $size" "$tool" verify "$run"
fails 1 'there is no ' "$tool" show "$TMPDIR/none"
fails 1 'has no complete step' "$tool" list "$TMPDIR"
fails 1 'has no checkpoint; expected index.json' "$tool" verify "$TMPDIR"
fails 2 'subcommand is required' "$tool"
says 'diff' "$tool" --help
