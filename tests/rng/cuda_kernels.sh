#!/usr/bin/env bash
# The CUDA sources compile against this libtorch, whether or not it has CUDA, to kernels for every dtype.
set -euo pipefail
command -v nvcc >/dev/null || { echo "nvcc was not found"; exit 77; }

ninja -C "$DTENSOR_BUILD" cuda-kernels >"$TMPDIR/out" 2>&1 || { cat "$TMPDIR/out"; exit 1; }

# at_least COUNT FILE DTYPE...: so many kernels in the object that write each of these
at_least() {
  local dtype found
  nm -C "$DTENSOR_BUILD/packaging/cuda/$2.cu.o" >"$TMPDIR/symbols"
  for dtype in "${@:3}"; do
    found=$(grep -c " [tTwW] .*::fill<$dtype, dtensor::rng" "$TMPDIR/symbols" || true)
    [ "$found" -ge "$1" ] || { echo "$2.cu: $found kernels that write $dtype, of $1"; exit 1; }
  done
}
at_least 12 stream float double c10::Half c10::BFloat16
at_least 7 stream bool int long short 'signed char' 'unsigned char'
at_least 9 counter float double c10::Half c10::BFloat16
at_least 3 counter bool int long short 'signed char' 'unsigned char'
