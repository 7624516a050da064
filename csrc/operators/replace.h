// The switch of replace.cpp, declared for the code that replaces other operators of torch.
#pragma once

#include <torch/library.h>

namespace attn {

// Makes the switch work on a device of this type only if `runs_on` is true for the device. Does not restrict other
// types.
void replace_on(c10::DeviceType type, bool (*runs_on)(c10::Device));

bool is_switched_on();
void count_replaced_call();

// Registers CPU kernels for those operators of flash attention for which torch has no CPU kernels (replace_varlen.cpp).
torch::Library put_flash_attention_in_place();

}  // namespace attn
