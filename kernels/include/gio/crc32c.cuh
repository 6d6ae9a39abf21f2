// CRC-32C (Castagnoli) of bytes in memory: RFC 3720, section 12.1 and appendix B.4.
//
// A CRC is the remainder of the message, a polynomial over GF(2), divided by the one below.
// Remainders are words with the lowest coefficient first: bit 31 is that of x^0. The processors'
// instructions have the same order.
//
// GPUs have no such instruction. The warp takes stripes of 512 bytes, 16 bytes per lane. A lane
// keeps the remainders of its four words over all stripes so far, and multiplies them by x^4096,
// the length of a stripe, before the next one. Multiplication by a constant is linear, so the
// products of the lowest five bits form a table of 32 entries, the next five bits another, and so
// on; each lane holds one entry of each table, and a lookup is a shuffle. At the end the lanes'
// remainders are multiplied by the length of the data in front of them in the stripe, and added. No
// table is in memory.
#pragma once
#include "warp.cuh"

#if !GIO_DEVICE
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif
#endif

#define GIO_CRC_POLYNOMIAL 0x82f63b78u // 1EDC6F41h
#define GIO_CRC_ONE 0x80000000u        // x^0
#define GIO_CRC_X 0x40000000u
// x to this power is 1: the polynomial is x + 1 times a primitive one of degree 31.
#define GIO_CRC_ORDER 0x7fffffff

GIO_FN constexpr uint32_t gio_crc_times_x(uint32_t a) {
  return a >> 1 ^ (GIO_CRC_POLYNOMIAL & (0u - (a & 1u)));
}
GIO_FN constexpr uint32_t gio_crc_over_x(uint32_t a) {
  return a << 1 ^ ((GIO_CRC_POLYNOMIAL << 1 | 1u) & (0u - (a >> 31)));
}
// Takes half the instructions if `b` is a constant.
GIO_FN constexpr uint32_t gio_crc_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t i = 0; i < 32u; ++i) {
    product ^= b & (0u - (a >> (31u - i) & 1u));
    b = gio_crc_times_x(b);
  }
  return product;
}
// x^n, for constants; n may be negative.
GIO_FN constexpr uint32_t gio_crc_power(int64_t n) {
  uint32_t power = GIO_CRC_ONE, square = GIO_CRC_X;
  for (n = (n % GIO_CRC_ORDER + GIO_CRC_ORDER) % GIO_CRC_ORDER; n != 0; n >>= 1) {
    if ((n & 1) != 0) power = gio_crc_multiply(power, square);
    square = gio_crc_multiply(square, square);
  }
  return power;
}

// CRC by a warp.

#if GIO_DEVICE
#define GIO_ROLLED _Pragma("unroll 1")
#else
#define GIO_ROLLED
#endif

#define GIO_CRC_STRIPE 512u // bytes per warp and step
#define GIO_CRC_TABLES 7u   // of 5 bits each; the last has 2

// State common to all objects: entry l of a table is l << 5 * table, times x^(bits of a stripe).
struct gio_crc {
  gio_lane<uint32_t> table[GIO_CRC_TABLES];
  gio_lane<uint32_t> units; // x^-(bits of the units in front of the lane's)
};

// Returns x^-(bits of LANE units) if l is LANE, else those of a lower lane: no table is indexed.
template <uint32_t LANE> GIO_FN uint32_t gio_crc_units(uint32_t l) {
  if constexpr (LANE == 0u) {
    return GIO_CRC_ONE;
  } else {
    constexpr uint32_t power = gio_crc_power(-128 * int64_t{LANE});
    const uint32_t lower = gio_crc_units<LANE - 1u>(l);
    return l == LANE ? power : lower;
  }
}

GIO_FN void gio_crc_lanes_begin(gio_crc &c) {
  constexpr uint32_t stripe = gio_crc_power(8 * GIO_CRC_STRIPE);
  GIO_LANES (l, GIO_WARP) {
    uint32_t product = stripe; // of bit 31
    for (uint32_t j = 0; j < GIO_CRC_TABLES; ++j) c.table[j][l] = 0;
    for (uint32_t bit = 32; bit-- != 0u;) {
      c.table[bit / 5u][l] ^= product & (0u - (l >> bit % 5u & 1u));
      product = gio_crc_times_x(product);
    }
    c.units[l] = gio_crc_units<GIO_WARP - 1u>(l);
  }
}

