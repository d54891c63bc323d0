// Causal attention of a ragged batch, straight over the block table.
//
// A sequence's context is walked in spans of 64 positions that start at multiples of 64, with an
// online softmax. What a query does depends on its own position alone: keys after it weigh exactly
// 0, so it makes no difference with which other queries it shares a task, nor whether the sequence
// came in one piece, in chunks or token by token.
#pragma once

#include <limits>
#include <vector>

#include "rows.h"

namespace shoal {

constexpr int64_t kSpan = 64;
constexpr int64_t kTaskRows = 48;  // query heads x tokens that share the spans they read
constexpr double kMassOne = 4294967296.0;  // MASS_ONE of attention_mass.py

// Sequence i has query_lens[i] new tokens, the last of its context_lens[i].
struct Batch {
  int64_t num_seqs, max_blocks, block_size;
  const int64_t* block_tables;  // [num_seqs, max_blocks]
  const int64_t* query_lens;
  const int64_t* context_lens;
};

// How much attention each block of a sequence got. Whole numbers: their sum is the same in whatever
// order the threads add them, and however the queries came to be spread over steps.
struct BlockMass {
  int64_t* units = nullptr;  // [num_seqs, max_blocks], in 1 / kMassOne; null: nobody asks

  void add(int64_t index, int64_t value) const {
    if (value) __atomic_fetch_add(units + index, value, __ATOMIC_RELAXED);
  }
};

// Some neighbouring tokens of one sequence, for the query heads of one key/value head.
struct AttentionTask {
  int64_t seq, first_row, first_position, num_tokens, kv_head;
};

inline std::vector<AttentionTask> attention_tasks(const Batch& batch, const HeadShape& heads) {
  const int64_t group = heads.num_heads / heads.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, kTaskRows / group);
  std::vector<AttentionTask> tasks;
  int64_t row = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; seq++) {
    const int64_t count = batch.query_lens[seq];
    const int64_t start = batch.context_lens[seq] - count;
    for (int64_t first = 0; first < count; first += most)
      for (int64_t kv_head = 0; kv_head < heads.num_kv_heads; kv_head++)
        tasks.push_back(
            {seq, row + first, start + first, std::min(most, count - first), kv_head});
    row += count;
  }
  // The longest first: threads that take them in turn then end together.
  std::stable_sort(tasks.begin(), tasks.end(), [](const AttentionTask& a, const AttentionTask& b) {
    return (a.first_position + a.num_tokens) * a.num_tokens >
           (b.first_position + b.num_tokens) * b.num_tokens;
  });
  return tasks;
}

