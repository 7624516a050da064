// The switch of replace.cpp, for the other operators of torch that it replaces.
#pragma once

#include <torch/library.h>

namespace attn {

// Restricts the switch to the devices of a type for which `runs_on` is true. Other types are not restricted.
void replace_on(c10::DeviceType type, bool (*runs_on)(c10::Device));

bool is_switched_on();
void count_replaced_call();

// Registers kernels of flash attention's operators where torch has none (replace_varlen.cpp).
torch::Library put_flash_attention_in_place();

}  // namespace attn
