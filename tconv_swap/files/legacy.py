"""Networks saved before PyTorch 1.6, rewritten so that PyTorch's safe loader reads them.

Such a pickle refers to the class of a layer by a persistent id, `("module", class, source file, source)`,
which `torch.load(weights_only=True)` refuses. Here each of them becomes a call of `container_class` with
these four: the class goes through the loader's allow-list as any other, and the source code is ignored.
"""

from __future__ import annotations

from io import BytesIO
from pickletools import genops
from typing import IO, Any

# The magic number, the protocol version, byte order and word sizes. After the object come its storages.
PICKLES_BEFORE_OBJECT = 3
_CLOSING_MARK = ("APPENDS", "DICT", "LIST", "SETITEMS", "TUPLE")
_A_MARK = object()


def container_class(typename: str, cls: type, source_file: str, source: str) -> type:
    """The second part of a legacy persistent id of a layer."""
    return cls


def readable_by_safe_loader(stream: IO[bytes]) -> BytesIO:
    """The whole legacy file in a form for the safe loader, which checks every name in it as in any file.

    Raises:
        ValueError, EOFError, IndexError: the file is damaged.
    """
    for _ in range(PICKLES_BEFORE_OBJECT):
        _skip_pickle(stream)
    start = stream.tell()
    edits = _edits(stream)
    stream.seek(0)
    content = stream.read()
    pieces, position = [], 0
    for offset, removed, inserted in sorted(edits):
        pieces += [content[position : start + offset], inserted]
        position = start + offset + removed
    return BytesIO(b"".join([*pieces, content[position:]]))


def _skip_pickle(stream: IO[bytes]) -> None:
    for _ in genops(stream):
        pass


def _edits(stream: IO[bytes]) -> list[tuple[int, int, bytes]]:
    """`(offset in the pickle, bytes removed, bytes inserted)` for every layer class in the object's pickle.

    MARK "module" class file source TUPLE BINPERSID  becomes  GLOBAL MARK "module" ... TUPLE REDUCE.
    """
    call = f"c{container_class.__module__}\n{container_class.__qualname__}\n".encode()
    start = stream.tell()
    edits: list[tuple[int, int, bytes]] = []
    memo: dict[int, Any] = {}
    # Offset of each open mark, and the first string that was pushed after it.
    marks: list[tuple[int, Any]] = []
    last_tuple: tuple[int, Any] | None = None
    previous: Any = None
    for opcode, argument, position in genops(stream):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = previous
            continue
        offset = (position or 0) - start
        pushed = memo.get(int(argument or 0)) if opcode.name in ("BINGET", "LONG_BINGET") else argument
        if previous is _A_MARK and opcode.name != "MARK":
            marks[-1] = (marks[-1][0], pushed)
        if opcode.name == "BINPERSID" and last_tuple is not None and last_tuple[1] == "module":
            edits += [(last_tuple[0], 0, call), (offset, 1, b"R")]
        closed = marks.pop() if opcode.name in _CLOSING_MARK else None
        last_tuple = closed if opcode.name == "TUPLE" else None
        if opcode.name == "MARK":
            marks.append((offset, None))
            pushed = _A_MARK
        previous = pushed
    return edits
