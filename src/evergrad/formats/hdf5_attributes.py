"""The attributes of an HDF5 file by name: what a conversion would leave behind.

Only names are read. Values of varying length (Keras' `model_config`) lie in a global heap, and a damaged one makes the
HDF5 library (2.0.0) loop for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Any

from evergrad.formats.hdf5_file import Hdf5File, hdf5_errors, library

MAX_NAMED = 1_000


class Unkept(Mapping[str, str]):
    """`group/data set@attribute` → what it is, but for those in `kept`; listed when first looked at.

    `objects` are groups and data sets by name, with the path that leads to each. The first thousand are named, and the
    rest counted.
    """

    def __init__(
        self, file: Hdf5File, objects: Mapping[str, bytes], kept: Set[str], beside: Mapping[str, str] | None = None
    ) -> None:
        self._file, self._objects, self._kept, self._beside = file, objects, kept, beside or {}

    def __getitem__(self, name: str) -> str:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @cached_property
    def _found(self) -> dict[str, str]:
        file, h5a = self._file, library(self._file.path).h5a
        found, more = dict(self._beside), 0
        with hdf5_errors(file.path, "attributes are damaged"):
            for name, where in self._objects.items():
                opened = library(file.path).h5o.open(file.root.id, where)
                if not h5a.get_num_attrs(opened):
                    continue
                for attribute in self._names(h5a, opened):
                    key = f"{name}@{attribute.decode('utf-8', 'backslashreplace')[:200]}"
                    if key in self._kept:
                        continue
                    if len(found) < MAX_NAMED + len(self._beside):
                        found[key] = "an HDF5 attribute"
                    else:
                        more += 1
        if more:
            found["…"] = f"{more} further HDF5 attributes"
        return found

    def _names(self, h5a: Any, opened: Any) -> list[bytes]:
        names: list[bytes] = []
        h5a.iterate(opened, names.append)
        return names
