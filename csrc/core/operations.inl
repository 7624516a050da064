// The operations of functions of the pair: one table, of which each place that knows operations takes what it needs.
//
//   ATTN_OPERATION(op, name, signatures, value, bounds, derivatives...)
//     op          the enumerator of Op, and the function that makes it an Expression (operators/programs/expressions.h)
//     name        what strings call it; "" if strings do not have it
//     signatures  the types of operands and result: f (a number), i (a whole number) or b (a boolean)
//     value       the result for vectors a, b and c of the type T (cpu/tiles/program.inl)
//     bounds      of a result whose operands are between a, b and c (cpu/tiles/bounds.inl); else `anything`
//     derivatives of the result n with respect to a, b and c, Expressions; those left out are 0
//   ATTN_COMPOSITION(name, signatures, expression)
//     an operation of strings that consists of others
//
// docs/extending.md says how to add an operation. clang-format would break the rows.
// clang-format off
#ifndef ATTN_OPERATION
#define ATTN_OPERATION(...)
#endif
#ifndef ATTN_COMPOSITION
#define ATTN_COMPOSITION(...)
#endif

// Numbers
ATTN_OPERATION(add, "add", "ff>f", a + b, anything, 1, 1)
ATTN_OPERATION(sub, "sub", "ff>f", a - b, anything, 1, -1)
ATTN_OPERATION(mul, "mul", "ff>f", a * b, anything, b, a)
ATTN_OPERATION(div, "div", "ff>f", a / b, anything, 1 / b, -(n / b))
ATTN_OPERATION(neg, "neg", "f>f", -a, anything, -1)
ATTN_OPERATION(abs, "abs", "f>f", absolute<T>(a), anything, where(0 < a, 1, where(a < 0, -1, 0)))
// Equal operands get half of the gradient each.
ATTN_OPERATION(minimum, "minimum", "ff>f", (a < b ? a : b < a ? b : a == b ? a : a + b), anything,
               where(a < b, 1, where(a == b, 0.5, 0)), where(b < a, 1, where(a == b, 0.5, 0)))
ATTN_OPERATION(maximum, "maximum", "ff>f", (a > b ? a : b > a ? b : a == b ? a : a + b), anything,
               where(b < a, 1, where(a == b, 0.5, 0)), where(a < b, 1, where(a == b, 0.5, 0)))
ATTN_OPERATION(clamp, "clamp", "fff>f", bounded<T>(a, b, c), anything,
               where((a < b) | (c < a), 0, 1), where((a < b) & (b < c), 1, 0), where((c < a) | (c < b), 1, 0))
ATTN_OPERATION(sqrt, "sqrt", "f>f", square_roots<T>(a), anything, 0.5 / n)
ATTN_OPERATION(floor, "floor", "f>f", floors<T>(a), anything)
ATTN_OPERATION(trunc, "trunc", "f>f", towards_0<T>(a), anything)
ATTN_OPERATION(round, "round", "f>f", nearest<T>(a), anything)  // half to even
// All three have PyTorch's bits, because they use the exact remainder. remainder has the sign of b, fmod that of a.
ATTN_OPERATION(floor_divide, "floor_divide", "ff>f",
               each_lane<T>(a, b, [](T x, T y) { return floor_quotient_of(x, y); }), anything)
ATTN_OPERATION(remainder, "remainder", "ff>f",
               each_lane<T>(a, b, [](T x, T y) { return remainder_of(x, y); }), anything, 1, -floor_divide(a, b))
ATTN_OPERATION(fmod, "fmod", "ff>f",
               each_lane<T>(a, b, [](T x, T y) { return remainder_towards_0(x, y); }), anything, 1, -trunc(a / b))
// Rounded to a narrower dtype
ATTN_OPERATION(to_float32, "float32", "f>f", (rounded_to<float, T>(a)), anything, 1)
ATTN_OPERATION(to_float16, "float16", "f>f", (rounded_to<Half, T>(a)), anything, 1)
ATTN_OPERATION(to_bfloat16, "bfloat16", "f>f", (rounded_to<BFloat16, T>(a)), anything, 1)
// Derivatives multiply by this: the result is 0 if a is 0, whatever b is.
ATTN_OPERATION(times, "", "ff>f", (a == V{} ? V{} : a * b), anything, b, a)
// What operators/programs/schedule.cpp makes of a product and a sum.
ATTN_OPERATION(fma, "", "fff>f", a * b + c, anything)
ATTN_OPERATION(fms, "", "fff>f", a * b - c, anything)
ATTN_OPERATION(fnma, "", "fff>f", c - a * b, anything)

