// Products with weights of any format, tile by tile as in tile.h, and rows in their form for it.
#pragma once

#include "fp8.h"
#include "int4.h"
#include "int8.h"

namespace shoal {

enum class Format : int32_t { kDense = 0, kInt8 = 1, kInt4 = 2, kFp8 = 3, kInt4Short = 4 };

inline bool is_int4(Format format) {
  return format == Format::kInt4 || format == Format::kInt4Short;
}

template <class T>
int64_t panel_bytes(Format format, int64_t k, int64_t group) {
  switch (format) {
    case Format::kInt8: return int8_panel_bytes(k);
    case Format::kInt4: return int4_panel_bytes(k, group, false);
    case Format::kInt4Short: return int4_panel_bytes(k, group, true);
    case Format::kFp8: return fp8_panel_bytes(k);
    default: return panel_elements<T>(k) * sizeof(T);
  }
}

// Bytes of a row as the product reads it.
template <class T>
int64_t row_bytes(Format format, int64_t k, int64_t group) {
  switch (format) {
    case Format::kInt8: return int8_row_bytes(k);
    case Format::kInt4:
    case Format::kInt4Short: return int4_row_bytes(k, group);
    default: return k * sizeof(T);
  }
}

inline bool has_prepared_rows(Format format) { return format == Format::kInt8 || is_int4(format); }

// How often a tile fetches ahead: with each group of states, or once for each 128 bytes of a panel
// or less, as no line may be left out.
inline int64_t fetch_steps(Format format, int64_t k, int64_t group, int64_t dense_steps) {
  switch (format) {
    case Format::kInt8: return state_groups(k);
    case Format::kInt4:
    case Format::kInt4Short: return num_groups(k, int4_state_group(k, group));
    case Format::kFp8: return (k + 3) / 4;
    default: return std::max<int64_t>(1, dense_steps);
  }
}

// The share of tile `tile` of `num_tiles` in what is read after a panel of such weights.
inline Ahead ahead_of_tile(Format format, int64_t k, int64_t group, int64_t panel_bytes,
                           const char* soon, int64_t num_bytes, int64_t tile, int64_t num_tiles) {
  const int64_t num_steps = fetch_steps(format, k, group, panel_bytes / 128);
  return has_prepared_rows(format)
             ? Ahead::share_lines(soon, num_bytes, tile, num_tiles, num_steps)
             : Ahead::share(soon, num_bytes, tile, num_tiles, num_steps);
}

template <class T>
void prepare_row(Format format, const T* in, const int64_t* columns, int64_t k, int64_t group,
                 char* out) {
  if (format == Format::kInt8)
    prepare_int8(in, k, out);
  else
    prepare_int4(in, columns, k, group, out);
}

// States of a prepared row that share a scale, at most.
inline int64_t state_group(Format format, int64_t k, int64_t group) {
  return is_int4(format) ? int4_state_group(k, group) : kInt8StateGroup;
}

// One whole group of neighbouring states of `num_rows` rows, as prepare_row does with all of a row.
template <class T>
void prepare_group(Format format, const T* in, int64_t in_width, int64_t k, int64_t group,
                   int64_t number, int64_t num_rows, char* out) {
  const bool is_4_bits = is_int4(format);
  const int64_t width = state_group(format, k, group), bytes = row_bytes<T>(format, k, group);
  const int64_t tail_bytes = is_4_bits ? int4_tail_bytes(k, group) : int8_tail_bytes(k);
  char* tail = out + bytes - tail_bytes + number * sizeof(StateGroup);
  const GroupsAt<T> at{in + number * width, in_width, reinterpret_cast<int8_t*>(out) + number * width,
                       bytes, tail, bytes};
  quantize_all(at, num_rows, width, is_4_bits ? kInt4Factor : kInt8Factor);
  for (int64_t i = 0; is_4_bits && i < num_rows; i++)
    write_table(tail + i * bytes, out + i * bytes + int4_table_at(k) + number * kTableBytes);
}

// Rows of a tile at most.
inline int tile_rows(Format format) {
  return has_prepared_rows(format) ? kStateRows : kTileRows;
}

// Up to tile_rows() rows times one panel: out [rows][32].
template <class T, int kRows = kTileRows>
inline void format_tile(Format format, int rows, const char* a, int64_t a_stride, const char* panel,
                        int64_t k, int64_t group, float* out, const Ahead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return format_tile<T, kRows - 1>(format, rows, a, a_stride, panel, k, group, out, ahead);
  }
  const Ahead some = ahead.begin ? ahead : Ahead::nothing(panel);
  if constexpr (kRows <= kStateRows) {
    if (format == Format::kInt8) return int8_rows<kRows>(a, a_stride, panel, k, out, some);
    if (is_int4(format)) {
      const auto rows_of = [&](auto is_short, auto is_whole) {
        int4_rows<kRows, is_short, is_whole>(a, a_stride, panel, k, group, out, some);
      };
      using Yes = std::true_type;
      using No = std::false_type;
      const bool is_whole = has_whole_groups(k, group);
      if (format == Format::kInt4Short) return is_whole ? rows_of(Yes{}, Yes{}) : rows_of(Yes{}, No{});
      return is_whole ? rows_of(No{}, Yes{}) : rows_of(No{}, No{});
    }
  }
  switch (format) {
    case Format::kFp8: return fp8_rows<T, kRows>(a, a_stride, panel, k, out, some);
    default:
      return tile_rows<kRows>(reinterpret_cast<const T*>(a), a_stride / int64_t(sizeof(T)),
                              reinterpret_cast<const T*>(panel), k, out, kPanel, false, ahead);
  }
}

template <int kRows = kStateRows>
inline void unpacked_tile(int rows, const char* a, int64_t a_stride, const Int4Unpacked& panel,
                          int64_t k, int64_t group, float* out, const Ahead& ahead) {
  if constexpr (kRows > 1) {
    if (rows < kRows)
      return unpacked_tile<kRows - 1>(rows, a, a_stride, panel, k, group, out, ahead);
  }
  const Ahead some = ahead.begin ? ahead : Ahead::nothing(panel.values);
  has_whole_groups(k, group)
      ? unpacked_rows<kRows, true>(a, a_stride, panel, k, group, out, some)
      : unpacked_rows<kRows, false>(a, a_stride, panel, k, group, out, some);
}

// Column `column` of a panel, rounded to T: an embedding's row.
template <class T>
void read_column(Format format, const char* panel, int64_t column, int64_t k, int64_t group,
                 float* out) {
  constexpr int64_t side_by_side = 4 / sizeof(T);
  const bool is_short = format == Format::kInt4Short;
  const int64_t groups = is_int4(format) ? num_groups(k, group) : 0;
  const char* words = panel + int4_head_bytes(groups, is_short) + 4 * column;
  Int4Heads heads;
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
      case Format::kInt4:
      case Format::kInt4Short: {
        if (i % group == 0) heads.read(panel, groups, i / group, is_short);
        const auto byte = uint8_t(words[i / 8 * 4 * kPanel + i % 4]);
        value = float((byte >> i % 8 / 4 * 4 & 15) - heads.zeros[column]) * heads.scales[column];
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
