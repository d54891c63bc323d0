// Keys and values of a span, in the order in which the register tile reads them.
#pragma once

#include "block_mass.h"
#include "stored.h"
#include "tile.h"

namespace shoal {

#if defined(__AVX512F__)
// The words of 16 rows in four columns, by column. What rows 4 apart have there is loaded into one
// register: half the shuffles that whole rows would take.
template <class T>
inline void four_columns(const T* const* rows, int64_t first, __m512i (&columns)[4]) {
  __m512i r[4], t[4];
  for (int i = 0; i < 4; i++) {
    const auto part = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + first));
    };
    r[i] = _mm512_castsi128_si512(part(i));
    r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x00f0, part(4 + i));
    r[i] = _mm512_mask_broadcast_i32x4(r[i], 0x0f00, part(8 + i));
    r[i] = _mm512_mask_broadcast_i32x4(r[i], 0xf000, part(12 + i));
  }
  t[0] = _mm512_unpacklo_epi32(r[0], r[1]);
  t[1] = _mm512_unpackhi_epi32(r[0], r[1]);
  t[2] = _mm512_unpacklo_epi32(r[2], r[3]);
  t[3] = _mm512_unpackhi_epi32(r[2], r[3]);
  columns[0] = _mm512_unpacklo_epi64(t[0], t[2]);
  columns[1] = _mm512_unpackhi_epi64(t[0], t[2]);
  columns[2] = _mm512_unpacklo_epi64(t[1], t[3]);
  columns[3] = _mm512_unpackhi_epi64(t[1], t[3]);
}

// 16 x 16 words: rows [16] at `source`, columns to `target` with a stride.
inline void transpose_16(const int32_t* const* source, int32_t* target, int64_t target_stride) {
  for (int64_t column = 0; column < 16; column += 4) {
    __m512i columns[4];
    four_columns(source, column, columns);
    for (int i = 0; i < 4; i++)
      _mm512_storeu_si512(target + (column + i) * target_stride, columns[i]);
  }
}
#endif

// The keys and values that are read next. They lie scattered over the cache, so that no hardware
// sees them coming, and are fetched a few lines at each step of the arithmetic: a core waits for some
// twenty lines at once, and many together would wait for each other, and all else for them. In
// bfloat16 a span's head has as many lines as two for each of its scores' products and two for each
// of its values'; those who ask take some more, and are done before the end.
struct SpanAhead {
  static constexpr int kScoreLines = 4;  // a pair of features of 64 keys
  static constexpr int kRowLines = 8;    // a row of scores
  static constexpr int kValueLines = 4;  // two values' 64 columns

  const char* rows[4 * kSpan];  // of two spans at most, of all heads of a task, which lie side by side
  int num_rows = 0, row = 0, offset = 0, row_bytes = 0;

  void begin(int64_t bytes) {
    num_rows = row = offset = 0;
    row_bytes = int(bytes);
  }

  void add(const void* begin) { rows[num_rows++] = static_cast<const char*>(begin); }

  void fetch(int num_lines) {
    for (; num_lines > 0 && row < num_rows; num_lines--) {
      fetch_line(rows[row] + offset);
      offset += 64;
      if (offset < row_bytes) continue;
      offset = 0;
      row++;
    }
  }
};

// 32 keys as a panel: each key is one column.
template <class T>
void pack_keys(const T* const* keys, int64_t head_dim, T* panel, SpanAhead& ahead) {
  constexpr int64_t group = 4 / sizeof(T);
  int64_t done = 0;  // features
#if defined(__AVX512F__)
  for (; done + 16 * group <= head_dim; done += 16 * group)
    for (int64_t half = 0; half < 2; half++) {
      const int32_t* rows[16];
      for (int64_t i = 0; i < 16; i++)
        rows[i] = reinterpret_cast<const int32_t*>(keys[half * 16 + i] + done);
      ahead.fetch(4 * SpanAhead::kScoreLines);  // a quarter of the keys, 16 pairs
      transpose_16(rows, reinterpret_cast<int32_t*>(panel + done * kPanel) + half * 16, kPanel);
    }
#endif
  for (int64_t i = done; i < padded_k(head_dim, T{}); i++)
    for (int64_t key = 0; key < kPanel; key++)
      panel[(i / group * kPanel + key) * group + i % group] =
          i < head_dim ? keys[key][i] : T{};
}

// Rows of queries that score keys as these come out of the transposition, without a panel; for more
// of them a panel pays.
constexpr int kFewRows = 4;

