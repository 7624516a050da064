// Every wrapper of ptx_sm90.cuh against what its comment says. Matrices of selections and of places name a layout that
// is wrong: a number of the result says from which row or column it has come.
#include <bit>
#include <cmath>
#include <cstdlib>
#include <string>

#include "check.h"
#include "cuda/wgmma/wgmma.cuh"

namespace attn::cuda {
namespace {

template <class S>
S number_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if constexpr (std::is_same_v<S, BFloat16>) return {static_cast<uint16_t>(bits >> 16)};
  const uint32_t half = (bits >> 31 << 15) | (((bits >> 23 & 255) - 112) << 10) | (bits >> 13 & 1023);
  return {static_cast<uint16_t>(x == 0 ? 0 : half)};
}

constexpr int kInner = 16;
// A product C [64 x kCols] = (C0 or 0) + A B of one instruction. A is [64 x 16], B is [kCols x 16], both by rows here.
struct Operands {
  const uint16_t *a, *b;
  const float* c0;  // null: C = A B
  float* c;
  int place;  // where A and B lie in the tiles, in steps of 16
};
enum class Form { shared, shared_a_by_columns, shared_b_by_columns, registers, registers_b_by_columns };

template <class S, int kCols, Form kForm>
struct ProductKernel {
  static constexpr int kThreads = kGroupThreads, kBlocks = 1, kPlaces = 8;
  static constexpr bool kAByColumns = kForm == Form::shared_a_by_columns;
  static constexpr bool kBByColumns = kForm == Form::shared_b_by_columns || kForm == Form::registers_b_by_columns;
  static constexpr int kBPanels = (kCols + 63) / 64 * 64;
  struct Shared {
    PanelTile<S, kAByColumns ? 16 * kPlaces : 64, kAByColumns ? 64 : 16 * kPlaces> a;
    PanelTile<S, kBByColumns ? 16 * kPlaces : kCols, kBByColumns ? kBPanels : 16 * kPlaces> b;
  };
  const Operands& p;
  Shared& shared;
  static constexpr int64_t blocks(const Operands&) { return 1; }

  template <int kRows, int kTileCols>
  __device__ static void store(PanelTile<S, kRows, kTileCols>& tile, int row, int col, uint16_t x) {
    tile.numbers[(col / 64 * kRows + row) * 64 + (col % 64 / 8 ^ row % 8) * 8 + col % 8] = S{x};
  }
  __device__ void run(int64_t) {
    if constexpr (!kHasSm90) {
      trap();
    } else {
      const int thread = threadIdx.x, at = 16 * p.place;
      // Other numbers are NaN: what is read of them shows.
      for (size_t i = thread; i < sizeof(shared.a) / 2; i += kThreads) shared.a.numbers[i] = S{0x7fff};
      for (size_t i = thread; i < sizeof(shared.b) / 2; i += kThreads) shared.b.numbers[i] = S{0x7fff};
      __syncthreads();
      for (int i = thread; i < 64 * kInner; i += kThreads) {
        const int row = i / kInner, k = i % kInner;
        kAByColumns ? store(shared.a, at + k, row, p.a[i]) : store(shared.a, row, at + k, p.a[i]);
      }
      for (int i = thread; i < kCols * kInner; i += kThreads) {
        const int col = i / kInner, k = i % kInner;
        kBByColumns ? store(shared.b, at + k, col, p.b[i]) : store(shared.b, col, at + k, p.b[i]);
      }
      publish_writes();
      __syncthreads();
      const MmaThread mine;
      const auto place = [&](int n, int i) {
        return (16 * mine.warp + mine.group + i / 2 * 8) * kCols + mine.col(n) + i % 2;
      };
      float c[kCols / 8][4];
      for (int n = 0; n < kCols / 8; ++n)
        for (int i = 0; i < 4; ++i) c[n][i] = p.c0 ? p.c0[place(n, i)] : NAN;
      uint32_t a[4];
      for (int i = 0; i < 4; ++i) {
        const uint16_t* two = p.a + (16 * mine.warp + mine.group + i % 2 * 8) * kInner + 2 * mine.place + i / 2 * 8;
        a[i] = two[0] | static_cast<uint32_t>(two[1]) << 16;
      }
      const Matrix of_b = kBByColumns ? from_row(shared.b.matrix(), at) : from_column<kCols>(shared.b.matrix(), at);
      begin_products();
      if constexpr (kForm == Form::registers || kForm == Form::registers_b_by_columns)
        multiply_group<S, kBByColumns>(c, a, of_b, p.c0 != nullptr);
      else
        multiply_group<S, kAByColumns, kBByColumns>(
            c, kAByColumns ? from_row(shared.a.matrix(), at) : from_column<64>(shared.a.matrix(), at), of_b,
            p.c0 != nullptr);
      commit_products();
      wait_for_products<0>(c);
      for (int n = 0; n < kCols / 8; ++n)
        for (int i = 0; i < 4; ++i) p.c[place(n, i)] = c[n][i];
    }
  }
};

template <class S, int kCols>
struct Product {
  Array<uint16_t> a{64 * kInner}, b{kCols * kInner};
  Array<float> c0{64 * kCols}, c{64 * kCols};

