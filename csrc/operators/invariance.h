// The switch behind attn::invariant(): a number of the whole process, as threads may share the work of a call.
#pragma once

namespace attn {

bool is_invariant();

}  // namespace attn
