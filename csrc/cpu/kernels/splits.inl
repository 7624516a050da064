// The forward's results where the keys are cut in splits: each writes a part, and the parts are merged in order.
#pragma once

#include "cpu/simd/exp.inl"
#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

// Where a task writes: the results themselves, or those of its split. Null data, or null, where they are not wanted.
template <class T>
struct Results {
  Operand output, residual;
  T* logsumexp;

  explicit Results(const ForwardParams& p)
      : output(p.output), residual(p.residual), logsumexp(static_cast<T*>(p.logsumexp)) {}
  Results(const ForwardParams& p, int64_t split) : Results(p) {
    if (p.splits == 1) return;
    T* const data = static_cast<T*>(p.partial_output) + split * number_of_rows(p) * p.value_dim;
    output = operand_of_rows(p, data, dtype_of<T>, p.value_dim);
    residual = {};
    logsumexp = static_cast<T*>(p.partial_logsumexp) + 2 * split * number_of_rows(p);
  }
};

// Writes the output of one row, factor * row / sum, and its logsumexp. Overwrites `row`; `scratch` holds as much, for a
// residual.
template <class T>
void write_row(const ForwardParams& p, const Row& at, T* row, T reference, T sum, T factor, const Results<T>& to,
               T* scratch) {
  const T inverse = factor / (sum == 0 ? 1 : sum);
  for (int64_t d = 0; d < p.value_dim; ++d) row[d] = sum == 0 ? 0 : row[d] * inverse;
  const Block block = block_of(p, to.output, at.n, at.head, at.position);
  unpack_rows<T>(block, row, p.value_dim, 1, p.value_dim);
  if (to.residual.data) {
    pack_rows<T>(scratch, p.value_dim, block, 1, p.value_dim);
    for (int64_t d = 0; d < p.value_dim; ++d) row[d] -= scratch[d];
    unpack_rows<T>(block_of(p, to.residual, at.n, at.head, at.position), row, p.value_dim, 1, p.value_dim);
  }
  if (to.logsumexp) store_logsumexp(to.logsumexp + 2 * row_number(p, at.n, at.head, at.position), reference, sum);
}

// Merges the splits of the rows numbered [first, last):
// O = sum_s w_s O_s / sum_s w_s, w_s = exp(logsumexp_s - the largest reference of them).
template <class T>
void merge_splits(const ForwardParams& p, int64_t first, int64_t last, char* workspace) {
  T* row = reinterpret_cast<T*>(workspace);
  const int64_t all_rows = number_of_rows(p);
  const T slope = log2_slope<T>(p);
  const T* partial = static_cast<const T*>(p.partial_logsumexp);
  const Results<T> to(p);
  for (int64_t r = first; r < last; ++r) {
    const auto part = [&](int64_t s) { return partial + 2 * (s * all_rows + r); };
    T best = -kInfinity<T>;
    for (int64_t s = 0; s < p.splits; ++s) best = part(s)[0] > best ? part(s)[0] : best;
    const T reference = best == -kInfinity<T> ? 0 : best;
    T sum = 0;
    for (int64_t d = 0; d < p.value_dim; ++d) row[d] = 0;
    for (int64_t s = 0; s < p.splits; ++s) {
      const T weight = exp2<T>(splat<T>((part(s)[0] - reference) * slope + part(s)[1]))[0];
      sum += weight;
      if (weight == 0) continue;  // its output is 0 where it saw no key
      const T* o = static_cast<const T*>(p.partial_output) + (s * all_rows + r) * p.value_dim;
      for (int64_t d = 0; d < p.value_dim; ++d) row[d] += weight * o[d];
    }
    write_row<T>(p, row_of_number(p, r), row, reference, sum, 1, to, row + round_up(p.value_dim, kLanes<T>));
  }
}
template <class T>
int64_t merge_workspace(const ForwardParams& p) {  // two rows
  return 2 * round_up(p.value_dim, kLanes<T>) * static_cast<int64_t>(sizeof(T));
}

}  // namespace attn::ATTN_ISA
