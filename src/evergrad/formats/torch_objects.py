"""What the names in a torch pickle mean: storages, tensors, NumPy values; everything else stays inert."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evergrad.dtypes import DType
from evergrad.formats.opcodes import Global, PickleError, check_key
from evergrad.state import Opaque, Outline, Placement, Ready, Skeleton, find_sharing, outline
from evergrad.state.encoding import array_node, numpy_scalar_node
from evergrad.state.sharing import contiguous_strides
from evergrad.state.tree import EXTRA

__all__ = ["PickledTensors", "StorageRef", "TensorRef", "TorchBuilder"]


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
        return self.dtype.itemsize if self.dtype else 1


class TensorRef(NamedTuple):
    """A tensor as the pickle describes it; `offset` in bytes from the start of its record, strides in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _NumpyDtype:
    code: str
    order: str = "="

    def to_numpy(self) -> np.dtype[Any]:
        if not re.fullmatch(r"[fiubcSU]\d{1,6}", self.code):
            raise PickleError(f"NumPy dtype {self.code[:20]!r} is not a plain one")
        return np.dtype(("" if self.order in "|=" else self.order) + self.code)


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
        self.refs: Mapping[str, TensorRef] = walked.leaves
        self.placements = [
            (Placement(path, ref.storage.key, ref.offset, ref.shape, ref.stride, ref.dtype.itemsize), ref.dtype)
            for path, ref in self.refs.items()
        ]
        self.skeleton = Skeleton(walked.root, find_sharing(place for place, _ in self.placements))
        self.others = dict(self.skeleton.objects())


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
        if type(kind) is not Global or type(key) not in (str, int) or type(numel) is not int or numel < 0:
            raise PickleError("a storage without class, key and size")
        view = identifier[5] if len(identifier) > 5 else None
        offset = 0
        if type(view) is tuple and len(view) == 3 and type(view[1]) is int:
            offset = view[1]
        return StorageRef(str(key), _STORAGES.get(kind.name), numel, str(kind), offset)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The value of a call: known ones are described, all others stay an inert `Opaque`."""
        if type(function) is Global:
            known = _CALLS.get((function.module, function.name))
            if known is not None:
                return known(self, arguments)
            if function.module in ("copyreg", "copy_reg") and arguments and type(arguments[0]) is Global:
                return Opaque(str(arguments[0]))
            if function.name.startswith("_rebuild_") and function.module.startswith("torch"):
                return Opaque(f"a torch tensor of another kind ({function.name.removeprefix('_rebuild_')})")
            return Opaque(str(function), {"()": arguments} if arguments else {})
        return Opaque("a call of something that is no name")

    def name(self, name: Global) -> Any:
        """A torch dtype is a value; every other name stays a name."""
        dtype = DType.named(name.name) if name.module == "torch" else None
        return Ready({"torch.dtype": dtype.value}) if dtype else name

    def set_state(self, target: Any, state: Any) -> Any:
        """The target after `BUILD`: attributes become parts, array data becomes a value."""
        if type(target) is OrderedDict:
            if type(state) is dict and "_metadata" in state:
                setattr(target, "_metadata", state["_metadata"])
            if type(state) is not dict or state.keys() - {"_metadata"}:
                setattr(target, EXTRA, True)
        elif type(target) is _NumpyDtype:
            if type(state) is tuple and len(state) > 1 and type(state[1]) is str and state[1] in "<>|=":
                target.order = state[1]
        elif type(target) is Ready:
            target.node = _array_from_state(state)
        elif type(target) is Opaque:
            for part in state if type(state) is tuple and len(state) == 2 else (state,):
                if type(part) is dict:
                    target.parts.update(part)
                elif part is not None:
                    target.parts["state"] = part
        return target


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: DType | None = None) -> Any:
    if type(storage) is not StorageRef:
        raise PickleError("a tensor without a storage")
    dtype = dtype or storage.dtype
    if dtype is None:
        return Opaque(f"a tensor on {storage.type_name}")
    if type(offset) is not int or offset < 0:
        raise PickleError("a tensor at an impossible offset")
    start = storage.offset * storage.itemsize + offset * dtype.itemsize
    return TensorRef(storage, dtype, start, _lengths(shape), _lengths(stride))


def _lengths(value: Any) -> tuple[int, ...]:
    if type(value) is Ready and isinstance(value.node, dict):
        node: Any = value.node.get("torch.Size")
        value = tuple(node) if isinstance(node, list) else None
    if type(value) is tuple and len(value) <= 64:
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
        return Opaque("a torch tensor with a lazy conjugate or negative bit")
    return _tensor(storage, offset, shape, stride)


def _rebuild_tensor_v3(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    storage, offset, shape, stride, _grad, _hooks, dtype, *rest = arguments
    if rest and rest[0]:
        return Opaque("a torch tensor with a lazy conjugate or negative bit")
    name = dtype.node["torch.dtype"] if type(dtype) is Ready and type(dtype.node) is dict else dtype.name
    known = DType.named(name)
    return _tensor(storage, offset, shape, stride, known) if known else Opaque(f"a tensor of torch.{name}")


def _first_argument(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    return arguments[0]


def _rebuild_from_type(builder: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    function, _type, inner, *_ = arguments
    if type(inner) is not tuple:
        raise PickleError("a tensor subclass without arguments")
    return builder.call(function, inner)


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
    return _NumpyDtype(code) if type(code) is str else Opaque("numpy.dtype")


def _numpy_scalar(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    dtype, data = arguments
    if type(dtype) is not _NumpyDtype or type(data) is not bytes:
        return Opaque("numpy.scalar")
    return Ready(numpy_scalar_node(np.frombuffer(data, dtype.to_numpy())[0]))


def _numpy_from_buffer(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    data, dtype, shape, order = arguments
    if type(data) is not bytes:
        return Opaque("numpy.ndarray")
    return Ready(_array_from_state((1, shape, dtype, order == "F", data)))


def _array_from_state(state: Any) -> Any:
    if type(state) is not tuple or len(state) != 5 or type(state[2]) is not _NumpyDtype or type(state[4]) is not bytes:
        return {"object": "numpy.ndarray", "parts": []}
    array = np.frombuffer(state[4], state[2].to_numpy()).reshape(_lengths(state[1]), order="F" if state[3] else "C")
    return array_node(array)


def _encode(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    """`_codecs.encode(text, "latin1")`: how old protocols write bytes."""
    if len(arguments) == 2 and type(arguments[0]) is str and arguments[1] == "latin1":
        return arguments[0].encode("latin-1")
    return Opaque("_codecs.encode")


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
    return Ready({"torch.Size": list(_lengths(tuple(arguments[0]) if arguments else ()))})


def _torch_device(_: TorchBuilder, arguments: tuple[Any, ...]) -> Any:
    if not all(type(part) in (str, int) for part in arguments):
        return Opaque("torch.device")
    return Ready({"torch.device": ":".join(str(part) for part in arguments)})


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

_CALLS: dict[tuple[str, str], Callable[[TorchBuilder, tuple[Any, ...]], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _first_argument,
    ("torch._utils", "_rebuild_parameter_with_state"): _first_argument,
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
    _CALLS[_module, "_reconstruct"] = lambda _builder, _arguments: Ready({"object": "numpy.ndarray", "parts": []})
    _CALLS[_module, "scalar"] = _numpy_scalar
for _module in ("numpy.core.numeric", "numpy._core.numeric"):
    _CALLS[_module, "_frombuffer"] = _numpy_from_buffer
