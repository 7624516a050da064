// Computes the gradients on Hopper's tensor cores, where uses_backward_wgmma() says so, in two passes. In the first one
// a block owns rows and sums dQ over keys, in the second one it owns keys and sums dK and dV over rows. As in
// mma/backward.cuh, every product has one of two forms, where a consumer owns 64 rows or keys of `own`, and `other` is
// the tile in use:
//
//   form               if the block owns keys      if it owns rows
//   own other^T        x = K Q^T, dP = V G^T       x = Q K^T, dP = G V^T
//   (16-bit x) other   dV += P^T G, dK += dS^T Q   dQ += dS K
//
// So weights stay in registers from the first product to the second, sums are added up in the order of the tiles, and
// their bits are always the same.
#pragma once

#include "cuda/mma/gradients.cuh"
#include "cuda/wgmma/row_tasks.cuh"

namespace attn::cuda {

// Blocks of 128 rows sum dQ over tiles of so many keys: as many as registers hold. With a mask, tiles begin where a
// tile of the mask does.
constexpr int backward_wgmma_keys(int dim, Extra extra) {
  if (extra == Extra::mask && dim > 64) return 64;
  return dim <= 64 && extra != Extra::dropout ? 128 : 96;
}
// Blocks of 128 keys sum dK and dV over tiles of so many rows.
constexpr int backward_wgmma_rows(int dim, Extra extra) { return extra == Extra::mask || dim > 64 ? 64 : 96; }

// Whether a tile is finite, whose products with others are `x`. A number of the tile that is not finite makes all its
// products so. Therefore all warps of the block find the same answer, though each of them has products of its own.
template <class S, int kRows, int kCols>
__device__ __forceinline__ bool is_finite(const float (&x)[kRows / 8][4], const PanelTile<S, kRows, kCols>& tile) {
  if (ScoresMma<S, kRows / 8, false>::all_finite(&x)) return true;
  bool finite = true;
  for (int i = MmaThread().lane; i < kRows * kCols / kVector; i += 32)
    for (const uint32_t two : reinterpret_cast<const Vec16<uint32_t>*>(tile.numbers)[i].at)
      finite &= make_finite<S>(two) == two;
  __syncwarp();  // all lanes have read the tile
  return __all_sync(~0u, finite);
}

// A boolean mask alone changes no weights: where it hides a key, packed weights and packed dS are set to 0.
__device__ __forceinline__ bool clears_hidden(const Problem& p) {
  return p.mask.dtype == DType::boolean && !has_terms(p);
}

// How weights read a tile's mask: not at all, as booleans, as numbers, or as numbers that are all 0.
enum class Reads { nothing, booleans, numbers, zeros };
// Returns what exponent_under_mask() subtracts. If the mask holds numbers, `high` is a logsumexp, which is not yet
// multiplied by log2(e), because a product with the least number of a dtype would be infinite. `low` is multiplied.
__device__ __forceinline__ Pair<float> shift_under_mask(const Problem& p, Pair<float> logsumexp, double per_score) {
  if (!p.has_mask || p.mask.dtype == DType::boolean) return exponent_shift(logsumexp, per_score);
  if (logsumexp.high == -infinity<float>()) return {infinity<float>(), 0};
  return {logsumexp.high, logsumexp.low * kLog2E<float>};
}
// As exponent_of(), of a number that is a score but for terms_left(), `left`. `slope`: exponent_slope(). `mask`: two
// numbers of the mask, of which `which` counts; booleans have kBooleanBits bits.
template <class S, Reads kReads, int kBooleanBits>
__device__ __forceinline__ float exponent_under_mask(float number, float slope, float left, Pair<float> shift,
                                                     uint32_t mask, int which) {
  if constexpr (kReads == Reads::nothing) return exponent_of(number, slope, shift);
  if constexpr (kReads == Reads::booleans)
    return mask >> kBooleanBits * which & 0xff ? exponent_of(number, slope, shift) : -infinity<float>();
  const auto exponent = [&](float bias) {
    return fmaf(fmaf(number, left, bias) - shift.high, kLog2E<float>,
                -shift.low);  // rounds the score as the forward does
  };
  if constexpr (kReads == Reads::zeros) return exponent(0);
  const float bias = to_float(S{static_cast<uint16_t>(mask >> 16 * which)});
  return bias == -infinity<float>() ? bias : exponent(bias);
}

// Turns exponents into weights.
template <int kFragments>
__device__ __forceinline__ void turn_into_weights(float (&x)[kFragments][4]) {
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] = exp2_approx(x[n][i]);
}
// Turns dP - delta into dS, where `w` are weights. If some keys may be hidden, it is 0 where the weight is 0, because a
// NaN in a hidden key's value must not reach a gradient.
template <int kFragments>
__device__ __forceinline__ void turn_into_ds(float (&x)[kFragments][4], const float (&w)[kFragments][4], bool hides) {
  if (hides)
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (w[n][i] == 0) x[n][i] = 0;
#pragma unroll
  for (int n = 0; n < kFragments; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[n][i] *= w[n][i];
}

// Makes a tile finite, whose products with others are `x`: puts 0 in place of infinities and NaNs. So they reach a
// gradient only through dS, where a row sees the key. Called by kThreads threads, of all consumers, after products of
// this tile, and before they multiply dS by it.
template <int kThreads, class S, int kRows, int kCols>
__device__ __forceinline__ void make_finite(const float (&x)[kRows / 8][4], PanelTile<S, kRows, kCols>& tile) {
  if (is_finite(x, tile)) return;
  constexpr int kBarrier = 1;
  sync_threads<kThreads>(kBarrier);  // all threads have read the tile, and so have their products
  for (int i = thread_index(); i < kRows * kCols / kVector; i += kThreads)
    for (uint32_t& two : reinterpret_cast<Vec16<uint32_t>*>(tile.numbers)[i].at) two = make_finite<S>(two);
  publish_writes();
  sync_threads<kThreads>(kBarrier);
}

template <Cap kCap>
constexpr bool kMayHaveSlopes = kCap != Cap::small;

// SoftCap::slope() in one instruction.
__device__ __forceinline__ float cap_slope(float y) { return fmaf(-y, y, 1); }

// --- dQ ---

template <class S, int kRows, int kDim, int kKeys, int kStages>
struct GradQueryTiles {
  PanelTile<S, kRows, kDim> query, grad_output;
  PanelTile<S, kKeys, kDim> key[kStages], value[kStages];

  __device__ __forceinline__ void init_all() {}
};
template <class S, int kDim, int kKeys, int kStages, Extra kExtra, int kConsumers = 2,
          class Tiles = GradQueryTiles<S, 64 * kConsumers, kDim, kKeys, kStages>>
using GradQueryTasks =
    RowTasks<BackwardTaskParams, S,
             std::conditional_t<kExtra == Extra::mask, WithMask<Tiles, S, kConsumers, kKeys, kStages>, Tiles>,
             kConsumers, 64 * kConsumers, kKeys, kStages, 4 * kConsumers, kGroupThreads / 2, kExtra>;

template <class S, int kDim, int kKeys, int kStages, Extra kExtra = Extra::none>
struct GradQueryWgmma : GradQueryTasks<S, kDim, kKeys, kStages, kExtra> {
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr bool kHasTerms = takes_terms(kExtra), kDrops = kExtra == Extra::dropout;
  using Tasks = GradQueryTasks<S, kDim, kKeys, kStages, kExtra>;
  using Tasks::kMasked, Tasks::kRows, Tasks::p, Tasks::shared;
  using typename Tasks::Hiding, typename Tasks::Operands, typename Tasks::Work;
  using Fragments = ScoresMma<S, kKeys / 8, false>;
  using Scores = float[kKeys / 8][4];
  using Packed = uint32_t[kKeys / 16][4];

  __device__ __forceinline__ void run(int64_t number) {
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters>(
          number,
          [&](const Work& work) {
            Tasks::start_rows(shared.query, work, Operands::kQuery, 0, p.head_dim);
            Tasks::start_rows(shared.grad_output, work, Operands::kGradOutput, 0, p.value_dim);
          },
          [&](const Work& work, Ring<kStages>& stage) {
            Tasks::template copy_keys<false>(work, stage, shared.key, shared.value);
          },
          [&](int consumer) {
            Place place;
            Tasks::consume([&](const Work& work) { attend(work, consumer, place); });
          });
  }

  struct Place {
    Ring<kStages> stage;
    Ring<1> queries;
  };
  // dS of a thread's two rows.
  struct ScoreGradients : Hiding {
    const BackwardTaskParams& p;
    float slope;
    Pair<float> shift[2];
    float delta[2];
    typename Tasks::RowOptions options;
    typename Fragments::Kept kept;  // by dropout
    float (&of_slopes)[2];          // the sums of the slopes' gradient
    Scores x, dx;                   // products of Q and K, of G and V; then weights, dS

    __device__ __forceinline__ ScoreGradients(const BackwardTaskParams& p, const Work& work, int own,
                                              float (&of_slopes)[2])
        : Hiding(work, own),
          p(p),
          slope(exponent_slope(p)),
          options(Tasks::row_options(p, work, own)),
          of_slopes(of_slopes) {
      const double per_score = exponent_per_score(p);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Row row = Tasks::row_of(work.task, own + MmaThread().group + 8 * r);
        const int64_t number = row_number(p, row.n, row.head, row.position);
        shift[r] = shift_under_mask(p, static_cast<const Pair<float>*>(p.logsumexp)[number], per_score);
        delta[r] = static_cast<const float*>(p.delta)[number];
      }
    }
    // Turns x into weights, times the derivative of the cap if there is one. each(f) calls f(fragment n, half, two
    // numbers of the mask) for all of them, if the mask is read.
    template <class Each>
    __device__ __forceinline__ void weigh(const ShownTile& shown, Each each) {
      const int tile = shown.tile;
      if constexpr (kHasTerms) {
        const Cap cap = cap_beside_slopes(p);
        const float key = static_cast<float>(tile * kKeys);
        if constexpr (kMasked)
          weigh_under_mask(shown, key, cap, each);
        else if (cap == Cap::none)
          weigh<Cap::none>(key);
        else if (cap == Cap::small)
          weigh<Cap::small>(key);
        else
          weigh<Cap::large>(key);
        if (this->hides(tile)) this->hide(x, tile, 0);
      } else {
#pragma unroll
        for (auto& four : x)
#pragma unroll
          for (int i = 0; i < 4; ++i) four[i] = exponent_of(four[i], slope, shift[i / 2]);
        if (this->hides(tile)) this->hide(x, tile);
        turn_into_weights(x);
      }
    }
    // `key`: see RowSlopes.
    template <Cap kCap>
    __device__ __forceinline__ void weigh(float key) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) weigh_two<kCap, kMayHaveSlopes<kCap>, Reads::nothing>(n, half, 0, key);
    }
    // Two neighbouring scores, of which `two` is the mask.
    template <Cap kCap, bool kSlopes, Reads kReads>
    __device__ __forceinline__ void weigh_two(int n, int half, uint32_t two, float key) {
      const auto tanh = Tanh<kCap>::of(p);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& number = x[n][2 * half + c];
        const float y = tanh(number), sum = kSlopes ? options.add(y, n, 2 * half + c, key) : y;
        const float weight =
            exp2_approx(exponent_under_mask<S, kReads, 8>(sum, slope, terms_left(p), shift[half], two, c));
        number = kCap == Cap::none ? weight : weight * cap_slope(y);
        if (kReads != Reads::nothing && kCap != Cap::none && weight == 0) number = 0;  // even if the product is NaN
      }
    }
    template <class Each>
    __device__ __forceinline__ void weigh_under_mask(const ShownTile& shown, float key, Cap cap, Each each) {
      const auto read = [&]<Cap kCap, bool kSlopes>() {
        with_mask_number(p, [&]<class M>() {
          constexpr Reads kReads = sizeof(M) == 1 ? Reads::booleans : Reads::numbers;
          each.template operator()<M>(
              [&](int n, int half, uint32_t two) { weigh_two<kCap, kSlopes, kReads>(n, half, two, key); });
        });
      };
      if (cap != Cap::none)
        read.template operator()<Cap::small, false>();
      else if (p.alibi_slopes)
        read.template operator()<Cap::none, true>();
      else if (p.mask.dtype == DType::boolean)
        weigh_all<Reads::nothing>();
      else if (shown.changes)
        each.template operator()<uint16_t>(
            [&](int n, int half, uint32_t two) { weigh_two<Cap::none, false, Reads::numbers>(n, half, two, 0); });
      else
        weigh_all<Reads::zeros>();
    }
    template <Reads kReads>
    __device__ __forceinline__ void weigh_all() {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) weigh_two<Cap::none, false, kReads>(n, half, 0, 0);
    }
    // Turns dx into dS.
    __device__ __forceinline__ void make_ds(const ShownTile& shown) {
      const int tile = shown.tile;
      const float keep_scale = static_cast<float>(p.keep_scale);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if constexpr (kDrops)
            dx[n][i] = fmaf(dx[n][i], kept[i / 2] >> (2 * n + i % 2) & 1 ? keep_scale : 0, -delta[i / 2]);
          else
            dx[n][i] -= delta[i / 2];
      turn_into_ds(dx, x, this->hides(tile) || (kMasked && shown.changes && !clears_hidden(p)));
      if constexpr (kHasTerms)
        // The number of the tile is read again, so that no distance stays in a register from weigh() on.
        if (p.grad_slopes) add_to_slopes(static_cast<float>(uniform(tile) * kKeys));
    }
    // `key`: see RowSlopes. There is no cap, because dS would have to be known in front of the cap, too.
    __device__ __forceinline__ void add_to_slopes(float key) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          of_slopes[i / 2] = fmaf(dx[n][i], Alibi<float>::by_slope(options.distance(n, i, key)), of_slopes[i / 2]);
    }
  };

  __device__ __forceinline__ void start(ScoreGradients& s, const ShownTile& shown, int consumer,
                                        const Ring<kStages>& stage) {
    if constexpr (kDrops)  // before products take registers
      Fragments::dropout_mask(
          s.kept, 0, s.options.dropout, [&](int, int half) { return s.options.rows[half]; },
          s.work.task.first_key + int64_t{shown.tile} * kKeys);
    start_dots(s.x, shared.query, 64 * consumer, shared.key[stage.stage]);
    wait(shared.values.full[stage.stage], stage.parity);
    start_dots(s.dx, shared.grad_output, 64 * consumer, shared.value[stage.stage]);
  }
  // Computes dS, beside kSums sums that are under way.
  template <int kSums>
  __device__ __forceinline__ void compute(ScoreGradients& s, const ShownTile& shown, int consumer,
                                          const Ring<kStages>& stage) {
    wait_for_products<kSums + 1>(s.x);
    make_finite<Tasks::kConsumerThreads>(s.x, shared.key[stage.stage]);
    if constexpr (kMasked)
      if (Tasks::reads_mask(shown)) Tasks::wait_for_mask();
    s.weigh(shown, [&]<class M>(auto f) {
      if constexpr (kMasked) shared.mask[consumer].template each<M>(0, f);
    });
    keep_beside_products();
    wait_for_products<kSums>(s.dx);
    arrive_once(shared.values.empty[stage.stage]);
    s.make_ds(shown);
  }

  __device__ __forceinline__ void pack(Packed& ds, const ScoreGradients& s, const ShownTile& shown, int consumer) {
    pack_all<S>(ds, s.dx);
    if constexpr (kMasked) {
      if (shown.changes && clears_hidden(p))
        shared.mask[consumer].template each<uint8_t>(0, [&](int n, int half, uint32_t two) {
          ds[n / 2][2 * (n % 2) + half] &= fill_halves(__byte_perm(two, 0, 0x4140));
        });
      __syncwarp();  // all lanes have read the mask
    }
  }

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    const int own = 16 * MmaThread().warp;  // the warp's first row
    const int tiles = uniform(work.tiles);
    float sum[kDim / 8][4] = {}, of_slopes[2] = {};
    if (tiles > 0) {
      ScoreGradients s(p, work, own, of_slopes);
      Packed ds;
      Ring<kStages>& stage = place.stage;
      ShownTile shown{-1, false};
      if constexpr (kMasked) Tasks::find_mask(work, consumer);
      wait(shared.queries.full[0], place.queries.parity);
      if (Tasks::next_tile(shown, tiles, consumer, stage)) {
        start(s, shown, consumer, stage);
        compute<0>(s, shown, consumer, stage);
        pack(ds, s, shown, consumer);
        Ring<kStages> before = stage;
        stage = stage.after();
#pragma unroll 1
        for (; Tasks::next_tile(shown, tiles, consumer, stage); stage = stage.after()) {
          start(s, shown, consumer, stage);
          start_weighted(sum, ds, shared.key[before.stage]);
          compute<1>(s, shown, consumer, stage);
          keep_beside_products();
          wait_for_products<0>(sum);
          arrive_once(shared.keys.empty[before.stage]);
          pack(ds, s, shown, consumer);
          before = stage;
        }
        start_weighted(sum, ds, shared.key[before.stage]);
        wait_for_products<0>(sum);
        arrive_once(shared.keys.empty[before.stage]);
      }
      if constexpr (kMasked) Tasks::pass_end(stage);
      arrive_once(shared.queries.empty[0]);
      place.queries = place.queries.after();
    }
    write(work, own, sum, of_slopes);
  }

  __device__ __forceinline__ void write(const Work& work, int own, const float (&sum)[kDim / 8][4],
                                        const float (&of_slopes)[2]) {
    const float scale = ScoreFunction<float>::of(p).slope();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = own + MmaThread().group + 8 * r;
      const Row row = Tasks::row_of(work.task, i);
      if constexpr (kHasTerms)
        if (p.grad_slopes)
          write_of_row(p.grad_slopes, row_number(p, row.n, row.head, row.position), of_slopes[r], i < work.task.rows);
      const Operand& to = p.grad_query;
      if (kHasTerms && !to.data) continue;
      write_gradient<S>(p, to, work.begins.of[Operands::kGradQuery] + row.head * to.head + row.position * to.row,
                        p.head_dim, sum, r, scale, i < work.task.rows);
    }
  }
};

