"""The few parts of the standard library that a node needs, without what their modules import.

A launch waits for the slowest node, and a sandbox runs all nodes on one machine: `json`, `signal` and `ctypes` would be
16 of the 31 ms of processor time that a node's half costs, nearly all of it for `re` and `enum`, which nothing here
uses. CPython keeps their compiled halves in modules of their own; on any other Python the public modules are used.
Stdlib only, Python 3.8.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know the name; importing it from `typing` would cost what is saved here
if TYPE_CHECKING:
    import signal
else:
    try:
        import _signal as signal
    except ImportError:
        import signal

__all__ = ["dumps", "loads", "prctl", "signal"]


class _AsWritten:
    """What `json.JSONDecoder` hands to its scanner: nothing is changed on the way."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int

    @staticmethod
    def parse_constant(name: str) -> float:
        """NaN and the infinities, which Python writes although JSON has no word for them."""
        return float(name.replace("Infinity", "inf"))


def _refuse(value: object) -> object:
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _codec() -> tuple:  # type: ignore[type-arg]  # two functions: scan(text, start) and encode(value, level)
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner
    except ImportError:
        from json.decoder import JSONDecoder
        from json.encoder import JSONEncoder

        encoder = JSONEncoder(separators=(",", ":"))
        return JSONDecoder().raw_decode, lambda value, _: encoder.iterencode(value)
    encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
    return make_scanner(_AsWritten), encode  # type: ignore[arg-type]


_scan, _encode = _codec()


def loads(data: bytes):  # type: ignore[no-untyped-def]  # any JSON value
    """The value of a JSON text.

    Raises:
        ValueError: it is none.
    """
    text = data.decode().strip()
    try:
        value, end = _scan(text, 0)
        if end == len(text):
            return value
    except (StopIteration, SystemError):  # the latter when it would raise an error of `json`, which is not loaded
        pass
    import json

    return json.loads(text)  # says what is wrong


def dumps(value: object) -> bytes:
    """A value as JSON, without spaces.

    Raises:
        TypeError: a part of it has no form in JSON.
    """
    return "".join(_encode(value, 0)).encode()


def prctl(option: int, value: int) -> bool:
    """Change an attribute of this process (the system call of this name); whether the kernel has done so."""
    try:
        from _ctypes import call_function, dlopen, dlsym

        return bool(call_function(dlsym(dlopen("", 2), "prctl"), (option, value, 0, 0, 0)) == 0)
    except (ImportError, OSError):
        pass
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False
