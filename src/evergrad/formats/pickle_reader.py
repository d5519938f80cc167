"""A reader of pickle streams that runs nothing.

A pickle is a program for a small stack machine, and its `REDUCE` opcode calls anything that can be imported.
This machine knows the same opcodes and does none of that: a global is a `GlobalName` (two strings), a call is
what the `PickleBuilder` makes of those strings, and everything unknown becomes an inert `Opaque` that can be walked
but not run. No module is imported and no attribute is looked up on behalf of the stream.

Work and memory are bounded: every opcode is bounded by the bytes it comes from, their number is limited, and
memo indices are keys of a dict, so that a huge one costs nothing.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from evergrad.errors import said
from evergrad.state import Opaque

MAX_OPCODES = 16_000_000  # about 400,000 tensors
MAX_ODD_KEYS = 1_000


class PickleError(Exception):
    """The stream is no pickle, is damaged, or asks for what is not served.

    `cut_short` tells that the bytes ended before the stream did, so that more of them may help.
    """

    def __init__(self, message: str, *, cut_short: bool = False) -> None:
        super().__init__(message)
        self.cut_short = cut_short


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A name in a module: what a pickle would import, and this reader does not."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def inert_name(self) -> str:
        """What it is where it stands as a value."""
        return str(self)


class PickleBuilder(Protocol):
    """What the stream's names mean; every method only combines inert values."""

    def persistent(self, identifier: Any) -> Any:
        """A reference to something outside the stream."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The value of a call that is not made."""

    def set_state(self, target: Any, state: Any) -> Any:
        """The target after `BUILD`."""

    def name(self, name: GlobalName) -> Any:
        """What a name stands for by itself; the name, if nothing is known of it."""


_MARK = object()
_COSTLY_KEYS = (tuple, frozenset, complex)
_INT4 = struct.Struct("<i").unpack_from
_UINT2 = struct.Struct("<H").unpack_from
_UINT4 = struct.Struct("<I").unpack_from
_UINT8 = struct.Struct("<Q").unpack_from
_FLOAT8 = struct.Struct(">d").unpack_from


def read_pickle(data: bytes, builder: PickleBuilder, start: int = 0) -> tuple[Any, int, int]:
    """The value of the stream at `start`, where the stream ends, and how many opcodes it took."""
    machine = _PickleMachine(data, builder, start)
    try:
        value = machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        cut_short = machine.position > len(data) - 16
        what = f"damaged at byte {machine.position}: {type(error).__name__}: {said(error)}"
        raise PickleError(what, cut_short=cut_short) from None
    return value, machine.position, machine.count


