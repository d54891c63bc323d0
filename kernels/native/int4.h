// Products with weights of 4 bits: values 0 to 15 in groups along k times states of 8 bits.
//
// A panel: its groups' heads, then [k / 8][32] words of eight values, k padded with zero.
// The heads: [groups][32] words, the bits of a float scale, the lowest eight replaced by the zero
// point. Or short ones: [groups][32] scales in bfloat16, then [groups / 4][2][32] bytes of two zero
// points, that of the even group low.
// A word of values: k = j lies in the low half of byte j, k = 4 + j in the high half.
// A prepared row: the states in the order of the columns, k padded to 8 with zeros, then at the end
// of the row a StateGroup for each of `int4_state_group`, and room for one; before them their tables.
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

// Whether all groups of states have kStateGroup.
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
  return tail_bytes(num_groups(k, int4_state_group(k, group)));
}

// A group's states also have a table of what their sums begin with, by the zero point below 16, where
// that can be looked up at once.
constexpr int64_t kTableBytes = kLanes == 16 ? 64 : 0;

inline int64_t int4_table_at(int64_t k) { return round_up(k, kRowAlign); }

inline int64_t int4_row_bytes(int64_t k, int64_t group) {
  const int64_t tables = num_groups(k, int4_state_group(k, group)) * kTableBytes;
  return round_up(int4_table_at(k) + tables + int4_tail_bytes(k, group), kRowAlign);
}

inline void write_table(const char* states, char* table) {
  if constexpr (kTableBytes > 0) {
    alignas(64) static constexpr int32_t kZeros[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                       8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < 16; i += kLanes)
      store_int(reinterpret_cast<int32_t*>(table) + i,
                base_bits(states) + splat_offset(states) * load_int(kZeros + i));
  }
}

// columns: which feature each column takes, or null for their own order.
template <class T>
void prepare_int4(const T* in, const int64_t* columns, int64_t k, int64_t group, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int4_row_bytes(k, group) - int4_tail_bytes(k, group);
  quantize_row(in, columns, k, int4_state_group(k, group), kInt4Factor, values, tail);
  for (int64_t i = k; i < round_up(k, 8); i++) values[i] = 0;
  for (int64_t i = 0; i < num_groups(k, int4_state_group(k, group)); i++)
    write_table(tail + i * sizeof(StateGroup), out + int4_table_at(k) + i * kTableBytes);
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
    read_scales(panel, groups, group, is_short);
    read_zeros(panel, groups, group, is_short);
  }

  void read_scales(const char* panel, int64_t, int64_t group, bool is_short) {
    const auto* bits = reinterpret_cast<const BFloat16*>(panel) + group * kPanel;
    for (int i = 0; i < kPanel; i += kLanes)
      store(scales + i, is_short ? load_wide(bits + i) : (Vec)(long_head(panel, group, i) & ~255));
  }

  void read_zeros(const char* panel, int64_t groups, int64_t group, bool is_short) {
    const char* pairs = panel + 2 * kPanel * groups + group / 2 * kPanel;
    for (int i = 0; i < kPanel; i += kLanes)
      store_int(zeros + i,
                is_short
                    ? widen(reinterpret_cast<const uint8_t*>(pairs) + i) >> (group % 2 * 4) & 15
                    : long_head(panel, group, i) & 255);
  }

  static IntVec long_head(const char* panel, int64_t group, int64_t column) {
    return load_int(panel + (group * kPanel + column) * sizeof(int32_t));
  }
};

// The words of an octet as quads.
__attribute__((always_inline)) inline void read_octet(const char* words, IntVec (&low)[kVecs],
                                                      IntVec (&high)[kVecs]) {
  for (int v = 0; v < kVecs; v++) {
    const IntVec word = load_int(words + v * sizeof(IntVec));
    low[v] = word & 0x0f0f0f0f;
    high[v] = (word >> 4) & 0x0f0f0f0f;
  }
}

// As int8_group, of kOctets or of `num_octets`.
template <int kRows, int kOctets, class End>
__attribute__((always_inline)) inline void int4_group(const char* a, const RowsAt<kRows>& rows,
                                                      const char* words, int64_t num_octets,
                                                      IntVec (&sums)[kRows][kVecs],
                                                      const End& end) {
  const auto add = [&](int64_t octet, const auto& then) __attribute__((always_inline)) {
    IntVec low[kVecs], high[kVecs];
    read_octet(words + octet * 4 * kPanel, low, high);
    add_quad<kRows>(a, rows, 2 * octet, low, sums);
    add_quad<kRows>(a, rows, 2 * octet + 1, high, sums, then);
  };
  if constexpr (kOctets > 0) {
#pragma GCC unroll 8
    for (int64_t octet = 0; octet < kOctets - 1; octet++) add(octet, NothingElse{});
    add(kOctets - 1, end);
  } else {
    for (int64_t octet = 0; octet < num_octets - 1; octet++) add(octet, NothingElse{});
    add(num_octets - 1, end);
  }
}

