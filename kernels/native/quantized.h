// Products with weights of 8 and 4 bits, tile by tile as in tile.h.
//
// A row of states is prepared once for all panels: for int8 it is quantised, for int4 put into the
// order of the weight's columns and summed by group. Each sum has one order whatever the batch.
#pragma once

#include "tile.h"

namespace shoal {

enum class Format : int32_t { kDense = 0, kInt8 = 1, kInt4 = 2, kFp8 = 3 };

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// --- int8: unsigned weights (128 is zero) times signed states -----------------------------------
//
// A panel: [k / 4][32][4] bytes, k padded with zero, then 32 float scales.
// A prepared row: the states, k padded to 4, then at the end of the row, for each group of 64: a
// float scale, and int32 128 times the sum of the states, which the offset of the weights adds.

constexpr int64_t kRowAlign = 64;
constexpr int64_t kStateGroup = 64;

struct GroupTail {
  float scale;
  int32_t offset;
};

inline int64_t state_groups(int64_t k) { return (k + kStateGroup - 1) / kStateGroup; }
inline int64_t int8_panel_bytes(int64_t k) { return round_up(k, 4) * kPanel + 4 * kPanel; }
inline int64_t int8_tail_bytes(int64_t k) { return state_groups(k) * int64_t(sizeof(GroupTail)); }
inline int64_t int8_row_bytes(int64_t k) {
  return round_up(round_up(k, 4) + int8_tail_bytes(k), kRowAlign);
}

// A group by its own largest magnitude, as quantize_tokens in quantized_weights.py. One that is
// not finite gets scale NaN.
template <class T>
GroupTail prepare_group(const T* in, int64_t count, int8_t* out) {
  float highest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; i++) {
    const float value = std::fabs(to_float(in[i]));
    finite &= value <= 3.402823466e38f;
    highest = value > highest ? value : highest;
  }
  const float inverse = highest > 0 && finite ? 127.0f / highest : 0.0f;
  int32_t sum = 0;
  for (int64_t i = 0; i < count; i++) {
    const float scaled = finite ? to_float(in[i]) * inverse : 0.0f;
    // Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even.
    const float whole = (scaled + 12582912.0f) - 12582912.0f;
    const int32_t step = int32_t(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
    out[i] = int8_t(step);
    sum += step;
  }
  return {finite ? highest / 127.0f : std::nanf(""), 128 * sum};
}

template <class T>
void prepare_int8(const T* in, int64_t k, char* out) {
  int8_t* values = reinterpret_cast<int8_t*>(out);
  char* tail = out + int8_row_bytes(k) - int8_tail_bytes(k);
  for (int64_t first = 0; first < k; first += kStateGroup, tail += sizeof(GroupTail)) {
    const GroupTail group =
        prepare_group(in + first, std::min(kStateGroup, k - first), values + first);
    std::memcpy(tail, &group, sizeof group);
  }
  for (int64_t i = k; i < round_up(k, 4); i++) values[i] = 0;
}

// acc + the products of four neighbouring k in each lane: unsigned weights, signed states.
inline IntVec quad_multiply_add(IntVec weights, IntVec states, IntVec acc) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, (__m512i)states);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  // Even and odd bytes as 16 bits: no sum of two products leaves 32 bits.
  const __m256i w = (__m256i)weights, s = (__m256i)states;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(s, 8));
  return (IntVec)_mm256_add_epi32((__m256i)acc, _mm256_add_epi32(even, odd));
#else
  for (int shift = 0; shift < 32; shift += 8)
    acc += ((weights >> shift) & 255) * ((states << (24 - shift)) >> 24);
  return acc;
#endif
}

