#!/usr/bin/env bash
# The kernels' numbers, computed on the CPU, are those that PyTorch has printed on GPUs.
set -euo pipefail
command -v nvcc >/dev/null || { echo "nvcc was not found"; exit 77; }
known=$(ninja -C "$DTENSOR_BUILD" -t targets all)
[[ $known == *"tests/cuda-printed:"* ]] || { echo "the CUDA runtime was not found"; exit 77; }

ninja -C "$DTENSOR_BUILD" tests/cuda-printed >"$TMPDIR/out" 2>&1 || { cat "$TMPDIR/out"; exit 1; }
"$DTENSOR_BUILD/tests/cuda-printed"
