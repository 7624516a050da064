// The forward's results. If the keys are cut into splits, each split writes partial results, which merge_splits()
// merges in order.
#pragma once

#include "cpu/simd/exp.inl"
#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

// Where a task writes: the results themselves, or the partial results of its split. An unwanted result is null, or an
// operand whose data is null.
template <class T>
struct Results {
  Operand output, residual;
  T *logsumexp, *row_logsumexp, *max_score;
  bool final = true;

  explicit Results(const ForwardParams& p)
      : output(p.output),
        residual(p.residual),
        logsumexp(static_cast<T*>(p.logsumexp)),
        row_logsumexp(static_cast<T*>(p.row_logsumexp)),
        max_score(static_cast<T*>(p.max_score)) {}
  // `columns`: the number of columns of a partial output.
  Results(const ForwardParams& p, int64_t split, int64_t columns) : Results(p) {
    if (p.splits == 1) return;
    const int64_t rows = number_of_rows(p);
    T* const data = static_cast<T*>(p.partial_output) + split * rows * columns;
    output = operand_of_rows(p, data, dtype_of<T>, columns);
    residual = {};
    logsumexp = static_cast<T*>(p.partial_logsumexp) + 2 * split * rows;
    row_logsumexp = nullptr;
    max_score = p.partial_max ? static_cast<T*>(p.partial_max) + split * rows : nullptr;
    final = false;
  }

  int64_t number(const ForwardParams& p, const Row& at) const {
    return final ? row_number(p, at.n, at.head, at.position) : own_row_number(p, at.n, at.head, at.position);
  }
};

// Adds a sink to the softmax of each lane: reference = max(reference, sink), and the sink's weight is added to the sum.
// Returns the factor by which the caller must rescale sums of values. A sink of -inf changes nothing. For a row without
// keys, `sum` is 0.
template <class T>
ATTN_INLINE Vec<T> add_sinks(const Problem& p, Vec<T> sink, Vec<T>& reference, Vec<T>& sum) {
  const T slope = log2_slope<T>(p);
  const auto none = sink == -kInfinity<T>, empty = sum == Vec<T>{};
  const Vec<T> found = as_in_tiles<T>(p, sink), shared = (empty | (found > reference)) ? found : reference;
  const Vec<T> of_sum = empty ? Vec<T>{} : exp2<T>((reference - shared) * slope);
  reference = none ? reference : shared;
  sum = none ? sum : sum * of_sum + exp2<T>((found - shared) * slope);
  return none ? splat<T>(1) : of_sum;
}

// The logsumexp and the largest score of the rows of a tile, before they are written.
template <class T>
class RowNumbers {
 public:
  static constexpr int W = kLanes<T>;
  // Sets the numbers of a vector of rows. `reference` and `sum` include the sink. `largest` does not include the sink.
  // `largest`, like `reference`, is a product if leaves_products(), else a score. `empty`: which rows saw no key.
  template <class Mask>
  ATTN_INLINE void set(const ForwardParams& p, const Results<T>& to, int64_t lane, const Mask& empty, Vec<T> reference,
                       Vec<T> sum, Vec<T> largest, Vec<T> sink) {
    const double scale = leaves_products<T>(p) ? p.scale : 1;
    T references[W], sums[W], most[W], logarithms[W], found[W];
    store<T>(references, reference);
    store<T>(sums, sum);
    store<T>(most, largest);
    for (int i = 0; i < W; ++i) {
      const double log2_sum = log2_of(sums[i]);
      logarithms[i] = static_cast<T>(log2_sum);
      found[i] = static_cast<T>(references[i] * scale + log2_sum * kLn2);
      most[i] = static_cast<T>(most[i] * scale);
    }
    store<T>(reference_ + lane, empty ? splat<T>(-kInfinity<T>) : reference);
    store<T>(log2_sum_ + lane, empty ? Vec<T>{} : load<T>(logarithms));
    if (!to.final) return store<T>(max_score_ + lane, largest);
    // The logsumexp is at least the sink. Takes the sink itself if `found` is below it, because as_in_tiles() may have
    // clamped the sink.
    const Vec<T> logsumexp = (empty | (sink > load<T>(found))) ? sink : load<T>(found);
    const Vec<T> infinite = largest == kInfinity<T> ? largest : sum;  // the sum with a score of +inf is inf - inf
    store<T>(logsumexp_ + lane, sum == sum ? logsumexp : infinite);
    store<T>(max_score_ + lane, sum == sum ? load<T>(most) : infinite);
  }
  // Writes the numbers of `count` neighbouring rows of a head. The first row is `at`, and has lane `lane`.
  void write(const ForwardParams& p, const Results<T>& to, const Row& at, int64_t lane, int64_t count) const {
    const int64_t number = to.number(p, at);
    const auto copy = [&](T* all, const T* lanes) {
      if (all) __builtin_memcpy(all + number, lanes + lane, static_cast<size_t>(count) * sizeof(T));
    };
    for (int64_t i = 0; i < count && to.logsumexp; ++i) {
      to.logsumexp[2 * (number + i)] = reference_[lane + i];
      to.logsumexp[2 * (number + i) + 1] = log2_sum_[lane + i];
    }
    copy(to.row_logsumexp, logsumexp_);
    copy(to.max_score, max_score_);
  }

