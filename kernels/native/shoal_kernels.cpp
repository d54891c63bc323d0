// The plain C interface. Types of weights and states: 0 is float32, 1 is bfloat16.
//
// Functions that allocate return 0, or 1 when memory ran out; nothing is thrown across.

#include <new>

#include "mask.h"
#include "plan.h"
#include "sample.h"

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

// Bytes of a weight [n, k] of a format of quantized.h.
int64_t shoal_format_bytes(int type, int format, int64_t n, int64_t k, int64_t group) {
  int64_t out = 0;
  with_type(type, [&](auto t) {
    out = (n + kPanel - 1) / kPanel * panel_bytes<decltype(t)>(Format(format), k, group);
  });
  return out;
}

// Bytes of a row of states as a product of that format reads it.
int64_t shoal_row_bytes(int type, int format, int64_t k, int64_t group) {
  int64_t out = 0;
  with_type(type, [&](auto t) { out = row_bytes<decltype(t)>(Format(format), k, group); });
  return out;
}

int shoal_linear(int type, int num_threads, const void* weight, const float* bias, int64_t n,
                 int64_t k, int format, int64_t group, const int64_t* columns, int epilogue,
                 const void* states, int64_t num_rows, void* out, int64_t out_width) {
  return guarded([&] {
    Team team(1, num_threads);
    const Linear op{weight, bias, n, k, Format(format), group, columns};
    with_type(type, [&](auto t) {
      using T = decltype(t);
      const char* rows = static_cast<const char*>(states);
      const int64_t stride = row_bytes<T>(op.format, k, group);
      std::vector<char> prepared;
      if (op.format == Format::kInt8 || is_int4(op.format)) {
        prepared.resize(num_rows * stride);
        for (int64_t i = 0; i < num_rows; i++)
          prepare_row(op.format, static_cast<const T*>(states) + i * k, columns, k, group,
                      prepared.data() + i * stride);
        rows = prepared.data();
      }
#pragma omp parallel num_threads(num_threads)
      linear<T>(team, 0, op, Epilogue(epilogue), rows, num_rows, out,
                out_width);
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

// qkv [num_rows, heads and what preparation says]; query [num_rows, num_heads * head_dim].
int shoal_rotate_and_write(int type, const float* qkv, const int64_t* positions,
                           const float* inv_freq, float factor, const int64_t* slot_mapping,
                           int64_t num_rows, const PlanHeads* plan_heads, void* query,
                           const LayerCache* cache) {
  return guarded([&] {
    const HeadShape heads = plan_heads->shape().heads;
    const HeadPreparation preparation = plan_heads->preparation();
    const int64_t width = preparation.row_width(heads);
    std::vector<float> angles(plan_heads->rotary_dim);
    with_type(type, [&](auto t) {
      using T = decltype(t);
      for (int64_t i = 0; i < num_rows; i++) {
        rotary_angles(positions[i], inv_freq, plan_heads->rotary_dim / 2, factor, angles.data());
        rotate_and_write(qkv + i * width, angles.data(), heads, preparation, slot_mapping[i],
                         static_cast<T*>(query) + i * heads.query_width(), *cache);
      }
    });
  });
}

int shoal_attention(int type, int num_threads, const void* query, const LayerCache* cache,
                    const Batch* batch, const PlanHeads* plan_heads, void* out,
                    int64_t* block_mass) {
  return guarded([&] {
    const AttentionShape shape = plan_heads->shape();
    const auto work = attention_work(*batch, shape, num_threads, !block_mass);
    const BlockMass mass{block_mass};
    std::vector<float> partials(work.num_partials);
    Team team(2, num_threads);
    with_type(type, [&](auto t) {
      using T = decltype(t);
      std::vector<AttentionScratch<T>> scratch(num_threads);
      for (auto& own : scratch) own.reserve(shape);
#pragma omp parallel num_threads(num_threads)
      attention<T>(team, 0, work, *batch, shape, *cache, static_cast<const T*>(query),
                   static_cast<T*>(out), partials.data(), scratch[omp_get_thread_num()], mass);
    });
  });
}

// tokens [num_rows]: what each row gave, -1 where its best logit is no finite number.
int shoal_sample(int num_threads, const float* logits, int64_t num_rows, int64_t vocab_size,
                 const SampleParams* params, int64_t* tokens) {
  return guarded([&] {
    Team team(1, num_threads);
    std::vector<SampleScratch> scratch(num_threads);
#pragma omp parallel num_threads(num_threads)
    team.share(0, num_rows, 1, [&](int64_t row) {
      tokens[row] = scratch[omp_get_thread_num()].sample(logits + row * vocab_size, vocab_size,
                                                         params[row]);
    });
  });
}

// Masks rows[i] of the logits with masks[i]; words as in mask.h.
int shoal_mask(int num_threads, float* logits, int64_t vocab_size, const int64_t* rows,
               int64_t num_rows, const uint32_t* masks) {
  return guarded([&] {
    const int64_t num_words = (vocab_size + 31) / 32;
    Team team(1, num_threads);
#pragma omp parallel num_threads(num_threads)
    team.share(0, num_rows, 1, [&](int64_t i) {
      mask_row(logits + rows[i] * vocab_size, vocab_size, masks + i * num_words);
    });
  });
}

// Null when memory ran out. `ops`, `buffers` and `heads` are copied; weights are borrowed.
PlanBase* shoal_plan_create(int type, const PlanOp* ops, int64_t num_ops,
                            const PlanBuffer* buffers, int64_t num_buffers,
                            const PlanHeads* heads, int64_t num_heads) {
  PlanBase* plan = nullptr;
  guarded([&] {
    with_type(type, [&](auto t) {
      plan = new Plan<decltype(t)>(ops, num_ops, buffers, num_buffers, heads, num_heads);
    });
  });
  return plan;
}

int shoal_plan_run(PlanBase* plan, const Step* step) {
  return guarded([&] { plan->run(*step); });
}

void shoal_plan_destroy(PlanBase* plan) { delete plan; }
}
