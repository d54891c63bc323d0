// Products with weights of 4 bits: values 0 to 15 in groups along k times states of 8 bits.
//
// A panel: its groups' heads, then [k / 8][32] words of eight values, k padded with zero.
// The heads: [groups][32] words, the bits of a float scale, the lowest eight replaced by the zero
// point. Or short ones: [groups][32] scales in bfloat16, then [groups / 4][2][32] bytes of two zero
// points, that of the even group low.
// A word of values: k = j lies in the low half of byte j, k = 4 + j in the high half.
// A prepared row: the states in the order of the columns, k padded to 8 with zeros, then at the end
// of the row a StateGroup for each of `int4_state_group`.
#pragma once

#include <numeric>

#include "int8.h"

namespace shoal {

constexpr int32_t kInt4Factor = -1;  // of a group's sum in its offset: times the zero point

inline int64_t num_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }

// States that share a scale: they lie within one group of the weights, which is of whole eights.
inline int64_t int4_state_group(int64_t k, int64_t group) {
  return group >= k ? kStateGroup : std::gcd(kStateGroup, group);
}

// Whether all groups of states have kGroupOctets.
constexpr int kGroupOctets = kStateGroup / 8;
inline bool has_whole_groups(int64_t k, int64_t group) {
  return k % kStateGroup == 0 && int4_state_group(k, group) == kStateGroup;
}

inline int64_t int4_head_bytes(int64_t groups, bool is_short) {
  return kPanel * (is_short ? 2 * groups + (groups + 3) / 4 * 2 : 4 * groups);
}

inline int64_t int4_panel_bytes(int64_t k, int64_t group, bool is_short) {
  return int4_head_bytes(num_groups(k, group), is_short) + (k + 7) / 8 * 4 * kPanel;
}

inline int64_t int4_tail_bytes(int64_t k, int64_t group) {
  return num_groups(k, int4_state_group(k, group)) * int64_t(sizeof(StateGroup));
}

inline int64_t int4_row_bytes(int64_t k, int64_t group) {
  return round_up(round_up(k, 8) + int4_tail_bytes(k, group), kRowAlign);
}

// columns: which feature each column takes, or null for their own order.
template <class T>
void prepare_int4(const T* in, const int64_t* columns, int64_t k, int64_t group, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int4_row_bytes(k, group) - int4_tail_bytes(k, group);
  quantize_row(in, columns, k, int4_state_group(k, group), kInt4Factor, values, tail);
  for (int64_t i = k; i < round_up(k, 8); i++) values[i] = 0;
}

inline IntVec widen(const uint8_t* source) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)source));
#else
  IntVec out;
  for (int i = 0; i < kLanes; i++) out[i] = source[i];
  return out;
#endif
}

// What the 32 columns of a group have in common.
struct Int4Heads {
  alignas(64) float scales[kPanel];
  alignas(64) int32_t zeros[kPanel];

  void read(const char* panel, int64_t groups, int64_t group, bool is_short) {
    if (!is_short) {
      for (int v = 0; v < kVecs; v++) {
        const IntVec head = load_int(panel + (group * kVecs + v) * sizeof(IntVec));
        store(scales + v * kLanes, (Vec)(head & ~255));
        store_int(zeros + v * kLanes, head & 255);
      }
      return;
    }
    const char* pairs = panel + 2 * kPanel * groups + group / 2 * kPanel;
    for (int i = 0; i < kPanel; i += kLanes) {
      const auto* bits = reinterpret_cast<const BFloat16*>(panel) + group * kPanel + i;
      store(scales + i, load_wide(bits));
      const IntVec pair = widen(reinterpret_cast<const uint8_t*>(pairs) + i);
      store_int(zeros + i, pair >> (group % 2 * 4) & 15);
    }
  }
};

// A group of kOctets, or of `num_octets` where that is 0.
template <int kRows, int kOctets>
__attribute__((always_inline)) inline void int4_group(const char* a, int64_t a_stride,
                                                      const char* words, int64_t num_octets,
                                                      IntVec (&sums)[kRows][kVecs]) {
#pragma GCC unroll 8
  for (int64_t octet = 0; octet < (kOctets ? kOctets : num_octets); octet++) {
    const char* source = words + octet * 4 * kPanel;
    IntVec low[kVecs], high[kVecs];
    for (int v = 0; v < kVecs; v++) low[v] = load_int(source + v * sizeof(IntVec)) & 0x0f0f0f0f;
    add_quad<kRows>(a, a_stride, 2 * octet, low, sums);
    for (int v = 0; v < kVecs; v++) high[v] = (load_int(source + v * sizeof(IntVec)) >> 4) & 0x0f0f0f0f;
    add_quad<kRows>(a, a_stride, 2 * octet + 1, high, sums);
  }
}

