"""Is it the same model: logits of what was trained against those of the program that reads the export."""

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
"""Largest difference of logits, relative to the largest logit, by the type of a GGUF file's weights. Measured on the
families of docs/take_along.md: up to 7e-6, 1e-3, 7e-3 and 1e-2."""

ONNX_TOLERANCE = {"float32": 1e-4}
"""Where it is wider than that of a merge: other kernels add up in another order."""

QUESTION, ANSWER = "How are you?", "Fine: 1 < 2, thanks."


def in_llama_cpp(
    model: nn.Module,
    tokenizer: Any,
    file: Path,
    inputs: Mapping[str, torch.Tensor],
    outtype: str,
    answers_plain_text: bool,
) -> dict[str, Any]:
    """difference, tolerance, and at how many ``positions`` (the middle and the end of every row) the most likely next
    token is the ``same_likeliest``. ``answers_plain_text``: see Talker. Raises ModelError where the model or its tokens
    are others."""
    most = (getattr(model.config, "max_position_embeddings", None) or 2**30) - 1  # one token is drawn after a row
    rows = [
        row[mask.bool()].tolist()[:most]
        for row, mask in zip(inputs["input_ids"].cpu(), inputs["attention_mask"].cpu(), strict=True)
    ]
    with llama_cpp.in_llama_cpp(file, max(map(len, rows)) + 8) as read:
        _require_same_tokens(read, tokenizer, [tokenizer.decode(row) for row in rows])
        measured = [_against(model, read, row[:end]) for row in rows for end in {max(1, len(row) // 2), len(row)}]
        note = _template_note(read, tokenizer, answers_plain_text)
    tolerance = max(GGUF_TOLERANCE[outtype], merge_tolerance(model, model.dtype))
    difference = max(found for found, _ in measured)
    _require(difference, tolerance, outtype, "--outtype f32")
    facts = {"difference": difference, "tolerance": tolerance, "positions": len(measured)}
    return facts | {"same_likeliest": sum(same for _, same in measured), "notes": [note] if note else []}


def _require_same_tokens(read: LlamaCpp, tokenizer: Any, texts: list[str]) -> None:
    for text in texts:
        expected, found = tokenizer(text)["input_ids"], read.tokens(text)
        if expected == found:
            continue
        place = next(
            (n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
        )
        near = tokenizer.decode(expected[max(0, place - 2) : place + 4])
        raise ModelError(
            f"llama.cpp splits a text into tokens that differ from those of this model's tokenizer, near "
            f"{near!r}: with other tokens the model gives other answers; nothing was written. Try --to onnx or "
            f"--to safetensors"
        )


def _against(model: nn.Module, read: LlamaCpp, row: list[int]) -> tuple[float, bool]:
    """(difference of the logits of the next token, by the largest; is the most likely one the same)."""
    import torch

    device = next(model.parameters()).device
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([row], device=device)).logits[0, -1].float().cpu()
    found = torch.tensor(read.log_probabilities(row, len(expected)))
    expected, found = expected - expected.mean(), found - found.mean()  # probabilities have lost a constant
    difference = float((found - expected).abs().max() / expected.abs().max())
    return difference, int(expected.argmax()) == int(found.argmax())


def _template_note(read: LlamaCpp, tokenizer: Any, answers_plain_text: bool) -> str:
    """What llama.cpp makes of the chat template, which is a program in a language that it reads in its own way."""
    if not getattr(tokenizer, "chat_template", None):
        asked = "end a question with a blank line" if answers_plain_text else "it continues a text"
        return f"no chat template: {asked}"
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    turns.append({"role": "user", "content": QUESTION})
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    try:
        found = read.conversation(turns)
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
    """(difference, tolerance). ``inputs``: for ``model``; ``floats``: the same for a stock one. Raises ModelError."""
    difference = relative_difference(logits_of(model, inputs), onnx_logits(folder, floats, trust_remote_code), inputs)
    name = str(dtype).removeprefix("torch.")
    tolerance = max(ONNX_TOLERANCE.get(name, 0.0), merge_tolerance(model, dtype))
    _require(difference, tolerance, name, "--dtype float32")
    return difference, tolerance


def _require(difference: float, tolerance: float, type_name: str, finer: str) -> None:
    if difference <= tolerance:  # NaN is not
        return
    raise ModelError(
        f"what was written is not the same model: its logits differ by {difference:.2g} of the largest, and "
        f"{tolerance:g} is allowed for {type_name}; nothing is kept. Try {finer}, or --to safetensors"
    )
