#!/usr/bin/env bash
# docker compose with this swarm's file and name, whichever of its versions is installed: docker/compose.sh ps
# Reads from the environment: PROJECT (default: swarm), and what compose.yaml reads.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
elif type -p docker-compose >/dev/null; then
  compose=(docker-compose)
else
  echo "compose: error: neither docker compose nor docker-compose is installed" >&2
  echo "compose:        On Debian: apt-get install docker-compose; else see https://docs.docker.com/compose/install" >&2
  exit 1
fi
exec "${compose[@]}" --project-name "${PROJECT:-swarm}" --file "$here/compose.yaml" "$@"
