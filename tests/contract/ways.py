"""How each door is called: functions of query, key and value, ``[1, heads, length, E]``, and of
options by the names of the schema, whose results are tensors of this layout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.nn.attention.bias import causal_upper_left

import _scripts
import torch_attn
from contract.calls import DENSE, HK, PACKING, PAGE, E, H, integers

ops = torch.ops.attn
Function = Callable[..., Any]


def in_groups(function: Function) -> Function:
    return functools.partial(function, enable_gqa=True)


def tokens(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)


def pages(tensor: Tensor) -> Tensor:
    """``[pages, heads, PAGE, E]``."""
    return tensor[0].unflatten(1, (-1, PAGE)).transpose(0, 1)


def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Packed calls without the dimension of the batch, which beside pages there is not."""
    packed = options.keys() & PACKING
    if packed:
        lay_out = pages if options.get("block_table") is not None else lambda x: x[0]
        query, key, value = query[0], lay_out(key), lay_out(value)
    results = ops.attention(query, key, value, enable_gqa=True, **options)
    return [x[None] for x in results] if packed else results


def packed(function: Function) -> Function:
    """Wraps a function with the arguments of torch's varlen_attn."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        key_lengths: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        lay_out: Function = tokens
        if options.get("block_table") is not None:

            def lay_out(x: Tensor) -> Tensor:
                return pages(x).transpose(1, 2)

        if key_lengths is not None:
            options["seqused_k"] = key_lengths
        x = tokens(query), lay_out(key), lay_out(value)
        output = function(*x, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa=True, **options)
        return output.transpose(0, 1)[None]

    return call


def statistics(function: Function) -> Function:
    return lambda query, key, value, **options: function(query, key, **options)


def gradient_of(function: Function) -> Function:
    """The gradient of a loss in query and key, differentiable."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        found = function(query, key, value, **options)
        output = found if isinstance(found, Tensor) else found[0]
        return torch.autograd.grad(output.sin().sum(), (query, key), create_graph=True)

    return call


def third(function: Function) -> Function:
    """With the gradients of `results`."""
    return gradient_of(gradient_of(function))


def tangent_of(function: Function) -> Function:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        def output(*x: Tensor) -> Tensor:
            found = function(*x, **options)
            return found if isinstance(found, Tensor) else found[0]

        x = query, key, value
        return torch.func.jvp(output, x, tuple(t.cos() for t in x))[1]

    return call


