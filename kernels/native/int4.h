// Products with weights of 4 bits: values 0 to 15 in groups along k times states of 8 bits.
//
// A panel: [groups][32] words, then [k / 8][32] words of eight values, k padded with zero.
// A group's word: the bits of its float scale, the lowest eight replaced by its zero point.
// A word of values: k = j lies in the low half of byte j, k = 4 + j in the high half.
// A prepared row: the states in the order of the columns, k padded to 8 with zeros, then at the end
// of the row a StateGroup for each of `int4_state_group`, and each weight group's sum of states.
#pragma once

#include <numeric>

#include "int8_states.h"

namespace shoal {

inline int64_t num_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }

// States that share a scale: they lie within one group of the weights, which is of whole eights.
inline int64_t int4_state_group(int64_t k, int64_t group) {
  return group >= k ? kStateGroup : std::gcd(kStateGroup, group);
}

inline int64_t int4_panel_bytes(int64_t k, int64_t group) {
  return 4 * kPanel * (num_groups(k, group) + (k + 7) / 8);
}

inline int64_t int4_tail_bytes(int64_t k, int64_t group) {
  return num_groups(k, int4_state_group(k, group)) * int64_t(sizeof(StateGroup)) +
         num_groups(k, group) * int64_t(sizeof(float));
}

inline int64_t int4_row_bytes(int64_t k, int64_t group) {
  return round_up(round_up(k, 8) + int4_tail_bytes(k, group), kRowAlign);
}

// columns: which feature each column takes, or null for their own order.
template <class T>
void prepare_int4(const T* in, const int64_t* columns, int64_t k, int64_t group, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int4_row_bytes(k, group) - int4_tail_bytes(k, group);
  char* totals = out + int4_row_bytes(k, group) - num_groups(k, group) * sizeof(float);
  const int64_t width = int4_state_group(k, group);
  for (int64_t begin = 0; begin < k; begin += group, totals += sizeof(float)) {
    float total = 0;
    const int64_t end = std::min(k, begin + group);
    for (int64_t first = begin; first < end; first += width, tail += sizeof(StateGroup)) {
      const int64_t count = std::min(width, end - first);
      StateGroup states =
          columns ? quantize_states(in, columns + first, count, values + first)
                  : quantize_states(in + first, nullptr, count, values + first);
      total += states.scale * float(states.offset);
      states.offset *= -8;
      std::memcpy(tail, &states, sizeof states);
    }
    std::memcpy(totals, &total, sizeof total);
  }
  for (int64_t i = k; i < round_up(k, 8); i++) values[i] = 0;
}

// A group of kOctets, or of `num_octets` where that is 0.
template <int kRows, int kOctets>
__attribute__((always_inline)) inline void int4_group(const char* a, int64_t a_stride,
                                                      const int32_t* words, int64_t num_octets,
                                                      const Ahead& ahead, int64_t step,
                                                      IntVec (&sums)[kRows][kVecs]) {
#pragma GCC unroll 8
  for (int64_t octet = 0; octet < (kOctets ? kOctets : num_octets); octet++) {
    const int32_t* source = words + octet * kPanel;
    IntVec low[kVecs], high[kVecs];
    ahead.fetch(step + octet);
    for (int v = 0; v < kVecs; v++) low[v] = load_int(source + v * kLanes) & 0x0f0f0f0f;
    add_quad<kRows>(a, a_stride, 2 * octet, low, sums);
    for (int v = 0; v < kVecs; v++) high[v] = (load_int(source + v * kLanes) >> 4) & 0x0f0f0f0f;
    add_quad<kRows>(a, a_stride, 2 * octet + 1, high, sums);
  }
}

// out [kRows][32] holds the totals on the way, as with 8 bits.
template <int kRows>
__attribute__((noinline)) void int4_rows(const char* a, int64_t a_stride, const char* panel,
                                         int64_t k, int64_t group, float* out, const Ahead& ahead) {
  const int64_t groups = num_groups(k, group), width = int4_state_group(k, group);
  const int32_t* heads = reinterpret_cast<const int32_t*>(panel);
  const int32_t* words = heads + groups * kPanel;
  const char* states = a + a_stride - int4_tail_bytes(k, group);
  const char* totals = a + a_stride - groups * sizeof(float);
  std::fill_n(out, kRows * kPanel, 0.0f);
  for (int64_t g = 0; g < groups; g++) {
    alignas(64) float scales[kPanel];
    for (int v = 0; v < kVecs; v++) {
      const IntVec head = load_int(heads + g * kPanel + v * kLanes);
      store(scales + v * kLanes, (Vec)(head & ~255));
      // What the zero points differ from 8, which the states' offsets stand for.
      const Vec zero = __builtin_convertvector(8 - (head & 255), Vec) * (Vec)(head & ~255);
      for (int row = 0; row < kRows; row++) {
        float total;
        std::memcpy(&total, totals + row * a_stride + g * sizeof total, sizeof total);
        float* to = out + row * kPanel + v * kLanes;
        store(to, multiply_add(splat(total), zero, load(to)));
      }
    }
    const int64_t end = std::min(k, (g + 1) * group);
    for (int64_t first = g * group; first < end; first += width, states += sizeof(StateGroup)) {
      IntVec sums[kRows][kVecs];
      begin_group<kRows>(states, a_stride, sums);
      const int32_t* source = words + first / 8 * kPanel;
      if (std::min(width, end - first) == kStateGroup)
        int4_group<kRows, kStateGroup / 8>(a + first, a_stride, source, 0, ahead, first / 8,
                                             sums);
      else
        int4_group<kRows, 0>(a + first, a_stride, source, (std::min(width, end - first) + 7) / 8,
                             ahead, first / 8, sums);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; row++) {
        float scale;
        std::memcpy(&scale, states + row * a_stride, sizeof scale);
        for (int v = 0; v < kVecs; v++) {
          float* total = out + row * kPanel + v * kLanes;
          const Vec sum = __builtin_convertvector(sums[row][v], Vec) * splat(scale);
          store(total, multiply_add(sum, load(scales + v * kLanes), load(total)));
        }
      }
    }
  }
}

}  // namespace shoal
