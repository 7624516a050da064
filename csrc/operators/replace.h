// The switch (replace.cpp), for other operators of torch that it turns.
#pragma once

#include <torch/library.h>

namespace attn {

// Says on which devices of a type the switch serves calls: where `runs_on` is true. A type never named here: on all.
void replace_on(c10::DeviceType type, bool (*runs_on)(c10::Device));

bool is_switched_on();
void count_replaced_call();

// In the places that torch leaves empty (replace_varlen.cpp).
torch::Library put_flash_attention_in_place();

}  // namespace attn
