"""How a model is loaded, as code that runs when it is copied."""

from __future__ import annotations

import json
from typing import Optional

from scu_trainer.hub.facts import IMAGES, Facts
from scu_trainer.settings.tasks import TEXT


def loading(facts: Facts, name: str) -> Optional[str]:
    """Lines of Python that load the model ``name``; the first two load the weights. None for an adapter that needs a
    base which was changed before it was trained."""
    if facts.is_adapter and facts.task != TEXT:
        return None
    name = json.dumps(name, ensure_ascii=False)  # quotes inside of it are Python's too
    lines = _weights(facts, name)
    if facts.task in (TEXT, "word-generation"):
        lines += ["", "from transformers import AutoTokenizer", f"tokenizer = AutoTokenizer.from_pretrained({name})"]
    elif facts.task == IMAGES:
        lines += ["", "from transformers import AutoImageProcessor"]
        lines += [f"processor = AutoImageProcessor.from_pretrained({name})"]
    return "\n".join(lines)


def _weights(facts: Facts, name: str) -> list[str]:
    if facts.is_adapter:
        kind = "AutoPeftModelForCausalLM"
        return [f"from peft import {kind}", f"model = {kind}.from_pretrained({name})"]
    kind = _auto_class(facts)
    code = ", trust_remote_code=True" if facts.config.get("auto_map") else ""
    return [f"from transformers import {kind}", f"model = {kind}.from_pretrained({name}{code})"]


def _auto_class(facts: Facts) -> str:
    """The class that a model with code of its own names, else that of its task."""
    own = [name for name in facts.config.get("auto_map", {}) if name.startswith("AutoModel")]
    if own:
        return "AutoModelForCausalLM" if "AutoModelForCausalLM" in own else own[0]
    return "AutoModelForImageClassification" if facts.task == IMAGES else "AutoModelForCausalLM"
