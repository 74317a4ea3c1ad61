#!/usr/bin/env bash
# Every file keeps to tools/style, which finds what does not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/tools/style"

printf 'int tab() {\treturn 0; } \n%0141d' 0 >"$TMPDIR/bad.hpp"
! "$root/tools/style" "$TMPDIR/bad.hpp" >"$TMPDIR/out"
for what in 'a tab' 'a blank at the end' '141 characters' 'no newline' 'no comment' 'no #pragma once'; do
  grep -q "bad.hpp:[0-9]*: $what" "$TMPDIR/out" || { echo "'$what' was not found"; cat "$TMPDIR/out"; exit 1; }
done
