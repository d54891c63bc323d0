// The register tile that all products are made of.
//
// A weight is packed in panels of 32 columns (output features). Within a panel k (the input
// feature) runs slowest: float32 as [k][32], bfloat16 as [k / 2][32][2], an odd k padded with 0.
// Each output element is one accumulator that goes through k in ascending order, alone: neither
// the number of rows nor a row's place among them can change its bits.
#pragma once

#include <algorithm>

#include "vec.h"

namespace shoal {

constexpr int kPanel = 32;
constexpr int kVecs = kPanel / kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kTileRows = 3;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kTileRows = 3;  // 24 of 32
#else
constexpr int kTileRows = 1;
#endif
constexpr int kPrefetchBytes = 2048;

// What a tile fetches into the second-level cache while it computes, in two streams: its share of
// what is read next, so that memory is read all the time and not by a panel's first tile alone.
struct Ahead {
  static constexpr int64_t kMostLines = 16;

  // Of 64 bytes, in each of `num_steps`.
  static int64_t lines_in(int64_t num_bytes, int64_t num_steps) {
    return (num_bytes + 64 * num_steps - 1) / (64 * num_steps);
  }

  const char* begin = nullptr;
  int64_t step = 0;            // bytes
  int64_t second = 0, third = 0;  // of the other stream, after `begin`: before step `turn`, and
  int64_t turn = 0;               // from then on
  int64_t lines = 0, second_lines = 0;  // of each stream in a step, for fetch_lines

  // The share of tile `tile` of `num_tiles`, each of `num_steps`, in `num_bytes` from `source` on.
  static Ahead share(const char* source, int64_t num_bytes, int64_t tile, int64_t num_tiles,
                     int64_t num_steps) {
    if (!source) return {};
    const int64_t half = (num_bytes / num_tiles + 1) / 2;
    return {source + num_bytes * tile / num_tiles, (half + num_steps - 1) / num_steps, half, half,
            0};
  }

  // The same for tiles that ask by fetch_lines, `num_steps` times.
  static Ahead share_lines(const char* source, int64_t num_bytes, int64_t tile, int64_t num_tiles,
                           int64_t num_steps) {
    Ahead ahead;
    if (!source) return ahead;
    ahead.begin = source + num_bytes * tile / num_tiles;
    ahead.lines = lines_in(num_bytes / num_tiles, num_steps);
    return ahead;
  }

  // Nothing: `here` is at hand anyway. A branch in every step would cost more.
  static Ahead nothing(const void* here) { return {static_cast<const char*>(here)}; }

  // The share in one stream; in the other `num_bytes` of one thing and then of another.
  void add(const char* one, const char* other, int64_t num_bytes, int64_t num_steps) {
    turn = num_steps / 2;
    step = std::min<int64_t>(64, std::max(2 * step, (num_bytes + turn - 1) / turn));
    second = one - begin;
    third = other - begin - turn * step;
  }

  // What fetch_lines also asks for: at most as much as a step can without delay.
  void add_lines(const char* other, int64_t num_bytes, int64_t num_steps) {
    second = other - begin;
    second_lines = std::min<int64_t>(kMostLines, lines_in(num_bytes, num_steps));
  }

  // The lines of one step, which is as long as a group's sums.
  void fetch_lines(int64_t i) const {
    for (int64_t line = i * lines; line < (i + 1) * lines; line++)
      fetch_line(begin + line * 64);
    for (int64_t line = i * second_lines; line < (i + 1) * second_lines; line++)
      fetch_line(begin + second + line * 64);
  }

  void fetch(int64_t i) const {
    const char* at = begin + i * step;
    fetch_line(at);
    fetch_line(at + (i < turn ? second : third));
  }
};

inline int64_t padded_k(int64_t k, float) { return k; }
inline int64_t padded_k(int64_t k, BFloat16) { return (k + 1) / 2 * 2; }

template <class T>
int64_t panel_elements(int64_t k) {
  return padded_k(k, T{}) * kPanel;
}

// out[row][0..32) = (kAccumulate ? out : 0) + a[row][0..k) * panel. Known only at run time, that
// choice would keep the sums out of the registers.
template <int kRows, bool kAccumulate>
__attribute__((noinline)) void tile_sums(const float* a, int64_t a_stride, const float* panel,
                                         int64_t k, float* out, int64_t out_stride,
                                         const Ahead& ahead) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      sums[row][v] = kAccumulate ? load(out + row * out_stride + v * kLanes) : Vec{};
  for (int64_t i = 0; i < k; i++) {
    Vec weights[kVecs];
    for (int v = 0; v < kVecs; v++) weights[v] = load(panel + i * kPanel + v * kLanes);
    ahead.fetch(i);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      const Vec state = splat(a[row * a_stride + i]);
      for (int v = 0; v < kVecs; v++) sums[row][v] = multiply_add(state, weights[v], sums[row][v]);
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * out_stride + v * kLanes, sums[row][v]);
}

