// The operators on the CPU. This file cuts their work into tasks for threads.
//
// The shape alone decides how the work is cut. The number of threads decides only which thread computes a task, so the
// result has the same bits with any number of threads.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "operators/run.h"
#include "cpu/entries.h"

namespace attn {
namespace {

using at::Tensor;

constexpr int64_t kEnoughTasks = 32;   // a call with fewer tasks is cut finer, so that many cores find work
constexpr int64_t kEnoughChunks = 16;  // the chunks of keys in the backward, each of which reads all rows
constexpr int64_t kLeastChunk = 512;   // the least number of keys of a split, or of rows of a chunk
constexpr int64_t kRowsPerRange = 64;

double pairs(const Problem& p) { return 1.0 * p.batch * p.heads * p.queries * p.keys; }

// The floating-point operations of one product, such as Q K^T, over all pairs of queries and keys.
double product_flops(const Problem& p) { return 2 * pairs(p) * std::max(p.head_dim, p.value_dim); }

// The cost of a pair of query and key in the forward, without the products, in the unit of product_flops(). In calls
// that take ten microseconds, this cost decides whether a second thread helps. It was measured while decoding.
constexpr double kFlopsPerPair = 128;

void draw_rng_state(const Tensor& state, int64_t heads) {
  auto* generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  auto* values = state.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(generator->random64());
  values[1] = 0;
  values[2] = heads;
}

// Before the kernels run, reads a mask that several heads share, and returns what it does to each tile of scores.
// p.mask_tiles points into the result. If sequences are packed, EntriesAndMasks calls this for each sequence.
Tensor look_at_mask(Problem& p, const Tensor& query) {
  constexpr int64_t kFewQueries = 16;  // fewer queries read so little of the mask that this pass costs too much
  if (!p.has_mask || p.keys == 0 || p.queries < kFewQueries || p.sequences > 0) return {};
  const int64_t row_tiles = p.mask.row == 0 ? 1 : divide_up(p.queries, kRowTile);
  const int64_t slices = number_of_slices(p);
  if (slices == p.batch * p.heads) return {};  // no two heads share it
  Tensor bytes = at::zeros({set_mask_tiles(p)}, query.options().dtype(at::kByte));
  p.mask_tiles.data = bytes.mutable_data_ptr();
  const double read = 1.0 * slices * (p.mask.row == 0 ? 1 : p.queries) * p.keys;
  run_tasks(slices * row_tiles, read, 0, {}, [&](int64_t task, char*) { kernels().look_at_mask(p, task); });
  return bytes;
}

// Before the kernels run, evaluates a mask_mod at all pairs, once for all heads that share it. A first run finds what
// the mask does to each tile. A second run finds the bits of the tiles that show some pairs and hide other pairs.
// p.program->mask points into the results.
std::array<Tensor, 2> look_at_pairs(const Problem& p, const Tensor& query) {
  if (!p.program || !p.program->mask) return {};
  PairMask& m = *p.program->mask;
  const int64_t tasks = m.entries * m.heads * m.row_tiles, tiles = tasks * m.key_tiles;
  const Tensor numbers = at::empty({tiles}, query.options().dtype(at::kInt));
  m.tiles = numbers.mutable_data_ptr<int32_t>();
  const double work = 16.0 * static_cast<double>(tiles) * kScoreTile * kScoreTile;
  const auto look = [&](bool wants_bits) {
    run_tasks(tasks, work, kernels().pair_workspace(p, m), {},
              [&](int64_t task, char* workspace) { kernels().look_at_pairs(p, m, task, wants_bits, workspace); });
  };
  look(false);
  int32_t with_bits = 0;
  for (int64_t i = 0; i < tiles; ++i)
    if (m.tiles[i] >= 0) m.tiles[i] = with_bits++;
  const Tensor bits = at::empty({with_bits, kScoreTile}, query.options().dtype(at::kLong));
  m.bits = static_cast<uint64_t*>(bits.mutable_data_ptr());
  if (with_bits > 0) look(true);
  return {numbers, bits};
}

// Keeps the results of look_at_mask() and look_at_pairs() as long as the call runs.
class Masks {
 public:
  Masks(Problem& p, const Tensor& query) : tiles_(look_at_mask(p, query)), pairs_(look_at_pairs(p, query)) {}
  Masks(const Masks&) = delete;

