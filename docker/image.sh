#!/usr/bin/env bash
# Builds the image of a peer from this checkout, and says how large it is. `make image` calls it.
#
# Reads from the environment:
#   BASE_IMAGE     what it starts from (default: the one that the Dockerfile pins, where it is here or can be had; else
#                  docker/base-image.sh)
#   VARIANT        cpu (default) or cuda
#   TAG            its only tag (default: two of them, VERSION-VARIANT and local)
#   ENGINE         the client (default: docker)
#   SWARM_TEST_ID  of which tests it is, a label of all that is built; nobody else sets it
# and what docker/base-image.sh and docker/wheels.sh read. The last line is the image's name, the first if it has two. The
# image that had a tag before is removed when it has none left and nothing was started from it. Two at once take turns.
# Exits 0 when it is built, 1 with the cause and a remedy when not.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
engine=${ENGINE:-docker}
variant=${VARIANT:-cpu}
official=$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile 2>/dev/null || true)
pull_s=60
test_id=${SWARM_TEST_ID:-} test_id=${test_id%%/*}

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
  elif [[ -n $official ]] && { "$engine" image inspect "$official" >/dev/null 2>&1 || timeout "$pull_s" "$engine" pull --quiet "$official" >/dev/null 2>&1; }; then
    printf '%s\n' "$official"
  else
    say "$official is not here and cannot be had: the base is one made from Debian's packages"
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

build() {
  local base=$1 version=$2 tags=("${@:3}") made_from
  made_from=$(commit)
  docker/build.sh --network none --file docker/Dockerfile "${tags[@]/#/--tag=}" \
    --build-arg "BASE_IMAGE=$base" --build-arg "VARIANT=$variant" --build-arg "SOURCE_COMMIT=$made_from" \
    --label "org.opencontainers.image.title=swarm-trainer" --label "org.opencontainers.image.licenses=Apache-2.0" \
    --label "org.opencontainers.image.version=$version" --label "org.opencontainers.image.revision=$made_from" \
    ${test_id:+--build-arg "TEST=$test_id" --label "swarm.test=$test_id"} . >/dev/null
}

ids() {
  local tag
  for tag in "$@"; do "$engine" image inspect --format '{{.Id}}' "$tag" 2>/dev/null || true; done
}

# Images that have no name left: a name that somebody else gave one is theirs.
remove_nameless() {
  local id
  for id in "$@"; do
    if [[ $("$engine" image inspect --format '{{len .RepoTags}}' "$id" 2>/dev/null) == 0 ]]; then
      "$engine" image rm "$id" >/dev/null 2>&1 || true
    fi
  done
}

main() {
  local base version tags before started=$SECONDS
  timeout 20 "$engine" version >/dev/null 2>&1 || fail "no Docker engine answers" "Check with: $engine version" \
    "Without containers: make quickstart"
  [[ $variant == cpu || $variant == cuda ]] || fail "there is no variant $variant" "make image VARIANT=cpu, or cuda"
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  if [[ -n ${TAG:-} ]]; then tags=("swarm-trainer:$TAG"); else tags=("swarm-trainer:$version-$variant" swarm-trainer:local); fi
  # What is built from must stay as it is meanwhile; the lock is this file itself, so that none is left behind.
  exec 9<docker/image.sh
  flock --nonblock 9 || { say "another build from this checkout is under way: waiting for it"; flock 9; }
  base=$(find_base)
  docker/wheels.sh "$variant" "$base"
  before=$(ids "${tags[@]}")
  say "building ${tags[*]} from $base (some five minutes the first time, then seconds)"
  build "$base" "$version" "${tags[@]}" || fail "the build failed; its own message is above"
  # shellcheck disable=SC2086  # one word each
  remove_nameless $before
  say "${tags[*]}: $(sizes "${tags[0]}"), after $((SECONDS - started)) s"
  printf '%s\n' "${tags[0]}"
}

main "$@"
