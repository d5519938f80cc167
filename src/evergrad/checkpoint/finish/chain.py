"""The chain of small modules that a captured shard goes through.

    digest → [yours] → memory → local → … → [yours]

Each module gets the same `Work` and may raise: the failure is reported under its name, and the chain goes on with the
next one, so that a full disk does not keep a shard from the tier behind it. Only without digests nothing goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from evergrad.checkpoint.digests import digest_spans
from evergrad.checkpoint.layout import parse
from evergrad.checkpoint.tiers.base import Store, Work
from evergrad.errors import DamagedFile, TierError, UsageError
from evergrad.wording import meant


@runtime_checkable
class Module(Protocol):
    """One thing that is done with a captured shard, in the agent.

    Yours may have an attribute `after` with the name of the module it follows ("digest", or a tier's); without, it
    comes last. `work.shard` is the arena: read it, never write to it, and keep no reference to it.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def run(self, work: Work) -> None:
        """Do it; raise to report a failure."""
        ...


class DamagedCapture(TierError):
    """The header of a captured shard cannot be read: nothing brings back what was in it."""


@dataclass(frozen=True)
class Digest:
    """Takes the digest of every tensor, before anything else reads the arena."""

    name: str = "digest"

    def run(self, work: Work) -> None:
        """Set the manifest's digests; those that were taken before a crash are kept."""
        if work.manifest.digests or work.manifest.header:
            return
        try:
            parsed = parse(work.shard, work.files.shard)
        except DamagedFile:
            raise DamagedCapture(f"{work.files.shard}: the header of what was captured is damaged") from None
        layout = parsed.layout
        spans = [(0, layout.data_start), *((e.offset, e.offset + e.nbytes) for e in layout.entries)]
        header, *digests = digest_spans(work.shard, spans)
        paths = (entry.path for entry in layout.entries)
        work.manifest = replace(
            work.manifest,
            data_start=layout.data_start,
            header=header,
            digests=dict(zip(paths, digests, strict=True)),
            values=parsed.values,
            placements=parsed.placements,
        )


@dataclass(frozen=True)
class Put:
    """Puts the shard into a tier."""

    name: str
    store: Store

    def run(self, work: Work) -> None:
        """Store it, manifest last."""
        self.store.put(work)


def arrange(stores: dict[str, Store], extra: Sequence[Module]) -> list[Module]:
    """The whole chain: digest, the tiers nearest first, and the extra modules where they want to be."""
    chain: list[Module] = [Digest(), *(Put(name, store) for name, store in stores.items())]
    for module in extra:
        after = getattr(module, "after", None)
        names = [each.name for each in chain]
        if after is None:
            chain.append(module)
        elif after in names:
            chain.insert(names.index(after) + 1, module)
        else:
            hint = f"{meant(str(after), names)} There are {', '.join(names)}."
            raise UsageError(f"module {module.name!r} wants to follow {after!r}.{hint}")
    return chain


def divided(chain: Sequence[Module], slow: Container[str]) -> tuple[list[Module], list[Module]]:
    """The chain up to the first slow tier, and from there on."""
    at = next((n for n, module in enumerate(chain) if isinstance(module, Put) and module.name in slow), len(chain))
    return list(chain[:at]), list(chain[at:])


def run_chain(chain: Sequence[Module], work: Work, report: Callable[[Module, Exception | None], None]) -> None:
    """Run every module, and report how each ended."""
    for module in chain:
        try:
            module.run(work)
        except Exception as error:  # whatever a module of the user's raises must not end the agent
            report(module, error)
            if isinstance(module, Digest):
                return
        else:
            report(module, None)


def describe_module(module: Module) -> dict[str, Any]:
    """A module of the user's as the agent can make it again: where it is imported from, and its settings."""
    kind = type(module)
    if not isinstance(module, Module):
        raise UsageError(f"{kind.__qualname__} is no module: expected an attribute `name` and a method `run(work)`")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"module {module.name!r}: the agent cannot import {kind.__module__}.{kind.__qualname__}. Define it at the "
            "top of a file that can be imported, or use agent=False."
        )
    settings: dict[str, Any] = asdict(module) if is_dataclass(module) else {}
    return {"import": f"{kind.__module__}:{kind.__qualname__}", "settings": settings}


def load_module(spec: dict[str, Any]) -> Module:
    """Import and make a module that `describe_module` described; only for what the user's own trainer sent."""
    place, _, name = str(spec["import"]).partition(":")
    try:
        made = getattr(import_module(place), name)(**spec["settings"])
    except Exception as error:
        raise UsageError(f"module {spec['import']}: cannot be made in the agent: {error}") from error
    if not isinstance(made, Module):
        raise UsageError(f"module {spec['import']}: expected an attribute `name` and a method `run(work)`")
    return made
