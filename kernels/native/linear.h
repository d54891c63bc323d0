// Products with packed weights, and what is done to each tile before it leaves the registers.
#pragma once

#include "quantized.h"
#include "team.h"

namespace shoal {

enum class Epilogue : int32_t {
  kStore = 0,    // out = sum + bias
  kAdd = 1,      // out += sum + bias: the residual connection
  kSiluMul = 2,  // out = silu(gate) * up; a panel holds 16 columns of gate, then the same 16 of up
  kGeluMul = 3,  // out = gelu(gate) * up, with the tanh form of GELU; the same panels
  kStoreFar = 4, // as kStore, where `out` is larger than what the caches should hold
};

struct Linear {
  const void* weight;  // packed panels
  const float* bias;   // [n], in the order of the panels' columns, or null
  int64_t n;           // columns that the panels hold: when gated twice those of the output
  int64_t k;
  Format format = Format::kDense;
  int64_t group = 0;                 // int4: columns that share a scale
  const int64_t* columns = nullptr;  // int4: the feature of each column, or null for their order
};

// Pieces of two large buffers, in order, that a thread reads after the products at hand: each tile
// fetches one piece of both, or of one of them where it asks by lines.
struct Pieces {
  const char* buffers[2] = {nullptr, nullptr};
  int64_t num_bytes = 0;  // of a piece
  const int64_t* next = nullptr;  // offsets in both
  const int64_t* end = nullptr;
  int turn = 0;  // whose piece is given next, where one at a time is

  void give(Ahead& ahead, int64_t num_steps) {
    if (next == end || !ahead.begin || num_steps < 2) return;
    ahead.add(buffers[0] + *next, buffers[1] + *next, num_bytes, num_steps);
    next++;
  }

  void give_lines(Ahead& ahead, int64_t num_steps) {
    if (next == end || !ahead.begin) return;
    ahead.add_lines(buffers[turn] + *next, num_bytes, num_steps);
    next += turn;
    turn = 1 - turn;
  }
};

// Bytes that a thread will read soon, and what comes after them.
struct Soon {
  const char* begin = nullptr;
  int64_t num_bytes = 0;
  Pieces* pieces = nullptr;
};

template <class T>
void pack(const T* source, T* target, int64_t n, int64_t k) {
  const int64_t num_panels = (n + kPanel - 1) / kPanel;
  constexpr int64_t group = 4 / sizeof(T);  // k values that lie side by side
  constexpr int64_t kBlock = 64;            // of k, so that what is being written stays in cache
#pragma omp parallel for
  for (int64_t panel = 0; panel < num_panels; panel++) {
    T* out = target + panel * panel_elements<T>(k);
    for (int64_t start = 0; start < padded_k(k, T{}); start += kBlock)
      for (int64_t column = 0; column < kPanel; column++) {
        const int64_t row = panel * kPanel + column;
        for (int64_t i = start; i < std::min(start + kBlock, padded_k(k, T{})); i++)
          out[(i / group * kPanel + column) * group + i % group] =
              row < n && i < k ? source[row * k + i] : T{};
      }
  }
}

inline bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::kSiluMul || epilogue == Epilogue::kGeluMul;
}

