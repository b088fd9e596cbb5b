/* Frozen tables of kvjax in C: a header that maps their files and looks rows up, with C99, POSIX and nothing
 * else.
 *
 * docs/frozen-format.md describes the format, and shows this header at work. C++ includes it as it is. For
 * languages that call C, make a library of it:
 *
 *     cc -O2 -ffp-contract=off -shared -fPIC -DFROZEN_API= -x c frozen_table.h -o libfrozen.so -lm
 *
 * Rows are those of kvjax.serving.FrozenTable, to the bit. Random initial rows are only without fused
 * products and sums, which -ffp-contract=off leaves out. Nothing in an open table changes, so any number of
 * threads may read it.
 */
#ifndef KVJAX_FROZEN_TABLE_H
#define KVJAX_FROZEN_TABLE_H

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a frozen table is little-endian"
#endif
#ifdef __FAST_MATH__
#error "initial rows would be others with -ffast-math"
#endif
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L /* which -std=c99 leaves out */
#endif

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "initial rows would be others with numbers of more bits: on x86 use -mfpmath=sse -msse2"
#endif

#ifdef __cplusplus
extern "C" {
#endif

#ifndef FROZEN_API
#define FROZEN_API static inline
#endif

enum { FROZEN_FLOAT32, FROZEN_FLOAT16, FROZEN_BFLOAT16, FROZEN_INT8 };
enum {
  FROZEN_CONSTANT,
  FROZEN_UNIFORM,
  FROZEN_NORMAL,
  FROZEN_TRUNCATED_NORMAL,
  FROZEN_POOL,
  FROZEN_SEGMENTS
};

/* Columns of initial rows, up to `end`, by one distribution: a is the constant, the lower bound or the mean,
 * and b the upper bound or the standard deviation. */
typedef struct {
  uint32_t end;
  int kind;
  double a, b;
} frozen_segment;

typedef struct {
  /* What a user may read. */
  uint64_t rows; /* keys that have one */
  uint32_t dim;
  int64_t step; /* of training */
  /* The arrays of the file, and how they are read. */
  const uint32_t* starts;
  const uint64_t* hashes;
  const unsigned char* values;
  const float *scales, *pool;
  int dtype, bits, steps, row_bytes;
  /* Initial rows: by segments, or of a pool; as_initial is 0 where keys without a row read as the last row.
   */
  int as_initial, initial_dtype;
  uint64_t seed, pool_rows;
  size_t num_segments;
  frozen_segment* segments;
  /* The whole file, and its description. */
  void* whole;
  size_t size;
  char* json;
} frozen_table;

/* Maps a file. Returns NULL if it is no frozen table, and says why in `why`, of `room` bytes. */
FROZEN_API frozen_table* frozen_open(const char* path, char* why, size_t room);

FROZEN_API void frozen_close(frozen_table* table);

/* Whether all bytes that are ever read are those that were written; it reads all of them. */
FROZEN_API int frozen_verify(const frozen_table* table);

/* Looks rows up.
 *
 *   keys: n of them, 64 bits each. Of a table with key_dtype "int32" they are sign-extended, with "uint32"
 * zero-extended. rows: space for n * dim numbers. found: NULL, or space for n bytes: 1 for keys that have a
 * row.
 *
 * Returns how many keys have one. */
FROZEN_API size_t frozen_lookup(const frozen_table* table, const int64_t* keys, size_t n, float* rows,
                                unsigned char* found);

/* ---- JSON: the description is an object whose names are not escaped ---- */

static const char* frozen_after_string(const char* at) {
  for (++at; *at != '\0' && *at != '"'; ++at)
    if (*at == '\\' && at[1] != '\0') ++at;
  return *at == '"' ? at + 1 : at;
}

/* The end of the value that begins here. */
static const char* frozen_after_value(const char* at) {
  int depth = 0;
  while (*at != '\0') {
    if (*at == '"') {
      at = frozen_after_string(at);
    } else if (*at == '{' || *at == '[') {
      ++depth, ++at;
    } else if (*at == '}' || *at == ']') {
      if (depth == 0) return at;
      --depth, ++at;
    } else if (*at == ',' && depth == 0) {
      return at;
    } else {
      ++at;
    }
    if (depth == 0 && (at[-1] == '}' || at[-1] == ']')) return at;
  }
  return at;
}

/* The value of a member of the object that begins here; "" if it has none. */
static const char* frozen_member(const char* at, const char* name) {
  const size_t length = strlen(name);
  if (*at != '{') return "";
  ++at;
  while (*at == ' ' || *at == '"') {
    if (*at == ' ') {
      ++at;
      continue;
    }
    const char* const key = at + 1;
    at = frozen_after_string(at);
    const int same = (size_t)(at - key) == length + 1 && memcmp(key, name, length) == 0;
    if (*at == ':') ++at;
    while (*at == ' ') ++at;
    if (same) return at;
    at = frozen_after_value(at);
    if (*at == ',') ++at;
  }
  return "";
}

/* Whether a number ends here. */
static int frozen_ends(const char* at) { return *at == ',' || *at == '}' || *at == ']'; }

/* A number, with a point whatever the locale says: frozen_open sees to that. Returns 0 if it is none. */
static int frozen_number(const char* at, double* x) {
  char* end = NULL;
  *x = strtod(at, &end);
  return end != at && frozen_ends(end);
}

/* An integer of 0 to `most`; else `most` + 1. */
static uint64_t frozen_integer(const char* at, uint64_t most) {
  char* end = NULL;
  if (*at < '0' || *at > '9') return most + 1;
  const uint64_t x = strtoull(at, &end, 10);
  return x > most || !frozen_ends(end) ? most + 1 : x;
}

/* The number of a name in a list that ends with NULL; -1 if it is none of them. */
static int frozen_choice(const char* at, const char* const* names) {
  for (int i = 0; names[i] != NULL; ++i) {
    const size_t length = strlen(names[i]);
    if (at[0] == '"' && strncmp(at + 1, names[i], length) == 0 && at[1 + length] == '"') return i;
  }
  return -1;
}

/* ---- opening ---- */

static uint32_t frozen_crc32(const unsigned char* data, size_t n) {
  uint32_t table[256], crc = 0xFFFFFFFFu;
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320u : 0);
  }
  for (size_t i = 0; i < n; ++i) crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
  return ~crc;
}

