"""Makes a git repository ``project``: a kernel, and a branch ``larger-blocks`` that changes its default config."""

import os
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parent
SHAPES = "[[rows]]\ntokens = 16640\nhidden = [2048, 5120]\n"


def git(*arguments: str) -> None:
    """Run git in the repository, as an author and at a time that are always the same."""
    who = {"NAME": "author", "EMAIL": "author@localhost", "DATE": "2026-01-01T00:00:00Z"}
    environment = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in who.items()}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "-C", "project", *arguments], check=True, env=os.environ | environment, capture_output=True)


if __name__ == "__main__":
    project = Path("project")
    project.mkdir()
    (project / "shapes.toml").write_text(SHAPES)
    git("init", "--initial-branch=main")
    kernel = (EXAMPLES / "add_spec.py").read_text()
    for branch, block in (("main", 1024), ("larger-blocks", 4096)):
        if branch != "main":
            git("checkout", "-b", branch)
        (project / "kernel.py").write_text(kernel.replace("BLOCK=1024", f"BLOCK={block}"))
        git("add", ".")
        git("commit", "-m", f"Blocks of {block}")
