"""Compare the logits of a trained model with those that another program computes from its export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scu_trainer.errors import ModelError
from scu_trainer.models.exports import llama_cpp
from scu_trainer.models.exports.llama_cpp import LlamaCpp
from scu_trainer.models.exports.onnx import onnx_logits
from scu_trainer.models.merge import logits_of, merge_tolerance, relative_difference

if TYPE_CHECKING:
    import torch
    from torch import nn

GGUF_TOLERANCE = {"f32": 1e-4, "f16": 0.01, "bf16": 0.05, "q8_0": 0.05}
"""Largest allowed difference of logits, relative to the largest logit, by the type of a GGUF file's weights. Measured
on the families of docs/take_along.md: up to 7e-6, 1e-3, 7e-3 and 1e-2."""

ONNX_TOLERANCE = {"float32": 1e-4}
"""Tolerances that are larger than those of a merge, because other kernels add up in another order."""

QUESTION, ANSWER = "How are you?", "Fine: 1 < 2, thanks."


def in_llama_cpp(
    model: nn.Module,
    tokenizer: Any,
    file: Path,
    inputs: Mapping[str, torch.Tensor],
    outtype: str,
    answers_plain_text: bool,
) -> dict[str, Any]:
    """Compare ``model`` with the GGUF ``file`` in llama.cpp, in the middle and at the end of every row of ``inputs``.

    Returns ``difference`` and ``tolerance`` of the logits, the number of ``positions``, at how many of them the most
    likely next token is the same (``same_likeliest``), and ``notes`` on the chat template. ``answers_plain_text``: see
    Talker. Raises ModelError if the logits or the tokens of the texts differ.
    """
    most = (getattr(model.config, "max_position_embeddings", None) or 2**30) - 1  # one token is drawn after a row
    rows = [
        row[mask.bool()].tolist()[:most]
        for row, mask in zip(inputs["input_ids"].cpu(), inputs["attention_mask"].cpu(), strict=True)
    ]
    with llama_cpp.in_llama_cpp(file, max(map(len, rows)) + 8) as loaded:
        _require_same_tokens(loaded, tokenizer, [tokenizer.decode(row) for row in rows])
        measured = [_compare(model, loaded, row[:end]) for row in rows for end in {max(1, len(row) // 2), len(row)}]
        note = _template_note(loaded, tokenizer, answers_plain_text)
    tolerance = max(GGUF_TOLERANCE[outtype], merge_tolerance(model, model.dtype))
    difference = max(found for found, _ in measured)
    _require_tolerance(difference, tolerance, outtype, "--outtype f32")
    facts = {"difference": difference, "tolerance": tolerance, "positions": len(measured)}
    return facts | {"same_likeliest": sum(same for _, same in measured), "notes": [note] if note else []}


def _require_same_tokens(loaded: LlamaCpp, tokenizer: Any, texts: list[str]) -> None:
    for text in texts:
        expected, found = tokenizer(text)["input_ids"], loaded.tokens(text)
        if expected == found:
            continue
        place = next(
            (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
        )
        near = tokenizer.decode(expected[max(0, place - 2) : place + 4])
        raise ModelError(
            f"llama.cpp splits a text into other tokens than this model's tokenizer, near {near!r}, so the model would "
            f"give other answers; nothing was written. Try --to onnx or --to safetensors"
        )


def _compare(model: nn.Module, loaded: LlamaCpp, row: list[int]) -> tuple[float, bool]:
    """Return the relative difference of the logits after ``row``, and whether the most likely token is the same."""
    import torch

    device = next(model.parameters()).device
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([row], device=device)).logits[0, -1].float().cpu()
    found = torch.tensor(loaded.log_probabilities(row, len(expected)))
    expected, found = expected - expected.mean(), found - found.mean()  # log probabilities differ by a constant
    difference = float((found - expected).abs().max() / expected.abs().max())
    return difference, int(expected.argmax()) == int(found.argmax())


def _template_note(loaded: LlamaCpp, tokenizer: Any, answers_plain_text: bool) -> str:
    """Return a note on whether llama.cpp, which has its own Jinja interpreter, renders the chat template alike."""
    if not getattr(tokenizer, "chat_template", None):
        usage = "end a question with a blank line" if answers_plain_text else "it continues a text"
        return f"no chat template: {usage}"
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    turns.append({"role": "user", "content": QUESTION})
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    try:
        found = loaded.conversation(turns)
    except ModelError as error:
        return f"its chat template does not run in llama.cpp ({error}); give the prompt as text there"
    first = tokenizer.bos_token or ""
    if found.removeprefix(first) == expected.removeprefix(first):
        return "llama.cpp renders the chat template to the same text"
    return "llama.cpp renders the chat template to ANOTHER text; give the prompt as text there"


def in_onnx(
    model: nn.Module, folder: Path, inputs: Mapping[str, torch.Tensor], floats: Mapping[str, torch.Tensor],
    dtype: torch.dtype, trust_remote_code: bool,
) -> tuple[float, float]:  # fmt: skip
    """Compare ``model`` with the ONNX export in ``folder``; return (difference, tolerance) of the logits. ``inputs``
    are those of ``model``, and ``floats`` those of a stock model. Raises ModelError if the logits differ."""
    difference = relative_difference(logits_of(model, inputs), onnx_logits(folder, floats, trust_remote_code), inputs)
    name = str(dtype).removeprefix("torch.")
    tolerance = max(ONNX_TOLERANCE.get(name, 0.0), merge_tolerance(model, dtype))
    _require_tolerance(difference, tolerance, name, "--dtype float32")
    return difference, tolerance


def _require_tolerance(difference: float, tolerance: float, type_name: str, finer: str) -> None:
    if difference <= tolerance:  # NaN is not
        return
    raise ModelError(
        f"the exported model is not the same model: its logits differ by {difference:.2g} of the largest, but only "
        f"{tolerance:g} is allowed for {type_name}; nothing is kept. Try {finer}, or --to safetensors"
    )
