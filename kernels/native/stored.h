// What the key/value cache holds: values of the model's type, or 8 bits each with a scale.
//
// A key or value of one token and one head shares one float32 scale, its largest magnitude over the
// largest that the 8 bits hold. So what is stored for a token depends on that token alone, and no
// block is ever scaled anew. All 8-bit values are exact in bfloat16 too: products are of what is
// stored, and the scales come in afterwards.
#pragma once

#include <algorithm>

#include "vec.h"

namespace shoal {

enum class Stored : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kFp8 = 3 };

inline int64_t stored_size(Stored type) {
  return type == Stored::kFloat32 ? 4 : type == Stored::kBFloat16 ? 2 : 1;
}

struct Fp8 {  // e4m3: 4 bits of exponent, 3 of mantissa, no infinity, 0x7f is NaN
  uint8_t bits;
};

template <class S>
struct StoredTraits {
  static constexpr bool kScaled = false;
  static constexpr float kLargest = 0.0f;
};
template <>
struct StoredTraits<int8_t> {
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127.0f;
};
template <>
struct StoredTraits<Fp8> {
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448.0f;
};

inline float to_float(int8_t value) { return float(value); }

inline float to_float(Fp8 value) {
  // As the low bits of a float's exponent and the high ones of its mantissa: 2^-120 of the value.
  const uint32_t bits = uint32_t(value.bits & 0x7f) << 20;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof bits);
  magnitude *= 1.329227995784916e36f;  // 2^120
  return value.bits & 0x80 ? -magnitude : magnitude;
}

// kLanes integers, widened, and back. The compiler's own conversions of vectors are slow.
inline IntVec load_wide_integers(const uint16_t* source) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__AVX2__) && defined(__FMA__)
  return (IntVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)source));
#else
  IntVec out;
  for (int i = 0; i < kLanes; i++) out[i] = source[i];
  return out;
#endif
}

inline IntVec load_wide_integers(const int8_t* source) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)source));
#elif defined(__AVX2__) && defined(__FMA__)
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)source));
#else
  IntVec out;
  for (int i = 0; i < kLanes; i++) out[i] = source[i];
  return out;
#endif
}

inline void store_low_halves(IntVec value, uint16_t* target) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)target, _mm512_cvtepi32_epi16((__m512i)value));
#else
  for (int i = 0; i < kLanes; i++) target[i] = uint16_t(value[i]);
#endif
}

inline Vec to_float(IntVec value) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps((__m512i)value);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_cvtepi32_ps((__m256i)value);
#else
  return __builtin_convertvector(value, Vec);
#endif
}

// kLanes values as floats.
inline Vec load_wide(const float* source) { return load(source); }

inline Vec load_wide(const BFloat16* source) {
  return (Vec)(load_wide_integers(reinterpret_cast<const uint16_t*>(source)) << 16);
}

inline Vec load_wide(const int8_t* source) { return to_float(load_wide_integers(source)); }

inline Vec load_wide(const Fp8* source) {
  const IntVec bits = load_wide_integers(reinterpret_cast<const int8_t*>(source));
  const Vec magnitude = (Vec)((bits & 0x7f) << 20) * splat(1.329227995784916e36f);
  return (Vec)((IntVec)magnitude | (bits & int32_t(0x80000000u)));
}

// `count` values in a type that holds them exactly.
template <class S>
inline void widen(const S* source, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_wide(source + i));
  for (; i < count; i++) out[i] = to_float(source[i]);
}

template <class S>
inline void widen(const S* source, int64_t count, BFloat16* out) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Vec low = load_wide(source + i), high = load_wide(source + i + kLanes);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);  // exact, as they are
    std::memcpy(out + i, &both, sizeof both);
  }
#endif
  for (; i + kLanes <= count; i += kLanes) {
    store_low_halves((IntVec)load_wide(source + i) >> 16, reinterpret_cast<uint16_t*>(out + i));
  }
  for (; i < count; i++) assign(out[i], to_float(source[i]));
}

