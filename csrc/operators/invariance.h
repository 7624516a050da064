// The switch behind attn::invariant(): one number for the whole process, because threads may share the work of a call.
#pragma once

namespace attn {

bool is_invariant();

}  // namespace attn
