#!/usr/bin/env bash
# Gathers what the image installs into docker/wheels/VARIANT, so that building it needs no network: the dependencies at
# the versions of constraints.txt, for the Python of BASE_IMAGE, and in docker/wheels/build what builds the project itself.
#
#   docker/wheels.sh cpu BASE_IMAGE      or cuda
#
# Does nothing when they are there and neither constraints.txt, the dependencies, the variant nor that Python changed.
# Reads from the environment:
#   PIP_*            as pip does; wheels in ../shared/wheels are offered beside what PIP_FIND_LINKS names
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

# The dependencies without their versions: constraints.txt has these.
requirements() {
  sed -n '/^dependencies = \[/,/^\]/s/^ *"\([a-z0-9-]*\).*/\1/p' "$root/pyproject.toml"
}

python_of() { "$@" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

fingerprint() { { cat "$root/constraints.txt" "${BASH_SOURCE[0]}" && requirements && printf '%s\n' "$variant" "$1"; } | sha256sum | cut -c 1-16; }

# A Python of this machine that is like the image's; without one the image's own, with the machine's network.
find_python() {
  local candidate
  for candidate in "$root/.venv/bin/python" "python$1" python3; do
    if [[ $(python_of "$candidate") == "$1" ]] && "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

links() { [[ ! -d $offered ]] || (cd "$offered" && pwd -P); }

# Runs in the directory that the wheels are gathered in, as a script of its own: on this machine or in a container.
gather() {
  cat <<'SCRIPT'
set -eu
"$1" -m venv "$2/venv"
pip="$2/venv/bin/python -m pip --disable-pip-version-check --quiet wheel --wheel-dir $2/wheels --constraint $2/constraints.txt"
if [ -n "$3" ]; then
  $pip --no-deps --index-url "$3" "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$2/constraints.txt")"
fi
$pip --find-links "$2/wheels" --requirement "$2/requirements.txt"
"$2/venv/bin/python" -m pip --disable-pip-version-check --quiet wheel --wheel-dir "$2/build" --find-links "$2/wheels" \
  --constraint "$2/constraints.txt" hatchling
rm -rf "$2/venv"
SCRIPT
}

# The default index's torch for Linux is the CUDA build: several GB. Whether the other one answers is known in seconds.
torch_index() {
  if [[ $variant != cpu || -z $index ]] || compgen -G "$offered/torch-*cpu*.whl" >/dev/null; then return; fi
  if timeout 10 python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/", timeout=8)' "$index" \
    >/dev/null 2>&1; then
    printf '%s\n' "$index"
  else
    say "$index does not answer: taking torch from where PIP_FIND_LINKS and the default index have it"
  fi
}

main() {
  local version python work
  version=$(python_of "$engine" run --rm --network none "$base" python3) \
    || fail "$base has no python3" "Check with: $engine run --rm $base python3 --version" \
      "Another one: make image BASE_IMAGE=…"
  if [[ -f $target/.made && $(<"$target/.made") == "$(fingerprint "$version")" ]]; then return; fi
  say "gathering what the $variant image installs for Python $version (a minute or two)"
  mkdir -p "$root/docker/wheels"
  work=$(mktemp -d "$root/docker/wheels/.new-XXXXXX")
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$work'" EXIT
  cp "$root/constraints.txt" "$work"
  requirements >"$work/requirements.txt"
  python=$(find_python "$version")
  if [[ -n $python ]]; then
    PIP_FIND_LINKS="${PIP_FIND_LINKS:+$PIP_FIND_LINKS }$(links)" sh -s "$python" "$work" "$(torch_index)" < <(gather) >&2
  else
    gather | "$engine" run --rm -i --network host -v "$work:/work" -v "$(links || printf %s "$work"):/offered:ro" \
      -e PIP_FIND_LINKS=/offered "$base" sh -s python3 /work "$(torch_index)" >&2
  fi || fail "pip could not gather the wheels; its own message is above" \
    "Check the network, or PIP_INDEX_URL, PIP_FIND_LINKS and TORCH_CPU_INDEX if this machine uses a mirror."
  if [[ $variant == cpu ]] && compgen -G "$work/wheels/nvidia_*.whl" >/dev/null; then
    fail "that is the CUDA build of torch: several GB that the cpu image has no use for" \
      "Put a CPU wheel of torch into ../shared/wheels, or say TORCH_CPU_INDEX=…; or: make image VARIANT=cuda"
  fi
  mv "$work/wheels"/*.whl "$work" && rmdir "$work/wheels"
  rm -rf "$root/docker/wheels/build"
  mv "$work/build" "$root/docker/wheels/build"
  fingerprint "$version" >"$work/.made"
  rm -rf "$target"
  chmod 755 "$work"
  mv "$work" "$target"
  say "$(find "$target" -name '*.whl' | wc -l) wheels, $(du -sh "$target" | cut -f 1)"
}

main "$@"