// Rounds to the nearest whole number, ties to even; for magnitudes below 2^22.
inline float nearest_whole(float value) { return (value + 12582912.0f) - 12582912.0f; }

inline void assign(int8_t& target, float value) {
  target = value == value ? int8_t(nearest_whole(value)) : int8_t(0);
}

inline void assign(Fp8& target, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  const float positive = value < 0.0f ? -value : value;
  // Below the least normal number the steps are of 2^-9.
  const bool subnormal = positive < 0.015625f;
  const uint32_t small = uint32_t(nearest_whole(subnormal ? positive * 512.0f : 0.0f));
  const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const uint32_t normal = rounded - (120u << 3) > 0x7e ? 0x7e : rounded - (120u << 3);
  target.bits = uint8_t(sign | (value == value ? (subnormal ? small : normal) : 0x7f));
}

// Stores one head of one token, [head_dim] float, at `to`; returns its scale (1 if unscaled).
template <class S>
float store_head(const float* head, int64_t head_dim, S* to) {
  if constexpr (!StoredTraits<S>::kScaled) {
    int64_t i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) store_rounded(load(head + i), to + i);
    for (; i < head_dim; i++) assign(to[i], head[i]);
    return 1.0f;
  } else {
    float largest = 0.0f;
    bool nan = false;
    for (int64_t i = 0; i < head_dim; i++) {
      const float magnitude = std::fabs(head[i]);
      largest = magnitude > largest ? magnitude : largest;
      nan |= magnitude != magnitude;
    }
    float scale = largest / StoredTraits<S>::kLargest;
    if (nan) scale = std::nanf("");  // what was stored cannot say it
    const float divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < head_dim; i++) assign(to[i], head[i] / divisor);
    return scale;
  }
}

// Tokens whose keys lie together, where they lie as panels.
constexpr int64_t kKeyPanel = 16;

// One head of one token, [head_dim] float, as a column of its panel, which begins at `panel`.
inline void store_key_column(const float* head, int64_t head_dim, int64_t slot, BFloat16* panel) {
  constexpr int64_t kPart = 32;
  BFloat16 part[kPart];
  BFloat16* column = panel + slot % kKeyPanel * 2;
  int64_t i = 0;
  for (; i + kPart <= head_dim; i += kPart) {
    store_head(head + i, kPart, part);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kPart; j += 2) std::memcpy(column + (i + j) * kKeyPanel, part + j, 4);
  }
  store_head(head + i, head_dim - i, part);
  for (int64_t j = 0; i + j < head_dim; j += 2)
    std::memcpy(column + (i + j) * kKeyPanel, part + j, 4);
}

inline void load_key_column(const BFloat16* panel, int64_t slot, int64_t head_dim, BFloat16* key) {
  const BFloat16* column = panel + slot % kKeyPanel * 2;
  for (int64_t i = 0; i < head_dim; i += 2) std::memcpy(key + i, column + i * kKeyPanel, 4);
}

// Where the panel begins that holds the key of a slot.
inline int64_t key_panel(int64_t slot, int64_t kv_head, int64_t num_kv_heads, int64_t head_dim) {
  return (slot / kKeyPanel * num_kv_heads + kv_head) * head_dim * kKeyPanel;
}

// The cache of one layer: [num_slots, num_kv_heads, head_dim], scales [num_slots, num_kv_heads].
// Keys in panels are [num_slots / 16, num_kv_heads, head_dim / 2, 16, 2], as scores read them.
struct LayerCache {
  Stored type;
  int32_t keys_in_panels;
  void* keys;
  void* values;
  float* key_scales;  // null where the type has none
  float* value_scales;
};

// Calls body with a null pointer to the type that the cache holds.
template <class Body>
void with_stored(Stored type, Body body) {
  switch (type) {
    case Stored::kFloat32:
      return body(static_cast<float*>(nullptr));
    case Stored::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    case Stored::kInt8:
      return body(static_cast<int8_t*>(nullptr));
    case Stored::kFp8:
      return body(static_cast<Fp8*>(nullptr));
  }
}

}  // namespace shoal