// --- dK and dV ---

// A task of kKeys keys.
template <int kKeys>
struct KeyWork {
  Task task;  // the batch entry, the head and its keys
  int keys;
  Dropout dropout;   // if there is dropout
  int64_t rows;      // of the heads that read these keys
  Range rows_seen;   // positions
  double per_score;  // see exponent_per_score()
  Begins<BackwardTaskParams> begins;

  __device__ __forceinline__ void set(const BackwardTaskParams& p, int64_t number) {
    if (p.turns) {  // in one pass the last keys come first
      const int64_t tasks = tiles_of_keys(p, kKeys);
      const auto [list, task_of_list] = divide(number, tasks);
      number = list * tasks + tasks - 1 - task_of_list;
    }
    task.key_head = task.set_own_keys(p, number, p.key_heads, kKeys);
    keys = static_cast<int>(larger(0, task.last_key - task.first_key));
    rows = task.rows_of_group(p);
    per_score = exponent_per_score(p);
    if (p.has_dropout) dropout.set(p, task.n);
    rows_seen = keys > 0 ? visible_rows(task.sequence, {task.first_key, task.last_key}) : Range{};
  }
};

// A tile of rows that see some of the keys of a task.
template <int kRows, Extra kExtra>
struct SeeingRows {
  alignas(16) Pair<float> shift[kRows];
  alignas(8) float delta[kRows];
  TileRange seen[kRows];                                 // of the task's keys; none for a row that is not there
  BackwardSlope alibi[takes_terms(kExtra) ? kRows : 1];  // see RowSlopes
  DropoutRow dropout[kExtra == Extra::dropout ? kRows : 1];
  bool is_over;  // the task has no more tiles, and nothing else is set
  bool hides;    // some row does not see some key, whatever the mask says
  bool changes;  // if there is a mask, see ShownTile
};

