"""What the names in a torch pickle mean: storages, tensors, NumPy values; everything else stays inert."""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import StateError, UnsupportedContent
from evergrad.formats.checkpoint import AttributesWithTensors, OtherTensor, TensorAttributes, digest
from evergrad.formats.pickle_reader import GlobalName, PickleError, check_key
from evergrad.records import MAX_AXES
from evergrad.state import EncodedNode, InlineArray, Opaque, Outline, Placement, Skeleton, find_sharing, outline
from evergrad.state.sharing import contiguous_strides
from evergrad.state.skeleton import array_node, numpy_scalar_node
from evergrad.state.tree import EXTRA

READ_ONLY = "a NumPy array inside the pickle"
"""The reason why arrays in a pickle are read and compared, but not altered."""
_ARRAY = "numpy.ndarray"
_MATRIX = OtherTensor("a NumPy matrix")
_LAYOUT = "torch.layout"
_META = OtherTensor("a tensor on the meta device, which has no values")
_COMPILER = re.compile(r"_dynamo|_has_dynamo|_specialize_on$")


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that the pickle refers to: a record of the file. `dtype` is None for an untyped one."""

    key: str
    dtype: DType | None
    numel: int
    type_name: str
    offset: int = 0  # in elements: old files have storages that are views of others

    @property
    def itemsize(self) -> int:
        """Bytes of what `numel` counts."""
        stored = self.stored
        return stored.itemsize if stored else 1

    @property
    def stored(self) -> DType | None:
        """The type in which its bytes can be listed: quantised elements as integers, untyped ones as bytes."""
        return self.dtype or _RAW_STORAGES.get(self.type_name.rpartition(".")[2])

    @property
    def opaque(self) -> Opaque:
        """The stand-in where it is no part of a dense tensor."""
        stored = self.stored
        if stored is None:
            return Opaque(OtherTensor(f"a storage of {self.type_name}"), complete=False)
        start = self.offset * self.itemsize
        return Opaque(
            OtherTensor(f"a storage ({self.type_name})"), {"data": TensorRef(self, stored, start, (self.numel,), (1,))}
        )


class TensorRef(NamedTuple):
    """A tensor as the pickle describes it; `offset` in bytes from the start of its record, strides in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    attributes: Mapping[str, Any] | None = None
    """Attributes that were set on the tensor (`parameter.tag = …`); they are no part of its elements."""


@dataclass(slots=True)
class _NumpyDtype:
    code: str
    order: str = "="
    state: Any = None

    def to_numpy(self) -> np.dtype[Any] | None:
        """The type, if it is one of plain numbers or texts."""
        if not re.fullmatch(r"[fiubcSU]\d{1,6}", self.code):
            return None
        return np.dtype(("" if self.order in "|=" else self.order) + self.code)

    @property
    def opaque(self) -> Opaque:
        """The stand-in where it is a value."""
        return Opaque("numpy.dtype", {"code": self.code, "state": self.state})