  template <Form kForm>
  void compute(bool adds, int place = 0) {
    using Kernel = ProductKernel<S, kCols, kForm>;
    run([&] {
      return launch_persistent<Kernel>(Operands{a.data(), b.data(), adds ? c0.data() : nullptr, c.data(), place},
                                       Gpu{1, 90, nullptr});
    });
  }
};

// Each matrix in turn holds places, and the other one selects them.
template <class S, int kCols, Form kForm>
void check_layout(const char* name) {
  Product<S, kCols> x;
  const auto check = [&](const char* what, auto of_a, auto of_b, auto expected) {
    for (int place = 0; place < 8; place += 3) {
      for (int i = 0; i < 64 * kInner; ++i) x.a[i] = number_of<S>(of_a(i / kInner, i % kInner)).bits;
      for (int i = 0; i < kCols * kInner; ++i) x.b[i] = number_of<S>(of_b(i / kInner, i % kInner)).bits;
      x.template compute<kForm>(false, place);
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < kCols; ++j)
          if (const float found = x.c[i * kCols + j], wanted = expected(i, j); !(found == wanted)) {
            std::printf("wrong: %s, %d columns, at %d: C(%d, %d) has %s %g, not %g\n", name, kCols, 16 * place, i, j,
                        what, found, wanted);
            std::exit(1);
          }
    }
  };
  const auto selects = [](int row, int k) { return k == row % kInner ? 1.f : 0.f; };
  check("row of A", [](int i, int) { return float(i); }, selects, [](int i, int) { return float(i); });
  check("column of A", [](int, int k) { return float(k); }, selects, [](int, int j) { return float(j % kInner); });
  check("column of B", selects, [](int j, int) { return float(j); }, [](int, int j) { return float(j); });
  check("row of B", selects, [](int, int k) { return float(k); }, [](int i, int) { return float(i % kInner); });
}

template <class S, int kCols>
void check_layouts() {
  check_layout<S, kCols, Form::shared>("A and B by rows");
  check_layout<S, kCols, Form::shared_a_by_columns>("A by columns");
  check_layout<S, kCols, Form::registers>("A in registers");
  if constexpr (kCols % 64 == 0) {  // as kernels have them: whole panels
    check_layout<S, kCols, Form::shared_b_by_columns>("B by columns");
    check_layout<S, kCols, Form::registers_b_by_columns>("A in registers, B by columns");
  }
}

// What the kernels rest on: a product has the same bits whatever its place in the tiles, whichever factor comes first
// and however many columns there are, and adding zeros changes nothing. Printed: whether mma.sync has the same bits,
// and how the sums are rounded.
template <class S>
__global__ void multiply_by_warp(const __grid_constant__ Operands p) {
  const MmaThread mine;
  uint32_t a[4], b[2];
  const auto two = [&](const uint16_t* x, int row, int k) {
    return x[row * kInner + k] | static_cast<uint32_t>(x[row * kInner + k + 1]) << 16;
  };
  for (int i = 0; i < 4; ++i) a[i] = two(p.a, mine.group + i % 2 * 8, 2 * mine.place + i / 2 * 8);
  for (int i = 0; i < 2; ++i) b[i] = two(p.b, mine.group, 2 * mine.place + 8 * i);
  float c[4];
  for (int i = 0; i < 4; ++i) c[i] = p.c0[(mine.group + i / 2 * 8) * 64 + 2 * mine.place + i % 2];
  multiply_add<S>(c, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) p.c[(mine.group + i / 2 * 8) * 64 + 2 * mine.place + i % 2] = c[i];
}

