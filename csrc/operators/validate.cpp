#include "operators/validate.h"

#include <ATen/ATen.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/geometry.h"

namespace attn {

namespace {

using at::Tensor;
using c10::SymInt;

SymInt extent(const Tensor& t, int64_t dim_from_end) { return t.sym_sizes()[t.dim() - dim_from_end]; }

// torch.compile and torch.export may not know a size until run time. is_one() is false for such a size, and
// must_equal() makes the compiled program check the size at run time.
bool is_one(const SymInt& size) { return TORCH_GUARD_OR_FALSE(size.sym_eq(1)); }
bool must_equal(const SymInt& a, const SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }
bool must_equal(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const SymInt& x, const SymInt& y) { return must_equal(x, y); });
}

// Whether a tensor broadcasts to `allowed` without enlarging it. The last `exact` sizes of the tensor must equal those
// of `allowed`.
bool broadcasts(const Tensor& t, c10::SymIntArrayRef allowed, int64_t exact = 0) {
  bool fits = t.dim() >= exact && t.dim() <= static_cast<int64_t>(allowed.size());
  for (int64_t d = 1; fits && d <= t.dim(); ++d) {
    const SymInt own = extent(t, d), other = allowed[allowed.size() - d];
    fits = (d > exact && is_one(own)) || must_equal(own, other);
  }
  return fits;
}

SymInt head_count(const Tensor& t) { return t.dim() >= 3 ? extent(t, 3) : SymInt(1); }

// `least_dims`: the number of dimensions that `shape` requires.
void check_tensor(const char* op, const char* name, const Tensor& t, const Tensor& query, int64_t least_dims = 2,
                  const char* shape = "[..., length, head_dim]") {
  TORCH_CHECK(t.defined(), op, ": ", name, " is undefined; a tensor is needed");
  TORCH_CHECK(!t.is_nested() && t.layout() != at::kJagged, op, ": ", name,
              " is a nested tensor; it must be a dense one: take query, key and value apart by .unbind() and call ", op,
              " for each, or pad them by torch.nested.to_padded_tensor and hide the padding by a mask");
  TORCH_CHECK(t.layout() == at::kStrided, op, ": ", name, " has layout ", t.layout(),
              "; it must be a dense (strided) tensor");
  TORCH_CHECK(t.device() == query.device(), op, ": ", name, " is on ", t.device(), " but query is on ", query.device(),
              "; all tensors must be on the same device");
  TORCH_CHECK(t.dim() >= least_dims, op, ": ", name, " has shape ", t.sym_sizes(), "; it must have at least ",
              least_dims, " dimensions: ", shape);
}

// `name`: of key or value.
void check_dtype_of_keys(const char* op, const char* name, const Tensor& t, const Tensor& query) {
  const auto dtype = query.scalar_type(), own = t.scalar_type();
  if (!is_8_bit(t)) {
    TORCH_CHECK(own == dtype, op, ": ", name, " has dtype ", own, " but query has ", dtype,
                "; query, key and value must have the same dtype");
    return;
  }
  const char* why = nullptr;
  if (op != SdpaOp::name && op != AttentionOp::name && op != VarlenOp::name)
    why = "the operator takes no numbers of 8 bits";
  if (dtype == at::kDouble) why = "beside numbers of 8 bits, query must be float32, bfloat16 or float16";
  TORCH_CHECK(!why, op, ": ", name, " has dtype ", own, " and query ", dtype, " on ", query.device(), "; ", why,
              "; convert ", name, ": ", name, ".to(query.dtype) * ", name, "_scale[..., None]");
}

void check_dtypes(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                  const std::optional<Tensor>& mask) {
  const auto dtype = query.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble, op,
              ": query has dtype ", dtype, "; it must be float64, float32, bfloat16 or float16");
  check_dtype_of_keys(op, "key", key, query);
  check_dtype_of_keys(op, "value", value, query);
  if (!mask) return;
  const auto mask_dtype = mask->scalar_type();
  TORCH_CHECK(mask_dtype == at::kBool || mask_dtype == dtype || mask_dtype == at::kFloat, op, ": attn_mask has dtype ",
              mask_dtype, "; it must be bool (True = attend), query's dtype (", dtype, ") or float32",
              at::isIntegralType(mask_dtype, /*includeBool=*/false)
                  ? "; a tokenizer's mask of 0 and 1 is given as mask.bool()"
                  : "");
}

// Returns a hint if the tensors look like [B, L, H, E] and [B, S, H, E], with the length where the heads should be.
// Call this function only to write an error message, because a comparison of sizes becomes a condition of an exported
// program.
const char* layout_hint(const Tensor& query, const Tensor& key) {
  const bool looks_like_it = query.dim() == 4 && key.dim() == 4 &&
                             TORCH_GUARD_OR_FALSE(extent(query, 2).sym_eq(extent(key, 2))) &&
                             TORCH_GUARD_OR_FALSE(extent(query, 3).sym_gt(extent(query, 2)));
  return looks_like_it ? "; tensors [batch, length, heads, head_dim] are given as x.transpose(1, 2)" : "";
}