/* The arrays in the order of the file: the first byte and the size of each. Returns where the description
 * begins. */
static uint64_t frozen_places(const frozen_table* t, uint64_t at[5], uint64_t bytes[5]) {
  const uint64_t n = t->rows + 1;
  bytes[0] = (uint64_t)4 << t->bits;
  bytes[1] = 8 * n;
  bytes[2] = (uint64_t)t->row_bytes * n;
  bytes[3] = t->dtype == FROZEN_INT8 ? 4 * n : 0;
  bytes[4] = t->pool_rows * t->dim * 4;
  uint64_t end = 64;
  for (int i = 0; i < 5; ++i) {
    at[i] = end;
    end = (end + bytes[i] + 63) / 64 * 64;
  }
  return end;
}

/* What the description says of initial rows. Returns 0 if it says nothing that this knows. */
static int frozen_read_initial(frozen_table* t, const char* initial) {
  static const char* const kinds[] = {"constant", "uniform",  "normal", "truncated_normal",
                                      "pool",     "segments", NULL};
  static const char* const dtypes[] = {"float32", "float16", "bfloat16", NULL};
  const int kind = frozen_choice(frozen_member(initial, "kind"), kinds);
  t->initial_dtype = frozen_choice(frozen_member(initial, "dtype"), dtypes);
  const char* const seed = frozen_member(initial, "seed");
  t->seed = strtoull(seed, NULL, 10);
  t->pool_rows = frozen_integer(frozen_member(initial, "pool"), UINT32_MAX);
  if (kind < 0 || t->initial_dtype < 0 || t->pool_rows > UINT32_MAX || *seed < '0' || *seed > '9') return 0;
  if (kind == FROZEN_POOL) return t->pool_rows > 0;
  if (t->pool_rows != 0) return 0;
  const char* at = frozen_member(initial, "segments");
  const size_t most = kind == FROZEN_SEGMENTS ? strlen(at) / 8 + 1 : 1; /* no segment is shorter */
  t->segments = (frozen_segment*)calloc(most, sizeof(frozen_segment));
  if (t->segments == NULL) return 0;
  if (kind != FROZEN_SEGMENTS) {
    frozen_segment* const s = &t->segments[t->num_segments++];
    s->end = t->dim, s->kind = kind;
    return frozen_number(frozen_member(initial, "a"), &s->a) &&
           frozen_number(frozen_member(initial, "b"), &s->b);
  }
  uint32_t begin = 0;
  while (*at == '[' || *at == ' ' || *at == ',') {
    if (*at++ != '[' || *at == '[') continue;
    const char* part[4] = {at, NULL, NULL, NULL};
    for (int i = 1; i < 4; ++i) {
      part[i] = frozen_after_value(part[i - 1]);
      while (*part[i] == ',' || *part[i] == ' ') ++part[i];
    }
    const uint64_t end = frozen_integer(part[0], t->dim);
    const int of = frozen_choice(part[1], kinds);
    if (end <= begin || end > t->dim || of < 0 || of >= FROZEN_POOL || t->num_segments == most) return 0;
    frozen_segment* const s = &t->segments[t->num_segments++];
    s->end = begin = (uint32_t)end, s->kind = of;
    if (!frozen_number(part[2], &s->a) || !frozen_number(part[3], &s->b)) return 0;
    at = frozen_after_value(part[3]);
    if (*at == ']') ++at;
  }
  return begin == t->dim;
}