// Returns the n lowest of 16 bytes; the others become 0.
GIO_FN gio_u128 gio_crc_low_bytes(gio_u128 unit, uint32_t n) {
  const uint64_t lo = n >= 8u ? ~uint64_t{0} : (uint64_t{1} << 8u * n) - 1u;
  const uint64_t hi = n >= 16u ? ~uint64_t{0} : n > 8u ? (uint64_t{1} << 8u * (n - 8u)) - 1u : 0u;
  return gio_u128{unit.lo & lo, unit.hi & hi};
}

// A message in units of 16 bytes. It may begin and end at any address, so the first and the last
// unit may contain bytes outside it.
struct gio_crc_message {
  uint64_t start, end;
  uint64_t base;    // start of the first stripe, at or before `start`
  uint32_t stripes; // the last lane has the last unit: leading zeroes change nothing
};

GIO_FN gio_crc_message gio_crc_message_of(uint64_t start, uint32_t bytes) {
  const uint64_t end = start + bytes, last = (end + 15u) & ~uint64_t{15};
  const uint64_t len = last - (start & ~uint64_t{15});
  const uint64_t stripes = (len + GIO_CRC_STRIPE - 1u) / GIO_CRC_STRIPE;
  const uint64_t base = last - stripes * GIO_CRC_STRIPE;
  return gio_crc_message{start, end, base, static_cast<uint32_t>(stripes)};
}

// Returns the unit at `at`, or 0 if it is outside the message. The first and last units are loaded
// whole; their bytes outside the message may change concurrently.
GIO_FN gio_u128 gio_crc_unit(const gio_crc_message &m, uint64_t at) {
  if (at + 16u <= m.start || at >= m.end) return gio_u128{0, 0};
  return gio_ld16_sys(gio_ptr<const gio_u128>(at));
}

// Clears the bytes of the unit that are outside the message.
GIO_FN gio_u128 gio_crc_own(const gio_crc_message &m, gio_u128 unit, uint64_t at) {
  if (at + 16u > m.end && at < m.end) {
    unit = gio_crc_low_bytes(unit, static_cast<uint32_t>(m.end - at));
  }
  if (at < m.start && at + 16u > m.start) {
    const gio_u128 not_own = gio_crc_low_bytes(unit, static_cast<uint32_t>(m.start - at));
    unit = gio_u128{unit.lo ^ not_own.lo, unit.hi ^ not_own.hi};
  }
  return unit;
}

// Adds one more stripe to a lane's four remainders.
GIO_FN void gio_crc_step(gio_crc &c, uint32_t (&state)[4], gio_u128 unit) {
  const uint32_t words[4] = {static_cast<uint32_t>(unit.lo), static_cast<uint32_t>(unit.lo >> 32),
                             static_cast<uint32_t>(unit.hi), static_cast<uint32_t>(unit.hi >> 32)};
  for (uint32_t w = 0; w < 4u; ++w) {
    const uint32_t a = state[w] ^ words[w];
    uint32_t product = 0;
    for (uint32_t j = 0; j < GIO_CRC_TABLES; ++j) product ^= gio_pick(c.table[j], a >> 5u * j);
    state[w] = product;
  }
}

template <uint32_t N>
GIO_FN void gio_crc_load(const gio_crc_message &m, uint64_t at, gio_u128 (&to)[N]) {
  for (uint32_t i = 0; i < N; ++i) to[i] = gio_crc_unit(m, at + i * GIO_CRC_STRIPE);
}

