/*
 * aifffffs: AIFF From FLAC FUSE File System
 *
 *     aifffffs [options] source mountpoint
 *
 * shows the tree `source` at `mountpoint`, read-only, with every FLAC file as an AIFF file.
 * The sound is decoded while it is read: nothing is written to disk, no file is held in memory.
 *
 * WHAT A READER SEES. x.flac is x.aiff. Its size is exact from the first stat, because it follows
 * from the FLAC metadata alone: 54 bytes of header, samples x channels x bytes of sound, and an
 * ID3v2.3 tag whose writer can count without writing.
 *
 * HOW A READ BECOMES BYTES
 *
 *     reader -> kernel -> /dev/fuse -> one of N workers (THREAD POOL) -> fs_read_buf (FUSE OPERATIONS)
 *       -> which piece of the AIFF file? (LAYOUT, HANDLES)
 *            header, chunks: copied   tag: written straight into the reply (ID3 TAG)
 *            sound: take a ticket (TICKET LOCK), claim a decoder and let the next reader in (CLAIMS),
 *                   find the FLAC frame (FRAMES), decode it (DECODERS), pack it into the reply (AIFF)
 *
 * WORDS. source: the tree that is shown. track: what the metadata of one FLAC file say. layout: which
 * bytes of its AIFF file come from where. sample frame: one sample of each channel; "sample" alone is the
 * number of one. FLAC frame: sample frames coded as a whole, often 4096. anchor: a FLAC frame whose place
 * is known. handle: one open AIFF file. decoder: a libFLAC instance and where it stands. depot: all
 * decoders. ticket: a place in the queue of a handle. claim: what makes a decoder one worker's until it is
 * released. worker: a thread that serves requests. pool: all workers.
 *
 * WHO OWNS WHAT. A handle owns its layout, the table of FLAC frames it has seen, and its decoders; the
 * descriptor of its FLAC file is closed by whoever opened it. A decoder belongs to one handle for life and
 * to one worker while busy. A worker owns its request buffer. What else outlives a request: the size cache,
 * the list of open files and whose pages the kernel has (struct fs), the listing of an open directory, and
 * the set of log lines already written.
 *
 * LOCKS. Who holds one may take those below it. None is held during I/O or decoding, but for the first,
 * which only readers of the same handle want, and the last, which only files with huge tags want:
 *     handle.queue     ticket lock: who may claim next
 *     depot.lock       which decoder is busy or idle, of all handles; below the queue only
 *     handle.lock      what is known of the source's identity
 *     anchors.lock     the handle's table of FLAC frames
 *     cache.lock, fs.opened_lock, log_state.lock, pool.lock: nothing is taken below them
 *     large_comments   one track in memory; taken with no other held; anchors, cache and log below it
 *
 * FROM START TO END. Options; open the source; mount; answer the kernel's first request; go to the
 * background; start the pool; wait for a signal or the unmount; stop the pool; unmount; exit 0.
 *
 * THE FILE goes from leaves to main, so that each section needs only what stands above it:
 *     CONFIGURATION  LOG  AIFF  ID3 TAG  FLAC METADATA  LAYOUT  SIZE CACHE  FRAMES  TICKET LOCK  DECODERS
 *     CLAIMS  HANDLES  SOURCE TREE  NAMES  FILES  FUSE OPERATIONS  THREAD POOL  OPTIONS  MAIN
 * AIFF, ID3 TAG, TICKET LOCK and THREAD POOL can be cut out and used elsewhere: each has its own
 * structs, no globals, and a banner that says what it needs.
 */

/* ---- CONFIGURATION ---------------------------------------------------------------------------- */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_PATH, setfsuid, sched_getaffinity */
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#define FUSE_USE_VERSION 31

#include <FLAC/stream_decoder.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <fuse_lowlevel.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#endif
#ifdef __GLIBC__
#include <execinfo.h>
#include <malloc.h>
#endif

#define AIFFFFFS_VERSION "1.0"

/* Sizes that a test build may shrink, so that the rare path always runs. */
#ifndef IDLE_DECODERS
#define IDLE_DECODERS 64 /* decoders kept without work, over all handles; some 100 KB each */
#endif
#ifndef ANCHORS
#define ANCHORS 128 /* FLAC frames remembered for each handle */
#endif
#ifndef STAT_CACHE
#define STAT_CACHE 65536 /* files whose AIFF size is remembered; 56 bytes each */
#endif
#ifndef METADATA_WINDOW
#define METADATA_WINDOW 8192 /* bytes of metadata read at a time */
#endif
#ifndef FRAME_WINDOW
#define FRAME_WINDOW 32768 /* bytes searched for a FLAC frame at a time */
#endif
#define PAGE_OWNERS 8192           /* paths of which is known what the kernel has pages of */
#define LARGE_FRAME (256 << 10)    /* bytes of sound in a FLAC frame; a decoder takes ten times that */
#define LARGE_COMMENTS (256 << 10) /* bytes of a VORBIS_COMMENT block, see large_comments */
#define MAX_WORKERS 1024
#define MAX_BLOCKS 16384 /* metadata blocks in a file; an intact one has about five */
#define STOP_MS 500      /* how long leaving waits for workers that sit in a slow source */

#define NS_PER_S INT64_C(1000000000)

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* FNV-1a: a hash good enough for tables that are bounded anyway. */
static uint64_t hash_bytes(uint64_t h, const void *p, size_t n)
{
	const uint8_t *b = p;
	while (n--)
		h = (h ^ *b++) * UINT64_C(0x100000001b3);
	return h;
}
#define HASH_START UINT64_C(0xcbf29ce484222325)

/* ---- LOG -------------------------------------------------------------------------------------- */

/* One line for each file and cause, not for each read: a set of hashes of lines already written,
 * LOG_WAYS to a bucket, the oldest of a full bucket forgotten. */
#define LOG_BUCKETS 8192
#define LOG_WAYS 8

