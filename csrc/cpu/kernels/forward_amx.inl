// The forward on the processor's tiles: the formulas of forward.inl, in a loop that gives tiles and vectors work at the
// same time. The scores of 32 queries and up to 128 keys are a block; blocks pass through three stages:
//
//   products S^T = K Q^T         of block r + 1
//   softmax P = exp(S - m)       of block r       a few vectors after each product of tiles
//   products O^T += V^T P^T      of block r - 1
//
// A product of four tiles keeps the tiles busy for 64 cycles, and the processor looks some 500 instructions ahead:
// what is to overlap must stand close together.
//
// The reference m moves as in forward.inl, for all rows of a block at once.
#pragma once

#include "cpu/tiles/gemm_amx.inl"  // first, as there

#include "cpu/kernels/forward.inl"

namespace attn::ATTN_ISA {

// F: Tiles<parts>
template <class F>
struct TileForward : Forward<F> {
  using Base = Forward<F>;
  using T = float;
  using typename Base::RowState;
  using Product = Gemm<F>;
  static constexpr int W = kLanes<T>;
  static constexpr int64_t kTile = Product::kTile;
  static_assert(kTile == W);
  static constexpr int64_t kGroup = 2 * kTile;  // queries of a block
  static constexpr int64_t kKeyTiles = 2;       // of a block
  static constexpr int64_t kKeys = kKeyTiles * kKeyTile;
  static constexpr int64_t kStages = 3;

  // Queries of a RowState that blocks are made of.
  struct Group {
    RowTile rows;
    T *query_t, *output_t, *reference, *sum;  // columns of the state's
    bool started;                             // has a block
  };
  // What the stages hand on. Its rows of scores are counted across its tiles of keys, of which all but the last are
  // whole.
  struct ScoreBlock {
    Group* group;
    int64_t tiles, keys;
    Rows<T> value_rows[kKeyTiles];
    T *x, *weights, *factor;  // [keys or their slots][kRowTile]
    T best[kGroup];           // the largest x
    T correction[kGroup];     // of what was summed before, if `moved`
    bool moved, is_first;     // is_first: of its group
    int64_t keys_of(int64_t tile) const { return smaller(kKeyTile, keys - tile * kKeyTile); }
  };
  struct Buffers {
    RowState* states;
    Group* groups;
    ScoreBlock* blocks;   // [kStages]
    ScoreTile<T>* tiles;  // [kKeyTiles], of the block in the first stage
    T* key;               // [kKeyTiles][kKeyTile][slots of E]
    T* value;             // [kStages][kKeyTiles][Ev][slots of kKeyTile]
    T* x;                 // [kKeys][kRowTile]: scores of two blocks side by side, as for weights and factors
    T* weights;           // [slots of kKeys][kRowTile]
    T* bias;              // [kKeys][kRowTile]
    T* factor;            // as x
    int64_t size;

    Buffers(const ForwardParams& p, char* base) {
      Arena arena(base);
      const int64_t row_tiles = divide_up(p.rows_per_task, kRowTile), columns = round_up(p.value_dim, kTile);
      states = arena.take<RowState>(row_tiles);
      groups = arena.take<Group>(row_tiles * (kRowTile / kGroup));
      blocks = arena.take<ScoreBlock>(kStages);
      tiles = arena.take<ScoreTile<T>>(kKeyTiles);
      const int64_t own_tiles = packed_size(p) ? 0 : kKeyTiles;
      key = arena.take<T>(own_tiles * key_size(p));
      value = arena.take<T>(own_tiles * kStages * value_size(p));
      x = arena.take<T>(kKeys * kRowTile);
      weights = arena.take<T>(slots_of<F>(kKeys) * kRowTile);
      bias = arena.take<T>(p.has_mask ? kKeys * kRowTile : 0);
      factor = arena.take<T>(p.has_dropout ? kKeys * kRowTile : 0);
      arena.take_for_each(states, row_tiles, [&](RowState& state) {
        state.query_t = arena.take<T>(slots_of<F>(p.head_dim) * kRowTile);
        state.output_t = arena.take<T>(columns * kRowTile);
        state.reference = arena.take<T>(kRowTile);
        state.sum = arena.take<T>(kRowTile);
      });
      size = arena.used();
    }
  };
  static int64_t workspace(const ForwardParams& p) { return larger(Buffers(p, nullptr).size, merge_workspace<T>(p)); }

