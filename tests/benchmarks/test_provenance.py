"""What a result says of the code that produced it."""

import subprocess

import pytest

from benchmarks.provenance import ROOT, UNKNOWN, commit_of, provenance


@pytest.fixture
def repository(tmp_path):
    """A repository with a package, one commit."""
    root = tmp_path / "repository"
    package = root / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (root / "page.md").write_text("")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "--message", "First")
    return root


def git(root, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_the_package_differs(repository):
    head = git(repository, "rev-parse", "HEAD")
    package = repository / "package"
    assert commit_of(package, repository) == head
    (repository / "page.md").write_text("Not of the package")
    assert commit_of(package, repository) == head
    (package / "new.py").write_text("")
    assert commit_of(package, repository) == f"{head}-dirty"


def test_where_the_commit_is_unknown(repository, tmp_path, monkeypatch):
    (tmp_path / "outside").mkdir()
    assert commit_of(tmp_path / "outside", tmp_path) == UNKNOWN, "no repository"
    assert commit_of(tmp_path / "outside", repository) == UNKNOWN, "a package outside of the repository"
    installed = repository / "environment"
    installed.mkdir()
    (installed / "module.py").write_text("")
    assert commit_of(installed, repository) == UNKNOWN, "a package that git does not track"
    unpacked = repository / "package"
    assert commit_of(unpacked, unpacked) == UNKNOWN, "a folder of another repository"
    monkeypatch.setenv("PATH", "")
    assert commit_of(repository / "package", repository) == UNKNOWN, "no git"


def test_the_fields_of_a_row():
    fields = provenance()
    assert list(fields) == ["commit", "trl_dataeff", "trl", "transformers", "torch"]
    assert all(fields.values())
    assert fields["commit"] == commit_of(ROOT / "trl_dataeff")
