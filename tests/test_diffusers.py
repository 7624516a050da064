"""Small models with random weights, nothing downloaded: `attn` against the native backend."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import torch_attn
from _models import assert_close_in_float64, error_of_register, float64, step
from helpers import INF
from torch_attn import reference
from torch_attn.integrations.diffusers import (
    _TABLES,
    attention_forward,
    register,
    unregister,
)

diffusers = pytest.importorskip("diffusers", reason="not run: needs torch-attn[diffusers]")
dispatch = importlib.import_module("diffusers.models.attention_dispatch")

ATTN = register()
B, TEXT = 2, 5  # samples and tokens of text
SMALL = {"in_channels": 4, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}


class Example(NamedTuple):
    """A model, its inputs, and how often its forward pass attends."""

    model: Any
    inputs: dict[str, Any]
    attends: int
    own: int = 0  # calls of the built-in in layers that ask for no backend


def half_padded() -> Tensor:
    """`[B, TEXT]`, True where a text has a token: the second text is shorter."""
    return torch.arange(TEXT) < torch.tensor([[TEXT], [3]])


def prompts() -> dict[str, Tensor]:
    """What models get for each sample: when in the denoising it is, and a text."""
    return {
        "timestep": torch.tensor([3, 8]),
        "encoder_hidden_states": torch.randn(B, TEXT, 12),
    }


def flux() -> Example:
    model = diffusers.FluxTransformer2DModel(
        **SMALL,
        num_single_layers=1,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = prompts() | {
        "hidden_states": torch.randn(B, 16, 4),
        "pooled_projections": torch.randn(B, 8),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": torch.cartesian_prod(*map(torch.arange, (1, 4, 4))),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    return Example(model, inputs, attends=2)


def qwen_image() -> Example:
    """A model with a mask of the padded prompts, `[B, S]`."""
    model = diffusers.QwenImageTransformer2DModel(
        **SMALL | {"in_channels": 16, "num_layers": 2},
        out_channels=4,
        joint_attention_dim=12,
        axes_dims_rope=(4, 6, 6),
    )
    inputs = prompts() | {
        "hidden_states": torch.randn(B, 16, 16),
        "encoder_hidden_states_mask": half_padded(),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_shapes": [(1, 4, 4)] * B,
    }
    return Example(model, inputs, attends=2)


def hunyuan_video() -> Example:
    """A model with boolean masks `[B, 1, 1, S]`. A layer of its own refines the prompts."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        **SMALL,
        out_channels=4,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        guidance_embeds=False,
        text_embed_dim=12,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    inputs = prompts() | {
        "hidden_states": torch.randn(B, 4, 2, 4, 4),
        "encoder_attention_mask": half_padded(),
        "pooled_projections": torch.randn(B, 8),
    }
    return Example(model, inputs, attends=2, own=1)


def ltx() -> Example:
    """A model with attention to the prompts under a mask that is added to the scores."""
    model = diffusers.LTXVideoTransformer3DModel(
        **SMALL, out_channels=4, cross_attention_dim=32, caption_channels=12
    )
    inputs = prompts() | {
        "hidden_states": torch.randn(B, 2 * 4 * 4, 4),
        "encoder_attention_mask": half_padded().long(),
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }
    return Example(model, inputs, attends=2)


def wan() -> Example:
    """A model with attention to the prompts, whose tokens are more or fewer than the video's."""
    sizes = SMALL | {"attention_head_dim": 12}
    model = diffusers.WanTransformer3DModel(
        **sizes, out_channels=4, text_dim=12, freq_dim=16, ffn_dim=16
    )
    inputs = prompts() | {"hidden_states": torch.randn(B, 4, 2, 4, 4)}
    return Example(model, inputs, attends=2)


MODELS = {make.__name__: make for make in (flux, qwen_image, hunyuan_video, ltx, wan)}