// Adds all stripes of a message of whole units to a lane's remainders. There are two batches of N
// stripes; one is loaded while the other is added, and not before the first unit of the other has
// arrived: a scoreboard counts the loads of both, and the wait for that unit would be one for those
// just issued (seen in SASS of sm_120).
template <uint32_t N>
GIO_FN void gio_crc_stripes(gio_crc &c, const gio_crc_message &m, uint64_t at,
                            uint32_t (&state)[4]) {
  constexpr uint32_t turn = 2u * N;
  const uint32_t none = (0u - m.stripes) % turn; // before the first, so that turns are whole
  gio_u128 a[N], b[N];
  at -= uint64_t{none} * GIO_CRC_STRIPE;
  gio_crc_load(m, at, a);
  GIO_ROLLED
  for (uint32_t left = m.stripes + none; left != 0u; left -= turn) {
    if (left <= m.stripes) gio_crc_step(c, state, a[0]);
    at += N * GIO_CRC_STRIPE;
    gio_crc_load(m, at, b);
    for (uint32_t i = 1; i < N; ++i) {
      if (left - i <= m.stripes) gio_crc_step(c, state, a[i]);
    }
    if (left - N <= m.stripes) gio_crc_step(c, state, b[0]);
    at += N * GIO_CRC_STRIPE;
    gio_crc_load(m, at, a);
    for (uint32_t i = 1; i < N; ++i) {
      if (left - N - i <= m.stripes) gio_crc_step(c, state, b[i]);
    }
  }
}

// Returns the CRC of `bytes` bytes at `start`, for all lanes.
template <uint32_t N>
GIO_FN uint32_t gio_crc_lanes(gio_crc &c, uint64_t start, uint32_t bytes) {
  const gio_crc_message m = gio_crc_message_of(start, bytes);
  const bool odd = ((start | bytes) & 15u) != 0u;
  // The initial all-ones value of a CRC acts as the remainder of data before the first byte.
  const uint32_t first = static_cast<uint32_t>(start - m.base) / 4u;
  uint32_t ones = ~0u;
  GIO_ROLLED
  for (uint32_t i = 0; i < start % 4u * 8u; ++i) ones = gio_crc_over_x(ones);
  gio_lane<uint32_t> part;
  GIO_LANES (l, GIO_WARP) {
    uint32_t state[4];
    for (uint32_t w = 0; w < 4u; ++w) state[w] = 4u * l + w == first ? ones : 0u;
    uint64_t at = m.base + 16u * l;
    if (odd) {
      GIO_ROLLED
      for (uint32_t i = 0; i < m.stripes; ++i, at += GIO_CRC_STRIPE) {
        gio_crc_step(c, state, gio_crc_own(m, gio_crc_unit(m, at), at));
      }
    } else {
      gio_crc_stripes<N>(c, m, at, state);
    }
    // Each word's remainder covers the word and the data after it to the end of the stripe: those
    // of later words lack the words in front of them, and those of later lanes the units.
    constexpr uint32_t one = gio_crc_power(-32), two = gio_crc_power(-64);
    constexpr uint32_t three = gio_crc_power(-96);
    const uint32_t sum = state[0] ^ gio_crc_multiply(state[1], one) ^
                         gio_crc_multiply(state[2], two) ^ gio_crc_multiply(state[3], three);
    part[l] = gio_crc_multiply(gio_anew(c.units[l]), sum);
  }
  uint32_t sum = gio_xor(part);
  GIO_ROLLED
  for (uint32_t i = 0; i < (0u - static_cast<uint32_t>(m.end)) % 16u * 8u; ++i) { // behind the end
    sum = gio_crc_over_x(sum);
  }
  return ~sum;
}

#if GIO_DEVICE

GIO_FN void gio_crc_begin(gio_crc &c) { gio_crc_lanes_begin(c); }
template <uint32_t N> GIO_FN uint32_t gio_crc32c(gio_crc &c, uint64_t start, uint32_t bytes) {
  return gio_crc_lanes<N>(c, start, bytes);
}

#else // host

// Slowest first.
#define GIO_CRC_UNKNOWN 0u
#define GIO_CRC_BY_TABLE 1u
#define GIO_CRC_BY_INSTRUCTION 2u
#define GIO_CRC_BY_PRODUCTS 3u

struct gio_crc_slices {
  uint32_t of[8][256]; // of[i][b]: byte b followed by i zero bytes
};
constexpr gio_crc_slices gio_crc_make_slices() {
  gio_crc_slices slices = {};
  for (uint32_t b = 0; b < 256u; ++b) {
    uint32_t remainder = b;
    for (uint32_t bit = 0; bit < 64u; ++bit) {
      remainder = gio_crc_times_x(remainder);
      if (bit % 8u == 7u) slices.of[bit / 8u][b] = remainder;
    }
  }
  return slices;
}

