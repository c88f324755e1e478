# aifffffs: make && ./aifffffs SOURCE MOUNTPOINT
.POSIX:

CC = cc
CFLAGS = -O2 -g
CPPFLAGS =
LDFLAGS =
WARNINGS = -Wall -Wextra -Wpedantic -Wshadow
PREFIX = /usr/local
DESTDIR =
PKG_CONFIG = pkg-config
PACKAGES = fuse3 flac

# the headers of others are theirs: libfuse 3.17 has two that -Wpedantic finds
HEADERS = `$(PKG_CONFIG) --cflags $(PACKAGES) | sed 's/-I/-isystem /g'`

# what the compiler has to be told, whatever CFLAGS says
BUILD = $(CC) -std=c11 $(WARNINGS) $(CPPFLAGS) $(CFLAGS)
LIBS = -pthread

SANITIZE = -O1 -g -fno-omit-frame-pointer -DIDLE_DECODERS=3 -DANCHORS=8 -DSTAT_CACHE=64

all: aifffffs

aifffffs: aifffffs.c
	@$(PKG_CONFIG) --exists --print-errors $(PACKAGES)
	$(BUILD) $(HEADERS) $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

# the same under sanitizers, with small tables so that the rare paths run
aifffffs-asan: aifffffs.c
	$(BUILD) $(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=undefined $(HEADERS) $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

aifffffs-tsan: aifffffs.c
	$(BUILD) $(SANITIZE) -fsanitize=thread $(HEADERS) $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

# SECTIONS="mount sound" runs just these
SECTIONS =

check: aifffffs
	./test.sh check $(SECTIONS)

check-asan: aifffffs-asan
	AIFFFFFS=./aifffffs-asan ./test.sh check $(SECTIONS)

# TSan cannot live with all of Linux's address randomisation
check-tsan: aifffffs-tsan
	AIFFFFFS=./aifffffs-tsan setarch -R ./test.sh check $(SECTIONS)

check-distros: aifffffs
	./test.sh distros

mutate: aifffffs
	./test.sh mutate

fuzz: aifffffs
	./test.sh fuzz 1000000

stress: aifffffs
	./test.sh stress

bench: aifffffs
	./test.sh bench

install: aifffffs
	mkdir -p $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 755 aifffffs $(DESTDIR)$(PREFIX)/bin/aifffffs
	install -m 644 aifffffs.1 $(DESTDIR)$(PREFIX)/share/man/man1/aifffffs.1

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/aifffffs $(DESTDIR)$(PREFIX)/share/man/man1/aifffffs.1

clean:
	rm -f aifffffs aifffffs-asan aifffffs-tsan aifffffs-fuzz

# what is missing to build, run and test, by the machine's own package manager
TOOLS = flac metaflac sox ffprobe sndfile-info exiftool mediainfo fusermount3 rsync bash python3
DEB = pkg-config libfuse3-dev libflac-dev fuse3 flac sox ffmpeg sndfile-programs libimage-exiftool-perl mediainfo \
	rsync python3 python3-mutagen util-linux procps bash
DNF = pkgconf-pkg-config fuse3-devel flac-devel fuse3 flac sox ffmpeg-free libsndfile-utils perl-Image-ExifTool mediainfo \
	rsync python3 python3-mutagen util-linux procps-ng bash
PACMAN = pkgconf fuse3 flac sox ffmpeg libsndfile perl-image-exiftool mediainfo rsync python python-mutagen util-linux procps-ng bash
ZYPPER = pkg-config fuse3-devel flac-devel fuse3 flac sox ffmpeg libsndfile-progs exiftool mediainfo rsync python3 \
	python3-mutagen util-linux procps bash
APK = musl-dev pkgconf fuse3-dev flac-dev fuse3 flac sox ffmpeg libsndfile exiftool mediainfo rsync python3 py3-mutagen \
	util-linux procps bash
BREW = pkg-config flac sox ffmpeg libsndfile exiftool mediainfo rsync
PKG = pkgconf fusefs-libs3 flac sox ffmpeg libsndfile p5-Image-ExifTool mediainfo rsync bash python3

deps:
	@missing=; $(PKG_CONFIG) --exists $(PACKAGES) 2>/dev/null || missing="$(PACKAGES)"; \
	for t in $(TOOLS); do command -v $$t >/dev/null 2>&1 || missing="$$missing $$t"; done; \
	test -z "$$missing" || echo "missing: $$missing"; \
	python3 -c 'import mutagen' 2>/dev/null || /usr/bin/python3 -c 'import mutagen' 2>/dev/null || missing="$$missing mutagen"; \
	test -z "$$missing" && exit 0; \
	sudo=; test "`id -u`" = 0 || sudo=sudo; \
	if command -v apt-get >/dev/null; then $$sudo apt-get update -q && \
		$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(DEB); \
	elif command -v dnf >/dev/null; then $$sudo dnf install -y $(DNF); \
	elif command -v pacman >/dev/null; then $$sudo pacman -Sy --needed --noconfirm $(PACMAN); \
	elif command -v zypper >/dev/null; then $$sudo zypper --non-interactive install $(ZYPPER); \
	elif command -v apk >/dev/null; then $$sudo apk add $(APK); \
	elif command -v brew >/dev/null; then brew install $(BREW); \
	elif command -v pkg >/dev/null; then $$sudo pkg install -y $(PKG); \
	else echo "no package manager known here: install libfuse3, libFLAC and pkg-config by hand" >&2; exit 1; fi

.PHONY: all check check-asan check-tsan check-distros mutate fuzz stress bench install uninstall clean deps
