// States in 8 bits, which VNNI multiplies with weights of 8 and 4 bits.
//
// A row is prepared once for all panels of a product: its states in groups of neighbours, each by
// its own largest magnitude, so that one outlier costs only its neighbours their precision. The
// sums over a group are whole numbers, exact in whatever order. A row's group ends, and its next one
// begins, while the other rows' last products go on: all at once, they would hold up the products.
#pragma once

#include <algorithm>
#include <cstddef>

#include "stored.h"
#include "tile.h"

namespace shoal {

constexpr int64_t kRowAlign = 64;
constexpr int64_t kStateGroup = 64;  // at most; whole numbers of four
constexpr float kTinyState = 1e-30f;  // below it 1 / scale might be infinite
// Rows of a tile: one group's sums and the totals, both in registers where there are 32.
#if defined(__AVX512F__)
constexpr int kStateRows = 6;
#else
constexpr int kStateRows = kTileRows;
#endif

// Scales are powers of two. A whole number below 2^22 that is added to the bits of `base`, 1.5 * 2^23
// scales, adds as many scales to it: exactly, and without a product.
struct StateGroup {
  float base;      // NaN where a state is not finite, or 2^110 or more
  int32_t offset;  // what the sums begin with, as the weights are unsigned
};

// Scales by a group's largest magnitude: 1/64 of the power of two at or above it, or of half that power
// where 127 scales still reach it. Floats by their bits.
constexpr int32_t kHugeState = 237 << 23;       // 2^110: bases stay finite below
constexpr int32_t kAbove = 0x1ffff;             // 127 / 64 is the last that is cut to 1
constexpr uint32_t kInverse = (254u + 6) << 23;  // less the power's bits: 64 / power
constexpr int32_t kBase = (17 << 23) | 1 << 22;  // more than the power's bits: 1.5 * 2^23 / 64 powers

inline int32_t power_above(int32_t bits) { return (bits + kAbove) & 0x7f800000; }

constexpr int32_t inverse_bits(int32_t power) { return int32_t(kInverse - uint32_t(power)); }
static_assert(inverse_bits(127 << 23) == 133 << 23);  // no constant, if it overflowed

inline float from_bits(int32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Of a row's groups and one more, which is read when the last one ends but means nothing.
inline int64_t tail_bytes(int64_t num_groups) {
  return (num_groups + 1) * int64_t(sizeof(StateGroup));
}

typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

inline int32_t sum_lanes(IntVec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)value);
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; i++) sum += value[i];
  return sum;
#endif
}

inline int32_t max_lanes(IntVec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)value);
#else
  int32_t most = value[0];
  for (int i = 1; i < kLanes; i++) most = std::max<int32_t>(most, value[i]);
  return most;
#endif
}

// `count` states, as quantize_tokens in quantized_weights.py, to as many bytes; `columns` says which
// of `in` they are, or is null. Returns their base and their sum.
template <class T>
StateGroup quantize_states(const T* in, const int64_t* columns, int64_t count, int8_t* out) {
  constexpr int kNumVecs = kStateGroup / kLanes;
  alignas(64) int8_t bytes[kStateGroup];
  Vec values[kNumVecs];
  if (count == kStateGroup && !columns) {
    for (int i = 0; i < kNumVecs; i++) values[i] = load_wide(in + i * kLanes);
  } else {
    alignas(64) float some[kStateGroup] = {};
    for (int64_t i = 0; i < count; i++) some[i] = to_float(in[columns ? columns[i] : i]);
    for (int i = 0; i < kNumVecs; i++) values[i] = load(some + i * kLanes);
  }
  // Magnitudes are in the order of their bits, NaN above all.
  IntVec most{}, sums{};
  for (int i = 0; i < kNumVecs; i++) {
    const IntVec magnitude = (IntVec)values[i] & (IntVec{} + 0x7fffffff);
    most = magnitude > most ? magnitude : most;
  }
  const int32_t highest_bits = max_lanes(most);
  const float highest = from_bits(highest_bits);
  if (highest_bits >= kHugeState) {
    std::fill_n(out, count, int8_t(0));
    return {std::nanf(""), 0};
  }
  const int32_t power = power_above(highest_bits);
  const float inverse = highest > kTinyState ? from_bits(inverse_bits(power)) : 0.0f;
  for (int i = 0; i < kNumVecs; i++) {
    // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even.
    const Vec magic = splat(12582912.0f);
    const Vec whole = (values[i] * splat(inverse) + magic) - magic;
    const IntVec steps = __builtin_convertvector(whole, IntVec);
    sums += steps;
    const ByteVec narrow = __builtin_convertvector(steps, ByteVec);
    std::memcpy(bytes + i * kLanes, &narrow, sizeof narrow);
  }
  if (count == kStateGroup)
    std::memcpy(out, bytes, kStateGroup);
  else
    std::memcpy(out, bytes, count);
  return {from_bits(power + kBase), sum_lanes(sums)};
}