GIO_FN uint64_t gio_crc_word(const uint8_t *p) {
  uint64_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

// For processors without the instruction.
static inline uint32_t gio_crc_by_table(const uint8_t *p, uint64_t bytes) {
  static constexpr gio_crc_slices slices = gio_crc_make_slices();
  uint32_t crc = ~0u;
  for (; bytes >= 8u; bytes -= 8u, p += 8) {
    const uint64_t word = gio_crc_word(p) ^ crc;
    crc = 0;
    for (uint32_t i = 0; i < 8u; ++i) crc ^= slices.of[7u - i][word >> 8u * i & 0xffu];
  }
  for (; bytes != 0u; --bytes) crc = crc >> 8 ^ slices.of[0][(crc ^ *p++) & 0xffu];
  return ~crc;
}

#if defined(__x86_64__)

#define GIO_CRC_TARGET __attribute__((target("sse4.2,pclmul")))

// Returns remainder a followed by BYTES zero bytes. (The product of two remainders has its lowest
// coefficient in bit 62, and the instruction multiplies by x^32: 33 too many.)
template <uint32_t BYTES> GIO_CRC_TARGET static inline uint64_t gio_crc_shift(uint64_t a) {
  constexpr uint32_t power = gio_crc_power(8 * int64_t{BYTES} - 33);
  const __m128i x = _mm_cvtsi64_si128(static_cast<int64_t>(a));
  const __m128i y = _mm_clmulepi64_si128(x, _mm_cvtsi32_si128(static_cast<int32_t>(power)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(y)));
}

GIO_CRC_TARGET static inline uint32_t gio_crc_end(uint64_t crc, const uint8_t *p, uint64_t bytes) {
  for (; bytes >= 8u; bytes -= 8u, p += 8) crc = _mm_crc32_u64(crc, gio_crc_word(p));
  uint32_t rest = static_cast<uint32_t>(crc);
  for (; bytes != 0u; --bytes) rest = _mm_crc32_u8(rest, *p++);
  return ~rest;
}

// Processes three parts in parallel: the instruction takes three cycles, but one starts each cycle.
template <uint32_t PART>
GIO_CRC_TARGET static inline uint64_t gio_crc_parts(uint64_t crc, const uint8_t *&p,
                                                    uint64_t &bytes) {
  for (; bytes >= 3u * PART; bytes -= 3u * PART, p += 3u * PART) {
    uint64_t second = 0, third = 0;
    for (uint32_t i = 0; i < PART; i += 8u) {
      crc = _mm_crc32_u64(crc, gio_crc_word(p + i));
      second = _mm_crc32_u64(second, gio_crc_word(p + PART + i));
      third = _mm_crc32_u64(third, gio_crc_word(p + 2u * PART + i));
    }
    crc = gio_crc_shift<2u * PART>(crc) ^ gio_crc_shift<PART>(second) ^ third;
  }
  return crc;
}

// Parts that are close together are one stream for the processor's prefetcher.
GIO_CRC_TARGET static inline uint32_t gio_crc_by_instruction(const uint8_t *p, uint64_t bytes) {
  uint64_t crc = ~0u;
  crc = gio_crc_parts<336>(crc, p, bytes);
  crc = gio_crc_parts<64>(crc, p, bytes);
  return gio_crc_end(crc, p, bytes);
}

#define GIO_CRC_WIDE_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

// The factors that move units of 16 bytes by BYTES: the first half of a unit has 64 bits after it,
// the second none. (The product has its lowest coefficient in bit 126: one less.)
template <uint32_t BYTES> GIO_CRC_WIDE_TARGET static inline __m512i gio_crc_carry() {
  constexpr uint64_t first = uint64_t{gio_crc_power(8 * BYTES + 63)} << 32;
  constexpr uint64_t second = uint64_t{gio_crc_power(8 * BYTES - 1)} << 32;
  return _mm512_set4_epi64(second, first, second, first);
}
GIO_CRC_WIDE_TARGET static inline __m512i gio_crc_fold(__m512i units, __m512i carry,
                                                       const void *more) {
  const __m512i first = _mm512_clmulepi64_epi128(units, carry, 0x00);
  const __m512i second = _mm512_clmulepi64_epi128(units, carry, 0x11);
  return _mm512_ternarylogic_epi64(first, second, _mm512_loadu_si512(more), 0x96);
}

// Keeps the remainders of 16 interleaved streams of units, merged at the end: twice as fast.
GIO_CRC_WIDE_TARGET static inline uint32_t gio_crc_by_products(const uint8_t *p, uint64_t bytes) {
  if (bytes < 256u) return gio_crc_by_instruction(p, bytes);
  const __m512i carry = gio_crc_carry<256>();
  __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
  __m512i c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)));
  for (p += 256, bytes -= 256u; bytes >= 256u; p += 256, bytes -= 256u) {
    a = gio_crc_fold(a, carry, p);
    b = gio_crc_fold(b, carry, p + 64);
    c = gio_crc_fold(c, carry, p + 128);
    d = gio_crc_fold(d, carry, p + 192);
  }
  __m512i units[4] = {a, b, c, d};
  for (uint32_t i = 1; i < 4u; ++i) {
    units[i] = gio_crc_fold(units[i - 1u], gio_crc_carry<64>(), units + i);
  }
  uint64_t words[8], crc = 0;
  _mm512_storeu_si512(words, units[3]);
  for (const uint64_t word : words) crc = _mm_crc32_u64(crc, word);
  return gio_crc_end(crc, p, bytes);
}

