// A mixture of experts: which rows go through which expert, and the products of each expert's rows.
//
// Rows are (token, rank) pairs, sorted by expert. What a token gets depends on its own row alone:
// products sum in their own order, and its experts are added in the order of their ranks.
#pragma once

#include "linear.h"

namespace shoal {

// The `num_chosen` largest of `logits`, ties to the lower index, and their softmax over all experts;
// normalised: over the chosen ones. Each is then times its expert's factor, where there are any.
inline void choose_experts(const float* logits, int64_t num_experts, int64_t num_chosen,
                           bool normalize, const float* factors, int32_t* chosen,
                           float* weights) {
  float total = 0.0f, best = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < num_experts; i++) best = std::max(best, logits[i]);
  for (int64_t i = 0; i < num_experts; i++) total += std::exp(logits[i] - best);
  float kept = 0.0f;
  for (int64_t rank = 0; rank < num_chosen; rank++) {
    int64_t at = -1;
    for (int64_t i = 0; i < num_experts; i++) {
      const bool taken = std::find(chosen, chosen + rank, int32_t(i)) != chosen + rank;
      if (!taken && (at < 0 || logits[i] > logits[at])) at = i;
    }
    chosen[rank] = int32_t(at);
    weights[rank] = std::exp(logits[at] - best) / total;
    kept += weights[rank];
  }
  if (normalize)
    for (int64_t rank = 0; rank < num_chosen; rank++) weights[rank] /= kept;
  if (factors)
    for (int64_t rank = 0; rank < num_chosen; rank++) weights[rank] *= factors[chosen[rank]];
}

// The rows of one step, in the order of their experts.
struct ExpertRows {
  struct Block {
    int64_t expert, first, count;  // rows [first, first + count)
  };
  static constexpr int64_t kBlockRows = 16 * kTileRows;

  std::vector<int32_t> chosen;   // [num_tokens, num_chosen]
  std::vector<float> weights;    // [num_tokens, num_chosen]
  std::vector<int64_t> row_of;   // [num_tokens, num_chosen]
  std::vector<int64_t> token_of; // [rows]
  std::vector<Block> blocks;
  int64_t num_rows = 0;

  void resize(int64_t num_tokens, int64_t num_chosen) {
    num_rows = num_tokens * num_chosen;
    if (int64_t(chosen.size()) >= num_rows) return;
    chosen.resize(num_rows);
    weights.resize(num_rows);
    row_of.resize(num_rows);
    token_of.resize(num_rows);
  }

  void sort(int64_t num_experts, int64_t num_chosen) {
    std::vector<int64_t> next(num_experts + 1);
    for (int64_t i = 0; i < num_rows; i++) next[chosen[i] + 1]++;
    blocks.clear();
    for (int64_t expert = 0; expert < num_experts; expert++) {
      const int64_t first = next[expert], count = next[expert + 1];
      next[expert + 1] += first;
      for (int64_t done = 0; done < count; done += kBlockRows)
        blocks.push_back({expert, first + done, std::min(kBlockRows, count - done)});
    }
    for (int64_t i = 0; i < num_rows; i++) {
      row_of[i] = next[chosen[i]]++;
      token_of[row_of[i]] = i / num_chosen;
    }
  }
};

// The product of each expert's rows of `a` with its own weight; the weights lie one after another.
template <class T>
void expert_linear(Team& team, int64_t operation, const Linear& op,
                   Epilogue epilogue, const ExpertRows& rows, const char* a, void* out,
                   int64_t out_width) {
  const int64_t panels = num_panels<T>(op), bytes = panel_bytes<T>(op.format, op.k, op.group);
  const auto weight_of = [&](int64_t task) {
    return static_cast<const char*>(op.weight) + rows.blocks[task / panels].expert * panels * bytes;
  };
  team.share(operation, panels * rows.blocks.size(), 1, [&](int64_t task, int64_t next) {
    const ExpertRows::Block& block = rows.blocks[task / panels];
    Linear own = op;
    own.weight = weight_of(task);
    const Soon soon = next < 0 ? Soon{} : Soon{weight_of(next) + next % panels * bytes, bytes};
    linear_panel<T>(own, epilogue, task % panels, a, block.first, block.count, out, out_width,
                    soon);
  });
}

}  // namespace shoal
