// From a row of logits to a token: what backend/sampler.py does, in a few passes over the row.
//
// The steps, their order and their roundings are those of the reference: probabilities are float32,
// become whole numbers of 1 / 2^40, and from then on everything is exact. Only exp and the order of
// the sum of exps differ, by some units in the last place: a draw falls on another token where its
// point lies that near to the edge between two, about once in a million.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace shoal {

constexpr int kRandomBits = 52;                     // NUM_RANDOM_BITS of philox.py
constexpr float kWeightOne = 1099511627776.0f;      // WEIGHT_ONE of sampler.py: 2^40
constexpr int64_t kSampleBlock = 64;                // tokens that are summed together

struct SampleParams {
  float temperature;  // 0: the likeliest token
  float reserved;
  double top_p, min_p;
  int64_t top_k;  // 0: all
  int64_t random_bits;
};

class SampleScratch {
 public:
  // The token, or -1 where the best logit is no finite number.
  int64_t sample(const float* logits, int64_t vocab_size, const SampleParams& params) {
    size_ = vocab_size;
    if (params.temperature == 0.0f) return likeliest(logits);
    num_blocks_ = (vocab_size + kSampleBlock - 1) / kSampleBlock;
    const float best = maximum_or_nan(logits);
    if (!std::isfinite(best)) return -1;
    values_.resize(num_blocks_ * kSampleBlock);
    block_maxima_.resize(num_blocks_);
    scale(logits, best, params.temperature);
    const float lowest = params.top_k > 0 && params.top_k < size_
                             ? kth_largest(params.top_k)
                             : -std::numeric_limits<float>::infinity();
    to_weights(lowest);
    int64_t threshold = 1;
    if (params.top_p < 1.0) threshold = std::max(threshold, top_p_threshold(params.top_p));
    if (params.min_p > 0.0) {
      const double floor = std::ceil(double(int64_t(largest_weight())) * params.min_p);
      threshold = std::max(threshold, int64_t(floor));
    }
    return draw(threshold, params.random_bits);
  }

 private:
  // The first of the largest, or -1 if that is no finite number; in one pass.
  int64_t likeliest(const float* logits) const {
    constexpr int kChains = 4;  // that need not wait for each other
    constexpr int64_t kStep = kChains * kLanes;
    Vec high[kChains];
    IntVec at[kChains] = {}, nans = {};
    for (Vec& lane : high) lane = splat(-std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kStep <= size_; i += kStep)
      for (int chain = 0; chain < kChains; chain++) {
        const Vec x = load(logits + i + chain * kLanes);
        const auto better = x > high[chain];
        high[chain] = better ? x : high[chain];
        at[chain] = better ? IntVec{} + int32_t(i) : at[chain];
        nans |= x != x;
      }
    float best = -std::numeric_limits<float>::infinity();
    int64_t token = -1;
    for (int lane = 0; lane < kStep; lane++) {
      const float value = high[lane / kLanes][lane % kLanes];
      const int64_t where = at[lane / kLanes][lane % kLanes] + lane;
      if (nans[lane % kLanes]) return -1;
      if (value > best || (value == best && where < token)) {
        best = value;
        token = where;
      }
    }
    for (; i < size_; i++) {
      if (logits[i] != logits[i]) return -1;
      if (logits[i] > best) {
        best = logits[i];
        token = i;
      }
    }
    return std::isfinite(best) ? token : -1;
  }

  float maximum_or_nan(const float* logits) const {
    Vec high = splat(-std::numeric_limits<float>::infinity());
    IntVec nans = {};
    int64_t i = 0;
    for (; i + kLanes <= size_; i += kLanes) {
      const Vec x = load(logits + i);
      high = maximum(high, x);
      nans |= x != x;
    }
    float best = max_lanes(high);
    bool has_nan = false;
    for (int lane = 0; lane < kLanes; lane++) has_nan |= nans[lane] != 0;
    for (; i < size_; i++) {
      best = std::max(best, logits[i]);
      has_nan |= logits[i] != logits[i];
    }
    return has_nan ? std::nanf("") : best;
  }

  // values: logits relative to the best, over the temperature; padded with what weighs nothing.
  void scale(const float* logits, float best, float temperature) {
    float* values = values_.data();
    for (int64_t i = 0; i < size_; i++) values[i] = (logits[i] - best) / temperature;
    for (size_t i = size_; i < values_.size(); i++)
      values[i] = -std::numeric_limits<float>::infinity();
    for (int64_t block = 0; block < num_blocks_; block++) {
      Vec high = load(values + block * kSampleBlock);
      for (int64_t i = kLanes; i < kSampleBlock; i += kLanes)
        high = maximum(high, load(values + block * kSampleBlock + i));
      block_maxima_[block] = max_lanes(high);
    }
  }

