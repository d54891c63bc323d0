// Causal attention of a ragged batch, straight over the block table.
//
// A sequence's context is walked in spans of 64 cache indices that start at multiples of 64, with
// an online softmax that begins anew at each multiple of 512 (a split); splits are then merged in
// ascending order. What a query does depends on its own index alone: keys that it does not see
// weigh exactly 0, so it makes no difference with which other queries it shares a task, whether one
// thread or several went through its splits, nor whether the sequence came in one piece, in chunks
// or token by token.
#pragma once

#include <vector>

#include "attention_work.h"
#include "key_panels.h"
#include "online_softmax.h"

namespace shoal {

// One thread's working memory.
template <class T>
class AttentionScratch {
 public:
  void reserve(const AttentionShape& shape) {
    const int64_t dim = shape.heads.head_dim, width = shape.padded_dim();
    const int64_t rows = std::max(kTaskRows, shape.heads.group());
    grow(queries, rows * dim);
    grow(keys, kSpan / kPanel * panel_elements<T>(dim) + 64);
    grow(widened, kSpan * dim);
    grow(wide_values, kSpan * width);
    grow(zeros, width);
    grow(values, kSpan * width + 1024);
    grow(scores, rows * kSpan);
    grow(weights, rows * kSpan);
    grow(sums, rows * width);
    grow(merged, rows * width);
    grow(maxima, rows);
    grow(totals, rows * kLanes);
    grow(merged_maxima, rows);
    grow(merged_totals, rows);
  }

  std::vector<T> queries;            // [rows, head_dim]
  std::vector<T> keys;               // [kSpan / 32] panels
  std::vector<T> widened;            // [kSpan, head_dim]: keys that the cache holds otherwise
  std::vector<T> wide_values;        // [kSpan, width]: values, likewise, or padded
  std::vector<T> zeros;              // [width]: a key or value that nobody sees
  std::vector<Weight<T>> values;     // [width / 32] panels of [kSpan][32]
  std::vector<float> scores;         // [rows, kSpan]
  std::vector<Weight<T>> weights;    // [rows, kSpan], where they are of another type
  std::vector<float> sums;           // [rows, width]: values, weighted, of this split so far
  std::vector<float> maxima;         // [rows], of this split
  std::vector<float> totals;         // [rows, kLanes]: weights of this split, by lane
  std::vector<float> merged;         // [rows, width]: of the splits before
  std::vector<float> merged_maxima;  // [rows]
  std::vector<float> merged_totals;  // [rows]
  MassScratch mass;
  Pieces pieces;  // of the next attention's keys and values

 private:
  template <class Element>
  static void grow(std::vector<Element>& buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size);
  }
};

// A task's walk through its splits. Rows are a key/value head's tokens x its query heads; those of
// the task's heads follow each other in the scratch. T: the model's type; S: what the cache holds;
// kPanels: its keys lie in panels.
template <class T, class S, bool kPanels>
class Attention {
#if defined(__AVX512BF16__)
  static constexpr bool kScoresPanels = kPanels;
#else
  static constexpr bool kScoresPanels = false;
#endif

 public:
  Attention(const AttentionTask& task, const Batch& batch, const AttentionShape& shape,
            const LayerCache& cache, AttentionScratch<T>& scratch, const BlockMass& mass,
            const AttentionTask* next = nullptr)
      : task_(task), next_(next), batch_(batch), shape_(shape), cache_(cache), scratch_(scratch), mass_(mass),
        dim_(shape.heads.head_dim), group_(shape.heads.group()), width_(shape.padded_dim()),
        num_rows_(task.num_tokens * group_) {}

