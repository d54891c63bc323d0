// Products with weights of fp8 (e4m3): bytes that become the states' type as they are read.
//
// A panel: [k / 2][32][2] bytes, an odd k padded with zero, then 32 float scales.
#pragma once

#include "int8_states.h"

namespace shoal {

inline int64_t fp8_panel_bytes(int64_t k) { return round_up(k, 2) * kPanel + 4 * kPanel; }

// The bits of a bfloat16 that equals an e4m3: each of the latter is one of the former.
inline uint16_t fp8_to_bf16(uint8_t byte) {
  const int magnitude = byte & 127;
  uint16_t bits = uint16_t((magnitude << 4) + (120 << 7));
  if (magnitude < 8) {  // subnormal: magnitude / 512
    BFloat16 value;
    assign(value, float(magnitude) / 512.0f);
    bits = value.bits;
  } else if (magnitude == 127) {
    bits = 0x7fc0;
  }
  return uint16_t(bits | (byte & 128) << 8);
}

// 32 columns' bytes of a pair of k as vectors of pairs of bfloat16.
struct Fp8Table {
#if defined(__AVX512BF16__)
  __m512i subnormal;
  Fp8Table() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; i++) table[i] = fp8_to_bf16(uint8_t(i % 8));
    subnormal = _mm512_load_si512(table);
  }
  void read(const char* source, IntVec* weights) const {
    for (int v = 0; v < kVecs; v++) {
      const __m512i raw = _mm512_cvtepu8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + v * 32)));
      const __m512i magnitude = _mm512_and_si512(raw, _mm512_set1_epi16(127));
      const __m512i normal =
          _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
      const __m512i bits = _mm512_mask_permutexvar_epi16(
          normal, _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormal);
      // bits | (raw & 128) << 8
      weights[v] = (IntVec)_mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(raw, 8),
                                                     _mm512_set1_epi16(int16_t(0x8000)), 0xf8);
    }
  }
#else
  uint16_t bits[256];
  Fp8Table() {
    for (int i = 0; i < 256; i++) bits[i] = fp8_to_bf16(uint8_t(i));
  }
  void read(const char* source, IntVec* weights) const {
    uint16_t pairs[2 * kPanel];
    for (int i = 0; i < 2 * kPanel; i++) pairs[i] = bits[uint8_t(source[i])];
    std::memcpy(weights, pairs, sizeof pairs);
  }
#endif
};

// Not a function's static: those of templates are one for all libraries of a process.
namespace {
const Fp8Table fp8_table;
}

inline Vec fp8_step(const float* states, int64_t left, IntVec weights, Vec acc) {
  const IntVec mask = IntVec{} + int32_t(0xffff0000u);
  acc = multiply_add(splat(states[0]), (Vec)(weights << 16), acc);
  return left > 1 ? multiply_add(splat(states[1]), (Vec)(weights & mask), acc) : acc;
}

inline Vec fp8_step(const BFloat16* states, int64_t left, IntVec weights, Vec acc) {
  int32_t both = states[0].bits;
  if (left > 1) std::memcpy(&both, states, sizeof both);
  return pair_multiply_add(both - IntVec{}, weights, acc);
}

template <class T, int kRows>
inline void fp8_rows(const char* a, int64_t a_stride, const char* panel, int64_t k, float* out,
                     const Ahead& ahead) {
  Vec sums[kRows][kVecs] = {};
  for (int64_t i = 0; i < k; i += 2) {
    IntVec weights[kVecs];
    const char* source = panel + i * kPanel;
    if (i % 4 == 0) ahead.fetch(i / 4);
    fp8_table.read(source, weights);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      const T* states = reinterpret_cast<const T*>(a + row * a_stride) + i;
      for (int v = 0; v < kVecs; v++)
        sums[row][v] = fp8_step(states, k - i, weights[v], sums[row][v]);
    }
  }
  const float* scales = reinterpret_cast<const float*>(panel + round_up(k, 2) * kPanel);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      store(out + row * kPanel + v * kLanes, sums[row][v] * load(scales + v * kLanes));
}

}  // namespace shoal
