"""Errors that mean out of memory: recognizing them, what they wanted, and letting go of what they keep alive.

Decided by type first; the texts are of errors that bear no such type. What a retry cannot cure is not counted.
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

# Texts of errors that are no torch.OutOfMemoryError. From the sources and binaries of torch 2.13 (c10/core/impl/
# alloc_cpu, ATen/cuda/Exceptions, ATen/native/cudnn/Conv, ATen/mps), bitsandbytes 0.50 (csrc), cuDNN 9's list of
# status codes, and from running oneDNN under RLIMIT_DATA, which gave "could not create a primitive" and
# "std::bad_alloc". bitsandbytes' CUDA code usually prints its text and ends the process, which nobody can catch.
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

# Libraries of CUDA say this where they cannot make a handle. The card is full; or its context is broken, by an index
# outside of a table for instance, and then the driver gives no figures either.
_NO_HANDLE = re.compile(r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_NOT_INITIALIZED")

HANDLE_BYTES = 512 * 2**20
"""Room enough for a handle and its workspace, which lie outside torch's allocator."""

# Out of memory where a smaller micro-batch does not help: in a worker process or the pinning thread (host memory of
# the data loader; torch re-raises it in the main process with the original's type), and in NCCL, whose communicator is
# dead.
_ELSEWHERE = re.compile(r"^Caught \w+ in (?:DataLoader worker process|pin memory thread)|\bNCCL error\b")

# A worker's or the pinning thread's error, and what torch says of a worker that the kernel has ended: SIGKILL and
# SIGBUS are how Linux says that the host's memory, or the shared memory of /dev/shm, is used up.
_OF_LOADER = re.compile(r"^Caught \w+ in (?:DataLoader worker process|pin memory thread)")
_ENDED_WORKER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: (?:Killed|Bus error)")

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
# "Tried to allocate 20.00 MiB" (CUDA, HIP, XPU), "1.28 GB" (MPS before it wrote GiB; powers of 1024 all the same),
# "256 bytes" (MPS), "you tried to allocate 1234 bytes" (CPU), "Unable to allocate 7.28 TiB" (NumPy)
_WANTED = re.compile(
    r"(?:[Tt]ried|[Uu]nable) to allocate (?P<amount>\d+(?:\.\d+)?) (?P<prefix>[KMGTPE]?)(?:i?B|bytes)\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch may cure this error.

    An error raised ``from`` one that is out of memory counts (compilers and checkpointing wrap), one merely raised
    *while* such an error was handled does not: it is another fault, and hiding it behind a retry would lose it.
    A UserError never counts: somebody has already decided what to tell the user.
    """
    return any(_says_out_of_memory(link) for link in _own_chain(error))


def is_out_of_memory_in_loader(error: BaseException) -> bool:
    """Whether a data loader's worker or pinning thread ran out of the host's memory."""
    text = str(error)
    if _ENDED_WORKER.search(text):
        return True
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in text for words in ("MemoryError", "[Errno 12]", "unable to allocate shared memory")
    )
    return bool(_OF_LOADER.match(text)) and (is_memory or _OUT_OF_MEMORY.search(text) is not None)


def wanted_bytes(error: BaseException) -> Optional[int]:
    """Size of the allocation that failed; None if the error does not say."""
    for link in _own_chain(error):
        if found := _WANTED.search(str(link)):
            return int(float(found["amount"]) * 1024 ** _PREFIXES.index(found["prefix"]))
    return None


def forget_traceback(error: BaseException) -> None:
    """Drop what the tracebacks of an error, and of those it came from, keep alive, but for frames that still run."""
    for link in _whole_chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            _clear_variables(frame)
        link.__traceback__ = None


def _own_chain(error: Optional[BaseException]) -> Iterator[Exception]:
    """The error and those it was raised from, as far as they happened in this step's own work."""
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
    # accelerate fails on an error whose argument is no text
    if _NO_HANDLE.search(text):
        free_bytes = _driver_free_bytes()
        return free_bytes is not None and free_bytes < HANDLE_BYTES
    return should_reduce_batch_size(RuntimeError(text)) or _OUT_OF_MEMORY.search(text) is not None


def _driver_free_bytes() -> Optional[int]:
    """Of the current card; None where there is none, or where it no longer answers."""
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
    # clearing a generator that caught the error and will go on would end it; dropping the traceback is enough for one
    # that will not
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return
    with contextlib.suppress(RuntimeError):  # the frame still runs
        frame.clear()
