"""A model, and vLLM's answers without a connector. Tests that use these have imported vLLM."""

import os
import pathlib
import shutil
import sys
import tempfile

import pytest
from prompts import SHARED, alone

# The examples' model is also that of the tests.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
# Set before torch is imported: a child would wait for threads that a fork does not copy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Set before vLLM is imported: each engine would compile for seconds, to save milliseconds.
os.environ |= {"NUMBA_DISABLE_JIT": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory):
    """Folder for vLLM's sockets and rendezvous files, which killed engines leave. Not one of
    pytest's, whose long names a socket's path (at most 107 bytes) has no room for."""
    tmp_path_factory.getbasetemp()  # pytest's is made elsewhere, and may outlive the run.
    path = tempfile.mkdtemp(prefix="ripieno-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", path)
        patch.setenv("TMPDIR", path)
        yield
    # A killed engine's children may still be at work.
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import tiny_model as models

    path = tmp_path_factory.mktemp("model") / "llama"
    models.make(path)
    return path


@pytest.fixture(scope="session")
def computed(model):
    """Answers and KV bytes of each prompt, without a store."""
    from forked import live

    answers = live(alone, model=model)
    assert len({tuple(said) for said, _, _ in answers}) == len(answers), "tokens depend on prompts"
    return answers


@pytest.fixture(scope="session")
def said(computed):
    """Tokens of each prompt's answer."""
    return [said for said, _, _ in computed]


@pytest.fixture(scope="session")
def filled(model, computed, tmp_path_factory):
    """A store that an engine filled, and the digests of its blocks."""
    from forked import live

    options = {"path": str(tmp_path_factory.mktemp("filled") / "store")}
    answers = live(alone, model=model, options=options)
    pages = {}
    for (said, cached, written), (expected, _, bytes_of), begin in zip(
        answers, computed, SHARED, strict=True
    ):
        # The other prompts with the same prefix already had it from the store.
        assert (said, cached) == (expected, begin)
        if begin == 0:
            assert written == bytes_of
        pages |= written
    return options, pages


@pytest.fixture
def options(tmp_path):
    """Options of a connector with a store of its own."""
    return {"path": str(tmp_path / "store")}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def both(request, options):
    """Same as options, with loads layer by layer, and with loads between steps."""
    return options | {"load_async": request.param}


@pytest.fixture
def stored(filled, both):
    """Same as both, with a store that has the prompts."""
    shutil.copytree(filled[0]["path"], both["path"])
    return both
