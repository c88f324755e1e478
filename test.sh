#!/bin/bash
# test.sh [VERB [ARG ...]]: the tests of aifffffs. They mount for real, and compare with what other
# programs make of the same files.
#
#   check [SECTION ...]  all sections, or those named (the default; sections: see SECTIONS)
#   bench [PART ...]     speed, side by side with other programs
#   deps                 installs what is missing to build, run and test
#
#   AIFFFFFS=PROGRAM     the binary to test (./aifffffs)
#   FLAC_TEST_FILES=DIR  also run the public conformance files (ietf-wg-cellar/flac-test-files)
#
# Each line is `ok` or `not ok` and a sentence; a failure shows its evidence; the last line is
# `N passed, N failed`, with `, N skipped` if something is missing.
set -u
cd "$(dirname "$0")" || exit 1
export LC_ALL=C.UTF-8
HERE=$PWD
AIFFFFFS=$(realpath "${AIFFFFFS:-./aifffffs}")
SECTIONS=(mount names conformance)

# ---- the verbs of a test ------------------------------------------------------------------------

passed=0 failed=0 skipped=0
work=$(mktemp -d "${TMPDIR:-/tmp}/aifffffs-test.XXXXXX")
mnt=$work/mnt log=$work/log out=$work/out
mkdir "$mnt"
daemon=

ok() { passed=$((passed + 1)); echo "ok $((passed + failed)) - $1"; }

# not_ok SENTENCE [FILE ...]: the files are evidence
not_ok() {
  failed=$((failed + 1))
  echo "not ok $((passed + failed)) - $1"
  shift
  local f
  for f in "$@"; do [ -s "$f" ] && { echo "# ${f##*/}:"; head -c 4000 "$f" | sed 's/^/#   /'; }; done
}

skip() { skipped=$((skipped + 1)); echo "skip - $1: $2"; }

# check SENTENCE COMMAND ...: the command succeeds
check() {
  local sentence=$1
  shift
  if "$@" >"$work/check" 2>&1; then ok "$sentence"; else
    echo "status $? of: $*" >>"$work/check"
    not_ok "$sentence" "$work/check" "$out" "$log"
  fi
}

# refuse SENTENCE COMMAND ...: the command fails; what it says is in $out
refuse() {
  local sentence=$1
  shift
  if "$@" >"$out" 2>&1; then not_ok "$sentence" "$out"; else ok "$sentence"; fi
}

# equal SENTENCE WANTED GOT
equal() {
  if [ "$2" = "$3" ]; then ok "$1"; else
    printf 'wanted: %s\ngot:    %s\n' "$2" "$3" >"$out"
    not_ok "$1" "$out" "$log"
  fi
}

have() { command -v "$1" >/dev/null 2>&1; }

# until_true SECONDS COMMAND ...: waits for the event, at most so long
until_true() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.02
  done
}

mounted_or_dead() { mountpoint -q "$mnt" || ! kill -0 "$daemon" 2>/dev/null; }

# start SOURCE [OPTION ...]: mounts at $mnt; the log goes to $log
start() {
  local source=$1
  shift
  "$AIFFFFFS" -f "$@" "$source" "$mnt" 2>"$log" &
  daemon=$!
  until_true 20 mounted_or_dead
  mountpoint -q "$mnt" || { not_ok "mounts: $source $*" "$log"; return 1; }
}

# stop: unmounts; the daemon has to leave with status 0 and without a sanitizer's complaint
stop() {
  local status
  fusermount3 -u "$mnt" 2>/dev/null || umount "$mnt" 2>"$out" || umount -l "$mnt"
  wait "$daemon"
  status=$?
  daemon=
  [ "$status" = 0 ] || not_ok "leaves with status 0 (was $status)" "$log"
  if grep -qE 'Sanitizer|runtime error' "$log"; then not_ok 'no sanitizer complains' "$log"; fi
}

# shellcheck disable=SC2317 # called by trap
cleanup() {
  [ -z "$daemon" ] || kill "$daemon" 2>/dev/null
  mountpoint -q "$mnt" && umount -l "$mnt"
  wait
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

stats_lines() { grep -c 'stats threads=' "$log"; }
more_stats() { [ "$(stats_lines)" -gt "$1" ]; }

stats() { # stats FIELD: of the running daemon
  local before
  before=$(stats_lines)
  kill -USR1 "$daemon"
  until_true 10 more_stats "$before"
  grep 'stats threads=' "$log" | tail -n 1 | tr ' ' '\n' | sed -n "s/^$1=//p"
}

