// A forward pass as a list of operations over buffers, made once at load and run step by step.
//
// The states between products are float32 whatever the model's type; what enters a product and
// what the cache holds is of the model's type.
#pragma once

#include <chrono>
#include <deque>

#include "attention.h"
#include "experts.h"
#include "plan_step.h"
#include "screened_head.h"

namespace shoal {

constexpr int64_t kLine = 64;     // bytes, where buffers begin: no vector of a row lies in two lines
constexpr int64_t kFarRows = 16;  // as many rows of logits push weights out of the caches

class PlanBase {
 public:
  virtual ~PlanBase() = default;
  virtual void run(const Step& step) = 0;
};

template <class T>
class Plan : public PlanBase {
 public:
  Plan(const PlanOp* ops, int64_t num_ops, const PlanBuffer* buffers, int64_t num_buffers,
       const PlanHeads* heads, int64_t num_heads)
      : ops_(ops, ops + num_ops), shapes_(buffers, buffers + num_buffers),
        heads_(heads, heads + num_heads), buffers_(num_buffers) {
    for (const PlanOp& op : ops_)
      if (OpKind(op.kind) == OpKind::kRoute) experts_.emplace_back();
    for (int64_t i = num_ops, next = -1; i-- > 0;) {
      next_product_.push_back(next);
      if (OpKind(ops[i].kind) == OpKind::kLinear || OpKind(ops[i].kind) == OpKind::kLogits)
        next = i;
    }
    std::reverse(next_product_.begin(), next_product_.end());
    for (int64_t i = num_ops, next = -1; i-- > 0;) {
      if (OpKind(ops[i].kind) == OpKind::kAttention) next = i;
      next_attention_.push_back(next);
    }
    std::reverse(next_attention_.begin(), next_attention_.end());
    while (first_select_ < num_ops && OpKind(ops[first_select_].kind) != OpKind::kSelect)
      first_select_++;
  }

  void run(const Step& step) override {
    reserve(std::max(step.num_tokens, step.num_samples));
    while (int64_t(scratch_.size()) < step.num_threads) {
      scratch_.push_back(std::make_unique<AttentionScratch<T>>());
      for (const PlanHeads& heads : heads_) scratch_.back()->reserve(heads.shape());
    }
    for (size_t i = 0; i < ops_.size(); i++)
      if (OpKind(ops_[i].kind) == OpKind::kRoute)
        experts_[ops_[i].heads].resize(rows_of(i, step), ops_[i].k);
    screened_.resize(step.num_samples);
    while (int64_t(greedy_rows_.size()) < step.num_samples) greedy_rows_.emplace_back();
    team_.begin(2 * ops_.size(), step.num_threads);
    lay_out_attention(step);
    const BlockMass mass{step.block_mass};
#pragma omp parallel num_threads(int(step.num_threads))
    {
      auto& scratch = *scratch_[omp_get_thread_num()];
      scratch.pieces = pieces_before(0, step);
      const bool timed = step.op_nanoseconds && omp_get_thread_num() == 0;
      auto start = std::chrono::steady_clock::now();
      for (size_t i = 0; i < ops_.size(); i++) {
        run_op(team_, i, step, scratch, mass);
        if (!timed) continue;
        const auto end = std::chrono::steady_clock::now();
        step.op_nanoseconds[i] += std::chrono::nanoseconds(end - start).count();
        start = end;
      }
    }
  }

 private:
  void reserve(int64_t num_rows) {
    if (num_rows <= num_rows_) return;
    int64_t num_groups = 0;
    for (size_t i = 1; i < ops_.size(); i++)
      if (follows_with_groups(i - 1))
        num_groups = std::max(num_groups, num_state_groups(ops_[i]));
    panels_done_.reset(new PanelCount[blocks_of(num_rows) * num_groups]);
    for (size_t i = 0; i < shapes_.size(); i++)
      buffers_[i].resize(num_rows * shapes_[i].width * shapes_[i].element_size + 64 + kLine);
    num_rows_ = num_rows;
  }