class _PickleMachine:
    def __init__(self, data: bytes, builder: PickleBuilder, start: int) -> None:
        self.data = data
        self.builder = builder
        self.position = start
        self.count = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], Any] = {}
        self.odd_keys = 0

    def run(self) -> Any:
        """Opcode by opcode; the ones that fill a torch checkpoint come first, the rest go through a table."""
        data, stack, memo, push = self.data, self.stack, self.memo, self.stack.append
        builder, size = self.builder, len(self.data)
        position, count = self.position, 0
        try:
            while True:
                if position >= size:
                    raise PickleError(f"cut short at byte {position}: no STOP", cut_short=True)
                opcode = data[position]
                position += 1
                count += 1
                if opcode == 0x71:  # BINPUT
                    memo[data[position]] = stack[-1]
                    position += 1
                elif opcode == 0x72:  # LONG_BINPUT
                    memo[_UINT4(data, position)[0]] = stack[-1]
                    position += 4
                elif opcode == 0x68:  # BINGET
                    push(memo[data[position]])
                    position += 1
                elif opcode == 0x6A:  # LONG_BINGET
                    push(memo[_UINT4(data, position)[0]])
                    position += 4
                elif opcode == 0x4B:  # BININT1
                    push(data[position])
                    position += 1
                elif opcode == 0x28:  # MARK
                    push(_MARK)
                elif opcode == 0x58:  # BINUNICODE
                    end = position + 4 + _UINT4(data, position)[0]
                    if end > size:
                        raise PickleError(f"a string at byte {position} runs beyond the end", cut_short=True)
                    push(data[position + 4 : end].decode("utf-8", "surrogatepass"))
                    position = end
                elif opcode == 0x74:  # TUPLE
                    push(tuple(self.marked()))
                elif opcode == 0x86:  # TUPLE2
                    stack[-2:] = [(stack[-2], stack[-1])]
                elif opcode == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif opcode == 0x87:  # TUPLE3
                    stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
                elif opcode == 0x51:  # BINPERSID
                    stack[-1] = builder.persistent(stack[-1])
                elif opcode == 0x29:  # EMPTY_TUPLE
                    push(())
                elif opcode == 0x52:  # REDUCE
                    arguments = stack.pop()
                    if type(arguments) is not tuple:
                        raise PickleError(f"a call at byte {position} without a tuple of arguments")
                    stack[-1] = builder.call(stack[-1], arguments)
                elif opcode == 0x89:  # NEWFALSE
                    push(False)
                elif opcode == 0x4D:  # BININT2
                    push(_UINT2(data, position)[0])
                    position += 2
                elif opcode == 0x4A:  # BININT
                    push(_INT4(data, position)[0])
                    position += 4
                elif opcode == 0x2E:  # STOP
                    value = stack.pop()
                    if value is _MARK:
                        raise PickleError("a mark where the value should be")
                    return value
                else:
                    handler = _HANDLERS.get(opcode)
                    self.position = position
                    if handler is None:
                        raise PickleError(f"unknown opcode 0x{opcode:02x} at byte {position - 1}")
                    handler(self)
                    position = self.position
                if count > MAX_OPCODES:
                    raise PickleError(f"more than {MAX_OPCODES} opcodes")
        finally:
            self.position, self.count = position, count

    def marked(self) -> list[Any]:
        """Pop everything above the topmost mark, and the mark."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError(f"no mark at byte {self.position}")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def take(self, length: int) -> bytes:
        """The next bytes of the stream."""
        end = self.position + length
        if length < 0 or end > len(self.data):
            raise PickleError(f"{length} bytes at byte {self.position} run beyond the end", cut_short=length > 0)
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def line(self) -> bytes:
        """The next bytes up to a line feed."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise PickleError(f"a line at byte {self.position} without an end", cut_short=True)
        piece = self.data[self.position : end]
        self.position = end + 1
        return piece

    def name(self, module: str, name: str) -> Any:
        """What this name stands for, the same object each time."""
        key = (module, name)
        if key not in self.globals:
            self.globals[key] = self.builder.name(GlobalName(module, name))
        return self.globals[key]