@pytest.fixture(autouse=True)
def _native_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes a model's `set_attention_backend`, which also sets all models that have set none."""
    registry = dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def _in_float64() -> Iterator[None]:
    with float64():
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("_in_float64")
def test_outputs_and_gradients_are_those_of_the_native_backend(name: str) -> None:
    model, inputs, attends, own = MODELS[name]()
    model.set_attention_backend("native")
    native = step("diffusers", model, inputs)
    operators = native.operators
    assert (operators.builtin, operators.forward, native.calls) == (attends + own, 0, 0)

    model.set_attention_backend(ATTN)
    ours = step("diffusers", model, inputs)
    operators = ours.operators
    assert (operators.builtin, operators.forward, ours.calls) == (own, attends, attends)
    assert operators.count["attn::_sdpa_backward"] == attends
    assert_close_in_float64(ours.output, native.output)
    assert_close_in_float64(ours.gradients, native.gradients)


def test_the_context_manager() -> None:
    model, inputs, attends, _ = flux()
    before = torch_attn.calls()["diffusers"]
    with diffusers.attention_backend(ATTN):
        model(**inputs)
    model(**inputs)
    assert torch_attn.calls()["diffusers"] - before == attends


@pytest.mark.parametrize("name", ["native", "flex"])
def test_in_place_of_diffusers_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    registry = dispatch._AttentionBackendRegistry
    for table in _TABLES:
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    names = list(dispatch.AttentionBackendName)
    tables = {table: dict(getattr(registry, table)) for table in _TABLES}
    assert register(name) == register(name) == name
    assert list(dispatch.AttentionBackendName) == names
    model, inputs, attends, _ = flux()
    model.set_attention_backend(name)
    before = torch_attn.calls()["diffusers"]
    model(**inputs, return_dict=False)[0].sum().backward()
    assert torch_attn.calls()["diffusers"] - before == attends
    unregister(name)
    assert tables == {table: getattr(registry, table) for table in _TABLES}
    with torch.no_grad():
        model(**inputs)
    assert torch_attn.calls()["diffusers"] - before == attends


@pytest.mark.parametrize("name", ["attn", "native", "of nothing"])
def test_unregister_what_was_not_taken(name: str) -> None:
    register()
    with pytest.raises(ValueError, match=f"name is '{name}'; register.. took .* diffusers: none"):
        unregister(name)


def test_the_name_is_a_member_like_others() -> None:
    """An `Enum` without a public way to add one: it works, whatever diffusers does with names."""
    names = dispatch.AttentionBackendName
    assert register() == register() == "attn"
    member = names("attn")
    assert [name for name in names if name == "attn"] == [member]
    assert names["ATTN"] is names.__members__["ATTN"] is member
    assert isinstance(member, names)
    assert (member.name, member.value, member) == ("ATTN", "attn", "attn")
    assert copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member


def test_a_name_that_would_not_be_found() -> None:
    with pytest.raises(ValueError, match="name is 'Attn'; it must be an identifier in lower case"):
        register("Attn")


@pytest.mark.slow  # compiles a model
def test_compiles_as_one_graph() -> None:
    """It counts while it is compiled and not afterwards."""
    model, inputs, attends, _ = flux()
    model.set_attention_backend(ATTN)
    expected = model(**inputs, return_dict=False)[0]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = torch_attn.calls()["diffusers"]
    for _ in range(2):
        actual = compiled(**inputs, return_dict=False)[0]
    assert torch_attn.calls()["diffusers"] - before == attends
    torch.testing.assert_close(actual, expected)
    torch.compiler.reset()


# --- models that ask for no backend ---------------------------------------------------------------


def unet() -> Example:
    """A model whose image attends to itself and to the prompts, in the middle and on the way up."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=12,
    )
    inputs = prompts() | {
        "sample": torch.randn(B, 4, 8, 8),
        "encoder_attention_mask": half_padded(),
    }
    return Example(model, inputs, attends=0, own=2 * (1 + 1 + 2))


def stable_diffusion_3() -> Example:
    model = diffusers.SD3Transformer2DModel(
        **SMALL,
        sample_size=4,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=4,
    )
    inputs = prompts() | {
        "hidden_states": torch.randn(B, 4, 4, 4),
        "pooled_projections": torch.randn(B, 8),
    }
    return Example(model, inputs, attends=0, own=1)


OTHERS = {make.__name__: make for make in (unet, stable_diffusion_3)}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("_in_float64")
def test_models_that_never_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the name and keep the built-in, in whose place `attn` then gives the same."""
    model, inputs, _, own = OTHERS[name]()
    model.eval().set_attention_backend(ATTN)
    builtin = step("diffusers", model, inputs)
    assert (builtin.operators.builtin, builtin.operators.forward, builtin.calls) == (own, 0, 0)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", torch_attn.sdpa)
    ours = step("diffusers", model, inputs)
    assert (ours.operators.builtin, ours.operators.forward) == (0, own)
    assert_close_in_float64(ours.output, builtin.output)
    assert_close_in_float64(ours.gradients, builtin.gradients)