  int64_t rows_of(int64_t number, const Step& step) const {
    return number >= first_select_ ? step.num_samples : step.num_tokens;
  }

  // Who does what in attention: the same for all layers of equal shape, group and rows.
  void lay_out_attention(const Step& step) {
    works_.clear();
    work_of_.assign(ops_.size(), 0);
    int64_t num_partials = 0;
    for (size_t i = 0; i < ops_.size(); i++) {
      if (OpKind(ops_[i].kind) != OpKind::kAttention) continue;
      const AttentionShape shape = heads_[ops_[i].heads].shape();
      const int64_t group = step.layer_groups[ops_[i].layer];
      const bool samples_only = int64_t(i) >= first_select_;
      size_t& at = work_of_[i];
      while (at < works_.size() &&
             !(works_[at].group == group && works_[at].samples_only == samples_only &&
               works_[at].shape.same_tasks(shape)))
        at++;
      if (at < works_.size()) continue;
      const Batch batch{step.num_seqs, step.groups[group].max_blocks, step.block_size,
                        step.groups[group].block_tables,
                        samples_only ? step.sample_lens : step.query_lens,
                        step.groups[group].context_lens};
      const bool masses = step.block_mass && group == 0 && !samples_only;
      works_.push_back({group, masses, samples_only, shape, batch,
                        attention_work(batch, shape, step.num_threads, !masses), false});
      const auto& tasks = works_.back().work.tasks;
      works_.back().whole_rows =
          std::all_of(tasks.begin(), tasks.end(), [&](const AttentionTask& task) {
            return task.num_kv_heads == shape.heads.num_kv_heads;
          });
      if (step.num_tokens >= kBusyRows)
        find_blocks(works_.back().work, batch, shape, block_bytes(step, shape.heads), team_);
      num_partials = std::max(num_partials, works_.back().work.num_partials);
    }
    if (int64_t(partials_.size()) < num_partials) partials_.resize(num_partials);
  }

  static int64_t block_bytes(const Step& step, const HeadShape& heads) {
    return step.block_size * heads.key_width() * stored_size(Stored(step.stored));
  }

  // What products from operation `number` on fetch for the attention that follows them.
  Pieces pieces_before(int64_t number, const Step& step) const {
    const int64_t next = number < int64_t(ops_.size()) ? next_attention_[number] : -1;
    if (next < 0) return {};
    const AttentionWork& work = works_[work_of_[next]].work;
    if (work.blocks.empty()) return {};
    const LayerCache cache = cache_of(step, ops_[next].layer);
    const std::vector<int64_t>& blocks = work.blocks[omp_get_thread_num()];
    return {{static_cast<const char*>(cache.keys), static_cast<const char*>(cache.values)},
            block_bytes(step, heads_[ops_[next].heads].shape().heads),
            blocks.data(), blocks.data() + blocks.size()};
  }

  LayerCache cache_of(const Step& step, int32_t layer) const {
    return {Stored(step.stored), int32_t(step.keys_in_panels), step.key_caches[layer], step.value_caches[layer],
            step.key_scales ? step.key_scales[layer] : nullptr,
            step.value_scales ? step.value_scales[layer] : nullptr};
  }

  static Linear product(const PlanOp& op) {
    return {op.weight, op.bias, op.n, op.k, Format(op.format), op.group, op.columns};
  }

  // Whether operation `number` also does the next one, which prepares the rows that it normalises.
  bool follows_with_rows(int64_t number) const {
    const OpKind kind = OpKind(ops_[number].kind);
    if (kind != OpKind::kRmsNorm && kind != OpKind::kSelectNorm) return false;
    if (number + 1 == int64_t(ops_.size())) return false;
    const PlanOp& next = ops_[number + 1];
    return OpKind(next.kind) == OpKind::kPrepare && next.in == ops_[number].out &&
           next.packed == (kind == OpKind::kSelectNorm);
  }