class PickledTensors:
    """The tensors of an unpickled value, by path, with the skeleton around them."""

    def __init__(self, value: object, opcodes: int, pickle_bytes: int) -> None:
        # Every container of an honest file is visited about once; ones that refer to each other are not worth more.
        walked: Outline = outline(
            value,
            lambda leaf: type(leaf) is TensorRef,
            max_nodes=8 * opcodes + 1000,
            max_chars=64 * pickle_bytes + (1 << 20),
            live=False,
        )
        leaves = walked.leaves.items()
        self.refs: Mapping[str, TensorRef] = {path: leaf for path, leaf in leaves if type(leaf) is TensorRef}
        self.arrays: Mapping[str, InlineArray] = {path: leaf for path, leaf in leaves if type(leaf) is InlineArray}
        self.placements = [_placement(path, leaf) for path, leaf in leaves]
        self.skeleton = Skeleton(walked.root, find_sharing(place for place, _ in self.placements))
        self.attributes = {f"{path}@attributes": ref.attributes for path, ref in self.refs.items() if ref.attributes}
        self.others = dict(self.skeleton.objects())
        deep = self._with_tensors(8 * opcodes + 1000, 64 * pickle_bytes + (1 << 20)) if self.attributes else set()
        for name, held in self.attributes.items():
            kind = AttributesWithTensors if name in deep else TensorAttributes
            self.others[name] = kind(", ".join(held)[:80])

    def _with_tensors(self, max_nodes: int, max_chars: int) -> set[str]:
        """Return the `attributes` that hold tensors or arrays; all of them if there are too many to search."""
        numbered = dict(enumerate(self.attributes.values()))
        names = list(self.attributes)
        try:
            walked = outline(
                numbered,
                lambda leaf: type(leaf) is TensorRef,
                max_nodes=max_nodes,
                max_chars=max_chars,
                live=False,
            )
        except StateError:
            return set(names)
        return {names[int(path.partition("/")[0])] for path in walked.leaves}

    def fingerprint(self, name: str) -> str | None:
        """A digest of a tensor's attributes; None if there are tensors among them."""
        try:
            walked = outline(self.attributes[name], lambda leaf: type(leaf) is TensorRef, max_nodes=10_000, live=False)
        except (KeyError, StateError):
            return None
        return None if walked.leaves else digest(self.others[name], [json.dumps(walked.root).encode()])


def _placement(path: str, leaf: TensorRef | InlineArray) -> tuple[Placement, DType]:
    if type(leaf) is InlineArray:
        # Arrays that the pickle refers to twice are one; `True` keeps their keys apart from those of storages.
        key = (True, id(leaf.data))
        return Placement(path, key, 0, leaf.shape, leaf.stride, leaf.dtype.itemsize), leaf.dtype
    assert type(leaf) is TensorRef
    return Placement(path, leaf.storage.key, leaf.offset, leaf.shape, leaf.stride, leaf.dtype.itemsize), leaf.dtype


