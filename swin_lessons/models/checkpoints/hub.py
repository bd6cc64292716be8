"""Published weights by model name, through timm's list of them and the Hugging Face hub."""

from pathlib import Path

FILES = ("model.safetensors", "pytorch_model.bin")
REMEDY = "Fetch the weights where there is a network and pass the file: load_weights(model, path)."


def fetch_pretrained(name: str) -> Path:
    """Download the published weights of a model (or find them in the hub's cache) and return the file.

    `name` is timm's, with a tag ("swin_base_patch4_window7_224.ms_in1k") or without (timm's default tag).
    Files already in the cache need no network.

    Raises:
        ModuleNotFoundError: timm is not installed.
        ValueError: nobody published weights under this name.
        ConnectionError: the hub cannot be reached and the file is not in the cache.
    """
    repo = hub_repo(name)
    try:
        file = _download(repo, local_files_only=True) or _download(repo)
    except OSError as error:  # no network, no such host, refused, an error from the hub
        raise ConnectionError(
            f"cannot fetch the weights of {name!r} ({repo}): {type(error).__name__}: {error}\n{REMEDY}"
        ) from error
    if file is None:
        raise ValueError(f"{repo} on the hub holds none of {FILES}. {REMEDY}")
    return file


def _download(repo: str, **options) -> Path | None:
    """The repository's weight file, or None if it has none (or none in the cache)."""
    from huggingface_hub import hf_hub_download  # comes with timm
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for file in FILES:
        try:
            return Path(hf_hub_download(repo, file, **options))
        except EntryNotFoundError as error:
            offline = isinstance(error, LocalEntryNotFoundError)  # the hub could not be asked
            if offline and "local_files_only" not in options:
                raise
    return None


def hub_repo(name: str) -> str:
    """The hub repository with a model's weights, as timm lists it: "timm/swin_tiny_..._224.ms_in1k"."""
    try:
        from timm.models import get_pretrained_cfg
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'pretrained weights of {name!r} come through timm: pip install "swin-lessons[vision]"'
        ) from error
    try:
        config = get_pretrained_cfg(name)
    except (RuntimeError, ValueError):  # an unknown tag
        config = None
    repo = getattr(config, "hf_hub_id", None)
    if not repo:
        raise ValueError(
            f"no published weights for {name!r} in timm's list (V2-H and V2-G were never released). "
            "Check the name, train it, or pass a file: load_weights(model, path)."
        )
    return repo
