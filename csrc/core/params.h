// The parameters of kernels: plain data with 64-bit sizes and strides in elements, without torch and the STL.
#pragma once

#include <stdint.h>

// Marks a function that is always inlined. Otherwise the linker might keep a copy that was compiled for one instruction
// set and use it for all (cpu/isa.h). CUDA's kernels call such functions too.
#ifdef __CUDACC__
#define ATTN_INLINE inline __host__ __device__ __attribute__((always_inline))
#else
#define ATTN_INLINE inline __attribute__((always_inline))
#endif
// Before a loop of a GPU that runs seldom.
#ifdef __CUDA_ARCH__
#define ATTN_NOT_UNROLLED _Pragma("unroll 1")
#else
#define ATTN_NOT_UNROLLED
#endif

static_assert(sizeof(void*) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "attn is written for 64-bit processors whose numbers begin with the lowest byte");

namespace attn {

// a = quotient * b + remainder, for a >= 0 and b > 0. GPUs have no division of 64-bit numbers: a / b calls a function,
// for which a kernel keeps many registers free. Numbers beyond 32 bits are rare, so they may take this loop.
struct Quotient {
  int64_t quotient, remainder;
};
ATTN_INLINE constexpr Quotient divide(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) {
    const auto x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b), quotient = x / y;
    return {quotient, x - quotient * y};
  }
  Quotient result{0, 0};
  ATTN_NOT_UNROLLED
  for (int bit = 62; bit >= 0; --bit) {
    result.remainder = 2 * result.remainder + (a >> bit & 1);
    if (result.remainder < b) continue;
    result.remainder -= b;
    result.quotient += int64_t{1} << bit;
  }
  return result;
}

struct PairProgram;  // core/program.h
struct TermGradients;
struct PairMask;

enum class DType : uint8_t { f64, f32, bf16, f16, i8, e4m3, boolean, i64 };

// The largest number of batch dimensions, after neighbouring dimensions with compatible strides are merged.
constexpr int kMaxBatchDims = 16;

// The number of rows and of keys in a tile of scores, on every device (each device has a static_assert). It is also the
// number of rows of a mask's gradient that one task owns. It is 64, because one uint64_t holds a row of a boolean tile
// (cpu/tiles/mask.inl).
constexpr int64_t kScoreTile = 64;

// The effect of a mask on a tile of scores.
constexpr uint8_t kSomeVisible = 1;  // some query may see some key
constexpr uint8_t kSomeChanged = 2;  // some score is hidden, or a number is added to it

// Says which array tells where the packed sequences of an operand begin: query_starts, key_starts or none. The type is
// a byte, because CUDA limits the size of a kernel's arguments.
enum class Axis : uint8_t { none, queries, keys };

// One tensor [*batch, head, row, col]. A stride of 0 broadcasts.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::f32;
  Axis axis = Axis::none;
  int64_t batch[kMaxBatchDims] = {};
  int64_t head = 0;
  int64_t row = 0;
  int64_t col = 0;
  int64_t page = 0;  // for keys and values in pages: the distance from one page to the next
};

// Describes keys and values that are stored in pages of a pool. Row r of entry n is row r % page_size of page table[n *
// per_entry + r / page_size * per_page]. If table is null, rows are stored one after the other.
struct Paging {
  const void* table = nullptr;  // the caller's int32 or int64; kernels read only entries of pages in use
  bool is_wide = false;         // whether table is int64
  int64_t per_entry = 0, per_page = 0;
  int64_t page_size = 0;  // in rows
  int64_t pages = 0;      // the number of pages in the pool
};

// Apart from the mask, a query at position p sees the keys j with p - left <= j <= p + right. A negative left or right
// means no bound on this side. If right is 0, attention is causal.
//
// Query i of batch entry n stands at position i + offsets[n]. The entry has query_lengths[n] queries and key_lengths[n]
// keys. Kernels never read other keys, nor their values and their part of the mask. The arrays have the shape [batch]
// and are on the device. If `offsets` is null, the offset is 0. If an array of lengths is null, all keys or all queries
// are in use.
struct Visibility {
  int64_t left = -1;
  int64_t right = -1;
  const int64_t* offsets = nullptr;
  const int64_t* key_lengths = nullptr;
  const int64_t* query_lengths = nullptr;
};

