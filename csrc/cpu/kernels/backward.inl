// Gradients, computed tile by tile from weights that are recomputed with the saved logsumexp. With s the scale, G the
// gradient of the output O, Z the dropout factors (0 or 1/(1-p)) and P_ij = exp(x_ij - logsumexp_i) the weights,
//
//   x = s Q K^T + M              O = (P * Z) V
//   dV = (P * Z)^T G
//   d(P)_ij  = Z_ij <G_i, V_j>
//   dS_ij    = P_ij (dP_ij - delta_i),   delta_i = sum_j dP_ij P_ij = <G_i, O_i>
//   dM = dS       dQ = s dS K       dK = s dS^T Q
//
// If the logsumexp also has a gradient g, dS = P (dP - delta + g). g is added last, because dP - delta is exactly 0 in
// a row that attends to one key only. With a soft cap, dS is multiplied by the cap's derivative before dQ and dK are
// computed. A score_mod is differentiated in the same place (differentiate_program). The gradient of an ALiBi slope is
// -sum_j dS_ij |position - j|. The gradient of a sink is -exp(sink - logsumexp) (delta - g).
//
// dS is the gradient of x, the scaled score. By the chain rule for x = s q.k, dQ and dK have one factor s each. Without
// a sink and without g, the sum over j of dS_ij is 0. Because |dS| <= P (1 - P) * range of dP, dS vanishes where the
// softmax saturates, that is, where one weight is near 1 and all other weights are near 0. Without scaling, q.k of
// independent entries with variance 1 has variance d_k. The softmax then saturates as d_k grows, and dS, dQ and dK
// vanish. s = 1/sqrt(d_k) brings the variance of x back to 1 and so keeps dS at a size that does not depend on d_k
// (Vaswani et al., 2017, section 3.2.1).
//
// The same code computes H(u; x; t) of schema.cpp, which is the derivative of these gradients along a direction
// t = (tQ, tK, tV, tM), with u = G held fixed. A prefix t means the derivative along t. With tx, c = t(logsumexp) and
// tO as in tangent.inl:
//
//   tP = P (tx - c)
//   t(dP)_ij = Z_ij <G_i, tV_j>,   t(delta)_i = <G_i, tO_i>
//   t(dS) = tP (dP - delta) + P (t(dP) - t(delta))
//   H_V = (tP * Z)^T G      H_M = t(dS)      H_Q = s (t(dS) K + dS tK)      H_K = s (t(dS)^T Q + dS^T tQ)
#pragma once

#include "cpu/tiles/dropout.inl"
#include "cpu/tiles/scores.inl"

namespace attn::ATTN_ISA {

// Params: BackwardParams for the gradients, SecondParams for their derivative along t. F: the format of the operands of
// the products. S: the format in which the forward multiplied queries and keys. The scores are recomputed in S.
template <class F, class Params, class S = F>
struct Backward {
  using T = typename F::Number;
  static constexpr int W = kLanes<T>;
  static constexpr bool kSecond = std::is_same_v<Params, SecondParams>;
  static constexpr bool kRoundsScores = !std::is_same_v<F, S>;

  struct RowState {
    const Params& params;  // for the initialisers below, as `arena`
    Arena& arena;
    RowTile rows;
    T* query_t = arena.take<T>(slots_of<F>(params.head_dim) * kRowTile);  // [slots of E][kRowTile]
    // [slots of kRowTile][E], with 0 for NaNs: at visible keys, NaNs reach dK through dS
    T* query = arena.take<T>(slots_of<F>(kRowTile) * row_of<F>(params.head_dim));
    T* grad_output_t = arena.take<T>(slots_of<F>(params.value_dim) * kRowTile);           // [slots of Ev][kRowTile]
    T* grad_output = arena.take<T>(slots_of<F>(kRowTile) * row_of<F>(params.value_dim));  // [slots of kRowTile][Ev]
    T* grad_query_t = arena.take<T>(params.head_dim * kRowTile);                          // [E][kRowTile]
    // [E][kRowTile]: grad_query_t, summed over several chunks
    T* sum_t = arena.take<T>(params.all_chunks_at_once && params.chunks > 1 ? params.head_dim * kRowTile : 0);
    Logsumexp<T>* logsumexp = arena.take<Logsumexp<T>>(1);
    T* delta = arena.take<T>(kRowTile);
    T* grad_logsumexp = arena.take<T>(kRowTile);
    T* grad_slopes = arena.take<T>(params.grad_slopes ? kRowTile : 0);
    // [columns][kRowTile]
    T* grad_row_terms =
        arena.take<T>(gradients_of_terms(params).rows ? columns_of(params, Leaf::row_term) * kRowTile : 0);
    T* tables = arena.take<T>(size_transposed(params));  // see RowTile
    T* grad_tables = arena.take<T>(size_transposed(params));
    T* tangent_query_t = arena.take<T>(kSecond ? params.head_dim * kRowTile : 0);
    T* tangent_query = arena.take<T>(kSecond ? kRowTile * row_of<F>(params.head_dim) : 0);
    T* shift = arena.take<T>(kSecond ? kRowTile : 0);  // [kRowTile]: c is shift + shifted_sum, see tangent.inl
    T* shifted_sum = arena.take<T>(kSecond ? kRowTile : 0);
    T* tangent_delta = arena.take<T>(kSecond ? kRowTile : 0);
    T* score_query_t = kRoundsScores ? arena.take<T>(slots_of<S>(params.head_dim) * kRowTile) : query_t;