struct alignas(16) TwoShifts {
  Pair<float> of[2];
};

// The parts of the producer: rows, the gradient of their output and, in one pass, a warp that adds to dQ.
template <bool kOnePass>
constexpr int kGradKeyParts = kOnePass ? 4 : 2;

// What one pass needs beside: dS of a tile for the products of all consumers, and what these give.
template <class S, int kKeys, int kDim, int kRows, int kReaders>
struct QuerySums {
  static constexpr int kConsumers = kKeys / 64, kCols = kDim / kConsumers;  // the columns of dQ of a consumer

  PanelTile<S, kKeys, kDim> finite_key;                   // with 0 in place of infinities and NaNs
  PanelTile<S, kKeys, kRows> ds;                          // a row for each key
  alignas(128) float of_tile[kConsumers][kRows * kCols];  // four numbers of each thread for each fragment
  RingBarriers<1, kGroupThreads * kConsumers, kReaders> slopes;
  RingBarriers<1, kGroupThreads, 1> sums[kConsumers];

  __device__ __forceinline__ void init_all() {
    slopes.init_all();
    for (auto& of_consumer : sums) of_consumer.init_all();
  }
};

template <class S, int kKeys, int kDim, int kRows, int kStages, int kReaders, Extra kExtra, bool kOnePass>
struct GradKeyTiles {
  using Mask = MaskTile<S, kRows, 64, true, true>;  // of a consumer
  PanelTile<S, kKeys, kDim> key, value;
  PanelTile<S, kRows, kDim> query[kStages], grad_output[kStages];
  std::conditional_t<kExtra == Extra::mask, Mask, Nothing> mask[kStages][kKeys / 64];
  std::conditional_t<kOnePass, QuerySums<S, kKeys, kDim, kRows, kReaders>, Nothing> query_sums;
  SeeingRows<kRows, kExtra> rows[kStages];
  RingBarriers<1, kGroupThreads, kReaders> keys;
  RingBarriers<kStages, kGroupThreads / kGradKeyParts<kOnePass>, kReaders> queries, grad_outputs;

