#!/usr/bin/env bash
# Random programs on random meshes against one device; and that the fuzzer finds an operator whose rule is wrong.
set -euo pipefail
fuzz=$DTENSOR_BUILD/tools/fuzz
[ -x "$fuzz" ] || { echo "the fuzzer is not built: it needs CLI11"; exit 77; }

"$fuzz" --help >"$TMPDIR/said"
grep -q -- --seed "$TMPDIR/said"
"$fuzz" --programs 300 --jobs 2

status=0
"$fuzz" --self-test --programs 20 --ops 12 --jobs 2 >"$TMPDIR/out" || status=$?
grep -q 'fuzz::wrong' "$TMPDIR/out" && grep -Eq 'shrunk to [123]$' "$TMPDIR/out" && [ "$status" = 1 ] ||
  { echo "exit status $status; a wrong rule must be found and shrunk to 3 operators at most:"; cat "$TMPDIR/out"; exit 1; }
for option in --mesh=2x --mesh=9 --programs=0 --pigeon; do
  ! "$fuzz" "$option" >/dev/null 2>&1 || { echo "$option was taken"; exit 1; }
done
