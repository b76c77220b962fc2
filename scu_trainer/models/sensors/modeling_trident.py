"""TRIDENT: a classifier of recordings from several sensors, where any sensor may be missing.

    visible     (frames)  3D CNN ─▶ transformer ──┐
    infrared    (frames)  detection CNN ──────────┤
                (curve)   MLP ────────────────────┤
    kinematics  (time)    patches ─▶ transformer ─┤   tokens that     cross-attention of
    dual_vision (frames)  detection CNN ──────────┼─▶ count      ──▶  learned queries   ──▶ head ──▶ logits
    plume       (frames)  CNN ────────────────────┤
    cooling     (curve)   MLP ────────────────────┤
    geometry    (numbers) MLP ────────────────────┘                               └─▶ decoder ──▶ report

No layer mixes rows, and masked values have weight 0 in every sum: the logits of a row do not depend on padding, on
other rows, or on the values of a branch that the row lacks.

This file is saved with each model, so it imports nothing from this project.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import SequenceClassifierOutput

from .configuration_trident import TridentConfig
from .trident_branches import BRANCHES, Branch, transformer
from .trident_layers import TransformerLayer, without_padding
from .trident_report import ReportDecoder, report_scores


class TridentPreTrainedModel(PreTrainedModel):
    """Base class that initializes the weights."""

    config_class = TridentConfig
    base_model_prefix = "trident"
    _no_split_modules = ("TransformerLayer", "FrameConvolution", "Fusion")
    _supports_sdpa = True
    accepts_loss_kwargs = True  # the Trainer only looks for **kwargs, but this forward names num_items_in_batch

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, Fusion):
            init.normal_(module.queries, std=1.0)
            init.normal_(module.kinds, std=self.config.initializer_range)


class Fusion(nn.Module):
    """Learned queries attend to the tokens of all branches, layer by layer."""

    def __init__(self, config: TridentConfig) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(config.fusion_queries, config.hidden_size))
        self.kinds = nn.Parameter(torch.empty(len(config.branches), config.hidden_size))
        self.norm, self.layers = nn.LayerNorm(config.hidden_size), transformer(config, config.num_fusion_layers)

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.layers

    def forward(self, tokens: list[Tensor], masks: list[Tensor]) -> Tensor:
        """Take tokens (rows, tokens, width) and masks (rows, tokens) of each branch; return (rows, queries, width)."""
        tokens = torch.cat([branch + kind for branch, kind in zip(tokens, self.kinds, strict=True)], dim=1)
        tokens, mask = self.norm(tokens), torch.cat(masks, dim=1)
        collected = self.queries.expand(tokens.size(0), -1, -1)
        for layer in self.layers:
            collected = layer(collected, mask, tokens)
        return collected


class TridentModel(TridentPreTrainedModel):
    """The model without heads: it fuses all branches into (rows, fusion_queries, hidden_size)."""

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        self.branches = nn.ModuleDict({name: BRANCHES[name](config) for name in config.branches})
        self.fusion = Fusion(config)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, branch_mask: Optional[Tensor] = None, **inputs: Optional[Tensor]) -> Tensor:
        """Fuse the branches; inputs are those of ``TridentForSensorClassification``."""
        tokens, masks = [], []
        for name, branch in self.branches.items():
            branch_tokens, mask = branch(*_arguments(branch, name, inputs, branch_mask))
            tokens.append(branch_tokens)
            masks.append(mask)
        return self.norm(self.fusion(tokens, masks))


def _arguments(branch: Any, name: str, inputs: dict[str, Optional[Tensor]], branch_mask: Optional[Tensor]) -> list[Any]:
    """Return value and mask (default: all True) of each input of a branch. Raises ValueError if one is missing."""
    arguments = []
    for item in branch.inputs:
        values, mask = inputs.get(item), inputs.get(mask_name(item))
        if values is None:
            raise ValueError(
                f"the branch {name} reads {item}, which is not in the batch; for rows without it, give zeros "
                "and a mask that is False"
            )
        if mask is None:
            mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if branch_mask is not None:
            column = TridentConfig.ALL_BRANCHES.index(name)
            mask = mask & branch_mask[:, column : column + 1]
        arguments += [without_padding(values, mask), mask]
    return arguments


def mask_name(item: str) -> str:
    """Return the name of an input's mask; the collator has the same rule, but is not available to a saved model."""
    return "cooling_mask" if item == "cooling_curve" else f"{item}_mask"


@dataclass
class TridentOutput(SequenceClassifierOutput):
    """Output with the scores of reports. ``report_scores`` (rows, 3), float32: the summed loss of each row's report in
    nats, its number of words including the end, and 1 if the most likely word was right at every position, so that
    ``generate_report`` writes exactly this text. ``losses`` (rows,): loss of class and report together."""

    report_scores: Optional[Tensor] = None
    losses: Optional[Tensor] = None


