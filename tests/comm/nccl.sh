#!/usr/bin/env bash
# The nccl transport on a machine without GPUs: it compiles, links with the real NCCL, and makes the right calls of one that stands in for it.
set -euo pipefail
command -v nvcc >/dev/null || { echo "nvcc was not found"; exit 77; }
targets=(tests/nccl-stand-in tests/nccl-link tests/libnccl-native-stream.a)
known=$(ninja -C "$DTENSOR_BUILD" -t targets all)
[[ $known == *"${targets[0]}:"* ]] || { echo "NCCL was not found, or libtorch has CUDA, and then tests/comm/nccl_gpu.sh is the test"; exit 77; }

ninja -C "$DTENSOR_BUILD" "${targets[@]}" >"$TMPDIR/out" 2>&1 || { cat "$TMPDIR/out"; exit 1; }
"$DTENSOR_BUILD/tests/nccl-link"
timeout 300 "$DTENSOR_BUILD/tests/nccl-stand-in"
DTENSOR_CHECK_CALLS=1 timeout 300 "$DTENSOR_BUILD/tests/nccl-stand-in" "nccl stand-in: all*","[.check]"
DTENSOR_BLOCKING_WAIT=1 timeout 300 "$DTENSOR_BUILD/tests/nccl-stand-in" "nccl stand-in: all*","[.blocking]"