def mapped(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Calls by vmap, also over an offset or a length a sample."""
    samples = {n: options.pop(n) for n in ("query_offset", "key_lengths") if n in options}

    def one(query: Tensor, key: Tensor, value: Tensor, samples: dict[str, Tensor]) -> Any:
        call = torch_attn.sdpa_with_logsumexp
        return call(query, key, value, enable_gqa=True, **options, **samples)

    return torch.vmap(one)(query, key, value, samples)


def with_autocast(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    def single(x: Any) -> Any:
        return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x

    with torch.autocast("cpu", torch.bfloat16):
        x = map(single, (query, key, value))
        given = {n: single(option) for n, option in options.items()}
        return torch_attn.sdpa(*x, enable_gqa=True, **given).to(query.dtype)


def jagged(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    rows, keys = integers(0, query.size(2)), integers(0, key.size(2))
    x = (
        torch.nested.nested_tensor_from_jagged(tokens(t), places).transpose(1, 2)
        for t, places in ((query, rows), (key, keys), (value, keys))
    )
    return [t.values()[None] for t in ops.attention(*x, enable_gqa=True, **options)]


def scripted(*args: Any, **options: Any) -> Any:
    return torch.jit.script(_scripts.attention)(*args, enable_gqa=True, **options)[0]


def with_causal_bias(function: Function) -> Function:
    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        bias = causal_upper_left(query.size(-2), key.size(-2))
        return function(query, key, value, attn_mask=bias, enable_gqa=True, **options)

    return call


def replaced(function: Function) -> Function:
    def call(*args: Any, **options: Any) -> Any:
        with torch_attn.replacing_sdpa():
            return function(*args, **options)

    return call


def written_into(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch_attn.varlen_attn_out(torch.empty_like(query), query, *args, **options)


def inspected(function: Function) -> Function:
    """Gives what `inspect` sees of a model that calls the function."""

    def call(*args: Tensor, **options: Any) -> Any:
        class Calls(nn.Module):
            def forward(self) -> Any:
                return function(*args, **options)

        (layer,) = torch_attn.inspect(Calls()).layers
        stats = layer.largest_score, layer.entropy, layer.logsumexp, layer.received_weight
        return layer.weights, *stats, layer.visible_keys

    return call


def by_module(need_weights: bool, dropout: float = 0.0) -> Function:
    """Calls the module with projections that change nothing."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        module = torch_attn.nn.MultiheadAttention
        of_module = inspect.signature(module).parameters.keys() & options.keys()
        sizes = {"kdim": HK * E, "vdim": HK * E, "num_kv_heads": HK}
        made = {n: options.pop(n) for n in of_module} | sizes
        attend = module(H * E, H, dropout, False, batch_first=True, dtype=query.dtype, **made)
        for parameter in attend.parameters():
            nn.init.eye_(parameter)
        x = (t.transpose(1, 2).flatten(2) for t in (query, key, value))
        kept = {"need_weights": need_weights, "average_attn_weights": False}
        output, weights = attend(*x, **kept, **options)
        output = output.unflatten(2, (H, E)).transpose(1, 2)
        return (output, weights) if need_weights else output

    return call


def with_function(function: Function) -> Function:
    """With a score_mod that doubles the score."""
    return functools.partial(function, score_mod=lambda score, b, h, i, j: score * 2)


def of_string(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    double = "attn.program 1\n%0 f score\n%1 f const 2\n%2 f mul %0 %1\nreturn %2"
    return ops.flex_attention(query, key, value, score_mod=double, **options)


def of_doubled(function: Function) -> Function:
    return lambda *args, **options: function(*args, scale=2 / E**0.5, **options)


# --- over several processes -----------------------------------------------------------------------


def in_a_group() -> None:
    """Of this process alone, if there is none: all ways of communicating are there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def sharded(function: Function) -> Function:
    """Gives it DTensors, with the sequences cut; packed calls too."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        in_a_group()
        mesh = init_device_mesh("cpu", (1,))

        def place(x: Any, placement: Any) -> Any:
            is_number = isinstance(x, Tensor) and x.is_floating_point()
            return DTensor.from_local(x, mesh, [placement]) if is_number else x

        x = (place(t, Shard(2)) for t in (query, key, value))
        found = function(*x, **{n: place(option, Replicate()) for n, option in options.items()})
        found = [found] if isinstance(found, Tensor) else found
        return [t.to_local() for t in found]

    return call


def within_context_parallel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    in_a_group()
    with torch_attn.distributed.context_parallel(x=query.transpose(1, 2)):
        return ops.attention(query, key, value, enable_gqa=True, **options)[0]


OF_CONTEXT = DENSE - {"query_offset", "key_lengths"}


def by(method: str, function: Function) -> Function:
    def call(*args: Any, **options: Any) -> Any:
        in_a_group()
        with torch_attn.distributed.method(method):
            return function(*args, **options)

    return call


# --- caches, checkpoints, programs ----------------------------------------------------------------


def in_eight_bits(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if query.dtype == torch.float64:  # which they do not take
        narrow = {n: x.float() if is_wide(x) else x for n, x in options.items()}
        with torch.autocast("cpu", enabled=False):
            return in_eight_bits(query.float(), key, value, **narrow).double()
    (key, key_scale), (value, value_scale) = map(torch_attn.quantize_kv, (key, value))
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    return torch_attn.sdpa(query, key, value, enable_gqa=True, **options, **scales)


def is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


def by_paged_cache(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    pages, sizes = key.size(2) // PAGE + 2, {"key_heads": HK, "head_dim": key.size(3)}
    cache = torch_attn.PagedCache(pages, page_size=PAGE, **sizes, dtype=query.dtype)
    handle = cache.add()
    rows, keys = integers(0, query.size(2)), integers(0, key.size(2))
    cache.append([handle], tokens(key), tokens(value), keys)
    options.setdefault("window_size", (-1, -1))
    output = cache.attend(tokens(query), [handle], rows, **options)
    return output.transpose(0, 1)[None]


def checkpointed(*args: Tensor, **options: Any) -> Any:
    function = in_groups(torch_attn.sdpa)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def compiled(*args: Tensor, **options: Any) -> Any:
    """By both of AOTAutograd's halves, without a compiler of kernels."""
    torch.compiler.reset()
    function = torch.compile(in_groups(torch_attn.sdpa), backend="aot_eager", fullgraph=True)
    return function(*args, **options)


def exported(*args: Tensor, **options: Any) -> Any:
    class Attends(nn.Module):
        def forward(self, *args: Tensor, **options: Any) -> Any:
            return torch_attn.sdpa(*args, enable_gqa=True, **options)

    leaves = tuple(x.detach() for x in args)
    fixed = {n: x.detach() if isinstance(x, Tensor) else x for n, x in options.items()}
    return torch.export.export(Attends(), leaves, fixed).module()(*args, **options)


# --- other libraries ------------------------------------------------------------------------------


def by_transformers(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Uses the names of transformers, where it has some; a window is one number there."""
    from torch_attn.integrations.transformers import attention_forward

    module = nn.Module()
    module.num_key_value_groups = H // HK
    if "window_size" in options:
        options["window_size"] = options["window_size"][0] + 1
    given = {OF_TRANSFORMERS.get(name, name): option for name, option in options.items()}
    output, _ = attention_forward(module, query, key, value, None, is_causal=False, **given)
    return output.transpose(1, 2)


OF_TRANSFORMERS = {
    "softcap": "softcap",
    "window_size": "sliding_window",
    "sinks": "s_aux",
    "cu_seq_q": "cu_seq_lens_q",
    "cu_seq_k": "cu_seq_lens_k",
    "max_q": "max_length_q",
    "max_k": "max_length_k",
}


def by_diffusers(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    from torch_attn.integrations.diffusers import attention_forward

    x = (t.transpose(1, 2) for t in (query, key, value))
    return attention_forward(*x, enable_gqa=True, **options).transpose(1, 2)
