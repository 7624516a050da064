// Over AMX in software AVX2's kernels stand for AVX-512's, which AMX's fall back to: in software they would take
// longer to compile than the rest of the library, and no test asks for them.
#include "cpu/isa.h"

const attn::Kernels* attn::kernels_avx512() { return kernels_avx2(); }
const attn::Kernels* attn::kernels_avx512_bf16() { return kernels_avx2(); }