  // Keys and values are packed once for all tasks if several read them and that takes no more memory than queries and
  // outputs, about.
  static int64_t packed_size(const ForwardParams& p) {
    const bool pays = p.row_tasks() > 1 && p.keys * (p.key_heads + p.value_heads) <= 2 * p.queries * p.heads;
    const int64_t numbers = p.key_heads * key_size(p) + p.value_heads * value_size(p);
    return pays ? p.batch * key_tiles(p) * numbers * static_cast<int64_t>(sizeof(T)) : 0;
  }
  static void pack(const ForwardParams& p, int64_t task) {
    const int64_t key = task % key_tiles(p) * kKeyTile, heads = larger(p.key_heads, p.value_heads);
    const int64_t head = task / key_tiles(p) % heads, n = task / key_tiles(p) / heads;
    if (head < p.key_heads)
      F::along_columns(block_of(p, p.key, n, head, key), keys_from(p, key), p.head_dim, packed_key(p, n, head, key),
                       ld_key(p));
    if (head < p.value_heads)
      F::along_rows(block_of(p, p.value, n, head, key), keys_from(p, key), p.value_dim, packed_value(p, n, head, key),
                    0);
  }
  static int64_t key_tiles(const ForwardParams& p) { return divide_up(p.keys, kKeyTile); }
  static int64_t keys_from(const ForwardParams& p, int64_t key) { return smaller(kKeyTile, p.keys - key); }
  static int64_t ld_key(const ForwardParams& p) { return slots_of<F>(p.head_dim) + W; }  // padded as in forward.inl
  static int64_t key_size(const ForwardParams& p) { return kKeyTile * ld_key(p); }
  static int64_t value_size(const ForwardParams& p) { return round_up(p.value_dim, kTile) * slots_of<F>(kKeyTile); }
  static T* packed_key(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    return static_cast<T*>(p.packed) + ((n * p.key_heads + head) * key_tiles(p) + key / kKeyTile) * key_size(p);
  }
  static T* packed_value(const ForwardParams& p, int64_t n, int64_t head, int64_t key) {
    return packed_key(p, p.batch, 0, 0) + ((n * p.value_heads + head) * key_tiles(p) + key / kKeyTile) * value_size(p);
  }

  // A tile of keys, and their values: where they lie, packed for all tasks, or packed into `tile`.
  static Rows<T> rows_of_keys(const ForwardParams& p, const RowTask& own, int64_t key, T* tile) {
    const int64_t head = key_head_of(p, own.first_head);
    if (p.packed) tile = packed_key(p, own.n, head, key);
    return F::along_columns(block_of(p, p.key, own.n, head, key), keys_from(p, key), p.head_dim, tile, ld_key(p),
                            p.packed);
  }
  static Rows<T> rows_of_values(const ForwardParams& p, const RowTask& own, int64_t key, T* tile) {
    const int64_t head = value_head_of(p, own.first_head);
    if (p.packed) return {packed_value(p, own.n, head, key), slots_of<F>(kKeyTile)};
    return F::along_rows(block_of(p, p.value, own.n, head, key), keys_from(p, key), p.value_dim, tile, 0);
  }

  // Calls f(std::integral_constant<int, v>) for v < N: arrays that only constants index are kept in registers.
  template <int N, class Function>
  static ATTN_INLINE void each_column(Function f) {
    f(std::integral_constant<int, 0>());
    if constexpr (N == 2) f(std::integral_constant<int, 1>());
  }

  // Turns the scores of a block into unnormalised weights, some at a time. N: vectors of a row.
  template <int N, bool kDropout>
  struct Softmax {
    const T *x = nullptr, *factor = nullptr;
    T* weights = nullptr;
    int64_t next = 0, keys = 0, at_once = 0;
    Vec<T> minus_slope, reference[N], total[N];

