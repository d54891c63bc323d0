// States in 8 bits, which VNNI multiplies with weights of 8 and 4 bits.
//
// A row is prepared once for all panels of a product: its states in groups of neighbours, each by
// its own largest magnitude, so that one outlier costs only its neighbours their precision. The
// sums over a group are whole numbers, exact in whatever order.
#pragma once

#include <algorithm>
#include <cstddef>

#include "stored.h"
#include "tile.h"

namespace shoal {

constexpr int64_t kRowAlign = 64;
constexpr int64_t kStateGroup = 64;  // at most; whole numbers of four
// Rows of a tile: one group's sums and the totals, both in registers where there are 32.
#if defined(__AVX512F__)
constexpr int kStateRows = 6;
#else
constexpr int kStateRows = kTileRows;
#endif

struct StateGroup {
  float scale;
  int32_t offset;  // what the sums begin with, as the weights are unsigned
};

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

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
// of `in` they are, or is null. Returns their scale, NaN where one is not finite, and their sum.
template <class T>
StateGroup quantize_states(const T* in, const int64_t* columns, int64_t count, int8_t* out) {
  constexpr float kTiny = 1e-30f;  // below it 127 / x might be infinite
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
  float highest;
  std::memcpy(&highest, &highest_bits, sizeof highest);
  if (highest_bits >= 0x7f800000) {
    std::fill_n(out, count, int8_t(0));
    return {std::nanf(""), 0};
  }
  const float inverse = highest > kTiny ? 127.0f / highest : 0.0f;
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
  return {highest / 127.0f, sum_lanes(sums)};
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

// sums += a quad of each row's states, `quad` quads behind `a`, times 32 columns' weights.
template <int kRows>
__attribute__((always_inline)) inline void add_quad(const char* a, int64_t a_stride, int64_t quad,
                                                    const IntVec (&weights)[kVecs],
                                                    IntVec (&sums)[kRows][kVecs]) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    int32_t four;
    std::memcpy(&four, a + row * a_stride + 4 * quad, sizeof four);
    const IntVec states = four - IntVec{};
    for (int v = 0; v < kVecs; v++)
      sums[row][v] = quad_multiply_add(weights[v], states, sums[row][v]);
  }
}

// The sums of each row's group (in `group`) begin with its offset times the columns' `zeros`, or
// kZero where that is null.
template <int kRows, int32_t kZero = 1>
__attribute__((always_inline)) inline void begin_group(const char* group, int64_t a_stride,
                                                       const int32_t* zeros,
                                                       IntVec (&sums)[kRows][kVecs]) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    int32_t offset;
    std::memcpy(&offset, group + row * a_stride + offsetof(StateGroup, offset), sizeof offset);
    for (int v = 0; v < kVecs; v++) {
      const IntVec all = offset * kZero - IntVec{};
      sums[row][v] = zeros ? all * load_int(zeros + v * kLanes) : all;
    }
  }
}

// totals += the group's sums times its row's scale and, where there are any, the columns' `scales`.
template <int kRows>
__attribute__((always_inline)) inline void end_group(const char* group, int64_t a_stride,
                                                     const float* scales,
                                                     const IntVec (&sums)[kRows][kVecs],
                                                     Vec (&totals)[kRows][kVecs]) {
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    float scale;
    std::memcpy(&scale, group + row * a_stride, sizeof scale);
    for (int v = 0; v < kVecs; v++) {
      const Vec sum = __builtin_convertvector(sums[row][v], Vec);
      totals[row][v] =
          scales ? multiply_add(sum * splat(scale), load(scales + v * kLanes), totals[row][v])
                 : multiply_add(sum, splat(scale), totals[row][v]);
    }
  }
}

}  // namespace shoal
