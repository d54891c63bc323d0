// Vectors of the widest kind that the compiler was told of, and the two storage types.
//
// Every operation here rounds in one fixed way: fused multiply-adds are spelt out, and the build
// forbids the compiler to make its own (-ffp-contract=off), so that a row's bits never depend on
// which instantiation of a loop computed it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace shoal {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* source) {
  Vec out;
  std::memcpy(&out, source, sizeof out);
  return out;
}

inline void store(float* target, Vec value) { std::memcpy(target, &value, sizeof value); }

// Past the caches, which need not read the line first. `target` begins a vector. Another thread sees
// it after an atomic read-modify-write of this one.
inline void store_past_caches(float* target, Vec value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(target, (__m512)value);
#else
  store(target, value);
#endif
}

// Asks for a line, for the second-level cache. Not by __builtin_prefetch alone, which GCC takes for
// nothing: it left out those of whole loops.
inline void fetch_line(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

// The same address. What is read there is read anew, rather than kept in registers that run short.
template <class T>
inline const T* read_anew(const T* address) {
  asm("" : "+r"(address));
  return address;
}

inline Vec splat(float value) { return value - Vec{}; }

inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The lanes are added pairwise, halves first: one order for every caller.
inline float sum_lanes(Vec value) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)value),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)value, 1)));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

// b where either is NaN.
inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

inline float max_lanes(Vec value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

// exp, within 2 units in the last place (the polynomial of Cephes). Below -87 it is 0, above 88.3
// it stays at exp(88.3); NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.3f);
#if defined(__AVX512F__)
  const __mmask16 stays = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
  x = (Vec)_mm512_min_ps((__m512)high, (__m512)x);
#else
  const auto vanishes = x < low;
  x = vanishes ? low : x;
  x = x > high ? high : x;
#endif
  // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits of the mantissa.
  const Vec magic = splat(12582912.0f);
  const Vec shifted = multiply_add(x, splat(1.44269504088896341f), magic);
  const Vec whole = shifted - magic;
  Vec r = multiply_add(whole, splat(-0.693359375f), x);
  r = multiply_add(whole, splat(2.12194440e-4f), r);
  Vec p = splat(1.9875691500e-4f);
  p = multiply_add(p, r, splat(1.3981999507e-3f));
  p = multiply_add(p, r, splat(8.3334519073e-3f));
  p = multiply_add(p, r, splat(4.1665795894e-2f));
  p = multiply_add(p, r, splat(1.6666665459e-1f));
  p = multiply_add(p, r, splat(5.0000001201e-1f));
  p = multiply_add(p, r * r, r) + splat(1.0f);
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(stays, (__m512)p, (__m512)whole);
#else
  const IntVec exponent = ((IntVec)shifted - (IntVec)magic) << 23;
  const Vec out = (Vec)((IntVec)p + exponent);
  // The integer addition could turn a NaN into a number.
  return vanishes ? splat(0.0f) : (x == x ? out : x);
#endif
}

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline void assign(float& target, float value) { target = value; }

// Rounds to the nearest, ties to even.
inline void assign(BFloat16& target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  target.bits = value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

// kLanes values, rounded to the target's type. Where the CPU rounds to bfloat16 itself, values below
// the least normal number become 0, as in its products.
inline void store_rounded(Vec value, float* target) { store(target, value); }

inline void store_rounded(Vec value, BFloat16* target) {
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(target, &rounded, sizeof rounded);
#else
  for (int i = 0; i < kLanes; i++) assign(target[i], value[i]);
#endif
}

// Twice kLanes values, likewise.
inline void store_rounded(Vec low, Vec high, float* target) {
  store(target, low);
  store(target + kLanes, high);
}

inline void store_rounded(Vec low, Vec high, BFloat16* target) {
#if defined(__AVX512BF16__)
  const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  std::memcpy(target, &rounded, sizeof rounded);
#else
  store_rounded(low, target);
  store_rounded(high, target + kLanes);
#endif
}

// combine(i) gives kLanes values from column i on; all of `width` are stored, rounded.
template <class Combine, class T>
inline void store_each(int64_t width, T* out, Combine combine) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store_rounded(combine(i), out + i);
  if (i == width) return;
  T last[kLanes];
  store_rounded(combine(i), last);
  std::memcpy(out + i, last, (width - i) * sizeof(T));
}

}  // namespace shoal
