"""What counts as out of memory, what it wanted, and that nothing of the failed step stays alive."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scu_trainer.errors import ControlError
from scu_trainer.train.step.recovery import out_of_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory, wanted_bytes
from tests import faults

MIB = 2**20
GIB = 2**30

OUT_OF_MEMORY = [
    faults.oom(faults.CUDA_TEXT),
    faults.oom(faults.CPU_TEXT),
    torch.OutOfMemoryError("whatever it says"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("Error out of memory at line 88 in file /src/csrc/ops.cu"),
    RuntimeError("HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB). "
        "Tried to allocate 768.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
    ),
    RuntimeError("Invalid buffer size: 20.00 GiB"),
    RuntimeError("could not create a primitive"),
    RuntimeError("could not create a memory object"),
    RuntimeError("could not create a memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 20971520 bytes."),
    RuntimeError("unable to mmap 4096 bytes from file </dev/shm/x>: Cannot allocate memory (12)"),
    MemoryError(),
    MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]

SOMETHING_ELSE = [
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("index out of range in self"),
    RuntimeError("could not create a primitive descriptor for the matmul primitive. Run workload with environment"),
    RuntimeError("could not create a memory descriptor from blob"),
    RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes"),
    RuntimeError(
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out "
        "of shared memory. Please try to raise your shared memory limit."
    ),
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback\n" + faults.CPU_TEXT),
    torch.OutOfMemoryError("Caught OutOfMemoryError in pin memory thread for device 0.\n" + faults.CUDA_TEXT),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error. Last error: CUDA error: out of memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError(12, "two arguments"),
    RuntimeError(7),
    RuntimeError(),
    ValueError(faults.CUDA_TEXT),
    OSError(errno.ENOSPC, "No space left on device"),
    ControlError("row 3 does not fit: " + faults.CUDA_TEXT),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:60])
def test_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=lambda error: repr(error)[:60])
def test_something_else(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(("free_bytes", "is_memory"), [(3 * 2**20, True), (8 * 2**30, False), (None, False)])
@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN", "CUSOLVER"])
def test_a_handle_that_cannot_be_made_is_out_of_memory_where_the_card_is_full(
    library, free_bytes, is_memory, monkeypatch
):
    monkeypatch.setattr(out_of_memory, "_driver_free_bytes", lambda: free_bytes)
    error = RuntimeError(f"CUDA error: {library}_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert is_out_of_memory(error) == is_memory


def test_a_replica_that_failed_counts():
    assert is_out_of_memory(RuntimeError("Caught OutOfMemoryError in replica 0 on device 0.\n" + faults.CUDA_TEXT))


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_raised_from_it_counts_and_says_the_size():
    def wrap():
        try:
            raise faults.oom()
        except RuntimeError as error:
            raise ValueError("the compiled step failed") from error

    assert is_out_of_memory(caught(wrap))
    assert wanted_bytes(caught(wrap)) == 20 * MIB


@pytest.mark.parametrize("other", [KeyError("lost"), ControlError("row 3 does not fit"), SystemExit(1)], ids=repr)
def test_an_error_raised_while_handling_it_does_not_count(other):
    def fumble():
        try:
            raise faults.oom()
        except RuntimeError:
            raise other  # noqa: B904

    assert not is_out_of_memory(caught(fumble))


@pytest.mark.parametrize("other", [ControlError("row 3 does not fit"), SystemExit(1)], ids=repr)
def test_what_was_made_for_the_user_is_not_tried_again(other):
    other.__cause__ = faults.oom()
    assert not is_out_of_memory(other)
    assert wanted_bytes(other) is None


def test_a_circle_of_causes_ends():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    forget_traceback(first)


class FullMemory(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise faults.oom(faults.CPU_TEXT)


def test_a_real_workers_error_does_not_count():
    batches = iter(torch.utils.data.DataLoader(FullMemory(), num_workers=1))
    error = caught(lambda: next(batches))
    batches._shutdown_workers()  # by the garbage collector, which ends its queues first, it takes five seconds
    assert "can't allocate memory" in str(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_error_in_a_recomputed_layer_counts(use_reentrant):
    layer = torch.nn.Linear(4, 4)
    row = torch.ones(1, 4, requires_grad=True)
    with faults.fail_in_forward(layer, call=1):  # call 0 is the forward, call 1 the recomputation in the backward
        loss = checkpoint(layer, row, use_reentrant=use_reentrant).sum()
        assert is_out_of_memory(caught(loss.backward))


# --- what it wanted


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (faults.CUDA_TEXT, 20 * MIB),
        (faults.CPU_TEXT, 20971520),
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU", 2.5 * GIB),
        ("CUDA out of memory. Tried to allocate 512.00 KiB.", 512 * 1024),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", None),
        ("MPS backend out of memory. Tried to allocate 768.00 MB on private pool.", 768 * MIB),
        ("MPS backend out of memory. Tried to allocate 256 bytes on shared pool.", 256),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 116813856768 bytes.", 116813856768),
        ("CUDA error: out of memory", None),
        ("could not create a primitive", None),
    ],
)
def test_wanted_bytes(text, size):
    assert wanted_bytes(RuntimeError(text)) == size


def test_wanted_bytes_of_numpy():
    error = MemoryError("Unable to allocate 2.00 TiB for an array with shape (1,) and data type float64")
    assert wanted_bytes(error) == 2 * 1024 * GIB


# --- letting go


def failing_step(watched: list):
    activations = torch.ones(1000)
    watched.append(weakref.ref(activations))
    raise faults.oom()


def run_and_catch(function) -> tuple[BaseException, list]:
    watched: list = []
    return caught(lambda: function(watched)), watched


@pytest.fixture
def without_collector():
    """Only reference counts, so that a test sees what dies at once and what would wait for a collection."""
    gc.disable()
    yield
    gc.enable()


def test_a_failed_steps_tensors_die_with_the_traceback(without_collector):
    error, (tensor,) = run_and_catch(failing_step)
    assert tensor() is not None  # the traceback holds the frame, the frame holds the tensor
    forget_traceback(error)
    assert tensor() is None
    assert error.__traceback__ is None


def test_tensors_die_though_somebody_else_holds_the_frame(without_collector):
    """As a debugger, a log record or another error's traceback would."""
    error, (tensor,) = run_and_catch(failing_step)
    elsewhere = error.__traceback__
    forget_traceback(error)
    assert tensor() is None
    assert elsewhere is not None


@pytest.mark.parametrize("is_cause", [True, False], ids=["cause", "context"])
def test_tensors_of_the_errors_before_it_die_too(without_collector, is_cause):
    def wrapped(watched):
        try:
            failing_step(watched)
        except RuntimeError as error:
            if is_cause:
                raise ValueError("wrapped") from error
            raise ValueError("wrapped")  # noqa: B904

    error, (tensor,) = run_and_catch(wrapped)
    forget_traceback(error)
    assert tensor() is None


def test_a_running_frame_keeps_its_variables():
    kept = torch.ones(3)
    try:
        raise faults.oom()
    except RuntimeError as caught_here:
        error = caught_here
    forget_traceback(error)
    assert kept.sum() == 3


def test_a_generator_that_caught_the_error_goes_on():
    def chunks():
        try:
            raise faults.oom()
        except RuntimeError as error:
            yield error
        yield "next chunk"

    generator = chunks()
    forget_traceback(next(generator))
    assert next(generator) == "next chunk"
