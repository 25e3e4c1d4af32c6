"""Finds a model: a directory, a .gguf file or a hub id. Every failure is one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from edgekv.errors import UserError
from edgekv.export import gguf, refuse
from edgekv.export.checkpoint import Checkpoint
from edgekv.export.quiet import quiet

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Source:
    """A model that was found: its directory, configuration and checkpoint (weights are not read yet).

    tokenizer  text of tokenizer.json; chat_template text or None; generation default sampling options
    token_ids  int64 [K] for a draft whose output layer has K of the tokens only, else None
    cut_head   the checkpoint has the other rows of that layer too; coverage is what the rows that stay have of a text, if that was counted
    """

    name: str
    folder: Path
    config: Any
    checkpoint: Checkpoint
    tokenizer: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: list[int]
    generation: dict[str, float]
    token_ids: Any = None
    cut_head: bool = False
    coverage: float | None = None


def find(model: str, note: Callable[[str], None] = lambda text: None) -> Source:
    """Resolves what the user gave; `note` is told what takes long."""
    path = Path(model).expanduser()
    if path.is_file():
        return _open(gguf.as_directory(path, note), path.stem)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and files:
            raise UserError(f"{path} holds GGUF files; give one of them, for example {files[0]}.")
        return _open(path, path.resolve().name)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or not HUB_ID.fullmatch(model):
        raise UserError(f"There is no model at {model}; give a directory, a .gguf file or a hub id such as organisation/name.")
    note("downloading")
    return _open(_download(model), model.split("/")[-1])


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except RepositoryNotFoundError:
        raise UserError(f"The hub has no model {model}, or it asks for a login; check the name.") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise UserError(f"There is no directory {model}, and the model hub cannot be reached to look for it there.") from None
    except HfHubHTTPError as error:
        raise UserError(f"{model} cannot be downloaded: {str(error).splitlines()[0]}") from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{model} is no directory here and cannot be downloaded: {reason}") from None


def _open(folder: Path, name: str) -> Source:
    config = _config(folder)
    refuse.check_config(config)
    checkpoint = Checkpoint(folder)
    if not checkpoint:
        raise UserError(f"{folder} holds no .safetensors file; save the model with transformers' save_pretrained first.")
    tokenizer, template, special = _tokenizer(folder, config)
    defaults = _generation(folder)
    eos = defaults.get("eos_token_id", config.eos_token_id)
    eos = special["eos"] if eos is None else eos
    bos = config.bos_token_id if config.bos_token_id is not None else special["bos"]
    return Source(
        name=name,
        folder=folder,
        config=config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        chat_template=template,
        bos_token_id=int(bos) if bos is not None else None,
        eos_token_ids=sorted({int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None}),
        generation={k: defaults[k] for k in SAMPLING if isinstance(defaults.get(k), int | float)} if defaults.get("do_sample") else {},
    )


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model directory: it has no config.json.")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text or "custom code" in text:
            raise UserError(f"{folder} brings its own program code, which edgekv does not run; use a model that transformers knows.") from None
        unknown = re.search(r"model type `?(\S+?)`? but Transformers does not recognize", text)
        if unknown:
            raise UserError(f"transformers does not know the architecture {unknown.group(1)!r}; a newer transformers may.") from None
        raise UserError(f"{folder / 'config.json'} cannot be used: {text[:300]}") from None


def _tokenizer(folder: Path, config: Any) -> tuple[str, str | None, dict[str, int | None]]:
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            text = tokenizer.backend_tokenizer.to_str()
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{folder} has no tokenizer that can be saved as tokenizer.json: {reason}") from None
    template = tokenizer.chat_template
    if isinstance(template, dict):  # named templates
        template = template.get("default")
    return text, template, {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}


def _generation(folder: Path) -> dict[str, Any]:
    try:
        with quiet():
            config = GenerationConfig.from_pretrained(folder)
    except Exception:  # optional file
        return {}
    return {name: value for name, value in config.to_dict().items() if value is not None}
