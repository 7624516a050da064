"""Whole models over sequences on several processes, and torch's own way of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import experimental
from torch.utils.checkpoint import checkpoint

import torch_attn
from _processes import Processes, processes_of
from torch_attn.distributed import context_parallel

pytestmark = pytest.mark.long

run = processes_of(2, 3)


def language_model(kind: str) -> Any:
    import transformers

    from torch_attn.integrations import transformers as integration

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = {"sliding_window": 9} if kind == "Mistral" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **window)
    config._attn_implementation = integration.register()
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def train(kind: str, length: int) -> None:
    """20 steps; the losses and parameters equal one process's."""
    ours, alone = language_model(kind), language_model(kind)
    steps = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (ours, alone)]
    for step in range(20):
        ids = torch.randint(0, 40, (2, length), generator=torch.Generator().manual_seed(step))
        labels = ids.masked_fill(torch.arange(length) < 3, -100)
        expected = alone(input_ids=ids, labels=labels).loss
        expected.backward()
        with context_parallel(input_ids=ids, labels=labels) as batch:
            loss = ours(**batch).loss
            loss.backward()
        for p in ours.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss.data)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


@pytest.mark.slow  # trains
@pytest.mark.parametrize("length", [24, 29, 7])  # divides by twice the processes; not; few
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_training(run: Processes, kind: str, length: int) -> None:
    pytest.importorskip("transformers")
    run(train, kind, length)


class Encoder(nn.Module):
    """Tokens in, tokens out, with PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
        self.positions = nn.Embedding(40, 16, dtype=torch.float64)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        x = x + self.positions(position_ids)
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return x + out


def encode() -> None:
    """Without causality; the parts are joined again."""
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(2, 13, 16, dtype=torch.float64)
    expected = model(x, torch.arange(13)[None])
    with context_parallel(x=x) as batch:
        output = batch.join(model(**batch))
        assert batch.cut(x).shape == batch["x"].shape
    torch.testing.assert_close(output, expected)


def errors() -> None:
    x = torch.randn(1, 2, 12, 8)
    mine = x[:, :, : 12 // dist.get_world_size()]
    name = "context_parallel: "
    with pytest.raises(ValueError, match=rf"{name}a is \[1, 2, 12, 8\], b is \[3\]; give tensors"):
        context_parallel(a=x, b=torch.zeros(3)).__enter__()
    with pytest.raises(ValueError, match=rf"{name}attention_mask is given"):
        context_parallel(attention_mask=torch.ones(1, 12)).__enter__()
    with pytest.raises(
        ValueError, match=rf"{name}3 tokens over \d processes; it takes two of each"
    ):
        context_parallel(x=torch.ones(1, 3)).__enter__()
    with pytest.raises(TypeError, match="'some' is no process group"):
        context_parallel("some", x=torch.ones(1, 12)).__enter__()
    with (
        pytest.warns(UserWarning, match=f"{name}no attention was spread"),
        context_parallel(x=torch.ones(1, 12)) as batch,
        pytest.raises(ValueError, match=rf"{name}join of \[1, 12\]; process \d has"),
    ):
        batch.join(torch.ones(1, 12))
    with context_parallel(x=x.transpose(1, 2)):
        for options in ({"attn_mask": torch.ones(1, 1).bool()}, {"dropout_p": 0.1}):
            with pytest.raises(
                RuntimeError, match=f"{name}an attention of the model has {next(iter(options))}"
            ):
                F.scaled_dot_product_attention(mine, mine, mine, **options)
        with pytest.raises(RuntimeError, match=rf"{name}process \d has .* tokens, but query is"):
            torch_attn.sdpa(x, x, x)
        with pytest.raises(RuntimeError, match="sdpa_with_weights: it is called within a"):
            torch_attn.sdpa_with_weights(mine, mine, mine)
        with pytest.raises(RuntimeError, match="sdpa_stats: it is called within a"):
            torch_attn.sdpa_stats(mine, mine)
        assert torch_attn.sdpa_with_logsumexp(mine, mine, mine)[1:] == (None, None)
        torch_attn.sdpa(mine, mine, mine, window_size=(3, 0))
    with context_parallel(x=x.transpose(1, 2)), context_parallel(x=x.transpose(1, 2)):
        torch_attn.sdpa(mine, mine, mine)
    torch_attn.sdpa(x, x, x)  # off again


def compiled_before() -> None:
    """What was compiled for one process is compiled again, and raises."""
    x = torch.randn(1, 12, 8)

    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        output = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return output.transpose(1, 2).view(*x.shape[:2], 8)  # laid out as with the built-in

    compiled = torch.compile(attend, backend="eager", dynamic=True)
    with torch_attn.replacing_sdpa():
        expected = compiled(x)
        compiled(x[:, : 12 // dist.get_world_size()])
        with context_parallel(x=x) as batch:
            torch.testing.assert_close(attend(batch["x"]), batch.cut(expected))
            with pytest.raises(RuntimeError, match="cannot be part of a compiled function"):
                compiled(batch["x"])


def recompute() -> None:
    """A checkpoint that is computed again outside would attend to the own tokens alone."""
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    (expected,) = torch.autograd.grad(attend(x).sum(), x)
    with context_parallel(x=x) as batch:
        output = checkpoint(attend, batch["x"], use_reentrant=False)
        (gradient,) = torch.autograd.grad(output.sum(), x)
    dist.all_reduce(gradient)
    torch.testing.assert_close(gradient, expected)
    with context_parallel(x=x) as batch:
        output = checkpoint(attend, batch["x"], use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        output.sum().backward()


def within_torchs() -> None:
    """An error that names ours, for plain tensors and for what torch makes DTensors of."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(1, 2, 12, 8)
    compiled = torch.compile(torch_attn.sdpa, backend="aot_eager")
    compiled(*[whole.clone().requires_grad_()] * 3)
    operators = torch_attn.sdpa, torch.ops.attn.attention, torch.ops.attn.sdpa.default
    for mode in (torch.enable_grad(), torch.inference_mode()):
        buffer = whole.clone()
        with mode, experimental.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]):
            for attend in operators:
                with pytest.raises(RuntimeError, match="within torch's context_parallel"):
                    attend(buffer, buffer, buffer)
            with pytest.raises(RuntimeError, match="within torch's context_parallel"):
                compiled(*[whole.clone().requires_grad_()] * 3)
            with (
                torch_attn.replacing_sdpa(),
                pytest.raises(RuntimeError, match="order; use torch_attn"),
            ):
                F.scaled_dot_product_attention(buffer, buffer, buffer)
            with pytest.raises(RuntimeError, match="within a context_parallel"):
                torch_attn.sdpa_stats(buffer, buffer)
    torch_attn.sdpa(whole, whole, whole)  # off again


@pytest.mark.each("check")
@pytest.mark.parametrize("check", [encode, errors, compiled_before, recompute, within_torchs])
def test_context_parallel(run: Processes, check: Callable[[], None]) -> None:
    run(check)