/* What is wrong with a mapped file; NULL if nothing is, and then the table is filled in. */
static const char* frozen_parse(frozen_table* t) {
  static const char* const dtypes[] = {"float32", "float16", "bfloat16", "int8", NULL};
  static const char* const missing[] = {"row", "init", NULL};
  static const int itemsizes[] = {4, 2, 2, 1};
  const unsigned char* const file = (const unsigned char*)t->whole;
  if (t->size < 80 || memcmp(file, "kvjaxFT2", 8) != 0) return "it does not begin as a frozen table";
  uint32_t length = 0, crc = 0;
  memcpy(&length, file + t->size - 16, 4);
  memcpy(&crc, file + t->size - 12, 4);
  if (memcmp(file + t->size - 8, "kvjaxFTe", 8) != 0) return "it does not end as a frozen table";
  if (length > t->size - 80 || length > 1u << 20) return "its description does not fit";
  const unsigned char* const json = file + t->size - 16 - length;
  if (frozen_crc32(json, length) != crc) return "its description is damaged";
  t->json = (char*)malloc(length + 1);
  if (t->json == NULL) return "there is no memory";
  memcpy(t->json, json, length);
  t->json[length] = '\0';
  t->rows = frozen_integer(frozen_member(t->json, "rows"), UINT32_MAX - 1);
  const uint64_t dim = frozen_integer(frozen_member(t->json, "dim"), 1 << 24);
  t->bits = (int)frozen_integer(frozen_member(t->json, "bits"), 32);
  t->steps = (int)frozen_integer(frozen_member(t->json, "steps"), 32);
  t->step = strtoll(frozen_member(t->json, "step"), NULL, 10);
  t->dtype = frozen_choice(frozen_member(t->json, "dtype"), dtypes);
  t->as_initial = frozen_choice(frozen_member(t->json, "missing"), missing);
  if (t->rows > UINT32_MAX - 1 || dim < 1 || dim > 1 << 24 || t->bits < 1 || t->bits > 32 || t->steps > 32 ||
      t->dtype < 0 || t->as_initial < 0)
    return "its description is none of a frozen table";
  t->dim = (uint32_t)dim;
  t->row_bytes = (int)dim * itemsizes[t->dtype];
  const char* const initial = frozen_member(t->json, "initial");
  if (*initial == '{' ? !frozen_read_initial(t, initial) : t->as_initial)
    return "its initial rows are unknown";
  uint64_t at[5], bytes[5];
  if (frozen_places(t, at, bytes) != (uint64_t)(json - file)) return "its arrays have another size";
  t->starts = (const uint32_t*)(file + at[0]);
  t->hashes = (const uint64_t*)(file + at[1]);
  t->values = file + at[2];
  t->scales = (const float*)(file + at[3]);
  t->pool = (const float*)(file + at[4]);
  return NULL;
}

FROZEN_API void frozen_close(frozen_table* t) {
  if (t == NULL) return;
  if (t->whole != NULL) munmap(t->whole, t->size);
  free(t->segments);
  free(t->json);
  free(t);
}