 private:
  Tensor tiles_;
  std::array<Tensor, 2> pairs_;
};

// Some entries of a call. If they are packed sequences with a mask, also keeps the result of look_at_mask() for each.
template <auto kKernel, class Params>
class EntriesAndMasks : public Entries<kKernel, Params> {
 public:
  EntriesAndMasks(Params& call, Range entries, const Tensor& query) : Entries<kKernel, Params>(call, entries) {
    if (call.sequences > 0 && call.has_mask)
      for (const auto& [p, _] : *this) mask_tiles_.push_back(look_at_mask(*p, query));
  }

 private:
  c10::SmallVector<Tensor, 1> mask_tiles_;
};

// Calls f(entries) for each group of entries of a call.
template <auto kKernel, class Params>
void each_group_of_entries(Params& call, const Tensor& query, const auto& f) {
  each_group_of_entries(call, [&](Range entries) { f(EntriesAndMasks<kKernel, Params>(call, entries, query)); });
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

// Cuts `tasks` tasks, each over `count` keys or rows, into chunks until there are `enough` chunks in all. A task has at
// most `most` chunks. Returns the length of a chunk.
int64_t chunk_length(int64_t count, int64_t tasks, int64_t enough, int64_t most) {
  if (tasks >= enough || most < 2) return count;
  const int64_t chunks = std::min(divide_up(enough, std::max<int64_t>(1, tasks)), most);
  return round_up(divide_up(count, chunks), kKeyTile);
}
static_assert(kRowTile == kKeyTile);

// Several tiles of rows share one pass over the keys if enough tasks remain. This sharing does not change a bit of the
// result. Splits of the keys change the bits of sums, so the splits depend on the size of one batch entry alone.
void plan_rows(RowParams& p) {
  const int64_t tasks = p.groups() * divide_up(p.rows(), kRowTile);
  const int64_t positions = p.group > 1 ? p.queries : std::min(p.queries, kRowTile);
  const int64_t keys = std::min(p.keys, most_keys(p, positions) + kKeyTile);  // counted from the first key of a tile
  p.keys_per_split = p.invariant ? keys : chunk_length(keys, tasks, kEnoughTasks, keys / kLeastChunk);
  if (keys > 0) p.splits = divide_up(keys, p.keys_per_split);
  p.rows_per_task = p.splits > 1 ? kRowTile : 4 * kRowTile;  // a split begins at the first key that its task sees
  while (p.rows_per_task > kRowTile && p.tasks() < 2 * kEnoughTasks) p.rows_per_task /= 2;
}

void forward(const auto& entries, const Tensor& query) {
  c10::SmallVector<Tensor, 4> memory;
  bool split = false, prepacked = false;
  for (const auto& [p, k] : entries) {
    plan_rows(*p);
    split |= p->splits > 1;
    for (Tensor& partial : allocate_splits(*p, query)) memory.push_back(std::move(partial));
    if (const int64_t bytes = k->packed_size(*p)) {
      prepacked = true;
      memory.push_back(at::empty({bytes}, query.options().dtype(at::kByte)));
      p->prepacked = memory.back().mutable_data_ptr();
    }
  }
  const auto pack_tasks = [](const ForwardParams& p) {
    return p.prepacked ? p.batch * std::max(p.key_heads, p.value_heads) * divide_up(p.keys, kKeyTile) : 0;
  };
  const auto merge_tasks = [](const ForwardParams& p) {
    return p.splits > 1 ? divide_up(number_of_rows(p), kRowsPerRange) : 0;
  };
  if (prepacked)
    entries.run(
        pack_tasks, [](const auto& p) { return 1.0 * p.batch * p.keys * p.key_heads * (p.head_dim + p.value_dim); }, 0,
        [](const auto& p, const auto& k, int64_t task, char*) { k.pack(p, task); });
  const int64_t workspace = entries.workspace();
  entries.run([](const auto& p) { return p.tasks(); },
              [](const auto& p) { return 2 * product_flops(p) + kFlopsPerPair * pairs(p); }, workspace,
              [](const auto& p, const auto& k, int64_t task, char* own) { k.run(p, task, own); });
  if (split)
    entries.run(
        merge_tasks, [](const auto& p) { return 2.0 * p.splits * number_of_rows(p) * p.value_dim; }, workspace,
        [](const auto& p, const auto& k, int64_t task, char* own) {
          const int64_t first = task * kRowsPerRange;
          k.merge(p, first, std::min(first + kRowsPerRange, number_of_rows(p)), own);
        });
}

void run_forward(ForwardParams& call, const Tensor& query) {
  const Masks masks(call, query);
  each_group_of_entries<&Kernels::forward>(call, query, [&](const auto& entries) { forward(entries, query); });
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients, and their derivative along a direction (both have the same plan and the same passes)

void plan(BackwardParams& p, double share) {
  p.span = std::lcm(p.heads / p.key_heads, p.heads / p.value_heads);
  // The numbers that a pass keeps for its rows (Q, Q^T, dO, dO^T, dQ, tables) should stay in the L2 cache.
  const int64_t in_tables = 2 * size_transposed(p) / kRowTile;
  const int64_t bytes_per_row =
      (3 * p.head_dim + 2 * p.value_dim + 2 + in_tables) * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::clamp<int64_t>((int64_t{512} << 10) / bytes_per_row / kRowTile, 1, 16) * kRowTile;
  p.rows_per_pass = std::min(rows, round_up(std::max<int64_t>(p.rows(), 1), kRowTile));
  // The cut into chunks sets the order in which gradients are summed, so it depends on the size of one entry alone. If
  // the call has enough tasks, one task takes all chunks of a span, with the same bits and less work. `share`: this
  // entry's part of the call's work.
  p.keys_per_chunk = chunk_length(p.keys, p.heads / p.span, kEnoughChunks, divide_up(p.keys, 4 * kKeyTile));
  p.chunks = p.keys > 0 ? divide_up(p.keys, p.keys_per_chunk) : 0;
  p.all_chunks_at_once = p.chunks < 2 || p.spans() >= kEnoughChunks * share;
}

// Returns how many gradients of distance terms one chunk of keys has.
int64_t size_of_distance_terms(const BackwardParams& p) {
  const PairProgram& program = *p.program;
  return program.batch * program.heads * program.columns[kind_of(Leaf::distance_term)] *
         (program.queries + program.keys - 1);
}

// Calls f(t, table t, the number of gradients of this table) for each table whose gradients are wanted.
void for_each_table(const BackwardParams& p, auto f) {
  for (int t = 0; t < kMostTables; ++t) {
    const GradTerms& grad = gradients_of_terms(p).tables[t];
    const Table& table = p.program->tables[t];
    const int64_t rows = rows_of(table.of, p.program->queries, p.program->keys);
    const int64_t entries = grad.entry != 0 ? p.program->batch : 1, heads = grad.head != 0 ? p.program->heads : 1;
    if (grad.data) f(t, table, entries * heads * rows * table.size);
  }
}

// Plans how the tasks of a group of entries add to the gradients of tables. Returns the copies of these gradients that
// tasks add to, [copies, numbers], or an undefined tensor if tasks add to the gradients themselves.
template <class Params>
Tensor plan_tables(const Params& call, const auto& entries, std::vector<TermGradients>& of_entries,
                   c10::SmallVectorImpl<Tensor>& memory, const Tensor& query) {
  const PairProgram& program = *call.program;
  const auto& first = *(*entries.begin()).params;
  int64_t size = 0;
  bool are_owned = true, meet = false;  // whether each span has its own numbers; whether tasks add to the same numbers
  for_each_table(call, [&](int t, const Table& table, int64_t numbers) {
    const GradTerms& grad = gradients_of_terms(call).tables[t];
    size += numbers;
    are_owned &= (grad.entry != 0 || program.batch == 1) && (grad.head != 0 || first.span == first.heads);
    meet |= table.of != TableOf::keys;
  });
  if (are_owned && !meet) return {};
  // There are up to 16 copies, but only one if a copy takes more than 64 MB in float64. If the call is cut into several
  // entries, each entry has one copy. If no two spans add to the same numbers, all spans share a copy, so fewer copies
  // suffice.
  constexpr int64_t kMostCopies = 16, kMostNumbers = (int64_t{64} << 20) / 8;
  const auto count = static_cast<int64_t>(of_entries.size());
  int64_t each = count > 1 || size > kMostNumbers ? 1 : kMostCopies;
  if (are_owned) each = std::max<int64_t>(1, each / first.spans());
  Tensor copies;
  if (each > 1 || (count > 1 && !are_owned)) copies = at::zeros({count * each, size}, compute_options(query));
  for (int64_t i = 0; i < count; ++i) {
    TermGradients& own = of_entries[i];
    own.lines_of_copy = are_owned ? (entries.begin() + i)->params->spans() : 1;
    own.lines = each * own.lines_of_copy;
    memory.push_back(at::zeros({own.lines}, query.options().dtype(at::kInt)));
    own.turns = memory.back().template mutable_data_ptr<int32_t>();
    if (!copies.defined()) continue;
    own.copy = size;
    auto* to = static_cast<char*>(copies.mutable_data_ptr()) + i * each * size * copies.element_size();
    for_each_table(call, [&](int t, const Table&, int64_t numbers) {
      own.tables[t].data = std::exchange(to, to + numbers * copies.element_size());
    });
  }
  return copies;
}

// Computes the gradients of these entries. Returns the size of their workspace.
template <class Params>
int64_t gradients(const Params& call, const auto& entries, const Tensor& query) {
  c10::SmallVector<Tensor, 2> memory;
  const TermGradients terms = gradients_of_terms(call);
  const bool has_rows = call.grad_query.data || call.grad_slopes || terms.rows;
  Take take = Take::neighbours;
  double all_pairs = 0;
  for (const auto& [p, _] : entries) all_pairs += pairs(*p);
  for (const auto& [p, _] : entries) {
    plan(*p, pairs(*p) / std::max(all_pairs, 1.0));
    if (call.sequences > 0) plan_mask(*p);
    if (p->all_chunks_at_once || !has_rows) continue;
    take = Take::one;
    memory.push_back(at::zeros({p->batch, p->groups(), p->passes()}, query.options().dtype(at::kInt)));
    p->turns = memory.back().template mutable_data_ptr<int32_t>();
    p->grad_query_sum = p->grad_query;
    if (p->grad_query.dtype != DType::bf16 && p->grad_query.dtype != DType::f16) continue;
    memory.push_back(at::empty({number_of_rows(*p), p->head_dim}, compute_options(query)));
    const Tensor& sum = memory.back();
    p->grad_query_sum = operand_of_rows(*p, sum.mutable_data_ptr(), dtype_of(sum), p->head_dim);
  }
  Tensor of_chunks, tables;
  std::vector<TermGradients> of_entries(entries.end() - entries.begin(), terms);
  for (size_t i = 0; i < of_entries.size() && call.grad_terms; ++i)
    (entries.begin() + i)->params->grad_terms = &of_entries[i];
  if (terms.distances) {
    int64_t chunks = 1;
    for (const auto& [p, _] : entries) chunks = std::max(chunks, p->chunks);
    of_chunks = at::zeros({chunks, size_of_distance_terms(call)}, compute_options(query));
    for (TermGradients& own : of_entries) own.distances = of_chunks.mutable_data_ptr();
  }
  if (terms.has_tables) {
    tables = plan_tables(call, entries, of_entries, memory, query);
    if (of_entries[0].turns) take = Take::one;
  }
  const int64_t workspace = entries.workspace();
  const bool direct_mask = call.grad_mask.data && !call.mask_is_shared;
  if (has_rows || call.grad_key.data || call.grad_value.data || direct_mask || call.grad_terms)
    entries.run([](const auto& p) { return p.rows() > 0 && p.keys > 0 ? p.tasks() : 0; },
                [](const auto& p) { return 5 * product_flops(p); }, workspace,
                [](const auto& p, const auto& k, int64_t task, char* own) { k.run(p, task, own); }, take);
  if (of_chunks.defined()) {
    Tensor sums = at::from_blob(terms.distances, {size_of_distance_terms(call)}, compute_options(query));
    for (int64_t chunk = 0; chunk < of_chunks.size(0); ++chunk) sums.add_(of_chunks[chunk]);
  }
  if (tables.defined()) {
    int64_t first = 0;
    for_each_table(call, [&](int t, const Table&, int64_t numbers) {
      Tensor sums = at::from_blob(terms.tables[t].data, {numbers}, compute_options(query));
      for (int64_t copy = 0; copy < tables.size(0); ++copy) sums.add_(tables[copy].narrow(0, first, numbers));
      first += numbers;
    });
  }
  // Skips sequences without queries. If the whole call has only one query, the mask has one row for all sequences. An
  // empty sequence would then overwrite the gradient of this row with 0.
  if (call.mask_is_shared && call.sequences > 0)
    entries.run([](const auto& p) { return p.queries > 0 ? p.mask_tasks() : 0; },
                [](const auto& p) { return 2 * product_flops(p); }, workspace,
                [](const auto& p, const auto& k, int64_t task, char* own) { k.mask(p, task, own); });
  if (call.grad_sinks || call.grad_mask_rows)
    entries.run([](const auto& p) { return p.row_tasks(); },
                [](const auto& p) { return 4.0 * number_of_rows(p) * p.value_dim; }, workspace,
                [](const auto& p, const auto& k, int64_t task, char* own) { k.rows(p, task, own); });
  return workspace;
}

template <auto kKernel, class Params>
void run_gradients(Params& call, const Tensor& query) {
  const Masks masks(call, query);
  Params planned = call;  // gradients() changes the entries, and a single entry is the whole call
  int64_t workspace = 0;
  each_group_of_entries<kKernel>(
      planned, query, [&](const auto& entries) { workspace = std::max(workspace, gradients(call, entries, query)); });
  // Entries of a batch may share a mask, so one task sums over all entries. Packed sequences do not share a mask.
  if (!call.mask_is_shared || call.sequences > 0) return;
  const BackwardKernels<Params>& k = kernels_for<kKernel>(call);
  run_tasks(call.mask_tasks(), 2 * product_flops(call), std::max(workspace, k.workspace(call)), k.on_thread,
            [&](int64_t task, char* own) { k.mask(call, task, own); });
}

void run_backward(BackwardParams& p, const Tensor& query) { run_gradients<&Kernels::backward>(p, query); }
void run_second(SecondParams& p, const Tensor& query) { run_gradients<&Kernels::second>(p, query); }

// ---------------------------------------------------------------------------------------------------------------
// Tangent

void run_tangent(TangentParams& call, const Tensor& query) {
  const Masks masks(call, query);
  each_group_of_entries<&Kernels::tangent>(call, query, [&](const auto& entries) {
    for (const auto& [p, _] : entries) p->rows_per_task = kRowTile;
    entries.run([](const auto& p) { return p.tasks(); }, [](const auto& p) { return 4 * product_flops(p); },
                entries.workspace(),
                [](const auto& p, const auto& k, int64_t task, char* own) { k.run(p, task, own); });
  });
}

// ---------------------------------------------------------------------------------------------------------------
// Statistics

void plan(StatsParams& p) {
  plan_rows(p);
  // The second pass is planned in the same way, with keys and rows exchanged.
  p.keys_per_task = kStatsKeyTiles * kKeyTile;
  while (p.keys_per_task > kKeyTile && p.key_tasks() < 2 * kEnoughTasks) p.keys_per_task /= 2;
  const int64_t tasks = p.heads * divide_up(p.keys, kKeyTile);
  p.rows_per_chunk = chunk_length(p.queries, tasks, kEnoughTasks, p.queries / kLeastChunk);
  p.chunks = divide_up(p.queries, p.rows_per_chunk);
}

void run_stats(StatsParams& p, const Tensor& query) {
  plan(p);
  const auto workspaces = allocate_partial(p, query);
  const Tensor mask_tiles = look_at_mask(p, query);
  const StatsKernels& k = kernels_for<&Kernels::stats>(p);
  const int64_t workspace = k.workspace(p), rows = number_of_rows(p), keys = p.batch * p.heads * p.keys;
  const Tensor scores = at::empty({k.keeps_scores ? rows * round_up(p.keys, kKeyTile) : 0}, compute_options(query));
  p.scores = scores.mutable_data_ptr();
  run_tasks(p.tasks(), product_flops(p), workspace, k.on_thread,
            [&](int64_t task, char* own) { k.rows(p, task, own); });
  run_ranges(rows, kRowsPerRange, 64.0 * p.splits * rows, 0,
             [&](int64_t first, int64_t last, char*) { k.finish(p, first, last); });
  run_tasks(p.key_tasks(), product_flops(p), workspace, k.on_thread,
            [&](int64_t task, char* own) { k.keys(p, task, own); });
  if (p.chunks > 1)
    run_ranges(keys, kRowsPerRange, 1.0 * p.chunks * keys, 0,
               [&](int64_t first, int64_t last, char*) { k.add_chunks(p, first, last); });
}

void run_weights(WeightsParams& p, const Tensor& query) {
  const Tensor mask_tiles = look_at_mask(p, query);
  const OnePassKernels<WeightsParams>& k = kernels_for<&Kernels::weights>(p);
  run_tasks(p.tasks(), 2 * product_flops(p), k.workspace(p), k.on_thread,
            [&](int64_t task, char* own) { k.run(p, task, own); });
}

void write_sequences(const PackedSequences& sequences, const at::Tensor&) {
  for (int64_t i = 0; i < sequences.batch; ++i) sequences.write(i);
}

constexpr Device kCpu{draw_rng_state, run_forward, run_backward,    run_tangent,
                      run_second,     run_stats,   write_sequences, run_weights};

}  // namespace

TORCH_LIBRARY_IMPL(attn, CPU, m) {
  register_kernels<kCpu>(m);
  device_of(c10::kCPU) = &kCpu;
}

}  // namespace attn