// With grouped-query attention, each key (value) head serves the same number of consecutive query heads.
void check_head_count(const char* op, const char* name, const SymInt& heads, const SymInt& query_heads, bool enable_gqa,
                      const Tensor& query, const Tensor& key) {
  if (!enable_gqa) {
    TORCH_CHECK(is_one(heads) || must_equal(heads, query_heads), op, ": ", name, " has ", heads,
                " heads but the others have ", query_heads,
                "; the numbers must be equal or 1, or divide the query's with enable_gqa=True",
                layout_hint(query, key));
    return;
  }
  if (TORCH_GUARD_OR_FALSE(heads.sym_eq(query_heads))) return;
  TORCH_CHECK(TORCH_GUARD_OR_TRUE(heads.sym_ne(0)) && must_equal(query_heads % heads, 0), op, ": ", name, " has ",
              heads, " heads but query has ", query_heads, "; with enable_gqa=True the number must divide the query's",
              layout_hint(query, key));
}

// Broadcasts dimension `d` (counted from the end) of the three tensors.
SymInt broadcast(const char* op, const Tensor& query, const Tensor& key, const Tensor& value, int64_t d) {
  SymInt common = 1;
  for (const Tensor* t : {&query, &key, &value}) {
    if (t->dim() < d) continue;
    const SymInt own = extent(*t, d);
    if (is_one(own)) continue;
    TORCH_CHECK(is_one(common) || must_equal(own, common), op, ": ", t == &key ? "key" : "value", " has shape ",
                t->sym_sizes(), ", which does not broadcast against the other leading dimensions: query has ",
                query.sym_sizes(), ", key ", key.sym_sizes(), "; at dimension ", -d, " the sizes must be equal or 1");
    common = own;
  }
  return common;
}

void check_mask(const Tensor& mask, const Shape& shape, const Call& call) {
  const bool packed = shape.sequences.has_value();
  const auto allowed = shape.expanded(shape.heads, shape.queries, packed ? call.max_k : shape.keys);
  if (packed ? mask.dim() >= 3 && broadcasts(mask, allowed, 2) : broadcasts(mask, allowed)) return;
  TORCH_CHECK(!packed, shape.op, ": attn_mask has shape ", mask.sym_sizes(),
              "; it must be [Hq or 1, T_q, max_k] = ", c10::SymIntArrayRef(allowed),
              ": a row for each query, over the keys of its own sequence");
  // Tokenizers return masks [batch, S]. These masks lack the dimensions of heads and queries. Masks [batch, L, S] lack
  // the dimension of heads. The hint says how to add what is missing.
  const bool of_samples = shape.dims >= 3 && mask.sym_sizes()[0] == allowed[0] && extent(mask, 1) == shape.keys;
  const char* hint = "";
  if (of_samples && mask.dim() == 2 && shape.dims == 3) {
    hint = "; a padding mask [batch, S] is given as mask[:, None, :]";
  } else if (of_samples && mask.dim() == 2 && shape.dims == 4) {
    hint = "; a padding mask [batch, S] is given as mask[:, None, None, :]";
  } else if (of_samples && mask.dim() == 2) {
    hint = "; a padding mask [batch, S] needs dimensions of size 1 between the two";
  } else if (of_samples && mask.dim() == 3 && shape.dims == 4 && extent(mask, 2) == shape.queries) {
    hint = "; a mask [batch, L, S] for all heads is given as mask[:, None]";
  } else if (std::string_view(shape.op) == "attn::sdpa_stats" && mask.dim() >= 2 && extent(mask, 2) == shape.keys) {
    hint = "; there is no value: the third argument is attn_mask";
  }
  TORCH_CHECK(false, shape.op, ": attn_mask has shape ", mask.sym_sizes(),
              "; it must broadcast to the scores' shape [..., L, S] = ", c10::SymIntArrayRef(allowed), hint);
}

// Checks a tensor with a number per batch entry or head. Its sizes must broadcast to `allowed`. Its last `exact` sizes
// must be equal to the last sizes of `allowed`.
void check_numbers(const Shape& shape, const char* name, const Tensor& t, const Tensor& query,
                   c10::SymIntArrayRef allowed, int64_t exact, const char* what) {
  TORCH_CHECK(t.defined() && t.layout() == at::kStrided && !t.is_nested(), shape.op, ": ", name,
              " must be a dense tensor");
  TORCH_CHECK(t.device() == query.device(), shape.op, ": ", name, " is on ", t.device(), " but query is on ",
              query.device(), "; all tensors must be on the same device");
  TORCH_CHECK(broadcasts(t, allowed, exact), shape.op, ": ", name, " has shape ", t.sym_sizes(), "; it must be ", what,
              " and broadcast to ", allowed);
}