static struct {
	pthread_mutex_t lock;                 /* guards `said` */
	uint64_t said[LOG_BUCKETS][LOG_WAYS]; /* newest first */
	bool to_syslog;                       /* set before there are threads */
} log_state = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void log_line(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void log_line(const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	if (log_state.to_syslog) {
		vsyslog(LOG_ERR, fmt, ap);
	} else {
		char line[2048];
		vsnprintf(line, sizeof line, fmt, ap);
		fprintf(stderr, "aifffffs: %s\n", line);
	}
	va_end(ap);
}

/* Whether `key` is new; remembers it. */
static bool log_first(uint64_t key)
{
	uint64_t *bucket = log_state.said[key % LOG_BUCKETS];
	bool known = false;
	pthread_mutex_lock(&log_state.lock);
	for (size_t i = 0; i < LOG_WAYS; i++)
		known |= bucket[i] == key;
	if (!known) {
		memmove(bucket + 1, bucket, (LOG_WAYS - 1) * sizeof *bucket);
		bucket[0] = key;
	}
	pthread_mutex_unlock(&log_state.lock);
	return !known;
}

/* `path` is the source's, below its root. Control bytes in it are written as \xNN, so that a name
 * cannot forge a line. `once` is the part of the cause by which lines count as the same. */
static void log_problem(const char *path, const char *once, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void log_problem(const char *path, const char *once, const char *fmt, ...)
{
	uint64_t key = hash_bytes(hash_bytes(HASH_START, path, strlen(path) + 1), once, strlen(once));
	char name[1024], what[512];
	size_t n = 0;
	va_list ap;
	if (!log_first(key))
		return;
	while (*path == '/')
		path++;
	for (; *path && n + 5 < sizeof name; path++) {
		unsigned char c = (unsigned char)*path;
		if (c < 0x20 || c == 0x7f || c == '\\')
			n += (size_t)snprintf(name + n, 5, "\\x%02x", c);
		else
			name[n++] = (char)c;
	}
	name[n] = 0;
	va_start(ap, fmt);
	vsnprintf(what, sizeof what, fmt, ap);
	va_end(ap);
	log_line("%s: %s", name, what);
}

/* ---- AIFF ------------------------------------------------------------------------------------- */

/* To take: this section. Needs htonl (arpa/inet.h), stdint, stdbool, string.h.
 *
 * An AIFF file (Apple, "Audio Interchange File Format 1.3", 1989) as `flac -d` writes it:
 *
 *     FORM size AIFF                            size: all that follows it, so file size - 8
 *     COMM 18   channels, sample frames, bits, rate as an 80-bit IEEE extended
 *     SSND 8+n  offset 0, block size 0, n bytes of sound; a zero byte if n is odd
 *
 * Everything is big-endian and put byte by byte: no host order, no struct over the file. */

#define AIFF_HEADER 54

static void put_u16(uint8_t *p, uint32_t v)
{
	p[0] = (uint8_t)(v >> 8);
	p[1] = (uint8_t)v;
}

static void put_u32(uint8_t *p, uint32_t v)
{
	put_u16(p, v >> 16);
	put_u16(p + 2, v);
}

static uint32_t get_u16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }
static uint32_t get_u24(const uint8_t *p) { return (uint32_t)p[0] << 16 | get_u16(p + 1); }
static uint32_t get_u32(const uint8_t *p) { return get_u16(p) << 16 | get_u16(p + 2); }
static uint32_t get_le32(const uint8_t *p)
{
	return (uint32_t)p[3] << 24 | (uint32_t)p[2] << 16 | (uint32_t)p[1] << 8 | p[0];
}

/* An integer as 80-bit extended: sign and exponent (bias 16383), then 64 bits of mantissa whose
 * top bit is the integer one. Exact for every uint32_t. */
static void put_extended(uint8_t p[10], uint32_t v)
{
	uint32_t exponent = 16383 + 31;
	memset(p, 0, 10);
	if (v == 0)
		return;
	while (!(v & 0x80000000u)) {
		v <<= 1;
		exponent--;
	}
	put_u16(p, exponent);
	put_u32(p + 2, v);
}

/* The 54 bytes in front of the sound. `form` is the file's size - 8, `sound` the bytes of sound
 * without a pad byte; the caller has made sure that both fit into 32 bits. */
static void aiff_header(uint8_t p[AIFF_HEADER], uint32_t form, unsigned channels, uint32_t frames, unsigned bits,
                        uint32_t rate, uint32_t sound)
{
	memcpy(p, "FORM", 4);
	put_u32(p + 4, form);
	memcpy(p + 8, "AIFFCOMM", 8);
	put_u32(p + 16, 18);
	put_u16(p + 20, channels);
	put_u32(p + 22, frames);
	put_u16(p + 26, bits);
	put_extended(p + 28, rate);
	memcpy(p + 38, "SSND", 4);
	put_u32(p + 42, sound + 8);
	memset(p + 46, 0, 8);
}

/* Samples `from` to `from + n` of each channel, interleaved, each left-justified in `bytes` bytes by
 * `shift` bits, big-endian, or little-endian for AIFF-C of type sowt. Nothing
 * else here touches every sample, so the common forms have a loop that the compiler can unroll. */
static void aiff_pack(uint8_t *p, const int32_t *const *channel, size_t from, size_t n, unsigned channels,
                      unsigned bytes, unsigned shift, bool little)
{
	const int32_t *l = channel[0] + from, *r = channels > 1 ? channel[1] + from : l;
	if (bytes == 2 && channels == 2 && !little) {
		for (size_t i = 0; i < n; i++) {
			uint32_t a = (uint32_t)l[i] << shift, b = (uint32_t)r[i] << shift;
			uint32_t word = htonl(a << 16 | (b & 0xffff));
			memcpy(p + 4 * i, &word, 4);
		}
	} else if (bytes == 2 && channels == 1 && !little) {
		for (size_t i = 0; i < n; i++)
			put_u16(p + 2 * i, (uint32_t)l[i] << shift);
	} else if (bytes == 3 && channels == 2 && !little) {
		for (size_t i = 0; i < n; i++) {
			uint32_t a = (uint32_t)l[i] << shift, b = (uint32_t)r[i] << shift;
			uint32_t word = htonl(a << 8 | (b >> 16 & 0xff));
			memcpy(p + 6 * i, &word, 4);
			put_u16(p + 6 * i + 4, b);
		}
	} else {
		for (size_t i = 0; i < n; i++)
			for (unsigned c = 0; c < channels; c++, p += bytes) {
				uint32_t v = (uint32_t)channel[c][from + i] << shift;
				for (unsigned b = 0; b < bytes; b++)
					p[little ? b : bytes - 1 - b] = (uint8_t)(v >> 8 * b);
			}
	}
}

/* ---- ID3 TAG ---------------------------------------------------------------------------------- */

/* To take: this section, min_u64 and max_u64, and, from AIFF, the get_ and put_ functions. Needs
 * errno, stdbool, stdint, stdio, stdlib, string and strings.h.
 *
 * An ID3v2.3.0 tag (id3.org, "ID3 tag version 2.3.0") out of a FLAC VORBIS_COMMENT block and
 * pictures. The tag is produced in order through an id3_out, which keeps the bytes of one window
 * and counts the rest: with an empty window the writer only counts, so that size and bytes cannot
 * disagree. Picture data is fetched by a function of the caller's, when the window touches it.
 *
 * Text is encoding 0 when it is plain ASCII, else UTF-16 with a byte order mark; never Latin-1,
 * which readers take for their local code page, and never UTF-8, which ID3v2.3 does not have. */

#define ID3_MAX ((1u << 28) - 1) /* bytes after the ten of the header: four times seven bits */
#define ID3_MAX_COMMENTS 32768   /* more are left out */
#define ID3_MAX_PICTURES 1024
#define ID3_MAX_DESCRIPTION 65536 /* bytes of a picture's; what is longer is cut */
#define ID3_PADDING 10            /* at least; one more where the length would be odd */

struct id3_out {
	uint8_t *dst;      /* where byte `from` of the tag goes */
	uint64_t from, to; /* the window */
	uint64_t at;       /* bytes produced so far */
};

struct id3_span {
	const char *p;
	size_t n;
};

/* What APIC needs of a picture; `mime` is empty where the file does not say. */
struct id3_picture {
	uint32_t type;
	char mime[64];
	char *description; /* UTF-8, owned by who made the list */
	size_t description_len;
	bool cut;           /* the description was longer */
	uint64_t at;        /* for `fetch` */
	uint64_t size;      /* bytes of picture data */
	const char *base64; /* or: the data is here, base64, `skip` decoded bytes in */
	size_t base64_len, skip;
	unsigned copy;        /* 2 for the second picture with this description, and so on */
	uint64_t text, shown; /* hashes of the description, without and with its number */
	bool out;             /* left out, or the tag would grow too large */
};

struct id3_source {
	const uint8_t *comments; /* a VORBIS_COMMENT block's content */
	size_t comments_len;
	struct id3_picture *pictures; /* in file order; id3_write works on a copy of the list */
	size_t n_pictures;
	/* Puts `n` bytes of picture data from `at` to `dst`: 0 or a negative errno. */
	int (*fetch)(void *arg, uint64_t at, uint8_t *dst, size_t n);
	void *arg;
	bool broken;    /* set by id3_write: the comments were cut short, or some left out */
	bool too_large; /* set by id3_write: pictures were left out */
};

/* Where a comment goes. `rank`: of the rows with one frame and a rank, only those of the lowest
 * rank that the file has are used for the frame; the others are kept as TXXX. */
enum id3_how {
	ID3_TEXT,      /* the frame; values joined */
	ID3_USER,      /* TXXX with description `arg` */
	ID3_NUMBER,    /* n or n/m; one */
	ID3_TOTAL,     /* the m of n/m */
	ID3_DATE,      /* TYER, TDAT and TIME as far as it says */
	ID3_YEAR,      /* four digits */
	ID3_INTEGER,   /* one number, rounded */
	ID3_KEY,       /* one value of at most three characters */
	ID3_LANGUAGE,  /* one three-letter code */
	ID3_FLAG,      /* "1" */
	ID3_URL,       /* one absolute URL */
	ID3_UFID,      /* one identifier of `arg` */
	ID3_ROLE,      /* IPLS, the role in `arg` */
	ID3_PERFORMER, /* "Name (role)" */
	ID3_GROUP,     /* TIT1 and GRP1 */
	ID3_PICTURE,   /* a FLAC picture block in base64 */
	ID3_DROP
};

/* Frames in order of significance, as the ID3v2.3 text asks: who reads the first kilobyte gets what
 * matters. TXXX follows, in file order; APIC is last. */
static const char id3_order[][5] = {
	"TIT2", "TPE1", "TRCK", "TALB", "TPOS", "TYER", "TDAT", "TIME", "TCON", "TIT3", "TSOT", "TSOA",
	"TSOP", "TPE2", "TSO2", "TCOM", "TSOC", "TEXT", "TPE3", "TPE4", "IPLS", "TMOO", "TIT1", "GRP1",
	"MVNM", "MVIN", "TORY", "TSST", "TMED", "COMM", "USLT", "TBPM", "TKEY", "TLAN", "TCOP", "WCOP",
	"TPUB", "TSRC", "TENC", "TSSE", "TCMP", "TOPE", "TOAL", "TOFN", "WOAR", "WXXX", "UFID", "TXXX",
};
#define ID3_TXXX (sizeof id3_order / sizeof *id3_order - 1)

static const struct id3_row {
	const char *name, *frame, *arg;
	enum id3_how how;
	int rank;
} id3_rows[] = {
	{ "TITLE", "TIT2", "", ID3_TEXT, 0 },
	{ "ARTIST", "TPE1", "", ID3_TEXT, 0 },
	{ "TRACKNUMBER", "TRCK", "", ID3_NUMBER, 1 },
	{ "TRACK", "TRCK", "", ID3_NUMBER, 2 },
	{ "TRACKTOTAL", "TRCK", "", ID3_TOTAL, 0 },
	{ "TOTALTRACKS", "TRCK", "", ID3_TOTAL, 0 },
	{ "ALBUM", "TALB", "", ID3_TEXT, 0 },
	{ "DISCNUMBER", "TPOS", "", ID3_NUMBER, 1 },
	{ "DISC", "TPOS", "", ID3_NUMBER, 2 },
	{ "DISCTOTAL", "TPOS", "", ID3_TOTAL, 0 },
	{ "TOTALDISCS", "TPOS", "", ID3_TOTAL, 0 },
	{ "DATE", "TYER", "", ID3_DATE, 1 },
	{ "YEAR", "TYER", "", ID3_YEAR, 2 },
	{ "GENRE", "TCON", "", ID3_TEXT, 0 },
	{ "ALBUMARTIST", "TPE2", "", ID3_TEXT, 0 },
	{ "ALBUM ARTIST", "TPE2", "", ID3_TEXT, 0 },
	{ "COMPOSER", "TCOM", "", ID3_TEXT, 0 },
	{ "SUBTITLE", "TIT3", "", ID3_TEXT, 1 },
	{ "VERSION", "TIT3", "", ID3_TEXT, 2 },
	{ "TITLESORT", "TSOT", "", ID3_TEXT, 0 },
	{ "ALBUMSORT", "TSOA", "", ID3_TEXT, 0 },
	{ "ARTISTSORT", "TSOP", "", ID3_TEXT, 0 },
	{ "ALBUMARTISTSORT", "TSO2", "", ID3_TEXT, 0 },
	{ "COMPOSERSORT", "TSOC", "", ID3_TEXT, 0 },
	{ "LYRICIST", "TEXT", "", ID3_TEXT, 0 },
	{ "CONDUCTOR", "TPE3", "", ID3_TEXT, 0 },
	{ "REMIXER", "TPE4", "", ID3_TEXT, 0 },
	{ "MIXARTIST", "TPE4", "", ID3_TEXT, 0 },
	{ "ARRANGER", "IPLS", "arranger", ID3_ROLE, 0 },
	{ "ENGINEER", "IPLS", "engineer", ID3_ROLE, 0 },
	{ "PRODUCER", "IPLS", "producer", ID3_ROLE, 0 },
	{ "DJMIXER", "IPLS", "DJ-mix", ID3_ROLE, 0 },
	{ "MIXER", "IPLS", "mix", ID3_ROLE, 0 },
	{ "PERFORMER", "IPLS", "", ID3_PERFORMER, 0 },
	{ "MOOD", "TMOO", "", ID3_TEXT, 0 },
	{ "GROUPING", "TIT1", "", ID3_GROUP, 1 },
	{ "CONTENTGROUP", "TIT1", "", ID3_TEXT, 2 },
	{ "MOVEMENTNAME", "MVNM", "", ID3_TEXT, 0 },
	{ "MOVEMENTNUMBER", "MVIN", "", ID3_NUMBER, 1 },
	{ "MOVEMENT", "MVIN", "", ID3_NUMBER, 2 },
	{ "MOVEMENTTOTAL", "MVIN", "", ID3_TOTAL, 0 },
	{ "ORIGINALDATE", "TORY", "", ID3_YEAR, 1 },
	{ "ORIGINALYEAR", "TORY", "", ID3_YEAR, 2 },
	{ "DISCSUBTITLE", "TSST", "", ID3_TEXT, 0 },
	{ "SETSUBTITLE", "TSST", "", ID3_TEXT, 0 },
	{ "MEDIA", "TMED", "", ID3_TEXT, 0 },
	{ "SOURCEMEDIA", "TMED", "", ID3_TEXT, 0 },
	{ "COMMENT", "COMM", "", ID3_TEXT, 1 },
	{ "DESCRIPTION", "COMM", "", ID3_TEXT, 2 },
	{ "LYRICS", "USLT", "", ID3_TEXT, 0 },
	{ "UNSYNCEDLYRICS", "USLT", "", ID3_TEXT, 0 },
	{ "UNSYNCED LYRICS", "USLT", "", ID3_TEXT, 0 },
	{ "BPM", "TBPM", "", ID3_INTEGER, 0 },
	{ "TEMPO", "TBPM", "", ID3_INTEGER, 0 },
	{ "INITIALKEY", "TKEY", "", ID3_KEY, 0 },
	{ "KEY", "TKEY", "", ID3_KEY, 0 },
	{ "LANGUAGE", "TLAN", "", ID3_LANGUAGE, 0 },
	{ "COPYRIGHT", "TCOP", "", ID3_TEXT, 0 },
	{ "LICENSE", "WCOP", "", ID3_URL, 0 },
	{ "LABEL", "TPUB", "", ID3_TEXT, 1 },
	{ "PUBLISHER", "TPUB", "", ID3_TEXT, 2 },
	{ "ORGANIZATION", "TPUB", "", ID3_TEXT, 3 },
	{ "ISRC", "TSRC", "", ID3_TEXT, 0 },
	{ "ENCODED-BY", "TENC", "", ID3_TEXT, 0 },
	{ "ENCODEDBY", "TENC", "", ID3_TEXT, 0 },
	{ "ENCODED_BY", "TENC", "", ID3_TEXT, 0 },
	{ "ENCODERSETTINGS", "TSSE", "", ID3_TEXT, 1 },
	{ "ENCODING", "TSSE", "", ID3_TEXT, 1 },
	{ "ENCODER", "TSSE", "", ID3_TEXT, 2 },
	{ "COMPILATION", "TCMP", "", ID3_FLAG, 0 },
	{ "ORIGINALARTIST", "TOPE", "", ID3_TEXT, 0 },
	{ "ORIGINALALBUM", "TOAL", "", ID3_TEXT, 0 },
	{ "ORIGINALFILENAME", "TOFN", "", ID3_TEXT, 0 },
	{ "WEBSITE", "WOAR", "", ID3_URL, 0 },
	{ "URL", "WXXX", "", ID3_URL, 0 },
	{ "MUSICBRAINZ_TRACKID", "UFID", "http://musicbrainz.org", ID3_UFID, 0 },
	/* as Picard spells them: it finds its own by the exact description */
	{ "WRITER", "TXXX", "Writer", ID3_USER, 0 },
	{ "LABELNO", "TXXX", "CATALOGNUMBER", ID3_USER, 0 },
	{ "UPC", "TXXX", "BARCODE", ID3_USER, 0 },
	{ "EAN", "TXXX", "BARCODE", ID3_USER, 0 },
	{ "MUSICBRAINZ_RELEASETRACKID", "TXXX", "MusicBrainz Release Track Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_ARTISTID", "TXXX", "MusicBrainz Artist Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_ALBUMID", "TXXX", "MusicBrainz Album Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_ALBUMARTISTID", "TXXX", "MusicBrainz Album Artist Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_RELEASEGROUPID", "TXXX", "MusicBrainz Release Group Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_WORKID", "TXXX", "MusicBrainz Work Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_DISCID", "TXXX", "MusicBrainz Disc Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_TRMID", "TXXX", "MusicBrainz TRM Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_ORIGINALALBUMID", "TXXX", "MusicBrainz Original Album Id", ID3_USER, 0 },
	{ "MUSICBRAINZ_ORIGINALARTISTID", "TXXX", "MusicBrainz Original Artist Id", ID3_USER, 0 },
	{ "RELEASETYPE", "TXXX", "MusicBrainz Album Type", ID3_USER, 0 },
	{ "MUSICBRAINZ_ALBUMTYPE", "TXXX", "MusicBrainz Album Type", ID3_USER, 0 },
	{ "RELEASESTATUS", "TXXX", "MusicBrainz Album Status", ID3_USER, 0 },
	{ "MUSICBRAINZ_ALBUMSTATUS", "TXXX", "MusicBrainz Album Status", ID3_USER, 0 },
	{ "RELEASECOUNTRY", "TXXX", "MusicBrainz Album Release Country", ID3_USER, 0 },
	{ "ACOUSTID_ID", "TXXX", "Acoustid Id", ID3_USER, 0 },
	{ "ACOUSTID_FINGERPRINT", "TXXX", "Acoustid Fingerprint", ID3_USER, 0 },
	{ "MUSICIP_PUID", "TXXX", "MusicIP PUID", ID3_USER, 0 },
	/* not text */
	{ "METADATA_BLOCK_PICTURE", "APIC", "", ID3_PICTURE, 0 },
	{ "COVERART", "APIC", "", ID3_PICTURE, 0 },
	{ "COVERARTMIME", "", "", ID3_DROP, 0 },
	{ "COVERARTTYPE", "", "", ID3_DROP, 0 },
	{ "COVERARTDESCRIPTION", "", "", ID3_DROP, 0 },
	{ "WAVEFORMATEXTENSIBLE_CHANNEL_MASK", "", "", ID3_DROP, 0 },
};
#define ID3_ROWS (sizeof id3_rows / sizeof *id3_rows)

/* -- The tag in memory -- */

/* One value of one frame. The values of a frame (of TXXX: of a description) are a list, in file
 * order, that starts at the entry that was there first. */
struct id3_entry {
	size_t frame;         /* in id3_order */
	struct id3_span desc; /* of TXXX, UFID; the role in IPLS */
	struct id3_span value;
	char own[8];         /* the value, where it is not in the comments (value.p is null) */
	uint32_t next, last; /* list of values; `last` only of the first. 0: none */
	bool first;          /* of its list */
	bool upper;          /* the description goes out in upper case */
};

struct id3_tag {
	struct id3_entry *entries; /* entry 0 is not used */
	size_t n;
	uint32_t head[ID3_TXXX]; /* frame -> its first entry; 0: none */
	uint32_t *users;         /* hash of TXXX description -> first entry; `slots` of them */
	uint32_t *values;        /* hash of (frame, description, value) -> entry */
	size_t slots;            /* a power of two, more than there can be entries */
	struct id3_span number[3], total[3], total_name[3]; /* for TRCK, TPOS, MVIN */
	struct id3_span date;                               /* what TYER was told by */
	int rank[ID3_TXXX + 1];                             /* the lowest that the file has; 0: none */
	unsigned licenses;                                  /* how many: WCOP is for one */
	bool artist;
	struct id3_picture *pictures;
	size_t n_pictures;
};

/* -- Text, as a tag writes it -- */

static void id3_put(struct id3_out *o, const void *p, size_t n)
{
	if (n && o->at < o->to && o->at + n > o->from) { /* nothing may be a null pointer */
		size_t skip = o->from > o->at ? (size_t)(o->from - o->at) : 0;
		size_t end = o->at + n > o->to ? (size_t)(o->to - o->at) : n;
		memcpy(o->dst + (o->at + skip - o->from), (const uint8_t *)p + skip, end - skip);
	}
	o->at += n;
}

/* A number in UTF-8's scheme, carried on to 36 bits as FLAC frame headers have it. Returns its length or 0. */
static size_t coded_number(const uint8_t *p, size_t n, uint64_t *v)
{
	size_t len = 0;
	while (len < 8 && p[0] & 0x80 >> len)
		len++;
	if (len == 1 || len == 8 || (len ? len : 1) > n)
		return 0;
	*v = len ? p[0] & (0x7f >> len) : p[0];
	for (size_t i = 1; i < len; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return 0;
		*v = *v << 6 | (p[i] & 0x3f);
	}
	return len ? len : 1;
}

/* One code point of UTF-8 (RFC 3629: no overlong form, no surrogate, up to U+10FFFF).
 * Returns its length, 0 if there is none. */
static size_t utf8_one(const uint8_t *p, size_t n, uint32_t *cp)
{
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
	uint64_t v;
	size_t len = coded_number(p, n, &v);
	if (len == 0 || len > 4 || v < least[len] || v > 0x10ffff || (v >= 0xd800 && v < 0xe000))
		return 0;
	*cp = (uint32_t)v;
	return len;
}

/* As above, but a maximal run of bytes that are no UTF-8 comes out as one U+FFFD. `n` is not 0. */
static size_t utf8_next(const uint8_t *p, size_t n, uint32_t *cp)
{
	size_t len = utf8_one(p, n, cp);
	if (len == 0) {
		uint32_t ignored;
		do
			len++;
		while (len < n && utf8_one(p + len, n - len, &ignored) == 0);
		*cp = 0xfffd;
	}
	return len;
}

static bool id3_ascii(struct id3_span s)
{
	for (size_t i = 0; i < s.n; i++)
		if ((uint8_t)s.p[i] >= 0x80)
			return false;
	return true;
}

/* How a string is written: as UTF-16, with its byte order mark, letters a to z in upper case. */
enum { ID3_WIDE = 1, ID3_MARK = 2, ID3_UPPER = 4 };

/* A string without terminator. */
static void id3_string(struct id3_out *o, struct id3_span s, int how)
{
	if (!(how & (ID3_WIDE | ID3_UPPER))) {
		id3_put(o, s.p, s.n);
		return;
	}
	if ((how & ID3_WIDE) && (how & ID3_MARK))
		id3_put(o, "\xff\xfe", 2);
	for (size_t i = 0; i < s.n;) {
		uint32_t cp = 0, low = 0;
		uint8_t u[4];
		i += utf8_next((const uint8_t *)s.p + i, s.n - i, &cp);
		if ((how & ID3_UPPER) && cp >= 'a' && cp <= 'z')
			cp -= 'a' - 'A';
		if (cp >= 0x10000) { /* a surrogate pair */
			low = 0xdc00 + (cp & 0x3ff);
			cp = 0xd800 + ((cp - 0x10000) >> 10);
		}
		u[0] = (uint8_t)cp;
		u[1] = (uint8_t)(cp >> 8);
		u[2] = (uint8_t)low;
		u[3] = (uint8_t)(low >> 8);
		id3_put(o, u, !(how & ID3_WIDE) ? 1 : low ? 4 : 2);
	}
}

static void id3_terminate(struct id3_out *o, int how) { id3_put(o, "\0", how & ID3_WIDE ? 2 : 1); }

/* -- Frames -- */

static struct id3_span id3_value(const struct id3_entry *e)
{
	struct id3_span own = { e->own, strlen(e->own) };
	return e->value.p ? e->value : own;
}

static const struct id3_entry *id3_next(const struct id3_tag *t, const struct id3_entry *e)
{
	return e->next ? &t->entries[e->next] : NULL;
}

static bool id3_is(const struct id3_entry *e, const char *frame) { return strcmp(id3_order[e->frame], frame) == 0; }

static const char *id3_separator(const struct id3_entry *e)
{
	if (id3_is(e, "TRCK") || id3_is(e, "TPOS") || id3_is(e, "MVIN"))
		return "/";
	return id3_is(e, "COMM") || id3_is(e, "USLT") ? "\n" : "; ";
}

/* All that follows the ten bytes of a frame's header. */
static void id3_body(struct id3_out *o, const struct id3_tag *t, const struct id3_entry *first, int how)
{
	const char *id = id3_order[first->frame];
	struct id3_span v = id3_value(first);
	if (id3_is(first, "UFID")) { /* owner, NUL, identifier */
		id3_put(o, first->desc.p, first->desc.n + 1);
		id3_put(o, v.p, v.n);
		return;
	}
	if (id[0] == 'W') { /* a URL is Latin-1 and ends with its frame */
		if (id3_is(first, "WXXX"))
			id3_put(o, "\0\0", 2); /* encoding, empty description */
		id3_put(o, v.p, v.n);
		return;
	}
	id3_put(o, how & ID3_WIDE ? "\1" : "\0", 1);
	if (id3_is(first, "COMM") || id3_is(first, "USLT")) { /* language, empty description */
		id3_put(o, "eng", 3);
		id3_string(o, (struct id3_span){ "", 0 }, how | ID3_MARK);
		id3_terminate(o, how);
	} else if (first->frame == ID3_TXXX) {
		id3_string(o, first->desc, how | ID3_MARK | (first->upper ? ID3_UPPER : 0));
		id3_terminate(o, how);
	}
	if (id3_is(first, "IPLS")) { /* role, name, role, name ... */
		for (const struct id3_entry *e = first; e; e = id3_next(t, e)) {
			id3_string(o, e->desc, how | ID3_MARK);
			id3_terminate(o, how);
			id3_string(o, id3_value(e), how | ID3_MARK);
			id3_terminate(o, how);
		}
		return;
	}
	if (how & ID3_WIDE)
		id3_put(o, "\xff\xfe", 2);
	if (id3_is(first, "TCON") && v.n && v.p[0] == '(')
		id3_string(o, (struct id3_span){ "(", 1 }, how); /* one "(" would begin an ID3v1 number */
	for (const struct id3_entry *e = first; e; e = id3_next(t, e)) {
		if (e != first)
			id3_string(o, (struct id3_span){ id3_separator(e), strlen(id3_separator(e)) }, how);
		id3_string(o, id3_value(e), how);
	}
}

static void id3_frame_header(struct id3_out *o, const char *id, uint64_t size)
{
	uint8_t h[10] = { 0 };
	memcpy(h, id, 4);
	put_u32(h + 4, (uint32_t)size);
	id3_put(o, h, sizeof h);
}

static void id3_frame(struct id3_out *o, const struct id3_tag *t, const struct id3_entry *first)
{
	struct id3_out count = { 0 };
	int how = 0;
	for (const struct id3_entry *e = first; e; e = id3_next(t, e))
		if (!id3_ascii(e->desc) || !id3_ascii(id3_value(e)))
			how = ID3_WIDE;
	id3_body(&count, t, first, how);
	id3_frame_header(o, id3_order[first->frame], count.at);
	id3_body(o, t, first, how);
}

/* -- Adding a value: once to each frame, found by hash -- */

/* The code point at *i as it goes out, a to z in upper case; moves *i behind it. */
static uint32_t id3_upper(struct id3_span s, size_t *i)
{
	uint32_t cp = 0;
	*i += utf8_next((const uint8_t *)s.p + *i, s.n - *i, &cp);
	return cp >= 'a' && cp <= 'z' ? cp - ('a' - 'A') : cp;
}

/* Of what a reader will see: bad bytes differ in the file, not in the tag. */
static bool id3_same_desc(struct id3_span a, struct id3_span b)
{
	size_t i = 0, j = 0;
	while (i < a.n && j < b.n)
		if (id3_upper(a, &i) != id3_upper(b, &j))
			return false;
	return i == a.n && j == b.n;
}

static bool id3_same_span(struct id3_span a, struct id3_span b)
{
	return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

/* The start differs from call to call, by where the stack is, so that nobody can choose names that
 * all fall into one slot. What is written does not depend on it. */
static uint64_t id3_hash(const struct id3_tag *t, const struct id3_entry *e, bool with_value)
{
	uint64_t h = (UINT64_C(0xcbf29ce484222325) ^ (uintptr_t)t) * UINT64_C(0x9e3779b97f4a7c15) + e->frame;
	struct id3_span v = id3_value(e);
	h ^= h >> 29;
	for (size_t i = 0; i < e->desc.n;) {
		h = (h ^ id3_upper(e->desc, &i)) * UINT64_C(0x100000001b3);
		h ^= h >> 31;
	}
	for (size_t i = 0; with_value && i < v.n; i++)
		h = (h ^ (uint8_t)v.p[i]) * UINT64_C(0x100000001b3);
	return h ^ h >> 32;
}

static bool id3_same(const struct id3_entry *a, const struct id3_entry *b, bool with_value)
{
	return a->frame == b->frame && id3_same_desc(a->desc, b->desc) &&
	       (!with_value || id3_same_span(id3_value(a), id3_value(b)));
}

/* The slot in which an entry like `e` is, or would be. The table is never full. */
static uint32_t *id3_slot(const struct id3_tag *t, uint32_t *table, const struct id3_entry *e, bool with_value)
{
	size_t i = id3_hash(t, e, with_value) & (t->slots - 1);
	while (table[i] && !id3_same(&t->entries[table[i]], e, with_value))
		i = (i + 1) & (t->slots - 1);
	return &table[i];
}

/* Adds a value to its frame, unless it is there already. There is room for three entries a comment,
 * and no comment makes more. */
static void id3_add_entry(struct id3_tag *t, struct id3_entry e)
{
	bool number = *id3_separator(&e) == '/'; /* in 3/3 both count */
	uint32_t *value = id3_slot(t, t->values, &e, true), *head = &t->head[e.frame], at = (uint32_t)t->n;
	if (*value && !number)
		return;
	if (e.frame == ID3_TXXX)
		head = id3_slot(t, t->users, &e, false);
	*value = at;
	e.first = *head == 0;
	e.last = at;
	t->entries[t->n++] = e;
	if (e.first) {
		*head = at;
	} else {
		t->entries[t->entries[*head].last].next = at;
		t->entries[*head].last = at;
	}
}

static size_t id3_index(const char *frame)
{
	size_t i = 0;
	while (strcmp(id3_order[i], frame) != 0)
		i++;
	return i;
}

static void id3_add(struct id3_tag *t, const char *frame, const char *desc, struct id3_span value)
{
	struct id3_entry e = { .frame = id3_index(frame), .desc = { desc, strlen(desc) }, .value = value };
	id3_add_entry(t, e);
}

/* A value made of `n` (below 8) characters at `p`. */
static void id3_add_made(struct id3_tag *t, const char *frame, const char *p, size_t n)
{
	struct id3_entry e = { .frame = id3_index(frame), .desc = { "", 0 } };
	memcpy(e.own, p, n);
	id3_add_entry(t, e);
}

static void id3_add_user(struct id3_tag *t, struct id3_span name, struct id3_span value)
{
	struct id3_entry e = { .frame = ID3_TXXX, .desc = name, .value = value, .upper = true };
	id3_add_entry(t, e);
}

/* -- Values that a frame has a form for -- */

static bool digits_at(struct id3_span v, size_t at, size_t n)
{
	if (at + n > v.n)
		return false;
	for (size_t i = at; i < at + n; i++)
		if (v.p[i] < '0' || v.p[i] > '9')
			return false;
	return true;
}

static int two_digits(const char *p) { return (p[0] - '0') * 10 + p[1] - '0'; }

/* The first run of exactly four digits, or null. */
static const char *id3_find_year(struct id3_span v)
{
	for (size_t i = 0, run = 0; i <= v.n; i++) {
		if (i < v.n && digits_at(v, i, 1)) {
			run++;
			continue;
		}
		if (run == 4)
			return v.p + i - 4;
		run = 0;
	}
	return NULL;
}

static bool id3_year(struct id3_span v, char own[11])
{
	const char *year = id3_find_year(v);
	snprintf(own, 11, "%.4s", year ? year : "");
	return year;
}

/* YYYY, YYYY-MM-DD, YYYY-MM-DDTHH:MM (or a space for the T): all of it goes into TYER, TDAT (day,
 * then month) and TIME. Anything else keeps its whole value in TXXX too. */
static void id3_date(struct id3_tag *t, struct id3_span name, struct id3_span v)
{
	const char *year = id3_find_year(v);
	bool day = v.n >= 10 && digits_at(v, 0, 4) && v.p[4] == '-' && digits_at(v, 5, 2) && v.p[7] == '-' &&
	           digits_at(v, 8, 2) && two_digits(v.p + 5) >= 1 && two_digits(v.p + 5) <= 12 &&
	           two_digits(v.p + 8) >= 1 && two_digits(v.p + 8) <= 31;
	bool time = day && v.n >= 16 && (v.p[10] == 'T' || v.p[10] == ' ') && digits_at(v, 11, 2) && v.p[13] == ':' &&
	            digits_at(v, 14, 2) && two_digits(v.p + 11) < 24 && two_digits(v.p + 14) < 60;
	if (t->head[id3_index("TYER")]) { /* there is a date already */
		if (!id3_same_span(t->date, v))
			id3_add_user(t, name, v);
		return;
	}
	if (year) {
		id3_add_made(t, "TYER", year, 4);
		t->date = v;
	}
	if (day) {
		char ddmm[4] = { v.p[8], v.p[9], v.p[5], v.p[6] };
		id3_add_made(t, "TDAT", ddmm, 4);
	}
	if (time) {
		char hhmm[4] = { v.p[11], v.p[12], v.p[14], v.p[15] };
		id3_add_made(t, "TIME", hhmm, 4);
	}
	if (v.n != (time ? 16u : day ? 10u : year ? 4u : 0u))
		id3_add_user(t, name, v);
}

/* A number such as 128 or 127.6, at most 9 digits before the point: rounded into `own`. */
static bool id3_integer(struct id3_span v, char own[11])
{
	size_t n = 0;
	unsigned long i = 0;
	for (; n < v.n && n < 9 && digits_at(v, n, 1); n++)
		i = i * 10 + (unsigned long)(v.p[n] - '0');
	if (n == 0)
		return false;
	if (n + 1 < v.n && v.p[n] == '.' && digits_at(v, n + 1, v.n - n - 1)) {
		i += v.p[n + 1] >= '5';
		n = v.n;
	}
	snprintf(own, 11, "%lu", i);
	return n == v.n && strlen(own) < 8;
}

static bool id3_url(struct id3_span v)
{
	bool scheme = false;
	for (size_t i = 0; i < v.n; i++) {
		if (v.p[i] <= ' ' || v.p[i] > '~')
			return false;
		scheme |= i > 0 && i + 3 < v.n && memcmp(v.p + i, "://", 3) == 0;
	}
	return scheme;
}

/* Whether the value may stand alone in a frame of this kind. */
static bool id3_valid(enum id3_how how, struct id3_span v)
{
	bool letters = v.n == 3;
	for (size_t i = 0; i < v.n; i++)
		letters &= (v.p[i] | 32) >= 'a' && (v.p[i] | 32) <= 'z';
	switch (how) {
	case ID3_KEY:
		return v.n <= 3 && id3_ascii(v);
	case ID3_LANGUAGE:
		return letters;
	case ID3_FLAG:
		return v.n == 1 && v.p[0] == '1';
	case ID3_URL:
		return id3_url(v);
	case ID3_UFID:
		return v.n <= 64 && id3_ascii(v);
	default:
		return true;
	}
}

/* "Name (role)" -> IPLS; without a role -> TXXX, or TPE1 where there is no ARTIST. */
static void id3_performer(struct id3_tag *t, struct id3_span name, struct id3_span v)
{
	size_t open = v.n;
	int depth = 0;
	if (v.n && v.p[v.n - 1] == ')')
		do { /* back to the parenthesis that belongs to the last one */
			open--;
			depth += v.p[open] == ')' ? 1 : v.p[open] == '(' ? -1 : 0;
		} while (open > 0 && depth > 0);
	open = depth == 0 ? open + 1 : v.n;
	if (open > 2 && open < v.n - 1 && v.p[open - 2] == ' ') {
		struct id3_entry e = { .frame = id3_index("IPLS"),
			               .desc = { v.p + open, v.n - 1 - open },
			               .value = { v.p, open - 2 } };
		id3_add_entry(t, e);
		v.n = open - 2;
	} else if (t->artist) {
		id3_add_user(t, name, v);
	}
	if (!t->artist)
		id3_add(t, "TPE1", "", v);
}

/* The n and m of n/m: the first of each counts, another one is kept as TXXX. */
static void id3_number(struct id3_tag *t, const struct id3_row *row, struct id3_span name, struct id3_span v)
{
	size_t i = row->frame[0] == 'M' ? 2 : row->frame[1] == 'P' ? 1 : 0; /* MVIN, TPOS, TRCK */
	struct id3_span *slot = row->how == ID3_TOTAL ? &t->total[i] : &t->number[i];
	const char *slash = memchr(v.p, '/', v.n);
	if (slash && (row->how == ID3_TOTAL || memchr(slash + 1, '/', (size_t)(v.p + v.n - slash - 1)))) {
		id3_add_user(t, name, v); /* would make n/m/m */
	} else if (slot->n == 0) {
		*slot = v;
		t->total_name[i] = row->how == ID3_TOTAL ? name : t->total_name[i];
	} else if (!id3_same_span(*slot, v)) {
		id3_add_user(t, name, v);
	}
}

/* Puts n and m together, once all comments are known; never n/m/m. */
static void id3_finish_number(struct id3_tag *t, size_t i, const char *frame)
{
	struct id3_span n = t->number[i], m = t->total[i], name = t->total_name[i];
	const char *slash = n.n ? memchr(n.p, '/', n.n) : NULL;
	if (n.n)
		id3_add(t, frame, "", n);
	if (m.n == 0)
		return;
	if (n.n && !slash)
		id3_add(t, frame, "", m);
	else if (!slash || (size_t)(n.p + n.n - slash - 1) != m.n || memcmp(slash + 1, m.p, m.n) != 0)
		id3_add_user(t, name, m);
}

/* -- Comments -- */

/* Takes one comment to its frame. */
static void id3_route(struct id3_tag *t, const struct id3_row *row, struct id3_span name, struct id3_span v)
{
	size_t frame = row ? id3_index(row->frame) : ID3_TXXX;
	bool taken = frame < ID3_TXXX && t->head[frame];
	bool there = taken && id3_same_span(id3_value(&t->entries[t->head[frame]]), v);
	char number[11];
	if (!row || (row->rank && row->rank != t->rank[frame])) {
		id3_add_user(t, name, v);
		return;
	}
	switch (row->how) {
	case ID3_TEXT:
	case ID3_USER:
		id3_add(t, row->frame, row->arg, v);
		break;
	case ID3_ROLE:
		id3_add(t, "IPLS", row->arg, v);
		break;
	case ID3_GROUP: /* iTunes of old reads the one, of today the other */
		id3_add(t, "TIT1", "", v);
		id3_add(t, "GRP1", "", v);
		break;
	case ID3_NUMBER:
	case ID3_TOTAL:
		id3_number(t, row, name, v);
		break;
	case ID3_DATE:
		id3_date(t, name, v);
		break;
	case ID3_YEAR:
	case ID3_INTEGER:
		if (!taken && (row->how == ID3_YEAR ? id3_year(v, number) : id3_integer(v, number))) {
			id3_add_made(t, row->frame, number, strlen(number));
			there = strlen(number) == v.n;
		}
		if (!there)
			id3_add_user(t, name, v);
		break;
	case ID3_PERFORMER:
		id3_performer(t, name, v);
		break;
	default: /* one valid value */
		if (!taken && id3_valid(row->how, v) && (strcmp(row->frame, "WCOP") != 0 || t->licenses == 1))
			id3_add(t, row->frame, row->arg, v);
		else if (!there)
			id3_add_user(t, name, v);
	}
}

static const struct id3_row *id3_find_row(struct id3_span name)
{
	for (size_t i = 0; i < ID3_ROWS; i++)
		if (((name.p[0] ^ id3_rows[i].name[0]) & 0xdf) == 0 &&
		    strncasecmp(name.p, id3_rows[i].name, name.n) == 0 && id3_rows[i].name[name.n] == 0)
			return &id3_rows[i];
	return NULL;
}

static struct id3_span id3_until_nul(struct id3_span s)
{
	const char *nul = s.n ? memchr(s.p, 0, s.n) : NULL;
	return (struct id3_span){ s.p, nul ? (size_t)(nul - s.p) : s.n };
}

/* A walk over the comments of a VORBIS_COMMENT block (RFC 9639, 8.6; lengths are little-endian). */
struct id3_walk {
	const uint8_t *p, *end;
	uint32_t left;
	bool broken;
};

static void id3_walk_start(struct id3_walk *w, const struct id3_source *s)
{
	const uint8_t *p = s->comments, *end;
	*w = (struct id3_walk){ 0 };
	if (s->comments_len == 0)
		return;
	end = p + s->comments_len;
	w->p = w->end = end;
	if (s->comments_len < 8 || get_le32(p) > s->comments_len - 8) {
		w->broken = true;
		return;
	}
	p += 4 + get_le32(p); /* the vendor string */
	w->left = get_le32(p);
	w->p = p + 4;
}

/* The next comment that has a name and a value, with its row (or null). False at the end. */
static bool id3_walk_next(struct id3_walk *w, const struct id3_row **row, struct id3_span *name, struct id3_span *value)
{
	while (w->left > 0) {
		const char *text, *equals;
		size_t len;
		w->left--;
		if (w->end - w->p < 4 || get_le32(w->p) > (size_t)(w->end - w->p - 4)) {
			w->broken = true;
			w->left = 0;
			return false;
		}
		len = get_le32(w->p);
		text = (const char *)w->p + 4;
		w->p += 4 + len;
		equals = len ? memchr(text, '=', len) : NULL;
		if (!equals || equals == text)
			continue;
		*name = id3_until_nul((struct id3_span){ text, (size_t)(equals - text) });
		*value = id3_until_nul((struct id3_span){ equals + 1, (size_t)(text + len - equals - 1) });
		if (name->n == 0)
			continue;
		*row = id3_find_row(*name);
		if (value->n && !(*row && (*row)->how == ID3_DROP))
			return true;
	}
	return false;
}

/* -- Pictures -- */

/* The six bits of a character of base64 (RFC 4648), or -1. */
static int base64_value(char c)
{
	if (c >= 'A' && c <= 'Z')
		return c - 'A';
	if (c >= 'a' && c <= 'z')
		return c - 'a' + 26;
	if (c >= '0' && c <= '9')
		return c - '0' + 52;
	return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decoded bytes `from` to `from + n` of base64 text; what is no base64 counts as zero bits. */
static void base64_bytes(const char *text, size_t len, size_t from, uint8_t *dst, size_t n)
{
	for (size_t i = from; i < from + n;) {
		size_t quad = i / 3 * 4;
		uint32_t bits = 0;
		for (size_t j = quad; j < quad + 4; j++) {
			int v = j < len ? base64_value(text[j]) : 0;
			bits = bits << 6 | (v > 0 ? (uint32_t)v : 0);
		}
		do
			*dst++ = (uint8_t)(bits >> (16 - 8 * (i % 3)));
		while (++i % 3 && i < from + n);
	}
}

/* How many bytes base64 text holds; 0 if it is none. */
static size_t base64_size(const char *text, size_t len)
{
	while (len && text[len - 1] == '=')
		len--;
	for (size_t i = 0; i < len; i++)
		if (base64_value(text[i]) < 0)
			return 0;
	return len % 4 == 1 ? 0 : len / 4 * 3 + (len % 4 ? len % 4 - 1 : 0);
}

/* The MIME type by the first 12 bytes of data. */
static void id3_sniff(char mime[64], const uint8_t p[12])
{
	const char *type = "image/";
	if (memcmp(p, "\xff\xd8\xff", 3) == 0)
		type = "image/jpeg";
	else if (memcmp(p, "\x89PNG", 4) == 0)
		type = "image/png";
	else if (memcmp(p, "GIF8", 4) == 0)
		type = "image/gif";
	else if (memcmp(p, "RIFF", 4) == 0 && memcmp(p + 8, "WEBP", 4) == 0)
		type = "image/webp";
	memcpy(mime, type, strlen(type) + 1);
}

/* A picture's MIME type as APIC has it: printable Latin-1, in the spelling that readers know. */
static void id3_mime(char mime[64], const char *p, size_t n)
{
	size_t i;
	for (i = 0; i < n && i < 63 && p[i] > ' ' && p[i] <= '~'; i++)
		mime[i] = p[i];
	mime[i] = 0;
	if (strcasecmp(mime, "image/jpg") == 0)
		memcpy(mime, "image/jpeg", 11);
}

/* Puts `n` bytes at `at` of something to `dst`. 0, 1 where it has fewer, or a negative errno. */
typedef int (*id3_get)(void *arg, uint64_t at, uint8_t *dst, size_t n);

/* Takes apart a PICTURE block (RFC 9639, 8.8) of `len` bytes, but for its data; of the description `most` bytes
 * at most. Returns where in the block the data are, 0 if it makes no sense, or a negative errno; the description
 * is the caller's to free if there are data. */
static int64_t id3_picture_parse(struct id3_picture *pic, id3_get get, void *arg, uint64_t len, size_t most)
{
	uint8_t b[64] = { 0 };
	uint64_t mime, desc, at;
	int rc = len < 32 ? 1 : get(arg, 0, b, 8);
	pic->type = get_u32(b);
	mime = get_u32(b + 4);
	if (rc || mime > len - 32 || (rc = get(arg, 8, b, min_u64(mime, sizeof b))) != 0)
		return rc < 0 ? rc : 0;
	id3_mime(pic->mime, (const char *)b, min_u64(mime, sizeof b));
	rc = get(arg, 8 + mime, b, 4);
	desc = get_u32(b);
	if (rc || desc > len - 32 - mime)
		return rc < 0 ? rc : 0;
	at = 32 + mime + desc;
	pic->description_len = min_u64(desc, most);
	pic->cut = desc > most;
	pic->description = malloc(pic->description_len + 1);
	if (!pic->description)
		return -ENOMEM;
	rc = get(arg, 12 + mime, (uint8_t *)pic->description, pic->description_len);
	if (rc == 0)
		rc = get(arg, at - 4, b, 4);
	pic->size = get_u32(b);
	if (rc == 0 && pic->size <= len - at && !pic->mime[0]) {
		memset(b, 0, sizeof b);
		rc = get(arg, at, b, min_u64(12, pic->size));
		id3_sniff(pic->mime, b);
	}
	if (rc == 0 && pic->size <= len - at)
		return (int64_t)at;
	free(pic->description);
	pic->description = NULL;
	return rc < 0 ? rc : 0;
}

static int base64_get(void *arg, uint64_t at, uint8_t *dst, size_t n)
{
	const struct id3_span *text = arg;
	base64_bytes(text->p, text->n, (size_t)at, dst, n);
	return 0;
}

/* A METADATA_BLOCK_PICTURE or COVERART comment as a picture. The data stay base64; a description is decoded
 * into memory of its own. False: not a picture, or no memory. */
static bool id3_comment_picture(const struct id3_row *row, struct id3_span v, struct id3_picture *pic)
{
	size_t size = base64_size(v.p, v.n);
	uint8_t first[12] = { 0 };
	int64_t at;
	*pic = (struct id3_picture){ .type = 3, .base64 = v.p, .base64_len = v.n, .size = size };
	if (row->name[0] == 'M') {
		at = id3_picture_parse(pic, base64_get, &v, size, ID3_MAX_DESCRIPTION);
		pic->skip = at > 0 ? (size_t)at : 0;
		return at > 0;
	}
	base64_bytes(v.p, v.n, 0, first, min_u64(12, size));
	id3_sniff(pic->mime, first);
	return size > 0;
}

/* A picture's description, up to a NUL. */
static struct id3_span id3_description(const struct id3_picture *p)
{
	return id3_until_nul((struct id3_span){ p->description, p->description_len });
}

/* What makes a description differ from another one; nothing for the first. */
static struct id3_span id3_copy_suffix(const struct id3_picture *p, char own[16])
{
	int n = p->copy > 1 ? snprintf(own, 16, " (%u)", p->copy) : 0;
	return (struct id3_span){ own, (size_t)n };
}

/* The strings of an APIC in front of its data. An empty description has to be in encoding 0:
 * iTunes and Finder lose the picture otherwise. */
static void id3_picture_head(struct id3_out *o, const struct id3_picture *p)
{
	struct id3_span d = id3_description(p);
	int how = id3_ascii(d) ? 0 : ID3_WIDE;
	char own[16];
	uint8_t type = p->type > 20 ? 0 : (uint8_t)p->type;
	id3_put(o, how ? "\1" : "\0", 1);
	id3_put(o, p->mime, strlen(p->mime) + 1);
	id3_put(o, &type, 1);
	id3_string(o, d, how | ID3_MARK);
	id3_string(o, id3_copy_suffix(p, own), how);
	id3_terminate(o, how);
}

static uint64_t id3_picture_size(const struct id3_picture *p)
{
	struct id3_out count = { 0 };
	id3_picture_head(&count, p);
	return 10 + count.at + p->size;
}

static int id3_picture_write(struct id3_out *o, const struct id3_source *s, const struct id3_picture *p)
{
	uint64_t from, to;
	int rc = 0;
	id3_frame_header(o, "APIC", id3_picture_size(p) - 10);
	id3_picture_head(o, p);
	from = max_u64(o->from, o->at);
	to = min_u64(o->to, o->at + p->size);
	if (from < to) {
		uint8_t *dst = o->dst + (from - o->from);
		if (p->base64)
			base64_bytes(p->base64, p->base64_len, p->skip + (size_t)(from - o->at), dst,
			             (size_t)(to - from));
		else
			rc = s->fetch(s->arg, p->at + (from - o->at), dst, (size_t)(to - from));
	}
	o->at += p->size;
	return rc;
}

/* Goes on with hash `h` over the code points of `s`. */
static uint64_t id3_text_hash(uint64_t h, struct id3_span s)
{
	for (size_t i = 0; i < s.n;) {
		uint32_t cp = 0;
		i += utf8_next((const uint8_t *)s.p + i, s.n - i, &cp);
		h = (h ^ cp) * UINT64_C(0x100000001b3);
	}
	return h;
}

/* Numbers the pictures with the same description, so that each APIC's differs: also from one that is
 * called "x (2)" in the file. Descriptions are told apart by hash: if two different ones ever have the
 * same, one gets a number that it did not need. */
static void id3_number_copies(struct id3_picture *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		char own[16];
		size_t j;
		p[i].copy = 1;
		p[i].text = id3_text_hash(UINT64_C(0xcbf29ce484222325), id3_description(&p[i]));
		for (j = i; j-- > 0;)
			if (p[j].text == p[i].text) {
				p[i].copy = p[j].copy + 1;
				break;
			}
		do {
			p[i].shown = id3_text_hash(p[i].text, id3_copy_suffix(&p[i], own));
			for (j = 0; j < i && p[j].shown != p[i].shown; j++)
				;
			p[i].copy += j < i;
		} while (j < i);
	}
}

/* -- The whole tag -- */

/* Reads all comments into `t`, whose tables this makes. 0 or -ENOMEM; `t` is to be freed either way. */
static int id3_read(struct id3_tag *t, struct id3_source *s)
{
	struct id3_walk w;
	const struct id3_row *row;
	struct id3_span name, v;
	size_t n = 0, pictures = 0, artist = id3_index("TPE1"), license = id3_index("WCOP");
	for (id3_walk_start(&w, s); n < ID3_MAX_COMMENTS && id3_walk_next(&w, &row, &name, &v); n++) {
		size_t frame = row && row->how != ID3_PICTURE ? id3_index(row->frame) : ID3_TXXX;
		if (row && row->rank && (!t->rank[frame] || row->rank < t->rank[frame]))
			t->rank[frame] = row->rank;
		t->artist |= frame == artist;
		t->licenses += frame == license;
		pictures += row && row->how == ID3_PICTURE;
	}
	s->broken = w.broken || w.left > 0;
	for (t->slots = 16; t->slots < 6 * n + 8; t->slots *= 2)
		;
	t->n_pictures = s->n_pictures;
	t->entries = malloc((3 * n + 8) * sizeof *t->entries);
	t->users = calloc(t->slots, sizeof *t->users);
	t->values = calloc(t->slots, sizeof *t->values);
	t->pictures = malloc((s->n_pictures + pictures + 1) * sizeof *t->pictures);
	if (!t->entries || !t->users || !t->values || !t->pictures)
		return -ENOMEM;
	t->n = 1;
	if (s->n_pictures)
		memcpy(t->pictures, s->pictures, s->n_pictures * sizeof *t->pictures);
	id3_walk_start(&w, s);
	for (size_t i = 0; i < n && id3_walk_next(&w, &row, &name, &v); i++) {
		if (row && row->how == ID3_PICTURE) {
			if (t->n_pictures < ID3_MAX_PICTURES &&
			    id3_comment_picture(row, v, &t->pictures[t->n_pictures]))
				s->broken |= t->pictures[t->n_pictures++].cut;
			else
				s->broken = true;
		} else {
			id3_route(t, row, name, v);
		}
	}
	id3_finish_number(t, 0, "TRCK");
	id3_finish_number(t, 1, "TPOS");
	id3_finish_number(t, 2, "MVIN");
	id3_number_copies(t->pictures, t->n_pictures);
	return 0;
}

static void id3_free(struct id3_tag *t, const struct id3_source *s)
{
	for (size_t i = s->n_pictures; t->pictures && i < t->n_pictures; i++)
		free(t->pictures[i].description); /* those out of comments are ours */
	free(t->entries);
	free(t->users);
	free(t->values);
	free(t->pictures);
}

/* Leaves out the largest pictures until the tag fits, `text` being the bytes of its other frames. Returns the
 * bytes of the pictures' frames. */
static uint64_t id3_pictures(struct id3_tag *t, struct id3_source *s, uint64_t text)
{
	uint64_t size = 0;
	for (size_t i = 0; i < t->n_pictures; i++)
		size += id3_picture_size(&t->pictures[i]);
	while (text + size + ID3_PADDING + 1 > ID3_MAX) {
		struct id3_picture *largest = NULL;
		for (size_t i = 0; i < t->n_pictures; i++)
			if (!t->pictures[i].out && (!largest || t->pictures[i].size > largest->size))
				largest = &t->pictures[i];
		if (!largest)
			break;
		s->too_large = largest->out = true;
		size -= id3_picture_size(largest);
	}
	return size;
}

static void id3_text_frames(struct id3_out *o, const struct id3_tag *t)
{
	for (size_t f = 0; f < ID3_TXXX; f++)
		if (t->head[f])
			id3_frame(o, t, &t->entries[t->head[f]]);
	for (size_t i = 1; i < t->n; i++)
		if (t->entries[i].first && t->entries[i].frame == ID3_TXXX)
			id3_frame(o, t, &t->entries[i]);
}

/* Writes the tag of `s` through `o`; o->at is then its size, always even, or 0 where there is
 * nothing to tell. Returns 0 or a negative errno: -ENOMEM, or what fetch said. */
static int id3_write(struct id3_source *s, struct id3_out *o)
{
	struct id3_tag t = { 0 };
	struct id3_out text = { 0 };
	uint64_t size, pad;
	uint8_t h[10] = { 'I', 'D', '3', 3, 0, 0 };
	int rc = id3_read(&t, s);
	if (rc == 0) {
		id3_text_frames(&text, &t);
		size = text.at + id3_pictures(&t, s, text.at);
		if (size > 0 && size + ID3_PADDING < ID3_MAX) {
			pad = ID3_PADDING + size % 2;
			for (int i = 0; i < 4; i++)
				h[6 + i] = (uint8_t)((size + pad) >> (7 * (3 - i)) & 0x7f);
			id3_put(o, h, sizeof h);
			id3_text_frames(o, &t);
			for (int others = 0; others < 2; others++) /* front covers come first */
				for (size_t i = 0; i < t.n_pictures && rc == 0; i++)
					if (!t.pictures[i].out && (t.pictures[i].type != 3) == others)
						rc = id3_picture_write(o, s, &t.pictures[i]);
			id3_put(o, "\0\0\0\0\0\0\0\0\0\0", (size_t)pad);
		}
	}
	id3_free(&t, s);
	return rc;
}

/* ---- FLAC METADATA ---------------------------------------------------------------------------- */

/* A window over a file, for those who look at many small places of it. Read with pread, never
 * mapped: a file that is cut short under a map is SIGBUS. */
struct reader {
	int fd;
	off_t at; /* the window holds bytes at .. at + n of the file */
	size_t n;
	size_t room; /* of buf */
	uint8_t *buf;
	int error; /* negative errno of the last failed read, 0: none */
};

/* Fills `p` as far as the file goes. Returns the bytes read or a negative errno. */
static ssize_t read_at(int fd, void *p, size_t n, off_t at)
{
	size_t done = 0;
	while (done < n) {
		ssize_t got = pread(fd, (char *)p + done, n - done, at + (off_t)done);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			break;
		done += (size_t)got;
	}
	return (ssize_t)done;
}

/* Just `n` bytes. 0, 1 where the file has fewer, or a negative errno. */
static int read_exactly(int fd, void *p, size_t n, off_t at)
{
	ssize_t got = read_at(fd, p, n, at);
	return got < 0 ? (int)got : got < (ssize_t)n;
}

/* The bytes of the file from `at` that the window has, read anew if it has fewer than `want` (at
 * most its room). *got is how many; fewer than wanted only at the file's end or on error. */
static const uint8_t *reader_at(struct reader *r, off_t at, size_t want, size_t *got)
{
	if (at < r->at || at + (off_t)want > r->at + (off_t)r->n) {
		ssize_t n = read_at(r->fd, r->buf, r->room, at);
		r->error = n < 0 ? (int)n : 0;
		r->at = at;
		r->n = n < 0 ? 0 : (size_t)n;
	}
	*got = r->n - (size_t)(at - r->at);
	return r->buf + (at - r->at);
}

/* Exactly `n` (at most the room) bytes, or null. */
static const uint8_t *reader_need(struct reader *r, off_t at, size_t n)
{
	size_t got;
	const uint8_t *p = reader_at(r, at, n, &got);
	return got >= n ? p : NULL;
}

/* Copies `n` bytes at `at` to `dst`, without the window where they are more than it holds. 0, 1 where the file
 * has fewer, or a negative errno. */
static int reader_copy(struct reader *r, off_t at, uint8_t *dst, size_t n)
{
	const uint8_t *p;
	if (n > r->room)
		return read_exactly(r->fd, dst, n, at);
	p = reader_need(r, at, n);
	if (!p)
		return r->error ? r->error : 1;
	memcpy(dst, p, n);
	return 0;
}

/* A place in the source. */
struct extent {
	off_t at;
	uint32_t len;
};

/* What is needed to find and decode the sound (RFC 9639, 8.2). */
struct stream {
	int fd; /* not owned */
	uint32_t rate;
	unsigned channels;
	unsigned bits;                 /* of a sample */
	unsigned bytes;                /* of a sample in AIFF */
	uint64_t samples;              /* sample frames; 0 in STREAMINFO: not said */
	uint32_t min_block, max_block; /* sample frames of a FLAC frame */
	uint32_t max_frame;            /* bytes of a FLAC frame; 0: not said. If it lies, there is no jump */
	off_t audio, end;              /* where the FLAC frames are: first byte, end of file */
	struct extent seektable;
	uint8_t info[34]; /* STREAMINFO as it is */
	/* how FLAC frames are numbered; see stream_learn */
	bool variable_bit; /* the blocking strategy bit of each header */
	uint32_t fixed;    /* block size by which frame numbers count; 0: headers count samples */

	bool any_form; /* while counting: frames of other channels or depth count, too */
	bool little;   /* the AIFF wants the sound little-endian */
};

/* What the metadata blocks of a FLAC file say. */
struct track {
	struct stream stream;
	uint8_t *comments; /* content of the VORBIS_COMMENT block; owned */
	size_t comments_len;
	struct id3_picture *pictures; /* owned, with their descriptions */
	size_t n_pictures;
	struct extent *chunks; /* content of the APPLICATION blocks "aiff" behind their id; owned */
	size_t n_chunks;
	size_t descriptions; /* bytes of picture descriptions held */
	bool large;          /* it holds large_comments */
	bool broken;         /* a block's content is not what it should be; the sound can be read */
	const char *why;     /* what is wrong with the file, for the log */
};

enum { FLAC_STREAMINFO, FLAC_PADDING, FLAC_APPLICATION, FLAC_SEEKTABLE, FLAC_COMMENT, FLAC_CUESHEET, FLAC_PICTURE };

/* Held by the one track in memory whose comments are large: with all that is made of them they may take some
 * 40 MB, and many workers may meet such files at once. Nothing else waits for it. */
static pthread_mutex_t large_comments = PTHREAD_MUTEX_INITIALIZER;

static void track_free(struct track *t)
{
	for (size_t i = 0; i < t->n_pictures; i++)
		free(t->pictures[i].description);
	free(t->pictures);
	free(t->comments);
	free(t->chunks);
	if (t->large)
		pthread_mutex_unlock(&large_comments);
}

/* Bytes of a sample frame in AIFF. */
static uint32_t stream_frame_bytes(const struct stream *s) { return s->channels * s->bytes; }

static int read_streaminfo(struct track *t, const uint8_t *p)
{
	struct stream *s = &t->stream;
	memcpy(s->info, p, sizeof s->info);
	s->min_block = get_u16(p);
	s->max_block = get_u16(p + 2);
	s->max_frame = get_u24(p + 7);
	s->rate = get_u24(p + 10) >> 4;
	s->channels = (p[12] >> 1 & 7) + 1;
	s->bits = ((unsigned)(p[12] & 1) << 4 | p[13] >> 4) + 1;
	s->bytes = (s->bits + 7) / 8;
	s->samples = (uint64_t)(p[13] & 15) << 32 | get_u32(p + 14);
	if (s->bits < 4) {
		t->why = "STREAMINFO makes no sense";
		return -EIO;
	}
	if (s->bits > 24 && FLAC_API_VERSION_CURRENT < 12) {
		t->why = "more than 24 bits per sample need libFLAC 1.4 or newer";
		return -EIO;
	}
	return 0;
}

static int read_comments(struct track *t, struct reader *r, struct extent block)
{
	int rc;
	if (t->comments || block.len == 0)
		return 0; /* there can be one */
	t->large = block.len > LARGE_COMMENTS;
	if (t->large)
		pthread_mutex_lock(&large_comments);
	t->comments = malloc(block.len);
	if (!t->comments)
		return -ENOMEM;
	rc = reader_copy(r, block.at, t->comments, block.len);
	if (rc)
		return rc < 0 ? rc : -EIO;
	t->comments_len = block.len;
	return 0;
}

/* The window on the file, and where a block begins in it. */
struct block_reader {
	struct reader *r;
	off_t at;
};

static int block_get(void *arg, uint64_t at, uint8_t *dst, size_t n)
{
	const struct block_reader *b = arg;
	return reader_copy(b->r, b->at + (off_t)at, dst, n);
}

/* A PICTURE block without its data. 0, or a negative errno; one that makes no sense is left out and noted. There
 * is room for it. */
static int read_picture(struct track *t, struct reader *r, struct extent block)
{
	struct block_reader b = { r, block.at };
	struct id3_picture pic = { 0 };
	size_t most = t->descriptions < (1u << 20) ? ID3_MAX_DESCRIPTION : 256;
	int64_t at = id3_picture_parse(&pic, block_get, &b, block.len, most);
	bool room = t->n_pictures < ID3_MAX_PICTURES;
	t->broken |= at == 0 || !room || pic.cut;
	if (at > 0 && room) {
		pic.at = (uint64_t)(block.at + at);
		t->descriptions += pic.description_len;
		t->pictures[t->n_pictures++] = pic;
	} else {
		free(pic.description);
	}
	return at < 0 ? (int)at : 0;
}

/* `array` of `n` entries, with room for one more: its room is n, rounded up to a power of two. Null: no memory,
 * and `array` is as it was. */
static void *grow(void *array, size_t n, size_t size)
{
	return array && (n == 0 || n & (n - 1)) ? array : realloc(array, (n ? 2 * n : 1) * size);
}

/* One metadata block behind STREAMINFO. */
static int read_block(struct track *t, struct reader *r, int type, struct extent block)
{
	const uint8_t *p;
	void *larger;
	switch (type) {
	case FLAC_SEEKTABLE:
		t->stream.seektable = block;
		return 0;
	case FLAC_COMMENT:
		return read_comments(t, r, block);
	case FLAC_PICTURE:
		larger = grow(t->pictures, t->n_pictures, sizeof *t->pictures);
		if (!larger)
			return -ENOMEM;
		t->pictures = larger;
		return read_picture(t, r, block);
	case FLAC_APPLICATION:
		p = block.len >= 4 ? reader_need(r, block.at, 4) : NULL;
		if (!p || memcmp(p, "aiff", 4) != 0)
			return block.len >= 4 && !p ? r->error : 0;
		larger = grow(t->chunks, t->n_chunks, sizeof *t->chunks);
		if (!larger)
			return -ENOMEM;
		t->chunks = larger;
		t->chunks[t->n_chunks++] = (struct extent){ block.at + 4, block.len - 4 };
		return 0;
	default:
		return 0;
	}
}

/* Where "fLaC" is: behind any ID3v2 tags in front, which some programs put there. */
static int find_flac(struct track *t, struct reader *r, off_t *at)
{
	const uint8_t *p;
	*at = 0;
	for (int tags = 0; tags < 16; tags++) {
		p = reader_need(r, *at, 10);
		if (!p || memcmp(p, "ID3", 3) != 0)
			break;
		*at += 10 + (p[5] & 0x10 ? 10 : 0) + /* a footer */
		       ((off_t)(p[6] & 0x7f) << 21 | (off_t)(p[7] & 0x7f) << 14 | (p[8] & 0x7f) << 7 | (p[9] & 0x7f));
	}
	p = reader_need(r, *at, 8 + 34);
	if (!p && r->error)
		return r->error;
	if (p && memcmp(p, "OggS", 4) == 0)
		t->why = "Ogg FLAC is not supported";
	else if (!p || memcmp(p, "fLaC", 4) != 0)
		t->why = "not a FLAC file";
	else if ((p[4] & 0x7f) != FLAC_STREAMINFO || get_u24(p + 5) != 34)
		t->why = "STREAMINFO is not the first metadata block";
	else
		return 0;
	return -EIO;
}

/* Walks the metadata blocks of the FLAC file at `fd`, which is `size` bytes long. Of a picture only
 * what APIC's head needs is read, never the data. Returns 0 or a negative errno, with t->why set
 * where the file is to blame; `t` is to be freed either way. */
static int track_read(struct track *t, int fd, off_t size)
{
	uint8_t window[METADATA_WINDOW];
	struct reader r = { .fd = fd, .buf = window, .room = sizeof window };
	off_t at;
	bool last = false;
	int rc;
	*t = (struct track){ .stream = { .fd = fd, .end = size } };
	if (size < 8 + 34) {
		t->why = "not a FLAC file";
		return -EIO;
	}
	rc = find_flac(t, &r, &at);
	at += 4;
	for (int n = 0; rc == 0 && !last; n++) {
		const uint8_t *p = reader_need(&r, at, n == 0 ? 4 + 34 : 4);
		struct extent block;
		if (!p || n == MAX_BLOCKS) {
			t->why = r.error ? NULL : "metadata blocks have no end";
			return r.error ? r.error : -EIO;
		}
		last = p[0] & 0x80;
		block = (struct extent){ at + 4, get_u24(p + 1) };
		if (block.at + (off_t)block.len > size) {
			t->why = "a metadata block is longer than the file";
			return -EIO;
		}
		rc = n == 0 ? read_streaminfo(t, p + 4) : read_block(t, &r, p[0] & 0x7f, block);
		at = block.at + (off_t)block.len;
	}
	t->stream.audio = at;
	return rc;
}

/* ---- LAYOUT ----------------------------------------------------------------------------------- */

/* Where the parts of an AIFF file lie. All that stat needs, and for an open file what is where. */

enum piece_kind { PIECE_HEADER, PIECE_SOUND, PIECE_ZERO, PIECE_TAG, PIECE_SOURCE };

struct piece {
	enum piece_kind kind;
	uint64_t at, len; /* in the AIFF file */
	off_t source;     /* PIECE_SOURCE: where in the FLAC file */
};

struct layout {
	uint64_t size;        /* of the AIFF file */
	uint64_t sound, unit; /* bytes of sound, of a sample frame */
	struct piece *pieces; /* owned */
	size_t n;
	bool foreign; /* the original AIFF file, out of APPLICATION blocks */
};

static void layout_free(struct layout *l)
{
	free(l->pieces);
	l->pieces = NULL;
}

static void layout_add(struct layout *l, enum piece_kind kind, uint64_t len, off_t source)
{
	if (len)
		l->pieces[l->n++] = (struct piece){ kind, l->size, len, source };
	l->size += len;
}

/* Fetches bytes of the FLAC file; `arg` points at its descriptor. */
static int fetch_bytes(void *arg, uint64_t at, uint8_t *dst, size_t n)
{
	int rc = read_exactly(*(int *)arg, dst, n, (off_t)at);
	return rc > 0 ? -EIO : rc;
}

static struct id3_source track_id3(struct track *t)
{
	return (struct id3_source){ .comments = t->comments,
		                    .comments_len = t->comments_len,
		                    .pictures = t->pictures,
		                    .n_pictures = t->n_pictures,
		                    .fetch = fetch_bytes,
		                    .arg = &t->stream.fd };
}

/* `flac --keep-foreign-metadata` keeps what an AIFF file had beside its sound in APPLICATION blocks,
 * one a chunk and in order: first FORM, size and type; COMM and the others whole, with their pad byte;
 * of SSND header, offset, block size and the bytes that the offset skips. If they are a complete set
 * that agrees with STREAMINFO, the file is shown as it was. */
struct foreign {
	bool comm, ssnd, aifc, little;
	uint64_t stated; /* what it does count */
};

/* A COMM chunk's content of `n` bytes: does it describe this sound? */
static bool foreign_comm(struct foreign *f, const struct stream *s, const uint8_t *p, size_t n)
{
	uint8_t rate[10];
	put_extended(rate, s->rate);
	if (f->comm || n < (f->aifc ? 22u : 18u) || get_u16(p) != s->channels || get_u32(p + 2) != s->samples ||
	    get_u16(p + 6) != s->bits || memcmp(p + 8, rate, 5) != 0)
		return false;
	if (f->aifc && memcmp(p + 18, "sowt", 4) == 0)
		f->little = true;
	else if (f->aifc && memcmp(p + 18, "NONE", 4) != 0)
		return false;
	f->comm = true;
	return true;
}

/* One block; adds its pieces. False if the set makes no sense. */
static bool foreign_chunk(struct layout *l, struct foreign *f, const struct stream *s, struct extent block)
{
	uint8_t p[64] = { 0 };
	size_t n = min_u64(block.len, sizeof p);
	uint64_t size;
	if (n < 8 || read_exactly(s->fd, p, n, block.at) != 0)
		return false;
	size = get_u32(p + 4);
	if (l->n == 0) {
		f->aifc = memcmp(p + 8, "AIFC", 4) == 0;
		f->stated = size;
		layout_add(l, PIECE_SOURCE, 12, block.at);
		return block.len == 12 && memcmp(p, "FORM", 4) == 0 && (f->aifc || memcmp(p + 8, "AIFF", 4) == 0);
	}
	if (memcmp(p, "SSND", 4) == 0) {
		uint64_t offset = get_u32(p + 8);
		if (f->ssnd || n < 16 || block.len != 16 + offset || size != 8 + offset + l->sound)
			return false;
		f->ssnd = true;
		layout_add(l, PIECE_SOURCE, block.len, block.at);
		layout_add(l, PIECE_SOUND, l->sound, 0);
		layout_add(l, PIECE_ZERO, size & 1, 0);
		return true;
	}
	if (block.len != 8 + size + (size & 1))
		return false;
	if (memcmp(p, "COMM", 4) == 0 && !foreign_comm(f, s, p + 8, n - 8))
		return false;
	layout_add(l, PIECE_SOURCE, block.len, block.at);
	return true;
}

/* 1: `l` is the original AIFF file. 0: the blocks are no good set, or there are none. */
static int layout_foreign(struct layout *l, struct track *t)
{
	struct foreign f = { 0 };
	bool good = t->n_chunks > 2;
	l->pieces = malloc((t->n_chunks + 2) * sizeof *l->pieces);
	if (!l->pieces)
		return -ENOMEM;
	for (size_t i = 0; i < t->n_chunks && good; i++)
		good = foreign_chunk(l, &f, &t->stream, t->chunks[i]);
	if (!good || !f.comm || !f.ssnd || l->size - 8 != f.stated || l->size - 8 > UINT32_MAX) {
		layout_free(l);
		l->n = 0;
		l->size = 0;
		return 0;
	}
	t->stream.little = f.little;
	l->foreign = true;
	return 1;
}

/* The AIFF file of a track whose number of samples is known. 0, -EFBIG where AIFF cannot hold it, or
 * another negative errno. `foreign` allows the original. */
static int layout_make(struct layout *l, struct track *t, bool foreign)
{
	struct id3_source source = track_id3(t);
	struct id3_out count = { 0 };
	int rc = 0;
	*l = (struct layout){ .unit = stream_frame_bytes(&t->stream) };
	l->sound = t->stream.samples * l->unit;
	if (foreign && t->n_chunks)
		rc = layout_foreign(l, t);
	if (rc)
		return rc < 0 ? rc : 0;
	rc = id3_write(&source, &count);
	if (rc)
		return rc;
	t->broken |= source.broken;
	l->pieces = malloc(5 * sizeof *l->pieces);
	if (!l->pieces)
		return -ENOMEM;
	layout_add(l, PIECE_HEADER, AIFF_HEADER, 0);
	layout_add(l, PIECE_SOUND, l->sound, 0);
	layout_add(l, PIECE_ZERO, l->sound & 1, 0);
	if (count.at)
		layout_add(l, PIECE_TAG, 8 + count.at, 0);
	if (l->size - 8 > UINT32_MAX) {
		t->why = "more than AIFF's 4 GiB";
		return -EFBIG;
	}
	if (source.too_large)
		t->why = "pictures left out: the tag would pass 256 MiB";
	return 0;
}

/* ---- SIZE CACHE ------------------------------------------------------------------------------- */

/* What stat needs to know of a FLAC file, by the identity of the file: the size of the AIFF, or the
 * errno of one that cannot be shown. Bounded; a clock hand looks for an entry not used since it last
 * came by. The lock is never held during I/O. */

/* Source file as it was: equal as long as it is the same file with the same content. */
struct identity {
	uint64_t dev, ino;
	int64_t size, mtime, ctime; /* times in nanoseconds since 1970 */
};

static int64_t nanoseconds(const struct timespec *t) { return (int64_t)t->tv_sec * NS_PER_S + t->tv_nsec; }

static struct identity identity_of(const struct stat *st)
{
#ifdef __APPLE__
	return (struct identity){ (uint64_t)st->st_dev, st->st_ino, st->st_size, nanoseconds(&st->st_mtimespec),
		                  nanoseconds(&st->st_ctimespec) };
#else
	return (struct identity){ st->st_dev, st->st_ino, st->st_size, nanoseconds(&st->st_mtim),
		                  nanoseconds(&st->st_ctim) };
#endif
}

static bool identity_same(const struct identity *a, const struct identity *b)
{
	return a->dev == b->dev && a->ino == b->ino && a->size == b->size && a->mtime == b->mtime &&
	       a->ctime == b->ctime;
}

/* Whether it was changed within the last clock tick: it could change again without a sign of it. To be asked right
 * when the identity is taken, before anything is read. */
static bool identity_young(const struct identity *id)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return nanoseconds(&now) - id->ctime < NS_PER_S / 50;
}

struct cached {
	struct identity id;
	uint32_t form;    /* AIFF size - 8 */
	uint32_t next;    /* in the bucket: index + 1, 0 ends it */
	uint32_t samples; /* so that those of a track that does not say them are counted once */
	int16_t error;    /* a negative errno, or 0 */
	bool used;
};

struct cache {
	pthread_mutex_t lock; /* guards all of this */
	struct cached *entries;
	uint32_t *buckets; /* index + 1 */
	uint32_t room, n, hand;
};

static int cache_init(struct cache *c, unsigned room)
{
	*c = (struct cache){ .lock = PTHREAD_MUTEX_INITIALIZER, .room = room };
	if (room == 0)
		return 0;
	c->entries = calloc(room, sizeof *c->entries);
	c->buckets = calloc(room, sizeof *c->buckets);
	return c->entries && c->buckets ? 0 : -ENOMEM;
}

static void cache_free(struct cache *c)
{
	free(c->entries);
	free(c->buckets);
}

static uint32_t *cache_bucket(struct cache *c, const struct identity *id)
{
	uint64_t h = hash_bytes(HASH_START, id, sizeof *id);
	return &c->buckets[(h ^ h >> 32) % c->room];
}

/* The entry, or null. The lock is the caller's. */
static struct cached *cache_find(struct cache *c, const struct identity *id)
{
	if (c->room == 0)
		return NULL;
	for (uint32_t i = *cache_bucket(c, id); i; i = c->entries[i - 1].next)
		if (identity_same(&c->entries[i - 1].id, id)) {
			c->entries[i - 1].used = true;
			return &c->entries[i - 1];
		}
	return NULL;
}

static bool cache_get(struct cache *c, const struct identity *id, struct cached *found)
{
	struct cached *e;
	pthread_mutex_lock(&c->lock);
	e = cache_find(c, id);
	if (e)
		*found = *e;
	pthread_mutex_unlock(&c->lock);
	return e != NULL;
}

/* A free entry, or one that has to make room for it. */
static uint32_t cache_victim(struct cache *c)
{
	uint32_t *link, victim;
	if (c->n < c->room)
		return c->n++;
	while (c->entries[c->hand].used) {
		c->entries[c->hand].used = false;
		c->hand = (c->hand + 1) % c->room;
	}
	victim = c->hand;
	c->hand = (c->hand + 1) % c->room;
	for (link = cache_bucket(c, &c->entries[victim].id); *link != victim + 1; link = &c->entries[*link - 1].next)
		;
	*link = c->entries[victim].next;
	return victim;
}

/* Remembers `e`. */
static void cache_put(struct cache *c, const struct cached *e)
{
	uint32_t i, *bucket;
	if (c->room == 0)
		return;
	pthread_mutex_lock(&c->lock);
	if (!cache_find(c, &e->id)) {
		i = cache_victim(c);
		bucket = cache_bucket(c, &e->id);
		c->entries[i] = *e;
		c->entries[i].next = *bucket;
		*bucket = i + 1;
	}
	pthread_mutex_unlock(&c->lock);
}

/* ---- FRAMES ----------------------------------------------------------------------------------- */

/* Finding the FLAC frame that holds a sample frame, by headers only (RFC 9639, 9.1).
 *
 * A header is a sync code, reserved bits, fields that have to fit the stream, a number that has to
 * lie between those of the neighbours known, and a CRC-8. Sound can look like that by chance or by
 * intent, so what is found here is a guess: the decoder checks the number and the CRC-16 of the
 * frame that comes out, and asks again with `strict` when they are wrong.
 *
 * Three ways, and what they rest on:
 *     walk  from a frame known to the next, and on. Strict: the CRC-16 over all of the frame has to
 *           be right where the next one begins.
 *     hint  a place in the SEEKTABLE, if a header with that number is there.
 *     jump  guess by interpolation between two known frames. Needs numbers that grow with the
 *           offset over the whole file; frame_survey() looks whether they do: the file is tidy. One with
 *           something behind its frames (another FLAC file, say) is not, and is only ever walked.
 * Frames found are kept as anchors, to start from. One is sure if a decoder or a strict walk has confirmed it,
 * and a strict walk starts from those only. */

#define HEADER_MAX 16 /* bytes of the longest frame header */
#define UNKNOWN UINT64_MAX
#define MAX_UNCOUNTED (UINT64_C(8) << 30) /* bytes of FLAC frames; what fits into AIFF takes half of that */
#define SEARCH_SPARE (16 << 20)           /* bytes that a search may look at beyond one pass over the file */

/* A search for frames: its window, and how many bytes it may still look at. A sound file is walked
 * in one pass; one that was made to be walked again and again is given up. */
struct search {
	struct reader r;
	off_t left;
	off_t file_at; /* where another FLAC file was seen to begin; 0: nowhere yet */
};

struct frame {
	off_t at;        /* of its header */
	uint64_t sample; /* its first sample frame */
	uint32_t block;  /* sample frames in it */
};

struct anchor {
	uint64_t sample;
	off_t at;
	bool sure; /* it came out of the decoder, or of a strict walk */
};

/* Frames seen, in order. The first is the start of the stream. */
struct anchors {
	pthread_mutex_t lock; /* guards all of this */
	struct anchor a[ANCHORS];
	size_t n;
	enum survey { SURVEY_TO_DO, TIDY, UNTIDY } survey; /* tidy: jumps and hints are allowed */
};

static uint8_t crc8(const uint8_t *p, size_t n)
{
	uint8_t crc = 0;
	while (n--) {
		crc ^= *p++;
		for (int i = 0; i < 8; i++)
			crc = (uint8_t)(crc << 1 ^ (crc & 0x80 ? 0x07 : 0));
	}
	return crc;
}

/* CRC-16 of FLAC frames, polynomial 0x8005. Over a frame with its CRC: 0. The usual table of 256 is the
 * sum of these two, for the high and the low nibble of a byte. */
static uint16_t crc16(uint16_t crc, const uint8_t *p, size_t n)
{
	static const uint16_t high[16] = {
		0x0000, 0x8063, 0x80c3, 0x00a0, 0x8183, 0x01e0, 0x0140, 0x8123,
		0x8303, 0x0360, 0x03c0, 0x83a3, 0x0280, 0x82e3, 0x8243, 0x0220,
	};
	static const uint16_t low[16] = {
		0x0000, 0x8005, 0x800f, 0x000a, 0x801b, 0x001e, 0x0014, 0x8011,
		0x8033, 0x0036, 0x003c, 0x8039, 0x0028, 0x802d, 0x8027, 0x0022,
	};
	while (n--) {
		unsigned x = crc >> 8 ^ *p++;
		crc = (uint16_t)(crc << 8 ^ high[x >> 4] ^ low[x & 15]);
	}
	return crc;
}

/* The header at `p`, of `n` bytes that are left of the file. False if there is none that fits `s`.
 * With s->fixed the coded number counts frames, else sample frames. */
static bool frame_parse(const struct stream *s, const uint8_t *p, size_t n, struct frame *f)
{
	static const uint16_t blocks[16] = { 0,   192, 576,  1152, 2304, 4608, 0,     0,
		                             256, 512, 1024, 2048, 4096, 8192, 16384, 32768 };
	static const uint8_t depths[8] = { 0, 8, 12, 255, 16, 20, 24, 32 };
	unsigned block, rate, channels, depth;
	size_t len, extra;
	uint64_t number = 0;
	if (n < 6 || p[0] != 0xff || (p[1] & 0xfe) != 0xf8 || (p[1] & 1) != s->variable_bit || p[3] & 1)
		return false;
	block = p[2] >> 4;
	rate = p[2] & 15;
	channels = p[3] >> 4;
	depth = depths[p[3] >> 1 & 7];
	if (block == 0 || rate == 15 || channels > 10 || depth == 255)
		return false;
	if (!s->any_form && ((channels > 7 ? 2 : channels + 1) != s->channels || (depth && depth != s->bits)))
		return false;
	len = coded_number(p + 4, n - 4, &number);
	extra = (block == 6 ? 1u : block == 7 ? 2u : 0u) + (rate == 12 ? 1u : rate >= 13 ? 2u : 0u);
	if (len == 0 || 4 + len + extra + 1 > n || crc8(p, 4 + len + extra) != p[4 + len + extra])
		return false;
	f->block = block == 6 ? p[4 + len] + 1u : block == 7 ? get_u16(p + 4 + len) + 1 : blocks[block];
	f->sample = s->fixed ? number * s->fixed : number;
	/* of a fixed size are all but the last, which may come before STREAMINFO says */
	return f->sample < s->samples && (!s->fixed || f->block <= s->fixed);
}

/* More than a FLAC frame of `block` sample frames can sensibly take: twice as it is without
 * compression. */
static uint64_t frame_bound(const struct stream *s, uint64_t block)
{
	return 1024 + 2 * block * s->channels * (s->bits + 1) / 8;
}

/* Brings the end of the file near to where the frames can end, though each had one sample frame, with some space for
 * what is none of them: behind that may be a hole of terabytes, which is searched in vain. */
static void stream_bound(struct stream *s)
{
	uint64_t most = frame_bound(s, s->samples) + 24 * s->samples + SEARCH_SPARE;
	s->end = s->audio + (off_t)min_u64((uint64_t)(s->end - s->audio), most);
}

/* Notes where another FLAC file begins in [at, at + n): "fLaC" and STREAMINFO. Its frames have numbers like
 * ours, but are not of this stream. */
static void search_file(const struct stream *s, struct search *q, off_t at, size_t n)
{
	while (n > 0 && !q->file_at) {
		size_t got, skip;
		const uint8_t *p = reader_at(&q->r, at, min_u64(8, (uint64_t)(s->end - at)), &got), *f;
		if (got == 0)
			return; /* an error, or the file is shorter now: frame_search meets it, too */
		f = memchr(p, 'f', min_u64(got, n));
		skip = f ? (size_t)(f - p) : min_u64(got, n);
		at += (off_t)skip;
		n -= skip;
		if (!f)
			continue;
		p = reader_need(&q->r, at, 8);
		if (p && memcmp(p, "fLaC", 4) == 0 && (p[4] & 0x7f) == FLAC_STREAMINFO && get_u24(p + 5) == 34)
			q->file_at = at;
		at++;
		n--;
	}
}

/* The first header in [at, to) whose sample lies in [low, high). 1, 0 for none, or a negative errno. */
static int frame_search(const struct stream *s, struct search *q, off_t at, off_t to, uint64_t low, uint64_t high,
                        struct frame *f)
{
	while (at < to) {
		size_t got, n;
		const uint8_t *sync, *p = reader_at(&q->r, at, min_u64(HEADER_MAX, (uint64_t)(s->end - at)), &got);
		if (q->r.error || got == 0)
			return q->r.error;
		n = min_u64(got, (uint64_t)(to - at));
		sync = memchr(p, 0xff, n);
		n = sync ? (size_t)(sync - p) + 1 : n;
		search_file(s, q, at, n);
		at += (off_t)n;
		q->left -= (off_t)n;
		if (q->left < 0)
			return -EIO;
		if (!sync)
			continue;
		f->at = at - 1;
		sync = reader_at(&q->r, f->at, min_u64(HEADER_MAX, (uint64_t)(s->end - f->at)), &got);
		if (q->r.error)
			return q->r.error;
		if (frame_parse(s, sync, got, f) && f->sample >= low && f->sample < high)
			return 1;
	}
	return 0;
}

/* CRC-16 over [at, to) of the file, into *crc. */
static int frame_crc(struct search *q, off_t at, off_t to, uint16_t *crc)
{
	while (at < to) {
		size_t got;
		const uint8_t *p = reader_at(&q->r, at, 1, &got);
		if (q->r.error || got == 0)
			return q->r.error ? q->r.error : -EIO;
		got = min_u64(got, (uint64_t)(to - at));
		*crc = crc16(*crc, p, got);
		at += (off_t)got;
	}
	return 0;
}

/* The frame that follows *f: the one whose number is next (`want`), else, where frames are missing, the first with
 * a later one (`other`). `bound` is how far a frame can reach; `crc` is summed from the header of *f up to
 * `crc_at`, through what only looks like a header, so that each byte is summed once. Behind the start of another
 * file only a right CRC counts: then that was no file, but sound. 1, 0 where there is none, or a negative errno. */
static int frame_next(const struct stream *s, struct search *q, struct frame *f, bool strict)
{
	uint64_t want = f->sample + f->block;
	off_t at = f->at + 1, crc_at = f->at, bound = f->at + (off_t)frame_bound(s, max_u64(f->block, s->fixed));
	struct frame next, other = { 0 };
	uint16_t crc = 0;
	int rc;
	q->file_at = 0;
	while ((rc = frame_search(s, q, at, s->end, want, UINT64_MAX, &next)) == 1) {
		if (next.at > bound && (other.block || q->file_at))
			break;
		at = next.at + 1;
		if (next.sample == want && strict) {
			rc = frame_crc(q, crc_at, next.at, &crc);
			if (rc)
				return rc;
			crc_at = next.at;
		}
		if (next.sample == want && (strict ? crc == 0 : !q->file_at)) {
			*f = next;
			return 1;
		}
		if (!q->file_at && (!other.block || (other.sample != want && next.sample == want)))
			other = next;
	}
	if (rc < 0 || !other.block)
		return rc < 0 ? rc : 0;
	*f = other;
	return 1;
}

/* How this stream numbers its frames, from its first ones. STREAMINFO and the blocking strategy bit
 * should say it, but encoders of old counted samples without setting the bit, some write a wrong
 * block size, and libFLAC believes STREAMINFO. */
static int stream_learn(struct stream *s, struct search *q)
{
	struct stream any = *s; /* takes every header, however it is numbered */
	struct frame first = { 0 }, second;
	size_t got;
	const uint8_t *p = reader_at(&q->r, s->audio, HEADER_MAX, &got);
	int rc;
	if (q->r.error)
		return q->r.error;
	any.fixed = 0;
	any.samples = UNKNOWN;
	any.variable_bit = got > 1 && (p[1] & 1);
	if (!frame_parse(&any, p, got, &first)) { /* damaged: STREAMINFO it is */
		s->fixed = s->min_block == s->max_block ? s->min_block : 0;
		s->variable_bit = s->fixed == 0;
		return 0;
	}
	s->variable_bit = any.variable_bit;
	s->fixed = 0;
	if (!s->variable_bit && s->min_block != s->max_block) { /* does the second count 1, or samples? */
		off_t to = (off_t)min_u64((uint64_t)s->end, (uint64_t)s->audio + frame_bound(s, first.block));
		rc = frame_search(&any, q, s->audio + 1, to, 1, UINT64_MAX, &second);
		while (rc == 1 && second.sample != 1 && second.sample != first.block)
			rc = frame_search(&any, q, second.at + 1, to, 1, UINT64_MAX, &second);
		if (rc < 0)
			return rc;
		s->fixed = rc == 1 && second.sample == first.block ? 0 : first.block;
	} else if (!s->variable_bit) {
		/* a frame that is the first and the last may be short */
		s->fixed = s->samples && first.block >= s->samples ? (uint32_t)max_u64(first.block, s->max_block)
		                                                   : first.block;
	}
	return 0;
}

/* Whether a and b can be frames of one stream: the bytes between them fit the samples between them. */
static bool frame_plausible(const struct stream *s, uint64_t sample_a, off_t at_a, uint64_t sample_b, off_t at_b)
{
	uint64_t bytes, blocks, most;
	if (sample_a >= sample_b || at_a >= at_b)
		return false;
	bytes = (uint64_t)(at_b - at_a);
	blocks = (sample_b - sample_a) / (s->fixed ? s->fixed : 16) + 1;
	most = frame_bound(s, sample_b - sample_a) / 2 + 64 * blocks;
	if (s->fixed && s->max_frame)
		most = min_u64(most, blocks * s->max_frame);
	return bytes <= most && bytes >= blocks - 1;
}

/* The number of sample frames where STREAMINFO does not say it. If the file ends with a whole frame
 * (its CRC-16 is right up to the last byte) that frame's number tells; else all frames are walked. */
static int stream_count(const struct stream *known, struct search *q, uint64_t *samples)
{
	struct stream s = *known;
	struct frame f, last = { 0 }, tail[8]; /* the last headers in the file, newest first */
	size_t n = 0;
	off_t at = s.end - (off_t)min_u64((uint64_t)(s.end - s.audio), frame_bound(&s, max_u64(s.max_block, s.fixed)));
	int rc;
	*samples = 0;
	s.samples = UNKNOWN;
	s.any_form = true;
	while ((rc = frame_search(&s, q, at, s.end, 0, UINT64_MAX, &f)) == 1) {
		n = min_u64(n + 1, 8);
		memmove(tail + 1, tail, (n - 1) * sizeof *tail);
		tail[0] = f;
		at = f.at + 1;
	}
	for (size_t i = 0; i < n && rc == 0 && !last.block; i++) {
		uint16_t crc = 0;
		rc = frame_crc(q, tail[i].at, s.end, &crc);
		if (crc == 0)
			last = tail[i];
	}
	if (rc == 0 && !last.block) {
		rc = frame_search(&s, q, s.audio, s.audio + 1, 0, 1, &f);
		while (rc == 1) {
			last = f;
			rc = frame_next(&s, q, &f, true);
		}
	}
	if (rc == 0 && last.block)
		*samples = last.sample + last.block;
	return rc;
}

/* Forgets all but the start of the stream. */
static void anchors_start(struct anchors *as, const struct stream *s)
{
	pthread_mutex_lock(&as->lock);
	as->a[0] = (struct anchor){ 0, s->audio, true };
	as->n = 1;
	as->survey = SURVEY_TO_DO;
	pthread_mutex_unlock(&as->lock);
}

/* The last anchor at or before `sample` (a sure one, if asked), and the first behind it or the end. Returns the
 * survey's state. */
static enum survey anchors_around(struct anchors *as, const struct stream *s, uint64_t sample, bool sure,
                                  struct anchor *low, struct anchor *high)
{
	size_t i;
	enum survey survey;
	*low = (struct anchor){ 0, s->audio, true };
	*high = (struct anchor){ s->samples, s->end, false };
	pthread_mutex_lock(&as->lock);
	survey = as->survey;
	for (i = as->n; i > 0 && (as->a[i - 1].sample > sample || (sure && !as->a[i - 1].sure)); i--)
		if (as->a[i - 1].sample > sample)
			*high = as->a[i - 1];
	if (i > 0)
		*low = as->a[i - 1];
	pthread_mutex_unlock(&as->lock);
	return survey;
}

/* Remembers a frame. When the table is full, every second one is forgotten. */
static void anchors_add(struct anchors *as, struct anchor new)
{
	size_t i;
	pthread_mutex_lock(&as->lock);
	if (as->n == ANCHORS) {
		as->n = 0;
		for (size_t j = 0; j < ANCHORS; j += 2)
			as->a[as->n++] = as->a[j];
	}
	for (i = as->n; i > 0 && as->a[i - 1].sample > new.sample; i--)
		;
	if (i == 0 || as->a[i - 1].sample != new.sample) {
		memmove(&as->a[i + 1], &as->a[i], (as->n - i) * sizeof *as->a);
		as->a[i] = new;
		as->n++;
	} else if (new.sure) {
		as->a[i - 1] = new;
	}
	pthread_mutex_unlock(&as->lock);
}

static void anchors_surveyed(struct anchors *as, bool tidy)
{
	pthread_mutex_lock(&as->lock);
	as->survey = tidy ? TIDY : UNTIDY;
	pthread_mutex_unlock(&as->lock);
}

/* Sample frames that take about `bytes`. */
static uint64_t samples_in(const struct stream *s, off_t bytes)
{
	double all = (double)(s->end - s->audio);
	return all > 0 ? (uint64_t)((double)s->samples * ((double)bytes / all)) : 0;
}

/* Bytes that `samples` take on the average. */
static off_t bytes_of(const struct stream *s, uint64_t samples)
{
	return (off_t)((double)(s->end - s->audio) * ((double)samples / (double)s->samples));
}

/* Whether the numbers grow from the file's first byte to its last, as a jump needs it. Looks at the end, at
 * twice as far from it, and so on up to the middle, and from the start likewise: where a second stream
 * begins, however long it is, numbers start anew, and one of these places tells. 1, 0 or a negative errno; with 1,
 * *last is the last frame, and *middle the one nearest to the middle. */
static int frame_survey(const struct stream *s, struct search *q, struct anchor *middle, struct anchor *last)
{
	off_t half = (s->end - s->audio) / 2;
	off_t step = (off_t)min_u64((uint64_t)(s->end - s->audio), frame_bound(s, max_u64(s->max_block, s->fixed)));
	struct anchor before = { 0, s->audio, true };
	struct frame f;
	int rc;
	last->at = 0;
	for (off_t at = s->end - step; (rc = frame_search(s, q, at, s->end, 0, s->samples, &f)) == 1; at = f.at + 1)
		if (f.sample + f.block >= s->samples && frame_plausible(s, 0, s->audio, f.sample, f.at))
			*last = (struct anchor){ f.sample, f.at, false };
	if (rc < 0 || !last->at || q->file_at)
		return rc < 0 ? rc : 0;
	*middle = *last;
	for (off_t back = 2 * step; back < half; back *= 2) {
		rc = frame_search(s, q, s->end - back, last->at + 1, 1, s->samples, &f);
		if (rc <= 0 || q->file_at)
			return rc < 0 ? rc : 0;
		if (f.at != middle->at && !frame_plausible(s, f.sample, f.at, middle->sample, middle->at))
			return 0;
		*middle = (struct anchor){ f.sample, f.at, false };
	}
	for (off_t ahead = step; ahead < half && s->audio + ahead < middle->at; ahead *= 2) {
		rc = frame_search(s, q, s->audio + ahead, middle->at + 1, 1, s->samples, &f);
		if (rc <= 0 || q->file_at)
			return rc < 0 ? rc : 0;
		if (f.at == middle->at)
			break;
		if (!frame_plausible(s, before.sample, before.at, f.sample, f.at))
			return 0;
		before = (struct anchor){ f.sample, f.at, false };
	}
	return frame_plausible(s, before.sample, before.at, middle->sample, middle->at);
}

/* What the SEEKTABLE says of a place at or before `target` and behind *low, if a frame is there. */
static int frame_hint(const struct stream *s, struct search *q, uint64_t target, struct anchor *low, struct anchor high)
{
	struct anchor best = *low;
	struct frame f;
	int rc = 0;
	for (uint32_t i = 0; i + 18 <= s->seektable.len && i < 65536; i += 18) {
		const uint8_t *p = reader_need(&q->r, s->seektable.at + i, 18);
		uint64_t sample, offset;
		if (!p)
			return q->r.error;
		sample = (uint64_t)get_u32(p) << 32 | get_u32(p + 4);
		offset = (uint64_t)get_u32(p + 8) << 32 | get_u32(p + 12);
		if (sample > best.sample && sample <= target && offset < (uint64_t)(s->end - s->audio))
			best = (struct anchor){ sample, s->audio + (off_t)offset, false };
	}
	if (best.at > low->at && best.at < high.at)
		rc = frame_search(s, q, best.at, best.at + 1, best.sample, best.sample + 1, &f);
	if (rc == 1)
		*low = best;
	return rc < 0 ? rc : 0;
}

/* Brings *low near `target` by interpolation. 1, 0 if what it finds makes no sense, or a negative
 * errno. A guess aims a frame and a half too early, for the first header behind it to be useful. */
static int frame_jump(const struct stream *s, struct search *q, uint64_t target, struct anchor *low, struct anchor high)
{
	off_t early = bytes_of(s, s->fixed ? s->fixed : s->max_block) * 3 / 2;
	for (int tries = 0; tries < 40 && target - low->sample > samples_in(s, FRAME_WINDOW); tries++) {
		double part = (double)(target - low->sample) / (double)(high.sample - low->sample);
		off_t span = high.at - low->at,
		      guess = low->at + (off_t)((double)span * (tries < 8 ? part : 0.5)) - early;
		struct frame f;
		int rc;
		if (guess <= low->at)
			break;
		rc = frame_search(s, q, guess, high.at, low->sample + 1, high.sample, &f);
		if (rc < 0)
			return rc;
		if (rc == 0) {
			high.at = guess;
		} else if (q->file_at || !frame_plausible(s, low->sample, low->at, f.sample, f.at)) {
			return 0;
		} else if (f.sample <= target) {
			*low = (struct anchor){ f.sample, f.at, false };
		} else {
			high = (struct anchor){ f.sample, f.at, false };
		}
	}
	return 1;
}

/* Walks from *low to the frame that holds `target`. Frames of a strict walk are remembered now and
 * then, so that no part of a file is walked twice. */
static int frame_walk(const struct stream *s, struct search *q, struct anchors *as, uint64_t target, struct anchor low,
                      bool strict, struct frame *f)
{
	int rc = frame_search(s, q, low.at, low.at + 1, low.sample, low.sample + 1, f);
	off_t noted = low.at;
	if (rc < 0)
		return rc;
	if (rc == 0) /* damaged: go on from here, for the frame itself or the one behind it */
		*f = (struct frame){ low.at - 1, low.sample, 0 };
	while (target >= f->sample + f->block) {
		rc = frame_next(s, q, f, strict);
		if (rc <= 0)
			return rc;
		if (strict && f->at - noted > (s->end - s->audio) / (ANCHORS / 2)) {
			anchors_add(as, (struct anchor){ f->sample, f->at, true });
			noted = f->at;
		}
	}
	return f->sample <= target;
}

/* Whether the frame that begins with `sample` is at `at`, or the sound ends there. A whole frame that
 * lies in another's data, by chance or intent, is not followed by the next number. */
static bool frame_confirmed(const struct stream *s, off_t at, uint64_t sample)
{
	uint8_t p[HEADER_MAX] = { 0 };
	struct frame f;
	ssize_t got = sample < s->samples ? read_at(s->fd, p, sizeof p, at) : 0;
	return sample >= s->samples || (got > 0 && frame_parse(s, p, (size_t)got, &f) && f.sample == sample);
}

/* The frame that holds sample frame `target` (below s->samples). Returns 1; 0 where the file has no
 * header of such a frame, *f then being the next one if f->sample is beyond target; or a negative
 * errno. */
static int frame_locate(const struct stream *s, struct anchors *as, uint64_t target, bool strict, struct frame *f)
{
	uint8_t window[FRAME_WINDOW];
	struct search q = { .r = { .fd = s->fd, .buf = window, .room = sizeof window },
		            .left = s->end - s->audio + SEARCH_SPARE };
	struct anchor low, high, middle, last;
	enum survey survey = anchors_around(as, s, target, strict, &low, &high);
	int rc;
	*f = (struct frame){ 0 };
	if (strict || target - low.sample <= samples_in(s, 2 * FRAME_WINDOW))
		return frame_walk(s, &q, as, target, low, strict, f);
	if (survey == SURVEY_TO_DO) {
		rc = frame_survey(s, &q, &middle, &last);
		if (rc < 0)
			return rc;
		survey = rc == 1 ? TIDY : UNTIDY;
		if (survey == TIDY) {
			anchors_add(as, middle);
			anchors_add(as, last);
		}
		anchors_surveyed(as, survey == TIDY);
		anchors_around(as, s, target, false, &low, &high);
	}
	if (survey == TIDY) {
		rc = frame_hint(s, &q, target, &low, high);
		if (rc == 0)
			rc = frame_jump(s, &q, target, &low, high);
		if (rc != 0)
			return rc < 0 ? rc : frame_walk(s, &q, as, target, low, false, f);
	}
	anchors_around(as, s, target, true, &low, &high);
	return frame_walk(s, &q, as, target, low, true, f);
}

/* ---- TICKET LOCK ------------------------------------------------------------------------------ */

/* To take: this section. Needs pthread.h.
 *
 * A mutex that is handed on first come, first served, without spinning. pthread's own makes no such
 * promise: whoever is running when it is released gets it. Each comer takes a number and sleeps
 * until that number is served. Numbers wrap around: only their equality is looked at, and no two
 * comers hold the same one as long as there are fewer than 2^32 of them.
 *
 * Sleepers are spread over a few condition variables by number, so that serving one wakes it and not
 * the whole queue. */

#define TICKET_BEDS 16

struct ticket_lock {
	pthread_mutex_t lock; /* guards what follows */
	pthread_cond_t bed[TICKET_BEDS];
	unsigned next;    /* the number the next comer gets */
	unsigned serving; /* the number whose turn it is */
};

/* 0 or an errno, as pthread_mutex_init. */
static int ticket_init(struct ticket_lock *t)
{
	int rc = pthread_mutex_init(&t->lock, NULL);
	for (int i = 0; i < TICKET_BEDS && rc == 0; i++)
		rc = pthread_cond_init(&t->bed[i], NULL);
	t->next = t->serving = 0;
	return rc;
}

static void ticket_destroy(struct ticket_lock *t)
{
	for (int i = 0; i < TICKET_BEDS; i++)
		pthread_cond_destroy(&t->bed[i]);
	pthread_mutex_destroy(&t->lock);
}

/* Waits for its turn. Returns the number it had. */
static unsigned ticket_take(struct ticket_lock *t)
{
	unsigned mine;
	pthread_mutex_lock(&t->lock);
	mine = t->next++;
	while (t->serving != mine)
		pthread_cond_wait(&t->bed[mine % TICKET_BEDS], &t->lock);
	pthread_mutex_unlock(&t->lock);
	return mine;
}

/* Lets the next one in. */
static void ticket_pass(struct ticket_lock *t)
{
	pthread_mutex_lock(&t->lock);
	t->serving++;
	pthread_cond_broadcast(&t->bed[t->serving % TICKET_BEDS]); /* several numbers share a bed */
	pthread_mutex_unlock(&t->lock);
}

/* ---- DECODERS --------------------------------------------------------------------------------- */

/* One libFLAC instance, and where it stands.
 *
 * It is fed a virtual stream: "fLaC", STREAMINFO as the only metadata block, then the source's bytes
 * from wherever the frame that is wanted begins. So it costs the same whether the file has 20 MB of
 * pictures or none, damaged metadata never reaches libFLAC, and moving it is a flush and an offset.
 * STREAMINFO's block sizes are put right first (see stream_learn), since libFLAC reckons sample
 * numbers with them.
 *
 * DAMAGE. libFLAC does not keep damage from its client: older versions hand out silence for a frame
 * with a wrong CRC, newer ones fill gaps with it. So a frame counts only if the call that gave it
 * gave just that one, called no error, and the number, channels and depth are those expected. */

#define STREAM_HEAD 42

struct handle;

struct decoder {
	/* what the claim knows; guarded by depot.lock */
	struct handle *handle;
	struct decoder *newer, *older; /* list of idle ones, of all handles */
	uint64_t used;                 /* when it was let go: depot.reads of then */
	bool busy;
	uint64_t goal; /* while busy: the first byte of sound behind what it has to decode */

	/* the rest belongs to the worker that has claimed it */
	const struct stream *s;
	unsigned generation; /* handle.generation when it was moved */
	FLAC__StreamDecoder *flac;
	uint8_t head[STREAM_HEAD];
	size_t head_read; /* bytes of the head that libFLAC has */
	off_t fed;        /* offset in the FLAC file of the next byte that libFLAC gets */
	off_t limit;      /* where it is told that the file ends: see decoder_step */
	off_t at;         /* offset of the next frame, */
	uint64_t next;    /* and the sample frame at which it begins */
	bool lost;        /* it stands nowhere: it has to be moved */
	size_t kept_len;  /* bytes of the last FLAC frame if it was not wanted whole; it ends where `next` begins */
	size_t kept_room;
	uint8_t *kept;
	/* while a frame is decoded */
	uint8_t *dst; /* where byte `from` of the sound goes */
	uint64_t from, to;
	unsigned frames, errors; /* callbacks */
	int io;                  /* a negative errno of the source, or -ENOMEM */
};

/* The last byte of sound from which it can go on without being moved, and the first. */
static uint64_t decoder_end(const struct decoder *d) { return d->next * stream_frame_bytes(d->s); }
static uint64_t decoder_begin(const struct decoder *d) { return decoder_end(d) - d->kept_len; }

static bool decoder_stands_at(const struct decoder *d, uint64_t byte)
{
	return !d->lost && decoder_begin(d) <= byte && byte <= decoder_end(d);
}

static FLAC__StreamDecoderReadStatus decoder_feed(const FLAC__StreamDecoder *f, FLAC__byte *p, size_t *bytes, void *arg)
{
	struct decoder *d = arg;
	ssize_t n;
	(void)f;
	if (d->head_read < STREAM_HEAD) {
		n = (ssize_t)min_u64(*bytes, STREAM_HEAD - d->head_read);
		memcpy(p, d->head + d->head_read, (size_t)n);
		d->head_read += (size_t)n;
	} else {
		n = d->fed >= d->limit ? 0
		                       : read_at(d->s->fd, p, min_u64(*bytes, (uint64_t)(d->limit - d->fed)), d->fed);
		d->fed += n > 0 ? (off_t)n : 0;
	}
	*bytes = n > 0 ? (size_t)n : 0; /* or libFLAC asks for ever */
	if (n < 0) {
		d->io = (int)n;
		return FLAC__STREAM_DECODER_READ_STATUS_ABORT;
	}
	return n ? FLAC__STREAM_DECODER_READ_STATUS_CONTINUE : FLAC__STREAM_DECODER_READ_STATUS_END_OF_STREAM;
}

/* libFLAC asks this only to tell the offset of the next frame. */
static FLAC__StreamDecoderTellStatus decoder_tell(const FLAC__StreamDecoder *f, FLAC__uint64 *at, void *arg)
{
	(void)f;
	*at = (FLAC__uint64)((struct decoder *)arg)->fed;
	return FLAC__STREAM_DECODER_TELL_STATUS_OK;
}

/* Room for `len` bytes in `kept`, whose content is lost. Null: no memory. */
static uint8_t *decoder_room(struct decoder *d, size_t len)
{
	if (d->kept_room < len) {
		free(d->kept);
		d->kept = malloc(len);
		d->kept_room = d->kept ? len : 0;
	}
	return d->kept;
}

/* Takes the samples of one frame: into the reply if it is wanted whole, else into `kept`, and what
 * is wanted of it from there. */
static FLAC__StreamDecoderWriteStatus decoder_take(const FLAC__StreamDecoder *f, const FLAC__Frame *frame,
                                                   const FLAC__int32 *const buffer[], void *arg)
{
	struct decoder *d = arg;
	const struct stream *s = d->s;
	const FLAC__FrameHeader *h = &frame->header;
	uint64_t first = d->next, begin = decoder_end(d);
	unsigned shift = 8 * s->bytes - s->bits;
	uint8_t *out;
	size_t len;
	(void)f;
	if (d->frames++ || d->errors || h->number.sample_number != first || h->channels != s->channels ||
	    h->bits_per_sample != s->bits || h->blocksize == 0) {
		d->errors++;
		return FLAC__STREAM_DECODER_WRITE_STATUS_CONTINUE;
	}
	d->next = min_u64(first + h->blocksize, s->samples);
	len = (size_t)(decoder_end(d) - begin);
	d->kept_len = 0;
	if (begin >= d->from && begin + len <= d->to) {
		out = d->dst + (begin - d->from);
	} else {
		out = decoder_room(d, len);
		if (!out) {
			d->io = -ENOMEM;
			return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
		}
		d->kept_len = len;
	}
	aiff_pack(out, buffer, 0, (size_t)(d->next - first), s->channels, s->bytes, shift, s->little);
	return FLAC__STREAM_DECODER_WRITE_STATUS_CONTINUE;
}

static void decoder_complain(const FLAC__StreamDecoder *f, FLAC__StreamDecoderErrorStatus status, void *arg)
{
	(void)f;
	(void)status;
	((struct decoder *)arg)->errors++;
}

static void decoder_free(struct decoder *d)
{
	if (d && d->flac)
		FLAC__stream_decoder_delete(d->flac);
	if (d)
		free(d->kept);
	free(d);
}

/* A decoder that stands at the start of `s`, which has to outlive it. Null: no memory. */
static struct decoder *decoder_new(const struct stream *s)
{
	struct decoder *d = calloc(1, sizeof *d);
	if (!d)
		return NULL;
	d->s = s;
	d->at = d->fed = d->limit = s->audio;
	memcpy(d->head, "fLaC\x80\0\0\x22", 8); /* the last metadata block, STREAMINFO, 34 bytes */
	memcpy(d->head + 8, s->info, sizeof s->info);
	put_u16(d->head + 8, s->fixed ? s->fixed : 16);
	put_u16(d->head + 10, s->fixed ? s->fixed : 65535);
	d->head[8 + 13] &= 0xf0; /* total samples: what lies behind them is not asked for anyway */
	memset(d->head + 8 + 14, 0, 4);
	d->flac = FLAC__stream_decoder_new();
	if (!d->flac ||
	    FLAC__stream_decoder_init_stream(d->flac, decoder_feed, NULL, decoder_tell, NULL, NULL, decoder_take, NULL,
	                                     decoder_complain, d) != FLAC__STREAM_DECODER_INIT_STATUS_OK ||
	    !FLAC__stream_decoder_process_until_end_of_metadata(d->flac)) {
		decoder_free(d);
		return NULL;
	}
	return d;
}

/* Puts it at the start of a frame. 0 or -ENOMEM. */
static int decoder_move(struct decoder *d, const struct frame *f)
{
	d->kept_len = 0;
	d->at = d->fed = f->at;
	d->next = f->sample;
	d->lost = false;
	return FLAC__stream_decoder_flush(d->flac) ? 0 : -ENOMEM;
}

/* Copies what is wanted of the kept frame into the reply. */
static void decoder_copy(struct decoder *d)
{
	uint64_t begin = decoder_begin(d), from = max_u64(d->from, begin), to = min_u64(d->to, decoder_end(d));
	if (from < to)
		memcpy(d->dst + (from - d->from), d->kept + (from - begin), (size_t)(to - from));
}

/* It stands nowhere now, before `sample`. */
static void decoder_lose(struct decoder *d, uint64_t sample)
{
	d->lost = true;
	d->kept_len = 0;
	d->next = sample;
}

/* Decodes the next frame; what of it lies in [from, to) goes to dst, all three set by the caller. 0, -EIO for
 * damage (the decoder is then lost), or another negative errno. This is the only place that makes libFLAC's
 * states into errnos. The limit is there for a damaged frame: libFLAC would search the whole file for the next. */
static int decoder_step(struct decoder *d)
{
	uint64_t at, next = d->next;
	bool ok;
	d->frames = d->errors = 0;
	d->io = 0;
	d->limit = (off_t)min_u64((uint64_t)d->s->end,
	                          (uint64_t)d->at + 65536 + 2 * frame_bound(d->s, d->s->fixed ? d->s->fixed : 65535));
	ok = FLAC__stream_decoder_process_single(d->flac);
	if (d->io == 0 && FLAC__stream_decoder_get_state(d->flac) == FLAC__STREAM_DECODER_MEMORY_ALLOCATION_ERROR)
		d->io = -ENOMEM;
	if (d->io || !ok || d->frames != 1 || d->errors || !FLAC__stream_decoder_get_decode_position(d->flac, &at)) {
		decoder_lose(d, next);
		return d->io ? d->io : -EIO;
	}
	d->at = (off_t)at;
	decoder_copy(d);
	return 0;
}

/* ---- CLAIMS ----------------------------------------------------------------------------------- */

/* Who may decode when.
 *
 * The kernel sends several reads of one file at once, and they reach us in about the order in which
 * the reader wants them. Let them at one decoder through a mutex and it is moved back and forth; let
 * each have its own and every one begins with a search. So a read takes a ticket of the handle and,
 * while it holds it, claims a decoder:
 *
 *     1. one that is idle and stands at its first byte: nothing to move;
 *     2. else, if a busy one will end there, and all CPUs are decoding or what is wanted lies within
 *        the last frame that it has to decode: wait for that one;
 *     3. else a new one, or the one idle for longest, which has to be moved.
 *
 * Then it lets the next ticket in, and decodes with no lock held. A lone linear reader so spreads
 * over the CPUs that are idle (3), and many readers each keep to their own decoder (1, 2).
 *
 * WHY THIS CANNOT DEAD-LOCK. Who waits for a decoder holds a ticket and no decoder, and what it waits
 * for is busy: its worker runs, needs no ticket any more, and waits for nobody.
 *
 * WHY OVERTAKING IS CHEAP. The ticket is taken in read(), not when the request leaves /dev/fuse: about
 * one read in a hundred overtakes another. It then finds no decoder at its first byte and moves one;
 * the decoder that it should have had is still there for the read that it overtook. One search, no
 * storm. */

/* One open AIFF file. */
struct handle {
	char *path; /* for the log */
	struct layout layout;
	struct ticket_lock queue; /* who may claim next */
	struct stream stream;     /* constant, once the first holder of a ticket has learned how frames are numbered */
	bool learned;             /* it has; the holder's */

	struct anchors anchors;
	pthread_mutex_t lock;     /* guards: */
	struct identity identity; /* of the source, when last found to be good */
	bool young;               /* it was, then: nothing may be concluded from it */
	uint64_t tags;            /* a hash of its tags */
	unsigned generation;      /* how often the source has changed without harm */
	bool retagged;            /* the source has other tags now */

	/* guarded by depot.lock */
	struct decoder **decoders;
	unsigned n_decoders;
	bool waiting; /* the holder of the ticket, on `freed` */
	pthread_cond_t freed;
	struct handle *next_waiting;
};

/* All decoders. */
struct depot {
	pthread_mutex_t lock;       /* guards all of this, and what handles and decoders say of it */
	unsigned cpus;              /* how many may decode at once */
	unsigned per_handle;        /* most decoders of one handle */
	unsigned idle_max;          /* most idle decoders */
	unsigned idle, busy, alive; /* decoders now */
	unsigned handles;
	struct decoder *newest, *oldest; /* idle ones */
	struct handle *waiting;          /* handles whose ticket holder waits, first come first */
	/* reads of sound; of these, with a decoder that stood there, or that had to be moved; reads of any kind that
	 * failed; strict searches */
	uint64_t reads, hits, seeks, errors, fallbacks;
};

static void depot_count(struct depot *p, uint64_t *counter)
{
	pthread_mutex_lock(&p->lock);
	++*counter;
	pthread_mutex_unlock(&p->lock);
}

static void depot_unlink_idle(struct depot *p, struct decoder *d)
{
	*(d->newer ? &d->newer->older : &p->newest) = d->older;
	*(d->older ? &d->older->newer : &p->oldest) = d->newer;
	d->newer = d->older = NULL;
	p->idle--;
}

static void depot_link_idle(struct depot *p, struct decoder *d)
{
	d->older = p->newest;
	d->newer = NULL;
	*(p->newest ? &p->newest->newer : &p->oldest) = d;
	p->newest = d;
	p->idle++;
}

/* Takes it off its handle; it is the caller's to free, once the lock is not held. */
static void depot_remove(struct depot *p, struct decoder *d)
{
	struct handle *h = d->handle;
	unsigned i = 0;
	while (h->decoders[i] != d)
		i++;
	h->decoders[i] = h->decoders[--h->n_decoders];
	p->alive--;
}

/* The holder of h's ticket waits until a decoder of h is let go, or a CPU is. */
static void depot_wait(struct depot *p, struct handle *h)
{
	struct handle **end = &p->waiting;
	while (*end)
		end = &(*end)->next_waiting;
	*end = h;
	h->next_waiting = NULL;
	h->waiting = true;
	while (h->waiting)
		pthread_cond_wait(&h->freed, &p->lock);
}

/* Wakes the ticket holder that waits on `h`; with null the one that has waited longest. */
static void depot_wake(struct depot *p, struct handle *h)
{
	for (struct handle **w = &p->waiting; *w; w = &(*w)->next_waiting)
		if (!h || *w == h) {
			h = *w;
			*w = h->next_waiting;
			h->waiting = false;
			pthread_cond_signal(&h->freed);
			return;
		}
}

/* Where the frame in which byte `at` lies ends, if that is known; `at` itself at a frame's start. */
static uint64_t frame_end_byte(const struct handle *h, uint64_t at)
{
	uint64_t frame = h->stream.fixed * h->layout.unit;
	return frame ? min_u64((at + frame - 1) / frame * frame, h->layout.sound) : at;
}

/* The busy decoder that will end where a read of `from` begins. */
static struct decoder *depot_coming(const struct handle *h, uint64_t from)
{
	for (unsigned i = 0; i < h->n_decoders; i++)
		if (h->decoders[i]->busy && h->decoders[i]->goal == from)
			return h->decoders[i];
	return NULL;
}

/* The idle decoder that stands at `from`, or null; *oldest is the one idle for longest. */
static struct decoder *depot_standing(const struct handle *h, uint64_t from, struct decoder **oldest)
{
	*oldest = NULL;
	for (unsigned i = 0; i < h->n_decoders; i++) {
		struct decoder *d = h->decoders[i];
		if (d->busy)
			continue;
		if (decoder_stands_at(d, from))
			return d;
		if (!*oldest || d->used < (*oldest)->used)
			*oldest = d;
	}
	return NULL;
}

/* A new decoder for `h`, standing at the start. Called with the lock, which it lets go meanwhile: the
 * ticket keeps others from adding one. Null: no memory. */
static struct decoder *depot_add(struct depot *p, struct handle *h)
{
	struct decoder *d;
	pthread_mutex_unlock(&p->lock);
	d = decoder_new(&h->stream);
	pthread_mutex_lock(&p->lock);
	if (d) {
		d->handle = h;
		h->decoders[h->n_decoders++] = d;
		p->alive++;
	}
	return d;
}

/* Whether a read of [from, to) for which no decoder stands ready has to wait: see above, 2 and 3. */
static bool depot_full(const struct depot *p, const struct handle *h, const struct decoder *oldest, uint64_t from,
                       uint64_t to)
{
	if (depot_coming(h, from) && (p->busy >= p->cpus || frame_end_byte(h, from) >= to))
		return true;
	return h->n_decoders == p->per_handle && !oldest;
}

/* Claims a decoder for a read of [from, to). The caller holds the ticket. Null: no memory. */
static struct decoder *depot_claim(struct depot *p, struct handle *h, uint64_t from, uint64_t to)
{
	struct decoder *d, *oldest;
	pthread_mutex_lock(&p->lock);
	while (!(d = depot_standing(h, from, &oldest)) && depot_full(p, h, oldest, from, to))
		depot_wait(p, h);
	if (!d && h->n_decoders < p->per_handle) {
		d = depot_add(p, h);
	} else {
		d = d ? d : oldest;
		depot_unlink_idle(p, d);
	}
	if (d) {
		p->reads++;
		*(decoder_stands_at(d, from) ? &p->hits : &p->seeks) += 1;
		d->busy = true;
		d->goal = to;
		p->busy++;
	}
	pthread_mutex_unlock(&p->lock);
	return d;
}

/* The read is done; the decoder stays where it stands. Idle ones beyond the limit are freed, and of those that
 * take megabytes only a few are kept. */
static void depot_release(struct depot *p, struct decoder *d)
{
	struct decoder *surplus = NULL;
	struct handle *h = d->handle;
	bool large;
	pthread_mutex_lock(&p->lock);
	d->busy = false;
	d->used = p->reads;
	p->busy--;
	depot_link_idle(p, d);
	large = max_u64(d->kept_room, d->s->fixed * stream_frame_bytes(d->s)) > LARGE_FRAME;
	if (p->idle > (large ? p->per_handle : p->idle_max)) {
		surplus = large ? d : p->oldest;
		depot_unlink_idle(p, surplus);
		depot_remove(p, surplus);
	}
	if (h->waiting)
		depot_wake(p, h);
	else if (p->busy < p->cpus)
		depot_wake(p, NULL);
	pthread_mutex_unlock(&p->lock);
	decoder_free(surplus);
}

/* The handle is closed: no read of it is under way. */
static void depot_forget(struct depot *p, struct handle *h)
{
	for (;;) {
		struct decoder *d = NULL;
		pthread_mutex_lock(&p->lock);
		if (h->n_decoders) {
			d = h->decoders[0];
			depot_unlink_idle(p, d);
			depot_remove(p, d);
		}
		pthread_mutex_unlock(&p->lock);
		if (!d)
			return;
		decoder_free(d);
	}
}

/* ---- HANDLES ---------------------------------------------------------------------------------- */

/* The file system. Constant once mounted, but for what locks itself. */
struct fs {
	int root;           /* descriptor of the source */
	char *source;       /* its path, without symlinks */
	char *mountpoint;   /* the same */
	const char *hidden; /* the mountpoint below the source, or null; part of `mountpoint` */
	struct stat above;  /* the directory of the mountpoint */
	int follow, conceal, no_foreign;
	int stats; /* write the statistics at the end */
	unsigned workers;
	bool ready;     /* the kernel's first request has been answered */
	bool as_caller; /* what is opened is opened with the caller's rights, not ours */
	struct depot depot;
	struct cache cache;
	pthread_mutex_t opened_lock;      /* guards: */
	struct opened *opened;            /* all open files */
	uint64_t page_owner[PAGE_OWNERS]; /* by a hash of the path: of which file the kernel has pages */
};

/* What the metadata of the FLAC file at `fd` come to: the track, with its samples counted where it
 * does not say them, and the layout. Both are to be freed, whatever comes out. */
static int track_look(struct fs *fs, int fd, const struct identity *id, const char *path, struct track *t,
                      struct layout *l)
{
	uint8_t window[FRAME_WINDOW];
	struct search q = { .r = { .fd = fd, .buf = window, .room = sizeof window }, .left = 2 * MAX_UNCOUNTED };
	struct cached known;
	int rc = track_read(t, fd, id->size);
	*l = (struct layout){ 0 };
	if (rc == 0 && t->stream.samples == 0 && t->stream.audio < t->stream.end) {
		if (cache_get(&fs->cache, id, &known) && known.error == 0) {
			t->stream.samples = known.samples;
		} else if ((uint64_t)(t->stream.end - t->stream.audio) > MAX_UNCOUNTED) {
			t->why = "more FLAC frames than AIFF can hold";
			rc = -EFBIG;
		} else {
			rc = stream_learn(&t->stream, &q);
			if (rc == 0)
				rc = stream_count(&t->stream, &q, &t->stream.samples);
			if (q.left < 0 || (rc == 0 && t->stream.samples == 0)) {
				t->why = "its frames cannot be counted";
				rc = -EIO;
			}
		}
	}
	if (rc == 0)
		rc = layout_make(l, t, !fs->no_foreign);
	if (rc == 0)
		stream_bound(&t->stream);
	if (rc == 0 && t->n_chunks && !l->foreign && !fs->no_foreign)
		log_problem(path, "foreign", "its foreign metadata are not those of one AIFF file, shown as usual");
	if (t->broken && rc == 0)
		log_problem(path, "broken", "some of its tags or pictures cannot be read");
	if (t->why)
		log_problem(path, t->why, "%s", t->why);
	else if (rc)
		log_problem(path, strerror(-rc), "%s", strerror(-rc));
	return rc;
}

/* Remembers what track_look said, unless it was a passing trouble, or the file is young. */
static void look_remember(struct fs *fs, const struct identity *id, bool young, int rc, const struct track *t,
                          const struct layout *l)
{
	struct cached e = {
		.id = *id, .form = (uint32_t)(l->size - 8), .samples = (uint32_t)t->stream.samples, .error = (int16_t)rc
	};
	if (!young && (rc == 0 || t->why))
		cache_put(&fs->cache, &e);
}

/* A hash of all that the tag is made of, but the pictures' data. */
static uint64_t track_tags(const struct track *t)
{
	uint64_t h = t->comments_len ? hash_bytes(HASH_START, t->comments, t->comments_len) : HASH_START;
	for (size_t i = 0; i < t->n_pictures; i++) {
		const struct id3_picture *p = &t->pictures[i];
		h = hash_bytes(h, p->mime, strlen(p->mime) + 1);
		h = hash_bytes(h, p->description, p->description_len);
		h = hash_bytes(h, &p->type, sizeof p->type);
		h = hash_bytes(h, &p->at, sizeof p->at);
		h = hash_bytes(h, &p->size, sizeof p->size);
	}
	return h;
}

static void handle_free(struct fs *fs, struct handle *h)
{
	depot_forget(&fs->depot, h);
	pthread_mutex_lock(&fs->depot.lock);
	fs->depot.handles--;
	pthread_mutex_unlock(&fs->depot.lock);
	ticket_destroy(&h->queue);
	pthread_mutex_destroy(&h->lock);
	pthread_mutex_destroy(&h->anchors.lock);
	pthread_cond_destroy(&h->freed);
	layout_free(&h->layout);
	free(h->decoders);
	free(h->path);
	free(h);
}

/* A handle on the FLAC file `fd`, which stays the caller's, to be closed after handle_free. */
static int handle_open(struct fs *fs, int fd, const char *path, struct handle **out)
{
	struct handle *h = calloc(1, sizeof *h);
	struct track t;
	struct stat st;
	int rc;
	if (!h)
		return -ENOMEM;
	h->path = strdup(path);
	h->decoders = calloc(fs->depot.per_handle, sizeof *h->decoders);
	if (!h->path || !h->decoders || ticket_init(&h->queue) != 0) {
		free(h->path);
		free(h->decoders);
		free(h);
		return -ENOMEM;
	}
	pthread_mutex_init(&h->lock, NULL);
	pthread_mutex_init(&h->anchors.lock, NULL);
	pthread_cond_init(&h->freed, NULL);
	pthread_mutex_lock(&fs->depot.lock);
	fs->depot.handles++;
	pthread_mutex_unlock(&fs->depot.lock);
	rc = fstat(fd, &st) < 0 ? -errno : 0;
	if (rc == 0) {
		h->identity = identity_of(&st);
		h->young = identity_young(&h->identity);
		rc = track_look(fs, fd, &h->identity, path, &t, &h->layout);
		look_remember(fs, &h->identity, h->young, rc, &t, &h->layout);
		h->stream = t.stream;
		h->tags = track_tags(&t);
		anchors_start(&h->anchors, &h->stream);
		track_free(&t);
	}
	if (rc)
		handle_free(fs, h);
	*out = h;
	return rc;
}

/* Whether what was read of the source just now is what the handle was opened on: 0, or -ESTALE. If
 * the file has changed since, STREAMINFO (with the MD5 of the sound) and the place of the sound have
 * to be the same; then just the tags are new, or its name, owner or links. Called after each read,
 * so that bytes read before a change was made are good, and none read after it get out. */
static int handle_check(struct handle *h)
{
	static const uint8_t no_md5[16];
	struct identity now;
	struct track t;
	struct stat st;
	bool same, same_content, young;
	uint64_t tags = 0;
	int rc;
	if (fstat(h->stream.fd, &st) < 0)
		return -errno;
	now = identity_of(&st);
	young = identity_young(&now);
	pthread_mutex_lock(&h->lock);
	same = !h->young && identity_same(&h->identity, &now);
	same_content = now.mtime == h->identity.mtime && now.size == h->identity.size;
	pthread_mutex_unlock(&h->lock);
	if (same)
		return 0;
	rc = track_read(&t, h->stream.fd, st.st_size);
	if (rc == 0)
		tags = track_tags(&t);
	track_free(&t);
	if (rc == 0 &&
	    (memcmp(t.stream.info, h->stream.info, sizeof t.stream.info) != 0 || t.stream.audio != h->stream.audio ||
	     (!same_content && (h->layout.foreign || memcmp(t.stream.info + 18, no_md5, 16) == 0))))
		rc = -EIO;
	if (rc)
		return rc == -ENOMEM ? rc : -ESTALE;
	pthread_mutex_lock(&h->lock);
	h->identity = now;
	h->young = young;
	h->retagged |= h->tags != tags;
	h->generation += !same_content;
	anchors_start(&h->anchors, &h->stream);
	pthread_mutex_unlock(&h->lock);
	return 0;
}

/* Moves a decoder to the frame that holds `sample`, as the short way or a strict search finds it, and decodes
 * that. 0; 1: it came out right, but nothing behind it confirms it; or a negative errno. */
static int sound_try(struct handle *h, struct decoder *d, uint64_t sample, bool strict)
{
	struct frame f;
	int rc = frame_locate(&h->stream, &h->anchors, sample, strict, &f);
	if (rc != 1)
		return rc < 0 ? rc : -EIO;
	rc = decoder_move(d, &f);
	if (rc == 0)
		rc = decoder_step(d);
	if (rc == 0 && !strict && !frame_confirmed(&h->stream, d->at, d->next))
		return 1;
	if (rc == 0)
		anchors_add(&h->anchors, (struct anchor){ f.sample, f.at, true });
	return rc;
}

/* The same, by whichever way it takes: the strict one has the last word. 0 or a negative errno. */
static int sound_move(struct fs *fs, struct handle *h, struct decoder *d, uint64_t sample)
{
	int rc;
	pthread_mutex_lock(&h->lock);
	d->generation = h->generation;
	pthread_mutex_unlock(&h->lock);
	rc = sound_try(h, d, sample, false);
	if (rc == 1 || rc == -EIO) {
		depot_count(&fs->depot, &fs->depot.fallbacks);
		rc = sound_try(h, d, sample, true);
	}
	if (rc)
		decoder_lose(d, sample);
	return rc;
}

/* Where the sound goes on behind damage at `sample`: *behind is the next frame that has a header. 0 or a negative
 * errno. What was found is where the search behind the next damage starts. */
static int sound_behind(struct handle *h, uint64_t sample, uint64_t *behind)
{
	struct frame f;
	int rc = frame_locate(&h->stream, &h->anchors, sample, true, &f);
	if (rc < 0)
		return rc;
	if (f.block)
		anchors_add(&h->anchors, (struct anchor){ f.sample, f.at, true });
	*behind = h->stream.samples;
	if (rc == 1)
		*behind = min_u64(f.sample + f.block, h->stream.samples);
	else if (f.sample > sample)
		*behind = f.sample;
	return 0;
}

/* Decodes the next frame. One that does not come out right may be whole, behind something that is none. */
static int sound_step(struct fs *fs, struct handle *h, struct decoder *d)
{
	int rc = decoder_step(d);
	return rc == -EIO ? sound_move(fs, h, d, d->next) : rc;
}

/* Silence from d->next up to `behind`. 1: that is all the rest of the read. 0 or -EIO: it goes on, or is damaged
 * there, too. */
static int sound_conceal(struct fs *fs, struct handle *h, struct decoder *d, uint64_t behind)
{
	uint64_t unit = h->layout.unit;
	uint64_t gap = max_u64(d->next * unit, d->from), end = min_u64(behind * unit, d->to);
	if (gap < end)
		memset(d->dst + (gap - d->from), 0, (size_t)(end - gap));
	return end == d->to ? 1 : sound_move(fs, h, d, behind);
}

/* Decodes bytes [from, to) of the sound with a decoder that is claimed. */
static int sound_decode(struct fs *fs, struct handle *h, struct decoder *d, uint8_t *dst, uint64_t from, uint64_t to)
{
	uint64_t behind;
	int rc = 0;
	bool moved;
	d->dst = dst;
	d->from = from;
	d->to = to;
	pthread_mutex_lock(&h->lock);
	moved = d->generation != h->generation || !decoder_stands_at(d, from);
	pthread_mutex_unlock(&h->lock);
	if (moved)
		rc = sound_move(fs, h, d, from / h->layout.unit);
	else
		decoder_copy(d);
	while (rc == -EIO || (rc == 0 && decoder_end(d) < to)) {
		if (rc == 0) {
			rc = sound_step(fs, h, d);
			continue;
		}
		log_problem(h->path, "damaged", "damaged at sample %" PRIu64, d->next);
		if (!fs->conceal)
			return rc;
		rc = sound_behind(h, d->next, &behind);
		if (rc)
			return rc;
		rc = sound_conceal(fs, h, d, behind);
	}
	if (rc == 0 && d->next < h->stream.samples)
		anchors_add(&h->anchors, (struct anchor){ d->next, d->at, true });
	return rc < 0 ? rc : 0;
}

/* Reads bytes [from, to) of the sound. */
static int sound_read(struct fs *fs, struct handle *h, uint8_t *dst, uint64_t from, uint64_t to)
{
	struct decoder *d = NULL;
	int rc = 0;
	ticket_take(&h->queue);
	if (!h->learned) {
		uint8_t window[1024];
		struct search q = { .r = { .fd = h->stream.fd, .buf = window, .room = sizeof window },
			            .left = SEARCH_SPARE };
		rc = stream_learn(&h->stream, &q);
		h->learned = rc == 0;
	}
	if (rc == 0)
		d = depot_claim(&fs->depot, h, from, to);
	ticket_pass(&h->queue);
	if (!d)
		return rc ? rc : -ENOMEM;
	rc = sound_decode(fs, h, d, dst, from, to);
	depot_release(&fs->depot, d);
	return rc;
}

/* Reads bytes [from, to) of the chunk that holds the tag. It is made anew, out of the source. */
static int tag_read(struct handle *h, uint8_t *dst, uint64_t from, uint64_t to, uint64_t len)
{
	struct track t;
	struct id3_source source;
	struct id3_out o = { .dst = dst, .from = from, .to = to };
	uint8_t head[8];
	struct stat st;
	int rc;
	if (fstat(h->stream.fd, &st) < 0)
		return -errno;
	rc = track_read(&t, h->stream.fd, st.st_size);
	if (rc == 0) {
		source = track_id3(&t);
		memcpy(head, "ID3 ", 4);
		put_u32(head + 4, (uint32_t)(len - 8));
		id3_put(&o, head, sizeof head);
		rc = id3_write(&source, &o);
		if (rc == 0 && o.at != len)
			rc = -ESTALE;
	}
	track_free(&t);
	return rc;
}

/* Reads `n` bytes of the AIFF file at `at`, all of which exist. */
static int handle_read(struct fs *fs, struct handle *h, uint8_t *dst, uint64_t at, uint64_t n)
{
	bool tag = false;
	int rc = 0;
	for (size_t i = 0; i < h->layout.n && rc == 0; i++) {
		const struct piece *c = &h->layout.pieces[i];
		uint64_t from = max_u64(at, c->at), to = min_u64(at + n, c->at + c->len);
		uint8_t *out = dst + (from - at), header[AIFF_HEADER];
		if (from >= to)
			continue;
		from -= c->at;
		to -= c->at;
		switch (c->kind) {
		case PIECE_HEADER:
			aiff_header(header, (uint32_t)(h->layout.size - 8), h->stream.channels,
			            (uint32_t)h->stream.samples, h->stream.bits, h->stream.rate,
			            (uint32_t)h->layout.sound);
			memcpy(out, header + from, (size_t)(to - from));
			break;
		case PIECE_SOUND:
			rc = sound_read(fs, h, out, from, to);
			break;
		case PIECE_ZERO:
			memset(out, 0, (size_t)(to - from));
			break;
		case PIECE_TAG:
			tag = true;
			rc = tag_read(h, out, from, to, c->len);
			break;
		case PIECE_SOURCE:
			rc = fetch_bytes(&h->stream.fd, (uint64_t)c->source + from, out, (size_t)(to - from));
			break;
		}
	}
	if (rc == 0 || rc == -EIO) {
		int stale = handle_check(h);
		rc = stale ? stale : rc;
	}
	if (rc == 0 && tag) {
		pthread_mutex_lock(&h->lock);
		rc = h->retagged ? -ESTALE : 0;
		pthread_mutex_unlock(&h->lock);
	}
	if (rc == -ESTALE)
		log_problem(h->path, "changed", "changed while it was open");
	return rc;
}

/* ---- SOURCE TREE ------------------------------------------------------------------------------ */

/* Everything below the source is reached by path, relative to a descriptor of its root that was
 * opened before the mount, and no symlink is ever followed on the way: what its owner swaps for a
 * symlink between look-up and open leads nowhere. */

#ifndef O_PATH
#define O_PATH O_RDONLY
#endif
#define OPEN_FILE (O_RDONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC)
#define OPEN_DIR (O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
#define OPEN_PATH (O_PATH | O_NOFOLLOW | O_CLOEXEC)

/* Opens `path`, component by component. No symlink is followed: one at the end is -ELOOP, or is opened itself with
 * OPEN_PATH. A descriptor or a negative errno. */
static int open_stepwise(int root, const char *path, int flags)
{
	char name[NAME_MAX + 1];
	struct stat st;
	int at = *path == '/' ? open("/", O_PATH | O_DIRECTORY | O_CLOEXEC) : root, fd, error;
	for (;;) {
		size_t n;
		path += strspn(path, "/");
		n = strcspn(path, "/");
		if (n > NAME_MAX) {
			fd = -1;
			name[0] = 0;
			errno = ENAMETOOLONG;
		} else {
			memcpy(name, n ? path : ".", n ? n : 1);
			name[n ? n : 1] = 0;
			fd = openat(at, name,
			            path[n] ? O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC : flags | O_NOFOLLOW);
		}
		error = errno;
		if (fd >= 0 && !(flags & O_NOFOLLOW) && fstat(fd, &st) == 0 && S_ISLNK(st.st_mode)) {
			close(fd);
			fd = -1;
			error = ELOOP;
		} else if (fd < 0 && error == ENOTDIR && fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
		           S_ISLNK(st.st_mode)) {
			error = ELOOP; /* O_DIRECTORY came to its verdict first */
		}
		if (at != root && at >= 0)
			close(at);
		if (fd < 0)
			return -error;
		if (!path[n])
			return fd;
		path += n;
		at = fd;
	}
}

/* The same in one call where the kernel has openat2 (Linux 5.6), below `root`, or anywhere if `path`
 * is absolute. A descriptor or a negative errno; -ELOOP: there is a symlink. */
static int open_plain(int root, const char *path, int flags)
{
#if defined(__NR_openat2) && !defined(NO_OPENAT2)
	/* struct open_how of <linux/openat2.h>, and RESOLVE_BENEATH, _NO_SYMLINKS, _NO_MAGICLINKS */
	const uint64_t how[3] = { (uint64_t)flags, 0, 0x04 | 0x02 | (*path == '/' ? 0u : 0x08u) };
	static atomic_bool missing;
	if (!atomic_load_explicit(&missing, memory_order_relaxed)) {
		const struct timespec moment = { .tv_nsec = 1000 * 1000 };
		long fd;
		/* EAGAIN: a rename came between, or somebody has a lease on the file and was asked to give it up */
		for (int tries = 0; (fd = syscall(__NR_openat2, root, path, how, sizeof how)) < 0; tries++) {
			if (errno != EINTR && (errno != EAGAIN || tries == 1000))
				break;
			if (errno == EAGAIN && tries > 16)
				nanosleep(&moment, NULL);
		}
		if (fd >= 0 || (errno != ENOSYS && errno != EPERM))
			return fd >= 0 ? (int)fd : -errno;
		atomic_store_explicit(&missing, true, memory_order_relaxed);
	}
#endif
	return open_stepwise(root, path, flags);
}

/* When root shares the mount with others, files are opened, directories read and symlinks followed with the
 * rights of the caller. The kernel has checked them already, but on what was at that path a moment ago; and
 * of the directories that a symlink leads through it knows nothing. Linux keeps these for each thread. */
struct rights {
	uid_t uid;
	gid_t gid;
	int n;
	gid_t *groups;
};

#ifdef __linux__
#ifdef SYS_setgroups32
#define SETGROUPS SYS_setgroups32
#else
#define SETGROUPS SYS_setgroups
#endif

static int rights_take(const struct fs *fs, struct rights *r)
{
	struct fuse_context *c = fuse_get_context();
	gid_t groups[256];
	int n = 0;
	*r = (struct rights){ 0 };
	if (!fs->as_caller)
		return 0;
	r->n = getgroups(0, NULL);
	r->groups = calloc((size_t)r->n + 1, sizeof *r->groups);
	if (!r->groups || getgroups(r->n, r->groups) != r->n) {
		free(r->groups);
		return -ENOMEM;
	}
	n = fuse_getgroups(256, groups);
	n = n < 0 ? 0 : n > 256 ? 256 : n;
	syscall(SETGROUPS, n, groups);
	setfsgid(c->gid);
	setfsuid(c->uid);
	return 0;
}

static void rights_return(const struct fs *fs, struct rights *r)
{
	if (!fs->as_caller)
		return;
	setfsuid(geteuid());
	setfsgid(getegid());
	syscall(SETGROUPS, r->n, r->groups);
	free(r->groups);
}
#else
static int rights_take(const struct fs *fs, struct rights *r) { return (void)r, fs->as_caller ? -EACCES : 0; }
static void rights_return(const struct fs *fs, struct rights *r) { (void)fs, (void)r; }
#endif

/* `path` (without symlinks) as it is below `base`, or null. */
static const char *path_below(const char *path, const char *base)
{
	size_t n = strlen(base);
	if (strcmp(base, "/") == 0)
		return path + 1;
	return strncmp(path, base, n) == 0 && (path[n] == '/' || path[n] == 0) ? path + n + (path[n] == '/') : NULL;
}

/* Whether `path`, relative to the source, is the mountpoint or below it: the daemon must not call
 * itself. */
static bool path_hidden(const struct fs *fs, const char *path) { return fs->hidden && path_below(path, fs->hidden); }

/* Whether `name` in directory `dir` is the mountpoint, whichever path, symlink or bind mount has led there. */
static bool is_mountpoint(const struct fs *fs, int dir, const char *name)
{
	struct stat st;
	return strcmp(name, strrchr(fs->mountpoint, '/') + 1) == 0 && fstat(dir, &st) == 0 &&
	       st.st_dev == fs->above.st_dev && st.st_ino == fs->above.st_ino;
}

/* Opens a path without symlinks, which may lie in the source or not. */
static int open_resolved(const struct fs *fs, const char *path, int flags)
{
	const char *below = path_below(path, fs->source);
	if (below)
		return path_hidden(fs, below) ? -ENOENT : open_plain(fs->root, *below ? below : ".", flags);
	return path_below(path, fs->mountpoint) ? -ELOOP : open_plain(AT_FDCWD, path, flags);
}

/* Follows the symlinks of `path` (below the source) one by one, and opens what is there. `resolved`
 * is what has been gone through, an absolute path, `rest` what is still to go. */
static int open_followed(const struct fs *fs, const char *path, int flags)
{
	char resolved[PATH_MAX], rest[PATH_MAX], target[PATH_MAX];
	size_t n = (size_t)snprintf(resolved, sizeof resolved, "%s", fs->source), links = 0;
	if (n >= sizeof resolved || (size_t)snprintf(rest, sizeof rest, "%s", path) >= sizeof rest)
		return -ENAMETOOLONG;
	while (*rest) {
		size_t len = strcspn(rest, "/"), skip = len + strspn(rest + len, "/");
		ssize_t got;
		int fd;
		n = strcmp(resolved, "/") == 0 ? 0 : strlen(resolved);
		if (len == 2 && rest[0] == '.' && rest[1] == '.') {
			char *slash = strrchr(resolved, '/');
			slash[slash == resolved] = 0;
		} else if (len && !(len == 1 && rest[0] == '.')) {
			if (n + 1 + len >= sizeof resolved)
				return -ENAMETOOLONG;
			resolved[n] = '/';
			memcpy(resolved + n + 1, rest, len);
			resolved[n + 1 + len] = 0;
			fd = open_resolved(fs, resolved, OPEN_PATH);
			if (fd < 0)
				return fd;
			got = readlinkat(fd, "", target, sizeof target - 1);
			close(fd);
			if (got >= 0) {
				target[got] = 0;
				if (++links > 40)
					return -ELOOP;
				if ((size_t)got + 1 + strlen(rest + skip) >= sizeof rest)
					return -ENAMETOOLONG;
				memmove(rest + got + 1, rest + skip, strlen(rest + skip) + 1);
				memcpy(rest, target, (size_t)got);
				rest[got] = '/';
				resolved[n] = 0;
				if (n == 0 || target[0] == '/')
					strcpy(resolved, "/");
				skip = strspn(rest, "/");
			}
		}
		memmove(rest, rest + skip, strlen(rest + skip) + 1);
	}
	return open_resolved(fs, resolved, flags);
}

/* Opens a path relative to the source. What lies behind a symlink is opened with the caller's rights, and all of
 * it if `as_caller`. A descriptor or a negative errno. */
static int source_open(const struct fs *fs, const char *path, int flags, bool as_caller)
{
	const char *start = *path ? path : ".";
	struct rights rights;
	int fd;
	if (path_hidden(fs, path))
		return -ENOENT;
	if (!as_caller) {
		fd = open_plain(fs->root, start, flags);
		if (fd != -ELOOP || !fs->follow)
			return fd;
	}
	fd = rights_take(fs, &rights);
	if (fd < 0)
		return fd;
	fd = as_caller ? open_plain(fs->root, start, flags) : -ELOOP;
	if (fd == -ELOOP && fs->follow)
		fd = open_followed(fs, path, flags);
	rights_return(fs, &rights);
	return fd;
}

/* lstat, or stat with follow_symlinks; a symlink that leads nowhere is shown as one. `dir` is `path`'s
 * directory, `name` its last component. */
static int source_stat(const struct fs *fs, int dir, const char *name, const char *path, struct stat *st)
{
	struct stat target;
	int fd, rc = 0;
	if (path_hidden(fs, path) || is_mountpoint(fs, dir, name))
		return -ENOENT;
	if (fstatat(dir, name, st, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	if (!fs->follow || !S_ISLNK(st->st_mode))
		return 0;
	fd = source_open(fs, path, O_PATH | O_CLOEXEC, false);
	if (fd < 0)
		return 0;
	rc = fstat(fd, &target);
	close(fd);
	if (rc == 0)
		*st = target;
	return 0;
}

/* ---- NAMES ------------------------------------------------------------------------------------ */

/* x.flac, in any case of the extension, is shown as x.aiff. Where that name is taken, by a real x.aiff
 * or by x.flac beside x.FLAC, it is shown as x.flac.aiff, then x.flac.aiff.aiff. Nothing is hidden and
 * nothing is shown twice. Look-up and listing ask the same two functions; they differ in how they know
 * what is in the directory: by asking for a name, or from a list. */

enum kind { KIND_NONE, KIND_OTHER, KIND_FLAC };

struct names {
	enum kind (*kind)(void *arg, const char *name);
	void *arg;
};

#define AIFF_EXT ".aiff"
#define EXT_LEN 5 /* of ".flac" and of ".aiff" */

static bool ends_in(const char *name, const char *ext, bool any_case)
{
	size_t n = strlen(name);
	return n > EXT_LEN && (any_case ? strcasecmp : strcmp)(name + n - EXT_LEN, ext) == 0;
}

static bool flac_name(const char *name) { return ends_in(name, ".flac", true); }

/* The source name of what is shown as `shown`, into `source` (NAME_MAX + 1 bytes). */
static enum kind name_source(const struct names *names, const char *shown, char *source);

/* The `nth` name (from 0) under which the FLAC file `source` could be shown; false: too long. */
static bool name_candidate(const char *source, unsigned nth, char *shown)
{
	size_t n = strlen(source), keep = nth ? n : n - EXT_LEN;
	if (keep + EXT_LEN * (nth ? nth : 1) > NAME_MAX)
		return false;
	memcpy(shown, source, keep);
	shown[keep] = 0;
	for (unsigned i = 0; i < (nth ? nth : 1); i++)
		strcat(shown, AIFF_EXT);
	return true;
}

/* The name under which the FLAC file `source` is shown, into `shown` (NAME_MAX + 1 bytes). False: there
 * is none that is short enough. */
static bool name_shown(const struct names *names, const char *source, char *shown)
{
	char owner[NAME_MAX + 1];
	for (unsigned nth = 0; name_candidate(source, nth, shown); nth++)
		if (name_source(names, shown, owner) == KIND_FLAC && strcmp(owner, source) == 0)
			return true;
	return false;
}

/* The FLAC file whose first choice is `shown`, of `n` bytes: of several the first from .flac to .FLAC. */
static bool first_chooser(const struct names *names, const char *shown, size_t n, char *source)
{
	memcpy(source, shown, n + 1);
	for (unsigned upper = 0; upper < 16; upper++) { /* a bit for each letter */
		memcpy(source + n - EXT_LEN, ".flac", EXT_LEN);
		for (unsigned c = 0; c < 4; c++)
			if (upper >> c & 1)
				source[n - EXT_LEN + 1 + c] = "FLAC"[c];
		if (names->kind(names->arg, source) == KIND_FLAC)
			return true;
	}
	return false;
}

/* The FLAC file that has come to `shown`, its own name and .aiff behind it once or more, because all that it
 * would rather be called is taken. */
static bool later_chooser(const struct names *names, const char *shown, size_t n, char *source)
{
	char rather[NAME_MAX + 1], owner[NAME_MAX + 1];
	unsigned times = 0;
	memcpy(source, shown, n + 1);
	for (; ends_in(source, AIFF_EXT, false); times++)
		source[n -= EXT_LEN] = 0;
	if (times == 0 || !flac_name(source) || names->kind(names->arg, source) != KIND_FLAC)
		return false;
	for (unsigned nth = 0; nth < times && name_candidate(source, nth, rather); nth++)
		if (name_source(names, rather, owner) == KIND_FLAC && strcmp(owner, source) == 0)
			return false;
	return true;
}

static enum kind name_source(const struct names *names, const char *shown, char *source)
{
	size_t n = strlen(shown);
	if (n > NAME_MAX)
		return KIND_NONE;
	if (names->kind(names->arg, shown) == KIND_OTHER) {
		memcpy(source, shown, n + 1);
		return KIND_OTHER;
	}
	if (!ends_in(shown, AIFF_EXT, false))
		return KIND_NONE;
	return first_chooser(names, shown, n, source) || later_chooser(names, shown, n, source) ? KIND_FLAC : KIND_NONE;
}

/* A symlink called x.flac counts as FLAC if what it names is called so, and is no directory. */
static bool flac_link(const struct fs *fs, int dir, const char *name, const char *path)
{
	char target[PATH_MAX];
	struct stat st;
	bool directory = false;
	int fd;
	ssize_t n = readlinkat(dir, name, target, sizeof target - 1);
	if (n < 0)
		return false;
	target[n] = 0;
	if (!flac_name(target))
		return false;
	fd = open_followed(fs, path, O_PATH | O_CLOEXEC); /* with our rights: only to learn whether it is a directory */
	if (fd >= 0) {
		directory = fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
		close(fd);
	}
	return !directory;
}

/* What a directory entry with these attributes is; `path` is that of `name` below the source. */
static enum kind kind_of(const struct fs *fs, const struct stat *st, int dir, const char *name, const char *path)
{
	if (!flac_name(name))
		return KIND_OTHER;
	if (S_ISLNK(st->st_mode))
		return flac_link(fs, dir, name, path) ? KIND_FLAC : KIND_OTHER;
	return S_ISREG(st->st_mode) ? KIND_FLAC : KIND_OTHER;
}

#define PATH_ROOM (PATH_MAX + NAME_MAX + 2)

/* dir/name into `out`, PATH_ROOM bytes. `dir` is shorter than PATH_MAX; the kernel refuses what has become longer. */
static void path_join(char *out, const char *dir, const char *name)
{
	size_t n = min_u64(strlen(dir), PATH_MAX - 1), m = min_u64(strlen(name), NAME_MAX);
	memcpy(out, dir, n);
	if (n)
		out[n++] = '/';
	memcpy(out + n, name, m);
	out[n + m] = 0;
}

/* The look-up's way to know a directory. */
struct open_dir {
	const struct fs *fs;
	int fd;
	const char *path; /* below the source */
};

static enum kind kind_in_dir(void *arg, const char *name)
{
	const struct open_dir *d = arg;
	char path[PATH_ROOM];
	struct stat st;
	path_join(path, d->path, name);
	return source_stat(d->fs, d->fd, name, path, &st) < 0 ? KIND_NONE : kind_of(d->fs, &st, d->fd, name, path);
}

/* The listing's way: all entries in memory, as they came, and an index by name. */
struct entry {
	char *source;
	enum kind kind;
};

struct listing {
	struct entry *entries;
	size_t n;
	const struct entry **sorted;
	char *path;
};

static int compare_entries(const void *a, const void *b)
{
	return strcmp((*(const struct entry *const *)a)->source, (*(const struct entry *const *)b)->source);
}

static enum kind kind_in_list(void *arg, const char *name)
{
	const struct listing *l = arg;
	const struct entry key = { .source = (char *)name }, *wanted = &key, **found;
	found = bsearch(&wanted, l->sorted, l->n, sizeof *l->sorted, compare_entries);
	return found ? (*found)->kind : KIND_NONE;
}

static void listing_clear(struct listing *l)
{
	for (size_t i = 0; i < l->n; i++)
		free(l->entries[i].source);
	free(l->entries);
	free(l->sorted);
	l->entries = NULL;
	l->sorted = NULL;
	l->n = 0;
}

/* Reads the directory `dir`, which it closes. Names are looked at more closely only where they end in
 * .flac and d_type leaves a doubt. */
static int listing_read(const struct fs *fs, struct listing *l, DIR *dir)
{
	char path[PATH_ROOM];
	struct dirent *e;
	struct stat st;
	void *larger;
	int rc = 0;
	while (rc == 0 && (errno = 0, e = readdir(dir))) {
		enum kind kind = KIND_OTHER;
		path_join(path, l->path, e->d_name);
		if (path_hidden(fs, path) || is_mountpoint(fs, dirfd(dir), e->d_name) || strcmp(e->d_name, ".") == 0 ||
		    strcmp(e->d_name, "..") == 0)
			continue;
		if (flac_name(e->d_name)) {
			kind = e->d_type == DT_REG ? KIND_FLAC : KIND_OTHER;
			if (e->d_type == DT_UNKNOWN || e->d_type == DT_LNK) {
				if (source_stat(fs, dirfd(dir), e->d_name, path, &st) < 0)
					continue;
				kind = kind_of(fs, &st, dirfd(dir), e->d_name, path);
			}
		}
		larger = grow(l->entries, l->n, sizeof *l->entries);
		rc = larger ? 0 : -ENOMEM;
		if (rc == 0) {
			l->entries = larger;
			l->entries[l->n].kind = kind;
			l->entries[l->n].source = strdup(e->d_name);
			rc = l->entries[l->n].source ? 0 : -ENOMEM;
			l->n += rc == 0;
		}
	}
	if (rc == 0 && errno)
		rc = -errno;
	closedir(dir);
	l->sorted = malloc((l->n + 1) * sizeof *l->sorted);
	if (!l->sorted)
		rc = -ENOMEM;
	for (size_t i = 0; rc == 0 && i < l->n; i++)
		l->sorted[i] = &l->entries[i];
	if (rc == 0 && l->n)
		qsort(l->sorted, l->n, sizeof *l->sorted, compare_entries);
	if (rc)
		listing_clear(l);
	return rc;
}

/* ---- FILES ------------------------------------------------------------------------------------ */

/* What is shown at a path: its attributes, where a symlink leads, and whose pages the kernel has of it. */

/* What a path of the mount names in the source. */
struct place {
	int dir;                 /* descriptor of its directory; to be closed */
	char name[NAME_MAX + 1]; /* in it */
	char path[PATH_ROOM];    /* below the source; "" is the source itself */
	enum kind kind;
	struct stat st; /* the source's */
};

/* 0 or a negative errno; with 0 place->dir is open. */
static int place_find(const struct fs *fs, const char *path, struct place *p)
{
	const char *slash = strrchr(path, '/');
	struct open_dir dir = { .fs = fs };
	struct names names = { kind_in_dir, &dir };
	char parent[PATH_MAX];
	int rc;
	if (strlen(path) >= sizeof parent)
		return -ENAMETOOLONG;
	snprintf(parent, sizeof parent, "%.*s", (int)(slash > path ? slash - path - 1 : 0), path + 1);
	p->dir = source_open(fs, parent, O_PATH | O_DIRECTORY | O_CLOEXEC, false);
	if (p->dir < 0)
		return p->dir;
	dir.fd = p->dir;
	dir.path = parent;
	if (slash[1] == 0) { /* the root */
		p->kind = KIND_OTHER;
		strcpy(p->name, ".");
		p->path[0] = 0;
	} else {
		p->kind = name_source(&names, slash + 1, p->name);
		path_join(p->path, parent, p->name);
	}
	rc = p->kind == KIND_NONE ? -ENOENT : source_stat(fs, p->dir, p->name, p->path, &p->st);
	if (rc)
		close(p->dir);
	return rc;
}

/* Makes the attributes of a source file those of what is shown. */
static int attr_show(struct fs *fs, int dir, const char *name, const char *path, enum kind kind, struct stat *st)
{
	struct identity id = identity_of(st);
	struct cached known;
	int rc = 0, fd;
	st->st_mode &= ~(mode_t)0222;
	if (kind != KIND_FLAC || !S_ISREG(st->st_mode))
		return 0;
	if (cache_get(&fs->cache, &id, &known)) {
		rc = known.error;
		st->st_size = (off_t)known.form + 8;
	} else {
		struct track t;
		struct layout l;
		struct stat now;
		bool young;
		fd = open_plain(dir, name, OPEN_FILE); /* no path to walk, as long as it is no symlink */
		if (fd == -ELOOP)
			fd = source_open(fs, path, OPEN_FILE, false);
		if (fd < 0)
			return fd;
		rc = fstat(fd, &now) < 0 ? -errno : 0;
		if (rc == 0) {
			id = identity_of(&now);
			young = identity_young(&id);
			rc = track_look(fs, fd, &id, path, &t, &l);
			look_remember(fs, &id, young, rc, &t, &l);
			st->st_size = (off_t)l.size;
			layout_free(&l);
			track_free(&t);
		}
		close(fd);
	}
	st->st_blocks = (st->st_size + 511) / 512;
	return rc;
}

/* Takes "." and ".." out of a path below the source. False: it leads out of there. */
static bool path_normal(char *path)
{
	char *out = path;
	for (const char *in = path; *in;) {
		size_t n = strcspn(in, "/");
		if (n == 2 && memcmp(in, "..", 2) == 0) {
			if (out == path)
				return false;
			while (out > path && *--out != '/')
				;
		} else if (n && !(n == 1 && *in == '.')) {
			if (out > path)
				*out++ = '/';
			memmove(out, in, n);
			out += n;
		}
		in += n + strspn(in + n, "/");
	}
	*out = 0;
	return true;
}

/* The directory in which the relative `target` of symlink `p` is, by its text, into `path` (2 * PATH_MAX bytes). A
 * descriptor, or negative where there is none that may be looked at. */
static int link_dir(const struct fs *fs, const struct place *p, const char *target, size_t n, char *path)
{
	const char *slash = strrchr(p->path, '/');
	snprintf(path, 2 * PATH_MAX, "%.*s/%.*s", slash ? (int)(slash - p->path) : 0, p->path, (int)n, target);
	if (!path_normal(path) || strlen(path) >= PATH_MAX)
		return -ENOENT;
	return source_open(fs, path, O_PATH | O_DIRECTORY | O_CLOEXEC, false);
}

/* A target that is shown under another name is named so: the base name of the file if that can be
 * found, else .flac becomes .aiff. */
static void link_target(const struct fs *fs, const struct place *p, char *target, size_t room)
{
	char path[2 * PATH_MAX], shown[NAME_MAX + 1], *slash = strrchr(target, '/'), *base = slash ? slash + 1 : target;
	struct open_dir dir = { .fs = fs, .fd = -1, .path = path };
	struct names names = { kind_in_dir, &dir };
	bool known = false, other = false;
	if (!flac_name(base))
		return;
	if (*target != '/')
		dir.fd = link_dir(fs, p, target, (size_t)(base - target), path);
	if (dir.fd >= 0) {
		other = kind_in_dir(&dir, base) == KIND_OTHER; /* a directory of that name, say */
		known = !other && name_shown(&names, base, shown);
		close(dir.fd);
	}
	if (known && (size_t)(base - target) + strlen(shown) < room)
		strcpy(base, shown);
	else if (!other)
		memcpy(target + strlen(target) - EXT_LEN, AIFF_EXT, EXT_LEN);
}

/* What fi->fh points at. */
struct opened {
	int fd;
	struct handle *handle;    /* null: a file that is passed through */
	uint64_t path;            /* a hash of the path it was opened by */
	struct identity identity; /* of the source then */
	bool young;
	struct opened *next; /* guarded by fs.opened_lock */
};

/* Enters `o` into the list of what is open, and says how the kernel has to treat its pages. It keeps one
 * set of them for a path, whatever file was found there, so:
 *     direct  the path is open on another file, or on this one as it was before a change: those handles
 *             still fill the pages, and the new one has to keep off them
 *     keep    the last file opened by this path was just this one, unchanged: they are its own
 * A file changed within the last clock tick could change again without a sign of it. */
static void opened_enter(struct fs *fs, struct opened *o, bool *direct, bool *keep)
{
	uint64_t *owner = &fs->page_owner[o->path % PAGE_OWNERS],
		 now = hash_bytes(o->path, &o->identity, sizeof o->identity) | 1;
	*direct = false;
	pthread_mutex_lock(&fs->opened_lock);
	for (struct opened *other = fs->opened; other; other = other->next)
		*direct |= other->path == o->path && !identity_same(&other->identity, &o->identity);
	*keep = !*direct && *owner == now;
	*owner = *direct || o->young ? 0 : now;
	o->next = fs->opened;
	fs->opened = o;
	pthread_mutex_unlock(&fs->opened_lock);
}

static void opened_leave(struct fs *fs, struct opened *o)
{
	struct opened **at = &fs->opened;
	pthread_mutex_lock(&fs->opened_lock);
	while (*at != o)
		at = &(*at)->next;
	*at = o->next;
	pthread_mutex_unlock(&fs->opened_lock);
}

/* ---- FUSE OPERATIONS -------------------------------------------------------------------------- */

/* WHAT FUSE IS, as far as this file needs it. The kernel turns a system call on the mount into a request and queues
 * it on /dev/fuse. A worker (THREAD POOL) takes it; libfuse decodes it and calls one function below, on that
 * thread; what it returns, 0 or a negative errno, is the answer. Requests run on all workers at once, in no promised
 * order, and a function that blocks keeps only its own worker and its own caller.
 *
 * The kernel names files by numbers; libfuse keeps the table from these to paths, so a function gets a path from the
 * mount's root: "/a/x.aiff". There is no look-up function: libfuse calls getattr for each component.
 *
 * What fs_open leaves in fi->fh comes back with each later request on that open file. fs_release comes once, after
 * the last of them has been answered, so a read may use its handle without a lock or a count. The same with opendir,
 * readdir, releasedir and a listing.
 *
 * The kernel believes names and attributes for a second (libfuse's default), and pages as opened_enter says.
 * fuse_get_context() is about the request: private_data is what fuse_new was given; uid and gid are who asks. */

static struct fs *fs_get(void) { return fuse_get_context()->private_data; }

static struct opened *opened_of(const struct fuse_file_info *fi) { return (struct opened *)(uintptr_t)fi->fh; }

static int fs_getattr(const char *path, struct stat *st, struct fuse_file_info *fi)
{
	struct fs *fs = fs_get();
	struct opened *o = fi ? opened_of(fi) : NULL;
	struct place p;
	int rc;
	if (o) {
		if (fstat(o->fd, st) < 0)
			return -errno;
		st->st_mode &= ~(mode_t)0222;
		if (o->handle) {
			st->st_size = (off_t)o->handle->layout.size;
			st->st_blocks = (st->st_size + 511) / 512;
		}
		return 0;
	}
	rc = place_find(fs, path, &p);
	if (rc)
		return rc;
	*st = p.st;
	rc = attr_show(fs, p.dir, p.name, p.path, p.kind, st);
	close(p.dir);
	return rc;
}

static int fs_readlink(const char *path, char *out, size_t room)
{
	struct fs *fs = fs_get();
	char target[PATH_MAX + NAME_MAX];
	struct place p;
	ssize_t n;
	int rc = place_find(fs, path, &p);
	if (rc)
		return rc;
	n = readlinkat(p.dir, p.name, target, PATH_MAX - 1);
	rc = n < 0 ? -errno : 0;
	if (rc == 0) {
		target[n] = 0;
		link_target(fs, &p, target, sizeof target);
		snprintf(out, room, "%s", target);
	}
	close(p.dir);
	return rc;
}

static int fs_open(const char *path, struct fuse_file_info *fi)
{
	struct fs *fs = fs_get();
	struct opened *o;
	struct place p;
	struct stat st;
	bool direct, keep;
	int rc;
	if ((fi->flags & O_ACCMODE) != O_RDONLY)
		return -EROFS;
	rc = place_find(fs, path, &p);
	if (rc)
		return rc;
	close(p.dir);
	o = calloc(1, sizeof *o);
	if (!o)
		return -ENOMEM;
	o->fd = source_open(fs, p.path, OPEN_FILE, true);
	rc = o->fd < 0 ? o->fd : fstat(o->fd, &st) < 0 ? -errno : S_ISREG(st.st_mode) ? 0 : -ENXIO;
	if (rc == 0 && p.kind == KIND_FLAC)
		rc = handle_open(fs, o->fd, p.path, &o->handle);
	if (rc) {
		if (o->fd >= 0)
			close(o->fd);
		free(o);
		return rc;
	}
	o->identity = o->handle ? o->handle->identity : identity_of(&st);
	o->young = o->handle ? o->handle->young : identity_young(&o->identity);
	o->path = hash_bytes(HASH_START, path, strlen(path));
	opened_enter(fs, o, &direct, &keep);
	fi->direct_io = direct;
	fi->keep_cache = keep;
	fi->fh = (uintptr_t)o;
	return 0;
}

static int fs_release(const char *path, struct fuse_file_info *fi)
{
	struct opened *o = opened_of(fi);
	(void)path;
	opened_leave(fs_get(), o);
	if (o->handle)
		handle_free(fs_get(), o->handle);
	close(o->fd);
	free(o);
	return 0;
}

/* The reply is memory that libfuse frees, or, of a file that is passed through, its descriptor. */
static int fs_read_buf(const char *path, struct fuse_bufvec **out, size_t size, off_t at, struct fuse_file_info *fi)
{
	struct fs *fs = fs_get();
	struct opened *o = opened_of(fi);
	struct fuse_bufvec *v = malloc(sizeof *v);
	int rc = 0;
	(void)path;
	if (!v)
		return -ENOMEM;
	*v = FUSE_BUFVEC_INIT(size);
	if (!o->handle) {
		v->buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
		v->buf[0].fd = o->fd;
		v->buf[0].pos = at;
		*out = v;
		return 0;
	}
	size = (uint64_t)at >= o->handle->layout.size ? 0 : min_u64(size, o->handle->layout.size - (uint64_t)at);
	v->buf[0].size = size;
	v->buf[0].mem = malloc(size ? size : 1);
	rc = v->buf[0].mem ? 0 : -ENOMEM;
	if (rc == 0 && size)
		rc = handle_read(fs, o->handle, v->buf[0].mem, (uint64_t)at, size);
	if (rc) {
		depot_count(&fs->depot, &fs->depot.errors);
		free(v->buf[0].mem);
		free(v);
		return rc;
	}
	*out = v;
	return 0;
}

static int fs_opendir(const char *path, struct fuse_file_info *fi)
{
	struct fs *fs = fs_get();
	struct listing *l;
	struct place p;
	int rc = place_find(fs, path, &p);
	if (rc)
		return rc;
	close(p.dir);
	if (!S_ISDIR(p.st.st_mode))
		return -ENOTDIR;
	l = calloc(1, sizeof *l);
	if (l)
		l->path = strdup(p.path);
	if (!l || !l->path) {
		free(l);
		return -ENOMEM;
	}
	fi->fh = (uintptr_t)l;
	return 0;
}

static int fs_releasedir(const char *path, struct fuse_file_info *fi)
{
	struct listing *l = (struct listing *)(uintptr_t)fi->fh;
	(void)path;
	listing_clear(l);
	free(l->path);
	free(l);
	return 0;
}

/* Entry i has offset i + 3, behind "." and "..". The list is made when reading starts at 0, or at an offset that was
 * told to somebody else (an NFS server opens the directory anew), and stays the same from then on. Attributes are
 * complete or, where a file cannot be looked at, just its type: half of them would be believed. */
static int fs_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t at, struct fuse_file_info *fi,
                      enum fuse_readdir_flags flags)
{
	struct fs *fs = fs_get();
	struct listing *l = (struct listing *)(uintptr_t)fi->fh;
	struct names names = { kind_in_list, l };
	int dir = source_open(fs, l->path, OPEN_DIR & ~O_NOFOLLOW, true), rc = 0;
	bool plus = flags & FUSE_READDIR_PLUS;
	(void)path;
	if (dir < 0)
		return dir;
	if (at == 0 || !l->sorted) {
		int copy = fcntl(dir, F_DUPFD_CLOEXEC, 0);
		DIR *d = copy < 0 ? NULL : fdopendir(copy);
		listing_clear(l);
		rc = d ? listing_read(fs, l, d) : -errno;
		if (!d && copy >= 0)
			close(copy);
	}
	for (size_t i = at < 2 ? (size_t)at : 2; i < 2 && rc == 0; i++) {
		struct stat st;
		if (fstatat(dir, i && *l->path ? ".." : ".", &st, 0) < 0)
			rc = -errno;
		else if (fill(buf, i ? ".." : ".", &st, (off_t)i + 1, 0))
			rc = 1;
	}
	for (size_t i = at < 2 ? 0 : (size_t)at - 2; i < l->n && rc == 0; i++) {
		const struct entry *e = &l->entries[i];
		char shown[NAME_MAX + 1], source[PATH_ROOM];
		struct stat st;
		bool whole;
		path_join(source, l->path, e->source);
		if (source_stat(fs, dir, e->source, source, &st) < 0)
			continue; /* gone since */
		if (e->kind == KIND_FLAC && !name_shown(&names, e->source, shown)) {
			log_problem(source, "name", "cannot be shown: no free name is short enough");
			continue;
		}
		whole = plus && attr_show(fs, dir, e->source, source, e->kind, &st) == 0;
		if (fill(buf, e->kind == KIND_FLAC ? shown : e->source, &st, (off_t)i + 3,
		         whole ? FUSE_FILL_DIR_PLUS : 0))
			rc = 1;
	}
	close(dir);
	return rc < 0 ? rc : 0;
}

static int fs_statfs(const char *path, struct statvfs *st)
{
	struct fs *fs = fs_get();
	(void)path;
	if (fstatvfs(fs->root, st) < 0)
		return -errno;
	st->f_flag |= ST_RDONLY;
	return 0;
}

static void *fs_init(struct fuse_conn_info *conn, struct fuse_config *cfg)
{
	struct fs *fs = fs_get();
	/* The kernel reads ahead with at most this many requests at once; a quarter of the workers is left
	 * for others, so that a stat finds a free one while a slow source holds all of these. */
	if (conn->max_background == 0)
		conn->max_background = fs->workers - fs->workers / 4;
	conn->want &= ~(unsigned)FUSE_CAP_SPLICE_READ;      /* requests are to arrive in memory */
	conn->want &= ~(unsigned)FUSE_CAP_READDIRPLUS_AUTO; /* who lists a library wants sizes */
	cfg->use_ino = 1;                                   /* programs see the source's st_ino */
	cfg->nullpath_ok = 1; /* whoever has fi->fh gets no path, and libfuse need not make one */
	fs->ready = true;
	return fs;
}

/* Answers as if it were not there, but libfuse would not free the poll handle then. */
static int fs_poll(const char *path, struct fuse_file_info *fi, struct fuse_pollhandle *ph, unsigned *events)
{
	(void)path;
	(void)fi;
	(void)events;
	if (ph)
		fuse_pollhandle_destroy(ph);
	return -ENOSYS;
}

/* All else is not there, or is not allowed on a read-only mount: the kernel and libfuse say so. */
static const struct fuse_operations fs_operations = {
	.init = fs_init,
	.getattr = fs_getattr,
	.readlink = fs_readlink,
	.open = fs_open,
	.read_buf = fs_read_buf,
	.release = fs_release,
	.opendir = fs_opendir,
	.readdir = fs_readdir,
	.releasedir = fs_releasedir,
	.statfs = fs_statfs,
	.poll = fs_poll,
};

/* ---- THREAD POOL ------------------------------------------------------------------------------ */

/* To take: this section. Needs pthread.h, errno, signal, time, stdlib.h, libfuse 3, and glibc's execinfo.h.
 *
 * A fixed number of workers that serve a FUSE session: made once, joined at the end, none started or
 * ended in between (libfuse's own loop makes and ends threads as load comes and goes). Each owns its
 * request buffer. It may be cancelled only while it waits for a request, so that a request once begun
 * is always answered.
 *
 * The caller blocks a signal, gives it to pool_start and waits for it with sigwait: it comes when the workers have
 * left by themselves. struct pool has to outlive the workers, after -ETIMEDOUT too. */

struct pool;

struct worker {
	struct pool *pool;
	pthread_t thread;
	struct fuse_buf buf;
};

struct pool {
	struct fuse_session *session;
	struct worker *workers;
	unsigned n;
	pthread_t owner; /* gets `signal` when the workers leave by themselves */
	int signal;
	pthread_mutex_t lock; /* guards `live` */
	pthread_cond_t left;
	unsigned live;
};

/* Also what a cancelled worker does last. */
static void pool_leave(void *arg)
{
	struct pool *p = ((struct worker *)arg)->pool;
	pthread_mutex_lock(&p->lock);
	p->live--;
	pthread_cond_signal(&p->left);
	pthread_mutex_unlock(&p->lock);
}

static void *pool_work(void *arg)
{
	struct worker *w = arg;
	struct fuse_session *se = w->pool->session;
	const struct timespec moment = { .tv_nsec = 10 * 1000 * 1000 };
	pthread_cleanup_push(pool_leave, w);
	while (!fuse_session_exited(se)) {
		int n;
		pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
		n = fuse_session_receive_buf(se, &w->buf);
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
		if (n > 0)
			fuse_session_process_buf(se, &w->buf);
		else if (n == -ENOMEM)
			nanosleep(&moment, NULL); /* others may have a buffer */
		else if (n != -EINTR && n != -EAGAIN)
			break; /* unmounted */
	}
	fuse_session_exit(se);
	pthread_kill(w->pool->owner, w->pool->signal);
	pthread_cleanup_pop(1);
	return NULL;
}

/* Cancels those that wait, and waits `ms` at most for those that work. 0, or -ETIMEDOUT: some still
 * work, and nothing may be freed. */
static int pool_stop(struct pool *p, unsigned ms)
{
	struct timespec until;
	int rc = 0;
	fuse_session_exit(p->session);
	for (unsigned i = 0; i < p->n; i++)
		pthread_cancel(p->workers[i].thread);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += (long)(ms % 1000) * 1000000;
	until.tv_sec += ms / 1000 + until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	pthread_mutex_lock(&p->lock);
	while (p->live && rc == 0)
		rc = pthread_cond_timedwait(&p->left, &p->lock, &until);
	rc = p->live ? -ETIMEDOUT : 0;
	pthread_mutex_unlock(&p->lock);
	for (unsigned i = 0; rc == 0 && i < p->n; i++) {
		pthread_join(p->workers[i].thread, NULL);
		free(p->workers[i].buf.mem);
	}
	if (rc == 0)
		free(p->workers);
	return rc;
}

/* Starts `n` workers for `session`. When they leave by themselves, because it was unmounted, `sig` is
 * sent to the calling thread. All signals are blocked in them. 0 or a negative errno, and then none
 * runs, but after -ETIMEDOUT. */
static int pool_start(struct pool *p, struct fuse_session *session, unsigned n, int sig)
{
	sigset_t all, old;
	int rc = 0;
	*p = (struct pool){ .session = session, .owner = pthread_self(), .signal = sig };
#ifdef __GLIBC__
	/* pthread_cancel loads libgcc_s when it is first called, and aborts if it cannot, for want of a file
	 * descriptor, say; backtrace loads it now */
	void *ignored[1];
	backtrace(ignored, 1);
#endif
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->left, NULL);
	p->workers = calloc(n, sizeof *p->workers);
	if (!p->workers)
		return -ENOMEM;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (p->n < n && rc == 0) {
		struct worker *w = &p->workers[p->n];
		w->pool = p;
		pthread_mutex_lock(&p->lock);
		p->live++;
		rc = pthread_create(&w->thread, NULL, pool_work, w);
		p->live -= rc != 0;
		pthread_mutex_unlock(&p->lock);
		p->n += rc == 0;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return rc && pool_stop(p, 10000) == -ETIMEDOUT ? -ETIMEDOUT : -rc;
}

/* ---- OPTIONS ---------------------------------------------------------------------------------- */

struct options {
	char *source, *mountpoint;
	char *max_threads, *stat_cache;
	int foreground, debug, single, help, version;
	int follow, conceal, no_foreign, stats, nonempty;
	int allow_other, no_effect;
};

enum { KEY_DROP, KEY_NO_EFFECT, KEY_ALLOW_OTHER, KEY_DEBUG };

#define OPTION(t, member)                                                                                              \
	{                                                                                                              \
		t, offsetof(struct options, member), 1                                                                 \
	}
static const struct fuse_opt option_table[] = {
	OPTION("-h", help),
	OPTION("--help", help),
	OPTION("-V", version),
	OPTION("--version", version),
	OPTION("-f", foreground),
	OPTION("-s", single),
	{ "max_threads=%s", offsetof(struct options, max_threads), 0 },
	{ "stat_cache=%s", offsetof(struct options, stat_cache), 0 },
	OPTION("follow_symlinks", follow),
	OPTION("conceal", conceal),
	OPTION("no_foreign", no_foreign),
	OPTION("stats", stats),
	OPTION("nonempty", nonempty),
	FUSE_OPT_KEY("-d", KEY_DEBUG),
	FUSE_OPT_KEY("debug", KEY_DEBUG),
	FUSE_OPT_KEY("allow_other", KEY_ALLOW_OTHER),
	/* the number of threads is fixed, and all share one descriptor of /dev/fuse */
	FUSE_OPT_KEY("max_idle_threads=", KEY_NO_EFFECT),
	FUSE_OPT_KEY("clone_fd", KEY_NO_EFFECT),
	/* what fstab, systemd and autofs pass along, meant for others */
	FUSE_OPT_KEY("nofail", KEY_DROP),
	FUSE_OPT_KEY("_netdev", KEY_DROP),
	FUSE_OPT_KEY("auto", KEY_DROP),
	FUSE_OPT_KEY("noauto", KEY_DROP),
	FUSE_OPT_KEY("user", KEY_DROP),
	FUSE_OPT_KEY("user=", KEY_DROP),
	FUSE_OPT_KEY("nouser", KEY_DROP),
	FUSE_OPT_KEY("users", KEY_DROP),
	FUSE_OPT_KEY("owner", KEY_DROP),
	FUSE_OPT_KEY("group", KEY_DROP),
	FUSE_OPT_KEY("defaults", KEY_DROP),
	FUSE_OPT_KEY("rw", KEY_DROP),
	FUSE_OPT_KEY("ro", KEY_DROP), /* it always is */
	FUSE_OPT_KEY("comment=", KEY_DROP),
	FUSE_OPT_KEY("nodiratime", KEY_DROP), /* nothing is written, no access time either */
	FUSE_OPT_KEY("relatime", KEY_DROP),
	FUSE_OPT_KEY("norelatime", KEY_DROP),
	FUSE_OPT_KEY("strictatime", KEY_DROP),
	FUSE_OPT_KEY("nostrictatime", KEY_DROP),
	FUSE_OPT_KEY("lazytime", KEY_DROP),
	FUSE_OPT_KEY("nolazytime", KEY_DROP),
	FUSE_OPT_KEY("silent", KEY_DROP),
	FUSE_OPT_KEY("loud", KEY_DROP),
	FUSE_OPT_KEY("-n", KEY_DROP),
	FUSE_OPT_KEY("-v", KEY_DROP),
	FUSE_OPT_END
};

/* Says what is wrong with the command line. */
static void usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
static void usage_error(const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	fputs("aifffffs: ", stderr);
	vfprintf(stderr, fmt, ap);
	fputs("\nusage: aifffffs [options] source mountpoint (aifffffs -h tells more)\n", stderr);
	va_end(ap);
	exit(2);
}

/* libfuse's callback for each argument that the table does not store: 0 drops it, 1 leaves it to libfuse. */
static int take_option(void *data, const char *arg, int key, struct fuse_args *args)
{
	struct options *o = data;
	(void)args;
	switch (key) {
	case KEY_DROP:
		return 0;
	case KEY_NO_EFFECT:
		o->no_effect = 1;
		return 0;
	case KEY_ALLOW_OTHER:
		o->allow_other = 1;
		return 1;
	case KEY_DEBUG:
		o->debug = o->foreground = 1;
		return 1;
	case FUSE_OPT_KEY_NONOPT:
		if (o->mountpoint)
			usage_error("%s: one argument too many", arg);
		*(o->source ? &o->mountpoint : &o->source) = strdup(arg);
		return 0;
	default:
		if (strncmp(arg, "x-", 2) == 0)
			return 0;
		return 1;
	}
}

/* A number in [least, most]; usage error if `text` is something else. */
static unsigned option_number(const char *name, const char *text, unsigned least, unsigned most)
{
	char *end;
	long v;
	errno = 0;
	v = strtol(text, &end, 10);
	if (errno || strspn(text, " \t\n+") || end == text || *end || v < (long)least || v > (long)most)
		usage_error("%s=%s: must be a number from %u to %u", name, text, least, most);
	return (unsigned)v;
}

static void print_help(void)
{
	printf("usage: aifffffs [options] source mountpoint\n"
	       "Shows the tree source at mountpoint, every FLAC file as AIFF.\n"
	       "\n"
	       "  -f                   stay in the foreground, log to stderr\n"
	       "  -d                   the same, and print every request\n"
	       "  -s                   one worker: -o max_threads=1\n"
	       "  -o max_threads=N     workers, 1 to %d (the larger of 16 and two per CPU)\n"
	       "  -o follow_symlinks   show what symlinks point at (off: show symlinks)\n"
	       "  -o conceal           silence for damaged sound (off: an input/output error)\n"
	       "  -o no_foreign        AIFF metadata kept by flac are not used (off: used)\n"
	       "  -o stat_cache=N      files whose size is remembered (%d; 0: none)\n"
	       "  -o stats             write the statistics line when unmounted (off)\n"
	       "  -o nonempty          allow source and mountpoint to be the same (off)\n"
	       "  -o allow_other       let other users in; see fuse.conf(5)\n"
	       "  -o ...               all else that mount.fuse3(8) lists\n"
	       "  -h, -V               this help, the version\n"
	       "\n"
	       "Unmount with: fusermount3 -u mountpoint\n",
	       MAX_WORKERS, STAT_CACHE);
}

/* ---- MAIN ------------------------------------------------------------------------------------- */

static unsigned count_cpus(void)
{
	long n = sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __linux__
	cpu_set_t set;
	if (sched_getaffinity(0, sizeof set, &set) == 0)
		n = CPU_COUNT(&set);
#endif
	return n < 1 ? 1 : (unsigned)n;
}

/* Room for as many open files as the system allows. */
static void raise_file_limit(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
		limit.rlim_cur = limit.rlim_max;
		setrlimit(RLIMIT_NOFILE, &limit);
	}
}

/* glibc gives each worker a heap and leaves in it, free, as much as the largest block that was ever in one. */
static void limit_heaps(void)
{
#ifdef __GLIBC__
	mallopt(M_MMAP_THRESHOLD, 1 << 20);
	mallopt(M_TRIM_THRESHOLD, 1 << 20);
#endif
}

/* Opens the source and finds out where the mountpoint is, before it is a mountpoint. */
static void open_source(struct fs *fs, const struct options *o)
{
	struct stat st;
	char above[PATH_MAX + 4];
	const char *below;
	if (strncmp(o->mountpoint, "/dev/fd/", 8) == 0) /* where that is mounted is not known */
		usage_error("%s: drop_privileges does not work with aifffffs", o->mountpoint);
	fs->root = open(o->source, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fs->root < 0)
		err(1, "%s", o->source);
	fs->source = realpath(o->source, NULL);
	if (!fs->source)
		err(1, "%s", o->source);
	if (stat(o->mountpoint, &st) < 0)
		err(1, "%s", o->mountpoint);
	if (!S_ISDIR(st.st_mode)) {
		errno = ENOTDIR;
		err(1, "%s", o->mountpoint);
	}
	fs->mountpoint = realpath(o->mountpoint, NULL);
	if (!fs->mountpoint)
		err(1, "%s", o->mountpoint);
	snprintf(above, sizeof above, "%s/..", fs->mountpoint);
	if (stat(above, &fs->above) < 0)
		err(1, "%s", above);
	below = path_below(fs->mountpoint, fs->source);
	if (below && !*below && !o->nonempty)
		usage_error("%s: source and mountpoint are the same; -o nonempty mounts over it", o->source);
	if (below && *below)
		fs->hidden = below;
}

/* Whether a FUSE file system is mounted right there. */
static bool is_fuse_mount(const char *path)
{
#ifdef __linux__
	char parent[PATH_MAX + 4];
	struct stat st, up;
	struct statfs fs;
	snprintf(parent, sizeof parent, "%s/..", path);
	return statfs(path, &fs) == 0 && fs.f_type == 0x65735546 && stat(path, &st) == 0 && stat(parent, &up) == 0 &&
	       st.st_dev != up.st_dev;
#else
	return (void)path, false;
#endif
}

static void fs_setup(struct fs *fs, const struct options *o)
{
	unsigned cpus = count_cpus();
	fs->follow = o->follow;
	fs->conceal = o->conceal;
	fs->no_foreign = o->no_foreign;
	fs->stats = o->stats;
	fs->as_caller = o->allow_other && geteuid() == 0;
	fs->workers = o->single ? 1 : (unsigned)max_u64(16, 2 * cpus);
	if (fs->workers > MAX_WORKERS)
		fs->workers = MAX_WORKERS;
	if (o->max_threads && !o->single)
		fs->workers = option_number("max_threads", o->max_threads, 1, MAX_WORKERS);
	fs->depot = (struct depot){ .lock = PTHREAD_MUTEX_INITIALIZER,
		                    .cpus = cpus,
		                    .per_handle = (unsigned)max_u64(4, cpus),
		                    .idle_max = IDLE_DECODERS };
	fs->opened_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	if (cache_init(&fs->cache,
	               o->stat_cache ? option_number("stat_cache", o->stat_cache, 0, 1u << 30) : STAT_CACHE) != 0)
		errx(1, "stat_cache: %s", strerror(ENOMEM));
}

/* The statistics line. */
static void write_stats(struct fs *fs)
{
	struct depot *p = &fs->depot;
	char line[512];
	pthread_mutex_lock(&p->lock);
	snprintf(line, sizeof line,
	         "stats threads=%u handles=%u decoders=%u reads=%" PRIu64 " hits=%" PRIu64 " seeks=%" PRIu64
	         " errors=%" PRIu64 " fallbacks=%" PRIu64,
	         fs->workers, p->handles, p->alive, p->reads, p->hits, p->seeks, p->errors, p->fallbacks);
	pthread_mutex_unlock(&p->lock);
	log_line("%s", line);
}

/* libfuse's own messages, once there is no stderr. */
static void log_libfuse(enum fuse_log_level level, const char *fmt, va_list ap) { vsyslog((int)level, fmt, ap); }

/* Options for libfuse that are ours to give: always read-only, permissions checked by the kernel. */
static int add_options(struct fuse_args *args, const struct fs *fs)
{
	char *opts = NULL, *fsname = malloc(strlen(fs->source) + 8);
	int rc;
	if (!fsname)
		return -1;
	sprintf(fsname, "fsname=%s", fs->source);
	rc = fuse_opt_add_opt(&opts, "ro,default_permissions,subtype=aifffffs");
	if (rc == 0)
		rc = fuse_opt_add_opt_escaped(&opts, fsname);
	if (rc == 0)
		rc = fuse_opt_insert_arg(args, 1, opts);
	if (rc == 0)
		rc = fuse_opt_insert_arg(args, 1, "-o");
	free(opts);
	free(fsname);
	return rc;
}

/* Mounts, and answers the kernel's first request: only then does libfuse know how large requests can
 * be, and the mount is of use. */
static struct fuse *mount_fs(struct fs *fs, struct fuse_args *args)
{
	struct fuse_buf first = { 0 };
	struct fuse *fuse = fuse_new(args, &fs_operations, sizeof fs_operations, fs);
	int n;
	if (!fuse)
		exit(2); /* it has said why */
	if (is_fuse_mount(fs->mountpoint)) {
		errno = EBUSY;
		err(1, "%s", fs->mountpoint);
	}
	if (fuse_mount(fuse, fs->mountpoint) != 0)
		errx(1, "%s: cannot mount", fs->mountpoint);
	n = fuse_session_receive_buf(fuse_get_session(fuse), &first);
	if (n > 0)
		fuse_session_process_buf(fuse_get_session(fuse), &first);
	free(first.mem);
	if (!fs->ready) { /* unmounted already, or no memory */
		fuse_unmount(fuse);
		errx(1, "%s: cannot mount", fs->mountpoint);
	}
	return fuse;
}

/* The signals that main waits for. SIGHUP is not one of them under nohup; SIGINT is, also where a shell has made the
 * program ignore it, as it does behind "&". */
static void wait_set(sigset_t *set)
{
	struct sigaction hup;
	sigemptyset(set);
	sigaddset(set, SIGUSR1);
	sigaddset(set, SIGINT);
	sigaddset(set, SIGTERM);
	if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN)
		sigaddset(set, SIGHUP);
}