  void run(const T* query, T* out, float* partials) {
    each_head([&](int64_t row, int64_t at) {
      std::memcpy(&scratch_.queries[row * dim_], query + at, dim_ * sizeof(T));
    });
    if (mass_.units) scratch_.mass.begin(num_rows_, task_.end(), batch_.block_size);
    if (task_.partial < 0 && !mass_.units && task_.end_split - task_.first_split == 1) {
      // What merging into nothing would give, which most tasks are spared.
      walk(task_.first_split);
      each_head([&](int64_t row, int64_t at) {
        finish_row(&scratch_.sums[row * width_],
                   sum_lanes(load(&scratch_.totals[row * kLanes])), out + at);
      });
      return;
    }
    begin_merged();
    for (int64_t split = task_.first_split; split < task_.end_split; split++) {
      const auto [first, last] = rows_that_see(split * kSplit, (split + 1) * kSplit);
      walk(split);
      each_row(first, last, [&](int64_t row) {
        const float total = sum_lanes(load(&scratch_.totals[row * kLanes]));
        const float* sums = &scratch_.sums[row * width_];
        if (task_.partial >= 0) {
          float* to = partials + task_.partial + row * (kPartialHead + width_);
          to[0] = scratch_.maxima[row];
          to[1] = total;
          std::memcpy(to + kPartialHead, sums, width_ * sizeof(float));
        } else if (task_.end_split - task_.first_split == 1) {
          scratch_.merged_maxima[row] = scratch_.maxima[row];  // as merging into nothing would
          scratch_.merged_totals[row] = total;
          std::memcpy(&scratch_.merged[row * width_], sums, width_ * sizeof(float));
        } else {
          merge(scratch_.merged_maxima[row], scratch_.merged_totals[row],
                &scratch_.merged[row * width_], scratch_.maxima[row], total, sums, width_);
        }
      });
    }
    if (task_.partial >= 0) return;
    finish(out);
    if (mass_.units)
      scratch_.mass.finish(scratch_.merged_maxima.data(), scratch_.merged_totals.data(), num_rows_,
                           task_.seq * batch_.max_blocks, mass_);
  }

  // Merges what the parts of a split task left behind.
  void merge_partials(T* out, const float* partials) {
    begin_merged();
    const int64_t stride = kPartialHead + width_;
    const float* from = partials + task_.partial;
    for (int64_t split = task_.first_split; split < task_.end_split; split++) {
      const auto [first, last] = rows_that_see(split * kSplit, (split + 1) * kSplit);
      each_row(first, last, [&](int64_t row) {
        const float* part = from + row * stride;
        merge(scratch_.merged_maxima[row], scratch_.merged_totals[row],
              &scratch_.merged[row * width_], part[0], part[1], part + kPartialHead, width_);
      });
      from += all_rows() * stride;
    }
    finish(out);
  }

 private:
  int64_t all_rows() const { return task_.num_kv_heads * num_rows_; }

  // Rows first to last of each key/value head.
  template <class Body>
  void each_row(int64_t first, int64_t last, Body body) const {
    for (int64_t head = 0; head < task_.num_kv_heads; head++)
      for (int64_t row = first; row < last; row++) body(head * num_rows_ + row);
  }

  // Calls body(row, element offset of its head in query and out).
  template <class Body>
  void each_head(Body body) const {
    int64_t row = 0;
    for (int64_t head = 0; head < task_.num_kv_heads; head++)
      for (int64_t token = 0; token < task_.num_tokens; token++) {
        const int64_t first = (task_.first_row + token) * shape_.heads.query_width() +
                              (task_.kv_head + head) * group_ * dim_;
        for (int64_t i = 0; i < group_; i++) body(row++, first + i * dim_);
      }
  }

  std::pair<int64_t, int64_t> rows_that_see(int64_t begin, int64_t end) const {
    const auto [first, last] = task_.tokens_that_see(begin, end, shape_.window);
    return {first * group_, last * group_};
  }

  // Calls body(i, slot) for `count` cache indices from `start` on; divisions are slow.
  template <class Body>
  void find_slots(const AttentionTask& task, int64_t start, int64_t count, Body body) const {
    const int64_t* blocks = batch_.block_tables + task.seq * batch_.max_blocks;
    for (int64_t i = 0; i < count;) {
      const int64_t index = start + i, offset = index % batch_.block_size;
      const int64_t first_slot = blocks[index / batch_.block_size] * batch_.block_size + offset;
      const int64_t in_block = std::min(count - i, batch_.block_size - offset);
      for (int64_t j = 0; j < in_block; j++, i++) body(i, first_slot + j);
    }
  }