template <int kRows>
inline void int8_rows(const char* a, int64_t a_stride, const char* panel, int64_t k, float* out) {
  constexpr int64_t group_quads = kStateGroup / 4;
  Vec totals[kRows][kVecs] = {};
  const int64_t num_quads = (k + 3) / 4, tail_bytes = int8_tail_bytes(k);
  for (int64_t first = 0; first < num_quads; first += group_quads) {
    IntVec sums[kRows][kVecs] = {};
    for (int64_t quad = first; quad < std::min(first + group_quads, num_quads); quad++) {
      const char* source = panel + quad * 4 * kPanel;
      IntVec weights[kVecs];
      std::memcpy(weights, source, sizeof weights);
      __builtin_prefetch(source + kPrefetchBytes);
      __builtin_prefetch(source + kPrefetchBytes + 64);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; row++) {
        int32_t four;
        std::memcpy(&four, a + row * a_stride + 4 * quad, sizeof four);
        const IntVec states = four - IntVec{};
        for (int v = 0; v < kVecs; v++)
          sums[row][v] = quad_multiply_add(weights[v], states, sums[row][v]);
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      GroupTail tail;
      const int64_t group = first / group_quads;
      std::memcpy(&tail, a + (row + 1) * a_stride - tail_bytes + group * sizeof tail, sizeof tail);
      for (int v = 0; v < kVecs; v++) {
        const Vec sum = __builtin_convertvector(sums[row][v] - tail.offset, Vec);
        totals[row][v] = multiply_add(sum, splat(tail.scale), totals[row][v]);
      }
    }
  }
  const float* scales = reinterpret_cast<const float*>(panel + num_quads * 4 * kPanel);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++)
      store(out + row * kPanel + v * kLanes, totals[row][v] * load(scales + v * kLanes));
}

// --- int4: values 0 to 15 in groups along k, times states as they are ----------------------------
//
// A panel: [groups][32] words, then [k / 8][32] words of eight values, k padded.
// A group's word: the bits of its float scale, the lowest eight replaced by its zero point.
// A word of values: k = 2 j + h lies in bits 16 h + 4 j.
// A prepared row: the states in the order of the columns, k padded to 8 with zeros, then at the end
// of the row each group's sum of states.

inline int64_t num_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }
inline int64_t int4_panel_bytes(int64_t k, int64_t group) {
  return 4 * kPanel * (num_groups(k, group) + (k + 7) / 8);
}
template <class T>
int64_t int4_row_bytes(int64_t k, int64_t group) {
  return round_up(round_up(k, 8) * sizeof(T) + 4 * num_groups(k, group), kRowAlign);
}

// columns: which feature each column takes, or null for their own order.
template <class T>
void prepare_int4(const T* in, const int64_t* columns, int64_t k, int64_t group, char* out) {
  T* values = reinterpret_cast<T*>(out);
  for (int64_t i = 0; i < k; i++) values[i] = in[columns ? columns[i] : i];
  for (int64_t i = k; i < round_up(k, 8); i++) values[i] = T{};
  float* sums = reinterpret_cast<float*>(out + int4_row_bytes<T>(k, group)) - num_groups(k, group);
  for (int64_t first = 0; first < k; first += group) {
    float lanes[8] = {};
    const int64_t end = std::min(k, first + group);
    for (int64_t i = first; i < end; i++) lanes[i % 8] += to_float(values[i]);
    for (int width = 4; width; width /= 2)
      for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    sums[first / group] = lanes[0];
  }
}

#if defined(__AVX512BF16__)
// value - 8 in bfloat16, by the low five bits of each 16: the fifth may be anything.
inline __m512i int4_table() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; i++) {
    BFloat16 value;
    assign(value, float(i % 16 - 8));
    table[i] = value.bits;
  }
  return _mm512_load_si512(table);
}
#endif

struct Int4Table {
#if defined(__AVX512BF16__)
  __m512i table = int4_table();
#endif
};