    RowState(const Params& p, Arena& arena) : params(p), arena(arena) {}
  };
  struct Buffers {
    const Params& params;
    Arena arena;
    int64_t row_tiles, accumulated_keys, tile = kKeyTile * kRowTile;
    int64_t ld_key = row_of<F>(params.head_dim), ld_value = row_of<F>(params.value_dim);
    int64_t ld_score_key = row_of<S>(params.head_dim);
    RowState* states = arena.make<RowState>(row_tiles, params);
    T* key = arena.take<T>(kKeyTile * ld_key);  // [kKeyTile][slots of E]
    // [slots of kKeyTile][E], for dQ^T, with 0 for NaNs, because a masked key's NaN times dS = 0 is NaN
    T* key_finite = arena.take<T>(slots_of<F>(kKeyTile) * ld_key);
    T* value = arena.take<T>(kKeyTile * ld_value);  // [kKeyTile][slots of Ev]
    // [kKeyTile][slots of kRowTile]: P * Z or dS, for dV and dK
    T* lanes = arena.take<T>(F::kNumbers == 1 ? 0 : kKeyTile * slots_of<F>(kRowTile));
    // [slots of kKeyTile][kRowTile]: dS, for dQ^T, if the format cannot keep it in dx
    T* weights = arena.take<T>(F::kWeightsInPlace ? 0 : slots_of<F>(kKeyTile) * kRowTile);
    T* x = arena.take<T>(tile);                        // [kKeyTile][kRowTile]: scores, then P * Z (tP * Z for kSecond)
    T* dx = arena.take<T>(tile);                       // [kKeyTile][kRowTile]: dP, then dS
    T* room = arena.take<T>(room_of_tile<T>(params));  // of a ScoreTile
    T* factor = arena.take<T>(params.has_dropout ? tile : 0);
    // As x, for a soft cap or a score_mod: see scores(); tz for kSecond: see tangent_scores().
    T* kept = needs_kept(params) ? arena.take<T>(tile) : nullptr;
    T* tz = kSecond && needs_kept(params) ? arena.take<T>(tile) : nullptr;
    // [keys of a task] by E, Ev and columns.
    T* grad_key = arena.take<T>(params.grad_key.data ? accumulated_keys * ld_key : 0);
    T* grad_value = arena.take<T>(params.grad_value.data ? accumulated_keys * ld_value : 0);
    T* grad_key_terms =
        arena.take<T>(gradients_of_terms(params).keys ? accumulated_keys * columns_of(params, Leaf::key_term) : 0);
    // As x: the gradients of the pair terms.
    T* pair_terms = arena.take<T>(params.program && params.grad_mask.data ? tile : 0);
    T* tangent_key = arena.take<T>(kSecond ? kKeyTile * ld_key : 0);
    T* tangent_key_finite = arena.take<T>(kSecond ? kKeyTile * ld_key : 0);
    T* tangent_value = arena.take<T>(kSecond ? kKeyTile * ld_value : 0);
    T* tx = arena.take<T>(kSecond ? tile : 0);   // [kKeyTile][kRowTile]
    T* tdx = arena.take<T>(kSecond ? tile : 0);  // [kKeyTile][kRowTile]: t(dP), then t(dS)
    T* score_key = arena.take<T>(kRoundsScores ? kKeyTile * ld_score_key : 0);  // [kKeyTile][slots of E]
    int64_t size = arena.used();

    Buffers(const Params& p, char* base, int64_t row_tiles, int64_t accumulated_keys)
        : params(p), arena(base), row_tiles(row_tiles), accumulated_keys(accumulated_keys) {}

    // ds() is multiplied with K and Q. of_mask() is added to the mask's gradient.
    T* ds() const { return kSecond ? tdx : dx; }
    T* of_mask(const Params& p) const { return p.program ? pair_terms : ds(); }
  };

  static void load_rows(const Params& p, const Buffers& b, RowState& state) {
    load_tables<T>(p, state.rows, state.tables);
    if (gradients_of_terms(p).has_tables && size_transposed(p) > 0) state.rows.grad_tables = state.grad_tables;
    const RowTile& rows = state.rows;
    const auto finite_rows = [&](const Operand& x, T* tile) {
      rows.template pack_lanes<F>(p, x, p.head_dim, tile, b.ld_key);
      F::make_finite(tile, slots_of<F>(rows.count) * b.ld_key);
    };
    rows.template pack_columns<F>(p, p.query, p.head_dim, state.query_t);
    if constexpr (kRoundsScores) rows.template pack_columns<S>(p, p.query, p.head_dim, state.score_query_t);
    rows.template pack_columns<F>(p, p.grad_output, p.value_dim, state.grad_output_t);
    if (p.grad_key.data) finite_rows(p.query, state.query);
    if (p.grad_value.data) rows.template pack_lanes<F>(p, p.grad_output, p.value_dim, state.grad_output, b.ld_value);
    rows.load_logsumexp(p, p.logsumexp, *state.logsumexp);
    dot_grad_output(p, b, state, p.output, p.residual, state.delta);
    fill_zero(state.grad_logsumexp, kRowTile);
    for (int64_t i = 0; i < rows.count && p.grad_logsumexp; ++i)
      state.grad_logsumexp[i] = static_cast<const T*>(p.grad_logsumexp)[rows.number(p, i)];
    if constexpr (kSecond) {
      if (p.t.query.data) {
        rows.template pack_columns<F>(p, p.t.query, p.head_dim, state.tangent_query_t);
        if (p.grad_key.data) finite_rows(p.t.query, state.tangent_query);
      }
      rows.load_two_per_row(p, p.tangent_logsumexp, state.shift, state.shifted_sum);
      dot_grad_output(p, b, state, p.tangent_output, p.tangent_residual, state.tangent_delta);
    }
  }