  void begin_merged() {
    std::fill_n(scratch_.merged.begin(), all_rows() * width_, 0.0f);
    std::fill_n(scratch_.merged_totals.begin(), all_rows(), 0.0f);
    std::fill_n(scratch_.merged_maxima.begin(), all_rows(),
                -std::numeric_limits<float>::infinity());
  }

  void finish(T* out) {
    each_head([&](int64_t row, int64_t at) {
      finish_row(&scratch_.merged[row * width_], scratch_.merged_totals[row], out + at);
    });
  }

  void finish_row(const float* sums, float total, T* to) const {
    int64_t i = 0;
    for (; i + kPanel <= dim_; i += kPanel) store_values(sums + i, total, to + i);
    for (; i < dim_; i++) assign(to[i], sums[value_column<T>(i)] / total);
  }

  void walk(int64_t split) {
    std::fill_n(scratch_.sums.begin(), all_rows() * width_, 0.0f);
    std::fill_n(scratch_.totals.begin(), all_rows() * kLanes, 0.0f);
    std::fill_n(scratch_.maxima.begin(), all_rows(), -std::numeric_limits<float>::infinity());
    const int64_t begin = first_span(task_, split);
    const int64_t end = std::min((split + 1) * kSplit, task_.end());
    for (int64_t start = begin; start < end; start += kSpan) {
      const int64_t count = std::min(kSpan, end - start);
      const auto [first_row, last_row] = rows_that_see(start, start + count);
      // Before it is what no row sees, perhaps because its block is somebody else's by now.
      const int64_t first_key = std::max<int64_t>(
          0, task_.lowest(first_row / group_, shape_.window) - start);
      if (mass_.units) scratch_.mass.begin_span(start, first_key, count);
      look_ahead(start);
      for (int64_t head = 0; head < task_.num_kv_heads; head++) {
        if (head > 0 && points_into_cache())
          point_to_next_head(first_key, count);
        else
          gather(task_.kv_head + head, start, first_key, count);
        const int64_t base = head * num_rows_;
        score(base + first_row, base + last_row, count);
        for (int64_t row = first_row, token = first_row / group_; row < last_row; token++)
          for (const int64_t next = row + group_; row < next; row++) {
            weigh_row(base + row, token, start);
            ahead_.fetch(SpanAhead::kRowLines);
          }
        add_values(base + first_row, base + last_row, first_key, count);
      }
    }
  }

  int64_t first_span(const AttentionTask& task, int64_t split) const {
    return std::max(split * kSplit, task.lowest(0, shape_.window) / kSpan * kSpan);
  }

  // Keys and values are used where they lie, and those of a token's heads lie side by side.
  bool points_into_cache() const {
    return std::is_same_v<S, T> && dim_ == width_ && kPanels == kScoresPanels;
  }

  void point_to_next_head(int64_t first, int64_t count) {
    if constexpr (kScoresPanels)
      for (const T*& panel : panels_) panel += dim_ * kKeyPanel;
    else
      for (int64_t i = first; i < count; i++) keys_[i] += dim_;
    for (int64_t i = first; i < count; i++) values_[i] += dim_;
  }

