#!/usr/bin/env bash
# tools/tidy finds what .clang-tidy lists, in sources, in a unity file's parts and in our headers once, and nothing in a file of the library.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# A build folder of three files with a precompiled header.
build=$TMPDIR/tree/build
mkdir -p "$build" "$TMPDIR/tree/src/pch"
cd "$TMPDIR/tree/src"
printf '#include <string>\n' >pch/pch.hpp
printf '#pragma once\nint in_header() { return 0; }\n' >header.hpp
printf '#include "header.hpp"\nvoid good() {}\n' >good.cpp
printf '#include "header.hpp"\nstd::string bad(std::string a) {\n  auto b = std::move(a);\n  return a + b;\n}\n' >bad.cpp
printf 'void part(const std::string& a) { std::string b = std::move(a); }\n' >part.cpp
printf '#include<../src/part.cpp>\n' >"$build/all-unity0.cpp"
python3 - "$build" <<'END'
import json, sys
lines = [("../src/pch/pch.hpp", "pch.hpp.gch", "")]
lines += [(file, "o" + str(at), "-fpch-preprocess -include pch.hpp ") for at, file in enumerate(["../src/good.cpp", "../src/bad.cpp", "all-unity0.cpp"])]
json.dump([{"directory": sys.argv[1], "file": file, "output": "libdtensor.so.p/" + out,
            "command": f"ccache c++ -Ilibdtensor.so.p -I. -DNDEBUG {more}-std=c++20 -O2 -g1 -o libdtensor.so.p/{out} -c {file}"}
           for file, out, more in lines], open(sys.argv[1] + "/compile_commands.json", "w"))
END
run() { status=0; "$root/tools/tidy" -j 1 "$@" >"$TMPDIR/out" 2>&1 || status=$?; }
expect() { [ "$status" = "$1" ] && grep -Eq "$2" "$TMPDIR/out" || { echo "not exit status $1 and '$2' but $status:"; cat "$TMPDIR/out"; exit 1; }; }

run "$build" "$TMPDIR/tree"
! grep -q 'no clang-tidy' "$TMPDIR/out" || { cat "$TMPDIR/out"; exit 77; }
expect 1 '/src/bad.cpp:4: .*\[bugprone-use-after-move\]'
expect 1 '/src/part.cpp:1: .*\[performance-move-const-arg\]'
expect 1 '/src/header.hpp:2: .*\[misc-definitions-in-headers\]'
expect 1 '^3 files, 3 findings$'
run "$build" bad.cpp good.cpp
expect 1 '^2 files, 2 findings$'
run "$build" nowhere.cpp
expect 2 'nowhere.cpp: the build folder does not compile it'
CLANG_TIDY=$(command -v true) run "$build"
expect 2 'hint: .* apt-get install clang-tidy'

cd "$root"
run "$DTENSOR_BUILD" ops/glu.cpp
expect 0 '^1 files, 0 findings$'
