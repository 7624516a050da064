// Formats of the operands of a matrix product. An operand is stored in slots of the size of T, the type of the result:
// what a lane multiplies with another slot in one step. Along the dimension that a product sums over, a slot holds one
// number (Singles) or two neighbours (Pairs). Everything else about the products is the same for both.

namespace attn::ATTN_ISA {

// Rows that are read one slot at a time: where they lie, or packed.
template <class T>
struct Rows {
  const T* data;
  int64_t ld;
};

// Slots that hold `numbers` neighbours.
template <class F>
ATTN_INLINE int64_t slots_of(int64_t numbers) {
  return (numbers + F::kNumbers - 1) / F::kNumbers;
}

// Slots of one number.
template <class T>
struct Singles {
  using Number = T;
  static constexpr int64_t kNumbers = 1;

  static constexpr bool holds(DType) { return true; }  // without rounding

  static ATTN_INLINE Vec<T> multiply_add(Vec<T> sum, const T* a, Vec<T> b) { return sum + *a * b; }
  static ATTN_INLINE Vec<T> multiply_add(Vec<T> sum, Vec<T> a, Vec<T> b) { return sum + a * b; }

  // The rows of `block`, slots along the columns. Packs into `tile` only what is not usable in place: another dtype, a
  // column stride, or rows so far apart that a column of them would fall into few sets of the cache.
  static Rows<T> along_columns(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    constexpr int64_t kFarApart = 256;
    const bool same_type = block.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32);
    if (same_type && block.col == 1 && (block.row <= kFarApart || rows == 1))
      return {reinterpret_cast<const T*>(block.data), block.row};
    pack_rows<T>(tile, ld, block, rows, cols);
    return {tile, ld};
  }
  // The same, slots along the rows.
  static Rows<T> along_rows(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    return along_columns(block, rows, cols, tile, ld);
  }
  // The same, always packed: rows [first, first + rows) of a tile, whose row `first + rows` is not written yet.
  static void pack_along_rows(const Block& block, int64_t first, int64_t rows, int64_t cols, T* tile, int64_t ld) {
    pack_rows<T>(tile + first * ld, ld, block, rows, cols);
  }
  // tile[slot of columns * kRowTile + i], zeros for rows <= i < width
  static void pack_transposed(const Block& block, int64_t rows, int64_t cols, T* tile, int64_t width) {
    ATTN_ISA::pack_transposed<T>(tile, kRowTile, block, rows, cols, width);
  }

  // The tile of weights x[key * kRowTile + lane], slots along the keys: [slot][lane], in the place of x.
  static const T* along_keys(T* x, int64_t, int64_t) { return x; }
  // The same, slots along the lanes: [key][slot], in `tile`.
  static Rows<T> along_lanes(const T* x, int64_t, int64_t, T*) { return {x, kRowTile}; }

  // The k-th numbers of slots.
  static ATTN_INLINE Vec<T> number(Vec<T> slots, int64_t) { return slots; }
  // Infinities and NaNs become 0.
  static void make_finite(T* tile, int64_t slots) {
    for (int64_t i = 0; i < slots; i += kLanes<T>) {
      const Vec<T> v = load<T>(tile + i);
      store<T>(tile + i, (v - v) != Vec<T>{} ? Vec<T>{} : v);
    }
  }
};

#ifdef ATTN_BF16_PAIRS
// Slots of two bfloat16, the first in the low half; their products are summed in float32 (VDPBF16PS). float32 tensors are
// rounded to them.
struct Pairs {
  using Number = float;
  using Bits = Vec<uint32_t>;
  static constexpr int64_t kNumbers = 2;
  static constexpr int W = kLanes<float>;
  static constexpr bool holds(DType dtype) { return dtype == DType::bf16; }

