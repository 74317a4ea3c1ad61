#!/usr/bin/env bash
# Configuring finds a libtorch laid out as its zip is (-Dtorch_root) and what CUDA has beside its nvcc, and says what is missing and where to
# get it.
set -euo pipefail
lib=$(dirname "$(find /usr/lib -name libtorch_cpu.so | head -n 1)")
[ -e "$lib/libtorch_cpu.so" ] || { echo "no libtorch in /usr/lib"; exit 77; }
zip=$TMPDIR/libtorch
mkdir -p "$zip/include" "$zip/lib"
for folder in torch ATen c10 caffe2; do [ ! -e "/usr/include/$folder" ] || ln -s "/usr/include/$folder" "$zip/include/"; done
ln -s "$lib"/lib{torch,c10}*.so* "$zip/lib/"

setup() { CCACHE_DISABLE=1 meson setup "$@" >"$TMPDIR/log" 2>&1; }
says() { grep -Eq "$1" "$TMPDIR/log" || { echo "configuring does not say: $1"; cat "$TMPDIR/log"; exit 1; }; }

setup "$TMPDIR/build" -Dtorch_root="$zip" -Dtests=disabled -Dbench=disabled || { cat "$TMPDIR/log"; exit 1; }
says "libtorch *: [0-9.]+ in $zip"
ninja -C "$TMPDIR/build" libdtensor.so.p/src_base_error.cpp.o
grep -Fq -- "$zip/lib/libtorch_cpu.so" "$TMPDIR/build/build.ninja"

# A fmt that libtorch brings is not mixed with the system's libfmt, and pip's NCCL comes before nvcc's.
! grep -q -- -DFMT_HEADER_ONLY "$TMPDIR/build/build.ninja"
mkdir -p "$TMPDIR/nvidia/nccl/include" "$TMPDIR/nvidia/nccl/lib"
ln -s /usr/include/fmt "$zip/include/"
touch "$TMPDIR/nvidia/nccl/lib/libnccl.so.2"
echo '#error of pip' >"$TMPDIR/nvidia/nccl/include/nccl.h"
setup --reconfigure "$TMPDIR/build" || { cat "$TMPDIR/log"; exit 1; }
grep -q -- -DFMT_HEADER_ONLY "$TMPDIR/build/build.ninja"
grep -q -- -DFMT_HEADER_ONLY "$TMPDIR/build/meson-private/dtensor.pc"
! command -v nvcc >/dev/null || says 'NCCL is 2.18 or later" compiles: NO'

! setup "$TMPDIR/nowhere" -Dtorch_root="$TMPDIR" || { echo "an empty torch_root was taken"; exit 1; }
says "torch_root=$TMPDIR must hold .*lib/libtorch_cpu.so"
! PKG_CONFIG_LIBDIR=$TMPDIR CMAKE=/nowhere setup "$TMPDIR/bare" || { echo "fmt is not needed?"; exit 1; }
says 'fmt was not found; on Debian: apt-get install libfmt-dev'

# Without CLI11 there is no launcher, and all else is built.
mkdir "$TMPDIR/pc"
find $(pkg-config --variable pc_path pkg-config | tr : ' ') -name '*.pc' ! -name CLI11.pc -exec ln -sf {} "$TMPDIR/pc" \; 2>/dev/null || true
without_cli11=("$TMPDIR/no-cli11" -Dexamples=false -Dtests=disabled -Dbench=disabled)
PKG_CONFIG_LIBDIR=$TMPDIR/pc CMAKE=/nowhere setup "${without_cli11[@]}" || { cat "$TMPDIR/log"; exit 1; }
says 'dtensor-run *: NO'

# tools/test and tools/quickstart configure again when a package came or went, whichever of them ran first.
(
  . tools/common.sh
  installed_packages() { echo "$packages"; }
  launcher() {  # launcher PACKAGES: how many targets of that name there are, configured where those are installed
    packages=$1
    CCACHE_DISABLE=1 configure "$TMPDIR/packages" -Dexamples=false -Dtests=disabled -Dbench=disabled >"$TMPDIR/log" 2>&1 || { cat "$TMPDIR/log"; exit 1; }
    meson introspect --targets "$TMPDIR/packages" | { grep -o '"name": "dtensor-run"' || true; } | wc -l
  }
  export CMAKE=/nowhere
  counts=$(PKG_CONFIG_LIBDIR=$TMPDIR/pc launcher "none"; launcher "CLI11"; PKG_CONFIG_LIBDIR=$TMPDIR/pc launcher "none again")
  [ "$(echo $counts)" = "0 1 0" ] || { echo "dtensor-run without, with and again without CLI11: $(echo $counts)"; exit 1; }
)

# nvcc may be a script in a folder for programs that runs the real one.
found() { grep -Eo "Library (cudart|nccl) found: (YES|NO)" "$1"; }
if nvcc=$(command -v nvcc); then
  mkdir "$TMPDIR/bin"
  printf '#!/bin/sh\nexec %s "$@"\n' "$nvcc" >"$TMPDIR/bin/nvcc"
  chmod +x "$TMPDIR/bin/nvcc"
  PATH=$TMPDIR/bin:$PATH setup "$TMPDIR/script" -Dtests=disabled -Dbench=disabled -Dexamples=false || { cat "$TMPDIR/log"; exit 1; }
  diff <(found "$DTENSOR_BUILD/meson-logs/meson-log.txt") <(found "$TMPDIR/log") || { echo "another CUDA is found where nvcc is a script"; exit 1; }
fi