FROZEN_API frozen_table* frozen_open(const char* path, char* why, size_t room) {
  const char *wrong = "it cannot be opened", *system = "";
  frozen_table* t = (frozen_table*)calloc(1, sizeof(frozen_table));
  const locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  /* Opening a FIFO would wait for who writes it. */
  const int fd = t == NULL || plain == (locale_t)0 ? -1 : open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  struct stat found;
  void* whole = MAP_FAILED;
  if (fd < 0 || fstat(fd, &found) != 0) {
    system = strerror(errno);
  } else if (!S_ISREG(found.st_mode) || found.st_size == 0) {
    wrong = "it is no file, or an empty one";
  } else if ((whole = mmap(NULL, (size_t)found.st_size, PROT_READ, MAP_SHARED, fd, 0)) == MAP_FAILED) {
    wrong = "it cannot be mapped", system = strerror(errno);
  } else {
    t->whole = whole, t->size = (size_t)found.st_size;
    const locale_t before = uselocale(plain);
    wrong = frozen_parse(t);
    uselocale(before);
  }
  if (fd >= 0) close(fd);
  if (plain != (locale_t)0) freelocale(plain);
  if (wrong == NULL) return t;
  if (why != NULL && room > 0)
    snprintf(why, room, "frozen table %s: %s%s%s", path, wrong, *system == '\0' ? "" : ": ", system);
  frozen_close(t);
  return NULL;
}

FROZEN_API int frozen_verify(const frozen_table* t) {
  static const char* const names[] = {"starts", "hashes", "rows", "scales", "pool"};
  const char* const digests = frozen_member(t->json, "crc32");
  uint64_t at[5], bytes[5];
  frozen_places(t, at, bytes);
  for (int i = 0; i < 5; ++i) {
    const char* const digest = frozen_member(digests, names[i]);
    if ((*digest != '\0') != (bytes[i] > 0)) return 0;
    if (bytes[i] == 0) continue;
    if (frozen_crc32((const unsigned char*)t->whole + at[i], (size_t)bytes[i]) !=
        frozen_integer(digest, UINT32_MAX))
      return 0;
  }
  return 1;
}

/* ---- elements ---- */

static float frozen_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static uint32_t frozen_bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static float frozen_of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31) return frozen_of_bits(sign | 0x7F800000u | mantissa << 13);
  if (exponent != 0) return frozen_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  const float x = (float)mantissa * 5.9604644775390625e-8f; /* 2**-24 */
  return sign != 0 ? -x : x;
}

/* The nearest number of the table's dtype, ties to even. */
static float frozen_rounded(float x, int dtype) {
  const uint32_t bits = frozen_bits_of(x), magnitude = bits & 0x7FFFFFFFu;
  if (dtype == FROZEN_FLOAT32 || magnitude >= 0x7F800000u) return x;
  if (dtype == FROZEN_BFLOAT16) return frozen_of_bits((bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u);
  /* Below 2**-14, multiples of 2**-24: added to 0.5, which has such a spacing. */
  if (magnitude < 0x38800000u) {
    const float near = frozen_of_bits(magnitude) + 0.5f;
    const float rounded = near - 0.5f;
    return bits >> 31 ? -rounded : rounded;
  }
  const uint32_t rounded = (magnitude + 0xFFFu + (magnitude >> 13 & 1)) & ~0x1FFFu;
  return frozen_of_bits((bits & 0x80000000u) |
                        (rounded > 0x477FE000u ? 0x7F800000u : rounded)); /* above 65504 */
}

static void frozen_decode(const frozen_table* t, uint64_t row, float* to) {
  const unsigned char* const from = t->values + row * (uint64_t)t->row_bytes;
  uint16_t half;
  switch (t->dtype) {
    case FROZEN_FLOAT32:
      memcpy(to, from, (size_t)t->row_bytes);
      break;
    case FROZEN_FLOAT16:
      for (uint32_t d = 0; d < t->dim; ++d)
        memcpy(&half, from + 2 * (size_t)d, 2), to[d] = frozen_of_half(half);
      break;
    case FROZEN_BFLOAT16:
      for (uint32_t d = 0; d < t->dim; ++d)
        memcpy(&half, from + 2 * (size_t)d, 2), to[d] = frozen_of_bits((uint32_t)half << 16);
      break;
    default:
      for (uint32_t d = 0; d < t->dim; ++d) to[d] = (float)(signed char)from[d] * t->scales[row];
  }
}

/* ---- initial rows ---- */

/* Four random words of a key: Philox4x32-10. */
static void frozen_random(uint64_t key, uint32_t block, uint64_t seed, uint32_t out[4]) {
  uint32_t c0 = (uint32_t)key, c1 = (uint32_t)(key >> 32), c2 = block, c3 = 0;
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)p1;
    c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)p0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

static double frozen_log(double x) {
  int exponent;
  double m = frexp(x, &exponent);
  if (m < 0.70710678118654752440) m *= 2.0, --exponent;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 1.0 / 17.0;
  for (int k = 15; k > 0; k -= 2) sum = sum * z + 1.0 / k;
  return exponent * 0.69314718055994530942 + 2.0 * s * sum;
}

