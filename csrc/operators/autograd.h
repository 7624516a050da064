// What other files call of autograd's kernels (autograd.cpp).
#pragma once

#include "operators/run.h"

namespace attn {

// Calls compute_weights(), and lets autograd record the call.
OutputAndWeights weights_by_kernel(const Device& device, const Call& call, const WantedWeights& wanted);

}  // namespace attn
