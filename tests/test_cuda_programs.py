"""The CUDA kernels without torch: programs over tests/stand_in, errors put in; nvcc takes them."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from _variants import ROOT, mutable_sources
from tests.cuda.programs import MEASURING, PROGRAMS, compile_program, find

COMPILER = shutil.which("g++") or "g++"
# The fibers switch stacks with a few instructions of x86.
needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="not run: the stand-in is written for x86_64"
)


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
        f"Hopper: {name}": (f"cuda/wgmma/{file}.cuh", place, wrong)
        for name, file, place, wrong in (
            (
                "copies are not published",
                "wgmma",
                "    wait_for_copies<0>();\n    «publish_writes();»",
                ";",
            ),
            (
                "keys are copied over some that are read",
                "wgmma",
                "    «wait(barriers.empty[stage.stage], stage.parity ^ 1);»\n    start",
                ";",
            ),
            (
                "rows are copied over some that are read",
                "row_tasks",
                "          «wait(shared.queries.empty[0], queries.parity ^ 1);»",
                ";",
            ),
            (
                "a task is set while the one before is read",
                "tasks",
                "      «wait(shared.tasks.empty[tasks.stage], tasks.parity ^ 1);»",
                ";",
            ),
            (
                "tasks are not counted from 0",
                "forward",
                "if (Error error = «clear_counters(p.counters, 1, gpu.stream)») return error;",
                "Error{}",
            ),
            (
                "values are read before they have arrived",
                "forward",
                "          «wait(shared.values.full[before.stage], before.parity);»",
                ";",
            ),
            (
                "keys are read before they have arrived",
                "row_tasks",
                "    «wait(shared.keys.full[stage.stage], stage.parity);»\n    if const",
                ";",
            ),
            (
                "scores are read before they are there",
                "forward",
                "          «wait_for_products<1>(x[0]);»",
                ";",
            ),
            (
                "the output is read before it is there",
                "forward",
                "          «wait_for_products<0>(output[0]);»\n          arrive_once",
                ";",
            ),
            (
                "weights are packed while products read them",
                "forward",
                "          weigh(w, shown, consumer);\n          «keep_beside_products();»",
                "pack_all<S>(weights, x[0]);",
            ),
            (
                "products have no fence",
                "wgmma",
                "  const Matrix b = other.matrix();\n  «begin_products();»",
                ";",
            ),
            ("barriers have no fence", "tasks", "      «fence_inits();»", ";"),
            (
                "one warp says that all have read",
                "wgmma",
                "for (Barrier& b : empty) init(b, «kReaders»);",
                "1",
            ),
            (
                "a lane says that all have read the task",
                "tasks",
                " attend(turn.work);\n      «__syncwarp();»",
                ";",
            ),
            (
                "a turn is not passed on",
                "forward",
                "shared.value[before.stage]);\n          «pass_turn(consumer);»",
                ";",
            ),
            (
                "keys are released and not read",
                "forward",
                "      «arrive_once(shared.queries.empty[0]);»",
                ";",
            ),
            (
                "pages are looked up that the table does not have",
                "wgmma",
                "known = «mine < rows» ?",
                "true",
            ),
            (
                "what lies behind the last keys is read",
                "wgmma",
                "copy_async(to, from, «hidden <= i && i < rows»);",
                "true",
            ),
            (
                "a panel is permuted by another row",
                "wgmma",
                "(vector % 8 ^ «(row() + i * kRowsAtOnce) % 8») * 16",
                "row() % 8",
            ),
            (
                "the tiles of the second warpgroup are those of the first",
                "wgmma",
                "from_row(own.matrix(), «first»)",
                "0",
            ),
            (
                "both rows have the slope of one",
                "row_tasks",
                "fmaf(«slope[i / 2]», Alibi",
                "slope[0]",
            ),
            (
                "distances are those of the first tile",
                "row_tasks",
                "fabsf(ahead[i / 2] - «key» -",
                "0",
            ),
            (
                "a distance is that of the key beside it",
                "row_tasks",
                "static_cast<float>(8 * n + «i % 2»)",
                "0",
            ),
            (
                "slopes are not divided by what is left",
                "row_tasks",
                "[head_number(p, row)] / «terms_left(p)»;",
                "1",
            ),
            (
                "the cap is left out",
                "row_tasks",
                "return {p, is_left(p) ? «terms_left(p)» : 1};",
                "static_cast<float>(p.scale)",
            ),
            (
                "a mask is read before it has arrived",
                "row_tasks",
                "    «wait_for_copies<0>();»\n    __syncwarp();  // all lanes have copied",
                ";",
            ),
            (
                "a mask is that of another tile",
                "row_tasks",
                "in_mask[consumer][i]; }, «first_key + int64_t{tile} * kKeys»",
                "first_key",
            ),
            (
                "a mask is that of the first warpgroup's rows",
                "row_tasks",
                "return shared.in_mask[«consumer»][i];",
                "0",
            ),
            (
                "hidden keys before the first one shown are copied",
                "row_tasks",
                "static_cast<int>(«part.first»));",
                "0",
            ),
            (
                "hidden keys behind the last one shown are copied",
                "row_tasks",
                "smaller(«part.last», last - key)",
                "kKeys",
            ),
            (
                "a mask of numbers changes nothing",
                "mask",
                "(__syncthreads_or(«changes») ?",
                "false",
            ),
            (
                "every second look at a mask is left out",
                "row_tasks",
                "      «first += 32;»",
                "first += first < 0 ? 32 : 64;",
            ),
            (
                "dropout has the counters of the first tile",
                "row_tasks",
                "«int64_t{tile} * (kKeys / 4)»",
                "0",
            ),
            (
                "dropout has the counters of one row",
                "row_tasks",
                "options.rows[«half»],",
                "0",
            ),
            (
                "a lane keeps what it computed for the other one",
                "row_tasks",
                "«odd ? kept[0] : kept[1]», 1);",
                "odd ? kept[1] : kept[0]",
            ),
            (
                "a large cap gets the tanh of small ones",
                "row_tasks",
                "        «turn_into_tanh<Cap::large>();»",
                "turn_into_tanh<Cap::small>();",
            ),
        )
    },
    **{
        f"Hopper's gradients: {name}": (f"cuda/wgmma/{file}.cuh", place, wrong)
        for name, file, place, wrong in (
            (
                "values are read before they have arrived",
                "grad_query",
                "    «wait(shared.values.full[stage.stage], stage.parity);»\n    start_dots(s.dx",
                ";",
            ),
            (
                "a row's products are read before they are there",
                "grad_query",
                "    «wait_for_products<kSums + 1>(s.x);»",
                ";",
            ),
            (
                "a row's slopes are read before they are there",
                "grad_query",
                "    «wait_for_products<kSums>(s.dx);»",
                ";",
            ),
            (
                "dS is packed while products read it",
                "grad_query",
                "        «wait_for_products<0>(sum);»\n        arrive",
                ";",
            ),
            (
                "keys are infinite",
                "grad_query",
                "    «make_finite<Tasks::kConsumerThreads>(s.x, shared.key[stage.stage]);»",
                ";",
            ),
            (
                "values of hidden keys count",
                "gradients",
                "if («w[n][i] == 0») x[n][i] = 0;",
                "false",
            ),
            (
                "keys are copied over some that are read",
                "grad_key",
                "    «wait(shared.keys.empty[0], place.keys.parity ^ 1);»",
                ";",
            ),
            (
                "rows are read before they have arrived",
                "grad_key",
                "        «wait(shared.queries.full[stage.stage], stage.parity);»",
                ";",
            ),
            (
                "gradients of rows are read before they have arrived",
                "grad_key",
                "    «wait(shared.grad_outputs.full[stage.stage], stage.parity);»\n    start_dots",
                ";",
            ),
            (
                "a key's products are read before they are there",
                "grad_key",
                "    «wait_for_products<1>(x);»",
                ";",
            ),
            (
                "a key's slopes are read before they are there",
                "grad_key",
                "    «wait_for_products<0>(dx);»",
                ";",
            ),
            (
                "queries are infinite",
                "grad_key",
                "    «make_finite<Tasks::kConsumerThreads>(x, query);»",
                ";",
            ),
            (
                "a tile is made finite while products read it",
                "gradients",
                "  «sync_threads<kThreads>(kBarrier);»  // all threads",
                ";",
            ),
            (
                "a tile is multiplied before it is finite",
                "gradients",
                "  publish_writes();\n  «sync_threads<kThreads>(kBarrier);»",
                ";",
            ),
            (
                "all rows see all keys",
                "grad_key",
                "hides = «uniform(rows.hides)»",
                "false",
            ),
            (
                "rows behind the last one count",
                "grad_key",
                "to.seen[i] = TileRange(«i < count ? seen : Range{0, 0}»",
                "seen",
            ),
            (
                "rows are released and not read",
                "grad_key",
                "    «wait_for_products<1>(of_weights);»\n    arrive",
                ";",
            ),
            (
                "tasks are not counted from 0",
                "backward",
                "if (Error error = «clear_counters(p.counters, 1, gpu.stream)») return error;",
                "Error{}",
            ),
            (
                "every row has the logsumexp of the first head",
                "grad_key",
                "const int64_t number = row_number(p, task.n, «row.head», row.position);",
                "first.head",
            ),
            (
                "a row's cap has no derivative",
                "grad_query",
                "? weight : weight * «cap_slope(y)»;",
                "1",
            ),
            (
                "a key's cap has no derivative",
                "grad_key",
                "of_row[c] * «cap_slope(y)»;",
                "1",
            ),
            (
                "a hidden key has a weight behind a cap",
                "grad_query",
                "this->hide(x, tile, «0»)",
                "1",
            ),
            (
                "a hidden product is not a number",
                "grad_key",
                "if («kMayHide && kCap != Cap::none && of_row[c] == 0») number = 0",
                "false",
            ),
            (
                "a key sees the slope of the first row",
                "grad_key",
                "fmaf(«alibi[c].slope», Alibi",
                "rows.alibi[0].slope",
            ),
            (
                "a distance is from the first key",
                "grad_key",
                "alibi[c].ahead - «static_cast<float>(key)»",
                "0",
            ),
            (
                "slopes have the distances of the first tile",
                "grad_query",
                "«static_cast<float>(uniform(tile) * kKeys)»",
                "0",
            ),
            (
                "dQ has what a boolean mask hides",
                "grad_query",
                "half] &= «fill_halves(__byte_perm(two, 0, 0x4140))»;",
                "~0u",
            ),
            (
                "dK has what a boolean mask hides",
                "grad_key",
                "if (clears) «clear_hidden(ds, shown);»",
                ";",
            ),
            (
                "dV has what a boolean mask hides",
                "grad_key",
                "    «clear_hidden(weights, shown);»",
                ";",
            ),
            (
                "a hidden NaN reaches dK",
                "grad_key",
                "turn_into_ds(dx, x, hides || «(changes && !clears)»);",
                "false",
            ),
            (
                "a hidden NaN reaches dQ",
                "grad_query",
                "this->hides(tile) || «(kMasked && shown.changes && !clears_hidden(p))»",
                "false",
            ),
            (
                "both warpgroups read the mask of the first one's keys",
                "grad_key",
                "shared.mask[stage.stage][«consumer»]",
                "0",
            ),
            (
                "all rows of a tile get the mask of the first",
                "grad_key",
                "work.task.sequence.queries, first, «RowTile<kRows>::last_repeated(i, count)»)",
                "0",
            ),
            (
                "a tile that the mask shows gets the rows of the window's first",
                "grad_key",
                "return begin + «tile * kRows»;",
                "0",
            ),
            (
                "every second look at a mask is left out",
                "grad_key",
                "begin = first_seeing(work, «begin + 32 * kRows»);",
                "begin + (begin < 0 ? 32 : 64) * kRows",
            ),
            (
                "least numbers of a mask have no logsumexp",
                "gradients",
                "p.mask.dtype == DType::boolean) return «exponent_shift(logsumexp, per_score)»;",
                "Pair<float>{logsumexp.high, logsumexp.low}",
            ),
            (
                "dropout has the counters of the first tile of keys",
                "grad_query",
                "s.work.task.first_key + «int64_t{shown.tile} * kKeys»);",
                "0",
            ),
            (
                "dropout has the counters of a tile's first row",
                "grad_key",
                "return rows.dropout[«i»]; }",
                "0",
            ),
            (
                "dropout has the counters of the first warp",
                "grad_key",
                "kept, «16 * thread.warp», work.dropout",
                "0",
            ),
            (
                "dV has what dropout drops",
                "grad_key",
                "pack<S>(«keeps(n, 2 * half)» ?",
                "true",
            ),
        )
    },
    **{
        f"one pass: {name}": (f"cuda/wgmma/{file}.cuh", place, wrong)
        for name, file, place, wrong in (
            (
                "the first keys come first",
                "grad_key",
                "number = «list * tasks + tasks - 1 - task_of_list»;",
                "number",
            ),
            (
                "the first ticket is not taken",
                "tasks",
                "next = {«take_ticket(p.counters)», tasks, 0};",
                "number",
            ),
            (
                "turns are not counted from 0",
                "one_pass",
                "clear_counters(counters, «1 + one_pass_tiles(p)», gpu",
                "1",
            ),
            (
                "a turn begins too early",
                "grad_key",
                "wait_for_turn(&p.turns[tile], «turn»);",
                "turn > 0 ? turn - 1 : 0",
            ),
            (
                "a turn is passed on before the sums are there",
                "grad_key",
                "        «wait_for_bulk();»",
                ";",
            ),
            (
                "a share is stored over those before",
                "grad_key",
                "          if («turn == 0»)\n            store_bulk",
                "true",
            ),
            (
                "the first share is added to what was there",
                "grad_key",
                "            «store_bulk(to, from, kBytes);»",
                "add_bulk(to, from, kBytes);",
            ),
            (
                "a share is copied before it is there",
                "grad_key",
                "        «wait(full[0], at.parity);»\n",
                ";",
            ),
            (
                "a share is overwritten while it is copied",
                "grad_key",
                "          «wait_for_bulk_reads();»",
                ";",
            ),
            (
                "a share is written over the one before",
                "grad_key",
                "    «wait(tiles.sums[consumer].empty[0], at.parity ^ 1);»",
                ";",
            ),
            (
                "a share is not published",
                "grad_key",
                "    «publish_writes();»\n    arrive(tiles.sums",
                ";",
            ),
            (
                "dS is stored over the one before",
                "grad_key",
                "    «wait(tiles.slopes.empty[0], at.parity ^ 1);»",
                ";",
            ),
            (
                "dS of the other consumer is not there",
                "grad_key",
                "    «wait(tiles.slopes.full[0], at.parity);»",
                ";",
            ),
            (
                "dS is not published",
                "grad_key",
                "    «publish_writes();»\n    arrive(tiles.slopes",
                ";",
            ),
            (
                "both consumers compute the same columns",
                "grad_key",
                "finite_key.matrix(), «kQueryCols * consumer»);",
                "0",
            ),
            (
                "keys that are not there count",
                "grad_key",
                "last_key = «kOnePass ? task.first_key + kKeys : task.last_key»;",
                "task.last_key",
            ),
            ("keys are infinite", "grad_key", "two = «make_finite<S>(two)»;", "two"),
            (
                "a tile that no key sees gets what was there",
                "one_pass",
                "if («p.turns[number] > 0») {",
                "true",
            ),
            (
                "both halves get the first one's columns",
                "one_pass",
                "batch_offset(p, to, n) + «consumer * kCols * to.col»;",
                "0",
            ),
        )
    },
    **{
        f"Hopper's gradients: {name}": ("cuda/wgmma/mask.cuh", place, wrong)
        for name, place, wrong in (
            (
                "a mask is looked at for a tile's first rows",
                "row <= «end / kScoreTile»; ++row",
                "begin / kScoreTile",
            ),
            (
                "a mask is looked at for a tile's first head",
                "head <= «last.head»; ++head",
                "first.head",
            ),
            (
                "a mask is looked at for a tile's first keys",
                "col < «cols»; ++col",
                "1",
            ),
            (
                "a tile takes the next one out of the window",
                "shown[i] &= ~(«1u» << tile);",
                "3u",
            ),
        )
    },
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
    **{
        f"latent: {name}": ("cuda/wgmma/latent.cuh", place, wrong)
        for name, place, wrong in (
            (
                "weights are stored over some that are read",
                "    «wait(shared.given.empty[0], place.given.parity ^ 1);»",
                ";",
            ),
            (
                "weights are read before they are there",
                "      «wait(shared.given.full[0], place.given.parity);»\n      wait",
                ";",
            ),
            (
                "a lane says that all have read",
                "    «__syncwarp();»  // all lanes have read",
                ";",
            ),
            ("weights are not published", "    «publish_writes();»", ";"),
            (
                "the last columns are read before they have arrived",
                "if (k == kHalf / 16) «wait(shared.values.full[stage.stage], stage.parity);»",
                ";",
            ),
            (
                "the first columns are released before they are read",
                "      «wait_for_products<0>(output[0]);»\n      arrive_once(shared.keys",
                ";",
            ),
            (
                "sums keep the scale of an earlier largest score",
                "      «Softmax::rescale(output[0], w.factor);»",
                ";",
            ),
            (
                "both halves of the output are the first",
                "value = «shared.key[stage.stage].second.matrix()»;",
                "shared.key[stage.stage].first.matrix()",
            ),
            (
                "the second half is divided by the largest score",
                "      «put(shared.sum, w.sum);»",
                "put(shared.sum, w.best);",
            ),
        )
    },
}
# Without these barriers the stand-in computes the same, because its shuffles wait for all lanes. A
# search for races finds that one is missing.
BARRIERS = {
    ("cuda/mma/forward.cuh", "    «__syncwarp();»  // the maxima are written\n"): "check_forward",
    (
        "cuda/mma/forward.cuh",
        "    «__syncwarp();»  // all lanes of a row have read",
    ): "check_forward",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have read the keys",
    ): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have read the values",
    ): "check_decode",
    ("cuda/mma/decode.cuh", "      «__syncwarp();»  // all lanes have written"): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have copied the keys",
    ): "check_decode",
    (
        "cuda/mma/decode.cuh",
        "      «__syncwarp();»  // all lanes have copied the values",
    ): "check_decode",
    (
        "cuda/wgmma/grad_key.cuh",
        "    «__syncwarp();»  // all lanes have read the numbers of the rows",
    ): "check_backward_sm90",
    ("cuda/simt/forward.cuh", "      «__syncwarp();»  // all threads of the row"): "check_forward",
    (
        "cuda/simt/tangent.cuh",
        "      «__syncwarp();»  // all threads of the row",
    ): "check_derivatives",
    ("cuda/simt/stats.cuh", "      «__syncwarp();»\n      if (thread.x"): "check_derivatives",
}

# The file of a race that is in another than the barrier.
SHOWN_IN = {"      «__syncwarp();»  // all lanes have written": "cuda/simt/merge.cuh"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles a program of tests/cuda, once, with a choice of mutations."""
    to = tmp_path_factory.mktemp("programs")
    errors = [*MUTATIONS.values(), *((*place, ";") for place in BARRIERS)]
    # the stand-in has its own ones of these
    csrc = mutable_sources(to, errors, "ptx.cuh", "ptx_sm90.cuh", "device.h")
    stand_in = ROOT / "tests" / "stand_in"
    compiler = [COMPILER, "-std=c++20", "-O1", f"-I{stand_in}"]
    subprocess.run([*compiler, "-c", stand_in / "fibers.cpp", "-o", to / "fibers.o"], check=True)

    @functools.cache
    def compile_once(name: str) -> Path:
        program = to / name
        source = ROOT / "tests" / "cuda" / f"{name}.cu"
        flags = [
            *("-g1", "-Wno-unknown-pragmas", f"-I{csrc}", "-include", "mutation.h"),
            *("-fsanitize=alignment", "-fno-sanitize-recover=alignment"),  # see setup.py
            # see races.h; only accesses are of interest
            *("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
            "-fno-threadsafe-statics",
        ]
        subprocess.run(
            [*compiler, *flags, "-c", "-x", "c++", source, "-o", to / f"{name}.o"], check=True
        )
        objects = [to / f"{name}.o", to / "fibers.o"]
        subprocess.run([COMPILER, "-fsanitize=alignment", *objects, "-o", program], check=True)
        return program

    return compile_once


def run(program: Path, seeds: int, mutation: int = 0, **environment: str) -> str:
    """What the program prints with one seed after the other, until something is wrong; errors too.

    With odd ones an array ends at memory that cannot be touched, with even ones at numbers that are
    NaN.
    """
    for seed in range(seeds):
        guard = {"ATTN_GUARD_BYTES": "0"} if seed % 2 else {}
        chosen = {"ATTN_STAND_IN_SEED": str(seed), "ATTN_MUTATION": str(mutation)}
        chosen["ATTN_STAND_IN_CAPABILITY"] = "90" if program.name.endswith("sm90") else "80"
        run = subprocess.run(
            [program], env=os.environ | chosen | guard | environment, capture_output=True, text=True
        )
        assert (run.returncode == 0) == run.stdout.endswith("right\n")
        if not (output := run.stdout + run.stderr).endswith("right\n"):
            break
    return output


@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, compiled: Callable[[str], Path]) -> None:
    assert run(compiled(name), seeds=3).endswith("right\n")


