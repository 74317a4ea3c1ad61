#!/usr/bin/env bash
# Runs a program as a job of two hosts with two ranks each: tests/comm/two_hosts.sh [PROGRAM ARGUMENTS...]
# The hosts are network namespaces joined by a virtual cable. Exit status 77 where namespaces are not permitted. Without a
# PROGRAM, runs the tests' own, and checks that a killed rank is reported on both hosts.
set -euo pipefail
run=$DTENSOR_BUILD/tools/dtensor-run
a=dtensor-a-$$ b=dtensor-b-$$
cleanup() { ip netns del "$a" 2>/dev/null || true; ip netns del "$b" 2>/dev/null || true; }
trap cleanup EXIT
ip netns add "$a" 2>/dev/null && ip netns add "$b" 2>/dev/null || { echo "network namespaces are not permitted here"; exit 77; }
ip link add "va$$" netns "$a" type veth peer name "vb$$" netns "$b" || { echo "virtual network cables are not permitted here"; exit 77; }
inside() { nsenter --net="/run/netns/$1" "${@:2}"; }  # ip's own way remounts /, which a chroot does not allow
inside "$a" ip addr add 10.77.0.1/24 dev "va$$"
inside "$b" ip addr add 10.77.0.2/24 dev "vb$$"
for end in "$a va$$" "$b vb$$"; do
  set -- $end "$@"
  inside "$1" ip link set lo up
  inside "$1" ip link set "$2" up
  shift 2
done

# job PROGRAM ARGUMENTS...: fails when either host does. Output of host 1 is kept apart.
job() {
  local status=0
  host() { inside "$1" env -u GLOO_SOCKET_IFNAME -u MASTER_ADDR "$run" -n 2 --nnodes 2 --node-rank "$2" --master-addr 10.77.0.1 "${@:3}"; }
  host "$b" 1 "$@" >"${TMPDIR:-/tmp}/host1" 2>&1 &
  host "$a" 0 "$@" || status=$?
  wait $! || status=$?
  return $status
}

if [ $# -gt 0 ]; then
  job "$@" || { status=$?; cat "${TMPDIR:-/tmp}/host1"; exit $status; }
  exit 0
fi
program=("$DTENSOR_BUILD/tests/dtensor-tests" "a rank of a job of processes")
job timeout 60 "${program[@]}" | tee "$TMPDIR/out"
grep -q '4 ranks over shm+gloo' "$TMPDIR/out"
status=0
DTENSOR_TEST_MODE=kill:3 job timeout 60 "${program[@]}" >"$TMPDIR/out" 2>&1 || status=$?
[ "$status" != 0 ]
grep -q 'rank 3 failed: its process ended' "$TMPDIR/out"
grep -q 'rank 3 failed: its process ended' "$TMPDIR/host1"
grep -q 'dtensor-run: rank 3' "$TMPDIR/host1"