#if defined(__AVX512BF16__)
// The words of 16 keys in eight columns, by column.
inline void eight_columns(const BFloat16* const* keys, int64_t first, __m512i (&columns)[8]) {
  __m512i r[8], t[8];
  for (int i = 0; i < 8; i++) {
    const auto part = [&](int key) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys[key] + first));
    };
    const int key = i / 4 * 8 + i % 4;
    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(part(key)), part(key + 4), 1);
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    r[2 * i] = _mm512_unpacklo_epi64(t[i], t[2 + i]);
    r[2 * i + 1] = _mm512_unpackhi_epi64(t[i], t[2 + i]);
    r[4 + 2 * i] = _mm512_unpacklo_epi64(t[4 + i], t[6 + i]);
    r[4 + 2 * i + 1] = _mm512_unpackhi_epi64(t[4 + i], t[6 + i]);
  }
  for (int i = 0; i < 4; i++) {
    columns[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    columns[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
  }
}

// scores[row][0..32) = what the tile makes of a panel of these 32 keys, to the bit.
template <int kRows>
inline void score_keys_rows(const BFloat16* queries, int64_t head_dim, const BFloat16* const* keys,
                            float* scores, int64_t scores_stride, SpanAhead& ahead) {
  Vec sums[kRows][kVecs] = {};
  for (int64_t first = 0; first < head_dim; first += 16) {
    __m512i pairs[kVecs][8];
    for (int v = 0; v < kVecs; v++) eight_columns(keys + v * kLanes, first, pairs[v]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      ahead.fetch(SpanAhead::kScoreLines / 2);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; row++) {
        const IntVec pair = splat_pair(queries + row * head_dim + first + 2 * i);
        for (int v = 0; v < kVecs; v++)
          sums[row][v] = pair_multiply_add(pair, (IntVec)pairs[v][i], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(scores + row * scores_stride + v * kLanes, sums[row][v]);
}

template <int kRows = kFewRows>
inline void score_keys(int64_t rows, const BFloat16* queries, int64_t head_dim,
                       const BFloat16* const* keys, float* scores, int64_t scores_stride,
                       SpanAhead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return score_keys<kRows - 1>(rows, queries, head_dim, keys, scores, scores_stride, ahead);
  }
  score_keys_rows<kRows>(queries, head_dim, keys, scores, scores_stride, ahead);
}

// scores[row][0..16 * kPanels) of keys that lie in the cache as panels of 16; the same bits.
template <int kRows, int kPanels>
inline void score_panels_rows(const BFloat16* queries, int64_t head_dim,
                              const BFloat16* const* panels, float* scores, int64_t scores_stride,
                              SpanAhead& ahead) {
  Vec sums[kRows][kPanels] = {};
  const BFloat16* keys[kPanels];
#pragma GCC unroll 4
  for (int v = 0; v < kPanels; v++) keys[v] = panels[v];
  for (int64_t i = 0; i < head_dim; i += 2) {
    ahead.fetch(SpanAhead::kScoreLines);
    IntVec pairs[kPanels];
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++)
      pairs[v] = (IntVec)_mm512_loadu_si512(keys[v] + i * kKeyPanel);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      const IntVec pair = splat_pair(queries + row * head_dim + i);
#pragma GCC unroll 4
      for (int v = 0; v < kPanels; v++)
        sums[row][v] = pair_multiply_add(pair, pairs[v], sums[row][v]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 4
    for (int v = 0; v < kPanels; v++)
      store(scores + row * scores_stride + v * kLanes, sums[row][v]);
}

template <int kPanels, int kRows>
inline void score_panels(int64_t rows, const BFloat16* queries, int64_t head_dim,
                         const BFloat16* const* panels, float* scores, int64_t scores_stride,
                         SpanAhead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return score_panels<kPanels, kRows - 1>(rows, queries, head_dim, panels, scores,
                                              scores_stride, ahead);
  }
  score_panels_rows<kRows, kPanels>(queries, head_dim, panels, scores, scores_stride, ahead);
}
#endif

// What weights of values are rounded to, so that they multiply in pairs where the CPU does that; as
// transformers rounds them too.
#if defined(__AVX512BF16__)
template <class T>
using Weight = T;
#else
template <class T>
using Weight = float;
#endif

#if defined(__AVX512BF16__)
// Two values' 32 columns from `column` on as pairs, in the order of value_column().
inline void pair_values(const BFloat16* first, const BFloat16* second, IntVec (&pairs)[kVecs]) {
  const __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(second);
  pairs[0] = (IntVec)_mm512_unpacklo_epi16(low, high);
  pairs[1] = (IntVec)_mm512_unpackhi_epi16(low, high);
}
#endif

// Where a column of values lies in sums over values.
template <class T>
int64_t value_column(int64_t column) {
  if constexpr (sizeof(Weight<T>) == 4) return column;
  const int64_t in_panel = column % kPanel;
  return column - in_panel + in_panel % 8 / 4 * 16 + in_panel / 8 * 4 + in_panel % 4;
}

// 32 columns of a sum over values, divided by `total`, in the order of columns.
inline void store_values(const float* sums, float total, float* out) {
  for (int i = 0; i < kPanel; i += kLanes) store(out + i, load(sums + i) / splat(total));
}

inline void store_values(const float* sums, float total, BFloat16* out) {
#if defined(__AVX512BF16__)
  BFloat16 halves[kPanel];  // of groups of 4 columns, the even ones before the odd ones
  for (int i = 0; i < kPanel; i += kLanes) store_rounded(load(sums + i) / splat(total), halves + i);
  const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
  const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 16));
  const __m256i low = _mm256_unpacklo_epi64(even, odd), high = _mm256_unpackhi_epi64(even, odd);
  __m256i* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
#else
  for (int i = 0; i < kPanel; i++) assign(out[i], sums[i] / total);
#endif
}

// Values first to count of a span as panels [kSpan][32] for the tile, each a whole number of panels
// wide.
template <class T>
void pack_values(const T* const* values, int64_t first, int64_t count, int64_t width,
                 Weight<T>* panels) {
  for (int64_t start = 0; start < width; start += kPanel, panels += kSpan * kPanel) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {
      for (int64_t key = first; key < count; key += 2) {
        IntVec pairs[kVecs];
        pair_values(values[key] + start, values[key + 1] + start, pairs);
        std::memcpy(panels + key * kPanel, pairs, sizeof pairs);
      }
      continue;
    }
#endif
    if constexpr (sizeof(Weight<T>) == 4)
      for (int64_t key = first; key < count; key++)
        for (int64_t i = 0; i < kPanel; i += kLanes)
          store(panels + key * kPanel + i, load_wide(values[key] + start + i));
  }
}