void check_per_head(const Shape& shape, const char* name, const std::optional<Tensor>& t, const Tensor& query) {
  if (!t) return;
  check_numbers(shape, name, *t, query, shape.of_heads(), 1, "[Hq] or [B..., Hq]: one number a head of the output,");
  const auto dtype = query.scalar_type(), own = t->scalar_type();
  TORCH_CHECK(own == dtype || (own == at::kFloat && dtype != at::kDouble), shape.op, ": ", name, " has dtype ", own,
              "; it must be query's dtype (", dtype, ")", dtype == at::kDouble ? "" : " or float32");
}

// Checks that functions of the pair are called with arguments that they can stand beside.
void check_beside_program(const Shape& shape, const Call& call) {
  const auto refuse = [&](bool is, const char* name, const std::string& instead) {
    TORCH_CHECK(!is, shape.op, ": ", call.score_mod ? "score_mod" : "mask_mod", " is given beside ", name, "; ",
                instead);
  };
  refuse(call.attn_mask && !call.score_mod, "attn_mask",
         "give it as a score_mod: score + attn_mask[b, h, q_idx, kv_idx]");
  const Call by_default;
  const auto refuse_term = [&](size_t i, const auto& given, const auto& usual) {
    const About& about = BeyondBuiltin::about(i);
    if (about.in_score_mod)
      refuse(!is_default(given, usual), about.name, c10::str("say it in the function: ", about.in_score_mod));
  };
  for_each_of(refuse_term, BeyondBuiltin::fields(call), BeyondBuiltin::fields(by_default));
  refuse(call.is_packed(), "cu_seq_q", "packed sequences take no function of the pair");
  TORCH_CHECK(!call.query.is_cuda(), shape.op, ": query is on ", call.query.device(),
              "; functions of the pair run on a CPU, and torch.nn.attention.flex_attention on a GPU");
  TORCH_CHECK(shape.dims >= 3, shape.op, ": query has shape ", call.query.sym_sizes(), "; it must have heads");
}

// Compiles the strings of a call, and checks that both functions can read the call's tables and attn_mask.
Programs compile_programs(const Shape& shape, const Call& call) {
  Programs programs;
  auto& [score_mod, mask_mod, reads] = programs;
  bool reads_pairs = false;
  const auto add = [&](const char* name, const std::optional<std::string>& text, auto& compiled) {
    if (!text) return;
    compiled = compile(shape.op, name, *text);
    TORCH_CHECK(!compiled->is_wide || &text == &call.mask_mod || compute_dtype(call.query) == at::kDouble, shape.op,
                ": score_mod needs whole numbers of 64 bits, which it has beside a query of float64 alone; query has ",
                "dtype ", call.query.scalar_type());
    for (int i = 0; i < kTermKinds; ++i) reads.columns[i] = std::max(reads.columns[i], compiled->columns[i]);
    for (int t = 0; t < kMostTables; ++t) {
      const auto& of = compiled->tables[t];
      TORCH_CHECK(!reads.tables[t] || !of || reads.tables[t] == of, shape.op, ": score_mod and mask_mod read tables[",
                  t, "] as different kinds");
      if (of) reads.tables[t] = of;
      TORCH_CHECK(!of || t < static_cast<int>(call.tables.size()), shape.op, ": tables has ", call.tables.size(),
                  " tensors; the program reads tables[", t, "]");
    }
    reads_pairs |= compiled->list.reads_pairs;
  };
  add("score_mod", call.score_mod, score_mod);
  add("mask_mod", call.mask_mod, mask_mod);
  TORCH_CHECK(reads_pairs == call.attn_mask.has_value(), shape.op, ": attn_mask is ",
              reads_pairs ? "None, but score_mod reads it" : "given, but score_mod does not read it");
  TORCH_CHECK(!call.attn_mask || call.attn_mask->is_floating_point(), shape.op, ": attn_mask has dtype ",
              call.attn_mask->scalar_type(), "; score_mod reads numbers, so it must be floating");
  return programs;
}

