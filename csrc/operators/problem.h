// From tensors to the plain data that kernels take; the same for every device.
#pragma once

#include "core/geometry.h"
#include "operators/validate.h"

namespace attn {

constexpr int64_t kMaxHeadDim = int64_t{1} << 32;  // workspaces are counted in 64 bits

// Collects the operands of one call, then merges the batch dimensions that all of them walk through alike.
class ProblemBuilder {
 public:
  ProblemBuilder(Problem& problem, const Shape& shape);

  // `operand` lies inside `problem`. A dimension of extent 1 gets stride 0.
  void add(Operand& operand, const at::Tensor& tensor);         // is read
  void add_result(Operand& operand, const at::Tensor& tensor);  // is written

  // Call once, after the last add(). Throws if more than kMaxBatchDims dimensions are left.
  void merge_batch_dims();

 private:
  void add(Operand& operand, const at::Tensor& tensor, void* data);

  struct Strides {
    Operand* operand;
    c10::DimVector batch;
  };
  Problem& problem_;
  c10::DimVector batch_size_;
  c10::SmallVector<Strides, 8> operands_;
};

// Adds query, key, value, mask, rng_state and everything that is not a tensor.
void describe(Problem& problem, ProblemBuilder& builder, const Inputs& inputs, const PlainOptions& options,
              const at::Tensor& rng_state);

// What a plan with several splits of the keys writes to; empty for one.
std::array<at::Tensor, 2> allocate_splits(ForwardParams& p, const at::Tensor& query);

// What the passes of the statistics leave for each other, p.partial, p.pairs and p.partial_received; undefined where it
// is not needed.
std::array<at::Tensor, 3> allocate_partial(StatsParams& p, const at::Tensor& query);

inline bool no_rows(const Problem& p) { return number_of_rows(p) == 0; }

// The workspace in which partial results are kept: the type that the kernels compute in.
at::TensorOptions compute_options(const at::Tensor& query);

DType dtype_of(const at::Tensor& tensor);

}  // namespace attn
