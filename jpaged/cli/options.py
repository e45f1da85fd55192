"""Owns the options that several commands share, and the engine they describe."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from jpaged import __version__
from jpaged.small_model import NAME as SMALL_MODEL
from jpaged.small_model import small_model_path

DTYPES = ("float32", "bfloat16", "float16")

EARLY_STOPPING: dict[str, Any] = {"yes": True, "no": False, "never": "never"}

PYTHON_ONLY = {"logits_processor", "prompt_logprobs", "detokenize"}  # of no use on the command line


def _bias(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float] | None:
    """From texts ID=NUMBER."""
    bias: dict[str, float] = {}
    for value in values:
        token_id, _, number = value.partition("=")
        try:
            bias[token_id.strip()] = float(number)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a token id and a number, such as 42=-5") from None
    return bias or None


def _structure(_context: click.Context, _parameter: click.Parameter, value: str | None) -> Any:
    """From a text KIND=TEXT, or KIND=@FILE."""
    if value is None:
        return None
    from jpaged.host.structured import Structured

    kind, _, text = value.partition("=")
    if kind not in ("json", "json_object", "regex", "grammar", "choice") or not text and kind != "json_object":
        raise click.BadParameter(
            f"{value!r} is none of json=SCHEMA, json_object, regex=PATTERN, grammar=LARK, choice=ONE|OTHER"
        )
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeError) as error:
            raise click.BadParameter(f"{text[1:]} cannot be read: {error}") from None
    try:
        given: dict[str, Any] = {kind: {"json_object": True, "choice": text.split("|")}.get(kind, text)}
        return Structured(**given)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


# One entry a field of SamplingParams (a test holds them to it): the flag names and what click needs to know.
SAMPLING: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "n": (("-n", "--n"), {"type": int, "help": "Samples of the same prompt, equal ones at temperature 0."}),
    "best_of": (("--best-of",), {"type": int, "help": "Samples to draw, of which the n likeliest are shown."}),
    "num_beams": (("--num-beams",), {"type": int, "help": "Width of a beam search; needs --temperature 0."}),
    "length_penalty": (
        ("--length-penalty",),
        {"type": float, "help": "Power of the length by which a beam's log-probability is divided."},
    ),
    "early_stopping": (
        ("--early-stopping",),
        {
            "type": click.Choice(list(EARLY_STOPPING)),
            "callback": lambda _context, _parameter, value: None if value is None else EARLY_STOPPING[value],
            "help": "Whether a beam search ends as soon as it has found as many sequences as beams.",
        },
    ),
    "temperature": (("-t", "--temperature"), {"type": float, "help": "0 takes the most likely token."}),
    "top_k": (("--top-k",), {"type": int, "help": "Draw from the k most likely tokens; 0: all."}),
    "top_p": (
        ("--top-p",),
        {"type": float, "help": "Draw from the likeliest tokens that together have this probability."},
    ),
    "min_p": (
        ("--min-p",),
        {"type": float, "help": "Drop tokens whose probability is below this share of the likeliest token's."},
    ),
    "repetition_penalty": (
        ("--repetition-penalty",),
        {"type": float, "help": "Divides the logits of tokens that prompt or answer have; above 1: fewer repetitions."},
    ),
    "frequency_penalty": (
        ("--frequency-penalty",),
        {"type": float, "help": "Taken from a token's logit each time that the answer has it."},
    ),
    "presence_penalty": (
        ("--presence-penalty",),
        {"type": float, "help": "Taken from a token's logit if the answer has it."},
    ),
    "logit_bias": (
        ("--logit-bias",),
        {"multiple": True, "callback": _bias, "metavar": "ID=NUMBER", "help": "Added to a logit (repeatable)."},
    ),
    "allowed_token_ids": (
        ("--allowed-token-id",),
        {"type": int, "multiple": True, "help": "Draw nothing but this token (repeatable)."},
    ),
    "bad_words": (("--bad-word",), {"multiple": True, "help": "A word that does not come (repeatable)."}),
    "structured": (
        ("--structured",),
        {
            "callback": _structure,
            "metavar": "KIND=TEXT",
            "help": "The shape of the answer: json=SCHEMA, json_object, regex=PATTERN, grammar=LARK or "
            "choice=ONE|OTHER; TEXT may be @FILE.",
        },
    ),
    "max_tokens": (("-m", "--max-tokens"), {"type": int, "help": "At most so many new tokens; 0: as many as fit."}),
    "min_tokens": (("--min-tokens",), {"type": int, "help": "At least so many new tokens."}),
    "stop": (("--stop",), {"type": str, "multiple": True, "help": "End the text before this string (repeatable)."}),
    "stop_token_ids": (
        ("--stop-token-id",),
        {"type": int, "multiple": True, "help": "End the text at this token (repeatable)."},
    ),
    "include_stop_str_in_output": (
        ("--include-stop-str-in-output",),
        {"is_flag": True, "help": "Show the stop string that ended the text."},
    ),
    "ignore_eos": (("--ignore-eos",), {"is_flag": True, "help": "Go on after the model's end-of-sequence token."}),
    "seed": (("--seed",), {"type": int, "help": "Makes draws repeatable."}),
    "logprobs": (("--logprobs",), {"is_flag": True, "help": "Print the log-probability of the answer."}),
    "logprobs_mode": (
        ("--logprobs-mode",),
        {"type": click.Choice(["raw", "processed"]), "help": "Under the model's logits, or what is drawn from."},
    ),
    "truncate_prompt_tokens": (
        ("--truncate-prompt-tokens",),
        {"type": int, "help": "Use so many of the prompt's last tokens alone."},
    ),
    "skip_special_tokens": (
        ("--skip-special-tokens/--show-special-tokens",),
        {"help": "Leave special tokens out of the text.", "default": True},
    ),
    "spaces_between_special_tokens": (
        ("--spaces-between-special-tokens/--no-spaces-between-special-tokens",),
        {"help": "Spaces beside special tokens, where shown [default: as the tokenizer writes].", "default": None},
    ),
    "cache_salt": (("--cache-salt",), {"type": str, "help": "Share KV only with requests of the same salt."}),
}


def sampling_options(**defaults: Any) -> Callable:
    """Adds an option for each field of `SamplingParams`, with the command's `defaults`; `sampling_from` reads them."""

    def decorate(command: Callable) -> Callable:
        for name, (flags, settings) in reversed(SAMPLING.items()):
            shown = {"show_default": True, "default": defaults[name]} if name in defaults else {}
            command = click.option(*flags, name, **{**settings, **shown})(command)
        return click.option(
            "--model-defaults/--no-model-defaults",
            default=True,
            help="For what no option says, sample as the model was published to [default: yes].",
        )(command)

    return decorate


