"""Out-of-memory errors: recognizing them, reading how much they wanted, and releasing what they keep alive.

Errors are recognized by type first, then by text. An error that a retry cannot cure does not count.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Optional

import torch
from accelerate.utils.memory import should_reduce_batch_size

from scu_trainer.errors import UserError

# Texts of errors that are not a torch.OutOfMemoryError. From the sources and binaries of torch 2.13
# (c10/core/impl/alloc_cpu, ATen/cuda/Exceptions, ATen/native/cudnn/Conv, ATen/mps), bitsandbytes 0.50 (csrc), cuDNN 9's
# list of status codes, and from running oneDNN under RLIMIT_DATA, which gave "could not create a primitive" and
# "std::bad_alloc". bitsandbytes' CUDA code usually prints its text and ends the process, which cannot be caught.
_OUT_OF_MEMORY = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS backend) out of memory"
    # "CUDA error: out of memory", "CUDA driver error: out of memory", "Triton Error [CUDA]: out of memory",
    # "Error out of memory at line 88 in file .../ops.cu", "cuda failed with error 2 out of memory"
    r"|\b[Ee]rror(?: \[\w+\])?:?(?: \d+)? out of memory"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY"
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, hipBLAS; CUFFT_ALLOC_FAILED; cuDNN 9's ..._HOST/DEVICE_ALLOCATION_FAILED
    r"|STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_\w+_ALLOCATION_FAILED"
    # torch tries cuDNN's plans one by one and says only this when none of them got its workspace
    r"|[Uu]nable to find an engine to execute this computation|Unable to find a valid cuDNN algorithm"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|std::bad_alloc|\(Cannot allocate memory\)|: Cannot allocate memory \(12\)"
    # oneDNN. "could not create a primitive descriptor for ..." is an unsupported shape or type
    r"|could not create a (?:primitive|memory object|memory)$"
    r"|^Invalid buffer size: \d",  # MPS, for one tensor that is larger than any buffer
    re.MULTILINE,
)

# CUDA libraries report this if they cannot create a handle: the card is full, or its context is broken (for example by
# an index out of bounds), and then the driver reports no memory either.
_NO_HANDLE = re.compile(r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_NOT_INITIALIZED")

HANDLE_BYTES = 512 * 2**20
"""Enough room for a handle and its workspace, which are outside torch's allocator."""

# Out of memory for which a smaller micro-batch does not help: in a worker process or the pinning thread (host memory of
# the data loader; torch re-raises it in the main process with the original's type), and in NCCL, because its
# communicator is dead.
_OF_LOADER = re.compile(r"^Caught \w+ in (?:DataLoader worker process|pin memory thread)")
_ELSEWHERE = re.compile(rf"{_OF_LOADER.pattern}|\bNCCL error\b")

# torch's message about a worker that the kernel has killed: Linux sends SIGKILL or SIGBUS if the host's memory, or the
# shared memory of /dev/shm, is exhausted.
_ENDED_WORKER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (?:Killed|Bus error)")

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
# "Tried to allocate 20.00 MiB" (CUDA, HIP, XPU), "1.28 GB" (older MPS, also in powers of 1024), "256 bytes" (MPS), "you
# tried to allocate 1234 bytes" (CPU), "Unable to allocate 7.28 TiB" (NumPy)
_WANTED = re.compile(
    r"(?:[Tt]ried|[Uu]nable) to allocate (?P<amount>\d+(?:\.\d+)?) (?P<prefix>[KMGTPE]?)(?:i?B|bytes)\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a smaller micro-batch may cure this error.

    An error raised ``from`` an out-of-memory error counts (compilers and checkpointing wrap it). An error raised
    *while* one was handled does not: it is another fault, which a retry would hide. A UserError never counts, because
    its message is already meant for the user.
    """
    return any(_says_out_of_memory(link) for link in _own_chain(error))


def is_out_of_memory_in_loader(error: BaseException) -> bool:
    """Return whether a worker or the pinning thread of a data loader ran out of host memory."""
    text = str(error)
    if _ENDED_WORKER.search(text):
        return True
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in text for words in ("MemoryError", "[Errno 12]", "unable to allocate shared memory")
    )
    return bool(_OF_LOADER.match(text)) and (is_memory or _OUT_OF_MEMORY.search(text) is not None)


def wanted_bytes(error: BaseException) -> Optional[int]:
    """Return the size of the allocation that failed; None if the error does not say."""
    for link in _own_chain(error):
        if found := _WANTED.search(str(link)):
            return int(float(found["amount"]) * 1024 ** _PREFIXES.index(found["prefix"]))
    return None


def forget_traceback(error: BaseException) -> None:
    """Drop what the tracebacks of an error and of its causes keep alive, except for frames that still run."""
    for link in _whole_chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            _clear_variables(frame)
        link.__traceback__ = None


def _own_chain(error: Optional[BaseException]) -> Iterator[Exception]:
    """Yield the error and the errors that it was raised from, as far as they happened in the work of this step."""
    seen: set[int] = set()
    while isinstance(error, Exception) and not isinstance(error, UserError) and id(error) not in seen:
        if _ELSEWHERE.search(str(error)):
            return
        yield error
        seen.add(id(error))
        error = error.__cause__


def _says_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # accelerate fails on an error with an argument that is not text
    if _NO_HANDLE.search(text):
        free_bytes = _driver_free_bytes()
        return free_bytes is not None and free_bytes < HANDLE_BYTES
    return should_reduce_batch_size(RuntimeError(text)) or _OUT_OF_MEMORY.search(text) is not None


def _driver_free_bytes() -> Optional[int]:
    """Return the free memory of the current GPU; None if there is none, or if it no longer responds."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.mem_get_info()[0]
    except RuntimeError:
        return None


def _whole_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[Optional[BaseException]] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        yield link
        seen.add(id(link))
        waiting += [link.__cause__, link.__context__]


def _clear_variables(frame: FrameType) -> None:
    # clearing a generator that caught the error and will continue would end it; for one that will not, dropping the
    # traceback is enough
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return
    with contextlib.suppress(RuntimeError):  # the frame still runs
        frame.clear()
