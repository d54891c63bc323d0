// The likeliest token of a row without all of its logits.
//
// A copy of the output projection in 8 bits gives a logit of each token and, by Cauchy-Schwarz, how
// far that can be from the true one: with x the states, w a token's weights and x', w' what the
// bytes stand for, w x - w' x' = (w - w') x + w' (x - x'). Only tokens whose bound reaches the best
// true logit found so far get theirs, by the same product as all logits are made of: the token is
// the one that they would give, to the bit. Bounds are kept by panel, which is what is read at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "linear.h"

namespace shoal {

// States that are far larger than their row's others would leave these few of the 255 steps that a
// byte has. So a row's scale goes by the others, and what a quad of large states has beyond 127 is
// multiplied once more with the same weights, as often as it takes: so often a row at most.
constexpr int kMostExtra = 6;
// Norms up to here: no logit or bound overflows.
constexpr double kLargestNorm = 1e15;

// What a row's bytes stand for, and what its norms say of its logits' errors.
struct RowBound {
  float scale;
  int32_t offset;  // what the sums begin with, as the weights are unsigned
  float whole;     // times the norm of w - w'; infinite: any logit is possible
  float lost;      // times the norm of w'
};

// Some rows as the product reads them, side by side: quads of states [..][rows][4].
struct ScreenTile {
  std::vector<int8_t> states;   // of all quads
  std::vector<int8_t> extra;    // of those that are multiplied once more
  std::vector<int32_t> quads;   // which ones these are
};

inline int64_t num_quads(int64_t k) { return (k + 3) / 4; }
// A panel: as int8.h has it, then the norms of w - w' and of w' of its 32 columns. Mirrored by
// shoal.kernels.screened_head.
inline int64_t screened_panel_bytes(int64_t k) { return int8_panel_bytes(k) + 2 * 4 * kPanel; }

// The smallest scale that makes no more extra quads than it should; highest: of each quad, the
// largest magnitude (reordered here).
inline float screen_scale(std::vector<float>& highest) {
  constexpr int kCount = kMostExtra + 1;  // a scale below all of so many makes too many
  constexpr float kStep = 0.84089642f;    // 2^(-1/4)
  const size_t count = std::min<size_t>(kCount, highest.size());
  std::partial_sort(highest.begin(), highest.begin() + count, highest.end(),
                    std::greater<float>());
  const auto num_extra = [&](float scale) {
    float sum = 0;
    for (size_t i = 0; i < count; i++)
      sum += std::max(0.0f, std::ceil(highest[i] / (127.0f * scale)) - 1.0f);
    return sum;
  };
  float scale = highest[0] / 127.0f;
  for (int i = 0; i < 64 && num_extra(scale * kStep) <= kMostExtra; i++) scale *= kStep;
  return scale;
}

// Row `number` of `num_rows` in a tile, whose states are there and zero.
template <class T>
RowBound prepare_screened(const T* in, int64_t k, int number, int num_rows, ScreenTile& tile) {
  constexpr float kTiny = 1e-30f;  // below it 127 / x might be infinite
  const RowBound anything{0.0f, 0, std::numeric_limits<float>::infinity(), 0.0f};
  double whole = 0.0;
  std::vector<float> highest(num_quads(k));
  for (int64_t i = 0; i < k; i++) {
    const float x = to_float(in[i]);
    whole += double(x) * x;
    highest[i / 4] = std::max(highest[i / 4], std::abs(x));
  }
  const double norm = std::sqrt(whole);
  if (!(norm < kLargestNorm)) return anything;
  const float scale = screen_scale(highest);
  const float inverse = scale > kTiny ? 1.0f / scale : 0.0f;
  double lost = 0.0;
  int32_t sum = 0;
  size_t next_extra = 0;
  for (int64_t quad = 0; quad < num_quads(k); quad++) {
    int32_t left[4] = {};
    for (int64_t j = 0; j < std::min<int64_t>(4, k - 4 * quad); j++) {
      const float x = to_float(in[4 * quad + j]);
      left[j] = int32_t(std::nearbyint(x * inverse));
      sum += left[j];
      const double rest = x - double(scale) * left[j];
      lost += rest * rest;
    }
    const auto take = [&](int8_t* to) {  // what a byte holds of them
      bool more = false;
      for (int j = 0; j < 4; j++) {
        const int32_t part = std::clamp(left[j], -127, 127);
        to[4 * number + j] = int8_t(part);
        left[j] -= part;
        more |= left[j] != 0;
      }
      return more;
    };
    const int64_t stride = 4 * num_rows;
    for (bool more = take(&tile.states[quad * stride]); more;) {
      // The tile's rows share what is multiplied once more; quads are in order.
      while (next_extra < tile.quads.size() && tile.quads[next_extra] < quad) next_extra++;
      if (next_extra == tile.quads.size() || tile.quads[next_extra] > quad) {
        tile.quads.insert(tile.quads.begin() + next_extra, int32_t(quad));
        tile.extra.insert(tile.extra.begin() + next_extra * stride, stride, int8_t(0));
      }
      more = take(&tile.extra[next_extra++ * stride]);
    }
  }
  // Sums of k products are rounded k times at most, relative to the norms; and as often once more
  // for the 8-bit product and the bound itself.
  const double slack = 1e-5 + double(k) * 0x1p-23;
  return {scale, -128 * sum, float(norm * (1 + slack)), float(std::sqrt(lost) + norm * slack)};
}

// A step's rows, ready to be screened.
struct ScreenedRows {
  std::vector<ScreenTile> tiles;
  std::vector<RowBound> bounds;

