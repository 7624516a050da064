// What kernels on Hopper's tensor cores share: tiles in panels, their products, the copies of a producer, stages.
#pragma once

#include "cuda/mma/mma.cuh"
#include "cuda/shared/ptx_sm90.cuh"

namespace attn::cuda {

constexpr int kGroupThreads = 128;  // of a warpgroup

// A tile [kRows, kCols] in shared memory, in panels of 64 columns as products read them (ptx_sm90.cuh).
template <class S, int kRows, int kCols>
struct PanelTile {
  static constexpr int kPanelBytes = kRows * 128, kVectors = kCols / kVector;  // vectors of a row

  alignas(1024) S numbers[kRows * kCols];

  __device__ __forceinline__ Matrix matrix() const { return matrix_at(shared_address(numbers), kPanelBytes); }
};

// Starts x = A B^T, where A are 64 rows of `own`, from row `first` on, and B are all rows of `other`.
template <class S, int kOwn, int kOthers, int kDim>
__device__ __forceinline__ void start_dots(float (&x)[kOthers / 8][4], const PanelTile<S, kOwn, kDim>& own, int first,
                                           const PanelTile<S, kOthers, kDim>& other) {
  const Matrix a = from_row(own.matrix(), first), b = other.matrix();
  begin_products();
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k)
    multiply_group<S, false, false>(x, from_column<kOwn>(a, 16 * k), from_column<kOthers>(b, 16 * k), k > 0);
  commit_products();
}
// Starts sum += X B, where pack_all() has packed X, and B are all rows of `other`.
template <class S, int kOthers, int kDim>
__device__ __forceinline__ void start_weighted(float (&sum)[kDim / 8][4], const uint32_t (&x)[kOthers / 16][4],
                                               const PanelTile<S, kOthers, kDim>& other) {
  const Matrix b = other.matrix();
  begin_products();
#pragma unroll
  for (int k = 0; k < kOthers / 16; ++k) multiply_group<S, true>(sum, x[k], from_row(b, 16 * k), true);
  commit_products();
}
// Two fragments C [16 x 8] together have the layout of an A [16 x 16].
template <class S, int kFragments>
__device__ __forceinline__ void pack_all(uint32_t (&to)[kFragments / 2][4], const float (&x)[kFragments][4]) {
#pragma unroll
  for (int k = 0; k < kFragments / 2; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&two)[4] = x[2 * k + i / 2];
      to[k][i] = pack<S>(two[2 * (i % 2)], two[2 * (i % 2) + 1]);
    }
}

// Copies rows to a tile, with kThreads threads, of which this one is `thread`. Each thread copies one vector of every
// kRowsAtOnce-th row.
template <class S, int kRows, int kCols, int kThreads>
struct PanelCopy {
  using Tile = PanelTile<S, kRows, kCols>;
  static constexpr int kVectors = Tile::kVectors, kRowsAtOnce = kThreads / kVectors, kSteps = kRows / kRowsAtOnce;
  static_assert(kThreads % kVectors == 0 && kRows % kRowsAtOnce == 0 && kVectors <= 32);
  // Rows whose distance is a multiple of 8 are permuted in the same way, so every kPeriod-th address is a constant
  // away.
  static constexpr int kPeriod = kRowsAtOnce % 8 == 0 ? 1 : 8 / kRowsAtOnce;
  static constexpr int kFew = 4;  // steps
  static_assert(kSteps % kFew == 0 && kFew % kPeriod == 0 && kVectors % kFew == 0);

  int thread;

