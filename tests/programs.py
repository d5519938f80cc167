"""Programs of the tests, each a fork of a process that has imported torch: as real as others, and there at once.

That process has no threads and runs nothing itself. A program starts with the environment, the folder and the import
path of the test, in a session of its own, and ends as any other: through what it has left for its exit.

What a program must not have imported, or how much memory it may have, is not for these: start a process for that.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from evergrad._forkserver import kill_group, run_script, run_to_end

_LIMIT_S = 110.0
_PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "evergrad.checkpoint.checkpointer",
    "torch.utils.serialization",
    "evergrad.cli",
    "evergrad.injection.injector",
    "evergrad.injection.published_settings",
    "evergrad.injection.replay",
    "evergrad.injection.undo",
    "pydantic.type_adapter",
    "pytest",
    "rich.markdown",
    "rich.progress",
    "rich.table",
    "rich.tree",
    "typer.rich_utils",
)

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(_PRELOADED))


def run_python(
    *words: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    output: Path | None = None,
    timeout: float = _LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """`python script.py …`, `python -m module …` or `python -c code …`, to its end, with what it printed.

    With `output` all that it prints goes there, to be read if it fails.
    """
    command = [str(word) for word in words]
    with tempfile.TemporaryDirectory(prefix="evergrad-test-") as folder:
        out, err = (str(output or Path(folder, name)) for name in ("out", "err"))
        environment = dict(os.environ) if env is None else env
        process = start(_call, (command,), env=environment, cwd=cwd or Path.cwd(), out=out, err=err)
        process.join(timeout)
        code = process.exitcode
        if code is None:
            end_group(process)
            said = "".join(Path(path).read_text(errors="replace") for path in {out, err})
            raise TimeoutError(f"{' '.join(command)[:200]}: not ended after {timeout:.0f} s\n{said}")
        process.close()
        if output is not None:
            return subprocess.CompletedProcess(command, code)
        return subprocess.CompletedProcess(command, code, *(Path(path).read_text("utf-8") for path in (out, err)))


def start(
    act: Callable[..., object], arguments: Sequence[object], *, env: dict[str, str], cwd: Path, out: str, err: str
) -> BaseProcess:
    """Call a function in a fork of the preloaded process, in a session of its own, with its output in these files."""
    process = _context.Process(target=_run, args=(act, arguments, env, str(cwd), out, err))
    process.start()
    return process


def has_group(process: BaseProcess) -> bool:
    """Whether a process is left in the process group of one that `start` has started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(process: BaseProcess) -> None:
    """Kill a process that `start` has started, and whatever it has left in its process group."""
    assert process.pid is not None
    kill_group(process.pid)
    process.join()


def _run(
    act: Callable[..., object],
    arguments: Sequence[object],
    environment: dict[str, str],
    folder: str,
    out: str,
    err: str,
) -> None:
    gc.freeze()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding=encoding, errors=errors or None)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False, encoding=encoding, errors="backslashreplace")
    random.seed()
    os._exit(run_to_end(lambda: act(*arguments)))


def _call(words: list[str]) -> None:
    if words[0] != "-c":
        os._exit(run_script(words))
    sys.argv = ["-c", *words[2:]]
    sys.path.insert(0, "")
    exec(compile(words[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
