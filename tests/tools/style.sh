#!/usr/bin/env bash
# Every file keeps to tools/style, which finds what does not.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"$root/tools/style"

printf '#include <range/v3/view/zip.hpp>\nint tab() {\treturn 0; } \nfmt::print(stderr, "");\n%0141d' 0 >"$TMPDIR/bad.hpp"
! "$root/tools/style" "$TMPDIR/bad.hpp" >"$TMPDIR/out"
for what in 'a tab' 'a blank at the end' '141 characters' 'no newline' 'no comment' 'no #pragma once' 'range-v3 is for sources' 'fmt::print(stderr, ...) throws'; do
  grep -q "bad.hpp:[0-9]*: $what" "$TMPDIR/out" || { echo "'$what' was not found"; cat "$TMPDIR/out"; exit 1; }
done

printf '// Included first.\n#pragma once\n' >"$TMPDIR/pch.hpp"
! "$root/tools/style" "$TMPDIR/pch.hpp" >"$TMPDIR/out"
grep -q 'pch.hpp:1: #pragma once in a header that is compiled by itself' "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 1; }

# Functions of 61 lines, in a class, at an #else, in a table; none of those of 60, nor one that a table makes longer.
body() { printf '  f();\n%.0s' $(seq "$1"); }
table() { printf '      {"}", 1},\n%.0s' $(seq "$1"); }
{
  printf 'namespace {\nstruct Long : Base {\n  Long() : a_{1} {\n'; body 59; printf '}\n};\n}\n'
  printf '#if X\nvoid f() {\n'; body 58; printf '#else\nvoid f() const {\n'; body 58; printf '#endif\n}\n'
  printf 'TEST_CASE("a brace { of text") {\n'; body 59; printf '}\n'
  printf 'const Rows rows() {\n  return {\n'; table 61; printf '  };\n}\n'
  printf 'const Rows kRows{\n'; table 61; printf '  {[](int) {\n'; body 59; printf '}}};\n'
} >"$TMPDIR/long.cpp"
! "$root/tools/style" "$TMPDIR/long.cpp" >"$TMPDIR/out"
found=$(sed -n 's|.*long.cpp:\([0-9]*\): function of 61 lines, at most 60$|\1|p' "$TMPDIR/out" | xargs)
expected=$(grep -nE 'Long\(\)|f\(\) const|of text|\[\]\(int\)' "$TMPDIR/long.cpp" | cut -d : -f 1 | xargs)
[[ $found == "$expected" ]] || { echo "functions at '$found' were found, not at '$expected'"; cat "$TMPDIR/out"; exit 1; }