inline Vec silu(Vec x) { return x / (splat(1.0f) + exponential(-x)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2u).
inline Vec gelu_tanh(Vec x) {
  const Vec twice_u = x * splat(1.5957691216057308f) *
                      multiply_add(x * x, splat(0.044715f), splat(1.0f));
  return x / (splat(1.0f) + exponential(-twice_u));
}

constexpr int kHalfPanel = kPanel / 2;

template <class T>
inline void store_gated(Epilogue epilogue, const float* row, const float* bias, T* out,
                        int64_t columns) {
  store_each(columns, out, [&](int64_t i) {
    Vec gate = load(row + i), up = load(row + kHalfPanel + i);
    if (bias) {
      gate += load(bias + i);
      up += load(bias + kHalfPanel + i);
    }
    const Vec activated = epilogue == Epilogue::kSiluMul ? silu(gate) : gelu_tanh(gate);
    return activated * up;
  });
}

inline void store_sum(const float* row, const float* bias, float* out, int64_t columns,
                      Epilogue epilogue) {
  const bool add = epilogue == Epilogue::kAdd;
  if (columns == kPanel && !bias) {
    const bool far = epilogue == Epilogue::kStoreFar && uintptr_t(out) % sizeof(Vec) == 0;
    for (int64_t i = 0; far && i < kPanel; i += kLanes) store_past_caches(out + i, load(row + i));
    for (int64_t i = 0; !far && i < kPanel; i += kLanes) {
      const Vec sum = load(row + i);
      store(out + i, add ? load(out + i) + sum : sum);
    }
    return;
  }
  for (int64_t i = 0; i < columns; i++) {
    const float sum = bias ? row[i] + bias[i] : row[i];
    out[i] = add ? out[i] + sum : sum;
  }
}

// A tile's sums on their way out: rows [begin, begin + rows) of a panel's columns.
template <class T>
inline void store_tile(Epilogue epilogue, int64_t panel, const float* sums, const float* bias,
                       int64_t begin, int rows, void* out, int64_t out_width) {
  for (int row = 0; row < rows; row++) {
    const int64_t to = (begin + row) * out_width;
    if (is_gated(epilogue)) {
      const int64_t column = panel * kHalfPanel;
      store_gated(epilogue, sums + row * kPanel, bias, static_cast<T*>(out) + to + column,
                  std::min<int64_t>(kHalfPanel, out_width - column));
    } else {
      const int64_t column = panel * kPanel;
      store_sum(sums + row * kPanel, bias, static_cast<float*>(out) + to + column,
                std::min<int64_t>(kPanel, out_width - column), epilogue);
    }
  }
}

// Asks for the lines that store_tile will write, as another core may have them: where sums are added
// to them each would be waited for.
template <class T>
inline void claim_tile(Epilogue epilogue, int64_t panel, int64_t begin, int rows, char* out,
                       int64_t out_width) {
  if (epilogue == Epilogue::kStoreFar) return;
  const int64_t size = is_gated(epilogue) ? sizeof(T) : sizeof(float);
  const int64_t bytes = size * (is_gated(epilogue) ? kHalfPanel : kPanel);
  for (int row = 0; row < rows; row++) {
    const char* to = out + (begin + row) * out_width * size + panel * bytes;
    __builtin_prefetch(to, 1, 3);
    if (bytes > 64) __builtin_prefetch(to + 64, 1, 3);
  }
}

// Rows [first, first + count) of a product, one panel of its columns, tile by tile:
// multiply(rows, a, sums, ahead) computes one.
template <class T, class Multiply>
void linear_tiles(const Linear& op, Epilogue epilogue, int64_t panel, const char* a, int64_t first,
                  int64_t count, void* out, int64_t out_width, const Soon& soon,
                  Multiply multiply) {
  const int64_t a_stride = row_bytes<T>(op.format, op.k, op.group);
  const float* bias = op.bias ? op.bias + panel * kPanel : nullptr;
  alignas(64) float sums[kTileRows * kPanel];
  const int most = tile_rows(op.format);
  const int64_t num_tiles = tiles_of(count, most);
  const int64_t weight_stride = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t num_steps = fetch_steps(op.format, op.k, op.group, weight_stride / 128);
  int64_t tile = 0;
  for_tiles(count, [&](int64_t begin, int rows) {
    begin += first;
    Ahead ahead = ahead_of_tile(op.format, op.k, op.group, weight_stride, soon.begin,
                                soon.num_bytes, tile++, num_tiles);
    if (soon.pieces) {
      if (has_prepared_rows(op.format))
        soon.pieces->give_lines(ahead, num_steps);
      else
        soon.pieces->give(ahead, num_steps);
    }
    claim_tile<T>(epilogue, panel, begin, rows, static_cast<char*>(out), out_width);
    multiply(rows, a + begin * a_stride, sums, ahead);
    store_tile<T>(epilogue, panel, sums, bias, begin, rows, out, out_width);
  }, most);
}

// As linear_panel, or false where the panel does not suit; apart, for the size of its stack.
template <class T>
__attribute__((noinline)) bool unpacked_panel(const Linear& op, Epilogue epilogue, int64_t panel,
                                              const char* weight, const char* a, int64_t first,
                                              int64_t count, void* out, int64_t out_width,
                                              const Soon& soon) {
  Int4Unpacked unpacked;
  if (!unpacked.read(weight, op.k, op.group, op.format == Format::kInt4Short)) return false;
  const int64_t a_stride = row_bytes<T>(op.format, op.k, op.group);
  linear_tiles<T>(op, epilogue, panel, a, first, count, out, out_width, soon,
                  [&](int rows, const char* states, float* sums, const Ahead& ahead) {
                    unpacked_tile(rows, states, a_stride, unpacked, op.k, op.group, sums, ahead);
                  });
  return true;
}

// Rows [first, first + count) of a product, one panel of its columns.
// a: rows of row_bytes(): states of T, or prepared ones. out: float [num_rows, n], when gated
// T [num_rows, n / 2 (out_width)].
template <class T>
void linear_panel(const Linear& op, Epilogue epilogue, int64_t panel, const char* a, int64_t first,
                  int64_t count, void* out, int64_t out_width, const Soon& soon = {}) {
  const int64_t a_stride = row_bytes<T>(op.format, op.k, op.group);
  const int64_t weight_stride = panel_bytes<T>(op.format, op.k, op.group);
  const char* weight = static_cast<const char*>(op.weight) + panel * weight_stride;
  if (is_int4(op.format) &&
      Int4Unpacked::suits(tiles_of(count, tile_rows(op.format)), op.k, op.group) &&
      unpacked_panel<T>(op, epilogue, panel, weight, a, first, count, out, out_width, soon))
    return;
  linear_tiles<T>(op, epilogue, panel, a, first, count, out, out_width, soon,
                  [&](int rows, const char* states, float* sums, const Ahead& ahead) {
                    format_tile<T>(op.format, rows, states, a_stride, weight, op.k, op.group, sums,
                                   ahead);
                  });
}

template <class T>
int64_t num_panels(const Linear& op) {
  return (op.n + kPanel - 1) / kPanel;
}

// The first panel that a thread will read of a product.
template <class T>
Soon first_panel(const Team& team, const Linear& op) {
  const int64_t bytes = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t panel = team.first_task(omp_get_thread_num(), num_panels<T>(op));
  return {static_cast<const char*>(op.weight) + panel * bytes, bytes};
}

// Whether a thread's panels, which follow one another in memory, are best left to the processor's
// own reading ahead: one tile of few rows takes a panel at memory's speed, and our requests only
// take places in the queue (38 instead of 50 GB/s). More rows compute for so long at a small panel's
// end that it gives up.
inline bool hardware_reads_ahead(int64_t num_rows, int64_t panel_bytes) {
  return num_rows <= 4 || (num_rows <= kTileRows && panel_bytes >= 64 * 1024);
}

// Blocks of rows, whose states stay in the second-level cache.
inline int64_t blocks_of(int64_t num_rows) { return tiles_of(num_rows, 16 * kTileRows); }

struct NothingMore {
  template <class... Things>
  void operator()(const Things&...) const {}
};

// then: what the thread reads after its last panel. done(block, panel, first, count): what it does
// with rows [first, first + count), one of the blocks of rows, when it has a panel's columns of them.
template <class T, class Done = NothingMore>
void linear(Team& team, int64_t operation, const Linear& op, Epilogue epilogue, const char* a,
            int64_t num_rows, void* out, int64_t out_width, const Soon& then = {},
            const Done& done = {}) {
  const int64_t panels = num_panels<T>(op), bytes = panel_bytes<T>(op.format, op.k, op.group);
  const int64_t num_blocks = blocks_of(num_rows);
  const bool streams = op.format == Format::kDense && hardware_reads_ahead(num_rows, bytes);
  team.share(operation, panels * num_blocks, 1, [&](int64_t task, int64_t next) {
    const int64_t block = task / panels;
    const int64_t first = num_rows * block / num_blocks;
    const int64_t count = num_rows * (block + 1) / num_blocks - first;
    const char* weight = static_cast<const char*>(op.weight);
    const Soon soon = next < 0 ? then
                      : streams ? Soon{}
                                : Soon{weight + next % panels * bytes, bytes, then.pieces};
    linear_panel<T>(op, epilogue, task % panels, a, first, count, out, out_width, soon);
    done(block, task % panels, first, count);
  });
}

}  // namespace shoal
