"""Errors put into the CUDA kernels of all GPUs since 8.0: tests/cuda finds them."""

from __future__ import annotations

import pytest

from _cuda_programs import SOURCES, Compiler, compiler_of, needs_x86, run

# A place in a kernel and, between « and », an expression or a statement with what to put there
# instead: each must be found. These depend on the order of threads, write past an end, or compute
# in vain; `make mutants` draws wrong numbers.
MUTATIONS = {
    "K is read before it has arrived": (
        "cuda/mma/forward.cuh",
        "      «wait_for_copies<0>();»\n      __syncthreads();  // the keys",
        ";",
    ),
    "tiles that the mask hides are computed": (
        "cuda/mma/mask_tile.cuh",
        "if («pair_shows_some(k)») return true;",
        "true",
    ),
    "one thread says what the mask hides": (
        "cuda/mma/forward.cuh",
        "__syncthreads_or(keys <= 0 || «shared.mask.template shows_some<M>()»)",
        "threadIdx.x == 0 && shared.mask.template shows_some<M>()",
    ),
    "the mask is read before it has arrived": (
        "cuda/mma/forward.cuh",
        "        «wait_for_copies<0>();»\n        find_shown",
        ";",
    ),
    "the mask of the next tile is copied over one that is read": (
        "cuda/mma/forward.cuh",
        "    «__syncwarp();»  // the previous mask has been read\n",
        ";",
    ),
    "merge: the sums of other warps are read before they are there": (
        "cuda/simt/merge.cuh",
        "    «__syncthreads();»\n    if (warp > 0) return;",
        ";",
    ),
    "decoding: keys are read before they have arrived": (
        "cuda/mma/decode.cuh",
        "      «wait_for_copies<2 * kStages - 1>();»\n"
        "      __syncwarp();  // all lanes have copied the keys",
        ";",
    ),
    "decoding: values are read before they have arrived": (
        "cuda/mma/decode.cuh",
        "      «wait_for_copies<2 * kStages - 1>();»\n"
        "      __syncwarp();  // all lanes have copied the values",
        ";",
    ),
    "decoding: the query is read before all threads have copied": (
        "cuda/mma/decode.cuh",
        "    wait_for_copies<2 * kStages>();\n    «__syncthreads();»",
        ";",
    ),
    "pages: what lies behind a row is read": (
        "cuda/mma/mma.cuh",
        "if (there && «first + i < cols») numbers",
        "true",
    ),
    "pages: numbers lie side by side": (
        "cuda/mma/mma.cuh",
        "row[«(first + i) * stride»]",
        "first + i",
    ),
    "8 bits: scales are those of the tile before": (
        "cuda/mma/decode.cuh",
        "«read_scales(key + kStep);»",
        ";",
    ),
    "8 bits: the query is read before it is reordered": (
        "cuda/mma/decode.cuh",
        "      reorder(shared.query);\n      «__syncthreads();»",
        ";",
    ),
    "8 bits: columns are not sorted": (
        "cuda/mma/decode.cuh",
        "«sort_columns(output[0]);»",
        ";",
    ),
    "8 bits: scales behind the last key are read": (
        "cuda/shared/rows.cuh",
        "if («row >= task.last_key») return 0;",
        "false",
    ),
    "8 bits: beside float16, weights lose digits": (
        "cuda/mma/eight_bits.cuh",
        "return «low == low ? low : 0»;",
        "0",
    ),
    "8 bits: a prompt has the scales of one tile only": (
        "cuda/mma/eight_bits.cuh",
        "numbers[«key / kKeys % 2»][i / kKeys]",
        "0",
    ),
    "decoding: sums are stored over keys that are read": (
        "cuda/mma/decode.cuh",
        "    «__syncthreads();»  // the rings have been read",
        ";",
    ),
    "decoding: sums are added before they are there": (
        "cuda/mma/decode.cuh",
        "    «__syncthreads();»\n    if (thread.warp > 0) return;",
        ";",
    ),
    "decoding: splits are merged before all are there": (
        "cuda/mma/decode.cuh",
        "shared.is_last = «take_ticket(p.counters + shared.counter) == p.splits - 1»;",
        "take_ticket(p.counters + shared.counter) == p.splits - 2",
    ),
    "decoding: splits are not counted from 0": (
        "cuda/mma/decode.cuh",
        "Error error = «clear_counters(p.counters, p.counter_count, stream)») return",
        "Error{}",
    ),
    "decoding: pages are looked up that the table does not have": (
        "cuda/mma/decode.cuh",
        "if («key + row < task.last_key»)\n          in_pages",
        "true",
    ),
    "decoding: what lies behind a mask is read": (
        "cuda/mma/decode.cuh",
        "mask[n][half] = «first < task.last_key» ?",
        "true",
    ),
    "decoding: tiles that the mask hides are computed": (
        "cuda/mma/decode.cuh",
        "return «!__all_sync(~0u, some == 0)»;",
        "true",
    ),
    "delta: rows past the end are written": (
        "cuda/mma/delta.cuh",
        "if («own + k * kRowsAtOnce < rows»)",
        "true",
    ),
    "delta: rows past the end are read": (
        "cuda/mma/delta.cuh",
        "if («own + i >= own_rows») continue;",
        "own_rows == 0",
    ),
    "what lies behind a mask is read": (
        "cuda/mma/mask_tile.cuh",
        "begin[k][r] + byte, «key < p.keys»);",
        "true",
    ),
    "what lies behind the last values is read": (
        "cuda/mma/mma.cuh",
        ", first, «i < left»);",
        "true",
    ),
    "without tensor cores, tiles that the mask hides are computed": (
        "cuda/simt/scores.cuh",
        "return «__syncthreads_or(some)»;",
        "1",
    ),
    "K is read before all threads have copied": (
        "cuda/mma/forward.cuh",
        "      «__syncthreads();»  // the keys are copied, and the previous values",
        ";",
    ),
    "V is read before all threads have copied": (
        "cuda/mma/forward.cuh",
        "      «__syncthreads();»  // the values are copied, and the keys have been read\n",
        ";",
    ),
    "pages are looked up that the table does not have": (
        "cuda/mma/mma.cuh",
        "if («key >= last_key») return;",
        "false",
    ),
    "a row past the end is written": (
        "cuda/mma/mma.cuh",
        "if («there» && col < cols)",
        "true",
    ),
    "tiles are overwritten while read": (
        "cuda/simt/scores.cuh",
        "      «__syncthreads();»  // what is in shared memory has been read\n",
        ";",
    ),
    "tiles are used before they are there": (
        "cuda/simt/scores.cuh",
        "      «__syncthreads();»\n      add_products(x",
        ";",
    ),
    "backward: what is known of the next rows is stored while that of these is read": (
        "cuda/mma/backward.cuh",
        "store_row(shared.rows[«stage_after(stage)»], tile.first",
        "stage",
    ),
    "backward: rows are read before they have arrived": (
        "cuda/mma/backward.cuh",
        "        «wait_for_copies<0>();»\n        tile = first_shown_rows",
        ";",
    ),
    "backward: keys are read before they have arrived": (
        "cuda/mma/backward.cuh",
        "      «wait_for_copies<0>();»\n      key = first_shown_key",
        ";",
    ),
    "backward: rows and keys are read before all threads have copied": (
        "cuda/mma/backward.cuh",
        "    else\n      «__syncthreads();»\n    return tile;",
        ";",
    ),
    "backward: the mask of the next rows is read for these": (
        "cuda/mma/backward.cuh",
        "shared.mask[«mask_after(looked_at)»].template read_transposed",
        "looked_at",
    ),
    "backward: the mask that is looked at is copied over one in use": (
        "cuda/mma/backward.cuh",
        "      «looked_at = mask_after(looked_at);»\n      start_mask_from(key + kOther);",
        ";",
    ),
    "backward: a mask is looked at before it has arrived": (
        "cuda/mma/backward.cuh",
        "    start_mask_from(task.first_key);\n    «wait_for_copies<0>();»",
        ";",
    ),
    "backward: the gradient of a slope is that of two lanes": (
        "cuda/mma/gradients.cuh",
        "«sum += __shfl_xor_sync(~0u, sum, 2);»",
        ";",
    ),
    "backward: the gradient of a slope has the distances of another tile": (
        "cuda/mma/backward.cuh",
        "by_slope(fabsf(«ahead_of(rows, i, key)» -",
        "ahead_of(rows, i, shared.task.first_key)",
    ),
    "backward without tensor cores: the next rows are read before they are chosen": (
        "cuda/simt/backward.cuh",
        "    «__syncthreads();»  // the next place is there\n",
        ";",
    ),
    **{
        f"latent, 8.0: {name}": ("cuda/mma/latent.cuh", place, wrong)
        for name, place, wrong in (
            (
                "keys are read before they have arrived",
                "      «wait_for_copies<0>();»\n      __syncthreads();  // the keys",
                ";",
            ),
            (
                "keys are copied over some that are read",
                "      «__syncthreads();»  // the keys are copied, and the previous",
                ";",
            ),
            (
                "weights are read before they are there",
                "      «__syncthreads();»  // the weights are there",
                ";",
            ),
            (
                "largest scores are read before they are there",
                "    «__syncthreads();»\n#pragma unroll\n    for (int r = 0; r < 2; ++r) {\n"
                "      const int i = own + thread.group + 8 * r;\n      x[r] = combine",
                ";",
            ),
            (
                "pages are looked up that the table does not have",
                "if («key >= shared.task.last_key») return 0;",
                "false",
            ),
            (
                "both halves of the output are the first",
                "lane / 16, «half * kHalf / 16» + n / 2)",
                "0",
            ),
        )
    },
}
# The program that finds it, by what the name begins with.
FOUND_BY = {
    "decoding": "check_decode",
    "8 bits": "check_eight_bits",
    "pages": "check_pages",
    "delta": "check_delta",
    "merge": "check_merge",
    "backward": "check_backward",
    "backward without tensor cores": "check_backward_simt",
    "latent, 8.0": "check_latent",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(tmp_path_factory.mktemp("programs"), MUTATIONS.values())


@pytest.mark.slow(*SOURCES)  # compiles kernels
@needs_x86
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_found(mutation: str, compiled: Compiler) -> None:
    """An error put into a kernel gives a wrong result or a message, with one order of threads."""
    program = compiled(FOUND_BY.get(mutation.split(":")[0], "check_forward"))
    number = 1 + [*MUTATIONS].index(mutation)
    assert not run(program, seeds=4, mutation=number).endswith("right\n")