inline IntVec load_int(const void* source) {
  IntVec out;
  std::memcpy(&out, source, sizeof out);
  return out;
}

inline void store_int(int32_t* target, IntVec value) {
  std::memcpy(target, &value, sizeof value);
}

// acc + the products of four neighbouring k in each lane: unsigned weights, signed states.
inline IntVec quad_multiply_add(IntVec weights, IntVec states, IntVec acc) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)states);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  // Even and odd bytes as 16 bits: no sum of two products leaves 32 bits.
  const __m256i w = (__m256i)weights, s = (__m256i)states;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(s, 8));
  return (IntVec)_mm256_add_epi32((__m256i)acc, _mm256_add_epi32(even, odd));
#else
  for (int shift = 0; shift < 32; shift += 8)
    acc += ((weights >> shift) & 255) * ((states << (24 - shift)) >> 24);
  return acc;
#endif
}

// Where groups of states lie, their bytes and StateGroups: of one row, or one of each of many rows.
template <class T>
struct GroupsAt {
  const T* in;
  int64_t in_stride;  // elements
  int8_t* out;
  int64_t out_stride;
  char* tail;
  int64_t tail_stride;

  void skip(int64_t count) {
    in += count * in_stride;
    out += count * out_stride;
    tail += count * tail_stride;
  }
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)

// Lane i of the result is what `combine` makes of four lanes of each of parts[i]'s four quarters.
template <class Combine>
inline __m128i combine_lanes(const __m512i (&parts)[4], Combine combine) {
  const __m512i ab = combine(_mm512_unpacklo_epi32(parts[0], parts[1]),
                             _mm512_unpackhi_epi32(parts[0], parts[1]));
  const __m512i cd = combine(_mm512_unpacklo_epi32(parts[2], parts[3]),
                             _mm512_unpackhi_epi32(parts[2], parts[3]));
  const __m512i all = combine(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m512i half = combine(all, _mm512_shuffle_i64x2(all, all, 0x4e));
  return _mm512_castsi512_si128(combine(half, _mm512_shuffle_i64x2(half, half, 0xb1)));
}

// kCount (up to four) groups of kWidth neighbouring states, as quantize_states to the bit. They go
// side by side: each alone would wait for its largest magnitude, and one tree finds those of all.
template <int kCount, int kWidth>
__attribute__((always_inline)) inline void quantize_groups(GroupsAt<BFloat16> at,
                                                           int32_t factor) {
  constexpr int kParts = (kWidth + 63) / 64;
  const __m512i high_halves = _mm512_set1_epi32(int32_t(0xffff0000u));
  __m512i most[4] = {}, sums[4] = {};
#pragma GCC unroll 4
  for (int group = 0; group < kCount; group++)
#pragma GCC unroll 4
    for (int part = 0; part < kWidth / 32; part++) {
      const __m512i both = _mm512_loadu_si512(at.in + group * at.in_stride + part * 32);
      const __m512i magnitudes = _mm512_and_si512(both, _mm512_set1_epi16(0x7fff));
      most[group] = part ? _mm512_max_epu16(most[group], magnitudes) : magnitudes;
    }
  const __m128i pairs =
      combine_lanes(most, [](__m512i a, __m512i b) { return _mm512_max_epu16(a, b); });
  const __m128i bits = _mm_max_epu32(_mm_slli_epi32(pairs, 16),
                                     _mm_and_si128(pairs, _mm_set1_epi32(int32_t(0xffff0000u))));
  const __mmask8 finite = _mm_cmplt_epi32_mask(bits, _mm_set1_epi32(kHugeState));
  const __mmask8 some = _mm_mask_cmp_ps_mask(finite, _mm_castsi128_ps(bits),
                                             _mm_set1_ps(kTinyState), _CMP_GT_OQ);
  const __m128i power =
      _mm_and_si128(_mm_add_epi32(bits, _mm_set1_epi32(kAbove)), _mm_set1_epi32(0x7f800000));
  const __m128 inverse =
      _mm_castsi128_ps(_mm_maskz_sub_epi32(some, _mm_set1_epi32(int32_t(kInverse)), power));
  const __m128i base =
      _mm_mask_add_epi32(_mm_set1_epi32(0x7fc00000), finite, power, _mm_set1_epi32(kBase));
  // To the nearest whole number, ties to even.
  const auto steps = [](__m512i states, __m512 times) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(states), times));
  };
