// Softmax of scores that come a span at a time: weights against the highest score so far.
#pragma once

#include <limits>

#include "attention_work.h"
#include "block_mass.h"

namespace shoal {

// Scores to weights for one row, kept by keep(i, kLanes of them from i on); rescales what the row
// has gathered when its maximum rises. Of the `kSpan` scores those from `first` to `end` (1 or
// more) count.
template <class Keep>
inline void weigh(const float* scores, int64_t first, int64_t end, const AttentionShape& shape,
                  const float* key_scales, float& row_max, float* totals, float* sums,
                  int64_t width, Keep keep) {
  constexpr int kParts = kSpan / kLanes;
  Vec parts[kParts];
  for (int i = 0; i < kParts; i++) {
    parts[i] = load(scores + i * kLanes) * splat(shape.scale);
    if (key_scales) parts[i] *= load(key_scales + i * kLanes);
  }
  if (shape.softcap)
    for (int i = 0; i < kParts; i++) parts[i] = cap(parts[i], shape.softcap);
  const Vec lowest = splat(-std::numeric_limits<float>::infinity());
  if (first > 0 || end < kSpan) {
    IntVec lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    for (int i = 0; i < kParts; i++) {
      const int32_t before = first - i * kLanes, after = end - i * kLanes;
      parts[i] = lane < after ? parts[i] : lowest;
      parts[i] = lane < before ? lowest : parts[i];
    }
  }
  Vec high = lowest;
  for (int i = 0; i < kParts; i++) high = maximum(high, parts[i]);
  const float new_max = std::max(row_max, max_lanes(high));
  Vec total = load(totals);
  if (row_max == lowest[0]) {
    row_max = new_max;  // nothing is gathered yet
  } else if (new_max != row_max) {
    const Vec shrink = exponential(splat(row_max - new_max));
    for (int64_t i = 0; i < width; i += kLanes) store(sums + i, load(sums + i) * shrink);
    total *= shrink;
    row_max = new_max;
  }
  for (int i = 0; i < kParts; i++) {
    const Vec weight = exponential(parts[i] - splat(new_max));
    keep(i * kLanes, weight);
    total += weight;
  }
  store(totals, total);
}

// Adds a split's sums to those of the splits before it.
inline void merge(float& row_max, float& total, float* merged, float split_max, float split_total,
                  const float* sums, int64_t width) {
  const float new_max = std::max(row_max, split_max);
  const Vec before = exponential(splat(row_max - new_max));
  const Vec added = exponential(splat(split_max - new_max));
  for (int64_t i = 0; i < width; i += kLanes)
    store(merged + i, multiply_add(load(sums + i), added, load(merged + i) * before));
  total = total * before[0] + split_total * added[0];
  row_max = new_max;
}

}  // namespace shoal