  // dots[lane] = <G, y + rest>
  static void dot_grad_output(const Params& p, const Buffers& b, const RowState& state, const Operand& y,
                              const Operand& rest, T* dots) {
    fill_zero(dots, kRowTile);
    if (y.data) F::holds(y.dtype) ? add_products(p, b, state, y, dots) : add_numbers(p, b, state, y, dots);
    if (rest.data) add_numbers(p, b, state, rest, dots);
  }

  // Adds <G, y> in the order in which the matrix product sums <G, V>. If a row attends to one key only, O is this key's
  // V, so dP - delta is exactly 0.
  static void add_products(const Params& p, const Buffers& b, const RowState& state, const Operand& y, T* dots) {
    const int64_t lanes = state.rows.template lanes<T>();
    if constexpr (F::kTiles) {  // the diagonal of that product
      state.rows.each_run(p, y, 0, [&](const Block& block, int64_t lane, int64_t rows) {
        F::pack_along_columns(block, rows, p.value_dim, b.value + lane * b.ld_value, b.ld_value);
      });
      for (int64_t lane = 0; lane < lanes; lane += W) {
        multiply<F>({W, W, slots_of<F>(p.value_dim)}, {b.value + lane * b.ld_value, b.ld_value},
                    {state.grad_output_t + lane, kRowTile}, b.x, W, Store::set);
        for (int64_t i = 0; i < smaller(W, state.rows.count - lane); ++i) dots[lane + i] += b.x[i * W + i];
      }
    } else {
      constexpr int64_t kDepth = Gemm<F>::kDepth, kNumbers = F::kNumbers;
      for (int64_t first = 0; first < p.value_dim; first += kDepth * kNumbers) {
        const int64_t cols = smaller(kDepth * kNumbers, p.value_dim - first);
        const T* grad_output_t = state.grad_output_t + first / kNumbers * kRowTile;
        state.rows.template pack_columns<F>(p, y, cols, b.x, first);
        for (int64_t lane = 0; lane < lanes; lane += W) {
          Vec<T> sum{};
          for (int64_t d = 0; d < slots_of<F>(cols); ++d)
            sum =
                F::multiply_add(sum, load<T>(b.x + d * kRowTile + lane), load<T>(grad_output_t + d * kRowTile + lane));
          store<T>(dots + lane, load<T>(dots + lane) + sum);
        }
      }
    }
  }

  // Adds <G, y>, as add_products() does, for a `y` whose numbers the format would round.
  static void add_numbers(const Params& p, const Buffers& b, const RowState& state, const Operand& y, T* dots) {
    const int64_t lanes = state.rows.template lanes<T>();
    for (int64_t first = 0; first < p.value_dim; first += kKeyTile) {
      const int64_t cols = smaller(kKeyTile, p.value_dim - first);
      state.rows.pack_transposed(p, y, cols, b.x, first);
      for (int64_t lane = 0; lane < lanes; lane += W) {
        Vec<T> sum{};
        for (int64_t d = 0; d < cols; ++d)
          for (int64_t part = 0; part < F::kSummands; ++part) {
            const Vec<T> slots = load<T>(state.grad_output_t + F::slot(first + d, part) * kRowTile + lane);
            sum += load<T>(b.x + d * kRowTile + lane) * F::number(slots, d % F::kNumbers);
          }
        store<T>(dots + lane, load<T>(dots + lane) + sum);
      }
    }
  }

  struct Keys {
    Rows<T> key, score_key, key_finite, value;
    Rows<T> tangent_key, tangent_key_finite, tangent_value;
  };

  static Keys load_keys(const Params& p, const Buffers& b, int64_t n, int64_t head, Range own) {
    const int64_t key_head = key_head_of(p, head), value_head = value_head_of(p, head);
    const int64_t key = own.first, keys = own.size();
    const auto finite = [&](const Operand& x, T* tile) {
      if (!p.grad_query.data) return Rows<T>{};
      return F::finite_along_rows(block_of(p, x, n, key_head, key), keys, p.head_dim, tile, b.ld_key);
    };
    Keys k{};
    k.key = F::along_columns(block_of(p, p.key, n, key_head, key), keys, p.head_dim, b.key, b.ld_key);
    k.score_key = k.key;
    if constexpr (kRoundsScores) {
      const Block block = block_of(p, p.key, n, key_head, key);
      k.score_key = S::along_columns(block, keys, p.head_dim, b.score_key, b.ld_score_key);
    }
    k.value = F::along_columns(block_of(p, p.value, n, value_head, key), keys, p.value_dim, b.value, b.ld_value);
    k.key_finite = finite(p.key, b.key_finite);
    if constexpr (kSecond) {
      const auto along_columns = [&](const Operand& x, int64_t x_head, int64_t cols, T* tile, int64_t ld) {
        return x.data ? F::along_columns(block_of(p, x, n, x_head, key), keys, cols, tile, ld) : Rows<T>{};
      };
      k.tangent_key = along_columns(p.t.key, key_head, p.head_dim, b.tangent_key, b.ld_key);
      k.tangent_value = along_columns(p.t.value, value_head, p.value_dim, b.tangent_value, b.ld_value);
      if (p.t.key.data) k.tangent_key_finite = finite(p.t.key, b.tangent_key_finite);
    }
    return k;
  }