  // Keys and values of one head of a span.
  void gather(int64_t kv_head, int64_t start, int64_t first, int64_t count) {
    if (first > 0 || count < kSpan) {
      std::fill_n(keys_, kSpan, scratch_.zeros.data());
      std::fill_n(values_, kSpan, scratch_.zeros.data());
      std::fill_n(value_scales_, kSpan, 0.0f);  // a NaN left from before would make one of weight 0
    }
    if constexpr (kScoresPanels) gather_panels(kv_head, start, first, count);
    find_slots(task_, start + first, count - first, [&](int64_t i, int64_t slot) {
      const int64_t index = slot * shape_.heads.num_kv_heads + kv_head;
      const S* key = static_cast<const S*>(cache_.keys) + index * dim_;
      const S* value = static_cast<const S*>(cache_.values) + index * dim_;
      if constexpr (kScoresPanels) {
      } else if constexpr (kPanels) {
        T* copy = &scratch_.widened[(first + i) * dim_];
        load_key_column(static_cast<const T*>(cache_.keys) +
                            key_panel(slot, kv_head, shape_.heads.num_kv_heads, dim_),
                        slot, dim_, copy);
        keys_[first + i] = copy;
      } else if constexpr (std::is_same_v<S, T>) {
        keys_[first + i] = key;
      } else {
        T* wide = &scratch_.widened[(first + i) * dim_];
        widen(key, dim_, wide);
        keys_[first + i] = wide;
      }
      if (std::is_same_v<S, T> && dim_ == width_) {
        values_[first + i] = reinterpret_cast<const T*>(value);
      } else {
        T* wide = &scratch_.wide_values[(first + i) * width_];
        widen(value, dim_, wide);
        values_[first + i] = wide;
      }
      if constexpr (StoredTraits<S>::kScaled) {
        key_scales_[first + i] = cache_.key_scales[index];
        value_scales_[first + i] = cache_.value_scales[index];
      }
    });
  }

  // The panels of a span, which is a whole number of them. Where nobody sees any key of one, it is
  // another one.
  void gather_panels(int64_t kv_head, int64_t start, int64_t first, int64_t count) {
    const int64_t begin = first / kKeyPanel, end = (count + kKeyPanel - 1) / kKeyPanel;
    const int64_t* blocks = batch_.block_tables + task_.seq * batch_.max_blocks;
    for (int64_t i = begin; i < end; i++) {
      const int64_t index = start + i * kKeyPanel;
      const int64_t slot =
          blocks[index / batch_.block_size] * batch_.block_size + index % batch_.block_size;
      panels_[i] = static_cast<const T*>(cache_.keys) +
                   key_panel(slot, kv_head, shape_.heads.num_kv_heads, dim_);
    }
    std::fill(panels_, panels_ + begin, panels_[begin]);
    std::fill(panels_ + end, panels_ + kSpan / kKeyPanel, panels_[begin]);
  }

  // What is fetched while the span at `start` is at hand: the next one. A task's last span may be too
  // short to fetch all of the next task's first, so the span before it goes on with that.
  void look_ahead(int64_t start) {
    const int64_t end = std::min(task_.end_split * kSplit, task_.end());
    const bool only = start == first_span(task_, task_.first_split);
    if (start + kSpan >= end && !only) return;
    ahead_.begin(task_.num_kv_heads * dim_ * sizeof(S));
    if (start + kSpan < end) fetch_soon(task_, start + kSpan);
    if (next_ && start + 2 * kSpan >= end && next_->num_kv_heads == task_.num_kv_heads)
      fetch_soon(*next_, first_span(*next_, next_->first_split));
  }

  void fetch_soon(const AttentionTask& task, int64_t start) {
    find_slots(task, start, std::min(kSpan, task.end() - start), [&](int64_t i, int64_t slot) {
      const int64_t index = (slot * shape_.heads.num_kv_heads + task.kv_head) * dim_;
      if constexpr (!kPanels) {
        ahead_.add(static_cast<const S*>(cache_.keys) + index);
      } else if (i % kKeyPanel == 0) {
        const S* panel = static_cast<const S*>(cache_.keys) +
                         key_panel(slot, task.kv_head, shape_.heads.num_kv_heads, dim_);
        for (int64_t j = 0; j < kKeyPanel; j++) ahead_.add(panel + j * task.num_kv_heads * dim_);
      }
      ahead_.add(static_cast<const S*>(cache_.values) + index);
    });
  }

