// Chooses the kernels for a problem and cuts their work into blocks. Also has the kernels that write dropout's state
// and the numbers of packed sequences (PackedSequences).
#include "cuda/launch.cuh"

#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/shared/rows.cuh"

namespace attn::cuda {

namespace {

// Calls f.template operator()<S, kDim>() with the type of the query and the padded head size.
template <class F>
Error with_mma(const Problem& p, F f) {
  return with_padded_dim(larger(p.head_dim, p.value_dim), [&]<int kDim>() {
    return p.query.dtype == DType::bf16 ? f.template operator()<BFloat16, kDim>() : f.template operator()<Half, kDim>();
  });
}

// Calls f.template operator()<T>() with the type that the kernels without tensor cores compute in.
template <class F>
Error with_simt(const Problem& p, F f) {
  return p.query.dtype == DType::f64 ? f.template operator()<double>() : f.template operator()<float>();
}

template <class Params>
Error run_gradients_simt(const Params& p, Stream stream) {
  return with_simt(p, [&]<class T>() {
    const Error error = launch_delta_simt<T>(p, stream);
    return error ? error : launch_gradients_simt<T>(p, stream);
  });
}

// Whether the gradient of the mask is summed over rows. A kernel without tensor cores computes it, after the others.
bool sums_simt(const BackwardParams& p) { return p.mask_is_shared && !sums_mask(p); }

// Whether launch_delta_mma() can write `delta`. Its kernel loads 16 bytes at a time, so the rows of all inputs must
// consist of whole vectors (in_vectors()). Kernels without tensor cores must not read this `delta`, because they need
// the order of summation of DeltaSimt.
bool delta_takes_vectors(const BackwardParams& p) {
  return !sums_simt(p) && p.output.dtype == p.query.dtype && in_vectors(p, p.output, p.value_dim) &&
         (!p.residual.data || in_vectors(p, p.residual, p.value_dim));
}

// Dropout's state. A kernel writes it, because the host does not know it while a graph is captured.
struct RngState {
  int64_t* state;
  RngNumber seed, offset;
  int64_t period;
};

__global__ void write_rng_state(const __grid_constant__ RngState r) {
  if (threadIdx.x > 0) return;
  const auto value = [](const RngNumber& x) {
    return static_cast<int64_t>((x.pointer ? static_cast<uint64_t>(*x.pointer) : 0) + x.number);
  };
  r.state[0] = value(r.seed);
  r.state[1] = value(r.offset);
  r.state[2] = r.period;
}

constexpr int kWritingThreads = 128;

__global__ void write_sequences(const __grid_constant__ PackedSequences s) {
  const int64_t i = block_number() * kWritingThreads + threadIdx.x;
  if (i < s.batch) s.write(i);
}

// The same problem, of which only the gradient of the mask is asked for.
BackwardParams without_others(BackwardParams p) {
  p.grad_query.data = p.grad_key.data = p.grad_value.data = p.grad_slopes = nullptr;
  return p;
}

// Launches the kernels with tensor cores, and then a kernel without them if sums_simt().
Error run_backward_mma(const BackwardParams& p, int* counter, const Gpu& gpu) {
  const Stream stream = gpu.stream;
  const auto run = [&]<class S, int kDim>() -> Error {
    if (Error error = delta_takes_vectors(p) ? launch_delta_mma<S>(p, stream) : launch_delta_simt<float>(p, stream))
      return error;
#ifdef ATTN_SM90A
    if constexpr (kDim <= kBackwardWgmmaDim)
      if (uses_backward_wgmma(p, gpu)) {
        Error error = launch_backward_wgmma<S, kDim>(p, counter, gpu);
        if (error || !p.grad_mask.data || sums_simt(p)) return error;
        BackwardParams only_mask = without_others(p);
        only_mask.mask_is_shared = p.grad_mask.row != 0;  // perhaps by one head alone; see sums_mask()
        return launch_backward_mma<S, kDim>(only_mask, stream);
      }
#endif
    return launch_backward_mma<S, kDim>(p, stream);
  };
  if (Error error = with_mma(p, run)) return error;
  if (!sums_simt(p)) return nullptr;
  return launch_gradients_simt<float>(without_others(p), stream);
}

}  // namespace

// Whether both have their numbers in the same places.
static bool lie_together(const Problem& p, const Operand& x, const Operand& y) {
  return x.data == y.data && x.dtype == y.dtype && x.head == y.head && x.row == y.row && x.col == y.col &&
         x.page == y.page && std::equal(x.batch, x.batch + p.batch_dims, y.batch);
}
static bool reads_vectors(const Problem& p) {
  return in_vectors(p, p.key, p.head_dim) && in_vectors(p, p.value, p.value_dim) &&
         p.key.page % vector_of(p.key) == 0 && p.value.page % vector_of(p.value) == 0;
}

// Never within Problem::invariant, where a sequence in pages has the bits that it has alone with its length. Alone, its
// rows would have to be copied for tensor cores, which key lengths forbid.
bool reads_numbers(const Problem& p) { return p.paging.table && !p.invariant && !is_8_bit(p.key) && !reads_vectors(p); }

// Kernels with tensor cores round weights to 16 bits. This is too inexact for a float32 mask and its gradient. Keys and
// values whose rows are not vectors are copied first. With key lengths or pages, keys and values must not be copied,
// because the copy would read keys that are not in use. From pages such rows are read one number at a time. Keys and
// values of 8 bits are never copied, and both must have 8 bits.
bool uses_mma(const Problem& p) {
  const bool exact_weights = p.has_mask && p.mask.dtype == DType::f32;
  const bool is_16_bits = p.query.dtype == DType::bf16 || p.query.dtype == DType::f16;
  if (is_8_bit(p.key) != is_8_bit(p.value)) return false;
  const bool may_be_copied = !p.visibility.key_lengths && !p.paging.table && !is_8_bit(p.key);
  return is_16_bits && !exact_weights && !has_score_mod(p) && (may_be_copied || reads_vectors(p) || reads_numbers(p)) &&
         larger(p.head_dim, p.value_dim) <= kMmaMaxDim;
}

// Kernels for Hopper are compiled for sm_90a alone. Builds say whether they are (setup.py, CMakeLists.txt).
static bool has_wgmma(const Gpu& gpu) {
#ifdef ATTN_SM90A
  return gpu.capability == 90;
#else
  return false;
#endif
}

// Keys of 8 bits and reads_numbers() take the kernels of all GPUs. So do few rows, whose keys those kernels cut into
// splits, but not within Problem::invariant, because a row's bits must not depend on how many rows
// there are. So do scores that fall as products grow, and slopes that cannot be divided by the scale or by the cap
// (terms_left()).
static bool uses_wgmma(const Problem& p, const Gpu& gpu) {
  constexpr int64_t kFewRows = 64;
  constexpr double kLeast = 1e-20;
  const bool divides = !p.alibi_slopes || (p.softcap > 0 ? p.softcap : p.scale) > kLeast;
  return has_wgmma(gpu) && uses_mma(p) && divides && ScoreFunction<float>::of(p).keeps_order() && !is_8_bit(p.key) &&
         !reads_numbers(p) && (p.invariant || p.rows() > kFewRows);
}

// A mask and dropout of larger heads or of pages take the kernels of all GPUs, and therefore within Problem::invariant
// all of them do. So do a mask of packed sequences, and dropout beside another option.
static bool takes_mask_and_dropout(const Problem& p) {
  if (!p.has_mask && !p.has_dropout) return true;
  const bool fits = larger(p.head_dim, p.value_dim) <= kMaskedWgmmaDim && !p.invariant && !p.paging.table;
  return fits && (p.has_dropout ? !p.has_mask && !has_score_terms(p) : p.sequences == 0);
}

// Slopes that need a gradient need an output that is more exact than weights of 16 bits give.
bool uses_forward_wgmma(const ForwardParams& p, const Gpu& gpu) {
  return uses_wgmma(p, gpu) && !(p.alibi_slopes && (p.exact_residual || p.invariant)) && takes_mask_and_dropout(p);
}

// Larger heads, keys and values that different numbers of heads share, slopes that need a gradient beside a cap, and a
// mask beside a cap that is large or has slopes beside it take the kernels of all GPUs.
bool uses_backward_wgmma(const BackwardParams& p, const Gpu& gpu) {
  const bool takes_cap = !(p.grad_slopes && p.softcap > 0) && !(p.has_mask && cap_beside_slopes(p) == Cap::large);
  return uses_wgmma(p, gpu) && takes_mask_and_dropout(p) && takes_cap &&
         larger(p.head_dim, p.value_dim) <= kBackwardWgmmaDim && p.key_heads == p.value_heads;
}

// Whether the kernels of multi-head latent attention compute the forward: the values are the first columns of the
// keys, in the same memory. Not if derivatives may follow: their kernels of these head sizes compute in float32, and
// expect an output as exact. Nor within Problem::invariant, where a copy of the values has to give the same bits.
static bool uses_latent(const ForwardParams& p) {
  const bool is_16_bits = (p.query.dtype == DType::bf16 || p.query.dtype == DType::f16) && !is_8_bit(p.key);
  const bool fits = p.head_dim > kMmaMaxDim && p.head_dim <= kLatentKeyDim &&
                    p.value_dim <= smaller(p.head_dim, kLatentValueDim) && p.key_heads == p.value_heads;
  return is_16_bits && fits && !is_general(p) && !p.invariant && !p.logsumexp && in_vectors(p, p.query, p.head_dim) &&
         reads_vectors(p) && lie_together(p, p.key, p.value);
}

// Whether the kernel for decoding computes the forward. Within Problem::invariant it never does, because the bits of a
// row must not depend on how many rows there are.
static bool uses_decode(const Problem& p) {
  return uses_mma(p) && !reads_numbers(p) && !p.invariant && !p.has_dropout && p.rows() <= kDecodeRows;
}

// Returns an upper bound on the number of keys that the rows of a task see. Counts keys from the start of a tile of
// `tile` keys, because splits begin at the start of a tile (Task::set()). Does not read offsets and lengths, because
// only the device knows them.
static int64_t keys_to_split(const RowParams& p, int64_t tile = kKeysPerTile) {
  // See positions_of_rows().
  const bool share_tiles = p.queries % p.rows_per_task != 0 && !heads_apart(p, p.queries, p.rows_per_task);
  const bool heads_meet = p.group > 1 && (p.sequences > 0 || share_tiles);
  const int64_t rows = heads_meet ? p.queries : smaller(p.rows_per_task, p.queries);
  const int64_t keys = smaller(p.keys, most_keys(p, rows) + tile - 1);
  if (p.visibility.offsets || p.visibility.key_lengths) return keys;
  return smaller(keys, visible_keys(sequence_of(p, 0), {0, p.queries}).last);
}

// Returns the number of splits with which the busiest multiprocessor ends first, if it takes `rows` rows of each task.
// Memory binds, so its blocks take as long side by side as one after the other. The constants are counted in keys that
// could be read meanwhile, twice as many if they have 8 bits: to start a block, to clear counters, and for a round of
// loads of the merge, in which a warp has eight splits of a row. They are assumed.
static int64_t decode_splits(int64_t tasks, int64_t rows, int64_t keys, int64_t tile, int64_t multiprocessors,
                             bool of_8_bits) {
  const int64_t times = of_8_bits ? 2 : 1, start = 128 * times, clear = 64 * times, round = 20 * times;
  int64_t best = 1, least = divide_up(tasks, multiprocessors) * (keys + start);
  for (int64_t splits = 2; splits <= keys / (4 * tile); ++splits) {
    const int64_t blocks = divide_up(tasks * splits, multiprocessors);
    const int64_t merge = clear + round * divide_up(rows, 4) * (3 + divide_up(splits, 8));
    if (blocks * start + keys * tasks / multiprocessors + merge > least) break;  // and so on for more splits
    const int64_t time = blocks * (round_up(divide_up(keys, splits), tile) + start) + merge;
    if (time < least) best = splits, least = time;
  }
  return best;
}

// Whether only blocks of few rows are instantiated, which saves compile time.
static bool takes_few_rows(const Problem& p) { return is_8_bit(p.key) || reads_numbers(p); }

void plan_forward(ForwardParams& p, const Gpu& gpu) {
  const int64_t dim = larger(p.head_dim, p.value_dim);
  const bool is_latent = uses_latent(p), decodes = uses_decode(p);
  const bool on_hopper = uses_forward_wgmma(p, gpu) || (is_latent && has_wgmma(gpu));
  const int64_t tile = on_hopper ? forward_wgmma_keys(dim) : kKeysPerTile;
  p.rows_per_task = decodes ? kDecodeRows : kSimtTile;
  if (on_hopper)
    p.rows_per_task = forward_wgmma_rows(dim, p.has_mask || p.has_dropout);
  else if (is_latent)
    p.rows_per_task = kLatentMmaRows;
  else if (uses_mma(p) && !decodes)
    p.rows_per_task =
        forward_mma_rows(p.rows() > forward_mma_rows(1) && !takes_few_rows(p) ? forward_mma_tiles(dim) : 1);
  const int64_t keys = keys_to_split(p, tile);
  p.keys_per_split = round_up(larger(1, keys), tile);
  if (on_hopper && p.tasks() > gpu.multiprocessors) p.order = order_of_rows(p, p.rows_per_task);
  p.counter_count = p.order.at_once > 0 ? 1 : 0;
  // If there are fewer blocks than the device runs at a time, the keys are cut into splits of whole tiles. There are
  // no more splits than run at a time, because a second wave of blocks would cost more than it gains. Up to 64 rows of
  // a group are one tile, and blocks spend their time waiting for K and V. Twice as many blocks are wanted then,
  // because more blocks, each with less to do, keep more reads under way. On Hopper a multiprocessor runs one block at
  // a time. With splits the bits of a row depend on the rest of the batch, so Problem::invariant forbids splits.
  // Without splits, rows_per_task changes no bits of a kernel.
  const int64_t at_a_time = on_hopper ? 1 : p.row_tasks() == 1 && !is_latent ? 4 : 2;
  const int64_t wanted = at_a_time * gpu.multiprocessors, enough_keys = 4 * tile;
  if (p.invariant || p.rows() == 0 || keys < 2 * enough_keys || (!decodes && p.tasks() >= wanted)) return;
  const int64_t splits = decodes ? decode_splits(p.tasks(), p.rows(), keys, tile, gpu.multiprocessors, is_8_bit(p.key))
                                 : smaller(wanted / p.tasks(), keys / enough_keys);
  if (splits < 2) return;
  p.keys_per_split = round_up(divide_up(keys, splits), tile);
  p.splits = divide_up(keys, p.keys_per_split);
  if (decodes) p.counter_count = blocks_of_rows(p, kDecodeRows);
}

Error launch_forward(const ForwardParams& p, const Gpu& gpu) {
  const bool decodes = uses_decode(p);
  const auto on_tensor_cores = [&]<class S, int kDim, bool kPaged>() {
    if (is_8_bit(p.key))
      return decodes ? launch_decode_eight_bits<S, kDim, kPaged>(p, gpu.stream)
                     : launch_forward_eight_bits<S, kDim, kPaged>(p, gpu.stream);
    if constexpr (kPaged)
      if (reads_numbers(p)) return launch_forward_numbers<S, kDim>(p, gpu.stream);
#ifdef ATTN_SM90A
    if (uses_forward_wgmma(p, gpu)) return launch_forward_wgmma<S, kDim, kPaged>(p, gpu);
#endif
    if (decodes) return launch_decode_mma<S, kDim, kPaged>(p, gpu.stream);
    return launch_forward_mma<S, kDim, kPaged>(p, gpu.stream);
  };
  const auto with_pages = [&]<class S, int kDim>() {
    return p.paging.table ? on_tensor_cores.template operator()<S, kDim, true>()
                          : on_tensor_cores.template operator()<S, kDim, false>();
  };
  const auto latent = [&]<class S>() {
#ifdef ATTN_SM90A
    if (has_wgmma(gpu)) return launch_latent_wgmma<S>(p, gpu);
#endif
    return launch_latent_mma<S>(p, gpu.stream);
  };
  const auto run = [&]() -> Error {
    if (uses_latent(p))
      return p.query.dtype == DType::bf16 ? latent.template operator()<BFloat16>() : latent.template operator()<Half>();
    if (uses_mma(p)) return with_mma(p, with_pages);
    return with_simt(p, [&]<class T>() { return launch_forward_simt<T>(p, gpu.stream); });
  };
  const Error error = run();
  if (error || p.splits == 1 || decodes) return error;
  return with_simt(p, [&]<class T>() { return launch_merge_splits<T>(p, gpu.stream); });
}

void plan_backward(BackwardParams& p, const Gpu& gpu) {
  p.few_rows = blocks_of_rows(p, 2 * kSimtTile) <= gpu.multiprocessors;
}

Error launch_backward(const BackwardParams& p, int* counter, const Gpu& gpu) {
  return uses_mma(p) ? run_backward_mma(p, counter, gpu) : run_gradients_simt(p, gpu.stream);
}

Error launch_second(const SecondParams& p, Stream stream) { return run_gradients_simt(p, stream); }

Error launch_tangent(const TangentParams& p, Stream stream) {
  return with_simt(p, [&]<class T>() { return launch_tangent_simt<T>(p, stream); });
}

void plan_stats(StatsParams& p, int64_t multiprocessors) {
  // As in plan_forward(), if there are fewer blocks than the device runs at a time, the keys or rows that a block
  // passes over are cut into parts.
  const int64_t wanted = 2 * multiprocessors;
  const auto parts = [&](int64_t blocks, int64_t length) {
    return blocks >= wanted ? 1 : larger(1, smaller(divide_up(wanted, larger(1, blocks)), length / (4 * kSimtTile)));
  };
  p.rows_per_task = kSimtTile;
  const int64_t keys = keys_to_split(p);
  p.keys_per_split = round_up(larger(1, divide_up(keys, parts(p.tasks(), keys))), kSimtTile);
  p.splits = larger(1, divide_up(keys, p.keys_per_split));
  p.keys_per_task = kSimtTile;
  p.rows_per_chunk = round_up(divide_up(p.queries, parts(p.key_tasks(), p.queries)), kSimtTile);
  p.chunks = divide_up(p.queries, p.rows_per_chunk);
}

Error launch_stats(const StatsParams& p, Stream stream) {
  return with_simt(p, [&]<class T>() { return launch_stats_simt<T>(p, stream); });
}

Error launch_write_sequences(const PackedSequences& sequences, Stream stream) {
  return launch<Nothing>(write_sequences, sequences, divide_up(sequences.batch, kWritingThreads), kWritingThreads,
                         stream);
}

Error launch_write_rng_state(int64_t* state, RngNumber seed, RngNumber offset, int64_t period, Stream stream) {
  return launch<Nothing>(write_rng_state, RngState{state, seed, offset, period}, 1, 32, stream);
}

}  // namespace attn::cuda
