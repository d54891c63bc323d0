// What a plan is made of and what a step brings, as shoal.kernels.native_plan lays them out.
#pragma once

#include "attention_work.h"

namespace shoal {

enum class OpKind : int32_t {
  kEmbed = 0,           // input_ids -> out (float)
  kRotaryAngles = 1,    // positions -> out (float); weight: inverse frequencies [k]; scalar: factor
  kRmsNorm = 2,         // in (float) -> out (T); weight: float [width]
  kSelectNorm = 3,      // the same, of the sampled rows only
  kLinear = 4,          // in (T) -> out (float, or T when gated)
  kLogits = 5,          // in (T, sampled rows) -> the step's logits
  kRotateAndWrite = 6,  // in (float), in2: angles or -1 -> out (T) and the cache of `layer`
  kAttention = 7,       // in (T) and the cache of `layer` -> out (T)
  kAddNorm = 8,         // RMS norm of in (float), in place, is added to out (float), then times
                        // factor; weight as above, but of one of the n norms side by side in a row
  kRoute = 9,           // in: router logits (float) -> the step's expert rows; n: experts, k: chosen;
                        // weight: float [experts] that scales what each gives, or null
  kSortRows = 10,       // expert rows by expert
  kGather = 11,         // in (T, a row a token) -> out (T, a row an expert row)
  kExpertLinear = 12,   // as kLinear, each expert's rows with its own weight
  kCombine = 13,        // in (float, expert rows), weighted, is added to out (float)
  kRound = 14,          // in (float) -> out (T)
  kGeluMul = 15,        // gelu(in) * in2 from its column k on (both float) -> out (T)
  kSelect = 16,         // in -> out: the sampled rows. Operations after the first see only those
  kSoftcap = 17,        // of the step's logits, [samples, n]; scalar: the cap
  kKeepStates = 18,     // in (T, sampled rows) -> the step's hidden states, where they are wanted
  kScreenRows = 19,     // in (T, sampled rows) -> the plan's screened rows
  kScreen = 21,         // those -> the step's logits, where bounds by panel stand for them. Where
                        // nothing is packed the weight is that of kLogits, and in (T, or prepared)
                        // its rows. These three are for steps that want only tokens
  kGreedy = 22,         // in, the bounds -> the step's tokens; in, weight: as of kLogits
  kTakeStates = 23,     // the step's hidden states -> out (T), of a plan that begins with them
  kPrepare = 20,        // in (T) -> out (bytes): rows as a product of `format` reads them
};

// Mirrored by shoal.kernels.native_plan: keep the two in step.
struct PlanOp {
  int32_t kind, in, in2, out;  // numbers of buffers
  int32_t layer, epilogue;  // layer: of gated expert products the width of their output
  const void* weight;
  const float* bias;
  int64_t n, k;
  float scalar;    // RMS norm: epsilon; angles, embedding: factor
  int32_t packed;  // embedding: the weight is packed; prepare: the sampled rows alone are there;
                   // screen: the weight is a copy in 8 bits, with bounds of its columns;
                   // route: the weights of the chosen experts sum to 1; add norm, combine: out
                   // is set, not added to
  int32_t heads;   // number of the PlanHeads, for the rotation and attention; of the sparse layer
  int32_t format;  // of the weight: enum Format
  int64_t group;   // int4: columns that share a scale
  const int64_t* columns;
  float factor;
  int32_t reserved;
};

// The heads of one kind of layer, and what happens to them.
struct PlanHeads {
  int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t window;     // 0: none
  float scale;        // of scores
  float softcap;      // 0: none
  float norm_eps;
  int32_t new_keys;   // NewKeys
  int32_t norm_queries, norm_keys, norm_values;
  const float* query_norm;  // [head_dim], or null: the norm has no weight
  const float* key_norm;

  AttentionShape shape() const {
    return {{num_heads, num_kv_heads, head_dim}, window, scale, softcap};
  }

  HeadPreparation preparation() const {
    return {NewKeys(new_keys), norm_queries != 0, norm_keys != 0, norm_values != 0,
            query_norm, key_norm, norm_eps, rotary_dim};
  }
};

struct PlanBuffer {
  int64_t width;         // elements of a row
  int32_t element_size;  // bytes
  int32_t reserved;
};

// Layers that share block tables.
struct StepGroup {
  int64_t max_blocks;
  const int64_t* block_tables;  // [num_seqs, max_blocks]
  const int64_t* slot_mapping;  // [num_tokens]
  const int64_t* context_lens;  // [num_seqs]
};

struct Step {
  int64_t num_tokens, num_seqs, num_samples, block_size, num_threads;
  int64_t stored;                 // Stored: what the caches hold
  int64_t keys_in_panels;         // as in LayerCache
  const int64_t* input_ids;       // [num_tokens]
  const int64_t* positions;       // [num_tokens]
  const int64_t* query_lens;      // [num_seqs]
  const int64_t* sample_lens;     // [num_seqs]: sampled rows, its last ones; for plans that select
  const int64_t* logits_indices;  // [num_samples]
  const StepGroup* groups;
  const int64_t* layer_groups;    // [num_layers]
  void* const* key_caches;        // [num_layers]
  void* const* value_caches;      // [num_layers]
  float* const* key_scales;       // [num_layers], where the caches have scales
  float* const* value_scales;     // [num_layers]
  float* logits;                  // [num_samples, vocab_size]
  int64_t* block_mass;  // [num_seqs, group 0's max_blocks], added to by its layers; or null
  float* hidden_states;  // [num_samples, hidden_size], what logits are made of, or are to be; or null
  int64_t* tokens;  // [num_samples]: the likeliest, instead of logits; or null. For plans that screen
  int64_t* op_nanoseconds;  // [num_ops], added to: how long each operation took; or null
};

}  // namespace shoal
