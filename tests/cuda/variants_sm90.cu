// Variants of the forward on Hopper side by side: the keys of a tile, stages, turns, tasks, tensor maps. Prints TFLOP/s
// and how far a variant's output is from the library's. For a GPU: nothing of it runs over the stand-in.
#include <string>

#include "tensor_maps.cuh"
#include "variants.h"

namespace attn::cuda {
namespace {

struct Shape {
  int batch, heads, length;
  bool causal;
};

// As the library does; a block has one task; a block knows all of its tasks; it takes the next one, lists one by one.
enum class Dealing { library, block_each, known, list_by_list };

template <int kDim>
class Variants {
 public:
  explicit Variants(Shape s) : s_(s), x_{make(1), make(2), make(3), make(0), make(0)} {
    p_.batch = s.batch;
    p_.batch_dims = 1;
    p_.batch_size[0] = s.batch;
    p_.heads = p_.key_heads = p_.value_heads = s.heads;
    p_.queries = p_.keys = s.length;
    p_.head_dim = p_.value_dim = kDim;
    p_.scale = 1 / std::sqrt(static_cast<double>(kDim));
    if (s.causal) p_.visibility.right = 0;
    Operand* const operands[] = {&p_.query, &p_.key, &p_.value, &p_.output};
    for (int i = 0; i < 4; ++i) {
      operands[i]->data = x_[i];
      operands[i]->dtype = DType::bf16;
      operands[i]->batch[0] = int64_t{s.heads} * s.length * kDim;
      operands[i]->head = int64_t{s.length} * kDim;
      operands[i]->row = kDim;
      operands[i]->col = 1;
    }
    int value = 0;
    require_done(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    multiprocessors_ = value;
    require_done(cudaMalloc(&counters_, sizeof(int)));
  }
  Variants(const Variants&) = delete;
  ~Variants() {
    for (uint16_t* x : x_) cudaFree(x);
    cudaFree(counters_);
  }

  // The first variant is the library's. `dealing`: how blocks come to their tasks.
  template <class Kernel>
  void time(const std::string& name, Dealing dealing = Dealing::library) {
    const Gpu gpu{dealing == Dealing::block_each ? int64_t{1} << 30 : multiprocessors_, 90, nullptr};
    plan(Kernel::kRows, dealing);
    time_launch(name, [&] { return launch_persistent<Kernel>(p_, gpu); });
  }
  template <int kConsumers, int kKeys, int kStages>
  void time_maps(const std::string& name) {
    using Kernel = ForwardWithMaps<kDim, kConsumers, kKeys, kStages>;
    plan(Kernel::kRows, Dealing::library);
    const int64_t heads = int64_t{s_.batch} * s_.heads;
    const auto map = [&](const Operand& x) { return map_of(x.data, heads, s_.length, kDim, kKeys); };
    MapParams p{p_, map(p_.key), map(p_.value)};
    time_launch(name, [&] {
      p.output = p_.output;
      const int64_t blocks = smaller(Kernel::blocks(p), multiprocessors_);
      return launch<typename Kernel::Shared, kMostSharedOfHopper, Kernel>(run_with_maps<Kernel>, p, blocks,
                                                                          Kernel::kThreads, nullptr);
    });
  }

 private:
  void plan(int64_t rows, Dealing dealing) {
    p_.rows_per_task = rows;
    p_.keys_per_split = int64_t{1} << 40;
    p_.order = order_of_rows(p_, rows);
    const bool knows = dealing == Dealing::block_each || dealing == Dealing::known || p_.order.at_once == 0;
    if (dealing == Dealing::list_by_list) p_.order.at_once = 1;
    p_.counters = knows ? nullptr : counters_;
  }
  template <class F>
  void time_launch(const std::string& name, F launch_kernel) {
    const bool is_first = !has_first_;
    p_.output.data = is_first ? x_[4] : x_[3];
    has_first_ = true;
    require_done(cudaMemset(p_.output.data, 0xff, 2 * count()));
    const double ms = median_ms([&]() -> Error {
      if (p_.counters) require_done(cudaMemsetAsync(p_.counters, 0, sizeof(int), nullptr));
      return launch_kernel();
    });
    const double flop = 4.0 * s_.batch * s_.heads * s_.length * s_.length * kDim * (s_.causal ? 0.5 : 1);
    std::printf("%d x %d x %5d, %3d %-7s %-32s %8.3f ms %5.0f TFLOP/s, off by %.1e\n", s_.batch, s_.heads, s_.length,
                kDim, s_.causal ? "causal" : "full", name.c_str(), ms, flop / ms * 1e-9,
                is_first ? 0 : largest_difference(x_[3], x_[4], count()));
    std::fflush(stdout);
  }
  size_t count() const { return size_t{1} * s_.batch * s_.heads * s_.length * kDim; }
  uint16_t* make(unsigned seed) const { return make_numbers(count(), seed); }

  Shape s_;
  ForwardParams p_;
  int64_t multiprocessors_ = 0;
  uint16_t* x_[5];
  int* counters_ = nullptr;
  bool has_first_ = false;
};

template <int kKeys, int kStages, bool kTurns = true>
using Of128 = ForwardWgmma<BFloat16, 128, 2, kKeys, kStages, false, Extra::none, kTurns>;
template <int kConsumers, int kKeys, int kStages, bool kTurns = true>
using Of64 = ForwardWgmma<BFloat16, 64, kConsumers, kKeys, kStages, false, Extra::none, kTurns>;

void time_all(Shape of_64, Shape of_128, Shape of_256) {
  Variants<128> x(of_128);
  x.time<Of128<128, 2>>("2 x 64 rows, 128 keys, 2 stages");
  x.time<Of128<128, 2>>("a block for each task", Dealing::block_each);
  x.time<Of128<128, 2>>("tasks known", Dealing::known);
  x.time<Of128<128, 2>>("lists one by one", Dealing::list_by_list);
  x.time_maps<2, 128, 2>("tensor maps");
  x.time<Of128<128, 2, false>>("no turns");
  x.time<Of128<112, 2>>("112 keys");
  x.time<Of128<96, 3>>("96 keys, 3 stages");
  x.time<Of128<144, 2>>("144 keys");
  Variants<64> y(of_64);
  y.time<Of64<3, 128, 4>>("3 x 64 rows, 128 keys, 4 stages");
  y.time<Of64<3, 128, 4>>("a block for each task", Dealing::block_each);
  y.time<Of64<3, 128, 4>>("tasks known", Dealing::known);
  y.time<Of64<3, 128, 4>>("lists one by one", Dealing::list_by_list);
  y.time_maps<3, 128, 4>("tensor maps");
  y.time<Of64<3, 128, 4, false>>("no turns");
  y.time<Of64<3, 128, 2>>("2 stages");
  y.time<Of64<2, 128, 4>>("2 x 64 rows");
  y.time<Of64<3, 96, 4>>("96 keys");
  Variants<256> z(of_256);
  z.time<ForwardWgmma<BFloat16, 256, 2, 80, 2, false>>("2 x 64 rows, 80 keys, 2 stages");
  z.time_maps<2, 80, 2>("tensor maps");
  z.time<ForwardWgmma<BFloat16, 256, 2, 80, 2, false, Extra::none, false>>("no turns");
  z.time<ForwardWgmma<BFloat16, 256, 2, 64, 2, false>>("64 keys");
}

}  // namespace
}  // namespace attn::cuda

int main() {
  using namespace attn::cuda;
  need_hopper();
  for (const bool causal : {false, true}) {
    time_all({8, 32, 2048, causal}, {8, 16, 2048, causal}, {8, 8, 2048, causal});
    time_all({2, 32, 8192, causal}, {2, 16, 8192, causal}, {2, 8, 8192, causal});
  }
  std::printf("right\n");
}