@dataclass
class Asked:
    """What a command line says of sampling."""

    given: dict[str, Any]  # by its options
    others: dict[str, Any]  # the command's own defaults, for what they don't say
    model_defaults: bool  # whether the model's come before these
    sampling: Any  # the SamplingParams of both

    def of_model(self, params: Any) -> Any:
        """The SamplingParams with the model's defaults, which are told on standard error."""
        from jpaged.host.sampling_params import SamplingParams

        taken = params.defaults_beside(self.given) if self.model_defaults else {}
        if taken:
            told = ", ".join(f"{name}={value}" for name, value in taken.items())
            click.echo(f"sampling defaults of the model: {told}; --no-model-defaults leaves them", err=True)
        return SamplingParams(**(self.others | taken | self.given))


def sampling_from(options: dict[str, Any]) -> Asked:
    """Takes the sampling options out of a command's options, and checks them before a model is loaded."""
    from jpaged.host.sampling_params import SamplingParams

    source = click.get_current_context().get_parameter_source
    found = {name: options.pop(name) for name in SAMPLING}
    found = {name: value for name, value in found.items() if value is not None and value != ()}
    if found.get("max_tokens") == 0:
        found["max_tokens"] = None
    given = {name: value for name, value in found.items() if source(name) != click.core.ParameterSource.DEFAULT}
    others = {name: value for name, value in found.items() if name not in given}
    return Asked(given, others, options.pop("model_defaults"), SamplingParams(**found))