  __device__ __forceinline__ void init_all() {
    keys.init_all();
    queries.init_all();
    grad_outputs.init_all();
    if constexpr (kOnePass) query_sums.init_all();
  }
};
template <class S, int kDim, int kRows, int kStages, Extra kExtra, bool kOnePass, int kConsumers = 2>
using GradKeyTasks =
    TasksWgmma<BackwardTaskParams, KeyWork<64 * kConsumers>,
               GradKeyTiles<S, 64 * kConsumers, kDim, kRows, kStages, 4 * kConsumers, kExtra, kOnePass>, kConsumers,
               kGradKeyParts<kOnePass>>;

// kRows: of a tile. kOnePass: whether the block also adds its share to dQ (see one_pass.cuh).
template <class S, int kDim, int kRows, int kStages, Extra kExtra = Extra::none, bool kOnePass = false>
struct GradKeyWgmma : GradKeyTasks<S, kDim, kRows, kStages, kExtra, kOnePass> {
  static constexpr int kProducerRegisters = kDim <= 64 ? 56 : 40, kConsumerRegisters = kDim <= 64 ? 224 : 232;
  static constexpr bool kHasTerms = takes_terms(kExtra), kMasked = kExtra == Extra::mask,
                        kDrops = kExtra == Extra::dropout;
  using Rows = SeeingRows<kRows, kExtra>;
  using Tasks = GradKeyTasks<S, kDim, kRows, kStages, kExtra, kOnePass>;
  using Tasks::kConsumerThreads, Tasks::kCopying, Tasks::p, Tasks::shared;
  static constexpr int kKeys = kConsumerThreads / 2;  // a warpgroup owns 64
  static constexpr int kConsumers = kConsumerThreads / kGroupThreads, kQueryCols = kDim / kConsumers;
  using Work = KeyWork<kKeys>;
  using Operands = TaskOperands<BackwardTaskParams>;
  using Fragments = ScoresMma<S, kRows / 8, true>;
  using Scores = float[kRows / 8][4];
  using Sum = float[kDim / 8][4];
  using Packed = uint32_t[kRows / 16][4];
  struct Place {
    Ring<kStages> stage;
    Ring<1> keys, query_sums;
  };

  ATTN_INLINE static constexpr int64_t blocks(const BackwardTaskParams& p) {
    return blocks_of_keys(p, p.key_heads, kKeys);
  }

