# Shell functions that tools/test and tools/quickstart share. Sourced from the project's root.

say() { printf '%s\n' "-- $*"; }

# build/ on Debian 12 and elsewhere, build-SUITE/ in another Debian suite: one tree serves several libtorch versions.
build_folder() {
  local suite
  suite=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}")
  case $suite in trixie | forky | sid) echo "build-$suite" ;; *) echo build ;; esac
}

# As many compilers at once as there are cores, and 2 GB of memory for each.
job_count() {
  local cores memory
  cores=$(env -u OMP_NUM_THREADS nproc)  # which takes that variable for the number of processors
  memory=$(awk '/^MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo 2>/dev/null || echo "$cores")
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# installed_packages: what configuring may find on this machine; nothing where packages are not Debian's.
installed_packages() { dpkg-query -W -f '${binary:Package} ${Version} ${db:Status-Status}\n' 2>/dev/null || true; }

# configure FOLDER [OPTION...]: sets the build folder up, and again when options, the set of files or the installed packages have
# changed. Options that were given to meson by hand stay as they are.
configure() {
  local folder=$1 wanted output options
  shift
  options=("$@")
  wanted=$({ printf '%s\n' "$@"; find src ops rng include tests examples bench tools -name '*.[ch]pp' | LC_ALL=C sort
             installed_packages | sha256sum; })
  if [ -e "$folder/build.ninja" ] && [ "$wanted" = "$(cat "$folder/configured_for.txt" 2>/dev/null)" ]; then return 0; fi
  say "configuring $folder"
  if [ -e "$folder/meson-private/coredata.dat" ]; then
    options+=(--reconfigure)
    meson configure --clearcache "$folder" >/dev/null  # which keeps what was found, also when its package is gone
  fi
  output=$(meson setup "$folder" . "${options[@]}" 2>&1) || { printf '%s\n' "$output" >&2; return 1; }
  printf '%s\n' "$wanted" >"$folder/configured_for.txt"
}

# compile FOLDER [TARGET...]: the library, then what stands on it.
compile() {
  local folder=$1
  shift
  compile_knowing "$(precompiled_headers src)" "$folder" libdtensor.so
  compile_knowing "$(precompiled_headers src tests examples)" "$folder" "$@"
}

# precompiled_headers FOLDER...: what the precompiled headers of these folders are made of, separated by colons. The library's have none of our
# own; the others have dtensor.hpp and all that it includes.
precompiled_headers() {
  local folder own=() found=(include/dtensor/dtensor.hpp)
  for folder in "$@"; do own+=("$folder"/pch); done
  if [ $# -gt 1 ]; then
    own+=(tests/catch.hpp)
    while [ ${#found[@]} -gt 0 ]; do
      own+=("${found[@]}")
      mapfile -t found < <(sed -n 's|^#include <\(dtensor/.*\)>|include/\1|p' "${found[@]}" | sort -u | grep -vxF -f <(printf '%s\n' "${own[@]}"))
    done
  fi
  { find "${own[@]/#/$PWD/}" -name '*.hpp'
    find /usr/include/torch /usr/include/fmt -path '*/torch/version.h' -o -path '*/fmt/core.h'; } 2>/dev/null | LC_ALL=C sort | paste -sd: || true
}

# compile_knowing HEADERS FOLDER [TARGET...]: so that ccache does not preprocess first, serves other checkouts too, and what is compiled with a
# precompiled header. Compilers do not list what is in that header, so it is told: a changed one, or another libtorch, serves nothing that was
# compiled with the one before.
compile_knowing() {
  local headers=$1 folder=$2
  shift 2
  CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_EXTRAFILES=$headers \
    ninja -C "$folder" -j "$(job_count)" "$@"
}
