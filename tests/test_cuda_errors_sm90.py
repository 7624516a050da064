"""Errors put into the CUDA kernels for Hopper, sm_90a: tests/cuda finds them."""

from __future__ import annotations

import pytest

from _cuda_programs import SOURCES, Compiler, compiler_of, needs_x86, run

# A place in a kernel and, between « and », an expression or a statement with what to put there
# instead: each must be found. These depend on the order of threads, write past an end, or compute
# in vain; `make mutants` draws wrong numbers.
MUTATIONS = {
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
# The program that finds it, by what the name begins with.
FOUND_BY = {
    "Hopper": "check_forward_sm90",
    "Hopper's gradients": "check_backward_sm90",
    "one pass": "check_one_pass_sm90",
    "latent": "check_latent_sm90",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return compiler_of(tmp_path_factory.mktemp("programs"), MUTATIONS.values())


@pytest.mark.slow(*SOURCES)  # compiles kernels
@needs_x86
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation_is_found(mutation: str, compiled: Compiler) -> None:
    """An error put into a kernel gives a wrong result or a message, with one order of threads."""
    # the stand-in sees a plain store only if a call precedes it
    program = compiled(FOUND_BY[mutation.split(":")[0]], races=mutation.endswith("not published"))
    number = 1 + [*MUTATIONS].index(mutation)
    assert not run(program, seeds=4, mutation=number).endswith("right\n")