  __device__ __forceinline__ void run(int64_t number) {
    Place place;
    if constexpr (!kHasSm90)
      trap();
    else
      Tasks::template run<kProducerRegisters, kConsumerRegisters, kOnePass>(
          number, blocks(p), [&](const Work& work) { copy(work, place); },
          [&](int consumer) { Tasks::consume([&](const Work& work) { attend(work, consumer, place); }); });
  }

  // --- the producer ---

  __device__ __forceinline__ void copy(const Work& work, Place& place) {
    if (work.keys == 0 || work.rows_seen.empty()) return;
    wait(shared.keys.empty[0], place.keys.parity ^ 1);
    start_own(shared.key, work, p.key, Operands::kKey, p.head_dim);
    start_own(shared.value, work, p.value, Operands::kValue, p.value_dim);
    commit_copies();
    place.keys = place.keys.after();
    if (Tasks::part() == 0) {
      copy_rows(work, place.stage, p.query, Operands::kQuery, p.head_dim, shared.query, shared.queries,
                [&](int stage, const Row& first, int count, bool changes) {
                  set_rows(shared.rows[stage], work, first, count, changes);
                  if constexpr (kMasked)
                    if (changes) start_mask(stage, work, first, count);
                });
    } else if (Tasks::part() == 1) {
      copy_rows(work, place.stage, p.grad_output, Operands::kGradOutput, p.value_dim, shared.grad_output,
                shared.grad_outputs, [](int, const Row&, int, bool) {});
    } else {
      Filling{&shared.keys.full[0]}.finish();
      if constexpr (kOnePass)
        if (Tasks::part() == 2) add_to_queries(work, place.query_sums);
    }
  }
  // Adds what the consumers have computed of each tile's dQ, when it is the turn of these keys.
  __device__ __forceinline__ void add_to_queries(const Work& work, Ring<1>& at) {
    const Task& task = work.task;
    const int64_t list = (task.n * p.key_heads + task.key_head) * divide_up(p.rows(), kRows);
    const bool is_first_lane = thread_index() % 32 == 0;
#pragma unroll 1
    for (int64_t first = first_seeing(work, 0); first < work.rows; first = first_seeing(work, first + kRows)) {
      const int64_t tile = list + first / kRows, count = smaller(kRows, work.rows - first);
      const Range seen = visible_keys(task.sequence, positions_of_rows(task.sequence, row_at(work, first), count));
      const int turn = static_cast<int>((seen.last - 1) / kKeys - task.first_key / kKeys);  // the last keys have turn 0
      if (is_first_lane) wait_for_turn(&p.turns[tile], turn);
      __syncwarp();
      float* to = static_cast<float*>(p.grad_query_sum.data) + tile * kRows * kDim;
#pragma unroll 1
      for (int consumer = 0; consumer < kConsumers; ++consumer, to += kRows * kQueryCols) {
        auto& [full, empty] = shared.query_sums.sums[consumer];
        wait(full[0], at.parity);
        if (is_first_lane) {
          const SharedAddress from = shared_address(shared.query_sums.of_tile[consumer]);
          constexpr uint32_t kBytes = kRows * kQueryCols * sizeof(float);
          if (turn == 0)
            store_bulk(to, from, kBytes);
          else
            add_bulk(to, from, kBytes);
          commit_bulk();
          wait_for_bulk_reads();
        }
        __syncwarp();
        arrive_once(empty[0]);
      }
      if (is_first_lane) {
        wait_for_bulk();
        store_release(&p.turns[tile], turn + 1);
      }
      at = at.after();
    }
  }
  __device__ __forceinline__ void start_own(PanelTile<S, kKeys, kDim>& tile, const Work& work, const Operand& x,
                                            int name, int64_t cols) {
    const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
    PanelCopy<S, kKeys, kDim, kGroupThreads>{static_cast<int>(thread_index()) % kGroupThreads}.start(
        tile, data + work.task.key_head * x.head + work.task.first_key * x.row, x.row, work.keys, cols);
  }
  // The producer has few registers. So it finds rows by their numbers, and reads again what is in shared memory.
  __device__ __forceinline__ Row row_at(const Work& work, int64_t number) const {
    return row_after(work.task.sequence.queries, Row{work.task.n, work.task.key_head * p.group, 0}, number);
  }
  // The first tile of rows from row `number` on, of which some see a key if no mask hides it.
  __device__ __forceinline__ int64_t first_seeing(const Work& work, int64_t number) const {
    return number + rows_until(work.rows_seen, row_at(work, number).position, work.task.sequence.queries,
                               work.rows - number, kRows);
  }
  // Returns the first row of the next tile, `first` being that of the tile before. With a mask, leaves out tiles in
  // which it hides all keys, and sets `changes` to whether consumers read the mask. `begin`: the window's first row.
  __device__ __forceinline__ int64_t next_shown(const Work& work, int64_t first, MaskWindow<kKeys>& window,
                                                int64_t& begin, bool& changes) const {
    if constexpr (kMasked) {
      Range part;
#pragma unroll 1
      for (;;) {
        if (const int tile = window.take(part, changes); tile >= 0) {
          changes |= has_terms(p);
          return begin + tile * kRows;
        }
        begin = first_seeing(work, begin + 32 * kRows);
        if (begin >= work.rows) return begin;
        const int64_t own = begin + thread_index() % 32 * kRows;
        const bool sees = own < work.rows && first_seeing(work, own) == own;
        window.set(sees ? effect_of_mask<kKeys>(p, work.task.n, row_at(work, own),
                                                row_at(work, smaller(own + kRows, work.rows) - 1),
                                                work.task.sequence.queries, work.task.first_key, work.task.last_key)
                        : 0);
      }
    } else {
      return first_seeing(work, first + kRows);
    }
  }
  // Fills one of the two rings with the rows that see some key, tile by tile, and says at the end that they are over.
  // set(stage, first, count, changes) sets the other numbers of `count` rows from row `first` on; count is 0 at the
  // end.
  template <class Barriers, class Set>
  __device__ __forceinline__ void copy_rows(const Work& work, Ring<kStages>& stage, const Operand& x, int name,
                                            int64_t cols, PanelTile<S, kRows, kDim> (&tiles)[kStages],
                                            Barriers& barriers, Set set) {
    const PanelCopy<S, kRows, kDim, kCopying> c{static_cast<int>(thread_index()) % kCopying};
    bool changes = false;
    MaskWindow<kKeys> window;
    int64_t begin = -32 * kRows;
    const auto next = [&](int64_t first) { return next_shown(work, first, window, begin, changes); };
    Filling filling{&shared.keys.full[0]};
#pragma unroll 1
    for (int64_t first = next(-kRows); first < work.rows; first = next(first))
      filling.fill(barriers, stage, [&](int i) {
        const int count = static_cast<int>(smaller(kRows, work.rows - first));
        const S* const data = static_cast<const S*>(x.data) + work.begins.of[name];
        c.start_scattered(tiles[i], data, count, cols, [&](int j) {
          const Row row = row_at(work, first + j);
          return row.head * x.head + row.position * x.row;
        });
        set(i, row_at(work, first), count, changes);
      });
    filling.fill(barriers, stage, [&](int i) { set(i, Row{}, 0, false); });
    filling.finish();
  }
  // Starts to copy the mask of `count` rows from row `first` on, and of the task's keys.
  __device__ __forceinline__ void start_mask(int stage, const Work& work, const Row& first, int count) {
    const auto row_at = [&](int i) {
      const Row row = row_after(work.task.sequence.queries, first, RowTile<kRows>::last_repeated(i, count));
      return batch_offset(p, p.mask, row.n) + row.head * p.mask.head + row.position * p.mask.row;
    };
    with_mask_number(p, [&]<class M>() {
      Tasks::Shared::Mask::template copy_row_by_row<M, kCopying>(shared.mask[stage], p, row_at, work.task.first_key);
    });
  }
  __device__ __forceinline__ void set_rows(Rows& to, const Work& work, const Row& first, int count, bool changes) {
    const Task& task = work.task;
    const int thread = thread_index() % kCopying;
    // One pass multiplies dS of all keys by K, so keys that are not there are hidden, too.
    const int64_t last_key = kOnePass ? task.first_key + kKeys : task.last_key;
    if (thread == 0) {
      to.is_over = count == 0;
      to.changes = changes;
      to.hides = count < kRows || !all_visible(task.sequence, positions_of_rows(task.sequence, first, count),
                                               {task.first_key, last_key});
    }
    if (count == 0) return;
    const int64_t queries = task.sequence.queries;
    for (int i = thread; i < kRows; i += kCopying) {
      const Row row = row_after(queries, first, RowTile<kRows>::last_repeated(i, count));
      const int64_t number = row_number(p, task.n, row.head, row.position);
      to.shift[i] = shift_under_mask(p, static_cast<const Pair<float>*>(p.logsumexp)[number], work.per_score);
      to.delta[i] = static_cast<const float*>(p.delta)[number];
      const Range seen = visible_keys(task.sequence, {row.position, row.position + 1});
      to.seen[i] = TileRange(i < count ? seen : Range{0, 0}, task.first_key);
      if constexpr (kDrops) to.dropout[i] = work.dropout.row(p, task.n, row.head, row.position);
      if constexpr (kHasTerms) {
        const float slope = p.alibi_slopes ? static_cast<const float*>(p.alibi_slopes)[head_number(p, row)] : 0;
        to.alibi[i] = {slope / terms_left(p), static_cast<float>(row.position + task.sequence.offset - task.first_key)};
      }
    }
  }

