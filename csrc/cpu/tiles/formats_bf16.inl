// Operands of bfloat16, for the instructions that multiply bfloat16. A slot holds two neighbours, the first one in its
// low half. Their products are summed in float32. A number with more bits than a bfloat16 is stored as a sum of
// kSummands bfloat16. Each summand is the number minus the summands before it, rounded to bfloat16.
#pragma once

#include "cpu/isa/instructions_avx512_bf16.inl"
#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

// kSummandsOfNumber: how many bfloat16 add up to a number. kSlotsOfStep: how many slots one step of a product takes.
// The summands of a number are kSlotsOfStep slots apart. Zeros fill the last step.
//   Pairs         one slot a step, multiplied by VDPBF16PS
//   Tiles<parts>  16 slots a step, multiplied by the tiles of AMX
template <int kSummandsOfNumber, int kSlotsOfStep>
struct Bfloat16s {
  using Number = float;
  using Bits = Vec<uint32_t>;
  static constexpr int64_t kNumbers = 2;
  static constexpr int64_t kStep = kSlotsOfStep;
  static constexpr int64_t kSummands = kSummandsOfNumber;
  static constexpr bool kTiles = kStep > 1;
  static constexpr int W = kLanes<float>;
  static_assert(kTiles || kSummands == 1);
  static constexpr bool holds(DType dtype) {
    return dtype == DType::bf16 || size_of(dtype) == 1 || (kSummands == 2 && dtype == DType::f16);
  }

  static ATTN_INLINE Vec<float> multiply(const float* a, Vec<float> b) { return multiply_add(Vec<float>{}, a, b); }
  static ATTN_INLINE Vec<float> multiply_add(Vec<float> sum, const float* a, Vec<float> b) {
    uint32_t slot;
    __builtin_memcpy(&slot, a, sizeof slot);
    return multiply_add(sum, bit_cast<Vec<float>>(splat(slot)), b);
  }
  static ATTN_INLINE Vec<float> multiply_add(Vec<float> sum, Vec<float> a, Vec<float> b) {
    return add_products_of_pairs(sum, a, b);
  }

  static bool in_place(const Block& block, int64_t rows, int64_t cols) {
    if (kSummands > 1 || block.dtype != DType::bf16 || block.col != 1 || cols % (kNumbers * kStep) != 0) return false;
    if (!kTiles) return block.row % kNumbers == 0;
    // Uses whole tiles in place if their rows are aligned and not far apart. (Rows that are far apart would use only
    // few sets of the cache.)
    constexpr int64_t kLine = 64 / sizeof(uint16_t), kFarApart = 512;
    return rows % kStep == 0 && reinterpret_cast<uintptr_t>(block.data) % 64 == 0 && block.row % kLine == 0 &&
           block.row <= kFarApart;
  }
  static Rows<float> as_it_lies(const Block& block) {
    return {reinterpret_cast<const float*>(block.data), block.row / kNumbers};
  }
  static Rows<float> along_columns(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld,
                                   bool = false) {
    if (in_place(block, rows, cols)) return as_it_lies(block);
    pack_along_columns(block, rows, cols, tile, ld);
    return {tile, ld};
  }
  static void pack_along_columns(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    const int64_t end = round_up(cols, kNumbers * kStep);
    for (int64_t i = 0; i < rows; ++i) {
      int64_t d = 0;
      with_8_bits(block, i, [&](const auto* row) {
        for (; d + 2 * W <= cols; d += 2 * W)
          store<float>(tile + i * ld + slot(d, 0),
                       joined_bfloat16(load_as<float>(row + d), load_as<float>(row + d + W)));
      });
      for (; d < end; d += W) {
        Shorts<float> part[kSummands];
        load_summands(block, i, d, smaller(cols - d, W), part);
        for (int64_t g = 0; g < kSummands; ++g)
          __builtin_memcpy(tile + i * ld + slot(d, g), &part[g], smaller(end - d, W) / kNumbers * sizeof(float));
      }
    }
  }