#pragma GCC unroll 4
  for (int group = 0; group < kCount; group++) {
    const __m512 times =
        _mm512_permutexvar_ps(_mm512_set1_epi32(group), _mm512_castps128_ps512(inverse));
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      const BFloat16* in = at.in + group * at.in_stride + part * 64;
      const auto words = [&](const BFloat16* source) {  // in each quarter four even ones, four odd
        const __m512i both = _mm512_loadu_si512(source);
        return _mm512_packs_epi32(steps(_mm512_slli_epi32(both, 16), times),
                                  steps(_mm512_and_si512(both, high_halves), times));
      };
      const __m512i mixed =
          _mm512_packs_epi16(words(in), kWidth > 32 ? words(in + 32) : __m512i{});
      const __m512i quarters = _mm512_shuffle_epi8(
          mixed, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14,
                                                      11, 15)));
      const __m512i bytes = _mm512_permutexvar_epi64(
          _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), quarters);
      int8_t* out = at.out + group * at.out_stride + part * 64;
      if (kWidth > 32)
        _mm512_storeu_si512(out, bytes);
      else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(bytes));
      const IntVec ones = IntVec{} + 0x01010101;
      sums[group] = (__m512i)quad_multiply_add(ones, (IntVec)bytes, (IntVec)sums[group]);
    }
  }
  const __m128i sum =
      combine_lanes(sums, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  const __m128i offset = _mm_mullo_epi32(sum, _mm_set1_epi32(factor));
  const __m128i pairs_of[2] = {_mm_unpacklo_epi32(base, offset),
                               _mm_unpackhi_epi32(base, offset)};
#pragma GCC unroll 4
  for (int group = 0; group < kCount; group++) {
    char* tail = at.tail + group * at.tail_stride;
    if (group % 2)
      _mm_storeh_pd(reinterpret_cast<double*>(tail), _mm_castsi128_pd(pairs_of[group / 2]));
    else
      _mm_storel_epi64(reinterpret_cast<__m128i*>(tail), pairs_of[group / 2]);
  }
  if (__builtin_expect(finite == 15, true)) return;
  for (int group = 0; group < kCount; group++) {
    if (finite >> group & 1) continue;  // else its steps are 0, as is their sum
    std::memset(at.out + group * at.out_stride, 0, kWidth);
    std::memset(at.tail + group * at.tail_stride + offsetof(StateGroup, offset), 0, sizeof(int32_t));
  }
}

template <int kWidth>
void quantize_fours(const GroupsAt<BFloat16>& groups, int64_t num_groups, int32_t factor) {
  GroupsAt<BFloat16> at = groups;  // of its own, so that no store can change it
  const int64_t num_parts = (num_groups + 3) / 4;
  for (int64_t part = 0; part < num_parts; part++) {
    const int64_t count = num_groups * (part + 1) / num_parts - num_groups * part / num_parts;
    switch (count) {
      case 1: quantize_groups<1, kWidth>(at, factor); break;
      case 2: quantize_groups<2, kWidth>(at, factor); break;
      case 3: quantize_groups<3, kWidth>(at, factor); break;
      default: quantize_groups<4, kWidth>(at, factor);
    }
    at.skip(count);
  }
}

