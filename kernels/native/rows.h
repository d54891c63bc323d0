// What happens to each row by itself: embedding, RMS norm, rotation and the write to the cache.
#pragma once

#include <vector>

#include "linear.h"
#include "stored.h"

namespace shoal {

// Row `token` of an embedding [vocab, width]; packed: it is also the output projection's weight.
template <class T>
void embed(const void* weight, bool packed, Format format, int64_t group, int64_t token,
           int64_t width, float* out) {
  if (!packed) {
    const T* row = static_cast<const T*>(weight) + token * width;
    for (int64_t i = 0; i < width; i++) out[i] = to_float(row[i]);
    return;
  }
  const char* panel = static_cast<const char*>(weight) +
                      token / kPanel * panel_bytes<T>(format, width, group);
  read_column<T>(format, panel, token % kPanel, width, group, out);
}

// What rows are multiplied with for an RMS norm. Each row's squares are added one after another, and
// those of up to kNormRows rows side by side: alone a row would wait for each addition.
constexpr int kNormRows = 4;

template <int kRows = kNormRows>
void norm_scales(const float* const* rows, int num_rows, float eps, int64_t width, float* scales) {
  if constexpr (kRows > 1)
    if (num_rows < kRows) return norm_scales<kRows - 1>(rows, num_rows, eps, width, scales);
  Vec sums[kRows] = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes)
#pragma GCC unroll 4
    for (int row = 0; row < kRows; row++) {
      const Vec x = load(rows[row] + i);
      sums[row] = multiply_add(x, x, sums[row]);
    }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row++) {
    float sum = sum_lanes(sums[row]);
    for (int64_t j = i; j < width; j++) sum += rows[row][j] * rows[row][j];
    scales[row] = 1.0f / std::sqrt(sum / float(width) + eps);
  }
}

// in * scale * weight, or without that where it is null.
template <class T>
void scale_row(const float* in, float scale, const float* weight, int64_t width, T* out) {
  const auto scaled = [&](int64_t i) {
    const Vec normed = load(in + i) * splat(scale);
    return weight ? normed * load(weight + i) : normed;
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes)
    store_rounded(scaled(i), scaled(i + kLanes), out + i);
  for (; i + kLanes <= width; i += kLanes) store_rounded(scaled(i), out + i);
  for (; i < width; i++) assign(out[i], weight ? in[i] * scale * weight[i] : in[i] * scale);
}

// Without a weight (null) the result is only normalised.
template <class T>
void rms_norm(const float* in, const float* weight, float eps, int64_t width, T* out) {
  float scale;
  norm_scales<1>(&in, 1, eps, width, &scale);
  scale_row(in, scale, weight, width, out);
}

// `combine` of two rows, a vector at a time: all elements go the same way, the last ones too.
template <class Combine, class T>
void each_vector(const float* a, const float* b, int64_t width, T* out, Combine combine) {
  float values[kLanes], left[kLanes] = {}, right[kLanes] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, width - i);
    std::memcpy(left, a + i, count * sizeof(float));
    std::memcpy(right, b + i, count * sizeof(float));
    store(values, combine(load(left), load(right)));
    for (int64_t j = 0; j < count; j++) assign(out[i + j], values[j]);
  }
}

// gelu(gate) * up
template <class T>
void gelu_mul(const float* gate, const float* up, int64_t width, T* out) {
  each_vector(gate, up, width, out, [](Vec x, Vec y) { return gelu_tanh(x) * y; });
}

// softcap * tanh(score / softcap), with tanh(x) = 1 - 2 / (exp(2x) + 1)
inline Vec cap(Vec score, float softcap) {
  const Vec twice = exponential(score / splat(0.5f * softcap));
  return splat(softcap) * (splat(1.0f) - splat(2.0f) / (twice + splat(1.0f)));
}

inline void softcap(float* row, int64_t width, float softcap) {
  each_vector(row, row, width, row, [&](Vec x, Vec) { return cap(x, softcap); });
}

// out: cosines [half], then sines, times `factor`. Each value depends on the position alone.
inline void rotary_angles(int64_t position, const float* inv_freq, int64_t half, float factor,
                          float* out) {
  for (int64_t i = 0; i < half; i++) {
    const float angle = float(position) * inv_freq[i];
    out[i] = std::cos(angle) * factor;
    out[half + i] = std::sin(angle) * factor;
  }
}