/* Wichura's AS 241, its routine of seven digits. */
static double frozen_inverse_normal(double p) {
  const double q = p - 0.5;
  double r = 0.180625 - q * q;
  if (fabs(q) <= 0.425)
    return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  r = sqrt(-frozen_log(q < 0 ? p : 1.0 - p)) - 1.6;
  const double x = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
                   ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  return q < 0 ? -x : x;
}

static void frozen_initial(const frozen_table* t, uint64_t key, uint64_t hash, float* to) {
  if (t->num_segments == 0) { /* a pool: floor(hash / 2**64 * rows) */
    const uint64_t n = t->pool_rows, at = ((hash >> 32) * n + ((hash & 0xFFFFFFFFu) * n >> 32)) >> 32;
    memcpy(to, t->pool + at * t->dim, t->dim * sizeof(float));
  }
  uint32_t d = 0, words[4], block = UINT32_MAX;
  for (size_t i = 0; i < t->num_segments; ++i) {
    const frozen_segment s = t->segments[i];
    for (; d < s.end; ++d) {
      double x = s.a;
      if (s.kind != FROZEN_CONSTANT) {
        if (d / 4 != block) frozen_random(key, block = d / 4, t->seed, words);
        double u = ((double)words[d % 4] + 0.5) * (1.0 / 4294967296.0);
        if (s.kind == FROZEN_TRUNCATED_NORMAL) u = 0.022750131948179195 + 0.95449973610364159 * u;
        x = s.kind == FROZEN_UNIFORM ? s.a + (s.b - s.a) * u : s.a + s.b * frozen_inverse_normal(u);
      }
      to[d] = (float)x;
    }
  }
  for (d = 0; d < t->dim; ++d) to[d] = frozen_rounded(to[d], t->initial_dtype);
}

/* ---- lookup ---- */

static uint64_t frozen_mix(uint64_t x) {
  x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27, x *= 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

#if defined(__GNUC__)
#define FROZEN_PREFETCH(address) __builtin_prefetch(address)
#else
#define FROZEN_PREFETCH(address) ((void)0)
#endif

#define FROZEN_BATCH 32 /* keys whose memory is waited for together */

FROZEN_API size_t frozen_lookup(const frozen_table* t, const int64_t* keys, size_t n, float* rows,
                                unsigned char* found) {
  uint64_t hashes[FROZEN_BATCH], at[FROZEN_BATCH];
  size_t count = 0;
  for (size_t begin = 0; begin < n; begin += FROZEN_BATCH) {
    const size_t m = n - begin < FROZEN_BATCH ? n - begin : FROZEN_BATCH;
    for (size_t i = 0; i < m; ++i) {
      hashes[i] = frozen_mix((uint64_t)keys[begin + i]);
      FROZEN_PREFETCH(t->starts + (hashes[i] >> (64 - t->bits)));
    }
    for (size_t i = 0; i < m; ++i) {
      at[i] = t->starts[hashes[i] >> (64 - t->bits)];
      FROZEN_PREFETCH(t->hashes + (at[i] < t->rows ? at[i] : t->rows));
    }
    for (size_t i = 0; i < m; ++i) {
      /* Whatever the file says, nothing behind it is read. */
      for (int step = t->steps - 1; step >= 0; --step) {
        const uint64_t there = at[i] + ((uint64_t)1 << step) - 1;
        at[i] += (uint64_t)(t->hashes[there < t->rows ? there : t->rows] < hashes[i]) << step;
      }
      if (at[i] >= t->rows || t->hashes[at[i]] != hashes[i]) at[i] = t->rows;
      const unsigned char* const row = t->values + at[i] * (uint64_t)t->row_bytes;
      for (int byte = 0; byte < t->row_bytes && byte < 512; byte += 64) FROZEN_PREFETCH(row + byte);
    }
    for (size_t i = 0; i < m; ++i) {
      const int there = at[i] < t->rows;
      float* const to = rows + (begin + i) * t->dim;
      if (!there && t->as_initial)
        frozen_initial(t, (uint64_t)keys[begin + i], hashes[i], to);
      else
        frozen_decode(t, at[i], to);
      if (found != NULL) found[begin + i] = (unsigned char)there;
      count += (size_t)there;
    }
  }
  return count;
}

#ifdef __cplusplus
}
#endif

#endif /* KVJAX_FROZEN_TABLE_H */
