// The plain C interface. Types of weights and states: 0 is float32, 1 is bfloat16.
//
// Functions that allocate return 0, or 1 when memory ran out; nothing is thrown across.

#include <new>

#include "plan.h"

using namespace shoal;

namespace {

template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// Calls body with a value of the type that `type` stands for.
template <class Body>
void with_type(int type, Body body) {
  if (type == 0)
    body(float{});
  else
    body(BFloat16{});
}

}  // namespace

extern "C" {

// Which instructions this build uses: for the log.
const char* shoal_instructions() {
#if defined(__AVX512F__) && defined(__AVX512BF16__)
  return "AVX-512 with bf16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "AVX2";
#else
  return "portable";
#endif
}

int64_t shoal_packed_elements(int type, int64_t n, int64_t k) {
  int64_t out = 0;
  with_type(type, [&](auto t) {
    out = (n + kPanel - 1) / kPanel * panel_elements<decltype(t)>(k);
  });
  return out;
}

// source [n, k], row by row.
void shoal_pack(int type, const void* source, void* target, int64_t n, int64_t k) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    pack(static_cast<const T*>(source), static_cast<T*>(target), n, k);
  });
}

int shoal_linear(int type, int num_threads, const void* weight, const float* bias, int64_t n,
                 int64_t k, int epilogue, const void* states, int64_t num_rows, void* out,
                 int64_t out_width) {
  return guarded([&] {
    Team team(1);
    with_type(type, [&](auto t) {
#pragma omp parallel num_threads(num_threads)
      linear(team, 0, omp_get_num_threads(), Linear{weight, bias, n, k}, Epilogue(epilogue),
             static_cast<const decltype(t)*>(states), num_rows, out, out_width);
    });
  });
}

void shoal_rms_norm(int type, const float* in, const float* weight, float eps, int64_t num_rows,
                    int64_t width, void* out) {
  with_type(type, [&](auto t) {
    for (int64_t i = 0; i < num_rows; i++)
      rms_norm(in + i * width, weight, eps, width, static_cast<decltype(t)*>(out) + i * width);
  });
}

// qkv [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]; query [num_rows, num_heads * head_dim].
int shoal_rotate_and_write(int type, const float* qkv, const int64_t* positions,
                           const float* inv_freq, const int64_t* slot_mapping, int64_t num_rows,
                           int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, void* query,
                           void* key_cache, void* value_cache) {
  return guarded([&] {
    const HeadShape heads{num_heads, num_kv_heads, head_dim};
    const int64_t width = heads.query_width() + 2 * heads.key_width();
    std::vector<float> angles(head_dim);
    with_type(type, [&](auto t) {
      using T = decltype(t);
      for (int64_t i = 0; i < num_rows; i++) {
        rotary_angles(positions[i], inv_freq, head_dim, angles.data());
        rotate_and_write(qkv + i * width, angles.data(), heads, slot_mapping[i],
                         static_cast<T*>(query) + i * heads.query_width(),
                         static_cast<T*>(key_cache), static_cast<T*>(value_cache));
      }
    });
  });
}

int shoal_attention(int type, int num_threads, const void* query, const void* key_cache,
                    const void* value_cache, const int64_t* block_tables,
                    const int64_t* query_lens, const int64_t* context_lens, int64_t num_seqs,
                    int64_t max_blocks, int64_t block_size, int64_t num_heads,
                    int64_t num_kv_heads, int64_t head_dim, float scale, void* out,
                    int64_t* block_mass) {
  return guarded([&] {
    const HeadShape heads{num_heads, num_kv_heads, head_dim};
    const Batch batch{num_seqs, max_blocks, block_size, block_tables, query_lens, context_lens};
    const auto tasks = attention_tasks(batch, heads);
    const BlockMass mass{block_mass};
    Team team(1);
    with_type(type, [&](auto t) {
      using T = decltype(t);
      std::vector<AttentionScratch<T>> scratch;
      for (int i = 0; i < num_threads; i++) scratch.emplace_back(heads);
#pragma omp parallel num_threads(num_threads)
      team.share(0, tasks.size(), 1, [&](int64_t i) {
        attend(tasks[i], batch, heads, scale, static_cast<const T*>(query),
               static_cast<const T*>(key_cache), static_cast<const T*>(value_cache),
               static_cast<T*>(out), scratch[omp_get_thread_num()], mass);
      });
    });
  });
}

// Null when memory ran out. `ops` and `buffers` are copied; weights are borrowed.
PlanBase* shoal_plan_create(int type, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                            const PlanOp* ops, int64_t num_ops, const PlanBuffer* buffers,
                            int64_t num_buffers) {
  PlanBase* plan = nullptr;
  const HeadShape heads{num_heads, num_kv_heads, head_dim};
  guarded([&] {
    with_type(type, [&](auto t) {
      plan = new Plan<decltype(t)>(heads, ops, num_ops, buffers, num_buffers);
    });
  });
  return plan;
}

int shoal_plan_run(PlanBase* plan, const Step* step) {
  return guarded([&] { plan->run(*step); });
}

void shoal_plan_destroy(PlanBase* plan) { delete plan; }
}