  float kth_largest(int64_t k) {
    // Of k blocks' maxima the least: at least k values are no less.
    float bound = -std::numeric_limits<float>::infinity();
    if (k <= num_blocks_) {
      candidates_ = block_maxima_;
      std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(),
                       std::greater<float>());
      bound = candidates_[k - 1];
    }
    candidates_.clear();
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (block_maxima_[block] < bound) continue;
      const float* values = values_.data() + block * kSampleBlock;
      const int64_t count = std::min(kSampleBlock, size_ - block * kSampleBlock);
      for (int64_t i = 0; i < count; i++)
        if (values[i] >= bound) candidates_.push_back(values[i]);
    }
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(),
                     std::greater<float>());
    return candidates_[k - 1];
  }

  // values: probabilities times 2^40, of what is no less than `lowest`.
  void to_weights(float lowest) {
    float* values = values_.data();
    Vec sums{};
    for (size_t i = 0; i < values_.size(); i += kLanes) {
      const Vec x = load(values + i);
      const Vec weight = x < splat(lowest) ? Vec{} : exponential(x);
      store(values + i, weight);
      sums += weight;
    }
    const Vec total = splat(sum_lanes(sums));
    for (size_t i = 0; i < values_.size(); i += kLanes)
      store(values + i, load(values + i) / total * splat(kWeightOne));
    for (int64_t block = 0; block < num_blocks_; block++)
      block_maxima_[block] = *std::max_element(values + block * kSampleBlock,
                                               values + (block + 1) * kSampleBlock);
  }

  float largest_weight() const {
    return *std::max_element(block_maxima_.begin(), block_maxima_.end());
  }

  // Sums of the weights that reach the threshold, by block; returns the sum of all.
  int64_t sum_blocks(int64_t threshold) {
    block_sums_.resize(num_blocks_);
    int64_t total = 0;
    for (int64_t block = 0; block < num_blocks_; block++) {
      int64_t sum = 0;
      if (int64_t(block_maxima_[block]) >= threshold) {
        const float* values = values_.data() + block * kSampleBlock;
        for (int64_t i = 0; i < kSampleBlock; i++) {
          const int64_t weight = int64_t(values[i]);
          sum += weight >= threshold ? weight : 0;
        }
      }
      block_sums_[block] = sum;
      total += sum;
    }
    return total;
  }

  // The weight at which the sum of the likeliest tokens reaches its share of the whole.
  int64_t top_p_threshold(double top_p) {
    const int64_t total = sum_blocks(1);
    const int64_t target = std::max<int64_t>(1, int64_t(std::ceil(double(total) * top_p)));
    // Few tokens are enough as a rule: look at ever less likely ones until they are.
    float bound = largest_weight();
    do {
      bound *= 1.0f / 64.0f;
      const int64_t least = std::max<int64_t>(1, int64_t(bound));
      ordered_.clear();
      int64_t sum = 0;
      for (int64_t block = 0; block < num_blocks_; block++) {
        if (int64_t(block_maxima_[block]) < least) continue;
        const float* values = values_.data() + block * kSampleBlock;
        for (int64_t i = 0; i < kSampleBlock; i++) {
          const int64_t weight = int64_t(values[i]);
          if (weight < least) continue;
          ordered_.push_back(weight);
          sum += weight;
        }
      }
      if (sum < target) continue;
      std::sort(ordered_.begin(), ordered_.end(), std::greater<int64_t>());
      int64_t left = target;
      for (const int64_t weight : ordered_)
        if ((left -= weight) <= 0) return weight;
    } while (bound >= 1.0f);
    return 1;
  }

  // The first token at which the running sum of weights exceeds the random point.
  int64_t draw(int64_t threshold, int64_t random_bits) {
    const int64_t total = sum_blocks(threshold);
    int64_t left = int64_t((__int128)random_bits * total >> kRandomBits);
    int64_t block = 0;
    while (block_sums_[block] <= left) left -= block_sums_[block++];
    const float* values = values_.data() + block * kSampleBlock;
    for (int64_t i = 0;; i++) {
      const int64_t weight = int64_t(values[i]);
      if (weight < threshold) continue;
      if (weight > left) return block * kSampleBlock + i;
      left -= weight;
    }
  }

  int64_t size_ = 0, num_blocks_ = 0;
  std::vector<float> values_;        // [blocks * kSampleBlock]
  std::vector<float> block_maxima_;  // of values
  std::vector<int64_t> block_sums_;
  std::vector<float> candidates_;
  std::vector<int64_t> ordered_;
};

}  // namespace shoal