class TridentForSensorClassification(TridentPreTrainedModel):
    """Predicts the class of a recording and, with a report head, writes a report. See the top of this file."""

    def __init__(self, config: TridentConfig) -> None:
        super().__init__(config)
        # Otherwise the Trainer takes the labels for tokens and counts one too few.
        self.loss_type = "ForSequenceClassification"
        self.trident = TridentModel(config)
        self.main_input_name = self.trident.branches[config.branches[0]].inputs[0]
        self.classifier = nn.Linear(config.fusion_queries * config.hidden_size, config.num_labels)
        self.report = ReportDecoder(config) if config.report_words else None
        self.checkpointed: Optional[tuple[str, ...]] = None
        """Parts (branches or "fusion") whose blocks are checkpointed; None means all, and the report head."""
        self.post_init()

    def forward(
        self,
        visible: Optional[Tensor] = None,
        visible_mask: Optional[Tensor] = None,
        infrared: Optional[Tensor] = None,
        infrared_mask: Optional[Tensor] = None,
        cooling_curve: Optional[Tensor] = None,
        cooling_mask: Optional[Tensor] = None,
        kinematics: Optional[Tensor] = None,
        kinematics_mask: Optional[Tensor] = None,
        plume: Optional[Tensor] = None,
        plume_mask: Optional[Tensor] = None,
        geometry: Optional[Tensor] = None,
        geometry_mask: Optional[Tensor] = None,
        branch_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        report_ids: Optional[Tensor] = None,
        num_items_in_batch: Optional[Tensor] = None,
        return_dict: Optional[bool] = None,
    ) -> TridentOutput:
        """Compute the logits of classes, (rows, classes), and losses if ``labels`` are given.

        visible: (rows, frames, 3, height, width), 0 to 255. infrared and plume: (rows, frames, height, width) and
        cooling_curve: (rows, points), in degrees Celsius. kinematics: (rows, time, channels). geometry: (rows, sets,
        numbers). Their lengths may differ. Masks: bool (rows, length), True where a recording has content.
        branch_mask: bool (rows, branches), True where a row has the branch; its columns are all of
        ``TridentConfig.ALL_BRANCHES``, even those that the model lacks. labels: (rows,). report_ids: (rows, words), ids
        of the words from begin to end, then -100.

        The loss is the mean over rows (or their sum divided by ``num_items_in_batch``) of the cross-entropy of the
        class in nats plus, for a row with a report, ``report_weight`` times the mean cross-entropy of its words.
        """
        collected = self.trident(
            branch_mask,
            visible=visible,
            visible_mask=visible_mask,
            infrared=infrared,
            infrared_mask=infrared_mask,
            cooling_curve=cooling_curve,
            cooling_mask=cooling_mask,
            kinematics=kinematics,
            kinematics_mask=kinematics_mask,
            plume=plume,
            plume_mask=plume_mask,
            geometry=geometry,
            geometry_mask=geometry_mask,
        )
        logits = self.classifier(collected.flatten(1))
        scores = None
        if self.report is not None and report_ids is not None:
            scores = report_scores(self.report(collected, report_ids[:, :-1].clamp(min=0)), report_ids[:, 1:])
        loss = losses = None
        if labels is not None and scores is None:
            loss = _class_loss(logits, labels, num_items_in_batch)
        elif labels is not None:
            losses = self._row_losses(logits, labels, scores)
            loss = losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
        output = TridentOutput(loss=loss, logits=logits, report_scores=scores, losses=losses)
        return output.to_tuple() if return_dict is False else output

    def _row_losses(self, logits: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
        class_losses = functional.cross_entropy(logits.float(), labels, reduction="none")
        return class_losses + self.config.report_weight * scores[:, 0] / scores[:, 1].clamp(min=1)

    @torch.no_grad()
    def generate_report(self, **inputs: Tensor) -> list[str]:
        """Write a report for each row of a batch by greedy decoding; words are joined by spaces. ``inputs`` are those
        of ``forward``. Raises ValueError for a model without a report head."""
        if self.report is None:
            raise ValueError("this model has no report head: train one with report_head: true")
        sensor_inputs = {name: value for name, value in inputs.items() if name not in ("labels", "report_ids")}
        return self.report.written(self.trident(**sensor_inputs))

    def checkpoint_blocks(self) -> Iterator[nn.Module]:
        """Yield the blocks of the ``checkpointed`` parts, which may be recomputed in backward."""
        for name, part in self.parts().items():
            if self.checkpointed is None or name in self.checkpointed:
                yield from part.blocks()
        if self.checkpointed is None and self.report is not None:
            yield from self.report.layers

    def parts(self) -> dict[str, nn.Module]:
        """Return the branches and "fusion", by name."""
        return {**self.trident.branches, "fusion": self.trident.fusion}

    def outside_blocks(self) -> list[str]:
        """Return the names of the layers of branches and fusion that are outside of transformer blocks."""
        blocks = {
            id(inner) for block in self.modules() if isinstance(block, TransformerLayer) for inner in block.modules()
        }
        lists = (nn.ModuleList, nn.ModuleDict, Branch, Fusion, TridentModel)
        found: list[str] = []
        for name, module in self.trident.named_modules(prefix="trident"):
            inside = any(name.startswith(f"{other}.") for other in found)
            if not (inside or isinstance(module, lists) or id(module) in blocks):
                found.append(name)
        return found

    def transformer_linears(self) -> list[str]:
        """Return the names of the linear layers of all transformer blocks before the heads, to adapt or quantize."""
        linears = (name for name, module in self.trident.named_modules() if isinstance(module, nn.Linear))
        return [f"trident.{name}" for name in linears if ".layers." in name]


def _class_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Optional[Tensor]) -> Tensor:
    if num_items_in_batch is None:
        return functional.cross_entropy(logits.float(), labels)
    return functional.cross_entropy(logits.float(), labels, reduction="sum") / num_items_in_batch


TridentConfig.register_for_auto_class()
TridentForSensorClassification.register_for_auto_class("AutoModel")
