#!/usr/bin/env bash
# The program that writes text: the same on any number of ranks, streamed or not, from the weights of a run, and refusals in words.
set -euo pipefail
generate=$DTENSOR_BUILD/examples/generate out=$TMPDIR
[ -x "$generate" ] || { echo "the examples are not built"; exit 77; }
text() { "$generate" --dtype float64 --prompt "namespace " --tokens 30 --seed 7 --temperature 0.8 "$@"; }

for model in llama3-debug gpt2-debug; do
  text --model $model --n 3 >"$out/one"
  [ -s "$out/one" ]
  text --model $model --n 3 --stream >"$out/streamed"
  cmp "$out/one" "$out/streamed"
  text --model $model --n 3 --drafts ngram >"$out/guessed"
  cmp "$out/one" "$out/guessed"
  for ranks in 2 4; do
    text --model $model --n 3 --mesh tp=$ranks --stream >"$out/ranks"
    cmp "$out/one" "$out/ranks"
  done
done

# The weights of a run; the text that it wrote while it trained.
"$DTENSOR_BUILD/examples/train" --model llama3-debug --steps 20 --ranks 2 --mesh tp=2 --save "$out/run" --sample-every 10 >"$out/log"
[ "$(grep -c '^sample after [12]0 steps: "' "$out/log")" = 2 ]
text --checkpoint "$out/run" >"$out/trained"
text --checkpoint "$out/run" --mesh tp=2 >"$out/trained_ranks"
cmp "$out/trained" "$out/trained_ranks"
text >"$out/drawn"
! cmp -s "$out/trained" "$out/drawn"

# What is typed, line by line, where there is no terminal: all of it is the prompt.
printf 'namespace ' | "$generate" --dtype float64 --tokens 30 --seed 7 --temperature 0.8 >"$out/piped"
cmp "$out/drawn" "$out/piped"

# So it is for ranks, of which the first reads, in one process and in several.
printf 'namespace ' | "$generate" --dtype float64 --tokens 30 --seed 7 --temperature 0.8 --mesh tp=2 >"$out/piped"
cmp "$out/drawn" "$out/piped"
printf 'namespace ' | "$DTENSOR_BUILD/tools/dtensor-run" -n 2 "$generate" --dtype float64 --tokens 30 --seed 7 --temperature 0.8 >"$out/piped"
cmp "$out/drawn" "$out/piped"

# Groups of ranks share prompts out, or stream them alike.
text --prompt "int main" --prompt "for" --n 2 >"$out/one"
for mesh in dp=2 dp=2,tp=2; do
  text --prompt "int main" --prompt "for" --n 2 --mesh $mesh >"$out/groups"
  cmp "$out/one" "$out/groups"
  text --prompt "int main" --prompt "for" --n 2 --mesh $mesh --stream >"$out/groups"
  cmp "$out/one" "$out/groups"
done

# refuses TEXT OPTION...
refuses() {
  local expected=$1
  shift
  if "$generate" "$@" >"$out/stdout" 2>"$out/stderr"; then echo "it took $*"; exit 1; fi
  grep -Fq -- "$expected" "$out/stderr" || { echo "no '$expected' for $*:"; cat "$out/stderr"; exit 1; }
  [ ! -s "$out/stdout" ]
}
refuses "there is no model 'nosuch'" --model nosuch --prompt a
refuses "takes images" --model vit-debug --prompt a
refuses "are not those of gpt2-debug; hint: --model" --model gpt2-debug --checkpoint "$out/run" --prompt a
refuses "nothing on standard input of the first rank" --mesh tp=2 </dev/null
refuses "unknown dimension 'pp'" --mesh pp=2 --prompt a
refuses "empty prompt" --prompt ""
refuses "got top_p of 0" --prompt a --top-p 0
refuses "bytes of cache" --prompt a --tokens 5000 --cache 0.1
refuses "the longest sequence, with output, has 64" --model gpt2-debug --prompt "$(printf 'a%.0s' {1..70})"
