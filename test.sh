#!/bin/bash
# test.sh [VERB [ARG ...]]: the tests of aifffffs. They mount for real, and compare with what other
# programs make of the same files.
#
#   check [SECTION ...]  all sections, or those named (the default; sections: see SECTIONS)
#   bench [PART ...]     speed, side by side with other programs (read random latency listing)
#   stress [SECONDS]     random reads of many readers, every byte compared (60)
#   mutate [N]           N damaged files: right bytes or an error (2000)
#   fuzz [SECONDS]       libFuzzer over layout, tag and sound (120); finds are kept
#   distros [NAME ...]   builds and tests in other Debians, made by debootstrap (root)
#
#   AIFFFFFS=PROGRAM     the binary to test (./aifffffs)
#   FLAC_TEST_FILES=DIR  also run the public conformance files (ietf-wg-cellar/flac-test-files)
#
# Each line is `ok` or `not ok` and a sentence; a failure shows its evidence; the last line is
# `N passed, N failed`, with `, N skipped` if something is missing.
# programs of awk and sed have dollars in single quotes, and ls is one of the things tested
# shellcheck disable=SC2016,SC2012
set -u
cd "$(dirname "$0")" || exit 1
export LC_ALL=C.UTF-8
HERE=$PWD
AIFFFFFS=$(realpath "${AIFFFFFS:-./aifffffs}")
SECTIONS=(mount names sound conformance tags damage change contain faults listing seek foreign ticket threads pages boot shares readers install
  lesson style)

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

# unhung MOUNTPOINT COMMAND ...: its status; a mount that lets it hang for 20 s is cut off, and has failed
unhung() {
  local where=$1 pid
  shift
  "$@" &
  pid=$!
  until_true 20 gone "$pid" || { umount -f "$where"; wait "$pid"; return 1; }
  wait "$pid"
}

gone() { ! kill -0 "$1" || grep -q '^State:.Z' "/proc/$1/status"; }

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

# ---- files to test with -------------------------------------------------------------------------

# raw BYTES SEED: bytes that look like music to nobody, the same each time
raw() {
  /usr/bin/python3 - "$1" "$2" <<'PY'
import random, sys
sys.stdout.buffer.write(random.Random(int(sys.argv[2])).randbytes(int(sys.argv[1])))
PY
}

# tune BITS CHANNELS RATE FRAMES: music-like raw PCM, signed and little-endian
tune() {
  /usr/bin/python3 - "$@" <<'PY'
import math, random, sys
bits, channels, rate, frames = map(int, sys.argv[1:5])
noise, size, top = random.Random(bits * 100 + channels), (bits + 7) // 8, (1 << (bits - 1)) - 1
out = bytearray()
for i in range(frames):
    for c in range(channels):
        v = 0.4 * math.sin(i * 0.05 * (c + 1)) + 0.2 * math.sin(i * i * 1e-6) + 0.02 * noise.uniform(-1, 1)
        out += int(v * top).to_bytes(size, 'little', signed=True)
sys.stdout.buffer.write(out)
PY
}

# flac_of BITS CHANNELS RATE OUT [flac options]: raw PCM on stdin
flac_of() {
  local bits=$1 channels=$2 rate=$3 to=$4
  shift 4
  flac --totally-silent -f --force-raw-format --endian=little --sign=signed --bps="$bits" --channels="$channels" \
    --sample-rate="$rate" --lax "$@" -o "$to" -
}

# tune_flac BITS CHANNELS RATE FRAMES OUT [flac options]
tune_flac() {
  local bits=$1 channels=$2 rate=$3 frames=$4 to=$5
  shift 5
  tune "$bits" "$channels" "$rate" "$frames" | flac_of "$bits" "$channels" "$rate" "$to" "$@"
}

# reference FLAC AIFF: by flac itself, into a file, since only then it can put the sizes into the header
reference() { flac --totally-silent -d -f --force-aiff-format "$1" -o "$2"; }

# bare FLAC: takes all metadata but STREAMINFO off it
bare() { metaflac --remove-all --dont-use-padding "$1"; }

md5_of() { md5sum <"$1" | cut -d' ' -f1; }

# ---- mounting, leaving, refusing ----------------------------------------------------------------

usage_errors() {
  local status
  for args in "" "$work/src" "-o max_threads=0 $work/src $mnt" "-o max_threads=-1 $work/src $mnt" \
    "-o max_threads=x $work/src $mnt" "-o max_threads=100000 $work/src $mnt" "-o nosuchoption $work/src $mnt" \
    "$work/src $mnt three" "-o stat_cache=-1 $work/src $mnt" "$work/src $work/src"; do
    # shellcheck disable=SC2086 # words are wanted
    "$AIFFFFFS" $args >"$out" 2>&1
    status=$?
    equal "bad usage is status 2: aifffffs ${args//"$work"/.}" 2 "$status"
  done
  equal 'nothing is left mounted' "" "$(findmnt -rn -o TARGET | grep -F "$work")"
  "$AIFFFFFS" -o max_threads=100000 "$work/src" "$mnt" 2>"$out"
  check 'the message names the value and the range' grep -q 'max_threads=100000.* 1 to 1024' "$out"
}

# fails_with SENTENCE WORDS COMMAND ...: status 1, one line on stderr with these words, nothing mounted
fails_with() {
  local sentence=$1 words=$2 status
  shift 2
  "$@" >"$work/stdout" 2>"$out"
  status=$?
  if [ "$status" = 1 ] && [ "$(wc -l <"$out")" = 1 ] && grep -qF "$words" "$out" && ! mountpoint -q "$mnt"; then
    ok "$sentence"
  else
    echo "status $status" >>"$out"
    not_ok "$sentence" "$out"
  fi
}

section_mount() {
  local before after
  mkdir -p "$work/src/dir"
  tune_flac 16 2 44100 50000 "$work/src/dir/a.flac" -T TITLE=a
  echo text >"$work/src/plain.txt"
  usage_errors
  fails_with 'a missing source is named' "$work/none: No such file" "$AIFFFFFS" "$work/none" "$mnt"
  fails_with 'a source that is a file is named' "$work/src/plain.txt: Not a directory" "$AIFFFFFS" "$work/src/plain.txt" "$mnt"
  fails_with 'a missing mountpoint is named' "$work/none: No such file" "$AIFFFFFS" "$work/src" "$work/none"
  fails_with 'a mountpoint that is a file is named' "plain.txt: Not a directory" "$AIFFFFFS" "$work/src" "$work/src/plain.txt"

  start "$work/src" || return
  "$AIFFFFFS" "$work/src" "$mnt" 2>"$out"
  equal 'a busy mountpoint is status 1' 1 $?
  check 'and named' grep -q "$mnt: Device or resource busy" "$out"
  check 'a file is there' test -s "$mnt/dir/a.aiff"
  for f in new dir/a.aiff; do
    refuse "no writing to $f" touch "$mnt/$f"
    check 'for it is a read-only file system' grep -q 'Read-only file system' "$out"
  done
  refuse 'no removing' rm -f "$mnt/dir/a.aiff"
  refuse 'no directory' mkdir "$mnt/d"
  refuse 'no renaming' mv "$mnt/plain.txt" "$mnt/p"
  refuse 'no mode' chmod 600 "$mnt/plain.txt"
  equal 'ls -l has nothing to complain of' "" "$(ls -lR "$mnt" 2>&1 >/dev/null)"
  equal 'statfs is the source'\''s' "$(stat -f -c '%S %b %c' "$work/src")" "$(stat -f -c '%S %b %c' "$mnt")"
  equal 'the type and source are shown' "fuse.aifffffs $(realpath "$work/src")" "$(findmnt -rn -o FSTYPE,SOURCE "$mnt")"
  stop
  equal 'nothing is left mounted' "" "$(findmnt -rn -o TARGET "$mnt")"

  for sig in INT TERM HUP; do
    start "$work/src" || return
    (exec 3<"$mnt/dir/a.aiff"; kill "-$sig" "$daemon"; until_true 10 eval '! mountpoint -q "$mnt"')
    equal "SIG$sig unmounts although a file is open" 0 $?
    wait "$daemon"
    equal "and the status is 0" 0 $?
    daemon=
  done

  # in the background, with relative paths
  (cd "$work" && "$AIFFFFFS" src mnt) >"$out" 2>&1
  equal 'goes to the background with status 0' 0 $?
  before=$(md5_of "$mnt/dir/a.aiff")
  check 'and is mounted when it does' mountpoint -q "$mnt"
  check 'unmounts' fusermount3 -u "$mnt"

  # the mountpoint inside the source
  mkdir -p "$work/src/inside/mnt" "$work/src/inside/other"
  "$AIFFFFFS" "$work/src" "$work/src/inside/mnt"
  equal 'mounts inside its source' 0 $?
  equal 'and does not show itself' 'dir inside inside/other plain.txt' \
    "$(cd "$work/src/inside/mnt" && find . -mindepth 1 ! -name '*.aiff' -printf '%P\n' | sort | tr '\n' ' ' | sed 's/ $//')"
  refuse 'nor when asked' timeout 10 stat "$work/src/inside/mnt/inside/mnt"
  after=$(timeout 60 md5sum <"$work/src/inside/mnt/dir/a.aiff" | cut -d' ' -f1)
  equal 'and reads' "$before" "$after"
  check 'unmounts' fusermount3 -u "$work/src/inside/mnt"
  # nor by another way: links that lead back to it, with one worker, which would wait for itself
  ln -s .. "$work/src/inside/loop"
  ln -s ../inside/mnt/dir/a.flac "$work/src/inside/link.flac"
  for how in follow_symlinks no_foreign; do
    "$AIFFFFFS" -s -o "$how,attr_timeout=0,entry_timeout=0" "$work/src" "$work/src/inside/mnt"
    check "a way round to the mountpoint does not hang it ($how)" unhung "$work/src/inside/mnt" /usr/bin/python3 -c '
import os, sys
for path, dirs, files in os.walk(sys.argv[1], followlinks=True):
    if "loop" in path: dirs[:] = [d for d in dirs if d == "inside"] if path.count("loop") < 2 else []
    if path.endswith("/inside") and "mnt" in os.listdir(path): sys.exit("the mountpoint is listed in " + path)
' "$work/src/inside/mnt"
    check "nor does a link into it ($how)" unhung "$work/src/inside/mnt" sh -c 'readlink "$1" || ! test -e "$1"' sh "$work/src/inside/mnt/inside/link.aiff"
    check 'unmounts' fusermount3 -u "$work/src/inside/mnt"
  done
  rm "$work/src/inside/loop" "$work/src/inside/link.flac"
  rmdir "$work/src/inside/mnt" "$work/src/inside/other" "$work/src/inside"

  # over its own source
  "$AIFFFFFS" -o nonempty "$work/src" "$work/src"
  equal 'mounts over its source' 0 $?
  equal 'and reads' "$before" "$(timeout 60 md5sum <"$work/src/dir/a.aiff" | cut -d' ' -f1)"
  check 'unmounts' fusermount3 -u "$work/src"
  check 'and the source is back' test -f "$work/src/dir/a.flac"
}

# ---- names and attributes -----------------------------------------------------------------------

shown() { (cd "$mnt/$1" && find . -mindepth 1 -maxdepth 1 -printf '%f\n' | sort | tr '\n' ' '); }

section_names() {
  local src=$work/names long name size whole f
  mkdir -p "$src/dir.flac" "$src/cases" "$src/clash" "$src/twice" "$src/links" "$src/long" "$src/bad"
  tune_flac 16 1 8000 3000 "$src/one.flac"
  tune_flac 16 1 8000 4000 "$src/two.flac"
  for f in a.FLAC b.Flac c.fLaC 'd e.flac' 'ü.flac' .flac x.flacx flac; do cp "$src/one.flac" "$src/cases/$f"; done
  cp "$src/one.flac" "$src/dir.flac/in.flac"
  # x.aiff is taken; so is x.flac.aiff in the second
  cp "$src/one.flac" "$src/clash/x.flac"
  echo real >"$src/clash/x.aiff"
  cp "$src/one.flac" "$src/twice/x.flac"
  cp "$src/two.flac" "$src/twice/x.FLAC"
  echo real >"$src/twice/x.flac.aiff"
  cp "$src/two.flac" "$src/twice/x.flac.flac"
  long=$(printf 'l%.0s' {1..250})
  cp "$src/one.flac" "$src/long/$long.flac"
  ln -s ../one.flac "$src/links/rel.flac"
  ln -s "$src/two.flac" "$src/links/abs.flac"
  ln -s ../dir.flac "$src/links/todir.flac"
  ln -s none.flac "$src/links/broken.flac"
  ln -s loop.flac "$src/links/loop.flac"
  ln -s ../clash/x.flac "$src/links/clash"
  ln -s ../plain.txt "$src/links/plain"
  echo plain >"$src/plain.txt"
  raw 5000 1 >"$src/bad/random.flac"
  : >"$src/bad/empty.flac"
  chmod 640 "$src/one.flac"
  touch -d '2001-02-03 04:05:06.789' "$src/one.flac"
  mkfifo "$src/fifo"
  reference "$src/one.flac" "$work/one.aiff"
  reference "$src/two.flac" "$work/two.aiff"

  start "$src" || return
  equal 'the last extension, in any case, becomes .aiff' '.flac a.aiff b.aiff c.aiff d e.aiff flac x.flacx ü.aiff ' "$(shown cases)"
  equal 'a directory keeps its name' 'in.aiff ' "$(shown dir.flac)"
  equal 'a taken name is left to its owner' 'x.aiff x.flac.aiff ' "$(shown clash)"
  equal 'who has its own bytes' real "$(cat "$mnt/clash/x.aiff")"
  check 'and the FLAC is beside it' cmp "$work/one.aiff" "$mnt/clash/x.flac.aiff"
  equal 'nothing is hidden, nothing twice' 'x.FLAC.aiff x.aiff x.flac.aiff x.flac.flac.aiff ' "$(shown twice)"
  check 'x.flac is x.aiff' cmp "$work/one.aiff" "$mnt/twice/x.aiff"
  check 'x.FLAC is x.FLAC.aiff' cmp "$work/two.aiff" "$mnt/twice/x.FLAC.aiff"
  equal 'the real x.flac.aiff is itself' real "$(cat "$mnt/twice/x.flac.aiff")"
  check 'x.flac.flac goes on to the next' cmp "$work/two.aiff" "$mnt/twice/x.flac.flac.aiff"
  for name in one.flac cases/a.FLAC cases/a.flac clash/x.flac none.aiff; do
    refuse "no $name" stat "$mnt/$name"
  done
  check 'a name of 255 bytes works' cmp "$work/one.aiff" "$mnt/long/$long.aiff"
  (cd "$mnt" && find . -type f ! -path './bad/*' -exec sh -c 'for f; do [ -e "$f" ] && cat "$f" >/dev/null || echo "$f"; done' sh {} +) >"$out" 2>&1
  equal 'all that is listed can be opened' "" "$(cat "$out")"

  equal 'links are links, and lead to what is shown' \
    'abs.aiff broken.aiff clash loop.aiff plain rel.aiff todir.flac ' "$(shown links)"
  equal 'a relative one' ../one.aiff "$(readlink "$mnt/links/rel.aiff")"
  equal 'an absolute one' "$src/two.aiff" "$(readlink "$mnt/links/abs.aiff")"
  equal 'one to a directory' ../dir.flac "$(readlink "$mnt/links/todir.flac")"
  equal 'a broken one' none.aiff "$(readlink "$mnt/links/broken.aiff")"
  equal 'one to a taken name' ../clash/x.flac.aiff "$(readlink "$mnt/links/clash")"
  check 'reads through a link' cmp "$work/one.aiff" "$mnt/links/rel.aiff"
  check 'and through the taken one' cmp "$work/one.aiff" "$mnt/links/clash"

  equal 'mode without write bits, owner, times, links, inode are the source'\''s' \
    "$(stat -c '440 %u %g %y %h %i' "$src/one.flac")" "$(stat -c '%a %u %g %y %h %i' "$mnt/one.aiff")"
  size=$(stat -c %s "$work/one.aiff")
  equal 'blocks follow the size' $(((size + 511) / 512)) "$(stat -c %b "$mnt/one.aiff")"
  equal 'directory times are the source'\''s' "$(stat -c '%y %h' "$src/cases")" "$(stat -c '%y %h' "$mnt/cases")"
  check 'other files pass' cmp "$src/plain.txt" "$mnt/plain.txt"
  equal 'a fifo is a fifo' fifo "$(stat -c %F "$mnt/fifo")"
  equal 'what is no FLAC is listed' 'empty.aiff random.aiff ' "$(shown bad)"
  for name in random empty; do
    refuse "$name: no stat" stat "$mnt/bad/$name.aiff"
    check "$name: input/output error" grep -q 'Input/output error' "$out"
    refuse "$name: no open" cat "$mnt/bad/$name.aiff"
  done
  equal 'one log line each' 2 "$(grep -c 'bad/.*: not a FLAC file' "$log")"

  # removing the winner of a name brings up the other
  rm "$src/clash/x.aiff"
  until_true 10 cmp -s "$work/one.aiff" "$mnt/clash/x.aiff"
  equal 'a name that has become free is taken' 'x.aiff ' "$(shown clash)"
  stop

  follows "$src" 'follow_symlinks'
  # the same where the kernel has no openat2
  # shellcheck disable=SC2046 # words are wanted
  check 'builds without openat2' cc -std=c11 -O1 -DNO_OPENAT2 $(pkg-config --cflags fuse3 flac) aifffffs.c -o "$work/stepwise" \
    $(pkg-config --libs fuse3 flac) -pthread
  whole=$AIFFFFFS
  AIFFFFFS=$work/stepwise
  follows "$src" 'without openat2'
  start "$src" || return
  equal 'without openat2: links are links' ../one.aiff "$(readlink "$mnt/links/rel.aiff")"
  check 'without openat2: files are files' cmp "$work/one.aiff" "$mnt/cases/a.aiff"
  stop
  AIFFFFFS=$whole

  # a path so long that a part of it is another one
  check 'two trees, one name longer than the other' /usr/bin/python3 - "$src/deep" "$src/one.flac" "$src/two.flac" <<'PY'
import os, shutil, sys
root, one, two = sys.argv[1:]
os.makedirs(root)
here = os.open(root, os.O_RDONLY)
for i in range(14):  # 5 + 14 * 256 bytes, then a name up to byte 3839, and one that begins so
    os.mkdir('d' * 255, dir_fd=here)
    here = os.open('d' * 255, os.O_RDONLY, dir_fd=here)
n = 3839 - (4 + 14 * 256) - 1
for name, source in ('e' * n, two), ('e' * (n + 5), one):
    os.mkdir(name, dir_fd=here)
    d = os.open(name, os.O_RDONLY, dir_fd=here)
    with open(source, 'rb') as f, open('x.flac', 'wb', opener=lambda p, flags: os.open(p, flags, 0o644, dir_fd=d)) as out:
        shutil.copyfileobj(f, out)
PY
  reference "$src/one.flac" "$work/one.aiff"
  start "$src" || return
  equal 'a path of 3,844 bytes gives its own file' "$(md5_of "$work/one.aiff")" "$(/usr/bin/python3 - "$mnt/deep" <<'PY'
import hashlib, os, sys
here = os.open(sys.argv[1], os.O_RDONLY)
for i in range(14):
    here = os.open('d' * 255, os.O_RDONLY, dir_fd=here)
name = max(os.listdir(here), key=len)
here = os.open(name, os.O_RDONLY, dir_fd=here)
with open('x.aiff', 'rb', opener=lambda p, flags: os.open(p, flags, dir_fd=here)) as f:
    print(hashlib.md5(f.read()).hexdigest())
PY
)"
  stop
  rm -rf "$src/deep"
}

# follows SOURCE SENTENCE: what is seen through symlinks
follows() {
  start "$1" -o follow_symlinks || return
  check "$2: a link is what it points at" cmp "$work/two.aiff" "$mnt/links/abs.aiff"
  equal "$2: as a file" 'regular file' "$(stat -c %F "$mnt/links/abs.aiff")"
  equal "$2: a directory as a directory" 'in.aiff ' "$(shown links/todir.flac)"
  equal "$2: a broken one stays a link" 'symbolic link' "$(stat -c %F "$mnt/links/broken.aiff" 2>&1)"
  equal "$2: so does a loop" 'symbolic link' "$(stat -c %F "$mnt/links/loop.aiff" 2>&1)"
  stop
}

# ---- the same bytes -----------------------------------------------------------------------------

# sound_matches NAME BITS CHANNELS RATE FRAMES: header and sound against sox, whole file against flac
sound_matches() {
  local name=$1 bits=$2 channels=$3 rate=$4 frames=$5 type
  tune "$bits" "$channels" "$rate" "$frames" >"$work/raw"
  flac_of "$bits" "$channels" "$rate" "$work/sound/$name.flac" <"$work/raw"
  bare "$work/sound/$name.flac"
  reference "$work/sound/$name.flac" "$work/ref/$name.aiff"
  type=$((bits / 8))
  sox -t raw -e signed -b "$bits" -L -c "$channels" -r "$rate" "$work/raw" -t raw -e signed -b "$bits" -B "$work/ref/$name.raw"
  [ "$(stat -c %s "$work/ref/$name.raw")" = $((type * channels * frames)) ] || not_ok "sox makes $name.raw"
}

