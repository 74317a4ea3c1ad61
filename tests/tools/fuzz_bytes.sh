#!/usr/bin/env bash
# Every reader of files, messages and texts gets some that were changed at random; and a reader that is wrong is found out.
set -euo pipefail
fuzz=$DTENSOR_BUILD/tools/fuzz-bytes
[ -x "$fuzz" ] || { echo "the fuzzer of bytes is not built: it needs CLI11"; exit 77; }

"$fuzz" --help >"$TMPDIR/said"
grep -q -- --seed "$TMPDIR/said"
[ "$("$fuzz" --list | wc -l)" -ge 25 ]
"$fuzz" --seed 1 --runs 250 --save "$TMPDIR" >"$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }
tail -n 1 "$TMPDIR/out" | grep -q '0 faults$'

"$fuzz" --self-test >"$TMPDIR/out" || { echo "a wrong reader was not found out:"; cat "$TMPDIR/out"; exit 1; }
printf '29501 node7' >"$TMPDIR/address"
"$fuzz" store --file "$TMPDIR/address" >"$TMPDIR/said"
grep -q '^store: read$' "$TMPDIR/said"
printf 'node7' >"$TMPDIR/address"
"$fuzz" store --file "$TMPDIR/address" >"$TMPDIR/said"
grep -q '^store: refused: .*expected such as' "$TMPDIR/said"
for option in --runs=0 --seconds=0 --file=/nonexistent --save=/nonexistent "--file=$TMPDIR/address" --pigeon pigeon; do
  ! "$fuzz" "$option" >/dev/null 2>&1 || { echo "$option was taken"; exit 1; }
done