// Checks a tensor [*batch, heads, rows, columns] that functions of the pair read. `least`: how many columns they read.
void check_of_program(const Shape& shape, const char* name, const std::optional<Tensor>& t, const Tensor& query,
                      int least, const SymInt& rows, at::ScalarType dtype) {
  if (!t) {
    TORCH_CHECK(least == 0, shape.op, ": ", name, " is None; the program reads ", least, " of its columns");
    return;
  }
  check_tensor(shape.op, name, *t, query, 2, "[..., H, length, columns]");
  TORCH_CHECK(t->scalar_type() == dtype, shape.op, ": ", name, " has dtype ", t->scalar_type(), "; it must be ", dtype);
  const auto allowed = shape.expanded(shape.heads, rows, extent(*t, 1));
  const bool fits = TORCH_GUARD_OR_TRUE(extent(*t, 1).sym_ge(least)) && broadcasts(*t, allowed, 2);
  TORCH_CHECK(fits, shape.op, ": ", name, " has shape ", t->sym_sizes(), "; it must broadcast to ",
              c10::SymIntArrayRef(allowed), " and have at least ", least, " columns");
}

// Checks that the tensors of a program have all columns and tables that the strings read.
void check_program_tensors(const Shape& shape, const Call& call, const Reads& reads) {
  const auto dtype = compute_dtype(call.query);
  const SymInt distances = (shape.queries + shape.keys - 1).max(0);
  const auto check_terms = [&](const char* name, const std::optional<Tensor>& t, Leaf leaf, const SymInt& rows) {
    check_of_program(shape, name, t, call.query, reads.columns[kind_of(leaf)], rows,
                     leaf < Leaf::row_number ? dtype : at::kInt);
  };
  check_terms("row_terms", call.row_terms, Leaf::row_term, shape.queries);
  check_terms("key_terms", call.key_terms, Leaf::key_term, shape.keys);
  check_terms("distance_terms", call.distance_terms, Leaf::distance_term, distances);
  check_terms("row_numbers", call.row_numbers, Leaf::row_number, shape.queries);
  check_terms("key_numbers", call.key_numbers, Leaf::key_number, shape.keys);
  check_terms("distance_numbers", call.distance_numbers, Leaf::distance_number, distances);
  for (size_t t = 0; t < call.tables.size(); ++t) {
    const SymInt rows = rows_of(reads.tables[t].value_or(TableOf::all), shape.queries, shape.keys);
    check_of_program(shape, c10::str("tables[", t, "]").c_str(), call.tables[t], call.query,
                     reads.tables[t].has_value(), rows, dtype);
  }
  if (!call.blocks) return;
  const auto [rows, keys] = call.block_size;
  TORCH_CHECK(rows > 0 && keys > 0, shape.op, ": block_size is (", rows, ", ", keys, "); both must be positive");
  check_of_program(shape, "blocks", call.blocks, call.query, 0, (shape.queries + (rows - 1)) / rows, at::kByte);
  TORCH_CHECK(must_equal(extent(*call.blocks, 1), (shape.keys + (keys - 1)) / keys), shape.op, ": blocks has shape ",
              call.blocks->sym_sizes(), "; its last two sizes must be the numbers of blocks of ", shape.queries,
              " queries and ", shape.keys, " keys");
}

// Checks everything that belongs to functions of the pair, and returns the functions.
Programs checked_programs(const Shape& shape, const Call& call) {
  check_beside_program(shape, call);
  Programs programs = compile_programs(shape, call);
  check_program_tensors(shape, call, programs.reads);
  return programs;
}

// Whether the values of a tensor of integers can be read without waiting for a device.
bool is_readable(const Tensor& t) {
  return t.is_cpu() && t.has_storage() && !t.is_meta() && !at::isTensorSubclassLike(t);
}
void check_is_integer(const Shape& shape, const char* name, const Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, shape.op, ": ", name, " has dtype ",
              t.scalar_type(), "; it must be int32 or int64");
}

// Checks a tensor of integers, and its values if they can be read (is_readable). `most(i)` is the largest value that
// entry i may have.
void check_integers(const Shape& shape, const char* name, const std::optional<Tensor>& t, const Tensor& query,
                    int64_t least, const auto& most) {
  if (!t) return;
  check_numbers(shape, name, *t, query, shape.of_entries(), shape.sequences ? 1 : 0,
                shape.sequences ? "[N]: one number a sequence," : "one number or [B...]: one a batch entry,");
  check_is_integer(shape, name, *t);
  if (!is_readable(*t)) return;
  for (int64_t i = 0; i < t->numel(); ++i) {
    const int64_t n = number_at(*t, i), last = most(i);
    TORCH_CHECK(least <= n && n <= last, shape.op, ": ", name, " is ", n,
                t->numel() > 1 ? c10::str(" at entry ", i) : "", "; it must be between ", least, " and ", last);
  }
}

