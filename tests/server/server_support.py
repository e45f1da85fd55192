"""What the tests of the server share: servers that run in this process, and models that say what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import engine_support
import jax.numpy as jnp
import numpy as np
import openai
import pytest
import stored_tokenizers

from jpaged.device.params import Params, weight_shapes
from jpaged.engine.engine import Engine
from jpaged.host.tokenizer import Tokenizer
from jpaged.models.config import ModelConfig
from jpaged.server.config import ServerConfig
from jpaged.server.serve import HttpServer, listening
from jpaged.server.service import Service

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}\nCall: <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2 has it: who speaks alternates, and the beginning of the sequence is written here.
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "page_size": 4,
    "num_pages": 257,
    "prompt_logprobs": True,
    "warm_up": False,
    "check_integrity": True,
}


@functools.cache
def chat_tokenizer() -> Tokenizer:
    """SmolLM2's, with a template that shows tools."""
    return stored_tokenizers.smollm2().with_chat_template(CHATML)


@functools.cache
def llama_tokenizer() -> Tokenizer:
    """SentencePiece's, which begins each text with <s>, with a template that does so, too."""
    return stored_tokenizers.sentencepiece("llama").with_chat_template(LLAMA2)


def random_params(tokenizer: Tokenizer | None = None, seed: int = 0) -> Params:
    """A model of one layer that says anything, parts of characters among it."""
    tokenizer = tokenizer or chat_tokenizer()
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        d_ff=32,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position=1024,
        eos_token_ids=(2,),
    )
    rng = np.random.default_rng(seed)

    def filled(shape: Any) -> Any:
        if isinstance(shape, dict):
            return {name: filled(one) for name, one in shape.items()}
        if isinstance(shape, tuple) and shape and isinstance(shape[0], dict):
            return tuple(filled(one) for one in shape)
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    return Params(filled(weight_shapes(config)), config, tokenizer)


def parrot_params(script: list[int], tokenizer: Tokenizer | None = None) -> Params:
    """Says these tokens, then the end of text."""
    return engine_support.parrot(tokenizer or chat_tokenizer(), script)


def build(params: Params, **options: Any) -> Engine:
    return Engine(params, **(LIMITS | options))


class Live:
    """A server that runs in a thread of this process."""

    def __init__(self, engine: Engine, **options: Any):
        self.engine = engine
        self.config = ServerConfig(**({"model": "tiny", "port": 0, "log_level": "error"} | options))
        self.service = Service(self.config, lambda: engine)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listening = listening(self.config)
        self.listener = self._listening.__enter__()
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(self.service)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listener]))

    def __enter__(self) -> Live:
        self._thread.start()
        until(lambda: self.service.is_ready or self.service.thread.state == "crashed")
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end"
        self._listening.__exit__(None, None, None)

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def post(self, path: str, body: Any) -> Any:
        """The JSON of a good answer."""
        status, _, raw = self.call("POST", path, body)
        assert status == 200, raw.decode()
        return json.loads(raw)

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error of an answer that is one."""
        found, headers, raw = self.call("POST", path, body)
        assert found == status, (found, raw.decode())
        assert headers["content-type"] == "application/json"
        error = json.loads(raw)["error"]
        assert error.keys() == {"message", "type", "param", "code"} and "Traceback" not in error["message"]
        return error

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        status, headers, raw = self.call("POST", path, body | {"stream": True})
        assert status == 200, raw.decode()
        assert headers["content-type"].startswith("text/event-stream")
        blocks = raw.decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""], blocks[-2:]
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]

    def assert_idle(self) -> None:
        """Within moments nothing runs and no page is held."""
        until(lambda: not self.engine.has_unfinished_requests() and self.engine.num_free_pages == self.engine.num_pages)
        until(lambda: self.service.thread.num_requests == 0 and self.service.thread.num_sequences == 0)


def close(value: Any) -> Any:
    """To be compared with JSON whose numbers are of another batch: some 1e-6 apart."""
    if isinstance(value, dict):
        return {key: close(one) for key, one in value.items()}
    if isinstance(value, list):
        return [close(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


def until(holds: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


@contextlib.contextmanager
def saying(live: Live, text: str) -> Iterator[list[int]]:
    """Has the server's model say a text, whatever it is asked; yields its ids, the end included."""
    script = [*live.engine.tokenizer.encode_continuation(text), 2]
    before, defaults = live.engine.weights, live.service.defaults
    try:
        if len(set(script)) == len(script) < 31:
            assert engine_support.teach(live.engine, text) == script
        else:
            live.service.defaults = {**defaults, "logits_processor": functools.partial(_next_of, script)}
        yield script
    finally:
        live.engine.weights, live.service.defaults = before, defaults


def _next_of(script: list[int], token_ids: list[int], logits: np.ndarray) -> np.ndarray:
    """Logits of what comes next in the script after the longest beginning of it that was said."""
    said = max(k for k in range(len(script)) if token_ids[len(token_ids) - k :] == script[:k])
    found = np.zeros_like(logits)
    found[script[said]] = 100
    return found
