"""A trained model for other software: as a folder, and in a repository of a model hub."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gruppo import trust
from gruppo.config import serialization
from gruppo.inference import load_policy
from gruppo.integrity import SEAL, check_seal, read_json
from gruppo.loading import command_name
from gruppo.modalities.common.adapters import is_adapter, model_of
from gruppo.modalities.text.bundled import ORIGINS
from gruppo.protocols import save_with_origin
from gruppo.tracking.model_card import model_card
from gruppo.tracking.plots import plot_run
from gruppo.trainer import checkpoint
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")

PIPELINE_ADAPTER = "pytorch_lora_weights.safetensors"
"""As diffusers names it."""
CARD, PICTURE = "README.md", "metrics.png"
REPLACED = ["*.safetensors", "*.json", "*.jinja", "*.gguf", PICTURE]
"""Files of a repository that an upload deletes unless it has them: an old adapter_config.json
beside a merged model would make transformers load the adapter's base instead."""


def export(
    model: str | Path,
    folder: Path | None,
    *,
    is_adapter_kept: bool = False,
    push: str = "",
    private: bool = False,
    license: str = "",
    trust_run: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Write a model as a folder of its own, an adapter merged into its base or kept; return where
    it is.

    The model of a run gets a model card. ``push``: upload it to this repository of the hub; without
    ``folder``, it is written nowhere else. ``license``: for the card.
    """
    if folder is None and not push:
        raise GruppoError(f"""no folder was given. For example: {command_name()} export {model}
            exported/, or --push OWNER/NAME.""")
    if folder is not None and folder.exists():
        raise GruppoError(f"the folder {folder} exists already. Name a new one, or delete it.")
    path = Path(model_of(model))
    if is_adapter_kept:
        _check_adapter(path)
    # what may be missing is found before the model is loaded, which may take minutes
    repository = create_repository(push, private=private) if push else ""
    policy = None
    if not is_adapter_kept:
        policy = load_policy(
            model,
            compute="float32",
            is_merged=True,
            trust_run=trust_run,
            trust_remote_code=trust_remote_code,
        )
    with tempfile.TemporaryDirectory() as work:
        target = Path(work) / (push.split("/")[-1] or "model") if folder is None else folder
        with checkpoint.replacing(target) as temporary:
            if policy is None:
                without_seal = shutil.ignore_patterns(SEAL)
                shutil.copytree(path, temporary, dirs_exist_ok=True, ignore=without_seal)
            else:
                save_with_origin(policy, temporary)
        if folder is not None:
            trust.record(folder, trust.imports_of_model(folder))
        try:
            write_card(target, model, license=license, is_online=bool(push))
        except Exception as error:  # of a damaged run; its model is whole
            log.warning("%s has no model card: %s", target.name, " ".join(str(error).split()))
        if repository:
            repository = upload(target, repository, is_kept=folder is not None)
    return " and ".join(str(place) for place in (folder, repository) if place)


def _check_adapter(path: Path) -> None:
    """Refuse to keep the adapter of a model that has none of its own, or a damaged one."""
    if (path / PIPELINE_ADAPTER).is_file():
        raise GruppoError(f"""the adapter of a pipeline is in {path} already, as {PIPELINE_ADAPTER}:
            load it with pipeline.load_lora_weights(folder). Leave --adapter out for the model.""")
    if not is_adapter(path):
        raise GruppoError(f"""{path} has no adapter: its weights themselves were trained. Leave
            --adapter out for the model.""")
    check_seal(path)  # load_policy checks that of a model to be merged


# --- the hub --------------------------------------------------------------------------------------


@contextmanager
def _hub_errors(repository: str, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the client, of its HTTP library, of the network
        text = " ".join(str(getattr(error, "server_message", None) or error).split())
        raise GruppoError(
            f"{repository} was not pushed: {type(error).__name__}: {text:.300}. {advice}"
        ) from error


def create_repository(name: str, *, private: bool | None, token: str | None = None) -> str:
    """Create a repository of the hub unless it is there, before anything that takes long; return
    its full name."""
    from huggingface_hub import HfApi, get_token

    if not (token or get_token()):
        raise GruppoError(
            "pushing to the hub needs a token, and there is none. Run hf auth login, or set "
            "HF_TOKEN."
        )
    hub = HfApi(token=token)
    with _hub_errors(
        name, f"Check the name, the connection, and that your token may write to {hub.endpoint}."
    ):
        created = hub.create_repo(name, private=private or None, exist_ok=True).repo_id
        is_public = private and not hub.model_info(created).private
    if is_public:  # of one that exists, the hub ignores the argument
        raise GruppoError(
            f"{created} exists and is public. Make it private on the hub, or name another one."
        )
    return created


def upload(
    model: Path,
    repository: str,
    *,
    message: str = "Trained with gruppo",
    token: str | None = None,
    revision: str | None = None,
    is_kept: bool = False,
) -> str:
    """Upload a model's folder to a repository in place of the model that it has; return the address
    of the commit.

    ``revision``: a branch, created if it is missing. ``is_kept``: the folder remains where the
    upload fails.
    """
    from huggingface_hub import HfApi

    again = f"What is written can be pushed with: hf upload {repository} {model}"
    with _hub_errors(
        repository, again if is_kept else "Nothing is kept of what was to be pushed; push again."
    ):
        hub = HfApi(token=token)
        if revision is not None:
            hub.create_branch(repository, branch=revision, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            folder_path=model,
            revision=revision,
            commit_message=message,
            delete_patterns=REPLACED,
        )
    return str(commit.commit_url)


def write_card(model: Path, run: str | Path, *, license: str = "", is_online: bool = False) -> None:
    """Write the model card of a run's model and its curves; after the seal, so that whoever edits
    it damages no model.

    ``run``: the run's folder or its final model. Other models have no card. ``is_online``: draw
    missing curves.
    """
    path = Path(run).expanduser()
    folder = path if (path / "manifest.json").is_file() else path.parent
    if not (folder / "manifest.json").is_file() or not (folder / "config.json").is_file():
        return
    name = serialization.load(folder / "config.json").model
    match = re.fullmatch(r"(?:diffusers:)?([\w.-]+/[\w.-]+)", name)
    base, known = (match[1], "") if match else ("", "")
    if not match:
        source = read_json(folder / "manifest.json")["model"].get("source", "")
        base, known = ORIGINS.get(source, ("", ""))
    picture = folder / "plots" / "overview.png"
    if is_online and not picture.is_file():  # runs in Python draw none
        with suppress(OSError):  # a folder that may not be written to
            plot_run(folder)
    if picture.is_file():
        shutil.copyfile(picture, model / PICTURE)
    shown = PICTURE if picture.is_file() else ""
    text = model_card(folder, model, base=base, license=license or known, picture=shown)
    (model / CARD).write_text(text, encoding="utf-8")
