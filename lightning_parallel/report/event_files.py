"""Scalars of TensorBoard's event files, read without TensorBoard.

A file is a sequence of records (TensorFlow's `record_writer.h`): the length in 8 bytes, a checksum in 4, the data, and
a checksum in 4. The data is a protocol buffer, `Event`: `step` is field 2, `summary` field 5; in that, `value` is
field 1, of which `tag` is field 1, and `simple_value` field 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_LENGTH, _CHECKSUM = 8, 4
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE = 2, 5, 1, 1, 2


def read_scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """The scalars of an event file as (name, step, value), in order; up to where a run that was killed has written.

    Args:
        path: The file.
    """
    data = path.read_bytes()
    at = 0
    while at + _LENGTH + _CHECKSUM <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        begin = at + _LENGTH + _CHECKSUM
        at = begin + length + _CHECKSUM
        if at > len(data):
            return
        yield from _scalars_of_event(data[begin : begin + length])


def _scalars_of_event(event: bytes) -> Iterator[tuple[str, int, float]]:
    step, summaries = 0, []
    for number, value in _fields(event):
        if number == _STEP and isinstance(value, int):
            step = value
        elif number == _SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in _fields(summary):
            found = dict(_fields(value)) if number == _VALUE and isinstance(value, bytes) else {}
            tag, simple = found.get(_TAG), found.get(_SIMPLE)
            if isinstance(tag, bytes) and isinstance(simple, bytes) and len(simple) == 4:
                yield tag.decode(errors="replace"), step, struct.unpack("<f", simple)[0]


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field; integers as such, all else as bytes. Ends where the message is none."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED_64, _FIXED_32):
            size = 8 if kind == _FIXED_64 else 4
        else:
            return
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """An integer in groups of seven bits, and where it ends."""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    return value, at
