// Keys and values of a span, in the order in which the register tile reads them.
#pragma once

#include "block_mass.h"
#include "stored.h"
#include "tile.h"

namespace shoal {

#if defined(__AVX512F__)
// 16 x 16 words: rows [16] at `source` with a stride, columns to `target` with a stride.
inline void transpose_16(const int32_t* const* source, int32_t* target, int64_t target_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(source[i]);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(target + i * target_stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(target + (8 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(target + (4 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(target + (12 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
}
#endif

// 32 keys as a panel: each key is one column.
template <class T>
void pack_keys(const T* const* keys, int64_t head_dim, T* panel) {
  constexpr int64_t group = 4 / sizeof(T);
  int64_t done = 0;  // features
#if defined(__AVX512F__)
  for (; done + 16 * group <= head_dim; done += 16 * group)
    for (int64_t half = 0; half < 2; half++) {
      const int32_t* rows[16];
      for (int64_t i = 0; i < 16; i++)
        rows[i] = reinterpret_cast<const int32_t*>(keys[half * 16 + i] + done);
      transpose_16(rows, reinterpret_cast<int32_t*>(panel + done * kPanel) + half * 16, kPanel);
    }
#endif
  for (int64_t i = done; i < padded_k(head_dim, T{}); i++)
    for (int64_t key = 0; key < kPanel; key++)
      panel[(i / group * kPanel + key) * group + i % group] =
          i < head_dim ? keys[key][i] : T{};
}

// Values first to count of a span as panels [kSpan][32] of float.
template <class S>
void pack_values(const S* const* values, int64_t first, int64_t count, int64_t head_dim,
                 float* panels) {
  for (int64_t start = 0; start < head_dim; start += kPanel, panels += kSpan * kPanel) {
    const int64_t columns = std::min<int64_t>(kPanel, head_dim - start);
    for (int64_t key = first; key < count; key++) {
      float* out = panels + key * kPanel;
      if (columns == kPanel) {
        for (int64_t i = 0; i < kPanel; i += kLanes)
          store(out + i, load_wide(values[key] + start + i));
      } else {
        for (int64_t i = 0; i < kPanel; i++)
          out[i] = i < columns ? to_float(values[key][start + i]) : 0.0f;
      }
    }
  }
}

// out[row][0..32) += weights[row][first..count) * values[.][column..column + 32): what the tile does
// with a panel of values, without the panel.
template <class S, int kRows>
void add_weighted_rows(const float* weights, const S* const* values, int64_t first, int64_t count,
                       int64_t column, float* out, int64_t out_stride) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) sums[row][v] = load(out + row * out_stride + v * kLanes);
  for (int64_t key = first; key < count; key++) {
    Vec value[kVecs];
    for (int v = 0; v < kVecs; v++) value[v] = load_wide(values[key] + column + v * kLanes);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      const Vec weight = splat(weights[row * kSpan + key]);
      for (int v = 0; v < kVecs; v++) sums[row][v] = multiply_add(weight, value[v], sums[row][v]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * out_stride + v * kLanes, sums[row][v]);
}

template <class S, int kRows = kTileRows>
void add_weighted(int rows, const float* weights, const S* const* values, int64_t first,
                  int64_t count, int64_t column, float* out, int64_t out_stride) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return add_weighted<S, kRows - 1>(rows, weights, values, first, count, column, out,
                                        out_stride);
  }
  add_weighted_rows<S, kRows>(weights, values, first, count, column, out, out_stride);
}

}  // namespace shoal