# in_pieces FILE: read in many ways, each printing the md5 of what it got
in_pieces() {
  /usr/bin/python3 - "$1" <<'PY'
import hashlib, mmap, os, sys, threading
path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
def cold():
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
def show(what, data):
    print(what, hashlib.md5(data).hexdigest())
cold()
show('forwards', b''.join(os.pread(fd, 4096, at) for at in range(0, size, 4096)))
cold()
show('backwards', b''.join(reversed([os.pread(fd, 4096, at) for at in reversed(range(0, size, 4096))])))
cold()
with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
    show('mmap', bytes(m))
cold()
r, w = os.pipe()
got = bytearray()
def drain():
    while piece := os.read(r, 65536):
        got.extend(piece)
t = threading.Thread(target=drain)
t.start()
at = 0
while at < size:
    at += os.sendfile(w, fd, at, min(size - at, 60000))
os.close(w)
t.join()
show('sendfile', bytes(got))
cold()
parts = [None] * 8
def part(i):
    parts[i] = b''.join(os.pread(fd, 5000, at) for at in range(i * 5000, size, 40000))
threads = [threading.Thread(target=part, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
whole = bytearray(size)
for i in range(8):
    for k, at in enumerate(range(i * 5000, size, 40000)):
        whole[at:at + 5000] = parts[i][k * 5000:(k + 1) * 5000]
show('eight', bytes(whole))
cold()
show('past', os.pread(fd, size + 100000, 0) if size < 1 << 20 else b''.join(os.pread(fd, 1 << 20, a) for a in range(0, size + (2 << 20), 1 << 20)))
print('behind', os.pread(fd, 10, size), os.pread(fd, 10, size + 10000))
print('across', os.pread(fd, 100, size - 7) == os.pread(fd, 7, size - 7))
PY
}

section_sound() {
  local f name want
  mkdir -p "$work/sound" "$work/ref"
  # whole and odd lengths; the pad byte; one sample; less than a block; silence without a sample
  sound_matches m8 8 1 44100 44101
  sound_matches s8 8 2 22050 30001
  sound_matches m16 16 1 44100 100001
  sound_matches s16 16 2 44100 300007
  sound_matches m24 24 1 96000 101
  sound_matches s24 24 2 96000 150003
  sound_matches c16 16 6 48000 20011
  sound_matches one 16 2 44100 1
  sound_matches r8 8 1 1 4411
  flac_of 16 2 44100 "$work/sound/none.flac" </dev/null
  bare "$work/sound/none.flac"
  start "$work/sound" || return
  for f in "$work"/sound/*.flac; do
    name=$(basename "$f" .flac)
    [ "$name" = none ] && continue
    equal "$name: the size is exact before the first read" "$(stat -c %s "$work/ref/$name.aiff")" "$(stat -c %s "$mnt/$name.aiff")"
    equal "$name: the md5 of the whole file is that of flac -d" "$(md5_of "$work/ref/$name.aiff")" "$(md5_of "$mnt/$name.aiff")"
    check "$name: cmp is silent" cmp "$work/ref/$name.aiff" "$mnt/$name.aiff"
    equal "$name: the sound is what sox makes of the same PCM" "$(md5_of "$work/ref/$name.raw")" \
      "$(tail -c +55 "$mnt/$name.aiff" | head -c "$(stat -c %s "$work/ref/$name.raw")" | md5sum | cut -d' ' -f1)"
  done
  /usr/bin/python3 - "$mnt/none.aiff" >"$out" <<'PY'
import struct, sys
d = open(sys.argv[1], 'rb').read()
print(len(d), struct.unpack('>4sI4s', d[:12]), struct.unpack('>HIH', d[20:28]), struct.unpack('>4sIII', d[38:54]))
PY
  equal 'no samples: a valid AIFF' "54 (b'FORM', 46, b'AIFF') (2, 0, 16) (b'SSND', 8, 0, 0)" "$(cat "$out")"

  for name in s16 s24 m8; do
    want=$(md5_of "$work/ref/$name.aiff")
    in_pieces "$mnt/$name.aiff" >"$out" 2>&1
    for how in forwards backwards mmap sendfile eight past; do
      equal "$name read $how" "$how $want" "$(grep "^$how" "$out")"
    done
    equal "$name: nothing behind the end" "behind b'' b''" "$(grep '^behind' "$out")"
    equal "$name: across the end" 'across True' "$(grep '^across' "$out")"
  done
  echo 3 >/proc/sys/vm/drop_caches 2>/dev/null
  (cd "$mnt" && find . -name '*.aiff' ! -name none.aiff -print0 | xargs -0 -P8 -n1 md5sum | sort) >"$work/all"
  (cd "$work/ref" && md5sum ./*.aiff | sort) >"$out"
  check 'eight files at once' cmp "$out" "$work/all"
  cp -r "$mnt" "$work/copy" && (cd "$work/copy" && find . -name '*.aiff' ! -name none.aiff -exec md5sum {} + | sort) >"$work/all"
  check 'cp -r copies the same' cmp "$out" "$work/all"
  for name in m8 s16 s24 m24 c16; do
    sox "$work/copy/$name.aiff" -n stat >"$work/all" 2>&1
    equal "$name plays in sox without a warning" "0 " "$? $(grep -iE 'warn|fail' "$work/all")"
    equal "$name: ffprobe has no complaint" "" "$(ffprobe -v warning "$work/copy/$name.aiff" 2>&1)"
    equal "$name: sndfile-info has no complaint" "" "$(sndfile-info "$work/copy/$name.aiff" | grep -F '***')"
  done
  stop
  rm -rf "$work/copy"
}

# ---- the public conformance files ---------------------------------------------------------------

# as_far_as_streaminfo FLAC AIFF: what the mount gives is what flac gives, as far as STREAMINFO says, or
# a clear error; bounded in time. Prints same, error or what is wrong.
as_far_as_streaminfo() {
  /usr/bin/python3 - "$1" "$2" "$work" <<'PY'
import errno, os, subprocess, sys
flac, aiff, work = sys.argv[1:]
try:
    fd = os.open(aiff, os.O_RDONLY)
except OSError as e:
    print('error' if e.errno in (errno.EIO, errno.EFBIG, errno.ENOENT) else 'errno %d' % e.errno)
    sys.exit()
try:
    head = os.pread(fd, 54, 0)
except OSError as e:  # the kernel asks for a page, with the sound behind the header
    print('error' if e.errno == errno.EIO else 'errno %d' % e.errno)
    sys.exit()
size = int.from_bytes(head[42:46], 'big') - 8
try:  # raw output ends where AIFF output would spin
    raw = subprocess.run(['flac', '-d', '--totally-silent', '-F', '-c', '--force-raw-format', '--endian=big', '--sign=signed', flac],
                         capture_output=True, timeout=60).stdout
except subprocess.TimeoutExpired:
    raw = None
got, failed = b'', False
while len(got) < size:
    try:
        piece = os.pread(fd, min(65536, size - len(got)), 54 + len(got))
    except OSError as e:
        failed = e.errno == errno.EIO
        break
    if not piece:
        break
    got += piece
if raw is None:
    print('error' if failed else 'flac hangs, we do not')
elif not failed and len(got) == size and (got == raw[:size] or not raw):
    print('same')
elif failed and got == raw[:len(got)]:
    print('error')
elif failed and not raw:
    print('error')
else:
    print('different: %d of %d bytes, flac has %d' % (len(got), size, len(raw)))
PY
}

section_conformance() {
  local files=${FLAC_TEST_FILES:-} src=$work/conformance f name got
  [ -n "$files" ] || { skip 'the public conformance files' 'FLAC_TEST_FILES is not set'; return; }
  mkdir -p "$src/bare" "$work/ref"
  for f in "$files"/subset/*.flac "$files"/uncommon/*.flac "$files"/faulty/*.flac; do
    name=$(basename "$(dirname "$f")")-$(basename "$f")
    cp "$f" "$src/${name:0:1}${name#*-}"
  done
  for f in "$files"/subset/*.flac "$files"/uncommon/0[5789]*.flac; do
    name=$(basename "$f")
    [ "$(basename "$(dirname "$f")")" = subset ] && name=s$name || name=u$name
    cp "$f" "$src/bare/$name"
    bare "$src/bare/$name"
  done
  chmod -R u+w "$src"
  start "$src" || return
  for f in "$src"/bare/*.flac; do
    name=$(basename "$f" .flac)
    if [[ $name = u05* ]] && [ "$(stat -c %s "$mnt/bare/$name.aiff" 2>/dev/null)" = "" ]; then
      check "$name: refused with a log line by a libFLAC without 32 bits" grep -q 'more than 24 bits per sample' "$log"
      continue
    fi
    reference "$f" "$work/scratch.aiff"
    equal "$name: as flac -d, byte for byte" "$(md5_of "$work/scratch.aiff")" "$(md5_of "$mnt/bare/$name.aiff")"
    equal "$name: and the sound with its metadata on" "$(tail -c +55 "$work/scratch.aiff" | md5sum)" \
      "$(tail -c +55 "$mnt/$name.aiff" | head -c $(($(stat -c %s "$work/scratch.aiff") - 54)) | md5sum)"
  done
  for f in "$src"/u0[1-4]* "$src"/u1* "$src"/f*; do
    name=$(basename "$f" .flac)
    got=$(timeout 120 bash -c "$(declare -f as_far_as_streaminfo); work='$work' as_far_as_streaminfo '$f' '$mnt/$name.aiff'")
    case $got in
      same | error) ok "$name: as flac as far as STREAMINFO says, or an error ($got)" ;;
      *) echo "$got" >"$out"; not_ok "$name: as flac as far as STREAMINFO says, or an error" "$out" ;;
    esac
  done
  stop
}

# ---- tags ---------------------------------------------------------------------------------------

# tags_tools: what the Python of this section shares. It makes FLAC files byte by byte, so that they
# can be wrong on purpose, and takes AIFF and ID3v2.3 apart by the letter of their texts.
tags_tools() {
  cat >"$work/tags/tagtools.py" <<'PY'
import os, re, struct, sys, traceback, warnings
warnings.simplefilter('error')
from mutagen.aiff import AIFF

SRC, MNT, LOG, WORK = (os.environ['TAGS_' + v] for v in ('SRC', 'MNT', 'LOG', 'WORK'))
PREFIX = os.path.basename(sys.argv[0])[:-3]
made = 0


def test(sentence):
    """Runs the function at once, and says what came of it."""
    def run(f):
        try:
            f()
            print('ok\t' + sentence, flush=True)
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)
            at = ', '.join('line %d' % s.lineno for s in where[1:4])
            said = '%s: %s (%s)' % (type(e).__name__, e, at)
            print('no\t%s\t%s' % (sentence, said[:3000].replace('\\', '\\\\').replace('\n', '\\n')), flush=True)
    return run


def same(wanted, got, what=''):
    if wanted != got:
        raise AssertionError('%s\nwanted: %.1200r\ngot:    %.1200r' % (what, wanted, got))


def true(condition, what):
    if not condition:
        raise AssertionError(what)


def content_of(path):
    with open(path, 'rb') as f:
        return f.read()


def data(s):
    return s.encode() if isinstance(s, str) else s


def comment_block(comments, vendor=b'tests'):
    parts = [struct.pack('<I', len(vendor)), vendor, struct.pack('<I', len(comments))]
    for c in comments:
        parts += [struct.pack('<I', len(data(c))), data(c)]
    return b''.join(parts)


def picture_block(content, kind=3, mime='image/png', desc=''):
    mime, desc = data(mime), data(desc)
    return b''.join([struct.pack('>II', kind, len(mime)), mime, struct.pack('>I', len(desc)), desc,
                     struct.pack('>IIIII', 4, 4, 24, 0, len(content)), content])


def block(kind, content, last=False):
    return bytes([kind | (128 if last else 0)]) + struct.pack('>I', len(content))[1:] + content


def sound_of(base):
    """STREAMINFO and the frames of a FLAC file."""
    raw = content_of('%s/%s.flac' % (WORK, base))
    same(b'fLaC', raw[:4])
    at, last = 4, False
    while not last:
        last = raw[at] & 128
        at += 4 + int.from_bytes(raw[at + 1:at + 4], 'big')
    return raw[8:42], raw[at:]


def new_name():
    global made
    made += 1
    return '%s-%d' % (PREFIX, made)


def show(comments=None, pictures=(), blocks=(), base='even'):
    """Makes a FLAC file. Returns the path at which the mount shows it."""
    name = new_name()
    info, frames = sound_of(base)
    parts = [block(4, comment_block(comments))] if comments is not None else []
    parts += [block(6, p) for p in pictures] + [block(k, c) for k, c in blocks]
    with open('%s/%s.flac' % (SRC, name), 'wb') as f:
        f.write(b'fLaC' + block(0, info) + b''.join(parts) + block(1, bytes(4), True) + frames)
    return '%s/%s.aiff' % (MNT, name)


def read_all(path):
    size = os.stat(path).st_size
    whole = content_of(path)
    same(size, len(whole), 'stat size and bytes delivered')
    return whole


def chunks(whole):
    same((b'FORM', b'AIFF'), (whole[:4], whole[8:12]))
    same(len(whole) - 8, int.from_bytes(whole[4:8], 'big'), 'FORM size')
    at, found = 12, []
    while at < len(whole):
        n = int.from_bytes(whole[at + 4:at + 8], 'big')
        true(at + 8 + n + n % 2 <= len(whole), 'a chunk ends inside FORM')
        found.append((whole[at:at + 4], whole[at + 8:at + 8 + n]))
        if n % 2:
            same(0, whole[at + 8 + n], 'pad byte')
        at += 8 + n + n % 2
    return found


def tag_of(path, base='even'):
    """The content of the ID3 chunk, or None; the rest of the file has to be what `flac -d` writes."""
    whole = read_all(path)
    plain = content_of('%s/%s.aiff' % (WORK, base))
    same(plain[:4] + whole[4:8] + plain[8:], whole[:len(plain)], 'header and sound')
    found = chunks(whole)
    ids = [c[0] for c in found]
    if len(whole) == len(plain):
        same([b'COMM', b'SSND'], ids)
        return None
    same([b'COMM', b'SSND', b'ID3 '], ids)
    return found[2][1]


def frames_of(tag):
    """[(id, body)], with the header and the padding as they have to be."""
    same(b'ID3\3\0\0', tag[:6], 'ID3v2.3.0 without flags')
    true(all(b < 128 for b in tag[6:10]), 'synchsafe size')
    same(len(tag) - 10, tag[6] << 21 | tag[7] << 14 | tag[8] << 7 | tag[9], 'tag size')
    same(0, len(tag) % 2, 'an even chunk')
    at, frames = 10, []
    while tag[at]:
        true(re.fullmatch(rb'[A-Z0-9]{4}', tag[at:at + 4]), 'a frame id at %d: %r' % (at, tag[at:at + 4]))
        n = int.from_bytes(tag[at + 4:at + 8], 'big')
        same(b'\0\0', tag[at + 8:at + 10], 'frame flags')
        true(n > 0 and at + 10 + n <= len(tag), 'frame size %d' % n)
        frames.append((tag[at:at + 4].decode(), tag[at + 10:at + 10 + n]))
        at += 10 + n
    true(10 <= len(tag) - at <= 11, '%d bytes of padding' % (len(tag) - at))
    same(bytes(len(tag) - at), tag[at:], 'padding')
    true(frames, 'a frame')
    return frames


def text(encoding, raw):
    """A string as it is stored. Encoding 0 is for ASCII; in 1 each has its mark and no terminator."""
    if encoding == 0:
        s = raw.decode('ascii')
    else:
        same(1, encoding, 'encoding')
        same(b'\xff\xfe', raw[:2], 'byte order mark of %r' % raw[:80])
        s = raw[2:].decode('utf-16-le')
    true('\0' not in s, 'no NUL in %r' % s)
    return s


def head(encoding, raw):
    """A terminated string, and what follows it."""
    if encoding == 0:
        end, width = raw.index(b'\0'), 1
    else:
        end, width = next(i for i in range(0, len(raw), 2) if raw[i:i + 2] == b'\0\0'), 2
    return text(encoding, raw[:end]), raw[end + width:]


def parse(frame):
    """(key, value), as the mapping table writes them; APIC: (APIC, (MIME type, type, description, data))."""
    name, raw = frame
    if name[0] == 'W' and name != 'WXXX':
        return name, text(0, raw)
    if name == 'UFID':
        owner, rest = head(0, raw)
        return 'UFID:' + owner, text(0, rest)
    encoding, raw, strings = raw[0], raw[1:], []
    if name == 'APIC':
        mime, raw = head(0, raw)
        desc, content = head(encoding, raw[1:])
        true(encoding == 0 or not desc.isascii(), 'encoding 0 for an APIC with description %r' % desc)
        return name, (mime, raw[0], desc, content)
    if name in ('COMM', 'USLT'):
        same(b'eng', raw[:3])
        desc, raw = head(encoding, raw[3:])
        same('', desc)
    elif name == 'TXXX':
        desc, raw = head(encoding, raw)
        name, strings = 'TXXX:' + desc, [desc]
    elif name == 'WXXX':
        same((0, b'\0'), (encoding, raw[:1]), 'WXXX without description')
        raw = raw[1:]
    elif name == 'IPLS':
        while raw:
            s, raw = head(encoding, raw)
            strings.append(s)
        same(0, len(strings) % 2, 'pairs in IPLS')
        value = '|'.join('/'.join(strings[i:i + 2]) for i in range(0, len(strings), 2))
    if name != 'IPLS':
        value = text(encoding, raw)
        strings.append(value)
    true(encoding == 0 or not all(s.isascii() for s in strings), 'encoding 0 where all is ASCII: %r' % strings)
    return name, value


def parsed(path, base='even'):
    """All frames in order; none can be there twice."""
    tag = tag_of(path, base)
    frames = [parse(f) for f in frames_of(tag)] if tag else []
    keys = [k + ':' + v[2] if k == 'APIC' else k for k, v in frames]
    same([], [k for k in set(keys) if keys.count(k) > 1], 'frames that are there twice')
    return frames


def by_mutagen(path):
    """The same by mutagen, sorted."""
    tags = AIFF(path, translate=False).tags
    same([], tags.unknown_frames, 'frames that mutagen does not understand')
    same((2, 3, 0), tags.version)
    shown = []
    for f in tags.values():
        name = f.FrameID
        if name == 'TXXX':
            shown.append(('TXXX:' + f.desc, '\0'.join(f.text)))
        elif name == 'UFID':
            shown.append(('UFID:' + f.owner, f.data.decode()))
        elif name in ('COMM', 'USLT'):
            same(('eng', ''), (f.lang, f.desc))
            shown.append((name, '\0'.join(f.text) if name == 'COMM' else f.text))
        elif name == 'IPLS':
            shown.append((name, '|'.join('/'.join(p) for p in f.people)))
        elif name[0] == 'W':
            shown.append((name, f.url))
        elif name == 'APIC':
            shown.append((name, (f.mime, int(f.type), f.desc, f.data)))
        else:
            shown.append((name, '\0'.join(map(str, f.text))))
    return sorted(shown)


def log_lines(path):
    name = os.path.basename(path)[:-5] + '.flac:'
    return [s for s in content_of(LOG).decode(errors='replace').splitlines() if name in s]


def clean(raw):
    """What the tag has of a value: up to NUL, and each run of bytes that are not UTF-8 as one U+FFFD."""
    s = data(raw).split(b'\0')[0].decode('utf-8', 'surrogateescape')
    return re.sub('[\udc80-\udcff]+', '\ufffd', s)
PY
}

# tags_verdicts NAME: runs $work/tags/NAME.py, of which each line of output is a verdict
tags_verdicts() {
  local verdict sentence evidence status n=0
  /usr/bin/python3 "$work/tags/$1.py" >"$work/tags/verdicts" 2>"$work/tags/errors"
  status=$?
  while IFS=$'\t' read -r verdict sentence evidence; do
    n=$((n + 1))
    if [ "$verdict" = ok ]; then ok "$sentence"; else
      printf '%b\n' "$evidence" >"$out"
      not_ok "$sentence" "$out"
    fi
  done <"$work/tags/verdicts"
  if [ "$status" != 0 ] || [ "$n" = 0 ] || [ -s "$work/tags/errors" ]; then
    not_ok "the checks of $1 come to their end without a warning (status $status, $n verdicts)" "$work/tags/errors" "$log"
  fi
}

# The whole mapping: comments -> frames. Each line is a file of its own, and its frames are all that
# the tag may have. A TXXX has its description behind the colon, UFID its owner; COMM and USLT are
# those in English without description; IPLS is role/name|role/name.
tags_mapping() {
  cat >"$work/tags/mapping.txt" <<'TABLE'
TITLE=Take Five -> TIT2=Take Five
SUBTITLE=a subtitle -> TIT3=a subtitle
VERSION=live -> TIT3=live
SUBTITLE=a subtitle & VERSION=live -> TIT3=a subtitle & TXXX:VERSION=live
TITLESORT=Five, Take -> TSOT=Five, Take
ALBUM=Time Out -> TALB=Time Out
ALBUMSORT=Out, Time -> TSOA=Out, Time
ARTIST=AC/DC -> TPE1=AC/DC
ARTISTS=AC/DC -> TXXX:ARTISTS=AC/DC
ARTISTSORT=Brubeck, Dave -> TSOP=Brubeck, Dave
ALBUMARTIST=The Quartet -> TPE2=The Quartet
ALBUM ARTIST=The Quartet -> TPE2=The Quartet
ALBUMARTISTSORT=Quartet, The -> TSO2=Quartet, The
COMPOSER=Paul Desmond -> TCOM=Paul Desmond
COMPOSERSORT=Desmond, Paul -> TSOC=Desmond, Paul
LYRICIST=Iola Brubeck -> TEXT=Iola Brubeck
WRITER=A Writer -> TXXX:Writer=A Writer
CONDUCTOR=A Conductor -> TPE3=A Conductor
REMIXER=A Remixer -> TPE4=A Remixer
MIXARTIST=A Remixer -> TPE4=A Remixer
ARRANGER=An Arranger -> IPLS=arranger/An Arranger
ENGINEER=An Engineer -> IPLS=engineer/An Engineer
PRODUCER=A Producer -> IPLS=producer/A Producer
DJMIXER=A DJ -> IPLS=DJ-mix/A DJ
MIXER=A Mixer -> IPLS=mix/A Mixer
ARRANGER=A & PRODUCER=B & ARRANGER=C -> IPLS=arranger/A|producer/B|arranger/C
ARTIST=A & PERFORMER=P (alto sax) -> TPE1=A & IPLS=alto sax/P
ARTIST=A & PERFORMER=P -> TPE1=A & TXXX:PERFORMER=P
PERFORMER=P -> TPE1=P
PERFORMER=P (alto sax) -> TPE1=P & IPLS=alto sax/P
ENSEMBLE=An Ensemble -> TXXX:ENSEMBLE=An Ensemble
ORCHESTRA=An Orchestra -> TXXX:ORCHESTRA=An Orchestra
GENRE=Cool Jazz -> TCON=Cool Jazz
GENRE=80s -> TCON=80s
GENRE=(17) Rock -> TCON=((17) Rock
MOOD=relaxed -> TMOO=relaxed
GROUPING=a grouping -> TIT1=a grouping & GRP1=a grouping
CONTENTGROUP=a group -> TIT1=a group
GROUPING=a grouping & CONTENTGROUP=a group -> TIT1=a grouping & GRP1=a grouping & TXXX:CONTENTGROUP=a group
WORK=a work -> TXXX:WORK=a work
MOVEMENTNAME=Allegro -> MVNM=Allegro
MOVEMENT=2 -> MVIN=2
MOVEMENTNUMBER=2 -> MVIN=2
MOVEMENT=2 & MOVEMENTTOTAL=4 -> MVIN=2/4
MOVEMENTTOTAL=4 & MOVEMENTNUMBER=2 -> MVIN=2/4
SHOWMOVEMENT=1 -> TXXX:SHOWMOVEMENT=1
DATE=2003 -> TYER=2003
DATE=2003-02-18 -> TYER=2003 & TDAT=1802
DATE=2003-02-18T13:14 -> TYER=2003 & TDAT=1802 & TIME=1314
DATE=2003-02-18 13:14 -> TYER=2003 & TDAT=1802 & TIME=1314
DATE=2003-02-18T13:14:15 -> TYER=2003 & TDAT=1802 & TIME=1314 & TXXX:DATE=2003-02-18T13:14:15
DATE=2003-02 -> TYER=2003 & TXXX:DATE=2003-02
DATE=2003-13-18 -> TYER=2003 & TXXX:DATE=2003-13-18
DATE=2003-02-18T25:14 -> TYER=2003 & TDAT=1802 & TXXX:DATE=2003-02-18T25:14
DATE=18.02.2003 -> TYER=2003 & TXXX:DATE=18.02.2003
DATE=20030218 -> TXXX:DATE=20030218
DATE=last year -> TXXX:DATE=last year
YEAR=2003 -> TYER=2003
DATE=2003-02-18 & YEAR=1999 -> TYER=2003 & TDAT=1802 & TXXX:YEAR=1999
ORIGINALDATE=1959 -> TORY=1959
ORIGINALDATE=1959-07-01 -> TORY=1959 & TXXX:ORIGINALDATE=1959-07-01
ORIGINALYEAR=1959 -> TORY=1959
ORIGINALDATE=1959 & ORIGINALYEAR=1960 -> TORY=1959 & TXXX:ORIGINALYEAR=1960
RELEASEDATE=1959-12-14 -> TXXX:RELEASEDATE=1959-12-14
TRACKNUMBER=3 -> TRCK=3
TRACKNUMBER=03 -> TRCK=03
TRACKNUMBER=3/12 -> TRCK=3/12
TRACKNUMBER=3 & TRACKTOTAL=12 -> TRCK=3/12
TOTALTRACKS=12 & TRACKNUMBER=3 -> TRCK=3/12
TRACKNUMBER=3 & TRACKTOTAL=12 & TOTALTRACKS=12 -> TRCK=3/12
TRACKNUMBER=3 & TRACKTOTAL=3 -> TRCK=3/3
TRACKNUMBER=03/12 & TRACKTOTAL=12 -> TRCK=03/12
TRACKNUMBER=3/12 & TRACKTOTAL=13 -> TRCK=3/12 & TXXX:TRACKTOTAL=13
TRACKNUMBER=3 & TRACKTOTAL=12 & TOTALTRACKS=13 -> TRCK=3/12 & TXXX:TOTALTRACKS=13
TRACKNUMBER=3 & TRACKTOTAL=12/12 -> TRCK=3 & TXXX:TRACKTOTAL=12/12
TRACKNUMBER=3/12/12 -> TXXX:TRACKNUMBER=3/12/12
TRACKTOTAL=12 -> TXXX:TRACKTOTAL=12
TRACK=3 -> TRCK=3
TRACK=4 & TRACKNUMBER=3 -> TRCK=3 & TXXX:TRACK=4
DISCNUMBER=1 -> TPOS=1
DISCNUMBER=1/2 -> TPOS=1/2
DISCNUMBER=1 & DISCTOTAL=2 -> TPOS=1/2
DISCNUMBER=1 & TOTALDISCS=2 -> TPOS=1/2
DISCNUMBER=1/2 & DISCTOTAL=2 & TOTALDISCS=2 -> TPOS=1/2
DISC=1 -> TPOS=1
DISCSUBTITLE=the first half -> TSST=the first half
SETSUBTITLE=the first half -> TSST=the first half
MEDIA=CD -> TMED=CD
SOURCEMEDIA=LP -> TMED=LP
COMMENT=a comment -> COMM=a comment
COMMENT=one & COMMENT=two -> COMM=one\ntwo
DESCRIPTION=a description -> COMM=a description
COMMENT=a comment & DESCRIPTION=a description -> COMM=a comment & TXXX:DESCRIPTION=a description
LYRICS=la la -> USLT=la la
UNSYNCEDLYRICS=la la -> USLT=la la
UNSYNCED LYRICS=la la -> USLT=la la
LYRICS=la & LYRICS=lo -> USLT=la\nlo
SYNCEDLYRICS=[00:01]la -> TXXX:SYNCEDLYRICS=[00:01]la
BPM=174 -> TBPM=174
TEMPO=174 -> TBPM=174
BPM=173.6 -> TBPM=174 & TXXX:BPM=173.6
BPM=fast -> TXXX:BPM=fast
KEY=Ebm -> TKEY=Ebm
INITIALKEY=Ebm -> TKEY=Ebm
KEY=E flat minor -> TXXX:KEY=E flat minor
LANGUAGE=eng -> TLAN=eng
LANGUAGE=English -> TXXX:LANGUAGE=English
SCRIPT=Latn -> TXXX:SCRIPT=Latn
COPYRIGHT=1959 Columbia -> TCOP=1959 Columbia
LICENSE=http://example.org/by/4.0/ -> WCOP=http://example.org/by/4.0/
LICENSE=all rights reserved -> TXXX:LICENSE=all rights reserved
LICENSE=http://example.org/1 & LICENSE=http://example.org/2 -> TXXX:LICENSE=http://example.org/1; http://example.org/2
LABEL=a label -> TPUB=a label
PUBLISHER=a publisher -> TPUB=a publisher
ORGANIZATION=an organization -> TPUB=an organization
ORGANIZATION=o & PUBLISHER=p & LABEL=l -> TPUB=l & TXXX:ORGANIZATION=o & TXXX:PUBLISHER=p
ORGANIZATION=o & PUBLISHER=p -> TPUB=p & TXXX:ORGANIZATION=o
CATALOGNUMBER=CS 8192 -> TXXX:CATALOGNUMBER=CS 8192
LABELNO=CS 8192 -> TXXX:CATALOGNUMBER=CS 8192
BARCODE=74646 -> TXXX:BARCODE=74646
UPC=74646 -> TXXX:BARCODE=74646
EAN=74646 -> TXXX:BARCODE=74646
BARCODE=1 & UPC=2 -> TXXX:BARCODE=1; 2
ISRC=USSM15900113 -> TSRC=USSM15900113
ASIN=B000002AGN -> TXXX:ASIN=B000002AGN
ENCODED-BY=me -> TENC=me
ENCODEDBY=me -> TENC=me
ENCODED_BY=me -> TENC=me
ENCODERSETTINGS=-8 -> TSSE=-8
ENCODING=-8 -> TSSE=-8
ENCODER=flac -> TSSE=flac
ENCODERSETTINGS=-8 & ENCODER=flac -> TSSE=-8 & TXXX:ENCODER=flac
ENCODER=flac & ENCODING=-8 -> TSSE=-8 & TXXX:ENCODER=flac
COMPILATION=1 -> TCMP=1
COMPILATION=0 -> TXXX:COMPILATION=0
ORIGINALARTIST=an artist -> TOPE=an artist
ORIGINALALBUM=an album -> TOAL=an album
ORIGINALFILENAME=a.wav -> TOFN=a.wav
WEBSITE=https://example.org/a -> WOAR=https://example.org/a
WEBSITE=none -> TXXX:WEBSITE=none
URL=https://example.org/b -> WXXX=https://example.org/b
RATING=80 -> TXXX:RATING=80
RATING:someone=0.8 -> TXXX:RATING:SOMEONE=0.8
FMPS_RATING=0.8 -> TXXX:FMPS_RATING=0.8
PLAYCOUNT=7 -> TXXX:PLAYCOUNT=7
REPLAYGAIN_TRACK_GAIN=-7.03 dB -> TXXX:REPLAYGAIN_TRACK_GAIN=-7.03 dB
REPLAYGAIN_TRACK_PEAK=0.98 -> TXXX:REPLAYGAIN_TRACK_PEAK=0.98
REPLAYGAIN_ALBUM_GAIN=-6.2 dB -> TXXX:REPLAYGAIN_ALBUM_GAIN=-6.2 dB
R128_TRACK_GAIN=-1234 -> TXXX:R128_TRACK_GAIN=-1234
R128_ALBUM_GAIN=-1234 -> TXXX:R128_ALBUM_GAIN=-1234
MUSICBRAINZ_TRACKID=3c1f -> UFID:http://musicbrainz.org=3c1f
MUSICBRAINZ_RELEASETRACKID=id -> TXXX:MusicBrainz Release Track Id=id
MUSICBRAINZ_ARTISTID=id -> TXXX:MusicBrainz Artist Id=id
MUSICBRAINZ_ALBUMID=id -> TXXX:MusicBrainz Album Id=id
MUSICBRAINZ_ALBUMARTISTID=id -> TXXX:MusicBrainz Album Artist Id=id
MUSICBRAINZ_RELEASEGROUPID=id -> TXXX:MusicBrainz Release Group Id=id
MUSICBRAINZ_WORKID=id -> TXXX:MusicBrainz Work Id=id
MUSICBRAINZ_DISCID=id -> TXXX:MusicBrainz Disc Id=id
MUSICBRAINZ_TRMID=id -> TXXX:MusicBrainz TRM Id=id
MUSICBRAINZ_ORIGINALALBUMID=id -> TXXX:MusicBrainz Original Album Id=id
MUSICBRAINZ_ORIGINALARTISTID=id -> TXXX:MusicBrainz Original Artist Id=id
RELEASETYPE=album -> TXXX:MusicBrainz Album Type=album
MUSICBRAINZ_ALBUMTYPE=album -> TXXX:MusicBrainz Album Type=album
RELEASESTATUS=official -> TXXX:MusicBrainz Album Status=official
MUSICBRAINZ_ALBUMSTATUS=official -> TXXX:MusicBrainz Album Status=official
RELEASECOUNTRY=US -> TXXX:MusicBrainz Album Release Country=US
ACOUSTID_ID=id -> TXXX:Acoustid Id=id
ACOUSTID_FINGERPRINT=AQAD -> TXXX:Acoustid Fingerprint=AQAD
MUSICIP_PUID=id -> TXXX:MusicIP PUID=id
A name of my own=a value -> TXXX:A NAME OF MY OWN=a value
ARTIST=Various Artists & ARTIST=Daniel Licht & ARTIST=Jon Licht -> TPE1=Various Artists; Daniel Licht; Jon Licht
ARTIST=A & ARTIST=B & ARTIST=A -> TPE1=A; B
GENRE=Jazz & GENRE=(Cool) -> TCON=Jazz; (Cool)
FOO=1 & BAR=x & FOO=2 & FOO=1 -> TXXX:FOO=1; 2 & TXXX:BAR=x
DATE=2003 & DATE=2003 & BPM=174 & BPM=174 & COMPILATION=1 & COMPILATION=1 -> TYER=2003 & TBPM=174 & TCMP=1
COMPILATION=1 & TITLE=no album artist -> TIT2=no album artist & TCMP=1
TABLE
  cat >"$work/tags/mapping.py" <<'PY'
from tagtools import *

rows = [line.replace('\\n', '\n') for line in content_of(WORK + '/mapping.txt').decode().splitlines()]
others = []  # the same with names in other letters


def split(side):
    return [tuple(x.split('=', 1)) for x in side.split(' & ')]


for row in rows:
    comments, frames = map(split, row.split(' -> '))

    @test('mapping: ' + row.replace('\n', '\\n'))
    def _():
        path = show(['='.join(c) for c in comments])
        same(sorted(frames), by_mutagen(path), 'as mutagen sees it')
        same(sorted(frames), sorted(parsed(path)), 'by the letter')
        other = show(['='.join((n.lower(), v)) for n, v in comments])
        if tag_of(path) != tag_of(other):
            others.append(row)


@test('mapping: the case of a name does not matter')
def _():
    same([], others)
PY
  tags_verdicts mapping
}

# Each of the programs that people use has to show the values, on a file made by metaflac.
tags_readers() {
  local flac=$SRC_TAGS/readers.flac t
  cp "$work/tags/odd.flac" "$flac"
  for t in TITLE=Ürsprung 'ARTIST=Ann' 'ARTIST=Бob' 'ALBUM=An Album' ALBUMARTIST=Various GENRE=Jazz TRACKNUMBER=3 \
    TRACKTOTAL=12 DISCNUMBER=1/2 'DATE=2001-02-03T13:14' 'COMPOSER=A Composer' 'COMMENT=what is said' 'LYRICS=la lá' \
    ISRC=USSM15900113 BPM=128 INITIALKEY=Am 'LABEL=A Label' 'COPYRIGHT=2001 me' MUSICBRAINZ_ALBUMID=a-b-c COMPILATION=1 \
    'ALBUMSORT=Album, An' 'CONDUCTOR=A Conductor' 'ARRANGER=An Arranger' 'GROUPING=A Group' MOOD=calm 'FREE=text é' \
    WEBSITE=http://example.org/ ENCODEDBY=me LANGUAGE=eng; do
    metaflac --set-tag="$t" "$flac" || not_ok "metaflac takes $t"
  done
  metaflac --import-picture-from="3|image/png|The cover||$work/tags/cover.png" "$flac" || not_ok 'metaflac takes the cover'
  cat >"$work/tags/readers.py" <<'PY'
import base64, hashlib, json, shutil, subprocess
from tagtools import *

FILE = MNT + '/readers.aiff'
COVER = hashlib.md5(content_of(WORK + '/cover.png')).hexdigest()


def run(*command):
    r = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    same(0, r.returncode, '%s: %s' % (command[0], r.stderr))
    return r.stdout


def some(wanted, got):
    same(wanted, {k: got.get(k) for k in wanted})


def reader(program, sentence):
    """A test, if the program is there; the others are reported as skipped by the shell."""
    return test(sentence) if shutil.which(program) else lambda f: None


@test('mutagen: tags of a file by metaflac')
def _():
    frames = dict(by_mutagen(FILE))
    some({'TIT2': 'Ürsprung', 'TPE1': 'Ann; Бob', 'TALB': 'An Album', 'TPE2': 'Various', 'TRCK': '3/12', 'TPOS': '1/2',
          'TYER': '2001', 'TDAT': '0302', 'TIME': '1314', 'COMM': 'what is said', 'USLT': 'la lá', 'TXXX:FREE': 'text é',
          'IPLS': 'arranger/An Arranger', 'WOAR': 'http://example.org/', 'TSOA': 'Album, An'}, frames)
    mime, kind, desc, content = frames['APIC']
    same(('image/png', 3, 'The cover', COVER), (mime, kind, desc, hashlib.md5(content).hexdigest()))
    same('2001-02-03 13:14:00', str(AIFF(FILE).tags['TDRC']), 'the date put together')


@reader('ffprobe', 'ffprobe: tags and the cover')
def _():
    shown = json.loads(run('ffprobe', '-v', 'error', '-show_format', '-show_streams', '-of', 'json', FILE))
    some({'title': 'Ürsprung', 'artist': 'Ann; Бob', 'album': 'An Album', 'album_artist': 'Various', 'genre': 'Jazz',
          'track': '3/12', 'disc': '1/2', 'date': '2001-02-03 13:14', 'composer': 'A Composer', 'comment': 'what is said',
          'lyrics-eng': 'la lá', 'TSRC': 'USSM15900113', 'TBPM': '128', 'TKEY': 'Am', 'publisher': 'A Label',
          'copyright': '2001 me', 'MusicBrainz Album Id': 'a-b-c', 'compilation': '1', 'album-sort': 'Album, An',
          'performer': 'A Conductor', 'grouping': 'A Group', 'TMOO': 'calm', 'FREE': 'text é', 'encoded_by': 'me',
          'language': 'eng'}, shown['format']['tags'])
    sound, cover = shown['streams']
    same((1, 'png', 4, 4), (cover['disposition']['attached_pic'], cover['codec_name'], cover['width'], cover['height']))
    some({'title': 'The cover', 'comment': 'Cover (front)'}, cover['tags'])
    same(('pcm_s8', 1, '44100'), (sound['codec_name'], sound['channels'], sound['sample_rate']))


@reader('ffmpeg', "ffmpeg: the cover's md5")
def _():
    got = run('ffmpeg', '-v', 'error', '-i', FILE, '-map', '0:v', '-c', 'copy', '-f', 'data', '-')
    same(COVER, hashlib.md5(got).hexdigest())


@reader('exiftool', 'exiftool: tags')
def _():
    shown = json.loads(run('exiftool', '-q', '-q', '-j', '-charset', 'utf8', FILE))[0]
    some({'Title': 'Ürsprung', 'Artist': 'Ann; Бob', 'Album': 'An Album', 'Band': 'Various', 'Genre': 'Jazz', 'Track': '3/12',
          'PartOfSet': '1/2', 'Year': 2001, 'Date': '0302', 'Time': 1314, 'Composer': 'A Composer',
          'Comment': 'what is said', 'Lyrics': 'la lá', 'ISRC': 'USSM15900113', 'BeatsPerMinute': 128, 'InitialKey': 'Am',
          'Publisher': 'A Label', 'Copyright': '2001 me', 'Compilation': 'Yes', 'Conductor': 'A Conductor',
          'InvolvedPeople': 'arranger/An Arranger', 'Grouping': 'A Group', 'ArtistURL': 'http://example.org/',
          'EncodedBy': 'me', 'Language': 'eng', 'PictureMIMEType': 'image/png', 'PictureType': 'Front Cover',
          'PictureDescription': 'The cover'}, shown)
    user = run('exiftool', '-q', '-q', '-a', '-s3', '-charset', 'utf8', '-UserDefinedText', FILE).decode().splitlines()
    same({'(FREE) text é', '(MusicBrainz Album Id) a-b-c'}, set(user))


@reader('exiftool', "exiftool: the cover's md5")
def _():
    same(COVER, hashlib.md5(run('exiftool', '-q', '-q', '-b', '-Picture', FILE)).hexdigest())


@reader('kid3-cli', "kid3-cli (TagLib): tags and the cover's md5")
def _():
    saved = WORK + '/kid3.png'
    lines = run('kid3-cli', '-c', 'get', '-c', 'get picture:' + saved, FILE).decode().splitlines()
    true('Tag 2: ID3v2.3.0' in lines, 'ID3v2.3.0 in %r' % lines)
    got = dict(re.split(r'  +', s.strip(), maxsplit=1) for s in lines if re.match(r'  \S.*?  +\S', s))
    some({'Title': 'Ürsprung', 'Artist': 'Ann; Бob', 'Album': 'An Album', 'Album Artist': 'Various', 'Genre': 'Jazz',
          'Track Number': '3/12', 'Disc Number': '1/2', 'Date': '2001-02-03T13:14', 'Composer': 'A Composer',
          'Comment': 'what is said', 'Lyrics': 'la lá', 'ISRC': 'USSM15900113', 'BPM': '128', 'Initial Key': 'Am',
          'Publisher': 'A Label', 'Copyright': '2001 me', 'MusicBrainz Album Id': 'a-b-c', 'Compilation': '1',
          'Sort Album': 'Album, An', 'Conductor': 'A Conductor', 'Arranger': 'arranger|An Arranger', 'Work': 'A Group',
          'Grouping': 'A Group', 'Mood': 'calm', 'FREE': 'text é', 'Website': 'http://example.org/', 'Encoded-by': 'me',
          'Language': 'eng', 'Picture: Cover (front)': 'The cover'}, got)
    same(COVER, hashlib.md5(content_of(saved)).hexdigest())


@reader('mediainfo', "mediainfo: tags and the cover's md5")
def _():
    shown = json.loads(run('mediainfo', '--Output=JSON', FILE))['media']['track']
    general = dict(shown[0], **shown[0]['extra'])
    some({'Title': 'Ürsprung', 'Performer': 'Ann; Бob', 'Album': 'An Album', 'Album_Performer': 'Various', 'Genre': 'Jazz',
          'Track_Position': '3', 'Track_Position_Total': '12', 'Part_Position': '1', 'Part_Position_Total': '2',
          'Recorded_Date': '2001-02-03 13:14', 'Composer': 'A Composer', 'Comment': 'what is said', 'Lyrics': 'la lá',
          'ISRC': 'USSM15900113', 'BPM': '128', 'Initial_key': 'Am', 'Publisher': 'A Label', 'Copyright': '2001 me',
          'MusicBrainz_Album_Id': 'a-b-c', 'Compilation': 'Yes', 'Album_Sort': 'Album, An', 'Conductor': 'A Conductor',
          'Grouping': 'A Group', 'Mood': 'calm', 'FREE': 'text é', 'EncodedBy': 'me', 'Cover_Description': 'The cover',
          'Cover_Type': 'Cover (front)', 'Cover_Mime': 'image/png'}, general)
    same(('PCM', '1'), (shown[1]['Format'], shown[1]['Channels']))
    cover = run('mediainfo', '--Cover_Data=base64', '--Output=General;%Cover_Data%', FILE)
    same(COVER, hashlib.md5(base64.b64decode(cover)).hexdigest())
PY
  tags_verdicts readers
  for t in ffprobe ffmpeg exiftool kid3-cli mediainfo; do
    have "$t" || skip "what $t makes of the tags" "$t is not there"
  done
}

# What a reader's parser meets: ids, sizes, encodings, order, pictures.
tags_bytes() {
  cat >"$work/tags/bytes.py" <<'PY'
import base64, hashlib, time
from tagtools import *

PNG, JPEG = b'\x89PNG\r\n\x1a\n' + bytes(300), b'\xff\xd8\xff\xe0' + bytes(300)
GIF, WEBP = b'GIF89a' + bytes(30), b'RIFF\x10\0\0\0WEBPVP8 ' + bytes(30)


def frame(name, body):
    return name + struct.pack('>I', len(body)) + b'\0\0' + body


def wide(s):
    return b'\xff\xfe' + s.encode('utf-16-le')


def pictures(path):
    """The APIC frames; the last ones of the tag."""
    frames = parsed(path)
    names = [k for k, _ in frames]
    n = names.count('APIC')
    same(['APIC'] * n, names[len(names) - n:], 'APIC last')
    same(sorted(frames), by_mutagen(path))
    return [v for k, v in frames if k == 'APIC']


@test('a tag, byte for byte: id, version, flags, sizes, frames, padding; behind the sound')
def _():
    tag = frame(b'TIT2', b'\0A title') + frame(b'TPE1', b'\1' + wide('Bj\u00f6rk')) + frame(b'APIC', b'\0image/png\0\3\0' + PNG)
    for base, sound in ('even', b''), ('odd', b'\0'):
        tag_size = len(tag) + 10 + len(tag) % 2
        size = bytes([tag_size >> 21 & 127, tag_size >> 14 & 127, tag_size >> 7 & 127, tag_size & 127])
        wanted = b'ID3 ' + struct.pack('>I', tag_size + 10) + b'ID3\3\0\0' + size + tag + bytes(10 + len(tag) % 2)
        whole = read_all(show(['ARTIST=Bj\u00f6rk', 'TITLE=A title'], [picture_block(PNG)], base=base))
        plain = content_of('%s/%s.aiff' % (WORK, base))
        same(len(plain) - 8 + len(wanted), int.from_bytes(whole[4:8], 'big'), 'FORM size')
        same(wanted, whole[len(plain):])
        same(plain[8:], whole[8:len(plain)])
        n = int.from_bytes(plain[42:46], 'big')
        same(sound, plain[46 + n:], 'the reference has a pad byte where the sound is odd')


@test('sizes of frames are plain, that of the tag is synchsafe')
def _():
    path = show(['COMMENT=' + 'x' * 40000])
    same([('COMM', 'x' * 40000)], parsed(path))
    same(struct.pack('>I', 40005), tag_of(path)[14:18])


@test('the padding is 10 zero bytes, 11 where the tag would be odd')
def _():
    for n in range(1, 9):
        tag = tag_of(show(['TITLE=' + 'x' * n]))
        same(10 + 10 + 1 + n + 10 + (n + 1) % 2, len(tag))
        same([('TIT2', b'\0' + b'x' * n)], frames_of(tag))


@test('encoding 0 for ASCII, else UTF-16 with FF FE in front of each string')
def _():
    for comment, wanted in [
            ('TITLE=plain ~', frame(b'TIT2', b'\0plain ~')),
            ('TITLE=\u00e9', frame(b'TIT2', b'\1\xff\xfe\xe9\0')),
            ('TITLE=a\U0001f600\U0010ffff', frame(b'TIT2', b'\1\xff\xfea\0\x3d\xd8\0\xde\xff\xdb\xff\xdf')),
            ('TITLE=\uffff\ue000\ud7ff', frame(b'TIT2', b'\1\xff\xfe\xff\xff\0\xe0\xff\xd7')),
            ('Foo=\u00e9', frame(b'TXXX', b'\1' + wide('FOO') + b'\0\0' + wide('\u00e9'))),
            ('Foo=e', frame(b'TXXX', b'\0FOO\0e')),
            ('COMMENT=\u00e9', frame(b'COMM', b'\1eng' + wide('') + b'\0\0' + wide('\u00e9'))),
            ('COMMENT=e', frame(b'COMM', b'\0eng\0e')),
            ('LYRICS=\u00e9', frame(b'USLT', b'\1eng' + wide('') + b'\0\0' + wide('\u00e9'))),
            ('MIXER=\u00e9', frame(b'IPLS', b'\1' + wide('mix') + b'\0\0' + wide('\u00e9') + b'\0\0')),
            ('MIXER=e', frame(b'IPLS', b'\0mix\0e\0')),
            ('URL=http://a/', frame(b'WXXX', b'\0\0http://a/')),
            ('WEBSITE=http://a/', frame(b'WOAR', b'http://a/')),
            ('LICENSE=http://a/', frame(b'WCOP', b'http://a/')),
            ('MUSICBRAINZ_TRACKID=1-2', frame(b'UFID', b'http://musicbrainz.org\0' + b'1-2'))]:
        tag = tag_of(show([comment]))
        same(wanted, tag[10:10 + len(wanted)], comment)
        same(b'', tag[10 + len(wanted):].strip(b'\0'))


@test('what is not UTF-8 is one U+FFFD for each run; a NUL ends a value')
def _():
    for raw, wanted in [
            (b'a\xffb', 'a\ufffdb'), (b'\xe9t\xe9', '\ufffdt\ufffd'), (b'\x80', '\ufffd'), (b'\xff\xfe\xfd', '\ufffd'),
            (b'a\xf0\x9f\x98', 'a\ufffd'), (b'a\xf0\x9f\x98b', 'a\ufffdb'), (b'\xed\xa0\x80\xed\xb0\x80', '\ufffd'),
            (b'\xf4\x90\x80\x80', '\ufffd'), (b'\xc0\xaf', '\ufffd'), (b'\xe0\x80\xaf/', '\ufffd/'), (b'\xc3\xa9', '\u00e9'),
            (b'\xf0\xc3\xa9', '\ufffd\u00e9'), (b'\xf4\x8f\xbf\xbf', '\U0010ffff'), (b'\xf5\x80a', '\ufffda'), (b'\xc3', '\ufffd'),
            (b'\xc3\xa9\xc3\xe2\x82\xac', '\u00e9\ufffd\u20ac'), (b'1\0', '1'), (b'12\0junk\xff', '12')]:
        path = show([b'TITLE=' + raw, 'ALBUM=next'])
        same([('TIT2', wanted), ('TALB', 'next')], parsed(path), raw)
        same(wanted, clean(raw), 'the reference agrees')


@test('comments without a name are skipped; the vendor string and the channel mask make no tag')
def _():
    mask = 'WAVEFORMATEXTENSIBLE_CHANNEL_MASK=0x3f'
    for comments in None, [], [mask], ['no name', '=value', ''], ['\0x=value']:
        for base in 'even', 'odd':
            path = show(comments, base=base)
            same(content_of('%s/%s.aiff' % (WORK, base)), read_all(path), comments)
    same([('TIT2', 'x')], parsed(show(['junk', '=', mask, 'TITLE=x'])))


@test('a name that is not ASCII, or has a NUL, keeps its value')
def _():
    same([('TXXX:N\u00e4ME', 'v')], parsed(show(['n\u00e4me=v'])))
    same([('TXXX:A', 'v')], parsed(show([b'a\0b=v'])))
    same([('TXXX:\ufffd', '1; 2')], parsed(show([b'\xff=1', b'\xfe\xfe=2'])))


@test('order: title, artist, track, album, disc, date, genre, the rest as in the table, TXXX by the file, pictures')
def _():
    wanted = ('TIT2 TPE1 TRCK TALB TPOS TYER TDAT TIME TCON TIT3 TSOT TSOA TSOP TPE2 TSO2 TCOM TSOC TEXT TPE3 TPE4 IPLS TMOO '
              'TIT1 GRP1 MVNM MVIN TORY TSST TMED COMM USLT TBPM TKEY TLAN TCOP WCOP TPUB TSRC TENC TSSE TCMP TOPE TOAL TOFN '
              'WOAR WXXX UFID:http://musicbrainz.org TXXX:ZZ TXXX:AA TXXX:Writer TXXX:MM APIC APIC').split()
    names = ('URL=http://a/ WEBSITE=http://a/ ORIGINALFILENAME ORIGINALALBUM ORIGINALARTIST COMPILATION=1 ENCODER ENCODEDBY ISRC '
             'LABEL LICENSE=http://a/ COPYRIGHT LANGUAGE=deu KEY=C TEMPO=9 LYRICS COMMENT MEDIA DISCSUBTITLE ORIGINALDATE=1959 '
             'MOVEMENT=2 MOVEMENTNAME GROUPING MOOD MIXER REMIXER CONDUCTOR LYRICIST COMPOSERSORT COMPOSER ALBUMARTISTSORT '
             'ALBUMARTIST ARTISTSORT ALBUMSORT ZZ TITLESORT SUBTITLE AA GENRE WRITER DATE=2001-02-03T04:05 '
             'DISCNUMBER=1 ALBUM TRACKNUMBER=1 ARTIST MM MUSICBRAINZ_TRACKID TITLE').split()
    comments = [n if '=' in n else n + '=x' for n in names]
    path = show(comments, [picture_block(PNG, 4), picture_block(JPEG, 3, 'image/jpeg', 'front')])
    same(wanted, [k for k, _ in parsed(path)])
    again = show(comments, [picture_block(PNG, 4), picture_block(JPEG, 3, 'image/jpeg', 'front')])
    same(tag_of(path), tag_of(again), 'the same file gives the same bytes')


@test('PERFORMER: the role is what stands in the last parentheses')
def _():
    for performer, frames in [
            ('A (B) (bass)', [('IPLS', 'bass/A (B)')]), ('A (guitar (bass))', [('IPLS', 'guitar (bass)/A')]),
            ('A ()', [('TXXX:PERFORMER', 'A ()')]), ('(bass)', [('TXXX:PERFORMER', '(bass)')]), (')', [('TXXX:PERFORMER', ')')]),
            ('A) (', [('TXXX:PERFORMER', 'A) (')]), ('A bass)', [('TXXX:PERFORMER', 'A bass)')])]:
        same([('TPE1', 'x')] + frames, parsed(show(['ARTIST=x', 'PERFORMER=' + performer])), performer)


@test('pictures: the front cover first, then as in the file; types over 20 become 0')
def _():
    kinds = [8, 21, 4, 3, 20, 0xffffffff, 3, 0, 259]
    path = show([], [picture_block(PNG + bytes([i]), k, desc=str(i)) for i, k in enumerate(kinds)])
    same([(3, '3'), (3, '6'), (8, '0'), (0, '1'), (4, '2'), (20, '4'), (0, '5'), (0, '7'), (0, '8')],
         [(kind, desc) for _, kind, desc, _ in pictures(path)])
    same({i: PNG + bytes([i]) for i in range(9)}, {int(desc): content for _, _, desc, content in pictures(path)})


@test('pictures: an empty description in encoding 0, one that is not ASCII in UTF-16')
def _():
    for desc, wanted in [('', b'\0image/png\0\3\0'), ('a cover', b'\0image/png\0\3a cover\0'),
                         ('\u5c01\u9762', b'\1image/png\0\3' + wide('\u5c01\u9762') + b'\0\0'),
                         (b'\0\xc3\xa9', b'\0image/png\0\3\0'), (b'front\0\xc3\xa9', b'\0image/png\0\3front\0'),
                         (b'a\xffb', b'\1image/png\0\3' + wide('a\ufffdb') + b'\0\0')]:
        tag = tag_of(show([], [picture_block(PNG, desc=desc)]))
        same([('APIC', wanted + PNG)], frames_of(tag), desc)


@test('pictures: descriptions are made different')
def _():
    for given, wanted in [
            (['a', 'a', 'a'], ['a', 'a (2)', 'a (3)']), (['', '', ''], ['', ' (2)', ' (3)']),
            (['a', 'b', 'a', 'b'], ['a', 'b', 'a (2)', 'b (2)']), (['\u00e9', '\u00e9'], ['\u00e9', '\u00e9 (2)']),
            ([b'\xff', b'\xfe'], ['\ufffd', '\ufffd (2)']), ([b'a\0b', b'a\0c', 'a'], ['a', 'a (2)', 'a (3)'])]:
        path = show([], [picture_block(PNG, 4, desc=d) for d in given])
        same(wanted, [p[2] for p in pictures(path)])
    for given in (['a', 'a', 'a (2)'], ['a (2)', 'a', 'a'], ['a', 'a (2)', 'a', 'a (2)', 'a (2) (2)']):
        path = show([], [picture_block(PNG, 4, desc=d) for d in given])
        same(len(given), len({p[2] for p in pictures(path)}), given)
    one = 'METADATA_BLOCK_PICTURE=' + base64.b64encode(picture_block(GIF, 4, 'image/gif', 'a')).decode()
    same(['a', 'a (2)'], [p[2] for p in pictures(show([one], [picture_block(PNG, 4, desc='a')]))])


@test('pictures: an empty MIME type is told from the data; image/jpg is image/jpeg; a link is kept')
def _():
    for mime, content, wanted in [
            ('', PNG, 'image/png'), ('', JPEG, 'image/jpeg'), ('', GIF, 'image/gif'), ('', WEBP, 'image/webp'),
            ('', b'junk', 'image/'), ('', b'RIFF\x10\0\0\0WAVE', 'image/'), ('', b'\xff\xd8', 'image/'),
            ('image/jpg', JPEG, 'image/jpeg'), ('IMAGE/JPG', JPEG, 'image/jpeg'), ('image/webp', WEBP, 'image/webp'),
            ('image/jpeg', PNG, 'image/jpeg'), ('-->', b'http://example.org/a.png', '-->')]:
        same([(wanted, 3, '', content)], pictures(show([], [picture_block(content, 3, mime)])), mime)


@test('METADATA_BLOCK_PICTURE and COVERART are pictures, never text')
def _():
    packed = base64.b64encode(picture_block(JPEG, 3, 'image/jpeg', 'b\u00e4ck')).decode()
    path = show(['TITLE=t', 'metadata_block_picture=' + packed], [picture_block(PNG, 4, desc='back')])
    same([('image/jpeg', 3, 'b\u00e4ck', JPEG), ('image/png', 4, 'back', PNG)], pictures(path))
    same(['TIT2', 'APIC', 'APIC'], [k for k, _ in parsed(path)])
    for n in range(3):  # each length of base64's last group
        content = PNG + bytes(range(1, n + 1))
        alone = base64.b64encode(content).decode()
        same([('image/png', 3, '', content)], pictures(show(['COVERART=' + alone, 'COVERARTMIME=image/png'])))
        packed = base64.b64encode(picture_block(content, 5, '', 'x' * n)).decode()
        same([('image/png', 5, 'x' * n, content)], pictures(show(['METADATA_BLOCK_PICTURE=' + packed])))
    long = base64.b64encode(picture_block(PNG, 5, desc='d' * 5000)).decode()
    same(['d' * 5000], [p[2] for p in pictures(show(['METADATA_BLOCK_PICTURE=' + long]))])
    for junk in 'not base64!', 'AAAA', packed[:40], base64.b64encode(b'\0' * 4 + b'\xff' * 60).decode():
        path = show(['METADATA_BLOCK_PICTURE=' + junk, 'TITLE=t'])
        same([('TIT2', 't')], parsed(path), junk)
        same(1, len(log_lines(path)), 'log lines for ' + junk)


@test('a picture without data, and a tag of a picture only')
def _():
    same([('image/png', 3, 'none', b'')], pictures(show([], [picture_block(b'', desc='none')])))
    same([('image/', 3, '', b'')], pictures(show(None, [picture_block(b'', mime='')])))


@test('the last byte is there, and nothing behind it')
def _():
    path = show(['TITLE=x'], [picture_block(PNG)])
    size = os.stat(path).st_size
    with open(path, 'rb') as f:
        same(b'\0', os.pread(f.fileno(), 10, size - 1))
        same(b'', os.pread(f.fileno(), 10, size))


@test('pieces of 1, 7 and 4096 bytes at any offset are those of the whole tag')
def _():
    packed = base64.b64encode(picture_block(bytes(range(256)) * 3, 4, 'image/gif', 'o\u00e9')).decode()
    comments = ['TITLE=T\u00eft\U0001f600' + 'l' * 99, 'A=1', 'B=\u00e9', 'COMMENT=a\u00e9', 'PERFORMER=A (b)', 'GENRE=(',
                'TRACKNUMBER=1/2', 'foo=bar', 'DATE=2001-02-03', 'UPC=1', 'METADATA_BLOCK_PICTURE=' + packed]
    path = show(comments, [picture_block(PNG + bytes(range(256)) * 20, 4, desc='\u00e9'), picture_block(JPEG)], base='odd')
    whole = read_all(path)
    first = os.stat(WORK + '/odd.aiff').st_size - 9  # the end of the sound, too
    for direct in os.O_DIRECT, 0:  # past the page cache each read is a request of its own
        fd = os.open(path, os.O_RDONLY | direct)
        try:
            for size, step in (1, 1), (7, 7), (7, 13), (4096, 1111), (4096, 4096):
                for at in range(first, len(whole), step):
                    got = os.pread(fd, size, at)
                    if got != whole[at:at + size]:
                        same(whole[at:at + size], got, '%d bytes at %d, flags %x' % (size, at, direct))
        finally:
            os.close(fd)
PY
  tags_verdicts bytes
}

# Much, long, broken and random.
tags_limits() {
  cat >"$work/tags/limits.py" <<'PY'
import hashlib, random
from tagtools import *

PNG = b'\x89PNG\r\n\x1a\n'
MAX_BLOCK = (1 << 24) - 1
seeded = random.Random(20250301)


def window(path, at, n):
    with open(path, 'rb') as f:
        return os.pread(f.fileno(), n, at)


PLAIN = os.stat(WORK + '/even.aiff').st_size


@test('10,000 comments')
def _():
    path = show(['N%d=v\u00e9%d' % (i, i) for i in range(10000)])
    wanted = [('TXXX:N%d' % i, 'v\u00e9%d' % i) for i in range(10000)]
    same(wanted, parsed(path))
    same(sorted(wanted), by_mutagen(path))
    same([('TPE1', '; '.join('artist %d' % i for i in range(10000)))], parsed(show(['ARTIST=artist %d' % i for i in range(10000)])))


@test('a comment as long as a metadata block allows')
def _():
    room = MAX_BLOCK - len(comment_block(['COMMENT=']))
    value = ('0123456789abcdef' * (room // 16 + 1))[:room]
    same([('COMM', value)], parsed(show(['COMMENT=' + value])))


@test('the same in UTF-16: its size, its start, its end')
def _():
    value = '\u00e9' * ((MAX_BLOCK - len(comment_block(['COMMENT=']))) // 2)
    body = b'\1eng\xff\xfe\0\0\xff\xfe' + value.encode('utf-16-le')
    path = show(['COMMENT=' + value])
    wanted = b'COMM' + struct.pack('>I', len(body)) + b'\0\0' + body + bytes(10 + len(body) % 2)
    same(PLAIN + 8 + 10 + len(wanted), os.stat(path).st_size)
    for at in 0, len(wanted) // 2, len(wanted) - 5000:
        same(wanted[at:at + 5000], window(path, PLAIN + 18 + at, 5000))


@test('a picture as large as a metadata block allows, whole')
def _():
    content = seeded.randbytes(MAX_BLOCK - len(picture_block(b'')))
    path = show(['TITLE=x'], [picture_block(content)])
    got = dict(parsed(path))
    same((hashlib.md5(content).hexdigest(), len(content)), (hashlib.md5(got['APIC'][3]).hexdigest(), len(got['APIC'][3])))
    same(hashlib.md5(content).hexdigest(), hashlib.md5(dict(by_mutagen(path))['APIC'][3]).hexdigest())


@test('a hundred pictures')
def _():
    given = [seeded.randbytes(seeded.randrange(1, 9000)) for _ in range(100)]
    path = show([], [picture_block(c, 4, 'image/png', 'page %d' % (i % 50)) for i, c in enumerate(given)])
    wanted = [('APIC', ('image/png', 4, 'page %d' % (i % 50) + (' (2)' if i >= 50 else ''), c)) for i, c in enumerate(given)]
    same(wanted, parsed(path))
    same(sorted(wanted), by_mutagen(path))


def sparse(sizes):
    """A FLAC file with pictures that take no room on the disk."""
    name = new_name()
    info, frames = sound_of('even')
    with open('%s/%s.flac' % (SRC, name), 'wb') as f:
        f.write(b'fLaC' + block(0, info))
        for i, n in enumerate(sizes):
            start = picture_block(b'', 4, desc='p%d' % i)[:-4] + struct.pack('>I', n)
            f.write(b'\6' + struct.pack('>I', len(start) + n)[1:] + start)
            f.seek(n, 1)
        f.write(block(1, bytes(4), True) + frames)
    return '%s/%s.aiff' % (MNT, name)


def large_tag(path):
    """(size of the tag, [(description, size of the data)])"""
    size = os.stat(path).st_size - PLAIN
    start = window(path, PLAIN, 18)
    same((b'ID3 ', size - 8), (start[:4], int.from_bytes(start[4:8], 'big')))
    same(size - 18, start[14] << 21 | start[15] << 14 | start[16] << 7 | start[17])
    at, found = PLAIN + 18, []
    with open(path, 'rb') as f:
        while (part := os.pread(f.fileno(), 64, at))[:4] == b'APIC':
            n = int.from_bytes(part[4:8], 'big')
            desc = part[10 + 12:].split(b'\0')[0]
            same(b'\0image/png\0\4', part[10:22])
            found.append((desc.decode(), n - 12 - len(desc) - 1))
            at += 10 + n
        same(bytes(PLAIN + size - at), os.pread(f.fileno(), 64, at))
    true(10 <= PLAIN + size - at <= 11, 'padding')
    return size - 8, found


@test('pictures that would pass 256 MiB: the largest are left out, with one log line')
def _():
    sizes = [16000000 + i for i in range(14)] + [16700000, 16500000, 16600000]
    path = sparse(sizes)
    for _ in range(2):
        size, found = large_tag(path)
    true(size - 10 < (1 << 28) - 1, 'size of the tag')
    same([('p%d' % i, n) for i, n in enumerate(sizes) if n != 16700000], found)
    same(1, len(log_lines(path)), 'log lines')


@test('a tag of nearly 256 MiB has all pictures; a little more, and the largest is left out')
def _():
    sizes = [16700000 + i for i in range(15)] + [10000000]
    frames = sum(10 + 12 + len('p%d' % i) + 1 + n for i, n in enumerate(sizes + [0]))
    sizes.append((1 << 28) - 100 - frames)
    full = sparse(sizes)
    size, found = large_tag(full)
    same([('p%d' % i, n) for i, n in enumerate(sizes)], found)
    same((1 << 28) - 100 + 20, size)
    same(0, len(log_lines(full)), 'log lines')
    over = sparse(sizes[:-1] + [sizes[-1] + 150])
    same([f for f in found[:-1] if f[1] != 16700014] + [('p16', sizes[-1] + 150)], large_tag(over)[1])
    same(1, len(log_lines(over)), 'log lines')


@test('open files do not hold their pictures in memory')
def _():
    def memory():
        return int(re.search(rb'VmRSS:\s*(\d+) kB', content_of('/proc/%s/status' % os.environ['TAGS_DAEMON']))[1]) >> 10
    paths = [sparse([16700000]) for _ in range(30)]
    before, files = memory(), [open(p, 'rb') for p in paths]
    try:
        for f in files:
            same(bytes(4096), os.pread(f.fileno(), 4096, PLAIN + 8000000))
        after = memory()
    finally:
        for f in files:
            f.close()
    true(after - before < 100, '%d MiB before, %d after 30 pictures of 16 MiB' % (before, after))


@test('a picture whose block length has wrapped: refused with EIO and one log line')
def _():
    content = bytes((1 << 24) + 1000)
    whole = picture_block(content)
    name = new_name()
    info, frames = sound_of('even')
    with open('%s/%s.flac' % (SRC, name), 'wb') as f:
        f.write(b'fLaC' + block(0, info) + b'\6' + struct.pack('>I', len(whole) & MAX_BLOCK)[1:] + whole + frames)
    path = '%s/%s.aiff' % (MNT, name)
    for _ in range(2):
        try:
            os.stat(path)
            raise AssertionError('stat succeeds')
        except OSError as e:
            same(5, e.errno)
    same(1, len(log_lines(path)), 'log lines')
    same([('TIT2', 'x')], parsed(show(['TITLE=x'])))


GOOD = picture_block(PNG, 4, desc='good')
SHOWN = ('APIC', ('image/png', 4, 'good', PNG))
BROKEN = [
    ('a vendor string longer than the block', 4, struct.pack('<I', 1000) + b'vendor', [SHOWN]),
    ('a vendor string of 4 GiB', 4, b'\xff' * 4 + b'vendor', [SHOWN]),
    ('a comment block of three bytes', 4, b'\0\0\0', [SHOWN]),
    ('a comment longer than the block', 4, struct.pack('<I', 0) + struct.pack('<I', 2) + struct.pack('<I', 7) + b'TITLE=x' +
     struct.pack('<I', 100) + b'ALBUM=y', [('TIT2', 'x'), SHOWN]),
    ('a comment of 4 GiB', 4, struct.pack('<I', 0) + struct.pack('<I', 2) + struct.pack('<I', 7) + b'TITLE=x' + b'\xff' * 4 + b'ALBUM=y',
     [('TIT2', 'x'), SHOWN]),
    ('more comments promised than there are', 4, comment_block(['TITLE=x'])[:9] + b'\xff' * 4 + comment_block(['TITLE=x'])[13:],
     [('TIT2', 'x'), SHOWN]),
    ('a picture block of ten bytes', 6, bytes(10), [SHOWN]),
    ('a MIME type longer than the block', 6, struct.pack('>II', 3, 1000) + bytes(40), [SHOWN]),
    ('a MIME type of 4 GiB', 6, struct.pack('>II', 3, 0xffffffff) + bytes(40), [SHOWN]),
    ('a description longer than the block', 6, struct.pack('>III', 3, 0, 1000) + bytes(40), [SHOWN]),
    ('a description of 4 GiB', 6, struct.pack('>III', 3, 0, 0xffffffff) + bytes(40), [SHOWN]),
    ('a picture longer than the block', 6, picture_block(PNG)[:-len(PNG) - 4] + struct.pack('>I', 9) + PNG, [SHOWN]),
    ('a picture of 4 GiB', 6, picture_block(PNG)[:-len(PNG) - 4] + b'\xff' * 4 + PNG, [SHOWN]),
]
for what, kind, content, frames in BROKEN:
    @test('%s: the sound, the other tags, one log line' % what)
    def _():
        # zeros behind it: who reads on finds a small size there, not one that would be refused for its own sake
        path = show(None, [GOOD], [(kind, content), (1, bytes(2000))])
        for _ in range(2):
            same(frames, parsed(path))
        same(1, len(log_lines(path)), 'log lines')


@test('broken comments and a broken picture in one file: one log line')
def _():
    path = show(None, [bytes(10), GOOD], [(4, b'\xff' * 20)])
    same([SHOWN], parsed(path))
    same(1, len(log_lines(path)), 'log lines')


@test('a sound file makes no log line')
def _():
    path = show(['TITLE=x', 'junk'], [GOOD])
    same([('TIT2', 'x'), SHOWN], parsed(path))
    same([], log_lines(path))
PY
  tags_verdicts limits
}

# From random comments no value is lost, whatever its name; mutagen reads all of it.
tags_random() {
  cat >"$work/tags/random_tags.py" <<'PY'
import random
from tagtools import *

SEED = 20250302
table = content_of(WORK + '/mapping.txt').decode().splitlines()
known = sorted({c.split('=')[0] for row in table for c in row.split(' -> ')[0].split(' & ')})
known_upper = {n.upper() for n in known}
r = random.Random(SEED)


def characters(n):
    planes = [(0x20, 0x7e), (0xa0, 0x24f), (0x370, 0xd7ff), (0xe000, 0xffff), (0x10000, 0x1ffff), (0x20000, 0x10ffff)]
    return ''.join(chr(r.randint(*r.choice(planes))) for _ in range(n))


def value():
    kind = r.randrange(12)
    if kind == 0:
        return b''
    if kind == 1:
        return r.randbytes(r.randrange(1, 40))
    if kind == 2:
        return characters(r.randrange(1, 3000)).encode()
    if kind == 3:
        return b'%d' % r.randrange(3000)
    if kind == 4:
        return b'%d/%d' % (r.randrange(20), r.randrange(20))
    if kind == 5:
        return b'%04d-%02d-%02d' % (r.randrange(1900, 2100), r.randrange(15), r.randrange(33))
    if kind == 6:
        day = b'%04d-%02d-%02d' % (r.randrange(1900, 2100), r.randrange(1, 13), r.randrange(1, 29))
        return day + b'T%02d:%02d' % (r.randrange(26), r.randrange(62))
    if kind == 7:
        return r.choice([b'A (b)', b'(17)', b'((x', b'A; B', b'A\nB', b'http://a/b', b'1', b'eng', b'Am', b'127.5', b'\xff\xfeA', b'a\0b'])
    if kind == 8:
        return (characters(r.randrange(1, 9)) + ' (' + characters(r.randrange(1, 9)) + ')').encode()
    return characters(r.randrange(1, 30)).encode()


def name():
    kind = r.randrange(10)
    if kind < 6:
        n = r.choice(known)
        return r.choice([n, n.lower(), n.title(), n.swapcase()]).encode()
    if kind < 8:
        return bytes(r.choice([c for c in range(0x20, 0x7e) if c != 0x3d]) for _ in range(r.randrange(1, 12)))
    if kind == 8:
        return characters(r.randrange(0, 5)).replace('=', '').encode()
    return r.randbytes(r.randrange(0, 5)).replace(b'=', b'')


def upper(s):
    return re.sub('[a-z]+', lambda m: m[0].upper(), s)


def strings_of(frames):
    """{(description or '', separator): text} and the strings that are put together from several frames."""
    got = dict(frames)
    whole = set()
    if 'TYER' in got and 'TDAT' in got:
        day = '%s-%s-%s' % (got['TYER'], got['TDAT'][2:], got['TDAT'][:2])
        whole.add(day)
        if 'TIME' in got:
            whole |= {day + c + got['TIME'][:2] + ':' + got['TIME'][2:] for c in 'T '}
    return whole


def is_in(v, key, text):
    if key == 'TCON' and text.startswith('(('):
        text = text[1:]
    if key == 'IPLS':
        cuts = [m.start() for m in re.finditer(re.escape(' ('), v)] if v.endswith(')') else []
        pairs = ['/' + v + '|'] + ['|' + v[i + 2:-1] + '/' + v[:i] + '|' for i in cuts]
        return any(p in '|' + text + '|' for p in pairs)
    sep = {'COMM': '\n', 'USLT': '\n', 'TRCK': '/', 'TPOS': '/', 'MVIN': '/'}.get(key, '; ')
    return sep + v + sep in sep + text + sep


def check(comments):
    path = show(comments)
    frames = parsed(path)
    if frames:
        same(sorted(frames), by_mutagen(path), 'as mutagen sees it')
    whole = strings_of(frames)
    for c in comments:
        n, equals, v = c.partition(b'=')
        n, v = clean(n), clean(v)
        if not equals or not n or not v or v in whole:
            continue
        if upper(n) in known_upper:
            places = frames
        else:
            places = [f for f in frames if f[0].lower() == 'txxx:' + n.lower()]
        true(any(is_in(v, k, t) for k, t in places), 'lost: %r' % c)


@test('random comments: every value is in a frame, and mutagen reads all frames')
def _():
    n = 0
    for i in range(250):
        comments = []
        for _ in range(r.randrange(0, 60)):
            c = name() + b'=' + value() if r.randrange(20) else value()
            if not c.upper().startswith((b'COVERART', b'METADATA_BLOCK_PICTURE', b'WAVEFORMATEXT')):
                comments.append(c)
            if comments and not r.randrange(8):
                comments.append(r.choice(comments))
        try:
            check(comments)
        except Exception as e:
            raise AssertionError('file %d of seed %d: %s' % (i + 1, SEED, e)) from e
        n += len(comments)
    true(n > 5000, 'some thousand comments')
PY
  tags_verdicts random_tags
}

section_tags() {
  have metaflac || { skip 'tags' 'flac and metaflac are not there'; return; }
  /usr/bin/python3 -c 'import mutagen.aiff' 2>/dev/null || { skip 'tags' 'mutagen is not there'; return; }
  local base form=()
  SRC_TAGS=$work/tags/source
  mkdir -p "$SRC_TAGS"
  export TAGS_SRC=$SRC_TAGS TAGS_MNT=$mnt TAGS_LOG=$log TAGS_WORK=$work/tags PYTHONDONTWRITEBYTECODE=1
  tags_tools
  # two stereo channels of 16 bits, and one channel of 8 bits with an odd number of samples
  /usr/bin/python3 - <<'PY' || not_ok 'the sound is made'
import os, random, struct, zlib
r, work = random.Random(1), os.environ['TAGS_WORK']
open(work + '/even.raw', 'wb').write(r.randbytes(4 * 300))
open(work + '/odd.raw', 'wb').write(r.randbytes(4411))
chunk = lambda t, d: struct.pack('>I', len(d)) + t + d + struct.pack('>I', zlib.crc32(t + d))
rows = b''.join(b'\0' + bytes([40 * y, 80, 120]) * 4 for y in range(4))
open(work + '/cover.png', 'wb').write(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 4, 4, 8, 2, 0, 0, 0)) +
                                      chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
PY
  for base in even odd; do
    form=(--channels=2 --bps=16)
    [ "$base" = even ] || form=(--channels=1 --bps=8)
    flac -s -f --force-raw-format --endian=little --sign=signed --sample-rate=44100 "${form[@]}" -o "$work/tags/$base.flac" \
      "$work/tags/$base.raw" || not_ok "flac makes $base.flac"
    flac -s -f -d --force-aiff-format -o "$work/tags/$base.aiff" "$work/tags/$base.flac" || not_ok "flac makes $base.aiff"
  done
  start "$SRC_TAGS" || return
  export TAGS_DAEMON=$daemon
  tags_mapping
  tags_readers
  tags_bytes
  tags_limits
  tags_random
  stop
}

# ---- the original AIFF file ---------------------------------------------------------------------

# Writes AIFF files by hand into a directory: chunks of all kinds in front of and behind the sound, odd
# sizes, odd sound, an SSND offset, AIFF-C.
aiff_by_hand() {
  /usr/bin/python3 - "$1" <<'PY'
import random, struct, sys
rnd = random.Random(9)
def chunk(name, data):
    return name + struct.pack('>I', len(data)) + data + b'\0' * (len(data) & 1)
def rate(v):
    e = 16383 + 31
    while not v & 0x80000000:
        v <<= 1
        e -= 1
    return struct.pack('>HII', e, v, 0)
def samples(n, bits, channels):
    out = b''
    for i in range(n * channels):
        out += rnd.randrange(-(1 << (bits - 1)), 1 << (bits - 1)).to_bytes(bits // 8, 'big', signed=True)
    return out
def aiff(name, bits, channels, n, before=b'', after=b'', kind=b'AIFF', comm=b'', swap=False, comm_last=False):
    sound = samples(n, bits, channels)
    if swap:
        sound = b''.join(sound[i:i + bits // 8][::-1] for i in range(0, len(sound), bits // 8))
    c = chunk(b'COMM', struct.pack('>HIH', channels, n, bits) + rate(44100) + comm)
    s = chunk(b'SSND', struct.pack('>II', 0, 0) + sound)
    body = kind + (b'' if comm_last else c) + before + s + (c if comm_last else b'') + after
    open('%s/%s.aif' % (sys.argv[1], name), 'wb').write(b'FORM' + struct.pack('>I', len(body)) + body)
mark = chunk(b'MARK', struct.pack('>HHIB', 2, 1, 10, 4) + b'loop\0' + struct.pack('>HIB', 2, 90, 3) + b'end')
inst = chunk(b'INST', bytes(range(20)))
comt = chunk(b'COMT', struct.pack('>HIHH', 1, 3000000000, 0, 5) + b'hello\0')
id3 = chunk(b'ID3 ', b'ID3\3\0\0\0\0\0\x15TIT2\0\0\0\x0b\0\0\0was it so?')
odd = chunk(b'NAME', b'odd')
strange = chunk(b'qWeR', bytes(rnd.randrange(256) for _ in range(777)))
for bits in 8, 16, 24:
    for channels in 1, 2:
        aiff('hand-%d-%d' % (bits, channels), bits, channels, 4411, odd + mark + inst, comt + strange + id3)
aiff('before', 16, 2, 5000, id3 + strange + odd)
aiff('after', 16, 2, 5000, b'', odd + odd + mark)
aiff('oddsound', 8, 1, 333, odd, id3)
aiff('oddsound24', 24, 1, 101)
aiff('aifc-none', 16, 2, 3000, chunk(b'FVER', struct.pack('>I', 0xA2805140)), odd, b'AIFC', b'NONE\x0enot compressed\0')
aiff('aifc-sowt', 16, 2, 3000, chunk(b'FVER', struct.pack('>I', 0xA2805140)), odd, b'AIFC', b'sowt\0\0', True)
PY
}

# foreign_edit FLAC OUT HOW: the same file with its set of APPLICATION blocks spoiled, or with what flac
# itself would not write
foreign_edit() {
  /usr/bin/python3 - "$@" <<'PY'
import struct, sys
src, to, how = sys.argv[1:]
d = open(src, 'rb').read()
blocks, at, last = [], 4, False
while not last:
    last, kind, n = d[at] & 0x80, d[at] & 0x7f, int.from_bytes(d[at + 1:at + 4], 'big')
    blocks.append([kind, bytearray(d[at + 4:at + 4 + n])])
    at += 4 + n
apps = [b for b in blocks if b[0] == 2]
ssnd = [b for b in apps if b[1][4:8] == b'SSND'][0]
comm = [b for b in apps if b[1][4:8] == b'COMM'][0]
form = apps[0]
if how == 'no-ssnd':
    blocks.remove(ssnd)
elif how == 'no-comm':
    blocks.remove(comm)
elif how == 'no-form':
    blocks.remove(form)
elif how == 'two-ssnd':
    blocks.append([2, bytearray(ssnd[1])])
elif how == 'channels':
    comm[1][13] ^= 1
elif how == 'frames':
    comm[1][17] ^= 1
elif how == 'bits':
    comm[1][19] ^= 8
elif how == 'rate':
    comm[1][24] ^= 1
elif how == 'form-size':
    form[1][11] ^= 2
elif how == 'huge':
    apps[-1][1][8:12] = b'\xff\xff\xff\xf0'
elif how == 'short':
    apps[-1][1] = apps[-1][1][:6]
    blocks[blocks.index(apps[-1])][1] = apps[-1][1]
elif how == 'riff':
    for b in apps:
        b[1][:4] = b'riff'
elif how == 'offset':  # sound that begins 16 bytes late: FORM and SSND count them
    ssnd[1][8:12] = struct.pack('>I', int.from_bytes(ssnd[1][8:12], 'big') + 16)
    ssnd[1][12:16] = struct.pack('>I', 16)
    ssnd[1] += b'sixteen bytes...'
    form[1][8:12] = struct.pack('>I', int.from_bytes(form[1][8:12], 'big') + 16)
out = b'fLaC'
for i, (kind, data) in enumerate(blocks):
    out += bytes([kind | (0x80 if i == len(blocks) - 1 else 0)]) + len(data).to_bytes(3, 'big') + data
open(to, 'wb').write(out + d[at:])
PY
}

section_foreign() {
  local src=$work/foreign f name how
  mkdir -p "$src/bad" "$work/original"
  tune 16 2 44100 30001 >"$work/raw"
  sox -t raw -e signed -b 16 -L -c 2 -r 44100 "$work/raw" --comment 'by sox' "$work/original/sox.aif" || not_ok 'sox writes AIFF'
  sox -t raw -e signed -b 16 -L -c 2 -r 44100 "$work/raw" -b 24 "$work/original/sox24.aif" || not_ok 'sox writes AIFF'
  sox -t raw -e signed -b 16 -L -c 2 -r 44100 "$work/raw" -b 8 -c 1 "$work/original/sox8.aif" trim 0 30000s 2>/dev/null || not_ok 'sox writes AIFF'
  ffmpeg -v error -nostdin -f s16le -ar 44100 -ac 2 -i "$work/raw" -metadata title=Then -write_id3v2 1 "$work/original/ffmpeg.aif" ||
    not_ok 'ffmpeg writes AIFF'
  sndfile-convert "$work/original/sox.aif" "$work/original/sndfile.aif" >"$out" 2>&1 || not_ok 'sndfile-convert writes AIFF' "$out"
  aiff_by_hand "$work/original"
  for f in "$work"/original/*.aif; do
    name=$(basename "$f" .aif)
    flac --totally-silent -f --keep-foreign-metadata -T TITLE=Now "$f" -o "$src/$name.flac" || not_ok "flac takes $name.aif"
  done
  for how in no-ssnd no-comm no-form two-ssnd channels frames bits rate form-size huge short; do
    foreign_edit "$src/hand-16-2.flac" "$src/bad/$how.flac" "$how"
  done
  foreign_edit "$src/hand-16-2.flac" "$src/riff.flac" riff
  foreign_edit "$src/hand-16-2.flac" "$src/offset.flac" offset
  cp "$work/original/hand-16-2.aif" "$work/original/offset.aif"
  /usr/bin/python3 - "$work/original/offset.aif" <<'PY'
import struct, sys
d = open(sys.argv[1], 'rb').read()
at = d.index(b'SSND')
size = int.from_bytes(d[at + 4:at + 8], 'big')
d = d[:4] + struct.pack('>I', len(d) + 16 - 8) + d[8:at + 4] + struct.pack('>III', size + 16, 16, 0) + b'sixteen bytes...' + d[at + 16:]
open(sys.argv[1], 'wb').write(d)
PY

  start "$src" || return
  for f in "$work"/original/*.aif; do
    name=$(basename "$f" .aif)
    equal "$name: the first stat knows the size" "$(stat -c %s "$f")" "$(stat -c %s "$mnt/$name.aiff")"
    check "$name: the original comes back, byte for byte" cmp "$f" "$mnt/$name.aiff"
  done
  for f in hand-16-2 sox24 hand-24-1; do # flac's own way back, as a second witness
    flac --totally-silent -d -f --keep-foreign-metadata "$src/$f.flac" -o "$work/back.aiff"
    check "$f: as flac brings it back" cmp "$work/back.aiff" "$mnt/$f.aiff"
  done
  in_pieces "$mnt/hand-24-2.aiff" >"$out" 2>&1
  equal 'the same in pieces, any way' 6 "$(grep -c "$(md5_of "$work/original/hand-24-2.aif")" "$out")"
  for f in "$src"/bad/*.flac "$src/riff.flac"; do
    name=${f#"$src"/}
    name=${name%.flac}
    equal "$name: shown as usual" 'AIFFCOMM TITLE Now' "$(head -c 16 "$mnt/$name.aiff" | tail -c 8) $(title_of "$mnt/$name.aiff")"
    equal "$name: with its sound" "$(flac -d -s -c --force-raw-format --endian=big --sign=signed "$f" 2>/dev/null | md5sum)" \
      "$(tail -c +55 "$mnt/$name.aiff" | head -c 17644 | md5sum)"
  done
  equal 'with one log line each' 11 "$(grep -c 'bad/.*foreign metadata' "$log")"
  equal 'and none for what was made from WAV' 0 "$(grep -c 'riff.flac' "$log")"
  stop

  start "$src" -o no_foreign || return
  equal 'no_foreign shows the tag of the FLAC file' 'TITLE Now' "$(title_of "$mnt/ffmpeg.aiff")"
  equal 'and no log line' "" "$(cat "$log")"
  stop
}

title_of() {
  /usr/bin/python3 - "$1" <<'PY'
import mutagen.aiff, sys
t = mutagen.aiff.AIFF(sys.argv[1])
print('TITLE', t.tags['TIT2'].text[0] if t.tags else None)
PY
}

# ---- any order ----------------------------------------------------------------------------------

# false_sync OUT: a mono 16-bit FLAC of verbatim subframes whose sound is full of frame headers: sync code,
# plausible fields, right CRC-8, and numbers of frames before, at and behind their place
false_sync() {
  /usr/bin/python3 - "$1" <<'PY'
import hashlib, random, sys
rnd = random.Random(5)
BLOCK, FRAMES = 1024, 60
def crc8(d):
    c = 0
    for b in d:
        c ^= b
        for _ in range(8):
            c = (c << 1 ^ 0x07) & 0xff if c & 0x80 else c << 1
    return bytes([c])
def crc16(d):
    c = 0
    for b in d:
        c ^= b << 8
        for _ in range(8):
            c = (c << 1 ^ 0x8005) & 0xffff if c & 0x8000 else c << 1
    return c.to_bytes(2, 'big')
def header(n):
    number = bytes([n]) if n < 0x80 else bytes([0xc0 | n >> 6, 0x80 | n & 0x3f])
    h = b'\xff\xf8\xa9\x08' + number  # 1,024 samples, 44.1 kHz, mono, 16 bits
    return h + crc8(h)
pcm, frames = b'', b''
for n in range(FRAMES):
    sound = bytearray(rnd.randbytes(BLOCK * 2))
    for k in range(12):  # the next number most of all
        at = rnd.randrange(0, len(sound) - 8)
        fake = header(max(0, min(FRAMES - 1, n + rnd.choice([-2, -1, 0, 1, 1, 1, 2, 5]))))
        sound[at:at + len(fake)] = fake
    f = header(n) + b'\x02' + bytes(sound)  # subframe: verbatim
    frames += f + crc16(f)
    pcm += bytes(sound)
little = b''.join(pcm[i:i + 2][::-1] for i in range(0, len(pcm), 2))
total = BLOCK * FRAMES
info = BLOCK.to_bytes(2, 'big') * 2 + bytes(6) + (44100 << 44 | 0 << 41 | 15 << 36 | total).to_bytes(8, 'big') + hashlib.md5(little).digest()
open(sys.argv[1], 'wb').write(b'fLaC\x80\0\0\x22' + info + frames)
PY
}

# seektable FLAC OUT HOW: puts a SEEKTABLE that lies in front of the sound
seektable() {
  /usr/bin/python3 - "$@" <<'PY'
import random, struct, sys
src, to, how = sys.argv[1:]
d, rnd = open(src, 'rb').read(), random.Random(3)
points = {'thousands': [(i * 7, i * 3, 4096) for i in range(5000)],
          'disorder': [(rnd.randrange(1 << 20), rnd.randrange(1 << 20), 4096) for _ in range(300)],
          'beyond': [(1 << 62, 1 << 62, 65535), (4096, 1 << 40, 4096), (8192, (1 << 64) - 1, 1)],
          'shifted': [(i * 4096, i * 9000 + 1, 4096) for i in range(60)]}[how]
table = b''.join(struct.pack('>QQH', *p) for p in points)
assert d[4] == 0x80
open(to, 'wb').write(d[:4] + b'\0' + d[5:42] + b'\x83' + len(table).to_bytes(3, 'big') + table + d[42:])
PY
}

# places AIFF REFERENCE BLOCK: at 500 random places, at the end first, and around each multiple of BLOCK,
# the file is the reference; each file opened anew, pages dropped
places() {
  /usr/bin/python3 - "$@" <<'PY'
import os, random, sys
aiff, ref, block = sys.argv[1], open(sys.argv[2], 'rb').read(), int(sys.argv[3])
fd = os.open(aiff, os.O_RDONLY)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
size, rnd = len(ref), random.Random(11)
unit = int.from_bytes(ref[20:22], 'big') * ((int.from_bytes(ref[26:28], 'big') + 7) // 8)
frames = int.from_bytes(ref[22:26], 'big')
where = [(max(0, size - 65536), 65536), (0, 100)]
where += [(rnd.randrange(size), rnd.choice([1, 3, 100, 4096, 9000])) for _ in range(500)]
edges = list(range(0, frames, block))
for e in edges if len(edges) < 150 else rnd.sample(edges, 150):
    where += [(54 + (e + k) * unit, 2 * unit) for k in (-1, 0, 1) if e + k >= 0]
for n, (at, length) in enumerate(where):
    if n % 50 == 0:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    got = os.pread(fd, length, at)
    if got != ref[at:at + length]:
        sys.exit('differs at %d, %d bytes' % (at, length))
print(len(where), 'places')
PY
}

# The locator against a full scan: every frame of each file, as libFLAC finds them one after the other,
# has to be where the locator says, asked in random order, each on a fresh table and on a used one.
locator_test() {
  cat >"$work/locate.c" <<'C'
#define main aifffffs_main
#include "aifffffs.c"
#undef main
/* A search in a file that is shorter than it was, an "f" being the last that is left, ends. */
static int short_file(void)
{
	FILE *f = tmpfile();
	uint8_t window[64];
	struct frame got;
	fputs("ffffffff", f);
	fflush(f);
	struct stream s = { .fd = fileno(f), .end = 1000, .samples = 1000, .channels = 1, .bits = 8 };
	struct search q = { .r = { .fd = s.fd, .buf = window, .room = sizeof window }, .left = INT_MAX };
	alarm(20);
	int found = frame_search(&s, &q, 0, 1000, 0, UINT64_MAX, &got);
	alarm(0);
	fclose(f);
	return found == 0 || (printf("a frame in a file of f\n"), 0);
}

/* A full size cache takes new files, too. */
static int full_cache(void)
{
	struct cache c;
	struct cached e = { 0 };
	unsigned hits = 0;
	cache_init(&c, 1000);
	for (unsigned i = 0; i < 1500; i++) {
		e.id.ino = i;
		cache_put(&c, &e);
	}
	for (unsigned i = 1000; i < 1500; i++) {
		e.id.ino = i;
		hits += cache_get(&c, &e.id, &e);
	}
	cache_free(&c);
	return hits == 500 || (printf("%u of 500 new files in a full cache\n", hits), 0);
}

int main(int argc, char **argv)
{
	unsigned long checked = 0;
	srand(1);
	for (int f = 1; f < argc; f++) {
		static struct { uint64_t sample; off_t at; } frames[200000];
		size_t n = 0;
		struct track t;
		struct stat st;
		uint8_t window[FRAME_WINDOW];
		int fd = open(argv[f], O_RDONLY);
		struct search q = { .r = { .fd = fd, .buf = window, .room = sizeof window }, .left = INT_MAX };
		if (fd < 0 || fstat(fd, &st) < 0 || track_read(&t, fd, st.st_size) != 0 || stream_learn(&t.stream, &q) != 0)
			return printf("%s: cannot be read\n", argv[f]), 1;
		if (t.stream.samples == 0 && stream_count(&t.stream, &q, &t.stream.samples) != 0)
			return printf("%s: cannot be counted\n", argv[f]), 1;
		struct decoder *d = decoder_new(&t.stream);
		while (d->next < t.stream.samples && n < 200000) { /* from and to are 0: all is decoded, nothing wanted */
			frames[n].sample = d->next;
			frames[n++].at = d->at;
			if (decoder_step(d) != 0)
				return printf("%s: frame %zu does not decode\n", argv[f], n - 1), 1;
		}
		struct anchors used = { .lock = PTHREAD_MUTEX_INITIALIZER };
		anchors_start(&used, &t.stream);
		for (int i = 0; i < 300; i++) {
			struct anchors fresh = { .lock = PTHREAD_MUTEX_INITIALIZER };
			struct frame got;
			size_t k = (size_t)rand() % n;
			uint64_t next = k + 1 < n ? frames[k + 1].sample : t.stream.samples;
			uint64_t target = frames[k].sample + (uint64_t)rand() % (next - frames[k].sample);
			anchors_start(&fresh, &t.stream);
			/* a claim may be wrong where the sound imitates headers; strict has the last word */
			if (frame_locate(&t.stream, &fresh, target, true, &got) != 1 || got.at != frames[k].at || got.sample != frames[k].sample)
				return printf("%s: strict: sample %" PRIu64 " found at %lld, is at %lld\n", argv[f], target, (long long)got.at, (long long)frames[k].at), 1;
			if (strstr(argv[f], "false"))
				continue;
			if (frame_locate(&t.stream, &used, target, false, &got) != 1 || got.at != frames[k].at || got.sample != frames[k].sample)
				return printf("%s: sample %" PRIu64 " found at %lld, is at %lld\n", argv[f], target, (long long)got.at, (long long)frames[k].at), 1;
			checked++;
		}
		decoder_free(d);
		track_free(&t);
		close(fd);
	}
	if (!short_file() || !full_cache())
		return 1;
	printf("%lu places\n", checked);
	return 0;
}
C
  # shellcheck disable=SC2046 # words are wanted
  cc -std=c11 -O1 -g -fsanitize=address,undefined -I"$HERE" -Wno-unused-function $(pkg-config --cflags fuse3 flac) \
    "$work/locate.c" -o "$work/locate" $(pkg-config --libs fuse3 flac) -pthread || return
  "$work/locate" "$@"
}

# cut_sound AIFF RAW PART: opened anew for each read, the sound is RAW or an error, and the latter behind PART of 27
cut_sound() {
  /usr/bin/python3 - "$@" <<'PY'
import os, sys
aiff, ref, part = sys.argv[1], open(sys.argv[2], 'rb').read(), int(sys.argv[3])
good = 0
for at in range(0, len(ref), 9000):
    fd = os.open(aiff, os.O_RDONLY | os.O_DIRECT)
    try:
        if os.pread(fd, 4000, 54 + at) != ref[at:at + 4000]:
            sys.exit('other sound at %d' % at)
        good += 1
    except OSError:
        pass
    os.close(fd)
if not (part - 2) * len(ref) // 27 <= good * 9000 <= (part + 2) * len(ref) // 27:
    sys.exit('%d reads without an error' % good)
PY
}

section_seek() {
  local src=$work/seek name block sound how f files=${FLAC_TEST_FILES:-}
  mkdir -p "$src"
  for block in 16 192 4096 65535; do
    tune 16 2 44100 $((block == 16 ? 40000 : 300000)) | flac_of 16 2 44100 "$src/b$block.flac" --blocksize="$block" --no-padding
    bare "$src/b$block.flac"
  done
  tune_flac 24 2 96000 200000 "$src/hi.flac" -5
  bare "$src/hi.flac"
  tune_flac 8 1 8000 200000 "$src/m8.flac" -5
  bare "$src/m8.flac"
  false_sync "$src/false.flac"
  equal 'the file of false headers is sound, flac says' 0 "$(flac -t -s "$src/false.flac" >/dev/null 2>&1; echo $?)"
  for how in thousands disorder beyond shifted; do seektable "$src/b4096.flac" "$src/table-$how.flac" "$how"; done
  cp "$src/b4096.flac" "$src/table.flac"
  metaflac --add-seekpoint=1s "$src/table.flac"
  if [ -n "$files" ]; then
    for f in "$files"/subset/*.flac "$files"/uncommon/0[5789]*.flac; do
      name=$(basename "$f")
      cp "$f" "$src/c${name%% *}-$(basename "$(dirname "$f")").flac"
    done
    chmod -R u+w "$src"
  fi
  start "$src" -o stats || return
  for f in "$src"/*.flac; do
    name=$(basename "$f" .flac)
    # 32 bits without a libFLAC that can
    [[ $name = c05-uncommon ]] && ! head -c 1 "$mnt/$name.aiff" >/dev/null 2>&1 && continue
    # what flac makes of it, in our header (FORM counts the tag) and with our tag behind
    reference "$f" "$work/seek-ref.raw"
    sound=$(stat -c %s "$work/seek-ref.raw")
    { head -c 54 "$mnt/$name.aiff"; tail -c +55 "$work/seek-ref.raw"; tail -c "+$((sound + 1))" "$mnt/$name.aiff"; } >"$work/seek-ref.aiff"
    check "$name: right at random places and around every frame" \
      places "$mnt/$name.aiff" "$work/seek-ref.aiff" "$(metaflac --show-max-blocksize "$f")"
  done
  stop
  check 'false headers cost a second search, no wrong sample' grep -qE 'errors=0 fallbacks=[1-9]' "$log"
  check 'each frame is where a full scan finds it' locator_test "$src"/*.flac

  # a file cut short with another one behind it, whose frames have the same numbers
  mkdir "$work/cut"
  tune 16 2 44100 110000 | flac_of 16 2 44100 "$work/first.flac" --no-padding
  raw 440000 7 | flac_of 16 2 44100 "$work/second.flac" --no-padding
  flac -d -s -c --force-raw-format --endian=big --sign=signed "$work/first.flac" >"$work/raw"
  for name in 2 4 9 14 20; do
    { head -c $(($(stat -c %s "$work/first.flac") * name / 27)) "$work/first.flac"; cat "$work/second.flac"; } >"$work/cut/$name.flac"
  done
  start "$work/cut" || return
  for name in 2 4 9 14 20; do
    check "cut at $name of 27, and another file appended: its own sound or an error" cut_sound "$mnt/$name.aiff" "$work/raw" "$name"
  done
  stop

  # what the end of a file costs right after open: source bytes read, by the kernel's count
  mkdir "$work/tail"
  tune 16 2 44100 1500000 | flac_of 16 2 44100 "$work/tail/long.flac" -5
  start "$work/tail" -o stats || return
  equal 'the last 64 KiB right after open' "$(reference "$work/tail/long.flac" "$work/seek-ref.aiff"; tail -c 65536 "$work/seek-ref.aiff" | md5sum)" \
    "$(tail -c 65536 "$mnt/long.aiff" | md5sum)"
  stop
  equal 'cost no fallback and few reads' 1 "$(sed -n 's/.* reads=\([0-9]*\) .* errors=0 fallbacks=0$/\1/p' "$log" | awk '{ print ($1 <= 6) }')"
}

# ---- large libraries ----------------------------------------------------------------------------

# getdents DIR SIZE: names, inodes and types, with a buffer of SIZE bytes for each call
getdents() {
  cat >"$work/getdents.c" <<'C'
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	char buf[65536];
	int fd = open(argv[1], O_RDONLY | O_DIRECTORY);
	long n;
	if (argc < 3 || fd < 0)
		return 1;
	while ((n = syscall(SYS_getdents64, fd, buf, atoi(argv[2]))) > 0)
		for (char *p = buf; p < buf + n; p += *(unsigned short *)(void *)(p + 16))
			printf("%s %d %d\n", p + 19, *(unsigned long long *)(void *)p != 0, p[18]);
	return n < 0;
}
C
  [ -x "$work/getdents" ] || cc -O1 "$work/getdents.c" -o "$work/getdents"
  "$work/getdents" "$1" "$2"
}

# Directory without d_type and with reads counted: a preloaded library in front of the daemon's readdir.
no_dtype() {
  cat >"$work/no-dtype.c" <<'C'
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
struct dirent64 *readdir64(DIR *d)
{
	struct dirent64 *(*next)(DIR *) = (struct dirent64 *(*)(DIR *))dlsym(RTLD_NEXT, "readdir64");
	struct dirent64 *e = next(d);
	if (e)
		e->d_type = DT_UNKNOWN;
	return e;
}
C
  cc -shared -fPIC -O1 "$work/no-dtype.c" -o "$work/no-dtype.so" -ldl
}

section_listing() {
  local src=$work/library i n wait pids=() pid
  mkdir -p "$src/many" "$src/junk" "$src/closed" "$src/pictures"
  tune_flac 16 1 8000 800 "$work/small.flac" --no-padding
  bench_listing_files "$src/many" 1 5000 0
  reference "$work/small.flac" "$work/small.aiff"

  # a stat reads no more than three times and 64 KiB of a file with a picture of a megabyte
  bench_listing_files "$src/pictures" 1 3 1000000
  start "$src" || return
  stat -c %s "$mnt/pictures/000/000.aiff" >/dev/null
  if have strace; then
    strace -f -e trace=pread64 -p "$daemon" -o "$work/trace" 2>"$out" &
    pid=$!
    until_true 20 grep -q attached "$out"
    stat -c %s "$mnt/pictures/000/001.aiff" >"$work/size"
    kill "$pid"
    wait "$pid" 2>/dev/null
    equal 'a stat costs at most 3 reads and 64 KiB' 1 \
      "$(grep -o 'pread64.*= [0-9]*' "$work/trace" | awk '{ n++; b += $NF } END { print (n >= 1 && n <= 3 && b <= 65536) }')"
    equal 'and is exact' "$(wc -c <"$mnt/pictures/000/001.aiff")" "$(cat "$work/size")"
  else
    skip 'a stat costs at most 3 reads and 64 KiB' 'strace is not there'
  fi
  stop

  # every entry once, whatever the buffer
  start "$src" || return
  equal 'a directory opened anew goes on from an offset that was told before' 'True 5002' "$(/usr/bin/python3 - "$mnt/many/000" <<'PY'
import ctypes, sys
libc = ctypes.CDLL(None)
libc.opendir.restype = libc.readdir64.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
libc.readdir64.argtypes = libc.telldir.argtypes = libc.closedir.argtypes = [ctypes.c_void_p]
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
def entries(d, most):
    out = []
    while len(out) < most and (e := libc.readdir64(d)):
        out.append(ctypes.string_at(e + 19))
    return out
a = libc.opendir(sys.argv[1].encode())
first, at = entries(a, 1000), libc.telldir(a)
b = libc.opendir(sys.argv[1].encode())
libc.seekdir(b, at)
rest = entries(b, 10000)
print(entries(a, 10000) == rest, len(set(first + rest)))
PY
)"
  seq -f '%03g.aiff 1 8' 0 4999 | sort >"$work/want"
  for n in 300 4096 65536; do
    getdents "$mnt/many/000" $n | grep -v '^\.' | sort >"$work/got"
    check "each of 5,000 entries once, with inode and type, $n bytes at a time" cmp "$work/want" "$work/got"
  done
  stop

  # one pass: with -d no LOOKUP and no GETATTR appears for the files
  # (the kernel is to remember attributes for as long as this takes)
  start "$src" -d -o attr_timeout=60,entry_timeout=60 || return
  ls -l "$mnt/many" >/dev/null
  n=$(grep -cE '(LOOKUP|GETATTR)' "$log")
  ls -l "$mnt/many/000" >"$work/got"
  equal 'ls -l of a folder is one pass' 1 "$(($(grep -cE 'LOOKUP|GETATTR' "$log") - n <= 10))"
  equal 'with the right sizes' 5000 "$(awk -v s="$(stat -c %s "$mnt/many/000/000.aiff")" '$5 >= s && $5 <= s + 8' "$work/got" | wc -l)"
  stop

  # where the source does not tell types
  no_dtype
  if ldd "$AIFFFFFS" | grep -qE 'libasan|libtsan' || nm "$AIFFFFFS" | grep -qE '__(asan|tsan)_init'; then
    skip 'a source without d_type' 'sanitizers want to be loaded first'
  else
    LD_PRELOAD=$work/no-dtype.so start "$src" || return
    getdents "$mnt/many/000" 4096 | grep -v '^\.' | sort >"$work/got"
    check 'a source without d_type is listed alike' cmp "$work/want" "$work/got"
    stop
  fi

  # negative look-ups read no directory
  if have strace; then
    start "$src" || return
    ls "$mnt/many" >/dev/null
    strace -f -e trace=getdents64 -p "$daemon" -o "$work/trace" 2>"$out" &
    pid=$!
    until_true 20 grep -q attached "$out"
    for i in folder.jpg ._x .DS_Store x.aiff none.flac; do refuse "no $i" stat "$mnt/many/000/$i"; done
    kill "$pid"
    wait "$pid" 2>/dev/null
    equal 'and the directory was not read for that' 0 "$(grep -c getdents64 "$work/trace")"
    stop
  fi

  # files come and go
  start "$src" || return
  (for i in $(seq 300); do
    mv "$src/many/000/0$((i % 90 + 10)).flac" "$src/many/000/moved.flac"
    mv "$src/many/000/moved.flac" "$src/many/000/0$((i % 90 + 10)).flac"
  done) &
  pid=$!
  wait=
  while kill -0 "$pid" 2>/dev/null; do
    ls -l "$mnt/many/000" >"$work/got" 2>"$out" || wait="$wait $(cat "$out")"
    n=$(grep '\.aiff$' "$work/got" | grep -cvE ' (0[1-9][0-9]|moved)\.aiff$')
    [ "$n" = 4910 ] || wait="$wait $n entries"
    [ -z "$(awk '/aiff$/ && $5 == 0' "$work/got")" ] || wait="$wait zero size"
  done
  wait "$pid"
  equal 'listing while files are renamed: no error for the rest, no zero size' "" "$(echo "$wait" | grep -v 'No such file')"
  stop

  # files that are not FLAC: one log line each, once, and remembered
  for i in $(seq 5000); do echo "no flac $i" >"$src/junk/$i.flac"; done
  chmod 0 "$src/closed"
  sleep 0.1 # older than the clock tick within which nothing is remembered
  start "$src" || return
  for i in 1 2; do ls -l "$mnt/junk" >/dev/null 2>&1; done
  equal 'all are listed' 5000 "$(getdents "$mnt/junk" 32768 | grep -c aiff)"
  equal '5,000 files that are no FLAC: a log line each, once' 5000 "$(grep -c 'not a FLAC file' "$log")"
  if id nobody >/dev/null 2>&1; then
    chmod 755 "$work"
    stop
    start "$src" -o allow_other || return
    equal 'a closed folder is closed, the rest is not' 'Permission denied 5000' \
      "$(setpriv --reuid=nobody --clear-groups ls "$mnt/closed" 2>&1 | grep -o 'Permission denied') $(setpriv --reuid=nobody --clear-groups ls "$mnt/many/000" | wc -l)"
  fi
  stop
  chmod 755 "$src/closed"
  rm -rf "$src/junk"

  # unknown number of samples: counted, and remembered
  tune 16 2 44100 30000 | flac --totally-silent --force-raw-format --endian=little --sign=signed --bps=16 --channels=2 \
    --sample-rate=44100 -c - >"$src/unknown.flac"
  /usr/bin/python3 - "$src/unknown.flac" "$src/junk.flac" <<'PY'
import sys
d = bytearray(open(sys.argv[1], 'rb').read())
d[21] &= 0xf0
d[22:26] = bytes(4)
open(sys.argv[1], 'wb').write(d)
open(sys.argv[2], 'wb').write(d + b'TAG' + bytes(125))
PY
  sleep 0.1
  start "$src" || return
  for i in unknown junk; do
    equal "$i: the size is exact from the first stat" 120054 "$(stat -c %s "$mnt/$i.aiff")"
    tune 16 2 44100 30000 | sox -t raw -e signed -b 16 -L -c 2 -r 44100 - -t raw -B - 2>/dev/null >"$work/raw"
    equal "$i: and the sound is whole" "$(md5_of "$work/raw")" "$(tail -c +55 "$mnt/$i.aiff" | md5sum | cut -d' ' -f1)"
  done
  stop

  # tools agree
  rm "$src/junk.flac"
  start "$src" || return
  (cd "$mnt" && find . -type f -printf '%p %s\n' | sort) >"$work/find"
  (cd "$mnt" && ls -lR | awk '/aiff$/ { print $5 }' | sort -n) >"$work/ls"
  check 'ls and find agree' cmp <(awk '{ print $2 }' "$work/find" | sort -n) "$work/ls"
  equal 'so does du' "$(awk '{ s += $2 } END { print s }' "$work/find")" "$(du -sb --apparent-size "$mnt" | awk '{ print $1 }' | awk -v d="$(find "$mnt" -type d -printf '%s\n' | awk '{ s += $1 } END { print s }')" '{ print $1 - d }')"
  if have rsync; then
    check 'rsync -a copies the tree' rsync -a "$mnt/" "$work/rsync/"
    equal 'and a second time nothing' "" "$(rsync -ai "$mnt/" "$work/rsync/")"
    rm -rf "$work/rsync"
  else
    skip 'rsync -a twice' 'rsync is not there'
  fi
  stop

  # many open handles
  start "$src" -o stats || return
  /usr/bin/python3 - "$mnt/many/000" "$daemon" >"$out" 2>&1 <<'PY'
import os, resource, sys
path, pid = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def rss():
    return [int(l.split()[1]) // 1024 for l in open('/proc/%s/status' % pid) if l.startswith('VmRSS')][0]
fds = [os.open('%s/%03d.aiff' % (path, i), os.O_RDONLY) for i in range(2000)]
print('open', len(fds), rss())
print('read', sum(len(os.pread(fd, 1000, 54)) for fd in fds), rss())
for fd in fds:
    os.close(fd)
print('closed', rss())
PY
  if nm "$AIFFFFFS" | grep -qE '__(asan|tsan)_init'; then
    check '2,000 files open at once, each read' grep -q '^read 2000000 ' "$out"
  else
    equal '2,000 files open at once, each read: under 96 MB, under 32 MB then' 1 \
      "$(awk '/^read 2000000/ { r = $3 } /^closed/ { c = $2 } END { print (r > 0 && r < 96 && c < 32) }' "$out")"
  fi
  until_true 20 eval '[ "$(stats handles)" = 0 ]'
  equal 'an open that reads nothing makes no decoder' '0' "$(exec 3<"$mnt/many/000/000.aiff"; stats decoders)"
  stop
}

# ---- the file as a lesson -----------------------------------------------------------------------

# part NAME: a section of aifffffs.c, cut out along its banners
part() { sed -n "/^\/\* ---- $1 -/,/^\/\* ---- /p" "$HERE/aifffffs.c" | sed '$d'; }

# lifted NAME: the program of that name in the README's section on taking a part, with the parts put in
lifted() {
  local line
  sed -n "/^$1: /,/^    }\$/p" "$HERE/README" | sed -n 's/^    //p' | while IFS= read -r line; do
    case $line in
      '/* part '*) line=${line#'/* part '}; part "${line%' */'}" ;;
      *) printf '%s\n' "$line" ;;
    esac
  done
}

section_lesson() {
  local name c
  for name in AIFF 'ID3 TAG' 'TICKET LOCK' 'THREAD POOL'; do
    c=$work/${name/ /-}
    lifted "$name" >"$c.c"
    # shellcheck disable=SC2046 # words are wanted
    check "$name: lifts out and compiles alone, without a warning" cc -std=c11 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -O1 -Wall -Wextra \
      -Wno-unused-function -Werror "$c.c" -o "$c" $([ "$name" = 'THREAD POOL' ] && pkg-config --cflags --libs fuse3 | sed 's/-I/-isystem /g') -pthread
  done
  check 'AIFF: runs' sh -c "'$work/AIFF' >'$work/lifted.aiff'"
  printf '\1\0\2\0\377\377\376\377\0\1\0\2' |
    sox -t raw -e signed -b 16 -L -c 2 -r 44100 - "$work/lifted.wav" 2>"$out"
  equal 'AIFF: and sox reads its samples' "$(sox "$work/lifted.wav" -t raw - | xxd -p)" "$(sox "$work/lifted.aiff" -t raw -L - | xxd -p)"
  check 'ID3 TAG: runs' sh -c "'$work/ID3-TAG' >'$work/lifted.id3'"
  equal 'ID3 TAG: and mutagen reads the title' Song \
    "$(/usr/bin/python3 -c 'import mutagen.id3, sys; print(mutagen.id3.ID3(sys.argv[1])["TIT2"])' "$work/lifted.id3")"
  equal 'TICKET LOCK: runs' 0 "$("$work/TICKET-LOCK")"
  "$work/THREAD-POOL" "$mnt" &
  daemon=$!
  # (its root has no attributes yet)
  check 'THREAD POOL: mounts' until_true 20 grep -qF " $mnt " /proc/self/mounts
  : >"$log"
  refuse 'THREAD POOL: and answers' timeout 20 ls "$mnt/x"
  stop

  equal 'the map in the first comment is the sections, in order' "$(sed -n 's/^\/\* ---- \([A-Z0-9 ]*[A-Z]\) -.*/\1/p' aifffffs.c | tr '\n' ' ')" \
    "$(sed -n '/THE FILE goes from/,/can be cut out/p' aifffffs.c | grep -E '^ \*     [A-Z]' | sed 's/^ \*     //; s/  */ /g' | map_words)"
  calls_up >"$out"
  equal 'a section needs only what stands above it' "" "$(cat "$out")"
  equal 'each comment of the table of tags is in README and man page' "" "$(tags_told)"
}

# The map has two blanks between names: compare as words.
map_words() { tr '\n' ' ' | sed 's/  */ /g'; }

# calls_up: functions that are used above the line on which they are defined or announced
calls_up() {
  /usr/bin/python3 - "$HERE/aifffffs.c" <<'PY'
import re, sys
text = re.sub(r'/\*.*?\*/', lambda m: re.sub(r'[^\n]', ' ', m.group()), open(sys.argv[1]).read(), flags=re.S)
text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
first = {}
lines = text.split('\n')
for i, l in enumerate(lines):
    m = re.match(r'(?:static|int|enum|struct)[\w \*]*?\b(\w+)\(', l)
    if m and not l.startswith('#'):
        first.setdefault(m.group(1), i)
for i, l in enumerate(lines):
    for name in re.findall(r'\b(\w+)\(', l):
        if name in first and i < first[name]:
            print('%s is used in line %d, above line %d' % (name, i + 1, first[name] + 1))
PY
}

tags_told() {
  local name doc
  for name in $(sed -n 's/^\t{ "\([A-Z_ -]*\)", "[A-Z0-9]*", .*, ID3_\([A-Z]*\), [0-9] },$/\2:\1/p' aifffffs.c | grep -v '^DROP' | cut -d: -f2 | tr ' ' '?'); do
    for doc in README aifffffs.1; do
      grep -qE "(^|[ ,>]) *$(echo "$name" | tr '?' ' ')($|[ ,])" "$doc" || echo "$name: not in $doc"
    done
  done
}

section_style() {
  local words
  if have clang-format; then
    check 'clang-format has nothing to say' clang-format --dry-run -Werror aifffffs.c
  else skip 'clang-format' 'it is not there'; fi
  if have cppcheck; then
    # unusedFunction and the like mean files of more than one
    check 'cppcheck has nothing to say' cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,portability \
      --inline-suppr --suppress=missingIncludeSystem -D__linux__ aifffffs.c
  else skip 'cppcheck' 'it is not there'; fi
  if have clang-tidy; then
    # Left out: opinions on parameter order, names and assignments in conditions; conversions, which the
    # compilers watch; strings without a NUL, which binary formats have; sizes of pointers, which arrays
    # of pointers have.
    # shellcheck disable=SC2046 # words are wanted
    check 'clang-tidy has nothing to say' clang-tidy --quiet --warnings-as-errors='*' --checks="-*,bugprone-*,$(printf -- '-bugprone-%s,' \
      easily-swappable-parameters reserved-identifier assignment-in-if-condition narrowing-conversions branch-clone \
      implicit-widening-of-multiplication-result not-null-terminated-result sizeof-expression
    )clang-analyzer-deadcode*,clang-analyzer-security*,-clang-analyzer-security.insecureAPI*,misc-redundant-expression,performance-*,-performance-no-int-to-ptr" \
      aifffffs.c -- -std=c11 $(pkg-config --cflags fuse3 flac)
  else skip 'clang-tidy' 'it is not there'; fi
  if have shellcheck; then
    check 'shellcheck has nothing to say' shellcheck test.sh .ci/run
  else skip 'shellcheck' 'it is not there'; fi
  if have mandoc; then
    mandoc -T lint -W warning aifffffs.1 >"$out" 2>&1
    equal 'mandoc has nothing to say' "" "$(cat "$out")"
  else skip 'mandoc' 'it is not there'; fi
  words=$("$AIFFFFFS" -h | grep -oE '\-o [a-z_]+' | sed 's/-o //' | sort -u)
  for words in $words; do
    check "option $words is in the man page" grep -q "Cm $words" aifffffs.1
    check "and in the README" grep -q -- "-o $words" README
  done
  equal 'at the top level is what should be' '.ci .clang-format .gitignore LICENSE Makefile README aifffffs.1 aifffffs.c test.sh ' \
    "$({ git ls-files 2>/dev/null || ls -A; } | cut -d/ -f1 | sort -u | grep -vE '^(\.git|aifffffs(-.*)?)$' | tr '\n' ' ')"
}

