"""Owns the way from what a user names (a path or a Hugging Face id) to files on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jpaged.checkpoint.tensors import CheckpointError

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def resolve(path_or_id: str | os.PathLike, revision: str | None) -> Path:
    """The file or directory meant. A path that exists wins; a hub id is downloaded, or taken from the cache."""
    if not isinstance(path_or_id, (str, os.PathLike)) or not str(path_or_id):
        raise CheckpointError(f"path_or_id must be a path or a hub id like 'org/name', got {path_or_id!r}")
    try:
        path = Path(path_or_id).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: "~name" of nobody
        raise CheckpointError(
            f"{str(path_or_id)[:200]!r} cannot be looked up: {getattr(error, 'strerror', error)}"
        ) from error
    if exists:
        if revision is not None:
            raise CheckpointError(f"{path} is on this machine, so revision {revision!r} means nothing: leave it out")
        return path
    if not isinstance(path_or_id, str) or not HUB_ID.fullmatch(path_or_id):
        raise CheckpointError(f"{str(path_or_id)!r} is neither an existing path nor a hub id like 'org/name': check it")
    return _snapshot(path_or_id, revision)


def _snapshot(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub  # here: slow to import, and only hub ids need it
    from huggingface_hub import errors

    try:
        # Folders inside a repository hold the same weights again, in their authors' own formats.
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except errors.RepositoryNotFoundError as error:
        cure = "check the name, and for a private or gated repository log in (`hf auth login`)"
        raise CheckpointError(f"{repo_id!r} is not on the hub, nor a path on this machine: {cure}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo_id!r} has no revision {revision!r} on the hub: check it") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{repo_id!r}{at} is not in the local hub cache, and the hub cannot be reached{offline}: "
            "connect, or download it elsewhere and pass the directory"
        ) from error
    return Path(folder)