  void resize(int64_t num_rows) {
    tiles.resize(std::max<size_t>(tiles.size(), tiles_of(num_rows)));
    bounds.resize(std::max<size_t>(bounds.size(), num_rows));
  }
};

// in: rows [begin, begin + count) of a tile.
template <class T>
void prepare_tile(const T* in, int64_t k, int64_t begin, int count, ScreenTile& tile,
                  ScreenedRows& rows) {
  tile.states.assign(num_quads(k) * 4 * count, 0);
  tile.extra.clear();
  tile.quads.clear();
  for (int i = 0; i < count; i++)
    rows.bounds[begin + i] = prepare_screened(in + (begin + i) * k, k, i, count, tile);
}

template <int kRows>
__attribute__((always_inline)) inline void screen_quad(const int8_t* states, const char* weights_at,
                                                       IntVec (&sums)[kRows][kVecs]) {
  IntVec weights[kVecs];
  for (int v = 0; v < kVecs; v++) weights[v] = load_int(weights_at + v * sizeof(IntVec));
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    int32_t four;
    std::memcpy(&four, states + 4 * row, sizeof four);
    const IntVec both = four - IntVec{};
    for (int v = 0; v < kVecs; v++)
      sums[row][v] = quad_multiply_add(weights[v], both, sums[row][v]);
  }
}

// What a panel's logits are at most, of a tile's rows: to out [kRows], `stride` floats apart.
template <int kRows>
__attribute__((noinline)) void screen_rows(const ScreenTile& tile, const RowBound* rows,
                                           const char* panel, int64_t k, float* out,
                                           int64_t stride, const Ahead& ahead) {
  IntVec sums[kRows][kVecs];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++)
    for (int v = 0; v < kVecs; v++) sums[row][v] = rows[row].offset - IntVec{};
  const int8_t* states = tile.states.data();
  const int64_t count = num_quads(k);
  for (int64_t quad = 0; quad < count; quad++, states += 4 * kRows) {
    ahead.fetch(quad);
    screen_quad<kRows>(states, panel + quad * 4 * kPanel, sums);
  }
  for (int i = 0; i < 3; i++) ahead.fetch(count + i);
  states = tile.extra.data();
  for (const int32_t quad : tile.quads) {
    screen_quad<kRows>(states, panel + quad * 4 * kPanel, sums);
    states += 4 * kRows;
  }
  const float* scales = reinterpret_cast<const float*>(panel + count * 4 * kPanel);
  const float *errors = scales + kPanel, *norms = errors + kPanel;
#pragma GCC unroll 12
  for (int row = 0; row < kRows; row++) {
    Vec most = splat(-std::numeric_limits<float>::infinity());
    for (int v = 0; v < kPanel; v += kLanes) {
      const Vec near = __builtin_convertvector(sums[row][v / kLanes], Vec) *
                       (load(scales + v) * splat(rows[row].scale));
      const Vec bound = multiply_add(splat(rows[row].lost), load(norms + v), near);
      most = maximum(most, multiply_add(splat(rows[row].whole), load(errors + v), bound));
    }
    const bool known = rows[row].whole <= std::numeric_limits<float>::max();
    out[row * stride] = known ? max_lanes(most) : std::numeric_limits<float>::infinity();
  }
}