  static Rows<float> along_rows(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    if constexpr (kTiles) {  // tiles cannot be read transposed: packs A, not A', [column][slots of kKeyTile]
      constexpr int64_t kColumns = 2 * W;
      constexpr int64_t kSlots = slots_of<Bfloat16s>(kKeyTile);
      alignas(64) float packed[kSlots * kColumns];
      for (int64_t d = 0; d < cols; d += kColumns) {
        Block part = block;
        part.data += d * block.col * size_of(block.dtype);
        pack_along_rows(part, 0, rows, smaller(cols - d, kColumns), packed, kColumns);
        const Block slots{reinterpret_cast<char*>(packed), DType::f32, kColumns, 1};
        ATTN_ISA::pack_transposed<float>(tile + d * kSlots, kSlots, slots, slots_of<Bfloat16s>(rows),
                                         smaller(round_up(cols - d, W), kColumns), slots_of<Bfloat16s>(rows));
      }
      return {tile, kSlots};
    } else {
      return vectors_along_rows(block, rows, cols, tile, ld);
    }
  }
  static Rows<float> vectors_along_rows(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    pack_along_rows(block, 0, rows, cols, tile, ld);
    return {tile, ld};
  }
  static Rows<float> finite_along_rows(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    const Rows<float> packed = along_rows(block, rows, cols, tile, ld);
    make_finite(tile, packed.ld * (kTiles ? cols : slots_of<Bfloat16s>(rows)));
    return packed;
  }
  static void pack_along_rows(const Block& block, int64_t first, int64_t rows, int64_t cols, float* tile, int64_t ld) {
    const int64_t last = first + rows;
    for (int64_t i = first; i < last;) {
      const bool is_second = i % kNumbers == 1, is_pair = !is_second && i + 1 < last;
      if (kTiles && i % (kNumbers * kStep) == 0) fill_zero(tile + slot(i, 0) * ld, kStep * kSummands * ld);
      int64_t d = 0;
      if (kSummands == 1 && is_pair && block.dtype == DType::bf16 && block.col == 1) {
        const auto* row = reinterpret_cast<const uint16_t*>(block.data) + (i - first) * block.row;
        for (; d + 2 * W <= cols; d += 2 * W) {
          Vec<float> slots[2];
          interleave(load(reinterpret_cast<const float*>(row + d)),
                     load(reinterpret_cast<const float*>(row + block.row + d)), slots);
          for (int half = 0; half < 2; ++half) store<float>(tile + slot(i, 0) * ld + d + half * W, slots[half]);
        }
      }
      if (is_pair)
        with_8_bits(block, i - first, [&](const auto* row) {
          for (; d + W <= cols; d += W)
            store<float>(tile + slot(i, 0) * ld + d,
                         interleaved_bfloat16(load_as<float>(row + d), load_as<float>(row + block.row + d)));
        });
      for (; d < round_up(cols, W); d += W) {
        Shorts<float> part[kSummands], next[kSummands];
        load_summands(block, i - first, d, smaller(cols - d, W), part);
        if (is_pair) load_summands(block, i + 1 - first, d, smaller(cols - d, W), next);
        for (int64_t g = 0; g < kSummands; ++g) {
          float* to = tile + slot(i, g) * ld + d;
          Bits bits = __builtin_convertvector(part[g], Bits);
          if (is_pair) bits |= __builtin_convertvector(next[g], Bits) << 16;
          if (is_second) bits = bit_cast<Bits>(load<float>(to)) | bits << 16;
          store<float>(to, bit_cast<Vec<float>>(bits));
        }
      }
      i += is_pair ? 2 : 1;
    }
  }
  static void pack_transposed(const Block& block, int64_t rows, int64_t cols, float* tile, int64_t width) {
    constexpr int64_t kPass = 64;  // columns at a time
    constexpr int64_t ld = slots_of<Bfloat16s>(kPass);
    alignas(64) float packed[kRowTile * ld];
    for (int64_t d = 0; d < cols; d += kPass) {
      const int64_t depth = smaller(cols - d, kPass);
      Block part = block;
      part.data += d * block.col * size_of(block.dtype);
      const Rows<float> from = along_columns(part, rows, depth, packed, ld);
      const Block slots{reinterpret_cast<char*>(const_cast<float*>(from.data)), DType::f32, from.ld, 1};
      ATTN_ISA::pack_transposed<float>(tile + slot(d, 0) * kRowTile, kRowTile, slots, rows, slots_of<Bfloat16s>(depth),
                                       width);
    }
  }

