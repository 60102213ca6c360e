#!/usr/bin/env bash
# Makes the image that docker/Dockerfile starts from, where the one that it pins cannot be had: Debian with Python and its
# venv module, made by debootstrap from the snapshot below, so that it is the same wherever it is made. With --nemesis: the
# image that faults of the network come from; with --observe: Debian's Prometheus. Both are made on an official image where
# one is here or can be had, else on the base where that is here and its apt reaches a mirror, else by debootstrap.
#
# Does nothing when the image is there and was made by this very file. debootstrap needs root, and is installed where
# apt-get can. Nothing is left outside Docker but the packages in the cache. Reads from the environment:
#   DEBIAN_MIRROR  where packages come from (default: the snapshot where its archive answers, else that of debootstrap, or
#                  of the official image: what these have today)
#   DEBIAN_SUITE   the release (default: bookworm, which has Python 3.11)
#   CACHE          where downloaded packages are kept (default: docker/.cache/debs)
#   SNAPSHOTS      the archive of snapshots (default: Debian's)
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

pull_s=60
# Raise it with the digest in the Dockerfile; nothing else of this file depends on it.
snapshot=${SNAPSHOTS:-http://snapshot.debian.org/archive/debian}/20260901T000000Z
pinned=$(sed -n 's/^ARG BASE_IMAGE=//p' "$here/Dockerfile" 2>/dev/null || true)

base=swarm-base:3.11
case "${1:-}" in
  "")
    image=$base packages=python3,python3-venv,ca-certificates
    finish='ln -sf python3 /usr/bin/python'
    otherwise="Or name an image that has Python 3.11: make image BASE_IMAGE=…"
    ;;
  --nemesis)
    image=swarm-nemesis:local packages=iproute2,iptables,libfaketime
    # One place for every architecture.
    finish='cp /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib/libfaketime.so'
    ;;
  --observe)
    image=swarm-observe:local packages=prometheus
    # A volume that is put there begins with this owner.
    finish='install -d -o prometheus -g prometheus /data'
    ;;
  *) fail "no such option: $1" "There is --nemesis, --observe, and nothing." ;;
esac
: "${otherwise:=Or where a registry is reached, as anybody: $engine pull debian:$suite-slim, and this again}"

made_by=$({ cat "${BASH_SOURCE[0]}" && printf '%s\n' "$suite" "$packages"; } | sha256sum | cut -c 1-16)

is_there() {
  [[ $("$engine" image inspect --format '{{ index .Config.Labels "swarm.made-by" }}' "$image" 2>/dev/null) == "$made_by" ]]
}

# An image with apt: an official one that is here, the pinned one where a registry is reached, or the base.
find_official() {
  local each
  for each in "$pinned" "debian:$suite-slim" python:3.11-slim; do
    if [[ -n $each ]] && "$engine" image inspect "$each" >/dev/null 2>&1; then
      printf '%s\n' "$each"
      return
    fi
  done
  if [[ -n $pinned ]] && timeout "$pull_s" "$engine" pull --quiet "$pinned" >/dev/null 2>&1; then
    printf '%s\n' "$pinned"
  else
    "$engine" image inspect "$base" >/dev/null 2>&1 && printf '%s\n' "$base"
  fi
}

# These need no more of a base than apt: who has such an image, or a registry, needs no root.
build_on_official() {
  local official
  official=$(find_official) || { say "there is no image of Debian here, and none can be had: it is made by debootstrap"; return 1; }
  say "making $image from $official (a minute or two)"
  "$here/build.sh" --tag "$image" --label "swarm.made-by=$made_by" --build-arg "OFFICIAL=$official" \
    --build-arg "MIRROR=$mirror" --build-arg "PACKAGES=${packages//,/ }" --build-arg "FINISH=$finish" - >/dev/null < <(on_official) \
    || { say "that did not work, its own message is above: it is made by debootstrap"; return 1; }
}

on_official() {
  cat <<'DOCKERFILE'
ARG OFFICIAL
FROM ${OFFICIAL}
ARG MIRROR=
ARG PACKAGES
ARG FINISH
RUN if [ -n "$MIRROR" ]; then \
      rm -f /etc/apt/sources.list.d/* && . /etc/os-release && echo "deb $MIRROR $VERSION_CODENAME main" >/etc/apt/sources.list; \
    fi \
 && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES \
 && rm -rf /var/lib/apt/lists/* && eval "$FINISH"
ENV LANG=C.UTF-8
CMD ["/bin/sh"]
DOCKERFILE
}

ready_debootstrap() {
  local PATH=$PATH:/usr/sbin:/sbin
  type -p debootstrap && return
  ((EUID == 0)) || fail "debootstrap is not installed" "As root: apt-get install debootstrap" "$otherwise"
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

# Where packages come from; empty: debootstrap's own mirror.
find_mirror() {
  if [[ -n $mirror ]]; then
    printf '%s\n' "$mirror"
  elif timeout 10 wget --quiet --spider --tries=1 --timeout=8 "$snapshot/dists/$suite/Release" 2>/dev/null; then
    printf '%s\n' "$snapshot"
  else
    say "the archive of snapshots does not answer: taking the packages of today, so this image is like no other's bit for bit"
  fi
}

# What tells two such images apart: a hash of the names and versions of their packages.
fingerprint() { dpkg-query --admindir "$1/var/lib/dpkg" --show | sort | sha256sum | cut -c 1-16; }

main() {
  local debootstrap tree
  if is_there || { [[ $image != "$base" ]] && build_on_official; }; then
    printf '%s\n' "$image"
    return
  fi
  debootstrap=$(ready_debootstrap)
  ((EUID == 0)) || fail "debootstrap needs root" "As root, or with sudo: ${BASH_SOURCE[0]} ${1:-}" "$otherwise"
  mkdir -p "$cache"
  exec 9>"$cache/.lock"
  flock 9 # two at once would take each other's half-loaded packages
  tree=$(mktemp -d /var/tmp/swarm-base-XXXXXX)
  # shellcheck disable=SC2064  # the directory of now
  trap "rm -rf '$tree' '$tree.log'" EXIT
  mirror=$(find_mirror)
  say "making $image from $suite${mirror:+ at $mirror} (a minute or two)"
  "$debootstrap" --variant=minbase --force-check-gpg --cache-dir="$cache" --include="$packages" "$suite" "$tree" ${mirror:+"$mirror"} \
    >"$tree.log" 2>&1 || { tail -n 20 "$tree.log" >&2; fail "debootstrap did not succeed" \
      "Its last words are above. Another mirror: DEBIAN_MIRROR=http://… make image" \
      "Signatures are checked: that needs the packages gpgv and debian-archive-keyring."; }
  slim "$tree"
  chroot "$tree" /bin/sh -c "$finish"
  tar -C "$tree" --one-file-system --numeric-owner -c . \
    | "$engine" import --change "LABEL swarm.made-by=$made_by swarm.debian=${mirror:-today} swarm.packages=$(fingerprint "$tree")" \
      --change 'ENV LANG=C.UTF-8' --change 'CMD ["/bin/sh"]' - "$image" >/dev/null
  printf '%s\n' "$image"
}

main "$@"
