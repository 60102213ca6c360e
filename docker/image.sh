#!/usr/bin/env bash
# Builds the image of a peer from this checkout, and says how large it is. `make image` calls it.
#
# Reads from the environment:
#   BASE_IMAGE   what it starts from (default: python:3.11-slim where that is here or can be had; else docker/base-image.sh)
#   VARIANT      cpu (default) or cuda
#   TAG          one more tag (default: local)
#   ENGINE       the client (default: docker)
# and what docker/base-image.sh and docker/wheels.sh read. Tags swarm-trainer:VERSION-VARIANT and swarm-trainer:TAG; the
# last line is the first of them. The image that had the tags before is removed, unless something runs in it.
# Exits 0 when it is built, 1 with the cause and a remedy when not.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
engine=${ENGINE:-docker}
variant=${VARIANT:-cpu}
official=python:3.11-slim
pull_s=60

say() { printf 'image: %s\n' "$*" >&2; }
fail() {
  printf 'image: error: %s\n' "$1" >&2
  shift
  printf 'image:        %s\n' "$@" >&2
  exit 1
}

find_base() {
  if [[ -n ${BASE_IMAGE:-} ]]; then
    printf '%s\n' "$BASE_IMAGE"
  elif "$engine" image inspect "$official" >/dev/null 2>&1 || timeout "$pull_s" "$engine" pull --quiet "$official" >/dev/null 2>&1; then
    printf '%s\n' "$official"
  else
    say "$official is not here and cannot be had"
    docker/base-image.sh
  fi
}

commit() {
  local id
  id=$(git rev-parse HEAD 2>/dev/null) || { echo unknown; return; }
  [[ -z $(git status --porcelain --untracked-files=no 2>/dev/null) ]] || id+=-changed
  printf '%s\n' "$id"
}

# Megabytes of the whole, and of torch with what only it brings along.
sizes() {
  local all torch
  all=$("$engine" image inspect --format '{{.Size}}' "$1")
  torch=$("$engine" run --rm --network none --entrypoint sh "$1" -c \
    'cd /opt/swarm/lib/python3*/site-packages && du -scB1 torch torch-* nvidia* triton* torchgen functorch 2>/dev/null | tail -n 1' \
    | cut -f 1)
  printf '%d MB, %d MB of it without torch\n' $((all / 1000000)) $(((all - torch) / 1000000))
}

main() {
  local base version name tag before started=$SECONDS
  timeout 20 "$engine" version >/dev/null 2>&1 || fail "no Docker engine answers" "Check with: $engine version" \
    "Without containers: make quickstart"
  [[ $variant == cpu || $variant == cuda ]] || fail "there is no variant $variant" "make image VARIANT=cpu, or cuda"
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  name=swarm-trainer:$version-$variant tag=swarm-trainer:${TAG:-local}
  base=$(find_base)
  docker/wheels.sh "$variant" "$base"
  before=$("$engine" image inspect --format '{{.Id}}' "$tag" 2>/dev/null || true)
  say "building $name from $base"
  "$engine" build --quiet --file docker/Dockerfile --tag "$name" --tag "$tag" --build-arg "BASE_IMAGE=$base" \
    --build-arg "VARIANT=$variant" --label "org.opencontainers.image.title=swarm-trainer" \
    --label "org.opencontainers.image.licenses=Apache-2.0" --label "org.opencontainers.image.version=$version" \
    --label "org.opencontainers.image.revision=$(commit)" . >/dev/null \
    || fail "the build failed; its own message is above"
  [[ -z $before || $before == $("$engine" image inspect --format '{{.Id}}' "$tag") ]] \
    || "$engine" image rm "$before" >/dev/null 2>&1 || true
  say "$name, also $tag: $(sizes "$name"), after $((SECONDS - started)) s"
  printf '%s\n' "$name"
}

main "$@"