  void score(int64_t first, int64_t last, int64_t count) {
#if defined(__AVX512BF16__)
    if constexpr (kScoresPanels) return score_in_panels(first, last, count);
    if constexpr (std::is_same_v<T, BFloat16>)
      if (last - first <= kFewRows && dim_ % 16 == 0) {
        for (int64_t key = 0; key < count; key += kPanel) {
          score_keys(last - first, &scratch_.queries[first * dim_], dim_, keys_ + key,
                     &scratch_.scores[first * kSpan + key], kSpan, ahead_);
        }
        return;
      }
#endif
    for (int64_t panel = 0; panel * kPanel < count; panel++) {
      T* packed = scratch_.keys.data() + panel * panel_elements<T>(dim_);
      pack_keys(keys_ + panel * kPanel, dim_, packed, ahead_);
      for_tiles(last - first, [&](int64_t begin, int rows) {
        begin += first;
        tile<T>(rows, &scratch_.queries[begin * dim_], dim_, packed, dim_,
                &scratch_.scores[begin * kSpan + panel * kPanel], kSpan, false);
      });
    }
  }

#if defined(__AVX512BF16__)
  void score_in_panels(int64_t first, int64_t last, int64_t count) {
    const T* queries = &scratch_.queries[first * dim_];
    float* scores = &scratch_.scores[first * kSpan];
    if (last - first <= kFewRows) {
      if (count <= kKeyPanel)
        score_panels<1, kFewRows>(last - first, queries, dim_, panels_, scores, kSpan, ahead_);
      else if (count <= 2 * kKeyPanel)
        score_panels<2, kFewRows>(last - first, queries, dim_, panels_, scores, kSpan, ahead_);
      else
        score_panels<4, kFewRows>(last - first, queries, dim_, panels_, scores, kSpan, ahead_);
      return;
    }
    for (int64_t panel = 0; panel * kKeyPanel < count; panel += 2)
      for_tiles(last - first, [&](int64_t begin, int rows) {
        score_panels<2, kTileRows>(rows, queries + begin * dim_, dim_, panels_ + panel,
                                   scores + begin * kSpan + panel * kKeyPanel, kSpan, ahead_);
      });
  }
#endif

  void weigh_row(int64_t row, int64_t token, int64_t start) {
    float* scores = &scratch_.scores[row * kSpan];
    const int64_t first = std::max<int64_t>(0, task_.lowest(token, shape_.window) - start);
    const int64_t end = std::min(kSpan, task_.first_index + token + 1 - start);
    constexpr bool scaled = StoredTraits<S>::kScaled;
    const auto weigh_to = [&](auto keep) {
      weigh(scores, first, end, shape_, scaled ? key_scales_ : nullptr, scratch_.maxima[row],
            &scratch_.totals[row * kLanes], &scratch_.sums[row * width_], width_, keep);
    };
    if constexpr (!scaled && !std::is_same_v<Weight<T>, float>)
      if (!mass_.units)
        return weigh_to([&](int i, Vec weight) {
          store_rounded(weight, &scratch_.weights[row * kSpan + i]);
        });
    weigh_to([&](int i, Vec weight) { store(scores + i, weight); });
    if (mass_.units) scratch_.mass.add_row(row, scores, scratch_.maxima[row]);
    if constexpr (scaled)
      for (int64_t i = 0; i < kSpan; i += kLanes)
        store(scores + i, load(scores + i) * load(value_scales_ + i));
    if constexpr (!std::is_same_v<Weight<T>, float>)
      for (int64_t i = 0; i < kSpan; i += kLanes)
        store_rounded(load(scores + i), &scratch_.weights[row * kSpan + i]);
  }

  const Weight<T>* weights_of(int64_t row) const {
    if constexpr (std::is_same_v<Weight<T>, float>)
      return &scratch_.scores[row * kSpan];
    else
      return &scratch_.weights[row * kSpan];
  }

