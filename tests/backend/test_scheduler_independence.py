"""Check that a row's ids depend on its own prompt and seed alone, through scheduler and mock engine together."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.factories import Rig

_TEXT = st.binary(min_size=1, max_size=40).filter(lambda text: 0 not in text)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), prompt=_TEXT, seed=st.integers(0, 2**63 - 1))
def test_ids_depend_on_prompt_and_seed_alone_whatever_the_neighbours_row_chunks_and_batch(
    data: st.DataObject, prompt: bytes, seed: int
) -> None:
    alone = Rig(1)
    alone.submit("own", prompt, seed=seed, max_tokens=12)
    alone.run()
    chunk = data.draw(st.integers(1, 40), "chunk")
    rig = Rig(data.draw(st.integers(1, 32), "rows"), budget=(chunk, chunk), queue=(99, 65536))
    known = data.draw(st.integers(0, 8), "ids known from an earlier attempt")
    num_before = data.draw(st.integers(0, rig.engine.info.num_rows - 1), "neighbours before")
    for number in range(num_before):
        rig.submit(f"before-{number}", bytes([97 + number]) * 3, max_tokens=30, seed=number)
    for _ in range(data.draw(st.integers(0, 5), "steps before")):
        rig.step()
    rig.submit("own", prompt + bytes(alone.ids["own"][:known]), num_prompt_tokens=len(prompt), seed=seed, max_tokens=12)
    for number in range(200):
        if "own" in rig.ends:
            break
        match data.draw(st.sampled_from(["step", "come", "leave"]), "event"):
            case "come" if number < 20:
                rig.submit(f"after-{number}", b"neighbour", max_tokens=5, seed=number)
            case "leave" if num_before:
                rig.abort(f"before-{number % num_before}")
        rig.step()
    rig.run()
    assert rig.ids["own"] == alone.ids["own"][known:]