  // --- the consumers ---

  __device__ __forceinline__ void attend(const Work& work, int consumer, Place& place) {
    if (uniform(work.keys) == 0) return;
    Sum of_ds = {}, of_weights = {};
    if (uniform(!work.rows_seen.empty())) {
      wait(shared.keys.full[0], place.keys.parity);
      if constexpr (kOnePass) copy_finite_keys();
      Ring<kStages>& stage = place.stage;
#pragma unroll 1
      for (;; stage = stage.after()) {
        wait(shared.queries.full[stage.stage], stage.parity);
        if (uniform(shared.rows[stage.stage].is_over)) break;
        add_tile(work, of_ds, of_weights, consumer, stage, place.query_sums);
        if constexpr (kOnePass) place.query_sums = place.query_sums.after();
      }
      wait(shared.grad_outputs.full[stage.stage], stage.parity);
      __syncwarp();  // all lanes have read that it is over
      arrive_once(shared.queries.empty[stage.stage]);
      arrive_once(shared.grad_outputs.empty[stage.stage]);
      arrive_once(shared.keys.empty[0]);
      stage = stage.after();
      place.keys = place.keys.after();
    }
    write(work, p.grad_key, Operands::kGradKey, p.head_dim, of_ds, ScoreFunction<float>::of(p).slope());
    write(work, p.grad_value, Operands::kGradValue, p.value_dim, of_weights, static_cast<float>(p.keep_scale));
  }