// A row's sums begin with its offset times the columns' zero points: looked up, if kShort, rather than
// multiplied, which would hold up the products.
template <bool kShort>
__attribute__((always_inline)) inline void int4_begin(const char* states, const char* table,
                                                      const int32_t* zeros,
                                                      IntVec (&sums)[kVecs]) {
#if defined(__AVX512F__)
  if constexpr (kShort) {
    const int32_t* at = read_anew(zeros);
    for (int v = 0; v < kVecs; v++)
      sums[v] = (IntVec)_mm512_permutexvar_epi32((__m512i)load_int(at + v * kLanes),
                                                 (__m512i)load_int(table));
    return;
  }
#endif
  const IntVec base = base_bits(states), offset = splat_offset(states);
  for (int v = 0; v < kVecs; v++) sums[v] = base + offset * load_int(zeros + v * kLanes);
}

__attribute__((always_inline)) inline void int4_end(const char* states, const float* scales,
                                                    const IntVec (&sums)[kVecs],
                                                    Vec (&totals)[kVecs]) {
  const float* at = read_anew(scales);
  for (int v = 0; v < kVecs; v++)
    totals[v] = multiply_add(scaled(states, sums[v]), load(at + v * kLanes), totals[v]);
}

// kWhole: has_whole_groups.
template <int kRows, bool kShort, bool kWhole>
__attribute__((noinline)) void int4_rows(const char* a, int64_t a_stride, const char* panel,
                                         int64_t k, int64_t group, float* out,
                                         const Ahead& ahead) {
  const int64_t groups = num_groups(k, group);
  const int64_t width = kWhole ? kStateGroup : int4_state_group(k, group);
  const char* words = panel + int4_head_bytes(groups, kShort);
  const char* states = a + a_stride - int4_tail_bytes(k, group);
  const char* tables = a + int4_table_at(k);
  Int4Heads heads;
  heads.read(panel, groups, 0, kShort);
  const RowsAt<kRows> rows(a_stride);
  Vec totals[kRows][kVecs] = {};
  IntVec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    int4_begin<kShort>(states + rows.at[row], tables + rows.at[row], heads.zeros, sums[row]);
  int64_t next_head = group, g = 0;
  for (int64_t first = 0, step = 0; first < k; first += width, step++) {
    const int64_t num_octets = (std::min(width, k - first) + 7) / 8;
    const bool is_other_head = first + width == next_head && next_head < k;
    ahead.fetch_lines(step);
    if (is_other_head) heads.read_zeros(panel, groups, ++g, kShort);
    const auto end = [&](int row) __attribute__((always_inline)) {
      const char* of_row = states + rows.at[row];
      int4_end(of_row, heads.scales, sums[row], totals[row]);
      int4_begin<kShort>(of_row + sizeof(StateGroup), tables + kTableBytes + rows.at[row],
                         heads.zeros, sums[row]);
    };
    int4_group<kRows, kWhole ? kStateGroup / 8 : 0>(a, rows, words, num_octets, sums, end);
    if (is_other_head) {
      heads.read_scales(panel, groups, g, kShort);
      next_head += group;
    }
    states += sizeof(StateGroup);
    tables += kTableBytes;
    a += width;
    words += width / 8 * 4 * kPanel;
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
template <int kRows, bool kWhole>
__attribute__((noinline)) void unpacked_rows(const char* a, int64_t a_stride,
                                             const Int4Unpacked& panel, int64_t k, int64_t group,
                                             float* out, const Ahead& ahead) {
  const int64_t width = kWhole ? kStateGroup : int4_state_group(k, group);
  const char* states = a + a_stride - int4_tail_bytes(k, group);
  const float(*scales)[kPanel] = panel.scales;
  const RowsAt<kRows> rows(a_stride);
  Vec totals[kRows][kVecs] = {};
  IntVec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) begin_group<128>(states + rows.at[row], sums[row]);
  const char* values = panel.values;
  int64_t next_head = group;
  for (int64_t first = 0, step = 0; first < k; first += width, step++) {
    const int64_t num_quads = (std::min(width, k - first) + 3) / 4;
    ahead.fetch_lines(step);
    const auto end = [&](int row) __attribute__((always_inline)) {
      const char* of_row = states + rows.at[row];
      int4_end(of_row, *scales, sums[row], totals[row]);
      begin_group<128>(of_row + sizeof(StateGroup), sums[row]);
    };
    int8_group<kRows, kWhole ? kStateGroup / 4 : 0>(a, rows, values, num_quads, sums, end);
    states += sizeof(StateGroup);
    a += width;
    values += width * kPanel;
    if (first + width == next_head) {
      scales++;
      next_head += group;
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * kPanel + v * kLanes, totals[row][v]);
}

}  // namespace shoal