// sums += the states of eight k times the words' values less 8
template <int kRows, class T>
inline void int4_octet_wide(const T* a, int64_t a_stride, const IntVec* words,
                            Vec (*sums)[kVecs]) {
  for (int j = 0; j < 4; j++)
    for (int half = 0; half < 2; half++) {
      Vec weights[kVecs];
      for (int v = 0; v < kVecs; v++)
        weights[v] = __builtin_convertvector(((words[v] >> (16 * half + 4 * j)) & 15) - 8, Vec);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; row++) {
        const T* states = reinterpret_cast<const T*>(reinterpret_cast<const char*>(a) + row * a_stride);
        const Vec state = splat(to_float(states[2 * j + half]));
        for (int v = 0; v < kVecs; v++)
          sums[row][v] = multiply_add(state, weights[v], sums[row][v]);
      }
    }
}

template <int kRows>
inline void int4_octet(const Int4Table& lookup, const BFloat16* a, int64_t a_stride,
                       const IntVec* words, Vec (*sums)[kVecs]) {
#if defined(__AVX512BF16__)
  for (int j = 0; j < 4; j++) {
    IntVec weights[kVecs];
    for (int v = 0; v < kVecs; v++) {
      const __m512i index = _mm512_srli_epi16((__m512i)words[v], 4 * j);
      weights[v] = (IntVec)_mm512_permutexvar_epi16(index, lookup.table);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; row++) {
      int32_t both;
      std::memcpy(&both, reinterpret_cast<const char*>(a) + row * a_stride + 4 * j, sizeof both);
      const IntVec states = both - IntVec{};
      for (int v = 0; v < kVecs; v++)
        sums[row][v] = pair_multiply_add(states, weights[v], sums[row][v]);
    }
  }
#else
  int4_octet_wide<kRows>(a, a_stride, words, sums);
#endif
}

template <int kRows>
inline void int4_octet(const Int4Table&, const float* a, int64_t a_stride, const IntVec* words,
                       Vec (*sums)[kVecs]) {
  int4_octet_wide<kRows>(a, a_stride, words, sums);
}

