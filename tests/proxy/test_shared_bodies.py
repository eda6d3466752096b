"""Check that equal bodies are held once, and only as long as somebody sends them."""

from __future__ import annotations

from proxy.shared_bodies import SharedBodies


def test_equal_bodies_are_one_object_until_the_last_holder_has_sent_it() -> None:
    bodies = SharedBodies()
    first, release_first = bodies.hold(bytes(1000))
    second, release_second = bodies.hold(bytes(bytearray(1000)))
    assert second is first
    release_first()
    third, release_third = bodies.hold(bytes(bytearray(1000)))
    assert third is first
    release_second()
    release_third()
    assert not bodies._held


def test_other_bodies_are_kept_apart() -> None:
    bodies = SharedBodies()
    first, release = bodies.hold(b"a")
    second, _release = bodies.hold(b"b")
    release()
    assert (first, second, list(bodies._held)) == (b"a", b"b", [b"b"])