// Checks a tensor that says where each of N sequences begins and where the last one ends. The sequences may hold at
// most `tokens` tokens, and `most` tokens each.
void check_starts(const Shape& shape, const char* name, const Tensor& t, const Tensor& query, const char* tokens_name,
                  const SymInt& tokens, const char* most_name, const SymInt& most) {
  TORCH_CHECK(t.defined(), shape.op, ": ", name, " is undefined; a tensor is needed");
  TORCH_CHECK(t.layout() == at::kStrided && !t.is_nested() && t.device() == query.device() && t.dim() == 1 &&
                  TORCH_GUARD_OR_TRUE(t.sym_numel().sym_ge(1)),
              shape.op, ": ", name, " has shape ", t.sym_sizes(), " on ", t.device(),
              "; it must be [N + 1], where each of N sequences begins and the last one ends, on ", query.device());
  check_is_integer(shape, name, t);
  if (!is_readable(t)) return;
  const int64_t last = tokens.guard_int(__FILE__, __LINE__), longest = most.guard_int(__FILE__, __LINE__);
  TORCH_CHECK(number_at(t, 0) == 0, shape.op, ": ", name, " begins with ", number_at(t, 0), "; it must begin with 0");
  for (int64_t i = 1; i < t.numel(); ++i) {
    const int64_t before = number_at(t, i - 1), n = number_at(t, i);
    TORCH_CHECK(before <= n && n <= last, shape.op, ": ", name, " is ", n, " at entry ", i, ", after ", before,
                "; it must not decrease, and not pass ", tokens_name, " = ", last);
    TORCH_CHECK(n - before <= longest, shape.op, ": ", most_name, " is ", longest, ", but sequence ", i - 1, " of ",
                name, " has length ", n - before, "; it must be the largest length, or more");
  }
}

// Checks packed sequences, and fills in shape.sequences.
void check_packing(Shape& shape, const Call& call) {
  const auto& [query, cu_seq_q, cu_seq_k, max_q, max_k, block_table] =
      std::tie(call.query, call.cu_seq_q, call.cu_seq_k, call.max_q, call.max_k, call.block_table);
  TORCH_CHECK(shape.dims >= 3, shape.op, ": packed sequences need a dimension of heads");
  for (const auto& [name, most] : {std::pair("max_q", &max_q), std::pair("max_k", &max_k)})
    TORCH_CHECK(most->sym_ge(0).expect_true(__FILE__, __LINE__), shape.op, ": ", name, " is ", *most,
                "; it must be the largest length of a sequence, or more");
  check_starts(shape, "cu_seq_q", *cu_seq_q, query, "T_q", shape.queries, "max_q", max_q);
  shape.sequences = cu_seq_q->sym_numel() - 1;
  if (!cu_seq_k) {
    TORCH_CHECK(block_table, shape.op, ": cu_seq_k is None; that is possible with a block_table only");
    return;
  }
  // With a block_table, seqused_k says how many keys each sequence has, and no kernel reads cu_seq_k. A cu_seq_k that
  // is given is checked all the same.
  const SymInt tokens = block_table ? SymInt(std::numeric_limits<int64_t>::max()) : shape.keys;
  check_starts(shape, "cu_seq_k", *cu_seq_k, query, "T_k", tokens, "max_k", block_table ? tokens : max_k);
  TORCH_CHECK(must_equal(cu_seq_q->sym_numel(), cu_seq_k->sym_numel()), shape.op, ": cu_seq_k has ",
              cu_seq_k->sym_numel(), " entries but cu_seq_q has ", cu_seq_q->sym_numel(), "; they must be as many");
}

// Checks a block_table. Call this function after check_packing() and after the check that seqused_k holds integers [N].
void check_pages(const Shape& shape, const Call& call) {
  const Tensor &query = call.query, &key = call.key, &table = *call.block_table;
  const std::optional<Tensor>& seqused_k = call.key_lengths;
  check_is_integer(shape, "block_table", table);
  TORCH_CHECK(table.layout() == at::kStrided && table.dim() == 2 && must_equal(table.sym_size(0), *shape.sequences) &&
                  table.device() == query.device(),
              shape.op, ": block_table has shape ", table.sym_sizes(), " on ", table.device(),
              "; it must be dense, [N, most pages of a sequence] = [", *shape.sequences, ", ...] on ", query.device());
  TORCH_CHECK(seqused_k, shape.op, ": seqused_k is None; beside a block_table it says how many keys there are");
  if (!is_readable(table) || !is_readable(*seqused_k)) return;
  const int64_t pages = key.size(0), page_size = key.size(2), per_sequence = table.size(1);
  for (int64_t n = 0; n < table.size(0); ++n) {
    const int64_t keys = number_at(*seqused_k, n),
                  used = keys == 0 ? 0 : (keys - 1) / std::max<int64_t>(page_size, 1) + 1;
    TORCH_CHECK(used <= per_sequence && (page_size > 0 || keys == 0), shape.op, ": seqused_k is ", keys, " at entry ",
                n, ", but block_table has room for ", per_sequence, " pages of ", page_size, " keys");
    for (int64_t i = 0; i < used; ++i) {
      const int64_t page = number_at(table, n * per_sequence + i);
      TORCH_CHECK(0 <= page && page < pages, shape.op, ": block_table is ", page, " at [", n, ", ", i,
                  "], which is in use; it must be between 0 and ", pages - 1, ", the pages of key and value");
    }
  }
}

}  // namespace