def _set_items(machine: _PickleMachine, target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleError(f"a key without a value at byte {machine.position}")
    if isinstance(target, Opaque):
        target = target.parts
    if not isinstance(target, dict):
        raise PickleError(f"items for a {type(target).__name__} at byte {machine.position}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        target[_hashable(machine, key)] = value


def check_key(key: Any) -> bool:
    """Whether a key is one of the simple kinds, whose hashing a file cannot make expensive.

    Raises `PickleError` for those that it can: hashing a tuple of tuples of tuples … takes exponential time, and
    complex numbers can be made to collide by the thousand. Returns False for kinds that only many could abuse:
    tuples, and integers beyond 64 bits.
    """
    simple = True
    for part in key if type(key) is tuple else (key,):
        if type(part) is int:
            simple = simple and -(1 << 63) <= part < 1 << 64
        elif type(part) in _COSTLY_KEYS:
            raise PickleError(f"a {type(part).__name__} in a key, which can be made costly to hash")
    return simple and type(key) is not tuple


def _hashable(machine: _PickleMachine, key: Any) -> Any:
    if not check_key(key):
        machine.odd_keys += 1
        if machine.odd_keys > MAX_ODD_KEYS:
            raise PickleError(f"more than {MAX_ODD_KEYS} keys that are tuples or beyond 64 bits")
    return key


def _append(machine: _PickleMachine, target: Any, items: list[Any]) -> None:
    if isinstance(target, Opaque):
        target = target.parts.setdefault("[]", [])
    if not isinstance(target, list):
        raise PickleError(f"items for a {type(target).__name__} at byte {machine.position}")
    target.extend(items)


def _add(machine: _PickleMachine, target: Any, items: list[Any]) -> None:
    if not isinstance(target, set):
        raise PickleError(f"items for a {type(target).__name__} at byte {machine.position}")
    target.update(_hashable(machine, item) for item in items)


def _new_object(machine: _PickleMachine, cls: Any, arguments: Any, keywords: Any = None) -> Any:
    if type(arguments) is not tuple:
        raise PickleError(f"an object at byte {machine.position} without a tuple of arguments")
    if keywords:
        arguments = (*arguments, keywords)
    return machine.builder.call(cls, arguments)


def _push(read: Callable[[_PickleMachine], Any]) -> Callable[[_PickleMachine], None]:
    return lambda machine: machine.stack.append(read(machine))


def _pop_then(
    work: Callable[[_PickleMachine, Any, list[Any]], None], count: int = 0
) -> Callable[[_PickleMachine], None]:
    """Take items off the stack (those above the mark, or a number of them) and give them to the top."""

    def handler(machine: _PickleMachine) -> None:
        if count:
            items = machine.stack[-count:]
            del machine.stack[-count:]
        else:
            items = machine.marked()
        work(machine, machine.stack[-1], items)

    return handler


def _reduce_top(count: int, work: Callable[..., Any]) -> Callable[[_PickleMachine], None]:
    """Replace the top `count` values by what `work` makes of them."""

    def handler(machine: _PickleMachine) -> None:
        values = machine.stack[-count:]
        if len(values) < count:
            raise PickleError(f"stack too short at byte {machine.position}")
        machine.stack[-count:] = [work(machine, *values)]

    return handler


def _inst(machine: _PickleMachine) -> None:
    cls = machine.name(machine.line().decode(), machine.line().decode())
    machine.stack.append(_new_object(machine, cls, tuple(machine.marked())))


def _obj(machine: _PickleMachine) -> None:
    cls, *arguments = machine.marked()
    machine.stack.append(_new_object(machine, cls, tuple(arguments)))


def _memoize(machine: _PickleMachine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(machine: _PickleMachine) -> None:
    machine.memo[int(machine.line())] = machine.stack[-1]


def _pop(machine: _PickleMachine) -> None:
    machine.stack.pop()


def _text_int(machine: _PickleMachine) -> Any:
    line = machine.line()
    return {b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line)


def _text_string(machine: _PickleMachine) -> str:
    line = machine.line().strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"\"'":
        raise PickleError(f"a string without quotes at byte {machine.position}")
    return codecs.escape_decode(line[1:-1])[0].decode("latin-1")


def _long(machine: _PickleMachine, length: int) -> int:
    if length > 1024:
        raise PickleError(f"an integer of {length} bytes at byte {machine.position}")
    return int.from_bytes(machine.take(length), "little", signed=True)


def _stack_global(machine: _PickleMachine, module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise PickleError(f"a global without a name at byte {machine.position}")
    return machine.name(module, name)


def _refuse(what: str) -> Callable[[_PickleMachine], None]:
    def handler(machine: _PickleMachine) -> None:
        raise PickleError(f"{what} at byte {machine.position} is not served")

    return handler


def _dict_from_mark(machine: _PickleMachine) -> None:
    items = machine.marked()
    target: dict[Any, Any] = {}
    _set_items(machine, target, items)
    machine.stack.append(target)


def _frame(machine: _PickleMachine) -> None:
    machine.take(8)  # frames only say how far to read ahead


def _unicode(length: Callable[[_PickleMachine], int]) -> Callable[[_PickleMachine], None]:
    return _push(lambda m: m.take(length(m)).decode("utf-8", "surrogatepass"))


def _u1(machine: _PickleMachine) -> int:
    return machine.take(1)[0]


def _u4(machine: _PickleMachine) -> int:
    return int(_UINT4(machine.take(4))[0])


def _u8(machine: _PickleMachine) -> int:
    return int(_UINT8(machine.take(8))[0])


_HANDLERS: dict[int, Callable[[_PickleMachine], None]] = {
    0x80: lambda m: None if _u1(m) <= 5 else _refuse("a pickle protocol beyond 5")(m),  # PROTO
    0x95: _frame,  # FRAME
    0x4E: _push(lambda m: None),  # NONE
    0x88: _push(lambda m: True),  # NEWTRUE
    0x7D: _push(lambda m: {}),  # EMPTY_DICT
    0x5D: _push(lambda m: []),  # EMPTY_LIST
    0x8F: _push(lambda m: set()),  # EMPTY_SET
    0x47: _push(lambda m: _FLOAT8(m.take(8))[0]),  # BINFLOAT
    0x46: _push(lambda m: float(m.line())),  # FLOAT
    0x49: _push(_text_int),  # INT
    0x4C: _push(lambda m: int(m.line().rstrip(b"L"))),  # LONG
    0x8A: _push(lambda m: _long(m, _u1(m))),  # LONG1
    0x8B: _push(lambda m: _long(m, _INT4(m.take(4))[0])),  # LONG4
    0x53: _push(_text_string),  # STRING
    0x54: _push(lambda m: m.take(_INT4(m.take(4))[0]).decode("latin-1")),  # BINSTRING
    0x55: _push(lambda m: m.take(_u1(m)).decode("latin-1")),  # SHORT_BINSTRING
    0x56: _push(lambda m: m.line().decode("raw-unicode-escape")),  # UNICODE
    0x8C: _unicode(_u1),  # SHORT_BINUNICODE
    0x8D: _unicode(_u8),  # BINUNICODE8
    0x42: _push(lambda m: m.take(_u4(m))),  # BINBYTES
    0x43: _push(lambda m: m.take(_u1(m))),  # SHORT_BINBYTES
    0x8E: _push(lambda m: m.take(_u8(m))),  # BINBYTES8
    0x96: _push(lambda m: bytearray(m.take(_u8(m)))),  # BYTEARRAY8
    0x63: _push(lambda m: m.name(m.line().decode(), m.line().decode())),  # GLOBAL
    0x93: _reduce_top(2, _stack_global),  # STACK_GLOBAL
    0x64: _dict_from_mark,  # DICT
    0x6C: lambda m: m.stack.append(m.marked()),  # LIST
    0x91: lambda m: m.stack.append(frozenset([_hashable(m, item) for item in m.marked()])),  # FROZENSET
    0x73: _pop_then(_set_items, 2),  # SETITEM
    0x75: _pop_then(_set_items),  # SETITEMS
    0x61: _pop_then(_append, 1),  # APPEND
    0x65: _pop_then(_append),  # APPENDS
    0x90: _pop_then(_add),  # ADDITEMS
    0x62: _reduce_top(2, lambda m, target, state: m.builder.set_state(target, state)),  # BUILD
    0x81: _reduce_top(2, _new_object),  # NEWOBJ
    0x92: _reduce_top(3, _new_object),  # NEWOBJ_EX
    0x69: _inst,  # INST
    0x6F: _obj,  # OBJ
    0x50: _push(lambda m: m.builder.persistent(m.line().decode())),  # PERSID
    0x94: _memoize,  # MEMOIZE
    0x70: _put,  # PUT
    0x67: _push(lambda m: m.memo[int(m.line())]),  # GET
    0x30: _pop,  # POP
    0x31: lambda m: m.marked().clear(),  # POP_MARK
    0x32: lambda m: m.stack.append(m.stack[-1]),  # DUP
    0x82: _refuse("a copyreg extension"),  # EXT1
    0x83: _refuse("a copyreg extension"),  # EXT2
    0x84: _refuse("a copyreg extension"),  # EXT4
    0x97: _refuse("an out-of-band buffer"),  # NEXT_BUFFER
    0x98: _refuse("an out-of-band buffer"),  # READONLY_BUFFER
}