WARM_UP: dict[str, Any] = {"yes": True, "no": False, "background": "background"}

# One entry a field of EngineConfig (a test holds them to it).
ENGINE: dict[str, tuple[str, dict[str, Any]]] = {
    "page_size": ("--page-size", {"type": int, "help": "Tokens in a page of the KV cache [default: 16]."}),
    "max_num_seqs": (
        "--max-num-seqs",
        {
            "type": int,
            "help": "At most so many sequences run at once [default: 64 on a CPU, else 256; for generate, those of one "
            "request].",
        },
    ),
    "max_num_beams": ("--max-num-beams", {"type": int, "help": "The widest beam search [default: 1, none]."}),
    "max_num_batched_tokens": (
        "--max-num-batched-tokens",
        {
            "type": int,
            "help": "At most so many tokens are computed in a step [default: 2048; for chat and generate 128].",
        },
    ),
    "max_model_len": (
        "--max-model-len",
        {
            "type": int,
            "help": "Tokens of the longest sequence, prompt and answer together [default: the model's limit].",
        },
    ),
    "gpu_memory_utilization": (
        "--gpu-memory-utilization",
        {"type": float, "help": "Share of a GPU's memory that weights and KV cache may fill [default: 0.9]."},
    ),
    "kv_cache_memory": ("--kv-cache-memory", {"type": str, "help": 'Size of the KV cache, such as "2GiB".'}),
    "num_pages": ("--num-pages", {"type": int, "help": "Size of the KV cache in pages, instead."}),
    "dtype": ("--kv-dtype", {"type": click.Choice(DTYPES), "help": "Of the KV cache [default: that of the weights]."}),
    "swap_space": (
        "--swap-space",
        {"help": 'Host memory for pages that the KV cache has no room for, such as "4GiB" [default: none].'},
    ),
    "swap_disk_space": ("--swap-disk-space", {"help": "As much again on disk, for what that has no room for."}),
    "swap_dir": (
        "--swap-dir",
        {"type": click.Path(file_okay=False), "help": "The folder for it [default: that for temporary files]."},
    ),
    "preemption": (
        "--preemption",
        {
            "type": click.Choice(["swap", "recompute"]),
            "help": "What a preempted request had is brought back, or computed again [default: if there is swap space, "
            "what is faster].",
        },
    ),
    "prefix_caching": (
        "--prefix-caching/--no-prefix-caching",
        {"default": None, "help": "Keep the KV of prompts for later ones that begin alike."},
    ),
    "prompt_logprobs": (
        "--prompt-logprobs",
        {"is_flag": True, "default": None, "help": "Build steps that can score prompts, for `Session.score`."},
    ),
    "deterministic": (
        "--deterministic",
        {"is_flag": True, "default": None, "help": "Give a request the same bits whatever shares its batches."},
    ),
    "async_scheduling": (
        "--async-scheduling/--no-async-scheduling",
        {"default": None, "help": "Start a step before the tokens of the one before are read."},
    ),
    "warm_up": (
        "--warm-up",
        {
            "type": click.Choice(list(WARM_UP)),
            "callback": lambda _context, _parameter, value: None if value is None else WARM_UP[value],
            "help": "Compile all programs before the first request, each when it is needed, or in the background "
            "[default: yes for bench, else background].",
        },
    ),
    "late_compile": (
        "--late-compile",
        {
            "type": click.Choice(["allow", "error"]),
            "help": "What to do when a program is missing after warm-up [default: allow].",
        },
    ),
    "compilation_cache_dir": (
        "--compilation-cache-dir",
        {
            "type": click.Path(file_okay=False),
            "help": "Where compiled programs are kept [default: xla in jpaged's cache].",
        },
    ),
    "kernels": (
        "--kernels",
        {"help": "The kernels to run: mosaic_gpu, triton or xla [default: the best that can serve the model]."},
    ),
    "interpret_kernels": (
        "--interpret-kernels",
        {"is_flag": True, "default": None, "help": "Run GPU kernels on a CPU by interpretation. Very slow."},
    ),
    "check_integrity": (
        "--check-integrity",
        {"is_flag": True, "default": None, "help": "Check the bookkeeping of the KV pages after each step. Slow."},
    ),
}