  // dQ reads K with 0 in place of infinities and NaNs, which reach dQ only through dS; scores need them.
  __device__ __forceinline__ void copy_finite_keys() {
    constexpr int kBarrier = 1;
    const auto* const from = reinterpret_cast<const Vec16<uint32_t>*>(shared.key.numbers);
    auto* const to = reinterpret_cast<Vec16<uint32_t>*>(shared.query_sums.finite_key.numbers);
    sync_threads<kConsumerThreads>(kBarrier);  // no products read those of the task before
#pragma unroll 1
    for (int i = thread_index(); i < kKeys * kDim / kVector; i += kConsumerThreads) {
      Vec16<uint32_t> vector = from[i];
#pragma unroll
      for (uint32_t& two : vector.at) two = make_finite<S>(two);
      to[i] = vector;
    }
    publish_writes();
    sync_threads<kConsumerThreads>(kBarrier);
  }
  // Starts a consumer's columns of dS K, for all rows of the tile. dS is stored for it as [keys, rows].
  using QuerySum = float[kQueryCols / 8][4];
  __device__ __forceinline__ void start_query_sum(QuerySum& sum, const Packed& ds, int consumer, const Ring<1>& at) {
    static_assert(kRows == 64);
    auto& tiles = shared.query_sums;
    const MmaThread thread;
    const int key = 16 * thread.warp + thread.lane % 16;
    const SharedAddress row = shared_address(tiles.ds.numbers) + key * 128;
    wait(tiles.slopes.empty[0], at.parity ^ 1);
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) store_matrices(row + ((2 * k + thread.lane / 16) ^ key % 8) * 16, ds[k]);
    publish_writes();
    arrive(tiles.slopes.full[0]);
    wait(tiles.slopes.full[0], at.parity);
    const Matrix a = tiles.ds.matrix();
    const Matrix b = from_column<kKeys>(tiles.finite_key.matrix(), kQueryCols * consumer);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      multiply_group<S, true, true>(sum, from_row(a, 16 * k), from_row(b, 16 * k), k > 0);
    commit_products();
  }
  __device__ __forceinline__ void pass_on(const QuerySum& sum, int consumer, const Ring<1>& at) {
    auto& tiles = shared.query_sums;
    auto* const to = reinterpret_cast<Vec16<float>*>(tiles.of_tile[consumer]) + thread_index() % kGroupThreads;
    wait(tiles.sums[consumer].empty[0], at.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kQueryCols / 8; ++n) to[n * kGroupThreads] = {{sum[n][0], sum[n][1], sum[n][2], sum[n][3]}};
    publish_writes();
    arrive(tiles.sums[consumer].full[0]);
  }

  __device__ __forceinline__ void add_tile(const Work& work, Sum& of_ds, Sum& of_weights, int consumer,
                                           const Ring<kStages>& stage, const Ring<1>& of_queries) {
    const Rows& rows = shared.rows[stage.stage];
    auto &query = shared.query[stage.stage], &grad_output = shared.grad_output[stage.stage];
    Scores x, dx;
    Packed weights, ds;
    [[maybe_unused]] Packed shown;  // see clears_hidden()
    const MmaThread thread;
    typename Fragments::Kept kept = {};  // by dropout
    if constexpr (kDrops)                // before products take registers
      Fragments::template dropout_mask<kRows / 8>(
          kept, 16 * thread.warp, work.dropout, [&](int i, int) { return rows.dropout[i]; }, work.task.first_key);
    const auto keeps = [&](int n, int i) { return kept[i / 2] >> (2 * n + i % 2) & 1; };
    start_dots(x, shared.key, 64 * consumer, query);
    wait(shared.grad_outputs.full[stage.stage], stage.parity);
    start_dots(dx, shared.value, 64 * consumer, grad_output);
    wait_for_products<1>(x);
    make_finite<Tasks::kConsumerThreads>(x, query);
    const bool hides = uniform(rows.hides), changes = kMasked && uniform(rows.changes) != 0;
    if constexpr (kHasTerms) {
      [[maybe_unused]] const Cap cap = cap_beside_slopes(p);
      if constexpr (kMasked)
        weigh_under_mask(x, weights, shown, rows, hides, changes, shared.mask[stage.stage][consumer]);
      else if (cap == Cap::none)
        weigh<Cap::none>(x, weights, rows, hides);
      else if (cap == Cap::small)
        weigh<Cap::small>(x, weights, rows, hides);
      else
        weigh<Cap::large>(x, weights, rows, hides);
    } else {
      weigh(x, rows, hides);
      if constexpr (kDrops)
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            weights[n / 2][2 * (n % 2) + half] =
                pack<S>(keeps(n, 2 * half) ? x[n][2 * half] : 0, keeps(n, 2 * half + 1) ? x[n][2 * half + 1] : 0);
      else
        pack_all<S>(weights, x);
    }
    keep_beside_products();
    wait_for_products<0>(dx);
    start_weighted(of_weights, weights, grad_output);
    const float keep_scale = static_cast<float>(p.keep_scale);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float delta[2] = {rows.delta[thread.col(n)], rows.delta[thread.col(n) + 1]};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if constexpr (kDrops)
          dx[n][i] = fmaf(dx[n][i], keeps(n, i) ? keep_scale : 0, -delta[i % 2]);
        else
          dx[n][i] -= delta[i % 2];
    }
    const bool clears = kMasked && changes && clears_hidden(p);
    turn_into_ds(dx, x, hides || (changes && !clears));
    pack_all<S>(ds, dx);
    if (clears) clear_hidden(ds, shown);
    [[maybe_unused]] QuerySum of_query;
    if constexpr (kOnePass) start_query_sum(of_query, ds, consumer, of_queries);
    start_weighted(of_ds, ds, query);
    wait_for_products<1>(of_weights);
    arrive_once(shared.grad_outputs.empty[stage.stage]);
    if constexpr (kOnePass) {
      wait_for_products<1>(of_query);
      arrive_once(shared.query_sums.slopes.empty[0]);
      pass_on(of_query, consumer, of_queries);
    }
    wait_for_products<0>(of_ds);
    __syncwarp();  // all lanes have read the numbers of the rows
    arrive_once(shared.queries.empty[stage.stage]);
  }

  static __device__ __forceinline__ TwoShifts shifts_of(const Rows& rows, int i) {
    return *reinterpret_cast<const TwoShifts*>(&rows.shift[i]);
  }
  // The thread's key with the number `half` of its two, in the task.
  static __device__ __forceinline__ int key_of(const MmaThread& thread, int half) {
    return 16 * thread.warp + thread.group + 8 * half;
  }
  // Sets numbers of keys that a row does not see to `hidden`, whatever a mask says.
  __device__ __forceinline__ void hide(Scores& x, const Rows& rows, float hidden) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const TileRange seen = rows.seen[thread.col(n) + c];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (!seen.contains(key_of(thread, half))) x[n][2 * half + c] = hidden;
      }
  }
  // Turns products into weights.
  __device__ __forceinline__ void weigh(Scores& x, const Rows& rows, bool hides) {
    const MmaThread thread;
    const float slope = exponent_slope(p);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const TwoShifts shift = shifts_of(rows, thread.col(n));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = exponent_of(x[n][i], slope, shift.of[i % 2]);
    }
    if (hides) hide(x, rows, -infinity<float>());
    turn_into_weights(x);
  }
  // The same with a cap or ALiBi. Also packs the weights, and multiplies them by the derivative of the cap.
  template <Cap kCap>
  __device__ __forceinline__ void weigh(Scores& x, Packed& weights, const Rows& rows, bool hides) {
    if (hides)
      weigh_all<kCap, kMayHaveSlopes<kCap>, true, Reads::nothing>(x, weights, rows);
    else
      weigh_all<kCap, kMayHaveSlopes<kCap>, false, Reads::nothing>(x, weights, rows);
  }
  template <Cap kCap, bool kSlopes, bool kHides, Reads kReads>
  __device__ __forceinline__ void weigh_all(Scores& x, Packed& weights, const Rows& rows) {
    const MmaThread thread;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        weigh_two<kCap, kSlopes, kHides, kReads>(x, weights, rows, thread, n, half, 0);
  }
  // Two scores of neighbouring rows, of which `two` is the mask.
  template <Cap kCap, bool kSlopes, bool kHides, Reads kReads>
  __device__ __forceinline__ void weigh_two(Scores& x, Packed& weights, const Rows& rows, const MmaThread& thread,
                                            int n, int half, uint32_t two) {
    constexpr bool kMayHide = kHides || kReads == Reads::booleans || kReads == Reads::numbers;
    const auto tanh = Tanh<kCap>::of(p);
    const float slope = exponent_slope(p);
    const TwoShifts shift = shifts_of(rows, thread.col(n));
    const BackwardSlope* const alibi = &rows.alibi[thread.col(n)];
    const TileRange* const seen = &rows.seen[thread.col(n)];
    const int key = key_of(thread, half);
    float of_row[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& number = x[n][2 * half + c];
      const float y = tanh(number), distance = fabsf(alibi[c].ahead - static_cast<float>(key));
      const float sum = kSlopes ? fmaf(alibi[c].slope, Alibi<float>::by_slope(distance), y) : y;
      const float weight =
          exp2_approx(exponent_under_mask<S, kReads, 16>(sum, slope, terms_left(p), shift.of[c], two, c));
      of_row[c] = kHides && !seen[c].contains(key) ? 0 : weight;
      number = kCap == Cap::none ? of_row[c] : of_row[c] * cap_slope(y);
      if (kMayHide && kCap != Cap::none && of_row[c] == 0) number = 0;  // even if the hidden product is NaN
    }
    weights[n / 2][2 * (n % 2) + half] = pack<S>(of_row[0], of_row[1]);
  }
  // As weigh(), with a mask, of which the tile is read if `changes`. Sets `shown` if clears_hidden().
  template <class Mask>
  __device__ __forceinline__ void weigh_under_mask(Scores& x, Packed& weights, Packed& shown, const Rows& rows,
                                                   bool hides, bool changes, Mask& mask) {
    const MmaThread thread;
    const auto read = [&]<Cap kCap, bool kSlopes, bool kHides>() {
      with_mask_number(p, [&]<class M>() {
        constexpr Reads kReads = sizeof(M) == 1 ? Reads::booleans : Reads::numbers;
        mask.template each_transposed<M>([&](int n, int half, uint32_t two) {
          weigh_two<kCap, kSlopes, kHides, kReads>(x, weights, rows, thread, n, half, two);
        });
      });
    };
    if (p.softcap > 0) return read.template operator()<Cap::small, false, true>();
    if (p.alibi_slopes)
      read.template operator()<Cap::none, true, false>();
    else if (p.mask.dtype == DType::boolean)
      weigh_all<Cap::none, false, false, Reads::nothing>(x, weights, rows);
    else if (changes)
      mask.template each_transposed<uint16_t>([&](int n, int half, uint32_t two) {
        weigh_two<Cap::none, false, false, Reads::numbers>(x, weights, rows, thread, n, half, two);
      });
    else
      weigh_all<Cap::none, false, false, Reads::zeros>(x, weights, rows);
    if (hides) {
      hide(x, rows, 0);
      pack_all<S>(weights, x);
    }
    if (!changes || !clears_hidden(p)) return;
    mask.template each_transposed<uint8_t>(
        [&](int n, int half, uint32_t two) { shown[n / 2][2 * (n % 2) + half] = fill_halves(two); });
    clear_hidden(weights, shown);
  }
  static __device__ __forceinline__ void clear_hidden(Packed& x, const Packed& shown) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k][i] &= shown[k][i];
  }

  __device__ __forceinline__ void write(const Work& work, const Operand& to, int name, int64_t cols, const Sum& sum,
                                        float scale) {
    if (!to.data) return;
    const int64_t base = work.begins.of[name] + work.task.key_head * to.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * MmaThread().warp + MmaThread().group + 8 * half;
      write_gradient<S>(p, to, base + (work.task.first_key + i) * to.row, cols, sum, half, scale, i < work.keys);
    }
  }
};