c10::SymDimVector Shape::expanded(const SymInt& tensor_heads, const SymInt& rows, const SymInt& cols) const {
  c10::SymDimVector sizes(batch);
  if (dims >= 3) sizes.push_back(tensor_heads);
  sizes.push_back(rows);
  sizes.push_back(cols);
  return sizes;
}

c10::SymDimVector Shape::numbers(const SymInt& length) const {
  c10::SymDimVector sizes = expanded(heads, length, 1);
  sizes.pop_back();
  return sizes;
}

c10::SymDimVector Shape::of_heads() const {
  c10::SymDimVector sizes(batch);
  sizes.push_back(heads);
  return sizes;
}

c10::SymDimVector Shape::of_entries() const {
  c10::SymDimVector sizes(batch);
  if (sequences) sizes.push_back(*sequences);
  return sizes;
}

void check_scale_of_8_bits(const char* op, const char* name, const std::optional<Tensor>& scale, const Tensor& of) {
  TORCH_CHECK(scale.has_value() == is_8_bit(of), op, ": ", name, "_scale is ", scale ? "given" : "None", " but ", name,
              " has dtype ", of.scalar_type(), "; int8 and float8_e4m3fn need a scale, and other dtypes have none",
              scale ? "" : " (torch_attn.quantize_kv makes both)");
  if (!scale) return;
  const auto allowed = of.sym_sizes().slice(0, of.dim() - 1);
  TORCH_CHECK(scale->defined() && scale->layout() == at::kStrided && !scale->is_nested() &&
                  scale->device() == of.device() && scale->scalar_type() == at::kFloat && broadcasts(*scale, allowed),
              op, ": ", name, "_scale is ", scale->scalar_type(), " of shape ", scale->sym_sizes(), " on ",
              scale->device(), "; it must be float32, on ", of.device(), ", and broadcast to ", name,
              "'s shape without its last dimension, ", allowed);
}

