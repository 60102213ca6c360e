#!/usr/bin/env bash
# Makes the image that docker/Dockerfile starts from, where the official python:3.11-slim cannot be had: Debian with
# Python and its venv module, made by debootstrap. With --nemesis: the image that faults of the network come from.
#
# Does nothing when the image is there and was made by this very file. Needs root, and debootstrap, which it installs
# where apt-get can. Nothing is left outside Docker but the packages in the cache. Reads from the environment:
#   DEBIAN_MIRROR  where packages come from (default: debootstrap's own)
#   DEBIAN_SUITE   the release (default: bookworm, which has Python 3.11)
#   CACHE          where downloaded packages are kept (default: docker/.cache/debs)
#   ENGINE         the client (default: docker)
# Prints the image's name as its last line. Exits 0 when it is there, 1 with the cause and a remedy when not.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
mirror=${DEBIAN_MIRROR:-}
suite=${DEBIAN_SUITE:-bookworm}
cache=${CACHE:-$here/.cache/debs}
engine=${ENGINE:-docker}

say() { printf 'base image: %s\n' "$*" >&2; }
fail() {
  printf 'base image: error: %s\n' "$1" >&2
  shift
  printf 'base image:        %s\n' "$@" >&2
  exit 1
}

case "${1:-}" in
  "") image=swarm-base:3.11 packages=python3,python3-venv,ca-certificates ;;
  --nemesis) image=swarm-nemesis:local packages=iproute2,iptables,libfaketime ;;
  *) fail "no such option: $1" "There is --nemesis, and nothing." ;;
esac

made_by=$({ cat "${BASH_SOURCE[0]}" && printf '%s\n' "$suite" "$packages"; } | sha256sum | cut -c 1-16)

is_there() {
  [[ $("$engine" image inspect --format '{{ index .Config.Labels "swarm.made-by" }}' "$image" 2>/dev/null) == "$made_by" ]]
}

ready_debootstrap() {
  local PATH=$PATH:/usr/sbin:/sbin
  type -p debootstrap && return
  ((EUID == 0)) || fail "debootstrap is not installed" "As root: apt-get install debootstrap" \
    "Or name an image that has Python 3.11: make image BASE_IMAGE=…"
  say "installing debootstrap"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    debootstrap debian-archive-keyring gpgv; } \
    >&2 || fail "apt-get could not install debootstrap" "Its own message is above."
  type -p debootstrap
}

# What slim images leave out as well: nobody reads manuals in a container, and apt can fetch its lists again.
slim() {
  rm -rf "$1"/var/cache/apt "$1"/var/lib/apt/lists "$1"/var/log/* "$1"/usr/share/{doc,man,info,locale,lintian} \
    "$1"/var/cache/{debconf/*-old,ldconfig/aux-cache}
  mkdir -p "$1"/var/cache/apt/archives/partial "$1"/var/lib/apt/lists/partial
  find "$1" -xdev -name __pycache__ -type d -prune -exec rm -rf {} +
}

main() {
  local debootstrap tree
  if is_there; then
    printf '%s\n' "$image"
    return
  fi
  debootstrap=$(ready_debootstrap)
  ((EUID == 0)) || fail "debootstrap needs root" "As root, or with sudo: ${BASH_SOURCE[0]} ${1:-}" \
    "Or name an image that has Python 3.11: make image BASE_IMAGE=…"
  mkdir -p "$cache"
  exec 9>"$cache/.lock"
  flock 9 # two at once would take each other's half-loaded packages
  tree=$(mktemp -d /var/tmp/swarm-base-XXXXXX)
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$tree'" EXIT
  say "making $image from $suite${mirror:+ at $mirror} (a minute or two)"
  "$debootstrap" --variant=minbase --force-check-gpg --cache-dir="$cache" --include="$packages" "$suite" "$tree" ${mirror:+"$mirror"} \
    >"$tree.log" 2>&1 || { tail -n 20 "$tree.log" >&2; rm -f "$tree.log"; fail "debootstrap did not succeed" \
      "Its last words are above. Another mirror: DEBIAN_MIRROR=http://… make image" \
      "Signatures are checked: that needs the packages gpgv and debian-archive-keyring."; }
  rm -f "$tree.log"
  slim "$tree"
  [[ $image == *nemesis* ]] || ln -sf python3 "$tree/usr/bin/python"
  # One place for every architecture.
  [[ $image != *nemesis* ]] || cp "$tree"/usr/lib/*/faketime/libfaketimeMT.so.1 "$tree/usr/lib/libfaketime.so"
  tar -C "$tree" --one-file-system --numeric-owner -c . \
    | "$engine" import --change "LABEL swarm.made-by=$made_by" --change 'ENV LANG=C.UTF-8' \
      --change 'CMD ["/bin/sh"]' - "$image" >/dev/null
  printf '%s\n' "$image"
}

main "$@"
