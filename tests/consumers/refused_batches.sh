#!/usr/bin/env bash
# A batch of a type that dt::batches cannot visit does not compile, and one error says what to do.
set -euo pipefail
library=$(dirname "$(find "$DTENSOR_PREFIX" -name libdtensor.so)")
export PKG_CONFIG_PATH=$library/pkgconfig
cat >"$TMPDIR/types.hpp" <<'END'
#include <dtensor/data/parts.hpp>
using dtensor::data::PartVisitor;
namespace app {
struct Known { at::Tensor image; };
void visit_parts(PartVisitor& visit, Known& value) { visit(value.image); }
struct Unknown { at::Tensor image; };
struct Unmakeable { explicit Unmakeable(int); at::Tensor image; };
void visit_parts(PartVisitor& visit, Unmakeable& value) { visit(value.image); }
}
END

# compile TYPE: whether a batch of it can be visited; leaves the errors.
compile() {
  printf '#include "types.hpp"\nvoid use(PartVisitor& visit, %s& batch) { visit(batch); }\n' "$1" >"$TMPDIR/program.cpp"
  # shellcheck disable=SC2046
  g++ -std=c++20 -fsyntax-only $(pkg-config --cflags dtensor) "$TMPDIR/program.cpp" >"$TMPDIR/out" 2>&1
}

# refuses TYPE TEXT: there is one error, and it says this.
refuses() {
  ! compile "$1" || { echo "a batch of $1 compiles"; exit 1; }
  [ "$(grep -c 'error: ' "$TMPDIR/out")" = 1 ] && grep -q "error: .*$2" "$TMPDIR/out" || { echo "$1, without '$2':"; cat "$TMPDIR/out"; exit 1; }
}

compile 'std::vector<app::Known>' || { cat "$TMPDIR/out"; exit 1; }
unknown='does not know what this type is made of; .*write: void visit_parts'
refuses 'app::Unknown' "$unknown"
refuses 'std::vector<app::Unknown>' "$unknown"
refuses 'const app::Known' 'by a reference that is not const'
refuses 'std::vector<app::Unmakeable>' 'give its elements a default constructor'
refuses 'std::optional<app::Unmakeable>' 'give it a default constructor'
refuses 'std::vector<bool>' 'use a std::vector<char>'