#if defined(__AVX512F__)
// 16 x 16 words: rows [16] at `source` with a stride, columns to `target` with a stride.
inline void transpose_16(const int32_t* const* source, int32_t* target, int64_t target_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(source[i]);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(target + i * target_stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
    _mm512_storeu_si512(target + (8 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd));
    _mm512_storeu_si512(target + (4 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
    _mm512_storeu_si512(target + (12 + i) * target_stride,
                        _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd));
  }
}
#endif

// 32 keys (those from `count` on are zeros) as a panel: each key is one column.
template <class T>
void pack_keys(const T* const* keys, int64_t count, int64_t head_dim, T* panel) {
  constexpr int64_t group = 4 / sizeof(T);
  int64_t done = 0;  // features
#if defined(__AVX512F__)
  alignas(64) static const int32_t zeros[16] = {};
  for (; done + 16 * group <= head_dim; done += 16 * group)
    for (int64_t half = 0; half < 2; half++) {
      const int32_t* rows[16];
      for (int64_t i = 0; i < 16; i++) {
        const int64_t key = half * 16 + i;
        rows[i] = key < count ? reinterpret_cast<const int32_t*>(keys[key] + done) : zeros;
      }
      transpose_16(rows, reinterpret_cast<int32_t*>(panel + done * kPanel) + half * 16, kPanel);
    }
#endif
  for (int64_t i = done; i < padded_k(head_dim, T{}); i++)
    for (int64_t key = 0; key < kPanel; key++)
      panel[(i / group * kPanel + key) * group + i % group] =
          key < count && i < head_dim ? keys[key][i] : T{};
}

// Collects what each row of a task gave to each block, and adds it to the batch's mass at the end.
// A piece is what a block and a span share; a row's weights in it are relative to the row's maximum
// as it was after that span.
class MassScratch {
 public:
  void begin(int64_t num_rows, int64_t end, int64_t block_size) {
    num_spans_ = (end + kSpan - 1) / kSpan;
    num_pieces_ = (end + block_size - 1) / block_size + num_spans_;
    block_size_ = block_size;
    sums_.assign(num_rows * num_pieces_, 0.0f);
    maxima_.assign(num_rows * num_spans_, 0.0f);
    pieces_.clear();
  }

  void begin_span(int64_t start, int64_t count) {
    first_piece_ = pieces_.size();
    for (int64_t i = 0; i < count;) {
      const int64_t block = (start + i) / block_size_;
      const int64_t next = std::min(count, (block + 1) * block_size_ - start);
      pieces_.push_back({block, start / kSpan, i, next});
      i = next;
    }
  }

  void add_row(int64_t row, const float* weights, float row_max) {
    for (size_t i = first_piece_; i < pieces_.size(); i++) {
      float sum = 0.0f;
      for (int64_t key = pieces_[i].begin; key < pieces_[i].end; key++) sum += weights[key];
      sums_[row * num_pieces_ + i] = sum;
    }
    maxima_[row * num_spans_ + pieces_[first_piece_].span] = row_max;
  }

  // `mass_row` is the index of the sequence's first block in `mass`.
  void finish(const float* row_maxima, const float* totals, int64_t num_rows, int64_t mass_row,
              const BlockMass& mass) {
    for (size_t i = 0; i < pieces_.size(); i++) {
      int64_t units = 0;
      for (int64_t row = 0; row < num_rows; row++) {
        const float raw = sums_[row * num_pieces_ + i];
        if (!(raw > 0.0f)) continue;  // unseen, or NaN: the sequence fails anyway
        const float shrink = maxima_[row * num_spans_ + pieces_[i].span] - row_maxima[row];
        const float weight = raw * exponential(splat(shrink))[0] / totals[row];
        if (weight <= 1.5f) units += std::llrint(double(weight) * kMassOne);
      }
      mass.add(mass_row + pieces_[i].block, units);
    }
  }

 private:
  struct Piece {
    int64_t block, span, begin, end;
  };
  int64_t num_spans_, num_pieces_, block_size_;
  size_t first_piece_;
  std::vector<Piece> pieces_;
  std::vector<float> sums_;    // [rows, pieces]
  std::vector<float> maxima_;  // [rows, spans]
};

// One thread's working memory.
template <class T>
class AttentionScratch {
 public:
  AttentionScratch(const HeadShape& heads)
      : width((heads.head_dim + kPanel - 1) / kPanel * kPanel),
        max_rows(std::max(kTaskRows, heads.num_heads / heads.num_kv_heads)),
        queries(max_rows * heads.head_dim),
        keys(kSpan / kPanel * panel_elements<T>(heads.head_dim) + 64),
        values(kSpan * width + 1024),
        scores(max_rows * kSpan),
        sums(max_rows * width),
        maxima(max_rows),
        totals(max_rows * kLanes) {}

  int64_t width;  // head_dim, rounded up to whole panels
  int64_t max_rows;
  std::vector<T> queries;      // [rows, head_dim]
  std::vector<T> keys;         // [kSpan / 32] panels
  std::vector<float> values;   // [width / 32] panels of [kSpan][32]
  std::vector<float> scores;   // [rows, kSpan]
  std::vector<float> sums;     // [rows, width]: values, weighted so far
  std::vector<float> maxima;   // [rows]
  std::vector<float> totals;   // [rows, kLanes]: weights so far, by lane
  MassScratch mass;
};

template <class T>
void pack_values(const T* const* values, int64_t count, int64_t head_dim, float* panels) {
  for (int64_t start = 0; start < head_dim; start += kPanel, panels += kSpan * kPanel) {
    const int64_t columns = std::min<int64_t>(kPanel, head_dim - start);
    for (int64_t key = 0; key < count; key++) {
      float* out = panels + key * kPanel;
      if (columns == kPanel) {
        for (int64_t i = 0; i < kPanel; i++) out[i] = to_float(values[key][start + i]);
      } else {
        for (int64_t i = 0; i < kPanel; i++)
          out[i] = i < columns ? to_float(values[key][start + i]) : 0.0f;
      }
    }
  }
}

// Scores to weights for one row; rescales what the row has gathered when its maximum rises.
// Of the `kSpan` scores the first `visible` (1 or more) count.
inline void weigh(float* scores, int64_t visible, float scale, float& row_max, float* totals,
                  float* sums, int64_t width) {
  const Vec lowest = splat(-std::numeric_limits<float>::infinity());
  for (int64_t i = visible; i < kSpan; i++) scores[i] = lowest[0];
  Vec high = lowest;
  for (int64_t i = 0; i < kSpan; i += kLanes) {
    const Vec scaled = load(scores + i) * splat(scale);
    store(scores + i, scaled);
    high = maximum(high, scaled);
  }
  const float new_max = std::max(row_max, max_lanes(high));
  Vec total = load(totals);
  if (new_max != row_max) {
    const Vec shrink = exponential(splat(row_max - new_max));
    for (int64_t i = 0; i < width; i += kLanes) store(sums + i, load(sums + i) * shrink);
    total *= shrink;
    row_max = new_max;
  }
  for (int64_t i = 0; i < kSpan; i += kLanes) {
    const Vec weight = exponential(load(scores + i) - splat(new_max));
    store(scores + i, weight);
    total += weight;
  }
  store(totals, total);
}

template <class T>
void attend(const AttentionTask& task, const Batch& batch, const HeadShape& heads, float scale,
            const T* query, const T* key_cache, const T* value_cache, T* out,
            AttentionScratch<T>& scratch, const BlockMass& mass) {
  const int64_t dim = heads.head_dim, group = heads.num_heads / heads.num_kv_heads;
  const int64_t width = scratch.width;
  const int64_t num_rows = task.num_tokens * group;
  const int64_t end = task.first_position + task.num_tokens;  // of the context that any row sees
  const int64_t* blocks = batch.block_tables + task.seq * batch.max_blocks;
  const auto head_of = [&](int64_t row) {  // element offset of a row's head in query and out
    return (task.first_row + row / group) * heads.query_width() +
           (task.kv_head * group + row % group) * dim;
  };
  // Calls body(i, slot) for `count` positions from `start` on; divisions are slow.
  const auto find_slots = [&](int64_t start, int64_t count, auto body) {
    for (int64_t i = 0; i < count;) {
      const int64_t position = start + i, offset = position % batch.block_size;
      const int64_t first_slot = blocks[position / batch.block_size] * batch.block_size + offset;
      const int64_t in_block = std::min(count - i, batch.block_size - offset);
      for (int64_t j = 0; j < in_block; j++, i++) body(i, first_slot + j);
    }
  };
  for (int64_t row = 0; row < num_rows; row++)
    std::memcpy(&scratch.queries[row * dim], query + head_of(row), dim * sizeof(T));
  std::fill_n(scratch.sums.begin(), num_rows * width, 0.0f);
  std::fill_n(scratch.totals.begin(), num_rows * kLanes, 0.0f);
  std::fill_n(scratch.maxima.begin(), num_rows, -std::numeric_limits<float>::infinity());
  if (mass.units) scratch.mass.begin(num_rows, end, batch.block_size);

  for (int64_t start = 0; start < end; start += kSpan) {
    const int64_t count = std::min(kSpan, end - start);
    const T* keys[kSpan];
    const T* values[kSpan];
    find_slots(start, count, [&](int64_t i, int64_t slot) {
      const int64_t at = (slot * heads.num_kv_heads + task.kv_head) * dim;
      keys[i] = key_cache + at;
      values[i] = value_cache + at;
    });
    // The next span is scattered over the cache: no hardware sees it coming.
    find_slots(start + kSpan, std::min(kSpan, end - start - kSpan), [&](int64_t, int64_t slot) {
      const int64_t at = (slot * heads.num_kv_heads + task.kv_head) * dim;
      for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) {
        __builtin_prefetch(key_cache + at + i);
        __builtin_prefetch(value_cache + at + i);
      }
    });
    // Rows whose own position lies before this span are done.
    const int64_t first = std::max<int64_t>(0, start - task.first_position) * group;
    const int64_t num_panels = (count + kPanel - 1) / kPanel;
    for (int64_t panel = 0; panel < num_panels; panel++) {
      T* packed = scratch.keys.data() + panel * panel_elements<T>(dim);
      pack_keys(keys + panel * kPanel, std::min<int64_t>(kPanel, count - panel * kPanel), dim,
                packed);
      for_tiles(num_rows - first, [&](int64_t begin, int rows) {
        begin += first;
        tile<T>(rows, &scratch.queries[begin * dim], dim, packed, dim,
                &scratch.scores[begin * kSpan + panel * kPanel], kSpan, false);
      });
    }
    if (mass.units) scratch.mass.begin_span(start, count);
    for (int64_t row = first; row < num_rows; row++) {
      const int64_t visible = std::min(kSpan, task.first_position + row / group + 1 - start);
      weigh(&scratch.scores[row * kSpan], visible, scale, scratch.maxima[row],
            &scratch.totals[row * kLanes], &scratch.sums[row * width], width);
      if (mass.units)
        scratch.mass.add_row(row, &scratch.scores[row * kSpan], scratch.maxima[row]);
    }
    pack_values(values, count, dim, scratch.values.data());
    for (int64_t panel = 0; panel < width / kPanel; panel++)
      for_tiles(num_rows - first, [&](int64_t begin, int rows) {
        begin += first;
        tile<float>(rows, &scratch.scores[begin * kSpan], kSpan,
                    scratch.values.data() + panel * kSpan * kPanel, count,
                    &scratch.sums[begin * width + panel * kPanel], width, true);
      });
  }
  for (int64_t row = 0; row < num_rows; row++) {
    const float total = sum_lanes(load(&scratch.totals[row * kLanes]));
    T* to = out + head_of(row);
    for (int64_t i = 0; i < dim; i++) assign(to[i], scratch.sums[row * width + i] / total);
    scratch.totals[row] = total;  // the lanes of the rows before are done with
  }
  if (mass.units)
    scratch.mass.finish(scratch.maxima.data(), scratch.totals.data(), num_rows,
                        task.seq * batch.max_blocks, mass);
}

}  // namespace shoal
