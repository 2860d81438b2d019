"""The package as it is imported: its public names, and what an import loads."""

import subprocess
import sys

import pytest

import trl_dataeff


def test_importing_the_package_loads_no_torch():
    code = "import sys, trl_dataeff; trl_dataeff.__version__; dir(trl_dataeff); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_no_other():
    for name in trl_dataeff.__all__:
        assert getattr(trl_dataeff, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trl_dataeff.nothing  # noqa: B018