template <class S>
void check_rounding(const char* name) {
  constexpr uint16_t kOne = std::is_same_v<S, Half> ? 0x3c00 : 0x3f80,
                     kFraction = std::is_same_v<S, Half> ? 0x3ff : 0x7f;
  std::mt19937 random(3);
  Product<S, 64> x, swapped, zeros;
  Product<S, 128> wide;
  double most = 0, mean = 0;
  int as_a_warp = 0, subnormal = 0;
  constexpr int kRounds = 8;
  for (int round = 0; round < kRounds; ++round) {
    const auto draw = [&] {
      return static_cast<uint16_t>((kOne | (random() & kFraction)) ^ (round % 2 ? random() % 2 << 15 : 0));
    };
    for (int i = 0; i < 64 * kInner; ++i) {
      x.a[i] = swapped.b[i] = wide.a[i] = draw();
      x.b[i] = swapped.a[i] = wide.b[i] = wide.b[64 * kInner + i] = zeros.b[i] = draw();
      zeros.a[i] = 0;
    }
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < 64; ++j) {
        const float c = static_cast<float>(random() % 4096) / 37;
        x.c0[64 * i + j] = swapped.c0[64 * j + i] = wide.c0[128 * i + j] = wide.c0[128 * i + 64 + j] = c;
        zeros.c0[64 * i + j] = round % 4 == 3 ? c * 0x1p-140f : c;
      }
    x.template compute<Form::shared>(true);
    const auto same = [&](auto& other, auto at, const char* what) {
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 64; ++j) require(other.c[at(i, j)] == x.c[64 * i + j], what);
    };
    swapped.template compute<Form::shared>(true, 5);
    same(swapped, [](int i, int j) { return 64 * j + i; }, "products depend on which factor comes first");
    wide.template compute<Form::registers>(true, 2);
    same(wide, [](int i, int j) { return 128 * i + j; }, "products depend on how many columns there are");
    same(wide, [](int i, int j) { return 128 * i + 64 + j; }, "products depend on the column");
    x.template compute<Form::registers_b_by_columns>(true, 7);
    same(swapped, [](int i, int j) { return 64 * j + i; }, "products depend on where A lies");
    zeros.template compute<Form::shared_b_by_columns>(true);
    for (int i = 0; i < 64 * 64; ++i) {
      const bool is_same = zeros.c[i] == zeros.c0[i];
      if (round % 4 == 3)
        subnormal += is_same;  // kernels do not need it
      else
        require(is_same, "adding products of zeros changes a number");
    }
    run([&] {
      return launch<Nothing>(multiply_by_warp<S>, Operands{x.a.data(), x.b.data(), x.c0.data(), zeros.c.data(), 0}, 1,
                             32, nullptr);
    });
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        as_a_warp += zeros.c[64 * i + j] == x.c[64 * i + j];
        double exact = x.c0[64 * i + j], size = std::fabs(exact);
        for (int k = 0; k < kInner; ++k) {
          const auto of = [](uint16_t bits) { return double{host_float(bits, std::is_same_v<S, Half>)}; };
          exact += of(x.a[i * kInner + k]) * of(x.b[j * kInner + k]);
          size += std::fabs(of(x.a[i * kInner + k]) * of(x.b[j * kInner + k]));
        }
        const double error = (x.c[64 * i + j] - exact) / (size * 0x1p-24);
        most = std::max(most, std::fabs(error));
        if (round % 2 == 0) mean += error / (kRounds / 2 * 128);
      }
  }
  std::printf(
      "%s: %d of %d sums have mma.sync's bits; off by at most %.2f units (2^-24 of the sum of sizes), %+.3f in "
      "the mean; %d of %d subnormal numbers are kept\n",
      name, as_a_warp, kRounds * 128, most, mean, subnormal, kRounds / 4 * 64 * 64);
  require(most <= 16, "products of a warpgroup are less accurate than sixteen sums");
}

struct Buffers {
  int* turn;
  float* floats;
  uint32_t* words;
};

// A producer passes numbers through a ring of two stages to a warpgroup, which passes them on at a barrier of its own;
// then each warp stores matrices, and one thread adds them to global memory.
struct BarriersKernel {
  static constexpr int kThreads = 2 * kGroupThreads, kBlocks = 1, kNumbers = 50;
  struct Shared {
    alignas(128) uint16_t matrices[4][256];
    alignas(128) float sums[64];
    int ring[2][kGroupThreads], last;
    RingBarriers<2, kGroupThreads, 4> barriers;
  };
  const Buffers& p;
  Shared& shared;
  static constexpr int64_t blocks(const Buffers&) { return 4; }

