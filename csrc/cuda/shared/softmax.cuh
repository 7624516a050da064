// The statistics of a row, and what dropout keeps of it.
#pragma once

#include "cuda/shared/rows.cuh"

namespace attn::cuda {

// Writes maximum + maximum_low + log(sum) as a pair (params.h); -inf for a row without keys.
template <class T>
__device__ inline void store_logsumexp(T* pair, T maximum, T maximum_low, T sum) {
  const T log_sum = static_cast<T>(log(static_cast<double>(sum)));
  const T high = maximum + log_sum;
  const T of_log = high - maximum;  // Knuth's two-sum: low is exactly what rounding took from high
  const T low = (maximum - (high - of_log)) + (log_sum - of_log);
  const bool finite = high - high == 0;
  pair[0] = sum == 0 ? -infinity<T>() : high;
  pair[1] = sum == 0 || !finite ? 0 : low + maximum_low;
}

// What exp() is shifted by: a row without any key so far has weights exp(-inf - 0) = 0.
template <class T>
__device__ __forceinline__ T shift_of(T maximum) {
  return maximum == -infinity<T>() ? static_cast<T>(0) : maximum;
}

// Dropout's decisions, in shared memory; see Problem::rng.
struct Dropout {
  uint64_t keep_below;
  uint64_t period;
  uint32_t key[2];
  uint32_t offset;

  // Reads the state of batch entry n.
  __device__ void set(const Problem& p, int64_t n) {
    const auto* state = static_cast<const int64_t*>(p.rng.data) + batch_offset(p, p.rng, n);
    key[0] = static_cast<uint32_t>(state[0]);
    key[1] = static_cast<uint32_t>(static_cast<uint64_t>(state[0]) >> 32);
    offset = static_cast<uint32_t>(state[p.rng.col]);
    const int64_t given = state[2 * p.rng.col];
    period = static_cast<uint64_t>(given > 1 ? given : 1);
    keep_below = p.keep_below;
  }

  // The head's number that counters are made of.
  __device__ __forceinline__ uint32_t head(const Problem& p, int64_t n, int64_t h) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n * p.heads + h) % period);
  }

  // Bit w: key 4 * quad + w is kept. Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC
  // 2011). kUnrolled: how many of its ten rounds the compiler sees at once; more take more registers.
  template <int kUnrolled = 10>
  __device__ inline unsigned kept(int64_t quad, int64_t position, uint32_t head_number) const {
    uint32_t c[4] = {static_cast<uint32_t>(quad), static_cast<uint32_t>(position), head_number, offset};
    uint32_t key0 = key[0], key1 = key[1];
#pragma unroll kUnrolled
    for (int round = 0; round < 10; ++round) {
      const uint32_t a_high = __umulhi(c[0], 0xd2511f53u), a_low = c[0] * 0xd2511f53u;
      const uint32_t b_high = __umulhi(c[2], 0xcd9e8d57u), b_low = c[2] * 0xcd9e8d57u;
      c[0] = b_high ^ c[1] ^ key0;
      c[1] = b_low;
      c[2] = a_high ^ c[3] ^ key1;
      c[3] = a_low;
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
    unsigned bits = 0;
    for (int w = 0; w < 4; ++w) bits |= static_cast<unsigned>(c[w] < keep_below) << w;
    return bits;
  }
};

// Where a row of the output goes: the output itself and its residual, or this split's partial output.
template <class T>
struct OutputRow {
  const ForwardParams& p;
  int64_t row;  // of [batch, heads, L]
  int64_t output_at, residual_at;
  T* partial = nullptr;

  __device__ OutputRow(const ForwardParams& p, int64_t n, int64_t output_base, int64_t residual_base, int64_t h,
                       int64_t l, int64_t split)
      : p(p) {
    row = row_number(p, n, h, l);
    output_at = output_base + h * p.output.head + l * p.output.row;
    residual_at = residual_base + h * p.residual.head + l * p.residual.row;
    if (p.splits > 1) partial = static_cast<T*>(p.partial_output) + (split * number_of_rows(p) + row) * p.value_dim;
  }
  __device__ __forceinline__ void write(int64_t d, T x) const {
    if (partial) {
      partial[d] = x;
      return;
    }
    const T stored = store_rounded(p.output.data, p.output.dtype, output_at + d * p.output.col, x);
    if (p.residual.data) static_cast<float*>(p.residual.data)[residual_at + d * p.residual.col] = x - stored;
  }
  __device__ void write_logsumexp(int64_t split, T maximum, T maximum_low, T sum) const {
    T* to = static_cast<T*>(p.logsumexp);
    if (p.splits > 1) to = static_cast<T*>(p.partial_logsumexp) + 2 * split * number_of_rows(p);
    if (to) store_logsumexp(to + 2 * row, maximum, maximum_low, sum);
  }
};

}  // namespace attn::cuda