Shape validate(const char* op, const Call& call) {
  const auto& [query, key, value, attn_mask] = std::tie(call.query, call.key, call.value, call.attn_mask);
  check_tensor(op, "query", query, query);
  check_tensor(op, "key", key, query);
  check_tensor(op, "value", value, query);
  if (attn_mask) check_tensor(op, "attn_mask", *attn_mask, query, /*least_dims=*/0);
  check_dtypes(op, query, key, value, attn_mask);
  check_scale_of_8_bits(op, "key", call.key_scale, key);
  if (op != StatsOp::name) check_scale_of_8_bits(op, "value", call.value_scale, value);
  const auto check_number = [&]<class T>(const Argument<T>& argument) {
    if constexpr (kIsFloating<T>) check_allowed(op, argument.name, call.*argument.member, argument.allowed);
  };
  std::apply([&](const auto&... argument) { (check_number(argument), ...); }, Call::kArguments);
  TORCH_CHECK(call.window_size[0] >= -1 && call.window_size[1] >= -1, op, ": window_size is (", call.window_size[0],
              ", ", call.window_size[1], "); each of (left, right) must be -1 (no bound) or more");
  TORCH_CHECK(must_equal(extent(key, 1), extent(query, 1)), op, ": key has head_dim ", extent(key, 1),
              " but query has ", extent(query, 1), " (key: ", key.sym_sizes(), ", query: ", query.sym_sizes(),
              "); they must be equal");
  TORCH_CHECK(must_equal(extent(value, 2), extent(key, 2)), op, ": value has length ", extent(value, 2),
              " but key has ", extent(key, 2), " (value: ", value.sym_sizes(), ", key: ", key.sym_sizes(),
              "); they must be equal");

  const bool paged = call.block_table.has_value();
  TORCH_CHECK(call.is_packed() || !(paged || call.cu_seq_k), op, ": cu_seq_q is None but ",
              paged ? "block_table" : "cu_seq_k", " is given; packed sequences need both");
  TORCH_CHECK(call.is_packed() || (call.max_q.sym_eq(0).expect_true(__FILE__, __LINE__) &&
                                   call.max_k.sym_eq(0).expect_true(__FILE__, __LINE__)),
              op, ": cu_seq_q is None but max_q is ", call.max_q, " and max_k ", call.max_k,
              "; they belong to packed sequences, and must be 0 without");
  TORCH_CHECK(!paged || (query.dim() <= 3 && key.dim() == 4 && value.dim() == 4 &&
                         must_equal(key.sym_size(0), value.sym_size(0))),
              op, ": query has ", query.dim(), " dimensions, key ", key.sym_sizes(), " and value ", value.sym_sizes(),
              "; beside a block_table, key and value must be pools of as many pages, [pages, page_size, heads, "
              "head_dim], and nothing may have leading dimensions, which vmap adds");
  Shape shape;
  shape.op = op;
  shape.dims = paged ? query.dim() : std::max({query.dim(), key.dim(), value.dim()});
  shape.queries = extent(query, 2);
  shape.keys = extent(key, 2);
  shape.head_dim = extent(query, 1);
  shape.value_dim = extent(value, 1);
  shape.key_heads = head_count(key);
  shape.value_heads = head_count(value);
  shape.heads = head_count(query);
  if (!call.enable_gqa) {
    if (is_one(shape.heads)) shape.heads = shape.key_heads;
    if (is_one(shape.heads)) shape.heads = shape.value_heads;
  }
  check_head_count(op, "key", shape.key_heads, shape.heads, call.enable_gqa, query, key);
  check_head_count(op, "value", shape.value_heads, shape.heads, call.enable_gqa, query, key);
  for (int64_t d = shape.dims; d > 3; --d) shape.batch.push_back(broadcast(op, query, key, value, d));
  if (call.is_packed()) check_packing(shape, call);
  if (attn_mask) check_mask(*attn_mask, shape, call);
  // alibi_slopes and sinks
  const auto check_if_per_head = [&]<class T>(size_t i, const T& t) {
    if constexpr (std::is_same_v<T, std::optional<Tensor>>)
      if (Inputs::about(i).kind == Kind::heads) check_per_head(shape, Inputs::about(i).name, t, query);
  };
  for_each_input(check_if_per_head, call);
  TORCH_CHECK(call.tables.size() <= kMostTables, op, ": tables has ", call.tables.size(),
              " tensors; it must have at most ", kMostTables);
  if (call.has_program()) shape.programs = checked_programs(shape, call);
  constexpr int64_t kMostOffset = 2 * kFar - 1;
  check_integers(shape, "query_offset", call.query_offset, query, -kMostOffset, [](int64_t) { return kMostOffset; });
  const auto& cu_seq_k = call.cu_seq_k;
  check_integers(shape, call.is_packed() ? "seqused_k" : "key_lengths", call.key_lengths, query, 0, [&](int64_t i) {
    if (paged) return call.max_k.guard_int(__FILE__, __LINE__);
    if (!cu_seq_k || !is_readable(*cu_seq_k)) return shape.keys.guard_int(__FILE__, __LINE__);
    const int64_t n = i % (cu_seq_k->numel() - 1);
    return number_at(*cu_seq_k, n + 1) - number_at(*cu_seq_k, n);
  });
  if (paged) check_pages(shape, call);
  return shape;
}

void ValidatedCall::check_exact(const char* name, const Tensor& t, c10::SymIntArrayRef sizes,
                                at::ScalarType dtype) const {
  const Tensor& query = call.query;
  TORCH_CHECK(
      t.defined() && must_equal(t.sym_sizes(), sizes) && t.scalar_type() == dtype && t.device() == query.device(),
      shape.op, ": ", name, " is ", t.scalar_type(), " of shape ", t.sym_sizes(), " on ", t.device(), "; it must be ",
      dtype, " of shape ", sizes, " on ", query.device());
}

void ValidatedCall::check_output(const char* name, const Tensor& t) const {
  check_exact(name, t, shape.output(), call.query.scalar_type());
}

void ValidatedCall::check(const GradResults& u) const {
  check_output("grad_output", u.output);
  if (u.logsumexp) check_exact("grad_logsumexp", *u.logsumexp, shape.numbers(shape.queries), compute_dtype(call.query));
}

void ValidatedCall::check_logsumexp(const char* name, const Tensor& t) const {
  check_exact(name, t, shape.logsumexp(), compute_dtype(call.query));
}

void ValidatedCall::check_residual(const char* name, const Tensor& t) const {
  if (has_residual(call)) return check_exact(name, t, shape.output(), at::kFloat);
  check_exact(name, t, {0}, call.query.scalar_type());
}

void ValidatedCall::check_rng_state(const Tensor& t) const {
  if (call.dropout_p == 0) return;
  // There is one rng_state for all samples of vmap, or one for each sample along the leading dimensions that vmap
  // added.
  const bool fits = broadcasts(t, shape.expanded(1, 1, 3), 1);
  TORCH_CHECK(fits && t.scalar_type() == at::kLong && t.device() == call.query.device(), shape.op, ": rng_state is ",
              t.scalar_type(), " of shape ", t.sym_sizes(), " on ", t.device(),
              "; with dropout it must be the int64 (seed, offset, period) that the forward returned");
}