  // Whether operation `number`, a gated product, also does the next one: whoever has the last columns
  // of a group of states prepares it, while they are in the core's caches.
  bool follows_with_groups(int64_t number) const {
    const PlanOp& op = ops_[number];
    if (OpKind(op.kind) != OpKind::kLinear || !is_gated(Epilogue(op.epilogue))) return false;
    if (number + 1 == int64_t(ops_.size())) return false;
    const PlanOp& next = ops_[number + 1];
    if (OpKind(next.kind) != OpKind::kPrepare || next.in != op.out) return false;
    if (next.out == op.in) return false;  // rows that others are still reading
    if (next.packed || next.columns || 2 * next.k > op.n) return false;
    const int64_t width = state_group(Format(next.format), next.k, next.group);
    return width % kHalfPanel == 0 && next.k % width == 0;
  }

  // Whether attention also does the next operation: where its tasks are of whole rows.
  bool follows_with_tasks(int64_t number) const {
    const PlanOp& op = ops_[number];
    if (OpKind(op.kind) != OpKind::kAttention || number + 1 == int64_t(ops_.size())) return false;
    const PlanOp& next = ops_[number + 1];
    return OpKind(next.kind) == OpKind::kPrepare && next.in == op.out && !next.packed &&
           next.k == heads_[op.heads].shape().heads.query_width() &&
           works_[work_of_[number]].whole_rows;
  }

  bool is_done_before(int64_t number) const {
    return follows_with_rows(number - 1) || follows_with_groups(number - 1) ||
           follows_with_tasks(number - 1);
  }

  static int64_t num_state_groups(const PlanOp& op) {
    return op.k / state_group(Format(op.format), op.k, op.group);
  }

  // For an operation that prepares: the group of states that a panel of a gated product is part of,
  // if it was the last of them.
  void prepare_group_of(const PlanOp& op, int64_t block, int64_t panel, int64_t first,
                        int64_t count) {
    const int64_t groups = num_state_groups(op), panels = op.k / groups / kHalfPanel;
    const int64_t group = panel / panels;
    if (group >= groups || !panels_done_[block * groups + group].is_last(panels)) return;
    prepare_group<T>(Format(op.format), row<T>(op.in, first), shapes_[op.in].width, op.k, op.group,
                     group, count, row<char>(op.out, first));
  }

  void prepare(const PlanOp& op, int64_t i) {
    prepare_row<T>(Format(op.format), row<T>(op.in, i), op.columns, op.k, op.group,
                   row<char>(op.out, i));
  }

  // What this thread reads first in the product after operation `number`.
  Soon after(const Team& team, int64_t number, AttentionScratch<T>& scratch) const {
    const int64_t next = next_product_[number];
    if (next < 0) return {};
    Soon soon = first_panel<T>(team, product(ops_[next]));
    soon.pieces = &scratch.pieces;
    return soon;
  }

  template <class Element>
  Element* row(int32_t buffer, int64_t index) {
    const auto begin = round_up(reinterpret_cast<int64_t>(buffers_[buffer].data()), kLine);
    return reinterpret_cast<Element*>(begin) + index * shapes_[buffer].width;
  }