// Returns a GIO_CRC_BY_*, cached because CPUID is slow in a virtual machine.
static inline uint32_t gio_crc_best() {
  static uint32_t known = GIO_CRC_UNKNOWN;
  uint32_t best = gio_ld_relaxed_sys(&known);
  if (best != GIO_CRC_UNKNOWN) return best;
  uint32_t a, b = 0, c = 0, d, wide = 0, states = 0;
  best = GIO_CRC_BY_TABLE;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_SSE4_2) != 0u && (c & bit_PCLMUL) != 0u) {
    best = GIO_CRC_BY_INSTRUCTION;
    // Checks that the system saves the wide registers.
    if ((c & bit_OSXSAVE) != 0u) asm("xgetbv" : "=a"(states), "=d"(d) : "c"(0));
    if (__get_cpuid_count(7, 0, &a, &wide, &c, &d) == 0) wide = c = 0;
    if ((states & 0xe6u) == 0xe6u && (wide & bit_AVX512F) != 0u && (c & bit_VPCLMULQDQ) != 0u) {
      best = GIO_CRC_BY_PRODUCTS;
    }
  }
  gio_st_relaxed_sys(&known, best);
  return best;
}

#elif defined(__ARM_FEATURE_CRC32)

static inline uint32_t gio_crc_by_instruction(const uint8_t *p, uint64_t bytes) {
  uint32_t crc = ~0u;
  for (; bytes >= 8u; bytes -= 8u, p += 8) crc = __crc32cd(crc, gio_crc_word(p));
  for (; bytes != 0u; --bytes) crc = __crc32cb(crc, *p++);
  return ~crc;
}
static inline uint32_t gio_crc_best() { return GIO_CRC_BY_INSTRUCTION; }

#else

static inline uint32_t gio_crc_by_instruction(const uint8_t *, uint64_t) { return 0; }
static inline uint32_t gio_crc_best() { return GIO_CRC_BY_TABLE; }

#endif

// Uses the method `how`, one of GIO_CRC_BY_*, which the processor must support.
GIO_FN uint32_t gio_crc_by(uint32_t how, uint64_t start, uint32_t bytes) {
  const uint8_t *p = gio_ptr<const uint8_t>(start);
#if defined(__x86_64__)
  if (how == GIO_CRC_BY_PRODUCTS) return gio_crc_by_products(p, bytes);
#endif
  return how == GIO_CRC_BY_TABLE ? gio_crc_by_table(p, bytes) : gio_crc_by_instruction(p, bytes);
}

GIO_FN void gio_crc_begin(gio_crc &) {}
template <uint32_t> GIO_FN uint32_t gio_crc32c(gio_crc &, uint64_t start, uint32_t bytes) {
  return gio_crc_by(gio_crc_best(), start, bytes);
}

#endif
