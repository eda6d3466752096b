"""Check how many connections the proxy's worker takes under a limit of open files."""

from __future__ import annotations

import resource

import pytest

from proxy.worker import fitting_connections


@pytest.mark.parametrize(
    ("soft_limit", "expected"),
    [
        (resource.RLIM_INFINITY, 16384),
        (1 << 20, 16384),
        (16384 + 1152, 16384),
        (16384 + 1151, 16383),
        (4096, 2944),
        (2176, 1024),
        (1024, 448),
        (256, 64),
        (129, 1),
        (10, 1),
    ],
)
def test_a_low_limit_of_open_files_leaves_every_client_a_descriptor_for_its_upstream(
    soft_limit: int, expected: int
) -> None:
    assert fitting_connections(16384, soft_limit) == expected


def test_fewer_connections_than_fit_are_kept() -> None:
    assert fitting_connections(100, 1024) == 100