# ---- order and threads --------------------------------------------------------------------------

# compile_unit NAME: $work/NAME.c, which includes the program, becomes $work/NAME
compile_unit() {
  local cflags libs
  read -ra cflags <<<"$(pkg-config --cflags fuse3 flac)"
  read -ra libs <<<"$(pkg-config --libs fuse3 flac)"
  "${CC:-cc}" -std=c11 -O1 -g -I"$HERE" "${cflags[@]}" "$work/$1.c" -o "$work/$1" "${libs[@]}" -pthread
}

section_ticket() {
  have pkg-config || { skip 'the ticket lock serves in order' 'pkg-config is not there'; return; }
  cat >"$work/ticket.c" <<'C'
#define main aifffffs_main
#include "aifffffs.c"
#undef main

/* ticket START: who comes while the lock is held is served in the order of coming. The lock's numbers
 * begin at START. Then many threads take it again and again: each finds its own number next in turn. */
#define COMERS 64
#define CROWD 32
#define ROUNDS 2000

static struct ticket_lock lock;
static unsigned start, served, turn, wrong, inside;
static unsigned order[COMERS];

static void *come(void *arg)
{
	unsigned mine = ticket_take(&lock);
	order[served] = (unsigned)(uintptr_t)arg;
	wrong += mine != start + 1 + served;
	served++;
	ticket_pass(&lock);
	return NULL;
}

static void *crowd(void *arg)
{
	for (int i = 0; i < ROUNDS; i++) {
		unsigned mine = ticket_take(&lock);
		wrong += inside++ != 0 || mine != turn++;
		if (i % 16 == 0)
			sched_yield(); /* with the lock held: others pile up */
		inside--;
		ticket_pass(&lock);
	}
	return arg;
}

static unsigned numbers_given(void)
{
	unsigned n;
	pthread_mutex_lock(&lock.lock);
	n = lock.next - start;
	pthread_mutex_unlock(&lock.lock);
	return n;
}

int main(int argc, char *argv[])
{
	pthread_t thread[COMERS];
	struct timespec moment = { 0, 300 * 1000 * 1000 }, before, after;
	unsigned disorder = 0;
	start = (unsigned)strtoul(argv[argc - 1], NULL, 10);
	if (ticket_init(&lock) != 0)
		return 2;
	lock.next = lock.serving = start;
	ticket_take(&lock);
	for (unsigned i = 0; i < COMERS; i++) {
		pthread_create(&thread[i], NULL, come, (void *)(uintptr_t)i);
		while (numbers_given() != i + 2)
			sched_yield();
	}
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
	nanosleep(&moment, NULL);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
	printf("served while held: %u\n", served);
	ticket_pass(&lock);
	for (unsigned i = 0; i < COMERS; i++)
		pthread_join(thread[i], NULL);
	for (unsigned i = 0; i < COMERS; i++)
		disorder += order[i] != i;
	printf("served: %u, out of order: %u\n", served, disorder);
	turn = start + 1 + COMERS;
	for (unsigned i = 0; i < CROWD; i++)
		pthread_create(&thread[i], NULL, crowd, NULL);
	for (unsigned i = 0; i < CROWD; i++)
		pthread_join(thread[i], NULL);
	printf("turns: %u, wrong: %u, numbers: %u\n", turn - start - 1 - COMERS, wrong, numbers_given());
	printf("spins: %s\n", (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec < 100000000 ? "no" : "yes");
	ticket_destroy(&lock);
	return 0;
}
C
  check 'the ticket lock compiles into a test of its own' compile_unit ticket
  local from wanted
  wanted=$(printf '%s\n' 'served while held: 0' 'served: 64, out of order: 0' 'turns: 64000, wrong: 0, numbers: 64065' 'spins: no')
  for from in 0 4294967290 4294967295; do
    equal "the ticket lock serves in the order of tickets, numbers from $from" "$wanted" "$(timeout 120 "$work/ticket" "$from" 2>&1)"
  done
}

# hammer: reads files of the mount from many threads, or kills readers; says what was wrong
make_hammer() {
  [ -x "$work/hammer" ] && return
  cat >"$work/hammer.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* hammer read SECONDS THREADS direct|cached shared|own FILE REFERENCE ...
 *     random places and sizes, every byte compared; own: each thread opens the file for itself, now and then anew
 * hammer kill TIMES FILE ...
 *     readers, each killed within a few milliseconds of its first byte */
static struct { const char *path; const uint8_t *ref; off_t size; int fd; } file[64];
static int files, flags = O_RDONLY, shared;
static struct timespec end;
static atomic_ulong reads, wrong;

static uint64_t next_random(uint64_t *s)
{
	*s ^= *s << 13;
	*s ^= *s >> 7;
	return *s ^= *s << 17;
}

static int over(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec > end.tv_sec || (t.tv_sec == end.tv_sec && t.tv_nsec >= end.tv_nsec);
}

static void *reader(void *arg)
{
	uint64_t s = 88172645463325252u + (uintptr_t)arg * 7919;
	off_t next[64] = { 0 };
	int fd[64];
	void *buf;
	memset(fd, -1, sizeof fd);
	if (posix_memalign(&buf, 4096, 1 << 18) != 0)
		abort();
	while (!over()) {
		int i = (int)(next_random(&s) % (unsigned)files), own = shared ? file[i].fd : fd[i];
		size_t most[] = { 64, 4096, 65536, 200000 }, n = 1 + next_random(&s) % most[next_random(&s) % 4];
		off_t size = file[i].size, at = (off_t)(next_random(&s) % (uint64_t)size), want;
		ssize_t got;
		if (next_random(&s) % 16 == 0) /* around the start, the end and beyond */
			at = next_random(&s) % 2 ? (off_t)(next_random(&s) % 100) : size - 1000 + (off_t)(next_random(&s) % 2000);
		if (next_random(&s) % 2) /* go on where the last read of this file ended */
			at = next[i] < size ? next[i] : 0;
		next[i] = at + (off_t)n;
		if (own < 0)
			own = fd[i] = open(file[i].path, flags);
		want = at >= size ? 0 : size - at < (off_t)n ? size - at : (off_t)n;
		got = pread(own, buf, n, at);
		if (got != want || memcmp(buf, file[i].ref + at, (size_t)want) != 0) {
			if (atomic_fetch_add(&wrong, 1) < 5)
				fprintf(stderr, "%s: %zu bytes at %lld: %zd, wanted %lld, %s\n", file[i].path, n, (long long)at, got,
					(long long)want, got < 0 ? strerror(errno) : "or other bytes");
		}
		atomic_fetch_add(&reads, 1);
		if (!shared && next_random(&s) % 32 == 0) {
			close(own);
			fd[i] = -1;
		}
	}
	return NULL;
}

static int kill_readers(int times, int n, char **path)
{
	uint64_t s = 2463534242;
	int killed = 0;
	for (int i = 0; i < times; i++) {
		const char *name = path[next_random(&s) % (unsigned)n];
		struct timespec moment = { 0, (long)(next_random(&s) % 3000000) };
		off_t at = (off_t)(next_random(&s) % 5000000);
		int ready[2], status = 0;
		char c;
		pid_t pid;
		if (pipe(ready) != 0 || (pid = fork()) < 0)
			return perror("hammer"), 2;
		if (pid == 0) {
			static char buf[1 << 17];
			int fd = open(name, O_RDONLY | (i % 2 ? O_DIRECT : 0));
			if (fd < 0 || write(ready[1], "", 1) != 1)
				_exit(1);
			for (;;) {
				if (pread(fd, buf, sizeof buf, at) < 0)
					_exit(1);
				at = (at + (i % 3 ? (off_t)sizeof buf : 777777)) % 5000000 & -4096;
			}
		}
		close(ready[1]);
		if (read(ready[0], &c, 1) == 1)
			nanosleep(&moment, NULL);
		close(ready[0]);
		kill(pid, SIGKILL);
		waitpid(pid, &status, 0);
		killed += WIFSIGNALED(status);
	}
	printf("killed %d\n", killed);
	return 0;
}

int main(int argc, char *argv[])
{
	pthread_t thread[64];
	long threads;
	if (strcmp(argv[1], "kill") == 0)
		return kill_readers(atoi(argv[2]), argc - 3, argv + 3);
	threads = atol(argv[3]);
	flags |= argv[4][0] == 'd' ? O_DIRECT : 0;
	shared = argv[5][0] == 's';
	for (int i = 6; i + 1 < argc; i += 2, files++) {
		int fd = open(argv[i + 1], O_RDONLY);
		struct stat st;
		if (fd < 0 || fstat(fd, &st) != 0)
			return perror(argv[i + 1]), 2;
		file[files].path = argv[i];
		file[files].size = st.st_size;
		file[files].ref = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
		file[files].fd = open(argv[i], flags);
		if (file[files].ref == MAP_FAILED || file[files].fd < 0 || fstat(file[files].fd, &st) != 0)
			return perror(argv[i]), 2;
		if (st.st_size != file[files].size)
			return fprintf(stderr, "%s: size %lld\n", argv[i], (long long)st.st_size), 2;
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += atol(argv[2]);
	for (long i = 0; i < threads; i++)
		if (pthread_create(&thread[i], NULL, reader, (void *)i) != 0)
			abort();
	for (long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	printf("reads %s, wrong %lu\n", reads > (unsigned long)threads ? "many" : "few", wrong);
	return wrong != 0;
}
C
  "${CC:-cc}" -std=c11 -O1 -g "$work/hammer.c" -o "$work/hammer" -pthread
}

# make_noise DIRECTORY SECONDS: eight FLAC files 0 to 7 of pink noise over a tone, without tags, and their AIFF
make_noise() {
  local dir=$1 i bits
  [ -d "$dir/src" ] && return
  mkdir -p "$dir/src" "$dir/ref" || return
  for i in 0 1 2 3 4 5 6 7; do
    bits=16
    [ "$i" = 7 ] && bits=24
    sox -R -n -r 44100 -b "$bits" -c 2 "$dir/$i.wav" synth "$2" pinknoise synth "$2" sine mix "$((200 + 100 * i))" || return
    flac -s -2 -o "$dir/src/$i.flac" "$dir/$i.wav" && metaflac --remove-all --dont-use-padding "$dir/src/$i.flac" || return
    flac -s -d --force-aiff-format -o "$dir/ref/$i.aiff" "$dir/src/$i.flac" || return
    rm "$dir/$i.wav"
  done
}

threads_now() { sed -n 's/^Threads:\t//p' "/proc/$daemon/status"; }
stats_are() { [ "$(stats "$1")" = "$2" ]; }
stopped() { [[ $(cut -d ' ' -f 3 "/proc/$1/stat") == [Tt] ]]; }
threads_created() { grep -cE 'clone3?\(.*CLONE_THREAD' "$work/clones"; }

# noise_read SECONDS THREADS direct|cached shared|own NUMBER ...: hammers the files with these numbers
noise_read() {
  local pairs=() i options=("${@:1:4}")
  shift 4
  for i; do pairs+=("$mnt/$i.aiff" "$noise/ref/$i.aiff"); done
  "$work/hammer" read "${options[@]}" "${pairs[@]}"
}

section_threads() {
  have sox || { skip 'threads' 'sox is not there'; return; }
  noise=$work/noise
  check 'input for the tests of threads is made' make_noise "$noise" 30
  check 'the reader of many threads compiles' make_hammer
  threads_number
  threads_created_none
  threads_killed
  threads_stopped
  threads_linear
  threads_header
}

threads_number() {
  local cpus single before under after pid n
  cpus=$(nproc)
  start "$noise/src" -s || return
  equal '-s is one worker' 1 "$(stats threads)"
  single=$(threads_now)
  stop
  for n in 1 5 40; do
    start "$noise/src" -o "max_threads=$n" || return
    equal "max_threads=$n says so" "$n" "$(stats threads)"
    equal "max_threads=$n makes as many threads" "$((single + n - 1))" "$(threads_now)"
    stop
  done
  n=$((2 * cpus > 16 ? 2 * cpus : 16))
  start "$noise/src" || return
  equal 'by default there are 16 workers, or two per CPU' "$n" "$(stats threads)"
  before=$(threads_now)
  equal 'and as many threads' "$((single + n - 1))" "$before"
  noise_read 3 24 direct own 0 1 2 3 4 5 6 7 >"$work/load" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    under+=" $(threads_now)"
    sleep 0.1
  done
  check 'the load was there and right' wait "$pid"
  after=$(threads_now)
  equal 'the number of threads is the same under load' "$before" "$(tr ' ' '\n' <<<"$under" | sed '/^$/d' | sort -u)"
  equal 'and after it' "$before" "$after"
  for n in 0 1 2 3 4 5 6 7; do cmp "$mnt/$n.aiff" "$noise/ref/$n.aiff"; done >"$work/linear" 2>&1
  equal 'files read from start to end by one reader are right' '' "$(cat "$work/linear")"
  stop
}

threads_created_none() {
  have strace || { skip 'no thread is created after start' 'strace is not there'; return; }
  local real=$AIFFFFFS before workers
  # -D: the daemon stays our child; a leak check cannot run under a tracer
  # shellcheck disable=SC2016 # the script expands it
  printf '#!/bin/sh\nASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0" exec strace -D -f -e trace=clone,clone3 -o %q %q "$@"\n' \
    "$work/clones" "$real" >"$work/traced"
  chmod +x "$work/traced"
  AIFFFFFS=$work/traced
  if start "$noise/src"; then
    workers=$(stats threads) # the answer comes once the pool is there
    before=$(threads_created)
    check 'the trace shows the workers being made' test "$before" -ge "$workers"
    check 'sound is right under the trace' noise_read 3 16 direct own 0 1 2 3 4 5 6 7
    check 'and from the page cache' noise_read 1 8 cached own 0 1 2 3
    equal 'no thread is created after start' "$before" "$(threads_created)"
    stop
  fi
  AIFFFFFS=$real
}

threads_killed() {
  start "$noise/src" || return
  equal 'a thousand readers are killed in mid-read' 'killed 1000' "$("$work/hammer" kill 1000 "$mnt"/[0-7].aiff 2>&1)"
  check 'they leave no handle' until_true 30 stats_are handles 0
  check 'they leave no decoder' until_true 30 stats_are decoders 0
  check 'they did read' test "$(stats reads)" -gt 300
  check 'what is read afterwards is right' noise_read 1 8 direct shared 0 1 2 3
  stop
}

threads_stopped() {
  local pid=
  start "$noise/src" -s || return
  mkfifo "$work/fifo"
  exec 7<>"$work/fifo"
  cat "$mnt/0.aiff" >"$work/fifo" &
  pid=$!
  # the first bytes are here, so it has begun; it goes on until the pipe is full
  head -c 54 <&7 >"$work/begun"
  check 'a reader has begun' cmp -n 54 "$work/begun" "$noise/ref/0.aiff"
  kill -STOP "$pid"
  check 'and is stopped' until_true 10 stopped "$pid"
  check 'a reader that is stopped holds not even the only worker' timeout 60 cmp "$mnt/1.aiff" "$noise/ref/1.aiff"
  check 'nor the file that it reads' timeout 60 cmp "$mnt/0.aiff" "$noise/ref/0.aiff"
  kill -KILL "$pid"
  wait "$pid" 2>/dev/null
  exec 7>&-
  stop
}

threads_linear() {
  have taskset || { skip 'a linear reader on one CPU does not seek' 'taskset is not there'; return; }
  local real=$AIFFFFFS reads seeks cpu
  cpu=$(taskset -cp $$ | sed 's/.*: *//; s/[,-].*//')
  printf '#!/bin/sh\nexec taskset -c %s %q "$@"\n' "$cpu" "$real" >"$work/pinned"
  chmod +x "$work/pinned"
  AIFFFFFS=$work/pinned
  if start "$noise/src" -o max_threads=4; then
    cat "$mnt"/[0-7].aiff | cmp - <(cat "$noise"/ref/[0-7].aiff) >"$out" 2>&1
    equal 'a linear reader on one CPU with four threads gets the right bytes' '0 0' "${PIPESTATUS[*]}"
    reads=$(stats reads) seeks=$(stats seeks)
    check "it makes many reads ($reads)" test "$reads" -ge 100
    check "of 100 of them at most 2 seek ($seeks of $reads)" test "$((seeks * 50))" -le "$reads"
    check 'a second time the bytes are the same' cmp "$mnt/3.aiff" "$noise/ref/3.aiff"
    equal 'and no read of sound reaches the daemon' "$reads" "$(stats reads)"
    stop
  fi
  AIFFFFFS=$real
}

# The header is read by one while another waits for the first frame of a slow source.
threads_header() {
  local real=$AIFFFFFS
  cat >"$work/slow.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

static void *late(const char *name)
{
	struct timespec moment = { 0, 20 * 1000 * 1000 };
	nanosleep(&moment, NULL);
	return dlsym(RTLD_NEXT, name);
}

ssize_t pread(int fd, void *p, size_t n, off_t at)
{
	ssize_t (*real)(int, void *, size_t, off_t);
	*(void **)&real = late("pread");
	return real(fd, p, n, at);
}

ssize_t pread64(int fd, void *p, size_t n, off64_t at)
{
	ssize_t (*real)(int, void *, size_t, off64_t);
	*(void **)&real = late("pread64");
	return real(fd, p, n, at);
}
C
  if nm "$real" 2>/dev/null | grep -qE '__[at]san_init'; then
    skip 'a header is right while another reader waits for the source' 'a sanitizer has its own pread'
    return
  fi
  check 'a slow source compiles' "${CC:-cc}" -shared -fPIC "$work/slow.c" -o "$work/slow.so" -ldl
  printf '#!/bin/sh\nLD_PRELOAD=%q exec %q "$@"\n' "$work/slow.so" "$real" >"$work/slowed"
  chmod +x "$work/slowed"
  AIFFFFFS=$work/slowed
  if start "$noise/src"; then
    equal 'a header is right while another reader waits for the source' 'wrong 0 of 16' "$(python3 - "$mnt" "$noise/ref" <<'PY'
import os, sys, threading, time
mnt, ref = sys.argv[1:]
wrong = 0
for i in range(16):
    name = '/%d.aiff' % (i % 8)
    good = open(ref + name, 'rb').read(54)
    fd = os.open(mnt + name, os.O_RDONLY | os.O_DIRECT)
    other = threading.Thread(target=os.pread, args=(fd, 4096, 1 << 20))
    other.start()
    while other.is_alive():
        wrong += os.pread(fd, 54, 0) != good
        time.sleep(0.002)
    os.close(fd)
print('wrong', wrong, 'of 16')
PY
)"
    stop
  fi
  AIFFFFFS=$real
}

# verb_stress [SECONDS]: readers on one file and on eight, every byte compared
verb_stress() {
  local seconds=$((${1:-60} / 4)) how
  noise=$work/noise
  check 'input for the stress is made' make_noise "$noise" 30
  check 'the reader of many threads compiles' make_hammer
  [ "$seconds" -ge 1 ] || seconds=1
  start "$noise/src" || return
  for how in 'direct shared' 'cached own'; do
    read -ra how <<<"$how"
    check "8 readers on one file, ${how[*]}" noise_read "$seconds" 8 "${how[@]}" 0
    check "8 readers on 8 files, ${how[*]}" noise_read "$seconds" 8 "${how[@]}" 0 1 2 3 4 5 6 7
  done
  equal 'no read failed' 0 "$(stats errors)"
  check 'no handle is left' until_true 30 stats_are handles 0
  check 'no decoder is left' until_true 30 stats_are decoders 0
  stop
}

# ---- pages that the kernel keeps ------------------------------------------------------------------

# One path, other files: what is read must be what was opened, from whichever pages the kernel has.
section_pages() {
  have sox || { skip 'pages of replaced files' 'sox is not there'; return; }
  local dir=$work/pages i
  mkdir -p "$dir/src" "$dir/ref"
  for i in a b; do
    sox -R -n -r 8000 -b 16 -c 1 "$dir/$i.wav" synth 3 sine "$((440 + $(printf %d "'$i")))"
    flac -s -o "$dir/src/$i.flac" "$dir/$i.wav"
    cp "$dir/src/$i.flac" "$dir/src/link-$i.flac"
  done
  cp "$dir/src/a.flac" "$dir/src/retag.flac"
  metaflac --remove-all --dont-use-padding "$dir"/src/[abl]*.flac
  for i in a b; do flac -s -d --force-aiff-format -o "$dir/ref/$i.aiff" "$dir/src/$i.flac"; done
  touch -d 2020-01-01 "$dir"/src/*.flac
  ln -s link-a.flac "$dir/src/l.flac"
  start "$dir/src" -o follow_symlinks || return
  python3 - "$dir/src" "$dir/ref" "$mnt" >"$work/pages.out" 2>&1 <<'PY'
import os, subprocess, sys, time
src, ref, mnt = sys.argv[1:]
a, b = (open('%s/%s.aiff' % (ref, x), 'rb').read() for x in 'ab')
assert len(a) == len(b) and a != b
def name(data):
    return 'a' if data == a else 'b' if data == b else 'neither'
def read(x):
    with open('%s/%s.aiff' % (mnt, x), 'rb') as f:
        return f.read()
def form(fd):
    return int.from_bytes(os.pread(fd, 54, 0)[4:8], 'big') + 8
EXPIRED = 1.3 # the kernel believes names and attributes for a second
old = os.open(mnt + '/a.aiff', os.O_RDONLY)
first = name(os.pread(old, 1 << 20, 0))
os.rename(src + '/b.flac', src + '/a.flac')
time.sleep(EXPIRED)
second, again = name(read('a')), name(os.pread(old, 1 << 20, 0))
os.close(old)
print('replaced while open:', first, second, again, name(read('a')), name(read('a')))
seen = []
for to in 'abab':
    os.symlink('link-%s.flac' % to, src + '/new')
    os.rename(src + '/new', src + '/l.flac')
    time.sleep(EXPIRED)
    seen.append(name(read('l')))
print('symlink to and fro:', *seen)
old = os.open(mnt + '/retag.aiff', os.O_RDONLY)
subprocess.run(['metaflac', '--set-tag=TITLE=longer than it was', src + '/retag.flac'], check=True)
time.sleep(EXPIRED)
new = os.open(mnt + '/retag.aiff', os.O_RDONLY)
os.pread(old, 54, 0)
size = os.stat(mnt + '/retag.aiff').st_size
right = [form(new) == size]
os.close(old)
os.close(new)
new = os.open(mnt + '/retag.aiff', os.O_RDONLY)
print('retagged while open:', *right, form(new) == size)
PY
  equal 'a file replaced while open is read as it is, and the old one as it was' 'replaced while open: a b a b b' \
    "$(sed -n 1p "$work/pages.out")"
  equal 'a symlink that goes back to a file shows that file' 'symlink to and fro: a b a b' "$(sed -n 2p "$work/pages.out")"
  equal 'a file retagged while open has one header, the new' 'retagged while open: True True' "$(sed -n '3,$p' "$work/pages.out")"
  stop
}

# ---- never silently wrong -----------------------------------------------------------------------

# The other side of these tests: sound made here, FLAC files taken apart and put together by a parser
# of their own, and readers that compare what they get.
robust_py() {
  [ -s "$work/robust.py" ] || cat >"$work/robust.py" <<'PY'
import errno, math, mmap, os, random, resource, stat, subprocess, sys, threading, time

TABLES = {}
def crc(data, width, poly):
    if width not in TABLES:
        top, table = 1 << width - 1, []
        for c in (i << width - 8 for i in range(256)):
            for _ in range(8):
                c = (c << 1 ^ poly if c & top else c << 1) & (top << 1) - 1
            table.append(c)
        TABLES[width] = table
    table, c, mask = TABLES[width], 0, (1 << width) - 1
    for byte in data:
        c = (c << 8 & mask) ^ table[c >> width - 8 ^ byte]
    return c

def audio_at(d):
    at = d.index(b'fLaC') + 4
    while True:
        last, size = d[at] & 0x80, int.from_bytes(d[at + 1:at + 4], 'big')
        at += 4 + size
        if last:
            return at

def number(v):  # the coded number of a frame header
    if v < 0x80:
        return bytes([v])
    for n in range(2, 8):
        if v < 1 << 5 * n + 1:
            tail = [0x80 | v >> 6 * i & 63 for i in range(n - 2, -1, -1)]
            return bytes([0xff << 8 - n & 0xff | v >> 6 * (n - 1)] + tail)

def header(d, at):  # length without CRC, number, code of the block size, or None
    if d[at] != 0xff or d[at + 1] & 0xfe != 0xf8 or at + 16 > len(d):
        return None
    n = 0
    while n < 8 and d[at + 4] & 0x80 >> n:
        n += 1
    if n in (1, 8):
        return None
    v = d[at + 4] & 0x7f >> n if n else d[at + 4]
    for b in d[at + 5:at + 4 + n]:
        v = v << 6 | b & 63
    size = 4 + max(n, 1) + {6: 1, 7: 2}.get(d[at + 2] >> 4, 0) + {12: 1, 13: 2, 14: 2}.get(d[at + 2] & 15, 0)
    return (size, v, max(n, 1)) if crc(d[at:at + size], 8, 7) == d[at + size] else None

def frames(d):  # offset and length of each frame of a sound file
    at, out = audio_at(d), []
    while at < len(d):
        end = at + 6
        while True:
            end = d.find(b'\xff', end + 1)
            if end < 0 or end + 16 > len(d):
                end = len(d)
            if (end == len(d) or header(d, end)) and crc(d[at:end], 16, 0x8005) == 0:
                break
            if end == len(d):
                raise ValueError('a frame without end at %d' % at)
        out.append((at, end - at))
        at = end
    return out

def spans_of(d, channels, bits):  # where in the AIFF file the sound of each frame is
    out, first = [], 0
    for o, _ in frames(d):
        size, _, digits = header(d, o)
        code, extra = d[o + 2] >> 4, o + 4 + digits
        n = d[extra] + 1 if code == 6 else int.from_bytes(d[extra:extra + 2], 'big') + 1 if code == 7 else \
            192 if code == 1 else 576 << code - 2 if code < 6 else 256 << code - 8
        unit = channels * ((bits + 7) // 8)
        out.append((54 + unit * first, 54 + unit * (first + n)))
        first += n
    return out

def samples(channels, bits, n, seed):
    rnd, top, out = random.Random(seed), (1 << bits - 1) - 1, []
    step = [0.01 + rnd.random() / 20 for _ in range(channels)]
    for i in range(n):
        for c in range(channels):
            out.append(int(top * 0.7 * math.sin(i * step[c])) + rnd.randrange(-top // 60 - 1, top // 60 + 2))
    return out

def pack(s, bits, order):
    width = (bits + 7) // 8
    return b''.join((v << 8 * width - bits).to_bytes(width, order, signed=True) for v in s)

def encode(s, channels, bits, block, *options):
    out = sys.argv[0] + '.flac'
    subprocess.run(['flac', '-s', '-f', '-o', out, '--force-raw-format', '--endian=little', '--sign=signed', '--lax',
        '--channels=%d' % channels, '--bps=%d' % bits, '--sample-rate=44100', '-b', str(block), *options, '-'],
        input=pack(s, bits, 'little'), check=True)
    with open(out, 'rb') as f:
        return set_total(f.read(), len(s) // channels)  # from a pipe, it is not told

def set_total(d, total):
    d = bytearray(d)
    at = d.index(b'fLaC') + 21
    d[at] = d[at] & 0xf0 | total >> 32
    d[at + 1:at + 5] = (total & 0xffffffff).to_bytes(4, 'big')
    return bytes(d)

def flac_file(channels, bits, block, n, seed, *options):  # the file, and its sound as AIFF has it
    s = samples(channels, bits, n, seed)
    return encode(s, channels, bits, block, *options), pack(s, bits, 'big')

def variable_file(channels, bits, blocks, n, seed):  # the same, of runs of frames of several sizes
    s, out, at = samples(channels, bits, n, seed), b'', 0
    for block in blocks:
        part = s[at * channels:] if block == blocks[-1] else s[at * channels:(at + 5 * block) * channels]
        d = encode(part, channels, bits, block, '--no-padding')
        if not out:
            info = bytearray(d[:audio_at(d)])
            info[8:12] = min(blocks).to_bytes(2, 'big') + max(blocks).to_bytes(2, 'big')
            info[12:18] = bytes(6)
            info[26:42] = bytes(16)
            out = set_total(info, n)
        for i, (o, size) in enumerate(frames(d)):
            h, _, digits = header(d, o)
            head = d[o:o + 1] + bytes([d[o + 1] | 1]) + d[o + 2:o + 4] + number(at + i * block) + d[o + 4 + digits:o + h]
            head += bytes([crc(head, 8, 7)])
            frame = head + d[o + h + 1:o + size - 2]
            out += frame + crc(frame, 16, 0x8005).to_bytes(2, 'big')
        at += 5 * block
    return out, pack(s, bits, 'big')

def write(path, data):
    with open(path, 'wb') as f:
        f.write(data)

class Direct:  # reads just what is asked for: no page cache, no read-ahead
    slowest = 0
    def __init__(self, path):
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.size = os.fstat(self.fd).st_size
    def close(self):
        os.close(self.fd)
    def read(self, at, n):  # bytes or an errno
        buffer, start = mmap.mmap(-1, max(n, 1)), time.monotonic()
        try:
            got = os.preadv(self.fd, [memoryview(buffer)[:n]], at)
            return buffer[:got]
        except OSError as e:
            return e.errno
        finally:
            Direct.slowest = max(Direct.slowest, time.monotonic() - start)

def fail(*what):  # the first of each case will do as evidence
    fail.count += 1
    if what[0] not in fail.told:
        print(' '.join(map(str, what)))
    fail.told.add(what[0])
fail.count, fail.told = 0, set()

def expect(name, got, at, n, want, bad, error=errno.EIO):
    """`want` is the whole file, `bad` ranges of it that must not be read."""
    n = min(n, len(want) - at)
    touched = any(a < at + n and at < b for a, b in bad)
    if touched and got != error:
        fail(name, 'bytes', at, 'to', at + n, 'touch damage and gave', got if isinstance(got, int) else 'bytes')
    elif not touched and got != want[at:at + n]:
        fail(name, 'bytes', at, 'to', at + n, 'gave', got if isinstance(got, int) else 'other bytes')

def read_orders(name, path, want, bad, seed=1):
    """Reads in every order and size; an error exactly where `bad` is touched."""
    rnd = random.Random(seed)
    f = Direct(path)
    if f.size != len(want):
        fail(name, 'has', f.size, 'bytes, not', len(want))
        return
    for step in (65536, 4096, 1000):
        for at in range(0, f.size, step):
            expect(name + ', forward,', f.read(at, step), at, step, want, bad)
    f.close()
    f = Direct(path)
    for at in reversed(range(0, f.size, 3001)):
        expect(name + ', backward,', f.read(at, 3001), at, 3001, want, bad)
    for _ in range(150):
        at, n = rnd.randrange(f.size), rnd.choice((1, 50, 700, 9000, 70000))
        expect(name + ', anywhere,', f.read(at, n), at, n, want, bad)
    f.close()
    shared = Direct(path)
    def reader(me):
        own, rnd = Direct(path), random.Random(seed * 100 + me)
        for i in range(40):
            at, n = rnd.randrange(own.size), rnd.choice((1, 50, 700, 9000, 70000))
            expect(name + ', in parallel,', (own if i % 2 else shared).read(at, n), at, n, want, bad)
        own.close()
    readers = [threading.Thread(target=reader, args=(i,)) for i in range(8)]
    for t in readers: t.start()
    for t in readers: t.join()
    shared.close()
    fd, pages = os.open(path, os.O_RDONLY), list(range(0, len(want), 4096))  # and through the page cache
    rnd.shuffle(pages)
    for at in pages:
        try: got = os.pread(fd, 4096, at)
        except OSError as e: got = e.errno
        expect(name + ', by pages,', got, at, 4096, want, bad)
    os.close(fd)

def aiff(channels, bits, rate, sound, tag=b''):
    """The whole file, by the AIFF specification."""
    shift = 63 - rate.bit_length() + 1
    comm = channels.to_bytes(2, 'big') + (len(sound) // (channels * ((bits + 7) // 8))).to_bytes(4, 'big') + \
        bits.to_bytes(2, 'big') + (16383 + 63 - shift).to_bytes(2, 'big') + (rate << shift).to_bytes(8, 'big')
    body = b'AIFFCOMM' + (18).to_bytes(4, 'big') + comm + b'SSND' + (len(sound) + 8).to_bytes(4, 'big') + bytes(8) + \
        sound + bytes(len(sound) & 1) + tag
    return b'FORM' + len(body).to_bytes(4, 'big') + body

def ranges(unit, block, *which):  # of frames, in the AIFF file
    return [(54 + unit * block * i, 54 + unit * block * (i + 1)) for i in which]

def main(commands):
    commands[sys.argv[1]](*sys.argv[2:])
    if fail.count:
        sys.exit(1)
PY
  { cat "$work/robust.py"; cat; } >"$work/robust-$1.py"
}

# Whatever happens to a reader, the test goes on.
in_time() { timeout -k 5 300 /usr/bin/python3 "$@"; }

# Frames with damage, files with too little and too much.
section_damage() {
  have flac || { skip 'damaged files' 'flac is not there'; return; }
  have /usr/bin/python3 || { skip 'damaged files' 'python3 is not there'; return; }
  local src=$work/damage mode
  rm -rf "$src" && mkdir "$src"
  robust_py damage <<'PY'
SRC = os.path.join(os.path.dirname(sys.argv[0]), 'damage')
BLOCK, N = 1152, 30000  # 26 whole frames and a shorter one

def cases():
    """name: the file, the whole AIFF file, what of it must not be read"""
    out = {}
    d, sound = flac_file(2, 16, BLOCK, N, 1, '--no-padding')
    other, _ = flac_file(2, 16, BLOCK, N, 2, '--no-padding')
    short, _ = flac_file(2, 16, BLOCK, 9000, 3)
    quiet = encode([0] * (2 * N), 2, 16, BLOCK, '--no-padding')
    want, f = aiff(2, 16, 44100, sound), frames(d)
    assert len(f) == 27 and len(quiet) < 1000
    def damaged(base, *frames_and_bytes):
        b = bytearray(base)
        for i, at in frames_and_bytes:
            b[f[i][0] + (at if at >= 0 else f[i][1] + at)] ^= 0x10
        return bytes(b)
    def bad(*which):
        return [(a, min(b, len(want))) for a, b in ranges(4, BLOCK, *which)]
    out['sound'] = d, want, []
    out['middle'] = damaged(d, (9, 500)), want, bad(9)
    out['headers'] = damaged(d, (4, 0), (11, 4), (12, 2), (20, 5)), want, bad(4, 11, 12, 20)
    out['crc'] = damaged(d, (3, -1), (17, -2)), want, bad(3, 17)
    out['first-and-last'] = damaged(d, (0, 0), (26, 0)), want, bad(0, 26)
    out['neighbours'] = damaged(d, *((i, 100) for i in range(5, 15))), want, bad(*range(5, 15))
    out['zeroed'] = d[:f[6][0]] + bytes(f[10][0] - f[6][0]) + d[f[10][0]:], want, bad(6, 7, 8, 9)
    out['missing'] = d[:f[6][0]] + d[f[7][0]:], want, bad(6)
    out['swapped'] = d[:f[6][0]] + d[f[7][0]:f[8][0]] + d[f[6][0]:f[7][0]] + d[f[8][0]:], want, None
    out['between'] = d[:f[6][0]] + bytes(range(256)) * 3 + d[f[6][0]:], want, []
    out['between-like-sound'] = d[:f[6][0]] + d[f[3][0] + 30:f[5][0] + 99] + d[f[6][0]:], want, []
    out['cut'] = d[:f[20][0] + 99], want, bad(*range(20, 27))
    out['cut-between'] = d[:f[20][0]], want, bad(*range(20, 27))
    out['only-metadata'] = d[:f[0][0]], want, bad(*range(27))
    out['id3v1'] = d + b'TAG' + bytes(125), want, []
    out['zeros'] = d + bytes(100000), want, []
    out['id3v2'] = b'ID3\x04\0\0\0\0\x07\x68' + b'\xff\xf8' * 500 + d, want, []
    out['id3v2-footer'] = b'ID3\x04\0\x10\0\0\0\x64' + bytes(100) + b'3DI\x04\0\x10\0\0\0\x64' + d, want, []
    for name, tail in ('same-length', other), ('shorter', short), ('silent', quiet), ('itself', d):
        out['before-' + name] = d + tail, want, []
        out['damaged-before-' + name] = damaged(d, (13, 0), (21, 300)) + tail, want, bad(13, 21)
        if tail != d:  # the right frame, by chance, is right
            out['last-damaged-before-' + name] = damaged(d, (26, 0)) + tail, want, bad(26)
            out['cut-before-' + name] = d[:f[20][0] + 99] + tail, want, bad(*range(20, 27))
        if tail in (short, quiet):
            out['half-before-' + name] = d[:f[4][0]] + tail, want, bad(*range(4, 27))
    out['total-more'] = set_total(d, N + 5000), aiff(2, 16, 44100, sound + bytes(20000)), [(54 + 4 * N, 54 + 4 * N + 20000)]
    out['total-much-more'] = set_total(d, 50000000), None, None
    out['total-less'] = set_total(d, N - 5000), aiff(2, 16, 44100, sound[:-20000]), []
    out['total-unknown'] = set_total(d, 0), want, []
    b = bytearray(d)
    b[26:42] = bytes(16)
    out['no-md5'] = bytes(b), want, []
    b[26:42] = b'not the checksum'
    out['wrong-md5'] = bytes(b), want, []
    b = bytearray(d)
    b[12:18] = b'\0\0\1\0\0\2'
    out['wrong-frame-sizes'] = bytes(b), want, []
    v, vsound = variable_file(2, 16, (192, 576, 4096, 1152), 20000, 4)
    vf, spans = frames(v), spans_of(v, 2, 16)
    assert spans[-1][1] == 54 + len(vsound)
    vwant = aiff(2, 16, 44100, vsound)
    out['variable'] = v, vwant, []
    b = bytearray(v)
    b[vf[7][0]] ^= 1
    b[vf[12][0] + 900] ^= 1
    out['variable-damaged'] = bytes(b), vwant, [spans[7], spans[12]]
    out['variable-unknown'] = set_total(v, 0), vwant, []
    # 20 GiB of nothing behind it cost no time
    out['hole'] = d, want, []
    out['cut-hole'] = d[:f[20][0] + 99], want, bad(*range(20, 27))
    # STREAMINFO says 16 sample frames, the one FLAC frame has 700
    one, one_sound = flac_file(2, 16, 1152, 700, 5, '--no-padding')
    out['one-frame'] = one[:8] + b'\0\x10\0\x10' + one[12:], aiff(2, 16, 44100, one_sound), []
    return out

def tenth():
    """FLAC frames of 16 sample frames, of which only every tenth has a right CRC: the file, and the sound with
    silence for the others."""
    d, sound = flac_file(1, 8, 16, 300000, 6, '--no-padding')
    b, silent = bytearray(d), bytearray(sound)
    for i, (o, size) in enumerate(frames(d)):
        if i % 10:
            b[o + size - 1] ^= 1
            silent[16 * i:16 * i + 16] = bytes(len(silent[16 * i:16 * i + 16]))
    return bytes(b), aiff(1, 8, 44100, bytes(silent))

def make():
    for name, (d, _, _) in cases().items():
        write('%s/%s.flac' % (SRC, name), d)
        if name.endswith('hole'):
            os.truncate('%s/%s.flac' % (SRC, name), 20 << 30)
    write(SRC + '/uncounted.flac', set_total(cases()['sound'][0], 0))
    os.truncate(SRC + '/uncounted.flac', 20 << 30)
    write(SRC + '/tenth.flac', tenth()[0])

def check(mnt):
    for name, (_, want, bad) in cases().items():
        path = '%s/%s.aiff' % (mnt, name)
        if want is None:  # the end that is not there is found out in no time, first of all reads
            f = Direct(path)
            for at in (f.size - 1000, f.size // 2, 60 + 4 * N):
                if f.read(at, 500) != errno.EIO:
                    fail(name, 'has sound at', at)
            f.close()
        elif bad is None:  # found or not, but never the wrong one
            f = Direct(path)
            for at in range(0, f.size, 1000):
                got = f.read(at, 1000)
                if got != errno.EIO and got != want[at:at + 1000]:
                    fail(name, 'gave something else at', at)
            f.close()
        else:
            read_orders(name, path, want, bad)
    begin = time.monotonic()
    try: fail('uncounted has', os.stat(mnt + '/uncounted.aiff').st_size)
    except OSError as e:
        if e.errno != errno.EFBIG: fail('uncounted:', e)
    if Direct.slowest > 5 or time.monotonic() - begin > 5:
        fail('a read took', Direct.slowest, 'seconds')

def conceal(mnt):
    want, f = tenth()[1], Direct(mnt + '/tenth.aiff')
    for at in range(0, len(want), 131072):
        if f.read(at, 131072) != want[at:at + 131072]:
            fail('tenth: other sound from', at)
    f.close()
    for name, (_, want, bad) in cases().items():
        if not bad or name == 'only-metadata':
            continue
        silent = bytearray(want)
        for a, b in bad:
            b = min(b, len(silent))
            silent[a:b] = bytes(b - a)
        read_orders(name + ', concealed', '%s/%s.aiff' % (mnt, name), bytes(silent), [])
    if Direct.slowest > 5:
        fail('a read took', Direct.slowest, 'seconds')

main({'make': make, 'check': check, 'conceal': conceal})
PY
  check 'files with damage are made' in_time "$work/robust-damage.py" make
  check 'the file that is not damaged is one that flac accepts' flac -s -t "$src/sound.flac" "$src/variable.flac"
  for mode in '-o max_threads=16' '-s'; do
    # shellcheck disable=SC2086 # two words
    start "$src" $mode -o no_foreign || return
    check "EIO where damage is touched, right bytes elsewhere, in any order ($mode)" \
      in_time "$work/robust-damage.py" check "$mnt"
    equal "a damaged file is named in one line ($mode)" 1 "$(grep -c '^aifffffs: middle.flac: damaged at sample ' "$log")"
    stop
  done
  start "$src" -o conceal || return
  check 'conceal: silence of the right length' in_time "$work/robust-damage.py" conceal "$mnt"
  equal 'conceal: and a line in the log' 1 "$(grep -c '^aifffffs: middle.flac: damaged at sample ' "$log")"
  stop

  # All the comments that a block can hold, in eight files at once: a picture of 12 MB in base64, and many short ones.
  robust_py hoard <<'PY'
import base64
HOARD = os.path.join(os.path.dirname(sys.argv[0]), 'hoard')
SHORT = [b'K%05d=1' % i for i in range(20000)]
HEAD = (3).to_bytes(4, 'big') + (9).to_bytes(4, 'big') + b'image/png' + bytes(4 + 16)
DATA = (random.Random(5).randbytes(1 << 20) * 12)[:12400000]
BLOCK = bytes(4) + (len(SHORT) + 1).to_bytes(4, 'little') + b''.join(len(c).to_bytes(4, 'little') + c for c in SHORT + [
    b'METADATA_BLOCK_PICTURE=' + base64.b64encode(HEAD + len(DATA).to_bytes(4, 'big') + DATA)])
assert (1 << 24) - 100000 < len(BLOCK) < 1 << 24

def make():
    d, _ = flac_file(1, 16, 1152, 1152, 1, '--no-padding')
    info = bytearray(d[:42])
    info[4] &= 0x7f
    for i in range(8):
        write('%s/%d.flac' % (HOARD, i), bytes(info) + bytes([0x84]) + len(BLOCK).to_bytes(3, 'big') + BLOCK + d[audio_at(d):])

def check(mnt):
    def reader(i):
        path = '%s/%d.aiff' % (mnt, i)
        size = os.stat(path).st_size
        with open(path, 'rb') as f:
            f.seek(size - 300020)
            if not f.read().rstrip(b'\0').endswith(DATA[-300000:].rstrip(b'\0')):
                fail(path, 'has another picture')
    readers = [threading.Thread(target=reader, args=(i,)) for i in range(8)]
    for t in readers: t.start()
    for t in readers: t.join()

main({'make': make, 'check': check})
PY
  rm -rf "$work/hoard" && mkdir "$work/hoard"
  check 'files with 16 MB of comments are made' in_time "$work/robust-hoard.py" make
  start "$work/hoard" || return
  check 'eight of them are read at once' in_time "$work/robust-hoard.py" check "$mnt"
  if nm "$AIFFFFFS" | grep -qE '__(asan|tsan)_init'; then
    skip 'in less than 64 MB' 'sanitizers keep what is freed'
  else
    check "in less than 64 MB ($(awk '/VmHWM/ { print $2 }' "/proc/$daemon/status") KiB)" \
      awk '/VmHWM/ { low = $2 < 65536 } END { exit !low }' "/proc/$daemon/status"
  fi
  stop
  rm -rf "$work/hoard" && mkdir "$work/hoard"

  # frames of a megabyte and a half in many open files
  tune 24 8 96000 200000 | flac -s -f --force-raw-format --endian=little --sign=signed --channels=8 --bps=24 --sample-rate=96000 --lax \
    -b 65535 -o "$work/hoard/0.flac" -
  for n in $(seq 60); do ln "$work/hoard/0.flac" "$work/hoard/$n.flac"; done
  start "$work/hoard" || return
  check 'sixty files with frames of 1.5 MB are read, and stay open' timeout 120 /usr/bin/python3 -c '
import glob, os, sys
fds = [os.open(p, os.O_RDONLY) for p in glob.glob(sys.argv[1] + "/*.aiff")]
assert len(fds) == 61 and all(len(os.pread(fd, 4096, 2000000)) == 4096 for fd in fds)
' "$mnt"
  if nm "$AIFFFFFS" | grep -qE '__(asan|tsan)_init'; then
    skip 'in less than 128 MB' 'sanitizers keep what is freed'
  else
    check "in less than 128 MB ($(awk '/VmHWM/ { print $2 }' "/proc/$daemon/status") KiB)" \
      awk '/VmHWM/ { low = $2 < 131072 } END { exit !low }' "/proc/$daemon/status"
  fi
  stop
  rm -rf "$work/hoard"
}

# verb_mutate [N [SEED]]: N mutants of small sound files, 200 to a mount. What a mutant gives without an
# error is the sound of the file that it was; or, where its metadata are changed and `flac -d` accepts it,
# what that delivers.
verb_mutate() {
  local total=${1:-2000} seed=${2:-1} src=$work/mutants from=0 n got=0
  have flac || { skip 'mutants' 'flac is not there'; return; }
  have /usr/bin/python3 || { skip 'mutants' 'python3 is not there'; return; }
  robust_py mutate <<'PY'
HERE = os.path.dirname(sys.argv[0])
SRC = os.path.join(HERE, 'mutants')

def bases():  # name, channels, bits, file, sound, spans of the frames in the sound
    out = []
    for i, (channels, bits, block, n, options) in enumerate((
            (1, 8, 192, 5000, ('-T', 'TITLE=eight')), (2, 16, 256, 4000, ('-T', 'ARTIST=x', '-P', '300', '-S', '5x')),
            (2, 16, 1024, 9000, ('--no-padding',)), (3, 24, 64, 900, ('-P', '20')), (1, 16, 16, 700, ()))):
        out.append((channels, bits, *flac_file(channels, bits, block, n, i, *options)))
    out.append((2, 16, *variable_file(2, 16, (192, 576, 64, 1024), 7000, 9)))
    for channels, bits, d, sound in out[1:4:2] + out[-1:]:
        out.append((channels, bits, set_total(d, 0), sound))
    return out

def mutate(rnd, d):
    """The mutant, whether only its frames are changed, and whether they are still in order."""
    audio, in_frames = audio_at(d), rnd.random() < 0.7
    low, high = (audio, len(d)) if in_frames else (0, audio)
    b, ordered = bytearray(d), True
    for _ in range(rnd.choice((1, 1, 1, 2, 5))):
        at = rnd.randrange(low, high)
        n = min(rnd.choice((1, 2, 4, 20, 300, 3000)), high - at)
        how = rnd.choice(('bit', 'byte', 'zero', 'noise', 'cut', 'insert', 'copy', 'end'))
        if in_frames and rnd.random() < 0.3:  # headers are where it gets interesting
            sync = b.find(b'\xff', at)
            at = sync + rnd.randrange(8) if audio <= sync < len(b) - 8 else at
            n = min(n, 20)
        at = min(at, len(b) - 1)
        if how == 'bit': b[at] ^= 1 << rnd.randrange(8)
        elif how == 'byte': b[at] = rnd.randrange(256)
        elif how == 'zero': b[at:at + n] = bytes(len(b[at:at + n]))
        elif how == 'noise': b[at:at + n] = rnd.randbytes(len(b[at:at + n]))
        elif how == 'cut': del b[at:at + n]
        elif how == 'insert': b[at:at] = rnd.randbytes(n)
        elif how == 'copy':
            other = rnd.randrange(low, high)
            b[at:at] = d[other:other + n]
            ordered = False
        elif in_frames: del b[at:]
        high = max(low + 1, min(high, len(b)))
    return bytes(b), in_frames, ordered

def mutants(seed, at, n):
    all_of_them = bases()
    for i in range(at, at + n):
        rnd = random.Random('%s %d' % (seed, i))
        channels, bits, d, sound = rnd.choice(all_of_them)
        yield i, rnd, channels, bits, d, sound, *mutate(rnd, d)

def make(seed, at, n):
    for i, *_, m, _, _ in mutants(seed, int(at), int(n)):
        write('%s/%d.flac' % (SRC, i), m)

def sound_of(path):
    """SSND of what flac delivers, or None."""
    out = os.path.join(HERE, 'decoded.aiff')
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    try:  # it, too, may run for ever
        if subprocess.run(['flac', '-s', '-d', '-f', '--force-aiff-format', '-o', out, path], stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=10, preexec_fn=limit).returncode:
            return None
    except subprocess.TimeoutExpired:
        return None
    with open(out, 'rb') as f:
        a = f.read()
    at = a.index(b'SSND')
    return a[at + 16:at + 8 + int.from_bytes(a[at + 4:at + 8], 'big')]

def check(seed, at, n, mnt):
    good = bad = refused = 0
    for i, rnd, channels, bits, d, sound, m, in_frames, ordered in mutants(seed, int(at), int(n)):
        try: f = Direct('%s/%d.aiff' % (mnt, i))
        except OSError as e:
            refused += 1
            if in_frames and len(m) >= audio_at(d) and (d[21] & 15 or any(d[22:26])):  # (not cut in its metadata)
                fail(i, 'cannot be opened:', e)
            continue
        wanted, audio = sound, audio_at(d)
        head = f.read(0, 54)
        if isinstance(head, int):
            fail(i, 'has no header:', head)
            continue
        if not in_frames:
            by_flac = sound_of('%s/%d.flac' % (SRC, i))
            if by_flac is not None:
                wanted = by_flac
            elif m[12:26] != d[12:26] or m[:4] != d[:4]:
                wanted = None  # other sound by the word of STREAMINFO: there is nothing to compare with
        size = int.from_bytes(head[42:46], 'big') - 8
        if in_frames and d[21:26] != bytes(5) and d[22:26] != bytes(4) and f.size < 54 + len(sound):
            fail(i, 'is too short:', f.size)
        ranges = [(o, 2000) for o in range(0, f.size, 2000)][:200]
        ranges += [(rnd.randrange(f.size), rnd.choice((1, 100, 1000, 9000))) for _ in range(8)]
        if rnd.random() < 0.5:
            rnd.shuffle(ranges)
        for o, k in ranges:
            got = f.read(o, k)
            if isinstance(got, int):
                bad += 1
                continue
            good += 1
            a, b = max(o, 54), min(o + len(got), 54 + size)
            if wanted is not None and a < b and got[a - o:b - o] != wanted[a - 54:b - 54]:
                fail(i, 'gave other sound from', a, 'to', b)
        known = d[22:26] != bytes(4)
        for (o, length), (start, end) in zip(frames(d), spans_of(d, channels, bits)) if in_frames and ordered and known else ():
            if d[o:o + length] in m:  # what is whole has to be there
                got = f.read(start, min(end, 54 + len(sound)) - start)
                if got != sound[start - 54:end - 54]:
                    fail(i, 'frame at', o, 'is whole and gave', got if isinstance(got, int) else 'other bytes')
        f.close()
    print(good, 'reads fine,', bad, 'reads with an error,', refused, 'files refused, slowest read', round(Direct.slowest, 3))
    if Direct.slowest > 5:
        fail('a read took', Direct.slowest, 'seconds')

main({'make': make, 'check': check})
PY
  while [ "$from" -lt "$total" ]; do
    n=$((total - from < 200 ? total - from : 200))
    rm -rf "$src" && mkdir "$src"
    /usr/bin/python3 "$work/robust-mutate.py" make "$seed" "$from" "$n" || { not_ok 'mutants are made'; return; }
    start "$src" || return
    if in_time "$work/robust-mutate.py" check "$seed" "$from" "$n" "$mnt" >"$out" 2>&1; then got=$((got + n)); else
      not_ok "mutants $from to $((from + n - 1)) of seed $seed give nothing wrong" "$out"
    fi
    kill -0 "$daemon" || not_ok "the daemon lives after mutants $from to $((from + n - 1))" "$log"
    stop
    from=$((from + n))
  done
  equal "$total mutants (seed $seed) give right bytes or an error" "$total" "$got"
}

# The source changes under readers.
section_change() {
  have flac || { skip 'changes of the source' 'flac is not there'; return; }
  have metaflac || { skip 'changes of the source' 'metaflac is not there'; return; }
  have /usr/bin/python3 || { skip 'changes of the source' 'python3 is not there'; return; }
  local src=$work/change
  rm -rf "$src" && mkdir "$src"
  robust_py change <<'PY'
SRC = os.path.join(os.path.dirname(sys.argv[0]), 'change')
FLAC, TMP = SRC + '/x.flac', SRC + '/y.tmp'
N = 120000
OLD, OLD_SOUND = flac_file(2, 16, 1152, N, 1, '-P', '4000', '-T', 'TITLE=first')
# another song of as many samples, in a file of as many bytes
SONG, SONG_SOUND = flac_file(2, 16, 1152, N, 2, '-P', '4000', '-T', 'TITLE=other')
size = max(len(OLD), len(SONG)) - min(len(OLD), len(SONG))
if len(OLD) < len(SONG): OLD, OLD_SOUND = flac_file(2, 16, 1152, N, 1, '-P', str(4000 + size), '-T', 'TITLE=first')
else: SONG, SONG_SOUND = flac_file(2, 16, 1152, N, 2, '-P', str(4000 + size), '-T', 'TITLE=other')
assert len(OLD) == len(SONG)

def metaflac(*args):
    subprocess.run(['metaflac', *args, FLAC], check=True)

def title(data, sound):  # of the tag behind the sound
    at = data.find(b'TIT2', 54 + len(sound))
    return data[at + 11:at + 10 + int.from_bytes(data[at + 4:at + 8], 'big')].decode() if at > 0 else None

def whole(name, path, sound, wanted_title, tries=30):
    """A new open sees the new file whole: what stat says, what open says, sound and tag."""
    deadline = time.monotonic() + tries
    while True:  # the kernel may keep attributes for a second
        size = os.stat(path).st_size
        with open(path, 'rb') as f:
            told = os.fstat(f.fileno()).st_size
            try: data = f.read()
            except OSError as e: data = b''
        if len(data) == size == told and data[54:54 + len(sound)] == sound and title(data, sound) == wanted_title and \
                int.from_bytes(data[4:8], 'big') == size - 8:
            return
        if data[54:54 + len(sound)] == sound and title(data, sound) not in (wanted_title, 'first', 'other'):
            fail(name, 'a mix of tags:', title(data, sound))
        if time.monotonic() > deadline:
            fail(name, 'a new open does not see the new file: stat', size, 'fstat', told, 'read', len(data), 'title', title(data, sound))
            return
        time.sleep(0.05)

def stat_follows(name, path, size):
    """stat shows the new size within the attribute timeout of one second (and some for a slow machine)."""
    deadline = time.monotonic() + 3
    while os.stat(path).st_size != size:
        if time.monotonic() > deadline:
            fail(name, 'stat still shows', os.stat(path).st_size, 'not', size)
            return
        time.sleep(0.02)

class Old:
    """A handle that was opened before the change: some pages of it cached, some not, and two readers that
    go on. Every byte is the old sound; at the most it is an error from a point on."""
    def __init__(self, path, shorter):
        self.shorter = shorter
        self.path, self.stop, self.wrong, self.errors, self.count = path, False, set(), set(), 0
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, 150000, 4096):
            self.read(at, 4096)
        self.tag = self.read(54 + 4 * N, 5000)
        self.readers = [threading.Thread(target=self.run, args=(i,)) for i in range(2)]
        for t in self.readers: t.start()
        self.wait(20)
    def read(self, at, n):
        try: got = os.pread(self.fd, n, at)
        except OSError as e:
            self.errors.add(e.errno)
            return None
        end = 54 + 4 * N
        a, b = max(at, 54), min(at + len(got), end)
        if a < b and got[a - at:b - at] != OLD_SOUND[a - 54:b - 54]:
            self.wrong.add(at)
        # a short read has an error behind it. But the kernel has one size for both files: after a shorter one
        # has been looked at, the end comes there
        end = self.size if self.shorter is None else self.shorter
        if len(got) < min(n, end - at) and self.read(at + len(got), 1) == b'':
            self.wrong.add('end at %d' % (at + len(got)))
        self.count += 1
        return got
    def run(self, seed):
        rnd = random.Random(seed)
        while not self.stop:
            # not the last page, in which the tag begins
            self.read(rnd.randrange(4 * N - 40000), rnd.choice((100, 4096, 20000)))
    def wait(self, n):  # until so many more reads have been tried
        want = self.count + n
        deadline = time.monotonic() + 20
        while self.count < want and not self.errors and time.monotonic() < deadline:
            time.sleep(0.001)
    def end(self, name, sound_goes_on, errors):
        """`sound_goes_on`: the sound can still be read, all of it."""
        self.wait(50)
        self.stop = True
        for t in self.readers: t.join()
        self.errors.discard(None)
        before = set(self.errors)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        tag = self.read(54 + 4 * N, 5000)
        at_tag = self.errors - before
        for at in range(0, 4 * N, 65536):
            self.read(at, 65536)
        if self.wrong:
            fail(name, 'the old handle gave other sound:', sorted(map(str, self.wrong))[:3])
        if sound_goes_on and before:
            fail(name, 'the old handle got', before)
        if not self.errors <= errors:
            fail(name, 'the old handle got', self.errors)
        if tag and tag[:len(self.tag)] != self.tag:
            fail(name, 'the old handle gave another tag')
        os.close(self.fd)

def reset():
    """The old file at its place, under an inode of its own, and long enough for its times to differ."""
    write(TMP, OLD)
    os.rename(TMP, FLAC)
    time.sleep(0.05)

def case(name, path, change, sound=OLD_SOUND, tag='first', goes_on=False, shorter=None):
    for reopen in (False, True):
        reset()
        whole(name + ', before,', path, OLD_SOUND, 'first')
        old = Old(path, shorter)
        change()
        if reopen and sound is not None:  # pages that a new reader brings in must not reach the old one
            whole(name + ', reopened,', path, sound, tag)
        missing = {errno.EIO} if name.startswith('truncate') else set()
        old.end(name + (', reopened,' if reopen else ','), goes_on, {errno.ESTALE} | missing)
        if sound is None:
            continue
        whole(name + ', after,', path, sound, tag)

def rewrite(data, back_to_front=False):
    def change():
        with open(FLAC, 'r+b') as f:
            for at in sorted(range(0, len(data), 50000), reverse=back_to_front):
                f.seek(at)
                f.write(data[at:at + 50000])
                f.flush()
            f.truncate(len(data))
    return change

def keep_times(change):
    def with_times():
        st = os.stat(FLAC)
        change()
        os.utime(FLAC, ns=(st.st_atime_ns, st.st_mtime_ns))
    return with_times

def by_rename(data):
    def change():
        write(TMP, data)
        os.rename(TMP, FLAC)
    return change

def check(mnt, only=None):
    path = mnt + '/x.aiff'
    retag = lambda *options: lambda: metaflac(*options, '--remove-tag=TITLE', '--set-tag=TITLE=third')
    grow = lambda *options: lambda: metaflac(*options, '--remove-tag=TITLE', '--set-tag=TITLE=third', '--set-tag=COMMENT=' + 'x' * 9000)
    longer, longer_sound = flac_file(2, 16, 1152, N + 50000, 5, '-T', 'TITLE=longer')
    shorter, shorter_sound = flac_file(2, 16, 1152, N - 50000, 6, '-T', 'TITLE=shorter')
    end = 54 + len(shorter_sound)
    cases = {
        'retag': (retag(), OLD_SOUND, 'third', True),
        'retag-preserve-modtime': (retag('--preserve-modtime'), OLD_SOUND, 'third', True),
        'grow': (grow(), OLD_SOUND, 'third', False),
        'grow-preserve-modtime': (grow('--preserve-modtime'), OLD_SOUND, 'third', False),
        'grow-in-place': (lambda: rewrite(grown())(), OLD_SOUND, 'third', False),
        'rename': (by_rename(SONG), SONG_SOUND, 'other', True),
        'rewrite': (rewrite(SONG), SONG_SOUND, 'other', False),
        'rewrite-same-times': (keep_times(rewrite(SONG)), SONG_SOUND, 'other', False),
        'rewrite-longer': (rewrite(longer), longer_sound, 'longer', False),
        'rewrite-shorter': (rewrite(shorter), shorter_sound, 'shorter', False, end),
        'rename-shorter': (by_rename(shorter), shorter_sound, 'shorter', True, end),
        'rename-longer': (by_rename(longer), longer_sound, 'longer', True),
        'rewrite-back-to-front': (rewrite(SONG, True), SONG_SOUND, 'other', False),
        'truncate': (lambda: os.truncate(FLAC, len(OLD) // 2), None, None, False),
        'truncate-to-nothing': (lambda: os.truncate(FLAC, 0), None, None, False),
        'delete': (lambda: os.unlink(FLAC), None, None, True),
        'touch': (lambda: os.utime(FLAC), OLD_SOUND, 'first', True),
        'chmod': (lambda: os.chmod(FLAC, 0o600), OLD_SOUND, 'first', True),
    }
    for name, args in cases.items():
        if only is None or only == name:
            case(name, path, *args)
    if only:
        return
    reset()  # sizes: what stat says without any open
    stat_follows('retagged', path, os.stat(path).st_size)
    before = os.stat(path).st_size
    metaflac('--remove-tag=TITLE', '--set-tag=TITLE=' + 't' * 101)
    stat_follows('retagged', path, before - 5 + 101)
    reset()
    whole('three opens', path, OLD_SOUND, 'first')  # old pages must not come back with a later open
    a = os.open(path, os.O_RDONLY)
    by_rename(SONG)()
    time.sleep(1.1)
    b = open(path, 'rb')
    for at in range(0, 4 * N, 65536):
        os.pread(a, 65536, at)
    os.close(a)
    b.close()
    whole('three opens', path, SONG_SOUND, 'other', 0)

def grown():
    d = subprocess.run(['cp', FLAC, TMP], check=True) and None
    subprocess.run(['metaflac', '--remove-tag=TITLE', '--set-tag=TITLE=third', '--set-tag=COMMENT=' + 'x' * 9000, TMP], check=True)
    with open(TMP, 'rb') as f: d = f.read()
    os.unlink(TMP)
    return d

def stale(mnt):
    write(FLAC, OLD)
    time.sleep(0.1)
    f = Direct(mnt + '/x.aiff')
    metaflac('--remove-tag=TITLE', '--set-tag=TITLE=other')
    got = f.read(54 + 4 * N, 100)
    if got != errno.ESTALE:
        fail('an old tag gave', got)
    f.close()

main({'check': check, 'stale': stale})
PY
  start "$src" || return
  check 'changes of the source: old sound or an error, and then the new file' in_time "$work/robust-change.py" check "$mnt"
  stop
  start "$src" -o attr_timeout=0 || return
  check 'an old tag is ESTALE' in_time "$work/robust-change.py" stale "$mnt"
  equal 'and that has its line in the log' 1 "$(grep -c '^aifffffs: x.flac: changed while it was open' "$log")"
  stop
}

# Who may read what, when root has mounted somebody's tree for all. SWAP_SECONDS: how long files are
# swapped for symlinks under readers (4).
contain_as() { setpriv --reuid="$1" --regid="$1" --clear-groups "${@:2}"; }

section_contain() {
  [ "$(id -u)" = 0 ] || { skip 'containment' 'it takes root'; return; }
  have setpriv || { skip 'containment' 'setpriv is not there'; return; }
  have flac || { skip 'containment' 'flac is not there'; return; }
  have /usr/bin/python3 || { skip 'containment' 'python3 is not there'; return; }
  local src=$work/contain seconds=${SWAP_SECONDS:-4} owner=12345 other=23456 mode swapper
  rm -rf "$src" "$work/root-only" && mkdir "$src"
  chmod 755 "$work"
  robust_py contain <<'PY'
import ctypes
HERE = os.path.dirname(sys.argv[0])
SRC, ROOT_ONLY, SECRET = HERE + '/contain', HERE + '/root-only', b'only root may read this'
THEIRS = b'what everybody may read'  # of the same length: an old size hides nothing
assert len(THEIRS) == len(SECRET)
libc = ctypes.CDLL(None, use_errno=True)

def make(owner):
    d, _ = flac_file(2, 16, 1152, 5000, 1, '-T', 'TITLE=theirs')
    secret, _ = flac_file(1, 8, 192, 5000, 2, '-T', 'TITLE=' + SECRET.decode())
    os.mkdir(ROOT_ONLY, 0o700)
    write(ROOT_ONLY + '/key.txt', SECRET)
    write(ROOT_ONLY + '/key.flac', secret)
    for name, mode in ('open', 0o644), ('closed', 0o600), ('group', 0o640), ('none', 0o000):
        write('%s/%s.flac' % (SRC, name), d)
        write('%s/%s.txt' % (SRC, name), name.encode())
        os.chmod('%s/%s.flac' % (SRC, name), mode)
        os.chmod('%s/%s.txt' % (SRC, name), mode)
    for name, mode in ('dir', 0o755), ('closed-dir', 0o700):
        os.mkdir(SRC + '/' + name)
        write('%s/%s/in.flac' % (SRC, name), d)
        write('%s/%s/in.txt' % (SRC, name), b'in')
        os.chmod(SRC + '/' + name, mode)
    for name, target in {'leak.flac': ROOT_ONLY + '/key.flac', 'leak.txt': ROOT_ONLY + '/key.txt', 'leak-dir': ROOT_ONLY,
            'up.txt': '../root-only/key.txt', 'up.flac': 'dir/../../root-only/key.flac', 'proc.txt': '/proc/self/environ',
            'fd.txt': '/proc/self/fd/0', 'root-dir': '/proc/self/root', 'cwd.txt': '/proc/self/cwd/root-only/key.txt',
            'zero.flac': '/dev/zero', 'zero.txt': '/dev/zero', 'loop.flac': 'loop2.flac', 'loop2.flac': 'loop.flac',
            'self.flac': 'self.flac', 'round': 'round/round', 'to-closed.flac': 'closed.flac', 'to-dir': 'closed-dir',
            'to-open.flac': 'open.flac', 'shadow.txt': '/etc/shadow'}.items():
        os.symlink(target, SRC + '/' + name)
    os.mkfifo(SRC + '/fifo.flac')
    os.mkfifo(SRC + '/fifo.txt')
    import socket
    os.chdir(SRC)  # its name has to be short
    for name in 'socket.flac', 'socket.txt':
        socket.socket(socket.AF_UNIX).bind(name)
    for name, device in (('null.flac', (1, 3)), ('zero-device.txt', (1, 5)), ('tty.flac', (5, 0))):
        try: os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(*device))
        except PermissionError: pass
    for name in 'forged\naifffffs: forged: a line.flac', 'esc\x1b[31m\x7f.flac', 'tab\tcr\r.flac':
        write(name, b'this is no FLAC file, but it is long enough to look like one' * 3)
    write('swap.txt', THEIRS)
    write('swap.flac', d)
    os.mkdir('swap-dir')
    write('swap-dir/key.txt', THEIRS)
    write('swap-dir/key.flac', d)
    os.symlink(ROOT_ONLY + '/key.txt', 'swap2.txt')
    os.symlink(ROOT_ONLY + '/key.flac', 'swap2.flac')
    os.symlink(ROOT_ONLY, 'swap2-dir')
    for at, dirs, files in os.walk(SRC):
        for name in dirs + files:
            os.lchown(at + '/' + name, int(owner), int(owner))
    os.chown(SRC, int(owner), int(owner))
    write('rename2.txt', SECRET)  # of root, but in a directory that is not
    os.chmod('rename2.txt', 0o600)
    write('rename.txt', THEIRS)
    os.chown('rename.txt', int(owner), int(owner))

def swap(seconds):  # as the owner
    os.chdir(SRC)
    pairs = [(a.encode(), a.replace(b, b + '2', 1).encode()) for a, b in
        (('swap.txt', 'swap'), ('swap.flac', 'swap'), ('swap-dir', 'swap'), ('rename.txt', 'rename'))]
    end, n = time.monotonic() + float(seconds), 0
    while time.monotonic() < end:
        for a, b in pairs:
            if libc.renameat2(-100, a, -100, b, 2):  # RENAME_EXCHANGE
                raise OSError(ctypes.get_errno(), 'renameat2')
        n += 1
        if n == 10:
            print('swapping', flush=True)
    print(n, 'rounds')

def look(path):
    """What can be had of it: its bytes or an errno. Never blocks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as e:
        return e.errno
    try:
        return b''.join(iter(lambda: os.read(fd, 1 << 16), b'')) if stat.S_ISREG(os.fstat(fd).st_mode) else -1
    except OSError as e:
        return e.errno
    finally:
        try: os.close(fd)
        except OSError: pass  # the kernel says so of a file that became a symlink

def secret(got):
    return isinstance(got, bytes) and (SECRET in got or SECRET.decode().encode('utf-16-le') in got)

def watch(mnt, seconds):
    """Reads what is swapped; both answers have to come, and never the secret."""
    end, seen = time.monotonic() + float(seconds), {}
    names = 'swap.txt', 'swap.aiff', 'swap-dir/key.txt', 'swap-dir/key.aiff', 'rename.txt', 'swap2.txt', 'swap2.aiff', \
        'swap2-dir/key.txt', 'swap2-dir/key.aiff', 'rename2.txt'
    while time.monotonic() < end:
        for name in names:
            got = look(mnt + '/' + name)
            seen.setdefault(name, set()).add('bytes' if isinstance(got, bytes) else got)
            if secret(got):
                fail(name, 'gave away the secret')
        try: os.listdir(mnt + '/swap-dir')
        except OSError: pass
    for name in 'swap.txt', 'swap-dir/key.txt':
        if len(seen[name]) < 2:
            fail(name, 'was never seen to change:', seen[name])

def modes(mnt, who, follow):
    wanted = {'open.txt': b'open', 'dir/in.txt': b'in'}
    closed = 'closed.txt', 'closed.aiff', 'group.txt', 'group.aiff', 'none.txt', 'none.aiff', 'closed-dir/in.txt', 'closed-dir/in.aiff'
    for name in closed:
        wanted[name] = errno.EACCES
    if who == 'owner':
        wanted.update({'closed.txt': b'closed', 'group.txt': b'group', 'closed-dir/in.txt': b'in'})
        for name in 'closed.aiff', 'group.aiff', 'closed-dir/in.aiff':
            del wanted[name]
    for name, want in wanted.items():
        got = look(mnt + '/' + name)
        if got != want:
            fail(name, 'for', who, 'is', got[:40] if isinstance(got, bytes) else got, 'not', want)
    for name in ('open.aiff', 'dir/in.aiff', 'to-open.aiff') + (('closed.aiff', 'to-closed.aiff') if who == 'owner' else ()):
        got = look(mnt + '/' + name)
        if not isinstance(got, bytes) or got[:4] != b'FORM':
            fail(name, 'for', who, 'is', got)
    if who != 'owner':
        for name in 'to-closed.aiff', 'to-dir/in.txt', 'to-dir/in.aiff':
            if isinstance(look(mnt + '/' + name), bytes):
                fail(name, 'can be read by', who)
    everything(mnt, who, follow)

def everything(mnt, who, follow):
    """Opens all that there is: no secret, and nothing that blocks."""
    start = time.monotonic()
    names = [mnt + '/' + n for n in os.listdir(mnt)] + [mnt + '/dir/' + n for n in os.listdir(mnt + '/dir')] + [mnt + '/' + n for n in
        ('leak-dir/key.txt', 'leak-dir/key.aiff', 'leak-dir/key.flac', 'root-dir/etc/shadow', 'leak.flac', 'up.flac', 'round/x')]
    for name in names:
        if 'zero' in name and not name.endswith('.aiff') or 'proc' in name or 'root-dir' in name and 'shadow' not in name:
            continue  # what the reader's own kernel follows for him
        if stat.S_ISFIFO(os.lstat(name).st_mode) if os.path.lexists(name) else False:
            continue  # a FIFO is the reader's kernel's own, and blocks where it should
        try:
            st = os.stat(name)
        except OSError:
            continue
        if not stat.S_ISREG(st.st_mode) and not stat.S_ISDIR(st.st_mode):
            continue
        if secret(look(name)):
            fail(name, 'gives', who, 'the secret')
    for name in ('root-dir/etc/shadow', 'shadow.txt') + (('proc.txt', 'cwd.txt') if follow else ()):
        if look(mnt + '/' + name) not in (b'', errno.EACCES, errno.ENOENT, errno.EPERM, errno.ELOOP, errno.EIO):
            fail(name, 'can be read by', who)
    if time.monotonic() - start > 20:
        fail('all of it', 'took', time.monotonic() - start, 'seconds')

main({'make': make, 'swap': swap, 'watch': watch, 'modes': modes})
PY
  check 'the tree of another user is made' /usr/bin/python3 "$work/robust-contain.py" make "$owner"
  for mode in '' '-o follow_symlinks'; do
    # shellcheck disable=SC2086 # none or two words
    start "$src" -o allow_other $mode || return
    check "modes hold for others, nothing blocks, no secret gets out (${mode:-plain})" timeout 60 setpriv --reuid="$other" \
      --regid="$other" --clear-groups /usr/bin/python3 "$work/robust-contain.py" modes "$mnt" other "$mode"
    check "modes hold for the owner (${mode:-plain})" timeout 60 setpriv --reuid="$owner" --regid="$owner" --clear-groups \
      /usr/bin/python3 "$work/robust-contain.py" modes "$mnt" owner "$mode"
    check 'directories can be listed' timeout 30 ls -lR "$mnt/dir" "$mnt/closed-dir"
    timeout 30 ls -l "$mnt" >"$out" 2>&1 # not all of it can be looked at
    equal 'a name with a newline makes one line of log' 1 "$(grep -c 'forged: a line.flac: ' "$log")"
    refuse 'and none that looks like one of ours' grep -q '^aifffffs: forged: ' "$log"
    refuse 'no control byte gets into the log' grep -qP '[\x00-\x08\x0b-\x1f\x7f]' "$log"
    stop
  done
  for mode in '-o attr_timeout=0,entry_timeout=0' '-o follow_symlinks' '-s'; do
    # shellcheck disable=SC2086 # two words
    start "$src" -o allow_other $mode || return
    contain_as "$owner" /usr/bin/python3 "$work/robust-contain.py" swap "$((seconds + 2))" >"$work/swaps" 2>&1 &
    swapper=$!
    until_true 20 grep -q swapping "$work/swaps"
    check "what its owner swaps for a symlink gives nothing away ($mode)" contain_as "$owner" \
      /usr/bin/python3 "$work/robust-contain.py" watch "$mnt" "$seconds"
    wait "$swapper" || not_ok 'files are swapped' "$work/swaps"
    stop
  done
  rm -rf "$work/root-only" "$src"
}

# Faults from outside: signals, unmounting, no descriptors, no memory, a source that fails.
faults_limit() { # milliseconds in which to leave
  if grep -qE '__asan_init|__tsan_init' "$AIFFFFFS"; then echo 20000; else echo 1000; fi
}

# faults_leave SENTENCE COMMAND ...: under load, the command makes the daemon leave in time, with status 0,
# and the mountpoint is of use again
faults_leave() {
  local sentence=$1 readers status begin took watch i
  shift
  start "$work/faults" || return
  readers=()
  for i in 1 2 3 4 5 6; do
    (while for f in "$mnt"/[a-d].aiff; do dd if="$f" of=/dev/null bs=50000 iflag=direct || exit; done; do :; done) 2>/dev/null &
    readers+=($!)
  done
  until_true 20 faults_busy || not_ok "$sentence: there is load" "$log"
  begin=$(date +%s%N)
  "$@" >"$out" 2>&1 || not_ok "$sentence: the command works" "$out"
  (sleep 60 && kill -KILL "$daemon") & # or this waits for ever
  watch=$!
  wait "$daemon"
  status=$?
  end=$(date +%s%N)
  took=$(((end - begin) / 1000000))
  daemon=
  kill "$watch"
  wait "$watch" "${readers[@]}"
  equal "$sentence: status 0" 0 "$status"
  if [ "$took" -lt "$(faults_limit)" ]; then ok "$sentence: within a second"; else not_ok "$sentence: took $took ms"; fi
  refuse "$sentence: nothing is left mounted" mountpoint -q "$mnt"
  check "$sentence: the mountpoint is of use" ls "$mnt"
  if grep -qE 'Sanitizer|runtime error' "$log"; then not_ok "$sentence: no sanitizer complains" "$log"; fi
}

faults_busy() { [ "$(stats reads)" -gt 20 ]; }

faults_abort() { # the kernel closes /dev/fuse
  local device
  device=$(mountpoint -d "$mnt")
  echo 1 >"$work/control/${device#*:}/abort"
}

# The program with allocations and reads of the source that can be made to fail: $work/faulty, and under
# AddressSanitizer, where only the program's own allocations can, $work/faulty-asan.
faults_build() {
  local cc=${CC:-cc} sanitize=-fsanitize=address,undefined
  cat >"$work/fault.c" <<'C'
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* in the file that $FAULT names: fail that allocation, so many there were, failed, errno of reads */
static struct fault {
  long at, count, failed, read_errno;
} nothing, *fault = &nothing;

__attribute__((constructor)) static void fault_start(void)
{
  const char *name = getenv("FAULT");
  int fd = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
  void *p = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *fault, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p != MAP_FAILED)
    __atomic_store_n(&fault, p, __ATOMIC_SEQ_CST);
  if (fd >= 0)
    close(fd);
}

static int fault_now(void)
{
  long at = __atomic_load_n(&fault->at, __ATOMIC_SEQ_CST);
  if (at == 0 || __atomic_add_fetch(&fault->count, 1, __ATOMIC_SEQ_CST) != at)
    return 0;
  __atomic_add_fetch(&fault->failed, 1, __ATOMIC_SEQ_CST);
  errno = ENOMEM;
  return 1;
}

#ifdef INTERPOSE
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t n) { return fault_now() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return fault_now() ? NULL : __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return fault_now() ? NULL : __libc_realloc(p, n); }
#else
void *fault_malloc(size_t n) { return fault_now() ? NULL : malloc(n); }
void *fault_calloc(size_t n, size_t m) { return fault_now() ? NULL : calloc(n, m); }
void *fault_realloc(void *p, size_t n) { return fault_now() ? NULL : realloc(p, n); }
char *fault_strdup(const char *s) { return fault_now() ? NULL : strdup(s); }
#endif

ssize_t fault_pread(int fd, void *p, size_t n, off_t at)
{
  long e = __atomic_load_n(&fault->read_errno, __ATOMIC_SEQ_CST);
  if (e) {
    errno = (int)e;
    return -1;
  }
  return pread(fd, p, n, at);
}
C
  cat >"$work/fault.h" <<'C'
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t fault_pread(int, void *, size_t, off_t);
#define pread fault_pread
#ifndef INTERPOSE
void *fault_malloc(size_t), *fault_calloc(size_t, size_t), *fault_realloc(void *, size_t);
char *fault_strdup(const char *);
#undef strdup
#define malloc fault_malloc
#define calloc fault_calloc
#define realloc fault_realloc
#define strdup fault_strdup
#endif
C
  local flags=(-std=gnu11 -O1 -g -D_FILE_OFFSET_BITS=64 -DINTERPOSE) suffix
  for suffix in '' -asan; do
    [ -z "$suffix" ] || flags=(-std=gnu11 -O1 -g -D_FILE_OFFSET_BITS=64 -fno-omit-frame-pointer "$sanitize")
    # shellcheck disable=SC2046 # words
    "$cc" "${flags[@]}" -c -o "$work/fault.o" "$work/fault.c" &&
      "$cc" "${flags[@]}" -include "$work/fault.h" $(pkg-config --cflags fuse3 flac) -o "$work/faulty$suffix" \
        "$HERE/aifffffs.c" "$work/fault.o" $(pkg-config --libs fuse3 flac) -pthread || return 1
  done
}