  void add_values(int64_t first_row, int64_t last_row, int64_t first, int64_t count) {
    const int64_t num_rows = last_row - first_row;
    // Values that weights multiply in pairs begin and end with a whole one.
    constexpr int64_t step = 4 / sizeof(Weight<T>);
    first = first / step * step;
    count = (count + step - 1) / step * step;
    if (num_rows <= kTileRows) {
      constexpr int64_t both = 2 * kPanel;
      constexpr bool has_registers = kTileRows >= kFewRows;  // for the sums of two panels
      const bool few = has_registers && num_rows <= kFewRows && width_ % both == 0;
      for (int64_t column = 0; column < width_; column += few ? both : kPanel) {
        const Weight<T>* weights = weights_of(first_row);
        float* sums = &scratch_.sums[first_row * width_ + column];
        if (few) {
          add_weighted<T, kFewRows, both>(num_rows, weights, values_, first, count, column, sums,
                                          width_, ahead_);
        } else {
          add_weighted<T, kTileRows>(num_rows, weights, values_, first, count, column, sums,
                                     width_, ahead_);
        }
      }
      return;
    }
    pack_values(values_, first, count, width_, scratch_.values.data());
    for (int64_t panel = 0; panel < width_ / kPanel; panel++)
      for_tiles(num_rows, [&](int64_t begin, int rows) {
        begin += first_row;
        tile(rows, weights_of(begin) + first, kSpan,
             scratch_.values.data() + (panel * kSpan + first) * kPanel, count - first,
             &scratch_.sums[begin * width_ + panel * kPanel], width_, true);
      });
  }

  const AttentionTask& task_;
  const AttentionTask* next_;  // what this thread does afterwards, or null
  const Batch& batch_;
  const AttentionShape& shape_;
  const LayerCache& cache_;
  AttentionScratch<T>& scratch_;
  const BlockMass& mass_;
  const int64_t dim_, group_, width_, num_rows_;
  SpanAhead ahead_;
  // Of the span at hand.
  const T* keys_[kSpan];
  const T* panels_[kSpan / kKeyPanel];  // of keys that lie so in the cache
  const T* values_[kSpan];  // [width], zeros where nobody sees them
  alignas(64) float key_scales_[kSpan];
  alignas(64) float value_scales_[kSpan];
};

template <class T, class S, bool kPanels, class Done>
void attention_over(Team& team, int64_t number, const AttentionWork& work, const Batch& batch,
                    const AttentionShape& shape, const LayerCache& cache, const T* query, T* out,
                    float* partials, AttentionScratch<T>& scratch, const BlockMass& mass,
                    const Done& done) {
  team.share(number, work.tasks.size(), 1, [&](int64_t i, int64_t next) {
    Attention<T, S, kPanels>(work.tasks[i], batch, shape, cache, scratch, mass,
                             next < 0 ? nullptr : &work.tasks[next])
        .run(query, out, partials);
    if (work.tasks[i].partial < 0) done(work.tasks[i]);
  });
  if (work.merges.empty()) return;
  team.share(number + 1, work.merges.size(), 1, [&](int64_t i) {
    Attention<T, S, kPanels>(work.merges[i], batch, shape, cache, scratch, mass)
        .merge_partials(out, partials);
    done(work.merges[i]);
  });
}

// Tasks and then merges of one layer; takes operations `number` and `number + 1` of the team.
// done(task): what a thread does when it has the whole result of one.
template <class T, class Done = NothingMore>
void attention(Team& team, int64_t number, const AttentionWork& work, const Batch& batch,
               const AttentionShape& shape, const LayerCache& cache, const T* query, T* out,
               float* partials, AttentionScratch<T>& scratch, const BlockMass& mass,
               const Done& done = {}) {
  with_stored(cache.type, [&](auto* tag) {
    using S = std::remove_pointer_t<decltype(tag)>;
    if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<S, float>) {
      // Refused where the cache is made: bfloat16 queries would not match such keys.
    } else {
      constexpr bool fits = std::is_same_v<T, BFloat16> && std::is_same_v<S, BFloat16>;
      if (fits && cache.keys_in_panels)
        attention_over<T, S, fits>(team, number, work, batch, shape, cache, query, out, partials,
                                   scratch, mass, done);
      else
        attention_over<T, S, false>(team, number, work, batch, shape, cache, query, out, partials,
                                    scratch, mass, done);
    }
  });
}

}  // namespace shoal