    // Chooses the reference. `pauses`: how often advance() will be called, about.
    ATTN_INLINE Softmax(const ForwardParams& p, ScoreBlock* block, int64_t pauses) {
      const Vec<T> slope = splat(log2_slope<T>(p));
      minus_slope = -slope;
      each_column<N>([&](auto column) __attribute__((always_inline)) {
        constexpr int v = column();
        reference[v] = total[v] = Vec<T>{};
      });
      if (!block) return;
      x = block->x;
      factor = block->factor;
      weights = block->weights;
      keys = block->keys;
      at_once = round_up(divide_up(keys, larger(pauses, 1)), F::kNumbers);
      T *const before = block->group->reference, *const sum = block->group->sum;
      bool rises = false;
      for (int v = 0; v < N * W; v += W)
        rises |= any((load<T>(block->best + v) - load<T>(before + v)) * slope > Base::kLag);
      block->moved = false;
      each_column<N>([&](auto column) __attribute__((always_inline)) {
        constexpr int v = column();
        const Vec<T> old = load<T>(before + v * W);
        const Vec<T> now = rises ? max_number(load<T>(block->best + v * W), old) : old;
        reference[v] = now == -kInfinity<T> ? Vec<T>{} : now;  // no key so far: exp(-inf - 0) = 0
        if (!rises) return;
        Vec<T> corrections[] = {(old - reference[v]) * slope};
        F::exp2(corrections);
        const Vec<T> correction = corrections[0];
        store<T>(before + v * W, now);
        store<T>(sum + v * W, load<T>(sum + v * W) * correction);
        store<T>(block->correction + v * W, correction);
        const auto begun = old != -kInfinity<T>;  // else O is 0, if there is one
        block->moved |= any(begun & (correction != static_cast<T>(1)));
      });
    }

    ATTN_INLINE void advance() { advance_to(smaller(next + at_once, keys)); }
    ATTN_INLINE void advance_to(int64_t end) {
      for (; next < end; next += F::kNumbers)
        each_column<N>([&](auto column) __attribute__((always_inline)) {
          constexpr int v = column();
          Vec<T> weight[F::kNumbers];
#pragma GCC unroll 2
          for (int64_t k = 0; k < F::kNumbers; ++k) {
            const int64_t at = (next + k) * kRowTile + v * W;
            weight[k] = (reference[v] - load<T>(x + at)) * minus_slope;
          }
          F::exp2(weight);
          total[v] += weight[0] + weight[1];
          if constexpr (kDropout)
            for (int64_t k = 0; k < F::kNumbers; ++k) weight[k] *= load<T>(factor + (next + k) * kRowTile + v * W);
          F::store_along_keys(weights + v * W, next, weight);
        });
    }

    ATTN_INLINE void finish(const ScoreBlock* block) {
      if (!block) return;
      advance_to(keys);
      each_column<N>([&](auto column) __attribute__((always_inline)) {
        constexpr int v = column();
        T* const sum = block->group->sum + v * W;
        store<T>(sum, load<T>(sum) + total[v]);
      });
      F::end_along_keys(weights, keys, N * W);
    }
  };

  // The largest of `keys` rows of scores, and of those before unless they are the first.
  template <int N>
  static void find_best(const T* x, int64_t keys, bool is_first, T* best) {
    for (int v = 0; v < N; ++v) {
      Vec<T> of[4];
      for (Vec<T>& o : of) o = splat<T>(-kInfinity<T>);
      int64_t j = 0;
      for (; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) of[k] = max_number(load<T>(x + (j + k) * kRowTile + v * W), of[k]);
      for (; j < keys; ++j) of[0] = max_number(load<T>(x + j * kRowTile + v * W), of[0]);
      Vec<T> most = max_number(max_number(of[0], of[1]), max_number(of[2], of[3]));
      if (!is_first) most = max_number(load<T>(best + v * W), most);
      store<T>(best + v * W, most);
    }
  }