// Whole numbers from the caller, on the device. They are int64 if is_wide, else int32. `data` is null if there are
// none.
struct WholeNumbers {
  const void* data = nullptr;
  bool is_wide = false;

  ATTN_INLINE int64_t operator[](int64_t i) const {
    return is_wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// Packed sequences as the caller gives them, and the array that write() fills.
struct PackedSequences {
  WholeNumbers cu_seq_q, cu_seq_k;     // [sequences + 1]; no cu_seq_k if keys are in pages
  WholeNumbers key_lengths, offsets;   // [batch]
  int64_t batch = 0, sequences = 0;    // batch also counts the dimensions before the sequences
  int64_t tokens = 0, key_tokens = 0;  // of all sequences
  int64_t* numbers = nullptr;          // [5, batch]: query_starts, queries, key_starts, keys, offsets

  // Writes the numbers of entry i. Clamps the caller's numbers, because they are not validated on a GPU. So no sequence
  // begins or ends outside the tokens.
  ATTN_INLINE void write(int64_t i) const {
    const int64_t n = i % sequences;
    const auto within = [](int64_t number, int64_t last) { return number < 0 ? 0 : number < last ? number : last; };
    const int64_t query_start = within(cu_seq_q[n], tokens), queries = within(cu_seq_q[n + 1], tokens) - query_start;
    int64_t key_start = 0, keys = INT64_MAX;
    if (cu_seq_k.data) {
      key_start = within(cu_seq_k[n], key_tokens);
      keys = within(cu_seq_k[n + 1], key_tokens) - key_start;
    }
    if (key_lengths.data && key_lengths[i] < keys) keys = key_lengths[i];
    numbers[i] = query_start;
    numbers[batch + i] = queries;
    numbers[2 * batch + i] = key_start;
    numbers[3 * batch + i] = keys;
    numbers[4 * batch + i] = offsets.data ? offsets[i] : keys - queries;
  }
};

// The attention problem itself, which every kernel gets. score.h defines its scores, and geometry.h defines its
// addresses.
struct Problem {
  int batch_dims = 0;
  int64_t batch_size[kMaxBatchDims] = {};
  int64_t batch = 1;  // product of batch_size
  int64_t heads = 1;  // of the query and the output
  int64_t key_heads = 1;
  int64_t value_heads = 1;
  int64_t queries = 0;    // L; if sequences are packed, L of the longest sequence
  int64_t keys = 0;       // S, likewise
  int64_t head_dim = 0;   // E
  int64_t value_dim = 0;  // Ev
  double scale = 1;       // factor of products: the caller's, or 1 / sqrt(E)
  double softcap = 0;     // 0: none
  Visibility visibility;
  // One number for each batch entry and head, in the compute dtype, [batch, heads]; null if there are none.
  const void* alibi_slopes = nullptr;
  const void* sinks = nullptr;
  bool has_mask = false;  // boolean (true = attend) or additive
  bool has_dropout = false;
  // Whether the bits of a row must depend only on its query and the keys that the query sees (attn::invariant()).
  bool invariant = false;
  // Factors of products may be rounded to this number of bits: 53, 24, 16, or 8 as in bfloat16.
  int factor_bits = 53;

  // If sequences are packed, the last dimension of the batch has one entry for each sequence, and has stride 0. The
  // sequence of batch entry n begins at row query_starts[n] of an operand of queries, and at row key_starts[n] of an
  // operand of keys. Both arrays have the shape [batch] and are on the device. `sequences` is 0 if no sequences are
  // packed.
  int64_t sequences = 0;
  const int64_t* query_starts = nullptr;
  const int64_t* key_starts = nullptr;  // null where keys are in pages
  Paging paging;                        // forward only: derivatives refuse pages
  // If a CPU runs one entry of a call by itself, first_entry is the entry's number in the batch. If sequences are
  // packed, `tokens` counts the rows of a head in the whole call. `key_tokens` counts the keys of a key head, except
  // keys in pages.
  int64_t first_entry = 0;
  int64_t tokens = 0;
  int64_t key_tokens = 0;

  Operand query;
  Operand key;
  Operand value;
  Operand mask;  // with a score_mod: its pair terms, and has_mask is false
  // For each tile of the mask (kScoreTile queries and kScoreTile keys), one byte with the bits kSomeVisible and
  // kSomeChanged: [*batch, head, tile of queries, tile of keys]. Heads that share a mask learn from these bytes which
  // tiles of the mask they must read. `data` is null if the bytes are not computed.
  Operand mask_tiles;

  // Dropout. The columns of `rng` are (seed, offset, period), in int64. For query i and key j, Philox4x32-10 with key
  // `seed` and counter (j / 4, i, r, offset) draws four words. Here r = (batch * heads + head) % period is the number
  // of the head. The weight of query i and key j is kept if word j % 4 is below `keep_below`. The period is the number
  // of heads in all batch entries of the call that drew the seed. Therefore the random numbers of a sample stay the
  // same when vmap adds batch dimensions in front.
  Operand rng;
  uint64_t keep_below = 0;
  double keep_scale = 1;  // 1 / (1 - p), 0 for p = 1

  // A score_mod, a mask_mod or both, on a CPU; null if the call has neither. If there is a program, all rows of a tile
  // belong to one head (group = 1).
  const PairProgram* program = nullptr;

  // Heads [g * group, (g + 1) * group) read the same key head and the same value head. Their rows form one list: row r
  // is query r % L of head g * group + r / L.
  int64_t group = 1;
  ATTN_INLINE constexpr int64_t rows() const { return group * queries; }
  ATTN_INLINE constexpr int64_t groups() const { return divide(heads, group).quotient; }
};

// Statistics of rows are contiguous [batch, heads, L], or [heads, tokens] with packed sequences, in float32 (float64
// for float64 inputs). The logsumexp is a pair of numbers, [batch, heads, L, 2]. If all scores of a row are near -1e9
// or finfo.min (because a mask adds such a number to each), a single number has no digits left for log(sum), and the
// weights exp(x - logsumexp) would not sum to 1. Each device defines its own pair. Only the kernels of that device and
// operators/logsumexp_pair.cpp read the pair. The pair of a row without keys is (-inf, 0). Any other row has the pair:
//   CPU   (m, l): the weight of key j is 2^((x_j - m) slope - l). Here x_j is the key's product or score, m is near the
//         largest x_j, and slope is log2_slope() of cpu/tiles/scores.inl. logsumexp = (m slope + l) / log2(e). If a row
//         sees a single key, the weight of this key is exactly 1.
//   CUDA  the rounded logsumexp and its rounding error

// A problem whose rows are cut into tasks. If there are few rows and many keys, the keys are cut too, into `splits`
// chunks. A chunk has `keys_per_split` keys, which fill whole tiles. The task of a chunk writes partial results, which
// are merged in order afterwards. The shape alone (on CUDA also the device) decides how rows and keys are cut, so the
// bits of results do not depend on the number of threads.
struct RowParams : Problem {
  int64_t rows_per_task = 0;
  int64_t splits = 1;
  int64_t keys_per_split = int64_t{1} << 62;  // all

  ATTN_INLINE constexpr int64_t tasks() const { return batch * groups() * row_tasks() * splits; }
  ATTN_INLINE constexpr int64_t row_tasks() const { return (rows() + rows_per_task - 1) / rows_per_task; }
};

// The order in which blocks take tasks that take different times. The tasks of a list see ever fewer keys if the call
// is causal. So `at_once` lists, whose keys and values fit into a cache together, are passed over side by side. Long
// tasks then come before short ones, and all blocks end at about the same time. at_once is 0 if there is no order.
struct TaskOrder {
  int64_t tasks = 0;  // of a list
  int64_t lists = 0;
  int64_t at_once = 0;

  // The number of the task whose turn is `turn`. The tasks of a list have numbers that follow each other.
  ATTN_INLINE constexpr int64_t operator[](int64_t turn) const {
    const auto [before, behind] = divide(turn, tasks * at_once);
    const int64_t first = before * at_once, here = at_once < lists - first ? at_once : lists - first;
    const auto [task, list] = divide(behind, here);
    return (first + list) * tasks + task;
  }
};

// What blocks of a GPU count, on the device. Blocks that stay for many tasks count whose turn it is, if there is an
// order: one that has ended a task takes the next one. (Otherwise a block knows all of its tasks from the start.)
// Blocks of few rows count, for each task, how many of its splits are there: the last one merges them.
struct TaskCounters {
  TaskOrder order;
  int* counters = nullptr;
  int64_t counter_count = 0;
};

struct ForwardParams : RowParams, TaskCounters {
  // Each key and each value of 8 bits has a scale, a float32: [*batch, key or value head, row], without columns. A
  // product is multiplied by the scale of its key, too, before the cap and all that is added. A weight is multiplied by
  // the scale of its value in the output, but not in the sum of weights. `data` is null if there are no scales.
  Operand key_scale;
  Operand value_scale;
  Operand output;
  Operand residual;           // the exact output minus the rounded output; data may be null. See exact_residual
  void* logsumexp = nullptr;  // may be null

  // Results for the caller, one number per row, [batch, heads, L], in the compute dtype; null if not wanted.
  // row_logsumexp includes the sink. max_score does not.
  void* row_logsumexp = nullptr;
  void* max_score = nullptr;

  void* partial_output = nullptr;     // of splits, [splits, batch, heads, L, Ev, or 2 Ev on a CPU if exact_residual]
  void* partial_logsumexp = nullptr;  // [splits, batch, heads, L, 2]
  void* partial_max = nullptr;        // [splits, batch, heads, L], if max_score is wanted

  void* prepacked = nullptr;  // keys and values in the kernel's own layout, if the kernel packs them once for all tasks

  // Whether slopes or sinks need a derivative. If so, the residual has data, and it also contains the error that
  // rounded weights cause in the output. Without this part of the residual, delta = <dO, O> is accurate enough for dS.
  // But the sum over j of dS_ij then differs from 0 by an error, and the gradient of a slope multiplies this error by
  // distances.
  bool exact_residual = false;
};

struct BackwardParams : Problem {
  Operand output;
  Operand residual;
  Operand grad_output;
  const void* logsumexp = nullptr;
  // The gradient of each row's row_logsumexp, [batch, heads, L]. If null, this gradient is 0.
  const void* grad_logsumexp = nullptr;
  void* delta = nullptr;  // on CUDA: delta_i, [batch, heads, L]; with grad_logsumexp also each delta_i's rounding error

  // `data` is null if the gradient is not wanted.
  Operand grad_query;
  Operand grad_key;
  Operand grad_value;
  Operand grad_mask;  // stride 0 where the mask was broadcast
  // One number per row, [batch, heads, L], in the compute dtype; null if not wanted. Sums of these numbers are the
  // gradients of slopes, of sinks and of a mask that is the same for all keys.
  void* grad_slopes = nullptr;
  void* grad_sinks = nullptr;
  void* grad_mask_rows = nullptr;
  TermGradients* grad_terms = nullptr;  // of the terms of `program`; null if not wanted

  // Query heads [u * span, (u + 1) * span) form a span. A span contains all query heads that share one of its key heads
  // or value heads. A task goes over the rows of a group in passes of `rows_per_pass` rows.
  int64_t span = 1;
  int64_t rows_per_pass = 0;
  // The shape alone decides how keys are cut into chunks. The chunks' shares of grad_query are added in order. If
  // all_chunks_at_once, one task computes all chunks of a span. Otherwise each chunk of a span is a task. In each pass,
  // the task waits until turns[number of the pass] says that all earlier chunks are added. Then the task adds its share
  // to grad_query_sum, which has the compute dtype and may be grad_query itself.
  int64_t chunks = 1;
  int64_t keys_per_chunk = 0;
  bool all_chunks_at_once = false;
  bool few_rows = false;  // on CUDA: whether a block of dQ owns few rows, because there are few blocks
  Operand grad_query_sum;
  int32_t* turns = nullptr;  // [batch, groups, passes], zeros; null if one task has all chunks of a span

  ATTN_INLINE constexpr int64_t tasks() const { return spans() * (all_chunks_at_once ? 1 : chunks); }
  ATTN_INLINE constexpr int64_t keys_per_task() const { return all_chunks_at_once ? keys : keys_per_chunk; }
  ATTN_INLINE constexpr int64_t spans() const { return batch * (heads / span); }
  ATTN_INLINE constexpr int64_t passes() const { return (rows() + rows_per_pass - 1) / rows_per_pass; }
  // The number of tasks that compute gradients of whole rows. Each task has kScoreTile rows of a group of heads.
  ATTN_INLINE constexpr int64_t row_tasks() const { return batch * groups() * row_tiles(); }
  ATTN_INLINE constexpr int64_t row_tiles() const { return (rows() + kScoreTile - 1) / kScoreTile; }

  // Whether several scores share a number of the mask. If so, a separate pass sums the mask's gradient, and the tasks
  // of this pass own disjoint parts of the gradient. If not, the main pass writes the gradient.
  bool mask_is_shared = false;
  int64_t mask_slices = 0;     // different (batch, head) slices of the mask
  int64_t mask_row_tasks = 0;  // blocks of queries, 1 if all queries share one row
  int64_t mask_key_tasks = 0;  // blocks of keys
  ATTN_INLINE constexpr int64_t mask_tasks() const { return mask_slices * mask_row_tasks * mask_key_tasks; }
};

// A direction t in the space of inputs, along which derivatives are taken. If the data of a part of t is null, this
// part is 0.
struct Tangents {
  Operand query;
  Operand key;
  Operand value;
  Operand mask;
  const void* alibi_slopes = nullptr;
  const void* sinks = nullptr;
};

// J t, the derivative of the output along t. J is the Jacobian of the output.
struct TangentParams : RowParams {
  Tangents t;
  Operand output;
  Operand residual;
  const void* logsumexp = nullptr;
  Operand tangent_output;
  Operand tangent_residual;
  void* tangent_logsumexp = nullptr;  // [batch, heads, L, 2]: d logsumexp along t, a sum of two numbers
};

// H(u; x; t) = grad_x <u, J(x) t> is the derivative of the gradients J'u along t. The gradient fields of BackwardParams
// hold H.
struct SecondParams : BackwardParams {
  Tangents t;
  Operand tangent_output;
  Operand tangent_residual;
  const void* tangent_logsumexp = nullptr;
  void* tangent_delta = nullptr;  // on CUDA: the derivative of delta
};

// The statistics of the scores of every row (core/statistics.h), and the weight that every key receives.
//
// There are two passes, because a weight needs the sum over its whole row. A task of the first pass goes over the keys
// of some rows. A task of the second pass takes some keys, and goes over the rows that see these keys. Results are
// contiguous, in the compute dtype.
struct StatsParams : RowParams {
  void* largest_score = nullptr;    // [batch, heads, L]
  void* entropy = nullptr;          // likewise
  void* logsumexp = nullptr;        // likewise: one number, not a pair
  void* received_weight = nullptr;  // [batch, heads, S]

  void* partial = nullptr;  // RowStatistics of splits, [splits, batch, heads, L]
  void* pairs = nullptr;    // the reference and inverse_sum of every row, [batch, heads, L, 2]
  void* scores = nullptr;   // scores kept for the second pass, [batch, heads, L, S up to whole tiles]; may be null

  // A task of the second pass adds up the weights of some keys of one head over a chunk of the rows. If there are
  // several chunks, each task writes a partial sum, [chunks, batch, heads, S]. These sums are added in order
  // afterwards.
  int64_t keys_per_task = 0;
  int64_t chunks = 1;
  int64_t rows_per_chunk = 0;  // whole tiles
  void* partial_received = nullptr;

  ATTN_INLINE constexpr int64_t key_tasks() const { return batch * heads * key_tasks_of_head() * chunks; }
  ATTN_INLINE constexpr int64_t key_tasks_of_head() const { return (keys + keys_per_task - 1) / keys_per_task; }
};

// The weights and scores of every row. Only the CPU has a kernel that computes them.
struct WeightsParams : Problem {
  Operand weights;  // [*batch, heads, L, S]; if of_all_heads, the mean over the heads, [*batch, 1, L, S]
  Operand scores;   // [*batch, heads, L, S]; data may be null
  Operand output;   // [*batch, heads, L, Ev]; data may be null
  bool of_all_heads = false;

  // A task computes a tile of rows of one head or, if of_all_heads, of all heads.
  ATTN_INLINE constexpr int64_t tasks() const { return batch * head_tasks() * row_tiles(); }
  ATTN_INLINE constexpr int64_t head_tasks() const { return of_all_heads ? 1 : heads; }
  ATTN_INLINE constexpr int64_t row_tiles() const { return (queries + kScoreTile - 1) / kScoreTile; }
};

// Calls f(operand) for every operand of the params.
void each_operand(Problem& p, auto f) { f(p.query), f(p.key), f(p.value), f(p.mask), f(p.mask_tiles), f(p.rng); }
void each_operand(Tangents& t, auto f) { f(t.query), f(t.key), f(t.value), f(t.mask); }
void each_operand(ForwardParams& p, auto f) {
  each_operand(static_cast<Problem&>(p), f);
  f(p.key_scale), f(p.value_scale), f(p.output), f(p.residual);
}
void each_operand(BackwardParams& p, auto f) {
  each_operand(static_cast<Problem&>(p), f);
  f(p.output), f(p.residual), f(p.grad_output);
  f(p.grad_query), f(p.grad_key), f(p.grad_value), f(p.grad_mask), f(p.grad_query_sum);
}
void each_operand(TangentParams& p, auto f) {
  each_operand(static_cast<Problem&>(p), f);
  each_operand(p.t, f);
  f(p.output), f(p.residual), f(p.tangent_output), f(p.tangent_residual);
}
void each_operand(SecondParams& p, auto f) {
  each_operand(static_cast<BackwardParams&>(p), f);
  each_operand(p.t, f);
  f(p.tangent_output), f(p.tangent_residual);
}

// Calls f(pointer, count) for every array with `count` numbers per row, and g(pointer) for every array with one number
// per head.
void each_of_rows(ForwardParams& p, auto f, auto g) {
  f(p.logsumexp, 2), f(p.row_logsumexp, 1), f(p.max_score, 1);
  g(p.alibi_slopes), g(p.sinks);
}
void each_of_rows(BackwardParams& p, auto f, auto g) {
  f(p.logsumexp, 2), f(p.grad_logsumexp, 1), f(p.grad_slopes, 1), f(p.grad_sinks, 1), f(p.grad_mask_rows, 1);
  g(p.alibi_slopes), g(p.sinks);
}
void each_of_rows(TangentParams& p, auto f, auto g) {
  f(p.logsumexp, 2), f(p.tangent_logsumexp, 2);
  g(p.alibi_slopes), g(p.sinks), g(p.t.alibi_slopes), g(p.t.sinks);
}
void each_of_rows(SecondParams& p, auto f, auto g) {
  each_of_rows(static_cast<BackwardParams&>(p), f, g);
  f(p.tangent_logsumexp, 2);
  g(p.t.alibi_slopes), g(p.t.sinks);
}

}  // namespace attn
