// The switch (replace.cpp), for other operators of torch that it turns.
#pragma once

#include <torch/library.h>

namespace attn {

bool is_switched_on();
void count_replaced_call();

// In the places that torch leaves empty (replace_varlen.cpp).
torch::Library put_flash_attention_in_place();

}  // namespace attn