  __device__ __forceinline__ int row() const { return thread / kVectors; }  // of the first copy
  __device__ __forceinline__ int col() const { return thread % kVectors * kVector; }
  // Calls copy(address in shared memory, row, step) for each of the thread's vectors, kAtOnce steps side by side.
  template <int kAtOnce = kSteps, class F>
  __device__ __forceinline__ void each(Tile& tile, F copy) const {
    const int vector = thread % kVectors;
    const SharedAddress panel = shared_address(tile.numbers) + vector / 8 * Tile::kPanelBytes + row() * 128;
    SharedAddress to[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) to[i] = panel + (vector % 8 ^ (row() + i * kRowsAtOnce) % 8) * 16;
#pragma unroll 1
    for (int first = 0; first < kSteps; first += kAtOnce)
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i)
        copy(to[(i - first) % kPeriod] + i * kRowsAtOnce * 128, row() + i * kRowsAtOnce, i);
  }

  // Starts to fill the tile with `rows` rows of `cols` numbers that lie `stride` numbers apart, and with zeros
  // elsewhere, also instead of the first `hidden` rows.
  __device__ __forceinline__ void start(Tile& tile, const S* data, int64_t stride, int rows, int64_t cols,
                                        int hidden = 0) const {
    const char* from = reinterpret_cast<const char*>(data + row() * stride + col());
    const int64_t step = kRowsAtOnce * stride * static_cast<int64_t>(sizeof(S));
    if (rows >= kRows && hidden == 0 && col() < cols) {  // nothing is compared
      each(tile, [&](SharedAddress to, int, int) {
        copy_async(to, from);
        from += step;
      });
    } else {
      if (col() >= cols) rows = 0;
      each(tile, [&](SharedAddress to, int i, int) {
        copy_async(to, from, hidden <= i && i < rows);
        from += step;
      });
    }
  }
  // The same for rows that are anywhere: row i begins offset(i) numbers behind `data`. Each lane of a warp finds out
  // where some of the warp's rows are, and shuffles tell the other lanes. Called by whole warps.
  template <class Offset>
  __device__ __forceinline__ void start_scattered(Tile& tile, const S* data, int rows, int64_t cols,
                                                  Offset offset) const {
    constexpr int kOfWarp = 32 / kVectors;  // rows of a step
    const int lane = thread % 32, left = col() < cols ? rows : 0;
    int64_t known = 0;  // of this step and the next ones, kVectors in all
    each<kFew>(tile, [&](SharedAddress to, int i, int step) {
      if (step % kVectors == 0) {
        const int mine = thread / 32 * kOfWarp + lane % kOfWarp + (step + lane / kOfWarp) * kRowsAtOnce;
        known = mine < rows ? offset(mine) : 0;
      }
      const int64_t at = __shfl_sync(~0u, known, step % kVectors * kOfWarp + lane / kVectors);
      copy_async(to, data + at + col(), i < left);
    });
  }
};

// The place of a role in a ring of kStages tiles.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring after() const {
    return stage + 1 == kStages ? Ring{0, parity ^ 1} : Ring{stage + 1, parity};
  }
};

// Barriers of a ring: a stage is `full` when kProducers threads have filled it, and `empty` when kReaders warps have
// read it.
template <int kStages, int kProducers, int kReaders>
struct RingBarriers {
  Barrier full[kStages], empty[kStages];

  __device__ __forceinline__ void init_all() {
    for (Barrier& b : full) init(b, kProducers);
    for (Barrier& b : empty) init(b, kReaders);
  }
};

// Copies of a thread of the producer. Those to one tile are under way while the thread waits for the next tile to be
// empty.
struct Filling {
  Barrier* pending;  // of the copies that are under way

  // Fills a stage of a ring: start(stage) starts the copies.
  template <class Barriers, int kStages, class Start>
  __device__ __forceinline__ void fill(Barriers& barriers, Ring<kStages>& stage, Start start) {
    if (pending && !has_ended(barriers.empty[stage.stage], stage.parity ^ 1)) finish();
    wait(barriers.empty[stage.stage], stage.parity ^ 1);
    start(stage.stage);
    commit_copies();
    if (pending) {
      wait_for_copies<1>();
      publish_writes();
      arrive(*pending);
    }
    pending = &barriers.full[stage.stage];
    stage = stage.after();
  }
  // Some copies are under way.
  __device__ __forceinline__ void finish() {
    wait_for_copies<0>();
    publish_writes();
    arrive(*pending);
    pending = nullptr;
  }
};

// The number that all lanes of the warp hold. The compiler sees that they do, and computes what follows once for all.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// One lane of a warp arrives. Called by all lanes of a warp, after they have waited for products that read what the
// barrier guards. (Four warps of a warpgroup do not end at the same time, so one arrival for all four would be early.)
__device__ __forceinline__ void arrive_once(Barrier& b) {
  if (MmaThread().lane == 0) arrive(b);
}

}  // namespace attn::cuda
