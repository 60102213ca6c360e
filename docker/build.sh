#!/usr/bin/env bash
# docker build, quietly and in the engine itself, which has the base image and is to have the result: docker/build.sh ARG…
# BuildKit may be told to build in a container, which has neither; the engine's own builder is called as its context.
# Reads ENGINE, the client (default: docker). Prints and exits as that does, but for its advice to install BuildKit: either
# builder will do.
set -euo pipefail

engine=${ENGINE:-docker}
BUILDX_BUILDER=$("$engine" context inspect --format '{{.Name}}' 2>/dev/null || echo default)
export BUILDX_BUILDER
exec "$engine" build --quiet "$@" 2> >(exec sed '/^DEPRECATED: The legacy builder/,/^$/d' >&2)
