// Rows of logits under masks of a bit a token.
#pragma once

#include <cstdint>
#include <limits>

namespace shoal {

// Sets to -inf what the mask leaves out. mask [(vocab_size + 31) / 32] words, the lowest bit first.
inline void mask_row(float* logits, int64_t vocab_size, const uint32_t* mask) {
  constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < vocab_size; first += 32) {
    const uint32_t word = mask[first / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t count = vocab_size - first < 32 ? vocab_size - first : 32;
    float* part = logits + first;
    for (int64_t i = 0; i < count; ++i) part[i] = (word >> i) & 1 ? part[i] : kForbidden;
  }
}

}  // namespace shoal