template <int kRows = kTileRows>
inline void screen_tile(int num_rows, const ScreenTile& tile, const RowBound* rows,
                        const char* panel, int64_t k, float* out, int64_t stride,
                        const Ahead& ahead) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows)
      return screen_tile<kRows - 1>(num_rows, tile, rows, panel, k, out, stride, ahead);
  }
  screen_rows<kRows>(tile, rows, panel, k, out, stride, ahead);
}

// What a row of bounds takes: no multiple of a page, or the rows would share a few sets of a cache.
inline int64_t bounds_stride(int64_t panels) { return panels + kLanes; }

// What logits are at most in each panel, to out [num_rows][bounds_stride]. op: the copy in 8 bits,
// in panels of screened_panel_bytes().
inline void screen(Team& team, int64_t operation, const Linear& op, const ScreenedRows& rows,
                   int64_t num_rows, float* out) {
  const int64_t panels = (op.n + kPanel - 1) / kPanel, bytes = screened_panel_bytes(op.k);
  const int64_t stride = bounds_stride(panels), num_tiles = tiles_of(num_rows);
  const char* weight = static_cast<const char*>(op.weight);
  team.share(operation, panels, 1, [&](int64_t panel, int64_t next) {
    const char* at = weight + panel * bytes;
    const char* soon = next < 0 ? nullptr : weight + next * bytes;
    int64_t tile = 0;
    for_tiles(num_rows, [&](int64_t begin, int count) {
      const Ahead some = Ahead::share(soon, bytes, tile, num_tiles, num_quads(op.k) + 3);
      screen_tile(count, rows.tiles[tile], &rows.bounds[begin], at, op.k,
                  out + begin * stride + panel, stride, some.begin ? some : Ahead::nothing(at));
      tile++;
    });
  });
}

// The highest value of a vector at most; what is no number counts as infinite, so that it is looked
// at.
inline Vec highest(Vec most, Vec value) {
  const Vec number = value == value ? value : splat(std::numeric_limits<float>::infinity());
  return maximum(number, most);
}

// The same where the weight is the projection itself, and its logits are its bounds.
template <class T>
void highest_logits(Team& team, int64_t operation, const Linear& op, const char* a,
                    int64_t num_rows, float* out) {
  const int64_t panels = num_panels<T>(op), bytes = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t a_stride = row_bytes<T>(op.format, op.k, op.group);
  const int most_rows = tile_rows(op.format);
  const int64_t num_tiles = tiles_of(num_rows, most_rows), stride = bounds_stride(panels);
  const char* weight = static_cast<const char*>(op.weight);
  team.share(operation, panels, 1, [&](int64_t panel, int64_t next) {
    const Soon soon = next < 0 ? Soon{} : Soon{weight + next * bytes, bytes};
    alignas(64) float sums[kTileRows * kPanel];
    int64_t tile = 0;
    for_tiles(num_rows, [&](int64_t begin, int count) {
      const Ahead ahead = ahead_of_tile(op.format, op.k, op.group, bytes, soon.begin,
                                        soon.num_bytes, tile++, num_tiles);
      format_tile<T>(op.format, count, a + begin * a_stride, a_stride, weight + panel * bytes, op.k,
                     op.group, sums, ahead);
      for (int i = 0; i < count; i++) {
        Vec most = splat(-std::numeric_limits<float>::infinity());
        for (int v = 0; v < kPanel; v += kLanes) most = highest(most, load(sums + i * kPanel + v));
        out[(begin + i) * stride + panel] = max_lanes(most);
      }
    }, most_rows);
  });
}

// The first of the likeliest tokens among those that were looked at.
struct Likeliest {
  float logit = -std::numeric_limits<float>::infinity();
  int64_t token = -1;
  bool has_nan = false;

  void add(float other, int64_t its_token) {
    has_nan |= other != other;
    if (other > logit || (other == logit && its_token < token)) {
      logit = other;
      token = its_token;
    }
  }

  void add(const Likeliest& other) {
    has_nan |= other.has_nan;
    if (other.token >= 0) add(other.logit, other.token);
  }

  bool may_be_in(float bound) const {
    constexpr float kTiny = 1e-30f;  // what products of numbers next to 0 may lose
    return bound + kTiny >= logit;
  }

  // Or -1 where the best logit is no finite number or any is none.
  int64_t result() const { return !has_nan && std::isfinite(logit) ? token : -1; }
};

