"""Check how a request is made to call: the form of a forced call, and the end of an answer that may make one only."""

from __future__ import annotations

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.tools.calling import made_to_call
from inference_api.server.tools.definitions import FunctionDefinition, forced_call
from inference_api.server.tools.formats import FORCED, HERMES

FUNCTIONS = [FunctionDefinition(name="f")]
PLAIN = GenerationRequest([1], SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=1), 9, stop_sequences=("x",))
FORMATS = (HERMES,)


def test_a_forced_call_has_its_form_and_is_read_as_a_bare_object() -> None:
    generation, formats = made_to_call(PLAIN, FUNCTIONS, FORMATS, must_call=True, one_call=True)
    assert (generation.grammar, formats) == (forced_call(FUNCTIONS), (FORCED,))
    assert generation.stop_sequences == ("x",)


@pytest.mark.parametrize(("one_call", "stops"), [(False, ("x",)), (True, ("x", "</tool_call>"))])
def test_a_free_answer_ends_after_its_first_call_only_if_one_is_wanted(one_call: bool, stops: tuple[str, ...]) -> None:
    generation, formats = made_to_call(PLAIN, FUNCTIONS, FORMATS, must_call=False, one_call=one_call)
    assert (generation.stop_sequences, generation.grammar, formats) == (stops, None, FORMATS)


def test_a_forced_call_beside_another_form_is_refused_by_that_forms_name() -> None:
    formed = PLAIN.in_form(Grammar(GrammarKind.JSON_OBJECT, field="text.format"))
    with pytest.raises(InvalidRequestError, match=r"^text\.format: cannot be combined with tools") as caught:
        made_to_call(formed, FUNCTIONS, FORMATS, must_call=True, one_call=False)
    assert caught.value.param == "text.format"