section_faults() {
  have flac || { skip 'faults' 'flac is not there'; return; }
  have /usr/bin/python3 || { skip 'faults' 'python3 is not there'; return; }
  local src=$work/faults way soft n status plain=$AIFFFFFS suffix
  rm -rf "$src" && mkdir "$src"
  robust_py faults <<'PY'
import struct
HERE = os.path.dirname(sys.argv[0])
SRC = HERE + '/faults'
LONG, LONG_SOUND = flac_file(2, 16, 1152, 100000, 1, '-T', 'TITLE=long')

def make():
    for name in 'abcd':
        write('%s/%s.flac' % (SRC, name), LONG)
    unknown, _ = flac_file(1, 8, 192, 5000, 2, '-T', 'TITLE=unknown')
    write(SRC + '/unknown.flac', set_total(unknown, 0))
    write(SRC + '/other.txt', b'other')
    os.symlink('a.flac', SRC + '/link.flac')
    os.mkdir(SRC + '/many')
    for i in range(300):
        os.link(SRC + '/a.flac', '%s/many/%d.flac' % (SRC, i))
    os.mkdir(SRC + '/few')
    for name in 'a.flac', 'unknown.flac', 'other.txt':
        os.link(SRC + '/' + name, SRC + '/few/' + name)
    os.symlink('a.flac', SRC + '/few/link.flac')

def descriptors(mnt, wanted):
    """Opens 300 files. 'all': that works. 'some': from a point on EMFILE, and all is well once some are closed."""
    fds, errors = [], set()
    for i in range(300):
        try: fds.append(os.open('%s/many/%d.aiff' % (mnt, i), os.O_RDONLY))
        except OSError as e: errors.add(e.errno)
    for fd in fds[::7]:
        if os.pread(fd, 1000, 54) != LONG_SOUND[:1000]:
            fail('other bytes')
    if wanted == 'all' and errors:
        fail('got', errors)
    if wanted == 'some' and errors != {errno.EMFILE}:
        fail('got', errors, 'and', len(fds), 'files')
    for fd in fds:
        os.close(fd)
    deadline = time.monotonic() + 20
    while True:  # the kernel tells of a close when it has the time
        try:
            with open(mnt + '/many/299.aiff', 'rb') as f:
                if f.read()[54:54 + len(LONG_SOUND)] != LONG_SOUND:
                    fail('does not recover: other bytes')
                return
        except OSError as e:
            if time.monotonic() > deadline:
                return fail('does not recover:', e)
            time.sleep(0.05)

class Fault:
    def __init__(self):
        self.fd = os.open(HERE + '/fault', os.O_RDWR)
        self.map = mmap.mmap(self.fd, 32)
    def set(self, at=0, read_errno=0):
        self.map[:] = struct.pack('4l', 0, 0, 0, read_errno)
        self.map[:8] = struct.pack('l', at)
    def failed(self):
        return struct.unpack('4l', self.map[:])[2]

def source(mnt):
    """The source answers with an error for a while. Whatever was begun then is right afterwards."""
    fault = Fault()
    for number in errno.EIO, errno.ENOMEM, errno.ETIMEDOUT:
        for warm in (False, True):
            f = Direct(mnt + '/a.aiff')
            if warm and f.read(54, 5000) != LONG_SOUND[:5000]:
                fail('other bytes before')
            fault.set(read_errno=number)
            for at in 54, 60000, 100, 200000, 54 + len(LONG_SOUND):
                got = f.read(at, 100000)
                if got != number and not (at < 5100 and warm and isinstance(got, bytes)):
                    fail(os.strerror(number), 'at', at, 'became', got if isinstance(got, int) else 'bytes')
            try:
                os.stat(mnt + '/b.aiff')
                os.close(os.open(mnt + '/b.aiff', os.O_RDONLY))
                fail('a file that cannot be read is opened')
            except OSError as e:
                if e.errno != number:
                    fail('opening it gave', e)
            fault.set()
            want = aiff(2, 16, 44100, LONG_SOUND)[54:54 + len(LONG_SOUND)]
            head = f.read(0, 54)
            if isinstance(head, int) or head[22:26] != (100000).to_bytes(4, 'big'):
                fail('the header afterwards is', head)
            for at in 0, 200000, 5000, 330000:
                if f.read(54 + at, 70000) != want[at:at + 70000]:
                    fail('other bytes afterwards at', at)
            f.close()
            with open(mnt + '/b.aiff', 'rb') as b:
                if b.read()[54:54 + len(want)] != want:
                    fail('other bytes in a file that could not be opened before')

def scenario(mnt):
    def step(f, *args):
        try: return f(*args)
        except OSError as e:
            errors.add(e.errno)
    errors = set()
    step(os.listdir, mnt + '/few')
    step(lambda: [e.stat() for e in os.scandir(mnt + '/few')])
    for name in 'a.aiff', 'unknown.aiff':
        step(os.stat, mnt + '/few/' + name)
        f = step(Direct, mnt + '/few/' + name)
        if f:
            for at, n in ((0, 54), (54, 9000), (f.size // 2, 20000), (f.size - 100, 100), (9054, 5000)):
                got = f.read(at, n)
                if isinstance(got, int):
                    errors.add(got)
                elif name == 'a.aiff' and at >= 54 and at + n <= 54 + len(LONG_SOUND) and got != LONG_SOUND[at - 54:at - 54 + n]:
                    fail('other bytes at', at)
            f.close()
    step(lambda: open(mnt + '/few/other.txt').read())
    step(os.readlink, mnt + '/few/link.aiff')
    step(os.stat, mnt + '/few/link.aiff')
    step(os.statvfs, mnt)
    step(os.stat, mnt + '/few/not there')
    return errors - {errno.ENOENT}

def memory(mnt, pid):
    """Each allocation in turn fails, until none does."""
    fault, n = Fault(), 0
    if scenario(mnt):
        fail('without any fault there is one:', scenario(mnt))
    while True:
        n += 1
        fault.set(at=n)
        errors = scenario(mnt)
        failed = fault.failed()
        fault.set()
        try: os.kill(int(pid), 0)
        except OSError: return fail('the daemon died of allocation', n)
        if not errors <= {errno.ENOMEM, errno.EIO}:
            fail('allocation', n, 'gave', errors)
        if not failed:
            break
        if n == 5000:
            return fail('no end')
    if scenario(mnt):
        fail('does not recover:', scenario(mnt))
    print(n - 1, 'allocations')
    if n < 30:
        fail('too few')

def hold(mnt, pid):
    """Out of descriptors, and then it has to leave."""
    fds, end = [], time.monotonic() + 20
    try:
        for i in range(300):
            fds.append(os.open('%s/many/%d.aiff' % (mnt, i), os.O_RDONLY))
        fail('there is no end of descriptors')
    except OSError as e:
        if e.errno != errno.EMFILE:
            fail('got', e)
    os.kill(int(pid), 15)
    while os.path.ismount(mnt) or not os.access(mnt, os.W_OK):
        if time.monotonic() > end:
            return fail('it does not leave')
        time.sleep(0.02)

def signals(mnt, pid):
    """A storm of signals while somebody reads."""
    stop = []
    def storm():
        while not stop:
            os.kill(int(pid), 10)
            time.sleep(0.0005)
    t = threading.Thread(target=storm)
    t.start()
    for _ in range(5):
        f = Direct(mnt + '/a.aiff')
        for at in range(0, len(LONG_SOUND), 30000):
            if f.read(54 + at, 30000)[:len(LONG_SOUND) - at] != LONG_SOUND[at:at + 30000]:
                fail('other bytes or an error at', at)
        f.close()
    stop.append(1)
    t.join()

main({'make': make, 'descriptors': descriptors, 'source': source, 'memory': memory, 'signals': signals, 'hold': hold})
PY
  check 'files for faults are made' in_time "$work/robust-faults.py" make

  for way in TERM INT HUP; do
    # the shell has made background processes ignore INT
    faults_leave "SIG$way under load" faults_kill "$way"
  done
  faults_leave 'fusermount3 -u -z under load' fusermount3 -u -z "$mnt"
  faults_leave 'umount -l under load' umount -l "$mnt"
  mkdir -p "$work/control"
  if mount -t fusectl none "$work/control" 2>/dev/null; then
    # libfuse keeps no list of open directories, and cannot free those that nobody closes any more
    ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0 faults_leave '/dev/fuse closed' faults_abort
    umount "$work/control"
  else skip '/dev/fuse closed' 'it takes root and the fusectl file system'; fi
  start "$src" || return
  check 'signals do not disturb a reader' in_time "$work/robust-faults.py" signals "$mnt" "$daemon"
  stop

  soft=$(ulimit -Sn)
  ulimit -Sn 64
  start "$src" || return
  ulimit -Sn "$soft"
  check 'the soft limit of open files is raised to the hard one' in_time "$work/robust-faults.py" descriptors "$mnt" all
  if have prlimit; then
    prlimit --pid "$daemon" --nofile=60:60
    check 'out of descriptors: EMFILE, and then all is well' in_time "$work/robust-faults.py" descriptors "$mnt" some
    check 'out of descriptors, it can still leave' in_time "$work/robust-faults.py" hold "$mnt" "$daemon"
    wait "$daemon"
    equal 'and with status 0' 0 "$?"
    daemon=
  else
    skip 'out of descriptors' 'prlimit is not there'
    stop
  fi

  if ! have pkg-config || ! faults_build >"$out" 2>&1; then
    skip 'faults inside' 'they take a C compiler, glibc and the headers'
    return
  fi
  head -c 32 /dev/zero >"$work/fault"
  export FAULT=$work/fault
  for suffix in '' -asan; do
    AIFFFFFS=$work/faulty$suffix
    start "$src" -o attr_timeout=0,entry_timeout=0 && {
      check "a source that fails gives its errno, and right bytes afterwards (faulty$suffix)" \
        in_time "$work/robust-faults.py" source "$mnt"
      stop
    }
    start "$src" -o attr_timeout=0,entry_timeout=0,max_threads=3 && {
      check "each allocation may fail (faulty$suffix)" in_time "$work/robust-faults.py" memory "$mnt" "$daemon"
      stop
    }
    status=
    for ((n = 1; n < 400; n++)); do
      faults_arm "$n"
      timeout 20 "$AIFFFFFS" -f "$src" "$mnt" >"$log" 2>&1 &
      daemon=$!
      until_true 20 mounted_or_dead
      mountpoint -q "$mnt" && { fusermount3 -u "$mnt" || umount -l "$mnt"; }
      wait "$daemon"
      status=$?
      daemon=
      # libfuse and the C library give up where they have no memory for what they keep for each thread
      if [ "$status" -gt 2 ] && ! grep -qE 'failed to allocate thread specific data|libgcc_s.so.1 must be installed' "$log"; then
        not_ok "allocation $n fails at the start: status $status" "$log"
      fi
      umount -l "$mnt" 2>/dev/null && [ "$status" -le 2 ] && not_ok "allocation $n fails at the start: a mount is left" "$log"
      if grep -q Sanitizer "$log"; then not_ok "allocation $n fails at the start: no sanitizer complains" "$log"; fi
      [ "$(od -An -td8 -j16 -N8 "$FAULT" | tr -d ' ')" = 0 ] && break # there are no more
    done
    faults_arm 0
    if [ "$n" -gt 5 ] && [ "$n" -lt 400 ]; then ok "each of $((n - 1)) allocations at the start may fail (faulty$suffix)"; else
      not_ok "each allocation at the start may fail (faulty$suffix): $n were tried"
    fi
  done
  AIFFFFFS=$plain
  unset FAULT
}

faults_kill() { kill "-$1" "$daemon"; }

# faults_arm N: the Nth allocation from now on fails
faults_arm() {
  { printf '%b' "$(printf '\\x%02x\\x%02x' $(($1 % 256)) $(($1 / 256)))"; head -c 30 /dev/zero; } | dd of="$FAULT" conv=notrunc status=none
}

# verb_fuzz [SECONDS]: libFuzzer on what reads FLAC files: sizes, tags, and sound from everywhere (0: until
# stopped). What it finds is left in ./fuzz-found.
verb_fuzz() {
  local seconds=${1:-120} corpus=$work/corpus found=$HERE/fuzz-found status n
  have clang || { skip 'fuzzing' 'clang is not there'; return; }
  have flac || { skip 'fuzzing' 'flac is not there'; return; }
  have /usr/bin/python3 || { skip 'fuzzing' 'python3 is not there'; return; }
  mkdir -p "$corpus" "$work/new" "$found"
  cat >"$work/fuzz.c" <<'C'
#define main aifffffs_main
#include "aifffffs.c"
#undef main
#include <sys/mman.h>

/* from the sanitizers' runtime and from libFuzzer */
int __sanitizer_install_malloc_and_free_hooks(void (*)(const volatile void *, size_t), void (*)(const volatile void *));
size_t __sanitizer_get_allocated_size(const volatile void *);
size_t LLVMFuzzerMutate(uint8_t *, size_t, size_t);
size_t LLVMFuzzerCustomMutator(uint8_t *, size_t, size_t, unsigned);
int LLVMFuzzerInitialize(int *, char ***);
int LLVMFuzzerTestOneInput(const uint8_t *, size_t);

#define LIMIT (64 << 20)
#define WHOLE (1 << 18)

static atomic_long held;
static atomic_bool counting;
static struct fs fs = { .depot = { .lock = PTHREAD_MUTEX_INITIALIZER, .cpus = 2, .per_handle = 4, .idle_max = 3 },
			.opened_lock = PTHREAD_MUTEX_INITIALIZER };

static void note_malloc(const volatile void *p, size_t n)
{
	(void)p;
	if (atomic_fetch_add(&held, (long)n) + (long)n > LIMIT && counting) {
		counting = false;
		fprintf(stderr, "more than 64 MB\n");
		abort();
	}
}

static void note_free(const volatile void *p)
{
	atomic_fetch_sub(&held, p ? (long)__sanitizer_get_allocated_size(p) : 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	return __sanitizer_install_malloc_and_free_hooks(note_malloc, note_free) ? 0 : -1;
}

/* A mutant with all its CRCs wrong never gets far: put those of frame headers and of frames right,
 * mostly. */
size_t LLVMFuzzerCustomMutator(uint8_t *p, size_t n, size_t most, unsigned seed)
{
	size_t last = 0;
	n = LLVMFuzzerMutate(p, n, most);
	if (seed % 4 == 0)
		return n;
	for (size_t i = 42; i + HEADER_MAX < n; i++) {
		uint64_t number;
		size_t len;
		if (p[i] != 0xff || (p[i + 1] & 0xfe) != 0xf8)
			continue;
		len = coded_number(p + i + 4, 7, &number);
		if (len == 0)
			continue;
		len += 4 + (p[i + 2] >> 4 == 6 ? 1u : p[i + 2] >> 4 == 7 ? 2u : 0u) +
		       ((p[i + 2] & 15) == 12 ? 1u : (p[i + 2] & 15) >= 13 ? 2u : 0u);
		if (last && i > last + 8)
			put_u16(p + i - 2, crc16(0, p + last, i - 2 - last));
		p[i + len] = crc8(p + i, len);
		last = i;
	}
	if (last && n > last + 8)
		put_u16(p + n - 2, crc16(0, p + last, n - 2 - last));
	return n;
}

static int read_once(struct handle *h, uint8_t *dst, uint64_t at, uint64_t n, bool conceal)
{
	fs.conceal = conceal;
	int rc = handle_read(&fs, h, dst, at, n);
	if (rc > 0 || rc < -200)
		abort();
	return rc;
}

/* Whether a second FLAC file begins in it, where the first one then ends: frames may be found behind that,
 * but need not. */
static bool second_file(const uint8_t *p, size_t n)
{
	unsigned found = 0;
	for (size_t i = 0; i + 8 <= n; i++)
		found += memcmp(p + i, "fLaC", 4) == 0;
	return found > 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	bool alone = !second_file(data, size);
	static uint8_t whole[WHOLE], state[WHOLE / 512], part[131072];
	int fd = memfd_create("fuzz", MFD_CLOEXEC);
	struct handle *h;
	if (fd < 0 || write(fd, data, size) != (ssize_t)size)
		abort();
	held = 0;
	counting = true;
	fs.no_foreign = size % 2;
	if (handle_open(&fs, fd, "fuzz", &h) == 0) {
		uint64_t all = h->layout.size;
		memset(state, 0, sizeof state);
		/* from the front, and then anywhere: what comes without an error has to be the same */
		for (uint64_t at = 0; at < min_u64(all, WHOLE); at += 512)
			state[at / 512] = read_once(h, whole + at, at, min_u64(min_u64(all, WHOLE) - at, 512), false) == 0;
		for (size_t i = 0; i < 12 && size >= 48; i++) {
			uint64_t at = get_le32(data + size - 4 * (i + 1)) % all, n = i < 8 ? 1 + at * 31 % 3000 : sizeof part;
			n = min_u64(n, all - at);
			if (read_once(h, part, at, n, false) != 0)
				continue;
			for (uint64_t j = at; j < min_u64(at + n, min_u64(all, WHOLE)); j++)
				if (alone && state[j / 512] && whole[j] != part[j - at]) {
					fprintf(stderr, "byte %" PRIu64 " of %" PRIu64 " depends on the way to it\n", j, all);
					abort();
				}
		}
		for (size_t i = 0; i < 2 && size >= 48; i++) { /* silence instead of errors */
			uint64_t at = get_le32(data + size - 4 * (i + 5)) % all, n = min_u64(sizeof part, all - at);
			if (read_once(h, part, at, n, true) != 0)
				continue;
			for (uint64_t j = at; j < min_u64(at + n, min_u64(all, WHOLE)); j++)
				if (alone && state[j / 512] && whole[j] != part[j - at] && j >= AIFF_HEADER) {
					fprintf(stderr, "concealed byte %" PRIu64 " of %" PRIu64 " differs\n", j, all);
					abort();
				}
		}
		handle_free(&fs, h);
	}
	counting = false;
	close(fd);
	return 0;
}
C
  robust_py corpus <<'PY'
def make(directory):
    tags = '-T', 'TITLE=x', '-T', 'ARTIST=\u00e9', '-T', 'TRACKNUMBER=3/4', '-T', 'DATE=2003-02-18', '-P', '40', '-S', '4x'
    files = {'8': flac_file(1, 8, 192, 3000, 1, '--no-padding')[0], '16': flac_file(2, 16, 256, 3000, 2, *tags)[0],
        '24': flac_file(3, 24, 64, 700, 3, '-P', '8')[0], 'tiny': flac_file(1, 16, 16, 300, 4)[0],
        'variable': variable_file(2, 16, (192, 576, 64), 3000, 5)[0]}
    for name, d in list(files.items()):
        files[name + '-unknown'] = set_total(d, 0)
    d = files['8']
    files['id3'] = b'ID3\3\0\0\0\0\0\x0a' + bytes(10) + d + b'TAG' + bytes(125)
    files['twice'] = d + d
    files['empty'] = d[:audio_at(d)]
    picture = (3).to_bytes(4, 'big') + (9).to_bytes(4, 'big') + b'image/png' + (1).to_bytes(4, 'big') + b'd' + bytes(16) + \
        (8).to_bytes(4, 'big') + b'\x89PNG\r\n\x1a\n'
    files['picture'] = d[:4] + b'\0' + d[5:42] + b'\6' + len(picture).to_bytes(3, 'big') + picture + d[42:]
    for name, d in files.items():
        write('%s/%s.flac' % (directory, name), d)

main({'make': make})
PY
  check 'a corpus is made' /usr/bin/python3 "$work/robust-corpus.py" make "$corpus"
  if [ -n "${FLAC_TEST_FILES-}" ]; then
    find "$FLAC_TEST_FILES" -name '*.flac' -size -60k -exec cp {} "$corpus" \;
    chmod -R u+w "$corpus"
  fi
  # shellcheck disable=SC2046 # words
  check 'the fuzzer is built' clang -std=c11 -O1 -g -I"$HERE" -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=undefined $(pkg-config --cflags fuse3 flac) -o "$work/fuzz" "$work/fuzz.c" \
    $(pkg-config --libs fuse3 flac) -pthread
  [ -x "$work/fuzz" ] || return
  "$work/fuzz" -max_total_time="$seconds" -timeout=5 -malloc_limit_mb=64 -rss_limit_mb=1000 -max_len=20000 \
    -print_final_stats=1 -artifact_prefix="$found/" "$work/new" "$corpus" >"$work/fuzz.log" 2>&1
  status=$?
  tail -n 40 "$work/fuzz.log" >"$out"
  n=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/fuzz.log")
  if [ "$status" = 0 ] && [ "${n:-0}" -gt 100 ]; then
    ok "$n inputs in $seconds seconds: no crash, nothing above 64 MB, no two answers to one question"
    rmdir "$found" 2>/dev/null
  else not_ok "the fuzzer found something (in $found)" "$out"; fi
}

# ---- at home on a real machine: boot, shares, readers, install, distributions -------------------

free_port() { /usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

listens() { (: <"/dev/tcp/127.0.0.1/$1"); }

md5() { md5sum | cut -d ' ' -f 1; }

# A picture to put into a tag: a valid PNG of 8 x 8 pixels.
make_png() {
  /usr/bin/python3 - "$1" <<'PY'
import struct, sys, zlib
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
rows = b''.join(b'\0' + bytes((x * 30, y * 30, 99) [c] for x in range(8) for c in range(3)) for y in range(8))
open(sys.argv[1], 'wb').write(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 8, 8, 8, 2, 0, 0, 0))
                              + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b''))
PY
}

# make_pcm FILE BYTES-PER-SAMPLE CHANNELS FRAMES SEED: tones and noise, little-endian
make_pcm() {
  /usr/bin/python3 - "$@" <<'PY'
import math, random, sys
path, size, channels, frames, seed = sys.argv[1], *map(int, sys.argv[2:])
rng, top = random.Random(seed), 1 << 8 * size - 1
tone = [int(0.6 * top * math.sin(i * math.tau / 441)) for i in range(441)]
noise = [rng.randrange(-top // 64, top // 64 + 1) for i in range(99991)]
with open(path, 'wb') as f:
    f.write(b''.join((tone[i * (c + 1) % 441] + noise[(i * channels + c) % 99991]).to_bytes(size, 'little', signed=True)
                     for i in range(frames) for c in range(channels)))
PY
}

# pcm_flac PCM BITS CHANNELS RATE FLAC [OPTION ...]
pcm_flac() {
  local pcm=$1 bits=$2 channels=$3 rate=$4 flac=$5
  shift 5
  flac -s -f --force-raw-format --endian=little --sign=signed --bps="$bits" --channels="$channels" \
    --sample-rate="$rate" -o "$flac" "$@" "$pcm"
}

# home_tree DIR: DIR/src with what a music library has, DIR/want with what the mount has to show. Of a
# FLAC without tags that is all that flac writes; of the one with tags flac's sound and a tag, which is
# taken as the mount shows it.
home_tree() {
  local d=$1 size i f
  mkdir -p "$d/src/disc 1" "$d/want/disc 1"
  make_png "$d/cover.png"
  make_pcm "$d/16.pcm" 2 2 300000 1
  make_pcm "$d/24.pcm" 3 1 40001 2
  for ((i = 0; i < 8; i++)); do cat "$d/16.pcm"; done >"$d/long.pcm"
  pcm_flac "$d/long.pcm" 16 2 44100 "$d/src/a.flac"
  pcm_flac "$d/16.pcm" 16 2 48000 "$d/src/tail.flac"
  pcm_flac "$d/24.pcm" 24 1 96000 "$d/src/disc 1/ö 2.flac"
  pcm_flac "$d/16.pcm" 16 2 44100 "$d/src/tagged.flac" -T TITLE=Night -T ARTIST='One & Two' --picture="$d/cover.png"
  cp "$d/cover.png" "$d/src/folder.png"
  printf '#EXTM3U\na.flac\n' >"$d/src/list.m3u"
  cp "$d/src/folder.png" "$d/src/list.m3u" "$d/want"
  for f in a tail 'disc 1/ö 2'; do
    flac -d -s -f --force-aiff-format -o "$d/want/$f.aiff" "$d/src/$f.flac"
  done
  start "$d/src" || return 1
  cp "$mnt/tagged.aiff" "$d/want"
  stop
  flac -d -s -f --force-aiff-format -o "$d/tagged.aiff" "$d/src/tagged.flac"
  size=$(stat -c %s "$d/tagged.aiff")
  check 'the sound of the file with tags is what flac decodes' \
    cmp -n $((size - 38)) -i 38 "$d/tagged.aiff" "$d/want/tagged.aiff"
  # all have the times of their sources
  (cd "$d/src" && find . -name '*.flac' -exec sh -c 'touch -r "$1" "../want/${1%.flac}.aiff"' - {} \;)
}

# same_tree SENTENCE DIR: DIR holds what the mount has to show, no more and no less
same_tree() { check "$1" diff -r "$home/want" "$2"; }

# same_file SENTENCE NAME FILE
same_file() { check "$1" cmp "$home/want/$2" "$3"; }

# ---- boot

# In a mount namespace of its own, so that nothing of this machine is changed: /mnt is a scratch
# directory, the helper is in /usr/local/bin (mount(8) forgets PATH), /dev/fuse is open for all as on
# other machines, and fstab and fuse.conf are ours. Runs the command in $1 and tells what it said, its
# status, and what is mounted at $2 (source, type, one file's checksum); waits for the daemon's end.
boot_script() {
  cat <<'SH'
set -u
export LC_ALL=C.UTF-8
mount --make-rprivate / || exit 99
mount -t tmpfs -o mode=755 tmpfs /mnt || exit 99
mkdir /mnt/src /mnt/m /mnt/user /mnt/bin && chown nobody /mnt/user || exit 99
mount --bind "$BOOT/src" /mnt/src && cp "$BOOT/aifffffs" /mnt/bin/ && mount --bind /mnt/bin /usr/local/bin || exit 99
if ! runuser -u nobody -- sh -c ': <>/dev/fuse' 2>/dev/null; then
  mknod -m 666 /mnt/fuse c 10 229 && mount --bind /mnt/fuse /dev/fuse || exit 99
fi
cp "$BOOT/fstab" /mnt/fstab && cp "$BOOT/fuse.conf" /mnt/fuse.conf && chmod 644 /mnt/fstab /mnt/fuse.conf || exit 99
[ ! -e /etc/fstab ] || mount --bind /mnt/fstab /etc/fstab || exit 99
[ ! -e /etc/fuse.conf ] || mount --bind /mnt/fuse.conf /etc/fuse.conf || exit 99
cd / || exit 99
eval "$1" </dev/null 2>&1
echo "status $?"
if findmnt --mountpoint "$2" >/dev/null; then
  findmnt -n -r -o SOURCE,FSTYPE --mountpoint "$2" | tail -n 1
  ${READER-} md5sum "$2/a.aiff" | cut -d ' ' -f 1
  umount "$2" || echo 'does not unmount'
fi
end=$((SECONDS + 20))
while pgrep --ns $$ --nslist mnt -x aifffffs >/dev/null; do
  [ "$SECONDS" -lt "$end" ] || { echo 'the daemon is left'; break; }
  sleep 0.02
done
SH
}

# boot_run COMMAND [MOUNTPOINT]
boot_run() { BOOT=$boot unshare -m bash "$boot/script" "$1" "${2:-/mnt/m}"; }

# boot_mounts SENTENCE COMMAND [MOUNTPOINT]
boot_mounts() {
  equal "$1" "status 0
/mnt/src fuse.aifffffs
$boot_sum" "$(boot_run "$2" "${3:-}")"
}

# boot_refuses SENTENCE STATUS TEXT COMMAND [MOUNTPOINT]: TEXT is a part of the message; nothing is mounted
boot_refuses() {
  boot_run "$4" "${5:-}" >"$out" 2>&1
  if [ "$(tail -n 1 "$out")" = "status $2" ] && head -n -1 "$out" | grep -qF -e "$3"; then ok "$1"; else
    echo "wanted: status $2 and: $3" >>"$out"
    not_ok "$1" "$out"
  fi
}

# says SENTENCE STATUS TEXT COMMAND ...: ends so, and says so
says() {
  local sentence=$1 wanted=$2 text=$3 status before
  shift 3
  before=$(mountpoint "$mnt")
  timeout 60 "$@" >"$out" 2>&1 </dev/null
  status=$?
  if [ "$status" = "$wanted" ] && grep -qF -e "$text" "$out"; then ok "$sentence"; else
    echo "wanted: status $wanted, got: $status; text: $text" >>"$out"
    not_ok "$sentence" "$out"
  fi
  [ "$before" = "$(mountpoint "$mnt")" ] || umount "$mnt"
}

section_boot() {
  local boot=$work/boot boot_sum src=$work/boot/src option
  local passed_along='nofail,_netdev,noauto,user,x-systemd.automount,x-systemd.requires-mounts-for=/srv/music,ro,defaults'
  mkdir -p "$src"
  chmod 755 "$boot" "$src"
  make_pcm "$boot/pcm" 2 2 20000 3
  pcm_flac "$boot/pcm" 16 2 44100 "$src/a.flac"
  boot_sum=$(flac -d -s -c --force-aiff-format "$src/a.flac" | md5)

  # by hand, without root's help
  says 'a missing source is named' 1 "$boot/none: No such file or directory" "$AIFFFFFS" "$boot/none" "$mnt"
  says 'a source that is a file is named' 1 "$src/a.flac: Not a directory" "$AIFFFFFS" "$src/a.flac" "$mnt"
  says 'a missing mountpoint is named' 1 "$boot/none: No such file or directory" "$AIFFFFFS" "$src" "$boot/none"
  says 'a mountpoint that is a file is named' 1 "$boot/pcm: Not a directory" "$AIFFFFFS" "$src" "$boot/pcm"
  says 'no mountpoint is bad usage' 2 'no mountpoint' "$AIFFFFFS" "$src"
  says 'no argument is bad usage' 2 'usage: aifffffs' "$AIFFFFFS"
  says 'one argument too many is named' 2 'extra' "$AIFFFFFS" "$src" "$mnt" extra
  says 'an unknown option is named' 2 'dietlibc' "$AIFFFFFS" -o dietlibc "$src" "$mnt"
  says 'an unknown long option is named' 2 '--quick' "$AIFFFFFS" --quick "$src" "$mnt"
  for option in 0 -1 x 100000 '' 2x 1.5 99999999999999999999; do
    says "max_threads=$option is refused with its range" 2 \
      "max_threads=$option: must be a number from 1 to 1024" "$AIFFFFFS" -o "max_threads=$option" "$src" "$mnt"
  done
  says 'source and mountpoint the same is refused, and the way out named' 2 nonempty "$AIFFFFFS" "$src" "$src"
  says '-V tells the version' 0 'aifffffs 1' "$AIFFFFFS" -V
  says '--version as well' 0 'aifffffs 1' "$AIFFFFFS" --version
  says '--help is -h' 0 "$("$AIFFFFFS" -h | tail -n 1)" "$AIFFFFFS" --help
  for option in '-f' '-d' '-s' 'max_threads=N' 'follow_symlinks' 'conceal' 'no_foreign' 'stat_cache=N' 'stats' 'allow_other' 'nonempty'; do
    check "-h tells of $option" grep -q -e "^  .*$option  *[A-Za-z]" <("$AIFFFFFS" -h)
  done
  equal '-h tells the default of each option of ours' 7 \
    "$("$AIFFFFFS" -h | grep -cE '^  -o (max|fol|con|no_|stat|non).*(\((off|the larger|[0-9])[^)]*\))')"
  equal '-h fits on a screen of 24 lines and 80 columns' yes \
    "$("$AIFFFFFS" -h | awk 'length > 79 { wide = 1 } END { print NR <= 23 && !wide ? "yes" : "no" }')"

  start "$src" || return
  says 'a mountpoint in use is refused' 1 "$mnt" "$AIFFFFFS" "$src" "$mnt"
  equal 'df shows source and type' "$src fuse.aifffffs" "$(df --output=source,fstype "$mnt" | tail -n 1 | tr -s ' ')"
  check 'mount shows source and type' grep -qF "$src on $mnt type fuse.aifffffs (ro," <(mount)
  stop

  if [ "$(id -u)" != 0 ] || ! unshare -m true 2>/dev/null; then
    skip 'mount(8), fstab and users' 'needs root and mount namespaces'
    return
  fi
  cp "$AIFFFFFS" "$boot/aifffffs"
  boot_script >"$boot/script"
  echo '# nothing' >"$boot/fuse.conf"
  {
    echo "/mnt/src /mnt/m fuse.aifffffs $passed_along 0 0"
    echo '/mnt/src /mnt/user fuse.aifffffs noauto,user,comment=x 0 0'
    echo '/mnt/none /mnt/bin fuse.aifffffs noauto,nofail,_netdev 0 0'
  } >"$boot/fstab"

  boot_mounts 'mount -t fuse.aifffffs finds the program' 'mount -t fuse.aifffffs /mnt/src /mnt/m'
  boot_mounts 'mount -n -s -v' 'mount -n -s -v -t fuse.aifffffs /mnt/src /mnt/m >/dev/null'
  boot_mounts 'mount.fuse3 with -n -s -v, as autofs calls it' \
    'PATH=/mnt/bin:/usr/sbin:/usr/bin:/sbin:/bin mount.fuse3 aifffffs#/mnt/src /mnt/m -n -s -v -o rw'
  boot_mounts 'mount -t fuse with program#source' 'mount -t fuse /mnt/bin/aifffffs#/mnt/src /mnt/m'
  boot_mounts 'the program itself with -n -s -v' 'aifffffs /mnt/src /mnt/m -n -s -v'
  boot_mounts 'a line of fstab' 'mount /mnt/m'
  boot_mounts 'all of a fstab that is not noauto' 'sed s/,noauto,/,auto,/ /mnt/fstab >/mnt/all; mount --fstab /mnt/all -a'
  boot_mounts 'a relative source and mountpoint' 'cd /mnt && aifffffs src m'
  for option in nofail _netdev noauto auto user users owner group nouser user=me ro rw defaults comment=x \
    x-systemd.automount x-systemd.requires-mounts-for=/srv/music x-systemd.device-timeout=3 x-gvfs-show \
    noatime nodiratime relatime norelatime strictatime lazytime silent exec noexec suid nosuid dev nodev sync async dirsync \
    max_idle_threads=3 clone_fd; do
    boot_mounts "-o $option passes" "aifffffs -o $option /mnt/src /mnt/m 2>/dev/null"
  done
  boot_mounts 'all that fstab, systemd and autofs pass along at once' "mount -t fuse.aifffffs -o $passed_along /mnt/src /mnt/m"
  boot_mounts 'and straight to the program' "aifffffs -n -s -v -o $passed_along /mnt/src /mnt/m"
  boot_mounts 'over its own source, if told so' 'aifffffs -o nonempty /mnt/src /mnt/src' /mnt/src
  boot_refuses 'a source that is not there at boot: status and name' 1 '/mnt/none: No such file' 'mount /mnt/bin' /mnt/bin
  boot_refuses 'an unknown option in fstab is named' 2 dietlibc 'mount -t fuse.aifffffs -o dietlibc /mnt/src /mnt/m'

  [ -u "$(command -v fusermount3)" ] || { skip 'mounting as a user' 'fusermount3 is not setuid'; return; }
  boot_refuses 'allow_other of a user who may not: names /etc/fuse.conf' 1 /etc/fuse.conf \
    'runuser -u nobody -- aifffffs -o allow_other /mnt/src /mnt/user' /mnt/user
  READER='runuser -u nobody --' boot_mounts 'a user mounts' 'runuser -u nobody -- aifffffs /mnt/src /mnt/user' /mnt/user
  if [ -u "$(command -v mount)" ] && [ -e /etc/fstab ]; then
    READER='runuser -u nobody --' boot_mounts 'a user mounts a line of fstab with user' 'runuser -u nobody -- mount /mnt/user' /mnt/user
  fi
  echo user_allow_other >"$boot/fuse.conf"
  [ ! -e /etc/fuse.conf ] || boot_mounts 'allow_other of a user who may: root reads' \
    'runuser -u nobody -- aifffffs -o allow_other /mnt/src /mnt/user' /mnt/user
}

# ---- shares

# served NAME PORT SECONDS: waits until somebody listens; the server is $server
served() {
  if until_true "$3" served_or_dead "$2" && listens "$2" 2>/dev/null; then return 0; fi
  not_ok "$1 starts" "$home/$1.log"
  return 1
}
served_or_dead() { listens "$1" 2>/dev/null || ! kill -0 "$server" 2>/dev/null; }

end_server() {
  kill "$server" 2>/dev/null
  wait "$server" 2>/dev/null
  server=
}

# drop_share NAME SERVER COMMAND ...: the command copies a file to stdout; the server, all processes
# whose command line has SERVER in it, is killed while it does. The reader of the pipe, who does not go
# on, makes sure that the copy is in its middle.
drop_share() {
  local name=$1 processes=$2 copier got
  shift 2
  rm -f "$home/fifo"
  mkfifo "$home/fifo"
  "$@" >"$home/fifo" 2>/dev/null &
  copier=$!
  exec 9<"$home/fifo"
  head -c 300000 <&9 >"$home/part"
  equal "$name: the copy has begun" 300000 "$(stat -c %s "$home/part")"
  { pkill -9 -f "$processes"; wait "$server"; } 2>/dev/null
  server=
  kill "$copier" 2>/dev/null # it may wait for its server
  got=$(cat <&9 | wc -c)
  exec 9<&-
  wait "$copier" 2>/dev/null
  check "$name: the copy was cut off" [ $((300000 + got)) -lt "$(stat -c %s "$home/want/a.aiff")" ]
  same_tree "$name: the mount goes on after the server was killed" "$mnt"
}

# The last bytes of a file, as a player that looks for a tag asks for them first.
tail_bytes=70001

# shellcheck disable=SC2016 # for other shells and programs to expand
share_locally() {
  local to=$home/local list='%P %s %T@ %m\n'
  mkdir -p "$to/tar" "$to/rsync"
  same_tree 'diff -r finds the wanted tree' "$mnt"
  check 'cp -a' cp -a "$mnt" "$to/cp"
  same_tree 'cp -a copies all bytes' "$to/cp"
  equal 'cp -a keeps sizes, modes and times of files' "$(cd "$mnt" && find . -type f -printf "$list" | sort)" \
    "$(cd "$to/cp" && find . -type f -printf "$list" | sort)"
  tar -C "$mnt" -cf "$to/all.tar" . 2>"$to/tar.err"
  equal 'tar ends well' 0 $?
  equal 'tar has nothing to say, such as: file changed as we read it' '' "$(cat "$to/tar.err")"
  tar -C "$to/tar" -xf "$to/all.tar"
  same_tree 'tar carries all bytes' "$to/tar"
  check 'a pipe of pieces' sh -c 'dd if="$1" bs=1000 2>/dev/null | dd bs=777 2>/dev/null | cat >"$2"' - "$mnt/a.aiff" "$to/piped"
  same_file 'pipes carry all bytes' a.aiff "$to/piped"
  equal 'tail -c' "$(tail -c 1234567 "$home/want/tail.aiff" | md5)" "$(tail -c 1234567 "$mnt/tail.aiff" | md5)"
  equal 'df on the mount is df of the source' "$(df --output=size,itotal "$home/src" | tail -n 1)" \
    "$(df --output=size,itotal "$mnt" | tail -n 1)"
  have rsync || { skip 'rsync -a twice' 'rsync is not there'; return; }
  check 'rsync -a' rsync -a "$mnt/" "$to/rsync/"
  same_tree 'rsync -a copies all bytes' "$to/rsync"
  equal 'rsync -a again finds nothing to copy' '' "$(rsync -a --itemize-changes "$mnt/" "$to/rsync/" 2>&1)"
  equal 'rsync -a --checksum neither' '' "$(rsync -ac --itemize-changes "$mnt/" "$to/rsync/" 2>&1)"
}

share_samba() {
  local d=$home/samba port client size
  if ! have smbd || ! have smbclient; then
    skip 'Samba' 'smbd or smbclient is not there'
    return
  fi
  [ "$(id -u)" = 0 ] || { skip 'Samba' 'smbd needs root'; return; }
  mkdir -p "$d/private" "$d/tree"
  port=$(free_port)
  cat >"$d/smb.conf" <<CONF
[global]
  smb ports = $port
  interfaces = 127.0.0.1/8
  bind interfaces only = yes
  server role = standalone server
  map to guest = Bad User
  disable netbios = yes
  load printers = no
  printing = bsd
  printcap name = /dev/null
  disable spoolss = yes
  smb2 max read = 65536
  smb2 max credits = 16
  log file = $d/log.%m
  private dir = $d/private
  state directory = $d
  cache directory = $d
  lock directory = $d
  pid directory = $d
  ncalrpc dir = $d/ncalrpc
[music]
  path = $mnt
  read only = yes
  guest ok = yes
  force user = root
CONF
  smbd -F --no-process-group -s "$d/smb.conf" -l "$d" >"$home/samba.log" 2>&1 </dev/null &
  server=$!
  served samba "$port" 60 || { end_server; return; }
  client=(timeout 120 smbclient //127.0.0.1/music -s "$d/smb.conf" -p "$port" -N)
  size=$(stat -c %s "$home/want/tail.aiff")
  head -c $((size - tail_bytes)) "$home/want/tail.aiff" >"$d/tail.aiff"
  check 'Samba: the tail is read first' "${client[@]}" -c "lcd $d; reget tail.aiff"
  same_file 'Samba: the tail is right' tail.aiff "$d/tail.aiff"
  check 'Samba: a file is copied' "${client[@]}" -c "get a.aiff $d/a.aiff"
  same_file 'Samba: all its bytes' a.aiff "$d/a.aiff"
  check 'Samba: a tree is copied' "${client[@]}" -c "lcd $d/tree; prompt off; recurse on; mget *"
  same_tree 'Samba: all its bytes' "$d/tree"
  refuse 'Samba: nothing can be put there' "${client[@]}" -c "put $d/a.aiff new.aiff"
  check 'Samba: the share tells its size' grep -q 'blocks of size' <("${client[@]}" -c ls)
  drop_share Samba "smbd -F --no-process-group -s $d/smb.conf" "${client[@]}" -c 'get a.aiff -'
}

# share_handle FILE: its checksum, found again by its NFS handle, after the kernel has forgotten it
share_handle() {
  /usr/bin/python3 - "$1" <<'PY'
import ctypes, hashlib, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_uint), ('type', ctypes.c_int), ('data', ctypes.c_ubyte * 128)]
def called(result):
    if result < 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    return result
handle, mount = Handle(128), ctypes.c_int()
called(libc.name_to_handle_at(-100, sys.argv[1].encode(), ctypes.byref(handle), ctypes.byref(mount), 0))
top = os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY)
with open('/proc/sys/vm/drop_caches', 'w') as f:
    f.write('3')
fd = called(libc.open_by_handle_at(top, ctypes.byref(handle), os.O_RDONLY))
with open(fd, 'rb') as f:
    print(hashlib.md5(f.read()).hexdigest())
PY
}

share_nfs() {
  local d=$home/nfs port url at flusher=
  if ! have ganesha.nfsd || ! have nfs-cp; then
    skip 'NFS' 'ganesha.nfsd or libnfs-utils is not there'
    return
  fi
  [ "$(id -u)" = 0 ] || { skip 'NFS' 'nfs-ganesha needs root'; return; }
  mkdir -p "$d/recovery"
  port=$(free_port)
  # newer ones want a right that a container need not have, unless told not to
  grep -qs allow_set_io_flusher_fail "$(command -v ganesha.nfsd)" /usr/lib/ganesha/libganesha_nfsd.so* &&
    flusher='allow_set_io_flusher_fail = true;'
  cat >"$d/ganesha.conf" <<CONF
NFS_Core_Param {
  $flusher
  Protocols = 4; NFS_Port = $port; Bind_addr = 127.0.0.1;
  Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false;
}
NFSv4 { RecoveryBackend = fs; RecoveryRoot = $d/recovery; Graceless = true; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT {
  Export_Id = 77; Path = $mnt; Pseudo = /music; Filesystem_Id = 77.77;
  Access_Type = RO; Squash = No_Root_Squash; SecType = sys; Transports = TCP;
  FSAL { Name = VFS; }
}
CONF
  ganesha.nfsd -F -f "$d/ganesha.conf" -L "$home/nfs.log" -p "$d/pid" -N NIV_EVENT >"$d/said" 2>&1 </dev/null &
  server=$!
  if ! served nfs "$port" 60; then end_server; return; fi
  until_true 60 grep -q 'NFS SERVER INITIALIZED' "$home/nfs.log"
  if grep -qi 'export.*error\|failed to.*export\|Could not find.*fsal' "$home/nfs.log"; then
    skip 'NFS' "nfs-ganesha cannot: $(grep -i 'export.*error\|failed to.*export\|Could not find.*fsal' "$home/nfs.log" | head -n 1)"
    end_server
    return
  fi
  url=nfs://127.0.0.1/music at="version=4&nfsport=$port"
  equal 'NFS: nfs-ls lists the tree' "$(cd "$home/want" && find . -type f -printf '%s %P\n' | sort)" \
    "$(timeout 60 nfs-ls -R "$url?$at" | sed -nE 's/^-([^ ]+ +){4}([0-9]+ )/\2/p' | sort)"
  equal 'NFS: nfs-cat' "$(md5 <"$home/want/a.aiff")" "$(timeout 60 nfs-cat "$url/a.aiff?$at" | md5)"
  check 'NFS: nfs-cp' timeout 60 nfs-cp "$url/tail.aiff?$at" "$d/tail.aiff"
  same_file 'NFS: all its bytes' tail.aiff "$d/tail.aiff"
  if [ -w /proc/sys/vm/drop_caches ]; then
    echo 3 >/proc/sys/vm/drop_caches
    equal 'NFS: caches dropped, the same handle still reads' "$(md5 <"$home/want/tail.aiff")" \
      "$(timeout 60 nfs-cat "$url/tail.aiff?$at" | md5)"
    check 'NFS: and in a directory' timeout 60 nfs-cp "$url/disc 1/ö 2.aiff?$at" "$d/2.aiff"
    same_file 'NFS: all its bytes' 'disc 1/ö 2.aiff' "$d/2.aiff"
    equal '-o noforget: a file handle outlives the caches' "$(md5 <"$home/want/a.aiff")" "$(share_handle "$mnt/a.aiff" 2>&1)"
  else
    skip 'noforget' 'drop_caches cannot be written'
  fi
  drop_share NFS "ganesha.nfsd -F -f $d/ganesha.conf" nfs-cat "$url/a.aiff?$at"
}

# http NAME URL: what each web server has to do
http_checks() {
  local name=$1 url=$2 size got=$home/http
  size=$(stat -c %s "$home/want/tail.aiff")
  equal "$name: the tail first" "206 $(tail -c "$tail_bytes" "$home/want/tail.aiff" | md5)" \
    "$(curl -s -m 120 -r "-$tail_bytes" -o "$got" -w '%{http_code}' "$url/tail.aiff") $(md5 <"$got")"
  equal "$name: a range in the middle" "206 $(tail -c +400001 "$home/want/tail.aiff" | head -c 200000 | md5)" \
    "$(curl -s -m 120 -r 400000-599999 -o "$got" -w '%{http_code}' "$url/tail.aiff") $(md5 <"$got")"
  equal "$name: the range is told" "bytes 0-0/$size" \
    "$(curl -s -m 120 -r 0-0 -D - -o /dev/null "$url/tail.aiff" | tr -d '\r' | sed -n 's/^[Cc]ontent-[Rr]ange: //p')"
  equal "$name: a range behind the end" 416 "$(curl -s -m 120 -r "$size-" -o /dev/null -w '%{http_code}' "$url/tail.aiff")"
  equal "$name: a whole file" "200 $(md5 <"$home/want/a.aiff")" \
    "$(curl -s -m 120 -o "$got" -w '%{http_code}' "$url/a.aiff") $(md5 <"$got")"
  equal "$name: a name with a space and an umlaut" "200 $(md5 <"$home/want/disc 1/ö 2.aiff")" \
    "$(curl -s -m 120 -o "$got" -w '%{http_code}' "$url/disc%201/%C3%B6%202.aiff") $(md5 <"$got")"
  curl -s -m 120 --limit-rate 100k "$url/a.aiff" | head -c 100000 >"$got"
  equal "$name: a reader that leaves" 100000 "$(stat -c %s "$got")"
}

share_nginx() {
  local d=$home/nginx port nginx
  nginx=$(PATH=$PATH:/usr/sbin command -v nginx)
  if [ -z "$nginx" ] || ! have curl; then
    skip 'nginx' 'nginx or curl is not there'
    return
  fi
  mkdir -p "$d"
  port=$(free_port)
  cat >"$d/nginx.conf" <<CONF
daemon off;
master_process off;
pid $d/pid;
error_log $home/nginx.log;
events { }
http {
  access_log off;
  client_body_temp_path $d/body; proxy_temp_path $d/proxy; fastcgi_temp_path $d/fastcgi;
  uwsgi_temp_path $d/uwsgi; scgi_temp_path $d/scgi;
  sendfile on;
  server { listen 127.0.0.1:$port; root $mnt; }
}
CONF
  "$nginx" -p "$d" -c "$d/nginx.conf" >"$d/said" 2>&1 </dev/null &
  server=$!
  if served nginx "$port" 30; then http_checks nginx "http://127.0.0.1:$port"; fi
  end_server
  equal 'nginx: its log has no error' '' "$(grep -E '\[(error|alert|crit|emerg)\]' "$home/nginx.log")"
}

share_rclone() {
  local d=$home/rclone port
  if ! have rclone || ! have curl; then
    skip 'rclone serve' 'rclone or curl is not there'
    return
  fi
  mkdir -p "$d/tree"
  export RCLONE_CONFIG=$d/none
  : >"$RCLONE_CONFIG"
  port=$(free_port)
  rclone serve http "$mnt" --addr "127.0.0.1:$port" --read-only >"$home/rclone.log" 2>&1 </dev/null &
  server=$!
  if served rclone "$port" 60; then http_checks 'rclone serve http' "http://127.0.0.1:$port"; fi
  end_server
  port=$(free_port)
  rclone serve webdav "$mnt" --addr "127.0.0.1:$port" --read-only >"$home/rclone.log" 2>&1 </dev/null &
  server=$!
  if served rclone "$port" 60; then
    check 'rclone serve webdav: a tree is copied' timeout 120 rclone copy --webdav-url "http://127.0.0.1:$port" :webdav: "$d/tree"
    same_tree 'rclone serve webdav: all its bytes' "$d/tree"
    equal 'rclone serve webdav: it tells the size' "$(stat -c %s "$home/want/a.aiff")" \
      "$(curl -s -m 60 -X PROPFIND -H 'Depth: 0' "http://127.0.0.1:$port/a.aiff" | sed -nE 's/.*getcontentlength>([0-9]+)<.*/\1/p')"
  fi
  end_server
  unset RCLONE_CONFIG
}

section_shares() {
  local home=$work/home server='' part
  home_tree "$home" || return
  # each server meets a mount that has decoded nothing yet
  for part in locally samba nfs nginx rclone; do
    start "$home/src" -o noforget || return
    "share_$part"
    stop
  done
}

# ---- readers

# reader_has READER COLUMN WANTED GOT: compares; where they are the same, the table says so. A column
# of several checks is filled only if all hold.
reader_has() {
  equal "$1: $2" "$3" "$4"
  [ "$3" = "$4" ] && reader_table["$1|$2"]=${reader_table["$1|$2"]-yes} || reader_table["$1|$2"]=no
}

# readers_table READER ...: for the README
readers_table() {
  local r c line
  echo '# | reader | duration | format | sound | tags | picture |'
  echo '# |---|---|---|---|---|---|'
  for r in "$@"; do
    line="# | $r"
    for c in duration format sound tags picture; do line+=" | ${reader_table["$r|$c"]--}"; done
    echo "$line |"
  done
}

# Text without end of line and returns, the values one after the other.
joined() { tr -d '\r' | paste -sd '|'; }

read_ffmpeg() {
  local probe=(ffprobe -v error -of csv=p=0)
  reader_has ffmpeg duration 3.000000 "$("${probe[@]}" -select_streams a:0 -show_entries stream=duration "$1")"
  reader_has ffmpeg format pcm_s16be,44100,2,16 \
    "$("${probe[@]}" -select_streams a:0 -show_entries stream=codec_name,sample_rate,channels,bits_per_sample "$1")"
  reader_has ffmpeg sound "$pcm_md5" "$(ffmpeg -v error -nostdin -i "$1" -map 0:a:0 -f s16le - | md5)"
  reader_has ffmpeg tags "$tags|2003-02-18" "$(for t in title artist album track genre comment date; do
    ffprobe -v error -of default=nw=1:nk=1 -show_entries "format_tags=$t" "$1"
  done | joined)"
  reader_has ffmpeg picture "$png_md5" "$(ffmpeg -v error -nostdin -i "$1" -map 0:v:0 -c copy -f image2pipe - | md5)"
}

read_mediainfo() {
  reader_has mediainfo duration 3000 "$(mediainfo --Output='Audio;%Duration%' "$1" | joined)"
  reader_has mediainfo format 'AIFF|PCM 44100 2 16' "$({
    mediainfo --Output='General;%Format%\n' "$1"
    mediainfo --Output='Audio;%Format% %SamplingRate% %Channels% %BitDepth%\n' "$1"
  } | grep . | joined)"
  reader_has mediainfo tags "$tags|2003-02-18" "$(
    mediainfo --Output='General;%Title%|%Performer%|%Album%|%Track/Position%/%Track/Position_Total%|%Genre%|%Comment%|%Recorded_Date%' \
      "$1" | grep . | joined)"
  reader_has mediainfo picture 'Yes Cover (front) image/png' \
    "$(mediainfo --Output='General;%Cover% %Cover_Type% %Cover_Mime%' "$1" | grep . | joined)"
}

