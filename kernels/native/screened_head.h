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

#include "linear.h"

namespace shoal {

// Features are bounded in so many parts, each a run of groups: one that holds an outlier, whose
// neighbours 8 bits spoil, costs the others nothing. Mirrored by shoal.kernels.screened_head.
constexpr int kBoundParts = 3;

// What a row's norms say of its logits' errors, by part.
struct RowBound {
  float whole[kBoundParts];  // times the norm of w - w'
  float lost[kBoundParts];   // times the norm of w'
};

// A row as the 8-bit product reads it.
template <class T>
RowBound prepare_screened(const T* in, int64_t k, char* out) {
  prepare_int8(in, k, out);
  const int8_t* bytes = reinterpret_cast<const int8_t*>(out);
  const char* tail = out + int8_row_bytes(k) - int8_tail_bytes(k);
  // Sums of k products are rounded k times at most, relative to the norms; and as often once more
  // for the 8-bit product and the bound itself.
  const double slack = 1e-5 + double(k) * 0x1p-23;
  double whole[kBoundParts] = {}, lost[kBoundParts] = {};
  const int64_t groups = state_groups(k);
  for (int64_t group = 0; group < groups; group++, tail += sizeof(StateGroup)) {
    const int64_t part = group * kBoundParts / groups, first = group * kStateGroup;
    float scale;
    std::memcpy(&scale, tail, sizeof scale);
    for (int64_t i = first; i < std::min(first + kStateGroup, k); i++) {
      const double x = to_float(in[i]), left = x - double(scale) * bytes[i];
      whole[part] += x * x;
      lost[part] += left * left;
    }
  }
  RowBound bound;
  for (int part = 0; part < kBoundParts; part++) {
    const double norm = std::sqrt(whole[part]);
    bound.whole[part] = float(norm * (1 + slack));
    bound.lost[part] = float(std::sqrt(lost[part]) + norm * slack);
  }
  return bound;
}

// What a row of bounds takes: no multiple of a page, or the rows would share a few sets of a cache.
inline int64_t bounds_stride(int64_t panels) { return panels + kLanes; }

// The highest value of a vector at most; what is no number counts as infinite, so that it is looked
// at.
inline Vec highest(Vec most, Vec value) {
  const Vec number = value == value ? value : splat(std::numeric_limits<float>::infinity());
  return maximum(number, most);
}

// What a row's logits are at most, and what they are about, in each panel: to out
// [num_rows][2][bounds_stride]. bounds [2][kBoundParts][columns]: norms of w - w' and of w'; rows
// [num_rows]. Both null: the weight is the projection itself, and its logits are its bounds.
template <class T>
void screen(Team& team, int64_t operation, const Linear& op, const float* bounds, const char* a,
            const RowBound* rows, int64_t num_rows, float* out) {
  const int64_t panels = num_panels<T>(op), bytes = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t a_stride = row_bytes<T>(op.format, op.k, op.group);
  const int most_rows = tile_rows(op.format);
  const int64_t num_tiles = tiles_of(num_rows, most_rows);
  const int64_t columns = panels * kPanel, stride = bounds_stride(panels);
  const char* weight = static_cast<const char*>(op.weight);
  team.share(operation, panels, 1, [&](int64_t panel, int64_t next) {
    const Soon soon = next < 0 ? Soon{} : Soon{weight + next * bytes, bytes};
    const float* norms = bounds + panel * kPanel;  // of the first part
    alignas(64) float sums[kTileRows * kPanel];
    int64_t tile = 0;
    for_tiles(num_rows, [&](int64_t begin, int count) {
      const Ahead ahead = ahead_of_tile(op.format, op.k, op.group, bytes, soon.begin,
                                        soon.num_bytes, tile++, num_tiles);
      format_tile<T>(op.format, count, a + begin * a_stride, a_stride, weight + panel * bytes, op.k,
                     op.group, sums, ahead);
      for (int i = 0; i < count; i++) {
        const Vec lowest = splat(-std::numeric_limits<float>::infinity());
        Vec most = lowest, most_near = lowest;
        for (int v = 0; v < kPanel; v += kLanes) {
          const Vec near = load(sums + i * kPanel + v);
          Vec bound = near;
          for (int part = 0; bounds && part < kBoundParts; part++) {
            const float* errors = norms + part * columns + v;
            const float* spread = errors + kBoundParts * columns;
            bound = multiply_add(splat(rows[begin + i].whole[part]), load(errors), bound);
            bound = multiply_add(splat(rows[begin + i].lost[part]), load(spread), bound);
          }
          most = highest(most, bound);
          most_near = highest(most_near, near);
        }
        float* to = out + (begin + i) * 2 * stride + panel;
        to[0] = max_lanes(most);
        to[stride] = bounds ? max_lanes(most_near) : to[0];
      }
    }, most_rows);
  });
}

// The first of the likeliest, or -1 where the best logit is no finite number or any is none.
// states: a row as the product reads it. bounds [2][bounds_stride], by panel.
template <class T>
int64_t greedy_token(const Linear& op, const char* states, const float* bounds) {
  constexpr float kTiny = 1e-30f;  // what products of numbers next to 0 may lose
  const int64_t panels = num_panels<T>(op), bytes = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t stride = row_bytes<T>(op.format, op.k, op.group);
  const char* weight = static_cast<const char*>(op.weight);
  float best = -std::numeric_limits<float>::infinity();
  int64_t token = -1;
  bool has_nan = false;
  const auto look_at = [&](int64_t panel, int64_t next) {
    alignas(64) float logits[kPanel];
    const char* soon = next < 0 ? nullptr : weight + next * bytes;
    format_tile<T>(op.format, 1, states, stride, weight + panel * bytes, op.k, op.group, logits,
                   ahead_of_tile(op.format, op.k, op.group, bytes, soon, bytes, 0, 1));
    for (int64_t i = 0; i < std::min<int64_t>(kPanel, op.n - panel * kPanel); i++) {
      const int64_t column = panel * kPanel + i;
      has_nan |= logits[i] != logits[i];
      if (logits[i] > best || (logits[i] == best && column < token)) {
        best = logits[i];
        token = column;
      }
    }
  };
  const float* near = bounds + bounds_stride(panels);
  const int64_t first = std::max_element(near, near + panels) - near;
  const auto candidate = [&](int64_t panel) {  // that one or the next; -1: none
    for (; panel < panels; panel++)
      if (panel != first && bounds[panel] + kTiny >= best) return panel;
    return int64_t(-1);
  };
  look_at(first, -1);
  for (int64_t panel = candidate(0); panel >= 0;) {
    look_at(panel, candidate(panel + 1));
    panel = candidate(panel + 1);
  }
  return !has_nan && std::isfinite(best) ? token : -1;
}

}  // namespace shoal
