"""``python -m torch_attn`` prints the environment, for a bug report.

With ``--cmake-prefix-path`` it prints where CMake finds the package. ``python -m torch_attn bench``
measures what this processor gains.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch

import torch_attn
from torch_attn import _bench
from torch_attn._library import LIBRARY, built_with


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torch_attn", description="Prints the environment, for a bug report."
    )
    parser.add_argument("--version", action="version", version=torch_attn.__version__)
    parser.add_argument(
        "--cmake-prefix-path",
        action="store_true",
        help="print instead what CMAKE_PREFIX_PATH needs for find_package(attn), torch's included",
    )
    commands = parser.add_subparsers(dest="command", metavar="bench")
    what = "measure how fast this processor is beside PyTorch's attention"
    bench = commands.add_parser("bench", help=what, description=f"{what.capitalize()}.")
    bench.add_argument("--seconds", type=float, default=30.0, help="about how long (30)")
    bench.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    if arguments.command == "bench":
        if arguments.json and not arguments.json.parent.is_dir():  # said before, not after, 30 s
            bench.error(f"--json {arguments.json}: there is no directory {arguments.json.parent}")
        _bench.bench(arguments.seconds, _machine(), arguments.json)
    elif arguments.cmake_prefix_path:
        print(f"{LIBRARY.resolve().parent};{torch.utils.cmake_prefix_path}")
    else:
        print_environment()


def _machine() -> dict[str, str]:
    """What the times of a measurement depend on."""
    return {
        "CPU": _cpu_model(),
        "instruction set": torch.ops.attn._cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "torch_attn": torch_attn.__version__,
    }


def print_environment() -> None:
    built = built_with()
    capabilities = ", ".join(torch.ops.attn._cpu_capabilities())
    rows = {
        "torch_attn": torch_attn.__version__,
        "built with": f"torch {built['torch']}, {built['compiler']}",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "CPU": _cpu_model(),
        "instruction set": f"{torch.ops.attn._cpu_capability()} (available: {capabilities})",
        "threads": str(torch.get_num_threads()),
        "CUDA": _cuda(built["cuda"]),
        "OS": platform.platform(),
    }
    for name, value in rows.items():
        print(f"{name:<16} {value}")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _cuda(in_library: bool) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    kernels = "yes" if in_library else "no"
    return f"{kernels} (torch was built with CUDA {torch.version.cuda or 'none'}; {device})"


if __name__ == "__main__":
    main()