// acc + the products of one pair of k, in all lanes; states holds the pair in each lane.
inline Vec pair_multiply_add(IntVec states, IntVec weights, Vec acc) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)states, (__m512bh)(__m512i)weights);
#else
  const IntVec high = {};
  const IntVec mask = high + int32_t(0xffff0000u);
  acc = multiply_add((Vec)(states << 16), (Vec)(weights << 16), acc);
  return multiply_add((Vec)(states & mask), (Vec)(weights & mask), acc);
#endif
}

// One pair of k, in all lanes. Straight from memory: by way of other registers each costs an
// instruction more, and there are not enough of them.
inline IntVec splat_pair(const BFloat16* source) {
#if defined(__AVX512F__)
  float pair;
  std::memcpy(&pair, source, sizeof pair);
  return (IntVec)_mm512_set1_ps(pair);
#else
  int32_t pair;
  std::memcpy(&pair, source, sizeof pair);
  return pair - IntVec{};
#endif
}

template <int kRows, bool kAccumulate>
__attribute__((noinline)) void tile_sums(const BFloat16* a, int64_t a_stride,
                                         const BFloat16* panel, int64_t k, float* out,
                                         int64_t out_stride, const Ahead& ahead) {
  constexpr int kBases = (kRows + 2) / 3;  // rows are a base and 0 to 2 strides: few addresses
  Vec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      sums[row][v] = kAccumulate ? load(out + row * out_stride + v * kLanes) : Vec{};
  const BFloat16* bases[kBases];
#pragma GCC unroll 4
  for (int i = 0; i < kBases; i++) bases[i] = a + 3 * i * a_stride;
  const auto add_pair = [&](auto state) {
    IntVec weights[kVecs];
    for (int v = 0; v < kVecs; v++) weights[v] = (IntVec)load((const float*)panel + v * kLanes);
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      const IntVec both = state(bases[row / 3] + row % 3 * a_stride);
      for (int v = 0; v < kVecs; v++)
        sums[row][v] = pair_multiply_add(both, weights[v], sums[row][v]);
    }
  };
  for (int64_t pair = 0; pair < k / 2; pair++) {
    ahead.fetch(pair);
    add_pair(splat_pair);
    panel += 2 * kPanel;
#pragma GCC unroll 4
    for (int i = 0; i < kBases; i++) bases[i] += 2;
  }
  if (k % 2) add_pair([](const BFloat16* last) { return int32_t(last->bits) - IntVec{}; });
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * out_stride + v * kLanes, sums[row][v]);
}

template <int kRows, class T>
inline void tile_rows(const T* a, int64_t a_stride, const T* panel, int64_t k, float* out,
                      int64_t out_stride, bool accumulate, const Ahead& ahead) {
  const Ahead some = ahead.begin ? ahead : Ahead::nothing(panel);
  if (accumulate)
    tile_sums<kRows, true>(a, a_stride, panel, k, out, out_stride, some);
  else
    tile_sums<kRows, false>(a, a_stride, panel, k, out, out_stride, some);
}

template <class T, int kRows = kTileRows>
inline void tile(int rows, const T* a, int64_t a_stride, const T* panel, int64_t k, float* out,
                 int64_t out_stride, bool accumulate, const Ahead& ahead = {}) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return tile<T, kRows - 1>(rows, a, a_stride, panel, k, out, out_stride, accumulate, ahead);
  }
  tile_rows<kRows>(a, a_stride, panel, k, out, out_stride, accumulate, ahead);
}

inline int64_t tiles_of(int64_t num_rows, int64_t most = kTileRows) {
  return (num_rows + most - 1) / most;
}

// Any number of rows, in tiles of about equal height, `most` or less.
template <class Done>
inline void for_tiles(int64_t num_rows, Done done, int64_t most = kTileRows) {
  const int64_t num_tiles = tiles_of(num_rows, most);
  for (int64_t i = 0; i < num_tiles; i++) {
    const int64_t begin = num_rows * i / num_tiles, end = num_rows * (i + 1) / num_tiles;
    done(begin, int(end - begin));
  }
}

}  // namespace shoal