struct HeadShape {
  int64_t num_heads, num_kv_heads, head_dim;

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
  int64_t group() const { return num_heads / num_kv_heads; }
};

enum class NewKeys : int32_t {
  kOwn = 0,           // rows hold queries, keys and values
  kValuesAreKeys = 1, // queries and keys; a value is its key before norm and rotation
  kNone = 2,          // queries only: the layer reads another one's cache
};

// What happens to queries, keys and values between their product and attention. Norms are over one
// head; pairs (i, i + rotary_dim / 2) of a head's first rotary_dim features are rotated.
struct HeadPreparation {
  NewKeys new_keys = NewKeys::kOwn;
  bool norm_queries = false, norm_keys = false, norm_values = false;
  const float* query_norm = nullptr;  // [head_dim]; null: the norm has no weight
  const float* key_norm = nullptr;
  float eps = 0.0f;
  int64_t rotary_dim = 0;

  int64_t row_width(const HeadShape& heads) const {
    const int64_t parts = new_keys == NewKeys::kOwn ? 2 : new_keys == NewKeys::kNone ? 0 : 1;
    return heads.query_width() + parts * heads.key_width();
  }
};

template <class T>
void rotate(const float* in, const float* angles, int64_t rotary_dim, int64_t head_dim, T* out) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec cos = load(angles + i), sin = load(angles + half + i);
    const Vec first = load(in + i), second = load(in + half + i);
    store_rounded(first * cos - second * sin, out + i);
    store_rounded(second * cos + first * sin, out + half + i);
  }
  for (; i < half; i++) {
    const float cos = angles[i], sin = angles[half + i];
    assign(out[i], in[i] * cos - in[half + i] * sin);
    assign(out[half + i], in[half + i] * cos + in[i] * sin);
  }
  for (i = rotary_dim; i < head_dim; i++) assign(out[i], in[i]);
}

// One token's row: rotated queries go to `query` and the rest to its slot of the cache.
template <class T>
void rotate_and_write(const float* row, const float* angles, const HeadShape& heads,
                      const HeadPreparation& prep, int64_t slot, T* query,
                      const LayerCache& cache) {
  constexpr int64_t kLargestHead = 1024;
  const int64_t dim = heads.head_dim;
  float normed[kLargestHead], done[kLargestHead];
  const auto norm = [&](const float* head, bool wanted, const float* weight) -> const float* {
    if (!wanted) return head;
    rms_norm(head, weight, prep.eps, dim, normed);
    return normed;
  };
  for (int64_t head = 0; head < heads.num_heads; head++)
    rotate(norm(row + head * dim, prep.norm_queries, prep.query_norm), angles, prep.rotary_dim,
           dim, query + head * dim);
  if (prep.new_keys == NewKeys::kNone) return;
  const float* keys = row + heads.query_width();
  const float* values = prep.new_keys == NewKeys::kOwn ? keys + heads.key_width() : keys;
  with_stored(cache.type, [&](auto* tag) {
    using S = std::remove_pointer_t<decltype(tag)>;
    for (int64_t head = 0; head < heads.num_kv_heads; head++) {
      const int64_t index = slot * heads.num_kv_heads + head;
      rotate(norm(keys + head * dim, prep.norm_keys, prep.key_norm), angles, prep.rotary_dim, dim,
             done);
      float key_scale = 1.0f;
      if (cache.keys_in_panels)
        store_key_column(done, dim, slot,
                         static_cast<BFloat16*>(cache.keys) +
                             key_panel(slot, head, heads.num_kv_heads, dim));
      else
        key_scale = store_head(done, dim, static_cast<S*>(cache.keys) + index * dim);
      const float* value = norm(values + head * dim, prep.norm_values, nullptr);
      const float value_scale = store_head(value, dim, static_cast<S*>(cache.values) + index * dim);
      if constexpr (StoredTraits<S>::kScaled) {
        cache.key_scales[index] = key_scale;
        cache.value_scales[index] = value_scale;
      }
    }
  });
}

}  // namespace shoal