  __device__ void run(int64_t number) {
    if constexpr (!kHasSm90) {
      trap();
    } else {
      const int thread = threadIdx.x % kGroupThreads;
      if (threadIdx.x == 0) {
        shared.barriers.init_all();
        fence_inits();
      }
      __syncthreads();
      Ring<2> at;
      if (threadIdx.x >= kGroupThreads) {
        give_registers<24>();
        for (int i = 0; i < kNumbers; ++i, at = at.after()) {
          wait(shared.barriers.empty[at.stage], at.parity ^ 1);
          shared.ring[at.stage][thread] = i + thread;
          arrive(shared.barriers.full[at.stage]);
        }
        return;
      }
      take_registers<240>();
      int sum = 0;
      for (int i = 0; i < kNumbers; ++i, at = at.after()) {
        wait(shared.barriers.full[at.stage], at.parity);
        sum += shared.ring[at.stage][kGroupThreads - 1 - thread];
        __syncwarp();
        arrive_once(shared.barriers.empty[at.stage]);
      }
      if (thread == 0) shared.last = sum;
      if (thread < 64)
        arrive_threads<kGroupThreads>(3);
      else
        sync_threads<kGroupThreads>(3);
      if (thread >= 64) sum += 1000000 * (shared.last == 127 * kNumbers + kNumbers * (kNumbers - 1) / 2);
      p.words[number * kGroupThreads + thread] = sum;
      const uint32_t four[4] = {2u * thread | (2u * thread + 1) << 16, 0x10001, 0x20002, 0x30003};
      uint16_t* const mine = shared.matrices[thread / 32];
      store_matrices(shared_address(mine + thread % 32 * 8), four);
      __syncwarp();
      uint32_t back[4];
      load_matrices(back, shared_address(mine + thread % 32 * 8));
      for (int i = 0; i < 4; ++i)
        if (back[i] != four[i]) p.words[number * kGroupThreads + thread] = 0;
      if (thread < 64) shared.sums[thread] = static_cast<float>(thread);
      publish_writes();
      sync_threads<kGroupThreads>(4);
      if (thread == 0) {
        // Blocks take turns in the order in which they come here, and each adds to the same numbers.
        const int ticket = take_ticket(p.turn + 1);
        wait_for_turn(p.turn, ticket);
        if (ticket == 0)
          store_bulk(p.floats, shared_address(shared.sums), sizeof(shared.sums));
        else
          add_bulk(p.floats, shared_address(shared.sums), sizeof(shared.sums));
        commit_bulk();
        wait_for_bulk_reads();
        shared.sums[0] = NAN;
        wait_for_bulk();
        store_release(p.turn, ticket + 1);
      }
    }
  }
};

void check_barriers() {
  Array<int> turn(2);
  Array<float> floats(64);
  Array<uint32_t> words(4 * kGroupThreads);
  for (int i = 0; i < 64; ++i) floats[i] = NAN;
  run([&] { return launch_blocks<BarriersKernel>(Buffers{turn.data(), floats.data(), words.data()}, nullptr); });
  require(turn[0] == 4, "turns");
  for (int i = 0; i < 64; ++i) require(floats[i] == 4.f * i, "store_bulk or add_bulk");
  constexpr int kNumbers = BarriersKernel::kNumbers;
  for (int i = 0; i < 4 * kGroupThreads; ++i) {
    const int thread = i % kGroupThreads, sum = (kGroupThreads - 1 - thread) * kNumbers + kNumbers * (kNumbers - 1) / 2;
    require(words[i] == static_cast<uint32_t>(sum + (thread < 64 ? 0 : 1000000)), "barriers or store_matrices");
  }
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  check_barriers();
  check_layouts<BFloat16, 32>();
  check_layouts<BFloat16, 64>();
  check_layouts<Half, 64>();
  check_layouts<BFloat16, 80>();
  check_layouts<Half, 96>();
  check_layouts<BFloat16, 112>();
  check_layouts<BFloat16, 128>();
  check_layouts<Half, 128>();
  check_layouts<BFloat16, 144>();
  check_layouts<Half, 256>();
  check_rounding<Half>("float16");
  check_rounding<BFloat16>("bfloat16");
  std::printf("right\n");
}
