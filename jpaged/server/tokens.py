"""Owns the endpoints of the tokenizer: texts and messages to token ids and back, and what it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jpaged.engine.prompt import to_token_ids
from jpaged.server.errors import ApiError
from jpaged.server.http import Json
from jpaged.server.prompts import aside
from jpaged.server.protocol import DetokenizeRequest, TokenizeRequest
from jpaged.server.service import Service


async def tokenize(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked = TokenizeRequest.read(body)
    service.check_model(asked.model)
    service.check_ready()
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, and not both", param="prompt")
    if asked.messages is not None:
        prompt = await service.prompts.of_chat(asked, asked.tools)
    else:
        (prompt,) = await service.prompts.of_completion(asked.prompt, asked.add_special_tokens is not False, cut=True)
    answer: dict[str, Any] = {
        "tokens": prompt.token_ids,
        "count": len(prompt.token_ids),
        "max_model_len": service.prompts.max_model_len,
    }
    if asked.return_token_strs:
        texts = service.texts()
        answer["token_strs"] = [texts.text(token_id) for token_id in prompt.token_ids]
    return Json(answer)


async def detokenize(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked = DetokenizeRequest.read(body)
    service.check_model(asked.model)
    service.check_ready()
    tokenizer = service.prompts.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")

    def decoded() -> str:
        ids = to_token_ids(asked.tokens, tokenizer, service.prompts.vocab_size)[1] if asked.tokens else []
        return tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens)

    try:
        return Json({"prompt": await aside(asked.tokens, decoded)})
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from error


async def tokenizer_info(service: Service, request: Request) -> Response:
    service.check_ready()
    prompts = service.prompts
    answer: dict[str, Any] = {"vocab_size": prompts.vocab_size, "max_model_len": prompts.max_model_len}
    tokenizer = prompts.tokenizer
    if tokenizer is not None:
        answer |= tokenizer.special_tokens  # as in tokenizer_config.json: evaluations read "eos_token" there
        answer |= {
            "tokenizer_vocab_size": tokenizer.vocab_size,
            "special_tokens": tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "chat_template": tokenizer.chat_template,
        }
    answer["eos_token_ids"] = sorted(service.thread.engine.limits.eos_token_ids)
    return Json(answer)
