"""A model, and what vLLM says without a connector. Who uses this has imported vLLM."""

import os
import shutil

import pytest
from prompts import SHARED, alone

# Before torch is there: a child would wait for threads that a fork does not copy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before vLLM is: each engine would compile anew, for seconds, what takes milliseconds.
os.environ |= {"NUMBA_DISABLE_JIT": "1", "TORCHDYNAMO_DISABLE": "1"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import model as models

    path = tmp_path_factory.mktemp("model") / "llama"
    models.make(path)
    return path


@pytest.fixture(scope="session")
def computed(model):
    """Answers and bytes of each prompt without a store."""
    from forked import live

    answers = live(alone, model=model)
    assert len({tuple(said) for said, _, _ in answers}) == len(answers), "tokens depend on prompts"
    return answers


@pytest.fixture(scope="session")
def said(computed):
    """Tokens of each prompt."""
    return [said for said, _, _ in computed]


@pytest.fixture(scope="session")
def filled(model, computed, tmp_path_factory):
    """A store that an engine filled, and the bytes of what is in it."""
    from forked import live

    options = {"path": str(tmp_path_factory.mktemp("filled") / "store")}
    answers = live(alone, model=model, options=options)
    pages = {}
    for (said, cached, written), (expected, _, bytes_of), begin in zip(
        answers, computed, SHARED, strict=True
    ):
        # The others that begin alike had that from the store at once.
        assert (said, cached) == (expected, begin)
        if begin == 0:
            assert written == bytes_of
        pages |= written
    return options, pages


@pytest.fixture
def options(tmp_path):
    """Of a connector with a store of its own."""
    return {"path": str(tmp_path / "store")}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def both(request, options):
    """The same, with loads layer by layer, and with loads between steps."""
    return options | {"load_async": request.param}


@pytest.fixture
def stored(filled, both):
    """The same, of a store that has the prompts."""
    shutil.copytree(filled[0]["path"], both["path"])
    return both