// Functions, from exp to tanh, which cost more than a product (kept_value() in operators/programs/compile.cpp)
ATTN_OPERATION(exp, "exp", "f>f", exp_of_any<T>(a), anything, n)
ATTN_OPERATION(exp2, "exp2", "f>f", exp2_of_any<T>(a), anything, n * 0.69314718055994530942)
ATTN_OPERATION(expm1, "expm1", "f>f", (in_double<expm1_in_double, T>(a)), anything, exp(a))
ATTN_OPERATION(log, "log", "f>f", (in_double<log_in_double, T>(a)), anything, 1 / a)
ATTN_OPERATION(log1p, "log1p", "f>f", (in_double<log1p_in_double, T>(a)), anything, 1 / (1 + a))
ATTN_OPERATION(log2, "log2", "f>f", (in_double<log2_in_double, T>(a)), anything, 1.4426950408889634074 / a)
ATTN_OPERATION(log10, "log10", "f>f", by_lane<T>(::log10, a), anything, 0.43429448190325182765 / a)
// Where a = 0 and b >= 0, PyTorch's derivative by b is 0, and n log(a) would be NaN.
ATTN_OPERATION(pow, "pow", "ff>f", by_lane<T>(::pow, a, b), anything,
               times(b, pow(a, b - 1)), where((a == 0) & (0 <= b), 0, times(n, log(a))))
ATTN_OPERATION(erf, "erf", "f>f", (in_double<erf_in_double, T>(a)), anything, 1.1283791670955125739 * exp(-(a * a)))
ATTN_OPERATION(erfc, "erfc", "f>f", (in_double<erfc_in_double, T>(a)), anything, -1.1283791670955125739 * exp(-(a * a)))
ATTN_OPERATION(sin, "sin", "f>f", (in_double<sin_in_double, T>(a)), anything, cos(a))
ATTN_OPERATION(cos, "cos", "f>f", (in_double<cos_in_double, T>(a)), anything, -sin(a))
ATTN_OPERATION(tan, "tan", "f>f", (in_double<tan_in_double, T>(a)), anything, n * n + 1)
ATTN_OPERATION(asin, "asin", "f>f", by_lane<T>(::asin, a), anything, 1 / sqrt(1 - a * a))
ATTN_OPERATION(acos, "acos", "f>f", by_lane<T>(::acos, a), anything, -(1 / sqrt(1 - a * a)))
ATTN_OPERATION(atan, "atan", "f>f", by_lane<T>(::atan, a), anything, 1 / (a * a + 1))
ATTN_OPERATION(atan2, "atan2", "ff>f", by_lane<T>(::atan2, a, b), anything,
               where(a * a + b * b == 0, 0, b / (a * a + b * b)), where(a * a + b * b == 0, 0, -a / (a * a + b * b)))
ATTN_OPERATION(sinh, "sinh", "f>f", by_lane<T>(::sinh, a), anything, cosh(a))
ATTN_OPERATION(cosh, "cosh", "f>f", by_lane<T>(::cosh, a), anything, sinh(a))
ATTN_OPERATION(asinh, "asinh", "f>f", by_lane<T>(::asinh, a), anything, 1 / sqrt(a * a + 1))
ATTN_OPERATION(acosh, "acosh", "f>f", by_lane<T>(::acosh, a), anything, 1 / sqrt(a * a - 1))
ATTN_OPERATION(atanh, "atanh", "f>f", by_lane<T>(::atanh, a), anything, 1 / (1 - a * a))
// With derivatives of 1 / (1 + exp(-a)), an infinite exponential would make the second derivative NaN.
ATTN_OPERATION(sigmoid, "sigmoid", "f>f", 1 / (exp_of_any<T>(-a) + 1), anything, n * (1 - n))
// c tanh(a b), where b and c are the same for all pairs. They are 1 until the scheduler finds factors for them.
ATTN_OPERATION(tanh, "", "fff>f", tanh_of_exponent<T>(a * (b * static_cast<T>(2 * kLog2E)), c[0]), anything, 1 - n * n)

// Whole numbers, which wrap around as PyTorch's do. A quotient and a remainder by 0 are 0.
ATTN_OPERATION(add_whole, "add", "ii>i", bits<T>(a) + bits<T>(b), sum(a, b))
ATTN_OPERATION(sub_whole, "sub", "ii>i", bits<T>(a) - bits<T>(b), difference(a, b))
ATTN_OPERATION(mul_whole, "mul", "ii>i", bits<T>(a) * bits<T>(b), anything)
ATTN_OPERATION(minimum_whole, "minimum", "ii>i", (whole<T>(a) < whole<T>(b) ? a : b), smaller_of(a, b))
ATTN_OPERATION(maximum_whole, "maximum", "ii>i", (whole<T>(a) > whole<T>(b) ? a : b), larger_of(a, b))
ATTN_OPERATION(floor_divide_whole, "floor_divide", "ii>i",
               each_whole<T>(a, b, [](Int<T> x, Int<T> y) { return floor_quotient_of(x, y); }), anything)