  // Fills x with P * Z, and dx with dS if `want_dx`. For kSecond, fills x with tP * Z, dx with dS and tdx with t(dS).
  static void weights(const Params& p, const Buffers& b, const RowState& state, const Keys& k, const ScoreTile<T>& tile,
                      bool want_dx, int64_t in_tables = 0) {
    const int64_t keys = tile.keys.size(), lanes = tile.lanes();
    scores<S>(p, tile, state.score_query_t, k.score_key, b.x, b.kept);
    if (p.has_dropout) dropout_factors<T>(p, state.rows, tile.keys, static_cast<T>(p.keep_scale), b.factor);
    const TermGradients& terms = gradients_of_terms(p);
    TablesAhead<T> tables(p, terms.has_tables ? p.program->gradient : nullptr, *tile.rows, tile.keys, terms.tables,
                          in_tables);
    const auto dot_with_grad_output = [&](const Rows<T>& value, T* dots) {
      each_panel_of_lanes<F>(tile, [&](int64_t lane, int64_t count, Range seen) {
        multiply<F>({seen.size(), count, slots_of<F>(p.value_dim)}, rows_from(value, seen.first),
                    {state.grad_output_t + lane, kRowTile}, dots + seen.first * kRowTile + lane, kRowTile, Store::set,
                    tables);
      });
    };
    if (want_dx || kSecond) dot_with_grad_output(k.value, b.dx);
    if constexpr (kSecond) {
      tangent_scores<F>(p, p.t, tile, state.query_t, state.tangent_query_t, k.key, k.tangent_key, b.room, b.kept, b.tz,
                        b.tx);
      if (p.t.value.data)
        dot_with_grad_output(k.tangent_value, b.tdx);
      else
        fill_zero(b.tdx, keys * kRowTile);
    }
    const Vec<T> zero{};
    const T slope = log2_slope<T>(p);
    for (int64_t lane = 0; lane < lanes; lane += W) {
      const Vec<T> delta = load<T>(state.delta + lane), grad_logsumexp = load<T>(state.grad_logsumexp + lane);
      const auto weigh = [&]<int kKeys>(int64_t first,
                                        std::integral_constant<int, kKeys>) __attribute__((always_inline)) {
        Vec<T> found[kKeys];
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) found[i] = load<T>(b.x + (first + i) * kRowTile + lane);
        state.logsumexp->template weights<F>(found, slope, lane);
#pragma GCC unroll 8
        for (int i = 0; i < kKeys; ++i) {
          const int64_t at = (first + i) * kRowTile + lane;
          const Vec<T> weight = found[i], factor = p.has_dropout ? load<T>(b.factor + at) : splat<T>(1);
          // Where the weight is 0, selects 0 instead of multiplying, because a masked key or its value may be NaN and
          // would make a gradient NaN.
          const auto masked = weight == zero;
          if constexpr (kSecond) {
            const Vec<T> dp = load<T>(b.dx + at) * factor - delta + grad_logsumexp;
            const Vec<T> tx_shifted = load<T>(b.tx + at) - load<T>(state.shift + lane);
            const Vec<T> tweight = weight * (tx_shifted - load<T>(state.shifted_sum + lane));
            const Vec<T> tdp = load<T>(b.tdx + at) * factor - load<T>(state.tangent_delta + lane);
            store<T>(b.x + at, masked ? zero : tweight * factor);
            store<T>(b.dx + at, masked ? zero : weight * dp);
            store<T>(b.tdx + at, masked ? zero : tweight * dp + weight * tdp);
          } else {
            store<T>(b.x + at, weight * factor);
            if (want_dx) {
              const Vec<T> dp = load<T>(b.dx + at) * factor - delta + grad_logsumexp;
              store<T>(b.dx + at, masked ? zero : weight * dp);
            }
          }
        }
      };
      constexpr int kAtOnce = kRegisters == 32 ? 4 : 2;
      int64_t j = 0;
      for (; j + kAtOnce <= keys; j += kAtOnce) weigh(j, std::integral_constant<int, kAtOnce>());
      for (; j < keys; ++j) weigh(j, std::integral_constant<int, 1>());
    }
  }

  // Turns dS into cap' dS, and t(dS) into cap' t(dS) + cap'' tz dS. Here tz is the derivative along t of z, the scaled
  // product that the cap takes. Where dS is 0, this function writes 0 and does not multiply, because dS must stay 0 at
  // a hidden key even if the key holds a NaN. The same holds for t(dS).
  static void differentiate_cap(const Params& p, const Buffers& b, const ScoreTile<T>& tile) {
    const auto cap = SoftCap<T>::of(p);
    each_vector(b.dx, tile.keys.size(), tile.lanes(), [&](Vec<T> ds, int64_t j, int64_t i) {
      const Vec<T> zero{}, y = load<T>(b.kept + j * kRowTile + i), slope = cap.slope(y);
      if constexpr (kSecond) {
        T* const at = b.tdx + j * kRowTile + i;
        const Vec<T> tds = load<T>(at), bent = ds == zero ? zero : ds * cap.bend(y) * load<T>(b.tz + j * kRowTile + i);
        store<T>(at, (tds == zero ? zero : tds * slope) + bent);
      }
      return ds == zero ? zero : ds * slope;
    });
  }