  static ATTN_INLINE Vec<float> multiply_add(Vec<float> sum, const float* a, Vec<float> b) {
    uint32_t slot;
    __builtin_memcpy(&slot, a, sizeof slot);
    return multiply_add(sum, bit_cast<Vec<float>>(splat(slot)), b);
  }
  static ATTN_INLINE Vec<float> multiply_add(Vec<float> sum, Vec<float> a, Vec<float> b) {
    return bit_cast<Vec<float>>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(a), bit_cast<__m512bh>(b)));
  }

  static Rows<float> along_columns(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    if (block.dtype == DType::bf16 && block.col == 1 && cols % kNumbers == 0 && block.row % kNumbers == 0)
      return {reinterpret_cast<const float*>(block.data), block.row / kNumbers};
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t d = 0; d < cols; d += W) {
        const int64_t count = smaller(cols - d, W);
        const Shorts<float> numbers = load_numbers(block, i, d, count);
        __builtin_memcpy(tile + i * ld + d / kNumbers, &numbers, slots_of<Pairs>(count) * sizeof(float));
      }
    }
    return {tile, ld};
  }
  static Rows<float> along_rows(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    pack_along_rows(block, 0, rows, cols, tile, ld);
    return {tile, ld};
  }
  static void pack_along_rows(const Block& block, int64_t first, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    for (int64_t i = 0; i < rows; ++i) {
      float* to = tile + (first + i) / kNumbers * ld;
      const bool second = (first + i) % kNumbers == 1;
      for (int64_t d = 0; d < ld; d += W) {
        const Bits number = __builtin_convertvector(load_numbers(block, i, d, smaller(cols - d, W)), Bits);
        const Bits slot = second ? bit_cast<Bits>(load<float>(to + d)) | number << 16 : number;
        store<float>(to + d, bit_cast<Vec<float>>(slot));
      }
    }
  }
  static void pack_transposed(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t width) {
    constexpr int64_t kSlots = 32;  // that a pass takes
    float packed[kRowTile * kSlots];
    for (int64_t d = 0; d < cols; d += kSlots * kNumbers) {
      const int64_t depth = smaller(cols - d, kSlots * kNumbers);
      Block part = block;
      part.data += d * block.col * size_of(block.dtype);
      const Rows<float> from = along_columns(part, rows, depth, packed, kSlots);
      const Block slots{reinterpret_cast<char*>(const_cast<float*>(from.data)), DType::f32, from.ld, 1};
      ATTN_ISA::pack_transposed<float>(tile + d / kNumbers * kRowTile, kRowTile, slots, rows, slots_of<Pairs>(depth),
                                       width);
    }
  }

  static const float* along_keys(float* x, int64_t keys, int64_t lanes) {
    for (int64_t j = 0; j < keys; j += kNumbers)
      for (int64_t i = 0; i < lanes; i += W) {
        const Vec<float> first = load<float>(x + j * kRowTile + i);
        const Vec<float> second = j + 1 < keys ? load<float>(x + (j + 1) * kRowTile + i) : Vec<float>{};
        store<float>(x + j / kNumbers * kRowTile + i, paired(first, second));
      }
    return x;
  }
  static Rows<float> along_lanes(const float* x, int64_t keys, int64_t lanes, float* tile) {
    constexpr int64_t ld = kRowTile / kNumbers;
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < lanes; i += W) {
        const __m256bh numbers = _mm512_cvtneps_pbh(bit_cast<__m512>(load<float>(x + j * kRowTile + i)));
        __builtin_memcpy(tile + j * ld + i / kNumbers, &numbers, sizeof numbers);
      }
    return {tile, ld};
  }

  static ATTN_INLINE Vec<float> number(Vec<float> slots, int64_t k) {
    const Bits bits = bit_cast<Bits>(slots);
    return bit_cast<Vec<float>>(k == 0 ? bits << 16 : bits & 0xffff0000u);
  }
  static void make_finite(float* tile, int64_t slots) {
    constexpr uint32_t kLow = 0x7f80u, kHigh = kLow << 16;  // the exponents of infinity and NaN
    for (int64_t i = 0; i < slots; i += W) {
      const Bits bits = bit_cast<Bits>(load<float>(tile + i));
      const Bits bad = ((bits & kLow) == kLow ? Bits{} + 0xffffu : Bits{}) |
                       ((bits & kHigh) == kHigh ? Bits{} + 0xffff0000u : Bits{});
      store<float>(tile + i, bit_cast<Vec<float>>(bits & ~bad));
    }
  }

 private:
  // Rounds to nearest even.
  static ATTN_INLINE Vec<float> paired(Vec<float> first, Vec<float> second) {
    const __m512bh joined = _mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first));
    using Words = typename VectorOf<uint16_t, 2 * W>::type;
    const Words order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return bit_cast<Vec<float>>(_mm512_permutexvar_epi16(bit_cast<__m512i>(order), bit_cast<__m512i>(joined)));
  }

  // Numbers (i, d), (i, d + 1), ... of the block, `count` of them if fewer than W, and zeros.
  static Shorts<float> load_numbers(const Block& block, int64_t i, int64_t d, int64_t count) {
    const int64_t at = i * block.row + d * block.col;
    if (block.dtype == DType::f32) {
      const auto rounded = _mm512_cvtneps_pbh(
          bit_cast<__m512>(gathered<Vec<float>>(reinterpret_cast<const float*>(block.data) + at, block.col, count)));
      return bit_cast<Shorts<float>>(rounded);
    }
    return gathered<Shorts<float>>(reinterpret_cast<const uint16_t*>(block.data) + at, block.col, count);
  }
  template <class V, class S>
  static ATTN_INLINE V gathered(const S* from, int64_t stride, int64_t count) {
    V v{};
    if (stride == 1 && count >= W) {
      __builtin_memcpy(&v, from, sizeof v);
    } else {
      for (int64_t k = 0; k < count; ++k) v[k] = from[k * stride];
    }
    return v;
  }
};
#endif

}  // namespace attn::ATTN_ISA
