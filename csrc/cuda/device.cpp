// The operators on CUDA. They launch kernels on the current stream. No function waits for the device, and all memory
// comes from torch's allocator, so that a call can be captured in a graph.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "operators/run.h"
#include "operators/replace.h"
#include "cuda/device.h"
#include "cuda/launch.h"

namespace attn::cuda {
namespace {

using at::Tensor;

// The capability whose kernels run: the device's, or 8.0 if ATTN_CUDA_CAPABILITY is less than the device's. (The
// kernels of 9.0 run on no later GPU.)
int chosen_capability(int of_device) {
  static const char* const given = std::getenv("ATTN_CUDA_CAPABILITY");
  if (!given || !*given) return of_device;
  char* end = nullptr;
  const int64_t chosen = std::strtol(given, &end, 10);
  TORCH_CHECK(*end == 0 && chosen >= 80 && chosen < 1000, "attn: ATTN_CUDA_CAPABILITY is '", given,
              "'; it must be a compute capability as one number, 80 for 8.0");
  return chosen < of_device ? 80 : of_device;
}

void check(Error error) {
  TORCH_CHECK(!error, "attn: a CUDA kernel could not be launched: ", error,
              ". With ATTN_CUDA_CAPABILITY=80 in the environment, calls take the kernels of all GPUs since 8.0");
}

// The kernels need a GPU of the generation Ampere or later. On an earlier GPU, replace.cpp leaves calls of torch's
// operator to torch's own kernels, and a call of our operators is an error. A capability of 0 passes, because tensors
// without data may name a GPU that this machine lacks.
bool runs_on(c10::Device device) {
  const int capability = compute_capability(device);
  return capability == 0 || capability >= 80;
}

struct OnDeviceOf : OnDevice {
  explicit OnDeviceOf(const Tensor& query) : OnDevice(query.device()) {
    const c10::Device device = query.device();
    TORCH_CHECK(runs_on(device), "attn: query is on ", device, ", a GPU of compute capability ",
                compute_capability(device) / 10, ".", compute_capability(device) % 10,
                "; it must be 8.0 (Ampere) or higher");
    capability = chosen_capability(compute_capability(device));
  }
};

void draw_rng_state(const Tensor& state, int64_t heads) {
  const OnDeviceOf device(state);
  RngNumber seed, offset;
  draw_numbers(state, seed, offset);
  check(launch_write_rng_state(state.mutable_data_ptr<int64_t>(), seed, offset, heads, device.stream));
}

// If the rows of an operand are not vectors (in_vectors()), copies the operand to memory in which its rows are vectors,
// and returns this memory. The copy's rows are padded with zeros. Without the copy, kernels would have to read every
// tile one number at a time, which takes many times as long.
[[nodiscard]] Tensor put_in_vectors(const Problem& p, Operand& x, int64_t heads, int64_t rows, int64_t cols,
                                    const Tensor& query) {
  if (!uses_mma(p) || in_vectors(p, x, cols)) return {};
  at::DimVector sizes(p.batch_size, p.batch_size + p.batch_dims), strides(x.batch, x.batch + p.batch_dims);
  for (const auto& [size, stride] : {std::pair{heads, x.head}, {rows, x.row}, {cols, x.col}}) {
    sizes.push_back(size);
    strides.push_back(stride);
  }
  for (size_t d = 0; d + 1 < sizes.size(); ++d)
    if (strides[d] == 0) sizes[d] = 1;  // a broadcast dimension stays broadcast
  at::DimVector filled_up = sizes;
  filled_up.back() = round_up(larger(1, cols), vector_of(x));
  const bool is_full = filled_up.back() == cols;
  const auto options = query.options().dtype(x.dtype == DType::boolean ? at::kBool : query.scalar_type());
  const Tensor vectors = is_full ? at::empty(filled_up, options) : at::zeros(filled_up, options);
  // An empty operand may lack memory, so it is not copied. target_device() tells torch which device x.data is on.
  // Without it, torch would ask the driver for this device.
  if (heads * rows * cols > 0)
    vectors.narrow(-1, 0, cols)
        .copy_(
            at::for_blob(x.data, sizes).strides(strides).target_device(query.device()).options(options).make_tensor());
  const auto stride_of = [&](int64_t d) { return sizes[static_cast<size_t>(d)] == 1 ? 0 : vectors.stride(d); };
  x.data = vectors.mutable_data_ptr();
  for (int64_t d = 0; d < p.batch_dims; ++d) x.batch[d] = stride_of(d);
  x.head = stride_of(p.batch_dims);
  x.row = stride_of(p.batch_dims + 1);
  x.col = 1;
  return vectors;
}
// The number of rows of a head of the query: all tokens if sequences are packed.
int64_t rows_of_head(const Problem& p) { return p.sequences > 0 ? p.tokens : p.queries; }
[[nodiscard]] Tensor put_mask_in_vectors(Problem& p, const Tensor& query) {
  if (!p.has_mask) return {};
  const bool of_rows = p.mask.col == 0;  // one number for all keys
  const Tensor vectors =
      put_in_vectors(p, p.mask, p.heads, rows_of_head(p), of_rows ? vector_of(p.mask) : p.keys, query);
  if (of_rows) p.mask.col = 0;
  return vectors;
}
[[nodiscard]] std::array<Tensor, 4> put_inputs_in_vectors(Problem& p, const Tensor& query) {
  std::array vectors{put_mask_in_vectors(p, query),
                     put_in_vectors(p, p.query, p.heads, rows_of_head(p), p.head_dim, query), Tensor(), Tensor()};
  if (reads_numbers(p)) return vectors;
  vectors[2] = put_in_vectors(p, p.key, p.key_heads, p.keys, p.head_dim, query);
  vectors[3] = put_in_vectors(p, p.value, p.value_heads, p.keys, p.value_dim, query);
  return vectors;
}

// Allocates a tensor [copies, rows], with `copies` numbers for each row, and sets `data` to its address.
Tensor allocate_rows(const Problem& p, const Tensor& query, void*& data, int64_t copies = 1) {
  const Tensor rows = at::empty({copies, number_of_rows(p)}, compute_options(query));
  if (p.sequences > 0) rows.zero_();  // if starts are not in order, no block writes the rows of some sequences
  data = rows.mutable_data_ptr();
  return rows;
}

// Allocates a byte for each tile of the mask, if there is one, for p.mask_tiles.
Tensor allocate_mask_tiles(Problem& p, const Tensor& query) {
  if (!p.has_mask) return {};
  Tensor tiles = at::empty({set_mask_tiles(p)}, query.options().dtype(at::kByte));
  p.mask_tiles.data = tiles.mutable_data_ptr();
  return tiles;
}

Tensor allocate_counters(int64_t count, const Tensor& query) {
  return at::empty({count}, query.options().dtype(at::kInt));
}

void run_forward(ForwardParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  const auto inputs = put_inputs_in_vectors(p, query);
  const Tensor mask_tiles = uses_forward_wgmma(p, device) ? allocate_mask_tiles(p, query) : Tensor();
  plan_forward(p, device);
  const auto partial = allocate_splits(p, query);
  Tensor counters;
  if (p.counter_count > 0) {
    counters = allocate_counters(p.counter_count, query);
    p.counters = counters.mutable_data_ptr<int>();
  }
  check(launch_forward(p, device));
}

void run_backward(BackwardParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  const auto inputs = put_inputs_in_vectors(p, query);
  const Tensor grad_output = put_in_vectors(p, p.grad_output, p.heads, rows_of_head(p), p.value_dim, query);
  const Tensor delta = allocate_rows(p, query, p.delta, p.grad_logsumexp ? 2 : 1);
  plan_backward(p, device);
  const bool on_hopper = uses_backward_wgmma(p, device);
  const Tensor mask_tiles = on_hopper ? allocate_mask_tiles(p, query) : Tensor();
  const Tensor counter = on_hopper ? allocate_counters(1, query) : Tensor();
  check(launch_backward(p, counter.defined() ? counter.mutable_data_ptr<int>() : nullptr, device));
}

void run_tangent(TangentParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  check(launch_tangent(p, device.stream));
}

void run_second(SecondParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  const Tensor delta = allocate_rows(p, query, p.delta, p.grad_logsumexp ? 2 : 1);
  const Tensor tangent_delta = allocate_rows(p, query, p.tangent_delta);
  check(launch_second(p, device.stream));
}

void run_stats(StatsParams& p, const Tensor& query) {
  const OnDeviceOf device(query);
  plan_stats(p, device.multiprocessors);
  const auto workspaces = allocate_partial(p, query);
  check(launch_stats(p, device.stream));
}

void write_sequences(const PackedSequences& sequences, const Tensor& query) {
  const OnDeviceOf device(query);
  check(launch_write_sequences(sequences, device.stream));
}

constexpr Device kCuda{draw_rng_state, run_forward, run_backward,    run_tangent,
                       run_second,     run_stats,   write_sequences, /*weights=*/nullptr};

}  // namespace

TORCH_LIBRARY_IMPL(attn, ATTN_CUDA_KEY, m) {
  register_kernels<kCuda>(m);
  replace_on(kDeviceType, runs_on);
}

}  // namespace attn::cuda