# --- diffusers that cannot be imported ------------------------------------------------------------


def test_without_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    message = r"^diffusers is not installed: in a checkout .* pip install .*\[diffusers\]'$"
    with pytest.raises(ImportError, match=message):
        register()


# Files of packages that come before the installed ones; the type, text and name of the error.
UNKNOWN = (
    "ImportError: diffusers {} has no attention backends that torch_attn knows; it needs diffusers "
    "0.35 or later: in a checkout of torch_attn, pip install --no-build-isolation -e '.[diffusers]'"
    " (diffusers)"
)
BROKEN = {
    "old": (
        {
            "diffusers/__init__.py": "__version__ = '0.34.0'",
            "diffusers/models/__init__.py": "",
        },
        UNKNOWN.format("0.34.0"),
    ),
    "other backends": (
        {
            "diffusers/__init__.py": "__version__ = '99.0'",
            "diffusers/models/__init__.py": "",
            "diffusers/models/attention_dispatch.py": "class Registry: pass",
        },
        UNKNOWN.format("99.0"),
    ),
    "something missing": (
        {"diffusers/__init__.py": "import attn_test_missing"},
        "ImportError: diffusers is installed but does not import: ModuleNotFoundError: No module "
        "named 'attn_test_missing' (attn_test_missing)",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("which", BROKEN)
def test_who_is_to_blame(which: str, tmp_path: Path) -> None:
    """The package that does not work is named, with its own message, and it is the cause."""
    files, expected = BROKEN[which]
    assert error_of_register("diffusers", files, tmp_path) == expected


# --- the function itself --------------------------------------------------------------------------


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    """`[B, L or S, H, E]`, two heads of the query for each of key and value."""
    return torch.randn(B, 6, 4, 8), torch.randn(B, TEXT, 2, 8), torch.randn(B, TEXT, 2, 8)


MASKS = {
    "none": None,
    "padding": half_padded(),
    "padding, added": torch.where(half_padded(), 0.5, -INF),
    "added": torch.linspace(-1, 1, B * 4 * 6 * TEXT).view(B, 4, 6, TEXT),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(qkv: tuple[Tensor, Tensor, Tensor], kind: str, is_causal: bool) -> None:
    mask = MASKS[kind]
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    output = attention_forward(*qkv, mask, **options)
    assert output.is_contiguous()
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    heads_first = [t.transpose(1, 2) for t in qkv]
    expected = reference.sdpa(*heads_first, mask, **options)
    torch.testing.assert_close(output.transpose(1, 2), expected)


def test_block_masks(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """A BlockMask, as models of video pass it to FlexAttention, and causality beside it."""
    seen = torch.rand(B, 6, TEXT) > 0.4
    mask = create_block_mask(lambda b, h, i, j: seen[b, i, j], B, None, 6, TEXT, device="cpu")
    for is_causal in (False, True):
        output = attention_forward(*qkv, mask, is_causal=is_causal, scale=0.3, enable_gqa=True)
        expected = attention_forward(
            *qkv, seen[:, None], is_causal=is_causal, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("argument", "named"), [("return_lse", "return_lse"), ("_parallel_config", "context paral")]
)
def test_what_is_refused(qkv: tuple[Tensor, Tensor, Tensor], argument: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"asks for {named}.*choose another backend"):
        attention_forward(*qkv, enable_gqa=True, **{argument: True})


def test_arguments_are_those_of_the_native_backend() -> None:
    def arguments(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
        return [(p.name, p.default) for p in parameters]

    assert arguments(attention_forward) == arguments(dispatch._native_attention)
