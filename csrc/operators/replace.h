// The switch (replace.cpp), for other operators of torch that it turns.
#pragma once

#include <torch/library.h>

namespace attn {

// Of the devices of a type calls are replaced where `runs_on` says so; where no one has said anything, on all of them.
void replace_on(c10::DeviceType type, bool (*runs_on)(c10::Device));

bool is_switched_on();
void count_replaced_call();

// In the places that torch leaves empty (replace_varlen.cpp).
torch::Library put_flash_attention_in_place();

}  // namespace attn