@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_found(mutation: str, compiled: Callable[[str], Path]) -> None:
    """An error put into a kernel gives a wrong result or a message, with one order of threads."""
    programs = {
        "decoding": "check_decode",
        "8 bits": "check_eight_bits",
        "pages": "check_pages",
        "delta": "check_delta",
        "merge": "check_merge",
        "backward": "check_backward",
        "backward without tensor cores": "check_backward_simt",
        "Hopper": "check_forward_sm90",
        "Hopper's gradients": "check_backward_sm90",
        "one pass": "check_one_pass_sm90",
        "latent": "check_latent_sm90",
        "latent, 8.0": "check_latent",
    }
    program = programs.get(mutation.split(":")[0], "check_forward")
    number = 1 + [*MUTATIONS].index(mutation)
    assert not run(compiled(program), seeds=4, mutation=number).endswith("right\n")


# Left out are programs that take minutes: check_backward_sizes has the kernels of check_backward in
# other sizes, check_derivatives has the kernels of check_backward_simt.
@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize(
    "name",
    [
        *("check_forward", "check_forward_sm90", "check_decode", "check_eight_bits"),
        *("check_pages", "check_latent", "check_latent_sm90"),
        *("check_merge", "check_backward", "check_backward_sm90", "check_derivatives"),
    ],
)
def test_no_race(name: str, compiled: Callable[[str], Path]) -> None:
    assert run(compiled(name), seeds=1, ATTN_STAND_IN_RACES="1") == "right\n"


