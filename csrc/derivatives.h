// The operators of schema.cpp that give derivatives: arguments checked, results allocated, params filled in. `run` does the
// rest on its device. It is called unless the results follow from the sizes, with params that are complete but for the
// plan and its workspaces.
#pragma once

#include <c10/util/FunctionRef.h>

#include "problem.h"

namespace attn {

template <class Params>
using Run = c10::function_ref<void(Params&)>;

Tensors4 derive_backward(const at::Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_OPTIONS_ARGS,
                         Wanted grad_input_mask, Run<BackwardParams> run);
Tensors3 derive_tangent(ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS, ATTN_OPTIONS_ARGS,
                        Run<TangentParams> run);
Tensors4 derive_second(const at::Tensor& grad_output, ATTN_INPUTS_ARGS, ATTN_SAVED_ARGS, ATTN_TANGENTS_ARGS,
                       ATTN_MOVED_ARGS, ATTN_OPTIONS_ARGS, Wanted grad_input_mask, Run<SecondParams> run);

}  // namespace attn
