#!/usr/bin/env bash
# Removes the swarm of docker/up.sh: containers, networks, volumes, in whatever state. `make swarm-down` calls it.
# Keep what was learned first: docker/README.md says how. Reads PROJECT (default: swarm).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
project=${PROJECT:-swarm}
left() {
  docker ps --all --quiet --filter "label=com.docker.compose.project=$project"
  docker network ls --quiet --filter "label=com.docker.compose.project=$project"
  docker volume ls --quiet --filter "label=com.docker.compose.project=$project"
}
found=$(left)
if [[ -z $found ]]; then
  echo "swarm-down: there was none"
  exit
fi
# Peers at their time of grace or not: what they would hand over is removed with them. One after the other: an engine that
# takes many off a network at once may miscount them, and refuses for ever to remove that network then.
docker ps --all -q --filter "label=com.docker.compose.project=$project" | xargs -r -n 1 docker rm --force --volumes >/dev/null 2>&1 || true
down() { COMPOSE_PROFILES=more,nat,observe ./compose.sh down --volumes --remove-orphans --timeout 1; }
# The engine may keep the endpoint of a container that is gone, and refuses to remove its network: take all off it.
detach() {
  local network name
  for network in $(docker network ls --quiet --filter "label=com.docker.compose.project=$project"); do
    for name in $(docker network inspect --format '{{range .Containers}}{{.Name}} {{end}}' "$network"); do
      docker network disconnect --force "$network" "$name" || true
    done
  done
}
down || { detach && down; }
found=$(left)
if [[ -n $found ]]; then
  printf 'swarm-down: error: left behind: %s\n' $found >&2
  exit 1
fi
echo "swarm-down: no container, network or volume is left. To have the disk back, too:"
echo "  docker image prune --force --filter label=swarm.stage=build"
echo "  docker image ls --format '{{.Repository}}:{{.Tag}}' | grep -E '^swarm-(trainer|base|nemesis|observe):' | xargs -r docker image rm"
echo "  rm -rf docker/wheels docker/.cache"
