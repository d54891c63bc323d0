// A forward pass as a list of operations over buffers, made once at load and run step by step.
//
// The states between products are float32 whatever the model's type; what enters a product and
// what the cache holds is of the model's type.
#pragma once

#include "attention.h"

namespace shoal {

enum class OpKind : int32_t {
  kEmbed = 0,           // input_ids -> out (float)
  kRotaryAngles = 1,    // positions -> out (float); weight: inverse frequencies
  kRmsNorm = 2,         // in (float) -> out (T); weight: float [width]
  kSelectNorm = 3,      // the same, of the sampled rows only
  kLinear = 4,          // in (T) -> out (float, or T with kSiluMul)
  kLogits = 5,          // in (T, sampled rows) -> the step's logits
  kRotateAndWrite = 6,  // in (float), in2: angles -> out (T) and the cache of `layer`
  kAttention = 7,       // in (T) and the cache of `layer` -> out (T)
};

// Mirrored by shoal.kernels.native_plan: keep the two in step.
struct PlanOp {
  int32_t kind, in, in2, out;  // numbers of buffers
  int32_t layer, epilogue;
  const void* weight;
  const float* bias;
  int64_t n, k;
  float scalar;    // RMS norm: epsilon; attention: scale
  int32_t packed;  // embedding: the weight is packed
};

struct PlanBuffer {
  int64_t width;         // elements of a row
  int32_t element_size;  // bytes
  int32_t reserved;
};

struct Step {
  int64_t num_tokens, num_seqs, num_samples, max_blocks, block_size, num_threads;
  const int64_t* input_ids;       // [num_tokens]
  const int64_t* positions;       // [num_tokens]
  const int64_t* slot_mapping;    // [num_tokens]
  const int64_t* block_tables;    // [num_seqs, max_blocks]
  const int64_t* query_lens;      // [num_seqs]
  const int64_t* context_lens;    // [num_seqs]
  const int64_t* logits_indices;  // [num_samples]
  void* const* key_caches;        // [num_layers]
  void* const* value_caches;      // [num_layers]
  float* logits;                  // [num_samples, vocab_size]
  int64_t* block_mass;            // [num_seqs, max_blocks], added to by all layers; or null
};

class PlanBase {
 public:
  virtual ~PlanBase() = default;
  virtual void run(const Step& step) = 0;
};

template <class T>
class Plan : public PlanBase {
 public:
  Plan(const HeadShape& heads, const PlanOp* ops, int64_t num_ops, const PlanBuffer* buffers,
       int64_t num_buffers)
      : heads_(heads), ops_(ops, ops + num_ops), shapes_(buffers, buffers + num_buffers),
        buffers_(num_buffers) {}

  void run(const Step& step) override {
    reserve(std::max(step.num_tokens, step.num_samples));
    const Batch batch{step.num_seqs, step.max_blocks, step.block_size,
                      step.block_tables, step.query_lens, step.context_lens};
    const auto tasks = attention_tasks(batch, heads_);
    while (int64_t(scratch_.size()) < step.num_threads)
      scratch_.push_back(std::make_unique<AttentionScratch<T>>(heads_));
    const BlockMass mass{step.block_mass};
    Team team(ops_.size());
#pragma omp parallel num_threads(int(step.num_threads))
    {
      const int num_threads = omp_get_num_threads();
      auto& scratch = *scratch_[omp_get_thread_num()];
      for (size_t i = 0; i < ops_.size(); i++)
        run_op(team, i, num_threads, step, batch, tasks, scratch, mass);
    }
  }

 private:
  void reserve(int64_t num_rows) {
    if (num_rows <= num_rows_) return;
    for (size_t i = 0; i < shapes_.size(); i++)
      buffers_[i].resize(num_rows * shapes_[i].width * shapes_[i].element_size + 64);
    num_rows_ = num_rows;
  }

  template <class Element>
  Element* row(int32_t buffer, int64_t index) {
    return reinterpret_cast<Element*>(buffers_[buffer].data()) + index * shapes_[buffer].width;
  }

  void run_op(Team& team, int64_t number, int num_threads, const Step& step, const Batch& batch,
              const std::vector<AttentionTask>& tasks, AttentionScratch<T>& scratch,
              const BlockMass& mass) {
    const PlanOp& op = ops_[number];
    const auto each_row = [&](int64_t count, auto body) {
      team.share(number, count, std::max<int64_t>(1, count / (num_threads * 8)), body);
    };
    switch (OpKind(op.kind)) {
      case OpKind::kEmbed:
        each_row(step.num_tokens, [&](int64_t i) {
          embed(static_cast<const T*>(op.weight), op.packed, step.input_ids[i],
                shapes_[op.out].width, row<float>(op.out, i));
        });
        break;
      case OpKind::kRotaryAngles:
        each_row(step.num_tokens, [&](int64_t i) {
          rotary_angles(step.positions[i], static_cast<const float*>(op.weight), heads_.head_dim,
                        row<float>(op.out, i));
        });
        break;
      case OpKind::kRmsNorm:
      case OpKind::kSelectNorm: {
        const bool select = OpKind(op.kind) == OpKind::kSelectNorm;
        each_row(select ? step.num_samples : step.num_tokens, [&](int64_t i) {
          rms_norm(row<float>(op.in, select ? step.logits_indices[i] : i),
                   static_cast<const float*>(op.weight), op.scalar, shapes_[op.in].width,
                   row<T>(op.out, i));
        });
        break;
      }
      case OpKind::kLinear:
        linear(team, number, num_threads, Linear{op.weight, op.bias, op.n, op.k},
               Epilogue(op.epilogue), row<T>(op.in, 0), step.num_tokens, row<char>(op.out, 0),
               shapes_[op.out].width);
        break;
      case OpKind::kLogits:
        linear(team, number, num_threads, Linear{op.weight, op.bias, op.n, op.k},
               Epilogue::kStore, row<T>(op.in, 0), step.num_samples, step.logits, op.n);
        break;
      case OpKind::kRotateAndWrite:
        each_row(step.num_tokens, [&](int64_t i) {
          rotate_and_write(row<float>(op.in, i), row<float>(op.in2, i), heads_,
                           step.slot_mapping[i], row<T>(op.out, i),
                           static_cast<T*>(step.key_caches[op.layer]),
                           static_cast<T*>(step.value_caches[op.layer]));
        });
        break;
      case OpKind::kAttention:
        team.share(number, tasks.size(), 1, [&](int64_t i) {
          attend(tasks[i], batch, heads_, op.scalar, row<T>(op.in, 0),
                 static_cast<const T*>(step.key_caches[op.layer]),
                 static_cast<const T*>(step.value_caches[op.layer]), row<T>(op.out, 0), scratch,
                 mass);
        });
        break;
    }
  }

  HeadShape heads_;
  std::vector<PlanOp> ops_;
  std::vector<PlanBuffer> shapes_;
  std::vector<std::vector<char>> buffers_;
  std::vector<std::unique_ptr<AttentionScratch<T>>> scratch_;
  int64_t num_rows_ = 0;
};

}  // namespace shoal
