"""What is public in Python, with names, order and defaults of arguments: a line each.

`python -m tests.signatures > tests/signatures.txt` writes the file that test_library.py compares.
A change of that file is a change of what docs/promises.md promises.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

MODULES = (
    *("torch_attn", "torch_attn.nn", "torch_attn.mods", "torch_attn.plots", "torch_attn.reference"),
    *("torch_attn.distributed", "torch_attn.flops", "torch_attn.onnx"),
    *("torch_attn.integrations.transformers", "torch_attn.integrations.diffusers"),
)


def signature(function: Any) -> str:
    """Without types, which may become wider."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def lines() -> Iterator[str]:
    for path in MODULES:
        module = importlib.import_module(path)
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if inspect.ismodule(thing) or not callable(thing):
                yield f"{path}.{name}"
                continue
            yield f"{path}.{name}{signature(thing)}"
            own = vars(thing).items() if inspect.isclass(thing) else ()
            for method, value in sorted(own):
                if not method.startswith("_"):
                    value = getattr(value, "__func__", value)
                    said = signature(value) if inspect.isfunction(value) else ""
                    yield f"{path}.{name}.{method}{said}"


if __name__ == "__main__":
    print(*lines(), sep="\n")
