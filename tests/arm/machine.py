"""Makes build/arm: a Python of 64-bit ARM with torch, which runs here on an emulated processor.

The system is left as it is: apt keeps its lists in a directory of its own, and Debian's packages
are unpacked beside each other. A program of this system that the emulated Python starts runs as it
does elsewhere: compilers, CMake, ninja.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests._variants import BUILD

HERE = BUILD / "arm"
ROOT = HERE / "root"
SITE = HERE / "lib" / "python3.11" / "site-packages"
PYTHON = HERE / "bin" / "python"
TOOLS = "aarch64-linux-gnu"

APT = f"""
Dir::State "{HERE}/apt";
Dir::State::status "{HERE}/apt/status";
Dir::Cache "{HERE}/apt";
Dir::Etc::sourcelist "{HERE}/apt/sources.list";
Dir::Etc::sourceparts "-";
APT::Architecture "arm64";
APT::Architectures "arm64";
APT::Install-Recommends "false";
APT::Sandbox::User "";
"""
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian bookworm main\n"
DEBIAN = ["python3.11", "libstdc++6", "libgtest-dev"]
# Torch's own dependencies without CUDA, and the tests' dependencies.
PACKAGES = "filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec setuptools<82"
PACKAGES += " numpy rich markdown-it-py mdurl pygments pytest pluggy iniconfig packaging"
PACKAGES += " pytest-xdist execnet hypothesis sortedcontainers expecttest"
PLATFORMS = ["manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64"]

# -0: the interpreter takes this file for itself, starts others by it, and finds pyvenv.cfg.
EMULATED = f"""#!/bin/sh
exec qemu-aarch64 -L {ROOT} -0 {PYTHON} {ROOT}/usr/bin/python3.11 "$@"
"""

# torch asks these what the processor is, and would find the one outside: a Neoverse N1.
PROCESSOR = """processor\t: {}
Features\t: fp asimd
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
FILES = {
    "proc/cpuinfo": "".join(PROCESSOR.format(i) for i in range(os.cpu_count() or 1)),
    "sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000413fd0c1\n",
}


def run(*command: str | Path, **environment: str) -> str:
    return subprocess.run(
        command, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def install_debian() -> None:
    apt = HERE / "apt"
    for directory in (apt / "lists" / "partial", apt / "archives" / "partial"):
        directory.mkdir(parents=True, exist_ok=True)
    for name, text in {"conf": APT, "sources.list": SOURCES, "status": ""}.items():
        (apt / name).write_text(text)
    for command in (["update"], ["install", "--yes", "--download-only", *DEBIAN]):
        run("apt-get", "-qq", *command, APT_CONFIG=str(apt / "conf"))
    for package in (apt / "archives").glob("*.deb"):
        run("dpkg-deb", "-x", package, ROOT)
    for name, text in FILES.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(text)


def install_packages(torch: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--target", str(SITE)]
    command += [f"--platform={name}" for name in PLATFORMS]
    run(*command, f"torch=={torch}", *PACKAGES.split())
    (SITE / "checkout.pth").write_text(f"{BUILD.parent}\n")
    shutil.copy(Path(__file__).with_name("TorchConfig.cmake"), SITE / "torch/share/cmake/Torch")
    (HERE / "pyvenv.cfg").write_text(f"home = {ROOT}/usr/bin\n")
    PYTHON.parent.mkdir()
    PYTHON.write_text(EMULATED)
    PYTHON.chmod(0o755)


def symbols(kinds: str, files: list[Path]) -> set[str]:
    return set(re.findall(rf" [{kinds}] (\S+)", run(f"{TOOLS}-nm", "--dynamic", "--quiet", *files)))


def stand_in_for_cuda() -> None:
    """One small library in place of the 3 GB of CUDA: torch's libraries name them at load.

    Each function says that there is no device. The loader wants all of them, by name and version.
    """
    torch = SITE / "torch" / "lib"
    ours = list(torch.glob("*.so*"))
    others = [*ROOT.glob("lib/**/*.so*"), *ROOT.glob("usr/lib/aarch64-linux-gnu/*.so*")]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run(f"{TOOLS}-readelf", "--dynamic", *ours))
    absent = sorted(set(needed) - {path.name for path in ours + others})
    defined = {name.partition("@")[0] for name in symbols("^Uwv", ours + others)}
    versions = collections.defaultdict(list)
    for symbol in sorted(symbols("U", ours)):
        name, _, version = symbol.partition("@")
        if name not in defined and not name.startswith(("Py", "_Py")):
            versions[version or "NONE"].append(name)
    c, script = HERE / "cuda.c", HERE / "cuda.map"
    no_device = 100  # cudaErrorNoDevice
    names = itertools.chain(*versions.values())
    c.write_text("".join(f"int {name}(void) {{ return {no_device}; }}\n" for name in names))
    nodes = [f"{version} {{ {'; '.join(names)}; }};\n" for version, names in versions.items()]
    script.write_text("".join(nodes))
    library = torch / absent[0]
    flags = ["-shared", "-fPIC", "-fno-builtin", f"-Wl,--version-script={script}"]
    run(f"{TOOLS}-gcc", *flags, c, "-o", library)
    for name in absent[1:]:
        (torch / name).symlink_to(library.name)


def make(torch: str) -> None:
    """Anew where it is for another release of torch, made otherwise, or was interrupted."""
    made, wanted = HERE / "made", torch + Path(__file__).read_text()
    if made.exists() and made.read_text() == wanted:
        return
    print(f"==> Making {HERE} (downloads 500 MB)", flush=True)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    install_debian()
    install_packages(torch)
    stand_in_for_cuda()
    made.write_text(wanted)
