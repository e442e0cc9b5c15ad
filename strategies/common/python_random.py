"""Python's global random generator, read and set as bytes.

``random.getstate`` makes an object of each of the 624 words of a state, which takes many times as long as to copy them.
"""

import ctypes
import random
import struct
import sys
from typing import Any

WORDS = struct.Struct("i624I")
"""Memory of a Mersenne Twister: its position and words in Python, words and position in numpy."""


def words_of_python() -> tuple[Any, Any]:
    """Return Python's global generator and its memory, or ``None`` if that does not follow the header of its object."""
    generator: Any = getattr(random.getstate, "__self__", None)
    size, base = object.__basicsize__ + WORDS.size, random.Random.__base__
    if type(generator) is not random.Random or sys.implementation.name != "cpython" or base is None:
        return generator, None
    if not size <= base.__basicsize__ < size + 8:
        return generator, None
    memory = (ctypes.c_char * WORDS.size).from_address(id(generator) + object.__basicsize__)
    position, *words = WORDS.unpack(memory.raw)
    return generator, memory if generator.getstate()[1] == (*words, position) else None