ATTN_OPERATION(remainder_whole, "remainder", "ii>i",
               each_whole<T>(a, b, [](Int<T> x, Int<T> y) { return remainder_of(x, y); }), anything)
ATTN_OPERATION(fmod_whole, "fmod", "ii>i",
               each_whole<T>(a, b, [](Int<T> x, Int<T> y) { return remainder_towards_0(x, y); }), anything)
ATTN_OPERATION(shift_left, "shift_left", "ii>i", shifted_left<T>(a, b), anything)
ATTN_OPERATION(shift_right, "shift_right", "ii>i", shifted_right<T>(a, b), anything)
// Bitwise, on whole numbers or booleans
ATTN_OPERATION(bit_and, "and", "ii>i bb>b", whole<T>(a) & whole<T>(b), are_booleans ? larger_of(a, b) : anything)
ATTN_OPERATION(bit_or, "or", "ii>i bb>b", whole<T>(a) | whole<T>(b), are_booleans ? smaller_of(a, b) : anything)
ATTN_OPERATION(bit_xor, "xor", "ii>i bb>b", whole<T>(a) ^ whole<T>(b), anything)
ATTN_OPERATION(bit_not, "not", "i>i b>b", ~whole<T>(a), (Between{~a.most, ~a.least}))

// Comparisons
ATTN_OPERATION(eq, "eq", "ff>b", a == b, either)
ATTN_OPERATION(ne, "ne", "ff>b", a != b, either)
ATTN_OPERATION(lt, "lt", "ff>b", a < b, either)
ATTN_OPERATION(le, "le", "ff>b", a <= b, either)
ATTN_OPERATION(eq_whole, "eq", "ii>b", whole<T>(a) == whole<T>(b), boolean(are_equal, differ))
ATTN_OPERATION(ne_whole, "ne", "ii>b", whole<T>(a) != whole<T>(b), boolean(differ, are_equal))
ATTN_OPERATION(lt_whole, "lt", "ii>b", whole<T>(a) < whole<T>(b), boolean(a.most < b.least, a.least >= b.most))
ATTN_OPERATION(le_whole, "le", "ii>b", whole<T>(a) <= whole<T>(b), boolean(a.most <= b.least, a.least > b.most))

// Values of any type
ATTN_OPERATION(where, "where", "bff>f bii>i bbb>b", (whole<T>(a) ? b : c),
               a.is_one() ? (a.least != 0 ? b : c) : (Between{smaller(b.least, c.least), larger(b.most, c.most)}))
ATTN_OPERATION(float_of, "float", "i>f", __builtin_convertvector(whole<T>(a), V), anything)
ATTN_OPERATION(whole_of, "int", "f>i", __builtin_convertvector(a, Vec<Int<T>>), anything)  // rounded towards 0

ATTN_COMPOSITION("tanh", "f>f", tanh(a))
ATTN_COMPOSITION("reciprocal", "f>f", 1 / a)
ATTN_COMPOSITION("rsqrt", "f>f", 1 / sqrt(a))
ATTN_COMPOSITION("square", "f>f", a * a)
ATTN_COMPOSITION("ceil", "f>f", -floor(-a))
ATTN_COMPOSITION("neg", "i>i", sub_whole(0, a))
ATTN_COMPOSITION("abs", "i>i", maximum_whole(a, sub_whole(0, a)))
ATTN_COMPOSITION("clamp", "iii>i", minimum_whole(maximum_whole(a, b), c))
ATTN_COMPOSITION("gt", "ff>b", b < a)
ATTN_COMPOSITION("ge", "ff>b", b <= a)
ATTN_COMPOSITION("gt", "ii>b", lt_whole(b, a))
ATTN_COMPOSITION("ge", "ii>b", le_whole(b, a))
ATTN_COMPOSITION("float", "b>f", where(a, 1, 0))
ATTN_COMPOSITION("int", "b>i", where_whole(a, 1, 0))
ATTN_COMPOSITION("bool", "f>b", ne(a, 0))
ATTN_COMPOSITION("bool", "i>b", ne_whole(a, 0))

// clang-format on
#undef ATTN_OPERATION
#undef ATTN_COMPOSITION
