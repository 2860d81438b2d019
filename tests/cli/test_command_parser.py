"""What the sub-commands say of wrong command lines."""

import pytest

from trl_dataeff.cli.command_parser import CommandParser
from trl_dataeff.utils import UserError


def parser() -> CommandParser:
    made = CommandParser("trl-dataeff made", epilog="a  line")
    made.add_argument("path", metavar="PATH")
    made.add_argument("--kind", choices=("attention", "logistic"))
    made.add_argument("--max_steps", type=int)
    made.add_argument("--speed", type=float)
    made.add_argument("--range", type=float, nargs=2)
    return made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "The following arguments are required: PATH."),
        (["p", "q"], "'q' is one argument too many of `trl-dataeff made`."),
        (["p", "--max_step", "1"], "`--max_step` is not an option of `trl-dataeff made`. Did you mean `--max_steps`?"),
        (["p", "--max-step=1"], "`--max_step` is not an option of `trl-dataeff made`. Did you mean `--max_steps`?"),
        (["p", "--max_steps", "x y"], "`--max_steps` is 'x y'; it takes an integer."),
        (["p", "--speed", "fast"], "`--speed` is 'fast'; it takes a number."),
        (["p", "--kind", "it's"], "`--kind` is \"it's\"; it takes 'attention' or 'logistic'."),
        (["p", "--kind", "atention"], "`--kind` is 'atention'; it takes 'attention' or 'logistic'. Did you mean `attention`?"),
        (["p", "--range", "1"], "`--range`: expected 2 arguments."),
    ],
)  # fmt: skip
def test_mistakes(argv, message):
    with pytest.raises(UserError) as error:
        parser().parse_args(argv)
    assert str(error.value) == f"{message} `trl-dataeff made --help` lists what it takes."
    assert error.value.exit_code == 2


def test_options_are_written_with_hyphens_or_underscores():
    for name in ("--max_steps", "--max-steps"):
        assert parser().parse_args(["a-b", name, "3"]).max_steps == 3
        assert parser().parse_args(["a-b", f"{name}=3"]).path == "a-b"


def test_mistakes_in_a_sub_command_are_its_own():
    made = parser()
    made.add_subparsers().add_parser("copy").add_argument("--force")
    with pytest.raises(UserError) as error:
        made.parse_args(["p", "copy", "--forse", "x"])
    assert str(error.value) == (
        "`--forse` is not an option of `trl-dataeff made PATH copy`. Did you mean `--force`? "
        "`trl-dataeff made PATH copy --help` lists what it takes."
    )


def test_what_follows_two_hyphens_is_no_option():
    assert parser().parse_args(["--max-steps", "3", "--", "--a-b"]).path == "--a-b"


def test_the_epilog_keeps_its_spaces():
    assert "a  line" in parser().format_help()
