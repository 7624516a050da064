// Computes and writes the statistics of rows. Also decides which weights dropout keeps.
#pragma once

#include "cuda/shared/rows.cuh"

namespace attn::cuda {

// The logsumexp of a row, or its derivative along a direction, stored as the sum of two numbers (params.h).
template <class T>
struct alignas(8) Pair {
  T high, low;
};

// Returns the rounding error of sum = a + b (Knuth's two-sum).
template <class T>
__device__ __forceinline__ T rounded_off(T a, T b, T sum) {
  const T of_b = sum - a;
  return (a - (sum - of_b)) + (b - of_b);
}

// Returns maximum + maximum_low + log(sum) as a pair; -inf for a row without keys.
template <class T>
__device__ inline Pair<T> logsumexp_of(T maximum, T maximum_low, T sum) {
  const T log_sum = static_cast<T>(log(static_cast<double>(sum)));
  const T high = maximum + log_sum;
  const T low = rounded_off(maximum, log_sum, high);
  const bool finite = high - high == 0;
  return {sum == 0 ? -infinity<T>() : high, sum == 0 || !finite ? 0 : low + maximum_low};
}

// The logsumexp of a row, from which kernels compute the row's weights again. It is +inf if the row attends to no key.
template <class T>
struct SavedRow {
  Pair<T> logsumexp;

  static __device__ __forceinline__ SavedRow read(const void* logsumexp, int64_t row) {
    const Pair<T> pair = static_cast<const Pair<T>*>(logsumexp)[row];
    return pair.high == -infinity<T>() ? SavedRow{{infinity<T>(), 0}} : SavedRow{pair};
  }
  __device__ __forceinline__ bool sees_nothing() const { return logsumexp.high == infinity<T>(); }
  __device__ __forceinline__ T weight(T score) const {
    return score == -infinity<T>() ? 0 : exp((score - logsumexp.high) - logsumexp.low);
  }
};

// The number of a row's head, which is the index of the head's sink and slope.
__device__ __forceinline__ int64_t head_number(const Problem& p, const Row& row) { return row.n * p.heads + row.head; }

// The sink of a row; -inf if there is none.
template <class T>
__device__ __forceinline__ T sink_of(const Problem& p, const Row& row) {
  return p.sinks ? static_cast<const T*>(p.sinks)[head_number(p, row)] : -infinity<T>();
}

// Returns the number that is subtracted from a row's scores before exp(). It is 0 for a row that has seen no key so
// far. The weights of this row are then exp(-inf - 0) = 0.
template <class T>
__device__ __forceinline__ T shift_of(T maximum) {
  return maximum == -infinity<T>() ? static_cast<T>(0) : maximum;
}

// Adds the sink of a row to the logsumexp of its keys. Returns the share of the weight that the keys keep:
// exp(logsumexp of the keys - logsumexp with the sink), or 1 without a sink. A row without keys outputs 0 times this
// share, and so outputs NaN if the sink is NaN.
template <class T>
__device__ inline T add_sink(const Problem& p, const Row& row, Pair<T>& logsumexp) {
  if (!p.sinks) return 1;
  const Pair<T> keys = logsumexp, sink = {sink_of<T>(p, row), 0}, largest = sink.high > keys.high ? sink : keys;
  const T shift = shift_of(largest.high);
  const auto weight = [&](Pair<T> x) { return exp((x.high - shift) + (x.low - largest.low)); };
  const T of_keys = weight(keys), sum = of_keys + weight(sink);
  logsumexp = logsumexp_of(shift, largest.low, sum);
  return sum == 0 ? 0 : of_keys / sum;
}

// Writes those statistics of a row that the call asks for. The row's splits have already been merged, and the logsumexp
// includes the sink.
template <class T>
__device__ inline void write_statistics(const ForwardParams& p, const Row& row, Pair<T> logsumexp, T max_score) {
  const int64_t r = row_number(p, row.n, row.head, row.position);
  if (p.logsumexp) static_cast<Pair<T>*>(p.logsumexp)[r] = logsumexp;
  if (p.max_score) static_cast<T*>(p.max_score)[r] = max_score;
  if (!p.row_logsumexp) return;
  const T largest = max_or_nan(max_score, sink_of<T>(p, row));  // if it is +inf, the pair and the weights are NaN
  static_cast<T*>(p.row_logsumexp)[r] = largest == infinity<T>() ? largest : logsumexp.high + logsumexp.low;
}

// What dropout's counters have of a row.
struct DropoutRow {
  uint32_t position, head;
};

// Dropout's decisions, in shared memory; see Problem::rng.
struct Dropout {
  uint32_t keep_below;
  bool keeps_all;
  int64_t period;
  uint32_t key[2];
  uint32_t offset;

  // Reads the state of batch entry n.
  __device__ void set(const Problem& p, int64_t n) {
    const auto* state = static_cast<const int64_t*>(p.rng.data) + batch_offset(p, p.rng, n);
    key[0] = static_cast<uint32_t>(state[0]);
    key[1] = static_cast<uint32_t>(static_cast<uint64_t>(state[0]) >> 32);
    offset = static_cast<uint32_t>(state[p.rng.col]);
    const int64_t given = state[2 * p.rng.col];
    period = given > 1 ? given : 1;
    keep_below = static_cast<uint32_t>(p.keep_below);
    keeps_all = p.keep_below >> 32 != 0;
  }

  // The head's number in dropout's counters.
  __device__ __forceinline__ uint32_t head(const Problem& p, int64_t n, int64_t h) const {
    return static_cast<uint32_t>(divide(n * p.heads + h, period).remainder);
  }

