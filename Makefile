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

# what the compiler has to be told, whatever CFLAGS says
BUILD = $(CC) -std=c11 $(WARNINGS) $(CPPFLAGS) $(CFLAGS)
LIBS = -pthread

SANITIZE = -O1 -g -fno-omit-frame-pointer -DIDLE_DECODERS=3 -DANCHORS=8 -DSTAT_CACHE=64

all: aifffffs

aifffffs: aifffffs.c
	@$(PKG_CONFIG) --exists --print-errors $(PACKAGES)
	$(BUILD) `$(PKG_CONFIG) --cflags $(PACKAGES)` $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

# the same under sanitizers, with small tables so that the rare paths run
aifffffs-asan: aifffffs.c
	$(BUILD) $(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=undefined `$(PKG_CONFIG) --cflags $(PACKAGES)` $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

aifffffs-tsan: aifffffs.c
	$(BUILD) $(SANITIZE) -fsanitize=thread `$(PKG_CONFIG) --cflags $(PACKAGES)` $(LDFLAGS) -o $@ aifffffs.c `$(PKG_CONFIG) --libs $(PACKAGES)` $(LIBS)

check: aifffffs
	./test.sh

check-asan: aifffffs-asan
	AIFFFFFS=./aifffffs-asan ./test.sh

check-tsan: aifffffs-tsan
	AIFFFFFS=./aifffffs-tsan ./test.sh

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

deps:
	./test.sh deps

.PHONY: all check check-asan check-tsan bench install uninstall clean deps