  // One step of the pipeline: a block for each stage, or null. N: tiles of queries that a block is wide.
  template <int N, bool kDropout>
  static void step(const ForwardParams& p, const Buffers& b, ScoreBlock* scored, const Rows<T>* key_rows,
                   ScoreBlock* weighted, ScoreBlock* averaged) {
    const int64_t depth = slots_of<F>(p.head_dim);
    constexpr int64_t kProductsOfSlot = Product::kCount;  // of kTile * kParts slots
    int64_t pauses = 0;
    if (scored) pauses += scored->keys / kGroup * (depth / (kTile * F::kParts)) * kProductsOfSlot;
    if (averaged)
      pauses += p.value_dim / kGroup * (slots_of<F>(averaged->keys) / (kTile * F::kParts)) * kProductsOfSlot;
    Softmax<N, kDropout> softmax(p, weighted, pauses);
    const auto between = [&]() __attribute__((always_inline)) { softmax.advance(); };

    // What tiles stored is read later, with products in between: a load would wait until it is in the cache.
    int64_t finished = 0;
    const auto finish_scores = [&](int64_t tiles) {
      for (; finished < tiles; ++finished) {
        T* const x = scored->x + finished * kKeyTile * kRowTile;
        products_to_scores<T>(p, b.tiles[finished], x);
        find_best<N>(x, b.tiles[finished].keys.size(), finished == 0, scored->best);
      }
    };
    for (int64_t t = 0; scored && t < scored->tiles; ++t) {
      const Rows<T>& rows = key_rows[t];
      const int64_t keys = scored->keys_of(t);
      const T* const query_t = scored->group->query_t;
      for (int64_t j = 0; j < keys; j += 2 * kTile) {
        const T* a = rows.data + j * rows.ld;
        T *const c = scored->x + (t * kKeyTile + j) * kRowTile, *const second = c + kTile * kRowTile;
        if (keys - j > kTile) {
          Product::template zero<2, N>();
          Product::template multiply_add<2, N>(depth, a, rows.ld, query_t, kRowTile, between);
          Product::template store<2, N>(c, kRowTile, second, kRowTile);
        } else {
          Product::template zero<1, N>();
          Product::template multiply_add<1, N>(depth, a, rows.ld, query_t, kRowTile, [] {});
          Product::template store<1, N>(c, kRowTile, c, kRowTile);
        }
      }
      finish_scores(t);
    }
    if (scored && scored->keys % F::kNumbers != 0)  // the other half of the last slot
      for (int v = 0; v < N; ++v) {
        const int64_t at = scored->keys * kRowTile + v * W;
        store<T>(scored->x + at, splat<T>(-kInfinity<T>));
        if (kDropout) store<T>(scored->factor + at, Vec<T>{});
      }

    if (averaged && averaged->moved)
      for (int v = 0; v < N; ++v) {
        const Vec<T> correction = load<T>(averaged->correction + v * W);
        for (int64_t d = 0; d < p.value_dim; ++d) {
          T* at = averaged->group->output_t + d * kRowTile + v * W;
          store<T>(at, load<T>(at) * correction);
        }
      }
    for (int64_t d = 0; averaged && d < p.value_dim; d += 2 * kTile) {
      T *const c = averaged->group->output_t + d * kRowTile, *const second = c + kTile * kRowTile;
      const auto each_tile = [&](auto f) __attribute__((always_inline)) {
        for (int64_t t = 0; t < averaged->tiles; ++t) {
          const Rows<T>& rows = averaged->value_rows[t];
          f(slots_of<F>(averaged->keys_of(t)), rows.data + d * rows.ld, rows.ld,
            averaged->weights + t * slots_of<F>(kKeyTile) * kRowTile);
        }
      };
      if (p.value_dim - d > kTile) {
        averaged->is_first ? Product::template zero<2, N>()
                           : Product::template load<2, N>(c, kRowTile, second, kRowTile);
        each_tile([&](int64_t slots, const T* a, int64_t lda, const T* weights) __attribute__((always_inline)) {
          Product::template multiply_add<2, N>(slots, a, lda, weights, kRowTile, between);
        });
        Product::template store<2, N>(c, kRowTile, second, kRowTile);
      } else {
        averaged->is_first ? Product::template zero<1, N>() : Product::template load<1, N>(c, kRowTile, c, kRowTile);
        each_tile([&](int64_t slots, const T* a, int64_t lda, const T* weights) __attribute__((always_inline)) {
          Product::template multiply_add<1, N>(slots, a, lda, weights, kRowTile, [] {});
        });
        Product::template store<1, N>(c, kRowTile, c, kRowTile);
      }
      finish_scores(scored ? scored->tiles : 0);
    }
    finish_scores(scored ? scored->tiles : 0);
    softmax.finish(weighted);
  }

