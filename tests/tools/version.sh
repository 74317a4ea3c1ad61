#!/usr/bin/env bash
# The version is the same in the header, the build, the launcher and the changelog.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
header=$root/include/dtensor/version.hpp
number() { sed -n "s/^#define DTENSOR_VERSION_$1 \([0-9]*\)$/\1/p" "$header"; }
version=$(number MAJOR).$(number MINOR).$(number PATCH)
same() { [ "$2" = "$version" ] || { echo "$1 has version '$2'; expected '$version', as the numbers in include/dtensor/version.hpp"; exit 1; }; }
same "DTENSOR_VERSION_TEXT" "$(sed -n 's/^#define DTENSOR_VERSION_TEXT "\(.*\)"$/\1/p' "$header")"
same "the build" "$(meson introspect --projectinfo "$DTENSOR_BUILD" | sed 's/.*"version": "\([^"]*\)".*/\1/')"
same "dtensor-run --version" "$("$DTENSOR_BUILD/tools/dtensor-run" --version)"
same "CHANGELOG.md" "$(sed -n 's/^## \([0-9.]*\).*/\1/p' "$root/CHANGELOG.md" | head -n 1)"