// out[row][0..kWidth) += weights[row][first..count) * values[.][column..column + kWidth), whole panels
// wide: what the tile does with panels of values, without the panels.
template <class T, int kRows, int kWidth>
void add_weighted_rows(const Weight<T>* weights, const T* const* values, int64_t first,
                       int64_t count, int64_t column, float* out, int64_t out_stride,
                       SpanAhead& ahead) {
  constexpr int kWidthVecs = kWidth / kLanes;
  constexpr int kLines = SpanAhead::kValueLines * kWidth / 64;
  Vec sums[kRows][kWidthVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kWidthVecs; v++) sums[row][v] = load(out + row * out_stride + v * kLanes);
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    for (int64_t key = first; key < count; key += 2) {
      ahead.fetch(kLines);
      IntVec pairs[kWidthVecs / kVecs][kVecs];
      for (int i = 0; i < kWidthVecs / kVecs; i++)
        pair_values(values[key] + column + i * kPanel, values[key + 1] + column + i * kPanel,
                    pairs[i]);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; row++) {
        int32_t both;
        std::memcpy(&both, weights + row * kSpan + key, sizeof both);
        const IntVec weight = both - IntVec{};
        for (int v = 0; v < kWidthVecs; v++)
          sums[row][v] = pair_multiply_add(weight, pairs[v / kVecs][v % kVecs], sums[row][v]);
      }
    }
  }
#endif
  if constexpr (sizeof(Weight<T>) == 4)
    for (int64_t key = first; key < count; key++) {
      ahead.fetch(kLines);
      Vec value[kWidthVecs];
      for (int v = 0; v < kWidthVecs; v++) value[v] = load_wide(values[key] + column + v * kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; row++) {
        const Vec weight = splat(weights[row * kSpan + key]);
        for (int v = 0; v < kWidthVecs; v++)
          sums[row][v] = multiply_add(weight, value[v], sums[row][v]);
      }
    }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kWidthVecs; v++) store(out + row * out_stride + v * kLanes, sums[row][v]);
}

template <class T, int kRows, int kWidth = kPanel>
void add_weighted(int rows, const Weight<T>* weights, const T* const* values, int64_t first,
                  int64_t count, int64_t column, float* out, int64_t out_stride,
                  SpanAhead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return add_weighted<T, kRows - 1, kWidth>(rows, weights, values, first, count, column, out,
                                                out_stride, ahead);
  }
  add_weighted_rows<T, kRows, kWidth>(weights, values, first, count, column, out, out_stride,
                                     ahead);
}

}  // namespace shoal
