"""What code produced a result: the commit, and the versions of the package and of the libraries that it builds on."""

from __future__ import annotations

import functools
import subprocess
from importlib.metadata import version
from pathlib import Path

import trl_dataeff


ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("trl", "transformers", "torch")
UNKNOWN = "unknown"


@functools.cache
def provenance() -> dict[str, str]:
    """Fields that every row of a result has.

    They are looked up once per process, so that they describe the code that it imported.

    Returns:
        The hash of the commit (`commit`, see [`commit_of`]), and the versions `trl_dataeff`, `trl`, `transformers` and
        `torch`.
    """
    fields = {"commit": commit_of(Path(trl_dataeff.__file__).parent)}
    fields["trl_dataeff"] = trl_dataeff.__version__
    for library in LIBRARIES:
        fields[library] = version(library)
    return fields


def commit_of(package: Path, root: Path = ROOT) -> str:
    """The commit of a package in a repository.

    Args:
        package (`Path`): The folder of the package.
        root (`Path`, *optional*): The repository's root.

    Returns:
        The hash of the commit; it ends with `-dirty` if files of the package differ from it. `unknown` without git,
        outside of a repository, or if the package is not the repository's own.
    """
    try:
        top, head = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = _git(root, "status", "--porcelain", "--", str(package))
        tracked = _git(root, "ls-files", "--", str(package))
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    # A package that git does not track is installed in an environment; another top belongs to a repository around it
    if not tracked or Path(top) != root:
        return UNKNOWN
    return f"{head}-dirty" if changes else head


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()