// A row's search: the most promising panels at once by one thread, then what is left by all.
struct GreedyRow {
  Likeliest likeliest;
  std::vector<int32_t> left;  // panels
  std::mutex mutex;           // of the likeliest, once several threads look
};

constexpr int64_t kFirstPanels = 32;  // of a row, and of a task of what is left
constexpr int64_t kLeftPanels = 8;

inline int64_t num_left_tasks(const GreedyRow& row) {
  return (row.left.size() + kLeftPanels - 1) / kLeftPanels;
}

template <class T>
class GreedySearch {
 public:
  explicit GreedySearch(const Linear& op)
      : op_(op), panels_(num_panels<T>(op)), bytes_(panel_bytes<T>(op.format, op.k, op.group)),
        stride_(row_bytes<T>(op.format, op.k, op.group)) {}

  // states: a row as the product reads it. bounds [bounds_stride], by panel.
  void begin(const char* states, const float* bounds, GreedyRow& row) const {
    row.likeliest = {};
    row.left.clear();
    const int64_t first = highest_panel(bounds);
    look_at(states, first, nullptr, row.likeliest);
    each_candidate(bounds, row.likeliest, [&](int64_t panel) {
      if (panel != first) row.left.push_back(int32_t(panel));
    });
    const auto is_higher = [&](int32_t a, int32_t b) { return bounds[a] > bounds[b]; };
    const int64_t count = std::min<int64_t>(kFirstPanels, row.left.size());
    std::partial_sort(row.left.begin(), row.left.begin() + count, row.left.end(), is_higher);
    look_at_each(states, bounds, row.left.data(), count, row.likeliest);
    row.left.erase(row.left.begin(), row.left.begin() + count);
    row.left.erase(std::remove_if(row.left.begin(), row.left.end(),
                                  [&](int32_t panel) {
                                    return !row.likeliest.may_be_in(bounds[panel]);
                                  }),
                   row.left.end());
  }

  // Task `task` of num_left_tasks().
  void go_on(const char* states, const float* bounds, int64_t task, GreedyRow& row) const {
    Likeliest found;
    {
      const std::lock_guard<std::mutex> lock(row.mutex);
      found = row.likeliest;
    }
    const int64_t first = task * kLeftPanels;
    const int64_t count = std::min<int64_t>(kLeftPanels, row.left.size() - first);
    look_at_each(states, bounds, row.left.data() + first, count, found);
    const std::lock_guard<std::mutex> lock(row.mutex);
    row.likeliest.add(found);
  }

 private:
  int64_t highest_panel(const float* bounds) const {
    Vec most = splat(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= panels_; i += kLanes) most = maximum(most, load(bounds + i));
    float high = max_lanes(most);
    for (; i < panels_; i++) high = std::max(high, bounds[i]);
    return std::find(bounds, bounds + panels_, high) - bounds;
  }

  template <class Body>
  void each_candidate(const float* bounds, const Likeliest& likeliest, Body body) const {
    for (int64_t first = 0; first < panels_; first += kLanes) {
      const int64_t end = std::min<int64_t>(first + kLanes, panels_);
      if (end == first + kLanes && !likeliest.may_be_in(max_lanes(load(bounds + first)))) continue;
      for (int64_t panel = first; panel < end; panel++)
        if (likeliest.may_be_in(bounds[panel])) body(panel);
    }
  }

  void look_at_each(const char* states, const float* bounds, const int32_t* panels, int64_t count,
                    Likeliest& likeliest) const {
    for (int64_t i = 0; i < count; i++) {
      if (!likeliest.may_be_in(bounds[panels[i]])) continue;
      const char* soon = i + 1 < count ? weight() + panels[i + 1] * bytes_ : nullptr;
      look_at(states, panels[i], soon, likeliest);
    }
  }

  void look_at(const char* states, int64_t panel, const char* soon, Likeliest& likeliest) const {
    alignas(64) float logits[kPanel];
    format_tile<T>(op_.format, 1, states, stride_, weight() + panel * bytes_, op_.k, op_.group,
                   logits,
                   ahead_of_tile(op_.format, op_.k, op_.group, bytes_, soon, bytes_, 0, 1));
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, op_.n - panel * kPanel); i++)
      likeliest.add(logits[i], panel * kPanel + i);
  }

  const char* weight() const { return static_cast<const char*>(op_.weight); }

  const Linear op_;
  const int64_t panels_, bytes_, stride_;
};

}  // namespace shoal