class PickledArray:
    """The bytes of a NumPy array, as the pickle gives them; altering them would need another pickle."""

    in_place = False

    def __init__(self, path: Path, array: InlineArray) -> None:
        self.path, self.size, self._data = path, len(array.data), array.data

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes."""
        return self._data[offset : offset + length]

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from here on."""
        buffer[:] = self.view()[offset : offset + len(buffer)]

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, to look at."""
        return np.frombuffer(self._data, np.uint8)

    def read_current(self, offset: int, length: int) -> bytes:
        """A few bytes as they are."""
        return self.read(offset, length)

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """Refuse: torch.save writes such bytes as text, whose length depends on them."""
        raise UnsupportedContent(self.path, f"{READ_ONLY}, which cannot be altered in place")

    def put(self, offset: int, data: bytes) -> None:
        """Refuse, as `xor` does."""
        raise UnsupportedContent(self.path, f"{READ_ONLY}, which cannot be altered in place")

    def check_writable(self) -> None:
        """Refuse, as `xor` does."""
        raise UnsupportedContent(self.path, f"{READ_ONLY}, which cannot be altered in place")

    def close(self) -> None:
        """Nothing to let go."""


class TorchBuilder:
    """Gives meaning to the few names that describe tensors and plain values; see `opcodes.Builder`."""

    def persistent(self, identifier: Any) -> Any:
        """A storage (or, in old files, a module's class) that the pickle refers to."""
        if type(identifier) is not tuple or not identifier:
            raise PickleError("a persistent id that is not a tuple")
        if identifier[0] == "module" and len(identifier) > 1:
            return identifier[1]
        if identifier[0] != "storage" or len(identifier) < 5:
            raise PickleError("a persistent id that is not a storage")
        kind, key, numel = identifier[1], identifier[2], identifier[4]
        if type(kind) is not GlobalName or type(key) not in (str, int) or type(numel) is not int or numel < 0:
            raise PickleError("a storage without class, key and size")
        view = identifier[5] if len(identifier) > 5 else None
        offset = 0
        if type(view) is tuple and len(view) == 3 and type(view[1]) is int:
            offset = view[1]
        return StorageRef(str(key), _STORAGES.get(kind.name), numel, str(kind), offset)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The value of a call: known ones are described, all others stay an inert `Opaque`."""
        if type(function) is GlobalName:
            known = _CALLS.get((function.module, function.name))
            if known is not None:
                return known(self, arguments)
            if function.module in ("copyreg", "copy_reg") and arguments and type(arguments[0]) is GlobalName:
                plain = arguments[1:] in (
                    (),
                    (GlobalName("builtins", "object"), None),
                    (GlobalName("__builtin__", "object"), None),
                )
                return Opaque(str(arguments[0]), {} if plain else {"()": arguments[1:]})
            if function.name.startswith("_rebuild_") and function.module.startswith("torch"):
                kind = function.name.removeprefix("_rebuild_")
                return Opaque(OtherTensor(f"a torch tensor of another kind ({kind})"), {"()": arguments})
            return Opaque(str(function), {"()": arguments} if arguments else {})
        return Opaque("a call of something that is no name", complete=False)

    def name(self, name: GlobalName) -> Any:
        """A torch dtype is a value; every other name stays a name."""
        dtype = DType.named(name.name) if name.module == "torch" else None
        return EncodedNode({"torch.dtype": dtype.value}) if dtype else name

    def set_state(self, target: Any, state: Any) -> Any:
        """The target after `BUILD`: attributes become parts, array data becomes a value."""
        if type(target) is OrderedDict:
            if type(state) is dict and "_metadata" in state:
                setattr(target, "_metadata", state["_metadata"])
            if type(state) is not dict or state.keys() - {"_metadata"}:
                setattr(target, EXTRA, True)
        elif type(target) is _NumpyDtype:
            target.state = state
            if type(state) is tuple and len(state) > 1 and type(state[1]) is str and state[1] in "<>|=":
                target.order = state[1]
        elif type(target) is Opaque:
            if target.type_name == _ARRAY and (array := _array_from_state(state)) is not None:
                target.value = array
                return target
            if target.type_name is _MATRIX and (array := _array_from_state(state)) is not None:
                target.parts["data"] = array
                return target
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                if type(part) is dict:
                    if part.keys() & target.parts.keys():  # an attribute and an item of one name: one can be listed
                        target.complete = False
                    target.parts.update(part)
                elif part is not None:
                    target.parts["state" if "state" not in target.parts else "state'"] = part
        return target


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: DType | None = None) -> Any:
    if type(storage) is not StorageRef:
        raise PickleError("a tensor without a storage")
    dtype = dtype or storage.dtype
    if dtype is None:
        return _other_tensor(f"a tensor on {storage.type_name}", storage, offset, shape, stride)
    if type(offset) is not int or offset < 0:
        raise PickleError("a tensor at an impossible offset")
    start = storage.offset * storage.itemsize + offset * dtype.itemsize
    return TensorRef(storage, dtype, start, _lengths(shape), _lengths(stride))


def _other_tensor(what: str, storage: Any, offset: Any, shape: Any, stride: Any, **more: Any) -> Opaque:
    """A tensor that is not a dense one of a known type, as its storage and what makes a tensor of it."""
    parts = {"storage": storage, "offset": offset, "shape": shape, "stride": stride, **more}
    return Opaque(OtherTensor(what), parts)


def _lengths(value: Any) -> tuple[int, ...]:
    if type(value) is EncodedNode and isinstance(value.node, dict):
        node: Any = value.node.get("torch.Size")
        value = tuple(node) if isinstance(node, list) else None
    if type(value) is tuple and len(value) > MAX_AXES:
        raise PickleError(f"a tensor of {len(value)} axes (expected at most {MAX_AXES})")
    if type(value) is tuple:
        for length in value:
            if type(length) is not int or not 0 <= length < 1 << 62:
                break
        else:
            return value
    raise PickleError("a tensor with an impossible shape or strides")


def _rebuild_tensor(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    storage, offset, shape, *rest = arguments
    stride = rest[0] if rest else contiguous_strides(_lengths(shape))
    return _tensor(storage, offset, shape, stride)


def _rebuild_tensor_v2(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    storage, offset, shape, stride, *rest = arguments
    if len(rest) > 2 and rest[2]:  # metadata: bits that change what the numbers mean
        return _lazy_tensor(_tensor(storage, offset, shape, stride), rest[2])
    return _tensor(storage, offset, shape, stride)


def _lazy_tensor(data: Any, metadata: Any) -> Opaque:
    what = OtherTensor("a torch tensor with a lazy conjugate or negative bit")
    return Opaque(what, {"data": data, "metadata": metadata})


def _rebuild_tensor_v3(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    storage, offset, shape, stride, _grad, _hooks, dtype, *rest = arguments
    name = dtype.node["torch.dtype"] if type(dtype) is EncodedNode and type(dtype.node) is dict else dtype.name
    known = DType.named(name)
    if known is None:
        more = {"metadata": rest[0]} if rest and rest[0] else {}
        return _other_tensor(f"a tensor of torch.{name}", storage, offset, shape, stride, **more)
    tensor = _tensor(storage, offset, shape, stride, known)
    return _lazy_tensor(tensor, rest[0]) if rest and rest[0] else tensor


def _rebuild_qtensor(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """A quantised tensor: its integers, listed as a tensor, and how they become floats."""
    storage, offset, shape, stride, quantizer, *_rest = arguments
    if type(storage) is not StorageRef or type(quantizer) is not tuple:
        raise PickleError("a quantised tensor without a storage or without a quantizer")
    scheme, *scales = quantizer
    how = {"qscheme": scheme.name if type(scheme) is GlobalName else scheme, "quantizer": tuple(scales)}
    kind = storage.type_name.rpartition(".")[2].removesuffix("Storage").lower()
    what = f"a quantised tensor ({kind})"
    if storage.stored is None or kind in ("quint4x2", "quint2x4"):  # several elements in a byte
        return _other_tensor(what, storage, offset, shape, stride, **how)
    return Opaque(OtherTensor(what), {"int_repr": _tensor(storage, offset, shape, stride, storage.stored), **how})


def _rebuild_sparse_tensor(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """A sparse tensor: its indices and values, each listed as a tensor."""
    layout, data = arguments
    if type(layout) is Opaque and layout.type_name == _LAYOUT:
        layout = layout.parts.get("name")
    kind = layout.rpartition(".sparse_")[2] if type(layout) is str else ""
    names = _SPARSE.get(kind)
    if names is None or type(data) is not tuple or len(data) > len(names):
        return Opaque(OtherTensor("a sparse tensor"), {"layout": layout, "()": data})
    parts = {"layout": layout, **dict(zip(names, data, strict=False))}
    return Opaque(OtherTensor(f"a sparse tensor ({kind.upper()})"), parts)


def _rebuild_meta_tensor(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """A tensor on the device `meta`: a type, a shape and strides, and not one value."""
    names = ("dtype", "shape", "stride", "requires_grad")
    parts = dict(zip(names, arguments, strict=True)) if len(arguments) == len(names) else {"()": arguments}
    return Opaque(_META, parts, complete=False)


def _rebuild_nested_tensor(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """A nested tensor: one buffer, and the sizes of those in it."""
    names = ("buffer", "sizes", "strides", "storage_offsets")
    if len(arguments) != len(names):
        return Opaque(OtherTensor("a nested tensor"), {"()": arguments})
    return Opaque(OtherTensor("a nested tensor"), dict(zip(names, arguments, strict=True)))


def _layout(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    if len(arguments) == 1 and type(arguments[0]) is str:
        return Opaque(_LAYOUT, {"name": arguments[0]})
    return Opaque(_LAYOUT, {"()": arguments})


def _first_argument(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    return arguments[0]


def _rebuild_parameter_with_state(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    return _with_attributes(arguments[0], arguments[3] if len(arguments) > 3 else None)


def _with_attributes(tensor: Any, state: Any) -> Any:
    """The tensor with what was set on it; what torch.compile leaves there says nothing."""
    if type(tensor) is not TensorRef:
        return tensor
    held: dict[str, Any] = {}
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if type(part) is dict:
            held.update((str(key), value) for key, value in part.items() if not _COMPILER.match(str(key)))
        elif part is not None:
            held["state"] = part
    return tensor._replace(attributes=held) if held else tensor


def _rebuild_from_type(builder: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    function, _type, inner, *rest = arguments
    if type(inner) is not tuple:
        raise PickleError("a tensor subclass without arguments")
    tensor = builder.call(function, inner)
    if not rest:
        return tensor
    # A subclass that wraps tensors keeps them among its attributes.
    return builder.set_state(tensor, rest[0]) if type(tensor) is Opaque else _with_attributes(tensor, rest[0])


def _ordered_dict(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    out: OrderedDict[Hashable, Any] = OrderedDict()
    if arguments:
        for pair in arguments[0]:
            key, value = pair
            if not check_key(key) and len(out) > 1000:
                raise PickleError("an ordered dict with many keys that are tuples or beyond 64 bits")
            out[key] = value
    return out


def _numpy_dtype(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    code = arguments[0]
    return _NumpyDtype(code) if type(code) is str else Opaque("numpy.dtype", {"()": arguments})


def _numpy_scalar(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    dtype, data = arguments if len(arguments) == 2 else (None, None)
    kind = dtype.to_numpy() if type(dtype) is _NumpyDtype else None
    if kind is None or type(data) is not bytes:
        return Opaque("numpy.scalar", {"()": arguments})
    return EncodedNode(numpy_scalar_node(np.frombuffer(data, kind)[0]))


def _numpy_from_buffer(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    data, dtype, shape, order = arguments
    array = _array_from_state((1, shape, dtype, order == "F", data))
    return Opaque(_ARRAY, {"()": arguments}) if array is None else array


def _reconstruct(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """An array of which `set_state` is told the rest."""
    kind = str(arguments[0]) if arguments and type(arguments[0]) is GlobalName else _ARRAY
    if kind in ("numpy.matrix", "numpy.matrixlib.defmatrix.matrix"):
        return Opaque(_MATRIX)
    return Opaque(_ARRAY if kind == "numpy.memmap" else kind)


def _array_from_state(state: Any) -> InlineArray | EncodedNode | None:
    """The array, if its elements are numbers (a leaf) or texts (a value)."""
    if type(state) is not tuple or len(state) != 5 or type(state[2]) is not _NumpyDtype:
        return None
    kind, data = state[2].to_numpy(), bytes(state[4]) if type(state[4]) is bytearray else state[4]
    if kind is None or type(data) is not bytes:
        return None
    shape = _lengths(state[1])
    dtype = DType.of_numpy(kind)
    if dtype is None or not kind.isnative:
        return EncodedNode(array_node(np.frombuffer(data, kind).reshape(shape, order="F" if state[3] else "C")))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise PickleError(f"a NumPy array of shape {shape!s:.80} over {len(data)} bytes")
    stride = tuple(reversed(contiguous_strides(shape[::-1]))) if state[3] else contiguous_strides(shape)
    return InlineArray(data, dtype, shape, stride)


def _encode(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """`_codecs.encode(text, "latin1")`: how old protocols write bytes."""
    if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] == "latin1":
        return arguments[0].encode("latin-1")
    return Opaque("_codecs.encode", {"()": arguments})


def _plain(kind: Callable[..., Any]) -> Callable[[TorchBuilder, tuple[Any, ...]], Any]:
    """`set([…])` and the like, over values that hash and compare cheaply."""

    def build(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
        scalars = (str, int, float, bytes, bool, type(None))
        if not arguments:
            return kind()
        if len(arguments) == 1 and type(arguments[0]) is list and all(type(item) in scalars for item in arguments[0]):
            odd = sum(not check_key(item) for item in arguments[0])
            if odd > 1000:
                raise PickleError("a set with many integers beyond 64 bits")
            return kind(arguments[0])
        if kind is complex and all(type(item) is float for item in arguments) and len(arguments) == 2:
            return complex(*arguments)
        if kind in (bytes, bytearray) and type(arguments[0]) is bytes:
            return kind(arguments[0])
        return Opaque(f"builtins.{kind.__name__}", {"()": arguments})

    return build


def _torch_size(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    return EncodedNode({"torch.Size": list(_lengths(tuple(arguments[0]) if arguments else ()))})


def _torch_device(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    if not all(type(part) in (str, int) for part in arguments):
        return Opaque("torch.device", {"()": arguments})
    return EncodedNode({"torch.device": ":".join(str(part) for part in arguments)})


_STORAGES: dict[str, DType] = {
    "DoubleStorage": DType.FLOAT64,
    "FloatStorage": DType.FLOAT32,
    "HalfStorage": DType.FLOAT16,
    "BFloat16Storage": DType.BFLOAT16,
    "LongStorage": DType.INT64,
    "IntStorage": DType.INT32,
    "ShortStorage": DType.INT16,
    "CharStorage": DType.INT8,
    "ByteStorage": DType.UINT8,
    "BoolStorage": DType.BOOL,
    "ComplexDoubleStorage": DType.COMPLEX128,
    "ComplexFloatStorage": DType.COMPLEX64,
}

# Storages whose elements are not ours, but whose bytes can be listed as these.
_RAW_STORAGES: dict[str, DType] = {
    "QInt8Storage": DType.INT8,
    "QUInt8Storage": DType.UINT8,
    "QInt32Storage": DType.INT32,
    "QUInt4x2Storage": DType.UINT8,
    "QUInt2x4Storage": DType.UINT8,
    "UntypedStorage": DType.UINT8,
}
_SPARSE = {
    "coo": ("indices", "values", "size", "is_coalesced"),
    "csr": ("crow_indices", "col_indices", "values", "size"),
    "bsr": ("crow_indices", "col_indices", "values", "size"),
    "csc": ("ccol_indices", "row_indices", "values", "size"),
    "bsc": ("ccol_indices", "row_indices", "values", "size"),
}

_CALLS: dict[tuple[str, str], Callable[[TorchBuilder, tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_qtensor"): _rebuild_qtensor,
    ("torch._utils", "_rebuild_sparse_tensor"): _rebuild_sparse_tensor,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): _rebuild_sparse_tensor,
    ("torch._utils", "_rebuild_nested_tensor"): _rebuild_nested_tensor,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _rebuild_meta_tensor,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch._utils", "_rebuild_parameter"): _first_argument,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter_with_state,
    ("torch._tensor", "_rebuild_from_type"): _rebuild_from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): _torch_size,
    ("torch", "device"): _torch_device,
    ("collections", "OrderedDict"): _ordered_dict,
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _numpy_dtype,
}
for _module in ("builtins", "__builtin__"):
    for _kind in (set, frozenset, complex, bytes, bytearray):
        _CALLS[_module, _kind.__name__] = _plain(_kind)
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _CALLS[_module, "_reconstruct"] = _reconstruct
    _CALLS[_module, "scalar"] = _numpy_scalar
for _module in ("numpy.core.numeric", "numpy._core.numeric"):
    _CALLS[_module, "_frombuffer"] = _numpy_from_buffer
