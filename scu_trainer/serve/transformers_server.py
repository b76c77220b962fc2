"""The server of transformers, with a model of ours that is loaded already, and no other one."""

from __future__ import annotations

import copy
import time
from threading import Event
from typing import Any

import torch
from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState
from transformers.tokenization_utils_base import BatchEncoding

from scu_trainer.serve.errors import BadRequest
from scu_trainer.serve.front import Front
from scu_trainer.serve.guard import MODELS
from scu_trainer.serve.questions import ASKED, Asker
from scu_trainer.talk.model import Talker
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

UNAVAILABLE = 503


def application(asker: Asker, ends: Event) -> Any:
    """ASGI, without a guard: put guard.Guard before it. ``ends``: set where answers are to be broken off."""
    torch.manual_seed(asker.settings.seed)
    manager, state = OneModel(asker, ends), GenerationState()
    own = {"model_manager": manager, "generation_state": state}
    app = build_server(
        manager,
        ChatCompletionHandler(**own),
        completion_handler=CompletionHandler(**own),
        generation_state=state,
        response_handler=None,  # the guard lets nobody through to these
        transcription_handler=None,
        systemone_handler=None,
    )

    @app.get(f"{MODELS}/{{name:path}}")
    def one_model(name: str) -> Response:
        try:
            asker.check_model(name)
        except BadRequest as refused:
            return refused.response()
        return JSONResponse(manager.get_gen_models()[0])

    return Front(app, asker)


class OneModel(ModelManager):
    """Has one model, whatever name it is asked for, and loads none."""

    def __init__(self, asker: Asker, ends: Event) -> None:
        super().__init__()
        self.force_model, self._begun = asker.name, int(time.time())
        self._talker, self._ends = asker.talker, ends

    def process_model_name(self, model_id: str) -> str:
        return self.force_model  # without a revision: it stands in the answers

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """For one question, which is tokenized already: the server behind would render less of a message, and ask a
        model to go on behind an end where the tokenizer puts one behind every text."""
        question, tokenizer = ASKED.get(), copy.copy(self._talker.tokenizer)
        encoding, kind = BatchEncoding({"input_ids": [question.token_ids]}, tensor_type="pt"), type(tokenizer)
        own = dict.fromkeys(("__call__", "apply_chat_template"), lambda *_, **__: encoding)
        tokenizer.__class__ = type(kind.__name__, (kind,), own)  # Python looks for __call__ in the class alone
        return Answering(self._talker, self._ends, question.gone), tokenizer

    def get_gen_models(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": self._begun, "owned_by": "scu-trainer"}]

    list_models = get_gen_models  # transformers from 5.24 on asks for this one, and its own says "unloaded"


class Answering:
    """The model as the server uses it, in the arithmetic of its run. ``gone``: set where nobody waits any more."""

    def __init__(self, talker: Talker, ends: Event, gone: Event) -> None:
        self._talker, self._ends, self._gone = talker, ends, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._talker.model, name)

    @property
    def device(self) -> torch.device:
        return self._talker.device

    def generate(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """``input_ids`` (1, time); what a tokenizer gives beside them says nothing of one text alone. Raises
        Unavailable where the answer does not fit in memory, the server ends, or the client is gone."""
        self._break_off()
        if (seed := generation_config.__dict__.pop("seed", None)) is not None:
            torch.manual_seed(seed)
        try:
            with self._talker.answering():
                return self._talker.model.generate(
                    input_ids=input_ids, attention_mask=torch.ones_like(input_ids), tokenizer=self._talker.tokenizer,
                    generation_config=generation_config, streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([self._break_off]),
                )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        forget_traceback(failed)
        free_memory(self.device)
        raise Unavailable("the answer does not fit in memory; shorten the prompt, or lower max_tokens")

    def _break_off(self, *_: Any, **__: Any) -> bool:
        if self._ends.is_set():
            raise Unavailable("the server ends")
        if self._gone.is_set():
            raise Unavailable("the client is gone")
        return False


class Unavailable(HTTPException):
    def __init__(self, why: str) -> None:
        super().__init__(UNAVAILABLE, why)

    def __str__(self) -> str:
        return str(self.detail)  # in a stream the words alone