void ValidatedCall::refuse_derivatives() const {
  TORCH_CHECK(!is_8_bit(call.key) && !is_8_bit(call.value), shape.op, ": a derivative is asked for, but ",
              is_8_bit(call.key) ? "key" : "value",
              " has 8 bits and no derivatives: call it under torch.no_grad(), or convert: key.to(query.dtype) * "
              "key_scale[..., None]");
  TORCH_CHECK(
      !call.block_table, shape.op,
      ": a derivative is asked for, but block_table is given; keys and values in pages have none: call it under "
      "torch.no_grad(), or give them one after the other, with cu_seq_k");
}

void ValidatedCall::check(const Saved& s) const {
  refuse_derivatives();
  check_output("output", s.output);
  check_logsumexp("logsumexp", s.logsumexp);
  check_residual("residual", s.residual);
  check_rng_state(s.rng_state);
}

void ValidatedCall::check(const Direction& d) const {
  TORCH_CHECK(d.tables.size() == call.tables.size(), shape.op, ": tangent_tables has ", d.tables.size(),
              " elements but tables has ", call.tables.size(), "; they must be as many, before a last None");
  const auto like_input = [&](size_t i, const std::optional<Tensor>& t, const std::optional<Tensor>& input) {
    if (!t) return;
    const std::string input_name = Inputs::name(i), name = "tangent_" + input_name;
    TORCH_CHECK(input && input->is_floating_point(), shape.op, ": ", name, " is given but ", input_name, " is ",
                input ? "boolean" : "absent", "; only a floating tensor has a tangent");
    check_exact(name.c_str(), *t, input->sym_sizes(), input->scalar_type());
  };
  for_each_input(like_input, d, call);
}

void ValidatedCall::check(const TangentResults& t) const {
  check_output("tangent_output", t.output);
  check_logsumexp("tangent_logsumexp", t.logsumexp);
  check_residual("tangent_residual", t.residual);
}

void ValidatedCall::check(Wanted w) const {
  const auto check = [&](size_t i, const std::optional<Tensor>& input) {
    TORCH_CHECK(!w[i] || (input && input->is_floating_point()), shape.op, ": grad_input_mask asks for the gradient of ",
                Inputs::name(i), ", which is ", input ? "boolean" : "absent", "; only a floating tensor has one");
  };
  for_each_input(check, call);
  for (size_t i = Inputs::kCount - 1 + call.tables.size(); i < w.size(); ++i) check(i, std::nullopt);
}

at::ScalarType compute_dtype(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::TensorOptions compute_options(const Tensor& query) { return query.options().dtype(compute_dtype(query)); }

Tensor empty_output(const Shape& shape, const Tensor& query) {
  const auto sizes = shape.output();
  const auto dims = static_cast<int64_t>(sizes.size());
  // The order of the dimensions in memory, outermost first; the last dimension stays innermost.
  c10::DimVector order(dims);
  for (int64_t d = 0; d < dims; ++d) order[d] = d;
  bool follow = query.dim() == dims;
  for (int64_t d = 0; follow && d < dims - 1; ++d)
    follow = TORCH_GUARD_OR_FALSE(query.sym_sizes()[d].sym_eq(sizes[d])) &&
             TORCH_GUARD_OR_TRUE(query.sym_strides()[d].sym_ne(0));
  // Sorts by insertion. Strides that depend on sizes known only at run time may not be comparable. Such dimensions keep
  // their order.
  for (int64_t d = 1; follow && d < dims - 1; ++d)
    for (int64_t i = d; i > 0; --i) {
      const auto &outer = query.sym_strides()[order[i - 1]], &inner = query.sym_strides()[order[i]];
      if (!TORCH_GUARD_OR_FALSE(outer.sym_lt(inner))) break;
      std::swap(order[i - 1], order[i]);
    }
  c10::SymDimVector strides(dims);
  SymInt stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[order[i]] = stride;
    stride = stride * sizes[order[i]].max(1);
  }
  return at::empty_strided_symint(sizes, strides, query.options());
}

Tensor empty_numbers(const c10::SymDimVector& sizes, const Tensor& query) {
  return at::empty_symint(sizes, compute_options(query));
}

bool has_residual(const Call& call) {
  const auto dtype = call.query.scalar_type();
  const bool floating_mask = call.attn_mask && call.attn_mask->is_floating_point();
  return (dtype == at::kBFloat16 || dtype == at::kHalf) &&
         (floating_mask || call.alibi_slopes || call.sinks || call.score_mod || call.dropout_p > 0);
}

Tensor empty_residual(const Tensor& output, const Call& call) {
  return has_residual(call) ? at::empty_like(output, output.options().dtype(at::kFloat))
                            : at::empty({0}, output.options());
}

}  // namespace attn
