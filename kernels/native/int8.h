// Products with weights of 8 bits: unsigned bytes (128 is zero) times states of 8 bits.
//
// A panel: [k / 4][32][4] bytes, k padded with zero, then 32 float scales.
// A prepared row: the states, k padded to 4, then at the end of the row a StateGroup for each 64.
#pragma once

#include "int8_states.h"

namespace shoal {

constexpr int32_t kInt8Factor = -128;  // of a group's sum in its offset

inline int64_t state_groups(int64_t k) { return (k + kStateGroup - 1) / kStateGroup; }
inline int64_t int8_panel_bytes(int64_t k) { return round_up(k, 4) * kPanel + 4 * kPanel; }
inline int64_t int8_tail_bytes(int64_t k) { return state_groups(k) * int64_t(sizeof(StateGroup)); }
inline int64_t int8_row_bytes(int64_t k) {
  return round_up(round_up(k, 4) + int8_tail_bytes(k), kRowAlign);
}

template <class T>
void prepare_int8(const T* in, int64_t k, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int8_row_bytes(k) - int8_tail_bytes(k);
  quantize_row(in, nullptr, k, kStateGroup, kInt8Factor, values, tail);
  for (int64_t i = k; i < round_up(k, 4); i++) values[i] = 0;
}

// A group of kQuads, or of `num_quads` where that is 0.
template <int kRows, int kQuads>
__attribute__((always_inline)) inline void int8_group(const char* a, int64_t a_stride,
                                                      const char* panel, int64_t num_quads,
                                                      IntVec (&sums)[kRows][kVecs]) {
  // Written out whole, so that the states lie at fixed distances from their row's pointer.
#pragma GCC unroll 16
  for (int64_t quad = 0; quad < (kQuads ? kQuads : num_quads); quad++) {
    const char* source = panel + quad * 4 * kPanel;
    IntVec weights[kVecs];
    for (int v = 0; v < kVecs; v++) weights[v] = load_int(source + v * sizeof(IntVec));
    add_quad<kRows>(a, a_stride, quad, weights, sums);
  }
}

template <int kRows>
__attribute__((noinline)) void int8_rows(const char* a, int64_t a_stride, const char* panel,
                                         int64_t k, float* out, const Ahead& ahead) {
  constexpr int64_t kQuads = kStateGroup / 4;
  const int64_t num_quads = (k + 3) / 4;
  const char* group = a + a_stride - int8_tail_bytes(k);
  Vec totals[kRows][kVecs] = {};
  int64_t first = 0;
  for (; first + kQuads <= num_quads; first += kQuads, group += sizeof(StateGroup)) {
    IntVec sums[kRows][kVecs];
    begin_group<kRows>(group, a_stride, nullptr, sums);
    ahead.fetch_lines(first / kQuads);
    int8_group<kRows, kQuads>(a + 4 * first, a_stride, panel + first * 4 * kPanel, 0, sums);
    end_group<kRows>(group, a_stride, nullptr, sums, totals);
  }
  if (first < num_quads) {
    IntVec sums[kRows][kVecs];
    begin_group<kRows>(group, a_stride, nullptr, sums);
    ahead.fetch_lines(first / kQuads);
    int8_group<kRows, 0>(a + 4 * first, a_stride, panel + first * 4 * kPanel, num_quads - first,
                         sums);
    end_group<kRows>(group, a_stride, nullptr, sums, totals);
  }
  const float* scales = reinterpret_cast<const float*>(panel + num_quads * 4 * kPanel);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      store(out + row * kPanel + v * kLanes, totals[row][v] * load(scales + v * kLanes));
}

}  // namespace shoal
