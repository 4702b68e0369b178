"""The header of a GGUF file: metadata, and the location of each tensor's data.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every size in the header is
compared with the size of the file, and with a limit, before anything is read or built for it.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import SpecJAXError
from specjax.files import one_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
# Far above what tokenizers need. A large file could hold much more, which would fill the memory.
MAX_ARRAY_LENGTH = 2**20
MAX_STRING_BYTES = 2**24
MIN_STRING_BYTES = 8  # its length
MIN_ARRAY_BYTES = 12  # type and number of its values
MIN_FIELD_BYTES = 13  # name, type and a value of one byte
MIN_TENSOR_BYTES = 24  # name, number of dimensions, type and offset


class GGUFTensor(NamedTuple):
    """Location of the data of a tensor.

    Attributes:
      name: llama.cpp's name of the tensor.
      shape: shape, outermost axis first.
      kind: the `gguf.GGMLQuantizationType` of the data.
      offset: position of the first byte, from the start of the tensors' data.
      num_bytes: size of the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    offset: int
    num_bytes: int


class GGUFHeader(NamedTuple):
    """The part of a GGUF file before its data.

    Attributes:
      metadata: values by name.
      tensors: tensors by name.
      data: the mapped file.
      data_start: position in the file of the tensors' data.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap
    data_start: int


def read(path: pathlib.Path) -> GGUFHeader:
    """Reads the header of a GGUF file.

    Raises:
      SpecJAXError: naming what is wrong with the file, and the tensor if one is at fault.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise SpecJAXError(f"{path}: truncated or not a GGUF file: {one_line(error)}") from error
    try:
        return _read(data)
    except SpecJAXError as error:
        raise SpecJAXError(f"{path}: {error}") from error
    except Exception as error:  # text that is not UTF-8, types that do not exist
        raise SpecJAXError(f"{path}: truncated or not a GGUF file: {one_line(error)}") from error


class _Cursor:
    """Reads values from a mapped file, one after the other."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def check(self, num_bytes: int) -> None:
        """Raises SpecJAXError if the file has fewer bytes left."""
        left = len(self.data) - self.offset
        if num_bytes > left:
            raise SpecJAXError(
                f"truncated or not a GGUF file: the header needs {num_bytes} bytes at byte "
                f"{self.offset}, but the file has {left} left"
            )

    def take(self, num_bytes: int) -> bytes:
        self.check(num_bytes)
        start = self.offset
        self.offset += num_bytes
        return self.data[start : self.offset]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def text(self) -> str:
        length = self.u64()
        self.check(length)
        _check_limit("string", length, MAX_STRING_BYTES, "bytes")
        return self.take(length).decode()

    def scalars(self, kind: int, count: int) -> list:
        dtype = np.dtype(SCALARS[kind])
        raw = self.take(count * dtype.itemsize)
        return np.frombuffer(raw, dtype).tolist()

    def value(self, kind: int) -> Any:
        """A value of the given type; arrays of arrays are flattened."""
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise SpecJAXError(f"truncated or not a GGUF file: unknown type of value {kind}")
        return self.scalars(kind, 1)[0]

    def array(self) -> list:
        kind = self.u32()
        count = self.u64()
        min_bytes = MIN_STRING_BYTES if kind == STRING else MIN_ARRAY_BYTES
        if kind in SCALARS:
            min_bytes = np.dtype(SCALARS[kind]).itemsize
        self.check(count * min_bytes)
        _check_limit("array", count, MAX_ARRAY_LENGTH, "values")
        if kind in SCALARS:
            return self.scalars(kind, count)
        values = []
        for _ in range(count):
            value = self.value(kind)
            if isinstance(value, list):
                values += value
            else:
                values.append(value)
        return values


def _check_limit(what: str, size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise SpecJAXError(
            f"a header with {what}s of {size} {unit} is not supported; at most {limit}"
        )


def _read(data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise SpecJAXError("truncated or not a GGUF file: it does not start with 'GGUF'")
    version = cursor.u32()
    if version not in VERSIONS:
        raise SpecJAXError(f"GGUF version {version} is not supported; supported: 2, 3")
    num_tensors = cursor.u64()
    num_fields = cursor.u64()

    cursor.check(num_fields * MIN_FIELD_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.text()
        if name in metadata:
            raise SpecJAXError(f"field {name} occurs twice")
        metadata[name] = cursor.value(cursor.u32())

    cursor.check(num_tensors * MIN_TENSOR_BYTES)
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        tensor = _read_tensor(cursor)
        if tensor.name in tensors:
            raise SpecJAXError(f"tensor {tensor.name} occurs twice")
        tensors[tensor.name] = tensor

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise SpecJAXError(f"general.alignment must be a power of two, got {alignment!r}")
    data_start = math.ceil(cursor.offset / alignment) * alignment
    _check_positions(list(tensors.values()), alignment, max(0, len(data) - data_start))
    return GGUFHeader(metadata, tensors, data, data_start)


def _read_tensor(cursor: _Cursor) -> GGUFTensor:
    import gguf

    name = cursor.text()
    num_dimensions = cursor.u32()
    if num_dimensions > MAX_DIMENSIONS:
        raise SpecJAXError(
            f"tensor {name} has {num_dimensions} dimensions; at most {MAX_DIMENSIONS} are possible"
        )
    innermost_first = [cursor.u64() for _ in range(num_dimensions)]
    shape = tuple(reversed(innermost_first))
    kind_number = cursor.u32()
    offset = cursor.u64()
    try:
        kind = gguf.GGMLQuantizationType(kind_number)
    except ValueError as error:
        raise SpecJAXError(f"tensor {name} has the unknown type {kind_number}") from error
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    row_length = shape[-1] if shape else 1
    if row_length % values_per_block:
        raise SpecJAXError(
            f"tensor {name} has rows of {row_length} values; {kind.name} requires a multiple of "
            f"{values_per_block}"
        )
    num_bytes = math.prod(shape) // values_per_block * bytes_per_block
    return GGUFTensor(name, shape, kind, offset, num_bytes)


def _check_positions(tensors: list[GGUFTensor], alignment: int, data_size: int) -> None:
    """Every tensor is aligned and inside the file, and no two of them share bytes."""
    previous = None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        end = tensor.offset + tensor.num_bytes
        if tensor.offset % alignment:
            raise SpecJAXError(
                f"tensor {tensor.name} has offset {tensor.offset}, which is not a multiple of the "
                f"alignment {alignment}"
            )
        if end > data_size:
            raise SpecJAXError(
                f"truncated or not a GGUF file: the data of tensor {tensor.name} end at byte "
                f"{end}, but there are {data_size}"
            )
        if previous is not None and tensor.offset < previous.offset + previous.num_bytes:
            raise SpecJAXError(f"tensors {previous.name} and {tensor.name} share bytes")
        previous = tensor