  static void run(const ForwardParams& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace);
    const RowTask own(p, task);
    int64_t groups = 0;
    const RowTiles<RowState> rows(p, own, b.states, [&](RowState& state) {
      const int64_t slots = slots_of<F>(p.head_dim);
      if (state.rows.count < kRowTile) fill_zero(state.query_t, slots * kRowTile);
      state.rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
      fill_zero(state.sum, kRowTile);
      for (int64_t i = 0; i < kRowTile; ++i) state.reference[i] = -kInfinity<T>;
      state.started = true;
      const int64_t first = own.rows.first + (&state - b.states) * kRowTile;
      for (int64_t lane = 0; lane < state.rows.count; lane += kGroup) {
        Group& group = b.groups[groups++];
        group.rows.set(p, own.n, own.first_head, {first + lane, first + smaller(lane + kGroup, state.rows.count)});
        group.query_t = state.query_t + lane;
        group.output_t = state.output_t + lane;
        group.reference = state.reference + lane;
        group.sum = state.sum + lane;
        group.started = false;
      }
    });
    const auto loop = own.rows.size() > kTile ? (p.has_dropout ? pipeline<2, true> : pipeline<2, false>)
                                              : (p.has_dropout ? pipeline<1, true> : pipeline<1, false>);
    loop(p, b, own, own.keys_seen(p, rows.positions), groups);
    Base::finish_task(p, own, rows, b.x);
  }

  template <int N, bool kDropout>
  static void pipeline(const ForwardParams& p, const Buffers& b, const RowTask& own, Range keys, int64_t groups) {
    int64_t blocks = 0, loads = 0;  // so far
    // With a mask one, as the tiles that it leaves must not decide which of them share a maximum: a document among
    // others has the bits that it has alone.
    const int64_t tiles_of_block = p.has_mask ? 1 : kKeyTiles;
    const auto block = [&](int64_t number) {
      return number >= 0 && number < blocks ? b.blocks + number % kStages : nullptr;
    };
    for (int64_t first = keys.first; first < keys.last; first += kKeys) {
      Rows<T> key_rows[kKeyTiles] = {}, value_rows[kKeyTiles] = {};  // once some group sees them
      // The blocks of the two stages after this one still have values: of at most two such passes.
      T* const value = b.value + loads % kStages * kKeyTiles * value_size(p);
      bool loaded = false;
      for (int64_t g = 0; g < groups; ++g) {
        Group& group = b.groups[g];
        ScoreBlock* next = nullptr;
        Rows<T> rows_of[kKeyTiles];
        const auto submit = [&] {
          ++blocks;
          step<N, kDropout>(p, b, next, rows_of, block(blocks - 2), block(blocks - 3));
          next = nullptr;
        };
        for (int64_t t = 0; t < kKeyTiles; ++t) {
          const int64_t key = first + t * kKeyTile, count = smaller(kKeyTile, keys.last - key);
          if (count <= 0) continue;
          const int64_t number = next ? next->tiles : 0;
          ScoreTile<T>& tile = b.tiles[number];
          if (!tile.set(p, group.rows, {key, key + count}, b.bias + number * kKeyTile * kRowTile)) continue;
          if (!key_rows[t].data) {
            loaded = true;
            key_rows[t] = rows_of_keys(p, own, key, b.key + t * key_size(p));
            value_rows[t] = rows_of_values(p, own, key, value + t * value_size(p));
          }
          if (!next) {
            const int64_t side = blocks % 2 * kGroup;
            next = b.blocks + blocks % kStages;
            next->group = &group;
            next->is_first = !group.started;
            group.started = true;
            next->tiles = next->keys = 0;
            next->x = b.x + side;
            next->weights = b.weights + side;
            next->factor = b.factor + side;
          }
          tile.keys.last = tile.keys_seen(p, group.rows.positions).last;
          if (kDropout) dropout_factors<T>(p, group.rows, tile.keys, 1, next->factor + number * kKeyTile * kRowTile);
          rows_of[number] = key_rows[t];
          next->value_rows[number] = value_rows[t];
          next->tiles = number + 1;
          next->keys += tile.keys.size();
          if (next->tiles == tiles_of_block || tile.keys.size() < kKeyTile) submit();
        }
        if (next) submit();
      }
      loads += loaded;
    }
    for (int64_t i = 0; i < kStages - 1; ++i)
      step<N, kDropout>(p, b, nullptr, nullptr, block(blocks - 1 + i), block(blocks - 2 + i));
  }
};

}  // namespace attn::ATTN_ISA