 private:
  T reference_[kRowTile], log2_sum_[kRowTile];  // the pair (logsumexp.inl)
  T logsumexp_[kRowTile], max_score_[kRowTile];
};

// Writes the residual of one row of the output, after the rounded row is stored. The residual is `row` minus the stored
// row, plus `rest` unless `rest` is null. Overwrites `row`. `scratch` is as large as `row`.
template <class T>
void write_residual(const ForwardParams& p, const Row& at, T* row, const T* rest, const Results<T>& to, T* scratch) {
  pack_rows<T>(scratch, p.value_dim, block_of(p, to.output, at.n, at.head, at.position), 1, p.value_dim);
  for (int64_t d = 0; d < p.value_dim; ++d) row[d] = row[d] - scratch[d] + (rest ? rest[d] : 0);
  unpack_rows<T>(block_of(p, to.residual, at.n, at.head, at.position), row, p.value_dim, 1, p.value_dim);
}

// Divides `row` by `sum`, writes the quotient as the output of one row, and then writes the row's numbers. `rest` is
// what the row lost when its weights were rounded, or null. The residual includes `rest`. Overwrites `row` and `rest`.
// A residual needs `scratch`, which is as large as `row`.
template <class T>
void write_row(const ForwardParams& p, const Row& at, T* row, T* rest, T reference, T sum, T largest,
               const Results<T>& to, T* scratch) {
  const bool has_keys = sum != 0;
  T factor = 1;
  if (p.sinks && to.final) {
    Vec<T> references = splat<T>(reference), sums = splat<T>(sum);
    factor = add_sinks<T>(p, splat<T>(sink_of<T>(p, at.n * p.heads + at.head)), references, sums)[0];
    reference = references[0];
    sum = sums[0];
  }
  const T inverse = factor / (sum == 0 ? 1 : sum);
  const T of_empty = sum == sum ? 0 : sum;  // NaN if the sink is NaN
  for (int64_t d = 0; d < p.value_dim; ++d) row[d] = has_keys ? row[d] * inverse : of_empty;
  for (int64_t d = 0; d < p.value_dim && rest; ++d) rest[d] = has_keys ? rest[d] * inverse : 0;
  unpack_rows<T>(block_of(p, to.output, at.n, at.head, at.position), row, p.value_dim, 1, p.value_dim);
  if (rest && !to.final)
    unpack_rows<T>(block_of(p, to.output, at.n, at.head, at.position, p.value_dim), rest, p.value_dim, 1, p.value_dim);
  if (to.residual.data) write_residual<T>(p, at, row, rest, to, scratch);
  if (!to.logsumexp && !to.max_score) return;
  RowNumbers<T> numbers;
  numbers.set(p, to, 0, splat<T>(has_keys) == Vec<T>{}, splat<T>(reference), splat<T>(sum), splat<T>(largest),
              splat<T>(sink_of<T>(p, at.n * p.heads + at.head)));
  numbers.write(p, to, at, 0, 1);
}

// Merges the splits of the rows numbered [first, last): O = sum_s w_s O_s / sum_s w_s,
// w_s = exp(logsumexp_s - the largest reference of all splits). O_s has `columns` columns. This is the number of
// columns of O, or twice this number if O_s is followed by its rest (Forward::has_rest).
template <class T>
void merge_splits(const ForwardParams& p, int64_t columns, int64_t first, int64_t last, char* workspace) {
  T* row = reinterpret_cast<T*>(workspace);
  const int64_t all_rows = number_of_rows(p);
  const T slope = log2_slope<T>(p);
  const T* partial = static_cast<const T*>(p.partial_logsumexp);
  const T* const partial_max = static_cast<const T*>(p.partial_max);
  const Results<T> to(p);
  for (int64_t r = first; r < last; ++r) {
    const auto part = [&](int64_t s) { return partial + 2 * (s * all_rows + r); };
    T best = -kInfinity<T>, largest = -kInfinity<T>;
    for (int64_t s = 0; s < p.splits; ++s) best = part(s)[0] > best ? part(s)[0] : best;
    for (int64_t s = 0; s < p.splits && partial_max; ++s) {
      const T next = partial_max[s * all_rows + r];
      largest = next > largest || next != next ? next : largest;
    }
    const T reference = best == -kInfinity<T> ? 0 : best;
    T sum = 0;
    for (int64_t d = 0; d < columns; ++d) row[d] = 0;
    for (int64_t s = 0; s < p.splits; ++s) {
      const T weight = exp2<T>(splat<T>((part(s)[0] - reference) * slope + part(s)[1]))[0];
      sum += weight;
      if (weight == 0) continue;  // the output of a split without visible keys is 0
      const T* o = static_cast<const T*>(p.partial_output) + (s * all_rows + r) * columns;
      for (int64_t d = 0; d < columns; ++d) row[d] += weight * o[d];
    }
    T* const rest = columns > p.value_dim ? row + p.value_dim : nullptr;
    write_row<T>(p, row_of_number(p, r), row, rest, reference, sum, largest, to, row + round_up(columns, kLanes<T>));
  }
}
template <class T>
int64_t merge_workspace(int64_t columns) {  // two rows
  return 2 * round_up(columns, kLanes<T>) * static_cast<int64_t>(sizeof(T));
}

}  // namespace attn::ATTN_ISA
