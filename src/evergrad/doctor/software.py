"""What is installed: Evergrad, Python, what Evergrad needs, and the extras that it can use."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from evergrad.doctor.check import Check, checked
from evergrad.doctor.torch_probe import Probe
from evergrad.wording import install_hint

EXTRAS = {
    "hdf5": "HDF5 files: Keras, Chainer, PyTorch",
    "fast": "verify: checksums at memory speed",
    "s3": "the persistent tier on S3",
    "zstd": "compressed flushes: Compress('zstd')",
    "studies": "data and statistics of studies",
    "dask": "studies on a Dask cluster",
    "slurm": "studies in jobs of Slurm",
    "report": "reports that draw their plots",
    "yaml": "published injector settings in YAML",
}
"""What each extra is for. Those for work on Evergrad itself are not here."""

_IMPORTED = ("numpy", "torch", "xxhash")  # by the probe: an installed package may still not load


def look(probe: Probe) -> Iterator[Check]:
    """Evergrad, Python and what Evergrad cannot do without."""
    yield from checked("evergrad", _evergrad)
    yield from checked("python", _python)
    yield from checked("system", _system)
    yield from checked("requirements", lambda: _requirements(probe))


def look_at_extras() -> Iterator[Check]:
    """Each extra: there, or what it is for and how to get it."""
    for name in EXTRAS:
        yield from checked(name, lambda name=name: _extra(name))  # type: ignore[misc]


def missing_from(lines: list[str], extra: str = "") -> list[str]:
    """Of requirements as a package states them, those of one extra that are not met, each in words."""
    wrong = []
    for name, least in _of(lines, extra):
        found = _version(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif _numbers(found) < _numbers(least):
            wrong.append(f"{name} {found} is older than {least}")
    return wrong


def _evergrad() -> Check:
    from evergrad import __version__

    return Check("evergrad", "ok", __version__, facts={"version": __version__})


def _python() -> Check:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable}
    return Check("python", "ok", f"{version} ({sys.executable})", facts=facts)


def _system() -> Check:
    told = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        return Check("system", "failed", f"{told}, and Evergrad is for Linux", "use Linux, a container or WSL 2")
    return Check("system", "ok", told)


def _requirements(probe: Probe) -> Iterator[Check]:
    required = _required()
    if not required:
        todo = f"{install_hint()}, rather than a folder on PYTHONPATH"
        yield Check("requirements", "unknown", "not installed as a package: what it needs is not known", todo)
    for name, least in _of(required, ""):
        found, loaded = _version(name), probe.get(name, {})
        version = loaded.get("version") or found
        if found is None and "version" not in loaded:
            yield Check(name, "failed", "is missing", f"pip install '{name}>={least}'")
        elif name in _IMPORTED and "error" in loaded:
            told = f"{found} cannot be imported: {loaded['error']}"
            yield Check(name, "failed", told, f"pip install --force-reinstall '{name}>={least}'")
        elif _numbers(str(version)) < _numbers(least):
            told = f"{version} is older than {least}"
            yield Check(name, "failed", told, f"pip install --upgrade '{name}>={least}'")
        else:
            yield Check(name, "ok", str(version), facts={"version": str(version)})


def _extra(name: str) -> Check:
    wrong = missing_from(_required(), name)
    purpose = EXTRAS[name]
    if not any(True for _ in _of(_required(), name)):
        todo = install_hint(name)
        return Check(name, "unknown", f"which packages it needs is not known ({purpose})", todo)
    if wrong:
        return Check(name, "degraded", f"{', '.join(wrong)} ({purpose})", install_hint(name),
                     {"missing": list(wrong)})  # fmt: skip
    versions = {package: _version(package) for package, _ in _of(_required(), name)}
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    return Check(name, "ok", f"{told} ({purpose})", facts=dict(versions))


def _required() -> list[str]:
    try:
        return metadata.requires("evergrad") or []
    except metadata.PackageNotFoundError:
        return []


def _of(lines: list[str], extra: str) -> Iterator[tuple[str, str]]:
    """Names and least versions: `h5py>=3.11; extra == 'hdf5'` is ('h5py', '3.11') of that extra."""
    for line in lines:
        requirement, _, marker = line.partition(";")
        of = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if (of.group(1) if of else "") == extra:
            name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            least = re.search(r">=\s*([0-9.]+)", requirement)
            if name:
                yield name.group(), least.group(1) if least else "0"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """For comparing: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