  void run_op(Team& team, int64_t number, const Step& step,
              AttentionScratch<T>& scratch, const BlockMass& mass) {
    const PlanOp& op = ops_[number];
    const int64_t turn = 2 * number;  // attention takes two
    const int64_t num_rows = rows_of(number, step);
    const auto each_row = [&](int64_t count, auto body) {
      team.share(turn, count, std::max<int64_t>(1, count / (team.num_threads() * 8)), body);
    };
    switch (OpKind(op.kind)) {
      case OpKind::kEmbed:
        each_row(num_rows, [&](int64_t i) {
          embed<T>(op.weight, op.packed, Format(op.format), op.group, step.input_ids[i],
                   shapes_[op.out].width, row<float>(op.out, i));
          if (op.scalar != 1.0f) {
            float* out = row<float>(op.out, i);
            for (int64_t j = 0; j < shapes_[op.out].width; j++) out[j] *= op.scalar;
          }
        });
        break;
      case OpKind::kRotaryAngles:
        each_row(num_rows, [&](int64_t i) {
          rotary_angles(step.positions[i], static_cast<const float*>(op.weight), op.k, op.scalar,
                        row<float>(op.out, i));
        });
        break;
      case OpKind::kRmsNorm:
      case OpKind::kSelectNorm: {
        const bool select = OpKind(op.kind) == OpKind::kSelectNorm;
        const bool prepares = follows_with_rows(number);
        const int64_t count = select ? step.num_samples : num_rows;
        // As many side by side as leave each thread some.
        const int64_t threads = team.num_threads();
        const int64_t most = std::clamp<int64_t>(count / threads, 1, kNormRows);
        const int64_t num_tasks = tiles_of(count, most);
        each_row(num_tasks, [&](int64_t task) {
          const int64_t first = count * task / num_tasks, end = count * (task + 1) / num_tasks;
          const float* rows[kNormRows];
          float scales[kNormRows];
          for (int64_t i = first; i < end; i++)
            rows[i - first] = row<float>(op.in, select ? step.logits_indices[i] : i);
          const int64_t width = shapes_[op.in].width;
          norm_scales(rows, int(end - first), op.scalar, width, scales);
          for (int64_t i = first; i < end; i++) {
            scale_row(rows[i - first], scales[i - first], static_cast<const float*>(op.weight),
                      width, row<T>(op.out, i));
            if (prepares) prepare(ops_[number + 1], i);
          }
        });
        break;
      }
      case OpKind::kAddNorm:
        each_row(num_rows, [&](int64_t i) {
          float* in = row<float>(op.in, i);
          float* out = row<float>(op.out, i);
          const int64_t width = shapes_[op.in].width, part = width / op.n;
          for (int64_t j = 0; j < width; j += part)
            rms_norm(in + j, static_cast<const float*>(op.weight), op.scalar, part, in + j);
          for (int64_t j = 0; j < width; j++)
            out[j] = (op.packed ? in[j] : out[j] + in[j]) * op.factor;
        });
        break;
      case OpKind::kRoute:
        each_row(num_rows, [&](int64_t i) {
          choose_experts(row<float>(op.in, i), op.n, op.k, op.packed,
                         static_cast<const float*>(op.weight),
                         &experts_[op.heads].chosen[i * op.k],
                         &experts_[op.heads].weights[i * op.k]);
        });
        break;
      case OpKind::kSortRows:
        team.share(turn, 1, 1, [&](int64_t) { experts_[op.heads].sort(op.n, op.k); });
        break;
      case OpKind::kGather:
        each_row(experts_[op.heads].num_rows, [&](int64_t i) {
          std::memcpy(row<T>(op.out, 0) + i * op.k, row<T>(op.in, experts_[op.heads].token_of[i]),
                      op.k * sizeof(T));
        });
        break;
      case OpKind::kExpertLinear:
        expert_linear<T>(team, turn, product(op), Epilogue(op.epilogue),
                         experts_[op.heads],
                         row<char>(op.in, 0), row<char>(op.out, 0),
                         is_gated(Epilogue(op.epilogue)) ? op.layer : op.n);
        break;
      case OpKind::kCombine:
        each_row(num_rows, [&](int64_t i) {
          const ExpertRows& rows = experts_[op.heads];
          float* out = row<float>(op.out, i);
          if (op.packed) std::fill_n(out, op.n, 0.0f);
          for (int64_t rank = 0; rank < op.k; rank++) {
            const float weight = rows.weights[i * op.k + rank];
            const float* in = row<float>(op.in, 0) + rows.row_of[i * op.k + rank] * op.n;
            for (int64_t j = 0; j < op.n; j++) out[j] += weight * in[j];
          }
        });
        break;
      case OpKind::kRound:
        each_row(num_rows, [&](int64_t i) {
          const float* in = row<float>(op.in, i);
          T* out = row<T>(op.out, i);
          for (int64_t j = 0; j < shapes_[op.in].width; j++) assign(out[j], in[j]);
        });
        break;
      case OpKind::kGeluMul:
        each_row(num_rows, [&](int64_t i) {
          gelu_mul(row<float>(op.in, i), row<float>(op.in2, i) + op.k, shapes_[op.in].width,
                   row<T>(op.out, i));
        });
        break;
      case OpKind::kSelect:
        each_row(num_rows, [&](int64_t i) {
          const int64_t size = shapes_[op.in].element_size, bytes = shapes_[op.in].width * size;
          std::memcpy(row<char>(op.out, i * size),
                      row<char>(op.in, step.logits_indices[i] * size), bytes);
        });
        break;
      case OpKind::kSoftcap: {
        constexpr int64_t kColumns = 64 * kLanes;  // of a task
        const int64_t num_parts = (op.n + kColumns - 1) / kColumns;
        each_row(step.num_samples * num_parts, [&](int64_t i) {
          const int64_t first = i % num_parts * kColumns;
          softcap(step.logits + i / num_parts * op.n + first, std::min(kColumns, op.n - first),
                  op.scalar);
        });
        break;
      }
      case OpKind::kLinear: {
        const auto multiply = [&](const auto& done) {
          linear<T>(team, turn, product(op), Epilogue(op.epilogue), row<char>(op.in, 0), num_rows,
                    row<char>(op.out, 0), shapes_[op.out].width, after(team, number, scratch),
                    done);
        };
        if (!follows_with_groups(number)) {
          multiply(NothingMore{});
          break;
        }
        multiply([&](int64_t block, int64_t panel, int64_t first, int64_t count) {
          prepare_group_of(ops_[number + 1], block, panel, first, count);
        });
        break;
      }
      case OpKind::kKeepStates:
        if (!step.hidden_states) break;
        each_row(step.num_samples, [&](int64_t i) {
          const int64_t width = shapes_[op.in].width;
          for (int64_t j = 0; j < width; j++)
            step.hidden_states[i * width + j] = to_float(row<T>(op.in, i)[j]);
        });
        break;
      case OpKind::kTakeStates:
        each_row(num_rows, [&](int64_t i) {
          const int64_t width = shapes_[op.out].width;
          for (int64_t j = 0; j < width; j++)
            assign(row<T>(op.out, i)[j], step.hidden_states[i * width + j]);
        });
        break;
      case OpKind::kScreenRows: {
        if (!step.tokens) break;
        const int64_t num_tiles = tiles_of(step.num_samples);
        team.share(turn, num_tiles, 1, [&](int64_t tile) {
          const int64_t begin = step.num_samples * tile / num_tiles;
          const int64_t end = step.num_samples * (tile + 1) / num_tiles;
          prepare_tile(row<T>(op.in, 0), op.k, begin, int(end - begin), screened_.tiles[tile],
                       screened_);
        });
        break;
      }
      case OpKind::kScreen:
        if (!step.tokens) break;
        if (op.packed)
          screen(team, turn, product(op), screened_, step.num_samples, step.logits);
        else
          highest_logits<T>(team, turn, product(op), row<char>(op.in, 0), step.num_samples,
                            step.logits);
        break;
      case OpKind::kGreedy:
        if (step.tokens) find_tokens(team, turn, op, step);
        break;
      case OpKind::kLogits:
        if (step.tokens) break;
        linear<T>(team, turn, product(op),
                  step.num_samples < kFarRows ? Epilogue::kStore : Epilogue::kStoreFar,
                  row<char>(op.in, 0), step.num_samples, step.logits, op.n,
                  after(team, number, scratch));
        break;
      case OpKind::kPrepare:
        if (number && is_done_before(number)) break;
        each_row(op.packed ? step.num_samples : num_rows, [&](int64_t i) { prepare(op, i); });
        break;
      case OpKind::kRotateAndWrite: {
        const PlanHeads& heads = heads_[op.heads];
        const HeadPreparation preparation = heads.preparation();
        const LayerCache cache = cache_of(step, op.layer);
        const int64_t* slots = step.groups[step.layer_groups[op.layer]].slot_mapping;
        each_row(num_rows, [&](int64_t i) {
          rotate_and_write(row<float>(op.in, i), op.in2 < 0 ? nullptr : row<float>(op.in2, i),
                           heads.shape().heads, preparation, slots[i], row<T>(op.out, i), cache);
        });
        break;
      }
      case OpKind::kAttention: {
        const Layout& layout = works_[work_of_[number]];
        const AttentionShape shape = heads_[op.heads].shape();
        const LayerCache cache = cache_of(step, op.layer);
        const bool prepares = follows_with_tasks(number);
        attention<T>(team, turn, layout.work, layout.batch, shape, cache, row<T>(op.in, 0),
                     row<T>(op.out, 0), partials_.data(), scratch,
                     layout.masses ? mass : BlockMass{}, [&](const AttentionTask& task) {
                       for (int64_t i = 0; prepares && i < task.num_tokens; i++)
                         prepare(ops_[number + 1], task.first_row + i);
                     });
        scratch.pieces = pieces_before(number + 1, step);
        break;
      }
    }
  }