def engine_options(command: Callable) -> Callable:
    """Adds `--model`, `--dtype` and the engine's options; `open_engine` takes them."""
    for name, (flag, settings) in reversed(ENGINE.items()):
        command = click.option(flag, f"engine_{name}", **settings)(command)
    dtype = click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Of the weights [default: float32 on a CPU, bfloat16 elsewhere].",
    )
    model = click.option(
        "--model",
        default=SMALL_MODEL,
        show_default=True,
        metavar="PATH|ID",
        help=f"A folder, a GGUF file or a hub id; {SMALL_MODEL} is fetched on first use.",
    )
    return model(dtype(command))


def engine_for_one(num_samples: int = 1, num_beams: int = 1) -> dict[str, int]:
    """Settings for one request at a time: fewer shapes to compile, so that the first answer comes soon."""
    num_seqs = max(num_samples, num_beams)
    return {"max_num_seqs": num_seqs, "max_num_beams": num_beams, "max_num_batched_tokens": max(128, num_seqs)}


def spinner(text: str, shown: bool = True) -> Any:
    """A context with a spinner before `text`, where standard error is a terminal; to be left before anything is
    written."""
    if not shown or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


@dataclass
class OpenedEngine:
    """An engine that is ready, and what getting there took."""

    engine: Any
    tokenizer: Any
    dtype: str  # of the weights
    settings: dict[str, Any]
    load_seconds: float
    warm_up_seconds: float
    params: Any

    def describe(self, mode: str, model: str) -> dict[str, Any]:
        """What a file of measurements begins with."""
        import jax

        return {
            "mode": mode,
            "model": model,
            "jpaged": __version__,
            "jax": jax.__version__,
            "platform": platform.platform(),
            "devices": [device.device_kind for device in jax.devices()],
            "dtype": self.dtype,
            "engine": self.settings,
            "load_seconds": self.load_seconds,
            "warm_up_seconds": self.warm_up_seconds,
        }


def open_engine(options: dict[str, Any], **defaults: Any) -> OpenedEngine:
    """Takes the model and engine options out of a command's options, loads the model and warms the engine up.

    `defaults` are engine settings of the command that the user's options override.
    """
    model, dtype = options.pop("model"), options.pop("dtype")
    chosen = {name: options.pop(f"engine_{name}") for name in ENGINE}
    settings = {**defaults, **{name: value for name, value in chosen.items() if value is not None}}

    with spinner(f"Loading {model}"):
        from jpaged import Engine, EngineConfig, load

        config = EngineConfig(**settings)
        path = str(small_model_path()) if model == SMALL_MODEL else model
        started = time.perf_counter()
        params = load(path, dtype=dtype)
        load_seconds = time.perf_counter() - started
    with spinner("Compiling (the first time takes minutes)" if config.warm_up is True else "Making the engine"):
        engine = Engine(params, config)
    return OpenedEngine(
        engine=engine,
        tokenizer=params.tokenizer,
        dtype=str(params.weights["head"].dtype),
        settings=settings,
        load_seconds=load_seconds,
        warm_up_seconds=engine.warm_up_seconds,
        params=params,
    )
