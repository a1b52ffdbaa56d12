"""The models of --models-dir, with what their headers tell. Loads nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ..control.models.on_demand import Listed
from ..core.errors import BadCheckpoint, TokenmillError
from ..formats.checkpoint import open_text
from ..formats.digest import weight_files
from ..formats.models_dir import list_folder
from ..text.text_model import model_info

log = logging.getLogger(__name__)


class ModelFolder:
    """Files that are as they were are not read again, and what is left out is told once."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._known: dict[str, Listed] = {}
        self._told: set[str] = set()

    def list_models(self) -> dict[str, Listed]:
        """By name, in the order of names. Raises ConfigError where the folder cannot be read."""
        models, left_out = list_folder(self.folder)
        for why in left_out:
            if why not in self._told:
                log.warning("--models-dir: %s", why)
        self._told = set(left_out)
        self._known = {name: self._listed(name, path) for name, path in models.items()}
        return self._known

    def _listed(self, name: str, path: Path) -> Listed:
        try:
            files = [file.stat() for file in weight_files(path)]
        except (OSError, BadCheckpoint) as error:
            return Listed(name, str(path), 0, 0.0, why_not=str(error))
        listed = Listed(name, str(path), sum(each.st_size for each in files), max(each.st_mtime for each in files))
        before = self._known.get(name)
        if before is not None and replace(before, info=None, why_not="") == listed:
            return before
        return _described(listed)


def _described(listed: Listed) -> Listed:
    try:
        checkpoint = open_text(listed.path)
    except (OSError, TokenmillError) as error:
        return replace(listed, why_not=str(error).replace(listed.path, listed.name))
    try:
        return replace(listed, info=model_info(checkpoint))
    finally:
        checkpoint.close()