  static constexpr bool kWeightsInPlace = kSummands == 1;
  // kFinite: no weight is an infinity.
  template <bool kFinite = true>
  static ATTN_INLINE void store_along_keys(float* tile, int64_t key, Vec<float> (&weights)[2]) {
    for (int64_t g = 0; g < kSummands; ++g) {
      const Vec<float> slots = interleaved_bfloat16(weights[0], weights[1]);
      store<float>(tile + slot(key, g) * kRowTile, slots);
      for (int k = 0; k < 2; ++k)
        weights[k] = kFinite ? weights[k] - number(slots, k) : without(weights[k], number(slots, k));
    }
  }
  static void end_along_keys(float* tile, int64_t keys, int64_t lanes) {
    for (int64_t j = round_up(keys, kNumbers); j < round_up(keys, kNumbers * kStep); j += kNumbers)
      for (int64_t g = 0; g < kSummands; ++g) fill_zero(tile + slot(j, g) * kRowTile, lanes);
  }
  static const float* along_keys(float* x, int64_t keys, int64_t lanes, float* tile) {
    float* const to = kWeightsInPlace ? x : tile;
    for (int64_t i = 0; i < lanes; i += W)
      for (int64_t j = 0; j < keys; j += kNumbers) {
        const float* at = x + j * kRowTile + i;
        Vec<float> weights[2] = {load<float>(at), j + 1 < keys ? load<float>(at + kRowTile) : Vec<float>{}};
        store_along_keys<false>(to + i, j, weights);
      }
    end_along_keys(to, keys, lanes);
    return to;
  }
  static Rows<float> along_lanes(const float* x, int64_t keys, int64_t lanes, float* tile) {
    constexpr int64_t ld = slots_of<Bfloat16s>(kRowTile);
    const auto load_lanes = [&](const float* from, int64_t i) {
      if (i + W <= lanes) return load<float>(from + i);
      return i < lanes ? load_some<float>(from + i, lanes - i) : Vec<float>{};
    };
    for (int64_t j = 0; j < keys; ++j)
      for (int64_t i = 0; i < lanes; i += 2 * W) {
        Vec<float> first = load_lanes(x + j * kRowTile, i);
        Vec<float> second = load_lanes(x + j * kRowTile, i + W);
        for (int64_t g = 0; g < kSummands; ++g) {
          const Vec<float> slots = joined_bfloat16(first, second);
          store<float>(tile + j * ld + slot(i, g), slots);
          Shorts<float> part[2];
          __builtin_memcpy(part, &slots, sizeof part);
          first = without(first, bfloat16_to_float(part[0]));
          second = without(second, bfloat16_to_float(part[1]));
        }
      }
    return {tile, ld};
  }

