#!/usr/bin/env bash
# From a clean clone to a swarm that closes steps: the image, text for the trainers, the containers of compose.yaml.
# Returns once the first step is closed. `make swarm-up` calls it, `make swarm-down` ends it all.
#
# Reads from the environment: PROJECT (default: swarm), SWARM_IMAGE (an image to use; without it one is built from this
# checkout), SWARM_DATA_1 and SWARM_DATA_2 (the trainers' text), SWARM_HOST and SWARM_PORT (where the bootstrap is
# published), and what docker/image.sh reads. Exits 0 when a step was closed, 1 with what the peers said when not.
set -euo pipefail
umask 022 # what is made here is read by others: peers are somebody else in their containers

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
patience_s=600

say() { printf 'swarm-up: %s\n' "$*"; }

# Text that comes with Python, half of it for each trainer, where the user has not put any.
text() {
  local who=$1 half=$2 into=$root/docker/data/$1
  [[ -z $(ls -A "$into" 2>/dev/null) ]] || return 0
  docker run --rm --network none --entrypoint python "$SWARM_IMAGE" -c "
from pydoc_data.topics import topics
print('\n\n'.join(text for number, (_, text) in enumerate(sorted(topics.items())) if number % 2 == $half))" \
    >"$into.part"
  mv "$into.part" "$into/topics.txt" # whole or not at all: what lies there is taken for the user's own
  say "put text that comes with Python into docker/data/$who; your own: the same place, or SWARM_DATA_$((half + 1))"
}

# Peers are neither root nor this user: what they are given must be readable for everybody. A relative path is taken as
# compose takes it.
readable() {
  local path=$1 hidden
  [[ $path == /* ]] || path=$root/docker/$path
  if [[ ! -e $path ]]; then
    echo "swarm-up: error: $path is to be given to a peer, and is not there" >&2
    echo "swarm-up:        Check SWARM_DATA_1 and SWARM_DATA_2, then: make swarm-up" >&2
    exit 1
  fi
  hidden=$(find -H "$path" -user 10001 -prune -o \( -type d ! -perm -005 -o -type f ! -perm -004 \) -print -quit) || true
  if [[ -n $hidden ]]; then
    echo "swarm-up: error: peers cannot read $hidden: in their containers they are user 10001" >&2
    printf 'swarm-up:        Type: chmod -R a+rX %q    Then: make swarm-up\n' "$path" >&2
    exit 1
  fi
}

# What the bootstrap has said since we began is cheaper to read than an answer of its own is to get, on a machine that is
# busy starting. (grep reads to the end: who writes into a closed pipe fails, and the line with it.)
since=$(date +%s)
said() { docker logs --since "$since" "$bootstrap" 2>&1; }
closed() { said | grep -E 'step [0-9]+/[0-9]+ +loss' >/dev/null; }
ended() { [[ $(docker inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$bootstrap") == "exited 0" ]]; }

failed() {
  echo "swarm-up: error: $1" >&2
  docker/compose.sh ps >&2
  docker/compose.sh logs --tail 5 >&2
  echo "swarm-up:        More: docker/compose.sh logs NAME. Remove it all: make swarm-down" >&2
  exit 1
}

main() {
  local up
  mkdir -p docker/data/one docker/data/two
  readable run.toml
  readable "${SWARM_DATA_1:-data/one}"
  readable "${SWARM_DATA_2:-data/two}"
  if [[ -z ${SWARM_IMAGE:-} ]]; then
    SWARM_IMAGE=$(docker/image.sh)
  fi
  export SWARM_IMAGE
  text one 0
  text two 1
  say "starting nine peers, $SECONDS s after the beginning"
  up=$SECONDS
  docker/compose.sh up -d || failed "the containers could not be started"
  bootstrap=$(docker/compose.sh ps --quiet --all bootstrap 2>/dev/null || docker/compose.sh ps --quiet bootstrap)
  until closed; do
    if ended; then
      echo "swarm-up: error: $(said | grep -o 'this run ended.*' | tail -n 1 || echo 'this run has ended')" >&2
      echo "swarm-up:        Its model: docker/README.md says how to take it out. For another run: make swarm-down, then make swarm-up" >&2
      exit 1
    fi
    ((SECONDS - up < patience_s)) || failed "no step was closed within $patience_s s"
    sleep 1
  done
  say "the first step is closed: $((SECONDS - up)) s after the start, $SECONDS s in all"
  cat <<TEXT

  docker/compose.sh ps                                     the containers
  docker/compose.sh exec bootstrap swarm peers             the swarm, as one peer sees it
  docker/compose.sh logs -f stage-1-a                      what a peer says
  docker/compose.sh up -d more                             one more peer
  docker/compose.sh --profile nat up -d behind-nat         one that nobody can call (docker/base-image.sh --nemesis first)
  .venv/bin/swarm join "\$(docker/compose.sh exec -T bootstrap swarm invite)"     one outside Docker (make setup first)
  docker/compose.sh kill stage-1-a                         kill one: nothing is lost; start has it back
  .venv/bin/swarm ckpt pull --from "\$(docker/compose.sh exec -T bootstrap swarm invite)"   take the model out
  make swarm-down                                          remove it all, what was learned too
TEXT
}

main "$@"
