#!/usr/bin/env bash
# Every file keeps to tools/style, which finds what does not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/tools/style"

printf '#include <range/v3/view/zip.hpp>\nint tab() {\treturn 0; } \n%0141d' 0 >"$TMPDIR/bad.hpp"
! "$root/tools/style" "$TMPDIR/bad.hpp" >"$TMPDIR/out"
for what in 'a tab' 'a blank at the end' '141 characters' 'no newline' 'no comment' 'no #pragma once' 'range-v3 is for sources'; do
  grep -q "bad.hpp:[0-9]*: $what" "$TMPDIR/out" || { echo "'$what' was not found"; cat "$TMPDIR/out"; exit 1; }
done