  static ATTN_INLINE int64_t slot(int64_t i, int64_t part) {
    const uint64_t n = static_cast<uint64_t>(i);  // unsigned, so that divisions are shifts
    if (kSummands == 1) return static_cast<int64_t>(n / kNumbers);
    return static_cast<int64_t>((n / (kNumbers * kStep) * kSummands + static_cast<uint64_t>(part)) * kStep +
                                n / kNumbers % kStep);
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

  // Replaces every x by 2^x. The result is as accurate as a number of this format, a sum of kSummands bfloat16.
  template <int N>
  static ATTN_INLINE void exp2(Vec<float> (&x)[N]) {
    exp2_of_degree<3 + kSummands>(x);
  }

 private:
  // Returns x - part, or 0 if x is an infinity or a NaN, because `part` then holds all of x.
  static ATTN_INLINE Vec<float> without(Vec<float> x, Vec<float> part) {
    const Vec<float> rest = x - part;
    return rest - rest == Vec<float>{} ? rest : Vec<float>{};
  }

  // Calls f(row i) if the block has contiguous rows of 8-bit numbers, and kSummands is 1.
  template <class Function>
  static ATTN_INLINE void with_8_bits(const Block& block, int64_t i, Function f) {
    if (kSummands > 1 || block.col != 1) return;
    if (block.dtype == DType::i8) f(reinterpret_cast<const Int8*>(block.data) + i * block.row);
    if (block.dtype == DType::e4m3) f(reinterpret_cast<const Float8*>(block.data) + i * block.row);
  }
  // Loads the summands of the numbers (i, d), (i, d + 1), ..., (i, d + W - 1) of the block. If `count` is below W,
  // loads `count` numbers and fills the other lanes with zeros.
  static ATTN_INLINE void load_summands(const Block& block, int64_t i, int64_t d, int64_t count,
                                        Shorts<float> (&part)[kSummands]) {
    const int64_t at = i * block.row + d * block.col;
    if (block.dtype == DType::bf16) {
      part[0] = gathered<Shorts<float>>(reinterpret_cast<const uint16_t*>(block.data) + at, block.col, count);
      for (int64_t g = 1; g < kSummands; ++g) part[g] = Shorts<float>{};
      return;
    }
    Vec<float> x;
    if (block.dtype == DType::f16)
      x = half_to_float(gathered<Shorts<float>>(reinterpret_cast<const uint16_t*>(block.data) + at, block.col, count));
    else if (block.dtype == DType::i8)
      x = gathered_as(reinterpret_cast<const Int8*>(block.data) + at, block.col, count);
    else if (block.dtype == DType::e4m3)
      x = gathered_as(reinterpret_cast<const Float8*>(block.data) + at, block.col, count);
    else
      x = gathered<Vec<float>>(reinterpret_cast<const float*>(block.data) + at, block.col, count);
    if constexpr (kSummands == 1) {
      part[0] = round_to_bfloat16(x);
      return;
    }
    // A summand of a finite number is at most the largest finite bfloat16. If a number is an infinity or a NaN, its
    // last summand holds it, and its other summands are 0.
    const auto finite = x - x == Vec<float>{};
    Vec<float> rest = finite ? x : Vec<float>{};
    for (int64_t g = 0; g < kSummands; ++g) {
      part[g] = round_to_bfloat16(rest);
      const auto infinite = (part[g] & static_cast<uint16_t>(0x7fff)) == static_cast<uint16_t>(0x7f80);
      part[g] = infinite ? part[g] - static_cast<uint16_t>(1) : part[g];
      rest = rest - bfloat16_to_float(part[g]);
    }
    part[kSummands - 1] = __builtin_convertvector(finite, Shorts<float>) ? part[kSummands - 1] : round_to_bfloat16(x);
  }
  template <class S>
  static ATTN_INLINE Vec<float> gathered_as(const S* from, int64_t stride, int64_t count) {
    if (stride == 1 && count >= W) return load_as<float>(from);
    S some[W] = {};
    for (int64_t k = 0; k < count; ++k) some[k] = from[k * stride];
    return load_as<float>(some);
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

using Pairs = Bfloat16s<1, 1>;
template <int kSummands>
using Tiles = Bfloat16s<kSummands, 16>;
static_assert(Format<Pairs> && Format<Tiles<1>> && Format<Tiles<2>>);

}  // namespace attn::ATTN_ISA
