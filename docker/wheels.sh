#!/usr/bin/env bash
# Gathers what the image installs into docker/wheels/VARIANT, so that building it needs no network: the dependencies, from
# files whose hashes are in locks/ and no others, for the Python of BASE_IMAGE, and in docker/wheels/build what builds the
# project itself.
#
#   docker/wheels.sh cpu BASE_IMAGE      or cuda
#
# Does nothing when they are there and neither the locks, the variant nor that Python changed. Two at once take turns.
# Reads from the environment:
#   PIP_*            as pip does (in the image: where to look and whom to trust); wheels in ../shared/wheels are offered as well
#   TORCH_CPU_INDEX  index of CPU builds of torch, for the variant cpu (default: PyTorch's own)
#   ENGINE           the client (default: docker)
# Exits 0 when they are there, 1 with the cause and a remedy when not.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
variant=${1:?which variant: cpu or cuda} base=${2:?which base image}
engine=${ENGINE:-docker}
index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
target=$root/docker/wheels/$variant
offered=$root/../shared/wheels

say() { printf 'wheels: %s\n' "$*" >&2; }
fail() {
  printf 'wheels: error: %s\n' "$1" >&2
  shift
  printf 'wheels:        %s\n' "$@" >&2
  exit 1
}

# What wheels are made for: version, processor, C library and its version.
python_of() {
  "$@" -c 'import sys, platform as p; print("%d.%d" % sys.version_info[:2], p.machine(), *p.libc_ver())' 2>/dev/null
}

fingerprint() { { cat "$root/locks"/*.txt "${BASH_SOURCE[0]}" && printf '%s\n' "$variant" "$1"; } | sha256sum | cut -c 1-16; }

# Whether what is gathered by the one Python is for the other as well: a C library runs what was made for an older one.
serves() {
  local version machine libc libc_version its
  read -r version machine libc libc_version <<<"$2"
  read -ra its <<<"$1"
  [[ "${its[*]:0:3}" == "$version $machine $libc" ]] && printf '%s\n' "${its[3]:-}" "$libc_version" | sort --check=quiet --version-sort
}

# A Python of this machine that serves the image's; without one the image's own, with the machine's network.
find_python() {
  local candidate about
  for candidate in "$root/.venv/bin/python" "python${1%% *}" python3; do
    if about=$(python_of "$candidate") && serves "$about" "$1" && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

links() { [[ ! -d $offered ]] || (cd "$offered" && pwd -P); }

# Runs as a script of its own, on this machine or in a container: which Python, where to gather, where torch is looked
# for first, a directory of wheels that is offered, the variant. What it makes belongs to whom that place belongs.
gather() {
  cat <<'SCRIPT'
set -eu
python=$1 work=$2 index=$3 offered=$4 variant=$5
# Whoever asked for it must be able to remove it, whatever became of it.
trap 'rm -rf "$work/venv"; chown -R --reference="$work" "$work"' EXIT
trap 'exit 130' INT TERM
# Whatever pip takes has a hash in the locks, also what is offered.
pip() {
  verb=$1
  shift
  "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$verb" --require-hashes --no-deps \
    ${offered:+--find-links "$offered"} "$@"
}
wheel() { pip wheel --use-pep517 --no-build-isolation --wheel-dir "$work/$@"; }
"$python" -m venv "$work/venv"
# Builds what has no wheel.
pip install --requirement "$work/locks/build.txt"
wheel build --requirement "$work/locks/build.txt"
wheel wheels ${index:+--index-url "$index"} --requirement "$work/locks/torch-$variant.txt"
wheel wheels --requirement "$work/locks/run.txt"
SCRIPT
}

gather_here() { sh -s "$1" "$2" "$3" "$(links)" "$variant" < <(gather) >&2; }

# With the machine's network, and what PIP_FIND_LINKS and PIP_CERT name where it is here.
gather_in_image() {
  local work=$1 links place mounts=() settings=(INDEX_URL EXTRA_INDEX_URL FIND_LINKS NO_INDEX TRUSTED_HOST CERT)
  links=$(links)
  for place in ${PIP_FIND_LINKS:-} "${PIP_CERT:-}"; do # pip takes a space for the end of a link, too
    if [[ $place == /* && -e $place ]]; then mounts+=("--volume=$place:$place:ro"); fi
  done
  "$engine" run --rm -i --init --env TINI_KILL_PROCESS_GROUP=1 --network host --volume "$work:/work" \
    ${links:+--volume "$links:/offered:ro"} "${mounts[@]}" "${settings[@]/#/--env=PIP_}" \
    "$base" sh -s python3 /work "$2" "${links:+/offered}" "$variant" < <(gather) >&2
}

# The default index has the CUDA build of torch alone: several GB. Whether the other one answers is known in seconds.
torch_index() {
  if [[ $variant != cpu || -z $index ]] || compgen -G "$offered/torch-*cpu*.whl" >/dev/null; then return; fi
  if timeout 10 python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/", timeout=8)' "$index" \
    >/dev/null 2>&1; then
    printf '%s\n' "$index"
  else
    say "$index does not answer: the CPU build of torch must be where PIP_FIND_LINKS or the default index have it"
  fi
}

main() {
  local version python work from
  # The lock is this file itself, so that none is left behind.
  exec 9<"${BASH_SOURCE[0]}"
  flock 9
  version=$(python_of "$engine" run --rm --network none "$base" python3) \
    || fail "$base has no python3" "Check with: $engine run --rm $base python3 --version" \
      "Another one: make image BASE_IMAGE=…"
  if [[ -f $target/.made && $(<"$target/.made") == "$(fingerprint "$version")" ]]; then return; fi
  say "gathering what the $variant image installs for Python $version (a minute or two)"
  mkdir -p "$root/docker/wheels"
  work=$(mktemp -d "$root/docker/wheels/.new-XXXXXX")
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$work'" EXIT
  cp -r "$root/locks" "$work"
  python=$(find_python "$version")
  from=$(torch_index)
  if [[ -n $python ]]; then gather_here "$python" "$work" "$from"; else gather_in_image "$work" "$from"; fi || {
    (($? != 130)) || exit 130 # Ctrl-C
    fail "pip could not gather the wheels; its own message is above" \
      "Check the network, or PIP_INDEX_URL, PIP_FIND_LINKS and TORCH_CPU_INDEX if this machine uses a mirror." \
      "No matching torch: put its CPU wheel into ../shared/wheels, or say TORCH_CPU_INDEX=…; or: make image VARIANT=cuda" \
      "If hashes do not match: a file that was offered is not what locks/ names."
  }
  mv "$work/wheels"/*.whl "$work" && rmdir "$work/wheels"
  rm -rf "$root/docker/wheels/build" "$work/locks"
  mv "$work/build" "$root/docker/wheels/build"
  fingerprint "$version" >"$work/.made"
  rm -rf "$target"
  chmod 755 "$work"
  mv "$work" "$target"
  say "$(find "$target" -name '*.whl' | wc -l) wheels, $(du -sh "$target" | cut -f 1)"
}

main "$@"
