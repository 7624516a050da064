#include "operators/programs/describe.h"

#include <ATen/ATen.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <limits>

#include "core/geometry.h"

namespace attn {
namespace {

using at::Tensor;

// Whether kernels should keep a table's numbers of a tile of queries transposed: if each query has a few numbers, and
// the index of every lookup is a function of the key alone.
bool suits_transposition(const Table& table, int number, const List& list) {
  constexpr int64_t kMostNumbers = 128;
  const auto is_other = [&](const Step& step) {
    if (step.op != Op::lookup || step.table != number) return false;
    const Leaf leaf = step.from[0] < 0 ? list.leaves[-1 - step.from[0]].leaf : Leaf::score;
    return leaf != Leaf::key_number && leaf != Leaf::key;
  };
  return table.of == TableOf::queries && table.size <= kMostNumbers &&
         std::none_of(list.steps, list.steps + list.step_count, is_other);
}

// Returns the tensor, or a contiguous copy if its last dimension is not contiguous in memory.
std::optional<Tensor> with_whole_rows(const std::optional<Tensor>& tensor) {
  const bool is_whole = !tensor || tensor->size(-1) == 1 || tensor->stride(-1) == 1;
  return is_whole ? tensor : tensor->contiguous();
}

// A tensor [*batch, heads, n, columns] with at least three dimensions.
Tensor with_heads(Tensor t) {
  while (t.dim() < 3) t = t.unsqueeze(0);
  return t;
}
// Whether all batch entries share such a tensor.
bool is_shared(const Tensor& t) {
  return std::ranges::all_of(t.sizes().slice(0, t.dim() - 3), [](int64_t size) { return size == 1; });
}

// Sets an uninitialised tensor to 0. Asks the system for pages of 2 MB first, because getting smaller pages takes
// longer than filling them with zeros.
Tensor zeroed(const Tensor& numbers) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(numbers.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + numbers.nbytes()) / kPage * kPage;
  if (numbers.is_cpu() && first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return numbers.zero_();
}

}  // namespace

DescribedProgram::DescribedProgram(Problem& problem, const Shape& shape, const Call& call,
                                   const c10::DimVector& batch_size)
    : problem_(problem), op_(shape.op), programs_(shape.programs), query_(call.query), batch_size_(batch_size) {
  problem.group = 1;
  problem.program = &program_;
  program_.batch = problem.batch;
  program_.heads = problem.heads;
  program_.queries = problem.queries;
  program_.keys = problem.keys;
  program_.wrong = wrong_index_;
  const auto add = [&](Leaf leaf, const std::optional<Tensor>& tensor) {
    program_.terms[kind_of(leaf)] = terms_of(tensor);
    program_.columns[kind_of(leaf)] = tensor ? static_cast<int>(tensor->size(-1)) : 0;
  };
  add(Leaf::row_term, call.row_terms);
  add(Leaf::key_term, call.key_terms);
  add(Leaf::distance_term, call.distance_terms);
  add(Leaf::row_number, call.row_numbers);
  add(Leaf::key_number, call.key_numbers);
  add(Leaf::distance_number, call.distance_numbers);
  add_tables(call.tables);
  if (const Compiled* const score = programs_.score_mod.get()) {
    program_.score = &score->list;
    if (score->keeping.result_count > 0) program_.keeping = &score->keeping;
    program_.gradient = &score->gradient;
  }
  if (call.blocks || (call.mask_mod && !is_window(call))) add_mask(call);
}

void DescribedProgram::add_tables(const OptionalTensors& tables) {
  const Compiled* const score = programs_.score_mod.get();
  for (size_t t = 0; t < tables.size(); ++t) {
    Table& table = program_.tables[t];
    table.numbers = terms_of(with_whole_rows(tables[t]));
    table.size = tables[t] ? tables[t]->size(-1) : 0;
    table.of = programs_.reads.tables[t].value_or(TableOf::all);
    if (score && score->tables[t] && suits_transposition(table, static_cast<int>(t), score->list)) {
      constexpr int64_t kMostLanes = 16;  // of a vector; kernels read whole vectors
      table.transposed_at = program_.size_transposed;
      program_.size_transposed += round_up(table.size, kMostLanes) * kScoreTile;
    }
  }
}

void DescribedProgram::add_mask(const Call& call) {
  program_.mask = &mask_;
  mask_.program = &program_;
  const auto depends_on = [&](const Terms& terms) {
    if (terms.entry != 0) mask_.entries = problem_.batch;
    if (terms.head != 0) mask_.heads = problem_.heads;
  };
  if (const Compiled* const compiled = programs_.mask_mod.get()) {
    if (compiled->is_wide && query_.scalar_type() != at::kDouble) widen(call);
    mask_.list = &compiled->list;
    for (int t = 0; t < kMostTables; ++t)
      if (compiled->tables[t]) depends_on(program_.tables[t].numbers);
    for (int i = 0; i < mask_.list->leaf_count; ++i) {
      const int kind = kind_of(mask_.list->leaves[i].leaf);
      if (0 <= kind && kind < kTermKinds) depends_on(program_.terms[kind]);
    }
  }
  if (call.blocks) {
    mask_.blocks = terms_of(call.blocks);
    mask_.block_rows = call.block_size[0];
    mask_.block_keys = call.block_size[1];
    depends_on(mask_.blocks);
  }
  mask_.row_tiles = divide_up(problem_.queries, kScoreTile);
  mask_.key_tiles = divide_up(problem_.keys, kScoreTile);
}

// Gives the mask a program of its own, whose terms and tables are float64 (PairMask::program).
void DescribedProgram::widen(const Call& call) {
  const Compiled& mask_mod = *programs_.mask_mod;
  PairProgram& wide = wide_program_.emplace(program_);
  const auto in_double = [](const std::optional<Tensor>& t) { return t ? std::optional(t->to(at::kDouble)) : t; };
  const auto add = [&](Leaf leaf, const std::optional<Tensor>& tensor) {
    if (mask_mod.columns[kind_of(leaf)] > 0) wide.terms[kind_of(leaf)] = terms_of(in_double(tensor));
  };
  add(Leaf::row_term, call.row_terms);
  add(Leaf::key_term, call.key_terms);
  add(Leaf::distance_term, call.distance_terms);
  for (int t = 0; t < kMostTables; ++t)
    if (mask_mod.tables[t]) wide.tables[t].numbers = terms_of(with_whole_rows(in_double(call.tables[t])));
  mask_.program = &wide;
}

// Tries to replace the mask_mod by an equal window, because a window is faster. Returns whether it has done so. A
// mask_mod equals a window if it depends on the distance i - j alone, and shows exactly the distances of an interval
// that includes 0.
bool DescribedProgram::is_window(const Call& call) {
  const List& list = programs_.mask_mod->list;
  Visibility& v = problem_.visibility;
  const bool is_free = v.left < 0 && v.right < 0 && !call.query_offset && problem_.queries > 0 && problem_.keys > 0;
  if (!is_free || list.step_count != 1 || list.steps[0].op != Op::ne_whole) return false;
  int column = -1;
  for (int i = 0; i < list.leaf_count; ++i) {
    const LeafOfList& leaf = list.leaves[i];
    if (leaf.leaf == Leaf::distance_number) column = leaf.column;
    if (leaf.leaf != Leaf::distance_number && (leaf.leaf != Leaf::whole_number || leaf.whole != 0)) return false;
  }
  const Terms& t = program_.terms[kind_of(Leaf::distance_number)];
  if (column < 0 || t.entry != 0 || t.head != 0 || !query_.is_cpu()) return false;
  const int64_t first = 1 - problem_.keys, last = problem_.queries - 1;  // i - j
  const auto is_visible = [&](int64_t distance) {
    return static_cast<const int32_t*>(t.data)[(distance - first) * t.row + column * t.col] != 0;
  };
  int64_t least = 0, most = 0;
  while (least > first && is_visible(least - 1)) --least;
  while (most < last && is_visible(most + 1)) ++most;
  for (int64_t distance = first; distance <= last; ++distance)
    if (is_visible(distance) != (least <= distance && distance <= most)) return false;
  v.left = most == last ? -1 : most;
  v.right = least == first ? -1 : -least;
  return true;
}

void DescribedProgram::add_tangents(const Direction& direction) {
  if (const Compiled* const score = programs_.score_mod.get()) {
    program_.tangent = &score->tangent;
    program_.tangent_gradient = &score->tangent_gradient;
  }
  const auto add = [&](Leaf leaf, const std::optional<Tensor>& tensor) {
    static constexpr double kZero = 0;
    program_.terms[kind_of(leaf)] = tensor ? terms_of(tensor) : Terms{&kZero};
  };
  add(Leaf::row_tangent, direction.row_terms);
  add(Leaf::key_tangent, direction.key_terms);
  add(Leaf::distance_tangent, direction.distance_terms);
  for (size_t t = 0; t < direction.tables.size(); ++t)
    program_.tables[t].tangent = terms_of(with_whole_rows(direction.tables[t]));
}

void DescribedProgram::check_indices() const {
  const auto [pair, index, size] = wrong_index_;
  if (pair < 0) return;
  TORCH_CHECK(false, op_, ": a captured tensor is indexed out of its range for query ", pair / program_.keys,
              " and key ", pair % program_.keys,
              index == std::numeric_limits<int32_t>::max() ? "" : c10::str(", by index ", index, " of ", size),
              "; clamp the index, and hide the pair by a mask_mod");
}

// If all batch entries share their terms, the stride from entry to entry is 0. Otherwise each entry has its own terms,
// one after the other.
Terms DescribedProgram::terms_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  Tensor terms = with_heads(*tensor);
  const bool is_of_all = is_shared(terms);
  c10::DimVector sizes(is_of_all ? c10::DimVector{1} : batch_size_);
  sizes.append(terms.sizes().end() - 3, terms.sizes().end());
  if (!is_of_all) terms = terms.expand(sizes);
  terms = terms.flatten(0, -4);  // reshape() with -1 refuses tensors without numbers
  kept_.push_back(terms);
  const auto stride = [&](int64_t d) { return terms.size(d) == 1 ? 0 : terms.stride(d); };
  return {terms.const_data_ptr(), is_of_all ? 0 : stride(0), stride(1), stride(2), terms.stride(3)};
}