read_exiftool() {
  reader_has exiftool duration 132300 "$(exiftool -s3 -NumSampleFrames "$1")"
  reader_has exiftool format 'AIFF|44100|2|16' "$(exiftool -s3 -FileType -SampleRate -NumChannels -SampleSize "$1" | joined)"
  reader_has exiftool tags "$tags|2003|1802" \
    "$(exiftool -s3 -Title -Artist -Album -Track -Genre -Comment -Year -ID3:Date "$1" | joined)"
  reader_has exiftool picture "$png_md5" "$(exiftool -b -Picture "$1" | md5)"
}

read_mutagen() {
  local got
  got=$(/usr/bin/python3 - "$1" <<'PY'
import hashlib, sys
from mutagen.aiff import AIFF
f = AIFF(sys.argv[1])
print(f.info.length)
print(f.info.sample_rate, f.info.channels, f.info.bits_per_sample)
print('|'.join(str(f[k]) for k in ('TIT2', 'TPE1', 'TALB', 'TRCK', 'TCON', 'COMM::eng', 'TDRC')))
p, = f.tags.getall('APIC')
print(hashlib.md5(p.data).hexdigest(), int(p.type), p.mime, p.desc)
PY
  )
  reader_has mutagen duration 3.0 "$(sed -n 1p <<<"$got")"
  reader_has mutagen format '44100 2 16' "$(sed -n 2p <<<"$got")"
  reader_has mutagen tags "$tags|2003-02-18" "$(sed -n 3p <<<"$got")"
  reader_has mutagen picture "$png_md5 3 image/png Cover" "$(sed -n 4p <<<"$got")"
}

