"""Finds the CUDA toolkit that setup.py compiles with, and says at once what it lacks."""

import os
import re
import shutil
import subprocess
from pathlib import Path

# What the files of csrc/cuda, and the headers of torch that they include, take from the toolkit.
# Distributions split it into packages, so that each of these may be missing by itself.
HEADERS = ["cuda.h", "cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "crt/host_config.h"]
LIBRARY = "libcudart.so"


def find() -> Path | None:
    """The toolkit's directory: CUDA_HOME or CUDA_PATH, else that of the nvcc on the PATH."""
    told = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if told:
        return Path(told)
    if nvcc := shutil.which("nvcc"):
        return _directory_of(nvcc)
    usual = Path("/usr/local/cuda")
    return usual if usual.exists() else None


def _directory_of(nvcc: str) -> Path:
    """Where nvcc lies, also if what is called by this name is a script that calls it."""
    command = [nvcc, "--dryrun", "-c", "x.cu"]  # prints what it would do, and where from
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    here = re.search(r"^#\$ _HERE_=(.+)$", result.stdout, re.MULTILINE)
    return (Path(here.group(1)) if here else Path(nvcc).resolve().parent).parent


def misfit(toolkit: Path, torch_cuda: str) -> str | None:
    """Why this toolkit cannot build for a torch of this version of CUDA; None if it can."""
    nvcc = toolkit / "bin" / "nvcc"
    if not nvcc.exists():
        return f"{nvcc} is not there"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.\d+", version)
    if not release:
        return f"`{nvcc} --version` names no release"
    if release.group(1) != torch_cuda.split(".")[0]:
        return f"{nvcc} is of CUDA {release.group(0).split()[1]}, and torch of CUDA {torch_cuda}"
    missing = [name for name in HEADERS if not (toolkit / "include" / name).exists()]
    if not any((toolkit / lib / LIBRARY).exists() for lib in ("lib64", "lib")):
        missing.append(LIBRARY)
    if missing:
        return f"the CUDA toolkit in {toolkit} has no {', no '.join(missing)}"
    return None


def choose(torch_cuda: str | None) -> Path | None:
    """The toolkit to build the CUDA kernels with; None to build without them.

    Args:
        torch_cuda: ``torch.version.cuda``.

    Raises:
        SystemExit: ATTN_CUDA has another value than 0 and 1, or is 1 and the kernels cannot be
            built, or is not set and there is a toolkit that does not fit.
    """
    wanted = os.environ.get("ATTN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"ATTN_CUDA is {wanted!r}; it must be 0 or 1")
    if wanted == "0":
        return None
    toolkit = find() if torch_cuda else None
    if torch_cuda and toolkit:
        if problem := misfit(toolkit, torch_cuda):
            raise SystemExit(
                f"The CUDA kernels cannot be compiled: {problem}. Set CUDA_HOME to the directory "
                "of a CUDA toolkit that fits, or ATTN_CUDA=0 to build without them."
            )
        return toolkit
    if wanted == "1":
        lacking = "nvcc (set CUDA_HOME to the directory of the CUDA toolkit)"
        if not torch_cuda:
            lacking = "a torch with CUDA (this is a build without)"
        raise SystemExit(f"ATTN_CUDA is 1, which needs {lacking}")
    return None


# An H100's kernels need its own architecture, with the letter.
SM90A = "-gencode=arch=compute_90a,code=sm_90a"


def architectures(toolkit: Path, listed: str) -> list[str]:
    """nvcc's options: for which GPUs it compiles.

    By default, binaries for A100, H100, B200 and RTX 50, of which nvcc knows the last two from
    CUDA 12.8 on, and PTX for GPUs between and after them.

    Args:
        listed: TORCH_CUDA_ARCH_LIST, which lists others, as for torch. A 9.0 in the list, with or
            without an "a", means sm_90a.
    """
    if not listed.strip():
        command = [toolkit / "bin" / "nvcc", "--list-gpu-arch"]
        known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        numbers = [n for n in ("80", "90", "100", "120") if f"compute_{n}" in known]
        flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers if n != "90"]
        flags += [f"-gencode=arch=compute_{n},code=compute_{n}" for n in ("80", numbers[-1])]
        return [*flags, *([SM90A] if "90" in numbers else [])]
    names = re.split(r"[ ;,]+", listed.replace("Hopper", "9.0+PTX").strip(" ;,"))
    of_hopper = [name for name in names if re.fullmatch(r"9\.0a?(\+PTX)?", name)]
    others = [name for name in names if name not in of_hopper]
    flags = []
    if others:
        from torch.utils.cpp_extension import _get_cuda_arch_flags  # reads the environment

        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(others)
        flags = _get_cuda_arch_flags()
        os.environ["TORCH_CUDA_ARCH_LIST"] = listed
    if any(name.endswith("+PTX") for name in of_hopper):
        flags.append("-gencode=arch=compute_90,code=compute_90")
    return [*flags, *([SM90A] if of_hopper else [])]
