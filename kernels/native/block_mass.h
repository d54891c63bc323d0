// How much attention each block of a sequence got, for those who ask: the squares of the shares that
// it had of each query's weights, head by head, as in attention_mass.py.
#pragma once

#include <cmath>
#include <vector>

#include "vec.h"

namespace shoal {

constexpr int64_t kSpan = 64;  // positions of the context that are weighed together
constexpr double kMassOne = 4294967296.0;  // MASS_ONE of attention_mass.py

// How much attention each block of a sequence got. Whole numbers: their sum is the same in whatever
// order the threads add them, and however the queries came to be spread over steps.
struct BlockMass {
  int64_t* units = nullptr;  // [num_seqs, max_blocks], in 1 / kMassOne; null: nobody asks

  void add(int64_t index, int64_t value) const {
    if (value) __atomic_fetch_add(units + index, value, __ATOMIC_RELAXED);
  }
};

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

  // Keys first to count of the span that begins at `start` are seen.
  void begin_span(int64_t start, int64_t first, int64_t count) {
    first_piece_ = pieces_.size();
    for (int64_t i = first; i < count;) {
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
    for (size_t i = 0, next; i < pieces_.size(); i = next) {
      for (next = i + 1; next < pieces_.size() && pieces_[next].block == pieces_[i].block;) next++;
      int64_t units = 0;
      for (int64_t row = 0; row < num_rows; row++) {
        float share = 0.0f;
        for (size_t piece = i; piece < next; piece++) {
          const float raw = sums_[row * num_pieces_ + piece];
          if (!(raw > 0.0f)) continue;  // unseen, or NaN: the sequence fails anyway
          const float shrink = maxima_[row * num_spans_ + pieces_[piece].span] - row_maxima[row];
          share += raw * exponential(splat(shrink))[0] / totals[row];
        }
        if (share <= 1.5f) units += std::llrint(double(share) * share * kMassOne);
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

}  // namespace shoal