void DescribedProgram::add_gradients(BackwardParams& p, const Gradients& grads, const Wanted& wanted,
                                     Gradients& written) {
  const auto add = [&](Leaf leaf, const Tensor& grad, Tensor& seen, void*& data) {
    if (!grad.defined()) return;
    seen = gradient_of_terms(leaf, data);
    p.grad_terms = &gradients_;
  };
  add(Leaf::row_term, grads.row_terms, written.row_terms, gradients_.rows);
  add(Leaf::key_term, grads.key_terms, written.key_terms, gradients_.keys);
  add(Leaf::distance_term, grads.distance_terms, written.distance_terms, gradients_.distances);
  for (size_t t = 0; t < grads.tables.size(); ++t) {
    if (!wanted[Inputs::kCount - 1 + t]) continue;
    std::tie(written.tables[t], gradients_.tables[t]) = gradient_of_table(program_.tables[t], grads.tables[t]);
    gradients_.has_tables = true;
    p.grad_terms = &gradients_;
  }
}

// Makes the gradient of terms, zeros to which a kernel adds at `data`. Returns it in the caller's order of dimensions.
Tensor DescribedProgram::gradient_of_terms(Leaf leaf, void*& data) const {
  const bool of_distances = leaf == Leaf::distance_term;
  const int64_t columns = program_.columns[kind_of(leaf)];
  const int64_t rows = of_distances             ? program_.queries + program_.keys - 1
                       : leaf == Leaf::row_term ? program_.queries
                                                : program_.keys;
  c10::DimVector sizes(batch_size_);
  for (const int64_t size : {program_.heads, of_distances ? columns : rows, of_distances ? rows : columns})
    sizes.push_back(size);
  const Tensor written = at::zeros(sizes, compute_options(query_));
  data = written.mutable_data_ptr();
  return of_distances ? written.transpose(-1, -2) : written;
}

// Makes the gradient of a table, zeros to which a kernel adds. This is `grad` if the sizes and strides of `grad` fit,
// and a new tensor otherwise.
std::pair<Tensor, GradTerms> DescribedProgram::gradient_of_table(const Table& table, const Tensor& grad) const {
  // The sizes of `grad` say what entries and heads share, not the strides of the table, which may be expanded.
  const Tensor shape = with_heads(grad);
  const bool is_of_all = is_shared(shape);
  const int64_t heads = shape.size(-3), rows = rows_of(table.of, program_.queries, program_.keys);
  c10::DimVector sizes(is_of_all ? c10::DimVector(batch_size_.size(), 1) : batch_size_);
  for (const int64_t size : {heads, rows, table.size}) sizes.push_back(size);
  const bool fits = grad.sizes() == sizes && grad.is_contiguous();
  const Tensor written = zeroed(fits ? grad : at::empty(sizes, compute_options(query_)));
  const int64_t of_head = rows * table.size;
  return {written,
          {written.mutable_data_ptr(), is_of_all ? 0 : heads * of_head, heads > 1 ? of_head : 0, table.size, 1}};
}

}  // namespace attn