read_kid3() {
  local picture=$work/readers/kid3.png
  reader_has 'TagLib (kid3)' duration 0:03 "$(kid3-cli -c get "$1" | grep -oE '[0-9]+:[0-9]+$')"
  reader_has 'TagLib (kid3)' format 'AIFF 16 bit 44100 Hz 2 Channels' \
    "$(kid3-cli -c get "$1" | sed -nE 's/^File: (AIFF 16 bit) .* (44100 Hz 2 Channels) .*/\1 \2/p')"
  reader_has 'TagLib (kid3)' tags "$tags|2003-02-18" "$(for t in title artist album tracknumber genre comment date; do
    kid3-cli -c "get $t" "$1"
  done | joined)"
  kid3-cli -c "get picture:'$picture'" "$1" >/dev/null
  reader_has 'TagLib (kid3)' picture "$png_md5" "$(md5 <"$picture")"
}

read_sox() {
  reader_has sox duration 132300 "$(soxi -s "$1")"
  reader_has sox format '44100|2|16|Signed Integer PCM' "$({ soxi -r "$1"; soxi -c "$1"; soxi -b "$1"; soxi -e "$1"; } | joined)"
  reader_has sox sound "$pcm_md5" "$(sox -V1 -D "$1" -t raw -e signed -b 16 -L - | md5)"
}

