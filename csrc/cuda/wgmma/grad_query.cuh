// Sums dQ over keys. A block owns rows.
#pragma once

#include "cuda/wgmma/gradients.cuh"

namespace attn::cuda {

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
      if (cap != Cap::none)  // with a mask, larger caps run on mma/
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

}  // namespace attn::cuda
