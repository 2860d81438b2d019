"""The package as it is imported: its public names, and what an import loads."""

import subprocess
import sys
import warnings

import pytest

import trl_dataeff


@pytest.mark.parametrize(
    ("version", "warns"), [("1.99.0", True), ("1.15.2", True), ("1.16.3", False), ("1.16.0", False)]
)
def test_an_untested_trl_is_a_warning_not_an_error(version, warns):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trl_dataeff._warn_untested_trl(version)
    assert [f"has not been tested with the installed trl {version}" in str(w.message) for w in seen] == [True] * warns


def test_importing_the_package_loads_no_torch():
    code = "import sys, trl_dataeff; trl_dataeff.__version__; dir(trl_dataeff); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_no_other():
    for name in trl_dataeff.__all__:
        assert getattr(trl_dataeff, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trl_dataeff.nothing  # noqa: B018