# shellcheck disable=SC2016 # for other shells and programs to expand
read_sndfile() {
  local info=$work/readers/sndfile wav=$work/readers/sndfile.wav
  sndfile-info "$1" >"$info"
  check 'sndfile-info has nothing to complain' sh -c '! grep -qF "***" "$1"' - "$info"
  reader_has libsndfile duration 00:00:03.000 "$(sed -n 's/^Duration *: //p' "$info")"
  reader_has libsndfile format '44100|132300|2|0x00020002' \
    "$(sed -nE '/^---/,$ s/^(Sample Rate|Frames|Channels|Format) *: //p' "$info" | joined)"
  sndfile-convert -pcm16 "$1" "$wav"
  reader_has libsndfile sound "$pcm_md5" \
    "$(/usr/bin/python3 -c 'import sys, wave
w = wave.open(sys.argv[1])
sys.stdout.buffer.write(w.readframes(w.getnframes()))' "$wav" | md5)"
}

# shellcheck disable=SC2016 # for other shells and programs to expand
read_mpv() {
  local raw=$work/readers/mpv.raw said=$work/readers/mpv key
  local message='said ${=duration}\nsaid ${audio-params/format} ${audio-params/samplerate} ${audio-params/channel-count}\nsaid '
  for key in title artist album track genre comment date; do message+="\${metadata/by-key/$key}|"; done
  message+='\nsaid ${track-list/1/type} ${track-list/1/albumart} ${track-list/1/codec}\n'
  mpv --no-config --vo=null --vid=no --ao=pcm --ao-pcm-file="$raw" --ao-pcm-waveheader=no \
    --term-playing-msg="$message" "$1" 2>&1 </dev/null | sed -n 's/^said //p' >"$said"
  reader_has mpv duration 3.000000 "$(sed -n 1p "$said")"
  reader_has mpv format 's16 44100 2' "$(sed -n 2p "$said")"
  reader_has mpv sound "$pcm_md5" "$(md5 <"$raw")"
  reader_has mpv tags "$tags|2003-02-18|" "$(sed -n 3p "$said")"
  reader_has mpv picture 'video yes png' "$(sed -n 4p "$said")"
}