template <class T, int kRows>
inline void int4_rows(const char* a, int64_t a_stride, const char* panel, int64_t k, int64_t group,
                      float* out) {
  const int64_t groups = num_groups(k, group);
  const int32_t* heads = reinterpret_cast<const int32_t*>(panel);
  const int32_t* values = heads + groups * kPanel;
  const Int4Table lookup;
  Vec totals[kRows][kVecs] = {};
  for (int64_t g = 0; g < groups; g++) {
    Vec sums[kRows][kVecs] = {};
    const int64_t first = g * group, end = std::min(k, first + group);
    for (int64_t i = first; i < end; i += 8) {
      const int32_t* source = values + i / 8 * kPanel;
      IntVec words[kVecs];
      std::memcpy(words, source, sizeof words);
      __builtin_prefetch(source + kPrefetchBytes / 4);
      __builtin_prefetch(source + kPrefetchBytes / 4 + 16);
      int4_octet<kRows>(lookup, reinterpret_cast<const T*>(a) + i, a_stride, words, sums);
    }
    for (int v = 0; v < kVecs; v++) {
      IntVec head;
      std::memcpy(&head, heads + g * kPanel + v * kLanes, sizeof head);
      const Vec scale = (Vec)(head & ~255);
      const Vec zero = __builtin_convertvector(8 - (head & 255), Vec);
      for (int row = 0; row < kRows; row++) {
        float sum;
        std::memcpy(&sum, a + row * a_stride + a_stride - 4 * (groups - g), sizeof sum);
        const Vec product = multiply_add(splat(sum), zero, sums[row][v]);
        totals[row][v] = multiply_add(product, scale, totals[row][v]);
      }
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) store(out + row * kPanel + v * kLanes, totals[row][v]);
}

// --- fp8 (e4m3): bytes that become the states' type as they are read -----------------------------
//
// A panel: [k / 2][32][2] bytes, an odd k padded with zero, then 32 float scales.

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
inline void fp8_rows(const char* a, int64_t a_stride, const char* panel, int64_t k, float* out) {
  Vec sums[kRows][kVecs] = {};
  for (int64_t i = 0; i < k; i += 2) {
    IntVec weights[kVecs];
    const char* source = panel + i * kPanel;
    __builtin_prefetch(source + kPrefetchBytes);
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

// --- any format ----------------------------------------------------------------------------------

template <class T>
int64_t panel_bytes(Format format, int64_t k, int64_t group) {
  switch (format) {
    case Format::kInt8: return int8_panel_bytes(k);
    case Format::kInt4: return int4_panel_bytes(k, group);
    case Format::kFp8: return fp8_panel_bytes(k);
    default: return panel_elements<T>(k) * sizeof(T);
  }
}

// Bytes of a row as the product reads it.
template <class T>
int64_t row_bytes(Format format, int64_t k, int64_t group) {
  switch (format) {
    case Format::kInt8: return int8_row_bytes(k);
    case Format::kInt4: return int4_row_bytes<T>(k, group);
    default: return k * sizeof(T);
  }
}

template <class T>
void prepare_row(Format format, const T* in, const int64_t* columns, int64_t k, int64_t group,
                 char* out) {
  if (format == Format::kInt8)
    prepare_int8(in, k, out);
  else
    prepare_int4(in, columns, k, group, out);
}

// Up to kTileRows rows times one panel: out [rows][32].
template <class T, int kRows = kTileRows>
inline void format_tile(Format format, int rows, const char* a, int64_t a_stride, const char* panel,
                        int64_t k, int64_t group, float* out, const Ahead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return format_tile<T, kRows - 1>(format, rows, a, a_stride, panel, k, group, out, ahead);
  }
  switch (format) {
    case Format::kInt8: return int8_rows<kRows>(a, a_stride, panel, k, out);
    case Format::kInt4: return int4_rows<T, kRows>(a, a_stride, panel, k, group, out);
    case Format::kFp8: return fp8_rows<T, kRows>(a, a_stride, panel, k, out);
    default:
      return tile_rows<kRows>(reinterpret_cast<const T*>(a), a_stride / int64_t(sizeof(T)),
                              reinterpret_cast<const T*>(panel), k, out, kPanel, false, ahead);
  }
}

// Column `column` of a panel, rounded to T: an embedding's row.
template <class T>
void read_column(Format format, const char* panel, int64_t column, int64_t k, int64_t group,
                 float* out) {
  constexpr int64_t side_by_side = 4 / sizeof(T);
  const int64_t groups = format == Format::kInt4 ? num_groups(k, group) : 0;
  const int32_t* heads = reinterpret_cast<const int32_t*>(panel) + column;
  const float* scales = reinterpret_cast<const float*>(
      panel + round_up(k, format == Format::kInt8 ? 4 : 2) * kPanel) + column;
  for (int64_t i = 0; i < k; i++) {
    float value;
    switch (format) {
      case Format::kInt8: {
        const auto byte = uint8_t(panel[(i / 4 * kPanel + column) * 4 + i % 4]);
        value = float(int(byte) - 128) * *scales;
        break;
      }
      case Format::kInt4: {
        const int32_t head = heads[i / group * kPanel], scale_bits = head & ~255;
        const uint32_t word = heads[(groups + i / 8) * kPanel];
        const int step = word >> (16 * (i % 2) + 4 * (i % 8 / 2)) & 15;
        float scale;
        std::memcpy(&scale, &scale_bits, sizeof scale);
        value = float(step - (head & 255)) * scale;
        break;
      }
      case Format::kFp8: {
        BFloat16 wide{fp8_to_bf16(uint8_t(panel[(i / 2 * kPanel + column) * 2 + i % 2]))};
        value = to_float(wide) * *scales;
        break;
      }
      default:
        out[i] = to_float(reinterpret_cast<const T*>(panel)[
            (i / side_by_side * kPanel + column) * side_by_side + i % side_by_side]);
        continue;
    }
    T rounded;
    assign(rounded, value);
    out[i] = to_float(rounded);
  }
}

}  // namespace shoal