  void find_tokens(Team& team, int64_t turn, const PlanOp& op, const Step& step) {
    const GreedySearch<T> search(product(op));
    const int64_t stride = bounds_stride(num_panels<T>(product(op)));
    const int64_t bytes = row_bytes<T>(Format(op.format), op.k, op.group);
    const char* states = row<char>(op.in, 0);
    team.share(turn, step.num_samples, 1, [&](int64_t i) {
      search.begin(states + i * bytes, step.logits + i * stride, greedy_rows_[i]);
    });
    int64_t num_left = 0;
    for (int64_t i = 0; i < step.num_samples; i++) num_left += num_left_tasks(greedy_rows_[i]);
    team.share(turn + 1, num_left, 1, [&](int64_t task) {
      int64_t i = 0;
      for (; task >= num_left_tasks(greedy_rows_[i]); i++) task -= num_left_tasks(greedy_rows_[i]);
      search.go_on(states + i * bytes, step.logits + i * stride, task, greedy_rows_[i]);
    });
    if (omp_get_thread_num() == 0)
      for (int64_t i = 0; i < step.num_samples; i++)
        step.tokens[i] = greedy_rows_[i].likeliest.result();
  }

  struct alignas(64) PanelCount {
    std::atomic<int64_t> count{0};

    // Of `panels`; then it begins anew.
    bool is_last(int64_t panels) {
      if (count.fetch_add(1, std::memory_order_acq_rel) + 1 < panels) return false;
      count.store(0, std::memory_order_relaxed);
      return true;
    }
  };

  struct Layout {
    int64_t group;
    bool masses, samples_only;
    AttentionShape shape;
    Batch batch;
    AttentionWork work;
    bool whole_rows;  // whose tasks are of all heads
  };

  std::vector<PlanOp> ops_;
  std::vector<int64_t> next_product_;  // by operation; -1: none
  std::vector<int64_t> next_attention_;  // likewise
  Team team_;
  std::vector<PlanBuffer> shapes_;
  std::vector<PlanHeads> heads_;
  std::vector<std::vector<char>> buffers_;
  std::vector<std::unique_ptr<AttentionScratch<T>>> scratch_;
  std::vector<Layout> works_;
  std::vector<size_t> work_of_;  // by operation
  std::vector<float> partials_;
  // By sparse layer: a thread that lags behind reads its layer's sizes when others are further on.
  std::vector<ExpertRows> experts_;
  ScreenedRows screened_;
  std::unique_ptr<PanelCount[]> panels_done_;  // by block of rows and group of states
  std::deque<GreedyRow> greedy_rows_;  // of the sampled rows, or more
  int64_t first_select_ = 0;  // the number of operations if there is none
  int64_t num_rows_ = 0;
};

}  // namespace shoal