section_readers() {
  local d=$work/readers pcm_md5 png_md5 tags='Näċht 夜|One & Two|Hours|3/12|Ambient|so it goes' row readers=()
  local -A reader_table=()
  mkdir -p "$d/src"
  make_png "$d/cover.png"
  make_pcm "$d/pcm" 2 2 132300 4
  pcm_flac "$d/pcm" 16 2 44100 "$d/src/x.flac" -T TITLE='Näċht 夜' -T ARTIST='One & Two' -T ALBUM=Hours \
    -T TRACKNUMBER=3 -T TRACKTOTAL=12 -T DATE=2003-02-18 -T GENRE=Ambient -T COMMENT='so it goes' \
    --picture="3||Cover||$d/cover.png"
  pcm_md5=$(md5 <"$d/pcm")
  png_md5=$(md5 <"$d/cover.png")
  start "$d/src" || return
  for row in ffprobe:ffmpeg:read_ffmpeg mediainfo:mediainfo:read_mediainfo exiftool:exiftool:read_exiftool \
    /usr/bin/python3:mutagen:read_mutagen 'kid3-cli:TagLib (kid3):read_kid3' sox:sox:read_sox \
    sndfile-info:libsndfile:read_sndfile mpv:mpv:read_mpv; do
    IFS=: read -r tool name function <<<"$row"
    if ! have "$tool"; then skip "$name reads the file" "$tool is not there"; continue; fi
    if [ "$name" = mutagen ] && ! /usr/bin/python3 -c 'import mutagen' 2>/dev/null; then
      skip "$name reads the file" 'the module is not there'
      continue
    fi
    readers+=("$name")
    "$function" "$mnt/x.aiff"
  done
  stop
  readers_table "${readers[@]}"
}

# ---- install

# The sections AIFF and ID3 TAG as one can take them, and a main that prints what they make of the
# bytes of its input: headers, all forms of samples, and a tag read whole and in windows.
byte_writers() {
  cat <<'C'
#include <arpa/inet.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
C
  grep -E '^static uint64_t (min|max)_u64' "$HERE/aifffffs.c"
  sed -n '/^\/\* ---- AIFF /,/^\/\* ---- FLAC METADATA /p' "$HERE/aifffffs.c" | sed '$d'
  cat <<'C'
static uint8_t in[1 << 20];
static size_t n_in;

static int fetch(void *arg, uint64_t at, uint8_t *dst, size_t n)
{
	(void)arg;
	memcpy(dst, in + at, n);
	return 0;
}

static void print(const char *what, const uint8_t *p, size_t n)
{
	printf("%s ", what);
	for (size_t i = 0; i < n; i++)
		printf("%02x", p[i]);
	putchar('\n');
}

static void print_headers(void)
{
	static const uint32_t rates[] = { 0, 1, 8000, 11025, 44100, 96000, 655350, 1048575, 0xffffffff };
	for (size_t i = 0; i < sizeof rates / sizeof *rates; i++) {
		uint8_t h[AIFF_HEADER];
		aiff_header(h, 0x01020304, 2, 0x05060708, 16, rates[i], 0x090a0b0c);
		print("header", h, sizeof h);
	}
}

static void print_samples(void)
{
	static int32_t plane[8][32];
	const int32_t *channel[8];
	for (unsigned bits = 4; bits <= 32; bits++)
		for (unsigned channels = 1; channels <= 8; channels++)
			for (int little = 0; little < 2; little++) {
				uint8_t out[8 * 32 * 4];
				unsigned bytes = (bits + 7) / 8;
				for (unsigned c = 0; c < channels; c++) {
					channel[c] = plane[c];
					for (unsigned i = 0; i < 32; i++) {
						const uint8_t *p = in + (c * 32 + i) * 4;
						int64_t v = (int64_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3];
						plane[c][i] = (int32_t)((v - ((int64_t)1 << 31)) / ((int64_t)1 << (32 - bits)));
					}
				}
				aiff_pack(out, channel, 3, 29, channels, bytes, bytes * 8 - bits, little);
				printf("%u bits, %u channels, %s: ", bits, channels, little ? "little" : "big");
				print("", out, (size_t)29 * channels * bytes);
			}
}

/* The input: comments, and behind them, at `at`, the data of a picture. */
static void print_tag(size_t at)
{
	char cover[] = "\xc3\xb6";
	struct id3_picture pictures[] = {
		{ .type = 4, .mime = "image/png", .description = cover, .description_len = 2, .at = at, .size = n_in - at },
		{ .type = 3, .mime = "image/png", .description = cover, .description_len = 0, .at = at, .size = n_in - at },
	};
	struct id3_source source = { .comments = in, .comments_len = at, .pictures = pictures, .n_pictures = 2, .fetch = fetch };
	struct id3_out count = { 0 };
	uint8_t *all, *piece;
	if (id3_write(&source, &count) != 0 || count.at == 0)
		exit(1);
	all = malloc(count.at);
	piece = malloc(count.at);
	if (!all || !piece)
		exit(1);
	for (uint64_t from = 0; from < count.at; from += 100) {
		struct id3_out o = { .dst = piece, .from = from, .to = from + 100 < count.at ? from + 100 : count.at };
		if (id3_write(&source, &o) != 0)
			exit(1);
		memcpy(all + from, piece, o.to - from);
	}
	print("tag in pieces", all, count.at);
	count = (struct id3_out){ .dst = all, .to = count.at };
	if (id3_write(&source, &count) != 0)
		exit(1);
	print("tag", all, count.at);
	free(all);
	free(piece);
}

int main(int argc, char *argv[])
{
	(void)argc;
	n_in = fread(in, 1, sizeof in, stdin);
	print_headers();
	print_samples();
	print_tag((size_t)atol(argv[1]));
	return 0;
}
C
}

# comment_block FILE: a VORBIS_COMMENT block that takes every turn of the writer. Tells its length.
comment_block() {
  /usr/bin/python3 - "$1" <<'PY'
import base64, random, struct, sys
rng = random.Random(8)
png = b'\x89PNG\r\n\x1a\n' + rng.randbytes(300)
block = struct.pack('>II', 3, 9) + b'image/png' + struct.pack('>I', 3) + 'ö!'.encode() + struct.pack('>5I', 8, 8, 24, 0, len(png)) + png
texts = ['TITLE=Näċht 夜 \U0001f3b5', 'ARTIST=One', 'artist=Two', 'TRACKNUMBER=3', 'TRACKTOTAL=12', 'DISCNUMBER=1/2',
         'DATE=2003-02-18T12:34', 'GENRE=(rock)', 'COMMENT=so\nit goes', 'LYRICS=la', 'BPM=127.6', 'COMPILATION=1',
         'MUSICBRAINZ_TRACKID=f6a5', 'PERFORMER=Ada (cello)', 'MIXER=Bob', 'mood=blue', 'SPAM=a', 'spam=b', 'GROUPING=x',
         'WEBSITE=http://a.example/', 'METADATA_BLOCK_PICTURE=' + base64.b64encode(block).decode()]
comments = [t.encode() for t in texts] + [b'LATIN=\xe4\xf6', b'NUL=a\0b', b'=x', b'EMPTY=']
data = struct.pack('<I', 4) + b'test' + struct.pack('<I', len(comments)) + b''.join(struct.pack('<I', len(c)) + c for c in comments)
open(sys.argv[1], 'wb').write(data + rng.randbytes(3001))
print(len(data))
PY
}

# No driver can be told a wrong value by itself: the native output is checked against known bytes, too.
# shellcheck disable=SC2016 # for other shells and programs to expand
install_big_endian() {
  local d=$1 at header
  if ! have s390x-linux-gnu-gcc || ! have qemu-s390x-static; then
    skip 'big-endian' 's390x-linux-gnu-gcc or qemu-s390x-static is not there'
    return
  fi
  byte_writers >"$d/writers.c"
  at=$(comment_block "$d/input")
  check 'the AIFF and ID3 sections compile alone' \
    gcc -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -Wno-unused-function -o "$d/writers" "$d/writers.c"
  check 'and for a big-endian machine' \
    s390x-linux-gnu-gcc -static -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -Wno-unused-function -o "$d/writers-be" "$d/writers.c"
  check 'they run' sh -c '"$1" "$2" <"$3" >"$4"' - "$d/writers" "$at" "$d/input" "$d/little"
  check 'they run on the big-endian machine' sh -c 'qemu-s390x-static "$1" "$2" <"$3" >"$4"' - "$d/writers-be" "$at" "$d/input" "$d/big"
  check 'a big-endian machine writes the same bytes' cmp "$d/little" "$d/big"
  header='464f524d01020304 41494646 434f4d4d00000012 0002050607080010 400eac44000000000000 53534e44090a0b14 0000000000000000'
  check 'they are those of an AIFF of 44100 Hz' grep -qx "header ${header// /}" "$d/big"
  equal 'and of all forms of samples' $((29 * 8 * 2)) "$(grep -c 'bits, ' "$d/big")"
  equal 'a tag read in pieces is the tag' "$(sed -n 's/^tag in pieces //p' "$d/big")" "$(sed -n 's/^tag \([0-9a-f]*\)$/\1/p' "$d/big")"
}

# shellcheck disable=SC2016 # for other shells and programs to expand
section_install() {
  local d=$work/install cc first pc
  if ! have make || ! have gcc; then
    skip 'install' 'make or gcc is not there'
    return
  fi
  mkdir -p "$d"
  cp "$HERE/Makefile" "$HERE/aifffffs.c" "$HERE/aifffffs.1" "$d" || { not_ok 'all files to install are there'; return; }
  cd "$d" || return

  check 'make' make -s
  first=$(md5 <aifffffs)
  check 'make install with DESTDIR and PREFIX' make -s install DESTDIR="$d/root" PREFIX=/opt/a
  equal 'it installs the program and its page, nothing else' './bin/aifffffs 755
./share/man/man1/aifffffs.1 644' "$(cd root/opt/a && find . -type f -printf '%p %m\n' | sort)"
  equal 'nothing outside of the prefix' opt "$(ls root)"
  check 'the program is as built, not stripped' cmp aifffffs root/opt/a/bin/aifffffs
  check 'it has its symbols' grep -q ' main$' <(nm root/opt/a/bin/aifffffs)
  check 'it runs' root/opt/a/bin/aifffffs -V
  check 'the page is the page' cmp aifffffs.1 root/opt/a/share/man/man1/aifffffs.1
  check 'make uninstall' make -s uninstall DESTDIR="$d/root" PREFIX=/opt/a
  equal 'it takes all of it away' '' "$(find root -type f)"
  check 'make install twice, over an old one' sh -c 'make -s install DESTDIR="$1" && make -s install DESTDIR="$1"' - "$d/root"
  check 'the default prefix is /usr/local' cmp aifffffs root/usr/local/bin/aifffffs
  make -s clean
  equal 'make clean leaves the sources' 'Makefile aifffffs.1 aifffffs.c' \
    "$(find . -maxdepth 1 -type f -printf '%f\n' | sort | paste -sd ' ')"

  check 'make again' make -s
  equal 'built twice, the same bytes' "$first" "$(md5 <aifffffs)"
  make -s clean

  # a value that only CFLAGS and CPPFLAGS say, and a path that only LDFLAGS says
  check 'make with flags from outside' make -s CC=gcc \
    CFLAGS='-O0 -DSTAT_CACHE=4321' CPPFLAGS='-DAIFFFFFS_PROBE' LDFLAGS=-Wl,-rpath,/from/outside
  check 'CFLAGS are honoured' grep -q 4321 <(./aifffffs -h)
  check 'LDFLAGS are honoured' grep -q /from/outside <(readelf -d aifffffs)
  make -s clean
  for cc in gcc clang; do
    have "$cc" || { skip "$cc" "$cc is not there"; continue; }
    make CC="$cc" CFLAGS=-O2 >"$out" 2>"$d/said"
    equal "$cc -Wall -Wextra -Wpedantic -Wshadow: status 0, no word" '0 ' "$? $(cat "$d/said")"
    for pc in -Wall -Wextra -Wpedantic -Wshadow -std=c11; do check "$cc was told $pc" grep -qe "$pc" "$out"; done
    make -s clean
  done
  check 'a missing library is named' grep -q fuse3 <(PKG_CONFIG_LIBDIR=/none make 2>&1)
  refuse 'and nothing is built' make PKG_CONFIG='env PKG_CONFIG_LIBDIR=/none pkg-config'

  install_big_endian "$d"
  cd "$HERE" || exit 1
}

# ---- distributions

# In namespaces of its own: what is mounted and started there ends with it.
distro_script() {
  cat <<'SH'
set -eu
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT" # its / is a mount, as elsewhere
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
cp -L /etc/resolv.conf "$ROOT/etc/resolv.conf"
if [ -n "${FLAC_TEST_FILES-}" ]; then
  mkdir -p "$ROOT/flac-test-files"
  mount --bind "$FLAC_TEST_FILES" "$ROOT/flac-test-files"
  export FLAC_TEST_FILES=/flac-test-files
fi
[ -e "$ROOT/etc/mtab" ] || ln -s /proc/self/mounts "$ROOT/etc/mtab"
cd "$ROOT"
exec chroot . env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
  DEBIAN_FRONTEND=noninteractive ${FLAC_TEST_FILES:+FLAC_TEST_FILES="$FLAC_TEST_FILES"} sh -c "cd /aifffffs && $1"
SH
}

# distros [NAME ...] [-- COMMAND]: builds and tests on other distributions, as root; each is made by
# debootstrap in ${DISTRO_DIR:-/var/tmp/aifffffs-distros} when it is not there yet. COMMAND runs in a copy
# of this directory instead of a build and a test with gcc and with clang.
# shellcheck disable=SC2016 # for other shells and programs to expand
verb_distros() {
  local names=() name suite arch root status failures=() dir=${DISTRO_DIR:-/var/tmp/aifffffs-distros}
  local command='make deps && apt-get install -qy --no-install-recommends clang && for cc in gcc clang; do
    make clean && make CC=$cc && ./test.sh check || exit 1; done'
  while [ $# -gt 0 ] && [ "$1" != -- ]; do names+=("$1"); shift; done
  [ $# -lt 2 ] || { shift; command=$*; }
  [ ${#names[@]} -gt 0 ] || names=(bullseye bookworm trixie i386)
  [ "$(id -u)" = 0 ] || { echo 'distros: needs root' >&2; exit 2; }
  mkdir -p "$dir"
  for name in "${names[@]}"; do
    suite=$name arch=$(dpkg --print-architecture)
    case $name in
      i386) suite=bookworm arch=i386 ;;
      bullseye | bookworm | trixie) ;;
      *) echo "distros: $name: none of bullseye, bookworm, trixie, i386" >&2; exit 2 ;;
    esac
    root=$dir/$name
    if [ ! -e "$root/etc/debian_version" ]; then
      have debootstrap || { echo 'distros: debootstrap is not there' >&2; exit 2; }
      rm -rf "$root.new"
      debootstrap --variant=minbase --arch="$arch" --include=ca-certificates,gcc,make "$suite" "$root.new" >"$work/$name" 2>&1 ||
        { tail "$work/$name" >&2; exit 1; }
      mv "$root.new" "$root"
    fi
    rm -rf "$root/aifffffs"
    mkdir -p "$root/aifffffs"
    tar -C "$HERE" --exclude=.git --exclude=aifffffs --exclude='aifffffs-*' -cf - . | tar -C "$root/aifffffs" --no-same-owner -xf -
    echo "# $name"
    ROOT=$root unshare --mount --pid --fork --kill-child sh -c "$(distro_script)" sh "$command"
    status=$?
    [ "$status" = 0 ] || failures+=("$name")
    echo "# $name: status $status"
  done
  [ ${#failures[@]} = 0 ] || { echo "distros: failed: ${failures[*]}" >&2; exit 1; }
}

# ---- bench --------------------------------------------------------------------------------------

# Everything is measured in turn, BENCH_ROUNDS times in one run, and judged by ratios of medians: the
# machine may be busy with other things.

# clock NAME COMMAND ...: notes how long the command took
clock() {
  local name=$1 begin=$EPOCHREALTIME end
  shift
  "$@" >/dev/null 2>"$work/clock.err" || { echo "bench: $name: status $?" >&2; head -n 3 "$work/clock.err" >&2; }
  end=$EPOCHREALTIME
  echo "$begin $end" | awk '{ printf "%.6f\n", $2 - $1 }' >>"$work/times/$name"
}

median() { sort -n "$work/times/$1" 2>/dev/null | awk '{ v[NR] = $1 } END { if (NR) printf "%.4f", NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

show() { printf '%-62s %10s %s\n' "$1" "$(median "$2")" "${3:-s}"; }

# ratio SENTENCE NUMERATOR DENOMINATOR TARGET
ratio() {
  local a b
  a=$(median "$2") b=$(median "$3")
  if [ -z "$a" ] || [ -z "$b" ]; then
    printf '%-62s %10s\n' "$1" 'not run'
    return
  fi
  awk -v s="$1" -v a="$a" -v b="$b" -v t="$4" 'BEGIN { r = a / b; printf "%-62s %10.2f  (to reach: %s)%s\n", s, r, t, r <= t ? "" : "  MISSED" }'
}

# against SENTENCE VALUE TARGET
against() { awk -v s="$1" -v v="$2" -v t="$3" 'BEGIN { printf "%-62s %10s  (to reach: %s)%s\n", s, v, t, v + 0 <= t + 0 ? "" : "  MISSED" }'; }

read_all() { cat "$mnt"/*.aiff; }
read_ten() { printf '%s\0' "$mnt"/*.aiff | xargs -0 -n1 -P10 cat; }
flac_all() { local f; for f in "$music"/*.flac; do flac -d -s -c --force-aiff-format "$f"; done; }
flac_two() { printf '%s\0' "$music"/*.flac | xargs -0 -n1 -P"$(nproc)" flac -d -s -c --force-aiff-format; }

bench_music() {
  local i
  music=${BENCH_FLAC:-$work/music}
  [ -n "${BENCH_FLAC:-}" ] && return
  mkdir -p "$music"
  # pieces of other loudness and colour, so that FLAC frames differ in size as those of music do; each track
  # begins with another piece
  for i in $(seq 24); do
    sox -R -n -r 44100 -b 16 -c 2 "$work/piece$i.wav" synth 6 pluck "$((80 + i * 37 % 400))" synth 6 sine mix "$((200 + i * 53))" \
      synth 6 pinknoise mix gain -n -$((3 + i * 7 % 30)) tremolo "0.$((i % 9 + 1))" 80 2>/dev/null
  done
  for i in 0 1 2 3 4 5 6 7; do
    # shellcheck disable=SC2046 # words are wanted
    sox $(for n in $(seq 24); do echo "$work/piece$(((n + 3 * i) % 24 + 1)).wav"; done) "$work/w.wav"
    flac --totally-silent -5 -f -T TITLE="$i" "$work/w.wav" -o "$music/$i.flac"
  done
  rm "$work"/piece*.wav "$work/w.wav"
}

# fresh NAME COMMAND [OPTION ...]: clocks the command on a mount made for it
fresh() {
  local name=$1 command=$2
  shift 2
  start "$music" -o stats "$@" || return
  clock "$name" "$command"
  awk '/VmHWM/ { print $2 / 1024 }' "/proc/$daemon/status" >>"$work/times/$name.memory"
  awk '/Threads/ { print $2 }' "/proc/$daemon/status" >>"$work/times/$name.threads"
  stop
  sed -n 's/.* reads=\([0-9]*\) .* seeks=\([0-9]*\) .*/\2 \1/p' "$log" | awk '{ printf "%.4f\n", $1 / $2 }' >>"$work/times/$name.seeks"
}

# where COMMAND uses one CPU only
fresh_one_cpu() {
  local whole=$AIFFFFFS
  printf '#!/bin/sh\nexec taskset -c 0 "%s" "$@"\n' "$whole" >"$work/one-cpu"
  chmod +x "$work/one-cpu"
  AIFFFFFS=$work/one-cpu
  fresh "$@"
  AIFFFFFS=$whole
}

fresh_ffmpegfs() {
  have ffmpegfs || return
  rm -rf "$work/ffcache"
  mkdir "$work/ffcache"
  ffmpegfs -f -o "desttype=aiff,cachepath=$work/ffcache,log_maxlevel=ERROR" "$music" "$mnt" >/dev/null 2>&1 &
  until_true 20 mountpoint -q "$mnt"
  clock "$1" "$2"
  umount "$mnt"
  wait $!
}

# random_reads FILE: mean and 99th percentile of 1,000 reads of 4 KiB, in ms
random_reads() {
  /usr/bin/python3 - "$1" <<'PY'
import os, random, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
rnd, took = random.Random(7), []
for at in [rnd.randrange(54, size - 8192) // 4096 * 4096 for _ in range(1000)]:
    begin = time.perf_counter()
    os.pread(fd, 4096, at)
    took.append((time.perf_counter() - begin) * 1e3)
took.sort()
print(sum(took) / len(took), took[989])
PY
}

# the same number of seeks by libFLAC alone
libflac_seeks() {
  cat >"$work/seek.c" <<'C'
#include <FLAC/stream_decoder.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static FLAC__StreamDecoderWriteStatus take(const FLAC__StreamDecoder *d, const FLAC__Frame *f, const FLAC__int32 *const b[], void *a)
{ (void)d, (void)f, (void)b, (void)a; return FLAC__STREAM_DECODER_WRITE_STATUS_CONTINUE; }
static void bad(const FLAC__StreamDecoder *d, FLAC__StreamDecoderErrorStatus s, void *a) { (void)d, (void)s, (void)a; }
int main(int argc, char **argv)
{
	FLAC__StreamDecoder *d = FLAC__stream_decoder_new();
	struct timespec a, b;
	if (argc < 2 || FLAC__stream_decoder_init_file(d, argv[1], take, NULL, bad, NULL) || !FLAC__stream_decoder_process_until_end_of_metadata(d))
		return 1;
	srand(7);
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (int i = 0; i < 1000; i++)
		if (!FLAC__stream_decoder_seek_absolute(d, ((FLAC__uint64)rand() << 16 ^ (FLAC__uint64)rand()) % (FLAC__stream_decoder_get_total_samples(d) - 5000)))
			FLAC__stream_decoder_flush(d);
	clock_gettime(CLOCK_MONOTONIC, &b);
	printf("%f\n", ((double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6) / 1000);
	FLAC__stream_decoder_delete(d);
	return 0;
}
C
  [ -x "$work/seek" ] || cc -O2 "$work/seek.c" -o "$work/seek" -lFLAC || return
  "$work/seek" "$1"
}

# note NAME [NAME]: the numbers on stdin, each to the times of its name
note() {
  local v i=0
  read -r -a v
  for name in "$@"; do echo "${v[$i]}" >>"$work/times/$name"; i=$((i + 1)); done
}

bench_read() {
  local round
  for round in $(seq "$rounds"); do
    echo "# round $round" >&2
    fresh linear read_all
    fresh linear-s read_all -s
    fresh_one_cpu linear-1cpu read_all -o max_threads=4
    clock flac flac_all
    fresh ten read_ten
    fresh ten-s read_ten -s
    fresh_one_cpu ten-1cpu read_ten -o max_threads=4
    clock flac2 flac_two
    fresh_ffmpegfs linear-ffmpegfs read_all
    fresh_ffmpegfs ten-ffmpegfs read_ten
  done
  show 'linear cat, default' linear
  show 'linear cat, -s' linear-s
  show 'linear cat, one CPU' linear-1cpu
  show 'flac -d, one after the other' flac
  show 'linear cat, ffmpegfs' linear-ffmpegfs
  show 'ten readers, default' ten
  show 'ten readers, -s' ten-s
  show 'ten readers, one CPU' ten-1cpu
  show "flac -d, $(nproc) at a time" flac2
  show 'ten readers, ffmpegfs' ten-ffmpegfs
  ratio 'linear cat: default / -s' linear linear-s 0.70
  ratio 'linear cat / flac -d' linear flac 0.55
  ratio "ten readers / flac -d, $(nproc) at a time" ten flac2 0.95
  ratio 'linear cat / ffmpegfs' linear linear-ffmpegfs 0.40
  against 'linear cat, one CPU, 4 threads: seeks / reads' "$(median linear-1cpu.seeks)" 0.02
  against 'ten readers: peak resident memory, MiB' "$(median ten.memory)" 24
  show 'threads, with main' ten.threads ''
}

bench_random() {
  local round file hi=$work/hi
  file=$(printf '%s\n' "$music"/*.flac | head -n 1)
  mkdir -p "$hi"
  cp "$file" "$hi/cd.flac"
  cp "$file" "$hi/with.flac"
  metaflac --add-seekpoint=10s "$hi/with.flac"
  cp "$hi/with.flac" "$hi/without.flac"
  metaflac --remove --block-type=SEEKTABLE --dont-use-padding "$hi/without.flac"
  sox -R -n -r 96000 -b 24 -c 2 "$work/w.wav" synth 60 pinknoise synth 60 pluck mix 200 gain -n -6 2>/dev/null
  flac --totally-silent -5 -f "$work/w.wav" -o "$hi/hi.flac"
  for round in $(seq "$rounds"); do
    start "$hi" || return
    random_reads "$mnt/cd.aiff" | note random random.p99
    libflac_seeks "$hi/cd.flac" | note seek
    random_reads "$mnt/with.aiff" | note random-table
    libflac_seeks "$hi/with.flac" | note seek-table
    random_reads "$mnt/without.aiff" | note random-no-table
    random_reads "$mnt/hi.aiff" | note random-hi random-hi.p99
    libflac_seeks "$hi/hi.flac" | note seek-hi
    stop
  done
  show '1,000 random reads of 4 KiB: mean' random ms
  show 'libFLAC seek alone: mean' seek ms
  show 'with a SEEKTABLE, a point each 10 s' random-table ms
  show 'libFLAC seek alone, with that table' seek-table ms
  show 'without a SEEKTABLE' random-no-table ms
  show '24 bit, 96 kHz' random-hi ms
  show 'libFLAC seek alone, 24 bit, 96 kHz' seek-hi ms
  ratio 'random reads / libFLAC seek alone' random seek 0.45
  against 'random reads: 99th percentile, ms' "$(median random.p99)" 1
  ratio 'random reads without a SEEKTABLE / with' random-no-table random-table 1.2
  against 'random reads, 24 bit 96 kHz: 99th percentile, ms' "$(median random-hi.p99)" 1
}

# stat_p99 DIR FILE ...: the 99th percentile, in ms, of stats that the kernel cannot answer by itself
stat_p99() {
  /usr/bin/python3 - "$@" <<'PY'
import os, sys, time
took = []
for i in range(200):
    begin = time.perf_counter()
    os.stat(sys.argv[1 + i % (len(sys.argv) - 1)])
    took.append((time.perf_counter() - begin) * 1e3)
    time.sleep(0.02 if i % (len(sys.argv) - 1) else 0.05)
took.sort()
print(took[int(len(took) * 0.99)])
PY
}

bench_latency() {
  local src=$work/slow i pids=() round bind
  mkdir -p "$src/fast" "$src/slow" "$work/behind"
  cp "$(printf '%s\n' "$music"/*.flac | head -n 1)" "$work/behind/slow.flac"
  for i in $(seq 300); do tune_cached "$src/fast/$i.flac"; done
  if have bindfs; then
    for round in 1 2 3; do
      bindfs -f --read-rate=20k "$work/behind" "$src/slow" >/dev/null 2>&1 &
      bind=$!
      until_true 20 mountpoint -q "$src/slow"
      start "$src" || return
      pids=()
      for i in $(seq 20); do cat "$mnt/slow/slow.aiff" >/dev/null 2>&1 & pids+=($!); done
      until_true 20 bench_reading
      stat_p99 "$mnt"/fast/*.aiff | note stat-slow
      kill -TERM "$daemon"
      wait "$daemon"
      kill -9 "${pids[@]}" 2>/dev/null
      wait "${pids[@]}" 2>/dev/null
      umount -l "$src/slow"
      wait "$bind"
    done
    against 'stat while 20 readers share a file at 20 KB/s: 99th pct, ms' "$(median stat-slow)" 50
  fi
  for round in 1 2 3; do
    start "$music" || return
    pids=()
    for i in 1 2 3 4 5 6 7 8 9 10; do (while :; do cat "$mnt"/*.aiff >/dev/null 2>&1 || break; done) & pids+=($!); done
    until_true 20 bench_reading
    stat_p99 "$mnt"/*.aiff | note stat-busy
    kill "${pids[@]}" 2>/dev/null
    wait "${pids[@]}" 2>/dev/null
    stop
  done
  against 'stat of one file while ten readers stream: 99th pct, ms' "$(median stat-busy)" 20
}

# bench_reading: the daemon has a read under way, or had one
bench_reading() { [ "$(stats handles)" -ge 1 ]; }

# tune_cached OUT: a small FLAC file, different each time by its tag
tune_cached() {
  [ -f "$work/small.flac" ] || tune_flac 16 1 8000 800 "$work/small.flac" --no-padding
  cp "$work/small.flac" "$1"
  metaflac --dont-use-padding --set-tag="TITLE=${1##*/}" "$1"
}

bench_listing_files() {
  /usr/bin/python3 - "$work/small.flac" "$1" "$2" "$3" "$4" <<'PY'
import os, struct, sys
small, to, folders, each, picture = open(sys.argv[1], 'rb').read(), sys.argv[2], *map(int, sys.argv[3:])
info, audio = small[8:42], small[small.rindex(b'\xff\xf8'):]
at = 4
while True:  # where the sound begins
    head = small[at]
    at += 4 + int.from_bytes(small[at + 1:at + 4], 'big')
    if head & 0x80:
        break
audio = small[at:]
def block(kind, data, last=False):
    return bytes([kind | (0x80 if last else 0)]) + len(data).to_bytes(3, 'big') + data
def comment(text):
    return struct.pack('<I', len(text)) + text
for d in range(folders):
    os.makedirs('%s/%03d' % (to, d), exist_ok=True)
    for i in range(each):
        tags = comment(b'bench') + struct.pack('<I', 3) + comment(b'TITLE=Track %d' % i) + comment(b'ARTIST=Artist %d' % d) + comment(b'ALBUM=Album')
        data = b'fLaC' + block(0, info) + block(4, tags, not picture)
        if picture:
            data += block(6, struct.pack('>II10sI16sI', 3, 10, b'image/jpeg', 0, bytes(16), picture) + b'\xff\xd8\xff' + bytes(picture - 3))
            data += block(1, bytes(100), True)
        with open('%s/%03d/%03d.flac' % (to, d, i), 'wb') as f:
            f.write(data + audio)
PY
}

find_ls() { find "$mnt" -ls; }

passthrough_build() {
  local c
  c=$(find /usr/share/doc/libfuse3-dev /usr/share/doc/fuse3-devel -name 'passthrough.c*' 2>/dev/null | head -n 1)
  [ -n "$c" ] || return 1
  cp "$(dirname "$c")"/passthrough* "$work/"
  gunzip -f "$work"/passthrough*.gz 2>/dev/null
  # shellcheck disable=SC2046 # words are wanted
  cc -O2 "$work/passthrough.c" -o "$work/passthrough" $(pkg-config --cflags --libs fuse3)
}

# The example shows the whole machine below its root: the tree is looked at where it is.
with_passthrough() {
  "$work/passthrough" -f "$mnt" &
  until_true 20 mountpoint -q "$mnt"
  local pid=$!
  "$@" "$pid"
  umount "$mnt"
  wait "$pid"
}

pass_find() { find "$mnt$tree" -ls; }
pass_list() {
  clock list-pass pass_find
  sleep 2.1 # the kernel's attributes have expired
  clock list-pass-again pass_find
}
pass_memory() {
  pass_find >/dev/null
  awk '/VmRSS/ { print $2 / 1024 }' "/proc/$1/status" >>"$work/times/memory-pass"
}

bench_listing() {
  local round many=$work/many
  tree=$work/listing
  [ -f "$work/small.flac" ] || tune_flac 16 1 8000 800 "$work/small.flac" --no-padding
  bench_listing_files "$tree" 100 20 1000000
  bench_listing_files "$many" 1000 100 0
  find "$tree" -type f -exec cat {} + >/dev/null # into the page cache
  passthrough_build || echo "# libfuse's passthrough example is not there" >&2
  for round in $(seq "$rounds"); do
    start "$tree" || return
    clock list find_ls
    sleep 2.1
    clock list-again find_ls
    stop
    start "$tree" -o stat_cache=0 || return
    clock list-0 find_ls
    stop
    [ ! -x "$work/passthrough" ] || with_passthrough pass_list
    if have ffmpegfs && [ "$round" -le 2 ]; then
      music=$tree fresh_ffmpegfs list-ffmpegfs find_ls
    fi
  done
  for round in 1 2 3; do
    start "$many" || return
    find_ls >/dev/null
    awk '/VmRSS/ { print $2 / 1024 }' "/proc/$daemon/status" >>"$work/times/memory-many"
    stop
    tree=$many
    [ ! -x "$work/passthrough" ] || with_passthrough pass_memory
    tree=$work/listing
  done
  show 'find -ls, 2,000 files, fresh' list
  show 'find -ls again after 2 s' list-again
  show 'find -ls, fresh, no size cache' list-0
  show "find -ls, libfuse's passthrough" list-pass
  show "find -ls, libfuse's passthrough, again after 2 s" list-pass-again
  show 'find -ls, ffmpegfs' list-ffmpegfs
  ratio 'find -ls: fresh / ffmpegfs' list list-ffmpegfs 0.04
  ratio 'find -ls: fresh / passthrough' list list-pass 0.8
  ratio 'find -ls: again / passthrough again' list-again list-pass-again 0.5
  show 'resident memory after 100,000 files' memory-many MiB
  show "the same of libfuse's passthrough" memory-pass MiB
  [ -z "$(median memory-pass)" ] ||
    against 'more than that of the passthrough, MiB' "$(echo "$(median memory-many) $(median memory-pass)" | awk '{ print $1 - $2 }')" 8
}

verb_bench() {
  local part
  rounds=${BENCH_ROUNDS:-5}
  mkdir -p "$work/times"
  bench_music
  for part in "${@:-read}"; do "bench_$part"; done
  [ $# -gt 0 ] || for part in random latency listing; do "bench_$part"; done
}

# ---- what is asked for --------------------------------------------------------------------------

verdict() {
  if [ "$skipped" = 0 ]; then echo "$passed passed, $failed failed"; else echo "$passed passed, $failed failed, $skipped skipped"; fi
  [ "$failed" = 0 ]
}

verb_check() {
  local s
  [ $# -gt 0 ] || set -- "${SECTIONS[@]}"
  for s in "$@"; do
    echo "# $s"
    "section_$s"
  done
  verdict
}

verb=${1:-check}
[ $# = 0 ] || shift
[ -x "$AIFFFFFS" ] || { echo "test.sh: $AIFFFFFS is not there: make first" >&2; exit 1; }
[ -c /dev/fuse ] || { echo "test.sh: no /dev/fuse" >&2; exit 1; }
case $verb in
  mutate | fuzz | stress) "verb_$verb" "$@"; verdict ;;
  *) "verb_$verb" "$@" ;;
esac
