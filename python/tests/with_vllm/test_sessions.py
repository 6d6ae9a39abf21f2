"""Sessions that resume: a request that gets more input after each answer (vLLM's streaming input).

vLLM drops the last token of each answer, which it has not computed, and hashes the block again.
vLLM 0.25 did not hash it again (vLLM #49377 and #49449): the block was found by a prompt that has
other tokens there. Such a block must not come into a store either.
"""

from copy import copy

import pytest

pytest.importorskip("vllm")

from forked import live  # noqa: E402
from prompts import BLOCK, tokens, whole  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

ANSWER = 4
"""Tokens of each answer, the last of which is dropped."""


class Session:
    """A request to which input is added."""

    def __init__(self, engine, name):
        self.engine, self.name, self.id = engine, name, None
        self.history = []
        """Tokens that have been computed, and those added since."""

    def ask(self, added, last=False):
        """Adds input and returns the answer to it."""
        llm, params = self.engine.llm, SamplingParams(
            max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False
        )
        prompt = {"prompt_token_ids": added}
        request = llm.input_processor.process_inputs(
            self.name, prompt, params, supported_tasks=("generate",), resumable=not last
        )
        InputProcessor.assign_request_id(request)
        self.id = request.request_id = self.id or request.request_id
        llm.output_processor.add_request(request, None, None, 0)
        # As in a process of its own: vLLM's two halves add to this list.
        request = copy(request)
        request.prompt_token_ids = list(request.prompt_token_ids)
        llm.engine_core.add_request(request)
        if last:
            return None
        request = self.engine.scheduler.requests[self.id]
        while request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            llm.step()
        self.history += added + list(request.output_token_ids)[:-1]
        return list(request.output_token_ids)


# The last token of the first answer is the last one of a block: another takes its place.
INPUTS = [tokens(5 * BLOCK - ANSWER), tokens(2 * BLOCK), tokens(BLOCK + 7)]


@pytest.mark.parametrize("is_async", [False, True], ids=["steps", "ahead"])
def test_a_session_that_resumes(model, both, is_async):
    settings = {"model": model, "async_scheduling": is_async}

    def talk(engine):
        session = Session(engine, "s")
        answers = [session.ask(added) for added in INPUTS]
        session.ask([0], last=True)
        engine.run()
        return answers, session.history

    def alone(engine, history):
        return engine.ask(history)

    answers, history = live(talk, **settings)
    expected, _ = live(alone, history, model=model)
    assert live(talk, options=both, **settings) == (answers, history)
    assert live(alone, history, model=model, options=both) == (expected, [whole(history[:-1])])
