#!/usr/bin/env bash
# The example of experts on ranks of their own: the losses of one device, and text.
set -euo pipefail
for ranks in 2 3 4; do
  "$DTENSOR_BUILD/examples/experts_apart" --ranks $ranks | grep "apart from one device by .* wrote [1-9]"
done
