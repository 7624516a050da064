// Turns tensors into the plain data that kernels take, the same for every device.
#pragma once

#include "core/geometry.h"
#include "operators/programs/describe.h"
#include "operators/validate.h"

namespace attn {

constexpr int64_t kMaxHeadDim = int64_t{1} << 32;  // workspaces are counted in 64 bits

// Sets the scale, the soft cap and has_mask of `problem`, which define a score (core/score.h).
void describe_scores(Problem& problem, const Call& call);

// A function that writes all sequences of a packed call on a device (PackedSequences::write).
using WriteSequences = void(const PackedSequences& sequences, const at::Tensor& query);

// Describes a call in `problem`: collects its operands, then merges the batch dimensions whose strides are compatible
// in every operand.
class ProblemBuilder {
 public:
  // Adds the whole call, and rng_state. Results, gradients and directions are added later. `write` is called if
  // sequences are packed.
  ProblemBuilder(Problem& problem, const Shape& shape, const Call& call, const at::Tensor& rng_state,
                 WriteSequences* write);

  // Describes `tensor` in `operand`, a member of `problem`. A dimension of extent 1 gets stride 0.
  void add(Operand& operand, const at::Tensor& tensor, Axis axis = Axis::queries);         // kernels read it
  void add_result(Operand& operand, const at::Tensor& tensor, Axis axis = Axis::queries);  // kernels write it

  // `of` is the key or the value. Adds its key_scale or value_scale, if there is one.
  void add_scale_of_8_bits(Operand& operand, const std::optional<at::Tensor>& scale, const at::Tensor& of);

  // Returns a pointer to the elements of a tensor, in contiguous memory that lives as long as the builder.
  const void* contiguous(const at::Tensor& tensor);
  // Does what contiguous() does for a tensor with one number per head, after converting it to the compute dtype and
  // expanding it to [batch, heads]. Returns null if there is no tensor.
  const void* of_heads(const std::optional<at::Tensor>& tensor);

  // Call once, after the last add(). Throws if more than kMaxBatchDims dimensions are left.
  void merge_batch_dims();

  std::optional<DescribedProgram> program;  // if the call has functions of the pair

 private:
  void add(Operand& operand, const at::Tensor& tensor, void* data, Axis axis);
  void add_sequences(const Call& call, WriteSequences* write);

  struct Strides {
    Operand* operand;
    c10::DimVector batch;
  };
  const int64_t* of_entries(const std::optional<at::Tensor>& tensor);

  const Shape& shape_;
  const at::Tensor query_;
  Problem& problem_;
  c10::DimVector batch_size_;
  c10::SmallVector<Strides, 8> operands_;
  c10::SmallVector<at::Tensor, 4> contiguous_;
};

// Allocates the partial results of a plan with several splits of the keys. A plan with one split needs none.
std::array<at::Tensor, 3> allocate_splits(ForwardParams& p, const at::Tensor& query);

// Allocates the workspaces of the statistics' passes: p.partial, p.pairs and p.partial_received. A tensor that is not
// needed is undefined.
std::array<at::Tensor, 3> allocate_partial(StatsParams& p, const at::Tensor& query);

// Plans how the gradient of a mask is summed. Call this function after p.grad_mask is set.
void plan_mask(BackwardParams& p);

inline bool no_rows(const Problem& p) { return number_of_rows(p) == 0; }

DType dtype_of(const at::Tensor& tensor);

}  // namespace attn
