#!/usr/bin/env bash
# The example of two meshes: the losses of one device, on meshes that are disjoint, overlap and are one rank.
set -euo pipefail
for ranks in 1 2 3 5; do
  "$DTENSOR_BUILD/examples/two_meshes" --ranks $ranks | grep "apart from one device by"
done