  // The places where a task adds the gradients of terms.
  struct Place {
    int64_t first_key, chunk, in_tables;  // `in_tables`: where the task's copy of the tables begins
  };

  // Turns dS into the gradient of scale * product, and t(dS) into the derivative of this gradient. Writes the gradients
  // of pair terms to b.pair_terms. If `of_all` is not null, also adds the gradients of row terms, key terms, distance
  // terms and tables. For kSecond, writes and adds the derivatives of these gradients instead.
  static void differentiate_program(const Params& p, const Buffers& b, const RowState& state, const ScoreTile<T>& tile,
                                    const Place* of_all) {
    const PairProgram& program = *p.program;
    const List& list = kSecond ? *program.tangent_gradient : *program.gradient;
    const Operand* tangent = nullptr;
    if constexpr (kSecond) tangent = &p.t.mask;
    PairTiles<T> tiles = {.product = b.kept, .grad = b.dx, .tangent = b.tz, .tangent_grad = b.tdx};
    tiles = with_pairs(p, list.reads_pairs ? list : *program.gradient, tile, tiles, tangent);
    T* const room = room_of_lists(p, tile);
    Evaluation<T> first_order(p, *program.gradient, tile, tiles, room);
    const List nothing{};
    Evaluation<T> second_order(p, kSecond ? list : nothing, tile, tiles, room + Evaluation<T>::room(program.gradient));
    const Evaluation<T>& found = kSecond ? second_order : first_order;
    const RowTile& rows = *tile.rows;
    const auto add_term = [&](const ResultOfList& result, int64_t first, int64_t count) {
      const Values<T> grad = found.at(result.from);
      const int column = result.of.column;
      if (result.table >= 0) {
        const GradTerms& table = gradients_of_terms(p).tables[result.table];
        if (of_all && table.data && grad.lanes != 0) found.scatter(grad, result, count, table, of_all->in_tables);
      } else if (result.of.leaf == Leaf::pair_term) {
        if (p.grad_mask.data) found.copy(result.from, count, b.pair_terms + first * kRowTile);
      } else if (!of_all || grad.lanes == 0) {  // if grad.lanes is 0, the gradient is the number 0
      } else if (result.of.leaf == Leaf::row_term && gradients_of_terms(p).rows) {
        add_rows<T>(grad, count, tile.lanes(), state.grad_row_terms + column * kRowTile);
      } else if (result.of.leaf == Leaf::key_term && gradients_of_terms(p).keys) {
        const int64_t columns = columns_of(p, Leaf::key_term), key = tile.keys.first - of_all->first_key + first;
        add_lanes<T>(grad, count, rows.count, b.grad_key_terms + key * columns + column, columns);
      } else if (result.of.leaf == Leaf::distance_term && gradients_of_terms(p).distances) {
        const int64_t columns = columns_of(p, Leaf::distance_term), distances = program.queries + program.keys - 1;
        const int64_t of_head = (of_all->chunk * program.batch + p.first_entry + rows.n) * program.heads + rows.head[0];
        const int64_t distance = rows.position[0] - tile.keys.first - first + program.keys - 1;
        add_diagonals<T>(
            grad, count, rows.count,
            static_cast<T*>(gradients_of_terms(p).distances) + (of_head * columns + column) * distances + distance);
      }
    };
    each_strip(tile.keys.size(), [&](int64_t first, int64_t count) {
      // Writes the result directly over dS if nothing else can read dS, neither another result nor a second derivative.
      T* const dx = b.dx + first * kRowTile;
      const bool in_place = !kSecond && list.result_count == 1 && list.step_count > list.uniform_slots;
      first_order.run(first, count, in_place ? dx : nullptr);
      if (kSecond) second_order.run(first, count);
      for (int i = 1; i < list.result_count; ++i) add_term(list.results[i], first, count);
      if (!in_place) first_order.copy(program.gradient->results[0].from, count, dx);
      if (kSecond) second_order.copy(list.results[0].from, count, b.tdx + first * kRowTile);
    });
  }
  static int64_t columns_of(const Params& p, Leaf leaf) { return p.program ? p.program->columns[kind_of(leaf)] : 0; }

  // Adds sum_j dS_ij by_slope(|position - j|) of the tile to state.grad_slopes (score.h).
  static void add_grad_slopes(const Params& p, const Buffers& b, const RowState& state, const ScoreTile<T>& tile) {
    const AlibiTile<T> by_slope(p, tile, nullptr);
    for (int64_t lane = 0; lane < tile.lanes(); lane += W) {
      Vec<T> sum{};
      for (int64_t j = 0; j < tile.keys.size(); ++j) sum += load<T>(b.ds() + j * kRowTile + lane) * by_slope(j, lane);
      store<T>(state.grad_slopes + lane, load<T>(state.grad_slopes + lane) + sum);
    }
  }

