// The keys and values of a call, packed once for all of its tasks. They are prepacked only in the formats of the
// processor's tiles, because packing in these formats transposes numbers or splits them.
#pragma once

#include "cpu/tiles/formats.inl"

namespace attn::ATTN_ISA {

// ForwardParams::prepacked holds first all tiles of keys, then all tiles of values.
template <Format F>
struct Prepacked {
  using T = typename F::Number;

  // Whether to pack the keys and values. Packing pays only if several tasks read the packed numbers, and if these
  // numbers take at most about as much memory as queries and outputs. Numbers of 8 bits are not packed, because packing
  // would double their memory.
  static bool pays(const ForwardParams& p) {
    return F::kTiles && !p.paging.table && size_of(p.key.dtype) > 1 && size_of(p.value.dtype) > 1 &&
           p.row_tasks() > 1 && p.keys * (p.key_heads + p.value_heads) <= 2 * p.queries * p.heads;
  }
  static int64_t size(const ForwardParams& p) {
    const int64_t numbers = p.key_heads * key_size(p) + p.value_heads * value_size(p);
    return pays(p) ? p.batch * tiles(p) * numbers * static_cast<int64_t>(sizeof(T)) : 0;
  }
  static void pack(const ForwardParams& p, int64_t task) {
    const int64_t key = task % tiles(p) * kKeyTile, heads = larger(p.key_heads, p.value_heads);
    const int64_t head = task / tiles(p) % heads, n = task / tiles(p) / heads;
    const int64_t count = smaller(kKeyTile, sequence_of(p, n).keys - key);
    if (count <= 0) return;
    if (head < p.key_heads)
      F::along_columns(block_of(p, p.key, n, head, key), count, p.head_dim, key_tile(p, n, head, key), ld_key(p));
    if (head < p.value_heads)
      F::along_rows(block_of(p, p.value, n, head, key), count, p.value_dim, value_tile(p, n, head, key), kValueRow);
  }

  // keys() and values() return the tile of keys, or of values, that begins with key number `key`. A tile of keys is the
  // packed tile, unless the keys can be used in place.
  static Rows<T> keys(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    const Block block = block_of(p, p.key, n, head, key);
    if (F::in_place(block, smaller(kKeyTile, sequence_of(p, n).keys - key), p.head_dim)) return F::as_it_lies(block);
    return {key_tile(p, n, head, key), ld_key(p)};
  }
  static Rows<T> values(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    return {value_tile(p, n, head, key), kValueRow};
  }

 private:
  static constexpr int64_t kValueRow = slots_of<F>(kKeyTile);  // [value_dim][slots of keys]
  static int64_t tiles(const ForwardParams& p) { return divide_up(p.keys, kKeyTile); }
  static int64_t ld_key(const ForwardParams& p) { return slots_of<F>(p.head_dim) + kLanes<T>; }  // see Forward::Buffers
  static int64_t key_size(const ForwardParams& p) { return kKeyTile * ld_key(p); }
  static int64_t value_size(const ForwardParams& p) { return round_up(p.value_dim, kLanes<T>) * kValueRow; }
  static T* key_tile(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    return static_cast<T*>(p.prepacked) + ((n * p.key_heads + head) * tiles(p) + key / kKeyTile) * key_size(p);
  }
  static T* value_tile(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    return key_tile(p, p.batch, 0, 0) + ((n * p.value_heads + head) * tiles(p) + key / kKeyTile) * value_size(p);
  }
};

}  // namespace attn::ATTN_ISA
