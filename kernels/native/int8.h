// Products with weights of 8 bits: unsigned bytes (128 is zero) times states of 8 bits.
//
// A panel: [k / 4][32][4] bytes, k padded with zero, then 32 float scales.
// A prepared row: the states, k padded to 4, then at the end of the row a StateGroup for each 32,
// and room for one.
#pragma once

#include "int8_states.h"

namespace shoal {

constexpr int32_t kInt8Factor = -128;  // of a group's sum in its offset
constexpr int64_t kInt8StateGroup = 32;  // states that share a scale

inline int64_t state_groups(int64_t k) { return (k + kInt8StateGroup - 1) / kInt8StateGroup; }
inline int64_t int8_panel_bytes(int64_t k) { return round_up(k, 4) * kPanel + 4 * kPanel; }
inline int64_t int8_tail_bytes(int64_t k) { return tail_bytes(state_groups(k)); }
inline int64_t int8_row_bytes(int64_t k) {
  return round_up(round_up(k, 4) + int8_tail_bytes(k), kRowAlign);
}

template <class T>
void prepare_int8(const T* in, int64_t k, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int8_row_bytes(k) - int8_tail_bytes(k);
  quantize_row(in, nullptr, k, kInt8StateGroup, kInt8Factor, values, tail);
  for (int64_t i = k; i < round_up(k, 4); i++) values[i] = 0;
}

// A group of kQuads, or of `num_quads` where that is 0; end(row) when a row's sums are whole.
template <int kRows, int kQuads, class End>
__attribute__((always_inline)) inline void int8_group(const char* a, const RowsAt<kRows>& rows,
                                                      const char* panel, int64_t num_quads,
                                                      IntVec (&sums)[kRows][kVecs],
                                                      const End& end) {
  const auto add = [&](int64_t quad, const auto& then) __attribute__((always_inline)) {
    IntVec weights[kVecs];
    for (int v = 0; v < kVecs; v++)
      weights[v] = load_int(panel + quad * 4 * kPanel + v * sizeof(IntVec));
    add_quad<kRows>(a, rows, quad, weights, sums, then);
  };
  if constexpr (kQuads > 0) {
    // Written out whole, so that the states lie at fixed distances from their row's pointer.
#pragma GCC unroll 16
    for (int64_t quad = 0; quad < kQuads - 1; quad++) add(quad, NothingElse{});
    add(kQuads - 1, end);
  } else {
    for (int64_t quad = 0; quad < num_quads - 1; quad++) add(quad, NothingElse{});
    add(num_quads - 1, end);
  }
}

template <int kRows>
__attribute__((noinline)) void int8_rows(const char* a, int64_t a_stride, const char* panel,
                                         int64_t k, float* out, const Ahead& ahead) {
  constexpr int64_t kQuads = kInt8StateGroup / 4;
  const RowsAt<kRows> rows(a_stride);
  const char* group = a + a_stride - int8_tail_bytes(k);
  Vec totals[kRows][kVecs] = {};
  IntVec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) begin_group(group + rows.at[row], sums[row]);
  int64_t left = (k + 3) / 4;
  for (int64_t step = 0; left > 0; step++) {
    ahead.fetch_lines(step);
    const auto end = [&](int row) __attribute__((always_inline)) {
      const char* of_row = group + rows.at[row];
      for (int v = 0; v < kVecs; v++) totals[row][v] += scaled(of_row, sums[row][v]);
      begin_group(of_row + sizeof(StateGroup), sums[row]);
    };
    if (left >= kQuads)
      int8_group<kRows, kQuads>(a, rows, panel, 0, sums, end);
    else
      int8_group<kRows, 0>(a, rows, panel, left, sums, end);
    const int64_t done = std::min(left, kQuads);
    left -= done;
    a += 4 * done;
    panel += done * 4 * kPanel;
    group += sizeof(StateGroup);
  }
  const float* scales = reinterpret_cast<const float*>(panel);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      store(out + row * kPanel + v * kLanes, totals[row][v] * load(scales + v * kLanes));
}

}  // namespace shoal