// kOctets: what all groups of states have, or 0 where they differ.
template <int kRows, int kOctets>
__attribute__((noinline)) void int4_rows(const char* a, int64_t a_stride, const char* panel,
                                         int64_t k, int64_t group, bool is_short, float* out,
                                         const Ahead& ahead) {
  const int64_t groups = num_groups(k, group), width = int4_state_group(k, group);
  const char* words = panel + int4_head_bytes(groups, is_short);
  const char* states = a + a_stride - int4_tail_bytes(k, group);
  Int4Heads heads;
  Vec totals[kRows][kVecs] = {};
  int64_t next_head = 0, g = 0, step = 0;
  for (int64_t first = 0; first < k; first += width, states += sizeof(StateGroup)) {
    if (first == next_head) {
      heads.read(panel, groups, g++, is_short);
      next_head += group;
    }
    IntVec sums[kRows][kVecs];
    begin_group<kRows>(states, a_stride, heads.zeros, sums);
    const char* source = words + first / 8 * 4 * kPanel;
    const int64_t num_octets = (std::min(width, k - first) + 7) / 8;
    ahead.fetch_lines(step++);
    int4_group<kRows, kOctets>(a + first, a_stride, source, num_octets, sums);
    end_group<kRows>(states, a_stride, heads.scales, sums, totals);
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * kPanel + v * kLanes, totals[row][v]);
}

// A panel for many tiles, much like one of 8 bits: bytes [k / 4][32][4] of which 128 is zero, and
// the scales of its groups.
struct Int4Unpacked {
  static constexpr int64_t kMostBytes = 256 * 1024;  // of values; for a thread's stack
  static constexpr int64_t kMostGroups = 256;
  static constexpr int64_t kLeastTiles = 12;  // fewer would not pay for it

  alignas(64) char values[kMostBytes];
  alignas(64) float scales[kMostGroups][kPanel];

  static bool suits(int64_t num_tiles, int64_t k, int64_t group) {
    return num_tiles >= kLeastTiles && round_up(k, 8) * kPanel <= kMostBytes &&
           num_groups(k, group) <= kMostGroups;
  }

  // False where a zero point is larger than 128, which no 4 bits call for.
  bool read(const char* panel, int64_t k, int64_t group, bool is_short) {
    const int64_t groups = num_groups(k, group);
    const char* words = panel + int4_head_bytes(groups, is_short);
    Int4Heads heads;
    for (int64_t g = 0; g < groups; g++) {
      heads.read(panel, groups, g, is_short);
      std::memcpy(scales[g], heads.scales, sizeof heads.scales);
      if (!is_short && *std::max_element(heads.zeros, heads.zeros + kPanel) > 128) return false;
      const int64_t end = (std::min(k, (g + 1) * group) + 7) / 8;
      for (int64_t octet = g * group / 8; octet < end; octet++) {
        int32_t* out = reinterpret_cast<int32_t*>(values + octet * 8 * kPanel);
        for (int i = 0; i < kPanel; i += kLanes) {
          const IntVec word = load_int(words + (octet * kPanel + i) * sizeof(int32_t));
          // 128 less the zero point in each byte: no sum leaves its byte.
          const IntVec shift = int32_t(0x80808080u) - load_int(heads.zeros + i) * 0x01010101;
          store_int(out + i, (word & 0x0f0f0f0f) + shift);
          store_int(out + kPanel + i, ((word >> 4) & 0x0f0f0f0f) + shift);
        }
      }
    }
    return true;
  }
};

// As int4_rows, to the bit: the whole sums are the same.
template <int kRows, int kOctets>
__attribute__((noinline)) void unpacked_rows(const char* a, int64_t a_stride,
                                             const Int4Unpacked& panel, int64_t k, int64_t group,
                                             float* out, const Ahead& ahead) {
  const int64_t width = int4_state_group(k, group);
  const char* states = a + a_stride - int4_tail_bytes(k, group);
  const float(*scales)[kPanel] = panel.scales;
  Vec totals[kRows][kVecs] = {};
  int64_t next_head = group, step = 0;
  for (int64_t first = 0; first < k; first += width, states += sizeof(StateGroup)) {
    if (first == next_head) {
      scales++;
      next_head += group;
    }
    IntVec sums[kRows][kVecs];
    begin_group<kRows, 128>(states, a_stride, nullptr, sums);
    const char* source = panel.values + first * kPanel;
    const int64_t num_quads = (std::min(width, k - first) + 3) / 4;
    ahead.fetch_lines(step++);
    int8_group<kRows, 2 * kOctets>(a + first, a_stride, source, num_quads, sums);
    end_group<kRows>(states, a_stride, *scales, sums, totals);
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * kPanel + v * kLanes, totals[row][v]);
}

}  // namespace shoal
