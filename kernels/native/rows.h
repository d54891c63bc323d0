// What happens to each row by itself: embedding, RMS norm, rotation and the write to the cache.
#pragma once

#include "linear.h"

namespace shoal {

// Row `token` of an embedding [vocab, width]; packed: it is also the output projection's weight.
template <class T>
void embed(const T* weight, bool packed, int64_t token, int64_t width, float* out) {
  if (!packed) {
    for (int64_t i = 0; i < width; i++) out[i] = to_float(weight[token * width + i]);
    return;
  }
  constexpr int64_t group = 4 / sizeof(T);
  const T* panel = weight + token / kPanel * panel_elements<T>(width);
  const int64_t column = token % kPanel;
  for (int64_t i = 0; i < width; i++)
    out[i] = to_float(panel[(i / group * kPanel + column) * group + i % group]);
}

template <class T>
void rms_norm(const float* in, const float* weight, float eps, int64_t width, T* out) {
  Vec sums{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec x = load(in + i);
    sums = multiply_add(x, x, sums);
  }
  float sum = sum_lanes(sums);
  for (; i < width; i++) sum += in[i] * in[i];
  const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
  for (i = 0; i < width; i++) assign(out[i], in[i] * scale * weight[i]);
}

// out: cosines [head_dim / 2], then sines. Each value depends on the position alone.
inline void rotary_angles(int64_t position, const float* inv_freq, int64_t head_dim, float* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float angle = float(position) * inv_freq[i];
    out[i] = std::cos(angle);
    out[half + i] = std::sin(angle);
  }
}

template <class T>
void rotate(const float* in, const float* angles, int64_t head_dim, T* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float cos = angles[i], sin = angles[half + i];
    assign(out[i], in[i] * cos - in[half + i] * sin);
    assign(out[half + i], in[half + i] * cos + in[i] * sin);
  }
}

struct HeadShape {
  int64_t num_heads, num_kv_heads, head_dim;

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
};

// One token's row of queries, keys and values: rotated queries go to `query`, the rest to its
// slot of the caches [num_slots, num_kv_heads, head_dim].
template <class T>
void rotate_and_write(const float* row, const float* angles, const HeadShape& heads, int64_t slot,
                      T* query, T* key_cache, T* value_cache) {
  const int64_t dim = heads.head_dim;
  for (int64_t head = 0; head < heads.num_heads; head++)
    rotate(row + head * dim, angles, dim, query + head * dim);
  const float* keys = row + heads.query_width();
  const float* values = keys + heads.key_width();
  const int64_t to = slot * heads.key_width();
  for (int64_t head = 0; head < heads.num_kv_heads; head++)
    rotate(keys + head * dim, angles, dim, key_cache + to + head * dim);
  for (int64_t i = 0; i < heads.key_width(); i++) assign(value_cache[to + i], values[i]);
}

}  // namespace shoal
