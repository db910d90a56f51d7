"""Matrix products with packed weights by `kernels.cpp`, compiled for this processor, or else by torch."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Literal, cast

import torch
import torch.nn.functional as F

from heedful import processor_heed
from heedful.checksums_heed import checksum
from heedful.fast_paths_heed import linear
from heedful.files import flush

Precision = Literal["float32", "int8"]
Product = Callable[[torch.Tensor], torch.Tensor]  # from `(rows, in_features)` to `(rows, out_features)`

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
# Sums may be added in any order, in many registers.
FLAGS = ["-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-fopenmp-simd"]
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
REGISTERS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    "AVX2": ["-mavx2", "-mfma"],
}
INT8_LIMIT = 127
BYTES_AT_ONCE = 4  # inputs per instruction


class Linear(ctypes.Structure):
    """The structure with this name in `kernels.cpp`, like the following ones."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale", "offset")),
        *((name, ctypes.c_int32) for name in ("in_features", "out_features")),
    ]


class Norm(ctypes.Structure):
    """A norm's weights."""

    _fields_ = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float)]


class Layer(ctypes.Structure):
    """A layer with one search's cache."""

    _fields_ = [
        *((n, Linear) for n in ("query_key_value", "self_output", "query", "cross_output", "inner", "outer")),
        *((name, Norm) for name in ("self_attn_norm", "cross_attn_norm", "feed_forward_norm")),
        *((name, ctypes.c_void_p) for name in ("target", "source")),
    ]


class Model(ctypes.Structure):
    """The decoder's other parts."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("layers", "width", "heads", "inner", "is_post_norm")),
        ("norm", Norm),
        ("output", Linear),
        ("embedding", ctypes.c_void_p),
        ("embedding_scale", ctypes.c_float),
    ]


def place_of(numbers: torch.Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor's numbers; a `ValueError` if `kernels.cpp` cannot use them."""
    is_dense = numbers.is_contiguous() and numbers.device.type == "cpu"
    if numbers.shape != shape or numbers.dtype != dtype or not is_dense:
        found = f"{tuple(numbers.shape)} of {numbers.dtype} on {numbers.device}" + " with gaps" * (not is_dense)
        raise ValueError(f"A tensor for the kernels must be {shape} of {dtype} on the CPU, but is {found} instead.")
    return numbers.data_ptr()


class CompiledProduct:
    """The product x ↦ x Wᵀ + b, or max(0, x Wᵀ + b), from `(rows, in_features)` to `(rows, out_features)` in float32.

    `is_int8` computes in 8 bits, with a scale per output feature and row. Rows never depend on each other.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_int8: bool, is_relu: bool):
        self._library, self.is_relu = cast("ctypes.CDLL", library()), is_relu
        width, (features, inputs) = self._library.panel_width(), weight.shape
        depth = BYTES_AT_ONCE if is_int8 else 1
        weight = F.pad(weight, (0, -inputs % depth, 0, -features % width))
        scale = offset = None
        if is_int8:
            scale = (weight.abs().amax(1) / INT8_LIMIT).clamp(min=torch.finfo(torch.float32).tiny)
            weight = (weight / scale[:, None]).round().to(torch.int8)
            offset = 128 * weight.sum(1, dtype=torch.int32)
        packed = weight.view(-1, width, weight.shape[1] // depth, depth).transpose(1, 2).contiguous()
        place_of(packed, *packed.shape, dtype=torch.int8 if is_int8 else torch.float32)
        if bias is not None:
            place_of(bias := bias.contiguous(), features)
        self._kept = packed, bias, scale, offset
        self.linear = Linear(*(None if each is None else each.data_ptr() for each in self._kept), inputs, features)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply `(rows, in_features)` states."""
        states, rows = states.contiguous(), len(states)
        output = states.new_empty(rows, self.linear.out_features)
        places = ctypes.byref(self.linear), place_of(states, rows, self.linear.in_features), rows, output.data_ptr()
        self._library.linear(*places, self.is_relu, torch.get_num_threads())
        return output


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, precision: Precision = "float32", relu: bool = False
) -> Product:
    """Return x ↦ x Wᵀ + b, or max(0, x Wᵀ + b), for an `(out_features, in_features)` matrix; `int8` needs VNNI."""
    weight, bias = weight.detach().float(), None if bias is None else bias.detach().float()
    if library() is not None:
        return CompiledProduct(weight, bias, precision == "int8", relu)

    def plain(states: torch.Tensor) -> torch.Tensor:
        output = linear(states, weight, bias)
        return output.relu_() if relu else output

    return plain


def has_bytes() -> bool:
    """Return whether the kernels can multiply bytes on this processor."""
    return processor_heed.has("avx512_vnni")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or `None` with a warning if compiling or loading fails."""
    if processor_heed.registers() not in REGISTERS:
        return None
    flags = FLAGS + REGISTERS[processor_heed.registers()] + ["-mavx512vnni"] * has_bytes()
    try:
        loaded = _loaded(flags)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        warnings.warn(f"The native decoder runs without its kernels, so more slowly: {reason}", stacklevel=2)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    loaded.linear.argtypes = [*[pointer] * 2, number, pointer, *[number] * 2]
    loaded.step.argtypes = [*[pointer] * 2, *[number] * 3, *[pointer] * 6, number]
    loaded.continuations.argtypes = [*[pointer] * 2, *[number] * 4, *[pointer] * 3, number]
    return loaded


def _loaded(flags: list[str]) -> ctypes.CDLL:
    key = hashlib.sha256(" ".join([SOURCE.read_text(encoding="utf-8"), platform.machine(), *flags]).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # XDG ignores a relative path.
    folder = (cache if cache.is_absolute() else Path.home().absolute() / ".cache") / "heedful"
    name = f"kernels-{key.hexdigest()[:16]}.so"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.name != "posix":
        return _library_at(folder / name, flags)
    if folder.is_symlink():
        raise PermissionError(f"{folder} must be a folder, but is a link")
    # Opened once, and no link: in a shared cache another user could replace it between two checks.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError(f"{folder} must belong to the current user, but does not")
        os.fchmod(handle, 0o700)
        opened = Path(f"/proc/{os.getpid()}/fd/{handle}")  # the compiler can open it too
        return _library_at((opened if opened.is_dir() else folder) / name, flags)
    finally:
        os.close(handle)


def _library_at(path: Path, flags: list[str]) -> ctypes.CDLL:
    # No link, no file that others can change, and no incomplete file, which would end Python. A complete one may lack
    # its libraries.
    with suppress(OSError):
        found = path.lstat()
        is_mine = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
        if is_mine and S_ISREG(found.st_mode) and path.with_suffix(".sha256").read_text("utf-8") == checksum(path):
            return ctypes.CDLL(str(path))
    _compile(path, flags)
    return ctypes.CDLL(str(path))


def _compile(path: Path, flags: list[str]) -> None:
    if (compiler := next(filter(None, map(shutil.which, COMPILERS)), None)) is None:
        raise FileNotFoundError(f"no C++ compiler ({', '.join(COMPILERS)}) was found")
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = Path(temporary) / path.name
        command = [compiler, *flags, str(SOURCE), "-o", str(made)]
        run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=120)  # seconds
        # Without OpenMP, it uses one thread.
        if run([*command, "-fopenmp"]).returncode:
            run(command, check=True)
        made.chmod(0o700)
        made.with_suffix(".sha256").write_text(checksum(made), encoding="utf-8")
        for file in (made, made.with_suffix(".sha256")):
            flush(file)
            file.replace(path.with_name(file.name))  # at once, for other processes
    flush(path.parent)
