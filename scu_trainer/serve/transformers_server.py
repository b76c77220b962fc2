"""The server of transformers with one model, which is already loaded."""

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
from scu_trainer.serve.front import RequestTranslator
from scu_trainer.serve.guard import MODELS
from scu_trainer.serve.questions import CURRENT_PROMPT, RequestReader
from scu_trainer.talk.model import Talker
from scu_trainer.train.step.recovery.memory import free_memory
from scu_trainer.train.step.recovery.out_of_memory import forget_traceback, is_out_of_memory

UNAVAILABLE = 503


def application(reader: RequestReader, ends: Event) -> Any:
    """The ASGI application, without access control: wrap it in RequestGuard. ``ends``: set to stop running answers."""
    torch.manual_seed(reader.settings.seed)
    manager, state = SingleModelManager(reader, ends), GenerationState()
    shared = {"model_manager": manager, "generation_state": state}
    app = build_server(
        manager,
        ChatCompletionHandler(**shared),
        completion_handler=CompletionHandler(**shared),
        generation_state=state,
        response_handler=None,  # the guard blocks the paths of these handlers
        transcription_handler=None,
        systemone_handler=None,
    )

    @app.get(f"{MODELS}/{{name:path}}")
    def one_model(name: str) -> Response:
        try:
            reader.check_model(name)
        except BadRequest as refused:
            return refused.response()
        return JSONResponse(manager.get_gen_models()[0])

    return RequestTranslator(app, reader)


class SingleModelManager(ModelManager):
    """A model manager with one model, which ignores the requested name and loads nothing."""

    def __init__(self, reader: RequestReader, ends: Event) -> None:
        super().__init__()
        self.force_model, self._begun = reader.name, int(time.time())
        self._talker, self._ends = reader.talker, ends

    def process_model_name(self, model_id: str) -> str:
        return self.force_model  # without a revision, because this name appears in responses

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return the model, and a tokenizer that always returns the token ids of the current prompt: the server of
        transformers would render less of a message, and keep the end token that some tokenizers add to every text."""
        question, tokenizer = CURRENT_PROMPT.get(), copy.copy(self._talker.tokenizer)
        encoding, kind = BatchEncoding({"input_ids": [question.token_ids]}, tensor_type="pt"), type(tokenizer)
        overrides = dict.fromkeys(("__call__", "apply_chat_template"), lambda *_, **__: encoding)
        tokenizer.__class__ = type(kind.__name__, (kind,), overrides)  # Python looks up __call__ only in the class
        return Answering(self._talker, self._ends, question.gone), tokenizer

    def get_gen_models(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": self._begun, "owned_by": "scu-trainer"}]

    list_models = get_gen_models  # transformers 5.24 and later calls this one; the inherited one says "unloaded"


class Answering:
    """The model as the server calls it, in the precision of its run. ``gone``: set when the client has disconnected."""

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
        """``input_ids``: shape (1, time). Other outputs of a tokenizer say nothing of a single text. Raises Unavailable
        if the answer does not fit in memory, the server shuts down, or the client has disconnected."""
        self._check_canceled()
        if (seed := generation_config.__dict__.pop("seed", None)) is not None:
            torch.manual_seed(seed)
        try:
            with self._talker.answering():
                return self._talker.model.generate(
                    input_ids=input_ids, attention_mask=torch.ones_like(input_ids), tokenizer=self._talker.tokenizer,
                    generation_config=generation_config, streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([self._check_canceled]),
                )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = error
        forget_traceback(failed)
        free_memory(self.device)
        raise Unavailable("the answer does not fit in memory; shorten the prompt, or lower max_tokens")

    def _check_canceled(self, *_: Any, **__: Any) -> bool:
        """A stopping criterion that raises Unavailable if the server shuts down or the client has disconnected."""
        if self._ends.is_set():
            raise Unavailable("the server is shutting down")
        if self._gone.is_set():
            raise Unavailable("the client has disconnected")
        return False


class Unavailable(HTTPException):
    def __init__(self, why: str) -> None:
        super().__init__(UNAVAILABLE, why)

    def __str__(self) -> str:
        return str(self.detail)  # a stream shows only the message, without the status
