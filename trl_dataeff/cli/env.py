"""`trl-dataeff env`: TRL's report, with our versions at its end."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from trl_dataeff.cli.command_parser import CommandParser
from trl_dataeff.version import __version__


def run(argv: list[str]) -> int:
    """Run the sub-command and return its exit code."""
    CommandParser("trl-dataeff env", description="Print versions for a bug report.").parse_args(argv)
    from trl.scripts.env import print_env

    print_env()
    try:
        math_verify = version("math-verify")
    except PackageNotFoundError:
        math_verify = "not installed"
    print(f"- trl-dataeff version: {__version__}\n- math-verify version: {math_verify}\n")
    return 0
