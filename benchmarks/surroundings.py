"""Where a benchmark runs: this machine in a few words, and the environment of the peers, which draws too."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE / ".venv-peers"
PACKAGES = (
    ("numpy", "mooncake-transfer-engine-non-cuda", "matplotlib"),
    ("--no-deps", "nixl-cu12"),
)
"""What is installed there, by two calls of pip: nixl requires torch and CUDA, and runs without."""

PEER_VERSIONS = """
from importlib import metadata
for name in ("mooncake-transfer-engine-non-cuda", "nixl-cu12", "numpy"):
    print(name, metadata.version(name))
"""


def peers_python(given: str | None) -> str:
    """The Python that has the peers and matplotlib; makes an environment for them if none is given."""
    python = ENVIRONMENT / "bin" / "python"
    if given is not None or python.exists():
        return given or str(python)
    print(f"making {ENVIRONMENT} for the peers", file=sys.stderr)
    venv.create(ENVIRONMENT, with_pip=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for packages in PACKAGES:
        subprocess.run((*pip, *packages), check=True, timeout=600)
    return str(python)


def machine(python: str | None = None) -> dict[str, str]:
    """Processor, cores, memory, kernel and versions; with a Python of the peers, theirs as well."""
    found = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in ("numpy", "grpcio"):
        found[name] = metadata.version(name)
    if python is not None:
        command = (python, "-c", PEER_VERSIONS)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found |= dict(line.split() for line in done.stdout.splitlines()[:2])
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def draw(what: str, found: dict[str, Any], picture: Path, python: str) -> None:
    """Draw a result with the peers' matplotlib, by `pictures.py`. Raises CalledProcessError."""
    command = (python, str(HERE / "pictures.py"), what, str(picture))
    subprocess.run(command, input=json.dumps(found), text=True, check=True, timeout=120)