@pytest.mark.slow  # compiles kernels
@needs_x86
@pytest.mark.parametrize("place", BARRIERS, ids=[file for file, _ in BARRIERS])
def test_race_is_found(place: tuple[str, str], compiled: Callable[[str], Path]) -> None:
    number = 1 + len(MUTATIONS) + [*BARRIERS].index(place)
    program = compiled(BARRIERS[place])
    assert run(program, seeds=1, mutation=number).endswith("right\n")
    output = run(program, seeds=1, mutation=number, ATTN_STAND_IN_RACES="1")
    assert output.endswith(": a race\n")
    assert f"/{SHOWN_IN.get(place[1], place[0])}:" in output, output
    assert len(re.findall(r"/cuda/\w+/\w+\.cuh:\d+", output)) >= 2, output


@pytest.mark.slow  # compiles kernels
@pytest.mark.skipif(not find("nvcc"), reason="not run: nvcc is not there")
@pytest.mark.parametrize("name", [*PROGRAMS, *MEASURING])
def test_program_for_a_gpu(name: str, tmp_path: Path) -> None:
    """nvcc refuses a function of the device on the host; to g++ it is like any other."""
    little_optimized = ("-Xcicc=-O1", "-Xptxas=-O1")  # in a third of the time
    assert compile_program(name, tmp_path, *little_optimized).exists()
