"""Check every setting: its default, its names and their order, its bounds, and the way to a child process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inference_api.config import Settings, child_environ, proxy_environ
from inference_api.errors import SettingError

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def test_the_defaults_are_the_decided_numbers() -> None:
    settings = Settings.from_environ({})
    assert settings == Settings()
    assert (settings.bind, settings.port, settings.workers) == ("127.0.0.1", 7000, 1)
    assert (settings.rows, settings.context_tokens) == (32, 2048)
    assert (settings.queue_requests, settings.queue_tokens) == (96, 65536)
    assert (settings.queue_seconds, settings.first_token_seconds, settings.total_seconds) == (60.0, 120.0, 600.0)
    assert (settings.body_bytes, settings.watchdog_seconds, settings.idle_check_seconds) == (262144, 5.0, 120.0)
    assert not settings.insecure_dev and not settings.legacy_eos


def test_every_setting_has_a_prefixed_name_first_a_line_of_words_and_a_name_of_its_own() -> None:
    seen: set[str] = set()
    for field in FIELDS.values():
        names = field.metadata["names"]
        assert names[0].startswith("INFERENCE_API_") or names[0].startswith("INTERNAL_AUTH_KEY"), field.name
        assert field.metadata["doc"].endswith("."), field.name
        assert not seen & set(names), field.name
        seen.update(names)


def test_units_are_in_the_names_of_numbers() -> None:
    counts = {"port", "workers", "threads", "rows", "queue_requests", "batch_max_requests", "layers", "torch_threads"}
    counts.add("mock_tokens_per_second")
    units = ("_seconds", "_tokens", "_bytes", "_ratio", "_characters")
    for name, field in FIELDS.items():
        if isinstance(field.default, int | float) and not isinstance(field.default, bool) and name not in counts:
            assert name.endswith(units), name


def test_the_prefixed_name_wins_over_the_originals() -> None:
    assert Settings.from_environ({"SERVICE_PORT": "8001"}).port == 8001
    assert Settings.from_environ({"SERVICE_PORT": "8001", "INFERENCE_API_PORT": "8002"}).port == 8002


def test_options_of_the_command_line_win_over_the_environment() -> None:
    assert Settings.from_environ({"INFERENCE_API_PORT": "8001"}, INFERENCE_API_PORT="8002").port == 8002


@pytest.mark.parametrize(("text", "engine"), [("1", "mock"), ("true", "mock"), ("0", "auto"), ("", "auto")])
def test_the_originals_mock_switch_names_the_engine(text: str, engine: str) -> None:
    assert Settings.from_environ({"MOCK_MODEL": text}).engine == engine
    assert Settings.from_environ({"MOCK_MODEL": "1", "INFERENCE_API_ENGINE": "transformers"}).engine == "transformers"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["low"] is not None])
def test_a_number_out_of_bounds_stops_the_start_with_its_name_value_and_bounds(name: str) -> None:
    meta = FIELDS[name].metadata
    for value in [meta["low"] - 1] + ([meta["high"] + 1] if meta["high"] is not None else []):
        with pytest.raises(SettingError) as caught:
            Settings.from_environ({meta["names"][0]: str(value)})
        assert meta["names"][0] in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize("text", ["", "many", "1.5", "0x10", "1e3", "nan", "inf"])
def test_what_is_not_an_integer_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_ROWS"):
        Settings.from_environ({"INFERENCE_API_ROWS": text})


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-inf", "1e400"])
def test_what_is_not_a_finite_number_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_QUEUE_SECONDS"):
        Settings.from_environ({"INFERENCE_API_QUEUE_SECONDS": text})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("YES", True), ("", False), ("off", False)])
def test_switches_know_a_few_words(text: str, value: bool) -> None:
    assert Settings.from_environ({"INFERENCE_API_LEGACY_EOS": text}).legacy_eos is value


def test_other_words_for_a_switch_or_a_choice_are_refused() -> None:
    with pytest.raises(SettingError, match="INSECURE_DEV='maybe'"):
        Settings.from_environ({"INSECURE_DEV": "maybe"})
    with pytest.raises(SettingError, match="INFERENCE_API_ENGINE='gpu' is not one of: "):
        Settings.from_environ({"INFERENCE_API_ENGINE": "gpu"})


def test_model_names_are_a_list_with_blanks_removed() -> None:
    assert Settings.from_environ({"SERVED_MODEL_NAMES": " a, b ,,c "}).served_model_names == ("a", "b", "c")


def test_threads_below_rows_queue_and_short_calls_are_refused() -> None:
    assert Settings().min_threads == 160
    with pytest.raises(SettingError, match="160"):
        Settings.from_environ({"INFERENCE_API_THREADS": "159"})
    assert Settings.from_environ({"INFERENCE_API_THREADS": "160"}).threads == 160


def test_the_bound_of_all_rows_holds_at_least_one_whole_context() -> None:
    tight = {"INFERENCE_API_CONTEXT_TOKENS": "256", "INFERENCE_API_KV_TOKENS": "255"}
    with pytest.raises(SettingError, match=r"INFERENCE_API_KV_TOKENS=255 is below INFERENCE_API_CONTEXT_TOKENS=256"):
        Settings.from_environ(tight)
    assert Settings.from_environ({**tight, "INFERENCE_API_KV_TOKENS": "256"}).kv_tokens == 256


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.1", "::"])
def test_the_development_switch_works_on_loopback_only(bind: str) -> None:
    with pytest.raises(SettingError, match="loopback"):
        Settings.from_environ({"INSECURE_DEV": "1", "INFERENCE_API_BIND": bind})
    assert Settings.from_environ({"INSECURE_DEV": "1"}).insecure_dev


def test_a_short_internal_key_is_refused_and_not_printed() -> None:
    with pytest.raises(SettingError) as caught:
        Settings.from_environ({"INTERNAL_AUTH_KEY": "hunch"})
    assert "hunch" not in str(caught.value)


def test_a_folder_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_RUN_DIR is too long"):
        Settings.from_environ({"INFERENCE_API_RUN_DIR": "/" + "x" * 100})


def test_a_child_reads_the_very_same_settings() -> None:
    settings = Settings(
        port=1, insecure_dev=True, served_model_names=("a", "b"), queue_seconds=0.125, mock_faults="nan:A,crash:B"
    )
    assert Settings.from_environ(settings.to_environ()) == settings
    assert Settings.from_environ(Settings().to_environ()) == Settings()


def test_a_child_sees_the_proxys_secrets_only_if_it_is_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JWT_SECRET", "s" * 32)
    monkeypatch.setenv("REDIS_URL", "redis://:word@redis.test")
    monkeypatch.setenv("INFERENCE_API_ROWS", "5")
    environ = child_environ(Settings(rows=7))
    assert "JWT_SECRET" not in environ and "REDIS_URL" not in environ
    assert (environ["INFERENCE_API_ROWS"], environ["OMP_WAIT_POLICY"]) == ("7", "PASSIVE")
    assert proxy_environ(Settings())["JWT_SECRET"] == "s" * 32
    assert proxy_environ(Settings())["REDIS_URL"] == "redis://:word@redis.test"


def test_only_the_server_and_the_proxy_see_the_internal_key(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(internal_auth_key="k" * 32)
    assert child_environ(settings)["INTERNAL_AUTH_KEY"] == "k" * 32
    assert "INTERNAL_AUTH_KEY" not in child_environ(settings, secret=False)
    assert "k" * 32 not in repr(settings)


@pytest.mark.parametrize("name", ["INFERENCE_API_FLASK_SECRET", "FLASK_SECRET"])
def test_flasks_secret_is_seen_by_the_server_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "f" * 32)
    settings = Settings.from_environ()
    assert settings.flask_secret == "f" * 32
    assert "f" * 32 in child_environ(settings).values()
    assert "f" * 32 not in child_environ(settings, secret=False).values()
    assert "f" * 32 not in proxy_environ(settings).values()
    assert proxy_environ(settings)["INFERENCE_API_PORT"] == "7000"


def test_a_watchdog_that_an_idle_backend_would_set_off_is_refused() -> None:
    with pytest.raises(SettingError, match=r"2.0 <= INFERENCE_API_WATCHDOG_SECONDS\."):
        Settings.from_environ({"INFERENCE_API_WATCHDOG_SECONDS": "1.5"})
    assert Settings.from_environ({"INFERENCE_API_WATCHDOG_SECONDS": "2"}).watchdog_seconds == 2.0


def test_the_proxy_gets_the_servers_limits_unless_its_own_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXY_MAX_BODY_BYTES", raising=False)
    monkeypatch.setenv("PROXY_UPSTREAM_TIMEOUT_SECONDS", "7")
    environ = proxy_environ(Settings(body_bytes=4096, total_seconds=1200.0))
    assert environ["PROXY_MAX_BODY_BYTES"] == "4096"
    assert environ["PROXY_UPSTREAM_TIMEOUT_SECONDS"] == "7"


def test_a_mistyped_setting_is_refused_and_named() -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_ROW is not a setting"):
        Settings.from_environ({"INFERENCE_API_ROW": "64"})


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert Settings(bind="::1").url == "http://[::1]:7000"


def test_paths_are_in_the_run_folder_and_two_ports_have_two_folders() -> None:
    settings = Settings(run_dir="/run/x")
    assert settings.socket_path == Path("/run/x/backend.sock")
    assert settings.key_path == Path("/run/x/internal_auth_key")
    assert Settings(internal_auth_key_file="/k").key_path == Path("/k")
    assert Settings(port=1).run_path != Settings(port=2).run_path


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_a_model_name_that_cannot_stand_in_a_path_is_refused() -> None:
    with pytest.raises(SettingError, match="'a/b' cannot stand in a path"):
        Settings.from_environ({"SERVED_MODEL_NAMES": "a/b"})


def test_a_bound_without_an_upper_end_is_told_without_one() -> None:
    with pytest.raises(SettingError, match=r"0.001 <= INFERENCE_API_QUEUE_SECONDS\.$"):
        Settings.from_environ({"INFERENCE_API_QUEUE_SECONDS": "nan"})


@pytest.mark.parametrize("name", ["INFERENCE_API_CACHE_DIR", "MODEL_WEKA_DIR"])
@pytest.mark.parametrize("folder", ["relative", "./relative"])
def test_a_relative_folder_counts_from_where_the_service_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_environ({name: folder, "HF_CACHE": "hub", "INFERENCE_API_RUN_DIR": "run"})
    assert settings.cache_path == tmp_path / "relative"
    assert settings.debug_logs_path == tmp_path / "relative" / "debug_logs"
    assert settings.hf_cache_path == tmp_path / "hub"
    assert (settings.run_path, settings.key_path) == (tmp_path / "run", tmp_path / "run" / "internal_auth_key")
    assert Settings(internal_auth_key_file="key").key_path == tmp_path / "key"
