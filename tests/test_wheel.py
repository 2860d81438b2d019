"""
What is released: the wheel is complete, and its command runs in an environment that has nothing but its dependencies.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command, **kwargs) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    for tool in ("build", "hatchling", "twine"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def test_the_metadata_is_what_an_index_accepts(dist):
    assert "PASSED" in run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_wheel_and_source_hold_what_they_should(dist):
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("trl_dataeff/**/*.py")}
    recipes = {f"trl_dataeff/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("recipes/**/*.yaml")}
    assert modules | recipes | {"trl_dataeff/py.typed"} <= inside
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in inside)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests/test_wheel.py", "examples/gsm8k.py"} <= names


def test_the_command_runs_in_an_empty_environment(dist, tmp_path):
    """The dependencies are those of this environment: its folder is on the path behind the new one."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall", *dist.glob("*.whl"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(tmp_path)}
    command, options = tmp_path / "venv" / "bin" / "trl-dataeff", {"cwd": tmp_path, "env": environment}
    assert "grpo" in run(command, "--help", **options)
    where = run(python, "-c", "import trl_dataeff; print(trl_dataeff.__file__)", **options)
    assert Path(where.strip()).is_relative_to(packages)
    listed = run(command, "recipes", "list", **options).splitlines()
    for path in ROOT.glob("recipes/**/*.yaml"):
        assert path.relative_to(ROOT / "recipes").with_suffix("").as_posix() in listed
    run(command, "recipes", "validate", "SmolLM2-135M-Instruct/short_answers/dots", **options)
