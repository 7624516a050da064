// Describes the functions of the pair of a call in a PairProgram, the plain data that kernels take (core/program.h).
#pragma once

#include <optional>
#include <utility>

#include "core/program.h"
#include "operators/validate.h"

namespace attn {

class DescribedProgram {
 public:
  // Describes the whole call, and sets problem.program. `problem` has its sizes and its positions already, and
  // `batch_size` lists the extents of the batch dimensions. A mask_mod that is a window becomes problem.visibility.
  DescribedProgram(Problem& problem, const Shape& shape, const Call& call, const c10::DimVector& batch_size);
  DescribedProgram(const DescribedProgram&) = delete;  // `problem` points to members

  // Describes a direction of the terms. A term without a tangent has the tangent 0.
  void add_tangents(const Direction& direction);
  // Makes the wanted gradients of terms and tables, zeros to which a kernel adds, and describes them in `p`. `written`
  // gets their tensors.
  void add_gradients(BackwardParams& p, const Gradients& grads, const Wanted& wanted, Gradients& written);
  // Throws if a kernel has found an index outside of a table.
  void check_indices() const;

 private:
  void add_tables(const OptionalTensors& tables);
  void add_mask(const Call& call);
  void widen(const Call& call);
  bool is_window(const Call& call);
  Terms terms_of(const std::optional<at::Tensor>& tensor);
  at::Tensor gradient_of_terms(Leaf leaf, void*& data) const;
  std::pair<at::Tensor, GradTerms> gradient_of_table(const Table& table, const at::Tensor& grad) const;

  Problem& problem_;
  const char* const op_;
  const Programs programs_;
  const at::Tensor query_;
  const c10::DimVector batch_size_;
  PairProgram program_;
  std::optional<PairProgram> wide_program_;  // of a wide mask_mod
  PairMask mask_;
  TermGradients gradients_;
  int64_t wrong_index_[3] = {-1, 0, 0};
  c10::SmallVector<at::Tensor, 4> kept_;  // what the program points to
};

}  // namespace attn
