"""Owns `ServerConfig`: what may be chosen about a server, from a YAML file and the command line, checked once."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import pydantic_core
import yaml

from jpaged.host.config import EngineConfig, parse_bytes

PYTHON_ONLY = {"logits_processor"}  # engine options that no file can hold
# For a server, other than for an engine: echoed prompts have log-probabilities, and nothing compiles once it is ready.
ENGINE_DEFAULTS = {"prompt_logprobs": True, "warm_up": True}
_REFERENCE = re.compile(r"\$(?:(\$)|\{(\w+)(?::-([^}]*))?\})")


class ServerConfig(pydantic.BaseModel):
    """The options of a server. `help(jpaged.EngineConfig)` lists those of `engine`."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)

    model: str = pydantic.Field("smollm2", description="A folder, a GGUF file or a hub id.")
    revision: str | None = pydantic.Field(None, description="Of the hub repository: a branch, tag or commit.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = pydantic.Field(
        None, description="Of the weights [default: float32 on a CPU, bfloat16 elsewhere]."
    )
    served_model_names: list[str] = pydantic.Field(
        [], description="Names that requests may use, the first in answers [default: the model as given]."
    )
    chat_template: str | None = pydantic.Field(
        None, description="A Jinja file in the place of the model's own template."
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "none"] = pydantic.Field(
        "auto", description="How the model writes tool calls [default: as its chat template says]."
    )
    model_defaults: bool = pydantic.Field(
        True, description="For what a request does not say, sample as the model was published to."
    )

    host: str = pydantic.Field("127.0.0.1", description="The address to listen on; 0.0.0.0 for all networks.")
    port: int = pydantic.Field(8000, ge=0, le=65535, description="The port to listen on; 0 for any free one.")
    api_keys: list[str] = pydantic.Field(
        [], description="Keys of which a request must give one [default: those in JPAGED_API_KEY, or none needed]."
    )
    api_key_file: str | None = pydantic.Field(None, description="A file with such keys, one a line.")
    open_metrics: bool = pydantic.Field(False, description="Give /metrics to those without a key, too.")
    cors_origins: list[str] = pydantic.Field([], description="Origins whose pages may call this server; '*' for all.")
    root_path: str = pydantic.Field("", description="The path under which a proxy serves this server.")
    ssl_certfile: str | None = pydantic.Field(None, description="A certificate, for HTTPS.")
    ssl_keyfile: str | None = pydantic.Field(None, description="Its private key.")
    pages: bool = pydantic.Field(True, description="Serve the pages /dashboard and /chat.")

    max_body: int | str = pydantic.Field("16MiB", description="The largest request body.")
    max_prompts: int = pydantic.Field(256, ge=1, description="The most prompts of a request.")
    max_n: int = pydantic.Field(128, ge=1, description="The most samples of a prompt, those of best_of included.")
    max_logprobs: int = pydantic.Field(20, ge=0, description="The most alternatives a token.")
    max_stop: int = pydantic.Field(16, ge=0, description="The most stop strings.")
    max_schema: int | str = pydantic.Field("64KiB", description="The largest schema, pattern, grammar or set of tools.")
    max_waiting: int = pydantic.Field(
        1024, ge=0, description="The most sequences that wait for a place; then requests get a 429."
    )
    request_timeout: float = pydantic.Field(600, gt=0, description="Seconds after which a request is given up.")
    body_timeout: float = pydantic.Field(
        30, gt=0, description="Seconds within which a head must have come, then a body."
    )
    shutdown_timeout: float = pydantic.Field(
        30, ge=0, description="Seconds that running requests get to finish when the server is told to end."
    )

    exit_on_crash: bool = pydantic.Field(
        False,
        description="End with status 1 when the engine crashes, for a supervisor that does not ask /health, which says "
        "503 from then on.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field("info", description="What is logged.")
    log_format: Literal["text", "json"] = pydantic.Field("text", description="Lines of text, or of JSON.")
    log_prompts: bool = pydantic.Field(
        False, description="Log requests, and answers that are not streamed. They may be private."
    )
    otlp_endpoint: str | None = pydantic.Field(
        None, description="Where a span of each request is sent, such as http://localhost:4318 [default: nowhere]."
    )

    engine: dict[str, Any] = pydantic.Field({}, description="Options of the engine.")

    @pydantic.field_validator("request_timeout", "body_timeout", "shutdown_timeout", mode="before")
    @classmethod
    def _real(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        return float(value) if abs(value) < 1e300 else math.inf

    @pydantic.field_validator("api_keys", "served_model_names", "cors_origins", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @pydantic.field_validator("api_keys", "served_model_names")
    @classmethod
    def _no_empty(cls, value: list[str]) -> list[str]:
        if any(not text.strip() or not text.isprintable() for text in value):
            raise ValueError("must hold printable texts that are not empty")
        return value

    @pydantic.field_validator("model", "host")
    @classmethod
    def _said(cls, value: str) -> str:
        if not value.strip() or not value.isprintable():  # an empty host would be all networks
            raise ValueError(f"must be a printable text that is not empty, got {value!r}")
        return value

    @pydantic.field_validator("max_body", "max_schema")
    @classmethod
    def _bytes(cls, value: int | str, info: pydantic.ValidationInfo) -> int:
        return parse_bytes(str(info.field_name), value)

    @pydantic.model_validator(mode="after")
    def _checked(self) -> ServerConfig:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together: give both or none")
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint must begin with http:// or https://, got {self.otlp_endpoint!r}")
        for name in ("chat_template", "api_key_file", "ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"{name}: there is no file {path}")
        for name in PYTHON_ONLY & self.engine.keys():
            raise ValueError(f"engine.{name} is a function, which only a Python program can give an engine")
        assert self.engine_config  # raises for options that make no engine
        return self

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig.from_options(ENGINE_DEFAULTS | self.engine)

    @property
    def names(self) -> list[str]:
        """Those of the model in requests and answers."""
        return self.served_model_names or [self.model]

    def all_api_keys(self) -> list[str]:
        """Of the options, the file and the environment. Raises ValueError for a file without any."""
        keys = [*self.api_keys, *os.environ.get("JPAGED_API_KEY", "").split()]
        if self.api_key_file is not None:
            found = Path(self.api_key_file).read_text(encoding="utf-8").split()
            if not found:
                raise ValueError(f"api_key_file: {self.api_key_file} holds no key")
            keys += found
        return keys


def read_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> ServerConfig:
    """The config in a YAML file (None: the defaults) with `overrides` in the place of what it says.

    `${NAME}` in a value is that variable of the environment, `${NAME:-text}` has a default, `$$` is a dollar. Raises
    ValueError in one sentence for what is no such file: syntax, unknown keys (with the nearest name), values.
    """
    values: dict[str, Any] = {}
    where = "" if path is None else f"{path}: "
    if path is not None:
        try:
            loaded = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is no UTF-8 text: {error.reason} at byte {error.start}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
        except RecursionError as error:
            raise ValueError(f"{path}: is nested too deep") from error
        if loaded is None:
            loaded = {}
        if not isinstance(loaded, dict):
            raise ValueError(
                f"{path}: must hold keys and values, such as 'model: smollm2', got {type(loaded).__name__}"
            )
        try:
            values = {key: _expanded(item, f"{key}: ", key in _TEXTS) for key, item in loaded.items()}
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        except RecursionError as error:  # an alias of what it stands in
            raise ValueError(f"{path}: is nested too deep") from error
    overrides = dict(overrides or {})
    engine = overrides.pop("engine", {})
    values |= overrides
    if engine:
        values["engine"] = (values.get("engine") or {}) | engine
    if "engine" in values and values["engine"] is None:  # a heading with nothing under it
        values["engine"] = {}
    problems = _unknown_names(values)
    known = {name: value for name, value in values.items() if name in ServerConfig.model_fields}
    if isinstance(known.get("engine"), dict):
        known["engine"] = {name: value for name, value in known["engine"].items() if name in _ENGINE}
    try:
        config = ServerConfig(**known)
    except pydantic.ValidationError as error:
        problems += _sentences(error)
        if "engine" in known and not any(one["loc"][:1] == ("engine",) or not one["loc"] for one in error.errors()):
            try:
                EngineConfig.from_options(known["engine"])
            except ValueError as of_engine:
                problems.append(str(of_engine))
    if problems:
        raise ValueError(where + "; ".join(problems))
    return config


class _Loader(yaml.SafeLoader):
    """Without keys that are given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# Keys whose values are texts, whatever they look like: a key of digits, a model named 7.
_TEXTS = {name for name, field in ServerConfig.model_fields.items() if field.annotation in (str, str | None, list[str])}


def _expanded(value: Any, place: str, is_text: bool) -> Any:
    """The value with the environment's variables in it."""
    if isinstance(value, dict):
        return {key: _expanded(item, f"{place}{key}: ", False) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, place, is_text) for item in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def of(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        found = os.environ.get(match[2], match[3])
        if found is None:
            raise ValueError(f"{place}the environment has no {match[2]}: set it, or write ${{{match[2]}:-default}}")
        return found

    text = _REFERENCE.sub(of, value)
    # What is one variable alone may be a number, or nothing; a text with one in it stays a text.
    if not re.fullmatch(r"\$\{\w+(?::-[^}]*)?\}", value) or (is_text and text.strip()):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # it may be secret: it is not quoted
        raise ValueError(f"{place}the environment's value is no YAML") from None


_ENGINE = set(EngineConfig.__dataclass_fields__)


def _unknown_names(values: Mapping[str, Any]) -> list[str]:
    """What is to be said of keys that nothing reads, with the nearest that something does."""
    found = []
    for name in values:
        if name in ServerConfig.model_fields:
            continue
        if name in _ENGINE:
            found.append(f"{name} is an option of the engine: put it under 'engine:'")
            continue
        near = difflib.get_close_matches(str(name), [*ServerConfig.model_fields, *_ENGINE], n=1)
        cure = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(ServerConfig.model_fields)}"
        found.append(f"unknown key {name!r}: {cure}")
    engine = values.get("engine")
    for name in engine if isinstance(engine, dict) else ():
        if name not in _ENGINE:
            try:
                EngineConfig.from_options({name: None})
            except ValueError as error:
                found.append(str(error))
    return found


def sentence_of(error: pydantic.ValidationError) -> str:
    """The first of what is wrong, in one sentence with the place and the value."""
    return _sentences(error)[0]


def _sentences(error: pydantic.ValidationError) -> list[str]:
    """One for each key."""
    found: dict[tuple[int | str, ...], pydantic_core.ErrorDetails] = {}
    for one in error.errors(include_url=False):
        key = one["loc"][:1]
        # A value that may be of several types is none of them: the one that fits it furthest is told of.
        if key not in found or len(one["loc"]) > len(found[key]["loc"]):
            found[key] = one
    return [_sentence(one) for one in found.values()]


def _sentence(error: pydantic_core.ErrorDetails) -> str:
    place = ".".join(part for part in map(str, error["loc"]) if not part.startswith(("function-", "list[")))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message if not place or message.startswith(place) else f"{place} {message}"
    shown = repr(error["input"])
    return f"{place}: {message[:1].lower()}{message[1:]}, got {shown if len(shown) <= 80 else shown[:77] + '...'}"
