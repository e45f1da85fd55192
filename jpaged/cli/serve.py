"""Owns `jpaged serve`: a server of one model, from a YAML file and options."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click

from jpaged.cli.options import ENGINE

# The options of a command that engine options have already, or that one of another kind stands for.
LEFT_OUT = {"engine"}


def server_options(command: Callable, left_out: Collection[str] = ()) -> Callable:
    """Adds an option for each field of `ServerConfig` but those left out, and the engine's."""
    from jpaged.server.config import ServerConfig

    for name, (flag, settings) in reversed(ENGINE.items()):
        if "--no-" not in flag and settings.get("is_flag"):  # a file may have it on
            flag, settings = f"{flag}/--no-{flag[2:]}", {key: settings[key] for key in settings if key != "is_flag"}
        command = click.option(flag, f"engine_{name}", **settings)(command)
    for name, field in reversed(ServerConfig.model_fields.items()):
        if name not in LEFT_OUT and name not in left_out:
            command = click.option(*_flag(name, field.annotation), name, **_settings(name, field))(command)
    return command


def _flag(name: str, kind: Any) -> tuple[str, ...]:
    flag = "--" + name.replace("_", "-")
    if typing.get_origin(kind) is list:
        flag = {"served_model_names": "--served-model-name"}.get(name, flag.removesuffix("s"))
    return (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)


def _settings(name: str, field: Any) -> dict[str, Any]:
    """What click needs to know; None stands for an option that is not given."""
    kind, told = field.annotation, field.description
    default = field.default
    if default not in (None, [], "") and "[default" not in told:
        shown = {True: "yes", False: "no"}.get(default, default) if isinstance(default, bool) else default
        told = f"{told} [default: {shown}]"
    settings: dict[str, Any] = {"default": None, "help": told}
    if typing.get_origin(kind) is list:
        return settings | {"multiple": True, "help": f"{told} Repeatable."}
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(one for one in typing.get_args(kind) if one not in (type(None), int))
    if typing.get_origin(kind) is typing.Literal:
        return settings | {"type": click.Choice(list(typing.get_args(kind)))}
    return settings if kind is bool else settings | {"type": kind}


def config_from(path: str | None, options: dict[str, Any]) -> Any:
    """The `ServerConfig` of a file and what options say in the place of it."""
    from jpaged.server.config import read_config

    given = {name: value for name, value in options.items() if value is not None and value != ()}
    engine = {name: given.pop(f"engine_{name}") for name in ENGINE if f"engine_{name}" in given}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return read_config(path, given | ({"engine": engine} if engine else {}))


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--config", "config", type=click.Path(dir_okay=False), help="The YAML file; FILE without --config, too.")
@server_options
def serve(file: str | None, config: str | None, **options: Any) -> None:
    """Serve a model to OpenAI clients, from a YAML file such as configs/smollm2.yaml, or from options alone.

    Options go before what the file says. /ready answers 200 when requests are served, /openapi.json lists the
    endpoints, /dashboard shows the engine. SIGTERM ends it, when what runs has finished.
    """
    if file is not None and config is not None:
        raise click.UsageError("give the YAML file once")
    found = config_from(file or config, options)
    found.all_api_keys()  # before the model is loaded
    from jpaged.server.serve import serve as run

    raise SystemExit(run(found))


@click.group()
def config() -> None:
    """Look at a server's YAML file."""


@config.command()
@click.argument("file", type=click.Path(dir_okay=False))
def check(file: str) -> None:
    """Check a YAML file without loading the model."""
    from jpaged.server.config import read_config

    found = read_config(file)
    found.all_api_keys()
    click.echo(f"{file}: is good; it serves {found.model} on {found.host}:{found.port}")
    if found.model.startswith((".", "/")) and not Path(found.model).exists():
        click.echo(f"{file}: there is no {found.model} on this machine", err=True)
