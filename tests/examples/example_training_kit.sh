#!/usr/bin/env bash
# The example of the training kit: the losses of one device on several meshes.
set -euo pipefail
for ranks in 1 2 3 4; do
  "$DTENSOR_BUILD/examples/training_kit" --ranks $ranks | grep "apart from one device by"
done