template <class S, int kDim>
Error launch_backward_wgmma(const BackwardParams& params, int* counter, const Gpu& gpu) {
  BackwardTaskParams p{params, {}};
  const auto launch = [&]<class Kernel>(const TaskOrder& order) -> Error {
    p.order = order;
    p.counters = order.at_once > 0 && Kernel::blocks(p) > gpu.multiprocessors ? counter : nullptr;
    if (Error error = clear_counters(p.counters, 1, gpu.stream)) return error;
    return launch_persistent<Kernel>(p, gpu);
  };
  const auto run = [&]<Extra kExtra>() -> Error {
    constexpr int kStages = kDim <= 64 ? 4 : 2;
    using OfQuery = GradQueryWgmma<S, kDim, backward_wgmma_keys(kDim, kExtra), kStages, kExtra>;
    using OfKeys = GradKeyWgmma<S, kDim, backward_wgmma_rows(kDim, kExtra), kStages, kExtra>;
    if (p.grad_query.data || p.grad_slopes)
      if (Error error = launch.template operator()<OfQuery>(order_of_rows(p, OfQuery::kRows))) return error;
    if (!p.grad_key.data && !p.grad_value.data) return nullptr;
    return launch.template operator()<OfKeys>(order_of_keys(p, p.key_heads, OfKeys::kKeys));
  };
  if (p.has_mask) {
    if (Error error = launch_blocks<LookAtMask<S>>(static_cast<const Problem&>(p), gpu.stream)) return error;
    return run.template operator()<Extra::mask>();
  }
  if (p.has_dropout) return run.template operator()<Extra::dropout>();
  return has_score_terms(p) ? run.template operator()<Extra::terms>() : run.template operator()<Extra::none>();
}

}  // namespace attn::cuda