  static void run(const Params& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace, tiles_per_pass(p), p.keys_per_task());
    const TermGradients& terms = gradients_of_terms(p);
    int32_t* const turns = terms.turns ? terms.turns + task % terms.lines : nullptr;
    const int64_t in_tables = task % terms.lines / terms.lines_of_copy * terms.copy;
    if (turns) wait_for_turn(turns, static_cast<int32_t>(task / terms.lines));
    const int64_t first_key = task / p.spans() * p.keys_per_task(), spans = p.heads / p.span;
    task %= p.spans();
    const int64_t n = task / spans;
    const int64_t first_head = task % spans * p.span;
    const int64_t keys = smaller(p.keys_per_task(), p.keys - first_key);  // gradients beyond the sequence's keys are 0
    const int64_t rows = p.rows();
    const int64_t per_key_head = p.heads / p.key_heads;
    const int64_t per_value_head = p.heads / p.value_heads;

    for (int64_t head = first_head; head < first_head + p.span; head += p.group) {
      if (p.grad_key.data && head % per_key_head == 0) fill_zero(b.grad_key, keys * b.ld_key);
      if (p.grad_value.data && head % per_value_head == 0) fill_zero(b.grad_value, keys * b.ld_value);
      const int64_t key_columns = columns_of(p, Leaf::key_term);
      if (terms.keys) fill_zero(b.grad_key_terms, keys * key_columns);
      for (int64_t row = 0; row < rows; row += p.rows_per_pass)
        pass(p, b, {n, head, {row, smaller(row + p.rows_per_pass, rows)}, {first_key, first_key + keys}}, in_tables);
      if (terms.keys) {
        const int64_t of_head = (p.first_entry + n) * p.heads + head;
        __builtin_memcpy(static_cast<T*>(terms.keys) + (of_head * p.program->keys + first_key) * key_columns,
                         b.grad_key_terms, static_cast<size_t>(keys * key_columns) * sizeof(T));
      }
      const int64_t next = head + p.group;
      if (p.grad_key.data && next % per_key_head == 0) {
        scale_tile<T>(b.grad_key, keys * b.ld_key, ScoreFunction<T>::of(p).slope());
        unpack_rows<T>(block_of(p, p.grad_key, n, head / per_key_head, first_key), b.grad_key, b.ld_key, keys,
                       p.head_dim);
      }
      if (p.grad_value.data && next % per_value_head == 0)
        unpack_rows<T>(block_of(p, p.grad_value, n, head / per_value_head, first_key), b.grad_value, b.ld_value, keys,
                       p.value_dim);
    }
    if (turns) end_turn(turns);
  }

  static void pass(const Params& p, const Buffers& b, const RowTask& own, int64_t in_tables) {
    const bool direct_mask = p.grad_mask.data && !p.mask_is_shared;
    const bool has_rows = p.grad_query.data || p.grad_slopes || gradients_of_terms(p).rows;
    const bool want_dx = has_rows || p.grad_key.data || direct_mask || gradients_of_terms(p).keys ||
                         gradients_of_terms(p).distances || gradients_of_terms(p).has_tables;
    const Range positions = positions_of(p, own.rows), chunks = chunks_of(p, own.n, positions);
    const Range own_chunks =
        common(chunks, {own.keys.first / p.keys_per_chunk, divide_up(own.keys.last, p.keys_per_chunk)});
    if (own_chunks.empty()) return;  // because no row of the pass sees a key of the task
    const RowTiles<RowState> row_tiles(p, own, b.states, [&](RowState& state) {
      if (any_visible(state.rows.sequence, state.rows.positions, own.keys)) load_rows(p, b, state);
    });
    Keys k;
    Place place{own.keys.first, own_chunks.first, in_tables};
    const auto load = [&](Range keys) { k = load_keys(p, b, own.n, own.first_head, keys); };
    const auto visit = [&](RowState& state, const ScoreTile<T>& tile) {
      weights(p, b, state, k, tile, want_dx, in_tables);
      const RowTile& rows = state.rows;
      const int64_t first = tile.keys.first - own.keys.first;
      T *const grad_key = b.grad_key + first * b.ld_key, *const grad_value = b.grad_value + first * b.ld_value;
      const auto add_to_keys = [&](T* grad, int64_t cols, int64_t ld, const T* weights, const T* x) {
        each_panel_of_keys<F>(tile, [&](int64_t j, int64_t count, int64_t lane) {
          const Rows<T> a = F::along_lanes(weights + j * kRowTile + lane, count, rows.count - lane, b.lanes);
          multiply<F>({count, round_up(cols, W), slots_of<F>(rows.count - lane)}, a, {x + F::slot(lane, 0) * ld, ld},
                      grad + j * ld, ld, Store::add);
        });
      };
      const auto add_to_queries = [&](T* weights, const Rows<T>& x) {  // overwrites the weights
        const T* dx = F::along_keys(weights, tile.keys.size(), tile.lanes(), b.weights);
        each_panel_of_lanes<F>(tile, [&](int64_t lane, int64_t count, Range seen) {
          const int64_t slot = F::slot(seen.first, 0);
          multiply_transposed<F>({p.head_dim, count, slots_of<F>(seen.size())}, rows_from(x, slot),
                                 {dx + slot * kRowTile + lane, kRowTile}, state.grad_query_t + lane, kRowTile,
                                 Store::add);
        });
      };
      const auto unpack_mask = [&] {
        rows.unpack_transposed(p, p.grad_mask, tile.keys.size(), b.of_mask(p), tile.keys.first);
      };
      if (p.grad_value.data) add_to_keys(grad_value, p.value_dim, b.ld_value, b.x, state.grad_output);
      if (p.grad_slopes) add_grad_slopes(p, b, state, tile);
      if (direct_mask && !p.program) unpack_mask();
      if (p.softcap > 0 && want_dx) differentiate_cap(p, b, tile);
      if (has_score_mod(p) && want_dx) differentiate_program(p, b, state, tile, &place);
      if (direct_mask && p.program) unpack_mask();
      if (p.grad_key.data) add_to_keys(grad_key, p.head_dim, b.ld_key, b.ds(), state.query);
      if (p.grad_query.data) add_to_queries(b.ds(), k.key_finite);
      if constexpr (kSecond) {
        if (p.grad_key.data && p.t.query.data) add_to_keys(grad_key, p.head_dim, b.ld_key, b.dx, state.tangent_query);
        if (p.grad_query.data && p.t.key.data) add_to_queries(b.dx, k.tangent_key_finite);
      }
    };
    for (int64_t& chunk = place.chunk; chunk < own_chunks.last; ++chunk) {
      for (RowState& state : row_tiles) {
        if (p.grad_query.data) fill_zero(state.grad_query_t, p.head_dim * kRowTile);
        if (p.grad_slopes) fill_zero(state.grad_slopes, kRowTile);
        if (gradients_of_terms(p).rows) fill_zero(state.grad_row_terms, columns_of(p, Leaf::row_term) * kRowTile);
        if (state.rows.grad_tables) fill_zero(state.grad_tables, size_transposed(p));
      }
      const Range keys = common(own.keys, {chunk * p.keys_per_chunk, (chunk + 1) * p.keys_per_chunk});
      const RowTask part(own.n, own.first_head, own.rows, keys);
      each_visible_tile(p, row_tiles, part.keys_seen(p, row_tiles.positions), b.room, load, visit);
      for (RowState& state : row_tiles) add_tables<T>(p, state.rows, gradients_of_terms(p).tables, in_tables);
      if (has_rows) add_to_rows(p, b, own, row_tiles, chunks, chunk);
    }
  }

  // Returns the chunks of keys that queries at these positions see, or the first chunk if they see no key.
  static Range chunks_of(const Params& p, int64_t n, Range positions) {
    const Range keys = visible_keys(sequence_of(p, n), positions);
    if (keys.empty()) return {0, 1};
    return {keys.first / p.keys_per_chunk, (keys.last - 1) / p.keys_per_chunk + 1};
  }

  // Adds the share of a chunk of keys to the gradients of queries, slopes and row terms. `chunks` are the chunks that
  // the rows see. The share of the first of these chunks is written, not added.
  static void add_to_rows(const Params& p, const Buffers& b, const RowTask& own, const RowTiles<RowState>& row_tiles,
                          Range chunks, int64_t chunk) {
    const bool is_first = chunk == chunks.first, is_last = chunk + 1 == chunks.last;
    const int64_t pass =
        (own.n * p.groups() + own.first_head / p.group) * p.passes() + own.rows.first / p.rows_per_pass;
    if (p.turns) wait_for_turn(p.turns + pass, static_cast<int32_t>(chunk - chunks.first));
    for (RowState& state : row_tiles) {
      for (int64_t i = 0; i < state.rows.count && p.grad_slopes; ++i) {
        T& sum = static_cast<T*>(p.grad_slopes)[state.rows.number(p, i)];
        sum = is_first ? state.grad_slopes[i] : sum + state.grad_slopes[i];
      }
      const int64_t columns = gradients_of_terms(p).rows ? columns_of(p, Leaf::row_term) : 0;
      for (int64_t i = 0; i < state.rows.count; ++i)
        for (int64_t c = 0; c < columns; ++c) {
          const int64_t row = ((p.first_entry + own.n) * p.heads + state.rows.head[i]) * p.program->queries;
          T& sum = static_cast<T*>(gradients_of_terms(p).rows)[(row + state.rows.position[i]) * columns + c];
          sum = is_first ? state.grad_row_terms[c * kRowTile + i] : sum + state.grad_row_terms[c * kRowTile + i];
        }
      if (!p.grad_query.data) continue;
      scale_tile<T>(state.grad_query_t, p.head_dim * kRowTile, ScoreFunction<T>::of(p).slope());
      if (p.all_chunks_at_once) {
        if (!is_first)
          each_vector(state.grad_query_t, p.head_dim, state.rows.template lanes<T>(),
                      [&](Vec<T> x, int64_t j, int64_t i) { return load<T>(state.sum_t + j * kRowTile + i) + x; });
        if (is_last) {
          state.rows.unpack_transposed(p, p.grad_query, p.head_dim, state.grad_query_t);
        } else {
          T* const sum = state.grad_query_t;
          state.grad_query_t = state.sum_t;
          state.sum_t = sum;
        }
        continue;
      }
      for (int64_t d = 0; d < p.head_dim && !is_first; d += kKeyTile) {
        const int64_t depth = smaller(kKeyTile, p.head_dim - d);
        T* const share = state.grad_query_t + d * kRowTile;
        state.rows.pack_transposed(p, p.grad_query_sum, depth, b.x, d);
        each_vector(share, depth, state.rows.template lanes<T>(),
                    [&](Vec<T> x, int64_t j, int64_t i) { return load<T>(b.x + j * kRowTile + i) + x; });
      }
      state.rows.unpack_transposed(p, is_last ? p.grad_query : p.grad_query_sum, p.head_dim, state.grad_query_t);
    }
    if (p.turns) end_turn(p.turns + pass);
  }

  // The gradients of whole rows. A sink has the weight w = exp(sink - logsumexp) and the gradient -w (delta - g). A
  // number added to all scores of a row has the gradient sum_j dS_ij, which is g minus the gradient of the sink.
  // If kSecond, computes the derivatives of these two gradients along t. They contain t(w) = w (t(sink) - c), with
  // c = t(logsumexp).
  static void rows(const Params& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace, 1, 0);
    RowState& state = b.states[0];
    const int64_t group = task / p.row_tiles(), first = task % p.row_tiles() * kRowTile;
    state.rows.set(p, group / p.groups(), group % p.groups() * p.group, {first, smaller(first + kRowTile, p.rows())});
    load_rows(p, b, state);
    const RowTile& rows = state.rows;
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t number = rows.number(p, i), of_head = rows.n * p.heads + rows.head[i];
      const bool has_keys = state.logsumexp->reference[i] != kInfinity<T>;
      const double weight = weight_of_sink(p, sink_of<T>(p, of_head), *state.logsumexp, i);
      const double grad_logsumexp = state.grad_logsumexp[i], delta = state.delta[i] - grad_logsumexp;
      double of_sink = -weight * delta, of_mask = has_keys ? grad_logsumexp - of_sink : 0;
      if constexpr (kSecond) {
        const double tangent = p.t.sinks ? static_cast<const T*>(p.t.sinks)[of_head] : 0;
        const double moved = weight * (tangent - state.shift[i] - state.shifted_sum[i]);
        of_sink = -moved * delta - weight * state.tangent_delta[i];
        of_mask = has_keys ? -of_sink : 0;
      }
      if (p.grad_sinks) static_cast<T*>(p.grad_sinks)[number] = static_cast<T>(of_sink);
      if (p.grad_mask_rows) static_cast<T*>(p.grad_mask_rows)[number] = static_cast<T>(of_mask);
    }
  }

  // The gradient of a mask that several heads or rows share. A task owns a block of the mask, and sums dS over all
  // heads and rows that share the block. (rows() computes the gradient of a mask with one number per row.)
  static void mask(const Params& p, int64_t task, char* workspace) {
    const Buffers b(p, workspace, 1, 0);
    RowState& state = b.states[0];
    Arena after(workspace + b.size);
    T* sum = after.take<T>(kKeyTile * kRowTile);
    const bool one_row = p.mask_row_tasks == 1 && p.grad_mask.row == 0;
    const int64_t key_task = task % p.mask_key_tasks;
    task /= p.mask_key_tasks;
    const int64_t row_task = task % p.mask_row_tasks;
    const int64_t slice = task / p.mask_row_tasks;
    const int64_t first_row = one_row ? 0 : row_task * kRowTile;
    const int64_t last_row = one_row ? p.queries : smaller(first_row + kRowTile, p.queries);
    const int64_t first_key = key_task * kKeyTile;
    const int64_t last_key = smaller(first_key + kKeyTile, p.keys);

    fill_zero(sum, kKeyTile * kRowTile);
    const int64_t sharers = p.batch * p.heads / p.mask_slices;
    for (int64_t sharer = 0; sharer < sharers; ++sharer) {
      const Row at = sharer_of_mask(p, p.grad_mask, slice, sharer);
      const Sequence sequence = sequence_of(p, at.n);
      const int64_t last = smaller(last_row, sequence.queries);
      for (int64_t row = first_row; row < last; row += kRowTile) {
        state.rows.set(p, at.n, at.head, {row, smaller(row + kRowTile, last)});
        const Range seen = common(visible_keys(sequence, state.rows.positions), {first_key, last_key});
        ScoreTile<T> tile;
        if (seen.empty() || !tile.set(p, state.rows, {first_key, seen.last}, b.room)) continue;
        load_rows(p, b, state);
        weights(p, b, state, load_keys(p, b, at.n, at.head, tile.keys), tile, true);
        // With a cap, the mask is added behind it, so its gradient is dS itself.
        if (has_score_mod(p)) differentiate_program(p, b, state, tile, nullptr);
        T* const shares = b.of_mask(p);
        state.rows.fill_empty_lanes(shares, tile.keys.size(), T{0});
        each_vector(sum, tile.keys.size(), tile.lanes(),
                    [&](Vec<T> s, int64_t j, int64_t i) { return s + load<T>(shares + j * kRowTile + i); });
      }
    }
    const Row target = sharer_of_mask(p, p.grad_mask, slice, 0);
    const int64_t keys = last_key - first_key;
    int64_t rows = smaller(kRowTile, last_row - first_row);
    if (one_row) {
      for (int64_t j = 0; j < keys; ++j)
        for (int64_t i = 1; i < rows; ++i) sum[j * kRowTile] += sum[j * kRowTile + i];
      rows = 1;
    }
    unpack_transposed<T>(block_of(p, p.grad_mask, target.n, target.head, first_row, first_key), sum, kRowTile, rows,
                         keys);
  }

  // The size of a workspace for run() and for mask().
  static int64_t workspace(const Params& p) {
    constexpr int64_t kSize = sizeof(T);
    const int64_t run_size = Buffers(p, nullptr, tiles_per_pass(p), p.keys_per_task()).size;
    const int64_t mask_size = Buffers(p, nullptr, 1, 0).size + kKeyTile * kRowTile * kSize;
    return larger(run_size, mask_size);
  }
  static int64_t tiles_per_pass(const Params& p) { return (p.rows_per_pass + kRowTile - 1) / kRowTile; }
};

}  // namespace attn::ATTN_ISA
