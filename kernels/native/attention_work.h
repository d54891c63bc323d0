// How the attention of a ragged batch is cut into tasks, and whose they are.
#pragma once

#include <utility>
#include <vector>

#include "rows.h"

namespace shoal {

constexpr int64_t kSplit = 512;
constexpr int64_t kTaskRows = 48;   // query heads x tokens that share the spans they read
constexpr int64_t kPartialHead = 16;  // floats before a partial row's values: maximum and total

// Sequence i has query_lens[i] new tokens, the last of its context_lens[i].
struct Batch {
  int64_t num_seqs, max_blocks, block_size;
  const int64_t* block_tables;  // [num_seqs, max_blocks]
  const int64_t* query_lens;
  const int64_t* context_lens;
};

struct AttentionShape {
  HeadShape heads;
  int64_t window;  // a query at p sees (p - window, p]; 0: all up to p
  float scale;
  float softcap;  // scores are softcap * tanh(score / softcap); 0: as they are

  bool same_tasks(const AttentionShape& other) const {
    return heads.num_heads == other.heads.num_heads && window == other.window &&
           heads.num_kv_heads == other.heads.num_kv_heads &&
           heads.head_dim == other.heads.head_dim;
  }

  int64_t padded_dim() const { return (heads.head_dim + kPanel - 1) / kPanel * kPanel; }
};

// Some neighbouring tokens of one sequence, for the query heads of some key/value heads.
struct AttentionTask {
  int64_t seq, first_row, first_index, num_tokens, kv_head, num_kv_heads;
  int64_t first_split, end_split;
  int64_t partial = -1;  // where the result goes that is yet to be merged; -1: it is whole

  int64_t end() const { return first_index + num_tokens; }

  // The first cache index that the token sees.
  int64_t lowest(int64_t token, int64_t window) const {
    return window ? std::max<int64_t>(0, first_index + token - window + 1) : 0;
  }

  // Tokens first to second see something of begin to end.
  std::pair<int64_t, int64_t> tokens_that_see(int64_t begin, int64_t end, int64_t window) const {
    const int64_t first = std::clamp<int64_t>(begin - first_index, 0, num_tokens);
    const int64_t last =
        window ? std::clamp<int64_t>(end + window - 1 - first_index, first, num_tokens)
               : num_tokens;
    return {first, last};
  }

  int64_t cost(int64_t window) const {
    return (end() - lowest(0, window)) * num_tokens * num_kv_heads;
  }
};

struct AttentionWork {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;  // of tasks that were split
  int64_t num_partials = 0;           // floats
  // Blocks that single tokens attend to, by thread, in its order: offsets in the layer's cache.
  std::vector<std::vector<int64_t>> blocks;
};

// Tasks of single tokens read their keys and values once. Where so many rows are computed that
// products leave memory idle, it is they that fetch them.
constexpr int64_t kBusyRows = 24;

inline void find_blocks(AttentionWork& work, const Batch& batch, const AttentionShape& shape,
                        int64_t block_bytes, const Team& team) {
  const int64_t num_tasks = work.tasks.size();
  work.blocks.assign(team.num_threads(), {});
  for (int64_t thread = 0; thread < team.num_threads(); thread++)
    for (int64_t i = team.first_task(thread, num_tasks);
         i < team.first_task(thread + 1, num_tasks); i++) {
      const AttentionTask& task = work.tasks[i];
      if (task.num_tokens > 1 || task.num_kv_heads < shape.heads.num_kv_heads) continue;
      const int64_t begin = std::max(task.first_split * kSplit, task.lowest(0, shape.window));
      const int64_t end = std::min(task.end_split * kSplit, task.end());
      const int64_t* blocks = batch.block_tables + task.seq * batch.max_blocks;
      for (int64_t block = begin / batch.block_size; block * batch.block_size < end; block++)
        work.blocks[thread].push_back(blocks[block] * block_bytes);
    }
}

// Each thread's own tasks are neighbours: those that are in turn must become so.
inline void deal_out(std::vector<AttentionTask>& tasks, int64_t num_threads) {
  const int64_t count = tasks.size();
  std::vector<AttentionTask> dealt;
  dealt.reserve(count);
  for (int64_t thread = 0; thread < num_threads; thread++)
    for (int64_t i = num_threads - 1 - thread; i < count; i += num_threads)
      dealt.push_back(tasks[i]);
  tasks = std::move(dealt);
}

inline AttentionWork attention_work(const Batch& batch, const AttentionShape& shape,
                                    int64_t num_threads, bool may_split) {
  const int64_t group = shape.heads.group();
  const int64_t most = std::max<int64_t>(1, kTaskRows / group);
  const int64_t num_kv_heads = shape.heads.num_kv_heads;
  // Heads that share a task read what lies side by side in memory.
  const bool may_share = may_split && batch.num_seqs >= 4 * num_threads;
  AttentionWork work;
  int64_t row = 0, total = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; seq++) {
    const int64_t count = batch.query_lens[seq];
    if (count == 0) continue;  // of rows that are sampled a sequence may have none
    const int64_t start = batch.context_lens[seq] - count;
    const int64_t together =
        may_share ? std::clamp<int64_t>(kTaskRows / (std::min(most, count) * group), 1, num_kv_heads)
                  : 1;
    for (int64_t first = 0; first < count; first += most)
      for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head += together) {
        AttentionTask task{seq, row + first, start + first, std::min(most, count - first),
                           kv_head, std::min(together, num_kv_heads - kv_head), 0, 0};
        task.first_split = task.lowest(0, shape.window) / kSplit;
        task.end_split = (task.end() + kSplit - 1) / kSplit;
        total += task.cost(shape.window);
        work.tasks.push_back(task);
      }
    row += count;
  }
  // The longest first: threads that help each other then end together.
  std::stable_sort(work.tasks.begin(), work.tasks.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) {
                     return a.cost(shape.window) > b.cost(shape.window);
                   });
  if (num_threads == 1) return work;
  if (!may_split) {
    deal_out(work.tasks, num_threads);
    return work;
  }
  // Tasks that are a large part of the whole are split, so that no thread waits for another's.
  std::vector<AttentionTask> parts;
  for (const AttentionTask& task : work.tasks) {
    const int64_t num_splits = task.end_split - task.first_split;
    if (num_splits == 1 || task.cost(shape.window) * num_threads * 4 <= total) {
      parts.push_back(task);
      continue;
    }
    work.merges.push_back(task);
    work.merges.back().partial = work.num_partials;
    for (int64_t split = task.first_split; split < task.end_split; split++) {
      AttentionTask part = task;
      part.first_split = split;
      part.end_split = split + 1;
      part.partial = work.num_partials;
      work.num_partials +=
          task.num_tokens * group * task.num_kv_heads * (kPartialHead + shape.padded_dim());
      parts.push_back(part);
    }
  }
  work.tasks = std::move(parts);
  deal_out(work.tasks, num_threads);
  return work;
}

}  // namespace shoal
