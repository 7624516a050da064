"""diffusers' training tests of models that need FlexAttention, on a CPU under the switch.

    python tests/outside/diffusers_flex.py <diffusers>

<diffusers> is a checkout of huggingface/diffusers, of which only tests/ is used; the models are of
the installed diffusers. Its TrainingTesterMixin runs on Kandinsky 6 SR, whose own test diffusers
skips on a CPU, and on AnyFlow FAR, whose own test fails there. Then the script
compares the gradients of all parameters of each model with those of PyTorch's function. PyTorch's
check that refuses derivatives on a CPU is off there. diffusers' tests import accelerate. The result
is results/diffusers_flex.txt.
`--plant output` (or `scores`) spoils torch_attn: the comparisons have to fail.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import types

import _outside
import diffusers
import torch

import torch_attn


class OfKandinsky:
    """What TrainingTesterMixin asks for: a small Kandinsky 6 SR, and its input."""

    model_class = getattr(diffusers, "Kandinsky6SRTransformer3DModel", None)
    side = 16
    output_shape = (2, side, side, 8)

    def get_init_dict(self) -> dict:
        return {
            "in_visual_dim": 4,
            "out_visual_dim": 8,
            "time_dim": 16,
            "patch_size": (1, 2, 2),
            "model_dim": 24,
            "ff_dim": 32,
            "num_visual_blocks": 2,
            "axes_dims": (4, 4, 4),
        }

    def get_dummy_inputs(self) -> dict:
        generator = torch.Generator().manual_seed(0)
        return {
            "hidden_states": torch.randn(1, 2, self.side, self.side, 9, generator=generator),
            "timestep": torch.randint(0, 1000, (1,), generator=generator).float(),
        }


class OfLargerKandinsky(OfKandinsky):
    """The same with more blocks, of which the mask of the model hides some."""

    side = 64
    output_shape = (2, side, side, 8)


def train(config: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and the gradients of a training step."""
    torch.manual_seed(0)
    model = config.model_class(**config.get_init_dict()).train()
    with torch.no_grad():  # gates are 0 at first, and would hide the attention
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    output = model(**config.get_dummy_inputs(), return_dict=False)[0]
    loss = (output * torch.randn_like(output)).mean()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare(config: object) -> tuple[str, str]:
    """Compares a step under the switch with one of PyTorch's function."""
    with torch_attn.replacing_flex():
        loss, gradients = train(config)
    check, _outside.of_torch._validate_device = _outside.of_torch._validate_device, lambda *_: None
    expected, of_torch = train(config)
    _outside.of_torch._validate_device = check
    errors = {"loss": ((loss - expected).abs() / expected.abs()).item()}
    for name, of in of_torch.items():
        errors[name] = ((gradients[name] - of).norm() / of.norm().clamp_min(1e-6)).item()
    worst = max(errors, key=lambda name: errors[name])
    text = f"{len(of_torch)} gradients; largest error {errors[worst]:.1e}, of {worst}"
    good = errors[worst] < 1e-4 and gradients.keys() == of_torch.keys()
    return ("passed" if good else "failed"), text


def run(test: object, name: str) -> tuple[str, str]:
    """Runs a test method as pytest would, or compares the gradients."""
    import pytest

    try:
        if name == "gradients":
            return compare(test)
        with torch_attn.replacing_flex():
            test.setup_method()
            getattr(test, name)()
            test.teardown_method()
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {str(error)[:300]}"
    return "passed", ""


def main() -> None:
    """Runs the tests and the comparisons, and writes the result."""
    options = _outside.arguments_of(__doc__, "a checkout of diffusers").parse_args()
    _outside.begin(options.plant)
    root = types.ModuleType("tests")  # without the code of tests/__init__.py
    root.__path__ = [str(options.path / "tests")]
    sys.modules["tests"] = root
    of_models = importlib.import_module("tests.models.testing_utils")
    mixin = of_models.TrainingTesterMixin
    versions = {"diffusers": diffusers.__version__}
    configs = {}
    if OfKandinsky.model_class is not None:
        configs["Kandinsky6SR"] = OfKandinsky
        configs["Kandinsky6SR, larger"] = OfLargerKandinsky
    try:
        file = "tests.models.transformers.test_models_transformer_anyflow_far"
        configs["AnyFlowFAR"] = importlib.import_module(file).AnyFlowFARTransformer3DTesterConfig
    except (ImportError, RuntimeError) as error:
        versions["AnyFlowFAR"] = f"not run: {error}"
    start, table = time.time(), []
    names = [name for name, _ in inspect.getmembers(mixin, inspect.isfunction)]
    for model, config in configs.items():
        test = type("Training", (config, mixin), {})()
        rows = [name for name in names if name.startswith("test_") and "larger" not in model]
        for name in [*rows, "gradients"]:
            (outcome, text), calls, passed_on = _outside.counted(run, test, name)
            row = f"{outcome:8} {model:21} {name}: {calls} calls, {passed_on} passed on"
            table.append(f"{row}; {text}" if text else row)
    _outside.report("diffusers_flex", options.plant, start, table, **versions)


if __name__ == "__main__":
    main()