  __device__ __forceinline__ DropoutRow row(const Problem& p, int64_t n, int64_t h, int64_t position) const {
    return {static_cast<uint32_t>(position), head(p, n, h)};
  }

  // Calls f(w, whether key 4 * quad + w is kept) for w from 0 to 3. The random numbers come from Philox4x32-10 (Salmon
  // et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). kUnrolled: how many of Philox's ten rounds are
  // unrolled at once. More rounds take more registers.
  template <int kUnrolled, class F>
  __device__ __forceinline__ void each_of_quad(uint32_t quad, DropoutRow row, F f) const {
    uint32_t c[4] = {quad, row.position, row.head, offset};
    uint32_t key0 = key[0], key1 = key[1];
#pragma unroll kUnrolled
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{c[0]} * 0xd2511f53u, b = uint64_t{c[2]} * 0xcd9e8d57u;  // an instruction each
      c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0;
      c[1] = static_cast<uint32_t>(b);
      c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1;
      c[3] = static_cast<uint32_t>(a);
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) f(w, (c[w] < keep_below) | keeps_all);
  }
  // Returns bits: bit w says whether key 4 * quad + w is kept.
  template <int kUnrolled = 10>
  __device__ __forceinline__ unsigned kept(int64_t quad, DropoutRow row) const {
    unsigned bits = 0;
    each_of_quad<kUnrolled>(static_cast<uint32_t>(quad), row,
                            [&](int w, bool is_kept) { bits |= static_cast<unsigned>(is_kept) << w; });
    return bits;
  }
};

// Says where a row of the output is written: to the output itself and its residual, or to this split's partial output.
template <class T>
struct OutputRow {
  const ForwardParams& p;
  Row row;
  int64_t number;  // of the row, among the rows of all splits
  int64_t output_at, residual_at;

  // The batch entry begins at `output_base` in the output and at `residual_base` in the residual.
  __device__ OutputRow(const ForwardParams& p, int64_t output_base, int64_t residual_base, Row row, int64_t split)
      : p(p), row(row) {
    number = split * number_of_rows(p) + row_number(p, row.n, row.head, row.position);
    output_at = output_base + row.head * p.output.head + row.position * p.output.row;
    residual_at = residual_base + row.head * p.residual.head + row.position * p.residual.row;
  }
  __device__ __forceinline__ void write(int64_t d, T x) const {
    if (p.splits > 1)
      static_cast<T*>(p.partial_output)[number * p.value_dim + d] = x;
    else
      store_exactly(p.output, output_at + d * p.output.col, p.residual, residual_at + d * p.residual.col, x);
  }
  // Calls cuda::add_sink(), unless there are splits. With splits merge_splits() adds the sink.
  __device__ __forceinline__ T add_sink(Pair<T>& logsumexp) const {
    return p.splits > 1 ? 1 : cuda::add_sink(p, row, logsumexp);
  }
  __device__ void write_statistics(Pair<T> logsumexp, T max_score) const {
    if (p.splits == 1) return cuda::write_statistics(p, row, logsumexp, max_score);
    static_cast<Pair<T>*>(p.partial_logsumexp)[number] = logsumexp;
    if (p.partial_max) static_cast<T*>(p.partial_max)[number] = max_score;
  }
};

// Writes delta of a row, <G, O> - g, where g is the gradient of the row's logsumexp. If there is such a gradient,
// stores delta as two numbers, because Z dP - delta must be exactly g for a row with one key (Z: the dropout factor,
// see cpu/kernels/backward.inl). Also writes two gradients that follow from delta. The gradient of the sink is dsink =
// -Psink delta, where Psink is the sink's weight. The gradient of a number that is added to all scores of the row is
// sum_j dS_ij = g - dsink. For SecondParams, writes the derivatives of these two gradients instead of the gradients,
// and also tdelta = <G, tO>. The two derivatives follow from tPsink = Psink (tsink - c), where c is the derivative of
// the logsumexp.
template <class T, class Params>
__device__ inline void write_delta(const Params& p, const Row& at, T of_output, T of_tangent) {
  constexpr bool kSecond = requires { p.tangent_delta; };
  const int64_t r = row_number(p, at.n, at.head, at.position);
  const auto number = [&](const void* rows) { return rows ? static_cast<const T*>(rows)[r] : 0; };
  const T g = number(p.grad_logsumexp), delta = of_output - g;
  static_cast<T*>(p.delta)[r] = delta;
  if (p.grad_logsumexp) static_cast<T*>(p.delta)[number_of_rows(p) + r] = rounded_off(of_output, -g, delta);
  if constexpr (kSecond) static_cast<T*>(p.tangent_delta)[r] = of_tangent;
  if (!p.grad_sinks && !p.grad_mask_rows) return;
  const auto row = SavedRow<T>::read(p.logsumexp, r);
  const T weight = row.weight(sink_of<T>(p, at));
  T of_sink = -weight * delta, sum = g - of_sink;
  if constexpr (kSecond) {
    const auto c = static_cast<const Pair<T>*>(p.tangent_logsumexp)[r];
    const T t = p.t.sinks ? static_cast<const T*>(p.t.sinks)[head_number(p, at)] : 0;
    of_sink = -weight * (((t - c.high) - c.low) * delta + of_tangent);
    sum = -of_sink;
  }
  if (p.grad_sinks) static_cast<T*>(p.grad_sinks)[r] = of_sink;
  if (p.grad_mask_rows) static_cast<T*>(p.grad_mask_rows)[r] = row.sees_nothing() ? 0 : sum;
}

}  // namespace attn::cuda