#endif

// Groups of `width` states, at most kStateGroup; their offsets are their sums times `factor`.
template <class T>
void quantize_all(const GroupsAt<T>& groups, int64_t num_groups, int64_t width, int32_t factor) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (width == 32) return quantize_fours<32>(groups, num_groups, factor);
    if (width == 64) return quantize_fours<64>(groups, num_groups, factor);
  }
#endif
  GroupsAt<T> at = groups;
  for (; num_groups > 0; num_groups--, at.skip(1)) {
    StateGroup group = quantize_states(at.in, nullptr, width, at.out);
    group.offset *= factor;
    std::memcpy(at.tail, &group, sizeof group);
  }
}

// A row's k states in groups of `width`: as many bytes to `out`, and a StateGroup each to `tail`.
template <class T>
void quantize_row(const T* in, const int64_t* columns, int64_t k, int64_t width, int32_t factor,
                  int8_t* out, char* tail) {
  GroupsAt<T> at{in, width, out, width, tail, sizeof(StateGroup)};
  if (!columns) {
    const int64_t num_whole = k / width, rest = k - num_whole * width;
    quantize_all(at, num_whole, width, factor);
    if (!rest) return;
    at.skip(num_whole);
    return quantize_all(at, 1, rest, factor);
  }
  for (int64_t first = 0; first < k; first += width, at.skip(1)) {
    StateGroup group = quantize_states(in, columns + first, std::min(width, k - first), at.out);
    group.offset *= factor;
    std::memcpy(at.tail, &group, sizeof group);
  }
}

// How far behind the first one each row of a tile begins. The compiler is not to know how: a pointer a
// row, of the states and of their groups, is more than x86 has registers for.
template <int kRows>
struct RowsAt {
  int64_t at[kRows];

  explicit RowsAt(int64_t stride) {
    for (int row = 0; row < kRows; row++) {
      at[row] = row * stride;
      if (row) asm("" : "+r"(at[row]));
    }
  }
};

struct NothingElse {
  void operator()(int) const {}
};

// sums += a quad of each row's states, `quad` quads behind `a`, times 32 columns' weights; then
// end(row).
template <int kRows, class End = NothingElse>
__attribute__((always_inline)) inline void add_quad(const char* a, const RowsAt<kRows>& rows,
                                                    int64_t quad,
                                                    const IntVec (&weights)[kVecs],
                                                    IntVec (&sums)[kRows][kVecs],
                                                    const End& end = {}) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    int32_t four;
    std::memcpy(&four, a + rows.at[row] + 4 * quad, sizeof four);
    const IntVec states = four - IntVec{};
    for (int v = 0; v < kVecs; v++)
      sums[row][v] = quad_multiply_add(weights[v], states, sums[row][v]);
    end(row);
  }
}

// What a StateGroup holds, in all lanes.
inline IntVec base_bits(const char* states) {
  int32_t bits;
  std::memcpy(&bits, states + offsetof(StateGroup, base), sizeof bits);
  return bits - IntVec{};
}

inline IntVec splat_offset(const char* states) {
  int32_t offset;
  std::memcpy(&offset, states + offsetof(StateGroup, offset), sizeof offset);
  return offset - IntVec{};
}

// The sums of a row's group, in its `states`, begin as the bits of its base, to which its offset times
// kFactor is added.
template <int32_t kFactor = 1>
__attribute__((always_inline)) inline void begin_group(const char* states,
                                                       IntVec (&sums)[kVecs]) {
  const IntVec begin = base_bits(states) + splat_offset(states) * kFactor;
  for (int v = 0; v < kVecs; v++) sums[v] = begin;
}

// A group's sums times its scale: what they added to the bits of the base, they added to it in units
// of the scale.
inline Vec scaled(const char* states, IntVec sums) {
  return (Vec)sums - (Vec)base_bits(states);
}

}  // namespace shoal
