"""Check the log line: its fields, what it may say of the caller, and that no value can forge a field or a line."""

from __future__ import annotations

import json
import logging
import os
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth import Claims
from proxy.logs import JsonFormatter
from proxy.transaction import Transaction, escape

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def written(caplog: pytest.LogCaptureFixture, transaction: Transaction, *, client_left: bool = False) -> str:
    with caplog.at_level(logging.INFO, logger="test.transaction"):
        transaction.finish(client_left=client_left)
    return caplog.messages[-1]


def make_transaction(path: str) -> Transaction:
    times = iter([10.0, 10.25])
    return Transaction(path, "127.0.0.1", lambda: next(times), logging.getLogger("test.transaction"), TRACE_ID)


def test_the_line_names_the_caller_by_tenant_and_bearer_id_alone(caplog: pytest.LogCaptureFixture) -> None:
    transaction = make_transaction("/inference/m")
    transaction.claims = Claims("t", "j", frozenset({"hidden"}), 99.0, MappingProxyType({"hidden": 1}))
    transaction.status_code = 200
    transaction.stats = {"tps": "é\n"}
    assert written(caplog, transaction) == (
        "[Transaction] path=/inference/m client_address=127.0.0.1 status_code=200 "
        'jwt={"team_id":"t","token_id":"j"} stats={"tps":"\\u00e9\\n"} duration_ms=250 '
        f"trace_id={TRACE_ID}"
    )


def test_a_client_that_left_is_a_499_and_a_path_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    transaction = make_transaction("/a\n[Transaction] jwt=x\x1b[2J")
    transaction.status_code = 200
    assert written(caplog, transaction, client_left=True) == (
        "[Transaction] path=/a\\n[Transaction]\\x20jwt\\x3dx\\x1b[2J client_address=127.0.0.1 status_code=499 "
        f"jwt=- stats=- duration_ms=250 trace_id={TRACE_ID}"
    )


def test_a_reader_that_was_cut_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    transaction = make_transaction("/inference/m")
    with caplog.at_level(logging.INFO, logger="test.transaction"):
        transaction.finish(client_left=True, cut_reason="write_stalled")
    assert caplog.messages[-1].endswith(f"trace_id={TRACE_ID} cut_reason=write_stalled")
    told = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (told["status_code"], told["cut_reason"]) == (499, "write_stalled")


def test_a_health_probe_that_went_well_writes_no_line_and_one_that_failed_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transaction = make_transaction("/health")
    transaction.status_code = 200
    with caplog.at_level(logging.INFO, "test.transaction"):
        transaction.finish(client_left=False)
    assert caplog.messages == []
    transaction.status_code = 503
    assert "status_code=503" in written(caplog, transaction)


def test_as_json_the_line_has_the_same_names_and_its_numbers_stay_numbers(caplog: pytest.LogCaptureFixture) -> None:
    transaction = make_transaction("/a\nforged\x1b[2J" + "x" * 500)
    transaction.claims = Claims("t", "j", frozenset({"hidden"}), 99.0, MappingProxyType({"hidden": 1}))
    transaction.status_code = 200
    transaction.stats = {"tps": 12.5}
    written(caplog, transaction)
    caplog.records[-1].created = 1_700_000_000.25
    line = JsonFormatter().format(caplog.records[-1])
    assert line.isascii() and line.isprintable()
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "process": "proxy",
        "pid": os.getpid(),
        "message": "transaction",
        "path": ("/a\nforged\x1b[2J" + "x" * 500)[:256],
        "client_address": "127.0.0.1",
        "status_code": 200,
        "jwt": {"team_id": "t", "token_id": "j"},
        "stats": {"tps": 12.5},
        "duration_ms": 250.0,
        "trace_id": TRACE_ID,
    }


def test_as_json_what_is_unknown_is_null_and_so_are_statistics_without_bound(caplog: pytest.LogCaptureFixture) -> None:
    transaction = make_transaction("/x")
    transaction.stats = ["x" * 2000]
    written(caplog, transaction, client_left=True)
    body = json.loads(JsonFormatter().format(caplog.records[-1]))
    assert (body["jwt"], body["stats"], body["status_code"]) == (None, None, 499)


@given(st.text())
def test_an_escaped_value_is_one_printable_word(value: str) -> None:
    word = escape(value)
    assert word.isascii() and word.isprintable() and not {" ", "="} & set(word) and 0 < len(word) <= 256
