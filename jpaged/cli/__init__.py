"""Owns the command line: the group that the commands hang on, and how errors are told."""

from __future__ import annotations

import errno
from typing import Any

import click

from jpaged import __version__
from jpaged.cli.bench import bench
from jpaged.cli.chat import chat
from jpaged.cli.env import env
from jpaged.cli.generate import generate
from jpaged.cli.serve import config, serve


class Mistake(click.ClickException):
    """What the user can put right."""

    exit_code = 2


class OneLineErrors(click.Group):
    """Tells a user's mistake in one line with exit code 2; `--traceback` shows where it was raised."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            # click itself deals with a reader that went away (`jpaged generate | head`).
            if ctx.params.get("traceback") or getattr(error, "errno", None) == errno.EPIPE:
                raise
            raise Mistake(" ".join(str(error).split()) or type(error).__name__) from error


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jpaged", message="%(prog)s %(version)s")
@click.option("--traceback", is_flag=True, help="Show where an error was raised.")
def main(traceback: bool) -> None:
    """Generate text from language models with a paged KV cache, in pure JAX.

    `jpaged COMMAND --help` shows the options of a command.
    """


for command in (generate, chat, serve, bench, config, env):
    main.add_command(command)