/* Takes away what is left of a mount whose connection was cut, which libfuse believes to be gone. */
static void unmount_dead(const char *mountpoint)
{
	int fd = open(mountpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* stat could be answered from a cache */
	if (fd >= 0)
		close(fd);
	if (fd >= 0 || errno != ENOTCONN)
		return;
#ifdef __linux__
	if (umount2(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW) == 0)
		return;
#endif
	if (fork() == 0) {
		execlp("fusermount3", "fusermount3", "-u", "-q", "-z", "--", mountpoint, (char *)NULL);
		_exit(127);
	}
	wait(NULL);
}

/* Serves until a signal or the unmount, and leaves nothing behind. Returns the exit status. */
static int serve(struct fs *fs, struct fuse *fuse, const sigset_t *signals)
{
	struct pool pool;
	int sig = SIGUSR1, started, rc = pool_start(&pool, fuse_get_session(fuse), fs->workers, SIGTERM);
	if (rc)
		log_line("cannot start %u threads: %s", fs->workers, strerror(-rc));
	else
		fuse_start_cleanup_thread(fuse); /* does nothing, but for -o remember=T */
	started = rc == 0;
	while (started && sig == SIGUSR1)
		if (sigwait(signals, &sig) == 0 && sig == SIGUSR1)
			write_stats(fs);
	if (started) {
		rc = pool_stop(&pool, STOP_MS);
		fuse_stop_cleanup_thread(fuse);
	}
	fuse_unmount(fuse);
	unmount_dead(fs->mountpoint);
	if (fs->stats)
		write_stats(fs);
	if (rc == -ETIMEDOUT) /* a worker sits in a slow source; the kernel has let its reader go */
		_exit(started ? 0 : 1);
	return rc ? 1 : 0;
}

int main(int argc, char *argv[])
{
	static struct fs fs; /* workers that do not come back may still look at it */
	struct fuse_args args = FUSE_ARGS_INIT(argc, argv);
	struct options o = { 0 };
	struct fuse *fuse;
	sigset_t signals;
	int status;

	if (fuse_opt_parse(&args, &o, option_table, take_option) != 0)
		return 2;
	if (o.help || o.version) {
		if (o.help)
			print_help();
		else
			printf("aifffffs %s, libfuse %s, libFLAC %s\n", AIFFFFFS_VERSION, fuse_pkgversion(),
			       FLAC__VERSION_STRING);
		fuse_opt_free_args(&args);
		return 0;
	}
	if (!o.source || !o.mountpoint)
		usage_error(o.source ? "no mountpoint" : "no source and no mountpoint");
	fs_setup(&fs, &o);
	open_source(&fs, &o);
	if (o.no_effect)
		log_line("max_idle_threads and clone_fd have no effect");
	raise_file_limit();
	limit_heaps();

	/* from here on signals wait until there is somebody to act on them: none may leave a dead mount */
	wait_set(&signals);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	signal(SIGPIPE, SIG_IGN);
	if (add_options(&args, &fs) != 0)
		errx(1, "%s", strerror(ENOMEM));
	fuse = mount_fs(&fs, &args);

	if (fuse_daemonize(o.foreground) != 0) {
		fuse_unmount(fuse);
		return 1;
	}
	if (!o.foreground) {
		openlog("aifffffs", LOG_PID, LOG_DAEMON);
		log_state.to_syslog = true;
		fuse_set_log_func(log_libfuse);
	}
	status = serve(&fs, fuse, &signals);

	fuse_destroy(fuse);
	fuse_opt_free_args(&args);
	cache_free(&fs.cache);
	free(fs.source);
	free(fs.mountpoint);
	free(o.source);
	free(o.mountpoint);
	free(o.max_threads);
	free(o.stat_cache);
	close(fs.root);
	return status;
}
