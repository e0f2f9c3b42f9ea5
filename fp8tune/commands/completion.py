"""``fp8tune completion``."""

from __future__ import annotations

import enum
from typing import Annotated

from fp8tune.commands.completing import VARIABLE
from fp8tune.options import Argument, Group, Option, examples


class Shell(enum.StrEnum):
    """The shells whose completion is tested."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@examples(
    ("Complete in this bash", 'eval "$(fp8tune completion bash)"'),
    ("In every new shell", "fp8tune completion zsh --install"),
)
def completion(
    shell: Annotated[Shell, Argument("bash, zsh or fish.", "SHELL")],
    install: Annotated[
        bool, Option("--install", "Write it where the shell looks, and say where.", group=Group.OUTPUT)
    ] = False,
) -> None:
    """Print the script that completes commands, options and the names of kernels, arches and shape sets."""
    from typer import _completion_shared as typers

    if install:
        _, path = typers.install(shell=str(shell), prog_name="fp8tune", complete_var=VARIABLE)
        print(f"{path}: written; new shells complete fp8tune")
    else:
        print(typers.get_completion_script(prog_name="fp8tune", complete_var=VARIABLE, shell=str(shell)))
