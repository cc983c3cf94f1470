"""What all tests share: the import path, the number of threads, the marker `slow`, real data."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():  # attention.py's kernels, emulated; must be set before any triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from tiny import Nursery, Pipeline

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# The same on a laptop and on a large server: more threads don't pay at the sizes of the tests.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes; run with runs/test.sh --all")
    config.addinivalue_line("markers", "long: more of the same; run with runs/test.sh --long")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real dialogues, from the variable NANOHH_DATA.

    Skips where it is unset, since most readers have no such folder; fails there if CI is set,
    since a test that never runs proves nothing.
    """
    name = os.environ.get("NANOHH_DATA")
    if not name:
        message = "NANOHH_DATA is unset: it names the folder of real dialogues"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    if not Path(name).is_dir():
        pytest.fail(f"NANOHH_DATA={name} is no folder", pytrace=False)
    return Path(name)


@pytest.fixture(scope="session")
def transformers():
    """The library, an oracle: skips where it is not installed, and fails there if CI is set."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip("transformers is not installed")
    return transformers


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """Starts the project's commands as processes that cost a fork."""
    made = Nursery(tmp_path_factory.mktemp("jobs"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, nursery):
    """The pipeline at toy sizes: the uninterrupted run of each stage, made when first asked."""
    return Pipeline(tmp_path_factory.mktemp("tiny"), nursery)


@pytest.fixture
def program(request, monkeypatch, capsys):
    """Runs main() of the test file's PROGRAM with arguments: (exit status, output, errors)."""
    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["program", *map(str, argv)])
        code = 0
        try:
            request.module.PROGRAM.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        return code, *capsys.readouterr()
    return call


@pytest.fixture
def site(tmp_path):
    """site(panel, ...) -> a Site of the human's page in site.folder; closed at the end."""
    from visits import Fake, Site
    made = []

    def make(panel=None, folder=tmp_path / "store", **more):
        made.append(Site(folder, panel or Fake(), **more))
        return made[-1]

    make.folder = tmp_path / "store"
    yield make
    for one in made:
        if one.thread.is_alive():
            one.close()
